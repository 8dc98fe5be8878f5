"""The order of events as an SVG file: what ``pl.order.mermaid`` says, laid out from top to bottom.

A page shows the file as it shows every picture; a script of Mermaid's would be fetched while it is read. Colours are
those that a light and a dark page can have behind them, and all text stands on a colour of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

import attrs

from pure_loop import Event, order

__all__ = ["conditions", "draw"]

ROW, WIDTH, HEIGHT = 30, 172, 22  # of a node, in pixels
PAD, HEAD, FOOT = 11, 26, 9  # between the borders of boxes; above and below what a box holds
LANE, EDGE = 18, 12  # between arrows beside the boxes

_STYLE = """
text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #fff; text-anchor: middle }
.box { fill: #8a94a6; fill-opacity: .12; stroke: #8a94a6 }
.node { fill: #3f51b5 } .boundary { stroke: #f59e0b; stroke-width: 4 } .apart, .title { fill: #5d6775 }
.arrow { fill: none; stroke: #8a94a6; stroke-width: 1.6; marker-end: url(#head) }
.head { fill: #8a94a6 } .when { fill: #b45309 }
"""


@attrs.frozen
class Arrow:
    """From one node to another, and when it is taken; empty where that needs no word."""

    start: str
    end: str
    when: str = ""


@attrs.frozen
class Chart:
    """What a flowchart of Mermaid says: nodes in rows from top to bottom, each with the boxes around it.

    Attributes:
        boxes: of each node, outermost first, in the order of rows.
        labels: of each node.
        arrows: between nodes.
        boundaries: the nodes with a thick border.
    """

    boxes: Mapping[str, tuple[str, ...]]
    labels: Mapping[str, str]
    arrows: Sequence[Arrow]
    boundaries: frozenset[str]


def _chart(which: order.Order) -> Chart:
    boxes: dict[str, tuple[str, ...]] = {}
    labels: dict[str, str] = {}
    arrows: list[Arrow] = []
    boundaries: frozenset[str] = frozenset()
    path: list[str] = []
    for line in map(str.strip, order.mermaid(which).splitlines()[1:]):
        if found := re.fullmatch(r"subgraph (\w+)", line):
            path.append(found[1])
        elif line == "end":
            path.pop()
        elif found := re.fullmatch(r"(\w+) -->(?:\|(.*)\|)? (\w+)", line):
            arrows.append(Arrow(found[1], found[3], found[2] or ""))
        elif found := re.fullmatch(r"class (.*) boundary", line):
            boundaries = frozenset(found[1].split(","))
        elif found := re.fullmatch(r"(\w+)(?:\[\[(\w+)\]\])?", line):
            boxes[found[1]], labels[found[1]] = tuple(path), found[2] or found[1]
    # A rule that is drawn apart stands below the last event that it comes after.
    events = [event.name for _, event, _ in order.outline(which) if isinstance(event, Event)]
    places: dict[str, float] = {name: events.index(name) for name in boxes if name in events}
    for name in boxes.keys() - places.keys():
        places[name] = max(places[arrow.start] for arrow in arrows if arrow.end == name and arrow.start in places) + 0.5
    apart = [path[0] for path in boxes.values()]  # the first box is fit
    rows = sorted(boxes, key=lambda name: (apart.index(boxes[name][0]), places[name]))
    return Chart({name: boxes[name] for name in rows}, labels, arrows, boundaries)


def conditions(which: order.Order = "current") -> dict[str, str]:
    """The letters on arrows, and when an arrow with that letter is taken."""
    said = dict.fromkeys(arrow.when for arrow in _chart(which).arrows if arrow.when)
    return dict(zip("abcdefgh", said, strict=False))


def draw(which: order.Order = "current") -> str:
    """The text of the file."""
    chart = _chart(which)
    tops, borders, height = _rows(chart)
    rows = list(tops)
    straight, beside = [], []
    for arrow in chart.arrows:
        is_next = rows.index(arrow.end) - rows.index(arrow.start) == 1
        (straight if is_next and not arrow.when else beside).append(arrow)
    lanes = {side: _lanes([a for a in beside if (tops[a.end] < tops[a.start]) == (side < 0)], tops) for side in (-1, 1)}
    depth = max(map(len, chart.boxes.values()))
    reach = {side: WIDTH / 2 + depth * PAD + EDGE + LANE * (max(lanes[side].values(), default=0) + 1) for side in lanes}
    middle, letters = reach[-1], {when: letter for letter, when in conditions(which).items()}
    parts = [*_boxes(borders, middle, depth), *_straight(straight, tops, middle)]
    for side, by_lane in lanes.items():
        for arrow, lane in by_lane.items():
            x = middle + side * (WIDTH / 2 + depth * PAD + EDGE + LANE * lane)
            parts += _beside(arrow, side, x, middle, tops, letters)
    for name, top in tops.items():
        kind = "node boundary" if name in chart.boundaries else "node" if name in Event.__members__ else "apart"
        radius = 11 if kind == "apart" else 5
        shape = f'x="{middle - WIDTH / 2:g}" y="{top:g}" width="{WIDTH}" height="{HEIGHT}" rx="{radius}"'
        parts += [f'<rect class="{kind}" {shape}/>', _text(middle, top + 15, chart.labels[name])]
    width = middle + reach[1]
    marker = '<marker id="head" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
    head = f'<defs>{marker}<path class="head" d="M0,0 6,3 0,6z"/></marker></defs>'
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    title = f"<title>The order of events: {escape(which)}</title>"
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([opened, title, f"<style>{_STYLE}</style>", head, *parts, "</svg>", ""])


Border = tuple[str, int, float, float]  # a box: its name, how deep it is, where it begins and where it ends


def _rows(chart: Chart) -> tuple[dict[str, float], list[Border], float]:
    """Where each node begins, from the top; the boxes; and the height of all."""
    tops: dict[str, float] = {}
    borders: list[Border] = []
    opened: list[tuple[str, float]] = []
    y = 4.0
    for name, path in [*chart.boxes.items(), ("", ())]:
        same = [box == start[0] for box, start in zip(path, opened, strict=False)]
        common = same.index(False) if False in same else len(same)
        while len(opened) > common:
            box, start = opened.pop()
            y += FOOT
            borders.append((box, len(opened), start, y - (ROW - HEIGHT) / 2))
            y += 0 if opened else ROW / 2
        for box in path[common:]:
            opened.append((box, y))
            y += HEAD
        if name:
            tops[name] = y
            y += ROW
    return tops, sorted(borders, key=lambda border: border[1]), y


def _lanes(arrows: Sequence[Arrow], tops: Mapping[str, float]) -> dict[Arrow, int]:
    """The lane of each arrow on one side, the short ones nearest to the nodes: none touches another in its lane."""
    taken: list[list[tuple[float, float]]] = []
    lanes = {}
    for arrow in sorted(arrows, key=lambda arrow: abs(tops[arrow.start] - tops[arrow.end])):
        low, high = sorted((tops[arrow.start], tops[arrow.end]))
        lane = next((i for i, spans in enumerate(taken) if all(high < a or b < low for a, b in spans)), len(taken))
        taken += [[]] * (lane == len(taken))
        taken[lane] = [*taken[lane], (low, high)]
        lanes[arrow] = lane
    return lanes


def _boxes(borders: Sequence[Border], middle: float, depth: int) -> Iterator[str]:
    for name, deep, top, bottom in borders:
        half = WIDTH / 2 + PAD * (depth - deep)
        shape = f'x="{middle - half:g}" y="{top:g}" width="{2 * half:g}" height="{bottom - top:g}" rx="6"'
        wide = 7.4 * len(name) + 10
        yield f'<rect class="box" {shape}/>'
        yield f'<rect class="title" x="{middle - half:g}" y="{top:g}" width="{wide:g}" height="18" rx="5"/>'
        yield _text(middle - half + wide / 2, top + 13, name)


def _straight(arrows: Sequence[Arrow], tops: Mapping[str, float], middle: float) -> Iterator[str]:
    for arrow in arrows:
        yield f'<path class="arrow" d="M{middle:g},{tops[arrow.start] + HEIGHT:g}V{tops[arrow.end] - 2:g}"/>'


def _beside(
    arrow: Arrow, side: int, x: float, middle: float, tops: Mapping[str, float], letters: Mapping[str, str]
) -> Iterator[str]:
    """Out of a node, along a lane, into another."""
    edge, down = middle + side * WIDTH / 2, 1 if tops[arrow.start] <= tops[arrow.end] else -1
    start, end = (tops[name] + HEIGHT / 2 + shift * down for name, shift in ((arrow.start, 4), (arrow.end, -4)))
    inner, corner = x - side * 6, math.copysign(min(6, abs(end - start) / 2), end - start)
    path = f"M{edge:g},{start:g}H{inner:g}Q{x:g},{start:g} {x:g},{start + corner:g}"
    path += f"V{end - corner:g}Q{x:g},{end:g} {inner:g},{end:g}H{edge + side * 3:g}"
    yield f'<path class="arrow" d="{path}"/>'
    if arrow.when:
        y = (start + end) / 2 if abs(end - start) < 1.5 * ROW else start + 3 * corner
        yield f'<circle class="when" cx="{x:g}" cy="{y:g}" r="8"/>'
        yield _text(x, y + 4, letters[arrow.when])


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{text}</text>'
