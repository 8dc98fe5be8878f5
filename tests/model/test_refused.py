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
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support.refused import Refusal, check, rows
from tests.support.subclassing import KINDS, Wrapped

DATA = [(torch.ones(4, 4), torch.zeros(4, 4))] * 3


def fit(model: nn.Module, data: Any = DATA, **options: Any) -> pl.Stream:
    defaults: dict[str, Any] = {"loss": functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    return pl.fit(model, data, **defaults | options)


def holding(fill: Callable[[Any], object]) -> Any:
    model: Any = nn.Module()
    model.a, model.b = nn.Linear(4, 4), nn.Linear(4, 4)
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


ARRAY = np.zeros(4, dtype=np.float32)
# A write to one shows in the other by hand, and in a State it would not.
SHARING: dict[str, tuple[Callable[[Any], object], tuple[str, str]]] = {
    "data of another": (lambda m: setattr(m.b.weight, "data", m.a.weight.data), ("a.weight", "b.weight")),
    "parameter of a parameter": (
        lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight)),
        ("a.weight", "b.weight"),
    ),
    "view of a parameter": (buffers(row=lambda m: m.a.weight.data[0]), ("a.weight", "row")),
    "parameter as a buffer": (buffers(again=lambda m: m.a.weight), ("a.weight", "again")),
    "overlap": (two_of(torch.zeros(6), lambda t: t[:4], lambda t: t[2:]), ("first", "second")),
    "crossing columns": (two_of(torch.zeros(4, 6), lambda t: t[:, :3], lambda t: t[:, 2:]), ("first", "second")),
    "other dtype": (
        two_of(torch.zeros(4, dtype=torch.int32), lambda t: t, lambda t: t.view(torch.float32)[1:]),
        ("first", "second"),
    ),
    "expanded": (
        two_of(torch.zeros(1), lambda t: t, lambda t: t.expand(4).as_strided((1,), (1,))),
        ("first", "second"),
    ),
    "two storages of one array": (
        buffers(first=lambda m: torch.from_numpy(ARRAY), second=lambda m: torch.from_numpy(ARRAY[1:])),
        ("first", "second"),
    ),
    "view in an attribute": (
        lambda m: (m.register_buffer("base", torch.zeros(4)), setattr(m, "heads", {"head": m.base[:2]})),
        ("base", "heads"),
    ),
}
FOUR = torch.zeros(1).expand(4)


def test_tensors_that_share_memory_are_refused_by_name() -> None:
    """At each door; and those that overlap with themselves, of which ``m.four[0] = 1`` writes to all elements."""
    for name, (fill, tensors) in SHARING.items():
        model = holding(fill)
        says = ("share memory", "assign the object itself", *map(repr, tensors))
        for call in (lambda: fit(model), lambda: pl.State.create(model)):
            check(Refusal(name, call, pl.ModelError, says))
    surgery = lambda: pl.State.create(nn.Linear(1, 1)).with_module(model)  # noqa: E731
    check(Refusal("surgery", surgery, pl.ModelError, says))
    for kind, fill in (
        ("buffer", buffers(four=lambda m: FOUR)),
        ("parameter", lambda m: setattr(m, "four", nn.Parameter(FOUR))),
    ):
        says = f"{kind} 'four' of shape (4,) has strides (0,)", "clone"
        check(Refusal(kind, lambda: fit(holding(fill)), pl.ModelError, says))


def test_memory_that_is_not_shared_passes() -> None:
    """Columns of a matrix; RNNs list their weights in an attribute; a table on the meta device has no memory."""
    model: Any = nn.LSTM(4, 4)
    model.register_buffer("nothing", torch.empty(3, device="meta"))
    matrix = torch.randn(4, 8)
    for name, columns in (("even", matrix[:, ::2]), ("odd", matrix[:, 1::2])):
        model.register_buffer(name, columns)
    assert len(pl.State.create(model).params) == 4


# In the forward


