"""What is recorded of an ensemble, and what callbacks see of it: of each member what its run alone records."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.entry.member_callbacks import MOST_EACH, summary
from pure_loop.errors import ArgumentError, CallbackReturnError, NonFiniteError
from pure_loop.loggers import ConsoleLogger, CSVLogger, InMemoryLogger, JSONLinesLogger
from tests.callbacks.test_every_callback import CALLBACKS, MEASURED, made
from tests.support.problem import cross_entropy, fit, images, points, run

SEEDS = (3, 4, 5)
RATES = (0.1, 0.03, 0.01)
# What needs one model, and what its refusal says to write.
REFUSED = {
    "ExportForInferenceCallback": "pl.export(state.member(0), path)",
    "MLPerfCallback": "fit(make_model(), ...)",
}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(200, 3))


def parts_of_loss(outputs: Any, targets: Any) -> Any:
    loss = cross_entropy(outputs, targets)
    return {"total": loss + 0.1 * outputs.square().mean(), "entropy": loss}


def confusion() -> pl.metrics.Metric:
    return pl.metrics.confusion_matrix(3)


def options(rate: Any = 0.1, **changes: Any) -> dict[str, Any]:
    common: dict[str, Any] = {"optimizer": pl.optim.adam(lr=rate), "clip_grad": 0.5, "strict": False}
    return common | {"evaluators": {"val": points(2)}} | changes


def recorded(logger: InMemoryLogger) -> dict[Any, Any]:
    entries: dict[Any, Any] = {}
    for name in logger.metrics:
        entries |= {(name, batch): value for batch, value in zip(*logger.series(name), strict=True)}
    for kind in (logger.tables, logger.images, logger.texts):
        entries |= {(name, at.batch, kind is logger.images): rest for name, rows in kind.items() for at, *rest in rows}
    return {key: value for key, value in entries.items() if not key[0].startswith(MEASURED)}


def of_ensemble(make: Any = small, data: Any = None, fallback: Any = "loop", **changes: Any) -> InMemoryLogger:
    logger, ensemble = InMemoryLogger(), pl.ensemble(make, seeds=SEEDS, fallback=fallback)
    run(ensemble, data, loggers=[logger], **options(pl.each(RATES), **changes))
    return logger


def of_one(number: int, make: Any = small, data: Any = None, **changes: Any) -> dict[Any, Any]:
    logger = InMemoryLogger()
    torch.manual_seed(SEEDS[number])
    run(make(), data, loggers=[logger], seed=SEEDS[number], **options(RATES[number], **changes))
    return recorded(logger)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


def check(logger: InMemoryLogger, alone: Any) -> None:
    """Of each member what its run alone records, and of all of them the statistics, under no further name."""
    entries, names = recorded(logger), set()
    runs = [alone(number) for number in range(len(SEEDS))]
    assert runs[0]
    for (name, *rest), first in runs[0].items():
        keys = [(f"{name}/member/{number}", *rest) for number in range(len(SEEDS))]
        assert all(same(entries[key], one[(name, *rest)]) for key, one in zip(keys, runs, strict=True)), name
        names |= {key[0] for key in keys}
        if isinstance(first, float | int):
            values = [entries[key] for key in keys]
            wanted = {"mean": statistics.fmean(values), "spread": statistics.stdev(values)}
            if name.endswith(("loss", "entropy")) and "loss" in name:
                wanted["best"] = min(values)
            elif name.endswith("accuracy"):
                wanted["best"] = max(values)
            for kind, value in wanted.items():
                assert entries[(f"{name}/{kind}", *rest)] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, kind)
            names |= {f"{name}/{kind}" for kind in wanted}
    assert {name for name, *_ in entries} == names


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "train_metrics": {"train_metrics": [pl.metrics.accuracy()]},
    "dict loss": {"loss": parts_of_loss},
    "matrix": {"evaluators": {"train": pl.Evaluator(points(2), metrics=[confusion(), pl.metrics.accuracy()])}},
    "lr_scale": {"algorithms": [pl.algorithms.reduce_on_plateau("val/loss", patience=0, factor=0.5)]},
}


@pytest.mark.parametrize("case", CASES)
def test_each_member_is_recorded_as_its_run_alone(case: str) -> None:
    changes = CASES[case]
    check(of_ensemble(**changes), lambda number: of_one(number, **changes))


@pl.algorithm(Event.EPOCH_END)
def stop_one(state: pl.State) -> pl.State:
    return state.replace(stop=True) if state.seed == SEEDS[1] else state


@pytest.mark.parametrize("fallback", [None, "loop"])
def test_a_member_that_has_stopped_counts_with_its_last_weights(fallback: Any) -> None:
    schedule = pl.each([pl.schedules.linear(rate, 0.0, "6ba") for rate in RATES])
    logger = of_ensemble(fallback=fallback, algorithms=[stop_one], optimizer=pl.optim.sgd(lr=schedule))
    _, losses = logger.series("val/loss/member/1")
    assert losses[0] == losses[1]
    last = [logger.series(f"val/loss/member/{number}")[1][-1] for number in range(3)]
    assert logger.series("val/loss/mean")[1][-1] == pytest.approx(statistics.fmean(last), rel=1e-6)
    _, rates = logger.series("train/learning_rate/member/1")
    assert rates[3:] == rates[2:3] * 3
    assert len(set(logger.series("train/learning_rate/member/0")[1])) == 6


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(name: str, tmp_path: Path) -> None:
    """Each works, or is refused at the call with what to write."""
    changes: dict[str, Any] = {"evaluators": {"val": images(1)}}

    def callback(folder: str) -> dict[str, Any]:
        return {**changes, "callbacks": [made(name, tmp_path / folder)]}

    if name in REFUSED:
        with pytest.raises(ArgumentError, match=f"^{name} needs one model, and this run has 3 members") as caught:
            fit(pl.ensemble(pixels, seeds=SEEDS), images(), **options(**callback("refused")))
        assert REFUSED[name] in str(caught.value)
        return
    logger = of_ensemble(pixels, images(), **callback("all"))
    check(logger, lambda number: of_one(number, pixels, images(), **callback(str(number))))


def test_callbacks_beside_a_mapped_step(tmp_path: Path) -> None:
    def changes(run: str) -> dict[str, Any]:
        callbacks = [made(name, tmp_path / run / name) for name in CALLBACKS if name not in REFUSED]
        return {"evaluators": {"val": images(1)}, "callbacks": callbacks}

    entries = recorded(of_ensemble(pixels, images(), fallback=None, **changes("all")))
    alone = of_one(1, pixels, images(), **changes("one"))
    assert {(f"{name}/member/1", *rest) for name, *rest in alone} <= entries.keys()
    for (name, *rest), value in alone.items():
        if isinstance(value, float):
            assert entries[(f"{name}/member/1", *rest)] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_a_saver_that_keeps_the_best_says_what_to_do(tmp_path: Path) -> None:
    saver = pl.callbacks.CheckpointSaver(tmp_path, keep_best=1, metric="val/loss")
    with pytest.raises(ArgumentError, match=r"keep_best=.* 3 members: each is best at another batch; .*state\.member"):
        fit(pl.ensemble(small, seeds=SEEDS), callbacks=saver, **options())


def test_what_some_members_record_has_their_numbers() -> None:
    """And what a callback keeps is that member's."""

    class Seeds(pl.Callback):
        each_member = True

        def __init__(self) -> None:
            self.seeds: list[int] = []

        def fit_end(self, state: pl.State, logger: pl.Logger) -> None:
            self.seeds.append(state.seed)
            if state.seed != SEEDS[0]:
                logger.log_metrics({"own/seed": state.seed, "own/count": len(self.seeds)}, state)

    logger = of_ensemble(callbacks=[Seeds()])
    assert "own/seed/member/0" not in logger.metrics
    for number in (1, 2):
        assert logger.series(f"own/seed/member/{number}")[1] == [SEEDS[number]]
        assert logger.series(f"own/count/member/{number}")[1] == [1]


