"""What is drawn from the grammar shows all of it."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from pure_loop import order
from pure_loop.event import Event


@pytest.mark.parametrize("which", ["current", "2021"])
def test_table_outline_and_diagram_show_the_grammar(which: Any) -> None:
    known = {word for rule in order.GRAMMARS[which] for word in re.findall(r"\w+", rule.body) if word.isupper()}
    assert which != "current" or known == set(Event.__members__) - {"TRAINING_START", "TRAINING_END"}
    table = order.table(which)
    assert known <= set(re.findall(r"\w+", table))
    assert {line.split()[0] for line in table.splitlines() if " = " in line} == {r.name for r in order.GRAMMARS[which]}
    assert max(map(len, table.splitlines())) <= 132

    # The outline reads from top to bottom.
    lines = order.outline(which)
    assert lines[0][:2] == (0, "fit")
    assert all(after <= before + 1 for (before, _, _), (after, _, _) in pairwise(lines))
    depths = {event: depth for depth, event, _ in reversed(lines) if isinstance(event, Event)}
    assert set(depths) == {Event[name] for name in known}
    inner = (Event.FIT_START, Event.EPOCH_START, Event.BATCH_START, Event.BATCH_END, Event.BEFORE_FORWARD)
    assert [depths[event] for event in inner] == [1, 2, 3, 3, 4]
    assert "fresh" in next(note for _, event, note in lines if event is Event.INIT)
    assert set(order.NOTES) <= set(Event)

    # The diagram has the arrows of the grammar, and boxes in boxes.
    drawn = [line.strip() for line in order.mermaid(which).splitlines()]
    assert drawn[0] == "flowchart TD"
    assert drawn.count("end") == sum(line.startswith("subgraph ") for line in drawn)
    arrows = {(start.strip(), end.rpartition("|")[2].strip()) for start, end in _halves(drawn)}
    nodes = {line for line in drawn if line in Event.__members__}
    between = {(start, end) for start, end in arrows if start in nodes and end in nodes}
    for start, end in between:
        assert Event[end] in order.successors(Event[start], order=which)
    # Going on from FIT_START is not drawn, iterations and standalone streams neither.
    for start in nodes - {"FIT_START"}:
        for after in order.successors(Event[start], order=which):
            inside = after.name in nodes and not (start.startswith("EVAL") or after.is_eval)
            assert not inside or (start, after.name) in between, (start, after)
    depth, boxes = 0, {}
    for line in drawn:
        depth += line.startswith("subgraph ") - (line == "end")
        boxes[line] = depth
    assert [boxes[f"subgraph {name}"] for name in ("fit", "epoch", "batch", "microbatch")] == [1, 2, 3, 4]
    assert [boxes[name] for name in ("FIT_END", "EPOCH_END", "BATCH_END", "BEFORE_LOSS")] == [1, 2, 3, 4]


def _halves(drawn: list[str]) -> list[tuple[str, ...]]:
    return [tuple(line.split("-->")) for line in drawn if "-->" in line]
