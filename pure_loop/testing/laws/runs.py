"""Laws about whole runs: events, immutable States, determinism, ``watch``, ``donate``, ``compile``; leaving early.

Of resumption and of checkpoints, too: any State at a boundary is a complete checkpoint, also after a file.
"""

from __future__ import annotations

import copy
import multiprocessing
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from pure_loop.algorithm import flatten
from pure_loop.checkpoint import load, save
from pure_loop.entry.compiling import interpreted
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.order import BOUNDARIES, EvaluatorPlan, expected, expected_evaluate, expected_predict, going_on
from pure_loop.state import State, outside_batch
from pure_loop.testing._surroundings import Surroundings
from pure_loop.testing.case import Case, Fit, Pairs, Running
from pure_loop.testing.comparison import Comparer, Keeper, close, differences
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import (
    ROUNDING,
    in_float64,
    same_events,
    same_state,
    same_stream,
    same_under_other_generators,
    standalone_streams,
    without_error,
)
from pure_loop.testing.report import LawViolation, broken_off, moment, written_to
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.verify.leaves import map_leaves

__all__ = [
    "checkpoint",
    "closing",
    "compile_equality",
    "determinism",
    "donate_equality",
    "order",
    "resumption",
    "resumption_from",
    "to_the_next_batch",
    "value",
    "watch_equality",
]


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
        events: list[Event] = []
        originals: list[State] = []
        # Each State is compared while it is there, and in a plain loop: of those that are not kept, the loop reuses the
        # memory, which a copy of all of them, or an iterator that holds one, would hide.
        for event, state in case.stream(subject.make(), fit=fit, donate=donate):
            events.append(event)
            due, other = wanted[min(len(events), len(wanted)) - 1]
            if event is not due:
                break
            if not Comparer().equal(state, other):
                same_state(state, other, f"donate={donate!r}")
            if donate is True:
                originals.append(state)
        same_events(events, [event for event, _ in wanted], f"donate={donate!r}")


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
    stream = case.stream(subject.make(), fit=fit, start=module)
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
    *("params", "buffers", "opt_state", "algorithm_state", "metrics"),
    *("loss", "outputs", "grads", "grad_norm", "skipped"),
)


@law("compiled steps give the States of eager steps, up to rounding", rests_on=_SOUND, share=0.25, costs=6.0)
def compile_equality(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains compiled and eagerly, in float64, watching some events, which the case's seed chooses.

    Graphs run operation by operation, so that no C++ compiler is needed: the law is about the contents of the graphs.
    Code that can't be traced runs eagerly, between graphs.
    """
    case = in_float64(case)
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
            difference = close(getattr(compiled, name), getattr(eager, name), tolerance=ROUNDING, name=f"state.{field}")
            if difference is not None:
                raise LawViolation(
                    f"{what}: at {moment(compiled)}, the result differs from that of eager steps.",
                    event=event,
                    difference=difference,
                    labels=("compiled", "eager"),
                    advice="A graph holds the Python values of the moment it was traced. Branch on tensors with "
                    "torch.where, and keep numbers that change in tensors or in the State.",
                )


# Resumption and checkpoints


@law(
    "from every boundary, training resumes with a fresh instance exactly as if it had not stopped",
    rests_on=("purity", "memory", "order", "value", "determinism", "visibility"),
)
def resumption(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Resumes from every boundary to the end of the next batch; from two, which the seed chooses, to the end."""
    resumption_from(subject, case, fit, {case.seed % 5, (case.seed * 7 + 3) % 11})


def resumption_from(subject: AlgorithmSubject, case: Case, fit: Fit, to_the_end: Collection[int] | None) -> None:
    """Try the law.

    Args:
        to_the_end: numbers of the boundaries from which the run is resumed to its end; from the others only to the end
            of the next batch. None: from all to the end.
    """
    uninterrupted = subject.alone(case, fit)
    events = [event for event, _ in uninterrupted]
    boundaries = [index for index, event in enumerate(events) if event in BOUNDARIES]
    for number, index in enumerate(boundaries):
        event, state = uninterrupted[index]
        what = f"resumed from {moment(state)}"
        short = to_the_end is not None and number not in to_the_end
        with without_error(f"{what}, the run", event):
            stream = case.stream(subject.make(), fit=fit, start=_as_values(state))
            again = list(to_the_next_batch(stream) if short else stream)
            stream.close()
        _goes_on(again, uninterrupted, index, what, ended=not short)


def _goes_on(
    again: Pairs, uninterrupted: Pairs, index: int, what: str, *, loading: Sequence[Event] = (), ended: bool = False
) -> None:
    """Refuse a resumed run that does not go on as the uninterrupted one does.

    Args:
        again, uninterrupted: the pairs of both.
        index: of the pair from which it resumed.
        what: for the message.
        loading: the events with which it begins, of loading a file.
        ended: whether it has run to its end.
    """
    rest = going_on([event for event, _ in uninterrupted], index)
    wanted = [*loading, *rest]
    same_events([event for event, _ in again], wanted if ended else wanted[: len(again)], what)
    # Every call yields FIT_START first; the uninterrupted stream has none at this place.
    value = again[len(loading) + 1 :]
    same_stream(value, uninterrupted[len(uninterrupted) - len(rest) + 1 :][: len(value)], what)


def _as_values(state: State) -> State:
    """The State rebuilt from its values, as a checkpoint does: attributes and hooks of tensors are lost."""
    return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), state)


