"""ActivationMonitor against activations that are computed by hand, and against those of the training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop.callbacks import ActivationMonitor
from pure_loop.callbacks.activation_monitor import STATISTICS
from pure_loop.loggers import InMemoryLogger
from tests.support.runs import cross_entropy, equal, mlp, points, train

ALL = ("norm", "mean", "kurtosis", "max", "zeros")
DATA = points(batches=3, size=6)


def measured(model: nn.Module, monitor: ActivationMonitor, **options: Any) -> InMemoryLogger:
    logger = InMemoryLogger()
    train(model, options.pop("data", DATA), callbacks=[monitor], loggers=[logger], max_duration="1ep", **options)
    return logger


def test_statistics_are_their_formulas() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    found = {name: float(function(values)) for name, function in STATISTICS.items()}
    assert found == pytest.approx({"norm": 30**0.5, "mean": 2.5, "kurtosis": 1.64, "max": 4.0, "zeros": 0.0})
    # The norm is of a sample, and does not grow with the batch.
    assert float(STATISTICS["norm"](torch.tensor([[3.0, 4.0], [0.0, 0.0]]))) == 2.5
    assert float(STATISTICS["zeros"](torch.tensor([0.0, 1.0, 0.0, 2.0]))) == 0.5


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"compile": True}, {"watch": {pl.Event.EPOCH_END}}])
def test_they_are_of_the_parameters_before_the_step(options: Any, interpreted: None) -> None:
    logger = measured(mlp(), ActivationMonitor("1ba", statistics=ALL), strict=False, **options)
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(DATA):
        hidden = module[1](module[0](inputs))  # type: ignore[index]
        outputs = module[2](hidden)  # type: ignore[index]
        for name, tensor in {"1": hidden, "2": outputs}.items():
            for statistic, function in STATISTICS.items():
                batches, values = logger.series(f"activations/{statistic}/{name}")
                assert batches[number] == number + 1
                assert values[number] == pytest.approx(float(function(tensor.detach())), rel=1e-3, abs=1e-6)
        optimizer.zero_grad()
        cross_entropy(outputs, targets).backward()
        optimizer.step()


class Seen(nn.Module):
    """Keeps the largest output of a dropout in every forward of training, outside of the State."""

    seen: list[float] = []  # noqa: RUF012 - what all copies of the module share

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.head = nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        dropped = self.dropout(self.layer(inputs))
        self.seen.append(float(dropped.detach().max()))
        return self.head(dropped)  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 4}, {"precision": "amp_bf16"}])
def test_they_are_those_of_the_step_with_its_random_numbers(options: Any) -> None:
    Seen.seen.clear()
    train(Seen(), DATA, max_duration="1ep", seed=5, strict=False, **options)
    forwards = len(Seen.seen)
    assert forwards == len(DATA) * (2 if "microbatch_size" in options else 1)
    torch.manual_seed(0)
    for mode in ("activations", "step"):
        Seen.seen.clear()
        torch.manual_seed(1)
        callbacks = [ActivationMonitor("1ba", only="dropout", statistics=["max"])] if mode == "activations" else []
        logger = InMemoryLogger()
        train(Seen(), DATA, max_duration="1ep", seed=5, strict=False, callbacks=callbacks, loggers=[logger], **options)
        if mode == "activations":
            _, found = logger.series("activations/max/dropout")
    of_steps = Seen.seen[:: forwards // len(DATA)]
    assert found == pytest.approx(of_steps, rel=1e-6)


def test_training_is_what_it_was() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))

    finals = []
    for callbacks in ([], [ActivationMonitor("2ba")]):
        network = model()
        torch.manual_seed(3)
        state = train(network, DATA, callbacks=callbacks, loggers=[InMemoryLogger()], optimizer=pl.optim.adam(lr=0.1))
        finals.append((state.params, state.buffers, state.opt_state, torch.rand(2)))
    equal(finals[0], finals[1])


class Several(nn.Module):
    """Modules that return several tensors, and none of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head, self.argmax = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3), Argmax()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, _ = self.lstm(inputs[:, None])
        logits: Tensor = self.head(outputs[:, 0])
        self.argmax(logits)
        return logits


class Argmax(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=1)


def test_modules_that_return_several_tensors() -> None:
    logger = measured(Several(), ActivationMonitor("1ba", statistics=["mean"]))
    names = {name for name in logger.metrics if name.startswith("activations")}
    assert names == {f"activations/mean/{name}" for name in ("lstm/0", "lstm/1", "lstm/2", "head")}


def test_only_the_modules_that_are_named() -> None:
    model = nn.Sequential(mlp(), nn.Identity())
    for only, expected in {"0": {"0"}, "0.?": {"0.0", "0.1", "0.2"}, ("1", "0.2"): {"1", "0.2"}}.items():
        logger = measured(model, ActivationMonitor("3ba", only=only, statistics=["max"]))
        names = {name.removeprefix("activations/max/") for name in logger.metrics if name.startswith("activations")}
        assert names == expected
    with pytest.raises(pl.ArgumentError, match=r"only='layer'\): no module has such a name; there are 0, 0\.0, 0\.1"):
        measured(model, ActivationMonitor(only="layer"))


def test_what_algorithms_did_to_the_batch_is_seen() -> None:
    @pl.algorithm(pl.Event.BEFORE_TRAIN_BATCH)
    def doubled(state: pl.State) -> pl.State:
        inputs, targets = state.batch
        return state.replace(batch=(2 * inputs, targets))

    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    logger = measured(model, ActivationMonitor("1ba", only="0", statistics=["max"]), algorithms=[doubled])
    assert logger.series("activations/max/0")[1] == [2 * float(inputs.max()) for inputs, _ in DATA]


@pytest.mark.parametrize(
    "settings", [{"interval": None}, {"only": []}, {"only": 3}, {"only": [""]}, {"statistics": "norm"},
                 {"statistics": []}, {"statistics": ["median"]}, {"statistics": 1}]
)  # fmt: skip
def test_wrong_settings_are_refused(settings: Any) -> None:
    with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match=next(iter(settings))):
        ActivationMonitor(**settings)


def test_what_ranks_compute_together_is_refused() -> None:
    from tests.support.worlds import pool

    def program(rank: int) -> list[str]:
        errors = []
        models = {"shard": mlp(), "replicate": nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 3))}
        for kind, model in models.items():
            settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
            stream = pl.fit(model, DATA, max_duration="1ba", parallel=kind, callbacks=[ActivationMonitor()], **settings)
            try:
                pl.run(stream)
            except Exception as error:
                errors.append(str(error))
        return errors

    errors = pool().run(program)[0]
    assert "a model with sharded parameters can't be computed on one" in errors[0]
    assert "a model with SyncBatchNorm on several ranks can't be computed on one" in errors[1]


def test_a_script_has_no_forward_that_is_known() -> None:
    with pytest.raises(pl.ArgumentError, match=r"ActivationMonitor in pl\.drive"):
        pl.drive((pair for pair in ()), callbacks=[ActivationMonitor()])
