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


def sgd(**settings: Any) -> Settings:
    return {"optimizer": pl.optim.sgd(**{"lr": 0.1, "momentum": 0.9, **settings})}


def run(settings: Settings) -> Any:
    model, data = settings.get("model", problem.convnet), settings.get("data", problem.images)
    others = {name: value for name, value in settings.items() if name not in ("model", "data")}
    return problem.fit(model(), data(), **{"max_duration": "1ep", "strict": False, **sgd(), **others})


def where_of(divergence: Any) -> Where | None:
    if divergence is None:
        return None
    return divergence.event.name, divergence.timestamp.batch, divergence.by, divergence.leaf


def by(*members: Any) -> Settings:
    return {"algorithms": members}


def evaluated(data: Any = None, **settings: Any) -> Settings:
    return {"evaluators": {"val": pl.Evaluator(data or problem.images(), **{"interval": "1ba", **settings})}}


def loss(name: str, function: Callable[[Any], Any], **more: Any) -> pl.Algorithm:
    return pl.Algorithm(name, {Event.AFTER_LOSS: lambda state: state.replace(loss=function(state.loss))}, **more)


def scaled(factor: float, **more: Any) -> pl.Algorithm:
    return loss("scale", lambda value: value * factor, **more)


PLUS = [loss(f"plus {n}", lambda value, n=n: value + n) for n in (1, 2)]


def changed(change: Callable[[Any], Any]) -> Settings:
    """A model that is changed."""

    def model() -> Any:
        net = problem.convnet()
        with torch.no_grad():
            change(net)
        return net

    return {"model": model}


def other(batch: int, part: int) -> Any:
    """Data of which one number is another."""
    data = problem.images()
    flat = data[batch][part].view(-1)
    flat[3] = (flat[3] + 1) % 3 if part else flat[3] + 1e-6
    return data


def loader(**settings: Any) -> Any:
    inputs, targets = (torch.cat(parts) for parts in zip(*problem.images(), strict=True))
    return DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4, **settings)


def weighted(weight: Callable[[Any], float]) -> Settings:
    return {"task": pl.Task(weight=weight), "microbatch_size": 3}


def at(event: str, batch: int, by: str, leaf: str) -> Where:
    return event, batch, by, leaf.replace("*", "0.weight")


STEP = at("BATCH_END", 1, "optimizer", "params/*")
SECOND_STEP = at("BATCH_END", 2, "optimizer", "params/*")
FORWARD, LOSS = at("AFTER_FORWARD", 0, "forward", "outputs"), at("AFTER_LOSS", 0, "loss", "loss")
BUFFER = at("AFTER_FORWARD", 0, "forward", "buffers/1.running_mean")
SCALED = at("AFTER_TRAIN_BATCH", 0, "gradients: scale, clip", "grads/*")
SCALE = at("AFTER_LOSS", 0, "scale", "events")


def grads(name: str) -> Where:
    return at("AFTER_TRAIN_BATCH", 0, name, "grads/*")


