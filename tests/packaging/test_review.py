"""The repository, reviewed by sp-repo-review, but for the exceptions that pyproject.toml gives a reason for."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.extras import needs

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "pyproject.toml").read_text()
HEADER = "[tool.repo-review.ignore]\n"
IGNORED = tomllib.loads(TEXT)["tool"]["repo-review"]["ignore"]

pytestmark = needs("repo_review", "sp_repo_review")


def review(root: Path) -> dict[str, Any]:
    from repo_review.processor import process

    return {result.name: result for result in process(root).results}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return review(ROOT)


@pytest.fixture(scope="module")
def strict_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Those of the same repository without exceptions."""
    root = tmp_path_factory.mktemp("reviewed")
    for path in ROOT.iterdir():
        if path.name != "pyproject.toml":
            (root / path.name).symlink_to(path)
    before, _, exceptions = TEXT.partition(HEADER)
    (root / "pyproject.toml").write_text(f"{before}\n[{exceptions.partition(chr(10) + '[')[2]}".removesuffix("["))
    return review(root)


def test_the_review_passes(results: dict[str, Any]) -> None:
    wrong = [f"{name}, {each.description}: {each.err_msg}" for name, each in results.items() if each.result is False]
    assert len(results) > 40
    assert wrong == []


@pytest.mark.parametrize("check", IGNORED)
def test_an_exception_has_a_reason_and_is_needed(check: str, strict_results: dict[str, Any]) -> None:
    assert len(IGNORED[check]) > 40
    assert strict_results[check].result is False, "the check passes by now: take the exception away"
