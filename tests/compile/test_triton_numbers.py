"""What Triton's kernels of compiled steps compute: the same as eager steps.

TRITON_INTERPRET=1 python -m pytest -p tests.simulated_gpu.plugin tests/compile/test_triton_numbers.py
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import pure_loop as pl
from pure_loop import Event
from tests.simulated_gpu.triton_interpreter import IS_ON, interpreting
from tests.support.compiling import BATCHES, EPOCHS, FIVE, PROBLEMS, WITH_NAN, assert_close, fit, several
from tests.support.problem import points

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_ON or importlib.util.find_spec("triton") is None, reason="needs triton, and TRITON_INTERPRET=1"
    ),
]

SGD = pl.optim.sgd(lr=pl.schedules.cosine("4ep", peak=0.1), momentum=0.9, weight_decay=0.01)
# In half precision Adam makes whole steps of signs of gradients that are rounding errors.
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "several steps": ({"watch": EPOCHS, "steps_per_call": 4}, 1e-5),
    "inside": ({"watch": {Event.AFTER_FORWARD, Event.AFTER_LOSS}}, 1e-5),
    # None has two samples: of two, a BatchNorm makes 1 and -1, and the gradient of that is rounding error.
    "microbatches": ({"clip_grad": 1.0, "microbatch_size": 4, "data": points(size=(8, 8, 7), seed=1)}, 1e-5),
    "algorithms": ({"algorithms": several()}, 1e-5),
    "sam": ({"algorithms": [pl.algorithms.sam()]}, 1e-5),
    "skip": ({"nonfinite": "skip", "data": WITH_NAN}, 1e-5),
    "embedding": (PROBLEMS["mappings, and a loss of its own"], 1e-5),
    "amsgrad": ({"optimizer": pl.optim.adam(lr=0.01, amsgrad=True, weight_decay=0.01)}, 1e-5),
    "bf16": ({"precision": "amp_bf16", "optimizer": SGD, "max_duration": "1ep"}, 3e-2),
    "fp16": ({"precision": "amp_fp16", "optimizer": SGD, "max_duration": "1ep"}, 3e-3),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_kernels_compute_what_eager_steps_do(name: str) -> None:
    settings, tolerance = SETTINGS[name]
    settings = {"data": FIVE[:4], "device": "cuda", "watch": BATCHES} | settings
    steps_per_call = settings.pop("steps_per_call", 1)
    eager = fit(**settings)
    with interpreting() as launched:
        compiled = fit(compile=True, steps_per_call=steps_per_call, **settings)
    assert launched
    assert_close(compiled, eager, tolerance)
