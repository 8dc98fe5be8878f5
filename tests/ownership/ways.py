"""Ways of keeping something of a State, and what holds it: by the public API, and by what Python and torch offer.

A :class:`Way` takes a thing out of a State, and reads the numbers of that thing later. A holder is a place that refers
to the thing meanwhile. Which numbers are right is not read from the stream that is judged: its twin, which runs the
same program with ``donate=False``, says that.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import attrs
import numpy as np
import optree
import torch
from torch import Tensor
from torch.utils import _pytree, dlpack, hooks

import pure_loop as pl
from pure_loop._internal.bits import same

__all__ = ["GONE", "HOLDERS", "STATES", "WAYS", "WEAK", "Impossible", "Way", "leaves_behind", "of_tree"]
__all__ += ["outcome", "same"]

NAMESPACE = "pure_loop"
_FIELDS = ("params", "buffers", "opt_state", "algorithm_state", "metrics", "lr_scale", "loss_scale", "skipped")
_FIELDS += ("nonfinite", "batch", "microbatch", "outputs", "loss", "grad_norm")
# Torch declares no types for these.
_unserializable: Any = hooks.unserializable_hook
_to_dlpack: Any = vars(dlpack)["to_dlpack"]


class Impossible(Exception):  # noqa: N818
    """This way takes something that a State at this event does not have."""


def gradients_of(state: pl.State) -> Any:
    """The gradients; an empty mapping where there are none, also where an algorithm runs at an event without."""
    try:
        return {} if state.grads is None else state.grads
    except pl.errors.GradientsNotReadyError:
        return {}


def of_tree(tree: Any) -> list[Tensor]:
    """The tensors of a tree; those of a State by its fields, so that reading one that is gone is an error."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, pl.State):
        tree = [gradients_of(tree), *(getattr(tree, name) for name in _FIELDS)]
    if isinstance(tree, dict):
        tree = [tree[key] for key in list(tree)]
    if isinstance(tree, (list, tuple)):
        return [each for value in tree for each in of_tree(value)]
    return [each for each in optree.tree_leaves(tree, namespace=NAMESPACE) if isinstance(each, Tensor)]


class Way(NamedTuple):
    """How something is taken out of a State, and how its numbers are read.

    Attributes:
        take: ``(state, which) -> thing``; a number from 0 on says which of several tensors.
        read: ``thing -> tensors``.
        late: reading changes the thing, or what it gives depends on what ran since: it is read once, at the end.
    """

    take: Callable[[Any, int], Any]
    read: Callable[[Any], list[Tensor]] = of_tree
    late: bool = False


def outcome(read: Callable[[Any], list[Tensor]], thing: Any) -> list[Tensor] | str:
    """Copies of the numbers, or what raised. A DonatedStateError is raised."""
    try:
        return [each.detach().clone() for each in read(thing)]
    except pl.errors.DonatedStateError:
        raise
    except RuntimeError as error:
        # Of torch, where a backward has freed the graph: its first words are enough.
        return f"{type(error).__name__}: {str(error)[:60]}"


def _has(value: Any, condition: object) -> Any:
    if not condition:
        raise Impossible
    return value


def _nth(values: Any, which: int) -> Any:
    values = list(values)
    return values[which % len(_has(values, values))]


def _gradients(state: pl.State) -> Any:
    return _has(gradients_of(state), of_tree(gradients_of(state)))


def _leaf(state: pl.State, which: int) -> Any:
    weight = _nth(of_tree(state.params), which)
    return _has(weight, weight.requires_grad and weight.is_leaf)


# What is taken of one tensor, be it a parameter, a moment or a gradient. ----------------------------------------------


def _of_array(array: Any) -> list[Tensor]:
    return [torch.from_numpy(np.array(array))]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)


