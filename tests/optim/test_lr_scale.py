"""``State.lr_scale``: a factor of every learning rate, and the recorded rate is the one that was used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from pure_loop.errors import AlgorithmStructureError, ArgumentError
from pure_loop.frozendict import FrozenDict
from pure_loop.loggers import InMemoryLogger
from pure_loop.testing.comparison import close, differences
from tests.support.optimizing import ELEMENTWISE

DATA = [(torch.full((2, 3), 0.1 * i), torch.ones(2, 1)) for i in range(1, 5)]
HALF = torch.tensor(0.5, dtype=torch.float64)

MAKERS: dict[str, Any] = {
    "sgd": lambda lr: pl.optim.sgd(lr=lr, momentum=0.9),
    "adamw": lambda lr: pl.optim.adamw(lr=lr),
    "lion": lambda lr: pl.optim.lion(lr=lr),
    "lamb": lambda lr: pl.optim.lamb(lr=lr),
    "from_torch": lambda lr: pl.optim.from_torch(torch.optim.RMSprop, lr=lr),
    "partition": lambda lr: pl.optim.partition(
        {"a": pl.optim.adam(lr=lr), "b": pl.optim.sgd(lr=lr)}, lambda name, tensor: "a" if "weight" in name else "b"
    ),
}


MAKERS = {**ELEMENTWISE, **MAKERS}


@pl.algorithm(Event.BATCH_CHECKPOINT)
def halve_after_two(state: pl.State) -> pl.State:
    return state.replace(lr_scale=HALF) if state.timestamp.batch == 2 else state


def stream(optimizer: Any, algorithms: Any = (), **settings: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"loss": nn.functional.mse_loss, "max_duration": "1ep", **settings}
    return pl.fit(nn.Linear(3, 1), DATA, optimizer=optimizer, algorithms=algorithms, **options)


def by_schedule(timestamp: pl.Timestamp) -> float:
    return 0.25 if timestamp.batch < 2 else 0.125


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("settings", [{}, {"watch": {Event.BATCH_END}}, {"donate": False}], ids=str)
def test_each_rate_is_multiplied(name: str, settings: dict[str, Any]) -> None:
    wanted = pl.run(stream(MAKERS[name](by_schedule), **settings))
    scaled = pl.run(stream(MAKERS[name](0.25), [halve_after_two], **settings))
    assert not differences(scaled, wanted, without=frozenset({"lr_scale"}))
    assert scaled.lr_scale == 0.5


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_compiled_steps_multiply_it(name: str) -> None:
    with interpreted():
        compiled = pl.run(stream(MAKERS[name](0.25), [halve_after_two], compile=True))
    eager = pl.run(stream(MAKERS[name](0.25), [halve_after_two]))
    assert close(compiled, eager, tolerance=1e-6) is None


def test_the_recorded_rate_is_the_one_used() -> None:
    recorded, monitored = InMemoryLogger(), InMemoryLogger()
    pl.run(stream(pl.optim.sgd(lr=0.25), [halve_after_two], loggers=[recorded]))
    monitor = pl.callbacks.LRMonitor(name="rate")
    pl.run(stream(pl.optim.sgd(lr=0.25), [halve_after_two], loggers=[monitored], callbacks=[monitor]))
    assert recorded.series("train/learning_rate")[1] == [0.25, 0.25, 0.125, 0.125]
    assert monitored.series("rate")[1] == [0.25, 0.25, 0.125, 0.125]


def test_an_optimizer_that_reads_its_own_rate_is_refused() -> None:
    def update(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
        return FrozenDict({name: tensor - 0.1 * grads[name] for name, tensor in params.items()}), opt_state

    own = pl.optim.Optimizer(name="own", init=lambda params: FrozenDict(), update=update, lr=lambda timestamp: 0.1)
    with pytest.raises(ArgumentError, match=r"optimizer 'own' .*pl\.optim\.rate_at.*takes_lr_scale=True"):
        pl.run(stream(own, [halve_after_two]))


@pytest.mark.parametrize("event", [Event.BATCH_END, Event.AFTER_TRAIN_BATCH, Event.BEFORE_TRAIN_BATCH, Event.EVAL_END])
def test_where_it_would_not_be_the_recorded_one_it_is_refused(event: Event) -> None:
    algorithm = pl.Algorithm("halving", {event: lambda state: state.replace(lr_scale=HALF)})
    with pytest.raises(AlgorithmStructureError, match=rf"at {event.name} changed lr_scale, .*BATCH_CHECKPOINT"):
        pl.run(stream(pl.optim.sgd(lr=0.1), [algorithm], evaluators={"val": DATA[:1]}))


@pytest.mark.parametrize("value", [0.5, torch.ones(2), torch.tensor(1)], ids=repr)
def test_it_is_a_tensor_of_one_number(value: Any) -> None:
    algorithm = pl.Algorithm("halving", {Event.BATCH_START: lambda state: state.replace(lr_scale=value)})
    with pytest.raises(AlgorithmStructureError, match=r"lr_scale to .*torch\.tensor\(0\.5, dtype=torch\.float64\)"):
        pl.run(stream(pl.optim.sgd(lr=0.1), [algorithm]))


def test_a_factor_that_makes_no_rate() -> None:
    algorithm = pl.Algorithm("halving", {Event.BATCH_START: lambda state: state.replace(lr_scale=-HALF)})
    with pytest.raises(ArgumentError, match=r"lr_scale=-0\.5 makes it -0\.05"):
        pl.run(stream(pl.optim.sgd(lr=0.1), [algorithm]))


def test_a_checkpoint_holds_it(tmp_path: Any) -> None:
    end = pl.run(stream(pl.optim.sgd(lr=0.1), [halve_after_two]))
    pl.save(end, tmp_path / "end.safetensors")
    loaded = pl.load(tmp_path / "end.safetensors", model=nn.Linear(3, 1))
    assert not differences(loaded, end)
