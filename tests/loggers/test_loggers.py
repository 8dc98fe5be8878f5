"""Loggers: what is recorded, where it goes, and that recording changes nothing."""

from __future__ import annotations

import inspect
import io
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.callback import LoggerGroup
from pure_loop.loggers import ConsoleLogger, InMemoryLogger
from pure_loop.recorder import Recorder

torch.set_num_threads(1)

X = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
DATA = [(x, (x.sum(1) > 0).long()) for x in X]
OPTIMIZER = pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "12ba"))


def model():
    net = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(net.weight, 0.1)
    torch.nn.init.zeros_(net.bias)
    return net


def fit(*, loss=cross_entropy, **options):
    return pl.fit(model(), DATA, loss=loss, **{"max_duration": "2ep", "optimizer": OPTIMIZER, **options})


def test_in_memory_keeps_what_the_run_had():
    logger = InMemoryLogger()
    losses = [s.loss for e, s in fit(loggers=[logger], evaluators={"val": DATA}) if e is pl.Event.BATCH_END]
    batches, values = logger.series("train/loss")
    assert batches == list(range(1, 13))
    assert values == torch.stack(losses).tolist()
    assert logger.series("train/learning_rate")[1] == pytest.approx([1 - i / 12 for i in range(12)])
    assert logger.series("val/loss")[0] == [6, 12]
    assert logger.hyperparameters["max_duration"] == "2ep"
    assert logger.hyperparameters["parameters"] == 8


def test_the_results_recorded_are_those_of_the_state():
    logger = InMemoryLogger()
    state = pl.run(fit(loggers=[logger], evaluators={"val": DATA}))
    for name, value in state.metrics["val"].items():
        assert logger.series(f"val/{name}")[1][-1] == float(value)


def test_in_memory_reads_nothing_until_asked(monkeypatch):
    logger = InMemoryLogger()
    state = pl.State.create(model())
    value = torch.tensor(3.0, requires_grad=True) * 2

    def refuse(*_):
        raise AssertionError("read from the device")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__float__", "cpu", "__bool__"):
            patch.setattr(torch.Tensor, name, refuse)
        logger.log_metrics({"norm": value, "plain": 2}, state)
        Recorder(OPTIMIZER).batch_end(state.replace(loss=value), LoggerGroup([logger]))
    assert logger.series("norm") == ([0], [6.0])
    assert logger.series("plain") == ([0], [2.0])
    assert not logger.metrics["norm"][0][1].requires_grad


def test_series_of_mixed_values_keeps_its_order_and_exact_integers():
    logger, state = InMemoryLogger(), pl.State.create(model())
    given = [1, torch.tensor(2**53 + 2), torch.tensor(0.5), torch.tensor([0.25]), math.inf, torch.tensor(1.5)]
    for value in given:
        logger.log_metrics({"x": value}, state)
    assert logger.series("x")[1] == [float(value) for value in given]


def test_a_metric_that_was_not_recorded_is_named_with_the_nearest():
    logger = InMemoryLogger()
    pl.run(fit(loggers=[logger]))
    with pytest.raises(pl.ArgumentError, match="did you mean 'train/loss'"):
        logger.series("train/los")


def test_parts_of_a_loss_are_recorded_by_name():
    def parts(outputs, targets):
        ce = cross_entropy(outputs, targets)
        return {"total": ce + 1.0, "ce": ce}

    logger = InMemoryLogger()
    pl.run(fit(loss=parts, loggers=[logger], microbatch_size=2))
    total, ce = logger.series("train/loss")[1], logger.series("train/loss/ce")[1]
    assert total == pytest.approx([value + 1 for value in ce])


