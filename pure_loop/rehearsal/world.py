"""The collectives of a step on several ranks, of which this process is the first and the others answer nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pure_loop._internal.torch_private import DispatchMode, fake_ranks
from pure_loop.data.batch import tensors_in
from pure_loop.entry.fit import fit
from pure_loop.event import Event
from pure_loop.rehearsal.bare import bare

__all__ = ["Counting", "collectives"]

# Which step is counted: in the first ones ranks learn what they exchange.
_STEPS = 3
_NAMES = (("allreduce", "all-reduce"), ("allgather", "all-gather"), ("reduce_scatter", "reduce-scatter"))


class Counting(DispatchMode):  # type: ignore[misc]
    """Counts collectives, those of C++ included, and the bytes of the largest argument of each."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            operation = str(function).split(".")[1].strip("_")
            name = next((name for start, name in _NAMES if operation.startswith(start)), operation)
            self.counts[name] += 1
            self.bytes[name] += max((_size(argument) for argument in args), default=0)
        return function(*args, **(kwargs or {}))

    def snapshot(self) -> tuple[Counter[str], Counter[str]]:
        """Copies of both counts."""
        return Counter(self.counts), Counter(self.bytes)


def _size(argument: Any) -> int:
    tensors = [argument] if isinstance(argument, Tensor) else tensors_in(argument)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def collectives(arguments: Mapping[str, Any], batch: Any, ranks: int) -> dict[str, tuple[int, int]]:
    """The collectives of one step of a call of ``fit`` on several ranks: how many of each, and their bytes in all.

    Three steps are run, with the algorithms of the call and without evaluators, callbacks and loggers, on a process
    group whose other ranks answer nothing; it is destroyed afterwards. Numbers that ranks exchange to agree on a batch
    are not counted.

    Args:
        arguments: those of ``fit``, by name, ``parallel`` among them.
        batch: the whole batch of a step.
        ranks: how many.

    Raises:
        Exception: whatever the steps raise, or torch where it has no such group.
    """
    changes = {"watch": {Event.BATCH_START, Event.BATCH_END}, "compile": False, "steps_per_call": 1, "donate": False}
    before: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    with fake_ranks(ranks), Counting() as counting:
        stream = fit(**{**bare(arguments, batch, _STEPS), **changes})
        for event, _ in stream:
            if event is Event.BATCH_START:
                before = counting.snapshot()
        after = counting.snapshot()
    counts, sizes = (now - then for now, then in zip(after, before, strict=True))
    return {name: (count, sizes[name]) for name, count in sorted(counts.items())}


def has_group() -> bool:
    """Whether this process has a process group already."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
