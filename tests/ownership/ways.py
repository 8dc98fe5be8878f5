"""Ways of keeping something of a State, and what holds it: by the public API, and by what Python and torch offer.

A :class:`Way` takes a thing out of a State, and reads the numbers of that thing later. A holder is a place that refers
to the thing meanwhile. Which numbers are right is not read from the stream that is judged: its twin, which runs the
same program with ``donate=False``, says that.
"""

from __future__ import annotations

import contextvars
import copy
import ctypes
import functools
import gc
import operator
import pickle
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import attrs
import numpy as np
import optree
import torch
from torch import Tensor, nn
from torch.utils import dlpack, hooks

import pure_loop as pl

__all__ = [
    *("GONE", "GRAPHS", "HOLDERS", "MAPPINGS", "OF_OTHERS", "OF_TENSORS", "STATES", "WAYS", "WEAK"),
    *("Impossible", "Way", "of_tree", "outcome", "same"),
]

NAMESPACE = "pure_loop"
Taken: TypeAlias = Any
# Torch declares no types for these.
_unserializable: Any = hooks.unserializable_hook
to_dlpack: Any = vars(dlpack)["to_dlpack"]
from_dlpack = dlpack.from_dlpack


class Impossible(Exception):  # noqa: N818
    """This way takes something that a State at this event does not have."""


class Way(NamedTuple):
    """How something is taken out of a State, and how its numbers are read.

    Attributes:
        take: ``(state, which) -> thing``; a number from 0 on says which of several tensors.
        read: ``thing -> tensors``.
        late: reading changes the thing, or what it gives depends on what ran since: it is read once, at the end.
    """

    take: Callable[[Any, int], Taken]
    read: Callable[[Taken], list[Tensor]]
    late: bool = False


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; NaN is NaN."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    bits = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*bits)


def outcome(read: Callable[[Taken], list[Tensor]], thing: Taken) -> list[Tensor] | str:
    """Copies of the numbers, or what raised. A DonatedStateError is raised."""
    try:
        return [each.detach().clone() for each in read(thing)]
    except pl.errors.DonatedStateError:
        raise
    except RuntimeError as error:
        # Of torch, where a backward has freed the graph: its first words are enough.
        return f"{type(error).__name__}: {str(error)[:60]}"


def gradients_of(state: pl.State) -> Any:
    """The gradients; None where an algorithm runs at an event without."""
    try:
        return state.grads
    except pl.errors.GradientsNotReadyError:
        return None


