"""How streams tell where they stand, each in the way of its library.

Recognised are objects with ``state_dict`` and ``load_state_dict``, or ``get_state`` and ``set_state`` (a dataloader,
the dataset of a DataLoader without workers, the iterator of a dataloader), webdataset's pipelines, which have neither,
and classes that were registered. The protocol: what is given after batch k leads a new object to batch k + 1.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any, TypeAlias

import attrs
from torch.utils.data import DataLoader, IterableDataset

from pure_loop._internal.pytree import PyTree
from pure_loop.data.shards import pipeline_of
from pure_loop.errors import ArgumentError, ArgumentTypeError

Get: TypeAlias = Callable[..., PyTree]
Put: TypeAlias = Callable[[Any, PyTree], Any]

_registered: dict[type, tuple[Get, Put] | None] = {}
_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


def register_position(cls: type, *, get: Get | None, put: Put | None) -> None:
    """Say how a stream of a class of yours tells where it stands, and how it goes there.

    Classes with ``state_dict()`` and ``load_state_dict(state)`` need it not. Subclasses are registered with a class.

    Args:
        cls: the class of a dataloader, or of the dataset of a DataLoader without workers.
        get: ``stream -> token``, or ``(stream, iterator) -> token``, where the iterator is that of this pass. It is
            called before each batch. A token is made of numbers, texts, bytes, tensors, None, and dicts, lists and
            tuples of them.
        put: ``(stream, token) -> None``: the next ``iter(stream)`` gives the batch that followed when the token was
            taken; or it returns that iterator. None, with ``get=None``: the class has no position, so that a run that
            resumes reads it again from the beginning of the epoch.

    Raises:
        ArgumentTypeError: ``cls`` is no class, or the others are no functions.
        ArgumentError: one of the two functions is None.

    >>> class Lines:
    ...     at = 0
    ...
    ...     def __iter__(self):
    ...         while self.at < 4:
    ...             self.at += 1
    ...             yield [self.at]
    >>> register_position(Lines, get=lambda lines: lines.at, put=lambda lines, at: setattr(lines, "at", at))
    """
    if not isinstance(cls, type):
        raise ArgumentTypeError(
            f"register_position({cls!r:.60}): the first argument is a class; of an object it is type(object)."
        )
    for name, function in (("get", get), ("put", put)):
        if function is not None and not callable(function):
            raise ArgumentTypeError(f"register_position({name}={function!r:.60}): give a function, or None for both.")
    if get is None or put is None:
        if get is not put:
            raise ArgumentError(
                "register_position takes two functions, get(stream) -> token and put(stream, token), or None for both: "
                "then the stream is read again."
            )
        _registered[cls] = None
    else:
        _registered[cls] = get, put


@attrs.define
class Tokens:
    """How a stream tells where it stands in one pass.

    Attributes:
        loader: what is iterated over.
        owner: what has the token: the loader, its dataset, or None: its iterator.
        get, put: how.
        begins: whether ``put`` is called with the number of the pass where one begins.
        is_registered: whether the class was registered.
        by_iterator: whether ``get`` takes the iterator, too.
        iterator: of the pass, once it has begun.
    """

    loader: Any
    owner: Any
    get: Get
    put: Put
    begins: bool = False
    is_registered: bool = False
    by_iterator: bool = False
    iterator: Any = None

    def begin(self, token: PyTree, number: int, *, at: bool) -> Iterator[Any]:
        """Begin the pass of a number: from its beginning, or ``at`` a token."""
        result = None
        if self.owner is not None and (at or self.begins):
            result = self.put(self.owner, token if at else number)
        if result is None:
            self.iterator = iter(self.loader)
        elif self.owner is self.loader:
            self.iterator = result
        else:
            dataset = self.loader.dataset
            vars(self.loader)["dataset"] = result  # for this pass
            self.iterator = iter(self.loader)
            vars(self.loader)["dataset"] = dataset
        if self.owner is None:
            methods = methods_of(self.iterator)
            if methods is None:
                self.owner = _NOTHING
            else:
                self.owner, (self.get, self.put) = self.iterator, methods
                if at:
                    self.put(self.owner, token)
        return self.iterator  # type: ignore[no-any-return]

    @property
    def tells(self) -> bool:
        """Whether the pass, which has begun, has tokens."""
        return self.owner is not _NOTHING

    def token(self) -> PyTree:
        """Where it stands: after the last batch."""
        try:
            return self.get(self.owner, self.iterator) if self.by_iterator else self.get(self.owner)
        except Exception as error:
            error.add_note(
                f"raised by the function that tells where {name_of(self.loader)} stands, from which fit resumes; "
                "pl.data.register_position(Class, get=None, put=None) says that it has none"
            )
            raise


_NOTHING: Any = object()
# Libraries whose tokens are of a version. What the program itself has it changes when it likes.
_LIBRARIES = frozenset({"datasets", "grain", "torchdata", "webdataset"})


def name_of(loader: Any) -> str:
    """The class whose state is the token, and the version of its package: ``"IterableDataset 5.2.0"``."""
    owner = loader.dataset if type(loader) is DataLoader else loader
    cls = type(owner)
    package = cls.__module__.partition(".")[0]
    if package not in _LIBRARIES:
        return cls.__qualname__
    return f"{cls.__qualname__} {metadata.version(package)}"


def tokens_of(loader: Any) -> Tokens | None:
    """How a stream tells where it stands; None: it doesn't, and :func:`why_not` says why."""
    owner = _owner(loader)
    if owner is None or why_not(loader) is not None:
        return None
    for cls in type(owner).__mro__:
        if cls in _registered:
            functions = _registered[cls]
            if functions is None:
                return None
            return Tokens(loader, owner, *functions, is_registered=True, by_iterator=_takes(functions[0], 2))
    pipeline = pipeline_of(owner)
    if pipeline is not None:
        get, put = lambda _: pipeline.token(), lambda _, token: pipeline.begin(token)
        return Tokens(loader, owner, get, put, begins=True)
    methods = methods_of(owner)
    if methods is not None:
        return Tokens(loader, owner, *methods)
    # Its iterator may have one; that of torch's own loaders has none.
    return None if isinstance(loader, DataLoader) else Tokens(loader, None, _none, _none)


