"""Monitors of rates, speed, time, gradients, activations, memory and the machine, against values by hand."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop import callbacks as C
from pure_loop.callbacks.activation_monitor import STATISTICS
from pure_loop.callbacks.memory_monitor import _of_allocator
from pure_loop.callbacks.speed_monitor import peak_flops_of
from pure_loop.errors import ArgumentError, MissingExtraError
from pure_loop.loggers import InMemoryLogger
from tests.support.problem import LR, cross_entropy, fit, mlp, points, run
from tests.support.worlds import KINDS, pool

WATCHED = {"watch": {Event.EPOCH_END}}


def measured(monitor: Any, model: Any = None, data: Any = None, **options: Any) -> dict[int, dict[str, float]]:
    """What is recorded by batch, but for what fit records itself."""
    logger = InMemoryLogger()
    settings = {"max_duration": "1ep", "strict": False, **options}
    run(model, data, callbacks=[monitor], loggers=[logger], **settings)
    found: dict[int, dict[str, float]] = {}
    for name in logger.metrics:
        if not name.startswith("train/"):
            for batch, value in zip(*logger.series(name), strict=True):
                found.setdefault(batch, {})[name] = value
    return found


def timed(
    monitor: Any, seconds: Any, evaluation: float = 0.0, start: Any = None, data: Any = None, **o: Any
) -> tuple[dict[str, dict[int, float]], pl.State]:
    """What is recorded by name and batch, where batches take these seconds and an evaluation of one ``evaluation``."""
    now, logger = [0.0], InMemoryLogger()
    settings = {"max_duration": "1ep", "strict": False, "clock": lambda: now[0], "loggers": [logger], **o}
    for event, state in fit(start, data or points(4), callbacks=[monitor(lambda: now[0])], **settings):
        now[0] += seconds[state.timestamp.batch % 4] * (event is Event.BATCH_START)
        now[0] += evaluation * (event is Event.EVAL_BATCH_START)
    return {name: dict(zip(*logger.series(name), strict=True)) for name in logger.metrics}, state


# Rates, speed and time


def test_rates_are_those_that_the_batch_uses() -> None:
    """Of the run, or of an optimizer that is given, as scripts of one's own do."""
    for given, rate, expected in (
        (None, pl.schedules.linear(1.0, 0.0, "4ba"), [1.0, 0.75, 0.5]),
        (pl.optim.sgd(lr=0.25), 0.5, [0.25] * 3),
    ):
        found = measured(C.LRMonitor(given, name="rate"), optimizer=pl.optim.sgd(lr=rate))
        assert [values["rate"] for values in found.values()] == expected


def test_speed_is_a_mean_over_the_window_without_evaluations() -> None:
    options: dict[str, Any] = {"evaluators": {"val": points(1)}, "eval_interval": "1ba"}
    options["loss"] = pl.Task(loss=lambda o, b: cross_entropy(o, b[1]), tokens=lambda b: 10)
    monitor, data = lambda clock: C.SpeedMonitor(window=2, clock=clock), points(size=(4, 4, 2, 4))
    found, _ = timed(monitor, [1.0, 3.0, 1.0, 4.0], 7.0, data=data, **options)
    for name, expected in (("samples", [4, 8 / 4, 6 / 4, 6 / 5]), ("batches", [1, 2 / 4, 2 / 4, 2 / 5])):
        assert [*found[f"speed/{name}_per_second"].values()] == expected
    assert [*found["speed/tokens_per_second"].values()] == [10, 20 / 4, 20 / 4, 20 / 5]
    still, _ = timed(lambda clock: C.SpeedMonitor(clock=clock), [0.0] * 4)
    assert not any(name.startswith("speed") for name in still), "a clock that stands still"
    used = C.SpeedMonitor(window=50)
    runs = [timed(lambda _: used, [seconds] * 4)[0] for seconds in (4.0, 1.0)]
    assert [each["speed/samples_per_second"][1] for each in runs] == [1.0, 4.0], "a second run has a new window"


FLOPS = 22_528  # 2 * 8 * (16 * 32 + 32 * 4), twice for the weights' gradients, and 2 * 8 * 32 * 4 for the inputs of one


