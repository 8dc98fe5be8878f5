"""Values that models, losses and algorithms have from elsewhere, or twice: read anew, and not written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.pytree import NAMESPACE
from pure_loop.compile import interpreted
from tests.support import problem
from tests.support.compiling import BATCHES, FIVE, INSIDE, SHORT, assert_close, net, same, stream


def trained(watch: set[Event], data: Any = FIVE, **settings: Any) -> list[Any]:
    """The parameters after each batch."""
    pairs = stream(problem.mlp, data, watch=watch | BATCHES, max_duration="5ba", **settings)
    return [dict(state.params) for event, state in pairs if event is Event.BATCH_END]


def with_a_teacher(watch: set[Event], **settings: Any) -> Any:
    """Weights and a teacher change in place, between the steps; the teacher's parameters require gradients."""
    weights, teacher = torch.ones(3), problem.mlp(5)

    @pl.algorithm(Event.AFTER_FORWARD)
    def distilled(state: pl.State) -> pl.State:
        with torch.no_grad():
            target = teacher(state.batch[0])
        return state.replace(outputs=state.outputs + 0.5 * target)

    def changed(event: Event, state: pl.State) -> None:
        if event is Event.BATCH_END:
            weights[0] += state.timestamp.batch
            teacher.load_state_dict(state.params)

    settings |= {"loss": lambda outputs, targets: cross_entropy(outputs, targets, weight=weights)}
    return trained(watch, algorithms=[distilled], callbacks=[changed], **settings)


class Factor:
    """A number, hashed and compared by its value, that is written to."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Factor) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


class NoHash:
    """Equal to itself alone; another one may come to lie where it lay."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: float) -> None:
        self.value = value


WRITTEN, OTHERS = [1.0, 2.0, 2.0, 1.0, 3.0], [1.0, 1.0, 2.0, 2.0, 1.0]


def with_factors(watch: set[Event], **settings: Any) -> Any:
    """Each batch has a value that is written to, and another object."""
    factor = Factor(0.0)

    class Loader:
        def __iter__(self) -> Any:
            for (x, y), factor.value, other in zip(FIVE, WRITTEN, OTHERS, strict=True):
                yield x, y, factor, NoHash(other)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch[1]) * batch[2].value + outputs.mean() * batch[3].value

    task = pl.Task(forward=lambda model, batch: model(batch[0]), loss=loss)
    return trained(watch, Loader(), task=task, loss=None, **settings)


def with_a_factor_in_memory(watch: set[Event], **settings: Any) -> Any:
    @pl.algorithm(Event.BATCH_START)
    def writes(state: pl.State) -> pl.State:
        factor = state.algorithm_state.get("factor") or Factor(0.0)
        factor.value = WRITTEN[state.timestamp.batch]
        return state.remember("factor", factor)

    @pl.algorithm(Event.AFTER_LOSS)
    def reads(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss * state.algorithm_state["factor"].value)

    return trained(watch | {Event.BATCH_START}, algorithms=[writes, reads], **settings)


READ: dict[Callable[..., Any], list[set[Event]]] = {
    with_a_teacher: [set(), {INSIDE[1]}, {Event.AFTER_BACKWARD}],
    with_factors: [set()],
    with_a_factor_in_memory: [set()],
}


def test_what_has_changed_in_place_is_read_anew() -> None:
    for run, watched in READ.items():
        for inside in watched:
            with interpreted():
                found = run(inside, compile=True)
            torch.testing.assert_close(found, run(inside))


@pytest.mark.slow
def test_a_compiler_reads_what_has_changed_in_place_anew() -> None:
    """It makes constants of what the interpreter reads anew anyway."""
    torch.testing.assert_close(with_a_teacher(set(), compile=True), with_a_teacher(set()))


@pytest.mark.usefixtures("interpreted")
def test_what_the_step_makes_of_numbers_may_be_written_to() -> None:
    made = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        made.append(torch.tensor([1.0, 2.0, 3.0]))
        made[-1][0] = 2.0
        return cross_entropy(outputs, targets, weight=made[-1])

    same({**SHORT, "loss": loss})
    assert len(made) == 1 + 10


@pytest.mark.usefixtures("interpreted")
def test_other_rows_that_are_targets_may_be_written_to() -> None:
    both = torch.cat([x for x, _ in FIVE[:2]])
    settings = {"model": net(lambda self, x: self.one(x.relu_()), lambda: torch.nn.Linear(4, 4)), "loss": mse_loss}
    for size in (None, 4):
        copies = [[(each[:8], each[8:])] for each in (both.clone(), both.clone())]
        found, wanted = (
            list(stream(**settings, data=data, microbatch_size=size, compile=compiles))
            for data, compiles in zip(copies, (True, False), strict=True)
        )
        assert_close(found, wanted)


@pytest.mark.usefixtures("interpreted")
def test_a_library_may_register_sets_as_nodes() -> None:
    optree.register_pytree_node(frozenset, lambda s: (sorted(s), None), lambda _, s: frozenset(s), namespace=NAMESPACE)
    try:
        same({**SHORT, "watch": BATCHES, "max_duration": "2ba"})
    finally:
        optree.unregister_pytree_node(frozenset, namespace=NAMESPACE)
