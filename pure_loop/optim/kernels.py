"""Runs an in-place kernel over lists of tensors, in the order of the parameters: on copies, or in donated memory.

The update of an optimizer copies the tensors and lets torch's in-place kernel write to the copies. That kernel, on a
CPU, reads raw memory: it assumes that a gradient has as many elements as its parameter, in the same order in memory,
and silently gives wrong numbers otherwise. ``torch.optim`` can rely on this because ``backward()`` brings every
``.grad`` into its parameter's layout; ``torch.autograd.grad`` guarantees no layout, so it is checked here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pure_loop._internal.cloning import clone_all
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim.optimizer import Grads, OptState, Params

__all__ = [
    "FUSED_DEVICES",
    "Kernel",
    "Layout",
    "are_contiguous",
    "check_state",
    "gradients_of",
    "has_layout",
    "layout_of",
    "match_layout",
    "memory_of",
    "only",
    "overwritable",
    "run_kernel",
    "set_layout",
    "with_layout",
    "zeros_like",
]

Layout: TypeAlias = list[torch.Size]
Kernel: TypeAlias = Callable[[list[Tensor], list[Tensor], list[list[Tensor]], list[Tensor]], None]

FUSED_DEVICES = frozenset({"cpu", "cuda", "hpu", "mps", "mtia", "xpu"})


# Lists of tensors in the order of the parameters.


def zeros_like(params: Params) -> FrozenDict[str, Tensor]:
    return FrozenDict({name: torch.zeros_like(param, requires_grad=False) for name, param in params.items()})


def gradients_of(grads: Grads, names: list[str]) -> list[Tensor | None]:
    """The gradients in the order of ``names``."""
    if list(grads) == names:
        return list(grads.values())
    if grads.keys() != set(names):
        raise ArgumentError(
            f"grads and params name different parameters: {_difference(grads, names)}; "
            "grads needs every name of params, with None for a parameter that the batch didn't use"
        )
    return [grads[name] for name in names]


def check_state(where: str, opt_state: OptState, keys: Iterable[str]) -> None:
    """``opt_state`` is of this optimizer with these options."""
    if not isinstance(opt_state, Mapping):
        raise ResumeError(
            f"{where}: opt_state is {opt_state!r:.80}, and an update needs what optimizer.init(params) gives: "
            "state.replace(opt_state=optimizer.init(state.params)) before the first one."
        )
    if opt_state.keys() != set(keys):
        raise ResumeError(
            f"{where}: opt_state must hold {sorted(keys)}, and it holds {sorted(opt_state)}; another optimizer, or "
            "this one with other options, wrote it: resume with that one, or start anew with optimizer.init(params)"
        )


def memory_of(opt_state: OptState, key: str, names: list[str]) -> list[Any]:
    """One mapping of the optimizer state, such as ``exp_avg``, in the order of ``names``."""
    memory = opt_state[key]
    if list(memory) == names:
        return list(memory.values())
    if memory.keys() != set(names):
        raise ResumeError(
            f"opt_state[{key!r}] and params name different parameters: {_difference(memory, names)}; "
            "opt_state belongs to another model: begin again with optimizer.init(params)"
        )
    return [memory[name] for name in names]


def _difference(value: Iterable[str], names: list[str]) -> str:
    value = list(value)
    missing, extra = [n for n in names if n not in value], [n for n in value if n not in names]
    return ", ".join(f"{word} {some[:3]}" for word, some in (("missing", missing), ("not a parameter", extra)) if some)


def only(values: Sequence[Any], used: list[int]) -> list[Any]:
    return [values[i] for i in used] if values else []


# The kernel, on copies.


def run_kernel(
    kernel: Kernel,
    names: list[str],
    params: list[Tensor],
    grads: list[Tensor | None],
    memories: list[list[Tensor]],
    steps: list[Tensor],
    layout: Layout | None = None,
    overwrite: bool = False,
) -> tuple[list[Tensor], list[list[Tensor]], Layout | None]:
    """Let an in-place kernel update copies of ``params`` and ``memories``, where there is a gradient.

    Args:
        kernel: writes to its first and third argument. It serves tensors of one device and dtype.
        names: for error messages.
        steps: one step count a parameter, 0-d; empty for a kernel that counts nothing.
        layout: what :func:`layout_of` says of params and memories.
        overwrite: let it update ``params`` and ``memories`` themselves, if their layout is known: lists that are given
            back are the ones that were given then.

    Returns:
        New params, new memories, and their layout where it is known.
    """
    if not [None for grad in grads if grad is None]:
        return _run(kernel, names, params, grads, memories, steps, layout, overwrite)  # type: ignore[arg-type]
    used = [i for i, grad in enumerate(grads) if grad is not None]
    chosen = only(params, used)
    new, new_memories, known = _run(
        kernel,
        only(names, used),
        chosen,
        only(grads, used),
        [only(memory, used) for memory in memories],
        only(steps, used),
        None if layout is None else only(layout, used),
        overwrite,
    )
    if new is chosen:
        return params, memories, layout
    merged = [_put(old, used, some) for old, some in zip((params, *memories), (new, *new_memories), strict=True)]
    return merged[0], merged[1:], None if known is None else _look_at(merged[0], merged[1:])


def overwritable(
    grads: Grads, opt_state: OptState, params: Params, keys: Sequence[str]
) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]] | None:
    """The lists of params, gradients and memories for a kernel that writes to them; None where it takes more care.

    They are ready where an update has laid out params and memories, and every parameter has a gradient like it.
    """
    layout: Layout | None = getattr(params, "layout", None)
    if layout is None:
        return None
    memories = []
    for key in keys:
        memory = opt_state[key]
        if getattr(memory, "layout", None) is not layout:
            return None
        memories.append(getattr(memory, "_tensors", None) or list(memory.values()))
    gradients: list[Any] = list(grads.values())
    if getattr(grads, "layout", None) is not layout and (
        set(map(type, gradients)) != _PLAIN
        or list(grads) != list(params)
        or not all(map(_is_contiguous, gradients))
        or list(map(_size, gradients)) != layout
        or any(map(_is_neg, gradients))
    ):
        return None
    return getattr(params, "_tensors", None) or list(params.values()), gradients, memories


_PLAIN = {Tensor}


def has_layout(grads: Grads, layout: Layout | None) -> bool:
    """Whether gradients are known to lie in memory as the parameters of this layout do."""
    return getattr(grads, "layout", None) is layout is not None


def are_contiguous(tensors: Sequence[Any]) -> bool:
    """Whether these are torch's own tensors, each of which lies in memory as one of its size does that is new."""
    return set(map(type, tensors)) == _PLAIN and all(map(_is_contiguous, tensors))


