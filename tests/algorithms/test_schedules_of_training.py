"""Algorithms that end a run, change its rate, or train on less: stopping, plateaus, freezing, selective backprop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from pure_loop.algorithms._monitored import Monitored
from pure_loop.compile import interpreted
from pure_loop.state import POSITIONS
from pure_loop.testing.comparison import differences
from tests.support.problem import convnet, cross_entropy, fit, images, noise, points, run
from tests.support.streams import equal
from tests.support.tiers import examples
from tests.support.worlds import pool

DATA = [(torch.full((2, 3), 0.1 * i), torch.ones(2, 1)) for i in range(1, 4)]


def scores(values: list[float]) -> dict[str, Any]:
    """Evaluators, of which the accuracy of one has these values, one evaluation after the other."""
    following = iter([*values, *values[-1:] * 20])
    made = pl.metrics.Metric("accuracy", lambda: 0, lambda acc, outputs, batch: acc, lambda acc: next(following))
    return {"evaluators": {"val": pl.Evaluator(DATA[:1], metrics=[made])}, "max_duration": f"{len(values)}ep"}


def stream(algorithms: Any, start: Any = None, **settings: Any) -> pl.Stream:
    with pl.random.seeded(0):
        model = nn.Linear(3, 1)
    options = {"max_duration": "20ep", "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "loss": functional.mse_loss}
    return fit(model if start is None else start, DATA, algorithms, strict=False, **options | settings)


def expected(values: list[float], patience: int, delta: float, mode: str) -> tuple[int, float, int]:
    """The last epoch, what was best, and when."""
    best, at = math.nan, 0
    for epoch, value in enumerate(values, 1):
        gain = value - best if mode == "max" else best - value
        if math.isfinite(value) and (not at or gain > delta):
            best, at = value, epoch
        elif epoch - at >= patience:
            return epoch, best, at
    return len(values), best, at


@examples(25, 300)
@given(
    values=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.25, 0.5, 0.75]), min_size=1, max_size=5),
    patience=st.integers(1, 4),
    unit=st.sampled_from(["evaluations", "ep", "ba"]),
    delta=st.sampled_from([0.0, 0.25]),
    mode=st.sampled_from(["min", "max"]),
    average=st.booleans(),
    order=st.sampled_from(["current", "2021"]),
)
def test_training_ends_where_patience_ends_and_restored_gives_what_was_best(
    values: list[float], patience: int, unit: str, delta: float, mode: Any, average: bool, order: Any
) -> None:
    """At every event: the parameters that were evaluated, of an average too; of values that aren't finite none is."""
    written = {"evaluations": patience, "ep": f"{patience}ep", "ba": f"{3 * patience}ba"}[unit]
    stopping = A.early_stopping("val/accuracy", patience=written, mode=mode, min_delta=delta)
    seen: list[dict[str, Tensor]] = []
    for event, state in stream([stopping, *[A.ema("2ba")] * average], order=order, **scores(values)):
        if event is Event.EVAL_END:
            seen.append({name: tensor.clone() for name, tensor in state.params.items()})
        _, best, at = expected(values[: len(seen)], 9, delta, mode)
        if "early_stopping" not in state.algorithm_state:
            continue
        if not at:
            what = rf"not finite in any of its {len(seen)} evaluations" if seen else "was not evaluated yet"
            with pytest.raises(pl.errors.ArgumentError, match=f"no best parameters under 'early_stopping': .*{what}"):
                A.restored(state)
        else:
            assert not differences(dict(A.restored(state).params), seen[at - 1], name="")
    end, best, at = expected(values, patience, delta, mode)
    memory = state.algorithm_state["early_stopping"]
    assert (state.timestamp.epoch, memory["since"]["epoch"]) == (end, at)
    assert float(memory["best"]) == pytest.approx(best, nan_ok=True)
    assert state.stop is (end - at >= patience)