def flops(rows: tuple[int, ...] = (8, 8, 8), options: Any = None, **settings: Any) -> dict[str, list[float]]:
    """The loop reads its clock once a batch, so a batch takes a hundredth of a second."""
    ticks = itertools.count()
    data = [(torch.ones(n, 16), torch.zeros(n, 4)) for n in rows]
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 4))
    given = {"loss": mse_loss, "clock": lambda: next(ticks) / 100, **(options or {})}
    found = measured(C.SpeedMonitor(clock=lambda: 0.0, **settings), model, data, **given)
    names = {name for values in found.values() for name in values if "speed" in name}
    return {name.removeprefix("speed/"): [values[name] for values in found.values()] for name in names}


@pytest.mark.parametrize(
    "options", [{"microbatch_size": 3}, {"precision": "amp_bf16"}, {"compile": True}, WATCHED], ids=str
)
def test_flops_are_those_of_a_step(options: Any, interpreted: None) -> None:
    found = flops(options=options, flops="count", peak_flops=1e7)
    assert found["flops_per_second"] == pytest.approx([100 * FLOPS] * 3)
    assert found["mfu"] == pytest.approx([100 * FLOPS / 1e7] * 3)


def test_flops_of_shapes_of_functions_of_ranks_and_of_devices() -> None:
    found = flops((8, 4), window=1, flops="count")
    assert found["flops_per_second"] == pytest.approx([100 * FLOPS, 50 * FLOPS])
    assert "mfu" not in found, "the peak of this device is not known"
    for given in (1000, lambda batch: 125 * len(batch[0])):
        found = flops(flops=given, peak_flops=1e6)
        assert (found["flops_per_second"], found["mfu"]) == (pytest.approx([1e5] * 3), pytest.approx([0.1] * 3))
    first, second = pool().run(lambda rank: flops((16, 16), {"parallel": "replicate"}, flops="count", peak_flops=1e7))
    assert second == {}
    for name, value in {"samples": 1600, "flops": 2 * 100 * FLOPS}.items():  # eight rows on each rank
        assert first[f"{name}_per_second"][-1] == pytest.approx(value)
        assert first[f"device/{name}_per_second"][-1] == pytest.approx(value / 2)
    assert first["mfu"][-1] == pytest.approx(100 * FLOPS / 1e7)
    for device, precision, tf32, peak in (
        ("NVIDIA H100 80GB HBM3", "amp_bf16", False, 989.4e12),
        ("NVIDIA A100 80GB PCIe", "fp32", True, 156e12),
        ("NVIDIA A100 80GB PCIe", "fp32", False, 19.5e12),
        ("Tesla V100-SXM2-16GB", "amp_bf16", False, None),
    ):
        assert peak_flops_of(device, precision, tf32=tf32) == peak


EVERY: dict[str, Any] = {"evaluators": points(1), "eval_interval": "1ba"}
TWO = {"a": points(1), "b": pl.Evaluator(points(2), interval="2ba")}
LEFT: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    "a quarter in 100 s": ({}, {1: 300, 2: 200, 3: 100, 4: 0}),
    # At the first BATCH_END no evaluation was measured; at the second one of 10 s was, and three are left.
    "evaluations": (EVERY, {1: 300, 2: 230, 3: 120, 4: 10}),
    # At batch 3: evaluations of a at 3 and 4, and of b at 4, with 20 s for its two batches.
    "several evaluators": ({"evaluators": TWO, "eval_interval": "1ba"}, {1: 300, 2: 230, 3: 140, 4: 30}),
    "the last batch": ({"evaluators": points(1), "eval_interval": "3ba"}, {1: 300, 2: 200, 3: 100, 4: 10}),
    "seconds": ({"max_duration": "350s"}, {1: 250, 2: 150, 3: 50, 4: 0}),
    "unknown": ({"max_duration": "2ep", "data": type("Endless", (), {"__iter__": lambda _: iter(points())})()}, {6: 0}),
}


@pytest.mark.parametrize("name", LEFT)
def test_time_left_is_by_hand(name: str) -> None:
    def left(start: Any = None, interval: str = "1ba", **options: Any) -> Any:
        return timed(lambda clock: C.TimeLeft(interval, clock=clock), [100.0] * 4, 10.0, start, **options)

    options, expected = LEFT[name]
    found = left(**options)[0]["time/left"]
    assert found == pytest.approx(expected) if name != "unknown" else found[6] == 0
    if name == "evaluations":
        assert left(interval="1ep", max_duration="2ep")[0]["time/left"] == {4: 400, 8: 0}
        half, whole = (left(**EVERY, max_duration=duration) for duration in ("2ba", "2ep"))
        resumed = left(half[1], **EVERY, max_duration="2ep")[0]["time/left"]
        assert resumed[5] == pytest.approx(whole[0]["time/left"][5], rel=0.03)
        assert resumed.keys() == {3, 4, 5, 6, 7, 8}, "at once"


