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
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.random import seeded
from tests.support.problem import noise
from tests.support.tiers import examples

RATE = 0.1
DATA = [(torch.randn(4, 3, generator=noise(i)), torch.randn(4, 2, generator=noise(i + 9))) for i in range(3)]
Loss = Callable[[Any, Any], Tensor]


class Keep:
    """Collects what passes a layer; ``model`` is what such objects often hold, too."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.numbers: list[float] = []
        self.last: Tensor | None = None
        self.model = model

    def __call__(self, *args: Any) -> None:
        getattr(self, self.kind)(*args)  # type: ignore[attr-defined]

    def take(self, tensor: Tensor) -> None:
        self.numbers.append(float(tensor.detach().sum()))
        self.last = tensor

    def forward_hook(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.take(output)

    def pre_hook(self, module: nn.Module, inputs: Any) -> None:
        self.take(inputs[0])

    def backward_hook(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        self.numbers.append(float(grad_output[0].sum()))

    def penalty(self) -> Tensor:
        if self.last is None or not self.last.requires_grad:
            return torch.zeros(())
        return self.last.square().mean()


def _callable(keep: Keep, kind: str, net: nn.Module) -> Any:
    keep.kind = kind  # type: ignore[attr-defined]
    return keep


def _closure_over_the_model(keep: Keep, kind: str, net: nn.Module) -> Any:
    def hook(*args: Any) -> None:
        assert any(args[0] is each for each in net.modules())  # the hook is given a module of the copy, and has it
        getattr(keep, kind)(*args)

    return hook


def _defaults(keep: Keep, kind: str, net: nn.Module) -> Any:
    def hook(module: Any, *args: Any, keep: Keep = keep, net: nn.Module = net) -> None:
        assert any(module is each for each in net.modules())
        getattr(keep, kind)(module, *args)

    return hook


def _partial_of_the_model(keep: Keep, kind: str, net: nn.Module) -> Any:
    def hook(net: nn.Module, keep: Keep, module: Any, *args: Any) -> None:
        assert any(module is each for each in net.modules())
        getattr(keep, kind)(module, *args)

    return functools.partial(hook, net, keep)


CALLABLES: dict[str, Callable[[Keep, str, nn.Module], Any]] = {
    "method": lambda keep, kind, net: getattr(keep, kind),
    "callable": _callable,
    "partial": lambda keep, kind, net: functools.partial(getattr(Keep, kind), keep),
    "closure": lambda keep, kind, net: lambda *args: getattr(keep, kind)(*args),
    "closure over the model": _closure_over_the_model,
    "defaults": _defaults,
    "partial of the model": _partial_of_the_model,
}
HOOKS = {
    "forward_hook": "register_forward_hook",
    "pre_hook": "register_forward_pre_hook",
    "backward_hook": "register_full_backward_hook",
}
MODES: dict[str, dict[str, Any]] = {
    "every event": {},
    "watch": {"watch": {Event.BATCH_END}},
    "keep": {"donate": False},
    "strict": {"strict": True},
    "pieces": {"microbatch_size": 2},
}


def network() -> Any:
    with seeded(3):
        return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))


def made(cls: Any, *arguments: Any) -> Any:
    with seeded(0):
        return cls(*arguments)


def by_hand(model: nn.Module, loss: Loss, pieces: int = 1, after: Callable[[], None] = lambda: None) -> list[float]:
    """The losses of a loop by hand; the model is trained."""
    found = []
    for inputs, targets in DATA:
        model.zero_grad()
        total = 0.0
        for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            value = loss(model(x), y)
            (value / pieces).backward()
            total += float(value.detach()) / pieces
        found.append(total)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
        after()
    return found


def by_loop(
    model: nn.Module, loss: Loss | None, after: Callable[[pl.State], None] = lambda state: None, **options: Any
) -> tuple[list[float], pl.State]:
    settings: dict[str, Any] = {"loss": loss, "optimizer": pl.optim.sgd(lr=RATE), "max_duration": "1ep"}
    losses, state = [], None
    for event, state in pl.fit(model, DATA, **settings, **options):
        if event is Event.BATCH_END:
            losses.append(float(state.loss))
            after(state)
    assert state is not None
    return losses, state


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@given(
    kind=st.sampled_from(sorted(HOOKS)),
    called=st.sampled_from(sorted(CALLABLES)),
    place=st.sampled_from(["", "0", "1", "1.0"]),
    holds_model=st.booleans(),
    penalised=st.booleans(),
    mode=st.sampled_from(sorted(MODES)),
)
@examples(30, 3000)
def test_hooks_fill_the_objects_of_the_user(
    kind: str, called: str, place: str, holds_model: bool, penalised: bool, mode: str
) -> None:
    """What the object collected, the losses and the weights are those of a loop by hand."""

    def hooked() -> tuple[nn.Module, Keep, Loss]:
        net = network()
        keep = Keep(net if holds_model else None)
        hook = CALLABLES[called](keep, kind, net)
        getattr(net.get_submodule(place), HOOKS[kind])(hook)

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            value = functional.mse_loss(outputs, targets)
            return value + 0.1 * keep.penalty() if penalised else value

        return net, keep, loss

    wanted_net, wanted, loss = hooked()
    losses = by_hand(wanted_net, loss, pieces=2 if mode == "pieces" else 1)
    net, keep, loss = hooked()
    found, state = by_loop(net, loss, **MODES[mode])
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(keep.numbers, wanted.numbers, rtol=1e-5, atol=1e-6)
    for new, old in zip(state.params.values(), wanted_net.parameters(), strict=True):
        torch.testing.assert_close(new, old.detach())
    assert all(torch.equal(a, b) for a, b in zip(network().parameters(), net.parameters(), strict=True))


class Collecting(nn.Module):
    """Its forward, or a hook, puts the outputs in an attribute."""

    def __init__(self, seen: Any, put: Callable[[Any, Tensor], object], by_hook: bool) -> None:
        super().__init__()
        self.layer, self.seen, self.put = nn.Linear(3, 2), seen(), put
        if by_hook:  # the closure has the module itself, which in a copy is the copy
            self.layer.register_forward_hook(lambda module, inputs, output: put(self.seen, output))
        self.by_hook = by_hook

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if not self.by_hook:
            self.put(self.seen, outputs)
        return outputs


COLLECTORS: dict[str, tuple[Any, Any, Any]] = {
    "list": (list, lambda seen, y: seen.append(y), lambda seen: seen[-1]),
    "dict": (dict, lambda seen, y: seen.update(last=y), lambda seen: seen["last"]),
    "object": (Keep, lambda seen, y: seen.take(y), lambda seen: seen.last),
    "nested": (
        lambda: {"inner": ([], Keep())},
        lambda seen, y: seen["inner"][0].append(y),
        lambda seen: seen["inner"][0][-1],
    ),
}


def test_what_a_forward_collects_in_an_attribute_is_seen_by_the_loss() -> None:
    for seen, put, last in COLLECTORS.values():
        for by_hook in (False, True):
            losses = []
            for train in (by_hand, lambda *each: by_loop(*each)[0]):
                net = made(Collecting, seen, put, by_hook)
                loss = lambda y, t: functional.mse_loss(y, t) + last(net.seen).square().mean()  # noqa: E731
                losses.append(train(net, loss))
            torch.testing.assert_close(losses[1], losses[0])


def test_a_module_that_has_its_own_loss_reads_what_its_forward_set() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs: Any) -> Tensor:
            outputs: Tensor = self.layer(inputs[0] if isinstance(inputs, tuple) else inputs)
            self.penalty = outputs.square().mean()
            return outputs

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return functional.mse_loss(outputs, batch[1]) + self.penalty

    net = made(Own)
    losses = by_hand(net, lambda outputs, targets: net.loss(outputs, (None, targets)))
    torch.testing.assert_close(by_loop(made(Own), None)[0], losses)


def test_a_teacher_in_a_list_is_the_users_own() -> None:
    """It is not copied, and what the loop's body does to it, such as an average of the student, is seen."""

    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = {"teacher": [nn.Linear(3, 2)]}
            self.student = nn.Linear(3, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.hidden["teacher"][0](inputs)
            return torch.stack([self.student(inputs), target])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs[0], targets) + functional.mse_loss(outputs[0], outputs[1])

    def follow(model: Any, weight: Tensor) -> None:
        with torch.no_grad():
            model.hidden["teacher"][0].weight.lerp_(weight, 0.5)

    hand, model = made(Taught), made(Taught)
    losses = by_hand(hand, loss, after=lambda: follow(hand, hand.student.weight))
    found, _ = by_loop(model, loss, after=lambda state: follow(model, state.params["student.weight"]))
    torch.testing.assert_close(found, losses)


