"""A tree of modules: where tensors stand in it, and are found at once; modes, classes, and what runs in a call."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from pure_loop._internal.records import set_class


def entries(module: nn.Module, kind: str) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """(name, dict, key, value) of all parameters or buffers (``kind``) that are registered, None among them."""
    for prefix, submodule in module.named_modules():
        tensors = getattr(submodule, kind)
        for key, value in tensors.items():
            yield f"{prefix}.{key}" if prefix else key, tensors, key, value


def tensor_places(module: nn.Module, names: tuple[str, ...], kind: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, dict, key) for every place in the module that holds a tensor: several where weights are tied."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    first: dict[str, int] = {}
    for path, tensors, key, tensor in entries(module, kind):
        if tensor is not None:
            places.setdefault(id(tensor), []).append((tensors, key))
            first[path] = id(tensor)
    for name in names:
        for tensors, key in places[first[name]]:
            yield name, tensors, key


def places_at(module: nn.Module, places: Mapping[str, list[str]]) -> Iterator[tuple[str, dict[str, Any], str]]:
    for name, paths in places.items():
        for path in paths:
            prefix, _, key = path.rpartition(".")
            yield name, module.get_submodule(prefix)._buffers, key


def modes_to_keep(module: nn.Module) -> tuple[tuple[str, bool], ...]:
    """The modes of submodules in eval mode and of what is in them; none where the whole module is in eval mode."""
    if not module.training:
        return ()
    inside = {id(part) for layer in module.modules() if not layer.training for part in layer.modules()}
    return tuple((name, submodule.training) for name, submodule in module.named_modules() if id(submodule) in inside)


def set_mode(module: nn.Module, training: bool, modes: tuple[tuple[str, bool], ...]) -> None:
    module.train(training)
    if not training or not modes:
        return
    submodules = [(module.get_submodule(name), mode) for name, mode in modes]
    for submodule, mode in submodules:
        if submodule.training is not mode:
            submodule.train(mode)
    for submodule, mode in submodules:
        submodule.training = mode  # of one that two others contain, too


def own_classes(module: nn.Module) -> None:
    """Give parametrized modules classes of their own: torch keeps a property for each parametrized tensor there.

    ``deepcopy`` leaves copy and original with one class, and ``remove_parametrizations`` on either changes both.
    """
    for layer in module.modules():
        cls = type(layer)
        if "parametrizations" in layer._modules and parametrize.is_parametrized(layer):
            namespace = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
            metaclass: Any = type(cls)
            set_class(layer, metaclass(cls.__name__, cls.__bases__, namespace))


def class_of(module: nn.Module) -> type:
    """The class of a module, without what parametrizing this one has added to it."""
    cls = type(module)
    parametrized = "parametrizations" in module._modules and parametrize.is_parametrized(module)
    return cls.__bases__[0] if parametrized else cls


_NEVER_DRAW = frozenset(
    {
        *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d),
        *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
        *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten, nn.Embedding),
    }
)


def may_use_rng(module: nn.Module) -> bool:
    """Whether calling this module may draw random numbers: what is not known to draw none may."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) not in _NEVER_DRAW or bool(hooks) or "forward" in vars(module)


# What torch keeps in each module.
_INTERNAL = frozenset(vars(nn.Module()))


def plain_attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """What the plain attributes of a user's modules refer to, by the names of module and attribute."""
    return {
        (prefix, name): value
        for prefix, submodule in module.named_modules()
        if not type(submodule).__module__.startswith("torch.")
        for name, value in vars(submodule).items()
        if name not in _INTERNAL
        and not any(name in members for members in (submodule._parameters, submodule._buffers, submodule._modules))
    }


_KINDS = ("_parameters", "_buffers", "_modules")


def mirror(module: nn.Module, notes: list[str] | None = None) -> None:
    """Have the tensors and submodules of a private module, and of all modules in it, found at once.

    ``module.weight`` is no attribute: Python looks for one, fails, formats an error and drops it, and only then calls
    ``Module.__getattr__``, which finds the tensor in ``_parameters``. That costs more than many a kernel, for each
    tensor and each submodule that a forward reads. In a private module the same objects stand in ``__dict__`` as well;
    and because others write to ``_parameters`` too (``functional_call`` in a forward), what is written there is written
    to both.

    Args:
        module: the private module.
        notes: a list to which names are appended when something is registered, replaced or removed: all parameters and
            submodules, and buffers that were no tensors. What is assigned to a buffer that was a tensor isn't noted.

    >>> layer = nn.Linear(1, 1)
    >>> mirror(layer)
    >>> layer._parameters["bias"] = None
    >>> layer.bias is None is vars(layer)["bias"]
    True
    """
    for item in module.modules():
        for kind in _KINDS:
            members = vars(item).get(kind)
            if type(members) is dict:
                vars(item)[kind] = Mirrored(item, members)
                vars(item)[kind].note_in(notes, but_for_tensors=kind == "_buffers")


def stands_twice(members: dict[str, Any], name: str) -> bool:
    """Whether an item of a module's ``_parameters`` stands in its ``__dict__`` as well."""
    return isinstance(members, Mirrored) and name in members._names


class Mirrored(dict[str, Any]):
    """``_parameters``, ``_buffers`` or ``_modules`` of a module, with items that stand in its ``__dict__`` too.

    Only those that were there at first do. Others, and what an attribute of the class hides, are found as ever.
    """

    __slots__ = ("_names", "_notes", "_owner", "_unnoted")

    def __init__(self, owner: nn.Module, items: Mapping[str, Any], names: frozenset[str] | None = None) -> None:
        super().__init__(items)
        # Weak, because a cycle would keep the tensors until Python next looks for cycles.
        self._owner = weakref.ref(owner)
        if names is None:
            cls, present = type(owner), vars(owner)
            names = frozenset(name for name in items if name not in present and not hasattr(cls, name))
            present.update((name, items[name]) for name in names)
        self._names = names
        self._notes: list[str] | None = None
        self._unnoted: frozenset[str] = frozenset()

    def note_in(self, notes: list[str] | None, *, but_for_tensors: bool) -> None:
        """Append names to a list when items are set or removed; those that are tensors now may be set unnoted."""
        self._notes = notes
        if but_for_tensors:
            self._unnoted = frozenset(name for name, value in self.items() if value is not None)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name in self._names and (owner := self._owner()) is not None:
            vars(owner)[name] = value
        if self._notes is not None and name not in self._unnoted:
            self._notes.append(name)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        if self._notes is not None:
            self._notes.append(name)
        if name in self._names and (owner := self._owner()) is not None:
            vars(owner).pop(name, None)

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return super().pop(name, *default)
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self), None)
        return super().popitem() if name is None else (name, self.pop(name))

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: Any, **items: Any) -> None:
        for name, value in dict(*others, **items).items():
            self[name] = value

    def __ior__(self, other: Any) -> Mirrored:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        # A module's copy is noted before what it has is copied, and its `__dict__` is copied with what stands in it.
        owner = memo.get(id(self._owner()))
        items = {name: copy.deepcopy(value, memo) for name, value in self.items()}
        return items if owner is None else Mirrored(owner, items, self._names)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
