"""The pictures of the examples. Nothing here knows of pure_loop: numbers go in, a PNG comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def stopping(
    path: str, lines: Mapping[str, tuple[Series, Series]], *, best: float, stopped: float, patience: int
) -> None:
    """Lines that end, and dashed what would have come after; the best place and the end are marked."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    panel = figure.subplots()
    panel.set_title("Loss", loc="left", fontweight="bold", fontsize=12)
    panel.axvspan(best, stopped, color=SHADE, lw=0, zorder=0)
    end = max(after[-1][0] for _, after in lines.values())
    for (before, after), color in zip(lines.values(), COLORS, strict=False):
        panel.plot(*zip(*before, strict=True), color=color, lw=2)
        panel.plot(*zip(*[before[-1], *after], strict=True), color=color, lw=1.5, ls=(0, (3, 2)))
    panel.set_ylim(bottom=0)
    panel.set_xlim(1, end)
    panel.set_xlabel("Epoch")
    top = panel.get_ylim()[1]
    value = dict(lines["validation"][0])[best]
    panel.plot(best, value, marker="o", ms=9, color=COLORS[1])
    arrow = {"arrowstyle": "-", "color": GRAY, "shrinkA": 0, "shrinkB": 6}
    name = f"the best, epoch {best:.0f}:\nrestored"
    panel.annotate(name, (best, value), (-14, -46), textcoords="offset points", ha="right", arrowprops=arrow)
    panel.axvline(stopped, color=INK, lw=1)
    panel.text(stopped, top, " training ends", va="top", color=INK)
    panel.text((best + stopped) / 2, 0.01 * top, f"{patience} evaluations", ha="center", va="bottom", color=GRAY)
    label_ends(panel, end, [(after[-1][1], name) for name, (_, after) in lines.items()], COLORS)
    figure.savefig(path, dpi=160)


def confusions(
    path: str, shots: Sequence[tuple[str, str, Any, Sequence[tuple[Any, int, int]]]], trained_on: Sequence[Any]
) -> None:
    """A column for each (title, subtitle, confusion matrix, [(image, target, prediction)]), and a row of images below.

    The predictions stand beside their images; those that are wrong have a frame.
    """
    width = len(shots)
    figure = Figure(figsize=(2.4 * width, 7.4))
    grid = figure.add_gridspec(
        3, width, left=0.03, right=0.99, top=0.88, bottom=0.02, wspace=0.12, hspace=0.24, height_ratios=(4, 5.2, 1.3)
    )
    for column, (title, subtitle, matrix, cases) in enumerate(shots):
        panel = figure.add_subplot(grid[0, column])
        panel.imshow(matrix**0.5, cmap="Blues", vmin=0)
        panel.set_title(title, fontweight="bold", fontsize=12, pad=22)
        panel.text(0.5, 1.02, subtitle, transform=panel.transAxes, ha="center", va="bottom", color=GRAY, fontsize=11)
        panel.set_xticks(range(len(matrix)), map(str, range(len(matrix))), fontsize=8)
        panel.set_yticks(range(len(matrix)), map(str, range(len(matrix))), fontsize=8)
        panel.tick_params(length=0, pad=2)
        _tiles(figure, grid[1, column].subgridspec(4, 4, wspace=0.1, hspace=0.45), cases)
    row = grid[2, :].subgridspec(1, len(trained_on), wspace=0.1)
    for number, image in enumerate(trained_on):
        panel = _tile(figure.add_subplot(row[0, number]), image, GRAY, 0.5)
        if number == 0:
            panel.set_title("what the model saw in training", loc="left", color=GRAY, fontsize=11)
    figure.text(0.005, 0.985, "rows: the digit; columns: what was predicted", va="top", color=GRAY, fontsize=11)
    figure.savefig(path, dpi=160)


