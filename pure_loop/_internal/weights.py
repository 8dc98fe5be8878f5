"""How much each microbatch of a batch counts, such that the gradient doesn't depend on the split.

The weight of a microbatch, of a rank's share or of a part of an evaluation is implied by a loss of torch:
``torch.nn.functional.cross_entropy`` is a mean over the targets that are not ignored, ``mse_loss`` one over elements,
and with ``reduction="sum"`` a loss is no mean at all. That is known for a function of :mod:`torch.nn.functional`, for a
``functools.partial`` of one with keywords, and for a module of :mod:`torch.nn`. For any other loss it is unknown.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from pure_loop.errors import DataError

Weight: TypeAlias = float | Tensor
WEIGHTS_ARE = (
    "weights are finite, not negative, and not all zero. By default a microbatch weighs its samples, or what a loss of "
    "torch divides by; loss=pl.Task(loss=..., weight=...) says otherwise."
)


def is_number(value: Weight | None) -> bool:
    """Whether it is no tensor: to ask a number whether it is one takes long."""
    return type(value) is float or type(value) is int or not isinstance(value, Tensor)


@attrs.frozen
class Weights:
    """The factors of a batch's microbatches.

    The loss of a microbatch is a mean, so its gradient counts by its samples (or tokens): the mean of
    means is wrong where the last one is smaller. Each gradient is multiplied by its weight over the power
    of two at or above the sum, which is exact, and the total is divided once at the end: where all
    arithmetic is exact, every split gives the same bits, and a batch of 2**k samples needs no division.

    Where all weights are 0 the divisor is 0: the loss of such a batch is a mean over nothing, NaN. Weights that are
    tensors without numbers at hand (on another device, or in a step that is being compiled) give factors that are
    tensors of shape ().

    Attributes:
        shares: what each microbatch's gradient is multiplied by, at most 1.
        divisor: what the sum of gradients is divided by, in (0.5, 1], or 0; a tensor is 1 where all weights are 0.
        fractions: how much of the batch's loss each microbatch's loss is; they add up to 1.

    >>> Weights.of([4, 2], batch=0)
    Weights(shares=(0.5, 0.25), divisor=0.75, fractions=(0.6666666666666666, 0.3333333333333333))
    """

    shares: tuple[Weight, ...]
    divisor: Weight
    fractions: tuple[Weight, ...]

    @classmethod
    def of(cls, weights: Sequence[Weight], batch: int, total: Weight | None = None) -> Weights:
        """The factors for microbatches of these weights: numbers, or tensors of shape () on any device.

        ``total`` is the weight of the whole batch where other ranks have a part of it.

        Raises:
            DataError: weights that are negative, not finite or no numbers; names the batch.
        """
        if total is None and set(map(type, weights)) == {int} and (result := of_numbers(tuple(weights))) is not None:
            return result
        numbers = [read_weight(weight, f"a microbatch of batch {batch}") for weight in weights]
        if any(isinstance(weight, Tensor) for weight in numbers):
            wider = [wide(weight) if isinstance(weight, Tensor) else weight for weight in numbers]
            if len(wider) == 1 and total is None:
                return cls((1.0,), 1.0, (wider[0] / wider[0],))  # NaN where it is 0
            total = sum(wider) if total is None else total
            power = power_of_two(total)
            # Gradients of no weight stay 0 then; that there is none is seen at the loss, which is NaN.
            divisor = torch.where(total == 0, 1.0, total / power) if isinstance(total, Tensor) else total / power
            return cls(tuple(w / power for w in wider), divisor, tuple(w / total for w in wider))
        result = of_numbers(tuple(numbers), total)
        if result is None:
            raise DataError(f"the microbatches of batch {batch} weigh {numbers}: {WEIGHTS_ARE}")
        return result

    @classmethod
    def of_sum(cls, pieces: int) -> Weights:
        """The factors for the microbatches of a loss that is a sum, and not a mean: it is the sum of theirs.

        >>> Weights.of_sum(2)
        Weights(shares=(1.0, 1.0), divisor=1.0, fractions=(1.0, 1.0))
        """
        return cls((1.0,) * pieces, 1.0, (1.0,) * pieces)

    def mean_of(self, losses: list[Any], *, always: bool = False) -> Any:
        """The loss of a batch from those of its microbatches; None where none of them counts.

        None, too, where there is one that counts, which is that of the batch as it stands, unless ``always``.
        """
        share = self.fractions[0]
        if len(losses) == 1 and not always and (type(share) is float or is_number(share)):
            return None
        equal = is_number(share) and share * len(losses) == 1 and self.fractions.count(share) == len(losses)
        if equal and len(losses) > 1 and not any(isinstance(loss, dict) for loss in losses):
            return torch.stack(losses).mean()  # an operation costs as much as much of a small microbatch
        mean: Any = None
        for loss, fraction in zip(losses, self.fractions, strict=True):
            mean = _accumulate(mean, loss, fraction)
        if all(map(is_number, self.fractions)) or mean is None:
            return mean
        if isinstance(mean, dict):
            return {name: _narrowed(value, losses[0][name]) for name, value in mean.items()}
        return _narrowed(mean, losses[0])


def has_numbers(tensor: Tensor) -> bool:
    """Whether it has numbers: a tensor of a step that is being made into a graph has none."""
    return not hasattr(tensor, "fake_mode")


def is_readable(tensor: Tensor) -> bool:
    """Whether it has numbers that can be read without waiting for a device."""
    return tensor.device.type == "cpu" and has_numbers(tensor)


def read_weight(weight: Weight, what: str) -> Weight:
    """A weight as a number, where it can be read without waiting for a device; else a tensor of shape ().

    Raises:
        DataError: no number, or a tensor of several; names ``what`` weighs so.
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise DataError(
                f"{what} weighs a tensor of shape {tuple(weight.shape)} and dtype {weight.dtype}; a weight is one real "
                "number: pl.Task(loss=..., weight=lambda batch: (batch[1] != -100).sum())."
            )
        return weight.item() if is_readable(weight) else weight.reshape(())
    if not hasattr(weight, "__float__"):
        raise DataError(
            f"{what} weighs {weight!r} of type {type(weight).__name__}; is a `return` missing in pl.Task(weight=...)? "
            "A weight is a number, or a tensor of shape ()."
        )
    return weight


