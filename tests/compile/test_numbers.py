"""Numbers of Python while a step is traced: each place in which code may use one gives what it gives in eager steps."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import record
from pure_loop.errors import CompileError
from tests.support import problem

pytestmark = pytest.mark.usefixtures("interpreted")

SQUARE, WHOLE, NOTHING = torch.arange(9.0).reshape(3, 3), torch.arange(8), torch.zeros(())


def remembered(function: Callable[[Any], Any], batches: int = 4, **options: Any) -> list[Any]:
    """What a function of the timestamp gives at AFTER_LOSS of each batch; numbers in a dict become tensors."""

    def as_tensors(state: pl.State) -> Any:
        found = function(state.timestamp)
        if not isinstance(found, dict):
            return found
        return {k: v if isinstance(v, Tensor) else torch.zeros((), dtype=torch.float64) + v for k, v in found.items()}

    found = pl.Algorithm(
        "found", {Event.AFTER_LOSS: lambda state: state.remember("found", as_tensors(state))}, init=as_tensors
    )
    options |= {"max_duration": "1ep", "watch": {Event.BATCH_END}, "strict": None}
    stream = problem.fit(data=problem.points(1) * batches, algorithms=[found], **options)
    return [state.algorithm_state["found"] for _, state in stream]


def put_in(t: Any) -> Tensor:
    x = torch.zeros(3, 3)
    x[0, t.batch % 3] = t.sample
    return x


def sums_of(x: Tensor, n: Any) -> Tensor:
    y = x.clone()
    y -= n
    return torch.stack([x + n, n + x, x - n, n - x, torch.add(n, x), x.clone().add_(n), torch.rsub(x, n), y])


def counted_on(t: Any) -> Tensor:
    x = torch.tensor(t.batch)
    x += 1
    return x + torch.tensor(t.batch)


COMPARED = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
ON_ARRAYS = (operator.lt, operator.eq, operator.mul, operator.truediv)
FLOATS, SMALL = (torch.float32, torch.float64, torch.float16), (torch.uint8, torch.int8, torch.int16, torch.int32)
ARRAY = numpy.array([0.5, 1.0, 2.0])


def wraps_around(some: Tensor, batch: Any) -> Tensor:
    large = (batch + 3) * (2**31 + 300)
    return torch.stack(
        [(some + large).long(), (large * some).long(), (some > large).long(), (some - (batch + 7)).long()]
    )


# Of which no graph is another one in another step.
LIVE: dict[str, Callable[[Any], Any]] = {
    # A new tensor of it.
    "a tensor": lambda t: torch.tensor(t.batch),
    "a tensor of a list": lambda t: torch.as_tensor([[t.batch, 1], (2, t.elapsed)]),
    "a tensor of NumPy's": lambda t: torch.asarray(numpy.cos(t.elapsed)),
    "a tensor of whole numbers": lambda t: torch.tensor(-1.7 * t.batch, dtype=torch.int64),
    "a tensor that is written to": counted_on,
    "a tensor filled like another": lambda t: (
        torch.full_like(WHOLE, 3.3 * t.batch) + SQUARE.half().new_full((8,), t.batch)
    ),
    "a tensor in a transform": lambda t: torch.vmap(lambda x: x * torch.tensor(1 + t.elapsed))(SQUARE),
    # A tensor meets it in a transform.
    "in a derivative": lambda t: torch.func.grad(lambda x: (x**2 * (1 + t.elapsed)).sum())(SQUARE),
    "on the way back": lambda t: torch.func.vjp(lambda x: x.clone().mul_(t.batch), SQUARE)[1](SQUARE)[0],
    # Another number.
    "a cosine": lambda t: 0.5 * (1 + numpy.cos(math.pi * t.elapsed)),
    "a schedule": lambda t: pl.schedules.cosine("3ep", peak=2.0)(t) + (2 * pl.schedules.linear(1, 0, "9ba"))(t),
    "NumPy's functions": lambda t: numpy.sin(t.batch) + numpy.minimum(t.batch, 2) + numpy.power(0.9, t.batch),
}

CASES: dict[str, Callable[[Any], Any]] = {
    # Functions of Python's, which ask for the number.
    "a cosine of Python's": lambda t: 0.5 * (1 + math.cos(math.pi * t.elapsed)),
    "Python's functions": lambda t: (
        math.exp(-t.batch) + math.sqrt(t.sample) + math.pow(0.9, t.batch) + math.hypot(t.batch, 3)
    ),
    "whole numbers of Python's": lambda t: math.comb(8, t.batch) + math.isqrt(t.sample) + math.floor(4 * t.elapsed),
    "lists of Python's": lambda t: (
        math.fsum([t.batch, 0.1, t.elapsed]) + math.dist((t.batch, 1), [0, t.sample]) + math.prod((t.batch, 3), start=2)
    ),
    "a function along an array": lambda t: float(
        numpy.add(t.batch, numpy.ones(2)).sum() + numpy.add.reduce([t.batch, 1])
    ),
    # A dimension, an index, a size: no tensor.
    "max over a dimension": lambda t: SQUARE.max(t.batch % 2)[0],
    "an index": lambda t: WHOLE[t.batch],
    "put in at an index": put_in,
    "a size": lambda t: torch.ones(1).expand(t.batch + 1).sum(),
    # A number that an operation takes as such.
    "a factor": lambda t: torch.add(NOTHING, torch.ones(()), alpha=t.batch),
    "a smoothing": lambda t: nn.functional.leaky_relu(-torch.ones(()), t.elapsed),
    # A number that stands for a tensor.
    "sums of bfloat16": lambda t: sums_of(SQUARE.bfloat16() / 7, t.batch + 0.77),
    "on the way from half to half": lambda t: torch.lerp(WHOLE.half() / 7, WHOLE.half(), t.batch / 7),
    "more than eight bits": lambda t: WHOLE.to(torch.uint8) + (254 + t.batch) - 300 * t.batch,
    "a share of eight bits": lambda t: SQUARE.byte() / (t.batch + 300) + torch.div(SQUARE.byte(), t.batch + 300),
    # Python.
    "isinstance": lambda t: t.batch if isinstance(t.batch, int) and not isinstance(t.batch, float) else -1,
    "the sign of nothing": lambda t: math.copysign(1.0, 0.0 * (2 - t.batch)),
    "bits": lambda t: (t.batch & 1) + (t.batch | 2) + (t.batch ^ 3) + (t.batch << 2) + (8 >> t.batch) + ~t.batch,
    # Tensors and arrays, number by number.
    "beside truth values": lambda t: (SQUARE > 3) * t.batch + torch.where(SQUARE > 3, t.batch, 0),
    "compared": lambda t: torch.stack([op(*pair) for op in COMPARED for pair in ((t.batch, WHOLE), (WHOLE, t.batch))]),
    "minus zero": lambda t: torch.stack([(torch.ones((), dtype=d) * (0.0 * (2 - t.batch))).signbit() for d in FLOATS]),
    "too large": lambda t: torch.stack([wraps_around(WHOLE[:3].to(dtype), t.batch) for dtype in SMALL]),
    "beside an array": lambda t: torch.from_numpy(
        sum((op(t.batch + 1, ARRAY) + 2 * op(ARRAY, t.batch + 1) for op in ON_ARRAYS), numpy.sqrt([t.batch + 1, 1, 2]))
    ),
    # Timestamps.
    "another timestamp": lambda t: t.replace(epoch=7).epoch + t.replace(epoch=7).batch,
    "copies": lambda t: copy.copy(t).batch + copy.deepcopy(t).batch,
}


def assert_as_in_eager_steps(functions: dict[str, Callable[[Any], Any]]) -> int:
    """How many graphs that makes."""

    def all_of_them(t: Any) -> dict[str, Any]:
        return {name: function(t) for name, function in functions.items()}

    with record() as graphs:
        compiled = remembered(all_of_them, compile=True)
    eager = remembered(all_of_them)
    assert len(eager) == 4
    for one, other in zip(compiled, eager, strict=True):
        for name, wanted in other.items():
            assert one[name].dtype is wanted.dtype, name
            assert torch.equal(one[name], wanted), name
    return len([each for each in graphs if each.segment == "step"])


def test_numbers_are_what_they_are_in_eager_steps() -> None:
    assert_as_in_eager_steps(CASES)


def test_what_is_computed_from_a_number_needs_no_other_graph() -> None:
    assert assert_as_in_eager_steps(LIVE) == 1


def test_numbers_of_numpy_that_are_remembered_need_no_other_graph() -> None:
    def numbers(t: Any) -> Any:
        return [numpy.exp(-0.1 * t.batch), numpy.maximum(t.batch, 2), numpy.float32(2) * t.batch]

    with record() as graphs:
        found = remembered(numbers, compile=True)[-1]
    assert len([each for each in graphs if each.segment == "step"]) == 1
    assert [(type(each), each) for each in found] == [(type(each), each) for each in remembered(numbers)[-1]]


def test_a_function_of_pythons_math_needs_a_graph_for_each_number() -> None:
    """What can't be seen without replacing functions of the process; the error says what needs one graph."""
    with record() as graphs:
        remembered(lambda t: {"": math.cos(t.batch)}, 3, compile=True)
    assert len([graph for graph in graphs if graph.segment == "step"]) == 3
    with pytest.raises(CompileError, match=r"A function of Python's math asks for it: numpy\.cos\(x\) does not"):
        remembered(lambda t: {"": math.cos(t.batch)}, 9, compile=True)
