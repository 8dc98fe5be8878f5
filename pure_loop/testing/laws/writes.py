"""Laws about writes: an algorithm changes only fields that may change at an event, and every change takes effect."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from pure_loop._internal.autograd import scalar_like
from pure_loop._internal.pytree import PyTree
from pure_loop._internal.weights import Weights
from pure_loop.algorithm import Algorithm
from pure_loop.data.batch import map_tensors
from pure_loop.event import Event
from pure_loop.precision import Precision
from pure_loop.stages import Stages
from pure_loop.stages.nonfinite import total_loss
from pure_loop.state import NOT_READY, State
from pure_loop.task import make_task
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.comparison import differences
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import ending_early, run_until_error
from pure_loop.testing.laws.calls import Call, tapped
from pure_loop.testing.report import LawViolation, moment
from pure_loop.testing.subject import AlgorithmSubject

__all__ = ["MAY_CHANGE", "WHY_NOWHERE_ELSE", "discipline", "visibility"]

_MICROBATCH = (
    *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS),
    *(Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
)
_GRAPH = frozenset({Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD})
_WHOLE_BATCH = (Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH)
_BRANCH = frozenset(event for event in Event if event.value.startswith("eval_") and "all" not in event.value)
_OUTSIDE_FIT = frozenset({Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END})
_LAST_OF_BRANCH = frozenset({Event.EVAL_END})

# From BATCH_START on the settings of a batch are fixed.
_BETWEEN_BATCHES = frozenset(
    event
    for event in Event
    if not event.is_eval
    and event not in _MICROBATCH
    and event not in {Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH, Event.BATCH_END}
)

MAY_CHANGE: dict[str, frozenset[Event]] = {
    "model": frozenset({Event.INIT}),
    "params": frozenset(Event) - _GRAPH - _LAST_OF_BRANCH,
    "buffers": frozenset(Event) - _LAST_OF_BRANCH,
    "opt_state": frozenset(Event) - (_BRANCH - _OUTSIDE_FIT),
    "batch": frozenset({*_WHOLE_BATCH, Event.EVAL_BATCH_START, Event.PREDICT_BATCH_START}),
    "microbatch": frozenset(
        {
            # At AFTER_LOSS an algorithm may restore the microbatch that it replaced for the loss.
            *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS),
            *(Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD, Event.PREDICT_BEFORE_FORWARD),
        }
    ),
    "outputs": frozenset(
        {
            *(Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.EVAL_AFTER_FORWARD),
            *(Event.PREDICT_AFTER_FORWARD, Event.PREDICT_BATCH_END),
        }
    ),
    "loss": frozenset(
        {
            *(Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
            *(Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
        }
    ),
    "grads": frozenset({*_MICROBATCH, Event.AFTER_TRAIN_BATCH}),
    "grad_norm": frozenset({Event.AFTER_TRAIN_BATCH}),
    "metrics": frozenset(Event),
    "algorithm_state": frozenset(Event),
    "lr_scale": _BETWEEN_BATCHES,
    "frozen": _BETWEEN_BATCHES | {Event.BATCH_END},
    "stop": frozenset(
        {
            *(Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT),
            *(Event.ITERATION_END, Event.ITERATION_CHECKPOINT),
        }
    ),
}
"""The events at which an algorithm may change a field: those after which the loop reads it. No other field changes."""

WHY_NOWHERE_ELSE: dict[str, str] = {
    "params": "between forward and backward the loss is a function of the old parameters, and after EVAL_END the "
    "State that evaluation ran on is dropped",
    "buffers": "after EVAL_END the State that evaluation ran on is dropped",
    "opt_state": "evaluation runs on a State of its own, of which only metrics and algorithm_state are kept",
    "batch": "the batch is split into microbatches after BEFORE_TRAIN_BATCH, and not read after that",
    "microbatch": "forward and loss read it, and nothing reads it after them",
    "outputs": "the loss reads them, and nothing reads them after it; before the forward there are none",
    "loss": "before AFTER_LOSS there is none, and a loss that is written there is overwritten",
    "grads": "before the first microbatch there are none, and after AFTER_TRAIN_BATCH the optimizer has used them",
    "grad_norm": "it is the norm of complete gradients, which exist at AFTER_TRAIN_BATCH",
    "lr_scale": "the rate of a batch is recorded at its BATCH_START",
    "frozen": "one batch is of one set of parameters, and an evaluation runs on a State of its own",
    "stop": "training stops at a boundary",
    "model": "the optimizer state is made for it right after INIT",
}
"""Why a change at any other event is a mistake, for the message."""

_WITNESS = "witness of the law"


@law("at each event an algorithm changes only fields that are read afterwards, and its own entry of algorithm_state")
def discipline(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Compares each field before and after a handler; another algorithm with a state of its own runs beside it."""

    def tap(call: Call) -> object:
        result = call()
        if call.kind == "handler" and isinstance(result, State) and result is not call.state:
            _check_fields(call, result)
        return result

    witness = Algorithm(_WITNESS, {Event.BATCH_END: lambda state: state}, init=lambda state: torch.zeros(()))
    run_until_error(subject, case, fit, algorithms=[witness, *tapped(subject, subject.make(), tap)])


