"""What is slow or thorough says in a line what it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def without_a_reason(source: str) -> Iterator[str]:
    """The tests with a mark of a tier, and neither a docstring nor a comment above or beside their decorators."""
    lines = ["", *source.splitlines()]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is not None:
            continue
        marks = " ".join(map(ast.unparse, node.decorator_list))
        has_tier = "mark.slow" in marks or "mark.thorough" in marks
        if has_tier and not any("#" in line for line in lines[node.decorator_list[0].lineno - 1 : node.lineno + 1]):
            yield node.name


def test_each_says_what_it_is_for() -> None:
    paths = [path for folder in ("tests", "bench/tests") for path in sorted((ROOT / folder).rglob("test_*.py"))]
    found = {path.name: names for path in paths if (names := list(without_a_reason(path.read_text())))}
    assert found == {}


def test_a_mark_without_a_reason_is_found() -> None:
    bare = "@pytest.mark.slow\ndef test_it():\n    pass\n"
    assert list(without_a_reason(bare)) == ["test_it"]
    assert not [
        *without_a_reason(bare.replace("slow", "slow  # a process")),
        *without_a_reason(f"# Real ranks.\n{bare}"),
    ]
    assert not list(without_a_reason(bare.replace("pass", '"""Of real ranks."""')))
