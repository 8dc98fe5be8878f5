"""A small training service in this process, and services that are wrong in one way, each with the law that it breaks.

>>> service = ReferenceService()
>>> session, batch, losses = service.create(seed=0), [service.sample(0), service.sample(1)], []
>>> for _ in range(20):
...     losses.append(session.forward_backward(batch))
...     session.optim_step(1.0)
>>> losses[-1] < losses[0] / 2
True
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop import optim
from pure_loop.frozendict import FrozenDict
from pure_loop.random import generator
from pure_loop.testing._patches import breaking
from pure_loop.testing.service import Service
from pure_loop.time import Timestamp

__all__ = ["WRONG_SERVICES", "ReferenceService", "ReferenceSession"]

Factory: TypeAlias = Callable[[], Service]
Sample: TypeAlias = tuple[Tensor, Tensor]
Tensors: TypeAlias = Mapping[str, Tensor]

WRONG_SERVICES: dict[Factory, str] = {}
"""Functions that make a wrong service, and the name of the law that each breaks."""

breaks = breaking(WRONG_SERVICES)


@attrs.frozen(eq=False)
class Run:
    """All that a session keeps; its tensors are never written to.

    Attributes:
        params, opt_state, grads: names to tensors; no gradients before a ``forward_backward``.
        random: the state of the generator of dropout.
        journal: the requests so far: batches, and rates of steps.
        seed: of the session.
    """

    params: FrozenDict[str, Tensor]
    opt_state: Any
    random: Tensor
    seed: int
    grads: Tensors = attrs.field(factory=FrozenDict)
    journal: tuple[Any, ...] = ()


class ReferenceSession:
    """A session that keeps the laws."""

    def __init__(self, run: Run, dropout: float) -> None:
        self.run, self.dropout = run, dropout

    def forward_backward(self, batch: Sequence[Sample]) -> float:
        run, random = self.run, torch.Generator()
        random.set_state(run.random)
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in run.params.items()}
        loss = self.loss(leaves, batch, random)
        pairs = zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True)
        grads = {name: run.grads.get(name, 0) + grad for name, grad in pairs}
        journal = (*run.journal, batch)
        self.run = attrs.evolve(run, grads=grads, random=random.get_state(), journal=journal)
        return loss.item()

    def loss(self, params: Tensors, batch: Sequence[Sample], random: torch.Generator) -> Tensor:
        """The sum of the squared errors."""
        inputs, targets = (torch.stack(part) for part in zip(*batch, strict=True))
        hidden = torch.tanh(inputs @ params["in"])
        kept = torch.rand(hidden.shape, generator=random) >= self.dropout
        return ((hidden * kept @ params["out"] - targets) ** 2).sum()

    def optim_step(self, lr_scale: float) -> None:
        run = self.run
        if not run.grads:
            raise RuntimeError("optim_step: no forward_backward came before it.")
        params, opt_state = optimizer(lr_scale).update(run.grads, run.opt_state, run.params, Timestamp())
        journal = (*run.journal, lr_scale)
        self.run = attrs.evolve(run, params=params, opt_state=opt_state, grads=FrozenDict(), journal=journal)

    def evaluate(self) -> Tensors:
        return self.run.params

    def save(self) -> object:
        return self.run

    def retry(self) -> None:
        """A request that is sent again is known, and not carried out again."""


def optimizer(lr_scale: float) -> optim.Optimizer:
    return optim.adamw(lr=0.05 * lr_scale)


class ReferenceService:
    """A service that keeps the laws: a network of two layers with dropout, the sum of squared errors, and AdamW.

    Args:
        dropout: the probability with which a hidden unit is left out.
        session: the class of its sessions.
        restored: what ``load`` makes of what was saved.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        session: type[ReferenceSession] = ReferenceSession,
        restored: Callable[[Any], Run] = lambda run: run,
    ) -> None:
        self.dropout, self.session, self.restored = dropout, session, restored

    def create(self, seed: int) -> ReferenceSession:
        return self.session(begun(seed), self.dropout)

    def load(self, token: object) -> ReferenceSession:
        return self.session(self.restored(token), self.dropout)

    def sample(self, index: int) -> Sample:
        """Three inputs and a target."""
        random = generator(0, "sample", index)
        return torch.randn(3, generator=random), torch.randn(1, generator=random)


def begun(seed: int) -> Run:
    random = generator(seed, "weights")
    params = {"in": torch.randn(3, 4, generator=random), "out": torch.randn(4, 1, generator=random)}
    return Run(FrozenDict(params), optimizer(1.0).init(FrozenDict(params)), random.get_state(), seed)


def replayed(run: Run, journal: Sequence[Any]) -> Run:
    """The run after these requests."""
    session = ReferenceSession(run, 0.0)
    for request in journal:
        session.optim_step(request) if isinstance(request, float) else session.forward_backward(request)
    return session.run


def last_update(run: Run) -> int:
    """How many requests the last step and its batches were."""
    steps = [index for index, request in enumerate(run.journal) if isinstance(request, float)]
    return len(run.journal) - (steps[-2] + 1 if len(steps) > 1 else 0)


def restoring(law: str, dropout: float = 0.0) -> Callable[[Callable[[Run], Run]], Factory]:
    """Make such a function of what a service loads instead of what was saved."""

    def register(restored: Callable[[Run], Run]) -> Factory:
        def make() -> Service:
            return ReferenceService(dropout, restored=restored)

        make.__name__ = restored.__name__
        return breaks(law)(make)

    return register


