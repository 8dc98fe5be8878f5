"""What callbacks show and export of a model: images, texts, and files that load without pure_loop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.callbacks import ExportForInferenceCallback, Generate, ImageVisualizer
from pure_loop.exporting.export import export_module
from pure_loop.loggers import InMemoryLogger
from tests.support.problem import convnet, cross_entropy, fit, images, mlp, points, run
from tests.support.worlds import pool

# Images


def recorded(visualizer: ImageVisualizer, model: Any = None, data: Any = None, **options: Any) -> InMemoryLogger:
    logger = InMemoryLogger()
    run(model or convnet(), data or images(), callbacks=[visualizer], loggers=[logger], **options)
    return logger


def shown(pixels: Tensor) -> Tensor:
    """As loggers take them."""
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


def test_images_of_training_are_those_of_the_first_batch_after_an_interval() -> None:
    for interval, batches in (
        ("1ep", [1, 4, 7]),
        ("2ba", [1, 3, 5, 7, 9]),
        ("24sp", [1, 7]),
        (0, []),
        (lambda state: state.timestamp.batch in (2, 3), [3, 4]),
    ):
        entries = recorded(ImageVisualizer(interval), max_duration="3ep").images.get("train/images", [])  # type: ignore[arg-type]
        assert [timestamp.batch for timestamp, _ in entries] == batches


def test_a_record_is_of_the_last_microbatch_as_algorithms_made_it_with_classes_and_predictions() -> None:
    """Targets are those of the samples, and not what the loss takes."""

    @pl.algorithm(pl.Event.BEFORE_FORWARD)
    def invert(state: pl.State) -> pl.State:
        return state.replace(microbatch=(1 - state.microbatch[0], state.microbatch[1]))

    data, logger, predictions = images(size=5), InMemoryLogger(), []
    options: dict[str, Any] = {"callbacks": [ImageVisualizer(images=1)], "loggers": [logger], "microbatch_size": 3}
    for event, state in fit(convnet(), data, [invert, pl.algorithms.label_smoothing(0.1)], **options):
        if event is pl.Event.AFTER_FORWARD and len(state.microbatch[1]) == 2:
            predictions.append(int(state.outputs.argmax(1)[0]))
    for (_, found), (_, columns, rows), prediction in zip(
        logger.images["train/images"], logger.tables["train/images"], predictions[::3], strict=True
    ):
        assert torch.equal(found, shown(1 - data[0][0][3:4]))
        assert columns == ["image", "target", "prediction"]
        assert rows == [[0, int(data[0][1][3]), prediction]]


def test_evaluations_show_their_first_batch() -> None:
    data, held_out = images(), images(2, seed=1)
    val = pl.Evaluator(held_out, interval="1ep", microbatch_size=2)
    logger = recorded(ImageVisualizer(0), evaluators={"val": val, "train": pl.Evaluator(data, interval="2ep")})
    found = {name: [timestamp.batch for timestamp, _ in entries] for name, entries in logger.images.items()}
    assert found == {"val/images": [3, 6], "eval/train/images": [6]}
    assert torch.equal(logger.images["val/images"][1][1], shown(held_out[0][0][:2]))
    assert logger.tables["val/images"][0][2][0][1] == int(held_out[0][1][0])
    alone = InMemoryLogger()
    options: dict[str, Any] = {"callbacks": [ImageVisualizer()], "loggers": [alone]}
    pl.run(pl.evaluate(convnet(), held_out, loss=cross_entropy, **options))
    assert list(alone.images) == ["eval/images"]


class Shown(nn.Module):
    """Returns zeros of a shape, in a form that is trained."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.value.expand(len(inputs), *self.value.shape)


HALF, CLASSES = torch.full((2, 1, 4, 6), 0.5), torch.tensor([1, 0])


def of(target: Any, *outputs: int, inputs: Tensor = HALF, **options: Any) -> InMemoryLogger:
    """What is recorded of one batch with these targets and outputs of this shape."""
    task = pl.Task(forward=lambda m, batch: m(inputs), loss=lambda outputs, batch: outputs.sum())
    batch = inputs if target is None else (inputs, target)
    return recorded(ImageVisualizer(**options), Shown(*outputs), [batch], loss=task, max_duration="1ba")


def test_classes_of_pixels_are_masks_of_the_size_of_the_images() -> None:
    target = torch.arange(24).reshape(1, 4, 6).repeat(2, 1, 1)
    target[0, 0, 0] = -100
    small = torch.tensor([[[1, 2, 3], [4, 5, 6]]]).repeat(2, 1, 1)
    larger = small.repeat_interleave(2, 1).repeat_interleave(2, 2)
    for given, size, wanted in ((target, (4, 6), target.clamp(0)), (small, (2, 3), larger)):
        logger = of(given, 7, *size)
        (_, masks) = logger.masks["train/images"][0]
        assert list(masks) == ["targets", "predictions"]
        assert torch.equal(masks["targets"], wanted.to(torch.uint8))
        assert torch.equal(masks["predictions"], torch.zeros(2, 4, 6, dtype=torch.uint8))
        assert not logger.tables


