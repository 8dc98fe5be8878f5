"""Models and data that can't be trained or trained on, and what to give instead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from tests.support.refusals import DATA, TYPE, Watched, breaks, fit, net, refused


class Bare(nn.Module):
    """Its layers are in a plain list, where torch doesn't find them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 3)]


class Twice(nn.Module):
    """Its weight stands in a plain list too, where no other tensor is put in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.decayed = {"weights": [self.layer.weight]}


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FullyShardedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FSDPModule:
    """What fully_shard mixes into a module's class."""


class Sharded(FSDPModule, nn.Linear):
    pass


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript, and people still have some
        return torch.jit.script(net())


def traced() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(net(), torch.randn(1, 4))


def compiled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing dynamo warns
        return torch.compile(net())


MODEL, WRAPPED = (pl.ModelError, ValueError), (pl.WrappedModelError, TypeError)

MODELS = [
    pytest.param(nn.ReLU, *MODEL, ["ReLU has no parameters", "nn.ModuleList"], id="no parameters"),
    pytest.param(Bare, *MODEL, ["Bare has no parameters", "plain list"], id="layers in a list"),
    pytest.param(
        lambda: net().requires_grad_(False), *MODEL, ["requires a gradient", "requires_grad_(True)"], id="frozen"
    ),
    pytest.param(lambda: nn.LazyLinear(3), *MODEL, ["'weight' of a lazy module", "call the model on one"], id="lazy"),
    pytest.param(lambda: nn.Linear(4, 3, device="meta"), *MODEL, ["meta device", "to_empty"], id="meta"),
    pytest.param(lambda: nn.Embedding(3, 3, max_norm=1.0), *MODEL, ["max_norm=1.0", "torch.renorm"], id="max_norm"),
    pytest.param(
        lambda: nn.Sequential(Twice()), *MODEL, ["model.0.decayed holds '0.layer.weight'", "property"], id="twice"
    ),
    pytest.param(lambda: DistributedDataParallel(net()), *WRAPPED, ["DistributedData", "model.module"], id="DDP"),
    pytest.param(
        lambda: nn.Sequential(DistributedDataParallel(net())), *WRAPPED, ["model.0 is replicated"], id="DDP inside"
    ),
    pytest.param(lambda: FullyShardedDataParallel(net()), *WRAPPED, ["sharded over ranks", "model.module"], id="FSDP"),
    pytest.param(lambda: Sharded(4, 3), *WRAPPED, ["fully_shard", "as it was before"], id="FSDP2"),
    pytest.param(lambda: nn.DataParallel(net()), *WRAPPED, ["DataParallel", "model.module"], id="DataParallel"),
    pytest.param(compiled, *WRAPPED, ["torch.compile", "model._orig_mod"], id="compiled"),
    pytest.param(scripted, *WRAPPED, ["TorchScript", "nn.Module it was made from"], id="scripted"),
    pytest.param(traced, *WRAPPED, ["TorchScript"], id="traced"),
    pytest.param(lambda: nn.Linear, *TYPE, ["the class Linear", "write Linear(...)"], id="class"),
    pytest.param(lambda: net().state_dict(), *TYPE, ["OrderedDict", "model.load_state_dict"], id="state_dict"),
    pytest.param(
        lambda: lambda x: x, *TYPE, ["model is function", "torch.nn.Module nor a pure_loop State"], id="function"
    ),
    pytest.param(lambda: DATA, *TYPE, ["the model comes first", "fit(model, train_dataloader"], id="data first"),
]


@pytest.mark.parametrize(("make", "error", "builtin", "says"), MODELS)
def test_models_that_would_train_wrongly_are_refused(make: Any, error: Any, builtin: Any, says: list[str]) -> None:
    data = Watched(DATA)
    model = make()
    refused(lambda: fit(model, data), error, builtin, *says)
    assert data.drawn == 0
    refused(lambda: pl.evaluate(model, data, loss=functional.cross_entropy), error, builtin, *says)
    refused(lambda: pl.State.create(model), error, builtin, *says)


def test_a_real_ddp_module_is_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net())
        refused(lambda: fit(wrapped), pl.WrappedModelError, TypeError, "replicated over ranks", "model.module")
    finally:
        torch.distributed.destroy_process_group()


