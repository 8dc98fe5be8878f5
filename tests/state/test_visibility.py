"""What an algorithm writes at an event is what every later event and computation reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support import problem
from tests.support.problem import LR, mlp, noisy
from tests.support.streams import assert_same

DATA, OTHER, HELD_OUT = problem.points(2, seed=4), problem.points(2, seed=9), problem.points(1, seed=5)
E = Event
Change = Callable[[pl.State], pl.State]


def fit(*algorithms: pl.Algorithm, data: Any = DATA, model: Any = None, **changes: Any) -> Any:
    return problem.fit(model, data, algorithms, **{"max_duration": "1ep", "strict": None, **changes})


def at(event: Event, change: Change) -> pl.Algorithm:
    return pl.algorithm(event, name="writer")(change)


def trained(*algorithms: pl.Algorithm, **changes: Any) -> dict[str, Tensor]:
    return dict(pl.run(fit(*algorithms, **changes)).params)


def sets(field: str, make: Callable[[pl.State], Any]) -> Change:
    return lambda state: state.replace(**{field: make(state)})


def scaled(factor: float) -> Change:
    return sets("params", lambda state: {name: p * factor + 0.0 for name, p in state.params.items()})


def zeros() -> nn.Module:
    model = mlp()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def times(factor: float) -> Any:
    return lambda outputs, targets: functional.cross_entropy(outputs * factor, targets)


ANOTHER_BATCH = sets("batch", lambda state: OTHER[state.timestamp.batch_in_epoch])
DOUBLED = sets("microbatch", lambda state: (2 * state.microbatch[0], state.microbatch[1]))
FIRST_CLASS = sets("microbatch", lambda state: (state.microbatch[0], torch.zeros_like(state.microbatch[1])))
AT_FIRST: Change = lambda state: state if state.timestamp.batch else scaled(0.0)(state)  # noqa: E731
# What is written, where, and the run that is the same without it.
SAME: dict[str, tuple[list[Event], Change, dict[str, Any]]] = {
    "batch": ([E.AFTER_DATALOADER, E.BATCH_START, E.BEFORE_TRAIN_BATCH], ANOTHER_BATCH, {"data": OTHER}),
    "microbatch": ([E.BEFORE_FORWARD], DOUBLED, {"data": [(2 * x, y) for x, y in DATA]}),
    "targets": ([E.AFTER_FORWARD, E.BEFORE_LOSS], FIRST_CLASS, {"data": [(x, torch.zeros_like(y)) for x, y in DATA]}),
    "outputs": (
        [E.AFTER_FORWARD, E.BEFORE_LOSS],
        sets("outputs", lambda state: state.outputs / 2),
        {"loss": times(0.5)},
    ),
    "loss": (
        [E.AFTER_LOSS, E.BEFORE_BACKWARD],
        sets("loss", lambda state: 3 * state.loss),
        {"loss": lambda outputs, targets: 3 * functional.cross_entropy(outputs, targets)},
    ),
    "params": (
        [E.FIT_START, E.EPOCH_START, E.BEFORE_DATALOADER, E.AFTER_DATALOADER, E.BATCH_START, E.BEFORE_TRAIN_BATCH],
        AT_FIRST,
        {"model": zeros()},
    ),
}


@pytest.mark.parametrize("field", SAME)
def test_what_is_written_before_the_backward_is_what_is_trained_on(field: str) -> None:
    events, change, same = SAME[field]
    for size in (None, 3):
        wanted = trained(microbatch_size=size, **same)
        for event in events:
            assert_same(trained(at(event, change), microbatch_size=size), wanted, event.name)


@pytest.mark.parametrize(
    ("event", "size"), [(E.AFTER_FORWARD, 3), (E.AFTER_LOSS, 3), (E.BEFORE_BACKWARD, 3), (E.AFTER_FORWARD, None)]
)
def test_a_penalty_on_the_parameters_has_its_gradient(event: Event, size: int | None) -> None:
    """An L2 penalty adds its derivative, 2 * 0.01 * w, to the gradient, whatever the split."""
    penalised: list[Tensor] = []

    def compute(state: pl.State) -> pl.State:
        penalised.append(0.01 * sum(p.square().sum() for p in state.params.values()))
        return state

    def add(state: pl.State) -> pl.State:
        return (state if penalised else compute(state)).replace(loss=state.loss + penalised.pop())

    early = [pl.algorithm(event, name="compute")(compute)] if event is E.AFTER_FORWARD else []
    late = pl.algorithm(E.BEFORE_BACKWARD if early else event, name="add")(add)
    plain, given = (
        next(state for event, state in fit(*made, microbatch_size=size) if event is E.AFTER_TRAIN_BATCH)
        for made in ([], [*early, late])
    )
    for name, gradient in plain.grads.items():
        torch.testing.assert_close(given.grads[name], gradient + 0.02 * plain.params[name])
    extra = sum(0.01 * p.square().sum() for p in plain.params.values())
    torch.testing.assert_close(given.loss, plain.loss + extra)


def first_step(*algorithms: pl.Algorithm, **changes: Any) -> tuple[pl.State, pl.State]:
    """The State before and after the first step."""
    stream = dict(fit(*algorithms, **{"max_duration": "1ba", **changes}))
    return stream[E.FIT_START], stream[E.BATCH_END]


def test_gradients_are_what_was_written() -> None:
    # Doubling what has accumulated after each of two microbatches of equal size: 4 g1 + 2 g2, over two.
    double = at(E.AFTER_BACKWARD, sets("grads", lambda s: {name: 2 * g for name, g in s.grads.items()}))
    halves = [tuple(part[k : k + 2] for part in DATA[0]) for k in (0, 2)]
    g1, g2 = (first_step(data=[half])[1].grads for half in halves)
    _, given = first_step(double, microbatch_size=2)
    for name in g1:
        torch.testing.assert_close(given.grads[name], (4 * g1[name] + 2 * g2[name]) / 2)
    ones = sets("grads", lambda s: {name: torch.ones_like(g) for name, g in s.grads.items()} | {"0.weight": None})
    start, end = first_step(at(E.AFTER_TRAIN_BATCH, ones))
    for name, parameter in start.params.items():
        assert torch.equal(end.params[name], parameter if name == "0.weight" else parameter - LR)
    for event in (E.AFTER_BACKWARD, E.AFTER_TRAIN_BATCH):  # the step starts from these parameters
        start, end = first_step(at(event, scaled(0.5)))
        for name, parameter in start.params.items():
            assert torch.equal(end.params[name], torch.add(parameter / 2, end.grads[name], alpha=-LR))


def test_parameters_between_batches_are_those_of_the_next() -> None:
    for event in (E.BATCH_END, E.BATCH_CHECKPOINT, E.EPOCH_END, E.EPOCH_CHECKPOINT):
        seen = [state for later, state in fit(at(event, scaled(0.0)), max_duration="2ep") if later is E.BATCH_START]
        following = seen[1:] if event in (E.BATCH_END, E.BATCH_CHECKPOINT) else seen[2:3]
        assert following
        assert not any(p.any() for state in following for p in state.params.values())


def test_memory_of_the_optimizer_and_buffers_are_what_was_written() -> None:
    """Momentum set to 0 before every step is no momentum."""

    def forget(state: pl.State) -> pl.State:
        zero = {name: torch.zeros_like(b) for name, b in state.opt_state["momentum_buffer"].items()}
        return state.replace(opt_state=pl.FrozenDict({**state.opt_state, "momentum_buffer": pl.FrozenDict(zero)}))

    for event, data in ((E.AFTER_TRAIN_BATCH, DATA), (E.BATCH_END, DATA), (E.EPOCH_CHECKPOINT, DATA[:1])):
        options = {"data": data, "max_duration": "2ep"}
        given = trained(at(event, forget), optimizer=pl.optim.sgd(lr=LR, momentum=0.9), **options)
        assert_same(given, trained(**options), event.name)
    reset = sets("buffers", lambda state: {**state.buffers, "1.num_batches_tracked": torch.tensor(41)})
    for event, count in ((E.BEFORE_FORWARD, 42), (E.BATCH_END, 41)):
        end = pl.run(fit(at(event, reset), model=noisy()))
        after: Any = end.module()
        assert int(end.buffers["1.num_batches_tracked"]) == int(after[1].num_batches_tracked) == count


def measured(*algorithms: pl.Algorithm, **evaluators: Any) -> pl.State:
    return pl.run(fit(*algorithms, evaluators=evaluators or {"val": HELD_OUT}))


def test_what_is_written_in_an_evaluation_serves_it_and_nothing_else() -> None:
    plain, alike = measured(), torch.tensor(3.0).log()  # three classes, all alike
    certain = sets("outputs", lambda s: 100.0 * functional.one_hot(s.microbatch[1], s.outputs.shape[1]))
    metrics = measured(at(E.EVAL_AFTER_FORWARD, certain)).metrics["val"]
    assert float(metrics["accuracy"]) == 1.0
    assert float(metrics["loss"]) < 1e-6 < float(plain.metrics["val"]["loss"])
    for event, field in ((E.EVAL_BATCH_START, "batch"), (E.EVAL_BEFORE_FORWARD, "microbatch")):
        given = measured(at(event, sets(field, lambda state: OTHER[0]))).metrics
        assert_same(given, measured(val=OTHER[:1]).metrics, event.name)
    for event in (E.EVAL_START, E.EVAL_BATCH_START, E.EVAL_BEFORE_FORWARD):
        state = measured(at(event, scaled(0.0)))
        torch.testing.assert_close(state.metrics["val"]["loss"], alike)
        assert_same(dict(state.params), dict(plain.params), "training resumes from its own parameters")
    zero_a: Change = lambda state: scaled(0.0)(state) if state.evaluator == "a" else state  # noqa: E731
    found = measured(at(E.EVAL_START, zero_a), a=HELD_OUT, b=HELD_OUT).metrics
    torch.testing.assert_close(found["a"]["loss"], alike)
    assert_same(found["b"], plain.metrics["val"], "the second evaluator")
    annotate = sets("metrics", lambda state: {**state.metrics, "mine": pl.FrozenDict(size=torch.tensor(4.0))})
    found = measured(at(E.EVAL_END, annotate)).metrics
    assert float(found["mine"]["size"]) == 4.0
    assert "loss" in found["val"]


def test_memory_is_what_was_written_at_any_event() -> None:
    def count(state: pl.State) -> pl.State:
        assert state.algorithm_state["count"] == len(seen)
        seen.append(state.event)
        return state.remember("count", len(seen))

    seen: list[Any] = []
    # Memory is made after INIT.
    counter = pl.Algorithm("count", {tuple(e for e in Event if e is not E.INIT): count}, init=lambda state: 0)
    events = [event for event, _ in fit(counter, evaluators={"val": HELD_OUT}, microbatch_size=3)]
    assert seen == events[1:]


def test_what_one_algorithm_writes_the_next_one_and_callbacks_read() -> None:
    seen: list[Tensor] = []

    def look(event: Event, state: pl.State) -> None:
        if event is E.BATCH_START:
            seen.append(state.batch[0])

    double = at(E.BATCH_START, sets("batch", lambda state: (2 * state.batch[0], state.batch[1])))
    reader = pl.Algorithm("reader", {E.BATCH_START: lambda state: look(E.BATCH_START, state) or state})
    pl.run(fit(double, reader, callbacks=[look], max_duration="1ba"))
    assert [torch.equal(batch, 2 * DATA[0][0]) for batch in seen] == [True, True]
