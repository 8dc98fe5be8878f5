"""Functions of a tree of modules: where tensors stand in it, modes, classes, and what runs in a call."""

from __future__ import annotations

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
