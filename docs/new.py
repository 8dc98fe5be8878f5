"""Write the skeleton of a method, and of its test: ``make new-algorithm NAME=lookahead``.

    python docs/new.py algorithm lookahead     # or callback, logger, metric, optimizer, schedule

It writes ``pure_loop/algorithms/lookahead.py`` and ``tests/algorithms/test_lookahead.py``, which pass lint, types and
the test as they are, and lists the method in the ``__init__.py`` of its package, but for optimizers, whose package is
written by hand. The tests of all methods of a kind find it, and ``make tables`` puts it into the tables of the docs.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "main", "write"]

ROOT = Path(__file__).resolve().parents[1]

_ALGORITHM = '''"""TITLE: one sentence, which is the row of the docs.

With the gradient ``g``::

    g' = strength g                        https://arxiv.org/abs/...
"""

from __future__ import annotations

from typing import Annotated

from pure_loop.algorithm import Algorithm
from pure_loop.event import Event
from pure_loop.ranges import AtLeast, checked
from pure_loop.state import State

__all__ = ["NAME"]


@checked
def NAME(
    strength: Annotated[float, AtLeast(0)] = 1.0,
    *,
    name: str = "NAME",
) -> Algorithm:
    """What it changes in training, and at which event.

    Args:
        strength: its meaning, at least 0.
        name: another one, if there are several.

    Raises:
        ArgumentError: a number out of range.
        ArgumentTypeError: a setting of another type.

    >>> import torch, pure_loop as pl
    >>> state = pl.State.create(torch.nn.Linear(1, 1)).replace(grads={"weight": torch.ones(1, 1), "bias": None})
    >>> NAME(strength=2.0)(state).grads["weight"]
    tensor([[2.]])
    """

    def scale(state: State) -> State:
        grads = state.grads
        assert grads is not None
        return state.replace(
            grads={parameter: None if grad is None else strength * grad for parameter, grad in grads.items()}
        )

    return Algorithm(name, {Event.AFTER_TRAIN_BATCH: scale})
'''

_ALGORITHM_TEST = '''"""TITLE, in real training loops."""

from __future__ import annotations

from pure_loop.algorithms import NAME
from tests.support.problem import run
from tests.support.streams import equal


def test_NAME_of_strength_1_changes_nothing() -> None:
    equal(run(algorithms=[NAME(1.0)]).params, run().params)
'''

_CALLBACK = '''"""Records something: one sentence, which is the row of the docs."""

from __future__ import annotations

from pure_loop.cadence import CadenceLike
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.callbacks._intervals import is_due, read_interval
from pure_loop.event import Event
from pure_loop.ranges import checked
from pure_loop.state import State

__all__ = ["CLASS"]


@checked
class CLASS(Callback):
    """Records ``train/batches`` at an interval.

    Args:
        interval: how often: ``"10ba"``, ``"1ep"``, ``"10m"``, ``"0.1dur"``, a predicate of the State.

    Raises:
        ArgumentTypeError, ArgumentError: an interval that can't be read.

    >>> callback = CLASS("100ba")
    """

    def __init__(self, interval: CadenceLike = "10ba") -> None:
        self._interval = read_interval(interval, "CLASS")

    # An interval in epochs is due at EPOCH_END, any other one at BATCH_END.
    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        self._record_if_due(state, Event.BATCH_END, logger)

    def epoch_end(self, state: State, logger: LoggerGroup) -> None:
        self._record_if_due(state, Event.EPOCH_END, logger)

    def _record_if_due(self, state: State, event: Event, logger: LoggerGroup) -> None:
        if is_due(self._interval, state, event):
            # A value may be a tensor on the device, such as total_loss(state.loss) of stages/nonfinite.py: no .item()
            # here, loggers read many at once.
            logger.log_metrics({"train/batches": state.timestamp.batch}, state)
'''

_CALLBACK_TEST = '''"""CLASS, in a real training loop."""

from __future__ import annotations

from pure_loop.callbacks import CLASS
from pure_loop.loggers import InMemoryLogger
from tests.support.problem import points, run


def test_NAME_records_at_its_interval() -> None:
    for interval, batches in {"3ba": [3, 6], "1ep": [4, 8]}.items():
        logger = InMemoryLogger()
        run(data=points(4), callbacks=[CLASS(interval)], loggers=[logger], max_duration="2ep")
        assert logger.series("train/batches") == (batches, [float(batch) for batch in batches])
'''

_LOGGER = '''"""Writes somewhere: one sentence, which is the row of the docs."""

from __future__ import annotations

from collections.abc import Sequence

from pure_loop.cadence import CadenceLike
from pure_loop.loggers._destination import Destination, Names
from pure_loop.loggers._entry import Entry
from pure_loop.ranges import checked

__all__ = ["CLASS"]


@checked
class CLASS(Destination):
    """The destination, and the kinds of values that it takes.

    Args:
        include, exclude: globs of names; None: all.
        flush: how often values are read from the device and written: ``"50ba"``, ``"1ep"``, a predicate of the State.

    Attributes:
        lines: the recorded values, as text.

    >>> logger = CLASS(include="train/*")
    """

    def __init__(self, *, include: Names = None, exclude: Names = None, flush: CadenceLike = "50ba") -> None:
        super().__init__(include=include, exclude=exclude, flush=flush)
        self.lines: list[str] = []

    # Values are Python numbers here: those of many batches were read from the device at once. A logger with a file
    # overrides what Destination says of records, too: csv_file.py is one.
    def write(self, entries: Sequence[Entry]) -> None:
        metrics = (entry for entry in entries if entry.kind == "metric")
        self.lines += [f"{entry.moment.batch} {entry.name} {entry.value:g}" for entry in metrics]
'''

_LOGGER_TEST = '''"""CLASS, in a real training loop."""

from __future__ import annotations

from pure_loop.loggers import CLASS
from tests.support.problem import points, run


def test_NAME_has_a_line_for_each_number() -> None:
    logger = CLASS()
    run(data=points(2), loggers=[logger], max_duration="1ep")
    rates = [line for line in logger.lines if "learning_rate" in line]
    assert rates == ["1 train/learning_rate 0.1", "2 train/learning_rate 0.1"]
'''

_METRIC = '''"""TITLE: one sentence."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from pure_loop.metrics._base import Metric
from pure_loop.metrics.mean import mean
from pure_loop.ranges import Name, checked

