"""What is around a function and none of its business: random generators, modes and settings of the process."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Surroundings", "reseeded"]

_READ: dict[str, Callable[[], Any]] = {
    "torch's random generator": lambda: torch.get_rng_state().numpy().tobytes(),
    "CUDA's random generators": lambda: [tensor.numpy().tobytes() for tensor in _cuda()],
    "Python's random generator": random.getstate,
    "NumPy's random generator": lambda: _numpy_random(),
    "the grad mode": torch.is_grad_enabled,
    "the inference mode": torch.is_inference_mode_enabled,
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
    "anomaly detection": torch.is_anomaly_enabled,
    "the switch for deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "the number of threads": torch.get_num_threads,
    "the precision of float32 matrix products": torch.get_float32_matmul_precision,
    "a switch of cuDNN": lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    "the working directory": os.getcwd,
    "the environment variables": lambda: dict(os.environ),
}


_OFTEN = tuple(_READ)[:11]


def _cuda() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def _numpy_random() -> Any:
    if "numpy" not in sys.modules:
        return None
    state = sys.modules["numpy"].random.get_state(legacy=False)
    return {**state, "state": {**state["state"], "key": state["state"]["key"].tobytes()}}


class Surroundings:
    """What they were, to see later what changed.

    >>> before = Surroundings()
    >>> with torch.random.fork_rng(devices=[]):
    ...     _ = torch.rand(1)
    ...     print(before.changed())
    torch's random generator
    """

    def __init__(self) -> None:
        self._before = {name: read() for name, read in _READ.items()}

    def changed(self, *, hastily: bool = False) -> str | None:
        """The first thing that is not what it was; ``hastily``: without the last ones, which take longer to read."""
        names = _OFTEN if hastily else _READ
        return next((name for name in names if _READ[name]() != self._before[name]), None)


@contextmanager
def reseeded(seed: int) -> Iterator[None]:
    """Seeds the global random generators of torch, Python and NumPy, and puts them back on exit."""
    numpy: Any = sys.modules.get("numpy")
    before = torch.get_rng_state(), _cuda(), random.getstate(), numpy and numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    if before[1]:
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        if before[1]:
            torch.cuda.set_rng_state_all(before[1])
        random.setstate(before[2])
        if numpy:
            numpy.random.set_state(before[3])
