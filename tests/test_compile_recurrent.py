"""Recurrent layers in graphs: a few steps of a long sequence at a time, or a kernel for all of them."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import recurrent, repeated
from tests.compiling import Steps, assert_close, fit, stream
from tests.models import batches
from tests.tiers import tiers

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.slow]

EPOCHS = {Event.EPOCH_END, Event.EVAL_END}

TWO_LAYERS = {"num_layers": 2, "dropout": 0.3, "bidirectional": True, "batch_first": True}
LAYERS = {
    **{
        f"{cls.__name__} {name}": partial(cls, **options)
        for cls, (name, options) in itertools.product(
            (nn.RNN, nn.GRU, nn.LSTM),
            {"alone": {}, "of two layers": TWO_LAYERS, "without biases": {"bias": False}}.items(),
        )
    },
    "RNN of rectifiers": partial(nn.RNN, nonlinearity="relu"),
    "LSTM with a projection": partial(nn.LSTM, proj_size=2),
    "LSTM of float64": partial(nn.LSTM, dtype=torch.float64),
}
QUICK = ["RNN alone", "GRU alone", "LSTM of two layers", "LSTM without biases", "LSTM of float64"]


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "WRITTEN_OUT", 1)
    monkeypatch.setattr(recurrent, "AT_ONCE", range(2, 3))


@pytest.mark.parametrize("name", tiers(LAYERS, QUICK))
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")  # torch's eager
@pytest.mark.parametrize("watch", tiers([EPOCHS, None], [EPOCHS]), ids=["epochs", "all"])
def test_they_are_trained_as_in_eager_steps(name: str, watch: Any) -> None:
    settings: dict[str, Any] = {"data": batches((8, 5), 1), "evaluators": batches((8,), 2), "watch": watch}
    model = partial(Steps, LAYERS[name])
    assert_close(fit(model, compile=True, **settings), fit(model, **settings))


def has_lstm_of_halves() -> bool:
    """Whether torch can train one on this processor: its kernel needs instructions that not every one has."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(1, 1)(torch.ones(1, 1, 1))
    except RuntimeError:
        return False
    return True


WITHOUT_KERNEL = pytest.mark.skipif(not has_lstm_of_halves(), reason="this processor has no LSTM of bfloat16")


@pytest.mark.parametrize(
    "layer",
    [
        nn.GRU,
        pytest.param(nn.LSTM, marks=[pytest.mark.thorough, WITHOUT_KERNEL]),
        pytest.param(nn.RNN, marks=pytest.mark.thorough),
    ],
)
def test_they_are_trained_in_mixed_precision(layer: Any) -> None:
    settings: dict[str, Any] = {"data": batches((8,), 1), "precision": "amp_bf16"}
    assert_close(fit(partial(Steps, layer), compile=True, **settings), fit(partial(Steps, layer), **settings), 2e-2)


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_a_frozen_layer_hands_gradients_on(layer: Any) -> None:
    def frozen() -> nn.Module:
        model = Steps(layer)
        model.layer.requires_grad_(False)
        return model

    assert_close(fit(frozen, compile=True), fit(frozen))


class Checkpointed(Steps):
    """Goes through its layer once more in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


@pytest.mark.parametrize("layer", tiers([nn.GRU, nn.LSTM, nn.RNN], [nn.RNN]))
def test_they_may_be_gone_through_again(layer: Any) -> None:
    settings: dict[str, Any] = {"model": partial(Checkpointed, layer), "data": batches((8,), 1)}
    assert_close(fit(compile=True, **settings), fit(**settings))


def test_code_is_let_go_of_with_the_stream() -> None:
    gc.collect()
    before = set(repeated._halves)
    running = stream(partial(Steps, nn.GRU), compile=True)
    seen = [len(repeated._halves) for _ in running]
    assert max(seen) == len(before) + 2 * 2  # batches of eight and of five; each with its backward
    del running
    gc.collect()
    assert set(repeated._halves) == before


def test_a_graph_that_was_kept_outlives_its_stream() -> None:
    def kept(**options: Any) -> Any:
        running = stream(partial(Steps, nn.GRU), watch={Event.AFTER_LOSS}, **options)
        _, state = next(running)
        running.close()
        return state

    compiled, eager = kept(compile=True), kept()
    gc.collect()
    fit(partial(Steps, nn.LSTM), compile=True, max_duration="1ba")  # in the place of what was let go of
    other = stream(partial(Steps, nn.RNN), compile=True, watch={Event.BATCH_END})
    next(other)
    for state in (compiled, eager):
        state.loss.backward()
    for name, leaf in compiled.params.items():
        torch.testing.assert_close(leaf.grad, eager.params[name].grad)
    other.close()


@pl.algorithm(Event.AFTER_LOSS)
def penalty(state: pl.State) -> pl.State:
    slopes = torch.autograd.grad(state.loss, list(state.params.values()), create_graph=True, allow_unused=True)
    return state.replace(loss=state.loss + sum(each.square().sum() for each in slopes if each is not None))


class FromItself(nn.Module):
    """A layer that begins with what it is given, twice, and whose weights are one tensor."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(4, 21), layer(3, 3)
        self.layer.weight_ih_l0 = self.layer.weight_hh_l0

    def forward(self, x: Tensor) -> Tensor:
        sequence = self.before(x).reshape(7, len(x), 3)
        begin = sequence[:1].tanh()
        states, _ = self.layer(sequence, (begin, begin) if isinstance(self.layer, nn.LSTM) else begin)
        out: Tensor = states.mean(0)
        return out


@pytest.mark.parametrize("model", [Steps, FromItself])
@pytest.mark.parametrize("layer", tiers([nn.GRU, nn.LSTM, nn.RNN], [nn.LSTM]))
def test_second_derivatives_are_those_of_eager_steps(layer: Any, model: Any) -> None:
    settings: dict[str, Any] = {"algorithms": [penalty], "data": batches((8,), 1)}
    assert_close(fit(partial(model, layer), compile=True, **settings), fit(partial(model, layer), **settings), 1e-5)


@pytest.mark.thorough
def test_second_derivatives_in_mixed_precision() -> None:
    settings: dict[str, Any] = {"algorithms": [penalty], "data": batches((8,), 1), "precision": "amp_bf16"}
    assert_close(fit(partial(Steps, nn.GRU), compile=True, **settings), fit(partial(Steps, nn.GRU), **settings), 2e-2)


def test_what_an_operation_gives_has_memory_of_its_own() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    half = repeated._Half([tensor, tensor], lambda given: [given[0], given[0].t()])
    same, turned = half([tensor])
    assert len({each.untyped_storage().data_ptr() for each in (tensor, same, turned)}) == 3
    assert torch.equal(turned, tensor.t())
    assert turned.is_contiguous()
