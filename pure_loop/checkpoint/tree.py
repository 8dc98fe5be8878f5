"""Any value that a State holds, as JSON that names tensors, and back.

JSON's own values stand for themselves: None, bools, whole numbers, finite floats (as the shortest text that reads back
equal), texts and lists. Everything else is an object with one key that says what it is, ``{"tuple": [...]}``.
Classes that it can name are those of the library, and others that join by ``pl.checkpoint.register``.
"""

from __future__ import annotations

import base64
import enum
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from pure_loop._internal.pytree import PyTree
from pure_loop._internal.registry import named, register, register_subclasses, registered
from pure_loop._internal.tree_ops import is_sharded, local_tensor, reshaped_shard
from pure_loop.checkpoint.container import CODES, are_counts, raw
from pure_loop.checkpoint.validation import MOST_DIGITS, Json, decoded, refuse_collisions, shortened
from pure_loop.data.position import Position
from pure_loop.errors import ArgumentTypeError, CheckpointError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.membership import Members, MemberValues
from pure_loop.model.names import Note
from pure_loop.precision import LossScale
from pure_loop.state import State
from pure_loop.time import Time, Timestamp, TimeUnit

_DEEPEST = 100
_LARGEST_INTEGER = 10**MOST_DIGITS


class Writer:
    """Turns values into JSON, and gathers their tensors by name.

    Args:
        home: the device of the parameters.
        parts: whether tensors may be in parts, of which this rank holds one.

    Attributes:
        tensors: by the names under which the JSON knows them: contiguous, of dtypes that the file format has.
    """

    def __init__(self, home: torch.device, *, parts: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._home, self._parts = home, parts
        # By identity, with the tensor itself, which has to live until the end.
        self._written: dict[int, tuple[Tensor, dict[str, Json]]] = {}

    def write(self, value: PyTree, path: tuple[str, ...]) -> Json:
        """
        Args:
            value: a tree of tensors, numbers, texts and containers.
            path: where in the State it is, for names and errors.

        Raises:
            ArgumentTypeError: a value that a checkpoint can't hold; names its place.
        """
        cls = type(value)
        if cls is int and abs(value) >= _LARGEST_INTEGER:
            raise ArgumentTypeError(
                f"state.{'.'.join(path)} is an integer of more than {MOST_DIGITS} digits, which a checkpoint can't "
                "hold: keep it as bytes, value.to_bytes(...)."
            )
        if value is None or cls in (bool, int, str) or (cls is float and math.isfinite(value)):
            return value
        if len(path) > _DEEPEST:
            raise ArgumentTypeError(
                f"state.{'.'.join(path[:4])}... is nested more than {_DEEPEST} deep: does it hold itself?"
            )
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if (write := _WRITERS.get(cls)) is not None:
            return write(self, value, path)
        if cls.__module__ == "numpy" and hasattr(value, "__array__"):
            return self._array(value, path)
        kind = registered(cls)
        if kind is None:
            _refuse_unregistered(value, path)
        if isinstance(value, enum.Enum):
            return {"enum": [kind.name, value.name]}
        fields = {name: self.write(item, (*path, name)) for name, item in kind.take_apart(value).items()}
        return {"record": kind.name, "fields": fields}

    def name_of(self, tensor: Tensor) -> str:
        """The name of a tensor that was written."""
        name: str = self._written[id(tensor)][1]["tensor"]
        return name

    def all(self, values: Iterable[PyTree], path: tuple[str, ...]) -> list[Json]:
        return [self.write(item, (*path, str(index))) for index, item in enumerate(values)]

    def mapping(self, values: Mapping[PyTree, PyTree], path: tuple[str, ...]) -> Json:
        if all(type(key) is str for key in values):
            return {key: self.write(item, (*path, key)) for key, item in values.items()}
        return [[self.write(key, (*path, "key")), self.write(item, (*path, str(key)))] for key, item in values.items()]

    def _tensor(self, tensor: Tensor, path: tuple[str, ...]) -> dict[str, Json]:
        if id(tensor) in self._written:
            return self._written[id(tensor)][1]
        is_shard = self._parts and is_sharded(tensor)
        if not is_shard:
            _refuse_unwritable(tensor, path)
        name, shape = self._free_name(path), list(tensor.shape)
        described: dict[str, Json] = {"tensor": name}
        plain = local_tensor(tensor).detach().resolve_conj().resolve_neg()
        if is_shard:
            plain = plain.contiguous()
        elif plain.stride() != torch.empty(shape, device="meta").stride():
            # As it lies in memory: kernels may sum in another order where it lies otherwise (channels_last).
            if _is_dense(plain):
                described |= {"shape": shape, "stride": list(plain.stride())}
            plain = plain.contiguous().view(shape)
        if tensor.dtype not in CODES:
            described |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}
            plain = raw(plain)
        if is_shard:
            plain = reshaped_shard(tensor, plain, [*shape, *plain.shape[len(shape) :]])
        elif tensor.device != self._home:
            described["device"] = tensor.device.type
        self.tensors[name] = plain
        self._written[id(tensor)] = tensor, described
        return described

    def _array(self, value: PyTree, path: tuple[str, ...]) -> dict[str, Json]:
        """Of NumPy, which is imported where there is such a value."""
        import numpy

        try:
            tensor = torch.from_numpy(numpy.ascontiguousarray(value).reshape(value.shape))
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError(
                f"state.{'.'.join(path)} is a NumPy array of dtype {value.dtype}, which a checkpoint can't hold: keep "
                "numbers, in the machine's byte order."
            ) from error
        kind = "array" if isinstance(value, numpy.ndarray) else "number"
        return {"numpy": kind, "of": self._tensor(tensor, path)}

    def _free_name(self, path: tuple[str, ...]) -> str:
        name, number = ".".join(path), 1
        while name in self.tensors:
            number += 1
            name = f"{'.'.join(path)}#{number}"
        return name


