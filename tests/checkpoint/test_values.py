"""Law 10: what is saved and loaded is equal bit by bit, whatever a State holds."""

from __future__ import annotations

import enum
import json
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal import registry
from pure_loop.checkpoint import container, document
from pure_loop.checkpoint.digests import digest_of
from tests.support.checkpoint_runs import fit, small
from tests.support.problem import noise
from tests.support.streams import assert_same
from tests.support.tiers import examples


@pl.checkpoint.register(name="tests.test_checkpoints:Pair")  # as the files in tests/golden call it
class Pair(NamedTuple):
    first: Any
    second: Any = None


@pl.checkpoint.register(name="tests.Moments")
@attrs.frozen
class Moments:
    mean: Any
    count: int = 0


@pl.checkpoint.register(name="tests.test_checkpoints:Phase")  # as the files in tests/golden call it
class Phase(enum.Enum):
    WARM = 1
    COLD = "cold"


@attrs.frozen(eq=False, kw_only=True)
class Teacher(pl.State):
    teacher: Any = None
    note: str = "none"


def identical(a: Any, b: Any) -> bool:
    """Equal to the last bit, and of the same kinds; numbers without holes between them lie in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
            return False
        dense = b.permute(sorted(range(b.ndim), key=lambda dim: -b.stride()[dim])).is_contiguous()
        same_order = a.stride() == b.stride() or not dense
        return same_order and torch.equal(container.raw(a.contiguous()), container.raw(b.contiguous()))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(identical, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    if isinstance(a, Moments):
        return identical(a.mean, b.mean) and a.count == b.count
    return a.hex() == b.hex() if isinstance(a, float) else bool(a == b)


# Not complex32: torch warns of it wherever it is made.
DTYPES = [*container.CODES, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


def numbers(dtype: torch.dtype, shape: Any, seed: int = 0) -> Tensor:
    """Any bits that a dtype can have."""
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    found = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=noise(seed))
    return found.view(dtype).reshape(shape)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    tensor = numbers(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 9)))
    how = draw(st.sampled_from(["plain", "permuted", "sliced", "expanded"]))
    if how == "permuted":
        return tensor.permute(draw(st.permutations(range(len(shape)))))
    if how == "sliced" and shape:
        return tensor[..., ::2]
    return tensor.unsqueeze(0).expand(2, *shape) if how == "expanded" else tensor


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False) | st.sets(st.integers() | st.text()) | st.frozensets(st.integers())
    | st.sampled_from([*Phase, Event.BATCH_END, pl.Time("10ba"), pl.Time("0.5dur"), torch.bfloat16, torch.Size([2, 0])])
    | st.sampled_from([np.float32(0.5), np.int64(-3), np.arange(6).reshape(2, 3), torch.device("cpu")])
)  # fmt: skip
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.none()
VALUES = st.recursive(
    SCALARS | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.just(3))
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(pl.FrozenDict)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Moments, inner, st.integers())
    ),
    max_leaves=8,
)


def saved(value: Any, path: Path) -> Any:
    """The value after it was an algorithm's memory in a file."""
    pl.save(pl.State.create(small()).remember("mine", value), path)
    return pl.load(path, model=small()).algorithm_state["mine"]


@examples(40, 3000)
@given(VALUES)
def test_every_value_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("values") / "x.safetensors"
    assert identical(saved(value, path), value)
    with safe_open(path, "pt") as file:  # whoever else reads such files can read this one
        assert {"params.0.weight", container.DIGEST} <= set(file.keys())


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    shapes = [(), (0,), (3,), (2, 0, 3), (2, 1, 3), (300, 900)]
    values = {f"{dtype} {shape}": numbers(dtype, shape) for dtype in DTYPES for shape in shapes}
    assert identical(saved(values, tmp_path / "x.safetensors"), values)


def test_a_tensor_that_stands_twice_is_one_after_loading_too(tmp_path: Path) -> None:
    shared = torch.ones(1000)
    memory = saved({"a": shared, "b": [shared]}, tmp_path / "x.safetensors")
    assert memory["a"] is memory["b"][0]
    assert (tmp_path / "x.safetensors").stat().st_size < 8000


def test_values_are_as_deep_in_files_as_a_writer_and_a_reader_go(tmp_path: Path) -> None:
    """Near that depth each value is refused by the first or comes back."""
    wraps: list[Any] = [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}, lambda x: {(x,)}]
    for wrap in wraps:
        for leaf in (1, ()):
            for depth in (90, 99, 100, 101):
                value: Any = leaf
                for _ in range(depth if wrap is not wraps[-1] else 1):
                    value = wrap(value)
                try:
                    found = saved(value, tmp_path / "x.safetensors")
                except pl.ArgumentTypeError:
                    assert depth > 90
                else:
                    assert depth < 101 or wrap is wraps[-1]
                    assert found == value


