"""What the losses of torch divide by: the weight of a part of a batch that such a loss implies.

``torch.nn.functional.cross_entropy`` is a mean over the targets that are not ignored, ``mse_loss`` one over elements,
and with ``reduction="sum"`` a loss is no mean at all. So the weight of a microbatch, of a rank's share or of a part of
an evaluation is known for a function of :mod:`torch.nn.functional`, for a ``functools.partial`` of one with keywords,
and for a module of :mod:`torch.nn`. For any other loss it is unknown.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from pure_loop._internal.weights import is_readable
from pure_loop.errors import DataError

__all__ = ["Implied", "implied_by"]

# From targets and the options of the loss to what its mean divides by.
Divisor: TypeAlias = Callable[[Tensor, Mapping[str, Any]], "int | Tensor"]


@attrs.frozen
class Implied:
    """What a loss of torch says of the weight of targets.

    Attributes:
        summed: whether the loss is a sum: parts add up, whatever they hold.
        counted: whether the weight is read from the values of the targets; else their shape is enough.
        harmless: whether the gradient is 0, and not NaN, where the weight is 0.
        ignore_index: the index of targets that do not count; None where the loss ignores none.
        class_weights: whether classes have weights.
    """

    _divisor: Divisor
    _options: Callable[[], Mapping[str, Any]]
    summed: bool
    counted: bool
    harmless: bool
    ignore_index: int | None
    class_weights: bool

    def weigh(self, targets: Tensor) -> int | Tensor:
        """What the mean over these targets divides by: an int, or a tensor of shape () on their device."""
        return self._divisor(targets, self._options())

    def counts_all(self, targets: Any) -> bool:
        """Whether a look at all targets of a batch, cheaper than one at each part, shows that none is ignored.

        False where they have class weights, or can't be read without waiting for a device.
        """
        ignored = self.ignore_index
        if not (self.harmless and ignored is not None and isinstance(targets, Tensor) and is_readable(targets)):
            return False
        if targets.is_floating_point() or not targets.numel():
            return False
        # Of negative ones it is the only one that torch lets pass.
        return targets.min().item() >= 0 if ignored < 0 else not (targets == ignored).any().item()


def _elements(targets: Tensor, options: Mapping[str, Any]) -> int:
    return targets.numel()


def _rows(targets: Tensor, options: Mapping[str, Any]) -> int:
    """Targets of shape (n, classes) or (classes,)."""
    return targets.shape[0] if targets.ndim > 1 else 1


def _all_but_classes(targets: Tensor, options: Mapping[str, Any]) -> int:
    """Targets of shape (..., classes)."""
    return targets.numel() // targets.shape[-1] if targets.ndim and targets.shape[-1] else targets.numel()


def _divergence(targets: Tensor, options: Mapping[str, Any]) -> int:
    return targets.shape[0] if options["reduction"] == "batchmean" and targets.ndim else targets.numel()


def _classes(targets: Tensor, options: Mapping[str, Any]) -> int | Tensor:
    """Targets that are class indices, (n, ...), or probabilities, (n, classes, ...)."""
    if targets.is_floating_point():
        axis = 1 if targets.ndim > 1 else 0
        return targets.numel() // max(1, targets.shape[axis]) if targets.ndim else 1
    indices = targets.long()  # unsigned ones could not be compared with -100, and would be taken for a mask
    present = indices != options["ignore_index"]
    weights = options["weight"]
    result: Tensor
    if weights is None:
        result = present.sum()
        return result
    result = (weights.to(indices.device)[torch.where(present, indices, 0)] * present).sum()
    if not options["label_smoothing"]:
        return result
    # A target of class weight 0 has a loss then, from the other classes, and a mean over such targets divides it by 0.
    if not is_readable(result):
        return torch.where((result == 0) & present.any(), float("nan"), result)
    if result == 0 and present.any():
        raise DataError(
            "the targets of a microbatch all have class weight 0, and with label_smoothing they have a loss, which its "
            "mean divides by 0: leave them out by ignore_index=, or give the class a small weight, such as 1e-6."
        )
    return result


# Each function of (outputs, targets) with its module. Of those that are left out a part of a batch has no weight of its
# own: they take more than outputs and targets, or parameters.
_DIVISORS: dict[Any, Divisor] = {
    functional.cross_entropy: _classes,
    functional.nll_loss: _classes,
    functional.mse_loss: _elements,
    functional.l1_loss: _elements,
    functional.smooth_l1_loss: _elements,
    functional.huber_loss: _elements,
    functional.binary_cross_entropy: _elements,
    functional.binary_cross_entropy_with_logits: _elements,
    functional.kl_div: _divergence,
    functional.poisson_nll_loss: _elements,
    functional.soft_margin_loss: _elements,
    functional.hinge_embedding_loss: _elements,
    functional.multi_margin_loss: _elements,
    functional.multilabel_margin_loss: _rows,
    functional.multilabel_soft_margin_loss: _all_but_classes,
    # By its forward, so that a subclass with one of its own is not taken for it.
    nn.CrossEntropyLoss.forward: _classes,
    nn.NLLLoss.forward: _classes,
    nn.MSELoss.forward: _elements,
    nn.L1Loss.forward: _elements,
    nn.SmoothL1Loss.forward: _elements,
    nn.HuberLoss.forward: _elements,
    nn.BCELoss.forward: _elements,
    nn.BCEWithLogitsLoss.forward: _elements,
    nn.KLDivLoss.forward: _divergence,
    nn.PoissonNLLLoss.forward: _elements,
    nn.SoftMarginLoss.forward: _elements,
    nn.HingeEmbeddingLoss.forward: _elements,
    nn.MultiMarginLoss.forward: _elements,
    nn.MultiLabelMarginLoss.forward: _rows,
    nn.MultiLabelSoftMarginLoss.forward: _all_but_classes,
}
_OPTIONS = ("reduction", "ignore_index", "weight", "label_smoothing")
# Their weight belongs to single elements, is what their mean divides by, and is not split with the batch.
_WITH_WEIGHTED_ELEMENTS = (functional.mse_loss, functional.l1_loss, functional.huber_loss)


def implied_by(loss: Any) -> Implied | None:
    """What a loss of ``(outputs, targets)`` says of its targets; None where it is none of torch's.

    >>> implied = implied_by(torch.nn.CrossEntropyLoss(ignore_index=0))
    >>> implied.weigh(torch.tensor([0, 1, 2]))
    tensor(2)
    >>> implied_by(lambda outputs, targets: (outputs - targets).square().mean()) is None
    True
    """
    if isinstance(loss, nn.Module):
        divisor = _DIVISORS.get(type(loss).forward)
        if divisor is None or loss._forward_hooks or loss._forward_pre_hooks:
            return None
        module = loss

        def options() -> Mapping[str, Any]:
            # Read anew each time: class weights are a buffer, which `loss.to(device)` replaces.
            return {name: getattr(module, name, None) for name in _OPTIONS}
    else:
        value = _keywords(loss)
        if value is None:
            return None
        function, settings = value
        divisor = _DIVISORS[function]
        if function in _WITH_WEIGHTED_ELEMENTS and settings["weight"] is not None:
            return None

        def options() -> Mapping[str, Any]:
            return settings

    now = options()
    if now["reduction"] not in ("mean", "sum", *(("batchmean",) if divisor is _divergence else ())):
        return None
    of_classes, weighted = divisor is _classes, now["weight"] is not None
    return Implied(
        divisor,
        options,
        summed=now["reduction"] == "sum",
        counted=of_classes,
        harmless=of_classes and not weighted,
        ignore_index=now["ignore_index"] if of_classes else None,
        class_weights=of_classes and weighted,
    )


def _keywords(loss: Any) -> tuple[Any, dict[str, Any]] | None:
    """A function of the table, and the options with which it is called; None for any other."""
    function, keywords = (loss.func, loss.keywords) if type(loss) is partial and not loss.args else (loss, {})
    if not inspect.isfunction(function) or function not in _DIVISORS:
        return None
    parameters = inspect.signature(function).parameters
    if not keywords.keys() <= set(list(parameters)[2:]):
        return None
    options = {name: keywords.get(name, parameter.default) for name, parameter in parameters.items()}
    # What reduction= was called before torch 1.0.
    if options.get("reduce") is False:
        options["reduction"] = "none"
    elif options.get("reduce") is not None or options.get("size_average") is not None:
        options["reduction"] = "sum" if options.get("size_average") is False else "mean"
    return function, {name: options.get(name) for name in _OPTIONS}
