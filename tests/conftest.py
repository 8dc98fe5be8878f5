"""What all tests share: one thread a process, tiers, graphs compiled or not, and that no process is left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

torch.set_num_threads(1)
# cuBLAS reads it once, before it computes; without it some of a GPU's tests would not be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

THOROUGH = bool(os.environ.get("PURE_LOOP_THOROUGH"))
COMPILER = bool(os.environ.get("PURE_LOOP_COMPILER"))
# `make test-shuffled SEED=3`: files, and the tests of each file, in another order, with other examples of Hypothesis.
SEED = os.environ.get("PURE_LOOP_SEED")

hypothesis.settings.register_profile(
    "fast",
    deadline=None,
    derandomize=SEED is None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile(
    "thorough", parent=hypothesis.settings.get_profile("fast"), derandomize=False, max_examples=3000
)
hypothesis.settings.load_profile("thorough" if THOROUGH else "fast")


# The simulated device can be imported only before torch is.
collect_ignore_glob = ["simulated_gpu/*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    written = [item.nodeid for item in items if re.search(r"\{Event\.\w+, ", item.name)]
    if written:
        raise pytest.UsageError(f"a set is written in another order in each process; give it an id: {written[0]}")
    if SEED is not None:
        _shuffle(items, random.Random(int(SEED)))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and there is none")
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(skip)


def _shuffle(items: list[pytest.Item], draw: random.Random) -> None:
    """Files stay whole, because what the tests of one share is made once."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    names = list(files)
    draw.shuffle(names)
    for tests in files.values():
        draw.shuffle(tests)
    items[:] = [item for name in names for item in files[name]]


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """A shell that starts something in the background has it ignore SIGINT, and so do its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def every_gradient_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of small models are added up as those of large ones, where they are not observed."""
    for user in ("engine", "ownership"):
        monkeypatch.setattr(f"pure_loop.stages.{user}.LARGE", 0)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which of the times that a graph asked for memory it was given copies."""
    from pure_loop.stages.ownership import Ownership

    asked, real = list[bool](), Ownership.writable_or_copies

    def own(this: Ownership, tensors: list[Tensor], alone: Any) -> list[Tensor]:
        memory = real(this, tensors, alone)
        asked.append(memory is not tensors)
        return memory

    monkeypatch.setattr(Ownership, "writable_or_copies", own)
    return asked


@pytest.fixture(params=["small", "large"])
def gradients_of_each_size(request: pytest.FixtureRequest) -> None:
    """Those of small models, and those of large ones."""
    if request.param == "large":
        request.getfixturevalue("every_gradient_is_large")


@pytest.fixture(autouse=True)
def leaves_no_process() -> Iterator[None]:
    yield
    left = multiprocessing.active_children()
    assert not left, f"the test left processes behind: {left}"


_modules = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def collected() -> None:
    """The garbage collector looks at nothing from before this module: torch's compiler alone is 400 000 objects.

    What older modules left is looked at again at each 16th module: to do so at each takes a tenth of all tests' time.
    """
    if next(_modules) % 16 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """Graphs of compiled steps are run as they are, and not compiled, unless it is asked for the compiler."""
    import pure_loop.compile  # with it comes the compiler

    with contextlib.nullcontext() if COMPILER else pure_loop.compile.interpreted():
        yield


@pytest.fixture(scope="session")
def sharded_saves(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with two States in parts, ``older.sharded`` and ``newer.sharded``; not to be changed."""
    from tests.support.sharding import small  # with it comes torch.distributed

    folder = str(tmp_path_factory.mktemp("saved"))
    small(os.path.join(folder, "older.sharded"), batch=1)
    small(os.path.join(folder, "newer.sharded"), batch=2)
    return folder


@pytest.fixture
def sharded_copy(sharded_saves: str, tmp_path: Path) -> str:
    """A copy of that folder, to be damaged."""
    return shutil.copytree(sharded_saves, str(tmp_path / "run"))
