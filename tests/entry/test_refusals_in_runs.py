"""Mistakes that only show when they run are told at the first event that shows them, with the author and the event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event, errors
from pure_loop.errors import LossError, ModelError
from tests.support import problem
from tests.support.refused import Refusal, check

DATA, WEIGHT, MOMENTUM = problem.points(), "0.weight", pl.optim.sgd(lr=0.1, momentum=0.9)
X, Y = DATA[0]
EACH, OTHER_SIZE = functional.cross_entropy, (X, Y[:3])


def fit(model: Any = None, data: Any = DATA, **changes: Any) -> Any:
    return problem.fit(model, data, **{"max_duration": "2ba", "strict": None, **changes})


def evaluate(evaluators: Any, **changes: Any) -> Any:
    return pl.evaluate(problem.mlp(), evaluators, **{"loss": EACH, **changes})


# What an algorithm returns.


def puts(make: Callable[[torch.Tensor], Any], name: str = WEIGHT) -> Callable[[pl.State], pl.State]:
    return lambda state: state.replace(params={**state.params, name: make(state.params[WEIGHT])})


def sets(**fields: Any) -> Callable[[pl.State], pl.State]:
    """To a value, or to a function of the field."""
    return lambda state: state.replace(
        **{name: value(getattr(state, name)) if callable(value) else value for name, value in fields.items()}
    )


def again(state: pl.State, stages: Any) -> pl.State:
    return stages.gradients(state)


def reshaped(memory: Any) -> Any:
    return {"momentum_buffer": pl.FrozenDict((name, each[None]) for name, each in memory["momentum_buffer"].items())}


class Wider(pl.State): ...


LINEAR = pl.State.create(nn.Linear(4, 3))
INIT, START, FORWARD, LOSS = Event.INIT, Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_LOSS
BACKWARD, GRADS, TRAINED, END = Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END
STRUCTURE, RETURN, EARLY = errors.AlgorithmStructureError, errors.AlgorithmReturnError, errors.GradientsNotReadyError
MINE: list[tuple[Event, Any, type[Exception], str]] = [
    (INIT, lambda state: None, RETURN, "returned None. An algorithm returns the next State: end it with `return state"),
    (Event.EVAL_START, lambda state: state.module(), RETURN, "returned Sequential, not a State"),
    (Event.FIT_END, lambda state: Wider.create(nn.Linear(4, 3)), RETURN, "a Wider where it was given a State"),
    (END, puts(lambda w: w[:2]), STRUCTURE, "params['0.weight'] from (8, 4) torch.float32 on cpu to (2, 4)"),
    (END, puts(lambda w: w.double()), STRUCTURE, "to (8, 4) torch.float64"),
    (END, puts(lambda w: w.to("meta")), STRUCTURE, "on meta"),
    (END, puts(lambda w: 3.0), STRUCTURE, "put float into params['0.weight'], not a tensor"),
    (END, puts(lambda w: w, "more"), STRUCTURE, "unknown ['more']. Keep the names: state.replace(params={**state.par"),
    (END, sets(buffers={"x": X}), STRUCTURE, "names in buffers: missing [], unknown ['x']"),
    (GRADS, sets(grads=lambda g: {n: t[:1] for n, t in g.items()}), STRUCTURE, "grads['0.weight'] from (8, 4)"),
    (TRAINED, sets(grads=None), STRUCTURE, "grads to None, and may not: the step needs them; to skip it, multiply the"),
    (END, sets(opt_state=lambda memory: {**memory, "more": X}), STRUCTURE, "the structure of opt_state"),
    (END, sets(opt_state=reshaped), STRUCTURE, "the shape or dtype of opt_state['momentum_buffer']['0."),
    (END, sets(timestamp=pl.Timestamp(batch=9)), STRUCTURE, "changed timestamp, and may not: only the loop counts"),
    (END, sets(seed=9), STRUCTURE, "changed seed, and may not: derive seeds of your own: pl.random.derive"),
    (END, sets(position=INIT), STRUCTURE, "changed previous_timestamp or position, and may not: only the loop"),
    (END, sets(event=INIT), STRUCTURE, "returned a State of INIT: it returned a State that it had kept"),
    (
        INIT,
        lambda s: s.replace(model=problem.mlp()),
        errors.ArgumentTypeError,
        "given Sequential: for a module write state.w",
    ),
    (END, lambda s: s.with_module(nn.Linear(4, 3)), STRUCTURE, "model surgery is done at INIT, with state.with_module"),
    (START, sets(batch=None), STRUCTURE, "changed batch to None, and may not: the step needs it"),
    (FORWARD, sets(microbatch=None), STRUCTURE, "changed microbatch to None"),
    (START, sets(loss_scale=2.0), STRUCTURE, "changed loss_scale to a float, and may not: precision='amp_fp16'"),
    (END, sets(skipped=1), STRUCTURE, "changed skipped to a int, and may not: it is a tensor"),
    (END, sets(nonfinite=None), STRUCTURE, "changed nonfinite to a NoneType"),
    (START, sets(stop=True), STRUCTURE, "changed stop, and may not: training stops at a boundary: set it at BATCH_CHE"),
    (Event.EVAL_END, sets(stop=True), STRUCTURE, "at EVAL_END, keep it in algorithm_state"),
    (END, sets(stop=torch.tensor(True)), STRUCTURE, "stop to tensor(True) of type Tensor, and may not: it is True or "),
    (Event.EVAL_END, sets(frozen={WEIGHT}), STRUCTURE, "changed frozen, and may not"),
    (END, sets(frozen={"9"}), STRUCTURE, "names '9', which the model doesn't have"),
    (INIT, lambda s: s.replace(frozen=set(s.params)), STRUCTURE, "nothing would be left to train"),
    (Event.AFTER_FORWARD, puts(lambda w: w * 0.9), STRUCTURE, "from AFTER_BACKWARD on"),
    (BACKWARD, puts(lambda w: w * 0.9), STRUCTURE, "replaced params at BEFORE_BACKWARD, between the forward and the"),
    (LOSS, sets(loss=lambda loss: loss.expand(2)), LossError, "the loss that algorithm 'mine' returned at AFTER_LOSS,"),
    (BACKWARD, sets(loss=lambda loss: loss.detach()), LossError, "has no graph"),
    (TRAINED, sets(loss=1.0), LossError, "is 1.0 of type float"),
    (START, lambda s: setattr(s, "loss", 1), errors.FrozenStateError, "raised by algorithm"),
    (END, lambda s: s.params.pop(WEIGHT), errors.FrozenDictError, "raised by algorithm 'mine' at BATCH_END, batch 1"),
    (END, sets(losss=3), errors.ArgumentError, "no field 'losss'"),
    (GRADS, again, errors.ArgumentError, "stages.gradients was called at AFTER_BACKWARD"),
    (BACKWARD, lambda s: s.grads is None, EARLY, "Bind the algorithm to one of"),
    (Event.EVAL_BATCH_END, lambda s: s.grads is None, EARLY, "Bind the algorithm to one of"),
]


def test_an_algorithm_is_named_with_its_event_which_does_not_come() -> None:
    settings: dict[str, Any] = {"evaluators": problem.points(1), "max_duration": "1ep", "optimizer": MOMENTUM}
    for event, function, error, says in MINE:
        seen: list[str] = []
        algorithm = pl.algorithm(event, name="mine")(function)
        stream = (seen.append(pair[0]) for pair in fit(algorithms=[algorithm], **settings))
        check(Refusal(says, lambda stream=stream: list(stream), error, ("lgorithm 'mine'", f"at {event.name}", says)))
        assert event not in seen, says


# Losses, batches, clipped gradients, and what callbacks return.


class NoLoss(nn.Linear):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return None


ELSEWHERE = nn.Linear(4, 3)


class CallsAnother(nn.Linear):
    """A module whose forward calls a model of a global name, whose parameters are not its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ELSEWHERE(x)


