"""The entries of docs/reference: which public names are on which page, and the directives that mkdocstrings reads.

A page has comments such as ``<!-- generated: api pl.fit pl.run -->``, or ``<!-- generated: api-of optim -->`` for every
name of a package that no other comment lists. docs/generate.py writes the directives below them. Each algorithm has a
page of its own, its card, which has its directives; the reference lists these pages.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pure_loop as pl

__all__ = [
    *("PUBLIC", "entries", "key_of", "names_of_package", "of_algorithm", "of_package", "of_names", "public_names"),
    "used_in",
]

REFERENCE = Path(__file__).parent / "reference"
PACKAGE = Path(pl.__file__).parent

# The modules whose __all__ is public.
PUBLIC = (
    "pl",
    *(f"pl.{name}" for name in pl.__all__ if isinstance(getattr(pl, name), types.ModuleType)),
    *("pl.compile", "pl.ranges", "pl.typing", "pl.testing", "pl.testing.ranks", "pl.testing.strategies"),
)

_API = re.compile(r"<!-- generated: (api|api-of) (.*?) -->")


def public_names() -> Iterator[str]:
    """Every public name, ``pl.optim.sgd``, but those of modules that are in PUBLIC."""
    for module in PUBLIC:
        for name in _names(module):
            if f"{module}.{name}" not in PUBLIC:
                yield f"{module}.{name}"


def _names(module: str) -> list[str]:
    """What a module lists, and of algorithms what stands beside each in its module."""
    names = list(_module(module).__all__)
    if module == "pl.algorithms":
        names = [
            name for algorithm in names for name in importlib.import_module(f"{_path(module)}.{algorithm}").__all__
        ]
    return names


def key_of(name: str) -> object:
    """Equal for two names of one object: ``pl.save`` and ``pl.checkpoint.save``."""
    found = _object(name)
    if isinstance(found, types.ModuleType):
        return found.__name__
    defined = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    return defined if all(defined) and str(defined[0]).startswith("pure_loop.") else id(found)


def entries() -> Iterator[tuple[str, Path]]:
    """The names on pages of the reference, each with its page."""
    for page in sorted(REFERENCE.glob("*.md")):
        for kind, arguments in _API.findall(page.read_text()):
            for name in arguments.split():
                yield from ((listed, page) for listed in (names_of_package(name) if kind == "api-of" else [name]))


def names_of_package(package: str) -> list[str]:
    """The names of a package that no comment of another page lists, in the order of its modules."""
    pages = (path.read_text() for path in sorted(REFERENCE.glob("*.md")))
    by_hand = [name for page in pages for kind, names in _API.findall(page) if kind == "api" for name in names.split()]
    listed = {key_of(name) for name in by_hand}
    names = [f"pl.{package}.{name}" for name in _names(f"pl.{package}")]
    names = [name for name in names if name not in PUBLIC and key_of(name) not in listed]
    return sorted(names, key=lambda name: _place(name, package))


def _place(name: str, package: str) -> tuple[bool, str, bool, str]:
    """What an algorithm is named after comes first of its module; elsewhere the alphabet counts."""
    module, short = _module_of(name), name.rpartition(".")[2]
    if package != "algorithms":
        return False, "", False, name.lower()
    return module.startswith("_"), module, short != module, name.lower()


def _module_of(name: str) -> str:
    """The module in which something is defined, without its package."""
    return str(getattr(_object(name), "__module__", "")).rpartition(".")[2]


def of_names(*names: str) -> str:
    """The directives for names, one after the other."""
    return "\n\n".join(_directive(name, 2) for name in names)


def of_package(package: str) -> str:
    """The directives for a package; for algorithms a table of their pages, which have the directives."""
    names = names_of_package(package)
    if package != "algorithms":
        return of_names(*names)
    by_module: dict[str, list[str]] = {}
    for name in names:
        by_module.setdefault(_module_of(name), []).append(name)
    shared = [name for module, beside in by_module.items() if module.startswith("_") for name in beside]
    rows = ["| | and, beside it in its module |", "|---|---|"]
    for module, (name, *beside) in by_module.items():
        if not module.startswith("_"):
            links = ", ".join(f"[`{other.rpartition('.')[2]}`][{_target(other)}]" for other in beside)
            rows.append(f"| [`{name}`](../cards/{module}.md) | {links} |".replace("|  |", "| |"))
    return "\n".join(rows) + "\n\n" + of_names(*shared)


def of_algorithm(algorithm: str) -> str:
    """The directives for the page of an algorithm: its own, and one level below it what its module has beside it."""
    factory, *beside = [name for name in names_of_package("algorithms") if _module_of(name) == algorithm]
    return "\n\n".join([_directive(factory, 2), *(_directive(name, 3) for name in beside)])


def _target(name: str) -> str:
    """By what name Griffe finds an object."""
    module, _, short = name.rpartition(".")
    path = _path(module)
    file = PACKAGE.joinpath(*path.split(".")[1:], f"{short}.py")
    found = _object(name)
    if file.exists() and not isinstance(found, types.ModuleType):
        # A function beside a module of the same name: Griffe takes the name for the module.
        return f"{getattr(found, '__module__', path)}.{short}"
    return f"{path}.{short}"


def _directive(name: str, level: int) -> str:
    options = [f"heading_level: {level}", f"heading: {name}", f"toc_label: {name.rpartition('.')[2]}"]
    lines = [f"::: {_target(name)}", "    options:", *(f"      {option}" for option in options)]
    links = [f"[{title}](../gallery.md#{anchor})" for title, anchor in used_in(name)]
    return "\n".join([*lines, "", f"In the gallery: {', '.join(links)}."] if links else lines)


_SECTION = re.compile(r"^## (.+?)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_MOST = 5  # what nearly every example uses needs no list of them


def used_in(name: str) -> list[tuple[str, str]]:
    """The sections of the gallery whose examples use a name: title and anchor; none where many do."""
    found = [(title, anchor) for title, anchor, used in _gallery() if key_of(name) in used]
    return found if len(found) <= _MOST else []


@functools.cache
def _gallery() -> tuple[tuple[str, str, frozenset[object]], ...]:
    sections = _SECTION.findall((REFERENCE.parent / "gallery.md").read_text())
    with_pictures = [(title, re.search(r"\(pictures/(\w+)\.png\)", text)) for title, text in sections]
    return tuple(
        (title, re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"), _used_by(example[1]))
        for title, example in with_pictures
        if example is not None
    )


def _used_by(example: str) -> frozenset[object]:
    """The public names that an example spells out: ``pl.fit``, or imported from a package of pure_loop."""
    tree = ast.parse((PACKAGE.parent / "examples" / f"{example}.py").read_text())
    spelled = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pure_loop"):
            module = str(node.module).replace("pure_loop", "pl", 1)
            spelled |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(key_of(name) for name in spelled & set(public_names()))


def _path(name: str) -> str:
    return "pure_loop" + name.removeprefix("pl")


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(_path(name))


def _object(name: str) -> object:
    module, _, short = name.rpartition(".")
    return getattr(_module(module), short)
