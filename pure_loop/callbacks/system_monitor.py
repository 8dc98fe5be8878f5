"""Records how busy the machine is: processors, memory, disk, network, and NVIDIA GPUs, sampled in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch

from pure_loop._internal.lazy import require
from pure_loop._internal.processes import in_child
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.errors import ArgumentError
from pure_loop.ranges import Duration, Setting, checked
from pure_loop.state import State
from pure_loop.time import Time, TimeUnit

__all__ = ["SystemMonitor"]


class _Seconds(Duration):
    """A duration in seconds, minutes or hours."""

    def read(self, setting: Setting, value: Any) -> Time:
        duration = super().read(setting, value)
        if duration.unit is not TimeUnit.SECOND:
            raise ArgumentError(
                f"{setting.where}: {setting.name}={value!r}: its thread waits so long, so it is in seconds, minutes or "
                'hours, such as "30s".'
            )
        return duration

    def in_words(self, setting: Setting) -> str:
        return 'time in seconds, minutes or hours above 0, such as `"30s"`'

    def outside(self, setting: Setting) -> tuple[Any, ...]:
        return (*super().outside(setting), "10ba", "1ep")


@checked
class SystemMonitor(Callback):
    """Records a sample of the machine at an interval of seconds, at the BATCH_END that follows it. FIT_END records the
    last one, where that batch has none yet.

    =================================================== ================================================================
    ``system/cpu_percent``                              of all cores, since the sample before
    ``system/memory_percent``                           of the machine's memory
    ``system/process/cpu_percent``                      of one core; 400 for four busy threads
    ``system/process/resident_bytes``                   of this process
    ``system/disk/read_bytes_per_second``               of the machine; also ``write``
    ``system/network/received_bytes_per_second``        of the machine; also ``sent``
    ``system/gpu/<number>/utilization_percent``         of each NVIDIA GPU that the process sees, where it trains on one
    ``system/gpu/<number>/memory_bytes``                used by all processes
    ``system/gpu/<number>/temperature_celsius``
    ``system/gpu/<number>/power_watts``
    =================================================== ================================================================

    The samples are taken in a thread of their own, so training doesn't wait for them. On several ranks the first rank
    records its machine.

    Args:
        interval: how often, in seconds, minutes or hours: ``"30s"``, ``"5m"``.

    Raises:
        ArgumentTypeError, ArgumentError: an interval that is no duration above 0 in seconds.
        MissingExtraError: psutil is not installed, or at FIT_START nvidia-ml-py for a GPU of NVIDIA's:
            ``pip install 'pure_loop[system]'``.

    >>> monitor = SystemMonitor("1m")
    """

    records = True

    def __init__(self, interval: Annotated[str | Time, _Seconds(clock=True, units=(TimeUnit.SECOND,))] = "30s") -> None:
        self._seconds = float(Time.parse(interval).value)
        self._psutil = require("psutil", "system", "SystemMonitor")
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        # The newest sample that is not recorded yet, or the error that ended the thread.
        self._sample: Mapping[str, float] | Exception | None = None
        # The batch at which one was recorded last.
        self._recorded: int | None = None
        in_child(self._forget)

    def _forget(self) -> None:
        """In a forked child: there is no thread."""
        self._stopped, self._thread = threading.Event(), None

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        self.close()
        on_gpu = state.device.type == "cuda"
        if on_gpu:
            require("pynvml", "system", "SystemMonitor")
        self._stopped.clear()
        self._sample, self._recorded = None, None
        take = _Sampler(self._psutil, gpus=torch.cuda.device_count() if on_gpu else 0)
        self._thread = threading.Thread(target=self._run, args=(take,), name="pure_loop-system", daemon=True)
        self._thread.start()

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        if self._sample is not None:
            self._record(state, logger)

    def fit_end(self, state: State, logger: LoggerGroup) -> None:
        self.close()
        self._record(state, logger)

    def close(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, take: Callable[[], Mapping[str, float]]) -> None:
        try:
            while not self._stopped.wait(self._seconds):
                self._sample = take()
            self._sample = take()
        except Exception as error:
            self._sample = error

    def _record(self, state: State, logger: LoggerGroup) -> None:
        sample, self._sample = self._sample, None
        if isinstance(sample, Exception):
            raise sample
        batch = state.timestamp.batch
        if sample is not None and batch != self._recorded:
            self._recorded = batch
            logger.log_metrics(sample, state)


class _Sampler:
    """Takes samples; rates are those since the sample before.

    Args:
        psutil: the package.
        gpus: how many GPUs the process sees.
    """

    def __init__(self, psutil: Any, gpus: int) -> None:
        self._psutil, self._gpus = psutil, gpus
        self._process = psutil.Process()
        psutil.cpu_percent()  # the first call of these two begins their interval
        self._process.cpu_percent()
        self._moment, self._counters = time.monotonic(), self._count()

    def __call__(self) -> Mapping[str, float]:
        values = {
            "system/cpu_percent": self._psutil.cpu_percent(),
            "system/memory_percent": self._psutil.virtual_memory().percent,
            "system/process/cpu_percent": self._process.cpu_percent(),
            "system/process/resident_bytes": self._process.memory_info().rss,
        }
        moment, counters = time.monotonic(), self._count()
        seconds = max(moment - self._moment, 1e-9)
        for name, count in counters.items():
            values[f"system/{name}_bytes_per_second"] = (count - self._counters[name]) / seconds
        self._moment, self._counters = moment, counters
        for number in range(self._gpus):
            values |= _of_gpu(number)
        return values

    def _count(self) -> dict[str, int]:
        """Bytes since the machine started; a system that counts none of a kind has none here."""
        disk, network = self._psutil.disk_io_counters(), self._psutil.net_io_counters()
        counters: dict[str, int] = {}
        if disk is not None:
            counters |= {"disk/read": disk.read_bytes, "disk/write": disk.write_bytes}
        if network is not None:
            counters |= {"network/received": network.bytes_recv, "network/sent": network.bytes_sent}
        return counters


def _of_gpu(number: int) -> dict[str, float]:
    return {
        f"system/gpu/{number}/utilization_percent": torch.cuda.utilization(number),
        f"system/gpu/{number}/memory_bytes": torch.cuda.device_memory_used(number),
        f"system/gpu/{number}/temperature_celsius": torch.cuda.temperature(number),
        f"system/gpu/{number}/power_watts": torch.cuda.power_draw(number) / 1000,
    }
