"""The loops by hand, and ``pl.fit`` in its variants: each a generator that makes a step of training when asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import torch

import pure_loop as pl
from bench.performance.hand import hand_written, kernels_alone
from bench.performance.turns import OfGenerator, Steps, Turns
from bench.performance.workloads import Workload
from pure_loop import Event

__all__ = ["BASE", "EPOCH", "HAND", "OURS", "Loop", "ours"]

# Batches of an epoch of ours, so that an epoch's events are few and a turn of one that yields them alone is short.
EPOCH = 32
TOGETHER = 8


@attrs.frozen
class Loop:
    """One row of the table.

    Attributes:
        name: as in the table.
        make: the generator.
        compiled: whether it compiles, which takes from seconds to minutes.
    """

    name: str
    make: Callable[[Workload], Steps]
    compiled: bool = False

    def turns(self, workload: Workload) -> Turns:
        return OfGenerator(self.make(workload))


def ours(
    loader: Callable[[Workload], Any] | None = None, keep: int = 0, *, read: bool = False, **options: Any
) -> Callable[[Workload], Steps]:
    """``pl.fit`` with AdamW and these options; it is called, and refuses them, when the generator is made.

    Args:
        loader: of the workload; None: batches that are there already.
        keep: the States of so many last batches stay alive.
        read: whether the parameters are looked at after each batch.
        **options: of ``fit``.
    """
    options = {"optimizer": pl.optim.adamw(lr=1e-3), **options}

    def loop(workload: Workload) -> Steps:
        torch.manual_seed(0)
        data = workload.data()
        watch = options.get("watch")
        count = workload.microbatches
        stream = pl.fit(
            workload.model(),
            [data[index % len(data)] for index in range(EPOCH)] if loader is None else loader(workload),
            loss=workload.loss,
            max_duration="1000000000ba",
            microbatch_size=None if count == 1 else len(data[0][0]) // count,
            **options,
        )
        if watch == {Event.EPOCH_END}:
            return (EPOCH for _ in stream)
        last = Event.BATCH_CHECKPOINT if watch is None else Event.BATCH_END
        if keep:
            kept: deque[pl.State] = deque(maxlen=keep)
            return (kept.append(state) or 1 for event, state in stream if event is last)  # type: ignore[func-returns-value]
        if read:
            return (1 for event, state in stream if event is last and state.params)
        return (1 for event, _ in stream if event is last)

    return loop


BASE = "hand-written, fused AdamW"

HAND = [
    Loop(BASE, hand_written(fused=True)),
    Loop("hand-written, default AdamW", hand_written()),
    Loop("torch's kernels alone", kernels_alone),
    Loop("hand-written, torch.compile(model)", hand_written(fused=True, compiled=True), compiled=True),
]

_COMPILED: dict[str, Any] = {"compile": True, "watch": {Event.EPOCH_END}}

OURS = [
    Loop("pl.fit, every event", ours()),
    Loop("pl.fit, every event, donate=False", ours(donate=False)),
    Loop("pl.fit, every event, donate=True", ours(donate=True)),
    Loop("pl.fit, watch={BATCH_END}", ours(watch={Event.BATCH_END})),
    Loop("pl.fit, compile=True, every event", ours(compile=True), compiled=True),
    Loop("pl.fit, compile=True, watch={EPOCH_END}", ours(**_COMPILED), compiled=True),
    Loop(f"pl.fit, compile=True, {TOGETHER} steps a call", ours(**_COMPILED, steps_per_call=TOGETHER), compiled=True),
]
