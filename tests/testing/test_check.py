"""check_algorithm and parametrize_with_checks: what they run, what they say, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
import threading
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.testing import Case, CheckFailed, LawViolation, Scripted, Seed, check_algorithm, laws
from pure_loop.testing.laws import ranks as rank_laws
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.wrong_algorithms import (
    adds_in_place,
    counts_microbatches_as_batches,
    fails_on_a_single_sample,
    remembers_in_a_closure,
    starts_over_at_fit_start,
)
from tests.conftest import THOROUGH
from tests.support.refused import Refusal, check, rows

A = pl.algorithms
FEW: dict[str, Any] = {"problems": "linear", "max_examples": 4}
NAMES = [law.name for law in laws.OF_ALGORITHMS]
SMALL = Plan(batches=(2,), max_duration="1ba")


def only(*tried: str, **options: Any) -> dict[str, Any]:
    """For what is said about laws, and not about all of them."""
    return {**FEW, "skip": dict.fromkeys(set(NAMES) - set(tried), "not on trial"), **options}


def clip() -> pl.Algorithm:
    return A.gradient_clipping("norm", 1.0)


def one(name: str, function: Callable[[pl.State], pl.State], *events: Event, **options: Any) -> Callable[[], Any]:
    return lambda: pl.Algorithm(name, dict.fromkeys(events or (Event.BATCH_END,), function), **options)


# The report


@pytest.mark.slow  # all laws, also on processes and with the compiler
def test_a_report_says_what_ran_and_prints_as_a_table_and_compositions_keep_every_law() -> None:
    report = check_algorithm(clip, **FEW)
    assert report.ok
    assert report["purity"].result == "passed"
    assert report["purity"].examples == 4
    assert [each.law for each in report.outcomes] == NAMES + list(laws.UNAVAILABLE)
    assert report.fired[("gradient_clipping", Event.AFTER_TRAIN_BATCH)] > 0
    lines = str(report).splitlines()
    assert lines[0] == "gradient_clipping: 20 passed"
    assert any(line.split()[:4] == ["purity", "passed", "4", "examples"] for line in lines)
    assert max(map(len, lines)) <= 120
    with pytest.raises(KeyError):
        report["no law"]

    def holds(algorithm: Any) -> None:
        check_algorithm(algorithm, problems="mlp", max_examples=2)

    nested = settings(max_examples=20 if THOROUGH else 2, suppress_health_check=[HealthCheck.nested_given])
    nested(given(testing.algorithms())(holds))()


def test_a_failure_says_all_that_is_needed() -> None:
    with pytest.raises(CheckFailed) as caught:
        check_algorithm(adds_in_place, problems="linear")
    report = caught.value.report
    (failure,) = report.failures
    violation = failure.violation
    assert violation is not None
    assert violation.law == "purity"
    assert violation.event is Event.AFTER_TRAIN_BATCH
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


def test_a_violation_is_found_on_the_smallest_plan_and_its_code_reproduces_it() -> None:
    with pytest.raises(LawViolation) as caught:
        laws.microbatch_invariance(counts_microbatches_as_batches, cases=testing.cases(problems="linear"))
    plan = caught.value.case.plan
    # Two samples are two microbatches of one, which count twice.
    assert (plan.batches, str(plan.max_duration)) == ((2,), "1ba")
    with pytest.raises(LawViolation, match="microbatch_invariance does not hold"):
        exec(caught.value.code, {})


# Expected failures


def test_expected_failures_are_strict_and_laws_are_skipped_with_a_reason() -> None:
    reason, never = {"microbatch_invariance": "warms up by microbatches"}, "runs are never resumed"
    quick = only("structure", "microbatch_invariance")
    report = check_algorithm(counts_microbatches_as_batches, expected_failures=reason, **quick)
    outcome = report["microbatch_invariance"]
    assert (outcome.result, outcome.reason) == ("expected failure", reason["microbatch_invariance"])
    with pytest.raises(CheckFailed, match="microbatch_invariance was expected to fail") as caught:
        check_algorithm(clip, expected_failures=reason, **quick)
    assert caught.value.report["microbatch_invariance"].result == "UNEXPECTED PASS"
    # What rests on an expected failure is tried all the same.
    with pytest.raises(CheckFailed) as caught:
        check_algorithm(remembers_in_a_closure, expected_failures={"memory": "a test"}, **only("memory", "resumption"))
    assert caught.value.report["resumption"].result == "FAILED"
    skip = {**quick["skip"], "resumption": never}
    report = check_algorithm(starts_over_at_fit_start, **{**quick, "skip": skip})
    assert (report["resumption"].result, report["resumption"].reason) == ("skipped", never)


@pytest.mark.slow  # each example that fails is shrunk
def test_an_algorithm_that_needs_two_samples_says_so() -> None:
    """Where it raises it is passed over, and everywhere else it has to keep the laws."""
    reason = {"order": "needs two samples"}
    tried = only("order", "microbatch_invariance", "purity", "memory", max_examples=5)
    report = check_algorithm(fails_on_a_single_sample, expected_failures=reason, **tried)
    assert report["order"].result == "expected failure"
    # In microbatches of one sample it raises always, so that law has nothing to say.
    assert report["microbatch_invariance"].reason.startswith("every case ended in an error")
    assert report["purity"].result == report["memory"].result == "passed"


def test_an_error_in_a_law_is_a_violation_with_its_case() -> None:
    def mix(state: pl.State) -> pl.State:
        return state.replace(loss=torch.lerp(torch.zeros(()), state.loss, 0.5))  # float32 only

    with pytest.raises(CheckFailed) as caught:
        check_algorithm(one("mixed", mix, Event.AFTER_TRAIN_BATCH), **only("order", "microbatch_invariance"))
    (failure,) = caught.value.report.failures
    assert failure.law == "microbatch_invariance"
    assert failure.violation is not None
    assert "RuntimeError: expected dtype" in failure.violation.finding


def test_memory_in_numpy_is_memory_and_an_algorithm_may_remember_its_evaluations() -> None:
    def note(state: pl.State) -> pl.State:
        return state.remember("np", state.algorithm_state["np"] * 0.5 + 1)

    def fill(state: pl.State) -> pl.State:
        state.algorithm_state["np"].fill(3.0)
        return state

    options: dict[str, Any] = {"init": lambda state: numpy.zeros(3)}
    noting = one("np", note, Event.BATCH_END, Event.EVAL_END, **options)
    assert check_algorithm(noting, **only("purity", "memory", "resumption")).ok
    with pytest.raises(LawViolation, match="purity does not hold"):
        laws.purity(one("np", fill, **options), problems="linear")


# What can't be checked


def checked(given: Any = clip, **options: Any) -> Callable[[], Any]:
    return lambda: check_algorithm(given, **options)


PAIR: dict[str, Any] = {"expected_failures": {"purity": "x"}, "skip": {"purity": "y"}}
MLP = Case(plan=SMALL, problem="mlp")
SCRIPT = Scripted(lambda state: iter(()), pl.State.create(torch.nn.Linear(1, 1)))
PARAMETRIZE = testing.parametrize_with_checks
REFUSED: dict[str, Callable[[], Any]] = {
    "there is no law 'purty'. There are": checked(expected_failures={"purty": "because"}),
    "skip['purity']=' ': write the reason, as a text": checked(skip={"purity": " "}),
    "write a dict from the name of each law to the reason": checked(skip=["purity"]),
    "write them in one of the two": checked(**PAIR),
    "give a function that makes an algorithm": checked(None),
    "3 of type int is neither": checked(3),
    "returned None, not an algorithm: does it lack a `return`": checked(lambda: None),
    "returned 3 of type int; it must return an algorithm": checked(lambda: 3),
    "returned the function clip, not an algorithm: call it too": checked(lambda: clip),
    "returned (), not an algorithm": checked(lambda: ()),
    "neither": checked(pl.Algorithm),
    "'liner' is not known; there are 'linear'": checked(problems="liner"),
    "give one at least": checked(problems=[]),
    "give names such as ['linear', 'mlp']": checked(problems=3),
    "give a whole number of at least 1": checked(max_examples=0),
    "plans": checked(plans=SMALL),
    "a law of algorithms is tried on a": lambda: laws.purity(clip, case=Seed(0)),
    "give a function that makes a callback": lambda: laws.of_callbacks.purity(None),
    "give testing.Scripted(make_script, start)": lambda: laws.of_scripts.value(clip),
    "'mlp' is not": lambda: laws.microbatch_invariance(clip, MLP),
    "a law of scripts is tried on a": lambda: laws.of_scripts.value(SCRIPT, 3),
    "a script has its own model and data": lambda: laws.of_scripts.value(SCRIPT, problems="linear"),
    "two algorithms are named 'halve'": lambda: testing.commutation(halve, halve, max_examples=1),
    "at least two": lambda: testing.commutation_matrix([A.mixup]),
    "give at least one algorithm": lambda: PARAMETRIZE([]),
    "give a list of algorithms": lambda: PARAMETRIZE(clip()),
    "is named 'clip'": lambda: PARAMETRIZE([clip], expected_failures={"clip": {"purity": "x"}}),
}


@rows([Refusal(says, call, pl.PureLoopError, (says,)) for says, call in REFUSED.items()])
def test_it_is_refused(refusal: Refusal) -> None:
    check(refusal)


def test_an_algorithm_that_never_runs_fails_and_a_handler_that_never_runs_is_in_the_report() -> None:
    late = lambda: pl.algorithm(Event.BATCH_END, when="1000ba", name="late")(lambda state: state)  # noqa: E731
    with pytest.raises(CheckFailed, match=r"(?s)The algorithm 'late' never ran .*BATCH_END") as caught:
        check_algorithm(late, **only("structure", "order"))
    assert caught.value.report.never == (("late", Event.BATCH_END),)
    assert not caught.value.report.failures
    ends = one("ends", lambda state: state, Event.BATCH_END, Event.ITERATION_END)
    report = check_algorithm(ends, plans=st.just(SMALL), **only("purity"))
    assert report.never == (("ends", Event.ITERATION_END),)
    assert "handlers that never ran:\n    ends at ITERATION_END" in str(report)


def test_a_problem_of_one_s_own_and_problems_on_which_a_law_can_t_hold() -> None:
    problem = testing.Problem(
        name="mine",
        make_model=lambda: torch.nn.Linear(2, 1),
        make_batch=lambda n, generator: (torch.randn(n, 2, generator=generator), torch.ones(n, 1)),
        loss=torch.nn.functional.l1_loss,
    )
    assert check_algorithm(clip, **only("order", "purity", problems=problem)).ok
    report = check_algorithm(clip, **only("order", "microbatch_invariance", problems="mlp"))
    assert report["microbatch_invariance"].reason == (
        "none of the problems is separable: the loss of a batch is the mean of the losses of its samples"
    )


def test_an_instance_is_copied_as_it_is_or_said_to_be_none_that_can_be() -> None:
    with pytest.raises(CheckFailed) as caught:
        check_algorithm(remembers_in_a_closure(), **only("memory", "resumption"))
    assert [outcome.law for outcome in caught.value.report.failures] == ["memory"]
    composed = pl.compose(clip(), A.ema(half_life="2ba"))
    assert check_algorithm(composed, **only("order")).subject == "gradient_clipping + ema"
    lock = threading.Lock()
    with pytest.raises(pl.ArgumentError, match=r"can't be copied .*give a function that makes it"):
        check_algorithm(pl.algorithm(Event.BATCH_END)(lambda state: [state, lock][0]))


def test_a_law_works_alone_and_in_a_hypothesis_test_of_one_s_own() -> None:
    laws.order()
    case = Case(plan=SMALL)
    laws.resumption(clip, case)
    for subject in (adds_in_place, AlgorithmSubject(adds_in_place)):  # made already, as laws of one's own have it
        with pytest.raises(LawViolation, match="purity does not hold"):
            laws.purity(subject, case)

    @settings(max_examples=3)
    @given(testing.cases(problems="linear"), st.floats(0.1, 2.0))
    def holds(case: Case, norm: float) -> None:
        laws.purity(lambda: A.gradient_clipping("norm", norm), case)

    holds()
    held_out = Case(plan=Plan(batches=(2,), max_duration="1ba", evaluators={"val": EvaluatorPlan(batches=(1, 2))}))
    assert [len(batch[0]) for batch in held_out.held_out()["val"]] == [1, 2]


def halve() -> pl.Algorithm:
    return pl.algorithm(Event.AFTER_LOSS, name="halve")(lambda state: state.replace(loss=state.loss / 2))


def test_which_algorithms_commute() -> None:
    options: dict[str, Any] = {"cases": testing.cases(problems="linear"), "max_examples": 3}
    double = one("double", lambda state: state.replace(loss=state.loss * 4), Event.AFTER_LOSS)
    add = one("add", lambda state: state.replace(loss=state.loss + 1), Event.AFTER_LOSS)
    assert testing.commutation(halve, double, **options)
    found = testing.commutation(halve, add, **options)
    assert not found
    assert found.counterexample is not None
    assert found.counterexample.leaf == "state.loss"
    assert "They do not commute" in str(found)
    makers = [A.mixup, A.cutmix, lambda: A.gradient_clipping("norm", 0.1), A.gradient_noise]
    matrix = testing.commutation_matrix(makers, problems="convolution", max_examples=2)
    assert matrix.commute("cutmix", "mixup") is None
    assert matrix.commute("mixup", "gradient_clipping") is True
    assert matrix.commute("gradient_noise", "gradient_clipping") is False
    assert str(matrix).splitlines()[1:3] == ["           cutmix  - .", "gradient_clipping  = = ."]
    with pytest.raises(pl.ArgumentError, match="give two of mixup, cutmix"):
        matrix.commute("mixup", "mixup")


# Ranks


def differs_by_process(state: pl.State) -> pl.State:
    """What an algorithm remembers is its result, also where its name ends as those of the timestamp do."""
    torch.distributed.all_reduce(torch.ones(1))
    import os

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


def on_a_gpu(*_: Any, **__: Any) -> list[rank_laws.Witness]:
    """What a run on a GPU is a witness of."""
    with FakeTensorMode():
        return [rank_laws.Witness(Event.FIT_END, (), {"params": {"weight": torch.empty(2, device="cuda")}})]


def test_ranks_on_gpus_are_compared_where_each_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(rank_laws, "witness", on_a_gpu)
    monkeypatch.setattr(rank_laws, "on_ranks", lambda case, make, fit, ranks, kind: tried.append(kind) or [])
    for devices, result in ((1, "skipped"), (2, "passed")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        outcome = check_algorithm(A.sam, **only("world_size", max_examples=1))["world_size"]
        assert (outcome.result, tried) == (result, ["replicate", "shard"] * (devices - 1))
        if devices == 1:
            assert outcome.reason == "each of 2 ranks needs a CUDA device, and there are 1"
            with pytest.raises(unittest.SkipTest, match="needs a CUDA device"):
                laws.world_size(A.sam, max_examples=1)


# parametrize_with_checks


def pairs(algorithms: Any, **options: Any) -> list[Any]:
    """What pytest will call the decorated function with."""

    def contract(algorithm: Any, check: Any) -> None:
        check(algorithm)

    (mark,) = testing.parametrize_with_checks(algorithms, **{**FEW, "max_examples": 2}, **options)(contract).pytestmark
    return list(mark.args[1])


def test_parametrized_checks() -> None:
    expected = {"warm_up": {"microbatch_invariance": "warms up by microbatches"}}
    results: dict[str, Any] = {}
    for algorithm, each in pairs([clip(), counts_microbatches_as_batches()], expected_failures=expected):
        if each.name == "microbatch_invariance":
            try:
                results[each.subject] = each(algorithm).result
            except pytest.xfail.Exception as failure:
                results[each.subject] = str(failure)
    assert results == {"gradient_clipping": "passed", "warm_up": "warms up by microbatches"}
    with pytest.raises(pl.ArgumentError, match="this check is that of"):
        pairs([clip])[0][1](adds_in_place())
    # An expected failure of all must fail somewhere.
    listed = pairs([clip(), A.ema(half_life="2ba")], expected_failures={"microbatch_invariance": "no"})
    with pytest.raises(CheckFailed, match="was expected to fail"):
        next(each for _, each in listed if each.name == "microbatch_invariance")()
    with pytest.raises(unittest.SkipTest, match="it is a test"):
        next(each for _, each in pairs([clip()], skip={"closing": "it is a test"}) if each.name == "closing")()


CONTRACTS = """
import pure_loop as pl
from pure_loop import testing
from pure_loop.testing.wrong_algorithms import adds_in_place, counts_microbatches_as_batches

