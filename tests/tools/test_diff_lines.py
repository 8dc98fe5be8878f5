"""``pl.diff`` on two runs of which one line is another: it names the event, the batch, the author and the leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import pure_loop as pl
from pure_loop import Event
from tests.support.runs import cross_entropy

Settings = dict[str, Any]
HEAD = "7.weight"


def net(change: Callable[[Any], Any] = lambda module: None) -> nn.Module:
    """A model with buffers that the forward writes to, and random numbers that it draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
    change(module)
    return module


def images(change: Callable[[list[Any]], Any] = lambda batches: None) -> Any:
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.rand(4, 3, 8, 8, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(3)
    ]
    changed = change(batches)
    return batches if changed is None else changed


def whole_weights(module: Any) -> None:
    with torch.no_grad():
        for tensor in module[0].parameters():
            tensor.copy_((tensor * 8).round())


def whole_pixels(batches: list[Any]) -> list[Any]:
    return [((inputs * 4).round(), targets) for inputs, targets in batches]


WHOLE_NUMBERS: Settings = {"model": lambda: net(whole_weights), "data": lambda: images(whole_pixels)}


def sgd(**settings: Any) -> Settings:
    return {"optimizer": pl.optim.sgd(**{"lr": 0.1, "momentum": 0.9, **settings})}


def adamw(**settings: Any) -> Settings:
    return {"optimizer": pl.optim.adamw(**{"lr": 0.01, **settings})}


def heads(lr: float) -> Settings:
    optimizers = {"head": pl.optim.sgd(lr=lr), "body": pl.optim.sgd(lr=0.1)}
    return {"optimizer": pl.optim.partition(optimizers, lambda name, _: "head" if name.startswith("7.") else "body")}


def algorithms(*members: Any) -> Settings:
    return {"algorithms": members}


def evaluated(change: Callable[[list[Any]], Any] = lambda batches: None, **settings: Any) -> Settings:
    return {"evaluators": {"val": pl.Evaluator(images(change), **{"interval": "1ba", **settings})}}


def own(name: str, event: Event, function: Callable[[pl.State], pl.State], **more: Any) -> pl.Algorithm:
    return pl.Algorithm(name, {event: function}, **more)


def with_loss(factor: float, name: str = "scale", **more: Any) -> pl.Algorithm:
    return own(name, Event.AFTER_LOSS, lambda state: state.replace(loss=state.loss * factor), **more)  # type: ignore[operator, arg-type]


def weighed_by(weight: Callable[[int], float]) -> pl.Algorithm:
    """A microbatch weighed by its number of samples, a second time."""

    def weigh(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss * weight(len(state.microbatch[0])))  # type: ignore[operator, arg-type]

    return own("weigh", Event.AFTER_LOSS, weigh)


def decayed(factor: float, event: Event) -> pl.Algorithm:
    def decay(state: pl.State) -> pl.State:
        return state.replace(params={name: tensor * factor for name, tensor in state.params.items()})

    return own("decay", event, decay)


def counting(first: int) -> pl.Algorithm:
    def count(state: pl.State) -> pl.State:
        return state.remember("count", state.algorithm_state["count"] + 1)

    return own("count", Event.BATCH_END, count, init=lambda state: first)


def plus(name: str, number: float) -> pl.Algorithm:
    return own(name, Event.AFTER_LOSS, lambda state: state.replace(loss=state.loss + number))  # type: ignore[operator, arg-type]


# What modules are changed by.


def set_attributes(module: nn.Module, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(module, name, value)


def setting(position: int, **attributes: Any) -> Callable[[], nn.Module]:
    return lambda: net(lambda module: set_attributes(module[position], **attributes))


def replaced(position: int, module: nn.Module) -> Callable[[], nn.Module]:
    return lambda: net(lambda whole: whole.__setitem__(position, module))


def written(position: int, name: str, number: float) -> Callable[[], nn.Module]:
    return lambda: net(lambda module: getattr(module[position], name).data.view(-1)[0].fill_(number))


# What batches are changed by.


def swapped(batches: list[Any]) -> None:
    """The first samples of two batches."""
    (one, _), (two, _) = batches[:2]
    one[0], two[0] = two[0].clone(), one[0].clone()


def relabelled(batches: list[Any]) -> None:
    batches[2][1][3] = (batches[2][1][3] + 1) % 3


def brightened(batches: list[Any]) -> None:
    batches[1][0][2, 0, 4, 4] += 1e-6


def loader(**settings: Any) -> Any:
    inputs, targets = (torch.cat(parts) for parts in zip(*images(), strict=True))
    return DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4, **settings)


