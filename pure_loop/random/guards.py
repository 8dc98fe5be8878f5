"""Guards of code that is neither torch's nor this library's: it draws from the global generators by its position.

A forward, a loss, an optimizer, a collate function, a handler of an algorithm, a callback or a metric may draw from any
global generator: torch's, Python's, NumPy's. They are seeded before it is called and put back afterwards, so that what
it draws depends on nothing but the seed of the run, its place in the run and its name. Code of the library draws from
generators of its own, so nothing is done for it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from pure_loop.random.seeds import derive, seeded_all, seeded_apart

if TYPE_CHECKING:
    from pure_loop.event import Event
    from pure_loop.state import State
    from pure_loop.time import Timestamp

__all__ = ["Place", "guard", "is_users", "runs_users_code", "seed_at"]

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


def is_users(code: Any) -> bool:
    """:func:`runs_users_code` of one object.

    >>> import random, torch
    >>> is_users(torch.nn.functional.relu), is_users(torch.nn.Linear(1, 1))
    (False, False)
    >>> is_users(random.shuffle), is_users(partial(random.shuffle))
    (True, True)
    """
    return runs_users_code((code,))


def runs_users_code(objects: Iterable[Any]) -> bool:
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
    pending = list(objects)
    seen: dict[int, Any] = {}  # with the objects, so that ids stay theirs
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


def _module_of(owner: Any) -> str:
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


def _parts_of(value: Any, kind: Any) -> Iterable[Any]:
    """What an object of torch's or the library's calls, as far as the object says so."""
    parts = getattr(kind, "parts_of_code", None)
    if parts is not None:
        return value.parts_of_code  # type: ignore[no-any-return]
    if kind.__module__.partition(".")[0] != "torch":
        return ()
    held = getattr(value, "__dict__", {}).values()
    return (*held, getattr(kind, "forward", None)) if isinstance(value, nn.Module) else held


class Place:
    """Which batch of an evaluation and which microbatch are under way: what a State does not say.

    Attributes:
        batch: of the evaluation or prediction; 0 in training.
        microbatch: of the batch.
    """

    __slots__ = ("batch", "microbatch")

    def __init__(self) -> None:
        self.batch = self.microbatch = 0

    def clear(self) -> None:
        """Nothing is under way."""
        self.batch = self.microbatch = 0


def seed_at(
    seed: int,
    path: tuple[str | int, ...],
    event: Event | None,
    timestamp: Timestamp,
    *,
    evaluator: str | None = None,
    batch: int = 0,
    microbatch: int = 0,
) -> int:
    """The seed of code of the user's where a stream is; the same on all ranks.

    Args:
        seed: of the run.
        path: what code it is: its kind, its name, its number.
        event, timestamp, evaluator: those of the State that it is called with.
        batch, microbatch: those of a :class:`Place`.
    """
    at = "" if event is None else event.value
    return derive(seed, *path, at, timestamp.epoch, timestamp.batch, evaluator or "", batch, microbatch)


def guard(
    state: State, path: tuple[str | int, ...], place: Place | None = None, *, apart: bool = False
) -> AbstractContextManager[None]:
    """Seeds the global generators for code of the user's, and puts them back.

    Args:
        state: the one that the code is called with.
        path: what code it is.
        place: the batch and microbatch; None: a script of the user's runs.
        apart: the code changes nothing, and may wait for another thread, for which it holds no lock.
    """
    numbers = {} if place is None else {"batch": place.batch, "microbatch": place.microbatch}
    seeding = seeded_apart if apart else seeded_all
    return seeding(seed_at(state.seed, path, state.event, state.timestamp, evaluator=state.evaluator, **numbers))