def _check_fields(call: Call, result: State) -> None:
    for field in attrs.fields(State):
        before, after = getattr(call.state, field.name), getattr(result, field.name)
        if before is after:
            continue
        name = str(field.alias)
        if name == "algorithm_state":
            _check_algorithm_state(call, result)
            continue
        allowed = MAY_CHANGE.get(name, frozenset())
        if call.event in allowed:
            continue
        if name == "model" or type(before) is not type(after):
            different = True
        else:
            different = bool(differences(before, after))
        if different:
            raise LawViolation(
                f"{call.name} changed state.{name} at {call.where}, where it may not: "
                f"{WHY_NOWHERE_ELSE.get(name, 'only the loop writes it')}.",
                event=call.event,
                advice=f"It may change at {', '.join(e.name for e in Event if e in allowed)}." if allowed else "",
            )


def _check_algorithm_state(call: Call, result: State) -> None:
    before, after = call.state.algorithm_state, result.algorithm_state
    for name in dict.fromkeys([*before, *after]):
        in_both = name in before and name in after
        if (name == call.algorithm and name in after) or (in_both and not differences(before[name], after[name])):
            continue
        verb = "changed" if in_both else "dropped" if name in before else "added"
        raise LawViolation(
            f"{call.name} {verb} state.algorithm_state[{name!r}] at {call.where}; an algorithm may write only its own "
            "entry.",
            event=call.event,
            advice=f"Use state.remember({call.algorithm!r}, value), which keeps the entries of other algorithms. "
            "state.replace(algorithm_state={...}) replaces all of them.",
        )


# Visibility

_STEP = ("batch", "microbatch", "outputs", "loss", "grads", "grad_norm")
_DURABLE = (
    *("params", "buffers", "opt_state", "timestamp", "previous_timestamp", "seed", "loss_scale"),
    *("lr_scale", "stop", "frozen"),
    *("algorithm_state", "metrics", "skipped", "nonfinite"),
)
_COMPUTED: dict[Event, frozenset[str]] = {
    Event.AFTER_DATALOADER: frozenset({"batch"}),
    Event.BEFORE_FORWARD: frozenset({"microbatch", "outputs", "loss"}),
    Event.AFTER_FORWARD: frozenset({"outputs", "buffers"}),
    Event.AFTER_LOSS: frozenset({"loss", "buffers"}),
    Event.AFTER_BACKWARD: frozenset({"grads"}),
    Event.AFTER_TRAIN_BATCH: frozenset({"grads", "loss", "grad_norm"}),
    Event.BATCH_END: frozenset({"params", "opt_state", "timestamp", "previous_timestamp"}),
    Event.EPOCH_END: frozenset({"timestamp"}),
    Event.ITERATION_END: frozenset({"timestamp"}),
    Event.EVAL_BATCH_START: frozenset({"batch", "microbatch", "outputs"}),
    Event.EVAL_BEFORE_FORWARD: frozenset({"microbatch", "outputs"}),
    Event.EVAL_AFTER_FORWARD: frozenset({"outputs", "buffers"}),
    Event.EVAL_END: frozenset({"metrics"}),
}
"""The fields that the loop itself computes before an event; all others are as algorithms left them at the last one."""

_BEFORE_TRAINING = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START})
_IN_BATCH = frozenset(
    {Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, *_MICROBATCH, Event.AFTER_TRAIN_BATCH, Event.BATCH_END}
)
_IN_EVALUATION = frozenset(
    {Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD, Event.EVAL_BATCH_END}
)


