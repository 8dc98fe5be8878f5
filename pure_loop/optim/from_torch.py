"""Any ``torch.optim.Optimizer`` class as a pure optimizer.

Each update builds the optimizer anew around copies of the parameters, gives it what ``opt_state`` says it
remembered, lets it step, and reads its memory back. Building it costs a fraction of its step, and an
object that lives for one call has nothing to leak to the next call or to another thread.

A torch optimizer makes its memory in its first step. So that the structure of ``opt_state`` is the same from
``init`` on, ``init`` takes a trial step on copies to learn the structure, keeps zeros in its place, and
remembers for each parameter whether it has ``started``; until then the optimizer is given none of it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._cloning import clone_all
from pure_loop._pytree import NAMESPACE
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim.optimizer import (
    Grads,
    Optimizer,
    OptState,
    Params,
    RateFunction,
    as_schedule,
    check_number,
    check_state,
    gradients_of,
    like,
    memory_of,
    rate_at,
)

if TYPE_CHECKING:
    from pure_loop.time import Timestamp

__all__ = ["from_torch"]

# Attributes of every torch optimizer that say nothing about the training.
_MACHINERY = frozenset(
    {
        "defaults",
        "param_groups",
        "state",
        "_need_device_dtype_check_for_fused",
        "_step_supports_amp_scaling",
        "_warned_capturable_if_run_uncaptured",
        "_zero_grad_profile_name",
    }
)
_ELEMENTWISE = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
_ATOMS = (bool, int, float, str)
_KEYS = ("memory", "started", "shared", "group", "attributes")


def from_torch(cls: type[torch.optim.Optimizer], **options: Any) -> Optimizer:
    """A pure optimizer that does what ``cls(params, **options)`` does.

    Args:
        cls: a subclass of ``torch.optim.Optimizer`` whose ``step()`` needs no closure.
        options: its options. ``lr`` may be a function of the timestamp. All parameters are in one group; see
            :func:`partition` for several.

    The state holds ``memory`` (for each parameter what the optimizer keeps for it), ``started``, ``shared`` (what it
    keeps for no parameter), ``group`` (options of the parameter group that it changes, such as a learned step
    size) and ``attributes`` (numbers and tensors that it changes on itself).

    Raises:
        ArgumentTypeError: (a TypeError) if ``cls`` is no optimizer class.
        ArgumentError: (a ValueError) if ``cls`` refuses the options, or its step needs a closure.

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.time import Timestamp
    >>> optimizer = from_torch(torch.optim.Adagrad, lr=0.5)
    >>> params, grads = FrozenDict(w=torch.zeros(2)), FrozenDict(w=torch.tensor([2.0, -1.0]))
    >>> new, opt_state = optimizer.update(grads, optimizer.init(params), params, Timestamp())
    >>> new["w"], opt_state["memory"]["w"]["sum"]
    (tensor([-0.5000,  0.5000]), tensor([4., 1.]))
    """
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"from_torch needs a subclass of torch.optim.Optimizer, got {cls!r}; "
            "give the class and its options: from_torch(torch.optim.RAdam, lr=1e-3)"
        )
    name = cls.__name__
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ArgumentError(
            f"from_torch: {name} can't be used, because {name}.step(closure) runs the model and the loss again inside "
            "the step, and an update is a function of gradients that are already there; take an optimizer whose step() "
            "needs no closure, such as torch.optim.AdamW"
        )
    lr = options.get("lr")
    scheduled = callable(lr)
    rest = {key: value for key, value in options.items() if key != "lr" or not scheduled}
    if "lr" in rest:
        rest["lr"] = check_number(f"from_torch({name})", "lr", lr)
    rule = _FromTorch(cls, FrozenDict(rest), lr if scheduled else None)
    # Two dimensions, because some classes serve only matrices.
    defaults = rule.trial({"trial": torch.zeros(2, 2)})[0].defaults
    if scheduled and "lr" not in defaults:
        raise ArgumentError(f"from_torch: {name} has no option lr, got lr={lr!r}")
    rate: RateFunction = _no_rate
    if "lr" in defaults:
        rate = as_schedule("from_torch", lr if callable(lr) else float(defaults["lr"]))
    shown = FrozenDict({key: value for key, value in rest.items() if key != "lr"})
    return Optimizer(
        name=f"from_torch({name})",
        init=rule.init,
        update=rule.update,
        lr=rate,
        options=shown,
        elementwise=cls.__module__.startswith("torch.optim.") and cls.__name__ in _ELEMENTWISE,
    )


def _no_rate(timestamp: Timestamp) -> float:
    return math.nan


@attrs.frozen
class _FromTorch:
    cls: type[torch.optim.Optimizer]
    options: FrozenDict[str, Any]
    lr: RateFunction | None

    @property
    def name(self) -> str:
        return f"from_torch({self.cls.__name__})"

    def build(self, params: list[Tensor]) -> torch.optim.Optimizer:
        options = self.options if self.lr is None else {**self.options, "lr": 1e-3}
        try:
            return self.cls([param.requires_grad_() for param in params], **options)
        except Exception as error:
            raise ArgumentError(
                f"{self.name}: {self.cls.__name__}(params, **{dict(options)}) failed: {error}"
            ) from error

    @torch.no_grad()
    def trial(self, params: Mapping[str, Tensor]) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer, list[Tensor]]:
        """A new optimizer, one that has made a step, and the copies of the parameters that belong to it."""
        new = self.build(clone_all(list(params.values())))
        devices = {param.device for param in params.values() if param.device.type == "cuda"}
        with torch.random.fork_rng(list(devices)):
            try:
                return new, *self.tried(params, sparse=False)
            except Exception as error:
                with contextlib.suppress(Exception):
                    return new, *self.tried(params, sparse=True)
                raise ArgumentError(
                    f"{self.name}: {self.cls.__name__} can't be used, because its step() failed on gradients alone, "
                    f"without a closure that runs the model again: {type(error).__name__}: {error}"
                ) from error

    def tried(self, params: Mapping[str, Tensor], sparse: bool) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        copies = clone_all(list(params.values()))
        optimizer = self.build(copies)
        for copied in copies:
            ones = torch.ones_like(copied, requires_grad=False)
            copied.grad = ones.to_sparse() if sparse else ones
        optimizer.step()
        return optimizer, copies

    @torch.no_grad()
    def init(self, params: Params) -> OptState:
        if not params:
            return FrozenDict({key: FrozenDict() for key in _KEYS})
        new, after, copies = self.trial(params)
        own = new.param_groups[0]["params"]
        built = [_copied(dict(new.state[p])) if p in new.state else {} for p in own]
        learnt = [
            built[i] or {key: _blank(value) for key, value in after.state[p].items()} for i, p in enumerate(copies)
        ]
        group, attributes = self.group(new), _attributes(new)
        changed = _changed(self.group(after), group), _changed(_attributes(after), attributes)
        return FrozenDict(
            {
                "memory": FrozenDict(zip(params, map(FrozenDict, learnt), strict=True)),
                "started": FrozenDict(zip(params, map(bool, built), strict=True)),
                "shared": _shared(new),
                "group": FrozenDict({key: group[key] for key in changed[0] if key in group}),
                "attributes": FrozenDict({key: attributes[key] for key in changed[1] if key in attributes}),
            }
        )

    @torch.no_grad()
    def update(
        self, grads: Grads, opt_state: OptState, params: Params, timestamp: Timestamp
    ) -> tuple[Params, OptState]:
        check_state(self.name, opt_state, _KEYS)
        if not params:
            return params, opt_state
        names = list(params)
        memories: list[FrozenDict[str, Any]] = memory_of(opt_state, "memory", names)
        started: list[bool] = memory_of(opt_state, "started", names)
        copies = clone_all(list(params.values()))
        optimizer = self.build(copies)
        group, attributes = self.group(optimizer), _attributes(optimizer)
        for name, copied, grad in zip(names, copies, _copied(gradients_of(grads, names)), strict=True):
            if grad is not None:
                # backward() would bring a gradient into its parameter's layout, and optimizers count on it.
                copied.grad = grad if grad.is_sparse else like(grad, copied, f"the gradient of {name!r}")
        for copied, memory, known in zip(copies, _copied(memories), started, strict=True):
            if known:
                optimizer.state[copied] = dict(memory)
        optimizer.state.update(_copied(dict(opt_state["shared"])))
        optimizer.param_groups[0].update(_copied(dict(opt_state["group"])))
        vars(optimizer).update(_copied(dict(opt_state["attributes"])))
        if self.lr is not None:
            optimizer.param_groups[0]["lr"] = rate_at(self.name, self.lr, timestamp)
        optimizer.step()
        new_memories = [
            _like_before(optimizer.state[copied], old) if copied in optimizer.state else old
            for copied, old in zip(copies, memories, strict=True)
        ]
        now = [known or bool(optimizer.state.get(p)) for p, known in zip(copies, started, strict=True)]
        for copied in copies:
            copied.grad = None
            copied.requires_grad_(False)
        return FrozenDict(zip(names, copies, strict=True)), FrozenDict(
            {
                "memory": FrozenDict(zip(names, new_memories, strict=True)),
                "started": FrozenDict(zip(names, now, strict=True)),
                "shared": _shared(optimizer),
                "group": _carried(self.group(optimizer), group, opt_state["group"]),
                "attributes": _carried(_attributes(optimizer), attributes, opt_state["attributes"]),
            }
        )

    def group(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The options of the parameter group, but for those that the caller sets in every update."""
        set_each_time = ("params",) if self.lr is None else ("params", "lr")
        group: dict[str, Any] = _copied(
            {key: value for key, value in optimizer.param_groups[0].items() if key not in set_each_time}
        )
        return group


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    attributes: dict[str, Any] = _copied(
        {
            key: value
            for key, value in vars(optimizer).items()
            if key not in _MACHINERY and not key.endswith("_hooks") and _is_data(value)
        }
    )
    return attributes