def _refuse_unwritable(tensor: Tensor, path: tuple[str, ...]) -> None:
    """
    Raises:
        ArgumentTypeError: a tensor that is not its memory, in a plain order.
    """
    where = f"state.{'.'.join(path)}"
    # Its type, because what may be written is its own memory, and subclasses keep other things there.
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        advice = "keep a plain tensor, .to_dense() or .dequantize(), in its place"
        if is_sharded(tensor):
            advice = "save it on all ranks, with the others"
        kind = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__} of layout {tensor.layout}"
        raise ArgumentTypeError(f"{where} is {kind}, which a file of plain tensors can't hold: {advice}.")
    if tensor.is_quantized:
        raise ArgumentTypeError(f"{where} is quantized, which a file of plain tensors can't hold: .dequantize() it.")


def _is_dense(tensor: Tensor) -> bool:
    """Whether each number has a place of its own, without holes: in the order of its strides it is contiguous."""
    return tensor.permute(sorted(range(tensor.ndim), key=lambda dim: -tensor.stride()[dim])).is_contiguous()


_WRITERS: dict[type, Callable[[Writer, PyTree, tuple[str, ...]], Json]] = {
    float: lambda writer, value, path: {"float": value.hex()},
    list: lambda writer, value, path: writer.all(value, path),
    tuple: lambda writer, value, path: {"tuple": writer.all(value, path)},
    deque: lambda writer, value, path: {"deque": writer.all(value, path), "maxlen": value.maxlen},
    torch.Size: lambda writer, value, path: {"size": list(value)},
    set: lambda writer, value, path: {"set": writer.all(_sorted(value), path)},
    frozenset: lambda writer, value, path: {"frozenset": writer.all(_sorted(value), path)},
    dict: lambda writer, value, path: {"dict": writer.mapping(value, path)},
    OrderedDict: lambda writer, value, path: {"ordered": writer.mapping(value, path)},
    FrozenDict: lambda writer, value, path: {"frozen": writer.mapping(value, path)},
    bytes: lambda writer, value, path: {"bytes": base64.b85encode(value).decode()},
    complex: lambda writer, value, path: {"complex": [value.real.hex(), value.imag.hex()]},
    torch.dtype: lambda writer, value, path: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda writer, value, path: {"device": str(value)},
}