def test_each_part_of_a_partition_has_its_learning_rate():
    optimizer = pl.optim.partition(
        {"bias": pl.optim.sgd(lr=0.5), "rest": pl.optim.sgd(lr=0.25)},
        label=lambda name, _: "bias" if name == "bias" else "rest",
    )
    logger = InMemoryLogger()
    pl.run(fit(loggers=[logger], optimizer=optimizer))
    assert logger.series("train/learning_rate/bias")[1] == [0.5] * 12
    assert logger.series("train/learning_rate/rest")[1] == [0.25] * 12


def constant(name, value):
    return pl.Metric(name, lambda: 0, lambda accumulator, *_: accumulator, lambda _: value)


VALUES = {
    "number": (np.float32(0.5), {"val/number": 0.5}, {}),
    "vector": (torch.tensor([0.25, 0.5]), {"val/vector/0": 0.25, "val/vector/1": 0.5}, {}),
    "array": (np.array([1, 2]), {"val/array/0": 1, "val/array/1": 2}, {}),
    "mapping": (
        {"a": torch.tensor(1.0), "b": {"c": 2, "d": torch.tensor([3.0])}},
        {"val/mapping/a": 1, "val/mapping/b/c": 2, "val/mapping/b/d": 3},
        {},
    ),
    "list": ([1.0, (2.0,)], {"val/list/0": 1, "val/list/1/0": 2}, {}),
    "complex": (torch.tensor(1 + 2j), {"val/complex/real": 1, "val/complex/imag": 2}, {}),
    "matrix": (torch.tensor([[3, 1], [0, 4]]), {}, {"val/matrix": (["0", "1"], [[3, 1], [0, 4]])}),
    "empty": (torch.zeros(0), {}, {"val/empty": (["index", "value"], [])}),
    "long": (torch.ones(101), {}, {"val/long": (["index", "value"], [[i, 1.0] for i in range(101)])}),
    "cube": (
        torch.arange(8).reshape(2, 2, 2),
        {},
        {"val/cube": (["axis 0", "axis 1", "0", "1"], [[0, 0, 0, 1], [0, 1, 2, 3], [1, 0, 4, 5], [1, 1, 6, 7]])},
    ),
    "text": ("good", {}, {"val/text": (["value"], [["good"]])}),
    "nothing": (None, {}, {"val/nothing": (["value"], [[None]])}),
}


@pytest.mark.parametrize("name", VALUES)
def test_metrics_of_any_kind_are_recorded(name):
    """Vectors, mappings and matrices were left out silently, as were NumPy's numbers."""
    value, numbers, tables = VALUES[name]
    logger = InMemoryLogger()
    evaluator = pl.Evaluator(DATA, metrics=[constant(name, value), pl.metrics.accuracy()])
    stream = io.StringIO()
    pl.run(fit(loggers=[logger, ConsoleLogger(stream=stream)], evaluators={"val": evaluator}))
    found = {each: logger.series(each)[1] for each in logger.metrics if each.startswith("val/")}
    assert found.pop("val/accuracy")
    assert found == {each: [number] * 2 for each, number in numbers.items()}
    kept = {each: [(columns, rows) for _, columns, rows in listed] for each, listed in logger.tables.items()}
    assert kept == {each: [table] * 2 for each, table in tables.items()}
    assert all(each.removeprefix("val/") in stream.getvalue() for each in (*numbers, *tables))


def test_the_console_prints_tables_under_the_line():
    metrics = [
        constant("confusion", torch.tensor([[3, 1], [0, 14]])),
        constant("f1", torch.arange(9) / 8),
        constant("large", torch.zeros(30, 2)),
    ]
    stream = io.StringIO()
    evaluator = pl.Evaluator(DATA, metrics=metrics)
    pl.run(fit(loggers=[ConsoleLogger(stream=stream)], evaluators={"val": evaluator}, max_duration="1ep"))
    lines = stream.getvalue().splitlines()
    start = next(i for i, line in enumerate(lines) if "val/confusion" in line)
    assert lines[start : start + 4] == ["  val/confusion", "    0   1", "    3   1", "    0  14"]
    assert lines[start + 4 : start + 7] == ["  val/f1", "    name   value", "    f1/0   0.000"]
    assert "  val/large (30 x 2, the first of each)" in lines


