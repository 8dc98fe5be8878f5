"""Weights that are left out or have other names: ``exclude=`` and ``rename=`` of ``pl.load``."""

from __future__ import annotations

import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ResumeError
from tests.conftest import THOROUGH
from tests.support import streams as sameness
from tests.support.checkpoint_runs import fit, small
from tests.support.sharding import network, pool, train


def classifier(body: str = "backbone", classes: int = 3) -> nn.Module:
    model = nn.Module()
    model.add_module(body, nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
    model.add_module("head", nn.Linear(4, classes))
    return model


KINDS: dict[str, Callable[[pl.State, Path], None]] = {
    "another library's": lambda state, path: save_file(state.module().state_dict(), path),
    "weights": lambda state, path: pl.save(state, path, weights_only=True),
    "a State": pl.save,
}


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(5)
    KINDS[request.param](pl.State.create(classifier()), tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def weights(path: Path, model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    state = pl.load(path, model=model, weights_only=True, **options)
    return {**state.params, **state.buffers}


def test_a_new_head(path: Path) -> None:
    model, saved = classifier(classes=7), weights(path, classifier())
    own = model.state_dict()
    loaded = weights(path, model, exclude=["head.*"])
    for name, tensor in loaded.items():
        assert torch.equal(tensor, own[name] if name.startswith("head.") else saved[name])
    # A model without a head takes the same.
    del model.head
    assert weights(path, model, exclude="head.*").keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    "rename",
    [
        {"backbone.": "encoder."},
        {"backbone": "encoder"},
        {"backbone.0": "encoder.0", "backbone.1.": "encoder.1."},
        {"backbone": "nothing", "backbone.0": "encoder.0", "backbone.1": "encoder.1"},
        lambda name: name.replace("backbone", "encoder"),
    ],
)
def test_other_names(path: Path, rename: Any) -> None:
    saved = weights(path, classifier())
    loaded = weights(path, classifier("encoder"), rename=rename)
    assert {name.replace("encoder", "backbone") for name in loaded} == saved.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, saved[name.replace("encoder", "backbone")])
    both = weights(path, classifier("encoder", classes=9), rename=rename, exclude=["head.*"])
    assert both["head.weight"].shape == (9, 4)
    assert torch.equal(both["encoder.0.weight"], saved["backbone.0.weight"])


def test_a_name_in_front_of_all(path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = classifier()

    saved = weights(path, classifier())
    wrapped = pl.State.create(Wrapped())
    assert weights(path, Wrapped(), rename={"": "model."}).keys() == {**wrapped.params, **wrapped.buffers}.keys()
    pl.save(wrapped, path)
    assert weights(path, classifier(), rename={"model.": ""}).keys() == saved.keys()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"exclude": ["haed.*"]},
            r"exclude='haed\.\*' matches no weight of .*; did you mean 'head\.\*'\?; there are back",
        ),
        ({"exclude": ["head.*", "nothing"]}, "exclude='nothing' matches no weight"),
        (
            {"rename": {"bakbone.": "encoder."}},
            r"begins with 'bakbone\.'; did you mean 'backbone\.'\?; there are .* and 4",
        ),
        ({"rename": {"back": "encoder"}}, "no weight of .* begins with 'back'"),
        ({"rename": lambda name: "same"}, "'backbone.* and 'backbone.* of .* both become 'same'"),
        ({"rename": {"head.weight": "head.bias"}}, "both become 'head.bias'"),
    ],
)
def test_what_matches_nothing_is_named(path: Path, options: Any, match: str) -> None:
    with pytest.raises(pl.ArgumentError, match=match):
        pl.load(path, model=classifier(), weights_only=True, **options)


