"""Who is asking a generator for its next value, and whether that gives up what it was given before.

``for event, state in stream:`` keeps the last State in a variable that the next one replaces. A list, another variable
or a tuple may keep it for good. The two look alike to a count of references; the consumer's next instructions, and what
its variable holds now, tell them apart.
"""

from __future__ import annotations

import opcode
import sys
from types import CodeType, FrameType
from typing import Any, TypeAlias

__all__ = ["COUNTS_CAN_BE_TRUSTED", "gives_up"]

# Python 3.14 doesn't count what a frame borrows; without the GIL counts are spread over threads.
COUNTS_CAN_BE_TRUSTED = (
    sys.implementation.name == "cpython"
    and sys.version_info < (3, 14)
    and bool(getattr(sys, "_is_gil_enabled", lambda: True)())
)

_UNPACK, _CACHE = opcode.opmap["UNPACK_SEQUENCE"], opcode.opmap.get("CACHE", 0)
_PRECALL, _CALL = opcode.opmap.get("PRECALL"), opcode.opmap.get("CALL")
_SEND, _EXTENDED = opcode.opmap.get("SEND"), opcode.opmap["EXTENDED_ARG"]
# No STORE_DEREF: a function that closes over the variable may read it while the step runs.
_STORES = {"STORE_FAST", "STORE_NAME", "STORE_GLOBAL"}


def gives_up(frame: FrameType | None, value: Any) -> bool:
    """Whether the first thing that this frame does with the pair it waits for is to put it where it has ``value`` now.

    Generators that only delegate (``yield from``) are looked through. False where it can't be told.

    Args:
        frame: the one that called ``next`` on the generator that asks.
        value: the second half of the pair before.

    >>> def numbers():
    ...     last = None
    ...     for i in range(3):
    ...         print(gives_up(sys._getframe(1), last), end=" ")
    ...         last = [i]
    ...         yield i, last
    >>> for i, held in numbers():
    ...     pass
    False True True
    >>> _ = list(numbers())
    False False False
    """
    if _gettrace() is not None:
        return False  # a debugger reads, and may write back, the variables that are read here
    while frame is not None:
        code = frame.f_code
        known = _plans.get((id(code), frame.f_lasti))
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
    found = variables.get(name, frame) is value
    # Before 3.13 it may be a copy of the variables, the same that locals() gives, and would keep whatever they hold.
    if place is _COPIES:
        variables.clear()
    elif place is _SHOWN_COPIES:
        for key in [key for key, each in variables.items() if type(each) not in _PLAIN]:
            del variables[key]
    return found


_gettrace = sys.gettrace
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
    if sys.version_info >= (3, 13):
        return name, _NAMES
    return name, _COPIES if _ASK_FOR_COPIES.isdisjoint(code.co_names) else _SHOWN_COPIES