def console(interval, **options):
    stream = io.StringIO()
    pl.run(fit(loggers=[ConsoleLogger(interval, stream=stream)], **options))
    return stream.getvalue().splitlines()


def test_console_prints_an_aligned_line_an_epoch_and_an_evaluation():
    lines = console("1ep", evaluators={"val": DATA})
    assert [line[:31] for line in lines] == [
        "epoch 1/2  batch      6  train ",
        "epoch 1/2  batch      6  val   ",
        "epoch 2/2  batch     12  train ",
        "epoch 2/2  batch     12  val   ",
    ]
    assert "lr 0.5833" in lines[0]  # of the sixth batch: 1 - 5/12
    assert "accuracy" in lines[1]
    assert "accuracy" not in lines[2]  # results stand in their own line


@pytest.mark.parametrize(
    ("interval", "batches"),
    [
        ("4ba", [4, 8, 12]),
        ("5ba", [5, 10, 12]),
        ("0.5dur", [6, 12]),
        (0, [12]),
        (lambda state: state.timestamp.batch == 3, [3, 12]),
    ],
)
def test_console_prints_at_its_interval_and_at_the_end(interval, batches):
    assert [int(line.split()[3]) for line in console(interval)] == batches


def test_console_prints_to_the_standard_output_of_the_moment(capsys):
    pl.run(fit(loggers=[ConsoleLogger()]))
    assert "loss" in capsys.readouterr().out


def test_console_works_without_the_recorder():
    def script(state):
        state = yield pl.Event.FIT_START, state
        state = yield pl.Event.BATCH_END, state.replace(loss=torch.tensor(0.25), event=None)
        return (yield pl.Event.FIT_END, state)

    stream = io.StringIO()
    state = pl.State.create(model(), timestamp=pl.Timestamp(batch=1))
    pl.run(pl.drive(script(state), loggers=[ConsoleLogger("1ba", stream=stream)]))
    assert "loss 0.2500" in stream.getvalue()


def test_console_checks_that_losses_are_finite_when_it_reads_them():
    logger = ConsoleLogger(stream=io.StringIO())
    state = pl.State.create(model()).replace(nonfinite=torch.tensor(5))
    with pytest.raises(pl.NonFiniteError, match="batch 5"):
        logger.fit_end(state.replace(timestamp=pl.Timestamp(batch=7)), LoggerGroup())


def test_console_refuses_what_it_cant_use():
    for wrong in (None, 1.5, "often"):
        with pytest.raises(pl.PureLoopError, match="interval"):
            ConsoleLogger(wrong)
    with pytest.raises(pl.ArgumentTypeError, match="open text file"):
        ConsoleLogger(stream="log.txt")


class Everything(pl.Callback):
    """Records a value of each kind at BATCH_END."""

    def batch_end(self, state, logger):
        logger.log_metrics(
            {"each": torch.tensor([1.0, 2.0]), "by": {"a": 3, "b": {"c": 4.0}}, "m": torch.eye(2)}, state
        )
        logger.log_images("image", torch.zeros(1, 2, 2, 3), state, masks={"targets": torch.zeros(1, 2, 2)})
        logger.log_text("text", "written", state)


@pytest.mark.parametrize(("images", "got"), [(torch.zeros(16, 4), r"shape \(16, 4\)"), ([[0.0]], "list")])
def test_what_is_no_image_is_refused_by_the_group(images, got):
    group = pl.callback.LoggerGroup([InMemoryLogger()])
    state = pl.State.create(torch.nn.Linear(1, 1))
    with pytest.raises(pl.ArgumentError, match=rf"log_images\('x'\): images are .* of shape \(n, .*; got {got}\."):
        group.log_images("x", images, state)


