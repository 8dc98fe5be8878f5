"""What an algorithm writes at an event is what is computed with: runs that are the same without it.

A law asks that every later event has it, at each event and of each computation of the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from tests.support import problem
from tests.support.problem import LR, cross_entropy, mlp, noisy
from tests.support.streams import assert_same

E = pl.Event
DATA, OTHER, HELD_OUT = problem.points(2, seed=4), problem.points(2, seed=9), problem.points(1, seed=5)
Change = Callable[[pl.State], pl.State]


def fit(*algorithms: pl.Algorithm, data: Any = DATA, model: Any = None, **changes: Any) -> Any:
    return problem.fit(model, data, algorithms, **{"max_duration": "1ep", "strict": None, **changes})


def at(event: E, change: Change) -> pl.Algorithm:
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


def times(outputs: float, loss: float) -> Any:
    return lambda given, targets: loss * cross_entropy(given * outputs, targets)


FORWARD, BACKWARD = (E.AFTER_FORWARD, E.BEFORE_LOSS), (E.AFTER_LOSS, E.BEFORE_BACKWARD)
STARTS = (E.FIT_START, E.EPOCH_START, E.BEFORE_DATALOADER, E.AFTER_DATALOADER, E.BATCH_START, E.BEFORE_TRAIN_BATCH)
# What is written, where, and the run that is the same without it.
SAME: dict[str, tuple[tuple[E, ...], Change, dict[str, Any]]] = {
    "batch": (STARTS[3:], sets("batch", lambda state: OTHER[state.timestamp.batch_in_epoch]), {"data": OTHER}),
    "microbatch": (
        (E.BEFORE_FORWARD,),
        sets("microbatch", lambda state: (2 * state.microbatch[0], state.microbatch[1])),
        {"data": [(2 * x, y) for x, y in DATA]},
    ),
    "targets": (
        FORWARD,
        sets("microbatch", lambda state: (state.microbatch[0], torch.zeros_like(state.microbatch[1]))),
        {"data": [(x, torch.zeros_like(y)) for x, y in DATA]},
    ),
    "outputs": (FORWARD, sets("outputs", lambda state: state.outputs / 2), {"loss": times(0.5, 1)}),
    "loss": (BACKWARD, sets("loss", lambda state: 3 * state.loss), {"loss": times(1, 3)}),
    "params": (STARTS, lambda state: state if state.timestamp.batch else scaled(0.0)(state), {"model": zeros()}),
}


@pytest.mark.parametrize("field", SAME)
def test_what_is_written_before_the_backward_is_what_is_trained_on(field: str) -> None:
    events, change, same = SAME[field]
    for size in (None, 3):
        wanted = trained(microbatch_size=size, **same)
        for event in events:
            assert_same(trained(at(event, change), microbatch_size=size), wanted, event.name)


def test_a_penalty_on_the_parameters_has_its_gradient() -> None:
    """An L2 penalty adds its derivative, 2 * 0.01 * w, to the gradient, whatever the split; one computed early, too."""
    early: list[Tensor] = []

    def penalty(state: pl.State) -> Any:
        return 0.01 * sum(p.square().sum() for p in state.params.values())

    def compute(state: pl.State) -> pl.State:
        early.append(penalty(state))
        return state

    late = sets("loss", lambda state: state.loss + early.pop())
    for size in (3, None):
        plain = next(state for event, state in fit(microbatch_size=size) if event is E.AFTER_TRAIN_BATCH)
        for algorithms in (
            [pl.algorithm(E.AFTER_FORWARD, name="compute")(compute), at(E.BEFORE_BACKWARD, late)],
            [at(E.AFTER_LOSS, sets("loss", lambda state: state.loss + penalty(state)))],
        ):
            stream = fit(*algorithms, microbatch_size=size)
            given = next(state for event, state in stream if event is E.AFTER_TRAIN_BATCH)
            for name, gradient in plain.grads.items():
                torch.testing.assert_close(given.grads[name], gradient + 0.02 * plain.params[name])
            torch.testing.assert_close(given.loss, plain.loss + penalty(plain))


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


def test_memory_of_the_optimizer_buffers_and_parameters_are_what_was_written() -> None:
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
    for event in (E.BATCH_END, E.BATCH_CHECKPOINT, E.EPOCH_END, E.EPOCH_CHECKPOINT):
        seen = [state for later, state in fit(at(event, scaled(0.0)), max_duration="2ep") if later is E.BATCH_START]
        following = seen[1:] if event in (E.BATCH_END, E.BATCH_CHECKPOINT) else seen[2:3]
        assert not any(p.any() for state in following for p in state.params.values())


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
        zero: Change = lambda state: scaled(0.0)(state) if state.evaluator == "a" else state  # noqa: E731
        state = measured(at(event, zero), a=HELD_OUT, b=HELD_OUT)
        torch.testing.assert_close(state.metrics["a"]["loss"], alike)
        assert_same(state.metrics["b"], plain.metrics["val"], "the second evaluator")
        assert_same(dict(state.params), dict(plain.params), "training resumes from its own parameters")
    annotate = sets("metrics", lambda state: {**state.metrics, "mine": pl.FrozenDict(size=torch.tensor(4.0))})
    found = measured(at(E.EVAL_END, annotate)).metrics
    assert (float(found["mine"]["size"]), list(found["val"])) == (4.0, ["loss", "accuracy"])
