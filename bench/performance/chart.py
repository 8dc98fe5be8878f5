"""The table of steps as a picture: a panel for each workload, a dot for each loop, ratios on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

__all__ = ["draw"]

OURS, HAND, PEER = "#d1495b", "#2b2d42", "#8d99ae"
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of ``results["steps"]``."""
    found = results["steps"]
    names = [
        name
        for name in dict.fromkeys(each for loops in found.values() for each in loops)
        if any("ratio" in loops.get(name, {}) for loops in found.values())
    ]
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    size = (3.4 + 3.3 * columns, rows * (0.9 + 0.235 * len(names)) + 0.4)
    figure, axes = plt.subplots(rows, columns, figsize=size, sharey=True, sharex=True, squeeze=False)
    ratios = [cell["ratio"] for loops in found.values() for cell in loops.values() if "ratio" in cell]
    low, high = min(0.5, *ratios) / 1.9, max(2.0, *ratios) * 1.6
    for index, axis in enumerate(axes.flat):
        if index >= len(found):
            axis.set_visible(False)
            continue
        workload = list(found)[index]
        _panel(axis, names, found[workload])
        axis.set_xlim(low, high)
        if index % columns == 0:
            axis.set_yticks(range(len(names)), names, fontsize=8.5)
            for label, name in zip(axis.get_yticklabels(), names, strict=True):
                label.set_color(_colour(name) if _colour(name) != PEER else "#4a5568")
        axis.set_title(f"{workload}\n{results['workloads'][workload]}", fontsize=9, loc="left")
    figure.suptitle(
        "CPU time of a training step, relative to the loop by hand with a fused AdamW (left is faster)",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    figure.savefig(path, dpi=110, facecolor="white", bbox_inches="tight")
    plt.close(figure)


def _panel(axis: Axes, names: list[str], loops: Mapping[str, Any]) -> None:
    axis.axvline(1, color=HAND, linewidth=1, zorder=1)
    for place, name in enumerate(names):
        ratio = loops.get(name, {}).get("ratio")
        if ratio is None:
            continue
        colour = _colour(name)
        axis.plot([1, ratio], [place, place], color=colour, linewidth=1.5, alpha=0.5, zorder=2)
        axis.plot(ratio, place, "o", color=colour, markersize=6, zorder=3)
        right = ratio >= 1
        axis.annotate(
            f"{ratio:.2f}",
            (ratio, place),
            xytext=(6 if right else -6, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontsize=7.5,
            color=colour if colour != PEER else "#4a5568",
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(TICKS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8, labelbottom=True)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#e2e8f0", linewidth=0.8, zorder=0)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _colour(name: str) -> str:
    if name.startswith("pl.fit"):
        return OURS
    return HAND if name.startswith(("hand-written", "torch's")) else PEER
