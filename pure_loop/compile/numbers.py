"""Python numbers while a step is traced, and what is computed from them.

A graph is a recording, so a number that Python code reads while it is made would be in it for ever. A
:class:`Number` stands in for it: arithmetic gives another one, which remembers how to compute its value anew for every
step; a tensor that meets it makes it an input of the graph; and whatever needs to know its value (``if``, ``int()``, an
index) leaves a guard (:mod:`pure_loop.compile.guards`).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from pure_loop.compile._torch import Function, Options
from pure_loop.compile.guards import Evaluate, Guard, Source, TraceContext, named
from pure_loop.optim.optimizer import rate_at
from pure_loop.state import State
from pure_loop.time import Timestamp

__all__ = ["Number", "TracedTimestamp", "decided", "stands_for_elements", "traced_timestamp"]


def _is_array(value: object) -> bool:
    """Whether it is an array of NumPy's, or a table of such; one number of NumPy's is none."""
    return not isinstance(value, Number) and hasattr(type(value), "__array_ufunc__")


def _lifted(function: Function) -> Function:
    """An operator: it gives a number; beside an array, which no graph takes, an array of this graph's own."""

    def apply(self: Number, *operands: object) -> object:
        if any(isinstance(operand, Tensor) for operand in operands):
            return NotImplemented
        if any(map(_is_array, operands)):
            return function(self.decide(), *operands)
        return Number.of(self.context, function, self, *operands)

    return apply


def _reflected(function: Function) -> Function:
    return _lifted(lambda right, left: function(left, right))


def _asked(function: Function) -> Function:
    def apply(self: Number, *operands: object) -> object:
        return Number.of(self.context, function, self, *operands).decide()

    return apply


def _compared(function: Function) -> Function:
    lifted = _lifted(function)

    def apply(self: Number, operand: object) -> object:
        result = lifted(self, operand)
        return result.decide() if isinstance(result, Number) else result

    return apply


_equal: Callable[[object, object], bool] = _compared(operator.eq)


def _hash(value: object) -> int | None:
    """None where the hash of a number is another number."""
    return None if isinstance(value, int) and not 0 <= value < sys.hash_info.modulus else hash(value)


