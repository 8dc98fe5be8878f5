"""The laws themselves, on the loops that need no other library; and the tables of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.peers import tables
from bench.peers.adapters import by_hand, careful, ours
from bench.peers.laws import LAWS
from bench.peers.legs import Adapter, Leg, Params, Step, Way, hooks, in_this_process

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "peers.json"

ORDER = "order of samples"
WEIGHT = "weighs as much as the other"


def answer(adapter: Adapter, law: str) -> tuple[str, str]:
    found = LAWS[law](adapter, in_this_process)
    return found.result, found.reason


@pytest.mark.parametrize("law", LAWS)
def test_pure_loop_keeps_them_all(law: str) -> None:
    assert answer(ours.ADAPTER, law) == ("yes", "")


@pytest.mark.parametrize(
    ("law", "result", "reason"),
    [
        ("resumed in an epoch", "no", ORDER),
        ("resumed between epochs", "no", ORDER),
        ("observed", "no", f"{ORDER} (from batch 6), with an evaluation"),
        ("observed, own generators", "yes", ""),
        ("smaller microbatch", "no", WEIGHT),
        ("ignored targets", "no", WEIGHT),
        ("order after resuming", "not offered", "no events"),
        ("order is one", "not offered", "no events"),
    ],
)
def test_a_loop_by_hand_fails_for_the_known_reasons(law: str, result: str, reason: str) -> None:
    found = answer(by_hand.ADAPTER, law)
    assert found[0] == result
    assert reason in found[1]


@pytest.mark.parametrize("law", [law for law in LAWS if "order" not in law])
def test_a_careful_loop_by_hand_keeps_them(law: str) -> None:
    assert answer(careful.ADAPTER, law) == ("yes", "")


class Forgetful(ours.PureLoop):
    """Begins anew instead of resuming, or ends with other bits."""

    name = "forgetful"

    def __init__(self, forgets: str) -> None:
        self.forgets = forgets

    def train(self, leg: Leg) -> Params:
        if leg.resume and self.forgets == "seed":
            torch.manual_seed(0)
            return super().train(Leg(folder=leg.folder, epochs=leg.epochs, log=leg.log, evaluate=leg.evaluate))
        params = super().train(leg)
        if leg.resume and self.forgets == "last bit":
            return {name: torch.nextafter(tensor, torch.ones(())) for name, tensor in params.items()}
        return params


def test_a_law_tells_what_differs() -> None:
    assert answer(Forgetful("seed"), "resumed in an epoch") == ("no", "15 batches instead of 8")
    assert answer(Forgetful("seed"), "order after resuming") == ("no", "15 batches instead of 8")
    found = answer(Forgetful("last bit"), "resumed between epochs")
    assert found == ("no", "parameters, after the same batches and the same dropout")


def test_a_law_tells_dropout_from_shuffling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    assert answer(careful.ADAPTER, "resumed in an epoch") == ("no", "dropout's random state (from batch 8)")


class Disordered(ours.PureLoop):
    """Begins an epoch twice where it resumes, and exchanges two events where it evaluates in the epoch."""

    name = "disordered"

    def train(self, leg: Leg) -> Params:
        if leg.resume:
            hooks.append("EPOCH_START")
        params = super().train(leg)
        if leg.evaluate == 2:
            exchanged = {"BATCH_START": "BATCH_END", "BATCH_END": "BATCH_START"}
            hooks[:] = [exchanged.get(name, name) for name in hooks]
        return params


def test_a_law_tells_which_hook_is_elsewhere() -> None:
    result, reason = answer(Disordered(), "order after resuming")
    assert (result, "EPOCH_START" in reason) == ("no", True)
    found = answer(Disordered(), "order is one")
    assert found == ("no", "BATCH_END in place of BATCH_START with 1 microbatches, evaluate=2")


def test_a_way_beyond_the_documentation_decides_nothing() -> None:
    class Explained(by_hand.ByHand):
        ways = (Way("plain"), Way("with a generator", generators=True, beyond=True))

        def train(self, leg: Leg) -> Params:
            return careful.ADAPTER.train(leg) if leg.generators else super().train(leg)

    found = LAWS["resumed in an epoch"](Explained(), in_this_process)
    assert (found.result, found.way) == ("no", "plain")
    assert found.beyond == {"with a generator": "yes"}


def test_the_smaller_microbatch_is_a_third() -> None:
    """Of six samples two: the two steps are the same only where the mean is over samples."""
    whole, split = (in_this_process(careful.ADAPTER, Step(split, False)).recorded for split in (False, True))
    assert [len(samples) for samples, _ in whole] == [6]
    assert [len(samples) for samples, _ in split] == [4, 2]


@pytest.fixture
def results() -> Any:
    return json.loads(RESULTS.read_text())


def test_the_table_has_every_library_and_law(results: Any) -> None:
    header, _, *rows = tables.render("table", results).splitlines()
    assert [cell.strip() for cell in header.split("|")[2:-1]] == [tables.HEADINGS[law] for law in LAWS]
    lines = [line.split("|")[1:-1] for line in rows if line.startswith("|")]
    for name, (label, *row) in zip(results["peers"], lines, strict=True):
        assert label.strip().startswith(name)
        answers = [found["result"] for found in results["peers"][name]["laws"].values()]
        assert [cell.strip().removesuffix("\\*") for cell in row] == answers
    assert {cell.strip() for cell in lines[0][1:]} == {"yes"}


def test_the_brief_table_is_the_other_in_marks(results: Any) -> None:
    """A column of two laws has a sure mark where both have it."""
    text = tables.render("brief", results)
    lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines() if line.startswith("|")]
    assert (lines[0], sorted(law for laws in tables.BRIEF.values() for law in laws)) == ([*tables.BRIEF], sorted(LAWS))
    for peer, row in zip(results["peers"].values(), lines[2:], strict=True):
        for mark, laws in zip(row, tables.BRIEF.values(), strict=True):
            tried = [reason == "yes" for law in laws for reason in peer["laws"][law]["tried"].values()]
            assert mark == ("-" if not tried else "✓" if all(tried) else "~" if any(tried) else "✗")
    assert {*lines[2]} == {"✓"}


def test_every_no_has_a_reason(results: Any) -> None:
    text = tables.render("reasons", results)
    for name, peer in results["peers"].items():
        assert (RESULTS.parent.parent / "bench" / "peers" / "adapters" / f"{peer['module']}.py").exists()
        for law, found in peer["laws"].items():
            assert found["result"] == "yes" or found["reason"], (name, law)
            if found["result"] == "no":
                assert found["reason"] in text
    assert all(name in tables.render("versions", results) for name in results["peers"])
