"""What a pass over samplers, loaders and streams may change: attributes, free variables, generators, containers.

The state of objects is compared before and after a pass. Their code is read and not run.
"""

from __future__ import annotations

import copy
import dis
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection
from functools import partial
from itertools import count, islice
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, Protocol, TypeGuard

import attrs
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from pure_loop.data.batch import is_array
from pure_loop.random.numpy_state import numpy_random

__all__ = [
    *("CONTAINERS", "MAPPINGS", "SIMPLE", "attributes_of", "cells_of", "changes_itself", "has_attributes"),
    *("has_epochs", "holds_changing", "inside_of", "is_iterated", "is_stream_of", "is_torchs_sampler"),
    *("is_unchanged", "keeps_passes", "remembered", "slots_of", "writes_attributes"),
]

# What an __iter__ might shuffle in place, and what holds nothing that it could.
MAPPINGS = frozenset((dict, OrderedDict, defaultdict))
CONTAINERS = frozenset((list, set, deque, *MAPPINGS))
SIMPLE = frozenset((int, float, bool, str, bytes, type(None)))
# How many items of a container are looked into: a list of a million pairs of a file name and a label is common.
_SEARCHED = 1000
# Large, or functions: of those the free variables are looked at.
_NO_PARTS = (type, FunctionType, torch.Tensor, torch.nn.Module)


class HasEpochs(Protocol):
    """A sampler, a dataset or another object that is told the number of a pass."""

    def set_epoch(self, epoch: int) -> object: ...


def has_epochs(value: object) -> TypeGuard[HasEpochs]:
    """Whether an object wants to know the number of the pass, by a method ``set_epoch``."""
    return callable(getattr(value, "set_epoch", None))


def slots_of(kind: type) -> list[str]:
    own = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [name for members in own for name, slot in members.items() if isinstance(slot, MemberDescriptorType)]


def has_attributes(value: object) -> bool:
    return not isinstance(value, type) and (hasattr(value, "__dict__") or bool(slots_of(type(value))))


def attributes_of(value: object) -> dict[str, object]:
    """The attributes of an instance, in its ``__dict__`` and its slots; of a function its free variables."""
    if isinstance(value, FunctionType):
        return {name: cell.cell_contents for name, cell in cells_of(value).items() if cell != CellType()}
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """The free variables of a function."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def is_stream_of(loader: DataLoader[object]) -> bool:
    """Whether a loader is over an iterable dataset."""
    return isinstance(loader.dataset, IterableDataset)


def keeps_passes(value: object) -> bool:
    """Whether the workers of a loader go on with their copies of a stream, where a pass can't be seen."""
    return isinstance(value, DataLoader) and value.persistent_workers and is_stream_of(value)


def inside_of(value: object) -> Collection[object]:
    """What a container holds, or a function was made with; nothing of other values."""
    if isinstance(value, dict) and type(value) in MAPPINGS:
        return list(value.values())
    if isinstance(value, tuple) or (isinstance(value, (list, set, deque)) and type(value) in CONTAINERS):
        return list(value) if isinstance(value, set) else value
    if type(value) is partial:
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__,)
    return tuple(attributes_of(value).values()) if isinstance(value, FunctionType) else ()


def holds_changing(value: object) -> bool:
    """Whether a container or a function leads to what a pass may change; of many items the first ones are followed."""
    inside = inside_of(value)
    if any(map(changes_itself, {type(item): item for item in inside}.values())):
        return True
    pending, seen, left = deque([inside]), {id(value)}, _SEARCHED
    while pending and left:
        for item in islice(pending.popleft(), left):
            left -= 1
            if type(item) in SIMPLE or id(item) in seen:
                continue
            if changes_itself(item):
                return True
            seen.add(id(item))
            pending.append(inside_of(item))
    return False


def changes_itself(value: object) -> bool:
    """Whether a pass may change an item of a container: containers in containers are large, and shared."""
    if isinstance(value, FunctionType):
        return _rebinds(value.__code__, frozenset(value.__code__.co_freevars))
    return _draws(value) or is_iterated(value)


def _draws(value: object) -> bool:
    """Whether this is a generator of random numbers, or a counter."""
    if isinstance(value, (torch.Generator, random.Random, count)):
        return True
    numpy = numpy_random()
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))


