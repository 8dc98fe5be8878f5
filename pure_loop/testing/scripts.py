"""Laws of scripts: loops of one's own, that ``pl.drive`` runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.algorithm import Algorithm
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.loop import Script
from pure_loop.stages import Stages
from pure_loop.state import State
from pure_loop.testing._surroundings import Surroundings, reseeded
from pure_loop.testing.case import Fit, Pairs
from pure_loop.testing.comparison import Snapshot
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import nosy_run, same_events, same_stream
from pure_loop.testing.report import Report
from pure_loop.testing.trial import Trial
from pure_loop.testing.violation import LawViolation, moment, written_to

__all__ = ["check_script"]

_LONGEST = 100_000
_CUSTOMARY = (Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT)


def check_script(
    make_script: Callable[[State], Script],
    start: State | Callable[[int], State],
    *,
    boundaries: Iterable[Event | str] = _CUSTOMARY,
    stages: Stages | None = None,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int = 5,
) -> Report:
    """Try the laws of scripts, and raise if one doesn't hold.

    Args:
        make_script: makes the generator from the State with which it starts, or from which it goes on.
        start: the first State; or a function of a seed that makes it, of which several are tried.
        boundaries: events at which a State can be kept so that the script goes on from it.
        stages: what algorithms that ask for stages are given.
        expected_failures: names of laws that it doesn't keep, each with the reason; strict.
        skip: names of laws that are not to be tried, each with the reason.
        max_examples: how many seeds are tried.

    Returns:
        What was tried: ``print(report)`` is a table.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold.
        ArgumentTypeError: something else than a function, or a State.

    >>> import torch, pure_loop as pl
    >>> def decay(state):
    ...     while state.timestamp < "3ba":
    ...         params = {name: 0.9 * tensor for name, tensor in state.params.items()}
    ...         state = state.replace(params=params).count_batch(samples=1)
    ...         state = yield pl.Event.BATCH_END, state
    ...     return state
    >>> check_script(decay, pl.State.create(torch.nn.Linear(1, 1))).ok
    True
    """
    subject = _Scripted(make_script, _starts(start), frozenset(map(Event, boundaries)), stages, callable(start))
    if not callable(make_script) or isinstance(make_script, Algorithm):
        raise ArgumentTypeError(
            f"check_script({make_script!r}): give a function of a State that makes the generator, check_script(lambda "
            "state: adversarial(state, 5), start)."
        )
    seeds = st.builds(Seed, st.integers(0, 1000) if callable(start) else st.just(0))
    return Trial(
        subject, _LAWS, {}, lambda law: seeds, pl.fit, expected_failures, skip, max_examples if callable(start) else 1
    ).report()


def _starts(start: Any) -> Callable[[int], State]:
    if isinstance(start, State):
        return lambda seed: start
    if not callable(start):
        raise ArgumentTypeError(
            f"start={start!r}: give the first State, pl.State.create(module), or a function of a seed that makes it."
        )

    def make(seed: int) -> State:
        state = start(seed)
        if not isinstance(state, State):
            raise ArgumentTypeError(
                f"start({seed}) returned {state!r}, not a State: pl.State.create(module, seed=seed)."
            )
        return state

    make(0)  # refused here, and not in the middle of a law
    return make


@attrs.frozen
class Seed:
    """What a script is tried on: the seed of its first State."""

    seed: int


class _Scripted:
    """A script on trial."""

    def __init__(
        self,
        make_script: Callable[[State], Script],
        start: Callable[[int], State],
        boundaries: frozenset[Event],
        stages: Stages | None,
        seeded: bool,
    ) -> None:
        self.name = getattr(make_script, "__name__", "the script").replace("<lambda>", "the script")
        self.make_script, self.start, self.boundaries, self.stages = make_script, start, boundaries, stages
        self.bound: tuple[tuple[str, Event], ...] = ()
        self.fired: Counter[tuple[str, Event]] = Counter()
        self.watched = False
        self.kind = "script"
        self.seeded = seeded
        self.runs: Any = None

    def stream(self, case: Seed, start: State | None = None, **arguments: Any) -> Any:
        first = self.start(case.seed) if start is None else start
        script = self.make_script(first)
        return pl.drive(script, stages=self.stages, **arguments)

    def run(self, case: Seed, start: State | None = None, **arguments: Any) -> Pairs:
        pairs: Pairs = []
        for pair in self.stream(case, start, **arguments):
            pairs.append(pair)
            if len(pairs) > _LONGEST:
                raise LawViolation(
                    f"the script yielded {_LONGEST:,} times and did not end; give check_script a shorter one."
                )
        return pairs

    def reproduction(self, law: str, case: Seed, *, standard: bool) -> str:
        return (
            "from pure_loop import testing\n\nmake_script, start = ...  # what was checked\n"
            f"testing.check_script(make_script, {f'start({case.seed})' if self.seeded else 'start'})"
        )


@law("the script comes to an end, with an event and a State at every step")
def completion(subject: Any, case: Any, fit: Fit) -> None:
    """Runs it to its end."""
    try:
        pairs = subject.run(case)
    except LawViolation:
        raise
    except Exception as error:
        raise LawViolation(f"the script ended in an error: {type(error).__name__}: {error}") from error
    if not pairs:
        raise LawViolation("the script yielded nothing.", advice="Each event is a line: state = yield EVENT, state.")


@law("no State changes, neither the one it starts from nor one that it yielded", rests_on=("completion",))
def value(subject: Any, case: Any, fit: Fit) -> None:
    """Keeps all of them, and looks at each once more at the end."""
    first = subject.start(case.seed)
    kept = [Snapshot(first)]
    kept += [Snapshot(state) for _, state in subject.stream(case, first)]
    for snapshot in kept:
        changed = snapshot.changed()
        if changed is not None:
            what = f"a State was written to, that of {moment(snapshot.state)}."
            raise written_to(what, snapshot.state.event, changed)


@law(
    "equal starts give equal streams whatever the global random state, which is left as it was",
    rests_on=("completion", "value"),
)
def determinism(subject: Any, case: Any, fit: Fit) -> None:
    """Runs it twice, in other global random states."""
    first = subject.start(case.seed)
    streams = []
    for seed in (11, 12):
        with reseeded(seed):
            around, pairs = Surroundings(), []
            for event, state in subject.stream(case, first):
                pairs.append((event, state))
                changed = around.changed()
                if changed is not None:
                    raise LawViolation(
                        f"the script changed {changed} on the way to {event.name}.",
                        event=event,
                        advice="Draw from pl.random.generator(state.seed, 'name', state.timestamp.batch), or inside "
                        "`with pl.random.seeded(pl.random.derive(state.seed, 'name', state.timestamp.batch)):`.",
                    )
            streams.append(pairs)
    same_stream(streams[1], streams[0], "the same run in another global random state")


@law("what is sent back is what comes after: each event is `state = yield EVENT, state`", rests_on=("completion",))
def sending_back(subject: Any, case: Any, fit: Fit) -> None:
    """An algorithm counts the events in its memory, and the count must come through."""
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
                f"what an algorithm wrote at {before.name if before else 'the start'} was lost: the State of "
                f"{event.name} that came next does not have it.",
                event=event,
                advice="Take back what the driver sends: state = yield Event.BATCH_END, state. A script that goes on "
                "with a State of its own drops what algorithms did.",
            )
        before = event


@law("the identity changes nothing", rests_on=("completion", "determinism", "sending_back"))
def identity(subject: Any, case: Any, fit: Fit) -> None:
    """Runs it with algorithms that return what they are given."""
    identity = Algorithm("identity of the law", dict.fromkeys(Event, lambda state: state))
    copying = Algorithm(
        "copying of the law", dict.fromkeys(Event, lambda state: state.replace(buffers=dict(state.buffers)))
    )
    first = subject.start(case.seed)
    alone = subject.run(case, first)
    same_stream(
        subject.run(case, first, algorithms=[identity, copying]), alone, "with the identity, the run was another"
    )


@law("callbacks and the loop's body change nothing", rests_on=("completion", "determinism"))
def observer_invariance(subject: Any, case: Any, fit: Fit) -> None:
    """Runs it watched by nosy observers."""
    first = subject.start(case.seed)
    alone = subject.run(case, first)
    watched = nosy_run(lambda **arguments: subject.stream(case, first, **arguments))
    same_stream(watched, alone, "watched by callbacks, the run was another")


@law(
    "from the State of every boundary the script goes on exactly as if it had never stopped",
    rests_on=("completion", "value", "determinism"),
)
def resumption(subject: Any, case: Any, fit: Fit) -> None:
    """Makes the script anew from the State of every boundary, and compares all that comes after its FIT_START."""
    whole = subject.run(case)
    if not any(event in subject.boundaries for event, _ in whole):
        boundaries = ", ".join(sorted(event.name for event in subject.boundaries))
        raise LawViolation(
            f"nothing is known of it: the script yields none of {boundaries}.",
            advice="Say where it can go on from: check_script(..., boundaries=[Event.AFTER_TRAIN_BATCH]).",
        )
    for index, (event, kept) in enumerate(whole):
        if event not in subject.boundaries:
            continue
        what = f"gone on from {moment(kept)}"
        rest = whole[index + 1 :]
        try:
            again = subject.run(case, kept)
        except LawViolation:
            raise
        except Exception as error:
            text = f"{what}, it ended in an error: {type(error).__name__}: {error}"
            raise LawViolation(text, event=event) from error
        advice = (
            "A script that goes on reads from the State how far it is, `while state.timestamp < '10ba':`, and keeps "
            "nothing in local variables that the next batch needs."
        )
        # One that begins with FIT_START, as fit does, yields it when it goes on, too.
        if again and again[0][0] is Event.FIT_START and (not rest or rest[0][0] is not Event.FIT_START):
            again = again[1:]
        try:
            same_events([event for event, _ in again], [event for event, _ in rest], what)
            same_stream(again, rest, what)
        except LawViolation as violation:
            violation.advice = advice
            raise


_LAWS = (completion, value, determinism, sending_back, identity, observer_invariance, resumption)
