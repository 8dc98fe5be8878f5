"""Checkpoints of what is trained alone: small, exact, and bound to the frozen weights that they were trained on."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import digests
from pure_loop.errors import CheckpointError, ResumeError
from pure_loop.state import outside_batch
from tests.conftest import THOROUGH
from tests.support import streams as sameness
from tests.support.checkpoint_runs import fit as any_fit
from tests.support.sharding import network, pool, train, whole


def fit(start: Any, **options: Any) -> Any:
    return any_fit(start, **{"optimizer": pl.optim.adamw(lr=0.01), **options})


class Adapter(nn.Module):
    """A large frozen layer beside a small trained one, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapter(nn.Linear(2, 500)), nn.Tanh(), Adapter(nn.Linear(500, 1)), nn.Dropout(0.1))


def test_the_file_has_the_adapters_alone(tmp_path: Path) -> None:
    state = pl.run(fit(adapted()))
    pl.save(state, tmp_path / "whole.safetensors")
    pl.save(state, tmp_path / "trained.safetensors", trained_only=True)
    pl.save(state, tmp_path / "weights.safetensors", trained_only=True, weights_only=True)
    adapters = {name for name in state.params if "base" not in name}
    tensors = load_file(tmp_path / "trained.safetensors")
    assert {name.removeprefix("params.") for name in tensors if name.startswith("params.")} == adapters
    # The average of what is frozen is what is frozen: neither is in the file.
    assert not [name for name in tensors if "base" in name]
    assert load_file(tmp_path / "weights.safetensors").keys() == adapters
    frozen = sum(tensor.nbytes for name, tensor in state.params.items() if name not in adapters)
    whole, trained = (tmp_path / f"{name}.safetensors" for name in ("whole", "trained"))
    # The digests of four frozen tensors are in the place of their numbers.
    assert whole.stat().st_size - trained.stat().st_size >= frozen - 4 * 100


LAYERS = st.lists(st.sampled_from(["linear", "norm", "slope"]), min_size=2, max_size=4)


def net(kinds: list[str], frozen: set[int]) -> nn.Module:
    torch.manual_seed(3)
    make = {"linear": lambda: nn.Linear(3, 3), "norm": lambda: nn.BatchNorm1d(3), "slope": lambda: nn.PReLU(3)}
    module = nn.Sequential(nn.Linear(2, 3), *(make[kind]() for kind in kinds), nn.Linear(3, 1))
    # Laid out otherwise, which the file of a whole State keeps.
    module[0].weight.data = module[0].weight.data.t().contiguous().t()
    for number, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(number not in frozen)
    return module


@settings(max_examples=1000 if THOROUGH else 20)
@given(LAYERS, st.data())
def test_any_subset_may_be_frozen(kinds: list[str], data: st.DataObject) -> None:
    count = len(list(net(kinds, set()).parameters()))
    frozen = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1), "frozen")
    stop = data.draw(st.integers(1, 7), "kept after batch")
    options: dict[str, Any] = {"watch": {Event.BATCH_END}}
    states = [state for _, state in fit(net(kinds, frozen), donate=False, **options)]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/x.safetensors"
        pl.save(states[stop - 1], path, trained_only=True)
        kept = pl.load(path, model=net(kinds, frozen))
        sameness.assert_same(kept, outside_batch(states[stop - 1]).replace(event=Event.BATCH_END), "loaded")
        for name, tensor in kept.params.items():
            assert tensor.stride() == states[stop - 1].params[name].stride()
        *_, (_, last) = fit(kept, **options)
        sameness.assert_same(last, states[-1], "resumed")
        names = {f"params.{name}" for name in kept.model.trainable}
        assert {name for name in load_file(path) if name.startswith("params.")} == names
        # One number of one frozen tensor is another.
        other = net(kinds, frozen)
        name = data.draw(st.sampled_from(sorted(set(kept.params) - set(kept.model.trainable))), "another")
        with torch.no_grad():
            other.get_parameter(name)[..., -1] += 1.0
        with pytest.raises(ResumeError, match=rf"params\['{name}'\].*\(1 of {len(frozen)} frozen"):
            pl.load(path, model=other)