def of_tree(tree: Any) -> list[Tensor]:
    """The tensors of a tree; those of a State by its fields, so that reading one that is gone is an error."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, pl.State):
        fields = (tree.params, tree.buffers, tree.opt_state, gradients_of(tree))
        durable = (tree.algorithm_state, tree.metrics, tree.lr_scale, tree.loss_scale, tree.skipped, tree.nonfinite)
        batch = (tree.batch, tree.microbatch, tree.outputs, tree.loss, tree.grad_norm)
        return [each for field in (*fields, *durable, *batch) for each in of_tree(field)]
    if isinstance(tree, dict):
        return [each for key in list(tree) for each in of_tree(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [each for value in tree for each in of_tree(value)]
    return [each for each in optree.tree_leaves(tree, namespace=NAMESPACE) if isinstance(each, Tensor)]


def _weight(state: pl.State, which: int) -> Tensor:
    tensors = of_tree(state.params)
    return tensors[which % len(tensors)]


def _moment(state: pl.State, which: int) -> Tensor:
    tensors = of_tree(state.opt_state)
    if not tensors:
        raise Impossible
    return tensors[which % len(tensors)]


def _moments(state: pl.State, which: int) -> Any:
    mappings = [value for value in state.opt_state.values() if isinstance(value, dict)]
    if not mappings:
        raise Impossible
    return mappings[which % len(mappings)]


def _gradient(state: pl.State, which: int) -> Tensor:
    tensors = of_tree(gradients_of(state) or {})
    if not tensors:
        raise Impossible
    return tensors[which % len(tensors)]


def _gradients(state: pl.State, which: int) -> Any:
    if not of_tree(gradients_of(state) or {}):
        raise Impossible
    return state.grads


def _leaf(state: pl.State, which: int) -> Tensor:
    weight = _weight(state, which)
    if not (weight.requires_grad and weight.is_leaf):
        raise Impossible
    return weight


TENSORS: dict[str, Callable[[pl.State, int], Tensor]] = {
    "parameter": _weight,
    "moment": _moment,
    "gradient": _gradient,
}


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def _of_array(array: Any) -> list[Tensor]:
    return [torch.from_numpy(np.array(array))]


def _of_memoryview(view: memoryview) -> list[Tensor]:
    return _of_array(np.asarray(view))


def _of_storage(storage: Any) -> list[Tensor]:
    return [torch.empty(0, dtype=torch.uint8).set_(storage)]


def _of_typed_storage(tensor: Tensor) -> Any:
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage())


def _of_capsule(capsule: Any) -> list[Tensor]:
    return [from_dlpack(capsule)]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1) if not tensor.is_contiguous() else tensor.view(-1)


def _differentiable(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise Impossible
    return tensor


def _hookable(tensor: Tensor) -> Any:
    return tensor


def _hooked(tensor: Tensor) -> Tensor:
    tensor = _differentiable(tensor).detach()
    tensor.requires_grad_()
    _hookable(tensor).register_hook(_unserializable(lambda grad: None))
    return tensor


def _dead_iterator(tensor: Tensor) -> Iterator[Tensor]:
    return iter(tensor.reshape(1, -1) if tensor.ndim == 0 else tensor)


# What is taken of one tensor, be it a parameter, a moment or a gradient.
OF_A_TENSOR: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], list[Tensor]], bool]] = {
    "itself": (lambda tensor: tensor, of_tree, False),
    "a view": (lambda tensor: _flat(tensor)[:1], of_tree, False),
    "a view of a view": (lambda tensor: _flat(tensor)[:].unsqueeze(0).expand(2, -1), of_tree, False),
    "detach()": (lambda tensor: tensor.detach(), of_tree, False),
    "data": (lambda tensor: tensor.data, of_tree, False),
    "an array": (_array, _of_array, False),
    "a view of an array": (lambda tensor: _array(tensor)[..., None], _of_array, False),
    "a memoryview": (lambda tensor: memoryview(_array(tensor)), _of_memoryview, False),
    "a capsule": (lambda tensor: to_dlpack(tensor.detach()), _of_capsule, True),
    "__dlpack__()": (lambda tensor: tensor.detach().__dlpack__(), _of_capsule, True),
    "from_dlpack": (lambda tensor: from_dlpack(tensor.detach()), of_tree, False),
    "numpy.from_dlpack": (lambda tensor: np.from_dlpack(tensor.detach()), _of_array, False),
    "untyped_storage()": (lambda tensor: tensor.untyped_storage(), _of_storage, False),
    "set_ to its storage": (_of_typed_storage, of_tree, False),
    "nn.Parameter": (lambda tensor: nn.Parameter(_differentiable(tensor).detach()), of_tree, False),
    "copy.copy": (copy.copy, of_tree, False),
    "as_subclass": (lambda tensor: tensor.detach().as_subclass(Marked), of_tree, False),
    "a hooked leaf": (_hooked, of_tree, False),
    "an iterator": (_dead_iterator, lambda iterator: list(iterator), True),
    "a graph of one's own": (
        lambda tensor: _graph(tensor.detach()),
        lambda pair: list(torch.autograd.grad(pair[1], [pair[0]], retain_graph=True)),
        False,
    ),
    "a graph through the tensor itself": (
        lambda tensor: _graph(tensor),
        lambda pair: list(torch.autograd.grad(pair[1], [pair[0]], retain_graph=True)),
        False,
    ),
}


class Marked(Tensor):
    """A subclass of a tensor that changes nothing."""


def _graph(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A graph that has saved the tensor, and refers to it in no other way."""
    with torch.enable_grad():
        factor = torch.ones_like(_differentiable(tensor)).detach().requires_grad_()
        return factor, (factor * tensor).sum()


def _user_penalty(state: pl.State, which: int) -> Any:
    """A graph of the user's through the leaves, which no backward of the loop frees."""
    leaf = _leaf(state, which)
    with torch.enable_grad():
        return leaf.square().sum(), leaf


def _penalty_alone(state: pl.State, which: int) -> Any:
    """The same, with nothing but the graph that refers to the leaf."""
    return _user_penalty(state, which)[0]


