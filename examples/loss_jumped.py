"""The loss jumped, and a refactoring no longer reproduces: two searches in a recorded run.

    python examples/loss_jumped.py           # trains, searches, draws loss_jumped.png

A network learns scikit-learn's digits, and one of the 1437 images was loaded in other units: its pixels are 1000 times
too large. A flight recorder keeps a State every 20 batches and a line for each batch. Afterwards `pl.rewind` visits the
batch at which the loss rose most, bit for bit the one that was trained, and `pl.inspect` names the sample in the
dataset. What is checked in the end: that it is the image that was spoiled.

Then the same run is recorded once more from code that was refactored, in which weight decay became 0.02 where it was
0.01. `pl.diff` names the batch, the stage and the leaf in which the two records part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _pictures
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl

SPOILED = 1234  # the index of the image


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="loss_jumped.png", help="where the picture goes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # The network is small: more threads would only wait for each other.
    with tempfile.TemporaryDirectory() as folder:
        named, stream = search_sample(Path(folder, "run"), options.seed)
        divergence, losses = search_refactoring(Path(folder), options.seed)
        _pictures.searches(options.output, stream.plot, losses, divergence.timestamp.batch, divergence.by)
    print(f"the picture is {options.output}")
    if named != SPOILED or divergence.by != "optimizer":
        print(f"wrong: the sample is {named}, and the stage {divergence.by!r}")
        return 1
    return 0


def load(*, spoiled: bool) -> DataLoader[Any]:
    images, digits = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32)[:1437] / 16
    if spoiled:
        inputs[SPOILED] *= 1000
    return DataLoader(TensorDataset(inputs, torch.tensor(digits)[:1437]), batch_size=32, shuffle=True)


def network() -> nn.Module:
    with pl.random.seeded(0):
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def recipe_of(data: DataLoader[Any], seed: int, weight_decay: float = 0.01) -> pl.Recipe:
    optimizer = pl.optim.adamw(lr=1e-3, weight_decay=weight_decay)
    return pl.Recipe(data, loss=cross_entropy, optimizer=optimizer, max_duration="6ep", seed=seed)


def record(folder: Path, recipe: pl.Recipe) -> list[tuple[int, float]]:
    """Train and record; the batches and their losses."""
    recorder = pl.callbacks.FlightRecorder(folder, keep="20ba", digest="10ba")
    stream = recipe.fit(network(), callbacks=[recorder], watch={"batch_end"})
    return [(state.timestamp.batch, float(state.loss)) for _, state in stream]


def search_sample(folder: Path, seed: int) -> tuple[int | None, Any]:
    """The sample that made the loss jump."""
    recipe = recipe_of(load(spoiled=True), seed)
    record(folder, recipe)
    stream = recipe.rewind(network(), folder, "spike", "batch_start")
    event, state = next(stream)
    report = recipe.inspect(state)
    print(f"the loss rose most at batch {state.timestamp.batch}; rewound to {event.name}")
    print(report, end="\n\n")
    return report.samples[0].index, stream


def search_refactoring(folder: Path, seed: int) -> tuple[Any, list[list[tuple[int, float]]]]:
    """Where a run parts from that of other code, and the losses of both."""
    data = load(spoiled=False)
    recipes = {"before": recipe_of(data, seed), "after": recipe_of(data, seed, weight_decay=0.02)}
    losses = [record(folder / name, recipe) for name, recipe in recipes.items()]
    a, b = ((folder / name, network(), recipe.fit) for name, recipe in recipes.items())
    divergence = pl.diff(a, b)
    print(divergence)
    return divergence, losses


if __name__ == "__main__":
    sys.exit(main())
