"""Real handwritten digits, and the second half of the run twice, with the same bits.

    python examples/digits.py                # trains, replays, draws digits.png
    python examples/digits.py --seed 7 --epochs 20

It trains a small convolutional network on scikit-learn's digits (1797 images of 8x8 pixels) with label smoothing, an
average of the weights (EMA), and two evaluators: digits that were held out, and the same digits shifted by a pixel.
Shuffling, the augmentation and dropout are random. When the run is over, training goes on a second time from a State
in the middle of an epoch in the middle of the run, and everything that follows is compared with the first time.

Exit code 0 means: at least 98% of the held-out digits are right, and the replay is bitwise equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import matplotlib
import optree
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import ema, label_smoothing
from pure_loop.progress import progress

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

GOAL = 0.98
KEPT = (Event.BATCH_END, Event.EVAL_END, Event.EPOCH_CHECKPOINT)

History: TypeAlias = list[tuple[Event, pl.State | None]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="digits.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="three epochs; 80%% right are enough")
    options = parser.parse_args(arguments)
    epochs, goal = (3, 0.8) if options.quick else (options.epochs, GOAL)

    torch.set_num_threads(1)  # Images of 8x8 pixels: more threads would only wait for each other.
    train, evaluators = load()
    optimizer = pl.optim.adamw(lr=pl.schedules.cosine(f"{epochs * len(train)}ba", peak=1e-2, warmup="30ba"))

    def fit(start: nn.Module | pl.State) -> Iterable[tuple[Event, pl.State]]:
        return pl.fit(
            start,
            train,
            loss=nn.functional.cross_entropy,
            optimizer=optimizer,
            max_duration=f"{epochs}ep",
            microbatch_size=32,
            seed=options.seed,
            evaluators=evaluators,
            algorithms=[label_smoothing(0.1), ema(half_life="10ba")],
        )

    begun = time.perf_counter()
    history = record(fit(network(options.seed)), "train")
    seconds = time.perf_counter() - begun

    # A State is a value: any one of the history will do to go on from, and it needn't have been chosen in advance.
    middle = epochs // 2 * len(train) + len(train) // 2
    position, kept = next(
        (index, state)
        for index, (event, state) in enumerate(history)
        if event is Event.BATCH_END and state is not None and state.timestamp.batch == middle
    )
    begun = time.perf_counter()
    replay = record(fit(kept), "replay")
    seconds_again = time.perf_counter() - begun

    # FIT_START begins every call; after it comes the rest of the first run.
    tensors, differences = compare(history[position + 1 :], replay[1:])
    draw(history, replay, optimizer, not differences, options.output)

    last = history[-2][1]
    assert last is not None
    print(f"\ntrained    {epochs} epochs of {len(train)} batches in {seconds:.1f} s, with seed {options.seed}")
    for label, metrics in last.metrics.items():
        print(f"{label:<10} {metrics['accuracy']:.2%} right, loss {metrics['loss']:.3f}")
    print(f"replayed   from batch {middle}, in the middle of epoch {kept.timestamp.epoch + 1}, in {seconds_again:.1f} s")
    print(f"compared   {len(replay) - 1:,} events and {tensors:,} tensors: ", end="")
    print(f"{len(differences)} DIFFER, first {differences[0]}" if differences else "all bitwise equal")
    print(f"picture    {options.output}")
    accuracy = float(last.metrics["held-out"]["accuracy"])
    if accuracy < goal:
        print(f"failed     {accuracy:.2%} of the held-out digits are right, and it should be {goal:.0%}")
    return 0 if accuracy >= goal and not differences else 1


def record(stream: Iterable[tuple[Event, pl.State]], description: str) -> History:
    """Every event, and the States of some: those from within a batch hold its graph, too much to keep them all."""
    return [(event, state if event in KEPT else None) for event, state in progress(stream, description=description)]


class Jittered(Dataset[tuple[Tensor, Tensor]]):
    """Images of 10x10 pixels, cut to 8x8 at a random place: what a dataset draws is replayed too."""

    def __init__(self, images: Tensor, digits: Tensor) -> None:
        self.images, self.digits = images, digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = torch.randint(3, (2,)).tolist()
        return cut(self.images[index], x, y), self.digits[index]


def cut(images: Tensor, x: int, y: int) -> Tensor:
    return images[..., y : y + 8, x : x + 8]


def load() -> tuple[DataLoader[Any], dict[str, DataLoader[Any]]]:
    """Training data, shuffled, and the data of two evaluators. The split is the same for all seeds."""
    raw = load_digits()
    images = nn.functional.pad(torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16, (1, 1, 1, 1))
    digits = torch.tensor(raw.target)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    shifted = [cut(images[test], x, y) for x, y in ((0, 1), (2, 1), (1, 0), (1, 2))]
    evaluators = {
        "held-out": TensorDataset(cut(images[test], 1, 1), digits[test]),
        "shifted": TensorDataset(torch.cat(shifted), digits[test].repeat(len(shifted))),
    }
    loader = DataLoader(Jittered(images[train], digits[train]), batch_size=64, shuffle=True)
    return loader, {label: DataLoader(data, batch_size=360) for label, data in evaluators.items()}


def network(seed: int) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    with pl.random.seeded(seed):
        features = nn.Sequential(*block(1, 16), *block(16, 16), nn.MaxPool2d(2), *block(16, 32), nn.AdaptiveAvgPool2d(2))
        return nn.Sequential(features, nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10))


def compare(first: History, second: History) -> tuple[int, list[str]]:
    """How many tensors were compared, and what differs, bit by bit; wall-clock times are left out."""
    if [event for event, _ in first] != [event for event, _ in second]:
        return 0, ["the events"]
    tensors, differences = 0, []
    for (event, a), (_, b) in zip(first, second, strict=True):
        paths, ours, _ = optree.tree_flatten_with_path(a, namespace="pure_loop")
        others = optree.tree_leaves(b, namespace="pure_loop")
        for path, one, other in zip(paths, ours, others, strict=True):
            tensors += isinstance(one, Tensor)
            same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
            if not same and not str(path[-1]).endswith("_seconds"):
                differences.append(f"{'.'.join(map(str, path))} at {event.name}")
    return tensors, differences


def draw(history: History, replay: History, optimizer: pl.optim.Optimizer, same: bool, path: str) -> None:
    """Loss, accuracy and learning rate over the batches; the replayed half is shaded, its losses dotted."""
    batches = [state for event, state in history if event is Event.BATCH_END and state is not None]
    epochs = [state for event, state in history if event is Event.EPOCH_CHECKPOINT and state is not None]
    again = [state for event, state in replay if event is Event.BATCH_END and state is not None]
    kept, end = again[0].previous_timestamp.batch, batches[-1].timestamp.batch
    ink, gray, colors = "#222222", "#757575", ("#1f6fb4", "#d9661f")

    plt.rcParams.update({"font.size": 12, "axes.edgecolor": gray, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(3, 1, sharex=True, figsize=(9, 8), height_ratios=(4, 4, 2), layout="constrained")
    loss, accuracy, rate = panels
    for panel, title in zip(panels, ("Loss", "Accuracy (%)", "Learning rate"), strict=True):
        panel.set_title(title, loc="left", fontweight="bold", fontsize=12)
        panel.axvspan(kept, end, color="#f1efe9", lw=0, zorder=0)

    at = [state.timestamp.batch for state in batches]
    loss.plot(at, [float(state.loss) for state in batches], color=gray, lw=1.2)
    loss.plot(at[-len(again) :], [float(state.loss) for state in again], color=ink, lw=1.2, ls=":")
    rate.plot(at, [optimizer.lr(state.previous_timestamp) for state in batches], color=ink, lw=2)
    labels: dict[Any, list[tuple[float, str, str]]] = {
        loss: [(float(batches[-1].loss), "training, with\nsmoothed labels", gray)],
        accuracy: [],
    }
    at = [state.timestamp.batch for state in epochs]
    for evaluator, color in zip(epochs[-1].metrics, colors, strict=True):
        for panel, metric, scale, unit in ((loss, "loss", 1, ""), (accuracy, "accuracy", 100, "%")):
            values = [scale * float(state.metrics[evaluator][metric]) for state in epochs]
            panel.plot(at, values, color=color, lw=2, marker="o", ms=4)
            labels[panel].append((values[-1], f"{evaluator} {values[-1]:.3g}{unit}", color))
    accuracy.axhline(100 * GOAL, color=gray, lw=1, ls=(0, (4, 3)), zorder=1)
    accuracy.text(1, 100 * GOAL + 0.1, "the goal", color=gray, va="bottom", fontsize=10)
    accuracy.set_ylim(top=100.5)
    accuracy.set_ylim(bottom=max(90, accuracy.get_ylim()[0]))
    loss.set_ylim(bottom=0)
    rate.set_ylim(bottom=0)
    rate.set_xlim(0, end)
    rate.set_xlabel("Batch")
    for panel, found in labels.items():
        label_ends(panel, end, found)
    what = "bit for bit the same" if same else "NOT the same"
    loss.text(kept + end / 100, loss.get_ylim()[1], f"replayed from a kept State:\n{what}", va="top", color=ink)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def label_ends(panel: Any, end: float, labels: list[tuple[float, str, str]]) -> None:
    """Texts beside the ends of lines, moved apart where they would overlap."""
    low, high = panel.get_ylim()
    heights: list[float] = []
    for value, text, _ in sorted(labels):
        room = (high - low) * (0.07 + 0.02 * text.count("\n"))
        heights.append(max(value, heights[-1] + room) if heights else value)
    up = sum(heights) / len(heights) - sum(value for value, _, _ in labels) / len(labels)
    for height, (_, text, color) in zip(heights, sorted(labels), strict=True):
        panel.text(1.012 * end, height - up, text, color=color, va="center", linespacing=1.1)


if __name__ == "__main__":
    sys.exit(main())
