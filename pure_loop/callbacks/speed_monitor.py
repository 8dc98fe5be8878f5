"""Records samples, batches, tokens and FLOPs a second, and how much of the device's peak they are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import attrs
import torch

from pure_loop._internal.arguments import accepts, check_number, is_number, refusal
from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.data.group import parts_of
from pure_loop.errors import ArgumentError
from pure_loop.ranges import AtLeast, checked
from pure_loop.state import State

if TYPE_CHECKING:
    from pure_loop.callbacks._flops import FlopCounter

__all__ = ["SpeedMonitor"]

Flops: TypeAlias = 'Literal["count"] | float | Callable[[Any], float] | None'


@attrs.frozen
class _Batch:
    """What one batch counted."""

    samples: int
    tokens: int
    flops: float
    seconds: float


@checked
class SpeedMonitor(Callback):
    """Records speeds at BATCH_END, means over the last batches.

    ================================= ==================================================================================
    ``speed/samples_per_second``      also ``batches``, and ``tokens`` where batches hold tokens
    ``speed/flops_per_second``        where ``flops`` is passed: floating-point operations, over all ranks
    ``speed/mfu``                     model FLOPs utilization: ``flops_per_second`` over the peak of all ranks' devices
    ``speed/device/...``              the same speeds for one of several ranks
    ================================= ==================================================================================

    Time spent in evaluations is left out. The window is the callback's own: resuming from a kept State starts
    a new one. On a device that computes behind the loop's back, a mean over a few batches is the speed at which they
    were handed over; over a window of many it is the speed of training.

    ``flops="count"`` computes one forward, loss and backward beside training for each new combination of shapes in a
    batch, and counts its operations (``torch.utils.flop_counter``); the time of that is left out, too. It needs memory
    for the activations and gradients of a microbatch. Where shapes vary all the time, pass a function of the batch; a
    sharded model takes a number or a function.

    Args:
        window: over how many batches.
        clock: what evaluations are timed with; give it what ``fit`` is given, if it is given one.
        flops: of a step on a rank's batch: ``"count"``, a number, or a function of that batch; None: not recorded.
        peak_flops: how many floating-point operations a second one device can compute, dense. None: by the name of the
            device and the precision, for NVIDIA's B200, H200, H100, A100, L40S, V100 and T4; on others ``mfu`` isn't
            recorded.

    Raises:
        ArgumentTypeError, ArgumentError: ``window`` is no whole number of at least 1, or FLOPs that are no number above
            0.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import InMemoryLogger
    >>> logger, ticks = InMemoryLogger(), iter(range(100))
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, max_duration="1ep",
    ...                       optimizer=pl.optim.sgd(lr=0.1), callbacks=[SpeedMonitor()], loggers=[logger],
    ...                       clock=lambda: next(ticks)))
    >>> logger.series("speed/samples_per_second")
    ([1, 2, 3], [4.0, 4.0, 4.0])
    """

    records = True

    def __init__(
        self,
        window: Annotated[int, AtLeast(1, wanted="a number of batches, 1 or more")] = 100,
        clock: Callable[[], float] = time.monotonic,
        *,
        flops: Flops = None,
        peak_flops: float | None = None,
    ) -> None:
        self._clock = clock
        self._flops = _read_flops(flops)
        self._peak_flops = None if peak_flops is None else check_number("peak_flops", peak_flops, above=0)
        self._batches: deque[_Batch] = deque(maxlen=window)
        self._evaluation_started = 0.0
        # Seconds of evaluations and of counting, which the loop counts into the next batch's.
        self._apart = 0.0
        self._run: Run | None = None
        self._ranks = 1
        self._counter: FlopCounter | None = None
        self._peak: float | None = None

    def bind(self, run: Run) -> None:
        """
        Raises:
            ArgumentError: a script of the user's own, and FLOPs that would be counted.
        """
        self._run = run
        self._ranks = run.ranks
        if self._flops == "count" and run.function == "drive":
            raise ArgumentError(
                'SpeedMonitor(flops="count") in pl.drive: a script of your own has no task that could be counted; '
                "pass a number, or a function of the batch."
            )

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        """
        Raises:
            ArgumentError: FLOPs would be counted, and ranks compute a forward of this model together.
        """
        self._batches.clear()
        self._apart = 0.0
        self._counter = None
        if self._flops is None:
            return
        self._peak = self._peak_flops if self._peak_flops is not None else self._peak_of(state.device)
        if self._flops == "count":
            from pure_loop.callbacks._beside import refuse_collectives
            from pure_loop.callbacks._flops import FlopCounter  # nothing else needs it

            refuse_collectives(
                state, self._ranks, 'SpeedMonitor(flops="count")', "pass a number, or a function of the batch."
            )
            self._counter = None if self._run is None else FlopCounter(self._run)

    def eval_start(self, state: State, logger: LoggerGroup) -> None:
        self._evaluation_started = self._clock()

    def eval_end(self, state: State, logger: LoggerGroup) -> None:
        self._apart += self._clock() - self._evaluation_started

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        before, after = state.previous_timestamp, state.timestamp
        seconds = max(after.batch_seconds - self._apart, 0.0)
        started = self._clock()
        flops = self._flops_of(state)
        self._apart = self._clock() - started if self._counter is not None else 0.0
        self._batches.append(_Batch(after.sample - before.sample, after.token - before.token, flops, seconds))
        spent = sum(batch.seconds for batch in self._batches)
        if spent > 0:
            logger.log_metrics(self._speeds(spent), state)

    def _speeds(self, spent: float) -> Mapping[str, float]:
        counts = {
            "samples": sum(batch.samples for batch in self._batches),
            "batches": len(self._batches),
            "tokens": sum(batch.tokens for batch in self._batches),
            "flops": sum(batch.flops for batch in self._batches) * self._ranks,
        }
        speeds = {
            f"{what}_per_second": count / spent
            for what, count in counts.items()
            if count or what in ("samples", "batches")
        }
        if self._peak is not None and counts["flops"]:
            speeds["mfu"] = speeds["flops_per_second"] / (self._peak * self._ranks)
        values = {f"speed/{name}": value for name, value in speeds.items()}
        if self._ranks > 1:
            of_one = {name: value for name, value in speeds.items() if name not in ("mfu", "batches_per_second")}
            values |= {f"speed/device/{name}": value / self._ranks for name, value in of_one.items()}
        return values

    def _flops_of(self, state: State) -> float:
        """Of a step on this rank's batch."""
        if self._counter is not None:
            return self._counter(state)
        if callable(self._flops):
            numbers = map(self._flops, parts_of(state.batch))
            return sum(check_number("flops(batch)", number, where="SpeedMonitor", least=0) for number in numbers)
        return self._flops if is_number(self._flops) else 0.0

    def _peak_of(self, device: torch.device) -> float | None:
        if device.type != "cuda":
            return None
        from pure_loop.callbacks._flops import peak_flops_of

        precision = "fp32" if self._run is None else self._run.precision
        return peak_flops_of(torch.cuda.get_device_name(device), precision)


def _read_flops(flops: object) -> Flops:
    if flops is None or (callable(flops) and accepts(flops, 1)):
        return flops
    if isinstance(flops, str) and flops == "count":
        return "count"
    if is_number(flops):
        return check_number("flops", flops, above=0, where="SpeedMonitor")
    raise refusal("flops", flops, '"count", a number above 0, or a function of the batch', "SpeedMonitor")