def scaled_loss(outputs: Any, targets: Any) -> Any:
    return cross_entropy(outputs, targets) * 1.01


def by_tokens(weight: Callable[[Any], float]) -> Settings:
    return {"task": pl.Task(weight=weight), "microbatch_size": 3}


@attrs.frozen
class Line:
    """A line that is another in the second run.

    Attributes:
        before, after: settings of the two runs that are others than those of all runs.
        where: the event, how many batches are finished, the author, and the leaf.
    """

    before: Settings
    after: Settings
    where: tuple[str, int, str, str]


STEP = "BATCH_END", 1, "optimizer", "params/0.weight"
SECOND_STEP = "BATCH_END", 2, "optimizer", "params/0.weight"
AT_FIRST = "INIT", 0, "loop"
FORWARD = "AFTER_FORWARD", 0, "forward", "outputs"
LOSS = "AFTER_LOSS", 0, "loss", "loss"

OPTIMIZERS: dict[str, Line] = {
    "another rate": Line(sgd(), sgd(lr=0.11), STEP),
    "another momentum": Line(sgd(), sgd(momentum=0.8), SECOND_STEP),
    "another dampening": Line(sgd(), sgd(dampening=0.1), ("BEFORE_LOAD", 0, "loop", "opt_state/started/0.weight")),
    "nesterov": Line(sgd(), sgd(nesterov=True), STEP),
    "maximize": Line(sgd(), sgd(maximize=True), STEP),
    "weight decay": Line(sgd(), sgd(weight_decay=1e-3), STEP),
    "a schedule": Line(sgd(), sgd(lr=pl.schedules.linear(0.1, 0.05, "3ba")), SECOND_STEP),
    "another milestone": Line(
        sgd(lr=pl.schedules.multistep(["1ba"])), sgd(lr=pl.schedules.multistep(["2ba"])), SECOND_STEP
    ),
    "the rate of the head": Line(heads(0.1), heads(0.2), ("BATCH_END", 1, "optimizer", f"params/{HEAD}")),
    "another eps": Line(adamw(), adamw(eps=1e-4), STEP),
    "amsgrad": Line(adamw(), adamw(amsgrad=True), ("BEFORE_LOAD", 0, "loop", "opt_state/max_exp_avg_sq/0.weight")),
    "decay of adam": Line(
        adamw(weight_decay=0.1),
        {"optimizer": pl.optim.adam(lr=0.01, weight_decay=0.1)},
        ("BATCH_END", 1, "optimizer", "params/0.weight"),
    ),
    "another optimizer": Line(
        adamw(), {"optimizer": pl.optim.lion(lr=0.01)}, ("BEFORE_LOAD", 0, "loop", "opt_state/step")
    ),
}
LOSSES: dict[str, Line] = {
    "label smoothing": Line({}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, LOSS),
    "a sum": Line({}, {"loss": nn.CrossEntropyLoss(reduction="sum")}, LOSS),
    "weights of classes": Line({}, {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0]))}, LOSS),
    "a class that is ignored": Line({}, {"loss": nn.CrossEntropyLoss(ignore_index=2)}, LOSS),
    "a loss scaled": Line({}, {"loss": scaled_loss}, LOSS),
    "another loss": Line({}, {"loss": functional.multi_margin_loss}, LOSS),
}
MODELS: dict[str, Line] = {
    "dropout": Line({}, {"model": setting(5, p=0.3)}, FORWARD),
    "the momentum of BatchNorm": Line(
        {}, {"model": setting(1, momentum=0.2)}, ("AFTER_FORWARD", 0, "forward", "buffers/1.running_mean")
    ),
    "the eps of BatchNorm": Line({}, {"model": setting(1, eps=1e-3)}, FORWARD),
    "BatchNorm in eval mode": Line(
        {},
        {"model": lambda: net(lambda module: module[1].eval())},
        ("AFTER_FORWARD", 0, "forward", "buffers/1.running_mean"),
    ),
    "another activation": Line({}, {"model": replaced(2, nn.GELU())}, FORWARD),
    "another pooling": Line({}, {"model": replaced(3, nn.AvgPool2d(2))}, FORWARD),
    "another padding": Line(
        {},
        {"model": setting(0, padding_mode="circular", _reversed_padding_repeated_twice=[1] * 4)},
        ("AFTER_FORWARD", 0, "forward", "buffers/1.running_mean"),
    ),
    "the first value of a weight": Line({}, {"model": written(4, "weight", 0.5)}, (*AT_FIRST, "params/4.weight")),
    "the first value of a bias": Line({}, {"model": written(7, "bias", 0.5)}, (*AT_FIRST, "params/7.bias")),
    "the first value of a buffer": Line(
        {}, {"model": written(1, "running_var", 0.5)}, (*AT_FIRST, "buffers/1.running_var")
    ),
    "a layer without a bias": Line({}, {"model": setting(7, bias=None)}, ("INIT", 0, "loop", "params/7.bias")),
    "a frozen layer": Line(
        {},
        {"model": lambda: net(lambda module: module[4].requires_grad_(False))},
        ("BEFORE_LOAD", 0, "loop", "opt_state/momentum_buffer/4.weight"),
    ),
}
DATA: dict[str, Line] = {
    "samples swapped": Line({}, {"data": lambda: images(swapped)}, ("AFTER_DATALOADER", 0, "data", "batch/0")),
    "a target": Line({}, {"data": lambda: images(relabelled)}, ("AFTER_DATALOADER", 2, "data", "batch/1")),
    "a pixel": Line({}, {"data": lambda: images(brightened)}, ("AFTER_DATALOADER", 1, "data", "batch/0")),
    "the order of batches": Line(
        {}, {"data": lambda: images(lambda batches: batches[::-1])}, ("AFTER_DATALOADER", 0, "data", "batch/0")
    ),
    "shuffled": Line(
        {"data": loader}, {"data": lambda: loader(shuffle=True)}, ("AFTER_DATALOADER", 0, "data", "batch/0")
    ),
    "a batch less": Line(
        {}, {"data": lambda: images(lambda batches: batches[:2])}, ("AFTER_DATALOADER", 2, "data", "events")
    ),
    "the size of batches": Line({}, {"batches_per_step": 2}, ("AFTER_DATALOADER", 0, "data", "batch/0")),
    "the samples of an evaluation": Line(
        evaluated(), evaluated(swapped), ("EVAL_BATCH_START", 1, "data of the evaluation", "batch/0")
    ),
}
FIT: dict[str, Line] = {
    "seed": Line({}, {"seed": 1}, (*AT_FIRST, "seed")),
    "clip": Line({}, {"clip_grad": 0.01}, ("AFTER_TRAIN_BATCH", 0, "gradients: scale, clip", "grads/0.weight")),
    "another clip": Line(
        {"clip_grad": 0.02}, {"clip_grad": 0.01}, ("AFTER_TRAIN_BATCH", 0, "gradients: scale, clip", "grads/0.weight")
    ),
    "precision": Line({}, {"precision": "amp_bf16"}, ("AFTER_FORWARD", 0, "forward", "buffers/1.running_mean")),
    "microbatches": Line({}, {"microbatch_size": 2}, ("BEFORE_FORWARD", 0, "split into microbatches", "microbatch/0")),
    "the weight of a microbatch": Line(
        by_tokens(lambda batch: float(len(batch[0]))),
        by_tokens(lambda batch: 1.0),
        ("AFTER_BACKWARD", 0, "backward", "grads/0.weight"),
    ),
    "the length": Line({}, {"max_duration": "2ba"}, ("BEFORE_DATALOADER", 2, "loop", "events")),
    "the interval of an evaluation": Line(
        evaluated(), evaluated(interval="2ba"), ("EVAL_BEFORE_ALL", 1, "loop", "events")
    ),
    "the metric of an evaluation": Line(
        evaluated(metrics={"score": pl.metrics.accuracy()}),
        evaluated(metrics={"score": pl.metrics.top_k(2)}),
        ("EVAL_END", 1, "metrics", "metrics/val/score"),
    ),
}
ALGORITHMS: dict[str, Line] = {
    "an algorithm more": Line({}, algorithms(with_loss(1.0)), ("AFTER_LOSS", 0, "scale", "events")),
    "the order of algorithms": Line(
        algorithms(plus("a", 1), plus("b", 2)), algorithms(plus("b", 2), plus("a", 1)), ("AFTER_LOSS", 0, "b", "events")
    ),
    "the factor of an algorithm": Line(
        algorithms(with_loss(1.0)), algorithms(with_loss(1.5)), ("AFTER_LOSS", 0, "scale", "loss")
    ),
    "the interval of an algorithm": Line(
        algorithms(with_loss(0.5)), algorithms(with_loss(0.5, when="2ba")), ("AFTER_LOSS", 0, "scale", "events")
    ),
    "the event of an algorithm": Line(
        algorithms(decayed(0.9, Event.BATCH_END)),
        algorithms(decayed(0.9, Event.BATCH_START)),
        ("BATCH_START", 0, "decay", "events"),
    ),
    "the decay at the end of an epoch": Line(
        algorithms(decayed(1.0, Event.EPOCH_END)),
        algorithms(decayed(0.9, Event.EPOCH_END)),
        ("EPOCH_END", 3, "decay", "params/0.weight"),
    ),
    "the first state of an algorithm": Line(
        algorithms(counting(0)), algorithms(counting(1)), ("BEFORE_LOAD", 0, "loop", "algorithm_state/count")
    ),
    "an algorithm's weight of microbatches": Line(
        {"microbatch_size": 3, **algorithms(weighed_by(lambda samples: 1.0))},
        {"microbatch_size": 3, **algorithms(weighed_by(lambda samples: samples / 2))},
        ("AFTER_LOSS", 0, "weigh", "loss"),
    ),
    "the half-life of ema": Line(
        algorithms(pl.algorithms.ema(half_life="2ba")),
        algorithms(pl.algorithms.ema(half_life="3ba")),
        ("BATCH_END", 1, "ema", "algorithm_state/ema/params/0.weight"),
    ),
    "the interval of ema": Line(
        algorithms(pl.algorithms.ema(half_life="2ba")),
        algorithms(pl.algorithms.ema(half_life="2ba", interval="2ba")),
        ("BATCH_END", 1, "ema", "algorithm_state/ema/params/0.weight"),
    ),
    "the rho of sam": Line(
        algorithms(pl.algorithms.sam(rho=0.05)),
        algorithms(pl.algorithms.sam(rho=0.06)),
        ("AFTER_TRAIN_BATCH", 0, "sam", "grads/0.weight"),
    ),
    "the threshold of gradient_clipping": Line(
        algorithms(pl.algorithms.gradient_clipping("norm", 0.1)),
        algorithms(pl.algorithms.gradient_clipping("norm", 0.2)),
        ("AFTER_TRAIN_BATCH", 0, "gradient_clipping", "grads/0.weight"),
    ),
    "the kind of gradient_clipping": Line(
        algorithms(pl.algorithms.gradient_clipping("value", 0.01)),
        algorithms(pl.algorithms.gradient_clipping("norm", 0.01)),
        ("AFTER_TRAIN_BATCH", 0, "gradient_clipping", "grads/0.weight"),
    ),
    "the noise of gradient_noise": Line(
        algorithms(pl.algorithms.gradient_noise(0.01)),
        algorithms(pl.algorithms.gradient_noise(0.02)),
        ("AFTER_TRAIN_BATCH", 0, "gradient_noise", "grads/0.weight"),
    ),
    "the rate of lookahead": Line(
        algorithms(pl.algorithms.lookahead(interval=2)),
        algorithms(pl.algorithms.lookahead(interval=2, rate=0.4)),
        ("BATCH_END", 2, "lookahead", "params/0.weight"),
    ),
    "the interval of swa": Line(
        algorithms(pl.algorithms.swa(interval="1ba")),
        algorithms(pl.algorithms.swa(interval="2ba")),
        ("BATCH_END", 3, "swa", "algorithm_state/swa/params/0.weight"),
    ),
    "label smoothing by an algorithm": Line(
        algorithms(pl.algorithms.label_smoothing(0.1)),
        algorithms(pl.algorithms.label_smoothing(0.2)),
        ("BEFORE_LOSS", 0, "label_smoothing", "microbatch/1"),
    ),
    "the alpha of mixup": Line(
        algorithms(pl.algorithms.mixup(0.2)),
        algorithms(pl.algorithms.mixup(0.3)),
        ("BEFORE_TRAIN_BATCH", 0, "mixup", "batch/0"),
    ),
    "the length of cutout": Line(
        algorithms(pl.algorithms.cutout(length=0.5)),
        algorithms(pl.algorithms.cutout(length=0.3)),
        ("BEFORE_TRAIN_BATCH", 0, "cutout", "batch/0"),
    ),
    "the magnitude of randaugment": Line(
        algorithms(pl.algorithms.randaugment(magnitude=5)),
        algorithms(pl.algorithms.randaugment(magnitude=9)),
        ("BEFORE_TRAIN_BATCH", 0, "randaugment", "batch/0"),
    ),
    "the rate of stochastic_depth": Line(
        algorithms(pl.algorithms.stochastic_depth(nn.ReLU, 0.5)),
        algorithms(pl.algorithms.stochastic_depth(nn.ReLU, 0.9)),
        ("INIT", 0, "stochastic_depth", "buffers/2.stochastic_depth_rate"),
    ),
    "the level of layer_freezing": Line(
        algorithms(pl.algorithms.layer_freezing("0ba", level=0.9)),
        algorithms(pl.algorithms.layer_freezing("0ba", level=0.3)),
        ("EPOCH_END", 3, "layer_freezing", "algorithm_state/layer_freezing/depth"),
    ),
    "the share of selective_backprop": Line(
        algorithms(pl.algorithms.selective_backprop(keep=0.5, interrupt=0)),
        algorithms(pl.algorithms.selective_backprop(keep=0.75, interrupt=0)),
        ("AFTER_DATALOADER", 2, "selective_backprop", "batch/0"),
    ),
    # The mean over a batch is that of the means of its parts: with whole numbers it is so to the bit on any processor.
    "the size of ghost_batchnorm": Line(
        {**algorithms(pl.algorithms.ghost_batchnorm(2)), **WHOLE_NUMBERS},
        {**algorithms(pl.algorithms.ghost_batchnorm(4)), **WHOLE_NUMBERS},
        ("AFTER_FORWARD", 0, "forward", "buffers/1.running_var"),
    ),
}
LINES = {**OPTIMIZERS, **LOSSES, **MODELS, **DATA, **FIT, **ALGORITHMS}


