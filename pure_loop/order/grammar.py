"""Grammars of events: read from text, turned into an automaton, and shown: as a table, an outline, a diagram.

The notation: ``EVENT rule`` one after the other, ``[x]`` at most once, ``x*`` any number, ``x+`` at least one,
``x | y`` either, ``(x y)`` a group, ``{x}`` only where iterations are counted, ``{ep: x}`` and ``{tok: x}`` only where
they are counted in epochs or in tokens. Rules don't recurse, so the language is regular and a finite automaton decides
it: one position for each place at which an event stands in the expanded text, and the set of positions that may follow
each (Glushkov's construction).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

import attrs

from pure_loop.event import Event

Mode = Literal["none", "ep", "tok"]
MODES: tuple[Mode, ...] = ("none", "ep", "tok")


@attrs.frozen
class Rule:
    """One line of a grammar.

    Attributes:
        name: what other rules call it; ``fit``, ``evaluate`` and ``predict`` are whole streams.
        body: the text, in the notation above.
        note: when, or why.
        title: its heading in the outline; a rule without one is written out where it stands.
        folded: its heading says all that the outline should.
        box: whether the diagram draws a box around it.
        apart: whether the diagram draws it by itself, once, and names it where it stands.
    """

    name: str
    body: str
    note: str = ""
    title: str = ""
    folded: bool = False
    box: bool = False
    apart: bool = False


@attrs.frozen
class Symbol:
    """An event, or the name of a rule."""

    name: str

    @property
    def event(self) -> Event | None:
        return Event[self.name] if self.name.isupper() else None


@attrs.frozen
class Sequence:
    items: tuple[Node, ...]


@attrs.frozen
class Either:
    items: tuple[Node, ...]


@attrs.frozen
class Maybe:
    item: Node


@attrs.frozen
class Many:
    item: Node
    at_least: int


@attrs.frozen
class Only:
    """Its item in some ways of counting iterations; nothing in the others."""

    modes: frozenset[Mode]
    item: Node


Node = Symbol | Sequence | Either | Maybe | Many | Only

_TOKEN = re.compile(r"\s*(\{ep:|\{tok:|[A-Za-z_0-9]+|[\[\](){}*+|])")
_CLOSES = {"[": "]", "(": ")", "{": "}", "{ep:": "}", "{tok:": "}"}
_ONLY: dict[str, frozenset[Mode]] = {
    "{": frozenset(("ep", "tok")),
    "{ep:": frozenset(("ep",)),
    "{tok:": frozenset(("tok",)),
}


def parse(text: str) -> Node:
    """The tree of one rule's text."""
    tokens = [match[1] for match in _TOKEN.finditer(text)]
    assert "".join(tokens).replace(":", "") == re.sub(r"[\s:]", "", text), f"not in the notation: {text}"
    tokens.reverse()  # a stack: the next token is the last one
    node = _either(tokens)
    assert not tokens, f"unbalanced: {text}"
    return node


def _either(tokens: list[str]) -> Node:
    items = [_sequence(tokens)]
    while tokens and tokens[-1] == "|":
        tokens.pop()
        items.append(_sequence(tokens))
    return items[0] if len(items) == 1 else Either(tuple(items))


def _sequence(tokens: list[str]) -> Node:
    items: list[Node] = []
    while tokens and tokens[-1] not in "])}|":
        item = _item(tokens)
        while tokens and tokens[-1] in "*+":
            item = Many(item, at_least=int(tokens.pop() == "+"))
        items.append(item)
    return items[0] if len(items) == 1 else Sequence(tuple(items))


def _item(tokens: list[str]) -> Node:
    token = tokens.pop()
    if token not in _CLOSES:
        return Symbol(token)
    inside = _either(tokens)
    closing = tokens.pop()
    assert closing == _CLOSES[token], f"{token} is closed by {closing}"
    if token == "[":
        return Maybe(inside)
    return inside if token == "(" else Only(_ONLY[token], inside)


class Automaton:
    """The positions of some start rules, expanded, and which may follow which.

    Args:
        rules: every rule's tree by name.
        starts: the rules that a stream may consist of.
        modes: the ways of counting iterations to allow; a stream keeps to one.
        atoms: rules that are not expanded, and stand as one position each.

    Attributes:
        labels: the event at each position (or the atom's name); position 0 is the start and has None.
        paths: the rules around each position, outermost first.
        follow: the positions that may come right after each.
        last: the positions at which a stream may end.
    """

    def __init__(
        self,
        rules: Mapping[str, Node],
        starts: Iterable[str],
        modes: Iterable[Mode] = MODES,
        atoms: Iterable[str] = (),
    ) -> None:
        self._rules, self._atoms = rules, frozenset(atoms)
        self.labels: list[Event | str | None] = [None]
        self.paths: list[tuple[str, ...]] = [()]
        self.follow: list[set[int]] = [set()]
        self.last: set[int] = set()
        starts = tuple(starts)
        for mode in modes:
            for start in starts:
                _, first, last = self._expand(Symbol(start), mode, ())
                self.follow[0] |= first
                self.last |= last

    def add(self, label: Event, follow: set[int]) -> int:
        """A position more, at which a stream may start."""
        position = self._position(label, ())
        self.follow[position] = set(follow)
        self.follow[0].add(position)
        return position

    def at(self, events: frozenset[Event]) -> Iterator[int]:
        """The positions of these events."""
        return (position for position, label in enumerate(self.labels) if label in events)

    def _position(self, label: Event | str, path: tuple[str, ...]) -> int:
        self.labels.append(label)
        self.paths.append(path)
        self.follow.append(set())
        return len(self.labels) - 1

    def _expand(self, node: Node, mode: Mode, path: tuple[str, ...]) -> tuple[bool, set[int], set[int]]:
        """Add a node's positions: whether it may be empty, where it may begin, and where it may end."""
        if isinstance(node, Symbol):
            if node.event is None and node.name not in self._atoms:
                return self._expand(self._rules[node.name], mode, (*path, node.name))
            position = self._position(node.event or node.name, path)
            return False, {position}, {position}
        if isinstance(node, Sequence):
            empty, first, last = True, set[int](), set[int]()
            for item in node.items:
                item_empty, item_first, item_last = self._expand(item, mode, path)
                self._link(last, item_first)
                first |= item_first if empty else set()
                last = item_last | (last if item_empty else set())
                empty = empty and item_empty
            return empty, first, last
        if isinstance(node, Either):
            arms = [self._expand(item, mode, path) for item in node.items]
            return (
                any(arm[0] for arm in arms),
                set().union(*(arm[1] for arm in arms)),
                set().union(*(arm[2] for arm in arms)),
            )
        if isinstance(node, Only) and mode not in node.modes:
            return True, set(), set()
        empty, first, last = self._expand(node.item, mode, path)
        if isinstance(node, Many):
            self._link(last, first)
            empty = empty or node.at_least == 0
        return empty or isinstance(node, Maybe), first, last

    def _link(self, before: set[int], after: set[int]) -> None:
        for position in before:
            self.follow[position] |= after


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
