"""Whether training can resume from an ``opt_state``: asked before it does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE
from pure_loop._text import one_line
from pure_loop.errors import ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.names import aligned
from pure_loop.optim.optimizer import Optimizer, Params
from pure_loop.random.authors import is_users
from pure_loop.random.seeds import seeded_all

__all__ = ["AFRESH", "made_by_another", "refuse_other_memory"]

AFRESH = "start afresh: fit(state.replace(opt_state=None), ...)."


def refuse_other_memory(optimizer: Optimizer, opt_state: Any, params: Params) -> None:
    """Refuse an ``opt_state`` that another optimizer made, or this one for other parameters.

    Args:
        optimizer: the one that is to resume.
        opt_state: what a State holds.
        params: the parameters that are trained.

    Raises:
        ResumeError: says what it holds and what is needed.
    """
    if optimizer.check is not None:
        optimizer.check(opt_state, params)
        return
    wanted = _made(optimizer, params)
    if wanted is None:
        return
    # Its mappings are known by names: whatever made them may have had these in another order.
    opt_state = aligned(opt_state, wanted)
    given_spec = optree.tree_structure(opt_state, namespace=NAMESPACE)
    wanted_spec = optree.tree_structure(wanted, namespace=NAMESPACE)
    # An optimizer of the user's own may fill an empty memory as it goes; the library's, which can overwrite it, don't.
    if given_spec != wanted_spec and (wanted_spec.num_leaves or optimizer.overwrite is not None):
        if keys_of(opt_state) == keys_of(wanted):
            raise ResumeError(
                f"opt_state was made by {optimizer.name} for another model: it is that of other parameters. "
                f"Give the State that was made with this model, or {AFRESH}"
            )
        raise made_by_another(optimizer.name, opt_state, wanted)
    if given_spec != wanted_spec:
        return
    paths: Any = optree.tree_paths(opt_state, namespace=NAMESPACE)
    leaves: Any = optree.tree_leaves(opt_state, namespace=NAMESPACE)
    needed: Any = optree.tree_leaves(wanted, namespace=NAMESPACE)
    for path, value, leaf in zip(paths, leaves, needed, strict=True):
        shape = next((params[key].shape for key in path if key in params), None)
        # One that is no parameter's, such as a number of steps, has the shape that init gives it.
        of = "its parameter" if shape is not None else f"with {optimizer.name} it has"
        shape = leaf.shape if shape is None and isinstance(leaf, Tensor) else shape
        if not isinstance(leaf, Tensor) or leaf.shape != shape:
            continue
        if not isinstance(value, Tensor):
            raise ResumeError(
                f"opt_state[{']['.join(map(repr, path))}] is a {type(value).__name__}, and {optimizer.name} needs a "
                f"tensor there: give the State that was made with it, or {AFRESH}"
            )
        if value.shape != shape:
            raise ResumeError(
                f"opt_state[{']['.join(map(repr, path))}] has shape {tuple(value.shape)}, and {of} "
                f"{tuple(shape)}: it is another model's. Give the State that was made with this model, or {AFRESH}"
            )
        if value.is_floating_point() is not leaf.is_floating_point():  # kernels read raw memory
            raise ResumeError(
                f"opt_state[{']['.join(map(repr, path))}] has dtype {value.dtype}, and with {optimizer.name} it has "
                f"{leaf.dtype}: give the State that was made with it, or {AFRESH}"
            )


def _made(optimizer: Optimizer, params: Params) -> Any:
    """What ``init`` makes, of which the structure and the shapes are compared; None where it can't tell."""
    with seeded_all(0) if is_users(optimizer.init) else nullcontext():  # what it draws stays without effect
        try:
            return optimizer.init(FrozenDict((name, _on_meta(tensor)) for name, tensor in params.items()))
        except Exception:
            # An init that reads numbers (.item()) fails on tensors without any. An error of its own comes again.
            if any(tensor.is_meta for tensor in params.values()):
                return None  # the numbers of a checkpoint are compared when they are read
            return optimizer.init(params)


def made_by_another(name: str, opt_state: Any, wanted: Mapping[str, Any]) -> ResumeError:
    """The refusal of an ``opt_state`` with other keys than those that the optimizer of this name needs."""
    return ResumeError(
        f"opt_state was made by another optimizer than {name}: it holds {keys_of(opt_state)}, and {name} needs "
        f"{keys_of(wanted)}. Resume with the optimizer that made it, or {AFRESH}"
    )


def keys_of(opt_state: Any) -> str:
    """What an ``opt_state`` holds, for messages."""
    if not isinstance(opt_state, dict):
        return type(opt_state).__name__
    keys = [one_line(str(key)[:_LONGEST]) for key in opt_state]
    more = f" and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
    return f"{', '.join(keys[:_MOST])}{more}" or "nothing"


# Of the keys in a file, which a stranger may have written: how many are listed, and characters of each.
_MOST, _LONGEST = 10, 80


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
