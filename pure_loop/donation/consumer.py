"""Detects from bytecode whether the ``for`` loop that reads a stream rebinds its loop variable.

``for event, state in stream:`` keeps the last State in a variable that the next one replaces. A list, another variable
or a tuple may keep it for good. The two look alike to a count of references; the next instructions of the frame that
reads the stream, and what its variable holds now, tell them apart. Whether this works on this interpreter is tried
when it is first needed; where it doesn't, a loop variable counts like any other reference.
"""

from __future__ import annotations

import opcode
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeAlias

__all__ = ["doubt", "look_through", "rebinds_loop_variable"]

_UNPACK, _CACHE = opcode.opmap.get("UNPACK_SEQUENCE"), opcode.opmap.get("CACHE", 0)
_PRECALL, _CALL = opcode.opmap.get("PRECALL"), opcode.opmap.get("CALL")
_SEND, _EXTENDED = opcode.opmap.get("SEND"), opcode.opmap.get("EXTENDED_ARG")
# No STORE_DEREF: a function that closes over the variable may read it while the step runs.
_STORES = {"STORE_FAST", "STORE_NAME", "STORE_GLOBAL"}


def rebinds_loop_variable(frame: FrameType | None, value: Any) -> bool:
    """Whether the first thing that this frame does with the pair it waits for is to put it where it has ``value`` now.

    Generators that only delegate (``yield from``) are looked through. False where it can't be told.

    Args:
        frame: the one that called ``next`` on the generator that asks.
        value: the second half of the pair before.

    >>> def numbers():
    ...     last = None
    ...     for i in range(3):
    ...         print(rebinds_loop_variable(sys._getframe(1), last), end=" ")
    ...         last = [i]
    ...         yield i, last
    >>> for i, held in numbers():
    ...     pass
    False True True
    >>> _ = list(numbers())
    False False False
    """
    if doubt or _gettrace() is not None:
        return False  # a debugger reads, and may write back, the variables that are read here
    while frame is not None:
        code = frame.f_code
        known = _plans.get((id(code), frame.f_lasti))
        if code in _LOOKED_THROUGH:
            frame, plan = frame.f_back, None
            continue
        plan = known[1] if known is not None and known[0] is code else _plan(code, frame.f_lasti)
        if plan is not _DELEGATES:
            break
        frame = frame.f_back
    if frame is None or plan is None:
        return False
    name, place = plan
    if place is _GLOBALS:
        return frame.f_globals.get(name, frame) is value
    variables: Any = frame.f_locals
    result = variables.get(name, frame) is value
    # A dict is a copy of the variables, the same that locals() gives, and would keep whatever they hold.
    if place is _COPIES:
        variables.clear()
    elif place is _SHOWN_COPIES:
        for key in [key for key, each in variables.items() if type(each) not in _PLAIN]:
            del variables[key]
    return result


_LOOKED_THROUGH: set[CodeType] = set()


def look_through(code: CodeType) -> None:
    """Say of a function that it returns what ``next`` gives it, and keeps no reference to that."""
    _LOOKED_THROUGH.add(code)


def _not_traced() -> None:
    """In the place of ``sys.gettrace``, while the package is imported: what is tried then holds without a debugger."""


_gettrace: Callable[[], Any] = _not_traced
doubt = ""
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
# Where a variable is: among the globals, those of a class or module, or those of a function, of which there are copies,
# which its own code may have asked for.
_GLOBALS, _NAMES, _COPIES, _SHOWN_COPIES = "globals", "names", "copies", "shown copies"
# A name, and where it is; None: the pair goes elsewhere.
Plan: TypeAlias = "tuple[str, str] | None"
_DELEGATES = ("yield from", "")
_ASK_FOR_COPIES = {"locals", "vars", "eval", "exec", "dir", "f_locals", "currentframe", "_getframe", "stack"}
# By the code's address, because hashing code takes long; the code itself is kept, so that its address stays its own.
_plans: dict[tuple[int, int], tuple[CodeType, Plan]] = {}