def run(settings: Settings) -> Any:
    values: Settings = {"loss": cross_entropy, "max_duration": "1ep", **sgd(), **settings}
    model, data = values.pop("model", net), values.pop("data", images)
    return pl.fit(model(), data(), **values)


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_another_is_named(name: str) -> None:
    line = LINES[name]
    where = pl.diff(run(line.before), run(line.after))
    assert where is not None
    event, batch, by, leaf = line.where
    assert (where.event.name, where.timestamp.batch, where.by) == (event, batch, by)
    assert where.leaf == leaf, where.leaves


@pytest.mark.parametrize("betas", [(0.8, 0.999), (0.9, 0.99)])
def test_other_betas_are_named(betas: tuple[float, float]) -> None:
    """At the first step they cancel out in the parameters, up to rounding."""
    where = pl.diff(run(adamw()), run(adamw(betas=betas)))
    assert where is not None
    assert (where.event, where.timestamp.batch, where.by) == (Event.BATCH_END, 1, "optimizer")
    assert ("opt_state/exp_avg/0.weight" in where.leaves) is (betas[0] != 0.9)
    assert ("opt_state/exp_avg_sq/0.weight" in where.leaves) is (betas[1] != 0.999)


ON_A_GPU = [
    *("another rate", "dropout", "a target", "another clip", "the half-life of ema", "the rho of sam"),
    "an algorithm's weight of microbatches",
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_line_that_is_another_is_named_on_a_gpu(name: str) -> None:
    line = LINES[name]
    cuda = {"device": "cuda"}
    assert pl.diff(run({**line.before, **cuda}), run({**line.before, **cuda})) is None
    where = pl.diff(run({**line.before, **cuda}), run({**line.after, **cuda}))
    assert where is not None
    assert (where.event.name, where.timestamp.batch, where.by, where.leaf) == line.where
    assert str(where)


@pytest.mark.gpu
def test_runs_on_a_cpu_and_a_gpu_are_equal_within_a_tolerance() -> None:
    # Without dropout, for which a GPU draws other numbers, and without the bias before a BatchNorm, whose gradient is
    # nothing but rounding: relative to its norm it is another on each device.
    def change(module: Any) -> None:
        set_attributes(module[0], bias=None)
        set_attributes(module[5], p=0.0)

    settings = {"model": lambda: net(change)}
    assert pl.diff(run(settings), run({**settings, "device": "cuda"}), tolerance=1e-2) is None
    faster = run({**settings, **sgd(lr=0.2), "device": "cuda"})
    where = pl.diff(run(settings), faster, tolerance=1e-2)
    assert where is not None
    assert (where.event.name, where.timestamp.batch, where.by, where.leaf) == STEP
    assert str(where)


def test_there_are_fifty_lines() -> None:
    assert len(LINES) >= 50
    assert len(LINES) == sum(map(len, (OPTIMIZERS, LOSSES, MODELS, DATA, FIT, ALGORITHMS)))
