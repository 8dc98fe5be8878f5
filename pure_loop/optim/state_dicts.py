"""The optimizer state as torch's state dict: a loop by hand continues a run of ``fit``, and the reverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.suggestions import teaching
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim._in_torch import part_in_torch
from pure_loop.optim.optimizer import InTorch, Optimizer, OptState, Params, TorchGroup, time_of_step
from pure_loop.optim.resuming import refuse_other_memory
from pure_loop.state import State, refuse_no_state

__all__ = ["evaluation_params", "load_state_dict", "to_state_dict"]

S = TypeVar("S", bound=State)


@teaching
@torch.no_grad()
def to_state_dict(state: State, optimizer: Optimizer, *, part: str | None = None) -> dict[str, Any]:
    """The optimizer state as the class of torch has it, with which a loop by hand continues.

    Args:
        state: of a boundary of a run.
        optimizer: what ``fit`` was given. ``adamw``, ``adam``, ``sgd``, ``muon`` and ``from_torch`` have a class of
            torch; of a ``partition`` each part is one parameter group, in their order.
        part: the label of a part of a ``partition``, to write it alone. Parts of several classes need it.

    Returns:
        What ``load_state_dict`` takes of the class, given the parameters that need a gradient in the order of
        ``state.module().parameters()``. Each group has all options of the class, the learning rate and other schedules
        as they are for the next batch, ``param_names``, and the kernels that compute the same bits (``fused=True`` of
        AdamW, Adam and SGD). All tensors are copies.

    Raises:
        ArgumentError: (a ValueError) no class of torch has this state, or has what the optimizer does
            (``independent_decay``); or it is sharded.
        ResumeError: (a ValueError) another optimizer made it, or there is none yet.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> optimizer = pl.optim.adamw(lr=0.1)
    >>> recipe = pl.Recipe(data, loss=torch.nn.functional.mse_loss, optimizer=optimizer, max_duration="1ep")
    >>> state = recipe.run(torch.nn.Linear(2, 1))
    >>> module = state.module()
    >>> by_hand = torch.optim.AdamW(module.parameters())
    >>> by_hand.load_state_dict(pl.optim.to_state_dict(state, optimizer))
    >>> by_hand.param_groups[0]["lr"], by_hand.state[module.weight]["step"]
    (0.1, tensor(3.))
    """
    served, params, opt_state = _served(state, optimizer, "to_state_dict(state, optimizer)")
    if state.opt_state is None:
        raise ResumeError("this State has no optimizer state yet: take one that fit has yielded after FIT_START.")
    refuse_other_memory(served, opt_state, params)
    if part is not None:
        parts = _parts(served, params)
        if part not in parts:
            raise ArgumentError(f"part={part!r}: {served.name} has the parts {list(parts)}.")
        (served, params), opt_state = parts[part], opt_state[part]
    form = part_in_torch(served)
    form.cls()
    groups = form.write(opt_state, params, time_of_step(served, state.timestamp, state.lr_scale))
    if are_sharded([*params.values(), *_leaves([group.memory for group in groups])]):
        raise ArgumentError(
            "to_state_dict: the parameters are sharded, and a torch optimizer by hand holds whole ones: save a "
            "checkpoint, and load it on one rank."
        )
    saved: dict[Any, Any] = {}
    param_groups, number = [], 0
    for group in groups:
        names = list(group.memory)
        numbers = list(range(number, number + len(names)))
        number += len(names)
        saved.update({index: memory for index, memory in zip(numbers, group.memory.values(), strict=True) if memory})
        saved.update(group.rest)
        param_groups.append({**group.options, "params": numbers, "param_names": names})
    return {"state": _copied(saved), "param_groups": _copied(param_groups)}


@teaching
@torch.no_grad()
def load_state_dict(state: S, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> S:
    """A State with the optimizer state of a torch optimizer, from which ``fit`` continues a loop by hand.

    Args:
        state: with the parameters that the loop by hand has trained: ``pl.State.create(module)``.
        optimizer: what ``fit`` is going to be given, with the options of the class.
        state_dict: ``by_hand.state_dict()``. Its parameters are those of the model that need a gradient, or all, in
            the order of ``module.parameters()``; or it has their names (``torch.optim.AdamW(
            module.named_parameters())``). For a ``partition`` it has one group for each part, in their order; or a
            mapping has a state dict by the label of each part.

    The learning rate is that of ``optimizer``: a schedule is evaluated at the timestamp of the State, which begins at 0
    unless it is replaced: ``state.replace(timestamp=state.timestamp.replace(batch=1000))``. The result has copies of
    all tensors.

    Raises:
        ArgumentTypeError: (a TypeError) it is no state dict.
        ArgumentError: (a ValueError) no class of torch has the state of this optimizer, or its options are others.
        ResumeError: (a ValueError) the state dict is of another class, or of other parameters.

    >>> import torch, pure_loop as pl
    >>> module = torch.nn.Linear(2, 1)
    >>> by_hand = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    >>> module(torch.ones(4, 2)).sum().backward()
    >>> by_hand.step()
    >>> optimizer = pl.optim.sgd(lr=0.1, momentum=0.9)
    >>> state = load_state_dict(pl.State.create(module), optimizer, by_hand.state_dict())
    >>> state.opt_state["momentum_buffer"]["bias"]
    tensor([4.])
    """
    served, params, _ = _served(state, optimizer, "load_state_dict(state, optimizer, state_dict)")
    if are_sharded(params):
        raise ArgumentError("load_state_dict: the parameters are sharded: load before fit shards them.")
    opt_state = _loaded(served, params, list(state.params), state_dict)
    refuse_other_memory(served, opt_state, params)
    return state.replace(opt_state=opt_state)


@teaching
def evaluation_params(state: S, optimizer: Optimizer) -> FrozenDict[str, Tensor]:
    """The parameters that an optimizer with modes evaluates with, such as the averages of schedule-free ones.

    Args:
        state: of a run, with the parameters for training.
        optimizer: what ``fit`` was given: :func:`from_torch` of a class with ``train()`` and ``eval()``, or a
            ``partition`` with one, or ``master_weights`` of it.

    Returns:
        All parameters of the State, copies of those that differ: for ``state.replace(params=...)`` at EVAL_START.

    Raises:
        ArgumentError: (a ValueError) the optimizer has no modes.
        ResumeError: (a ValueError) another optimizer made the optimizer state, or there is none yet.
    """
    served, params, opt_state = _served(state, optimizer, "evaluation_params(state, optimizer)")
    evaluated = getattr(served.in_torch, "evaluated", None)
    if opt_state is None:
        raise ResumeError("this State has no optimizer state yet: take one that fit has yielded after FIT_START.")
    result = None if evaluated is None else evaluated(opt_state, params)
    if result is None:
        raise ArgumentError(
            f"{served.name} has one set of parameters, for training and evaluation: leave evaluation_params out. It "
            "serves from_torch of classes with train() and eval(), such as those of the package schedulefree."
        )
    return FrozenDict({**state.params, **result})


def _served(state: Any, optimizer: Any, call: str) -> tuple[Optimizer, Params, Any]:
    """The optimizer as ``fit`` runs it, the parameters that are trained, and the optimizer state."""
    refuse_no_state(state, call, "pl.State.create(module)")
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"the optimizer that fit is given is needed, such as pl.optim.adamw(), got {optimizer!r}"
        )
    return state.model.served_by(optimizer), state.model.trained(state.params), state.opt_state


def _parts(optimizer: Optimizer, params: Params) -> dict[str, tuple[Optimizer, Params]]:
    split: Callable[[Params], dict[str, tuple[Optimizer, Params]]] | None = getattr(optimizer.in_torch, "split", None)
    if split is None:
        raise ArgumentError(f"{optimizer.name} has no parts; only pl.optim.partition has.")
    return split(params)


def _loaded(optimizer: Optimizer, params: Params, every: list[str], state_dict: Any) -> OptState:
    if not isinstance(state_dict, Mapping):
        raise ArgumentTypeError(
            f"load_state_dict needs a dict such as torch_optimizer.state_dict(), got a {type(state_dict).__name__}"
        )
    form = part_in_torch(optimizer)
    if optimizer.parts and state_dict.keys() == set(optimizer.parts):
        parts = _parts(optimizer, params)
        return FrozenDict((key, _loaded(*parts[key], list(parts[key][1]), state_dict[key])) for key in parts)
    if state_dict.keys() != {"state", "param_groups"}:
        labels = f", or {list(optimizer.parts)} with one for each part" if optimizer.parts else ""
        raise ArgumentTypeError(
            f"a state dict of torch.optim has the keys 'state' and 'param_groups'{labels}, and this one has "
            f"{list(map(str, state_dict))[:8]}"
        )
    _refuse_malformed(state_dict["state"], state_dict["param_groups"])
    form.cls()
    groups = _groups(optimizer, form, params, every, state_dict)
    return form.read(groups, params)


def _refuse_malformed(state: Any, groups: Any) -> None:
    """
    Raises:
        ArgumentTypeError: they are not what ``torch.optim.Optimizer.state_dict`` gives.
    """
    wrong = None
    if not isinstance(state, Mapping):
        wrong = f"state is a {type(state).__name__}, not a dict"
    elif not isinstance(groups, list | tuple):
        wrong = f"param_groups is a {type(groups).__name__}, not a list"
    else:
        for place, group in enumerate(groups):
            numbers = group.get("params") if isinstance(group, Mapping) else None
            if not isinstance(numbers, list | tuple):
                wrong = f"param_groups[{place}] is no dict with a list 'params'"
                break
            odd = [number for number in numbers if not isinstance(state.get(number, {}), Mapping)]
            if odd:
                wrong = f"state[{odd[0]!r}] is a {type(state[odd[0]]).__name__}, not a dict"
                break
    if wrong is not None:
        raise ArgumentTypeError(f"load_state_dict needs a dict such as torch_optimizer.state_dict(), and here {wrong}.")


def _groups(
    optimizer: Optimizer, form: InTorch, params: Params, every: list[str], state_dict: Mapping[str, Any]
) -> list[TorchGroup]:
    """The groups with the names of their parameters, those alone that are trained."""
    names, saved = form.names(params), state_dict["param_groups"]
    if len(saved) != len(names):
        raise ResumeError(
            f"the state dict has {len(saved)} parameter groups, and {optimizer.name} has {len(names)}: write "
            "pl.optim.partition({label: optimizer, ...}, label=...), with an optimizer for each group, in their order."
        )
    numbers = {number for group in saved for number in group["params"]}
    rest = {key: value for key, value in state_dict["state"].items() if key not in numbers}
    groups = []
    for place, (wanted, group) in enumerate(zip(names, saved, strict=True)):
        ordered = _names(place, wanted, group, every if len(names) == 1 else wanted)
        memory = {
            name: state_dict["state"].get(number, {}) for name, number in zip(ordered, group["params"], strict=True)
        }
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        picked = {name: memory[name] for name in wanted}
        groups.append(TorchGroup(options=options, memory=picked, rest={} if place else rest))
    return groups


def _names(place: int, wanted: Sequence[str], group: Mapping[str, Any], every: Sequence[str]) -> Sequence[str]:
    """The names of a group's parameters, in its order."""
    count = len(group["params"])
    named: Sequence[str] | None = group.get("param_names")
    if named is not None:
        missing = [name for name in wanted if name not in named]
        if missing or len(named) != count:
            raise ResumeError(
                f"param_groups[{place}] of the state dict names {list(named)[:5]}, and the optimizer trains "
                f"{missing[:5]} there, too: it is of another model, or its groups are others."
            )
        return named
    for names in (wanted, every):
        if len(names) == count:
            return names
    raise ResumeError(
        f"param_groups[{place}] of the state dict has {count} parameters, and {len(wanted)} are trained there: it is "
        "of another model, or lists others. Name them, "
        f"state_dict['param_groups'][{place}]['param_names'] = [...], as torch.optim does that is given "
        "model.named_parameters()."
    )


def _leaves(tree: Any) -> list[Tensor]:
    leaves: list[Any] = optree.tree_leaves(tree, namespace=NAMESPACE)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _copied(tree: Any) -> Any:
    """Plain dicts and lists with copies of the tensors, as ``torch.save`` writes them."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_copied(item) for item in tree]
    return tuple(_copied(item) for item in tree) if type(tree) is tuple else tree
