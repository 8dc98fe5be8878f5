"""An error of the user's code stays itself, and says whose code raised it; what is allowed beside what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from tests.support.problem import fit, mlp, points, run

(X, Y), *_ = DATA = points()


def broken(*_: Any) -> Any:
    raise KeyError("broken")


def breaking() -> Iterator[Any]:
    yield DATA[0]
    broken()


def mine(event: Event, function: Any, **changes: Any) -> dict[str, Any]:
    return {"algorithms": [pl.Algorithm("mine", {event: function}, **changes)]}


Broken: Any = type("Broken", (pl.Callback,), {"batch_start": broken})
IN = "raised in the {} of microbatch 0, which is (tensor {})"
OF = "raised in the {} of batch 1, microbatch 0, which is (tensor {})"
NOTES: dict[str, tuple[Any, list[str]]] = {
    "algorithm": (
        lambda: fit(**mine(Event.BATCH_START, broken)),
        ["raised by algorithm 'mine' at BATCH_START, batch 0"],
    ),
    "init": (lambda: fit(**mine(Event.BATCH_END, lambda s: s, init=broken)), ["raised by init of algorithm 'mine'"]),
    "callback": (lambda: fit(callbacks=[Broken()]), ["raised by callback Broken at BATCH_START, batch 0"]),
    "data of an evaluator": (lambda: fit(evaluators={"val": breaking()}), ["raised in evaluator 'val', batch 1"]),
    "forward": (
        lambda: fit(data=[(X, Y), (X[:, :3], Y)], microbatch_size=2),
        [OF.format("forward", "(2, 3) float32, tensor (2,) int64")],
    ),
    "loss": (
        lambda: fit(data=[(X, Y), (X, torch.zeros(4, 7))], microbatch_size=2),
        [OF.format("loss", "(2, 4) float32, tensor (2, 7) float32")],
    ),
    "prediction": (
        lambda: pl.predict(mlp(), [(X, Y), (X[:, :3], Y)]),
        [IN.format("forward", "(4, 3) float32, tensor (4,) int64"), "raised in prediction, batch 1"],
    ),
    "said once": (lambda: fit(**mine(Event.BATCH_START, lambda state: None)), []),
}


@pytest.mark.parametrize("case", NOTES)
def test_a_note_says_whose_code_raised_it(case: str) -> None:
    make, notes = NOTES[case]
    with pytest.raises((KeyError, RuntimeError, TypeError)) as caught:
        pl.run(make())
    assert getattr(caught.value, "__notes__", []) == notes


def test_helpers_of_a_callback_may_have_any_other_name() -> None:
    def observe(self: Any, state: Any, logger: Any) -> None: ...

    helpers = {
        **dict.fromkeys(("batch_end", "summary", "_epoch_ends"), observe),
        "epochs": lambda self: 3,
        "eval_start_time": lambda self, state, unit: 0.0,
    }
    run(callbacks=[type("Mine", (pl.Callback,), helpers)()])


def test_attributes_that_are_elsewhere_say_where() -> None:
    state = pl.State.create(mlp())
    for name, where in {
        "gradients": "gradients are state.grads",
        "lr": "optimizer.lr(state.timestamp)",
        "optimizer": "state.opt_state",
        "epoch": "it is state.timestamp.epoch",
        "global_step": "state.timestamp.batch",
        "accuracy": "state.metrics[label][name]",
    }.items():
        with pytest.raises(AttributeError) as caught:
            getattr(state, name)
        assert f"'State' object has no attribute '{name}': " in str(caught.value)
        assert where in str(caught.value)
        assert not hasattr(state, name)
        assert name not in dir(state)


@pytest.mark.parametrize("slots", [True, False])
def test_fields_of_subclasses_may_have_these_names(slots: bool) -> None:
    @attrs.frozen(eq=False, kw_only=True, slots=slots)
    class Own(pl.State):
        lr: float = 0.5

    state = Own.create(mlp())
    assert (state.lr, state.replace(lr=0.25).lr, "lr" in dir(state)) == (0.5, 0.25, True)


def test_a_loss_may_change_after_the_backward() -> None:
    change = mine(Event.AFTER_BACKWARD, lambda state: state.replace(loss=state.loss.detach() + 1))
    changed, plain = (
        next(state.loss for event, state in fit(**more) if event is Event.BATCH_END) for more in (change, {})
    )
    torch.testing.assert_close(changed, plain + 1)


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_compiles_itself_trains_uncompiled() -> None:
    model = mlp()
    model.compile(backend="eager")
    assert run(model, max_duration="2ba").timestamp.batch == 2


class WithLoss(nn.Linear):
    """Its loss is one of torch's own, which takes targets and no batch."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.loss = nn.CrossEntropyLoss()


@pytest.mark.parametrize("compile", [False, True])
def test_an_evaluation_that_measures_no_loss_needs_none(compile: bool) -> None:
    evaluator = pl.Evaluator(DATA, metrics=[pl.metrics.accuracy()])
    with interpreted():
        state = pl.run(pl.evaluate(WithLoss(), {"val": evaluator}, compile=compile))
    assert list(state.metrics["val"]) == ["accuracy"]
    assert [event for event, _ in pl.predict(WithLoss(), DATA)].count(Event.PREDICT_BATCH_END) == len(DATA)


def test_a_frozen_teacher_may_stand_in_the_task() -> None:
    teacher = nn.Linear(4, 3).requires_grad_(False)
    task = pl.Task(
        forward=lambda module, batch: (module(batch[0]), teacher(batch[0])),
        loss=lambda outputs, batch: functional.mse_loss(*outputs),
    )
    assert run(loss=None, task=task).timestamp.epoch == 2
