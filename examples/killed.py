"""A run that is killed again and again, and comes to the same numbers as one that is not.

    python examples/killed.py                # six kills; prints where each run was killed, and resumed
    python examples/killed.py --kills 20

A network with dropout, BatchNorm and a moving average of its weights learns handwritten digits. The training runs in a
process of its own, which this one kills with SIGKILL (which nothing can catch) at random moments, and starts again;
``autoresume=`` alone resumes it. In the end the State is compared with that of a run that was not
killed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import _compare
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event


def recipe(folder: Path, epochs: int) -> pl.Recipe:
    raw = load_digits()
    images, digits = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)
    return pl.Recipe(
        DataLoader(TensorDataset(images, digits), batch_size=32, shuffle=True),
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.adamw(lr=pl.schedules.cosine("1dur", peak=3e-3, warmup="20ba")),
        max_duration=f"{epochs}ep",
        algorithms=[pl.algorithms.ema(half_life="50ba")],
        autoresume=pl.callbacks.CheckpointSaver(folder, interval="5ba", keep_last=3),
    )


def model() -> nn.Module:
    with pl.random.seeded(0):
        return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def train(folder: Path, epochs: int) -> None:
    """What is killed: it says where it starts, and how far it has come."""
    torch.set_num_threads(1)
    for event, state in recipe(folder, epochs).fit(model()):
        if event is Event.FIT_START or event is Event.BATCH_END:
            print(state.timestamp.batch, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--train", type=Path, help="train in this folder, to be killed")
    parser.add_argument("--quick", action="store_true", help="two kills, three epochs")
    options = parser.parse_args(arguments)
    if options.train:
        train(options.train, options.epochs)
        return 0
    kills, epochs = (2, 3) if options.quick else (options.kills, options.epochs)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "killed"
        for attempt in range(kills + 1):
            run(folder, epochs, kill=attempt < kills)
        killed = newest(folder)
        train_quietly(Path(scratch) / "whole", epochs)
        whole = newest(Path(scratch) / "whole")
    different = _compare.differences(killed, whole)
    same = not different
    print(
        f"\nthe last State is {'the same as' if same else 'ANOTHER THAN'} that of a run that was not killed: "
        f"{len(_compare.leaves(whole))} leaves compared, bitwise"
    )
    return 0 if same else 1


def run(folder: Path, epochs: int, *, kill: bool) -> None:
    """Start the command, and kill it a moment after it has begun to train; or let it end."""
    command = [sys.executable, __file__, "--train", str(folder), "--epochs", str(epochs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        start = int(process.stdout.readline())
        if kill:
            time.sleep(random.uniform(0.05, 0.4))
            process.kill()
        reached = [start, *map(int, process.stdout.read().split())][-1]
    if not kill and process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    print(f"from batch {start:3}  to batch {reached:3}  {'killed' if kill else 'done'}")


def train_quietly(folder: Path, epochs: int) -> None:
    torch.set_num_threads(1)
    recipe(folder, epochs).run(model())


def newest(folder: Path) -> pl.State:
    path = pl.latest_path(folder)
    assert path is not None
    return pl.load(path, model=model())


if __name__ == "__main__":
    sys.exit(main())