def test_a_rate_under_a_name_of_ones_own() -> None:
    logger = of_ensemble(callbacks=[pl.callbacks.LRMonitor(name="own/rate")])
    values = [logger.series(f"own/rate/member/{number}")[1][0] for number in range(3)]
    assert values == list(RATES)
    assert logger.series("own/rate/mean")[1] == logger.series("train/learning_rate/mean")[1]


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=70), st.booleans())
def test_statistics(values: list[float], as_tensors: bool) -> None:
    members: list[Any] = [torch.tensor(x, dtype=torch.float64) for x in values] if as_tensors else values
    numbers = {name: float(value) for name, value in summary({"val/loss": dict(enumerate(members))}).items()}
    finite = [value for value in values if value == value]
    assert same(numbers["val/loss/best"], min(finite, default=math.nan))
    assert ("val/loss/spread" in numbers) == (len(values) > 1)
    assert ("val/loss/member/0" in numbers) == (len(values) <= MOST_EACH)
    if len(finite) == len(values):
        assert numbers["val/loss/mean"] == pytest.approx(statistics.fmean(values), abs=1e-6)
    else:
        assert math.isnan(numbers["val/loss/mean"])


def test_files_and_the_console(tmp_path: Path) -> None:
    lines, out = tmp_path / "run.jsonl", io.StringIO()
    loggers = [JSONLinesLogger(lines), CSVLogger(tmp_path / "run.csv"), ConsoleLogger("1ep", out)]
    memory = InMemoryLogger()
    run(pl.ensemble(small, seeds=SEEDS), loggers=[memory, *loggers], **options(pl.each(RATES)))
    names = list(memory.metrics)
    assert "train/loss/member/2" in names
    assert "train/learning_rate/spread" in names
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {line["name"] for line in written if line["kind"] == "metric"} == set(names)
    with open(tmp_path / "run.csv") as file:
        assert set(names) <= set(next(csv.reader(file)))
    last = {name: memory.series(name)[1][-1] for name in names}
    train, val = ({kind: last[f"{at}/loss/{kind}"] for kind in ("mean", "spread", "best")} for at in ("train", "val"))
    text = "loss {mean:#.4g} ±{spread:#.4g} (best {best:#.4g})"
    shown = out.getvalue().splitlines()[-2:]
    assert shown[0] == f"epoch 2/2  batch      6  train    {text.format(**train)}  lr 0.04667 ±0.04726"
    assert shown[1].startswith(f"epoch 2/2  batch      6  val      {text.format(**val)}  accuracy ")
    assert "member" not in out.getvalue()
    assert memory.hyperparameters["members"] == 3
    assert memory.hyperparameters["seed"] == "[3, 4, 5]"
    assert memory.hyperparameters["parameters"] == sum(tensor.numel() for tensor in small().parameters())


