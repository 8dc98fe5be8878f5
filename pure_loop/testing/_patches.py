"""The loop with a part replaced, or some lines of its source, only while its own code runs."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from textwrap import dedent
from typing import TypeAlias, TypeVar
from unittest.mock import patch

from pure_loop._internal.frames import look_through
from pure_loop.entry.fit import fit as library_fit
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.testing.case import Fit

F = TypeVar("F", bound=Callable[[], object])
Pairs: TypeAlias = Iterator[tuple[Event, State]]
Replacement: TypeAlias = tuple[object, str, object]
"""An object, the name of its attribute, and what takes its place."""

fit: Callable[..., Pairs] = library_fit


def breaking(table: dict[F, str]) -> Callable[[str], Callable[[F], F]]:
    """What puts a function into a table of those that break a law, by the name of the law."""

    def breaks(law: str) -> Callable[[F], F]:
        def register(make: F) -> F:
            table[make] = law
            return make

        return register

    return breaks


def while_patched(*replacements: Replacement) -> Fit:
    """``fit`` with something replaced, only while its own code runs (not while the law's does)."""

    def wrong(*args: object, **kwargs: object) -> Pairs:
        with patched(replacements):
            stream = fit(*args, **kwargs)
        return continued(stream)

    def continued(stream: Pairs) -> Pairs:
        pairs: list[tuple[Event, State]] = []
        while True:
            with patched(replacements):
                pairs.extend(islice(stream, 1))
            if not pairs:
                return
            yield pairs.pop()  # kept in no variable, so that a step may write in place

    look_through(continued.__code__)
    return wrong


def patched(replacements: tuple[Replacement, ...]) -> ExitStack:
    """The replacements, until the context ends."""
    with ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(patch.object(*replacement))
        return stack.pop_all()


def edited(script: Callable[..., object], before: str, after: str) -> Callable[..., object]:
    """A script of the loop with some lines of its source replaced."""
    source = dedent(inspect.getsource(script))
    if source.count(before) != 1:
        raise ValueError(f"the source of {script.__name__} has {source.count(before)} times {before!r}, not once")
    source = source.replace(before, after)
    name = f"<{script.__name__} with {after.strip()!r}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    scope: dict[str, Callable[..., object]] = {}
    exec(compile(source, name, "exec"), vars(sys.modules[script.__module__]), scope)
    return scope[script.__name__]
