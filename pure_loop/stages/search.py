"""The search for what in a batch was first not finite: its tensors, parameters, the output of a module, a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import optree
import torch
from torch import Tensor, nn

from pure_loop._internal.pytree import NAMESPACE, Batch, Outputs
from pure_loop.data.group import parts_of
from pure_loop.errors import NonFiniteError
from pure_loop.stages.nonfinite import real_numbers, total_loss
from pure_loop.state import NON_FINITE_ADVICE, State

if TYPE_CHECKING:
    from pure_loop.stages.settings import StageSettings

Kind: TypeAlias = Literal["batch", "parameter", "buffer", "output", "loss", "algorithm", "gradient", "step"]
# Rows of a batch that a message lists.
_SHOWN = 8


@attrs.frozen
class Origin:
    """What was first not finite in a batch.

    Attributes:
        kind: ``"batch"``: a tensor of the batch; ``"parameter"``, ``"buffer"``: before the batch; ``"output"``: that of
            a module; ``"loss"``: of finite outputs; ``"algorithm"``: what an algorithm wrote to a microbatch, its
            outputs or its loss; ``"gradient"``: of a finite loss; ``"step"``: the optimizer's.
        name: of the parameter, buffer or module; the path in the batch, ``"0"`` or ``"input_ids"``.
        rows: of the batch, from 0, in which it is not finite; empty: not by rows.
        words: the same as a clause of a message.
    """

    kind: Kind
    name: str
    rows: tuple[int, ...]
    words: str

    @property
    def advice(self) -> str:
        """What to do about it."""
        return _ADVICE[self.kind]


_SKIP = 'nonfinite="skip" leaves such a batch out of training and counts it in state.skipped'
_ADVICE: Mapping[Kind, str] = {
    "batch": f"Correct the data, or the algorithm that mixed its samples: no learning rate helps. {_SKIP}.",
    "parameter": "It is so before the batch: look at what initialised or loaded it, or at the algorithm that wrote it.",
    "buffer": "It is so before the batch: look at what initialised or loaded it, or at the algorithm that wrote it.",
    "output": "Lower the learning rate, clip the gradients (clip_grad=1.0), or look at these samples and this module; "
    f"{_SKIP}.",
    "loss": "Look at the loss function (a logarithm of 0, a division by a count of 0, a mean over no targets), or, if "
    f"outputs are large, lower the learning rate; {_SKIP}.",
    "algorithm": f"Look at the algorithms that write outputs or loss, which pl.blame(stream, 'loss') lists; {_SKIP}.",
    "gradient": "Lower the learning rate, or look for a function in the model that has no derivative there, such as "
    f"the square root or the norm of 0; clip_grad= keeps a NaN. And {_SKIP}.",
    "step": 'Lower the learning rate: no batch is to blame, and nonfinite="skip" leaves none out for that.',
}


def is_finite(tensor: Any) -> bool:
    """Whether all numbers of a tensor are; waits for the device. What is no tensor of floats is finite."""
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(real_numbers(tensor.detach())).all())


def _is_suspect(tensor: Any) -> bool:
    """Whether a tensor has a NaN or a positive infinity: negative ones are masks, which softmax makes 0."""
    if is_finite(tensor):
        return False
    numbers = real_numbers(tensor.detach())
    return bool((torch.isnan(numbers) | (numbers == torch.inf)).any())


def _rows(tensor: Tensor, first: int, samples: int | None) -> tuple[int, ...]:
    """The rows that are not finite, numbered from ``first``; none where its first dimension isn't that of samples."""
    if not tensor.ndim or (samples is not None and tensor.shape[0] != samples):
        return ()
    bad = ~torch.isfinite(real_numbers(tensor.detach())).reshape(tensor.shape[0], -1).all(dim=1)
    return tuple(first + row for row in bad.nonzero().flatten().tolist())


def _in_rows(rows: tuple[int, ...]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f" in row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:_SHOWN]))}{more} of the batch"


def _value(tensor: Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor.detach()).any()) else "infinite"


def origin_in_batch(batch: Batch) -> Origin | None:
    """The first tensor of a batch that is not finite."""
    first = 0
    for part in parts_of(batch):
        paths, leaves, _ = optree.tree_flatten_with_path(part, namespace=NAMESPACE)
        for path, leaf in zip(paths, leaves, strict=True):
            if _is_suspect(leaf):
                name = "/".join(map(str, path))
                rows = _rows(leaf, first, None)
                words = f"the batch itself is {_value(leaf)}, at {name!r}{',' if rows else ''}{_in_rows(rows)}"
                return Origin("batch", name, rows, words)
        sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        first += sizes[0] if sizes else 0
    return None


def _again(module: Any, state: State, stages: StageSettings) -> Iterator[tuple[Any, Any, Tensor]]:
    """Each microbatch once more through a copy of the model; gives it with its outputs and its loss."""
    task, around = stages.task, partial(stages.running, state, code="users", gradients=torch.is_grad_enabled())
    for index, piece in enumerate(stages.microbatches(state.batch)):
        with around("forward", index):
            outputs = task.forward(module, piece)
        with around("loss", index):
            loss = module.loss(outputs, piece) if task.loss is None else task.loss(outputs, piece)
        yield piece, outputs, total_loss(task.totalled(loss))


