"""What is recorded of a run: in memory, on the console, as hyperparameters, and under which name."""

from __future__ import annotations

import inspect
import io
import math
from typing import Any

import numpy as np
import pytest
import torch

import pure_loop as pl
from pure_loop.callback import LoggerGroup
from pure_loop.errors import ArgumentError, ArgumentTypeError, NonFiniteError
from pure_loop.loggers import ConsoleLogger, InMemoryLogger
from pure_loop.recorder import Recorder
from tests.loggers.records import DATA
from tests.support import problem
from tests.support.problem import cross_entropy, mlp
from tests.support.refused import Refusal, check
from tests.support.streams import assert_same

OPTIMIZER = pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "12ba"))
VAL = {"val": DATA}


def fit(*loggers: Any, model: Any = None, **options: Any) -> Any:
    return problem.fit(model, DATA, loggers=loggers, **{"optimizer": OPTIMIZER, "strict": False, **options})


def recorded(**options: Any) -> InMemoryLogger:
    logger = InMemoryLogger()
    pl.run(fit(logger, **options))
    return logger


def test_what_is_recorded_are_the_numbers_of_the_states_and_changes_no_training() -> None:
    logger = InMemoryLogger()
    pairs = list(fit(logger, ConsoleLogger("1ba", stream=io.StringIO()), evaluators=VAL, strict=True))
    losses = [float(state.loss) for event, state in pairs if event is pl.Event.BATCH_END]
    assert logger.series("train/loss") == (list(range(1, 13)), losses)
    assert logger.series("train/learning_rate")[1] == pytest.approx([1 - i / 12 for i in range(12)])
    for name, value in pairs[-1][1].metrics["val"].items():
        assert (logger.series(f"val/{name}")[0], logger.series(f"val/{name}")[1][-1]) == ([6, 12], float(value))
    assert_same(pairs[-1][1], pl.run(fit(evaluators=VAL, strict=True)), "without loggers")
    with pytest.raises(ArgumentError, match="did you mean 'train/loss'"):
        logger.series("train/los")


def test_in_memory_reads_nothing_until_asked_and_keeps_order_and_exact_integers(monkeypatch: Any) -> None:
    logger, state = InMemoryLogger(), pl.State.create(mlp())
    value = torch.tensor(3.0, requires_grad=True) * 2

    def refuse(*_: Any) -> Any:
        raise AssertionError("read from the device")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__float__", "cpu", "__bool__"):
            patch.setattr(torch.Tensor, name, refuse)
        logger.log_metrics({"norm": value}, state)
        Recorder(OPTIMIZER).batch_end(state.replace(loss=value), LoggerGroup([logger]))
    assert logger.series("norm") == ([0], [6.0])
    assert not logger.metrics["norm"][0][1].requires_grad
    given = [1, torch.tensor(2**53 + 2), torch.tensor(0.5), torch.tensor([0.25]), math.inf, torch.tensor(1.5)]
    for each in given:
        logger.log_metrics({"x": each}, state)
    assert logger.series("x")[1] == [float(each) for each in given]


def test_parts_of_a_loss_and_of_a_partition_are_recorded_by_name() -> None:
    def parts(outputs: Any, targets: Any) -> Any:
        return {"total": (ce := cross_entropy(outputs, targets)) + 1.0, "ce": ce}

    optimizers = {"bias": pl.optim.sgd(lr=0.5), "rest": pl.optim.sgd(lr=0.25)}
    optimizer = pl.optim.partition(optimizers, label=lambda name, _: "bias" if name.endswith("bias") else "rest")
    logger = recorded(loss=parts, microbatch_size=2, optimizer=optimizer)
    assert logger.series("train/loss")[1] == pytest.approx([ce + 1 for ce in logger.series("train/loss/ce")[1]])
    rates = [logger.series(f"train/learning_rate/{part}")[1] for part in ("bias", "rest")]
    assert rates == [[0.5] * 12, [0.25] * 12]


