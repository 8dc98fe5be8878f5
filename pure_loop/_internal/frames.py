"""Python's own records of the code that runs: frames, their variables, counts of references, profilers, and bytecode.

This is the only module that looks at them, but for two that are about nothing else: the handlers of signals, and the
readers of tracebacks. What differs between interpreters is decided here.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any, TypeAlias

# The frame of the code that calls it, or of one of its callers: frame_at(1) is that of the caller.
frame_at: Callable[[int], FrameType] = sys._getframe
# References to an object, the argument's among them.
count: Callable[[object], int] = getattr(sys, "getrefcount", id)


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, the one that called it, and so on outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def variable(frame: FrameType, name: str) -> object:
    """The value of a variable of this frame; None where there is none."""
    return frame.f_locals.get(name)


def generator_arguments(generator: Any) -> dict[str, Any]:
    """The arguments of a generator that has not begun."""
    variables: Any = generator.gi_frame.f_locals
    arguments = dict(variables)
    if isinstance(variables, dict):
        variables.clear()  # which the frame keeps up to Python 3.12, and with it the State
    return arguments


# Of a frame, the name of an event ("call", "return", "c_call", ...), and its argument.
Watcher: TypeAlias = Callable[[FrameType, str, object], object]


@contextmanager
def calls_watched(watcher: Watcher) -> Iterator[None]:
    """Inside, ``watcher`` is called at each call of this thread, after the profiler that was set before.

    What it raises is raised by the call. Python removes a profiler that raises: nothing is watched after that. A
    profiler written in C (cProfile, up to Python 3.11) sees nothing meanwhile, and is set again at the end.
    """
    before: Any = sys.getprofile()
    chained: Watcher | None = before if callable(before) else None

    def watch_both(frame: FrameType, event: str, argument: object) -> None:
        assert chained is not None
        chained(frame, event, argument)
        watcher(frame, event, argument)

    # A call less for each of the hundreds of thousands of calls of a step that is traced.
    sys.setprofile(watcher if chained is None else watch_both)
    try:
        yield
    finally:
        if before is None or chained is not None:
            sys.setprofile(before)
        else:
            sys.setprofile(None)
            before.enable()


getprofile, gettrace = sys.getprofile, sys.gettrace
_monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
# Numbers of tools; one of coverage counts lines, and reads no variables.
_PROFILER = None if _monitoring is None else _monitoring.PROFILER_ID
_TOOLS = () if _monitoring is None else tuple({*range(6)} - {_monitoring.COVERAGE_ID})


def is_watched(*, by_profilers: bool = True) -> bool:
    """Whether a debugger, a profiler or another tool may read the variables of the code that runs, and keep them.

    Args:
        by_profilers: whether one that is set or registered as a profiler counts.
    """
    if gettrace() is not None or (by_profilers and getprofile() is not None):
        return True
    tools = [tool for tool in _TOOLS if by_profilers or tool != _PROFILER]
    return bool(tools) and any(_monitoring.get_tool(tool) is not None for tool in tools)


def rebinds_loop_variable(frame: FrameType | None, value: object) -> bool:
    """Whether the first thing that this frame does with the pair it waits for is to put it where it has ``value`` now.

    Generators that only delegate (``yield from``) are looked through. False where it can't be told.

    Args:
        frame: the one that called ``next`` on the generator that asks.
        value: the second half of the pair before.

    >>> def numbers():
    ...     last = None
    ...     for i in range(3):
    ...         print(rebinds_loop_variable(frame_at(1), last), end=" ")
    ...         last = [i]
    ...         yield i, last
    >>> for i, held in numbers():
    ...     pass
    False True True
    >>> _ = list(numbers())
    False False False
    """
    while frame is not None:
        code, at = frame.f_code, frame.f_lasti
        _, operation, name = _plans.get((id(code), at)) or _plan(code, at)
        if operation != _DELEGATES:
            break
        frame = frame.f_back
    if frame is None or operation not in _STORES:
        return False
    variables: Any = frame.f_globals if operation == "STORE_GLOBAL" else frame.f_locals
    result = variables.get(name, frame) is value
    if operation == "STORE_FAST":
        # Up to Python 3.12 it is a copy of the variables, the same that locals() gives, and would keep what they hold.
        if type(variables) is dict:
            for key in [key for key, item in variables.items() if type(item) not in _PLAIN]:
                del variables[key]
        # From Python 3.14 on a parameter may have no reference of its own to what a variable of its caller has.
        elif result and name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return frame.f_back is None or not any(item is value for item in frame.f_back.f_locals.values())
    return result


_LOOKED_THROUGH: set[CodeType] = set()


def look_through(code: CodeType) -> None:
    """Say of a function that it returns what ``next`` gives it, and keeps no reference to that."""
    _LOOKED_THROUGH.add(code)


_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
# Of ``yield from``.
_DELEGATES = "SEND"
# No STORE_DEREF: a function that closes over the variable may read it while the step runs.
_STORES = frozenset({"STORE_FAST", "STORE_NAME", "STORE_GLOBAL"})
# By the code's address, because hashing code takes long; the code itself is kept, so that its address stays its own.
_plans: dict[tuple[int, int], tuple[CodeType, str, str]] = {}


def _plan(code: CodeType, at: int) -> tuple[CodeType, str, str]:
    """What is done with the second half of a pair after this instruction, and the variable's name; looked up once."""
    if len(_plans) >= 256:
        _plans.clear()
    instructions = list(dis.get_instructions(code))
    # Python 3.12 may stand on what comes after an instruction, which is not listed.
    number = sum(instruction.offset <= at for instruction in instructions)
    here = instructions[number - 1].opname
    # Python 3.11 does some calls in the instruction before CALL.
    following: list[tuple[str, Any]] = []
    for instruction in instructions[number + (here == "PRECALL") :][:3]:
        # Two in one, as STORE_FAST_STORE_FAST, have two names.
        operations = instruction.opname.replace("_FAST_", "_FAST ").split()
        names = instruction.argval if len(operations) > 1 else [instruction.argval]
        following += zip(operations, names, strict=False)
    operation, name = "", ""
    if code in _LOOKED_THROUGH or here == _DELEGATES:
        operation = _DELEGATES
    elif following[:1] == [("UNPACK_SEQUENCE", 2)] and following[1][0] in _STORES:
        operation, name = following[2]
    result = _plans[id(code), at] = code, operation, name
    return result


