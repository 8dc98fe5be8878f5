"""An optimizer's step of many tensors as one operation, which a graph need not be taken through tensor by tensor.

torch's compiler makes a loop for each of three hundred small tensors, and takes minutes to find out which of these go
together. torch's own fused kernel walks the list in one call. So that call stands in the list of operations as it is,
and the list is cut there (see :mod:`pure_loop.compile.cutting`), or it is decomposed, where it can't be cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.torch_private import fused_adam, fused_adamw
from pure_loop.stages.nonfinite import find_nonfinite

__all__ = ["ADAM", "NONFINITE", "TENSORS", "serves", "run_adam", "run_nonfinite"]

# A list of so many tensors is walked by the kernel. Below that loops of its own, fused with what is around them, are
# faster, and soon compiled.
TENSORS = 32

_library: Any = torch.library.Library("pure_loop", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "adam(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] largest, Tensor[] steps, "
    "Tensor lr, int[] which, str name, float beta1, float beta2, float weight_decay, float eps, bool maximize, "
    "Tensor? live) -> Tensor[]"
)
_library.define("nonfinite(Tensor[] tensors, Tensor zero) -> Tensor")

# Parameters, averages, squares and largest squares after the step, one list after the other. `which` says for each
# parameter which of the steps counts for it. `live` holds beta1, beta2 and the weight decay, where one of them is a
# schedule: float64, shape (3,).
ADAM: Any = torch.ops.pure_loop.adam.default
# Whether any element is NaN or infinite.
NONFINITE: Any = torch.ops.pure_loop.nonfinite.default


def _like_adam(params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, largest: Any, *_: Any) -> list[Tensor]:
    return [torch.empty_like(item) for item in (*params, *exp_avgs, *exp_avg_sqs, *largest)]


def _like_nonfinite(tensors: Any, zero: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=zero.device)


torch.library.register_fake("pure_loop::adam", _like_adam, lib=_library)
torch.library.register_fake("pure_loop::nonfinite", _like_nonfinite, lib=_library)


def serves(tensors: list[Tensor]) -> bool:
    """Whether the kernels take so many tensors, as they lie in memory."""
    first = tensors[0]
    return (
        None not in (fused_adam, fused_adamw)
        and len(tensors) >= TENSORS
        and first.is_floating_point()
        and all(tensor.is_cpu and tensor.dtype is first.dtype and tensor.is_contiguous() for tensor in tensors)
    )


def run_adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    largest: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    which: list[int],
    name: str,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    live: Tensor | None,
) -> None:
    """The step, in place."""
    if live is not None:
        beta1, beta2, weight_decay = live.tolist()
    run = fused_adamw if name == "adamw" else fused_adam
    assert run is not None
    run(
        params,
        [grad.contiguous() for grad in grads],
        exp_avgs,
        exp_avg_sqs,
        largest,
        [steps[i] for i in which],
        lr=lr.item(),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=bool(largest),
        maximize=maximize,
    )


def run_nonfinite(tensors: list[Tensor], zero: Tensor) -> Tensor:
    """Whether any element is NaN or infinite. The tensors are written to, and stay what they are."""
    return find_nonfinite(zero, tensors).bool().reshape(())
