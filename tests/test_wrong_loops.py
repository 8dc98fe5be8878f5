"""Each law fails on a loop that breaks it: a law that can't fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import EvaluatorPlan, Plan
from tests import laws, wrong_loops
from tests.cases import Case

CASE = Case(
    plan=Plan(
        batches=(6, 4, 6),
        max_duration="2ep",
        microbatch_size=4,
        evaluators={"val": EvaluatorPlan(batches=(2,), interval="2ba")},
    ),
    model="mlp",
)
PLAIN = Case(plan=CASE.plan, model="plain")


def order(fit: Any) -> None:
    laws.law_order(CASE, fit)


def value(fit: Any) -> None:
    laws.law_value(CASE, fit)


def determinism(fit: Any) -> None:
    laws.law_determinism(CASE, fit)


def resumption(fit: Any) -> None:
    laws.law_resumption(CASE, fit)


def microbatches_exactly(fit: Any) -> None:
    laws.law_microbatches_exact((6, 4, 5), 1, fit)


def microbatches(fit: Any) -> None:
    laws.law_microbatches(PLAIN, fit)


def observers(fit: Any) -> None:
    laws.law_observers(CASE, fit)


def identity(fit: Any) -> None:
    laws.law_identity(CASE, fit)


def algorithm_order(fit: Any) -> None:
    laws.law_algorithm_order(CASE, fit)


def composition(fit: Any) -> None:
    laws.law_composition(CASE, fit)


def closing(fit: Any) -> None:
    laws.law_closing(CASE, 30, "break", fit)


WRONG: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (lambda: wrong_loops.without(Event.AFTER_LOSS), order),
    (lambda: wrong_loops.without(Event.EPOCH_CHECKPOINT), order),
    (wrong_loops.evaluates_twice_at_the_end, order),
    (wrong_loops.counts_microbatches_as_batches, order),
    (wrong_loops.updates_in_place, value),
    (wrong_loops.updates_through_data, value),
    (wrong_loops.lends_its_buffers_to_batchnorm, value),
    (wrong_loops.draws_from_the_global_generator, determinism),
    (wrong_loops.reseeds_the_global_generator, determinism),
    (wrong_loops.starts_the_epoch_again, resumption),
    (wrong_loops.forgets_the_optimizer_memory, resumption),
    (wrong_loops.takes_the_mean_of_means, microbatches_exactly),
    (wrong_loops.takes_the_mean_of_means, microbatches),
    (wrong_loops.forgets_the_last_microbatch, microbatches_exactly),
    (wrong_loops.evaluation_trains_batchnorm, observers),
    (wrong_loops.callbacks_shift_the_seed, observers),
    (wrong_loops.draws_from_the_global_generator, observers),
    (wrong_loops.the_identity_costs_a_rounding, identity),
    (wrong_loops.never_reverses, algorithm_order),
    (wrong_loops.reverses_the_data_too, algorithm_order),
    (wrong_loops.composes_backwards, composition),
    (wrong_loops.leaves_the_module_in_eval_mode, closing),
    (wrong_loops.leaks_gradients, closing),
    (wrong_loops.leaves_a_thread, closing),
    (wrong_loops.trains_the_users_module, closing),
]


def _name(value: Any) -> str:
    return getattr(value, "__name__", "loop").strip("<>")


@pytest.mark.parametrize(("make", "law"), WRONG, ids=_name)
def test_the_law_catches_the_loop(make: Callable[[], Any], law: Callable[[Any], None]) -> None:
    with pytest.raises(AssertionError):
        law(make())


@pytest.mark.parametrize("law", sorted({law for _, law in WRONG}, key=_name), ids=_name)
def test_the_law_passes_the_real_loop(law: Callable[[Any], None]) -> None:
    law(pl.fit)


def counter_in_a_closure() -> pl.Algorithm:
    """Its memory is in itself, not in the State."""
    seen = []

    @pl.algorithm(Event.AFTER_LOSS)
    def warm_up(state: pl.State) -> pl.State:
        seen.append(1)
        return state.replace(loss=state.loss * min(1.0, len(seen) / 10))

    return warm_up


def test_resumption_catches_an_algorithm_that_remembers_in_itself() -> None:
    algorithms = [counter_in_a_closure()]
    with pytest.raises(AssertionError, match="from "):
        laws.law_resumption(CASE, algorithms=algorithms)


@pytest.mark.parametrize("how", ["add_", "data", "fused"])
def test_strict_names_an_algorithm_that_writes_in_place(how: str) -> None:
    @pl.algorithm(Event.BATCH_END)
    def meddle(state: pl.State) -> pl.State:
        tensor = state.params["0.weight"]
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

    with pytest.raises(pl.ImpurityError, match=r"algorithm 'meddle' changed state\.params\['0\.weight'\].*BATCH_END"):
        CASE.run(strict=True, algorithms=[meddle])


def test_strict_names_a_callback_the_body_and_the_model() -> None:
    def nosy(event: Event, state: pl.State) -> None:
        if event is Event.EPOCH_END:
            state.params["0.bias"].zero_()

    with pytest.raises(pl.ImpurityError, match="callback nosy changed"):
        CASE.run(strict=True, callbacks=[nosy])

    def meddling_body() -> None:
        for event, state in CASE.stream(strict=True):
            if event is Event.BATCH_END:
                state.params["0.bias"].add_(1)

    with pytest.raises(pl.ImpurityError, match="the loop's body changed"):
        meddling_body()

    class InPlace(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x.mul_(2))
            return out

    with pytest.raises(pl.ImpurityError, match="computation that followed"):
        list(pl.fit(InPlace(), CASE.data(), **CASE.arguments(), strict=True))


def test_strict_names_an_algorithm_that_draws_from_the_global_generator() -> None:
    @pl.algorithm(Event.BATCH_START)
    def jitter(state: pl.State) -> pl.State:
        torch.rand(1)
        return state

    with pytest.raises(pl.ImpurityError, match="algorithm 'jitter' drew from a global random generator at BATCH_START"):
        CASE.run(strict=True, algorithms=[jitter])
