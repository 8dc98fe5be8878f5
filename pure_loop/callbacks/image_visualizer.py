"""Records images as the model saw them, with their targets and predictions: classes in a table, masks beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from pure_loop._internal.arguments import check_number
from pure_loop._internal.pytree import Outputs
from pure_loop.cadence import Cadence, CadenceLike
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.callbacks._intervals import read_interval
from pure_loop.data.batch import describe
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.lens import BatchKey, part_of
from pure_loop.ranges import AtLeast, Index, checked
from pure_loop.state import State

__all__ = ["ImageVisualizer"]

SERVES = "images"

Channels = float | Iterable[float] | None

# Channels that a picture may have.
_PICTURES = (1, 3, 4)


@checked
class ImageVisualizer(Callback):
    """Records the first images of a batch of training in each interval, and of the first batch of each evaluation.

    Images of training are recorded at BATCH_END, under ``train/images``: of the first batch, and of the first batch
    after each interval. They are those of the microbatch that was trained on last, after all that algorithms did to it.
    Images of an evaluator are recorded at EVAL_AFTER_FORWARD of its first microbatch, under ``<label>/images``
    (``eval/train/images`` for the label ``train``). All are uint8 of shape ``(n, height, width, channels)``.

    Targets and predictions, by their shapes:

    * classes, (n,): a table of the same name, with the columns ``image``, ``target`` and ``prediction``;
    * classes of pixels, (n, height, width): the masks ``targets`` and ``predictions`` of the images, brought to their
      size, where negative classes (positions without a target) are 0;
    * images, (n, channels, height, width): further images, ``<label>/targets`` and ``<label>/predictions``;
    * others: left out.

    Outputs with several channels or columns are scores of classes, and the prediction is the largest; unless targets,
    or in a batch without targets the inputs, are images of the same shape as the outputs. Targets with the shape
    ``(n, classes)`` of outputs are probabilities.

    Nothing is read from the device: loggers read images and the cells of tables when they write.

    Args:
        interval: how often images of training are recorded: ``"1ep"``, ``"100ba"``, a predicate of the State; 0: never.
        images: how many of a batch.
        input_key: where in a batch the images are: an index, a key or a :class:`pure_loop.Lens`. A batch that is a
            tensor alone is the images.
        target_key: where its targets are.
        outputs: what to show of the outputs: a function of them that gives scores, classes or images, such as
            ``lambda outputs: outputs["logits"]``; None: the outputs themselves, a tensor.
        mean, std: what was subtracted from the pixels and what they were divided by, to be undone: numbers, or one for
            each channel. Without them images of floats are taken as they are, from 0 to 1, and what lies outside is
            cut.
        channels_last: whether images in a batch are ``(n, height, width, channels)``, and not ``(n, channels, height,
            width)``. Without channels, ``(n, height, width)``, they are grey.

    Raises:
        ArgumentError, ArgumentTypeError: a setting out of range; in training: inputs that are no images, or outputs
            that are no tensor.
        DataError: in training: a batch without ``input_key`` or ``target_key``.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import InMemoryLogger
    >>> logger = InMemoryLogger()
    >>> data = [(torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 2, 0]))] * 3
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> state = pl.run(pl.fit(model, data, loss=torch.nn.functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="2ep", callbacks=[ImageVisualizer(images=3)], loggers=[logger]))
    >>> [(timestamp.batch, images.shape) for timestamp, images in logger.images["train/images"]]
    [(1, torch.Size([3, 2, 2, 1])), (4, torch.Size([3, 2, 2, 1]))]
    >>> timestamp, columns, rows = logger.tables["train/images"][0]
    >>> columns, len(rows)
    (['image', 'target', 'prediction'], 3)
    """

    each_member = True

    def __init__(
        self,
        interval: CadenceLike = "1ep",
        *,
        images: Annotated[int, AtLeast(1)] = 8,
        input_key: Annotated[BatchKey, Index()] = 0,
        target_key: Annotated[BatchKey, Index()] = 1,
        outputs: Callable[[Outputs], object] | None = None,
        mean: Channels = None,
        std: Channels = None,
        channels_last: bool = False,
    ) -> None:
        self._due = read_interval(interval, "ImageVisualizer", '"1ep", "100ba", or 0 for evaluations only')
        if outputs is not None and not callable(outputs):
            raise ArgumentTypeError(
                f'ImageVisualizer(outputs={outputs!r}): give a function, such as lambda outputs: outputs["logits"].'
            )
        self._count = images
        self._input_key, self._target_key = input_key, target_key
        self._outputs = outputs
        self._mean, self._std = _numbers(mean, "mean"), _numbers(std, "std")
        self._channels_last = channels_last
        self._records_next = self._records_evaluation = False

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        # Interval 0 never comes round, at the first batch neither.
        first = state.timestamp.batch == 0 and isinstance(self._due, Cadence) and bool(self._due.interval)
        self._records_next = first or self._due(state)

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        if self._records_next:
            self._record("train", state, logger)
        self._records_next = self._due(state)

    def epoch_end(self, state: State, logger: LoggerGroup) -> None:
        self._records_next = self._due(state)

    def iteration_end(self, state: State, logger: LoggerGroup) -> None:
        self._records_next = self._due(state)

    def eval_start(self, state: State, logger: LoggerGroup) -> None:
        self._records_evaluation = True

    def eval_after_forward(self, state: State, logger: LoggerGroup) -> None:
        if self._records_evaluation:
            self._records_evaluation = False
            self._record("eval/train" if state.evaluator == "train" else str(state.evaluator), state, logger)

    def _record(self, place: str, state: State, logger: LoggerGroup) -> None:
        batch = state.microbatch
        alone = isinstance(batch, Tensor)
        inputs = batch if alone else part_of(batch, self._input_key, "ImageVisualizer", "input_key")
        targets = None if alone else part_of(batch, self._target_key, "ImageVisualizer", "target_key")
        if not isinstance(inputs, Tensor) or inputs.ndim not in (3, 4):
            raise ArgumentError(
                f"ImageVisualizer: the inputs are {describe(inputs)}, and images are (n, channels, height, width), or "
                "(n, height, width, channels) with channels_last=True. Say where they are in a batch: "
                'ImageVisualizer(input_key="image").'
            )
        inputs = inputs.detach()[: self._count]
        if not len(inputs):
            return
        pixels = self._pixels(inputs)
        images = {"prediction": self._shown_of(state.outputs)}
        if isinstance(targets, Tensor) and targets.ndim:
            images = {"target": targets.detach()[: self._count], **images}
        masks, columns = {}, {}
        for name, value in _classes(images, inputs).items():
            if len(value) != len(pixels):
                continue
            if value.ndim == 1:
                columns[name] = value
            elif value.ndim == 3 and not value.is_floating_point():
                masks[f"{name}s"] = _mask(value, pixels)
            elif value.ndim in (3, 4) and (channels := self._as_channels_last(value).shape[-1]) in _PICTURES:
                normalised = value.is_floating_point() and channels == pixels.shape[-1]
                logger.log_images(f"{place}/{name}s", self._pixels(value, normalised=normalised), state)
        logger.log_images(f"{place}/images", pixels, state, masks=masks or None)
        if columns:
            rows = zip(range(len(pixels)), *map(_cells, columns.values()), strict=True)
            logger.log_table(f"{place}/images", ["image", *columns], [list(row) for row in rows], state)

    def _shown_of(self, outputs: Outputs) -> Tensor | None:
        """What is shown of the outputs; None: they are not kept, or there is nothing to show.

        Raises:
            ArgumentTypeError: it is no tensor.
        """
        value = outputs if self._outputs is None or outputs is None else self._outputs(outputs)
        if value is None:
            return None
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"ImageVisualizer: what the model returns is {describe(value)}, and predictions are a tensor. Say what "
                'to show of it: ImageVisualizer(outputs=lambda outputs: outputs["logits"]).'
            )
        return value.detach()[: self._count] if value.ndim else None

    def _pixels(self, images: Tensor, *, normalised: bool = True) -> Tensor:
        """Images as uint8 of shape (n, height, width, channels).

        Args:
            images: whole numbers from 0 to 255, or floats.
            normalised: whether ``mean`` and ``std`` were applied to them, if they are given.

        Raises:
            ArgumentError: a number of channels that no image has, or whole numbers that ``mean`` and ``std`` don't fit.
        """
        images = self._as_channels_last(images)
        channels = images.shape[-1]
        if channels not in _PICTURES:
            raise ArgumentError(
                f"ImageVisualizer: images of shape {tuple(images.shape)}, as (n, height, width, channels), have "
                f"{channels} channels, and pictures have 1, 3 or 4"
                + (": write channels_last=True." if not self._channels_last and images.shape[2] in _PICTURES else ".")
            )
        normalised = normalised and (self._mean is not None or self._std is not None)
        if not images.is_floating_point():
            if normalised:
                raise ArgumentError(
                    f"ImageVisualizer: images are {images.dtype}, whole numbers from 0 to 255, which were not "
                    "normalised: leave mean= and std= out."
                )
            return (images * 255 if images.dtype is torch.bool else images.clamp(0, 255)).to(torch.uint8)
        images = images.float()
        if normalised:
            means, stds = _per_channel(self._mean, 0.0, channels, "mean"), _per_channel(self._std, 1.0, channels, "std")
            # By numbers and not by a tensor of them, which would have to be copied to the device.
            planes = zip(images.unbind(-1), means, stds, strict=True)
            images = torch.stack([plane * std + mean for plane, mean, std in planes], dim=-1)
        return (images.nan_to_num().clamp(0.0, 1.0) * 255).round().to(torch.uint8)

    def _as_channels_last(self, images: Tensor) -> Tensor:
        if images.ndim == 3:
            return images.unsqueeze(-1)
        return images if self._channels_last else images.movedim(1, -1)


def _classes(images: Mapping[str, Tensor | None], inputs: Tensor) -> dict[str, Tensor]:
    """Classes in the place of scores; images, and numbers, as they are."""
    values = {name: value for name, value in images.items() if value is not None}
    prediction = values.get("prediction")
    target = values.get("target")
    if prediction is not None and prediction.is_floating_point():
        # An image, or a number, where the target (or without one, the input) is one as well.
        like = inputs if target is None else target
        same = like.is_floating_point() and like.shape == prediction.shape
        if prediction.ndim > 1 and prediction.shape[1] > 1 and not (same and prediction.ndim > 2):
            values["prediction"] = prediction.argmax(dim=1)
            if same and target is not None:  # probabilities
                values["target"] = target.argmax(dim=1)
    return {
        name: value.squeeze(1)
        if value.ndim > 1 and value.shape[1] == 1 and (value.ndim == 2 or not value.is_floating_point())
        else value
        for name, value in values.items()
    }


def _mask(classes: Tensor, pixels: Tensor) -> Tensor:
    """Classes of pixels as uint8, in the size of the images."""
    classes = classes.clamp(0, 255).to(torch.uint8)
    size = pixels.shape[1:3]
    if classes.shape[1:] == size:
        return classes
    return interpolate(classes.unsqueeze(1).float(), size=size, mode="nearest").squeeze(1).to(torch.uint8)


def _cells(column: Tensor) -> Iterable[Any]:
    """The cells of a table, which stay on an accelerator until a logger reads them."""
    return column.unbind() if column.device.type != "cpu" else column.tolist()


def _numbers(value: Channels, name: str) -> list[float] | None:
    """
    Raises:
        ArgumentError, ArgumentTypeError: neither a finite number nor several; or a ``std`` of 0 or less.
    """
    if value is None:
        return None
    numbers: list[Any] = list(value) if isinstance(value, Iterable) else [value]
    example = "ImageVisualizer(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])"
    above = 0.0 if name == "std" else -math.inf
    if not numbers:
        raise ArgumentError(f"ImageVisualizer({name}=[]): write a number for each channel, {example}.")
    return [check_number(name, number, where="ImageVisualizer", above=above, example=example) for number in numbers]


def _per_channel(numbers: list[float] | None, default: float, channels: int, name: str) -> list[float]:
    """A number for each channel.

    Raises:
        ArgumentError: images have another number of channels.
    """
    if numbers is None or len(numbers) == 1:
        return (numbers or [default]) * channels
    if len(numbers) != channels:
        raise ArgumentError(
            f"ImageVisualizer({name}={numbers!r}): {len(numbers)} numbers for images of {channels} channels; write a "
            "number, or one for each channel."
        )
    return numbers