def test_vectors_and_mappings_that_callbacks_record_become_several_names_and_matrices_tables():
    logger = InMemoryLogger()
    pl.run(fit(loggers=[logger], callbacks=[Everything()], max_duration="1ba"))
    recorded = {name: logger.series(name)[1] for name in ("each/0", "each/1", "by/a", "by/b/c")}
    assert recorded == {"each/0": [1.0], "each/1": [2.0], "by/a": [3.0], "by/b/c": [4.0]}
    assert [table[1:] for table in logger.tables["m"]] == [(["0", "1"], [[1.0, 0.0], [0.0, 1.0]])]


def test_images_with_masks_and_texts_are_recorded():
    logger = InMemoryLogger()
    pl.run(fit(loggers=[logger], callbacks=[Everything()], max_duration="1ba"))
    assert [text for _, text in logger.texts["text"]] == ["written"]
    assert logger.images["image"][0][1].shape == (1, 2, 2, 3)
    assert logger.masks["image"][0][1]["targets"].shape == (1, 2, 2)


class Flushes(pl.Logger):
    """Keeps the batch of the newest value when it is flushed."""

    def __init__(self):
        self.newest, self.flushed = 0, []

    def log_metrics(self, metrics, state):
        self.newest = state.timestamp.batch

    def flush(self):
        self.flushed.append(self.newest)


def test_loggers_are_flushed_before_a_checkpoint_is_saved(tmp_path):
    logger = Flushes()
    saver = pl.callbacks.CheckpointSaver(tmp_path, interval="4ba")
    pl.run(fit(loggers=[logger], callbacks=[saver]))
    assert logger.flushed == [4, 8, 12, 12]  # at BATCH_CHECKPOINT and EPOCH_CHECKPOINT


def test_recording_changes_no_training():
    alone = pl.run(fit(strict=True))
    logged = pl.run(fit(strict=True, loggers=[InMemoryLogger(), ConsoleLogger("1ba", stream=io.StringIO())]))
    assert all(torch.equal(alone.params[name], logged.params[name]) for name in alone.params)


def hyperparameters(**options):
    logger = InMemoryLogger()
    pl.run(fit(loggers=[logger], max_duration="1ba", **options))
    return logger.hyperparameters


def test_each_argument_of_fit_is_a_hyperparameter():
    recorded = hyperparameters(microbatch_size=2, evaluators={"val": DATA}, clip_grad=1.5)
    arguments = inspect.signature(pl.fit).parameters.keys() - {"model_or_state"}
    assert arguments <= recorded.keys()
    assert {type(value) for value in recorded.values()} <= {bool, int, float, str, type(None)}
    expected = {"model": "Linear", "microbatch_size": 2, "precision": "fp32", "clip_grad": 1.5, "loss": "cross_entropy"}
    expected |= {"max_duration": "1ba", "eval_interval": "1ep", "seed": 0, "evaluators": "val: list of 6"}
    assert {name: recorded[name] for name in expected} == expected


def test_settings_of_algorithms_and_of_the_optimizer_are_hyperparameters():
    algorithms = [pl.algorithms.ema(half_life="50ba"), pl.algorithms.sam(rho=0.1, name="sharp")]
    recorded = hyperparameters(algorithms=algorithms, optimizer=pl.optim.sgd(lr=0.1, momentum=0.9))
    assert recorded["ema/half_life"] == "50ba"
    assert recorded["sharp/rho"] == 0.1
    assert recorded["optimizer/momentum"] == 0.9


def test_the_batch_size_is_a_hyperparameter_of_any_data():
    assert hyperparameters()["batch_size"] == 4  # counted in the first batch
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[0], DATA[0][1]), batch_size=3)
    logger = InMemoryLogger()
    next(iter(pl.fit(model(), loader, loss=cross_entropy, optimizer=OPTIMIZER, max_duration=1, loggers=[logger])))
    with_loader = InMemoryLogger()
    pl.run(pl.fit(model(), loader, loss=cross_entropy, optimizer=OPTIMIZER, max_duration="2ba", loggers=[with_loader]))
    assert with_loader.hyperparameters["batch_size"] == 3  # of the loader: its last batch has one sample


