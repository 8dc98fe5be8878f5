"""check_algorithm and parametrize_with_checks: what they run, what they say, and what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.testing import Case, CheckFailed, LawViolation, Scripted, Seed, check_algorithm, laws
from pure_loop.testing import wrong_algorithms as wrong
from pure_loop.testing.laws import ranks as rank_laws
from pure_loop.testing.subject import AlgorithmSubject
from tests.support.refused import Refusal, check

A = pl.algorithms
FEW: dict[str, Any] = {"problems": "linear", "max_examples": 4}
NAMES = [law.name for law in laws.OF_ALGORITHMS]
SMALL = Plan(batches=(2,), max_duration="1ba")
WARMS_UP = {"microbatch_invariance": "warms up by microbatches"}


def only(*tried: str, **options: Any) -> dict[str, Any]:
    """For what is said about laws, and not about all of them."""
    return {**FEW, "thorough": True, "skip": dict.fromkeys(set(NAMES) - set(tried), "not on trial"), **options}


def failed(make: Any, says: str | None = None, **options: Any) -> testing.Report:
    with pytest.raises(CheckFailed, match=says) as caught:
        check_algorithm(make, **options)
    return caught.value.report


def clip() -> pl.Algorithm:
    return A.gradient_clipping("norm", 1.0)


def one(name: str, function: Callable[[pl.State], pl.State], *events: Event, **options: Any) -> Callable[[], Any]:
    return lambda: pl.Algorithm(name, dict.fromkeys(events or (Event.BATCH_END,), function), **options)


# The report


def test_a_report_says_what_ran_and_prints_as_a_table() -> None:
    report = check_algorithm(clip, **only("structure", "order", "purity"))
    assert report.ok
    assert (report["purity"].result, report["purity"].examples) == ("passed", 4)
    assert [each.law for each in report.outcomes] == NAMES + list(laws.UNAVAILABLE)
    assert report.fired[("gradient_clipping", Event.AFTER_TRAIN_BATCH)] > 0
    lines = str(report).splitlines()
    assert lines[0] == "gradient_clipping: 3 passed, 17 skipped"
    assert any(line.split()[:4] == ["purity", "passed", "4", "examples"] for line in lines)
    assert max(map(len, lines)) <= 120
    with pytest.raises(KeyError):
        report["no law"]


def test_a_failure_says_all_that_is_needed_on_the_smallest_plan_and_its_code_reproduces_it() -> None:
    with pytest.raises(CheckFailed) as caught:
        check_algorithm(wrong.adds_in_place, **only("structure", "order", "purity", "memory"))
    report = caught.value.report
    (failure,) = report.failures
    violation: Any = failure.violation
    assert (violation.law, violation.event) == ("purity", Event.AFTER_TRAIN_BATCH)
    assert violation.leaf == "state.grads['weight']"
    assert torch.equal(violation.given, violation.wanted * 0.5)
    assert violation.case == Case(plan=Plan(batches=(1,), max_duration="1ba")), "the simplest there is"
    text = " ".join(str(caught.value).split())  # lines are broken where they are too long
    for part in (
        laws.purity.statement,
        "algorithm 'decay' wrote in place to a leaf of the State that was passed to it, at AFTER_TRAIN_BATCH, batch 0",
        "it was tensor([",
        "Case(plan=Plan(batches=(1,), max_duration='1ba'))",
        "from pure_loop.testing.wrong_algorithms import adds_in_place",
    ):
        assert part in text, part
    # What rests on a law that fails says nothing.
    assert (report["memory"].result, report["memory"].reason) == ("not run", "rests on purity")
    assert "Falsifying example" not in text
    with pytest.raises(LawViolation) as violated:
        laws.microbatch_invariance(wrong.counts_microbatches_as_batches, cases=testing.cases(problems="linear"))
    plan = violated.value.case.plan  # type: ignore[attr-defined]
    # Two samples are two microbatches of one, which count twice.
    assert (plan.batches, str(plan.max_duration)) == ((2,), "1ba")
    with pytest.raises(LawViolation, match="microbatch_invariance does not hold"):
        exec(violated.value.code, {})


def test_expected_failures_are_strict_and_laws_are_skipped_with_a_reason() -> None:
    quick = only("structure", "microbatch_invariance", expected_failures=WARMS_UP)
    outcome = check_algorithm(wrong.counts_microbatches_as_batches, **quick)["microbatch_invariance"]
    assert (outcome.result, outcome.reason) == ("expected failure", WARMS_UP["microbatch_invariance"])
    report = failed(clip, "microbatch_invariance was expected to fail", **quick)
    assert report["microbatch_invariance"].result == "UNEXPECTED PASS"
    # What rests on an expected failure is tried all the same.
    both = only("memory", "resumption", expected_failures={"memory": "a test"})
    assert failed(wrong.remembers_in_a_closure, **both)["resumption"].result == "FAILED"
    report = check_algorithm(wrong.starts_over_at_fit_start, **only("structure"))
    assert (report["resumption"].result, report["resumption"].reason) == ("skipped", "not on trial")


def test_an_algorithm_that_needs_two_samples_says_so() -> None:
    """Where it raises it is passed over, and everywhere else it has to keep the laws."""
    plans = st.sampled_from([Plan(batches=sizes, max_duration="1ba") for sizes in ((1,), (4,))])
    tried = only("order", "microbatch_invariance", "purity", plans=plans, expected_failures={"order": "needs two"})
    report = check_algorithm(wrong.fails_on_a_single_sample, **tried)
    assert (report["order"].result, report["purity"].result) == ("expected failure", "passed")
    # In microbatches of one sample it raises always, so that law has nothing to say.
    assert report["microbatch_invariance"].reason.startswith("every case ended in an error")


def test_an_error_in_a_law_is_a_violation_and_memory_in_numpy_is_memory() -> None:
    def mix(state: pl.State) -> pl.State:
        return state.replace(loss=torch.lerp(torch.zeros(()), state.loss, 0.5))  # type: ignore[arg-type]  # float32 only

    report = failed(one("mixed", mix, Event.AFTER_TRAIN_BATCH), **only("order", "microbatch_invariance"))
    assert "RuntimeError: expected dtype" in str(report["microbatch_invariance"].violation)

    def note(state: pl.State) -> pl.State:
        return state.remember("np", state.algorithm_state["np"] * 0.5 + 1)

    def fill(state: pl.State) -> pl.State:
        state.algorithm_state["np"].fill(3.0)
        return state

    keeps, fills = (
        one("np", function, Event.BATCH_END, Event.EVAL_END, init=lambda state: numpy.zeros(3))
        for function in (note, fill)
    )
    assert check_algorithm(keeps, **only("purity", "memory", "resumption")).ok  # it may remember its evaluations
    with pytest.raises(LawViolation, match="purity does not hold"):
        laws.purity(fills, problems="linear")


# What can't be checked


def checked(given: Any = clip, **options: Any) -> Callable[[], Any]:
    return lambda: check_algorithm(given, **options)


def halve() -> pl.Algorithm:
    return pl.algorithm(Event.AFTER_LOSS, name="halve")(lambda state: state.replace(loss=state.loss / 2))


LOCKED: Any = partial(lambda lock, state: state, threading.Lock())
BOTH: dict[str, Any] = {"expected_failures": {"purity": "x"}, "skip": {"purity": "y"}}
SCRIPT = Scripted(lambda state: iter(()), pl.State.create(torch.nn.Linear(1, 1)))  # type: ignore[arg-type, return-value]
PARAMETRIZE: Any = testing.parametrize_with_checks
REFUSED: dict[str, Callable[[], Any]] = {
    "there is no law 'purty'. There are": checked(expected_failures={"purty": "because"}),
    "skip['purity']=' ': write the reason, as a text": checked(skip={"purity": " "}),
    "write a dict from the name of each law to the reason": checked(skip=["purity"]),
    "write them in one of the two": checked(**BOTH),
    "give a function that makes an algorithm": checked(None),
    "3 of type int is neither": checked(3),
    "returned None, not an algorithm: does it lack a `return`": checked(lambda: None),
    "returned 3 of type int; it must return an algorithm": checked(lambda: 3),
    "returned the function clip, not an algorithm: call it too": checked(lambda: clip),
    "can't be copied": checked(pl.Algorithm("locked", {Event.BATCH_END: LOCKED})),
    "'liner' is not known; there are 'linear'": checked(problems="liner"),
    "give one at least": checked(problems=[]),
    "give names such as ['linear', 'mlp']": checked(problems=3),
    "plans=Plan": checked(plans=SMALL),
    "a law of algorithms is tried on a": lambda: laws.purity(clip, case=Seed(0)),
    "give testing.Scripted(make_script, start)": lambda: laws.of_scripts.value(clip),
    "'mlp' is not": lambda: laws.microbatch_invariance(clip, Case(plan=SMALL, problem="mlp")),
    "a script has its own model and data": lambda: laws.of_scripts.value(SCRIPT, problems="linear"),
    "two algorithms are named 'halve'": lambda: testing.commutation(halve, halve, max_examples=1),
    "at least two": lambda: testing.commutation_matrix([A.mixup]),
    "give at least one algorithm": lambda: PARAMETRIZE([]),
    "give a list of algorithms": lambda: PARAMETRIZE(clip()),
    "is named 'clip'": lambda: PARAMETRIZE([clip], expected_failures={"clip": {"purity": "x"}}),
}


def test_what_can_not_be_checked_is_refused() -> None:
    for says, call in REFUSED.items():
        check(Refusal(says, call, pl.PureLoopError, (says,)))


def test_an_algorithm_that_never_runs_fails_and_a_handler_that_never_runs_is_in_the_report() -> None:
    late = lambda: pl.algorithm(Event.BATCH_END, when="1000ba", name="late")(lambda state: state)  # noqa: E731
    report = failed(late, r"(?s)The algorithm 'late' never ran .*BATCH_END", **only("structure", "order"))
    assert report.never == (("late", Event.BATCH_END),)
    assert not report.failures
    ends = one("ends", lambda state: state, Event.BATCH_END, Event.ITERATION_END)
    report = check_algorithm(ends, plans=st.just(SMALL), **only("purity"))
    assert "handlers that never ran:\n    ends at ITERATION_END" in str(report)


def test_problems_of_one_s_own_and_instances_which_are_copied_as_they_are() -> None:
    problem = testing.Problem(
        name="mine",
        make_model=lambda: torch.nn.Linear(2, 1),
        make_batch=lambda n, generator: (torch.randn(n, 2, generator=generator), torch.ones(n, 1)),
        loss=torch.nn.functional.l1_loss,
    )
    assert check_algorithm(clip, **only("order", "purity", problems=problem)).ok
    report = check_algorithm(clip, **only("order", "microbatch_invariance", problems="mlp"))
    assert report["microbatch_invariance"].reason.startswith("none of the problems is separable: the loss of a batch")
    report = failed(wrong.remembers_in_a_closure(), **only("memory", "resumption"))
    assert [outcome.law for outcome in report.failures] == ["memory"]
    composed = pl.compose(clip(), A.ema(half_life="2ba"))
    assert check_algorithm(composed, **only("order")).subject == "gradient_clipping + ema"


def test_a_law_works_alone_and_in_a_hypothesis_test_of_one_s_own() -> None:
    laws.order()
    for subject in (
        wrong.adds_in_place,
        AlgorithmSubject(wrong.adds_in_place),
    ):  # made already, as laws of one's own have it
        with pytest.raises(LawViolation, match="purity does not hold"):
            laws.purity(subject, Case(plan=SMALL))

    @settings(max_examples=3)
    @given(testing.cases(problems="linear"), st.floats(0.1, 2.0))
    def holds(case: Case, norm: float) -> None:
        laws.purity(lambda: A.gradient_clipping("norm", norm), case)

    holds()
    held_out = Case(plan=Plan(batches=(2,), max_duration="1ba", evaluators={"val": EvaluatorPlan(batches=(1, 2))}))
    assert [len(batch[0]) for batch in held_out.held_out()["val"]] == [1, 2]


def test_which_algorithms_commute() -> None:
    options: dict[str, Any] = {"cases": testing.cases(problems="linear"), "max_examples": 3}
    times: Callable[[Any], Any] = lambda state: state.replace(loss=state.loss * 4)  # noqa: E731
    plus: Callable[[Any], Any] = lambda state: state.replace(loss=state.loss + 1)  # noqa: E731
    double, add = one("double", times, Event.AFTER_LOSS), one("add", plus, Event.AFTER_LOSS)
    assert testing.commutation(halve, double, **options)
    found = testing.commutation(halve, add, **options)
    assert not found
    assert getattr(found.counterexample, "leaf", None) == "state.loss"
    assert "They do not commute" in str(found)
    makers = [A.mixup, A.cutmix, lambda: A.gradient_clipping("norm", 0.1)]
    matrix = testing.commutation_matrix(makers, problems="convolution", max_examples=2)
    assert (matrix.commute("cutmix", "mixup"), matrix.commute("gradient_clipping", "mixup")) == (None, True)
    assert str(matrix).splitlines()[1:3] == ["           cutmix  - .", "gradient_clipping  = = ."]
    with pytest.raises(pl.errors.ArgumentError, match="give two of mixup, cutmix"):
        matrix.commute("mixup", "mixup")


# Ranks


def differs_by_process(state: pl.State) -> pl.State:
    """What an algorithm remembers is its result, also where its name ends as those of the timestamp do."""
    torch.distributed.all_reduce(torch.ones(1))
    return state.remember("waiting", {"idle_seconds": float(os.getpid())})  # one process in the simulation


def share(state: pl.State) -> pl.State:
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(torch.ones(1))
    return state


@pytest.mark.slow  # processes
def test_on_processes_only_the_clock_s_own_times_may_be_others() -> None:
    make = one("waiting", differs_by_process, init=lambda state: {"idle_seconds": 0.0})
    with pytest.raises(LawViolation, match=r"on 2 processes with gloo, rank 1 differs .* at BATCH_END"):
        laws.rank_agreement(make, Case(plan=SMALL))
    # An algorithm is sent there whatever its cases are drawn from: a strategy can't be sent.
    report = check_algorithm(one("sharing", share), plans=testing.plans(max_batches=2), **only("rank_agreement"))
    assert report["rank_agreement"].result == "passed"


def test_ranks_on_gpus_need_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that only claims to be on a GPU is the witness of a run there."""
    with FakeTensorMode():
        params = {"params": {"weight": torch.empty(2, device="cuda")}}
    monkeypatch.setattr(rank_laws, "witness", lambda *_, **__: [rank_laws.Witness(Event.FIT_END, (), params)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    outcome = check_algorithm(A.sam, **only("world_size", max_examples=1))["world_size"]
    assert (outcome.result, outcome.reason) == ("skipped", "each of 2 ranks needs a CUDA device, and there are 1")
    with pytest.raises(unittest.SkipTest, match="needs a CUDA device"):
        laws.world_size(A.sam, max_examples=1)


# parametrize_with_checks


def pairs(law: str, algorithms: Any, **options: Any) -> list[Any]:
    """What pytest will call the decorated function with, of one law."""

    def contract(algorithm: Any, check: Any) -> None: ...

    (mark,) = PARAMETRIZE(algorithms, **{**FEW, "max_examples": 2}, **options)(contract).pytestmark
    return [(algorithm, check) for algorithm, check in mark.args[1] if check.name == law]


def test_parametrized_checks() -> None:
    law = "microbatch_invariance"
    both = [clip(), wrong.counts_microbatches_as_batches()]
    (right, good), (second, bad) = pairs(law, both, expected_failures={"warm_up": WARMS_UP})
    assert (good.subject, good(right).result) == ("gradient_clipping", "passed")
    with pytest.raises(pytest.xfail.Exception, match="warms up by microbatches"):
        bad(second)
    with pytest.raises(pl.errors.ArgumentError, match="this check is that of"):
        good(second)
    # An expected failure of all must fail somewhere.
    (_, check), *_ = pairs(law, [clip(), A.ema(half_life="2ba")], expected_failures=WARMS_UP)
    with pytest.raises(CheckFailed, match="was expected to fail"):
        check()
    ((_, check),) = pairs("closing", [clip()], skip={"closing": "it is a test"})
    with pytest.raises(unittest.SkipTest, match="it is a test"):
        check()


CONTRACTS = """
import pure_loop as pl
from pure_loop import testing
from pure_loop.testing.wrong_algorithms import adds_in_place, counts_microbatches_as_batches

@testing.parametrize_with_checks(
    [pl.algorithms.sam(), counts_microbatches_as_batches(), adds_in_place], problems="linear", max_examples=4,
    expected_failures={"warm_up": {"microbatch_invariance": "warms up"}},
)
def test_contract(algorithm, check):
    check(algorithm)
"""
WITHOUT_PYTEST = """
import sys
from pure_loop import algorithms, testing
seen = []
skip = dict.fromkeys(("world_size", "rank_agreement", "compile_equality"), "takes long")
@testing.parametrize_with_checks([algorithms.sam()], problems="linear", max_examples=1, skip=skip)
def contract(algorithm, check):
    seen.append(check.name)
    check(algorithm)
contract()
assert {"purity", "resumption"} <= set(seen) and "pytest" not in sys.modules
"""
WITHOUT_HYPOTHESIS = """
import importlib.util, pydoc, sys
sys.modules["hypothesis"] = None
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "hypothesis" else real(name, *rest)
import pure_loop as pl
from pure_loop import *
pydoc.render_doc(pl)
assert fit is pl.fit and "testing" not in dir(pl)
try:
    import pure_loop.testing
except pl.errors.MissingExtraError as error:
    assert "pip install 'pure_loop[testing]'" in str(error)
else:
    raise SystemExit("no error")
"""


def ran(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=240)


@pytest.mark.slow  # processes of their own
def test_with_pytest_without_it_and_without_hypothesis(tmp_path: Path) -> None:
    """Each pair is a test of its own, or the function runs all; what looks at all of the package needs no extra."""
    (tmp_path / "test_it.py").write_text(CONTRACTS)
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-k", "purity or microbatch_invariance", "test_it.py"]
    done = ran(tmp_path, "-m", "pytest", *options)
    for line in (
        "PASSED test_it.py::test_contract[sam-purity]",
        "XFAIL test_it.py::test_contract[warm_up-microbatch_invariance] - warms up",
        "FAILED test_it.py::test_contract[decay-purity]",
        "rests on purity",
    ):
        assert line in done.stdout
    assert done.stdout.count("FAILED test_it.py::") == done.returncode == 1
    for code in (WITHOUT_PYTEST, WITHOUT_HYPOTHESIS):
        done = ran(tmp_path, "-c", code)
        assert done.returncode == 0, done.stderr
