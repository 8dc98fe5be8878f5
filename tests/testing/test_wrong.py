"""Each law fails on what breaks it, and no other law does: a law that can't fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.testing import PROBLEMS, CheckFailed, Report, check_algorithm, check_loop, laws
from pure_loop.testing.law import Law
from pure_loop.testing.wrong_algorithms import WRONG_ALGORITHMS
from pure_loop.testing.wrong_loops import WRONG_LOOPS
from tests.conftest import THOROUGH
from tests.support.problem import fit

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
    {"max_examples": 60} if THOROUGH else {"plans": st.just(PLAN), "problems": [NETWORK, "linear"], "max_examples": 3}
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


def breaking(law: str, wrong: Mapping[Callable[[], Any], str]) -> list[Callable[[], Any]]:
    return [make for make, broken in wrong.items() if broken == law]


def names(wrong: Mapping[Callable[[], Any], str]) -> list[Any]:
    """The laws that are broken; those that start processes, or the compiler, are tried in the slow tier."""
    costly = ("world_size", "compile_equality")
    return [pytest.param(law, marks=[pytest.mark.slow] * (law in costly)) for law in sorted(set(wrong.values()))]


@pytest.mark.parametrize("law", names(WRONG_ALGORITHMS))
def test_exactly_the_intended_law_catches_the_algorithms(law: str) -> None:
    for make in breaking(law, WRONG_ALGORITHMS):
        assert failing(check_algorithm, make, skip=others(law, laws.OF_ALGORITHMS)) == [law], make


@pytest.mark.parametrize("law", names(WRONG_LOOPS))
def test_exactly_the_intended_law_catches_the_loops(law: str) -> None:
    for make in breaking(law, WRONG_LOOPS):
        assert failing(check_loop, make(), skip=others(law, laws.OF_LOOPS)) == [law], make


# Where the algorithm is all that is on trial they follow from purity; a wrong loop shows that they can fail.
FOLLOWING = {"value", "visibility", "watch_equality", "donate_equality", "compile_equality", "determinism"}


def test_every_law_catches_something() -> None:
    assert {law.name for law in laws.OF_LOOPS} == set(WRONG_LOOPS.values())
    assert {law.name for law in laws.OF_ALGORITHMS} - FOLLOWING == set(WRONG_ALGORITHMS.values())
    assert set(WRONG_LOOPS.values()) >= FOLLOWING


# Strict mode names what wrote in place.


def add(tensor: torch.Tensor) -> None:
    tensor.add_(1.0)


def write_data(tensor: torch.Tensor) -> None:
    tensor.data[0] = 7.0


def step_fused(tensor: torch.Tensor) -> None:
    settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([tensor], [torch.ones_like(tensor)], [], is_first_step=True, **settings)


def at(wanted: Event, write: Callable[[torch.Tensor], None], leaf: str = "0.weight") -> Any:
    def does(event: Event, state: pl.State) -> None:
        if event is wanted:
            write(state.params[leaf])

    return does


def by_algorithm(write: Callable[[torch.Tensor], None]) -> Any:
    @pl.algorithm(Event.BATCH_END)
    def meddle(state: pl.State) -> pl.State:
        at(Event.BATCH_END, write)(Event.BATCH_END, state)
        return state

    return fit(algorithms=[meddle])


def by_the_body() -> Any:
    for pair in fit():
        at(Event.BATCH_END, add)(*pair)
        yield pair


class InPlace(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x.mul_(2))
        return out


def in_place(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
    for name, tensor in params.items():
        tensor.sub_(grads[name])
    return params, opt_state


def scaled(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return mse_loss(outputs, batch[1].mul_(2))


OWN = pl.optim.Optimizer(name="own", init=lambda params: pl.FrozenDict(), update=in_place, lr=lambda timestamp: 0.1)
WORST = pl.Metric(
    "worst",
    init=lambda: torch.tensor(0.0),
    update=lambda worst, outputs, batch: torch.maximum(worst, outputs.add_(1).max()),
    compute=lambda worst: worst,
)
ONES = [(torch.ones(3, 4), torch.ones(3, 3))]
TASK = pl.Task(forward=lambda model, batch: model(batch[0]), loss=scaled)
IN_PLACE: dict[str, Callable[[], Any]] = {
    r"algorithm 'meddle' changed state\.params\['0.weight'\].*BATCH_END": lambda: by_algorithm(add),
    r"algorithm 'meddle' changed state\.params\['0.weight'\].*BATCH_EN": lambda: by_algorithm(write_data),
    r"algorithm 'meddle' changed state\.params\['0.weight'\].*BATCH_E": lambda: by_algorithm(step_fused),
    "callback does changed": lambda: fit(callbacks=[at(Event.EPOCH_END, add)]),
    "the loop's body changed": by_the_body,
    r"^the forward changed state\.batch\[0\]": lambda: fit(InPlace()),
    r"^the optimizer's step changed state\.params\['0.weight'\]": lambda: fit(optimizer=OWN),
    r"^the loss changed state\.batch\[1\]": lambda: fit(data=ONES, loss=None, task=TASK),
    r"^a metric changed state\.outputs": lambda: fit(
        data=ONES, loss=mse_loss, evaluators={"val": pl.Evaluator([(-ONES[0][0], ONES[0][1])], metrics=[WORST])}
    ),
}


@pytest.mark.parametrize("says", IN_PLACE)
def test_strict_names_what_writes_in_place(says: str) -> None:
    with pytest.raises(pl.ImpurityError, match=says):
        pl.run(IN_PLACE[says]())
