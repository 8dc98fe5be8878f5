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
from tests.support.holding import DATA, WAYS, ends, fit, last, made, mse
from tests.support.problem import close
from tests.support.worlds import KINDS, pool


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
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.gain, self.plain = Named("gain", 4), nn.Parameter(torch.ones(4))
        self.first.bias._no_weight_decay = self.last.bias._no_weight_decay = True  # type: ignore[attr-defined]
        self.plain.options = {"scale": 0.5}  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x)) * self.gain.doubled() + self.plain * self.plain.options["scale"]
        return self.last(hidden)


class Marked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.bias._no_weight_decay = True  # type: ignore[attr-defined]


def label(name: str, tensor: Tensor) -> str:
    if isinstance(tensor, Named):
        return "named"
    return "no_decay" if getattr(tensor, "_no_weight_decay", False) else "decay"


OPTIONS: dict[str, Any] = {"decay": {"weight_decay": 0.5}, "no_decay": {}, "named": {"momentum": 0.9}}
OPTIMIZER = pl.optim.partition({name: pl.optim.sgd(0.1, **options) for name, options in OPTIONS.items()}, label=label)
NESTED = pl.optim.partition({"all": OPTIMIZER}, label=lambda name, tensor: "all")


def run(start: Any, **options: Any) -> pl.State:
    return pl.run(fit(start, **{"optimizer": OPTIMIZER, **options}))


def by_hand(cls: Any = Net) -> dict[str, Tensor]:
    def groups(params: list[Any]) -> torch.optim.Optimizer:
        parts = {name: [param for param in params if label("", param) == name] for name in OPTIONS}
        return torch.optim.SGD([{"params": part, **OPTIONS[name]} for name, part in parts.items()], lr=0.1)

    module = last(made(cls), optimizer=groups)
    return {name: param.detach() for name, param in module.named_parameters()}


def test_labels_see_attributes_and_classes(tmp_path: Path) -> None:
    """Biases marked by ``_no_weight_decay`` and parameters of a subclass; also where training resumes."""
    expected = by_hand()
    for way in (*WAYS, {"microbatch_size": 2}, {"optimizer": NESTED}):
        close(run(made(Net), **way).params, expected, 1e-5)
    kept = ends(made(Net), optimizer=OPTIMIZER)[1]
    path = tmp_path / "x.safetensors"
    pl.save(kept, path)
    for start, options in (
        *((kept, {}), (pickle.loads(pickle.dumps(kept)), {}), (pl.load(path, model=made(Net)), {})),
        *((made(Net), {"load_path": path}), (made(Net), {"autoresume": tmp_path})),
    ):
        close(run(start, **options).params, expected, 1e-5)


@pytest.mark.usefixtures("interpreted")
def test_labels_in_graphs() -> None:
    for watch in (None, {Event.BATCH_END}):
        close(run(made(Marked), watch=watch, compile=True).params, by_hand(Marked), 1e-5)


def assert_declared(module: Any) -> None:
    assert module.first.bias._no_weight_decay is module.last.bias._no_weight_decay is True
    assert type(module.gain) is Named
    assert module.gain.name_of_it == "gain"
    assert module.plain.options == {"scale": 0.5}
    assert not vars(module.first.weight)


def test_modules_have_them_each_its_own() -> None:
    model = made(Net)
    state = pl.State.create(model)
    for each in (
        *(state, run(made(Net)), copy.deepcopy(state), pickle.loads(pickle.dumps(state))),
        *(pl.State.create(made(Net), device="cpu"), state.with_module(state.module())),
        pl.run(pl.evaluate(made(Net), DATA, loss=mse)),
    ):
        assert_declared(each.module())
        assert_declared(each.module(training=False))
        assert not isinstance(each.params["gain"], nn.Parameter), "in a State tensors are plain"
    state.module().plain.options["scale"] = 7.0  # type: ignore[union-attr,index]
    model.plain.options["scale"] = 8.0
    model.last.bias._no_weight_decay = False
    assert_declared(state.module())


def test_frozen_and_tied_parameters_and_those_that_attributes_refer_to() -> None:
    model = made(Net)
    model.gain.requires_grad_(False)
    model.tied = model.plain
    model.plain.partner = model.gain
    state = run(model)
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
    state = run(nn.Linear(4, 2), optimizer=whole, algorithms=[mark])
    assert list(state.opt_state["no_decay"]["exp_avg"]) == ["bias"]
    params = pl.FrozenDict(a=torch.ones(2), b=torch.ones(3))
    params["b"]._no_weight_decay = True  # type: ignore[attr-defined]
    assert list(whole.init(params)["no_decay"]["exp_avg"]) == ["b"]


@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks(kind: str) -> None:
    """Where parameters are sharded, the forward has those of torch's fully_shard."""
    cls = Net if kind == "replicate" else Marked

    def program(rank: int) -> dict[str, Tensor]:
        module: Any = run(made(cls), parallel=kind).module()
        if cls is Net:
            assert_declared(module)
        else:
            assert module.bias._no_weight_decay
        return {name: param.detach() for name, param in module.named_parameters()}

    for params in pool(kind=kind).run(program):
        close(params, by_hand(cls), 1e-5)
