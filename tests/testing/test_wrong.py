"""Each law fails on what breaks it, and no other law does: a law that can't fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.testing import PROBLEMS, CheckFailed, check_algorithm, check_loop, laws
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
    norm, dropout = torch.nn.BatchNorm2d(2), torch.nn.Dropout(0.3)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), norm, torch.nn.Flatten(), dropout, torch.nn.Linear(8, 2))


NETWORK = attrs.evolve(PROBLEMS["convolution"], name="network", make_model=network)
# A few cases that have everything in them; or, in the thorough tier, those that users get, and more of them: among 20
# there is hardly one with a BatchNorm and an evaluator.
CASES: dict[str, Any] = (
    {"max_examples": 60} if THOROUGH else {"plans": st.just(PLAN), "problems": [NETWORK, "linear"], "max_examples": 3}
)
KINDS: dict[Callable[..., Any], Any] = {
    check_algorithm: (WRONG_ALGORITHMS, laws.OF_ALGORITHMS),
    check_loop: (WRONG_LOOPS, laws.OF_LOOPS),
}


def broken() -> Iterator[Any]:
    """The laws that something breaks; those that start processes, or the compiler, are tried in the slow tier."""
    for check, (wrong, _) in KINDS.items():
        for law in sorted(set(wrong.values())):
            costly = law in ("world_size", "compile_equality")
            yield pytest.param(check, law, id=f"{check.__name__}-{law}", marks=[pytest.mark.slow] * costly)


@pytest.mark.parametrize(("check", "law"), [*broken()])
def test_exactly_the_intended_law_catches_it(check: Callable[..., Any], law: str) -> None:
    wrong, known = KINDS[check]
    # Only the thorough tier shows that all others hold. A law that rests on no other shows that the algorithm runs; and
    # where the order isn't tried, runs may end in errors.
    tried = [each.name for each in known if THOROUGH or each.name in (law, "structure", "order")]
    skip = {each.name: "the thorough tier tries it" for each in known if each.name not in tried}
    for make in [make for make, breaks in wrong.items() if breaks == law]:
        with pytest.raises(CheckFailed) as caught:
            check(make if check is check_algorithm else make(), skip=skip, thorough=True, **CASES)
        report = caught.value.report
        assert ([outcome.law for outcome in report.failures], report.problem) == ([law], ""), make


# Where the algorithm is all that is on trial they follow from purity; a wrong loop shows that they can fail.
FOLLOWING = {"value", "visibility", "watch_equality", "donate_equality", "compile_equality", "determinism"}


def test_every_law_catches_something() -> None:
    assert {law.name for law in laws.OF_LOOPS} == set(WRONG_LOOPS.values()) >= FOLLOWING
    assert {law.name for law in laws.OF_ALGORITHMS} - FOLLOWING == set(WRONG_ALGORITHMS.values())


# Strict mode names what wrote in place.


def add(tensor: torch.Tensor) -> None:
    tensor.add_(1.0)


def write_data(tensor: torch.Tensor) -> None:
    tensor.data[0] = 7.0


def step_fused(tensor: torch.Tensor) -> None:
    settings: Any = {
        "weight_decay": 0.0,
        "momentum": 0.0,
        "lr": 0.1,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
    }
    torch._fused_sgd_([tensor], [torch.ones_like(tensor)], [], is_first_step=True, **settings)


def meddling(write: Callable[[torch.Tensor], None]) -> pl.Algorithm:
    def meddle(state: pl.State) -> pl.State:
        write(state.params["0.weight"])
        return state

    return pl.Algorithm("meddle", {Event.BATCH_END: meddle})


def does(event: Event, state: pl.State) -> None:
    if event is Event.EPOCH_END:
        add(state.params["0.weight"])


def by_the_body() -> Any:
    for event, state in fit():
        does(event, state)
        yield event, state


def in_place(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
    for name, tensor in params.items():
        tensor.sub_(grads[name])
    return params, opt_state


OWN = pl.optim.Optimizer(name="own", init=lambda params: pl.FrozenDict(), update=in_place, lr=lambda timestamp: 0.1)
ONES = [(torch.ones(3, 4), torch.ones(3, 3))]
FORWARD = pl.Task(forward=lambda model, batch: model(batch[0].mul_(2)), loss=lambda out, batch: mse_loss(out, batch[1]))
LOSS = pl.Task(forward=lambda model, batch: model(batch[0]), loss=lambda out, batch: mse_loss(out, batch[1].mul_(2)))
BY_ALGORITHM = r"algorithm 'meddle' changed state\.params\['0.weight'\].*BATCH_END"
IN_PLACE: list[tuple[str, Callable[[], Any]]] = [
    *[(BY_ALGORITHM, lambda w=write: fit(algorithms=[meddling(w)])) for write in (add, write_data, step_fused)],
    ("callback does changed", lambda: fit(callbacks=[does])),
    ("the loop's body changed", by_the_body),
    (r"^the forward changed state\.batch\[0\]", lambda: fit(data=ONES, loss=FORWARD)),
    (r"^the optimizer's step changed state\.params\['0.weight'\]", lambda: fit(optimizer=OWN)),
    (r"^the loss changed state\.batch\[1\]", lambda: fit(data=ONES, loss=LOSS)),
]


def test_strict_names_what_writes_in_place() -> None:
    for says, stream in IN_PLACE:
        with pytest.raises(pl.errors.ImpurityError, match=says):
            pl.run(stream())