@testing.parametrize_with_checks(
    [pl.algorithms.gradient_clipping("norm", 1.0), counts_microbatches_as_batches()],
    expected_failures={"microbatch_invariance": "warms up by microbatches"}, problems="linear", max_examples=4,
)
def test_contract(algorithm, check):
    check(algorithm)

@testing.parametrize_with_checks([adds_in_place], problems="linear", max_examples=2)
def test_wrong(algorithm, check):
    check(algorithm)
"""
WITHOUT_PYTEST = """
import sys
import pure_loop as pl
assert "hypothesis" not in sys.modules
from pure_loop import testing
seen = []
SLOW = ("world_size", "rank_agreement", "compile_equality")
@testing.parametrize_with_checks(
    [pl.algorithms.sam()], problems="linear", max_examples=1, skip={name: "takes long" for name in SLOW}
)
def contract(algorithm, check):
    seen.append(check.name)
    check(algorithm)
contract()
assert "purity" in seen and "resumption" in seen
assert "pytest" not in sys.modules
"""
WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = None
import importlib.util, inspect, pydoc
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "hypothesis" else real(name, *rest)
import pure_loop as pl
getmembers = inspect.getmembers  # before a star brings pl.inspect
from pure_loop import *
assert fit is pl.fit
assert "schedules" in [name for name, _ in getmembers(pl)]
pydoc.render_doc(pl)
assert "testing" not in dir(pl)
try:
    import pure_loop.testing
except pl.MissingExtraError as error:
    assert "pip install 'pure_loop[testing]'" in str(error)
else:
    raise SystemExit("no error")
"""


def ran(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow  # processes of their own
def test_with_pytest_without_it_and_without_hypothesis(tmp_path: Path) -> None:
    """Each pair is a test of its own, or the function runs all; what looks at all of the package needs no extra."""
    (tmp_path / "test_it.py").write_text(CONTRACTS)
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-k", "purity or microbatch_invariance", "test_it.py"]
    done = ran(tmp_path, "-m", "pytest", *options)
    assert done.returncode == 1
    for line in (
        "PASSED test_it.py::test_contract[gradient_clipping-purity]",
        "XFAIL test_it.py::test_contract[warm_up-microbatch_invariance] - warms up by microbatches",
        "FAILED test_it.py::test_wrong[decay-purity]",
        "SKIPPED",
        "rests on purity",
    ):
        assert line in done.stdout
    assert done.stdout.count("FAILED test_it.py::") == 1
    for code in (WITHOUT_PYTEST, WITHOUT_HYPOTHESIS):
        done = ran(tmp_path, "-c", code)
        assert done.returncode == 0, done.stderr
