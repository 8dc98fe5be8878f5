"""Algorithms that end a run, change its rate, or train on less: stopping, plateaus, freezing, selective backprop."""

from __future__ import annotations

import copy
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
from tests.algorithms.layers import deep
from tests.support.problem import convnet, cross_entropy, fit, images, noise, points, run
from tests.support.sharding import whole
from tests.support.streams import assert_same, equal
from tests.support.tiers import examples
from tests.support.worlds import pool

DATA = [(torch.full((2, 3), 0.1 * i), torch.ones(2, 1)) for i in range(1, 4)]


def scores(values: list[float]) -> pl.Evaluator:
    """An evaluator whose accuracy has these values, one evaluation after the other."""
    following = iter([*values, *values[-1:] * 20])
    made = pl.metrics.Metric("accuracy", lambda: 0, lambda acc, outputs, batch: acc, lambda acc: next(following))
    return pl.Evaluator(DATA[:1], metrics=[made])


def stream(algorithms: Any, start: Any = None, **settings: Any) -> pl.Stream:
    with pl.random.seeded(0):
        model = nn.Linear(3, 1)
    optimizer = pl.optim.sgd(lr=0.1, momentum=0.9)
    options = {"max_duration": "20ep", "optimizer": optimizer, "loss": functional.mse_loss, "strict": False, **settings}
    return fit(model if start is None else start, DATA, algorithms, **options)


# Metrics that are compared


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"patience": 2}, 4),
        ({"patience": "2ep"}, 4),
        ({"patience": "6ba"}, 4),
        ({"patience": 1}, 3),
        ({"patience": 2, "min_delta": 0.2}, 3),
        ({"patience": 9}, 5),
    ],
    ids=str,
)
def test_training_ends_where_patience_ends(settings: dict[str, Any], epochs: int) -> None:
    for order in ("current", "2021"):
        evaluators = {"val": scores([0.5, 0.6, 0.59, 0.58, 0.57])}
        algorithm, end = A.early_stopping("val/accuracy", **settings), None
        end = pl.run(stream([algorithm], evaluators=evaluators, order=order, max_duration="5ep"))
        best, at = (0.5, 1) if "min_delta" in settings else (0.6, 2)
        memory = end.algorithm_state["early_stopping"]
        assert (end.timestamp.epoch, end.stop) == (epochs, settings["patience"] != 9)
        assert (float(memory["best"]), memory["since"]["epoch"]) == (pytest.approx(best), at)


def test_training_ends_at_a_threshold() -> None:
    for threshold, mode, epochs in ((0.6, None, 2), (0.55, None, 2), (0.58, "min", 1)):
        algorithm = A.threshold_stopping("val/accuracy", threshold, mode)  # type: ignore[arg-type]
        end = pl.run(stream([algorithm], evaluators={"val": scores([0.5, 0.6, 0.59])}))
        assert (end.timestamp.epoch, end.stop) == (epochs, True)
    by_batch = stream([A.threshold_stopping("train/loss", 0.05, at="batch")])
    losses = [float(state.loss) for event, state in by_batch if event is Event.BATCH_END]
    assert losses[-1] <= 0.05 < min(losses[:-1])


VALUES = st.sampled_from([math.nan, math.inf, -math.inf]) | st.sampled_from([0.25, 0.5, 0.75])


@examples(15, 300)
@given(st.lists(VALUES, min_size=1, max_size=4), st.sampled_from(["min", "max"]), st.booleans())
def test_restored_gives_what_was_best_or_says_that_there_is_none(values: list[float], mode: Any, average: bool) -> None:
    """At every event: the parameters that were evaluated, of an average too; of values that aren't finite none is."""
    algorithms = [A.early_stopping("val/accuracy", mode=mode, patience=100), *[A.ema("2ba")] * average]
    seen: list[tuple[float, dict[str, Tensor]]] = []
    options: dict[str, Any] = {"evaluators": {"val": scores(values)}, "max_duration": f"{len(values)}ep"}
    for event, state in stream(algorithms, **options):
        if event is Event.EVAL_END:
            seen.append((values[len(seen)], {name: tensor.clone() for name, tensor in state.params.items()}))
        finite = [value for value, _ in seen if math.isfinite(value)]
        if "early_stopping" not in state.algorithm_state:
            continue
        if not finite:
            what = rf"not finite in any of its {len(seen)} evaluations" if seen else "was not evaluated yet"
            with pytest.raises(pl.ArgumentError, match=f"no best parameters under 'early_stopping': .*{what}"):
                A.restored(state)
        else:
            best = max(finite) if mode == "max" else min(finite)
            expected = next(params for value, params in seen if value == best)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in A.restored(state).params.items())