class TestAnotherBase:
    """A file is of one base, and says so at the call."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        pl.save(pl.run(fit(adapted())), tmp_path / "x.safetensors", trained_only=True)
        return tmp_path / "x.safetensors"

    def other(self) -> nn.Module:
        model = adapted()
        torch.nn.init.ones_(model[0].base.weight)
        return model

    def test_other_numbers(self, path: Path) -> None:
        with pytest.raises(ResumeError, match=r"params\['0.base.weight'\] of the Sequential given is not what it was"):
            pl.load(path, model=self.other())
        with pytest.raises(ResumeError, match="Load the same base into the model first"):
            fit(self.other(), load_path=path)
        with pytest.raises(ResumeError, match="same base"):
            fit(self.other(), autoresume=path.parent)
        with pytest.raises(ResumeError, match="same base"):
            pl.load(path, model=self.other(), weights_only=True)

    def test_adapters_on_another_base_are_asked_for(self, path: Path) -> None:
        state, here = pl.load(path, model=self.other(), weights_only=True, strict=False), pl.load(path, model=adapted())
        assert torch.equal(state.params["0.base.weight"], self.other()[0].base.weight)
        assert torch.equal(state.params["0.up.weight"], here.params["0.up.weight"])
        assert not torch.equal(state.params["0.up.weight"], self.other()[0].up.weight)

    def test_another_shape_dtype_or_name(self, path: Path) -> None:
        for change, match in (
            (lambda model: model[0].base.to(torch.float64), "is not what it was"),
            (lambda model: setattr(model[0], "base", nn.Linear(2, 400)), "is not what it was"),
            (lambda model: setattr(model[0], "base", nn.Identity()), "'0.base.weight' is not a parameter"),
        ):
            model = adapted()
            change(model)
            with pytest.raises(ResumeError, match=match):
                pl.load(path, model=model)

    def test_weights_of_adapters(self, path: Path) -> None:
        state = pl.load(path, model=adapted())
        pl.save(state, path, trained_only=True, weights_only=True)
        loaded = pl.load(path, model=adapted(), weights_only=True)
        assert all(torch.equal(loaded.params[name], tensor) for name, tensor in state.params.items())
        with pytest.raises(ResumeError, match="same base"):
            pl.load(path, model=self.other(), weights_only=True)


def test_there_has_to_be_a_base(tmp_path: Path) -> None:
    state = pl.State.create(nn.Linear(2, 1))
    with pytest.raises(pl.ArgumentError, match="all 2 parameters of Linear are trained: freeze some"):
        pl.save(state, tmp_path / "x.safetensors", trained_only=True)
    with pytest.raises(pl.ArgumentError, match="all 2 parameters of Linear are trained"):
        pl.run(fit(nn.Linear(2, 1), callbacks=CheckpointSaver(tmp_path, trained_only=True)))
    assert pl.latest(tmp_path) is None


@pytest.mark.parametrize(
    "base",
    [
        {"params.0.weight": ["F32", [2, 2], "0"]},
        {"params.0.weight": ["F32", [1 << 62, 1 << 62], "0" * 32]},
        {"params.0.weight": ["F32", [True], "0" * 32]},
        {"params.0.weight": ["X", [2], "0" * 32]},
        {"params.0.weight": [["F32"], [2], "0" * 32]},
        {"params.0.weight": 5},
        {"opt_state": ["F32", [2, 2], "0" * 32]},
        [1],
        "text",
    ],
)
def test_a_base_that_is_none_is_refused(tmp_path: Path, base: Any) -> None:
    path = tmp_path / "x.safetensors"
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    pl.save(pl.State.create(model), path, trained_only=True, weights_only=True)
    with safe_open(path, "pt") as file:
        document = json.loads(file.metadata()["pure_loop.weights"])
    save_file(load_file(path), path, metadata={"pure_loop.weights": json.dumps({**document, "base": base})})
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        pl.load(path, model=model, weights_only=True)


@pytest.mark.slow  # real ranks
def test_a_sharded_state_is_saved_whole_or_as_weights(tmp_path: Path) -> None:
    def program(rank: int) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model = network()
        next(iter(model.parameters())).requires_grad_(False)
        saver = CheckpointSaver(tmp_path / "w", interval="2ba", weights_only=True, keep_last=1)
        for event, state in train(model, parallel="shard", callbacks=saver):
            if event is Event.BATCH_END and state.timestamp.batch == 3:
                try:
                    pl.save(state, tmp_path / "x.sharded", trained_only=True)
                except pl.ArgumentError as error:
                    refused = str(error)
                pl.save(state, tmp_path / "three.safetensors", weights_only=True)
                assert (tmp_path / "three.safetensors").exists()
                kept = {name: tensor.full_tensor() for name, tensor in state.params.items()}
        last = {name: tensor.full_tensor() for name, tensor in state.params.items()}
        return refused, kept, last

    refused, kept, last = pool().run(program)[0]
    assert "a sharded State is saved whole" in refused
    for path, values in ((tmp_path / "three.safetensors", kept), (tmp_path / "w" / "latest", last)):
        loaded = pl.load(path, model=network(), weights_only=True)
        assert all(torch.equal(loaded.params[name], tensor) for name, tensor in values.items())
    assert len(list((tmp_path / "w").glob("*.safetensors"))) == 1


@pytest.mark.slow  # real ranks
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_two_ranks_resume_from_the_file_of_one(tmp_path: Path, kind: str) -> None:
    def frozen() -> nn.Module:
        model = network()
        next(iter(model.parameters())).requires_grad_(False)
        return model

    path = tmp_path / "x.safetensors"
    for event, state in train(frozen()):
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 3:
            pl.save(state, path, trained_only=True)

    def program(rank: int) -> tuple[dict[str, Any], str]:
        last = whole(pl.run(train(frozen(), parallel=kind, load_path=path)))
        other = frozen()
        with torch.no_grad():
            next(iter(other.parameters()))[0] += 1
        with pytest.raises(ResumeError, match="same base") as caught:
            train(other, parallel=kind, load_path=path)
        return last, str(caught.value)

    wanted = {name: leaf for name, leaf in whole(state).items() if name.startswith(("params.", "opt_state."))}
    assert sum(isinstance(leaf, torch.Tensor) for leaf in wanted.values()) > 4
    for last, _ in pool().run(program):
        for name, leaf in wanted.items():
            assert torch.allclose(torch.as_tensor(last[name]), torch.as_tensor(leaf), rtol=1e-9, atol=1e-12), name


def test_a_base_is_read_once_for_all_saves_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[tuple[int, ...]] = []
    pieces_of = digests.pieces_of

    def counted(tensors: list[torch.Tensor]) -> Iterator[memoryview]:
        digested.extend(tuple(tensor.shape) for tensor in tensors)
        return pieces_of(tensors)

    monkeypatch.setattr(digests, "pieces_of", counted)
    for donate in (True, False, "auto"):
        digested.clear()
        saver = CheckpointSaver(tmp_path / str(donate), interval="1ba", trained_only=True)
        pl.run(fit(adapted(), callbacks=saver, donate=donate))
        # Checkpoints of 8 batches, and of the end: two layers with their biases.
        assert sorted(digested) == [(1,), (1, 500), (500,), (500, 2)]
