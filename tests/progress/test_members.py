"""An ensemble on a screen: medians, and the best where it is known which that is."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import pure_loop as pl
from tests.progress.terminals import VAL, Clock, Recording, fit, followed, rows_of, shown


def small():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def ensemble(count=4, **options):
    optimizer = pl.optim.sgd(lr=pl.each([0.1 / 2**number for number in range(count)]))
    members = pl.ensemble(small, seeds=range(count), fallback="loop")
    return fit(model=members, optimizer=optimizer, evaluators=VAL, **options)


def middle(values):
    return float(values.quantile(0.5))


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_rows_have_the_median_and_the_best(count, nonfinite):
    screen, clock = Recording(), Clock()
    losses, ends = [], []
    for event, state in followed(ensemble(count, nonfinite=nonfinite), screen, clock):
        if event is pl.Event.BATCH_END:
            losses.append(state.loss)
        elif event is pl.Event.EPOCH_CHECKPOINT:
            ends.append((torch.stack(losses).double().mean(0), state.metrics["val"]))
            losses = []
    assert len(screen.rows) == len(ends) == 2
    for (_, values), (mean, measured) in zip(screen.rows, ends, strict=True):
        assert values["train/loss"] == pytest.approx(middle(mean))
        assert values["val/accuracy"] == pytest.approx(middle(measured["accuracy"]))
        if count > 1:
            assert values["train/loss best"] == pytest.approx(float(mean.min()))
            assert values["val/loss best"] == pytest.approx(float(measured["loss"].min()))
            assert values["val/accuracy best"] == pytest.approx(float(measured["accuracy"].max()))
        assert values["lr"] == pytest.approx(middle(torch.tensor([0.1 / 2**number for number in range(count)])))
    assert {snapshot.members for snapshot, _ in screen.shown} >= {f"{count} members"}


@pytest.mark.parametrize("width", [40, 80, 120])
def test_columns_are_in_line(width):
    pytest.importorskip("rich")
    lines = shown(ensemble(), columns=width)
    assert all(len(line) < width for line in lines)
    head = next(line for line in lines if line.startswith("epoch "))
    titles = head.partition("  +")[0].split()
    assert titles[:2] == ["epoch", "loss"]
    assert "best" in titles
    assert all(len(row) == len(titles) for row in rows_of(lines))
    assert len(rows_of(lines)) == 2
    # The best stands behind its median.
    assert all(titles[place - 1] in ("loss", "accuracy") for place, title in enumerate(titles) if title == "best")


def test_lines_of_a_file():
    out = io.StringIO()
    state = pl.run(pl.progress(ensemble(), file=out))
    loss, accuracy = state.metrics["val"]["loss"], state.metrics["val"]["accuracy"]
    line = f"val: loss {middle(loss):#.4g} (best {float(loss.min()):#.4g})  accuracy {middle(accuracy):#.4g} (best "
    last = out.getvalue().splitlines()[-1]
    assert last.startswith("train  4 members  epoch 2/2  batch 12/12")
    assert line in last


def test_a_vector_of_one_model_is_no_number():
    metric = pl.metrics.Metric("f1", lambda: 0, lambda a, outputs, batch: a, lambda a: torch.tensor([0.5, 1.0]))
    out = io.StringIO()
    pl.run(pl.progress(fit(evaluators={"val": pl.Evaluator(VAL["val"], metrics=[metric])}), file=out))
    assert "f1" not in out.getvalue()