def test_which_values_are_compared_and_what_is_kept() -> None:
    def mode(metric: str, given: Any = None) -> str:
        return Monitored.read("x", metric, given).mode

    assert [mode(f"val/{name}") for name in ("loss", "perplexity", "accuracy", "f1/cat")] == [
        *["min"] * 2,
        *["max"] * 2,
    ]
    assert (mode("train/loss/kl"), mode("val/loss", "max")) == ("min", "max")
    # In mappings metrics have the names under which they are logged.
    level = pl.metrics.mean(lambda outputs, batch: outputs.mean(dim=1), "level")
    pair = pl.metrics.Metric(
        "pair", level.init, level.update, lambda acc: {"a": level.compute(acc), "b": torch.ones(())}
    )
    evaluators = {"val": pl.Evaluator(DATA, metrics=[pair])}
    assert pl.run(stream([A.threshold_stopping("val/pair/b", 1.0, mode="max")], evaluators=evaluators)).stop
    end = pl.run(stream([A.early_stopping("val/accuracy", best=None)], evaluators={"val": scores([0.6, 0.5])}))
    assert "params" not in end.algorithm_state["early_stopping"]
    # The mean of the training loss is weighted by samples.
    known = pl.Algorithm(
        "known", {Event.AFTER_LOSS: lambda s: s.replace(loss=s.loss * 0 + float(len(s.microbatch[0])))}
    )
    algorithms = [A.early_stopping("train/loss", patience=5), known]
    state = run(None, points(size=(1, 3)), algorithms, max_duration="1ep")
    assert float(state.algorithm_state["early_stopping"]["best"]) == (1 * 1 + 3 * 3) / 4


