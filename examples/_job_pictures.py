"""Pictures of the longer jobs, in the style of ``_pictures``: numbers go in, a PNG comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _pictures import COLORS, GRAY, INK, SHADE
from matplotlib.figure import Figure

# Of a text that lines would cross.
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}


def kfold(
    path: str, accuracies: Mapping[str, Sequence[float]], best: str, matrix: Any, wrong: Sequence[tuple[Any, int, int]]
) -> None:
    """The accuracy of each fold, the confusion matrix of the best network, and its mistakes.

    Args:
        path: of the picture.
        accuracies: of each network, that of each fold, in [0, 1].
        best: the network that the matrix and the mistakes are of.
        matrix: counts, a row for each digit and a column for each prediction; of shape (10, 10).
        wrong: images of shape (8, 8), with the digit and the prediction.
    """
    figure = Figure(figsize=(10, 6.6))
    grid = figure.add_gridspec(
        2, 2, left=0.07, right=0.985, top=0.93, bottom=0.06, wspace=0.14, hspace=0.3, height_ratios=(5, 1)
    )
    panel = figure.add_subplot(grid[0, 0])
    panel.set_title("Accuracy on the fold that was left out (%)", loc="left", fontweight="bold", fontsize=12)
    for values in zip(*accuracies.values(), strict=True):  # a line for each fold
        panel.plot(range(len(values)), [100 * value for value in values], color=GRAY, lw=0.8, alpha=0.5, zorder=1)
    for place, (values, color) in enumerate(zip(accuracies.values(), COLORS, strict=False)):
        percent = [100 * value for value in values]
        mean = sum(percent) / len(percent)
        panel.plot([place] * len(percent), percent, "o", ms=8, color=color, alpha=0.75, mec="white", zorder=3)
        panel.plot([place - 0.17, place + 0.17], [mean, mean], color=color, lw=3, zorder=2)
        panel.text(place + 0.2, mean, f"{mean:.1f}", color=color, va="center", fontweight="bold", bbox=BEHIND)
    panel.set_xticks(range(len(accuracies)), list(accuracies))
    panel.set_xlim(-0.4, len(accuracies) - 0.5)
    panel.tick_params(axis="x", length=0)

    panel = figure.add_subplot(grid[0, 1])
    panel.set_title(f"Digits (rows) and predictions: {best}", loc="left", fontweight="bold", fontsize=12)
    panel.imshow(matrix**0.5, cmap="Blues", vmin=0)
    deepest = matrix.max()
    for row in range(len(matrix)):
        for column in range(len(matrix)):
            count = int(matrix[row, column])
            color = "white" if count > deepest / 2 else COLORS[1] if row != column else INK
            if count:
                panel.text(column, row, str(count), ha="center", va="center", color=color, fontsize=9)
    panel.set_xticks(range(len(matrix)), map(str, range(len(matrix))))
    panel.set_yticks(range(len(matrix)), map(str, range(len(matrix))))
    panel.tick_params(length=0)
    for spine in panel.spines.values():
        spine.set_visible(False)

    row = grid[1, :].subgridspec(1, 16, wspace=0.12)
    for number, (image, digit, guess) in enumerate(wrong[:16]):
        tile = figure.add_subplot(row[0, number])
        tile.imshow(image, cmap="gray_r")
        tile.set(xticks=[], yticks=[])
        tile.set_xlabel(f"{digit} as {guess}", color=COLORS[1], fontsize=9)
        for spine in tile.spines.values():
            spine.set(visible=True, color=COLORS[1], linewidth=1)
        if number == 0:
            tile.set_title(f"{best}: images that are taken for another digit", loc="left", color=GRAY, fontsize=11)
    figure.savefig(path, dpi=160)


def distillation(
    path: str,
    plain: Sequence[tuple[float, Sequence[float]]],
    distilled: Sequence[tuple[float, Sequence[float]]],
    *,
    teacher: float,
    unseen: int,
) -> None:
    """What students gain from a teacher, for each seed and for each digit.

    Args:
        path: of the picture.
        plain: of each student without a teacher the accuracy, and that of each digit; in [0, 1].
        distilled: the same of the students with a teacher.
        teacher: the accuracy of the teacher.
        unseen: the digit that no student has seen.
    """
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(4, 6))
    left.set_title("Accuracy of each student (%)", loc="left", fontweight="bold", fontsize=12)
    for row, ((before, _), (after, _)) in enumerate(zip(plain, distilled, strict=True)):
        left.plot([100 * before, 100 * after], [row, row], color=GRAY, lw=2, alpha=0.5, zorder=1)
        left.plot(100 * before, row, "o", ms=9, color=COLORS[1], zorder=2)
        left.plot(100 * after, row, "o", ms=9, color=COLORS[0], zorder=2)
    left.axvline(100 * teacher, color=INK, lw=1, ls=(0, (4, 3)))
    left.text(100 * teacher, -0.75, "teacher ", ha="right", va="center", color=INK)
    left.set_yticks(range(len(plain)), [f"seed {row}" for row in range(len(plain))])
    left.set_ylim(len(plain) - 0.4, -1.1)
    left.tick_params(axis="y", length=0)

    right.set_title("Accuracy on each digit (%), mean of the students", loc="left", fontweight="bold", fontsize=12)
    right.axvspan(unseen - 0.5, unseen + 0.5, color=SHADE, lw=0, zorder=0)
    right.text(unseen, 109, "never\nseen", ha="center", va="center", color=GRAY, fontsize=10, linespacing=1.0)
    for results, color, shift in ((plain, COLORS[1], -0.2), (distilled, COLORS[0], 0.2)):
        for digit in range(10):
            values = [100 * each[digit] for _, each in results]
            right.bar(digit + shift, sum(values) / len(values), width=0.36, color=color, alpha=0.85)
            right.plot([digit + shift] * len(values), values, ".", ms=4, color=INK, alpha=0.5)
    right.set_xticks(range(10))
    right.tick_params(axis="x", length=0)
    right.set_ylim(0, 116)
    right.set_yticks(range(0, 101, 20))
    names = ("labels alone", "with the teacher")
    handles = [right.bar(0, 0, color=color, label=name) for name, color in zip(names, COLORS[1::-1], strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=160)


def returns(
    path: str,
    run: Sequence[Sequence[float]],
    rest: Sequence[Sequence[float]],
    traces: Sequence[tuple[str, str, Sequence[Sequence[float]]]],
) -> None:
    """The returns of the episodes of each batch, and how poles move under three policies.

    Args:
        path: of the picture.
        run: the returns of the episodes of each batch.
        rest: the same of the batches that were trained a second time, the last ones.
        traces: (title, subtitle, the angle in degrees of each pole at each step, NaN where it has fallen).
    """
    figure = Figure(figsize=(10, 7.4), layout="constrained")
    grid = figure.add_gridspec(2, len(traces), height_ratios=(5, 4))
    top = figure.add_subplot(grid[0, :])
    top.set_title("Steps until the pole falls, of 200", loc="left", fontweight="bold", fontsize=12)
    batches = range(1, len(run) + 1)
    for batch, episodes in zip(batches, run, strict=True):
        top.plot([batch] * len(episodes), episodes, ".", ms=3.5, color=COLORS[0], alpha=0.35, mew=0)
    means = [sum(episodes) / len(episodes) for episodes in run]
    again = [sum(episodes) / len(episodes) for episodes in rest]
    first = len(run) - len(rest)
    top.axvspan(first, len(run), color=SHADE, lw=0, zorder=0)
    top.plot(batches, means, color=COLORS[0], lw=2.5, label="mean of 32 episodes")
    top.plot(batches[first:], again, color=INK, lw=1.3, ls=":", label="resumed from a file")
    top.set_xlim(0, len(run))
    top.set_ylim(0, 208)
    top.set_xlabel("Batch")
    top.legend(loc="lower right", frameon=False)
    panels = []
    for column, (title, subtitle, angles) in enumerate(traces):
        panel = figure.add_subplot(grid[1, column], sharey=panels[0] if panels else None)
        panel.set_title(title, loc="left", fontweight="bold", fontsize=12)
        panel.set_title(subtitle, loc="right", color=GRAY, fontsize=11)
        for fallen in (-12, 12):
            panel.axhline(fallen, color=GRAY, lw=1, ls=(0, (4, 3)))
        for pole in angles:
            panel.plot(pole, color=COLORS[1], lw=0.8, alpha=0.4)
            steps = [step for step, angle in enumerate(pole) if angle == angle]
            if len(steps) < len(pole):
                panel.plot(steps[-1], pole[steps[-1]], "x", ms=5, color=INK, alpha=0.6)
        panel.set_xlim(0, len(angles[0]))
        panel.set_ylim(-13.5, 13.5)
        panel.set_xlabel("Step")
        if panels:
            panel.tick_params(labelleft=False)
        else:
            panel.set_ylabel("Angle of the pole (°)")
        panels.append(panel)
    figure.savefig(path, dpi=160)
