"""The cards of docs/cards: one for each algorithm, as its module and what was measured say."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.cards.entries import ENTRIES
from bench.cards.measure import SEEDS
from bench.cards.pictures import PICTURES
from pure_loop.testing import laws
from pure_loop.testing._compositions import ACROSS_MEMBERS, ALGORITHMS
from tests.scenarios.test_docs import ROOT, generate
from tests.support.served import module_of

CARDS = ROOT / "docs" / "cards"
RECORDS = json.loads((ROOT / "docs" / "cards.json").read_text())
TEXTS: dict[Path, str] = generate.cards()


def test_each_algorithm_has_one() -> None:
    """One that joins needs a line in bench/cards/entries.py, and ``make cards NAME=...``."""
    assert ENTRIES.keys() == {*ALGORITHMS, *ACROSS_MEMBERS} == RECORDS.keys()
    assert {path.stem for path in CARDS.glob("*.md")} == ENTRIES.keys() | {"index"}
    gallery = TEXTS[CARDS / "index.md"]
    assert sorted(re.findall(r"\[\*\*.*\*\*\]\((\w+)\.md\)", gallery)) == sorted(ENTRIES), "each once"
    assert sorted(re.findall(r"\]\((\w+)\.png\)", gallery)) == sorted(path.stem for path in CARDS.glob("*.png"))


def test_they_are_as_they_would_be_now() -> None:
    assert [path.stem for path, text in TEXTS.items() if text != path.read_text()] == [], "run make tables"


def test_what_was_measured_is_of_these_algorithms() -> None:
    for name, record in RECORDS.items():
        entry = ENTRIES[name]
        assert record["code"] == entry.code, f"run make cards NAME={name}"
        assert {len(scores) for scores in record["scores"].values()} == {SEEDS}
        assert set(record["events"]) == {event.name for event in entry.make().handlers}
        if name in ACROSS_MEMBERS:  # a law is one of a model alone
            assert entry.members
            assert record["laws"] == {}
            continue
        assert set(record["laws"]) == {law.name for law in laws.OF_ALGORITHMS} | set(laws.UNAVAILABLE)
        results = {law: result for law, (result, _) in record["laws"].items()}
        named = {**getattr(module_of(ALGORITHMS[name]), "EXPECTED_FAILURES", {}), **entry.unkept}
        expected = {law for law in named if results[law] != "skipped"}
        assert {law for law, result in results.items() if result == "expected failure"} == expected
        assert not {result for result, _ in record["laws"].values()} & {"FAILED", "UNEXPECTED PASS"}, name


def test_pictures_are_small() -> None:
    for name, record in RECORDS.items():
        picture = CARDS / f"{name}.png"
        assert picture.exists() == bool(ENTRIES[name].picture) == record["picture"], name
        if picture.exists():
            assert ENTRIES[name].picture in PICTURES
            assert picture.stat().st_size < 30_000
