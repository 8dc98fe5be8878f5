"""Every metric, measured by two real ranks that split each batch, and by one."""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

import pure_loop as pl
from pure_loop import metrics as m
from tests.support.runs import cross_entropy, equal, mlp, points
from tests.support.worlds import pool


def results(**options: Any) -> dict[str, Any]:
    """Of batches of 5, 1 and 4 samples, so that the second rank has none of one of them."""
    data = [(x[:size], y[:size]) for (x, y), size in zip(points(), (5, 1, 4), strict=True)]
    measured = [
        *(m.loss(), m.accuracy(), m.top_k(2), m.f1(average=None), m.dice(), m.mean_iou(), m.confusion_matrix()),
        *(m.perplexity(), m.expected_calibration_error(), m.mean(lambda outputs, batch: outputs.sum(dim=1), "total")),
        m.from_torchmetrics(MulticlassF1Score(3)),
        m.from_torchmetrics(MulticlassAUROC(3), outputs=lambda outputs: outputs.softmax(dim=1)),
    ]
    evaluator = pl.Evaluator(data, metrics=measured, microbatch_size=2)
    state = pl.run(pl.evaluate(mlp(), {"val": evaluator}, loss=cross_entropy, **options))
    return dict(state.metrics["val"])


def test_ranks_measure_what_one_rank_does() -> None:
    alone = results()
    first, second = pool().run(lambda rank: results(parallel="replicate"))
    equal(first, second)
    torch.testing.assert_close(first, alone)
    assert {"MulticlassF1Score", "MulticlassAUROC", "confusion_matrix"} <= alone.keys()
