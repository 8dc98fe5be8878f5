"""Buffers that forwards register, set, reshape and remove: in the State from then on, as in a loop by hand."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import BOUNDARIES
from tests.conftest import THOROUGH
from tests.support.hostile import described, document_of
from tests.support.runs import images
from tests.support.tiers import examples, pairwise


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Eight samples, so that a mean over them rounds as it does by hand.
DATA = [(noise(8, 3, seed=i), noise(8, 2, seed=i + 10)) for i in range(3)]
OPTIONS: dict[str, dict[str, Any]] = {
    "all events": {},
    "watched": {"watch": {Event.BATCH_END}},
    "copied": {"donate": False},
    "strict": {"strict": True},
    "microbatches": {"microbatch_size": 8},
}
OPTIMIZER = {"optimizer": pl.optim.sgd(lr=0.01), "loss": functional.mse_loss}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.build()

    def build(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.change(self.layer(x))
        return out

    def change(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class Bank(Base):
    """Grows by a batch in each forward."""

    bank: Tensor

    def build(self) -> None:
        self.register_buffer("bank", torch.zeros(0, 2))

    def change(self, y: Tensor) -> Tensor:
        self.bank = torch.cat([self.bank, y.detach()])
        return y - self.bank.mean(0)


class BankOfData(Bank):
    """By ``.data``, so that the buffer stays the same object."""

    def change(self, y: Tensor) -> Tensor:
        self.bank.data = torch.cat([self.bank, y.detach()])
        return y - self.bank.mean(0)


class Wider(Base):
    """Another dtype from the second forward on."""

    mean: Tensor

    def build(self) -> None:
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float16), persistent=False)

    def change(self, y: Tensor) -> Tensor:
        if self.mean.any():
            self.mean = self.mean.double()
        self.mean = (self.mean + y.detach().mean(0)).to(self.mean.dtype)
        return y - self.mean.float()


class NoneAtFirst(Base):
    mean: Tensor | None

    def build(self) -> None:
        self.register_buffer("mean", None)

    def change(self, y: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = y.detach().mean(0)
        return y - self.mean


class Registered(Base):
    """In the forward, of a submodule too, one of them not in state_dict()."""

    def change(self, y: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", y.detach().mean(0), persistent=False)
            self.layer.register_buffer("scale", y.detach().std(0))
            self.register_buffer("later", None)
        elif self.later is None:
            self.later = torch.ones(2)
        else:
            self.later += 1
        scale: Any = self.layer.scale
        return (y - self.mean) / scale


class BecomesNone(Base):
    count: Tensor
    first: Tensor | None

    def build(self) -> None:
        self.register_buffer("first", torch.ones(2))
        self.register_buffer("count", torch.tensor(0))

    def change(self, y: Tensor) -> Tensor:
        self.count += 1
        if self.count == 2:
            self.first = None
        elif self.count == 4:
            self.first = torch.full((3, 2), 2.0)
        return y if self.first is None else y * self.first.sum(0)


class Deleted(Base):
    """Once deleted, hasattr is what tells; and it is registered again later."""

    count: Tensor

    def build(self) -> None:
        self.register_buffer("first", torch.ones(2))
        self.register_buffer("count", torch.tensor(0))

    def change(self, y: Tensor) -> Tensor:
        self.count += 1
        if self.count == 2:
            del self.first
        elif self.count == 4:
            self.register_buffer("first", torch.full((2,), 3.0), persistent=False)
        return y * self.first if hasattr(self, "first") else y


class ComesAndGoes(Base):
    """A tensor after each other forward."""

    cache: Tensor | None

    def build(self) -> None:
        self.register_buffer("cache", None)

    def change(self, y: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = y.detach().mean(0)
            return y
        y = y - self.cache
        self.cache = None
        return y


class Torn(Base):
    """One buffer under two names; from the second forward on they are two."""

    a: Tensor
    b: Tensor

    def build(self) -> None:
        self.register_buffer("a", torch.zeros(2))
        self.register_buffer("b", self.a)

    def change(self, y: Tensor) -> Tensor:
        if self.b.any():
            self.a = self.a + 1
        self.b += 1
        return y + self.a - 0.5 * self.b


class Rotary(Base):
    """As rotary embeddings are cached: registered in __init__, and anew by a longer input."""

    table: Tensor

    def build(self) -> None:
        self.register_buffer("table", torch.arange(2.0), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def change(self, y: Tensor) -> Tensor:
        self.calls = self.calls + 1
        if 3 * int(self.calls) > len(self.table):
            self.register_buffer("table", torch.arange(6.0 * int(self.calls)), persistent=False)
        return y * (1 + self.table[:2]) / self.table.sum()


CHOSEN = (3, 14)
KINDS = [
    *(Bank, BankOfData, Wider, NoneAtFirst, Registered, BecomesNone, Deleted, ComesAndGoes, Torn, Rotary),
]


def by_hand(model: nn.Module, steps: int = 6) -> list[nn.Module]:
    """The module after each step."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    after = []
    for step in range(steps):
        x, y = DATA[step % len(DATA)]
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        after.append(copy.deepcopy(model))
    return after


