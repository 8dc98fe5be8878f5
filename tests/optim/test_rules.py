"""Optimizers in runs, with schedules of all numbers: they learn and resume, and scales and compiled steps agree."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import record
from pure_loop.optim import adam, adamw, from_torch, lamb, lion, muon, partition, sgd
from pure_loop.schedules import linear
from pure_loop.testing import differences
from tests.support import problem
from tests.support.optimizing import ELEMENTWISE, RULES
from tests.support.problem import cross_entropy, noise
from tests.support.streams import assert_same

OPTIMIZERS_PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
DATA = problem.points(5, 8, seed=1)
HALF = torch.tensor(0.5, dtype=torch.float64)
UP, DOWN = linear(0.0, 0.2, "5ba"), linear(0.9, 0.4, "5ba")
Rate = Callable[[pl.Timestamp], float] | float


def tenth(rate: Rate) -> Any:
    return (lambda timestamp: 0.1 * rate(timestamp)) if callable(rate) else 0.1 * rate


# From a rate, which each multiplies.
MADE: dict[str, Callable[[Rate], pl.optim.Optimizer]] = {
    **{name: (lambda rate, make=make: make(tenth(rate))) for name, make in ELEMENTWISE.items()},  # type: ignore[misc]
    "momentum from 0": lambda rate: sgd(rate, momentum=UP),
    "sgd": lambda rate: sgd(rate, momentum=DOWN, weight_decay=UP, nesterov=True),
    "sgd, dampened": lambda rate: sgd(rate, momentum=DOWN, dampening=0.1, weight_decay=UP, independent_decay=True),
    "adam": lambda rate: adam(tenth(rate), betas=(DOWN, 0.99), weight_decay=UP),
    "adamw": lambda rate: adamw(tenth(rate), betas=(DOWN, DOWN), weight_decay=UP, amsgrad=True),
    "lion": lambda rate: lion(tenth(rate), betas=(DOWN, DOWN), weight_decay=UP),
    "lamb": lambda rate: lamb(rate, betas=(DOWN, DOWN), weight_decay=UP),
    "lamb, independent": lambda rate: lamb(rate, weight_decay=0.01, independent_decay=True),
    "muon": lambda rate: partition(
        {"hidden": muon(tenth(rate), momentum=DOWN), "others": adamw(tenth(rate))},
        label=lambda name, tensor: "hidden" if tensor.ndim == 2 else "others",
    ),
    "partition": lambda rate: partition(
        {"weights": adamw(tenth(rate), weight_decay=UP), "biases": sgd(rate, momentum=DOWN)},
        label=lambda name, tensor: "biases" if "bias" in name else "weights",
    ),
    "from_torch": lambda rate: from_torch(torch.optim.RMSprop, lr=tenth(rate)),
}


def fit(optimizer: pl.optim.Optimizer, start: Any = None, **options: Any) -> Any:
    return problem.fit(start, DATA, optimizer=optimizer, **{"strict": False, **options})


def close(state: pl.State, expected: pl.State, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    torch.testing.assert_close(dict(state.params), dict(expected.params), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", MADE)
def test_a_run_learns_and_resumes(name: str) -> None:
    whole = [state for event, state in fit(MADE[name](0.1), strict=True) if event is Event.BATCH_END]
    first, last = whole[0], whole[-1]
    with torch.no_grad():
        losses = [sum(cross_entropy(state.module()(x), y) for x, y in DATA) for state in (first, last)]
    assert losses[1] < losses[0]
    for start, options in ((None, {}), (first, {"donate": False}), (whole[6], {})):
        state = pl.run(fit(MADE[name](0.1), start, **options))
        assert_same(state.params, last.params, "params")
        assert_same(state.opt_state, last.opt_state, "optimizer state")
    close(pl.run(fit(MADE[name](0.1), microbatch_size=3)), last)


@pl.algorithm(Event.BATCH_CHECKPOINT)
def halve_after_two(state: pl.State) -> pl.State:
    return state.replace(lr_scale=HALF) if state.timestamp.batch == 2 else state


def test_the_scale_multiplies_each_rate_and_nothing_else() -> None:
    by_schedule = lambda timestamp: 0.25 if timestamp.batch < 2 else 0.125  # noqa: E731
    for number, (name, make) in enumerate(MADE.items()):
        options: dict[str, Any] = {"watch": {Event.BATCH_END}} if number % 2 else {"donate": False}
        wanted = pl.run(fit(make(by_schedule), **options))
        scaled = pl.run(fit(make(0.25), algorithms=[halve_after_two], **options))
        found = differences(scaled, wanted, without=frozenset({"lr_scale"}))
        assert not found, f"{name}: {found[0]}"
        assert scaled.lr_scale == 0.5


# A dampened optimizer changes the structure of its state in the first step; others are as those that are here.
ELSEWHERE = {"sgd, dampened", "lamb, independent", "adam", "from_torch"}


@pytest.mark.usefixtures("interpreted")
def test_one_graph_serves_all_numbers() -> None:
    for name in sorted(MADE.keys() - ELSEWHERE):
        options: dict[str, Any] = {"watch": {Event.BATCH_END}, "max_duration": "4ba"}
        start = pl.State.create(problem.mlp()).replace(lr_scale=HALF)
        with record() as compilations:
            compiled = pl.run(fit(MADE[name](0.25), start, compile=True, **options))
        # In muon a sum in another order may be another number of bfloat16.
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if name == "muon" else {"rtol": 2e-5, "atol": 1e-6}
        close(compiled, pl.run(fit(MADE[name](0.25), start, **options)), **tolerance)
        assert len(compilations) == 1


class Mixed(nn.Module):
    """The first parameters are the narrower ones."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(3, 4, dtype=torch.bfloat16), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x.bfloat16()).float())  # type: ignore[no-any-return]


