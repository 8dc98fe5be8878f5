"""Changes of a model at INIT: copies of modules in which layers are of another class, or have a hook.

Names of parameters stay, so that pretrained weights, averages and checkpoints fit. The user's module stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from torch import nn

from pure_loop.algorithm import Algorithm
from pure_loop.errors import ArgumentTypeError, ModelError
from pure_loop.event import Event
from pure_loop.model import structure
from pure_loop.random import derive, seeded
from pure_loop.state import State

LayerFilter: TypeAlias = Callable[[str, nn.Module], bool]
"""``(name, layer) -> bool``, of a layer and its dotted name in the module."""


def copied(module: nn.Module, where: str) -> nn.Module:
    """A copy of a module that shares no tensor with it, nor anything but the objects that its hooks call.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"{where}: {module!r} of type {type(module).__name__} is not a torch.nn.Module.")
    return structure.copied(module, independent=True)


def chosen(
    module: nn.Module, only: LayerFilter | None, exclude: LayerFilter | None, where: str
) -> Iterator[tuple[str, nn.Module]]:
    """The submodules of a module with their names that ``only`` admits, where it is given, and ``exclude`` does not.

    Raises:
        ArgumentTypeError: one of them is no function.
    """
    for name, function in (("only", only), ("exclude", exclude)):
        if function is not None and not callable(function):
            raise ArgumentTypeError(
                f"{where}: {name}={function!r} is not a function of (name, layer) that returns a bool: "
                f'{name}=lambda name, layer: name.startswith("head").'
            )
    for name, layer in list(module.named_modules()):
        if (only is None or only(name, layer)) and not (exclude is not None and exclude(name, layer)):
            yield name, layer


def nothing_fits(where: str, module: nn.Module, reasons: list[str], serves: str) -> ModelError:
    """The error of a change that finds no layer: what there is, and what is served."""
    kinds = sorted({type(layer).__name__ for layer in module.modules() if not list(layer.children())})
    listed = "; ".join(reasons[:5]) + (f"; and {len(reasons) - 5} more" if len(reasons) > 5 else "")
    there = listed or f"its layers are {', '.join(kinds)}"
    return ModelError(
        f"{where} finds nothing to change in {type(module).__name__}: {there}. It serves {serves}; or leave {where} "
        "out."
    )


def with_layers(
    module: nn.Module,
    change: Callable[[str, nn.Module], bool | str],
    where: str,
    serves: str,
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
) -> nn.Module:
    """A copy of a module with some of its layers changed.

    Args:
        change: changes a layer of the copy, ``(name, layer)``. True: it has; a text: why it has not; False: the layer
            is of another kind.
        where: the algorithm, for errors.
        serves: what it can change, for errors.
        only, exclude: which layers are passed to ``change``, and which are not.

    Raises:
        ModelError: no layer was changed.
        ArgumentTypeError: not a module, or a filter that is no function.
    """
    clone, reasons, changed = copied(module, f"apply_{where}"), [], False
    for name, layer in chosen(clone, only, exclude, where):
        result = change(name, layer)
        if isinstance(result, str):
            reasons.append(result)
        else:
            changed |= result
    if not changed:
        raise nothing_fits(where, module, reasons, serves)
    return clone


def surgery(apply: Callable[..., nn.Module], name: str, **settings: object) -> Algorithm:
    """An algorithm that puts ``apply(module, **settings)`` into the State at INIT; what it draws is of the run's seed.

    A factory with the settings of the function, and ``name``, is ``return surgery(apply_x, **locals())``.
    """

    def operate(state: State) -> State:
        with seeded(derive(state.seed, name), state.device):
            return state.with_module(apply(state.module(), **settings))

    return Algorithm(name, {Event.INIT: operate})
