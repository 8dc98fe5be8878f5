"""Five algorithms of the library at once, with drawn settings and in a drawn order, keep the laws that each keeps."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pure_loop import Event
from pure_loop.algorithm import Composition
from pure_loop.testing import check_algorithm
from pure_loop.testing._compositions import ALGORITHMS, algorithms
from tests.conftest import THOROUGH
from tests.support.samples import sample

# A function of the tester's, and what ends training where it pleases.
LEFT_OUT = ("transform", "threshold_stopping", "early_stopping", "reduce_on_plateau")


def _fit_together(chosen: Composition) -> bool:
    """Two that change the model may find nothing left to change; smoothing one of two targets is refused."""
    surgery = sum(Event.INIT in algorithm.handlers for algorithm in chosen.members)
    mixes_losses = any(algorithm.settings.get("interpolate") == "loss" for algorithm in chosen.members)
    return surgery <= 1 and not (mixes_losses and any(each.name == "label_smoothing" for each in chosen.members))


@pytest.mark.slow  # all laws of large compositions
@pytest.mark.parametrize("problem", ["mlp", "convolution"])
def test_five_at_once(problem: str) -> None:
    kinds = (None, "classes", "images" if problem == "convolution" else "dropout")
    among = [
        name for name, make in ALGORITHMS.items() if getattr(sys.modules[make.__module__], "SERVES", None) in kinds
    ]
    among = [name for name in among if name not in LEFT_OUT]
    drawn: Any = algorithms(problem=problem, among=among, min_size=5, max_size=5).filter(_fit_together)
    for chosen in sample(drawn, 12 if THOROUGH else 3)[-12 if THOROUGH else -2 :]:
        failures: dict[str, str] = {}
        for algorithm in chosen.members:
            module = sys.modules[ALGORITHMS[algorithm.factory].__module__]
            failures |= getattr(module, "EXPECTED_FAILURES", {})
        # Left out, and not expected to fail: a few examples may have nothing that ranks draw otherwise.
        check_algorithm(chosen, problems=problem, max_examples=3, thorough=True, skip=failures)
