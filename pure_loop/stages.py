"""Stages: the computations between the events, as pure functions ``State -> State``.

A stage knows no events, algorithms or callbacks. It reads a State, computes, and returns another;
whatever it writes to is memory of its own. The loop's script strings stages and events together;
scripts of your own and algorithms call the same stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import optree
import torch
from torch import Tensor, nn

from pure_loop.errors import AlgorithmStructureError, DataError, LossError, NonFiniteError
from pure_loop.frozendict import FrozenDict
from pure_loop.gradients import clip_by_norm
from pure_loop.optim import Optimizer
from pure_loop.precision import Precision
from pure_loop.random import derive, seeded
from pure_loop.state import NON_FINITE_ADVICE, State
from pure_loop.task import Task

__all__ = ["Stages", "value_and_grad"]

T = TypeVar("T")
ClipGrad = Callable[[FrozenDict[str, Any], FrozenDict[str, Tensor]], FrozenDict[str, Any]]


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _detach_tree(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach()
    return optree.tree_map(_detach, tree, namespace="pure_loop")


class _GradEnabled:
    """``torch.enable_grad`` at half its price: it stands in every stage."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


def total_loss(loss: Any) -> Tensor:
    """The loss that is differentiated: the tensor itself, or ``total`` of a dict."""
    return loss["total"] if isinstance(loss, dict) else loss  # type: ignore[no-any-return]


def _check_loss(loss: Any, state: State) -> None:
    where = f"at AFTER_LOSS of batch {state.timestamp.batch}"
    if isinstance(loss, dict):
        if "total" not in loss:
            raise LossError(f"the loss {where} is a dict with keys {sorted(map(str, loss))}; it needs the key 'total'.")
        loss = loss["total"]
    if not isinstance(loss, Tensor):
        raise LossError(
            f"the loss {where} is {loss!r} of type {type(loss).__name__}; return a tensor of shape (), computed "
            "from the outputs, or a dict of such with the key 'total'."
        )
    if loss.ndim != 0:
        raise LossError(
            f"the loss {where} has shape {tuple(loss.shape)}; a loss is one number: return its mean, loss.mean()."
        )
    if not loss.is_floating_point():
        raise LossError(f"the loss {where} has dtype {loss.dtype}, which can't be differentiated.")


