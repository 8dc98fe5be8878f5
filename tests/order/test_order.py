"""The order of events: streams written by hand, from the specification."""

from __future__ import annotations

import re
from typing import Any

from pure_loop import order
from pure_loop.order import EvaluatorPlan, Plan, check, expected
from tests.support.ordering import ONE, events

# A line has the rule and the plan, those under it the stream.
TRAINING = """
every event of a run by name: batches=4 max_duration=1ep fresh val
    INIT BEFORE_LOAD AFTER_LOAD FIT_START
    EPOCH_START BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH
    BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD
    AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT BEFORE_DATALOADER EPOCH_END
    EVAL_BEFORE_ALL EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END
    EVAL_AFTER_ALL EPOCH_CHECKPOINT FIT_END
the loader is asked once more than it has batches: max_duration=1ep
    FIT_START epoch step step ask close FIT_END
two epochs of ragged batches in microbatches, the last one smaller: batches=4,3,1 max_duration=2ep microbatch_size=2
    FIT_START epoch take batch/2 BATCH_CHECKPOINT take batch/2 BATCH_CHECKPOINT step ask close
    epoch take batch/2 BATCH_CHECKPOINT take batch/2 BATCH_CHECKPOINT step ask close FIT_END
max_duration is reached already: max_duration=0ep fresh val
    load FIT_START FIT_END
a duration in batches ends in the middle of an epoch, nothing closes it: batches=4,4,4 max_duration=2ba
    FIT_START epoch step step FIT_END
on the last batch of a loader with a length the epoch closes: max_duration=2ba
    FIT_START epoch step step close FIT_END
... without a length, cut by batches_per_epoch, it does: batches=4,4,4 max_duration=2ba batches_per_epoch=2 unsized
    FIT_START epoch step step close FIT_END
... without a length, shorter than batches_per_epoch, it doesn't: max_duration=2ba batches_per_epoch=3 unsized
    FIT_START epoch step step FIT_END
a pass that is cut continues in the next epoch: batches=4,4,4 max_duration=2ep batches_per_epoch=2 unsized
    FIT_START epoch step step ask close epoch step ask close FIT_END
a duration in samples overshoots to whole batches: batches=4,4,4 max_duration=5sp
    FIT_START epoch step step FIT_END
a duration in tokens extends into another epoch: max_duration=81tok tokens_per_sample=10
    FIT_START epoch step step ask close epoch step FIT_END
"""
EVALUATION = """
every second batch, and once more at the end: batches=4,4,4 max_duration=1ep eval_interval=2ba val
    FIT_START epoch step step+ step ask close evals FIT_END
an evaluator's own interval of 0 counts: batches=4 max_duration=1ep evaluators=never
    FIT_START epoch step ask close FIT_END
two evaluators in one round, in the order given: batches=4 max_duration=1ep evaluators=two
    FIT_START epoch step ask EPOCH_END EVAL_BEFORE_ALL val val_of_2 EVAL_AFTER_ALL EPOCH_CHECKPOINT FIT_END
only one that did not run at the last batch runs at the end: batches=4,4,4 max_duration=3ba evaluators=apart
    FIT_START epoch step take batch EVAL_BEFORE_ALL val_of_2 EVAL_AFTER_ALL BATCH_CHECKPOINT step+ close
    EVAL_BEFORE_ALL val_of_2 EVAL_AFTER_ALL FIT_END
its own microbatch size: batches=4 max_duration=1ep microbatch_size=4 evaluators=in_pieces
    FIT_START epoch step ask EPOCH_END EVAL_BEFORE_ALL EVAL_START val_batch/2 EVAL_END EVAL_AFTER_ALL
    EPOCH_CHECKPOINT FIT_END
"""
FRACTIONS = """
half of a duration in epochs, at the end of a batch: batches=4,4,4 max_duration=2ep eval_interval=0.5dur val
    FIT_START epoch step step step+ ask close epoch step step step+ ask close FIT_END
a quarter of a duration of one epoch: batches=4,4,4,4,4,4,4,4 max_duration=1ep eval_interval=0.25dur val
    FIT_START epoch step step+ step step+ step step+ step step+ ask close FIT_END
... shorter, what is missing passes at the end: max_duration=2ep eval_interval=0.5dur batches_per_epoch=3 unsized val
    FIT_START epoch step step ask close+ epoch step step ask close+ FIT_END
... but not where it ran at the last batch: max_duration=1ep eval_interval=0.25dur batches_per_epoch=4 unsized val
    FIT_START epoch step+ step+ ask close FIT_END
"""
ITERATIONS = """
of two epochs: batches=4 max_duration=3ep iteration_length=2ep
    FIT_START ITERATION_START epoch step ask close epoch step ask close iteration
    ITERATION_START epoch step ask close FIT_END
in tokens, in the middle of an epoch: batches=4,4,4,4 max_duration=4ba iteration_length=7tok tokens_per_sample=1
    FIT_START ITERATION_START epoch step step iteration ITERATION_START step step iteration close FIT_END
the last evaluation after it: batches=4 max_duration=1iter iteration_length=1ep eval_interval=2ep val
    FIT_START ITERATION_START epoch step ask close iteration evals FIT_END
"""
OF_2021 = """
an epoch that is cut short closes: batches=4,4,4 max_duration=2ba eval_interval=1ba val
    TRAINING_START epoch AFTER_DATALOADER batch val AFTER_DATALOADER batch val EPOCH_END TRAINING_END
max_duration is reached already: max_duration=0ep fresh
    INIT TRAINING_START TRAINING_END
"""
EVALUATORS = {
    "never": {"val": EvaluatorPlan((4,), interval="0ba")},
    "two": {"a": ONE, "b": EvaluatorPlan((4, 4))},
    "apart": {"a": EvaluatorPlan((4,), interval="3ba"), "b": EvaluatorPlan((4, 4), interval="2ba")},
    "in_pieces": {"val": EvaluatorPlan((3,), microbatch_size=2)},
}
FLAGS: dict[str, Any] = {"fresh": {"fresh": True}, "val": {"evaluators": {"val": ONE}}, "unsized": {"sized": False}}


