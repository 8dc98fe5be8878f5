"""Checks: all laws that apply to an algorithm, loop, callback or script, tried on cases that Hypothesis draws."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import SkipTest

import attrs
from hypothesis.strategies import SearchStrategy

from pure_loop._internal.arguments import check_integer
from pure_loop._internal.suggestions import teaching
from pure_loop.entry.fit import fit as library_fit
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.loop.driver import Script
from pure_loop.order import Plan
from pure_loop.stages import Stages
from pure_loop.state import State
from pure_loop.testing._examples import chosen_from, drawn_from
from pure_loop.testing._surroundings import unchanged
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.law import Law, try_shared
from pure_loop.testing.laws import OF_ALGORITHMS, OF_CALLBACKS, OF_LOOPS, OF_SCRIPTS, UNAVAILABLE
from pure_loop.testing.laws.of_callbacks import CallbackSubject
from pure_loop.testing.laws.of_scripts import CUSTOMARY, Scripted
from pure_loop.testing.ranks.processes import close_shared_pools
from pure_loop.testing.report import CheckFailed, LawViolation, Outcome, Report, Result
from pure_loop.testing.subject import AlgorithmSubject, Problems, Subject

# If one of these laws is violated, the process was changed, and not only a State.
_ABOUT_PROCESS = ("purity", "memory", "value", "determinism", "closing")
_NONE = Outcome("", "", "not run")
_EXAMPLES, _THOROUGH = 10, 20
_UNASKED = "thorough=True asks it"
_RUNS = 3  # that a law makes of a case, on average


@attrs.define
class Trial:
    """The laws for one subject, and their outcomes so far.

    Attributes:
        subject: the subject on trial.
        laws: the laws, each after those that it rests on.
        unavailable: names of laws that can't be tried, each with the reason.
        fit: the loop.
        expected_failures, skip, max_examples, thorough, quiet: as in :func:`pure_loop.testing.check_algorithm`.

    Raises:
        ArgumentError, ArgumentTypeError: ``expected_failures``, ``skip`` or ``max_examples`` can't be used.
    """

    subject: Subject
    laws: Sequence[Law]
    unavailable: Mapping[str, str]
    fit: Fit
    expected_failures: object
    skip: object
    max_examples: int | None
    thorough: bool = False
    quiet: bool = False
    _count: int = attrs.field(init=False)
    # Cases of all problems: the first law, as most of them, serves every problem.
    _drawn: list[object] = attrs.field(factory=list, init=False)
    _shared: dict[object, list[object]] = attrs.field(factory=dict, init=False)
    _expected: dict[str, str] = attrs.field(init=False)
    _skipped: dict[str, str] = attrs.field(init=False)
    _outcomes: dict[str, Outcome] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        names = set(self.names)
        self._expected = _reasons("expected_failures", self.expected_failures, names)
        self._skipped = _reasons("skip", self.skip, names)
        both = self._expected.keys() & self._skipped.keys()
        if both:
            raise ArgumentError(
                f"{sorted(both)} are in expected_failures and in skip; write them in one of the two only."
            )
        usual = _THOROUGH if self.thorough else _EXAMPLES
        self._count = usual if self.max_examples is None else check_integer("max_examples", self.max_examples, least=1)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all laws, including those that can't be tried."""
        return (*(law.name for law in self.laws), *self.unavailable)

    def outcome(self, name: str) -> Outcome:
        """Try a law, once."""
        if name not in self._outcomes:
            self._outcomes[name] = self._try(name)
        return self._outcomes[name]

    def report(self) -> Report:
        """Try all laws.

        Raises:
            CheckFailed: a law fails, or there is another problem; holds the report.
        """
        # Runs are shared only while laws are tried: they hold many States.
        self.subject.runs = {}
        try:
            self._say(self._announcement())
            for name in self.names:
                self._say(self.outcome(name).line(max(map(len, self.names))))
        finally:
            self.subject.runs = None
            self._renew_processes()
        never = tuple(key for key in self.subject.bound if not self.subject.fired[key])
        outcomes = tuple(map(self.outcome, self.names))
        report = Report(self.subject.name, outcomes, dict(self.subject.fired), never, self.never_ran())
        if not report.ok:
            raise CheckFailed(report)
        return report

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def _announcement(self) -> str:
        """How many laws will be tried, and about how long that takes, from plain runs of the examples."""
        asked = {law: cases for law in self.laws if not isinstance(cases := self._cases(law), str)}
        text = f"{self.subject.name}: {len(asked)} laws, {self._count} examples each"
        taken: list[float] = []
        try:
            for case in self.examples(*next(iter(asked.items()))) if asked else ():
                began = time.process_time()
                with unchanged():
                    self.subject.alone(case, self.fit)
                taken.append(time.process_time() - began)
        except Exception:  # of the code on trial: a law reports it, and until then nothing is known of the time
            return text
        # Without the longest, as the first one waits for imports.
        seconds = (sum(taken) - max(taken, default=0.0)) / max(1, len(taken) - 1) * _RUNS
        about = sum(seconds * round(self._count * law.share) + law.costs for law in asked)
        return f"{text}, about {about:.0f} s"

    def _cases(self, law: Law) -> SearchStrategy[Any] | str:
        """The cases on which it is tried, or the reason why it isn't."""
        cases = self._skipped[law.name] if law.name in self._skipped else self.subject.drawn(law)
        return _UNASKED if law.costs and not self.thorough and not isinstance(cases, str) else cases

    def examples(self, law: Law, cases: SearchStrategy[Any]) -> list[object]:
        """Those on which it is tried; laws of the same problems share them."""
        if law.serves not in self._shared:
            if not self._drawn and not isinstance(every := self.subject.drawn(self.laws[0]), str):
                self._drawn = drawn_from(every, self._count)
            served = [case for case in self._drawn if not isinstance(case, Case) or law.serves(case.problem)]
            enough = served if len(served) >= self._count else drawn_from(cases, self._count)
            self._shared[law.serves] = chosen_from(enough, self._count)
        return self._shared[law.serves][: max(1, round(self._count * law.share))]

    def _renew_processes(self) -> None:
        """End the shared processes if the subject may have changed them in a way that can't be undone."""
        ran = self.subject.on_processes or self.subject.on_worlds
        if ran and any(self._outcomes.get(name, _NONE).violation is not None for name in _ABOUT_PROCESS):
            close_shared_pools()

    def never_ran(self) -> str:
        """The problem of an algorithm that ran in none of the cases; empty if every algorithm ran."""
        if not any(outcome.examples for outcome in self._outcomes.values()):
            return ""
        ran = {name for name, _ in self.subject.fired}
        silent = [name for name in dict.fromkeys(name for name, _ in self.subject.bound) if name not in ran]
        if not silent or not self.subject.watched:
            return ""
        events = ", ".join(event.name for name, event in self.subject.bound if name == silent[0])
        return (
            f"The {self.subject.kind} {silent[0]!r} never ran in the plans that were drawn, so it was not tested. "
            f"It is bound to {events}; perhaps its `when` is false in runs of a few batches. Give it a shorter "
            "interval, or longer plans: plans=testing.plans(...)."
        )

    def _try(self, name: str) -> Outcome:
        law = next((law for law in self.laws if law.name == name), None)
        if law is None:
            return Outcome(name, "", "skipped", reason=self._skipped.get(name, self.unavailable[name]))
        outcome = partial(Outcome, name, law.statement)
        cases = self._cases(law)
        if isinstance(cases, str):
            return outcome("not asked" if cases is _UNASKED else "skipped", reason=cases)
        for before in law.rests_on:
            if before in self.names and self.outcome(before).result in ("FAILED", "not run"):
                return outcome("not run", reason=f"rests on {before}")
        expected = self._expected.get(name, "")
        # Errors of a run are expected where ``order`` is expected to fail, or skipped.
        tolerant = name != "order" and ("order" in self._expected or "order" in self._skipped)
        shared, began = self.examples(law, cases), time.process_time()
        try:
            count = try_shared(law, self.subject, shared, cases, fit=self.fit, tolerant=tolerant)
        except SkipTest as skipped:
            return outcome("skipped", reason=str(skipped))
        except LawViolation as violation:
            result: Result = "expected failure" if expected else "FAILED"
            return outcome(result, violation.examples, expected, violation, time.process_time() - began)
        if not count:
            reason = "every case ended in an error, as expected_failures or skip says of the law `order`"
            return outcome("not run", reason=reason)
        result = "UNEXPECTED PASS" if expected else "passed"
        return outcome(result, count, expected, None, time.process_time() - began)


