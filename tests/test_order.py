"""The specification as data: streams written by hand, the oracle, the checker and what is drawn from the grammar."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure_loop import order
from pure_loop.errors import ArgumentError, ArgumentTypeError, OrderError
from pure_loop.event import Event
from pure_loop.order import EvaluatorPlan, Plan, check, expected, going_on
from pure_loop.time import Time, Timestamp, due


def events(text: str) -> list[Event]:
    return [Event(word) for word in text.split()]


# Written by hand, from the specification. A batch of one microbatch is BATCH, an evaluation of one batch EVAL.

LOAD = "INIT BEFORE_LOAD AFTER_LOAD"
MICRO = "BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD"
TAKE = "BEFORE_DATALOADER AFTER_DATALOADER"
BATCH = f"BATCH_START BEFORE_TRAIN_BATCH {MICRO} AFTER_TRAIN_BATCH BATCH_END"
EVAL_BATCH = "EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END"
EVAL = f"EVAL_START {EVAL_BATCH} EVAL_END"
EVALS = f"EVAL_BEFORE_ALL {EVAL} EVAL_AFTER_ALL"
EVAL_2 = f"EVAL_START {EVAL_BATCH} {EVAL_BATCH} EVAL_END"
STEP = f"{TAKE} {BATCH} BATCH_CHECKPOINT"
STEP_EVALS = f"{TAKE} {BATCH} {EVALS} BATCH_CHECKPOINT"
OLD_STEP = f"AFTER_DATALOADER {BATCH}"
CLOSE = "EPOCH_END EPOCH_CHECKPOINT"
ITERATION = "ITERATION_END ITERATION_CHECKPOINT"

ONE = EvaluatorPlan(batches=(4,))
TWO = EvaluatorPlan(batches=(4, 4))

BY_HAND: dict[str, tuple[Plan, str]] = {
    "one epoch: the loader is asked once more than it has batches": (
        Plan(batches=(4, 4), max_duration="1ep"),
        f"{LOAD} FIT_START EPOCH_START {STEP} {STEP} BEFORE_DATALOADER {CLOSE} FIT_END",
    ),
    "every event of a run by name": (
        Plan(batches=(4,), max_duration="1ep", evaluators={"val": ONE}),
        """
        INIT BEFORE_LOAD AFTER_LOAD FIT_START
        EPOCH_START
        BEFORE_DATALOADER AFTER_DATALOADER
        BATCH_START BEFORE_TRAIN_BATCH
        BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD
        AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT
        BEFORE_DATALOADER
        EPOCH_END
        EVAL_BEFORE_ALL
        EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END
        EVAL_AFTER_ALL
        EPOCH_CHECKPOINT
        FIT_END
        """,
    ),
    "going on: no INIT and no load events": (
        Plan(batches=(4,), max_duration="1ep", fresh=False),
        f"FIT_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} FIT_END",
    ),
    "two epochs of ragged batches in microbatches, the last one smaller": (
        Plan(batches=(4, 3, 1), max_duration="2ep", microbatch_size=2, fresh=False),
        " ".join(
            [
                "FIT_START",
                *[
                    "EPOCH_START",
                    f"{TAKE} BATCH_START BEFORE_TRAIN_BATCH {MICRO} {MICRO} AFTER_TRAIN_BATCH BATCH_END",
                    "BATCH_CHECKPOINT",
                    f"{TAKE} BATCH_START BEFORE_TRAIN_BATCH {MICRO} {MICRO} AFTER_TRAIN_BATCH BATCH_END",
                    "BATCH_CHECKPOINT",
                    f"{TAKE} BATCH_START BEFORE_TRAIN_BATCH {MICRO} AFTER_TRAIN_BATCH BATCH_END",
                    "BATCH_CHECKPOINT",
                    f"BEFORE_DATALOADER {CLOSE}",
                ]
                * 2,
                "FIT_END",
            ]
        ),
    ),
    "max_duration is reached already": (
        Plan(batches=(4,), max_duration="0ep", evaluators={"val": ONE}),
        f"{LOAD} FIT_START FIT_END",
    ),
    "a duration in batches ends in the middle of an epoch: nothing closes it": (
        Plan(batches=(4, 4, 4), max_duration="2ba", fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP} FIT_END",
    ),
    "a duration in batches ends on the last batch of a loader with a length: the epoch closes": (
        Plan(batches=(4, 4), max_duration="2ba", fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP} {CLOSE} FIT_END",
    ),
    "... of a loader without a length: it doesn't": (
        Plan(batches=(4, 4), max_duration="2ba", sized=False, fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP} FIT_END",
    ),
    "... of a loader without a length, cut by batches_per_epoch: the epoch closes": (
        Plan(batches=(4, 4, 4), max_duration="2ba", batches_per_epoch=2, sized=False, fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP} {CLOSE} FIT_END",
    ),
    "... of a loader with a length, cut by batches_per_epoch: the epoch closes": (
        Plan(batches=(4, 4, 4), max_duration="2ba", batches_per_epoch=2, fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP} {CLOSE} FIT_END",
    ),
    "... of a loader with a length, shorter than batches_per_epoch: the epoch closes": (
        Plan(batches=(4, 4), max_duration="2ba", batches_per_epoch=3, fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP} {CLOSE} FIT_END",
    ),
    "... of a loader without a length, shorter than batches_per_epoch: it doesn't": (
        Plan(batches=(4, 4), max_duration="2ba", batches_per_epoch=3, sized=False, fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP} FIT_END",
    ),
    "an epoch is cut by batches_per_epoch": (
        Plan(batches=(4, 4, 4), max_duration="1ep", batches_per_epoch=1, fresh=False),
        f"FIT_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} FIT_END",
    ),
    "a duration in samples overshoots to whole batches": (
        Plan(batches=(4, 4, 4), max_duration="5sp", fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP} FIT_END",
    ),
    "a duration in tokens goes on into another epoch": (
        Plan(batches=(4, 4), max_duration="81tok", tokens_per_sample=10, fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP} BEFORE_DATALOADER {CLOSE} EPOCH_START {STEP} FIT_END",
    ),
    "a duration in seconds": (
        Plan(batches=(4, 4), max_duration="90s", seconds_per_batch=60.0, fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP} {CLOSE} FIT_END",
    ),
    "evaluation at every batch, and no other one at the end": (
        Plan(batches=(4, 4), max_duration="2ba", evaluators={"val": ONE}, eval_interval="1ba", fresh=False),
        f"FIT_START EPOCH_START {STEP_EVALS} {TAKE} {BATCH} {EVALS} BATCH_CHECKPOINT {CLOSE} FIT_END",
    ),
    "evaluation every second batch, and once more at the end": (
        Plan(batches=(4, 4, 4), max_duration="1ep", evaluators={"val": ONE}, eval_interval="2ba", fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP_EVALS} {STEP} BEFORE_DATALOADER {CLOSE} {EVALS} FIT_END",
    ),
    "evaluation every second epoch of three, and once more at the end": (
        Plan(batches=(4,), max_duration="3ep", evaluators={"val": ONE}, eval_interval="2ep", fresh=False),
        (
            f"FIT_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} "
            f"EPOCH_START {STEP} BEFORE_DATALOADER EPOCH_END {EVALS} EPOCH_CHECKPOINT "
            f"EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} {EVALS} FIT_END"
        ),
    ),
    "evaluation after a cut epoch": (
        Plan(batches=(4, 4), max_duration="1ba", evaluators={"val": ONE}, fresh=False),
        f"FIT_START EPOCH_START {STEP} {EVALS} FIT_END",
    ),
    "evaluation on the last batch, at EPOCH_END because the epoch closes": (
        Plan(batches=(4,), max_duration="1ba", evaluators={"val": ONE}, fresh=False),
        f"FIT_START EPOCH_START {STEP} EPOCH_END {EVALS} EPOCH_CHECKPOINT FIT_END",
    ),
    "interval 0 means never, at the end too": (
        Plan(batches=(4,), max_duration="1ep", evaluators={"val": ONE}, eval_interval="0ep", fresh=False),
        f"FIT_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} FIT_END",
    ),
    "an evaluator's own interval of 0 counts": (
        Plan(batches=(4,), max_duration="1ep", evaluators={"val": EvaluatorPlan((4,), interval="0ba")}, fresh=False),
        f"FIT_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} FIT_END",
    ),
    "two evaluators in one round, in the order given": (
        Plan(batches=(4,), max_duration="1ep", evaluators={"a": ONE, "b": TWO}, fresh=False),
        (
            f"FIT_START EPOCH_START {STEP} BEFORE_DATALOADER EPOCH_END "
            f"EVAL_BEFORE_ALL {EVAL} {EVAL_2} EVAL_AFTER_ALL EPOCH_CHECKPOINT FIT_END"
        ),
    ),
    "only the evaluator that did not run at the last batch runs at the end": (
        Plan(
            batches=(4, 4, 4),
            max_duration="3ba",
            evaluators={"a": EvaluatorPlan((4,), interval="3ba"), "b": EvaluatorPlan((4, 4), interval="2ba")},
            fresh=False,
        ),
        (
            f"FIT_START EPOCH_START {STEP} "
            f"{TAKE} {BATCH} EVAL_BEFORE_ALL {EVAL_2} EVAL_AFTER_ALL BATCH_CHECKPOINT "
            f"{STEP_EVALS} {CLOSE} "
            f"EVAL_BEFORE_ALL {EVAL_2} EVAL_AFTER_ALL FIT_END"
        ),
    ),
    "an evaluator in samples runs where a multiple is passed": (
        Plan(batches=(3, 3, 3), max_duration="3ba", evaluators={"val": ONE}, eval_interval="5sp", fresh=False),
        f"FIT_START EPOCH_START {STEP} {STEP_EVALS} {STEP} {CLOSE} {EVALS} FIT_END",
    ),
    "half of a duration in batches": (
        Plan(batches=(4, 4, 4, 4, 4), max_duration="4ba", evaluators={"val": ONE}, eval_interval="0.5dur", fresh=False),
        (f"FIT_START EPOCH_START {STEP} {STEP_EVALS} {STEP} {STEP_EVALS} FIT_END"),
    ),
    "half of a duration in epochs: at the end of a batch, not of an epoch": (
        Plan(batches=(4, 4, 4), max_duration="2ep", evaluators={"val": ONE}, eval_interval="0.5dur", fresh=False),
        (
            f"FIT_START EPOCH_START {STEP} {STEP} {STEP_EVALS} BEFORE_DATALOADER {CLOSE} "
            f"EPOCH_START {STEP} {STEP} {STEP_EVALS} BEFORE_DATALOADER {CLOSE} FIT_END"
        ),
    ),
    "a quarter of a duration of one epoch": (
        Plan(batches=(4,) * 8, max_duration="1ep", evaluators={"val": ONE}, eval_interval="0.25dur", fresh=False),
        f"FIT_START EPOCH_START {f'{STEP} {STEP_EVALS} ' * 4} BEFORE_DATALOADER {CLOSE} FIT_END",
    ),
    "seven tenths of two epochs of one batch: at the end of the second batch": (
        Plan(batches=(4,), max_duration="2ep", evaluators={"val": ONE}, eval_interval="0.7dur", fresh=False),
        (
            f"FIT_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} "
            f"EPOCH_START {STEP_EVALS} BEFORE_DATALOADER {CLOSE} FIT_END"
        ),
    ),
    "half of a duration in epochs of a loader without a length: at the end of an epoch": (
        Plan(
            batches=(4,), max_duration="2ep", evaluators={"val": ONE}, eval_interval="0.5dur", sized=False, fresh=False
        ),
        (
            f"FIT_START EPOCH_START {STEP} BEFORE_DATALOADER EPOCH_END {EVALS} EPOCH_CHECKPOINT "
            f"EPOCH_START {STEP} BEFORE_DATALOADER EPOCH_END {EVALS} EPOCH_CHECKPOINT FIT_END"
        ),
    ),
    "... cut by batches_per_epoch: at the end of a batch": (
        Plan(
            batches=(4, 4, 4),
            max_duration="1ep",
            evaluators={"val": ONE},
            eval_interval="0.5dur",
            batches_per_epoch=2,
            sized=False,
            fresh=False,
        ),
        f"FIT_START EPOCH_START {STEP_EVALS} {STEP_EVALS} BEFORE_DATALOADER {CLOSE} FIT_END",
    ),
    "... shorter than batches_per_epoch: what is missing passes at the end of the epoch": (
        Plan(
            batches=(4, 4),
            max_duration="2ep",
            evaluators={"val": ONE},
            eval_interval="0.5dur",
            batches_per_epoch=3,
            sized=False,
            fresh=False,
        ),
        (
            f"FIT_START EPOCH_START {STEP} {STEP} BEFORE_DATALOADER EPOCH_END {EVALS} EPOCH_CHECKPOINT "
            f"EPOCH_START {STEP} {STEP} BEFORE_DATALOADER EPOCH_END {EVALS} EPOCH_CHECKPOINT FIT_END"
        ),
    ),
    "... but not for an evaluator that ran at its last batch": (
        Plan(
            batches=(4, 4),
            max_duration="1ep",
            evaluators={"val": ONE},
            eval_interval="0.25dur",
            batches_per_epoch=4,
            sized=False,
            fresh=False,
        ),
        f"FIT_START EPOCH_START {STEP_EVALS} {STEP_EVALS} BEFORE_DATALOADER {CLOSE} FIT_END",
    ),
    "evaluation has its own microbatch size": (
        Plan(
            batches=(4,),
            max_duration="1ep",
            microbatch_size=4,
            evaluators={"val": EvaluatorPlan(batches=(3,), microbatch_size=2)},
            fresh=False,
        ),
        (
            f"FIT_START EPOCH_START {STEP} BEFORE_DATALOADER EPOCH_END EVAL_BEFORE_ALL EVAL_START EVAL_BATCH_START "
            f"EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END "
            f"EVAL_AFTER_ALL EPOCH_CHECKPOINT FIT_END"
        ),
    ),
    "an evaluator without batches": (
        Plan(batches=(4,), max_duration="1ep", evaluators={"val": EvaluatorPlan(())}, fresh=False),
        (
            f"FIT_START EPOCH_START {STEP} BEFORE_DATALOADER EPOCH_END "
            f"EVAL_BEFORE_ALL EVAL_START EVAL_END EVAL_AFTER_ALL EPOCH_CHECKPOINT FIT_END"
        ),
    ),
    "iterations of two epochs": (
        Plan(batches=(4,), max_duration="3ep", iteration_length="2ep", fresh=False),
        (
            f"FIT_START ITERATION_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} "
            f"EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} {ITERATION} "
            f"ITERATION_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} FIT_END"
        ),
    ),
    "an iteration in tokens is complete in the middle of an epoch, and training ends with one": (
        Plan(batches=(4, 4, 4, 4), max_duration="4ba", iteration_length="7tok", tokens_per_sample=1, fresh=False),
        (
            f"FIT_START ITERATION_START EPOCH_START {STEP} {STEP} {ITERATION} "
            f"ITERATION_START {STEP} {STEP} {ITERATION} {CLOSE} FIT_END"
        ),
    ),
    "an iteration in tokens is complete on the last batch of an epoch": (
        Plan(batches=(4,), max_duration="1ep", iteration_length="4tok", tokens_per_sample=1, fresh=False),
        f"FIT_START ITERATION_START EPOCH_START {STEP} {ITERATION} ITERATION_START BEFORE_DATALOADER {CLOSE} FIT_END",
    ),
    "a duration in iterations, and the last evaluation after the iteration": (
        Plan(
            batches=(4,),
            max_duration="1iter",
            iteration_length="1ep",
            evaluators={"val": ONE},
            eval_interval="2ep",
            fresh=False,
        ),
        f"FIT_START ITERATION_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} {ITERATION} {EVALS} FIT_END",
    ),
    "2021: names, events and the epoch's evaluation before EPOCH_END": (
        Plan(batches=(4, 4), max_duration="1ep", evaluators={"val": ONE}, order="2021"),
        f"INIT TRAINING_START EPOCH_START AFTER_DATALOADER {BATCH} {OLD_STEP} {EVAL} EPOCH_END TRAINING_END",
    ),
    "2021: evaluation after a batch, and an epoch that is cut short closes": (
        Plan(batches=(4, 4, 4), max_duration="2ba", evaluators={"val": ONE}, eval_interval="1ba", order="2021"),
        f"INIT TRAINING_START EPOCH_START {OLD_STEP} {EVAL} {OLD_STEP} {EVAL} EPOCH_END TRAINING_END",
    ),
    "2021: the last evaluation stands before the last EPOCH_END": (
        Plan(batches=(4,), max_duration="3ep", evaluators={"val": ONE}, eval_interval="2ep", order="2021", fresh=False),
        (
            f"TRAINING_START EPOCH_START {OLD_STEP} EPOCH_END EPOCH_START {OLD_STEP} {EVAL} EPOCH_END "
            f"EPOCH_START {OLD_STEP} {EVAL} EPOCH_END TRAINING_END"
        ),
    ),
    "2021: max_duration is reached already": (
        Plan(batches=(4,), max_duration="0ep", order="2021"),
        "INIT TRAINING_START TRAINING_END",
    ),
}


@pytest.mark.parametrize("rule", BY_HAND)
def test_a_stream_written_by_hand(rule: str) -> None:
    plan, text = BY_HAND[rule]
    assert expected(plan) == events(text)
    check(events(text), complete=True, order=plan.order)


def test_streams_of_evaluate_and_predict() -> None:
    evaluate = order.expected_evaluate({"a": ONE, "b": EvaluatorPlan(batches=(4, 3), microbatch_size=2)})
    pair = "EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD"
    twice = f"EVAL_BATCH_START {pair} {pair} EVAL_BATCH_END"
    assert evaluate == events(f"EVAL_STANDALONE_START {EVAL} EVAL_START {twice} {twice} EVAL_END EVAL_STANDALONE_END")
    predict = order.expected_predict(2)
    batch = "PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END"
    assert predict == events(f"PREDICT_START {batch} {batch} PREDICT_END")
    for stream in (evaluate, predict, order.expected_evaluate({}), order.expected_predict(0)):
        check(stream, complete=True)


# Plans

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
    return Plan(
        batches=tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))),
        max_duration=max_duration,
        microbatch_size=draw(st.none() | st.integers(1, 4)),
        evaluators=draw(
            st.dictionaries(st.sampled_from("abc"), evaluator_plans, min_size=evaluators, max_size=evaluators or 2)
        ),
        eval_interval=draw(interval),
        tokens_per_sample=draw(st.integers(1, 5)),
        seconds_per_batch=draw(st.sampled_from([0.25, 0.5, 1.0])),
        batches_per_epoch=draw(st.none() | st.integers(1, 5)),
        sized=draw(st.booleans()),
        iteration_length=iteration_length,
        order=draw(st.sampled_from(["current", "2021"])) if iteration_length is None else "current",
        fresh=draw(st.booleans()),
    )


def samples_of_steps(plan: Plan, steps: int) -> list[int]:
    epoch = plan.batches[: plan.batches_per_epoch]
    return [epoch[step % len(epoch)] for step in range(steps)]


@given(plans())
def test_what_the_oracle_expects_is_legal_and_complete(plan: Plan) -> None:
    stream = expected(plan)
    check(stream, complete=True, order=plan.order)
    check([event.value for event in stream], complete=True, order=plan.order)
    for before, after in pairwise(stream):
        assert after in order.successors(before, order=plan.order)


@given(plans())
def test_counts_of_events(plan: Plan) -> None:
    """Composer's published table, and evaluation in whole rounds."""
    counts = Counter(expected(plan))
    steps = counts[Event.BATCH_END]
    microbatches = sum(math.ceil(n / (plan.microbatch_size or n)) for n in samples_of_steps(plan, steps))
    for event in (Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH, Event.AFTER_DATALOADER):
        assert counts[event] == steps
    for name in ["BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_LOSS", "AFTER_LOSS", "BEFORE_BACKWARD", "AFTER_BACKWARD"]:
        assert counts[Event[name]] == microbatches
    assert counts[Event.FIT_START] == counts[Event.FIT_END] == 1
    assert counts[Event.INIT] == plan.fresh
    assert counts[Event.EVAL_START] == counts[Event.EVAL_END]
    epochs = counts[Event.EPOCH_START]
    if plan.order == "2021":
        assert counts[Event.EPOCH_END] == epochs
    else:
        assert counts[Event.BATCH_CHECKPOINT] == steps
        assert epochs - 1 <= counts[Event.EPOCH_END] == counts[Event.EPOCH_CHECKPOINT] <= epochs or epochs == 0
        assert counts[Event.BEFORE_LOAD] == counts[Event.AFTER_LOAD] == plan.fresh
        assert 0 <= counts[Event.ITERATION_START] - counts[Event.ITERATION_END] <= 1


