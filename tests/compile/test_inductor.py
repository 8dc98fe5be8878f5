"""Compiled steps through the compiler itself, and that nothing imports it before it is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import _torch, record
from pure_loop.errors import NonFiniteError
from tests.support.compiling import assert_close, fit, several
from tests.support.models import CLASSES, FEATURES, batches, plain


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


@pytest.mark.thorough
def test_compiled_steps() -> None:
    settings: dict[str, Any] = {
        "data": batches((8, 8), 1),
        "algorithms": several(),
        "evaluators": batches((8,), 2),
        "watch": {Event.EPOCH_END, Event.EVAL_END},
    }
    with record() as made:
        compiled = fit(compile=True, **settings)
    assert_close(compiled, fit(**settings), 1e-5)
    assert all(each.seconds > 0 and each.operations > 10 for each in made)


@pytest.mark.thorough
def test_a_compiler_that_forgets_factors() -> None:
    # torch 2.13 merges `a + 0.01 * b` with a matrix product, and leaves out the 0.01.
    settings: dict[str, Any] = {
        "model": plain,
        "data": batches((8, 8), 1),
        "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9, weight_decay=0.01),
        "watch": {Event.FIT_END},
    }
    assert_close(fit(compile=True, **settings), fit(**settings), 1e-5)


class Images(nn.Module):
    """Pixels come last where the compiler likes it, and what a forward keeps is laid out as it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 4, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out: Tensor = self.head(self.features(x.reshape(-1, 1, 4, 4)))
        return out, out * torch.ones_like(out), out.detach(), out[:, :2]  # which the compiler may give as one tensor


def of_all(outputs: tuple[Tensor, Tensor, Tensor, Tensor], targets: Tensor) -> dict[str, Tensor]:
    out, again, target, part = outputs
    loss = cross_entropy(out, targets) + (out.exp() - target).square().mean() + part.square().sum() + again.exp().mean()
    return {"total": loss, "shown": loss.detach()}


@pl.algorithm(Event.AFTER_FORWARD)
def summed(state: pl.State) -> pl.State:
    """The gradient by one of the outputs is one number, seen in each place."""
    out, again, target, part = state.outputs
    return state.replace(outputs=(out, again.sum(0), target, part))


@pytest.mark.slow
def test_a_forward_that_is_observed() -> None:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 16, generator=generator), torch.arange(8) % CLASSES) for _ in range(2)]
    settings: dict[str, Any] = {"model": Images, "loss": of_all, "data": data, "max_duration": "2ba"}
    settings |= {"watch": {Event.AFTER_FORWARD, Event.AFTER_LOSS}, "algorithms": [summed]}
    with record() as made:
        compiled = fit(compile=True, **settings)
    assert_close(compiled, fit(**settings), 1e-5)
    assert [each.segment for each in made] == ["forward", "BEFORE_LOSS to loss", "update"]


class Twins(nn.Module):
    """Gives the same twice, once without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, CLASSES), nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.one(x)
        return {"out": out, "more": self.two(out), "target": out.detach() * torch.ones(out.shape)}


def of_twins(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return cross_entropy(outputs["out"], targets) + (outputs["more"].exp() * outputs["target"]).mean()


@pytest.mark.thorough
def test_a_compiler_that_gives_two_outputs_as_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.13 does with this setting, which is off for other reasons.
    monkeypatch.setitem(_torch._SETTINGS, "joint_graph_constant_folding", True)
    settings: dict[str, Any] = {"model": Twins, "loss": of_twins, "watch": {Event.AFTER_FORWARD, Event.BATCH_END}}
    settings |= {"data": batches((8,), 1), "optimizer": pl.optim.sgd(lr=0.05)}
    assert_close(fit(compile=True, **settings), fit(**settings), 1e-5)


class Showing(nn.Module):
    """Gives its weights, and a view of one of them, with what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x), self.layer.weight, self.layer.bias[1:]


def rows(state: pl.State) -> dict[str, Tensor]:
    first = torch.arange(12.0).reshape(4, 3)
    names = ("first", "second", "third", "x", "y", "copied", "moved", "times_one")
    return {name: first + number for number, name in enumerate(names)}


