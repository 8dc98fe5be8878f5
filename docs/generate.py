"""Write the generated parts of README.md and docs/ anew: ``make docs``, and without outputs ``make tables``.

    python docs/generate.py            # write
    python docs/generate.py --check    # exit with 1 where something drifted
    python docs/generate.py --packages # only what packages list
    python docs/generate.py --tables   # that, the tables and the cards, and no page's code: seconds (make tables)

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``. Tables and diagrams come from
``pure_loop.order``; the diagrams are the files ``docs/pictures/order-*.svg`` (docs/diagram.py). ``output`` is what the
Python block before it prints, and ``output from "A" to "B"`` only the lines from the first that holds A to the next
that holds B; a page's blocks are run in order, as one program, for that. The tables of laws, fields and strategies come
from ``pure_loop.testing``. ``benchmark NAME`` is a table of
``docs/benchmark.json``, which ``make bench-page`` measures; ``peers PART`` is one of ``docs/peers.json``, which ``make
laws-of-peers`` measures. ``gpu`` is what ``make gpu`` found on a GPU, ``docs/gpu.json``. ``members`` is what an
ensemble maps, ``docs/members_table.json``, which ``tests/compile/test_members_map.py`` tries. ``source FILE`` is a file
of the repository up to its ``main``, and ``source FILE NAME ...`` what it defines by these names, in lines of WIDTH;
only the whole is run as the page's code. ``methods KIND`` is a table of a package's modules: the row of each is the
first sentence of its docstring.

The pages of algorithms, ``docs/cards/NAME.md``, and the gallery of them, ``docs/cards/index.md``, are generated whole,
from the modules and from ``docs/cards.json``, which ``make cards`` measures. ``api NAMES`` and ``api-of PACKAGE`` are
entries of docs/reference (docs/api.py).

The ``__init__.py`` of packages with a method in each module (PACKAGES) are generated, too, but for their docstrings:
what their modules list in ``__all__``; that of algorithms lists factories alone, and imports the rest by name.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

import pure_loop as pl
from pure_loop import Event, order

__all__ = [
    *("PACKAGES", "WIDTH", "Block", "Module", "blocks", "cards", "diagrams", "formatted", "is_public", "main"),
    *("modules", "pages", "render", "render_package", "run"),
]

ROOT = Path(__file__).resolve().parents[1]

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PART = re.compile(r"(<!-- generated: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


PACKAGES = ("algorithms", "callbacks", "loggers", "metrics", "schedules")

WIDTH = 88  # of code on pages, in columns: as much as a page shows without a bar to scroll it


@attrs.frozen
class Module:
    """A module of a package: its name, its docstring and what it lists in ``__all__``."""

    name: str
    doc: str
    public: tuple[str, ...]


def modules(package: str) -> list[Module]:
    """The modules of ``pure_loop/PACKAGE``, by their names; nothing is imported."""
    found = []
    for path in sorted((ROOT / "pure_loop" / package).glob("*.py")):
        tree = ast.parse(path.read_text())
        listed = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        if path.stem != "__init__" and listed:
            found.append(Module(path.stem, ast.get_docstring(tree) or "", tuple(listed[0])))
    return found


_LINE = 120


def render_package(package: str) -> str:
    """The ``__init__.py`` of a package, with the docstring that it has."""
    path = ROOT / "pure_loop" / package / "__init__.py"
    docstring = path.read_text().partition('"""')[2].partition('"""')[0]
    public = [module for module in modules(package) if is_public(module.name, package)]
    ordered = sorted((name for module in public for name in module.public), key=_order)
    # Of algorithms, those alone: what stands beside one in its module is imported by its name, and listed nowhere.
    factories = [module.name for module in public]
    listed_here = [name for name in ordered if package != "algorithms" or name in factories]
    beside = [name for name in ordered if name not in listed_here]
    lines = [
        f'"""{docstring}"""\n',
        "# Generated from the modules by docs/generate.py (make docs); only the docstring is written by hand.\n",
        "from __future__ import annotations\n",
        "from typing import TYPE_CHECKING\n",
        "from pure_loop._internal.lazy import lazily as _lazily\n",
        "if TYPE_CHECKING:",
    ]
    for module in public:
        listed = sorted(module.public, key=_order)
        line = f"    from pure_loop.{package}.{module.name} import "
        if len(line) + len(", ".join(listed)) <= _LINE:
            lines.append(line + ", ".join(listed))
        else:  # as Ruff breaks it
            lines += [f"{line}(", *(f"        {name}," for name in listed), "    )"]
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in listed_here), "]\n"]
    if beside:
        lines += [
            "if TYPE_CHECKING:  # importable from here, and listed beside their algorithms in the reference alone"
        ]
        lines += ["    __all__ += [", *(f'        "{name}",' for name in beside), "    ]\n"]
    # To type checkers a module with a __getattr__ has every name, misspelled ones included.
    lines += ["if not TYPE_CHECKING:", "    __getattr__ = _lazily(", "        __name__,", "        {"]
    for module in public:
        others = [f'"{name}"' for name in sorted(module.public, key=_order) if name != module.name]
        if others:
            lines.append(f'            "{module.name}": ({", ".join(others)}{"," * (len(others) == 1)}),')
    lines += ["        },", "        __all__,", "    )\n\n", "def __dir__() -> list[str]:", "    return __all__\n"]
    return "\n".join(lines)


def is_public(module: str, package: str) -> bool:
    """Whether a package lists the names of one of its modules."""
    return not module.startswith("_") or (module, package) in _BASES


# Private modules whose names are public: what the methods of a package are made of.
_BASES = (("_base", "metrics"), ("_base", "schedules"))


def _order(name: str) -> tuple[int, str]:
    """As Ruff sorts names: constants, classes, and then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@attrs.frozen
