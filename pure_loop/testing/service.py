"""Services on trial: what an adapter of one has to offer, the calls that are drawn, and what they gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from pure_loop._internal.arguments import check_number
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.testing.case import Fit, Pairs, code
from pure_loop.testing.report import LawViolation
from pure_loop.testing.subject import Subject

Call: TypeAlias = tuple[int, ...] | float
"""The numbers of the samples of a ``forward_backward``, or the ``lr_scale`` of an ``optim_step``."""

Sequel: TypeAlias = tuple[Call, ...]


class Session(Protocol):
    """A training run on a service.

    A session that can send its last request again, under the request's own identifier as after a lost answer, does so
    in a method ``retry()``, and the law ``retries`` is tried.
    """

    def forward_backward(self, batch: Sequence[Any]) -> float:
        """Add the gradient of these samples to what is accumulated; return the loss."""

    def optim_step(self, lr_scale: float) -> None:
        """Update the weights at ``lr_scale`` times the usual learning rate, 0.0 included."""

    def evaluate(self) -> Mapping[str, Tensor]:
        """What shows the weights: themselves or, where the service keeps them, log-probabilities of fixed inputs."""

    def save(self) -> Any:
        """Save weights and optimizer; return what :meth:`Service.load` takes: a path or a token."""


class Service(Protocol):
    """A service on trial, in the terms of the laws: an adapter of a few lines.

    Each ``create`` gives a session of a new model with fresh weights, equal ones for equal seeds; of a service that
    takes no seed, ``create`` may load what was saved once, at the start of a session. Calls wait for their results.

    ``save`` and ``load`` may be those of your own client, which keeps more than the service does: the number of the
    next batch, for example. :class:`pure_loop.testing.wrong_services.ReferenceService` is an example.
    """

    def create(self, seed: int) -> Session:
        """Begin a training run."""

    def load(self, token: Any) -> Session:
        """Begin a training run that goes on from what was saved, with the optimizer."""

    def sample(self, index: int) -> Any:
        """A sample of training, another one for each index; equal in every call."""


def _has_an_update(calls: object, attribute: attrs.Attribute[Sequel], value: Sequel) -> None:
    if not value or not isinstance(value[0], tuple) or all(isinstance(call, tuple) for call in value):
        raise ArgumentError(
            f"Calls: {attribute.name}={value!r}: begin with a batch, and let a step follow, ((0, 1), 1.0)."
        )


@attrs.frozen(repr=False)
class Calls:
    """Calls to a session: the case of the laws of services.

    A tuple is a ``forward_backward`` of the samples of these numbers, a number an ``optim_step`` with this
    ``lr_scale``.

    Attributes:
        before, after: the calls before and after the session is saved; of a law about two sessions, those of each.
        seed: of the session.

    Raises:
        ArgumentError: no batch at the beginning, or no step.

    >>> Calls(before=((0, 1), 1.0), after=((2,), 0.5)).said
    'forward_backward(0, 1); optim_step(1.0) | forward_backward(2); optim_step(0.5)'
    """

    before: Sequel = attrs.field(validator=_has_an_update)
    after: Sequel = attrs.field(validator=_has_an_update)
    seed: int = 0

    @property
    def said(self) -> str:
        """The calls as code."""
        return " | ".join(map(_written, (self.before, self.after)))

    def __repr__(self) -> str:
        return code(self)


def _written(calls: Sequel) -> str:
    parts = (f"forward_backward{call}" if isinstance(call, tuple) else f"optim_step({call})" for call in calls)
    return "; ".join(parts).replace(",)", ")")


def updates_of(calls: Sequel) -> tuple[list[Sequel], Sequel]:
    """The calls of each update, up to its ``optim_step``; and those after the last one."""
    updates: list[Sequel] = []
    pending: Sequel = ()
    for call in calls:
        pending += (call,)
        if not isinstance(call, tuple):
            updates.append(pending)
            pending = ()
    return updates, pending


def drawn() -> st.SearchStrategy[Calls]:
    """One to three updates of one or two batches on either side."""
    batch = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True).map(tuple)
    update = st.tuples(st.lists(batch, min_size=1, max_size=2).map(tuple), st.sampled_from([1.0, 0.5]))
    updates = st.lists(update.map(lambda pair: (*pair[0], pair[1])), min_size=1, max_size=3)
    sequel = updates.map(lambda listed: tuple(call for calls in listed for call in calls))
    return st.builds(Calls, before=sequel, after=sequel, seed=st.integers(0, 3))


@attrs.frozen(eq=False)
class Sent:
    """What a session gave: the losses of its calls, and what ``evaluate`` shows after them, as one float64 vector."""

    losses: tuple[float, ...]
    weights: Tensor


@contextmanager
def answering(request: str) -> Iterator[None]:
    """An error in the body is a violation: a service answers a request that the laws send."""
    try:
        yield
    except LawViolation:
        raise
    except Exception as error:
        raise LawViolation(f"the service refused {request}: {type(error).__name__}: {error}") from error


class Served(Subject):
    """A service on trial.

    Args:
        service: the adapter.
        tolerance: how far results may be apart, as a part of how far training moves what ``evaluate`` shows, by norms;
            of losses, as a part of the loss.

    Raises:
        ArgumentTypeError: ``service`` lacks a method.

    >>> from pure_loop.testing import laws, wrong_services
    >>> served = Served(wrong_services.ReferenceService(), tolerance=1e-5)
    >>> laws.of_services.microbatches(served, Calls(before=((0, 1, 2), 1.0), after=((3,), 1.0)))
    """

    kind = "service"
    laws = "testing.laws.of_services"
    tried_on = Calls

    def __init__(self, service: Service, *, tolerance: float = 1e-3) -> None:
        lacking = [name for name in ("create", "load", "sample") if not callable(getattr(service, name, None))]
        if lacking:
            raise ArgumentTypeError(
                f"a {type(service).__name__} has no method {', '.join(lacking)}: give an adapter of "
                "your service with the methods of pl.testing.Service."
            )
        self.service = service
        self.tolerance = check_number("tolerance", tolerance, least=0.0)
        self.called = "service" if tolerance == 1e-3 else f"testing.Served(service, tolerance={tolerance})"
        self._known: dict[tuple[int, Sequel], Sent] = {}
        super().__init__(type(service).__name__, (), lambda law: drawn(), "")

    @classmethod
    def made_of(cls, value: Any) -> Served:
        return value if isinstance(value, cls) else cls(value)

    def plain(self, case: Calls, fit: Fit) -> Pairs:
        """A session yields no events; and how long a service takes is not known from this processor's time."""
        raise NotImplementedError

    def reproduction(self, law: str, case: object, *, standard: bool) -> str:
        made = "service = ...  # the adapter that was checked"
        return f"from pure_loop import testing\n\n{made}\n{law}({self.called}, testing.{case!r})"

    def shown(self, session: Session) -> Tensor:
        """What ``evaluate`` gives, as one vector."""
        tensors = session.evaluate()
        return torch.cat([tensors[name].detach().cpu().double().flatten() for name in sorted(tensors)])

    def run(self, session: Session, calls: Sequel, then: Callable[[], object] = lambda: None) -> Sent:
        """Send the calls to a session, each followed by ``then``."""
        losses = []
        for number, call in enumerate(calls):
            with answering(f"the last of {_written(calls[: number + 1])}"):
                if isinstance(call, tuple):
                    losses.append(float(session.forward_backward([self.service.sample(index) for index in call])))
                else:
                    session.optim_step(call)
            then()
        return Sent(tuple(losses), self.shown(session))

    def fresh(self, seed: int, calls: Sequel) -> Sent:
        """What the calls give in a session of their own; they are sent once."""
        if (seed, calls) not in self._known:
            self._known[seed, calls] = self.run(self.service.create(seed), calls)
        return self._known[seed, calls]

    def near(self, case: Calls, weights: Tensor, wanted: Tensor) -> bool:
        """Whether two results of ``evaluate`` are equal, up to a part of how far the case's calls move it."""
        ends = [self.fresh(case.seed, calls).weights for calls in ((), case.before + case.after)]
        return bool((weights - wanted).norm() <= self.tolerance * (ends[1] - ends[0]).norm())

    def same(self, case: Calls, sent: Sent, wanted: Sent) -> bool:
        """Whether the weights are, and the losses, as far back as both have them."""
        losses = zip(sent.losses[::-1], wanted.losses[::-1], strict=False)
        equal = all(abs(a - b) <= self.tolerance * max(abs(a), abs(b)) for a, b in losses)
        return equal and self.near(case, sent.weights, wanted.weights)
