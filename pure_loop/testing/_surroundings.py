"""Random generators, modes and settings of the process, which a function under test may not change."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch

Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object] | None]
"""What reads a setting, and what restores it; None: it can't be restored."""

_SETTINGS: dict[str, Setting] = {
    "torch's random generator": (
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(_bytes(state)),
    ),
    # Those of CUDA can't be restored if CUDA was not initialised before.
    "CUDA's random generators": (
        lambda: [tensor.numpy().tobytes() for tensor in _cuda()],
        lambda states: torch.cuda.set_rng_state_all(list(map(_bytes, states))),
    ),
    "Python's random generator": (random.getstate, random.setstate),
    "NumPy's random generator": (lambda: _numpy_random(), lambda state: _put_back_numpy(state)),
    "the grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the inference mode": (torch.is_inference_mode_enabled, None),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    # None: no default device is set. A set one, even the CPU, slows each call of torch.
    "the default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the switch for deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of float32 matrix products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "a switch of cuDNN": (
        lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        lambda switches: _put_back_cudnn(*switches),
    ),
    "the working directory": (lambda: working_directory(), lambda folder: _go_back_to(folder)),
    "the environment variables": (
        lambda: dict(os.environ),
        lambda variables: _put_back_environment(variables),
    ),
}
# Further settings, which a library may change when it is imported: restored, and never a failure.
_QUIETLY: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    (torch.is_deterministic_algorithms_warn_only_enabled, lambda on: _put_back_warn_only(on)),
    (lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype)),
    (lambda: torch.backends.mkldnn.enabled, lambda on: setattr(torch.backends.mkldnn, "enabled", on)),
    (torch.is_warn_always_enabled, torch.set_warn_always),
)


def working_directory() -> str | None:
    """The working directory of this process; None: it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _go_back_to(folder: str) -> None:
    with suppress(FileNotFoundError):  # it was removed meanwhile
        os.chdir(folder)


def _bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _put_back_numpy(state: dict[str, Any] | None) -> None:
    if state is not None:
        numpy = sys.modules["numpy"]
        key = numpy.frombuffer(state["state"]["key"], dtype=numpy.uint32)
        numpy.random.set_state({**state, "state": {**state["state"], "key": key}})


def _put_back_cudnn(benchmark: bool, deterministic: bool) -> None:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic


def _put_back_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _put_back_warn_only(on: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=on)


_OFTEN = tuple(_SETTINGS)[:11]


def _cuda() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def _numpy_random() -> dict[str, Any] | None:
    if "numpy" not in sys.modules:
        return None
    state = sys.modules["numpy"].random.get_state(legacy=False)
    return {**state, "state": {**state["state"], "key": state["state"]["key"].tobytes()}}


class Surroundings:
    """The values at construction, to find out later what changed.

    >>> before = Surroundings()
    >>> with torch.random.fork_rng(devices=[]):
    ...     _ = torch.rand(1)
    ...     print(before.changed())
    torch's random generator
    """

    def __init__(self) -> None:
        self._before = {name: read() for name, (read, _) in _SETTINGS.items()}
        self._besides = [read() for read, _ in _QUIETLY]

    def changed(self, *, hastily: bool = False) -> str | None:
        """The name of the first setting that changed; ``hastily``: without the last ones, which are slower to read."""
        names = _OFTEN if hastily else _SETTINGS
        return next((name for name in names if _SETTINGS[name][0]() != self._before[name]), None)

    def put_back(self) -> str | None:
        """Restore all settings; returns the name of the first that can't be restored, if there is one."""
        for (read, write), before in zip(_QUIETLY, self._besides, strict=True):
            if read() != before:
                write(before)
        stays = None
        for name, (read, restore) in _SETTINGS.items():
            before = self._before[name]
            if before is None or before == []:
                continue  # it did not exist: NumPy was imported, or CUDA initialised, since
            if read() != before:
                if restore is not None:
                    restore(before)
                if read() != before:
                    stays = stays or name
        return stays


@contextmanager
def unchanged() -> Iterator[None]:
    """Restores on exit all settings that the body changed, so that one subject can't change the result of another.

    >>> with unchanged():
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.get_default_dtype()
    torch.float32
    """
    before, log = Surroundings(), logging.getLogger("pure_loop.fit")
    level = log.level
    log.setLevel(logging.ERROR)  # laws resume runs that have ended, too
    with warnings.catch_warnings():
        try:
            yield
        finally:
            log.setLevel(level)
            before.put_back()


@contextmanager
def reseeded(seed: int) -> Iterator[None]:
    """Seeds the global random generators of torch, Python and NumPy, and restores them on exit."""
    generators = list(_SETTINGS.values())[:4]
    before = [read() for read, _ in generators]
    torch.default_generator.manual_seed(seed)
    if before[1]:  # CUDA is in use
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    try:
        yield
    finally:
        for (_, restore), state in zip(generators, before, strict=True):
            if restore is not None:
                restore(state)