# Name; what is another in the second run, and where it shows; or the settings of both runs, and where.
LINES: list[tuple[Any, ...]] = [
    ("rate", sgd(lr=0.11), STEP),
    ("schedule", sgd(lr=pl.schedules.linear(0.1, 0.05, "3ba")), SECOND_STEP),
    ("label smoothing", {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, LOSS),
    ("dropout", changed(lambda net: setattr(net[5], "p", 0.3)), FORWARD),
    (
        "first value",
        changed(lambda net: net[4].weight.view(-1)[0].fill_(0.5)),
        at("INIT", 0, "loop", "params/4.weight"),
    ),
    ("bias", changed(lambda net: setattr(net[7], "bias", None)), at("INIT", 0, "loop", "params/7.bias")),
    ("target", {"data": lambda: other(2, 1)}, at("AFTER_DATALOADER", 2, "data", "batch/1")),
    ("pixel", {"data": lambda: other(1, 0)}, at("AFTER_DATALOADER", 1, "data", "batch/0")),
    (
        "shuffled",
        {"data": loader},
        {"data": lambda: loader(shuffle=True)},
        at("AFTER_DATALOADER", 0, "data", "batch/0"),
    ),
    (
        "of an evaluation",
        evaluated(),
        evaluated(other(0, 0)),
        at("EVAL_BATCH_START", 1, "data of the evaluation", "batch/0"),
    ),
    ("seed", {"seed": 1}, at("INIT", 0, "loop", "seed")),
    ("clip", {"clip_grad": 0.01}, SCALED),
    ("precision", {"precision": "amp_bf16"}, BUFFER),
    ("microbatches", {"microbatch_size": 2}, at("BEFORE_FORWARD", 0, "split into microbatches", "microbatch/0")),
    (
        "weight",
        weighted(lambda b: 1.0 * len(b[0])),
        weighted(lambda b: 1.0),
        at("AFTER_BACKWARD", 0, "backward", "grads/*"),
    ),
    ("length", {"max_duration": "2ba"}, at("BEFORE_DATALOADER", 2, "loop", "events")),
    ("interval", evaluated(), evaluated(interval="2ba"), at("EVAL_BEFORE_ALL", 1, "loop", "events")),
    (
        *("metric", evaluated(metrics={"score": pl.metrics.accuracy()})),
        *(evaluated(metrics={"score": pl.metrics.top_k(2)}), at("EVAL_END", 1, "metrics", "metrics/val/score")),
    ),
    ("algorithm more", by(scaled(1.0)), SCALE),
    ("order of algorithms", by(*PLUS), by(*PLUS[::-1]), at("AFTER_LOSS", 0, "plus 2", "events")),
    ("factor", by(scaled(1.0)), by(scaled(1.5)), at("AFTER_LOSS", 0, "scale", "loss")),
    ("half-life", by(A.ema("2ba")), by(A.ema("3ba")), at("BATCH_END", 1, "ema", "algorithm_state/ema/params/*")),
    (
        "smoothing",
        *(by(A.label_smoothing(s)) for s in (0.1, 0.2)),
        at("BEFORE_LOSS", 0, "label_smoothing", "microbatch/1"),
    ),
]


def test_a_line_that_is_another_is_named() -> None:
    for name, *settings, where in LINES:
        found = pl.diff(*map(run, [{}, *settings][-2:]))
        assert where_of(found) == where, (name, found and found.leaves)
        assert where[0] in str(found)
        assert str(found).count("\n") == 2
    # At the first step other betas cancel out in the parameters, up to rounding.
    for leaf, betas in (("exp_avg", (0.8, 0.999)), ("exp_avg_sq", (0.9, 0.99))):
        found = pl.diff(*(run({"optimizer": pl.optim.adamw(lr=0.01, betas=each)}) for each in ((0.9, 0.999), betas)))
        assert found is not None
        assert (found.event, found.timestamp.batch, found.by) == (Event.BATCH_END, 1, "optimizer")
        assert [f"opt_state/{name}/0.weight" in found.leaves for name in (leaf, "started")] == [True, False]


def test_a_tolerance_and_an_operation() -> None:
    def gelu(approximate: str) -> Any:
        return run(changed(lambda net: net.__setitem__(2, nn.GELU(approximate))))

    where = pl.diff(gelu("none"), gelu("tanh"), operations=True)
    assert where is not None
    assert str(where.operation).startswith("aten.gelu.default")
    assert "other tensors" not in str(where.operation)
    assert str(where.operation) in str(where)
    runs = [{"model": problem.mlp, "data": problem.points, **by(scaled(factor))} for factor in (1.0, 1.0 + 1e-6)]
    assert pl.diff(*map(run, runs)) is not None
    assert pl.diff(*map(run, runs), tolerance=1e-4) is None


# Algorithms that are wrong on purpose, beside one of the same name and events that does nothing. Of some all States are
# what they are without them: what they do is no part of the value of a State.
WRONG: dict[Any, Where | None] = {
    wrong.adds_in_place: grads("decay"),
    wrong.writes_through_data: grads("decay"),
    wrong.lends_its_memory_to_batchnorm: at("BATCH_END", 1, "statistics", "algorithm_state/statistics/0"),
    wrong.draws_from_a_generator_of_its_own: at("AFTER_LOSS", 0, "jitter", "loss"),
    # The hook is no part of the State; what it does is.
    wrong.hooks_a_tensor: at("AFTER_BACKWARD", 0, "backward", "grads/*"),
    wrong.remembers_in_its_predicate: at("AFTER_LOSS", 0, "sometimes", "events"),
    wrong.lets_its_memory_grow: at("BATCH_END", 1, "history", "algorithm_state/history"),
    wrong.replaces_the_batch_too_late: at("BEFORE_FORWARD", 0, "augment", "batch/0"),
    wrong.clips_after_the_step: at("BATCH_END", 1, "clip", "grads/*"),
    wrong.normalises_within_a_microbatch: at("BEFORE_LOSS", 0, "whiten", "outputs"),
    wrong.remembers_on_a_tensor: at("BATCH_END", 1, "tally", "params/*"),
    **dict.fromkeys((wrong.keeps_an_alias_and_writes_to_it_later, wrong.leaks_gradients, wrong.remembers_a_graph)),
}


def compared(make: Callable[[], pl.Algorithm]) -> Any:
    faulty, case = make(), Case(plan=PLAN, problem=NETWORK)
    idle = pl.Algorithm(faulty.name, {event: lambda state: state for event in faulty.handlers}, init=faulty.init)
    with pl.random.seeded(3):
        return pl.diff(*(case.stream([algorithm]) for algorithm in (idle, faulty)))


def test_a_wrong_algorithm_is_named() -> None:
    assert {*WRONG} <= {*WRONG_ALGORITHMS}
    assert {make: where_of(compared(make)) for make in WRONG} == WRONG
    # An error of the run names the algorithm.
    with pytest.raises(pl.PureLoopError, match=r"algorithm 'compress' at AFTER_TRAIN_BATCH changed grads\['0\.weight'"):
        compared(wrong.returns_another_dtype)


@pytest.mark.gpu
def test_lines_are_named_on_a_gpu_and_it_equals_a_cpu_within_a_tolerance() -> None:
    cuda = {"device": "cuda"}
    for name, *settings, where in LINES:
        if name in ("rate", "dropout", "target", "clip", "half-life"):
            before, after = [{}, *settings][-2:]
            assert pl.diff(run({**before, **cuda}), run({**before, **cuda})) is None
            assert where_of(pl.diff(run({**before, **cuda}), run({**after, **cuda}))) == where
    # Without dropout, for which a GPU draws other numbers, and without the bias before a BatchNorm, whose gradient is
    # nothing but rounding: relative to its norm it is another on each device.
    plain = changed(lambda net: (setattr(net[0], "bias", None), setattr(net[5], "p", 0.0)))
    assert pl.diff(run(plain), run({**plain, **cuda}), tolerance=1e-2) is None
    assert where_of(pl.diff(run(plain), run({**plain, **sgd(lr=0.2), **cuda}), tolerance=1e-2)) == STEP