def _asked(answers: list[bool]) -> Iterator[tuple[int, object]]:
    """A stream that notes before each pair but the first whether its consumer rebinds its variable."""
    last = object()
    yield 0, last
    for number in range(1, 4):
        answers.append(rebinds_loop_variable(frame_at(1), last))
        last = object()
        yield number, last


def _delegating(answers: list[bool]) -> Iterator[tuple[int, object]]:
    yield from _asked(answers)


@cache
def consumer_doubt() -> str:
    """Why it can't be told here what becomes of a loop variable; empty where it can."""
    try:
        answers: list[bool] = []
        for number, last in _asked(answers):  # noqa: B007
            pass
        for number, last in _delegating(answers):  # noqa: B007
            pass
        exec("for number, last in stream: pass", {"stream": _asked(answers)})  # as in a module
        pairs = list(_asked(answers))
        for _pair in _delegating(answers):
            pass
        for number, last in _asked(answers):
            pairs.append((number, last))
            last = None  # so that the variable no longer holds what was yielded
        if answers != [True] * 9 + [False] * 9:
            return "the variable of a for loop over a generator is not told from what keeps a stream's States"
    except Exception as error:  # of frames or bytecode that are none of those known; pl.explain says it
        return f"reading the frame of a stream's consumer raised {type(error).__name__}: {error}"
    return ""
