"""The driver's promises that no law says: no error is lost, and no callback or algorithm spoils what others need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from tests.support.problem import cross_entropy, fit, mlp, points, run
from tests.support.streams import assert_same

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


@pytest.mark.parametrize("donate", ["auto", True, False])
def test_an_algorithm_may_return_what_the_stages_gave_it(donate: Any) -> None:
    """``stages.gradients`` gives a State of the same event."""

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def again(state: pl.State, stages: Any) -> pl.State:
        result: pl.State = stages.gradients(state)
        assert result.event is state.event
        return result

    for size in (None, 2):
        options = {"donate": donate, "microbatch_size": size, "strict": None}
        assert_same(dict(run(algorithms=[again], **options).params), dict(run(**options).params), f"{size}")


def test_a_state_that_an_algorithm_keeps_without_an_event_is_not_written_to() -> None:
    kept = []

    @pl.algorithm(Event.BATCH_START)
    def keep(state: pl.State) -> pl.State:
        kept.append(state.replace(event=None))
        return kept[-1]

    assert [event for event, state in fit(algorithms=[keep]) if state.event is not event] == []
    assert [state.event for state in kept] == [None] * 6


def test_a_state_that_an_algorithm_kept_is_refused() -> None:
    kept: list[pl.State] = []

    def return_the_first(state: pl.State) -> pl.State:
        kept.append(state)
        return kept[0]

    both = (Event.BATCH_START, Event.BEFORE_TRAIN_BATCH)
    for events, says in ((both[:1], "changed timestamp"), (both, r"State of BATCH_START: .*had\s+kept.*Return state")):
        with pytest.raises(pl.AlgorithmStructureError, match=f"algorithm 'mine' at .*{says}"):
            run(algorithms=[pl.algorithm(*events, name="mine")(return_the_first)])
        kept.clear()


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


@pytest.mark.parametrize("size", [1, 2])
def test_a_microbatch_of_padding_alone_counts_nothing(size: int) -> None:
    """Its mean loss is 0 / 0."""
    targets = torch.tensor([1, 0, -100, -100])
    task = pl.Task(weight=lambda batch: int((batch[1] != -100).sum()))
    given, whole = (
        next(
            ({**state.grads, "loss": state.loss})
            for event, state in fit(data=[(DATA[0][0], targets)], task=task, microbatch_size=each)
            if event is Event.AFTER_TRAIN_BATCH
        )
        for each in (size, None)
    )
    torch.testing.assert_close(given, whole)


class Closes(pl.Callback):
    def __init__(self, name: str, closed: list[str], error: str = "") -> None:
        self.name, self.closed, self.error = name, closed, error

    def batch_end(self, state: pl.State, logger: Any) -> None: ...

    def close(self) -> None:
        self.closed.append(self.name)
        if self.error:
            raise OSError(self.error)


def test_closing_calls_all_even_if_one_raises_and_where_the_loop_was_left() -> None:
    closed: list[str] = []
    callbacks = [Closes("first", closed, "disk full"), Closes("second", closed)]
    with pytest.raises(OSError, match="disk full"):
        run(callbacks=callbacks)
    assert closed == ["first", "second"]

    class Loader:
        def __iter__(self) -> Any:
            try:
                yield from DATA
            finally:
                raise OSError("disk full")

    stream = fit(data=Loader(), callbacks=[Closes("first", closed), Closes("second", closed)])
    next(state for event, state in stream if event is Event.BATCH_START)
    with pytest.raises(OSError, match="disk full"):
        stream.close()
    assert closed == ["first", "second"] * 2


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
        with pytest.raises(pl.ArgumentTypeError, match=r"state = yield Event\.BATCH_START, state"):
            pl.run(pl.drive(each for each in [what]))


def test_a_run_that_starts_from_an_evaluation_begins_with_init() -> None:
    evaluated = pl.run(pl.evaluate(mlp(), {"val": DATA}, loss=cross_entropy))
    assert next(fit(evaluated))[0] is Event.INIT
    again = pl.run(pl.evaluate(run(evaluated), {"val": DATA}, loss=cross_entropy))
    assert next(fit(again, max_duration="3ep"))[0] is Event.FIT_START


def test_a_run_of_which_nothing_watched_comes_gives_the_state_in_which_it_ended() -> None:
    assert_same(run(watch={Event.EVAL_END}), run(), "at the end")


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


def own_optimizer(returned: Callable[[dict[str, Tensor]], Any]) -> pl.Optimizer:
    """Plain SGD, of which something is made of the new parameters."""

    def update(grads: Any, opt_state: Any, params: Any, timestamp: pl.Timestamp) -> Any:
        return returned({name: tensor - 0.1 * grads[name] for name, tensor in params.items()}), opt_state

    return pl.Optimizer(name="own", init=lambda params: None, update=update, lr=lambda timestamp: 0.1)


def test_an_optimizer_gives_parameters_of_the_same_names() -> None:
    for wrong in (lambda new: {**new, "more": torch.ones(1)}, lambda new: {"0.weight": new["0.weight"]}):
        with pytest.raises(pl.ArgumentError, match=r"'own': update returned parameters of other names: \['(more|0\.b)"):
            run(optimizer=own_optimizer(wrong))


@pytest.mark.slow  # a process that has not used NumPy's generator yet
def test_numpy_that_a_handler_loads_was_not_drawn_from() -> None:
    script = """
import torch, pure_loop as pl
@pl.algorithm("batch_start")
def load(state):
    import numpy.random
    return state
data = [(torch.ones(2, 2), torch.ones(2, 1))]
pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
              max_duration="1ep", algorithms=[load], strict=True))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
