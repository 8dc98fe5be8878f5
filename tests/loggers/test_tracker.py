"""The base of trackers, with a service that only notes what it is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.loggers._entry import Entry
from pure_loop.loggers._tracker import Tracker

DATA = [(torch.ones(4, 2), torch.zeros(4, 1))] * 2


class Notebook(Tracker):
    prefix, service, own_options = "noted", "noted.start", ("id",)

    def __init__(self, folder: Path, *, fails: bool = False) -> None:
        super().__init__(folder, (), None, include=None, exclude=None, flush="1ba")
        self.fails = fails
        self.begun: list[str] = []
        self.names: set[str] = set()

    def connect(self, run_id: str) -> None:
        assert json.loads((self.folder / "noted_run.json").read_text())["id"] == run_id
        self.begun.append(run_id)
        if self.fails:
            raise OSError("no route to the service")

    def pass_on(self, entries: Sequence[Entry]) -> None:
        self.names |= {entry.name for entry in self.counted_entries(entries)}

    def disconnect(self, *, failed: bool) -> None:
        pass


def train(logger: Notebook) -> None:
    stream = pl.fit(
        nn.Linear(2, 1),
        DATA,
        loss=nn.functional.mse_loss,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="1ep",
        loggers=[logger],
        run_name="calm-otter",
    )
    pl.run(stream)


def test_a_run_that_could_not_begin_begins_with_its_id(tmp_path: Path) -> None:
    """A process that is killed while it connects leaves the id, too: it is on disk before."""
    first, second = Notebook(tmp_path, fails=True), Notebook(tmp_path)
    with pytest.raises(OSError, match="no route"):
        train(first)
    train(second)
    assert second.begun == first.begun
    assert "train/loss" in second.names
