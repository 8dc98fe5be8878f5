"""Random numbers of Python, NumPy and other threads in forwards and losses: seeded, or noticed."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
from pure_loop.random import seeded
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
MODES: dict[str, dict[str, Any]] = {
    "every event": {},
    "watch": {"watch": {Event.BATCH_END}},
    "keep": {"donate": False},
    "strict": {"strict": True},
    "pieces": {"microbatch_size": 2},
    "bf16": {"precision": "amp_bf16"},
}


class Net(nn.Module):
    def __init__(self, factor: Factor | None = None, hidden: Factor | None = None, segments: bool = False) -> None:
        super().__init__()
        self.layer, self.factor, self.segments = nn.Linear(3, 2), factor, segments
        self.inner = None if hidden is None else Net(hidden)

    def forward(self, inputs: Tensor) -> Any:
        return checkpoint(self.compute, inputs, use_reentrant=False) if self.segments else self.compute(inputs)

    def compute(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if self.inner is not None:
            outputs = outputs + self.inner(inputs)
        return outputs if self.factor is None else outputs * self.factor()


class WithLoss(Net):
    drawn: Any = None

    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return functional.mse_loss(outputs, batch[1]) * self.drawn()  # type: ignore[no-any-return]


class Backward(torch.autograd.Function):
    """The identity, with a gradient that draws."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, factor: Factor) -> Tensor:
        context.factor = factor
        return inputs.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return gradients[0] * context.factor(), None


def of_torch() -> Any:
    """A model without code of the user's, for a hook."""
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh())


mse = functional.mse_loss
Place = Callable[[Factor], tuple[nn.Module, dict[str, Any]]]


def _own_loss(factor: Factor) -> tuple[nn.Module, dict[str, Any]]:
    own = WithLoss()
    own.drawn = factor
    return own, {"loss": None}


def _attribute(factor: Factor) -> tuple[nn.Module, dict[str, Any]]:
    module: Any = nn.TransformerEncoderLayer(3, 1, 4, 0.0, activation=lambda inputs: inputs * factor())
    return nn.Sequential(module, nn.Linear(3, 2)), {}


def _hook(factor: Factor) -> tuple[nn.Module, dict[str, Any]]:
    model = of_torch()
    model.register_forward_hook(lambda module, inputs, output: output * factor())
    return model, {}


def _hook_of_a_backward(factor: Factor) -> tuple[nn.Module, dict[str, Any]]:
    model = of_torch()
    model[1].register_full_backward_hook(lambda module, before, after: (before[0] * factor(),))
    return model, {}


def _hook_of_a_loss(factor: Factor) -> tuple[nn.Module, dict[str, Any]]:
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda module, inputs, output: output * factor())
    return of_torch(), {"loss": loss}


def _at_loss(change: Callable[[Any, Factor], Any]) -> Place:
    """An algorithm that puts a draw into the backward."""

    def place(factor: Factor) -> tuple[nn.Module, dict[str, Any]]:
        handler = lambda state: change(state, factor) or state  # noqa: E731
        return of_torch(), {"algorithms": [pl.algorithm(Event.AFTER_LOSS, name="change")(handler)]}

    return place


def _init_of_an_optimizer(factor: Factor) -> tuple[nn.Module, dict[str, Any]]:
    def update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        return {name: tensor - 0.1 * (grads[name] + memory["drawn"]) for name, tensor in params.items()}, memory

    init = lambda params: pl.FrozenDict(drawn=torch.tensor(factor()))  # noqa: E731
    return of_torch(), {"optimizer": pl.Optimizer(name="own", init=init, update=update, lr=lambda timestamp: 0.1)}


PLACES: dict[str, Place] = {
    "forward": lambda factor: (Net(factor), {}),
    "submodule": lambda factor: (Net(hidden=factor), {}),
    "segment": lambda factor: (Net(factor, segments=True), {}),
    "hook": _hook,
    "attribute": _attribute,
    "loss": lambda factor: (Net(), {"loss": lambda outputs, targets: mse(outputs, targets) * factor()}),
    "hook of a loss": _hook_of_a_loss,
    "own loss": _own_loss,
    "task forward": lambda factor: (
        Net(),
        {"task": pl.Task(forward=lambda module, batch: module(batch[0]) * factor())},
    ),
    "task loss": lambda factor: (
        Net(),
        {"task": pl.Task(loss=lambda outputs, batch: mse(outputs, batch[1]) * factor()), "loss": None},
    ),
    "backward": lambda factor: (
        of_torch(),
        {"loss": lambda outputs, targets: mse(Backward.apply(outputs, factor), targets)},  # type: ignore[no-untyped-call]
    ),
    "hook of a backward": _hook_of_a_backward,
    "an algorithm's function": _at_loss(lambda state, f: state.replace(loss=Backward.apply(state.loss, f))),  # type: ignore[no-untyped-call]
    "an algorithm's hook": _at_loss(lambda state, f: state.outputs.register_hook(lambda grad: grad * f()) and None),
    "init": _init_of_an_optimizer,
}


def stream(factor: Factor, place: str, start: Any = None, **options: Any) -> Any:
    """A run in which this place draws."""
    with seeded(0):
        model, own = PLACES[place](factor)
    settings: dict[str, Any] = {"loss": mse, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "6ba"}
    return pl.fit(model if start is None else start, DATA, **{**settings, **own, **options})


