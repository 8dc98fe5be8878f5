"""Progress: a table and a bar around a stream, which passes on the same pairs and touches nothing.

``pl.progress(stream)`` is a generator between the stream and the loop's body. It looks at the end of
batches and at evaluations, redraws by the clock, has no thread, and never waits for the device while
training runs: values are copied behind the computation and shown when they have arrived.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TextIO

from pure_loop._internal.arguments import check_number, refusal
from pure_loop._internal.closing import Closing, call_all
from pure_loop._internal.processes import here, rank
from pure_loop._internal.suggestions import teaching
from pure_loop._internal.tracebacks import OWN_HIDDEN
from pure_loop.event import Event
from pure_loop.loop.stream import Stream, end_by, pairs_of, refuse_no_stream
from pure_loop.progress.estimate import Facts
from pure_loop.progress.screens import Lines, Notebook, Screen
from pure_loop.progress.tracker import Tracker
from pure_loop.state import State

if TYPE_CHECKING:
    from rich.console import Console

Pairs = Generator[tuple[Event, State], None, None]


@teaching
def progress(
    stream: Iterable[tuple[Event, State]],
    *,
    description: str | None = None,
    refresh_seconds: float = 0.1,
    file: TextIO | None = None,
) -> Stream:
    """Pass on the pairs of a stream, and show how far it is.

    In a terminal (with the extra ``pure_loop[progress]``) and in a notebook: a table with a row for each epoch, and
    a bar below it. Elsewhere: a plain line about every 10 seconds, at every end of an epoch and for every evaluation;
    in a terminal without the extra, too, after a hint. What the loop's body prints appears above the bar. When the
    loop is left or raises, the bar stays as it was, says so, and the stream is closed. Of several ranks the first one
    alone draws.

    A row has the mean loss of the epoch, weighed by samples, the metrics of training, those of each evaluator, the
    learning rate of the last batch and the seconds since the row before. The best value of an evaluator's metric so
    far is marked, if its name tells whether less or more is better. A run with a duration that is not in epochs has a
    row for each evaluation as well. The optimizer and the evaluators are known of a stream that ``fit`` returned, not
    of a generator around it.

    Args:
        stream: what ``fit``, ``evaluate``, ``predict`` or ``drive`` gave.
        description: what stands before it; None: ``train``, ``evaluate`` or ``predict``.
        refresh_seconds: the shortest time between two drawings.
        file: where to; None: standard error, or the notebook.

    Raises:
        ArgumentTypeError, ArgumentError: an argument that can't be used.

    >>> import sys, torch, pure_loop as pl
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1, bias=False), data, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep")
    >>> for event, state in progress(stream, file=sys.stdout):
    ...     pass
    train  epoch 1/2  batch 3/6  50%  loss 1.000  ... samples/s  0:00 left
    train  epoch 2/2  batch 6/6  100%  loss 1.000  ... samples/s  0:00
    train  epoch 2/2  batch 6/6  100%  loss 1.000  ... samples/s  done, 0:00
    """
    refuse_no_stream(stream, "pl.progress")
    if description is not None and not isinstance(description, str):
        raise refusal("description", description, "a text", "progress")
    refresh_seconds = check_number(
        "refresh_seconds", refresh_seconds, least=0, wanted="a finite number of seconds, 0 or more"
    )
    if file is not None and not hasattr(file, "write"):
        raise refusal("file", file, "an open text file, such as sys.stdout, or None", "progress")
    facts = Facts.of(stream)
    if rank() > 0:
        return Stream(_unseen(stream))
    screen = screen_for(file, tuple(facts.evaluators))
    return Stream(_pass_on(stream, Tracker(screen, description, refresh_seconds, facts=facts)))


def _unseen(stream: Iterable[tuple[Event, State]]) -> Pairs:
    """Of several ranks the first one draws."""
    with OWN_HIDDEN, Closing(*([stream.close] if isinstance(stream, Generator) else [])):
        yield from pairs_of(stream, "pl.progress")


def _pass_on(stream: Iterable[tuple[Event, State]], tracker: Tracker) -> Pairs:
    looks = tracker.looks()

    def look(pair: tuple[Event, State]) -> tuple[Event, State]:
        at = looks.get(pair[0])
        if at is not None:
            at(pair[1])
        return pair

    # A child that is forked meanwhile draws nothing.
    finish, close = here(tracker.finish), here(tracker.screen.close)
    ended = [stream.close] if isinstance(stream, Generator) else []
    pairs = pairs_of(stream, "pl.progress")
    with OWN_HIDDEN, Closing(close, *ended):
        try:
            # No variable of this generator has the State while the loop's body does, or the next step costs a copy.
            yield from map(look, pairs)
        except BaseException as error:
            ending = _WORDS.get(type(error)) or f"failed: {type(error).__name__}"
            interrupted = [partial(end_by, pairs, error)] if isinstance(error, KeyboardInterrupt) else []
            call_all([partial(finish, ending), *interrupted], error)
            raise
        finish("done")


_WORDS: dict[type[BaseException], str] = {GeneratorExit: "stopped", KeyboardInterrupt: "interrupted"}


def screen_for(file: TextIO | None, labels: Sequence[str] = ()) -> Screen:
    """The screen for a file.

    Args:
        file: None: standard error, or the notebook.
        labels: those of the evaluators, in the order of their columns.
    """
    target = sys.stderr if file is None else file
    if _is_terminal(target):
        if not _installed("rich"):
            _hint(target)
            return Lines(target)
        console = _console(target)
        # Inside another bar this one prints its lines above that.
        if console.is_interactive and not hasattr(target, "rich_proxied_file"):
            from pure_loop.progress.terminal import Bar

            return Bar(console, labels)
    elif file is None and _in_notebook():
        return Notebook(labels)
    return Lines(target)


def _is_terminal(file: TextIO) -> bool:
    return hasattr(file, "isatty") and bool(file.isatty()) and os.environ.get("TERM") not in ("dumb", "unknown")


def _console(file: TextIO) -> Console:
    from rich.console import Console

    return Console(file=file, highlight=False)


_hinted: list[bool] = []


def _hint(file: TextIO) -> None:
    """Once in a process: what a bar needs."""
    if not _hinted:
        _hinted.append(True)
        print('pl.progress: for a table and a live bar: pip install "pure_loop[progress]"', file=file, flush=True)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")


def _installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None
