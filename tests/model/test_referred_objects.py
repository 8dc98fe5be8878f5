"""What a module refers to besides its tree (the objects of hooks, collectors, a hidden teacher) is the user's own."""

from __future__ import annotations

import functools
import io
import queue
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from tests.support.tiers import examples


class Keep:
    """Collects what passes a layer; ``model`` is what such objects often hold, too."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.numbers: list[float] = []
        self.last: Tensor | None = None
        self.model = model

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


class Called(Keep):
    """The same as a callable object, for each kind of hook."""

    kind = "forward_hook"

    def __call__(self, *args: Any) -> None:
        getattr(self, self.kind)(*args)


def _method(keep: Keep, kind: str, net: nn.Module) -> Any:
    return getattr(keep, kind)


def _callable(keep: Keep, kind: str, net: nn.Module) -> Any:
    keep.__class__ = Called
    keep.kind = kind  # type: ignore[attr-defined]
    return keep


def _partial(keep: Keep, kind: str, net: nn.Module) -> Any:
    return functools.partial(getattr(Keep, kind), keep)


def _closure(keep: Keep, kind: str, net: nn.Module) -> Any:
    return lambda *args: getattr(keep, kind)(*args)


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
    "method": _method,
    "callable": _callable,
    "partial": _partial,
    "closure": _closure,
    "closure over the model": _closure_over_the_model,
    "defaults": _defaults,
    "partial of the model": _partial_of_the_model,
}
HOOKS = {
    "forward_hook": "register_forward_hook",
    "pre_hook": "register_forward_pre_hook",
    "backward_hook": "register_full_backward_hook",
}
PLACES = ("", "0", "1", "1.0")
MODES: dict[str, dict[str, Any]] = {
    "every event": {},
    "watch": {"watch": {Event.BATCH_END}},
    "keep": {"donate": False},
    "strict": {"strict": True},
    "pieces": {"microbatch_size": 2},
}
RATE = 0.1


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(3)]


Loss = Callable[[Any, Any], Tensor]


def by_hand(model: nn.Module, loss: Loss, pieces: int = 1) -> list[float]:
    """The losses of a loop by hand; the model is trained."""
    found = []
    for inputs, targets in batches():
        model.zero_grad()
        total = 0.0
        for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            value = loss(model(x), y)
            (value / pieces).backward()
            total += float(value.detach()) / pieces
        found.append(total)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    return found


def by_loop(model: nn.Module, loss: Loss | None, **options: Any) -> tuple[list[float], pl.State]:
    settings: dict[str, Any] = {"loss": loss, "optimizer": pl.optim.sgd(lr=RATE), "max_duration": "1ep"}
    losses, state = [], None
    for event, state in pl.fit(model, batches(), **settings, **options):
        if event is Event.BATCH_END:
            losses.append(float(state.loss))
    assert state is not None
    return losses, state


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@given(
    kind=st.sampled_from(sorted(HOOKS)),
    called=st.sampled_from(sorted(CALLABLES)),
    place=st.sampled_from(PLACES),
    holds_model=st.booleans(),
    penalised=st.booleans(),
    mode=st.sampled_from(sorted(MODES)),
)
@examples(60, 3000)
def test_hooks_fill_the_objects_of_the_user(
    kind: str, called: str, place: str, holds_model: bool, penalised: bool, mode: str
) -> None:
    """What the object collected, the losses and the weights are those of a loop by hand.

    Neighbours tried below: state_dict hooks, a teacher in a list, collectors as attributes, attributes that a forward
    sets, hooks of state.module().
    """

    def made() -> tuple[nn.Module, Keep, Loss]:
        net = network()
        keep = Keep(net if holds_model else None)
        hook = CALLABLES[called](keep, kind, net)
        getattr(net.get_submodule(place), HOOKS[kind])(hook)

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            value = functional.mse_loss(outputs, targets)
            return value + 0.1 * keep.penalty() if penalised else value

        return net, keep, loss

    wanted_net, wanted, loss = made()
    losses = by_hand(wanted_net, loss, pieces=2 if mode == "pieces" else 1)
    net, keep, loss = made()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    found, state = by_loop(net, loss, **MODES[mode])
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(keep.numbers, wanted.numbers, rtol=1e-5, atol=1e-6)
    for new, old in zip(state.params.values(), wanted_net.parameters(), strict=True):
        torch.testing.assert_close(new, old.detach())
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


class Collecting(nn.Module):
    """Collects in an attribute: a list, a dict, an object, or what a function of its own reaches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen: Any = {"list": [], "dict": {}, "object": Keep(), "hook": {}, "nested": {"inner": ([], Keep())}}[kind]
        self.kind = kind
        if kind == "hook":
            # The closure has the module itself, which in a copy is the copy.
            self.layer.register_forward_hook(lambda module, inputs, output: self.seen.update(last=output))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if self.kind == "list":
            self.seen.append(outputs)
        elif self.kind == "dict":
            self.seen["last"] = outputs
        elif self.kind == "object":
            self.seen.take(outputs)
        elif self.kind == "nested":
            self.seen["inner"][0].append(outputs)
        return outputs

    def last(self) -> Tensor:
        found = {
            "list": lambda: self.seen[-1],
            "dict": lambda: self.seen["last"],
            "object": lambda: self.seen.last,
            "hook": lambda: self.seen["last"],
            "nested": lambda: self.seen["inner"][0][-1],
        }[self.kind]()
        assert isinstance(found, Tensor)
        return found


