"""What a check asks if nothing else is said: few examples that find all that is wrong, and no compiler or process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.testing import Case, check_algorithm, check_callback, laws
from pure_loop.testing.check import Trial
from pure_loop.testing.report import LawViolation
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.wrong_algorithms import WRONG_ALGORITHMS
from pure_loop.testing.wrong_loops import WRONG_LOOPS

LAWS = {law.name: law for law in (*laws.OF_ALGORITHMS, *laws.OF_LOOPS)}
COSTLY = {law.name for law in LAWS.values() if law.costs}
WRONG: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    **{f"algorithm {make.__name__}": (law, make, {}) for make, law in WRONG_ALGORITHMS.items()},
    **{f"loop {make.__name__}": (law, lambda: (), {"fit": make}) for make, law in WRONG_LOOPS.items()},
}


def test_every_wrong_algorithm_and_loop_is_found_in_the_examples_that_all_laws_share() -> None:
    trial = Trial(AlgorithmSubject(None), laws.OF_LOOPS, {}, pl.fit, None, None, None)
    for name, (law_name, make, loop) in WRONG.items():
        law = LAWS[law_name]
        if law_name in COSTLY:
            continue
        subject = AlgorithmSubject(make if not loop else None)
        fit = {key: each() for key, each in loop.items()}
        for case in trial.examples(law, law.cases()):  # type: ignore[arg-type]
            try:
                law.on(subject, case, **fit)
            except LawViolation:
                break
        else:
            pytest.fail(f"{law_name} holds for the {name}")
    tried: list[Any] = trial.examples(laws.order, laws.order.cases())  # type: ignore[arg-type]
    assert (len(tried), {case.problem.name for case in tried}) == (10, set(pl.testing.PROBLEMS))


def test_what_is_not_asked_is_said_and_progress_is_shown(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    skip = dict.fromkeys([name for name in LAWS if name not in {"order", "resumption", *COSTLY}], "not on trial")
    skip.pop("algorithm_order")
    options: dict[str, Any] = {"problems": "linear", "max_examples": 10, "skip": skip}
    report = check_algorithm(lambda: pl.algorithms.gradient_clipping("norm", 1.0), **options)
    text = "not asked by default: world_size, compile_equality; thorough=True asks them"
    assert {outcome.law for outcome in report.outcomes if outcome.result == "not asked"} == COSTLY
    assert report.ok
    assert text in str(report)
    out, err = capsys.readouterr()
    first, *lines = err.splitlines()
    assert (out, len(lines), caplog.records) == ("", len(report.outcomes), [])
    assert first.startswith("gradient_clipping: 2 laws, 10 examples each, about ")
    assert [line.split()[0] for line in lines] == [outcome.law for outcome in report.outcomes]
    assert any(line.split()[:3] == ["order", "passed", "10"] and line.endswith(" s") for line in lines)
    check_algorithm(lambda: pl.algorithms.gradient_clipping("norm", 1.0), quiet=True, **options)
    check_callback(pl.callbacks.SpeedMonitor, problems="linear", max_examples=1, quiet=True)
    assert capsys.readouterr() == ("", "")


def test_a_law_is_not_tried_on_a_problem_on_which_it_cannot_hold() -> None:
    case = Case(plan=pl.order.Plan(batches=(2,), max_duration="1ba"), problem="mlp")
    with pytest.raises(pl.errors.ArgumentError, match=r"microbatch_invariance is a law for .* 'mlp' is not"):
        laws.microbatch_invariance.on(AlgorithmSubject(None), case)
