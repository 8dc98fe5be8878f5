"""The private names of torch and CPython that eager code uses, and what serves where a release of torch lacks one.

No other module that eager code imports names one. Each is looked up once, here. Where it is missing, its public
fallback does the same, mostly slower, and :data:`missing` says what is lost; ``python -m pure_loop`` prints that. So no
release that moves a private name keeps ``import pure_loop`` or training from working.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DispatchMode",
    "amp_update_scale",
    "any_autocast_enabled",
    "backward_runs_in_threads",
    "broadcast_coalesced",
    "default_collate_functions",
    "find_nonfinite",
    "foreach_clone",
    "fused_adam",
    "fused_adamw",
    "fused_sgd",
    "graph_task",
    "is_transformed",
    "missing",
    "mps_generator",
    "no_dispatch",
    "run_backward",
    "set_grad_enabled",
    "storage_goes_back",
    "storage_uses",
    "tensor_uses",
    "transforms",
]

missing: dict[str, str] = {}
"""The private names that this torch lacks, each with what is lost by its fallback."""


def _find(owner: Any, path: str, lost: str) -> Any:
    """The attribute, or None, noted in :data:`missing` with what is lost."""
    try:
        return attrgetter(path)(owner)
    except AttributeError:
        missing[f"{getattr(owner, '__name__', owner)}.{path}"] = lost
        return None


# Gradient mode and autocast.

set_grad_enabled: Callable[[bool], Any] = (
    _find(torch, "_C._set_grad_enabled", "two microseconds a step") or torch.set_grad_enabled
)


def _any_autocast_enabled() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))


any_autocast_enabled: Callable[[], bool] = (
    _find(torch, "_C._is_any_autocast_enabled", "three microseconds a step") or _any_autocast_enabled
)


# Autograd's engine.


def _run_backward(
    tensors: tuple[Tensor, ...],
    seeds: tuple[Tensor, ...],
    keep_graph: bool,
    create_graph: bool,
    inputs: tuple[Tensor, ...],
    **_: Any,
) -> tuple[Any, ...]:
    return torch.autograd.grad(tensors, inputs, seeds, keep_graph, create_graph, allow_unused=True)


# What torch.autograd.grad itself calls, behind its checks of every input and a hook for its debug log.
run_backward: Callable[..., tuple[Any, ...]] = (
    _find(torch.autograd.Variable, "_execution_engine.run_backward", "five microseconds a step") or _run_backward
)
# Which call of the engine is running, a number; torch's checkpoint asks for it. None: gradients are not added in place.
graph_task: Callable[[], int] | None = _find(
    torch,
    "_C._current_graph_task_id",
    "adding gradients of microbatches in place: one more set of them in memory",
)


def _always() -> bool:
    return True


# Whether the backward on a device runs in a thread of the engine's.
backward_runs_in_threads: Callable[[], bool] = _find(torch, "_C._is_multithreading_enabled", "nothing") or _always


# Tensors: what they are, and what refers to them.


def _takes_all_for_transformed(tensor: Tensor) -> bool:
    return True


# Inside torch.func's transforms tensors have no memory of their own.
is_transformed: Callable[[Tensor], bool] = (
    _find(torch, "_C._functorch.is_functorch_wrapped_tensor", "donation: every step copies; numbers are read by item()")
    or _takes_all_for_transformed
)
# The transforms of torch.func that are active; None where none is.
transforms: Callable[[], Any] = (
    _find(torch, "_C._functorch.peek_interpreter_stack", "copies of many tensors by one operation, and donation")
    or _always
)
# torch 2.12 and later clone a list at once, at half the cost, but not inside torch.func.vmap.
foreach_clone: Callable[[list[Tensor]], Sequence[Tensor]] | None = getattr(torch, "_foreach_clone", None)
# How many references torch itself counts to a tensor and to a storage; None: nothing is donated.
tensor_uses: Any = _find(Tensor, "_use_count", "donation: every step copies")
storage_uses: Any = _find(torch, "_C._storage_Use_Count", "donation: every step copies")
# In a torch built for CUDA: whether memory, by its storage's pointer, goes straight back to torch's allocator.
storage_goes_back: Callable[[Any], bool] | None = getattr(torch._C, "_has_Standard_Deleter", None)


def _dispatch_mode() -> type[Any]:
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        missing["torch.utils._python_dispatch.TorchDispatchMode"] = "strict's look for other threads"
        return nullcontext
    return TorchDispatchMode


# The base of classes that see every operation of a thread inside a ``with``.
DispatchMode: type[Any] = _dispatch_mode()
# A context in which dispatch modes see no operation.
no_dispatch: Callable[[], Any] = (
    _find(torch, "_C._DisableTorchDispatch", "strict's look for other threads") or nullcontext
)


# Kernels.


def _find_nonfinite(tensors: Sequence[Tensor], found: Tensor, inverse_scale: Tensor) -> None:
    for tensor in tensors:
        found.copy_(torch.maximum(found, (~torch.isfinite(tensor)).any().to(found)))


# Writes 1 into ``found``, float32 of shape (1,), where a tensor has a NaN or an infinity. The last argument is 1.
find_nonfinite: Callable[[Sequence[Tensor], Tensor, Tensor], Any] = (
    _find(torch, "_amp_foreach_non_finite_check_and_unscale_", "a tenth of a small model's step") or _find_nonfinite
)


def _amp_update_scale(
    scale: Tensor, tracker: Tensor, found: Tensor, growth: float, backoff: float, interval: int
) -> None:
    overflowed = found[0] > 0
    grown = scale * growth
    grows = (tracker + 1 == interval) & torch.isfinite(grown)
    scale.copy_(torch.where(overflowed, scale * backoff, torch.where(grows, grown, scale)))
    tracker.copy_(torch.where(overflowed | (tracker + 1 == interval), torch.zeros_like(tracker), tracker + 1))


# One step of torch.amp.GradScaler's rule, written into scale and tracker.
amp_update_scale: Callable[..., Any] = (
    _find(torch, "_amp_update_scale_", "some microseconds a step in amp_fp16") or _amp_update_scale
)
# Optimizers' kernels; None: the same arithmetic by operations on lists of tensors.
fused_adam: Callable[..., None] | None = _find(torch, "_fused_adam_", "fused adam: it takes two to three times as long")
fused_adamw: Callable[..., None] | None = _find(torch, "_fused_adamw_", "fused adamw: two to three times as long")
fused_sgd: Callable[..., None] | None = _find(torch, "_fused_sgd_", "fused sgd: two to three times as long")


# Data, devices and ranks.


def _default_collate_functions() -> Any:
    try:
        from torch.utils.data._utils.collate import default_collate_fn_map
    except ImportError:
        missing["torch.utils.data._utils.collate.default_collate_fn_map"] = (
            "loading the rows of a TensorDataset by one operation"
        )
        return None
    return default_collate_fn_map


# How torch's default collate treats each type; a user may have changed it.
default_collate_functions: dict[Any, Any] | None = _default_collate_functions()


def mps_generator() -> torch.Generator:
    """The default generator of an Apple GPU.

    Raises:
        RuntimeError: this torch has it elsewhere.
    """
    generator: Any = getattr(torch.mps, "_get_default_mps_generator", None)
    if generator is None:
        raise RuntimeError(
            "torch.mps._get_default_mps_generator is not there in this version of torch, and dropout on an Apple GPU "
            'is seeded by it: train on device="cpu", or install a version of torch that pure_loop was tested with.'
        )
    return generator()  # type: ignore[no-any-return]


def broadcast_coalesced(group: Any, tensors: list[Tensor], size: int, source: int) -> None:
    """Send what tensors hold on one rank of the group to all, in messages of at most ``size`` bytes."""
    at_once: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "_broadcast_coalesced", None)
    if at_once is not None:
        at_once(group, tensors, size, source)
        return
    import torch.distributed as dist

    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=source)
