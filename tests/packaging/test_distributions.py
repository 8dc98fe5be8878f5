"""The sdist and the wheel: what is in them, and that they work where only they are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import pure_loop as pl
from tests.support.extras import needs

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, needs("hatchling", "hatch_fancy_pypi_readme")]


def output(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """What a command prints. No variable of this process makes packages importable there."""
    own = ("PYTHON", "COVERAGE", "MAKE", "VENV")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    run = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=inherited | environment, timeout=250)
    assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
    return run.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    output(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", folder)
    return folder


@pytest.fixture(scope="module")
def sdist(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    (path,) = built.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    assert root.name == f"pure_loop-{pl.__version__}"
    return root


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    assert path.name == f"pure_loop-{pl.__version__}-py3-none-any.whl"
    return path


def files(folder: Path) -> set[str]:
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {path for path in paths if "__pycache__" not in path and not path.startswith(".hypothesis")}


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs the git repository")
def test_an_sdist_has_every_file_of_the_repository(sdist: Path) -> None:
    listed = output("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    expected = {path for path in listed if path and (ROOT / path).exists()}
    assert files(sdist) - {"PKG-INFO"} == expected


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_finds_its_files_in_an_sdist(sdist: Path) -> None:
    """What targets depend on, and what the commands name; they are not run."""
    targets = ("demo", "test", "test-slow", "lint", "typecheck", "docs", "coverage", "bench")
    commands = "".join(output("make", "--dry-run", target, cwd=sdist) for target in targets)
    assert "--constraint constraints.txt" in commands
    named = re.findall(r"(?<=\s)(?:[\w-]+/)*[\w-]+\.(?:py|txt)\b", commands)
    modules = re.findall(r"-m ((?:tests|bench)[\w.]*)", commands)
    assert all((sdist / path).is_file() for path in named), named
    assert all((sdist / module.replace(".", "/")).exists() for module in modules), modules


def test_tests_pass_in_an_sdist(sdist: Path) -> None:
    # The last reads files of the whole repository.
    tests = ["tests/state/test_time.py", "tests/order/test_event.py", "tests/packaging/test_metadata.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {"PYTHONPATH": str(sdist), "OMP_NUM_THREADS": "1"}
    found = output(sys.executable, "-c", "import pure_loop; print(pure_loop.__file__)", cwd=sdist, **environment)
    assert Path(found.strip()).is_relative_to(sdist)
    assert " passed" in output(*command, cwd=sdist, **environment)


def test_an_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    output(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=sdist)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


@needs("twine")
def test_an_index_takes_them(built: Path) -> None:
    checked = output(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())
    assert checked.count("PASSED") == 2


def test_a_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (described,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(described).decode()
    assert {name.partition("/")[0] for name in names} == {"pure_loop", "_hypothesis_pure_loop.py"}
    package = {f"pure_loop/{path}" for path in files(ROOT / "pure_loop")}
    assert {name for name in names if name.startswith("pure_loop/")} == package
    assert "pure_loop/py.typed" in package
    # A package index shows the README at another address than the repository.
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    raw, tag = source.replace("//github.com", "//raw.githubusercontent.com"), f"v{pl.__version__}"

    def absolute(link: re.Match[str]) -> str:
        place = f"{raw}/{tag}" if link[1].endswith((".png", ".svg")) else f"{source}/blob/{tag}"
        return link[0] if link[1].startswith("https://") else f"]({place}/{link[1]})"

    expected = re.sub(r"\]\(([^)\s]+)\)", absolute, (ROOT / "README.md").read_text())
    assert text.partition("\n\n")[2].rstrip() == expected.rstrip()
    assert expected.count(source) > 10


@pytest.mark.parametrize(
    ("tag", "heading", "notes"),
    [
        (f"v{pl.__version__}", f"{pl.__version__} - 2026-11-30", "\n### Added\n\n- This.\n\n"),
        (f"v{pl.__version__}", f"{pl.__version__} - unreleased", None),
        ("v99.0", "99.0 - 2026-11-30", None),
    ],
    ids=["as it should be", "without a date", "another version"],
)
def test_a_tag_is_released_with_its_section_of_the_changelog(
    tag: str, heading: str, notes: str | None, tmp_path: Path
) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    (script,) = [
        step["run"] for step in workflow["jobs"]["build"]["steps"] if step.get("name") == "notes of the release"
    ]
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pure_loop" / "_internal").mkdir(parents=True)
    shutil.copy(ROOT / "pure_loop/_internal/version.py", tmp_path / "pure_loop/_internal")
    changelog = f"# Changelog\n\n## {heading}\n\n### Added\n\n- This.\n\n## 0.0.1 - 2025-01-01\n\n- That.\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    environment = {**os.environ, "GITHUB_REF_NAME": tag, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    run = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", script], cwd=tmp_path, env=environment, timeout=60)
    assert (run.returncode == 0) == (notes is not None)
    if notes is not None:
        assert (tmp_path / "notes.md").read_text() == notes


def required(*requirements: Requirement) -> set[str]:
    """The packages that pip would install for these, of those that are installed here."""
    result: set[str] = set()
    new = list(requirements)
    while new:
        requirement = new.pop()
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in result:
            result.add(requirement.name)
            new += map(Requirement, metadata.requires(requirement.name) or ())
    return result


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and what it depends on, as links to the packages of this one."""
    folder = tmp_path_factory.mktemp("bare")
    output(sys.executable, "-m", "venv", "--without-pip", folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
        (described,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        lines = archive.read(described).decode().partition("\n\n")[0].splitlines()
    listed = [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist: ")]
    for name in required(*(requirement for requirement in listed if requirement.marker is None)):
        distribution = metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files or () if path.parts[0] != ".."}:
            link = packages / top
            if top != "__pycache__" and not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


def test_a_plain_installation_trains_without_a_warning(bare: Path, tmp_path: Path) -> None:
    program = shutil.copy(Path(__file__).with_name("bare_run.py"), tmp_path)
    printed = output(bare, "-W", "error", program, cwd=tmp_path)
    assert f"pure_loop {pl.__version__} in {bare.parents[1]}" in printed.splitlines()[-1]
    missing = output(bare, "-c", "import importlib.util as i; print(i.find_spec('hypothesis'), i.find_spec('rich'))")
    assert missing.split() == ["None", "None"]


def test_a_plain_installation_says_what_it_lacks(bare: Path, tmp_path: Path) -> None:
    printed = output(bare, "-m", "pure_loop", cwd=tmp_path)
    assert re.search(rf"^pure_loop +{re.escape(pl.__version__)}$", printed, re.MULTILINE)
    assert "pip install 'pure_loop[testing]'" in printed
