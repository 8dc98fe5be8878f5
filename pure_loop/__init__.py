"""pure_loop: the PyTorch training loop as a generator of ``(Event, State)`` pairs over immutable values.

>>> import torch, pure_loop as pl
>>> data = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 5
>>> for event, state in pl.fit(
...     torch.nn.Linear(4, 3), data, loss=torch.nn.functional.cross_entropy,
...     optimizer=pl.optim.adamw(lr=1e-2), max_duration="2ep", evaluators={"val": data},
... ):
...     if event is pl.Event.EPOCH_CHECKPOINT:
...         print(state.timestamp.epoch, sorted(state.metrics["val"]))
1 ['accuracy', 'loss']
2 ['accuracy', 'loss']
"""

import sys as _sys
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING

from pure_loop import data, errors, gradients, metrics, optim, random, stages
from pure_loop._internal.lazy import lazily as _lazily
from pure_loop._internal.version import __version__ as __version__
from pure_loop.algorithm import Algorithm, algorithm, compose, one_of
from pure_loop.cadence import every
from pure_loop.callback import Callback, Logger
from pure_loop.data.group import Batches
from pure_loop.entry.fit import fit
from pure_loop.errors import PureLoopError
from pure_loop.evaluator import Evaluator
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.lens import Lens
from pure_loop.loop.stream import Stream, run
from pure_loop.metrics import Metric
from pure_loop.optim import Optimizer
from pure_loop.state import State
from pure_loop.task import Task
from pure_loop.time import Time, Timestamp, TimeUnit

if TYPE_CHECKING:
    from pure_loop import algorithms, callbacks, checkpoint, distributed, loggers, order, schedules
    from pure_loop import testing as testing
    from pure_loop import typing as typing
    from pure_loop.checkpoint import best as best
    from pure_loop.checkpoint import best_path, latest_path, load, save
    from pure_loop.checkpoint import latest as latest
    from pure_loop.checkpoint.composer import from_composer
    from pure_loop.entry.drive import drive
    from pure_loop.entry.evaluate import evaluate, predict
    from pure_loop.entry.explain import explain
    from pure_loop.entry.largest_microbatch import largest_microbatch
    from pure_loop.exporting import export
    from pure_loop.loop.driver import Script
    from pure_loop.members.each import each
    from pure_loop.members.ensemble import ensemble
    from pure_loop.members.stacking import stack
    from pure_loop.progress import progress
    from pure_loop.recipe import Recipe
    from pure_loop.rehearsal.rehearse import rehearse
    from pure_loop.reporting import report
    from pure_loop.stages import Stages
    from pure_loop.tools.ablate import ablate
    from pure_loop.tools.changes import blame
    from pure_loop.tools.changes import changes as changes  # importable, and not listed: blame gives the same
    from pure_loop.tools.diff import diff
    from pure_loop.tools.inspection import inspect
    from pure_loop.tools.lr_find import lr_find
    from pure_loop.tools.profile import profile
    from pure_loop.tools.rewind import rewind

__all__ = [
    "Algorithm",
    "Batches",
    "Callback",
    "Evaluator",
    "Event",
    "FrozenDict",
    "Lens",
    "Logger",
    "Metric",
    "Optimizer",
    "PureLoopError",
    "Recipe",
    "Script",
    "Stages",
    "State",
    "Stream",
    "Task",
    "Time",
    "TimeUnit",
    "Timestamp",
    "ablate",
    "algorithm",
    "algorithms",
    "best_path",
    "blame",
    "callbacks",
    "checkpoint",
    "compose",
    "data",
    "diff",
    "distributed",
    "drive",
    "each",
    "ensemble",
    "errors",
    "evaluate",
    "every",
    "explain",
    "export",
    "fit",
    "from_composer",
    "gradients",
    "inspect",
    "largest_microbatch",
    "latest_path",
    "load",
    "loggers",
    "lr_find",
    "metrics",
    "one_of",
    "optim",
    "order",
    "predict",
    "profile",
    "progress",
    "random",
    "rehearse",
    "report",
    "rewind",
    "run",
    "save",
    "schedules",
    "stack",
    "stages",
    # Not testing: what is listed here is imported by a star, and it can't be where Hypothesis is not installed. Nor
    # typing, which would hide the standard library's.
]

# What a plain fit doesn't use.
_LAZY = {
    # best and latest are earlier names of best_path and latest_path.
    "checkpoint": ("best", "best_path", "latest", "latest_path", "load", "save"),
    "checkpoint.composer": ("from_composer",),
    "entry.drive": ("drive",),
    "entry.evaluate": ("evaluate", "predict"),
    "entry.explain": ("explain",),
    "entry.largest_microbatch": ("largest_microbatch",),
    # The names of pl.errors at the top are earlier ones.
    "errors": {*errors.__all__} - {"PureLoopError"},
    "exporting": ("export",),
    "loop.driver": ("Script",),
    "members.each": ("each",),
    "members.ensemble": ("ensemble",),
    "members.stacking": ("stack",),
    "progress": ("progress",),
    "recipe": ("Recipe",),
    "rehearsal.rehearse": ("rehearse",),
    "reporting": ("report",),
    "stages.stages": ("Stages",),
    "tools.ablate": ("ablate",),
    "tools.changes": ("blame", "changes"),
    "tools.diff": ("diff",),
    "tools.inspection": ("inspect",),
    "tools.lr_find": ("lr_find",),
    "tools.profile": ("profile",),
    "tools.rewind": ("rewind",),
}
_SUBMODULES = frozenset(
    {
        *("algorithms", "callbacks", "checkpoint", "compile", "distributed", "loggers", "order", "schedules"),
        *("testing", "typing"),
    }
)
if not TYPE_CHECKING:  # to type checkers a module with a __getattr__ has every name, misspelled ones included
    __getattr__ = _lazily(__name__, _LAZY, submodules=_SUBMODULES)


def __dir__() -> list[str]:
    return sorted([*__all__, "typing", *(["testing"] if _find_spec("hypothesis") else [])])


# Whichever of the two is imported second introduces them: these lines, or the entry point that Hypothesis calls. While
# Hypothesis is half imported it has no register_random; it calls the entry point at its end.
if hasattr(_sys.modules.get("hypothesis"), "register_random"):
    _import_module("pure_loop.entry.hypothesis").register()
