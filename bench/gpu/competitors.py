"""The loops that are measured, and the workloads, on a device: those of the benchmark, and what only a GPU has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import attrs
import torch
from torch import Tensor, nn

import pure_loop.compile
from bench.performance.hand import hand_written
from bench.performance.loops import ours
from bench.performance.turns import Steps
from bench.performance.workloads import GPT, LARGE, WORKLOADS, Workload, gpt, wide
from pure_loop import Event

__all__ = ["AGAIN", "BASE", "COMPILED", "EAGER", "LOOPS", "MIXED", "workload_on"]

# In bfloat16; the others are in float32.
MIXED = ("GPT",)
# Small ones in the place of those that take a GPU.
_SMALL = {"25M": lambda: wide(64), "GPT": gpt(2, 64, 32, 64, 2)[0]}


class _Mixed(nn.Module):
    """Computes in bfloat16, as a loop by hand does it."""

    def __init__(self, inner: nn.Module, device: str) -> None:
        super().__init__()
        self.inner, self.device = inner, device

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            found: Tensor = self.inner(inputs)
        return found


def workload_on(device: str, name: str, *, small: bool) -> Workload:
    """A workload whose model and batches are on the device."""
    workload = {each.name: each for each in (*WORKLOADS, *LARGE, GPT)}[name]
    if small and name in _SMALL:
        workload = attrs.evolve(workload, model=_SMALL[name])
        if name == "GPT":
            workload = attrs.evolve(workload, batch=gpt(2, 64, 32, 64, 2)[1])
    model, batch = workload.model, workload.batch

    def placed() -> tuple[Tensor, Tensor]:
        inputs, targets = batch()
        return inputs.to(device), targets.to(device)

    return attrs.evolve(workload, model=lambda: model().to(device), batch=placed)


def _mixed(workload: Workload, device: str) -> Workload:
    model, loss = workload.model, workload.loss

    def in_bfloat16(outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return loss(outputs, targets)

    return attrs.evolve(workload, model=lambda: _Mixed(model(), device), loss=in_bfloat16)


def _by_hand(*, compiled: bool = False) -> Callable[[Workload, str], Steps]:
    def loop(workload: Workload, device: str) -> Steps:
        if workload.name in MIXED:
            workload = _mixed(workload, device)
        return hand_written(fused=True, compiled=compiled)(workload)

    return loop


def _recorded(workload: Workload, device: str) -> Steps:
    """A step by hand as a CUDA graph: as torch's documentation has it, with one place for the batch."""
    if device != "cuda":
        raise NotImplementedError("only CUDA records graphs")
    if workload.name in MIXED:
        workload = _mixed(workload, device)
    torch.manual_seed(0)
    model, data = workload.model(), workload.data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    inputs, targets = (part.clone() for part in data[0])

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model(inputs), targets).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    while True:
        for batch in data:
            inputs.copy_(batch[0])
            targets.copy_(batch[1])
            graph.replay()
            yield 1


def _ours(*, kernel_by_kernel: bool = False, keep: int = 0, **options: object) -> Callable[[Workload, str], Steps]:
    def loop(workload: Workload, device: str) -> Steps:
        precision = "amp_bf16" if workload.name in MIXED else "fp32"
        with contextlib.ExitStack() as inside:
            if options.get("compile") and device == "cuda" and torch.cuda.get_device_name() == "a simulated GPU":
                inside.enter_context(pure_loop.compile.interpreted())  # which runs no kernels
            if kernel_by_kernel:
                inside.enter_context(mock.patch("pure_loop.compile.replay.Recorders.of", return_value=None))
            yield from ours(keep=keep, precision=precision, **options)(workload)

    return loop


_WHOLE_STEP = {"compile": True, "watch": {Event.BATCH_END}}

BASE = "by hand, fused AdamW"
# In turns with those that compile.
AGAIN = f"{BASE}, again"
EAGER: dict[str, Callable[[Workload, str], Steps]] = {
    BASE: _by_hand(),
    "pl.fit": _ours(),
    "pl.fit, donate=True": _ours(donate=True),
    "pl.fit, States kept": _ours(keep=2),
    "by hand, a CUDA graph": _recorded,
}
COMPILED: dict[str, Callable[[Workload, str], Steps]] = {
    AGAIN: _by_hand(),
    "by hand, torch.compile": _by_hand(compiled=True),
    "pl.fit, compile=True": _ours(**_WHOLE_STEP),
    "pl.fit, compile=True, without graphs": _ours(kernel_by_kernel=True, **_WHOLE_STEP),
}
LOOPS = EAGER | COMPILED