def nothing(outputs: Any, batch: Any) -> Any:
    return None


def of_another() -> Any:
    model = nn.Linear(4, 3)
    return fit(model, loss=lambda outputs, y: EACH(outputs, y) + model.weight.square().sum())


def row(error: type[Exception], call: Callable[[], Any], *says: str) -> Refusal:
    return Refusal(says[0], call, error, says, at_once=False)


def lost(make: Callable[[Any, Any, Any], Any], *says: str) -> Refusal:
    """A loss that is good for one batch and bad from the second on."""

    def call() -> Any:
        calls = []

        def loss(outputs: Any, targets: Any) -> Any:
            calls.append(1)
            good = EACH(outputs, targets)
            return good if len(calls) == 1 else make(good, outputs, targets)

        return fit(loss=loss)

    return row(LossError, call, "of batch 1", *says)


def on(batch: Any, *says: str) -> Refusal:
    return row(errors.DataError, lambda: fit(data=[batch]), *says)


def clips(error: type[Exception], clip: Any, says: str) -> Refusal:
    return row(error, lambda: fit(clip_grad=clip), "clip_grad=<lambda>", says)


def measuring(give: Callable[[Any], Any]) -> Callable[[], Any]:
    evaluator = pl.Evaluator(problem.points(2), metrics=[pl.metrics.mean(lambda o, b: give(o), "acc")])
    return lambda: evaluate({"val": evaluator})


def without_length() -> Any:
    return type("Empty", (), {"__iter__": lambda self: iter([])})()


def calling(**methods: Any) -> Callable[[], Any]:
    return lambda: fit(callbacks=[type("Mine", (pl.Callback,), methods)()])