CUBE = [[0, 0, 0, 1], [0, 1, 2, 3], [1, 0, 4, 5], [1, 1, 6, 7]]
NESTED = {"a": torch.tensor(1.0), "b": {"c": 2, "d": torch.tensor([3.0])}}
# A value: what it is recorded as, numbers by the rest of their names or a table.
VALUES: dict[str, tuple[Any, dict[str, float], Any]] = {
    "number": (np.float32(0.5), {"": 0.5}, None),
    "vector": (torch.tensor([0.25, 0.5]), {"/0": 0.25, "/1": 0.5}, None),
    "array": (np.array([1, 2]), {"/0": 1, "/1": 2}, None),
    "mapping": (NESTED, {"/a": 1, "/b/c": 2, "/b/d": 3}, None),
    "list": ([1.0, (2.0,)], {"/0": 1, "/1/0": 2}, None),
    "complex": (torch.tensor(1 + 2j), {"/real": 1, "/imag": 2}, None),
    "matrix": (torch.tensor([[3, 1], [0, 4]]), {}, (["0", "1"], [[3, 1], [0, 4]])),
    "empty": (torch.zeros(0), {}, (["index", "value"], [])),
    "long": (torch.ones(101), {}, (["index", "value"], [[i, 1.0] for i in range(101)])),
    "cube": (torch.arange(8).reshape(2, 2, 2), {}, (["axis 0", "axis 1", "0", "1"], CUBE)),
    "text": ("good", {}, (["value"], [["good"]])),
    "nothing": (None, {}, (["value"], [[None]])),
}


def constant(name: str, value: Any) -> pl.Metric:
    return pl.Metric(name, lambda: 0, lambda accumulator, *_: accumulator, lambda _: value)


class Everything(pl.Callback):
    """Records all of these, and media."""

    def epoch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({f"own/{name}": value for name, (value, *_) in VALUES.items()}, state)
        logger.log_images("image", torch.zeros(1, 2, 2, 3), state, masks={"targets": torch.zeros(1, 2, 2)})
        logger.log_text("text", "written", state)


def test_values_of_any_kind_are_recorded() -> None:
    """Of metrics, and of callbacks: vectors, mappings and matrices were left out silently, as were NumPy's numbers."""
    logger, stream = InMemoryLogger(), io.StringIO()
    # A metric that gives a text is refused.
    measured = {name: value for name, value in VALUES.items() if name not in ("text", "nothing")}
    metrics = [constant(name, value) for name, (value, *_) in measured.items()]
    evaluators = {"val": pl.Evaluator(DATA, metrics=metrics)}
    pl.run(fit(logger, ConsoleLogger(stream=stream), evaluators=evaluators, callbacks=[Everything()]))
    for who, values in (("val", measured), ("own", VALUES)):
        found = {each: logger.series(each)[1] for each in logger.metrics if each.startswith(who)}
        wanted = {f"{who}/{name}{rest}": n for name, (_, numbers, _) in values.items() for rest, n in numbers.items()}
        assert found == {name: [number] * 2 for name, number in wanted.items()}
        tables = {each: [t[1:] for t in listed] for each, listed in logger.tables.items() if each.startswith(who)}
        assert tables == {f"{who}/{name}": [table] * 2 for name, (*_, table) in values.items() if table is not None}
        assert who == "own" or all(each[4:] in stream.getvalue() for each in (*wanted, *tables))
    assert [text for _, text in logger.texts["text"]] == ["written"] * 2
    assert logger.images["image"][0][1].shape == (1, 2, 2, 3)
    assert logger.masks["image"][0][1]["targets"].shape == (1, 2, 2)


class Flushes(pl.Logger):
    """Keeps the batch of the newest value when it is flushed; may have a record of a run."""

    def __init__(self, recorded: str | None = None) -> None:
        self.newest, self.flushed, self.names, self.recorded = 0, [], [], recorded  # type: ignore[var-annotated]

    @property
    def recorded_run_name(self) -> str | None:
        return self.recorded

    def bind(self, run: Any) -> None:
        self.names.append(run.run_name)

    def log_metrics(self, metrics: Any, state: pl.State) -> None:
        self.newest = state.timestamp.batch

    def flush(self) -> None:
        self.flushed.append(self.newest)