# Callbacks of the user's own


class Own(pl.Callback):
    each_member = True

    def __init__(self) -> None:
        self.last = 0.0

    def batch_end(self, state: pl.State, logger: Any) -> None:
        if self.last:
            logger.log_metrics({"own/change": float(state.loss) - self.last}, state)
            logger.log_text("own/text", f"seed {state.seed}", state)
        self.last = float(state.loss)


class Every(pl.Callback):
    each_member = True

    def run_event(self, event: Event, state: pl.State, logger: Any) -> None:
        if event is Event.EVAL_END:
            logger.log_metrics({"own/loss": float(state.metrics["val"]["loss"])}, state)


@pytest.mark.parametrize("cls", [Own, Every])
def test_a_callback_that_sees_each_member(cls: Any) -> None:
    check(of_ensemble(callbacks=[cls()]), lambda number: of_one(number, callbacks=[cls()]))


def test_what_sees_each_member_is_checked_as_others_are() -> None:
    class Misnamed(pl.Callback):
        each_member = True

        def on_batch_end(self, state: pl.State, logger: Any) -> None: ...

    class Returns(pl.Callback):
        each_member = True

        def batch_end(self, state: pl.State, logger: Any) -> Any:
            return state

    with pytest.raises(ArgumentError, match=r"callback Misnamed has a method 'on_batch_end'.*batch_end"):
        fit(pl.ensemble(small, seeds=SEEDS), callbacks=[Misnamed()], **options())
    with pytest.raises(CallbackReturnError, match="callback Returns returned State at BATCH_END"):
        run(pl.ensemble(small, seeds=SEEDS), callbacks=[Returns()], **options())


def test_one_number_of_a_vector_says_what_to_write() -> None:
    class Reads(pl.Callback):
        def batch_end(self, state: pl.State, logger: Any) -> None:
            float(state.loss)  # type: ignore[arg-type]

    with pytest.raises((ValueError, RuntimeError)) as caught:
        run(pl.ensemble(small, seeds=SEEDS), callbacks=[Reads()], **options())
    assert any("each_member = True in the callback" in note for note in caught.value.__notes__)


# The State


def test_a_state_with_members_in_words() -> None:
    state = run(pl.ensemble(small, seeds=SEEDS), **options())
    text, losses = str(state), state.metrics["val"]["loss"]
    assert "members          3, of the seeds 3, 4, 5\n" in text
    assert f"loss {', '.join(f'{float(loss):.6g}' for loss in losses)}" in text
    assert "3 times Sequential, 43 parameters in 4 tensors" in text
    assert "3 times Sequential" in repr(state)
    many = run(pl.ensemble(small, seeds=range(9)), **options(max_duration="1ba"))
    numbers = sorted(map(float, many.metrics["val"]["loss"]))
    assert f"loss median {numbers[4]:.6g}, {numbers[0]:.6g} to {numbers[-1]:.6g}" in " ".join(str(many).split())


def test_what_is_not_finite_is_that_of_a_member() -> None:
    state = run(pl.ensemble(small, seeds=SEEDS), **options())
    state.check_finite()
    bad = state.replace(nonfinite=torch.tensor([-1, 4, 2]), skipped=torch.tensor([0, 1, 2]))
    with pytest.raises(NonFiniteError, match="the step of batch 2 of member 2 was NaN") as caught:
        bad.check_finite()
    assert caught.value.index == 2
    assert "first at batch 2 of member 2" in str(bad)
    assert "3 steps" in str(bad)
    with pytest.raises(NonFiniteError, match=r"of batch 1 of members 0, 1, 2 and 1 more was NaN"):
        pl.stack([pl.State.create(small())] * 4).replace(nonfinite=torch.ones(4, dtype=torch.int64)).check_finite()