__all__ = ["NAME"]


@checked
def NAME(name: Annotated[str, Name()] = "NAME") -> Metric:
    """What it measures; shapes and dtypes of outputs and targets.

    Args:
        name: the metric's name.

    Raises:
        ArgumentTypeError: a name that is no string.

    >>> import torch
    >>> metric = NAME()
    >>> metric.compute(metric.update(metric.init(), torch.eye(2), (None, torch.tensor([0, 0]))))
    tensor(0.5000)
    """

    def error(outputs: Any, batch: Any) -> Tensor:
        is_wrong: Tensor = outputs.argmax(dim=1) != batch[1]
        return is_wrong.float()

    return mean(error, name)
'''

_METRIC_TEST = '''"""TITLE, against its formula."""

from __future__ import annotations

import torch

from pure_loop.metrics import NAME


def test_NAME_does_not_depend_on_how_samples_are_batched() -> None:
    metric = NAME()
    outputs, targets = torch.eye(4), torch.zeros(4, dtype=torch.int64)
    accumulator = metric.init()
    for part in (slice(0, 1), slice(1, 4)):
        accumulator = metric.update(accumulator, outputs[part], (None, targets[part]))
    assert metric.compute(accumulator) == 0.75
'''

_OPTIMIZER = '''"""TITLE: one sentence.

With the gradient ``g`` and the decay rate ``b = momentum``::

    m = b m + (1 - b) g                         average
    p = (1 - lr weight_decay) p - lr m

https://arxiv.org/abs/...
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from pure_loop.optim._rules import Rate, Rule, StepOptions, add_multiple_, between, decay_
from pure_loop.optim.optimizer import LearningRate, Optimizer
from pure_loop.ranges import AtLeast, Between, checked
from pure_loop.ranges.strengths import Strength

__all__ = ["NAME"]


@checked
def NAME(
    lr: Annotated[LearningRate, Rate()] = 1e-3,
    momentum: Annotated[Strength, Between(0, 1)] = 0.9,
    weight_decay: Annotated[Strength, AtLeast(0)] = 0.0,
    independent_decay: bool = False,
) -> Optimizer:
    """What its step is, and of which class or paper.

    Args:
        lr: the learning rate, or a function of the timestamp (see :mod:`pure_loop.schedules`).
        momentum: how much of the average each step keeps.
        weight_decay: each step multiplies the parameters by ``1 - lr * weight_decay``.
        independent_decay: multiply the parameters by ``1 - weight_decay`` instead, whatever the learning rate.

    The state holds ``average`` (shaped like the parameters).

    Raises:
        ArgumentError: (a ValueError) for a hyperparameter out of range, here or by the schedule in ``update``.
        ResumeError: (a ValueError) by ``update``, for the state of another model or optimizer.

    >>> NAME(lr=0.5)
    NAME(lr=0.5, momentum=0.9, weight_decay=0.0, independent_decay=False)
    """
    rule = Rule(name="NAME", kernel=_step, arguments={**locals()}, memories=("average",))
    return rule.optimizer(elementwise=True)


# Writes to params and memories, and to nothing else. In a compiled step options are tensors of shape (), which the
# functions of _rules.py take as they take numbers. With Rule(counts=True) steps are the numbers of the step.
def _step(
    options: StepOptions, params: list[Tensor], grads: list[Tensor], memories: list[list[Tensor]], steps: list[Tensor]
) -> None:
    (averages,) = memories
    decay_(params, options)
    torch._foreach_copy_(averages, between(averages, grads, 1 - options["momentum"]))
    add_multiple_(params, averages, -options["lr"])
'''

_OPTIMIZER_TEST = '''"""TITLE, against its formula."""

from __future__ import annotations

import torch

from pure_loop.optim import NAME
from tests.support.optimizing import batches, ours, tensors


def test_NAME_is_its_formula() -> None:
    start, steps = tensors(0, torch.float64), batches(0, torch.float64)
    params, averages = start, [torch.zeros_like(tensor) for tensor in start]
    for grads in steps:
        averages = [0.9 * average + 0.1 * grad for average, grad in zip(averages, grads, strict=True)]
        params = [0.99 * param - 0.1 * average for param, average in zip(params, averages, strict=True)]
    found, _ = ours(NAME(0.1, weight_decay=0.1), start, steps)[-1]
    torch.testing.assert_close(list(found.values()), params)
'''

_SCHEDULE = '''"""TITLE: one sentence."""

# The class is called as a function and named like one.
# ruff: noqa: N801

from __future__ import annotations

from typing import Annotated

import attrs

from pure_loop.ranges import Number, checked
from pure_loop.schedules._base import LASTING, Schedule, as_time, between, part_over
from pure_loop.time import Time, Timestamp

__all__ = ["NAME"]


@checked
@attrs.frozen
class NAME(Schedule):
    """From 0 to ``peak`` over ``time``: the formula.

    >>> schedule = NAME("4ba")
    >>> [schedule(Timestamp(batch=i)) for i in range(5)]
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """

    time: Annotated[Time, LASTING] = attrs.field(converter=as_time)
    peak: Annotated[float, Number()] = 1.0

    def __call__(self, timestamp: Timestamp) -> float:
        return between(0.0, self.peak, part_over(self.time, timestamp))
'''

_SCHEDULE_TEST = '''"""TITLE, against its formula."""

from __future__ import annotations

from pure_loop import Timestamp
from pure_loop.schedules import NAME


def test_NAME_rises_to_its_peak() -> None:
    schedule = NAME("4ba", peak=2.0)
    assert [schedule(Timestamp(batch=i)) for i in (0, 2, 4, 9)] == [0.0, 1.0, 2.0, 2.0]
'''

KINDS: dict[str, tuple[str, str, str]] = {
    "algorithm": ("algorithms", _ALGORITHM, _ALGORITHM_TEST),
    "callback": ("callbacks", _CALLBACK, _CALLBACK_TEST),
    "logger": ("loggers", _LOGGER, _LOGGER_TEST),
    "metric": ("metrics", _METRIC, _METRIC_TEST),
    "optimizer": ("optim", _OPTIMIZER, _OPTIMIZER_TEST),
    "schedule": ("schedules", _SCHEDULE, _SCHEDULE_TEST),
}
"""Each kind's package, and the skeletons of a module and of its test."""


