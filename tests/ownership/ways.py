"""Ways of keeping something of a State, and what holds it: by the public API, and by what Python and torch offer.

A :class:`Way` takes a thing out of a State, and reads the numbers of that thing later. A holder is a place that refers
to the thing meanwhile. Which numbers are right is not read from the stream that is judged: its twin, which runs the
same program with ``donate=False``, says that.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import operator
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import attrs
import numpy as np
import optree
import torch
from torch import Tensor, nn
from torch.utils import dlpack, hooks

import pure_loop as pl
from pure_loop._internal.bits import same

__all__ = ["GONE", "HOLDERS", "OF_OTHERS", "STATES", "WAYS", "WEAK", "Impossible", "Way", "of_tree", "outcome", "same"]

NAMESPACE = "pure_loop"
_FIELDS = ("params", "buffers", "opt_state", "algorithm_state", "metrics", "lr_scale", "loss_scale", "skipped")
_FIELDS += ("nonfinite", "batch", "microbatch", "outputs", "loss", "grad_norm")
# Torch declares no types for these.
_unserializable: Any = hooks.unserializable_hook
to_dlpack: Any = vars(dlpack)["to_dlpack"]
from_dlpack = dlpack.from_dlpack


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


def _nth(values: Any, which: int) -> Any:
    values = list(values)
    if not values:
        raise Impossible
    return values[which % len(values)]


def _has(value: Any, condition: object) -> Any:
    if not condition:
        raise Impossible
    return value


def _leaf(state: pl.State, which: int) -> Tensor:
    weight: Tensor = _nth(of_tree(state.params), which)
    return _has(weight, weight.requires_grad and weight.is_leaf)  # type: ignore[no-any-return]


def _gradients(state: pl.State, which: int = 0) -> Any:
    return _has(gradients_of(state), of_tree(gradients_of(state)))


TENSORS: dict[str, Callable[[pl.State, int], Tensor]] = {
    "parameter": lambda state, i: _nth(of_tree(state.params), i),
    "moment": lambda state, i: _nth(of_tree(state.opt_state), i),
    "gradient": lambda state, i: _nth(of_tree(gradients_of(state)), i),
}


def _of_array(array: Any) -> list[Tensor]:
    return [torch.from_numpy(np.array(array))]


def _of_capsule(capsule: Any) -> list[Tensor]:
    return [from_dlpack(capsule)]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)


def _float(tensor: Tensor) -> Tensor:
    return _has(tensor, tensor.is_floating_point())  # type: ignore[no-any-return]


def _hooked(tensor: Tensor) -> Tensor:
    tensor = _float(tensor).detach().requires_grad_()
    tensor.register_hook(_unserializable(lambda grad: None))  # type: ignore[no-untyped-call]
    return tensor


def _graph(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A graph that has saved the tensor, and refers to it in no other way."""
    with torch.enable_grad():
        factor = torch.ones_like(_float(tensor)).detach().requires_grad_()
        return factor, (factor * tensor).sum()


def _of_graph(pair: tuple[Tensor, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(pair[1], [pair[0]], retain_graph=True))


# What is taken of one tensor, be it a parameter, a moment or a gradient.
OF_A_TENSOR: dict[str, tuple[Any, ...]] = {
    "itself": (lambda tensor: tensor,),
    "a view": (lambda tensor: _flat(tensor)[:1],),
    "detach()": (lambda tensor: tensor.detach(),),
    "an array": (lambda tensor: tensor.detach().numpy(), _of_array),
    "a capsule": (lambda tensor: to_dlpack(tensor.detach()), _of_capsule, True),
    "numpy.from_dlpack": (lambda tensor: np.from_dlpack(tensor.detach()), _of_array),
    "untyped_storage()": (
        lambda tensor: tensor.untyped_storage(),
        lambda storage: [torch.empty(0, dtype=torch.uint8).set_(storage)],
    ),
    "set_ to its storage": (lambda tensor: torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage()),),
    "nn.Parameter": (lambda tensor: nn.Parameter(_float(tensor).detach()),),
    "copy.copy": (copy.copy,),
    "a hooked leaf": (_hooked,),
    "an iterator": (lambda tensor: iter(tensor if tensor.ndim else tensor.reshape(1, -1)), list, True),
    "a graph of one's own": (lambda tensor: _graph(tensor.detach()), _of_graph),
    "a graph through the tensor itself": (_graph, _of_graph),
}