# Gradients

GROUPS = ("parameters", "updates", "moments")


def norm(tensors: Any) -> float:
    return float(torch.cat([tensor.detach().double().flatten() for tensor in tensors]).norm())


def by_hand(limit: float) -> list[dict[str, float]]:
    """What a plain loop measures at each batch."""
    module, found = mlp(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for inputs, targets in points():
        optimizer.zero_grad()
        cross_entropy(module(inputs), targets).backward()
        named = dict(module.named_parameters())
        values = {"gradients/norm_before_clipping": float(nn.utils.clip_grad_norm_(module.parameters(), limit))}
        before = {name: p.detach().clone() for name, p in named.items()}
        optimizer.step()
        for suffix, names in {"": list(named), **{f"/{name}": [name] for name in named}}.items():
            parts = [named[name] for name in names]
            update = norm(named[name] - before[name] for name in names)
            values |= {f"gradients/norm{suffix}": norm(p.grad for p in parts), f"parameters/norm{suffix}": norm(parts)}
            values |= {f"updates/norm{suffix}": update, f"updates/ratio{suffix}": update / norm(parts)}
        found.append({**values, "updates/cosine": -1.0})
    return found


WAYS: dict[str, dict[str, Any]] = {
    "strict": {"strict": True, "clip_grad": 0.05},
    "microbatches": {"microbatch_size": 3, "clip_grad": 0.05},
    "donated": {"donate": True, "clip_grad": 0.05},
    "one event watched": {"clip_grad": 0.05, "order": "2021", **WATCHED},
    "compiled": {"compile": True, "clip_grad": 0.05},
    "clipped by an algorithm": {"algorithms": [pl.algorithms.gradient_clipping("norm", 0.05)]},
    "not clipped": {},
    **{kind: {"parallel": kind, "clip_grad": 0.05} for kind in KINDS},
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_and_updates_are_those_of_a_plain_loop(way: str, interpreted: None) -> None:
    """And on ranks, of which the first alone records."""
    monitor, options = C.GradMonitor("1ba", per_layer=True), WAYS[way]
    if way in KINDS:
        found, second = pool(kind=way).run(lambda rank: measured(monitor, **options))
        assert second == {}
    else:
        found = measured(monitor, **options)
    assert list(found) == [1, 2, 3]
    for batch, values in enumerate(by_hand(1e9 if way == "not clipped" else 0.05), 1):
        assert found[batch] == pytest.approx(values, rel=1e-3, abs=1e-5)


def test_moments_groups_intervals_and_gradients_that_there_are_not() -> None:
    def first(model: Any = None, data: Any = None, groups: Any = None, **options: Any) -> dict[str, float]:
        return measured(C.GradMonitor("1ba", **groups or {}), model, data, max_duration="1ba", **options)[1]

    adam = pl.optim.adam(lr=LR)
    everything, gradients = (first(optimizer=adam, groups=only) for only in ({}, dict.fromkeys(GROUPS, False)))
    assert everything["moments/norm/exp_avg"] == pytest.approx(0.1 * everything["gradients/norm"], rel=1e-4)
    assert {name.partition("/")[0] for name in everything} == {"gradients", *GROUPS}
    assert gradients == pytest.approx({n: v for n, v in everything.items() if n.startswith("gradients/")})
    clipped = first(algorithms=[pl.algorithms.gradient_clipping("value", 0.001)])
    assert clipped["gradients/norm_before_clipping"] == pytest.approx(by_hand(1e9)[0]["gradients/norm"], rel=1e-4)
    assert clipped["gradients/norm"] < 0.1 * clipped["gradients/norm_before_clipping"]
    intervals: dict[Any, list[int]] = {"2ba": [2, 4, 6], "0.5dur": [3, 6], "1ep": [4], "8sp": [3, 5]}
    for interval, batches in {**intervals, lambda state: state.timestamp.batch % 4 == 3: [3]}.items():
        assert [*measured(C.GradMonitor(interval), max_duration="2ep")] == batches
    half = nn.ModuleDict({"used": mlp(), "unused": nn.Linear(4, 3)})
    task = pl.Task(forward=lambda m, b: m["used"](b[0]), loss=lambda o, b: cross_entropy(o, b[1]))
    sparse = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    words: Any = [(torch.tensor([[0, 1], [1, 5]]), torch.tensor([0, 2]))]
    own = first(sparse, words, optimizer=pl.optim.from_torch(torch.optim.SGD, lr=LR))
    momentum = first(optimizer=pl.optim.from_torch(torch.optim.SGD, lr=LR, momentum=0.9))
    assert {name for name in momentum if "moments" in name} == {"moments/norm/momentum_buffer"}
    found = first(half, groups={"per_layer": True}, loss=task)
    assert "gradients/norm/unused.weight" not in found
    assert found["updates/norm/unused.weight"] == 0.0
    assert [each["updates/cosine"] for each in (found, own)] == pytest.approx([-1.0, -1.0], abs=1e-5)


# Activations


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"compile": True}, WATCHED])
def test_activations_are_of_the_parameters_before_the_step(options: Any, interpreted: None) -> None:
    found = measured(C.ActivationMonitor("1ba", statistics=tuple(STATISTICS)), **options)
    module: Any = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for number, (inputs, targets) in enumerate(points(), 1):
        hidden = module[1](module[0](inputs))
        outputs = module[2](hidden)
        for name, tensor in {"1": hidden.detach(), "2": outputs.detach()}.items():
            centred = (tensor - tensor.mean()).double()
            expected = {
                "norm": tensor.norm(dim=1).mean(),
                "mean": tensor.mean(),
                "kurtosis": centred.pow(4).mean() / centred.square().mean() ** 2,
                "max": tensor.max(),
                "zeros": (tensor == 0).double().mean(),
            }
            for statistic, value in expected.items():
                wanted = pytest.approx(float(value), rel=1e-3, abs=1e-6)
                assert found[number][f"activations/{statistic}/{name}"] == wanted, statistic
        optimizer.zero_grad()
        cross_entropy(outputs, targets).backward()
        optimizer.step()