class Block:
    """One Python block of a page: its text, its line, and where it ends in the page."""

    code: str
    line: int
    end: int


def pages() -> list[Path]:
    """README.md and the pages of docs/, but for the cards, which are generated whole."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(path for path in found if path.parent.name != "cards")]


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page."""
    return [Block(match[1], text.count("\n", 0, match.start()) + 2, match.end()) for match in _BLOCK.finditer(text)]


def run(path: Path) -> list[tuple[Block, str]]:
    """Run the blocks of a page one after the other, in an empty folder; each with what it printed."""
    scope: dict[str, object] = {"__name__": "__main__"}
    printed = []
    with tempfile.TemporaryDirectory() as folder, _inside(folder):
        for block in blocks(path.read_text()):
            # Empty lines before it, so that a traceback names the page's own lines.
            code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(code, scope)
            printed.append((block, out.getvalue()))
    return printed


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before, threads, random = os.getcwd(), torch.get_num_threads(), torch.get_rng_state()
    os.chdir(folder)
    # Shown numbers must not depend on how many cores there are, nor on what ran before.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        yield
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
        torch.set_rng_state(random)


def render(path: Path, printed: list[tuple[Block, str]] | None) -> str:
    """The page with its generated parts as they are now.

    Args:
        path: of the page.
        printed: what :func:`run` gave; None: what code prints stays as the page has it.
    """
    text = path.read_text()

    def part(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match[2])
        if name == "output":
            if printed is None:
                return match[0]
            outputs = [out for block, out in printed if block.end <= match.start()]
            body = _fenced("text", _excerpt(outputs[-1], *arguments))
        else:
            body = _PARTS[name](*arguments)
        return f"{match[1]}\n{body}\n\n{match[4]}"

    return _PART.sub(part, text)


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _excerpt(text: str, *arguments: str) -> str:
    lines = text.splitlines()
    if arguments:
        assert arguments[::2] == ("from", "to"), arguments
        first = next(index for index, line in enumerate(lines) if arguments[1] in line)
        last = next(index for index, line in enumerate(lines) if index >= first and arguments[3] in line)
        lines = textwrap.dedent("\n".join(lines[first : last + 1])).splitlines()
    return "\n".join("\n".join(_wrapped(line)) for line in lines)


def _wrapped(line: str) -> list[str]:
    # What is wrapped already, as messages of laws are, stays as it is: again it would have a word or two on every
    # other line.
    if len(line) <= (112 if line.startswith("  ") else 95):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, 95, subsequent_indent=indent, break_on_hyphens=False)


def diagrams() -> dict[Path, str]:
    """The text of each diagram, by its path: Scalable Vector Graphics, as a page that is read fetches no script."""
    draw = _by_path("docs/diagram.py").draw
    return {ROOT / "docs" / "pictures" / f"order-{which}.svg": draw(which) for which in order.GRAMMARS}


def _diagram(which: order.Order) -> str:
    letters = _by_path("docs/diagram.py").conditions(which)
    said = "; ".join(f"**{letter}**: {when}" for letter, when in letters.items())
    shown = f"![The order of events, from top to bottom](pictures/order-{which}.svg)"
    return f"{shown}\n\nWhere an arrow has a letter, it is taken where: {said}."


def _grammar(which: order.Order) -> str:
    return _fenced("text", order.table(which))


def _outline(which: order.Order) -> str:
    """The order as an indented list, each event with what is worth knowing at it."""
    lines = []
    for depth, what, note in order.outline(which):
        name, shown = (what.name, True) if isinstance(what, Event) else (what, note == "as above")
        lines.append(f"{'  ' * depth + name:<40}{note if shown else ''}".rstrip())
    return _fenced("text", "\n".join(lines))


_FIELDS = ("batch", "microbatch", "outputs", "loss", "grads")


