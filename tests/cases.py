"""Cases: a plan, a real model, real data and settings, drawn by Hypothesis; and how to run them.

A case is a value, so that a law can run it several times: with other callbacks, from a kept State, in
a loop that is deliberately wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop.order import EvaluatorPlan, Plan

FEATURES, CLASSES = 4, 3

Pairs = list[tuple[pl.Event, pl.State]]


class Unsized:
    """An iterable without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def mlp() -> nn.Module:
    """Dropout draws random numbers, BatchNorm keeps buffers."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, CLASSES))


def plain() -> nn.Module:
    """Nothing whose result depends on how a batch is split."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


class Tied(nn.Module):
    """A weight used in two places, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(FEATURES, CLASSES)
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.decode(torch.relu(self.encode(x)))))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {"plain": plain, "mlp": mlp, "tied": Tied}


def batches(sizes: tuple[int, ...], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, FEATURES, generator=generator), torch.randint(CLASSES, (n,), generator=generator))
        for n in sizes
    ]


@attrs.frozen(kw_only=True)
class Case:
    """Everything that a run of ``fit`` is made from."""

    plan: Plan
    model: str = "plain"
    seed: int = 0
    optimizer: str = "adamw"
    precision: str = "fp32"
    clip_grad: float | None = None

    def module(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return MODELS[self.model]()

    def arguments(self) -> dict[str, Any]:
        plan = self.plan
        optimizers = {
            "adamw": lambda: pl.optim.adamw(lr=pl.schedules.linear(0.05, 0.01, "12ba")),
            "sgd": lambda: pl.optim.sgd(lr=0.05, momentum=0.9),
        }
        return {
            "loss": nn.functional.cross_entropy,
            "task": pl.Task(tokens=lambda batch: plan.tokens_per_sample * len(batch[0])),
            "optimizer": optimizers[self.optimizer](),
            "max_duration": plan.max_duration,
            "microbatch_size": plan.microbatch_size,
            "seed": self.seed,
            "precision": self.precision,
            "clip_grad": self.clip_grad,
            "evaluators": {
                label: pl.Evaluator(
                    batches(each.batches, seed=7), interval=each.interval, microbatch_size=each.microbatch_size
                )
                for label, each in plan.evaluators.items()
            },
            "eval_interval": plan.eval_interval,
            "batches_per_epoch": plan.batches_per_epoch,
            "iteration_length": plan.iteration_length,
            "order": plan.order,
            "clock": itertools.count(0.0, plan.seconds_per_batch).__next__,
        }

    def data(self) -> Any:
        listed = batches(self.plan.batches, seed=self.seed + 1)
        return listed if self.plan.sized else Unsized(listed)

    def stream(self, fit: Callable[..., Any] = pl.fit, start: pl.State | None = None, **overrides: Any) -> Any:
        return fit(self.module() if start is None else start, self.data(), **{**self.arguments(), **overrides})

    def run(self, fit: Callable[..., Any] = pl.fit, start: pl.State | None = None, **overrides: Any) -> Pairs:
        return list(self.stream(fit, start, **overrides))


_SMALL = st.integers(1, 4)


def _intervals(*, fractions: bool) -> st.SearchStrategy[str]:
    units = [st.builds("{}ep".format, st.integers(0, 2)), st.builds("{}ba".format, st.integers(1, 4))]
    units += [st.builds("{}sp".format, st.integers(1, 12)), st.builds("{}tok".format, st.integers(1, 30))]
    units += [st.builds("{}s".format, st.integers(1, 4))]
    if fractions:
        units.append(st.sampled_from(["0.1dur", "0.25dur", "0.5dur", "1dur"]))
    return st.one_of(units)


@st.composite
def plans(draw: st.DrawFn, *, orders: tuple[str, ...] = ("current",), iterations: bool = True) -> Plan:
    """Plans over every unit of duration: ragged batches, several evaluators, lengths unknown, epochs cut."""
    sizes = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    order = draw(st.sampled_from(orders))
    tokens = draw(st.integers(1, 3))
    iteration = None
    if iterations and order == "current":
        lengths = [st.builds("{}ep".format, st.integers(1, 2)), st.builds("{}tok".format, st.integers(1, 25))]
        iteration = draw(st.none() | st.one_of(lengths))
    durations = [
        st.builds("{}ep".format, st.integers(0, 3)),
        st.builds("{}ba".format, st.integers(0, 9)),
        st.builds("{}sp".format, st.integers(0, 30)),
        st.builds("{}tok".format, st.integers(0, 60)),
        st.builds("{}s".format, st.integers(1, 12)),
    ]
    if iteration is not None:
        durations.append(st.builds("{}iter".format, st.integers(1, 3)))
    duration = draw(st.one_of(durations))
    intervals = _intervals(fractions=not duration.endswith("iter"))
    labels = draw(st.lists(st.sampled_from(["val", "test", "train"]), unique=True, max_size=2))
    evaluators = {
        label: EvaluatorPlan(
            batches=tuple(draw(st.lists(_SMALL, min_size=1, max_size=2))),
            interval=draw(st.none() | intervals),
            microbatch_size=draw(st.none() | _SMALL),
        )
        for label in labels
    }
    return Plan(
        batches=sizes,
        max_duration=duration,
        microbatch_size=draw(st.none() | _SMALL),
        evaluators=evaluators,
        eval_interval=draw(intervals),
        tokens_per_sample=tokens,
        seconds_per_batch=1.0,
        # More than there are, too: a loader without a length is then shorter than it is known to be.
        batches_per_epoch=draw(st.none() | st.integers(1, len(sizes) + 2)),
        sized=draw(st.booleans()),
        iteration_length=iteration,
        order=order,
    )


def cases(
    *, models: tuple[str, ...] = ("plain", "mlp", "tied"), plan: st.SearchStrategy[Plan] | None = None
) -> st.SearchStrategy[Case]:
    """Plans with a model, an optimizer, a seed, and sometimes clipping."""
    return st.builds(
        Case,
        plan=plans() if plan is None else plan,
        model=st.sampled_from(models),
        seed=st.integers(0, 3),
        optimizer=st.sampled_from(["adamw", "sgd"]),
        precision=st.sampled_from(["fp32", "fp32", "amp_bf16"]),
        clip_grad=st.none() | st.just(0.5),
    ).filter(lambda case: case.model != "mlp" or (min(case.plan.batches) > 1 and _no_single(case.plan)))


def _no_single(plan: Plan) -> bool:
    """BatchNorm refuses to train on one sample."""
    size = plan.microbatch_size
    return size is None or (size > 1 and all(n % size != 1 for n in plan.batches))
