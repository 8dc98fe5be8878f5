"""What an optimizer is, and what the ones that run torch's fused kernels share.

An optimizer is a pair of pure functions, ``init(params) -> opt_state`` and
``update(grads, opt_state, params, timestamp) -> (params, opt_state)``. Both give new mappings and
write to nothing they were given.

The update copies the tensors and lets torch's in-place kernel write to the copies. That kernel, on
a CPU, walks raw memory: it believes that a gradient has as many elements as its parameter and lies in
memory in the same order, and gives wrong numbers without a word where that isn't so. ``torch.optim``
can believe it because ``backward()`` brings every ``.grad`` into its parameter's layout;
``torch.autograd.grad`` promises no layout, so it is looked at here.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._cloning import clone_all
from pure_loop._signature import is_scheduler, name_of, refuse_no_schedule
from pure_loop._values import as_float
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.frozendict import FrozenDict

if TYPE_CHECKING:
    from pure_loop.time import Timestamp

__all__ = ["Grads", "LearningRate", "OptState", "Optimizer", "Params", "RateFunction"]

Params: TypeAlias = FrozenDict[str, Tensor]
Grads: TypeAlias = Mapping[str, Tensor | None]
OptState: TypeAlias = FrozenDict[str, Any]
LearningRate: TypeAlias = "float | RateFunction"
RateFunction: TypeAlias = "Callable[[Timestamp], float]"
Layout: TypeAlias = list[torch.Size]
Kernel: TypeAlias = Callable[[list[Tensor], list[Tensor], list[list[Tensor]], list[Tensor]], None]

FUSED_DEVICES = frozenset({"cpu", "cuda", "hpu", "mps", "mtia", "xpu"})


def _callable(instance: Optimizer, attribute: attrs.Attribute[Any], value: object) -> None:
    if not callable(value):
        raise ArgumentTypeError(f"Optimizer {instance.name!r}: {attribute.name} must be a function, got {value!r}")


@attrs.frozen(kw_only=True, repr=False)
class Optimizer:
    """Two pure functions and their names.

    Args:
        name: what reprs and logs call it.
        init: ``params -> opt_state``. The structure, shapes and dtypes of ``opt_state`` are those
            that every later ``update`` returns.
        update: ``(grads, opt_state, params, timestamp) -> (params, opt_state)``. ``grads`` has the
            keys of ``params``; None stands for a parameter that this batch didn't use, which stays as it is.
        lr: the learning rate at a timestamp, for whoever wants to log it.
        overwrite: the same as ``update``, for params and an opt_state that nobody else sees: it may write to their
            tensors. It gives the mapping of params itself where it did. None: such memory is copied as any other.
        overwrites_mappings_only: whether all that ``overwrite`` writes to in an opt_state are tensors in mappings by
            parameter. If not, an opt_state that holds others (a list, a number of steps) is copied as any other.
        takes_found_inf: whether ``overwrite`` takes ``found_inf=``, too: a float32 tensor of shape (1,) on the
            parameters' device, where each of them has a gradient. Where it is 1, everything stays as it is.
        options: the other hyperparameters, for the repr.
        spreads_nonfinite: whether a gradient that is NaN or infinite makes its parameter so, where it is then found;
            if not, the loop looks at the gradients themselves.
        elementwise: whether each element's update depends on nothing but that element's gradient and memory, so that a
            rank which holds a part of a parameter can update its part alone.
        parts: the optimizers this one is made of, by label (see :func:`partition`).
        draws: whether ``update`` draws random numbers from the global generators of torch, NumPy or Python: ``fit``
            seeds them for it, from its seed and the number of the batch, alike on all ranks.
        check: ``(opt_state, params) -> None``, where params may be on the meta device: raises
            :class:`~pure_loop.ResumeError` where training can't resume from ``opt_state``. None: it is compared with
            what ``init`` makes.
        seeing: ``(view) -> optimizer``: this optimizer, which asks its label function about ``view(name, tensor)``: the
            parameter as the user declared it, with its class and attributes (see :func:`partition`).

    An optimizer of one's own needs nothing else:

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.time import Timestamp
    >>> def signs(grads, opt_state, params, timestamp):
    ...     return FrozenDict({name: p - 0.5 * grads[name].sign() for name, p in params.items()}), opt_state
    >>> sign_sgd = Optimizer(name="sign_sgd", init=lambda params: FrozenDict(), update=signs, lr=lambda timestamp: 0.5)
    >>> params = FrozenDict(w=torch.zeros(2))
    >>> sign_sgd.update(FrozenDict(w=torch.tensor([3.0, -4.0])), sign_sgd.init(params), params, Timestamp())
    (FrozenDict({'w': tensor([-0.5000,  0.5000])}), FrozenDict({}))
    """

    name: str
    init: Callable[[Params], OptState] = attrs.field(validator=_callable)
    update: Callable[[Grads, OptState, Params, Timestamp], tuple[Params, OptState]] = attrs.field(validator=_callable)
    lr: RateFunction = attrs.field(validator=_callable)
    overwrite: Callable[..., tuple[Params, OptState]] | None = None
    overwrites_mappings_only: bool = False
    takes_found_inf: bool = False
    options: Mapping[str, Any] = attrs.field(factory=FrozenDict)
    spreads_nonfinite: bool = False
    elementwise: bool = False
    parts: Mapping[str, Optimizer] = attrs.field(factory=FrozenDict)
    draws: bool = False
    check: Callable[[Any, Params], None] | None = None
    seeing: Callable[[Callable[[str, Tensor], Tensor]], Optimizer] | None = None

    def __repr__(self) -> str:
        shown = {} if self.parts else {"lr": self.lr}
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in {**shown, **self.options}.items())})"


def keeps_nothing(
    overwrite: Callable[..., Any], overwrite_unread: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """An ``overwrite`` that has nothing of what it was given once it has returned, but for what it returns.

    Of others the loop asks after each step who has the memory: they may have put it elsewhere.

    Args:
        overwrite: the function.
        overwrite_unread: the same for a memory that nobody has read since ``overwrite`` gave it, so that nobody else
            has any tensor of it: it may write to all of them, and give the same mapping.
    """
    known: Any = partial(overwrite)
    known.overwrite_unread = known if overwrite_unread is None else overwrite_unread
    return known  # type: ignore[no-any-return]


def overwrite_unread_of(optimizer: Optimizer) -> Callable[..., Any] | None:
    """How an optimizer overwrites a memory that nobody has read; None: it may itself have kept what it was given."""
    return getattr(optimizer.overwrite, "overwrite_unread", None)


# Hyperparameters, at the door.


def check_number(where: str, name: str, value: object, *, low: float = 0.0, below: float = math.inf) -> float:
    """``value`` as a float in ``[low, below)``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{where}: {name} must be a number, got {value!r} of type {type(value).__name__}")
    if not low <= as_float(value) < below:
        limit = "finite" if below == math.inf else f"less than {below:g}"
        raise ArgumentError(f"{where}: {name} must be at least {low:g} and {limit}, got {name}={value!r}")
    return float(value)


