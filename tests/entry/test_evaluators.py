"""Evaluators: a loss of their own, metrics that do not fit, and labels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.metrics import accuracy, confusion_matrix, f1, loss, mean
from tests.support.runs import cross_entropy, equal, mlp, points, stream, train
from tests.support.worlds import pool


def smoothed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, label_smoothing=0.3)


def evaluators(**options: Any) -> dict[str, Any]:
    data = points(3, seed=1)
    own = pl.Task(loss=lambda outputs, batch: outputs.square().mean())
    return {
        "val": pl.Evaluator(data, metrics=[loss(), accuracy()], **options),
        "smoothed": pl.Evaluator(data, metrics=[loss(), accuracy()], loss=smoothed, **options),
        "task": pl.Evaluator(data, metrics=[loss()], loss=own, **options),
        "default": pl.Evaluator(data, loss=smoothed, **options),
    }


def expected(state: pl.State) -> dict[str, torch.Tensor]:
    inputs, targets = map(torch.cat, zip(*points(3, seed=1), strict=True))
    outputs = state.module(training=False)(inputs).detach()
    return {
        "val": cross_entropy(outputs, targets),
        "smoothed": smoothed(outputs, targets),
        "task": outputs.square().mean(),
        "default": smoothed(outputs, targets),
    }


@pytest.mark.parametrize("size", [None, 1])
def test_an_evaluator_measures_its_own_loss(size: int | None) -> None:
    state = train(mlp(), points(), evaluators=evaluators(microbatch_size=size))
    found = {label: state.metrics[label]["loss"] for label in evaluators()}
    torch.testing.assert_close(found, expected(state))
    assert set(state.metrics["default"]) == {"loss", "accuracy"}
    equal(state.params, train(mlp(), points()).params)
    alone = pl.run(pl.evaluate(state, {"smoothed": evaluators()["smoothed"]}))  # no loss of the call is needed
    torch.testing.assert_close(alone.metrics["smoothed"]["loss"], expected(state)["smoothed"])


def test_those_that_are_due_at_the_end_of_an_epoch_and_of_the_run_go_in_the_order_given() -> None:
    due = {label: pl.Evaluator(points(1), interval=interval) for label, interval in (("rare", "5ep"), ("each", "1ep"))}
    settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.sgd(0.1), "max_duration": "2ep"}
    pairs = pl.fit(mlp(), points(), evaluators=due, order="2021", **settings)
    labels = [next(reversed(state.metrics)) for event, state in pairs if event is pl.Event.EVAL_END]
    assert labels == ["each", "rare", "each"]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_compiled_and_on_ranks_it_is_the_same() -> None:
    def program(rank: int) -> Any:
        state = train(mlp(), points(), evaluators=evaluators(), parallel="replicate")
        return {label: state.metrics[label]["loss"] for label in evaluators()}

    state = train(mlp(), points(), evaluators=evaluators(), compile=True, strict=False)
    torch.testing.assert_close({label: state.metrics[label]["loss"] for label in evaluators()}, expected(state))
    for found in pool().run(program):
        torch.testing.assert_close(found, expected(state))


def test_a_loss_that_can_not_be_called_is_refused_where_it_is_passed() -> None:
    for value, text in (
        (nn.CrossEntropyLoss, "Evaluator: loss is the class CrossEntropyLoss"),
        (3, "Evaluator: loss is 3 of type int"),
        (lambda outputs: outputs, "can't be called with two arguments"),
    ):
        with pytest.raises(pl.ArgumentTypeError, match=text):
            pl.Evaluator(points(), loss=value)  # type: ignore[arg-type]
    assert repr(pl.Evaluator(points(), loss=smoothed)) == "Evaluator(list of 3, loss=smoothed)"


def loaders(data: Any) -> Iterator[Any]:
    yield data
    yield DataLoader(TensorDataset(*map(torch.cat, zip(*data, strict=True))), batch_size=5, shuffle=True)


def test_a_metric_that_does_not_fit_is_refused_by_name_before_training() -> None:
    for metric, error, text in (
        (
            confusion_matrix(7),
            pl.DataError,
            r"the metric 'confusion_matrix' \(confusion_matrix\(classes=7\)\) does not",
        ),
        (f1(average="macro", name="F"), pl.DataError, r"the metric 'F' \(f1\(average='macro', name='F'\)\) does not"),
        (mean(lambda outputs, batch: outputs["logits"], "logits"), pl.DataError, "the metric 'logits'"),
        (mean(lambda outputs, batch: outputs.mean(), "total"), pl.ArgumentTypeError, "the metric 'total'.*one number"),
    ):
        outputs_of = (lambda model, batch: model(batch[0])[:, :, None, None]) if metric.name == "F" else None
        task = pl.Task(validate=outputs_of)
        for data in loaders(points(2, seed=1)):
            evaluator = pl.Evaluator(data, metrics=[accuracy("fits"), metric] if outputs_of is None else [metric])
            started = stream(mlp(), points(), evaluators={"val": evaluator}, task=task)
            assert [event for event, _ in islice(started, 4)][-1] is Event.FIT_START
            with pytest.raises(error, match=f"evaluator 'val': {text}") as caught:
                next(started)
            assert any("before training" in note for note in caught.value.__notes__)


def test_looking_at_the_first_microbatch_changes_nothing() -> None:
    """Algorithms have their turn, so that a metric is given what it will be given; the data begins again."""

    @pl.algorithm(Event.EVAL_AFTER_FORWARD)
    def unpacked(state: pl.State) -> pl.State:
        return state.replace(outputs=state.outputs["scores"])

    task = pl.Task(validate=lambda model, batch: {"scores": model(batch[0])})
    options: dict[str, Any] = {"task": task, "algorithms": [unpacked]}
    data = next(reversed(list(loaders(points(2, seed=1)))))
    looked, unseen = (
        train(
            mlp(),
            points(),
            evaluators={"val": pl.Evaluator(source, metrics=[accuracy(), f1()])},
            max_duration="1ep",
            **options,
        )
        for source in (data, iter([*data]))
    )
    equal(looked.params, unseen.params)
    assert set(looked.metrics["val"]) == {"accuracy", "f1"}


def test_a_label_is_given_once_and_in_a_mapping() -> None:
    twice = [("val", pl.Evaluator(points())), ("val", points())]
    with pytest.raises(pl.ArgumentError, match="evaluators has the label 'val' twice"):
        train(mlp(), points(), evaluators=twice)
    with pytest.raises(pl.ArgumentTypeError, match=r"write a mapping of labels to evaluators: .*\{'val': \.\.\.\}"):
        train(mlp(), points(), evaluators=twice[:1])


def test_a_misspelt_argument_of_an_evaluator_is_refused_with_what_there_is() -> None:
    with pytest.raises(pl.ArgumentTypeError, match=r"Evaluator has no argument 'metric'; did you mean metrics=\?"):
        pl.Evaluator(points(), metric=[accuracy()])  # type: ignore[call-arg]
