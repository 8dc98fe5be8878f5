"""Averages of parameters and buffers in the algorithm state: what is averaged, and the State that has an average.

A parameter moves in small steps, and a mean of its values is a value that it could have had. A buffer may be anything:
the smallest value so far, which begins at infinity; a vector of length 1, of which a mean is shorter; a mask. Only
running means and variances are averaged, and the buffers that ``buffers=`` names.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping

import attrs
import torch
from torch import Tensor

from pure_loop._internal.arguments import refusal
from pure_loop._internal.suggestions import nearest
from pure_loop._internal.tree_ops import local_tensor, map_local
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.state import State, refuse_no_state
from pure_loop.time import Time, TimeUnit

# A module that has both normalizes with them: BatchNorm and InstanceNorm of torch, subclasses, and classes of others.
_STATISTICS = ("running_mean", "running_var")
_UPDATED_AT = {
    TimeUnit.EPOCH: (Event.EPOCH_END,),
    TimeUnit.ITERATION: (Event.ITERATION_END,),
    TimeUnit.DURATION: (Event.BATCH_END, Event.EPOCH_END, Event.ITERATION_END),
}


def updated_at(interval: Time) -> tuple[Event, ...]:
    """The events at which an average is updated that may be due: those where the unit of the interval is counted."""
    return _UPDATED_AT.get(interval.unit, (Event.BATCH_END,))


def averageable(tensors: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    """Those that can be averaged."""
    return FrozenDict((name, tensor) for name, tensor in tensors.items() if _is_averageable(tensor))


def _is_averageable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@attrs.frozen
class AveragedBuffers:
    """Which buffers are averaged: running means and variances, and those that ``buffers=`` names.

    Attributes:
        where: the algorithm's factory, for errors.
        globs: of names of buffers that are averaged, too.

    >>> chosen = AveragedBuffers.read("ema", "*.center")
    >>> list(chosen.of({name: torch.ones(1) for name in ("0.center", "0.u", "1.running_mean", "1.running_var")}))
    ['0.center', '1.running_mean', '1.running_var']
    """

    where: str
    globs: tuple[str, ...]

    @classmethod
    def read(cls, where: str, buffers: object) -> AveragedBuffers:
        """
        Raises:
            ArgumentTypeError: it is neither a text nor several.
        """
        globs = (buffers,) if isinstance(buffers, str) else tuple(buffers) if isinstance(buffers, Iterable) else (None,)
        if not all(isinstance(glob, str) and glob for glob in globs):
            raise refusal("buffers", buffers, 'a glob of names of buffers such as "*.center", or a list of them', where)
        return cls(where, globs)

    def of(self, buffers: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
        """Those of a State's buffers that are averaged.

        Raises:
            ArgumentError: a glob matches none of them; names those that there are.
        """
        chosen = _chosen(self.where, self.globs, tuple(averageable(buffers)))
        return FrozenDict((name, buffers[name]) for name in chosen)


# Buffers have the same names at each update.
@functools.lru_cache(maxsize=64)
def _chosen(where: str, globs: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    for glob in globs:
        if glob != "*" and not fnmatch.filter(names, glob):
            near = nearest(glob, names)
            raise ArgumentError(
                f"{where}: buffers={glob!r} matches no floating point buffer of the model"
                + (f"; did you mean {near!r}?" if near else "")
                + f"; there are {', '.join(names) or 'none'}."
            )
    there = set(names)
    return tuple(name for name in names if _is_statistic(name, there) or _matches(name, globs))


def _is_statistic(name: str, names: set[str]) -> bool:
    layer, dot, own = name.rpartition(".")
    return own in _STATISTICS and names.issuperset(layer + dot + statistic for statistic in _STATISTICS)


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex64) if tensor.dtype.itemsize < 8 else tensor
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def begun(average: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The average of these tensors: a new one, or one of another shape or dtype, begins as it is."""
    if average.keys() == tensors.keys() and all(_is_of(old, tensors[name]) for name, old in average.items()):
        return average
    return FrozenDict(
        (name, average[name] if name in average and _is_of(average[name], tensor) else tensor)
        for name, tensor in tensors.items()
    )


def resuming(name: str, averaged_of: Callable[[State], FrozenDict[str, Tensor]]) -> Callable[[State], State]:
    """The handler of FIT_START of an average: where a run resumes with other buffers, averages begin or end.

    Args:
        name: of the algorithm.
        averaged_of: the buffers of a State that are averaged.
    """

    def resume(state: State) -> State:
        memory = state.algorithm_state[name]
        average = begun(memory["buffers"], averaged_of(state))
        if average is memory["buffers"]:
            return state
        return state.remember(name, FrozenDict({**memory, "buffers": average}))

    return resume


