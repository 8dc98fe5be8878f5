"""ImageVisualizer, in real training loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.callbacks import ImageVisualizer
from pure_loop.loggers import InMemoryLogger
from tests.support.problem import convnet, cross_entropy, fit, images, run


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
