"""Runs the kernels that torch's compiler makes for a GPU by Triton's interpreter, on a simulated GPU.

Triton asks for ``TRITON_INTERPRET=1`` when it is imported, so that a process does this, or compiles. The programs of a
kernel run one after the other, in NumPy: this says nothing of races between them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.simulated_gpu.lowering import pretend

__all__ = ["IS_ON", "interpreting"]

IS_ON = os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def interpreting() -> Iterator[list[str]]:
    """Inside, compiled steps launch kernels that are interpreted; gives their names, as they are launched."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import _load_triton_kernel_from_source
    from torch._inductor.runtime import triton_helpers

    launched: list[str] = []

    def triton(self: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        return _Kernel(_load_triton_kernel_from_source(name, source), lambda: launched.append(name))

    guards = torch._C._dynamo.guards
    with pytest.MonkeyPatch.context() as patch, config.patch(compile_threads=1, shape_padding=False):
        patch.setattr(AsyncCompile, "triton", triton)
        patch.setattr(triton_helpers, "libdevice", _Libdevice())
        patch.setattr("triton.runtime.interpreter._convert_float", _rounding())
        patch.setattr("torch.cuda._DeviceGuard", lambda index: nullcontext())
        patch.setattr(guards, "_empty_strided_cuda", _empty)
        pretend(patch)
        # What runs by addresses on the host can't be recorded.
        patch.setattr("pure_loop.compile.replay.Recorders.of", lambda self, device: None)
        yield launched


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


class _Kernel:
    """A kernel in the first of the ways to run it."""

    def __init__(self, tuner: Any, note: Callable[[], None]) -> None:
        self._tuner = tuner
        self._config = tuner.configs[0]
        self._note = note

    def run(self, *given: Any, stream: int) -> None:
        self._note()
        given, grid = self._tuner._interpret_args_grid(given, self._config)
        with np.errstate(all="ignore"):
            self._tuner.fn[grid](*[_on_host(each) for each in given], **self._config.kwargs)


def _on_host(value: Any) -> Any:
    """A tensor of the CPU in the memory of one of the simulated device."""
    if not isinstance(value, Tensor) or value.is_cpu:
        return value
    storage = value.untyped_storage()
    memory: Any = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    there = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(there, value.storage_offset(), value.shape, value.stride())


class _Libdevice:
    """CUDA's mathematical functions, which the interpreter doesn't know."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        function: Any = {"rint": torch.round}.get(name) or getattr(torch, name)

        def call(*given: Any) -> Any:
            first = given[0]
            values = [torch.from_numpy(np.array(each.handle.data)) for each in given]
            found = function(*values).numpy()
            dtype = tl.int32 if found.dtype == np.bool_ else first.dtype
            if dtype is tl.int32:
                found = found.astype(np.int32)
            kind = tl.block_type(dtype, list(found.shape)) if first.type.is_block() else dtype
            return tl.tensor(TensorHandle(found, dtype), kind)

        return call


def _rounding() -> Callable[..., Any]:
    """The interpreter's conversion of numbers, which cuts bfloat16 off."""
    import triton.language as tl
    from triton.runtime.interpreter import _convert_float

    def convert(values: Any, before: Any, after: Any, mode: Any) -> Any:
        if before != tl.float32 or after != tl.bfloat16:
            return _convert_float(values, before, after, mode)
        rounded = torch.from_numpy(np.array(values)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    return convert
