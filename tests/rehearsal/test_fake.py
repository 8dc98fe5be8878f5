"""Rehearsals on tensors without numbers: no memory, the same mistakes, and the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from tests.rehearsal.rehearsing import DATA, RUN, phases
from tests.rehearsal.rehearsing import rehearse as plainly

E = pl.Event


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


def rehearse(model: Any = None, **options: Any) -> Any:
    return plainly(network() if model is None else model, **{"fake": True} | options)


@pytest.mark.parametrize(
    ("optimizer", "meta"),
    [(pl.optim.adamw(lr=0.1), True), (pl.optim.from_torch(torch.optim.RMSprop, lr=0.1), False)],
    ids=["adamw", "RMSprop"],
)
def test_the_report_is_that_of_tensors_with_numbers(optimizer: Any, meta: bool) -> None:
    options = {
        "optimizer": optimizer,
        "evaluators": {"val": DATA},
        "clip_grad": 1.0,
        "microbatch_size": 2,
        "algorithms": [pl.algorithms.ema(half_life="4ba"), pl.algorithms.sam(rho=0.1)],
        "world_size": 2,
    }
    with torch.device("meta" if meta else "cpu"):
        model = network()
    fake, real = rehearse(model, **options), rehearse(fake=False, **options)
    activations = fake.memory["activations"], real.memory["activations"]
    # On the meta device batch norm keeps no copy of its reserve, and dropout a mask of other numbers.
    assert activations[0] == pytest.approx(activations[1], rel=0.5)
    for found in (fake, real):
        found.memory.pop("activations")
    assert fake.memory == real.memory
    assert fake.batches == real.batches == 12
    assert repr(fake.layers) == repr(real.layers)
    assert [phase.name for phase in fake.phases] == [
        *("places", "data", "schedules", "evaluators", "two steps", "end of the run")
    ]
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
    path = pl.latest(tmp_path)
    skipped = rehearse(load_path=path, autoresume=tmp_path, precision="amp_bf16").skipped
    assert [sentence.partition(":")[0] for sentence in skipped] == [
        *("precision='amp_bf16'", "load_path", "autoresume", "callbacks")
    ]
    assert rehearse(state).batches == 12
    with pytest.raises(pl.errors.ModelError, match="on the meta device"):
        pl.fit(network().to("meta"), DATA, **RUN, max_duration="1ep")
