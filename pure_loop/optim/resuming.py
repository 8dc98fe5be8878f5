"""Whether training can resume from an ``opt_state``: asked before it does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE
from pure_loop._text import one_line
from pure_loop.errors import ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.names import aligned, completed
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
                f"opt_state was made by {optimizer.name} for another model: it is that of other parameters"
                f"{where_differs(opt_state, wanted)}. Give the State that was made with this model, or {AFRESH}"
            )
        raise made_by_another(optimizer.name, opt_state, wanted)
    if given_spec != wanted_spec:
        return
    paths: Any = optree.tree_paths(opt_state, namespace=NAMESPACE)
    leaves: Any = optree.tree_leaves(opt_state, namespace=NAMESPACE)
    needed: Any = optree.tree_leaves(wanted, namespace=NAMESPACE)
    fixed = not is_users(optimizer.init)
    for path, value, leaf in zip(paths, leaves, needed, strict=True):
        shape = next((params[key].shape for key in path if key in params), None)
        leaf_name = f"opt_state[{']['.join(map(repr, path))}]"
        if fixed and type(leaf) in (int, bool) and (type(value) is not type(leaf) or value < 0):
            content = f"{value}" if type(value) is int else f"a {type(value).__name__}"
            raise ResumeError(
                f"{leaf_name} is {content}, and {optimizer.name} needs {'a count' if type(leaf) is int else 'a bool'} "
                f"there: give the State that was made with it, or {AFRESH}"
            )
        # One that is no parameter's, such as a number of steps, has the shape that init gives it.
        of = "its parameter" if shape is not None else f"with {optimizer.name} it has"
        shape = leaf.shape if shape is None and isinstance(leaf, Tensor) else shape
        if not isinstance(leaf, Tensor) or leaf.shape != shape:
            continue
        if not isinstance(value, Tensor):
            raise ResumeError(
                f"{leaf_name} is a {type(value).__name__}, and {optimizer.name} needs a "
                f"tensor there: give the State that was made with it, or {AFRESH}"
            )
        if value.shape != shape:
            raise ResumeError(
                f"{leaf_name} has shape {tuple(value.shape)}, and {of} "
                f"{tuple(shape)}: it is another model's. Give the State that was made with this model, or {AFRESH}"
            )
        of_parameter = any(key in params and value.dtype != params[key].dtype == leaf.dtype for key in path)
        # Kernels read raw memory.
        if value.is_floating_point() is not leaf.is_floating_point() or (fixed and of_parameter):
            raise ResumeError(
                f"{leaf_name} has dtype {value.dtype}, and with {optimizer.name} it has "
                f"{leaf.dtype}: give the State that was made with it, or {AFRESH}"
            )


def joined(opt_state: Any, begun: Any, names: Collection[str]) -> Any:
    """An ``opt_state`` with that of further parameters, which begin now.

    Args:
        opt_state: lacks them.
        begun: that of all parameters before the first step.
        names: of the further parameters.
    """

    def missing_steps(before: Any, after: Any) -> Any:
        step, missed = after.get("step"), after.get("skipped")
        if not isinstance(step, Tensor) or step.is_meta or not isinstance(missed, Mapping):
            return after
        # A step count is shared: further parameters were in none of those steps.
        late = {name: int(step) for name in missed if name not in before["skipped"]}
        return type(after)({**after, "skipped": FrozenDict({**missed, **late})})

    return completed(opt_state, begun, names, missing_steps)


def where_differs(value: Any, wanted: Any, path: str = "opt_state") -> str:
    """Where two trees first differ, for messages."""
    if not isinstance(value, Mapping) or not isinstance(wanted, Mapping):
        same = optree.tree_structure(value, namespace=NAMESPACE) == optree.tree_structure(wanted, namespace=NAMESPACE)
        kinds = (type(value).__name__, type(wanted).__name__)
        return "" if same else f", {path} is a {kinds[0]} in the place of a {kinds[1]}"
    missing, unknown = ([key for key in one if key not in two] for one, two in ((wanted, value), (value, wanted)))
    if missing or unknown:
        both = (("lacks", missing), ("has", unknown))
        return f", {path} {' and '.join(f'{verb} {keys_of(dict.fromkeys(some))}' for verb, some in both if some)}"
    deeper = (where_differs(value[key], wanted[key], f"{path}[{key!r:.80}]") for key in wanted)
    return next(filter(None, deeper), "")


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
