"""What a plain installation can do, as a program of its own: ``python -W error bare_run.py``, outside the repository.

It trains, evaluates, saves and resumes. It needs what ``pip install pure_loop`` brings and nothing else.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl


def main() -> None:
    rows = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
    train, val = DataLoader(rows, batch_size=16, shuffle=True), DataLoader(rows, batch_size=64)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
    settings: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=1e-2), "evaluators": {"val": val}}
    settings |= {"max_duration": "2ep", "algorithms": [pl.algorithms.ema(half_life="2ba")]}
    with tempfile.TemporaryDirectory() as folder:
        for event, state in pl.progress(pl.fit(model, train, **settings)):
            if event is pl.Event.EPOCH_CHECKPOINT and state.timestamp.epoch == 1:
                pl.save(state, f"{folder}/middle.safetensors")
        last = pl.run(pl.fit(model, train, load_path=f"{folder}/middle.safetensors", **settings))
    assert state.timestamp.batch == last.timestamp.batch == 8
    assert all(torch.equal(state.params[name], last.params[name]) for name in state.params)
    assert metadata.version("pure_loop") == pl.__version__
    print(f"pure_loop {pl.__version__} in {pl.__file__}, torch {torch.__version__}: resumed to the same numbers")


if __name__ == "__main__":
    main()
