"""Laws of composition: the identity, associativity, the order at each event; and whether two algorithms commute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

import attrs
from hypothesis.strategies import SearchStrategy

from pure_loop.algorithm import Algorithm, AlgorithmLike, compose
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.stages.nonfinite import total_loss
from pure_loop.state import State
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.law import EXAMPLES, Law, law, try_examples
from pure_loop.testing.laws._streams import same_stream
from pure_loop.testing.problems import Problem
from pure_loop.testing.report import LawViolation
from pure_loop.testing.subject import AlgorithmSubject

__all__ = [
    "Commutation",
    "CommutationMatrix",
    "algorithm_order",
    "commutation",
    "commutation_matrix",
    "composition",
]


def _neighbour(name: str, factor: float) -> Algorithm:
    """Counts batches, and changes the loss so that two of its kind do not commute."""

    def scale(state: State) -> State:
        loss = state.loss
        total = total_loss(loss) * factor + 0.1
        return state.replace(loss={**loss, "total": total} if isinstance(loss, dict) else total)

    def count(state: State) -> State:
        return state.remember(name, state.algorithm_state[name] + 1)

    return Algorithm(name, {Event.AFTER_LOSS: scale, Event.BATCH_END: count}, init=lambda state: 0)


@law(
    "adding identity algorithms changes nothing, and compose(a, b, c) equals the list [a, b, c], however it is grouped",
    rests_on=("purity", "memory", "order", "determinism", "visibility"),
)
def composition(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Runs it alone, among algorithms that do nothing, and composed with two algorithms in one of three groupings."""
    # Three ways to do nothing: return the State, return a copy, and keep an algorithm state that is never read.
    identity = Algorithm("identity of the law", dict.fromkeys(Event, lambda state: state))
    copying = Algorithm("copying of the law", dict.fromkeys(Event, lambda state: state.replace()))
    neighbour = Algorithm("neighbour of the law", {Event.INIT: lambda state: state}, init=lambda state: 0)
    alone = subject.alone(case, fit)
    beside = case.run([identity, neighbour, *subject.make(), copying], fit=fit)
    without = [(event, _without(state, neighbour.name)) for event, state in beside]
    same_stream(without, alone, "with algorithms added that do nothing, the run differed")
    first, last = _neighbour("first of the law", 2.0), _neighbour("last of the law", 0.5)
    listed = case.run([first, *subject.make(), last], fit=fit)
    groupings: list[list[AlgorithmLike]] = [
        [compose(first, *subject.make(), last)],
        [compose(compose(first, *subject.make()), last)],
        [first, compose(*subject.make(), last)],
    ]
    grouped = case.run(groupings[case.seed % len(groupings)], fit=fit)
    same_stream(grouped, listed, "composed, the run differed from that of the list")


def _without(state: State, name: str) -> State:
    return state.replace(algorithm_state={key: value for key, value in state.algorithm_state.items() if key != name})


