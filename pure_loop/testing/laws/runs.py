"""Laws about whole runs: order of events, immutable States, determinism, ``watch``, ``donate``, and leaving early."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

from pure_loop.event import Event
from pure_loop.order import EvaluatorPlan, expected, expected_evaluate, expected_predict
from pure_loop.testing._surroundings import Surroundings, reseeded
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.comparison import Keeper, copied, differences
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import same_events, same_stream, standalone_streams
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.violation import LawViolation, broken_off, moment, written_to

__all__ = ["closing", "determinism", "donate_equality", "order", "value", "watch_equality"]


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
    streams = []
    for seed in (11, 12):
        with reseeded(seed):
            around = Surroundings()
            pairs = []
            for pair in case.stream(subject.make(), fit=fit):
                pairs.append(pair)
                changed = around.changed(hastily=True)
                if changed is not None:
                    raise LawViolation(f"the loop changed {changed} before {pair[0].name}.", event=pair[0])
            streams.append(pairs)
    same_stream(streams[1], streams[0], "the same run under another global random state")


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


def _hooks(module: Any) -> int:
    return sum(len(getattr(module, name)) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))