def test_images_of_targets_and_outputs_like_them_are_images() -> None:
    target, scale = torch.rand(2, 3, 4, 6), torch.tensor([0.25, 0.25, 0.5])
    found = of(target, 3, 4, 6, inputs=torch.zeros(2, 3, 4, 6), mean=0.5, std=[0.25, 0.25, 0.5]).images
    assert torch.equal(found["train/targets"][0][1], shown(target * scale[:, None, None] + 0.5))
    assert torch.equal(found["train/predictions"][0][1], torch.full((2, 4, 6, 3), 128, dtype=torch.uint8))
    alone = of(None, 3, 4, 6, inputs=torch.rand(2, 3, 4, 6))
    assert sorted(alone.images) == ["train/images", "train/predictions"], "without targets, those like the input"
    assert not alone.tables


def test_what_a_table_shows() -> None:
    for target, outputs, rows in (
        (torch.eye(3)[[2, 1]], (3,), [[0, 2, 0], [1, 1, 0]]),  # probabilities
        (torch.tensor([[0.5], [1.5]]), (1,), [[0, 0.5, 0.0], [1, 1.5, 0.0]]),
        (CLASSES, (2, 7, 7), [[0, 1], [1, 0]]),  # outputs of another shape, which are masks
        (torch.zeros(2, 3, 2), (3,), [[0, 0], [1, 0]]),  # targets of another shape
    ):
        assert of(target, *outputs).tables["train/images"][0][2] == rows


def test_floats_are_cut_and_whole_numbers_are_bytes_already() -> None:
    for given, options, wanted in (
        (torch.tensor([-1.0, 0.5, 2.0, torch.nan]).reshape(1, 1, 2, 2), {}, [0, 128, 255, 0]),
        (torch.tensor([-1, 7, 255, 300]).reshape(1, 2, 2), {}, [0, 7, 255, 255]),
        (torch.zeros(1, 1, 2, 3, dtype=torch.bfloat16), {"channels_last": True}, [0] * 6),
    ):
        found = of(CLASSES[:1], 3, inputs=given, **options).images["train/images"][0][1]
        assert found.flatten().tolist() == wanted
    assert found.shape == (1, 1, 2, 3)


def test_what_is_no_image_is_refused() -> None:
    for inputs, options, message in (
        (torch.zeros(1, 4), {}, r"inputs are tensor \(1, 4\) float32"),
        (torch.zeros(1, 8, 6, 3), {}, "8 channels, and pictures have 1, 3 or 4: write channels_last=True"),
        (torch.zeros(1, 5, 4, 6), {}, r"5 channels, and pictures have 1, 3 or 4\.\n"),
        (HALF[:1], {"mean": [0.1, 0.2]}, "2 numbers for images of 1 channels"),
        (HALF[:1].to(torch.uint8), {"mean": 0.1}, "leave mean= and std= out"),
        (HALF[:1], {"input_key": "image"}, r"has no batch\['image'\]"),
        (HALF[:1], {"outputs": lambda outputs: {"logits": outputs}}, "predictions are a tensor"),
    ):
        with pytest.raises(pl.PureLoopError, match=message):
            of(CLASSES[:1], 3, inputs=inputs, **options)


# Texts

ALPHABET = "abcd"
CODES = torch.arange(16) % 4


def characters() -> nn.Module:
    """Scores of the next character, from the last one."""
    with pl.random.seeded(0):
        return nn.Sequential(nn.Embedding(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))


def likeliest(module: nn.Module, prompt: str) -> str:
    assert not module.training
    assert not torch.is_grad_enabled()
    for _ in range(5):
        prompt += ALPHABET[int(module(torch.tensor([ALPHABET.index(prompt[-1])])).argmax())]
    return prompt


def drawn(module: nn.Module, prompt: str) -> str:
    """From three generators, and it leaves the module another one."""
    for parameter in module.parameters():
        parameter.fill_(torch.nan)
    return f"{prompt} {torch.rand(()):.6f} {random.random():.6f} {np.random.rand():.6f}"


def weight(module: Any, prompt: str) -> str:
    return str(module[2].bias.tolist())


def stream(*callbacks: Any, **options: Any) -> Any:
    """In which each character is followed by the next one of the alphabet."""
    settings = {"optimizer": pl.optim.adam(lr=0.05), "seed": 5, "max_duration": "2ep", **options}
    return fit(characters(), [(CODES, (CODES + 1) % 4)] * 3, callbacks=callbacks, **settings)


def texts(callback: Generate, **options: Any) -> list[list[Any]]:
    logger = InMemoryLogger()
    pl.run(stream(callback, loggers=[logger], **options))
    return rows_of(logger.tables)


