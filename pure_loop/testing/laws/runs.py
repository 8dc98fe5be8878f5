"""Laws about whole runs: events, immutable States, determinism, ``watch``, ``donate``, ``compile``; leaving early."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import attrs

from pure_loop.entry.compiling import interpreted
from pure_loop.event import Event
from pure_loop.order import EvaluatorPlan, expected, expected_evaluate, expected_predict
from pure_loop.testing._surroundings import Surroundings
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.comparison import Keeper, close, copied, differences
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import same_events, same_stream, same_under_other_generators, standalone_streams
from pure_loop.testing.report import LawViolation, broken_off, moment, written_to
from pure_loop.testing.subject import AlgorithmSubject

__all__ = ["closing", "compile_equality", "determinism", "donate_equality", "order", "value", "watch_equality"]


@law(
    "the events of a stream are exactly those of the specification, and each State has its event in state.event",
    rests_on=("structure", "discipline"),
)
def order(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Runs it to its end; an error ends the order too early, and breaks the law as well."""
    events: list[Event] = []
    try:
        for event, state in case.stream(subject.make(), fit=fit):
            events.append(event)
            if state.event is not event:
                raise LawViolation(f"the State yielded at {event.name} has state.event={state.event}.", event=event)
        for stream in standalone_streams(subject, case, state, subject.make()):
            value = [event for event, _ in stream]
            wanted = expected_predict(2) if value[0].is_predict else expected_evaluate({"test": EvaluatorPlan((2, 1))})
            same_events(value, wanted, "the order of events outside of fit")
    except LawViolation:
        raise
    except Exception as error:
        raise broken_off(events, error) from error
    same_events(events, expected(case.plan), "the order of events")