def same(a: pl.State, b: pl.State) -> bool:
    return all(map(torch.equal, a.params.values(), b.params.values()))


def around(seed: int) -> tuple[Any, ...]:
    """Seed the global generators; their states."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return states()


def states() -> tuple[Any, ...]:
    name, words, *rest = numpy.random.get_state()
    return random.getstate(), (name, words.tobytes(), *rest), torch.get_rng_state().numpy().tobytes()


@given(
    draw=st.sampled_from(sorted(DRAWS)),
    place=st.sampled_from(sorted(PLACES)),
    mode=st.sampled_from(sorted(MODES)),
    kept=st.integers(0, 4),
)
@examples(25, 600)
def test_what_the_code_of_a_stage_draws_is_seeded(draw: str, place: str, mode: str, kept: int) -> None:
    """Runs are bitwise equal whatever the generators' states, which are left alone, and after resuming.

    Also a draw that no name shows ("by name"), and numbers that a checkpointed segment draws.
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


def test_a_hook_of_all_modules_and_a_draw_that_comes_late_are_seeded() -> None:
    def trained(seed: int) -> list[pl.State]:
        count = itertools.count()
        around(seed)
        late = pl.run(stream(lambda: random.random() if next(count) > 2 else 1.0, "task forward", strict=True))
        with ExitStack() as stack:
            hook = nn.modules.module.register_module_forward_hook(lambda module, x, out: out * DRAWS["both"]())
            stack.callback(hook.remove)
            return [late, pl.run(stream(lambda: 1.0, "hook of a loss"))]

    assert all(map(same, trained(1), trained(2)))


@pytest.mark.parametrize("loss", [nn.MSELoss(), functional.mse_loss], ids=["a module", "a function"])
def test_code_of_torch_alone_leaves_pythons_generator_where_it_is(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even set aside: seeding it takes longer than a small forward."""
    monkeypatch.setattr(random, "getstate", None)
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    pl.run(pl.fit(model, DATA, loss=loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep"))


def test_the_numbers_differ_from_batch_to_batch() -> None:
    drawn: list[float] = []
    pl.run(stream(lambda: drawn.append(DRAWS["both"]()) or drawn[-1], "forward"))  # type: ignore[func-returns-value]
    assert len(set(drawn)) == len(drawn) == 6


def test_evaluation_and_prediction_are_seeded() -> None:
    def measured(model: nn.Module, seed: int) -> list[Tensor]:
        before = around(seed)
        state = pl.run(pl.evaluate(model, {"val": DATA}, loss=mse))
        outputs = [state.outputs for event, state in pl.predict(model, DATA) if event is Event.PREDICT_AFTER_FORWARD]
        assert states() == before
        return [state.metrics["val"]["loss"], *outputs]

    for draw in ("numpy", "random", "by name"):
        model = Net(DRAWS[draw])
        assert all(map(torch.equal, measured(model, 1), measured(model, 2)))


# Threads that draw meanwhile.


class Drawer(nn.Module):
    """Dropout, and something in the middle of it."""

    def __init__(self, during: Callable[[], object]) -> None:
        super().__init__()
        with seeded(0):
            self.layer, self.dropout = nn.Linear(3, 2), nn.Dropout(0.5)
        self.during = during

    def forward(self, inputs: Tensor) -> Any:
        inputs = self.dropout(inputs)
        self.during()
        return self.dropout(self.layer(inputs))


def draws(during: Callable[[], object], data: Any = DATA, **options: Any) -> pl.State:
    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", "strict": True, **options}
    return pl.run(pl.fit(Drawer(during), data, loss=mse, **settings))


def in_a_thread(function: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    return call


DRAWN: dict[str, Callable[[], object]] = {
    "rand": lambda: torch.rand(1),
    "manual_seed": lambda: torch.manual_seed(7),
    "randperm": lambda: torch.randperm(3),
    "a new layer": lambda: nn.Linear(2, 2),
}


@pytest.mark.parametrize("drawn", DRAWN)
def test_strict_notices_a_thread_that_draws_during_a_forward(drawn: str) -> None:
    with pytest.raises(pl.errors.ImpurityError, match="another thread draws from it or seeds it"):
        draws(in_a_thread(DRAWN[drawn]))


def seeded_draw() -> None:
    with pl.random.seeded(3):
        torch.rand(2)


def forked_draw() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        torch.rand(2)


def test_strict_takes_what_this_thread_draws() -> None:
    own = in_a_thread(lambda: torch.rand(1, generator=torch.Generator()))
    for during in (lambda: None, own, seeded_draw, forked_draw):
        assert same(draws(during), draws(during, strict=False))


@pytest.mark.slow
def test_strict_notices_a_thread_that_draws_all_the_time() -> None:
    """When it does depends on when threads run: many batches are tried."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            torch.rand(1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with pytest.raises(pl.errors.ImpurityError, match="another thread draws from it or seeds it"):
            draws(lambda: None, DATA * 200)
    finally:
        stop.set()
        thread.join()


@pytest.fixture(autouse=True)
def left_alone() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