def test_what_is_left_is_still_compared(path: Path) -> None:
    with pytest.raises(ResumeError, match=r"the file lacks.*encoder\.0.*the model lacks.*backbone\.0"):
        weights(path, classifier("encoder", classes=9), exclude=["head.*"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight


def test_a_tied_weight_is_left_out_by_either_name(tmp_path: Path) -> None:
    pl.save(pl.State.create(Tied()), tmp_path / "x.safetensors")
    for name in ("first.weight", "second.weight"):
        model = Tied()
        assert torch.equal(
            weights(tmp_path / "x.safetensors", model, exclude=[name])["first.weight"], model.first.weight
        )


def test_adapters_of_a_base_of_other_names(tmp_path: Path) -> None:
    def frozen(body: str) -> nn.Module:
        torch.manual_seed(5)
        model = classifier(body)
        model.get_submodule(body).requires_grad_(False)
        return model

    state = pl.State.create(frozen("backbone"))
    state = state.replace(params={name: tensor + (name[:4] == "head") for name, tensor in state.params.items()})
    for flag in (False, True):
        pl.save(state, tmp_path / "x.safetensors", trained_only=True, weights_only=flag)
        options: dict[str, Any] = {"rename": {"backbone": "encoder"}}
        loaded = weights(tmp_path / "x.safetensors", frozen("encoder"), **options)
        assert torch.equal(loaded["head.weight"], state.params["head.weight"])
        other = frozen("encoder")
        other.get_parameter("encoder.0.bias").data += 1
        with pytest.raises(ResumeError, match=r"params\['encoder\.0\.bias'\]"):
            weights(tmp_path / "x.safetensors", other, **options)
        loaded = weights(tmp_path / "x.safetensors", other, exclude=["encoder.0.bias"], **options)
        assert torch.equal(loaded["encoder.0.bias"], other.get_parameter("encoder.0.bias"))


class TestStates:
    """Of a whole State only what begins anew by itself can be left out."""

    def test_algorithm_state_begins_anew(self, tmp_path: Path) -> None:
        ema = [pl.algorithms.ema(half_life="3ba")]
        pl.run(fit(small(), max_duration="1ep", autoresume=tmp_path, algorithms=ema))
        path = pl.latest(tmp_path)
        assert path is not None
        whole, loaded = pl.load(path, model=small()), pl.load(path, model=small(), exclude=["algorithm_state/e*"])
        assert not loaded.algorithm_state
        sameness.assert_same(loaded, whole.replace(algorithm_state={}), "the rest")
        _, begun = next(iter(fit(loaded, algorithms=ema)))
        average = begun.algorithm_state["ema"]["params"]["0.weight"]
        assert torch.equal(average, whole.params["0.weight"])
        assert not torch.equal(average, whole.algorithm_state["ema"]["params"]["0.weight"])

    def test_another_optimizer(self, tmp_path: Path) -> None:
        pl.run(fit(small(), max_duration="1ep", autoresume=tmp_path))
        path = pl.latest(tmp_path)
        assert path is not None
        loaded = pl.load(path, model=small(), exclude="opt_state")
        last = pl.run(fit(loaded, optimizer=pl.optim.adamw(lr=0.1)))
        assert (last.timestamp.batch, last.timestamp.epoch) == (8, 2)

    @pytest.mark.slow  # real ranks
    def test_of_a_sharded_state(self, tmp_path: Path) -> None:
        path = tmp_path / "x.sharded"

        def program(rank: int) -> None:
            ema = [pl.algorithms.ema(half_life="3ba")]
            for event, state in train(network(), parallel="shard", algorithms=ema):
                if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 3:
                    pl.save(state, path)

        pool().run(program)
        whole = pl.load(path, model=network())
        loaded = pl.load(path, model=network(), exclude=["algorithm_state/ema", "opt_state"])
        sameness.assert_same(loaded, whole.replace(algorithm_state={}, opt_state=None), "the rest")
        model = network()
        some = pl.load(path, model=model, weights_only=True, exclude="0.*", rename=lambda name: name)
        assert torch.equal(some.params["0.weight"], model[0].weight)
        assert torch.equal(some.params["1.weight"], whole.params["1.weight"])
        with pytest.raises(pl.ArgumentError, match="rename is for weights alone"):
            pl.load(path, model=network(), rename={"0": "1"})


# A module has attributes of its own, such as "xpu".
NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=3).filter(lambda name: not hasattr(nn.ModuleDict, name))


@settings(max_examples=500 if THOROUGH else 25)
@given(st.dictionaries(NAMES, NAMES, min_size=2, max_size=5), st.data())
def test_any_names_and_any_globs(names: dict[str, str], data: st.DataObject) -> None:
    """Modules of drawn names are renamed and left out one by one: each weight is where both say, or the model's own."""
    new = {old: f"{place}{name}" for place, (old, name) in enumerate(names.items())}
    excluded = data.draw(st.sets(st.sampled_from(sorted(new.values())), max_size=len(new) - 1))
    saved = pl.State.create(nn.ModuleDict({old: nn.Linear(1, 2) for old in new}))
    model = nn.ModuleDict({name: nn.Linear(1, 2) for name in new.values()})
    dot = data.draw(st.sampled_from(["", "."]))
    as_mapping = {f"{old}{dot}": f"{name}{dot}" for old, name in new.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        KINDS[data.draw(st.sampled_from(sorted(KINDS)))](saved, path)
        options: dict[str, Any] = {"exclude": [f"{name}.*" for name in excluded], "rename": as_mapping}
        loaded = pl.load(path, model=model, weights_only=True, **options)
    for old, name in new.items():
        for kind in ("weight", "bias"):
            wanted = model.get_parameter(f"{name}.{kind}") if name in excluded else saved.params[f"{old}.{kind}"]
            assert torch.equal(loaded.params[f"{name}.{kind}"], wanted)
