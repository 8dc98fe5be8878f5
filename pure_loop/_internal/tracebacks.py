"""Tracebacks of errors: in which module of the model an error was raised, and which frames its reader is shown."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from types import TracebackType
from typing import Any

import attrs
from torch import nn

from pure_loop._internal.frames import callers, frame_at, variable
from pure_loop._internal.hints import advice_of_torch
from pure_loop.errors import PureLoopError

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_GENERATED = "<attrs generated methods pure_loop"
# What the package draws and handles signals with: where Ctrl-C comes while it does.
_BETWEEN = {"rich", *sys.stdlib_module_names}


def entries_of(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """The entries of a traceback, the innermost one last."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def is_own(filename: str) -> bool:
    """Whether code of this file is the package's."""
    return filename.startswith((_PACKAGE, _GENERATED))


def user_place() -> tuple[str, int]:
    """The file and the line of the innermost caller that is not the package's."""
    frame = next((frame for frame in callers(frame_at(1)) if not is_own(frame.f_code.co_filename)), None)
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def hide_own(error: BaseException) -> None:
    """Take the package's frames out of a traceback, so that the last line is one of the user's, or of what that calls.

    An error that is none of the package's own and was raised by a line of the package is a fault of it, and keeps its
    traceback. So does every error with ``PURE_LOOP_TRACEBACKS=full`` in the environment. Called in an ``except`` block
    that ends with ``raise``, which adds no entry: the frame of the block is hidden, too. An error of torch's that is
    known has a note that says what to write.
    """
    _advise(error)
    entries = list(entries_of(error.__traceback__))
    if not entries or os.environ.get("PURE_LOOP_TRACEBACKS") == "full":
        return
    interrupt = isinstance(error, KeyboardInterrupt)
    if not interrupt and not isinstance(error, PureLoopError) and is_own(entries[-1].tb_frame.f_code.co_filename):
        return
    remaining = None
    for entry in reversed(entries):
        frame = entry.tb_frame
        between = interrupt and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN
        if not between and not is_own(frame.f_code.co_filename):
            remaining = TracebackType(remaining, frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = remaining


def _advise(error: BaseException) -> None:
    if not isinstance(error, Exception) or isinstance(error, PureLoopError):
        return
    try:
        message = str(error)
    except Exception:  # of the user's class, whose error is the one to show
        return
    notes = getattr(error, "__notes__", [])
    advice = advice_of_torch(message, notes)
    if advice is not None and advice not in notes:
        error.add_note(advice)


class OwnHidden(AbstractContextManager[None]):
    """What raises inside is passed on without the package's frames; see :func:`hide_own`."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            hide_own(error)


OWN_HIDDEN = OwnHidden()


@attrs.frozen
class RaisedIn:
    """The innermost module in whose forward an error was raised.

    Attributes:
        path: in the model; "" is the model.
        module: itself.
        inputs: the positional and keyword arguments of its call; None: not known.
    """

    path: str
    module: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None

    @classmethod
    def of(cls, error: BaseException) -> RaisedIn | None:
        """Read from the traceback of an error in the frame that handles it; None: it was raised in no module."""
        outermost, innermost, inputs = None, None, None
        # Not of that frame, which runs: while a profiler is set, a copy of its variables would keep the error.
        for entry in islice(entries_of(error.__traceback__), 1, None):
            frame = entry.tb_frame
            module = variable(frame, "self")
            if not isinstance(module, nn.Module):
                # The model itself, as the code that calls a user's function with it has it.
                module = variable(frame, "module") if is_own(frame.f_code.co_filename) else None
                outermost = outermost or (module if isinstance(module, nn.Module) else None)
                continue
            outermost = module if outermost is None else outermost
            if module is not innermost:
                innermost, inputs = module, None
            if inputs is None and frame.f_code.co_name == "_call_impl":
                args, kwargs = variable(frame, "args"), variable(frame, "kwargs")
                inputs = (args, kwargs) if isinstance(args, tuple) and isinstance(kwargs, dict) else None
        if innermost is None or outermost is None:
            return None
        path = next((name for name, module in outermost.named_modules() if module is innermost), "")
        return cls(path, innermost, inputs)

    def __str__(self) -> str:
        """
        >>> str(RaisedIn("4", nn.Linear(9, 3), None)), str(RaisedIn("", nn.Sequential(nn.ReLU()), None))
        ("'4', Linear(9, 3)", 'the model, Sequential')
        """
        settings = re.sub(r"\b(in|out)\w*_features=|, bias=True$", "", self.module.extra_repr())
        name = type(self.module).__name__
        settings = f"({settings})" if settings and len(settings) <= 100 and settings.isprintable() else ""
        return f"{repr(self.path) if self.path else 'the model'}, {name}{settings}"
