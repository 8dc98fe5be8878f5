"""check_algorithm, check_loop and parametrize_with_checks: what they run, what they say, and what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.testing import CheckFailed, LawViolation, check_algorithm, laws
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

FEW: dict[str, Any] = {"problems": "linear", "max_examples": 4}
# For what is said about laws, and not about these.
QUICK: dict[str, Any] = {**FEW, "skip": dict.fromkeys(("world_size", "compile_equality"), "takes seconds")}


def clip() -> pl.Algorithm:
    return pl.algorithms.gradient_clipping("norm", 1.0)


# Compositions of the library's algorithms


@pytest.mark.slow
def test_random_compositions_of_them_keep_every_law() -> None:
    def holds(algorithm: Any) -> None:
        check_algorithm(algorithm, problems="mlp", max_examples=2)

    nested = settings(max_examples=20 if THOROUGH else 2, suppress_health_check=[HealthCheck.nested_given])
    nested(given(testing.algorithms())(holds))()


# The report


@pytest.mark.slow
def test_a_report_says_what_ran_and_prints_as_a_table() -> None:
    report = check_algorithm(clip, **FEW)
    assert report.ok
    assert report["purity"].result == "passed"
    assert report["purity"].examples == 4
    assert [outcome.law for outcome in report.outcomes] == [law.name for law in laws.OF_ALGORITHMS] + list(
        laws.UNAVAILABLE
    )
    assert report.fired[("gradient_clipping", Event.AFTER_TRAIN_BATCH)] > 0
    lines = str(report).splitlines()
    assert lines[0] == "gradient_clipping: 20 passed"
    assert any(line.split()[:4] == ["purity", "passed", "4", "examples"] for line in lines)
    assert max(map(len, lines)) <= 120
    with pytest.raises(KeyError):
        report["no law"]


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
    assert violation.case == testing.Case(plan=Plan(batches=(1,), max_duration="1ba")), "the simplest there is"
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
    assert report["memory"].result == "not run"
    assert report["memory"].reason == "rests on purity"
    assert "Falsifying example" not in text


def test_the_code_that_reproduces_a_failure_does() -> None:
    with pytest.raises(LawViolation) as caught:
        laws.microbatch_invariance(counts_microbatches_as_batches)
    violation = caught.value
    with pytest.raises(LawViolation, match="microbatch_invariance does not hold"):
        exec(violation.code, {})


def test_a_violation_is_found_on_the_smallest_plan_that_shows_it() -> None:
    with pytest.raises(LawViolation) as caught:
        laws.microbatch_invariance(counts_microbatches_as_batches, cases=testing.cases(problems="linear"))
    plan = caught.value.case.plan
    # Two samples are two microbatches of one, which count twice.
    assert plan.batches == (2,)
    assert str(plan.max_duration) == "1ba"


# Expected failures


@pytest.mark.slow
def test_expected_failures_are_strict() -> None:
    reason = {"microbatch_invariance": "warms up by microbatches"}
    report = check_algorithm(counts_microbatches_as_batches, expected_failures=reason, **QUICK)
    outcome = report["microbatch_invariance"]
    assert (outcome.result, outcome.reason) == ("expected failure", reason["microbatch_invariance"])
    assert report.ok
    with pytest.raises(CheckFailed, match="microbatch_invariance was expected to fail") as caught:
        check_algorithm(clip, expected_failures=reason, **QUICK)
    assert caught.value.report["microbatch_invariance"].result == "UNEXPECTED PASS"


@pytest.mark.slow
def test_what_rests_on_an_expected_failure_is_tried_all_the_same() -> None:
    with pytest.raises(CheckFailed) as caught:
        check_algorithm(remembers_in_a_closure, expected_failures={"memory": "it is a test"}, **QUICK)
    assert caught.value.report["resumption"].result == "FAILED"


def test_laws_can_be_skipped_with_a_reason() -> None:
    reason = "runs are never resumed"
    skip = {**QUICK["skip"], "resumption": reason, "checkpoint": reason}
    report = check_algorithm(starts_over_at_fit_start, **{**QUICK, "skip": skip})
    assert (report["resumption"].result, report["resumption"].reason) == ("skipped", "runs are never resumed")


@pytest.mark.parametrize("argument", ["expected_failures", "skip"])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"purty": "because"}, pl.ArgumentError, "there is no law 'purty'. There are"),
        ({"purity": " "}, pl.ArgumentError, "write the reason, as a text"),
        ({"purity": True}, pl.ArgumentError, "write the reason, as a text"),
        (["purity"], pl.ArgumentTypeError, "write a dict from the name of each law to the reason"),
    ],
)
def test_reasons_are_looked_at_before_anything_runs(argument: str, given: Any, error: Any, message: str) -> None:
    def never() -> pl.Algorithm:
        return clip()

    with pytest.raises(error, match=message):
        check_algorithm(never, **{argument: given})


def test_a_law_is_expected_to_fail_or_skipped() -> None:
    with pytest.raises(pl.ArgumentError, match="write them in one of the two"):
        check_algorithm(clip, expected_failures={"purity": "x"}, skip={"purity": "y"})


@pytest.mark.slow
def test_an_algorithm_that_needs_two_samples_says_so() -> None:
    """Where it raises it is passed over, and everywhere else it has to keep the laws."""
    reason = {"order": "needs two samples"}
    report = check_algorithm(fails_on_a_single_sample, expected_failures=reason, **{**QUICK, "max_examples": 8})
    assert report["order"].result == "expected failure"
    # In microbatches of one sample it raises always, so that law has nothing to say.
    assert report["microbatch_invariance"].reason.startswith("every case ended in an error")
    without = {"order", "microbatch_invariance", *QUICK["skip"]}
    others = [outcome.result for outcome in report.outcomes if outcome.law not in without]
    assert set(others) == {"passed"}


def test_an_error_in_a_law_is_a_violation_with_its_case() -> None:
    mixed = lambda: pl.algorithm(Event.AFTER_TRAIN_BATCH, name="mixed")(mix)  # noqa: E731

    def mix(state: pl.State) -> pl.State:
        return state.replace(loss=torch.lerp(torch.zeros(()), state.loss, 0.5))  # float32 only

    with pytest.raises(CheckFailed) as caught:
        check_algorithm(mixed, **QUICK)
    (failure,) = caught.value.report.failures
    assert failure.law == "microbatch_invariance"
    assert failure.violation is not None
    assert "RuntimeError: expected dtype" in failure.violation.finding


def test_memory_in_numpy_is_memory() -> None:
    import numpy

    def note(state: pl.State) -> pl.State:
        return state.remember("np", state.algorithm_state["np"] * 0.5 + 1)

    def fill(state: pl.State) -> pl.State:
        state.algorithm_state["np"].fill(3.0)
        return state

    options: dict[str, Any] = {"init": lambda state: numpy.zeros(3)}
    assert check_algorithm(lambda: pl.Algorithm("np", {Event.BATCH_END: note}, **options), **QUICK).ok
    with pytest.raises(LawViolation, match="purity does not hold"):
        laws.purity(lambda: pl.Algorithm("np", {Event.BATCH_END: fill}, **options), problems="linear")


@pytest.mark.slow
def test_an_algorithm_may_remember_its_evaluations() -> None:
    def count(state: pl.State) -> pl.State:
        return state.remember("evaluated", state.algorithm_state["evaluated"] + 1)

    assert check_algorithm(lambda: pl.Algorithm("evaluated", {Event.EVAL_END: count}, init=lambda state: 0), **FEW).ok


def test_values_that_are_shown_alike_are_told_apart() -> None:
    one, other = torch.zeros(9), torch.zeros(9).index_fill(0, torch.tensor([8]), 1e-9)
    (difference,) = testing.differences({"x": one}, {"x": other}, name="tree")
    assert str(difference).endswith("number 8 is 0.0, and should be 9.999999717180685e-10")


def test_containers_and_none_are_compared() -> None:
    assert testing.differences({"a": None}, {}, name="tree")
    assert not testing.differences({"a": None}, {"a": None}, name="tree")


# What can't be checked


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (None, pl.ArgumentTypeError, "give a function that makes an algorithm"),
        (3, pl.ArgumentTypeError, "3 of type int is neither"),
        (lambda: None, pl.ArgumentTypeError, "returned None, not an algorithm: does it lack a `return`"),
        (lambda: 3, pl.ArgumentTypeError, "returned 3 of type int; it must return an algorithm"),
        (lambda: clip, pl.ArgumentTypeError, "returned the function clip, not an algorithm: call it too"),
        (lambda: (), pl.ArgumentTypeError, "not an algorithm"),
        (pl.Algorithm, pl.ArgumentTypeError, "neither"),
        (lambda strength: clip(), TypeError, "missing 1 required"),
    ],
    ids=["None", "int", "returns None", "returns int", "returns a factory", "returns []", "class", "arguments"],
)
def test_factories_that_make_something_else(given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        check_algorithm(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"problems": "liner"}, "'liner' is not known; there are 'linear'"),
        ({"problems": []}, "give one at least"),
        ({"problems": 3}, r"give names such as \['linear', 'mlp'\]"),
        ({"max_examples": 0}, "give a whole number of at least 1"),
        ({"max_examples": "many"}, "give a whole number"),
        ({"plans": Plan(batches=(1,), max_duration="1ba")}, "plans"),
    ],
)
def test_other_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pl.PureLoopError, match=message):
        check_algorithm(clip, **options)


def test_an_algorithm_that_never_runs_fails() -> None:
    late = lambda: pl.algorithm(Event.BATCH_END, when="1000ba", name="late")(lambda state: state)  # noqa: E731
    with pytest.raises(CheckFailed, match=r"(?s)The algorithm 'late' never ran .*BATCH_END") as caught:
        check_algorithm(late, **QUICK)
    assert caught.value.report.never == (("late", Event.BATCH_END),)
    assert not caught.value.report.failures


def test_what_never_ran_is_in_the_report() -> None:
    ends = lambda: pl.algorithm(Event.BATCH_END, Event.ITERATION_END, name="ends")(lambda state: state)  # noqa: E731
    plan = Plan(batches=(2,), max_duration="1ba")
    report = check_algorithm(ends, plans=st.just(plan), **QUICK)
    assert report.ok
    assert report.never == (("ends", Event.ITERATION_END),)
    assert "handlers that never ran:\n    ends at ITERATION_END" in str(report)


def test_problems_on_which_a_law_can_t_hold_are_said() -> None:
    report = check_algorithm(clip, problems="mlp", max_examples=2)
    assert report["microbatch_invariance"].reason == (
        "none of the problems is separable: the loss of a batch is the mean of the losses of its samples"
    )
    case = testing.Case(plan=Plan(batches=(2,), max_duration="1ba"), problem="mlp")
    with pytest.raises(pl.ArgumentError, match="'mlp' is not"):
        laws.microbatch_invariance(clip, case)


def test_a_problem_of_one_s_own() -> None:
    problem = testing.Problem(
        name="mine",
        make_model=lambda: torch.nn.Linear(2, 1),
        make_batch=lambda n, generator: (
            torch.randn(n, 2, generator=generator),
            torch.randn(n, 1, generator=generator),
        ),
        loss=torch.nn.functional.mse_loss,
    )
    assert check_algorithm(clip, problems=problem, max_examples=2).ok


# Algorithms that are made already


def test_an_instance_is_copied_as_it_is() -> None:
    with pytest.raises(CheckFailed) as caught:
        check_algorithm(remembers_in_a_closure(), **FEW)
    assert [outcome.law for outcome in caught.value.report.failures] == ["memory"]
    composed = pl.compose(clip(), pl.algorithms.ema(half_life="2ba"))
    assert check_algorithm(composed, problems="linear", max_examples=1).subject == "gradient_clipping + ema"


def test_what_can_t_be_copied_is_said() -> None:
    import threading

    lock = threading.Lock()

    @pl.algorithm(Event.BATCH_END)
    def locked(state: pl.State) -> pl.State:
        with lock:
            return state

    with pytest.raises(pl.ArgumentError, match=r"can't be copied .*give a function that makes it"):
        check_algorithm(locked)


# Laws that work alone


def test_a_law_alone_draws_its_cases_or_takes_one() -> None:
    laws.purity(clip, max_examples=2)
    laws.order()
    case = testing.Case(plan=Plan(batches=(2,), max_duration="1ba"))
    laws.resumption(clip, case)
    with pytest.raises(LawViolation, match="purity does not hold"):
        laws.purity(adds_in_place, case)


@pytest.mark.parametrize(
    ("law", "given", "arguments", "error", "message"),
    [
        (
            laws.purity,
            clip,
            {"case": testing.Seed(0)},
            pl.ArgumentTypeError,
            "a law of algorithms is tried on a .*Case",
        ),
        (laws.of_callbacks.purity, None, {}, pl.ArgumentTypeError, "give a function that makes a callback"),
        (laws.of_scripts.value, clip, {}, pl.ArgumentTypeError, r"give testing\.Scripted\(make_script, start\)"),
    ],
)
def test_a_law_is_of_one_kind_of_subject(law: Any, given: Any, arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        law(given, **arguments)


def test_a_subject_that_is_made_already_is_taken_as_it_is() -> None:
    """As laws of one's own have it, which may try another law on theirs."""
    subject = AlgorithmSubject(adds_in_place)
    with pytest.raises(LawViolation, match="purity does not hold"):
        laws.purity(subject, problems="linear", max_examples=2)


