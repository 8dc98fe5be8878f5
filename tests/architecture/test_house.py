"""Figures of the whole package, each with a limit: what a change may add, another one has to give back.

A limit that is above what the package should have says why.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from bench.count import lines_of
from tests.architecture.source import PACKAGE, Modules, modules

# Any is right where a value is the user's: a batch, outputs, an algorithm's state, an argument that is refused at run
# time if it is of another type.
SHARE_OF_ANY = 0.10
# What type checkers can't follow: a mapping that refuses writes, functions of torch without types, decorated functions.
IGNORES = 60
# 17 are members: a room, two files each of compile and entry and five of what stands beside them, and two algorithms.
# 13 are scale: streams, positions, tokens and shards of data, four of ranks and of the meta device, five of the kit.
FILES = 410
# What stands in one file because it is one idea: State, Time, an optimizer of torch's as pure functions, the gates to
# what torch keeps private.
LONG_FILES = 12
LONG = 400
LONG_FUNCTION = 80
# About 40,000 would be read sooner. What is left has no twin and no dead function: two thirds are methods, loggers,
# callbacks, checkpoints and the kit, a file each, and a smaller number takes a feature out. 2,480 of them are what
# people bring with them: names that have changed, files of Composer and of torch.save, batches of Transformers and of
# detection; and what is said of it: where an error was raised, why a run ended, what to write instead. 1,470 are
# recipes, with what says which settings are equal (580), and reports (890). 2,570 are members: States and values of
# each (840), the mapped step (530), what a call does otherwise (760), two algorithms (370), gradients of samples (250).
# 2,000 are scale: positions in streams (750) and their laws (190), laws of services and 23 wrong ones (600), layers
# that are cut over ranks and models on the meta device (420), processes that believe to be alone (40).
LINES = 56_270
# Of tests, without the simulated GPU. One property is worth more than dozens of examples: 26,000 should say as much.
# What is above that are rows of one line and tables of formulas; models and loops of a file's own are the first to go.
# 2,490 came with those 2,480 lines of the package, 1,170 with those 1,470, 2,010 with those 2,570, 1,440 with those
# 2,000: real sources of data, and Slurm's and Ray's own programs, take half of them.
LINES_OF_TESTS = 42_400
# Names that say nothing of what they are the name of.
VAGUE = frozenset(
    {
        *("each", "given", "found", "other", "others", "asked", "one", "whole", "new", "now", "said", "shown"),
        *("known", "kept", "made"),
    }
)
SHARE_OF_VAGUE = 0.01
# Code has no persons: (word in docstrings and comments) per thousand words.
PERSONS = re.compile(
    r"\b(somebody|anybody|nobody|someone|anyone|no one|whoever|who|whom|whose|he|him|his|she|her|hers)\b", re.IGNORECASE
)
PER_THOUSAND = 0.6


def sources() -> dict[str, str]:
    return {name: (PACKAGE / name).read_text() for name in modules()}


def annotations(tree: ast.AST) -> list[ast.expr]:
    """All annotations of a module."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
    return [annotation for annotation in found if annotation is not None]


def share_of_any(modules: Modules) -> float:
    listed = [annotation for tree in modules.values() for annotation in annotations(tree)]
    names = [{node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} for annotation in listed]
    return sum("Any" in found for found in names) / len(listed)


def variables(tree: ast.AST) -> Iterator[str]:
    """The names of variables and parameters, once for each time that they are bound."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def share_of_vague(modules: Modules) -> float:
    names = [name for tree in modules.values() for name in variables(tree)]
    return sum(name in VAGUE for name in names) / len(names)


def prose(source: str) -> Iterator[str]:
    """Docstrings and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def persons(sources: list[str]) -> float:
    text = [passage for source in sources for passage in prose(source)]
    words = sum(len(passage.split()) for passage in text)
    return 1000 * sum(len(PERSONS.findall(passage)) for passage in text) / words


def long_functions(modules: Modules) -> list[str]:
    found = []
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = len((ast.get_docstring(node, clean=False) or "").splitlines())
                if (node.end_lineno or 0) - node.lineno + 1 - docstring > LONG_FUNCTION:
                    found.append(f"{module}: {node.name}")
    return found


def test_the_package_does_not_grow() -> None:
    assert sum(map(lines_of, sources().values())) <= LINES