def layout_of(params: Params, memories: Iterable[FrozenDict[str, Tensor]]) -> Layout | None:
    """The sizes of tensors that one update has laid out, contiguously and alike; None where that isn't known.

    Clones and kernels keep a layout, so it is looked at once and handed on with the mappings of the update.
    """
    layout: Layout | None = getattr(params, "layout", None)
    if layout is None or any(getattr(memory, "layout", None) is not layout for memory in memories):
        return None
    return layout


def set_layout(layout: Layout | None, *mappings: FrozenDict[str, Tensor]) -> None:
    """Say of mappings that an update has written to how their tensors lie in memory."""
    for mapping in mappings:
        if layout is not None:
            mapping.layout = layout


def with_layout(names: list[str], tensors: list[Tensor], layout: Layout | None) -> FrozenDict[str, Tensor]:
    """A mapping that says how its tensors lie in memory."""
    mapping = FrozenDict(zip(names, tensors, strict=True))
    if layout is not None:
        mapping.layout = layout
        mapping._tensors = tensors
    return mapping


def _put(values: list[Tensor], used: list[int], new: list[Tensor]) -> list[Tensor]:
    result = [value.detach() if value.requires_grad else value for value in values]
    for i, value in zip(used, new, strict=True):
        result[i] = value
    return result


