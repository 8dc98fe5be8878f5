"""What ``make gpu`` found, as a page, a line and the README's sentence; and how the parts write it."""

from __future__ import annotations

import faulthandler
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from bench.gpu import page, profiling
from bench.gpu.results import Results, asked, read
from bench.gpu.running import ROOT, ended

# What a CPU gave, with tests that are made up; and the same as if a GPU had given it.
SAMPLE = json.loads((Path(__file__).parent / "sample.json").read_text())
OF_A_GPU = {**SAMPLE, "kind": "cuda"}
SECTIONS = ("The machine", "Tests", "Laws", "Waiting for the device", "Mixed precision", "Cost of a step")


def test_the_page_has_a_section_of_each_part_and_each_part_a_line() -> None:
    text = page.render(OF_A_GPU)
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [*SECTIONS]
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1, table
    assert "torch " + SAMPLE["parts"]["versions"]["found"]["torch"] in page.sentence(OF_A_GPU)
    for missing, found in SAMPLE["parts"].items():
        assert len(page.line(missing, found).splitlines()) == 1
        entry = {"state": "stopped at its limit of 5 s", "limit": 5, "seconds": 5, "found": {}}
        assert "no results (stopped at its limit of 5 s)" in page.line(missing, entry)
        if missing != "versions":
            assert f"`{missing}` has no results" in page.render(
                {**OF_A_GPU, "parts": {**SAMPLE["parts"], missing: entry}}
            )
            page.render(
                {**OF_A_GPU, "parts": {name: part for name, part in SAMPLE["parts"].items() if name != missing}}
            )


def test_results_of_another_device_or_of_none_are_refused() -> None:
    for kind in ("cpu", "simulated"):
        for write in (page.render, page.sentence):
            with pytest.raises(ValueError, match=f"DEVICE={kind}.*not those of a GPU"):
                write({**SAMPLE, "kind": kind})
    with pytest.raises(ValueError, match="not those of a GPU"):
        page.render({**OF_A_GPU, "parts": {}})


def test_the_page_and_the_readme_say_what_ran() -> None:
    assert page.render(None) == page.sentence(None) == page.NOTHING_RAN
    path = ROOT / "docs" / "gpu.json"
    found = json.loads(path.read_text()) if path.exists() else None
    assert f"<!-- generated: gpu -->\n\n{page.render(found)}\n\n<!-- end -->" in (ROOT / "docs" / "gpu.md").read_text()
    beginning = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert page.sentence(found) in " ".join(beginning.split())


def test_results_that_were_cut_off_are_left_out_and_a_part_ends_before_it_is_stopped(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    for keys, value in {("a", "b"): 1, ("a", "b", ""): 0, ("a", "c"): [3]}.items():
        results.write(*keys[:2], value=value)
    with results.path.open("a") as file:
        file.write('{"keys": ["a", "d"], "val')
    assert read(results.path) == {"a": {"b": 0, "c": [3]}}
    assert read(tmp_path / "nowhere") == {}
    end = str(time.monotonic() + 100)
    part = asked(["--kind", "simulated", "--end", end, "--results", str(tmp_path / "results"), "order", "3"])
    faulthandler.cancel_dump_traceback_later()
    assert (part.device, part.kind, part.rest) == ("cuda", "simulated", ("order", "3"))
    assert 90 < part.left < 98
    words = [None, "ended with exit status 2", "ended by SIGKILL", "ended by SIGRTMAX"]
    assert [ended(code) for code in (0, 2, -9, -64)] == words


def test_what_the_profiler_saw_is_read() -> None:
    """By hand: 20 and 10 microseconds of the device, and of the host what begins inside a span."""

    def event(name: str, start: float, end: float, device: Any = DeviceType.CPU, annotation: bool = False) -> Any:
        times = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(name=name, device_type=device, time_range=times, is_user_annotation=annotation)

    host = [event("span", 10, 20), event("span", 30, 40), event("wait", 5, 9), event("wait", 12, 14)]
    host += [event("launch", 14, 15), event("copy", 39, 45), event("wait", 41, 45)]
    cuda = [event("kernel", 13, 33, DeviceType.CUDA), event("copy", 33, 43, DeviceType.CUDA)]
    cuda += [event("span", 13, 43, DeviceType.CUDA, annotation=True)]
    assert profiling.kernels(host + cuda, 2) == {"busy": 15e-6, "kernels": 1.0}
    assert profiling.kernels(host, 2) == {"busy": None, "kernels": None}
    assert profiling.inside(host + cuda, "span") == {"wait": 1, "launch": 1, "copy": 1}
