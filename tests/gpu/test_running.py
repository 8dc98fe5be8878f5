"""``make gpu``: a part that hangs, crashes or raises costs its own results at most, and what is written is whole."""

from __future__ import annotations

import faulthandler
import json
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from tests.gpu import __main__ as command_line
from tests.gpu import page, profiling
from tests.gpu.results import Results, asked, read
from tests.gpu.running import ROOT, Part, Run, ended

ENDINGS = {
    "returns": ("", "done"),
    "raises": ("raise ArithmeticError('of its own')", "ended with exit status 1"),
    "exits": ("os._exit(3)", "ended with exit status 3"),
    "crashes": ("ctypes.string_at(0)", "ended by SIGSEGV"),
    "hangs": ("time.sleep(60)", "stopped at its limit of"),
    "hangs, and ignores signals": (
        "[signal.signal(each, signal.SIG_IGN) for each in (signal.SIGTERM, signal.SIGINT)]; time.sleep(60)",
        "stopped at its limit of",
    ),
}


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes parts of code, which runs after each has written one result and started a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(codes: dict[str, str]) -> list[Part]:
        made = []
        for number, (name, code) in enumerate(codes.items()):
            text = f"""
                import ctypes, os, signal, subprocess, sys, time
                from tests.gpu.results import asked
                part = asked()
                part.results.write("begun", value=True)
                child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
                part.results.write("child", value=child.pid)
                {code}
                part.results.write("over", value=True)
            """
            (tmp_path / f"part_{number}.py").write_text(textwrap.dedent(text))
            made.append(Part(name, f"part_{number}", 1.0))
        return made

    return make


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_whatever_a_part_does_its_results_are_kept_and_the_next_one_runs(parts: Any, tmp_path: Path) -> None:
    """Neighbours: every way in which a process ends, and the processes that it has started. Slow: some hang."""
    output = tmp_path / "gpu.json"
    run = Run("cpu", 12.0, output)
    seen = []
    for part, entry in run.each(parts({name: code for name, (code, _) in ENDINGS.items()})):
        seen.append(part.name)
        assert ENDINGS[part.name][1] in entry["state"]
        assert entry["found"]["begun"]
        assert ("over" in entry["found"]) == (part.name == "returns")
        for _ in range(50):
            if not is_alive(entry["found"]["child"]):
                break
            time.sleep(0.1)
        assert not is_alive(entry["found"]["child"])
        assert json.loads(output.read_text())["parts"][part.name] == entry
    assert seen == [*ENDINGS]
    found = json.loads(output.read_text())
    assert found["kind"] == "cpu"
    assert "ArithmeticError: of its own" in found["parts"]["raises"]["log"][-1]
    assert any("Segmentation fault" in line for line in found["parts"]["crashes"]["log"])


def test_time_that_a_part_leaves_is_given_to_those_after_it_and_one_that_can_not_start_is_no_end(
    parts: Any, tmp_path: Path
) -> None:
    run = Run("cpu", 60.0, tmp_path / "gpu.json")
    nowhere = Part("nowhere", "tests.gpu.nowhere", 1.0)
    first, entry = (entry for _, entry in run.each([*parts({"one": ""}), nowhere]))
    assert first["limit"] == pytest.approx(30, abs=1)
    assert 30 < entry["limit"] <= 60
    assert entry["state"] == "ended with exit status 1"
    assert entry["found"] == {}
    assert "No module named tests.gpu.nowhere" in entry["log"][-1]


@pytest.mark.parametrize(("found", "status"), [({"available": True}, 0), ({}, 1), ({"available": False}, 1)])
def test_the_exit_status_says_whether_anything_ran(
    found: Any, status: int, parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code = "; ".join(f"part.results.write({key!r}, value={value})" for key, value in found.items())
    (part,) = parts({"versions": code})
    if not found:
        Path(tmp_path / "part_0.py").write_text("raise ImportError('torch')")
    others = [Part("laws", "tests.gpu.nowhere", 1.0)]
    monkeypatch.setattr(command_line, "PARTS", (part, *others))
    output = tmp_path / "new" / "gpu.json"
    assert command_line.main(["--device", "cpu", "--minutes", "0.3", "--output", str(output)]) == status
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    if found.get("available") is False:
        assert "no CUDA device" in printed.err
        assert len(lines) == 1
    else:
        assert [line.split()[0] for line in lines[:2]] == ["versions", "laws"]
        assert f"{len(found)} of 2 parts have results" in lines[-1]
    assert output.exists()


def test_minutes_that_are_none_are_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["--minutes", "0"])
    assert "--minutes 8" in capsys.readouterr().err


