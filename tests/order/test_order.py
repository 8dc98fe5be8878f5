"""The order of events: streams written by hand, from the specification."""

from __future__ import annotations

import pytest

from pure_loop import order
from pure_loop.order import EvaluatorPlan, Plan, check, expected
from tests.support.ordering import (
    BATCH,
    CLOSE,
    EVAL,
    EVAL_BATCH,
    EVALS,
    ITERATION,
    LOAD,
    MICRO,
    ONE,
    STEP,
    TAKE,
    events,
)

EVAL_2 = f"EVAL_START {EVAL_BATCH} {EVAL_BATCH} EVAL_END"
STEP_EVALS = f"{TAKE} {BATCH} {EVALS} BATCH_CHECKPOINT"
OLD_STEP = f"AFTER_DATALOADER {BATCH}"
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
    "... of a loader without a length, cut by batches_per_epoch: the next epoch continues, and ends with the pass": (
        Plan(batches=(4, 4, 4), max_duration="2ep", batches_per_epoch=2, sized=False, fresh=False),
        (
            f"FIT_START EPOCH_START {STEP} {STEP} BEFORE_DATALOADER {CLOSE} "
            f"EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} FIT_END"
        ),
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
    "a duration in tokens extends into another epoch": (
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
