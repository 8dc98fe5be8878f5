"""Float32 copies of half-precision parameters: where an optimizer steps, and keeps its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor

from pure_loop._internal.tree_ops import is_sharded
from pure_loop._internal.weights import is_readable
from pure_loop.errors import ArgumentTypeError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim._in_torch import no_class
from pure_loop.optim.kernels import check_state, in_order
from pure_loop.optim.optimizer import Grads, Optimizer, OptState, Params
from pure_loop.optim.resuming import AFRESH, made_by_another, refuse_other_memory
from pure_loop.time import Timestamp

__all__ = ["master_weights"]

_HALF = (torch.bfloat16, torch.float16)
_KEYS = ("master", "inner")


def master_weights(optimizer: Optimizer) -> Optimizer:
    """An optimizer that steps on float32 copies of bfloat16 and float16 parameters, and keeps its state in float32.

    Each step adds the update to the copy, in float32, and rounds the copy to the parameter. Updates that are smaller
    than half of the distance between two bfloat16 numbers accumulate in the copy; a step on the parameters themselves
    loses them. Micikevicius et al., Mixed Precision Training: https://arxiv.org/abs/1710.03740, section 3.1.

    Args:
        optimizer: any one; it is given the copies, and the gradients in float32. Parameters of other dtypes are given
            to it as they are.

    The state holds ``master`` (the copies, by name) and ``inner`` (the state of ``optimizer``). A parameter that
    something else has changed since the last step, such as an algorithm, begins again from its new value: where the
    copy no longer rounds to the parameter.

    Raises:
        ArgumentTypeError: (a TypeError) if it is given no optimizer.
        ResumeError: (a ValueError) by ``update``, for the state of another model or optimizer.

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.optim import sgd
    >>> from pure_loop.time import Timestamp
    >>> params, grads = FrozenDict(w=torch.ones(1).bfloat16()), FrozenDict(w=-torch.ones(1).bfloat16())
    >>> optimizer = master_weights(sgd(lr=0.001))  # the number after 1 in bfloat16 is 1.0078
    >>> opt_state = optimizer.init(params)
    >>> for batch in range(5):
    ...     params, opt_state = optimizer.update(grads, opt_state, params, Timestamp(batch=batch))
    >>> params["w"], opt_state["master"]["w"]
    (tensor([1.0078], dtype=torch.bfloat16), tensor([1.0050]))
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"master_weights needs an optimizer, got {optimizer!r:.80}; write master_weights(pl.optim.adamw(lr=1e-3))"
        )
    rule = _MasterWeights(optimizer)
    return attrs.evolve(
        optimizer,
        name=f"master_weights({optimizer.name})",
        init=rule.init,
        update=rule.update,
        overwrite=None if optimizer.overwrite is None else rule.overwrite,
        check=rule.check,
        seeing=None if optimizer.seeing is None else rule.seeing,
        in_torch=None if getattr(optimizer.in_torch, "evaluated", None) is None else rule,
    )