@pytest.mark.usefixtures("interpreted")
def test_a_compiled_step_rounds_no_number_to_the_dtype_of_another_parameter() -> None:
    data = [(torch.randn(6, 3, generator=noise()), torch.randn(6, 1, generator=noise(1)))]
    model, settings = Mixed(), {"loss": nn.functional.mse_loss, "max_duration": "1ba", "strict": False}
    for name in ("sgd", "lamb"):
        compiled, eager = [
            problem.run(model, data, optimizer=MADE[name](0.3), **settings, **options)
            for options in ({"compile": True, "watch": {Event.BATCH_END}}, {})
        ]
        for parameter in ("wide.weight", "wide.bias"):
            # A rate of 0.3 in bfloat16 is 0.30078125.
            torch.testing.assert_close(compiled.params[parameter], eager.params[parameter], rtol=1e-6, atol=1e-6)


def test_schedules_are_called_with_a_timestamp_and_recorded_by_part() -> None:
    def own(timestamp: pl.Timestamp) -> float:
        assert type(timestamp) is pl.Timestamp
        return 0.1

    state = pl.State.create(problem.mlp()).replace(lr_scale=torch.tensor(0.5))
    assert pl.run(fit(sgd(0.1, momentum=own, weight_decay=own), state)).timestamp.batch == 10
    logger = pl.loggers.InMemoryLogger()
    pl.run(fit(MADE["partition"](0.1), loggers=[logger], max_duration="5ba"))
    assert logger.series("train/weight_decay/weights")[1] == pytest.approx([0.0, 0.04, 0.08, 0.12, 0.16])
    assert logger.series("train/momentum/biases")[1] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])


@pytest.mark.slow  # a process of its own
def test_an_update_needs_no_dynamo() -> None:
    code = (
        "import sys, torch\n"
        "from pure_loop.optim import adamw, sgd, partition\n"
        "from pure_loop.frozendict import FrozenDict\n"
        "from pure_loop.time import Timestamp\n"
        "p = FrozenDict(w=torch.ones(2))\n"
        "for o in (adamw(), sgd(momentum=0.9), partition({'a': adamw()}, label=lambda n, t: 'a')):\n"
        "    o.update(p, o.init(p), p, Timestamp())\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What holds for each module


MODULES = [path.stem for path in Path(pl.optim.__file__).parent.glob("[a-z]*.py") if " Rule(" in path.read_text()]
# Of torch's class, or of the paper's own code.
DEFAULTS: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "muon": torch.optim.Muon,
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "lamb": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0},
}


@pytest.mark.parametrize("name", sorted({*MODULES, *RULES}))
def test_it_is_listed_and_its_defaults_are_those_of_torch_or_of_the_paper(name: str) -> None:
    def defaults(function: Callable[..., Any]) -> dict[str, Any]:
        return {name: each.default for name, each in inspect.signature(function).parameters.items()}

    assert name in RULES, "pure_loop/optim/__init__.py: import it, add it to __all__, and to the mapping of modules"
    assert f"`{name}`" in OPTIMIZERS_PAGE.read_text().replace("pl.optim.", ""), "docs/optimizers.md: add a row"
    assert name in DEFAULTS, "tests/optim/test_rules.py: add those of the paper, or torch's class, to DEFAULTS"
    expected, found = DEFAULTS[name], defaults(RULES[name])
    expected = expected if isinstance(expected, dict) else defaults(expected)
    shared = [key for key in expected if key in found and key != "adjust_lr"]  # torch's None is its "original"
    assert len(shared) >= 3
    assert {key: found[key] for key in shared} == {key: expected[key] for key in shared}
