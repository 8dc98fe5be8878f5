"""check_service: what keeps the laws of training services, and each known fault, found by its name."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.testing import Calls, CheckFailed, LawViolation, Served, check_service, laws, wrong_services
from pure_loop.testing.wrong_services import WRONG_SERVICES, ReferenceService, ReferenceSession
from tests.support.refused import Refusal, check, rows

INPUTS = torch.linspace(-1, 1, 18).reshape(6, 3)
# What the failure says of each wrong service.
SAYS = {
    "saves_the_weights_only": "weights only, the optimizer state is lost",
    "saves_the_weights_only_under_dropout": "weights only, the optimizer state is lost",
    "forgets_the_number_of_steps": "the number of steps",
    "forgets_the_generator": "training draws other random numbers",
    "applies_the_last_batch_twice": "the last batch is applied twice",
    "loses_the_last_batch": "the last batch is lost",
    "loads_nothing": "it begins with fresh weights",
    "rounds_the_weights": "the weights were rounded to 16 bits",
    "saves_a_reference": "what was saved changes as the session goes on",
    "loses_accumulated_gradients": "gradients that were accumulated are lost",
    "counts_accumulated_gradients_twice": "gradients that were accumulated count twice",
    "applies_each_batch_at_once": "before any optim_step",
    "never_steps": "optim_step changed nothing",
    "keeps_gradients_after_a_step": "the gradients of the batch before are kept",
    "steps_on_gradients_of_zero": "gradients of zero, by momentum",
    "counts_the_last_call_only": "only the last forward_backward before a step counts",
    "adds_the_mean_of_each_call": "the mean of its samples",
    "evaluates_with_dropout": "with evaluate after each call, training differs",
    "clears_gradients_when_it_saves": "with save after each call, the service refused the last of",
    "shares_gradients": "with another session's calls in between, the service refused",
    "shares_weights": "they share weights",
    "draws_from_the_global_generator": "sent twice",
    "carries_out_a_retry": "with a retry after each call, training differs",
}


def failure_of(service: Any, **options: Any) -> LawViolation:
    """The one violation."""
    with pytest.raises(CheckFailed) as caught:
        check_service(service, quiet=True, max_examples=3, **options)
    (failure,) = caught.value.report.failures
    assert failure.violation is not None
    return failure.violation


class ShowsOutputs(ReferenceSession):
    """Of a service that keeps its weights."""

    def evaluate(self) -> Mapping[str, Tensor]:
        params = super().evaluate()
        return {"outputs": torch.tanh(INPUTS @ params["in"]) @ params["out"]}


class Inexact(ReferenceSession):
    """Gradients are off by 0.1 %, otherwise in each call."""

    def optim_step(self, lr_scale: float) -> None:
        grads = {name: grad * (1 + 0.001 * torch.randn_like(grad)) for name, grad in self.run.grads.items()}
        self.run = attrs.evolve(self.run, grads=grads)
        super().optim_step(lr_scale)


SLOW = pytest.mark.slow  # where the weights are shown the faults are found in the fast tier
WAYS = [
    pytest.param(ReferenceSession, 1e-3, id="weights"),
    pytest.param(ShowsOutputs, 1e-3, id="outputs", marks=SLOW),
    pytest.param(Inexact, 0.01, id="noise", marks=SLOW),
]


def through(way: type[ReferenceSession], session: type[ReferenceSession]) -> type[ReferenceSession]:
    return type("Session", (way, session), {}) if way is not ReferenceSession else session


@pytest.mark.parametrize(("way", "tolerance"), WAYS)
def test_each_known_fault_is_found_by_its_name(way: type[ReferenceSession], tolerance: float) -> None:
    for dropout in (0.0, 0.5):
        service = ReferenceService(dropout, through(way, ReferenceSession))
        report = check_service(service, tolerance=tolerance, quiet=True)
        assert {outcome.law for outcome in report.outcomes if outcome.result != "passed"} == (
            {"microbatches"} if dropout else set()  # skipped: training draws other numbers in each call
        )
    assert {make.__name__ for make in WRONG_SERVICES} == SAYS.keys()
    for make, law in WRONG_SERVICES.items():
        wrong: Any = make()
        wrong.session = through(way, wrong.session)
        violation = failure_of(wrong, tolerance=tolerance)
        says = SAYS[make.__name__]
        if (way, make.__name__) == (ShowsOutputs, "rounds_the_weights"):
            says = "other weights than were saved"  # outputs don't show to what the weights were rounded
        assert (violation.law, says in violation.finding) == (law, True), (make.__name__, violation.finding)


def test_every_law_catches_something() -> None:
    assert set(WRONG_SERVICES.values()) == {law.name for law in laws.OF_SERVICES}


class Server:
    """A service as it is written in an afternoon, with all of torch's and nothing of the library's."""

    def __init__(self, seed: int = 0, momentum: float = 0.9, takes_rates: bool = True) -> None:
        torch.manual_seed(seed)
        self.model, self.takes_rates = nn.Linear(3, 1), takes_rates
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=momentum)

    def forward_backward(self, batch: Sequence[Tensor]) -> float:
        loss = (self.model(torch.stack([*batch])) - 1).square().sum()
        loss.backward()
        return float(loss.detach())

    def optim_step(self, lr_scale: float) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.01 * (lr_scale if self.takes_rates else 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def save(self) -> Any:
        return copy.deepcopy(self)


class Adapter:
    def __init__(self, saves_all: bool = True, **options: Any) -> None:
        self.saves_all, self.options = saves_all, options

    def create(self, seed: int) -> Server:
        return Server(seed, **self.options)

    def load(self, token: Server) -> Server:
        if self.saves_all:
            return copy.deepcopy(token)
        server = Server(**self.options)
        server.model.load_state_dict(token.model.state_dict())
        return server

    def sample(self, index: int) -> Tensor:
        return INPUTS[index] + torch.tensor([0.0, 0.5, float(index)])


def test_a_service_on_torch_alone() -> None:
    # torch copies a module without its gradients.
    between = {"resumption_between": "is saved between updates only"}
    report = check_service(Adapter(), quiet=True, expected_failures=between)
    assert {outcome.law for outcome in report.outcomes if outcome.result == "skipped"} == {"retries"}
    assert "no method retry()" in report["retries"].reason
    violation = failure_of(Adapter(saves_all=False))
    assert "weights only, the optimizer state is lost" in violation.finding
    assert "optimizer.state_dict()" in str(violation)
    assert "forward_backward(0); optim_step(1.0) | forward_backward(0); optim_step(1.0)" in str(violation)
    # An optimizer without a state loses none.
    assert check_service(Adapter(saves_all=False, momentum=0.0), quiet=True, expected_failures=between).ok
    # Without rates of its clients a service doesn't show in which part of its state the fault is.
    violation = failure_of(Adapter(saves_all=False, takes_rates=False))
    assert "a part of the state of training is lost" in violation.finding


def test_the_code_that_reproduces_a_failure_tries_its_calls() -> None:
    service = wrong_services.ReferenceService(restored=lambda run: attrs.evolve(run, grads={}))
    violation = failure_of(service, tolerance=0.01)
    code = violation.code.replace("...  # the adapter that was checked", "adapter")
    with pytest.raises(LawViolation, match="gradients that were accumulated are lost"):
        exec(code, {"adapter": service})


def test_what_a_service_refuses_is_a_violation() -> None:
    def full(run: Any) -> Any:
        raise OSError("no space left")

    assert failure_of(ReferenceService(restored=full)).finding.endswith(
        "the service refused load: OSError: no space left"
    )


SERVICE: Any = ReferenceService()
REFUSALS = [
    Refusal(
        "a class",
        lambda: check_service(cast("Any", object())),
        pl.errors.ArgumentTypeError,
        ("has no method create, load",),
    ),
    Refusal("below zero", lambda: check_service(SERVICE, tolerance=-1.0), ValueError, ("tolerance",)),
    Refusal("a text", lambda: Served(SERVICE, tolerance=cast("float", "small")), TypeError, ("tolerance",)),
    Refusal("no calls", lambda: Calls(before=(), after=((0,), 1.0)), ValueError, ("Calls: before",)),
    Refusal("no step", lambda: Calls(before=((0,), 1.0), after=((0,),)), ValueError, ("let a step follow",)),
]


@rows(REFUSALS)
def test_what_is_no_service_is_refused(refusal: Refusal) -> None:
    check(refusal)
