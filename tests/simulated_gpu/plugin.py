"""For pytest, before anything imports torch: ``pytest -p tests.simulated_gpu.plugin -m gpu``.

What it is compiled against is private to torch: it fits the version that the development constraints pin.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakSet

HERE = Path(__file__).parent


def _torch() -> Path:
    """Where torch is, which isn't imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def built(name: str, *libraries: str) -> Path:
    """The module of this name, compiled if no earlier run has."""
    source, torch = HERE / f"{name}.cpp", _torch()
    include = torch / "include"
    command = [
        *(os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-std=c++20", "-O1", "-w", str(source)),
        *(f"-I{each}" for each in (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))),
        f"-DTORCH_EXTENSION_NAME={name}",
        *(f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"),
        *(f"-l{each}" for each in ("c10", "torch_cpu", "torch", *libraries)),
    ]
    key = hashlib.sha256(source.read_bytes() + str((command, sys.version)).encode()).hexdigest()[:16]
    folder = HERE.parents[1] / ".simulated_gpu" / key
    made = folder / f"{name}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may be about to make it, too.
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as file:
            subprocess.run([*command, "-o", file.name], check=True)
        Path(file.name).rename(made)
    return made


def loaded(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What a compiler asks of a device: an H100 has so many of each.
PROPERTIES = SimpleNamespace(
    name="a simulated GPU",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    total_memory=80 << 30,
    gcnArchName="",
)


class Stream:
    """What waits for it never waits."""

    device_index = 0

    def __init__(self, device: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event


class Timed:
    """An event: what is recorded is over at once."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Timed) -> float:
        return 1e3 * (other.at - self.at)


class Current(threading.local):
    """The stream of a thread."""

    stream = Stream()


class On:
    """Makes a stream the thread's."""

    current = Current()

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before, self.current.stream = self.current.stream, self.stream

    def __exit__(self, *_: object) -> None:
        self.current.stream = self.before


class Device:
    """Would make one current, and there is but one."""

    def __init__(self, device: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def install() -> None:
    """Make torch.cuda that of the simulated device."""
    assert "torch" not in sys.modules, "torch was imported before the device that it is to find"
    assert not list((_torch() / "lib").glob("*torch_cuda*")), "this torch knows GPUs: run the tests without the plugin"
    loaded("device", built("device"))
    import torch

    kernels = loaded("kernels", built("kernels", "torch_python"))
    cuda: Any = torch.cuda

    class GeneratorState:
        """What a generator has, and graphs are registered with: they take it for recording as long as it says so."""

        def __init__(self, numbers: torch.Tensor) -> None:
            self.numbers = numbers
            self.capturing = False

    class Reference:
        """A generator that shares its state with another one."""

        def __init__(self, state: GeneratorState, numbers: torch.Tensor) -> None:
            self.state = state
            self.numbers = numbers

        def clone_state(self) -> Reference:
            return Reference(GeneratorState(self.numbers), self.numbers)

    class Generator:
        """The device's own. A recording that failed leaves its state refusing to draw, as in torch 2.11."""

        real = kernels.generator()
        state = GeneratorState(real.get_state())

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def graphsafe_get_state(self) -> Reference:
            return Reference(self.state, self.real.get_state())

        def clone_state(self) -> Reference:
            return self.graphsafe_get_state().clone_state()

        def graphsafe_set_state(self, other: Reference) -> None:
            self.state.numbers = self.real.get_state()
            self.state = other.state
            self.real.set_state(other.state.numbers)
            kernels.refuse_drawing(other.state.capturing)

    generator = Generator()
    pools = itertools.count(1)
    # Where torch's allocator takes memory from until it is told to stop, and which blocks are in use there.
    underway: set[Any] = set()
    recorded: dict[Any, WeakSet[Any]] = {}

    class CUDAGraph:
        def replay(self) -> None:
            if self.state.capturing:
                raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
            self.recording.replay()

    class graph:  # noqa: N801 - torch's name
        def __init__(self, cuda_graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> None:
            self.graph, self.pool = cuda_graph, pool

        def __enter__(self) -> None:
            if self.pool in underway:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            if self.pool in recorded and not recorded[self.pool]:
                raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
            recorded.setdefault(self.pool, WeakSet()).add(self.graph)
            underway.add(self.pool)
            self.graph.state = generator.state
            generator.state.capturing = True
            kernels.begin()

        def __exit__(self, kind: Any, *_: object) -> None:
            self.graph.recording = kernels.end()
            if kind is not None:  # and the rest isn't done, as in torch 2.11
                kernels.refuse_drawing(True)
                return
            underway.remove(self.pool)
            generator.state.capturing = False

    def end_allocating(device: int, pool: Any) -> None:
        if pool not in underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        underway.remove(pool)

    torch._C._cuda_endAllocateToPool = end_allocating  # type: ignore[attr-defined]

    # Tensors that were handed to other processes, of which there are none: all lie in one allocation.
    sent: dict[int, Any] = {}

    def share(storage: Any) -> tuple[Any, ...]:
        sent[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage)  # so that no other is there
        return 0, b"allocation", storage.nbytes(), storage.data_ptr(), b"counter", 0, b"event", False

    untyped, builtin = cast(Any, torch.UntypedStorage), cast(Any, torch._C)
    untyped._share_cuda_ = share
    builtin._has_Standard_Deleter = lambda pointer: pointer not in sent
    warned: list[str] = []

    def set_sync_debug_mode(mode: str | int) -> None:
        if not warned:  # as torch does, once a process
            text = (
                "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
            )
            warned.append(text)
            warnings.warn(text, UserWarning, stacklevel=2)
        kernels.refuse_waiting(mode == "error")

    # Each a function of its own: dynamo keeps a table of these by object.
    simulated: dict[str, Any] = {
        "CUDAGraph": CUDAGraph,
        "Event": Timed,
        "Stream": Stream,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: On.current.stream,
        "default_generators": (generator,),
        "device": Device,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "graph": graph,
        "graph_pool_handle": lambda: (0, next(pools)),
        "init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: generator.manual_seed(seed),
        "manual_seed_all": lambda seed: generator.manual_seed(seed),
        "max_memory_allocated": lambda device=None: kernels.allocated(),
        "max_memory_reserved": lambda device=None: kernels.allocated(),
        "memory_allocated": lambda device=None: kernels.allocated(),
        "reset_peak_memory_stats": lambda device=None: None,
        "set_device": lambda device: None,
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "set_sync_debug_mode": set_sync_debug_mode,
        "stream": lambda stream: On(stream),
        "synchronize": lambda device=None: kernels.finish_copies(),
        "_sleep": lambda cycles: None,
    }
    for name, value in simulated.items():
        setattr(cuda, name, value)


install()
