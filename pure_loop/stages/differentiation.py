"""Gradients for scripts of your own, and what to write where a forward differentiates and there is no graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from pure_loop._internal.autograd import gradient_of
from pure_loop._internal.reprs import brief
from pure_loop._internal.suggestions import teaching
from pure_loop.data.batch import describe
from pure_loop.errors import ArgumentError, ArgumentTypeError, LossError, ModelError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim.optimizer import Optimizer, time_of_step
from pure_loop.stages.loss import detached
from pure_loop.stages.notes import noting
from pure_loop.state import State, refuse_no_state

T = TypeVar("T")


@teaching
def value_and_grad(
    function: Callable[[FrozenDict[str, Tensor]], T], params: FrozenDict[str, Tensor]
) -> tuple[T, FrozenDict[str, Any]]:
    """``function(params)`` and its gradient, for scripts of your own: eager autograd, no ``.grad`` written.

    Args:
        function: of a mapping of names to tensors; gives a scalar tensor, or ``(tensor, anything)``.
        params: the point.

    Returns:
        What the function gave, without a graph, and the gradient by name (None where it has no part).

    Raises:
        LossError: the value is not a scalar tensor that depends on the parameters.

    >>> value, grads = value_and_grad(lambda p: p["x"] ** 2, FrozenDict(x=torch.tensor(3.0)))
    >>> value, grads["x"]
    (tensor(9.), tensor(6.))
    """
    leaves = FrozenDict((name, tensor.detach().requires_grad_()) for name, tensor in params.items())
    with torch.set_grad_enabled(True):
        result = function(leaves)
        value: Any = result[0] if isinstance(result, tuple) else result
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
            raise LossError(
                f"value_and_grad: the function gave {describe(value)}, and what is differentiated is a tensor of shape "
                "() that depends on the parameters it was given: return loss, or (loss, anything)."
            )
        results = gradient_of(value, list(leaves.values()))
    return detached(result), FrozenDict(zip(leaves, results, strict=True))


@teaching
def update_part(
    state: State,
    part: str,
    loss: Callable[[Any], Tensor],
    optimizer: Optimizer,
    *,
    mean: Callable[[Any], Any] = lambda tree: tree,
) -> State:
    """One step of a part of a model with an optimizer of its own, for scripts such as a GAN's; the other parts stay.

    Args:
        state: its ``opt_state`` is a mapping of parts to optimizer states; that of a part begins at its first step.
        part: the name of a submodule, such as ``"generator"``.
        loss: ``module -> loss``, a tensor of shape (), of the whole model in train mode. It may draw random numbers:
            seed them, or pass in what was drawn with :func:`pure_loop.random.generator`.
        optimizer: of the parameters of the part that are trained and not frozen.
        mean: what gives all ranks the same loss, gradients and buffers, in a script that several ranks run:
            ``functools.partial(pl.distributed.mean, weight=samples)``.

    Returns:
        The State with new parameters and optimizer state of the part, the buffers after the forward, and the ``loss``.

    Raises:
        ArgumentTypeError: no State, the loss is no function, or the optimizer none of this library.
        ArgumentError: no parameter of the part is trained, or ``opt_state`` is that of one optimizer.
        LossError: the loss is not a scalar tensor that depends on the part.

    >>> from pure_loop.optim import sgd
    >>> model = torch.nn.ModuleDict({"actor": torch.nn.Linear(1, 1), "critic": torch.nn.Linear(1, 1)})
    >>> state = State.create(model)
    >>> after = update_part(state, "critic", lambda model: model["critic"].weight.sum(), sgd(lr=1.0))
    >>> [name for name in state.params if not torch.equal(state.params[name], after.params[name])]
    ['critic.weight']
    """
    refuse_no_state(state, "update_part(state, part, loss, optimizer)", "pl.State.create(module)")
    if not callable(loss) or not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"update_part: loss is of type {type(loss).__name__}, optimizer of type {type(optimizer).__name__}: write "
            "update_part(state, part, loss, optimizer) with a function of the module, and pl.optim.adam(lr=3e-4)."
        )
    names = [name for name in state.model.differentiated(state.frozen) if name.startswith(f"{part}.")]
    if not names:
        parts = sorted({name.partition(".")[0] for name in state.model.differentiated(state.frozen)})
        raise ArgumentError(
            f"update_part: no parameter of {brief(part)} is trained; there are those of {', '.join(parts)}."
        )
    memories = FrozenDict() if state.opt_state is None else state.opt_state
    # The state of one optimizer may be a mapping, too, whose keys are names of its own.
    keys = list(memories) if isinstance(memories, Mapping) else None
    if keys is None or not all(any(name.startswith(f"{key}.") for name in state.params) for key in keys):
        raise ArgumentError(
            f"update_part: state.opt_state is a {type(memories).__name__}{f' with the keys {keys}' if keys else ''}, "
            "that of one optimizer; it is a mapping of parts to optimizer states, or None before the first step: "
            "state.replace(opt_state=None)."
        )

    def of_part(params: FrozenDict[str, Tensor]) -> tuple[Tensor, FrozenDict[str, Tensor]]:
        every = FrozenDict({**state.params, **params})
        value, buffers = state.model.apply(loss, every, state.buffers, training=True)
        if isinstance(value, Tensor) and not value.requires_grad:
            raise LossError(
                f"update_part: the loss does not depend on the parameters of part {part!r}: compute it with the module "
                "that the function is given, without detach() of what the part gives and without torch.no_grad()."
            )
        return value, buffers

    trained = FrozenDict((name, state.params[name]) for name in names)
    with noting(lambda: f"raised by update_part in the loss of part {part!r}"):
        result = value_and_grad(of_part, trained)
    (value, buffers), grads = mean(result)
    memory = memories[part] if part in memories else optimizer.init(trained)
    timestamp = time_of_step(optimizer, state.timestamp, state.lr_scale)
    params, memory = optimizer.update(grads, memory, trained, timestamp)
    opt_state = FrozenDict({**memories, part: memory})
    return state.replace(params={**state.params, **params}, opt_state=opt_state, buffers=buffers, loss=value)


@contextmanager
def refusing_to_differentiate(what: str, gradients: bool) -> Iterator[None]:
    """Say what to write, where torch says that there is no graph.

    Raises:
        ModelError: the forward or the loss of an evaluation differentiates.
    """
    try:
        yield
    except RuntimeError as error:
        inference = torch.is_inference_mode_enabled()
        if "does not require grad" not in str(error) or (gradients and not inference):
            raise
        advice = (
            "run the stream outside of torch.inference_mode()"
            if inference
            else "ask for gradients, pl.Evaluator(data, gradients=True) or pl.predict(..., gradients=True)"
        )
        raise ModelError(
            f"the {what} differentiates (torch.autograd.grad), and in evaluation and prediction there is no graph by "
            f"default: {advice}."
        ) from error
