"""Law 9 for ``compile=``: the States at the events that are yielded are those of eager steps.

These run the graphs operation by operation, which is quick and shows what is in them; test_inductor goes
through the compiler itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import ema, gradient_clipping, sam
from pure_loop.compile import record
from pure_loop.frozendict import FrozenDict
from pure_loop.stages.ownership import Ownership
from tests.support.compiling import (
    BATCHES,
    MICROBATCHES,
    WITH_NAN,
    Attention,
    Named,
    Parts,
    Recurrent,
    Sometimes,
    Unused,
    assert_close,
    every_third,
    fit,
    mlp,
    named_batches,
    several,
)
from tests.support.models import FEATURES, Tied, batches, plain
from tests.support.tiers import tiers

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps a State, so that memory is reused."""
    monkeypatch.setattr(Ownership, "writable_or_copies", lambda self, tensors, are_private: tensors)


TWO_LAYERS = {"num_layers": 2, "dropout": 0.3, "bidirectional": True, "batch_first": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "options"),
    tiers(
        itertools.product([nn.RNN, nn.GRU, nn.LSTM], [{}, TWO_LAYERS]),
        [(nn.RNN, {}), (nn.GRU, {}), (nn.LSTM, {})],
    ),
    ids=str,
)
@pytest.mark.parametrize("watch", tiers([{Event.EPOCH_END, Event.EVAL_END}, None], [None]), ids=["epochs", "all"])
def test_recurrent_layers(layer: type[nn.RNNBase], options: Any, watch: Any) -> None:
    settings: dict[str, Any] = {"data": batches((8, 5), 1), "evaluators": batches((8,), 2), "watch": watch}
    model = partial(Recurrent, layer, **options)
    assert_close(fit(model, compile=True, **settings), fit(model, **settings))


@pl.algorithm(Event.AFTER_LOSS)
def by_the_last_evaluation(state: pl.State) -> pl.State:
    measured = state.metrics.get("eval")
    return state if measured is None else state.replace(loss=state.loss * (1 + measured["loss"]))


def signs(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
    size = 0.01 * (1 - timestamp.elapsed)
    return FrozenDict({name: p - size * grads[name].sign() for name, p in params.items()}), opt_state


SIGNS = pl.optim.Optimizer(name="signs", init=lambda params: FrozenDict(), update=signs, lr=lambda timestamp: 0.01)

PARTITION = pl.optim.partition(
    {"first": pl.optim.adamw(lr=1e-2), "rest": pl.optim.sgd(lr=0.1)},
    lambda name, tensor: "first" if name.startswith("0") else "rest",
)

CASES: dict[str, dict[str, Any]] = {
    "dropout, BatchNorm, a ragged batch, a schedule": {},
    "seen at BATCH_END": {"watch": BATCHES},
    "microbatches": {**MICROBATCHES, "watch": BATCHES},
    "AFTER_TRAIN_BATCH": {"watch": {Event.AFTER_TRAIN_BATCH}, "algorithms": several()},
    "BATCH_START": {"watch": {Event.BATCH_START}, "algorithms": several()},
    "AFTER_BACKWARD": {"watch": {Event.AFTER_BACKWARD, *BATCHES}, **MICROBATCHES, "algorithms": several()},
    "algorithms": {"algorithms": several(), "clip_grad": 0.5, "watch": BATCHES},
    "algorithms inside": {"algorithms": several(), "clip_grad": 0.5},
    "SAM": {"algorithms": [sam(0.05, interval=2)], "watch": BATCHES},
    "tied and frozen": {"model": Tied, "watch": BATCHES},
    "a dict of losses": {"loss": Parts(), "watch": BATCHES},
    "mappings and integers": {"model": Named, "data": named_batches(), "loss": None, "watch": BATCHES},
    "SGD": {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)},
    "Nesterov": {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9, nesterov=True, maximize=True)},
    "AMSGrad": {"optimizer": pl.optim.adam(lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=True)},
    "a partition": {"optimizer": PARTITION},
    "an optimizer of one's own": {"model": plain, "optimizer": SIGNS},
    "a parameter without a gradient": {"model": Unused, "watch": BATCHES},
    "parameters with a gradient now and then": {
        "model": Sometimes,
        "data": batches((8, 5, 5, 8, 5), 1),
        "optimizer": pl.optim.adam(lr=1e-2, amsgrad=True),
    },
    "attention": {"model": Attention, "optimizer": pl.optim.sgd(lr=0.1), "watch": BATCHES},
    "results of evaluations": {
        "model": plain,
        "algorithms": [by_the_last_evaluation],
        "evaluators": batches((8,), 2),
        "eval_interval": "1ba",
    },
    "skipping": {"nonfinite": "skip", "data": WITH_NAN, "watch": BATCHES},
    "evaluation": {"evaluators": batches((8, 5), 2), "eval_interval": "2ba", "watch": {Event.EVAL_END}},
}


