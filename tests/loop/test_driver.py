"""The driver's promises that no law says: no error is lost, and no callback or algorithm spoils what others need.

Uses in which a functional loop could silently train wrongly: right, or an error that says what to write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import AlgorithmStructureError, ArgumentError, ArgumentTypeError, LossError, ModelError
from pure_loop.random import seeded
from tests.support.problem import cross_entropy, fit, mlp, points, run
from tests.support.streams import assert_same, assert_same_stream

DATA, READY = points(), (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)


def stops(*_: Any) -> Any:
    return next(iter(()))


def test_an_escaped_stop_iteration_does_not_end_training_in_silence() -> None:
    # The last one is inside the gradient that SAM asks for, which no generator yields.
    in_sam = [pl.algorithms.sam(), pl.algorithm(Event.AFTER_LOSS)(stops)]
    for options in ({"algorithms": [pl.algorithm(Event.BATCH_END)(stops)]}, {"callbacks": [stops]}):
        with pytest.raises(RuntimeError, match="StopIteration"):
            run(**options)
    with pytest.raises((RuntimeError, StopIteration)):
        run(algorithms=in_sam)


def test_an_algorithm_may_return_what_the_stages_gave_it() -> None:
    """``stages.gradients`` gives a State of the same event."""

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def again(state: pl.State, stages: Any) -> pl.State:
        result: pl.State = stages.gradients(state)
        assert result.event is state.event
        return result

    for donate, size in (("auto", 2), (True, None), (False, 2)):
        options: dict[str, Any] = {"donate": donate, "microbatch_size": size, "strict": None}
        assert_same(dict(run(algorithms=[again], **options).params), dict(run(**options).params), f"{donate}, {size}")


def test_a_state_that_an_algorithm_kept_is_not_written_to_and_not_taken_back() -> None:
    kept: list[pl.State] = []

    @pl.algorithm(Event.BATCH_START)
    def keep(state: pl.State) -> pl.State:
        kept.append(state.replace(event=None))
        return kept[-1]

    assert [event for event, state in fit(algorithms=[keep]) if state.event is not event] == []
    assert [state.event for state in kept] == [None] * 6

    def return_the_first(state: pl.State) -> pl.State:
        kept.append(state)
        return kept[0]

    both = (Event.BATCH_START, Event.BEFORE_TRAIN_BATCH)
    for events, says in ((both[:1], "changed timestamp"), (both, r"State of BATCH_START: .*had\s+kept.*Return state")):
        kept.clear()
        with pytest.raises(AlgorithmStructureError, match=f"algorithm 'mine' at .*{says}"):
            run(algorithms=[pl.algorithm(*events, name="mine")(return_the_first)])


def test_gradients_that_an_algorithm_returns_are_detached_and_none_to_those_who_only_look() -> None:
    seen: dict[Event, Any] = {}

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def differentiable(state: pl.State) -> pl.State:
        weight = torch.ones_like(state.grads["0.weight"]).requires_grad_()
        return state.replace(grads={**dict.fromkeys(state.grads), "0.weight": 2 * weight})

    for event, state in fit(
        algorithms=[differentiable], callbacks=[lambda event, state: seen.update({event: state.grads})]
    ):
        assert (state.grads is None) is (seen[event] is None)
        assert state.grads is None or event in READY
        if event is Event.AFTER_TRAIN_BATCH:
            assert not state.grads["0.weight"].requires_grad
            assert state.grads["0.bias"] is None
    assert all(seen[event] is not None for event in READY)


def test_scripts_of_ones_own() -> None:
    """The State that one was given is not written to; what one yields is an event and a State."""

    def script(state: pl.State) -> Any:
        state = yield Event.BATCH_START, state
        state = yield Event.BATCH_END, state
        return state

    start = pl.State.create(mlp())
    assert pl.run(pl.drive(script(start))).event is Event.BATCH_END
    assert (start.event, start.position) == (None, None)
    for what in (Event.BATCH_START, (Event.BATCH_START, None), ("batch_start", start), None):
        with pytest.raises(ArgumentTypeError, match=r"state = yield Event\.BATCH_START, state"):
            pl.run(pl.drive(each for each in [what]))


def test_where_a_run_starts_and_ends() -> None:
    """From an evaluation: with INIT. Without a watched event: in the State in which it ended."""
    evaluated = pl.run(pl.evaluate(mlp(), {"val": DATA}, loss=cross_entropy))
    assert next(fit(evaluated))[0] is Event.INIT
    again = pl.run(pl.evaluate(run(evaluated), {"val": DATA}, loss=cross_entropy))
    assert next(fit(again, max_duration="3ep"))[0] is Event.FIT_START
    assert_same(run(watch={Event.EVAL_END}), run(), "at the end")


def test_what_algorithms_change_is_what_the_next_stage_takes_and_a_loss_is_not_rescaled_in_place() -> None:
    """In Composer a batch is split before BEFORE_TRAIN_BATCH, and the parts of a loss are multiplied in place."""
    plus_one = pl.algorithm(Event.AFTER_BACKWARD)(lambda state: state.replace(loss=state.loss.detach() + 1))
    losses = [[s.loss for e, s in fit(algorithms=a) if e is Event.BATCH_END] for a in ([plus_one], [])]
    torch.testing.assert_close(losses[0], [loss + 1 for loss in losses[1]])
    cut = pl.algorithm(Event.BEFORE_TRAIN_BATCH)(lambda s: s.replace(batch=tuple(part[:3] for part in s.batch)))
    wanted = run(data=[tuple(part[:3] for part in batch) for batch in DATA], microbatch_size=2).params
    assert_same(dict(run(algorithms=[cut], microbatch_size=2).params), dict(wanted), "cut before the split")

    def parts(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"total": cross_entropy(outputs, targets), "penalty": outputs.square().mean()}

    numbers = lambda loss: [float(part.detach()) for part in loss.values()]  # noqa: E731
    at = (Event.AFTER_LOSS, Event.AFTER_BACKWARD)
    shown = [(s.loss, numbers(s.loss)) for e, s in fit(loss=parts, microbatch_size=2) if e in at]
    assert all(numbers(loss) == before for loss, before in shown)
    assert [before for _, before in shown[::2]] == [before for _, before in shown[1::2]]


def test_outputs_of_a_class_that_torch_knows_lose_their_graph() -> None:
    class Output(dict[str, Any]):
        pass

    torch.utils._pytree.register_pytree_node(
        Output, lambda out: (list(out.values()), list(out)), lambda values, keys: Output(zip(keys, values, strict=True))
    )

    class Model(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return Output(logits=super().forward(inputs))

    stream = fit(Model(4, 3), loss=lambda outputs, targets: cross_entropy(outputs["logits"], targets))
    after = next(state for event, state in stream if event is Event.AFTER_BACKWARD)
    assert type(after.outputs) is Output
    assert after.outputs["logits"].grad_fn is None


def test_an_optimizer_gives_parameters_of_the_same_names() -> None:
    def own(returned: Callable[[Any], Any]) -> pl.Optimizer:
        def update(grads: Any, opt_state: Any, params: Any, timestamp: pl.Timestamp) -> Any:
            return returned(params), opt_state

        return pl.Optimizer(name="own", init=lambda params: None, update=update, lr=lambda timestamp: 0.1)

    for wrong in (lambda new: {**new, "more": torch.ones(1)}, lambda new: {"0.weight": new["0.weight"]}):
        with pytest.raises(ArgumentError, match=r"'own': update returned parameters of other names: \['(more|0\.b)"):
            run(optimizer=own(wrong))


class Checkpointed(nn.Module):
    """Goes through the module again in the backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        with seeded(0):
            self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2))
            self.head = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x.detach().requires_grad_(), use_reentrant=self.reentrant))


