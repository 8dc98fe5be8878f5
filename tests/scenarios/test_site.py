"""The site: every page is in its navigation, every public name in its reference, and a broken build fails."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType

import pytest

from tests.scenarios.test_docs import ROOT

DOCS = ROOT / "docs"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api, build_site = _load("api"), _load("build_site")


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = Counter(re.findall(r"[\w/-]+\.md", navigation))
    assert set(listed) == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(listed.values()) == {1}


def test_every_public_name_is_on_exactly_one_page_of_the_reference() -> None:
    pages = defaultdict(list)
    for name, page in api.entries():
        pages[api.key_of(name)].append((name, page.name))
    names = list(api.public_names())
    assert len(names) > 300
    missing = [name for name in names if not pages[api.key_of(name)]]
    assert not missing, "list them in a comment `generated: api` of a page in docs/reference, and run make tables"
    public = {api.key_of(name) for name in names}
    assert [entries for key, entries in pages.items() if key not in public and entries] == []
    assert [entries for entries in pages.values() if len({page for _, page in entries}) > 1] == []
    counted = Counter(name for name, _ in api.entries())
    assert set(counted.values()) == {1}


def test_a_name_that_no_page_has_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import pure_loop as pl

    monkeypatch.setattr(pl, "__all__", [*pl.__all__, "__version__"])
    with pytest.raises(AssertionError, match="generated: api"):
        test_every_public_name_is_on_exactly_one_page_of_the_reference()


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").glob("*.png")), ids=lambda path: path.stem)
def test_pictures_of_the_gallery_are_small_and_shown(picture: Path) -> None:
    assert picture.stat().st_size < _largest()
    if f"pictures/{picture.name}" in (ROOT / "README.md").read_text():  # drawn by docs/pictures.py, of no example
        return
    assert f"pictures/{picture.name}" in (DOCS / "gallery.md").read_text()
    assert (ROOT / "examples" / f"{picture.stem}.py").exists()


def _largest() -> int:
    found = re.search(r"^LARGEST = ([\d_]+)", (DOCS / "gallery.py").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("see :class:<code>State</code>", "a Sphinx role"),
        ("with a formula::\n", "a literal block"),
        ("&gt;&gt;&gt; print(1)", "a doctest"),
        ("a [State][pure_loop.Stat]", "a reference"),
        ("```python", "a fence"),
        ("::: pure_loop.fit", "a directive"),
    ],
)
def test_markup_that_was_left_is_found(text: str, what: str) -> None:
    (found,) = build_site.complaints(f"<article><p>\n{text}</p></article>")
    assert found.startswith(what)
    assert not list(build_site.complaints(f"<article><pre>\n{text}</pre></article>"))


def test_what_is_not_in_the_site_is_found(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "there.png").touch()
    (tmp_path / "outside.py").touch()
    links = '<img src="there.png"><a href="#top"></a><a href="https://x.org/y"></a><img src="gone.png">'
    page = f'<article>{links}<a href="../outside.py"></a></article>'
    found = list(build_site.dangling(page, site / "index.html", site))
    assert found == ["there is no gone.png", "there is no ../outside.py"]


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    pytest.importorskip("griffe", reason="needs the extra site")
    return _load("docstrings")


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        ("fenced", "Text.\n\n>>> 1 + 1\n2\n\nMore.", "Text.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."),
        ("fenced", "So::\n\n    x = 1\n\nMore.", "So:\n\n```text\nx = 1\n```\n\nMore."),
        (
            "one_name_an_entry",
            "Args:\n    low, high: what\n        is.\n    x, y\nMore, much: text.",
            "Args:\n    low: what\n        is.\n    high: what\n        is.\n    x, y\nMore, much: text.",
        ),
        (
            "lists",
            "Durable:\n    a: one,\n        two.\n    b: three.",
            "Durable:\n\n* `a`: one,\n        two.\n* `b`: three.",
        ),
        ("lists", "Args:\n    a: one.", "Args:\n    a: one."),
    ],
)
def test_docstrings_become_markdown(docstrings: ModuleType, function: str, before: str, after: str) -> None:
    assert getattr(docstrings, function)(before) == after


def test_the_text_of_returns_is_no_type(docstrings: ModuleType) -> None:
    text = "Returns:\n    The axes: of matplotlib."
    assert docstrings.with_type(text, "Any") == "Returns:\n    Any: The axes: of matplotlib."
    assert docstrings.with_type("Returns:\n    The axes.", "Any") == "Returns:\n    The axes."


def test_roles_become_links_where_there_is_a_page(docstrings: ModuleType) -> None:
    griffe = pytest.importorskip("griffe")
    loader = griffe.GriffeLoader(search_paths=[ROOT], extensions=griffe.load_extensions(docstrings.Docstrings))
    package = loader.load("pure_loop")
    fit = package["entry.fit.fit"].docstring.value
    assert "([`algorithm`][pure_loop.algorithm.algorithm])" in fit
    assert "[`Task`][pure_loop.Task]" in fit
    partition = package["optim.from_torch.from_torch"].docstring.value
    assert "[`partition`][pure_loop.optim.partition.partition]" in partition
    found = package["tools.profile_report.Profile"].docstring.value
    assert "[`pl.profile`][pure_loop.profile]" in found
    assert ":func:" not in fit + partition + found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="needs the extra site")
    copy = tmp_path_factory.mktemp("site")
    for name in ("docs", "pure_loop"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", copy)
    return copy


def _build(copy: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(copy / "docs" / "build_site.py")]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=280)


@pytest.mark.slow  # builds the site
def test_the_site_builds_without_a_warning(site: Path) -> None:
    built = _build(site)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "pages in site" in built.stdout
    inventory = (site / "site" / "search.json").read_text()
    assert all(name in inventory for name in ("pl.fit", "pl.algorithms.mixup", "DonatedStateError"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"docs/limits.md": ("# What", "[1](nowhere.md) [2](events.md#nowhere) [3][pure_loop.nowhere]\n\n# What")},
            ["page does not exist", "anchor does not exist", "unresolved autoref"],
        ),
        ({"docs/limits.md": ("# What", "::: pure_loop.nowhere\n\n# What")}, ["pure_loop.nowhere could not be found"]),
        (
            {
                "docs/limits.md": ("# What", "![gone](nowhere.png)\n\n# What"),
                "pure_loop/optim/sgd.py": ("        nesterov: look", "        nesterov look"),
            },
            ["there is no ../nowhere.png", "Failed to get 'name: description' pair"],
        ),
    ],
    ids=["links", "directive", "what zensical lets pass"],
)
def test_a_broken_page_fails(site: Path, changes: dict[str, tuple[str, str]], messages: list[str]) -> None:
    before = {name: (site / name).read_text() for name in changes}
    for name, (old, new) in changes.items():
        assert old in before[name]
        (site / name).write_text(before[name].replace(old, new, 1))
    try:
        built = _build(site)
    finally:
        for name, text in before.items():
            (site / name).write_text(text)
    assert built.returncode == 1
    assert [message for message in messages if message not in built.stdout] == []
