"""The modules of the package as syntax trees, and what the rules look for in them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pure_loop as pl

__all__ = ["PACKAGE", "Modules", "Place", "differences", "modules", "names_in", "walk"]

PACKAGE = Path(pl.__file__).parent

Modules: TypeAlias = Mapping[str, ast.Module]
Place: TypeAlias = tuple[str, ...]


@cache
def modules() -> Modules:
    """The modules of the package, by their paths in it."""
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def differences(found: Collection[Place] | Collection[str], allowed: Collection[Place] | Collection[str]) -> list[str]:
    """What is found and not allowed, and what is allowed and not found."""
    return [f"new: {each}" for each in sorted({*found} - {*allowed}, key=str)] + [
        f"gone: {each}" for each in sorted({*allowed} - {*found}, key=str)
    ]


Scope: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def walk(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All nodes but docstrings, each with the qualified name of the function or class that it is in."""
    for field, value in ast.iter_fields(tree):
        nodes = value if isinstance(value, list) else [value]
        for place, node in enumerate(nodes):
            if not isinstance(node, ast.AST):
                continue
            if field == "body" and place == 0 and isinstance(tree, ast.Module | Scope) and _is_text(node):
                continue
            yield name, node
            inner = f"{name}.{node.name}".lstrip(".") if isinstance(node, Scope) else name
            yield from walk(node, inner)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def names_in(modules: Modules, names: Collection[str]) -> set[Place]:
    """Which of the names occur in a module: as a name, an attribute, an import, or a string that is the name."""
    return {
        (module, each) for module, tree in modules.items() for _, node in walk(tree) for each in _named(node, names)
    }


def _named(node: ast.AST, names: Collection[str]) -> Iterator[str]:
    said: list[str] = []
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            said = [name]
        case ast.Import(names=aliases):
            said = [part for alias in aliases for part in alias.name.split(".")]
        case ast.ImportFrom(module=module, names=aliases, level=0):
            said = [*(module or "").split("."), *(alias.name for alias in aliases)]
    yield from (name for name in said if name in names)