def test_training_ends_at_a_threshold() -> None:
    for threshold, mode, epochs in ((0.6, None, 2), (0.55, None, 2), (0.58, "min", 1)):
        algorithm = A.threshold_stopping("val/accuracy", threshold, mode)  # type: ignore[arg-type]
        end = pl.run(stream([algorithm], **scores([0.5, 0.6, 0.59])))
        assert (end.timestamp.epoch, end.stop) == (epochs, True)
    values = scores([0.5, 0.6, 0.59])
    values["evaluators"] = {"train": values["evaluators"]["val"]}
    assert pl.run(stream([A.threshold_stopping("train/accuracy", 0.6)], **values)).timestamp.epoch == 2
    # Two batches are all wrong, and then all are right: 3/5 of five batches, which are one epoch.
    right = pl.metrics.mean(lambda outputs, batch: batch[1].flatten(), "accuracy")
    data = [(torch.zeros(2, 3), torch.full((2, 1), float(number > 1))) for number in range(5)]
    for algorithm, end in (
        (A.threshold_stopping("train/accuracy", 0.5, at="batch"), 4),
        (A.early_stopping("train/accuracy", patience=2), 15),
        (A.early_stopping("train/accuracy", patience=2, interval="2ba"), 8),  # 0/2, 2/4; 0/1, 1/3 in the next
        (A.reduce_on_plateau("train/accuracy", patience=0), 25),
    ):
        settings = {"train_metrics": [right], "optimizer": pl.optim.sgd(lr=0.0), "max_duration": "5ep"}
        state = run(nn.Linear(3, 1), data, [algorithm], loss=functional.mse_loss, **settings)
        assert (state.timestamp.batch, state.stop) == (end, end < 25), algorithm
    assert float(state.lr_scale) == pytest.approx(1e-4)
    by_batch = stream([A.threshold_stopping("train/loss", 0.05, at="batch")])
    losses = [float(state.loss) for event, state in by_batch if event is Event.BATCH_END]
    assert losses[-1] <= 0.05 < min(losses[:-1])


def test_which_values_are_compared_and_what_is_kept() -> None:
    for metric, mode in (
        *(("val/loss", "min"), ("val/perplexity", "min"), ("train/loss/kl", "min")),
        *(("val/accuracy", "max"), ("val/f1/cat", "max")),
    ):
        assert Monitored.read("x", metric, None).mode == mode
    # In mappings metrics have the names under which they are logged.
    level = pl.metrics.Metric("pair", lambda: 0, lambda acc, outputs, batch: acc, lambda acc: {"a": 0.0, "b": 1.0})
    evaluators = {"val": pl.Evaluator(DATA, metrics=[level])}
    assert pl.run(stream([A.threshold_stopping("val/pair/b", 1.0, mode="max")], evaluators=evaluators)).stop
    end = pl.run(stream([A.early_stopping("val/accuracy", best=None)], **scores([0.6, 0.5])))
    assert "params" not in end.algorithm_state["early_stopping"]
    # The mean of the training loss is weighted by samples.
    known = pl.Algorithm("n", {Event.AFTER_LOSS: lambda s: s.replace(loss=s.loss * 0 + float(len(s.microbatch[0])))})
    state = run(None, points(size=(1, 3)), [A.early_stopping("train/loss", patience=5), known], max_duration="1ep")
    assert float(state.algorithm_state["early_stopping"]["best"]) == (1 * 1 + 3 * 3) / 4