@pl.algorithm(Event.AFTER_LOSS, init=rows)
def rotated(state: pl.State) -> pl.State:
    """Each tensor takes another one's place, one of them with two rows put in; all are shown as they were."""
    old = state.algorithm_state["rotated"]
    put = old["x"].index_put((torch.tensor([1]),), old["first"][0])
    put = put.index_put((torch.tensor([2]),), old["first"][3])
    new = {"first": old["second"], "second": old["third"], "third": old["first"], "x": old["y"], "y": put}
    copied = torch.empty_like(old["copied"])
    copied[:] = old["copied"]
    copied[torch.tensor([1])] = 7.0
    new |= {"copied": old["moved"], "moved": copied, "times_one": old["times_one"] + 1}
    shown = (torch.ones(12) * old["times_one"].view(-1)).view(4, 3)
    number = torch.zeros(()) + state.timestamp.batch
    return state.remember("rotated", new).replace(outputs=(*state.outputs, *old.values(), shown, number))


@pytest.mark.slow
@pytest.mark.parametrize("watch", [{Event.EPOCH_END}, {Event.BATCH_END}], ids=["not shown", "shown"])
def test_memory_that_is_overwritten_with_what_was_elsewhere(watch: set[Event]) -> None:
    # torch 2.13 takes copies of what a graph writes to out of it, and computes in the place of what is overwritten.
    def loss(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        return cross_entropy(outputs[0], targets) + 0.01 * outputs[1].square().sum()

    settings: dict[str, Any] = {"model": Showing, "loss": loss, "algorithms": [rotated], "data": batches((8, 8), 1)}
    assert_close(fit(compile=True, watch=watch, **settings), fit(watch=watch, **settings), 1e-5)


@pl.algorithm(Event.BATCH_END, init=lambda state: {"now": torch.arange(3) * 1j, "was": torch.zeros(3) * 1j})
def complex_memory(state: pl.State) -> pl.State:
    old = state.algorithm_state["complex_memory"]
    return state.remember("complex_memory", {"now": old["now"] + 1, "was": old["now"]})


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_complex_memory_that_moves() -> None:
    settings: dict[str, Any] = {"model": plain, "algorithms": [complex_memory], "data": batches((8, 8), 1)}
    found, wanted = (fit(compile=each, **settings)[-1][1].algorithm_state for each in (True, False))
    for name, tensor in wanted["complex_memory"].items():
        torch.testing.assert_close(found["complex_memory"][name], tensor)


@pytest.mark.thorough
def test_a_compiler_that_believes_in_zero() -> None:
    with pytest.raises(NonFiniteError, match=r"batch 0 .*optimizer's step"):
        fit(plain, compile=True, optimizer=pl.optim.sgd(lr=1e38), loss=lambda o, t: 1e10 * cross_entropy(o, t))


@pytest.mark.slow
def test_a_bias_is_added_by_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by a product."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    settings: dict[str, Any] = {"model": plain, "data": batches((8, 8), 1), "watch": {Event.FIT_END}}
    assert_close(fit(compile=True, **settings), fit(**settings), 1e-5)
    made = "".join(path.read_text() for path in tmp_path.rglob("*.py"))
    assert "mm_out(" in made
    assert "addmm_out(" not in made


class Kernel(nn.Module):
    """It has a constant, which code is given beside its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        kernel = torch.tensor([[float(i * j % 7) for i in range(CLASSES)] for j in range(CLASSES)])
        out: Tensor = self.head(x) @ kernel
        return out


@pytest.mark.slow
def test_a_constant_of_a_forward() -> None:
    settings: dict[str, Any] = {"model": Kernel, "data": batches((8, 8), 1), "watch": {Event.FIT_END}}
    assert_close(fit(compile=True, **settings), fit(**settings), 1e-4)


def test_importing_pure_loop_imports_no_compiler() -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch; before = set(sys.modules); import pure_loop; new = set(sys.modules) - before; "
        "compilers = ('pure_loop.compile', 'torch._inductor', 'torch._dynamo', 'torch.fx'); "
        "bad = [name for name in new if name.startswith(compilers)]; "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
