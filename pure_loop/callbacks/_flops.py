"""How many floating-point operations a step has, and how many a second devices can compute at most."""

from __future__ import annotations

from typing import Any

import attrs
import optree
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pure_loop.callback import Run
from pure_loop.precision import Precision, PrecisionName
from pure_loop.stages import Stages
from pure_loop.stages.settings import found_size
from pure_loop.state import State


@attrs.define
class FlopCounter:
    """Forward, loss and backward of a batch, once for each combination of shapes.

    Args:
        run: the call with the task, the precision and the microbatches.
    """

    run: Run
    _known: dict[tuple[Any, ...], int] = attrs.field(init=False, factory=dict)

    def __call__(self, state: State) -> int:
        """The floating-point operations of ``state.batch``: multiplications and additions of matrix products,
        convolutions and attention, as ``torch.utils.flop_counter`` counts them.
        """
        key = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
            for leaf in optree.tree_leaves(state.batch, namespace="pure_loop")
        )
        if key not in self._known:
            self._known[key] = self._count(state)
        return self._known[key]

    def _count(self, state: State) -> int:
        assert self.run.task is not None
        stages = Stages(
            task=self.run.task,
            precision=Precision.parse(self.run.precision),
            microbatch_size=self.run.microbatch_size or found_size(state),
        )
        fresh = state.replace(grads=None, loss=None, outputs=None, grad_norm=None, loss_scale=None)
        with FlopCounterMode(display=False) as counter:
            for index, microbatch in enumerate(stages.microbatches(state.batch)):
                step = stages.forward(fresh.replace(microbatch=microbatch), index=index)
                stages.backward(stages.loss(step, index=index))
        return int(counter.get_total_flops())


_TERA = 1e12
# Dense, from the vendors' data sheets, where those of matrices of which half the elements are zero are twice as high.
# By parts of the device's name: 16-bit floats with sums in float32 (of the V100 and T4, which have no bfloat16,
# float16), TF32, and float32; in 1e12 a second. The first row fits whose parts are all in the name.
_PEAKS: tuple[tuple[tuple[str, ...], float, float, float], ...] = (
    (("B200",), 2250.0, 1125.0, 75.0),
    (("H200",), 989.4, 494.7, 66.9),
    (("H100", "NVL"), 835.5, 417.5, 60.0),
    (("H100", "PCIe"), 756.0, 378.0, 51.0),
    (("H100",), 989.4, 494.7, 66.9),
    (("A100",), 312.0, 156.0, 19.5),
    (("L40S",), 362.0, 183.0, 91.6),
    (("V100", "PCIE"), 112.0, 14.0, 14.0),
    (("V100",), 125.0, 15.7, 15.7),
    (("Tesla T4",), 65.0, 8.1, 8.1),
)
_WITHOUT_BFLOAT16 = ("V100", "Tesla T4")


def peak_flops_of(device_name: str, precision: PrecisionName, *, tf32: bool | None = None) -> float | None:
    """Floating-point operations a second; None where the device is not in the table.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.
        precision: that of forward and loss.
        tf32: whether products of float32 matrices may be computed in TF32; None: as torch is set.

    >>> peak_flops_of("NVIDIA A100-SXM4-80GB", "amp_bf16")
    312000000000000.0
    >>> peak_flops_of("NVIDIA A100-SXM4-80GB", "fp32", tf32=False)
    19500000000000.0
    """
    for parts, halves, with_tf32, singles in _PEAKS:
        if all(part in device_name for part in parts):
            if precision == "fp32":
                uses_tf32 = torch.get_float32_matmul_precision() != "highest" if tf32 is None else tf32
                return (with_tf32 if uses_tf32 else singles) * _TERA
            if precision == "amp_fp8":  # some of its products are in 16 bits
                return None
            if precision == "amp_bf16" and parts[0] in _WITHOUT_BFLOAT16:
                return None
            return halves * _TERA
    return None