EVAL: dict[str, Any] = {"evaluators": {"val": DATA}}
MEASURED = {"train_metrics": [pl.metrics.mean(lambda outputs, batch: (outputs - batch[1]).square(), "mse")]}
# Each ends, or reduces the rate, in the middle of the run.
RUNS: dict[str, tuple[pl.Algorithm, dict[str, Any]]] = {
    "evaluations": (A.early_stopping("val/loss", patience=2, min_delta=0.1), EVAL),
    "within epochs": (A.early_stopping("val/loss", patience="3ba", min_delta=0.1), EVAL | {"eval_interval": "1ba"}),
    "training": (A.early_stopping("train/loss", patience=2, interval="2ba", min_delta=0.1), {}),
    "threshold": (A.threshold_stopping("val/loss", 0.05), EVAL),
    "threshold of batches": (A.threshold_stopping("train/loss", 0.05, at="batch"), {}),
    "metric of training": (A.early_stopping("train/mse", patience=2, interval="2ba", min_delta=0.1), MEASURED),
    "metric of batches": (A.threshold_stopping("train/mse", 0.05, at="batch"), MEASURED),
    "plateau": (A.reduce_on_plateau("val/loss", patience=1, threshold=0.5), EVAL | {"max_duration": "8ep"}),
    "plateau of training": (A.reduce_on_plateau("train/loss", patience=1, threshold=0.5), {"max_duration": "8ep"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_and_a_compiled_one_do_what_the_whole_would_have_done(name: str) -> None:
    algorithm, options = RUNS[name]
    pairs = list(stream([algorithm], donate=False, **options))
    end = pairs[-1][1]
    assert end.stop or (end.lr_scale is not None and end.lr_scale < 1)
    assert 2 < end.timestamp.batch < 60
    positions = [state for event, state in pairs if event in POSITIONS]
    for state in positions[:: len(positions) // 3]:
        assert not differences(pl.run(stream([algorithm], state, **options)), end), state
    with interpreted():
        compiled = pl.run(stream([algorithm], compile=True, **options))
    assert (compiled.timestamp.batch, compiled.lr_scale) == (end.timestamp.batch, end.lr_scale)
    if name == "evaluations":
        later = pl.run(stream([algorithm], end.replace(stop=False), **options))
        assert (later.timestamp.epoch, later.stop) == (end.timestamp.epoch + 1, True)


@pytest.mark.slow  # two processes train
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_two_ranks_come_to_what_one_comes_to(parallel: Any) -> None:
    """Their samples, and with them their losses, differ: one that stopped alone would leave the other waiting."""
    data = [(x, x[:, :1].tanh()) for x, _ in points(2, 8)]
    options: dict[str, Any] = {"loss": functional.mse_loss, "evaluators": {"val": data}, "max_duration": "9ep"}
    options |= MEASURED

    def outcome(name: str, **more: Any) -> Any:
        with pl.random.seeded(0):
            end = run(nn.Linear(4, 1), data, [RUNS[name][0]], strict=False, **options, **more)
        return end.timestamp.batch, end.stop, None if end.lr_scale is None else float(end.lr_scale)

    alone = {name: outcome(name) for name in RUNS}
    assert all(stop or (scale is not None and scale < 1) for _, stop, scale in alone.values()), alone
    assert pool().run(lambda rank: {name: outcome(name, parallel=parallel) for name in RUNS}) == [alone] * 2


@examples(15, 300)
@given(
    values=st.lists(st.sampled_from([0.2, 0.4, 0.40001, 0.5, 0.9]), min_size=1, max_size=12),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 2),
    mode=st.sampled_from(["min", "max"]),
    threshold=st.sampled_from([(1e-4, "rel"), (0.0, "abs"), (0.15, "abs"), (0.3, "rel")]),
    min_scale=st.sampled_from([0.0, 0.03]),
)
def test_the_rate_is_reduced_where_torch_reduces_it(
    values: list[float], patience: int, cooldown: int, mode: Any, threshold: Any, min_scale: float
) -> None:
    settings: dict[str, Any] = {"patience": patience, "cooldown": cooldown, "threshold": threshold[0], "mode": mode}
    settings["threshold_mode"] = threshold[1]
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, min_lr=min_scale, eps=0.0, **settings)
    algorithm = A.reduce_on_plateau("val/accuracy", min_scale=min_scale, **settings)
    pairs = stream([algorithm], watch={Event.EPOCH_CHECKPOINT}, **scores(values))
    scales, wanted = [1.0 if state.lr_scale is None else float(state.lr_scale) for _, state in pairs], []
    for value in values:
        plateau.step(torch.tensor(value))  # type: ignore[arg-type]
        wanted.append(theirs.param_groups[0]["lr"])
    assert scales == pytest.approx(wanted, rel=1e-12)


# Layer freezing

ADAMW: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01, weight_decay=0.1), "max_duration": "4ep"}
ALWAYS = A.layer_freezing(0, at="1ba")


def deep() -> Any:
    """Five layers that own parameters, one of them a BatchNorm."""
    with pl.random.seeded(0):
        layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        return nn.Sequential(*layers)


def trained(*algorithms: pl.Algorithm, model: Any = None, **options: Any) -> pl.State:
    return run(model or deep(), None, algorithms, **ADAMW | options)


