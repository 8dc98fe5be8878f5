"""What torch's compiler makes of steps for a GPU: looked at, and not run, so that no GPU is needed.

It needs triton, and ``cuda`` to be there, if only simulated (see :mod:`tests.simulated_gpu`). The kernels are compiled
as far as machine code (the assembler is part of triton); the steps themselves run operation by operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_leaves

from pure_loop.compile import _torch
from pure_loop.compile.compilations import interpret

__all__ = ["Lowered", "lowering", "pretend"]

_SETTINGS: dict[str, Any] = {
    # All of it here and now, and none of it from an earlier run.
    "compile_threads": 1,
    "fx_graph_cache": False,
    "autotune_local_cache": False,
    # Whether matrices are padded is found out by running both.
    "shape_padding": False,
    # Keeps what was compiled, in a form that can be asked about.
    "use_static_triton_launcher": False,
}
_LAUNCH = re.compile(r"\b(\w+)\.run\(|\b(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.\w+)\(")
_WAIT = re.compile(r"\.item\(|\.tolist\(|\.cpu\(|_local_scalar_dense|synchronize|nonzero|_cpu\(|device_put|\.copy_\(")


@attrs.define
class Lowered:
    """One graph, lowered.

    Attributes:
        devices: the types of those that its tensors are on.
        code: the Python that launches its kernels.
        kernels: those of Triton, by name: machine code, for each of the ways to run one that would be tried out.
    """

    devices: frozenset[str]
    code: str = ""
    kernels: dict[str, list[bytes]] = attrs.field(factory=dict)

    @property
    def body(self) -> list[str]:
        """The lines that run at each call."""
        begin = self.code.index("def call(")
        return self.code[begin : self.code.index("\nrunner = ", begin)].splitlines()

    @property
    def launches(self) -> list[str]:
        """What is launched in a call, in order: Triton's kernels, and what isn't."""
        found = (_LAUNCH.search(line) for line in self.body if "reinterpret_tensor" not in line.partition("(")[0])
        return [match[1] or match[2] for match in found if match]

    @property
    def waits(self) -> list[str]:
        """Where a call waits for the device, or copies between it and the host."""
        return [line.strip() for line in self.body if _WAIT.search(line)]


@contextmanager
def lowering() -> Iterator[list[Lowered]]:
    """Inside, the graphs that are made are lowered, and collected; what is called is their operations, one by one."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import _load_triton_kernel_from_source
    from torch._inductor.graph import GraphLowering

    found: list[Lowered] = []
    real = _torch._by_inductor

    class Made:
        """As much of what the compiler gives as is asked for."""

        output_strides = None

        def __init__(self, graph: GraphModule) -> None:
            self.current_callable = interpret(graph)

    def made(graph: GraphModule, examples: list[torch.Tensor], backward: bool | None) -> Made:
        same = _copied(graph)  # lowering writes to it
        found.append(Lowered(_devices(graph)))
        real(graph, examples, backward)
        return Made(same)

    def triton(self: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        kernel = _load_triton_kernel_from_source(name, source)
        kernel.precompile(warm_cache_only=True)
        found[-1].kernels[name] = [each.kernel.asm["cubin"] for each in kernel.compile_results]
        return kernel

    def save(code: str) -> None:
        found[-1].code = code

    with pytest.MonkeyPatch.context() as patch, config.patch(_SETTINGS):
        patch.setattr(_torch, "_by_inductor", made)
        patch.setattr(AsyncCompile, "triton", triton)
        patch.setattr(GraphLowering, "save_output_code", staticmethod(save))
        pretend(patch)
        yield found


def _copied(graph: GraphModule) -> GraphModule:
    copy = Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    return GraphModule(graph, copy)


def _devices(graph: GraphModule) -> frozenset[str]:
    values = (each for node in graph.graph.nodes for each in tree_leaves(node.meta.get("val")))
    return frozenset(each.device.type for each in values if isinstance(each, torch.Tensor))


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Where the device is simulated, be what generated code and Triton look for in torch and in CUDA's driver."""
    if hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    class Driver(CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            GPUDriver.__init__(self)

    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    patch.setattr(driver, "_active", Driver())