def test_a_law_in_a_hypothesis_test_of_one_s_own() -> None:
    @settings(max_examples=3)
    @given(testing.cases(problems="linear"), st.floats(0.1, 2.0))
    def holds(case: testing.Case, norm: float) -> None:
        laws.purity(lambda: pl.algorithms.gradient_clipping("norm", norm), case)

    holds()


@pytest.mark.slow
def test_only_the_clock_s_own_times_may_be_others_on_processes() -> None:
    """What an algorithm remembers is its result, also where its name ends as those of the timestamp do."""

    def wait(state: pl.State) -> pl.State:
        torch.distributed.all_reduce(torch.ones(1))
        return state.remember("waiting", {"idle_seconds": float(os.getpid())})  # one process in the simulation

    def make() -> pl.Algorithm:
        return pl.Algorithm("waiting", {Event.BATCH_END: wait}, init=lambda state: {"idle_seconds": 0.0})

    case = testing.Case(plan=Plan(batches=(2,), max_duration="1ba"))
    with pytest.raises(LawViolation, match=r"on 2 processes with gloo, rank 1 differs .* at BATCH_END"):
        laws.rank_agreement(make, case)


@pytest.mark.slow
def test_an_algorithm_is_sent_to_processes_whatever_its_cases_are_drawn_from() -> None:
    """A strategy, which a check is given, can't be sent."""

    def share(state: pl.State) -> pl.State:
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.ones(1))
        return state

    report = check_algorithm(
        lambda: pl.Algorithm("sharing", {Event.BATCH_END: share}), plans=testing.plans(max_batches=2), **QUICK
    )
    assert report["rank_agreement"].result == "passed"


