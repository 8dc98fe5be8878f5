"""Population-based training: sixteen networks at sixteen rates, of which the bad ones go on from the good ones.

    python examples/population_based.py      # one run of 16 members on handwritten digits; draws population_based.png

Learning rates from 0.001 to 3, of which nobody knows the best, train in one run: a step of all of them is one
vectorised step. After each epoch the worst fifth takes the State of one of the best fifth, and its rate, times 0.8 or
1.25. So rates are found while the networks train, and the end is a population of good ones.

What is compared in the end: the run, resumed from the State in its middle, with the whole one, bit for bit; and the
best member of it with the best of the same networks that keep their rates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import _compare
import _job_pictures
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import population_based, rounds


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="6 epochs of 6 members")
    parser.add_argument("--output", default="population_based.png", help="where the picture is written")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    members, epochs = (6, 6) if options.quick else (options.members, 20)
    factors = pl.each(torch.logspace(-3, 0.5, members))
    train, held_out = load()
    settings: dict[str, Any] = {
        "loss": nn.functional.cross_entropy,
        "evaluators": {"val": held_out},
        "max_duration": f"{epochs}ep",
        "watch": {Event.EPOCH_CHECKPOINT},
    }
    based = population_based("val/accuracy", lr_scale=factors)
    models = pl.ensemble(network, seeds=range(members))

    states = [state for _, state in pl.fit(models, train, optimizer=sgd(1.0), algorithms=[based], **settings)]
    alone = pl.run(pl.fit(models, train, optimizer=sgd(factors), **settings))
    end, middle = states[-1], states[epochs // 2]
    resumed = pl.run(pl.fit(middle, train, optimizer=sgd(1.0), algorithms=[based], **settings))
    different = _compare.differences(resumed, end)

    print(f"{'epoch':<7}{'copies':>7}{'lr':>18}{'accuracy':>18}")
    accuracies = [state.metrics["val"]["accuracy"] for state in states]
    for epoch, (found, accuracy) in enumerate(zip(rounds(end), accuracies, strict=True), 1):
        copies = sum(source != number for number, source in enumerate(found.sources))
        rates = f"{min(found.lr_scales):.3f} to {max(found.lr_scales):.3f}"
        percents = f"{100 * float(accuracy.min()):.1f}% to {100 * float(accuracy.max()):.1f}%"
        print(f"{epoch:<7}{copies:>7}{rates:>18}{percents:>18}")
    best, kept = (state.metrics["val"]["accuracy"] for state in (end, alone))
    print(f"\nthe population: median {100 * float(best.median()):.1f}%, best {100 * float(best.max()):.1f}%")
    print(f"rates as they were: median {100 * float(kept.median()):.1f}%, best {100 * float(kept.max()):.1f}%")
    print("resumed from its middle: " + (f"ANOTHER: {different[0]}" if different else "bitwise the same"))
    _job_pictures.population(options.output, rounds(end), factors.values, [each.tolist() for each in accuracies])
    print(f"picture: {options.output}")
    return 1 if different else 0


def sgd(lr: Any) -> pl.optim.Optimizer:
    return pl.optim.sgd(lr=lr, momentum=0.9)


def load() -> tuple[DataLoader[Any], list[tuple[Tensor, Tensor]]]:
    """Digits with noise, to train on and held out."""
    raw = load_digits()
    images, digits = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)
    images = images + 0.25 * torch.randn(images.shape, generator=pl.random.generator(0, "noise"))
    train = DataLoader(TensorDataset(images[:1200], digits[:1200]), batch_size=64, shuffle=True)
    return train, [(images[1200:], digits[1200:])]


if __name__ == "__main__":
    sys.exit(main())