@attrs.frozen(kw_only=True)
class Stages:
    """The stages of training one model, with the settings they need.

    Args:
        task: what the model does with a batch.
        optimizer: how gradients become an update; None where nothing is updated.
        precision: of forward and loss.
        microbatch_size: samples a forward at most; None: the whole batch.
        clip_grad: a global norm, or a function ``(grads, params) -> grads``.
        nonfinite: ``"error"`` or ``"skip"``: what to do with a loss or gradient that is NaN or infinite.
        rank: this process among the ranks; part of every seed that must differ between them.
    """

    task: Task
    optimizer: Optimizer | None = None
    precision: Precision = Precision("fp32", None, False)
    microbatch_size: int | None = None
    clip_grad: float | ClipGrad | None = None
    nonfinite: str = "error"
    rank: int = 0

    def microbatches(self, batch: Any, size: int | None = None) -> list[Any]:
        """The batch in parts of at most ``size`` (default: ``microbatch_size``) samples, the last one smaller."""
        size = self.microbatch_size if size is None else size
        if size is None or self.task.samples(batch) <= size:
            return [batch]
        return self.task.split(batch, size)

    def forward(self, state: State, *, index: int = 0) -> State:
        """``outputs`` of ``microbatch`` in training mode, and the buffers after it.

        ``params`` become autograd leaves, which :meth:`backward` differentiates by. Random numbers
        (dropout) come from the run's seed, the batch and ``index``, the microbatch's number in it.
        """
        params = state.model.leaves(state.params)
        outputs, buffers = self._call(state, params, self.task.forward, "forward", index, training=True)
        return state.replace(params=params, outputs=outputs, buffers=buffers, event=None)

    def loss(self, state: State, *, index: int = 0) -> State:
        """``loss`` of ``outputs``: the mean over this microbatch."""
        if self.task.loss is None:
            outputs = state.outputs

            def method(module: Any, batch: Any) -> Any:
                return module.loss(outputs, batch)

            loss, _ = self._call(state, state.params, method, "loss", index, training=True)
        else:
            t = state.timestamp
            seed = derive(state.seed, "loss", t.epoch, t.batch, index, self.rank)
            with seeded(seed, state.device), _GradEnabled():
                autocast = self.precision.autocast(state.device)
                if autocast is None:
                    loss = self.task.loss(state.outputs, state.microbatch)
                else:
                    with autocast:
                        loss = self.task.loss(state.outputs, state.microbatch)
        _check_loss(loss, state)
        return state.replace(loss=loss, event=None)

    def backward(self, state: State, *, weight: float | Tensor = 1.0) -> State:
        """Add ``weight`` times the gradient of ``loss`` to ``grads``, and drop the graph.

        With a loss scale, gradients are scaled until :meth:`finish_gradients`.

        Raises:
            LossError: the loss doesn't depend on any parameter.
        """
        loss, leaves = total_loss(state.loss), state.params
        origin = getattr(leaves, "origin", None)
        if origin is None:
            raise AlgorithmStructureError(
                "params were replaced between the forward and the backward of a microbatch, so the loss is not a "
                "function of them. Replace params at BEFORE_FORWARD, or from AFTER_BACKWARD on."
            )
        if not loss.requires_grad:
            raise LossError(
                f"the loss of batch {state.timestamp.batch} does not depend on any parameter that requires a gradient: "
                "was it detached, computed under torch.no_grad(), or turned into a number with .item()?"
            )
        names = state.model.trainable
        inputs = list(leaves.values()) if len(names) == len(leaves) else [leaves[name] for name in names]
        seed: Tensor | None = None
        if state.loss_scale is not None:
            seed = (state.loss_scale.scale * weight).to(loss.dtype)
        elif isinstance(weight, Tensor):
            seed = weight.to(loss)
        elif weight != 1.0:
            seed = torch.full_like(loss, weight)
        found = torch.autograd.grad(loss, inputs, seed, allow_unused=True)
        before = state._grads
        if before is not None:
            found = _add([before[name] for name in names], found)
        return state.replace(
            params=origin,
            outputs=_detach_tree(state.outputs),
            loss=_detach_tree(state.loss),
            grads=FrozenDict(zip(names, found, strict=True)),
            event=None,
        )

    def finish_gradients(self, state: State, *, divisor: float | Tensor = 1.0, loss: Any = None) -> State:
        """Unscale the accumulated gradients, divide them by ``divisor``, and clip them.

        ``loss``, if given, becomes the State's loss: that of the whole batch.
        """
        grads = state._grads
        with torch.no_grad():
            if state.loss_scale is not None:
                divisor = divisor * state.loss_scale.scale
            if isinstance(divisor, Tensor) or divisor != 1.0:
                grads = _map_present(lambda present: torch._foreach_div(present, divisor), grads)
            clip = self.clip_grad
            if clip is not None:
                if isinstance(clip, int | float):
                    grads = clip_by_norm(grads, clip)
                else:
                    grads = clip(grads, state.params)
        return state.replace(grads=grads, loss=state.loss if loss is None else loss, event=None)

    def update(self, state: State) -> State:
        """One step of the optimizer; skipped (and counted) where a gradient overflowed its loss scale.

        The new parameters are looked at for NaN and infinity: they show those of the gradients, whatever
        an algorithm did to them, and they are memory of ours, in which the cheapest kernel may write.

        Raises:
            NonFiniteError: a loss or gradient that is not finite, on the CPU at once; on other devices it is
                noted in ``state.nonfinite`` and raised by :meth:`pure_loop.State.check_finite`.
        """
        optimizer = self.optimizer
        assert optimizer is not None
        names, params, grads = state.model.trainable, state.params, state._grads
        trained = params if len(names) == len(params) else FrozenDict((name, params[name]) for name in names)
        with torch.no_grad():
            new, opt_state = optimizer.update(grads, state.opt_state, trained, state.timestamp)
            found = _find_nonfinite(total_loss(state.loss), [t for t, o in zip(new.values(), trained.values(), strict=True) if t is not o])
            changes: dict[str, Any] = {}
            if state.loss_scale is not None:
                changes["loss_scale"] = state.loss_scale.update(found)
            skips = self.nonfinite == "skip" or state.loss_scale is not None
            if found.device.type == "cpu":
                if found.item():
                    if not skips or (self.nonfinite == "error" and not _finite(state.loss)):
                        raise _nonfinite_error(state)
                    new, opt_state = trained, state.opt_state
                    changes["skipped"] = state.skipped + 1
            else:
                if skips:
                    bad = found[0].bool()
                    new = _where(bad, trained, new)
                    opt_state = _where(bad, state.opt_state, opt_state)
                    changes["skipped"] = state.skipped + bad
                if self.nonfinite == "error":
                    wrong = ~torch.isfinite(total_loss(state.loss)) if skips else found[0].bool()
                    changes["nonfinite"] = torch.where(
                        wrong & (state.nonfinite < 0), state.timestamp.batch, state.nonfinite
                    )
        if trained is not params:
            new = FrozenDict({**params, **new})
        return state.replace(params=new, opt_state=opt_state, event=None, **changes)

    def validate(self, state: State, *, label: str, batch: int, index: int = 0) -> State:
        """``outputs`` of ``microbatch`` in evaluation mode, without gradients."""
        with torch.no_grad():
            outputs, buffers = self._call(
                state, state.params, self.task.evaluate, label, index, training=False, batch=batch
            )
        return state.replace(outputs=outputs, buffers=buffers, event=None)

    def validation_loss(self, state: State) -> Tensor:
        """The loss of ``outputs`` in evaluation; shape ()."""
        with torch.no_grad(), seeded(derive(state.seed, "validation loss"), state.device):
            if self.task.loss is None:
                loss, _ = state.model.apply(
                    lambda module: module.loss(state.outputs, state.microbatch),  # type: ignore[operator]
                    state.params,
                    state.buffers,
                    training=False,
                )
            else:
                loss = self.task.loss(state.outputs, state.microbatch)
        return total_loss(loss)

    def _call(
        self,
        state: State,
        params: FrozenDict[str, Tensor],
        function: Callable[[nn.Module, Any], T],
        name: str,
        index: int,
        *,
        training: bool,
        batch: int | None = None,
    ) -> tuple[T, FrozenDict[str, Tensor]]:
        """Call the module with seeded random numbers, in this precision, with gradients if training."""
        microbatch, t = state.microbatch, state.timestamp
        seed = (
            derive(state.seed, name, t.epoch, t.batch, index, self.rank)
            if batch is None
            else derive(state.seed, name, batch, index, self.rank)
        )
        device = state.device
        with seeded(seed, device):
            autocast = self.precision.autocast(device)
            if autocast is None and not training:
                return state.model.apply(lambda m: function(m, microbatch), params, state.buffers, training=False)
            with _GradEnabled() if training else torch.no_grad():
                if autocast is None:
                    return state.model.apply(lambda m: function(m, microbatch), params, state.buffers, training=training)
                with autocast:
                    return state.model.apply(lambda m: function(m, microbatch), params, state.buffers, training=training)


