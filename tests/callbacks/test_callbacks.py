"""The callbacks that come with the library."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop.callback import LoggerGroup
from pure_loop.callbacks import LRMonitor, SpeedMonitor
from pure_loop.loggers import InMemoryLogger
from tests.support.runs import equal, mlp, points, train
from tests.support.worlds import pool

torch.set_num_threads(1)

DATA = [(torch.ones(n, 2), torch.zeros(n, 1)) for n in (4, 4, 2, 4)]
SPEED = "speed/samples_per_second"


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(callbacks, *, clock=None, seconds=1.0, evaluation_seconds=0.0, **options):
    """Each batch takes ``seconds``, or ``seconds(batch)``; each evaluation batch ``evaluation_seconds``."""
    clock, logger = clock or Clock(), InMemoryLogger()
    options = {"max_duration": "1ep", "optimizer": pl.optim.sgd(lr=0.1), **options}
    stream = pl.fit(
        torch.nn.Linear(2, 1), DATA, loss=mse_loss, callbacks=callbacks, loggers=[logger], clock=clock, **options
    )
    for event, state in stream:
        if event is pl.Event.BATCH_START:
            clock.now += seconds(state.timestamp.batch) if callable(seconds) else seconds
        if event is pl.Event.EVAL_BATCH_START:
            clock.now += evaluation_seconds
    return logger, state


def test_speed_is_a_mean_over_the_window():
    logger, _ = run([SpeedMonitor(window=2)], seconds=lambda batch: [1.0, 3.0, 1.0, 4.0][batch])
    assert logger.series(SPEED) == ([1, 2, 3, 4], [4.0, 8 / 4, 6 / 4, 6 / 5])
    assert logger.series("speed/batches_per_second")[1] == [1.0, 2 / 4, 2 / 4, 2 / 5]


def test_no_tokens_no_speed_of_tokens():
    logger, _ = run([SpeedMonitor()])
    assert "speed/tokens_per_second" not in logger.metrics


def test_speed_counts_tokens():
    task = pl.Task(
        loss=lambda outputs, batch: mse_loss(outputs, batch[1]), forward=lambda m, b: m(b[0]), tokens=lambda b: 10
    )
    clock, logger = Clock(), InMemoryLogger()
    stream = pl.fit(
        torch.nn.Linear(2, 1), DATA, task=task, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
        callbacks=[SpeedMonitor()], loggers=[logger], clock=clock,
    )  # fmt: skip
    for event, _ in stream:
        clock.now += event is pl.Event.BATCH_START
    assert logger.series("speed/tokens_per_second")[1] == [10.0] * 4


def test_evaluations_are_not_counted():
    clock = Clock()
    logger, _ = run(
        [SpeedMonitor(clock=clock)], clock=clock, evaluators={"val": DATA}, eval_interval="1ba", evaluation_seconds=7.0
    )
    assert logger.series("speed/batches_per_second")[1] == [1.0] * 4


def test_a_second_run_starts_a_new_window():
    monitor = SpeedMonitor(window=50)
    run([monitor], seconds=100.0)
    logger, _ = run([monitor], seconds=1.0)
    assert logger.series(SPEED)[1][0] == 4.0


def test_a_clock_that_stands_still_gives_no_speed():
    logger, _ = run([SpeedMonitor()], seconds=0.0)
    assert SPEED not in logger.metrics


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "3"])
def test_speed_monitor_refuses_a_wrong_window(window):
    with pytest.raises(pl.PureLoopError, match="window must be a number of batches"):
        SpeedMonitor(window)


def test_lr_monitor_gives_the_rate_that_the_batch_uses():
    optimizer = pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "4ba"))
    logger, _ = run([LRMonitor(optimizer, name="rate")], optimizer=optimizer)
    assert logger.series("rate") == ([1, 2, 3, 4], [1.0, 0.75, 0.5, 0.25])


def test_lr_monitor_takes_the_optimizer_of_the_run():
    optimizer = pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "4ba"))
    monitor = LRMonitor(name="rate")
    logger, _ = run([monitor], optimizer=pl.optim.sgd(lr=0.5))
    assert logger.series("rate")[1] == [0.5] * 4
    logger, _ = run([monitor], optimizer=optimizer)
    assert logger.series("rate") == ([1, 2, 3, 4], [1.0, 0.75, 0.5, 0.25])


def test_lr_monitor_in_a_script_needs_its_optimizer():
    def script(state):
        return (yield pl.Event.BATCH_START, state)

    state = pl.State.create(torch.nn.Linear(1, 1))
    with pytest.raises(pl.ArgumentError, match=r"write LRMonitor\(optimizer\)"):
        pl.drive(script(state), callbacks=[LRMonitor()])
    assert len(list(pl.drive(script(state), callbacks=[LRMonitor(pl.optim.sgd(lr=0.1))]))) == 1


class Bound(pl.Callback):
    """Keeps what it is bound to, and what happened when."""

    def __init__(self):
        self.happened = []

    def bind(self, run):
        self.run = run
        self.happened.append("bind")
        run.at_end.append(lambda: self.happened.append("end"))

    def fit_start(self, state, logger):
        self.happened.append("start")

    def predict_start(self, state, logger):
        self.happened.append("start")

    def close(self):
        self.happened.append("close")


def test_a_callback_is_bound_before_anything_runs_and_ends_after_all_else():
    callback, optimizer, data = Bound(), pl.optim.sgd(lr=0.1), [(torch.ones(2, 2), torch.ones(2, 1))]
    metric = pl.metrics.loss()
    stream = pl.fit(
        torch.nn.Linear(2, 1),
        data,
        loss=torch.nn.functional.mse_loss,
        optimizer=optimizer,
        max_duration="2ba",
        iteration_length="1ep",
        evaluators={"val": data, "test": pl.Evaluator(data, metrics=[metric])},
        callbacks=[callback],
    )
    assert callback.happened == ["bind"]
    run = callback.run
    assert (run.function, run.optimizer, run.order, run.ranks) == ("fit", optimizer, "current", 1)
    assert (str(run.max_duration), str(run.iteration_length)) == ("2ba", "1ep")
    assert (run.precision, run.microbatch_size, run.device) == ("fp32", None, torch.device("cpu"))
    assert run.task.loss(torch.ones(2, 1), (None, torch.zeros(2, 1))) == 1.0
    assert run.callbacks == (callback,)
    assert list(run.metrics) == ["val", "test"]
    assert run.metrics["val"] is None
    assert [each.name for each in run.metrics["test"]] == ["loss"]
    pl.run(stream)
    assert callback.happened == ["bind", "start", "close", "end"]


def test_outside_fit_a_callback_is_bound_too():
    callback = Bound()
    pl.run(pl.predict(torch.nn.Linear(2, 1), [(torch.ones(2, 2), None)], callbacks=[callback]))
    assert callback.happened == ["bind", "start", "close", "end"]
    assert (callback.run.function, callback.run.optimizer, callback.run.max_duration) == ("predict", None, None)


def test_explain_refuses_what_a_callback_refuses(capsys):
    class Never(pl.Callback):
        def bind(self, run):
            raise pl.ArgumentError(f"never in {run.function}")

        def fit_end(self, state, logger): ...

    for function in (pl.fit, pl.explain):
        with pytest.raises(pl.ArgumentError, match="never in fit"):
            function(
                torch.nn.Linear(2, 1),
                [(torch.ones(2, 2), torch.ones(2, 1))],
                loss=torch.nn.functional.mse_loss,
                optimizer=pl.optim.sgd(lr=0.1),
                max_duration="2ba",
                callbacks=[Never()],
            )


def test_a_method_named_bind_of_another_kind_is_refused():
    class Binding(pl.Callback):
        def bind(self, name, value): ...

        def fit_end(self, state, logger): ...

    with pytest.raises(pl.ArgumentTypeError, match=r"bind\(name, value\); it is called with the run"):
        pl.predict(torch.nn.Linear(2, 1), [(torch.ones(2, 2), None)], callbacks=[Binding()])


def test_what_loggers_can_record_beyond_the_common_goes_to_those_that_have_it():
    class Audio(pl.Logger):
        heard = ()

        def log_audio(self, name, samples):
            self.heard = (*self.heard, (name, samples))

    first, second = Audio(), Audio()
    group = LoggerGroup([first, pl.Logger(), second])
    group.log_audio("a", samples=[1])
    assert first.heard == second.heard == (("a", [1]),)
    with pytest.raises(AttributeError, match=r"has a method 'log_metric'; did you mean log_metrics\?"):
        group.log_metric({})
    with pytest.raises(AttributeError, match="no logger of the run has a method 'log_audio'"):
        LoggerGroup().log_audio("a", [1])
    assert not hasattr(group, "audio")


def test_lr_monitor_refuses_what_has_no_rate():
    with pytest.raises(pl.ArgumentTypeError, match="optimizer of the run"):
        LRMonitor(0.1)


def test_monitors_change_no_training():
    optimizer = pl.optim.sgd(lr=0.1)
    torch.manual_seed(0)
    _, alone = run([], strict=True)
    torch.manual_seed(0)
    _, watched = run([SpeedMonitor(), LRMonitor(optimizer)], strict=True, optimizer=optimizer)
    assert all(torch.equal(alone.params[name], watched.params[name]) for name in alone.params)


TWO_LAYERS = (16, 32, 4)
EIGHT_ROWS = [(torch.ones(8, 16), torch.zeros(8, 4))] * 3
FLOPS = 22_528  # 2 * 8 * (16 * 32 + 32 * 4), twice for the weights' gradients, and 2 * 8 * 32 * 4 for the inputs of one


def flops(settings, data=EIGHT_ROWS, **options):
    """The loop reads its clock once a batch, so a batch takes a hundredth of a second."""
    clock, ticks, logger = Clock(), itertools.count(), InMemoryLogger()
    monitor = SpeedMonitor(clock=clock, **settings)
    first, second, third = TWO_LAYERS
    model = torch.nn.Sequential(torch.nn.Linear(first, second), torch.nn.Dropout(), torch.nn.Linear(second, third))
    options = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", **options}
    callbacks, loggers = [monitor], [logger]
    pl.run(
        pl.fit(
            model, data, loss=mse_loss, callbacks=callbacks, loggers=loggers, clock=lambda: next(ticks) / 100, **options
        )
    )
    return logger


WAYS = [{}, {"microbatch_size": 3}, {"precision": "amp_bf16"}, {"precision": "amp_fp16"}, {"donate": True}]
WAYS += [{"compile": True}, {"watch": {pl.Event.EPOCH_END}}]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_flops_are_those_of_a_step(options, interpreted):
    logger = flops({"flops": "count", "peak_flops": 1e7}, **options)
    assert logger.series("speed/flops_per_second")[1] == pytest.approx([100 * FLOPS] * 3)
    assert logger.series("speed/mfu")[1] == pytest.approx([100 * FLOPS / 1e7] * 3)


def test_flops_on_ranks_are_those_of_all():
    def program(rank):
        settings = {"flops": "count", "peak_flops": 1e7}
        logger = flops(settings, parallel="replicate", data=[(torch.ones(16, 16), torch.zeros(16, 4))] * 2)
        return {name: logger.series(name)[1][-1] for name in logger.metrics if name.startswith("speed")}

    first, second = pool().run(program)
    assert second == {}
    expected = {"samples": 1600, "flops": 2 * 100 * FLOPS}  # eight rows on each rank
    for name, value in expected.items():
        assert first[f"speed/{name}_per_second"] == pytest.approx(value)
        assert first[f"speed/device/{name}_per_second"] == pytest.approx(value / 2)
    assert first["speed/mfu"] == pytest.approx(100 * FLOPS / 1e7)


def test_flops_of_each_shape():
    data = [(torch.ones(n, 16), torch.zeros(n, 4)) for n in (8, 4)]
    logger = flops({"window": 1, "flops": "count"}, data=data)
    assert logger.series("speed/flops_per_second")[1] == pytest.approx([100 * FLOPS, 50 * FLOPS])
    assert "speed/mfu" not in logger.metrics  # the peak of this device is not known


@pytest.mark.parametrize("given", [1000, 1e3, lambda batch: 125 * len(batch[0])])
def test_flops_that_are_known(given):
    logger = flops({"flops": given, "peak_flops": 1e6})
    assert logger.series("speed/flops_per_second")[1] == pytest.approx([1e5] * 3)
    assert logger.series("speed/mfu")[1] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("given", ["all", 0, -1.0, float("nan"), True, [], lambda: 1])
def test_wrong_flops_are_refused(given):
    with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match="flops"):
        SpeedMonitor(flops=given)
    if not callable(given):
        with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match="peak_flops"):
            SpeedMonitor(peak_flops=given)


def test_a_script_has_nothing_to_count():
    with pytest.raises(pl.ArgumentError, match="has no task that could be counted"):
        pl.drive((pair for pair in ()), callbacks=[SpeedMonitor(flops="count")])


def test_peaks_are_dense_and_by_precision():
    from pure_loop.callbacks._flops import peak_flops_of

    assert peak_flops_of("NVIDIA H100 80GB HBM3", "amp_bf16") == 989.4e12
    assert peak_flops_of("NVIDIA H100 PCIe", "amp_fp16") == 756e12
    assert peak_flops_of("NVIDIA A100 80GB PCIe", "fp32", tf32=True) == 156e12
    assert peak_flops_of("NVIDIA A100 80GB PCIe", "fp32") == 19.5e12
    assert peak_flops_of("Tesla V100-SXM2-16GB", "amp_bf16") is None
    assert peak_flops_of("Other", "fp32") is None


def test_counting_changes_no_training():
    finals = []
    for callbacks in ([], [SpeedMonitor(flops="count")]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout())
        data = [(torch.rand(n, 16), torch.rand(n, 8)) for n in (8, 4, 8)]
        torch.manual_seed(1)
        optimizer = pl.optim.adam(lr=0.1)
        stream = pl.fit(model, data, loss=mse_loss, optimizer=optimizer, max_duration="2ep", callbacks=callbacks)
        finals.append((pl.run(stream), torch.rand(1)))
    (alone, drawn), (observed, drawn_too) = finals
    equal((alone.params, alone.buffers, alone.opt_state), (observed.params, observed.buffers, observed.opt_state))
    assert torch.equal(drawn, drawn_too)


class Squares(pl.Callback):
    all_ranks = True

    def batch_end(self, state, logger):
        logger.log_metrics({"squares": state.params["0.weight"].square().sum()}, state)


def test_a_sharded_tensor_is_refused_with_what_to_record():
    def program(rank):
        says = r"'squares' is a sharded tensor .* value\.full_tensor\(\)"
        with pytest.raises(pl.ArgumentTypeError, match=says):
            train(mlp(), points(), callbacks=[Squares()], loggers=[InMemoryLogger()], parallel="shard")

    pool(kind="shard").run(program)