@given(st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 3))
def test_counts_for_a_duration_in_epochs(epochs: int, batches: list[int], size: int, evaluators: int) -> None:
    labels = {str(number): EvaluatorPlan((2,)) for number in range(evaluators)}
    plan = Plan(batches=batches, max_duration=epochs, microbatch_size=size, evaluators=labels, eval_interval="1ep")
    counts = Counter(expected(plan))
    assert counts[Event.BEFORE_DATALOADER] == epochs * len(batches) + epochs
    assert counts[Event.EPOCH_END] == counts[Event.EPOCH_CHECKPOINT] == epochs
    assert counts[Event.BEFORE_FORWARD] == epochs * sum(math.ceil(n / size) for n in batches)
    assert counts[Event.EVAL_START] == epochs * evaluators
    assert counts[Event.EVAL_BEFORE_ALL] == (epochs if evaluators else 0)


@given(plans(units=("ba", "sp", "tok", "s")))
def test_durations_overshoot_to_whole_batches_and_no_further(plan: Plan) -> None:
    unit = plan.max_duration.unit
    steps = expected(plan).count(Event.BATCH_END)
    gains: list[float] = {
        "ba": [1.0] * steps,
        "sp": [float(n) for n in samples_of_steps(plan, steps)],
        "tok": [float(n * plan.tokens_per_sample) for n in samples_of_steps(plan, steps)],
        "s": [plan.seconds_per_batch] * steps,
    }[unit.value]
    assert sum(gains) >= plan.max_duration.value
    assert steps == 0 or sum(gains[:-1]) < plan.max_duration.value


