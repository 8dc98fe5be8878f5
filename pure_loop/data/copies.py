"""Private copies of objects that are iterated over again and again: samplers, loaders, iterable datasets.

An object that counts its passes, or shuffles what it holds in place, gives another order in each pass. Its passes are
made on a private copy, so the object that was given stays as it was, and the passes before epoch k can be made again
in another process.
"""

from __future__ import annotations

import ast
import copy
import dis
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from itertools import count, islice
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import attrs
import torch

from pure_loop._internal.torch_private import KEPT_ITERATOR, iterator_of_loader, of_one_pass
from pure_loop.random import derive

__all__ = ["Private", "has_epochs", "writes_attributes"]

# What an __iter__ might shuffle in place, and what holds nothing that it could.
_MAPPINGS = frozenset((dict, OrderedDict, defaultdict))
_CONTAINERS = frozenset((list, set, deque, *_MAPPINGS))
_SIMPLE = frozenset((int, float, bool, str, bytes, type(None)))
# How many items of a container are looked into: a list of a million pairs of a file name and a label is common.
_SEARCHED = 1000

# Of a DataLoader, by its source.
_SET_FOR_EACH_PASS = frozenset(("generator", "in_order", "persistent_workers", "collate_fn", *of_one_pass))

# Of a DataLoader, too: what they count or keep is not the order of a pass.
_SHARED_BY_LOADERS = frozenset(("collate_fn", "worker_init_fn"))

# Large, or functions, whose free variables are looked at instead.
_NO_PARTS = (type, FunctionType, torch.Tensor, torch.nn.Module)

# How objects say that they can't be copied.
_UNCOPYABLE = (TypeError, NotImplementedError, copy.Error)


@attrs.define(eq=False)
class _Record:
    """One object that was copied attribute by attribute, or a function whose free variables were copied."""

    original: Any
    new: Any
    seeds: bool
    # The attributes of the original when they were last copied, and those of the copy before its next pass.
    base: dict[str, Any] = attrs.field(factory=dict)
    before: dict[str, Any] = attrs.field(factory=dict)