class Seen(nn.Module):
    """Keeps the largest output of a dropout in every forward, outside of the State; returns several tensors inside."""

    seen: list[float] = []  # noqa: RUF012 - what all copies of the module share

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.dropout, self.head = nn.LSTM(4, 32, batch_first=True), nn.Dropout(0.5), nn.Linear(32, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        dropped = self.dropout(self.lstm(inputs[:, None])[0][:, 0])
        self.seen.append(float(dropped.detach().max()))
        return self.head(dropped)  # type: ignore[no-any-return]


def test_activations_are_those_of_the_step_with_its_random_numbers() -> None:
    model = Seen()
    for options in ({}, {"microbatch_size": 2}, {"precision": "amp_bf16"}):
        Seen.seen.clear()
        run(model, max_duration="1ep", seed=5, strict=False, **options)
        of_steps = Seen.seen[:: len(Seen.seen) // 3]
        found = measured(C.ActivationMonitor("1ba", only="dropout", statistics=["max"]), model, seed=5, **options)
        assert [values["activations/max/dropout"] for values in found.values()] == pytest.approx(of_steps, rel=1e-6)


def test_which_activations_are_measured() -> None:
    names = {f"activations/mean/{name}" for name in ("lstm/0", "lstm/1", "lstm/2", "dropout", "head")}
    assert measured(C.ActivationMonitor("1ba", statistics=["mean"]), Seen())[1].keys() == names
    model = nn.Sequential(mlp(), nn.Identity())
    for only, expected in {"0": {"0"}, "0.?": {"0.0", "0.1", "0.2"}, ("1", "0.2"): {"1", "0.2"}}.items():
        found = measured(C.ActivationMonitor("3ba", only=only, statistics=["max"]), model)[3]
        assert found.keys() == {f"activations/max/{name}" for name in expected}
    with pytest.raises(ArgumentError, match=r"only='layer'\): no module has such a name; there are 0, 0\.0, 0\.1"):
        measured(C.ActivationMonitor(only="layer"), model)
    doubled = pl.Algorithm("d", {Event.BEFORE_TRAIN_BATCH: lambda s: s.replace(batch=(2 * s.batch[0], s.batch[1]))})
    flat = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    found = measured(C.ActivationMonitor("1ba", only="0", statistics=["max"]), flat, algorithms=[doubled])
    assert [v["activations/max/0"] for v in found.values()] == [2 * float(x.max()) for x, _ in points()]


# Memory and the machine


def test_memory_is_that_of_the_process_and_of_ranks_together() -> None:
    held, name = list[Tensor](), "memory/resident_bytes"
    take = pl.Algorithm("take", {Event.BATCH_START: lambda s: held.append(torch.ones(2**25)) or s})  # 128 MiB
    before, found = psutil.Process().memory_info().rss, measured(C.MemoryMonitor("1ba"), algorithms=[take])
    assert 0.5 * before < found[1][name] < 2 * before + 2**28
    assert found[2][name] - found[1][name] > 100 * 2**20

    def program(rank: int) -> Any:
        monitors = [C.MemoryMonitor("2ba", all_ranks=together) for together in (False, True)]
        return [measured(monitor, None, points(4), parallel="replicate") for monitor in monitors]

    (alone, together), nothing = pool().run(program)
    assert nothing == [{}, {}]
    assert alone.keys() == together.keys() == {2, 4}
    for batch, values in together.items():
        least, mean, most = (values[f"{name}/{what}"] for what in ("min", "mean", "max"))
        assert mean == pytest.approx((least + most) / 2)
        assert alone[batch].keys() == {name}


def test_statistics_of_an_allocator_and_snapshots_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = itertools.product([f"{name}_bytes" for name in ("allocated", "active", "reserved")], ("", "_peak"))
    given, expected = {"num_alloc_retries": 7, "num_ooms": 1}, {"allocation_retries": 7, "out_of_memory_errors": 1}
    for value, (kind, what) in enumerate(kinds):
        given[f"{kind}.all.{what[1:] or 'current'}"] = expected[kind + what] = value
    assert _of_allocator(given) == {f"memory/{name}": value for name, value in expected.items()}
    assert set(_of_allocator({}).values()) == {0}
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="the model is on cpu, which has none: leave it out; MemoryMonitor"):
            run(callbacks=[C.MemorySnapshot(tmp_path)])
        assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "psutil", None)
    for make in (C.MemoryMonitor, C.SystemMonitor):
        with pytest.raises(MissingExtraError, match=r"pip install 'pure_loop\[system\]'"):
            make()


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.cuda is None, reason="the simulated GPU has no history of its memory")
def test_a_snapshot_of_some_batches_and_of_an_error(tmp_path: Path) -> None:
    snapshot = C.MemorySnapshot(tmp_path, start="1ba", length="2ba")
    run(mlp().cuda(), points(5), callbacks=[snapshot], device="cuda")
    assert [path.name for path in tmp_path.iterdir()] == ["memory-rank0-ba3.pickle"]
    callbacks = [C.MemorySnapshot(tmp_path), lambda event, state: torch.ones(2**60, device="cuda")]
    with pytest.raises(torch.OutOfMemoryError):
        run(mlp().cuda(), callbacks=callbacks, device="cuda")
    assert (tmp_path / "memory-rank0-oom.pickle").stat().st_size > 0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pure_loop-system"]


