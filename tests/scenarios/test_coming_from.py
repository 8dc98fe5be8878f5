"""Pages for users of other libraries: the right side of each comparison is the program that the page runs."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "coming-from"
PAGES = sorted(FOLDER.glob("*.md"), key=lambda path: path.name)


def right_side(page: str) -> str:
    """The lines that a diff keeps or adds."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("-"))


def test_there_is_a_page_for_each_library() -> None:
    names = ["accelerate", "composer", "keras", "lightning", "loop_by_hand", "transformers_trainer"]
    assert [path.stem for path in PAGES] == names


def test_the_right_side_of_the_diff_is_what_runs_and_the_left_side_does_without_the_library() -> None:
    for path in PAGES:
        page = path.read_text()
        assert right_side(page) == re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0], path.stem
        (diff,) = re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        removed = [line for line in diff.splitlines() if line.startswith("-")]
        assert removed, path.stem
        assert not [line for line in removed if re.search(r"\bpl\.|pure_loop", line)], path.stem
