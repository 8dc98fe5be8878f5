"""Batches whose inner events are not observed train as those that are observed, and raise the same errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import DonatedStateError
from pure_loop.model import model as model_file
from pure_loop.model.instance import Instance
from pure_loop.random import seeded, seeds
from pure_loop.random.seeds import pop_cpu_seed
from tests.support import problem
from tests.support.problem import mlp, points
from tests.support.streams import assert_same_stream, frozen_copy
from tests.support.tiers import examples

read_buffers = Instance.read_buffers
UNSEEN = [set(), {Event.BATCH_END}, {Event.BATCH_CHECKPOINT}, {Event.BATCH_END, Event.EPOCH_CHECKPOINT}]


class Own(nn.Module):
    """A class of the user's: it draws, writes to a buffer, and has a parameter that it uses now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.rare = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = functional.dropout(self.first(x).relu(), 0.5, self.training)
        out: Tensor = self.last(hidden)
        return out * self.rare if int(self.calls) % 3 == 0 else out


class Recomputed(nn.Module):
    """Its backward goes through a part of it again, which writes to buffers and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class WithoutGradients(nn.Linear):
    """It forgets to turn gradients on again."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        torch.set_grad_enabled(False)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torch's": mlp,
    "batchnorm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
    "own": Own,
    "recomputed": Recomputed,
    "without gradients": lambda: WithoutGradients(4, 3),
    "tied and frozen": problem.tied,
}


def fit(make: Any = "torch's", **arguments: Any) -> Any:
    settings = {"optimizer": pl.optim.adamw(lr=0.1), "watch": {Event.BATCH_END}, "strict": None, **arguments}
    data = settings.pop("data", None) or points(size=(4, 4, 8, 6, 3))
    with seeded(0):
        model = MODELS[make]() if isinstance(make, str) else make() if isinstance(make, type) else make
    return problem.fit(model, data, **settings)


def all_seen(make: Any = "torch's", **arguments: Any) -> Any:
    """The same events of a stream of all."""
    watch = arguments.pop("watch", {Event.BATCH_END})
    return (pair for pair in fit(make, watch=None, **arguments) if pair[0] in watch)