def _reasons(argument: str, value: object, names: set[str]) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(
            f"{argument}={value!r}: write a dict from the name of each law to the reason: "
            f'{argument}={{"microbatch_invariance": "uses batch statistics"}}.'
        )
    for name, reason in value.items():
        if name not in names:
            raise ArgumentError(f"{argument}: there is no law {name!r}. There are {', '.join(sorted(names))}.")
        if not isinstance(reason, str) or not reason.strip():
            raise ArgumentError(f"{argument}[{name!r}]={reason!r}: write the reason, as a text.")
    return dict(value)


@teaching
def check_algorithm(
    make_algorithm: object,
    *,
    fit: Fit = library_fit,
    problems: Problems = None,
    plans: SearchStrategy[Plan] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int | None = None,
    thorough: bool = False,
    quiet: bool = False,
) -> Report:
    """Try every law on an algorithm, and raise if one doesn't hold.

    Args:
        make_algorithm: a function without arguments that makes a fresh algorithm, a composition or a list of them;
            or an algorithm, which is copied for each run.
        fit: the loop: ``functools.partial(pl.fit, device="cuda")`` tries it on a GPU.
        problems: models and data to train on, by name or as :class:`Problem`; None: all built-in ones.
        plans: a strategy of :class:`pure_loop.order.Plan`; None: :func:`pure_loop.testing.plans`, short ones.
        expected_failures: names of laws that it doesn't keep, each with the reason. Strict: if such a law holds, the
            check fails.
        skip: names of laws that should not be tried, each with the reason.
        max_examples: the number of cases for each law, a quarter of it for ``compile_equality``; None: 10, which are
            chosen to differ much from each other, or 20 with ``thorough=True``.
        thorough: whether the laws are asked, too, that need a compiler or processes: ``compile_equality`` and
            ``world_size``, which together take longer than all others. The report says which were not asked.
        quiet: whether nothing is written to stderr: it gets an estimate of the processor time, and each law's result.

    Returns:
        The results of all laws: ``print(report)`` shows a table.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold, a law holds that was expected to fail, or no handler ever
            ran.
        ArgumentError: an unknown name of a law, or an empty reason.
        ArgumentTypeError: ``make_algorithm`` does not make an algorithm.

    >>> import pure_loop as pl
    >>> report = check_algorithm(lambda: pl.algorithms.sam(rho=0.1), problems="linear", max_examples=2)
    >>> report.ok
    True
    """
    subject = AlgorithmSubject(not_none(make_algorithm), problems, plans)
    return Trial(
        subject, OF_ALGORITHMS, UNAVAILABLE, fit, expected_failures, skip, max_examples, thorough, quiet
    ).report()


