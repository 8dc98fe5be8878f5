"""How often the host waits for the device between BATCH_START and BATCH_END, which should be never.

By torch's debug mode, in which a wait is an error with its place, and by the profiler, which sees the calls of CUDA.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import record_function

import pure_loop as pl
from bench.gpu.profiling import inside, profiled
from bench.gpu.results import Asked, asked, first_line
from bench.gpu.running import ROOT
from pure_loop import Event
from tests.support.problem import noisy, points

# Settings of fit by what is tried.
RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "clip_grad": lambda: {"clip_grad": 1.0},
    "amp_bf16": lambda: {"precision": "amp_bf16"},
    "amp_fp16, with its loss scale": lambda: {"precision": "amp_fp16"},
    "ema": lambda: {"algorithms": [pl.algorithms.ema(half_life="10ba")]},
    "label smoothing": lambda: {"algorithms": [pl.algorithms.label_smoothing(0.1)]},
    "train_metrics": lambda: {"train_metrics": [pl.metrics.accuracy()]},
    "loggers": lambda: {"loggers": [pl.loggers.InMemoryLogger()], "callbacks": [pl.callbacks.SpeedMonitor()]},
    "microbatches": lambda: {"microbatch_size": 4},
    "donate=True": lambda: {"donate": True},
    "all": lambda: {
        "clip_grad": 1.0,
        "precision": "amp_fp16",
        "microbatch_size": 4,
        "algorithms": [pl.algorithms.ema(half_life="10ba"), pl.algorithms.label_smoothing(0.1)],
        "train_metrics": [pl.metrics.accuracy()],
        "loggers": [pl.loggers.InMemoryLogger()],
        "callbacks": [pl.callbacks.SpeedMonitor()],
    },
}
BATCHES = 8
# In the first ones kernels are loaded and memory is taken; the last one is followed by a look at the losses.
WATCHED = range(3, BATCHES - 1)
# As torch says it, in an error and in a warning.
WAITED = "called a synchronizing CUDA operation"
SPAN = "from BATCH_START to BATCH_END"
# What CUDA's runtime calls what waits. Copies that are not asynchronous do, too.
WAITS = frozenset(
    {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpy2D"}
)
# Of a number on the host it is no wait.
READS = frozenset({"aten::_local_scalar_dense"})


def run(device: str, settings: dict[str, Any], watch: Callable[[int], contextlib.AbstractContextManager[Any]]) -> int:
    """Train, inside ``watch(batch)`` in each watched batch; how many there were."""
    data: list[tuple[Tensor, ...]] = [*points(BATCHES, size=8)]
    if device == "cuda":
        data = [tuple(tensor.pin_memory() for tensor in batch) for batch in data]
    stream = pl.fit(
        noisy(),
        data,
        loss=functional.cross_entropy,
        optimizer=pl.optim.adamw(lr=0.01),
        max_duration="1ep",
        device=device,
        **settings,
    )
    count = 0
    with contextlib.ExitStack() as watching:
        for event, state in stream:
            number = state.timestamp.batch_in_epoch
            if event is Event.BATCH_START and number in WATCHED:
                watching.enter_context(watch(number))
                count += 1
            elif event is Event.BATCH_END:
                watching.close()
    return count


@contextlib.contextmanager
def debug_mode(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def by_error(device: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The first wait, as an error; it is known to be one, or there would be no zero."""
    try:
        with debug_mode("error"):
            torch.ones((), device=device).item()
    except RuntimeError as error:
        if WAITED not in str(error):
            raise
    else:
        return {"waits": None}
    try:
        return {"batches": run(device, settings, lambda _: debug_mode("error")), "waits": 0}
    except RuntimeError as error:
        if WAITED not in str(error):
            raise
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
        return {"waits": 1, "first": first_line(error), "place": _place(ours[-1].filename, ours[-1].lineno or 0)}


def _place(path: str, line: int) -> str:
    return f"{path.removeprefix(f'{ROOT}/')}:{line}"


def by_warning(device: str, settings: dict[str, Any]) -> dict[str, Any]:
    """All waits, by their places; it is known to warn, or there would be no zero."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with debug_mode("warn"):
            torch.ones((), device=device).item()
        warns = any(WAITED in str(each.message) for each in seen)
        del seen[:]
        count = run(device, settings, lambda _: debug_mode("warn"))
        places = Counter(_place(each.filename, each.lineno) for each in seen if WAITED in str(each.message))
    return {"batches": count, "waits": sum(places.values()) if warns else None, "places": dict(places)}


def by_profiler(device: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Calls of CUDA that wait, and reads of numbers, inside the spans."""
    with profiled(device) as whole:
        count = run(device, settings, lambda _: record_function(SPAN))
    found = inside(whole.events() or (), SPAN)
    calls = {name: number for name, number in found.items() if name in WAITS}
    reads = sum(number for name, number in found.items() if name in READS)
    # Where there is no call of CUDA at all, the profiler doesn't see them.
    seen = any(name.startswith("cu") for name in found)
    return {"batches": count, "waits": sum(calls.values()) if seen else None, "calls": calls, "reads of numbers": reads}


def main(part: Asked) -> None:
    ways = {"by profiler": by_profiler}
    if part.device == "cuda":
        ways = {"by error": by_error, **({"by warning": by_warning} if part.kind == "cuda" else {}), **ways}
    for way, measure in ways.items():
        for name, settings in RUNS.items():
            if part.left < 0:
                return
            try:
                found = measure(part.device, settings())
            except Exception as error:
                found = {"error": first_line(error)}
            part.results.write(name, way, value=found)


if __name__ == "__main__":
    main(asked())
