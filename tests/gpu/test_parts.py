"""``make gpu``: a part or a test that hangs, crashes or raises costs its own results, and each part runs on a CPU."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as command_line
from bench.gpu import cost, laws, marked, page, precision, synchronisations, versions
from bench.gpu.competitors import BASE, EAGER, LOOPS, workload_on
from bench.gpu.results import Asked, Results, read
from bench.gpu.running import Part

# Parts are processes, some of which hang, and each loads torch.
pytestmark = pytest.mark.slow


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


PART = """
import ctypes, os, signal, subprocess, sys, time
from bench.gpu.results import asked
part = asked()
part.results.write("begun", value=True)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
part.results.write("child", value=child.pid)
{}
part.results.write("over", value=True)
"""
ENDINGS = {
    "versions": ("part.results.write('available', value=True)", "done"),
    "tests": ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", "stopped at its limit of 2 s"),
    "laws": ("raise ArithmeticError('of its own')", "ended with exit status 1"),
    "cost": ("ctypes.string_at(0)", "ended by SIGSEGV"),
}


def test_whatever_a_part_does_its_results_are_kept_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """And what it has started is killed; the exit status says whether anything ran."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(page, "_SUMMARIES", dict.fromkeys([*ENDINGS, "precision"], str))
    output, parts = tmp_path / "new" / "gpu.json", []
    for name, (code, _) in ENDINGS.items():
        (tmp_path / f"part_{name}.py").write_text(PART.format(code))
        parts.append(Part(name, f"part_{name}", 0.1 if name == "tests" else 1.0))

    def run(*chosen: Part) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(command_line, "PARTS", chosen)
        status = command_line.main(["--device", "cpu", "--minutes", "1", "--output", str(output)])
        return status, json.loads(output.read_text())["parts"]

    nowhere = Part("precision", "bench.gpu.nowhere", 1.0)
    status, found = run(*parts, nowhere)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:-1]] == [*ENDINGS, "precision"]
    assert status == 0
    assert "4 of 5 parts have results" in printed[-1]
    for name, (_, state) in ENDINGS.items():
        entry = found[name]
        assert state.replace("2 s", "") in entry["state"]
        assert ("over" in entry["found"]) == (name == "versions")
        assert entry["found"]["begun"]
        assert not is_alive(entry["found"]["child"])
    assert "ArithmeticError: of its own" in found["laws"]["log"][-1]
    assert "No module named bench.gpu.nowhere" in found["precision"]["log"][-1]
    # The time that a part leaves is given to those after it.
    assert found["versions"]["limit"] == pytest.approx(60 / 4.1, abs=1)
    assert found["precision"]["limit"] > 30

    assert run(nowhere)[0] == 1
    (tmp_path / "part_versions.py").write_text(PART.format("part.results.write('available', value=False)"))
    status, found = run(*parts)
    assert (status, list(found)) == (1, ["versions"])
    assert "no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main(["--minutes", "0"])
    assert "--minutes 8" in capsys.readouterr().err


@pytest.fixture
def part(tmp_path: Path) -> Asked:
    return Asked("cpu", "cpu", Results(tmp_path / "results.jsonl"), time.monotonic() + 250, ())


def found_by(part: Asked, name: str) -> dict[str, Any]:
    """What a part has written, of which a line can be made."""
    found = read(part.results.path)
    assert page.line(name, {"found": found, "state": "done", "seconds": 1.0, "limit": 2.0})
    part.results.path.unlink()
    return found


TESTS = """
    import os, time
    import pytest
    pytestmark = pytest.mark.gpu

    def test_fails(): assert 1 == 2, "of its own"
    def test_hangs(): time.sleep(100)
    def test_skips(): pytest.skip("for a reason")
    def test_crashes(): os.abort()
    @pytest.mark.timeout(5)
    def test_has_a_marker_of_a_plugin(): ...
    def test_loses_the_device(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
    @pytest.fixture
    def broken(): raise OSError("in a fixture")
    def test_has_no_fixture(broken): ...
    @pytest.mark.slow
    def test_passes_at_the_end(): ...
"""


