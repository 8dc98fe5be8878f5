"""Pictures of the cards: images before and after an algorithm, and what it changes in the course of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pure_loop as pl
from bench.cards.entries import Entry
from pure_loop import Event
from pure_loop.algorithms import alibi_slopes

__all__ = ["PICTURES"]


def _axes(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    return figure, figure.subplots()


def _written(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Software": None})


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
    figure, axes = _axes(6, 2)
    axes.step(*zip(*points, strict=True), where="post")
    axes.set_xlabel("batch")
    axes.set_ylabel(what)
    axes.spines[["top", "right"]].set_visible(False)
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
    figure, axes = _axes(6, 2)
    for slope in alibi_slopes(8):
        axes.plot(range(64), [-float(slope) * distance for distance in range(64)], color="C0", linewidth=1)
    axes.set_xlabel("distance of a token")
    axes.set_ylabel("bias of a score")
    axes.spines[["top", "right"]].set_visible(False)
    _written(figure, path)


PICTURES: dict[str, Callable[[Entry, Path], None]] = {
    function.__name__: function for function in (batch, height, length, frozen, rate, biases)
}