@pytest.mark.parametrize(("at", "donate"), [("1ba", True), ("1ep", False)])
def test_what_is_frozen_stays_bit_by_bit(at: Any, donate: bool) -> None:
    """Parameters, moments and statistics; until the start, training is that without."""
    depth, kept, names = 0, {}, A.freezable(deep())
    assert [layer[0] for layer in names] == ["0.weight", "1.weight", "3.weight", "4.weight", "5.weight"]
    assert "1.running_mean" in names[1]
    for event, state in fit(deep(), None, [A.layer_freezing("0.25dur", at=at)], donate=donate, **ADAMW):
        if event is Event.BATCH_END:
            moments = {f"moment {name}": tensor for name, tensor in state.opt_state["exp_avg"].items()}
            now = {**state.params, **state.buffers, **moments}
            frozen = {name for layer in names[:depth] for name in layer} - {"1.num_batches_tracked"}
            for name in {*frozen, *(f"moment {name}" for name in frozen & state.params.keys())}:
                assert torch.equal(now[name], kept[name])
            assert not torch.equal(now["5.weight"], kept.get("5.weight", torch.zeros(3, 6)))
            kept = {name: tensor.clone() for name, tensor in now.items()}
            if state.timestamp.batch == 3:
                equal(state.params, trained(max_duration="3ba").params)
        if event in (Event.BATCH_END, Event.EPOCH_END):
            depth = state.algorithm_state["layer_freezing"]["depth"]
    assert depth == 4


def test_how_many_layers_are_frozen() -> None:
    assert [A.frozen_count(t, 5, 0.0, 0.5) for t in (0.0, 0.5, 1.0)] == [0, 1, 2]
    assert [len(layer) for layer in A.freezable(deep(), lambda name: int(int(name[0]) > 2))] == [7, 6]

    def depths(algorithm: pl.Algorithm, start: Any, **options: Any) -> list[int]:
        pairs = fit(start, None, [algorithm], **ADAMW | options)
        return [s.algorithm_state["layer_freezing"]["depth"] for event, s in pairs if event is Event.BATCH_END]

    found = depths(A.layer_freezing(0, pl.schedules.piecewise({"0ba": 1.0, "8ba": 0.0}), at="1ba"), deep())
    assert (max(found[:7]), found[8:]) == (2, [0] * 4), "with a schedule that falls they train again"
    half = trained(ALWAYS, max_duration="2ep")
    assert set(depths(ALWAYS, half, max_duration="6ep")) == {4}, "a longer duration does not thaw"
    model = deep()
    model[5].requires_grad_(False)
    end = trained(ALWAYS, model=model)
    assert end.algorithm_state["layer_freezing"]["depth"] == 3, "a last layer that is not trained is none"
    assert not {"4.weight", "4.bias"} & end.frozen
    tied: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    tied[2].weight = tied[0].weight
    end = trained(ALWAYS, model=tied)
    assert end.frozen != set(end.model.trainable), "a last layer with the weights of an earlier one is trained"


def test_statistics_of_frozen_layers_and_a_checkpoint_without_names() -> None:
    layers, means = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))], []
    for batchnorm in ("trained", "frozen"):
        algorithm = A.layer_freezing(0, at="1ba", batchnorm=batchnorm)  # type: ignore[arg-type]
        state = trained(algorithm, model=nn.Sequential(*layers, nn.Linear(4, 3)))
        means.append(state.buffers["1.running_mean"])
    assert not torch.equal(*means)
    kept = [*state.algorithm_state["layer_freezing"]["buffers"]]
    assert len(kept) > 6
    assert kept == [name for name in state.buffers if name in kept], "not in the order of a set"
    algorithm, options = A.layer_freezing("0.25dur", at="1ba"), ADAMW | {"max_duration": "8ba"}
    pairs = fit(deep(), None, [algorithm], donate=False, **options)
    states = [state for event, state in pairs if event is Event.BATCH_CHECKPOINT]
    for start in (states[4].replace(frozen=()), states[4]):  # resumed, and from before names were kept
        end = run(start, None, [algorithm], **options)
        for field in ("params", "buffers", "algorithm_state"):
            equal(getattr(end, field), getattr(states[-1], field))
        assert end.frozen == states[-1].frozen != frozenset()


