"""What is decided in Python while a step is traced: another graph, an error, or eager steps."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Barrier
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import ema
from pure_loop.compile import record
from pure_loop.errors import ArgumentError, ArgumentTypeError, CompileError, NonFiniteError
from tests.support.compiling import (
    BATCHES,
    SHORT,
    WITH_NAN,
    Named,
    assert_close,
    every_third,
    fit,
    named_batches,
    several,
    stream,
)
from tests.support.models import CLASSES, FEATURES, batches, plain
from tests.support.tiers import tiers

pytestmark = pytest.mark.usefixtures("interpreted")


@pl.algorithm(Event.AFTER_LOSS)
def counts_some(state: pl.State) -> pl.State:
    some = state.outputs[:, 0] > 0
    batch = state.timestamp.batch
    return state.replace(outputs=(state.outputs, some * batch, torch.where(some, batch, 0)))


def test_a_number_beside_truth_values_is_a_whole_number() -> None:
    settings: dict[str, Any] = {**SHORT, "algorithms": [counts_some], "watch": BATCHES}
    assert_close(fit(compile=True, **settings), fit(**settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_a_number_is_compared_with_a_tensor_number_by_number(name: str) -> None:
    compare = getattr(operator, name)

    @pl.algorithm(Event.AFTER_LOSS)
    def compares(state: pl.State) -> pl.State:
        some, batch = state.batch[1], state.timestamp.batch
        return state.replace(outputs=(compare(batch, some), compare(some, batch)))

    settings: dict[str, Any] = {**SHORT, "algorithms": [compares], "watch": BATCHES}
    assert_close(fit(compile=True, **settings), fit(**settings))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_a_number_that_becomes_minus_zero_has_its_sign(dtype: torch.dtype) -> None:
    """It equals zero, so that it seems to be what it was in the step before."""

    @pl.algorithm(Event.AFTER_LOSS)
    def signs(state: pl.State) -> pl.State:
        return state.replace(outputs=torch.ones((), dtype=dtype) * (0.0 * (2 - state.timestamp.batch)))

    settings: dict[str, Any] = {**SHORT, "algorithms": [signs], "watch": BATCHES}
    compiled, eager = fit(compile=True, **settings), fit(**settings)
    found, wanted = ([bool(state.outputs.signbit()) for _, state in states] for states in (compiled, eager))
    assert found == wanted
    assert set(found) == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_a_number_too_large_for_the_tensor_it_meets_wraps_around(dtype: torch.dtype) -> None:
    @pl.algorithm(Event.AFTER_LOSS)
    def overflows(state: pl.State) -> pl.State:
        batch, some = state.timestamp.batch, torch.arange(3).to(dtype)
        large = (batch + 3) * (2**31 + 300)
        return state.replace(outputs=(some + large, large * some, some > large, some - (batch + 7)))

    settings: dict[str, Any] = {**SHORT, "algorithms": [overflows], "watch": BATCHES}
    assert_close(fit(compile=True, **settings), fit(**settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lt", "eq", "mul", "truediv"])
def test_a_number_meets_an_array_element_by_element(name: str) -> None:
    operate, array = getattr(operator, name), numpy.array([0.5, 1.0, 2.0])

    @pl.algorithm(Event.AFTER_LOSS)
    def operates(state: pl.State) -> pl.State:
        number = state.timestamp.batch + 1
        found = operate(number, array), operate(array, number), numpy.sqrt([number, 1])
        return state.replace(outputs=tuple(map(torch.from_numpy, found)))

    settings: dict[str, Any] = {**SHORT, "algorithms": [operates], "watch": BATCHES, "max_duration": "2ba"}
    assert_close(fit(compile=True, **settings), fit(**settings))


@pytest.mark.slow
def test_a_number_of_numpys_is_a_number() -> None:
    """A graph serves every step: nothing in it is decided by the number."""

    @pl.algorithm(Event.AFTER_LOSS)
    def scales(state: pl.State) -> pl.State:
        batch, tenth = state.timestamp.batch, numpy.float64(0.1)
        return state.replace(loss=state.loss * (batch * tenth + tenth * batch))

    settings: dict[str, Any] = {**SHORT, "algorithms": [scales], "watch": BATCHES, "max_duration": "10ba"}
    assert_close(fit(compile=True, **settings), fit(**settings))


class Scale:
    """Equal to itself alone, and with no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, by: int) -> None:
        self.by = by


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.layer(batch["x"]) * batch["scale"].by
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch["y"])


