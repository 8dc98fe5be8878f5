"""The architecture: which folder may import which, and that each says so."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pure_loop as pl

PACKAGE = Path(pl.__file__).parent
# From the bottom up. A module imports from its own folder and from what stands lower.
FLOORS = (
    {"_text"},
    {"errors"},
    {"_internal", "event"},
    {"frozendict", "precision", "random", "time"},
    {"lens"},
    {"data", "model", "order", "ranges"},
    {"membership"},
    {"schedules", "state", "task"},
    {"cadence", "gradients", "hooks", "initial", "metrics", "optim"},
    {"algorithm", "evaluator"},
    {"callback", "stages"},
    {"members"},
    {"distributed", "observer", "recorder"},
    {"loop"},
    {"algorithms", "checkpoint", "compile", "verify"},
    {"exporting"},
    {"callbacks"},
    {"progress"},
    {"entry", "loggers"},
    {"rehearsal", "reporting", "tools"},
    {"recipe", "typing"},
    {"pure_loop"},
    {"__main__", "testing"},
)
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}


def modules() -> dict[str, Path]:
    """The modules of the package by their dotted names."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    """The folder of a module, or the module itself where it stands at the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imports_of(source: str, *, types: bool = False) -> Iterator[str]:
    """The modules of the package that a source imports when it runs; with ``types`` those for type checkers, too."""
    tree = ast.parse(source)
    typing_only = (
        set()
        if types
        else {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            for inner in ast.walk(node)
        }
    )
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


@functools.cache
def graph(*, types: bool = False) -> dict[str, set[str]]:
    """For each module those that it imports."""
    return {name: set(imports_of(path.read_text(), types=types)) - {name} for name, path in MODULES.items()}


def test_each_folder_and_module_has_its_floor() -> None:
    assert {room_of(name) for name in MODULES} == set(FLOOR_OF)


def arrows_up(graph: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, targets in graph.items()
        for target in sorted(targets)
        if room_of(name) != room_of(target) and FLOOR_OF[room_of(target)] >= FLOOR_OF[room_of(name)]
    ]


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves by way of others; a folder's ``__init__`` and its modules apart."""
    found = []
    for name in graph:
        seen: set[str] = set()
        ahead = list(graph[name])
        while ahead:
            target = ahead.pop()
            if target not in seen:
                seen.add(target)
                ahead += graph[target]
        if name in seen:
            found.append(name)
    return found


def test_no_module_imports_one_above_it() -> None:
    assert arrows_up(graph()) == []


@pytest.mark.parametrize("types", [False, True])
def test_no_module_imports_itself_by_way_of_others(types: bool) -> None:
    assert circles(graph(types=types)) == []


def test_an_arrow_up_and_a_circle_are_found() -> None:
    changed = {**graph(), "pure_loop.time": {*graph()["pure_loop.time"], "pure_loop.loop.training"}}
    assert arrows_up(changed) == ["pure_loop.time imports pure_loop.loop.training"]
    assert "pure_loop.time" in circles(changed)


def test_a_folder_says_what_it_may_import_and_where_to_begin() -> None:
    for folder in {room_of(name) for name in MODULES if (PACKAGE / room_of(name)).is_dir()}:
        text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())) or ""
        assert "import" in text, folder
        assert "egin with" in text or "make new-" in text, folder
        for name in re.findall(r"``([\w/]+\.py)``", text):
            assert (PACKAGE / folder / name).exists() or (PACKAGE / name).exists(), name