def _leaves_of_graph(loss: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [each for each, _ in node.next_functions]
    return found


def _differentiate(loss: Any) -> list[Tensor]:
    total = loss["total"] if isinstance(loss, dict) else loss
    if total.grad_fn is None:
        return [total]
    leaves = _leaves_of_graph(total)
    with torch.enable_grad():
        gradients = torch.autograd.grad(total.sum(), leaves, retain_graph=True, allow_unused=True)
    return [total, *leaves, *[each for each in gradients if each is not None]]


def _loss(state: pl.State, which: int) -> Any:
    if state.loss is None:
        raise Impossible
    return state.loss


def _outputs(state: pl.State, which: int) -> Any:
    if not isinstance(state.outputs, Tensor):
        raise Impossible
    return state.outputs


def _found_leaf(state: pl.State, which: int) -> Tensor:
    """A parameter that is found in the graph, and not read of the State."""
    loss = _loss(state, which)
    if loss.grad_fn is None:
        raise Impossible
    leaves = _leaves_of_graph(loss)
    return leaves[which % len(leaves)]


def _saved(state: pl.State, which: int) -> Tensor:
    """What a node of the graph has saved."""
    loss = _loss(state, which)
    nodes, found = [loss.grad_fn], list[Tensor]()
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        names = [name for name in dir(node) if name.startswith("_saved_")]
        try:
            found += [each for name in names if isinstance(each := getattr(node, name), Tensor)]
        except RuntimeError:  # they are freed
            raise Impossible from None
        nodes += [each for each, _ in node.next_functions]
    if not found:
        raise Impossible
    return found[which % len(found)]


def _referents(state: pl.State, which: int) -> list[Any]:
    """What a debugger finds of a State: its mappings."""
    return [each for each in gc.get_referents(state) if isinstance(each, pl.FrozenDict)]


def _own_loss(state: pl.State, which: int) -> Any:
    """A loss of one's own from the outputs: its graph shares what the loop's has saved."""
    outputs = _outputs(state, which)
    if outputs.grad_fn is None:
        raise Impossible
    with torch.enable_grad():
        return outputs.square().mean()


def _with_hook(state: pl.State, which: int) -> Any:
    leaf, seen = _leaf(state, which), list[Tensor]()
    _hookable(leaf).register_hook(_unserializable(lambda grad: seen.append(grad)))
    return leaf, seen


def _with_late_hook(state: pl.State, which: int) -> Any:
    leaf, seen = _leaf(state, which), list[Tensor]()
    _hookable(leaf).register_post_accumulate_grad_hook(_unserializable(lambda tensor: seen.append(tensor.grad)))
    return leaf, seen


def _other_params(state: pl.State, which: int) -> Any:
    others = {name: torch.zeros_like(tensor).detach() for name, tensor in state.params.items()}
    return state.replace(params=others)


def _other_memory(state: pl.State, which: int) -> Any:
    return state.replace(opt_state=None)


def _one_tensor_in_another_state(state: pl.State, which: int) -> Any:
    """A State that shares one parameter with this one."""
    names = list(state.params)
    name = names[which % len(names)]
    others = {each: tensor if each == name else tensor.detach().clone() for each, tensor in state.params.items()}
    return state.replace(params=others)


def _matched(state: pl.State, which: int) -> Any:
    match state:
        case pl.State(params=params, opt_state=memory):
            return params, memory
    raise AssertionError


def _module(state: pl.State, which: int) -> Any:
    return state.module()


def _of_module(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _merged(state: pl.State, which: int) -> Any:
    return {**state.params}, state.params | {}, dict(state.params), state.params.copy(), copy.copy(state.params)


def _tree(state: pl.State) -> Any:
    return state


_DESCRIPTOR: Any = vars(pl.State)["params"]

STATES: dict[str, Way] = {
    "the State": Way(lambda state, which: state, of_tree),
    "the State and no look at it": Way(lambda state, which: state, of_tree, late=True),
    "copy.copy": Way(lambda state, which: copy.copy(state), of_tree),
    "copy.deepcopy": Way(lambda state, which: copy.deepcopy(state), of_tree),
    "pickle": Way(lambda state, which: pickle.dumps(state.params), lambda data: of_tree(pickle.loads(data))),
    "attrs.evolve": Way(lambda state, which: attrs.evolve(state, seed=1), of_tree),
    "attrs.asdict": Way(lambda state, which: attrs.asdict(state, recurse=False), of_tree),
    "attrs.astuple": Way(lambda state, which: attrs.astuple(state, recurse=False), of_tree),
    "replace(seed)": Way(lambda state, which: state.replace(seed=1), of_tree),
    "replace(seed) twice": Way(lambda state, which: state.replace(seed=1).replace(seed=2), of_tree),
    "replace(params)": Way(_other_params, of_tree, late=True),
    "replace(opt_state)": Way(_other_memory, of_tree, late=True),
    "replace(a part of the params)": Way(_one_tensor_in_another_state, of_tree),
    "replace(loss)": Way(lambda state, which: state.replace(loss=None, grads=None), of_tree, late=True),
    "gc.get_referents": Way(_referents, of_tree),
    "__reduce__": Way(lambda state, which: state.__reduce__(), of_tree),
    "optree.tree_leaves": Way(lambda state, which: optree.tree_leaves(_tree(state), namespace=NAMESPACE), of_tree),
    "optree.tree_map": Way(
        lambda state, which: optree.tree_map(lambda leaf: leaf, _tree(state), namespace=NAMESPACE), of_tree, late=True
    ),
    "optree.tree_flatten_with_path": Way(
        lambda state, which: optree.tree_flatten_with_path(_tree(state), namespace=NAMESPACE)[1], of_tree
    ),
    "torch's tree_leaves": Way(lambda state, which: torch.utils._pytree.tree_leaves(state), of_tree),
    "torch's tree_map": Way(
        lambda state, which: torch.utils._pytree.tree_map(lambda leaf: leaf, state), of_tree, late=True
    ),
    "a match statement": Way(_matched, of_tree),
    "a module": Way(_module, _of_module),
}

MAPPINGS: dict[str, Way] = {
    "params": Way(lambda state, which: state.params, of_tree),
    "params, no look at them": Way(lambda state, which: state.params, of_tree, late=True),
    "getattr": Way(lambda state, which: operator.attrgetter("params", "opt_state")(state), of_tree),
    "the descriptor": Way(lambda state, which: _DESCRIPTOR.__get__(state), of_tree),
    "object.__getattribute__": Way(lambda state, which: object.__getattribute__(state, "params"), of_tree),
    "params.values()": Way(lambda state, which: state.params.values(), lambda values: list(values)),
    "params.items()": Way(lambda state, which: state.params.items(), lambda items: [each for _, each in items]),
    "iter(params.values())": Way(lambda state, which: iter(state.params.values()), list, late=True),
    "iter(params.items())": Way(
        lambda state, which: iter(state.params.items()), lambda items: [each for _, each in items], late=True
    ),
    "params.keys()": Way(lambda state, which: state.params.keys(), lambda keys: of_tree(dict(keys.mapping))),
    "params.get": Way(lambda state, which: state.params.get, lambda get: [get(next(iter(get.__self__)))]),
    "params.__getitem__": Way(
        lambda state, which: functools.partial(state.params.__getitem__, next(iter(state.params))),
        lambda get: [get()],
        late=True,
    ),
    "copies of the mapping": Way(_merged, of_tree),
    "a mapping proxy": Way(lambda state, which: types.MappingProxyType(state.params), lambda it: of_tree(dict(it))),
    "opt_state": Way(lambda state, which: state.opt_state, of_tree),
    "opt_state, no look at it": Way(lambda state, which: state.opt_state, of_tree, late=True),
    "a mapping of moments": Way(_moments, of_tree),
    "opt_state.values()": Way(lambda state, which: state.opt_state.values(), lambda values: of_tree(list(values))),
    "iter(opt_state.items())": Way(
        lambda state, which: iter(state.opt_state.items()), lambda items: of_tree(list(items)), late=True
    ),
    "grads": Way(_gradients, of_tree),
    "grads, no look at them": Way(_gradients, of_tree, late=True),
    "iter(grads.values())": Way(
        lambda state, which: iter(_gradients(state, which).values()), lambda values: of_tree(list(values)), late=True
    ),
    "a buffer": Way(lambda state, which: _nth(of_tree(state.buffers), which), of_tree),
    "buffers": Way(lambda state, which: state.buffers, of_tree),
    "algorithm_state": Way(lambda state, which: state.algorithm_state, of_tree),
}

GRAPHS: dict[str, Way] = {
    "the loss": Way(_loss, lambda loss: of_tree(loss)),
    "the graph of the loss": Way(_loss, _differentiate, late=True),
    "the outputs": Way(_outputs, of_tree),
    "the graph of the outputs": Way(_outputs, _differentiate, late=True),
    "the outputs, no look at them": Way(_outputs, of_tree, late=True),
    "a view of the outputs": Way(lambda state, which: _outputs(state, which)[:1], of_tree),
    "a leaf found in the graph": Way(_found_leaf, of_tree),
    "a tensor that the graph has saved": Way(_saved, of_tree),
    "a loss of one's own": Way(_own_loss, _differentiate, late=True),
    "a penalty and its leaf": Way(_user_penalty, lambda pair: _differentiate(pair[0])),
    "a penalty alone": Way(_penalty_alone, _differentiate),
    "a leaf": Way(_leaf, of_tree),
    "a leaf with a hook": Way(_with_hook, of_tree, late=True),
    "a leaf with a post-accumulate hook": Way(_with_late_hook, of_tree, late=True),
}


def _of_one(tensor: Callable[[pl.State, int], Tensor], take: Callable[[Tensor], Any], state: Any, which: int) -> Any:
    return take(tensor(state, which))


OF_TENSORS: dict[str, Way] = {}
for _what, _tensor in TENSORS.items():
    for _name, (_take, _read, _late) in OF_A_TENSOR.items():
        OF_TENSORS[f"{_what}: {_name}"] = Way(functools.partial(_of_one, _tensor, _take), _read, _late)

WAYS: dict[str, Way] = {**STATES, **MAPPINGS, **GRAPHS, **OF_TENSORS}


# What a model's forward, a loss, and a clip_grad can take: of themselves and of their arguments.
OF_OTHERS: dict[str, dict[str, Way]] = {
    "forward": {
        "self.weight": Way(lambda given, which: _nth(list(given[0].parameters()), which), of_tree),
        "self.weight.data": Way(lambda given, which: _nth(list(given[0].parameters()), which).data, of_tree),
        "a view of self.weight": Way(lambda given, which: _flat(_nth(list(given[0].parameters()), which))[:1], of_tree),
        "an array of self.weight": Way(
            lambda given, which: _array(_nth(list(given[0].parameters()), which)), _of_array
        ),
        "all parameters": Way(lambda given, which: list(given[0].parameters()), of_tree),
        "vars(layer)": Way(lambda given, which: dict(_layer(given[0])._parameters), lambda it: list(it.values())),
        "activations": Way(lambda given, which: given[1], of_tree),
        "the graph of activations": Way(lambda given, which: given[1], _differentiate, late=True),
    },
    "loss": {
        "outputs": Way(lambda given, which: given[0], of_tree),
        "targets": Way(lambda given, which: given[1], of_tree),
        "the graph": Way(lambda given, which: given[0], _differentiate, late=True),
    },
    "clip": {
        "grads": Way(lambda given, which: given[0], of_tree),
        "a gradient": Way(lambda given, which: _nth(of_tree(given[0]), which), of_tree),
        "params": Way(lambda given, which: given[1], of_tree),
        "a parameter": Way(lambda given, which: _nth(of_tree(given[1]), which), of_tree),
    },
    "update": {
        "opt_state": Way(lambda given, which: given[1], of_tree),
        "a moment": Way(lambda given, which: _nth(of_tree(given[1]), which), of_tree),
        "grads": Way(lambda given, which: given[0], of_tree),
        "params": Way(lambda given, which: given[2], of_tree),
    },
}


def _nth(values: list[Any], which: int) -> Any:
    if not values:
        raise Impossible
    return values[which % len(values)]


def _own(given: tuple[nn.Module, Tensor], which: int) -> Any:
    return _nth(list(given[0].parameters()), which)


def _layer(module: nn.Module) -> nn.Module:
    return next(each for each in module.modules() if each._parameters)


GONE = object()
Holder: TypeAlias = Callable[[], Any]
"""What refers to a thing; called, it returns the thing, or GONE if it is not there any more."""


class Attribute:
    """An object with an attribute."""

    thing: Any


class Slotted:
    """An object with a slot."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing


_GLOBALS: dict[str, Any] = {}


def _in_list(thing: Any) -> Holder:
    held = [thing]
    return lambda: held[0]


def _in_tuple(thing: Any) -> Holder:
    held = (1, (thing,))
    return lambda: held[1][0]


def _in_dict(thing: Any) -> Holder:
    held = {id(thing): thing}
    return lambda: next(iter(held.values()))


def _in_set(thing: Any) -> Holder:
    held = {Slotted(thing)}
    return lambda: next(iter(held)).thing


def _in_closure(thing: Any) -> Holder:
    return lambda: thing


def _in_generator(thing: Any) -> Holder:
    def suspended(thing: Any) -> Iterator[Any]:
        while True:
            yield thing

    held = suspended(thing)
    next(held)
    return lambda: next(held)


def _in_coroutine(thing: Any) -> Holder:
    async def waits(thing: Any) -> Any:
        return thing

    held = waits(thing)
    results: list[Any] = []

    def get() -> Any:
        if not results:
            try:
                held.send(None)
            except StopIteration as stop:
                results.append(stop.value)
        return results[0]

    weakref.finalize(get, held.close)
    return get


def _in_partial(thing: Any) -> Holder:
    return functools.partial(lambda thing: thing, thing)


def _in_defaults(thing: Any) -> Holder:
    def get(thing: Any = thing) -> Any:
        return thing

    return get


def _in_attribute(thing: Any) -> Holder:
    held = Attribute()
    held.thing = thing
    return lambda: held.thing


def _in_slot(thing: Any) -> Holder:
    held = Slotted(thing)
    return lambda: held.thing


def _in_global(thing: Any) -> Holder:
    key = f"kept {len(_GLOBALS)}"
    _GLOBALS[key] = thing

    def get() -> Any:
        return _GLOBALS[key]

    weakref.finalize(get, _GLOBALS.pop, key, None)
    return get


def _in_class(thing: Any) -> Holder:
    held = type("Held", (), {"thing": Slotted(thing)})
    return lambda: held.thing.thing  # type: ignore[attr-defined]


def _in_exception(thing: Any) -> Holder:
    held = ValueError(thing)
    return lambda: held.args[0]


def _in_traceback(thing: Any) -> Holder:
    def fails(thing: Any) -> None:
        raise ValueError

    try:
        fails(thing)
    except ValueError as error:
        held = error
    traceback = held.__traceback__
    assert traceback is not None
    assert traceback.tb_next is not None
    frame = traceback.tb_next.tb_frame
    return lambda: frame.f_locals["thing"]


def _in_deque(thing: Any) -> Holder:
    held = deque([thing], maxlen=2)
    return lambda: held[0]


def _in_cycle(thing: Any) -> Holder:
    held: list[Any] = [thing]
    held.append(held)
    return lambda: held[1][0]


def _in_context(thing: Any) -> Holder:
    context, variable = contextvars.Context(), contextvars.ContextVar[Any]("variable")
    context.run(variable.set, thing)
    return lambda: context[variable]


def _in_object_array(thing: Any) -> Holder:
    held = np.empty(1, dtype=object)
    held[0] = thing
    return lambda: held[0]


def _in_c(thing: Any) -> Holder:
    held = ctypes.py_object(thing)
    return lambda: held.value


def _in_thread_local(thing: Any) -> Holder:
    held = threading.local()
    held.thing = thing
    return lambda: getattr(held, "thing", GONE)  # in another thread, and after the end of this one


def _behind_a_weak_reference(thing: Any) -> Holder:
    try:
        weak = weakref.ref(thing)
    except TypeError:
        return _in_closure(thing)

    def get() -> Any:
        alive = weak()
        return GONE if alive is None else alive

    return get


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
    "a list": _in_list,
    "a tuple": _in_tuple,
    "a dict by its id": _in_dict,
    "a set": _in_set,
    "a closure": _in_closure,
    "a generator": _in_generator,
    "a coroutine": _in_coroutine,
    "a partial": _in_partial,
    "a default argument": _in_defaults,
    "an attribute": _in_attribute,
    "a slot": _in_slot,
    "a global": _in_global,
    "a class": _in_class,
    "an exception": _in_exception,
    "a traceback": _in_traceback,
    "a deque": _in_deque,
    "a cycle": _in_cycle,
    "a context": _in_context,
    "an array of objects": _in_object_array,
    "a py_object": _in_c,
    "a thread's locals": _in_thread_local,
    "a thread": _in_thread,
    "a weak reference": _behind_a_weak_reference,
}
WEAK = "a weak reference"
