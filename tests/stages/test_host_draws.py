"""Random numbers of Python, NumPy and other threads in forwards and losses: seeded, or noticed."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from tests.support.tiers import examples

DATA = [(torch.full((4, 3), 0.1 * i), torch.full((4, 2), 0.2 * i)) for i in range(1, 5)]
Factor = Callable[[], float]


def _through_a_helper() -> float:
    return _helper() + 0.0


def _helper() -> float:
    from random import uniform

    return uniform(0.5, 1.5)


class _Noise:
    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def value(self) -> float:
        return float(self._draw())


_REGISTRY: dict[str, Any] = {"noise": _Noise(numpy.random.standard_normal)}
_elsewhere = types.ModuleType("elsewhere")
exec("import random as r\ndef factor():\n    return r.gauss(1, 0.1)", vars(_elsewhere))

DRAWS: dict[str, Factor] = {
    "random": lambda: random.random(),
    "bound": random.random,
    "numpy": lambda: float(numpy.random.rand()),
    "numpy, the function": numpy.random.random_sample,
    "helper": _through_a_helper,
    "object": _Noise(random.random).value,
    "registry": lambda: _REGISTRY["noise"].value(),  # type: ignore[no-any-return]
    "partial": functools.partial(random.uniform, 0.5, 1.5),
    "other module": lambda: _elsewhere.factor(),  # type: ignore[no-any-return, attr-defined]
    "by name": lambda: getattr(globals()["ran" + "dom"], "ran" + "dom")(),  # type: ignore[no-any-return]
    "both": lambda: random.random() + float(numpy.random.rand()),
    "torch": lambda: float(torch.rand(())),
}
PLACES = (
    "forward",
    "hook",
    "loss",
    "task forward",
    "task loss",
    "submodule",
    "own loss",
    "attribute",
    "hook of a loss",
)
MODES: dict[str, dict[str, Any]] = {
    "every event": {},
    "watch": {"watch": {Event.BATCH_END}},
    "keep": {"donate": False},
    "strict": {"strict": True},
    "pieces": {"microbatch_size": 2},
    "bf16": {"precision": "amp_bf16"},
}


class Net(nn.Module):
    def __init__(self, factor: Factor | None, hidden: Factor | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.factor = factor
        self.inner = None if hidden is None else Net(hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if self.inner is not None:
            outputs = outputs + self.inner(inputs)
        return outputs if self.factor is None else outputs * self.factor()


def of_torch() -> nn.Module:
    """A model without code of the user's, for a hook."""
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh())


