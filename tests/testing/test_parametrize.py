"""parametrize_with_checks: tests of their own, expected failures, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import unittest
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from pure_loop import testing
from pure_loop.testing import CheckFailed
from pure_loop.testing.wrong_algorithms import (
    adds_in_place,
    counts_microbatches_as_batches,
)

FEW: dict[str, Any] = {"problems": "linear", "max_examples": 4}


def clip() -> pl.Algorithm:
    return pl.algorithms.gradient_clipping("norm", 1.0)


def run_pytest(tmp_path: Path, source: str, *options: str) -> tuple[int, str]:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(source))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *options, "test_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_each_pair_is_a_test_of_its_own(tmp_path: Path) -> None:
    code, output = run_pytest(
        tmp_path,
        """
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
        """,
        *("-k", "purity or microbatch_invariance"),
    )
    assert code == 1
    assert "PASSED test_it.py::test_contract[gradient_clipping-purity]" in output
    assert "XFAIL test_it.py::test_contract[warm_up-microbatch_invariance] - warms up by microbatches" in output
    assert "FAILED test_it.py::test_wrong[decay-purity]" in output
    assert output.count("FAILED test_it.py::") == 1
    assert "SKIPPED" in output
    assert "rests on purity" in output


@pytest.mark.slow
def test_without_pytest_the_function_runs_all_pairs() -> None:
    code = """
import sys, unittest
import pure_loop as pl
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def pairs(decorate: Any) -> list[Any]:
    """What pytest will call the decorated function with."""

    def contract(algorithm: Any, check: Any) -> None:
        check(algorithm)

    (mark,) = decorate(contract).pytestmark
    return list(mark.args[1])


def test_expected_failures_by_name() -> None:
    decorate = testing.parametrize_with_checks(
        [clip(), counts_microbatches_as_batches()],
        expected_failures={"warm_up": {"microbatch_invariance": "warms up by microbatches"}},
        **FEW,
    )
    results: dict[str, Any] = {}
    for algorithm, check in pairs(decorate):
        if check.name == "microbatch_invariance":
            try:
                results[check.subject] = check(algorithm).result
            except pytest.xfail.Exception as expected:
                results[check.subject] = str(expected)
    assert results == {"gradient_clipping": "passed", "warm_up": "warms up by microbatches"}


def test_a_check_is_of_one_algorithm() -> None:
    algorithm, check = pairs(testing.parametrize_with_checks([clip], **FEW))[0]
    check(algorithm)
    with pytest.raises(pl.ArgumentError, match="this check is that of"):
        check(adds_in_place())


def test_an_expected_failure_of_all_must_fail_somewhere() -> None:
    decorate = testing.parametrize_with_checks(
        [clip(), pl.algorithms.ema(half_life="2ba")], expected_failures={"microbatch_invariance": "no"}, **FEW
    )
    listed = pairs(decorate)
    checks = [check for _, check in listed if check.name == "microbatch_invariance"]
    with pytest.raises(CheckFailed, match="was expected to fail"):
        checks[0]()
    decorate = testing.parametrize_with_checks([clip()], skip={"closing": "it is a test"}, **FEW)
    skipped = next(check for _, check in pairs(decorate) if check.name == "closing")
    with pytest.raises(unittest.SkipTest, match="it is a test"):
        skipped()


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, "give at least one algorithm"),
        (clip(), {}, "give a list of algorithms"),
        ([3], {}, "neither"),
        ([clip], {"expected_failures": {"clip": {"purity": "x"}}}, "no algorithm in the list is named 'clip'"),
        ([clip], {"expected_failures": {"purty": "x"}}, "there is no law 'purty'"),
    ],
)
def test_parametrize_refuses(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(pl.PureLoopError, match=message):
        testing.parametrize_with_checks(given, **options)