def _tiles(figure: Figure, grid: Any, cases: Sequence[tuple[Any, int, int]]) -> None:
    for number, (image, target, prediction) in enumerate(cases[:16]):
        right = target == prediction
        color = COLORS[0] if right else COLORS[1]
        panel = _tile(figure.add_subplot(grid[number // 4, number % 4]), image, color, 0.5 if right else 2.5)
        panel.set_title(str(prediction), color=color, fontsize=9, pad=2, fontweight="normal" if right else "bold")


def _tile(panel: Any, image: Any, color: str, width: float) -> Any:
    panel.imshow(image, cmap="gray_r", vmin=0, vmax=255)
    panel.set(xticks=[], yticks=[])
    for spine in panel.spines.values():
        spine.set(visible=True, color=color, linewidth=width)
    return panel


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


def records(
    path: str, records: Mapping[str, Sequence[Series]], spans: Sequence[tuple[int, int]], whole: Series
) -> None:
    """What processes trained, what each wrote into each record, and the loss that the first record has.

    Args:
        path: of the picture.
        records: for each record what each process wrote into it.
        spans: from which batch on each process trained, and to which.
        whole: the loss of a run that was not killed.
    """
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.set_title("Loss, as one record has it", loc="left", fontweight="bold", fontsize=12)
    top.plot(*zip(*whole, strict=True), color=GRAY, lw=5, alpha=0.35)
    for series, color in zip(next(iter(records.values())), COLORS, strict=False):
        top.plot(*zip(*series, strict=True), color=color, lw=1.4)
    top.set_title("gray, behind it: a run that was not killed", loc="right", color=GRAY, fontsize=11)
    top.set_ylim(bottom=0)
    title = "What each process trained, and what it left in each record"
    bottom.set_title(title, loc="left", fontweight="bold", fontsize=12)
    rows = [*(f"process {number}" for number in range(1, len(spans) + 1)), *records]
    for row, ((start, end), color) in enumerate(zip(spans, COLORS, strict=False)):
        bottom.barh(row, end - start, left=start, height=0.55, color=color, alpha=0.4)
        if row < len(spans) - 1:
            bottom.plot(end, row, marker="x", ms=8, mew=2, color=INK)
            for panel in (top, bottom):
                panel.axvline(end, color=GRAY, lw=1, ls=(0, (4, 3)), zorder=0)
            top.text(end, top.get_ylim()[1] * 0.55, " killed", color=GRAY)
    for row, processes in enumerate(records.values(), len(spans)):
        for series, color in zip(processes, COLORS, strict=False):
            # One bar a step, so that a step that is missing is a gap.
            steps = [step - 1 for step, _ in series]
            bottom.bar(steps, 0.55, bottom=row - 0.275, width=1.0, align="edge", color=color)
    bottom.set_yticks(range(len(rows)), rows)
    bottom.invert_yaxis()
    bottom.tick_params(axis="y", length=0)
    bottom.set_xlim(0, whole[-1][0])
    bottom.set_xlabel("Batch")
    figure.savefig(path, dpi=160)


def searches(path: str, plot: Callable[..., Any], losses: Sequence[Series], batch: int, by: str) -> None:
    """The loss around a spike, drawn by ``plot``, and how far two runs are apart, with where they part."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1)
    plot(axes=top, around=60)
    top.set_title("The loss jumped: the batch that pl.rewind visits", loc="left", fontweight="bold", fontsize=12)
    before, after = losses
    gaps = [(at, abs(one - other)) for (at, one), (_, other) in zip(before, after, strict=True)]
    bottom.plot(*zip(*gaps, strict=True), color=INK, lw=1.2)
    bottom.axvline(batch, color=COLORS[1], lw=2)
    bottom.text(batch, max(gap for _, gap in gaps), f"  pl.diff: batch {batch}, {by}", color=COLORS[1], va="top")
    bottom.set_title(
        "The refactoring: how far its losses are from those before", loc="left", fontweight="bold", fontsize=12
    )
    bottom.set(xlabel="batch", ylabel="difference of the loss", xlim=(0, gaps[-1][0]))
    figure.savefig(path)
