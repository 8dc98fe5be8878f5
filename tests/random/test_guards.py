"""Whose code it is, by the module that a class or function comes from."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

import pure_loop as pl
from pure_loop.frozendict import Overwritten
from pure_loop.random.authors import is_users
from pure_loop.task import OnTargets, default_forward
from tests.support.cpu_time import within
from tests.support.tiers import examples

ROWS = TensorDataset(torch.ones(4, 2))


def own(*values: Any) -> Any:
    return values[0]


class Own(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class Rows(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(2)


class Declared(nn.Parameter):
    """A parameter of a class of the user's, whose operations may be the user's as well."""


def hooked(register: str) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module, register)(own)
    return module


def with_attribute(name: str, value: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    setattr(module, name, value)
    return module


def generated() -> Iterator[Tensor]:
    yield torch.ones(2)


def update(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
    return params, opt_state


TORCHS: list[Any] = [
    *(functional.cross_entropy, functional.gelu, torch.relu, torch.Tensor.mean, torch.no_grad()(functional.mse_loss)),
    functools.partial(functional.cross_entropy, label_smoothing=0.1),
    nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2)),
    *(nn.TransformerEncoderLayer(4, 2), nn.LSTM(2, 2), nn.CrossEntropyLoss()),
    parametrizations.spectral_norm(nn.Linear(2, 2)),
    prune.l1_unstructured(nn.Linear(2, 2), "weight", 1),  # type: ignore[no-untyped-call]
    *(Subset(ConcatDataset([ROWS, ROWS]), list(range(4))), default_collate, default_forward),
    *(OnTargets(functional.mse_loss), pl.metrics.accuracy(), pl.callbacks.LRMonitor(), pl.optim.adamw(lr=0.1).update),
    # What code refers to may hold an earlier State, which refuses to be read.
    functools.partial(functional.mse_loss, {"kept": Overwritten.by("params", 0)}),
]
_REGISTERS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_pre_hook")
USERS: list[Any] = [
    *(own, random.shuffle, random.random, itemgetter(0), Own, Own(), Rows(), generated(), map(own, [1])),
    *(hooked(f"register_{each}") for each in _REGISTERS),
    *(with_attribute("forward", own), with_attribute("weight", Declared(torch.ones(2, 2)))),
    parametrize.register_parametrization(nn.Linear(2, 2), "weight", Own()),
    *(nn.TransformerEncoderLayer(4, 2, activation=own), nn.TripletMarginWithDistanceLoss(distance_function=own)),
    *(DataLoader(ROWS, collate_fn=own), OnTargets(own), pl.metrics.accuracy().on(outputs=own)),
    functools.wraps(torch.stack)(lambda: None),
    *(types.SimpleNamespace(), object()),
]
HOLDING: list[Callable[[Any], Any]] = [
    lambda value: value,
    lambda value: functools.partial(value) if callable(value) else value,
    lambda value: functools.partial(functional.mse_loss, value),
    lambda value: functools.partial(functional.mse_loss, reduction=value),
    lambda value: [1, value],
    lambda value: {"value": value},
    lambda value: Subset(value, [0, 1]),
    lambda value: with_attribute("held", value),
    OnTargets,
]


@given(st.lists(st.sampled_from(HOLDING), max_size=3))
@examples(10, 200)
def test_code_from_elsewhere_is_found_in_what_holds_it_and_that_of_torch_is_not_the_users(holders: Any) -> None:
    def held(value: Any) -> Any:
        return functools.reduce(lambda inner, holding: holding(inner), holders, value)

    assert [value for value in USERS if not is_users(held(value))] == []
    assert [value for value in TORCHS if is_users(held(value))] == []


def test_a_class_of_torchs_whose_forward_was_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", own)
    assert is_users(nn.Sequential(nn.Linear(2, 2)))


def test_a_model_and_an_optimizer_say_whose_they_are() -> None:
    for module, users in ((nn.Sequential(nn.Dropout()), False), (hooked("register_full_backward_hook"), True)):
        model, _, _ = pl.model.model.ModelDef.split(module)
        assert model.runs_users_code == users
        assert model.may_use_rng
    optimizer = pl.Optimizer(name="own", init=lambda params: {}, update=update, lr=lambda timestamp: 0.1)
    assert optimizer.draws
    assert pl.optim.partition({"one": optimizer}, label=lambda name, tensor: "one").draws
    assert not pl.optim.sgd(lr=0.1).draws


def test_each_object_is_looked_at_once() -> None:
    layers = [nn.Linear(2, 2) for _ in range(1000)]
    for layer in layers:
        vars(layer)["all"] = layers
    assert not within(2.0, lambda: is_users(layers))
    assert not is_users(None)
