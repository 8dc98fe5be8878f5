"""The picture of a sweep, in the style of ``_pictures``: numbers go in, a PNG comes out."""

from __future__ import annotations

from collections.abc import Sequence

from _pictures import COLORS, GRAY, INK, Series
from matplotlib import colormaps
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter


def rates(
    path: str,
    values: Sequence[float],
    losses: Sequence[Series],
    accuracies: Sequence[float],
    seconds: float,
    one_by_one: float,
) -> None:
    """Losses over the epochs and accuracies at the end of members with a learning rate each, and what they cost.

    Args:
        path: of the picture.
        values: the learning rate of each member.
        losses: of each member the loss of validation after each epoch.
        accuracies: of each member at the end, in [0, 1].
        seconds: that the run of all members took.
        one_by_one: what as many runs take, one after the other.
    """
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(5, 1.1))
    left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    scale, colors = LogNorm(min(values), max(values)), colormaps["viridis_r"]
    best = max(range(len(values)), key=accuracies.__getitem__)
    left.set_title("Loss of validation", loc="left", fontweight="bold", fontsize=12)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    left.yaxis.set_minor_locator(NullLocator())
    right.set_title("Accuracy at the end (%)", loc="left", fontweight="bold", fontsize=12)
    right.set_xscale("log")
    for value, series, accuracy in zip(values, losses, accuracies, strict=True):
        left.plot(*zip(*series, strict=True), color=colors(scale(value)), lw=1.4)
        right.plot(value, 100 * accuracy, "o", ms=8, color=colors(scale(value)))
    left.plot(*zip(*losses[best], strict=True), color=COLORS[1], lw=2.8)
    lowest = min(value for series in losses for _, value in series)
    left.set_ylim(0.8 * lowest, 6)  # The largest rates lead far above.
    left.set_xlim(1, losses[0][-1][0])
    left.set_xlabel("Epoch")
    right.plot(values[best], 100 * accuracies[best], "o", ms=14, mew=2, mfc="none", color=COLORS[1])
    right.annotate(
        f"the best: {accuracies[best]:.1%}\nat a rate of {values[best]:.2g}",
        (values[best], 100 * accuracies[best]),
        (0, -64),
        textcoords="offset points",
        ha="center",
        color=COLORS[1],
        fontweight="bold",
        arrowprops={"arrowstyle": "-", "color": GRAY, "shrinkB": 9},
    )
    right.set_ylim(0, 100)
    right.set_xlabel("Learning rate")
    bottom = figure.add_subplot(grid[1, :])
    count = len(values)
    bottom.set_title("Seconds, measured in one process", loc="left", fontweight="bold", fontsize=12)
    rows = (
        (f"{seconds:.1f}: one run of {count} members", seconds, COLORS[0]),
        (f"{one_by_one:.1f}: {count} times what one run takes", one_by_one, GRAY),
    )
    for row, (name, length, color) in enumerate(rows):
        bottom.barh(row, length, height=0.8, color=color, alpha=0.5, lw=0)
        bottom.text(0, row, f" {name}", va="center", color=INK, fontsize=11)
    bottom.set_yticks([])
    bottom.spines["left"].set_visible(False)
    bottom.invert_yaxis()
    bottom.set_xlim(0, max(seconds, one_by_one))
    figure.savefig(path, dpi=160)
