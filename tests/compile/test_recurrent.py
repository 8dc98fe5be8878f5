"""Recurrent layers under ``compile=True``: forward and backward run eagerly, and the rest is graphs."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import record
from pure_loop.compile.refusals import recurrent_layer
from tests.support.compiling import Steps, assert_close, fit, stream
from tests.support.models import batches
from tests.support.tiers import tiers

pytestmark = pytest.mark.usefixtures("interpreted")

TWO_LAYERS = {"num_layers": 2, "dropout": 0.3, "bidirectional": True, "batch_first": True}
LAYERS = {
    "RNN": nn.RNN,
    "RNN of rectifiers": partial(nn.RNN, nonlinearity="relu"),
    "GRU": nn.GRU,
    "GRU of two layers": partial(nn.GRU, **TWO_LAYERS),
    "LSTM": nn.LSTM,
    "LSTM of two layers": partial(nn.LSTM, **TWO_LAYERS),
    "LSTM with a projection": partial(nn.LSTM, proj_size=2),
    "LSTM of float64": partial(nn.LSTM, dtype=torch.float64),
}


@pytest.mark.parametrize("name", tiers(LAYERS, ["RNN", "GRU of two layers", "LSTM of two layers"]))
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")  # torch's eager
@pytest.mark.parametrize("options", [{}, {"watch": {Event.BATCH_END}}, {"microbatch_size": 3}], ids=str)
def test_they_are_trained_as_in_eager_steps(name: str, options: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"data": batches((8, 5), 1), "evaluators": batches((8,), 2), **options}
    model = partial(Steps, LAYERS[name])
    assert_close(fit(model, compile=True, **settings), fit(model, **settings), 1e-6)


class Words(nn.Module):
    """A layer over packed sequences."""

    def __init__(self, layer: Any, steps: int = 6) -> None:
        super().__init__()
        self.layer, self.head, self.steps = layer(1, 3), nn.Linear(3, 3), steps

    def forward(self, x: Tensor) -> Tensor:
        sequence = x.repeat(1, -(-self.steps // x.shape[1]))[:, : self.steps, None]
        lengths = torch.arange(len(x)) % self.steps + 1
        packed = nn.utils.rnn.pack_padded_sequence(sequence, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.layer(packed)
        out: Tensor = self.head((last[0] if isinstance(last, tuple) else last)[0])
        return out


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_packed_sequences(layer: Any) -> None:
    model = partial(Words, layer)
    assert_close(fit(model, compile=True), fit(model), 1e-6)


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_long_sequences_take_no_longer_to_compile(layer: Any) -> None:
    begin = time.process_time()
    settings: dict[str, Any] = {"model": partial(Words, layer, 200), "data": batches((8,), 1)}
    found = fit(compile=True, **settings)
    assert time.process_time() - begin < 20  # written out, its steps alone take minutes
    assert_close(found, fit(**settings), 1e-6)


class Layer(nn.GRU):
    """A layer that is the model."""

    def __init__(self) -> None:
        super().__init__(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x[:, None].expand(-1, 5, 4))[0][:, -1]
        return out


def test_a_layer_that_is_the_model_is_named_by_its_class() -> None:
    settings: dict[str, Any] = {"model": Layer, "data": batches((8, 5), 1)}
    assert_close(fit(compile=True, **settings), fit(**settings), 1e-6)
    assert recurrent_layer(Layer()) == "Layer"


@pl.algorithm(Event.AFTER_LOSS)
def penalty(state: pl.State) -> pl.State:
    slopes = torch.autograd.grad(state.loss, list(state.params.values()), create_graph=True, allow_unused=True)
    return state.replace(loss=state.loss + sum(slope.square().sum() for slope in slopes if slope is not None))


def test_algorithms_come_where_they_come() -> None:
    """Those in the middle of a microbatch run eagerly, those around it where graphs end."""
    settings: dict[str, Any] = {
        "algorithms": [penalty, pl.algorithms.gradient_clipping("norm", 0.1), pl.algorithms.ema(half_life="2ba")],
        "data": batches((8,), 1),
    }
    model = partial(Steps, nn.GRU)
    assert_close(fit(model, compile=True, **settings), fit(model, **settings), 1e-6)


def test_the_update_is_compiled() -> None:
    with record() as compilations:
        for _ in stream(partial(Steps, nn.GRU), compile=True, watch={Event.BATCH_END}):
            pass
    assert {compilation.segment for compilation in compilations} == {"update"}


def test_a_layer_that_a_function_calls_runs_eagerly_too() -> None:
    class Functional(nn.Module):
        """A layer that is no module."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.inner = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            found, _ = torch.rnn_tanh(
                x[None],
                x.new_zeros(1, len(x), 3),
                [self.weight, self.inner],
                False,
                1,
                0.0,
                self.training,
                False,
                False,
            )
            return found[0]  # type: ignore[no-any-return]

    assert_close(fit(Functional, compile=True), fit(Functional), 1e-6)


def test_cells_are_code_like_any_other() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.cell(x, self.cell(x))
            return out

    with record() as compilations:
        compiled = fit(Cell, compile=True, watch={Event.EPOCH_END})
    assert "step" in {compilation.segment for compilation in compilations}
    assert_close(compiled, fit(Cell, watch={Event.EPOCH_END}))


def test_explain_names_the_layer(capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"loss": nn.functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
    pl.explain(Steps(nn.LSTM), batches((8,), 1), max_duration="1ep", compile=True, **settings)
    text = " ".join(capsys.readouterr().out.split())
    assert "forward and backward run eagerly: layer is a recurrent layer" in text
