"""What a run measures: evaluators, with a loss of their own, and ``train_metrics=`` of the outputs that a step has."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted, record
from pure_loop.loggers import InMemoryLogger
from pure_loop.metrics import accuracy, confusion_matrix, f1, loss, mean
from tests.support.problem import cross_entropy, fit, mlp, points, run
from tests.support.streams import assert_same
from tests.support.tiers import examples
from tests.support.worlds import pool

METRICS = [accuracy(), confusion_matrix(), loss("mean_loss"), mean(lambda outputs, batch: outputs.sum(dim=1), "total")]
HELD_OUT = points(3, seed=1)


def smoothed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, label_smoothing=0.3)


def evaluators(size: int | None = None) -> dict[str, Any]:
    own = pl.Task(loss=lambda outputs, batch: outputs.square().mean())
    metrics = {"val": {}, "smoothed": {"loss": smoothed}, "task": {"loss": own}}
    return {
        **{
            label: pl.Evaluator(HELD_OUT, metrics=[loss()], microbatch_size=size, **more)
            for label, more in metrics.items()
        },
        "default": pl.Evaluator(HELD_OUT, loss=smoothed, microbatch_size=size),
    }


def losses(state: pl.State) -> dict[str, Any]:
    return {label: state.metrics[label]["loss"] for label in evaluators()}


def expected(state: pl.State) -> dict[str, torch.Tensor]:
    inputs, targets = map(torch.cat, zip(*HELD_OUT, strict=True))
    outputs = state.module(training=False)(inputs).detach()
    own = smoothed(outputs, targets)
    return {"val": cross_entropy(outputs, targets), "smoothed": own, "task": outputs.square().mean(), "default": own}


def test_an_evaluator_measures_its_own_loss() -> None:
    for size in (None, 1):
        state = run(evaluators=evaluators(size))
        torch.testing.assert_close(losses(state), expected(state))
    assert set(state.metrics["default"]) == {"loss", "accuracy"}
    assert_same(dict(state.params), dict(run().params), "evaluated and not")
    alone = pl.run(pl.evaluate(state, {"smoothed": evaluators()["smoothed"]}))  # no loss of the call is needed
    torch.testing.assert_close(alone.metrics["smoothed"]["loss"], expected(state)["smoothed"])
    assert repr(pl.Evaluator(HELD_OUT, loss=smoothed)) == "Evaluator(list of 3, loss=smoothed)"


def test_those_that_are_due_at_the_end_of_an_epoch_and_of_the_run_go_in_the_order_given() -> None:
    due = {label: pl.Evaluator(points(1), interval=interval) for label, interval in (("rare", "5ep"), ("each", "1ep"))}
    pairs = fit(evaluators=due, order="2021")
    labels = [next(reversed(state.metrics)) for event, state in pairs if event is Event.EVAL_END]
    assert labels == ["each", "rare", "each"]


def loaders() -> list[Any]:
    data = TensorDataset(*map(torch.cat, zip(*HELD_OUT, strict=True)))
    return [HELD_OUT, DataLoader(data, batch_size=5, shuffle=True)]


@pytest.mark.parametrize(
    ("metric", "error", "says"),
    [
        (confusion_matrix(7), pl.DataError, r"'confusion_matrix' \(confusion_matrix\(classes=7\)\) does not"),
        (mean(lambda outputs, batch: outputs["logits"], "logits"), pl.DataError, "'logits'"),
        (mean(lambda outputs, batch: outputs.mean(), "total"), pl.ArgumentTypeError, "'total'.*one number"),
    ],
    ids=["data", "error", "kind"],
)
def test_a_metric_that_does_not_fit_is_refused_by_name_before_training(metric: Any, error: Any, says: str) -> None:
    for data in loaders():
        started = fit(evaluators={"val": pl.Evaluator(data, metrics=[accuracy("fits"), metric])})
        assert [event for event, _ in islice(started, 4)][-1] is Event.FIT_START
        with pytest.raises(error, match=f"evaluator 'val': the metric {says}") as caught:
            next(started)
        assert any("before training" in note for note in caught.value.__notes__)


def test_looking_at_the_first_microbatch_changes_nothing() -> None:
    """Algorithms have their turn, so that a metric is given what it will be given; the data begins again."""

    @pl.algorithm(Event.EVAL_AFTER_FORWARD)
    def unpacked(state: pl.State) -> pl.State:
        return state.replace(outputs=state.outputs["scores"])

    task = pl.Task(validate=lambda model, batch: {"scores": model(batch[0])})
    data = loaders()[1]
    looked, unseen = (
        run(algorithms=[unpacked], task=task, evaluators={"val": pl.Evaluator(source, metrics=[accuracy(), f1()])},
            max_duration="1ep")
        for source in (data, iter([*data]))
    )  # fmt: skip
    assert_same(dict(looked.params), dict(unseen.params), "looked at or not")
    assert set(looked.metrics["val"]) == {"accuracy", "f1"}


def ragged() -> Any:
    """Three batches of 5, 3 and 4 samples, of which some targets do not count."""
    data = points(size=(5, 3, 4))
    data[0][1][:2] = -100
    return data


def by_hand(states: list[pl.State], data: Any) -> dict[str, torch.Tensor]:
    """The metrics of the epoch of these States, at the start of its batches, from a forward of each whole batch."""
    outputs = torch.cat([state.module()(x).detach() for state, (x, _) in zip(states, data, strict=False)])
    targets = torch.cat([y for _, (_, y) in zip(states, data, strict=False)])
    counted = targets != -100
    right, kept = outputs[counted].argmax(dim=1), targets[counted]
    matrix = torch.zeros(3, 3, dtype=torch.int64).index_put((kept, right), torch.tensor(1), accumulate=True)
    return {
        "accuracy": (right == kept).float().mean(),
        "confusion_matrix": matrix,
        "mean_loss": functional.cross_entropy(outputs, targets),
        "total": outputs.sum(dim=1).mean(),
    }


def measured(stream: Any) -> list[Any]:
    return [dict(state.metrics["train"]) for event, state in stream if event is Event.BATCH_END]


@examples(8, 100)
@given(st.one_of(st.none(), st.integers(1, 6)))
def test_metrics_of_training_are_those_of_the_epoch_so_far_however_batches_are_split(size: int | None) -> None:
    data, started, logger, values = ragged(), [], InMemoryLogger(), []
    for event, state in fit(data=data, train_metrics=[*METRICS, loss()], microbatch_size=size, loggers=[logger]):
        if event is Event.EPOCH_START:
            started = []
        if event is Event.BATCH_START:
            started.append(state)
        if event is Event.BATCH_END:
            found = dict(state.metrics["train"])
            values.append((float(found["accuracy"]), float(found.pop("loss")), float(state.loss)))
            torch.testing.assert_close(found, by_hand(started, data))
    names = ("train/accuracy", "train/epoch/loss", "train/loss")
    assert [logger.series(name)[1] for name in names] == list(map(list, zip(*values, strict=True)))
    assert len(logger.tables["train/confusion_matrix"]) == 6


def test_of_a_loss_with_parts_they_have_the_total() -> None:
    def parts(outputs: Any, targets: Any) -> dict[str, torch.Tensor]:
        entropy = functional.cross_entropy(outputs, targets)
        return {"total": 2 * entropy, "entropy": entropy}

    for event, state in fit(train_metrics=[loss("mean_loss")], loss=parts, batches_per_epoch=1):
        if event is Event.BATCH_END:
            torch.testing.assert_close(state.metrics["train"]["mean_loss"], state.loss["total"])


@pytest.mark.parametrize("algorithms", [[], [pl.algorithms.sam(), pl.algorithms.ema(half_life="2ba")]], ids=["", "sam"])
def test_training_is_bitwise_the_same_and_no_forward_runs_twice(algorithms: Any) -> None:
    model, calls = mlp(), list[int]()
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    options = {"strict": None, "microbatch_size": 2}
    plain = run(model, ragged(), algorithms, **options)
    once = len(calls)
    found = run(model, ragged(), algorithms, train_metrics=METRICS, **options)
    assert len(calls) == 2 * once
    assert_same(dict(found.params), dict(plain.params), "measured or not")
    assert "train" not in plain.metrics


def test_resumed_in_the_middle_of_an_epoch_they_are_bitwise_the_same(tmp_path: Any) -> None:
    options: dict[str, Any] = {"data": ragged(), "train_metrics": METRICS, "microbatch_size": 2}
    whole = measured(fit(**options))
    kept = [state for event, state in fit(**options) if event is Event.BATCH_CHECKPOINT]
    for batch, state in enumerate(kept[:4], start=1):
        pl.save(state, tmp_path / "state")
        rest = measured(fit(pl.load(tmp_path / "state", model=mlp()), **options))
        assert len(rest) == 6 - batch
        for resumed, value in zip(rest, whole[batch:], strict=True):
            assert_same(resumed, value, f"from batch {batch}")
    # Another metric, which the State knows nothing of, begins with the rest of the epoch.
    assert list(run(kept[0], **options | {"train_metrics": [accuracy("other")]}).metrics["train"]) == ["other"]


@pytest.mark.slow  # graphs and ranks
def test_compiled_and_on_ranks_they_are_the_same() -> None:
    data = ragged()
    data[1] = tuple(tensor[:1] for tensor in data[1])  # rank 1 has no sample of it
    options: dict[str, Any] = {
        "data": data,
        "train_metrics": METRICS,
        "evaluators": evaluators(),
        "max_duration": "1ep",
    }

    def program(rank: int) -> Any:
        states = [state for _, state in fit(parallel="replicate", microbatch_size=1, **options)]
        return measured(fit(parallel="replicate", **options)), losses(states[-1]), dict(states[-1].algorithm_state)

    alone = measured(fit(**options))
    (first, values, memory), (second, _, others) = pool().run(program)
    for mine, theirs, wanted in zip(first, second, alone, strict=True):
        assert_same(mine, theirs, "on ranks")
        torch.testing.assert_close(mine, wanted)
    assert_same(memory, others, "a checkpoint is that of rank 0")
    torch.testing.assert_close(values, losses(run(**options)))
    options |= {"data": points(4), "watch": {Event.EPOCH_END, Event.FIT_END}, "strict": None}
    with interpreted():
        compiled = run(compile=True, steps_per_call=2, **options)
        with record() as compilations:
            run(compile=True, watch={Event.EPOCH_END}, strict=None, train_metrics=[accuracy(), loss("mean_loss")])
    torch.testing.assert_close(compiled.metrics["train"], run(**options).metrics["train"])
    torch.testing.assert_close(losses(compiled), expected(compiled))
    assert len(compilations) == 2  # that of the first batch, and that of all others
