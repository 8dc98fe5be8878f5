"""The mistakes that ``bench.mutants`` makes: each changes one place of the code, and nothing else."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from bench.areas import AREAS, guards_of
from bench.mutants import Copy, carried, compared, described, drawn, scores
from bench.mutation import mutants_of

ROOT = Path(__file__).resolve().parents[2]

SOURCE = '''
"""A module: 1 < 2."""

import os

LIMIT: int = 3


def clamp(x: int, low: int = 0, *, strict: bool = True) -> int:
    """Not changed: x < low."""
    if x < low and not strict:
        raise ValueError(f"{x} < {low}")
    y = max(x, low)
    return y + 1
'''


def test_each_kind_of_mistake_is_made_and_texts_and_errors_are_left() -> None:
    found = {(each.kind, each.before, each.after) for each in mutants_of(SOURCE)}
    assert found == {
        ("off by one", "0", "(1)"),
        ("constant", "True", "(False)"),
        ("opposite condition", "x < low and not strict", "(not (x < low and (not strict)))"),
        ("and or", "x < low and not strict", "(x < low or not strict)"),
        ("comparison", "x < low", "(x <= low)"),
        ("comparison", "x < low", "(x > low)"),
        ("not", "not strict", "(strict)"),
        ("removed statement", "y = max(x, low)", "pass"),
        ("swapped arguments", "max(x, low)", "(max(low, x))"),
        ("returns None", "return y + 1", "return None"),
        ("arithmetic", "y + 1", "(y - 1)"),
        ("off by one", "1", "(2)"),
    }


def test_a_mutant_differs_in_one_place() -> None:
    for each in mutants_of(SOURCE):
        changed = each.of(SOURCE)
        assert changed is not None
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert changed == SOURCE[: each.begin] + each.after + SOURCE[each.end :]


def test_the_draw_is_the_same_each_time_and_takes_areas_in_turn() -> None:
    names = ["stages", "optim"]
    items = drawn(6, 0, names)
    assert [area for area, _, _ in items] == names * 3
    assert items == drawn(6, 0, names) != drawn(6, 1, names)


def test_areas_have_files_and_tests() -> None:
    for area in AREAS.values():
        assert list(ROOT.glob(area.files))
        assert [folder for folder in area.folders if not (ROOT / "tests" / folder).exists()] == []
    assert guards_of("loop", "pure_loop/loop/driver.py", ROOT)[:2] == [
        "pure_loop/loop/driver.py",
        "tests/loop/test_driver.py",
    ]


@pytest.mark.parametrize("name", ["mutants.json", "mutants_27ea3a7.json", "mutants_fdf669b.json"])
def test_scores_are_those_of_the_recorded_mutants(name: str) -> None:
    recorded: dict[str, Any] = json.loads((ROOT / "bench" / name).read_text())
    assert recorded["scores"] == scores(recorded["mutants"])


def test_recorded_mutants_are_of_files_that_there_are() -> None:
    recorded = json.loads((ROOT / "bench" / "mutants.json").read_text())
    gone = {each["file"] for each in recorded["mutants"] if not (ROOT / each["file"]).exists()}
    assert not gone, "python -m bench.mutants --carry writes where their code is now"


def test_a_mutant_is_carried_to_where_its_code_is() -> None:
    recorded = [described(item) | {"outcome": "killed"} for item in drawn(20, 0, ["state"])]
    there = carried(recorded, ["state"])
    assert there
    elsewhere = [each | {"file": "pure_loop/gone.py", "line": 1, "place": [0, 1]} for each in there]
    assert carried([*elsewhere, elsewhere[0] | {"before": "no such code"}], ["state"]) == there


def test_what_stands_in_for_a_test_that_is_gone_is_named() -> None:
    first, second, third = [described(item) for item in drawn(3, 0, ["state"])]
    found = {"outcome": "killed", "by": "tests", "said": "FAILED tests/state/test_gone.py::test_gone[1] - E"}
    there = {"outcome": "killed", "by": "tests", "said": "FAILED bench/tests/test_mutants.py::test_a_mutant - E"}
    lost = {"outcome": "survived", "by": "", "said": ""}
    before = [first | found, second | found, third | found]
    lines = compared(before, [first | there, second | lost, third | {"outcome": "invalid", "by": "", "said": ""}])
    assert lines[0] == "state: 1.0 before, 0.5 now"
    assert lines[1].endswith(
        "by tests/state/test_gone.py::test_gone[1]\n    now bench/tests/test_mutants.py::test_a_mutant"
    )
    assert lines[2].startswith("LOST ")
    assert len(lines) == 3


def test_a_test_that_found_the_mutant_before_is_run_first_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(self: Copy, *command: str, seconds: float) -> tuple[str, str]:
        ran.append(command[-1])
        return "failed", "FAILED"

    monkeypatch.setattr(Copy, "run", run)
    copy = object.__new__(Copy)
    copy.root, copy.passed = ROOT, {}
    here = "bench/tests/test_mutants.py::test_a_mutant_differs_in_one_place"
    for known, first in ((f"{here}[1]", here), (f"{here}s", "::11"), (None, "::11")):
        ran.clear()
        judged = copy.judge("loop", "pure_loop/loop/driver.py", known)
        assert (ran, judged["outcome"], judged["by"]) == ([first], "killed", "tests" if first == here else "golden")
