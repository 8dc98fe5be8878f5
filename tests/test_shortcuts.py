"""Torch's own modules are called without a look for hooks, and whoever would notice is called as ever."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations

import pure_loop as pl
from pure_loop import Event
from pure_loop._shortcuts import Shortcuts
from tests.models import CLASSES, FEATURES, batches

DATA = batches((4,) * 6, seed=0)
WATCHES = [None, {Event.BATCH_END}]


class Net(nn.Module):
    """A module of the user's around torch's; ``inside`` is called with it in its forward."""

    def __init__(self, inside: Callable[[Net], None] = lambda net: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))
        self.inside = inside

    def forward(self, inputs: Tensor) -> Tensor:
        self.inside(self)
        found: Tensor = self.layers(inputs)
        return found


def stream(model: nn.Module, watch: Any = None) -> Iterator[tuple[Event, pl.State]]:
    settings: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    return pl.fit(model, DATA, watch=watch, **settings)


def shortened(module: nn.Module) -> list[str]:
    return [name for name, each in module.named_modules() if "_compiled_call_impl" in vars(each)]


@pytest.mark.parametrize("watch", WATCHES)
def test_torchs_own_modules_are_called_at_once(watch: Any) -> None:
    found: list[list[str]] = []
    pl.run(stream(Net(lambda net: found.append(shortened(net))), watch))
    assert found == [["layers", "layers.0", "layers.1", "layers.2"]] * len(DATA)


class OfOnesOwn(nn.Linear):
    pass


def with_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    return layer


def with_forward() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = lambda inputs: inputs  # type: ignore[method-assign]
    return layer


def compiled() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer._compiled_call_impl = lambda inputs: inputs  # what layer.compile() does
    return layer


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "a subclass": lambda: OfOnesOwn(2, 2),
    "a hook": with_hook,
    "a forward of its own": with_forward,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "compiled": compiled,
}


@pytest.mark.parametrize("what", OTHERS)
def test_others_are_called_as_ever(what: str) -> None:
    module = OTHERS[what]()
    before = vars(module).get("_compiled_call_impl")
    Shortcuts(module)
    assert vars(module).get("_compiled_call_impl") is before
    assert type(module._forward_hooks) is OrderedDict


@pytest.mark.parametrize("watch", WATCHES)
def test_a_hook_that_a_forward_registers_is_called_in_it(watch: Any) -> None:
    seen: list[int] = []
    handles: list[Any] = []

    def inside(net: Net) -> None:
        for handle in handles:
            handle.remove()
        layer: Any = net.layers[0]
        handles[:] = [
            layer.register_forward_hook(lambda *_: seen.append(1)),
            layer.register_forward_pre_hook(lambda *_: seen.append(2), prepend=True),
            net.layers[2].register_full_backward_hook(lambda *_: seen.append(3)),
        ]

    pl.run(stream(Net(inside), watch))
    assert seen == [2, 1, 3] * len(DATA)


@pytest.mark.parametrize("watch", WATCHES)
def test_a_hook_of_all_modules_is_called_from_the_next_forward_on(watch: Any) -> None:
    seen: list[type] = []
    handle = None
    try:
        for event, state in stream(Net(), watch):
            if event is Event.BATCH_END and state.timestamp.batch == 3:
                handle = register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    finally:
        assert handle is not None
        handle.remove()
    of_a_batch = [nn.Linear, nn.ReLU, nn.Linear, nn.Sequential, Net]
    assert [each for each in seen if each in of_a_batch] == of_a_batch * (len(DATA) - 3)


@pytest.mark.parametrize("watch", WATCHES)
def test_a_forward_that_is_put_into_the_class_is_called_from_the_next_forward_on(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, right = [], nn.ReLU.forward

    def noted(self: nn.ReLU, inputs: Tensor) -> Tensor:
        called.append(len(inputs))
        return right(self, inputs)

    for event, state in stream(Net(), watch):
        if event is Event.BATCH_END and state.timestamp.batch == 2:
            monkeypatch.setattr(nn.ReLU, "forward", noted)
    assert called == [4] * (len(DATA) - 2)


@pytest.mark.parametrize("watch", WATCHES)
def test_a_private_module_goes_with_the_last_who_needs_it(watch: Any) -> None:
    """Without Python's collector: a bound method in its own object is a cycle."""
    found: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        pl.run(stream(Net(lambda net: found.append(weakref.ref(net.layers[0]))), watch))
        assert len(found) == len(DATA)
        assert {each() for each in found} == {None}
    finally:
        gc.enable()


def test_a_copy_of_a_private_module_is_as_any_other() -> None:
    copies: list[Any] = []
    pl.run(stream(Net(lambda net: copies.append(copy.deepcopy(net.layers)))))
    assert not shortened(copies[0])
    assert {type(each._forward_hooks) for each in copies[0].modules()} == {OrderedDict}
    copies[0][1].register_forward_hook(lambda *_: torch.zeros(4, 5))
    assert torch.equal(copies[0](DATA[0][0]), copies[0][2].bias.expand(4, -1))


def test_what_is_left_out_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = {Event.BATCH_END}
    with monkeypatch.context() as patch:
        patch.setattr(Shortcuts, "hold", lambda self: True)
        with pytest.raises(AssertionError):
            test_a_hook_of_all_modules_is_called_from_the_next_forward_on(watch)
        with pytest.raises(AssertionError):
            test_a_forward_that_is_put_into_the_class_is_called_from_the_next_forward_on(watch, patch)
    with monkeypatch.context() as patch:
        patch.setattr("pure_loop._shortcuts._Hooks.__setitem__", OrderedDict.__setitem__)
        with pytest.raises(AssertionError):
            test_a_hook_that_a_forward_registers_is_called_in_it(watch)
    with monkeypatch.context() as patch:
        patch.delattr("pure_loop.model.Instance.__del__")
        with pytest.raises(AssertionError):
            test_a_private_module_goes_with_the_last_who_needs_it(watch)
