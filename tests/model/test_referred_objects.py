"""What a module refers to besides its tree (the objects of hooks, collectors, a hidden teacher) is the user's own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from tests.support.holding import DATA, WAYS, by_hand, fit, made, mse
from tests.support.tiers import examples

Loss = Callable[[Any, Any], Tensor]


class Keep:
    """Collects what passes a layer; holds the model, as such objects often do."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.numbers: list[float] = []
        self.last: Tensor | None = None
        self.model = model

    def take(self, tensor: Tensor) -> None:
        self.numbers.append(float(tensor.detach().sum()))
        self.last = tensor

    def __call__(self, module: nn.Module, *tensors: Any) -> None:
        """A hook of any kind: the last argument has the tensor."""
        self.take(tensors[-1][0] if isinstance(tensors[-1], tuple) else tensors[-1])

    def in_copy(self, net: nn.Module, *args: Any) -> None:
        """The hook is given a module of the copy, and has it."""
        assert any(args[0] is each for each in net.modules())
        self(*args)


def _defaults(keep: Keep, net: nn.Module) -> Any:
    def hook(module: Any, *args: Any, keep: Keep = keep, net: nn.Module = net) -> None:
        keep.in_copy(net, module, *args)

    return hook


CALLABLES: dict[str, Callable[[Keep, nn.Module], Any]] = {
    "callable": lambda keep, net: keep,
    "method": lambda keep, net: keep.__call__,
    "partial": lambda keep, net: functools.partial(Keep.__call__, keep),
    "closure": lambda keep, net: lambda *args: keep(*args),
    "closure over the model": lambda keep, net: lambda *args: keep.in_copy(net, *args),
    "defaults": _defaults,
    "partial of the model": lambda keep, net: functools.partial(lambda net, keep, *a: keep.in_copy(net, *a), net, keep),
}
HOOKS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")


def network() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))


def losses_by_hand(model: nn.Module, loss: Loss, pieces: int = 1, after: Any = lambda: None) -> list[float]:
    """The losses of a loop by hand; the model is trained."""
    found: list[float] = []

    def recorded(module: nn.Module, batch: Any) -> Tensor:
        parts = zip(*(each.chunk(pieces) for each in batch), strict=True)
        total = torch.stack([loss(module(x), y) for x, y in parts]).mean()
        found.append(float(total.detach()))
        return total

    for _ in by_hand(model, loss=recorded):
        after()
    return found


def losses_by_loop(model: Any, loss: Loss, after: Any = lambda state: None, **options: Any) -> tuple[Any, pl.State]:
    losses = []
    for event, state in fit(model, loss=loss, **options):
        if event is Event.BATCH_END:
            losses.append(float(state.loss))
            after(state)
    return losses, state


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@given(
    register=st.sampled_from(HOOKS),
    called=st.sampled_from(sorted(CALLABLES)),
    place=st.sampled_from(["", "0", "1", "1.0"]),
    owns=st.booleans(),
    mode=st.sampled_from([*WAYS[:4], {"microbatch_size": 4}]),
)
@examples(30, 3000)
def test_hooks_fill_the_objects_of_the_user(register: str, called: str, place: str, owns: bool, mode: Any) -> None:
    """What the object collected, and the losses that read it, are those of a loop by hand."""
    losses, numbers = [], []
    for by_loop in (False, True):
        net = made(network)
        keep = Keep(net if owns else None)
        getattr(net.get_submodule(place), register)(CALLABLES[called](keep, net))
        reads = register == "register_forward_hook"
        loss = lambda y, t: mse(y, t) + (0.1 * keep.last.square().mean() if reads else 0.0)  # noqa: E731
        if by_loop:
            losses.append(losses_by_loop(net, loss, **mode)[0])
        else:
            losses.append(losses_by_hand(net, loss, pieces=2 if "microbatch_size" in mode else 1))
        numbers.append(sorted(keep.numbers))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(numbers[1], numbers[0], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(made(network).parameters(), net.parameters(), strict=True))


