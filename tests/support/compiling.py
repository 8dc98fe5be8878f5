"""What tests of ``compile=`` share: models and algorithms of all kinds, and how near the eager numbers have to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss

import pure_loop as pl
from pure_loop import Event, FrozenDict
from pure_loop._internal.bits import same as same_bits
from pure_loop.algorithms import ema, gradient_clipping, label_smoothing, sam
from tests.support import problem
from tests.support.problem import CLASSES, FEATURES
from tests.support.streams import leaves

EPOCHS = {Event.EPOCH_END}
BATCHES = {Event.BATCH_END}
INSIDE = [Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD]
FIVE = problem.points(5, 8, 1)
SHORT: dict[str, Any] = {"model": problem.mlp, "data": FIVE}
WITH_NAN = [(x * float("nan") if i == 1 else x, y) for i, (x, y) in enumerate(FIVE[:3])]


# Models.


def mlp() -> nn.Module:
    # No bias before the BatchNorm: its gradient is rounding error, which Adam makes into whole steps.
    return nn.Sequential(
        nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, CLASSES)
    )


class Net(nn.Module):
    """Two layers, and a forward that makes anything of them."""

    def __init__(self, forward: Any, one: Any = None, two: Any = None) -> None:
        super().__init__()
        self.one = nn.Linear(FEATURES, CLASSES) if one is None else one()
        self.two = nn.Linear(CLASSES, CLASSES) if two is None else two()
        self.run = forward

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def net(forward: Any, *layers: Any) -> Any:
    return partial(Net, forward, *layers)


def over_steps(layer: Any, width: int = 3) -> Any:
    """A recurrent layer over seven steps, an odd number, of two features each."""

    def forward(self: Net, x: Tensor) -> Tensor:
        sequence = x.repeat(1, 4)[:, :14].reshape(len(x), 7, 2)
        out: Tensor = self.two(self.one(sequence)[0].mean(1))
        return out

    return net(forward, partial(layer, 2, 3, batch_first=True), partial(nn.Linear, width, CLASSES))


def shared(self: Any, x: Tensor) -> dict[str, Tensor]:
    """One output is another one without its graph, and a third is a function of the first."""
    out = self.one(x).tanh()
    return {"out": out, "target": out.detach(), "more": self.two(out), "mean": out.mean(0, True).expand_as(out)}


def distilled(outputs: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    """A dict of losses, of which one is a number alone."""
    loss = cross_entropy(outputs["out"], targets) + outputs["mean"].square().sum()
    total = loss + mse_loss(outputs["more"], outputs["target"])
    return {"total": total, "shown": total.detach()}


def of_all_kinds(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The input, a view, an integer, a parameter, the same once more: not all of them have a gradient."""
    out = self.one(x)
    return x, out, out[:, :2], out.argmax(dim=1), self.two.weight, self.one(x)


def of_all(outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    x, out, part, best, weight, again = outputs
    loss = cross_entropy(out, targets) + part.mean() + 0.1 * (best == targets).to(out.dtype).mean()
    return loss + 0.01 * (x * x).mean() + weight.square().sum() + (again * out.detach()).sum()


class Stashing(Net):
    """Its loss reads what the forward left in the module."""

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.one(batch[0])
        self.hidden = out.square().mean()
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch[1]) + self.hidden


class Named(nn.Module):
    """Takes mappings, and draws by a functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"scores": self.head(dropout(self.embed(batch["ids"]), 0.2, self.training))}

    def loss(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(outputs["scores"], batch["labels"])


NAMED = [{"ids": (x[:, 0] * 9).long() % 7, "labels": y} for x, y in problem.points(size=6)]
ENCODER = partial(nn.TransformerEncoderLayer, FEATURES, 2, 8, dropout=0.1, batch_first=True)
HEAD = partial(nn.Linear, FEATURES, CLASSES)
PROBLEMS: dict[str, dict[str, Any]] = {
    "BatchNorm and dropout": {"model": mlp},
    "plain": {"model": problem.mlp},
    "tied and frozen": {"model": problem.tied},
    "images": {"model": problem.convnet, "data": problem.images(2)},
    "words": {"model": problem.transformer, "data": problem.words(2)},
    "mappings, and a loss of its own": {"model": Named, "data": NAMED, "loss": None},
    "attention": {"model": net(lambda self, x: self.two(self.one(x[:, None].expand(-1, 3, -1))[:, -1]), ENCODER, HEAD)},
    "a gradient now and then": {"model": net(lambda self, x: self.two(self.one(x)) if len(x) == 8 else self.one(x))},
    "a head that the loss doesn't use": {
        "model": net(lambda self, x: (self.one(x), self.two(self.one(x)))),
        "loss": lambda outputs, targets: cross_entropy(outputs[0], targets),
    },
    "outputs of all kinds": {"model": net(of_all_kinds), "loss": of_all},
    "outputs that share memory": {"model": net(shared), "loss": distilled},
    "what the forward left": {"model": partial(Stashing, None), "loss": None},
    "a recurrent layer": {"model": over_steps(nn.GRU)},
    "two recurrent layers": {"model": over_steps(partial(nn.LSTM, num_layers=2, dropout=0.3, bidirectional=True), 6)},
    "a cell": {"model": net(lambda self, x: self.two(self.one(x)), partial(nn.GRUCell, FEATURES, CLASSES))},
}


# Algorithms.


@pl.algorithm(Event.AFTER_LOSS)
def penalty(state: pl.State) -> pl.State:
    weights = sum(parameter.square().sum() for parameter in state.params.values())
    return state.replace(loss=state.loss + 0.1 * weights)


@pl.algorithm(Event.AFTER_FORWARD)
def colder(state: pl.State) -> pl.State:
    return state.replace(outputs=state.outputs / (1 + state.timestamp.batch))


@pl.algorithm(Event.BEFORE_LOSS)
def remembered(state: pl.State) -> pl.State:
    mean = state.outputs.detach().mean()
    return state.remember("mean", mean + state.algorithm_state.get("mean", 0.0))


@pl.algorithm(Event.BEFORE_BACKWARD)
def by_the_optimizer(state: pl.State) -> pl.State:
    """Looks at memory that forwards and losses are not given otherwise."""
    return state.remember("moment", next(iter(state.opt_state["exp_avg"].values())).sum())


@pl.algorithm(Event.AFTER_LOSS, when="3ba")
def every_third(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * 2)


@pl.algorithm(Event.AFTER_LOSS)
def anneal(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * (1 - 0.5 * state.timestamp.elapsed))


@pl.algorithm(Event.AFTER_LOSS)
def through_a_tree(state: pl.State) -> pl.State:
    """Reads and replaces the optimizer's memory in the way that is recommended."""

    def halve(leaf: Any) -> Any:
        return leaf / 2 if isinstance(leaf, Tensor) else leaf  # and not a count

    halved = optree.tree_map(halve, state.opt_state, namespace="pure_loop")
    found = optree.tree_leaves(halved, namespace="pure_loop")
    size = sum(leaf.sum() for leaf in found if isinstance(leaf, Tensor))
    return state.replace(opt_state=halved, loss=state.loss * (1 + 0.01 * size))