def _nodes(loss: Tensor) -> list[Any]:
    """The nodes of the graph of a tensor."""
    found: list[Any] = []
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [each for each, _ in node.next_functions]
    return found


def leaves_behind(value: Tensor) -> list[Tensor]:
    """The leaves in the graph of a tensor."""
    return [node.variable for node in _nodes(value) if hasattr(node, "variable")]


def _differentiate(loss: Any) -> list[Tensor]:
    total = loss["total"] if isinstance(loss, dict) else loss
    if total.grad_fn is None:
        return [total]
    leaves = leaves_behind(total)
    with torch.enable_grad():
        gradients = torch.autograd.grad(total.sum(), leaves, retain_graph=True, allow_unused=True)
    return [total, *leaves, *[each for each in gradients if each is not None]]


def _loss(state: pl.State, which: int = 0) -> Any:
    return _has(state.loss, state.loss is not None)


def _outputs(state: pl.State, which: int = 0) -> Any:
    return _has(state.outputs, isinstance(state.outputs, Tensor))


def _saved(state: pl.State, which: int) -> Tensor:
    """What a node of the graph has saved."""
    nodes = _nodes(_loss(state))
    names = [(node, name) for node in nodes for name in dir(node) if name.startswith("_saved_")]
    try:
        return _nth([each for pair in names if isinstance(each := getattr(*pair), Tensor)], which)  # type: ignore[no-any-return]
    except RuntimeError:  # they are freed
        raise Impossible from None


@torch.enable_grad()
def _own_loss(state: pl.State, which: int) -> Any:
    """A loss of one's own from the outputs: its graph shares what the loop's has saved."""
    return _has(_outputs(state), _outputs(state).grad_fn is not None).square().mean()


@torch.enable_grad()
def _penalty(state: pl.State, which: int) -> Any:
    """A graph of the user's through the leaves, which no backward of the loop frees."""
    leaf = _leaf(state, which)
    return leaf.square().sum(), leaf


def _with_hook(method: str) -> Callable[[pl.State, int], Any]:
    def take(state: pl.State, which: int) -> Any:
        leaf, seen = _leaf(state, which), list[Any]()
        getattr(leaf, method)(_unserializable(lambda given: seen.append(given if given.grad is None else given.grad)))
        return leaf, seen

    return take


def _one_tensor_in_another_state(state: pl.State, which: int) -> Any:
    """A State that shares one parameter with this one."""
    kept = _nth(state.params, which)
    return state.replace(params={name: t if name == kept else t.detach().clone() for name, t in state.params.items()})


def _other_params(state: pl.State, which: int) -> Any:
    return state.replace(params={name: torch.zeros_like(each).detach() for name, each in state.params.items()})


def _merged(state: pl.State, which: int) -> Any:
    return {**state.params}, state.params | {}, dict(state.params), state.params.copy(), copy.copy(state.params)


def _referents(state: pl.State, which: int) -> list[Any]:
    """What a debugger finds of a State: its mappings."""
    return [each for each in gc.get_referents(state) if isinstance(each, pl.FrozenDict)]


def _flattened(state: Any) -> Any:
    return optree.tree_leaves(state, namespace=NAMESPACE), torch.utils._pytree.tree_leaves(state)


def _mapped(state: Any) -> Any:
    same_leaf = partial(optree.tree_map, lambda leaf: leaf, namespace=NAMESPACE)
    return same_leaf(state), torch.utils._pytree.tree_map(lambda leaf: leaf, state)


