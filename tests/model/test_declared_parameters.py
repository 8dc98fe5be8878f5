"""Attributes and classes of the user's parameters: seen by label functions, in forwards, and in ``state.module()``."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.random import seeded
from tests.support.problem import close, noise
from tests.support.worlds import KINDS, pool

mse = nn.functional.mse_loss
DATA = [(torch.randn(4, 3, generator=noise(i)), torch.randn(4, 2, generator=noise(i + 9))) for i in range(4)]


class Named(nn.Parameter):
    """Its constructor takes something else than ``Parameter.__deepcopy__`` gives it."""

    def __new__(cls, name: str, *sizes: int) -> Any:
        made = super().__new__(cls, torch.full(sizes, 0.5))
        made.name_of_it = name
        return made

    def __init__(self, name: str, *sizes: int) -> None:
        pass

    def doubled(self) -> Tensor:
        return 2.0 * self


class Net(nn.Module):
    """It reads attributes and calls methods of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.gain, self.plain = Named("gain", 4), nn.Parameter(torch.ones(4))
        self.first.bias._no_weight_decay = self.last.bias._no_weight_decay = True  # type: ignore[attr-defined]
        self.plain.options = {"scale": 0.5}  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.gain.doubled() + self.plain * self.plain.options["scale"]
        return self.last(hidden)


class Marked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.bias._no_weight_decay = True  # type: ignore[attr-defined]


def made(cls: Any = Net) -> Any:
    with seeded(0):
        return cls()


def label(name: str, tensor: Tensor) -> str:
    if isinstance(tensor, Named):
        return "named"
    return "no_decay" if getattr(tensor, "_no_weight_decay", False) else "decay"


def optimizer(nested: bool = False) -> pl.optim.Optimizer:
    parts = {
        "decay": pl.optim.sgd(lr=0.1, weight_decay=0.5),
        "no_decay": pl.optim.sgd(lr=0.1),
        "named": pl.optim.sgd(lr=0.01, momentum=0.9),
    }
    whole = pl.optim.partition(parts, label=label)
    return pl.optim.partition({"all": whole}, label=lambda name, tensor: "all") if nested else whole


def by_hand(cls: Any = Net) -> dict[str, Tensor]:
    module = made(cls)
    groups: dict[str, list[Tensor]] = {"decay": [], "no_decay": [], "named": []}
    for name, param in module.named_parameters():
        groups[label(name, param)].append(param)
    reference = torch.optim.SGD(
        [
            {"params": groups["decay"], "weight_decay": 0.5},
            {"params": groups["no_decay"]},
            {"params": groups["named"], "lr": 0.01, "momentum": 0.9},
        ],
        lr=0.1,
    )
    for inputs, targets in DATA:
        reference.zero_grad()
        mse(module(inputs), targets).backward()
        reference.step()
    return {name: param.detach() for name, param in module.named_parameters()}


def fit(start: Any, nested: bool = False, **options: Any) -> Any:
    settings: dict[str, Any] = {"loss": mse, "optimizer": optimizer(nested), "max_duration": "1ep"}
    return pl.fit(start, DATA, **settings | options)


WAYS: list[dict[str, Any]] = [
    *({}, {"strict": True}, {"donate": False}, {"donate": True, "watch": {Event.BATCH_END}}),
    *({"microbatch_size": 2}, {"nested": True}),
]


def test_labels_see_attributes_and_classes(tmp_path: Path) -> None:
    """Biases marked by ``_no_weight_decay`` and parameters of a subclass; also where training resumes."""
    expected = by_hand()
    for way in WAYS:
        close(pl.run(fit(made(), **way)).params, expected, 1e-5)
    kept = [state for event, state in fit(made()) if event is Event.BATCH_END][1]
    path = tmp_path / "x.safetensors"
    pl.save(kept, path)
    loaded = pl.load(path, model=made())
    assert type(loaded.module().gain) is Named
    for start, options in (
        *((kept, {}), (pickle.loads(pickle.dumps(kept)), {}), (loaded, {})),
        *((made(), {"load_path": path}), (made(), {"autoresume": tmp_path})),
    ):
        close(pl.run(fit(start, **options)).params, expected, 1e-5)


@pytest.mark.usefixtures("interpreted")
def test_labels_in_graphs() -> None:
    for watch in (None, {Event.BATCH_END}):
        state = pl.run(fit(made(Marked), watch=watch, compile=True))
        close(state.params, by_hand(Marked), 1e-5)


def assert_declared(module: Any) -> None:
    assert module.first.bias._no_weight_decay is module.last.bias._no_weight_decay is True
    assert type(module.gain) is Named
    assert module.gain.name_of_it == "gain"
    assert module.plain.options == {"scale": 0.5}
    assert not vars(module.first.weight)


def test_modules_have_them_each_its_own() -> None:
    model = made()
    state = pl.State.create(model)
    for each in (
        *(state, pl.run(fit(made())), copy.deepcopy(state), pickle.loads(pickle.dumps(state))),
        *(pl.State.create(made(), device="cpu"), state.with_module(state.module())),
        pl.run(pl.evaluate(made(), DATA, loss=mse)),
    ):
        assert_declared(each.module())
        assert_declared(each.module(training=False))
        assert not isinstance(each.params["gain"], nn.Parameter), "in a State tensors are plain"
    state.module().plain.options["scale"] = 7.0  # type: ignore[union-attr,index]
    model.plain.options["scale"] = 8.0
    model.last.bias._no_weight_decay = False
    assert_declared(state.module())


def test_frozen_and_tied_parameters_and_those_that_attributes_refer_to() -> None:
    model = made()
    model.gain.requires_grad_(False)
    model.tied = model.plain
    model.plain.partner = model.gain
    state = pl.run(fit(model))
    module: Any = state.module()
    assert type(module.gain) is type(module.plain.partner) is Named
    assert module.plain.partner is not model.gain
    assert module.tied is module.plain
    assert (module.gain.requires_grad, module.plain.requires_grad) == (False, True)
    torch.testing.assert_close(state.params["gain"], torch.full((4,), 0.5))


def test_surgery_at_init_may_declare_them_and_so_may_who_calls_an_optimizer() -> None:
    @pl.algorithm(Event.INIT)
    def mark(state: pl.State) -> pl.State:
        module: Any = state.module()
        module.bias._no_weight_decay = True
        return state.with_module(module)

    parts = {"decay": pl.optim.adamw(lr=0.1), "no_decay": pl.optim.adamw(lr=0.1, weight_decay=0.0)}
    whole = pl.optim.partition(parts, label=label)
    state = pl.run(fit(nn.Linear(3, 2), optimizer=whole, algorithms=[mark]))
    assert list(state.opt_state["no_decay"]["exp_avg"]) == ["bias"]
    params = pl.FrozenDict(a=torch.ones(2), b=torch.ones(3))
    params["b"]._no_weight_decay = True  # type: ignore[attr-defined]
    assert list(whole.init(params)["no_decay"]["exp_avg"]) == ["b"]


@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks(kind: str) -> None:
    """Where parameters are sharded, the forward has those of torch's fully_shard."""
    cls = Net if kind == "replicate" else Marked

    def program(rank: int) -> dict[str, Tensor]:
        module: Any = pl.run(fit(made(cls), parallel=kind)).module()
        if cls is Net:
            assert_declared(module)
        else:
            assert module.bias._no_weight_decay
        return {name: param.detach() for name, param in module.named_parameters()}

    for params in pool(kind=kind).run(program):
        close(params, by_hand(cls), 1e-5)
