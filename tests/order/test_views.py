"""What is drawn from the grammar shows all of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pure_loop import order
from pure_loop.event import Event


@pytest.mark.parametrize("which", ["current", "2021"])
def test_the_views_show_every_event_of_the_order(which: Any) -> None:
    names = set(Event.__members__) if which == "current" else set()
    known = {word for rule in order.GRAMMARS[which] for word in _words(rule.body) if word.isupper()}
    if names:
        assert known == names - {"TRAINING_START", "TRAINING_END"}
    table = order.table(which)
    assert known <= set(_words(table))
    assert {line.split()[0] for line in table.splitlines() if " = " in line} == {r.name for r in order.GRAMMARS[which]}
    assert max(map(len, table.splitlines())) <= 132
    outlined = {event for _, event, _ in order.outline(which) if isinstance(event, Event)}
    assert outlined == {Event[name] for name in known}


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split()


@pytest.mark.parametrize("which", ["current", "2021"])
def test_the_outline_reads_from_top_to_bottom(which: Any) -> None:
    lines = order.outline(which)
    assert lines[0][:2] == (0, "fit")
    assert all(after <= before + 1 for (before, _, _), (after, _, _) in pairwise(lines))
    depths = {event: depth for depth, event, _ in reversed(lines) if isinstance(event, Event)}
    assert depths[Event.FIT_START] == 1
    assert depths[Event.EPOCH_START] == 2
    assert depths[Event.BATCH_START] == depths[Event.BATCH_END] == 3
    assert depths[Event.BEFORE_FORWARD] == 4
    notes = {event: note for _, event, note in lines if isinstance(event, Event)}
    assert "fresh" in notes[Event.INIT]
    assert set(order.NOTES) <= set(Event)


@pytest.mark.parametrize("which", ["current", "2021"])
def test_the_diagram_is_the_grammar(which: Any) -> None:
    lines = [line.strip() for line in order.mermaid(which).splitlines()]
    assert lines[0] == "flowchart TD"
    assert lines.count("end") == sum(line.startswith("subgraph ") for line in lines)
    arrows = [line.split("-->") for line in lines if "-->" in line]
    drawn = {(start.strip(), end.rpartition("|")[2].strip()) for start, end in arrows}
    nodes = {line for line in lines if line in Event.__members__}
    between = {(start, end) for start, end in drawn if start in nodes and end in nodes}
    for start, end in between:
        assert Event[end] in order.successors(Event[start], order=which)
    # Going on from FIT_START is not drawn, iterations and standalone streams neither.
    for start in nodes - {"FIT_START"}:
        for after in order.successors(Event[start], order=which):
            inside = after.name in nodes and not (start.startswith("EVAL") or after.is_eval)
            assert not inside or (start, after.name) in between, (start, after)
    depth, depths = 0, {}
    for line in lines:
        depth += line.startswith("subgraph ") - (line == "end")
        depths[line] = depth
    assert [depths[f"subgraph {name}"] for name in ("fit", "epoch", "batch", "microbatch")] == [1, 2, 3, 4]
    assert [depths[name] for name in ("FIT_END", "EPOCH_END", "BATCH_END", "BEFORE_LOSS")] == [1, 2, 3, 4]
