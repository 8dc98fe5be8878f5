"""Attributes and classes of the user's parameters: seen by label functions, in forwards, and in ``state.module()``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from tests.support.worlds import KINDS, pool

mse = nn.functional.mse_loss


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
        self.first.bias._no_weight_decay = True  # type: ignore[attr-defined]
        self.last.bias._no_weight_decay = True  # type: ignore[attr-defined]
        self.plain.options = {"scale": 0.5}  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.gain.doubled() + self.plain * self.plain.options["scale"]
        return self.last(hidden)


def made() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=g), torch.randn(4, 2, generator=g)) for _ in range(4)]


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


def by_hand() -> Net:
    module = made()
    groups: dict[str, list[Tensor]] = {"decay": [], "no_decay": [], "named": []}
    for name, param in module.named_parameters():
        groups[label(name, param)].append(param)
    assert [len(group) for group in groups.values()] == [3, 2, 1]
    reference = torch.optim.SGD(
        [
            {"params": groups["decay"], "weight_decay": 0.5},
            {"params": groups["no_decay"]},
            {"params": groups["named"], "lr": 0.01, "momentum": 0.9},
        ],
        lr=0.1,
    )
    for inputs, targets in batches():
        reference.zero_grad()
        mse(module(inputs), targets).backward()
        reference.step()
    return module


def fit(start: Any, nested: bool = False, **options: Any) -> Any:
    return pl.fit(start, batches(), loss=mse, optimizer=optimizer(nested), max_duration="1ep", **options)


def assert_close(state: pl.State, module: nn.Module) -> None:
    for name, param in module.named_parameters():
        torch.testing.assert_close(state.params[name], param.detach())


WAYS: dict[str, dict[str, Any]] = {
    "all watched": {},
    "one watched": {"watch": {Event.BATCH_END}},
    "strict": {"strict": True},
    "no donation": {"donate": False},
    "always donated": {"donate": True, "watch": {Event.BATCH_END}},
    "microbatches": {"microbatch_size": 2},
    "nested": {"nested": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_labels_see_attributes_and_classes(way: str) -> None:
    """Biases marked by ``_no_weight_decay`` and parameters of a subclass were in the group of the others."""
    assert_close(pl.run(fit(made(), **WAYS[way])), by_hand())


class Marked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.bias._no_weight_decay = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["all", "one"])
def test_labels_in_graphs(watch: Any, interpreted: None) -> None:
    found = []
    for compiled in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Marked()
        parts = {
            "decay": pl.optim.adamw(lr=0.1, weight_decay=0.9),
            "no_decay": pl.optim.adamw(lr=0.1, weight_decay=0.0),
        }
        found.append(
            pl.run(
                pl.fit(
                    *(model, batches()),
                    loss=mse,
                    optimizer=pl.optim.partition(parts, label=label),
                    max_duration="1ep",
                    watch=watch,
                    compile=compiled,
                )
            )
        )
    assert list(found[0].opt_state["no_decay"]["exp_avg"]) == ["bias"]
    for one, other in zip(*[state.params.values() for state in found], strict=True):
        torch.testing.assert_close(one, other)


def test_labels_when_training_resumes(tmp_path: Any) -> None:
    """From a kept State, from a file of it, from a pickle, and by autoresume."""
    expected = by_hand()
    kept = [state for event, state in fit(made()) if event is Event.BATCH_END][1]
    assert_close(pl.run(fit(kept)), expected)
    assert_close(pl.run(fit(pickle.loads(pickle.dumps(kept)))), expected)
    pl.save(kept, tmp_path / "x.safetensors")
    assert_close(pl.run(fit(pl.load(tmp_path / "x.safetensors", model=made()))), expected)
    assert_close(pl.run(fit(made(), load_path=tmp_path / "x.safetensors")), expected)
    assert_close(pl.run(fit(made(), autoresume=tmp_path)), expected)
    loaded = pl.load(tmp_path / "x.safetensors", model=made()).module()
    assert isinstance(loaded.gain, Named)


def assert_declared(module: Any) -> None:
    assert module.first.bias._no_weight_decay is module.last.bias._no_weight_decay is True
    assert type(module.gain) is Named
    assert module.gain.name_of_it == "gain"
    assert module.plain.options == {"scale": 0.5}
    assert not vars(module.first.weight)


@pytest.mark.parametrize("where", ["fresh", "trained", "copied", "pickled", "moved", "surgery", "evaluated"])
def test_modules_have_them(where: str) -> None:
    state = pl.State.create(made())
    if where == "trained":
        state = pl.run(fit(made()))
    if where == "copied":
        state = copy.deepcopy(state)
    if where == "pickled":
        state = pickle.loads(pickle.dumps(state))
    if where == "moved":
        state = pl.State.create(made(), device="cpu")
    if where == "surgery":
        state = state.with_module(state.module())
    if where == "evaluated":
        state = pl.run(pl.evaluate(made(), batches(), loss=mse))
    assert_declared(state.module())
    assert_declared(state.module(training=False))
    assert not isinstance(state.params["gain"], nn.Parameter), "in a State tensors are plain"


def test_modules_are_independent() -> None:
    model = made()
    state = pl.State.create(model)
    state.module().plain.options["scale"] = 7.0  # type: ignore[union-attr,index]
    model.plain.options["scale"] = 8.0
    model.last.bias._no_weight_decay = False
    assert_declared(state.module())


def test_frozen_and_tied_parameters() -> None:
    model = made()
    model.gain.requires_grad_(False)
    model.tied = model.plain
    state = pl.run(fit(model))
    module: Any = state.module()
    assert type(module.gain) is Named
    assert not module.gain.requires_grad
    assert module.tied is module.plain
    assert module.plain.requires_grad
    torch.testing.assert_close(state.params["gain"], torch.full((4,), 0.5))


def test_attributes_may_refer_to_parameters() -> None:
    model = made()
    model.plain.partner = model.gain
    module: Any = pl.State.create(model).module()
    assert type(module.plain.partner) is Named
    assert module.plain.partner is not model.gain


def test_surgery_at_init_may_declare_them() -> None:
    @pl.algorithm(Event.INIT)
    def mark(state: pl.State) -> pl.State:
        module: Any = state.module()
        module.bias._no_weight_decay = True
        return state.with_module(module)

    parts = {"decay": pl.optim.adamw(lr=0.1), "no_decay": pl.optim.adamw(lr=0.1, weight_decay=0.0)}
    settings = {"loss": mse, "optimizer": pl.optim.partition(parts, label=label), "max_duration": "1ep"}
    state = pl.run(pl.fit(nn.Linear(3, 2), batches(), algorithms=[mark], **settings))
    assert list(state.opt_state["no_decay"]["exp_avg"]) == ["bias"]


def test_optimizers_used_alone_label_what_they_are_given() -> None:
    params = pl.FrozenDict(a=torch.ones(2), b=torch.ones(3))
    params["b"]._no_weight_decay = True  # type: ignore[attr-defined]
    parts = {"decay": pl.optim.adamw(), "no_decay": pl.optim.adamw(weight_decay=0.0)}
    state = pl.optim.partition(parts, label=label).init(params)
    assert list(state["no_decay"]["exp_avg"]) == ["b"]


@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks(kind: str) -> None:
    """Where parameters are sharded, the forward has those of torch's fully_shard."""

    def program(rank: int) -> dict[str, Tensor]:
        if kind == "replicate":
            state = pl.run(fit(made(), parallel=kind))
            assert_declared(state.module())
            return dict(state.params)
        torch.manual_seed(0)
        parts = {"decay": pl.optim.sgd(lr=0.1, weight_decay=0.5), "no_decay": pl.optim.sgd(lr=0.1)}
        settings = {"loss": mse, "optimizer": pl.optim.partition(parts, label=label), "max_duration": "1ep"}
        module: Any = pl.run(pl.fit(Marked(), batches(), parallel=kind, **settings)).module()
        assert module.bias._no_weight_decay
        return {name: param.detach() for name, param in module.named_parameters()}

    expected = by_hand()
    if kind == "shard":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            expected = Marked()  # type: ignore[assignment]
        for inputs, targets in batches():
            mse(expected(inputs), targets).backward()
            with torch.no_grad():
                expected.weight -= 0.1 * (expected.weight.grad + 0.5 * expected.weight)
                expected.bias -= 0.1 * expected.bias.grad
            expected.zero_grad()
    for params in pool(kind=kind).run(program):
        for name, param in expected.named_parameters():
            torch.testing.assert_close(params[name], param.detach())
