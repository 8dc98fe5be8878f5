"""Forwards and losses that differentiate, in evaluation and prediction; and stages that are made by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop.distributed import Parallel
from pure_loop.errors import ArgumentError, ArgumentTypeError, ModelError
from pure_loop.random import seeded
from pure_loop.testing.ranks import shared_pool
from tests.support.refused import Refusal, check, rows


class Net(nn.Module):
    """Minus the gradient of an energy at positions; or u(x), of which a loss wants the derivative."""

    def __init__(self, waves: bool = False) -> None:
        super().__init__()
        with seeded(0):
            self.layers = nn.Sequential(nn.Linear(1 if waves else 3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.waves = waves

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        if self.waves:
            return {"x": x, "u": self.layers(x)}
        return -torch.autograd.grad(self.layers(x).sum(), x, create_graph=self.training)[0]


def equation(outputs: dict[str, Tensor], batch: Any) -> Tensor:
    """u' = -u."""
    slope = torch.autograd.grad(outputs["u"].sum(), outputs["x"], create_graph=True)[0]
    return (slope + outputs["u"]).square().mean()


_NUMBERS = torch.randn(2, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
FORCES = [(x, y) for x, y in _NUMBERS]
POINTS = [(x[:, :1], None) for x, _ in FORCES]


def by_hand(x: Tensor) -> Tensor:
    """The gradient of w2 tanh(w1 x + b1) + b2, written out."""
    first, _, last = Net().layers
    return (-((1 - torch.tanh(first(x)).square()) * last.weight) @ first.weight).detach()


OUTPUTS = [by_hand(x) for x, _ in FORCES]
WANTED = torch.stack([mse_loss(out, y) for out, (_, y) in zip(OUTPUTS, FORCES, strict=True)]).mean()
TASK = pl.Task(loss=equation)

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("compile", [False, True])
def test_evaluations_and_predictions_may_ask_for_gradients(compile: bool) -> None:
    """Their results have none. An evaluator of ``fit`` may, too."""
    for size in (None, 2):
        evaluator = pl.Evaluator(FORCES, microbatch_size=size, gradients=True)
        seen = list(pl.evaluate(Net(), {"test": evaluator}, loss=mse_loss, compile=compile))
        torch.testing.assert_close(seen[-1][1].metrics["test"]["loss"], WANTED)
        assert not any(state.outputs.requires_grad for event, state in seen if event is Event.EVAL_BATCH_END)
    wanted = torch.stack([equation(Net(waves=True)(x), None) for x, _ in POINTS]).mean().detach()
    state = pl.run(pl.evaluate(Net(waves=True), pl.Evaluator(POINTS, gradients=True), loss=TASK, compile=compile))
    torch.testing.assert_close(state.metrics["eval"]["loss"], wanted)
    assert not state.metrics["eval"]["loss"].requires_grad
    pairs = list(pl.predict(Net(), FORCES, gradients=True, compile=compile))
    for event in (Event.PREDICT_AFTER_FORWARD, Event.PREDICT_BATCH_END):
        outputs = [state.outputs for at, state in pairs if at is event]
        assert len(outputs) in ((0, 2) if compile else (2,))
        torch.testing.assert_close(outputs, OUTPUTS[: len(outputs)])
        assert not any(each.requires_grad for each in outputs)
    for options in ({"watch": {Event.EVAL_END}},) if compile else ({}, {"strict": True}, {"watch": {Event.EVAL_END}}):
        settings = {**FIT, "optimizer": pl.optim.sgd(lr=0.0), "compile": compile, **options}
        stream = pl.fit(Net(), FORCES, evaluators={"val": pl.Evaluator(FORCES, gradients=True)}, **settings)
        measured = [state.metrics["val"]["loss"] for event, state in stream if event is Event.EVAL_END]
        torch.testing.assert_close(measured, [WANTED])


FIT: dict[str, Any] = {"loss": mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
DIFFERENTIATING: dict[str, tuple[str, Any]] = {
    "loss": ("loss", lambda **options: pl.evaluate(Net(waves=True), POINTS, loss=TASK, **options)),
    "predict": ("forward", lambda **options: pl.predict(Net(), FORCES, **options)),
    "evaluate": ("forward", lambda **options: pl.evaluate(Net(), FORCES, loss=mse_loss, **options)),
    "fit": ("forward", lambda **options: pl.fit(Net(), FORCES, evaluators=FORCES, **FIT, **options)),
}


@pytest.mark.parametrize("which", DIFFERENTIATING)
def test_without_the_error_says_what_to_write(which: str) -> None:
    """Torch's own is about an element of tensors."""
    what, stream = DIFFERENTIATING[which]
    for traced in (False, True) if which != "fit" else (False,):
        with pytest.raises(ModelError, match=rf"the {what} differentiates .*pl\.Evaluator\(data, gradients=True\)"):
            pl.run(stream(compile=traced))


def made(**changes: Any) -> pl.Stages:
    task = pl.Task(loss=lambda outputs, batch: mse_loss(outputs, batch[1]))
    return pl.Stages(**{"task": task, "optimizer": pl.optim.sgd(lr=0.1), **changes})


def updated(**fields: Any) -> Any:
    state = pl.State.create(nn.Linear(4, 1))
    return made().update(state.replace(opt_state=pl.optim.sgd(lr=0.1).init(state.params), **fields))


@torch.inference_mode()
def in_inference_mode() -> Any:
    return pl.run(pl.evaluate(Net(), pl.Evaluator(FORCES, gradients=True), loss=mse_loss))


_MADE: list[tuple[Any, ...]] = [
    ("task", mse_loss, "pl.Task(loss=...)", "function"),
    ("optimizer", torch.optim.SGD([torch.ones(1)], lr=0.1), "pl.optim.adamw(lr=1e-3)", "SGD"),
    ("clip_grad", -1.0, "above 0", "-1.0"),
    ("clip_grad", "x", "'x'"),
    ("nonfinite", "ignore", "skip", "'ignore'"),
    ("microbatch_size", "auto", "at least 1", "'auto'"),
    ("microbatch_size", 0, "at least 1", "0"),
    ("precision", "fp4", "amp_bf16", "'fp4'"),
]
_BOTH: Any = (ArgumentError, ArgumentTypeError)
_ONE, _YES, _BOOL = torch.tensor(1.0), {"gradients": "yes"}, "gradients must be True or False, got"


@rows(
    [
        *[Refusal(f"{n}={v!r:.9}", partial(made, **{n: v}), _BOTH, (n, *says)) for n, v, *says in _MADE],
        Refusal("no loss", updated, ArgumentError, ("state.loss is None", "stages.backward")),
        Refusal("no grads", partial(updated, loss=_ONE), ArgumentError, ("state.grads is", "s.backward")),
        Refusal("an Evaluator", partial(pl.Evaluator, FORCES, **_YES), TypeError, (f"Evaluator: {_BOOL} 'y",)),  # type: ignore[arg-type]
        Refusal("pl.predict", partial(pl.predict, Net(), FORCES, **_YES), TypeError, (f"predict: {_BOOL} 'y",)),  # type: ignore[arg-type]
        Refusal("inference mode", in_inference_mode, ModelError, ("outside of torch.inference_mode",)),
        # Other errors of a forward stay what they are.
        Refusal("shapes", lambda: pl.run(pl.predict(Net(), POINTS)), RuntimeError, ("shapes cannot be multiplied",)),
    ]
)
def test_what_is_refused(refusal: Refusal) -> None:
    check(refusal)


def test_a_precision_is_given_by_its_name() -> None:
    batch = torch.ones(2, 4), torch.zeros(2, 1)
    state = pl.State.create(nn.Linear(4, 1)).replace(batch=batch, microbatch=batch)
    assert made(precision="amp_bf16").forward(state).outputs.dtype is torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_ranks_may(kind: Any) -> None:
    """Two processes."""

    def program(rank: int) -> tuple[Tensor, list[Tensor]]:
        parallel = Parallel(kind=kind)
        evaluator = pl.Evaluator(FORCES, gradients=True)
        state = pl.run(pl.evaluate(Net(), evaluator, loss=mse_loss, parallel=parallel))
        stream = pl.predict(Net(), FORCES, gradients=True, parallel=parallel)
        outputs = [state.outputs for event, state in stream if event is Event.PREDICT_BATCH_END]
        return state.metrics["eval"]["loss"], outputs

    results = shared_pool(2, checked=False).run(program)
    for loss, _ in results:
        torch.testing.assert_close(loss, WANTED)
    parts = zip(*[outputs for _, outputs in results], strict=True)
    torch.testing.assert_close([torch.cat(both) for both in parts], OUTPUTS)
