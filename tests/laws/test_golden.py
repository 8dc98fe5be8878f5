"""Golden streams: the events and the States of hundreds of runs are those that are recorded, bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench.golden import check, compare, golden, recorded, summary
from bench.plans import KINDS, NUMBERS, plan_of
from tests.support.tiers import tiers

FAST = KINDS["eager"][::11]
# So many in one test that one that fails is found soon, and a machine that is busy ends each in time.
PIECES = {"eager": 84, "ranks": 15, "compiled": 10}
PARTS = {
    f"{kind} {numbers[first]}-": numbers[first : first + PIECES[kind]]
    for kind, numbers in KINDS.items()
    for first in range(0, len(numbers), PIECES[kind])
}


@pytest.mark.parametrize("first", range(4))
def test_streams_are_as_they_were(first: int) -> None:
    assert check(FAST[first::4]) == []


COMPILED = [part for part in PARTS if part.startswith("compiled")]


@pytest.mark.slow
@pytest.mark.parametrize("part", tiers(PARTS, PARTS.keys() - {*COMPILED[2:]}))
def test_further_streams_are_as_they_were(part: str) -> None:
    """Slow: of ranks and of graphs, too; thorough: most graphs, each of which is traced again."""
    assert check(number for number in PARTS[part] if number not in FAST) == []


def test_a_plan_depends_on_its_number_alone() -> None:
    plans = {number: plan_of(number) for number in (300, 7, 41)}
    assert plans == {number: plan_of(number) for number in (41, 300, 7)}
    assert len({str(plan_of(number)) for number in NUMBERS}) == len(NUMBERS) == len(golden()["streams"])


def test_a_difference_is_found_and_named() -> None:
    number = next(each for each in NUMBERS if plan_of(each)["consumer"] == "reads" and plan_of(each)["watch"] is None)
    plan = plan_of(number)
    wanted: dict[str, Any] = summary(plan, recorded(plan))

    def difference(change: Any = None, **options: Any) -> str:
        recorder = copy.deepcopy(recorded(plan))
        if change is not None:
            change(recorder, recorder.records[len(recorder.records) // 2])
        return str(compare(wanted, plan, recorder, **options))

    def flip(recorder: Any, record: Any) -> None:
        index = next(i for i, path in enumerate(record.paths) if path.startswith("params."))
        record.values[index] = bytes([record.values[index][0] ^ 1]) + record.values[index][1:]

    assert difference(values=True) == difference(values=False) == "None"
    assert "params." in difference(flip, values=True)
    assert "States" in difference(lambda recorder, record: recorder.records.pop(), values=True)
    assert "kept" in difference(lambda recorder, record: recorder.changed.append("a State kept changed"), values=True)
