"""``pl.changes``, ``pl.blame`` and ``pl.diff`` of streams: who changed what, and what they refuse."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given

import pure_loop as pl
from pure_loop import Event
from pure_loop.testing.case import Case
from pure_loop.testing.comparison import differences
from pure_loop.testing.strategies import algorithms as random_algorithms
from pure_loop.testing.strategies import cases
from pure_loop.tools.steps import steps
from tests.support.problem import fit, points
from tests.support.refused import Refusal, check
from tests.support.tiers import examples

A = pl.algorithms


def test_each_change_has_an_author() -> None:
    """Gradients are those of the backward, then of an algorithm, and parameters those of the optimizer."""
    run = fit(data=points(size=5), algorithms=[A.gradient_clipping("norm", 0.01), A.ema(half_life="2ba")])
    found = [change for change in pl.changes(run) if change.timestamp.batch <= 1]
    authors: dict[str, list[str]] = {}
    for change in found:
        authors.setdefault(change.leaf, []).append(change.by)
    assert authors["params/0.weight"] == ["optimizer"]
    # Gradients are sums over samples until the end of the batch.
    assert authors["grads/0.weight"][:3] == ["backward", "gradients: scale, clip", "gradient_clipping"]
    assert authors["algorithm_state/ema/params/0.weight"] == ["loop", "ema"]  # its init, and its update
    assert (authors["outputs"][0], authors["loss"][0]) == ("forward", "loss")
    clipped = next(change for change in found if change.by == "gradient_clipping")
    assert (clipped.is_algorithm, clipped.event) == (True, Event.AFTER_TRAIN_BATCH)
    # SAM computes each batch again, with the algorithms between; of that it keeps the gradient alone.
    doubled = pl.Algorithm("doubled", {Event.AFTER_LOSS: lambda state: state.replace(loss=state.loss * 2)})
    report = pl.blame(fit(algorithms=[doubled, pl.algorithms.sam()], max_duration="1ep"), "loss")
    assert [change.by for change in report.changes].count("doubled") == 3


def test_the_norm_is_that_of_the_update() -> None:
    run = list(fit(donate=False))
    weights = [run[0][1].params["0.weight"], *(s.params["0.weight"] for e, s in run if e is Event.BATCH_END)]
    report = pl.blame(fit(), "params/0.weight")
    norms = [float((after - before).double().norm()) for before, after in itertools.pairwise(weights)]
    assert [change.norm for change in report.changes] == pytest.approx(norms)
    assert {change.event for change in report.changes} == {Event.BATCH_END}


@examples(6, 100)
@given(case=cases(problems="mlp"), composition=random_algorithms(problem="mlp"))
def test_looking_changes_nothing(case: Case, composition: Any) -> None:
    def run() -> Any:
        return case.stream([composition])

    assert list(pl.changes(run()))
    assert not differences([step.state for step in steps(run(), "test")][-1], list(run())[-1][1])
    alike: Any = pl.diff(run(), run())
    assert (bool(alike), alike.events) == (False, len(list(run())))


def test_the_table_and_algorithms_that_change_nothing() -> None:
    idle = pl.Algorithm("idle", {Event.BATCH_END: lambda state: state.replace(params=dict(state.params))})
    report = pl.blame(fit(algorithms=[idle, pl.algorithms.sam()]), strict=False)
    for strict in (True, None):  # None: as the stream was made
        with pytest.raises(pl.errors.IdleAlgorithmError, match="blame: 'idle' changed no leaf"):
            pl.blame(fit(algorithms=[idle, pl.algorithms.sam()]), strict=strict)
    assert report.idle == ("idle",)
    assert "changed nothing: idle" in str(report)
    assert str(report).split()[:2] == ["event", "by"]
    assert ("AFTER_TRAIN_BATCH", "sam") in {row[:2] for row in report.rows()}
    assert "<table" in report._repr_html_()


class Ends(pl.Callback):
    ended = 0

    def epoch_end(self, state: pl.State, logger: Any) -> None: ...

    def close(self) -> None:
        self.ended += 1


def test_streams_are_ended_where_they_part() -> None:
    ends = Ends()
    assert pl.diff(*(fit(callbacks=[ends], seed=seed) for seed in (0, 1)))
    looked: Any = pl.changes(fit(callbacks=[ends]))
    next(looked)
    looked.close()
    assert ends.ended == 3
    assert pl.diff(fit(max_duration="1ep"), fit(max_duration="2ep"))
    more: Any = pl.diff(fit(), fit(algorithms=[pl.algorithms.sam()]))
    assert (more.leaf, more.by) == ("events", "sam")


def begun() -> Any:
    next(stream := fit())
    return stream


def test_what_has_no_changes_to_tell_of_is_refused() -> None:
    compiled, donated = ({"strict": False, name: True} for name in ("compile", "donate"))
    tools: list[Any] = [pl.changes, pl.blame, lambda run: pl.diff(run, run)]
    for says, make, of in (
        ("give the stream of fit itself", list, tools),
        ("the stream has begun", begun, tools),
        ("leave out donate=True", lambda: fit(**donated), tools),
        ("is compiled", lambda: fit(**compiled), tools[2:]),
        ("'params/7.weight'; did you mean", fit, [lambda run: pl.blame(run, "params/7.weight")]),
        ("is no text", fit, [lambda run: pl.blame(run, 7)]),  # type: ignore[arg-type]
    ):
        for tool in of:
            call = lambda tool=tool, make=make: tool(make())  # noqa: E731
            check(Refusal(says, call, pl.PureLoopError, (says,)))
