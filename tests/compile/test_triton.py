"""Compiled steps as kernels for a GPU: torch's compiler makes Triton of each graph, and Triton makes machine code.

A GPU isn't needed, only a simulated one: ``make test-simulated-gpu`` where triton is installed, of the version that
goes with torch. What the kernels compute is a matter of test_triton_numbers.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from bench.performance.workloads import WORKLOADS, Workload
from tests.simulated_gpu.lowering import Lowered, lowering
from tests.simulated_gpu.triton_interpreter import IS_ON
from tests.support.compiling import EPOCHS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="torch's compiler makes kernels for a GPU with triton, which is not installed",
    ),
    pytest.mark.skipif(IS_ON, reason="triton interprets what it is to compile: TRITON_INTERPRET=1"),
]

BY_NAME = {workload.name: workload for workload in WORKLOADS}


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path_factory.getbasetemp() / name))


def lowered(workload: Workload, **settings: Any) -> list[Lowered]:
    """The graphs of a short training on the device."""
    count, data = workload.microbatches, workload.data()[:2]
    arguments = {"loss": workload.loss, "optimizer": pl.optim.adamw(lr=1e-3), "max_duration": "1ep", "watch": EPOCHS}
    arguments |= {"microbatch_size": None if count == 1 else len(data[0][0]) // count}
    with lowering() as graphs:
        state = pl.run(pl.fit(workload.model(), data, device="cuda", compile=True, **arguments | settings))
    assert state.timestamp.batch == len(data)
    return graphs


def assert_for_a_gpu(graphs: list[Lowered]) -> None:
    assert graphs
    for graph in graphs:
        assert graph.devices == {"cuda"}
        assert not graph.waits
        assert graph.kernels
        assert graph.kernels.keys() <= set(graph.launches)
        assert all(code.startswith(b"\x7fELF") for codes in graph.kernels.values() for code in codes)


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "amp_bf16"},
    "fp16": {"precision": "amp_fp16"},
    "ema": {"algorithms": [pl.algorithms.ema(half_life="10ba"), pl.algorithms.label_smoothing(0.1)]},
    "sam": {"algorithms": [pl.algorithms.sam()]},
    "several steps": {"steps_per_call": 4},
    "every event": {"watch": None},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_become_machine_code(settings: str) -> None:
    for name in ("W1", "W1a4"):
        assert_for_a_gpu(lowered(BY_NAME[name], **SETTINGS[settings]))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, 10))


def test_steps_that_draw_become_machine_code() -> None:
    """Draws are inputs."""
    assert_for_a_gpu(lowered(Workload("drops", "", with_dropout, BY_NAME["W1"].batch)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [("W2", "fp32"), ("W2", "amp_bf16"), ("W3", "amp_bf16")])
def test_large_steps_become_machine_code(name: str, precision: str) -> None:
    """Minutes of triton's compiler: matrices of other shapes, and convolutions."""
    assert_for_a_gpu(lowered(BY_NAME[name], precision=precision))


def test_a_step_is_few_launches() -> None:
    """With torch 2.13 there are 15, 45 and 34."""
    for name, most in (("W1", 18), ("W1a4", 52), ("W2", 40)):
        (graph,) = lowered(BY_NAME[name])
        assert len(graph.launches) <= most, (name, graph.launches)


def test_waits_are_seen() -> None:
    """The tests above can fail."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.cpu(), targets.cpu())

    (graph,) = lowered(BY_NAME["W1"], loss=loss)
    assert graph.devices == {"cuda", "cpu"}
    assert graph.waits
    with pytest.raises(AssertionError):
        assert_for_a_gpu([graph])
