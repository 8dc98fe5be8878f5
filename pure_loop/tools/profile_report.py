"""The times of a profile: spans, each with the time that no inner one has; rows, a table, and a trace."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar, cast

import attrs
import torch

from pure_loop._internal.arguments import check_choice
from pure_loop._internal.pytree import Batch
from pure_loop._internal.reprs import columns, table
from pure_loop.loop.driver import Script
from pure_loop.state import State

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
        torch_profiler: torch.profiler.profile | None = None,
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
        self._open: list[tuple[Key, int, torch.profiler.record_function | None]] = []

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
        self.stopped = instant = self._now()
        self._pass(instant)
        for key, started, scope in reversed(self._open):
            self._close(key, started, instant, scope)
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
        instant = self._now()
        self._pass(instant)
        self.calls[key] = self.calls.get(key, 0) + (not self._open or self._open[-1][0] != key)
        scope = None
        if self.torch_profiler is not None:
            scope = torch.profiler.record_function(str(key))
            scope.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((key, instant, scope))

    def leave(self) -> None:
        if not self._open:
            return  # the profile ended inside
        instant = self._now()
        self._pass(instant)
        key, started, scope = self._open.pop()
        self._close(key, started, instant, scope)

    def _close(self, key: Key, started: int, ended: int, scope: torch.profiler.record_function | None) -> None:
        if scope is not None:
            scope.__exit__(None, None, None)
        if self.keeps_spans:
            self.spans.append((key, started - self.started, ended - started))

    def _pass(self, instant: int) -> None:
        """The time since the last call is of the innermost span."""
        passed, self._last = instant - self._last, instant
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
        """A function, each call of which is a span; ``key`` may be a function of its arguments."""

        @functools.wraps(function)
        def called(*args: object, **kwargs: object) -> T:
            if not self.recording:
                return function(*args, **kwargs)
            self.enter(key if isinstance(key, Key) else key(*args, **kwargs))
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return called

    def timed_script(self, key: Key, script: Callable[..., Script]) -> Callable[..., Script]:
        """A generator function, timed: a span for each time that it runs."""

        def called(*args: object) -> Script:
            # No variable refers to a State while the generator waits: a reference would cost a copy.
            pairs = script(*args)
            sent: list[State] = []
            del args
            advance = self.timed(key, lambda: pairs.send(sent.pop()) if sent else next(pairs))
            try:
                while True:
                    try:
                        sent.append((yield advance()))
                    except StopIteration as stop:
                        return cast("State", stop.value)
            finally:
                pairs.close()

        return called


class TimedBatches:
    """The batches of an epoch, each of which is a span; all else is theirs."""

    def __init__(self, batches: object, next_batch: Callable[[], object]) -> None:
        self._batches, self._next = batches, next_batch

    @classmethod
    def of(cls, batches: object, key: Key, recorder: Recorder) -> TimedBatches:
        return cls(batches, recorder.timed(key, functools.partial(next, batches)))

    def __iter__(self) -> TimedBatches:
        return self

    def __next__(self) -> Batch:
        return self._next()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


_KINDS = ("kind", "name", "event")
# Rows of a smaller share are shown as one; `rows` has them all.
_SMALLEST = 0.001
_HEAD = ("", "event", "calls", "ms a batch", "share")


@attrs.frozen
class Row:
    """Where time went.

    Attributes:
        kind: ``"stage"``, ``"data"``, ``"algorithm"``, ``"callback"`` or ``"logger"``.
        name: of the stage, algorithm, callback class or source of data.
        event: at which an algorithm or an observer was called; "" for others.
        calls: how often.
        seconds: without those of rows inside it.
        share: of all seconds, from 0 to 1.
    """

    kind: str
    name: str
    event: str
    calls: int
    seconds: float
    share: float


@attrs.frozen(eq=False, repr=False)
class Profile:
    """What :func:`pl.profile <pure_loop.tools.profile>` measured; a notebook or a terminal shows it as a table.

    Attributes:
        rows: where time went, the longest first.
        seconds: that the measured batches took, evaluations and checkpoints between them included.
        batches: how many were measured.
        unattributed: seconds of no row: the loop itself, and what it does between stages.
        device: of the parameters.
        synchronized: whether rows have the time of their kernels; else, on an accelerator, that of launching them.
        compiled: whether steps were compiled: what algorithms do is in ``compiled step`` then.
        torch: the ``torch.profiler.profile`` that ran meanwhile: ``report.torch.key_averages().table()``; or None.
    """

    rows: tuple[Row, ...]
    seconds: float
    batches: int
    unattributed: float
    device: torch.device
    synchronized: bool
    compiled: bool
    torch: Any = None

    @classmethod
    def of(cls, recorder: Recorder, device: torch.device, *, compiled: bool) -> Profile:
        """The report of a recorder that is over."""
        total = max(recorder.stopped - recorder.started, 1)
        rows = [
            Row(*key, recorder.calls.get(key, 0), nanoseconds / 1e9, nanoseconds / total)
            for key, nanoseconds in recorder.nanoseconds.items()
        ]
        return cls(
            rows=tuple(sorted(rows, key=lambda row: -row.seconds)),
            seconds=total / 1e9,
            batches=recorder.finished - recorder.warmup,
            unattributed=recorder.unattributed / 1e9,
            device=device,
            synchronized=recorder.synchronize,
            compiled=compiled,
            torch=recorder.torch_profiler,
        )

    def by(self, what: Literal["kind", "name", "event"]) -> dict[str, float]:
        """Seconds by kind, by name or by event, the most first; ``""``: of no event.

        >>> row = Row("stage", "forward", "", 2, 0.5, 0.5)
        >>> report = Profile((row, attrs.evolve(row, name="loss", seconds=0.25)), 1.0, 2, 0.25, "cpu", False, False)
        >>> report.by("kind")
        {'stage': 0.75}
        """
        check_choice("what", what, _KINDS, where="Profile.by")
        result: dict[str, float] = {}
        for row in self.rows:
            key = getattr(row, what)
            result[key] = result.get(key, 0.0) + row.seconds
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    def table(self) -> list[dict[str, object]]:
        """The rows as dicts, for ``pandas.DataFrame(report.table())``."""
        return [attrs.asdict(row) for row in self.rows]

    def __repr__(self) -> str:
        lines = columns([_HEAD, *self._cells()], left=[0, 1])
        return "\n".join([self._title(), "", *(f"  {line}" for line in lines), *self._notes()])

    def _repr_html_(self) -> str:
        notes = " ".join(note.strip() for note in self._notes() if note)
        return table(self._cells(), _HEAD, " ".join([self._title() + ".", notes]).strip())

    def _title(self) -> str:
        per_batch = self.seconds / max(self.batches, 1)
        many = f"{self.batches} batch{'' if self.batches == 1 else 'es'}"
        return f"profile: {many} in {self.seconds:.3g} s, {1e3 * per_batch:.3g} ms a batch, on {self.device}"

    def _cells(self) -> list[list[str]]:
        large = [row for row in self.rows if row.share >= _SMALLEST]
        small = [row for row in self.rows if row.share < _SMALLEST]
        if len(small) < 2:  # which would not make it shorter
            large, small = list(self.rows), []
        rest = [Row("", "unattributed", "", 0, self.unattributed, self.unattributed / self.seconds)]
        if small:
            seconds, count = sum(row.seconds for row in small), sum(row.calls for row in small)
            rest.insert(0, Row("", f"{len(small)} others", "", count, seconds, seconds / self.seconds))
        cells: list[list[str]] = []
        for row in (*large, *rest):
            milliseconds = 1e3 * row.seconds / max(self.batches, 1)
            name = f"{row.kind} {row.name}" if row.kind in ("algorithm", "callback", "logger") else row.name
            calls = f"{row.calls:,}" if row.calls else ""
            cells.append([name, row.event, calls, f"{milliseconds:.3f}", f"{100 * row.share:.1f}%"])
        return cells

    def _notes(self) -> list[str]:
        notes = []
        if str(self.device).partition(":")[0] != "cpu" and not self.synchronized:
            notes.append("  Times are the host's: kernels run on after a stage returns. With them: synchronize=True.")
        if self.compiled:
            notes.append("  Steps are compiled: algorithms inside a step are part of its graphs.")
        return ["", *notes] if notes else []


def chrome_trace(spans: Iterable[tuple[Key, int, int]]) -> bytes:
    """Spans in the Trace Event Format, JSON, as chrome://tracing and Perfetto read it.

    Args:
        spans: of each its key, and nanoseconds: when it began, and how long it took.
    """
    process = os.getpid()
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "pure_loop"}},
        {"ph": "M", "name": "thread_name", "pid": process, "tid": 0, "args": {"name": "the loop"}},
    ]
    # By their beginnings, the longer one first: the one that others are inside.
    for key, started, took in sorted(spans, key=lambda span: (span[1], -span[2])):
        events.append(
            {
                "ph": "X",
                "name": str(key),
                "cat": key.kind,
                "ts": started / 1e3,  # microseconds
                "dur": took / 1e3,
                "pid": process,
                "tid": 0,
                "args": {"event": key.event} if key.event else {},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
