"""Names of a package that are imported when they are first asked for (PEP 562), and packages that come with extras.

A module that a plain ``fit`` doesn't use costs nothing until it is used. Type checkers and editors don't run this: a
package imports the same names under ``TYPE_CHECKING`` as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from pure_loop.errors import MissingExtraError

__all__ = ["lazily", "lazily_by_module", "require"]


def lazily(package: str, names: Mapping[str, str | None]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its ``__name__``.
        names: each name, and the module that has it; None for a name that is itself a module of the package.
    """
    functions = frozenset(name for name, module in names.items() if module == f"{package}.{name}")

    class Package(ModuleType):
        """Importing ``optim/sgd.py`` would put the module where the function of that name belongs."""

        def __setattr__(self, name: str, value: Any) -> None:
            named_alike = name in functions and isinstance(value, ModuleType)
            super().__setattr__(name, getattr(value, name) if named_alike else value)

        def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
            # cloudpickle knows how to send plain modules to another process, and not their subclasses.
            return import_module, (self.__name__,)

    module = sys.modules[package]
    module.__class__ = Package

    def get(name: str) -> Any:
        try:
            where = names[name]
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_instead(package, name)}") from None
        if where is None:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(where), name)
        setattr(module, name, value)
        return value

    return get


def lazily_by_module(package: str, names: Iterable[str], apart: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package of which each name is in the module of that name.

    Args:
        package: its ``__name__``.
        names: those of the package.
        apart: the names that are in other modules, by the module.
    """
    modules = {name: module for module, listed in apart.items() for name in listed}
    return lazily(package, {name: f"{package}.{modules.get(name, name)}" for name in names})


def _instead(package: str, name: str) -> str:
    """What to write instead, for an error; "" for names that Python itself looks up."""
    if name.startswith("__"):
        return ""
    from pure_loop._internal.hints import hint  # only on the way to an error
    from pure_loop._internal.suggestions import nearest

    text = hint(package, name)
    if text is not None:
        return f": {text}"
    near = nearest(name, dir(sys.modules[package]))
    return f"; did you mean {near!r}?" if near is not None else ""


def require(package: str, extra: str, method: str) -> Any:
    """The package.

    Args:
        package: as it is imported.
        extra: the extra of pure_loop that brings it.
        method: what needs it, for the error.

    Raises:
        MissingExtraError: it, or a package that it needs, is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        missing = error.name or package
        raise MissingExtraError(
            f"{method} needs the package {missing!r}, which is not installed: pip install 'pure_loop[{extra}]'."
        ) from error
