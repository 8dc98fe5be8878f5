"""How many lines of code the core has."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.count import CORE, LINES, PACKAGE, count, lines_of, main

SOURCE = '''"""A docstring
of two lines."""

import sys  # a comment on a line of code

# A comment.


class Point:
    """A docstring."""

    text = """no
docstring"""


def function(
    first: int,
) -> int:
    "Another docstring."
    return first; "no docstring"
'''


def test_the_core_is_small() -> None:
    assert sum(count().values()) <= LINES


def test_lines_of_code_are_counted() -> None:
    assert lines_of(SOURCE) == 1 + 1 + 2 + 3 + 1
    assert lines_of('"""Nothing else."""\n') == lines_of("") == 0


def test_files_and_folders_are_counted_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "loop" / "inner").mkdir(parents=True)
    (tmp_path / "loop" / "inner" / "module.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "state.py").write_text("a = 1\n")
    (tmp_path / "time.py").write_text("a = 1\n")
    assert count(tmp_path) == {"loop/inner/module.py": 2, "state.py": 1}
    assert any((PACKAGE / name).exists() for name in CORE)


def test_the_program_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    total = sum(count().values())
    assert main(["--check"]) == int(total > LINES)
    assert f"{total:6,}  lines of code" in capsys.readouterr().out