@given(plans(evaluators=1))
def test_evaluation_comes_where_due_says(plan: Plan) -> None:
    """The oracle's own arithmetic against ``time.due``, which the loop uses, at the ends of batches and epochs."""
    (evaluator,) = plan.evaluators.values()
    interval = plan.interval_of(evaluator)
    stream = expected(attrs.evolve(plan, order="current"))
    lengths = [plan.batches_per_epoch, len(plan.batches) if plan.sized else None]
    length = min((each for each in lengths if each is not None), default=None)
    now, step, at_this_batch = Timestamp(max_duration=plan.max_duration, batches_per_epoch=length), 0, False
    for position, event in enumerate(stream):
        if event not in (Event.BATCH_END, Event.EPOCH_END, Event.ITERATION_END):
            continue
        before = now
        if event is Event.BATCH_END:
            (samples,) = samples_of_steps(plan, step + 1)[step:]
            now = now.next_batch(samples, samples * plan.tokens_per_sample, plan.seconds_per_batch)
            step, at_this_batch = step + 1, False
        elif event is Event.EPOCH_END:
            now = now.next_epoch()
        else:
            now = now.next_iteration()
            continue
        assert (stream[position + 1] is Event.EVAL_BEFORE_ALL) == due(interval, before, now, event)
        at_this_batch |= due(interval, before, now, event)
    last = stream[-2] is Event.EVAL_AFTER_ALL
    assert last == (step > 0 and interval.value > 0 and not at_this_batch)


