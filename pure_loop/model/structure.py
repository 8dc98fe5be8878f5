"""Copies of a module: the module tree is copied, and what it refers to besides is the user's own object.

``copy.deepcopy`` would copy everything that a module refers to: the object with a method as a hook, so that what it
collects is lost; a frozen teacher in a list, with its weights. Here modules and their registered tensors are copied,
and references to them lead to the copies, from bound methods, closures, ``functools.partial`` and containers too, weak
references and the handles of hooks among them. Anything else stays the object that the user has.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pure_loop.errors import ModelError

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
# What torch keeps in every module.
_INTERNAL = frozenset(vars(nn.Module())) | {"_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
_ATOMIC = (
    *(type(None), bool, int, float, complex, str, bytes, range, type, types.CodeType, types.ModuleType),
    *(types.BuiltinFunctionType, weakref.ref, property, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
# Of which copies are made where they lead to the tree, also where a hook is given them.
_OPENED = (types.FunctionType, types.MethodType, partial, *_CONTAINERS)
# torch's own record of a hook of state_dict, with a weak reference to its module.
_WRAPPED_HOOK: Any = getattr(nn.modules.module, "_WrappedHook", ())
_WEAK_MAPPINGS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
# Objects to go through in search of a module, from one attribute.
_MOST = 100_000


class _Memo(dict[int, Any]):
    """The memo of a deepcopy, to which weak references to copied objects lead to the copies: else they are atoms.

    Attributes:
        weak: those, by their ids.
    """

    def __init__(self, memo: Mapping[int, Any]) -> None:
        super().__init__(memo)
        self.weak: dict[int, Any] = {}

    def get(self, key: int, default: Any = None) -> Any:
        """What stands for an object; ``deepcopy`` asks first. A copy that is being made is found already."""
        weak = self.weak.pop(key, None)
        if isinstance(weak, weakref.ref):
            # Without the callback: copies are made and dropped all the time.
            self[key] = type(weak)(copy.deepcopy(weak(), self))
        elif weak is not None:
            items = copy.deepcopy(list(weak.items()), self)
            self[key] = type(weak)(items)
        return super().get(key, default)


def copied(
    module: nn.Module,
    memo: dict[int, Any] | None = None,
    *,
    independent: bool = False,
    prepare: Callable[[dict[int, Any]], None] | None = None,
) -> nn.Module:
    """A copy of a module tree that refers to the same other objects.

    Args:
        module: what to copy.
        memo: what stands for some of its objects, by their ids, as for ``copy.deepcopy``.
        independent: copy what attributes refer to as well, so that nothing done to the copy is seen elsewhere; but for
            the objects that hooks call.
        prepare: is given the memo before the module is copied.

    >>> class Keep:
    ...     def hook(self, module, inputs, output): ...
    >>> keep, net = Keep(), nn.Sequential(nn.Linear(1, 1))
    >>> net.keep = keep
    >>> _ = net.register_forward_hook(keep.hook)
    >>> other = copied(net)
    >>> [hook.__self__ is keep for hook in other._forward_hooks.values()], other[0] is net[0]
    ([True], False)
    >>> other.keep is net.keep
    True
    """
    walk = _Walk(module, {} if memo is None else memo)
    walk.hooks()
    walk.attributes(independent)
    if prepare is not None:
        prepare(walk.memo)
    clone: nn.Module = copy.deepcopy(module, walk.memo)
    walk.close_over()
    return clone


def referred_to(module: nn.Module) -> list[Any]:
    """The objects outside of the module tree that its copies share."""
    walk = _Walk(module, {})
    walk.hooks()
    walk.attributes(False)
    return list(walk.memo.values())


def found_from(value: Any) -> Iterator[Any]:
    """An object and those that it refers to, each once, as far as that can be told without running its code."""
    seen: dict[int, Any] = {}
    pending = [value]
    while pending and len(seen) < _MOST:
        value = pending.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            yield value
            pending += children(value)


def refers_to(value: Any, module: nn.Module) -> bool:
    """Whether a function, or what it holds on to (its global names, too), is or leads to a part of a module tree."""
    walk = _Walk(module, {})
    return walk.touches(value, globally=True)


def attribute_with(module: nn.Module, value: Any) -> str | None:
    """The path of an attribute of a module in the tree that leads to an object which torch doesn't register; or None.

    >>> net, layer = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
    >>> net[0].layers = [layer]
    >>> attribute_with(net, layer.weight), attribute_with(net, net[0].weight)
    ('model.0.layers', None)
    """
    for prefix, submodule in module.named_modules():
        for name, held in vars(submodule).items():
            if name not in _INTERNAL and any(item is value for item in found_from(held)):
                return ".".join(filter(None, ("model", prefix, name)))
    return None


def refuse_uncopyable(module: nn.Module) -> None:
    """
    Raises:
        ModelError: an attribute can't be copied, as ``State.module()`` does; names it.
    """
    walk = _Walk(module, {})
    walk.hooks()
    for prefix, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if name in _INTERNAL:
                continue
            path = ".".join(filter(None, ("model", prefix, name)))
            result = _uncopyable(value, path, {*walk.own, *walk.memo})
            if result is not None:
                where, what, why = result
                raise ModelError(
                    f"{where} is a {what}, which can't be copied ({why}), and the structure of a model is a value that "
                    "can be. Keep it outside of the module: in a global name, or in an object of yours that a hook or "
                    "a function of pl.Task refers to; or make it in the forward."
                )


class _Walk:
    """Decides of each object that a module tree refers to whether copies of the tree share it.

    Attributes:
        own: the ids of modules, registered tensors and mappings of hooks of the tree.
        memo: what copies have in the place of an object, by its id.
    """

    def __init__(self, module: nn.Module, memo: dict[int, Any]) -> None:
        self.memo = _Memo(memo)
        self._modules = list(module.modules())
        tensors = [*module.parameters(), *module.buffers()]
        hooks = [vars(item)[kind] for item in self._modules for kind in _HOOKS if kind in vars(item)]
        self.own = {*map(id, self._modules), *map(id, tensors), *map(id, hooks)}
        self._untouching: dict[int, Any] = {}  # with the objects, so that ids stay theirs
        self._seen: dict[int, Any] = {}
        self._functions: list[tuple[types.FunctionType, types.FunctionType]] = []
        self._cells: dict[int, tuple[Any, Any]] = {}

    def hooks(self) -> None:
        """Share the objects that hooks call, and those that are handed to them."""
        for module in self._modules:
            for kind in _HOOKS:
                for hook in vars(module).get(kind, {}).values():
                    self._share(hook, called=True)

    def attributes(self, independent: bool) -> None:
        """Share what attributes refer to, as far as nothing of the tree is found from there."""
        for module in self._modules:
            of_torch = type(module).__module__.partition(".")[0] == "torch"
            for name, value in vars(module).items():
                if name not in _INTERNAL:
                    self._share(value, containers=not of_torch, independent=independent)

    def _share(self, value: Any, *, called: bool = False, containers: bool = True, independent: bool = False) -> None:
        if isinstance(value, _ATOMIC) or id(value) in self.own or id(value) in self.memo or id(value) in self._seen:
            if isinstance(value, types.ModuleType):
                self.memo[id(value)] = value
            elif isinstance(value, weakref.ref):
                (self.memo.weak if self.touches(value) else self.memo)[id(value)] = value
            return
        if isinstance(value, RemovableHandle) and value.hooks_dict_ref() is None:
            self.memo[id(value)] = value  # of a module that is gone
            return
        kind = type(value)
        is_shared = not isinstance(value, _OPENED)
        if isinstance(value, _WRAPPED_HOOK):
            self._share(value.hook, called=True)
            return
        touching = self.touches(value)
        ours = called and is_shared and kind.__module__.partition(".")[0] != "torch"
        if (ours or not touching) and not independent and (containers or not isinstance(value, _CONTAINERS)):
            self.memo[id(value)] = value
            return
        if independent and isinstance(value, Tensor):
            if not value.is_leaf:  # deepcopy takes no results of a computation
                self.memo[id(value)] = value.detach().clone()
            return
        self._seen[id(value)] = value
        if kind in _WEAK_MAPPINGS:  # which copy either keys or values
            self.memo.weak[id(value)] = value
        if isinstance(value, types.FunctionType):
            if not touching:
                return
            self._rebuild(value)
        for child in children(value):
            self._share(child, called=called, containers=containers, independent=independent)

    def touches(self, value: Any, *, globally: bool = False) -> bool:
        """Whether the value is a part of the tree, or one is found from it."""
        seen: dict[int, Any] = {}
        pending = [value]
        while pending:
            value = pending.pop()
            if id(value) in self.own:
                return True
            if isinstance(value, weakref.ref):
                target = value()
                # Nothing else keeps the copy of an object outside of the tree alive.
                if id(target.__self__ if isinstance(target, types.MethodType) else target) in self.own:
                    return True
            if isinstance(value, _ATOMIC) or id(value) in seen or id(value) in self._untouching:
                continue
            if len(seen) >= _MOST:
                return False
            seen[id(value)] = value
            pending += children(value)
            if globally and isinstance(value, types.FunctionType):
                pending += _globals_of(value)
        if not globally:
            self._untouching |= seen
        return False

    def _rebuild(self, function: types.FunctionType) -> None:
        """Let the copies have a function of the same code, over other cells where these lead to the tree."""
        cells = []
        for cell in function.__closure__ or ():
            if id(cell) not in self._cells and self.touches(_content(cell)):
                self._cells[id(cell)] = cell, types.CellType()
            cells.append(self._cells[id(cell)][1] if id(cell) in self._cells else cell)
        copy_of_function = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
        )
        vars(copy_of_function).update(vars(function))
        copy_of_function.__kwdefaults__, copy_of_function.__qualname__ = function.__kwdefaults__, function.__qualname__
        copy_of_function.__doc__, copy_of_function.__module__, copy_of_function.__annotations__ = (
            *(function.__doc__, function.__module__),
            function.__annotations__,
        )
        self.memo[id(function)] = copy_of_function
        self._functions.append((function, copy_of_function))

    def close_over(self) -> None:
        """After the tree was copied: put the copies where functions find them."""
        for old, cell in self._cells.values():
            cell.cell_contents = copy.deepcopy(_content(old), self.memo)
        for function, result in self._functions:
            result.__defaults__ = copy.deepcopy(function.__defaults__, self.memo)
            result.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, self.memo)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that nothing was bound to
        return None


def children(value: Any) -> list[Any]:
    """What an object refers to, where that can be told without running code of its class."""
    if isinstance(value, (Tensor, *_ATOMIC)):
        return []
    if isinstance(value, dict):
        # A subclass may refuse to be read: a mapping does after its memory was donated.
        return [*dict.keys(value), *dict.values(value)]
    for container in _CONTAINERS:
        if isinstance(value, container):
            iterate: Any = container.__iter__
            return list(iterate(value))
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, _WRAPPED_HOOK):
        return [value.hook]
    if isinstance(value, RemovableHandle):
        return [value.hooks_dict_ref()]
    return list(_attributes(value).values())


def _attributes(value: Any) -> Mapping[str, Any]:
    result: dict[str, Any] = {}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = vars(cls).get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                try:
                    result[name] = descriptor.__get__(value)
                except AttributeError:
                    continue
    result.update(getattr(value, "__dict__", {}))
    return result


def _globals_of(function: types.FunctionType) -> Iterator[Any]:
    """The modules and objects behind the global names of a function, and of those in it, but no other functions."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, nn.Module | Tensor | types.MethodType | partial):
                yield value