class Makes(nn.Module):
    """A submodule, parameter or buffer made in the forward by ``make``."""

    def __init__(self, make: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4), make
        self.register_buffer("one", torch.ones(4))
        self.register_buffer("two", torch.ones(4))
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.make(self, y.detach())
        return y * self.one * self.two


def norms() -> nn.Module:
    return nn.ModuleList([nn.BatchNorm1d(2, affine=False)])


MADE: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "a parameter": (lambda m, y: setattr(m, "w", nn.Parameter(y.mean(0))), "created the parameter 'w'"),
    "a parameter for None": (lambda m, y: setattr(m, "nothing", nn.Parameter(y)), "created the parameter 'nothing'"),
    "inside": (lambda m, y: setattr(m.layer, "w", nn.Parameter(y)), "created the parameter 'layer.w'"),
    "another": (lambda m, y: setattr(m.layer, "bias", nn.Parameter(y.mean(0))), "replaced the parameter 'layer.bias'"),
    "none any more": (lambda m, y: delattr(m.layer, "bias"), "removed the parameter 'layer.bias'"),
    "None": (lambda m, y: setattr(m.layer, "bias", None), "removed the parameter 'layer.bias'"),
    "a layer": (lambda m, y: setattr(m, "head", nn.Linear(2, 2)), "put a Linear in the model, as 'head'"),
    "another layer": (lambda m, y: setattr(m, "layer", nn.Linear(4, 4)), "put a Linear in the model, as 'layer'"),
    "a list of layers": (lambda m, y: m.add_module("heads", norms()), "as 'heads'"),
    "no layer": (lambda m, y: delattr(m, "layer"), "removed the submodule 'layer'"),
    "one for two": (lambda m, y: setattr(m, "one", m.two), "buffer 'one' and buffer 'two' in the same memory"),
    "a part": (lambda m, y: setattr(m, "one", m.two[:1]), "in the same memory"),
    "of a parameter": (
        lambda m, y: setattr(m, "one", m.layer.bias.detach()),
        "parameter 'layer.bias' and buffer 'one' in the same memory",
    ),
    "a number": (lambda m, y: m._buffers.update(one=3), "set buffer 'one' to 3"),
}
IN_FORWARDS = [
    Refusal(name, functools.partial(fit, Makes(make)), pl.ModelError, (says, "batch 0"), at_once=False)
    for name, (make, says) in MADE.items()
]