# Selective backprop


def select(keep: Any = 0.5, **settings: Any) -> pl.Algorithm:
    return A.selective_backprop(keep, **{"start": 0, "end": "1dur", "interrupt": 0, **settings})


def test_samples_are_drawn_by_the_ranks_of_their_losses() -> None:
    """By the rank, from 1/2 on, to the power of 1 / keep - 1."""
    losses, g = torch.tensor([4.0, 1.0, 3.0, 2.0]), noise()
    for keep in (0.25, 0.5):
        found, wanted = A.probabilities(losses, keep), (losses - 0.5) ** (1 / keep - 1)
        torch.testing.assert_close(found / found.sum(), wanted / wanted.sum(), atol=1e-4, rtol=0)
    drawn = torch.cat([A.hardest(losses, 0.25, g) for _ in range(4000)])
    found = A.probabilities(losses, 0.25)
    torch.testing.assert_close(drawn.bincount(minlength=4) / 4000, found / found.sum(), atol=0.03, rtol=0)
    assert (torch.stack([A.hardest(losses, 0.75, g) for _ in range(100)]).diff(dim=1) > 0).all()
    assert A.hardest(torch.ones(3), 0.01, g).shape == (1,)


def test_when_samples_are_selected() -> None:
    def sizes(*before: pl.Algorithm, **settings: Any) -> list[int]:
        pairs = list(fit(None, points(batches=4, size=6), [*before, select(**settings)]))
        assert pairs[-1][1].timestamp.sample == 48
        return [len(state.batch[0]) for event, state in pairs if event is Event.BATCH_START]

    assert sizes() == sizes(A.mixup()) == [3] * 8, "it comes before what changes the batch"
    assert sizes(start="0.25dur", end="0.75dur") == [6, 6, 3, 3, 3, 3, 6, 6]
    assert sizes(interrupt=2) == [3, 6, 3, 6] * 2
    assert sizes(interrupt=3) == [3, 3, 6, 3] * 2
    assert sizes(keep=pl.schedules.linear(1.0, 0.5, "3ba"))[:4] == [6, 5, 4, 3]


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_samples_with_large_losses_stay(microbatch_size: Any) -> None:
    """All leaves of a batch are cut; the loss of a sample may be one's own."""
    model = nn.Linear(4, 3)
    data = [{"x": x, "y": y, "id": torch.arange(8)} for x, y in points(25, 8)]
    task = pl.Task(forward=lambda m, b: m(b["x"]), loss=lambda o, b: cross_entropy(o, b["y"]))
    options: dict[str, Any] = {"loss": task, "optimizer": pl.optim.sgd(lr=0.0), "strict": False}
    options |= {"max_duration": "1ep", "microbatch_size": microbatch_size}
    for own in (None, lambda outputs, batch: cross_entropy(outputs, batch["y"], reduction="none")):
        ranks = []
        for event, state in fit(model, data, [select(1 / 8, per_sample_loss=own)], **options):
            if event is Event.BATCH_START:
                batch, index = data[state.timestamp.batch], state.batch["id"]
                equal(dict(state.batch), {key: value[index] for key, value in batch.items()})
                losses = cross_entropy(model(batch["x"]), batch["y"], reduction="none")
                ranks.append(int(losses.argsort().argsort()[index]))
        # The largest of 8 with a probability of 0.63, the second largest with 0.24.
        assert sum(rank >= 6 for rank in ranks) > 16


def test_the_forward_that_selects_leaves_no_trace() -> None:
    """BatchNorm's statistics and dropout's draws are those of training on the samples that stayed."""
    data = images(size=6)
    pairs = list(fit(convnet(), data, [select()], max_duration="3ba"))
    chosen = [state.batch for event, state in pairs if event is Event.BATCH_START]
    by_hand = run(convnet(), chosen, max_duration="3ba")
    equal((by_hand.params, by_hand.buffers), (pairs[-1][1].params, pairs[-1][1].buffers))
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    small = [state for event, state in fit(model, data, [select(scale=0.5)]) if event is Event.BATCH_START]
    assert small[0].batch[0].shape == (3, 3, 12, 12), "scored at a smaller size"
