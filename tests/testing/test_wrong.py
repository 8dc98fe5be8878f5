"""Each law fails on what breaks it, and no other law does: a law that can't fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.testing import PROBLEMS, Case, CheckFailed, Report, check_algorithm, check_loop, laws
from pure_loop.testing.law import Law
from pure_loop.testing.wrong_algorithms import WRONG_ALGORITHMS
from pure_loop.testing.wrong_loops import WRONG_LOOPS
from tests.conftest import THOROUGH

PLAN = Plan(
    batches=(3, 1, 4),
    max_duration="1ep",
    microbatch_size=2,
    evaluators={"val": EvaluatorPlan(batches=(2,), interval="1ba", microbatch_size=1)},
)


def network() -> torch.nn.Module:
    """Buffers that the forward writes to, and random numbers that it draws."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3),
        torch.nn.BatchNorm2d(2),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(8, 2),
    )


NETWORK = attrs.evolve(PROBLEMS["convolution"], name="network", make_model=network)
# A few cases that have everything in them; or, in the thorough tier, those that users get, and more of them: among 20
# there is hardly one with a BatchNorm and an evaluator.
CASES: dict[str, Any] = (
    {"max_examples": 60}
    if THOROUGH
    else {
        "plans": st.just(PLAN),
        "problems": [NETWORK, "linear"],
        "max_examples": 3,
    }
)


def failing(check: Callable[..., Report], subject: Any, *, skip: Sequence[str] = ()) -> list[str]:
    try:
        report = check(subject, skip=dict.fromkeys(skip, "the thorough tier tries it"), **CASES)
    except CheckFailed as failed:
        report = failed.report
    return [outcome.law for outcome in report.failures] + ([report.problem] if report.problem else [])


def others(law: str, known: Sequence[Law]) -> list[str]:
    """The laws of which only the thorough tier shows that they don't fail as well."""
    # One that rests on no other shows that the algorithm runs; and where the order isn't tried, runs may end in errors.
    return [] if THOROUGH else [each.name for each in known if each.name not in (law, "structure", "order")]


@pytest.mark.parametrize(("make", "law"), WRONG_ALGORITHMS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_exactly_the_intended_law_catches_the_algorithm(make: Callable[[], Any], law: str) -> None:
    assert failing(check_algorithm, make, skip=others(law, laws.OF_ALGORITHMS)) == [law]


@pytest.mark.parametrize(("make", "law"), WRONG_LOOPS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_exactly_the_intended_law_catches_the_loop(make: Callable[[], Any], law: str) -> None:
    assert failing(check_loop, make(), skip=others(law, laws.OF_LOOPS)) == [law]


def test_every_law_of_loops_catches_a_loop() -> None:
    assert {law.name for law in laws.OF_LOOPS} == set(WRONG_LOOPS.values())


# Where the algorithm is all that is on trial they follow from purity; a wrong loop shows that they can fail.
FOLLOWING = {"value", "visibility", "watch_equality", "donate_equality", "compile_equality", "determinism"}


def test_every_law_of_algorithms_catches_an_algorithm() -> None:
    assert {law.name for law in laws.OF_ALGORITHMS} - FOLLOWING == set(WRONG_ALGORITHMS.values())
    assert set(WRONG_LOOPS.values()) >= FOLLOWING


@pytest.mark.slow
def test_nothing_catches_the_loop() -> None:
    assert failing(check_loop, pl.fit) == []


CASE = Case(plan=PLAN, problem="linear")


@pytest.mark.parametrize("how", ["add_", "data", "fused"])
def test_strict_names_an_algorithm_that_writes_in_place(how: str) -> None:
    @pl.algorithm(Event.BATCH_END)
    def meddle(state: pl.State) -> pl.State:
        tensor = state.params["weight"]
        if how == "add_":
            tensor.add_(1.0)
        elif how == "data":
            tensor.data[0] = 7.0
        else:
            torch._fused_sgd_(
                [tensor],
                [torch.ones_like(tensor)],
                [],
                weight_decay=0.0,
                momentum=0.0,
                lr=0.1,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=True,
            )
        return state

    with pytest.raises(pl.ImpurityError, match=r"algorithm 'meddle' changed state\.params\['weight'\].*BATCH_END"):
        CASE.run([meddle], strict=True)


def test_strict_names_a_callback_the_body_and_the_model() -> None:
    def nosy(event: Event, state: pl.State) -> None:
        if event is Event.EPOCH_END:
            state.params["bias"].zero_()

    with pytest.raises(pl.ImpurityError, match="callback nosy changed"):
        CASE.run(strict=True, callbacks=[nosy])

    def meddling_body() -> None:
        for event, state in CASE.stream(strict=True):
            if event is Event.BATCH_END:
                state.params["bias"].add_(1)

    with pytest.raises(pl.ImpurityError, match="the loop's body changed"):
        meddling_body()

    class InPlace(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x.mul_(2))
            return out

    with pytest.raises(pl.ImpurityError, match=r"^the forward changed state\.batch\[0\]"):
        CASE.run(start=InPlace(), strict=True)


def test_strict_names_an_optimizer_a_loss_and_a_metric() -> None:
    def in_place(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
        for name, tensor in params.items():
            tensor.sub_(grads[name])
        return params, opt_state

    def scaled(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[1].mul_(2))

    def fit(**options: Any) -> None:
        settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ba", "strict": True}
        pl.run(pl.fit(torch.nn.Linear(2, 1), [(torch.ones(3, 2), torch.ones(3, 1))], **(settings | options)))

    own = pl.optim.Optimizer(name="own", init=lambda params: pl.FrozenDict(), update=in_place, lr=lambda timestamp: 0.1)
    with pytest.raises(pl.ImpurityError, match=r"^the optimizer's step changed state\.params\['weight'\]"):
        fit(loss=torch.nn.functional.mse_loss, optimizer=own)
    with pytest.raises(pl.ImpurityError, match=r"^the loss changed state\.batch\[1\]"):
        fit(task=pl.Task(forward=lambda model, batch: model(batch[0]), loss=scaled))
    worst = pl.Metric(
        "worst",
        init=lambda: torch.tensor(0.0),
        update=lambda worst, outputs, batch: torch.maximum(worst, outputs.add_(1).max()),
        compute=lambda worst: worst,
    )
    val = pl.Evaluator([(-torch.ones(3, 2), torch.ones(3, 1))], metrics=[worst])
    with pytest.raises(pl.ImpurityError, match=r"^a metric changed state\.outputs"):
        fit(loss=torch.nn.functional.mse_loss, evaluators=val)
