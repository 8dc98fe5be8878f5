"""What a grammar looks like: as a table for a terminal, as an indented outline, as a diagram."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from pure_loop.event import Event
from pure_loop.order.grammar import Automaton, Either, Node, Rule, Sequence, Symbol, parse

Rules = Mapping[str, Rule]

_LEGEND = "[x] at most once   x* any number   x+ at least one   x | y either"
_LEGEND_ITERATIONS = "{x} only where iteration_length is set, {ep: x} in epochs, {tok: x} in tokens"


def table(rules: Rules) -> str:
    margin = max(map(len, rules)) + 2
    lines = [_LEGEND]
    if any("{" in rule.body for rule in rules.values()):
        lines.append(_LEGEND_ITERATIONS)
    for rule in rules.values():
        lines.append("")
        for number, arm in enumerate(rule.body.split(" | ")):
            name, sign = ("", "|") if number else (rule.name, "=")
            lines.append(f"{name:<{margin}}{sign} {arm}")
        comment = " " * margin + "  # "
        lines += textwrap.wrap(rule.note, 110, initial_indent=comment, subsequent_indent=comment)
    return "\n".join(lines)


def outline(rules: Rules, streams: list[str], notes: Mapping[Event, str]) -> list[tuple[int, str | Event, str]]:
    trees = {name: parse(rule.body) for name, rule in rules.items()}
    seen: set[str] = set()

    def walk(node: Node, depth: int) -> Iterator[tuple[int, str | Event, str]]:
        if not isinstance(node, Symbol):
            for item in node.items if isinstance(node, (Sequence, Either)) else (node.item,):
                yield from walk(item, depth)
            return
        if node.event is not None:
            yield depth, node.event, notes.get(node.event, "")
            return
        rule = rules[node.name]
        again = rule.name in seen
        seen.add(rule.name)
        if rule.title:
            yield depth, rule.title, "as above" if again else rule.note
        if not rule.title or not (again or rule.folded):
            yield from walk(trees[rule.name], depth + bool(rule.title))

    return [line for stream in streams for line in walk(Symbol(stream), 0)]


def mermaid(rules: Rules, boundaries: AbstractSet[Event], reasons: Mapping[tuple[object, ...], str]) -> str:
    trees = {name: parse(rule.body) for name, rule in rules.items()}
    apart = [rule.name for rule in rules.values() if rule.apart]
    boxes: dict[tuple[str, ...], list[str]] = {}
    arrows: dict[str, None] = {}
    drawn: set[str] = set()
    heads: list[str] = []
    for start in ("fit", *apart):
        automaton = Automaton(trees, [start], ["none"], [name for name in apart if name != start])
        nodes = _nodes(automaton)
        heads.append(nodes[min(automaton.follow[0])])
        for position, node in nodes.items():
            label = automaton.labels[position]
            if node not in drawn:
                path = tuple(name for name in automaton.paths[position] if rules[name].box)
                boxes.setdefault(path, []).append(node if isinstance(label, Event) else f"{node}[[{label}]]")
            drawn.add(node)
            for after in sorted(automaton.follow[position]):
                reason = reasons.get((label, automaton.labels[after]))
                arrows[f"{node} -->|{reason}| {nodes[after]}" if reason else f"{node} --> {nodes[after]}"] = None
    # Mermaid lays out a box that nothing leads into by itself, sideways and from the inside out: an invisible link
    # between the boxes keeps all of them reading from top to bottom.
    arrows |= dict.fromkeys(f"{heads[0]} ~~~ {head}" for head in heads[1:])
    marked = ",".join(event.name for event in Event if event in boundaries and event.name in drawn)
    lines = ["flowchart TD", *_draw(boxes, ()), *(f"    {arrow}" for arrow in arrows)]
    return "\n".join([*lines, "    classDef boundary stroke-width:4px", f"    class {marked} boundary"])


def _nodes(automaton: Automaton) -> dict[int, str]:
    """Each position's node: an event has one; a rule that is drawn apart has one for each place it comes after."""
    places: dict[frozenset[object], int] = {}
    nodes = {}
    for position, label in enumerate(automaton.labels):
        if isinstance(label, Event):
            nodes[position] = label.name
        elif label is not None:
            before = {automaton.labels[earlier] for earlier, after in enumerate(automaton.follow) if position in after}
            nodes[position] = f"{label}_{places.setdefault(frozenset(before), len(places) + 1)}"
    return nodes


def _draw(boxes: dict[tuple[str, ...], list[str]], path: tuple[str, ...]) -> Iterator[str]:
    indent = "    " * (len(path) + 1)
    yield from (indent + node for node in boxes.get(path, ()))
    for name in dict.fromkeys(box[len(path)] for box in boxes if len(box) > len(path) and box[: len(path)] == path):
        yield f"{indent}subgraph {name}"
        yield from _draw(boxes, (*path, name))
        yield f"{indent}end"
