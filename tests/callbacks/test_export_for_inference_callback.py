"""ExportForInferenceCallback: files that load without pure_loop and return what the State's module returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.callbacks import ExportForInferenceCallback
from pure_loop.checkpoint import container
from pure_loop.exporting.files import export_module
from pure_loop.loggers import InMemoryLogger
from tests.support.problem import convnet, images, mlp, points, run
from tests.support.worlds import pool

INPUTS = points(1, size=5, seed=3)[0][0]


class Tied(nn.Module):
    """One weight in two places, a buffer that is not saved, and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, inputs: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        outputs: Tensor = self.last(self.second(self.first(inputs).relu())) * self.scale * scale
        return outputs


class Rows(nn.Module):
    """Works for batches of five only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs.reshape(5, 4))
        return outputs


def exported(path: Path, format: Any = "module", model: nn.Module | None = None, **options: Any) -> pl.State:
    callback = ExportForInferenceCallback(path, format, **options)
    return run(model or mlp(), points(size=5), callbacks=[callback], max_duration="1ep")


def same(loaded: Any, state: pl.State, inputs: Tensor = INPUTS) -> None:
    with torch.no_grad():
        assert torch.equal(loaded(inputs), state.module(training=False)(inputs))


def test_a_module(tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.pt"
    state = run(convnet(), images(), callbacks=[ExportForInferenceCallback(path, sample=images(1)[0][0])])
    loaded = torch.load(path, weights_only=False)
    assert not loaded.training
    same(loaded, state, images(1, seed=1)[0][0])
    assert [file.name for file in path.parent.iterdir()] == ["model.pt"]


def test_weights_by_the_names_of_state_dict(tmp_path: Path) -> None:
    from safetensors.torch import load_file, load_model

    state = exported(tmp_path / "model.safetensors", "safetensors", Tied())
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == state.params.keys()
    loaded = Tied()
    load_model(loaded, tmp_path / "model.safetensors")
    same(loaded, state)


@pytest.mark.slow  # torch's exporter traces
def test_a_graph_takes_batches_of_any_size(tmp_path: Path) -> None:
    state = exported(tmp_path / "model.pt2", "torch.export", sample=INPUTS)
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    same(loaded, state)
    same(loaded, state, torch.cat([INPUTS, INPUTS]))
    state = exported(tmp_path / "fixed.pt2", "torch.export", Rows(), sample=(INPUTS,), dynamic_batch=False)
    same(torch.export.load(tmp_path / "fixed.pt2").module(), state)
    with pytest.raises(
        pl.ExportError, match=r"Rows can't be traced on the sample .* for batches of any size"
    ) as caught:
        exported(tmp_path / "not.pt2", "torch.export", Rows(), sample=INPUTS)
    assert "FIT_START" in str(caught.value.__notes__)
    assert not (tmp_path / "not.pt2").exists()


@pytest.mark.slow  # torch's exporter traces
def test_a_graph_of_keyword_arguments(tmp_path: Path) -> None:
    sample = {"inputs": INPUTS, "scale": torch.tensor(3.0)}
    state = exported(tmp_path / "model.pt2", "torch.export", Tied(), sample=sample)
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        inputs, scale = INPUTS[:3], torch.tensor(0.5)
        expected = state.module(training=False)(inputs, scale)
        assert torch.equal(loaded(inputs=inputs, scale=scale), expected)


def test_an_average_is_exported_if_it_is_named(tmp_path: Path) -> None:
    callback = ExportForInferenceCallback(tmp_path / "model.pt", average="ema")
    state = run(mlp(), points(size=5), [pl.algorithms.ema(smoothing=0.9)], callbacks=[callback])
    same(torch.load(tmp_path / "model.pt", weights_only=False), pl.algorithms.averaged(state))
    with pytest.raises(pl.ArgumentError, match="no average named 'swa'"):
        exported(tmp_path / "model.pt", average="swa")


def test_loggers_know_the_file(tmp_path: Path) -> None:
    logger = InMemoryLogger()
    run(mlp(), points(size=5), callbacks=[ExportForInferenceCallback(tmp_path / "model.pt")], loggers=[logger])
    assert logger.files == {"export": str(tmp_path / "model.pt")}


def test_a_model_that_cannot_be_pickled_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.linear(inputs)
            return outputs

    with pytest.raises(pl.ExportError, match="Local can't be pickled") as caught:
        exported(tmp_path / "model.pt", model=Local())
    assert "FIT_START" in str(caught.value.__notes__)
    exported(tmp_path / "model.safetensors", "safetensors", Local())


@pytest.mark.parametrize("format", ["module", "safetensors"])
def test_a_file_that_differs_is_removed(format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, written = torch.save, container.write

    def damaged(module: nn.Module, file: Any) -> None:
        nn.init.zeros_(module[0].bias)  # type: ignore[index]
        saved(module, file)

    def rounded(file: Any, tensors: Any, metadata: Any, **options: Any) -> str:
        return written(
            file, {name: tensor.to(torch.bfloat16).float() for name, tensor in tensors.items()}, metadata, **options
        )

    module = mlp().eval()
    monkeypatch.setattr(torch, "save", lambda value, file: damaged(mlp().eval(), file))
    monkeypatch.setattr(container, "write", rounded)
    with pytest.raises(pl.ExportError, match=r"differs from the model: the tensor '0\.(bias|weight)'"):
        export_module(module, tmp_path / "model", format)
    assert list(tmp_path.iterdir()) == []
    export_module(module, tmp_path / "model", format, verify=False)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


class Drawing(nn.Module):
    """Returns something else at each call."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.rand_like(inputs)


def test_outputs_that_differ_are_noticed(tmp_path: Path) -> None:
    model = nn.Sequential(mlp(), Drawing()).eval()
    with pytest.raises(pl.ExportError, match="output 0 of Sequential"):
        export_module(model, tmp_path / "model", "module", sample=INPUTS)
    export_module(model, tmp_path / "model", "module")


@pytest.mark.slow  # real ranks
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_two_ranks_write_one_file(parallel: str, tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")

    def program(rank: int) -> Any:
        callback = ExportForInferenceCallback(path, "safetensors")
        state = run(mlp(), points(size=4), callbacks=[callback], parallel=parallel, max_duration="1ep")
        module = state.module()
        return {name: tensor.tolist() for name, tensor in module.state_dict().items()}

    expected = pool().run(program)[0]
    from safetensors.torch import load_file

    assert {name: tensor.tolist() for name, tensor in load_file(path).items()} == expected
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
