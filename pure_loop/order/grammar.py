"""Grammars of events: read from text, turned into an automaton.

The notation: ``EVENT rule`` one after the other, ``[x]`` at most once, ``x*`` any number, ``x+`` at least one,
``x | y`` either, ``(x y)`` a group, ``{x}`` only where iterations are counted, ``{ep: x}`` and ``{tok: x}`` only where
they are counted in epochs or in tokens. Rules don't recurse, so the language is regular and a finite automaton decides
it: one position for each place at which an event stands in the expanded text, and the set of positions that may follow
each (Glushkov's construction).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
