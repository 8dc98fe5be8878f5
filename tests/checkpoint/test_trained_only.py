"""Checkpoints of what is trained alone: small, exact, and bound to the frozen weights that they were trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import digests
from pure_loop.errors import ResumeError
from pure_loop.state import outside_batch
from tests.support import checkpoint_runs
from tests.support.problem import close
from tests.support.streams import assert_same
from tests.support.tiers import examples


def fit(start: Any, **options: Any) -> Any:
    return checkpoint_runs.fit(start, **{"optimizer": pl.optim.adamw(lr=0.01), **options})


class Adapter(nn.Module):
    """A large frozen layer beside a small trained one, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(fill: float | None = None) -> nn.Module:
    with pl.random.seeded(0):
        model = nn.Sequential(Adapter(nn.Linear(4, 500)), nn.Tanh(), Adapter(nn.Linear(500, 3)), nn.Dropout(0.1))
    if fill is not None:
        nn.init.constant_(model[0].base.weight, fill)
    return model


def test_the_file_has_the_adapters_alone(tmp_path: Path) -> None:
    state, sizes = pl.run(fit(adapted())), []
    adapters = {name for name in state.params if "base" not in name}
    for weights_only, trained_only in ((False, False), (False, True), (True, True)):
        path = tmp_path / "x.safetensors"
        pl.save(state, path, trained_only=trained_only, weights_only=weights_only)
        sizes.append(path.stat().st_size)
        if trained_only:  # the average of what is frozen is what is frozen: neither is there
            assert not [name for name in load_file(path) if "base" in name]
            loaded = pl.load(path, model=adapted(), weights_only=True)
            assert_same(dict(loaded.params), dict(state.params), "weights")
    frozen = sum(tensor.nbytes for name, tensor in state.params.items() if name not in adapters)
    assert sizes[0] - sizes[1] >= frozen - 4 * 100  # for the digests


LAYERS = st.lists(st.sampled_from(["linear", "norm", "slope"]), min_size=2, max_size=4)


def net(kinds: list[str], frozen: set[int]) -> nn.Module:
    make = {"linear": lambda: nn.Linear(3, 3), "norm": lambda: nn.BatchNorm1d(3), "slope": lambda: nn.PReLU(3)}
    with pl.random.seeded(3):
        module = nn.Sequential(nn.Linear(4, 3), *(make[kind]() for kind in kinds), nn.Linear(3, 3))
    # Laid out otherwise, which the file of a whole State keeps.
    module[0].weight.data = module[0].weight.data.t().contiguous().t()
    for number, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(number not in frozen)
    return module


@examples(12, 1000)
@given(LAYERS, st.data())
def test_any_subset_may_be_frozen(tmp_path_factory: pytest.TempPathFactory, kinds: list[str], data: Any) -> None:
    count = len(list(net(kinds, set()).parameters()))
    frozen = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1), "frozen")
    stop = data.draw(st.integers(1, 7), "kept after batch")
    options: dict[str, Any] = {"watch": {Event.BATCH_END}}
    states = [state for _, state in fit(net(kinds, frozen), donate=False, **options)]
    path = tmp_path_factory.mktemp("run") / "x.safetensors"
    pl.save(states[stop - 1], path, trained_only=True)
    kept = pl.load(path, model=net(kinds, frozen))
    assert_same(kept, outside_batch(states[stop - 1]).replace(event=Event.BATCH_END), "loaded")
    for name, tensor in kept.params.items():
        assert tensor.stride() == states[stop - 1].params[name].stride()
    assert_same([state for _, state in fit(kept, **options)][-1], states[-1], "resumed")
    names = {f"params.{name}" for name in kept.model.trainable}
    assert {name for name in load_file(path) if name.startswith("params.")} == names
    # One number of one frozen tensor is another.
    other = net(kinds, frozen)
    name = data.draw(st.sampled_from(sorted(set(kept.params) - set(kept.model.trainable))), "another")
    other.get_parameter(name).data[..., -1] += 1.0
    with pytest.raises(ResumeError, match=rf"params\['{name}'\].*\(1 of {len(frozen)} frozen"):
        pl.load(path, model=other)


def test_another_base_is_refused_by_each_way_to_load(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    pl.save(pl.run(fit(adapted())), path, trained_only=True)
    with pytest.raises(ResumeError, match=r"params\['0.base.weight'\] of the Sequential given is not what it was"):
        pl.load(path, model=adapted(1))
    for way in (
        lambda: fit(adapted(1), load_path=path),
        lambda: fit(adapted(1), autoresume=tmp_path),
        lambda: pl.load(path, model=adapted(1), weights_only=True),
    ):
        with pytest.raises(ResumeError, match="Load the same base into the model first"):
            way()
    # Adapters on another base have to be asked for.
    state, here = pl.load(path, model=adapted(1), weights_only=True, strict=False), pl.load(path, model=adapted())
    close({"": state.params["0.base.weight"]}, {"": torch.ones(500, 4)}, 0)
    assert torch.equal(state.params["0.up.weight"], here.params["0.up.weight"])
    for change, match in (
        (lambda model: model[0].base.to(torch.float64), "is not what it was"),
        (lambda model: setattr(model[0], "base", nn.Linear(4, 400)), "is not what it was"),
        (lambda model: setattr(model[0], "base", nn.Identity()), "'0.base.weight' is not a parameter"),
    ):
        model = adapted()
        change(model)
        with pytest.raises(ResumeError, match=match):
            pl.load(path, model=model)
    with pytest.raises(pl.errors.ArgumentError, match="are trained: freeze some"):
        pl.run(checkpoint_runs.fit(callbacks=CheckpointSaver(tmp_path / "none", trained_only=True)))
    assert not (tmp_path / "none").exists()


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
        assert sorted(digested) == [(3,), (3, 500), (500,), (500, 4)]