@functools.wraps(functional.cross_entropy)
def in_parts(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """By its module one of torch's, which gives a tensor."""
    found = functional.cross_entropy(outputs, targets)
    return {"total": found + 0.1 * outputs.square().mean(), "found": found}


OPTIONS = {
    "donate": st.sampled_from([True, "auto"]),
    "microbatch_size": st.integers(2, 6),
    "clip_grad": st.just(0.1),
    "nonfinite": st.just("skip"),
    "precision": st.sampled_from(["amp_bf16", "amp_fp16"]),
    "loss": st.just(in_parts),
    "optimizer": st.just(pl.optim.sgd(lr=0.1, momentum=0.9)),
}


@examples(25, 2000)
@given(
    name=st.sampled_from(list(MODELS)),
    sizes=st.lists(st.integers(2, 9), min_size=2, max_size=6),
    watch=st.sampled_from(UNSEEN),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    every=st.sampled_from([1, 3, 1000]),
)
def test_training_is_the_same_with_all_seen(name: str, sizes: Any, watch: Any, options: Any, every: int) -> None:
    size = options.get("microbatch_size")
    # Of a single sample BatchNorm has no variance.
    assume(size is None or name not in ("batchnorm", "recomputed") or all(n % size != 1 for n in sizes))
    options |= {"watch": watch | {Event.FIT_END}, "data": points(size=tuple(sizes))}

    def read(stream: Any) -> list[Any]:
        """What each so many States hold; the memory of others is the loop's alone."""
        found: list[Any] = []
        count = 0
        for event, state in stream:
            count += 1  # noqa: SIM113 - `enumerate` keeps the pair
            if count % every == 0 or event is Event.FIT_END:
                found.append((event, frozen_copy(state)))
        return found

    given, wanted = read(fit(name, **options)), read(all_seen(name, **options | {"donate": False}))
    assert_same_stream(given, wanted, "unseen and seen")


class Taking(nn.Linear):
    """Its forward returns what a test makes of its outputs."""

    def __init__(self, make: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(4, 3)
        self.make = [make]

    def forward(self, x: Tensor) -> Any:
        return self.make[0](self, super().forward(x))


ODD: dict[str, Callable[[Tensor], Any]] = {
    "a forward": lambda out: [][0],
    "a loss": lambda out: out[:, :0],
    "no graph": lambda out: out.detach(),
    "not finite": lambda out: out * torch.nan,
}


def test_an_error_says_the_same_with_every_event_seen() -> None:
    def error(fit: Any, stage: str, at: int) -> tuple[Any, ...]:
        calls, seen = itertools.count(), list[Any]()
        with pytest.raises((ValueError, IndexError, RuntimeError, ArithmeticError)) as caught, seeded(0):
            seen.extend(fit(Taking(lambda module, out: ODD[stage](out) if next(calls) == at else out)))
        return seen, type(caught.value), str(caught.value), getattr(caught.value, "__notes__", [])

    for stage, at in itertools.product(ODD, (0, 5)):
        given, wanted = error(fit, stage, at), error(all_seen, stage, at)
        assert given[1:] == wanted[1:]
        assert_same_stream(given[0], wanted[0], "before the error")


# The laws that a wrong loop breaks ------------------------------------------------------------------------------------


def a_hook_of_a_backward_does_not_write_to_the_buffers_of_a_state() -> None:
    def write(module: nn.Module, *_: Any) -> None:
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.fill_(7.0)

    for of in ("the module", "all modules"):
        module: Any = MODELS["batchnorm"]()
        register = module[1].register_full_backward_hook
        handle = (register if of == "the module" else nn.modules.module.register_module_full_backward_hook)(write)
        try:
            for watch in ({Event.BATCH_END}, None):
                states = [state for event, state in fit(module, watch=watch) if event is Event.BATCH_END]
                assert not any((state.buffers["1.running_mean"] == 7.0).any() for state in states)
        finally:
            handle.remove()


def nothing_that_a_forward_leaves_on_its_parameters_is_there_in_the_next() -> None:
    for what in ("hook", "gradient"):
        found: list[bool] = []

        def leave(module: Any, out: Tensor, found: list[bool] = found, what: str = what) -> Tensor:
            found.append(bool(module.weight._backward_hooks) or module.weight.grad is not None)
            if len(found) == 4 and what == "hook":
                module.weight.register_hook(lambda gradient: 2 * gradient)
            if len(found) == 4 and what == "gradient":
                module.weight.sum().backward()
            return out

        for _event, _state in fit(Taking(leave)):
            pass
        assert found == [False] * 10


def generators_are_left_and_both_ways_are_the_same() -> None:
    with seeded(0):
        before = torch.get_rng_state()
        given = list(fit("own"))
        assert torch.equal(torch.get_rng_state(), before)
    assert_same_stream(given, list(all_seen("own")), "both ways")


LAWS = (
    a_hook_of_a_backward_does_not_write_to_the_buffers_of_a_state,
    nothing_that_a_forward_leaves_on_its_parameters_is_there_in_the_next,
    generators_are_left_and_both_ways_are_the_same,
)
# A hook of all modules has those of the first one, too.
no_gradients_of_inputs = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


WRONG: list[tuple[Any, str, Any]] = [
    (model_file, "are_marked", lambda *_, **__: False),
    (model_file, "is_users", lambda code: False),
    (Instance, "read_buffers", lambda self, before, *, copy: read_buffers(self, before, copy=False)),
    (seeds, "pop_cpu_seed", lambda _: pop_cpu_seed(torch.get_rng_state())),
]


@no_gradients_of_inputs
def test_the_loop_keeps_the_laws_and_a_wrong_loop_is_caught() -> None:
    def broken(law: Callable[[], None]) -> bool:
        try:
            law()
        except (AssertionError, DonatedStateError):
            return True
        return False

    assert not any(map(broken, LAWS))
    for owner, name, wrong in WRONG:
        with patch.object(owner, name, wrong):
            assert any(map(broken, LAWS)), name
