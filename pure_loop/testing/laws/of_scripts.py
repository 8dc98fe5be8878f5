"""Laws of scripts: custom loops that ``pl.drive`` runs.

>>> import torch, pure_loop as pl
>>> from pure_loop import testing
>>> def decay(state):
...     while state.timestamp < "3ba":
...         params = {name: 0.9 * tensor for name, tensor in state.params.items()}
...         state = state.replace(params=params).count_batch(samples=1)
...         state = yield pl.Event.BATCH_END, state
...     return state
>>> script = testing.Scripted(decay, pl.State.create(torch.nn.Linear(1, 1)))
>>> testing.laws.of_scripts.resumption(script)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
from hypothesis import strategies as st

from pure_loop.algorithm import Algorithm
from pure_loop.entry.drive import drive
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.loop.driver import Script
from pure_loop.stages import Stages
from pure_loop.state import State
from pure_loop.testing.case import Fit, Pairs, Running
from pure_loop.testing.comparison import Snapshot
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import (
    observed_run,
    same_events,
    same_stream,
    same_under_other_generators,
    without_error,
)
from pure_loop.testing.report import LawViolation, moment, written_to
from pure_loop.testing.subject import Subject, imported
from pure_loop.verify.leaves import copied

__all__ = ["completion", "determinism", "identity", "observer_invariance", "resumption", "sending_back", "value"]

_LONGEST = 100_000

CUSTOMARY = (Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT)
"""The default ``boundaries``: the events from whose States a script can resume."""


@attrs.frozen(repr=False)
class Seed:
    """The case of a script: the seed of its first State.

    >>> Seed(3)
    Seed(3)
    """

    seed: int

    def __repr__(self) -> str:
        return f"Seed({self.seed})"


class Scripted(Subject):
    """A script on trial, with its first State.

    Args:
        make_script: makes the generator from the State at which it starts or resumes.
        start: the first State; or a function that makes it from a seed, and is tried with several seeds.
        boundaries: events at which there is a State that the script can resume from.
        stages: the stages for algorithms that take them.

    Raises:
        ArgumentTypeError: ``make_script`` is not a function, or ``start`` is or returns something other than a State.

    >>> import torch, pure_loop as pl
    >>> def stop(state):
    ...     state = yield pl.Event.BATCH_END, state
    ...     return state
    >>> script = Scripted(stop, pl.State.create(torch.nn.Linear(1, 1)))
    >>> [event.value for event, state in script.run(Seed(0))]
    ['batch_end']
    """

    kind = "script"
    laws = "testing.laws.of_scripts"
    tried_on = Seed
    called = "script"

    def __init__(
        self,
        make_script: Callable[[State], Script],
        start: State | Callable[[int], State],
        *,
        boundaries: Iterable[Event | str] = CUSTOMARY,
        stages: Stages | None = None,
    ) -> None:
        if not callable(make_script) or isinstance(make_script, Algorithm):
            raise ArgumentTypeError(
                f"{make_script!r} is no script: give a function of a State that makes the generator, such as "
                "lambda state: adversarial(state, 5)."
            )
        self.make_script, self.start, self.stages = make_script, _starts(start), stages
        self.boundaries = frozenset(map(Event, boundaries))
        seeds = st.builds(Seed, st.just(0) if isinstance(start, State) else st.integers(0, 1000))
        name = getattr(make_script, "__name__", "the script").replace("<lambda>", "the script")
        super().__init__(name, (), lambda law: seeds, _code(make_script, start, self.boundaries, stages))

    @classmethod
    def made_of(cls, value: object) -> Scripted:
        if not isinstance(value, cls):
            raise ArgumentTypeError(
                f"a law of scripts was given {value!r}: give testing.Scripted(make_script, start), which has the first "
                "State as well."
            )
        return value

    def stream(self, case: Seed, start: State | None = None, **arguments: Any) -> Running:
        """The stream of the script from ``start``; None: from its first State."""
        first = self.start(case.seed) if start is None else start
        return drive(self.make_script(first), stages=self.stages, **arguments)

    def run(self, case: Seed, start: State | None = None, **arguments: object) -> Pairs:
        """All pairs of :meth:`stream`, as a list.

        Raises:
            LawViolation: the script does not end.
        """
        pairs: Pairs = []
        for pair in self.stream(case, start, **arguments):
            pairs.append(pair)
            if len(pairs) > _LONGEST:
                raise LawViolation(
                    f"the script yielded {_LONGEST:,} times and did not end; give check_script a shorter script."
                )
        return pairs

    def plain(self, case: Seed, fit: Fit) -> Pairs:
        return self.run(case)

    def reproduction(self, law: str, case: object, *, standard: bool) -> str:
        return f"from pure_loop import testing\n{self.code}\n{law}({self.called}, testing.{case!r})"


def _starts(start: object) -> Callable[[int], State]:
    if isinstance(start, State):
        # The script may write to it, and every run must start from the same values.
        first = copied(start)
        return lambda seed: copied(first)
    if not callable(start):
        raise ArgumentTypeError(
            f"start={start!r}: give the first State, pl.State.create(module), or a function that makes it from a seed."
        )

    def make(seed: int) -> State:
        state = start(seed)
        if not isinstance(state, State):
            raise ArgumentTypeError(
                f"start({seed}) returned {state!r}, not a State: return pl.State.create(module, seed=seed)."
            )
        return copied(state)

    make(0)  # refused here, and not in the middle of a law
    return make


def _code(make_script: object, start: object, boundaries: frozenset[Event], stages: Stages | None) -> str:
    """Code that makes the subject, for the code that reproduces a failure."""
    imports, unknown, arguments = [], [], []
    for name, argument in (("make_script", make_script), ("start", start)):
        result = imported(argument)
        if result is None:
            unknown.append(f"{name} = ...  # the function that was checked")
        else:
            imports.append(result[0])
        arguments.append(name if result is None else result[1])
    if boundaries != frozenset(CUSTOMARY):
        arguments.append(f"boundaries={sorted(event.value for event in boundaries)}")
    if stages is not None:
        unknown.append("stages = ...  # the stages that were checked")
        arguments.append("stages=stages")
    return "\n".join([*imports, "", *unknown, f"script = testing.Scripted({', '.join(arguments)})"])


@law("the script ends without an error, and yields an event and a State at every step", of=Scripted)
def completion(subject: Scripted, case: Seed, fit: Fit) -> None:
    """Runs it to its end."""
    with without_error("the script"):
        pairs = subject.run(case)
    if not pairs:
        raise LawViolation("the script yielded nothing.", advice="Write for each event: state = yield EVENT, state.")


@law("no State changes, neither the first one nor one that was yielded", rests_on=("completion",), of=Scripted)
def value(subject: Scripted, case: Seed, fit: Fit) -> None:
    """Keeps every State, and compares each at the end with the copy taken when it was yielded."""
    first = subject.start(case.seed)
    snapshots = [Snapshot(first)]
    snapshots += [Snapshot(state) for _, state in subject.stream(case, first)]
    for snapshot in snapshots:
        changed = snapshot.changed()
        if changed is not None:
            finding = f"the State of {moment(snapshot.state)}, was written to."
            raise written_to(finding, snapshot.state.event, changed)


@law(
    "the stream depends on the first State alone, not on the global random state, which the script leaves unchanged",
    rests_on=("completion", "value"),
    of=Scripted,
)
def determinism(subject: Scripted, case: Seed, fit: Fit) -> None:
    """Runs it twice, under different global random states."""
    first = subject.start(case.seed)
    same_under_other_generators(
        lambda: subject.stream(case, first),
        "the script",
        hastily=False,
        advice="Draw from pl.random.generator(state.seed, 'name', state.timestamp.batch), or inside "
        "`with pl.random.seeded(pl.random.derive(state.seed, 'name', state.timestamp.batch)):`.",
    )


@law(
    "the script continues with the State that is sent back: each event is `state = yield EVENT, state`",
    rests_on=("completion",),
    of=Scripted,
)
def sending_back(subject: Scripted, case: Seed, fit: Fit) -> None:
    """An algorithm counts the events in its state; every yielded State must have the count."""
    name = "count of the law"
    counter = Algorithm(
        name,
        dict.fromkeys(Event, lambda state: state.remember(name, state.algorithm_state.get(name, 0) + 1)),
        init=lambda state: 0,
    )
    before: Event | None = None
    for count, (event, state) in enumerate(subject.stream(case, algorithms=[counter]), start=1):
        if state.algorithm_state.get(name) != count:
            raise LawViolation(
                f"a value that an algorithm wrote at {before.name if before else 'the start'} was lost: the next "
                f"State, at {event.name}, does not have it.",
                event=event,
                advice="Assign the State that the driver sends back: state = yield Event.BATCH_END, state. A script "
                "that continues with its own State drops the changes of algorithms.",
            )
        before = event


@law(
    "an algorithm that returns its State unchanged has no effect",
    rests_on=("completion", "determinism", "sending_back"),
    of=Scripted,
)
def identity(subject: Scripted, case: Seed, fit: Fit) -> None:
    """Runs it with two algorithms that return the State, and an equal copy of it."""
    identity = Algorithm("identity of the law", dict.fromkeys(Event, lambda state: state))
    copying = Algorithm(
        "copying of the law", dict.fromkeys(Event, lambda state: state.replace(buffers=dict(state.buffers)))
    )
    first = subject.start(case.seed)
    alone = subject.run(case, first)
    same_stream(subject.run(case, first, algorithms=[identity, copying]), alone, "with the identity, the run differed")


@law("callbacks and the loop's body change nothing", rests_on=("completion", "determinism"), of=Scripted)
def observer_invariance(subject: Scripted, case: Seed, fit: Fit) -> None:
    """Runs it without observers and with busy ones."""
    first = subject.start(case.seed)
    alone = subject.run(case, first)
    observed = observed_run(lambda **arguments: subject.stream(case, first, **arguments))
    same_stream(observed, alone, "with callbacks, the run differed")


@law(
    "from the State of every boundary, the script resumes exactly as if it had not stopped",
    rests_on=("completion", "value", "determinism"),
    of=Scripted,
)
def resumption(subject: Scripted, case: Seed, fit: Fit) -> None:
    """Starts the script from the State of every boundary, and compares all events after its FIT_START."""
    uninterrupted = subject.run(case)
    if not any(event in subject.boundaries for event, _ in uninterrupted):
        boundaries = ", ".join(sorted(event.name for event in subject.boundaries))
        raise LawViolation(
            f"resumption was not tried: the script yields none of {boundaries}.",
            advice="Name the events from which it can resume: boundaries=[Event.AFTER_TRAIN_BATCH].",
        )
    for index, (event, start) in enumerate(uninterrupted):
        if event not in subject.boundaries:
            continue
        what = f"resumed from {moment(start)}"
        rest = uninterrupted[index + 1 :]
        with without_error(f"{what}, the run", event):
            again = subject.run(case, start)
        advice = (
            "A script must read its progress from the State, `while state.timestamp < '10ba':`, and keep nothing in "
            "local variables that the next batch needs."
        )
        # A script that begins with FIT_START, as fit does, yields it again when it resumes.
        if again and again[0][0] is Event.FIT_START and (not rest or rest[0][0] is not Event.FIT_START):
            again = again[1:]
        try:
            same_events([event for event, _ in again], [event for event, _ in rest], what)
            same_stream(again, rest, what)
        except LawViolation as violation:
            violation.advice = advice
            raise


def __dir__() -> list[str]:
    return list(__all__)
