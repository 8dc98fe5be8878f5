"""``make new-algorithm`` and its like: skeletons that pass lint and their test as they are."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pure_loop as pl
from tests.scenarios.test_docs import generate


def loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


new: Any = loaded("docs_new", generate.ROOT / "docs" / "new.py")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    packages = [package for package, _, _ in new.KINDS.values()]
    for folder in (f"{root}/{package}" for root in ("tests", "pure_loop") for package in packages):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(new, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", new.KINDS)
def test_a_skeleton_passes_its_test(kind: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = new.KINDS[kind][0]
    name = f"fresh_{kind}"
    module, test = new.write(kind, name)
    monkeypatch.delitem(sys.modules, f"pure_loop.{package}.{name}", raising=False)
    made = loaded(f"pure_loop.{package}.{name}", module)
    for public in made.__all__:
        monkeypatch.setattr(getattr(pl, package), public, getattr(made, public), raising=False)
    tests = [function for key, function in vars(loaded(f"test_{name}", test)).items() if key.startswith("test_")]
    assert tests
    for function in tests:
        function()
    for key in (f"pure_loop.{package}.{name}", f"test_{name}"):
        del sys.modules[key]


def test_skeletons_pass_lint(tree: Path) -> None:
    paths = [path for kind in new.KINDS for path in new.write(kind, f"fresh_{kind}")]
    config = ["--config", str(generate.ROOT / "pyproject.toml")]
    for command in (["check"], ["format", "--check"]):
        run = [sys.executable, "-m", "ruff", *command, *config, *map(str, paths)]
        done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=generate.ROOT)
        assert done.returncode == 0, done.stdout


def test_what_is_there_is_not_overwritten(tree: Path) -> None:
    new.write("metric", "fresh")
    with pytest.raises(SystemExit, match="is there already"):
        new.write("metric", "fresh")
    with pytest.raises(SystemExit, match="NAME='Fresh': write it as a module is named"):
        new.write("metric", "Fresh")
    with pytest.raises(SystemExit, match="NAME='class'"):
        new.write("metric", "class")
