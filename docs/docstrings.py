"""An extension of Griffe: docstrings of the package as the site shows them, without raw Sphinx markup.

mkdocstrings takes docstrings as Markdown. This extension changes five things before it does:

* a role, ``:class:`pure_loop.State```, becomes a link where a page of docs/reference has the name, and code elsewhere;
* a doctest and a literal block (after ``::``) become fenced blocks;
* ``low, high: the values`` under ``Args:`` or ``Attributes:`` becomes one entry for each name;
* names with descriptions under another title, as ``Durable:`` of a State, become a list; the text of ``Returns:`` is
  text where it has a colon, and the type is that of the signature;
* ``Annotated[float, Above(0)]`` becomes ``float`` in signatures, and the range stands in words in the argument's text.

mkdocs.yml names this file, and zensical loads it by its path; nothing else of the package uses it.
"""

from __future__ import annotations

import functools
import importlib
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import griffe

__all__ = [
    *(
        "Docstrings",
        "directives",
        "fenced",
        "lists",
        "objects",
        "one_name_an_entry",
        "plain",
        "ranges_of",
        "with_ranges",
    ),
    "with_type",
]

# The pages with directives: of the reference, and one for each algorithm.
FOLDERS = [Path(__file__).parent / name for name in ("reference", "cards")]

_DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(?:([^`<]+) <|~)?([\w.]+)>?`")
_NAMES = re.compile(r"^(\s+)(\w+(?:, \w+)+):(?: |$)")
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ")
_SECTION = re.compile(r"^\s*(Args|Attributes|Raises|Returns|Yields):(?: \S.*)?$")


def directives() -> dict[str, Path]:
    """The names that pages of the reference document, each with its page."""
    pages = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]
    return {name: page for page in pages for name in _DIRECTIVE.findall(page.read_text())}


def fenced(text: str) -> str:
    """Doctests and literal blocks as fenced blocks."""
    lines = text.split("\n")
    written: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        if line.lstrip().startswith(">>> "):
            end = _end_of(lines, index, lambda line: bool(line.strip()))
            written += _block("pycon", lines[index:end])
        elif line.endswith("::") and index + 2 < len(lines) and not lines[index + 1].strip():
            end = _end_of(lines, index + 2, functools.partial(_is_deeper, _depth(line)))
            body = "\n".join(lines[index + 2 : end]).rstrip().split("\n")
            written += [line[:-1], "", *_block("text", body, _depth(line)), ""]
        else:
            written.append(line)
            end = index + 1
        index = end
    return "\n".join(written)


def _end_of(lines: list[str], start: int, belongs: Any) -> int:
    return next((index for index in range(start, len(lines)) if not belongs(lines[index])), len(lines))


def _is_deeper(depth: int, line: str) -> bool:
    return not line.strip() or _depth(line) > depth


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _block(language: str, lines: list[str], depth: int | None = None) -> list[str]:
    indent = " " * (_depth(lines[0]) if depth is None else depth)
    body = textwrap.indent(textwrap.dedent("\n".join(lines)), indent)
    return [f"{indent}```{language}", *body.split("\n"), f"{indent}```"]


def one_name_an_entry(text: str) -> str:
    """``low, high: the values`` under Args or Attributes as an entry for ``low`` and one for ``high``."""
    written: list[str] = []
    section = ""
    entry: list[str] = []
    for line in [*text.split("\n"), ""]:
        found = _SECTION.match(line)
        section = found[1] if found else "" if line and not line[0].isspace() else section
        if entry and (not line.strip() or _depth(line) <= _depth(entry[0])):
            written += _split(entry)
            entry = []
        if section in ("Args", "Attributes") and _NAMES.match(line):
            entry = [line]
        elif entry:
            entry.append(line)
        else:
            written.append(line)
    return "\n".join(written[:-1])


def _split(entry: list[str]) -> Iterator[str]:
    found = _NAMES.match(entry[0])
    assert found is not None
    for name in found[2].split(", "):
        yield f"{found[1]}{name}: {entry[0][found.end() :]}"
        yield from entry[1:]


def lists(text: str) -> str:
    """Names with descriptions under a title that is no section as a list under a paragraph."""
    lines = text.split("\n")
    written: list[str] = []
    index = 0
    while index < len(lines):
        line, index = lines[index], index + 1
        written.append(line)
        titled = line.endswith(":") and not line[0].isspace() and not _SECTION.match(line)
        if not titled or index == len(lines) or not _ENTRY.match(lines[index]):
            continue
        written.append("")
        end = _end_of(lines, index, lambda line: line.startswith("    "))
        for entry in lines[index:end]:
            found = _ENTRY.match(entry)
            names = ", ".join(f"`{name}`" for name in found[1].split(", ")) if found else ""
            written.append(f"* {names}: {entry[found.end() :]}" if found else entry)
        index = end
    return "\n".join(written)


def with_type(text: str, returned: str) -> str:
    """The text of Returns with the type before it, where it has a colon that Griffe would take for the type's end."""

    def typed(match: re.Match[str]) -> str:
        return f"{match[1]}{returned}: {match[2]}" if ": " in match[2] else match[0]

    return re.sub(r"^(\s*Returns:\n\s+)(\S.*)$", typed, text, flags=re.MULTILINE)


def with_ranges(text: str, ranges: Mapping[str, str]) -> str:
    """The ranges of arguments, in words, at the ends of their entries under Args or Attributes."""
    written: list[str] = []
    section = name = ""
    for line in [*text.split("\n"), ""]:
        if name and _depth(line) <= 4:  # the end of its entry
            written[-1] += f"{'' if written[-1].endswith('.') else '.'} Range: {ranges[name]}."
            name = ""
        found, entry = _SECTION.match(line), _ENTRY.match(line)
        section = found[1] if found else "" if line and not line[0].isspace() else section
        if section in ("Args", "Attributes") and entry and entry[1] in ranges:
            name = entry[1]
        written.append(line)
    return "\n".join(written[:-1])


def ranges_of(path: str) -> dict[str, str]:
    """The ranges of what a function or a class takes, in words; what says no more than the type is left out."""
    from pure_loop.ranges import Flag, Index, Name, OneOf, settings_of

    module, _, name = path.rpartition(".")
    settings = settings_of(getattr(importlib.import_module(module), name)).items()
    words = {key: each.in_words for key, each in settings if not isinstance(each.range, Flag | Index | Name | OneOf)}
    return {key: text for key, text in words.items() if text.removeprefix("whole ") != "number"}


def plain(annotation: Any) -> Any:
    """An annotation without the ranges that ``Annotated`` adds, at its top or within a union."""
    if isinstance(annotation, griffe.ExprSubscript):
        inner = annotation.slice
        if str(annotation.left).rpartition(".")[2] == "Annotated" and isinstance(inner, griffe.ExprTuple):
            return plain(inner.elements[0])
    if isinstance(annotation, griffe.ExprBinOp):
        annotation.left, annotation.right = plain(annotation.left), plain(annotation.right)
    return annotation


class Docstrings(griffe.Extension):
    """Rewrites every docstring of a package when the package was read."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Called by Griffe with each package, here pure_loop alone."""
        loader.expand_wildcards(pkg)
        by_target = {_target_of(pkg, name): name for name in directives()}
        for item in objects(pkg):
            ranges = ranges_of(item.path) if _unmark(item) and item.docstring is not None else {}
            if item.docstring is None:
                continue
            text = lists(with_ranges(one_name_an_entry(fenced(item.docstring.value)), ranges))
            if item.is_function and item.returns is not None:
                text = with_type(text, str(item.returns))
            item.docstring.value = _ROLE.sub(_Roles(pkg, item, by_target), text)


def _unmark(item: griffe.Object) -> bool:
    """Take ``Annotated`` out of the annotations of a function, a class or an attribute; whether there was one."""
    owner = item.members.get("__init__", item) if item.is_class else item
    fields = [member for member in item.members.values() if item.is_class and member.is_attribute]
    annotated = [*(owner.parameters if owner.is_function else ()), *fields, *([item] if item.is_attribute else ())]
    marked = [each for each in annotated if not item.is_alias and "Annotated[" in str(each.annotation)]
    for each in marked:
        each.annotation = plain(each.annotation)
    return bool(marked) and not item.is_attribute


class _Roles:
    """What a role becomes, in the docstring of one object."""

    def __init__(self, package: griffe.Module, item: griffe.Object, by_target: dict[str, str]) -> None:
        self.package, self.item, self.by_target = package, item, by_target

    def __call__(self, match: re.Match[str]) -> str:
        name = match[2]
        documented = self.documented(name)
        shown = match[1] or name.removeprefix("pure_loop.")
        return f"[`{shown}`][{documented}]" if documented else f"`{shown}`"

    def documented(self, name: str) -> str | None:
        """The name on a page of the reference, or of the class there that has it as a member."""
        scopes = [name.removeprefix("pure_loop.")] if name.startswith("pure_loop.") else []
        scope: griffe.Object | None = self.item
        while scope is not None:
            scopes.append(f"{scope.path}.{name}".removeprefix("pure_loop."))
            scope = scope.parent
        for path in scopes:
            if _found(self.package, path) is None:
                continue
            # Itself, the function of a module of that name, or the class that it is a member of.
            for candidate in (path, f"{path}.{path.rpartition('.')[2]}", path.rpartition(".")[0]):
                target = _target_of(self.package, candidate)
                if target in self.by_target and target != self.item.path:
                    return self.by_target[target]
        return None


def _target_of(package: griffe.Module, name: str) -> str:
    """Where a name is defined, by the name that it is public under."""
    found = _found(package, name.removeprefix(f"{package.name}."))
    return name if found is None else found.path


def _found(package: griffe.Module, path: str) -> griffe.Object | None:
    """An object of the package by its path below it, with all aliases followed; None if the package has none there."""
    try:
        found = package[path]
        return found.final_target if found.is_alias else found
    except (KeyError, IndexError, ValueError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None


def objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    """An object and all that it holds."""
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from objects(member)
