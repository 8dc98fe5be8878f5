"""A sweep with Optuna, in which trials are forks of one State, and pruned trials can be taken up again.

    python examples/sweep.py                 # 27 trials, successive halving; draws sweep.png

All trials begin as one: 60 batches are trained once, and each trial is a fork of the State there, with a learning
rate, a momentum, a weight decay and a label smoothing that Optuna suggests. They see the same batches. A generation of
nine is trained to the first rung, the better third of it from there to the second, and so on; the rest is pruned, and
Optuna suggests the next generation by what it has seen.

A trial that waits is a State in a dict, and so is one that was pruned: nothing is trained twice, and nothing is lost.
So the last part tests whether pruning was right: the best trial that was pruned at the first rung is trained to the
end, as if it had never been pruned. What is compared, bit for bit: the winner, which waited at each rung, with the same
settings trained from the fork to the end at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import _compare
import _job_pictures
import optuna
import torch
from optuna.trial import FrozenTrial, Trial, TrialState
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event

Curve: TypeAlias = list[tuple[float, float]]

TRUNK = 60
TRUNK_SETTINGS = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.0, "smoothing": 0.0}


def settings(trial: Trial) -> dict[str, float]:
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "momentum": trial.suggest_float("momentum", 0.5, 0.98),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
        "smoothing": trial.suggest_float("smoothing", 0.0, 0.2),
    }


class Halving(optuna.pruners.BasePruner):
    """Prunes all but the best third of the trials that have reached a rung."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        rung = trial.last_step
        reached = [other.intermediate_values for other in study.get_trials(deepcopy=False)]
        losses = sorted(values[rung] for values in reached if rung in values)
        return trial.intermediate_values[rung] > losses[(len(losses) - 1) // 3]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="sweep.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="two generations of six")
    options = parser.parse_args(arguments)
    generations, size = (2, 6) if options.quick else (options.generations, 9)
    rungs = [TRUNK + batches for batches in (40, 120, 360)]
    torch.set_num_threads(1)  # The network is small: more threads would only wait for each other.
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    train, validation = load()
    recipe = pl.Recipe(
        train,
        loss=nn.functional.cross_entropy,
        evaluators={"validation": validation},
        eval_interval="10ba",
        clip_grad=1.0,
        seed=options.seed,
        watch={Event.EVAL_AFTER_ALL, Event.FIT_END},
    )

    def train_until(batch: int, start: nn.Module | pl.State, chosen: Mapping[str, float]) -> tuple[pl.State, Curve]:
        """Settings are passed to each call, and none is in the State: a fork may have its own."""
        optimizer = pl.optim.sgd(chosen["lr"], momentum=chosen["momentum"], weight_decay=chosen["weight_decay"])
        smoothing = pl.algorithms.label_smoothing(chosen["smoothing"])
        stream = recipe.fit(start, optimizer=optimizer, algorithms=[smoothing], max_duration=f"{batch}ba")
        *evaluated, end = (state for _, state in stream)
        return end, [(float(state.timestamp.batch), loss(state)) for state in evaluated]

    with pl.random.seeded(options.seed):
        network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    trunk, trunk_curve = train_until(TRUNK, network, TRUNK_SETTINGS)
    print(f"the trunk: {TRUNK} batches, to a loss of validation of {loss(trunk):.3f}\n")
    print(f"{'trial':<7}{'lr':>7}  momentum   decay  smoothing   loss at {'':<7}".rstrip())
    print(f"{'':<43}   {'  '.join(f'batch {rung}' for rung in rungs)}")

    sampler = optuna.samplers.TPESampler(seed=options.seed, n_startup_trials=size)
    study = optuna.create_study(sampler=sampler, pruner=Halving())
    states: dict[int, pl.State] = {}
    curves: dict[int, Curve] = {}
    for _ in range(generations):
        alive = [study.ask() for _ in range(size)]
        for trial in alive:
            states[trial.number], curves[trial.number] = trunk, [trunk_curve[-1]]
            settings(trial)
        for rung in rungs:
            for trial in alive:
                states[trial.number], curve = train_until(rung, states[trial.number], trial.params)
                curves[trial.number] += curve
                trial.report(loss(states[trial.number]), rung)
            pruned = [trial for trial in alive if rung != rungs[-1] and trial.should_prune()]
            for trial in pruned:
                study.tell(trial, state=TrialState.PRUNED)
            alive = [trial for trial in alive if trial not in pruned]
        for trial in alive:
            study.tell(trial, loss(states[trial.number]))
        for trial in study.trials[-size:]:
            print(row(trial, rungs), flush=True)

    best = study.best_trial
    at_once, _ = train_until(rungs[-1], trunk, best.params)
    different = _compare.differences(at_once, states[best.number])

    # A pruned trial is a State like any other: take up the best of those that ended at the first rung.
    early = [trial for trial in study.trials if trial.last_step == rungs[0]]
    revived = min(early, key=lambda trial: trial.intermediate_values[rungs[0]])
    end, further = train_until(rungs[-1], states[revived.number], revived.params)

    trained = TRUNK + sum(states[trial.number].timestamp.batch - TRUNK for trial in study.trials)
    print(f"\ntrained {trained:,} batches; {len(study.trials)} whole runs are {len(study.trials) * rungs[-1]:,}")
    print(f"winner: trial {best.number}, a loss of {best.value:.3f}; trained from the fork at once it is ", end="")
    print(f"ANOTHER: {different[0]}" if different else "bitwise the same")
    print(f"trial {revived.number}, pruned at batch {rungs[0]} and taken up again, comes to {loss(end):.3f}: ", end="")
    print("rightly pruned" if loss(end) > loss(at_once) else "wrongly pruned")
    lines = [(curves[trial.number], trial.params["lr"], trial.state is TrialState.COMPLETE) for trial in study.trials]
    _job_pictures.sweep(options.output, trunk_curve, lines, curves[best.number], [curves[revived.number][-1], *further])
    print(f"picture: {options.output}")
    return 1 if different else 0


def loss(state: pl.State) -> float:
    return float(state.metrics["validation"]["loss"])


def row(trial: FrozenTrial, rungs: Sequence[int]) -> str:
    chosen = trial.params
    losses = "".join(
        f"{trial.intermediate_values[rung]:11.3f}" if rung in trial.intermediate_values else f"{'.':>11}"
        for rung in rungs
    )
    return (
        f"{trial.number:5}{chosen['lr']:9.4f}{chosen['momentum']:10.2f}{chosen['weight_decay']:8.4f}"
        f"{chosen['smoothing']:11.2f}{losses}"
    )


def load() -> tuple[DataLoader[Any], list[tuple[Tensor, Tensor]]]:
    """Digits with noise, to train on and for validation."""
    raw = load_digits()
    images, digits = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)
    images = images + 0.25 * torch.randn(images.shape, generator=pl.random.generator(0, "noise"))
    train = DataLoader(TensorDataset(images[:1200], digits[:1200]), batch_size=32, shuffle=True)
    return train, [(images[1200:], digits[1200:])]


if __name__ == "__main__":
    sys.exit(main())