EVAL = {"evaluators": {"val": DATA}}
# Each ends, or reduces the rate, in the middle of the run.
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "evaluations": (lambda: A.early_stopping("val/loss", patience=2, min_delta=0.1), EVAL),
    "within epochs": (
        lambda: A.early_stopping("val/loss", patience="3ba", min_delta=0.1),
        {**EVAL, "eval_interval": "1ba"},
    ),
    "training": (lambda: A.early_stopping("train/loss", patience=2, interval="2ba", min_delta=0.1), {}),
    "threshold": (lambda: A.threshold_stopping("val/loss", 0.05), EVAL),
    "threshold of batches": (lambda: A.threshold_stopping("train/loss", 0.05, at="batch"), {}),
    "plateau": (lambda: A.reduce_on_plateau("val/loss", patience=1, threshold=0.5), {**EVAL, "max_duration": "8ep"}),
    "plateau of training": (
        lambda: A.reduce_on_plateau("train/loss", patience=1, threshold=0.5),
        {"max_duration": "8ep"},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_and_a_compiled_one_do_what_the_whole_would_have_done(name: str) -> None:
    make, options = RUNS[name]
    pairs = list(stream([make()], donate=False, **options))
    end = pairs[-1][1]
    assert end.stop or (end.lr_scale is not None and end.lr_scale < 1)
    assert 2 < end.timestamp.batch < 60
    positions = [state for event, state in pairs if event in POSITIONS]
    for state in positions[:: len(positions) // 5]:
        assert not differences(pl.run(stream([make()], state, **options)), end), state
    with interpreted():
        compiled = pl.run(stream([make()], compile=True, **options))
    assert (compiled.timestamp.batch, compiled.lr_scale) == (end.timestamp.batch, end.lr_scale)
    if name == "evaluations":
        later = pl.run(stream([make()], end.replace(stop=False), **options))
        assert (later.timestamp.epoch, later.stop) == (end.timestamp.epoch + 1, True)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_two_ranks_come_to_what_one_comes_to(parallel: Any) -> None:
    """Two processes whose samples and losses differ; from a kept State, too."""
    with pl.random.seeded(0):
        batches = [torch.randn(8, 3).double() for _ in range(2)]
        model = nn.Linear(3, 1).double()
    data = [(x, x.sum(1, keepdim=True).tanh()) for x in batches]
    names = {name: make() for name, (make, _) in RUNS.items() if name != "within epochs"}
    names["threshold"], names["threshold of batches"] = (
        A.threshold_stopping(metric, 0.18, at=at)  # type: ignore[arg-type]
        for metric, at in (("val/loss", "eval"), ("train/loss", "batch"))
    )

    def going(algorithm: pl.Algorithm, start: Any = model, **options: Any) -> pl.Stream:
        settings = {"loss": functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "strict": False}
        return fit(start, data, [algorithm], evaluators={"val": data}, max_duration="9ep", **settings, **options)

    def outcome(state: pl.State) -> Any:
        return state.timestamp.batch, state.stop, None if state.lr_scale is None else float(state.lr_scale)

    def program(rank: int) -> Any:
        found = {}
        for name, algorithm in names.items():
            pairs = list(going(algorithm, parallel=parallel, donate=False))
            kept = next(s for e, s in pairs if e is Event.BATCH_END and s.timestamp.batch == 2)
            end, losses = whole(pairs[-1][1]), {float(s.loss) for e, s in pairs if e is Event.AFTER_BACKWARD}
            assert_same(whole(pl.run(going(algorithm, kept, parallel=parallel))), end, name)
            found[name] = outcome(pairs[-1][1]), losses
        return found

    ranks = pool().run(program)
    for name, algorithm in names.items():
        (first, losses), (second, others) = (rank[name] for rank in ranks)
        assert first == second == outcome(pl.run(going(algorithm)))
        assert losses.isdisjoint(others), "the samples, and losses of backward passes, differ"
        assert first[1] or (first[2] is not None and first[2] < 1), name


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
    options: dict[str, Any] = {"evaluators": {"val": scores(values)}, "max_duration": f"{len(values)}ep"}
    pairs = stream([algorithm], watch={Event.EPOCH_CHECKPOINT}, **options)
    scales, wanted = [1.0 if state.lr_scale is None else float(state.lr_scale) for _, state in pairs], []
    for value in values:
        plateau.step(torch.tensor(value))  # type: ignore[arg-type]
        wanted.append(theirs.param_groups[0]["lr"])
    assert scales == pytest.approx(wanted, rel=1e-12)


def test_a_run_is_that_of_torchs_scheduler_in_a_loop_by_hand() -> None:
    g = noise()
    data, val = ([(torch.randn(4, 3, generator=g), torch.randn(4, 2, generator=g)) for _ in range(2)] for _ in range(2))
    with pl.random.seeded(0):
        model = nn.Linear(3, 2)
    by_hand, mse = copy.deepcopy(model), functional.mse_loss
    reference = torch.optim.SGD(by_hand.parameters(), lr=0.8, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(reference, factor=0.5, patience=1)
    for _ in range(12):
        for inputs, targets in data:
            reference.zero_grad()
            mse(by_hand(inputs), targets).backward()
            reference.step()
        with torch.no_grad():
            scheduler.step(sum(mse(by_hand(x), y) for x, y in val) / 2)  # type: ignore[arg-type]
    assert scheduler.get_last_lr()[0] < 0.5, "the case reduces the rate"
    evaluators = {"val": pl.Evaluator(val, metrics=[pl.metrics.loss()])}
    options: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.8, momentum=0.5), "max_duration": "12ep", "loss": mse}
    end = run(model, data, [A.reduce_on_plateau("val/loss", factor=0.5, patience=1)], evaluators=evaluators, **options)
    torch.testing.assert_close(dict(end.params), dict(by_hand.named_parameters()), rtol=1e-5, atol=1e-6)


# Layer freezing

ADAMW: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01, weight_decay=0.1), "max_duration": "4ep"}
SIX = points(size=6)


