"""Operations that are refused while a step is traced, because a graph would hold their results for ever.

Python's and NumPy's global generators give numbers, which would be constants of a graph. torch's can be seeded, and its
state taken and put back: that moves what eager code draws next, and no draw of a graph. The default dtype is no part of
an operation: it may be another one when a graph runs. Distributions check their parameters, which reads numbers out of
tensors: inside a trace the checks pass.

Nothing in the process is replaced: calls are seen by a profiler and by modes, all of which are local to the thread.
"""

from __future__ import annotations

import gc
import importlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pure_loop._internal.frames import calls_watched, frame_at, variable
from pure_loop._internal.torch_private import WRAPPER_OF_FUNCTIONS
from pure_loop.random.seeds import seeds_hosts

__all__ = ["DefaultDtypeError", "GuardedCallError", "trace_guards"]


class GuardedCallError(RuntimeError):
    """A call of this name, which draws from, seeds or reads a global generator."""


class DefaultDtypeError(RuntimeError):
    """An operation under another default dtype than that of the loop."""


@contextmanager
def trace_guards() -> Iterator[None]:
    """Inside, such calls of this thread are errors."""
    calls = _Calls()
    with ExitStack() as stack:
        stack.enter_context(_OneDefaultDtype())
        stack.enter_context(_UncheckedDistributions())
        stack.enter_context(calls_watched(calls.watcher()))
        yield
    if calls.refused is not None:  # and the code that called caught the error
        raise GuardedCallError(calls.refused)


# The generator function of a context manager has the name of that.
_OF_TORCH = frozenset({"manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state", "fork_rng"})
# torch's own code: a checkpointed segment begins again with the state that it began with.
_ALLOWED = frozenset({"torch.random", "torch.utils.checkpoint"})
# Through which a function of torch is called, or a context entered.
_WRAPPERS = frozenset({"contextlib", WRAPPER_OF_FUNCTIONS})
_QUIET = frozenset({*sys.stdlib_module_names, "attr", "attrs", "builtins", "numpy", "optree", "pure_loop", "torch"})
_PYTHON: Any = vars(random)["_inst"]


class _Calls:
    """Sees the calls of functions that are refused.

    Functions of NumPy's are written in Cython, whose calls no profiler sees: there the state of the generator is
    compared before and after a function of a user's. A draw of another thread can't be told from one of that function.

    Attributes:
        refused: the name of the function that was called.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        if (
            "numpy" in sys.modules
        ):  # which imports this module when it is first named: a state must be known before that
            importlib.import_module("numpy.random")
        self._numpy = _numpy_state()
        # What they raise is lost, and they run wherever an object is made.
        self._of_collector = {getattr(callback, "__code__", None) for callback in gc.callbacks}

    def watcher(self) -> Callable[[FrameType, str, Any], None]:
        """The profiler: a function whose first lines are all that runs at most calls, because tracing makes many."""
        quiet: set[str] = set()  # modules in which nothing is refused

        def watch(frame: FrameType, event: str, argument: Any) -> None:
            if event == "c_call":
                if getattr(argument, "__self__", None) is _PYTHON:
                    self._refuse_draw_of_python(frame, argument)
            elif event == "call" or event == "return":
                module = frame.f_globals.get("__name__", "")
                if module in quiet:
                    return
                if module != "torch.random" and _is_quiet(module):
                    quiet.add(module)
                elif frame.f_code not in self._of_collector:
                    self._see(frame, event, module)

        return watch

    def _refuse_draw_of_python(self, frame: FrameType, function: Any) -> None:
        if not seeds_hosts.get():
            name, caller = _outermost(frame, function.__name__)
            if not caller.startswith("pure_loop."):
                self._refuse(f"random.{name}")

    def _see(self, frame: FrameType, event: str, module: str) -> None:
        """A call of, or a return from, a function of a module in which something may be refused."""
        if module != "torch.random":
            self._look(frame if event == "return" else _calling(frame))
        elif event == "call" and frame.f_code.co_name in _OF_TORCH and _caller(frame) not in _ALLOWED:
            self._refuse(f"torch.{frame.f_code.co_name}")

    def _look(self, frame: FrameType | None) -> None:
        """Compare the state of NumPy's generator with that at the last call or return.

        Args:
            frame: of the function of a user's that has run since.
        """
        if seeds_hosts.get():  # seeded, and put back as it was
            return
        now = _numpy_state()
        if now == self._numpy:
            return
        self._numpy = now
        if frame is not None:
            self._refuse(f"functions of numpy.random (in {frame.f_code.co_name})")

    def _refuse(self, name: str) -> None:
        self.refused = name
        raise GuardedCallError(name)


def _numpy_state() -> bytes:
    """The state of NumPy's global generator, to be compared; empty where ``numpy.random`` is not imported."""
    get_state: Any = getattr(sys.modules.get("numpy.random"), "get_state", None)  # None, too, while it is imported
    return b"" if get_state is None else pickle.dumps(get_state(legacy=False))


def _is_quiet(module: str) -> bool:
    """Whether functions of a module are not looked at: libraries draw from no global generator of NumPy's."""
    return module.partition(".")[0] in _QUIET or module.startswith("namedtuple_")


def _calling(frame: FrameType) -> FrameType | None:
    """The innermost frame of a user's that leads to this one."""
    caller = frame.f_back
    while caller is not None and _is_quiet(caller.f_globals.get("__name__", "")):
        caller = caller.f_back
    return caller


def _outermost(frame: FrameType, name: str) -> tuple[str, str]:
    """The function of Python's module of random numbers that was called, and the module that called it."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_globals.get("__name__") == "random":
        name, caller = caller.f_code.co_name, caller.f_back
    return name, "" if caller is None else caller.f_globals.get("__name__", "")


def _caller(frame: FrameType) -> str:
    """The module that calls a function of torch's, or enters the context that it makes."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") in _WRAPPERS:
        caller = caller.f_back
    return "" if caller is None else caller.f_globals.get("__name__", "")


class _OneDefaultDtype(TorchFunctionMode):
    """Operations are of the default dtype under which this was made."""

    def __init__(self) -> None:
        super().__init__()
        self._dtype = torch.get_default_dtype()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.get_default_dtype() is not self._dtype:
            raise DefaultDtypeError
        return function(*args, **(kwargs or {}))


# Of distributions and constraints: the functions that ask whether all elements of a tensor are valid.
_CHECKS = frozenset({"__init__", "_validate_sample", "check"})


class _UncheckedDistributions(TorchFunctionMode):
    """What distributions ask about the numbers in their parameters comes out true, unless the code says to check."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__bool__ and _is_check(frame_at(1)):
            return True
        return function(*args, **(kwargs or {}))


def _is_check(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # of modes inside
        frame = frame.f_back
    if frame is None or frame.f_code.co_name not in _CHECKS:
        return False
    module = frame.f_globals.get("__name__", "")
    return module.startswith("torch.distributions.") and not variable(frame, "validate_args")