def check_flag(where: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{where}: {name} must be True or False, got {name}={value!r}")
    return value


def as_schedule(where: str, lr: LearningRate) -> RateFunction:
    """A learning rate as a function of the timestamp."""
    if isinstance(lr, torch.nn.Module | Iterable) and not isinstance(lr, str | Tensor):
        raise ArgumentTypeError(f"{where} is given the parameters by fit: write {where}(lr=3e-4), without them.")
    if callable(lr) or is_scheduler(lr):
        refuse_no_schedule(f"{where}: lr", lr)
        return lr  # type: ignore[return-value]
    if isinstance(lr, bool) or not isinstance(lr, int | float):
        shown = repr(lr) if lr is None or isinstance(lr, str | bool | complex | Tensor) else "an object"
        raise ArgumentTypeError(
            f"{where}: lr must be a number, got {shown} of type {type(lr).__name__}; write {where}(lr=3e-4), or a "
            f'function of the timestamp: {where}(lr=pl.schedules.cosine("3ep", peak=3e-4))'
        )
    from pure_loop.schedules import constant  # not before it is needed: importing pure_loop is to be quick

    return constant(check_number(where, "lr", lr))


def fixed_rate(lr: RateFunction) -> float | None:
    """The learning rate, where it is always the same."""
    schedules: Any = sys.modules.get("pure_loop.schedules")  # who has made one has imported it
    fixed = schedules is not None and type(lr) is schedules.constant
    return lr.value if fixed and 0.0 <= lr.value < math.inf else None  # type: ignore[attr-defined]


def rate_at(where: str, lr: RateFunction, timestamp: Timestamp) -> float:
    """The learning rate for the batch that starts at ``timestamp``."""
    traced = getattr(timestamp, "rate", None)
    if traced is not None:  # a compiled step takes it as an input, because it is another one in each
        return traced(where, lr)  # type: ignore[no-any-return]
    value = lr(timestamp)
    if type(value) is not float:
        value = _as_rate(where, lr, value)
    if not 0.0 <= value < math.inf:
        raise ArgumentError(
            f"{where}: the learning rate must be finite and at least 0; {_shown(lr)} gave {value} at {timestamp!r}"
        )
    return value


def _as_rate(where: str, lr: RateFunction, value: Any) -> float:
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # as tensors of several numbers say it
            pass
    raise ArgumentTypeError(
        f"{where}: the learning rate must be a number, and {_shown(lr)} gave {value!r:.60} of type "
        f"{type(value).__name__}: a schedule is a function of the timestamp that returns one float"
    )


def _shown(lr: RateFunction) -> str:
    """A schedule of ours by what it does, and a function by its name."""
    return repr(lr) if attrs.has(type(lr)) else name_of(lr)


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
            "this one with other options, wrote it: go on with that one, or begin again with optimizer.init(params)"
        )


