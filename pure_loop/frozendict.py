"""A read-only dict that is a pytree: how a State holds parameters, buffers, gradients and memory.

It is a ``dict``, so ``torch.func.functional_call(module, state.params, x)``, ``{**state.params}``
and ``module.load_state_dict(state.params)`` take it as it is; it keeps the order in which it was
built under both pytree engines (a plain dict is sorted by one of them and not by the other).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pure_loop._internal import pytree as _pytree
from pure_loop._internal.pytree import PyTree
from pure_loop._internal.reprs import cell, number, table
from pure_loop._internal.suggestions import Elsewhere, not_there
from pure_loop.errors import DonatedStateError, FrozenDictError, MissingNameError

__all__ = ["FrozenDict", "Overwritten", "OverwrittenValue"]

K = TypeVar("K")
V = TypeVar("V")
K2 = TypeVar("K2")
V2 = TypeVar("V2")


class FrozenDict(dict[K, V]):
    """A ``dict`` that can't be changed after it was built.

    Make another one instead: ``FrozenDict({**old, "weight": new})`` or ``old | {"weight": new}``.

    Raises:
        FrozenDictError: (a TypeError) on every attempt to write.
        MissingNameError: (a KeyError) for a name that is not there; says which are.

    >>> memory = FrozenDict(count=1)
    >>> memory | {"count": 2}
    FrozenDict({'count': 2})
    >>> memory["count"] = 2
    Traceback (most recent call last):
    ...
    pure_loop.errors.FrozenDictError: this mapping belongs to a State and is read-only; ...
    """

    # `lent`: not set, or None: only the loop has read the mapping since it made it, or since nothing else was found to
    # have a tensor of it. True: code outside of the loop has, and may keep one. `readers`: what reads it now in other
    # threads, where no step may write with donate=True either (pure_loop/stages/workspace.py).
    # Of parameters that are leaves of autograd, which are a mapping as any other to code that goes through both:
    # `origin`: the parameters that have the same memory. `frozen`: the names of those that need no gradient. `holder`:
    # between a forward and its backward, the module instance that the graph goes through (pure_loop/model/model.py).
    # `field`: the field of a State that the mapping is, which its error about a name explains; not set: another one.
    __slots__ = ("__weakref__", "field", "frozen", "holder", "lent", "origin", "readers")

    field: str
    frozen: frozenset[str]
    holder: Any
    lent: Any
    origin: FrozenDict[K, V]
    readers: set[object]

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise FrozenDictError(
            "this mapping belongs to a State and is read-only; build another one, "
            "FrozenDict({**old, key: value}), and give it back with state.replace(...)"
        )

    if TYPE_CHECKING:  # so that type checkers refuse a write
        __setitem__: None  # type: ignore[assignment]
        __delitem__: None  # type: ignore[assignment]
        __ior__: None  # type: ignore[assignment]
        clear: None  # type: ignore[assignment]
        pop: None  # type: ignore[assignment]
        popitem: None  # type: ignore[assignment]
        setdefault: None  # type: ignore[assignment]
    else:
        __setitem__ = __delitem__ = __ior__ = _refuse
        clear = pop = popitem = setdefault = _refuse

    def __missing__(self, key: object) -> NoReturn:
        raise MissingNameError(not_there(key, self, getattr(self, "field", "")))

    def update(self, *others: Any, **items: Any) -> None:
        # torch.func.functional_call writes back what it read; the same objects change nothing.
        argument = dict(*others, **items)
        if any(key not in self or self[key] is not value for key, value in argument.items()):
            self._refuse()

    def __or__(self, other: Mapping[K2, V2]) -> FrozenDict[K | K2, V | V2]:
        merged: dict[Any, Any] = {**self, **other}
        return FrozenDict(merged)

    def __ror__(self, other: Mapping[K2, V2]) -> FrozenDict[K | K2, V | V2]:
        merged: dict[Any, Any] = {**other, **self}
        return FrozenDict(merged)

    def copy(self) -> FrozenDict[K, V]:
        return self

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def __repr__(self) -> str:
        """Names, numbers, also those of tensors of shape (), and of other tensors shapes and dtypes."""
        items = [f"{key!r}: {_inside(value)}" for key, value in islice(self.items(), _MOST)]
        if len(self) > _MOST:
            items.append(f"... {len(self) - _MOST} more")
        return f"FrozenDict({{{', '.join(items)}}})"

    def _repr_html_(self) -> str:
        """A table for notebooks, of what its repr has, with a row for each item of mappings inside."""
        rows = list(islice(_rows(self), _MOST_ROWS + 1))
        return table([*rows[:_MOST_ROWS], ("...", "more")] if len(rows) > _MOST_ROWS else rows)


def _inside(value: object) -> str:
    """An item in the repr of a mapping: numbers, as metrics are, stand there one by one."""
    numbers = isinstance(value, FrozenDict) and all(isinstance(number(item), float) for item in value.values())
    return repr(value) if numbers else cell(value)


def _rows(mapping: FrozenDict[Any, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in mapping.items():
        if type(value) is FrozenDict:
            yield from _rows(value, f"{path}{key}/")
        else:
            yield f"{path}{key}", cell(value)


# Names that are often written as attributes. A __getattr__ for all would cost each step, which asks for unset slots.
for _name in ("val", "valid", "validation", "train", "test", "eval", "loss", "accuracy", "weight", "bias"):
    setattr(FrozenDict, _name, Elsewhere(_name, f"an item is read by its name, [{_name!r}]"))

_MOST = 20
_MOST_ROWS = 100


def _flatten(value: FrozenDict[str, Any]) -> tuple[Sequence[object], object, Sequence[str]]:
    names = tuple(value)
    return tuple(value.values()), names, names


def _unflatten(names: tuple[str, ...], children: Iterable[PyTree]) -> FrozenDict[str, Any]:
    return FrozenDict(zip(names, children, strict=True))


_pytree.register(FrozenDict, _flatten, _unflatten, attributes=False)


class _Refusing:
    """Every way to read a value is an error that says which step has written to it."""

    __slots__ = ()

    lent: Any  # the name of the field, and what became of it

    def refuse_reading(self, *_: object, **__: object) -> NoReturn:
        """
        Raises:
            DonatedStateError: always.
        """
        field, what = self.lent
        raise DonatedStateError(
            f"state.{field} of this State was {what}. With donate=True every State loses its parameters and optimizer "
            'state to the next step: write donate="auto", which overwrites no State that is kept, or donate=False; or '
            'keep a clone of the tensor. With "auto" only the State in the loop variable loses something: if the batch '
            "after it failed half-way, if the variable is read while a step runs, or if an iterator between the stream "
            "and the loop (takewhile, filter) left out the next pair. Keep it in another variable (kept = state), or "
            "end the loop by break."
        )

    def __repr__(self) -> str:
        return "<{}, {}>".format(*self.lent)


class OverwrittenValue(_Refusing):
    """In the place of a tensor, or of what holds some, to which a step has written."""

    __slots__ = ("lent",)

    def __init__(self, field: str, what: str) -> None:
        self.lent = field, what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python asks for what it may do without
        self.refuse_reading()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        values = (*args, *(kwargs or {}).values())
        overwritten = next((value for value in values if isinstance(value, cls)), cls("value", "overwritten by a step"))
        overwritten.refuse_reading()

    def __format__(self, spec: str) -> str:
        return self.refuse_reading() if spec else repr(self)

    __hash__ = None  # type: ignore[assignment]


_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_CONVERSIONS = ("bool", "int", "float", "complex", "index", "len", "iter", "getitem", "reduce_ex", "array")
_OF_ONE = ("neg", "abs", "invert", "round", "trunc", "pos")
_OF_TWO = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow")
_OF_BITS = ("and", "or", "xor", "lshift", "rshift")
_BINARY = tuple(f"{side}{name}" for side in ("", "r") for name in _OF_TWO + _OF_BITS)
for _name in (*_COMPARISONS, *_CONVERSIONS, *_OF_ONE, *_BINARY):
    setattr(OverwrittenValue, f"__{_name}__", _Refusing.refuse_reading)


class Overwritten(_Refusing, FrozenDict[Any, Any]):
    """In the place of a mapping, after a step has written to its tensors."""

    __slots__ = ()

    @classmethod
    def by(cls, field: str, what: str) -> Overwritten:
        """In the place of this field of a State; ``what`` became of it."""
        result = cls()
        result.lent = field, what
        return result

    __getitem__ = __iter__ = __len__ = __contains__ = __or__ = __ror__ = __eq__ = __ne__ = _Refusing.refuse_reading
    __reversed__ = keys = values = items = get = copy = __copy__ = __reduce__ = _Refusing.refuse_reading
    __hash__ = None  # type: ignore[assignment]


# As a leaf of a pytree it would be lost without an error.
_pytree.register(Overwritten, Overwritten.refuse_reading, _unflatten, attributes=False)