def test_a_plain_object_that_holds_a_submodule_is_copied_with_the_tree() -> None:
    class Attention:
        def __init__(self, projection: nn.Module) -> None:
            self.projection = projection

        def __call__(self, inputs: Tensor) -> Tensor:
            return self.projection(inputs)  # type: ignore[no-any-return]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.attention = Attention(self.layer)
            self.again = lambda inputs: self.layer(inputs)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.attention(inputs) + self.again(inputs)

    losses = by_hand(made(Net), functional.mse_loss)
    found, state = by_loop(made(Net), functional.mse_loss)
    torch.testing.assert_close(found, losses)
    module: Any = state.module()
    assert module.attention.projection is module.layer
    assert module.again(torch.ones(1, 3)).equal(module.layer(torch.ones(1, 3)))


def test_module_is_independent_but_for_the_objects_of_hooks() -> None:
    """Which may hold what can't be copied; hooks of state_dict() call them, too."""
    net, keep = network(), Keep()
    keep.lock = threading.Lock()  # type: ignore[attr-defined]
    net.register_forward_hook(keep.forward_hook)
    count = functools.partial(lambda keep, *args: keep.numbers.append(1.0), keep)
    net.register_state_dict_post_hook(count)
    net.register_load_state_dict_pre_hook(count)
    net.widths, net.mask = [4, 4], torch.ones(3)
    _, state = by_loop(net, functional.mse_loss)
    assert len(keep.numbers) == 3
    module: Any = state.module()
    module.widths.append(1)
    module.mask.zero_()
    module(torch.ones(1, 3))
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
        net.register_forward_hook(CALLABLES[kind](keep, "forward_hook", net))
        with pytest.raises(pl.errors.CompileError, match=r"an object outside of the module tree to keep"):
            by_loop(net, functional.mse_loss, compile=True)
