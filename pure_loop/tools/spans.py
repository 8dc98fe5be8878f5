"""Where time goes: spans that follow one another or nest, each with the time that no inner one has."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

__all__ = ["Key", "Recorder", "TimedBatches"]

T = TypeVar("T")


class Key(NamedTuple):
    """What a span is of.

    Attributes:
        kind: ``"stage"``, ``"algorithm"``, ``"callback"``, ``"logger"`` or ``"data"``.
        name: of the stage, the algorithm, the class of the callback.
        event: at which an algorithm or an observer was called; "": none.
    """

    kind: str
    name: str
    event: str = ""

    def __str__(self) -> str:
        return f"{self.name} at {self.event}" if self.event else self.name


class Recorder:
    """Times spans of one thread, from the end of the warmup to the last batch of a profile.

    Every nanosecond belongs to the innermost span that is open, or to none: ``sum(seconds) + unattributed`` is the time
    that passed.

    Args:
        warmup: batches before the first that counts.
        batches: how many count; None: all that follow.
        synchronize: whether each span waits for the device at its beginning and its end.
        keeps_spans: whether ``spans`` is written, for a trace.
        torch_profiler: one of ``torch.profiler``, which runs meanwhile, or None.
    """

    def __init__(
        self,
        *,
        warmup: int,
        batches: int | None,
        synchronize: bool = False,
        keeps_spans: bool = False,
        torch_profiler: Any = None,
    ) -> None:
        self.warmup, self.batches, self.keeps_spans = warmup, batches, keeps_spans
        self.synchronize = synchronize
        self.torch_profiler = torch_profiler
        self.recording = self.over = False
        self.finished = 0  # batches, those of the warmup included
        self.started = self.stopped = self._last = 0
        self.unattributed = 0
        self.nanoseconds: dict[Key, int] = {}
        self.calls: dict[Key, int] = {}
        self.spans: list[tuple[Key, int, int]] = []
        self._open: list[tuple[Key, int, Any]] = []

    def begin(self) -> None:
        """The warmup is over."""
        if self.torch_profiler is not None:
            self.torch_profiler.start()
        self.recording = True
        self.started = self._last = self._now()

    def end(self) -> None:
        """No span that ends later counts; spans that are open count up to here."""
        if not self.recording:
            return
        self.stopped = now = self._now()
        self._pass(now)
        for key, started, scope in reversed(self._open):
            self._close(key, started, now, scope)
        self._open.clear()
        self.recording, self.over = False, True
        if self.torch_profiler is not None:
            self.torch_profiler.stop()

    def count_batches(self, number: int = 1) -> None:
        """Batches have ended."""
        if self.over:
            return
        self.finished += number
        if not self.recording and self.finished >= self.warmup:
            self.begin()
        elif self.batches is not None and self.finished >= self.warmup + self.batches:
            self.end()

    def enter(self, key: Key) -> None:
        now = self._now()
        self._pass(now)
        self.calls[key] = self.calls.get(key, 0) + (not self._open or self._open[-1][0] != key)
        scope: Any = None
        if self.torch_profiler is not None:
            scope = torch.profiler.record_function(str(key))
            scope.__enter__()
        self._open.append((key, now, scope))

    def leave(self) -> None:
        if not self._open:
            return  # the profile ended inside
        now = self._now()
        self._pass(now)
        key, started, scope = self._open.pop()
        self._close(key, started, now, scope)

    def _close(self, key: Key, started: int, now: int, scope: Any) -> None:
        if scope is not None:
            scope.__exit__(None, None, None)
        if self.keeps_spans:
            self.spans.append((key, started - self.started, now - started))

    def _pass(self, now: int) -> None:
        """The time since the last call is of the innermost span."""
        passed, self._last = now - self._last, now
        if self._open:
            key = self._open[-1][0]
            self.nanoseconds[key] = self.nanoseconds.get(key, 0) + passed
        else:
            self.unattributed += passed

    def _now(self) -> int:
        if self.synchronize:
            torch.accelerator.synchronize()
        return time.perf_counter_ns()

    def timed(self, key: Key | Callable[..., Key], function: Callable[..., T]) -> Callable[..., T]:
        """The same function, each call of which is a span; ``key`` may be a function of its arguments."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> T:
            if not self.recording:
                return function(*args, **kwargs)
            self.enter(key if isinstance(key, Key) else key(*args, **kwargs))
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return called

    def timed_script(self, key: Key, script: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
        """The same of a generator function: a span for each time that it runs."""

        def called(*args: Any) -> Generator[Any, Any, Any]:
            # No variable refers to a State while the generator waits: a reference would cost a copy.
            pairs, sent = script(*args), [None]
            del args
            advance = self.timed(key, lambda: pairs.send(sent.pop()))
            try:
                while True:
                    try:
                        sent.append((yield advance()))
                    except StopIteration as stop:
                        return stop.value
            finally:
                pairs.close()

        return called


class TimedBatches:
    """The batches of an epoch, each of which is a span; all else is theirs."""

    def __init__(self, batches: Any, next_batch: Callable[[], Any]) -> None:
        self._batches, self._next = batches, next_batch

    @classmethod
    def of(cls, batches: Any, key: Key, recorder: Recorder) -> TimedBatches:
        return cls(batches, recorder.timed(key, functools.partial(next, batches)))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
