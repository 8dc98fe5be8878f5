"""Models that no State can hold are refused by name, at the call or in the first batch, with what to write instead."""

from __future__ import annotations

import functools
import io
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError, ArgumentTypeError, ModelError
from tests.support.holding import fit, mse
from tests.support.refused import Refusal, check
from tests.support.subclassing import KINDS, Wrapped


def refused(call: Callable[[], Any], error: type[Exception], *says: str, at_once: bool = True) -> None:
    check(Refusal(says[0], call, error, says, at_once))


def holding(fill: Callable[[Any], object]) -> Any:
    model: Any = nn.Module()
    model.a, model.b = nn.Linear(4, 4), nn.Linear(4, 2)
    model.forward = lambda x: model.b(model.a(x))
    fill(model)
    return model


def buffers(**tensors: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    def fill(model: Any) -> None:
        for name, make in tensors.items():
            model.register_buffer(name, make(model))

    return fill


def two_of(whole: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Any:
    return buffers(first=lambda m: first(whole), second=lambda m: second(whole))


ARRAY, SIX, FOUR = np.zeros(4, dtype=np.float32), torch.zeros(4, 6), torch.zeros(1).expand(4)
INTS = torch.zeros(4, dtype=torch.int32)
# A write to one shows in the other by hand, and in a State it would not.
SHARING: list[tuple[Callable[[Any], object], tuple[str, str]]] = [
    (lambda m: setattr(m.b.weight, "data", m.a.weight.data[:2]), ("a.weight", "b.weight")),
    (lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight[:2])), ("a.weight", "b.weight")),
    (buffers(again=lambda m: m.a.weight), ("a.weight", "again")),
    (two_of(SIX[0], lambda t: t[:4], lambda t: t[2:]), ("first", "second")),
    (two_of(SIX, lambda t: t[:, :3], lambda t: t[:, 2:]), ("first", "second")),
    (two_of(INTS, lambda t: t, lambda t: t.view(torch.float32)[1:]), ("first", "second")),
    (two_of(torch.zeros(1), lambda t: t, lambda t: t.expand(4).as_strided((1,), (1,))), ("first", "second")),
    (buffers(first=lambda m: torch.from_numpy(ARRAY), b2=lambda m: torch.from_numpy(ARRAY[1:])), ("first", "b2")),
    (lambda m: (m.register_buffer("base", torch.zeros(4)), setattr(m, "heads", {"h": m.base[:2]})), ("base", "heads")),
]


def test_tensors_that_share_memory_are_refused_by_name() -> None:
    """At each door; and those that overlap with themselves, of which ``m.four[0] = 1`` writes to all elements."""
    for fill, tensors in SHARING:
        model = holding(fill)
        says = ("share memory", "assign the object itself", *map(repr, tensors))
        for door in (fit, pl.State.create, pl.State.create(nn.Linear(1, 1)).with_module):
            refused(lambda: door(model), ModelError, *says)  # type: ignore[operator]
    for kind, value in (("buffer", FOUR), ("parameter", nn.Parameter(FOUR))):
        fill = buffers(four=lambda m: FOUR) if kind == "buffer" else lambda m: setattr(m, "four", value)
        refused(lambda: fit(holding(fill)), ModelError, f"{kind} 'four' of shape (4,) has strides (0,)", "clone")


def test_memory_that_is_not_shared_passes() -> None:
    """Columns of a matrix; RNNs list their weights in an attribute; a table on the meta device has no memory."""
    model: Any = nn.LSTM(4, 4)
    model.register_buffer("nothing", torch.empty(3, device="meta"))
    model.register_buffer("even", SIX[:, ::2])
    model.register_buffer("odd", SIX[:, 1::2])
    assert len(pl.State.create(model).params) == 4


# In the forward


class Makes(nn.Module):
    """A submodule, parameter or buffer made in the forward by ``make``."""

    def __init__(self, make: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 2), make
        self.register_buffer("one", torch.ones(2))
        self.register_buffer("two", torch.ones(2))
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.make(self, y.detach())
        return y * self.one * self.two


def norms() -> nn.Module:
    return nn.ModuleList([nn.BatchNorm1d(2, affine=False)])


MADE: list[tuple[Callable[[Any, Tensor], object], str]] = [
    (lambda m, y: setattr(m, "w", nn.Parameter(y.mean(0))), "created the parameter 'w'"),
    (lambda m, y: setattr(m, "head", nn.Linear(2, 2)), "put a Linear in the model, as 'head'"),
    (lambda m, y: setattr(m, "one", m.two[:1]), "in the same memory"),
    (lambda m, y: setattr(m, "nothing", nn.Parameter(y)), "created the parameter 'nothing'"),
    (lambda m, y: setattr(m.layer, "w", nn.Parameter(y)), "created the parameter 'layer.w'"),
    (lambda m, y: setattr(m.layer, "bias", nn.Parameter(y.mean(0))), "replaced the parameter 'layer.bias'"),
    (lambda m, y: delattr(m.layer, "bias"), "removed the parameter 'layer.bias'"),
    (lambda m, y: setattr(m.layer, "bias", None), "removed the parameter 'layer.bias'"),
    (lambda m, y: setattr(m, "layer", nn.Linear(4, 2)), "put a Linear in the model, as 'layer'"),
    (lambda m, y: m.add_module("heads", norms()), "as 'heads'"),
    (lambda m, y: delattr(m, "layer"), "removed the submodule 'layer'"),
    (lambda m, y: setattr(m, "one", m.two), "buffer 'one' and buffer 'two' in the same memory"),
    (lambda m, y: setattr(m, "one", m.layer.bias.detach()), "parameter 'layer.bias' and buffer 'one' in the same"),
    (lambda m, y: m._buffers.update(one=3), "set buffer 'one' to 3"),
]


