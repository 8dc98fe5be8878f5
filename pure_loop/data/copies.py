"""Private copies of objects that are iterated over again and again: samplers, loaders, iterable datasets.

An object that counts its passes, or shuffles what it holds in place, gives another order in each pass. Its passes are
made on a private copy, so the object that was given stays as it was, and the passes before epoch k can be made again
in another process.
"""

from __future__ import annotations

import ast
import copy
import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from types import CellType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

import attrs
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from pure_loop._internal.torch_private import KEPT_ITERATOR, iterator_of_loader, of_one_pass
from pure_loop.data.batch import is_array
from pure_loop.data.changes import (
    CONTAINERS,
    MAPPINGS,
    SIMPLE,
    attributes_of,
    cells_of,
    changes_itself,
    has_attributes,
    has_epochs,
    holds_changing,
    inside_of,
    is_iterated,
    is_stream_of,
    is_torchs_sampler,
    is_unchanged,
    keeps_passes,
    remembered,
    slots_of,
    writes_attributes,
)
from pure_loop.random import derive
from pure_loop.random.numpy_state import numpy_random

T = TypeVar("T")

# Of a DataLoader, by its source.
_SET_FOR_EACH_PASS = frozenset(("generator", "in_order", "persistent_workers", "collate_fn", *of_one_pass))

# Of a DataLoader, too: what they count or keep is not the order of a pass.
_SHARED_BY_LOADERS = frozenset(("collate_fn", "worker_init_fn"))

# How objects say that they can't be copied.
_UNCOPYABLE = (TypeError, NotImplementedError, copy.Error)


@attrs.define(eq=False)
class _Record:
    """One object that was copied attribute by attribute, or a function of which the free variables were copied."""

    original: object
    copied: Any
    seeds: bool
    # The attributes of the original when they were last copied, and those of the copy before its next pass.
    base: dict[str, object] = attrs.field(factory=dict)
    before: dict[str, object] = attrs.field(factory=dict)