def _shared(optimizer: torch.optim.Optimizer) -> FrozenDict[Any, Any]:
    return FrozenDict({key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)})


def _is_data(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_data, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _changed(after: dict[str, Any], before: dict[str, Any]) -> list[str]:
    return [key for key, value in after.items() if key not in before or not _same(value, before[key])]


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _carried(after: dict[str, Any], base: dict[str, Any], carried: Mapping[str, Any]) -> FrozenDict[str, Any]:
    """What differs from a newly built optimizer, and what did so before."""
    keys = [*(key for key in carried if key in after), *(k for k in _changed(after, base) if k not in carried)]
    return FrozenDict({key: after[key] for key in keys})


def _like_before(new: Mapping[str, Any], old: Mapping[str, Any]) -> FrozenDict[str, Any]:
    """``new`` with its keys in the order of ``old``."""
    if list(new) == list(old):
        return FrozenDict(new)
    keys = [*(key for key in old if key in new), *(key for key in new if key not in old)]
    return FrozenDict({key: new[key] for key in keys})


def _blank(value: Any) -> Any:
    """What stands for a memory that isn't there yet."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value, requires_grad=False)
    return type(value)() if isinstance(value, bool | int | float) else copy.deepcopy(value)


def _copied(tree: Any) -> Any:
    """``tree`` with other tensors and containers, all tensors copied at once."""
    leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)
    copies = iter(clone_all([leaf for leaf in leaves if isinstance(leaf, Tensor)]))
    return structure.unflatten(
        next(copies) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, _ATOMS) else copy.deepcopy(leaf)
        for leaf in leaves
    )
