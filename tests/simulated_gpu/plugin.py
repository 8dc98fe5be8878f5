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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

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


class Stream:
    """What waits for it never waits."""

    device_index = 0

    def __init__(self, device: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event


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

    class Generator:
        """The device's own. A recording that failed leaves it refusing to draw, as in torch 2.11."""

        real = kernels.generator()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def clone_state(self) -> torch.Generator:
            other = torch.Generator()
            other.set_state(self.real.get_state())
            return other

        def graphsafe_set_state(self, other: torch.Generator) -> None:
            self.real.set_state(other.get_state())
            kernels.refuse_drawing(False)

    generator = Generator()
    pools = itertools.count(1)

    class CUDAGraph:
        def replay(self) -> None:
            self.recording.replay()

    class graph:  # noqa: N801 - torch's name
        def __init__(self, cuda_graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> None:
            self.graph = cuda_graph

        def __enter__(self) -> None:
            kernels.begin()

        def __exit__(self, kind: Any, *_: object) -> None:
            self.graph.recording = kernels.end()
            if kind is not None:
                kernels.refuse_drawing(True)

    stream = Stream()
    # Each a function of its own: dynamo keeps a table of these by object.
    simulated: dict[str, Any] = {
        "CUDAGraph": CUDAGraph,
        "Stream": Stream,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: stream,
        "default_generators": (generator,),
        "device": Device,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "a simulated GPU",
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
        "memory_allocated": lambda device=None: kernels.allocated(),
        "set_device": lambda device: None,
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "set_sync_debug_mode": lambda mode: kernels.refuse_waiting(mode == "error"),
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
    }
    for name, value in simulated.items():
        setattr(cuda, name, value)


install()