class Setting(nn.Module):
    """Its forward sets an attribute, which a loss by hand would read from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.penalty: Any = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        self.penalty = outputs.square().mean()
        return outputs


class Criterion:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        return functional.mse_loss(outputs, targets) + self.model.penalty


def penalised(net: Any, outputs: Tensor, targets: Tensor) -> Any:
    return functional.mse_loss(outputs, targets) + net.penalty


NET = Setting()
LOSSES: dict[str, Any] = {
    "closure": (lambda net: lambda outputs, targets: penalised(net, outputs, targets))(NET),
    "object": Criterion(NET),
    "partial": functools.partial(penalised, NET),
    "global": lambda outputs, targets: penalised(NET, outputs, targets),
}
IN_FORWARDS += [
    Refusal(
        f"attribute for a loss, {name}",
        functools.partial(fit, NET, loss=loss),
        pl.ModelError,
        ("the forward sets model.penalty, ", "Return the value from the f"),
        at_once=False,
    )
    for name, loss in LOSSES.items()
]


@rows(IN_FORWARDS)
def test_what_a_forward_makes_and_no_state_can_hold(refusal: Refusal) -> None:
    check(refusal)


def test_so_it_is_where_few_events_are_observed() -> None:
    for name in ("a parameter", "a layer", "a part"):
        make, says = MADE[name]
        call = lambda: fit(Makes(make), watch={Event.BATCH_END})  # noqa: E731
        check(Refusal(name, call, pl.ModelError, (says, "batch 0"), at_once=False))
    call = lambda: fit(NET, loss=LOSSES["closure"], watch={Event.EPOCH_END})  # noqa: E731
    check(Refusal("closure", call, pl.ModelError, ("the forward sets model.penalty, ",), at_once=False))


# At the call


def with_buffer(kind: str) -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("scale", KINDS[kind](torch.ones(2)))
    return model


def wrapped() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight = nn.Parameter(Wrapped(torch.ones(2, 3)))
    return model


KEPT: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "wrapper": (
        lambda: with_buffer("wrapper"),
        ("buffer 'scale' is a Wrapped, a subclass of torch.Tensor, ", "register a plain tensor"),
    ),
    "mkldnn": (lambda: with_buffer("mkldnn"), ("buffer 'scale' has the layout torch._mkldnn, ", "tensor.to_dense()")),
    "quantised": (lambda: with_buffer("quantised"), ("buffer 'scale' is quantised (torch.qint8)",)),
    "nested": (lambda: with_buffer("nested"), ("buffer 'scale' is a nested tensor: keep its values",)),
    "parameter": (wrapped, ("parameter '0.weight' is a Wrapped, ", "nn.Parameter(tensor)")),
    "lazy norm": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d(affine=False)),
        ("'1.running_mean' of a lazy module has no shape yet: call the model",),
    ),
    "lazy layer": (lambda: nn.Sequential(nn.LazyLinear(2)), ("'0.weight' of a lazy module has no shape yet",)),
}


@pytest.mark.filterwarnings("ignore:.*(quantized|nested) tensor")
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_tensors_of_other_classes() -> None:
    for name, (make, says) in KEPT.items():
        for options in ({}, {"donate": True}, {"donate": False}):
            check(Refusal(name, lambda: fit(make(), **options), pl.ModelError, says))


def test_a_loss_that_is_sparse() -> None:
    call = lambda: fit(nn.Linear(4, 4), loss=lambda y, t: functional.mse_loss(y, t).to_sparse())  # noqa: E731
    says = ("has the layout torch.sparse_coo; return a dense tensor",)
    check(Refusal("sparse", call, pl.errors.LossError, says, at_once=False))


# What a module may have in an attribute and Python can't copy, and what the error says of it.
UNCOPYABLE: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
    (threading.Lock, ("model.layer.resource is a lock",)),
    (threading.RLock, ("model.layer.resource is a RLock",)),
    (queue.Queue, ("model.layer.resource.", " is a lock")),
    (threading.Event, ("model.layer.resource.", " is a lock")),
    (lambda: (i for i in range(3)), ("model.layer.resource is a generator",)),
    (socket.socket, ("model.layer.resource is a socket",)),
    (threading.local, ("model.layer.resource is a _local",)),
    (lambda: io.FileIO(__file__), ("model.layer.resource is a FileIO",)),
    (lambda: {"a": [threading.Lock()]}, ("model.layer.resource['a'][0] is a lock",)),
]


def test_what_cant_be_copied_is_named_at_the_call() -> None:
    for make, says in UNCOPYABLE:
        model: Any = nn.Sequential()
        model.layer = nn.Linear(4, 4)
        model.layer.resource = make()
        try:
            check(Refusal(says[0], lambda: fit(model), pl.ModelError, (*says, "Keep it outside of the module")))
        finally:
            getattr(model.layer.resource, "close", lambda: None)()


def test_parameters_and_buffers_of_other_names() -> None:
    state = pl.State.create(nn.BatchNorm1d(4))
    params, given, apply = dict(state.params), dict(state.buffers), state.model.apply
    del params["bias"]
    arguments: Any = {"training": True}
    x = torch.ones(2, 4)
    for name, call, error, says in (
        ("missing", lambda: apply(lambda m: m(x), params, given, **arguments), pl.ArgumentError, "missing ['bias']"),
        (
            "unknown",
            lambda: apply(lambda m: m(x), state.params, {**given, "x": x}, **arguments),
            pl.ArgumentError,
            "unknown ['x']",
        ),
        (
            "list",
            lambda: apply(lambda m: m(x), list(params), given, **arguments),
            pl.ArgumentTypeError,
            "params is list",
        ),
        ("mode", lambda: state.module(training="eval"), pl.ArgumentTypeError, "training=False"),
    ):
        check(Refusal(name, call, error, (says,)))
