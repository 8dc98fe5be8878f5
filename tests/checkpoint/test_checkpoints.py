"""Law 10: what is saved and loaded is equal bit by bit; and what else a file can be read as."""

from __future__ import annotations

import enum
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal import registry
from pure_loop.checkpoint import container, document
from tests.support import streams as sameness


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
    """Equal to the last bit, and of the same kinds."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
            return False
        return torch.equal(container.raw(a.contiguous()), container.raw(b.contiguous()))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, Moments):
        return identical(a.mean, b.mean) and a.count == b.count
    if isinstance(a, float):
        return a.hex() == b.hex()
    return bool(a == b)


# Not complex32: torch warns of it wherever it is made.
DTYPES = [
    *container.CODES,
    *(torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    count = int(np.prod(shape, dtype=int))
    numbers = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        numbers = numbers % 2
    tensor = numbers.view(dtype).reshape(shape)
    dims = draw(st.permutations(range(len(shape))))
    how = draw(st.sampled_from(["plain", "permuted", "sliced", "expanded"]))
    if how == "permuted":
        return tensor.permute(dims)
    if how == "sliced" and shape:
        return tensor[..., ::2]
    return tensor.unsqueeze(0).expand(2, *shape) if how == "expanded" else tensor


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([*Phase, Event.BATCH_END, pl.Time("10ba"), pl.Time("0.5dur"), torch.bfloat16, torch.Size([2, 0])])
    | st.sampled_from([np.float32(0.5), np.int64(-3), np.arange(6).reshape(2, 3), torch.device("cpu")])
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.none()
VALUES = st.recursive(
    SCALARS | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(pl.FrozenDict)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Moments, inner, st.integers())
    ),
    max_leaves=8,
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def trained(**overrides: Any) -> pl.State:
    data = [(torch.randn(4, 1, 6, 6), torch.randint(3, (4,))) for _ in range(3)]
    settings: dict[str, Any] = {
        "loss": nn.functional.cross_entropy,
        "optimizer": pl.optim.adamw(lr=1e-2),
        "max_duration": "1ep",
        "evaluators": {"val": data},
        "algorithms": [pl.algorithms.ema(half_life="2ba")],
        **overrides,
    }
    return pl.run(pl.fit(settings.pop("model", model()), data, **settings))


@pytest.mark.slow
@given(VALUES)
def test_every_value_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("values") / "x.safetensors"
    state = pl.State.create(nn.Linear(1, 1)).remember("mine", value)
    pl.save(state, path)
    found = pl.load(path, model=nn.Linear(1, 1))
    assert identical(found.algorithm_state["mine"], value)
    sameness.assert_same(found.params, state.params, "params")
    # Whoever else reads such files can read this one.
    with safe_open(path, "pt") as file:
        assert {"params.weight", "params.bias", container.DIGEST} <= set(file.keys())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 1, 3)], ids=str)
def test_every_dtype_and_shape(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    numbers = torch.arange(count, dtype=torch.uint8) % (2 if dtype is torch.bool else 250)
    tensor = numbers.view(dtype).reshape(shape)
    pl.save(pl.State.create(nn.Linear(1, 1)).remember("mine", tensor), tmp_path / "x.safetensors")
    found = pl.load(tmp_path / "x.safetensors", model=nn.Linear(1, 1)).algorithm_state["mine"]
    assert identical(found, tensor)


def test_a_tensor_that_stands_twice_is_one_after_loading_too(tmp_path: Path) -> None:
    shared = torch.ones(1000)
    state = pl.State.create(nn.Linear(1, 1)).remember("mine", {"a": shared, "b": [shared]})
    pl.save(state, tmp_path / "x.safetensors")
    memory = pl.load(tmp_path / "x.safetensors", model=nn.Linear(1, 1)).algorithm_state["mine"]
    assert memory["a"] is memory["b"][0]
    assert (tmp_path / "x.safetensors").stat().st_size < 8000


def test_tensors_lie_in_memory_as_they_did(tmp_path: Path) -> None:
    module = model().to(memory_format=torch.channels_last)
    state = trained(model=module)
    pl.save(state, tmp_path / "x.safetensors")
    found = pl.load(tmp_path / "x.safetensors", model=model())
    for name, tensor in state.params.items():
        assert found.params[name].stride() == tensor.stride(), name
    # And in the file as the format has them.
    assert torch.equal(load_file(tmp_path / "x.safetensors")["params.0.weight"], state.params["0.weight"])


def test_tied_weights(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].weight = module[0].weight
        return module

    state = pl.State.create(tied())
    pl.save(state, tmp_path / "x.safetensors")
    module = pl.load(tmp_path / "x.safetensors", model=tied()).module()
    assert module[1].weight is module[0].weight
    assert torch.equal(module[0].weight, state.params["0.weight"])
    with pytest.raises(pl.ResumeError, match=r"of params, the file lacks \['1.weight'\]"):
        pl.load(tmp_path / "x.safetensors", model=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def test_a_subclass_of_state_with_its_fields(tmp_path: Path) -> None:
    state = Teacher.create(nn.Linear(2, 1), teacher=pl.FrozenDict(weight=torch.ones(1, 2)), note="a")
    pl.save(state, tmp_path / "x.safetensors")
    found = pl.load(tmp_path / "x.safetensors", model=nn.Linear(2, 1))
    assert type(found) is Teacher
    assert found.note == "a"
    assert torch.equal(found.teacher["weight"], torch.ones(1, 2))


def test_what_is_of_the_batch_is_not_saved(tmp_path: Path) -> None:
    data = [(torch.ones(2, 2), torch.ones(2, 1))]
    settings: Any = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ba"}
    stream = pl.fit(nn.Linear(2, 1), data, **settings, donate=False)
    state = next(state for event, state in stream if event is Event.BATCH_END)
    stream.close()
    assert state.grads is not None
    pl.save(state, tmp_path / "x.safetensors")
    found = pl.load(tmp_path / "x.safetensors", model=nn.Linear(2, 1))
    assert (found.event, found.position, found.loss, found.grads) == (Event.BATCH_END, Event.BATCH_END, None, None)


def test_the_file_names_what_it_needs(tmp_path: Path) -> None:
    pl.save(trained(), tmp_path / "x.safetensors", notes={"why": "a test"})
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        said = json.loads(file.metadata()["pure_loop"])
    assert said["format"] == document.FORMAT
    assert said["made_by"] == {"pure_loop": pl.__version__, "torch": torch.__version__}
    assert (said["state"], said["notes"]) == ("pure_loop.State", {"why": "a test"})


# What else is read and written.


def test_weights_alone_into_a_plain_module(tmp_path: Path) -> None:
    state = trained()
    pl.save(state, tmp_path / "x.safetensors")
    fresh = pl.load(tmp_path / "x.safetensors", model=model(), weights_only=True)
    assert (fresh.timestamp.batch, fresh.opt_state, fresh.event) == (0, None, None)
    module = fresh.module()
    for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        assert torch.equal(tensor, {**state.params, **state.buffers}[name])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(4), persistent=False)


@pytest.mark.parametrize("name", ["embed.weight", "out.weight"])
def test_a_plain_file_of_weights(tmp_path: Path, name: str) -> None:
    # Files of tied weights have either name.
    save_file({name: torch.ones(5, 3)}, tmp_path / "x.safetensors")
    state = pl.load(tmp_path / "x.safetensors", model=Tied())
    assert torch.equal(state.params["embed.weight"], torch.ones(5, 3))
    assert state.buffers["steps"].tolist() == [0, 1, 2, 3]


def test_a_plain_file_starts_a_run(tmp_path: Path) -> None:
    source = model()
    save_file(source.state_dict(), tmp_path / "x.safetensors")
    torch.manual_seed(1)
    other = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    data = [(torch.ones(4, 1, 6, 6), torch.zeros(4, dtype=torch.long))]
    settings: Any = {"loss": nn.functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ba"}
    loaded = pl.fit(other, data, load_path=tmp_path / "x.safetensors", **settings)
    plain = pl.fit(source, data, **settings)
    sameness.assert_same_stream(list(loaded)[2:], list(plain)[2:], "from a file of weights")


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(3, 2), "extra": torch.ones(1)}, path)
    with pytest.raises(pl.ResumeError, match=r"the file lacks \['bias'\]; the model lacks \['extra'\]"):
        pl.load(path, model=nn.Linear(2, 3))
    state = pl.load(path, model=nn.Linear(2, 3), weights_only=True, strict=False)
    assert torch.equal(state.params["weight"], torch.ones(3, 2))
    with pytest.raises(pl.ResumeError, match=r"'weight' has shape \(3, 2\) in the file and \(3, 4\)"):
        pl.load(path, model=nn.Linear(4, 3), weights_only=True, strict=False)
    save_file({"other": torch.ones(1)}, path)
    with pytest.raises(pl.ResumeError, match="other weights than Linear"):
        pl.load(path, model=nn.Linear(2, 3), weights_only=True, strict=False)


def test_a_state_that_does_not_fit_the_model(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    pl.save(trained(), path)
    wide = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    with pytest.raises(pl.ResumeError, match=r"params\['4.weight'\] is \(3, 64\) float32 in the file and \(5, 64\)"):
        pl.load(path, model=wide)
    with pytest.raises(pl.ResumeError, match=r"params\['0.weight'\] is .* float32 in the file and .* float64"):
        pl.load(path, model=model().double())
    with pytest.raises(pl.ResumeError, match=r"of buffers, the model lacks \['1.running_mean'"):
        pl.load(
            path, model=nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(1, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        )
    with pytest.raises(pl.ArgumentTypeError, match="give the module that was trained"):
        pl.load(path, model=None)  # type: ignore[arg-type]
    with pytest.raises(pl.ArgumentError, match="weights_only=True"):
        pl.load(path, model=model(), strict=False)


# What can't be saved, and what can't be read.


class Strange:
    pass


class NotRegistered(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, Strange()]}, "state.algorithm_state.mine.a.1 is a tests.checkpoint.test_checkpoints.Strange"),
        (NotRegistered(1), r"pl.checkpoint.register\(NotRegistered\)"),
        (lambda: None, "state.algorithm_state.mine is a builtins.function"),
        (torch.ones(2, device="meta"), "on the meta device"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (np.array(["a"]), "a NumPy array of dtype"),
    ],
    ids=["an object", "a record", "a function", "meta", "sparse", "texts of NumPy"],
)
def test_what_a_checkpoint_can_not_hold(tmp_path: Path, value: Any, says: str) -> None:
    state = pl.State.create(nn.Linear(1, 1)).remember("mine", value)
    with pytest.raises(pl.ArgumentTypeError, match=says):
        pl.save(state, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_value_that_holds_itself(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(pl.ArgumentTypeError, match="nested more than 100 deep"):
        pl.save(pl.State.create(nn.Linear(1, 1)).remember("mine", endless), tmp_path / "x.safetensors")


def test_only_states_are_saved(tmp_path: Path) -> None:
    with pytest.raises(pl.ArgumentTypeError, match="what is saved is a State"):
        pl.save(tmp_path / "x", trained())  # type: ignore[arg-type]
    with pytest.raises(pl.ArgumentTypeError, match="3 is no path"):
        pl.save(trained(), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("notes", [5, {1: 2}, {"a": torch.ones(1)}, {"a": float("nan")}, {"a": (1, 2)}], ids=str)
def test_notes_are_json(tmp_path: Path, notes: Any) -> None:
    with pytest.raises(pl.ArgumentTypeError, match="a dict of what JSON has"):
        pl.save(pl.State.create(nn.Linear(1, 1)), tmp_path / "x.safetensors", notes=notes)


def test_what_a_file_says_without_its_tensors(tmp_path: Path) -> None:
    pl.save(trained(seed=4), tmp_path / "x.safetensors", notes={"why": "a test"})
    said = pl.checkpoint.describe(tmp_path / "x.safetensors")
    assert (said["epoch"], said["batch"], said["seed"], said["event"]) == (1, 3, 4, Event.FIT_END)
    assert said["model"] == "torch.nn.modules.container.Sequential"
    assert said["notes"] == {"why": "a test"}
    save_file({"weight": torch.ones(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(pl.CheckpointError, match="weights alone"):
        pl.checkpoint.describe(tmp_path / "plain.safetensors")


def test_weights_of_another_kind_of_number(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(1, 1, dtype=torch.int8), "bias": torch.ones(1)}, path)
    with pytest.raises(pl.ResumeError, match=r"'weight' has dtype torch.int8 in the file and torch.float32"):
        pl.load(path, model=nn.Linear(1, 1))
    save_file({"weight": torch.ones(1, 1, dtype=torch.bfloat16), "bias": torch.ones(1)}, path)
    assert pl.load(path, model=nn.Linear(1, 1)).params["weight"].dtype is torch.float32


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    pl.save(trained(), tmp_path / "x.safetensors")
    with pytest.raises(pl.ArgumentError, match="device='cud' can't be used here"):
        pl.load(tmp_path / "x.safetensors", model=model(), device="cud")


def test_a_class_that_this_program_does_not_know(tmp_path: Path) -> None:
    class Local(NamedTuple):
        x: int

    pl.checkpoint.register(Local, name="gone")
    pl.save(pl.State.create(nn.Linear(1, 1)).remember("mine", Local(1)), tmp_path / "x.safetensors")
    with pytest.raises(pl.ArgumentError, match="checkpoints call"):
        pl.checkpoint.register(Pair, name="gone")
    registry._by_name.pop("gone")
    with pytest.raises(pl.CheckpointError, match="'gone', a class unknown to this program: import the module"):
        pl.load(tmp_path / "x.safetensors", model=nn.Linear(1, 1))
    with pytest.raises(pl.ArgumentTypeError, match="give an attrs class"):
        pl.checkpoint.register(Strange)


def test_a_class_that_has_other_fields_by_now(tmp_path: Path) -> None:
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
    known(Old)
    pl.save(pl.State.create(nn.Linear(1, 1)).remember("mine", Old(1)), path)
    known(New)
    assert pl.load(path, model=nn.Linear(1, 1)).algorithm_state["mine"] == New(1, "new")
    for cls, says in ((Other, r"missing \['needed'\]"), (Fewer, r"unknown \['kept'\]")):
        known(cls)
        with pytest.raises(pl.CheckpointError, match=f"other fields than it has now: {says}"):
            pl.load(path, model=nn.Linear(1, 1))
    registry._by_name.pop("evolving")


def known(cls: type) -> None:
    """Register a class under the name of another version of it."""
    registry._by_name.pop("evolving", None)
    pl.checkpoint.register(cls, name="evolving")


@pytest.mark.parametrize("leaf", [1, 2.5, float("inf"), "x", None, (), {1: 2}])
@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}, lambda x: {(x,)}]
)
def test_what_can_be_saved_can_be_loaded_however_deep(tmp_path: Path, leaf: Any, wrap: Any) -> None:
    """Writer and reader stop at the same depth, near which each value is refused by the first or comes back."""
    for depth in (90, 97, 98, 99, 100, 101):
        value = leaf
        try:
            for _ in range(depth):
                value = wrap(value)
        except TypeError:  # what can't be hashed
            return
        state = pl.State.create(nn.Linear(1, 1)).remember("x", value)
        try:
            pl.save(state, tmp_path / "x.safetensors")
        except pl.ArgumentTypeError:
            assert depth > 90
            continue
        assert pl.load(tmp_path / "x.safetensors", model=nn.Linear(1, 1)).algorithm_state["x"] == value