def _fields() -> str:
    """Which fields of the State are set at which event, as seen in a run with three microbatches a batch."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.rand(6, 2, generator=generator), torch.rand(6, 1, generator=generator))] * 2
    stream = pl.fit(
        torch.nn.Linear(2, 1),
        data,
        loss=torch.nn.functional.mse_loss,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="1ep",
        microbatch_size=2,
        evaluators={"val": data},
    )
    seen: dict[Event, list[list[bool]]] = {}
    for event, state in stream:
        is_set = [getattr(state, name) is not None for name in _FIELDS]
        leaves = any(tensor.requires_grad for tensor in state.params.values())
        seen.setdefault(event, []).append([*is_set, leaves])
    header = ["event", *(f"`{name}`" for name in _FIELDS), "`params` are leaves"]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for event, found in seen.items():
        cells = ["yes" if all(column) else "later" if any(column) else "" for column in zip(*found, strict=True)]
        lines.append(f"| `{event.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _boundaries() -> str:
    return _events(event for event in Event if event in order.BOUNDARIES) + "."


def _events(events: Iterable[Event]) -> str:
    return ", ".join(f"`{event.name}`" for event in events)


def _laws_of(kind: str) -> str:
    """The laws of loops, callbacks or scripts, in words."""
    from pure_loop.testing import laws

    listed = (f"* `{law.name}`: {law.statement}." for law in getattr(laws, f"OF_{kind.upper()}"))
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in listed)


def _laws() -> str:
    """The laws in the order in which they are tried, each with some of what was made to break it."""
    from pure_loop.testing import laws
    from pure_loop.testing.wrong_algorithms import WRONG_ALGORITHMS
    from pure_loop.testing.wrong_loops import WRONG_LOOPS

    lines = ["| law | in words | catches one that, for instance, | rests on |", "|---|---|---|---|"]
    for law in (*laws.OF_ALGORITHMS, *(law for law in laws.OF_LOOPS if law not in laws.OF_ALGORITHMS)):
        caught = _named(WRONG_ALGORITHMS, law.name) or f"(a loop) {_named(WRONG_LOOPS, law.name)}"
        words = law.statement + ("" if law.serves_what == "any" else f"; on problems that are {law.serves_what}")
        lines.append(f"| `{law.name}` | {words} | {caught} | {', '.join(f'`{name}`' for name in law.rests_on)} |")
    return "\n".join(line.replace("|  |", "| |") for line in lines)


def _named(wrong: Mapping[Any, str], law: str) -> str:
    """What is wrong with the first of those that break a law, in the words of their names."""
    return "; ".join([make.__name__.replace("_", " ") for make, broken in wrong.items() if broken == law][:3])


def _may_change() -> str:
    """Where algorithms may change which field of the State, and why not elsewhere."""
    from pure_loop.testing.laws.writes import MAY_CHANGE, WHY_NOWHERE_ELSE

    lines = ["| field | an algorithm may change it at | and not elsewhere, because |", "|---|---|---|"]
    for field, allowed in MAY_CHANGE.items():
        others = [event for event in Event if event not in allowed]
        if len(others) < len(allowed):
            where = f"all events but {_events(others)}" if others else "all events"
        else:
            where = _events(event for event in Event if event in allowed)
        lines.append(f"| `{field}` | {where} | {WHY_NOWHERE_ELSE.get(field, '')} |")
    alone = ", ".join(f"`{field.alias}`" for field in attrs.fields(pl.State) if field.alias not in MAY_CHANGE)
    lines.append(f"| {alone} | no event | the loop alone writes them |")
    return "\n".join(line.replace("|  |", "| |") for line in lines)


def _strategies() -> str:
    from pure_loop.testing import strategies
    from pure_loop.testing.strategies import BY_TYPE

    lines = ["| | draws | keywords |", "|---|---|---|"]
    for name in strategies.__all__:
        strategy = getattr(strategies, name)
        keywords = [each for each in inspect.signature(strategy).parameters.values() if each.kind is each.KEYWORD_ONLY]
        if not keywords:
            continue  # shown in failures, and never drawn
        paragraph = (inspect.getdoc(strategy) or "").partition("\n\n")[0]
        what = " ".join(paragraph.replace("``", "`").split()).partition(". They shrink")[0].rstrip(".")
        lines.append(f"| `testing.{name}` | {what} | {', '.join(f'`{keyword.name}`' for keyword in keywords)} |")
    types = ", ".join(f"`{each.__name__}`" for each in BY_TYPE)
    return "\n".join([*lines, "", f"`st.from_type` draws {types}."])


def _benchmark(name: str) -> str:
    """A table of what was measured; by path, because pages are written where only the package can be imported."""
    tables = _by_path("bench/performance/tables.py")
    found = json.loads((ROOT / "docs" / "benchmark.json").read_text())
    return str(tables.as_markdown(tables.of(name, found)))


def _peers(part: str = "table") -> str:
    """A part of what the laws found on other libraries."""
    found = json.loads((ROOT / "docs" / "peers.json").read_text())
    return str(_by_path("bench/peers/tables.py").render(part, found))


def _gpu() -> str:
    """What ran on a GPU, or that nothing has."""
    path = ROOT / "docs" / "gpu.json"
    return str(_by_path("bench/gpu/page.py").render(json.loads(path.read_text()) if path.exists() else None))


def _members() -> str:
    """What an ensemble maps, by kinds."""
    found = json.loads((ROOT / "docs" / "members_table.json").read_text())
    verdicts = ("mapped", "member by member", "loop", "refused")
    lines = ['| | mapped | member by member | only with `fallback="loop"` | refused |', "|---|---|---|---|---|"]
    for kind, rows in found.items():
        cells = [", ".join(f"`{name}`" for name, value in rows.items() if value == verdict) for verdict in verdicts]
        lines.append(f"| {kind} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def _by_path(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cards() -> dict[Path, str]:
    """The text of each card, and of the gallery of them, by its path."""
    folder, records = ROOT / "docs" / "cards", json.loads((ROOT / "docs" / "cards.json").read_text())
    written, api = _by_path("bench/cards/pages.py"), _by_path("docs/api.py")
    of_cards = {folder / f"{name}.md": written.card(name, records[name], api.of_algorithm(name)) for name in records}
    return {**of_cards, folder / "index.md": written.gallery(records)}


def _source(path: str, *names: str) -> str:
    """A file up to its ``main``, without its docstring; or its definitions of these names, which are not run."""
    text = (ROOT / path).read_text()
    lines, tree = text.splitlines(), ast.parse(text)
    if not names:
        first, last = tree.body[1], next(node for node in tree.body if getattr(node, "name", None) == "main")
        return _fenced("python", formatted("\n".join(lines[first.lineno - 1 : last.lineno - 1])))
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    shown = ["\n".join(lines[defined[name].lineno - 1 : defined[name].end_lineno]) for name in names]
    return _fenced("py", formatted("\n\n\n".join(shown)))


def formatted(code: str) -> str:
    """Code in lines of WIDTH, as Ruff breaks them; longer strings and comments stay."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={WIDTH}", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout


def _methods(package: str) -> str:
    """What a package holds: the first sentence of each module's docstring, and the ranges of its settings."""
    from pure_loop.ranges import settings_of

    lines = ["| | | settings |", "|---|---|---|"]
    for module in modules(package):
        if not is_public(module.name, package):
            continue
        for name in module.public:
            made = getattr(getattr(pl, package), name)
            if package == "metrics" and name != module.name:
                continue  # a loss beside a metric
            sentence = " ".join(module.doc.partition("\n\n")[0].split()).rstrip(".")
            ranges = "; ".join(f"`{setting.name}` {setting.in_words}" for setting in settings_of(made).values())
            lines.append(f"| `pl.{package}.{name}` | {sentence.replace('``', '`')} | {ranges} |")
    return "\n".join(line.replace("|  |", "| |") for line in lines)


def _api(*names: str) -> str:
    return str(_by_path("docs/api.py").of_names(*names))


def _api_of(package: str) -> str:
    return str(_by_path("docs/api.py").of_package(package))


_PARTS: dict[str, Callable[..., str]] = {
    "api": _api,
    "api-of": _api_of,
    "benchmark": _benchmark,
    "gpu": _gpu,
    "diagram": _diagram,
    "methods": _methods,
    "grammar": _grammar,
    "outline": _outline,
    "peers": _peers,
    "fields": _fields,
    "boundaries": _boundaries,
    "laws": _laws,
    "laws-of": _laws_of,
    "may-change": _may_change,
    "members": _members,
    "source": _source,
    "strategies": _strategies,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where something drifted")
    parser.add_argument("--packages", action="store_true", help="only the __init__.py of packages")
    parser.add_argument("--tables", action="store_true", help="all but what the code of pages prints, which is quick")
    options = parser.parse_args(arguments)
    drifted = []
    initial = [path for path in (ROOT / "pure_loop" / package / "__init__.py" for package in PACKAGES) if path.exists()]
    texts = {path: render_package(path.parent.name) for path in initial}
    if not options.packages:
        texts |= {path: render(path, None if options.tables else run(path)) for path in pages()} | cards() | diagrams()
    for path, new in texts.items():
        if not path.exists() or new != path.read_text():
            drifted.append(path.relative_to(ROOT))
            if not options.check:
                path.write_text(new)
    for name in drifted:
        print(f"{name}: {'out of date; run make docs' if options.check else 'written'}")
    return int(options.check and bool(drifted))


if __name__ == "__main__":
    sys.exit(main())