QUICK = (
    "AFTER_BACKWARD",
    "algorithms inside",
    "parameters with a gradient now and then",
    "tied and frozen",
    "skipping",
)


@pytest.mark.parametrize("name", tiers(CASES, QUICK))
def test_the_same_states_at_what_is_yielded(name: str) -> None:
    assert_close(fit(compile=True, **CASES[name]), fit(**CASES[name]))


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("name", tiers(["algorithms inside", "SAM", "Nesterov"], ["algorithms inside"]))
def test_in_its_own_memory(name: str) -> None:
    settings = CASES[name] | {"watch": {Event.FIT_END}}
    assert_close(fit(compile=True, **settings), fit(**settings))


@pytest.mark.parametrize("precision", ["amp_bf16", pytest.param("amp_fp16", marks=pytest.mark.thorough)])
def test_mixed_precision(precision: str) -> None:
    settings: dict[str, Any] = {"model": plain, "precision": precision, "watch": BATCHES}
    assert_close(fit(compile=True, **settings), fit(**settings), 2e-2)


def test_exact_arithmetic_is_exact() -> None:
    def whole() -> nn.Module:
        module = nn.Linear(FEATURES, 1).double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(2.0)
        return module

    data = [(x.double().round(), x.double().round().sum(dim=1, keepdim=True)) for x, _ in batches((8, 8), 1)]
    settings: dict[str, Any] = {
        "model": whole,
        "data": data,
        "loss": mse_loss,
        "optimizer": pl.optim.sgd(lr=0.125),
        "max_duration": "2ba",
        "microbatch_size": 4,
        "watch": BATCHES,
    }
    assert_close(fit(compile=True, **settings), fit(**settings), 0.0)


@pytest.mark.slow
def test_going_on_from_a_state() -> None:
    whole = fit(compile=True, watch=BATCHES, max_duration="3ep", algorithms=several())
    kept = next(state for _, state in whole if state.timestamp.batch == 4)
    data = batches((8, 8, 5), 1)
    rest = list(
        pl.fit(
            kept,
            data,
            loss=cross_entropy,
            optimizer=pl.optim.adamw(lr=pl.schedules.linear(1e-2, 1e-3, "2ep")),
            max_duration="3ep",
            watch=BATCHES,
            compile=True,
            algorithms=several(),
        )
    )
    assert_close(rest, [pair for pair in whole if pair[1].timestamp.batch > 4], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.thorough), 3, 8])
def test_several_steps_a_call(steps: int) -> None:
    settings: dict[str, Any] = {
        "data": batches((8, 8, 8, 8, 5), 1),
        "max_duration": "13ba",
        "evaluators": batches((8,), 2),
        "eval_interval": "4ba",
        "algorithms": [ema(half_life="4ba"), every_third],
        "watch": {Event.EPOCH_END, Event.EVAL_END, Event.FIT_END},
    }
    assert_close(fit(compile=True, steps_per_call=steps, **settings), fit(**settings))


def test_evaluation_and_prediction_by_themselves() -> None:
    module, data = mlp(), batches((8, 5), 2)

    def both(compile: bool) -> Iterator[Any]:
        yield from pl.evaluate(module, data, loss=cross_entropy, compile=compile)
        yield from pl.predict(module, data, compile=compile)

    assert_close(list(both(True)), list(both(False)))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithms", "updates"), [([], 1), ([gradient_clipping("norm", 1.0)], 2)])
@pytest.mark.parametrize("watch", [{Event.AFTER_TRAIN_BATCH, *BATCHES}, {Event.AFTER_BACKWARD}])
def test_a_batch_of_another_size_needs_another_update_where_an_algorithm_could_look(
    watch: Any, algorithms: list[Any], updates: int
) -> None:
    wanted = fit(watch=watch, algorithms=algorithms)
    with record() as graphs:
        assert_close(fit(watch=watch, algorithms=algorithms, compile=True), wanted)
    looked_at = {Event.AFTER_TRAIN_BATCH} & watch  # then the algorithm runs before the graph
    assert [graph.segment for graph in graphs].count("update") == (1 if looked_at else updates)


@pytest.mark.slow
@pytest.mark.parametrize("watch", [BATCHES, {Event.AFTER_LOSS, *BATCHES}], ids=["whole", "in pieces"])
def test_an_autocast_around_the_loop_is_no_matter(watch: Any) -> None:
    wanted = fit(model=plain, watch=watch)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(fit(model=plain, watch=watch, compile=True), wanted)
