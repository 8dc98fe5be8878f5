"""Records the memory of the device, allocated now and at most since the record before; on a CPU that of the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.lazy import require
from pure_loop.cadence import CadenceLike
from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.callbacks._intervals import is_due, read_interval
from pure_loop.event import Event
from pure_loop.ranges import checked
from pure_loop.state import State

__all__ = ["MemoryMonitor"]

# Of the statistics of torch's caching allocator: their names there, and the names they are recorded under.
_STATISTICS = {
    "allocated_bytes.all": "memory/allocated_bytes",
    "active_bytes.all": "memory/active_bytes",
    "reserved_bytes.all": "memory/reserved_bytes",
}
_COUNTS = {"num_alloc_retries": "memory/allocation_retries", "num_ooms": "memory/out_of_memory_errors"}
_CACHING = frozenset({"cuda", "xpu"})


@checked
class MemoryMonitor(Callback):
    """Records memory in bytes at an interval, of the device on which the model is trained.

    ====================================== =============================================================================
    on CUDA and XPU devices                of torch's caching allocator
    ``memory/allocated_bytes``             of tensors
    ``memory/active_bytes``                of tensors, and of what a stream still uses
    ``memory/reserved_bytes``              taken from the device, with what is free for later tensors
    ``memory/..._peak``                    the largest of each since the record before, or FIT_START
    ``memory/allocation_retries``          how often the cache was emptied to find memory, since the process began
    ``memory/out_of_memory_errors``        how often there was none, since the process began
    on MPS devices
    ``memory/allocated_bytes``             of tensors
    ``memory/driver_bytes``                taken from the device
    on a CPU
    ``memory/resident_bytes``              the resident memory of the process, which ``psutil`` reads
    ====================================== =============================================================================

    The peaks of the device are reset at each record, also for ``torch.cuda.max_memory_allocated`` elsewhere in the
    process. Nothing waits for the device.

    Args:
        interval: how often: ``"10ba"``, ``"1ep"``, ``"10m"``, ``"0.1dur"``, a predicate of the State.
        all_ranks: record ``.../min``, ``.../mean`` and ``.../max`` over all ranks, which exchange their values at each
            record, instead of the first rank's; a predicate has to give the same answer on all ranks then.

    Raises:
        ArgumentTypeError, ArgumentError: an interval that can't be read, or a flag that is no bool.
        MissingExtraError: the model is on a CPU, and psutil is not installed: ``pip install 'pure_loop[system]'``.
            Where the machine has no other device it is raised here, else at FIT_START.

    >>> monitor = MemoryMonitor("100ba")
    """

    records = True

    def __init__(self, interval: CadenceLike = "10ba", *, all_ranks: bool = False) -> None:
        self._interval = read_interval(interval, "MemoryMonitor")
        self.all_ranks = all_ranks
        self._ranks = 1
        self._process: Any = None if torch.accelerator.is_available() else _process()

    def bind(self, run: Run) -> None:
        self._ranks = run.ranks

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        device = state.device
        if device.type in _CACHING:
            torch.get_device_module(device).reset_peak_memory_stats(device)
        elif device.type == "cpu" and self._process is None:
            self._process = _process()

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        self._record_if_due(state, Event.BATCH_END, logger)

    def epoch_end(self, state: State, logger: LoggerGroup) -> None:
        self._record_if_due(state, Event.EPOCH_END, logger)

    def _record_if_due(self, state: State, event: Event, logger: LoggerGroup) -> None:
        if is_due(self._interval, state, event):
            values = self._values(state.device)
            together = self.all_ranks and self._ranks > 1
            logger.log_metrics(_over_ranks(values, state.device) if together else values, state)

    def _values(self, device: torch.device) -> Mapping[str, float]:
        if device.type in _CACHING:
            module = torch.get_device_module(device)
            values = _of_allocator(module.memory_stats(device))
            module.reset_peak_memory_stats(device)
            return values
        if device.type == "mps":
            return {
                "memory/allocated_bytes": torch.mps.current_allocated_memory(),
                "memory/driver_bytes": torch.mps.driver_allocated_memory(),
            }
        if self._process is not None:
            return {"memory/resident_bytes": self._process.memory_info().rss}
        return {}


def _process() -> Any:
    return require("psutil", "system", "MemoryMonitor").Process()


def _of_allocator(statistics: Mapping[str, int]) -> dict[str, float]:
    """What is recorded of the statistics of a caching allocator; a device that has none before its first tensor."""
    values: dict[str, float] = {}
    for name, recorded in _STATISTICS.items():
        values[recorded] = statistics.get(f"{name}.current", 0)
        values[f"{recorded}_peak"] = statistics.get(f"{name}.peak", 0)
    return values | {recorded: statistics.get(name, 0) for name, recorded in _COUNTS.items()}


def _over_ranks(values: Mapping[str, float], device: torch.device) -> dict[str, Tensor]:
    """The least, the mean and the largest of each value; a collective."""
    from pure_loop.distributed.ranks import gathered  # with it comes torch.distributed

    together = gathered(torch.tensor(list(values.values()), dtype=torch.float64, device=device))
    least, mean, most = together.amin(dim=0), together.mean(dim=0), together.amax(dim=0)
    result: dict[str, Tensor] = {}
    for index, name in enumerate(values):
        result |= {f"{name}/min": least[index], f"{name}/mean": mean[index], f"{name}/max": most[index]}
    return result