def _run(
    kernel: Kernel,
    names: list[str],
    params: list[Tensor],
    grads: list[Tensor],
    memories: list[list[Tensor]],
    steps: list[Tensor],
    layout: Layout | None,
    overwrite: bool = False,
) -> tuple[list[Tensor], list[list[Tensor]], Layout | None]:
    if not params:
        return [], [[] for _ in memories], None
    first = params[0]
    # A layout is known of tensors that the kernel has taken before: it won't stop half-way.
    overwrite = overwrite and (layout is not None or _alike([*params, *itertools.chain.from_iterable(memories)]))
    if first.is_cpu:
        layout = _look_at(params, memories) if layout is None else layout
        serves = (
            layout is not None
            and all(map(_is_contiguous, grads))
            and list(map(_size, grads)) == layout
            and not any(map(_is_neg, grads))  # whose memory holds other numbers, which fused kernels don't take
        )
    else:
        layout = list(map(_size, params)) if layout is None else layout
        serves = first.device.type in FUSED_DEVICES
    if serves and type(first) is not Tensor:
        # While a step is traced, operations on lists take tensors of several dtypes, and kernels round numbers to one.
        serves = _alike([*params, *itertools.chain.from_iterable(memories)])
    if serves and overwrite and (first.is_cpu or all(map(_is_contiguous, itertools.chain(params, grads, *memories)))):
        kernel(params, grads, memories, steps)
        return params, memories, layout
    if serves:
        size = len(params)
        copies = clone_all([*params, *itertools.chain.from_iterable(memories)])
        new = copies[:size]
        new_memories = [copies[i : i + size] for i in range(size, len(copies), size)]
        try:
            kernel(new, grads, new_memories, steps)
            return new, new_memories, layout
        except RuntimeError:
            # Several devices, dtypes or layouts, or complex numbers: the kernel says so, and what it may
            # have written to so far is thrown away.
            del copies, new, new_memories
    return *_run_in_groups(kernel, names, params, grads, memories, steps), None


def _alike(tensors: list[Tensor]) -> bool:
    """Whether all are real numbers of one dtype on one device, which every kernel takes."""
    first = tensors[0]
    if not first.is_floating_point():
        return False
    return all(tensor.dtype is first.dtype and tensor.device == first.device for tensor in tensors)


def _look_at(params: list[Tensor], memories: list[list[Tensor]]) -> Layout | None:
    """The sizes of the parameters, if all these tensors lie in memory in the order of their indices, and fit."""
    if not all(map(_is_contiguous, itertools.chain(params, *memories))):
        return None
    sizes = list(map(_size, params))
    return sizes if all(list(map(_size, memory)) == sizes for memory in memories) else None


_is_contiguous = Tensor.is_contiguous
_is_neg = Tensor.is_neg
_size = Tensor.size


def _run_in_groups(
    kernel: Kernel,
    names: list[str],
    params: list[Tensor],
    grads: list[Tensor],
    memories: list[list[Tensor]],
    steps: list[Tensor],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """What the kernel needs for any mixture: tensors that fit, of one device and dtype at a time."""
    new = [param.detach().clone() for param in params]
    grads = [
        match_layout(grad, p, f"the gradient of {name!r}") for name, grad, p in zip(names, grads, new, strict=True)
    ]
    new_memories = [
        [_copy_like(old, p, name) for name, old, p in zip(names, memory, new, strict=True)] for memory in memories
    ]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, param in enumerate(new):
        groups.setdefault((param.device, param.dtype), []).append(i)
    for (device, dtype), used in groups.items():
        lists = [only(tensors, used) for tensors in (new, grads, *new_memories)]
        if dtype.is_complex:
            # Elementwise in the real and the imaginary part, as torch.optim treats complex parameters.
            lists = [[torch.view_as_real(tensor) for tensor in tensors] for tensors in lists]
        kernel(lists[0], lists[1], lists[2:], [step.to(device) for step in only(steps, used)] if steps else [])
    return new, new_memories


def match_layout(tensor: Tensor, param: Tensor, what: str, error: type[ValueError] = ArgumentError) -> Tensor:
    """``tensor`` in the memory layout of ``param``, which it must fit otherwise."""
    if tensor.layout != torch.strided:
        raise error(
            f"{what} is sparse ({tensor.layout}) and this optimizer needs dense ones: "
            "use torch.nn.Embedding(..., sparse=False), or optim.from_torch(torch.optim.SparseAdam)"
        )
    for name in ("shape", "dtype", "device"):
        value, needed = getattr(tensor, name), getattr(param, name)
        if value != needed:
            value, needed = (tuple(x) if isinstance(x, torch.Size) else x for x in (value, needed))
            raise error(f"{what} has {name} {value}, its parameter has {name} {needed}")
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.stride() == param.stride() else torch.empty_like(param).copy_(tensor)


def _copy_like(memory: Tensor, param: Tensor, name: str) -> Tensor:
    copy = match_layout(memory, param, f"the optimizer state of {name!r} (from another model?)", ResumeError)
    return copy.clone() if copy is memory else copy
