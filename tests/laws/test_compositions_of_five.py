"""Five algorithms of the library at once, with drawn settings and in a drawn order, keep the laws that each keeps."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.testing import check_algorithm
from pure_loop.testing._compositions import ALGORITHMS, built
from tests.conftest import THOROUGH
from tests.support.samples import sample

# What has to be passed, and no range says how to draw.
NEEDED: dict[str, dict[str, Any]] = {"stochastic_depth": {"blocks": nn.ReLU}}
# What the problem has: classes, and layers that the algorithms are of.
SERVED = {"mlp": {None, "classes", "dropout", "feed-forward blocks"}, "convolution": {None, "classes", "images"}}
# A function of the tester's, and what ends training where it pleases.
LEFT_OUT = {"transform", "threshold_stopping", "early_stopping", "reduce_on_plateau"}


def module_of(name: str) -> Any:
    return sys.modules[ALGORITHMS[name].__module__]


def drawn(problem: str, count: int) -> list[list[pl.Algorithm]]:
    """Lists of five, with one at most that changes the model, as two may find nothing left to change."""
    names = [
        name
        for name in ALGORITHMS
        if getattr(module_of(name), "SERVES", None) in SERVED[problem] and name not in LEFT_OUT
    ]
    choices = {
        name: sample(built(ALGORITHMS[name], **{key: st.just(value) for key, value in NEEDED.get(name, {}).items()}), 8)
        for name in names
    }
    chance, lists = random.Random(0), []
    while len(lists) < count:
        chosen = [chance.choice(choices[name]) for name in chance.sample(names, 5)]
        claims = [claim for algorithm in chosen for claim in algorithm.claims]
        surgery = sum(Event.INIT in algorithm.handlers for algorithm in chosen)
        if len(set(claims)) == len(claims) and surgery <= 1 and not _refused(chosen):
            lists.append(chosen)
    return lists


def _refused(chosen: list[pl.Algorithm]) -> bool:
    """Smoothing after a mixer that takes the loss for both targets is refused, as it would smooth one of them."""
    names = [algorithm.name for algorithm in chosen]
    return "label_smoothing" in names and any(algorithm.settings.get("interpolate") == "loss" for algorithm in chosen)


@pytest.mark.slow  # all laws of large compositions
@pytest.mark.parametrize("problem", SERVED)
def test_five_at_once(problem: str) -> None:
    for chosen in drawn(problem, 12 if THOROUGH else 2):
        failures: dict[str, str] = {}
        for algorithm in chosen:
            failures |= getattr(module_of(algorithm.factory), "EXPECTED_FAILURES", {})
        # Left out, and not expected to fail: a few examples may have nothing that ranks draw otherwise.
        check_algorithm(pl.compose(*chosen), problems=problem, max_examples=3, skip=failures)