@law(
    "a value that is written at an event is the value that all later events and computations read",
    rests_on=("order", "value", "determinism"),
)
def visibility(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Repeats every computation of the loop on the State that the algorithms returned, and compares.

    If the loop alone is on trial, an algorithm that writes at every event is added.
    """
    algorithms = *(subject.make() or (_writer(),)), *case.stopping()
    case = attrs.evolve(case, plan=attrs.evolve(case.plan, stop_at=None))
    watcher = _Watcher(case)

    def observe(state: State) -> State:
        watcher.observe(state)
        return state

    # One of the two comes first at an event, and the other last: on the AFTER half of a pair the order is reversed.
    first, last = (Algorithm(f"{position} of the law", dict.fromkeys(Event, observe)) for position in ("first", "last"))
    with ending_early():
        for event, state in case.stream([first, *algorithms, last], fit=fit):
            if watcher.left is not None and state is not watcher.left and differences(state, watcher.left):
                finding = f"the State that was yielded at {event.name} is not the one that the algorithms returned."
                raise LawViolation(finding, event=event)


# Bound at import: a loop on trial may replace them while it runs. Splitting and weighting of batches are not compared
# here; that is the law of microbatches.
_forward, _loss, _finish = Stages.forward, Stages.loss, Stages.finish_gradients
_update, _validate = Stages.update, Stages.validate


class _Watcher:
    """Observes each State twice, before and after the algorithms of an event, and compares it with a recomputation."""

    def __init__(self, case: Case) -> None:
        arguments = case.arguments()
        self._stages = Stages(
            task=make_task(case.model(), arguments["loss"]),
            optimizer=arguments["optimizer"],
            precision=Precision.parse(case.precision),
            microbatch_size=case.plan.microbatch_size,
            clip_grad=case.clip_grad,
        )
        # In that order the epoch is counted before its evaluation, and EPOCH_END comes after it.
        self._counts_before_evaluation = case.plan.order == "2021"
        self.left: State | None = None
        self._open: Event | None = None
        self._before_evaluation: State | None = None
        self._wanted: dict[str, object] = {}
        self._weights: Weights | None = None
        self._index = self._batch = 0

    def observe(self, state: State) -> None:
        event = state.event
        assert event is not None
        if self._open is None:
            self._open = event
            self._arrives(event, state)
        elif self._open is event:
            self._open = None
            self._leaves(event, state)
        # Else the event is one of stages.gradients, which an algorithm called at the event that is open.

    def _arrives(self, event: Event, state: State) -> None:
        before = self.left
        if event in _BEFORE_TRAINING or before is None:
            return
        assert before.event is not None
        if event is Event.EVAL_START:
            self._before_evaluation = _returned(before, self._before_evaluation)
        last, before = before.event.name, _returned(before, self._before_evaluation)
        if self._counts_before_evaluation and event is Event.EVAL_START and state.timestamp != before.timestamp:
            before = before.replace(timestamp=before.timestamp.next_epoch())
        fields = (*_DURABLE, *(_STEP if event in _IN_BATCH and event is not Event.BATCH_START else ()))
        if event in _IN_EVALUATION:
            fields = (*fields, "batch", "microbatch", "outputs")
        if event in _BEFORE_EVALUATION:
            before = before.replace(metrics=_still_current(before, state))
        for field in fields:
            if field in _COMPUTED.get(event, ()):
                continue
            self._same(f"was left at {last}", field, state, _read(before, field))
        for field, wanted in self._wanted.items():
            self._same("follows from the State before", field, state, wanted)

    def _same(self, what: str, field: str, state: State, wanted: object) -> None:
        for difference in differences(_read(state, field), wanted, name=f"state.{field}"):
            raise LawViolation(
                f"at {moment(state)}, state.{field} is not the value that {what}.",
                event=state.event,
                difference=difference,
            )

    def _leaves(self, event: Event, state: State) -> None:
        self.left = state
        self._wanted = self._follows(event, state)

    def _follows(self, event: Event, state: State) -> dict[str, object]:
        """The fields that the loop computes next, with the values that they should have."""
        stages = self._stages
        if event is Event.BEFORE_TRAIN_BATCH:
            microbatches = stages.microbatches(state.batch)
            self._weights = stages.weights(microbatches, state)[0]
            self._index = 0
            return {"microbatch": microbatches[0]}
        if event is Event.BEFORE_FORWARD:
            after = _forward(stages, state, index=self._index)
            return {"outputs": after.outputs, "buffers": after.buffers}
        if event is Event.BEFORE_LOSS:
            after = _loss(stages, state, index=self._index)
            return {"loss": after.loss, "buffers": after.buffers}
        if event is Event.BEFORE_BACKWARD:
            return {"grads": self._gradients(state)}
        if event is Event.AFTER_BACKWARD:
            assert self._weights is not None
            self._index += 1
            if self._index < len(self._weights.shares):
                return {}
            return {"grads": _finish(stages, state, divisor=self._weights.divisor).grads}
        if event is Event.AFTER_TRAIN_BATCH:
            updated = _update(stages, state)
            return {"params": updated.params, "opt_state": updated.opt_state}
        if event is Event.EVAL_START:
            self._batch = -1
        if event is Event.EVAL_BATCH_START:
            self._batch, self._index = self._batch + 1, -1
        if event is Event.EVAL_BEFORE_FORWARD:
            self._index += 1
            label = f"eval/{state.evaluator}"
            return {"outputs": _validate(stages, state, label=label, batch=self._batch, index=self._index).outputs}
        return {}

    def _gradients(self, state: State) -> dict[str, Tensor | None]:
        assert self._weights is not None
        share = self._weights.shares[self._index]
        loss, names = total_loss(state.loss), state.model.differentiated(state.frozen)
        inputs = [state.params[name] for name in names]
        # retain_graph: the loop runs its own backward after this one. It also repeats the random numbers that the
        # recomputed forward of activation checkpointing draws.
        result = torch.autograd.grad(loss, inputs, scalar_like(loss, share), retain_graph=True, allow_unused=True)
        before = {} if not isinstance(state._grads, Mapping) else state._grads
        totals = {name: _sum(before.get(name), gradient) for name, gradient in zip(names, result, strict=True)}
        return {name: totals.get(name) for name in state.model.trainable}


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _read(state: State, field: str) -> object:
    value: object = getattr(state, "_grads" if field == "grads" else field)
    return None if value is NOT_READY else value


def _returned(left: State, before: State | None) -> State:
    """The State that training continues from: after evaluation, the one before it with the new metrics and states."""
    if left.event is not Event.EVAL_END or before is None:
        return left
    return before.replace(metrics=left.metrics, algorithm_state=left.algorithm_state, event=left.event)


# At which metrics that are about to be measured again have left the State. (The order of 2021 has no EVAL_BEFORE_ALL.)
_BEFORE_EVALUATION = frozenset({Event.BATCH_END, Event.EPOCH_END, Event.EVAL_BEFORE_ALL, Event.EVAL_START})


def _still_current(before: State, state: State) -> dict[str, Mapping[str, object]]:
    """The metrics that were there, without those of evaluators that are due."""
    return {label: values for label, values in before.metrics.items() if label in state.metrics}


def _writer() -> Algorithm:
    """An algorithm that changes, at every event, a field that may change there."""

    def scaled(tree: PyTree, factor: float) -> PyTree:
        return map_tensors(lambda tensor: tensor * factor if tensor.is_floating_point() else tensor, tree)

    def params(state: State) -> State:
        return state.replace(params={name: tensor * 0.99 for name, tensor in state.params.items()})

    def write(state: State) -> State:
        event, name = state.event, "writer of the law"
        assert event is not None
        if name in state.algorithm_state:
            state = state.remember(name, state.algorithm_state[name] + 1)
        if event in (*_WHOLE_BATCH, Event.EVAL_BATCH_START):
            return state.replace(batch=scaled(state.batch, 1.25))
        if event in (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD):
            return params(state.replace(microbatch=scaled(state.microbatch, 0.75)))
        if event in (Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.EVAL_AFTER_FORWARD):
            return state.replace(outputs=scaled(state.outputs, 1.5))
        if event in (Event.AFTER_LOSS, Event.BEFORE_BACKWARD):
            return state.replace(loss=scaled(state.loss, 0.5))
        if event in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH):
            return state.replace(grads=scaled(state.grads, 0.9))
        return state if event is Event.INIT else params(state)

    return Algorithm("writer of the law", dict.fromkeys(Event, write), init=lambda state: 0)