def write(kind: str, name: str) -> tuple[Path, Path]:
    """Write both skeletons; the paths of the module and the test.

    Raises:
        SystemExit: a name that no module can have, or one that is there already.
    """
    package, module, test = KINDS[kind]
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise SystemExit(f"NAME={name!r}: write it as a module is named, such as NAME=gradient_noise.")
    paths = ROOT / "pure_loop" / package / f"{name}.py", ROOT / "tests" / package / f"test_{name}.py"
    for path in paths:
        if path.exists():
            raise SystemExit(f"{path} is there already: give the {kind} another name, or edit it.")
    title = name.replace("_", " ").capitalize()
    cls = "".join(part.capitalize() for part in name.split("_"))
    if kind == "logger":
        cls = f"{cls.removesuffix('Logger')}Logger"
    for path, skeleton in zip(paths, (module, test), strict=True):
        path.write_text(re.sub("TITLE", title, re.sub("CLASS", cls, re.sub("NAME", name, skeleton))))
    return paths


def _generate() -> Any:
    spec = importlib.util.spec_from_file_location("_generate", Path(__file__).with_name("generate.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_generate"] = module  # attrs looks there
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name")
    options = parser.parse_args(arguments)
    paths = write(options.kind, options.name)
    # A long name may need another line.
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", *map(str, paths)], check=True)
    for path in paths:
        print(f"{path.relative_to(ROOT)}: written")
    _generate().main(["--packages"])
    package = KINDS[options.kind][0]
    # The ids of those tests are the names of classes and functions, in any case.
    public = options.name.replace("_", "") if options.kind in ("callback", "logger") else options.name
    if options.kind == "optimizer":
        print(f"pure_loop/optim/__init__.py: list {public!r}, in two places; and a row in docs/optimizers.md")
    suite = f"{'tests/optim ' if options.kind == 'optimizer' else ''}tests/architecture/test_every_method.py"
    print("Fill both in, and try:")
    print(f"  pytest {paths[1].relative_to(ROOT)}")
    print(f"  pytest {suite} -k {public}  # what holds for all of {package}")
    print("  make lint typecheck tables")
    print("Then: a line in CHANGELOG.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
