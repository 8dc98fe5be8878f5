"""What a loss may be: a tensor of shape (), or a dict of such with the key ``total``; and errors about what is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.pytree import Batch
from pure_loop._internal.weights import WEIGHTS_ARE, counted_loss, is_number, read_weight
from pure_loop.data.batch import map_tensors
from pure_loop.errors import DataError, LossError
from pure_loop.stages.nonfinite import total_loss
from pure_loop.state import State
from pure_loop.task import Task, loss_problem


def check_loss(loss: Any, state: State, event: str, task: Task | None = None) -> None:
    """
    Args:
        loss: what is to be differentiated.
        state: the one that has it.
        event: when.
        task: where it is the one that gave it.

    Raises:
        LossError: it is not a scalar tensor, nor a dict of scalars with the key ``total``.
    """
    problem = loss_problem(loss)
    if problem is not None:
        by = "" if task is None else f", which {task.loss_in_words} returned,"
        raise LossError(f"the loss at {event} of batch {state.timestamp.batch}{by} {problem}")


def map_loss(function: Callable[[Any], Any], loss: Any) -> Any:
    """The function of a loss, or of each part of one that is a dict."""
    return {name: function(part) for name, part in loss.items()} if isinstance(loss, dict) else function(loss)


def measured_loss(loss: Any, task: Task) -> Tensor:
    """The loss of an evaluation, which is not differentiated.

    Raises:
        LossError: it is not one number.
    """
    if type(loss) is not Tensor or loss.ndim:
        problem = loss_problem(loss, differentiated=False)
        if problem is not None:
            raise LossError(f"the loss in evaluation, which {task.loss_in_words} returned, {problem}")
    return total_loss(loss)


def weighed_loss(loss: Tensor, task: Task, microbatch: Batch) -> tuple[Tensor, Any]:
    """The loss of a microbatch, and its weight: a number, or a tensor of shape () that only a device knows.

    The loss is 0 where the weight is 0; the weight is None where the loss is a sum.

    Raises:
        DataError: a weight that is negative, not finite or no number.
    """
    if task.summed:
        return loss, None
    weight = read_weight(task.weigh(microbatch), "a microbatch")
    if is_number(weight) and not 0 <= weight < math.inf:
        raise DataError(f"a microbatch weighs {weight}: {WEIGHTS_ARE}")
    return counted_loss(loss, weight), weight


def detached_loss(state: State) -> LossError:
    """The error about a loss that no parameter has a part in."""
    if torch.is_inference_mode_enabled():
        return LossError(
            f"the loss of batch {state.timestamp.batch} has no graph, because the stream is run inside "
            "torch.inference_mode(), which nothing can undo from within: run it outside."
        )
    if state.frozen:
        return LossError(
            f"the loss of batch {state.timestamp.batch} depends on no parameter that is trained now: state.frozen has "
            f"{len(state.frozen)} of the model's, {', '.join(sorted(state.frozen)[:3])} among them. Freeze fewer."
        )
    return LossError(
        f"the loss of batch {state.timestamp.batch} does not depend on any parameter that requires a gradient: was it "
        "detached, computed under torch.no_grad(), turned into a number with .item(), or from other data than outputs?"
    )


def detached(tree: Any) -> Any:
    """A nesting of tensors, of the kinds that batches may be, without their graph."""
    if type(tree) is Tensor:
        return tree.detach()
    if type(tree) is dict and all(type(value) is Tensor for value in tree.values()):
        return {name: value.detach() for name, value in tree.items()}  # losses are, and opening a tree is slow
    return map_tensors(Tensor.detach, tree)
