"""Files of weights alone: what other libraries read, and what training can't resume from."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import pure_loop as pl
from pure_loop.algorithms import averaged
from pure_loop.callbacks import CheckpointSaver
from pure_loop.errors import CheckpointError, ResumeError
from tests.conftest import THOROUGH
from tests.support.checkpoint_runs import fit, small


@pytest.fixture(scope="module")
def trained() -> pl.State:
    return pl.run(fit(small()))


def assert_same_weights(one: pl.State, other: pl.State) -> None:
    for values, others in ((one.params, other.params), (one.buffers, other.buffers)):
        assert values.keys() == others.keys()
        for name, tensor in values.items():
            assert tensor.dtype is others[name].dtype
            assert torch.equal(tensor, others[name]), name


def test_a_module_of_torch_loads_the_file_of_another_library(trained: pl.State, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    pl.save(trained, path, weights_only=True, notes={"why": "a test"})
    module = small()
    module.load_state_dict(load_file(path))  # strict: these names and no others
    x = torch.randn(4, 2)
    assert torch.equal(module.eval()(x), trained.module(training=False)(x))
    said = pl.checkpoint.describe(path)
    assert (said["batch"], said["epoch"], said["notes"]) == (8, 2, {"why": "a test"})


class Odd(nn.Module):
    """Tied weights, buffers that ``state_dict()`` leaves out, one that a forward makes, complex numbers, strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 1)
        self.tied = self.first
        self.table = nn.Parameter(torch.randn(3, 2).t())
        self.wave = nn.Parameter(torch.randn(2, dtype=torch.complex64).conj())
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.late = x.detach().mean(0)
        return self.second(self.tied(self.first(x)) + self.table.sum(1) + self.wave.real + self.hidden)


def test_odd_modules_come_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = pl.run(fit(Odd(), algorithms=[]))
    pl.save(state, tmp_path / "odd.safetensors", weights_only=True)
    assert set(load_file(tmp_path / "odd.safetensors")) == {
        *("first.weight", "second.weight", "second.bias", "table", "wave", "late")
    }
    assert_same_weights(pl.load(tmp_path / "odd.safetensors", model=Odd(), weights_only=True), state)


def test_training_starts_with_it_and_does_not_resume(trained: pl.State, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    pl.save(trained, path, weights_only=True)
    with pytest.raises(ResumeError, match=r"weights alone, of batch 8.*optimizer state.*weights_only=True\)"):
        pl.load(path, model=small())
    begun = pl.load(path, model=small(), weights_only=True)
    assert begun.timestamp == pl.Timestamp()
    assert begun.opt_state is None
    # load_path takes weights to start with, as it takes those of other libraries.
    one, other = pl.run(fit(begun)), pl.run(fit(small(), load_path=path))
    assert_same_weights(one, other)
    # A folder of weights holds nothing to resume from.
    assert pl.latest(tmp_path) is None


@pytest.mark.parametrize("change", ["[]", "{}", '{"format": 99}', '{"format": 1, "made_by": 5}'])
def test_a_description_that_is_none_is_refused(trained: pl.State, tmp_path: Path, change: str) -> None:
    path = tmp_path / "weights.safetensors"
    pl.save(trained, path, weights_only=True)
    save_file(load_file(path), path, metadata={"pure_loop.weights": change})
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        pl.load(path, model=small(), weights_only=True)


class TestSaver:
    """CheckpointSaver(weights_only=True)."""

    def test_the_last_and_the_best_weights(self, tmp_path: Path) -> None:
        def saver() -> CheckpointSaver:
            return CheckpointSaver(
                tmp_path / "w", weights_only=True, interval="1ba", keep_last=1, keep_best=1, metric="val/loss"
            )

        resumed = CheckpointSaver(tmp_path / "r", keep_last=1)
        options: dict[str, Any] = {"eval_interval": "1ba"}
        pl.run(fit(small(), max_duration="1ep", callbacks=[saver(), resumed], **options))
        state = pl.run(fit(small(), callbacks=[saver(), resumed], autoresume=tmp_path / "r", **options))
        # Files of the run before it was resumed count, and are removed.
        files = {path.name for path in (tmp_path / "w").glob("*.safetensors")}
        best = pl.best(tmp_path / "w")
        assert best is not None
        assert files == {"ep2-ba8.safetensors", Path(best).name}
        loaded = pl.load(tmp_path / "w" / "latest", model=small(), weights_only=True)
        assert_same_weights(loaded, averaged(state))  # which the evaluation measured
        whole = pl.run(fit(small(), watch=(), **options))
        assert_same_weights(whole, state)

    def test_it_needs_another_folder_than_autoresume(self, tmp_path: Path) -> None:
        with pytest.raises(pl.ArgumentError, match="whole States: give the weights a folder"):
            fit(small(), autoresume=tmp_path, callbacks=CheckpointSaver(tmp_path, weights_only=True))
        stream = fit(small(), autoresume=tmp_path, callbacks=CheckpointSaver(tmp_path / "w", weights_only=True))
        pl.run(stream)
        assert pl.latest(tmp_path) is not None

    def test_what_cannot_be_written_is_an_error_before_training(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(2, 1), nn.Flatten())
        model.register_buffer("odd", torch.zeros(1, dtype=torch.complex128))
        with pytest.raises(pl.ArgumentTypeError, match=r"state.buffers\['odd'\] has dtype"):
            pl.run(fit(model, callbacks=CheckpointSaver(tmp_path, weights_only=True)))


NAMES = st.sampled_from(["a", "b", "net", "head"])


@settings(max_examples=300 if THOROUGH else 20)
@given(st.dictionaries(NAMES, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), min_size=1), st.data())
def test_weights_of_any_module_come_back(dtypes: dict[str, torch.dtype], data: st.DataObject) -> None:
    modules = {name: nn.Linear(data.draw(st.integers(1, 3)), 2).to(dtype) for name, dtype in dtypes.items()}
    state = pl.State.create(nn.ModuleDict(modules))
    with tempfile.TemporaryDirectory() as folder:
        pl.save(state, f"{folder}/w.safetensors", weights_only=True)
        loaded = pl.load(f"{folder}/w.safetensors", model=nn.ModuleDict(modules), weights_only=True)
    assert_same_weights(loaded, state)


@pytest.mark.parametrize("name", ["first.weight", "tied.weight"])
def test_a_plain_file_of_weights_has_either_name_and_other_digits(tmp_path: Path, name: str) -> None:
    """As other libraries write them; what ``state_dict()`` leaves out stays the model's own."""
    tensors = {key: tensor for key, tensor in Odd().state_dict().items() if key not in ("first.weight", "tied.weight")}
    weight = torch.tensor([[0.5, 2.0], [3.0, -1.0]])
    tensors = {key: tensor.resolve_conj().contiguous() for key, tensor in tensors.items()}
    save_file({**tensors, name: weight.bfloat16()}, tmp_path / "x.safetensors")
    state = pl.load(tmp_path / "x.safetensors", model=Odd())
    assert torch.equal(state.params["first.weight"], weight)
    assert state.buffers["hidden"].tolist() == [1, 1]


def test_a_plain_file_starts_a_run(tmp_path: Path, trained: pl.State) -> None:
    source = trained.module()
    save_file(source.state_dict(), tmp_path / "x.safetensors")
    assert_same_weights(pl.run(fit(small(), load_path=tmp_path / "x.safetensors")), pl.run(fit(source)))