@pytest.mark.slow
def test_an_object_that_comes_to_lie_where_another_one_lay_is_another_one() -> None:
    def data() -> Iterator[dict[str, Any]]:
        for i, (x, y) in enumerate(batches((8,) * 6, 1)):
            yield {"x": x, "y": y, "scale": Scale(i)}

    def trained(**settings: Any) -> Any:
        # States that are kept would keep the objects.
        ((_, state),) = fit(Scaled, data=data(), loss=None, watch={Event.FIT_END}, max_duration="6ba", **settings)
        return state.params

    torch.testing.assert_close(trained(compile=True), trained())


class OfReal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.layer(z.real)
        return out


@pytest.mark.parametrize("which", ["neg", "conj"])
def test_a_tensor_that_shows_the_negative_or_the_conjugate_of_its_memory_is_refused(which: str) -> None:
    z, targets = torch.view_as_complex(torch.randn(8, FEATURES, 2)), torch.zeros(8, dtype=torch.long)
    as_it_is, lazy = (z.imag, z.conj().imag) if which == "neg" else (z, z.conj())
    for before in [], [(as_it_is, targets)]:
        with pytest.raises(CompileError, match=rf"hand over tensor\.resolve_{which}\(\)"):
            fit(OfReal, compile=True, data=[*before, (lazy, targets)])


@pl.algorithm(Event.AFTER_LOSS)
def anneal(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * (1 - 0.5 * state.timestamp.elapsed))


@pl.algorithm(Event.BATCH_END, init=lambda state: 0)
def count(state: pl.State) -> pl.State:
    return state.remember("count", state.algorithm_state["count"] + 1)


@pl.algorithm(Event.AFTER_LOSS)
def by_the_batch(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * float(1 + state.timestamp.batch))


@pl.algorithm(Event.AFTER_TRAIN_BATCH)
def on_large_losses(state: pl.State) -> pl.State:
    if state.loss > 0.5:
        return state.replace(grads={name: grad / 2 for name, grad in state.grads.items()})
    return state


def test_numbers_that_change_need_no_other_graph() -> None:
    settings = SHORT | {"algorithms": [anneal, count, ema(half_life="3ba")]}
    with record() as made:
        compiled = fit(compile=True, **settings)
    assert_close(compiled, fit(**settings))
    assert [(each.segment, each.number) for each in made] == [("step", 1)]
    assert compiled[-1][1].algorithm_state["count"] == 10


def test_another_shape_and_another_decision_are_another_graph() -> None:
    with record() as made:
        fit(compile=True, model=plain, algorithms=[every_third], data=batches((8, 8, 8, 8, 5), 1))
    assert [each.number for each in made] == [1, 2, 3, 4]
    assert "every_third" in made[1].reason
    assert "shapes" in made[2].reason


def test_an_evaluation_makes_no_other_graph_of_the_step() -> None:
    with record() as made:
        fit(compile=True, evaluators=batches((8,), 2), eval_interval="1ba", **SHORT)
    assert sorted(each.segment for each in made) == ["evaluation", "step"]


@pytest.mark.slow
def test_a_number_baked_into_every_graph_is_an_error() -> None:
    with pytest.raises(CompileError, match=r"by_the_batch.*AFTER_LOSS.*state\.timestamp\.batch") as caught:
        fit(compile=True, algorithms=[by_the_batch], **SHORT)
    assert "where possible" in str(caught.value)


def test_what_cannot_be_traced() -> None:
    with pytest.raises(CompileError, match=r"on_large_losses.*AFTER_TRAIN_BATCH.*state\.loss > 0\.5.*torch\.where"):
        fit(compile=True, algorithms=[on_large_losses], **SHORT)
    settings = SHORT | {"algorithms": [ema(half_life="3ba"), on_large_losses]}
    assert_close(fit(compile="where possible", **settings), fit(**settings))


