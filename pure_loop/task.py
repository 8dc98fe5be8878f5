"""Task: what the user's model does with a batch, as pure functions.

By default a batch is ``(inputs, targets)``, the forward is ``model(inputs)`` and the loss is
``loss(outputs, targets)``. A :class:`Task` serves any other shape. A module that has methods
``loss(outputs, batch)`` and ``validate(batch)`` is used through them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from pure_loop._internal.arguments import accepts, check_flag, check_function, name_of
from pure_loop._internal.hints import squeezed
from pure_loop._internal.pytree import Batch, Outputs
from pure_loop._internal.reprs import call, changed_fields, shown
from pure_loop._internal.torch_private import is_transformed
from pure_loop._internal.weights import Implied, implied_by
from pure_loop.data.batch import describe
from pure_loop.data.group import parts_of
from pure_loop.data.samples import num_samples, num_tokens, split
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError, LossError
from pure_loop.random.authors import is_users
from pure_loop.ranges import checked

__all__ = ["OnTargets", "Task", "check_loss_function", "has_loss_method", "loss_problem", "make_task"]


def _inputs_and_targets(batch: Batch) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    size = f" of {len(batch)}" if hasattr(batch, "__len__") else ""
    is_one = (
        f"a batch is a {type(batch).__name__}{size}, {describe(batch)}, and by default a batch is (inputs, targets)"
    )
    if isinstance(batch, Tensor):
        raise DataError(
            f"{is_one}. If the dataloader is (inputs, targets) itself, each of them was taken for a batch: write "
            "[(inputs, targets)], or for several batches DataLoader(TensorDataset(inputs, targets), batch_size=32). If "
            "batches are tensors, write "
            "loss=pl.Task(forward=lambda model, batch: model(batch), loss=lambda outputs, batch: ...); pl.predict "
            "takes it as task=, and needs no loss."
        )
    if isinstance(batch, Mapping) and "input_ids" in batch:
        raise DataError(
            f"{is_one}. For a model of Transformers, which computes its loss, write "
            "loss=pl.Task.from_transformers(); for others "
            "loss=pl.Task(forward=lambda model, batch: model(batch['input_ids']), loss=lambda outputs, batch: ...)."
        )
    raise DataError(
        f"{is_one}, for the forward and for a function passed as loss=. For other batches write "
        f"loss=pl.Task(forward=lambda model, batch: model({_first_of(batch)}), loss=lambda outputs, batch: ...); "
        "pl.predict takes it as task=, and needs no loss."
    )


def _first_of(batch: Batch) -> str:
    """How the inputs of such a batch might be written."""
    if isinstance(batch, Mapping) and batch:
        return f"batch[{next(iter(batch))!r}]"
    return "batch[0]" if isinstance(batch, tuple | list) and batch else "batch"


# Those that compare outputs with targets, element by element: torch broadcasts, with a warning.
_ELEMENTWISE = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)
_ELEMENTWISE_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_TORCH_LOSSES = frozenset({"torch.nn.functional", "torch.nn.modules.loss"})


def default_forward(model: nn.Module, batch: Batch) -> Any:
    return model(_inputs_and_targets(batch)[0])


def _on_targets(loss: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any] | None:
    function: object = loss
    while isinstance(function, functools.partial):
        function = function.func
    return OnTargets(loss) if loss is not None and _is_torchs(function) else loss


def _is_torchs(loss: object) -> bool:
    owner = type(loss) if isinstance(loss, nn.Module) else loss
    return getattr(owner, "__module__", None) in _TORCH_LOSSES and not isinstance(loss, type)


_TAKEN = {
    "forward": "model, batch",
    "loss": "outputs, batch",
    "validate": "model, batch",
    "split": "batch, size",
    "loss_total": "parts",
    "predictions": "outputs",
}


@checked
@attrs.frozen(kw_only=True, repr=False)
class Task:
    """How a model is trained on a batch. Every function is pure; each has a default.

    Args:
        forward: ``(model, batch) -> outputs``; default ``model(inputs)``.
        loss: ``(outputs, batch) -> loss``, a scalar tensor that is a mean over the batch, or a dict of
            such tensors with the key ``total``; None calls the module's own ``loss(outputs, batch)``. One of torch's
            losses is called with the targets of a batch ``(inputs, targets)``.
        validate: ``(model, batch) -> outputs`` in evaluation and prediction; default: ``forward``.
        weight: ``(batch) -> number``: the weight of a microbatch if its loss is a mean: for a mean over tokens, the
            number of tokens that have a target. A Python number, or a tensor of shape (). Default: if the
            loss is one of torch's, what it divides by (targets that are not ignored, each with its class weight; or
            elements), while losses with ``reduction="sum"`` are added; else the number of samples. A microbatch of
            weight 0 is ignored, whatever its loss is.
        samples: ``(batch) -> int``: the number of samples; default: the leading size of its tensors.
        tokens: ``(batch) -> int``: the number of tokens, for durations in tokens.
        split: ``(batch, size) -> list`` of microbatches of at most ``size`` samples.
        loss_total: ``parts -> loss``, such as ``sum``, of a loss that is a tuple or list of scalars, or a dict of them
            without the key ``total``: a list of the parts, in order. The parts are in ``state.loss`` by their keys,
            fields or places ("0", "1").
        predictions: ``outputs -> predictions``: what metrics are given as outputs, and what :func:`predict` gives;
            default: the outputs.
        targets: ``batch -> targets``: metrics are given ``(batch, targets)`` as batch; default: the batch.

    Raises:
        ArgumentTypeError: a function that can't be called with these arguments.

    >>> import torch
    >>> task = Task(forward=lambda model, batch: model(batch["x"]),
    ...             loss=lambda outputs, batch: (outputs - batch["y"]).square().mean())
    >>> batch = {"x": torch.ones(4, 2), "y": torch.zeros(4, 1)}
    >>> task.samples(batch)
    4
    """

    # The model is Any, because user code annotates it with the class of its own module.
    forward: Callable[[Any, Any], Any] = default_forward
    loss: Callable[[Any, Any], Any] | None = attrs.field(default=None, converter=_on_targets)
    validate: Callable[[Any, Any], Any] | None = None
    weight: Callable[[Any], float | Tensor] | None = None
    samples: Callable[[Any], int] = num_samples
    tokens: Callable[[Any], int] = num_tokens
    split: Callable[[Any, int], list[Any]] = split
    loss_total: Callable[[list[Any]], Any] | None = None
    predictions: Callable[[Any], Any] | None = None
    targets: Callable[[Any], Any] | None = None
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
        _refuse_class(self.loss, "pl.Task: ")
        for field in attrs.fields(Task):
            value = getattr(self, field.name) if field.init else None
            if value is not None or (field.init and field.default is not None):
                check_function(field.name, value, _TAKEN.get(field.name, "batch"), where="pl.Task")

    @loss_may_use_rng.default
    def _loss_may_use_rng(self) -> bool:
        return not (isinstance(self.loss, OnTargets) and self.loss.is_torchs) or is_users(self.loss)

    @classmethod
    def from_transformers(cls, *, shifted: bool | None = None) -> Task:
        """The task of a model of Transformers: a batch is a mapping, and the model computes its loss from ``labels``.

        The forward is ``model(**batch)`` and the loss ``outputs.loss``, a mean over the labels that are not -100, so a
        microbatch weighs as many as it has; floating point labels all count. Durations in tokens count what
        ``attention_mask`` leaves. Metrics are given ``outputs.logits`` and ``(batch, labels)``; prediction gives these
        logits, or the outputs of a model that has none.

        Args:
            shifted: whether labels of tokens are compared with the outputs at the token before, as in a causal language
                model; metrics are given shifted ones then. None: the name of the model's class says so, which is
                ``...ForCausalLM``, ``...LMHeadModel``, or ``...ForConditionalGeneration`` without an encoder. Other
                names with ``For`` do not shift, and of a name without it must be said. If it is said, the loss of any
                model is taken for such a mean.

        Raises:
            DataError: (by the stream) a batch that is no mapping, or has no labels.
            ArgumentError: (by ``fit``) a class whose loss is not known to be such a mean, such as ``...ForCTC``.

        >>> import torch
        >>> Task.from_transformers(shifted=True).weigh({"labels": torch.tensor([[5, 7, -100], [5, 7, 9]])})
        tensor(3)
        """
        from pure_loop.data import conventions  # not every run has such a model

        check_flag("shifted", bool(shifted) if shifted is None else shifted, where="pl.Task.from_transformers")
        labels = conventions.Labels(shifted)
        return cls(
            forward=conventions.call_with_batch,
            loss=conventions.own_loss,
            weight=labels.weigh,
            tokens=conventions.attended,
            predictions=conventions.logits,
            targets=labels.targets,
        )

    @classmethod
    def detection(cls) -> Task:
        """The task of a detection model of torchvision: batches are ``(images, targets)``, lists of tensors and dicts.

        In training the model returns a dict of losses, whose sum is the loss; each is in ``state.loss`` by its name. A
        microbatch is a part of the images with their targets, and weighs as many images as it has. In evaluation and
        prediction the model returns boxes and no loss, so evaluators need metrics of ``(boxes, (images, targets))``.

        Raises:
            DataError: (by the stream) a batch that is no such pair.
            LossError: (by the stream) a loss is asked for in evaluation.

        >>> import torch
        >>> images, targets = [torch.zeros(3, 20, 30), torch.zeros(3, 8, 8)], [{"boxes": torch.zeros(2, 4)}, {}]
        >>> [len(part[0]) for part in Task.detection().split((images, targets), 1)]
        [1, 1]
        """
        from pure_loop.data import conventions  # not every run has such a model

        return cls(
            forward=conventions.losses_of_images,
            loss=conventions.parts_of_loss,
            validate=conventions.found_in_images,
            samples=conventions.num_images,
            split=conventions.split_images,
            loss_total=sum,
        )

    def of_model(self, model: nn.Module) -> Task:
        """This task, with what the class of a model of Transformers says of its labels, unless the user replaced it."""
        weighing, showing = getattr(self.weight, "__self__", None), getattr(self.targets, "__self__", None)
        if weighing is None and showing is None:
            return self
        from pure_loop.data.conventions import Labels

        weight, targets, weighs = self.weight, self.targets, isinstance(weighing, Labels)
        if isinstance(weighing, Labels):
            weight = weighing.of_model(model).weigh
        if isinstance(showing, Labels):
            targets = showing.of_model(model, weigh=weighs).targets
        return attrs.evolve(self, weight=weight, targets=targets)

    def totalled(self, loss: Any) -> Any:
        """A loss with the key ``total``, where it has parts and ``loss_total`` says how they add up."""
        if self.loss_total is None or not isinstance(loss, Mapping | tuple | list):
            return loss
        names = loss if isinstance(loss, Mapping) else getattr(loss, "_fields", range(len(loss)))
        parts = dict(zip(map(str, names), loss.values() if isinstance(loss, Mapping) else loss, strict=True))
        return parts if "total" in parts else {"total": self.loss_total(list(parts.values())), **parts}

    def measured(self, outputs: Any, batch: Batch) -> tuple[Any, Batch]:
        """What metrics are given of outputs and of their batch."""
        if self.predictions is not None:
            outputs = self.predictions(outputs)
        return outputs, batch if self.targets is None else (batch, self.targets(batch))

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


def make_task(model: nn.Module, loss: Callable[..., Any] | Task | None) -> Task:
    """The task of a call of ``fit`` or ``evaluate``, from its argument ``loss``.

    Raises:
        ArgumentError: no loss is given and the module has none, or a loss has weights of its own.
        ArgumentTypeError: ``loss`` can't be called.
    """
    if isinstance(loss, Task):
        if loss.loss is None:
            _require_loss_method(model)
        _refuse_parameters(loss.loss)
        return loss.of_model(model)
    if loss is not None:
        check_loss_function(loss)
        _refuse_parameters(loss)
        return Task(loss=OnTargets(loss))
    _require_loss_method(model)

    def validate(module: Any, batch: Batch) -> Any:
        return module.validate(batch)

    own = callable(getattr(model, "validate", None))
    return Task(forward=lambda module, batch: module(batch), validate=validate if own else None)


def _refuse_parameters(loss: object) -> None:
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ArgumentError(
            f"the loss {type(loss).__name__} has parameters, which would not be trained: make it a submodule of the "
            "model, and give the model a method loss(outputs, batch)."
        )


def _refuse_class(loss: object, where: str) -> None:
    if isinstance(loss, type):
        raise ArgumentTypeError(f"{where}loss is the class {loss.__name__}; give an instance: {loss.__name__}().")


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
    if getattr(loss, "__self__", None) is Task:
        raise ArgumentTypeError(f"{where}loss is a method of pl.Task; call it: pl.Task.{name_of(loss)}().")
    _refuse_class(loss, where)
    if not accepts(loss, 2):
        raise ArgumentTypeError(
            f"{where}loss is the function {name_of(loss)}, which can't be called with two arguments: it is called as "
            f"{name_of(loss)}(outputs, targets)."
        )


def _is_one_sample(inputs: Any) -> bool:
    plain = isinstance(inputs, Tensor) and not is_transformed(inputs)
    return plain and inputs.ndim == 1 and inputs.is_floating_point()


@attrs.frozen(repr=False)
class OnTargets:
    """A loss of ``(outputs, targets)`` as one of ``(outputs, batch)``."""

    loss: Callable[..., Any]
    is_torchs: bool = attrs.field(init=False)
    elementwise: bool = attrs.field(init=False, repr=False, eq=False)
    implied: Implied | None = attrs.field(init=False, repr=False, eq=False)

    @is_torchs.default
    def _of_torch(self) -> bool:
        return _is_torchs(self.loss)

    @elementwise.default
    def _of_elements(self) -> bool:
        function: object = self.loss
        while isinstance(function, functools.partial):
            function = function.func
        return type(function) in _ELEMENTWISE_MODULES or any(function is known for known in _ELEMENTWISE)

    @implied.default
    def _implied(self) -> Implied | None:
        return implied_by(self.loss)

    def __repr__(self) -> str:
        return shown(self.loss)

    @property
    def parts_of_code(self) -> tuple[Any, ...]:
        return (self.loss,)

    def __call__(self, outputs: Outputs, batch: Batch) -> Any:
        # A tensor is its own target, in a task with a forward of its own, such as an autoencoder's.
        inputs, targets = (batch, batch) if isinstance(batch, Tensor) else _inputs_and_targets(batch)
        # Of tokens, one sequence may be a batch; and in torch.func.vmap a batch is one sample.
        if self.is_torchs and isinstance(targets, Tensor) and not targets.ndim and _is_one_sample(inputs):
            raise DataError(
                f"a batch is {describe(batch)}: if that is one sample, its {len(inputs)} numbers would count as "
                "samples. Write DataLoader(dataset, batch_size=32), also of a list of samples, which makes batches of "
                "them; for one target of a whole batch write loss=pl.Task(loss=lambda outputs, batch: ...)."
            )
        if self.elementwise and isinstance(outputs, Tensor) and isinstance(targets, Tensor):
            self._refuse_to_broadcast(outputs, targets)
        return self.loss(outputs, targets)

    def _refuse_to_broadcast(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.shape == targets.shape:
            return
        advice = "write loss=lambda outputs, targets: ... to broadcast on purpose"
        for name, longer, shorter in (("outputs", outputs, targets), ("targets", targets, outputs)):
            if longer.shape == (*shorter.shape, 1):
                advice = squeezed(name)
        raise LossError(
            f"{name_of(self.loss)} compares elements, and has outputs of shape {tuple(outputs.shape)} and targets of "
            f"shape {tuple(targets.shape)}: {advice}."
        )


def has_loss_method(model: nn.Module) -> bool:
    """Whether it has a ``loss(outputs, batch)``; a loss of torch's own, which takes targets, is an attribute."""
    loss = getattr(model, "loss", None)
    return callable(loss) and type(loss).__module__ != "torch.nn.modules.loss"


