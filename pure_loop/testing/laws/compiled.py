"""The law of compiled steps: they compute what eager steps compute."""

from __future__ import annotations

import attrs

from pure_loop.entry.compiling import interpreted
from pure_loop.event import Event
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.comparison import close
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import same_events
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.violation import LawViolation, moment

__all__ = ["compile_equality"]

_SOUND = (
    *("purity", "memory", "order", "value", "determinism", "visibility", "microbatch_invariance"),
    *("evaluation_invariance", "observer_invariance", "composition", "resumption", "watch_equality", "closing"),
)

# A graph may add in another order, a relative error of 1e-16 in float64, which a few steps amplify.
_ROUNDING = 1e-9
_WATCHED = (
    {Event.EPOCH_END, Event.FIT_END},
    {Event.BATCH_END, Event.EVAL_END},
    {Event.BATCH_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END},
    {Event.BEFORE_FORWARD, Event.AFTER_BACKWARD, Event.BATCH_END},
    # With these, autograd crosses from one graph into the next.
    {Event.AFTER_FORWARD, Event.BATCH_END},
    {Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END},
    {Event.BEFORE_LOSS, Event.BEFORE_BACKWARD, Event.BATCH_END},
)
_FIELDS = (
    "params",
    "buffers",
    "opt_state",
    "algorithm_state",
    "metrics",
    "loss",
    "outputs",
    "grads",
    "grad_norm",
    "skipped",
)


@law("compiled steps give the States of eager steps, up to rounding", rests_on=_SOUND, share=0.25)
def compile_equality(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains compiled and eagerly, in float64, watching some events, which the case's seed chooses.

    Graphs run operation by operation, so that no C++ compiler is needed: the law is about the contents of the graphs.
    Code that can't be traced runs eagerly, between graphs.
    """
    # Momentum instead of AdamW, which turns a rounding error in a gradient that should be zero into a full step.
    case = attrs.evolve(case, problem=case.problem.in_float64(), optimizer="sgd", precision="fp32")
    watched = _WATCHED[case.seed % len(_WATCHED)]
    wanted = case.run(subject.make(), fit=fit, watch=watched)
    steps = 3 if case.plan.order == "current" and case.seed % 2 else 1
    with interpreted():
        value = case.run(subject.make(), fit=fit, watch=watched, compile="where possible", steps_per_call=steps)
    what = f"compiled, watching {', '.join(sorted(event.name for event in watched))}"
    same_events([event for event, _ in value], [event for event, _ in wanted], what)
    for (event, compiled), (_, eager) in zip(value, wanted, strict=True):
        for field in _FIELDS:
            name = "_grads" if field == "grads" else field
            difference = close(
                getattr(compiled, name), getattr(eager, name), tolerance=_ROUNDING, name=f"state.{field}"
            )
            if difference is not None:
                raise LawViolation(
                    f"{what}: at {moment(compiled)}, the result differs from that of eager steps.",
                    event=event,
                    difference=difference,
                    labels=("compiled", "eager"),
                    advice="A graph holds the Python values of the moment it was traced. Branch on tensors with "
                    "torch.where, and keep numbers that change in tensors or in the State.",
                )