@pytest.mark.slow
def test_memory_in_numpy_cannot_be_traced() -> None:
    def note(state: pl.State) -> pl.State:
        return state.remember("np", state.algorithm_state["np"] * 0.5 + 1)

    algorithm = pl.Algorithm("np", {Event.BATCH_END: note}, init=lambda state: numpy.zeros(3))
    settings: dict[str, Any] = {**SHORT, "algorithms": [algorithm]}
    with pytest.raises(CompileError, match=r"^algorithm 'np' at BATCH_END .* its memory is NumPy's"):
        fit(compile=True, **settings)
    found, wanted = (fit(compile=each, **settings)[-1][1].algorithm_state["np"] for each in ("where possible", False))
    numpy.testing.assert_array_equal(found, wanted)


class Reads(nn.Module):
    """A forward that looks at its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if out.abs().max().item() < 100 else out.clamp(-100, 100)


def test_a_model_that_cannot_be_traced() -> None:
    with pytest.raises(CompileError, match=r"forward of Reads.*out\.abs\(\)\.max\(\)\.item\(\)"):
        fit(Reads, compile=True)
    settings: dict[str, Any] = {"evaluators": batches((8,), 2), "watch": BATCHES}
    assert_close(fit(Reads, compile="where possible", **settings), fit(Reads, **settings))


@pytest.mark.slow
def test_threads_that_compile_at_once() -> None:
    seeds = range(3)
    ready, watch = Barrier(len(seeds)), {Event.EPOCH_START, Event.EPOCH_END}

    def trained(seed: int, *, together: bool) -> list[tuple[Event, pl.State]]:
        found = []
        for event, state in stream(plain, compile=True, seed=seed, data=batches((8, 8, 5), seed), watch=watch):
            if together and event is Event.EPOCH_START and state.timestamp.epoch == 0:
                ready.wait(60)
            found.append((event, state))
        return found

    with ThreadPoolExecutor(len(seeds)) as pool:
        # Whether graphs are compiled or run as they are is a variable of the context.
        threads = [pool.submit(copy_context().run, trained, seed, together=True) for seed in seeds]
        for seed, thread in zip(seeds, threads, strict=True):
            assert_close(thread.result(), trained(seed, together=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    "watch", tiers([BATCHES, {Event.AFTER_BACKWARD, *BATCHES}], [BATCHES]), ids=["a step", "pieces"]
)
def test_what_each_batch_holds_besides_tensors_is_refused_after_a_few_graphs(watch: Any) -> None:
    data = [{**batch, "name": [f"{i}", "b"], "index": i} for i, batch in enumerate(named_batches() * 4)]
    settings: dict[str, Any] = {"model": Named, "data": data, "loss": None, "watch": watch, "max_duration": "1ep"}
    says = r"batch 8 would need .*'index'\] is 8, .*'name'\] is \['8', 'b'\]\."
    with record() as graphs, pytest.raises(CompileError, match=says):
        fit(compile=True, **settings)
    assert max(each.number for each in graphs) == 8
    assert_close(fit(compile="where possible", **settings), fit(**settings))


@pytest.mark.slow
def test_where_possible_with_every_event() -> None:
    settings: dict[str, Any] = {"watch": None, "algorithms": several(), "max_duration": "2ba"}
    assert_close(fit(compile="where possible", **settings), fit(**settings))


def test_a_loss_that_is_not_finite() -> None:
    with pytest.raises(NonFiniteError, match=r"batch 1 .*the loss is not finite"):
        fit(compile=True, data=WITH_NAN)


def test_an_update_that_is_not_finite() -> None:
    with pytest.raises(NonFiniteError, match=r"batch 0 .*optimizer's step"):
        fit(plain, compile=True, optimizer=pl.optim.sgd(lr=1e38), loss=lambda o, t: 1e10 * cross_entropy(o, t))


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"compile": "always"}, ArgumentError, "where possible"),
        ({"compile": 1}, ArgumentError, "compile=1"),
        ({"compile": True, "steps_per_call": 0}, ArgumentError, "at least 1"),
        ({"compile": True, "steps_per_call": 2.5}, ArgumentTypeError, "whole number"),
        ({"steps_per_call": 2}, ArgumentError, "compile=True"),
        ({"compile": True, "steps_per_call": 2, "order": "2021"}, ArgumentError, "2021"),
    ],
)
def test_the_door(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fit(**settings)
