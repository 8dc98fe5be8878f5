"""ExportForInferenceCallback: files that load without pure_loop and return what the State's module returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.callbacks import ExportForInferenceCallback
from pure_loop.exporting.files import export_module
from pure_loop.loggers import InMemoryLogger
from tests.support.problem import convnet, images, mlp, points, run
from tests.support.worlds import pool

INPUTS = points(1, size=5, seed=3)[0][0]


class Scaled(nn.Linear):
    """With a buffer that is not saved, and a keyword argument."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("factor", torch.tensor(2.0), persistent=False)

    def forward(self, inputs: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        return super().forward(inputs) * self.factor * scale  # type: ignore[no-any-return, operator]


class Rows(nn.Linear):
    """Works for batches of five only."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.reshape(5, 4))


class Drawing(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.rand_like(super().forward(inputs))


def exported(path: Path, format: Any = "module", model: nn.Module | None = None, **options: Any) -> pl.State:
    callback = ExportForInferenceCallback(path, format, **options)
    return run(model or mlp(), points(size=5), callbacks=[callback], max_duration="1ep")


def same(loaded: Any, state: pl.State, *inputs: Tensor) -> None:
    with torch.no_grad():
        assert torch.equal(loaded(*inputs), state.module(training=False)(*inputs))


def test_the_last_state_is_in_the_file_of_which_loggers_know_or_an_average_if_it_is_named(tmp_path: Path) -> None:
    path, logger = tmp_path / "new" / "model.pt", InMemoryLogger()
    for average in (None, "ema"):
        callback = ExportForInferenceCallback(path, sample=images(1)[0][0], average=average, overwrite=True)
        options: dict[str, Any] = {"callbacks": [callback], "loggers": [logger]}
        state = run(convnet(), images(), [pl.algorithms.ema(smoothing=0.9)], **options)
        loaded = torch.load(path, weights_only=False)
        assert not loaded.training
        same(loaded, state if average is None else pl.algorithms.averaged(state), images(1, seed=1)[0][0])
        assert [file.name for file in path.parent.iterdir()] == ["model.pt"]
    assert logger.files == {"export": str(path)}
    with pytest.raises(pl.ArgumentError, match="no average named 'swa'"):
        exported(tmp_path / "other.pt", average="swa")


@pytest.mark.slow  # torch's exporter traces
def test_a_graph_takes_batches_of_any_size_and_keyword_arguments(tmp_path: Path) -> None:
    sample = {"inputs": INPUTS, "scale": torch.tensor(3.0)}
    state = exported(tmp_path / "model.pt2", "torch.export", Scaled(), sample=sample)
    graph = torch.export.load(tmp_path / "model.pt2").module()
    for inputs in (INPUTS[:3], torch.cat([INPUTS, INPUTS])):
        same(lambda x, scale: graph(inputs=x, scale=scale), state, inputs, torch.tensor(0.5))
    state = exported(tmp_path / "fixed.pt2", "torch.export", Rows(4, 3), sample=(INPUTS,), dynamic_batch=False)
    same(torch.export.load(tmp_path / "fixed.pt2").module(), state, INPUTS)
    with pytest.raises(
        pl.ExportError, match=r"Rows can't be traced on the sample .* for batches of any size"
    ) as caught:
        exported(tmp_path / "not.pt2", "torch.export", Rows(4, 3), sample=INPUTS)
    assert "FIT_START" in str(caught.value.__notes__)
    assert not (tmp_path / "not.pt2").exists()


def test_what_cannot_be_exported_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    """And what differs from the model where it is read back."""

    class Local(nn.Linear): ...

    with pytest.raises(pl.ExportError, match="Local can't be pickled") as caught:
        exported(tmp_path / "model.pt", model=Local(4, 3))
    assert "FIT_START" in str(caught.value.__notes__)
    exported(tmp_path / "model.safetensors", "safetensors", Local(4, 3))
    with pytest.raises(pl.ExportError, match="output 0 of Drawing"):
        export_module(Drawing(4, 3).eval(), tmp_path / "model", "module", sample=INPUTS)
    export_module(Drawing(4, 3).eval(), tmp_path / "model", "module")


def test_a_module_that_is_read_back_otherwise_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = torch.save
    monkeypatch.setattr(torch, "save", lambda module, file: saved(mlp(seed=1).eval(), file))
    with pytest.raises(pl.ExportError, match=r"differs from the model: the tensor '0\.weight'"):
        export_module(mlp().eval(), tmp_path / "model", "module")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # real ranks
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_two_ranks_write_one_file(parallel: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def program(rank: int) -> Any:
        callback = ExportForInferenceCallback(path, "safetensors")
        state = run(mlp(), points(size=4), callbacks=[callback], parallel=parallel, max_duration="1ep")
        return {name: tensor.tolist() for name, tensor in state.module().state_dict().items()}

    expected = pool().run(program)[0]
    assert {name: tensor.tolist() for name, tensor in load_file(path).items()} == expected
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
