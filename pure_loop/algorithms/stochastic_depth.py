"""Stochastic depth: blocks of a network are left out at random while it trains.

With a block ``f`` that keeps the shape of its input ``x``, the rate ``r`` of the block, and a draw ``m`` that is
1 with probability ``1 - r`` and else 0::

    y = x + m / (1 - r) (f(x) - x)        in training; https://arxiv.org/abs/1603.09382
    y = f(x)                              in evaluation

A block that adds to its input is scaled as dropout scales. Of L blocks the one with the number l, counted from 1, has
the rate ``r l / L``, or all have ``r``.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from pure_loop._internal.logs import get_logger
from pure_loop._internal.processes import rank
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._surgery import LayerFilter, copied, nothing_fits
from pure_loop.errors import ArgumentTypeError, ModelError
from pure_loop.event import Event
from pure_loop.ranges import Between, Duration, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.schedules import constant
from pure_loop.schedules import warmup as warmed_up
from pure_loop.state import State
from pure_loop.time import Time

__all__ = ["apply_stochastic_depth", "rates", "stochastic_depth"]

SERVES = "images"

_log = get_logger("pure_loop.algorithms")

Blocks: TypeAlias = type[nn.Module] | tuple[type[nn.Module], ...] | LayerFilter
Distribution: TypeAlias = Literal["linear", "uniform"]
Rate = TypeVar("Rate", float, Tensor)


def rates(count: int, rate: Rate, distribution: Distribution = "linear") -> list[Rate]:
    """The rate of each of ``count`` blocks, from the first to the last, where that of the last is ``rate``.

    >>> rates(4, 0.2)
    [0.05, 0.1, 0.15000000000000002, 0.2]
    """
    return [rate * ((number + 1) / count if distribution == "linear" else 1.0) for number in range(count)]


class _Dropped:
    """The hook of a block. An object of a module, so that it can be pickled.

    Attributes:
        names: of all blocks.
        reshaping: those that were found to return another shape, for a message; all hooks have the one list.
    """

    def __init__(
        self, name: str, buffer: str, mode: str, scale: bool, names: tuple[str, ...], reshaping: list[str]
    ) -> None:
        self.name, self.buffer, self.mode, self.scale = name, buffer, mode, scale
        self.names, self.reshaping = names, reshaping

    def __call__(self, block: nn.Module, inputs: tuple[object, ...], output: object) -> Tensor | None:
        if not block.training and self.scale:
            return None
        start = inputs[0] if inputs else None
        if not isinstance(start, Tensor) or not isinstance(output, Tensor):
            raise ModelError(
                f"stochastic_depth: block {self.name!r}, {type(block).__name__}, has an input of type "
                f"{type(start).__name__} and an output of type {type(output).__name__}. A block that is left out gives "
                "its input, so both are tensors: choose other blocks, blocks=lambda name, layer: ...."
            )
        if start.shape != output.shape:
            self._note()
            return None
        survival: Tensor = 1 - getattr(block, self.buffer)
        if not block.training:
            return start + survival.to(output.dtype) * (output - start)
        shape = (len(output) if self.mode == "sample" else 1, *(1,) * (output.ndim - 1))
        mask = (torch.rand(shape, device=output.device) < survival).to(output.dtype)
        return start + (mask / survival.to(output.dtype) if self.scale else mask) * (output - start)

    def _note(self) -> None:
        """Say once of each block that it is never left out.

        Raises:
            ModelError: no block can be.
        """
        if self.name in self.reshaping:
            return
        self.reshaping.append(self.name)
        count, of = len(self.reshaping), len(self.names)
        if count == of:
            raise ModelError(
                f"stochastic_depth: of {of} blocks, such as {self.name!r}, all return another shape than that of their "
                "input, and a block that is left out gives its input: choose others, blocks=lambda name, layer: ...."
            )
        if rank() == 0:
            _log.warning(
                "stochastic_depth: block %r returns another shape than that of its input, and is never left out; "
                "of %d blocks these are %d so far",
                *(self.name, of, count),
            )


def _blocks_of(module: nn.Module, blocks: Blocks) -> list[tuple[str, nn.Module]]:
    """The chosen blocks of a module, in the order in which it defines them."""
    layers: list[tuple[str, nn.Module]] = [(name, layer) for name, layer in module.named_modules() if name]
    if isinstance(blocks, type | tuple):
        return [(name, layer) for name, layer in layers if isinstance(layer, blocks)]
    return [(name, layer) for name, layer in layers if blocks(name, layer)]


def _refuse_other_blocks(blocks: object, where: str) -> None:
    """
    Raises:
        ArgumentTypeError: no class of modules, tuple of such or function.
    """
    classes = blocks if isinstance(blocks, tuple) else (blocks,)
    if all(isinstance(cls, type) for cls in classes):
        right = bool(classes) and all(issubclass(cls, nn.Module) for cls in classes)
    else:
        right = callable(blocks)
    if not right:
        raise ArgumentTypeError(
            f"{where}: blocks={blocks!r} is no class of modules, tuple of such, or function of (name, layer): "
            f"{where}(BasicBlock), or {where}(lambda name, layer: name.startswith('layers.'))."
        )


@checked
def apply_stochastic_depth(
    module: nn.Module,
    blocks: Blocks,
    rate: Annotated[float, Between(0, 1)] = 0.2,
    *,
    distribution: Distribution = "linear",
    mode: Literal["sample", "batch"] = "sample",
    scale: bool = True,
    name: str = "stochastic_depth",
) -> nn.Module:
    """A copy of a module that leaves out blocks at random in train mode; the module stays as it was.

    Each block gets a forward hook, and its rate as a buffer that is not saved with the module; names and values of
    parameters and other buffers stay. All blocks are computed, whether they are left out or not. A block that returns
    another shape than that of its input is never left out; the log says which, and how many. It counts as one of the
    blocks that have rates.

    Args:
        blocks: which submodules: a class, a tuple of classes, or a function of (name, layer).
        rate: the probability with which the last block is left out, in [0, 1).
        distribution: ``"linear"``: of earlier blocks it is smaller; ``"uniform"``: it is that of all blocks.
        mode: ``"sample"``: draw for each sample; ``"batch"``: for each forward.
        scale: divide what a block adds by ``1 - rate`` in training. False: multiply it by that in evaluation, as the
            paper does, which is exact for blocks that end with an activation.
        name: the buffer of a block is called ``<name>_rate``.

    Raises:
        ModelError: there is no such block, or one has a hook already; in a forward: a block that has no tensor as its
            input or output, or no block that keeps the shape of its input.
        ArgumentError: the rate is out of range.
        ArgumentTypeError: not a module, or a setting of another type.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> apply_stochastic_depth(net, nn.Linear, 0.5)[0].stochastic_depth_rate
    tensor(0.2500)
    """
    _refuse_other_blocks(blocks, "apply_stochastic_depth")
    clone = copied(module, "apply_stochastic_depth")
    layers = _blocks_of(clone, blocks)
    buffer = f"{name}_rate"
    reasons = [f"{path} can be left out already" for path, block in layers if hasattr(block, buffer)]
    if not layers or reasons:
        raise nothing_fits("stochastic_depth", module, reasons, "the submodules that blocks= chooses, once")
    names, reshaping = tuple(path for path, _ in layers), list[str]()
    for (path, block), share in zip(layers, rates(len(layers), rate, distribution), strict=True):
        tensor = next(iter([*block.parameters(), *clone.parameters()]), torch.zeros(()))
        block.register_buffer(buffer, torch.tensor(share, device=tensor.device), persistent=False)
        block.register_forward_hook(_Dropped(path, buffer, mode, scale, names, reshaping))
    return clone


@checked
def stochastic_depth(
    blocks: Blocks,
    rate: Annotated[Strength, Between(0, 1, typical=(0.1, 0.6))] = 0.2,
    *,
    distribution: Distribution = "linear",
    mode: Literal["sample", "batch"] = "sample",
    scale: bool = True,
    warmup: Annotated[Time | str | None, Duration()] = None,
    name: str = "stochastic_depth",
) -> Algorithm:
    """Stochastic depth: blocks are left out at random while the model trains; put into the model at INIT.

    Masks are drawn in the forward, as those of dropout. The rates are buffers of the model; a schedule sets them at
    BATCH_START. All blocks are computed, whether they are left out or not, so that ranks have the same gradients to
    average and nothing waits for the device. The module given to ``fit`` stays as it was;
    :func:`apply_stochastic_depth` is the same for a module of your own.

    Args:
        blocks, distribution, mode, scale: as in :func:`apply_stochastic_depth`.
        rate: the probability with which the last block is left out, in [0, 1); a number, or a schedule.
        warmup: how long the rate grows from 0 to its value, such as ``"5ep"``; None: it has it at once.
        name: another one, if there are several.

    Raises:
        ArgumentError: the rate is out of range.
        ArgumentTypeError: a setting of another type.
        ModelError: in training: no such block, one without a tensor as its input or output, or none that keeps the
            shape of its input.

    >>> import pure_loop as pl
    >>> class Residual(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(3, 3)
    ...     def forward(self, x):
    ...         return x + self.layer(x)
    >>> net, data = nn.Sequential(Residual(), Residual(), nn.Linear(3, 2)), [(torch.randn(4, 3), torch.ones(4).long())]
    >>> state = pl.run(pl.fit(net, data, loss=nn.functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="1ep", algorithms=[stochastic_depth(Residual, 0.4)]))
    >>> state.buffers["0.stochastic_depth_rate"], state.buffers["1.stochastic_depth_rate"]
    (tensor(0.2000), tensor(0.4000))
    """
    _refuse_other_blocks(blocks, "stochastic_depth")
    strength: Strength = rate
    if warmup is not None:
        strength = warmed_up(warmup, rate if callable(rate) else constant(rate))
    first = 0.0 if callable(strength) else strength

    def operate(state: State) -> State:
        module = apply_stochastic_depth(
            state.module(), blocks, first, distribution=distribution, mode=mode, scale=scale, name=name
        )
        return state.with_module(module)

    def with_rates(state: State) -> State:
        names = [key for key in state.buffers if key.rpartition(".")[2] == f"{name}_rate"]
        values = rates(len(names), strength_at(strength, state.timestamp), distribution)
        zero = torch.zeros((), device=state.device)
        return state.replace(
            buffers={**state.buffers, **{key: zero + value for key, value in zip(names, values, strict=True)}}
        )

    # A number is set where training begins or resumes, a schedule for each batch.
    begin = Event.BATCH_START if callable(strength) else Event.FIT_START
    return Algorithm(name, {Event.INIT: operate, begin: with_rates})
