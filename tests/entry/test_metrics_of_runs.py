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
from pure_loop.compile import interpreted
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
    losses: dict[str, Any] = {"val": None, "smoothed": smoothed, "task": own}
    measured = {"metrics": [loss()], "microbatch_size": size}
    found = {label: pl.Evaluator(HELD_OUT, loss=each, **measured) for label, each in losses.items()}
    return found | {"default": pl.Evaluator(HELD_OUT, loss=smoothed, microbatch_size=size)}


def losses(state: pl.State) -> dict[str, Any]:
    return {label: state.metrics[label]["loss"] for label in evaluators()}


def expected(state: pl.State) -> dict[str, torch.Tensor]:
    inputs, targets = map(torch.cat, zip(*HELD_OUT, strict=True))
    outputs = state.module(training=False)(inputs).detach()
    own = smoothed(outputs, targets)
    return {"val": cross_entropy(outputs, targets), "smoothed": own, "task": outputs.square().mean(), "default": own}


def test_an_evaluator_measures_its_own_loss() -> None:
    for size in (None, 1):
        state = run(evaluators=evaluators(size), max_duration="1ep")
        torch.testing.assert_close(losses(state), expected(state))
    assert set(state.metrics["default"]) == {"loss", "accuracy"}
    alone = pl.run(pl.evaluate(state, {"smoothed": evaluators()["smoothed"]}))  # no loss of the call is needed
    torch.testing.assert_close(alone.metrics["smoothed"]["loss"], expected(state)["smoothed"])
    due = {label: pl.Evaluator(points(1), interval=interval) for label, interval in (("rare", "5ep"), ("each", "1ep"))}
    ends = [state for event, state in fit(evaluators=due, order="2021") if event is Event.EVAL_END]
    assert [next(reversed(state.metrics)) for state in ends] == ["each", "rare", "each"]  # in the order given


def loaders() -> list[Any]:
    data = TensorDataset(*map(torch.cat, zip(*HELD_OUT, strict=True)))
    return [HELD_OUT, DataLoader(data, batch_size=5, shuffle=True)]


MISFITS: list[tuple[Any, type[Exception], str]] = [
    (confusion_matrix(7), pl.errors.DataError, r"'confusion_matrix' \(confusion_matrix\(classes=7\)\) does not"),
    (mean(lambda outputs, batch: outputs["logits"], "logits"), pl.errors.DataError, "'logits'"),
    (mean(lambda outputs, batch: outputs.mean(), "total"), pl.errors.ArgumentTypeError, "'total'.*one number"),
]


def test_a_metric_that_does_not_fit_is_refused_by_name_before_training() -> None:
    for metric, error, says in MISFITS:
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

    task, data, found = (
        pl.Task(loss=cross_entropy, validate=lambda model, batch: {"scores": model(batch[0])}),
        loaders()[1],
        [],
    )
    for source in (data, iter([*data])):
        evaluators = {"val": pl.Evaluator(source, metrics=[accuracy(), f1()])}
        found.append(run(algorithms=[unpacked], loss=task, evaluators=evaluators, max_duration="1ep"))
    assert_same(dict(found[0].params), dict(found[1].params), "looked at or not")
    assert set(found[0].metrics["val"]) == {"accuracy", "f1"}


def ragged() -> Any:
    """Three batches of 5, 3 and 4 samples, of which some targets do not count."""
    data = points(size=(5, 3, 4))
    data[0][1][:2] = -100
    return data


def by_hand(states: list[pl.State], data: Any) -> dict[str, torch.Tensor]:
    """The metrics of the epoch of these States, at the start of its batches, from a forward of each whole batch."""
    outputs = torch.cat([state.module()(x).detach() for state, (x, _) in zip(states, data, strict=False)])
    targets = torch.cat([y for _, (_, y) in zip(states, data, strict=False)])
    right, kept = outputs[targets != -100].argmax(dim=1), targets[targets != -100]
    matrix = torch.zeros(3, 3, dtype=torch.int64).index_put((kept, right), torch.tensor(1), accumulate=True)
    entropy, total = functional.cross_entropy(outputs, targets), outputs.sum(dim=1).mean()
    correct = (right == kept).float().mean()
    return {"accuracy": correct, "confusion_matrix": matrix, "mean_loss": entropy, "total": total}


def measured(stream: Any) -> list[Any]:
    return [dict(state.metrics["train"]) for event, state in stream if event is Event.BATCH_END]


@examples(4, 100)
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

    state = run(train_metrics=[loss("mean_loss")], loss=parts, max_duration="1ba", watch={Event.BATCH_END})
    torch.testing.assert_close(state.metrics["train"]["mean_loss"], state.loss["total"])


def test_training_is_bitwise_the_same_and_no_forward_runs_twice() -> None:
    model, calls = mlp(), list[int]()
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for algorithms in ([], [pl.algorithms.sam(), pl.algorithms.ema(half_life="2ba")]):
        calls.clear()
        plain = run(model, ragged(), algorithms, microbatch_size=2, strict=None)
        once = len(calls)
        found = run(model, ragged(), algorithms, microbatch_size=2, strict=None, train_metrics=METRICS)
        assert len(calls) == 2 * once
        assert_same(dict(found.params), dict(plain.params), "measured or not")
        assert "train" not in plain.metrics


def test_resumed_in_the_middle_of_an_epoch_they_are_bitwise_the_same(tmp_path: Any) -> None:
    options: dict[str, Any] = {"data": ragged(), "train_metrics": METRICS, "microbatch_size": 2}
    whole = measured(fit(**options))
    kept = [state for event, state in fit(**options) if event is Event.BATCH_CHECKPOINT]
    for batch, state in enumerate(kept[:3], start=1):
        pl.save(state, tmp_path / "state")
        rest = measured(fit(pl.load(tmp_path / "state", model=mlp()), **options))
        for resumed, value in zip(rest, whole[batch:], strict=True):
            assert_same(resumed, value, f"from batch {batch}")
    # Another metric, which the State knows nothing of, begins with the rest of the epoch.
    assert list(run(kept[0], **options | {"train_metrics": [accuracy("other")]}).metrics["train"]) == ["other"]


@pytest.mark.slow  # graphs and ranks
def test_compiled_and_on_ranks_metrics_and_steps_of_several_batches_are_the_same() -> None:
    data = ragged()
    data[1] = tuple(tensor[:1] for tensor in data[1])  # rank 1 has no sample of it
    for per_step in (1, 2):
        options: dict[str, Any] = {"data": data, "batches_per_step": per_step, "max_duration": "1ep", "strict": None}

        def found(options: dict[str, Any] = options, **more: Any) -> Any:
            last = run(evaluators=evaluators(), train_metrics=METRICS, **options | more)
            return {"train": dict(last.metrics["train"]), "evaluated": losses(last), "params": dict(last.params)}

        one, other = pool().run(lambda rank, found=found: found(parallel="replicate"))
        assert_same(one, other, "on ranks")
        torch.testing.assert_close(one, found())
        with interpreted():
            compiled = found(compile=True, steps_per_call=2, watch={Event.EPOCH_END, Event.FIT_END})
        torch.testing.assert_close(compiled, found())