def test_loggers_are_flushed_before_a_checkpoint_and_a_resumed_run_has_the_name_of_its_loggers(tmp_path: Any) -> None:
    logger, new, other = Flushes(), Flushes("old"), Flushes("old")
    saver = pl.callbacks.CheckpointSaver(tmp_path, interval="4ba")
    pl.run(fit(logger, first := Flushes(), run_name="baseline-1", callbacks=[saver]))
    assert logger.flushed == [4, 8, 12, 12]  # at BATCH_CHECKPOINT and EPOCH_CHECKPOINT
    assert logger.names == first.names == ["baseline-1"]
    state = pl.run(fit(new, max_duration="1ba"))
    pl.run(fit(other, max_duration="1ba"))
    assert len({*new.names, *other.names, "old"}) == 3
    resumed = [Flushes(), Flushes("old")]
    pl.run(fit(*resumed, model=state, max_duration="2ba"))
    assert [each.names for each in resumed] == [["old"], ["old"]]


def test_each_argument_of_fit_and_each_setting_is_a_hyperparameter() -> None:
    algorithms = [pl.algorithms.ema(half_life="50ba"), pl.algorithms.sam(rho=0.1, name="sharp")]
    options: dict[str, Any] = {"microbatch_size": 2, "evaluators": VAL, "clip_grad": 1.5, "max_duration": "1ba"}
    options["optimizer"] = pl.optim.sgd(lr=0.1, momentum=0.9)
    found = recorded(algorithms=algorithms, **options).hyperparameters
    assert inspect.signature(pl.fit).parameters.keys() - {"model_or_state"} <= found.keys()
    assert {type(value) for value in found.values()} <= {bool, int, float, str, type(None)}
    expected = {"model": "Sequential", "microbatch_size": 2, "precision": "fp32", "clip_grad": 1.5, "parameters": 67}
    expected |= {"max_duration": "1ba", "eval_interval": "1ep", "seed": 0, "evaluators": "val: list of 6"}
    expected |= {"loss": "cross_entropy", "ema/half_life": "50ba", "sharp/rho": 0.1, "optimizer/momentum": 0.9}
    expected |= {"batch_size": 5}  # counted in the first batch
    assert {name: found[name] for name in expected} == expected
    logger = InMemoryLogger()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*DATA[0]), batch_size=3)
    problem.run(data=loader, loggers=[logger], max_duration="2ba")
    assert logger.hyperparameters["batch_size"] == 3  # of the loader: its last batch has two samples


# The console


def console(interval: Any, *, include: Any = None, **options: Any) -> list[str]:
    stream = io.StringIO()
    pl.run(fit(ConsoleLogger(interval, stream=stream, include=include), **options))
    return stream.getvalue().splitlines()


class Norm(pl.Callback):
    def epoch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({"weights/norm": torch.tensor(2.5), "other": 1.0}, state)


def test_the_console_prints_an_aligned_line_an_epoch_and_an_evaluation_and_tables_under_it(capsys: Any) -> None:
    lines = console("1ep", evaluators=VAL, callbacks=[Norm()], include=["weights/*"])
    assert [line[:31] for line in lines] == [
        f"epoch {epoch}/2  batch     {6 * epoch:2}  {label} " for epoch in (1, 2) for label in ("train", "val  ")
    ]
    assert "lr 0.5833" in lines[0]  # of the sixth batch: 1 - 5/12
    assert ["accuracy" in line for line in lines] == [False, True] * 2  # results stand in their own line
    assert "weights/norm 2.500" in lines[0]
    assert "other" not in lines[0]
    metrics = [constant("confusion", torch.tensor([[3, 1], [0, 14]])), constant("f1", torch.arange(9) / 8)]
    evaluators = {"val": pl.Evaluator(DATA, metrics=[*metrics, constant("large", torch.zeros(30, 2))])}
    lines = console("1ep", evaluators=evaluators, max_duration="1ep")
    start = lines.index("  val/confusion")
    assert lines[start + 1 : start + 4] == ["    0   1", "    3   1", "    0  14"]
    assert lines[start + 4 : start + 7] == ["  val/f1", "    name   value", "    f1/0   0.000"]
    assert "  val/large (30 x 2, the first of each)" in lines
    pl.run(fit(ConsoleLogger()))
    assert "loss" in capsys.readouterr().out  # the standard output of the moment
    for interval, batches in (("5ba", [5, 10, 12]), ("0.5dur", [6, 12]), (0, [12]), (third, [3, 12])):
        assert [int(line.split()[3]) for line in console(interval)] == batches


