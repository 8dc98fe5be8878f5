"""The driver's promises that no law says: no error is lost, and no callback or algorithm spoils what others need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event

DATA = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))] * 3


def fit(**changes: Any) -> pl.Stream:
    arguments: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.adamw(), "max_duration": "2ep"}
    return pl.fit(nn.Linear(3, 2), DATA, **(arguments | changes))


def stops(*_: Any) -> Any:
    return next(iter(()))


def test_an_escaped_stop_iteration_does_not_end_training_in_silence() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        pl.run(fit(algorithms=[pl.algorithm(Event.BATCH_END)(stops)]))
    with pytest.raises(RuntimeError, match="StopIteration"):
        pl.run(fit(callbacks=[stops]))
    # Inside the gradient that SAM asks for, which no generator yields.
    with pytest.raises((RuntimeError, StopIteration)):
        pl.run(fit(algorithms=[pl.algorithms.sam(), pl.algorithm(Event.AFTER_LOSS)(stops)]))


@pytest.mark.parametrize("how", ["none", "shape", "structure"])
def test_an_algorithm_that_spoils_the_optimizer_memory_is_named(how: str) -> None:
    @pl.algorithm(Event.BATCH_END)
    def spoil(state: pl.State) -> pl.State:
        if how == "none":
            return state.replace(opt_state=None)
        if how == "structure":
            return state.replace(opt_state={**state.opt_state, "more": torch.zeros(())})
        spoiled = optree.tree_map(
            lambda leaf: leaf[None] if isinstance(leaf, torch.Tensor) else leaf, state.opt_state, namespace="pure_loop"
        )
        return state.replace(opt_state=spoiled)

    with pytest.raises(pl.AlgorithmStructureError, match=r"algorithm 'spoil' at BATCH_END changed .*opt_state"):
        pl.run(fit(algorithms=[spoil]))


def test_an_algorithm_may_change_the_optimizer_memory() -> None:
    @pl.algorithm(Event.BATCH_END)
    def forget(state: pl.State) -> pl.State:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in state.opt_state["exp_avg"].items()}
        return state.replace(opt_state=pl.FrozenDict({**state.opt_state, "exp_avg": pl.FrozenDict(zeros)}))

    last = pl.run(fit(algorithms=[forget]))
    assert all(not tensor.any() for tensor in last.opt_state["exp_avg"].values())


@pytest.mark.parametrize("donate", ["auto", True, False])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_an_algorithm_may_return_what_the_stages_gave_it(donate: Any, microbatch_size: int | None) -> None:
    """``stages.gradients`` gives a State of the same event."""

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def again(state: pl.State, stages: Any) -> pl.State:
        result: pl.State = stages.gradients(state)
        assert result.event is state.event
        return result

    options = {"donate": donate, "microbatch_size": microbatch_size}
    runs = []
    for algorithms in ([], [again]):
        torch.manual_seed(0)
        runs.append(pl.run(fit(algorithms=algorithms, **options)))
    assert all(torch.equal(tensor, runs[1].params[name]) for name, tensor in runs[0].params.items())


def test_a_state_that_an_algorithm_keeps_without_an_event_is_not_written_to() -> None:
    kept = []

    @pl.algorithm(Event.BATCH_START)
    def keep(state: pl.State) -> pl.State:
        kept.append(state.replace(event=None))
        return kept[-1]

    assert [event for event, state in fit(algorithms=[keep]) if state.event is not event] == []
    assert all(state.event is None for state in kept)


@pytest.mark.parametrize("microbatch_size", [None, 1, 2])
def test_a_microbatch_of_padding_alone_counts_nothing(microbatch_size: int | None) -> None:
    """Its mean loss is 0 / 0."""
    targets = torch.tensor([1, -100, -100, 0])
    order = torch.tensor([0, 3, 1, 2])
    data = [(torch.arange(12.0).reshape(4, 3)[order] / 12, targets[order])]
    task = pl.Task(weight=lambda batch: int((batch[1] != -100).sum()))

    def gradients(size: int | None) -> Any:
        torch.manual_seed(0)
        stream = pl.fit(
            nn.Linear(3, 2), data, loss=cross_entropy, task=task, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
            microbatch_size=size,
        )  # fmt: skip
        return next((state.grads, state.loss) for event, state in stream if event is Event.AFTER_TRAIN_BATCH)

    (grads, loss), (whole, whole_loss) = gradients(microbatch_size), gradients(None)
    torch.testing.assert_close(loss, whole_loss)
    for name, gradient in whole.items():
        torch.testing.assert_close(grads[name], gradient)


def test_closing_calls_all_even_if_one_raises() -> None:
    closed = []

    class Closes(pl.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def batch_end(self, state: pl.State, logger: Any) -> None:
            pass

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "first":
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        pl.run(fit(callbacks=[Closes("first"), Closes("second")]))
    assert closed == ["first", "second"]


def test_what_a_loader_raises_when_it_is_closed_keeps_no_callback_open() -> None:
    closed = []

    class Loader:
        def __iter__(self) -> Any:
            def batches() -> Any:
                try:
                    yield from DATA
                finally:
                    raise OSError("connection lost")

            return batches()

    class Closes(pl.Callback):
        def batch_end(self, state: pl.State, logger: Any) -> None:
            pass

        def close(self) -> None:
            closed.append(self)

    stream = pl.fit(
        nn.Linear(3, 2), Loader(), loss=cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
        callbacks=[Closes()],
    )  # fmt: skip
    next(state for event, state in stream if event is Event.BATCH_START)
    with pytest.raises(OSError, match="connection lost"):
        stream.close()
    assert len(closed) == 1


def test_a_script_of_ones_own_does_not_write_to_the_state_it_was_given() -> None:
    def script(state: pl.State) -> Any:
        state = yield Event.BATCH_START, state
        state = yield Event.BATCH_END, state
        return state

    start = pl.State.create(nn.Linear(3, 2))
    assert pl.run(pl.drive(script(start))).event is Event.BATCH_END
    assert (start.event, start.position) == (None, None)


@pytest.mark.parametrize("what", [Event.BATCH_START, (Event.BATCH_START, None), ("batch_start", "state"), None])
def test_what_a_script_yields_is_an_event_and_a_state(what: Any) -> None:
    def script() -> Any:
        yield what

    with pytest.raises(pl.ArgumentTypeError, match=r"state = yield Event\.BATCH_START, state"):
        pl.run(pl.drive(script()))


def test_a_run_that_starts_from_an_evaluation_begins_with_init() -> None:
    evaluated = pl.run(pl.evaluate(nn.Linear(3, 2), {"val": DATA}, loss=cross_entropy))
    settings: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    assert next(pl.fit(evaluated, DATA, **settings))[0] is Event.INIT
    trained = pl.run(pl.fit(evaluated, DATA, **settings))
    again = pl.run(pl.evaluate(trained, {"val": DATA}, loss=cross_entropy))
    assert next(pl.fit(again, DATA, **(settings | {"max_duration": "2ep"})))[0] is Event.FIT_START


def test_outputs_of_a_class_that_torch_knows_lose_their_graph() -> None:
    class Output(dict[str, Any]):
        pass

    torch.utils._pytree.register_pytree_node(
        Output, lambda out: (list(out.values()), list(out)), lambda values, keys: Output(zip(keys, values, strict=True))
    )

    class Model(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            return Output(logits=super().forward(inputs))

    def loss(outputs: Any, targets: Any) -> torch.Tensor:
        return cross_entropy(outputs["logits"], targets)

    stream = pl.fit(Model(3, 2), DATA, loss=loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ba")
    after = next(state for event, state in stream if event is Event.AFTER_BACKWARD)
    assert type(after.outputs) is Output
    assert after.outputs["logits"].grad_fn is None


def own_optimizer(returned: Callable[[dict[str, torch.Tensor]], Any]) -> pl.Optimizer:
    """Plain SGD, of which something is made of the new parameters."""

    def update(grads: Any, opt_state: Any, params: Any, timestamp: pl.Timestamp) -> Any:
        return returned({name: tensor - 0.1 * grads[name] for name, tensor in params.items()}), opt_state

    return pl.Optimizer(name="own", init=lambda params: None, update=update, lr=lambda timestamp: 0.1)


def test_an_optimizer_may_give_parameters_in_another_order_and_not_of_other_names() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    orders: list[Callable[[dict[str, torch.Tensor]], Any]] = [dict, lambda new: dict(reversed(new.items()))]
    one, other = [
        pl.run(pl.fit(model, DATA, loss=cross_entropy, optimizer=own_optimizer(order), max_duration="1ep"))
        for order in orders
    ]
    assert list(other.params) == ["weight", "bias"]
    assert all(torch.equal(one.params[name], tensor) for name, tensor in other.params.items())
    for wrong in (lambda new: {**new, "more": torch.ones(1)}, lambda new: {"weight": new["weight"]}):
        with pytest.raises(
            pl.ArgumentError, match=r"'own': update returned parameters of other names: \['(more|bias)'\]"
        ):
            pl.run(fit(optimizer=own_optimizer(wrong)))


def test_gradients_that_an_algorithm_returns_are_detached() -> None:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def differentiable(state: pl.State) -> pl.State:
        weight = torch.ones_like(state.grads["weight"]).requires_grad_()
        return state.replace(grads={"weight": 2 * weight, "bias": None})

    for event, state in fit(algorithms=[differentiable]):
        if event is Event.AFTER_TRAIN_BATCH:
            assert not state.grads["weight"].requires_grad
            assert state.grads["bias"] is None


def test_inference_mode_around_training_is_named() -> None:
    with torch.inference_mode(), pytest.raises(pl.LossError, match=r"inside torch\.inference_mode"):
        pl.run(fit())


def test_numpy_that_a_handler_loads_was_not_drawn_from() -> None:
    """In a process that has not used NumPy's generator yet."""
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
