"""Numbers in the optimizer state that are no parameter's, such as the number of steps, have the shape that they had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import pure_loop as pl
from pure_loop.errors import ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer, adam, adamw, master_weights, partition, sgd
from tests.support import problem
from tests.support.refused import Refusal, check


def halves() -> Optimizer:
    return partition({"adam": adam(0.1), "sgd": sgd(0.1)}, lambda name, tensor: "adam" if tensor.ndim == 2 else "sgd")


COUNTING: dict[str, tuple[Callable[[], Optimizer], tuple[str, ...]]] = {
    "adamw": (lambda: adamw(lr=0.1), ()),
    "partition": (halves, ("adam",)),
    "master_weights": (lambda: master_weights(adam(lr=0.1)), ("inner",)),
}
STEPS: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda step: step.repeat(3, 1), "has shape (3, 1), and with adam"),
    (lambda step: 2.0, "is a float, and adam"),
    (lambda step: step.long(), "has dtype torch.int64, and with adam"),
]


def changed(opt_state: Any, inside: tuple[str, ...], step: Any) -> Any:
    if not inside:
        return FrozenDict({**opt_state, "step": step(opt_state["step"])})
    return FrozenDict({**opt_state, inside[0]: changed(opt_state[inside[0]], inside[1:], step)})


@pytest.mark.parametrize("name", COUNTING)
def test_a_number_of_steps_of_another_shape_or_kind_is_named(tmp_path: Path, name: str) -> None:
    """Whatever door it comes through, and before a file's numbers are read."""
    make, inside = COUNTING[name]
    trained = problem.run(optimizer=make(), max_duration="1ba")
    for number, (step, says) in enumerate(STEPS):
        state, path = (
            trained.replace(opt_state=changed(trained.opt_state, inside, step)),
            tmp_path / f"{number}.safetensors",
        )
        pl.save(state, path)
        doors: dict[str, Callable[[], Any]] = {
            "fit(state)": lambda: problem.fit(state, optimizer=make()),
            "load_path": lambda: problem.fit(optimizer=make(), load_path=path),
            "pl.load": lambda: problem.fit(pl.load(path, model=problem.mlp()), optimizer=make()),
        }
        for door, call in doors.items():
            check(Refusal(door, call, ResumeError, ("'step']", says)))
