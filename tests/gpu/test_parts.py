"""Each part of ``make gpu`` on a CPU, at a small size, and tests that hang or end their process."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import cost, laws, marked, page, precision, synchronisations, versions
from tests.gpu.competitors import AGAIN, BASE, LOOPS, workload_on
from tests.gpu.results import Asked, Results, read

# Each part takes seconds, and some start processes.
pytestmark = pytest.mark.slow


@pytest.fixture
def part(tmp_path: Path) -> Asked:
    return Asked("cpu", "cpu", Results(tmp_path / "results.jsonl"), time.monotonic() + 250, ())


def found_by(part: Asked, name: str) -> dict[str, Any]:
    """What a part has written, of which a line can be made."""
    found = read(part.results.path)
    assert page.line(name, {"found": found, "state": "done", "seconds": 1.0, "limit": 2.0})
    return found


TESTS = """
    import os, time
    import pytest
    pytestmark = pytest.mark.gpu

    def test_passes(): ...
    def test_fails(): assert 1 == 2, "of its own"
    def test_hangs(): time.sleep(100)
    def test_skips(): pytest.skip("for a reason")
    def test_exits(): os._exit(5)
    def test_crashes(): os.abort()
    def test_loses_the_device(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
    @pytest.fixture
    def broken(): raise OSError("in a fixture")
    def test_has_no_fixture(broken): ...
    @pytest.mark.timeout(5)
    def test_has_a_marker_of_a_plugin(): ...
    @pytest.mark.slow
    def test_passes_at_the_end(): ...
"""


def test_a_test_that_hangs_or_ends_its_process_costs_itself_alone(part: Asked, tmp_path: Path) -> None:
    """Neighbours: a failure, a skip, a fixture that fails, a marker of a plugin that is not used, a file that can't
    be imported."""
    files = {"test_some.py": textwrap.dedent(TESTS), "test_other.py": "import nowhere_to_be_found"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    marked.main(part, [str(tmp_path / name) for name in files], limit=8.0)
    found = found_by(part, "tests")
    assert found["selected"] == 10
    assert found["outcomes"] == {"passed": 3, "failed": 3, "broken off": 3, "skipped": 1}
    assert found["not reached"] == []
    assert found["skipped"] == {"Skipped: for a reason": 1}
    ((_, why),) = found["not collected"].items()
    assert "nowhere_to_be_found" in why
    whys = {name.rpartition("::")[2]: each["why"] for name, each in found["failures"].items()}
    assert whys["test_hangs"] == "not over after 8 s"
    assert whys["test_exits"] == "its process ended with exit status 5"
    assert whys["test_crashes"] == "its process ended by SIGABRT"
    assert "of its own" in whys["test_fails"]
    assert "in a fixture" in whys["test_has_no_fixture"]
    assert "illegal memory access" in whys["test_loses_the_device"]
    assert len(whys) == 6


def test_a_process_of_tests_that_does_not_begin_is_told(
    part: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.py").write_text("raise ImportError('no pytest here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(marked, "command", lambda *given: ["env", "python", str(tmp_path / "pytest.py")])
    marked.main(part, [])
    assert set(found_by(part, "tests")["not collected"].values()) == {"ImportError: no pytest here"}


def test_versions_and_files_with_tests_for_a_gpu(part: Asked) -> None:
    versions.main(part)
    found = found_by(part, "versions")
    assert found["available"] is True
    assert "pure_loop" in found["describes"]
    assert {"tests/laws/test_gpu.py", "tests/data/test_data.py"} <= set(marked.files())
    assert "tests/gpu/test_running.py" not in marked.files()


def test_laws(part: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PLANS": 8, "EXAMPLES": 2, "BOUNDARIES_TRIED": 4}.items():
        monkeypatch.setattr(laws, name, value)
    laws.order(part, 1)
    for law in (laws.resumption, laws.evaluation, laws.microbatches):
        law(part)
    found = found_by(part, "laws")
    assert set(found) == {"order", "resumption", "evaluation", "microbatches"}
    for tried in found.values():
        assert tried["tried"] == tried["wanted"]
        assert "failures" not in tried


def test_a_law_that_fails_is_told_with_its_case(part: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Any) -> None:
        if case.plan.evaluators:
            raise ArithmeticError("wrong\nhere")

    laws.tried(part, "order", laws.cases(), wrong, 20, 0)
    found = found_by(part, "laws")["order"]
    assert found["tried"] == {"0": 20}
    assert set(found["failures"].values()) == {"ArithmeticError: wrong"}
    assert all("evaluators" in case for case in found["failures"])


def test_a_run_that_does_not_resume_is_told(part: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that forgets the optimizer's memory."""
    monkeypatch.setattr(laws, "BOUNDARIES_TRIED", 4)
    load = laws.pl.load

    def forgetful(path: str, **options: Any) -> Any:
        state = load(path, **options)
        zeros = {
            name: {key: tensor * 0 for key, tensor in each.items()}
            for name, each in state.opt_state.items()
            if isinstance(each, dict)
        }
        return state.replace(opt_state={**state.opt_state, **zeros})

    monkeypatch.setattr(laws.pl, "load", forgetful)
    laws.resumption(part)
    failures = found_by(part, "laws")["resumption"]["failures"]
    assert len(failures) >= 2


def test_synchronisations_and_precision(part: Asked) -> None:
    synchronisations.main(part)
    found = found_by(part, "synchronisations")
    assert list(found) == list(synchronisations.RUNS)
    for run in found.values():
        assert run["by profiler"]["batches"] == len(synchronisations.WATCHED)
        assert run["by profiler"]["waits"] is None  # the CPU has no calls of CUDA
    part.results.path.unlink()
    precision.main(part)
    found = found_by(part, "precision")
    assert list(found) == list(precision.PRECISIONS)
    for name in ("amp_bf16", "amp_fp16"):
        assert found[name]["resumed bit for bit"]
        assert found[name]["learns"]


def test_cost(part: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that can't be, and one that ends its process, cost their rows; and the others are measured."""
    eager = dict.fromkeys([BASE, "pl.fit", "by hand, a CUDA graph", "unknown"])
    small = {"TRIED": (("W1",),), "COMPILING": 1.0, "COMPILED": {AGAIN: None}, "EAGER": eager, "TURNS": 2}
    for name, value in small.items():
        monkeypatch.setattr(cost, name, value)
    cost.main(part)
    found = found_by(part, "cost")
    assert list(found) == ["W1"]
    for rows in found.values():
        assert list(rows) == [BASE, "pl.fit", "by hand, a CUDA graph", "unknown", AGAIN]
        assert rows[BASE]["wall ratio"] == rows[AGAIN]["wall ratio"] == 1.0
        assert rows["pl.fit"]["state"] == "measured"
        assert rows["pl.fit"]["wall"] > 0
        assert "only CUDA" in rows["by hand, a CUDA graph"]["error"]
        assert "KeyError" in rows["unknown"]["error"]


def test_each_loop_makes_steps_of_each_workload() -> None:
    """Those that don't compile, and need no CUDA."""
    for name in ("W1", "W2", "W3", "W4", "W5", "25M", "GPT"):
        for loop in (BASE, "pl.fit", "pl.fit, donate=True", "pl.fit, States kept"):
            steps = LOOPS[loop](workload_on("cpu", name, small=True), "cpu")
            assert [next(steps) for _ in range(3)] == [1, 1, 1]
            steps.close()