def third(state: pl.State) -> bool:
    return state.timestamp.batch == 3


def test_a_script_is_recorded_as_fit_is() -> None:
    def script(state: pl.State) -> Any:
        for loss in (0.5, {"total": 3.0, "critic": 1.0}):
            state = yield pl.Event.BATCH_END, state.count_batch(samples=4).replace(loss=loss)
        state = yield pl.Event.EVAL_END, state.replace(metrics={"val": {"loss": 0.25}}, evaluator="val")
        return (yield pl.Event.BATCH_END, state.count_batch(samples=4).replace(loss=None))

    logger, same = InMemoryLogger(), InMemoryLogger()
    pl.run(pl.drive(script(pl.State.create(mlp())), loggers=[logger]))
    pl.run(pl.drive(script(pl.State.create(mlp())), loggers=[same], callbacks=[Recorder()]))
    assert same.metrics == logger.metrics
    assert {name: logger.series(name) for name in logger.metrics} == {
        "train/loss": ([1, 2], [0.5, 3.0]),
        "train/loss/critic": ([2], [1.0]),
        "val/loss": ([2], [0.25]),
    }
    assert logger.hyperparameters == {"batch_size": 4}


def test_the_console_checks_that_losses_are_finite_when_it_reads_them() -> None:
    def script(state: pl.State) -> Any:
        state = yield pl.Event.FIT_START, state
        state = yield pl.Event.BATCH_END, state.replace(loss=torch.tensor(0.25), event=None)
        return (yield pl.Event.FIT_END, state)

    stream = io.StringIO()
    state = pl.State.create(mlp(), timestamp=pl.Timestamp(batch=7))
    pl.run(pl.drive(script(state), loggers=[ConsoleLogger("1ba", stream=stream)]))
    assert "loss 0.2500" in stream.getvalue()
    with pytest.raises(NonFiniteError, match="batch 5"):
        ConsoleLogger(stream=io.StringIO()).fit_end(state.replace(nonfinite=torch.tensor(5)), LoggerGroup())


class WithImages(InMemoryLogger):
    """Has a method that a callback of the user's calls, and whose name is almost that of the library's."""

    def log_image(self, name: str, image: torch.Tensor, state: pl.State) -> None:
        self.log_metrics({name: image.sum()}, state)


class Proxy(pl.Logger):
    """Passes on what it doesn't have, and has a method of its own."""

    def __init__(self) -> None:
        self.target = InMemoryLogger()

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__
        return getattr(own(self, "target"), name) if name.startswith("log_") else own(self, name)

    def summary(self) -> str:
        return str(self.target)


def test_loggers_may_have_methods_of_their_own_and_pass_calls_on() -> None:
    class Draws(pl.Callback):
        def epoch_end(self, state: pl.State, logger: Any) -> None:
            logger.log_image("drawn", torch.ones(2, 2), state)

    images, proxy = WithImages(), Proxy()
    pl.run(fit(images, proxy, callbacks=[Draws()]))
    assert (set(images.series("drawn")[1]), "train/loss" in proxy.target.metrics) == ({4.0}, True)


def test_it_is_refused() -> None:
    group, logger, state = LoggerGroup([InMemoryLogger()]), InMemoryLogger(), pl.State.create(mlp())
    for call, error, says in (
        (lambda: ConsoleLogger(1.5), pl.PureLoopError, "interval"),  # type: ignore[arg-type]
        (lambda: ConsoleLogger(stream="log.txt"), ArgumentTypeError, "open text file"),  # type: ignore[arg-type]
        (lambda: fit(logger, logger), ArgumentError, "InMemoryLogger() is given twice"),
        (lambda: fit(logger, callbacks=[logger]), ArgumentError, "InMemoryLogger() is given twice"),
        (lambda: group.log_images("x", torch.zeros(16, 4), state), ArgumentError, "log_images('x'): images are"),
    ):
        check(Refusal(says, call, error, (says,)))
