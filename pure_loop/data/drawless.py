"""Code that draws from neither Python's nor NumPy's global generator, as far as that can be proved by reading it.

To seed these two for a batch and put them back takes as long as a tenth of a small model's step. So it is left out for
data whose code can't reach them. What can't be read (an extension of another library, ``getattr``, an import inside of
a function, too many objects) may draw.
"""

from __future__ import annotations

import builtins
import dis
import gc
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from pure_loop._internal.torch_private import default_collate_functions

__all__ = ["cannot_draw"]

# Whose functions draw from neither generator, but for those of `numpy.random` itself.
_HARMLESS = frozenset(
    {*sys.stdlib_module_names, "attr", "attrs", "numpy", "optree", "pure_loop", "torch"}
    - {"email", "random", "statistics", "turtle", "uuid"}
)
_GENERATORS = ("random", "numpy.random", "numpy.random.mtrand")
# Names by which code finds what this walk doesn't.
_FINDERS = frozenset(
    {
        *("__builtins__", "__dict__", "__globals__", "__import__", "__subclasses__", "attrgetter", "compile", "eval"),
        *("exec", "f_globals", "gc", "getattr", "globals", "import_module", "load", "loads", "locals", "methodcaller"),
        *("modules", "ops", "pickle", "random", "vars"),
    }
)
_ATOMIC = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...), types.CodeType),
        *(torch.dtype, torch.device, torch.Size, torch.Generator),
        *(types.GetSetDescriptorType, types.MemberDescriptorType),
    }
)
# What they lead to can't be seen, or not with its global names.
_OPAQUE: tuple[Any, ...] = (
    *(types.CoroutineType, types.AsyncGeneratorType, types.FrameType, *weakref.ProxyTypes),
    *(ContextVar, threading.local),
)
_CALLED_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_IMPORT = dis.opmap["IMPORT_NAME"]
# Objects to read. Loading from more takes long beside seeding.
_MOST = 2_000


def cannot_draw(values: Iterable[Any]) -> bool:
    """Whether no code that these objects lead to draws from Python's or NumPy's global generator, nor seeds them.

    Args:
        values: datasets, functions, iterators and other objects.

    >>> import random
    >>> shuffle = eval("lambda batch: random.shuffle(batch)", {"random": random})  # a function of the user's
    >>> cannot_draw([shuffle])
    False
    """
    if default_collate_functions is None:
        return False
    # A call of torch's default collate runs these, too.
    pending: list[Any] = [*values, *default_collate_functions.values()]
    seen: dict[int, Any] = {}  # with the objects, so that ids stay theirs
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind in _ATOMIC or id(value) in seen:
            continue
        if len(seen) >= _MOST or _is_generator(value) or issubclass(kind, _OPAQUE):
            return False
        seen[id(value)] = value
        if isinstance(value, types.ModuleType):
            if value.__name__ in _GENERATORS or not _is_harmless(value.__name__):
                return False
        elif isinstance(value, _CALLED_IN_C):
            owner = value.__self__ if isinstance(value, types.BuiltinFunctionType) else value.__objclass__
            module = owner.__name__ if isinstance(owner, types.ModuleType) else None
            named = module or getattr(value, "__module__", None) or _module_of(owner)
            if named in _GENERATORS or not _is_harmless(named):
                return False
            if module is None:
                pending.append(owner)
        elif isinstance(value, type):
            pending += (var for cls in value.__mro__ if not _is_harmless(cls.__module__) for var in vars(cls).values())
        elif isinstance(value, types.FunctionType):
            # A wrapper has the name of what it wraps, and not its globals.
            module = value.__globals__.get("__name__")
            if module in _GENERATORS:
                return False
            if not _is_harmless(module):
                result = _globals_of(value.__code__, value.__globals__)
                if result is None:
                    return False
                pending += result
            pending += _held_by(value)
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            if frame is not None:
                if not _is_harmless(frame.f_globals.get("__name__")):
                    result = _globals_of(value.gi_code, frame.f_globals)
                    if result is None:
                        return False
                    pending += result
                pending += (get_referent for get_referent in gc.get_referents(value) if get_referent is not frame)
        elif isinstance(value, weakref.ref):
            pending.append(value())
        elif getattr(getattr(value, "dtype", None), "hasobject", False):
            return False  # an array of objects, which the garbage collector doesn't see either
        else:
            pending.append(kind)
            pending += (get_referent for get_referent in gc.get_referents(value) if type(get_referent) not in _ATOMIC)
    return True


def _is_generator(value: Any) -> bool:
    """Whether this is one of the two global generators, whose methods are what `random` and `numpy.random` have."""
    if value is vars(random)["_inst"]:
        return True
    numpy: Any = sys.modules.get("numpy.random")
    return numpy is not None and value is numpy.mtrand._rand


def _is_harmless(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _HARMLESS


def _module_of(value: Any) -> Any:
    return (value if isinstance(value, type) else type(value)).__module__


def _held_by(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        yield from gc.get_referents(cell)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()


def _globals_of(code: types.CodeType, namespace: dict[str, Any]) -> list[Any] | None:
    """What code finds under its global names, and in the modules among them; None where reading can't tell."""
    codes, names = [code], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        if _IMPORT in code.co_code[::2]:
            return None
        codes += (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    if not _FINDERS.isdisjoint(names):
        return None
    result = []
    pending = [(name, namespace) for name in names if name in namespace]
    pending += ((name, vars(builtins)) for name in names if name in vars(builtins))
    opened: set[int] = set()
    while pending:
        name, where = pending.pop()
        value = where[name]
        if not isinstance(value, types.ModuleType) or value.__name__ in _GENERATORS:
            result.append(value)
        elif id(value) not in opened and not _is_harmless(value.__name__):
            opened.add(id(value))
            pending += ((item, vars(value)) for item in names if item in vars(value))
            if hasattr(value, "__getattr__"):
                return None
    return result