class _Uncopied:
    """What is no other thing where it is copied."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Number(_Uncopied):
    """A number of this step, which is another one in the next."""

    __slots__ = ("_kind_is_known", "context", "evaluate", "sources", "value", "where")

    # NumPy's operators leave it to these then.
    __array_priority__ = 1.0

    def __init__(self, context: TraceContext, value: object, evaluate: Evaluate, sources: frozenset[Source]) -> None:
        self.context = context
        self.value: Any = value
        self.evaluate = evaluate
        self.sources = sources
        self.where = context.where
        self._kind_is_known = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # To `isinstance`, of int or float, it is what it stands for.
        return self.kind()

    def kind(self) -> type:
        """The type of its value, on which the graph depends from here on."""
        if not self._kind_is_known:
            self._kind_is_known = True
            Number.of(self.context, type, self).decide()
        return type(self.value)

    @classmethod
    def of(cls, context: TraceContext, function: Function, *value: object) -> Number:
        """``function(*value)``, where some values are numbers or timestamps of this step."""
        parts, values, sources = zip(*map(_parts, value), strict=True)
        result = cls(
            *(context, function(*values), lambda env: function(*[part(env) for part in parts])),
            frozenset[Source]().union(*sources),
        )
        if not context.recording:
            result.where = next((item.where for item in value if isinstance(item, Number)), context.where)
        return result

    def decide(self) -> Any:
        """Its value, on which the graph depends from here on."""
        self.context.guard(Guard(self.evaluate, self.value, self.sources, self.where))
        return self.value

    def tensor(self, dtype: torch.dtype, device: torch.device, *, held: bool = False) -> Tensor:
        """A tensor of it.

        Args:
            held: whether one that an integer dtype can't hold is an error, and doesn't wrap around in it.
        """
        if dtype.is_floating_point or dtype.is_complex:
            return self.context.lift(dtype, named(self.where, self.evaluate), device)
        function = bool if dtype is torch.bool else partial(_held, dtype if held else None)
        integer = Number.of(self.context, function, self)
        return self.context.lift(torch.int64, named(self.where, integer.evaluate), device).to(dtype)

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Sequence[Any] = (), kwargs: Options | None = None
    ) -> object:
        kwargs, name = kwargs or {}, function.__name__.strip("_")
        values = (*args, *kwargs.values())
        numbers = [item for item in values if isinstance(item, Number)]
        lists = (item if isinstance(item, list | tuple) else (item,) for item in values)
        tensors = [item for items in lists for item in items if isinstance(item, Tensor)]
        imaginary = any(map(torch.is_complex, tensors)) or any(type(number.value) is complex for number in numbers)
        if imaginary or not stands_for_elements(function):
            return function(*decided(args), **decided(kwargs))
        if name in ("rdiv", "rtruediv"):
            return args[0].reciprocal() * args[1]  # torch's own way, which rounds twice
        if name == "setitem":
            args = (args[0], decided(args[1]), *args[2:])
        narrow = _narrow(name, tensors)
        wide = {id(item): item.float() for item in tensors} if narrow is not None else {}
        # A number of the host's would be copied to the device in every step.
        device = next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))

        def lift(item: object) -> object:
            if name in ("clamp", "clip") and type(item) in (int, float):
                item = Number.of(numbers[0].context, operator.pos, item)  # both bounds are tensors, or none is
            if isinstance(item, Number):
                dtype = torch.float32 if wide else _dtype_beside(item, tensors)
                if name == "float_power":
                    dtype = torch.float64  # whatever it is given
                elif name in _FRACTIONS and kwargs.get("rounding_mode") is None and not dtype.is_floating_point:
                    dtype = torch.get_default_dtype()  # which integers are divided in
                held = name in _HOLDING or (name in ("pow", "ipow") and item is not args[0])
                return item.tensor(dtype, device, held=held)
            return wide.get(id(item), item)

        argument = {key: lift(item) if key in _OPERANDS else decided(item) for key, item in kwargs.items()}
        result = function(*map(lift, args), **argument)
        if narrow is None:
            return result
        name = function.__name__  # mul_, or __imul__
        in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
        return args[0].copy_(result) if in_place else result.to(narrow)

    __add__, __radd__ = _lifted(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _lifted(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _lifted(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _lifted(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _lifted(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _lifted(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _lifted(pow), _reflected(pow)
    __and__, __rand__ = _lifted(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _lifted(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _lifted(operator.xor), _reflected(operator.xor)
    __lshift__, __rlshift__ = _lifted(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _lifted(operator.rshift), _reflected(operator.rshift)
    __neg__, __abs__, __pos__ = _lifted(operator.neg), _lifted(operator.abs), _lifted(operator.pos)
    __invert__ = _lifted(operator.invert)

    def __divmod__(self, operand: object) -> tuple[object, object]:
        return self // operand, self % operand

    def __rdivmod__(self, operand: Any) -> tuple[object, object]:
        return operand // self, operand % self

    def __eq__(self, operand: object) -> bool:
        return self is operand or _equal(self, operand)

    __ne__ = _compared(operator.ne)
    __lt__, __le__ = _compared(operator.lt), _compared(operator.le)
    __gt__, __ge__ = _compared(operator.gt), _compared(operator.ge)
    __bool__, __int__, __float__, __index__ = _asked(bool), _asked(int), _asked(float), _asked(operator.index)
    __str__, __round__ = _asked(str), _asked(round)
    __trunc__, __floor__, __ceil__ = _asked(math.trunc), _asked(math.floor), _asked(math.ceil)

    def __hash__(self) -> int:
        # Python's random takes a whole number for its seed as it is, and of what stands for one the hash.
        result: int | None = Number.of(self.context, _hash, self).decide()
        if result is None:
            raise TypeError("a number of the step that is negative, or very large, has no hash: write int(number)")
        return result

    def __format__(self, how: str) -> str:
        return format(self.decide(), how)

    def __array__(self, *args: Any, **kwargs: Any) -> object:
        import numpy  # imported already by the code that asks

        return numpy.asarray(self.decide()).__array__(*args, **kwargs)

    def __array_ufunc__(self, function: Any, method: str, *value: Any, **options: object) -> object:
        # What NumPy makes of one number of its own on the way is one again.
        value = tuple([item[()] if _is_array(item) and not item.ndim else item for item in value])
        if method != "__call__" or function.nout != 1 or options or any(map(_is_array, value)):
            return getattr(function, method)(*decided(value), **decided(options))
        return Number.of(self.context, function, *value)

    def __repr__(self) -> str:
        return repr(self.decide())

    def __getattr__(self, name: str) -> Any:
        # What only real numbers have (is_integer, as_integer_ratio): of its value.
        return getattr(self.decide(), name)


# By name: operations of torch that compute in a wider type than they round to; those in which a number stands for a
# tensor of that number; and the arguments by which they take it. Elsewhere a number is a size, a dimension, an index.
_SUMS = frozenset({"add", "sub", "subtract"})
_WIDE = _SUMS | {"mul", "multiply", "div", "divide", "true_divide", "truediv", "lerp"}
_PAIRS = _WIDE | {
    *("floor_divide", "floordiv", "remainder", "mod", "fmod", "pow", "float_power", "copysign", "maximum", "minimum"),
    *("eq", "ne", "not_equal", "lt", "less", "le", "less_equal", "gt", "greater", "ge", "greater_equal"),
    *("and", "or", "xor", "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor"),
}
_OF_ELEMENTS = frozenset(
    {
        *(side + name for side in ("", "r", "i") for name in _PAIRS),
        *("where", "lerp", "clamp", "clip", "clamp_min", "clamp_max", "masked_fill", "fill", "setitem"),
        *(f"foreach_{name}" for name in ("add", "sub", "mul", "div", "lerp", "pow", "maximum", "minimum")),
    }
)
_OPERANDS = frozenset({"input", "self", "other", "exponent", "weight", "min", "max", "value"})
# Those that make fractions of integers.
_FRACTIONS = frozenset({"div", "divide", "true_divide", "truediv", "copysign"})
# Those that refuse a number that the tensor's dtype can't hold. In others it wraps around.
_HOLDING = frozenset({"clamp", "clip", "clamp_min", "clamp_max", "where", "masked_fill", "fill", "setitem"})


def stands_for_elements(function: Function) -> bool:
    """Whether a number that this operation of torch takes stands for a tensor of it."""
    return getattr(function, "__name__", "").strip("_") in _OF_ELEMENTS


def _held(dtype: torch.dtype | None, value: int) -> int:
    """The number, if an integer dtype can hold it; None: if 64 bits can. Without a sign what is negative gets large."""
    if dtype is None:
        if not -(2**63) <= value < 2**64:
            raise OverflowError("int too big to convert")
    else:
        info = torch.iinfo(dtype)
        if not (info.min or -info.max) <= value <= info.max:
            raise RuntimeError(f"value cannot be converted to type {info.dtype} without overflow")
    return value - 2**64 if value >= 2**63 else value  # the bits that an int64 has


def _narrow(name: str, tensors: list[Tensor]) -> torch.dtype | None:
    """The half that a result is rounded to, beside which a number keeps its precision and its range until then.

    None where there is none. On a CPU a sum takes the number as it is in that half.
    """
    name, dtypes = name.removeprefix("r").removeprefix("i"), {tensor.dtype for tensor in tensors}
    if name not in _WIDE or len(dtypes) != 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        return None
    return None if name in _SUMS and all(tensor.is_cpu for tensor in tensors) else dtypes.pop()


def decided(value: Any) -> Any:
    """An argument, in which numbers are what they are in this step."""
    if isinstance(value, Number):
        return value.decide()
    if type(value) in (tuple, list):
        return type(value)(map(decided, value))
    if type(value) is dict:
        return {key: decided(item) for key, item in value.items()}
    if type(value) is slice:
        return slice(decided(value.start), decided(value.stop), decided(value.step))
    return value


def _dtype_beside(number: Number, tensors: list[Tensor]) -> torch.dtype:
    """The dtype in which a Python number takes part, such that results have the dtypes that they have in eager."""
    floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    if floating:
        return max(floating, key=lambda dtype: torch.finfo(dtype).bits)
    # An int in this step may be a float in another one, which has another graph then.
    if not issubclass(number.kind(), Integral):
        return torch.get_default_dtype()
    integral = [tensor.dtype for tensor in tensors if tensor.dtype is not torch.bool]
    return integral[0] if integral else torch.int64


def _parts(value: object) -> tuple[Evaluate, object, frozenset[Source]]:
    """How an operand is computed in a step, what it is while tracing, and what it depends on."""
    if isinstance(value, Number):
        return value.evaluate, value.value, value.sources
    if isinstance(value, TracedTimestamp):
        slot = value.slot
        return lambda env: env.timestamps[slot], value.real, frozenset({"state.timestamp"})
    return lambda env: value, value, frozenset()


class TracedTimestamp(_Uncopied, Timestamp):
    """A timestamp of the step that is traced; to code that is not the loop's own its fields are Numbers.

    Attributes:
        real: what it is while tracing.
        slot: which of the step's timestamps it is.
    """

    __slots__ = ("context", "real", "slot")

    context: TraceContext
    real: Timestamp
    slot: int

    @classmethod
    def stand_in(cls, real: Timestamp, slot: int, context: TraceContext) -> TracedTimestamp:
        result = object.__new__(cls)
        fields = {name: getattr(real, name) for name in _FIELDS}
        for name, value in {**fields, "real": real, "slot": slot, "context": context}.items():
            object.__setattr__(result, name, value)
        return result

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in _COUNTS:
            return value
        context = object.__getattribute__(self, "context")
        if not context.recording:
            return value
        slot = object.__getattribute__(self, "slot")
        field = "previous_timestamp" if slot == 0 else "timestamp"
        return Number(
            context, value, lambda env: getattr(env.timestamps[slot], name), frozenset({f"state.{field}.{name}"})
        )

    def replace(self, **changes: Any) -> Timestamp:
        return Timestamp(**({name: getattr(self, name) for name in _FIELDS} | changes))

    def ask(self, question: Function, *value: object) -> Any:
        """The answer to a question about timestamps, as a whole: the graph depends on the answer alone."""
        return Number.of(self.context, question, *value).decide()

    def number_of(self, function: Callable[[Timestamp], float]) -> Any:
        """``function(timestamp)``: to code that is not the loop's own a number, computed anew in each step."""
        return Number.of(self.context, function, self) if self.context.recording else function(self.real)

    def rate(self, where: str, lr: Callable[[Timestamp], float]) -> Tensor:
        """The learning rate as an input of the graph; float64, shape ()."""
        return self.as_input(partial(rate_at, where, lr))

    def as_input(self, function: Callable[[Timestamp], float]) -> Tensor:
        """``function(timestamp)`` as an input of the graph, computed anew in each step; float64, shape ()."""
        slot = self.slot
        return self.context.lift(torch.float64, lambda env: function(env.timestamps[slot]))


def traced_timestamp(state: State) -> TracedTimestamp:
    """The timestamp of a State inside a trace."""
    assert isinstance(state.timestamp, TracedTimestamp)
    return state.timestamp


_FIELDS = tuple(field.name for field in attrs.fields(Timestamp))
_COUNTS = frozenset(_FIELDS) - {"max_duration", "batches_per_epoch"}
