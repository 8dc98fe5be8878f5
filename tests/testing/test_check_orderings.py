"""What the kit says of one algorithm does not depend on what was checked before in the same process (law 14)."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.testing import CheckFailed, Problem, check_algorithm
from pure_loop.testing._surroundings import Surroundings, unchanged
from pure_loop.testing.laws import OF_ALGORITHMS
from pure_loop.testing.ranks import Pool
from tests.conftest import THOROUGH
from tests.support.problem import cross_entropy, points

with pl.random.seeded(0):
    MODEL = nn.Linear(4, 3)
((INPUTS, TARGETS),) = points(1, size=64)
# A model and data that all checks of this process are given: what writes to them would write to those of the next one.
SHARED = Problem(
    name="shared",
    make_model=lambda: MODEL,
    make_batch=lambda samples, generator: (INPUTS[:samples], TARGETS[:samples]),
    loss=cross_entropy,
)
TRIED = {"purity", "determinism", "microbatch_invariance", "memory", "order"}
SKIP = dict.fromkeys({law.name for law in OF_ALGORITHMS} - TRIED, "of another test")


def at(event: Event, do: Callable[[pl.State], Any]) -> Callable[[], pl.Algorithm]:
    def does(state: pl.State) -> pl.State:
        do(state)
        return state

    return lambda: pl.algorithm(event)(does)


def write(tensors: Any) -> None:
    for tensor in tensors:
        tensor.data.add_(1)


PATHOLOGICAL: dict[str, Callable[[], Any]] = {
    "parameters": at(Event.BATCH_END, lambda state: write(state.params.values())),
    "first parameters": at(Event.INIT, lambda state: write(state.params.values())),
    "batch": at(Event.BATCH_START, lambda state: write(state.batch[:1])),
    "default dtype": at(Event.BATCH_START, lambda state: torch.set_default_dtype(torch.float64)),
    "default device": at(Event.BATCH_START, lambda state: torch.set_default_device("meta")),
    "environment": at(Event.BATCH_END, lambda state: os.environ.update(WORLD_SIZE="5", RANK="3", OTHER="1")),
    "grad mode": at(Event.BATCH_END, lambda state: torch.set_grad_enabled(False)),
    "threads": at(Event.BATCH_END, lambda state: torch.set_num_threads(3)),
    "deterministic": at(Event.BATCH_END, lambda state: torch.use_deterministic_algorithms(True)),
    "folder": at(Event.BATCH_END, lambda state: os.chdir(tempfile.gettempdir())),
}
GOOD: dict[str, Callable[[], Any]] = {
    "label smoothing": lambda: pl.algorithms.label_smoothing(0.1),
    # A handler may draw from the global generators: they are seeded by its position, and put back.
    "torch's numbers": at(Event.BATCH_END, lambda state: torch.rand(1)),
    "python's numbers": at(Event.BATCH_END, lambda state: random.random()),
    "numpy's numbers": at(Event.BATCH_END, lambda state: np.random.rand()),
}
ALL = PATHOLOGICAL | GOOD


def verdict(name: str) -> set[str]:
    """The laws that an algorithm breaks."""
    try:
        check_algorithm(ALL[name], problems=SHARED, max_examples=2, skip=SKIP)
    except CheckFailed as failed:
        return {outcome.law for outcome in failed.report.failures}
    return set()


def test_verdicts_do_not_depend_on_what_was_checked_before() -> None:
    """Neighbours: parameters, batches and a model that all have; modes, generators and settings of the process.

    By a shuffle of our own: the kit draws with Hypothesis itself.
    """
    before, model = Surroundings(), {name: each.clone() for name, each in MODEL.state_dict().items()}
    inputs = INPUTS.clone()
    for seed in range(12 if THOROUGH else 1):
        for name in random.Random(seed).sample(sorted(ALL), len(ALL)):
            assert verdict(name) == ({"purity"} if name in PATHOLOGICAL else set()), name
    assert before.changed() is None
    assert all(torch.equal(each, model[name]) for name, each in MODEL.state_dict().items())
    assert torch.equal(INPUTS, inputs)


def test_a_factory_may_change_nothing_and_a_script_finds_its_first_state_as_it_was() -> None:
    def make() -> pl.Algorithm:
        os.environ["OTHER"] = "1"
        return pl.algorithms.label_smoothing(0.1)

    with pytest.raises(CheckFailed, match="the environment variables"):
        check_algorithm(make, problems="linear", max_examples=1)
    assert "OTHER" not in os.environ
    start = pl.State.create(nn.Linear(1, 1))
    weight = start.params["weight"].clone()

    def script(state: pl.State) -> Any:
        write(state.params.values())
        return (yield Event.BATCH_END, state)

    subject = pl.testing.Scripted(script, start)
    seen = [subject.run(pl.testing.Seed(0))[0][1].params["weight"] for _ in range(2)]
    assert torch.equal(torch.stack(seen), torch.stack([weight + 1] * 2))
    assert torch.equal(start.params["weight"], weight)


def spoil() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_float32_matmul_precision("high")
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(99)
    os.environ.update(WORLD_SIZE="9", OTHER="1")
    os.environ.pop("PATH", None)
    os.chdir(tempfile.gettempdir())


def looked_at() -> tuple[Any, ...]:
    modes = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.is_anomaly_enabled()
    more = torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu")
    numbers = torch.rand(3).tolist(), random.random(), np.random.rand()
    return modes, more, torch.get_float32_matmul_precision(), numbers, dict(os.environ), os.getcwd()


def test_what_was_changed_is_put_back() -> None:
    with unchanged():
        before = looked_at()
    with unchanged():
        spoil()
    with unchanged():
        assert looked_at() == before


def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def enters_inference_mode() -> None:
    torch.kept = torch.inference_mode()  # type: ignore[attr-defined]
    torch.kept.__enter__()  # type: ignore[attr-defined]


@pytest.mark.slow  # processes
def test_processes_of_a_pool_are_as_new_for_every_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something can't be put back others take their place; the folder in which it began may be removed."""
    folder = tmp_path / "begun"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with Pool(1, checked=False) as pool:
        pids = pool.run(lambda rank: os.getpid())
        monkeypatch.chdir(tmp_path)
        folder.rmdir()
        new = pool.run(lambda rank: looked_at())
        pool.run(lambda rank: spoil())
        assert pool.run(lambda rank: looked_at()) == new
        assert pool.run(lambda rank: os.getpid()) == pids
        for leave in (leaves_a_thread, enters_inference_mode):
            pool.run(lambda rank, leave=leave: leave())
            assert pool.run(lambda rank: os.getpid()) != pids
            pids = pool.run(lambda rank: os.getpid())
        assert pool.run(lambda rank: torch.is_inference_mode_enabled()) == [False]