def test_a_file_holds_a_state_of_its_class_and_nothing_of_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    start = Teacher.create(small(), seed=4, teacher=pl.FrozenDict(weight=torch.ones(1, 2)), note="a")
    stream = fit(start, donate=False)
    state = next(state for event, state in stream if event is Event.BATCH_END)
    stream.close()
    pl.save(state, path, notes={"why": "a test"})
    found = pl.load(path, model=small())
    assert type(found) is Teacher
    assert (found.note, found.event, found.position, found.loss) == ("a", Event.BATCH_END, Event.BATCH_END, None)
    assert (found.grads, found.batch, found.outputs) == (None, None, None)
    assert_same(found, state.replace(loss=None, grads=None, batch=None, outputs=None, microbatch=None), "saved")
    described = pl.checkpoint.describe(path)
    assert {name: described[name] for name in ("epoch", "batch", "event", "seed", "notes", "model")} == {
        "epoch": 0, "batch": 1, "event": Event.BATCH_END, "seed": 4, "notes": {"why": "a test"},
        "model": "torch.nn.modules.container.Sequential",
    }  # fmt: skip
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["pure_loop"])
    assert (said["format"], said["state"]) == (document.FORMAT, f"{__name__}:Teacher")
    assert said["made_by"] == {"pure_loop": pl.__version__, "torch": torch.__version__}


def test_a_class_that_has_other_fields_by_now_or_is_gone(tmp_path: Path) -> None:
    class Old(NamedTuple):
        kept: int

    class New(NamedTuple):
        kept: int
        more: str = "new"

    class Other(NamedTuple):
        kept: int
        needed: int

    class Fewer(NamedTuple):
        pass

    path = tmp_path / "x.safetensors"
    try:
        pl.checkpoint.register(Old, name="evolving")
        assert saved(Old(1), path) == Old(1)
        with pytest.raises(pl.ArgumentError, match="checkpoints call"):
            pl.checkpoint.register(Pair, name="evolving")
        for cls, says in ((New, ""), (Other, r"missing \['needed'\]"), (Fewer, r"unknown \['kept'\]")):
            registry._by_name.pop("evolving")
            pl.checkpoint.register(cls, name="evolving")
            if says:
                with pytest.raises(pl.CheckpointError, match=f"other fields than it has now: {says}"):
                    pl.load(path, model=small())
            else:
                assert pl.load(path, model=small()).algorithm_state["mine"] == New(1, "new")
    finally:
        registry._by_name.pop("evolving")
    with pytest.raises(pl.CheckpointError, match="'evolving', a class unknown to this program: import the module"):
        pl.load(path, model=small())
    assert pl.latest(tmp_path) == str(path)  # another program may know it


# Small, large, and large with bytes that fill no row.
SIZES = [7, 1 << 15, 99_991]


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_of_parameters_is_of_their_bits_and_order(size: int) -> None:
    """Whatever their layout; any bit, and any two that are exchanged, make another."""
    tensor = numbers(torch.float32, (size,)).nan_to_num(1.0, 2.0, 3.0)
    digests = {digest_of({"w": tensor})}
    for index in (0, size // 2, size - 1):
        for bit in (0, 13, 30):
            changed = tensor.clone()
            changed.view(torch.int32)[index] ^= 1 << bit
            digests.add(digest_of({"w": changed}))
    assert len(digests) == 10
    for distance in (1, 2, 2048, 4096):
        swapped = tensor.clone()
        swapped[0], swapped[distance % size] = tensor[distance % size], tensor[0]
        assert digest_of({"w": swapped}) != digest_of({"w": tensor})
    shifted = torch.cat([torch.zeros(1), tensor])[1:]
    square = tensor[: size // 7 * 7].view(7, -1)
    assert digest_of({"w": shifted}) == digest_of({"w": tensor})
    assert digest_of({"w": square.t().contiguous().t()}) == digest_of({"w": square})
    assert size == 7 or digest_of({"w": square.t()}) != digest_of({"w": square})
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64):
        other = tensor.sign().to(dtype)
        changed = other.clone()
        changed[5] = changed[5] == 0
        assert digest_of({"w": other}) != digest_of({"w": changed})
    assert digest_of({}) == digest_of({"w": torch.empty(0)})


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_has_the_same_digest(size: int) -> None:
    params = {"a": numbers(torch.float32, (size,)), "b": numbers(torch.float32, (3,))}
    cuda = {name: tensor.cuda() for name, tensor in params.items()}
    assert digest_of(cuda) == digest_of({**cuda, "b": params["b"]}) == digest_of(params)
