"""A sweep of 32 learning rates as one run.

    python examples/sweep_of_rates.py              # 30 epochs; draws sweep_of_rates.png

32 networks are the members of one State, and each batch is one vectorised step of all of them. All begin with the same
weights and see the same batches, and each has a learning rate of its own: so what differs at the end is the rate's work
alone. They train in float64, and two of them are compared with the same network trained by itself.

What it costs is measured in this process: the time of the one run, first call included, and beside it 32 times that of
the faster one of two single runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import _member_pictures
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event


def make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)).double()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="sweep_of_rates.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="eight rates, four epochs")
    options = parser.parse_args(arguments)
    count, epochs = (8, 4) if options.quick else (options.rates, options.epochs)
    torch.set_num_threads(1)  # The networks are small: more threads would only wait for each other.

    rates = [10.0 ** (5 * number / (count - 1) - 4) for number in range(count)]  # from 1e-4 to 10
    train, validation = load()
    recipe = pl.Recipe(
        train,
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.sgd(lr=pl.each(rates), momentum=0.9),
        max_duration=f"{epochs}ep",
        evaluators={"validation": validation},
        seed=options.seed,
        watch={Event.EVAL_AFTER_ALL, Event.FIT_END},
    )

    # One seed for all: the same first weights and dropout masks. With range(count) each would have its own.
    losses, end, seconds = trained(recipe, pl.ensemble(make_network, seeds=[options.seed] * count))
    accuracies = end.metrics["validation"]["accuracy"]
    assert isinstance(accuracies, Tensor)
    best = int(accuracies.argmax())
    print(f"{'rate':>10}  {'loss':>7}  accuracy")
    for rate, loss, accuracy in zip(rates, losses[-1].tolist(), accuracies.tolist(), strict=True):
        print(f"{rate:10.5f}  {loss:7.3f}  {accuracy:7.1%}{'  the best' if rate == rates[best] else ''}")

    single, apart = [], 0.0
    for number in (0, best):
        with pl.random.seeded(options.seed):
            network = make_network()
        alone = recipe.replace(optimizer=pl.optim.sgd(lr=rates[number], momentum=0.9))
        _, state, taken = trained(alone, network)
        single.append(taken)
        member = end.member(number)
        apart = max(apart, *(float((member.params[name] - state.params[name]).abs().max()) for name in state.params))
    one_by_one = count * min(single)
    print(f"\nmembers 0 and {best} differ from the same network trained by itself by at most {apart:.1e}")
    print(f"one run of {count} members: {seconds:.1f} s; {count} times one run: {one_by_one:.1f} s", end="")
    print(f" ({min(single):.2f} s each)")
    curves = [[(epoch, float(loss[number])) for epoch, loss in enumerate(losses, 1)] for number in range(count)]
    _member_pictures.rates(options.output, rates, curves, accuracies.tolist(), seconds, one_by_one)
    print(f"picture: {options.output}")
    return 0 if apart < 1e-12 else 1


def trained(recipe: pl.Recipe, start: Any) -> tuple[list[Tensor], pl.State, float]:
    """The losses of validation after each epoch, the State at the end, and how many seconds it took."""
    losses = []
    begun = time.perf_counter()
    for event, state in recipe.fit(start):
        if event is Event.EVAL_AFTER_ALL:
            losses.append(torch.as_tensor(state.metrics["validation"]["loss"]))  # of members, shape (members,)
    return losses, state, time.perf_counter() - begun


def load() -> tuple[DataLoader[Any], list[tuple[Tensor, Tensor]]]:
    """Digits with noise, to train on and for validation."""
    raw = load_digits()
    images, digits = torch.tensor(raw.data) / 16, torch.tensor(raw.target)
    images = images + 0.25 * torch.randn(images.shape, generator=pl.random.generator(0, "noise"))
    train = DataLoader(TensorDataset(images[:1200], digits[:1200]), batch_size=32, shuffle=True)
    return train, [(images[1200:], digits[1200:])]


if __name__ == "__main__":
    sys.exit(main())