def plan_of(words: list[str], which: Any) -> Plan:
    options: dict[str, Any] = {"batches": (4, 4), "fresh": False, "order": which}
    for word in words:
        name, has_value, value = word.partition("=")
        if not has_value:
            options |= FLAGS[name]
        elif name == "batches":
            options[name] = tuple(map(int, value.split(",")))
        elif name == "evaluators":
            options[name] = EVALUATORS[value]
        else:
            options[name] = int(value) if value.isdigit() else value
    return Plan(**options)


def test_streams_written_by_hand() -> None:
    tables: list[tuple[str, Any]] = [(TRAINING + EVALUATION + FRACTIONS + ITERATIONS, "current"), (OF_2021, "2021")]
    for rules, which in tables:
        for rule, words, text in re.findall(r"^(\S.*): (.*)\n((?:    .*\n)+)", rules, re.MULTILINE):
            assert expected(plan_of(words.split(), which)) == events(text), rule
            check(events(text), complete=True, order=which)


def test_streams_of_evaluate_and_predict() -> None:
    evaluate = order.expected_evaluate({"a": ONE, "b": EvaluatorPlan(batches=(4, 3), microbatch_size=2)})
    assert evaluate == events(
        "EVAL_STANDALONE_START val EVAL_START val_batch/2 val_batch/2 EVAL_END EVAL_STANDALONE_END"
    )
    predict = order.expected_predict(2)
    assert predict == events("PREDICT_START predicted predicted PREDICT_END")
    for stream in (evaluate, predict, order.expected_evaluate({}), order.expected_predict(0)):
        check(stream, complete=True)