def serving(law: str, dropout: float = 0.0) -> Callable[[type[ReferenceSession]], Factory]:
    """Make such a function of a class of sessions."""

    def register(session: type[ReferenceSession]) -> Factory:
        def make() -> Service:
            return ReferenceService(dropout, session)

        make.__name__ = re.sub(r"\B([A-Z])", r"_\1", session.__name__).lower()
        return breaks(law)(make)

    return register


@restoring("resumption")
def saves_the_weights_only(run: Run) -> Run:
    return attrs.evolve(run, opt_state=optimizer(1.0).init(run.params))


@restoring("resumption", dropout=0.5)
def saves_the_weights_only_under_dropout(run: Run) -> Run:
    return attrs.evolve(run, opt_state=optimizer(1.0).init(run.params))


@restoring("resumption")
def forgets_the_number_of_steps(run: Run) -> Run:
    return attrs.evolve(run, opt_state=FrozenDict({**run.opt_state, "step": torch.zeros_like(run.opt_state["step"])}))


@restoring("resumption", dropout=0.5)
def forgets_the_generator(run: Run) -> Run:
    return attrs.evolve(run, random=begun(run.seed).random)


@restoring("resumption")
def applies_the_last_batch_twice(run: Run) -> Run:
    """What came after the last step is as it was, so that saving between a batch and its step is right."""
    return run if run.grads else replayed(run, run.journal[-last_update(run) :])


@restoring("resumption")
def loses_the_last_batch(run: Run) -> Run:
    return run if run.grads else replayed(begun(run.seed), run.journal[: -last_update(run)])


@restoring("resumption")
def loads_nothing(run: Run) -> Run:
    return begun(run.seed)


@restoring("resumption")
def rounds_the_weights(run: Run) -> Run:
    params = {name: tensor.bfloat16().float() for name, tensor in run.params.items()}
    return attrs.evolve(run, params=FrozenDict(params))


@breaks("resumption")
def saves_a_reference() -> Service:
    """To the session, which goes on."""

    class Session(ReferenceSession):
        def save(self) -> object:
            return self

    return ReferenceService(session=Session, restored=lambda session: session.run)


@restoring("resumption_between")
def loses_accumulated_gradients(run: Run) -> Run:
    return attrs.evolve(run, grads=FrozenDict())


@restoring("resumption_between")
def counts_accumulated_gradients_twice(run: Run) -> Run:
    return attrs.evolve(run, grads={name: 2 * grad for name, grad in run.grads.items()})


@serving("accumulation")
class AppliesEachBatchAtOnce(ReferenceSession):
    def forward_backward(self, batch: Sequence[Sample]) -> float:
        loss = super().forward_backward(batch)
        super().optim_step(1.0)
        return loss

    def optim_step(self, lr_scale: float) -> None:
        pass


@serving("accumulation")
class NeverSteps(ReferenceSession):
    def optim_step(self, lr_scale: float) -> None:
        self.run = attrs.evolve(self.run, grads=FrozenDict())


@serving("empty_step")
class KeepsGradientsAfterAStep(ReferenceSession):
    def optim_step(self, lr_scale: float) -> None:
        grads = self.run.grads
        super().optim_step(lr_scale)
        self.run = attrs.evolve(self.run, grads=grads)


@serving("empty_step")
class StepsOnGradientsOfZero(ReferenceSession):
    def optim_step(self, lr_scale: float) -> None:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in self.run.params.items()}
        self.run = attrs.evolve(self.run, grads=self.run.grads or zeros)
        super().optim_step(lr_scale)


@serving("microbatches")
class CountsTheLastCallOnly(ReferenceSession):
    def forward_backward(self, batch: Sequence[Sample]) -> float:
        self.run = attrs.evolve(self.run, grads=FrozenDict())
        return super().forward_backward(batch)


@serving("microbatches")
class AddsTheMeanOfEachCall(ReferenceSession):
    def loss(self, params: Tensors, batch: Sequence[Sample], random: torch.Generator) -> Tensor:
        return super().loss(params, batch, random) / len(batch)


@serving("observation", dropout=0.5)
class EvaluatesWithDropout(ReferenceSession):
    def evaluate(self) -> Tensors:
        random = torch.Generator()
        random.set_state(self.run.random)
        torch.rand(1, generator=random)
        self.run = attrs.evolve(self.run, random=random.get_state())
        return super().evaluate()


@serving("observation")
class ClearsGradientsWhenItSaves(ReferenceSession):
    def save(self) -> object:
        self.run = attrs.evolve(self.run, grads=FrozenDict())
        return super().save()


def sharing(*fields: str) -> Service:
    """A service whose sessions have some fields of a run in common: those of the session that was touched last."""
    common: dict[str, Any] = {}

    class Session(ReferenceSession):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            return attrs.evolve(value, **common) if name == "run" else value

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "run":
                common.update({field: getattr(value, field) for field in fields})
            super().__setattr__(name, value)

    return ReferenceService(session=Session)


@breaks("isolation")
def shares_gradients() -> Service:
    return sharing("grads")


@breaks("isolation")
def shares_weights() -> Service:
    return sharing("params")


@serving("determinism", dropout=0.5)
class DrawsFromTheGlobalGenerator(ReferenceSession):
    def loss(self, params: Tensors, batch: Sequence[Sample], random: torch.Generator) -> Tensor:
        return super().loss(params, batch, torch.default_generator)


@serving("retries")
class CarriesOutARetry(ReferenceSession):
    def retry(self) -> None:
        request = self.run.journal[-1]
        if not isinstance(request, float):
            self.forward_backward(request)
