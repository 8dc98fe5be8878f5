"""Checkpoints of every version of the format that there was load in this one, and are what they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.checkpoint import document
from pure_loop.testing import differences
from tests.checkpoint.test_values import Moments, Pair, Phase, identical
from tests.support.sharding import network, small

GOLDEN = Path(__file__).parent.parent / "golden"


def remarkable() -> pl.State:
    """A State with something of everything, the same in every version."""
    numbers = torch.arange(12, dtype=torch.float32)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = pl.State.create(module, seed=11).replace(
        params={
            "0.weight": numbers[:6].reshape(3, 2),
            "0.bias": numbers[6:9],
            "1.weight": numbers[9:] / 3,
            "1.bias": numbers[:3] / 7,
        },
        buffers={
            "1.running_mean": numbers[:3] / 11,
            "1.running_var": numbers[3:6],
            "1.num_batches_tracked": torch.tensor(5),
        },
        opt_state=pl.FrozenDict(step=torch.tensor(5.0), exp_avg=pl.FrozenDict({"0.weight": numbers[:6].reshape(3, 2)})),
        event=Event.BATCH_CHECKPOINT,
        position=Event.BATCH_CHECKPOINT,
        metrics={"val": pl.FrozenDict(loss=torch.tensor(0.25))},
        algorithm_state={
            "mine": {
                "all": [None, True, 7, 0.1, float("inf"), "text", b"\x00\xff", 2j, (1, 2), {3: "x"}],
                "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
                "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
                "last": numbers.reshape(1, 2, 2, 3).permute(0, 3, 1, 2),
                "pair": Pair(1, Moments(torch.zeros(2), 3)),
                "phase": Phase.COLD,
            }
        },
    )
    now = pl.Timestamp(max_duration=pl.Time("10ba"), batches_per_epoch=4).next_batch(samples=8, tokens=16, seconds=0.5)
    return state.replace(timestamp=now, previous_timestamp=pl.Timestamp(max_duration=pl.Time("10ba")))


@pytest.mark.parametrize("version", range(1, document.FORMAT + 1))
def test_files_and_folders_of_every_version_load(version: int, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    found, wanted = pl.load(GOLDEN / f"format-{version}.safetensors", model=module), remarkable()
    assert not differences(found, wanted, without=frozenset({"algorithm_state"}))
    assert identical(found.algorithm_state["mine"], wanted.algorithm_state["mine"])
    assert (found.timestamp, found.event, found.position) == (wanted.timestamp, wanted.event, wanted.position)
    in_parts = pl.load(GOLDEN / f"format-{version}.sharded", model=network())
    assert not differences(in_parts, small(tmp_path / "now.sharded", batch=2))


def test_there_are_files_of_every_version() -> None:
    wanted = {f"format-{v}.{kind}" for v in range(1, document.FORMAT + 1) for kind in ("safetensors", "sharded")}
    assert {path.name for path in GOLDEN.iterdir()} == wanted
    assert set(document.UPGRADES) == set(range(1, document.FORMAT))


def write_golden() -> None:
    """Run once, where a version of the format is new.

    ``python -c "import tests.checkpoint.test_formats as t; t.write_golden()"``
    """
    writers = {"safetensors": lambda path: pl.save(remarkable(), path), "sharded": lambda path: small(path, batch=2)}
    for kind, write in writers.items():
        target = GOLDEN / f"format-{document.FORMAT}.{kind}"
        if not target.exists():  # files of the past are not written anew
            write(target)
