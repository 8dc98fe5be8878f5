"""``pl.export``: files that load without pure_loop and return what the State's module returns."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.checkpoint import container
from tests.support.problem import convnet, images, mlp, points, run
from tests.support.refused import Refusal, check
from tests.support.streams import equal
from tests.support.worlds import pool

INPUTS = points(1, size=5, seed=3)[0][0]
STATE = pl.State.create(mlp())


class Tied(nn.Module):
    """A weight in two places, of which the first is the one that Hugging Face leaves out, and a buffer not saved."""

    def __init__(self, *, listed: bool = True) -> None:
        super().__init__()
        self._tied_weights_keys = ("head.weight",) if listed else ()
        self.head, self.embed = nn.Linear(4, 3, bias=False), nn.Embedding(3, 4)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(inputs) * self.scale
        return outputs


def outputs(state: pl.State, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = state.module(training=False)(inputs)
        return result


def loaded(path: Path, format: str, model: nn.Module) -> Any:
    if format == "module":
        return torch.load(path, weights_only=False)
    from safetensors.torch import load_model

    load_model(model, path)
    return model.eval()


@settings(max_examples=6)
@given(data=st.data())
def test_a_file_returns_what_the_state_returns_and_changes_nothing(data: st.DataObject, tmp_path_factory: Any) -> None:
    width, depth = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    kind: Any = data.draw(st.sampled_from(["module", "safetensors"]))

    def make() -> nn.Module:
        layers = [nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout()] + [nn.Linear(width, width)] * depth
        return nn.Sequential(*layers, nn.Linear(width, 3)).to(dtype)

    batches = [(inputs.to(dtype), targets) for inputs, targets in points(2, size=5)]
    state = run(make(), batches, [pl.algorithms.ema(smoothing=0.5)], max_duration="1ep", strict=False)
    average = data.draw(st.sampled_from([None, "ema"]))
    name = data.draw(st.sampled_from(["model", "model.PTH" if kind == "module" else "model.safetensors"]))
    path = tmp_path_factory.mktemp("exported") / "new" / name
    before, numbers = {name: tensor.clone() for name, tensor in state.params.items()}, torch.random.get_rng_state()
    kinds = {} if path.suffix and data.draw(st.booleans()) else {"format": kind}
    pl.export(state, path, **kinds, sample=INPUTS.to(dtype), average=average)
    equal(dict(state.params), before)
    assert torch.equal(torch.random.get_rng_state(), numbers)
    exported = state if average is None else pl.algorithms.averaged(state, average)
    with torch.no_grad():
        assert torch.equal(loaded(path, kind, make())(INPUTS.to(dtype)), outputs(exported, INPUTS.to(dtype)))
    assert [file.name for file in path.parent.iterdir()] == [name]


@pytest.mark.parametrize("listed", [True, False])
def test_of_tied_weights_the_name_of_hugging_face_is_kept(listed: bool, tmp_path: Path) -> None:
    from safetensors import safe_open

    path, state = tmp_path / "model.safetensors", pl.State.create(Tied(listed=listed))
    pl.export(state, path, "safetensors")
    kept, left_out = ("embed.weight", "head.weight") if listed else ("head.weight", "embed.weight")
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == [kept]
        assert file.metadata() == {"format": "pt", left_out: kept}
    assert torch.equal(loaded(path, "safetensors", Tied(listed=listed))(INPUTS), outputs(state, INPUTS))
    equal(pl.load(path, model=Tied(listed=listed), weights_only=True).params, state.params)


@pytest.mark.slow  # imports transformers
def test_from_pretrained_reads_the_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16}
    config = transformers.GPT2Config(vocab_size=11, bos_token_id=None, eos_token_id=None, **sizes)
    state = pl.State.create(transformers.GPT2LMHeadModel(config))
    pl.export(state, tmp_path / "model.safetensors", "safetensors")
    config.save_pretrained(tmp_path)
    model, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    tokens = torch.arange(6).reshape(2, 3)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, state.module(training=False)(tokens).logits)


class Gathering(nn.Module):
    """Two inputs, two outputs, an index into more than 64 places and half precision inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(280.0).reshape(4, 70) / 280)

    def forward(self, rows: Tensor, places: Tensor) -> dict[str, Tensor]:
        values = (rows @ self.table).gather(1, places)
        return {"values": values, "halved": values.bfloat16()}


