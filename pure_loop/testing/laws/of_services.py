"""Laws of training services: a client sends ``forward_backward`` and ``optim_step``, and the server trains.

A law compares what a session gives with what other calls give. Where they differ, the calls that known faults amount to
are sent, too: a batch that is applied twice gives what two batches give. So a failure names the fault.

>>> from pure_loop.testing import laws, wrong_services
>>> laws.of_services.resumption(wrong_services.ReferenceService(), max_examples=2)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias
from unittest import SkipTest

import attrs
import torch
from torch import Tensor

from pure_loop.testing.case import Fit
from pure_loop.testing.comparison import Difference
from pure_loop.testing.law import law
from pure_loop.testing.report import LawViolation
from pure_loop.testing.service import Calls, Sent, Sequel, Served, answering, updates_of

Act: TypeAlias = Callable[[Any], object]

__all__ = [
    "accumulation",
    "determinism",
    "empty_step",
    "isolation",
    "microbatches",
    "observation",
    "resumption",
    "resumption_between",
    "retries",
]


def _refused(finding: str, case: Calls, weights: Tensor, wanted: Tensor, advice: str = "") -> LawViolation:
    difference = Difference("session.evaluate(), as one vector", weights, wanted)
    return LawViolation(
        f"{finding} The calls: {case.said}.",
        difference=None if torch.equal(weights, wanted) else difference,
        advice=advice,
    )


@law("equal calls give equal numbers in two sessions with one seed", of=Served)
def determinism(subject: Served, case: Calls, fit: Fit) -> None:
    """Sends all calls twice."""
    calls = case.before + case.after
    wanted, again = subject.fresh(case.seed, calls), subject.run(subject.service.create(case.seed), calls)
    if not subject.same(case, again, wanted):
        moved = (wanted.weights - subject.fresh(case.seed, ()).weights).norm()
        noise = (again.weights - wanted.weights).norm() / moved
        raise _refused(
            f"sent twice, they gave weights that are {noise:.1e} of the way of training apart.",
            *(case, again.weights, wanted.weights),
            advice="If that is the rounding of kernels that add in no fixed order, pass a greater tolerance=, or let "
            "the adapter train at a higher rate. If not, the service draws from a generator without the seed.",
        )


@law("forward_backward alone changes no weights, and optim_step changes them", rests_on=("determinism",), of=Served)
def accumulation(subject: Served, case: Calls, fit: Fit) -> None:
    """Looks at the weights around the first ``optim_step``."""
    update = updates_of(case.before)[0][0]
    start, added, stepped = (subject.fresh(case.seed, calls).weights for calls in ((), update[:-1], update))
    if not subject.near(case, added, start):
        raise _refused(
            "forward_backward changed the weights before any optim_step.",
            *(case, added, start),
            advice="Add to the gradients in forward_backward, and leave the optimizer to optim_step.",
        )
    if torch.equal(stepped, start):
        raise _refused(
            "optim_step changed nothing that evaluate() shows.",
            *(case, stepped, start),
            advice="Let evaluate() show what is trained, and optim_step wait until the update is applied.",
        )


@law(
    "optim_step without a forward_backward changes nothing, or is refused: a step clears the gradients",
    rests_on=("determinism", "accumulation"),
    of=Served,
)
def empty_step(subject: Served, case: Calls, fit: Fit) -> None:
    """Sends three steps more."""
    session = subject.service.create(case.seed)
    path = [subject.run(session, case.before).weights]
    for _ in range(3):
        with suppress(Exception):  # what a service refuses with is its own; that it changed nothing is looked at
            session.optim_step(1.0)
        path.append(subject.shown(session))
    if subject.near(case, path[-1], path[0]):
        return
    # Momentum alone gets shorter in each step; a gradient that stays does not.
    stays = (path[3] - path[2]).norm() > 0.9 * (path[1] - path[0]).norm()
    fault = "the gradients of the batch before are kept" if stays else "the step ran on gradients of zero, by momentum"
    raise _refused(
        f"at |, optim_step without a forward_backward changed the weights: {fault}.",
        *(case, path[-1], path[0]),
        advice="Set the gradients to None after a step, optimizer.zero_grad(set_to_none=True), and refuse a step "
        "without them.",
    )


@law(
    "a batch that is sent in several forward_backward calls gives the update of the batch in one",
    rests_on=("determinism", "accumulation", "empty_step"),
    of=Served,
)
def microbatches(subject: Served, case: Calls, fit: Fit) -> None:
    """Sends the first sample of each batch by itself; skipped where training draws random numbers, as dropout does."""
    losses = subject.fresh(case.seed, ((0,), (0,))).losses
    if abs(losses[0] - losses[1]) > subject.tolerance * abs(losses[0]):
        raise SkipTest("training draws random numbers, other ones for each call: give a service without dropout")

    def sent(split: Callable[[tuple[int, ...]], Sequel]) -> Tensor:
        parts = (split(call) if isinstance(call, tuple) and len(call) > 1 else (call,) for call in case.before)
        return subject.fresh(case.seed, tuple(call for part in parts for call in part)).weights

    wanted = sent(lambda batch: (batch,))
    pieces = sent(lambda batch: (batch[:1], batch[1:]))
    if subject.near(case, pieces, wanted):
        return
    faults = {
        "only the last forward_backward before a step counts": lambda batch: (batch[1:],),
        "only the first forward_backward before a step counts": lambda batch: (batch[:1],),
        "each call counts as the mean of its samples, however many": _alike,
        "each call adds the mean of its samples, however many": lambda batch: 2 * _alike(batch),
    }
    fault = next((name for name, split in faults.items() if subject.near(case, pieces, sent(split))), "")
    raise _refused(
        f"with the first sample of each batch in a call of its own, the weights at | differ{fault and f': {fault}'}.",
        *(case, pieces, wanted),
        advice="Add the gradients of the samples, and divide by the number of samples, if at all, in optim_step.",
    )


def _alike(batch: tuple[int, ...]) -> Sequel:
    """A batch whose mean is that of the means of the first sample and of the others."""
    return ((batch[:1] * (len(batch) - 1) + batch[1:]),)


@law("evaluate, save and load change nothing in a session", rests_on=("determinism",), of=Served)
def observation(subject: Served, case: Calls, fit: Fit) -> None:
    """Does all of them after each call; where the result differs, each by itself."""
    acts: dict[str, Act] = {
        "evaluate": lambda session: session.evaluate(),
        "save": lambda session: session.save(),
        "load": lambda session: subject.service.load(session.save()),
    }
    try:
        _undisturbed(subject, case, "evaluate, save and load", lambda session: [act(session) for act in acts.values()])
    except LawViolation:
        for name, act in acts.items():
            _undisturbed(subject, case, name, act)
        raise


def _undisturbed(subject: Served, case: Calls, name: str, act: Act, count: int | None = None) -> None:
    """Refuse an act that changes training, after each of the first ``count`` calls; None: after all."""
    calls, acts = case.before + case.after, itertools.repeat(act, *(() if count is None else (count,)))
    session = subject.service.create(case.seed)

    def then() -> None:
        with answering(name):
            next(acts, lambda session: None)(session)

    try:
        sent = subject.run(session, calls, then)
    except LawViolation as refusal:
        raise LawViolation(f"with {name} after each call, {refusal.finding}", advice=_APART) from refusal
    wanted = subject.fresh(case.seed, calls)
    if not subject.same(case, sent, wanted):
        raise _refused(f"with {name} after each call, training differs.", case, sent.weights, wanted.weights, _APART)


_APART = (
    "It must neither clear or add gradients, nor draw from the generator of training. Keep weights, gradients, "
    "optimizer and generator by session, and answers by the identifier of the request."
)


@law("two sessions don't disturb each other", rests_on=("determinism", "observation"), of=Served)
def isolation(subject: Served, case: Calls, fit: Fit) -> None:
    """Sends the calls of two sessions in turn."""
    wanted, beside = subject.fresh(case.seed, case.before), subject.fresh(case.seed, case.after)
    session, neighbour = subject.service.create(case.seed), subject.service.create(case.seed)
    calls = iter(case.after)
    weights: list[Tensor] = []

    def turn() -> None:
        weights.append(subject.shown(session))
        subject.run(neighbour, tuple(call for call in [next(calls, None)] if call is not None))
        weights.append(subject.shown(session))

    try:
        sent = subject.run(session, case.before, turn)
        rest = subject.run(neighbour, tuple(calls))
    except LawViolation as refusal:
        raise LawViolation(f"with another session's calls in between, {refusal.finding}", advice=_APART) from refusal
    if subject.same(case, sent, wanted) and subject.near(case, rest.weights, beside.weights):
        return
    apart = all(map(subject.near, [case] * len(weights), weights[::2], weights[1::2]))
    shared = "gradients, optimizer or generator" if apart else "weights"
    finding = f"with another session's calls, those after |, in between, a session differs: they share {shared}."
    raise _refused(finding, case, sent.weights, wanted.weights, _APART)


@law(
    "a request that is sent again, as after a lost answer, is not carried out again",
    rests_on=("determinism",),
    of=Served,
)
def retries(subject: Served, case: Calls, fit: Fit) -> None:
    """Calls ``session.retry()`` after each call of the first update; skipped where sessions have none."""
    if not hasattr(subject.service.create(case.seed), "retry"):
        raise SkipTest("its sessions have no method retry()")
    # Of the first one alone: if all gradients were doubled, Adam would step as before.
    first = len(updates_of(case.before)[0][0])
    _undisturbed(subject, case, "a retry", lambda session: session.retry(), first)


_ADVICE = {
    "gradients that were accumulated are lost": "Save the gradients, too, or refuse to save before their optim_step.",
    "gradients that were accumulated count twice": "Send no request again that is in what was saved.",
    "the last batch is applied twice": "Save with the weights which request was the last one that they have, and go on "
    "with the next one.",
    "the last batch is lost": "Let save wait for the requests that were sent before it.",
    "it begins with fresh weights, none were loaded": "Load what was saved.",
    "what was saved changes as the session goes on": "Copy the tensors in save, and let a token name what was saved "
    "then, and not the newest.",
    "the weights were rounded to 16 bits": "Save them in the dtype in which they are trained.",
    "it begins with other weights than were saved": "Compare what is saved with what is loaded, name by name.",
    "training draws other random numbers": "Save the state of the generator of dropout.",
    "weights only, the optimizer state is lost": "Save and load optimizer.state_dict(), too, or call the request that "
    "loads weights and optimizer.",
    "the number of steps, of Adam's bias correction or a schedule, is lost": "Save the optimizer's step and the "
    "schedule's position.",
    "a part of the state of training is lost": "Save all that a step reads: moments, step, schedule, generators.",
}
# On few calls, such as the smallest that were found, two faults may give equal weights; on these they don't.
_TELLING = Calls(before=((0,), 1.0, (1, 2), 0.5), after=((3,), (4,), 1.0, (5,), 0.5))


@attrs.define(eq=False)
class _Resumed:
    """A session that was saved and went on, and the one that was loaded then; and what known faults would give."""

    subject: Served
    case: Calls
    token: Any = attrs.field(init=False)
    saved: Tensor = attrs.field(init=False)
    loaded: Tensor = attrs.field(init=False)
    wanted: Sent = attrs.field(init=False)
    sent: Sent = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        service, case = self.subject.service, self.case
        session = service.create(case.seed)
        self.saved = self.subject.run(session, case.before).weights
        with answering("save"):
            self.token = session.save()
        self.wanted = self.subject.run(session, case.after)
        with answering("load"):
            session = service.load(self.token)
            self.loaded = self.subject.shown(session)
        self.sent = self.subject.run(session, case.after)

    def check(self, telling: Calls) -> None:
        """Refuse a session that doesn't go on as the other one did.

        Args:
            telling: calls on which no two faults give equal weights.

        Raises:
            LawViolation: names the fault.
        """
        if self.holds():
            return
        elsewhere = _Resumed(self.subject, telling)
        shared = set(_ADVICE) if elsewhere.holds() else set(elsewhere.found())
        fault = next(fault for fault in self.found() if fault in shared)
        finding = f"saved and loaded at |, a session does not go on as it did: {fault}."
        at_load = self.near(self.loaded, self.saved)
        weights = (self.sent.weights, self.wanted.weights) if at_load else (self.loaded, self.saved)
        raise _refused(finding, self.case, weights[0], weights[1], _ADVICE[fault])

    def holds(self) -> bool:
        return self.near(self.loaded, self.saved) and self.subject.same(self.case, self.sent, self.wanted)

    def found(self) -> Iterator[str]:
        """The faults that it may be."""
        for holds, fault in self.faults():
            with suppress(LawViolation):  # calls that the service refuses say nothing
                if holds():
                    yield fault

    def near(self, weights: Tensor, wanted: Tensor) -> bool:
        return self.subject.near(self.case, weights, wanted)

    def after(self, *parts: Sequel) -> Tensor:
        """The weights after these calls, in a session of their own."""
        return self.subject.fresh(self.case.seed, sum(parts, start=())).weights

    def ends(self, *parts: Sequel) -> bool:
        """Whether the loaded session ends where these calls and the rest lead to."""
        return self.near(self.sent.weights, self.after(*parts, self.case.after))

    def faults(self) -> Iterator[tuple[Callable[[], bool], str]]:
        """The known faults, each with what tells whether it is that; the last is any other."""
        before = self.case.before
        updates, pending = updates_of(before)
        if pending:
            yield lambda: self.ends(before[: -len(pending)]), "gradients that were accumulated are lost"
            yield lambda: self.ends(before, pending), "gradients that were accumulated count twice"
        else:
            yield lambda: self.ends(before, updates[-1]), "the last batch is applied twice"
            yield lambda: self.begins(before[: -len(updates[-1])]), "the last batch is lost"
        yield lambda: self.begins(), "it begins with fresh weights, none were loaded"
        yield lambda: self.near(self.loaded, self.wanted.weights), "what was saved changes as the session goes on"
        yield self.is_rounded, "the weights were rounded to 16 bits"
        yield lambda: not self.near(self.loaded, self.saved), "it begins with other weights than were saved"
        yield self.draws_otherwise, "training draws other random numbers"
        yield self.is_cold, "weights only, the optimizer state is lost"
        yield self.is_of_other_length, "the number of steps, of Adam's bias correction or a schedule, is lost"
        yield lambda: True, "a part of the state of training is lost"

    def begins(self, *parts: Sequel) -> bool:
        return self.near(self.loaded, self.after(*parts))

    def is_rounded(self) -> bool:
        rounded = (self.saved.to(dtype).double() for dtype in (torch.bfloat16, torch.float16))
        return any(torch.equal(self.loaded, weights) for weights in rounded)

    def draws_otherwise(self) -> bool:
        """Whether the first loss differs, which the optimizer has nothing to do with."""
        losses = self.sent.losses[0], self.wanted.losses[0]
        return abs(losses[0] - losses[1]) > self.subject.tolerance * max(map(abs, losses))

    def is_cold(self) -> bool:
        """Whether it is all one to a loaded session which gradients the saved one had stepped on at a rate of zero."""
        histories: list[Sequel] = [((0,), 0.0), ((1,), 0.0)]
        if not all(self.near(self.after(history), self.after()) for history in histories):
            return False  # a service that takes no rate from its clients
        warm = [self.after(history, self.case.after) for history in histories]
        loaded = [_Resumed(self.subject, Calls(history, self.case.after, self.case.seed)) for history in histories]
        return not self.near(*warm) and self.near(*(resumed.sent.weights for resumed in loaded))

    def is_of_other_length(self) -> bool:
        """Whether the first step after loading has the right direction, and another length."""
        update = updates_of(self.case.after)[0][0]
        wanted = self.after(self.case.before, update) - self.saved
        step = self.subject.run(self.subject.service.load(self.token), update).weights - self.loaded
        cosine = float(torch.nn.functional.cosine_similarity(step, wanted, dim=0))
        return cosine > 0.99 and not self.near(step, wanted)


@law(
    "a session that is saved and loaded after an optim_step goes on as if it had not stopped",
    rests_on=("determinism", "accumulation", "observation"),
    of=Served,
)
def resumption(subject: Served, case: Calls, fit: Fit) -> None:
    """Saves, lets the session go on, loads, and sends the loaded session the same calls."""
    _Resumed(subject, case).check(attrs.evolve(_TELLING, seed=case.seed))


@law(
    "a session that is saved before an optim_step goes on with the gradients that it has, or refuses to be saved",
    rests_on=("resumption",),
    of=Served,
)
def resumption_between(subject: Served, case: Calls, fit: Fit) -> None:
    """Sends a batch before saving that the next step has to count, besides those that come after."""

    def between(case: Calls) -> Calls:
        return attrs.evolve(case, before=(*case.before, case.before[0]))

    session = subject.service.create(case.seed)
    subject.run(session, between(case).before)
    try:
        session.save()
    except Exception:  # what a service refuses with is its own
        return
    _Resumed(subject, between(case)).check(between(attrs.evolve(_TELLING, seed=case.seed)))
