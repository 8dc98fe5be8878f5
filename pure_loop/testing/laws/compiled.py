"""The law of compiled steps."""

from __future__ import annotations

import attrs

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

# A graph may sum in another order, which in float64 is off by 1e-16; a few steps make it more.
_ROUNDING = 1e-9
_WATCHED = (
    {Event.EPOCH_END, Event.FIT_END},
    {Event.BATCH_END, Event.EVAL_END},
    {Event.BATCH_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END},
    {Event.BEFORE_FORWARD, Event.AFTER_BACKWARD, Event.BATCH_END},
    # From here on autograd goes from one graph into the next.
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


@law("States of compiled steps are those of eager ones, but for rounding", rests_on=_SOUND)
def compile_equality(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains in graphs, in float64, watching some events, which the case's seed chooses, and without.

    Graphs run operation by operation, so that no C++ compiler is needed: on trial is what gets into them. What can't be
    traced runs eagerly, between graphs.
    """
    from pure_loop.compile import interpreted  # torch's compiler takes seconds to import

    # Momentum instead of AdamW, which makes a whole step of what is rounding where a gradient should be zero.
    case = attrs.evolve(case, problem=case.problem.in_float64(), optimizer="sgd", precision="fp32")
    watched = _WATCHED[case.seed % len(_WATCHED)]
    wanted = case.run(subject.make(), fit=fit, watch=watched)
    steps = 3 if case.plan.order == "current" and case.seed % 2 else 1
    with interpreted():
        given = case.run(subject.make(), fit=fit, watch=watched, compile="where possible", steps_per_call=steps)
    what = f"compiled, watching {', '.join(sorted(event.name for event in watched))}"
    same_events([event for event, _ in given], [event for event, _ in wanted], what)
    for (event, one), (_, other) in zip(given, wanted, strict=True):
        for field in _FIELDS:
            name = "_grads" if field == "grads" else field
            difference = close(getattr(one, name), getattr(other, name), tolerance=_ROUNDING, name=f"state.{field}")
            if difference is not None:
                raise LawViolation(
                    f"{what}: at {moment(one)}, something else came out than in eager steps.",
                    event=event,
                    difference=difference,
                    labels=("compiled", "eager"),
                    advice="What decides by a number, or keeps one, has to do so in tensors or in the State: a graph "
                    "holds whatever the Python came to when it was made.",
                )
