"""Streams of events in words, and plans of all kinds."""

from __future__ import annotations

from hypothesis import strategies as st

from pure_loop.event import Event
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.time import Time

# Written by hand, from the specification: what stands in small letters is made of events. A batch of one microbatch is
# "batch", an evaluation of one batch "val"; "+" says that an evaluation is in it.
WORDS = {
    "load": "INIT BEFORE_LOAD AFTER_LOAD",
    "micro": "BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD",
    "take": "BEFORE_DATALOADER AFTER_DATALOADER",
    "batch": "BATCH_START BEFORE_TRAIN_BATCH micro AFTER_TRAIN_BATCH BATCH_END",
    "batch/2": "BATCH_START BEFORE_TRAIN_BATCH micro micro AFTER_TRAIN_BATCH BATCH_END",
    "pass": "EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD",
    "val_batch": "EVAL_BATCH_START pass EVAL_BATCH_END",
    "val_batch/2": "EVAL_BATCH_START pass pass EVAL_BATCH_END",
    "val": "EVAL_START val_batch EVAL_END",
    "val_of_2": "EVAL_START val_batch val_batch EVAL_END",
    "evals": "EVAL_BEFORE_ALL val EVAL_AFTER_ALL",
    "step": "take batch BATCH_CHECKPOINT",
    "step+": "take batch evals BATCH_CHECKPOINT",
    "close": "EPOCH_END EPOCH_CHECKPOINT",
    "close+": "EPOCH_END evals EPOCH_CHECKPOINT",
    "ask": "BEFORE_DATALOADER",
    "epoch": "EPOCH_START",
    "iteration": "ITERATION_END ITERATION_CHECKPOINT",
    "predicted": "PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END",
}


def events(text: str) -> list[Event]:
    return [event for word in text.split() for event in (events(WORDS[word]) if word in WORDS else [Event(word)])]


ONE = EvaluatorPlan(batches=(4,))


in_counts = [
    st.builds(Time, st.integers(0, 4), st.sampled_from(["ep", "ba"])),
    st.builds(Time, st.integers(0, 12), st.just("sp")),
    st.builds(Time, st.integers(0, 30), st.just("tok")),
    st.builds(Time, st.sampled_from([0.0, 0.5, 1.5]), st.just("s")),
]
in_fractions = st.builds(Time, st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), st.just("dur"))
durations = {
    "ep": st.builds(Time, st.integers(0, 3), st.just("ep")),
    "ba": st.builds(Time, st.integers(0, 9), st.just("ba")),
    "sp": st.builds(Time, st.integers(0, 30), st.just("sp")),
    "tok": st.builds(Time, st.integers(0, 60), st.just("tok")),
    "s": st.builds(Time, st.sampled_from([0.0, 0.5, 2.25, 4.0]), st.just("s")),
    "iter": st.builds(Time, st.integers(0, 3), st.just("iter")),
}


@st.composite
def plans(
    draw: st.DrawFn, units: tuple[str, ...] = ("ep", "ba", "sp", "tok", "s", "iter"), evaluators: int = 0
) -> Plan:
    """Any plan with a duration in these units, and with just so many evaluators where that is not 0."""
    max_duration = draw(st.one_of(*(durations[unit] for unit in units)))
    iterations = max_duration.unit.value == "iter"
    lengths = st.sampled_from(["1ep", "2ep", "7tok", "20tok"])
    iteration_length = draw(lengths if iterations else st.none() | lengths)
    # A fraction of a duration in iterations is refused.
    interval = st.one_of(in_counts) if iterations else st.one_of(in_counts) | in_fractions
    evaluator_plans = st.builds(
        EvaluatorPlan,
        batches=st.lists(st.integers(1, 5), max_size=3).map(tuple),
        interval=st.none() | interval,
        microbatch_size=st.none() | st.integers(1, 3),
    )
    batches = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    sized = draw(st.booleans())
    return Plan(
        batches=batches,
        max_duration=max_duration,
        microbatch_size=draw(st.none() | st.integers(1, 4)),
        evaluators=draw(
            st.dictionaries(st.sampled_from("abc"), evaluator_plans, min_size=evaluators, max_size=evaluators or 2)
        ),
        eval_interval=draw(interval),
        tokens_per_sample=draw(st.integers(1, 5)),
        seconds_per_batch=draw(st.sampled_from([0.25, 0.5, 1.0])),
        batches_per_epoch=draw(st.none() | st.integers(1, len(batches) if sized else 5)),
        sized=sized,
        iteration_length=iteration_length,
        order=draw(st.sampled_from(["current", "2021"])) if iteration_length is None else "current",
        fresh=draw(st.booleans()),
    )
