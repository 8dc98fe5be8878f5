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
from pure_loop._internal.hints import advice_of_torch
from pure_loop.compile import interpreted
from tests.support.problem import fit, mlp, points, run

(X, Y), *_ = DATA = points()


def broken(*_: Any) -> Any:
    raise KeyError("broken")


def breaking() -> Iterator[Any]:
    yield DATA[0]
    broken()


def mine(event: Event, function: Any, **changes: Any) -> Any:
    return fit(algorithms=[pl.Algorithm("mine", {event: function}, **changes)])


Broken: Any = type("Broken", (pl.Callback,), {"batch_start": broken})


class Table(nn.Embedding):
    def forward(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        return super().forward(rows) * scale


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table(5, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.table(rows, scale=torch.tensor(1.0)).mean(1)
        return result


OF = "raised in the {} of batch 1, microbatch 0, which is (tensor {})"
IN = "raised in the forward of microbatch 0, which is (tensor (4, 3) float32, tensor (4,) int64)"
MODULE = "raised in '0', Linear(4, 8), of inputs (tensor (4, 3) float32)"
LOSS = "cross_entropy(outputs, targets), of outputs tensor (2, 3) float32"
WIDTH = (
    "the last dimension of the inputs is 3, and this layer takes 4: write one that takes 3, or nn.Flatten() before it"
)
NOTES: list[tuple[Any, list[str]]] = [
    (lambda: mine(Event.BATCH_START, broken), ["raised by algorithm 'mine' at BATCH_START, batch 0"]),
    (lambda: mine(Event.BATCH_END, lambda s: s, init=broken), ["raised by init of algorithm 'mine'"]),
    (lambda: mine(Event.BATCH_START, lambda state: None), []),  # the message says it
    (lambda: fit(callbacks=[Broken()]), ["raised by callback Broken at BATCH_START, batch 0"]),
    (lambda: fit(evaluators={"val": breaking()}), ["raised in evaluator 'val', batch 1"]),
    (
        lambda: fit(data=[(X, Y), (X[:, :3], Y)], microbatch_size=2),
        [
            "raised in '0', Linear(4, 8), of inputs (tensor (2, 3) float32)",
            OF.format("forward", "(2, 3) float32, tensor (2,) int64"),
            WIDTH,
        ],
    ),
    (
        # The loss is a module, and no model.
        lambda: fit(data=[(X, Y), (X, torch.zeros(4, 7))], loss=nn.CrossEntropyLoss(), microbatch_size=2),
        [
            f"raised by the loss {LOSS.replace('cross_entropy', 'CrossEntropyLoss')} and targets tensor (2, 7) float32",
            OF.format("loss", "(2, 4) float32, tensor (2, 7) float32"),
            "the targets have a dimension too many: targets.squeeze(1), or targets.argmax(1) where they are one-hot",
        ],
    ),
    (
        lambda: fit(evaluators={"val": [(X, Y), (X, Y.float())]}),
        [
            f"raised by the loss {LOSS.replace('(2', '(4')} and targets tensor (4,) float32",
            "raised in evaluator 'val', batch 1",
            "for cross_entropy, classes are int64 (targets.long()) and probabilities float32 (targets.float()), in the "
            "shape of the outputs; numbers to predict take torch.nn.functional.mse_loss",
        ],
    ),
    (
        lambda: fit(Lookup(), [(torch.tensor([[7]]), Y[:1])]),
        [
            "raised in 'table', Table(5, 3), of inputs (tensor (1, 1) int64, scale=tensor () float32)",
            OF.format("forward", "(1, 1) int64, tensor (1,) int64").replace("batch 1", "batch 0"),
        ],
    ),
    (lambda: pl.predict(mlp(), [(X, Y), (X[:, :3], Y)]), [MODULE, IN, "raised in prediction, batch 1", WIDTH]),
]


def test_a_note_says_whose_code_raised_it() -> None:
    for make, notes in NOTES:
        with pytest.raises((KeyError, RuntimeError, TypeError, IndexError)) as caught:
            pl.run(make())
        assert getattr(caught.value, "__notes__", []) == notes


WHERE = {"loss": "by the", "forward": "in the", "backward": "in the"}
OTHER_CAUSES = """
loss of batch 0 | 'NoneType' object has no attribute 'norm' | None
algorithm 'a' | unsupported operand type(s) for *: 'NoneType' and 'int' | before the event that sets it
callback A | 'NoneType' object is not subscriptable | before the event that sets it
forward of batch 0 | 'NoneType' object has no attribute 'norm' | None
forward of batch 0 | result type Float can't be cast to the desired output type Byte | None
forward of batch 0 | 'tuple' object has no attribute 'size' | None
forward of batch 0 | stack expects each tensor to be equal size, but got [3] at entry 0 and [4] at entry 1 | None
forward of batch 0, raised in '0', Attention | Attention.forward() missing 1 required positional argument: 'key' | None
forward of batch 0 | Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should | inputs.float()
forward of batch 0 | Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) | model.float()
forward of batch 0 | Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) | device=x.device
forward of batch 0 | Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be | device=x.device
forward of batch 0 | Expected all tensors to be on the same device, but got mat1 is on cpu | register_buffer
loss of batch 0 | Expected all tensors to be on the same device, but got weight is on cpu | weight.to(device)
backward of batch 0 | Found dtype Double but expected Float | targets.float()
"""


@pytest.mark.parametrize("row", OTHER_CAUSES.strip().splitlines())
def test_one_message_of_torch_has_the_advice_for_where_it_was_raised(row: str) -> None:
    place, message, words = row.split(" | ")
    advice = advice_of_torch(message, [f"raised {WHERE.get(place.split()[0], 'by')} {place}"])
    assert advice is None if words == "None" else words in str(advice)


def test_an_error_that_has_no_text_stays_itself() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError("no text")

    def mute(state: pl.State) -> pl.State:
        raise MuteError

    with pytest.raises(MuteError):
        pl.run(mine(Event.BATCH_START, mute))


def test_what_a_trace_stumbles_over_has_the_notes_of_the_eager_error() -> None:
    with interpreted(), pytest.raises(pl.errors.CompileError) as caught:
        pl.run(fit(data=[(X[:, :3], Y)], compile=True))
    assert MODULE in caught.value.__notes__


ELSEWHERE = {
    "gradients": "gradients are state.grads",
    "lr": "optimizer.lr(state.timestamp)",
    "optimizer": "state.opt_state",
    "epoch": "it is state.timestamp.epoch",
    "global_step": "state.timestamp.batch",
    "accuracy": "state.metrics[label][name]",
}


def test_attributes_that_are_elsewhere_say_where_and_fields_of_subclasses_may_have_these_names() -> None:
    state = pl.State.create(mlp())
    for name, where in ELSEWHERE.items():
        with pytest.raises(AttributeError) as caught:
            getattr(state, name)
        assert f"'State' object has no attribute '{name}': " in str(caught.value)
        assert where in str(caught.value)
        assert name not in dir(state)
    for slots in (True, False):

        @attrs.frozen(eq=False, kw_only=True, slots=slots)
        class Own(pl.State):
            lr: float = 0.5

        own = Own.create(mlp())
        assert (own.lr, own.replace(lr=0.25).lr, "lr" in dir(own)) == (0.5, 0.25, True)


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


def test_an_evaluation_that_measures_no_loss_needs_none() -> None:
    evaluator = pl.Evaluator(DATA, metrics=[pl.metrics.accuracy()])
    for compile in (False, True):  # noqa: A001
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
    assert run(loss=task).timestamp.epoch == 2