def test_a_test_that_hangs_or_ends_its_process_costs_itself_alone(
    part: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it: a failure, a skip, a fixture that fails, a file that can't be imported, a process that can't begin."""
    monkeypatch.setattr(marked.os, "cpu_count", lambda: 2)
    files = {"test_some.py": textwrap.dedent(TESTS), "test_other.py": "import nowhere_to_be_found"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    marked.main(part, [str(tmp_path / name) for name in files], limit=3.0)
    found = found_by(part, "tests")
    assert found["selected"] == 8
    assert found["outcomes"] == {"passed": 2, "failed": 3, "broken off": 2, "skipped": 1}
    assert found["not reached"] == []
    assert found["skipped"] == {"Skipped: for a reason": 1}
    assert "nowhere_to_be_found" in " ".join(found["not collected"].values())
    whys = {name.rpartition("::")[2]: each["why"] for name, each in found["failures"].items()}
    for name, why in {
        "test_hangs": "not over after 3 s",
        "test_crashes": "its process ended by SIGABRT",
        "test_fails": "of its own",
        "test_has_no_fixture": "in a fixture",
        "test_loses_the_device": "illegal memory access",
    }.items():
        assert why in whys.pop(name)
    assert whys == {}
    monkeypatch.setattr(marked, "command", lambda *_: ["python", "-c", "raise ImportError('no pytest here')"])
    marked.main(part, [])
    assert set(found_by(part, "tests")["not collected"].values()) == {"ImportError: no pytest here"}
    assert "tests/progress/test_lines.py" in marked.files()


def test_laws_hold_and_what_breaks_one_is_told_with_its_case(part: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is wrong where there are evaluators."""
    for name, value in {"PLANS": 8, "EXAMPLES": 1, "BOUNDARIES_TRIED": 3, "PRECISIONS": ("amp_bf16",)}.items():
        monkeypatch.setattr(laws, name, value)
    laws.order(part, 1)
    for law in ("resumption", "evaluation", "microbatches"):
        laws.main(Asked("cpu", "cpu", part.results, part.end, (law,)))
    found = found_by(part, "laws")
    assert set(found) == {"order", "resumption", "evaluation", "microbatches"}
    for tried in found.values():
        assert tried["tried"] == tried["wanted"]
        assert "failures" not in tried

    def wrong(case: Any) -> None:
        if case.plan.evaluators:
            raise ArithmeticError("wrong\nhere")

    laws.tried(part, "order", laws.cases(), wrong, 20, 0)
    found = found_by(part, "laws")["order"]
    assert found["tried"] == {"0": 20}
    assert set(found["failures"].values()) == {"ArithmeticError: wrong"}
    assert all("evaluators" in case for case in found["failures"])


def test_versions_synchronisations_and_precision(part: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    versions.main(part)
    found = found_by(part, "versions")
    assert found["available"] is True
    assert "pure_loop" in found["describes"]
    runs = {"plain": synchronisations.RUNS["plain"]}
    monkeypatch.setattr(synchronisations, "RUNS", runs)
    synchronisations.main(part)
    found = found_by(part, "synchronisations")
    assert list(found) == list(runs)
    for run in found.values():
        assert run["by profiler"]["batches"] == len(synchronisations.WATCHED)
        assert run["by profiler"]["waits"] is None  # the CPU has no calls of CUDA
    precision.main(part)
    found = found_by(part, "precision")
    assert list(found) == list(precision.PRECISIONS)
    for name in ("amp_bf16", "amp_fp16"):
        assert found[name]["resumed bit for bit"]
        assert found[name]["learns"]


def test_the_cost_of_loops_that_run_is_measured_and_of_the_others_their_error_is_told(
    part: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loop that needs neither CUDA nor the compiler makes steps, and each workload is made."""
    names = [BASE, "by hand, a CUDA graph", "unknown"]
    small = {"TRIED": (("W1",),), "COMPILED": {}, "EAGER": dict.fromkeys(names), "TURNS": 2}
    for name, value in small.items():
        monkeypatch.setattr(cost, name, value)
    cost.main(part)
    rows = found_by(part, "cost")["W1"]
    assert list(rows) == names
    assert (rows[BASE]["state"], rows[BASE]["wall ratio"]) == ("measured", 1.0)
    assert rows[BASE]["wall"] > 0
    assert "only CUDA" in rows["by hand, a CUDA graph"]["error"]
    assert "KeyError" in rows["unknown"]["error"]
    eager = [name for name in EAGER if "graph" not in name]
    for number, workload in enumerate(("W1", "W2", "W3", "W4", "W5", "25M", "GPT")):
        steps = LOOPS[eager[number % len(eager)]](workload_on("cpu", workload, small=True), "cpu")
        assert [next(steps) for _ in range(2)] == [1, 1]
        steps.close()