def _uncopyable(value: Any, path: str, ids: set[int]) -> tuple[str, str, str] | None:
    """The path of an object that deepcopy would raise about, its class and why; None where there is none."""
    pending = [(value, path)]
    seen: dict[int, Any] = {}
    while pending:
        value, path = pending.pop()
        if isinstance(value, (Tensor, types.FunctionType, *_ATOMIC)) or id(value) in ids or id(value) in seen:
            continue
        seen[id(value)] = value
        name = type(value).__name__
        if isinstance(value, torch.Stream | torch.Event):
            return path, name, "it belongs to a device of this process"
        if isinstance(value, dict):
            pending += [(item, f"{path}[{key!r}]") for key, item in value.items()]
        elif isinstance(value, _CONTAINERS):
            pending += [(item, f"{path}[{index}]") for index, item in enumerate(value)]
        elif isinstance(value, types.MethodType | partial):
            pending += [(child, path) for child in children(value)]
        elif isinstance(value, nn.Module):
            pending += [(item, f"{path}.{key}") for key, item in vars(value).items()]
        elif not hasattr(value, "__deepcopy__"):
            try:
                reduced = value.__reduce_ex__(4)
            except Exception as error:
                return path, name, str(error)
            if isinstance(reduced, str):
                continue
            attributes = _attributes(value)
            pending += [(item, f"{path}.{key}") for key, item in attributes.items()]
            held = set(map(id, attributes.values()))
            rest = [reduced[1], *[part for part in reduced[2:3] if id(part) not in held]]
            pending += [(part, path) for part in rest if part is not attributes and not _is_state_of(part, attributes)]
    return None


def _is_state_of(part: Any, attributes: Mapping[str, Any]) -> bool:
    return isinstance(part, dict) and part.keys() == attributes.keys()