@pytest.mark.parametrize(("at", "donate"), [("1ba", True), ("1ep", False)])
def test_what_is_frozen_stays_bit_by_bit(at: Any, donate: bool) -> None:
    """Parameters, moments and statistics; until the start, training is that without."""
    depth, kept, names = 0, {}, A.freezable(deep())
    assert [layer[0] for layer in names] == ["0.weight", "1.weight", "3.weight", "4.weight", "5.weight"]
    assert "1.running_mean" in names[1]
    for event, state in fit(deep(), SIX, [A.layer_freezing("0.25dur", at=at)], donate=donate, **ADAMW):
        if event is Event.BATCH_END:
            moments = {f"moment {name}": tensor for name, tensor in state.opt_state["exp_avg"].items()}
            now = {**state.params, **state.buffers, **moments}
            for name in {name for layer in names[:depth] for name in layer} - {"1.num_batches_tracked"}:
                assert torch.equal(now[name], kept[name])
                assert name in state.buffers or torch.equal(moments[f"moment {name}"], kept[f"moment {name}"])
            assert not torch.equal(now["5.weight"], kept.get("5.weight", torch.zeros(3, 6)))
            kept = {name: tensor.clone() for name, tensor in now.items()}
            if state.timestamp.batch == 3:
                equal(state.params, run(deep(), SIX, **{**ADAMW, "max_duration": "3ba"}).params)
        if event in (Event.BATCH_END, Event.EPOCH_END):
            depth = state.algorithm_state["layer_freezing"]["depth"]
    assert depth == 4


def test_how_many_layers_are_frozen() -> None:
    assert [A.frozen_count(t, 5, 0.5) for t in (0.5, 0.6, 0.75, 0.9, 1.0)] == [0, 0, 2, 3, 4]
    assert [A.frozen_count(t, 5, 0.0, 0.5) for t in (0.0, 0.5, 1.0)] == [0, 1, 2]
    assert [len(layer) for layer in A.freezable(deep(), lambda name: int(int(name[0]) > 2))] == [7, 6]

    def depths(algorithm: pl.Algorithm, start: Any = None, **options: Any) -> list[int]:
        pairs = fit(start or deep(), SIX, [algorithm], **{**ADAMW, **options})
        return [s.algorithm_state["layer_freezing"]["depth"] for event, s in pairs if event is Event.BATCH_END]

    found = depths(A.layer_freezing(0, pl.schedules.piecewise({"0ba": 1.0, "8ba": 0.0}), at="1ba"))
    assert (max(found[:7]), found[8:]) == (2, [0] * 4), "with a schedule that falls they train again"
    always = A.layer_freezing(0, at="1ba")
    half = run(deep(), SIX, [always], **{**ADAMW, "max_duration": "2ep"})
    assert set(depths(always, half, max_duration="20ep")) == {4}, "a longer duration does not thaw"
    model: Any = deep()
    model[5].requires_grad_(False)
    end = run(model, SIX, [always], **ADAMW)
    assert end.algorithm_state["layer_freezing"]["depth"] == 3, "a last layer that is not trained is none"
    assert not {"4.weight", "4.bias"} & end.frozen
    tied: Any = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    )
    tied[3].weight = tied[0].weight
    end = run(tied, SIX, [always], **ADAMW)
    assert end.frozen != set(end.model.trainable), "a last layer with the weights of an earlier one is trained"


def test_statistics_of_frozen_layers_and_a_checkpoint_without_names() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))]
    means = []
    for batchnorm in ("frozen", "trained"):
        algorithm = A.layer_freezing(0, at="1ba", batchnorm=batchnorm)  # type: ignore[arg-type]
        state = run(nn.Sequential(*layers, nn.Linear(4, 3)), SIX, [algorithm], **ADAMW)
        means.append(state.buffers["1.running_mean"])
        if batchnorm == "frozen":
            kept = list(state.algorithm_state["layer_freezing"]["buffers"])
            assert len(kept) > 6
            assert kept == [name for name in state.buffers if name in kept], "not in the order of a set"
    assert not torch.equal(*means)
    algorithm, options = A.layer_freezing("0.25dur", at="1ba"), {**ADAMW, "max_duration": "8ba"}
    states = [
        s for event, s in fit(deep(), SIX, [algorithm], donate=False, **options) if event is Event.BATCH_CHECKPOINT
    ]
    assert states[4].frozen
    old, new = (run(state, SIX, [algorithm], **options) for state in (states[4].replace(frozen=()), states[4]))
    for end in (old, new):  # resumed, and from before names were kept
        equal(
            (end.params, end.buffers, end.algorithm_state),
            (states[-1].params, states[-1].buffers, states[-1].algorithm_state),
        )
        assert end.frozen == states[-1].frozen


