"""k-fold cross-validation with scikit-learn: a fold is a function call, so it is the same alone as among the others.

    python examples/kfold.py                 # three networks, five folds each; draws kfold.png

`StratifiedKFold` splits 600 handwritten digits five times, and three networks are trained on four parts and predict
the fifth. That gives a table of accuracies, a row for each network, and for each digit a prediction by a network that
was not trained on it: the confusion matrix of the best network shows those of all 600.

A fold takes its random numbers from a seed of its own, and leaves nothing behind. What is compared in the end: the last
fold of the best network, trained once more and alone, with the fold after fourteen others, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import TypeAlias

import _compare
import _job_pictures
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import pure_loop as pl
from pure_loop import Event

Network: TypeAlias = Callable[[], nn.Module]

NETWORKS: dict[str, Network] = {
    "linear": lambda: nn.Linear(64, 10),
    "two layers": lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(512, 10)),
    ),
}


def fold(recipe: pl.Recipe, network: Network, data: TensorDataset, train: Sequence[int], seed: int) -> pl.State:
    """One network, trained on some of the digits."""
    with pl.random.seeded(seed):
        model = network()
    return recipe.run(model, train_dataloader=DataLoader(Subset(data, train), batch_size=32, shuffle=True), seed=seed)


def predicted(state: pl.State, images: Tensor) -> Tensor:
    stream = pl.predict(state, [(images, None)])
    return next(state.outputs for event, state in stream if event is Event.PREDICT_BATCH_END).argmax(dim=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="kfold.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="three folds of four epochs")
    options = parser.parse_args(arguments)
    folds, epochs = (3, 4) if options.quick else (options.folds, options.epochs)
    torch.set_num_threads(1)  # The networks are small: more threads would only wait for each other.

    images, digits = load()
    data = TensorDataset(images, digits)
    splits = list(StratifiedKFold(folds, shuffle=True, random_state=options.seed).split(images, digits))
    schedule = pl.schedules.cosine("1dur", peak=5e-3, warmup="0.1dur")
    optimizer = pl.optim.adamw(lr=schedule, weight_decay=0.05)
    recipe = pl.Recipe(loss=nn.functional.cross_entropy, optimizer=optimizer, max_duration=f"{epochs}ep")
    seeds = [pl.random.derive(options.seed, "fold", number) for number in range(folds)]

    print(f"{len(digits)} digits with noise, {folds} folds: the accuracy on the fold that was left out\n")
    print(f"{'network':<14}{''.join(f'  fold {number + 1}' for number in range(folds))}    mean ± deviation")
    accuracies: dict[str, list[float]] = {}
    guesses: dict[str, Tensor] = {}
    states: dict[str, list[pl.State]] = {}
    for name, network in NETWORKS.items():
        states[name] = [
            fold(recipe, network, data, train, seed) for (train, _), seed in zip(splits, seeds, strict=True)
        ]
        guesses[name] = torch.full_like(digits, -1)
        for state, (_, left_out) in zip(states[name], splits, strict=True):
            guesses[name][left_out] = predicted(state, images[left_out])
        right = guesses[name] == digits
        accuracies[name] = [float(right[left_out].double().mean()) for _, left_out in splits]
        cells = "".join(f"{accuracy:8.1%}" for accuracy in accuracies[name])
        print(f"{name:<14}{cells}{mean(accuracies[name]):8.1%} ± {stdev(accuracies[name]):.1%}", flush=True)

    best = max(accuracies, key=lambda name: mean(accuracies[name]))
    matrix = torch.zeros(10, 10, dtype=torch.int64)
    matrix.index_put_((digits, guesses[best]), torch.tensor(1), accumulate=True)
    wrong = (guesses[best] != digits).nonzero().flatten().tolist()
    print(f"\n{best}: {len(wrong)} of {int(matrix.sum())} digits are wrong, each predicted by a network without it")
    mistakes = [(images[at].view(8, 8).numpy(), int(digits[at]), int(guesses[best][at])) for at in wrong]
    _job_pictures.kfold(options.output, accuracies, best, matrix.numpy(), mistakes)

    alone = fold(recipe, NETWORKS[best], data, splits[-1][0], seeds[-1])
    different = _compare.differences(alone, states[best][-1])
    print(f"fold {folds} alone is {'bitwise the same' if not different else f'ANOTHER: {different[0]}'}", end="")
    print(f": {len(_compare.leaves(alone))} leaves compared\npicture: {options.output}")
    return 1 if different or int(matrix.sum()) != len(digits) else 0


def load() -> tuple[Tensor, Tensor]:
    """Digits with noise: without it, there is little to tell the networks apart by."""
    raw = load_digits()
    images, digits = torch.tensor(raw.data[:600], dtype=torch.float32) / 16, torch.tensor(raw.target[:600])
    return images + 0.25 * torch.randn(images.shape, generator=pl.random.generator(0, "noise")), digits


if __name__ == "__main__":
    sys.exit(main())