def _plan(code: CodeType, at: int) -> Plan:
    """What happens to a pair after this instruction; looked up once."""
    if len(_plans) >= 256:
        _plans.clear()
    begin = at
    while begin > 0 and code.co_code[begin] == _CACHE:  # Python 3.12 may stand on what comes after an instruction
        begin -= 2
    plan = _DELEGATES if _SEND is not None and code.co_code[begin] == _SEND else _target(code, at)
    _plans[id(code), at] = code, plan
    return plan


def _target(code: CodeType, at: int) -> Plan:
    """The variable into which the second half of a pair goes after this instruction, and whether it is a global."""
    raw = code.co_code
    following: list[tuple[int, int]] = []
    for i in range(at + 2, len(raw), 2):
        # Python 3.11 does some calls in the instruction before CALL.
        if raw[i] != _CACHE and not (raw[at] == _PRECALL and raw[i] == _CALL and not following):
            following.append((raw[i], raw[i + 1]))
        if len(following) == 3:
            break
    if len(following) < 2 or following[0] != (_UNPACK, 2) or any(op == _EXTENDED for op, _ in following):
        return None
    name, argument = opcode.opname[following[1][0]], following[1][1]
    if name == "STORE_FAST_STORE_FAST":
        return _variable(code, argument & 15)
    if name not in _STORES or len(following) < 3:
        return None
    name, argument = opcode.opname[following[2][0]], following[2][1]
    if name == "STORE_FAST_LOAD_FAST":
        return _variable(code, argument >> 4)
    if name in ("STORE_NAME", "STORE_GLOBAL"):
        return code.co_names[argument], _GLOBALS if name == "STORE_GLOBAL" else _NAMES
    if name == "STORE_FAST":
        return _variable(code, argument)
    return None


def _variable(code: CodeType, argument: int) -> Plan:
    """A function's variable."""
    name = code._varname_from_oparg(argument)  # type: ignore[attr-defined]
    if not _LOCALS_ARE_COPIED:
        return name, _NAMES
    return name, _COPIES if _ASK_FOR_COPIES.isdisjoint(code.co_names) else _SHOWN_COPIES


def _locals_are_copied() -> bool:
    """Whether a function frame's variables can only be read through a copy of them, a dict."""
    return type(sys._getframe().f_locals) is dict


def _asked(answers: list[bool]) -> Iterator[tuple[int, object]]:
    """A stream that notes before each pair but the first whether its consumer rebinds its variable."""
    last = object()
    yield 0, last
    for number in range(1, 4):
        answers.append(rebinds_loop_variable(sys._getframe(1), last))
        last = object()
        yield number, last


def _delegating(answers: list[bool]) -> Iterator[tuple[int, object]]:
    yield from _asked(answers)


def _find_doubt() -> str:
    """Why it can't be told here what becomes of a loop variable; empty where it can."""
    try:
        rebinding: list[bool] = []
        for number, last in _asked(rebinding):  # noqa: B007
            pass
        for number, last in _delegating(rebinding):  # noqa: B007
            pass
        exec("for number, last in stream: pass", {"stream": _asked(rebinding)})  # as in a module
        if rebinding != [True] * 9:
            return "the variable of a for loop over a generator is not recognised"
        keeping: list[bool] = []
        kept = list(_asked(keeping))
        for _pair in _delegating(keeping):
            pass
        for number, last in _asked(keeping):
            kept.append((number, last))
            last = None  # so that the variable no longer holds what was yielded
        if keeping != [False] * 9:
            return "a list of a stream's States is taken for a variable"
    except Exception as error:  # of frames or bytecode that are none of those known; pl.explain says it
        return f"reading the frame of a stream's consumer raised {type(error).__name__}: {error}"
    return ""


_LOCALS_ARE_COPIED = hasattr(sys, "_getframe") and _locals_are_copied()
doubt = _find_doubt()
_gettrace = sys.gettrace