def _rebinds(code: CodeType, names: frozenset[str]) -> bool:
    """Whether code assigns to free variables (``nonlocal``)."""
    if not names:
        return False
    if any(
        instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in names
        for instruction in dis.get_instructions(code)
    ):
        return True
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return any(_rebinds(function, names & {*function.co_freevars}) for function in inner)


def is_torchs_sampler(value: object) -> bool:
    """Whether a sampler is one of torch's own that draws indices: it changes nothing but its generator."""
    of_torch = isinstance(value, Sampler) and type(value).__module__ == "torch.utils.data.sampler"
    return of_torch and not isinstance(value, BatchSampler)


def is_iterated(value: object) -> bool:
    """Whether an attribute is part of an iteration: a sampler, a loader, an iterable, or a plain record of its state.

    So is an object with one of these, or a generator, as an attribute. A dataset with indices isn't, nor is a module:
    they are large, and nothing is changed by iterating.
    """
    if _iterates(value):
        return True
    if isinstance(value, _NO_PARTS) or not has_attributes(value) or isinstance(value, Dataset):
        return False
    if hasattr(type(value), "__getitem__"):
        return False
    return any(_draws(attribute) or _iterates(attribute) for attribute in attributes_of(value).values())


def _iterates(value: object) -> bool:
    kind = type(value)
    if isinstance(value, _NO_PARTS) or not has_attributes(value):
        return False
    if isinstance(value, (Sampler, DataLoader, IterableDataset)):
        return True
    if isinstance(value, Dataset):
        return False
    if kind is SimpleNamespace or hasattr(kind, "__dataclass_fields__") or attrs.has(kind):
        return True
    iterates = isinstance(getattr(kind, "__iter__", None), FunctionType)
    return iterates and not hasattr(kind, "__getitem__")


def remembered(value: object, arrays: bool) -> object:
    """What an attribute is compared with later, by :func:`is_unchanged`; ``arrays``: NumPy's are compared by value."""
    if type(value) in CONTAINERS:
        return copy.copy(value)
    state = _state_of(value, arrays)
    return value if state is None else (value, state)


def is_unchanged(value: Any, before: Any, arrays: bool) -> bool:
    """Whether a value is what :func:`remembered` was given."""
    kind = type(value)
    if kind in CONTAINERS:
        if kind is not type(before) or len(value) != len(before):
            return False
        if kind is set:
            return bool(value == before)
        if kind is dict:
            value, before = (*value, *value.values()), (*before, *before.values())
        return all(a is b for a, b in zip(value, before, strict=True))
    state = _state_of(value, arrays)
    if state is None:
        return value is before
    return type(before) is tuple and len(before) == 2 and before[0] is value and bool(before[1] == state)


def _state_of(value: object, arrays: bool) -> object:
    """Where a generator or counter stands, or what is in a small tensor or an array; None for all else."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value) is count:
        return repr(value)
    if type(value) is torch.Tensor:
        return repr(value.tolist()) if value.numel() == 1 else None
    numpy = numpy_random()
    if numpy is None:
        return None
    if isinstance(value, numpy.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.RandomState):
        return repr(value.get_state(legacy=False))
    return value.tobytes() if arrays and is_array(value) else None


def writes_attributes(kind: type, *names: str) -> bool:
    """Whether methods of a class, or those of its methods that they name, contain an assignment to an attribute.

    The code is read, not run. False for what is not written in Python, and for torch's own classes of data.

    >>> class Counting:
    ...     passes = 0
    ...     def __iter__(self):
    ...         self.count()
    ...         return iter(range(3))
    ...     def count(self):
    ...         self.passes += 1
    >>> writes_attributes(Counting, "__iter__"), writes_attributes(list, "__iter__")
    (True, False)
    """
    done: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        classes = [base for base in kind.__mro__ if not base.__module__.startswith("torch.utils.data.")]
        members = [vars(cls)[name] for cls in classes if name in vars(cls)]
        functions = [member.fget if isinstance(member, property) else member for member in members]
        codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
        while codes:
            code = codes.pop()
            operations = {instruction.opname for instruction in dis.get_instructions(code)}
            if operations & {"STORE_ATTR", "DELETE_ATTR"}:
                return True
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            todo += code.co_names
    return False
