"""Losses and batches that can't be used: an error at the first event that shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support.refusals import TYPE, VALUE, at, breaks, fit, net


def bad_loss(make: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    """A loss that is good for one batch and bad from the second on."""
    calls = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        calls.append(1)
        good = functional.cross_entropy(outputs, targets)
        return good if len(calls) == 1 else make(good, outputs, targets)

    return loss


RUNNING_LOSSES = [
    (lambda loss, o, t: functional.cross_entropy(o, t, reduction="none"), ["shape (4,)", "loss.mean()"]),
    (lambda loss, o, t: loss[None], ["shape (1,)", "one number"]),
    (lambda loss, o, t: (o.argmax(1) == t).sum(), ["dtype torch.int64", "can't be differentiated"]),
    (lambda loss, o, t: loss.item(), ["of type float", "return a tensor of shape ()", "without .item() or float()"]),
    (lambda loss, o, t: None, ["None of type NoneType", "is a `return` missing?"]),
    (lambda loss, o, t: (loss, o), ["of type tuple", "a dict of such with the key 'total'"]),
    (lambda loss, o, t: {"main": loss}, ["keys ['main']", "needs the key 'total'"]),
    (lambda loss, o, t: {"total": loss[None]}, ["shape (1,)"]),
    (lambda loss, o, t: {"total": loss, "part": o}, ["the part 'part', which is of shape (4, 3)", "scalar tensors"]),
    (lambda loss, o, t: {"total": loss, "part": "x"}, ["the part 'part', which is a str"]),
]


@pytest.mark.parametrize(("make", "says"), RUNNING_LOSSES)
def test_a_loss_is_one_number(make: Any, says: list[str]) -> None:
    first = "the loss at AFTER_LOSS of batch 1, which loss(outputs, targets) returned,"
    events = breaks(fit(loss=bad_loss(make)), pl.LossError, ValueError, first, *says)
    assert events[-1] is Event.BEFORE_LOSS


class NoLoss(nn.Linear):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return None


def nothing(outputs: Any, batch: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("changes", "who"),
    [
        ({"loss": pl.Task(loss=nothing)}, "nothing(outputs, batch)"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, "CrossEntropyLoss(outputs, targets)"),
        ({"loss": None, "model": NoLoss(4, 3)}, "the model's loss(outputs, batch)"),
    ],
)
def test_a_loss_that_is_none_says_whose_it_is(changes: dict[str, Any], who: str) -> None:
    breaks(fit(**changes), pl.LossError, ValueError, f"the loss at AFTER_LOSS of batch 0, which {who} returned,")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda o, t: None, "is None of type NoneType"),
        (lambda o, t: 0.5, "is 0.5 of type float"),
        (lambda o, t: o.sum(1), "has shape (4,)"),
        (lambda o, t: {"main": o.sum()}, "needs the key 'total'"),
    ],
)
def test_a_loss_in_evaluation_is_one_number(make: Any, says: str) -> None:
    stream = pl.evaluate(net(), {"val": [(X, Y)]}, loss=make)
    who = "the loss in evaluation, which <lambda>(outputs, targets) returned,"
    breaks(stream, pl.LossError, ValueError, who, says, "raised in evaluator 'val', batch 0")


@pytest.mark.parametrize("make", [lambda loss, o, t: loss.detach(), lambda loss, o, t: torch.tensor(1.0)])
def test_a_loss_without_a_graph_is_an_error(make: Any) -> None:
    says = ("the loss of batch 1 does not depend on any parameter", "detached", ".item()")
    breaks(fit(loss=bad_loss(make)), pl.LossError, ValueError, *says)


_ELSEWHERE = net()


class CallsAnother(nn.Linear):
    """A module whose forward calls a model of a global name, whose parameters are not its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _ELSEWHERE(x)
        return out


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"loss": lambda outputs, targets: torch.tensor(1.0, requires_grad=True)}, pl.LossError),
        ({"model": CallsAnother(4, 3)}, pl.ModelError),
    ],
)
def test_a_loss_that_reaches_no_parameter_is_an_error(changes: dict[str, Any], error: type[Exception]) -> None:
    """It has a graph, but of other tensors: training would continue and change nothing."""
    breaks(fit(**changes), error, ValueError, "parameter")


