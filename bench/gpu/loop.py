"""One loop on one workload, in a process of its own: it makes steps when it is asked, and says what they took.

Requests come as lines of JSON on the standard input, and answers go to the standard output: ``{"steps": n}`` to make
steps, ``{"profile": n}`` to make them under the profiler, ``{"memory": n}`` for the peak of so many.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

import torch

from bench.gpu.competitors import LOOPS, workload_on
from bench.gpu.profiling import kernels, profiled
from bench.gpu.results import first_line
from bench.performance.turns import Steps

# Before anything is measured: kernels are loaded and tuned, and a graph is recorded at its third call.
WARM_UP = 8


class Notes(logging.Handler):
    """What the compiler says of graphs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.notes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(first_line(record.getMessage()))


class Loop:
    """Steps of one loop, measured."""

    def __init__(self, device: str, steps: Steps) -> None:
        self._device, self._steps = device, steps

    def wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def make(self, count: int) -> dict[str, Any]:
        """So many steps; seconds, and of the device those between its first and its last kernel."""
        on_device = self._device == "cuda"
        self.wait()
        if on_device:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        started = time.perf_counter()
        for _ in range(count):
            next(self._steps)
        launched = time.perf_counter()
        if on_device:
            end.record()
        self.wait()
        found = {"wall": time.perf_counter() - started, "launching": launched - started}
        return found | ({"events": begin.elapsed_time(end) / 1e3} if on_device else {})

    def first(self) -> float:
        begin = time.perf_counter()
        next(self._steps)
        self.wait()
        return time.perf_counter() - begin

    def memory(self, count: int) -> dict[str, Any]:
        """Bytes: the most that tensors took in so many steps, and what the allocator holds, graphs included."""
        if self._device != "cuda":
            return {}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.make(count)
        return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    def profile(self, count: int) -> dict[str, Any]:
        """What ran on the device in so many steps."""
        with profiled(self._device) as whole:
            self.make(count)
        return kernels(whole.events() or (), count)


def main() -> None:
    device, size, workload_name, name = sys.argv[1:]
    # What libraries print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    torch.set_num_threads(1)
    notes = Notes()
    log = logging.getLogger("pure_loop.compile")
    log.setLevel(logging.INFO)
    log.addHandler(notes)
    try:
        begin = time.perf_counter()
        workload = workload_on(device, workload_name, small=size == "small")
        loop = Loop(device, LOOPS[name](workload, device))
        first = loop.first()
        loop.make(WARM_UP)
        if device == "cuda":
            torch.cuda.empty_cache()
        answer(first=first, ready=time.perf_counter() - begin, notes=list(dict.fromkeys(notes.notes)))
        for line in sys.stdin:
            (what, count), *_ = json.loads(line).items()
            answer(**{"steps": loop.make, "profile": loop.profile, "memory": loop.memory}[what](count))
    except Exception as error:
        answer(error=first_line(error))
        raise


if __name__ == "__main__":
    main()
