"""Different optimizers for different parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from pure_loop._internal.arguments import check_function
from pure_loop._internal.suggestions import teaching
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim._in_torch import part_in_torch
from pure_loop.optim.kernels import check_state, in_order
from pure_loop.optim.optimizer import Grads, Optimizer, OptState, Params, TorchGroup
from pure_loop.optim.resuming import made_by_another, refuse_other_memory

if TYPE_CHECKING:
    from pure_loop.time import Timestamp

__all__ = ["partition"]


@teaching
def partition(optimizers: Mapping[str, Optimizer], label: Callable[[str, Tensor], str]) -> Optimizer:
    """One optimizer that hands each parameter to the one of ``optimizers`` that ``label`` names for it.

    Args:
        optimizers: by label.
        label: a pure function of a parameter's name and of its shape, dtype, device, class and attributes, never of its
            numbers: it is asked once for parameters of these kinds. In ``fit`` it is shown the parameter as it was
            declared: ``getattr(tensor, "_no_weight_decay", False)``.

    The state holds the state of each optimizer under its label. ``lr`` of the result is that of the first
    optimizer; the others are in ``parts``.

    Raises:
        ArgumentTypeError: no optimizers by label, or a label that is no function of two arguments.
        ArgumentError: (a ValueError) by ``init`` and ``update``, for a label that isn't there.

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.optim import adamw, sgd
    >>> optimizer = partition(
    ...     {"decay": adamw(weight_decay=0.1), "no_decay": adamw(weight_decay=0.0)},
    ...     label=lambda name, tensor: "no_decay" if tensor.ndim < 2 else "decay",
    ... )
    >>> opt_state = optimizer.init(FrozenDict(weight=torch.ones(2, 2), bias=torch.ones(2)))
    >>> list(opt_state["no_decay"]["exp_avg"])
    ['bias']
    """
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise ArgumentTypeError(f"partition needs a mapping of label to optimizer, got {optimizers!r}")
    for key, part in optimizers.items():
        if not isinstance(part, Optimizer):
            raise ArgumentTypeError(
                f"partition: {key!r} must be an optimizer, got {part!r}; write "
                f"partition({{{key!r}: adamw(lr=1e-3)}}, ...)"
            )
    check_function("label", label, "name, tensor", where="partition")
    rule = _Partition(FrozenDict(optimizers), label)
    return Optimizer(
        name="partition",
        init=rule.init,
        update=rule.update,
        overwrite=rule.overwrite if all(part.overwrite for part in rule.parts.values()) else None,
        takes_found_inf=all(part.takes_found_inf for part in rule.parts.values()),
        lr=next(iter(optimizers.values())).lr,
        options=rule.parts,
        parts=rule.parts,
        draws=any(part.draws for part in rule.parts.values()),
        check=rule.check,
        seeing=rule.seeing,
        takes_lr_scale=all(part.takes_lr_scale for part in rule.parts.values()),
        elementwise=all(part.elementwise for part in rule.parts.values()),
        spreads_nonfinite=all(part.spreads_nonfinite for part in rule.parts.values()),
        in_torch=rule,
    )


@attrs.frozen
class _Partition:
    """The functions of :func:`partition`; its state as that of a class of torch has a group for each part, in order."""

    parts: FrozenDict[str, Optimizer]
    label: Callable[[str, Tensor], str]
    # By what a label may depend on. A step in place asks for none: a label may keep the tensor that it is given.
    _labels: dict[tuple[Any, ...], list[str]] = attrs.field(factory=dict, init=False, repr=False, eq=False)

    def split(self, params: Params) -> dict[str, tuple[Optimizer, Params]]:
        """Each part, and its parameters, by label; labels are asked for once."""
        kinds = tuple((name, param.shape, param.dtype, param.device, type(param)) for name, param in params.items())
        if kinds not in self._labels:
            self._labels[kinds] = [self.label(name, param) for name, param in params.items()]
        groups: dict[str, dict[str, Tensor]] = {key: {} for key in self.parts}
        for (name, param), key in zip(params.items(), self._labels[kinds], strict=True):
            if key not in groups:
                raise ArgumentError(
                    f"partition: the label of parameter {name!r} (shape {tuple(param.shape)}) is {key!r}, and the "
                    f"optimizers are {list(self.parts)}; give it one of these, or add an optimizer for {key!r}"
                )
            groups[key][name] = param
        return {key: (self.parts[key], FrozenDict(group)) for key, group in groups.items()}

    def seeing(self, view: Callable[[str, Tensor], Tensor]) -> Optimizer:
        label = self.label
        parts = {key: part if part.seeing is None else part.seeing(view) for key, part in self.parts.items()}
        return partition(parts, lambda name, tensor: label(name, view(name, tensor.detach())))

    def init(self, params: Params) -> OptState:
        return FrozenDict((key, part.init(group)) for key, (part, group) in self.split(params).items())

    def check(self, opt_state: Any, params: Params) -> None:
        """
        Raises:
            ResumeError: another optimizer, or one of other parameters, made ``opt_state``.
        """
        if not isinstance(opt_state, Mapping) or opt_state.keys() != self.parts.keys():
            raise made_by_another("partition", opt_state, self.parts)
        for key, (part, group) in self.split(params).items():
            refuse_other_memory(part, opt_state[key], group)

    def update(
        self, grads: Grads, opt_state: OptState, params: Params, timestamp: Timestamp
    ) -> tuple[Params, OptState]:
        result: dict[str, Tensor] = dict(params)
        new_state = {}
        for key, part, *picked in self.picked(grads, opt_state, params):
            some, new_state[key] = part.update(*picked, timestamp)
            result.update(some)
        return FrozenDict(result), FrozenDict(new_state)

    def overwrite(
        self, grads: Grads, opt_state: OptState, params: Params, timestamp: Timestamp, **options: Any
    ) -> tuple[Params, OptState]:
        new_state = {}
        for key, part, *picked in self.picked(grads, opt_state, params):
            _, new_state[key] = part.overwrite(*picked, timestamp, **options)
        changed = any(new_state[key] is not opt_state[key] for key in new_state)
        return params, FrozenDict(new_state) if changed else opt_state

    def picked(self, grads: Grads, opt_state: OptState, params: Params) -> list[tuple[Any, ...]]:
        """Label, optimizer, gradients, optimizer state and parameters of each part."""
        check_state("partition", opt_state, self.parts)
        by_name = dict(zip(params, in_order({"grads": grads}, list(params))["grads"], strict=True))
        return [
            (key, part, FrozenDict((name, by_name[name]) for name in group), opt_state[key], group)
            for key, (part, group) in self.split(params).items()
        ]

    def cls(self) -> type[torch.optim.Optimizer]:
        classes = {key: part_in_torch(part).cls() for key, part in self.parts.items()}
        if len(set(classes.values())) > 1:
            parts = ", ".join(f"{key!r} is torch.optim.{cls.__name__}" for key, cls in classes.items())
            first = next(iter(classes))
            raise ArgumentError(
                f"a torch optimizer is of one class, and the parts of this partition are of several: {parts}. Write "
                f"one state dict for each, to_state_dict(state, optimizer, part={first!r}), and load them together: "
                f"load_state_dict(state, optimizer, {{{first!r}: ..., ...}})."
            )
        return next(iter(classes.values()))

    def names(self, params: Params) -> list[list[str]]:
        return [names for part, picked in self.split(params).values() for names in part_in_torch(part).names(picked)]

    def evaluated(self, opt_state: OptState, params: Params) -> Params | None:
        """The parameters in the mode for evaluation of those parts that have one; None: none has."""
        result: dict[str, Tensor] = {}
        for key, (part, picked) in self.split(params).items():
            evaluated = getattr(part.in_torch, "evaluated", None)
            result.update((evaluated and evaluated(opt_state[key], picked)) or {})
        return FrozenDict({**params, **result}) if result else None

    def write(self, opt_state: OptState, params: Params, timestamp: Timestamp) -> list[TorchGroup]:
        check_state("partition", opt_state, self.parts)
        groups: list[TorchGroup] = []
        for key, (part, picked) in self.split(params).items():
            groups += part_in_torch(part).write(opt_state[key], picked, timestamp)
        return groups

    def read(self, groups: Sequence[TorchGroup], params: Params) -> OptState:
        result, begin = {}, 0
        for key, (part, picked) in self.split(params).items():
            end = begin + len(part_in_torch(part).names(picked))
            result[key] = part_in_torch(part).read(groups[begin:end], picked)
            begin = end
        return FrozenDict(result)