@pytest.mark.slow  # torch's exporter traces
def test_an_onnx_file_takes_batches_of_any_size_named_arguments_and_several_outputs(tmp_path: Path) -> None:
    import onnx
    from onnx.reference import ReferenceEvaluator

    path, state = tmp_path / "model.onnx", run(convnet(), images(), max_duration="1ep")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pl.export(state, path, "onnx", sample=images(1)[0][0])
    file = onnx.load(path)
    sizes = file.graph.input[0].type.tensor_type.shape.dim
    assert [size.dim_param or size.dim_value for size in sizes] == ["batch", 3, 12, 12]
    model: Any = ReferenceEvaluator(file)
    for size in (1, 4, 7):
        inputs = images(1, size)[0][0]
        (found,) = model.run(None, {model.input_names[0]: inputs.numpy()})
        torch.testing.assert_close(torch.from_numpy(found.copy()), outputs(state, inputs))
    sample = {"rows": INPUTS, "places": torch.arange(15).reshape(5, 3) * 4}
    pl.export(pl.State.create(Gathering()), path, "onnx", sample=sample)
    with pytest.raises(pl.errors.ExportError, match="Gathering can't be traced on the sample"):
        pl.export(
            *(pl.State.create(Gathering()), tmp_path / "other.onnx", "onnx"),
            sample={**sample, "places": torch.ones(5, 3)},
        )
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_what_is_not_like_the_module_or_can_not_be_loaded_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounded(file: Any, tensors: Any, *rest: Any, **options: Any) -> str:
        return written(file, {name: tensor.bfloat16().float() for name, tensor in tensors.items()}, *rest, **options)

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("not today")

    written = container.write
    monkeypatch.setattr(container, "write", rounded)
    with pytest.raises(pl.errors.ExportError, match=r"differs from the model: the tensor '0\.weight'"):
        pl.export(STATE, tmp_path / "model", "safetensors")
    monkeypatch.setattr(torch, "load", fails)
    with pytest.raises(pl.errors.ExportError, match=r"can't be loaded or run, so it was removed: not today"):
        pl.export(STATE, tmp_path / "model", "module")
    assert list(tmp_path.iterdir()) == []
    pl.export(STATE, tmp_path / "model", "safetensors", verify=False)


E = pl.errors.ArgumentError
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((mlp(), "model.pt"), {}, pl.errors.ArgumentTypeError, "of a module: pl.State.create(module)"),
    (("model.pt", STATE), {}, pl.errors.ArgumentTypeError, "write export(state, path)"),
    ((STATE, 3), {}, pl.errors.ArgumentTypeError, "3 is no path"),
    ((STATE, "model.onnx", "onxx"), {}, E, "format"),
    ((STATE, "model.onnx", "onnx"), {}, E, "give sample=inputs"),
    ((STATE, "model.pt2", "torch.export"), {"sample": INPUTS[:1]}, E, "give more"),
    ((STATE, "model.pt"), {"average": "ema"}, E, "no average named 'ema'"),
    ((STATE, "model.onnx"), {}, E, "give sample=inputs"),
    ((STATE, "model.onnx", "module"), {}, E, '.onnx is the suffix of format="onnx"'),
    ((STATE, "model.pt"), {"format": "onnx"}, E, '.pt is the suffix of format="module"'),
    ((STATE, "model.bin"), {}, E, "'model.bin' has the suffix .bin, which names no format: write one of .onnx"),
    ((STATE, "model"), {}, E, "'model' has no suffix"),
    ((STATE, "."), {}, E, "is a folder"),
    ((STATE, "model.pt"), {"smaple": INPUTS}, pl.errors.ArgumentTypeError, "did you mean sample="),
    ((STATE, "model.pt"), {"verify": 1}, pl.errors.ArgumentTypeError, "verify"),
    ((STATE, f"{__file__}/model.pt"), {}, pl.errors.CheckpointWriteError, "test_export.py"),
]


def test_bad_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, options, error, says in REFUSED:
        export: Any = pl.export
        check(Refusal(says, lambda a=arguments, o=options: export(*a, **o), error, (says,)))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(pl.errors.MissingExtraError, match=r"pure_loop\[onnx\]"):
        pl.export(STATE, "model.onnx", "onnx", sample=INPUTS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # real ranks
def test_all_ranks_gather_what_is_sharded(tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")

    def program(rank: int) -> Any:
        state = run(mlp(), points(size=4), parallel="shard", max_duration="1ep")
        no_folder = f"{__file__}/model.safetensors"
        if rank == 0:  # which alone finds out, and leaves no other rank waiting
            with pytest.raises(pl.errors.CheckpointWriteError):
                pl.export(state, no_folder, "safetensors")
        else:
            pl.export(state, no_folder, "safetensors")
        pl.export(state, path, "safetensors")
        return {name: tensor.tolist() for name, tensor in state.module().state_dict().items()}

    expected = pool().run(program)[0]
    from safetensors.torch import load_file

    assert {name: tensor.tolist() for name, tensor in load_file(path).items()} == expected