def _none(*_: object) -> None:
    return None


def _owner(loader: Any) -> Any:
    """What may know where a stream stands; None: what does is in workers, or there is nothing."""
    if type(loader) is not DataLoader:
        return loader
    return loader.dataset if isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0 else None


def methods_of(value: object) -> tuple[Get, Put] | None:
    """The two methods of the protocol, as functions of the object; None: it has others, or takes other arguments."""
    for get, put in _METHODS:
        methods = getattr(type(value), get, None), getattr(type(value), put, None)
        if callable(methods[0]) and callable(methods[1]) and _takes(methods[0], 1) and _takes(methods[1], 2):
            return methods[0], partial(_load, methods[1])
    return None


def _load(method: Callable[[Any, PyTree], object], owner: Any, token: PyTree) -> None:
    method(owner, token)  # some return themselves


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with so many arguments, and no other."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def why_not(loader: Any) -> str | None:
    """Why a stream of a known library has no position, in words; None: nothing is known against it."""
    owner = _owner(loader)
    if owner is None:
        return (
            f"the {type(loader).__name__} reads in workers, whose datasets can't be asked: use torchdata's "
            "StatefulDataLoader, which asks them"
        )
    dataset = owner.dataset if isinstance(owner, DataLoader) else owner
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(dataset, datasets.IterableDataset) and _buffers(dataset):
        return (
            "the state of a Hugging Face dataset does not hold its shuffle buffer, so that the samples in it would be "
            "lost: shuffle once and save (Dataset.shuffle().to_iterable_dataset(num_shards=...)), or shuffle the order "
            "of shards alone, shuffle(buffer_size=1)"
        )
    if isinstance(owner, DataLoader) and isinstance(dataset, IterableDataset):
        generator = inspect.isgeneratorfunction(type(dataset).__iter__)
        if methods_of(dataset) is None and generator:
            return (
                f"{type(dataset).__name__} has no state_dict and load_state_dict, so that the {type(owner).__name__} "
                "reads it again itself"
            )
    pipeline = pipeline_of(owner)
    return None if pipeline is None else pipeline.why_not


def _buffers(dataset: Any) -> bool:
    """Whether a streaming dataset of Hugging Face's has a shuffle buffer."""
    pending: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while pending:
        item = pending.pop()
        if type(item).__name__ == "BufferShuffledExamplesIterable" and item.buffer_size > 1:
            return True
        pending += [value for name, value in getattr(item, "__dict__", {}).items() if name.startswith("ex_iterable")]
        pending = [part for value in pending for part in (value if isinstance(value, list) else [value])]
    return False
