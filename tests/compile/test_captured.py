"""Tensors that models, losses and algorithms have from elsewhere, or twice: read anew, and not written to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.pytree import NAMESPACE
from pure_loop.compile import interpreted, record
from pure_loop.errors import CompileError
from tests.support.compiling import BATCHES, SHORT, assert_close, fit, stream
from tests.support.models import CLASSES, FEATURES, batches, plain


def with_a_teacher(watch: set[Event], **settings: Any) -> Any:
    """Weights and a teacher change in place, between the steps; the teacher's parameters require gradients."""
    weights = torch.ones(CLASSES)
    with pl.random.seeded(5):
        teacher = plain()

    @pl.algorithm(Event.AFTER_FORWARD)
    def distilled(state: pl.State) -> pl.State:
        with torch.no_grad():
            target = teacher(state.batch[0])
        return state.replace(outputs=state.outputs + 0.5 * target)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, weight=weights)

    settings |= {**SHORT, "loss": loss, "algorithms": [distilled], "max_duration": "3ba"}
    for event, state in stream(watch=watch | BATCHES, **settings):
        if event is Event.BATCH_END:
            weights[0] += state.timestamp.batch
            teacher.load_state_dict(state.params)
    return state.params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("watch", "compiler"),
    [
        (set(), True),  # which makes of constants what they are: the interpreter reads them anew anyway
        ({Event.BEFORE_LOSS}, False),
        pytest.param({Event.BEFORE_LOSS}, True, marks=pytest.mark.thorough),
    ],
    ids=["one graph", "pieces, interpreted", "pieces"],
)
def test_what_has_changed_in_place_is_read_anew(watch: set[Event], compiler: bool) -> None:
    with nullcontext() if compiler else interpreted():
        found = with_a_teacher(watch, compile=True)
    torch.testing.assert_close(dict(found), dict(with_a_teacher(watch)))


def test_what_the_step_makes_of_numbers_may_be_written_to() -> None:
    made = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        made.append(torch.tensor([1.0, 2.0, 3.0]))
        made[-1][0] = 2.0
        return cross_entropy(outputs, targets, weight=made[-1])

    with interpreted():
        found = fit(compile=True, loss=loss, **SHORT)
    assert len(made) == 1
    assert_close(found, fit(loss=loss, **SHORT))


counts = torch.zeros(2)


@pl.algorithm(Event.AFTER_TRAIN_BATCH)
def counts_batches(state: pl.State) -> pl.State:
    counts[1].add_(1)
    return state


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        counts[:] = counts + 1
        out: Tensor = self.layer(x)
        return out


def counting(outputs: Tensor, targets: Tensor) -> Tensor:
    torch.add(counts, 1, out=counts)
    return cross_entropy(outputs, targets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "who"),
    [
        ({"algorithms": [counts_batches]}, "algorithm 'counts_batches' at AFTER_TRAIN_BATCH"),
        ({"model": Counting}, "the forward of Counting"),
        ({"loss": counting}, "the loss"),
    ],
    ids=["algorithm", "model", "loss"],
)
def test_who_writes_to_it_is_named_or_runs_eagerly(settings: dict[str, Any], who: str) -> None:
    settings = {**SHORT, **settings}
    says = f"^{who} can't be compiled: it writes to a tensor outside of the State"
    with interpreted():
        with pytest.raises(CompileError, match=says):
            fit(compile=True, **settings)
        before = counts.sum().item()
        with record() as made:
            found = fit(compile="where possible", **settings)
    assert_close(found, fit(**settings))
    assert counts.sum() >= before + 2 * len(SHORT["data"])
    assert made


def test_one_of_another_shape_is_an_error() -> None:
    weights = torch.ones(CLASSES)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (cross_entropy(outputs, targets) * weights).sum()

    def shrinks(event: Event, state: pl.State) -> None:
        if event is Event.BATCH_END:
            weights.resize_(())

    settings: dict[str, Any] = {**SHORT, "loss": loss, "watch": BATCHES, "callbacks": [shrinks]}
    with interpreted(), pytest.raises(CompileError, match=r"shape \(3,\) and dtype .*'.*' .* \(\) .* at batch 1"):
        fit(compile=True, **settings)


