"""What is taken for what: a confusion matrix and images after each evaluation.

    python examples/confusion.py             # trains, draws confusion.png

A small network learns handwritten digits. An evaluator measures `pl.metrics.confusion_matrix`, and `ImageVisualizer`
records the first images of each evaluation with their targets and predictions, and some of training: as the model saw
them, that is, normalised (which `mean=` and `std=` undo) and with the squares that an algorithm erases.

Everything that is printed and drawn was recorded by a logger. What is compared in the end: the accuracy of each
evaluation with the diagonal of its matrix, and the images with the data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import _pictures
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import ImageVisualizer
from pure_loop.loggers import InMemoryLogger

MEAN, STD = 0.3, 0.37
SHOWN = 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="confusion.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="five epochs instead of twenty")
    options = parser.parse_args(arguments)
    at = (1, 2, 3, 4, 5) if options.quick else (1, 2, 4, 8, 20)

    torch.set_num_threads(1)  # The network is small: more threads would only wait for each other.
    train, held_out = load()
    metrics = [pl.metrics.accuracy(), pl.metrics.confusion_matrix(10)]
    record = InMemoryLogger()
    with pl.random.seeded(options.seed):
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU())
        model.append(nn.Linear(32, 10))
    stream = pl.fit(
        model,
        train,
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.adam(lr=5e-4),
        max_duration=f"{at[-1]}ep",
        seed=options.seed,
        algorithms=[erase],
        evaluators={"held-out": pl.Evaluator(held_out, metrics=metrics)},
        eval_interval=lambda state: state.event is Event.EPOCH_END and state.timestamp.epoch in at,
        callbacks=[ImageVisualizer(images=SHOWN, mean=MEAN, std=STD)],
        loggers=[record],
    )
    pl.run(stream)

    matrices = [torch.tensor(rows) for _, _, rows in record.tables["held-out/confusion_matrix"]]
    _, accuracies = record.series("held-out/accuracy")
    evaluations = record.images["held-out/images"]
    tables = [rows for _, _, rows in record.tables["held-out/images"]]
    shots: list[Any] = []
    for (timestamp, images), rows, matrix, accuracy in zip(evaluations, tables, matrices, accuracies, strict=True):
        cases = [(image, target, guess) for image, (_, target, guess) in zip(images.numpy(), rows, strict=True)]
        shots.append((f"epoch {timestamp.epoch}", f"{accuracy:.1%} right", matrix.numpy(), cases))
        print(f"epoch {timestamp.epoch:3}: {accuracy:6.1%} right; {mistakes(matrix)}")
    print(f"\nthe last matrix, a row for each digit and a column for each prediction:\n{as_text(matrices[-1])}\n")
    _pictures.confusions(options.output, shots, record.images["train/images"][-1][1].numpy())

    total = sum(len(digits) for _, digits in held_out)
    diagonals = all(
        int(matrix.sum()) == total and round(accuracy * total) == int(matrix.trace())
        for matrix, accuracy in zip(matrices, accuracies, strict=True)
    )
    original = ((held_out[0][0][:SHOWN] * STD + MEAN) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    same = all(torch.equal(images, original) for _, images in evaluations)
    print(
        f"the diagonals {'are' if diagonals else 'ARE NOT'} the accuracies; the images {'are' if same else 'ARE NOT'}",
        end="",
    )
    print(f" those of the data\npicture: {options.output}")
    return 0 if diagonals and same else 1


@pl.algorithm(Event.BEFORE_TRAIN_BATCH)
def erase(state: pl.State) -> pl.State:
    """Erases a square of 3x3 pixels at a random place of each image."""
    images, digits = state.batch
    random = pl.random.generator(state.seed, "erase", state.timestamp.batch)
    corners = torch.randint(6, (2, len(images), 1), generator=random)
    places = torch.arange(8)
    down, across = ((places >= corner) & (places < corner + 3) for corner in corners)
    square = (down[:, :, None] & across[:, None, :]).unsqueeze(1)
    return state.replace(batch=(images.masked_fill(square, -MEAN / STD), digits))


def mistakes(matrix: Tensor) -> str:
    """The three most frequent."""
    wrong = matrix.clone().fill_diagonal_(0).flatten()
    counts, places = wrong.topk(3)
    named = [
        f"{place // 10} as {place % 10} ({count} times)"
        for count, place in zip(counts.tolist(), places.tolist(), strict=True)
        if count
    ]
    return f"most often wrong: {', '.join(named) or 'nothing'}"


def as_text(matrix: Tensor) -> str:
    head = "      " + "".join(f"{digit:5}" for digit in range(10))
    rows = [f"{digit:6}" + "".join(f"{count or '.':>5}" for count in row) for digit, row in enumerate(matrix.tolist())]
    return "\n".join([head, *rows])


def load() -> tuple[DataLoader[Any], list[tuple[Tensor, Tensor]]]:
    """Digits with noise, normalised: to train on, and in batches to evaluate."""
    raw = load_digits()
    random = torch.Generator().manual_seed(0)
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    images = (images + 0.25 * torch.randn(images.shape, generator=random)).clamp(0, 1)
    digits = torch.tensor(raw.target)
    order = torch.randperm(len(digits), generator=random)
    images, digits = (images[order] - MEAN) / STD, digits[order]
    train = DataLoader(TensorDataset(images[:1000], digits[:1000]), batch_size=32, shuffle=True)
    return train, list(zip(images[1000:].split(200), digits[1000:].split(200), strict=True))


if __name__ == "__main__":
    sys.exit(main())
