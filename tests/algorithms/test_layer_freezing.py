"""Layer freezing, in real training loops: what is frozen stays, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import freezable, frozen_count, layer_freezing
from tests.support.runs import equal, points, stream, train
from tests.support.worlds import pool


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        return nn.Sequential(*layers)


ADAMW: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01, weight_decay=0.1), "max_duration": "4ep"}


def test_how_many_are_frozen() -> None:
    assert [frozen_count(t, 5, 0.5) for t in (0.5, 0.6, 0.75, 0.9, 1.0)] == [0, 0, 2, 3, 4]
    assert [frozen_count(t, 5, 0.0, 0.5) for t in (0.0, 0.5, 1.0)] == [0, 1, 2]
    assert frozen_count(1.0, 5, 1.0) == 4


def test_layers_and_their_names() -> None:
    named = freezable(net())
    assert [layer[0] for layer in named] == ["0.weight", "1.weight", "3.weight", "4.weight", "5.weight"]
    assert "1.running_mean" in named[1]
    halves = freezable(net(), lambda name: int(int(name[0]) > 2))
    assert [len(layer) for layer in halves] == [7, 6]


@pytest.mark.parametrize("at", ["1ba", "1ep"])
@pytest.mark.parametrize("donate", [True, False])
def test_what_is_frozen_stays(at: Any, donate: bool) -> None:
    algorithm = layer_freezing("0.25dur", at=at)
    depth, kept = 0, {}
    for event, state in stream(net(), points(size=6), [algorithm], donate=donate, **ADAMW):
        if event is Event.BATCH_END:
            frozen = {name for layer in freezable(net())[:depth] for name in layer}
            moments = state.opt_state["exp_avg"]
            for name in frozen:
                if name in state.params:
                    assert torch.equal(state.params[name], kept[name])
                    assert torch.equal(moments[name], kept["moment " + name])
                elif name != "1.num_batches_tracked":
                    assert torch.equal(state.buffers[name], kept[name])
            assert not torch.equal(state.params["5.weight"], kept.get("5.weight", torch.zeros(3, 6)))
            kept = {name: tensor.clone() for name, tensor in {**state.params, **state.buffers}.items()}
            kept |= {"moment " + name: tensor.clone() for name, tensor in moments.items()}
        if event in (Event.BATCH_END, Event.EPOCH_END):
            depth = state.algorithm_state["layer_freezing"]["depth"]
    assert depth == 4


def test_training_until_the_start_is_that_without() -> None:
    plain = train(net(), points(size=6), max_duration="6ba")
    for event, state in stream(net(), points(size=6), [layer_freezing("6ba", at="1ba")], max_duration="24ba"):
        if event is Event.BATCH_END and state.timestamp.batch == 6:
            equal(state.params, plain.params)


def test_batchnorm_may_follow_the_data() -> None:
    def mean(batchnorm: Any) -> torch.Tensor:
        algorithm = layer_freezing(0, at="1ba", batchnorm=batchnorm)
        return train(net(), points(size=6), [algorithm], **ADAMW).buffers["1.running_mean"]

    assert not torch.equal(mean("frozen"), mean("trained"))


def test_buffers_are_kept_in_the_order_of_the_model() -> None:
    """And not in that of a set of names, which is another one in each process."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(2, 2), nn.BatchNorm1d(2))]
    data = [(torch.randn(4, 2), torch.randn(4, 1))] * 4
    state = pl.run(
        pl.fit(
            nn.Sequential(*layers, nn.Linear(2, 1)),
            data,
            loss=nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ep",
            algorithms=[layer_freezing(0, at="1ba")],
        )
    )
    kept = list(state.algorithm_state["layer_freezing"]["buffers"])
    assert len(kept) > 6
    assert kept == [name for name in state.buffers if name in kept]


def test_layers_train_again_with_a_schedule_that_falls() -> None:
    up_and_down = pl.schedules.piecewise({"0ba": 1.0, "8ba": 0.0})
    algorithm = layer_freezing(0, up_and_down, at="1ba")
    depths = [
        state.algorithm_state["layer_freezing"]["depth"]
        for event, state in stream(net(), points(size=6), [algorithm], **ADAMW)
        if event is Event.BATCH_END
    ]
    assert max(depths[:7]) == 2
    assert depths[8:] == [0] * 4
    # A longer duration does not thaw.
    half = train(net(), points(size=6), [layer_freezing(0, at="1ba")], **{**ADAMW, "max_duration": "2ep"})
    longer = stream(half, points(size=6), [layer_freezing(0, at="1ba")], **{**ADAMW, "max_duration": "20ep"})
    assert {s.algorithm_state["layer_freezing"]["depth"] for _, s in longer} == {4}


def test_it_resumes(tmp_path: Path) -> None:
    def run(**options: Any) -> Any:
        return stream(net(), points(size=6), [layer_freezing("0.25dur", at="1ba")], **ADAMW, **options)

    whole = pl.run(run())
    for event, state in run():
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch in (2, 7):
            pl.save(state, tmp_path / f"{state.timestamp.batch}.safetensors")
    for batch in (2, 7):
        resumed = pl.run(run(load_path=tmp_path / f"{batch}.safetensors"))
        equal(resumed.params, whole.params)
        equal(resumed.buffers, whole.buffers)
        equal(resumed.algorithm_state, whole.algorithm_state)


def on_a_rank(rank: int) -> dict[str, torch.Tensor]:
    algorithm, options = layer_freezing(0, at="1ba"), {"parallel": "replicate", **ADAMW}
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)
    state = train(nn.Sequential(*layers), points(size=6), [algorithm], seed=0, **options)
    return {name: tensor.detach().clone() for name, tensor in state.params.items()}


@pytest.mark.slow
def test_two_ranks() -> None:
    """Gradients that are None on both after they were averaged."""
    one, two = pool().run(on_a_rank)
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name])


def test_what_is_refused() -> None:
    with pytest.raises(pl.ModelError, match="has 1 layer with parameters that are trained, and the last"):
        train(nn.Linear(4, 3), points(), [layer_freezing()])
    with pytest.raises(pl.ArgumentError, match="goes by the clock"):
        layer_freezing("10s")
    with pytest.raises(pl.ArgumentError, match="level"):
        layer_freezing(level=1.5)
    with pytest.raises(pl.ArgumentTypeError, match="is not a function of a parameter's name"):
        layer_freezing(layers=3)  # type: ignore[arg-type]


def test_a_checkpoint_from_before_names_were_kept_resumes_frozen() -> None:
    run: dict[str, Any] = {**ADAMW, "max_duration": "8ba"}
    algorithm = layer_freezing("0.25dur", at="1ba")
    kept = next(
        state
        for event, state in stream(net(), points(size=6), [algorithm], **run)
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 5
    )
    assert kept.frozen
    old, new = (train(state, points(size=6), [algorithm], **run) for state in (kept.replace(frozen=()), kept))
    equal(old.params, new.params)
    assert old.frozen == new.frozen


def test_a_last_layer_that_is_not_trained_is_no_layer() -> None:
    model = net()
    model[5].requires_grad_(False)  # type: ignore[index, operator]
    end = train(model, points(size=6), [layer_freezing(0, at="1ba")], **ADAMW)
    assert end.algorithm_state["layer_freezing"]["depth"] == 3
    assert not {"4.weight", "4.bias"} & end.frozen


def test_a_last_layer_with_the_weights_of_an_earlier_one_is_trained() -> None:
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    end = train(
        nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4, bias=False), last),
        points(size=6),
        [layer_freezing(0, at="1ba")],
        **ADAMW,
    )
    assert end.frozen != set(end.model.trainable)