def rows_of(tables: Any) -> list[list[Any]]:
    for timestamp, columns, rows in tables["generate/text"]:
        assert columns == ["prompt", "text", "batch"]
        assert all(row[2] == timestamp.batch for row in rows)
    return [row for _, _, rows in tables["generate/text"] for row in rows]


def test_texts_are_written_at_the_interval_and_at_the_end_of_what_was_learned() -> None:
    rows = texts(Generate(["a", "c"], generate=likeliest, interval="10ep"), max_duration="20ep")
    assert [row[2] for row in rows] == [30, 30, 60, 60]
    assert rows[2:] == [["a", "abcdab", 60], ["c", "cdabcd", 60]]
    at_3: Any = lambda state: state.timestamp.batch == 3  # noqa: E731
    for interval, batches in (
        ("1ep", [3, 6, 7]),
        ("2ba", [2, 4, 6, 7]),
        (0, [7]),
        (at_3, [3, 7]),
        ("1iter", [3, 6, 7]),
    ):
        rows = texts(Generate("a", generate=drawn, interval=interval), max_duration="7ba", iteration_length="1ep")
        assert [row[2] for row in rows] == batches


def test_a_text_depends_on_the_seed_the_batch_and_the_place_of_its_prompt() -> None:
    def written(prompts: Any = ("a", "a"), seed: int | None = None) -> list[str]:
        return [row[1] for row in texts(Generate(prompts, generate=drawn, seed=seed))]

    first = written()
    assert len(set(first)) == 4
    random.seed(1)
    torch.manual_seed(1)
    assert first == written() == written(seed=5)
    assert written("a") == first[::2]
    assert set(written(seed=6)).isdisjoint(first)


def test_the_average_writes_if_it_is_named() -> None:
    ema = [pl.algorithms.ema(smoothing=0.9)]
    state = pl.run(stream(algorithms=ema))
    for average, expected in ((None, state), ("ema", pl.algorithms.averaged(state))):
        rows = texts(Generate("a", generate=weight, average=average), algorithms=ema)
        assert rows[-1][1] == str(expected.params["2.bias"].tolist())
    with pytest.raises(pl.errors.ArgumentError, match="no average named 'swa'"):
        texts(Generate("a", generate=weight, average="swa"))


def test_errors_name_the_prompt_and_without_loggers_nothing_is_written() -> None:
    def never(module: nn.Module, prompt: str) -> Any:
        raise AssertionError(prompt)

    pl.run(stream(Generate("a", generate=never)))
    with pytest.raises(AssertionError, match="a") as caught:
        texts(Generate("a", generate=never))
    assert "raised by generate= of Generate, for the prompt 'a'" in caught.value.__notes__
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"returned list for the prompt 'a'; return a text"):
        texts(Generate("a", generate=lambda module, prompt: [1]))  # type: ignore[arg-type, return-value]


@pytest.mark.slow  # real ranks
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_on_two_ranks_the_first_one_writes_what_one_rank_writes(parallel: str) -> None:
    def program(rank: int, **options: Any) -> Any:
        called, logger = [], InMemoryLogger()

        def generate(module: nn.Module, prompt: str) -> str:
            called.append(prompt)
            return likeliest(module, prompt)

        pl.run(stream(Generate("a", generate=generate), loggers=[logger], max_duration="8ep", **options))
        return logger.tables, called

    (tables, called), nothing = pool().run(lambda rank: program(rank, parallel=parallel, strict=False))
    assert rows_of(tables) == rows_of(program(0)[0])
    assert called == ["a"] * 8
    assert nothing == ({}, [])


# Files

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
    with pytest.raises(pl.errors.ArgumentError, match="no average named 'swa'"):
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
        pl.errors.ExportError, match=r"Rows can't be traced on the sample .* for batches of any size"
    ) as caught:
        exported(tmp_path / "not.pt2", "torch.export", Rows(4, 3), sample=INPUTS)
    assert "FIT_START" in str(caught.value.__notes__)
    assert not (tmp_path / "not.pt2").exists()


def test_what_cannot_be_exported_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    """And what differs from the model where it is read back."""

    class Local(nn.Linear): ...

    with pytest.raises(pl.errors.ExportError, match="Local can't be pickled") as caught:
        exported(tmp_path / "model.pt", model=Local(4, 3))
    assert "FIT_START" in str(caught.value.__notes__)
    exported(tmp_path / "model.safetensors", "safetensors", Local(4, 3))
    with pytest.raises(pl.errors.ExportError, match="output 0 of Drawing"):
        export_module(Drawing(4, 3).eval(), tmp_path / "model", "module", sample=INPUTS)
    export_module(Drawing(4, 3).eval(), tmp_path / "model", "module")


def test_a_module_that_is_read_back_otherwise_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = torch.save
    monkeypatch.setattr(torch, "save", lambda module, file: saved(mlp(seed=1).eval(), file))
    with pytest.raises(pl.errors.ExportError, match=r"differs from the model: the tensor '0\.weight'"):
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