def _refuse_unregistered(value: object, path: tuple[str, ...]) -> NoReturn:
    kind = type(value)
    is_record = any(hasattr(kind, mark) for mark in ("__attrs_attrs__", "__dataclass_fields__", "_fields"))
    advice = f"register the class where it is defined, pl.checkpoint.register({kind.__name__})"
    if not is_record and not isinstance(value, enum.Enum):
        advice = "keep a tensor, a number, a text, None, or a dict, list or tuple of such in its place"
    raise ArgumentTypeError(
        f"state.{'.'.join(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint can't hold: {advice}."
    )


def _sorted(values: Iterable[PyTree]) -> list[PyTree]:
    return sorted(values, key=lambda item: (type(item).__name__, repr(item)))


class UnknownClassError(CheckpointError):
    """A file names a class that this program hasn't registered: the file may be whole all the same."""


class Reader:
    """Makes values of JSON again.

    Args:
        tensors: by name.
        device: where those go that were on the device of the parameters; the others go to the CPU.
        path: of the file, for errors.

    Attributes:
        tensors_read: those that were read so far, by name, with what the JSON says of them.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, path: object) -> None:
        self._tensors, self._device, self._path = tensors, device, path
        self.tensors_read: dict[str, tuple[dict[str, Json], Tensor]] = {}
        self._depth = 0

    def read(self, value: Json) -> PyTree:
        """
        Raises:
            CheckpointError: the JSON says something that no value is.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        self._depth += 1
        try:
            # Where a writer stops, too: what was loaded can be saved again.
            if self._depth > _DEEPEST:
                raise CheckpointError(f"{self._path} can't be read: a value in it is nested too deep.")
            if isinstance(value, list):
                return self.items(value)
            read = _READERS.get(next(iter(value), "")) if isinstance(value, dict) else None
            if read is not None:
                return read(self, value)
        except CheckpointError:
            raise
        except _OF_NONSENSE as error:
            raise CheckpointError(
                f"{self._path} can't be read: {shortened(value)} in it is no value: {shortened(str(error), 200)}."
            ) from error
        finally:
            self._depth -= 1
        raise CheckpointError(f"{self._path} can't be read: {shortened(value)} in it is of an unknown kind.")

    def items(self, values: Json) -> list[PyTree]:
        """What a list or a tuple is made of."""
        return [self.read(value) for value in _list(values)]

    def elements(self, values: Json) -> list[PyTree]:
        """What a set is made of."""
        result = self.items(values)
        refuse_collisions(result)
        if len(set(result)) != len(result):
            raise ValueError("an element stands twice in it")
        return result

    def mapping(self, values: Json) -> dict[PyTree, PyTree]:
        if isinstance(values, dict):
            return {key: self.read(value) for key, value in values.items()}
        pairs = [(self.read(key), value) for key, value in _list(values)]
        refuse_collisions([key for key, _ in pairs])
        result = {key: self.read(value) for key, value in pairs}
        if len(result) != len(pairs):
            raise ValueError("a key stands twice in it")
        return result

    def tensor(self, described: dict[str, Json]) -> Tensor:
        name = described["tensor"]
        before, result = self.tensors_read.get(name, (described, None))
        if before != described:
            raise ValueError(f"tensor {shortened(name)} is described in two ways")
        if result is None:
            result = _as_described(self._tensors[name], described)
            if not is_sharded(result) and described.get("device", self._device.type) == self._device.type:
                result = result.to(described.get("device", self._device))
            self.tensors_read[name] = described, result
        return result

    def array(self, described: dict[str, Json]) -> PyTree:
        import numpy

        tensor = self.tensor(described["of"])
        if tensor.is_meta:
            return tensor  # of a State that is looked at before its numbers are read
        array = numpy.asarray(tensor.cpu())
        return array[()] if described["numpy"] == "number" else array

    def record(self, described: dict[str, Json]) -> PyTree:
        kind = named(described["record"])
        if kind is not None and issubclass(kind.cls, State):
            raise ValueError("a State inside of a State is never written")
        if kind is None or issubclass(kind.cls, enum.Enum):
            raise UnknownClassError(
                f"{self._path} holds a {shortened(described['record'])}, a class unknown to this program: import "
                "the module that defines it before you load; a class that is no State is made known there by "
                "pl.checkpoint.register(cls)."
            )
        return kind.put_together({name: self.read(item) for name, item in described["fields"].items()})

    def member(self, described: dict[str, Json]) -> PyTree:
        name, member = described["enum"]
        kind = named(name)
        if kind is None or not issubclass(kind.cls, enum.Enum):
            raise UnknownClassError(
                f"{self._path} holds a member of {shortened(name)}, an Enum that this program doesn't know: register "
                "it, pl.checkpoint.register(cls), before you load."
            )
        return kind.cls[member]


