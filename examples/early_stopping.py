"""Early stopping: training ends where the validation loss has not become better, and the best State is restored.

    python examples/early_stopping.py        # trains, stops, restores, draws early_stopping.png

A network with many parameters learns 400 handwritten digits, of which a fifth have a wrong label. It first learns what
digits look like, and then the wrong labels by heart: the loss of training falls on, and that of validation rises.
`early_stopping` ends training after ten evaluations without a better validation loss, and `restored` gives the State of
the best one. What is compared in the end: these parameters with those of the State that the loop had at that
evaluation, bit for bit; and the accuracy on digits that neither training nor stopping has used.

An algorithm is a value whose memory is in the State, so the stopped State trains on like any other, without the
algorithm: what would have come is the dashed part of the lines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import _compare
import _pictures
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import early_stopping, restored

Points = list[tuple[float, float]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience", type=int, default=10, help="evaluations without a better validation loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="early_stopping.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="a patience of 3")
    options = parser.parse_args(arguments)
    patience = 3 if options.quick else options.patience

    torch.set_num_threads(1)  # The network is small: more threads would only wait for each other.
    train, val, test = load(options.seed)
    recipe = pl.Recipe(
        train,
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.adam(lr=2e-3),
        max_duration="1000ep",
        evaluators={"val": val},
        algorithms=[early_stopping("val/loss", patience=patience)],
        seed=options.seed,
    )
    with pl.random.seeded(options.seed):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    losses: Points = []
    run = list(epochs(recipe.fit(model), losses))
    stopped = run[-1]
    best = restored(stopped)

    # The loop's own State at the best evaluation; `restored` knows its parameters from the algorithm's memory.
    kept = min(run, key=lambda state: float(state.metrics["val"]["loss"]))
    same = not _compare.differences(dict(best.params), dict(kept.params))

    on: Points = []
    longer = recipe.replace(max_duration=f"{stopped.timestamp.epoch + 2 * patience}ep", algorithms=())
    further = list(epochs(longer.fit(stopped.replace(stop=False)), on))

    states = {"the best, restored": best, "where it stopped": stopped, "trained on": further[-1]}
    print(f"stopped after epoch {stopped.timestamp.epoch}: no better validation loss in {patience} evaluations\n")
    print(f"{'':<20}epoch   loss of validation   test: loss   right")
    for name, state in states.items():
        epoch = kept.timestamp.epoch if state is best else state.timestamp.epoch
        of_val, of_test = pl.run(longer.evaluate(state, {"val": val, "test": test})).metrics.values()
        loss, test_loss, right = of_val["loss"], of_test["loss"], of_test["accuracy"]
        print(f"{name:<20}{epoch:5}   {loss:18.4f}   {test_loss:10.4f}   {right:5.1%}")
    equal = "are" if same else "ARE NOT"
    print(f"\nthe restored parameters {equal} those of epoch {kept.timestamp.epoch}, bit for bit")
    _pictures.stopping(
        options.output,
        {"training": (losses, on), "validation": (validation(run), validation(further))},
        best=float(kept.timestamp.epoch),
        stopped=float(stopped.timestamp.epoch),
        patience=patience,
    )
    print(f"picture: {options.output}")
    return 0 if same and stopped.stop else 1


def epochs(stream: pl.Stream, losses: Points) -> Iterable[pl.State]:
    """The State at the end of each epoch, with its evaluation; and the mean loss of training in each epoch."""
    of_epoch: list[Tensor] = []
    for event, state in stream:
        if event is Event.BATCH_END:
            of_epoch.append(state.loss)
        if event is Event.EPOCH_CHECKPOINT:
            losses.append((float(state.timestamp.epoch), float(torch.stack(of_epoch).mean())))
            of_epoch.clear()
            yield state


def validation(run: list[pl.State]) -> Points:
    return [(float(state.timestamp.epoch), float(state.metrics["val"]["loss"])) for state in run]


def load(seed: int) -> tuple[DataLoader[Any], list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Digits to train on, a fifth of them with a wrong label; and digits for validation and for the test."""
    raw = load_digits()
    images, digits = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)
    order = torch.randperm(len(digits), generator=pl.random.generator(seed, "split"))
    train, val, test = order[:400], order[400:1000], order[1000:]
    labels = digits[train]
    labels[:80] = (labels[:80] + torch.randint(1, 10, (80,), generator=pl.random.generator(seed, "labels"))) % 10
    loader = DataLoader(TensorDataset(images[train], labels), batch_size=32, shuffle=True)
    return loader, [(images[val], digits[val])], [(images[test], digits[test])]


if __name__ == "__main__":
    sys.exit(main())
