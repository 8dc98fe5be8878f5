"""Optimizers that are a few operations on lists, in runs: they resume, and microbatches and compiled steps agree."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from tests.support.models import batches, plain
from tests.support.optimizing import ELEMENTWISE, RULES
from tests.support.streams import assert_same

OPTIMIZERS_PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
DATA = batches((8,) * 5, 1)
MODEL = plain()
MADE = {name: functools.partial(make, 0.01) for name, make in ELEMENTWISE.items()} | {
    "lion": functools.partial(pl.optim.lion, 0.01, weight_decay=0.1),
    "lamb": functools.partial(pl.optim.lamb, 0.1, weight_decay=0.1),
    "lamb, independent": functools.partial(pl.optim.lamb, 0.1, weight_decay=0.01, independent_decay=True),
}


def stream(name: str, start: Any, **options: Any) -> Any:
    return pl.fit(start, DATA, loss=cross_entropy, optimizer=MADE[name](), max_duration="2ep", **options)


@functools.cache
def whole(name: str) -> tuple[pl.State, ...]:
    return tuple(state for event, state in stream(name, MODEL) if event is Event.BATCH_END)


@pytest.mark.parametrize("name", MADE)
def test_they_learn(name: str) -> None:
    with torch.no_grad():
        losses = [
            sum(cross_entropy(state.module()(inputs), targets).item() for inputs, targets in DATA)
            for state in (whole(name)[0], whole(name)[-1])
        ]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("options", [{}, {"donate": False}, {"strict": True}], ids=str)
def test_training_resumes(name: str, options: dict[str, Any]) -> None:
    for point in (0, 6):
        state = pl.run(stream(name, whole(name)[point], **options))
        assert_same(state.params, whole(name)[-1].params, "params")
        assert_same(state.opt_state, whole(name)[-1].opt_state, "optimizer state")


@pytest.mark.parametrize("name", MADE)
def test_donated_steps_are_the_same(name: str) -> None:
    assert_same(pl.run(stream(name, MODEL)).params, whole(name)[-1].params, "params")


@pytest.mark.parametrize("name", MADE)
def test_microbatches(name: str) -> None:
    close_to_whole(name, pl.run(stream(name, MODEL, microbatch_size=3)))


@pytest.mark.usefixtures("interpreted")
def test_compiled_steps() -> None:
    """Those of the others, with schedules and numbers, are in test_schedules.py and test_lr_scale.py."""
    name = "lamb, independent"
    close_to_whole(name, pl.run(stream(name, MODEL, compile=True)))


def close_to_whole(name: str, state: pl.State) -> None:
    torch.testing.assert_close(dict(state.params), dict(whole(name)[-1].params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MADE)
def test_a_parameter_that_a_batch_does_not_use_stays_as_it_is(name: str) -> None:
    start = pl.FrozenDict(used=torch.ones(3), unused=torch.ones(2))
    optimizer = MADE[name]()
    grads = pl.FrozenDict(used=torch.ones(3), unused=None)
    params, opt_state = optimizer.update(grads, optimizer.init(start), start, pl.Timestamp())
    assert torch.equal(params["unused"], start["unused"])
    assert not torch.equal(params["used"], start["used"])
    # The first step that it takes is its first one, whatever the others have done.
    again, _ = optimizer.update(
        pl.FrozenDict(used=torch.ones(3), unused=torch.ones(2)), opt_state, params, pl.Timestamp()
    )
    fresh, _ = optimizer.update(
        pl.FrozenDict(unused=torch.ones(2)),
        optimizer.init(pl.FrozenDict(unused=torch.ones(2))),
        pl.FrozenDict(unused=torch.ones(2)),
        pl.Timestamp(),
    )
    assert torch.equal(again["unused"], fresh["unused"])


MODULES = [path.stem for path in Path(pl.optim.__file__).parent.glob("[a-z]*.py") if " Rule(" in path.read_text()]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_listed_by_its_package_and_by_the_docs(name: str) -> None:
    assert name in RULES, "pure_loop/optim/__init__.py: import it, add it to __all__, and to the mapping of modules"
    assert f"`{name}`" in OPTIMIZERS_PAGE.read_text().replace("pl.optim.", ""), "docs/optimizers.md: add a row"


# Of torch's class, or of the paper's own code.
DEFAULTS: dict[Callable[..., Any], Any] = {
    pl.optim.adam: torch.optim.Adam,
    pl.optim.adamw: torch.optim.AdamW,
    pl.optim.sgd: torch.optim.SGD,
    pl.optim.muon: torch.optim.Muon,
    pl.optim.lion: {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    pl.optim.lamb: {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0},
}


@pytest.mark.parametrize("make", RULES.values(), ids=lambda make: make.__name__)
def test_defaults_are_those_of_torch_or_of_the_paper(make: Callable[..., Any]) -> None:
    def defaults(function: Callable[..., Any]) -> dict[str, Any]:
        return {name: each.default for name, each in inspect.signature(function).parameters.items()}

    assert make in DEFAULTS, "tests/optim/test_rules.py: add those of the paper, or torch's class, to DEFAULTS"
    expected = DEFAULTS[make] if isinstance(DEFAULTS[make], dict) else defaults(DEFAULTS[make])
    found = defaults(make)
    shared = [name for name in expected if name in found and name != "adjust_lr"]  # torch's None is its "original"
    assert len(shared) >= 3
    assert {name: found[name] for name in shared} == {name: expected[name] for name in shared}