class OwnLoss(nn.Linear):
    """Its loss reads what its forward left behind, and counts its calls in a buffer."""

    def __init__(self) -> None:
        with seeded(0):
            super().__init__(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: Any) -> Tensor:
        self.hidden = batch[0] * 2
        return super().forward(self.hidden)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, batch[1]) + super().forward(self.hidden).square().mean()


def test_a_state_trains_in_several_threads_as_it_does_alone() -> None:
    """Each recomputes with its own weights, and so do two streams in turn."""
    options: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "strict": None}
    start = next(state for event, state in fit(Checkpointed(), DATA, **options) if event is Event.AFTER_LOAD)
    wanted, found, before = run(start, DATA, **options), list[pl.State](), torch.get_rng_state()
    *_, (_, (_, last)) = zip(fit(start, [(x + 1, y) for x, y in DATA], **options), fit(start, DATA, **options))  # noqa: B905
    threads = [threading.Thread(target=lambda: found.append(run(start, DATA, **options))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    for state in (*found, last):
        assert_same(state.replace(model=start.model), wanted.replace(model=start.model), "in a thread")
    assert torch.equal(torch.get_rng_state(), before)


def test_predicting_in_a_callback_and_autocast_around_the_loop_change_nothing() -> None:
    for make in (Checkpointed, OwnLoss):
        task = pl.Task(forward=lambda model, batch, own=make is OwnLoss: model(batch if own else batch[0]))

        def predicts(event: Event, state: pl.State, task: pl.Task = task) -> None:
            if event in (Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD):
                pl.run(pl.predict(state, DATA[:1], task=task))

        options: dict[str, Any] = {"loss": None if make is OwnLoss else cross_entropy, "evaluators": DATA[:1]}
        wanted = list(fit(make(), DATA, **options))
        assert_same_stream(list(fit(make(), DATA, callbacks=[predicts], **options)), wanted, "predicting")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same_stream(list(fit(make(), DATA, **options)), wanted, "inside autocast")
    assert float(wanted[-1][1].buffers["calls"]) == 6  # a loss of the module's own may write buffers


def test_what_differentiates_outside_of_the_loop_is_refused() -> None:
    with pytest.raises(ModelError, match="use_reentrant=False"):
        run(Checkpointed(reentrant=True))
    with torch.inference_mode(), pytest.raises(LossError, match=r"inside torch\.inference_mode"):
        run()
