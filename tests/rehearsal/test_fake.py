"""Rehearsals on tensors without numbers, and of many ranks on one: no memory, the same mistakes, bytes and calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pure_loop as pl
from pure_loop._internal.torch_private import fake_ranks
from tests.rehearsal.test_rehearse import DATA, RUN, phases
from tests.rehearsal.test_rehearse import rehearse as plainly

E = pl.Event


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


def rehearse(model: Any = None, **options: Any) -> Any:
    return plainly(network() if model is None else model, **{"fake": True} | options)


def test_the_report_is_that_of_tensors_with_numbers() -> None:
    algorithms = [pl.algorithms.ema(half_life="4ba"), pl.algorithms.sam(rho=0.1)]
    options = {"evaluators": {"val": DATA}, "clip_grad": 1.0, "microbatch_size": 2, "algorithms": algorithms}
    rmsprop = pl.optim.from_torch(torch.optim.RMSprop, lr=0.1)
    for optimizer, device in ((pl.optim.adamw(lr=0.1), "meta"), (rmsprop, "cpu")):
        with torch.device(device):
            model = network()
        options |= {"optimizer": optimizer, "world_size": 2}
        fake, real = rehearse(model, **options), rehearse(fake=False, **options)
        activations = fake.memory.pop("activations"), real.memory.pop("activations")
        # On the meta device batch norm keeps no copy of its reserve, and dropout a mask of other numbers.
        assert activations[0] == pytest.approx(activations[1], rel=0.5)
        assert fake.memory == real.memory
        assert fake.batches == real.batches == 12
        assert repr(fake.layers) == repr(real.layers)
        names = "places, data, schedules, evaluators, two steps, end of the run"
        assert ", ".join(phase.name for phase in fake.phases) == names
        assert fake.skipped == ("callbacks: fake=True.",)


def test_nothing_is_allocated_for_a_model_that_is_too_large() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 1_000_000), nn.Linear(1_000_000, 1_000_000), nn.Linear(1_000_000, 2))
    report = rehearse(model, parallel="shard", world_size=1000)
    assert report.memory["parameters"] > 4e12
    assert report.memory_per_rank["parameters"] == pytest.approx(report.memory["parameters"] / 1000, rel=0.01)


def test_mistakes_are_found() -> None:
    wrong = [(torch.zeros(4, 5), torch.zeros(4, dtype=torch.long))]

    @pl.algorithm(E.BATCH_END)
    def broken(state: pl.State) -> pl.State:
        return state.replace(params={name: tensor[:1] for name, tensor in state.params.items()})

    for options, phase in (
        ({"evaluators": {"val": wrong}}, "evaluator 'val', first batch, forward"),
        ({"algorithms": [broken]}, "algorithm 'broken' at BATCH_END"),
        ({"load_path": "missing.safetensors"}, "load_path"),
        ({"precision": "amp_fp9"}, "arguments of fit"),
    ):
        assert phases(network(), fake=True, **options) == [phase]


def test_what_needs_numbers_is_no_failure() -> None:
    @pl.algorithm(E.AFTER_LOSS)
    def reading(state: pl.State) -> pl.State:
        return state if float(state.loss) > 1 else state.replace()

    class Branching(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs if inputs.sum() > 0 else -inputs)

    (sentence, _) = sorted(rehearse(algorithms=[reading]).skipped)
    assert "algorithm 'reading' at AFTER_LOSS: it needs numbers" in sentence
    skipped = rehearse(Branching(3, 2), evaluators={"val": DATA}).skipped
    assert any("evaluator 'val', first batch, forward: it needs numbers" in text for text in skipped)
    assert any("forward, batch 0: it needs numbers" in text for text in skipped)


def test_checkpoints_and_precision_are_not_tried(tmp_path: Path) -> None:
    state = pl.run(pl.fit(network(), DATA, **RUN, max_duration="1ep", autoresume=tmp_path))
    path = pl.latest_path(tmp_path)
    skipped = rehearse(load_path=path, autoresume=tmp_path, precision="amp_bf16").skipped
    assert [sentence.partition(":")[0] for sentence in skipped] == [
        *("precision='amp_bf16'", "load_path", "autoresume", "callbacks")
    ]
    assert rehearse(state).batches == 12
    with pytest.raises(pl.errors.ModelError, match="on the meta device"):
        pl.evaluate(network().to("meta"), DATA, loss=RUN["loss"])


# The collectives of a step on many ranks, counted on one.

LAYERS = 3
WIDE = [(torch.ones(16, 64), torch.zeros(16, 64))] * 4
BYTES = 4 * LAYERS * 64 * 65  # of the gradients


def counted(parallel: Any, world_size: int = 8, model: Any = None, **options: Any) -> Any:
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(LAYERS)]) if model is None else model
    given = {"loss": nn.functional.mse_loss, "parallel": parallel, "world_size": world_size, **options}
    return plainly(layers, WIDE, **given)


def test_replicated_ranks_average_their_gradients() -> None:
    for world_size in (2, 64):
        stopping = [pl.algorithms.early_stopping("val/loss")]
        report = counted("replicate", world_size, evaluators={"val": WIDE}, algorithms=stopping)
        assert report.collectives == {"all-reduce": (2, BYTES + 4)}  # the gradients in one bucket, and the loss
        assert "2 all-reduce of 48.8 KiB in all" in repr(report)


def test_sharded_ranks_gather_parameters_and_scatter_gradients() -> None:
    plain = counted("shard").collectives
    assert plain["reduce-scatter"] == (LAYERS, BYTES)
    gathered, size = plain["all-gather"]
    assert LAYERS <= gathered <= 2 * LAYERS
    assert BYTES <= size <= 2 * BYTES
    assert counted("shard", microbatch_size=1).collectives["all-gather"] == (2 * gathered, 2 * size)
    assert counted("shard", clip_grad=1.0).collectives["all-reduce"][0] == plain["all-reduce"][0] + 1


class Odd(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized():
            raise LookupError("alone")
        return super().forward(inputs)


def test_what_is_not_counted_is_no_failure_and_a_process_group_is_left_alone() -> None:
    assert counted(None).collectives is None
    assert counted("shard", 1).collectives is None
    assert "collectives: fake=True." in counted("shard", fake=True).skipped
    (sentence,) = counted("shard", model=Odd(64, 64)).skipped
    assert sentence == "collectives: they could not be counted (LookupError: alone)."
    assert not dist.is_initialized()
    with fake_ranks(1):
        group = dist.group.WORLD
        assert "collectives: this process has a process group." in counted("shard").skipped
        assert dist.group.WORLD is group