@given(plans(), st.data())
def test_going_on_from_any_boundary_is_legal(plan: Plan, data: st.DataObject) -> None:
    stream = expected(plan)
    kept = data.draw(st.sampled_from([at for at, event in enumerate(stream) if event in order.BOUNDARIES]))
    rest = going_on(stream, kept)
    check(rest, complete=True, order=plan.order)
    assert rest[0] is Event.FIT_START
    assert rest.count(Event.FIT_START) == 1
    assert Event.INIT not in rest


def test_going_on_from_the_middle_of_a_step_is_refused() -> None:
    stream = expected(Plan(batches=(4,), max_duration="1ep"))
    with pytest.raises(OrderError, match=r"nothing goes on from Event\.AFTER_LOSS; keep a State at Event\.BATCH_END"):
        going_on(stream, stream.index(Event.AFTER_LOSS))


# Streams that the checker must refuse

FULL = Plan(
    batches=(4, 2), max_duration="2ep", microbatch_size=2, evaluators={"val": EvaluatorPlan((4,), microbatch_size=2)}
)
ITERATED = [
    attrs.evolve(FULL, iteration_length="1ep"),
    attrs.evolve(FULL, iteration_length="6tok", tokens_per_sample=1),
    attrs.evolve(FULL, iteration_length="4tok", tokens_per_sample=1, max_duration="4ba", eval_interval="1ba"),
]
WHOLE = [FULL, attrs.evolve(FULL, order="2021"), attrs.evolve(FULL, max_duration="3ba"), *ITERATED]


