"""Buffers that forwards register, set, reshape and remove: in the State from then on, as in a loop by hand.

Those of models of a kind are in test_models.py.
"""

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
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import BOUNDARIES
from pure_loop.random import seeded
from tests.support import problem
from tests.support.holding import assert_holds
from tests.support.hostile import described, document_of
from tests.support.problem import noise
from tests.support.tiers import examples

# Eight samples, so that a mean over them rounds as it does by hand.
DATA = [(torch.randn(8, 3, generator=noise(i)), torch.randn(8, 2, generator=noise(i + 10))) for i in range(3)]
WAYS: list[dict[str, Any]] = [
    *({}, {"watch": {Event.BATCH_END}}, {"donate": False}, {"strict": True}, {"microbatch_size": 8})
]
OPTIMIZER = {"optimizer": pl.optim.sgd(lr=0.01), "loss": functional.mse_loss}


def fit(start: Any, **options: Any) -> Any:
    return pl.fit(start, DATA, **{"max_duration": "2ep", **OPTIMIZER, **options})


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


class Scripted(nn.Module):
    """Does to its buffers what a script says, a line a forward in train mode; its output depends on all of them."""

    def __init__(self, script: list[list[tuple[Any, ...]]], tied: bool) -> None:
        super().__init__()
        self.script = script
        with seeded(0):
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


@examples(14, 1500)
@given(
    script=st.lists(LINES, min_size=1, max_size=6),
    tied=st.booleans(),
    options=st.sampled_from(WAYS),
    boundary=st.integers(0, 100),
)
def test_any_script_of_changes(script: list[list[tuple[Any, ...]]], tied: bool, options: Any, boundary: int) -> None:
    """Against the loop by hand, evaluated after each batch, and resumed at a boundary from memory and from disk."""
    model = Scripted(script, tied)
    expected = by_hand(model)
    settings: dict[str, Any] = {"evaluators": DATA[:1], "eval_interval": "1ba", **options}
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


class First(nn.Module):
    """None at first; or registered in the first forward, of a submodule too."""

    mean: Tensor | None

    def __init__(self, registers: bool = False) -> None:
        super().__init__()
        with seeded(0):
            self.layer = nn.Linear(3, 2)
        self.registers = registers
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.mean is None:
            self.mean = y.detach().mean(0)
            if self.registers:
                self.layer.register_buffer("scale", y.detach().std(0), persistent=False)
        return (y - self.mean) * (self.layer.scale if self.registers else 1)  # type: ignore[operator]


def test_what_holds_nothing_may_be_made_in_the_forward() -> None:
    """A loss or an activation; a submodule that is registered a second time; and a functional call."""

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.activation, self.current = nn.ReLU(), self.layer
            other = {name: parameter * 2 for name, parameter in self.layer.named_parameters()}
            return torch.func.functional_call(self.layer, other, x) + self.layer(x)  # type: ignore[no-any-return]

    state = pl.run(fit(Makes(), evaluators=DATA))
    assert set(state.params) == {"layer.weight", "layer.bias"}
    assert not state.buffers


def test_a_batch_that_is_skipped_registers_nothing() -> None:
    """nonfinite="skip": the buffers are those before the batch, and so is what is registered."""
    data = [(DATA[0][0], torch.full((8, 2), torch.inf)), *DATA]
    for registers in (False, True):
        stream = pl.fit(First(registers), data, max_duration="4ba", nonfinite="skip", **OPTIMIZER)
        states = [state for event, state in stream if event is Event.BATCH_END]
        assert_holds(states[0], First(registers))
        for state, module in zip(states[1:], by_hand(First(registers), 3), strict=True):
            assert_holds(state, module)


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


def test_files_that_list_other_buffers_are_refused(tmp_path: Path) -> None:
    """With a digest that is right; what no program has written is passed over where there is another file."""
    kept = [state for event, state in fit(First()) if event is Event.BATCH_END]
    for name, (slots, said, passed_over) in SLOTS.items():
        folder = tmp_path / name
        good, bad = folder / "good.safetensors", folder / "bad.safetensors"
        pl.save(kept[0], good)
        pl.save(kept[1], bad)
        content = bad.read_bytes()
        bad.write_bytes(described(content, json.dumps({**document_of(content), "buffers": slots})))
        kinds: Any = pl.CheckpointError if passed_over else pl.ResumeError
        with pytest.raises(kinds) as caught:
            pl.load(bad, model=First())
        assert said in str(caught.value)
        if passed_over:
            assert pl.latest(folder) == str(good)


def test_apply_follows_what_a_function_registers() -> None:
    """In scripts: the buffers of one call are given to the next one."""
    state, expected, x = pl.State.create(First()), First(), DATA[0][0]
    out, buffers = state.model.apply(lambda m: m(x), state.params, state.buffers, training=True)
    again, after = state.model.apply(lambda m: m(2 * x), state.params, dict(buffers), training=True)
    assert torch.equal(out, expected(x))
    assert torch.equal(again, expected(2 * x))
    assert torch.equal(after["mean"], expected.mean)  # type: ignore[arg-type]
    assert not state.buffers


@pytest.mark.usefixtures("interpreted")
def test_a_compiled_step_says_that_it_needs_one_shape() -> None:
    """And runs such a forward eagerly where possible; from a State that has the buffers it is compiled."""
    expected = by_hand(First())[-1]
    with pytest.raises(pl.CompileError, match=r"a graph has buffers of one shape|reads a number out of a tensor"):
        pl.run(fit(First(), compile=True))
    kept = next(state for event, state in fit(First()) if event is Event.BATCH_END)
    for state in (
        pl.run(fit(First(), compile="where possible", evaluators=DATA[:1])),
        pl.run(fit(kept, compile=True)),
    ):
        for held, named in ((state.params, expected.named_parameters()), (state.buffers, expected.named_buffers())):
            torch.testing.assert_close(dict(held), {name: tensor.detach() for name, tensor in named})


def test_nothing_is_altered_where_buffers_are_only_written_to() -> None:
    states = [state for _, state in problem.fit("convnet")]
    assert all(state.model is states[0].model for state in states)
    assert not states[0].model.altered
