"""ImageVisualizer, in real training loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop.callbacks import ImageVisualizer
from pure_loop.loggers import InMemoryLogger
from tests.support.problem import fit, noise, run

Data = list[tuple[Any, Any]]


def pictures(batches: int = 3, size: int = 4, channels: int = 1) -> Data:
    g = noise(0)
    return [
        (torch.rand(size, channels, 4, 6, generator=g), torch.randint(3, (size,), generator=g)) for _ in range(batches)
    ]


def classifier(channels: int = 1) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 24, 3))


def recorded(data: Data, visualizer: ImageVisualizer, model: nn.Module | None = None, **options: Any) -> InMemoryLogger:
    logger = InMemoryLogger()
    run(model or classifier(), data, callbacks=[visualizer], loggers=[logger], **options)
    return logger


def at(entries: list[Any]) -> list[int]:
    return [timestamp.batch for timestamp, *_ in entries]


def bytes_of(images: Tensor) -> Tensor:
    return (images * 255).round().to(torch.uint8)


@pytest.mark.parametrize(
    ("interval", "batches"),
    [
        ("1ep", [1, 4, 7]),
        ("2ba", [1, 3, 5, 7, 9]),
        ("3ba", [1, 4, 7]),
        ("2ep", [1, 7]),
        ("24sp", [1, 7]),
        (0, []),
        (lambda state: state.timestamp.batch in (2, 3), [3, 4]),
    ],
)
def test_images_of_training_are_those_of_the_first_batch_after_an_interval(interval: Any, batches: list[int]) -> None:
    logger = recorded(pictures(), ImageVisualizer(interval), max_duration="3ep")
    assert at(logger.images.get("train/images", [])) == batches


def test_images_are_bytes_in_the_order_that_loggers_take() -> None:
    data = pictures(channels=3)
    logger = recorded(data, ImageVisualizer("2ba", images=3), classifier(3), max_duration="1ep")
    (_, first), (_, second) = logger.images["train/images"]
    assert torch.equal(first, bytes_of(data[0][0][:3]).permute(0, 2, 3, 1))
    assert torch.equal(second, bytes_of(data[2][0][:3]).permute(0, 2, 3, 1))


def test_images_are_those_that_algorithms_made() -> None:
    @pl.algorithm(pl.Event.BEFORE_FORWARD)
    def invert(state: pl.State) -> pl.State:
        inputs, targets = state.microbatch
        return state.replace(microbatch=(1 - inputs, targets))

    data = pictures()
    logger = recorded(data, ImageVisualizer(), algorithms=[invert, pl.algorithms.label_smoothing(0.1)])
    images = logger.images["train/images"][0][1]
    assert torch.equal(images, bytes_of(1 - data[0][0]).permute(0, 2, 3, 1))
    assert [row[1] for row in logger.tables["train/images"][0][2]] == data[0][1].tolist()


def test_a_table_has_classes_and_predictions() -> None:
    data, predictions = pictures(), []
    logger = InMemoryLogger()
    for event, state in fit(classifier(), data, callbacks=[ImageVisualizer()], loggers=[logger]):
        if event is pl.Event.AFTER_FORWARD and state.timestamp.batch in (0, 3):
            predictions.append(state.outputs.argmax(1).tolist())
    for (_, columns, rows), predicted in zip(logger.tables["train/images"], predictions, strict=True):
        assert columns == ["image", "target", "prediction"]
        assert rows == [[i, t, p] for i, t, p in zip(range(4), data[0][1].tolist(), predicted, strict=True)]


def test_of_several_microbatches_the_last_one_is_shown() -> None:
    data = pictures(size=5)
    logger = recorded(data, ImageVisualizer(), microbatch_size=3, max_duration="1ba")
    assert torch.equal(logger.images["train/images"][0][1], bytes_of(data[0][0][3:]).permute(0, 2, 3, 1))


def test_evaluations_show_their_first_batch() -> None:
    data, held_out = pictures(), pictures(2)
    evaluators = {
        "val": pl.Evaluator(held_out, interval="1ep", microbatch_size=2),
        "train": pl.Evaluator(data, interval="2ep"),
    }
    logger = recorded(data, ImageVisualizer(0), evaluators=evaluators)
    assert {name: at(entries) for name, entries in logger.images.items()} == {
        "val/images": [3, 6],
        "eval/train/images": [6],
    }
    assert torch.equal(logger.images["val/images"][1][1], bytes_of(held_out[0][0][:2]).permute(0, 2, 3, 1))
    assert logger.tables["val/images"][0][2][0][1] == int(held_out[0][1][0])
    alone = InMemoryLogger()
    pl.run(
        pl.evaluate(
            classifier(), held_out, loss=functional.cross_entropy, callbacks=[ImageVisualizer()], loggers=[alone]
        )
    )
    assert list(alone.images) == ["eval/images"]


class Shown(nn.Module):
    """Returns what it is made to return, in a form that is trained."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.value.expand(len(inputs), *self.value.shape)


def of(target: Tensor, *outputs: int, inputs: Tensor | None = None, **options: Any) -> InMemoryLogger:
    """What is recorded of one batch with these targets and outputs of this shape."""
    inputs = torch.full((len(target), 1, 4, 6), 0.5) if inputs is None else inputs
    visualizer = ImageVisualizer(**options)
    loss = pl.Task(loss=lambda outputs, batch: outputs.sum())
    return recorded([(inputs, target)], visualizer, Shown(*outputs), loss=loss, max_duration="1ba")


