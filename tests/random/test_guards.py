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
from pure_loop.optim import Optimizer
from pure_loop.random.authors import is_users, runs_users_code
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


def hooked(register: str, hook: Callable[..., Any] = own) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module, register)(hook)
    return module


def with_attribute(name: str, value: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    setattr(module, name, value)
    return module


def generated() -> Iterator[Tensor]:
    yield torch.ones(2)


TORCHS: dict[str, Any] = {
    "function": functional.cross_entropy,
    "function in C": functional.gelu,
    "function of a class in C": torch.relu,
    "method of a class in C": torch.Tensor.mean,
    "decorated": torch.no_grad()(functional.mse_loss),
    "partial": functools.partial(functional.cross_entropy, label_smoothing=0.1),
    "layers": nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2)),
    "attention": nn.TransformerEncoderLayer(4, 2),
    "recurrent": nn.LSTM(2, 2),
    "parametrized": parametrizations.spectral_norm(nn.Linear(2, 2)),
    "pruned": prune.l1_unstructured(nn.Linear(2, 2), "weight", 1),  # type: ignore[no-untyped-call]
    "loss": nn.CrossEntropyLoss(),
    "dataset": Subset(ConcatDataset([ROWS, ROWS]), list(range(4))),
    "collate": default_collate,
    "forward of the library": default_forward,
    "loss of the library": OnTargets(functional.mse_loss),
    "metric": pl.metrics.accuracy(),
    "callback": pl.callbacks.LRMonitor(),
    "optimizer": pl.optim.adamw(lr=0.1).update,
}
USERS: dict[str, Any] = {
    "function": own,
    "function of Python": random.shuffle,
    "method of an object in C": random.random,
    "callable object": itemgetter(0),
    "class": Own,
    "layer": Own(),
    "hook": hooked("register_forward_hook"),
    "hook before": hooked("register_forward_pre_hook"),
    "hook of a backward": hooked("register_full_backward_hook"),
    "hook before a backward": hooked("register_full_backward_pre_hook"),
    "hook of a state": hooked("register_state_dict_pre_hook"),
    "replaced forward": with_attribute("forward", own),
    "parametrization": parametrize.register_parametrization(nn.Linear(2, 2), "weight", Own()),
    "class of a parameter": with_attribute("weight", Declared(torch.ones(2, 2))),
    "activation": nn.TransformerEncoderLayer(4, 2, activation=own),
    "distance": nn.TripletMarginWithDistanceLoss(distance_function=own),
    "dataset": Rows(),
    "generator": generated(),
    "map": map(own, [1]),
    "loader": DataLoader(ROWS, collate_fn=own),
    "loss": OnTargets(own),
    "metric": pl.metrics.accuracy().on(outputs=own),
    "wrapper of a function of torch": functools.wraps(torch.stack)(lambda: None),
}
HOLDING: dict[str, Callable[[Any], Any]] = {
    "partial": lambda value: functools.partial(value) if callable(value) else value,
    "argument": lambda value: functools.partial(functional.mse_loss, value),
    "keyword": lambda value: functools.partial(functional.mse_loss, reduction=value),
    "list": lambda value: [1, value],
    "mapping": lambda value: {"value": value},
    "subset": lambda value: Subset(value, [0, 1]),
    "attribute of a layer": lambda value: with_attribute("held", value),
    "loss": OnTargets,
}
HOLDERS = st.lists(st.sampled_from(sorted(HOLDING)), max_size=3)


def held(value: Any, holders: list[str]) -> Any:
    return functools.reduce(lambda inner, name: HOLDING[name](inner), holders, value)


@given(st.sampled_from(sorted(USERS)), HOLDERS)
@examples(50, 500)
def test_code_from_elsewhere_is_found_in_what_holds_it(name: str, holders: list[str]) -> None:
    assert is_users(held(USERS[name], holders))


@given(st.sampled_from(sorted(TORCHS)), HOLDERS)
@examples(50, 500)
def test_code_of_torch_and_of_the_library_is_not_the_users(name: str, holders: list[str]) -> None:
    assert not is_users(held(TORCHS[name], holders))


def test_each_is_the_users_or_torchs() -> None:
    assert {name for name, value in USERS.items() if not runs_users_code([torch.relu, value])} == set()
    assert {name for name, value in TORCHS.items() if runs_users_code([value])} == set()


def test_a_class_of_torchs_whose_forward_was_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", own)
    assert is_users(nn.Sequential(nn.Linear(2, 2)))


def test_a_model_says_whose_it_is() -> None:
    for module, users in ((TORCHS["layers"], False), (USERS["hook of a backward"], True)):
        model, _, _ = pl.model.model.ModelDef.split(module)
        assert model.runs_users_code == users
        assert model.may_use_rng


def test_an_optimizer_of_the_users_draws() -> None:
    def update(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
        return params, opt_state

    optimizer = Optimizer(name="own", init=lambda params: {}, update=update, lr=lambda timestamp: 0.1)
    assert optimizer.draws
    assert pl.optim.partition({"one": optimizer}, label=lambda name, tensor: "one").draws
    assert not pl.optim.sgd(lr=0.1).draws


def test_memory_that_was_donated_may_be_held() -> None:
    """What code refers to may hold an earlier State, which refuses to be read."""
    overwritten = Overwritten.by("params", 0)
    with pytest.raises(pl.errors.DonatedStateError):
        overwritten.keys()
    assert not is_users(functools.partial(functional.mse_loss, {"kept": overwritten}))


def test_each_object_is_looked_at_once() -> None:
    layers = [nn.Linear(2, 2) for _ in range(1000)]
    for layer in layers:
        vars(layer)["all"] = layers
    assert not within(2.0, lambda: is_users(layers))


def test_objects_of_other_modules() -> None:
    assert is_users(types.SimpleNamespace())
    assert is_users(object())
    assert not is_users(None)