class Private(Generic[T]):
    """A copy of an object, which can be iterated over without a change of the original.

    Copied are the object, the samplers, loaders, iterables and plain records in its attributes, containers, tensors of
    one element and generators, and the functions and containers that hold one of these, at any depth; of a sampler
    NumPy arrays and containers in containers, too. Everything else is shared.

    Args:
        original: what to copy.
        shared: objects that are not copied, such as the dataset of a sampler.
        seeds: whether generators are seeded for each pass, as those of samplers and loaders are; otherwise a copy of a
            generator starts where the original stands.

    Attributes:
        value: the copy. It is the original where that can't be copied, or has a ``__del__``.
        drawn_once: whether the original is an iterator (or a sampler in it is), which can't be copied.
    """

    def __init__(self, original: T, *, shared: tuple[object, ...] = (), seeds: bool) -> None:
        self.drawn_once = False
        self._copies: dict[int, Any] = {id(item): item for item in shared}
        # Originals stay alive, so that no other object has the id of one of them.
        self._originals: list[object] = []
        self._records: list[_Record] = []
        self._generators: list[object] = []
        # Copies in containers, and what they were before the next pass.
        self._items: list[object] = []
        self._items_before: list[object] = []
        # Objects that refuse to be copied, and want to know the epoch.
        self._uncopied: list[object] = []
        self._is_watched = False
        self.value: T = self._take(original, seeds, iterated=True)

    def begin(self, seed: int, epoch: int) -> T:
        """The copy before its next pass: what was changed in the original since the last one is changed in it, too.

        Args:
            seed: of this pass, from which generators of samplers and loaders start.
            epoch: the number of the pass, for the parts that have a ``set_epoch``.
        """
        for record in list(self._records):
            self._follow(record)
        for number, generator in enumerate(self._generators):
            _reseed(generator, derive(seed, "generator", number + 1))
        for part in (*self.parts, *self._uncopied):
            if has_epochs(part):
                part.set_epoch(epoch)
        if self._is_watched:
            for record in self._records:
                record.before = {name: remembered(value, record.seeds) for name, value in self._state(record).items()}
            self._items_before = [remembered(value, arrays=True) for value in self._unseeded_items()]
        return self.value

    def watch(self) -> None:
        """Remember what the copy is when a pass begins, for :meth:`changed`."""
        self._is_watched = True

    def changed(self) -> bool:
        """Whether a watched copy is no longer what it was when the last pass began."""
        for record in self._records:
            state = self._state(record)
            if state.keys() != record.before.keys():
                return True
            if not all(is_unchanged(value, record.before[name], record.seeds) for name, value in state.items()):
                return True
        items = zip(self._unseeded_items(), self._items_before, strict=True)
        return not all(is_unchanged(value, before, arrays=True) for value, before in items)

    @property
    def has_epochs(self) -> bool:
        """Whether a part has a ``set_epoch``."""
        return any(map(has_epochs, (*self.parts, *self._uncopied)))

    @property
    def independent(self) -> bool | None:
        """Whether a pass is the same whatever passes were made before it; None where only a pass can tell."""
        return False if any(map(self._assigns, self.parts)) else None

    @property
    def counts_without_epochs(self) -> bool:
        """Whether passes over a sampler, a stream or a loader that has no ``set_epoch`` depend on those before.

        Other objects assign to attributes for bookkeeping, too.
        """
        parts = (part for part in self.parts if isinstance(part, (Sampler, IterableDataset, DataLoader)))
        return any(map(self._assigns, parts))

    @property
    def parts(self) -> list[Any]:
        """The copies of objects that were made."""
        return [record.copied for record in self._records]

    @staticmethod
    def _assigns(part: object) -> bool:
        """Whether methods that iterate assign to attributes that no ``set_epoch`` sets, or workers go on."""
        if isinstance(part, FunctionType):
            return changes_itself(part)
        if has_epochs(part):
            return False
        return keeps_passes(part) or writes_attributes(type(part), "__iter__", "__next__", "_get_iterator")

    def keeps(self, batches: Iterator[object] | None) -> bool:
        """Whether an iterator is used again: its loader's workers stay."""
        loaders = (part for part in self.parts if isinstance(part, DataLoader) and part.persistent_workers)
        return any(iterator_of_loader(loader) is batches is not None for loader in loaders)

    def _unseeded_items(self) -> list[object]:
        seeded = set(map(id, self._generators))
        return [value for value in self._items if id(value) not in seeded]

    def _state(self, record: _Record) -> dict[str, object]:
        """What a pass may leave behind in a copy: generators that each pass seeds don't count."""
        seeded = set(map(id, self._generators))
        left_out = _SET_FOR_EACH_PASS if isinstance(record.copied, DataLoader) else frozenset()
        attributes = attributes_of(record.copied).items()
        return {name: value for name, value in attributes if name not in left_out and id(value) not in seeded}

    def _take(self, value: object, seeds: bool, *, iterated: bool = False) -> Any:
        """The copy of a value, the same one whenever it is met; ``iterated``: of what a pass iterates over itself."""
        if id(value) not in self._copies:
            self._copies[id(value)] = self._copy(value, seeds, iterated)
            self._originals.append(value)
        return self._copies[id(value)]

    def _copy(self, value: object, seeds: bool, iterated: bool) -> object:
        kind = type(value)
        if kind in CONTAINERS or isinstance(value, tuple):
            return self._container(value, seeds)
        if isinstance(value, FunctionType):
            return self._function(value, seeds) if changes_itself(value) or holds_changing(value) else value
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._take(value.__self__, seeds))
        if type(value) is partial:
            return _partial(value, [self._take(part, seeds) for part in inside_of(value)])
        if kind is count:
            # Iterators of itertools can't be copied from Python 3.14 on; count(5, 2) shows where it stands.
            start = ast.literal_eval(repr(value).removeprefix("count"))
            return count(*start) if isinstance(start, tuple) else count(start)
        if type(value) is torch.Tensor:
            return value.detach().clone() if value.numel() == 1 and not value.requires_grad else value
        generator = self._generator(value, seeds)
        if generator is not None:
            return generator
        if isinstance(value, Iterator) and not has_attributes(value):
            self.drawn_once |= iterated
            return value
        return self._object(value, seeds) if iterated or is_iterated(value) else value

    def _container(self, value: Any, seeds: bool) -> object:
        """A copy of a container, with copies of the items that a pass may change."""
        inside = inside_of(value)
        # Lists of a million indices or of file names and labels are common: copied at once, not one by one.
        kinds = {type(item) for item in inside}
        if not (seeds and kinds - SIMPLE - {tuple}) and not holds_changing(value):
            return value if isinstance(value, tuple) else copy.copy(value)
        items = [self._take(item, seeds) for item in inside]
        self._items += (copied for copied, item in zip(items, inside, strict=True) if copied is not item)
        kind = type(value)
        if kind in MAPPINGS:
            result = copy.copy(value)
            result.update(zip(value, items, strict=True))
            return result
        if kind is deque:
            return deque(items, value.maxlen)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)

    def _function(self, value: FunctionType, seeds: bool) -> FunctionType:
        """A function with free variables of its own."""
        cells = tuple(CellType() for _ in value.__closure__ or ())
        result = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        result.__kwdefaults__ = value.__kwdefaults__
        vars(result).update(vars(value))
        self._record(value, result, seeds)
        return result

    def _generator(self, value: object, seeds: bool) -> object:
        """A generator of the same kind, or the copy of an array; None where ``value`` is neither."""
        result: object = None
        numpy = numpy_random()
        if isinstance(value, torch.Generator):
            result = torch.Generator(value.device).set_state(value.get_state())
        elif isinstance(value, random.Random):
            result = copy.copy(value)
        elif is_array(value):
            return copy.copy(value) if seeds else None
        elif numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState)):
            result = copy.deepcopy(value)
        if result is not None and seeds:
            self._generators.append(result)
        return result

    def _object(self, value: object, seeds: bool) -> object:
        result = None
        if has_attributes(value) and not hasattr(type(value), "__del__"):
            with suppress(*_UNCOPYABLE):
                result = copy.copy(value)
                # Some hand out their very attributes to be pickled, which the copy then has, too.
                if getattr(result, "__dict__", None) is getattr(value, "__dict__", self):
                    result.__dict__ = dict(vars(value))
        if result is None:
            if has_epochs(value):
                self._uncopied.append(value)
            return value
        self._record(value, result, seeds or isinstance(value, Sampler))
        return result

    def _record(self, original: object, copied: object, seeds: bool) -> None:
        self._copies[id(original)] = copied
        record = _Record(original, copied, seeds)
        self._records.append(record)
        self._follow(record)

    def _follow(self, record: _Record) -> None:
        """Copy the attributes that the original has got since they were last copied."""
        attributes, copied = attributes_of(record.original), record.copied
        for name, value in attributes.items():
            if name in record.base and is_unchanged(value, record.base[name], record.seeds):
                continue
            if name in record.base:
                self._copies.pop(id(value), None)
            record.base[name] = remembered(value, record.seeds)
            seeds = record.seeds
            if isinstance(copied, DataLoader):
                if name in _SHARED_BY_LOADERS:
                    vars(copied)[name] = value
                    continue
                if name == KEPT_ITERATOR or (name == "persistent_workers" and not is_stream_of(copied)):
                    # Workers that stay are those of the original, and what they draw depends on earlier passes.
                    vars(copied)[name] = None if name == KEPT_ITERATOR else False
                    continue
                seeds = seeds or name == "generator"
            if is_torchs_sampler(copied):
                if name == "generator":  # of its own, where it would draw from the global one, too
                    value = self._generator(torch.Generator(), seeds=True)
                _set(copied, name, value)
                continue
            iterated = name in ("sampler", "batch_sampler") and value is not None
            _set(copied, name, self._take(value, seeds or iterated, iterated=iterated))
        for name in record.base.keys() - attributes.keys():
            del record.base[name]
            vars(copied).pop(name, None)


def _set(value: object, name: str, attribute: object) -> None:
    # Past a __setattr__, with which a DataLoader or a frozen class refuses.
    if isinstance(value, FunctionType):
        cells_of(value)[name].cell_contents = attribute
    elif name in slots_of(type(value)):
        object.__setattr__(value, name, attribute)
    else:
        vars(value)[name] = attribute


def _partial(value: partial[object], parts: list[Any]) -> partial[object]:
    """A ``functools.partial`` with other :func:`~pure_loop.data.changes.inside_of`."""
    function, *arguments = parts
    end = len(value.args)
    return partial(function, *arguments[:end], **dict(zip(value.keywords, arguments[end:], strict=True)))


def _reseed(generator: Any, seed: int) -> None:
    """Start a generator at a seed, as a new one of its kind would."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:  # numpy.random.RandomState
        generator.seed(seed & 0xFFFFFFFF)
