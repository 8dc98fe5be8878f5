"""The pictures of the examples. Nothing here knows of pure_loop: numbers go in, a PNG comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the pictures of the examples need matplotlib: pip install '.[plot]'") from error

Series = Sequence[tuple[float, float]]

INK, GRAY, SHADE = "#222222", "#757575", "#f1efe9"
COLORS = ("#1f6fb4", "#d9661f", "#2f8f5b", "#8a4fa3")

matplotlib.rcParams.update(
    {"font.size": 12, "axes.edgecolor": GRAY, "axes.spines.top": False, "axes.spines.right": False}
)


def training(
    path: str,
    *,
    loss: Series,
    loss_again: Series,
    evaluations: Mapping[str, Mapping[str, Series]],
    learning_rate: Series,
    goal: float,
    verdict: str,
) -> None:
    """Loss, accuracy and learning rate over the batches; what was replayed is shaded, its losses are dotted."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(4, 4, 2))
    top, middle, bottom = panels
    end = loss[-1][0]
    for panel, title in zip(panels, ("Loss", "Accuracy (%)", "Learning rate"), strict=True):
        panel.set_title(title, loc="left", fontweight="bold", fontsize=12)
        panel.axvspan(loss_again[0][0] - 1, end, color=SHADE, lw=0, zorder=0)
    top.plot(*zip(*loss, strict=True), color=GRAY, lw=1.2)
    top.plot(*zip(*loss_again, strict=True), color=INK, lw=1.2, ls=":")
    bottom.plot(*zip(*learning_rate, strict=True), color=INK, lw=2)
    for (label, found), color in zip(evaluations.items(), COLORS, strict=False):
        percent = [(at, 100 * value) for at, value in found["accuracy"]]
        for panel, series in ((top, found["loss"]), (middle, percent)):
            panel.plot(*zip(*series, strict=True), color=color, lw=2, marker="o", ms=4, label=label)
    middle.axhline(100 * goal, color=GRAY, lw=1, ls=(0, (4, 3)), zorder=1)
    middle.text(end / 200, 100 * goal + 0.1, "the goal", color=GRAY, va="bottom", fontsize=10)
    # What happens between 98% and 100% is the news; the way there shows in the loss.
    last = min(100 * found["accuracy"][-1][1] for found in evaluations.values())
    middle.set_ylim(bottom=90 if last > 92 else 0, top=100.5)
    top.set_ylim(bottom=0)
    bottom.set_ylim(bottom=0)
    bottom.set_xlim(0, end)
    bottom.set_xlabel("Batch")
    ends = [(found["loss"][-1][1], f"{label} {found['loss'][-1][1]:.3f}") for label, found in evaluations.items()]
    label_ends(top, end, [*ends, (loss[-1][1], "training, with\nsmoothed labels")], [*COLORS[: len(ends)], GRAY])
    ends = [(100 * f["accuracy"][-1][1], f"{label} {f['accuracy'][-1][1]:.1%}") for label, f in evaluations.items()]
    label_ends(middle, end, ends, COLORS)
    top.text(loss_again[0][0] + end / 100, top.get_ylim()[1], verdict, va="top", color=INK)
    figure.savefig(path, dpi=160)


def samples(path: str, shots: Sequence[tuple[str, str, Any]], places: Any, *, reach: float) -> None:
    """Points in the plane, one panel for each (title, subtitle, points); circles around the places."""
    figure = Figure(figsize=(2.6 * len(shots), 3.2))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.84, wspace=0.06)
    for panel, (title, subtitle, points) in zip(figure.subplots(1, len(shots)), shots, strict=True):
        panel.scatter(*points.T, s=2, color=COLORS[0], alpha=0.35, lw=0)
        panel.scatter(*places.T, s=(reach * 47) ** 2, facecolors="none", edgecolors=COLORS[1], lw=1.2)
        panel.set_title(title, fontweight="bold", fontsize=12, pad=24)
        panel.text(0.5, 1.03, subtitle, transform=panel.transAxes, ha="center", va="bottom", color=GRAY, fontsize=11)
        panel.set(xlim=(-2.9, 2.9), ylim=(-2.9, 2.9), aspect="equal", xticks=[], yticks=[])
        for spine in panel.spines.values():
            spine.set_visible(False)
    figure.savefig(path, dpi=160)


def forks(path: str, trunk: Series, branches: Mapping[str, Series], *, title: str) -> None:
    """A line that parts into several."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    panel = figure.subplots()
    panel.set_title(title, loc="left", fontweight="bold", fontsize=12)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.plot(*zip(*trunk, strict=True), color=INK, lw=2)
    for (_, series), color in zip(branches.items(), COLORS, strict=True):
        panel.plot(*zip(*[trunk[-1], *series], strict=True), color=color, lw=2)
    panel.plot(*trunk[-1], marker="o", ms=9, color=INK)
    arrow = {"arrowstyle": "-", "color": GRAY, "shrinkA": 0, "shrinkB": 6}
    panel.annotate("the kept State", trunk[-1], (-14, -40), textcoords="offset points", ha="right", arrowprops=arrow)
    end = max(series[-1][0] for series in branches.values())
    panel.set_xlim(0, end)
    panel.set_xlabel("Batch")
    label_ends(panel, end, [(series[-1][1], name) for name, series in branches.items()], COLORS)
    figure.savefig(path, dpi=160)


def label_ends(panel: Any, end: float, labels: Sequence[tuple[float, str]], colors: Sequence[str]) -> None:
    """Texts beside the ends of lines, moved apart where they would overlap."""
    place = panel.transData + panel.transAxes.inverted()
    wanted = sorted(
        (place.transform((end, value))[1], text, c) for (value, text), c in zip(labels, colors, strict=False)
    )
    heights: list[float] = []
    for height, text, _ in wanted:
        room = 0.07 + 0.02 * text.count("\n")
        heights.append(max(height, heights[-1] + room) if heights else height)
    up = sum(heights) / len(heights) - sum(height for height, _, _ in wanted) / len(wanted)
    for height, (_, text, color) in zip(heights, wanted, strict=True):
        panel.text(1.012, height - up, text, transform=panel.transAxes, color=color, va="center", linespacing=1.1)
