"""Subjects: what is on trial, made anew for every run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from hypothesis.strategies import SearchStrategy

from pure_loop.algorithm import Algorithm, Composition, flatten
from pure_loop.errors import ArgumentError, ArgumentTypeError, MissingExtraError, PureLoopError
from pure_loop.event import Event
from pure_loop.testing._surroundings import unchanged
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.problems import PROBLEMS, Problem, as_problems

if TYPE_CHECKING:
    from pure_loop.testing.law import Law

__all__ = ["AlgorithmSubject", "Draw", "Problems", "Subject", "assigned", "drawn_from", "fresh_copies", "imported"]

Problems: TypeAlias = Problem | str | Iterable[Problem | str] | None

Draw: TypeAlias = "Callable[[Law], SearchStrategy[Any] | str]"
"""Of a law, the strategy of what it is tried on; or a text that says why there is nothing to try it on."""


class Subject(ABC):
    """What is on trial, as laws and reports see it.

    Args:
        name: what to call it.
        bound: what it is bound to: pairs of a name and an event.
        drawn: of a law, the strategy of what it is tried on; or a text that says why there is nothing to try it on.
        code: how to make it, for the code that reproduces a failure.

    Attributes:
        kind: what it is, in a word.
        laws: where its laws are, in code.
        tried_on: the class of what its laws are tried on.
        called: what its laws are called with in :attr:`code`.
        fired: how often each handler ran, where it was looked at.
        watched: whether anybody looked.
        on_processes: on how many cases real processes ran it.
        on_worlds: the cases on which several ranks trained together.
        runs: those that laws share; None where they don't.
    """

    kind: ClassVar[str]
    laws: ClassVar[str]
    tried_on: ClassVar[type[Any]] = Case
    called: str

    def __init__(self, name: str, bound: Iterable[tuple[str, Event]], drawn: Draw, code: str) -> None:
        self.name = name
        self.bound = tuple(bound)
        self.drawn = drawn
        self.code = code
        self.fired: Counter[tuple[str, Event]] = Counter()
        self.watched = False
        self.on_processes = 0
        self.on_worlds: list[Case] = []
        self.runs: dict[Any, Pairs] | None = None

    @classmethod
    @abstractmethod
    def made_of(cls, given: Any) -> Subject:
        """What a law is called with, as a subject: it may be one already."""

    def reproduction(self, law: str, case: Any, *, standard: bool) -> str:
        """Code that tries a law on this subject and one case; on another loop than ``pl.fit`` if not ``standard``."""
        arguments = [self.called, "case", *(() if standard else ("fit=fit",))]
        return "\n".join(
            [
                "from pure_loop import testing",
                "from pure_loop.order import EvaluatorPlan, Plan",
                *([self.code] if self.code else []),
                "",
                f"case = testing.{case!r}",
                f"{law}({', '.join(arguments)})",
            ]
        )


def drawn_from(problems: Problems = None, plans: SearchStrategy[Any] | None = None) -> Draw:
    """Cases of these problems and plans; None: of all that come along.

    Raises:
        ArgumentError, ArgumentTypeError: what is neither problems nor plans.
    """
    if plans is not None and not isinstance(plans, SearchStrategy):
        raise ArgumentTypeError(
            f"plans={plans!r}: give a strategy, testing.plans(max_batches=3) or hypothesis.strategies.just(plan)."
        )
    listed = as_problems(tuple(PROBLEMS.values()) if problems is None else problems)
    return lambda law: law.cases(listed, plans)


class AlgorithmSubject(Subject):
    """Algorithms on trial.

    Args:
        given: a function that makes an algorithm (or a composition, or a list of them); an algorithm, which is copied
            as it is now; None for none, where it is the loop that is on trial.
        problems, plans: what to draw cases from, as in :func:`pure_loop.testing.check_algorithm`.

    Attributes:
        make: gives fresh instances, which share nothing.
        names: of the algorithms.

    Raises:
        ArgumentTypeError: something else, or a function that makes something else.

    >>> import pure_loop as pl
    >>> subject = AlgorithmSubject(lambda: pl.algorithms.ema(half_life="10ba"))
    >>> subject.name, len(subject.make())
    ('ema', 1)
    """

    kind = "algorithm"
    laws = "testing.laws"

    def __init__(self, given: Any, problems: Problems = None, plans: SearchStrategy[Any] | None = None) -> None:
        self.make = _maker(given)
        with unchanged():
            made = self.make()
        self.names = tuple(algorithm.name for algorithm in made)
        self.called = "None" if given is None else "make_algorithm"
        super().__init__(
            " + ".join(self.names) or "the loop",
            ((algorithm.name, event) for algorithm in made for event in algorithm.handlers),
            drawn_from(problems, plans),
            "" if given is None else assigned(self.called, given),
        )

    @classmethod
    def made_of(cls, given: Any) -> AlgorithmSubject:
        return given if isinstance(given, cls) else cls(given)

    def alone(self, case: Case, fit: Fit) -> Pairs:
        """A run of a case with nothing besides; laws that need the same one share it while :attr:`runs` is a dict."""
        if self.runs is None:
            return case.run(self.make(), fit=fit)
        key = repr(case), id(case.problem), id(fit)
        if key not in self.runs:
            self.runs[key] = case.run(self.make(), fit=fit)
        return self.runs[key]


def _maker(given: Any) -> Callable[[], tuple[Algorithm, ...]]:
    if given is None:
        return lambda: ()
    if isinstance(given, Algorithm | Composition):
        copy = fresh_copies(given)
        return lambda: flatten(copy())
    if isinstance(given, Iterable) and not isinstance(given, str):
        makers = [_maker(each) for each in given]
        return lambda: tuple(algorithm for maker in makers for algorithm in maker())
    if isinstance(given, type) or not callable(given):
        raise ArgumentTypeError(
            f"an algorithm, or a function that makes one, is needed, and {given!r} of type {type(given).__name__} is "
            "neither: check_algorithm(lambda: my_algorithm(strength=0.3))."
        )
    name = getattr(given, "__name__", type(given).__name__)

    def make() -> tuple[Algorithm, ...]:
        try:
            made = given()
        except TypeError as error:
            error.add_note(f"raised by {name}(), which is called without arguments to make an algorithm")
            raise
        if made is None or (isinstance(made, Iterable) and not made):
            raise ArgumentTypeError(
                f"the factory {name} returned {made!r}, not an algorithm: does it lack a `return`? Write "
                "lambda: my_algorithm(strength=0.3)."
            )
        if callable(made) and not isinstance(made, Algorithm | Composition):
            inner = getattr(made, "__name__", type(made).__name__)
            raise ArgumentTypeError(
                f"the factory {name} returned the function {inner}, not an algorithm: call it too, lambda: "
                f"{inner}(...). If {inner} is one itself, bind it to an event: pl.algorithm(Event.BATCH_END)({inner})."
            )
        try:
            return flatten(made)
        except PureLoopError as error:
            raise ArgumentTypeError(
                f"the factory {name} returned {made!r} of type {type(made).__name__}, and makes an algorithm, a "
                f"composition, or a list of algorithms: {error}"
            ) from None

    return make


def fresh_copies(algorithm: Any) -> Callable[[], Any]:
    """A function that gives copies of an algorithm as it is now, closures included.

    Raises:
        MissingExtraError: cloudpickle is not installed.
        ArgumentError: something in it can't be copied.
    """
    try:
        import cloudpickle  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise MissingExtraError(
            "checking an algorithm that is made already copies it with cloudpickle, which is not installed: "
            "pip install 'pure_loop[testing]', or give a function that makes the algorithm."
        ) from None
    try:
        data = cloudpickle.dumps(algorithm)
        cloudpickle.loads(data)
    except Exception as error:  # anything, raised by the __reduce__ of whatever it closes over
        raise ArgumentError(
            f"{algorithm!r} can't be copied ({type(error).__name__}: {error}), and every run needs a fresh one: give a "
            "function that makes it, check_algorithm(lambda: my_algorithm(strength=0.3))."
        ) from error
    return lambda: cloudpickle.loads(data)


def imported(given: Any) -> tuple[str, str] | None:
    """The line that imports a function or a class, and how it is then called; None where it can't be imported.

    >>> imported(fresh_copies)
    ('from pure_loop.testing.subject import fresh_copies', 'fresh_copies')
    """
    name = getattr(given, "__qualname__", "")
    module = getattr(given, "__module__", "")
    if name and "<" not in name and module and module != "__main__":
        return f"from {module} import {name.partition('.')[0]}", name
    return None


def assigned(name: str, given: Any) -> str:
    """Code that gives a name to what was checked, for its reader to fill in where it can't be imported."""
    found = imported(given)
    return f"{name} = ...  # what was checked" if found is None else f"{found[0]}\n\n{name} = {found[1]}"
