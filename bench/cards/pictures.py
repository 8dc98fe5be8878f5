"""Pictures of the cards: images before and after an algorithm, and what it changes in the course of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import pure_loop as pl
from bench.cards.entries import Entry
from pure_loop import Event
from pure_loop.algorithms import (
    alibi_slopes,
    apply_blurpool,
    averaged,
    masks,
    probabilities,
    rates,
    smooth_labels,
    standardized,
)

__all__ = ["PICTURES"]


def _axes(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    return figure, figure.subplots(1, columns)


def _written(figure: Any, path: Path) -> None:
    from PIL import Image

    figure.savefig(path, metadata={"Software": None})
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(96).save(path, optimize=True)


def batch(entry: Entry, path: Path) -> None:
    """A row of images of a batch, and the same as the forward sees them."""
    images = entry.on.data()[0][0][0]
    after = next(
        state.microbatch[0]
        for event, state in _stream(entry, watch={Event.BEFORE_FORWARD})
        if event is Event.BEFORE_FORWARD
    )
    count = 10
    rows = [torch.nn.functional.pad(_row(source[:count]), (1, 1, 1, 1)) for source in (images, after)]
    width = max(row.shape[1] for row in rows)
    grid = torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])
    figure, axes = _axes(7, 7 * len(grid) / width)
    axes.imshow(grid, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    axes.set_axis_off()
    _written(figure, path)


def _row(images: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.nn.functional.pad(image[0], (1, 1, 1, 1), value=0.5) for image in images], 1)


def _stream(entry: Entry, **options: Any) -> Any:
    torch.manual_seed(0)
    problem = entry.on
    settings = {**problem.settings(), **entry.options, **options}
    return pl.fit(problem.model(), problem.data()[0], algorithms=[entry.make()], seed=0, **settings)


def _course(entry: Entry, path: Path, what: str, value: Callable[[pl.State], float], at: Event) -> None:
    points = [(state.timestamp.batch, value(state)) for event, state in _stream(entry, watch={at}) if event is at]
    with _plot(path, "batch", what) as axes:
        axes.step(*zip(*points, strict=True), where="post")


@contextmanager
def _plot(path: Path, along: str, what: str) -> Iterator[Any]:
    """Axes to draw on, with a legend where what is drawn has labels."""
    figure, axes = _axes(6, 2)
    yield axes
    axes.set_xlabel(along)
    axes.set_ylabel(what)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
    _written(figure, path)


def height(entry: Entry, path: Path) -> None:
    _course(entry, path, "height of images", lambda state: state.microbatch[0].shape[-1], Event.BEFORE_FORWARD)


def length(entry: Entry, path: Path) -> None:
    _course(entry, path, "tokens", lambda state: state.microbatch[0].shape[-1], Event.BEFORE_FORWARD)


def frozen(entry: Entry, path: Path) -> None:
    _course(
        entry, path, "frozen layers", lambda state: state.algorithm_state["layer_freezing"]["depth"], Event.BATCH_START
    )


def rate(entry: Entry, path: Path) -> None:
    def scale(state: pl.State) -> float:
        return 1.0 if state.lr_scale is None else float(state.lr_scale)

    _course(entry, path, "factor of the rate", scale, Event.BATCH_START)


def biases(entry: Entry, path: Path) -> None:
    """The bias of each head, by how far back a token is."""
    with _plot(path, "distance of a token", "bias of a score") as axes:
        for slope in alibi_slopes(8):
            axes.plot(range(64), [-float(slope) * distance for distance in range(64)], color="C0", linewidth=1)


def average(entry: Entry, path: Path) -> None:
    """One weight while training, and its average as far as there is one."""

    def mean(state: pl.State) -> float:
        try:
            return _weight(averaged(state, name=entry.make().name))
        except pl.errors.ArgumentError:  # not begun
            return float("nan")

    stream = _stream(entry, watch={Event.BATCH_CHECKPOINT})
    states = (state for event, state in stream if event is Event.BATCH_CHECKPOINT)
    points = [(state.timestamp.batch, _weight(state), mean(state)) for state in states]
    batches, weights, means = zip(*points, strict=True)
    with _plot(path, "batch", "one of the weights") as axes:
        axes.plot(batches, weights, color="#b0b7c3", label="trained")
        axes.plot(batches, means, label="average")


def _weight(state: pl.State) -> float:
    return float(next(iter(state.params.values())).flatten()[0])


def slow(entry: Entry, path: Path) -> None:
    """One weight at the first batches, and where it starts again."""
    stream = _stream(entry, watch={Event.BATCH_END})
    weights = [_weight(state) for event, state in islice(stream, 120) if event is Event.BATCH_END][:60]
    with _plot(path, "batch", "one of the weights") as axes:
        axes.plot(range(1, 61), weights, color="#b0b7c3", label="trained")
        axes.plot(range(5, 61, 5), weights[4::5], "o", markersize=4, label="slow: starts again from here")


def metric(entry: Entry, path: Path) -> None:
    """The accuracy of each evaluation, up to where training ends."""
    with _plot(path, "batch", "test accuracy") as axes:
        stream = _stream(entry, watch={Event.EVAL_END})
        states = [state for event, state in stream if event is Event.EVAL_END]
        batches = [state.timestamp.batch for state in states]
        axes.plot(batches, [float(state.metrics["val"]["accuracy"]) for state in states])
        axes.axvline(batches[-1], color="#d1242f", linestyle="--", linewidth=1, label="training ends")
        axes.set_xlim(0, 240)


def norm(entry: Entry, path: Path) -> None:
    """The norm of each gradient, before and after."""
    norms: dict[Event, list[float]] = {Event.AFTER_BACKWARD: [], Event.AFTER_TRAIN_BATCH: []}
    for event, state in _stream(entry, watch=set(norms)):
        if event in norms:
            norms[event].append(float(pl.gradients.global_norm(state.grads)))
    before, after = norms.values()
    with _plot(path, "batch", "norm of the gradient") as axes:
        axes.plot(before, color="#b0b7c3", linewidth=1, label="before")
        axes.plot(after, linewidth=1, label="after")


def noise(entry: Entry, path: Path) -> None:
    """The standard deviation of the noise, by its formula, for what is usual for ``gamma``."""
    with _plot(path, "batch", "deviation of the noise") as axes:
        for eta in (0.3, 0.01, 0.001):
            axes.plot([(eta / (1 + batch) ** 0.55) ** 0.5 for batch in range(240)], label=f"eta={eta}")


def targets(entry: Entry, path: Path) -> None:
    """The targets of a sample."""
    hard = torch.nn.functional.one_hot(torch.tensor([3]), 10).float()
    with _plot(path, "class", "target") as axes:
        axes.bar(range(10), hard[0], color="#d6dbe3", label="before")
        axes.bar(range(10), smooth_labels(torch.zeros(1, 10), torch.tensor([3]), 0.1)[0], width=0.4, label="after")
        axes.set_xticks(range(10))


def depth(entry: Entry, path: Path) -> None:
    """How often each of twelve blocks is left out."""
    with _plot(path, "block", "left out") as axes:
        axes.bar(range(1, 13), rates(12, 0.2))
        axes.set_xticks(range(1, 13))


def subnetworks(entry: Entry, path: Path) -> None:
    """The features that each subnetwork has."""
    figure, axes = _axes(6, 1.4)
    axes.imshow(~masks(0, torch.arange(8), 64, 0.5), cmap="gray", vmin=-0.4, interpolation="nearest", aspect="auto")
    axes.set(xlabel="feature (white: left out)", ylabel="subnetwork")
    _written(figure, path)


def chances(entry: Entry, path: Path) -> None:
    """The probabilities with which samples are kept, in proportion."""
    losses = torch.arange(64.0)
    with _plot(path, "samples of a batch, by their loss", "chance") as axes:
        for keep in (0.25, 0.5, 0.75):
            axes.plot(losses, probabilities(losses, keep), label=f"keep={keep}")


def filters(entry: Entry, path: Path) -> None:
    """The weights of three filters."""
    torch.manual_seed(0)
    weight = 0.1 * torch.randn(3, 64, 3, 3) * torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1, 1)
    weight = weight + torch.tensor([-0.5, 0.0, 0.5]).reshape(3, 1, 1, 1)
    figure, both = _axes(6, 2, columns=2)
    for axes, title, values in zip(both, ("before", "after"), (weight, standardized(weight)), strict=True):
        for row in values:
            axes.hist(row.flatten().tolist(), bins=30, alpha=0.6)
        axes.set(title=title, xlabel="weights of three filters", yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
    _written(figure, path)


def pooled(entry: Entry, path: Path) -> None:
    """Pooled images, without and with the filter, and what changes where the images are moved by a pixel."""
    images = torch.nn.functional.interpolate(entry.on.data()[0][0][0][:10], scale_factor=2, mode="bilinear")
    plain = torch.nn.Sequential(torch.nn.MaxPool2d(2))
    blurred = apply_blurpool(torch.nn.Sequential(torch.nn.MaxPool2d(2)))
    moved = images.roll(1, dims=-1)
    rows = []
    for model in (plain, blurred):
        differences = (model(images) - model(moved)).abs()
        rows += [torch.nn.functional.pad(_row(source), (1, 1, 1, 1)) for source in (model(images), differences)]
    grid = torch.cat(rows)
    figure, axes = _axes(7, 6.4 * len(grid) / grid.shape[1])
    axes.imshow(grid, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    height = len(grid) / 4
    axes.set_yticks([height * (row + 0.5) for row in range(4)], ["pooled", "moved by 1", "with filter", "moved by 1"])
    axes.set(xticks=[], frame_on=False)
    axes.tick_params(left=False)
    _written(figure, path)


def nearby(entry: Entry, path: Path) -> None:
    """From a point uphill to where the loss nearby is worst, and the step with the gradient of there."""
    side = torch.linspace(-1, 1, 80)
    x, y = torch.meshgrid(2 * side, side, indexing="xy")
    start = torch.tensor([-1.2, 0.15])
    slope = torch.tensor([2.0, 16.0])  # the gradient of x^2 + 8 y^2, by each coordinate
    uphill = start + 0.35 * (slope * start) / (slope * start).norm()
    figure, axes = _axes(6, 2)
    axes.contour(x, y, x**2 + 8 * y**2, levels=6, colors="#d6dbe3")
    for end, begin, color, label in (
        (start - 0.12 * slope * start, start, "#b0b7c3", "a step with the gradient here"),
        (uphill, start, "#d1242f", "to the worst loss nearby"),
        (start - 0.12 * slope * uphill, start, "C0", "a step with the gradient there"),
    ):
        axes.plot(*zip(begin.tolist(), end.tolist(), strict=True), color=color, marker="o", markersize=3, label=label)
    axes.set(xticks=[], yticks=[])
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _written(figure, path)


def chunks(entry: Entry, path: Path) -> None:
    """The mean of a batch, and those of its chunks."""
    values = entry.on.data()[0][0][0].mean((1, 2, 3))
    with _plot(path, "samples of a batch", "brightness") as axes:
        axes.plot(values, ".", color="#b0b7c3", label="a sample")
        axes.set_ylim(0.2, 0.38)  # room for the legend
        axes.axhline(float(values.mean()), color="#8a94a6", linestyle="--", linewidth=1, label="mean of the batch")
        for number, chunk in enumerate(values.split(16)):
            label = "mean of a chunk" if number == 0 else None
            axes.hlines(float(chunk.mean()), 16 * number, 16 * number + 15, color="C0", label=label)


PICTURES: dict[str, Callable[[Entry, Path], None]] = {
    function.__name__: function
    for function in (
        *(batch, height, length, frozen, rate, biases, average, slow, metric, norm, noise, targets, depth),
        *(subnetworks, chances, filters, pooled, nearby, chunks),
    )
}