def test_module_compile_is_harmless() -> None:
    """``module.compile()`` wraps nothing: the copy that is trained runs uncompiled."""
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.compile()
    assert pl.run(fit(model)).timestamp.batch == 2


LOADERS = [
    pytest.param(list, pl.DataError, ValueError, ["train_dataloader", "0 batches"], id="empty list"),
    pytest.param(
        lambda: DataLoader(TensorDataset(torch.zeros(0, 4), torch.zeros(0))),
        *(pl.DataError, ValueError, ["0 batches", "dataset empty"]),
        id="empty dataset",
    ),
    pytest.param(
        lambda: DataLoader(TensorDataset(torch.zeros(3, 4), torch.zeros(3)), batch_size=4, drop_last=True),
        *(pl.DataError, ValueError, ["0 batches", "drop_last=True"]),
        id="drop_last drops all",
    ),
    pytest.param(
        lambda: TensorDataset(torch.zeros(8, 4)),
        *TYPE,
        ["is a dataset", "DataLoader(dataset, batch_size"],
        id="dataset",
    ),
    pytest.param(lambda: torch.zeros(8, 4), *TYPE, ["Tensor is no dataloader", "TensorDataset"], id="tensor"),
    pytest.param(lambda: lambda: iter(DATA), *TYPE, ["batches(), not batches"], id="generator function"),
    pytest.param(lambda: {"train": DATA}, *TYPE, ["dict is no dataloader"], id="mapping"),
    pytest.param(lambda: None, *TYPE, ["NoneType is no dataloader"], id="None"),
    pytest.param(net, *TYPE, ["the model comes first", "fit(model, train_dataloader"], id="a model"),
]


@pytest.mark.parametrize(("make", "error", "builtin", "says"), LOADERS)
def test_data_that_gives_no_batches_is_refused(make: Any, error: Any, builtin: Any, says: list[str]) -> None:
    refused(lambda: fit(data=make()), error, builtin, *says)


@pytest.mark.parametrize("make", [lambda: iter([]), lambda: type("Empty", (), {"__iter__": lambda self: iter([])})()])
def test_data_that_turns_out_to_be_empty_is_an_error(make: Any) -> None:
    events = breaks(fit(data=make()), pl.DataError, ValueError, "train dataloader gave no batch in epoch 0")
    assert events[-1] is Event.BEFORE_DATALOADER


def test_an_exhausted_iterator_says_so() -> None:
    says = ("iterator is exhausted", "batches_per_epoch")
    breaks(fit(data=iter(DATA), max_duration="2ep"), pl.DataError, ValueError, "in epoch 1", *says)


def test_empty_data_of_evaluate_and_predict() -> None:
    model = net()
    refused(
        lambda: pl.evaluate(model, [], loss=functional.cross_entropy),
        pl.DataError,
        ValueError,
        "evaluator 'eval'",
        "0 batches",
    )
    refused(lambda: pl.predict(model, []), pl.DataError, ValueError, "0 batches")
    refused(lambda: pl.predict(model, None), *TYPE, "NoneType is no dataloader")
    refused(
        lambda: pl.evaluate(model, None, loss=functional.cross_entropy), *TYPE, "evaluators=None", "mapping of labels"
    )


class WithLoss(nn.Module):
    """Its loss is one of torch's own, which takes targets and no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 3), nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def test_a_loss_of_torchs_own_in_the_model_is_no_method() -> None:
    with pytest.raises(pl.errors.ArgumentError, match="no loss: give loss="):
        pl.fit(WithLoss(), DATA, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep")
    events = [event for event, _ in pl.predict(WithLoss(), DATA)]
    assert events.count(Event.PREDICT_BATCH_END) == len(DATA)


def test_an_evaluation_that_measures_no_loss_needs_none() -> None:
    evaluator = pl.Evaluator(DATA, metrics=[pl.metrics.accuracy()])
    for options in ({}, {"compile": True}):
        with interpreted():
            state = pl.run(pl.evaluate(WithLoss(), {"val": evaluator}, **options))
        assert list(state.metrics["val"]) == ["accuracy"]
    with pytest.raises(pl.errors.ArgumentError, match="no loss: give loss="):
        pl.evaluate(WithLoss(), {"val": evaluator, "more": DATA})
