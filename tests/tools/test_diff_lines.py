"""``pl.diff`` on two runs of which one line is another: it names the event, the batch, the author and the leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import pure_loop as pl
from pure_loop import Event
from pure_loop.testing import Case
from pure_loop.testing import wrong_algorithms as wrong
from pure_loop.testing.wrong_algorithms import WRONG_ALGORITHMS
from tests.support import problem
from tests.testing.test_wrong import NETWORK, PLAN

A = pl.algorithms
Settings = dict[str, Any]
Where = tuple[str, int, str, str]


def run(settings: Settings) -> Any:
    model, data = settings.get("model", problem.convnet), settings.get("data", problem.images)
    others = {name: value for name, value in settings.items() if name not in ("model", "data")}
    return problem.fit(model(), data(), **{"max_duration": "1ep", "strict": False, **sgd(), **others})


def where_of(divergence: Any) -> Where | None:
    if divergence is None:
        return None
    return divergence.event.name, divergence.timestamp.batch, divergence.by, divergence.leaf


def sgd(**settings: Any) -> Settings:
    return {"optimizer": pl.optim.sgd(**{"lr": 0.1, "momentum": 0.9, **settings})}


def heads(lr: float) -> Settings:
    optimizers = {"head": pl.optim.sgd(lr=lr), "body": pl.optim.sgd(lr=0.1)}
    return {"optimizer": pl.optim.partition(optimizers, lambda name, _: "head" if name.startswith("7.") else "body")}


def by(*members: Any) -> Settings:
    return {"algorithms": members}


def evaluated(data: Any = None, **settings: Any) -> Settings:
    return {"evaluators": {"val": pl.Evaluator(data or problem.images(), **{"interval": "1ba", **settings})}}


def at_loss(name: str, function: Callable[[pl.State], Any], **more: Any) -> pl.Algorithm:
    return pl.Algorithm(name, {Event.AFTER_LOSS: lambda state: state.replace(loss=function(state))}, **more)


def scaled(factor: float, **more: Any) -> pl.Algorithm:
    return at_loss("scale", lambda state: state.loss * factor, **more)  # type: ignore[operator]


PLUS_1, PLUS_2 = (at_loss(f"plus {n}", lambda state, n=n: state.loss + n) for n in (1, 2))  # type: ignore[misc]


def decayed(factor: float, event: Event) -> pl.Algorithm:
    def decay(state: pl.State) -> pl.State:
        return state.replace(params={name: tensor * factor for name, tensor in state.params.items()})

    return pl.Algorithm("decay", {event: decay})


def changed(change: Callable[[Any], Any]) -> Settings:
    """A model that is changed."""

    def model() -> Any:
        net = problem.convnet()
        with torch.no_grad():
            change(net)
        return net

    return {"model": model}


def other(batch: int, part: int, amount: float = 1e-6) -> Any:
    """Data of which one number is another."""
    data = problem.images()
    tensor = data[batch][part]
    tensor.view(-1)[3] = (tensor.view(-1)[3] + 1) % 3 if part else tensor.view(-1)[3] + amount
    return data


def loader(**settings: Any) -> Any:
    inputs, targets = (torch.cat(parts) for parts in zip(*problem.images(), strict=True))
    return DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4, **settings)


def by_tokens(weight: Callable[[Any], float]) -> Settings:
    return {"task": pl.Task(weight=weight), "microbatch_size": 3}


WEIGHT = "0.weight"
STEP = "BATCH_END", 1, "optimizer", f"params/{WEIGHT}"
SECOND_STEP = "BATCH_END", 2, "optimizer", f"params/{WEIGHT}"
INIT = "INIT", 0, "loop"
FORWARD, LOSS = ("AFTER_FORWARD", 0, "forward", "outputs"), ("AFTER_LOSS", 0, "loss", "loss")
SCALED = "AFTER_TRAIN_BATCH", 0, "gradients: scale, clip", f"grads/{WEIGHT}"
SAMPLE = "AFTER_DATALOADER", 0, "data", "batch/0"


def grads(name: str) -> Where:
    return "AFTER_TRAIN_BATCH", 0, name, f"grads/{WEIGHT}"


# What is another in the second run, of the settings of both, or of those of the second alone; and where it shows.
LINES: dict[str, tuple[Settings, Settings, Where]] = {
    "rate": ({}, sgd(lr=0.11), STEP),
    "momentum": ({}, sgd(momentum=0.8), SECOND_STEP),
    "dampening": ({}, sgd(dampening=0.1), ("BEFORE_LOAD", 0, "loop", f"opt_state/started/{WEIGHT}")),
    "schedule": ({}, sgd(lr=pl.schedules.linear(0.1, 0.05, "3ba")), SECOND_STEP),
    "rate of the head": (heads(0.1), heads(0.2), ("BATCH_END", 1, "optimizer", "params/7.weight")),
    "optimizer": (
        {"optimizer": pl.optim.adamw(lr=0.01)},
        {"optimizer": pl.optim.lion(lr=0.01)},
        ("BEFORE_LOAD", 0, "loop", "opt_state/step"),
    ),
    "label smoothing": ({}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, LOSS),
    "dropout": ({}, changed(lambda net: setattr(net[5], "p", 0.3)), FORWARD),
    "momentum of BatchNorm": (
        *({}, changed(lambda net: setattr(net[1], "momentum", 0.2))),
        ("AFTER_FORWARD", 0, "forward", "buffers/1.running_mean"),
    ),
    "activation": ({}, changed(lambda net: net.__setitem__(2, nn.GELU())), FORWARD),
    "first value": ({}, changed(lambda net: net[4].weight.view(-1)[0].fill_(0.5)), (*INIT, "params/4.weight")),
    "first buffer": ({}, changed(lambda net: net[1].running_var.fill_(2)), (*INIT, "buffers/1.running_var")),
    "bias": ({}, changed(lambda net: setattr(net[7], "bias", None)), (*INIT, "params/7.bias")),
    "frozen": (
        *({}, changed(lambda net: net[4].requires_grad_(False))),
        ("BEFORE_LOAD", 0, "loop", "opt_state/momentum_buffer/4.weight"),
    ),
    "target": ({}, {"data": lambda: other(2, 1)}, ("AFTER_DATALOADER", 2, "data", "batch/1")),
    "pixel": ({}, {"data": lambda: other(1, 0)}, ("AFTER_DATALOADER", 1, "data", "batch/0")),
    "shuffled": ({"data": loader}, {"data": lambda: loader(shuffle=True)}, SAMPLE),
    "batch less": ({}, {"data": lambda: problem.images(2)}, ("AFTER_DATALOADER", 2, "data", "events")),
    "batches of a step": ({}, {"batches_per_step": 2}, SAMPLE),
    "sample of an evaluation": (
        *(evaluated(), evaluated(other(0, 0))),
        ("EVAL_BATCH_START", 1, "data of the evaluation", "batch/0"),
    ),
    "seed": ({}, {"seed": 1}, ("INIT", 0, "loop", "seed")),
    "clip": ({}, {"clip_grad": 0.01}, SCALED),
    "precision": ({}, {"precision": "amp_bf16"}, ("AFTER_FORWARD", 0, "forward", "buffers/1.running_mean")),
    "microbatches": ({}, {"microbatch_size": 2}, ("BEFORE_FORWARD", 0, "split into microbatches", "microbatch/0")),
    "weight of a microbatch": (
        *(by_tokens(lambda batch: float(len(batch[0]))), by_tokens(lambda batch: 1.0)),
        ("AFTER_BACKWARD", 0, "backward", f"grads/{WEIGHT}"),
    ),
    "length": ({}, {"max_duration": "2ba"}, ("BEFORE_DATALOADER", 2, "loop", "events")),
    "interval of an evaluation": (evaluated(), evaluated(interval="2ba"), ("EVAL_BEFORE_ALL", 1, "loop", "events")),
    "metric": (
        evaluated(metrics={"score": pl.metrics.accuracy()}),
        evaluated(metrics={"score": pl.metrics.top_k(2)}),
        ("EVAL_END", 1, "metrics", "metrics/val/score"),
    ),
    "algorithm more": ({}, by(scaled(1.0)), ("AFTER_LOSS", 0, "scale", "events")),
    "order of algorithms": (by(PLUS_1, PLUS_2), by(PLUS_2, PLUS_1), ("AFTER_LOSS", 0, "plus 2", "events")),
    "factor": (by(scaled(1.0)), by(scaled(1.5)), ("AFTER_LOSS", 0, "scale", "loss")),
    "interval of an algorithm": (by(scaled(0.5)), by(scaled(0.5, when="2ba")), ("AFTER_LOSS", 0, "scale", "events")),
    "event of an algorithm": (
        *(by(decayed(0.9, Event.BATCH_END)), by(decayed(0.9, Event.BATCH_START))),
        ("BATCH_START", 0, "decay", "events"),
    ),
    "decay of an epoch": (
        *(by(decayed(1.0, Event.EPOCH_END)), by(decayed(0.9, Event.EPOCH_END))),
        ("EPOCH_END", 3, "decay", f"params/{WEIGHT}"),
    ),
    "half-life": (
        *(by(A.ema(half_life="2ba")), by(A.ema(half_life="3ba"))),
        ("BATCH_END", 1, "ema", f"algorithm_state/ema/params/{WEIGHT}"),
    ),
    "rho": (by(A.sam(rho=0.05)), by(A.sam(rho=0.06)), grads("sam")),
    "threshold": (
        *(by(A.gradient_clipping("norm", 0.1)), by(A.gradient_clipping("norm", 0.2))),
        grads("gradient_clipping"),
    ),
    "lookahead": (
        *(by(A.lookahead(interval=2)), by(A.lookahead(interval=2, rate=0.4))),
        ("BATCH_END", 2, "lookahead", f"params/{WEIGHT}"),
    ),
    "smoothing": (
        *(by(A.label_smoothing(0.1)), by(A.label_smoothing(0.2))),
        ("BEFORE_LOSS", 0, "label_smoothing", "microbatch/1"),
    ),
    "alpha": (by(A.mixup(0.2)), by(A.mixup(0.3)), ("BEFORE_TRAIN_BATCH", 0, "mixup", "batch/0")),
    "stochastic_depth": (
        *(by(A.stochastic_depth(nn.ReLU, 0.5)), by(A.stochastic_depth(nn.ReLU, 0.9))),
        ("INIT", 0, "stochastic_depth", "buffers/2.stochastic_depth_rate"),
    ),
}  # fmt: skip


def test_a_line_that_is_another_is_named() -> None:
    for name, (before, after, where) in LINES.items():
        found = pl.diff(run(before), run(after))
        assert where_of(found) == where, (name, found and found.leaves)
        assert where[0] in str(found)
        assert str(found).count("\n") == 2


def test_other_betas_are_named() -> None:
    """At the first step they cancel out in the parameters, up to rounding."""
    for leaf, betas in (("exp_avg", (0.8, 0.999)), ("exp_avg_sq", (0.9, 0.99))):
        where = pl.diff(*(run({"optimizer": pl.optim.adamw(lr=0.01, betas=each)}) for each in ((0.9, 0.999), betas)))
        assert where is not None
        assert (where.event, where.timestamp.batch, where.by) == (Event.BATCH_END, 1, "optimizer")
        assert [f"opt_state/{name}/{WEIGHT}" in where.leaves for name in (leaf, "started")] == [True, False]


def test_a_tolerance_and_an_operation() -> None:
    def gelu(approximate: str) -> Any:
        return run({**changed(lambda net: net.__setitem__(2, nn.GELU(approximate)))})

    where = pl.diff(gelu("none"), gelu("tanh"), operations=True)
    assert where is not None
    assert str(where.operation).startswith("aten.gelu.default")
    assert "other tensors" not in str(where.operation)
    assert str(where.operation) in str(where)
    assert pl.diff(gelu("none"), gelu("none"), operations=True) is None
    runs = [{"model": problem.mlp, "data": problem.points, **by(scaled(factor))} for factor in (1.0, 1.0 + 1e-6)]
    assert pl.diff(*map(run, runs)) is not None
    assert pl.diff(*map(run, runs), tolerance=1e-4) is None


# Algorithms that are wrong on purpose, beside one of the same name and events that does nothing.
CASE = Case(plan=PLAN, problem=NETWORK)
WRONG: dict[Any, Where] = {
    wrong.adds_in_place: grads("decay"),
    wrong.writes_through_data: grads("decay"),
    wrong.lends_its_memory_to_batchnorm: ("BATCH_END", 1, "statistics", "algorithm_state/statistics/0"),
    wrong.draws_from_a_generator_of_its_own: ("AFTER_LOSS", 0, "jitter", "loss"),
    # The hook is no part of the State; what it does is.
    wrong.hooks_a_tensor: ("AFTER_BACKWARD", 0, "backward", f"grads/{WEIGHT}"),
    wrong.remembers_in_its_predicate: ("AFTER_LOSS", 0, "sometimes", "events"),
    wrong.lets_its_memory_grow: ("BATCH_END", 1, "history", "algorithm_state/history"),
    wrong.replaces_the_batch_too_late: ("BEFORE_FORWARD", 0, "augment", "batch/0"),
    wrong.clips_after_the_step: ("BATCH_END", 1, "clip", f"grads/{WEIGHT}"),
    wrong.normalises_within_a_microbatch: ("BEFORE_LOSS", 0, "whiten", "outputs"),
    wrong.remembers_on_a_tensor: ("BATCH_END", 1, "tally", f"params/{WEIGHT}"),
}
# Of these all States are what they are without them: what they do is no part of the value of a State.
UNSEEN = (
    wrong.keeps_an_alias_and_writes_to_it_later,
    wrong.leaks_gradients,
    wrong.remembers_a_graph,
    wrong.leaves_a_thread,
)
# These end the run by an error, which names the algorithm.
REFUSED = {
    wrong.returns_another_dtype: r"algorithm 'compress' at AFTER_TRAIN_BATCH changed grads\['0\.weight'\]",
    wrong.fails_on_a_single_sample: "the variance of one number is not defined",
}


def compared(make: Callable[[], pl.Algorithm]) -> Any:
    faulty = make()
    idle = pl.Algorithm(faulty.name, {event: lambda state: state for event in faulty.handlers}, init=faulty.init)
    with pl.random.seeded(3):
        return pl.diff(*(CASE.stream([algorithm]) for algorithm in (idle, faulty)))


def test_a_wrong_algorithm_is_named() -> None:
    assert {*WRONG, *UNSEEN, *REFUSED} <= {*WRONG_ALGORITHMS}
    assert {make: where_of(compared(make)) for make in (*WRONG, *UNSEEN)} == {**WRONG, **dict.fromkeys(UNSEEN)}
    for make, says in REFUSED.items():
        with pytest.raises(Exception, match=says):
            compared(make)


@pytest.mark.gpu
def test_lines_are_named_on_a_gpu() -> None:
    cuda = {"device": "cuda"}
    for name in ("rate", "dropout", "target", "clip", "half-life", "rho"):
        before, after, where = LINES[name]
        assert pl.diff(run({**before, **cuda}), run({**before, **cuda})) is None
        assert where_of(pl.diff(run({**before, **cuda}), run({**after, **cuda}))) == where


@pytest.mark.gpu
def test_runs_on_a_cpu_and_a_gpu_are_equal_within_a_tolerance() -> None:
    # Without dropout, for which a GPU draws other numbers, and without the bias before a BatchNorm, whose gradient is
    # nothing but rounding: relative to its norm it is another on each device.
    settings = changed(lambda net: (setattr(net[0], "bias", None), setattr(net[5], "p", 0.0)))
    assert pl.diff(run(settings), run({**settings, "device": "cuda"}), tolerance=1e-2) is None
    faster = run({**settings, **sgd(lr=0.2), "device": "cuda"})
    assert where_of(pl.diff(run(settings), faster, tolerance=1e-2)) == STEP