def test_whether_two_algorithms_commute_is_a_fact() -> None:
    halve = lambda: pl.algorithm(Event.AFTER_LOSS, name="halve")(lambda s: s.replace(loss=s.loss / 2))  # noqa: E731
    add = lambda: pl.algorithm(Event.AFTER_LOSS, name="add")(lambda s: s.replace(loss=s.loss + 1))  # noqa: E731
    double = lambda: pl.algorithm(Event.AFTER_LOSS, name="double")(lambda s: s.replace(loss=s.loss * 4))  # noqa: E731
    options: dict[str, Any] = {"cases": testing.cases(problems="linear"), "max_examples": 3}
    assert testing.commutation(halve, double, **options)
    found = testing.commutation(halve, add, **options)
    assert not found
    assert found.counterexample is not None
    assert found.counterexample.leaf == "state.loss"
    assert "They do not commute" in str(found)
    with pytest.raises(pl.PureLoopError, match="two algorithms are named 'halve'"):
        testing.commutation(halve, halve, **options)


def test_which_pairs_of_several_commute() -> None:
    A = pl.algorithms
    makers = [
        lambda: A.mixup(),
        lambda: A.cutmix(),
        lambda: A.gradient_clipping("norm", 0.1),
        lambda: A.gradient_noise(),
    ]
    matrix = testing.commutation_matrix(makers, problems="convolution", max_examples=2)
    assert matrix.commute("cutmix", "mixup") is None
    assert matrix.commute("mixup", "gradient_clipping") is True
    assert matrix.commute("gradient_noise", "gradient_clipping") is False
    assert str(matrix).splitlines()[1:3] == ["           cutmix  - .", "gradient_clipping  = = ."]
    with pytest.raises(pl.ArgumentError, match="give two of mixup, cutmix"):
        matrix.commute("mixup", "mixup")
    with pytest.raises(pl.ArgumentError, match="at least two"):
        testing.commutation_matrix([A.mixup])