class Private:
    """A copy of an object, whose iteration writes nothing that is seen from the original.

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

    def __init__(self, original: Any, *, shared: tuple[Any, ...] = (), seeds: bool) -> None:
        self.drawn_once = False
        self._copies: dict[int, Any] = {id(item): item for item in shared}
        # Originals stay alive, so that no other object has the id of one of them.
        self._originals: list[Any] = []
        self._records: list[_Record] = []
        self._generators: list[Any] = []
        # Copies in containers, and what they were before the next pass.
        self._items: list[Any] = []
        self._items_before: list[Any] = []
        # Objects that refuse to be copied, and want to know the epoch.
        self._uncopied: list[Any] = []
        self._is_watched = False
        self.value = self._take(original, seeds, whole=True)

    def begin(self, seed: int, epoch: int) -> Any:
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
                record.before = {name: _kept(value, record.seeds) for name, value in self._state(record).items()}
            self._items_before = [_kept(value, arrays=True) for value in self._unseeded_items()]
        return self.value

    def watch(self) -> None:
        """Remember what the copy is when a pass begins, for :meth:`changed`."""
        self._is_watched = True

    def changed(self) -> bool:
        """Whether a watched copy is no longer what it was when the last pass began."""
        for record in self._records:
            now = self._state(record)
            if now.keys() != record.before.keys():
                return True
            if not all(_is_as(value, record.before[name], record.seeds) for name, value in now.items()):
                return True
        items = zip(self._unseeded_items(), self._items_before, strict=True)
        return not all(_is_as(value, before, arrays=True) for value, before in items)

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
        names = ("Sampler", "IterableDataset", "DataLoader")
        return any(self._assigns(part) for part in self.parts if any(_is(part, name) for name in names))

    @property
    def parts(self) -> list[Any]:
        """The copies of objects that were made."""
        return [record.new for record in self._records]

    @staticmethod
    def _assigns(part: Any) -> bool:
        """Whether methods that iterate assign to attributes that no ``set_epoch`` sets, or workers go on."""
        if type(part) is FunctionType:
            return _changes_itself(part)
        if has_epochs(part):
            return False
        return _keeps_passes(part) or writes_attributes(type(part), "__iter__", "__next__", "_get_iterator")

    def keeps(self, batches: Any) -> bool:
        """Whether an iterator is that of a loader whose workers stay, and is used again."""
        return any(_is(part, "DataLoader") and iterator_of_loader(part) is batches is not None for part in self.parts)

    def _unseeded_items(self) -> list[Any]:
        seeded = set(map(id, self._generators))
        return [value for value in self._items if id(value) not in seeded]

    def _state(self, record: _Record) -> dict[str, Any]:
        """What a pass may leave behind in a copy: generators that each pass seeds don't count."""
        seeded = set(map(id, self._generators))
        left_out = _SET_FOR_EACH_PASS if _is(record.new, "DataLoader") else frozenset()
        attributes = _attributes(record.new).items()
        return {name: value for name, value in attributes if name not in left_out and id(value) not in seeded}

    def _take(self, value: Any, seeds: bool, *, whole: bool) -> Any:
        if id(value) not in self._copies:
            self._copies[id(value)] = self._copy(value, seeds, whole)
            self._originals.append(value)
        return self._copies[id(value)]

    def _copy(self, value: Any, seeds: bool, whole: bool) -> Any:
        kind = type(value)
        if kind in _CONTAINERS or isinstance(value, tuple):
            return self._container(value, seeds)
        if kind is FunctionType:
            return self._function(value, seeds) if _may_change(value) else value
        if kind is MethodType or kind is partial:
            parts = [self._take(part, seeds, whole=False) for part in _inside(value)]
            return MethodType(value.__func__, *parts) if kind is MethodType else _partial(value, parts)
        if kind is count:
            # Iterators of itertools can't be copied from Python 3.14 on; count(5, 2) shows where it stands.
            start = ast.literal_eval(repr(value).removeprefix("count"))
            return count(*start) if isinstance(start, tuple) else count(start)
        if kind is torch.Tensor:
            return value.detach().clone() if value.numel() == 1 and not value.requires_grad else value
        new = self._generator(value, seeds)
        if new is not None:
            return new
        if isinstance(value, Iterator) and not _has_attributes(value):
            self.drawn_once |= whole
            return value
        return self._object(value, seeds) if whole or _is_iterated(value) else value

    def _container(self, value: Any, seeds: bool) -> Any:
        """A copy of a container, with copies of the items that a pass may change."""
        inside = _inside(value)
        # Lists of a million indices or of file names and labels are common: copied at once, not one by one.
        kinds = {type(item) for item in inside}
        if not (seeds and kinds - _SIMPLE - {tuple}) and not _holds_changing(value):
            return value if isinstance(value, tuple) else copy.copy(value)
        items = [self._take(item, seeds, whole=False) for item in inside]
        self._items += (new for new, item in zip(items, inside, strict=True) if new is not item)
        kind = type(value)
        if kind in _MAPPINGS:
            new = copy.copy(value)
            new.update(zip(value, items, strict=True))
            return new
        if kind is deque:
            return deque(items, value.maxlen)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)

    def _function(self, value: FunctionType, seeds: bool) -> FunctionType:
        """A function with free variables of its own."""
        cells = tuple(CellType() for _ in value.__closure__ or ())
        new = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        new.__kwdefaults__ = value.__kwdefaults__
        vars(new).update(vars(value))
        self._copies[id(value)] = new
        record = _Record(value, new, seeds)
        self._records.append(record)
        self._follow(record)
        return new

    def _generator(self, value: Any, seeds: bool) -> Any:
        """A generator of the same kind, or the copy of an array; None where ``value`` is neither."""
        new: Any = None
        numpy: Any = sys.modules.get("numpy")
        if isinstance(value, torch.Generator):
            new = torch.Generator(value.device)
            new.set_state(value.get_state())
        elif isinstance(value, random.Random):
            new = copy.copy(value)
        elif numpy is not None:
            if isinstance(value, numpy.ndarray):
                return value.copy() if seeds else None
            if isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
                new = copy.deepcopy(value)
        if new is not None and seeds:
            self._generators.append(new)
        return new

    def _object(self, value: Any, seeds: bool) -> Any:
        new = None
        if _has_attributes(value) and not hasattr(type(value), "__del__"):
            with suppress(*_UNCOPYABLE):
                new = copy.copy(value)
        if new is None:
            if has_epochs(value):
                self._uncopied.append(value)
            return value
        self._copies[id(value)] = new
        record = _Record(value, new, seeds or _is(value, "Sampler"))
        self._records.append(record)
        self._follow(record)
        return new

    def _follow(self, record: _Record) -> None:
        """Copy the attributes that the original has got since they were last copied."""
        now = _attributes(record.original)
        for name, value in now.items():
            if name in record.base and _is_as(value, record.base[name], record.seeds):
                continue
            if name in record.base:
                self._copies.pop(id(value), None)
            record.base[name] = _kept(value, record.seeds)
            seeds = record.seeds
            if _is(record.new, "DataLoader"):
                if name in _SHARED_BY_LOADERS:
                    vars(record.new)[name] = value
                    continue
                if name == KEPT_ITERATOR or (name == "persistent_workers" and not _is_stream(record.original)):
                    # Workers that stay are those of the original, and what they draw depends on earlier passes.
                    vars(record.new)[name] = None if name == KEPT_ITERATOR else False
                    continue
                seeds = seeds or name == "generator"
            if _is_torchs_sampler(record.new):
                if name == "generator":  # of its own, where it would draw from the global one, too
                    value = self._generator(torch.Generator(), seeds=True)
                _set(record.new, name, value)
                continue
            whole = name in ("sampler", "batch_sampler") and value is not None
            _set(record.new, name, self._take(value, seeds or whole, whole=whole))
        for name in record.base.keys() - now.keys():
            del record.base[name]
            vars(record.new).pop(name, None)


