"""Records samples, batches, tokens and FLOPs a second, and how much of the device's peak they are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.arguments import accepts, check_number, is_number, refusal
from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.callbacks._beside import refuse_collectives
from pure_loop.data.group import parts_of
from pure_loop.errors import ArgumentError
from pure_loop.precision import Precision, PrecisionName
from pure_loop.ranges import AtLeast, checked
from pure_loop.stages import Stages
from pure_loop.stages.settings import found_size
from pure_loop.state import State

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


@attrs.define
class FlopCounter:
    """Forward, loss and backward of a batch, once for each combination of shapes.

    Args:
        run: the call with the task, the precision and the microbatches.
    """

    run: Run
    _known: dict[tuple[Any, ...], int] = attrs.field(init=False, factory=dict)

    def __call__(self, state: State) -> int:
        """The floating-point operations of ``state.batch``: multiplications and additions of matrix products,
        convolutions and attention, as ``torch.utils.flop_counter`` counts them.
        """
        key = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
            for leaf in optree.tree_leaves(state.batch, namespace="pure_loop")
        )
        if key not in self._known:
            count = self._count(state.member(0)) * state.members if state.members else self._count(state)
            self._known[key] = count
        return self._known[key]

    def _count(self, state: State) -> int:
        from torch.utils.flop_counter import FlopCounterMode  # nothing else needs it

        assert self.run.task is not None
        stages = Stages(
            task=self.run.task,
            precision=Precision.parse(self.run.precision),
            microbatch_size=self.run.microbatch_size or found_size(state),
        )
        fresh = state.replace(grads=None, loss=None, outputs=None, grad_norm=None, loss_scale=None)
        with FlopCounterMode(display=False) as counter:
            for index, microbatch in enumerate(stages.microbatches(state.batch)):
                step = stages.forward(fresh.replace(microbatch=microbatch), index=index)
                stages.backward(stages.loss(step, index=index))
        return int(counter.get_total_flops())


_TERA = 1e12
# Dense, from the vendors' data sheets, where those of matrices of which half the elements are zero are twice as high.
# By parts of the device's name: 16-bit floats with sums in float32 (of the V100 and T4, which have no bfloat16,
# float16), TF32, and float32; in 1e12 a second. The first row fits whose parts are all in the name.
_PEAKS: tuple[tuple[tuple[str, ...], float, float, float], ...] = (
    (("B200",), 2250.0, 1125.0, 75.0),
    (("H200",), 989.4, 494.7, 66.9),
    (("H100", "NVL"), 835.5, 417.5, 60.0),
    (("H100", "PCIe"), 756.0, 378.0, 51.0),
    (("H100",), 989.4, 494.7, 66.9),
    (("A100",), 312.0, 156.0, 19.5),
    (("L40S",), 362.0, 183.0, 91.6),
    (("V100", "PCIE"), 112.0, 14.0, 14.0),
    (("V100",), 125.0, 15.7, 15.7),
    (("Tesla T4",), 65.0, 8.1, 8.1),
)
_WITHOUT_BFLOAT16 = ("V100", "Tesla T4")


def peak_flops_of(device_name: str, precision: PrecisionName, *, tf32: bool | None = None) -> float | None:
    """Floating-point operations a second; None where the device is not in the table.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.
        precision: that of forward and loss.
        tf32: whether products of float32 matrices may be computed in TF32; None: as torch is set.

    >>> peak_flops_of("NVIDIA A100-SXM4-80GB", "amp_bf16")
    312000000000000.0
    >>> peak_flops_of("NVIDIA A100-SXM4-80GB", "fp32", tf32=False)
    19500000000000.0
    """
    for parts, halves, with_tf32, singles in _PEAKS:
        if all(part in device_name for part in parts):
            if precision == "fp32":
                uses_tf32 = torch.get_float32_matmul_precision() != "highest" if tf32 is None else tf32
                return (with_tf32 if uses_tf32 else singles) * _TERA
            if precision == "amp_fp8":  # some of its products are in 16 bits
                return None
            if precision == "amp_bf16" and parts[0] in _WITHOUT_BFLOAT16:
                return None
            return halves * _TERA
    return None
