"""``pl.diff``: the first event, the first algorithm or part of the loop, and the leaf in which two runs differ."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from pure_loop._internal.arguments import check_flag, check_number
from pure_loop._internal.suggestions import teaching
from pure_loop.loop.stream import Stream
from pure_loop.state import State
from pure_loop.tools.divergence import Divergence, diff_streams
from pure_loop.tools.recorded import diff_recorded

__all__ = ["Divergence", "Recording", "diff"]

# (folder, model, a function of a State that makes the stream from there on)
Recording: TypeAlias = tuple[str | os.PathLike[str], nn.Module, Callable[[State], Stream]]


@teaching
def diff(
    a: Stream | Recording, b: Stream | Recording, *, tolerance: float = 0.0, operations: bool = False
) -> Divergence | None:
    """The first step at which two runs differ, or None: both are run side by side, until they do or end.

    Compared are all leaves of both States, by value, after what the loop computed before each event and after each
    algorithm: what is named is the first that made a difference, and not the first event at which it was seen. Times by
    the clock are left out. Values are compared on the host: this is to debug with.

    Two recorded runs are given as ``(folder, model, make)`` each: the folder of a
    :class:`pure_loop.callbacks.FlightRecorder`, the module, built as it was then, and a function of a State that makes
    the stream of the run from there on. Of the States that both have kept the last that is the same is found by
    bisection, and the batches after it are trained once more.

    Args:
        a, b: what ``pl.fit(...)`` returned, not begun and not compiled; or a recorded run.
        tolerance: for runs on other devices: leaves whose difference is at most this, relative to the larger norm, are
            equal; 0: bit for bit.
        operations: name the operation of torch, too, that first returned other numbers: checksums of all of them are
            compared, which is slow. Of recorded runs that is the batch alone, in a second run of it. Kernels that
            return nothing, such as those of optimizers, are not among them.

    Raises:
        ArgumentTypeError: one is no stream of ``fit``, and no recorded run.
        ArgumentError: one has begun, or is compiled; a negative tolerance; recorded runs that have kept no State after
            the same number of batches.
        CheckpointNotFoundError: a folder has no record.
        RewindError: recorded States differ, and the runs that were trained again do not.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> def train(lr):
    ...     net = torch.nn.Linear(2, 1)
    ...     _ = [torch.nn.init.ones_(parameter) for parameter in net.parameters()]
    ...     return pl.fit(net, data, loss=torch.nn.functional.mse_loss, max_duration="1ep",
    ...                   optimizer=pl.optim.sgd(lr=lr))
    >>> diff(train(0.1), train(0.1)) is None
    True
    >>> where = diff(train(0.1), train(0.2))
    >>> where.event.name, where.timestamp.batch, where.by, where.leaf
    ('BATCH_END', 1, 'optimizer', 'params/weight')
    """
    tolerance = check_number("tolerance", tolerance, least=0, where="diff")
    operations = check_flag("operations", operations, where="diff")
    if isinstance(a, tuple | str | os.PathLike) or isinstance(b, tuple | str | os.PathLike):
        return diff_recorded(a, b, tolerance=tolerance, operations=operations)
    return diff_streams(a, b, tolerance, -math.inf if operations else math.inf)