def legal(stream: list[Event], which: Any) -> bool:
    try:
        check(stream, complete=True, order=which)
    except OrderError:
        return False
    return True


@pytest.mark.parametrize("plan", WHOLE)
def test_a_stream_with_one_event_dropped_is_refused(plan: Plan) -> None:
    stream = expected(plan)
    for at in range(len(stream)):
        # Without its INIT the older stream is one that goes on; on the last batch, asking the loader again is optional.
        allowed = (plan.order == "2021" and stream[at] is Event.INIT) or (
            stream[at] is Event.BEFORE_DATALOADER
            and stream[at + 1] is Event.EPOCH_END
            and Event.EPOCH_START not in stream[at:]
            and stream[at - 1] is Event.BATCH_CHECKPOINT
        )
        assert legal(stream[:at] + stream[at + 1 :], plan.order) == allowed, (at, stream[at])


@pytest.mark.parametrize("plan", WHOLE)
def test_a_stream_with_one_event_twice_is_refused(plan: Plan) -> None:
    stream = expected(plan)
    for at in range(len(stream)):
        assert not legal(stream[: at + 1] + stream[at:], plan.order), (at, stream[at])


@pytest.mark.parametrize("plan", WHOLE)
def test_a_stream_with_two_events_swapped_is_refused(plan: Plan) -> None:
    stream = expected(plan)
    for at in range(len(stream) - 1):
        swapped = [*stream[:at], stream[at + 1], stream[at], *stream[at + 2 :]]
        assert not legal(swapped, plan.order), (at, stream[at : at + 2])