def test_the_machine_is_sampled_in_a_thread_that_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is left, and where the thread fails, too."""
    logger = InMemoryLogger()
    for event, _ in fit(None, points(6), callbacks=[C.SystemMonitor("0.05s")], loggers=[logger]):
        if event is Event.BATCH_START:
            assert len(threads()) == 1
            time.sleep(0.03)
    assert 3 <= len(logger.series("system/process/cpu_percent")[0]) <= 12
    assert 0 < min(logger.series("system/memory_percent")[1]) < 100
    assert min(logger.series("system/process/resident_bytes")[1]) > 2**20
    assert "system/memory_percent" in measured(C.SystemMonitor())[3], "a short run has one sample"
    pairs = fit(callbacks=[C.SystemMonitor()])
    assert any(event is Event.FIT_START and threads() for event, _ in pairs)
    pairs.close()
    assert not threads()

    def refuse() -> Any:
        raise PermissionError("no statistics of memory here")

    def wait(event: Event, state: pl.State) -> None:
        until = time.monotonic() + 10
        while event is Event.BATCH_START and threads() and time.monotonic() < until:
            time.sleep(0.01)  # the thread ends with its error

    monitor = C.SystemMonitor("0.01s")
    monkeypatch.setattr("psutil.virtual_memory", refuse)
    with pytest.raises(PermissionError, match="no statistics of memory here"):
        run(callbacks=[monitor, wait])
    assert not threads()