@attrs.frozen
class Weights:
    """How much each microbatch of a batch counts, such that the result doesn't depend on the split.

    Each gradient is multiplied by its weight over the power of two at or above the sum, which is exact,
    and the sum is divided once at the end. Where all arithmetic is exact, every split gives the same bits.
    """

    shares: tuple[float | Tensor, ...]
    divisor: float | Tensor
    fractions: tuple[float | Tensor, ...]

    @classmethod
    def of(cls, weights: list[float | Tensor], batch: int) -> Weights:
        """
        Raises:
            DataError: weights that are negative, not finite or sum to zero.
        """
        read = [w.item() if isinstance(w, Tensor) and w.device.type == "cpu" else w for w in weights]
        if any(isinstance(weight, Tensor) for weight in read):
            if len(read) == 1:
                return cls((1.0,), 1.0, (1.0,))
            total: Any = sum(read)
            power = torch.exp2(torch.ceil(torch.log2(torch.as_tensor(total, dtype=torch.float32))))
        else:
            if not all(math.isfinite(weight) and weight >= 0 for weight in read) or not sum(read) > 0:
                raise DataError(
                    f"the microbatches of batch {batch} weigh {read}: weights are finite, not negative, and not all zero."
                )
            total = sum(read)
            mantissa, exponent = math.frexp(total)
            power = math.ldexp(1.0, exponent - (mantissa == 0.5))
        return cls(tuple(w / power for w in read), total / power, tuple(w / total for w in read))