STATES: dict[str, Way] = {
    "the State": Way(lambda state, i: state),
    "the State and no look at it": Way(lambda state, i: state, late=True),
    "copy.copy": Way(lambda state, i: copy.copy(state)),
    "copy.deepcopy": Way(lambda state, i: copy.deepcopy(state)),
    "pickle": Way(lambda state, i: pickle.dumps(state.params), lambda data: of_tree(pickle.loads(data))),
    "attrs.evolve": Way(lambda state, i: attrs.evolve(state, seed=1)),
    "attrs.asdict": Way(lambda state, i: attrs.asdict(state, recurse=False)),
    "replace(seed)": Way(lambda state, i: state.replace(seed=1)),
    "replace(params)": Way(_other_params, late=True),
    "replace(opt_state)": Way(lambda state, i: state.replace(opt_state=None), late=True),
    "replace(a part of the params)": Way(_one_tensor_in_another_state),
    "replace(loss)": Way(lambda state, i: state.replace(loss=None, grads=None), late=True),
    "gc.get_referents": Way(_referents),
    "tree_leaves": Way(lambda state, i: _flattened(state)),
    "tree_map": Way(lambda state, i: _mapped(state), late=True),
    "a module": Way(lambda state, i: state.module(), lambda module: [*module.parameters(), *module.buffers()]),
}

MAPPINGS: dict[str, Way] = {
    "params": Way(lambda state, i: state.params),
    "params, no look at them": Way(lambda state, i: state.params, late=True),
    "getattr": Way(lambda state, i: operator.attrgetter("params", "opt_state")(state)),
    "params.values()": Way(lambda state, i: state.params.values(), list),
    "iter(params.values())": Way(lambda state, i: iter(state.params.values()), list, late=True),
    "params.keys()": Way(lambda state, i: state.params.keys(), lambda keys: of_tree(dict(keys.mapping))),
    "params.get": Way(lambda state, i: state.params.get, lambda get: [get(next(iter(get.__self__)))]),
    "copies of the mapping": Way(_merged),
    "opt_state": Way(lambda state, i: state.opt_state),
    "opt_state, no look at it": Way(lambda state, i: state.opt_state, late=True),
    "a mapping of moments": Way(lambda state, i: _nth([m for m in state.opt_state.values() if isinstance(m, dict)], i)),
    "grads": Way(_gradients),
    "grads, no look at them": Way(_gradients, late=True),
    "iter(grads.values())": Way(
        lambda state, i: iter(_gradients(state).values()), lambda values: of_tree(list(values)), late=True
    ),
    "a buffer": Way(lambda state, i: _nth(of_tree(state.buffers), i)),
    "buffers": Way(lambda state, i: state.buffers),
    "algorithm_state": Way(lambda state, i: state.algorithm_state),
}

OF_GRAPHS: dict[str, Way] = {
    "the loss": Way(_loss),
    "the graph of the loss": Way(_loss, _differentiate, late=True),
    "the outputs": Way(_outputs),
    "the graph of the outputs": Way(_outputs, _differentiate, late=True),
    "a view of the outputs": Way(lambda state, i: _outputs(state)[:1]),
    "a leaf found in the graph": Way(lambda state, i: _nth(leaves_behind(_loss(state)), i)),
    "a tensor that the graph has saved": Way(_saved),
    "a loss of one's own": Way(_own_loss, _differentiate, late=True),
    "a penalty and its leaf": Way(_penalty, lambda pair: _differentiate(pair[0])),
    "a penalty alone": Way(lambda state, i: _penalty(state, i)[0], _differentiate),
    "a leaf": Way(_leaf),
    "a leaf with a hook": Way(_with_hook("register_hook"), late=True),
    "a leaf with a post-accumulate hook": Way(_with_hook("register_post_accumulate_grad_hook"), late=True),
}


def _of_one(tensor: Callable[[pl.State, int], Tensor], take: Callable[[Tensor], Any], state: Any, which: int) -> Any:
    return take(tensor(state, which))