def _is_of(average: Tensor, tensor: Tensor) -> bool:
    """Whether an average is of tensors of this shape and dtype."""
    halves = (torch.float16, torch.bfloat16)
    dtypes = [torch.float32 if item.dtype in halves else item.dtype for item in (average, tensor)]
    return average.shape == tensor.shape and dtypes[0] is dtypes[1]


def finite_or(average: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    """The average, with the tensors' own numbers where it isn't finite: of two infinities there is no average.

    >>> finite_or({"mask": torch.tensor([torch.nan, 0.5])}, {"mask": torch.tensor([-torch.inf, 1.0])})["mask"]
    tensor([  -inf, 0.5000])
    """

    def chosen(old: list[Tensor], latest: list[Tensor]) -> list[Tensor]:
        return [torch.where(a.isfinite(), a, b.to(a)) for a, b in zip(old, latest, strict=True)]

    results = map_local(chosen, list(average.values()), [tensors[name] for name in average]) if average else []
    return FrozenDict(zip(average, results, strict=True))


def averaged(state: State, name: str = "ema") -> State:
    """The State with the average of ``ema`` or ``swa`` as its parameters and buffers: ``averaged(state).module()``.

    Buffers that are not averaged are the State's own, and so are single numbers of which there is no average, because
    they were infinite.

    Raises:
        ArgumentError: the State has no average of this name, or one of no weights yet.
        ArgumentTypeError: the first argument is no State.
        ResumeError: the average of a parameter has another shape than the parameter.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.algorithms import ema
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...     optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep", algorithms=[ema(half_life="4ba")]))
    >>> averaged(state).module()
    Linear(in_features=2, out_features=1, bias=True)
    """
    refuse_no_state(state, f"averaged(state, {name!r})")
    if _is_empty(state, name):
        raise ArgumentError(
            f"the average {name!r} of this State is of no weights yet, at batch {state.timestamp.batch}: it begins "
            "later, as its start= says. The State's own weights are state.params."
        )
    return with_average(state, name, None)


def averaged_if_begun(state: State, name: str) -> State:
    """:func:`averaged`, for code that looks at a run before the average begins, too: until then it is the State itself.

    Raises:
        ArgumentError, ResumeError: as :func:`averaged` does.
    """
    average = with_average(state, name, None)
    return state if _is_empty(state, name) else average


def _is_empty(state: State, name: str) -> bool:
    """Whether it is the memory of an average that counts its weights, and has none."""
    memory = state.algorithm_state.get(name)
    return isinstance(memory, Mapping) and "count" in memory and not int(memory["count"])


def with_average(state: State, name: str, chosen: AveragedBuffers | None, *, waits: bool = True) -> State:
    """:func:`averaged`, of the buffers that are chosen alone; None: of all that have an average.

    Args:
        waits: for the device, to copy nothing that is finite. A compiled step can't.

    Raises:
        ArgumentError, ResumeError: as :func:`averaged` does.
    """
    memory = state.algorithm_state.get(name)
    if not isinstance(memory, Mapping) or not {"params", "buffers"} <= memory.keys():
        raise ArgumentError(
            f"this State has no average named {name!r}: it has algorithm state of {sorted(state.algorithm_state)}. "
            "Evaluate a State that was trained with algorithms=[pl.algorithms.ema(...)], or swa(...); a module, or a "
            "State from before FIT_START, has no average, and is evaluated with algorithms=()."
        )
    # Ahead of a forward, which broadcasts.
    for key, tensor in memory["params"].items():
        if key in state.params and tensor.shape != state.params[key].shape:
            raise ResumeError(
                f"the average of params[{key!r}] has shape {tuple(tensor.shape)}, and the parameter "
                f"{tuple(state.params[key].shape)}: it is of another model, or was altered."
            )
    buffers = state.buffers if chosen is None else chosen.of(state.buffers)
    return state.replace(
        params=_with(state.params, memory["params"], waits),
        buffers={**state.buffers, **_with(buffers, memory["buffers"], waits)},
    )


def _with(tensors: Mapping[str, Tensor], average: Mapping[str, Tensor], waits: bool) -> FrozenDict[str, Tensor]:
    # A buffer may have taken another shape or dtype since the last update.
    result = {
        name: average[name].to(tensor.device, tensor.dtype)
        for name, tensor in tensors.items()
        if name in average and _is_of(average[name], tensor)
    }
    return FrozenDict({**tensors, **result, **finite_or(_not_finite(result) if waits else result, tensors)})


def _not_finite(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those with a number that isn't finite; waits for the device, once. Tensors without numbers have none."""
    tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    flags = [widened(local_tensor(tensor)).isfinite().all() for tensor in tensors.values()]
    finite = torch.stack(flags).tolist() if flags else []
    return {name: tensors[name] for name, all_of_it in zip(tensors, finite, strict=True) if not all_of_it}
