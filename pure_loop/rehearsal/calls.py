"""Other calls of ``fit`` that a rehearsal makes of one: on tensors without numbers, and reduced to its steps.

The steps are traced, where the call compiles them, and their collectives are counted on several ranks, of which this
process is the first and the others answer nothing.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from torch import Tensor

from pure_loop._internal.pytree import Batch
from pure_loop._internal.torch_private import DispatchMode, fake_ranks
from pure_loop.algorithm import Algorithm, flatten
from pure_loop.checkpoint.finding import latest_path
from pure_loop.checkpoint.storage import storage_of
from pure_loop.data.batch import tensors_in
from pure_loop.data.group import parts_of
from pure_loop.entry.compiling import interpreted
from pure_loop.entry.fit import fit
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointNotFoundError
from pure_loop.event import Event
from pure_loop.loop.stream import run
from pure_loop.precision import Precision
from pure_loop.rehearsal.report import Place
from pure_loop.state import State

# Those of ``fit``, by name.
Arguments: TypeAlias = Mapping[str, Any]


def without_numbers(arguments: Arguments, place: Place) -> Arguments:
    """A call with its model and its data on the meta device.

    Args:
        arguments: those of ``fit``, by name.
        place: where it is noted what is not tried.
    """
    changes: dict[str, Any] = {"device": "meta", "nonfinite": "error", "load_path": None, "autoresume": None}
    changes |= {"compile": False, "steps_per_call": 1, "strict": False, "verify": None}
    with suppress(ArgumentError, ArgumentTypeError):  # the call refuses it
        if Precision.parse(arguments["precision"]).dtype is not None:
            place.skip(f"precision={arguments['precision']!r}: the forward ran in the dtypes of the parameters.")
            changes["precision"] = "fp32"
    if arguments["compile"]:
        place.skip("compile=: the steps were not traced.")
    path, folder = arguments["load_path"], arguments["autoresume"]
    if path is not None:
        with place.collecting("load_path"):
            if not storage_of(path).exists():
                raise CheckpointNotFoundError(f"there is no checkpoint at {os.fspath(path)}")
            place.skip(f"load_path: {os.fspath(path)} is there, and was not read.")
    if folder is not None and isinstance(folder, str | os.PathLike) and latest_path(folder) is not None:
        place.skip(f"autoresume: {os.fspath(folder)} has a checkpoint, which was not read.")
    return {**arguments, **changes}


def bare(arguments: Arguments, batch: Batch, steps: int) -> Arguments:
    """The arguments of a call of ``fit`` that trains so many steps on one batch, with the algorithms of another call.

    Args:
        arguments: those of the other call, by name.
        batch: of a step.
        steps: how many; no epoch ends before or with the last one.
    """
    model = arguments["model_or_state"]
    changes: dict[str, Any] = {
        "model_or_state": model.module() if isinstance(model, State) else model,
        "train_dataloader": list(parts_of(batch)) * (steps + 1),
        "max_duration": f"{steps}ba",
        "algorithms": [_unbound(algorithm) for algorithm in flatten(arguments["algorithms"])],
        "evaluators": None,
        "callbacks": (),
        "loggers": (),
        "run_name": None,
        "train_metrics": None,
        "load_path": None,
        "autoresume": None,
        "batches_per_epoch": None,
        "iteration_length": None,
        "strict": False,
        "verify": None,
        "order": "current",
    }
    return {**arguments, **changes}


def _unbound(algorithm: Algorithm) -> Algorithm:
    """The algorithm, which refuses no run: evaluators that it reads are not there."""
    result = copy.copy(algorithm)
    object.__setattr__(result, "bind", None)
    return result


def trace(arguments: Arguments, batch: Batch) -> None:
    """Trace the steps of a call with ``compile=``; its graphs run operation by operation, without a compiler.

    Args:
        arguments: those of ``fit``, by name, ``watch`` with the events that callbacks observe: graphs end there.
        batch: of a step.

    Raises:
        CompileError: an algorithm, the model or the loss can't be traced.
    """
    calls = 2
    changes = {"seed": 0} if isinstance(arguments["model_or_state"], State) else {}
    with interpreted():
        run(fit(**{**bare(arguments, batch, calls * arguments["steps_per_call"]), **changes}))


# Which step is counted: in the first ones ranks learn what they exchange.
_STEPS = 3
_NAMES = (("allreduce", "all-reduce"), ("allgather", "all-gather"), ("reduce_scatter", "reduce-scatter"))


class Counting(DispatchMode):  # type: ignore[misc]
    """Counts collectives, those of C++ included, and the bytes of the largest argument of each."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        function: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if function.namespace == "c10d":
            operation = str(function).split(".")[1].strip("_")
            name = next((name for start, name in _NAMES if operation.startswith(start)), operation)
            self.counts[name] += 1
            self.bytes[name] += max((_size(argument) for argument in args), default=0)
        return function(*args, **(kwargs or {}))

    def snapshot(self) -> tuple[Counter[str], Counter[str]]:
        """Copies of both counts."""
        return Counter(self.counts), Counter(self.bytes)


def _size(argument: object) -> int:
    tensors = [argument] if isinstance(argument, Tensor) else tensors_in(argument)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def collectives(arguments: Arguments, batch: Batch, ranks: int) -> dict[str, tuple[int, int]]:
    """The collectives of one step of a call of ``fit`` on several ranks: how many of each, and their bytes in all.

    Three steps are run, with the algorithms of the call and without evaluators, callbacks and loggers, on a process
    group in which the other ranks answer nothing; it is destroyed afterwards. Numbers that ranks exchange to agree on a
    batch are not counted.

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
    counts, sizes = (last - first for last, first in zip(after, before, strict=True))
    return {name: (count, sizes[name]) for name, count in sorted(counts.items())}
