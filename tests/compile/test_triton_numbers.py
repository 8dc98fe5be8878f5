"""What Triton's kernels of compiled steps compute: the same as eager steps.

TRITON_INTERPRET=1 python -m pytest -p tests.simulated_gpu.plugin tests/compile/test_triton_numbers.py
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import pure_loop as pl
from pure_loop import Event
from tests.support.compiling import (
    BATCHES,
    EPOCHS,
    MICROBATCHES,
    WITH_NAN,
    Named,
    assert_close,
    fit,
    named_batches,
    several,
)
from tests.support.models import batches
from tests.support.triton_interpreter import IS_ON, interpreting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_ON or importlib.util.find_spec("triton") is None,
        reason="needs triton, and TRITON_INTERPRET=1",
    ),
]

SGD = pl.optim.sgd(lr=pl.schedules.cosine("4ep", peak=0.1), momentum=0.9, weight_decay=0.01)
SETTINGS: dict[str, dict[str, Any]] = {
    "each batch": {"watch": BATCHES},
    "each epoch": {"watch": EPOCHS},
    "several steps": {"watch": EPOCHS, "steps_per_call": 4},
    "inside": {"watch": {Event.AFTER_FORWARD, Event.AFTER_LOSS}},
    "microbatches": {"watch": BATCHES, "clip_grad": 1.0, **MICROBATCHES},
    "algorithms": {"watch": BATCHES, "algorithms": several()},
    "sam": {"watch": BATCHES, "algorithms": [pl.algorithms.sam()]},
    "skip": {"watch": BATCHES, "nonfinite": "skip", "data": WITH_NAN},
    "sgd": {"watch": BATCHES, "optimizer": SGD},
    "embedding": {"watch": BATCHES, "model": Named, "data": named_batches(), "loss": None},
    "amsgrad": {"watch": BATCHES, "optimizer": pl.optim.adam(lr=0.01, amsgrad=True, weight_decay=0.01)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_kernels_compute_what_eager_steps_do(name: str) -> None:
    settings = {"data": batches((8,) * 4, 1), "max_duration": "2ep", "device": "cuda", **SETTINGS[name]}
    steps_per_call = settings.pop("steps_per_call", 1)
    eager = fit(**settings)
    with interpreting() as launched:
        compiled = fit(compile=True, steps_per_call=steps_per_call, **settings)
    assert launched
    assert_close(compiled, eager, 1e-5)


# By signs of gradients that are rounding errors Adam makes whole steps.
@pytest.mark.parametrize(("precision", "tolerance"), [("amp_bf16", 3e-2), ("amp_fp16", 3e-3)])
def test_kernels_in_half_precision(precision: str, tolerance: float) -> None:
    settings: dict[str, Any] = {"data": batches((8,) * 4, 1), "max_duration": "1ep", "device": "cuda"}
    settings |= {"watch": BATCHES, "precision": precision, "optimizer": SGD}
    eager = fit(**settings)
    with interpreting():
        compiled = fit(compile=True, **settings)
    assert_close(compiled, eager, tolerance)