# Selective backprop


def test_samples_are_drawn_by_the_ranks_of_their_losses() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    for chosen, keep, wanted in (
        (losses, 0.5, [1 / 16, 3 / 16, 5 / 16, 7 / 16]),
        (losses[:3], 1 / 3, [0.0286, 0.2571, 0.7143]),
    ):
        found = A.probabilities(chosen, keep)
        torch.testing.assert_close(found / found.sum(), torch.tensor(wanted).double(), atol=1e-4, rtol=0)
    losses, g = torch.tensor([4.0, 1.0, 3.0, 2.0]), noise()
    drawn = torch.cat([A.hardest(losses, 0.25, g) for _ in range(8000)])
    share = A.probabilities(losses, 0.25)
    torch.testing.assert_close(drawn.bincount(minlength=4) / 8000, share / share.sum(), atol=0.02, rtol=0)
    assert (torch.stack([A.hardest(losses, 0.75, g) for _ in range(100)]).diff(dim=1) > 0).all()
    assert A.hardest(torch.ones(3), 0.01, g).shape == (1,)


def test_when_samples_are_selected() -> None:
    data = points(batches=4, size=6)

    def sizes(*before: pl.Algorithm, **settings: Any) -> list[int]:
        algorithm = A.selective_backprop(**{"keep": 0.5, "start": 0, "end": "1dur", "interrupt": 0, **settings})
        pairs = list(fit(None, data, [*before, algorithm]))
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
    g, model = noise(), nn.Linear(4, 3)
    data = [
        {"x": torch.randn(8, 4, generator=g), "y": torch.randint(3, (8,), generator=g), "id": torch.arange(8)}
        for _ in range(25)
    ]
    task = pl.Task(forward=lambda m, b: m(b["x"]), loss=lambda o, b: cross_entropy(o, b["y"]))
    options: dict[str, Any] = {"task": task, "loss": None, "optimizer": pl.optim.sgd(lr=0.0), "strict": False}
    for own in (None, lambda outputs, batch: cross_entropy(outputs, batch["y"], reduction="none")):
        algorithm = A.selective_backprop(1 / 8, start=0, end="1dur", interrupt=0, per_sample_loss=own)
        pairs, ranks = fit(model, data, [algorithm], max_duration="1ep", microbatch_size=microbatch_size, **options), []
        for event, state in pairs:
            if event is Event.BATCH_START:
                batch, index = data[state.timestamp.batch], state.batch["id"]
                assert len(state.batch["x"]) == len(state.batch["y"]) == 1
                assert torch.equal(state.batch["x"], batch["x"][index])
                losses = cross_entropy(model(batch["x"]), batch["y"], reduction="none")
                ranks.append(int(losses.argsort().argsort()[index]))
        # The largest of 8 with a probability of 0.63, the second largest with 0.24.
        assert sum(rank >= 6 for rank in ranks) > 16


def test_the_forward_that_selects_leaves_no_trace() -> None:
    """BatchNorm's statistics and dropout's draws are those of training on the samples that stayed."""
    algorithm, data = A.selective_backprop(0.5, start=0, end="1dur", interrupt=0), images(size=6)
    pairs = list(fit(convnet(), data, [algorithm], max_duration="3ba"))
    chosen = [state.batch for event, state in pairs if event is Event.BATCH_START]
    by_hand = run(convnet(), chosen, max_duration="3ba")
    equal((by_hand.params, by_hand.buffers), (pairs[-1][1].params, pairs[-1][1].buffers))
    small = A.selective_backprop(0.5, start=0, end="1dur", interrupt=0, scale=0.5)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    for event, state in fit(model, data, [small], max_duration="1ba"):
        assert event is not Event.BATCH_START or state.batch[0].shape == (3, 3, 12, 12), "scored at a smaller size"