@pytest.mark.parametrize("plan", WHOLE)
def test_a_foreign_event_is_refused_everywhere(plan: Plan) -> None:
    stream = expected(plan)
    for at in range(1, len(stream) + 1):
        for event in (Event.INIT, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_BATCH_START):
            assert not legal([*stream[:at], event, *stream[at:]], plan.order)


@given(plans(), st.data())
@settings(max_examples=60)
def test_a_stream_that_stops_early_is_legal_so_far_and_incomplete(plan: Plan, data: st.DataObject) -> None:
    stream = expected(plan)
    stop = data.draw(st.integers(0, len(stream) - 1))
    check(stream[:stop], order=plan.order)
    with pytest.raises(
        OrderError, match=r"the stream (is empty|ends after event \d+, Event\.\w+), which does not complete it"
    ):
        check(stream[:stop], complete=True, order=plan.order)


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("an epoch of no batch", f"{LOAD} FIT_START EPOCH_START BEFORE_DATALOADER {CLOSE} FIT_END"),
        ("evaluation without training", f"{LOAD} FIT_START {EVALS} FIT_END"),
        ("a round of no evaluator", "FIT_START EVAL_BEFORE_ALL EVAL_AFTER_ALL FIT_END"),
        (
            "a batch of no microbatch",
            f"{LOAD} FIT_START EPOCH_START {TAKE} BATCH_START BEFORE_TRAIN_BATCH AFTER_TRAIN_BATCH",
        ),
        ("an epoch cut short before another one", f"FIT_START EPOCH_START {STEP} EPOCH_START"),
        ("... and closed", f"FIT_START EPOCH_START {STEP} {CLOSE} EPOCH_START"),
        ("a part of the load events", "INIT FIT_START"),
        (
            "iterations that begin late",
            f"{LOAD} FIT_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} ITERATION_START",
        ),
        ("iterations that end unbegun", f"{LOAD} FIT_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} ITERATION_END"),
        (
            "iterations in epochs and in tokens",
            (
                f"{LOAD} FIT_START ITERATION_START EPOCH_START {STEP} {ITERATION} ITERATION_START "
                f"BEFORE_DATALOADER {CLOSE} {ITERATION}"
            ),
        ),
        ("an evaluator of fit in a stream of its own", "EVAL_STANDALONE_START EVAL_BEFORE_ALL"),
        ("a stream after its end", "FIT_START FIT_END FIT_START"),
        ("two streams", "PREDICT_START PREDICT_END PREDICT_START"),
    ],
)
def test_what_the_rules_forbid_is_refused(why: str, text: str) -> None:
    stream = events(text)
    with pytest.raises(OrderError):
        check(stream)


