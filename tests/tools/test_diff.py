"""``pl.diff`` on two runs, streams or recorded ones: it names the event, the batch, the author and the leaf."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import FlightRecorder
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointNotFoundError, RewindError
from pure_loop.testing import Case
from pure_loop.testing import wrong_algorithms as wrong
from pure_loop.tools import diff as tool
from tests.support import problem
from tests.testing.test_wrong import NETWORK, PLAN

A = pl.algorithms
Settings = dict[str, Any]


def sgd(**settings: Any) -> Settings:
    return {"optimizer": pl.optim.sgd(**{"lr": 0.1, "momentum": 0.9, **settings})}


def run(settings: Settings) -> Any:
    model, data = settings.get("model", problem.convnet), settings.get("data", problem.images)
    others = {name: value for name, value in settings.items() if name not in ("model", "data")}
    return problem.fit(model(), data(), **{"max_duration": "1ep", "strict": False, **sgd(), **others})


def where_of(divergence: Any) -> str | None:
    """``*`` is the weight of the first layer."""
    if not divergence:
        return None
    leaf = divergence.leaf.replace("0.weight", "*")
    return f"{divergence.event.name} {divergence.timestamp.batch}, {divergence.by}: {leaf}"


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
    return {"loss": pl.Task(loss=problem.cross_entropy, weight=weight), "microbatch_size": 3}


def factors(one: float, other: float) -> tuple[Settings, Settings]:
    return by(scaled(one)), by(scaled(other))


SCORES = [evaluated(metrics={"score": metric}) for metric in (pl.metrics.accuracy(), pl.metrics.top_k(2))]
# What is another in the second run, or the settings of both; and where it shows. The first five: on a GPU, too.
LINES: list[tuple[Any, ...]] = [
    (sgd(lr=0.11), "BATCH_END 1, optimizer: params/*"),
    (changed(lambda net: setattr(net[5], "p", 0.3)), "AFTER_FORWARD 0, forward: outputs"),
    ({"data": lambda: other(2, 1)}, "AFTER_DATALOADER 2, data: batch/1"),
    ({"clip_grad": 0.01}, "AFTER_TRAIN_BATCH 0, gradients: scale, clip: grads/*"),
    (by(A.ema("2ba")), by(A.ema("3ba")), "BATCH_END 1, ema: algorithm_state/ema/params/*"),
    (sgd(lr=pl.schedules.linear(0.1, 0.05, "3ba")), "BATCH_END 2, optimizer: params/*"),
    ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "AFTER_LOSS 0, loss: loss"),
    (changed(lambda net: net[4].weight.view(-1)[0].fill_(0.5)), "INIT 0, loop: params/4.weight"),
    (changed(lambda net: setattr(net[7], "bias", None)), "INIT 0, loop: params/7.bias"),
    ({"data": lambda: other(1, 0)}, "AFTER_DATALOADER 1, data: batch/0"),
    ({"data": loader}, {"data": lambda: loader(shuffle=True)}, "AFTER_DATALOADER 0, data: batch/0"),
    (evaluated(), evaluated(other(0, 0)), "EVAL_BATCH_START 1, data of the evaluation: batch/0"),
    ({"seed": 1}, "INIT 0, loop: seed"),
    ({"precision": "amp_bf16"}, "AFTER_FORWARD 0, forward: buffers/1.running_mean"),
    ({"microbatch_size": 2}, "BEFORE_FORWARD 0, split into microbatches: microbatch/0"),
    (weighted(lambda b: 1.0 * len(b[0])), weighted(lambda b: 1.0), "AFTER_BACKWARD 0, backward: grads/*"),
    ({"max_duration": "2ba"}, "BEFORE_DATALOADER 2, loop: events"),
    (evaluated(), evaluated(interval="2ba"), "EVAL_BEFORE_ALL 1, loop: events"),
    (*SCORES, "EVAL_END 1, metrics: metrics/val/score"),
    (by(scaled(1.0)), "AFTER_LOSS 0, scale: events"),
    (by(*PLUS), by(*PLUS[::-1]), "AFTER_LOSS 0, plus 2: events"),
    (*factors(1.0, 1.5), "AFTER_LOSS 0, scale: loss"),
    (by(A.label_smoothing(0.1)), by(A.label_smoothing(0.2)), "BEFORE_LOSS 0, label_smoothing: microbatch/1"),
]


def test_a_line_that_is_another_is_named() -> None:
    for *settings, where in LINES:
        found = pl.diff(*map(run, [{}, *settings][-2:]))
        assert where_of(found) == where
        assert where.split()[0] in str(found)
        assert str(found).count("\n") >= 2
    # At the first step other betas cancel out in the parameters, up to rounding.
    for leaf, betas in (("exp_avg", (0.8, 0.999)), ("exp_avg_sq", (0.9, 0.99))):
        found = pl.diff(*(run({"optimizer": pl.optim.adamw(lr=0.01, betas=each)}) for each in ((0.9, 0.999), betas)))
        assert found
        assert (found.event, found.timestamp.batch, found.by) == (Event.BATCH_END, 1, "optimizer")
        assert [f"opt_state/{name}/0.weight" in found.leaves for name in (leaf, "started")] == [True, False]


def test_a_tolerance_and_an_operation() -> None:
    def gelu(approximate: str) -> Any:
        return run(changed(lambda net: net.__setitem__(2, nn.GELU(approximate))))

    where = pl.diff(gelu("none"), gelu("tanh"), operations=True)
    assert where
    assert str(where.operation).startswith("aten.gelu.default")
    assert "other tensors" not in str(where.operation)
    assert str(where.operation) in str(where)
    runs = [{"model": problem.mlp, "data": problem.points, **each} for each in factors(1.0, 1.0 + 1e-6)]
    assert pl.diff(*map(run, runs))
    alike = pl.diff(*map(run, runs), tolerance=1e-4)
    assert not alike
    assert (alike.tolerance, str(alike).splitlines()[0][-28:]) == (1e-4, "up to a tolerance of 0.0001.")


# Algorithms that are wrong on purpose, beside one of the same name and events that does nothing. Of some all States are
# what they are without them: what they do is no part of the value of a State.
WRONG: dict[Any, str | None] = {
    wrong.adds_in_place: "AFTER_TRAIN_BATCH 0, decay: grads/*",
    wrong.writes_through_data: "AFTER_TRAIN_BATCH 0, decay: grads/*",
    wrong.lends_its_memory_to_batchnorm: "BATCH_END 1, statistics: algorithm_state/statistics/0",
    wrong.draws_from_a_generator_of_its_own: "AFTER_LOSS 0, jitter: loss",
    # The hook is no part of the State; what it does is.
    wrong.hooks_a_tensor: "AFTER_BACKWARD 0, backward: grads/*",
    wrong.remembers_in_its_predicate: "AFTER_LOSS 0, sometimes: events",
    wrong.lets_its_memory_grow: "BATCH_END 1, history: algorithm_state/history",
    wrong.clips_after_the_step: "BATCH_END 1, clip: grads/*",
    wrong.normalises_within_a_microbatch: "BEFORE_LOSS 0, whiten: outputs",
    **dict.fromkeys((wrong.keeps_an_alias_and_writes_to_it_later, wrong.leaks_gradients, wrong.remembers_a_graph)),
}


def compared(make: Callable[[], pl.Algorithm]) -> Any:
    faulty, case = make(), Case(plan=PLAN, problem=NETWORK)
    idle = pl.Algorithm(faulty.name, {event: lambda state: state for event in faulty.handlers}, init=faulty.init)
    with pl.random.seeded(3):
        return pl.diff(*(case.stream([algorithm]) for algorithm in (idle, faulty)))


def test_a_wrong_algorithm_is_named() -> None:
    assert {make: where_of(compared(make)) for make in WRONG} == WRONG
    # An error of the run names the algorithm.
    with pytest.raises(pl.PureLoopError, match=r"algorithm 'compress' at AFTER_TRAIN_BATCH changed grads\['0\.weight'"):
        compared(wrong.returns_another_dtype)


# Recorded runs: the last State that both kept alike, one run from there, and the operation.

DATA = problem.points(12)


def changed_from(batch: int) -> Any:
    return pl.optim.adamw(lr=lambda t: 1e-2 if t.batch < batch else 2e-2)


def record(folder: Path, **settings: Any) -> tuple[Any, Any, Any]:
    arguments = {"optimizer": changed_from(99), "max_duration": "3ep", "strict": False, **settings}
    recorder = FlightRecorder(folder, keep=arguments.pop("keep", "5ba"), digest=arguments.pop("digest", 0))
    problem.run(problem.noisy(), DATA, callbacks=[recorder], **arguments)
    return folder, problem.noisy(), lambda state: problem.fit(state, DATA, **arguments)


@given(st.integers(0, 35), st.sampled_from(["5ba", "7ba"]), st.sampled_from([0, "4ba"]))
@options(max_examples=4)
def test_the_batch_and_the_stage_are_named(batch: int, keep: str, digest: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        a = record(Path(folder, "a"), keep=keep, digest=digest)
        b = record(Path(folder, "b"), keep=keep, digest=digest, optimizer=changed_from(batch))
        where = pl.diff(a, b)
    assert where_of(where) == f"BATCH_END {batch + 1}, optimizer: params/*"


def test_few_states_are_read_and_one_segment_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = record(tmp_path / "a", keep="1ba")
    folder, net, make = record(tmp_path / "b", keep="1ba", optimizer=changed_from(29))
    read, batches = [], []
    load = tool.load  # type: ignore[attr-defined]
    monkeypatch.setattr(tool, "load", lambda path, **options: [load(path, **options), read.append(path)][0])

    def counted(state: pl.State) -> Any:
        batches.append(state.timestamp.batch)
        return make(state)

    assert pl.diff(a, (folder, net, counted))
    assert batches == [29]
    assert len(read) <= 2 * 8  # two a comparison: log2(37) + 2 comparisons, and those that are trained from


def test_runs_that_are_the_same_that_start_apart_and_an_operation(tmp_path: Path) -> None:
    a = record(tmp_path / "a")
    alike: Any = pl.diff(a, record(tmp_path / "b"))
    assert (bool(alike), alike.events) == (False, 2)  # FIT_START and FIT_END, after the last State that was kept
    assert str(where_of(pl.diff(a, record(tmp_path / "c", seed=1)))).endswith(" 0, start: seed")
    # Masks that are drawn are no operation that differs.
    at_13: Any = lambda state: state.timestamp.batch == 13  # noqa: E731
    runs = [record(tmp_path / str(factor), algorithms=[scaled(factor, when=at_13)]) for factor in (1.0, 2.0)]
    where: Any = pl.diff(*runs, operations=True)
    assert where_of(where) == "AFTER_LOSS 13, scale: loss"
    assert str(where.operation).startswith("aten.mul.Tensor")


def test_what_is_refused(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b", optimizer=changed_from(12))
    later = next(state for event, state in a[2](a[1]) if event is pl.Event.BATCH_END and state.timestamp.batch == 7)
    problem.run(later, DATA, callbacks=[FlightRecorder(tmp_path / "c", keep="99ba")], optimizer=changed_from(99))
    for other, error, says in (
        ((a[0], a[1], lambda state: 1), ArgumentTypeError, r"make\(state\) of .* returned a int"),
        ((b[0], b[1], lambda _: b[2](b[1])), ArgumentError, "after 10 batches, and its stream begins elsewhere"),
        (str(tmp_path / "b"), ArgumentTypeError, "a stream|write each as"),
        # A difference that does not come back.
        ((b[0], b[1], a[2]), RewindError, "differ with 14 batches finished, and trained again from 10 on"),
        (problem.fit(), ArgumentTypeError, "A stream can only be compared with a stream"),
        ((a[0], "model", a[2]), ArgumentTypeError, "has a str and a function"),
        ((tmp_path / "none", a[1], a[2]), CheckpointNotFoundError, "none"),
        ((tmp_path / "c", a[1], a[2]), ArgumentError, "b those after 7, 24 batches"),
    ):
        with pytest.raises(error, match=says):
            pl.diff(a, other)


@pytest.mark.gpu
def test_lines_are_named_on_a_gpu_and_it_equals_a_cpu_within_a_tolerance() -> None:
    cuda = {"device": "cuda"}
    for *settings, where in LINES[:5]:
        before, after = [{}, *settings][-2:]
        assert not pl.diff(run({**before, **cuda}), run({**before, **cuda}))
        assert where_of(pl.diff(run({**before, **cuda}), run({**after, **cuda}))) == where
    # Without dropout, for which a GPU draws other numbers, and without the bias before a BatchNorm, whose gradient is
    # nothing but rounding: relative to its norm it is another on each device.
    plain = changed(lambda net: (setattr(net[0], "bias", None), setattr(net[5], "p", 0.0)))
    assert not pl.diff(run(plain), run({**plain, **cuda}), tolerance=1e-2)
    assert where_of(pl.diff(run(plain), run({**plain, **sgd(lr=0.2), **cuda}), tolerance=1e-2)) == LINES[0][-1]
