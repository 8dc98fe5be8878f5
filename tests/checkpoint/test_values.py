"""Law 10: what is saved and loaded is equal bit by bit, whatever a State holds, also of each version of the format."""

from __future__ import annotations

import enum
import itertools
import json
import time
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
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal import registry
from pure_loop.checkpoint import container, document
from pure_loop.checkpoint.digests import digest_of
from pure_loop.checkpoint.document import FORMAT
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointError
from pure_loop.testing import differences
from tests.support import sharding
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


def test_every_dtype_and_shape_and_one_that_stands_twice(tmp_path: Path) -> None:
    shapes = [(), (0,), (3,), (2, 0, 3), (2, 1, 3), (300, 900)]
    values = {f"{dtype} {shape}": numbers(dtype, shape) for dtype in DTYPES for shape in shapes}
    assert identical(saved(values, tmp_path / "x.safetensors"), values)
    assert saved(torch.zeros(4)[::2][:0], tmp_path / "x.safetensors").shape == (0,)
    assert saved(torch.ones(4)[::4], tmp_path / "x.safetensors").tolist() == [1.0]
    memory = saved({"a": values["torch.float32 (3,)"], "b": [values["torch.float32 (3,)"]]}, tmp_path / "x.safetensors")
    assert memory["a"] is memory["b"][0]


def test_values_are_as_deep_in_files_as_a_writer_and_a_reader_go(tmp_path: Path) -> None:
    """Near that depth each value is refused by the first or comes back."""
    wraps: list[Any] = [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}]
    for wrap, leaf, depth in itertools.product(wraps, (1, ()), (90, 99, 100, 101)):
        value: Any = leaf
        for _ in range(depth):
            value = wrap(value)
        try:
            found = saved(value, tmp_path / "x.safetensors")
        except ArgumentTypeError:
            assert depth > 90
        else:
            assert depth < 101
            assert found == value


def test_a_file_holds_a_state_of_its_class_and_nothing_of_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    start = Teacher.create(small(), seed=4, teacher=pl.FrozenDict(weight=torch.ones(1, 2)), note="a")
    state = next(state for event, state in fit(start, donate=False) if event is Event.BATCH_END)
    pl.save(state, path, notes={"why": "a test"})
    found: Any = pl.load(path, model=small())
    assert type(found) is Teacher
    assert (found.note, found.event, found.position, found.loss) == ("a", Event.BATCH_END, Event.BATCH_END, None)
    assert_same(found, state.replace(loss=None, grads=None, batch=None, outputs=None, microbatch=None), "saved")
    said = pl.checkpoint.describe(path)
    assert (said["epoch"], said["batch"], said["event"], said["seed"]) == (0, 1, Event.BATCH_END, 4)
    assert 0 <= time.time() - said["saved_at"] < 3600
    assert (said["notes"], said["model"]) == ({"why": "a test"}, "torch.nn.modules.container.Sequential")
    with safe_open(path, "pt") as file:
        document = json.loads(file.metadata()["pure_loop"])
    assert (document["format"], document["state"]) == (FORMAT, f"{__name__}:Teacher")
    assert document["made_by"] == {"pure_loop": pl.__version__, "torch": torch.__version__}


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
        with pytest.raises(ArgumentError, match="checkpoints call"):
            pl.checkpoint.register(Pair, name="evolving")
        for cls, says in ((New, ""), (Other, r"missing \['needed'\]"), (Fewer, r"unknown \['kept'\]")):
            registry._by_name.pop("evolving")
            pl.checkpoint.register(cls, name="evolving")
            if says:
                with pytest.raises(CheckpointError, match=f"other fields than it has now: {says}"):
                    pl.load(path, model=small())
            else:
                assert pl.load(path, model=small()).algorithm_state["mine"] == New(1, "new")
    finally:
        registry._by_name.pop("evolving")
    with pytest.raises(CheckpointError, match="'evolving', a class unknown to this program: import the module"):
        pl.load(path, model=small())
    assert pl.latest_path(tmp_path) == str(path)  # another program may know it


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


GOLDEN = Path(__file__).parent.parent / "golden"


def remarkable() -> pl.State:
    """A State with something of everything, the same in every version."""
    numbers = torch.arange(12, dtype=torch.float32)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = pl.State.create(module, seed=11).replace(
        params={
            "0.weight": numbers[:6].reshape(3, 2),
            "0.bias": numbers[6:9],
            "1.weight": numbers[9:] / 3,
            "1.bias": numbers[:3] / 7,
        },
        buffers={
            "1.running_mean": numbers[:3] / 11,
            "1.running_var": numbers[3:6],
            "1.num_batches_tracked": torch.tensor(5),
        },
        opt_state=pl.FrozenDict(step=torch.tensor(5.0), exp_avg=pl.FrozenDict({"0.weight": numbers[:6].reshape(3, 2)})),
        event=Event.BATCH_CHECKPOINT,
        position=Event.BATCH_CHECKPOINT,
        metrics={"val": pl.FrozenDict(loss=torch.tensor(0.25))},
        algorithm_state={
            "mine": {
                "all": [None, True, 7, 0.1, float("inf"), "text", b"\x00\xff", 2j, (1, 2), {3: "x"}],
                "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
                "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
                "last": numbers.reshape(1, 2, 2, 3).permute(0, 3, 1, 2),
                "pair": Pair(1, Moments(torch.zeros(2), 3)),
                "phase": Phase.COLD,
            }
        },
    )
    now = pl.Timestamp(max_duration=pl.Time("10ba"), batches_per_epoch=4).next_batch(samples=8, tokens=16, seconds=0.5)
    return state.replace(timestamp=now, previous_timestamp=pl.Timestamp(max_duration=pl.Time("10ba")))


@pytest.mark.parametrize("version", range(1, FORMAT + 1))
def test_files_and_folders_of_every_version_load(version: int, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    found, wanted = pl.load(GOLDEN / f"format-{version}.safetensors", model=module), remarkable()
    assert not differences(found, wanted, without=frozenset({"algorithm_state"}))
    assert identical(found.algorithm_state["mine"], wanted.algorithm_state["mine"])
    assert (found.timestamp, found.event, found.position) == (wanted.timestamp, wanted.event, wanted.position)
    in_parts = pl.load(GOLDEN / f"format-{version}.sharded", model=sharding.network())
    assert not differences(in_parts, sharding.small(tmp_path / "now.sharded", batch=2))


def test_there_are_files_of_every_version() -> None:
    wanted = {f"format-{v}.{kind}" for v in range(1, FORMAT + 1) for kind in ("safetensors", "sharded")}
    assert {path.name for path in GOLDEN.iterdir()} == wanted
    assert set(document.UPGRADES) == set(range(1, FORMAT))


def write_golden() -> None:
    """Run once, where a version of the format is new; files of the past are not written anew.

    ``python -c "import tests.checkpoint.test_values as t; t.write_golden()"``
    """
    assert not (GOLDEN / f"format-{FORMAT}.sharded").exists()
    pl.save(remarkable(), GOLDEN / f"format-{FORMAT}.safetensors")
    sharding.small(GOLDEN / f"format-{FORMAT}.sharded", batch=2)
