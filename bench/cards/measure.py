"""What a card says that has to be measured: scores and times beside the plain run, laws, and what it commutes with."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from hypothesis import strategies as st

import pure_loop as pl
from bench.cards.entries import RATES, Entry
from pure_loop import Event
from pure_loop.ranges import settings_of
from pure_loop.testing import check_algorithm, commutation
from pure_loop.testing._compositions import ALGORITHMS, built
from pure_loop.testing.problems import as_problem
from tests.support.samples import simplest
from tests.support.served import module_of, required, served

__all__ = ["measured"]

SEEDS = 5

# What most runs have, in whose company an algorithm is tried.
PARTNERS = {
    "ema": lambda: pl.algorithms.ema(half_life="2ba"),
    "gradient_clipping": lambda: pl.algorithms.gradient_clipping("norm", 0.1),
    "label_smoothing": lambda: pl.algorithms.label_smoothing(0.1),
    "mixup": lambda: pl.algorithms.mixup(),
    "sam": lambda: pl.algorithms.sam(rho=0.05),
}


def measured(name: str, entry: Entry) -> dict[str, Any]:
    """A record of docs/cards.json."""
    algorithm = entry.make()
    problem = entry.on
    return {
        "code": entry.code,
        "note": entry.note,
        "picture": bool(entry.picture),
        "options": {key: value for key, value in entry.options.items() if isinstance(value, str)},
        "events": [event.name for event in Event if event in algorithm.handlers],
        "claims": sorted(algorithm.claims),
        "problem": problem.title,
        "metric": problem.metric,
        "better": problem.better,
        **_effect(entry),
        "laws": {} if entry.members else _laws(name, entry),
        "commutes": {} if entry.members else _company(name),
    }


def _effect(entry: Entry) -> dict[str, Any]:
    """Scores of both runs for each seed, and the ratio of their times; the runs of a seed begin with one model."""
    torch.set_num_threads(1)
    scores: dict[str, list[float]] = {"plain": [], "with": []}
    ratios, batches = [], []
    _run(entry, 0, plain=True)  # what is imported and allocated once
    for seed in range(SEEDS):
        plain, with_it = _run(entry, seed, plain=True), _run(entry, seed, plain=False)
        scores["plain"].append(plain[0])
        scores["with"].append(with_it[0])
        ratios.append(with_it[1] / plain[1])
        batches.append(with_it[2])
    return {"scores": scores, "time": round(statistics.median(ratios), 3), "batches": batches}


def _run(entry: Entry, seed: int, *, plain: bool) -> tuple[float, float, int]:
    problem = entry.on
    train, _ = problem.data()
    torch.manual_seed(seed)
    model: Any = problem.model()
    settings = {**problem.settings(), **entry.options}
    if entry.members:
        model = pl.ensemble(problem.model, seeds=range(entry.members * seed, entry.members * (seed + 1)))
        scaled = not plain and "lr_scale" in entry.code
        settings["optimizer"] = pl.optim.sgd(lr=1.0 if scaled else RATES, momentum=0.9)
    begun = time.perf_counter()
    algorithms = () if plain else [entry.make()]
    state = pl.run(pl.fit(model, train, algorithms=algorithms, seed=seed, watch={Event.FIT_END}, **settings))
    seconds = time.perf_counter() - begun
    return round(float(state.metrics["val"][problem.metric].max()), 5), seconds, state.timestamp.batch


def _made(name: str) -> Any:
    """A function that makes the algorithm with the simplest settings, as the laws are tried on it."""
    factory = ALGORITHMS[name]
    ranged = settings_of(factory)
    needed = {key: st.just(value) for key, value in required(factory).items() if key not in ranged}
    return simplest(built(factory, **needed))


def _laws(name: str, entry: Entry) -> dict[str, list[str]]:
    """The result of each law, and the reason of those that it does not keep."""
    factory = ALGORITHMS[name]
    problem = served(factory)
    options: dict[str, Any] = {} if problem is None else {"problems": problem}
    expected = {**getattr(module_of(factory), "EXPECTED_FAILURES", {}), **entry.unkept}
    report = check_algorithm(_made(name), max_examples=3, expected_failures=expected, **options)
    return {outcome.law: [outcome.result, outcome.reason] for outcome in report.outcomes}


def _company(name: str) -> dict[str, bool | str]:
    """Whether it commutes with each partner; or why both can't be in one run."""
    problem = served(ALGORITHMS[name]) or "mlp"
    if as_problem(problem).loss is not torch.nn.functional.cross_entropy:
        problem = "mlp"
    result: dict[str, bool | str] = {}
    for partner, make in PARTNERS.items():
        if partner == name:
            continue
        try:
            result[partner] = bool(commutation(_made(name), make, problems=problem, max_examples=3))
        except pl.PureLoopError as error:
            result[partner] = str(error).partition(". ")[0]
    return result