@law(
    "algorithms apply in the order of the list, and in reverse on the AFTER half of a pair, except at AFTER_DATALOADER",
    rests_on=("order",),
)
def algorithm_order(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Three algorithms record their calls."""
    trace: list[tuple[Event, str]] = []

    def recorder(name: str) -> Algorithm:
        def note(state: State) -> State:
            assert state.event is not None
            trace.append((state.event, name))
            return state

        return Algorithm(name, dict.fromkeys(Event, note))

    events = [event for event, _ in case.run([recorder(name) for name in "abc"], fit=fit)]
    wanted: list[tuple[Event, str]] = []
    for event in events:
        backwards = "AFTER" in event.name.split("_") and event is not Event.AFTER_DATALOADER
        wanted += [(event, name) for name in ("cba" if backwards else "abc")]
    for number, ((event, name), (due, first)) in enumerate(zip(trace, wanted, strict=False)):
        if (event, name) != (due, first):
            raise LawViolation(
                f"of the algorithms a, b and c, {name} ran at {event.name} where {first} should have (call {number}).",
                event=event,
            )
    if len(trace) != len(wanted):
        raise LawViolation(f"algorithms ran {len(trace)} times, expected {len(wanted)} times.")


@attrs.frozen
class Commutation:
    """Whether two algorithms commute: a fact about the pair, not a law.

    Attributes:
        commutes: ``[a, b]`` and ``[b, a]`` gave the same stream on every case.
        examples: the number of cases that were tried.
        counterexample: if they don't commute, the difference on the smallest case.

    >>> import pure_loop as pl
    >>> bool(commutation(lambda: pl.algorithms.ema(half_life="2ba"), lambda: pl.algorithms.sam(), max_examples=2))
    True
    """

    commutes: bool
    examples: int
    counterexample: LawViolation | None = None

    def __bool__(self) -> bool:
        return self.commutes

    def __str__(self) -> str:
        if self.counterexample is None:
            return f"They commute on all of {self.examples} cases."
        return f"They do not commute:\n\n{self.counterexample}"


def commutation(
    make_a: object,
    make_b: object,
    *,
    problems: Problem | str | Iterable[Problem | str] | None = None,
    cases: SearchStrategy[Case] | None = None,
    max_examples: int = EXAMPLES,
) -> Commutation:
    """Whether two algorithms commute; if not, the smallest case on which they don't.

    Args:
        make_a, make_b: make the algorithms, as in :func:`pure_loop.testing.check_algorithm`.
        problems: models and data of the cases, by name or as :class:`Problem`; None: all built-in ones.
        cases: a strategy of cases, instead of ``problems``.
        max_examples: the number of cases to draw.

    Raises:
        ArgumentError: both have the same name.
    """
    a, b = AlgorithmSubject(make_a), AlgorithmSubject(make_b)
    both = AlgorithmSubject([lambda: list(a.make()), lambda: list(b.make())])

    def check(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
        names = [*a.names, *b.names]

        def run(algorithms: list[Algorithm]) -> Pairs:
            return [(event, _in_order(state, names)) for event, state in case.run(algorithms, fit=fit)]

        a_first, b_first = run([*a.make(), *b.make()]), run([*b.make(), *a.make()])
        same_stream(a_first, b_first, f"{a.name} before {b.name}")

    statement = f"{a.name} and {b.name} commute: each order gives the same stream"
    pair = Law("commutation", statement, check)
    drawn = pair.cases(problems) if cases is None else cases
    assert not isinstance(drawn, str)
    try:
        return Commutation(True, try_examples(pair, both, drawn, max_examples=max_examples))
    except LawViolation as violation:
        violation.law = violation.code = ""  # not a law, and not a fault
        return Commutation(False, violation.examples, violation)


@attrs.frozen
class CommutationMatrix:
    """Which pairs of some algorithms commute.

    Attributes:
        names: of the algorithms, in the order in which they were given.
        pairs: by two names, the earlier one first: the :class:`Commutation`; None where one run can't have both.

    ``str(matrix)`` is a table: ``=`` where a pair commutes, ``x`` where it does not, ``-`` where it is refused.
    """

    names: tuple[str, ...]
    pairs: Mapping[tuple[str, str], Commutation | None]

    def commute(self, a: str, b: str) -> bool | None:
        """Whether these two commute; None where one run can't have both.

        Raises:
            ArgumentError: a name that is not among them, or one name twice.
        """
        for pair in ((a, b), (b, a)):
            if pair in self.pairs:
                commutation = self.pairs[pair]
                return None if commutation is None else commutation.commutes
        raise ArgumentError(f"commute({a!r}, {b!r}): give two of {', '.join(self.names)}.")

    def __str__(self) -> str:
        width = max(map(len, self.names))
        lines = []
        for row, name in enumerate(self.names):
            marks = ["." if before == name else _MARKS[self.commute(before, name)] for before in self.names[: row + 1]]
            lines.append(f"{name:>{width}}  {' '.join(marks)}")
        return "\n".join(lines)


_MARKS = {True: "=", False: "x", None: "-"}


def commutation_matrix(
    algorithms: Iterable[object],
    *,
    problems: Problem | str | Iterable[Problem | str] | None = None,
    max_examples: int = EXAMPLES,
) -> CommutationMatrix:
    """Which pairs of these algorithms commute.

    Args:
        algorithms: functions that make one each, of different names.
        problems, max_examples: as in :func:`commutation`, for each pair.

    Raises:
        ArgumentError: fewer than two, or two of one name.

    >>> import pure_loop as pl
    >>> A = pl.algorithms
    >>> makers = [lambda: A.sam(), lambda: A.ema(half_life="2ba"), lambda: A.gradient_clipping("norm", 0.1)]
    >>> print(commutation_matrix(makers, problems="linear", max_examples=2))
                  sam  .
                  ema  = .
    gradient_clipping  x = .
    """
    listed = list(algorithms)
    makers = {AlgorithmSubject(make).name: make for make in listed}
    if len(makers) < 2 or len(makers) < len(listed):
        raise ArgumentError(
            f"commutation_matrix: {len(listed)} algorithms of the names {', '.join(makers)}; give at least two, of "
            "different names: a factory takes name=."
        )
    pairs: dict[tuple[str, str], Commutation | None] = {}
    for a, b in combinations(makers, 2):
        first, second = (AlgorithmSubject(makers[name]).make() for name in (a, b))
        claimed = {claim for algorithm in first for claim in algorithm.claims}
        if any(claimed & algorithm.claims for algorithm in second):
            pairs[a, b] = None  # fit refuses both
        else:
            pairs[a, b] = commutation(makers[a], makers[b], problems=problems, max_examples=max_examples)
    return CommutationMatrix(tuple(makers), pairs)


def _in_order(state: State, names: list[str]) -> State:
    values = state.algorithm_state
    return state.replace(algorithm_state={name: values[name] for name in names if name in values})