def has_epochs(value: Any) -> bool:
    """Whether an object wants to know the number of the pass, by a method ``set_epoch``."""
    return callable(getattr(value, "set_epoch", None))


def _slots(kind: type) -> list[str]:
    own = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [name for members in own for name, slot in members.items() if isinstance(slot, MemberDescriptorType)]


def _has_attributes(value: Any) -> bool:
    return not isinstance(value, type) and (hasattr(value, "__dict__") or bool(_slots(type(value))))


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an instance, in its ``__dict__`` and its slots; of a function its free variables."""
    if type(value) is FunctionType:
        return {name: cell.cell_contents for name, cell in _cells(value).items() if cell != CellType()}
    slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _set(value: Any, name: str, attribute: Any) -> None:
    # Past a __setattr__, with which a DataLoader or a frozen class refuses.
    if type(value) is FunctionType:
        _cells(value)[name].cell_contents = attribute
    elif name in _slots(type(value)):
        object.__setattr__(value, name, attribute)
    else:
        vars(value)[name] = attribute


def _is(value: Any, name: str) -> bool:
    """Whether a value is of one of torch's data classes, which are not imported for the question."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(value, getattr(torch_data, name))


def _is_stream(loader: Any) -> bool:
    return _is(loader.dataset, "IterableDataset")


def _keeps_passes(value: Any) -> bool:
    """Whether this is a loader whose workers go on with their copies of a stream, where a pass can't be seen."""
    return _is(value, "DataLoader") and value.persistent_workers and _is_stream(value)


