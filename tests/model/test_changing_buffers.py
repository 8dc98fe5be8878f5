"""Buffers that forwards register, set, reshape and remove: in the State from then on, as in a loop by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import CheckpointError, CompileError, ModelError, ResumeError
from pure_loop.order import BOUNDARIES
from tests.support import problem
from tests.support.holding import DATA, WAYS, assert_holds, by_hand, ends, fit, last, made, mse
from tests.support.hostile import described, document_of
from tests.support.tiers import examples


class Scripted(nn.Module):
    """Does to its buffers what a script says, a line a forward in train mode; its output depends on all of them."""

    def __init__(self, script: list[list[tuple[Any, ...]]], tied: bool) -> None:
        super().__init__()
        self.script = script
        self.layer, self.inner = nn.Linear(4, 2), nn.Linear(2, 2)
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
        if change == "register":
            module.register_buffer(name, y.mean(0).clone(), persistent=more[0])
        if change == "register" or name not in module._buffers:
            return
        if change == "delete":
            delattr(module, name)
            return
        tensor: Any = getattr(module, name)
        values: dict[str, Any] = {"none": lambda: None, "set": lambda: y[: more[0]].clone(), "of the batch": y.t}
        if tensor is not None:
            values["grow"] = lambda: torch.cat([tensor.reshape(-1), y.reshape(-1)[: more[0]].to(tensor)])
            values["dtype"] = lambda: tensor.to(more[0])
            values["view"] = lambda: tensor.reshape(-1)[1:]
            if tensor.numel():
                values["expand"] = lambda: tensor.reshape(-1)[:1].clone().expand(3)
            if change == "data":
                tensor.data = y[: more[0]].to(tensor)
            if change == "in place" and not (tensor.numel() and 0 in tensor.stride()):
                tensor += 1
        if change in values:
            setattr(module, name, values[change]())


CHANGES = st.one_of(
    st.tuples(st.just("register"), st.booleans()),
    st.tuples(st.sampled_from(["none", "delete", "of the batch", "view", "expand", "in place", "in place"])),
    st.tuples(st.sampled_from(["set", "grow", "data"]), st.integers(0, 4)),
    st.tuples(st.just("dtype"), st.sampled_from([torch.float64, torch.float16, torch.int32])),
)
ACTS = st.tuples(st.booleans(), st.sampled_from("abc"), CHANGES)
LINES = st.lists(ACTS.map(lambda act: (*act[:2], *act[2])), max_size=3)


def shares_memory(module: nn.Module) -> bool:
    buffers = [tensor for _, tensor in module.named_buffers() if tensor.numel()]
    return len({tensor.untyped_storage().data_ptr() for tensor in buffers}) < len(buffers)


@examples(14, 1500)
@given(st.lists(LINES, min_size=1, max_size=6), st.booleans(), st.sampled_from(WAYS), st.integers(0, 100))
def test_any_script_of_changes(script: list[list[tuple[Any, ...]]], tied: bool, options: Any, boundary: int) -> None:
    """Against the loop by hand, evaluated after each batch, and resumed at a boundary from memory and from disk."""
    model = made(Scripted, script, tied)
    expected = list(map(copy.deepcopy, by_hand(copy.deepcopy(model))))
    settings: dict[str, Any] = {"evaluators": DATA[:1], "eval_interval": "1ba", **options}
    if any(map(shares_memory, expected)):
        with pytest.raises(ModelError, match="in the same memory"):
            pl.run(fit(model, **settings))
        return
    pairs = list(fit(model, **settings))
    states = [state for event, state in pairs if event is Event.BATCH_END]
    measured = [state for event, state in pairs if event is Event.BATCH_CHECKPOINT]
    for batch, (state, module) in enumerate(zip(states, expected, strict=True)):
        assert_holds(state, module, f"batch {batch}")
        wanted = mse(copy.deepcopy(module).eval()(DATA[0][0]), DATA[0][1])
        if measured:  # where all events are watched
            assert float(measured[batch].metrics["eval"]["loss"]) == float(wanted.detach())
    boundaries = [state for event, state in pairs if event in BOUNDARIES]
    kept = boundaries[boundary % len(boundaries)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        pl.save(kept, path)
        for start in (kept, pl.load(path, model=made(Scripted, script, tied))):
            assert_holds(start, kept.module())
            assert_holds(pl.run(fit(start, **settings)), expected[-1])


class First(nn.Module):
    """None at first; or registered in the first forward, of a submodule too."""

    mean: Tensor | None

    def __init__(self, registers: bool = False) -> None:
        super().__init__()
        self.layer, self.registers = nn.Linear(4, 2), registers
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Any:
        y: Tensor = self.layer(x)
        if self.mean is None:
            self.mean = y.detach().mean(0)
            if self.registers:
                self.layer.register_buffer("scale", y.detach().std(0), persistent=False)
        return (y - self.mean) * (self.layer.scale if self.registers else 1)


def test_what_holds_nothing_may_be_made_in_the_forward() -> None:
    """A loss or an activation; a submodule that is registered a second time; and a functional call."""

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            self.activation, self.current = nn.ReLU(), self.layer
            other = {name: parameter * 2 for name, parameter in self.layer.named_parameters()}
            return torch.func.functional_call(self.layer, other, x) + self.layer(x)

    state = pl.run(fit(Makes(), evaluators=DATA))
    assert set(state.params) == {"layer.weight", "layer.bias"}
    assert not state.buffers


def test_a_batch_that_is_skipped_registers_nothing() -> None:
    """nonfinite="skip": the buffers are those before the batch, and so is what is registered."""
    data = [(DATA[0][0], torch.full((8, 2), torch.inf)), *DATA]
    for registers in (False, True):
        states = ends(made(First, registers), data, max_duration="4ba", nonfinite="skip")
        assert_holds(states[0], made(First, registers))
        for state, module in zip(states[1:], by_hand(made(First, registers), steps=3), strict=True):
            assert_holds(state, module)


SLOTS: list[tuple[Any, str, bool]] = [
    ([], "list where buffers are listed", True),
    ({"mean": 3}, "buffer 'mean' is described by 3", True),
    ({"mean": ["frozen", True]}, "is described by", True),
    ({"layer.": ["tensor", True]}, "is described by", True),
    ({"mean": ["tensor", 1]}, "is described by", True),
    ({"head.mean": ["tensor", True]}, "no submodule 'head' for the buffer 'head.mean'", False),
    ({"layer.weight": ["tensor", True]}, "'layer.weight' is no buffer there", False),
    ({"forward": ["tensor", True]}, "'forward' is no buffer there", False),
    ({"mean": ["reshaped", True]}, "the buffer 'mean' is no tensor there", False),
    ({"mean": ["tensor", True], "other": ["tensor", True]}, r"the file lacks ['other']", False),
    ({}, "the model lacks ['mean']", False),
]


def test_files_that_list_other_buffers_are_refused(tmp_path: Path) -> None:
    """With a digest that is right; what no program has written is passed over where there is another file."""
    kept = ends(made(First))
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    pl.save(kept[0], good)
    pl.save(kept[1], bad)
    content = bad.read_bytes()
    for slots, said, passed_over in SLOTS:
        bad.write_bytes(described(content, json.dumps({**document_of(content), "buffers": slots})))
        kinds: Any = CheckpointError if passed_over else ResumeError
        with pytest.raises(kinds) as caught:
            pl.load(bad, model=First())
        assert said in str(caught.value)
        assert pl.latest_path(tmp_path) == str(good) or not passed_over


def test_apply_follows_what_a_function_registers() -> None:
    """In scripts: the buffers of one call are given to the next one."""
    state, expected, x = pl.State.create(made(First)), made(First), DATA[0][0]
    out, buffers = state.model.apply(lambda m: m(x), state.params, state.buffers, training=True)
    again, after = state.model.apply(lambda m: m(2 * x), state.params, dict(buffers), training=True)
    assert torch.equal(out, expected(x))
    assert torch.equal(again, expected(2 * x))
    assert torch.equal(after["mean"], expected.mean)
    assert not state.buffers


@pytest.mark.usefixtures("interpreted")
def test_a_compiled_step_says_that_it_needs_one_shape() -> None:
    """And runs such a forward eagerly where possible; from a State that has the buffers it is compiled."""
    model = made(First)
    with pytest.raises(CompileError, match=r"a graph has buffers of one shape|reads a number out of a tensor"):
        pl.run(fit(model, compile=True))
    compiled = pl.run(fit(ends(model)[0], compile=True))
    eager = pl.run(fit(model, compile="where possible", evaluators=DATA[:1]))
    expected = last(made(First))
    for state in (eager, compiled):
        problem.close({**state.params, **state.buffers}, expected.state_dict(), 1e-5)


def test_nothing_is_altered_where_buffers_are_only_written_to() -> None:
    states = [state for _, state in problem.fit("convnet")]
    assert all(state.model is states[0].model for state in states)
    assert not states[0].model.altered
