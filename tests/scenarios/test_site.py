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
from typing import Any

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


def test_pictures_of_the_gallery_are_small_and_shown() -> None:
    largest = int(re.findall(r"^LARGEST = ([\d_]+)", (DOCS / "gallery.py").read_text(), re.MULTILINE)[0])
    readme, gallery = ((ROOT / name).read_text() for name in ("README.md", "docs/gallery.md"))
    for picture in (DOCS / "pictures").glob("*.png"):
        assert picture.stat().st_size < largest, picture
        if f"pictures/{picture.name}" not in readme:  # those are drawn by docs/pictures.py, of no example
            assert f"pictures/{picture.name}" in gallery
            assert (ROOT / "examples" / f"{picture.stem}.py").exists()


LEFT = {
    "see :class:<code>State</code>": "a Sphinx role",
    "with a formula::\n": "a literal block",
    "&gt;&gt;&gt; print(1)": "a doctest",
    "a [State][pure_loop.Stat]": "a reference",
    "```python": "a fence",
    "::: pure_loop.fit": "a directive",
}


def test_markup_that_was_left_and_what_is_not_in_the_site_are_found(tmp_path: Path) -> None:
    for text, what in LEFT.items():
        (found,) = build_site.complaints(f"<article><p>\n{text}</p></article>")
        assert found.startswith(what)
        assert not list(build_site.complaints(f"<article><pre>\n{text}</pre></article>"))
    site = tmp_path / "site"
    site.mkdir()
    (site / "there.png").touch()
    (tmp_path / "outside.py").touch()
    links = '<img src="there.png"><a href="#top"></a><a href="https://x.org/y"></a><img src="gone.png">'
    page = f'<article>{links}<a href="../outside.py"></a></article>'
    found = list(build_site.dangling(page, site / "index.html", site))
    assert found == ["there is no gone.png", "there is no ../outside.py"]


MARKDOWN = [
    ("fenced", "Text.\n\n>>> 1 + 1\n2\n\nMore.", "Text.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."),
    ("fenced", "So::\n\n    x = 1\n\nMore.", "So:\n\n```text\nx = 1\n```\n\nMore."),
    (
        "one_name_an_entry",
        "Args:\n    a, b: what\n        is.\n    x",
        "Args:\n    a: what\n        is.\n    b: what\n        is.\n    x",
    ),
    (
        "lists",
        "Durable:\n    a: one,\n        two.\n    b: three.",
        "Durable:\n\n* `a`: one,\n        two.\n* `b`: three.",
    ),
    ("lists", "Args:\n    a: one.", "Args:\n    a: one."),
]


def test_docstrings_become_markdown_and_roles_become_links() -> None:
    griffe = pytest.importorskip("griffe", reason="needs the extra site")
    docstrings = _load("docstrings")
    for function, before, after in MARKDOWN:
        assert getattr(docstrings, function)(before) == after
    entries = "Args:\n    a: one,\n        two.\n    b: three.\n    c: four"
    assert docstrings.with_ranges(entries, {"a": "1 or 2", "c": "4"}) == (
        "Args:\n    a: one,\n        two. Range: 1 or 2.\n    b: three.\n    c: four. Range: 4."
    )
    assert docstrings.with_type("Returns:\n    The axes: all.", "Any") == "Returns:\n    Any: The axes: all."
    assert docstrings.with_type("Returns:\n    The axes.", "Any") == "Returns:\n    The axes."
    loader = griffe.GriffeLoader(search_paths=[ROOT], extensions=griffe.load_extensions(docstrings.Docstrings))
    package = loader.load("pure_loop")
    for name, link in (
        ("entry.fit.fit", "([`algorithm`][pure_loop.algorithm.algorithm])"),
        ("entry.fit.fit", "[`Task`][pure_loop.Task]"),
        ("optim.from_torch.from_torch", "[`partition`][pure_loop.optim.partition.partition]"),
        ("tools.profile_report.Profile", "[`pl.profile`][pure_loop.profile]"),
    ):
        text = package[name].docstring.value
        assert link in text
        assert ":func:" not in text
    mixup = package["algorithms.mixup.mixup"]
    assert str(mixup.parameters["alpha"].annotation) == "Strength"
    assert "Range: number at least 0, or a schedule." in mixup.docstring.value
    assert [item.path for item in docstrings.objects(package) if "Annotated[" in signature_of(item)] == []


def signature_of(item: Any) -> str:
    """What a page shows of a function's arguments, or of an attribute."""
    shown = item.parameters if item.is_function else [item] if item.is_attribute else []
    return " ".join(str(each.annotation) for each in shown)


BROKEN: list[tuple[str, str, str, list[str]]] = [
    (
        *("docs/limits.md", "# What", "[1](nowhere.md) [2](events.md#nowhere) [3][pure_loop.nowhere]\n\n# What"),
        ["page does not exist", "anchor does not exist", "unresolved autoref"],
    ),
    ("docs/limits.md", "# What", "::: pure_loop.nowhere\n\n# What", ["pure_loop.nowhere could not be found"]),
    # What zensical lets pass.
    ("docs/limits.md", "# What", "![gone](nowhere.png)\n\n# What", ["there is no ../nowhere.png"]),
    ("pure_loop/optim/sgd.py", "nesterov: look", "nesterov look", ["Failed to get 'name: description' pair"]),
]


@pytest.mark.slow  # builds the site
def test_the_site_builds_without_a_warning_and_a_broken_page_fails(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="needs the extra site")
    for name in ("docs", "pure_loop"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)

    def build() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "docs" / "build_site.py")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)

    built = build()
    assert built.returncode == 0, built.stdout + built.stderr
    assert "pages in site" in built.stdout
    inventory = (tmp_path / "site" / "search.json").read_text()
    assert all(name in inventory for name in ("pl.fit", "pl.algorithms.mixup", "DonatedStateError"))
    for rows in (BROKEN[:1], BROKEN[1:2], BROKEN[2:]):
        before = {name: (tmp_path / name).read_text() for name, *_ in rows}
        for name, old, new, _ in rows:
            assert old in before[name]
            (tmp_path / name).write_text(before[name].replace(old, new, 1))
        built = build()
        for name, text in before.items():
            (tmp_path / name).write_text(text)
        assert built.returncode == 1
        assert [message for *_, messages in rows for message in messages if message not in built.stdout] == []
