"""Real handwritten digits, and the second half of the run twice, with the same bits.

    python examples/digits.py                # trains, replays, draws digits.png
    python examples/digits.py --seed 7 --epochs 20

It trains a small convolutional network on scikit-learn's digits (1797 images of 8x8 pixels) with label smoothing, an
average of the weights (EMA), and two evaluators: digits that were held out, and the same digits shifted by a pixel.
Shuffling, the augmentation and dropout are random. When the run is over, training resumes a second time from a State
in the middle of an epoch in the middle of the run, and everything that follows is compared with the first time.

Exit code 0 means: at least 98% of the held-out digits are right, and the replay is bitwise equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import _compare
import _pictures
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pure_loop as pl
from pure_loop import Event

GOAL = 0.98
KEPT = (Event.BATCH_END, Event.EVAL_END, Event.EPOCH_CHECKPOINT)

History: TypeAlias = list[tuple[Event, pl.State | None]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="digits.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="three epochs; 80%% right are enough")
    options = parser.parse_args(arguments)
    epochs, goal = (3, 0.8) if options.quick else (options.epochs, GOAL)

    torch.set_num_threads(1)  # Images of 8x8 pixels: more threads would only wait for each other.
    train, evaluators = load()
    optimizer = pl.optim.adamw(lr=pl.schedules.cosine("1dur", peak=1e-2, warmup="0.1dur"))
    recipe = pl.Recipe(
        train,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        max_duration=f"{epochs}ep",
        evaluators=evaluators,
        microbatch_size=32,
        algorithms=[pl.algorithms.label_smoothing(0.1), pl.algorithms.ema(half_life="10ba")],
        seed=options.seed,
    )
    begun = time.perf_counter()
    history = record(recipe.fit(network(options.seed)), "train")
    seconds = time.perf_counter() - begun

    # A State is a value: any one of the history will do to resume from, and it needn't have been chosen in advance.
    middle = epochs // 2 * len(train) + len(train) // 2
    position, kept = next(
        (index, state)
        for index, (event, state) in enumerate(history)
        if event is Event.BATCH_END and state is not None and state.timestamp.batch == middle
    )
    begun = time.perf_counter()
    replay = record(recipe.fit(kept), "replay")
    seconds_again = time.perf_counter() - begun

    # FIT_START begins every call; after it comes the rest of the first run.
    tensors, differences = compare(history[position + 1 :], replay[1:])
    draw(options.output, history, replay, optimizer, not differences)

    last = history[-2][1]
    assert last is not None
    print(f"\ntrained    {epochs} epochs of {len(train)} batches in {seconds:.1f} s, with seed {options.seed}")
    for label, metrics in last.metrics.items():
        print(f"{label:<10} {metrics['accuracy']:.2%} right, loss {metrics['loss']:.3f}")
    print(
        f"replayed   from batch {middle}, in the middle of epoch {kept.timestamp.epoch + 1}; took {seconds_again:.1f} s"
    )
    print(f"compared   {len(replay) - 1:,} events and {tensors:,} tensors: ", end="")
    print(f"{len(differences)} DIFFER, first {differences[0]}" if differences else "all bitwise equal")
    print(f"picture    {options.output}")
    accuracy = float(last.metrics["held-out"]["accuracy"])
    if accuracy < goal:
        print(f"failed     {accuracy:.2%} of the held-out digits are right, and it should be {goal:.0%}")
    return 0 if accuracy >= goal and not differences else 1


def record(stream: Iterable[tuple[Event, pl.State]], description: str) -> History:
    """Every event, and the States of some: those from within a batch hold its graph, too much to keep them all."""
    return [(event, state if event in KEPT else None) for event, state in pl.progress(stream, description=description)]


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
        body = [*block(1, 24), *block(24, 24), nn.MaxPool2d(2), *block(24, 48), nn.AdaptiveAvgPool2d(2)]
        return nn.Sequential(*body, nn.Flatten(), nn.Dropout(0.2), nn.Linear(192, 10))


def compare(first: History, second: History) -> tuple[int, list[str]]:
    """How many tensors were compared, and what differs."""
    if [event for event, _ in first] != [event for event, _ in second]:
        return 0, ["the events"]
    tensors, differences = 0, []
    for (event, a), (_, b) in zip(first, second, strict=True):
        if a is not None and b is not None:
            tensors += sum(isinstance(leaf, Tensor) for leaf in _compare.leaves(a).values())
            differences += [f"{path} at {event.name}" for path in _compare.differences(a, b)]
    return tensors, differences


def draw(path: str, history: History, replay: History, optimizer: pl.optim.Optimizer, same: bool) -> None:
    """What the picture shows is read from the kept States: nothing was logged on the side."""

    def states(run: History, wanted: Event) -> list[pl.State]:
        return [state for event, state in run if event is wanted and state is not None]

    batches, epochs = states(history, Event.BATCH_END), states(history, Event.EPOCH_CHECKPOINT)
    _pictures.training(
        path,
        loss=[(s.timestamp.batch, float(s.loss)) for s in batches],
        loss_again=[(s.timestamp.batch, float(s.loss)) for s in states(replay, Event.BATCH_END)],
        evaluations={
            label: {name: [(s.timestamp.batch, float(s.metrics[label][name])) for s in epochs] for name in metrics}
            for label, metrics in epochs[-1].metrics.items()
        },
        learning_rate=[(s.timestamp.batch, optimizer.lr(s.previous_timestamp)) for s in batches],
        goal=GOAL,
        verdict=f"replayed from a kept State:\n{'bit for bit the same' if same else 'NOT THE SAME'}",
    )


if __name__ == "__main__":
    sys.exit(main())
