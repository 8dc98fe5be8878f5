"""The last line of a traceback is the user's, or of what that calls: no line of the package comes after it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.compile import interpreted
from pure_loop.loop import training
from tests.support import problem
from tests.support.problem import cross_entropy, fit, mlp, points

DATA = points()
PACKAGE = str(Path(pl.__file__).parent)


class Broken(nn.Linear):
    """Raises what it is made with; its cause is another error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(4, 3)
        object.__setattr__(self, "error", error)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise self.error from ZeroDivisionError("first")


def files_and_functions(error: BaseException) -> list[tuple[str, str]]:
    return [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]


def iterate(stream: Any) -> None:
    for _ in stream:
        pass


REFUSED: dict[str, Callable[[], object]] = {
    "fit": lambda: fit(optimizer=3),
    "a time": lambda: fit(max_duration="soon"),
    "no such argument": lambda: fit(epochs=3),
    "evaluate": lambda: pl.evaluate(mlp(), {"val": 3}, loss=cross_entropy),
    "explain": lambda: pl.explain(mlp(), DATA, loss=cross_entropy, optimizer=3, max_duration="1ep"),
    "an optimizer": lambda: pl.optim.sgd(lr=-1),
    "an algorithm": lambda: pl.algorithms.early_stopping("val_loss"),
    "a callback": lambda: pl.callbacks.CheckpointSaver("runs", keep_last=0),
    "a file": lambda: pl.load("nowhere.safetensors"),
    "an attribute": lambda: pl.run(fit(algorithms=[pl.algorithm("batch_end")(lambda state: state.epoch)])),
    "a loss": lambda: pl.run(fit(loss=lambda outputs, targets: None)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_ends_at_the_line_of_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pl.PureLoopError) as caught:
        REFUSED[name]()
    assert files_and_functions(caught.value)[-1][0] in (__file__, problem.__file__)
    monkeypatch.setenv("PURE_LOOP_TRACEBACKS", "full")
    with pytest.raises(pl.PureLoopError) as caught:
        REFUSED[name]()
    assert files_and_functions(caught.value)[-1][0].startswith((PACKAGE, "<attrs"))


@pytest.mark.parametrize("kind", [KeyError, pl.errors.ArgumentError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "through",
    [
        lambda model: pl.run(fit(model)),
        lambda model: iterate(fit(model)),
        lambda model: iterate(fit(model, deterministic=True)),
        lambda model: pl.run(pl.progress(fit(model))),
        lambda model: iterate(pl.progress(fit(model))),
        lambda model: pl.run(pl.predict(model, DATA)),
    ],
)
def test_an_error_of_the_model_keeps_its_own_lines_and_nothing_else_changes(through: Any, kind: Any) -> None:
    error = kind("mine")
    with pytest.raises(kind) as caught:
        through(Broken(error))
    listed = files_and_functions(error)
    assert caught.value is error
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert not [name for name, _ in listed if name.startswith(PACKAGE)]
    assert listed[-1] == (__file__, "forward")
    assert listed[-2][1] == "_call_impl"


def test_a_fault_of_the_package_keeps_its_whole_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "next_epoch", lambda: None)
    with pytest.raises(TypeError) as caught:
        pl.run(fit())
    assert [name for _, name in files_and_functions(caught.value)][-4:] == ["run", "pairs_of", "drive", "fit"]


def test_a_compiled_forward_that_fails_ends_at_the_line_of_the_call() -> None:
    with interpreted(), pytest.raises(pl.errors.CompileError) as caught:
        pl.run(fit(data=[(DATA[0][0][:, :3], DATA[0][1])], compile=True))
    assert files_and_functions(caught.value)[-1][0] == __file__