def test_the_error_names_position_event_and_what_was_legal() -> None:
    stream = events("FIT_START EPOCH_START BATCH_START")
    with pytest.raises(
        OrderError,
        match=r"event 2 of the stream is Event\.BATCH_START, which can't follow Event\.EPOCH_START; "
        r"legal there: Event\.BEFORE_DATALOADER\. .*table\('current'\)",
    ):
        check(stream)
    with pytest.raises(
        OrderError, match=r"event 0 .* can't begin a stream; legal there: Event\.INIT, Event\.FIT_START, "
    ):
        check([Event.BATCH_END])
    with pytest.raises(OrderError, match=r"legal there: nothing, the stream is over"):
        check(events("FIT_START FIT_END FIT_END"))
    with pytest.raises(ValueError, match="'batch_stop' is not an event"):
        check(["batch_stop"])


def test_a_checker_goes_step_by_step_and_stays_where_it_was_on_an_error() -> None:
    checker = order.Checker()
    assert checker.legal == {Event.INIT, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START}
    checker.advance(Event.INIT)
    with pytest.raises(OrderError):
        checker.advance(Event.FIT_START)
    assert checker.legal == {Event.BEFORE_LOAD}
    for event in events("BEFORE_LOAD AFTER_LOAD FIT_START"):
        assert not checker.complete
        checker.advance(event)
    assert checker.legal == {Event.EPOCH_START, Event.ITERATION_START, Event.FIT_END}
    checker.advance(Event.FIT_END)
    assert checker.complete
    assert checker.legal == frozenset()
    checker.finish()


@given(plans())
@settings(max_examples=60)
def test_a_checker_says_what_is_legal_before_it_comes(plan: Plan) -> None:
    checker = order.Checker(plan.order)
    for event in expected(plan):
        assert event in checker.legal
        checker.advance(event)
    assert checker.complete


def test_successors() -> None:
    assert order.successors("after_loss") == {Event.BEFORE_BACKWARD}
    assert order.successors(Event.AFTER_BACKWARD) == {Event.BEFORE_FORWARD, Event.AFTER_TRAIN_BATCH}
    assert order.successors(Event.EPOCH_END) == {Event.EVAL_BEFORE_ALL, Event.EPOCH_CHECKPOINT}
    assert order.successors(Event.FIT_END) == frozenset()
    assert order.successors(Event.BATCH_END, order="2021") == {
        Event.AFTER_DATALOADER,
        Event.EVAL_START,
        Event.EPOCH_END,
    }
    assert order.successors(Event.BATCH_CHECKPOINT, order="2021") == frozenset()
    reachable = frozenset().union(*(order.successors(event) for event in Event))
    assert reachable == frozenset(Event) - {
        Event.INIT,
        Event.FIT_START,
        Event.EVAL_STANDALONE_START,
        Event.PREDICT_START,
    } | {Event.FIT_START}


@pytest.mark.parametrize(
    ("event", "boundary"),
    [
        (Event.INIT, Event.AFTER_LOAD),
        (Event.BEFORE_DATALOADER, Event.BATCH_END),
        (Event.AFTER_BACKWARD, Event.BATCH_END),
        (Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
        (Event.EVAL_END, Event.BATCH_CHECKPOINT),
        (Event.ITERATION_START, Event.EPOCH_START),
        (Event.ITERATION_END, Event.EPOCH_START),
        (Event.FIT_END, Event.EPOCH_CHECKPOINT),
        (Event.PREDICT_START, Event.EPOCH_CHECKPOINT),
    ],
)
def test_nearest_boundary(event: Event, boundary: Event) -> None:
    assert order.nearest_boundary(event) is boundary


def test_a_boundary_is_its_own_nearest() -> None:
    assert all(order.nearest_boundary(event) is event for event in order.BOUNDARIES)
    assert all(order.nearest_boundary(event) in order.BOUNDARIES for event in Event)


def test_an_unknown_order_is_refused() -> None:
    asks: list[Any] = [order.Checker, order.table, order.outline, order.mermaid]
    for ask in asks:
        with pytest.raises(ArgumentError, match="order='2020' is not known; write 'current' or '2021'"):
            ask("2020")


# Plans that can't be


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batches": ()}, ArgumentError, "yields no batch"),
        ({"batches": (4, 0)}, ArgumentError, "0 is less than 1"),
        ({"batches": 4}, ArgumentTypeError, "write the samples of each batch"),
        ({"batches": (4.0,)}, ArgumentTypeError, "4.0 is not an int"),
        ({"microbatch_size": 0}, ArgumentError, "microbatch_size=0"),
        ({"max_duration": "1tok"}, ArgumentError, "set tokens_per_sample"),
        ({"max_duration": "1s"}, ArgumentError, "set seconds_per_batch"),
        ({"max_duration": "1iter"}, ArgumentError, "needs an iteration_length"),
        ({"max_duration": "1dur"}, ArgumentError, "fraction of itself"),
        ({"max_duration": "soon"}, ArgumentError, "can't read 'soon'"),
        ({"iteration_length": "3ba"}, ArgumentError, "iteration_length"),
        ({"iteration_length": "0ep"}, ArgumentError, "more than 0"),
        ({"iteration_length": "5tok"}, ArgumentError, "set tokens_per_sample"),
        ({"iteration_length": "1ep", "order": "2021"}, ArgumentError, "no events for iterations"),
        ({"evaluators": {"val": (4,)}}, ArgumentTypeError, r"write EvaluatorPlan\(batches=...\)"),
        ({"evaluators": {"val": ONE}, "eval_interval": "1iter"}, ArgumentError, "counts iterations"),
        ({"seconds_per_batch": -1.0}, ArgumentError, "seconds_per_batch"),
        ({"batches_per_epoch": 0}, ArgumentError, "batches_per_epoch"),
        ({"order": "2022"}, ArgumentError, "'2022' is not known"),
    ],
)
def test_a_plan_that_no_run_can_follow_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Plan(**{"batches": (4,), "max_duration": "1ep", **change})