# The package


def test_the_package_imports_no_pytest_and_the_core_no_hypothesis() -> None:
    code = """
import sys, pure_loop
assert "hypothesis" not in sys.modules
import pure_loop.testing
assert "pytest" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_hypothesis_the_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["hypothesis"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "hypothesis" else real(name, *rest)
import pure_loop
try:
    import pure_loop.testing
except pure_loop.MissingExtraError as error:
    assert "pip install 'pure_loop[testing]'" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [True, False])
def test_what_looks_at_all_of_the_package_needs_no_hypothesis(blocked: bool) -> None:
    code = """
import inspect, pydoc
import pure_loop as pl
getmembers = inspect.getmembers  # before a star brings pl.inspect
from pure_loop import *
assert fit is pl.fit
names = [name for name, _ in getmembers(pl)]
assert "schedules" in names
pydoc.render_doc(pl)
"""
    if blocked:
        code = f"import sys; sys.modules['hypothesis'] = None\n{code}assert 'testing' not in dir(pl)"
    else:
        code += "assert 'testing' in dir(pl) and pl.testing.check_algorithm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_evaluators_of_plans_are_those_of_cases() -> None:
    plan = Plan(batches=(2,), max_duration="1ba", evaluators={"val": EvaluatorPlan(batches=(1, 2))})
    assert [len(batch[0]) for batch in testing.Case(plan=plan).held_out()["val"]] == [1, 2]


def on_a_gpu(*_: Any, **__: Any) -> list[rank_laws.Witness]:
    """What a run on a GPU is a witness of."""
    with FakeTensorMode():
        return [rank_laws.Witness(Event.FIT_END, (), {"params": {"weight": torch.empty(2, device="cuda")}})]


@pytest.mark.parametrize("devices", [1, 2])
def test_ranks_on_gpus_are_compared_where_each_has_one(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def on_ranks(case: Any, make: Any, fit: Any, ranks: int, kind: str) -> list[Any]:
        tried.append(kind)
        return []

    monkeypatch.setattr(rank_laws, "witness", on_a_gpu)
    monkeypatch.setattr(rank_laws, "on_ranks", on_ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    skip = {name: "not on trial" for name in (law.name for law in laws.OF_ALGORITHMS) if name != "world_size"}
    outcome = check_algorithm(pl.algorithms.sam, skip=skip, max_examples=1).outcomes
    (found,) = [each for each in outcome if each.law == "world_size"]
    if devices == 2:
        assert (found.result, tried) == ("passed", ["replicate", "shard"])
        return
    assert (found.result, tried) == ("skipped", [])
    assert found.reason == "each of 2 ranks needs a CUDA device, and there are 1"
    with pytest.raises(unittest.SkipTest, match="needs a CUDA device"):
        laws.world_size(pl.algorithms.sam, max_examples=1)
