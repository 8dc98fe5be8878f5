"""What a trace may not take for granted: numbers that Python decides by, and what comes of global state.

A decision by a number of the step leaves a :class:`Guard`: the graph serves the steps in which it comes out as it did.

Calls are refused where a graph would hold the result for ever. Python's and NumPy's global generators give numbers,
which would be constants of a graph. torch's can be seeded, and its state taken and put back: that moves what eager code
draws next, and no draw of a graph. The default dtype is no part of an operation: it may be another one when a graph
runs. Distributions check their parameters, which reads numbers out of tensors: inside a trace the checks pass. Nothing
in the process is replaced: calls are seen by a profiler and by modes, all of which are local to the thread.
"""

from __future__ import annotations

import gc
import importlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pure_loop._internal.frames import callers, calls_watched, frame_at, variable
from pure_loop._internal.torch_private import WRAPPER_OF_FUNCTIONS
from pure_loop.compile._torch import Function, Options
from pure_loop.errors import CompileError
from pure_loop.event import Event
from pure_loop.random.seeds import seeds_hosts
from pure_loop.time import Timestamp

# Graphs of one segment that differ only in what Python decided by a number.
MOST_DECISIONS = 8


@attrs.define
class Env:
    """What a step's numbers are computed from: its timestamps, in order, and the plain leaves of its State."""

    timestamps: Sequence[Timestamp]
    leaves: Sequence[object]


Evaluate: TypeAlias = Callable[[Env], Any]


def named(where: str, evaluate: Evaluate) -> Evaluate:
    """``evaluate``, with errors that name the code that they come from."""

    def value(env: Env) -> Any:
        try:
            return evaluate(env)
        except Exception as error:
            error.add_note(f"raised by {where}, batch {env.timestamps[1].batch}")
            raise

    return value


@attrs.frozen
class Leaf:
    """The source of a Number: a leaf of the State."""

    position: int
    name: str


# The name of a field of the State, or a leaf of it.
Source: TypeAlias = "str | Leaf"
# What is left out of a graph where it can't be traced: "forward", "update", or the handlers of an event.
Part: TypeAlias = tuple[str, Event | None]
FORWARD: Part = ("forward", None)


@attrs.frozen
class Guard:
    """A value that was decided on while tracing.

    Attributes:
        evaluate: what it is in a step.
        value: what it was while tracing.
        sources: what it depends on: the names of fields, and the positions of leaves.
        where: the code that asked for it; where the loop did, the owner of the number.
        part: that of the code.
    """

    evaluate: Evaluate
    value: object
    sources: frozenset[Source]
    where: str
    part: Part = FORWARD

    def holds(self, env: Env) -> bool:
        result = named(self.where, self.evaluate)(env)
        if type(result) is not type(self.value) or result != self.value:
            return False
        return bool(result) or str(result) == str(self.value)  # 0.0 and -0.0 are equal, and not the same