@pytest.mark.parametrize("kind", ["list", "dict", "object", "hook", "nested"])
def test_what_a_forward_collects_in_an_attribute_is_seen_by_the_loss(kind: str) -> None:
    def made() -> tuple[Collecting, Loss]:
        torch.manual_seed(0)
        net = Collecting(kind)
        return net, lambda outputs, targets: functional.mse_loss(outputs, targets) + net.last().square().mean()

    net, loss = made()
    losses = by_hand(net, loss)
    net, loss = made()
    found, _ = by_loop(net, loss)
    torch.testing.assert_close(found, losses)


class Setting(nn.Module):
    """Its forward sets an attribute, which a loss by hand would read from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.penalty: Any = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        self.penalty = outputs.square().mean()
        return outputs


def _loss_by_closure(net: Setting) -> Any:
    return lambda outputs, targets: functional.mse_loss(outputs, targets) + net.penalty


def _loss_by_method(net: Setting) -> Any:
    class Criterion:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return functional.mse_loss(outputs, targets) + self.model.penalty  # type: ignore[no-any-return, operator]

    return Criterion(net)


def _loss_by_partial(net: Setting) -> Any:
    def loss(net: Setting, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets) + net.penalty

    return functools.partial(loss, net)


def _loss_by_global(net: Setting) -> Any:
    namespace: dict[str, Any] = {"model": net, "mse": functional.mse_loss}
    exec("def loss(outputs, targets):\n    return mse(outputs, targets) + model.penalty", namespace)
    return namespace["loss"]


@pytest.mark.parametrize("mode", [{}, {"watch": {Event.EPOCH_END}}, {"donate": False}], ids=["all", "watch", "keep"])
@pytest.mark.parametrize("made", [_loss_by_closure, _loss_by_method, _loss_by_partial, _loss_by_global])
def test_an_attribute_that_a_forward_sets_for_the_loss_is_an_error(
    made: Callable[[Setting], Any], mode: dict[str, Any]
) -> None:
    net = Setting()
    with pytest.raises(pl.errors.ModelError, match=r"the forward sets model\.penalty, .* Return the value from the f"):
        by_loop(net, made(net), **mode)


def test_a_module_that_has_its_own_loss_reads_what_its_forward_set() -> None:
    class Own(Setting):
        def forward(self, inputs: Any) -> Tensor:
            return super().forward(inputs[0])

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return functional.mse_loss(outputs, batch[1]) + self.penalty  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Setting()
    losses = by_hand(net, _loss_by_closure(net))
    torch.manual_seed(0)
    found, _ = by_loop(Own(), None)
    torch.testing.assert_close(found, losses)


class Taught(nn.Module):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.student = nn.Linear(3, 2)
        self.hidden = {"teacher": [teacher]}

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.hidden["teacher"][0](inputs)
        outputs: Tensor = self.student(inputs)
        return torch.stack([outputs, target])


def test_a_teacher_in_a_list_is_the_users_own() -> None:
    """It is not copied, and what the loop's body does to it, such as an average of the student, is seen."""

    def made() -> tuple[Taught, nn.Linear]:
        torch.manual_seed(0)
        teacher = nn.Linear(3, 2)
        return Taught(teacher), teacher

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs[0], targets) + functional.mse_loss(outputs[0], outputs[1])

    def follow(teacher: nn.Linear, weight: Tensor) -> None:
        with torch.no_grad():
            teacher.weight.lerp_(weight, 0.5)

    model, teacher = made()
    losses = []
    for inputs, targets in batches():
        model.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        losses.append(float(value.detach()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
        follow(teacher, model.student.weight)

    model, teacher = made()
    found = []
    for event, state in pl.fit(model, batches(), loss=loss, optimizer=pl.optim.sgd(lr=RATE), max_duration="1ep"):
        if event is Event.BATCH_END:
            found.append(float(state.loss))
            follow(teacher, state.params["student.weight"])
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

    torch.manual_seed(0)
    net = Net()
    losses = by_hand(net, functional.mse_loss)
    torch.manual_seed(0)
    net = Net()
    found, state = by_loop(net, functional.mse_loss)
    torch.testing.assert_close(found, losses)
    module: Any = state.module()
    assert module.attention.projection is module.layer
    assert module.again(torch.ones(1, 3)).equal(module.layer(torch.ones(1, 3)))


def test_state_dict_hooks_call_the_users_object() -> None:
    net, keep = network(), Keep()

    def hook(keep: Keep, module: nn.Module, *args: Any) -> None:
        keep.numbers.append(1.0)

    net.register_state_dict_post_hook(functools.partial(hook, keep))
    net.register_load_state_dict_pre_hook(functools.partial(hook, keep))
    _, state = by_loop(net, functional.mse_loss)
    seen = len(keep.numbers)
    module = state.module()
    module.load_state_dict(module.state_dict())
    assert len(keep.numbers) == seen + 2


def test_module_is_independent_but_for_the_objects_of_hooks() -> None:
    net, keep = network(), Keep()
    net.register_forward_hook(keep.forward_hook)
    net.widths = [4, 4]
    net.mask = torch.ones(3)
    state = pl.State.create(net)
    module: Any = state.module()
    module.widths.append(1)
    module.mask.zero_()
    module(torch.ones(1, 3))
    assert net.widths == [4, 4]
    assert net.mask.sum() == 3
    assert state.module().widths == [4, 4]
    assert len(keep.numbers) == 1


@pytest.mark.parametrize("kind", ["closure", "method"])
def test_a_collecting_hook_is_refused_in_a_graph(kind: str) -> None:
    class Last(Keep):
        def forward_hook(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.last = output

    net, keep = network(), Last()
    net.register_forward_hook(CALLABLES[kind](keep, "forward_hook", net))
    with interpreted(), pytest.raises(pl.errors.CompileError, match=r"an object outside of the module tree to keep"):
        by_loop(net, functional.mse_loss, compile=True)


def uncopyable() -> Iterator[Any]:
    """What a module may have in an attribute and Python can't copy, and what the error says of it."""
    yield pytest.param(threading.Lock, r"model\.layer\.resource is a lock", id="lock")
    yield pytest.param(threading.RLock, r"model\.layer\.resource is a RLock", id="rlock")
    yield pytest.param(queue.Queue, r"model\.layer\.resource\.\w+(\.\w+)* is a lock", id="queue")
    yield pytest.param(threading.Event, r"model\.layer\.resource\.\w+(\.\w+)* is a lock", id="event")
    yield pytest.param(lambda: (i for i in range(3)), r"model\.layer\.resource is a generator", id="generator")
    yield pytest.param(socket.socket, r"model\.layer\.resource is a socket", id="socket")
    yield pytest.param(threading.local, r"model\.layer\.resource is a _local", id="local")
    yield pytest.param(lambda: io.FileIO(__file__), r"model\.layer\.resource is a FileIO", id="file")
    yield pytest.param(lambda: {"a": [threading.Lock()]}, r"model\.layer\.resource\['a'\]\[0\] is a lock", id="nested")


@pytest.mark.parametrize(("made", "message"), list(uncopyable()))
def test_what_cant_be_copied_is_named_at_the_call(made: Callable[[], Any], message: str) -> None:
    net = nn.Sequential()
    net.layer = nn.Linear(3, 2)
    net.layer.resource = made()
    try:
        with pytest.raises(pl.errors.ModelError, match=message + ".* Keep it outside of the module"):
            pl.fit(net, batches(), loss=functional.mse_loss, optimizer=pl.optim.sgd(lr=RATE), max_duration="1ep")
    finally:
        if hasattr(net.layer.resource, "close"):
            net.layer.resource.close()


def test_an_object_of_a_hook_may_hold_what_cant_be_copied() -> None:
    net, keep = network(), Keep()
    keep.lock = threading.Lock()  # type: ignore[attr-defined]
    net.register_forward_hook(keep.forward_hook)
    _, state = by_loop(net, functional.mse_loss)
    state.module()(torch.ones(1, 3))
    assert len(keep.numbers) == 4


def pruned() -> nn.Module:
    net = network()
    for layer in (net[0], net[2]):  # type: ignore[index]
        prune.l1_unstructured(layer, "weight", amount=0.5)
    return net


def structurally_pruned() -> nn.Module:
    net = network()
    prune.ln_structured(net[0], "weight", amount=0.5, n=2, dim=0)  # type: ignore[index]
    prune.random_unstructured(net[0], "bias", amount=0.5)  # type: ignore[index]
    return net


def normalised(function: Callable[[nn.Module], nn.Module]) -> nn.Module:
    net: Any = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates both
        net[0] = function(net[0])
    return net  # type: ignore[no-any-return]


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize(
    "made",
    [
        pruned,
        structurally_pruned,
        functools.partial(normalised, nn.utils.weight_norm),
        functools.partial(normalised, nn.utils.spectral_norm),
    ],
    ids=["pruned", "structured", "weight norm", "spectral norm"],
)
def test_weights_that_a_hook_computes_train_as_by_hand(made: Callable[[], nn.Module], used: bool) -> None:
    """A pruned weight and one of the old weight_norm are plain attributes, which a hook sets before each forward."""
    models = [made(), made()]
    for model in models:
        if used:
            model(torch.ones(2, 3)).sum().backward()
    torch.manual_seed(0)
    hand, model = models
    model.load_state_dict(hand.state_dict())
    losses = by_hand(hand, functional.mse_loss)
    found, state = by_loop(model, functional.mse_loss)
    torch.testing.assert_close(found, losses)
    module = state.module()
    inputs = batches()[0][0]
    torch.testing.assert_close(module.eval()(inputs), hand.eval()(inputs))


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: nn.LazyBatchNorm1d(affine=False), "running_mean"),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d(affine=False)), "1.running_mean"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight"),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d()), "0.weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_are_refused_by_name(made: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(pl.errors.ModelError, match=f"'{name}' of a lazy module has no shape yet: call the model"):
        pl.fit(made(), batches(), loss=functional.mse_loss, optimizer=pl.optim.sgd(lr=RATE), max_duration="1ep")
