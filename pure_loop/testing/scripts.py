"""Scripts as subjects of laws: custom loops that ``pl.drive`` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.algorithm import Algorithm
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.loop.driver import Script
from pure_loop.stages import Stages
from pure_loop.state import State
from pure_loop.testing.case import Pairs
from pure_loop.testing.comparison import copied
from pure_loop.testing.subject import Subject, imported
from pure_loop.testing.violation import LawViolation

__all__ = ["CUSTOMARY", "Scripted", "Seed"]

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
        boundaries: events from whose States the script can resume.
        stages: the stages for algorithms that take them.

    Raises:
        ArgumentTypeError: ``make_script`` is not a function, or ``start`` is or returns something other than a State.

    >>> import torch
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
        seeds = st.builds(Seed, st.integers(0, 1000) if callable(start) else st.just(0))
        name = getattr(make_script, "__name__", "the script").replace("<lambda>", "the script")
        super().__init__(name, (), lambda law: seeds, _code(make_script, start, self.boundaries, stages))

    @classmethod
    def made_of(cls, value: Any) -> Scripted:
        if not isinstance(value, cls):
            raise ArgumentTypeError(
                f"a law of scripts was given {value!r}: give testing.Scripted(make_script, start), which has the first "
                "State as well."
            )
        return value

    def stream(self, case: Seed, start: State | None = None, **arguments: Any) -> Any:
        """The stream of the script from ``start``; None: from its first State."""
        first = self.start(case.seed) if start is None else start
        return pl.drive(self.make_script(first), stages=self.stages, **arguments)

    def run(self, case: Seed, start: State | None = None, **arguments: Any) -> Pairs:
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

    def reproduction(self, law: str, case: Any, *, standard: bool) -> str:
        return f"from pure_loop import testing\n{self.code}\n{law}({self.called}, testing.{case!r})"


def _starts(start: Any) -> Callable[[int], State]:
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


def _code(make_script: Any, start: Any, boundaries: frozenset[Event], stages: Stages | None) -> str:
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