def _add(before: list[Any], found: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(a is None or b is None for a, b in zip(before, found, strict=True)):
        return tuple(b if a is None else a if b is None else a + b for a, b in zip(before, found, strict=True))
    return tuple(torch._foreach_add(before, list(found)))


def _map_present(function: Callable[[list[Tensor]], Any], grads: FrozenDict[str, Any]) -> FrozenDict[str, Any]:
    present = {name: gradient for name, gradient in grads.items() if gradient is not None}
    changed = dict(zip(present, function(list(present.values())), strict=True))
    return FrozenDict(changed) if len(changed) == len(grads) else FrozenDict((n, changed.get(n)) for n in grads)


def _find_nonfinite(loss: Tensor, fresh: list[Tensor]) -> Tensor:
    """1 where the loss or one of these tensors is not finite; float32, shape (1,), on their device.

    The kernel writes each tensor times one back, so the tensors must be nobody else's.
    """
    device = loss.device
    found = torch.zeros(1, dtype=torch.float32, device=device)
    one = torch.ones(1, dtype=torch.float32, device=device)
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in fresh:
        groups.setdefault(tensor.dtype, []).append(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    for group in groups.values():
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, one)
    if device.type == "cpu":
        return found if math.isfinite(loss.item()) else one
    return torch.maximum(found, (~torch.isfinite(loss)).float())


def _finite(loss: Any) -> bool:
    return math.isfinite(total_loss(loss).item())


def _nonfinite_error(state: State) -> NonFiniteError:
    t = state.timestamp
    bad = [
        name for name, gradient in (state._grads or {}).items()
        if gradient is not None and not bool(torch.isfinite(gradient).all())
    ]
    if not _finite(state.loss):
        what = f"the loss is {total_loss(state.loss).item()}"
    elif bad:
        what = f"the gradient of {bad[0]!r}" + (f" (and of {len(bad) - 1} more)" if len(bad) > 1 else "") + " is not finite"
    else:
        what = "the update made parameters that are not finite"
    return NonFiniteError(
        f"batch {t.batch} (epoch {t.epoch}, batch {t.batch_in_epoch} in it): {what}. {NON_FINITE_ADVICE}"
    )


def _where(condition: Tensor, yes: Any, no: Any) -> Any:
    def choose(a: Any, b: Any) -> Any:
        return torch.where(condition, a, b) if isinstance(b, Tensor) and a is not b else b

    return optree.tree_map(choose, yes, no, namespace="pure_loop")


def value_and_grad(
    function: Callable[[FrozenDict[str, Tensor]], Any], params: FrozenDict[str, Tensor]
) -> tuple[Any, FrozenDict[str, Any]]:
    """``function(params)`` and its gradient, for scripts of your own: eager autograd, no ``.grad`` written.

    Args:
        function: of a mapping of names to tensors; gives a scalar tensor, or ``(tensor, anything)``.
        params: the point.

    Returns:
        What the function gave, without a graph, and the gradient by name (None where it has no part).

    >>> value_and_grad(lambda p: p["x"] ** 2, FrozenDict(x=torch.tensor(3.0)))
    (tensor(9.), FrozenDict({'x': tensor(6.)}))
    """
    leaves = FrozenDict((name, tensor.detach().requires_grad_()) for name, tensor in params.items())
    with _GradEnabled():
        result = function(leaves)
        value = result[0] if isinstance(result, tuple) else result
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return _detach_tree(result), FrozenDict(zip(leaves, found, strict=True))