@attrs.frozen
class _MasterWeights:
    optimizer: Optimizer

    def seeing(self, view: Callable[[str, Tensor], Tensor]) -> Optimizer:
        assert self.optimizer.seeing is not None
        return master_weights(self.optimizer.seeing(view))

    def init(self, params: Params) -> OptState:
        master = FrozenDict((name, param.detach().float()) for name, param in _half(params).items())
        return FrozenDict(master=master, inner=self.optimizer.init(_merged(params, master)))

    def check(self, opt_state: Any, params: Params) -> None:
        """
        Raises:
            ResumeError: another optimizer, or one of other parameters, made ``opt_state``.
        """
        if not isinstance(opt_state, Mapping) or opt_state.keys() != set(_KEYS):
            raise made_by_another(f"master_weights({self.optimizer.name})", opt_state, dict.fromkeys(_KEYS))
        master, wanted = opt_state["master"], _half(params)
        odd = [
            name
            for name in {**wanted, **master}
            if name not in wanted or name not in master or master[name].shape != wanted[name].shape
        ]
        if odd:
            raise ResumeError(
                f"opt_state has float32 copies of other parameters than the model has in half precision: {odd[:3]} "
                f"differ. Give the State that was made with this model, or {AFRESH}"
            )
        refuse_other_memory(self.optimizer, opt_state["inner"], _merged(params, master))

    def update(
        self, grads: Grads, opt_state: OptState, params: Params, timestamp: Timestamp
    ) -> tuple[Params, OptState]:
        half, master = self._read(opt_state, params)
        with torch.set_grad_enabled(False):
            current = FrozenDict((name, _following(master[name], param)) for name, param in half.items())
            masters, inner = self.optimizer.update(
                _widened(grads, params), opt_state["inner"], _merged(params, current), timestamp
            )
            master = FrozenDict((name, masters[name]) for name in half)
            result = FrozenDict((name, masters[name].to(param.dtype)) for name, param in params.items())
        return result, FrozenDict(master=master, inner=inner)

    def overwrite(
        self, grads: Grads, opt_state: OptState, params: Params, timestamp: Timestamp, **options: Any
    ) -> tuple[Params, OptState]:
        """:meth:`update`, written to the copies, to the state of the optimizer, and to the parameters."""
        half, master = self._read(opt_state, params)
        overwrite: Any = self.optimizer.overwrite
        with torch.set_grad_enabled(False):
            gradients = _widened(grads, params)
            for name, param in half.items():
                followed = _following(master[name], param)
                if followed is not master[name]:
                    master[name].copy_(followed)
            _, inner = overwrite(gradients, opt_state["inner"], _merged(params, master), timestamp, **options)
            if half:
                torch._foreach_copy_(list(half.values()), [master[name] for name in half])
        return params, opt_state if inner is opt_state["inner"] else FrozenDict({**opt_state, "inner": inner})

    def _read(self, opt_state: OptState, params: Params) -> tuple[Params, Params]:
        """The parameters in half precision, and their copies."""
        check_state(f"master_weights({self.optimizer.name})", opt_state, _KEYS)
        half, master = _half(params), opt_state["master"]
        if master.keys() != half.keys():
            raise ResumeError(
                f"opt_state has float32 copies of {sorted(master)[:5]}, and the parameters in half precision are "
                f"{sorted(half)[:5]}: begin again with optimizer.init(params)"
            )
        return half, master

    def cls(self, *_: Any, **__: Any) -> NoReturn:
        """No class of torch has the state with the copies, nor names for it."""
        raise no_class(f"master_weights({self.optimizer.name})")

    names = write = read = cls

    def evaluated(self, opt_state: OptState, params: Params) -> Params | None:
        """As :func:`pure_loop.optim.evaluation_params` has them, rounded; None: the optimizer has no modes."""
        modes: Any = self.optimizer.in_torch
        half, master = self._read(opt_state, params)
        current = FrozenDict((name, _following(master[name], param)) for name, param in half.items())
        result = modes.evaluated(opt_state["inner"], _merged(params, current))
        if result is None:
            return None
        return FrozenDict((name, value.to(params[name].dtype)) for name, value in result.items())


def _half(params: Params) -> Params:
    return FrozenDict((name, param) for name, param in params.items() if param.dtype in _HALF)


def _merged(params: Params, master: Mapping[str, Tensor]) -> Params:
    """The parameters as the optimizer is given them: the copies, and those of other dtypes."""
    return FrozenDict((name, master.get(name, param)) for name, param in params.items())


def _widened(grads: Grads, params: Params) -> FrozenDict[str, Tensor | None]:
    gradients = zip(params.items(), in_order({"grads": grads}, list(params))["grads"], strict=True)
    return FrozenDict(
        (name, gradient.float() if gradient is not None and param.dtype in _HALF else gradient)
        for (name, param), gradient in gradients
    )


def _following(master: Tensor, param: Tensor) -> Tensor:
    """The copy, but where it no longer rounds to the parameter that: something else has changed it."""
    rounded = master.to(param.dtype)
    # On a CPU comparing costs less than choosing, and of integers least; elsewhere it would wait for the device.
    compared_here = is_readable(param) and not is_sharded(param)
    if compared_here and torch.equal(rounded.view(torch.int16), param.view(torch.int16)):
        return master
    return torch.where(rounded == param, master, param.float())
