"""Every function of the user's that a run calls may draw from a global generator, and the run is what it was.

Tried: each place by itself and several at once; torch's, Python's and NumPy's generator; other states of the
generators around the run, which are found there afterwards; a run that resumes from any of its batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate

import pure_loop as pl
from pure_loop import Event
from pure_loop.optim import Optimizer
from tests.support.optimizing import WRAPPERS
from tests.support.problem import fit, mlp
from tests.support.tiers import examples

PLACES = (
    *("algorithm", "when", "init", "callback", "metric", "train metric", "forward", "task forward", "validate", "loss"),
    *("dataset", "collate", "optimizer", "interval", "clip_grad"),
)
KINDS = ["torch", "python", "numpy"]


class Drawn:
    """Factors near 1 from one of the global generators, where a place is among those that draw."""

    def __init__(self, kind: str, places: Iterable[str]) -> None:
        self.kind, self.places = kind, frozenset(places)
        # What a callback drew, which changes nothing.
        self.log: list[tuple[int, float]] = []

    def factor(self, place: str) -> float:
        if place not in self.places:
            return 1.0
        if self.kind == "torch":
            return 1 + float(torch.rand((), dtype=torch.float64)) / 10
        return 1 + (random.random() if self.kind == "python" else float(numpy.random.rand())) / 10


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.linspace(-1, 1, 4) * (index + 1)
        return inputs * self.drawn.factor("dataset"), torch.full((3,), index / 8)


class Net(nn.Module):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.layers, self.drawn = mlp(), drawn

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs) * self.drawn.factor("forward")  # type: ignore[no-any-return]


def run_of(drawn: Drawn, start: Any = None) -> pl.Stream:
    def update(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
        rate = 0.1 * drawn.factor("optimizer")
        return {name: tensor - rate * grads[name] for name, tensor in params.items()}, opt_state

    def clip(grads: Any, params: Any) -> Any:
        return {name: gradient * drawn.factor("clip_grad") for name, gradient in grads.items()}

    def collate(rows: Any) -> Any:
        inputs, targets = default_collate(rows)
        return inputs * drawn.factor("collate"), targets

    def scaled(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss * state.algorithm_state["scaled"] * drawn.factor("algorithm"))

    def watch(event: Event, state: pl.State) -> None:
        if event is Event.AFTER_LOSS:
            drawn.log.append((state.timestamp.batch, drawn.factor("callback")))

    def loader() -> Any:
        return DataLoader(Rows(drawn), batch_size=2, shuffle=True, collate_fn=collate)

    def forward(place: str) -> Any:
        return lambda model, batch: model(batch[0]) * drawn.factor(place)

    def metric(place: str) -> pl.Metric:
        return pl.metrics.mean(lambda outputs, batch: outputs.mean(1) * drawn.factor(place), "drawn")

    due, init = (lambda state: drawn.factor("when") < 1.05), (lambda state: 1.5 * drawn.factor("init"))
    seldom = pl.Evaluator(loader(), metrics=[metric("metric")], interval=lambda state: drawn.factor("interval") < 1.07)
    return fit(
        Net(drawn) if start is None else start,
        loader(),
        [pl.Algorithm("scaled", {Event.AFTER_LOSS: scaled}, when=due, init=init)],
        evaluators={"val": seldom},
        loss=None,
        task=pl.Task(
            forward=forward("task forward"),
            validate=forward("validate"),
            loss=lambda outputs, batch: functional.mse_loss(outputs, batch[1]) * drawn.factor("loss"),
        ),
        train_metrics=[metric("train metric")],
        callbacks=[watch],
        optimizer=Optimizer(name="own", init=lambda params: {}, update=update, lr=lambda timestamp: 0.1),
        clip_grad=clip,
        strict=None,
        donate=False,  # States are kept
    )


def around(seed: int) -> tuple[Any, ...]:
    """Seed the global generators; their states."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return states()


def states() -> tuple[Any, ...]:
    name, words, *rest = numpy.random.get_state()
    return random.getstate(), (name, words.tobytes(), *rest), torch.get_rng_state().tolist()


@pytest.fixture(autouse=True, scope="module")
def left_alone() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.set_rng_state(before[2])


def trained(drawn: Drawn, seed: int, start: pl.State | None = None) -> list[pl.State]:
    """The States at the end of each batch, and the last one."""
    before = around(seed)
    found = [state for event, state in run_of(drawn, start) if event in (Event.BATCH_END, Event.FIT_END)]
    assert states() == before, "another state than before the run"
    return found


def numbers(state: pl.State) -> tuple[Any, ...]:
    values = [tensor.flatten().tolist() for tensor in state.params.values()]
    return values, {label: {key: float(value) for key, value in some.items()} for label, some in state.metrics.items()}


def check(kind: str, places: Iterable[str], kept: int) -> tuple[Drawn, list[pl.State]]:
    first, again, resumed = Drawn(kind, places), Drawn(kind, places), Drawn(kind, places)
    stream = trained(first, 1)
    assert list(map(numbers, trained(again, 2))) == list(map(numbers, stream))
    assert first.log == again.log
    rest = trained(resumed, 3, stream[kept])
    assert numbers(rest[-1]) == numbers(stream[-1])
    assert resumed.log == first.log[kept + 1 :]
    return first, stream


@pytest.mark.parametrize("place", PLACES)
def test_each_place_draws_and_the_run_is_what_it_was(place: str) -> None:
    one, drawing = check("python", [place], kept=4)
    other = Drawn("python", ())
    plain = trained(other, 1)  # the place is called, and matters
    assert one.log != other.log or list(map(numbers, drawing)) != list(map(numbers, plain))


@given(st.sampled_from(KINDS), st.sets(st.sampled_from(PLACES)), st.integers(0, 6))
@examples(5, 200)
def test_several_places_draw(kind: str, places: set[str], kept: int) -> None:
    check(kind, places, kept)


def test_a_forward_that_draws_in_an_evaluation() -> None:
    drawn, model, found = Drawn("numpy", ["task forward"]), mlp(), []
    task = pl.Task(
        forward=lambda model, batch: model(batch[0]) * drawn.factor("task forward"),
        loss=lambda outputs, batch: functional.mse_loss(outputs, batch[1]),
    )
    for around_it, seed in ((1, 0), (2, 0), (1, 3)):
        before = around(around_it)
        final = pl.run(pl.evaluate(model, DataLoader(Rows(drawn), batch_size=2), task=task, seed=seed))
        assert states() == before
        found.append(numbers(final))
    assert found[0] == found[1] != found[2]


def _noisy() -> Optimizer:
    base = pl.optim.sgd(lr=0.1)

    def noisily(function: Any) -> Any:
        def step(grads: Any, *args: Any) -> Any:
            noise = {name: gradient + torch.randn_like(gradient) for name, gradient in grads.items()}
            return function(pl.FrozenDict(noise), *args)

        return step

    update, overwrite = noisily(base.update), noisily(base.overwrite)
    return Optimizer(name="noisy", init=base.init, update=update, overwrite=overwrite, lr=base.lr)


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_an_optimizer_draws_alike_in_place_and_on_copies(wrapper: Any) -> None:
    found = []
    for seed, donate in ((1, "auto"), (2, "auto"), (3, False)):
        before = around(seed)
        final = pl.run(fit(optimizer=wrapper(_noisy()), max_duration="1ep", donate=donate, strict=None))
        assert states() == before
        found.append(final.params["0.weight"].tolist())
    assert found == found[:1] * 3