def test_a_plan_reads_text_and_keeps_values() -> None:
    plan = Plan(batches=[4, 2], max_duration="2ep", eval_interval=2)
    assert plan.batches == (4, 2)
    assert plan.max_duration == Time("2ep")
    assert plan.eval_interval == Time("2ep")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        plan.batches = (1,)  # type: ignore[misc]


# What is drawn from the grammar


@pytest.mark.parametrize("which", ["current", "2021"])
def test_the_views_show_every_event_of_the_order(which: Any) -> None:
    names = set(Event.__members__) if which == "current" else set()
    known = {word for rule in order.GRAMMARS[which] for word in _words(rule.body) if word.isupper()}
    if names:
        assert known == names - {"TRAINING_START", "TRAINING_END"}
    table = order.table(which)
    assert known <= set(_words(table))
    assert {line.split()[0] for line in table.splitlines() if " = " in line} == {r.name for r in order.GRAMMARS[which]}
    assert max(map(len, table.splitlines())) <= 132
    outlined = {event for _, event, _ in order.outline(which) if isinstance(event, Event)}
    assert outlined == {Event[name] for name in known}


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split()


@pytest.mark.parametrize("which", ["current", "2021"])
def test_the_outline_reads_from_top_to_bottom(which: Any) -> None:
    lines = order.outline(which)
    assert lines[0][:2] == (0, "fit")
    assert all(after <= before + 1 for (before, _, _), (after, _, _) in pairwise(lines))
    depths = {event: depth for depth, event, _ in reversed(lines) if isinstance(event, Event)}
    assert depths[Event.FIT_START] == 1
    assert depths[Event.EPOCH_START] == 2
    assert depths[Event.BATCH_START] == depths[Event.BATCH_END] == 3
    assert depths[Event.BEFORE_FORWARD] == 4
    notes = {event: note for _, event, note in lines if isinstance(event, Event)}
    assert "fresh" in notes[Event.INIT]
    assert set(order.NOTES) <= set(Event)


@pytest.mark.parametrize("which", ["current", "2021"])
def test_the_diagram_is_the_grammar(which: Any) -> None:
    lines = [line.strip() for line in order.mermaid(which).splitlines()]
    assert lines[0] == "flowchart TD"
    assert lines.count("end") == sum(line.startswith("subgraph ") for line in lines)
    arrows = [line.split("-->") for line in lines if "-->" in line]
    drawn = {(start.strip(), end.rpartition("|")[2].strip()) for start, end in arrows}
    nodes = {line for line in lines if line in Event.__members__}
    between = {(start, end) for start, end in drawn if start in nodes and end in nodes}
    for start, end in between:
        assert Event[end] in order.successors(Event[start], order=which)
    # Going on from FIT_START is not drawn, iterations and standalone streams neither.
    for start in nodes - {"FIT_START"}:
        for after in order.successors(Event[start], order=which):
            inside = after.name in nodes and not (start.startswith("EVAL") or after.is_eval)
            assert not inside or (start, after.name) in between, (start, after)
    depth, depths = 0, {}
    for line in lines:
        depth += line.startswith("subgraph ") - (line == "end")
        depths[line] = depth
    assert [depths[f"subgraph {name}"] for name in ("fit", "epoch", "batch", "microbatch")] == [1, 2, 3, 4]
    assert [depths[name] for name in ("FIT_END", "EPOCH_END", "BATCH_END", "BEFORE_LOSS")] == [1, 2, 3, 4]
