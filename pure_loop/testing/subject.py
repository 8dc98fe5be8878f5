"""Subjects: what is on trial, made anew for every run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pure_loop.algorithm import Algorithm, Composition, flatten
from pure_loop.errors import ArgumentError, ArgumentTypeError, MissingExtraError, PureLoopError
from pure_loop.event import Event
from pure_loop.testing.case import Case, Fit, Pairs

__all__ = ["Subject", "fresh_copies"]


class Subject:
    """Algorithms on trial: :meth:`make` gives fresh instances, which share nothing.

    Args:
        given: a function that makes an algorithm (or a composition, or a list of them); an algorithm, which is copied
            as it is now; None for none, where it is the loop that is on trial.

    Attributes:
        name: what to call it.
        names: of the algorithms.
        bound: what they are bound to: pairs of a name and an event.
        fired: how often each ran, where it was looked at.
        watched: whether anybody looked.
        kind: what it is, in a word.
        on_processes: on how many cases real processes ran it.
        runs: those that laws share; None where they don't.
        code: how to make it, for the code that reproduces a failure.

    Raises:
        ArgumentTypeError: something else, or a function that makes something else.

    >>> import pure_loop as pl
    >>> subject = Subject(lambda: pl.algorithms.ema(half_life="10ba"))
    >>> subject.name, len(subject.make())
    ('ema', 1)
    """

    def __init__(self, given: Any) -> None:
        self._make = _maker(given)
        made = self.make()
        self.names = tuple(algorithm.name for algorithm in made)
        self.name = " + ".join(self.names) or "the loop"
        self.bound = tuple((algorithm.name, event) for algorithm in made for event in algorithm.handlers)
        self.fired: Counter[tuple[str, Event]] = Counter()
        self.watched = False
        self.kind = "algorithm"
        self.on_processes = 0
        self.runs: dict[Any, Pairs] | None = None
        self.code = _code(given)

    def make(self) -> tuple[Algorithm, ...]:
        """Fresh instances."""
        return self._make()

    def alone(self, case: Case, fit: Fit) -> Pairs:
        """A run of a case with nothing besides; laws that need the same one share it while :attr:`runs` is a dict."""
        if self.runs is None:
            return case.run(self.make(), fit=fit)
        key = repr(case), id(case.problem), id(fit)
        if key not in self.runs:
            self.runs[key] = case.run(self.make(), fit=fit)
        return self.runs[key]

    def reproduction(self, law: str, case: Any, *, standard: bool) -> str:
        """Code that tries a law on this subject and one case; on another loop than ``pl.fit`` if not ``standard``."""
        arguments = ["make_algorithm" if self.code else "None", "case", *(() if standard else ("fit=fit",))]
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
    except Exception as error:
        raise ArgumentError(
            f"{algorithm!r} can't be copied ({type(error).__name__}: {error}), and every run needs a fresh one: give a "
            "function that makes it, check_algorithm(lambda: my_algorithm(strength=0.3))."
        ) from error
    return lambda: cloudpickle.loads(data)


def _code(given: Any) -> str:
    """How to write the subject in code that reproduces a failure."""
    name = getattr(given, "__qualname__", "")
    module = getattr(given, "__module__", "")
    if given is None:
        return ""
    if name and "<" not in name and module and module != "__main__":
        return f"from {module} import {name.partition('.')[0]}\n\nmake_algorithm = {name}"
    return "make_algorithm = ...  # what was checked"