OF_TENSORS: dict[str, Way] = {
    f"{what}: {name}": Way(partial(_of_one, tensor, take), *more)
    for what, tensor in TENSORS.items()
    for name, (take, *more) in OF_A_TENSOR.items()
}
KINDS = (STATES, MAPPINGS, OF_GRAPHS, OF_TENSORS)
WAYS: dict[str, Way] = {**STATES, **MAPPINGS, **OF_GRAPHS, **OF_TENSORS}


def _own(given: tuple[nn.Module, Tensor], which: int) -> Any:
    return _nth(given[0].parameters(), which)


# What a model's forward, a loss, a clip_grad and an optimizer can take: of themselves and of their arguments.
OF_OTHERS: dict[str, dict[str, Way]] = {
    "forward": {
        "self.weight": Way(_own),
        "self.weight.data": Way(lambda given, i: _own(given, i).data),
        "a view of self.weight": Way(lambda given, i: _flat(_own(given, i))[:1]),
        "an array of self.weight": Way(lambda given, i: _own(given, i).detach().numpy(), _of_array),
        "all parameters": Way(lambda given, i: list(given[0].parameters())),
        "activations": Way(lambda given, i: given[1]),
        "the graph of activations": Way(lambda given, i: given[1], _differentiate, late=True),
    },
    "loss": {
        "outputs": Way(lambda given, i: given[0]),
        "targets": Way(lambda given, i: given[1]),
        "the graph": Way(lambda given, i: given[0], _differentiate, late=True),
    },
    "clip": {
        "grads": Way(lambda given, i: given[0]),
        "a gradient": Way(lambda given, i: _nth(of_tree(given[0]), i)),
        "params": Way(lambda given, i: given[1]),
        "a parameter": Way(lambda given, i: _nth(of_tree(given[1]), i)),
    },
    "update": {
        "opt_state": Way(lambda given, i: given[1]),
        "a moment": Way(lambda given, i: _nth(of_tree(given[1]), i)),
        "grads": Way(lambda given, i: given[0]),
        "params": Way(lambda given, i: given[2]),
    },
}

GONE = object()
WEAK = "a weak reference"
Holder = Callable[[], Any]
"""What refers to a thing; called, it returns the thing, or GONE if it is not there any more."""


class Slotted:
    """An object with a slot."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing


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


def _in_cycle(thing: Any) -> Holder:
    held: list[Any] = [thing]
    held.append(held)
    return lambda: held[1][0]


def _behind_a_weak_reference(thing: Any) -> Holder:
    try:
        weak = weakref.ref(thing)
    except TypeError:
        return lambda: thing
    return lambda: GONE if (alive := weak()) is None else alive


def _in_thread(thing: Any) -> Holder:
    """A thread that has the thing in a variable, and hands it out when it is asked."""
    ask, started = threading.Event(), threading.Event()
    handed: list[Any] = []

    def wait(things: list[Any]) -> None:
        thing = things.pop()
        started.set()
        ask.wait(60)
        handed.append(thing)

    thread = threading.Thread(target=wait, args=([thing],), daemon=True)
    thread.start()
    started.wait(60)

    def get() -> Any:
        ask.set()
        thread.join(60)
        return handed[0]

    weakref.finalize(get, ask.set)
    return get


HOLDERS: dict[str, Callable[[Any], Holder]] = {
    "a list": lambda thing: partial([thing].__getitem__, 0),
    "a dict by its id": lambda thing: partial({id(thing): thing}.get, id(thing)),
    "a closure": lambda thing: lambda: thing,
    "a generator": _in_generator,
    "a partial": lambda thing: partial(lambda given: given, thing),
    "a slot": lambda thing: partial(getattr, Slotted(thing), "thing"),
    "a traceback": _in_traceback,
    "a cycle": _in_cycle,
    "a py_object": lambda thing: partial(getattr, ctypes.py_object(thing), "value"),
    "a thread": _in_thread,
    WEAK: _behind_a_weak_reference,
}
