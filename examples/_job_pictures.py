"""Pictures of the longer jobs, in the style of ``_pictures``: numbers go in, a PNG comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _pictures import COLORS, GRAY, INK, SHADE, Series, label_ends
from matplotlib import colormaps
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

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


def sweep(
    path: str,
    trunk: Series,
    trials: Sequence[tuple[Series, float, bool]],
    winner: Series,
    revived: Series,
) -> None:
    """The losses of trials that fork from one trunk, by the batch, and by the learning rate.

    Args:
        path: of the picture.
        trunk: the losses that all trials share.
        trials: of each trial its losses, its learning rate, and whether it was trained to the end.
        winner: the losses of the best trial.
        revived: those of a trial after it was pruned.
    """
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(7, 4))
    rates = LogNorm(min(lr for _, lr, _ in trials), max(lr for _, lr, _ in trials))
    colors = colormaps["viridis_r"]
    left.set_title("Loss of validation", loc="left", fontweight="bold", fontsize=12)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    left.yaxis.set_minor_locator(NullLocator())
    for series, lr, whole in trials:
        color = colors(rates(lr))
        left.plot(*zip(*series, strict=True), color=color, lw=1.4, alpha=0.9)
        right.plot(lr, series[-1][1], "o" if whole else "x", ms=9 if whole else 7, mew=1.8, color=color)
        if not whole:
            left.plot(*series[-1], "x", ms=6, mew=1.6, color=color)
    left.plot(*zip(*trunk, strict=True), color=INK, lw=2.5)
    left.plot(*trunk[-1], "o", ms=9, color=INK)
    left.plot(*zip(*winner, strict=True), color=COLORS[1], lw=2.5)
    left.plot(*zip(*revived, strict=True), color=GRAY, lw=1.4, ls=(0, (3, 2)))
    arrow = {"arrowstyle": "-", "color": GRAY, "shrinkA": 0, "shrinkB": 6}
    near = {"textcoords": "offset points", "arrowprops": arrow}
    left.annotate("the State that\nall trials fork", trunk[-1], (46, 14), **near)
    left.annotate("pruned, and taken up again", revived[len(revived) // 2], (-20, 40), color=GRAY, **near)
    left.annotate("the winner", winner[-1], (-30, -26), ha="right", color=COLORS[1], fontweight="bold", **near)
    left.set_ylim(bottom=0.85 * min(value for _, value in winner))
    lr = next(lr for series, lr, _ in trials if series == winner)
    right.plot(lr, winner[-1][1], "o", ms=14, mew=2, mfc="none", color=COLORS[1])
    left.set_xlim(0, winner[-1][0] * 1.01)
    left.set_xlabel("Batch")
    right.set_title("where each trial ended", loc="left", color=GRAY, fontsize=11)
    right.set_xscale("log")
    right.set_xlabel("Learning rate")
    handles = [
        right.plot([], [], mark, color=GRAY, ms=8, mew=1.8, label=name)[0]
        for mark, name in (("x", "pruned"), ("o", "trained to the end"))
    ]
    right.legend(handles=handles, loc="upper left", frameon=False)
    figure.savefig(path, dpi=160)


def population(path: str, rounds: Sequence[Any], start: Sequence[float], accuracies: Sequence[Sequence[float]]) -> None:
    """The learning rates and accuracies of members over rounds, and who goes on from whom.

    Args:
        path: of the picture.
        rounds: ``sources`` and ``lr_scales`` of each; before them rates were those of ``start``.
        accuracies: of all members, at each round.
    """
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = colormaps["viridis_r"]
    ancestors, rates = list(range(len(start))), list(start)
    for at, (found, values) in enumerate(zip(rounds, accuracies, strict=True)):
        for number, source in enumerate(found.sources):
            color = colors(ancestors[number] / (len(start) - 1))
            left.plot((at, at + 1), (rates[number],) * 2, color=color, lw=1.8)
            if source != number:
                left.plot((at + 1,) * 2, (rates[source], found.lr_scales[number]), color=GRAY, lw=0.7, zorder=1)
                left.plot(at + 1, rates[number], "x", color=color, ms=5, mew=1.4)
            if at:
                before = accuracies[at - 1][rounds[at - 1].sources[number]]
                right.plot((at, at + 1), (100 * before, 100 * values[number]), color=color, lw=1.4)
        ancestors, rates = [ancestors[source] for source in found.sources], list(found.lr_scales)
    left.set_title("Learning rate", loc="left", fontweight="bold", fontsize=12)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    left.yaxis.set_minor_locator(NullLocator())
    left.text(
        0.98, 0.02, "x: goes on from another member", transform=left.transAxes, color=GRAY, fontsize=10, ha="right"
    )
    right.set_title("Accuracy (%)", loc="left", fontweight="bold", fontsize=12)
    right.text(0.98, 0.02, "colour: the rate at the beginning\nof what a member has learned", color=GRAY, fontsize=10,
               transform=right.transAxes, ha="right")  # fmt: skip
    for panel in (left, right):
        panel.set_xlabel("Epoch")
        panel.set_xlim(0, len(rounds))
        panel.set_xticks(range(0, len(rounds) + 1, 5 if len(rounds) > 9 else 1))
    figure.savefig(path, dpi=160)


def images(
    path: str, raw: Series, average: Series, rates: Series, best: float, columns: Sequence[Sequence[Any]]
) -> None:
    """The errors of weights and of their average, the learning rate, and images as training sees them.

    Args:
        path: of the picture.
        raw: the error of the weights after each epoch, in [0, 1].
        average: that of the average of the weights.
        rates: the learning rate.
        best: the epoch whose average is restored.
        columns: images as they are, and the same images augmented, several times.
    """
    figure = Figure(figsize=(11, 5.4))
    grid = figure.add_gridspec(
        2,
        2,
        left=0.06,
        right=0.99,
        top=0.93,
        bottom=0.1,
        wspace=0.06,
        hspace=0.22,
        width_ratios=(6, 5),
        height_ratios=(4, 1),
    )
    top, bottom = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    end = raw[-1][0]
    top.set_title("Error of validation (%)", loc="left", fontweight="bold", fontsize=12)
    top.set_yscale("log")
    top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    top.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    top.yaxis.set_minor_locator(NullLocator())
    for series, color, width, name in ((raw, GRAY, 1.2, "weights"), (average, COLORS[0], 2.5, "their average")):
        top.plot(
            *zip(*((epoch, 100 * error) for epoch, error in series), strict=True), color=color, lw=width, label=name
        )
    value = 100 * dict(average)[best]
    top.axvspan(best, end, color=SHADE, lw=0, zorder=0)
    top.plot(best, value, "o", ms=9, color=COLORS[1])
    arrow = {"arrowstyle": "-", "color": GRAY, "shrinkA": 0, "shrinkB": 6}
    name = f"restored: epoch {best:.0f}"
    top.annotate(name, (best, value), (-70, -12), textcoords="offset points", ha="right", arrowprops=arrow)
    top.legend(loc="lower left", frameon=False)
    bottom.set_title("Learning rate", loc="left", fontweight="bold", fontsize=12)
    bottom.plot(*zip(*rates, strict=True), color=INK, lw=2)
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("Epoch")
    top.set_ylim(bottom=0.7 * min(100 * error for _, error in average))
    for panel in (top, bottom):
        panel.set_xlim(1, end)
    top.tick_params(labelbottom=False)
    tiles = grid[:, 1].subgridspec(len(columns[0]), len(columns), wspace=0.06, hspace=0.06)
    for row in range(len(columns[0])):
        for column, shown in enumerate(columns):
            tile = figure.add_subplot(tiles[row, column])
            tile.imshow(shown[row], cmap="gray_r", vmin=-0.2, vmax=1.2)
            tile.set(xticks=[], yticks=[])
            for spine in tile.spines.values():
                spine.set(visible=True, color=COLORS[1] if column == 0 else GRAY, linewidth=1.8 if column == 0 else 0.4)
            if row == 0 and column < 2:
                color, title = ((COLORS[1], "image"), (GRAY, "as training sees it, in six batches"))[column]
                tile.set_title(title, loc="left", color=color, fontsize=11)
    figure.savefig(path, dpi=160)


def lora(
    path: str, base: Mapping[str, Series], adapters: Mapping[str, Series], changes: Sequence[tuple[str, float]]
) -> None:
    """Perplexities while a base and then its adapters are trained, and how large each adapter is beside its matrix.

    Args:
        path: of the picture.
        base: by the name of a text, the perplexities by the batch.
        adapters: the same, while adapters are trained.
        changes: the name of a matrix, and the norm of its adapter divided by its own.
    """
    figure = Figure(figsize=(10.5, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(6, 4))
    end = next(iter(base.values()))[-1][0]
    last = end + next(iter(adapters.values()))[-1][0]
    left.set_title("Perplexity of held-out texts", loc="left", fontweight="bold", fontsize=12)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    left.yaxis.set_minor_locator(NullLocator())
    left.axvspan(end, last, color=SHADE, lw=0, zorder=0)
    for (name, series), color in zip(base.items(), COLORS, strict=False):
        further = [series[-1], *((end + batch, value) for batch, value in adapters[name])]
        left.plot(*zip(*series, strict=True), color=color, lw=2.2)
        left.plot(*zip(*further, strict=True), color=color, lw=2.2, marker="o", ms=4)
    ends = [(series[-1][1], f"{name} {series[-1][1]:.0f}") for name, series in adapters.items()]
    left.set_xlim(0, last)
    label_ends(left, last, ends, COLORS)
    top = left.get_ylim()[1]
    for x, text in ((end / 2, "the base learns prose"), ((end + last) / 2, "adapters\nlearn code")):
        left.text(x, top, text, ha="center", va="top", color=GRAY, fontsize=11)
    left.set_xlabel("Batch")
    right.set_title("Adapter, of its matrix's norm (%)", loc="left", fontweight="bold", fontsize=12)
    rows = range(len(changes))
    for row, (_, change) in zip(rows, changes, strict=True):
        right.barh(row, 100 * change, height=0.7, color=COLORS[1], alpha=0.85)
    right.set_yticks(rows, [name for name, _ in changes])
    right.tick_params(axis="y", length=0, labelsize=10)
    right.invert_yaxis()
    figure.savefig(path, dpi=160)
