"""Task: what the user's model does with a batch, as pure functions.

By default a batch is ``(inputs, targets)``, the forward is ``model(inputs)`` and the loss is
``loss(outputs, targets)``. A :class:`Task` serves any other shape. A module that has methods
``loss(outputs, batch)`` and ``validate(batch)`` is used through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from pure_loop._internal.arguments import accepts, name_of
from pure_loop._internal.pytree import Batch, Outputs
from pure_loop._internal.reprs import call, changed_fields
from pure_loop._internal.weights import Implied, implied_by
from pure_loop.data.batch import describe
from pure_loop.data.group import parts_of
from pure_loop.data.samples import num_samples, num_tokens, split
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from pure_loop.random.authors import is_users

__all__ = ["OnTargets", "Task", "check_loss_function", "has_loss_method", "make_task"]


def _inputs_and_targets(batch: Batch) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    size = f" of {len(batch)}" if hasattr(batch, "__len__") else ""
    raise DataError(
        f"a batch is a {type(batch).__name__}{size}, {describe(batch)}, and by default a batch is (inputs, targets), "
        "for the forward and for a function passed as loss=. For other batches write task=pl.Task(forward=lambda "
        f"model, batch: model({_first_of(batch)}), loss=lambda outputs, batch: ...); to predict, the forward is enough."
    )


def _first_of(batch: Batch) -> str:
    """How the inputs of such a batch might be written."""
    if isinstance(batch, Mapping) and batch:
        return f"batch[{next(iter(batch))!r}]"
    return "batch[0]" if isinstance(batch, tuple | list) and batch else "batch"


_TORCH_LOSSES = frozenset({"torch.nn.functional", "torch.nn.modules.loss"})


def default_forward(model: nn.Module, batch: Batch) -> Any:
    return model(_inputs_and_targets(batch)[0])


@attrs.frozen(kw_only=True, repr=False)
class Task:
    """How a model is trained on a batch. Every function is pure; each has a default.

    Args:
        forward: ``(model, batch) -> outputs``; default ``model(inputs)``.
        loss: ``(outputs, batch) -> loss``, a scalar tensor that is a mean over the batch, or a dict of
            such tensors with the key ``total``; None calls the module's own ``loss(outputs, batch)``.
        validate: ``(model, batch) -> outputs`` in evaluation and prediction; default: ``forward``.
        weight: ``(batch) -> number``: the weight of a microbatch if its loss is a mean: for a mean over tokens, the
            number of tokens that have a target. A Python number, or a tensor of shape (). Default: if ``loss=`` of
            ``fit`` is one of torch's, what it divides by (targets that are not ignored, each with its class weight; or
            elements), while losses with ``reduction="sum"`` are added; else the number of samples. A microbatch of
            weight 0 is ignored, whatever its loss is.
        samples: ``(batch) -> int``: the number of samples; default: the leading size of its tensors.
        tokens: ``(batch) -> int``: the number of tokens, for durations in tokens.
        split: ``(batch, size) -> list`` of microbatches of at most ``size`` samples.

    >>> import torch
    >>> task = Task(forward=lambda model, batch: model(batch["x"]),
    ...             loss=lambda outputs, batch: (outputs - batch["y"]).square().mean())
    >>> batch = {"x": torch.ones(4, 2), "y": torch.zeros(4, 1)}
    >>> task.samples(batch)
    4
    """

    # The model is Any, because user code annotates it with the class of its own module.
    forward: Callable[[Any, Any], Any] = default_forward
    loss: Callable[[Any, Any], Any] | None = None
    validate: Callable[[Any, Any], Any] | None = None
    weight: Callable[[Any], float | Tensor] | None = None
    samples: Callable[[Any], int] = num_samples
    tokens: Callable[[Any], int] = num_tokens
    split: Callable[[Any, int], list[Any]] = split
    # What is known of the weight by the loss.
    implied: Implied | None = attrs.field(init=False, repr=False, eq=False)
    # Whether a whole batch on one rank weighs its samples; whether weights follow from shapes; whether the loss is a
    # sum; and whether the gradient of a microbatch of weight 0 is 0, and not NaN.
    by_samples: bool = attrs.field(init=False, repr=False, eq=False)
    by_shape: bool = attrs.field(init=False, repr=False, eq=False)
    summed: bool = attrs.field(init=False, repr=False, eq=False)
    harmless: bool = attrs.field(init=False, repr=False, eq=False)
    # Whether the loss may draw random numbers; torch's own losses don't, and need no seed of their own.
    loss_may_use_rng: bool = attrs.field(init=False, repr=False, eq=False)

    def __repr__(self) -> str:
        return call("Task", changed_fields(self))

    @implied.default
    def _implied(self) -> Implied | None:
        return self.loss.implied if self.weight is None and isinstance(self.loss, OnTargets) else None

    @by_samples.default
    def _by_samples(self) -> bool:
        return self.weight is None and (self.implied is None or self.implied.counted)

    @by_shape.default
    def _by_shape(self) -> bool:
        return self.weight is None and (self.implied is None or self.implied.summed or not self.implied.counted)

    @summed.default
    def _summed(self) -> bool:
        return self.implied is not None and self.implied.summed

    @harmless.default
    def _harmless(self) -> bool:
        return self.implied is not None and self.implied.harmless

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Task):
            if not field.init:
                continue
            value = getattr(self, field.name)
            if not callable(value) and not (value is None and field.default is None):
                raise ArgumentTypeError(
                    f"pl.Task({field.name}={value!r}): give a function; pl.Task's help says of what."
                )

    @loss_may_use_rng.default
    def _loss_may_use_rng(self) -> bool:
        return not (isinstance(self.loss, OnTargets) and self.loss.is_torchs) or is_users(self.loss)

    @property
    def loss_in_words(self) -> str:
        """What computes the loss, for errors."""
        if self.loss is None:
            return "the model's loss(outputs, batch)"
        if isinstance(self.loss, OnTargets):
            return f"{name_of(self.loss.loss)}(outputs, targets)"
        return f"{name_of(self.loss)}(outputs, batch)"

    def weigh(self, batch: Batch) -> float | Tensor:
        """How much a microbatch counts."""
        if self.weight is not None:
            return self.weight(batch)
        implied = self.implied
        if implied is None or implied.summed or not isinstance(batch, tuple | list) or len(batch) != 2:
            return self.samples(batch)
        targets = batch[1]
        return implied.weigh(targets) if isinstance(targets, Tensor) else self.samples(batch)

    def weigh_parts(self, batch: Batch, parts: list[Any]) -> list[float | Tensor]:
        """:meth:`weigh` of each part of a batch."""
        implied = self.implied
        if (
            implied is not None
            and self.split is split
            and isinstance(batch, tuple | list)
            and len(batch) == 2
            and implied.counts_all(batch[1])
        ):
            return [part[1].numel() for part in parts]
        return list(map(self.weigh, parts))

    def of_groups(self) -> Task:
        """The task of several batches of a dataloader as one, and of a single one."""
        samples, tokens, cut = self.samples, self.tokens, self.split
        return attrs.evolve(
            self,
            samples=lambda batch: sum(map(samples, parts_of(batch))),
            tokens=lambda batch: sum(map(tokens, parts_of(batch))),
            split=lambda batch, size: [piece for part in parts_of(batch) for piece in cut(part, size)],
        )

    def evaluate(self, model: nn.Module, batch: Batch) -> Any:
        """The forward in evaluation and prediction."""
        return (self.forward if self.validate is None else self.validate)(model, batch)


def make_task(model: nn.Module, loss: Callable[..., Any] | Task | None, task: Task | None) -> Task:
    """The task of a call of ``fit`` or ``evaluate``, from its ``loss`` and ``task`` arguments.

    Raises:
        ArgumentError: no loss is given and the module has none, or a loss has weights of its own.
        ArgumentTypeError: ``loss`` can't be called.
    """
    if task is not None and not isinstance(task, Task):
        raise ArgumentTypeError(f"task={task!r}: give an instance of pl.Task, such as pl.Task(forward=..., loss=...).")
    if isinstance(loss, Task):
        if task is not None:
            raise ArgumentError("loss= and task= are both a Task; give one of them.")
        task, loss = loss, None
    if loss is not None:
        check_loss_function(loss)
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ArgumentError(
            f"the loss {type(loss).__name__} has parameters, which would not be trained: make it a submodule of the "
            "model, and give the model a method loss(outputs, batch)."
        )
    if task is not None:
        if loss is None:
            if task.loss is None:
                _require_loss_method(model)
            return task
        if task.loss is not None:
            raise ArgumentError("loss= is given, and task= has a loss, too; pass one of them.")
        return attrs.evolve(task, loss=OnTargets(loss))
    if loss is not None:
        return Task(loss=OnTargets(loss))
    _require_loss_method(model)

    def validate(module: Any, batch: Batch) -> Any:
        return module.validate(batch)

    own = callable(getattr(model, "validate", None))
    return Task(forward=lambda module, batch: module(batch), validate=validate if own else None)


def check_loss_function(loss: Any, where: str = "") -> None:
    """Refuse what can't be called as ``loss(outputs, targets)``.

    Raises:
        ArgumentTypeError: says what it is; begins with ``where``.
    """
    if not callable(loss):
        raise ArgumentTypeError(
            f"{where}loss is {loss!r} of type {type(loss).__name__}; give a function of (outputs, targets), such as "
            "torch.nn.functional.cross_entropy."
        )
    if isinstance(loss, type):
        raise ArgumentTypeError(f"{where}loss is the class {loss.__name__}; give an instance: {loss.__name__}().")
    if not accepts(loss, 2):
        raise ArgumentTypeError(
            f"{where}loss is the function {name_of(loss)}, which can't be called with two arguments: it is called as "
            f"{name_of(loss)}(outputs, targets)."
        )


@attrs.frozen
class OnTargets:
    """A loss of ``(outputs, targets)`` as one of ``(outputs, batch)``."""

    loss: Callable[..., Any]
    is_torchs: bool = attrs.field(init=False)
    implied: Implied | None = attrs.field(init=False, repr=False, eq=False)

    @is_torchs.default
    def _of_torch(self) -> bool:
        owner = type(self.loss) if isinstance(self.loss, nn.Module) else self.loss
        return getattr(owner, "__module__", None) in _TORCH_LOSSES

    @implied.default
    def _implied(self) -> Implied | None:
        return implied_by(self.loss)

    @property
    def parts_of_code(self) -> tuple[Any, ...]:
        return (self.loss,)

    def __call__(self, outputs: Outputs, batch: Batch) -> Any:
        return self.loss(outputs, _inputs_and_targets(batch)[1])


def has_loss_method(model: nn.Module) -> bool:
    """Whether it has a ``loss(outputs, batch)``; a loss of torch's own, which takes targets, is an attribute."""
    loss = getattr(model, "loss", None)
    return callable(loss) and type(loss).__module__ != "torch.nn.modules.loss"


def _require_loss_method(model: nn.Module) -> None:
    if not has_loss_method(model):
        raise ArgumentError(
            f"no loss: give loss=torch.nn.functional.cross_entropy (a function of outputs and targets), a "
            f"task=pl.Task(loss=...), or give {type(model).__name__} a method loss(outputs, batch)."
        )
