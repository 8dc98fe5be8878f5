"""Numbers and flags that make no sense: each public function refuses them when it is called, by argument and value.

A table says of every numeric and boolean argument what is allowed; Hypothesis draws what is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import schedules
from pure_loop.callbacks import CheckpointSaver, LRMonitor, SpeedMonitor
from pure_loop.distributed import Parallel
from pure_loop.loggers import ConsoleLogger
from tests.support.refusals import DATA, SGD, net
from tests.support.tiers import examples

# What no number is.
OTHERS = st.sampled_from([object(), "1", "yes", b"1", [1], (1.0,), {}, 1j, torch.ones(2)])
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf, 10**400])
BOOLS = st.booleans()


def below(limit: float, *, itself: bool = False) -> st.SearchStrategy[Any]:
    """Numbers less than this one, or not above it."""
    floats = st.floats(max_value=limit, exclude_max=not itself, allow_nan=False)
    most = math.floor(limit) - (limit == math.floor(limit) and not itself)
    # Larger ones are other numbers as floats, which a message may show.
    return floats | st.integers(min_value=-(10**15), max_value=most)


def above(limit: float, *, itself: bool = False) -> st.SearchStrategy[Any]:
    return below(-limit, itself=itself).map(lambda number: -number)


ANY_NUMBER = st.floats() | st.integers()
NONE = st.none()
FRACTIONS = st.floats(-10, 10).filter(lambda number: number != int(number))

NO_TIMES = ["", "-1ba", "1.5ba", "3", "ba", "nanba", "infs", -1, 1.5, True, [1], object()]

# By what an argument takes: what it does not.
KINDS: Mapping[str, st.SearchStrategy[Any]] = {
    "flag": OTHERS | NONE | ANY_NUMBER,
    "flag or None": OTHERS | ANY_NUMBER,
    "number": OTHERS | NONE | BOOLS | NOT_FINITE,
    "number >= 0": OTHERS | NONE | BOOLS | NOT_FINITE | below(0),
    "number >= 1": OTHERS | NONE | BOOLS | NOT_FINITE | below(1),
    # Lists are told that fit gives the parameters.
    "rate": st.sampled_from(["1", 1j, None, True]) | NOT_FINITE | below(0),
    "number > 0": OTHERS | NONE | BOOLS | NOT_FINITE | below(0, itself=True),
    "number > 0 or None": OTHERS | BOOLS | NOT_FINITE | below(0, itself=True),
    "number in [0, 1)": OTHERS | NONE | BOOLS | NOT_FINITE | below(0) | above(1, itself=True),
    "number in [0, 1) or None": OTHERS | BOOLS | NOT_FINITE | below(0) | above(1, itself=True),
    "two in [0, 1)": st.sampled_from([(0.9,), (0.9, 0.99, 0.999), 0.9, None, "99", (0.9, "0.9"), (True, 0.9)])
    | st.tuples(st.just(0.9), below(0) | above(1, itself=True))
    | st.tuples(below(0) | above(1, itself=True), st.just(0.9)),
    "int": OTHERS | NONE | BOOLS | FRACTIONS | st.sampled_from([math.nan, math.inf]),
    "int >= 0 or None": OTHERS | BOOLS | FRACTIONS | st.sampled_from([math.nan, math.inf]) | st.integers(max_value=-1),
    "int or None": OTHERS | BOOLS | FRACTIONS | st.sampled_from([math.nan, math.inf]),
    "int >= 0": OTHERS | NONE | BOOLS | FRACTIONS | st.sampled_from([math.nan, math.inf]) | st.integers(max_value=-1),
    "int >= 1": OTHERS | NONE | BOOLS | FRACTIONS | st.sampled_from([math.nan, math.inf]) | st.integers(max_value=0),
    "int >= 1 or None": OTHERS | BOOLS | FRACTIONS | st.sampled_from([math.nan, math.inf]) | st.integers(max_value=0),
    "time": st.sampled_from(NO_TIMES),
    "time > 0": st.sampled_from([*NO_TIMES, "0ba", "0ep", 0]),
    "interval": st.sampled_from([*NO_TIMES, "0ba", "0ep", "0tok", "0s", "0dur", "0.0s", pl.Time("0ba"), pl.Time("0s")]),
    "name": st.sampled_from([3, None, True, 1.5, object(), ["name"], b"name"]),
}


def fit(**arguments: Any) -> Any:
    settings: dict[str, Any] = {"loss": torch.nn.functional.cross_entropy, "optimizer": SGD, "max_duration": "1ep"}
    return pl.fit(net(), DATA, **{**settings, **arguments})


def evaluate(**arguments: Any) -> Any:
    return pl.evaluate(net(), DATA, loss=torch.nn.functional.cross_entropy, **arguments)


def predict(**arguments: Any) -> Any:
    return pl.predict(net(), DATA, **arguments)


def drive(**arguments: Any) -> Any:
    return pl.drive((pair for pair in ()), **arguments)  # type: ignore[arg-type]


def count_batch(**arguments: Any) -> Any:
    return pl.State.create(net()).count_batch(**{"samples": 1, **arguments})


def create(**arguments: Any) -> Any:
    return pl.State.create(net(), **arguments)


COUNTS = [field.name for field in attrs.fields(pl.Timestamp) if field.default == 0 and type(field.default) is int]
SECONDS = [field.name for field in attrs.fields(pl.Timestamp) if field.name.endswith("_seconds")]
ADAM = {
    "lr": "rate",
    "betas": "two in [0, 1)",
    "eps": "number >= 0",
    "weight_decay": "number >= 0",
    "amsgrad": "flag",
    "maximize": "flag",
}
FLAGS = {"strict": "flag or None"}

# Of each function: what its numeric and boolean arguments take. What comes after a blank is another call of the same.
DOORS: Mapping[str, tuple[Callable[..., Any], Mapping[str, str]]] = {
    "fit": (
        fit,
        {
            **FLAGS,
            "microbatch_size": "int >= 1 or None",
            "batches_per_epoch": "int >= 1 or None",
            "steps_per_call": "int >= 1",
            "seed": "int",
            "max_duration": "time",
            "eval_interval": "interval",
            "iteration_length": "time > 0",
        },
    ),
    "evaluate": (evaluate, {**FLAGS, "seed": "int"}),
    "predict": (predict, {**FLAGS, "seed": "int"}),
    "drive": (drive, FLAGS),
    "load": (lambda **given: pl.load("nowhere", model=net(), **given), {"weights_only": "flag", "strict": "flag"}),
    "every": (lambda interval: pl.every(interval), {"interval": "interval"}),
    "Evaluator": (
        lambda **arguments: pl.Evaluator(DATA, **arguments),
        {"interval": "interval", "batches": "int >= 1 or None", "microbatch_size": "int >= 1 or None"},
    ),
    "CheckpointSaver": (
        lambda **arguments: CheckpointSaver("folder", **arguments),
        {"interval": "interval", "keep_last": "int >= 1 or None", "background": "flag"},
    ),
    "CheckpointSaver, the best": (
        lambda **arguments: CheckpointSaver("folder", metric="val/loss", mode="min", **arguments),
        {"keep_best": "int >= 1 or None"},
    ),
    "SpeedMonitor": (SpeedMonitor, {"window": "int >= 1"}),
    "LRMonitor": (lambda **arguments: LRMonitor(SGD, **arguments), {"name": "name"}),
    "ConsoleLogger": (ConsoleLogger, {"interval": "interval"}),
    "progress": (lambda **arguments: pl.progress(fit(), **arguments), {"refresh_seconds": "number >= 0"}),
    "sgd": (
        pl.optim.sgd,
        {
            "lr": "rate",
            "momentum": "number in [0, 1)",
            "dampening": "number in [0, 1)",
            "weight_decay": "number >= 0",
            "nesterov": "flag",
            "maximize": "flag",
            "independent_decay": "flag",
        },
    ),
    "adam": (pl.optim.adam, ADAM),
    "adamw": (pl.optim.adamw, {**ADAM, "independent_decay": "flag"}),
    "lion": (
        pl.optim.lion,
        {
            "lr": "rate",
            "betas": "two in [0, 1)",
            "weight_decay": "number >= 0",
            "independent_decay": "flag",
            "maximize": "flag",
        },
    ),
    "muon": (
        pl.optim.muon,
        {
            "lr": "rate",
            "momentum": "number in [0, 1)",
            "weight_decay": "number >= 0",
            "independent_decay": "flag",
            "nesterov": "flag",
            "eps": "number >= 0",
        },
    ),
    "lamb": (
        pl.optim.lamb,
        {
            "lr": "rate",
            "betas": "two in [0, 1)",
            "eps": "number >= 0",
            "weight_decay": "number >= 0",
            "independent_decay": "flag",
            "bias_correction": "flag",
            "maximize": "flag",
        },
    ),
    "from_torch": (lambda **options: pl.optim.from_torch(torch.optim.Adagrad, **options), {"lr": "rate"}),
    "constant": (schedules.constant, {"value": "number"}),
    "linear": (
        lambda **given: schedules.linear(**{"start": 1.0, "end": 0.0, "time": "4ba", **given}),
        {"start": "number", "end": "number", "time": "time > 0"},
    ),
    "cosine": (
        lambda **given: schedules.cosine(**{"time": "4ba", **given}),
        {"time": "time > 0", "peak": "number", "final": "number"},
    ),
    "polynomial": (
        lambda **given: schedules.polynomial(**{"time": "4ba", **given}),
        {"time": "time > 0", "power": "number > 0", "peak": "number", "final": "number"},
    ),
    "cosine_restarts": (
        lambda **given: schedules.cosine_restarts(**{"time": "4ba", **given}),
        {"time": "time > 0", "peak": "number", "final": "number", "growth": "number >= 1"},
    ),
    "step": (
        lambda **given: schedules.step(**{"time": "4ba", **given}),
        {"time": "time > 0", "gamma": "number", "start": "number"},
    ),
    "multistep": (
        lambda **given: schedules.multistep(**{"milestones": ["4ba"], **given}),
        {"gamma": "number", "start": "number"},
    ),
    "exponential": (
        lambda **given: schedules.exponential(**{"time": "4ba", "gamma": 0.5, **given}),
        {"time": "time > 0", "gamma": "number > 0", "start": "number"},
    ),
    "warmup": (lambda **given: schedules.warmup(**{"time": "4ba", **given}), {"time": "time > 0"}),
    "ema": (
        lambda **given: pl.algorithms.ema(**{"half_life": "4ba", **given}),
        {"half_life": "time > 0", "name": "name"},
    ),
    "ema smoothed": (
        lambda **given: pl.algorithms.ema(**{"smoothing": 0.9, **given}),
        {"smoothing": "number in [0, 1) or None", "interval": "time > 0"},
    ),
    "sam": (
        pl.algorithms.sam,
        {"rho": "number > 0", "epsilon": "number > 0", "interval": "int >= 1", "adaptive": "flag", "name": "name"},
    ),
    "label_smoothing": (
        pl.algorithms.label_smoothing,
        {"smoothing": "number in [0, 1)", "ignore_index": "int", "name": "name"},
    ),
    "gradient_clipping": (
        lambda **given: pl.algorithms.gradient_clipping("norm", **{"threshold": 1.0, **given}),
        {"threshold": "number > 0", "name": "name"},
    ),
    "blurpool": (
        pl.algorithms.blurpool,
        {
            "replace_convs": "flag",
            "replace_maxpools": "flag",
            "blur_first": "flag",
            "min_channels": "int >= 1",
            "name": "name",
        },
    ),
    "Parallel": (
        Parallel,
        {
            "timeout": "number > 0",
            "find_unused_parameters": "flag or None",
            "bucket_cap_mb": "number > 0 or None",
        },
    ),
    "Timestamp": (
        pl.Timestamp,
        {
            **dict.fromkeys(COUNTS, "int >= 0"),
            **dict.fromkeys(SECONDS, "number >= 0"),
            "batches_per_epoch": "int >= 0 or None",
        },
    ),
    "Timestamp.replace": (pl.Timestamp().replace, {"batch": "int >= 0", "total_seconds": "number >= 0"}),
    "State.create": (create, {"seed": "int"}),
    "State.count_batch": (
        count_batch,
        {"samples": "int >= 0", "tokens": "int >= 0", "seconds": "number >= 0"},
    ),
    "State.module": (lambda **given: pl.State.create(net()).module(**given), {"training": "flag"}),
    "accuracy": (pl.metrics.accuracy, {"axis": "int or None", "ignore_index": "int or None"}),
}
ARGUMENTS = [(door, argument) for door, (_, arguments) in DOORS.items() for argument in arguments]


@pytest.mark.parametrize(("door", "argument"), ARGUMENTS, ids=[".".join(pair) for pair in ARGUMENTS])
@examples(12, 300)
@given(data=st.data())
def test_what_makes_no_sense_is_refused(door: str, argument: str, data: st.DataObject) -> None:
    call, arguments = DOORS[door]
    value = data.draw(KINDS[arguments[argument]])
    with pytest.raises(pl.PureLoopError) as raised:
        call(**{argument: value})
    said = str(raised.value)
    assert isinstance(raised.value, ValueError | TypeError)
    assert argument in said, f"it does not name {argument}: {said}"
    shown = [repr(part) for part in (*(value if isinstance(value, tuple) else ()), value)]
    if isinstance(value, pl.Time):
        shown = [repr(str(value))]
    assert any(text in said or len(text) > 40 for text in shown), f"it does not say {shown}: {said}"