def wide(weight: Tensor) -> Tensor:
    """A weight in float64, where the device has it: a quotient of integers has torch's default dtype."""
    return weight.to(torch.float32 if weight.device.type == "mps" else torch.float64)


def power_of_two(total: Weight) -> Weight:
    """The power of two at or above a number, or above a tensor of shape (), where it is found on its device.

    Of 0 it is 1.

    >>> power_of_two(5), power_of_two(8)
    (8.0, 8.0)
    """
    if isinstance(total, Tensor):
        return torch.exp2(torch.ceil(torch.log2(torch.where(total == 0, 1, wide(total)))))
    return _power_of_two(total)


def _power_of_two(total: float) -> float:
    mantissa, exponent = math.frexp(total)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


@lru_cache(maxsize=256)
def of_numbers(weights: tuple[float, ...], of_batch: float | None = None) -> Weights | None:
    """:meth:`Weights.of` for numbers; None where they can't be weights."""
    total = sum(weights) if of_batch is None else of_batch
    if not (math.isfinite(total) and total >= 0 and min(weights) >= 0):
        return None
    power = _power_of_two(total)
    fractions = tuple(w / total for w in weights) if total else weights
    return Weights(tuple(w / power for w in weights), total / power, fractions)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What sums are kept in: half precision would lose small numbers, and float64 is not to be rounded."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _accumulate(mean: Any, loss: Any, fraction: Any) -> Any:
    if is_number(fraction) and fraction == 0:
        return mean  # the loss of a microbatch that counts nothing may be NaN
    if isinstance(loss, dict):
        before = mean or dict.fromkeys(loss)
        return {name: _accumulate(before.get(name), value, fraction) for name, value in loss.items()}
    if not is_number(fraction):
        part = counted_loss(loss, fraction) * (fraction.to(wide_dtype(loss)) if isinstance(loss, Tensor) else fraction)
        return part if mean is None else mean + part
    if mean is None:
        return loss * fraction
    if type(mean) is type(loss) is torch.Tensor:
        return torch.add(mean, loss, alpha=fraction)  # one operation, of which a microbatch has few
    return mean + loss * fraction


def _narrowed(mean: Any, loss: Any) -> Any:
    """A mean in the dtype of the losses: where weights are tensors, sums are kept in a wider one."""
    return mean.to(loss.dtype) if isinstance(mean, Tensor) and isinstance(loss, Tensor) else mean


def counted_loss(loss: Any, weight: Any) -> Any:
    """A loss of this weight, in the dtype of sums; 0 instead of NaN where the weight, a tensor, is 0.

    >>> counted_loss(torch.tensor(float("nan")), torch.tensor(0)), counted_loss(torch.tensor(2.0), torch.tensor(3))
    (tensor(0.), tensor(2.))
    """
    if is_number(weight):
        return loss
    value = loss.detach().to(wide_dtype(loss)) if isinstance(loss, Tensor) else torch.as_tensor(loss)
    return torch.where(weight == 0, torch.zeros_like(value), value)


class Options(NamedTuple):
    """The options of a loss of torch that say what its mean divides by."""

    reduction: str | None
    ignore_index: int | None
    weight: Tensor | None
    label_smoothing: float | None


# From targets and the options of the loss to what its mean divides by.
Divisor: TypeAlias = Callable[[Tensor, Options], "int | Tensor"]


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
    _options: Callable[[], Options]
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


