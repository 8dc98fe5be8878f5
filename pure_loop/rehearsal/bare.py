"""A call of ``fit`` reduced to its steps: no evaluators, callbacks, loggers and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pure_loop.algorithm import Algorithm, flatten
from pure_loop.data.group import parts_of
from pure_loop.entry.compiling import interpreted
from pure_loop.entry.fit import fit
from pure_loop.loop.stream import run
from pure_loop.state import State

__all__ = ["bare", "trace"]


def bare(arguments: Mapping[str, Any], batch: Any, steps: int) -> dict[str, Any]:
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


def trace(arguments: Mapping[str, Any], batch: Any) -> None:
    """Trace the steps of a call with ``compile=``, whose graphs run operation by operation, without a compiler.

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