class WithLoss(Net):
    def forward(self, inputs: Any) -> Tensor:
        return super().forward(inputs[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        assert self.drawn is not None
        return functional.mse_loss(outputs, batch[1]) * self.drawn()

    drawn: Factor | None = None


def stream(factor: Factor, place: str, start: Any = None, **options: Any) -> Any:
    """A run whose forward or loss draws."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.1), "max_duration": "2ep", **options}
    model: nn.Module = Net(factor if place == "forward" else None, hidden=factor if place == "submodule" else None)
    settings["loss"] = functional.mse_loss
    if place == "attribute":
        module: Any = nn.TransformerEncoderLayer(3, 1, 4, 0.0, activation=lambda inputs: inputs * factor())
        model = nn.Sequential(module, nn.Linear(3, 2))
    elif place == "hook of a loss":
        model, settings["loss"] = of_torch(), nn.MSELoss()
        settings["loss"].register_forward_hook(lambda module, inputs, output: output * factor())
    elif place == "hook":
        model = of_torch()
        model.register_forward_hook(lambda module, inputs, output: output * factor())
    elif place == "loss":
        settings["loss"] = lambda outputs, targets: functional.mse_loss(outputs, targets) * factor()
    elif place == "task forward":
        settings["task"] = pl.Task(forward=lambda module, batch: module(batch[0]) * factor())
    elif place == "task loss":
        settings["loss"] = None
        settings["task"] = pl.Task(loss=lambda outputs, batch: functional.mse_loss(outputs, batch[1]) * factor())
    elif place == "own loss":
        own = WithLoss(None)
        own.drawn = factor
        model, settings["loss"] = own, None
    return pl.fit(model if start is None else start, DATA, **settings)


def numbers(state: pl.State) -> list[Tensor]:
    return list(state.params.values())


def same(a: pl.State, b: pl.State) -> bool:
    return all(map(torch.equal, numbers(a), numbers(b)))


def around(seed: int) -> tuple[Any, ...]:
    """Seed the global generators; their states."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return states()


def states() -> tuple[Any, ...]:
    name, words, *rest = numpy.random.get_state()
    return random.getstate(), (name, words.tobytes(), *rest)


@given(
    draw=st.sampled_from(sorted(DRAWS)),
    place=st.sampled_from(PLACES),
    mode=st.sampled_from(sorted(MODES)),
    kept=st.integers(0, 7),
)
@examples(25, 400)
def test_what_a_forward_or_loss_draws_is_seeded(draw: str, place: str, mode: str, kept: int) -> None:
    """Runs are bitwise equal whatever the generators' states, which are left alone, and after resuming.

    Neighbours tried: evaluation and prediction; a draw that no name shows ("by name"), and one that comes late; numbers
    that a checkpointed segment draws.
    """
    factor = DRAWS[draw]
    before = around(1)
    first = pl.run(stream(factor, place, **MODES[mode]))
    assert states() == before
    around(2)
    seen: list[pl.State] = []
    for event, state in stream(factor, place, **MODES[mode]):
        if event is Event.BATCH_END:
            seen.append(state)
            random.random()  # what the loop's body draws changes nothing
            numpy.random.rand()
    assert same(first, seen[-1])
    around(3)
    options = {**MODES[mode], "donate": False}
    for event, state in stream(factor, place, **options):
        if event is Event.BATCH_END and state.timestamp.batch == kept + 1:
            break
    around(4)
    assert same(first, pl.run(stream(factor, place, start=state, **options)))


class Backward(torch.autograd.Function):
    """The identity, with a gradient that draws."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, factor: Factor) -> Tensor:
        context.factor = factor
        return inputs.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return gradients[0] * context.factor(), None


@pytest.mark.parametrize("draw", ["random", "numpy", "torch"])
@pytest.mark.parametrize("place", ["backward of a loss", "hook of a backward", "hook of all modules"])
def test_what_a_backward_draws_is_seeded(draw: str, place: str) -> None:
    """The model and the loss are torch's own, but for this one place."""

    def trained(seed: int) -> pl.State:
        torch.manual_seed(0)
        model, loss, factor = of_torch(), functional.mse_loss, DRAWS[draw]
        handle: Any = None
        if place == "backward of a loss":
            loss = lambda outputs, targets: functional.mse_loss(Backward.apply(outputs, factor), targets)  # noqa: E731
        elif place == "hook of a backward":
            model[1].register_full_backward_hook(lambda module, before, after: (before[0] * factor(),))  # type: ignore[index]
        else:
            handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * factor())
        before = around(seed)
        settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep"}
        try:
            state = pl.run(pl.fit(model, DATA, loss=loss, **settings))
        finally:
            if handle is not None:
                handle.remove()
        assert states() == before
        return state

    assert same(trained(1), trained(2))


def test_a_draw_that_comes_late_is_seeded() -> None:
    def trained(seed: int) -> pl.State:
        count = itertools.count()
        around(seed)
        return pl.run(stream(lambda: random.random() if next(count) > 2 else 1.0, "task forward", strict=True))

    assert same(trained(1), trained(2))


@pytest.mark.parametrize("place", ["model", "loss"])
def test_code_of_torch_alone_leaves_pythons_generator_where_it_is(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even set aside: seeding it takes longer than a small forward."""
    monkeypatch.setattr(random, "getstate", None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    loss: Any = nn.MSELoss() if place == "loss" else functional.mse_loss
    pl.run(pl.fit(model, DATA, loss=loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep"))


def test_the_numbers_differ_from_batch_to_batch() -> None:
    drawn: list[float] = []

    def factor() -> float:
        drawn.append(random.random() + float(numpy.random.rand()))
        return drawn[-1]

    pl.run(stream(factor, "forward"))
    assert len(set(drawn)) == len(drawn) == 8


@pytest.mark.parametrize("draw", ["numpy", "random", "by name"])
def test_evaluation_and_prediction_are_seeded(draw: str) -> None:
    model = Net(DRAWS[draw])

    def measured(seed: int) -> tuple[float, list[Tensor]]:
        before = around(seed)
        state = pl.run(pl.evaluate(model, {"val": DATA}, loss=functional.mse_loss))
        outputs = [state.outputs for event, state in pl.predict(model, DATA) if event is Event.PREDICT_AFTER_FORWARD]
        assert states() == before
        return float(state.metrics["val"]["loss"]), outputs

    (loss, outputs), (again, others) = measured(1), measured(2)
    assert loss == again
    assert all(map(torch.equal, outputs, others))


def test_a_checkpointed_segment_leaves_the_generators_alone() -> None:
    class Segment(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            forward: Any = super().forward
            found: Tensor = checkpoint(forward, inputs, use_reentrant=False)
            return found

    def trained(seed: int) -> pl.State:
        torch.manual_seed(0)
        model = Segment(DRAWS["numpy"])
        before = around(seed)
        settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
        state = pl.run(pl.fit(model, DATA, loss=functional.mse_loss, **settings))
        assert states() == before
        return state

    assert same(trained(1), trained(2))


class Drawer(nn.Module):
    """Dropout, and another thread that draws in the middle of it."""

    def __init__(self, during: Callable[[], None] | None) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 2), nn.Dropout(0.5)
        self.during = during

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.dropout(inputs)
        if self.during is not None:
            self.during()
        return self.dropout(self.layer(inputs))  # type: ignore[no-any-return]


def in_a_thread(function: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    return call


def seeded_draw() -> None:
    with pl.random.seeded(3):
        torch.rand(2)


def forked_draw() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        torch.rand(2)


def draws(during: Callable[[], None] | None, strict: bool = True) -> pl.State:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", "strict": strict}
    return pl.run(pl.fit(Drawer(during), DATA, loss=functional.mse_loss, **settings))


@pytest.mark.parametrize(
    "drawn",
    [lambda: torch.rand(1), lambda: torch.manual_seed(7), lambda: torch.randperm(3), lambda: nn.Linear(2, 2)],
    ids=["rand", "manual_seed", "randperm", "a new layer"],
)
def test_strict_notices_a_thread_that_draws_during_a_forward(drawn: Callable[[], object]) -> None:
    with pytest.raises(pl.errors.ImpurityError, match="another thread draws from it or seeds it"):
        draws(in_a_thread(drawn))


@pytest.mark.parametrize(
    "during",
    [None, lambda: None, in_a_thread(lambda: torch.rand(1, generator=torch.Generator())), seeded_draw, forked_draw],
    ids=["nothing", "a call", "a generator of its own", "seeded", "fork_rng"],
)
def test_strict_takes_what_this_thread_draws(during: Callable[[], None] | None) -> None:
    assert same(draws(during), draws(during, strict=False))


@pytest.mark.slow
def test_strict_notices_a_thread_that_draws_all_the_time() -> None:
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            torch.rand(1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with pytest.raises(pl.errors.ImpurityError, match="another thread draws from it or seeds it"):
            pl.run(
                pl.fit(
                    Drawer(None),
                    DATA * 200,
                    loss=functional.mse_loss,
                    optimizer=pl.optim.sgd(lr=0.1),
                    max_duration="1ep",
                    strict=True,
                )
            )
    finally:
        stop.set()
        thread.join()


@pytest.fixture(autouse=True)
def left_alone() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
