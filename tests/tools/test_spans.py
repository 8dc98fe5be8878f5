"""Spans: every unit of time belongs to the innermost one that is open, or to none."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pure_loop.tools.profile_report import Key, Recorder

KEYS = [Key("stage", "one"), Key("stage", "two"), Key("callback", "three", "BATCH_END")]


class Clocked(Recorder):
    """By a clock that the test moves."""

    now = 0

    def _now(self) -> int:
        return self.now


# A tree: how long it waits, and inside which key it goes on.
trees: Any = st.recursive(
    st.integers(0, 9),
    lambda inner: st.tuples(st.sampled_from(KEYS), st.lists(inner, max_size=4)),
    max_leaves=20,
)


@given(forest=st.lists(trees, max_size=5))
def test_time_belongs_to_the_innermost_span(forest: Any) -> None:
    recorder = Clocked(warmup=0, batches=None, keeps_spans=True)
    recorder.begin()
    expected: Counter[Key | None] = Counter()
    spans = 0

    def walk(tree: Any, inside: Key | None) -> None:
        nonlocal spans
        if isinstance(tree, int):
            recorder.now += tree
            expected[inside] += tree
            return
        key, inner = tree
        spans += 1

        def call() -> None:
            for child in inner:
                walk(child, key)

        recorder.timed(key, call)()

    for tree in forest:
        walk(tree, None)
    recorder.end()
    assert {key: recorder.nanoseconds.get(key, 0) for key in KEYS} == {key: expected[key] for key in KEYS}
    assert recorder.unattributed == expected[None]
    assert recorder.stopped - recorder.started == sum(expected.values())
    assert len(recorder.spans) == spans


def test_a_window_begins_and_ends_inside_spans() -> None:
    recorder = Clocked(warmup=1, batches=1)
    outer, inner = KEYS[:2]

    def batch(number: int) -> None:
        recorder.now += 10
        recorder.timed(inner, lambda: setattr(recorder, "now", recorder.now + 5))()
        recorder.count_batches()
        recorder.now += 100

    for number in range(3):
        recorder.timed(outer, batch)(number)
    assert recorder.over
    assert recorder.nanoseconds == {outer: 10, inner: 5}
    assert recorder.unattributed == 100  # of the batch of the warmup, whose span began before
    assert recorder.calls == {outer: 1, inner: 1}


def test_an_error_closes_its_span() -> None:
    recorder = Clocked(warmup=0, batches=None)
    recorder.begin()

    def fail() -> None:
        recorder.now += 3
        raise ValueError("no")

    try:
        recorder.timed(KEYS[0], fail)()
    except ValueError:
        recorder.now += 4
    recorder.end()
    assert (recorder.nanoseconds, recorder.unattributed) == ({KEYS[0]: 3}, 4)
