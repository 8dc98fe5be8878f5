"""Laws of scripts: loops of one's own, that ``pl.drive`` runs.

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

from pure_loop.algorithm import Algorithm
from pure_loop.event import Event
from pure_loop.testing._surroundings import Surroundings, reseeded
from pure_loop.testing.case import Fit
from pure_loop.testing.comparison import Snapshot
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import nosy_run, same_events, same_stream
from pure_loop.testing.scripts import Scripted, Seed
from pure_loop.testing.violation import LawViolation, moment, written_to

__all__ = ["completion", "determinism", "identity", "observer_invariance", "resumption", "sending_back", "value"]


@law("the script comes to an end, with an event and a State at every step", of=Scripted)
def completion(subject: Scripted, case: Seed, fit: Fit) -> None:
    """Runs it to its end."""
    try:
        pairs = subject.run(case)
    except LawViolation:
        raise
    except Exception as error:
        raise LawViolation(f"the script ended in an error: {type(error).__name__}: {error}") from error
    if not pairs:
        raise LawViolation("the script yielded nothing.", advice="Each event is a line: state = yield EVENT, state.")


@law("no State changes, neither the one it starts from nor one that it yielded", rests_on=("completion",), of=Scripted)
def value(subject: Scripted, case: Seed, fit: Fit) -> None:
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
    of=Scripted,
)
def determinism(subject: Scripted, case: Seed, fit: Fit) -> None:
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


@law(
    "what is sent back is what comes after: each event is `state = yield EVENT, state`",
    rests_on=("completion",),
    of=Scripted,
)
def sending_back(subject: Scripted, case: Seed, fit: Fit) -> None:
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


@law("the identity changes nothing", rests_on=("completion", "determinism", "sending_back"), of=Scripted)
def identity(subject: Scripted, case: Seed, fit: Fit) -> None:
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


@law("callbacks and the loop's body change nothing", rests_on=("completion", "determinism"), of=Scripted)
def observer_invariance(subject: Scripted, case: Seed, fit: Fit) -> None:
    """Runs it watched by nosy observers."""
    first = subject.start(case.seed)
    alone = subject.run(case, first)
    watched = nosy_run(lambda **arguments: subject.stream(case, first, **arguments))
    same_stream(watched, alone, "watched by callbacks, the run was another")


@law(
    "from the State of every boundary the script goes on exactly as if it had never stopped",
    rests_on=("completion", "value", "determinism"),
    of=Scripted,
)
def resumption(subject: Scripted, case: Seed, fit: Fit) -> None:
    """Makes the script anew from the State of every boundary, and compares all that comes after its FIT_START."""
    whole = subject.run(case)
    if not any(event in subject.boundaries for event, _ in whole):
        boundaries = ", ".join(sorted(event.name for event in subject.boundaries))
        raise LawViolation(
            f"nothing is known of it: the script yields none of {boundaries}.",
            advice="Say where it can go on from: boundaries=[Event.AFTER_TRAIN_BATCH].",
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