@teaching
def check_loop(
    fit: Fit = library_fit,
    *,
    problems: Problems = None,
    plans: SearchStrategy[Plan] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int | None = None,
    thorough: bool = False,
    quiet: bool = False,
) -> Report:
    """Try every law on a loop: a function with the arguments of ``pl.fit`` that yields the same pairs.

    Args:
        fit: the loop.
        problems, plans, expected_failures, skip, max_examples, thorough, quiet: as in :func:`check_algorithm`.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold.

    >>> check_loop(problems="linear", max_examples=1).ok
    True
    """
    subject = AlgorithmSubject(None, problems, plans)
    return Trial(subject, OF_LOOPS, UNAVAILABLE, fit, expected_failures, skip, max_examples, thorough, quiet).report()


def not_none(make_algorithm: object) -> object:
    """The argument; None is refused.

    Raises:
        ArgumentTypeError: it is None, which a law takes as "no algorithm".
    """
    if make_algorithm is None:
        raise ArgumentTypeError(
            "check_algorithm(None): give a function that makes an algorithm, such as lambda: pl.algorithms.sam()."
        )
    return make_algorithm


@teaching
def check_callback(
    make_callback: object,
    *,
    problems: Problems = None,
    plans: SearchStrategy[Plan] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int | None = None,
    thorough: bool = False,
    quiet: bool = False,
) -> Report:
    """Try the laws of callbacks, and raise if one doesn't hold.

    Args:
        make_callback: a function without arguments that makes a fresh callback, logger or function of
            ``(event, state)``.
        problems, plans, expected_failures, skip, max_examples, thorough, quiet: as in :func:`check_algorithm`.

    Returns:
        The results of all laws: ``print(report)`` shows a table.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold.
        ArgumentTypeError: ``make_callback`` does not make a callback.

    >>> import pure_loop as pl
    >>> check_callback(pl.callbacks.SpeedMonitor, problems="linear", max_examples=2).ok
    True
    """
    subject = CallbackSubject(make_callback, problems, plans)
    return Trial(
        subject, OF_CALLBACKS, {}, library_fit, expected_failures, skip, max_examples, thorough, quiet
    ).report()


@teaching
def check_script(
    make_script: Callable[[State], Script],
    start: State | Callable[[int], State],
    *,
    boundaries: Iterable[Event | str] = CUSTOMARY,
    stages: Stages | None = None,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int = 5,
    quiet: bool = False,
) -> Report:
    """Try the laws of scripts, and raise if one doesn't hold.

    Args:
        make_script: makes the generator from the State at which it starts or resumes.
        start: the first State; or a function that makes it from a seed, and is tried with several seeds.
        boundaries: events at which there is a State that the script can resume from.
        stages: the stages for algorithms that take them.
        expected_failures: names of laws that it doesn't keep, each with the reason. Strict: if such a law holds, the
            check fails.
        skip: names of laws that should not be tried, each with the reason.
        max_examples: the number of seeds.
        quiet: as in :func:`check_algorithm`.

    Returns:
        The results of all laws: ``print(report)`` shows a table.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold.
        ArgumentTypeError: ``make_script`` is not a function, or ``start`` is or returns something other than a State.

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
    subject = Scripted(make_script, start, boundaries=boundaries, stages=stages)
    return Trial(subject, OF_SCRIPTS, {}, library_fit, expected_failures, skip, max_examples, quiet=quiet).report()
