"""``pl.changes``, ``pl.blame`` and ``pl.diff``: who changed what, and where two runs part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.testing.case import Case
from pure_loop.testing.comparison import differences
from pure_loop.testing.strategies import algorithms as random_algorithms
from pure_loop.testing.strategies import cases
from tests.support.runs import convnet, cross_entropy, images, mlp, points, stream
from tests.support.tiers import examples


def test_each_change_has_an_author() -> None:
    """Gradients are those of the backward, then of an algorithm, and parameters those of the optimizer."""
    run = stream(mlp(), points(), [pl.algorithms.gradient_clipping("norm", 0.01), pl.algorithms.ema(half_life="2ba")])
    found = [change for change in pl.changes(run) if change.timestamp.batch <= 1]
    authors: dict[str, list[str]] = {}
    for change in found:
        authors.setdefault(change.leaf, []).append(change.by)
    assert authors["params/0.weight"] == ["optimizer"]
    # Gradients are sums over samples until the end of the batch.
    assert authors["grads/0.weight"][:3] == ["backward", "gradients: scale, clip", "gradient_clipping"]
    assert authors["algorithm_state/ema/params/0.weight"] == ["loop", "ema"]  # its init, and its update
    assert authors["outputs"][0] == "forward"
    assert authors["loss"][0] == "loss"
    clipped = next(change for change in found if change.by == "gradient_clipping" and change.leaf == "grads/0.weight")
    assert clipped.is_algorithm
    assert clipped.event is Event.AFTER_TRAIN_BATCH


def test_calls_inside_an_algorithm_are_its_own() -> None:
    """SAM computes each batch again, with the algorithms between; of that it keeps the gradient alone."""
    run = stream(mlp(), points(), [scaled(2.0, Event.AFTER_LOSS, "loss"), pl.algorithms.sam()], max_duration="1ep")
    report = pl.blame(run, "loss")
    assert [change.by for change in report.changes if change.by == "scaled"] == ["scaled"] * 3


def test_the_norm_is_that_of_the_update() -> None:
    before: Any = None
    norms = []
    for event, state in stream(mlp(), points()):
        if event is Event.BATCH_START:
            before = state.params["0.weight"].clone()
        if event is Event.BATCH_END:
            norms.append(float((state.params["0.weight"] - before).double().norm()))
    report = pl.blame(stream(mlp(), points()), "params/0.weight")
    assert [change.norm for change in report.changes] == pytest.approx(norms)
    assert {change.event for change in report.changes} == {Event.BATCH_END}


@examples(8, 100)
@given(case=cases(problems="mlp"), composition=random_algorithms(problem="mlp"))
def test_looking_changes_nothing(case: Case, composition: Any) -> None:
    def run() -> Any:
        return case.stream([composition])

    watched = run()
    looked = pl.changes(watched)
    while (change := next(looked, None)) is not None:
        last = change
    assert last is not None
    again: list[Any] = [state for _, state in run()]
    seen = [state for _, state in _observed(run())]
    assert not differences(seen[-1], again[-1])
    assert pl.diff(run(), run()) is None


def _observed(run: Any) -> Any:
    from pure_loop.tools.steps import steps

    for step in steps(run, "test"):
        yield step.event, step.state


def test_the_table_and_algorithms_that_change_nothing() -> None:
    idle = pl.Algorithm("idle", {Event.BATCH_END: lambda state: state.replace(params=dict(state.params))})
    report = pl.blame(stream(mlp(), points(), [idle, pl.algorithms.sam()]), strict=False)
    for strict in (True, None):  # None: as the stream was made
        with pytest.raises(pl.IdleAlgorithmError, match="blame: 'idle' changed no leaf"):
            pl.blame(stream(mlp(), points(), [idle, pl.algorithms.sam()], strict=True), strict=strict)
    assert report.idle == ("idle",)
    text = str(report)
    assert "changed nothing: idle" in text
    assert text.split()[:2] == ["event", "by"]
    assert ("AFTER_TRAIN_BATCH", "sam") in {row[:2] for row in report.rows()}
    assert "<table" in report._repr_html_()


def scaled(factor: float, event: Event, field: str) -> pl.Algorithm:
    def scale(state: pl.State) -> pl.State:
        value = getattr(state, field)
        if isinstance(value, torch.Tensor):
            return state.replace(**{field: value * factor})  # type: ignore[arg-type]
        return state.replace(**{field: {name: tensor * factor for name, tensor in value.items()}})  # type: ignore[arg-type]

    return pl.Algorithm("scaled", {event: scale})


def convolutions(dropout: float = 0.2, momentum: float = 0.1) -> nn.Module:
    module: Any = convnet()
    module[5].p, module[1].momentum = dropout, momentum
    return module  # type: ignore[no-any-return]


def other_label(position: int) -> Any:
    data = images()
    labels = data[position][1].clone()
    labels[0] = (labels[0] + 1) % 3
    data[position] = (data[position][0], labels)
    return data


PLAIN: dict[str, Any] = {"max_duration": "2ep", "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9)}
# One line that is another in the second run: what differs in it, and the event, author and leaf where that shows first.
LINES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "another rate": ({"optimizer": pl.optim.sgd(lr=0.2, momentum=0.9)}, "BATCH_END", "optimizer", "params/"),
    "another momentum": ({"optimizer": pl.optim.sgd(lr=0.1, momentum=0.8)}, "BATCH_END", "optimizer", "params/"),
    "another loss": (
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        *("AFTER_LOSS", "loss", "loss"),
    ),
    "clipped": ({"clip_grad": 0.01}, "AFTER_TRAIN_BATCH", "gradients: scale, clip", "grads/"),
    "another seed": ({"seed": 1}, "INIT", "loop", "seed"),
    "a loss of twice": ({"algorithms": [scaled(2.0, Event.AFTER_LOSS, "loss")]}, "AFTER_LOSS", "scaled", "loss"),
    "gradients of twice": (
        {"algorithms": [scaled(2.0, Event.AFTER_TRAIN_BATCH, "grads")]},
        *("AFTER_TRAIN_BATCH", "scaled", "grads/"),
    ),
    "weights of 0.9": (
        {"algorithms": [scaled(0.9, Event.EPOCH_END, "params")]},
        *("EPOCH_END", "scaled", "params/"),
    ),
    "microbatches": ({"microbatch_size": 2}, "BEFORE_FORWARD", "split into microbatches", "microbatch/"),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_is_another_is_named(line: str) -> None:
    settings, event, by, leaf = LINES[line]
    algorithms = settings.get("algorithms")
    same = [] if algorithms is None else [scaled(1.0, *_bound(algorithms[0]))]
    where = pl.diff(
        pl.fit(convolutions(), images(), **{"loss": cross_entropy, **PLAIN, "algorithms": same}),
        pl.fit(convolutions(), images(), **{"loss": cross_entropy, **PLAIN, **settings}),
    )
    assert where is not None
    assert (where.event.name, where.by) == (event, by)
    assert where.leaf.startswith(leaf)
    assert event in str(where)
    assert str(where).count("\n") == 2


def _bound(algorithm: pl.Algorithm) -> tuple[Event, str]:
    event = next(iter(algorithm.handlers))
    return event, {"AFTER_LOSS": "loss", "AFTER_TRAIN_BATCH": "grads", "EPOCH_END": "params"}[event.name]


@pytest.mark.parametrize("position", [0, 2])
def test_another_label_is_named_at_the_batch_that_has_it(position: int) -> None:
    runs = [stream(convolutions(), data, **PLAIN) for data in (images(), other_label(position))]
    where = pl.diff(*runs)
    assert where is not None
    assert (where.event, where.timestamp.batch, where.by, where.leaf) == (
        *(Event.AFTER_DATALOADER, position, "data", "batch/1"),
    )


def test_other_modules() -> None:
    wheres = [
        pl.diff(stream(convolutions(), images()), stream(other, images()))
        for other in (convolutions(dropout=0.3), convolutions(momentum=0.2))
    ]
    assert [(where.event.name, where.by) for where in wheres if where] == [("AFTER_FORWARD", "forward")] * 2
    assert wheres[1] is not None
    assert "buffers/1.running_mean" in wheres[1].leaves


def test_other_events() -> None:
    where = pl.diff(stream(mlp(), points()), stream(mlp(), points(4)))
    assert where is not None
    assert where.leaf == "events" or where.leaf.startswith("batch")
    longer = pl.diff(stream(mlp(), points(), max_duration="1ep"), stream(mlp(), points(), max_duration="2ep"))
    assert longer is not None
    more = pl.diff(stream(mlp(), points()), stream(mlp(), points(), [pl.algorithms.sam()]))
    assert more is not None
    assert (more.leaf, more.by) == ("events", "sam")


def test_streams_are_ended_where_they_part() -> None:
    class Ends(pl.Callback):
        ended = 0

        def epoch_end(self, state: pl.State, logger: Any) -> None: ...

        def close(self) -> None:
            self.ended += 1

    ends = Ends()
    runs = [stream(mlp(), points(), callbacks=[ends], seed=seed) for seed in (0, 1)]
    assert pl.diff(*runs) is not None
    assert ends.ended == 2
    for _ in pl.changes(another := stream(mlp(), points(), callbacks=[ends])):
        break
    assert another is not None
    assert ends.ended == 3


def test_a_tolerance() -> None:
    def run(factor: float) -> Any:
        return stream(mlp(), points(), [scaled(factor, Event.AFTER_TRAIN_BATCH, "grads")], max_duration="2ba")

    assert pl.diff(run(1.0), run(1.0 + 1e-6)) is not None
    assert pl.diff(run(1.0), run(1.0 + 1e-6), tolerance=1e-4) is None


def test_what_is_refused() -> None:
    begun = stream(mlp(), points())
    next(begun)
    for tool in (pl.changes, pl.blame, lambda run: pl.diff(run, run)):
        with pytest.raises(pl.ArgumentTypeError, match="give the stream of fit itself"):
            tool([])  # type: ignore[arg-type]
        with pytest.raises(pl.ArgumentError, match="the stream has begun"):
            tool(begun)
        with pytest.raises(pl.ArgumentError, match="is compiled"):
            tool(stream(mlp(), points(), compile=True, strict=False))
        with pytest.raises(pl.ArgumentError, match="leave out donate=True"):
            tool(stream(mlp(), points(), donate=True, strict=False))
    with pytest.raises(pl.ArgumentError, match=r"no State of the run has the leaf 'params/7\.weight'; there are"):
        pl.blame(stream(mlp(), points()), "params/7.weight")
    with pytest.raises(pl.ArgumentTypeError, match="is no text"):
        pl.blame(stream(mlp(), points()), 7)  # type: ignore[arg-type]
