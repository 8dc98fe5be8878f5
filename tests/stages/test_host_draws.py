"""Random numbers of Python, NumPy and other threads in forwards and losses: seeded, or noticed."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from pure_loop.random import seeded
from tests.support.tiers import examples

DATA = [(torch.full((4, 3), 0.1 * i), torch.full((4, 2), 0.2 * i)) for i in range(1, 5)]
Factor = Callable[[], float]

# The last has a name that no code shows.
DRAWS: dict[str, Factor] = {
    "random": random.random,
    "numpy": lambda: float(numpy.random.standard_normal()),
    "both": lambda: random.random() + float(numpy.random.rand()),
    "partial": functools.partial(random.uniform, 0.5, 1.5),
    "torch": lambda: float(torch.rand(())),
    "by name": lambda: getattr(globals()["ran" + "dom"], "ran" + "dom")(),  # type: ignore[no-any-return]
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
    """What it computes is multiplied by a draw; ``segments``: in a segment that is computed again in the backward."""

    def __init__(self, factor: Factor = lambda: 1.0, segments: bool = False) -> None:
        super().__init__()
        self.layer, self.factor, self.segments = nn.Linear(3, 2), factor, segments

    def forward(self, inputs: Tensor) -> Any:
        return checkpoint(self.compute, inputs, use_reentrant=False) if self.segments else self.compute(inputs)

    def compute(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) * self.factor()  # type: ignore[no-any-return]


class WithLoss(Net):
    """Its own loss draws, and not its forward."""

    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return mse_loss(outputs, batch[1]) * self.factor()


class Backward(torch.autograd.Function):
    """The identity, with a gradient that draws."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, factor: Factor) -> Tensor:
        context.factor = factor
        return inputs.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return gradients[0] * context.factor(), None


drawing: Any = Backward.apply


def _times(factor: Factor) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * factor()


def hooked(module: Any, register: str, hook: Callable[..., Any]) -> Any:
    getattr(module, register)(hook)
    return module


def of_torch(register: str = "", hook: Any = None) -> Any:
    """A model without code of the user's, but for a hook of its last module."""
    return nn.Sequential(nn.Linear(3, 2), hooked(nn.Tanh(), register, hook) if register else nn.Tanh())


def _at_loss(change: Callable[[Any], Any]) -> Any:
    """An algorithm that puts a draw into the backward."""
    return {"algorithms": [pl.algorithm(Event.AFTER_LOSS, name="change")(lambda state: change(state) or state)]}


def _init_draws(factor: Factor) -> pl.Optimizer:
    def update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        return {name: tensor - 0.1 * (grads[name] + memory["drawn"]) for name, tensor in params.items()}, memory

    init = lambda params: pl.FrozenDict(drawn=torch.tensor(factor()))  # noqa: E731
    return pl.Optimizer(name="own", init=init, update=update, lr=lambda timestamp: 0.1)


def _attention(factor: Factor) -> nn.Module:
    """A function of the user's in an attribute of a module of torch's."""
    layer = nn.TransformerEncoderLayer(3, 1, 4, 0.0, activation=lambda inputs: inputs * factor())
    return nn.Sequential(layer, nn.Linear(3, 2))


# The model and the options of a run in which this place draws.
PLACES: dict[str, Callable[[Factor], tuple[nn.Module, dict[str, Any]]]] = {
    "forward": lambda f: (Net(f), {}),
    "segment": lambda f: (Net(f, segments=True), {}),
    "hook": lambda f: (of_torch("register_forward_hook", lambda module, inputs, output: output * f()), {}),
    "attribute": lambda f: (_attention(f), {}),
    "loss": lambda f: (Net(), {"loss": lambda outputs, targets: mse_loss(outputs, targets) * f()}),
    "hook of a loss": lambda f: (
        of_torch(),
        {"loss": hooked(nn.MSELoss(), "register_forward_hook", lambda module, inputs, output: output * f())},
    ),
    "own loss": lambda f: (WithLoss(f), {"loss": None}),
    "task forward": lambda f: (
        Net(),
        {"loss": pl.Task(forward=lambda module, batch: module(batch[0]) * f(), loss=mse_loss)},
    ),
    "task loss": lambda f: (Net(), {"loss": pl.Task(loss=lambda y, batch: mse_loss(y, batch[1]) * f())}),
    "backward": lambda f: (of_torch(), {"loss": lambda outputs, targets: mse_loss(drawing(outputs, f), targets)}),
    "hook of a backward": lambda f: (
        of_torch("register_full_backward_hook", lambda module, before, after: (before[0] * f(),)),
        {},
    ),
    "an algorithm's hook": lambda f: (
        of_torch(),
        _at_loss(lambda state: state.outputs.register_hook(_times(f)) and None),
    ),
    "clip_grad": lambda f: (of_torch(), {"clip_grad": lambda grads, _: {n: _times(f)(g) for n, g in grads.items()}}),
    "init": lambda f: (of_torch(), {"optimizer": _init_draws(f)}),
}