def to_the_next_batch(stream: Running) -> Iterator[tuple[Event, State]]:
    """The stream up to the end of its next batch, or of its epoch."""
    for pair in stream:
        yield pair
        if pair[0] in (Event.BATCH_END, Event.EPOCH_CHECKPOINT):
            return


_BEFORE_TRAINING = [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD]


@law(
    "a State that was saved and loaded is equal to the original, and training resumes from it",
    rests_on=("resumption",),
)
def checkpoint(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Saves the State at two boundaries, which the seed chooses; runs from each file to the end of the next batch."""
    uninterrupted = subject.alone(case, fit)
    boundaries = [index for index, (event, _) in enumerate(uninterrupted) if event in BOUNDARIES]
    chosen = {boundaries[(case.seed * 5 + step) % len(boundaries)] for step in (1, 8)}
    with tempfile.TemporaryDirectory() as folder:
        for index in sorted(chosen):
            _save_and_resume(Path(folder) / f"{index}.safetensors", uninterrupted, index, subject, case, fit)


def _save_and_resume(
    path: Path, uninterrupted: Pairs, index: int, subject: AlgorithmSubject, case: Case, fit: Fit
) -> None:
    event, state = uninterrupted[index]
    what = f"saved at {moment(state)}, and loaded"
    module = state.module()
    try:
        save(state, path)
    except ArgumentTypeError as error:
        raise LawViolation(f"the State of {moment(state)} can't be saved: {error}", event=event) from error
    loaded = load(path, model=module)
    same_state(loaded, outside_batch(state).replace(event=state.event), what)
    algorithms = subject.make()
    # With load_path=, handlers of the events before training would run a second time; then the loaded State is passed.
    acts_before = {handler for algorithm in flatten(algorithms) for handler in algorithm.handlers}.intersection(
        _BEFORE_TRAINING
    )
    load_path: dict[str, Path] = {} if acts_before else {"load_path": path}
    with without_error(f"{what}, the run", event):
        stream = case.stream(algorithms, fit=fit, start=loaded if acts_before else module, **load_path)
        again = list(to_the_next_batch(stream))
        stream.close()
    loading = [] if acts_before else _BEFORE_TRAINING[: 1 if case.plan.order == "2021" else None]
    _goes_on(again, uninterrupted, index, what, loading=loading)
