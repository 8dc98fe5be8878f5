"""Subjects: the algorithm, callback or script on trial; every run gets a fresh instance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from hypothesis.strategies import SearchStrategy

from pure_loop.algorithm import Algorithm, Composition, flatten
from pure_loop.errors import ArgumentError, ArgumentTypeError, MissingExtraError, PureLoopError
from pure_loop.event import Event
from pure_loop.order import Plan
from pure_loop.testing._surroundings import unchanged
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.problems import PROBLEMS, Problem, as_problems

T = TypeVar("T")
Problems: TypeAlias = Problem | str | Iterable[Problem | str] | None


class LawWithCases(Protocol):
    """What a subject knows of a law: its cases."""

    def cases(self, problems: Problems, plans: SearchStrategy[Plan] | None) -> SearchStrategy[Case] | str: ...


Draw: TypeAlias = Callable[[LawWithCases], SearchStrategy[Any] | str]
"""Gives the strategy of the cases on which a law is tried, or a text that says why there are none."""


class Subject(ABC):
    """The algorithm, callback or script on trial, as laws and reports see it.

    Args:
        name: its name in reports.
        bound: the events it is bound to, as pairs of a name and an event.
        drawn: gives the strategy of the cases on which a law is tried, or a text that says why there are none.
        code: code that makes it, for the code that reproduces a failure.

    Attributes:
        kind: ``"algorithm"``, ``"callback"`` or ``"script"``.
        laws: the module of its laws, as code.
        tried_on: the class of its cases.
        called: the name of the law's first argument in :attr:`code`.
        fired: number of calls of each handler, counted by the laws that observe handlers.
        watched: whether a law has observed its handlers.
        on_processes: number of cases that real processes ran.
        on_worlds: the cases on which several ranks trained together.
        runs: runs that several laws share; None if they are not shared.
    """

    kind: ClassVar[str]
    laws: ClassVar[str]
    tried_on: ClassVar[type[object]] = Case
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
        self.runs: dict[tuple[object, ...], Pairs] | None = None

    @classmethod
    @abstractmethod
    def made_of(cls, value: object) -> Subject:
        """The subject for the first argument of a law, which may be a subject already."""

    @abstractmethod
    def plain(self, case: Any, fit: Fit) -> Pairs:
        """A plain run of a case."""

    def alone(self, case: Any, fit: Fit) -> Pairs:
        """A plain run of a case; laws that need the same run share it while :attr:`runs` is a dict."""
        runs = {} if self.runs is None else self.runs
        key = repr(case), id(getattr(case, "problem", None)), id(fit)
        if key not in runs:
            runs[key] = self.plain(case, fit)
        return runs[key]

    def reproduction(self, law: str, case: object, *, standard: bool) -> str:
        """Code that tries a law on this subject and one case; with ``standard=False`` it passes ``fit=fit``."""
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


def drawn_from(problems: Problems = None, plans: SearchStrategy[Plan] | None = None) -> Draw:
    """Cases of these problems and plans; None: of all built-in problems.

    Raises:
        ArgumentError, ArgumentTypeError: unknown or no problems, or plans that are not a strategy.
    """
    if plans is not None and not isinstance(plans, SearchStrategy):
        raise ArgumentTypeError(
            f"plans={plans!r} is not a strategy: write plans=testing.plans(max_batches=3), or "
            "plans=hypothesis.strategies.just(plan)."
        )
    listed = as_problems(tuple(PROBLEMS.values()) if problems is None else problems)
    return lambda law: law.cases(listed, plans)


class AlgorithmSubject(Subject):
    """Algorithms on trial.

    Args:
        value: a function that makes an algorithm (or a composition, or a list of them); an algorithm, which is copied
            as it is now; None for no algorithm, if the loop itself is on trial.
        problems, plans: of the cases, as in :func:`pure_loop.testing.check_algorithm`.

    Attributes:
        make: makes fresh instances, which share nothing.
        names: the names of the algorithms.

    Raises:
        ArgumentTypeError: ``value`` is not, and does not make, an algorithm.

    >>> import pure_loop as pl
    >>> subject = AlgorithmSubject(lambda: pl.algorithms.ema(half_life="10ba"))
    >>> subject.name, len(subject.make())
    ('ema', 1)
    """

    kind = "algorithm"
    laws = "testing.laws"

    def __init__(self, value: object, problems: Problems = None, plans: SearchStrategy[Plan] | None = None) -> None:
        self.make = _maker(value)
        with unchanged():
            result = self.make()
        self.names = tuple(algorithm.name for algorithm in result)
        self.called = "None" if value is None else "make_algorithm"
        super().__init__(
            " + ".join(self.names) or "the loop",
            ((algorithm.name, event) for algorithm in result for event in algorithm.handlers),
            drawn_from(problems, plans),
            "" if value is None else assigned(self.called, value),
        )

    @classmethod
    def made_of(cls, value: object) -> AlgorithmSubject:
        return value if isinstance(value, cls) else cls(value)

    def plain(self, case: Case, fit: Fit) -> Pairs:
        return case.run(self.make(), fit=fit)


def _maker(value: object) -> Callable[[], tuple[Algorithm, ...]]:
    if value is None:
        return lambda: ()
    if isinstance(value, Algorithm | Composition):
        copy = fresh_copies(value)
        return lambda: flatten(copy())
    if isinstance(value, Iterable) and not isinstance(value, str):
        makers = [_maker(item) for item in value]
        return lambda: tuple(algorithm for maker in makers for algorithm in maker())
    if isinstance(value, type) or not callable(value):
        raise ArgumentTypeError(
            f"{value!r} of type {type(value).__name__} is neither an algorithm nor a function that makes one: write "
            "check_algorithm(lambda: my_algorithm(strength=0.3))."
        )
    name = getattr(value, "__name__", type(value).__name__)

    def make() -> tuple[Algorithm, ...]:
        try:
            result = value()
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the call itself
                raise ArgumentTypeError(
                    f"{name} makes no algorithm without arguments: if it is a function of a State, write "
                    f"pl.algorithm(Event.BATCH_END)({name}); if it makes one, lambda: {name}(...)."
                ) from None
            error.add_note(f"raised by {name}(), which is called without arguments to make an algorithm")
            raise
        if result is None or (isinstance(result, Iterable) and not result):
            raise ArgumentTypeError(
                f"the factory {name} returned {result!r}, not an algorithm: does it lack a `return`? Write "
                "lambda: my_algorithm(strength=0.3)."
            )
        if callable(result) and not isinstance(result, Algorithm | Composition):
            inner = getattr(result, "__name__", type(result).__name__)
            raise ArgumentTypeError(
                f"the factory {name} returned the function {inner}, not an algorithm: call it too, lambda: "
                f"{inner}(...). If {inner} is a function of a State, bind it to an event: "
                f"pl.algorithm(Event.BATCH_END)({inner})."
            )
        try:
            return flatten(result)
        except PureLoopError as error:
            raise ArgumentTypeError(
                f"the factory {name} returned {result!r} of type {type(result).__name__}; it must return an algorithm, "
                f"a composition, or a list of algorithms: {error}"
            ) from None

    return make


def fresh_copies(algorithm: T) -> Callable[[], T]:
    """A function that makes copies of an algorithm as it is now, closures included.

    Raises:
        MissingExtraError: cloudpickle is not installed.
        ArgumentError: the algorithm can't be copied.
    """
    try:
        cloudpickle = import_module("cloudpickle")
    except ImportError:
        raise MissingExtraError(
            "an algorithm object is copied with cloudpickle for each run, which is not installed: "
            "pip install 'pure_loop[testing]', or give a function that makes the algorithm."
        ) from None
    try:
        data = cloudpickle.dumps(algorithm)
        cloudpickle.loads(data)
    except Exception as error:  # any error of the __reduce__ of an object in a closure
        raise ArgumentError(
            f"{algorithm!r} can't be copied ({type(error).__name__}: {error}), and every run needs a fresh instance: "
            "give a function that makes it, check_algorithm(lambda: my_algorithm(strength=0.3))."
        ) from error
    return lambda: cloudpickle.loads(data)


def imported(value: object) -> tuple[str, str] | None:
    """The import statement of a function or a class, and the expression for it; None if it can't be imported.

    >>> imported(fresh_copies)
    ('from pure_loop.testing.subject import fresh_copies', 'fresh_copies')
    """
    name = getattr(value, "__qualname__", "")
    module = getattr(value, "__module__", "")
    if name and "<" not in name and module and module != "__main__":
        return f"from {module} import {name.partition('.')[0]}", name
    return None


def assigned(name: str, value: object) -> str:
    """Code that assigns the checked object to a name; ``...``, to be filled in, if it can't be imported."""
    result = imported(value)
    return f"{name} = ...  # the object that was checked" if result is None else f"{result[0]}\n\n{name} = {result[1]}"