DATA_ERROR, TYPE, VALUE, BACK = (
    errors.DataError,
    errors.ArgumentTypeError,
    errors.ArgumentError,
    errors.CallbackReturnError,
)
FIRST = "the loss at AFTER_LOSS of batch 0, which"
HELD_OUT = {"good": [(X, Y)], "held out": [(X, Y), OTHER_SIZE]}
NO_SPLIT = {"data": [(X, Y, object())], "loss": pl.Task(forward=lambda model, batch: model(batch[0]), loss=nothing)}
LOSSES = [
    lost(lambda loss, o, t: EACH(o, t, reduction="none"), "(4,)", "loss.mean()"),
    lost(lambda loss, o, t: (o.argmax(1) == t).sum(), "torch.int64", "can't be differentiated"),
    lost(lambda loss, o, t: loss.item(), "of type float", "without .item() or float()"),
    lost(lambda loss, o, t: None, "None of type NoneType", "is a `return` missing?"),
    lost(lambda loss, o, t: {"main": loss}, "keys ['main']", "needs the key 'total'"),
    lost(lambda loss, o, t: {"total": loss, "part": "x"}, "the part 'part', which is a str"),
    lost(lambda loss, o, t: loss.detach(), "does not depend on any parameter", "detached", ".item()"),
    row(LossError, lambda: fit(loss=pl.Task(loss=nothing)), f"{FIRST} nothing(outputs, batch) returned,"),
    row(LossError, lambda: fit(loss=nn.CrossEntropyLoss(reduction="none")), f"{FIRST} CrossEntropyLoss(outpu"),
    row(LossError, lambda: fit(NoLoss(4, 3), loss=None), f"{FIRST} the model's loss(outputs, batch) returned,"),
    row(LossError, lambda: fit(loss=lambda o, t: torch.ones((), requires_grad=True)), "parameter"),
    row(ModelError, lambda: fit(CallsAnother(4, 3)), "parameter"),
    row(ModelError, of_another, "shape (3, 4)", "state.params"),
    row(LossError, lambda: evaluate([(X, Y)], loss=nothing), "in evaluation, which nothing(", "in evaluator 'eval', b"),
    row(LossError, lambda: evaluate([(X, Y)], loss=lambda o, t: o.sum(1)), "has shape (4,)"),
]
BATCHES = [
    on(X, "tensor (4, 4) float32, and by default", "(inputs, targets)", "model(batch)"),
    on({"ids": X}, "a dict of 1, {'ids': tensor (4, 4) float32}", "pl.Task(forward=", "model(batch['ids'])"),
    on("text", "can't count the samples", "type str", "raised by batch 0 of train_dataloader"),
    on((X[:0], Y[:0]), "batch 0"),
    on(OTHER_SIZE, "batch[1]: 3, in (tensor (4, 4) float32, tensor (3,)", "first dimension"),
    row(DATA_ERROR, lambda: fit(evaluators=HELD_OUT), "batch[1]: 3", "raised in evaluator 'held out', batch"),
    row(DATA_ERROR, lambda: fit(data=without_length()), "train dataloader gave no batch in epoch 0"),
    row(DATA_ERROR, lambda: fit(**NO_SPLIT, microbatch_size=2), "split batch[2]", "microbatches of 2", "batch_size=No"),
    row(
        DATA_ERROR,
        lambda: fit(loss=pl.Task(loss=EACH, weight=lambda batch: -1.0)),
        "batch 0",
        "finite, not negative",
        "Task(",
    ),
    row(
        DATA_ERROR,
        lambda: fit(loss=pl.Task(loss=EACH, weight=lambda batch: 0.0)),
        "batch 0",
        "finite, not negative",
        "loss=pl.Task(loss=..., weight=",
    ),
    row(DATA_ERROR, lambda: fit(max_duration="9tok"), "batch 0", "no tokens", "loss=pl.Task(loss=..., tokens="),
    row(TYPE, measuring(lambda o: 0.5), "a float", "one number a sample"),
    row(DATA_ERROR, lambda: fit(train_metrics=pl.metrics.confusion_matrix(7)), "confusion_matrix", "train_metri"),
]
OTHERS = [
    clips(TYPE, lambda g, p: None, "returned NoneType"),
    clips(VALUE, lambda g, p: {}, "missing ['0.bias'"),
    clips(TYPE, lambda g, p: {**g, "0.bias": 0.5}, "float for '0.bias'"),
    clips(VALUE, lambda g, p: {n: t.double() for n, t in g.items()}, "dtype torch.float64"),
    clips(VALUE, lambda g, p: {n: t[None] for n, t in g.items()}, "shape (1, "),
    row(BACK, calling(batch_end=lambda *_: 3), "Mine returned int at BATCH_END", "@pl.algorit"),
    row(BACK, calling(run_event=lambda *_: 3), "callback Mine returned int at INIT"),
    row(BACK, lambda: fit(callbacks=[lambda event, state: 3]), "callback <lambda> returned int at INIT"),
]


@pytest.mark.parametrize("table", [LOSSES, BATCHES, OTHERS], ids=["losses", "batches", "others"])
def test_what_only_shows_when_it_runs(table: list[Refusal]) -> None:
    for refusal in table:
        check(refusal)