def assert_holds(state: pl.State, module: nn.Module, where: str = "") -> None:
    """The State, and its module, hold what this one does: names, numbers, dtypes, and what is persistent."""
    for made in (None, state.module()):
        params = dict(state.params if made is None else made.named_parameters())
        buffers = dict(state.buffers if made is None else made.named_buffers())
        for held, named in ((params, dict(module.named_parameters())), (buffers, dict(module.named_buffers()))):
            assert held.keys() == named.keys(), where
            for name, tensor in named.items():
                assert held[name].dtype == tensor.dtype, (where, name)
                assert torch.equal(held[name].detach(), tensor.detach()), (where, name)
        if made is not None:
            assert made.state_dict().keys() == module.state_dict().keys(), where
            for name, submodule in module.named_modules():
                assert made.get_submodule(name)._buffers.keys() == submodule._buffers.keys(), where


def fit(start: Any, **options: Any) -> Any:
    return pl.fit(start, DATA, max_duration="2ep", **(OPTIMIZER | options))


@pytest.mark.parametrize(("kind", "options"), pairwise({kind.__name__: kind for kind in KINDS}, list(OPTIONS)))
def test_buffers_are_those_of_a_loop_by_hand(kind: type[Base], options: str) -> None:
    model = kind()
    expected = by_hand(model)
    states = [state for event, state in fit(model, **OPTIONS[options]) if event is Event.BATCH_END]
    for batch, (state, module) in enumerate(zip(states, expected, strict=True)):
        assert_holds(state, module, f"batch {batch}")
    for state, module in ((states[0], expected[0]), (states[-1], expected[-1])):
        evaluated = pl.run(pl.evaluate(state, DATA[1:2], loss=functional.mse_loss)).metrics["eval"]["loss"]
        wanted = functional.mse_loss(copy.deepcopy(module).eval()(DATA[1][0]), DATA[1][1])
        assert float(evaluated) == float(wanted.detach())
    assert_holds(pl.State.create(model), kind())


@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_from_every_boundary(kind: type[Base], tmp_path: Path) -> None:
    """From a kept State, a pickled one, a file, load_path and autoresume; to weights alone."""
    model = kind()
    pairs = [(event, state) for event, state in fit(model)]
    final = pairs[-1][1].module()
    boundaries = [(e, s) for e, s in pairs if e in BOUNDARIES or e is Event.FIT_START]
    # BATCH_END of the first batch, and of the fifth.
    assert [boundaries[index][0] for index in CHOSEN] == [Event.BATCH_END, Event.BATCH_END]
    for index in range(len(boundaries)) if THOROUGH else CHOSEN:
        event, state = boundaries[index]
        path = tmp_path / str(index) / "a.safetensors"
        pl.save(state, path)
        starts: dict[str, Any] = {"kept": state, "pickled": pickle.loads(pickle.dumps(state))}
        starts |= {"loaded": pl.load(path, model=kind()), "of its module": pl.load(path, model=state.module())}
        for how, start in starts.items():
            assert_holds(start, state.module(), how)
            assert_holds(pl.run(fit(start)), final, f"{how} at {event.name} {index}")
        if state.position is not None:
            for how, options in (("load_path", {"load_path": path}), ("autoresume", {"autoresume": path.parent})):
                assert_holds(pl.run(fit(kind(), **options)), final, f"{how} at {event.name} {index}")
        assert_holds(pl.load(path, model=kind(), weights_only=True), state.module(), "weights alone")


