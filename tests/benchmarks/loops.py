"""The competitors: each a generator that makes one step of training every time it is asked for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import torch

import pure_loop as pl
from tests.benchmarks.workloads import Workload

__all__ = ["LOOPS"]

Loop = Callable[[Workload], Iterator[None]]


def _hand_written(workload: Workload, **options: bool) -> Iterator[None]:
    torch.manual_seed(0)
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    size = len(workload.data()[0][0]) // workload.microbatches
    for inputs, targets in cycle(workload.data()):
        optimizer.zero_grad()
        if workload.microbatches == 1:
            workload.loss(model(inputs), targets).backward()
        else:
            for x, y in zip(inputs.split(size), targets.split(size), strict=True):
                (workload.loss(model(x), y) / workload.microbatches).backward()
        optimizer.step()
        yield


def hand_written(workload: Workload) -> Iterator[None]:
    """zero_grad, forward, loss, backward, fused AdamW: what every ratio is relative to."""
    return _hand_written(workload, fused=True)


def hand_written_default(workload: Workload) -> Iterator[None]:
    """The same with AdamW as torch makes it by default."""
    return _hand_written(workload)


def _pure_loop(workload: Workload, watch: set[pl.Event] | None, last: pl.Event) -> Iterator[None]:
    torch.manual_seed(0)
    data = workload.data()
    size = len(data[0][0]) // workload.microbatches
    stream = pl.fit(
        workload.model(),
        data,
        loss=workload.loss,
        optimizer=pl.optim.adamw(lr=1e-3),
        max_duration="1000000000ba",
        microbatch_size=None if workload.microbatches == 1 else size,
        watch=watch,
    )
    return (None for event, _ in stream if event is last)


def every_event(workload: Workload) -> Iterator[None]:
    """pl.fit with its default settings: every event yielded, nothing attached."""
    return _pure_loop(workload, None, pl.Event.BATCH_CHECKPOINT)


def watching_batch_end(workload: Workload) -> Iterator[None]:
    """pl.fit(..., watch={BATCH_END})."""
    return _pure_loop(workload, {pl.Event.BATCH_END}, pl.Event.BATCH_END)


LOOPS: dict[str, Loop] = {
    "hand-written, fused AdamW": hand_written,
    "hand-written, default AdamW": hand_written_default,
    "pl.fit, every event": every_event,
    "pl.fit, watch={BATCH_END}": watching_batch_end,
}