@pl.algorithm(Event.AFTER_LOSS)
def other_gradients(state: pl.State) -> pl.State:
    """Of the microbatches before, if there were any."""
    if not isinstance(state._grads, FrozenDict):
        return state
    return state.replace(grads={name: gradient + 1 for name, gradient in state.grads.items()})


@pl.algorithm(Event.AFTER_FORWARD)
def another_batch(state: pl.State) -> pl.State:
    return state.replace(batch=(state.batch[0] * 2, state.batch[1]))


def several() -> list[Any]:
    return [label_smoothing(0.1), ema(half_life="4ba"), gradient_clipping("norm", 1.0)]


ALGORITHMS: dict[str, list[Any]] = {
    "none": [],
    "of anything": [ema(half_life="4ba"), by_the_optimizer],
    "several": several(),
    "SAM": [sam(0.05, interval=2)],
    "a penalty": [penalty],
    "colder, remembered": [colder, remembered],
    "by the time": [every_third, anneal],
    "through a tree": [through_a_tree],
    "other gradients": [other_gradients],
    "another batch": [another_batch],
}


# Runs.


def stream(model: Any = mlp, data: Any = None, **settings: Any) -> Iterator[tuple[Event, pl.State]]:
    with pl.random.seeded(3):
        module = model()
    optimizer = pl.optim.adamw(lr=pl.schedules.linear(1e-2, 1e-3, "2ep"))
    data = problem.points(size=(8, 8, 5), seed=1) if data is None else data
    return problem.fit(module, data, **{"optimizer": optimizer, "watch": EPOCHS, "strict": None} | settings)


def fit(model: Any = mlp, **settings: Any) -> list[tuple[Event, pl.State]]:
    return list(stream(model, **settings))


def same(settings: dict[str, Any], tolerance: float = 2e-6, **of_compiled: Any) -> list[tuple[Event, pl.State]]:
    """A compiled run, which has to be the eager one."""
    found = fit(**settings, **{"compile": True} | of_compiled)
    assert_close(found, fit(**settings), tolerance)
    return found


def assert_close(given: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    """Equal but for rounding, which is measured against the size of numbers of order 1."""
    assert wanted, "nothing that this test watches was yielded"
    assert [event for event, _ in given] == [event for event, _ in wanted]
    for (event, one), (_, other) in zip(given, wanted, strict=True):
        a, b = leaves(one), leaves(other)
        assert a.keys() == b.keys(), event
        for path, value in a.items():
            where = f"{path} at {event.name}, batch {one.timestamp.batch}"
            if isinstance(value, Tensor):
                assert (value.shape, value.dtype) == (b[path].shape, b[path].dtype), where
                torch.testing.assert_close(
                    value.double(), b[path].double(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=where
                )
            else:
                assert value == b[path] or value == pytest.approx(b[path]), where


class Kept:
    """Things that were kept of a run, each with a copy of its numbers; what holds no tensors is read as one."""

    def __init__(self) -> None:
        self.things: list[tuple[str, Any, list[Tensor]]] = []

    def keep(self, what: str, thing: Any) -> None:
        self.things.append((what, thing, [tensor.clone() for tensor in _tensors(thing)]))

    def check(self) -> None:
        for what, thing, numbers in self.things:
            assert all(map(same_bits, _tensors(thing), numbers)), f"{what} changed"


def _tensors(thing: Any) -> list[Tensor]:
    if callable(thing) and not isinstance(thing, pl.State):
        return _tensors(thing())
    found = optree.tree_leaves(thing, namespace="pure_loop")
    return [torch.as_tensor(each).detach() for each in found if hasattr(each, "__array__")]