class Scripted(nn.Module):
    """Does to its buffers what a script says, a line a forward in train mode; its output depends on all of them."""

    def __init__(self, script: list[list[tuple[Any, ...]]], tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.script = script
        self.layer, self.inner = nn.Linear(3, 2), nn.Linear(2, 2)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("a", torch.ones(2, 2))
        self.register_buffer("b", None, persistent=False)
        self.inner.register_buffer("a", self.a if tied else torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.layer(x))
        if self.training:
            calls = int(self.calls)
            self.calls = self.calls + 1
            for line in self.script[calls : calls + 1]:
                for inside, name, change, *more in line:
                    self.act(self.inner if inside else self, name, change, more, y.detach())
        for module in (self, self.inner):
            for name in ("a", "b", "c"):
                tensor = getattr(module, name, None)
                if tensor is not None and tensor.numel():
                    y = y + tensor.float().mean()
        return y

    def act(self, module: nn.Module, name: str, change: str, more: list[Any], y: Tensor) -> None:
        tensor: Any = getattr(module, name, None)
        if change == "register":
            module.register_buffer(name, y.mean(0).clone(), persistent=more[0])
        elif name not in module._buffers:
            return
        elif change == "none":
            setattr(module, name, None)
        elif change == "delete":
            delattr(module, name)
        elif change == "set":
            setattr(module, name, y[: more[0]].clone())
        elif change == "of the batch":
            setattr(module, name, y.t())
        elif tensor is None:
            return
        elif change == "grow":
            setattr(module, name, torch.cat([tensor.reshape(-1), y.reshape(-1)[: more[0]].to(tensor)]))
        elif change == "data":
            tensor.data = y[: more[0]].to(tensor)
        elif change == "dtype":
            setattr(module, name, tensor.to(more[0]))
        elif change == "view":
            setattr(module, name, tensor.reshape(-1)[1:])
        elif change == "expand" and tensor.numel():
            setattr(module, name, tensor.reshape(-1)[:1].clone().expand(3))
        elif change == "in place" and not (tensor.numel() and 0 in tensor.stride()):
            tensor += 1


CHANGES = st.one_of(
    st.tuples(st.just("register"), st.booleans()),
    st.tuples(st.sampled_from(["none", "delete", "of the batch", "view", "expand", "in place", "in place"])),
    st.tuples(st.sampled_from(["set", "grow", "data"]), st.integers(0, 4)),
    st.tuples(st.just("dtype"), st.sampled_from([torch.float64, torch.float16, torch.int32])),
)
LINES = st.lists(
    st.builds(lambda inside, name, change: (inside, name, *change), st.booleans(), st.sampled_from("abc"), CHANGES),
    max_size=3,
)


def shares_memory(module: nn.Module) -> bool:
    buffers = [tensor for _, tensor in module.named_buffers() if tensor.numel()]
    return len({tensor.untyped_storage().data_ptr() for tensor in buffers}) < len(buffers)


@examples(12, 1500)
@given(
    script=st.lists(LINES, min_size=1, max_size=6),
    tied=st.booleans(),
    options=st.sampled_from(list(OPTIONS)),
    boundary=st.integers(0, 100),
)
def test_any_script_of_changes(script: list[list[tuple[Any, ...]]], tied: bool, options: str, boundary: int) -> None:
    """Against the loop by hand, evaluated after each batch, and resumed at a boundary from memory and from disk."""
    model = Scripted(script, tied)
    expected = by_hand(model)
    settings: dict[str, Any] = {"evaluators": DATA[:1], "eval_interval": "1ba", **OPTIONS[options]}
    if any(map(shares_memory, expected)):
        with pytest.raises(pl.ModelError, match="in the same memory"):
            pl.run(fit(model, **settings))
        return
    pairs = [(event, state) for event, state in fit(model, **settings)]
    states = [state for event, state in pairs if event is Event.BATCH_END]
    measured = [state for event, state in pairs if event is Event.BATCH_CHECKPOINT]
    for batch, (state, module) in enumerate(zip(states, expected, strict=True)):
        assert_holds(state, module, f"batch {batch}")
        wanted = functional.mse_loss(copy.deepcopy(module).eval()(DATA[0][0]), DATA[0][1])
        if measured:  # where all events are watched
            assert float(measured[batch].metrics["eval"]["loss"]) == float(wanted.detach())
    boundaries = [state for event, state in pairs if event in BOUNDARIES]
    kept = boundaries[boundary % len(boundaries)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        pl.save(kept, path)
        for start in (kept, pl.load(path, model=Scripted(script, tied))):
            assert_holds(start, kept.module())
            assert_holds(pl.run(fit(start, **settings)), expected[-1])


class Makes(nn.Module):
    """A submodule, parameter or buffer made in the forward by ``make``."""

    def __init__(self, make: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(3, 2), make
        self.register_buffer("one", torch.ones(2))
        self.register_buffer("two", torch.ones(2))
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.make(self, y.detach())
        return y * self.one * self.two


REFUSED: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "a parameter": (lambda m, y: setattr(m, "w", nn.Parameter(y.mean(0))), "created the parameter 'w'"),
    "a parameter in the place of None": (
        lambda m, y: setattr(m, "nothing", nn.Parameter(y.mean(0))),
        "created the parameter 'nothing'",
    ),
    "a parameter of a submodule": (
        lambda m, y: m.layer.register_parameter("w", nn.Parameter(y.mean(0))),
        "created the parameter 'layer.w'",
    ),
    "another parameter": (
        lambda m, y: setattr(m.layer, "bias", nn.Parameter(y.mean(0))),
        "replaced the parameter 'layer.bias'",
    ),
    "no parameter any more": (lambda m, y: delattr(m.layer, "bias"), "removed the parameter 'layer.bias'"),
    "None for a parameter": (lambda m, y: setattr(m.layer, "bias", None), "removed the parameter 'layer.bias'"),
    "a layer": (lambda m, y: setattr(m, "head", nn.Linear(2, 2)), "put a Linear in the model, as 'head'"),
    "another layer": (lambda m, y: setattr(m, "layer", nn.Linear(3, 2)), "put a Linear in the model, as 'layer'"),
    "a layer in a list": (
        lambda m, y: m.add_module("heads", nn.ModuleList([nn.BatchNorm1d(2, affine=False)])),
        "as 'heads'",
    ),
    "no layer any more": (lambda m, y: delattr(m, "layer"), "removed the submodule 'layer'"),
    "one buffer for two": (lambda m, y: setattr(m, "one", m.two), "buffer 'one' and buffer 'two' in the same memory"),
    "a part of a buffer": (lambda m, y: setattr(m, "one", m.two[1:]), "in the same memory"),
    "a parameter as a buffer": (
        lambda m, y: setattr(m, "one", m.layer.bias.detach()),
        "parameter 'layer.bias' and buffer 'one' in the same memory",
    ),
    "a number for a buffer": (lambda m, y: m._buffers.update(one=3), "set buffer 'one' to 3"),
}


@pytest.mark.parametrize("options", ["all events", "watched"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_state_can_hold_is_refused_by_name_in_the_first_batch(name: str, options: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(pl.ModelError) as caught:
        pl.run(fit(Makes(make), **OPTIONS[options]))
    assert said in str(caught.value)
    assert "batch 0" in str([str(caught.value), *caught.value.__notes__])


def test_a_submodule_without_tensors_may_be_made_in_the_forward() -> None:
    """A loss or an activation; and a submodule that is registered a second time."""

    def make(m: Any, y: Tensor) -> None:
        m.activation, m.current = nn.ReLU(), m.layer

    state = pl.run(fit(Makes(make), evaluators=DATA))
    assert set(state.params) == {"layer.weight", "layer.bias"}


def test_a_functional_call_in_the_forward_registers_nothing() -> None:
    def make(m: Any, y: Tensor) -> None:
        other = {name: parameter * 2 for name, parameter in m.layer.named_parameters()}
        torch.func.functional_call(m.layer, other, DATA[0][0])

    assert not pl.run(fit(Makes(make))).model.altered


def test_a_batch_that_is_skipped_registers_nothing() -> None:
    """nonfinite="skip": the buffers are those before the batch, and so is what is registered."""
    data = [(DATA[0][0], torch.full((8, 2), torch.inf)), *DATA]
    for kind in (Bank, NoneAtFirst, Registered):
        stream = pl.fit(kind(), data, max_duration="4ba", nonfinite="skip", **OPTIMIZER)
        states = [state for event, state in stream if event is Event.BATCH_END]
        assert_holds(states[0], kind())
        for state, module in zip(states[1:], by_hand(kind(), 3), strict=True):
            assert_holds(state, module)


def test_an_average_starts_where_a_buffer_does() -> None:
    """EMA: by hand, what a buffer is after the first update that sees it in this shape, and averaged from then on."""
    for kind in KINDS:
        model, average, shapes = kind(), {}, {}
        average = {n: t.detach() for n, t in model.named_buffers() if t.is_floating_point()}
        for module in by_hand(model):
            now = {n: t.detach() for n, t in module.named_buffers() if t.is_floating_point()}
            for name, tensor in now.items():
                old = average.get(name)
                wide = tensor.float() if tensor.dtype is torch.float16 else tensor
                same = old is not None and old.shape == tensor.shape and (old.dtype in (wide.dtype, tensor.dtype))
                average[name] = torch.lerp(old.to(wide.dtype), wide, 0.25) if same else tensor  # type: ignore[union-attr]
            average = {name: average[name] for name in now}
            shapes = {name: tensor.shape for name, tensor in module.named_buffers()}
        ema = pl.algorithms.ema(smoothing=0.75, buffers="*")
        state = pl.run(fit(model, algorithms=[ema], evaluators=DATA))
        found = state.algorithm_state["ema"]["buffers"]
        assert found.keys() == average.keys()
        for name, tensor in average.items():
            torch.testing.assert_close(found[name], tensor)
        shown = pl.algorithms.averaged(state)
        assert {name: tensor.shape for name, tensor in shown.buffers.items()} == shapes
        pl.run(fit(shown.replace(event=state.event), algorithms=[ema]))


SLOTS: dict[str, tuple[Any, str, bool]] = {
    "no mapping": ([], "list where buffers are listed", True),
    "no description": ({"mean": 3}, "buffer 'mean' is described by 3", True),
    "no kind": ({"mean": ["frozen", True]}, "is described by", True),
    "no name": ({"layer.": ["tensor", True]}, "is described by", True),
    "no bool": ({"mean": ["tensor", 1]}, "is described by", True),
    "no submodule": ({"head.mean": ["tensor", True]}, "no submodule 'head' for the buffer 'head.mean'", False),
    "a parameter": ({"layer.weight": ["tensor", True]}, "'layer.weight' is no buffer there", False),
    "a method": ({"forward": ["tensor", True]}, "'forward' is no buffer there", False),
    "no tensor": ({"mean": ["reshaped", True]}, "the buffer 'mean' is no tensor there", False),
    "not in the file": ({"mean": ["tensor", True], "other": ["tensor", True]}, r"the file lacks ['other']", False),
    "not listed": ({}, "the model lacks ['mean']", False),
}


@pytest.mark.parametrize("name", SLOTS)
def test_files_that_list_other_buffers_are_refused(name: str, tmp_path: Path) -> None:
    """With a digest that is right; what no program has written is passed over where there is another file."""
    slots, said, passed_over = SLOTS[name]
    kept = [state for event, state in fit(NoneAtFirst()) if event is Event.BATCH_END]
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    pl.save(kept[0], good)
    pl.save(kept[1], bad)
    content = bad.read_bytes()
    bad.write_bytes(described(content, json.dumps({**document_of(content), "buffers": slots})))
    kinds: Any = pl.CheckpointError if passed_over else pl.ResumeError
    with pytest.raises(kinds) as caught:
        pl.load(bad, model=NoneAtFirst())
    assert said in str(caught.value)
    if passed_over:
        assert pl.latest(tmp_path) == str(good)


def test_apply_follows_what_a_function_registers() -> None:
    """In scripts: the buffers of one call are given to the next one."""
    state = pl.State.create(NoneAtFirst())
    x = DATA[0][0]
    out, buffers = state.model.apply(lambda m: m(x), state.params, state.buffers, training=True)
    again, after = state.model.apply(lambda m: m(2 * x), state.params, dict(buffers), training=True)
    expected = NoneAtFirst()
    assert torch.equal(out, expected(x))
    assert torch.equal(again, expected(2 * x))
    assert torch.equal(after["mean"], expected.mean)  # type: ignore[arg-type]
    assert not state.buffers


@pytest.mark.parametrize("kind", [NoneAtFirst, Bank, Registered, BecomesNone])
def test_a_compiled_step_says_that_it_needs_one_shape(kind: type[Base], interpreted: None) -> None:
    """And runs such a forward eagerly where possible, as it does without compile."""
    with pytest.raises(pl.CompileError, match=r"a graph has buffers of one shape|reads a number out of a tensor"):
        pl.run(fit(kind(), compile=True))
    state = pl.run(fit(kind(), compile="where possible", evaluators=DATA[:1]))
    expected = by_hand(kind())[-1]
    assert state.buffers.keys() == dict(expected.named_buffers()).keys()
    for name, tensor in expected.named_buffers():
        torch.testing.assert_close(state.buffers[name], tensor)


def test_a_compiled_step_resumes_with_what_forwards_registered(interpreted: None) -> None:
    kept = next(state for event, state in fit(NoneAtFirst()) if event is Event.BATCH_END)
    states = [pl.run(fit(kept, compile=compiled)) for compiled in (True, False)]
    for kind in ("params", "buffers"):
        for name, tensor in getattr(states[1], kind).items():
            torch.testing.assert_close(getattr(states[0], kind)[name], tensor)


def test_images_and_normalisation_stay_as_they_were() -> None:
    """Nothing is altered where buffers are only written to."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(400, 3))
    stream = pl.fit(model, images(), loss=functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep")
    states = [state for _, state in stream]
    assert all(state.model is states[0].model for state in states)
    assert not states[0].model.altered