@law("a State that was yielded never changes afterwards", rests_on=("purity", "order"))
def value(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Keeps every State, and then only the tensors of each; compares them at the end with copies taken when they were
    yielded.
    """
    for states in (True, False):
        keeper = Keeper(states=states)
        for _, state in case.stream(subject.make(), fit=fit):
            keeper.keep(state)
        changed = keeper.changed()
        if changed is not None:
            state, difference = changed
            finding = f"the State of {moment(state)}, was written to after it was yielded."
            raise written_to(finding, state.event, difference)


@law(
    "the stream depends on the inputs alone, not on the global random state, which the loop leaves unchanged",
    rests_on=("purity", "order", "value"),
)
def determinism(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Runs it twice, under different global random states, which it compares after every event."""
    same_under_other_generators(lambda: case.stream(subject.make(), fit=fit), "the loop", hastily=True)


@law("watching fewer events gives the same States at the events that are watched", rests_on=("determinism",))
def watch_equality(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Watches a few events, which the case's seed chooses."""
    events = list(Event)
    watched = {events[(case.seed * 7 + step * 5) % len(events)] for step in range(4)} | {Event.BATCH_END}
    wanted = [pair for pair in subject.alone(case, fit) if pair[0] in watched]
    value = case.run(subject.make(), fit=fit, watch=watched)
    same_stream(value, wanted, f"watching only {', '.join(sorted(event.name for event in watched))}")


@law("donating memory changes no State: the stream equals that of a copying loop", rests_on=("determinism", "value"))
def donate_equality(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Keeps only copies, so that the loop can reuse memory; then, with ``donate=True``, keeps every State as well."""
    wanted = subject.alone(case, fit)
    for donate in ("auto", True):
        copies, originals = [], []
        for event, state in case.stream(subject.make(), fit=fit, donate=donate):
            copies.append((event, copied(state)))
            if donate is True:
                originals.append(state)
        same_stream(copies, wanted, f"donate={donate!r}")


@law(
    "leaving the loop at any event leaves no thread, no process, and no change to the module",
    rests_on=("purity", "order", "determinism"),
)
def closing(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Leaves it at an event that the case's seed chooses, by a break or by an error in the body."""
    module = case.model()
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    training = [submodule.training for submodule in module.modules()]
    hooks = [_hooks(submodule) for submodule in module.modules()]
    threads, around = set(threading.enumerate()), Surroundings()
    stream: Any = case.stream(subject.make(), fit=fit, start=module)
    last = len(expected(case.plan)) - 1
    position = (case.seed * 31 + 17) % last if last else 0
    left: Event | None = None
    try:
        for index, (event, _) in enumerate(stream):
            if index >= position:
                left = event
                if case.seed % 2:
                    raise _LeftByError
                break
    except _LeftByError:
        pass
    stream.close()
    name = left.name if left else "the end"

    def refuse(what: str) -> None:
        raise LawViolation(f"after the loop was left at {name}, {what}.", event=left)

    if list(stream):
        refuse("the stream yielded more events")
    running = [thread.name for thread in threading.enumerate() if thread not in threads]
    if running:
        refuse(f"a thread was still running: {', '.join(running)}")
    if multiprocessing.active_children():
        refuse(f"a process was still running: {multiprocessing.active_children()}")
    changed = around.changed()
    if changed is not None:
        refuse(f"{changed} had changed")
    if [submodule.training for submodule in module.modules()] != training:
        refuse("the user's module was in another mode, training or evaluation")
    if [_hooks(submodule) for submodule in module.modules()] != hooks:
        refuse("the user's module had other hooks")
    for key, parameter in module.named_parameters():
        if parameter.grad is not None:
            refuse(f"the user's module had a gradient in {key}.grad")
    for key, tensor in module.state_dict().items():
        if differences(tensor, before[key]):
            refuse(f"the user's module had changed: {key} is {tensor} and was {before[key]}")


class _LeftByError(Exception):
    """Raised in the loop's body."""


def _hooks(module: object) -> int:
    return sum(len(getattr(module, name)) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))


_SOUND = (
    *("purity", "memory", "order", "value", "determinism", "visibility", "microbatch_invariance"),
    *("evaluation_invariance", "observer_invariance", "composition", "resumption", "watch_equality", "closing"),
)

# A graph may add in another order, a relative error of 1e-16 in float64, which a few steps amplify.
_ROUNDING = 1e-9
_WATCHED = (
    {Event.EPOCH_END, Event.FIT_END},
    {Event.BATCH_END, Event.EVAL_END},
    {Event.BATCH_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END},
    {Event.BEFORE_FORWARD, Event.AFTER_BACKWARD, Event.BATCH_END},
    # With these, autograd crosses from one graph into the next.
    {Event.AFTER_FORWARD, Event.BATCH_END},
    {Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END},
    {Event.BEFORE_LOSS, Event.BEFORE_BACKWARD, Event.BATCH_END},
)
_FIELDS = (
    "params",
    "buffers",
    "opt_state",
    "algorithm_state",
    "metrics",
    "loss",
    "outputs",
    "grads",
    "grad_norm",
    "skipped",
)


@law("compiled steps give the States of eager steps, up to rounding", rests_on=_SOUND, share=0.25)
def compile_equality(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains compiled and eagerly, in float64, watching some events, which the case's seed chooses.

    Graphs run operation by operation, so that no C++ compiler is needed: the law is about the contents of the graphs.
    Code that can't be traced runs eagerly, between graphs.
    """
    # Momentum instead of AdamW, which turns a rounding error in a gradient that should be zero into a full step.
    case = attrs.evolve(case, problem=case.problem.in_float64(), optimizer="sgd", precision="fp32")
    watched = _WATCHED[case.seed % len(_WATCHED)]
    wanted = case.run(subject.make(), fit=fit, watch=watched)
    steps = 3 if case.plan.order == "current" and case.seed % 2 else 1
    with interpreted():
        value = case.run(subject.make(), fit=fit, watch=watched, compile="where possible", steps_per_call=steps)
    what = f"compiled, watching {', '.join(sorted(event.name for event in watched))}"
    same_events([event for event, _ in value], [event for event, _ in wanted], what)
    for (event, compiled), (_, eager) in zip(value, wanted, strict=True):
        for field in _FIELDS:
            name = "_grads" if field == "grads" else field
            difference = close(
                getattr(compiled, name), getattr(eager, name), tolerance=_ROUNDING, name=f"state.{field}"
            )
            if difference is not None:
                raise LawViolation(
                    f"{what}: at {moment(compiled)}, the result differs from that of eager steps.",
                    event=event,
                    difference=difference,
                    labels=("compiled", "eager"),
                    advice="A graph holds the Python values of the moment it was traced. Branch on tensors with "
                    "torch.where, and keep numbers that change in tensors or in the State.",
                )