def stream(factor: Factor, place: str, start: Any = None, **options: Any) -> Any:
    """A run in which this place draws."""
    with seeded(0):
        model, own = PLACES[place](factor)
    settings: dict[str, Any] = {"loss": mse_loss, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "6ba"}
    return pl.fit(model if start is None else start, DATA, **settings | own | options)


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
    kept=st.integers(1, 5),
)
@examples(15, 600)
def test_what_the_code_of_a_stage_draws_is_seeded(draw: str, place: str, mode: str, kept: int) -> None:
    """Runs are bitwise equal whatever the generators' states, which are left alone, and after resuming."""
    factor, before = DRAWS[draw], around(1)
    first = pl.run(stream(factor, place, **MODES[mode]))
    assert states() == before
    around(2)
    middle: Any = None
    for event, state in stream(factor, place, **MODES[mode] | {"donate": False}):
        if event is Event.BATCH_END:
            middle = state if state.timestamp.batch == kept else middle
            random.random()  # what the loop's body draws changes nothing
            numpy.random.rand()
    assert same(first, state)
    around(3)
    assert same(first, pl.run(stream(factor, place, start=middle, **MODES[mode])))


def test_a_hook_of_all_modules_and_a_draw_that_comes_late_are_seeded_and_numbers_differ() -> None:
    """From batch to batch."""
    drawn: list[float] = []

    def late(count: Any) -> float:
        drawn.append(DRAWS["both"]() if next(count) > 2 else 1.0)
        return drawn[-1]

    def trained(seed: int) -> list[pl.State]:
        around(seed)
        late_one = pl.run(stream(functools.partial(late, itertools.count()), "task forward", strict=True))
        with ExitStack() as stack:
            hook = nn.modules.module.register_module_forward_hook(lambda module, x, out: out * DRAWS["both"]())
            stack.callback(hook.remove)
            return [late_one, pl.run(stream(lambda: 1.0, "hook of a loss"))]

    assert all(map(same, trained(1), trained(2)))
    assert len(set(drawn)) == 4


@pytest.mark.parametrize("loss", [nn.MSELoss(), mse_loss], ids=["a module", "a function"])
def test_code_of_torch_alone_leaves_pythons_generator_where_it_is(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even set aside: seeding it takes longer than a small forward."""
    monkeypatch.setattr(random, "getstate", None)
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    pl.run(pl.fit(model, DATA, loss=loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep"))


def test_evaluation_and_prediction_are_seeded() -> None:
    def measured(model: nn.Module, seed: int) -> list[Tensor]:
        before = around(seed)
        state = pl.run(pl.evaluate(model, {"val": DATA}, loss=mse_loss))
        outputs = [state.outputs for event, state in pl.predict(model, DATA) if event is Event.PREDICT_AFTER_FORWARD]
        assert states() == before
        return [state.metrics["val"]["loss"], *outputs]

    model = Net(DRAWS["both"])
    assert all(map(torch.equal, measured(model, 1), measured(model, 2)))


# Threads that draw meanwhile.


def draws(during: Callable[[], object], data: Any = DATA, **options: Any) -> pl.State:
    """A run of a forward with dropout, and something in the middle of it."""
    with seeded(0):
        model = nn.Sequential(nn.Dropout(0.5), Net(lambda: (during(), 1.0)[1]), nn.Dropout(0.5))
    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", "strict": True, **options}
    return pl.run(pl.fit(model, data, loss=mse_loss, **settings))


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def seeded_draw() -> None:
    with pl.random.seeded(3), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        torch.rand(2)


def test_strict_notices_a_thread_that_draws_during_a_forward_and_takes_what_this_thread_draws() -> None:
    drawn: tuple[Any, ...] = (lambda: torch.rand(1), lambda: torch.manual_seed(7), lambda: nn.Linear(2, 2))
    for each in drawn:
        with pytest.raises(pl.errors.ImpurityError, match="another thread draws from it or seeds it"):
            draws(lambda each=each: in_a_thread(each))  # type: ignore[misc]
    own = lambda: in_a_thread(lambda: torch.rand(1, generator=torch.Generator()))  # noqa: E731
    for during in (lambda: None, own, seeded_draw):
        assert same(draws(during), draws(during, strict=False))


@pytest.fixture(autouse=True)
def left_alone() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
