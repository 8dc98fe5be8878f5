"""Recurrent layers in graphs: a few steps of a long sequence at a time, or a kernel for all of them."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

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
QUICK = ["RNN alone", "GRU of two layers", "LSTM of two layers", "LSTM without biases", "LSTM of float64"]


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "WRITTEN_OUT", 1)
    monkeypatch.setattr(recurrent, "AT_ONCE", range(2, 3))


@pytest.mark.parametrize("name", tiers(LAYERS, QUICK))
@pytest.mark.parametrize("watch", tiers([EPOCHS, None], [EPOCHS]), ids=["epochs", "all"])
def test_they_are_trained_as_in_eager_steps(name: str, watch: Any) -> None:
    settings: dict[str, Any] = {"data": batches((8, 5), 1), "evaluators": batches((8,), 2), "watch": watch}
    model = partial(Steps, LAYERS[name])
    assert_close(fit(model, compile=True, **settings), fit(model, **settings))


@pytest.mark.parametrize("layer", tiers([nn.GRU, nn.LSTM, nn.RNN], [nn.GRU]))
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


def test_a_second_derivative_is_refused_by_name() -> None:
    @pl.algorithm(Event.AFTER_LOSS)
    def penalty(state: pl.State) -> pl.State:
        wanted = [state.params["before.weight"]]
        (gradient,) = torch.autograd.grad(state.loss, wanted, create_graph=True)
        return state.replace(loss=state.loss + gradient.square().sum())

    with pytest.raises(pl.errors.CompileError, match=r"recurrent layer over a long sequence .* create_graph=True"):
        list(fit(partial(Steps, nn.GRU), compile=True, algorithms=[penalty]))


def test_what_an_operation_gives_has_memory_of_its_own() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    half = repeated._Half([tensor, tensor], lambda given: [given[0], given[0].t()])
    same, turned = half([tensor])
    assert len({each.untyped_storage().data_ptr() for each in (tensor, same, turned)}) == 3
    assert torch.equal(turned, tensor.t())
    assert turned.is_contiguous()