def _origin_in_forward(state: State, stages: StageSettings) -> Origin | None:
    """The first output of a module that is not finite, or the loss of outputs that are."""
    module = state.module(training=True)
    noted: list[tuple[str, nn.Module, Tensor]] = []

    def note(name: str, submodule: nn.Module, inputs: Any, outputs: Outputs) -> None:
        leaves = optree.tree_leaves(outputs, namespace=NAMESPACE)
        noted.extend((name, submodule, leaf.detach()) for leaf in leaves if not is_finite(leaf))

    for name, submodule in module.named_modules():
        submodule.register_forward_hook(partial(note, name))
    first = 0
    for piece, outputs, loss in _again(module, state, stages):
        samples = stages.task.samples(piece)
        # Where the outputs are finite, what is not in between did not come there.
        leaves = optree.tree_leaves(outputs, namespace=NAMESPACE)
        has_tensors = any(isinstance(leaf, Tensor) for leaf in leaves)
        if noted and not is_finite(loss) and not (has_tensors and all(map(is_finite, leaves))):
            name, submodule, tensor = next((item for item in noted if _is_suspect(item[2])), noted[0])
            rows = _rows(tensor, first, samples)
            of = f"module {name!r} ({type(submodule).__name__})" if name else "the model"
            words = f"the output of {of} is the first that is {_value(tensor)}{_in_rows(rows)}"
            return Origin("output", name, rows, words)
        if not is_finite(loss):
            words = f"outputs are finite, and the loss of rows {first} to {first + samples - 1} of the batch is not"
            return Origin("loss", "loss", (), words)
        noted.clear()
        first += samples
    return None


def origin_in_gradients(grads: Mapping[str, Tensor | None]) -> Origin | None:
    """The gradient nearest to the loss that is not finite: a backward goes through the parameters in reverse."""
    bad = [name for name, gradient in grads.items() if not is_finite(gradient)]
    if not bad:
        return None
    more = f", and of {len(bad) - 1} before it," if len(bad) > 1 else ""
    return Origin("gradient", bad[-1], (), f"the loss is finite, and the gradient of {bad[-1]!r}{more} is not")


def _origin_in_backward(state: State, stages: StageSettings) -> Origin | None:
    """That of the first microbatch with a gradient that is not finite, before a norm that is NaN came into all."""
    module = state.module(training=True)
    with torch.enable_grad():
        for _, _, loss in _again(module, state, stages):
            torch.autograd.backward(loss)
            origin = origin_in_gradients({name: parameter.grad for name, parameter in module.named_parameters()})
            if origin is not None:
                return origin
    return None


_ALGORITHM = Origin(
    "algorithm", "", (), "it is finite where the forward is repeated without the algorithms from BEFORE_FORWARD on"
)
_STEP = Origin("step", "", (), "loss and gradients are finite, and the optimizer's step made parameters that are not")


def nonfinite_error(state: State, stages: StageSettings, *, overwritten: bool) -> NonFiniteError:
    """The error that names the batch, and what in it was first not finite; waits for the device.

    Args:
        state: before the update, with its batch.
        stages: those of the batch. Of several ranks none repeats its forward, in which they may exchange.
        overwritten: whether the step has written to the parameters, with which the forward can't be repeated.
    """
    t, loss = state.timestamp, total_loss(state.loss).item()
    finite, repeats = math.isfinite(loss), not overwritten and not stages.engine.exchanges
    origin, failure = None, ""
    if finite:
        origin = origin_in_gradients(state._grads or {}) or _STEP
    elif not repeats:
        origin = origin_in_batch(state.batch)
    if repeats and origin is not _STEP:
        try:
            if finite:
                origin = _origin_in_backward(state, stages) or origin
            else:
                origin = search(state, stages, buffers=state.buffers) or _ALGORITHM
        except Exception as error:  # of the model's own code: what is raised here is that something is not finite
            again = "backward" if finite else "forward"
            failure = f"The {again} can't be repeated to find its origin: {type(error).__name__}: {error}. "
    elif not finite and stages.engine.exchanges:
        failure = "Each rank searches its part of the batch alone, and rows are counted in it. "
    what = ([] if finite else [f"the loss is {loss}"]) + ([] if origin is None else [origin.words])
    result = NonFiniteError(
        f"batch {t.batch} (epoch {t.epoch}, batch {t.batch_in_epoch} in it): {': '.join(what)}. {failure}"
        f"{NON_FINITE_ADVICE if origin is None else origin.advice} Counted from 1, as on a progress bar, it is batch "
        f"{t.batch_in_epoch + 1} of epoch {t.epoch + 1}."
    )
    result.state, result.batch, result.index = None if overwritten else state, state.batch, t.batch
    if origin is not None:
        result.kind, result.name, result.rows = origin.kind, origin.name, origin.rows
    return result


def search(state: State, stages: StageSettings, *, buffers: Mapping[str, Tensor] | None = None) -> Origin | None:
    """What was first not finite in the batch of a State from inside it, its parameters those of its forward.

    The batch goes through a copy of the model once more, with hooks. Waits for the device. None: all is finite, or what
    is not does not come to the loss.

    Args:
        state: with the batch.
        stages: those of the batch.
        buffers: those of before the batch, which are searched, too.
    """
    origin = origin_in_batch(state.batch)
    if origin is not None:
        return origin
    for name, tensor in {**state.params, **(buffers or {})}.items():
        kind: Kind = "parameter" if name in state.params else "buffer"
        if (not is_finite(tensor)) if kind == "parameter" else _is_suspect(tensor):
            return Origin(kind, name, (), f"the {kind} {name!r} is {_value(tensor)} before the batch")
    with torch.no_grad():
        return _origin_in_forward(state, stages)
