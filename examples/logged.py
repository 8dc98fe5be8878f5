"""One run in three records, JSON lines, TensorBoard and W&B, killed twice and resumed: no step is lost or there twice.

    pip install '.[docs,plot,tensorboard,wandb]'
    python examples/logged.py              # writes logged.png
    python examples/logged.py --keep runs  # keeps the records: tensorboard --logdir runs/board, wandb sync runs/wandb/*

A network learns handwritten digits in a process of its own, which this one kills with SIGKILL (which nothing can catch)
and starts again. ``autoresume=`` resumes the training, and each logger its record. In the end the three records are
read by what each was written for, and compared with the losses of a run that was not killed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import _pictures
import _records
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop.loggers import InMemoryLogger, JSONLinesLogger, TensorBoardLogger, WandBLogger

LOSS = "train/loss"


def model() -> nn.Module:
    torch.set_num_threads(1)  # The network is tiny: more threads would only wait for each other.
    with pl.random.seeded(0):
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def recipe(epochs: int) -> pl.Recipe:
    raw = load_digits()
    images, digits = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)
    return pl.Recipe(
        DataLoader(TensorDataset(images[300:], digits[300:]), batch_size=32, shuffle=True),
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.adamw(lr=pl.schedules.cosine("1dur", peak=3e-3, warmup="20ba")),
        max_duration=f"{epochs}ep",
        evaluators={"held-out": DataLoader(TensorDataset(images[:300], digits[:300]), batch_size=300)},
    )


def train(folder: Path, epochs: int) -> None:
    """What is killed: it says how many batches have ended."""
    loggers = [
        JSONLinesLogger(folder / "metrics.jsonl", flush="5ba"),
        TensorBoardLogger(folder / "board", flush="5ba"),
        WandBLogger("digits", folder=folder, mode="offline", flush="5ba"),
    ]
    saver = pl.callbacks.CheckpointSaver(folder / "checkpoints", interval="25ba", keep_last=2)
    for _, state in recipe(epochs).fit(model(), loggers=loggers, autoresume=saver, watch={"fit_start", "batch_end"}):
        print(state.timestamp.batch, flush=True)


def run(folder: Path, epochs: int, *, kill_at: int | None) -> tuple[int, int]:
    """Run the process, and kill it once this many batches have ended; from which batch on it trained, and to which."""
    command = [sys.executable, __file__, "--train", str(folder), "--epochs", str(epochs)]
    environment = {**os.environ, "WANDB_SILENT": "true"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        batches = []
        for line in process.stdout:
            batches.append(int(line))
            if kill_at is not None and batches[-1] >= kill_at and process.poll() is None:
                process.kill()
    if kill_at is None and process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    print(f"batches {batches[0] + 1:4} to {batches[-1]:4}  {'done' if kill_at is None else 'killed'}")
    return batches[0], batches[-1]


def compare(records: dict[str, list[_records.Values]], whole: _records.Values) -> bool:
    """Print what each record has, and whether it is that of a run that was not killed."""
    print(f"\n{'record':<12}steps   twice   missing   losses")
    same = True
    for name, processes in records.items():
        values = [pair for process in processes for pair in process]
        steps = [step for step, _ in values]
        missing = len({step for step, _ in whole} - set(steps))
        # TensorBoard keeps numbers of 32 bits.
        losses = torch.tensor([value for _, value in sorted(values)])
        equal = not missing and torch.equal(losses, torch.tensor([value for _, value in whole]))
        same = same and equal and len(steps) == len(set(steps))
        print(
            f"{name:<12}{len(set(steps)):5}{len(steps) - len(set(steps)):8}{missing:10}   "
            f"{'those of a run that was not killed' if equal else 'OTHERS'}"
        )
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--keep", type=Path, help="where the records stay")
    parser.add_argument("--output", default="logged.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="three epochs")
    parser.add_argument("--train", type=Path, help="train in this folder, to be killed")
    options = parser.parse_args(arguments)
    epochs = 3 if options.quick else options.epochs
    if options.train:
        train(options.train, options.epochs)
        return 0
    if options.keep and options.keep.exists():
        parser.error(f"--keep {options.keep}: it is there already; give the name of a new folder")
    memory = InMemoryLogger()
    recipe(epochs).run(model(), loggers=[memory])
    whole = list(zip(*memory.series(LOSS), strict=True))
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        starts, spans = [], []
        for kill_at in (len(whole) * 2 // 5, len(whole) * 3 // 4, None):
            starts.append(time.time())
            spans.append(run(folder, epochs, kill_at=kill_at))
        records = {
            "JSON lines": _records.json_lines(folder / "metrics.jsonl", starts, LOSS),
            "TensorBoard": _records.tensorboard(folder / "board", LOSS),
            "W&B": _records.wandb(folder, LOSS),
        }
    same = compare(records, whole)
    _pictures.records(options.output, records, spans, whole)
    print(f"\npicture: {options.output}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
