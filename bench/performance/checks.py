"""What the checks of the first events cost, once: CPU time of the README's run with them and without, in turns.

``python -m bench.performance.checks`` prints it, and how many milliseconds a later step takes with and without.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl

__all__ = ["cpu_seconds", "price"]


def cpu_seconds(strict: bool | None, batches: int) -> tuple[float, float]:
    """CPU seconds of the first two batches, an epoch's end and an evaluation, and of each batch after the third."""
    generator = torch.Generator().manual_seed(0)
    data: list[Any] = [
        (torch.randn(64, 64, generator=generator), torch.randint(10, (64,), generator=generator)) for _ in range(23)
    ]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    options: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=3e-3), "strict": strict}
    options |= {"evaluators": {"val": data[:1]}, "max_duration": f"{batches}ba"}
    began, third = time.process_time(), 0.0
    for event, state in pl.fit(model, data, **options):
        if event is pl.Event.BATCH_START and state.timestamp.batch == 3:
            third = time.process_time()
    ended = time.process_time()
    return ended - began, (ended - third) / (batches - 3)


def price(turns: int = 15) -> tuple[float, float, float]:
    """CPU seconds that the checks take in a run of one epoch; seconds of a later batch with and without them."""
    cpu_seconds(None, 23), cpu_seconds(False, 23)
    once = [cpu_seconds(None, 23)[0] - cpu_seconds(False, 23)[0] for _ in range(turns)]
    pairs = [(cpu_seconds(None, 690)[1], cpu_seconds(False, 690)[1]) for _ in range(turns)]
    checked, unchecked = (min(values) for values in zip(*pairs, strict=True))
    return statistics.median(once), checked, unchecked


if __name__ == "__main__":
    torch.set_num_threads(1)
    once, checked, unchecked = price()
    print(f"once: {once:.4f} s of CPU time")
    print(f"a batch, evaluations included: {checked * 1e6:.1f} us with the checks, {unchecked * 1e6:.1f} us without")