def test_results_that_were_cut_off_are_left_out(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    results.write("a", "b", value=1)
    results.write("a", "b", value=2)
    results.write("a", "c", value=[3])
    with results.path.open("a") as file:
        file.write('{"keys": ["a", "d"], "val')
    assert read(results.path) == {"a": {"b": 2, "c": [3]}}
    assert read(tmp_path / "nowhere") == {}


def test_a_part_ends_before_it_is_stopped(tmp_path: Path) -> None:
    end = str(time.monotonic() + 100)
    part = asked(["--kind", "simulated", "--end", end, "--results", str(tmp_path / "results"), "order", "3"])
    faulthandler.cancel_dump_traceback_later()
    assert (part.device, part.kind, part.rest) == ("cuda", "simulated", ("order", "3"))
    assert 90 < part.left < 98
    words = [None, "ended with exit status 2", "ended by SIGKILL", "ended by SIGRTMAX"]
    assert [ended(code) for code in (0, 2, -9, -64)] == words


def event(name: str, start: float, end: float, device: Any = DeviceType.CPU, annotation: bool = False) -> Any:
    times = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, device_type=device, time_range=times, is_user_annotation=annotation)


EVENTS = [
    event("span", 10, 20),
    event("cudaStreamSynchronize", 5, 9),
    event("cudaStreamSynchronize", 12, 14),
    event("cudaLaunchKernel", 14, 15),
    event("span", 30, 40),
    event("cudaMemcpyAsync", 39, 45),
    event("cudaStreamSynchronize", 41, 45),
    event("kernel", 13, 33, DeviceType.CUDA),
    event("copy", 33, 43, DeviceType.CUDA),
    event("span", 13, 43, DeviceType.CUDA, annotation=True),
]


def test_what_the_profiler_saw_is_read() -> None:
    """By hand: 20 and 10 microseconds of the device, and of the host what begins inside a span."""
    assert profiling.kernels(EVENTS, 2) == {"busy": 15e-6, "kernels": 1.0}
    assert profiling.kernels(EVENTS[:6], 2) == {"busy": None, "kernels": None}
    assert profiling.inside(EVENTS, "span") == {"cudaStreamSynchronize": 1, "cudaLaunchKernel": 1, "cudaMemcpyAsync": 1}


SAMPLE = json.loads((Path(__file__).parent / "sample.json").read_text())
# What a CPU gave, as if a GPU had.
OF_A_GPU = {**SAMPLE, "kind": "cuda"}


def test_the_page_has_a_section_of_each_part() -> None:
    text = page.render(OF_A_GPU)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "## The machine",
        "## Tests",
        "## Laws",
        "## Waiting for the device",
        "## Mixed precision",
        "## Cost of a step",
    ]
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1, table
    assert "torch " + SAMPLE["parts"]["versions"]["found"]["torch"] in page.sentence(OF_A_GPU)


def test_results_of_another_device_or_of_none_are_refused() -> None:
    for kind in ("cpu", "simulated"):
        for write in (page.render, page.sentence):
            with pytest.raises(ValueError, match=f"DEVICE={kind}.*not those of a GPU"):
                write({**SAMPLE, "kind": kind})
    with pytest.raises(ValueError, match="not those of a GPU"):
        page.render({**OF_A_GPU, "parts": {}})


def test_a_part_is_one_line_and_without_results_has_no_tables() -> None:
    for missing, found in SAMPLE["parts"].items():
        assert len(page.line(missing, found).splitlines()) == 1
        entry = {"state": "stopped at its limit of 5 s", "limit": 5, "seconds": 5, "found": {}}
        parts = {**SAMPLE["parts"], missing: entry}
        assert "no results (stopped at its limit of 5 s)" in page.line(missing, entry)
        if missing != "versions":
            assert f"`{missing}` has no results" in page.render({**OF_A_GPU, "parts": parts})
            del parts[missing]
            page.render({**OF_A_GPU, "parts": parts})


def test_the_page_and_the_readme_say_what_ran() -> None:
    assert page.render(None) == page.sentence(None) == page.NOTHING_RAN
    path = ROOT / "docs" / "gpu.json"
    found = json.loads(path.read_text()) if path.exists() else None
    assert f"<!-- generated: gpu -->\n\n{page.render(found)}\n\n<!-- end -->" in (ROOT / "docs" / "gpu.md").read_text()
    install = (ROOT / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    assert page.sentence(found) in " ".join(install.split())