class Collecting(nn.Module):
    """Its forward, or a hook, puts the outputs in an attribute."""

    def __init__(self, seen: Any, put: Callable[[Any, Tensor], object], by_hook: bool) -> None:
        super().__init__()
        self.layer, self.seen, self.put = nn.Linear(4, 2), seen(), put
        if by_hook:  # the closure has the module itself, which in a copy is the copy
            self.layer.register_forward_hook(lambda module, inputs, output: put(self.seen, output))
        self.by_hook = by_hook

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if not self.by_hook:
            self.put(self.seen, outputs)
        return outputs


COLLECTORS: list[tuple[Any, Any, Any]] = [
    (list, lambda seen, y: seen.append(y), lambda seen: seen[-1]),
    (dict, lambda seen, y: seen.update(last=y), lambda seen: seen["last"]),
    (Keep, lambda seen, y: seen.take(y), lambda seen: seen.last),
    (lambda: {"in": ([], Keep())}, lambda seen, y: seen["in"][0].append(y), lambda seen: seen["in"][0][-1]),
]


def test_what_a_forward_collects_in_an_attribute_is_seen_by_the_loss() -> None:
    for seen, put, last in COLLECTORS:
        for by_hook in (False, True):
            losses = []
            for train in (losses_by_hand, lambda *each: losses_by_loop(*each)[0]):
                net = made(Collecting, seen, put, by_hook)
                losses.append(train(net, lambda y, t: mse(y, t) + last(net.seen).square().mean()))
            torch.testing.assert_close(losses[1], losses[0])


class Attention:
    def __init__(self, projection: nn.Module) -> None:
        self.projection = projection

    def __call__(self, inputs: Tensor) -> Any:
        return self.projection(inputs)


class Taught(nn.Module):
    """A teacher that is no submodule; an object and a function that hold one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = {"teacher": [nn.Linear(4, 2)]}
        self.student = nn.Linear(4, 2)
        self.attention = Attention(self.student)
        self.again = lambda inputs: self.student(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.hidden["teacher"][0](inputs)
        return torch.stack([self.attention(inputs) + self.again(inputs), target])


def test_a_teacher_in_a_list_is_the_users_own_and_an_object_that_holds_a_submodule_is_copied() -> None:
    """What the loop's body does to the teacher, such as an average of the student, is seen."""

    def follow(model: Any, weight: Tensor) -> None:
        with torch.no_grad():
            model.hidden["teacher"][0].weight.lerp_(weight, 0.5)

    hand, model = made(Taught), made(Taught)
    loss = lambda y, t: mse(y[0], t) + mse(y[0], y[1])  # noqa: E731
    losses = losses_by_hand(hand, loss, after=lambda: follow(hand, hand.student.weight))
    found, state = losses_by_loop(model, loss, after=lambda state: follow(model, state.params["student.weight"]))
    torch.testing.assert_close(found, losses)
    module: Any = state.module()
    assert module.attention.projection is module.student
    assert module.again(torch.ones(1, 4)).equal(module.student(torch.ones(1, 4)))


def test_module_is_independent_but_for_the_objects_of_hooks() -> None:
    """Which may hold what can't be copied; hooks of state_dict() call them, too."""
    net, keep = network(), Keep()
    keep.lock = threading.Lock()  # type: ignore[attr-defined]
    net.register_forward_hook(keep.__call__)
    count = functools.partial(lambda keep, *args: keep.numbers.append(1.0), keep)
    net.register_state_dict_post_hook(count)
    net.register_load_state_dict_pre_hook(count)
    net.widths, net.mask = [4, 4], torch.ones(3)
    _, state = losses_by_loop(net, mse)
    assert len(keep.numbers) == 6
    module: Any = state.module()
    module.widths.append(1)
    module.mask.zero_()
    module(torch.ones(1, 4))
    assert net.widths == state.module().widths == [4, 4]
    assert net.mask.sum() == 3
    seen = len(keep.numbers)
    module.load_state_dict(module.state_dict())
    assert len(keep.numbers) == seen + 2


@pytest.mark.usefixtures("interpreted")
def test_a_collecting_hook_is_refused_in_a_graph() -> None:
    for kind in ("closure", "method"):
        net, keep = network(), Keep()
        keep.take = lambda tensor: setattr(keep, "last", tensor)  # type: ignore[method-assign]
        net.register_forward_hook(CALLABLES[kind](keep, net))
        with pytest.raises(pl.errors.CompileError, match=r"an object outside of the module tree to keep"):
            pl.run(fit(net, DATA, compile=True))