def _as_described(tensor: Tensor, described: dict[str, Json]) -> Tensor:
    """A tensor of a file in the dtype and the layout that it had."""
    if "dtype" in described:
        dtype, shape = _raw_dtype(described["dtype"]), _counts(described["shape"])
        if is_sharded(tensor):
            shard = local_tensor(tensor)
            return reshaped_shard(tensor, shard.flatten().view(dtype).reshape(shard.shape[: len(shape)]), shape)
        tensor = tensor.flatten().view(dtype).reshape(shape)
    if "stride" in described and not is_sharded(tensor):
        shape, stride = _counts(described["shape"]), _counts(described["stride"])
        # as_strided refuses what reaches out of the memory that there is, and numbers that share a place, or leave one
        # empty, are none that a writer writes.
        there = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device).as_strided(shape, stride)
        if not _is_dense(there):
            raise ValueError(f"strides {shortened(stride)} of shape {shortened(shape)} overlap or have holes")
        tensor = there.copy_(tensor.view(shape))
    return tensor


# What Python and torch raise where a text, a number, a shape, a name or a depth is none that they can work with, or
# NumPy isn't there.
_OF_NONSENSE = (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


def _list(values: Json) -> list[Json]:
    if not isinstance(values, list):
        raise ValueError(f"{shortened(values)} is no list")
    return values


def _length(value: Json) -> int | None:
    if value is not None and type(value) is not int:
        raise ValueError(f"{shortened(value)} is no length")
    length: int | None = value
    return length


def _counts(values: Json) -> list[int]:
    if not are_counts(values):
        raise ValueError(f"{shortened(values)} is no list of counts")
    return values


_DTYPES = {str(var).removeprefix("torch."): var for var in vars(torch).values() if isinstance(var, torch.dtype)}

# Their bytes are not numbers by themselves: a bool has to be 0 or 1, and a quantized tensor needs its quantizer.
_NEVER_RAW = frozenset({"bool", "qint8", "quint8", "qint32", "quint4x2", "quint2x4"})


def _dtype(name: Json) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"{shortened(name)} is no dtype of this version of torch")
    return _DTYPES[name]


def _raw_dtype(name: Json) -> torch.dtype:
    if name in _NEVER_RAW:
        raise ValueError(f"tensors of dtype {name} are not written as bytes")
    return _dtype(name)


_READERS: dict[str, Callable[[Reader, dict[str, Json]], PyTree]] = {
    "tensor": lambda reader, value: reader.tensor(value),
    "numpy": lambda reader, value: reader.array(value),
    "record": lambda reader, value: reader.record(value),
    "enum": lambda reader, value: reader.member(value),
    "float": lambda reader, value: float.fromhex(value["float"]),
    "tuple": lambda reader, value: tuple(reader.items(value["tuple"])),
    "deque": lambda reader, value: deque(reader.items(value["deque"]), _length(value["maxlen"])),
    "size": lambda reader, value: torch.Size(_counts(value["size"])),
    "set": lambda reader, value: set(reader.elements(value["set"])),
    "frozenset": lambda reader, value: frozenset(reader.elements(value["frozenset"])),
    "dict": lambda reader, value: reader.mapping(value["dict"]),
    "ordered": lambda reader, value: OrderedDict(reader.mapping(value["ordered"])),
    "frozen": lambda reader, value: FrozenDict(reader.mapping(value["frozen"])),
    "bytes": lambda reader, value: decoded(value["bytes"]),
    "complex": lambda reader, value: complex(*map(float.fromhex, value["complex"])),
    "dtype": lambda reader, value: _dtype(value["dtype"]),
    "device": lambda reader, value: torch.device(value["device"]),
}


for _cls in (State, Note, Timestamp, Time, TimeUnit, Event, LossScale, Members, MemberValues, Position):
    register(_cls, name=f"pure_loop.{_cls.__name__}")
register_subclasses(State)