class Named(pl.Logger):
    """Has a record of a run."""

    def __init__(self, recorded=None):
        self.recorded, self.names = recorded, []

    @property
    def recorded_run_name(self):
        return self.recorded

    def bind(self, run):
        self.names.append(run.run_name)


def test_all_loggers_have_one_run_name():
    first, second = Named(), Named()
    pl.run(fit(loggers=[first, second], run_name="baseline-1", max_duration="1ba"))
    assert first.names == second.names == ["baseline-1"]


def test_a_new_run_has_a_new_name_and_a_resumed_one_that_of_its_loggers():
    new = Named("old")
    state = pl.run(fit(loggers=[new], max_duration="1ba"))
    other = Named("old")
    pl.run(fit(loggers=[other], max_duration="1ba"))
    assert len({*new.names, *other.names, "old"}) == 3
    resumed = [Named(), Named("old")]
    pl.run(pl.fit(state, DATA, loss=cross_entropy, optimizer=OPTIMIZER, max_duration="2ba", loggers=resumed))
    assert [logger.names for logger in resumed] == [["old"], ["old"]]


@pytest.mark.parametrize("name", ["", " ", "a/b", "a\\b", ".hidden", "x" * 200, "tab\t", "a:b", 3, ["a"]])
def test_a_run_name_that_no_folder_can_have_is_refused(name):
    with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match="run_name"):
        fit(run_name=name)


class Norm(pl.Callback):
    def epoch_end(self, state, logger):
        logger.log_metrics({"weights/norm": torch.tensor(2.5), "other": 1.0}, state)


def test_the_console_shows_further_numbers_of_callbacks():
    stream = io.StringIO()
    logger = ConsoleLogger(stream=stream, include=["weights/*"])
    pl.run(fit(callbacks=[Norm()], loggers=[logger], max_duration="1ep"))
    (line,) = stream.getvalue().splitlines()
    assert "weights/norm 2.500" in line
    assert "other" not in line


def test_a_logger_that_is_given_twice_is_refused():
    logger = InMemoryLogger()
    for options in ({"loggers": [logger, logger]}, {"loggers": [logger], "callbacks": [logger]}):
        with pytest.raises(pl.ArgumentError, match=r"InMemoryLogger\(\) is given twice"):
            fit(**options)


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/x", "a/../x", "a\\..\\x", "C:\\x", "C:x", "", "a//b", "a/", ".", "a\nb", "s3://b/x"]
)
@pytest.mark.parametrize("kind", ["group", "memory", "lines", "remote"])
def test_a_name_of_a_file_that_leads_out_of_its_folder_is_refused(name, kind, tmp_path):
    """At the call, by the group that callbacks are given and by each kind of logger, before anything is stored."""
    (tmp_path / "x").write_text("mine")
    logger = {
        "group": LoggerGroup([InMemoryLogger()]),
        "memory": InMemoryLogger(),
        "lines": pl.loggers.JSONLinesLogger(tmp_path / "a" / "metrics.jsonl"),
        "remote": pl.loggers.RemoteUploader("memory://a/b/c"),
    }[kind]
    with pytest.raises(pl.ArgumentError, match="no name of a file inside a folder"):
        logger.log_file(name, str(tmp_path / "x"))


def test_a_name_of_a_file_may_have_folders():
    logger = InMemoryLogger()
    LoggerGroup([logger]).log_file("samples/final..txt", "/tmp/x")
    assert logger.files == {"samples/final..txt": "/tmp/x"}
    with pytest.raises(pl.ArgumentTypeError, match="a text"):
        LoggerGroup([logger]).log_file(3, "/tmp/x")
