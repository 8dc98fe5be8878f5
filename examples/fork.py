"""A State is a value: keep one, fork it as often as you like, and run the forks side by side.

    python examples/fork.py                  # trains, forks, draws fork.png

A small network learns handwritten digits. The State at half time is kept and forked four times: with the settings of
the run, with a tenth of the learning rate, with three times as much, and with other random numbers (a shuffled loader
draws other batches). The four streams are consumed in turn, event by event, in one process: they share nothing that
changes. In the end the kept State is compared with a copy from before, and the first fork with the run it repeats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import _compare
import _pictures
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event

LR = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="fork.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="80 batches")
    options = parser.parse_args(arguments)
    batches = 80 if options.quick else options.batches
    train, held_out = load()
    recipe = pl.Recipe(
        train,
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.sgd(lr=LR, momentum=0.9),
        max_duration=f"{batches}ba",
        evaluators={"held-out": held_out},
        eval_interval=f"{batches // 40}ba",
        seed=options.seed,
    )
    torch.set_num_threads(1)  # The network is tiny: more threads would only wait for each other.
    with pl.random.seeded(options.seed):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    run = [state for event, state in recipe.fit(model) if event is Event.BATCH_CHECKPOINT]
    kept = run[batches // 2 - 1]
    before = _compare.copied(kept)

    # Going on takes the State and the recipe. The learning rate is of the recipe, and may be another one in a call; the
    # seed is a part of the State, so that other random numbers are another State.
    forks = {
        "as before": (kept, LR),
        "a tenth of the rate": (kept, LR / 10),
        "three times the rate": (kept, LR * 3),
        "another seed": (kept.replace(seed=options.seed + 1), LR),
    }
    streams = [recipe.fit(start, optimizer=pl.optim.sgd(lr=lr, momentum=0.9)) for start, lr in forks.values()]
    lines: dict[str, list[pl.State]] = {name: [] for name in forks}
    for side_by_side in zip(*streams, strict=True):
        for name, (event, state) in zip(forks, side_by_side, strict=True):
            if event is Event.BATCH_CHECKPOINT:
                lines[name].append(state)

    print(f"\nforked at batch {kept.timestamp.batch}, where the loss on held-out digits was {loss(kept):.4f}\n")
    print(f"{'fork':<22}learning rate   seed   loss at batch {batches}   accuracy")
    for name, (start, lr) in forks.items():
        last = lines[name][-1]
        accuracy = float(last.metrics["held-out"]["accuracy"])
        print(f"{name:<22}{lr:13.3f}   {start.seed:4}   {loss(last):{17 + len(str(batches)) - 3}.4f}   {accuracy:8.1%}")

    unchanged = not _compare.differences(kept, before)
    half = zip(run[batches // 2 :], lines["as before"], strict=True)
    repeated = not any(_compare.differences(a, b) for a, b in half)
    print(f"\nthe kept State is {'unchanged' if unchanged else 'CHANGED'}: {len(before)} leaves compared, bitwise")
    print(f"the first fork {'repeats' if repeated else 'DOES NOT REPEAT'} the run: {batches // 2} States, bitwise")
    draw(options.output, run[: batches // 2], lines)
    print(f"picture: {options.output}")
    return 0 if unchanged and repeated else 1


def load() -> tuple[DataLoader[Any], list[tuple[Tensor, Tensor]]]:
    raw = load_digits()
    images, digits = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images, digits = images[order], digits[order]
    train = DataLoader(TensorDataset(images[:1200], digits[:1200]), batch_size=32, shuffle=True)
    return train, [(images[1200:], digits[1200:])]


def loss(state: pl.State) -> float:
    return float(state.metrics["held-out"]["loss"])


def draw(path: str, run: list[pl.State], forks: dict[str, list[pl.State]]) -> None:
    def series(states: list[pl.State]) -> list[tuple[float, float]]:
        """The evaluations: a State carries the last one, so the others are left out."""
        found = [(float(s.timestamp.batch), loss(s)) for s in states if s.metrics]
        return [point for point, before in zip(found, [(0.0, 0.0), *found], strict=False) if point[1] != before[1]]

    _pictures.forks(
        path, series(run), {name: series(states) for name, states in forks.items()}, title="Loss on held-out digits"
    )


if __name__ == "__main__":
    sys.exit(main())