class TraceContext:
    """The Python side of one trace: its guards, and the numbers that become inputs.

    Attributes:
        lift: makes a 0-d tensor of a dtype that the graph takes as an input; on that of the State, or another device.
        where: the algorithm and event that run, for guards.
        recording: whether the code that runs is user code: what the loop itself reads is not recorded.
    """

    def __init__(self, lift: Callable[..., Tensor]) -> None:
        self.lift = lift
        self.guards: list[Guard] = []
        self.where = "the loop"
        self.part = FORWARD
        self.recording = False

    def guard(self, guard: Guard) -> None:
        """Note what code decides by, once."""
        if not any(item.sources == guard.sources and item.evaluate is guard.evaluate for item in self.guards):
            self.guards.append(attrs.evolve(guard, where=self.where, part=self.part) if self.recording else guard)

    @contextmanager
    def on_behalf_of(self, where: str, part: Part = FORWARD) -> Iterator[None]:
        """User code runs, of this part."""
        before = self.where, self.part, self.recording
        self.where, self.part, self.recording = where, part, True
        try:
            yield
        finally:
            self.where, self.part, self.recording = before

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """The loop's own code runs."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before


def all_hold(guards: list[Guard], env: Env) -> bool:
    for guard in guards:  # noqa: SIM110 - in every step
        if not guard.holds(env):
            return False
    return True


def reasons(guards: list[Guard], env: Env) -> str:
    """What code decides otherwise in this step, in words."""
    return "; ".join(sorted({_about(guard) for guard in guards if not guard.holds(env)}))


def _about(guard: Guard) -> str:
    names = sorted(source.name if isinstance(source, Leaf) else source for source in guard.sources)
    return f"{guard.where} decides by {', '.join(names) or 'a constant'}"


def too_many_decisions(name: str, guards: list[Guard], env: Env) -> CompileError:
    """What is raised where there are :data:`MOST_DECISIONS` graphs."""
    return CompileError(
        f"{MOST_DECISIONS} graphs of the segment {name!r} differ only in a number that Python code read, and batch "
        f"{env.timestamps[1].batch} would need one more: {reasons(guards, env)}. A graph holds such a number for ever. "
        "Let it meet tensors before anything asks for its value (state.loss * state.timestamp.elapsed is fine, "
        "float(...) of it or an `if` is not). A function of Python's math asks for it: numpy.cos(x) does not, nor "
        "does a schedule. Or count in a tensor (state.remember(name, count + 1) with count=torch.zeros(())), say "
        'how often with when=pl.every("10ba"), or write compile=False: "where possible" has the same limit.'
    )


# Calls that are refused.


class GuardedCallError(RuntimeError):
    """A call of this name, which draws from, seeds or reads a global generator."""


class DefaultDtypeError(RuntimeError):
    """An operation under another default dtype than that of the loop."""


@contextmanager
def refusing_global_state() -> Iterator[None]:
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
_PYTHON: object = vars(random)["_inst"]


class _Calls:
    """Sees the calls of functions that are refused.

    Functions of NumPy's are written in Cython, and no profiler sees calls of these: there the state of the generator is
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

    def watcher(self) -> Callable[[FrameType, str, object], None]:
        """The profiler: at most calls its first lines are all that runs, because tracing makes many."""
        quiet: set[str] = set()  # modules in which nothing is refused

        def watch(frame: FrameType, event: str, argument: object) -> None:
            if event == "c_call":
                if getattr(argument, "__self__", None) is _PYTHON:
                    self._refuse_draw_of_python(frame, getattr(argument, "__name__", ""))
            elif event == "call" or event == "return":
                module = _module(frame)
                if module in quiet:
                    return
                if module != "torch.random" and _is_quiet(module):
                    quiet.add(module)
                elif frame.f_code not in self._of_collector:
                    self._see(frame, event, module)

        return watch

    def _refuse_draw_of_python(self, frame: FrameType, name: str) -> None:
        if not seeds_hosts.get():
            name, caller = _outermost(frame, name)
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
        state = _numpy_state()
        if state == self._numpy:
            return
        self._numpy = state
        if frame is not None:
            self._refuse(f"functions of numpy.random (in {frame.f_code.co_name})")

    def _refuse(self, name: str) -> None:
        self.refused = name
        raise GuardedCallError(name)


def _numpy_state() -> bytes:
    """The state of NumPy's global generator, to be compared; empty where ``numpy.random`` is not imported."""
    # None, too, while it is imported.
    get_state: Function | None = getattr(sys.modules.get("numpy.random"), "get_state", None)
    return b"" if get_state is None else pickle.dumps(get_state(legacy=False))


def _is_quiet(module: str) -> bool:
    """Whether functions of a module are not looked at: libraries draw from no global generator of NumPy's."""
    return module.partition(".")[0] in _QUIET or module.startswith("namedtuple_")


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _calling(frame: FrameType) -> FrameType | None:
    """The innermost frame of a user's that leads to this one."""
    return next((caller for caller in callers(frame.f_back) if not _is_quiet(_module(caller))), None)


def _outermost(frame: FrameType, name: str) -> tuple[str, str]:
    """The function of Python's module of random numbers that was called, and the module that called it."""
    for caller in callers(frame):
        if _module(caller) != "random":
            return name, _module(caller)
        name = caller.f_code.co_name
    return name, ""


def _caller(frame: FrameType) -> str:
    """The module that calls a function of torch's, or enters the context that it makes."""
    return next((name for name in map(_module, callers(frame.f_back)) if name not in _WRAPPERS), "")


class _OneDefaultDtype(TorchFunctionMode):
    """Operations are of the default dtype under which this was made."""

    def __init__(self) -> None:
        super().__init__()
        self._dtype = torch.get_default_dtype()

    def __torch_function__(
        self, function: Function, types: object, args: Sequence[object] = (), kwargs: Options | None = None
    ) -> object:
        if torch.get_default_dtype() is not self._dtype:
            raise DefaultDtypeError
        return function(*args, **(kwargs or {}))


# Of distributions and constraints: the functions that ask whether all elements of a tensor are valid.
_CHECKS = frozenset({"__init__", "_validate_sample", "check"})


class _UncheckedDistributions(TorchFunctionMode):
    """What distributions ask about the numbers in their parameters comes out true, unless the code says to check."""

    def __torch_function__(
        self, function: Function, types: object, args: Sequence[object] = (), kwargs: Options | None = None
    ) -> object:
        if function is Tensor.__bool__ and _is_check(frame_at(1)):
            return True
        return function(*args, **(kwargs or {}))


def _is_check(frame: FrameType) -> bool:
    # Modes inside come first.
    caller = next((item for item in callers(frame) if item.f_code.co_name != "__torch_function__"), frame)
    if caller.f_code.co_name not in _CHECKS:
        return False
    return _module(caller).startswith("torch.distributions.") and not variable(caller, "validate_args")
