"""Names of a package that are imported when they are first asked for (PEP 562), and packages that come with extras.

A module that a plain ``fit`` doesn't use costs nothing until it is used. Type checkers and editors don't run this: a
package imports the same names under ``TYPE_CHECKING`` as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from pure_loop._internal.hints import PACKAGES, hint
from pure_loop._internal.records import set_class
from pure_loop._internal.suggestions import nearest
from pure_loop.errors import ArgumentTypeError, MissingExtraError


def lazily(
    package: str, modules: Mapping[str, Iterable[str]], names: Iterable[str] = (), submodules: Collection[str] = ()
) -> Callable[[str], object]:
    """The ``__getattr__`` of a package.

    Args:
        package: its ``__name__``.
        modules: by module of the package, the names that it has.
        names: all names; those of no such module stand in a module of their own name.
        submodules: names of modules of the package.
    """
    places = {name: name for name in names} | {name: module for module, listed in modules.items() for name in listed}
    functions = frozenset(name for name, module in places.items() if name == module)

    class Package(ModuleType):
        """Importing ``optim/sgd.py`` would put the module where the function of that name belongs."""

        def __setattr__(self, name: str, value: object) -> None:
            named_alike = name in functions and isinstance(value, ModuleType)
            super().__setattr__(name, getattr(value, name) if named_alike else value)

        def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
            # cloudpickle knows how to send plain modules to another process, and not their subclasses.
            return import_module, (self.__name__,)

    if package.rpartition(".")[2] in PACKAGES:
        setattr(Package, "__call__", _refuse_call)  # noqa: B010 - a class that is called, for these alone
    module = set_class(sys.modules[package], Package)

    def get(name: str) -> object:
        if name in submodules:
            return import_module(f"{package}.{name}")
        if name not in places:
            text = f"module {package!r} has no attribute {name!r}{_instead(package, name, places)}"
            raise AttributeError(text, name=name)  # with the name, Python adds no suggestion of its own
        value = getattr(import_module(f"{package}.{places[name]}"), name)
        setattr(module, name, value)
        return value

    return get


def _refuse_call(package: ModuleType, *_: object, **__: object) -> NoReturn:
    """
    Raises:
        ArgumentTypeError: always; a package is written where a function of it is meant.
    """
    name = package.__name__.rpartition(".")[2]
    raise ArgumentTypeError(f"pl.{name} is a package, which can't be called: {PACKAGES[name]}.")


def _instead(package: str, name: str, places: Mapping[str, str]) -> str:
    """What to write instead, for an error; "" for names that Python itself looks up."""
    if name.startswith("__"):
        return ""
    text = hint(package, name)
    if text is not None:
        return f": {text}"
    near = nearest(name, {*dir(sys.modules[package]), *places})
    if near is None:
        return ""
    return f"; did you mean {f'errors.{near}' if places.get(near) == 'errors' else near!r}?"


def require(package: str, extra: str, method: str) -> ModuleType:
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