def test_tests_do_not_grow() -> None:
    tests = PACKAGE.parent / "tests"
    paths = [path for path in tests.rglob("*.py") if tests / "simulated_gpu" not in path.parents]
    assert sum(lines_of(path.read_text()) for path in paths) <= LINES_OF_TESTS


def test_files_are_few_and_short() -> None:
    listed = sources()
    assert len(listed) <= FILES
    assert len([name for name, text in listed.items() if text.count("\n") > LONG]) <= LONG_FILES
    assert long_functions(modules()) == []


def test_types_say_something() -> None:
    assert share_of_any(modules()) <= SHARE_OF_ANY
    assert sum(text.count("# type: ignore") for text in sources().values()) <= IGNORES


def test_variables_are_nouns() -> None:
    assert share_of_vague(modules()) <= SHARE_OF_VAGUE


def _strays(node: ast.FunctionDef) -> list[str]:
    """What a docstring lists as arguments that are none; of a function that passes others on it may list these."""
    arguments, doc = node.args, ast.get_docstring(node) or ""
    section = re.search(r"^Args:\n((?:[ ].*\n|\n)*)", doc + "\n", re.MULTILINE)
    if section is None or arguments.kwarg is not None:
        return []
    listed_here = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg)
    names = {argument.arg for argument in listed_here if argument is not None}
    listed = [
        name for line in re.findall(r"^ {4}([*\w][*\w, ]*):", section[1], re.MULTILINE) for name in line.split(", ")
    ]
    return [name for name in listed if name.lstrip("*") not in names]


def test_docstrings_call_arguments_by_their_names() -> None:
    functions = ((name, node) for name, tree in modules().items() for node in ast.walk(tree))
    pairs = [(name, node) for name, node in functions if isinstance(node, ast.FunctionDef)]
    assert [(name, node.name, strays) for name, node in pairs if (strays := _strays(node))] == []


def test_code_has_no_persons() -> None:
    assert persons(list(sources().values())) <= PER_THOUSAND


def test_only_what_users_import_is_listed() -> None:
    """Elsewhere a name without an underscore is what a module has for others; a list beside it goes out of date."""
    listed = {name for name, tree in modules().items() if any(map(_is_list, tree.body))}
    assert [name for name in listed if not _is_users(name)] == []


def test_what_the_reference_shows_of_a_module_is_listed() -> None:
    """Of a module without a list the site shows all that has a docstring and no underscore."""
    pages = "\n".join(page.read_text() for page in (PACKAGE.parent / "docs" / "reference").glob("*.md"))
    names = {f"{name.replace('.', '/')}.py" for name in re.findall(r"^::: pure_loop\.([\w.]+)$", pages, re.MULTILINE)}
    shown = modules().keys() & names
    assert shown
    assert [name for name in shown if not any(map(_is_list, modules()[name].body))] == []


def _is_list(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


# Folders whose modules are public, and modules of others.
_OPEN = ("algorithms/", "callbacks/", "loggers/", "metrics/", "optim/", "ranges/", "schedules/", "testing/laws/")
_OPEN += ("testing/strategies.py", "testing/wrong_algorithms.py", "testing/wrong_loops.py", "testing/wrong_services.py")


def _is_users(name: str) -> bool:
    return "/" not in name or name.endswith("__init__.py") or name.startswith(_OPEN)


def test_docstrings_say_what_and_not_the_same() -> None:
    """One that says "the same" makes no sense without the code above it."""
    texts = ((name, passage) for name, source in sources().items() for passage in prose(source))
    assert [name for name, passage in texts if passage.startswith("The same")] == []


def test_each_figure_is_counted() -> None:
    source = '''"""Whoever reads it."""
def function(each: Any, value: int) -> list[Any]:
    other = value  # nobody reads this
    return [other]
'''
    tree = {"wrong.py": ast.parse(source)}
    assert share_of_any(tree) == pytest.approx(2 / 3)
    assert share_of_vague(tree) == pytest.approx(2 / 3)
    assert persons([source]) == pytest.approx(1000 * 2 / 7)
    body = "    value = 1\n" * LONG_FUNCTION
    assert long_functions({"wrong.py": ast.parse(f"def function():\n{body}")}) == ["wrong.py: function"]
