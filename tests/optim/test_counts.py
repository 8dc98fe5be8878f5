"""Numbers in the optimizer state that are no parameter's, such as the number of steps, have the shape that they had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.errors import ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim.optimizer import Optimizer

DATA = [(torch.ones(4, 2), torch.zeros(4, 1))] * 2


def halves() -> Optimizer:
    parts = {"adam": pl.optim.adam(lr=0.1), "sgd": pl.optim.sgd(lr=0.1)}
    return pl.optim.partition(parts, lambda name, tensor: "adam" if tensor.ndim == 2 else "sgd")


OPTIMIZERS: dict[str, tuple[Callable[[], Optimizer], tuple[str, ...]]] = {
    "adamw": (lambda: pl.optim.adamw(lr=0.1), ()),
    "lamb": (lambda: pl.optim.lamb(lr=0.1), ()),
    "partition": (halves, ("adam",)),
    "master_weights": (lambda: pl.optim.master_weights(pl.optim.adam(lr=0.1)), ("inner",)),
}


def fit(start: Any, optimizer: Optimizer, **options: Any) -> Any:
    settings = {"loss": nn.functional.mse_loss, "max_duration": "2ep", **options}
    return pl.fit(start, DATA, optimizer=optimizer, **settings)


def changed(opt_state: Any, inside: tuple[str, ...], step: Any) -> Any:
    if not inside:
        return FrozenDict({**opt_state, "step": step(opt_state["step"])})
    return FrozenDict({**opt_state, inside[0]: changed(opt_state[inside[0]], inside[1:], step)})


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("door", ["fit(state)", "load_path", "pl.load"])
@pytest.mark.parametrize(
    ("step", "what"),
    [
        (lambda step: step.reshape(1), r"has shape \(1,\), and with \w+ it has \(\)"),
        (lambda step: torch.zeros(0), r"has shape \(0,\), and with \w+ it has \(\)"),
        (lambda step: step.repeat(3, 1), r"has shape \(3, 1\), and with \w+ it has \(\)"),
        (lambda step: 2.0, "is a float, and .* needs a tensor there"),
        (lambda step: step.long(), r"has dtype torch\.int64, and with \w+ it has torch\.float32"),
    ],
    ids=["one", "none", "matrix", "number", "integer"],
)
def test_a_number_of_steps_of_another_shape_or_kind_is_named(
    tmp_path: Path, name: str, door: str, step: Any, what: str
) -> None:
    """
    Tried besides: each optimizer that counts, inside of others, at each door; a State on the meta device before a
    file's numbers are read; an optimizer of a user's.
    """
    make, inside = OPTIMIZERS[name]
    state = pl.run(fit(nn.Linear(2, 1), make(), max_duration="1ep"))
    state = state.replace(opt_state=changed(state.opt_state, inside, step))
    path = tmp_path / "a.safetensors"
    pl.save(state, path)
    starts: dict[str, Callable[[], Any]] = {
        "fit(state)": lambda: fit(state, make()),
        "load_path": lambda: fit(nn.Linear(2, 1), make(), load_path=path),
        "pl.load": lambda: fit(pl.load(path, model=nn.Linear(2, 1)), make()),
    }
    with pytest.raises(ResumeError, match=rf"opt_state.*'step'\] {what}"):
        starts[door]()