@pytest.mark.parametrize("event", [Event.AFTER_LOSS, Event.BEFORE_BACKWARD])
@pytest.mark.parametrize(
    "make",
    [
        *(lambda loss: loss.expand(2), lambda loss: 3.0, lambda loss: None, lambda loss: {"main": loss}),
        *(lambda loss: loss.detach(), lambda loss: loss.long(), lambda loss: {"total": loss.item()}),
    ],
)
def test_a_loss_that_an_algorithm_spoils_is_an_error(event: Event, make: Any) -> None:
    spoil = at(event, lambda state: state.replace(loss=make(state.loss)))
    who = f"the loss that algorithm 'mine' returned at {event.name}, batch 0, "
    events = breaks(fit(algorithms=[spoil]), pl.LossError, ValueError, who)
    assert event not in events


@pytest.mark.parametrize("event", [Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH])
def test_a_loss_that_an_algorithm_spoils_after_the_backward_is_an_error(event: Event) -> None:
    spoil = at(event, lambda state: state.replace(loss=1.0))
    who = f"the loss that algorithm 'mine' returned at {event.name}, batch 0, is 1.0 of type float"
    breaks(fit(algorithms=[spoil]), pl.LossError, ValueError, who)
    kept = at(event, lambda state: state.replace(loss=state.loss.detach() + 1))
    pl.run(fit(algorithms=[kept]))


@pytest.mark.parametrize("make", [lambda grads: None])
def test_gradients_that_an_algorithm_takes_away_are_an_error(make: Any) -> None:
    spoil = at(Event.AFTER_TRAIN_BATCH, lambda state: state.replace(grads=make(state.grads)))
    breaks(fit(algorithms=[spoil]), pl.AlgorithmStructureError, ValueError, "grads", "'mine'", "AFTER_TRAIN_BATCH")


X = torch.randn(4, 4)
Y = torch.zeros(4, dtype=torch.int64)

BATCHES = [
    (X, ["a batch is a Tensor of 4, tensor (4, 4) float32", "(inputs, targets)", "pl.Task(forward=", "model(batch)"]),
    (
        (X, Y, Y),
        ["a batch is a tuple of 3", "tensor (4,) int64, tensor (4,) int64)", "pl.Task(forward=", "model(batch[0])"],
    ),
    ({"ids": X}, ["a batch is a dict of 1, {'ids': tensor (4, 4) float32}", "pl.Task(forward=", "model(batch['ids'])"]),
    ("text", ["can't count the samples", "type str", "raised by batch 0 of train_dataloader"]),
    (
        (X[0, 0], 3),
        ["can't count the samples", "type tuple", "but (tensor () float32, int)", "batch 0 of train_dataloader"],
    ),
    ((X[:0], Y[:0]), ["batch 0"]),
    ((X, Y[:3]), ["batch[0]: 4", "batch[1]: 3, in (tensor (4, 4) float32, tensor (3,) int64)", "first dimension"]),
]


@pytest.mark.parametrize(("batch", "says"), BATCHES)
def test_batches_that_can_not_be_used(batch: Any, says: list[str]) -> None:
    breaks(fit(data=[batch]), pl.DataError, ValueError, *says)


@pytest.mark.parametrize("alone", [False, True], ids=["fit", "evaluate"])
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ((X, Y[:3]), ["batch[1]: 3, in (tensor (4, 4) float32, tensor (3,) int64)"]),
        ({"x": X}, ["a batch is a dict of 1", "raised in the forward of microbatch 0, which is {'x': tensor (4, 4)"]),
    ],
)
def test_a_batch_of_an_evaluator_that_can_not_be_used_names_it(alone: bool, bad: Any, says: list[str]) -> None:
    evaluators = {"good": [(X, Y)], "held out": [(X, Y), bad]}
    stream = (
        pl.evaluate(net(), evaluators, loss=functional.cross_entropy)
        if alone
        else fit(evaluators=evaluators, max_duration="1ep")
    )
    breaks(stream, pl.DataError, ValueError, "raised in evaluator 'held out', batch 1", *says)


def test_what_data_of_an_evaluator_raises_names_it() -> None:
    def broken() -> Any:
        yield X, Y
        raise KeyError("gone")

    with pytest.raises(KeyError) as caught:
        pl.run(fit(evaluators={"val": broken()}))
    assert caught.value.__notes__ == ["raised in evaluator 'val', batch 1"]
    with pytest.raises(RuntimeError) as stopped:
        pl.run(pl.predict(net(), [(X, Y), (X[:, :3], Y)]))
    which = "which is (tensor (4, 3) float32, tensor (4,) int64)"
    assert stopped.value.__notes__ == [
        f"raised in the forward of microbatch 0, {which}",
        "raised in prediction, batch 1",
    ]