class InPlace(nn.Module):
    """Writes to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.relu_())
        return out


def pairs(second: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
    with pl.random.seeded(1):
        both = [torch.randn(16, FEATURES) for _ in range(2)]
    return [(each[:8], second(each)) for each in both]


@pytest.mark.parametrize("microbatch_size", [None, 4])
@pytest.mark.parametrize("which", ["rows that it looks at", "other rows"])
def test_inputs_that_are_targets_too_are_not_written_to(which: str, microbatch_size: int | None) -> None:
    rows = slice(8) if which == "rows that it looks at" else slice(8, None)
    settings: dict[str, Any] = {"loss": nn.functional.mse_loss, "microbatch_size": microbatch_size}

    def trained(compile: Any) -> Any:
        return fit(InPlace, data=pairs(lambda each: each[rows]), compile=compile, **settings)

    with interpreted():
        if which == "other rows":
            assert_close(trained(True), trained(False))
            return
        with pytest.raises(CompileError, match=r"^the forward of InPlace can't be .* shares .* x = x\.clone\(\)"):
            trained(True)
        assert_close(trained("where possible"), trained(False))


class Factor:
    """A number, hashed and compared by its value, that is written to."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Factor) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


FACTORS = [1.0, 2.0, 3.0, 1.0]


def with_a_factor_in_the_batch(**settings: Any) -> Any:
    factor = Factor(0.0)

    class Loader:
        def __iter__(self) -> Any:
            for (x, y), value in zip(batches((8,) * 4, 1), FACTORS, strict=True):
                factor.value = value
                yield x, y, factor

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch[1]) * batch[2].value

    task = pl.Task(forward=lambda model, batch: model(batch[0]), loss=loss)
    return fit(plain, data=Loader(), task=task, loss=None, max_duration="4ba", **settings)


def with_a_factor_in_memory(**settings: Any) -> Any:
    @pl.algorithm(Event.BATCH_START)
    def written(state: pl.State) -> pl.State:
        factor = state.algorithm_state.get("factor") or Factor(0.0)
        factor.value = FACTORS[state.timestamp.batch]
        return state.remember("factor", factor)

    @pl.algorithm(Event.AFTER_LOSS)
    def read(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss * state.algorithm_state["factor"].value)

    settings["watch"] = settings["watch"] | {Event.BATCH_START}
    data = batches((8,) * 4, 1)
    return fit(plain, data=data, algorithms=[written, read], max_duration="4ba", **settings)


@pytest.mark.parametrize("inside", [None, Event.AFTER_LOSS, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH])
@pytest.mark.parametrize("train", [with_a_factor_in_the_batch, with_a_factor_in_memory])
def test_a_value_that_is_written_to_is_another_value(train: Callable[..., Any], inside: Event | None) -> None:
    """It is equal to itself, and a graph holds what it was."""
    watch = {Event.BATCH_END, *([] if inside is None else [inside])}
    with interpreted():
        found = [state.params for event, state in train(watch=watch, compile=True) if event is Event.BATCH_END]
    wanted = [state.params for event, state in train(watch={Event.BATCH_END}) if event is Event.BATCH_END]
    torch.testing.assert_close(list(map(dict, found)), list(map(dict, wanted)))


@pytest.mark.usefixtures("interpreted")
def test_a_library_may_register_sets_as_nodes() -> None:
    optree.register_pytree_node(frozenset, lambda s: (sorted(s), None), lambda _, s: frozenset(s), namespace=NAMESPACE)
    try:
        found = fit(plain, compile=True, watch=BATCHES)
    finally:
        optree.unregister_pytree_node(frozenset, namespace=NAMESPACE)
    assert_close(found, fit(plain, watch=BATCHES))
