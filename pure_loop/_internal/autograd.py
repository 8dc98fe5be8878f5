"""Autograd at the price of its engine: the Python around it costs more than many a model's backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from pure_loop._internal.torch_private import graph_task, is_transformed, run_backward
from pure_loop.errors import ModelError

# In the metadata of a node of a graph: it was computed with a parameter, in a batch of the loop.
_LEAF = "pure_loop.leaf"


def gradient_of(loss: Tensor, inputs: Sequence[Tensor], seed: Tensor | float = 1.0) -> tuple[Tensor, ...]:
    """``torch.autograd.grad(loss, inputs, seed, allow_unused=True)`` of a scalar, without its checks of every input.

    Args:
        loss: the scalar.
        inputs: what it is differentiated by.
        seed: what the gradient is multiplied by.

    >>> x, y = torch.tensor(3.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    >>> gradient_of(x * x, [x, y])
    (tensor(6.), None)
    """
    arguments = (loss,), (scalar_like(loss, seed),), False, False, tuple(inputs)
    if loss.is_cpu and inputs[0].is_cpu:
        return run_backward(*arguments, allow_unreachable=True, accumulate_grad=False)
    # The engine's device thread would keep a reference to the gradients, and the reference check would fail.
    with torch.autograd.set_multithreading_enabled(False):
        return run_backward(*arguments, allow_unreachable=True, accumulate_grad=False)


def scalar_like(loss: Tensor, number: Tensor | float) -> Tensor:
    """A number as a tensor of the loss's dtype and device, without waiting for that."""
    return number.to(loss) if isinstance(number, Tensor) else torch.full_like(loss, number)


def zero_unless(counts: Tensor, gradient: Tensor) -> Tensor:
    """The gradient where ``counts``, a bool of shape (), is True, else 0: a product with 0 would keep a NaN.

    >>> zero_unless(torch.tensor(False), torch.tensor([1.0, float("nan")]))
    tensor([0., 0.])
    """
    if gradient.layout is torch.strided:
        return torch.where(counts, gradient, 0)
    sparse = gradient.coalesce()
    return torch.sparse_coo_tensor(
        sparse.indices(), torch.where(counts, sparse.values(), 0), sparse.shape, is_coalesced=True
    )


def add_gradient(
    loss: Tensor,
    inputs: Sequence[Tensor],
    total: Sequence[Tensor],
    seed: Tensor | float = 1.0,
    counts: Tensor | None = None,
) -> tuple[Any, ...]:
    """:func:`gradient_of`, added to the tensors in ``total``, each where it is and as soon as it is found.

    Gives the sums; None for an input that the scalar doesn't reach. Not by way of ``.grad``, which hooks can see. Where
    ``counts``, a bool of shape (), is False, nothing is added.

    >>> x, y = torch.tensor(3.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    >>> total = [torch.tensor(1.0), torch.tensor(2.0)]
    >>> add_gradient(x * x, [x, y], total), total
    ((tensor(7.), None), [tensor(7.), tensor(2.)])
    """

    def added(tensor: Tensor, gradient: Tensor) -> Tensor:
        return tensor.add_(gradient if counts is None else zero_unless(counts, gradient))

    task_of = graph_task
    if task_of is None:
        gradients = zip(total, gradient_of(loss, inputs, seed), strict=True)
        return tuple(None if gradient is None else added(tensor, gradient) for tensor, gradient in gradients)
    tasks: list[int] = []

    def adding(tensor: Tensor) -> Callable[[Tensor], Tensor | None]:
        # What a hook returns replaces the gradient, which is freed then. A gradient that is taken by the same leaf
        # inside of this backward belongs to another task, and stays as it is.
        return lambda gradient: added(tensor, gradient) if task_of() == tasks[0] else None

    hooks = [_hook(loss, lambda _: tasks.append(task_of()))]
    try:
        for leaf, tensor in zip(inputs, total, strict=True):
            hooks.append(_hook(leaf, adding(tensor)))
        return gradient_of(loss, inputs, seed)
    finally:
        for hook in hooks:
            hook.remove()


def _hook(tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    register: Callable[[Callable[[Tensor], Tensor | None]], RemovableHandle] = tensor.register_hook
    return register(function)


def graph_of(tensor: Tensor) -> Iterator[Node]:
    """The nodes of the graph that a tensor came from, each once.

    >>> x = torch.ones(1, requires_grad=True)
    >>> [type(node).__name__ for node in graph_of(2 * x)]
    ['MulBackward0', 'AccumulateGrad']
    """
    seen: set[Node] = set()
    open_nodes: list[Node | None] = [tensor.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        open_nodes += [function for function, _ in node.next_functions]
        yield node


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has a storage of numbers, and no class that gives its address another meaning.

    >>> _is_plain(torch.ones(2)), _is_plain(torch.ones(2).to_sparse()), _is_plain(nn.Parameter(torch.ones(2)))
    (True, False, False)
    """
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and not is_transformed(tensor)
    )


def refuse_strangers(
    loss: Tensor,
    parameters: Iterable[Tensor] | None = (),
    leaves: Collection[Tensor] = (),
    attribute_with: Callable[[Tensor], str | None] = lambda _: None,
) -> None:
    """Refuse a loss with a graph that goes where gradients would be lost without an error.

    Args:
        loss: what is about to be differentiated.
        parameters: those that are no strangers; None: no parameter is one.
        leaves: what it is differentiated by. Others with their memory are those of another forward, and what was
            computed with those of an earlier call is of an earlier batch.
        attribute_with: which attribute of the model leads to a parameter that is not registered in it; or None.

    Raises:
        ModelError: it depends on a parameter that the model was not called with, on a second forward, or on that of
            an earlier batch, or goes through a reentrant checkpoint.
    """
    family, current = None if parameters is None else set(map(id, parameters)), set(map(id, leaves))
    # On the meta device there is no memory.
    own = {leaf.data_ptr(): id(leaf) for leaf in leaves if _is_plain(leaf) and leaf.numel() and not leaf.is_meta}
    for node in graph_of(loss):
        kind = type(node).__name__
        if kind == "CheckpointFunctionBackward":
            raise ModelError(
                "the forward uses torch.utils.checkpoint with use_reentrant=True, which writes gradients to .grad and "
                "would lose them here: write use_reentrant=False, as PyTorch recommends."
            )
        stranger = getattr(node, "variable", None) if kind == "AccumulateGrad" else None
        # What was computed with a leaf: the leaves of an earlier batch may be constants of this one.
        behind = {id(getattr(other, "variable", None)) for other, _ in node.next_functions}
        metadata: Any = node.metadata  # of torch, which declares a method
        if not current.isdisjoint(behind):
            metadata[_LEAF] = True  # for as long as there is this graph
        elif _LEAF in metadata:
            raise ModelError(
                "the loss depends on the forward of an earlier batch, of which no gradient is taken and whose graph "
                "would stay in memory: something keeps a tensor of it, such as a hidden state in an attribute of the "
                "model. Keep it without its graph: self.hidden = hidden.detach(), of each tensor in a tuple."
            )
        # Of a parameter too, which is of another class: its address is read through a tensor of torch's own.
        place = None if stranger is None else stranger.detach()
        if own and place is not None and _is_plain(place) and own.get(place.data_ptr(), id(stranger)) != id(stranger):
            raise ModelError(
                "the loss depends on a second forward of this batch, which an algorithm went through with the loop's "
                "stages: by its parameters it isn't differentiated, so that gradient would be lost. Go through the "
                "model twice in the forward of the task, pl.Task(forward=lambda model, batch: ...), or detach what "
                "the second one gives."
            )
        if isinstance(stranger, nn.Parameter) and family is not None and id(stranger) not in family:
            attribute = attribute_with(stranger)
            if attribute is not None:
                raise ModelError(
                    f"the loss depends on a parameter of shape {tuple(stranger.shape)} that {attribute} leads to and "
                    "torch doesn't register, so it would not be trained: keep layers in nn.ModuleList([...]) or "
                    "nn.ModuleDict({...}) in place of a list or dict, and parameters in nn.ParameterList([...]). If it "
                    "belongs to another network that is not trained, freeze it with requires_grad_(False)."
                )
            raise ModelError(
                f"the loss depends on a parameter of shape {tuple(stranger.shape)} that the model was not called with, "
                "so it would get no gradient: a loss, lambda, hook or plain list that holds on to a module uses that "
                "module's own weights. Keep layers in nn.ModuleList, use the module that the forward is given, and for "
                "a penalty on weights state.params in an algorithm at AFTER_LOSS. If it belongs to another network "
                "that is not trained, freeze it with requires_grad_(False)."
            )
