"""What pyproject.toml, the workflows and the files of a release say, against the code and against each other."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pure_loop as pl

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
)
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
HOOKS = {
    Path(hooks["repo"]).name: hooks["rev"]
    for hooks in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
}
# Packages whose distribution has another name; mlflow is a part of mlflow-skinny, too.
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "mlflow": "mlflow-skinny"}


def steps() -> Iterator[dict[str, Any]]:
    for workflow in WORKFLOWS.values():
        for job in workflow["jobs"].values():
            yield from job.get("steps", ())


def used_extras() -> Iterator[tuple[str, str, str]]:
    """The module, the extra, and the package or "" of each place in the code that asks for an extra."""
    for path in sorted((ROOT / "pure_loop").rglob("*.py")):
        module = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                # A pattern and a doctest of extras that are read from metadata are none of its own.
                if module != "pure_loop/__main__.py":
                    for extras in re.findall(r"pure_loop\[([\w,]+)\]", node.value):
                        yield from ((module, extra, "") for extra in extras.split(","))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
                package, extra, *_ = node.args
                assert isinstance(extra, ast.Constant), module
                yield module, extra.value, package.value.partition(".")[0] if isinstance(package, ast.Constant) else ""


USED = sorted(set(used_extras()))


def test_extras_are_asked_for() -> None:
    assert len(USED) > 20
    assert {package for *_, package in USED} >= {"psutil", "pynvml", "torchao", "wandb", "mlflow"}


def test_an_extra_that_the_code_asks_for_brings_the_package() -> None:
    for module, extra, package in USED:
        assert extra in EXTRAS, f"{module} asks for pure_loop[{extra}], which pyproject.toml doesn't have"
        brought = {canonicalize_name(Requirement(line).name) for line in EXTRAS[extra]}
        assert not package or canonicalize_name(DISTRIBUTIONS.get(package, package)) in brought, module


def test_an_extra_is_used() -> None:
    """By the code, or by the pages and the examples."""
    assert EXTRAS.keys() - {extra for _, extra, _ in USED} == {"docs", "examples"}


def test_the_version_is_the_same_everywhere() -> None:
    path = PYPROJECT["tool"]["hatch"]["version"]["path"]
    assert "version" in PROJECT["dynamic"]
    assert f'__version__ = "{pl.__version__}"' in (ROOT / path).read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == pl.__version__


def test_the_address_of_the_repository_is_that_of_the_project() -> None:
    """Whatever repeats it: a page of the site, which has no file outside of docs/, and what others read."""
    urls, found = PROJECT["urls"], set()
    for pattern in ("*.*", ".github/**/*.yml", "docs/**/*.md", "*/**/*.py"):
        for text in (path.read_text() for path in ROOT.glob(pattern) if path.is_file()):
            found |= {*re.findall(r"https://[\w.-]+/[\w.-]+/pure_loop\b|https://[\w.-]+/pure_loop/", text)}
    raw = urls["Source"].replace("//github.com", "//raw.githubusercontent.com")
    assert found == {urls["Source"], urls["Documentation"], raw}
    assert all(url.startswith((urls["Source"], urls["Documentation"])) for url in urls.values())


def test_the_installed_version_is_that_of_the_code() -> None:
    try:
        installed = metadata.version("pure_loop")
    except metadata.PackageNotFoundError:
        pytest.skip("runs from a folder that is not installed")
    assert installed == pl.__version__, "install it anew: pip install --no-deps --editable ."


def test_the_changelog_is_one_that_a_release_can_take_its_notes_from() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    dated = re.compile(r"\d+\.\d+\.\d+(rc\d+)? - (unreleased|\d{4}-\d\d-\d\d)")
    assert titles
    assert all(dated.fullmatch(title) or title == "Unreleased" for title in titles)
    sections = set(re.findall(r"^### (.*)$", changelog, re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_pythons_are_those_that_ci_runs_on() -> None:
    classified = [
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line) is not None
    ]
    assert WORKFLOWS["ci"]["jobs"]["tests"]["strategy"]["matrix"]["python"] == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"
    tried = (ROOT / "docs" / "installation.md").read_text()
    assert all(f"\n| {python} |" in tried for python in classified)


def test_the_oldest_torch_is_tested() -> None:
    (oldest,) = [line.removeprefix("torch>=") for line in PROJECT["dependencies"] if line.startswith("torch>=")]
    assert WORKFLOWS["ci"]["jobs"]["torch"]["strategy"]["matrix"]["torch"][0] == f"torch~={oldest}.0"


def test_what_workflows_make_can_be_made() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    made = {target for step in steps() for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))}
    made |= set(WORKFLOWS["ci"]["jobs"]["slow"]["strategy"]["matrix"]["target"])
    assert {"lint", "typecheck", "test", "test-slow", "coverage", "bench", "dist"} <= made <= targets
    phony = makefile.partition(".PHONY:")[2].partition("\n\n")[0].replace("\\\n", " ").split()
    assert targets <= set(phony)


def test_actions_are_pinned_by_major_version() -> None:
    used = {step["uses"] for step in steps() if "uses" in step}
    assert len(used) > 5
    assert [name for name in used if not re.fullmatch(r"[\w/-]+@(v\d+|release/v\d+)", name)] == []


def test_workflows_may_write_only_where_they_publish() -> None:
    writes = {
        (name, title): set(job["permissions"])
        for name, workflow in WORKFLOWS.items()
        for title, job in workflow["jobs"].items()
        if "permissions" in job
    }
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    assert writes == {
        ("docs", "publish"): {"pages", "id-token"},
        ("release", "publish"): {"id-token"},
        ("release", "announce"): {"contents"},
    }


def test_hooks_have_the_versions_of_development() -> None:
    assert HOOKS["ruff-pre-commit"] == f"v{CONSTRAINTS['ruff']}"


def test_what_development_installs_is_not_in_the_metadata() -> None:
    groups = PYPROJECT["dependency-groups"]
    assert {"include-group": "test"} in groups["dev"]
    assert "dev" not in EXTRAS
    tools = {Requirement(line).name for name in groups for line in groups[name] if isinstance(line, str)}
    listed = {Requirement(line).name for lines in EXTRAS.values() for line in lines}
    assert tools & (listed | {Requirement(line).name for line in PROJECT["dependencies"]}) == {"pure_loop"}
    # So that all machines check by the same rules.
    checked = {Requirement(line).name for group in ("lint", "release", "coverage") for line in groups[group]}
    assert checked | {"mypy", "pyright", "pytest"} <= set(CONSTRAINTS)


def test_every_extra_but_one_is_tested() -> None:
    tested: set[str] = set()
    new = [Requirement(line) for line in PYPROJECT["dependency-groups"]["test"]]
    while new:
        requirement = new.pop()
        if requirement.name == "pure_loop":
            new += [Requirement(line) for extra in requirement.extras - tested for line in EXTRAS[extra]]
            tested |= requirement.extras
    # Its 30 packages pin others to older versions.
    assert EXTRAS.keys() - tested == {"neptune"}
