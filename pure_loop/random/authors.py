"""The author of an object's code, by the module that it comes from: torch, this library, or the user.

Code of the user's may draw from the global generators of random numbers; see :mod:`pure_loop.random.guards`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from functools import partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

__all__ = ["is_users", "runs_users_code"]

# Code of these draws from no global generator, or is seeded where it is called.
_OURS = frozenset({"attr", "attrs", "builtins", "optree", "pure_loop", "torch"})
# Classes of Python's that others are derived from.
_BASES = frozenset({"abc", "collections", "enum", "typing"})
# Its functions are written as users write theirs, and are treated so.
_LIKE_USERS = "pure_loop.testing"
# Without code, and without parts.
_ATOMIC = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), Tensor, torch.Generator),
        *(torch.dtype, torch.device, torch.Size, type(iter([])), type(iter(())), type(iter(range(0)))),
    }
)
_CONTAINERS = frozenset({list, tuple, set, frozenset, deque})
_MAPPINGS = frozenset({dict, OrderedDict})


def is_users(code: object) -> bool:
    """:func:`runs_users_code` of one object.

    >>> import random, torch
    >>> is_users(torch.nn.functional.relu), is_users(torch.nn.Linear(1, 1))
    (False, False)
    >>> is_users(random.shuffle), is_users(partial(random.shuffle))
    (True, True)
    """
    return runs_users_code((code,))


def runs_users_code(objects: Iterable[object]) -> bool:
    """Whether one of these objects is neither torch's nor the library's, or holds or calls one that isn't.

    That is decided by the module that a function or a class comes from, and by nothing else. Of an object of torch's it
    takes what the object consists of: the submodules, hooks and functions of a ``nn.Module``, the dataset of a
    ``Subset``. Of an object of the library's it takes the attribute ``parts_of_code``, if there is one. That a function
    of torch's was replaced in torch's own module is not noticed.

    Args:
        objects: functions, classes, modules, datasets and other objects.

    >>> own = eval("lambda *_: None", {"__name__": "__main__"})  # a function of the user's
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    >>> runs_users_code([model])
    False
    >>> handle = model[0].register_forward_hook(own)
    >>> runs_users_code([model]), runs_users_code([partial(torch.nn.functional.mse_loss, own)])
    (True, True)
    """
    pending: list[Any] = list(objects)
    seen: dict[int, object] = {}  # with the objects, so that ids stay theirs
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind in _ATOMIC or id(value) in seen:
            continue
        seen[id(value)] = value
        if kind in _CONTAINERS:
            if not _ATOMIC.issuperset(map(type, value)):  # a Subset has as many indices as samples
                pending += value
        elif kind in _MAPPINGS:
            pending += value.values()
        elif kind is partial:
            pending += (value.func, value.args, value.keywords)
        elif kind is MethodType:
            pending += (value.__func__, value.__self__)
        elif kind is MethodDescriptorType or kind is WrapperDescriptorType:
            pending.append(value.__objclass__)
        elif kind is ReferenceType:
            pending.append(value())
        elif isinstance(value, FunctionType):
            # The first is that of what a decorator wraps, the second that of the code.
            if _is_others(value.__module__) or _is_others(value.__globals__.get("__name__")):
                return True
        elif isinstance(value, BuiltinFunctionType):
            if _is_others(_module_of(value.__self__)):
                return True
        elif isinstance(value, type):
            if _is_class_of_others(value):
                return True
        elif kind.__module__ == "builtins" or _is_class_of_others(kind):
            return True  # among those of Python's: iterators and generators, which call what they were made of
        else:
            pending += _parts_of(value, kind)
    return False


def _module_of(owner: object) -> str:
    """The name of the module of a function that is written in C, of what it is bound to."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    return owner.__module__ if isinstance(owner, type) else type(owner).__module__


def _is_others(module: str | None) -> bool:
    if module is None:
        return True
    root = module.partition(".")[0]
    return root not in _OURS or module == _LIKE_USERS or module.startswith(f"{_LIKE_USERS}.")


def _is_class_of_others(cls: type) -> bool:
    """Whether a class, or one that it is derived from, is the user's: torch derives some from those of modules."""
    if _is_others(cls.__module__):
        return True
    return any(base.__module__ not in _BASES and _is_others(base.__module__) for base in cls.__mro__[1:])


def _parts_of(value: Any, kind: type) -> Iterable[object]:
    """What an object of torch's or the library's calls, as far as the object says so."""
    parts = getattr(kind, "parts_of_code", None)
    if parts is not None:
        return (*value.parts_of_code,)
    if kind.__module__.partition(".")[0] != "torch":
        return ()
    held = getattr(value, "__dict__", {}).values()
    return (*held, getattr(kind, "forward", None)) if isinstance(value, nn.Module) else held