def test_a_batch_that_can_not_be_split_says_why() -> None:
    task = pl.Task(forward=lambda model, batch: model(batch[0]), loss=lambda outputs, batch: outputs.mean())
    stream = fit(data=[(X, Y, object())], loss=task, microbatch_size=2)
    breaks(stream, pl.DataError, ValueError, "can't split batch[2]", "microbatches of 2", "microbatch_size=None")


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_are_positive_numbers(weight: float) -> None:
    stream = fit(task=pl.Task(weight=lambda batch: weight), microbatch_size=2)
    breaks(stream, pl.DataError, ValueError, "batch 0", "finite, not negative", "task=pl.Task(weight=...)")


def test_a_duration_in_tokens_needs_tokens() -> None:
    breaks(fit(max_duration="9tok"), pl.DataError, ValueError, "batch 0", "no tokens", "pl.Task(tokens=")


CLIPPING = [
    (lambda grads, params: None, TYPE, ["clip_grad=<lambda> returned NoneType", "by name"]),
    (lambda grads, params: list(grads.values()), TYPE, ["returned list"]),
    (lambda grads, params: {}, VALUE, ["other names", "missing ['0.bias'"]),
    (lambda grads, params: {**grads, "x": X}, VALUE, ["unknown ['x']"]),
    (lambda grads, params: {**grads, "0.bias": 0.5}, TYPE, ["clip_grad=<lambda>", "float for '0.bias'"]),
    (
        lambda grads, params: {**grads, "0.bias": grads["0.bias"].double()},
        VALUE,
        ["clip_grad=<lambda>", "dtype torch.float64", "'0.bias'"],
    ),
    (
        lambda grads, params: {**grads, "0.bias": grads["0.bias"] * 1j},
        VALUE,
        ["clip_grad=<lambda>", "dtype torch.complex64", "'0.bias'"],
    ),
    (
        lambda grads, params: {**grads, "0.bias": grads["0.bias"][None]},
        VALUE,
        ["clip_grad=<lambda>", "shape (1, ", "'0.bias'"],
    ),
    (
        lambda grads, params: {**grads, "0.bias": grads["0.bias"].to("meta")},
        VALUE,
        ["clip_grad=<lambda>", "device meta", "'0.bias'"],
    ),
]


@pytest.mark.parametrize(("clip", "kind", "says"), CLIPPING)
def test_clipping_functions_return_gradients(clip: Any, kind: tuple[Any, Any], says: list[str]) -> None:
    breaks(fit(clip_grad=clip), *kind, *says)


@pytest.mark.parametrize(
    ("give", "what"), [(lambda o, b: o.float().mean(), "a tensor of shape ()"), (lambda o, b: 0.5, "a float")]
)
def test_a_metric_of_one_number_a_batch_is_refused(give: Any, what: str) -> None:
    """It would count a smaller last batch as much as the others."""
    data = [(torch.ones(n, 2), torch.zeros(n, dtype=torch.int64)) for n in (4, 1)]
    evaluator = pl.Evaluator(data, metrics=[pl.metrics.mean(give, "acc")])
    with pytest.raises(TypeError, match=r"metric 'acc': its function gave .*one number a sample") as caught:
        pl.run(pl.evaluate(nn.Linear(2, 2), {"val": evaluator}, loss=functional.cross_entropy))
    assert what in str(caught.value)


@pytest.mark.parametrize("stage", ["forward", "loss"])
def test_an_error_in_a_forward_or_a_loss_says_of_which_batch(stage: str) -> None:
    batches = [(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))] * 2
    batches.append((torch.ones(4, 3), batches[0][1]) if stage == "forward" else (batches[0][0], torch.zeros(4, 7)))
    options: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
    with pytest.raises(RuntimeError) as caught:
        pl.run(pl.fit(nn.Linear(2, 2), batches, max_duration="1ep", microbatch_size=2, **options))
    shapes = "(2, 3) float32, tensor (2,) int64" if stage == "forward" else "(2, 2) float32, tensor (2, 7) float32"
    assert caught.value.__notes__ == [f"raised in the {stage} of batch 2, microbatch 0, which is (tensor {shapes})"]