def _cells(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _partial(value: Any, parts: list[Any]) -> Any:
    """A ``functools.partial`` with other :func:`_inside`."""
    function, *arguments = parts
    end = len(value.args)
    return partial(function, *arguments[:end], **dict(zip(value.keywords, arguments[end:], strict=True)))


def _inside(value: Any) -> Collection[Any]:
    """What a container holds, or a function was made with; nothing of other values."""
    kind = type(value)
    if kind in _MAPPINGS:
        return list(value.values())
    if kind in _CONTAINERS or isinstance(value, tuple):
        return list(value) if kind is set else value
    if kind is partial:
        return (value.func, *value.args, *value.keywords.values())
    if kind is MethodType:
        return (value.__self__,)
    return tuple(_attributes(value).values()) if kind is FunctionType else ()


def _holds_changing(value: Any) -> bool:
    """Whether a container or a function leads to what a pass may change; of many items the first ones are followed."""
    inside = _inside(value)
    if any(map(_changes_itself, {type(item): item for item in inside}.values())):
        return True
    pending, seen, left = deque([inside]), {id(value)}, _SEARCHED
    while pending and left:
        for item in islice(pending.popleft(), left):
            left -= 1
            if type(item) in _SIMPLE or id(item) in seen:
                continue
            if _changes_itself(item):
                return True
            seen.add(id(item))
            pending.append(_inside(item))
    return False


def _may_change(value: Any) -> bool:
    return _changes_itself(value) or _holds_changing(value)


def _changes_itself(value: Any) -> bool:
    """Whether a pass may change an item of a container: containers in containers are large, and shared."""
    if type(value) is FunctionType:
        return _rebinds(value.__code__, frozenset(value.__code__.co_freevars))
    return _draws(value) or _is_iterated(value)


def _draws(value: Any) -> bool:
    """Whether this is a generator of random numbers, or a counter."""
    if isinstance(value, (torch.Generator, random.Random, count)):
        return True
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _rebinds(code: CodeType, names: frozenset[str]) -> bool:
    """Whether code assigns to free variables (``nonlocal``)."""
    if not names:
        return False
    if any(
        each.opname in ("STORE_DEREF", "DELETE_DEREF") and each.argval in names for each in dis.get_instructions(code)
    ):
        return True
    return any(_rebinds(each, names & {*each.co_freevars}) for each in code.co_consts if isinstance(each, CodeType))


def _is_torchs_sampler(value: Any) -> bool:
    """Whether a sampler is one of torch's own that draws indices: it changes nothing but its generator."""
    return (
        _is(value, "Sampler")
        and type(value).__module__ == "torch.utils.data.sampler"
        and not _is(value, "BatchSampler")
    )


def _is_iterated(value: Any) -> bool:
    """Whether an attribute is part of an iteration: a sampler, a loader, an iterable, or a plain record of its state.

    So is an object with one of these, or a generator, as an attribute. A dataset with indices isn't, nor is a module:
    they are large, and nothing is changed by iterating.
    """
    if _iterates(value):
        return True
    if isinstance(value, _NO_PARTS) or not _has_attributes(value) or _is(value, "Dataset"):
        return False
    return not hasattr(type(value), "__getitem__") and any(
        _draws(each) or _iterates(each) for each in _attributes(value).values()
    )


def _iterates(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, _NO_PARTS) or not _has_attributes(value):
        return False
    if _is(value, "Sampler") or _is(value, "DataLoader") or _is(value, "IterableDataset"):
        return True
    if _is(value, "Dataset"):
        return False
    if kind is SimpleNamespace or hasattr(kind, "__dataclass_fields__") or attrs.has(kind):
        return True
    iterates = isinstance(getattr(kind, "__iter__", None), FunctionType)
    return iterates and not hasattr(kind, "__getitem__")


def _kept(value: Any, arrays: bool) -> Any:
    """What an attribute is compared with later, by :func:`_is_as`; ``arrays``: NumPy's are compared by value."""
    if type(value) in _CONTAINERS:
        return copy.copy(value)
    state = _state_of(value, arrays)
    return value if state is None else (value, state)


def _is_as(value: Any, kept: Any, arrays: bool) -> bool:
    kind = type(value)
    if kind in _CONTAINERS:
        if kind is not type(kept) or len(value) != len(kept):
            return False
        if kind is set:
            return bool(value == kept)
        if kind is dict:
            pairs = zip((*value, *value.values()), (*kept, *kept.values()), strict=True)
        else:
            pairs = zip(value, kept, strict=True)
        return all(one is other for one, other in pairs)
    state = _state_of(value, arrays)
    if state is None:
        return value is kept
    return type(kept) is tuple and len(kept) == 2 and kept[0] is value and bool(kept[1] == state)


def _state_of(value: Any, arrays: bool) -> Any:
    """Where a generator or counter stands, or what is in a small tensor or an array; None for all else."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value) is count:
        return repr(value)
    if type(value) is torch.Tensor:
        return repr(value.tolist()) if value.numel() == 1 else None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, numpy.random.RandomState):
            return repr(value.get_state(legacy=False))
        if arrays and isinstance(value, numpy.ndarray):
            return value.tobytes()
    return None


def _reseed(generator: Any, seed: int) -> None:
    """Start a generator at a seed, as a new one of its kind would."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        numpy: Any = sys.modules["numpy"]
        if isinstance(generator, numpy.random.RandomState):
            generator.seed(seed & 0xFFFFFFFF)
        else:
            generator.bit_generator.state = type(generator.bit_generator)(seed).state


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
            if any(
                get_instruction.opname in ("STORE_ATTR", "DELETE_ATTR")
                for get_instruction in dis.get_instructions(code)
            ):
                return True
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            todo += code.co_names
    return False