def test_classes_of_pixels_are_masks() -> None:
    target = torch.arange(24).reshape(1, 4, 6).repeat(2, 1, 1)
    target[0, 0, 0] = -100
    logger = of(target, 5, 4, 6)
    (_, masks) = logger.masks["train/images"][0]
    assert {name: (mask.dtype, tuple(mask.shape)) for name, mask in masks.items()} == dict.fromkeys(
        ("targets", "predictions"), (torch.uint8, (2, 4, 6))
    )
    assert torch.equal(masks["targets"], target.clamp(0).to(torch.uint8))
    assert not logger.tables


def test_masks_are_brought_to_the_size_of_images() -> None:
    target = torch.tensor([[[1, 2, 3], [4, 5, 6]]])
    (_, masks) = of(target, 7, 2, 3).masks["train/images"][0]
    assert torch.equal(masks["targets"], target.repeat_interleave(2, 1).repeat_interleave(2, 2).to(torch.uint8))


def test_images_of_targets_are_images() -> None:
    target = torch.rand(2, 3, 4, 6, generator=noise(1))
    logger = of(target, 3, 4, 6, inputs=torch.zeros(2, 3, 4, 6), mean=0.5, std=[0.25, 0.25, 0.5])
    scale = torch.tensor([0.25, 0.25, 0.5])
    assert torch.equal(
        logger.images["train/targets"][0][1], bytes_of((target.permute(0, 2, 3, 1) * scale + 0.5).clamp(0, 1))
    )
    assert torch.equal(logger.images["train/predictions"][0][1], torch.full((2, 4, 6, 3), 128, dtype=torch.uint8))


def test_without_targets_an_output_like_the_input_is_an_image() -> None:
    task = pl.Task(forward=lambda model, batch: model(batch), loss=lambda outputs, batch: outputs.sum())
    data: Any = [torch.rand(2, 3, 4, 6)]
    logger = recorded(data, ImageVisualizer(), Shown(3, 4, 6), loss=task, max_duration="1ba")
    assert sorted(logger.images) == ["train/images", "train/predictions"]
    assert not logger.tables


@pytest.mark.parametrize(
    ("target", "outputs", "rows"),
    [
        (torch.eye(3)[[2, 1]], (3,), [[0, 2, 0], [1, 1, 0]]),
        (torch.tensor([[0.5], [1.5]]), (1,), [[0, 0.5, 0.0], [1, 1.5, 0.0]]),
        (torch.tensor([1, 0]), (2, 7, 7), [[0, 1], [1, 0]]),
        (torch.zeros(2, 3, 2), (3,), [[0, 0], [1, 0]]),
    ],
    ids=["probabilities", "numbers", "outputs of another shape", "targets of another shape"],
)
def test_what_a_table_shows(target: Tensor, outputs: tuple[int, ...], rows: list[list[Any]]) -> None:
    logger = of(target, *outputs)
    if outputs == (2, 7, 7):  # classes of pixels without a mask of targets
        assert list(logger.masks["train/images"][0][1]) == ["predictions"]
    assert logger.tables["train/images"][0][2] == rows


def test_floats_are_cut_and_whole_numbers_are_bytes_already() -> None:
    inputs = torch.tensor([-1.0, 0.5, 2.0, torch.nan]).reshape(1, 1, 2, 2)
    target = torch.zeros(1, dtype=torch.int64)
    assert of(target, 3, inputs=inputs).images["train/images"][0][1].flatten().tolist() == [0, 128, 255, 0]
    whole = torch.tensor([-1, 7, 255, 300]).reshape(1, 2, 2)
    assert of(target, 3, inputs=whole).images["train/images"][0][1].flatten().tolist() == [0, 7, 255, 255]
    last = torch.zeros(1, 4, 6, 3, dtype=torch.bfloat16)
    assert of(target, 3, inputs=last, channels_last=True).images["train/images"][0][1].shape == (1, 4, 6, 3)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (torch.zeros(1, 4), {}, r"inputs are tensor \(1, 4\) float32"),
        (torch.zeros(1, 8, 6, 3), {}, "8 channels, and pictures have 1, 3 or 4: write channels_last=True"),
        (torch.zeros(1, 5, 4, 6), {}, r"5 channels, and pictures have 1, 3 or 4\.\n"),
        (torch.zeros(1, 1, 4, 6), {"mean": [0.1, 0.2]}, "2 numbers for images of 1 channels"),
        (torch.zeros(1, 1, 4, 6, dtype=torch.uint8), {"mean": 0.1}, "leave mean= and std= out"),
        (torch.zeros(1, 1, 4, 6), {"input_key": "image"}, r"has no batch\['image'\]"),
        (torch.zeros(1, 1, 4, 6), {"outputs": lambda outputs: {"logits": outputs}}, "predictions are a tensor"),
    ],
)
def test_what_is_no_image_is_refused(inputs: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(pl.PureLoopError, match=message):
        of(torch.zeros(1, dtype=torch.int64), 3, inputs=inputs, **options)


@pytest.mark.gpu
def test_nothing_waits_for_the_device_until_a_logger_reads() -> None:
    class Watched(ImageVisualizer):
        """Its own work is done where a wait is an error."""

        def _record(self, *arguments: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                super()._record(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    data, logger = pictures(), InMemoryLogger()
    options: dict[str, Any] = {"evaluators": {"val": data}, "device": "cuda", "max_duration": "1ep"}
    run(classifier(), data, callbacks=[Watched("1ba", mean=0.1, std=[0.5])], loggers=[logger], **options)
    assert at(logger.images["train/images"]) == [1, 2, 3]
    assert all(images.is_cuda for entries in logger.images.values() for _, images in entries)
    rows = logger.tables["val/images"][0][2]
    assert [int(row[1]) for row in rows] == data[0][1].tolist()
    assert all(row[1].is_cuda and row[2].is_cuda for row in rows)