def _require_loss_method(model: nn.Module) -> None:
    if not has_loss_method(model):
        raise ArgumentError(
            f"no loss: give loss=torch.nn.functional.cross_entropy (a function of outputs and targets), a "
            f"loss=pl.Task(loss=...), or give {type(model).__name__} a method loss(outputs, batch). Models that "
            "compute their losses themselves have pl.Task.from_transformers() and pl.Task.detection()."
        )


_TO_ADD = "or have its parts added: loss=pl.Task(loss=..., loss_total=sum)"


def loss_problem(loss: Any, *, differentiated: bool = True) -> str | None:
    """What is wrong with a loss, and what to write instead; None where nothing is."""
    if isinstance(loss, dict):
        if "total" not in loss:
            return f"is a dict with keys {sorted(map(str, loss))}; it needs the key 'total', {_TO_ADD}."
        for key, part in loss.items():
            is_tensor = isinstance(part, Tensor)
            if key != "total" and (part.ndim if is_tensor else not isinstance(part, int | float)):
                what = f"of shape {tuple(part.shape)}" if is_tensor else f"a {type(part).__name__}"
                return f"has the part {key!r}, which is {what}; write numbers or scalar tensors."
        loss = loss["total"]
    if loss is None:
        return (
            "is None of type NoneType; is a `return` missing? Return a tensor of shape (), computed from the outputs."
        )
    if isinstance(loss, int | float):
        return (
            f"is {loss!r} of type {type(loss).__name__}, which can't be differentiated; return a tensor of shape (), "
            "computed from the outputs without .item() or float()."
        )
    if isinstance(loss, tuple | list):
        return f"is a {type(loss).__name__} of {len(loss)}; return one tensor of shape (), {_TO_ADD}."
    if not isinstance(loss, Tensor):
        return (
            f"is of type {type(loss).__name__}; return a tensor of shape (), computed from the outputs, or a dict of "
            "such with the key 'total'."
        )
    if loss.ndim != 0:
        return f"has shape {tuple(loss.shape)}; a loss is one number: return its mean, loss.mean()."
    if differentiated and not loss.is_floating_point():
        return f"has dtype {loss.dtype}, which can't be differentiated."
    if loss.layout is not torch.strided:
        return f"has the layout {loss.layout}; return a dense tensor, loss.to_dense()."
    from pure_loop._internal.devices import shapes_only  # what is wrong is the exception

    if loss.is_meta and not shapes_only.get():
        return "is on the meta device and has no number: compute it from outputs and targets that have numbers."
    return None
