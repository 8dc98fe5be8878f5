"""Forwards and losses that differentiate, in evaluation and prediction: forces, and equations as losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop.distributed import Parallel
from pure_loop.testing.ranks import shared_pool


class Potential(nn.Module):
    """Forces at positions: minus the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        total = self.energy(positions).sum()
        return -torch.autograd.grad(total, positions, create_graph=self.training)[0]


class Wave(nn.Module):
    """u(x), of which a loss wants the derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()
        return {"x": x, "u": self.layers(x)}


def equation(outputs: dict[str, Tensor], batch: Any) -> Tensor:
    """u' = -u."""
    slope = torch.autograd.grad(outputs["u"].sum(), outputs["x"], create_graph=True)[0]
    return (slope + outputs["u"]).square().mean()


def model(cls: type[nn.Module] = Potential) -> Any:
    torch.manual_seed(0)
    return cls().double()


def forces() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(2, 2, 5, 3, dtype=torch.float64, generator=generator)
    return [(x, y) for x, y in numbers]


def points() -> list[tuple[Tensor, None]]:
    return [(x[:, :1], None) for x, _ in forces()]


def by_hand(module: nn.Module, x: Tensor) -> Tensor:
    """The gradient of w2 tanh(w1 x + b1) + b2, written out."""
    first, _, last = module.energy  # type: ignore[union-attr, misc]
    inner = torch.tanh(first(x))
    return (-((1 - inner.square()) * last.weight) @ first.weight).detach()


WANTED = torch.stack([mse_loss(by_hand(model(), x), y) for x, y in forces()]).mean()
COMPILED = [False, True]

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("compile", COMPILED)
@pytest.mark.parametrize("size", [None, 2])
def test_an_evaluator_may_ask_for_gradients(size: int | None, compile: bool) -> None:
    evaluator = pl.Evaluator(forces(), microbatch_size=size, gradients=True)
    seen = list(pl.evaluate(model(), {"test": evaluator}, loss=mse_loss, compile=compile))
    torch.testing.assert_close(seen[-1][1].metrics["test"]["loss"], WANTED)
    outputs = [state.outputs for event, state in seen if event is Event.EVAL_BATCH_END]
    assert not any(each.requires_grad for each in outputs)


@pytest.mark.parametrize("compile", COMPILED)
@pytest.mark.parametrize("options", [{}, {"strict": True}, {"watch": {Event.EVAL_END}}], ids=["", "strict", "watched"])
def test_an_evaluator_of_fit_may(options: Any, compile: bool) -> None:
    measured = [
        state.metrics["val"]["loss"]
        for event, state in pl.fit(
            model(), forces(), loss=mse_loss, optimizer=pl.optim.sgd(lr=0.0), max_duration="1ep", compile=compile,
            evaluators={"val": pl.Evaluator(forces(), gradients=True)}, **options,
        )
        if event is Event.EVAL_END
    ]  # fmt: skip
    torch.testing.assert_close(measured, [WANTED])


@pytest.mark.parametrize("compile", COMPILED)
def test_the_loss_may_differentiate(compile: bool) -> None:
    task = pl.Task(loss=equation)
    wanted = torch.stack([equation(model(Wave)(x), None) for x, _ in points()]).mean().detach()
    evaluator = pl.Evaluator(points(), gradients=True)
    state = pl.run(pl.evaluate(model(Wave), evaluator, task=task, compile=compile))
    torch.testing.assert_close(state.metrics["eval"]["loss"], wanted)
    assert not state.metrics["eval"]["loss"].requires_grad


@pytest.mark.parametrize("compile", COMPILED)
def test_a_prediction_may_ask_for_gradients(compile: bool) -> None:
    stream = pl.predict(model(), forces(), gradients=True, compile=compile)
    for event in (Event.PREDICT_AFTER_FORWARD, Event.PREDICT_BATCH_END):
        outputs = [state.outputs for at, state in pl.predict(model(), forces(), gradients=True) if at is event]
        torch.testing.assert_close(outputs, [by_hand(model(), x) for x, _ in forces()])
        assert not any(each.requires_grad for each in outputs)
    assert len(list(stream)) == 10


@pytest.mark.parametrize("compile", COMPILED)
@pytest.mark.parametrize("which", ["evaluate", "fit", "predict", "loss"])
def test_without_the_error_says_what_to_write(which: str, compile: bool) -> None:
    """Torch's own is about an element of tensors."""
    stream: Any
    if which == "evaluate":
        stream = pl.evaluate(model(), forces(), loss=mse_loss, compile=compile)
    elif which == "loss":
        stream = pl.evaluate(model(Wave), points(), task=pl.Task(loss=equation), compile=compile)
    elif which == "predict":
        stream = pl.predict(model(), forces(), compile=compile)
    else:
        stream = pl.fit(
            model(), forces(), loss=mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep", compile=compile,
            evaluators=forces(),
        )  # fmt: skip
    what = "loss" if which == "loss" else "forward"
    with pytest.raises(pl.ModelError, match=rf"the {what} differentiates .*pl\.Evaluator\(data, gradients=True\)"):
        pl.run(stream)


def test_in_inference_mode_the_error_names_that() -> None:
    with torch.inference_mode(), pytest.raises(pl.ModelError, match=r"outside of torch\.inference_mode"):
        pl.run(pl.evaluate(model(), pl.Evaluator(forces(), gradients=True), loss=mse_loss))


def test_other_errors_of_a_forward_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pl.run(pl.predict(model(), points()))


def test_gradients_is_a_bool() -> None:
    with pytest.raises(pl.ArgumentTypeError, match=r"Evaluator: gradients must be True or False, got 'yes'"):
        pl.Evaluator(forces(), gradients="yes")  # type: ignore[arg-type]
    with pytest.raises(pl.ArgumentTypeError, match=r"pl.predict: gradients must be True or False, got 1"):
        pl.predict(model(), forces(), gradients=1)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_ranks_may(kind: Any) -> None:
    def program(rank: int) -> tuple[Tensor, list[Tensor]]:
        parallel = Parallel(kind=kind)
        evaluator = pl.Evaluator(forces(), gradients=True)
        state = pl.run(pl.evaluate(model(), evaluator, loss=mse_loss, parallel=parallel))
        stream = pl.predict(model(), forces(), gradients=True, parallel=parallel)
        outputs = [state.outputs for event, state in stream if event is Event.PREDICT_BATCH_END]
        return state.metrics["eval"]["loss"], outputs

    first, second = shared_pool(2, checked=False).run(program)
    for loss, _ in (first, second):
        torch.testing.assert_close(loss, WANTED)
    outputs = [torch.cat(both) for both in zip(first[1], second[1], strict=True)]
    torch.testing.assert_close(outputs, [by_hand(model(), x) for x, _ in forces()])
