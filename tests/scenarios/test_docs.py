"""README.md and docs/: what they show is what is so."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import attrs
import pytest
import torch

import pure_loop as pl
from pure_loop import Event

ROOT = Path(__file__).resolve().parents[2]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _load(ROOT / "docs" / "generate.py")
PAGES = {str(path.relative_to(ROOT)): path for path in generate.pages()}
README = PAGES["README.md"].read_text()

# Lists of the API, made of docstrings, and of pictures: their examples are elsewhere.
WITHOUT_CODE = {page for page in PAGES if "<!-- generated: api" in PAGES[page].read_text()}
WITHOUT_CODE |= {"docs/gallery.md", "docs/reference/laws.md"}


@pytest.mark.slow  # the code of the pages
@pytest.mark.parametrize("page", [page for page in PAGES if page not in WITHOUT_CODE])
def test_every_python_block_runs_and_generated_parts_are_as_they_would_be_now(page: str) -> None:
    """Numbers with a point may differ by a hundredth, because processors round and sum in ways of their own."""
    text = PAGES[page].read_text()
    printed = generate.run(PAGES[page])
    assert len(printed) == text.count("```python\n")
    (words, numbers), (written_words, written) = map(_apart, (generate.render(PAGES[page], printed), text))
    assert words == written_words, "run make docs"
    assert numbers == pytest.approx(written, rel=0.01), "run make docs"


def _apart(text: str) -> tuple[str, list[float]]:
    """A text, and the numbers with a point that were in it."""
    number = r"(?<![.\d])-?\d+\.\d+(?:e-?\d+)?(?![.\d])"
    return re.sub(number, "#", text), [float(found) for found in re.findall(number, text)]


def test_a_page_begins_with_a_sentence_and_goes_on_with_an_example() -> None:
    """One heading of the first level, what else its subject is called, a sentence; the README and the site's front page
    have a picture as well."""
    for page in PAGES.keys() - {"README.md"}:
        prose = _prose(PAGES[page].read_text())
        assert re.findall(r"^# ", prose, re.MULTILINE) == ["# "], page
        heading, *paragraphs = re.sub(r"<!-- generated: source .*? -->\n\n", "", PAGES[page].read_text()).split("\n\n")
        also = paragraphs[0].startswith("Also called: ")
        assert heading.startswith("# "), page
        assert not also or re.fullmatch(r"Also called: [^,]+(,\s[^,]+)*\.", paragraphs[0]), page
        sentence, example = paragraphs[also : also + 2]
        assert re.match(r"[A-Z`[]", sentence), f"{page} begins with {sentence[:50]!r}, and not with a sentence"
        assert re.search(r"[.:]$", sentence), f"{page}: {sentence!r} is not a sentence"
        assert page in WITHOUT_CODE | {"docs/index.md"} or example.startswith("```"), page
    _, *before, heading = README.partition("```")[0].strip().split("\n\n")
    assert heading.startswith("## ")
    assert len(before) <= 4, "what it is, for whom, and a picture"


def test_code_on_pages_is_88_columns_wide_as_ruff_breaks_it() -> None:
    """What Ruff can't break, strings and comments, is no wider; of a diff, without the sign of a line."""
    of_docs = sorted((ROOT / "docs").rglob("*.md"))
    command = [sys.executable, "-m", "ruff", "format", "--check", f"--line-length={generate.WIDTH}", *map(str, of_docs)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    fence = re.compile(r"^ *```(python|py|pycon|sh|diff)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    for path in of_docs:
        for language, code in fence.findall(path.read_text()):
            wide = [line for line in code.splitlines() if len(line) > generate.WIDTH + (language == "diff")]
            assert not wide, f"{path.name}: {wide}"


def test_tables_are_as_they_would_be_now() -> None:
    """What code prints is tried above, and cards are by those of bench."""
    texts = {path: generate.render(path, None) for path in PAGES.values()}
    assert [path.name for path, text in texts.items() if path.read_text() != text] == [], "run make tables"


def test_diagrams_are_files_that_show_what_mermaid_would_and_no_page_asks_for_its_script() -> None:
    for path, text in generate.diagrams().items():
        assert path.read_text() == text, "run make tables"
        drawn, flowchart = ElementTree.fromstring(text), pl.order.mermaid(path.stem.removeprefix("order-"))
        shown = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
        assert set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", flowchart)) <= set(shown)
        assert text.count('class="arrow"') == flowchart.count("-->")
        assert text.count('class="when"') == flowchart.count("-->|")
        assert text.count("http") == 1, "the namespace"
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "```mermaid" in path.read_text()]
    assert pages == []
    assert "mermaid" not in (ROOT / "mkdocs.yml").read_text()


def test_packages_list_what_their_modules_have() -> None:
    for package in generate.PACKAGES:
        text = (generate.ROOT / "pure_loop" / package / "__init__.py").read_text()
        assert generate.render_package(package) == text, "run make tables"
        listed = getattr(pl, package)
        public = [module for module in generate.modules(package) if generate.is_public(module.name, package)]
        names = {name for module in public for name in module.public}
        beside = names - {module.name for module in public} if package == "algorithms" else set()
        assert set(listed.__all__) == names - beside
        assert all(getattr(listed, name) is not None for name in names)


def test_every_marker_is_closed() -> None:
    for page, path in PAGES.items():
        text = path.read_text()
        found = re.findall(r"<!-- (generated|end)", text.replace("<!-- end of", ""))
        assert found == ["generated", "end"] * (len(found) // 2), page
    assert "<!-- generated: diagram current -->" in PAGES["docs/events.md"].read_text()


def test_drift_is_found_and_mended_and_running_a_page_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    before = (
        "# Page\n\n```python\nimport torch\nprint(torch.manual_seed(5) and 'a b')\nopen('c', 'w').close()\n```\n\n"
        '<!-- generated: output from "a" to "b" -->\n<!-- end -->\n\n<!-- generated: grammar 2021 -->\n<!-- end -->\n'
    )
    page.write_text(before)
    for name, value in (("pages", lambda: [page]), ("ROOT", tmp_path), ("cards", dict), ("diagrams", dict)):
        monkeypatch.setattr(generate, name, value)
    folder, random = Path.cwd(), torch.get_rng_state()
    assert generate.main(["--check"]) == 1
    assert page.read_text() == before, "--check writes nothing"
    assert "page.md: out of date; run make docs" in capsys.readouterr().out
    assert generate.main([]) == 0
    assert "```text\na b\n```" in page.read_text()
    assert pl.order.table("2021") in page.read_text()
    assert generate.main(["--check"]) == 0
    assert (Path.cwd(), (folder / "c").exists()) == (folder, False)
    assert torch.equal(torch.get_rng_state(), random)
    page.write_text("# Page\n\n```python\nx = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        generate.run(page)
    assert (caught.traceback[-1].lineno + 1, str(caught.traceback[-1].path)) == (5, str(page)), "its line in the page"


_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
REPOSITORY = re.compile(rf"{re.escape(SOURCE)}/(blob|tree)/main/(.+)")


def test_links_into_the_repository_lead_somewhere() -> None:
    """Relative ones, so that they do wherever the repository lives; docs/pages.py makes those of the site."""
    for page in PAGES:
        for target in _LINK.findall(_prose(PAGES[page].read_text())):
            name, _, heading = target.partition("#")
            inside = REPOSITORY.fullmatch(name)
            if inside is not None:
                assert page == "README.md", f"{page} links to {target}: write a relative link"
                path = ROOT / inside[2]
                assert path.is_dir() == (inside[1] == "tree"), f"{page} links to {target}"
            elif target.startswith(("http://", "https://")):
                continue
            else:
                path = (PAGES[page].parent / name).resolve() if name else PAGES[page]
                assert path.is_relative_to(ROOT), f"{page} links to {target}"
            assert path.exists(), f"{page} links to {target}"
            if heading and path.suffix == ".md":
                assert heading in _anchors(path.read_text()), f"{page} links to {target}"


def test_the_readme_is_short_and_its_links_are_relative() -> None:
    """So that they lead to the same commit, wherever the repository lives; a release makes them absolute."""
    assert len(README.splitlines()) <= 200
    links = _LINK.findall(_prose(README))
    assert len(links) > 10
    assert not [link for link in links if link.startswith(SOURCE) or "githubusercontent" in link]


def _prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    """The anchors that headings get on a page of the forge."""
    headings = re.findall(r"^#+ (.*)$", _prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_names_exist() -> None:
    for page in PAGES:
        # Sources that are shown may have States of their own.
        text = re.sub(r"<!-- generated: source .*?<!-- end -->", "", PAGES[page].read_text(), flags=re.DOTALL)
        for name in set(re.findall(r"\bpl\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", text)):
            found: Any = pl
            for part in name.split("."):
                assert hasattr(found, part), f"{page}: pl.{name}"
                found = getattr(found, part)
        for name in set(re.findall(r"\b(?:state|first|last)\.([a-z_]+)", text)):
            assert hasattr(pl.State, name), f"{page}: state.{name}"
        for name in set(re.findall(r"\bstate\.timestamp\.([a-z_]+)", text)):
            assert hasattr(pl.Timestamp, name), f"{page}: state.timestamp.{name}"
        launchers = (ROOT / "pure_loop" / "_internal" / "processes.py").read_text()
        for name in set(re.findall(r"\bEvent\.([A-Z_]+)\b|`([A-Z]+_[A-Z_]+)`", text)):
            is_variable = f'"{name[1]}"' in launchers  # of the environment
            assert is_variable or (name[0] or name[1]) in Event.__members__, f"{page}: {name}"


def test_the_readme_counts_the_events() -> None:
    counts = [
        int(n)
        for page in PAGES.values()
        for n in re.findall(r"(?<!other )\b(\d+)[ ,]+(?:events|in an order)", page.read_text())
    ]
    assert counts
    assert set(counts) == {len(list(Event))}


def test_the_state_s_fields_are_all_explained() -> None:
    table = PAGES["docs/concepts.md"].read_text().partition("| fields |")[2].partition("\n\n")[0]
    explained = set(re.findall(r"`([a-z_]+)`", table))
    assert {field.alias for field in attrs.fields(pl.State)} <= explained


def test_the_commands_and_the_extras_are_named() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test", "bench"} <= named <= targets
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install = PAGES["docs/installation.md"].read_text().partition("## Install")[2].partition("\n## ")[0]
    assert all(f"`{extra}`" in install or f"[{extra}]" in install for extra in project["optional-dependencies"])
    (torch_range,) = [each for each in project["dependencies"] if each.startswith("torch")]
    for text in (install, README.partition("## Install")[2].partition("\n## ")[0]):
        assert project["requires-python"].removeprefix(">=") in text
        assert torch_range.removeprefix("torch>=") in text


def test_the_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert pl.__version__ in re.findall(r"^## ([\w.]+)", changelog, re.MULTILINE)
    for name in re.findall(r"`pl\.(\w+)`", changelog):
        assert hasattr(pl, name), name


def test_on_pages_for_users_of_other_libraries_the_right_side_of_the_diff_is_what_runs() -> None:
    """And the left side does without this library."""
    names = ["accelerate", "composer", "keras", "lightning", "loop_by_hand", "transformers_trainer"]
    paths = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
    assert [path.stem for path in paths] == names
    for path in paths:
        pattern, page = "(?ms)^```{}\n(.*?)^```$", path.read_text()
        (diff,), (program, *_) = (re.findall(pattern.format(kind), page) for kind in ("diff", "python"))
        assert "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("-")) == program, path.stem
        removed = [line for line in diff.splitlines() if line.startswith("-")]
        assert removed, path.stem
        assert not [line for line in removed if re.search(r"\bpl\.|pure_loop", line)], path.stem