@torch.enable_grad()
def _graph(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A graph that has saved the tensor, and refers to it in no other way."""
    factor = torch.ones_like(_has(tensor, tensor.is_floating_point())).detach().requires_grad_()
    return factor, (factor * tensor).sum()


def _of_graph(pair: tuple[Tensor, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(pair[1], [pair[0]], retain_graph=True))


TENSORS: dict[str, Callable[[pl.State], Any]] = {
    "parameter": lambda state: state.params,
    "moment": lambda state: state.opt_state,
    "gradient": gradients_of,
}
OF_A_TENSOR: dict[str, tuple[Any, ...]] = {
    "itself": (lambda tensor: tensor,),
    "a view": (lambda tensor: _flat(tensor)[:1],),
    "detach()": (lambda tensor: tensor.detach(),),
    "an array": (lambda tensor: tensor.detach().numpy(), _of_array),
    "a capsule": (lambda tensor: _to_dlpack(tensor.detach()), lambda capsule: [dlpack.from_dlpack(capsule)], True),
    "untyped_storage()": (
        lambda tensor: tensor.untyped_storage(),
        lambda storage: [torch.empty(0, dtype=torch.uint8).set_(storage)],
    ),
    "set_ to its storage": (lambda tensor: torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage()),),
    "an iterator": (lambda tensor: iter(tensor if tensor.ndim else tensor.reshape(1, -1)), list, True),
    "a graph of one's own": (lambda tensor: _graph(tensor.detach()), _of_graph),
    "a graph through the tensor itself": (_graph, _of_graph),
}


def _of_one(tensors: Callable[[pl.State], Any], take: Callable[[Tensor], Any], state: Any, which: int) -> Any:
    return take(_nth(of_tree(tensors(state)), which))


# What is taken of graphs. ---------------------------------------------------------------------------------------------


def _nodes(value: Tensor) -> list[Any]:
    """The nodes of the graph of a tensor."""
    found: list[Any] = []
    waiting: list[Any] = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [each for each, _ in node.next_functions]
    return found


def leaves_behind(value: Tensor) -> list[Tensor]:
    """The leaves in the graph of a tensor."""
    return [node.variable for node in _nodes(value) if hasattr(node, "variable")]


@torch.enable_grad()
def _differentiate(value: Tensor) -> list[Tensor]:
    if value.grad_fn is None:
        return [value]
    leaves = leaves_behind(value)
    gradients = torch.autograd.grad(value.sum(), leaves, retain_graph=True, allow_unused=True)
    return [value, *leaves, *[each for each in gradients if each is not None]]


def _loss(state: pl.State) -> Any:
    return _has(state.loss, state.loss is not None)


def _outputs(state: pl.State) -> Any:
    return _has(state.outputs, isinstance(state.outputs, Tensor))


def _saved(state: pl.State, which: int) -> Any:
    """What a node of the graph has saved."""
    names = [(node, name) for node in _nodes(_loss(state)) for name in dir(node) if name.startswith("_saved_")]
    try:
        return _nth([each for pair in names if isinstance(each := getattr(*pair), Tensor)], which)
    except RuntimeError:  # they are freed
        raise Impossible from None


@torch.enable_grad()
def _own_loss(state: pl.State, which: int) -> Any:
    """A loss of one's own from the outputs: its graph shares what the loop's has saved."""
    return _has(_outputs(state), _outputs(state).grad_fn is not None).square().mean()


@torch.enable_grad()
def _penalty(state: pl.State, which: int) -> Any:
    """A graph of the user's through the leaves, which no backward of the loop frees."""
    return _leaf(state, which).square().sum()


def _with_hook(state: pl.State, which: int) -> Any:
    leaf, seen = _leaf(state, which), list[Any]()
    leaf.register_hook(_unserializable(lambda given: seen.append(given)))
    return leaf, seen


# What is taken of a whole State. --------------------------------------------------------------------------------------


def _other_params(state: pl.State, which: int) -> Any:
    return state.replace(params={name: torch.zeros_like(each).detach() for name, each in state.params.items()})


STATES: dict[str, Way] = {
    "the State": Way(lambda state, i: state),
    "the State and no look at it": Way(lambda state, i: state, late=True),
    "copy.copy": Way(lambda state, i: copy.copy(state)),
    "attrs.evolve": Way(lambda state, i: attrs.evolve(state, seed=1)),
    "replace(seed)": Way(lambda state, i: state.replace(seed=1)),
    "replace(params)": Way(_other_params, late=True),
    "replace(opt_state)": Way(lambda state, i: state.replace(opt_state=None), late=True),
    "replace(loss)": Way(lambda state, i: state.replace(loss=None, grads=None), late=True),
    "tree_leaves": Way(lambda state, i: (optree.tree_leaves(state, namespace=NAMESPACE), _pytree.tree_leaves(state))),
    "tree_map": Way(lambda state, i: _pytree.tree_map(lambda leaf: leaf, state), late=True),
    "a module": Way(lambda state, i: state.module(), lambda module: [*module.parameters(), *module.buffers()]),
}
MAPPINGS: dict[str, Way] = {
    "params": Way(lambda state, i: state.params),
    "params, no look at them": Way(lambda state, i: state.params, late=True),
    "params.values()": Way(lambda state, i: state.params.values(), list),
    "iter(params.values())": Way(lambda state, i: iter(state.params.values()), list, late=True),
    "params.keys()": Way(lambda state, i: state.params.keys(), lambda keys: of_tree(dict(keys.mapping))),
    "params.get": Way(lambda state, i: state.params.get, lambda get: [get(next(iter(get.__self__)))]),
    "copies of the mapping": Way(lambda state, i: ({**state.params}, state.params | {}, copy.copy(state.params))),
    "opt_state": Way(lambda state, i: state.opt_state),
    "a mapping of moments": Way(lambda state, i: _nth([m for m in state.opt_state.values() if isinstance(m, dict)], i)),
    "grads": Way(lambda state, i: _gradients(state)),
    "grads, no look at them": Way(lambda state, i: _gradients(state), late=True),
    "iter(grads.values())": Way(lambda state, i: iter(_gradients(state).values()), lambda g: of_tree(list(g)), True),
    "buffers": Way(lambda state, i: state.buffers),
}
OF_GRAPHS: dict[str, Way] = {
    "the loss": Way(lambda state, i: _loss(state)),
    "the graph of the loss": Way(lambda state, i: _loss(state), _differentiate, late=True),
    "the outputs": Way(lambda state, i: _outputs(state)),
    "the graph of the outputs": Way(lambda state, i: _outputs(state), _differentiate, late=True),
    "a leaf found in the graph": Way(lambda state, i: _nth(leaves_behind(_loss(state)), i)),
    "a tensor that the graph has saved": Way(_saved),
    "a loss of one's own": Way(_own_loss, _differentiate, late=True),
    "a penalty": Way(_penalty, _differentiate),
    "a leaf": Way(_leaf),
    "a leaf with a hook": Way(_with_hook, late=True),
}
OF_TENSORS: dict[str, Way] = {
    f"{what}: {name}": Way(partial(_of_one, tensors, take), *more)
    for what, tensors in TENSORS.items()
    for name, (take, *more) in OF_A_TENSOR.items()
}
KINDS = (STATES, MAPPINGS, OF_GRAPHS, OF_TENSORS)
WAYS: dict[str, Way] = {**STATES, **MAPPINGS, **OF_GRAPHS, **OF_TENSORS}


# What refers to a thing; called, it returns the thing, or GONE if it is not there any more. ---------------------------

Holder = Callable[[], Any]
GONE = object()
WEAK = "a weak reference"


def _in_generator(thing: Any) -> Holder:
    def suspended(thing: Any) -> Iterator[Any]:
        while True:
            yield thing

    held = suspended(thing)
    next(held)
    return lambda: next(held)


def _in_traceback(thing: Any) -> Holder:
    def fails(thing: Any) -> None:
        raise ValueError

    try:
        fails(thing)
    except ValueError as error:
        held: Any = error
    frame = held.__traceback__.tb_next.tb_frame
    return lambda: frame.f_locals["thing"]


def _behind_a_weak_reference(thing: Any) -> Holder:
    try:
        weak = weakref.ref(thing)
    except TypeError:
        return lambda: thing
    return lambda: GONE if (alive := weak()) is None else alive


HOLDERS: dict[str, Callable[[Any], Holder]] = {
    "a closure": lambda thing: lambda: thing,
    "a dict by its id": lambda thing: partial({id(thing): thing}.get, id(thing)),
    "a generator": _in_generator,
    "a traceback": _in_traceback,
    WEAK: _behind_a_weak_reference,
}