def memory_of(opt_state: OptState, key: str, names: list[str]) -> list[Any]:
    """One memory of the optimizer, such as ``exp_avg``, in the order of ``names``."""
    memory = opt_state[key]
    if list(memory) == names:
        return list(memory.values())
    if memory.keys() != set(names):
        raise ResumeError(
            f"opt_state[{key!r}] and params name different parameters: {_difference(memory, names)}; "
            "opt_state belongs to another model: begin again with optimizer.init(params)"
        )
    return [memory[name] for name in names]


def _difference(given: Iterable[str], names: list[str]) -> str:
    given = list(given)
    missing, extra = [n for n in names if n not in given], [n for n in given if n not in names]
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


def is_laid_out(grads: Grads, layout: Layout | None) -> bool:
    """Whether gradients are known to lie in memory as the parameters of this layout do."""
    return getattr(grads, "layout", None) is layout is not None


def lie_plainly(tensors: Sequence[Any]) -> bool:
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


def note_layout(layout: Layout | None, *mappings: FrozenDict[str, Tensor]) -> None:
    """Say of mappings that an update has written to how their tensors lie in memory."""
    for mapping in mappings:
        if layout is not None:
            mapping.layout = layout


def laid_out(names: list[str], tensors: list[Tensor], layout: Layout | None) -> FrozenDict[str, Tensor]:
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
    grads = [like(grad, p, f"the gradient of {name!r}") for name, grad, p in zip(names, grads, new, strict=True)]
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


def like(tensor: Tensor, param: Tensor, what: str, error: type[ValueError] = ArgumentError) -> Tensor:
    """``tensor`` in the memory layout of ``param``, which it must fit otherwise."""
    if tensor.layout != torch.strided:
        raise error(
            f"{what} is sparse ({tensor.layout}) and this optimizer needs dense ones: "
            "use torch.nn.Embedding(..., sparse=False), or optim.from_torch(torch.optim.SparseAdam)"
        )
    for name in ("shape", "dtype", "device"):
        given, needed = getattr(tensor, name), getattr(param, name)
        if given != needed:
            given, needed = (tuple(x) if isinstance(x, torch.Size) else x for x in (given, needed))
            raise error(f"{what} has {name} {given}, its parameter has {name} {needed}")
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.stride() == param.stride() else torch.empty_like(param).copy_(tensor)


def _copy_like(memory: Tensor, param: Tensor, name: str) -> Tensor:
    copy = like(memory, param, f"the optimizer's memory of {name!r} (from another model?)", ResumeError)
    return copy.clone() if copy is memory else copy