def _elements(targets: Tensor, options: Options) -> int:
    return targets.numel()


def _rows(targets: Tensor, options: Options) -> int:
    """Targets of shape (n, classes) or (classes,)."""
    return targets.shape[0] if targets.ndim > 1 else 1


def _all_but_classes(targets: Tensor, options: Options) -> int:
    """Targets of shape (..., classes)."""
    return targets.numel() // targets.shape[-1] if targets.ndim and targets.shape[-1] else targets.numel()


def _divergence(targets: Tensor, options: Options) -> int:
    return targets.shape[0] if options.reduction == "batchmean" and targets.ndim else targets.numel()


def _classes(targets: Tensor, options: Options) -> int | Tensor:
    """Targets that are class indices, (n, ...), or probabilities, (n, classes, ...)."""
    if targets.is_floating_point():
        axis = 1 if targets.ndim > 1 else 0
        return targets.numel() // max(1, targets.shape[axis]) if targets.ndim else 1
    indices = targets.long()  # unsigned ones could not be compared with -100, and would be taken for a mask
    ignored, weights = options.ignore_index, options.weight
    assert ignored is not None
    present = indices != ignored
    if weights is None:
        return present.sum()
    result = (weights.to(indices.device)[torch.where(present, indices, 0)] * present).sum()
    if not options.label_smoothing:
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


# Each function of (outputs, targets), and its module. Of those that are left out a part of a batch has no weight of its
# own: they take more than outputs and targets, or parameters.
_LOSSES: tuple[tuple[object, type[nn.Module], Divisor], ...] = (
    (functional.cross_entropy, nn.CrossEntropyLoss, _classes),
    (functional.nll_loss, nn.NLLLoss, _classes),
    (functional.mse_loss, nn.MSELoss, _elements),
    (functional.l1_loss, nn.L1Loss, _elements),
    (functional.smooth_l1_loss, nn.SmoothL1Loss, _elements),
    (functional.huber_loss, nn.HuberLoss, _elements),
    (functional.binary_cross_entropy, nn.BCELoss, _elements),
    (functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, _elements),
    (functional.kl_div, nn.KLDivLoss, _divergence),
    (functional.poisson_nll_loss, nn.PoissonNLLLoss, _elements),
    (functional.soft_margin_loss, nn.SoftMarginLoss, _elements),
    (functional.hinge_embedding_loss, nn.HingeEmbeddingLoss, _elements),
    (functional.multi_margin_loss, nn.MultiMarginLoss, _elements),
    (functional.multilabel_margin_loss, nn.MultiLabelMarginLoss, _rows),
    (functional.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss, _all_but_classes),
)
# A module by its forward, so that a subclass with one of its own is not taken for it.
_DIVISORS = {key: divisor for function, cls, divisor in _LOSSES for key in (function, cls.forward)}
# Their weight belongs to single elements, is what their mean divides by, and is not split with the batch.
_WITH_WEIGHTED_ELEMENTS = (functional.mse_loss, functional.l1_loss, functional.huber_loss)


def implied_by(loss: object) -> Implied | None:
    """What a loss of ``(outputs, targets)`` says of its targets; None where it is none of torch's.

    >>> implied = implied_by(torch.nn.CrossEntropyLoss(ignore_index=0))
    >>> implied.weigh(torch.tensor([0, 1, 2]))
    tensor(2)
    >>> implied_by(lambda outputs, targets: (outputs - targets).square().mean())
    """
    if isinstance(loss, nn.Module):
        divisor = _DIVISORS.get(type(loss).forward)
        if divisor is None or loss._forward_hooks or loss._forward_pre_hooks:
            return None
        # Read anew each time: class weights are a buffer, which `loss.to(device)` replaces.
        read: Callable[[], Options] = partial(_options_of, loss)
    else:
        settings = _keywords(loss)
        if settings is None:
            return None
        function, options = settings
        divisor = _DIVISORS[function]
        if function in _WITH_WEIGHTED_ELEMENTS and options.weight is not None:
            return None
        read = partial(Options._make, options)
    options = read()
    if options.reduction not in ("mean", "sum", *(("batchmean",) if divisor is _divergence else ())):
        return None
    of_classes, weighted = divisor is _classes, options.weight is not None
    return Implied(
        divisor,
        read,
        summed=options.reduction == "sum",
        counted=of_classes,
        harmless=of_classes and not weighted,
        ignore_index=options.ignore_index if of_classes else None,
        class_weights=of_classes and weighted,
    )


def _options_of(module: nn.Module) -> Options:
    return Options._make(getattr(module, name, None) for name in Options._fields)


def _keywords(loss: object) -> tuple[Callable[..., object], Options] | None:
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
    return function, Options._make(map(options.get, Options._fields))
