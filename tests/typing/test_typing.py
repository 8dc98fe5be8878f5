"""Types as users meet them: mypy and pyright over the snippets beside this file, each in one process."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import get_args

import attrs
import pytest

import pure_loop as pl
from pure_loop.entry.fit import FitOptions
from pure_loop.entry.settings import Settings
from pure_loop.event import EventName
from pure_loop.precision import Precision, PrecisionName
from pure_loop.state import StateFields
from pure_loop.time import TimestampFields

ROOT = Path(pl.__file__).parents[1]
SNIPPETS = Path(__file__).parent / "snippets"
# File, line, and the code of mypy or the rule of pyright.
Error = tuple[str, int, str]

PACKAGES = ("algorithms", "callbacks", "loggers", "metrics", "optim", "schedules")
# They take any argument, and hand it on.
OPEN = {"from_torch"}


def misspelled_arguments() -> str:
    """A call of each public function and class of the packages with an argument that it doesn't have."""
    lines = ["# pyright: basic", *(f"import pure_loop.{package}" for package in PACKAGES)]
    for package in PACKAGES:
        module = import_module(f"pure_loop.{package}")
        public = {name: getattr(module, name) for name in module.__all__ if name not in OPEN}
        names = [name for name, value in public.items() if callable(value) and not inspect.isabstract(value)]
        lines += [f"pure_loop.{package}.{name}(misspelled=1)  # error: call-arg, reportCallIssue" for name in names]
    return "\n".join(lines) + "\n"


def expected(folder: Path, checker: Callable[[Path], set[Error]]) -> set[Error]:
    """The errors that comments announce: the code of one of mypy, and then those of pyright."""
    errors: set[Error] = set()
    for path in folder.glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            announced = re.search(r"# error: (.*)", line)
            if announced is not None:
                codes = announced[1].split(", ")
                errors.update((path.name, number, code) for code in (codes[:1] if checker is mypy else codes[1:]))
    return errors


def mypy(folder: Path) -> set[Error]:
    """The errors of mypy."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-version=3.11",
        "--no-error-summary",
        "--config-file=",
    ]
    command += [f"--cache-dir={ROOT / '.mypy_cache' / 'snippets'}", "--hide-error-context", "--output=json"]
    done = subprocess.run(
        [*command, *map(str, sorted(folder.glob("*.py")))],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(Path(each["file"]).name, each["line"], each["code"]) for each in found if each["severity"] == "error"}


def pyright(folder: Path) -> set[Error]:
    """The errors of pyright."""
    pytest.importorskip("pyright")
    settings = {"include": ["."], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        f"--pythonpath={sys.executable}",
        "--project",
        str(folder),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each.get("rule", ""))
        for each in found
        if each["severity"] == "error"
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snippets in a folder of their own, where no settings of this project are found."""
    folder = tmp_path_factory.mktemp("snippets")
    for path in SNIPPETS.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "misspelled.py").write_text(misspelled_arguments())
    return folder


@pytest.mark.slow  # type checkers
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_good_code_passes_and_each_mistake_is_found(checker: Callable[[Path], set[Error]], folder: Path) -> None:
    found, announced = checker(folder), expected(folder, checker)
    assert len(announced) > 50
    assert {"missed": announced - found, "not expected": found - announced} == {"missed": set(), "not expected": set()}


def test_good_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SNIPPETS / "good.py"))
    assert "torch.Size([8, 3])" in capsys.readouterr().out


def test_the_fields_that_replace_takes_are_those_that_there_are() -> None:
    assert set(StateFields.__annotations__) == {field.alias for field in attrs.fields(pl.State)}
    assert list(TimestampFields.__annotations__) == [field.name for field in attrs.fields(pl.Timestamp)]


def test_the_options_of_fit_are_its_arguments() -> None:
    """The signature, what type checkers read of it, and the fields of a recipe: the same names and types."""
    parameters = [each for each in inspect.signature(pl.fit).parameters.values() if each.kind is each.KEYWORD_ONLY]
    types = {each.name: each.annotation for each in parameters}
    assert {name: kind.__forward_arg__ for name, kind in FitOptions.__annotations__.items()} == types
    of_recipe = {each.name: each.type for each in attrs.fields(pl.Recipe) if each.name in types}
    optional = {name: f"{types[name]} | None" for name in ("optimizer", "max_duration")}
    assert (of_recipe, list(of_recipe)) == (types | optional, list(types))
    signature = inspect.signature(pl.Recipe).parameters
    assert {name: signature[name].annotation for name in types} == types | optional


def test_settings_read_each_argument_of_fit() -> None:
    assert {field.name for field in attrs.fields(Settings)} == inspect.signature(pl.fit).parameters.keys()


def test_the_names_of_events_are_those_of_the_events() -> None:
    assert list(get_args(EventName)) == [event.value for event in pl.Event]


def test_each_precision_can_be_read() -> None:
    assert [Precision.parse(name).name for name in get_args(PrecisionName)] == list(get_args(PrecisionName))


def test_names_of_types_are_public() -> None:
    assert pl.typing.__all__ == sorted(pl.typing.__all__)
    assert all(hasattr(pl.typing, name) for name in pl.typing.__all__)