class Setting(nn.Module):
    """Its forward sets an attribute, which a loss by hand would read from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.penalty: Any = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        self.penalty = outputs.square().mean()
        return outputs


class Criterion:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        return penalised(self.model, outputs, targets)


def penalised(net: Any, outputs: Tensor, targets: Tensor) -> Any:
    return mse(outputs, targets) + net.penalty


NET = Setting()
LOSSES: list[Any] = [
    (lambda net: lambda outputs, targets: penalised(net, outputs, targets))(NET),
    Criterion(NET),
    functools.partial(penalised, NET),
    lambda outputs, targets: penalised(NET, outputs, targets),
]


def test_what_a_forward_makes_and_no_state_can_hold() -> None:
    """And so it is where few events are observed."""
    for options in ({}, {"watch": {Event.BATCH_END}}):
        for make, says in MADE[: 3 if options else None]:
            refused(lambda: fit(Makes(make), **options), ModelError, says, "batch 0", at_once=False)
        for loss in LOSSES[: 1 if options else None]:
            says = "the forward sets model.penalty, "
            refused(lambda: fit(NET, loss=loss, **options), ModelError, says, "Return the value", at_once=False)
    sparse = lambda: fit(nn.Linear(4, 2), loss=lambda y, t: mse(y, t).to_sparse())  # noqa: E731
    refused(sparse, pl.errors.LossError, "has the layout torch.sparse_coo; return a dense tensor", at_once=False)


# At the call


def with_buffer(kind: str) -> nn.Module:
    model = nn.Linear(4, 2)
    model.register_buffer("scale", KINDS[kind](torch.ones(2)))
    return model


def with_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 2))
    model[0].weight = nn.Parameter(Wrapped(torch.ones(2, 4)))
    return model


LAZY: list[Any] = [nn.Linear(4, 2), nn.LazyBatchNorm1d(affine=False)]
KEPT: list[tuple[Callable[[], nn.Module], tuple[str, ...]]] = [
    (lambda: with_buffer("wrapper"), ("buffer 'scale' is a Wrapped, a subclass of torch", "register a plain tensor")),
    (lambda: with_buffer("mkldnn"), ("buffer 'scale' has the layout torch._mkldnn, ", "tensor.to_dense()")),
    (lambda: with_buffer("quantised"), ("buffer 'scale' is quantised (torch.qint8)",)),
    (lambda: with_buffer("nested"), ("buffer 'scale' is a nested tensor: keep its values",)),
    (with_weight, ("parameter '0.weight' is a Wrapped, ", "nn.Parameter(tensor)")),
    (lambda: nn.Sequential(*LAZY), ("'1.running_mean' of a lazy module has no shape yet: call the model",)),
    (lambda: nn.Sequential(nn.LazyLinear(2)), ("'0.weight' of a lazy module has no shape yet",)),
]


@pytest.mark.filterwarnings("ignore:.*(quantized|nested) tensor")
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_tensors_of_other_classes() -> None:
    for make, says in KEPT:
        for donate in ("auto", True, False):
            refused(lambda: fit(make(), donate=donate), ModelError, *says)


# What a module may have in an attribute and Python can't copy, and what the error says of it.
UNCOPYABLE: list[tuple[Callable[[], Any], str]] = [
    (threading.Lock, "model.layer.resource is a lock"),
    (threading.RLock, "model.layer.resource is a RLock"),
    (queue.Queue, " is a lock"),
    (lambda: (i for i in range(3)), "model.layer.resource is a generator"),
    (socket.socket, "model.layer.resource is a socket"),
    (threading.local, "model.layer.resource is a _local"),
    (lambda: io.FileIO(__file__), "model.layer.resource is a FileIO"),
    (lambda: {"a": [threading.Lock()]}, "model.layer.resource['a'][0] is a lock"),
]


def test_what_cant_be_copied_is_named_at_the_call() -> None:
    for make, says in UNCOPYABLE:
        model: Any = nn.Sequential()
        model.layer = nn.Linear(4, 4)
        model.layer.resource = make()
        try:
            refused(lambda: fit(model), ModelError, says, "model.layer.resource", "Keep it outside of the module")
        finally:
            getattr(model.layer.resource, "close", lambda: None)()


def test_parameters_and_buffers_of_other_names() -> None:
    state, x = pl.State.create(nn.BatchNorm1d(4)), torch.ones(2, 4)
    params = {name: value for name, value in state.params.items() if name != "bias"}

    def apply(params: Any, **more: Tensor) -> Any:
        return state.model.apply(lambda m: m(x), params, {**state.buffers, **more}, training=True)

    refused(lambda: apply(params), ArgumentError, "missing ['bias']")
    refused(lambda: apply(state.params, x=x), ArgumentError, "unknown ['x']")
    refused(lambda: apply(list(params)), ArgumentTypeError, "params is list")
    refused(lambda: state.module(training="eval"), ArgumentTypeError, "training=False")  # type: ignore[arg-type]
