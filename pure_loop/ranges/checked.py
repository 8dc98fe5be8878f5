"""Reads the ranges of a signature, and refuses at the call what is outside them."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, cast

import attrs

from pure_loop._internal.suggestions import refuse_misfit
from pure_loop._internal.tracebacks import OWN_HIDDEN
from pure_loop.errors import ArgumentError
from pure_loop.ranges.kinds import Flag, OneOf, Range, Setting

__all__ = ["alternatives_in", "checked", "settings_of"]

C = TypeVar("C", bound=Callable[..., object])


def settings_of(target: Callable[..., object]) -> Mapping[str, Setting]:
    """The arguments of a function, or of a class, that have ranges, by name.

    >>> def clip(kind: typing.Annotated[str, OneOf("norm", "value")] = "norm", strict: bool = False): ...
    >>> {name: setting.in_words for name, setting in settings_of(clip).items()}
    {'kind': '`"norm"`, `"value"`', 'strict': '`True`, `False`'}
    """
    hints = _declarations(target)
    result = {}
    for parameter in inspect.signature(target).parameters.values():
        range_, kinds = _range(hints.get(parameter.name))
        if range_ is not None:
            result[parameter.name] = Setting(
                where=target.__name__,
                name=parameter.name,
                range=range_,
                whole=set(kinds) <= {int, type(None)},
                optional=type(None) in kinds,
                scheduled=not range_.reads_schedules and any(typing.get_origin(kind) is Callable for kind in kinds),
                default=parameter.default,
            )
    return result


# What the other annotations name need not be importable.
_DECLARES = re.compile(r"(typing\.)?(Annotated|Literal)\[|bool\b")


def _declarations(target: Callable[..., object]) -> dict[str, object]:
    """Those annotations of a function, of a class's __init__ or of its attrs fields that declare a range."""
    # A converter's annotation takes the place of the field's in the __init__ that attrs writes.
    fields = isinstance(target, type) and attrs.has(target)
    annotated = target if fields or not isinstance(target, type) else inspect.getattr_static(target, "__init__")
    declared = {
        name: annotation
        for name, annotation in inspect.get_annotations(annotated).items()
        if not isinstance(annotation, str) or _DECLARES.match(annotation)
    }
    scope = vars(sys.modules[target.__module__])
    return typing.get_type_hints(types.SimpleNamespace(__annotations__=declared), scope, include_extras=True)


def _range(hint: object) -> tuple[Range | None, list[object]]:
    """The range that an annotation declares, and the types of which it is a union."""
    declared = None
    if typing.get_origin(hint) is typing.Annotated:
        hint, *marks = typing.get_args(hint)
        declared = next((mark for mark in marks if isinstance(mark, Range)), None)
    parts = list(typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,))
    kinds = [part for part in parts if part is not type(None)]
    if declared is None and kinds == [bool]:
        declared = Flag()
    if declared is None and len(kinds) == 1 and typing.get_origin(kinds[0]) is Literal:
        declared = OneOf(*typing.get_args(kinds[0]))
    return declared, parts


def alternatives_in(settings: Mapping[str, Setting]) -> list[list[Setting]]:
    """The settings of which exactly one has to be given, together."""
    words = dict.fromkeys(setting.range.one_of for setting in settings.values() if setting.range.one_of)
    return [[setting for setting in settings.values() if setting.range.one_of == word] for word in words]


def _refuse_but_one(alternatives: list[Setting], arguments: Mapping[str, object]) -> None:
    """
    Raises:
        ArgumentError: none of them is given, or several are.
    """
    passed = [setting.name for setting in alternatives if arguments.get(setting.name) is not None]
    if len(passed) == 1:
        return
    names = " and ".join(setting.name for setting in alternatives)
    got = "neither" if not passed else "both" if len(alternatives) == 2 else " and ".join(passed)
    examples = " or ".join(setting.range.example or setting.example for setting in alternatives)
    raise ArgumentError(f"{alternatives[0].where}: give one of {names}, got {got}; write {examples}.")


class _Reader:
    """Reads the arguments of one function or class; the declaration is resolved at the first call."""

    def __init__(self, target: Callable[..., object]) -> None:
        self._target = target

    @functools.cached_property
    def _declared(self) -> Mapping[str, Setting]:
        return settings_of(self._target)

    def __call__(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> inspect.BoundArguments:
        settings = self._declared
        bound = refuse_misfit(self._target, args, kwargs)
        for name, value in bound.arguments.items():
            if name in settings:
                bound.arguments[name] = settings[name].read(value)
        for alternatives in alternatives_in(settings):
            _refuse_but_one(alternatives, bound.arguments)
        return bound


def checked(target: C) -> C:
    """The function, or class, with a refusal at the call of what is outside the ranges of its signature.

    Numbers arrive as floats and amounts of training as Times. Defaults aren't checked.

    Raises:
        ArgumentError, ArgumentTypeError: from what is returned: a value outside its range, an argument that there is
            not, or one that lacks.

    >>> @checked
    ... def clip(kind: typing.Annotated[str, OneOf("norm", "value")] = "norm"): ...
    >>> clip(kind="sum")
    Traceback (most recent call last):
        ...
    pure_loop.errors.ArgumentError: clip: kind must be "norm" or "value", got 'sum'.
    """
    read = _Reader(target)
    if isinstance(target, type):
        init = inspect.getattr_static(target, "__init__")

        @functools.wraps(init)
        def made(self: object, *args: object, **kwargs: object) -> None:
            with OWN_HIDDEN:
                bound = read(args, kwargs)
                init(self, *bound.args, **bound.kwargs)
            if hasattr(self, "made_with"):
                self.made_with = dict(bound.arguments)

        type.__setattr__(target, "__init__", _with_plain_signature(made, init))
        return target

    @functools.wraps(target)
    def called(*args: object, **kwargs: object) -> object:
        with OWN_HIDDEN:
            bound = read(args, kwargs)
            result = target(*bound.args, **bound.kwargs)
        say = getattr(type(result), "made_by", None)
        if say is None:
            return result
        if getattr(type(result), "shows_defaults", True):
            bound.apply_defaults()
        return say(result, target.__name__, bound.arguments)

    return cast("C", _with_plain_signature(called, target))


def _with_plain_signature(function: C, target: Callable[..., object]) -> C:
    """The function itself, with the signature of another one, without markers."""
    signature = inspect.signature(target)
    parameters = [
        parameter.replace(annotation=_unmarked(parameter.annotation)) for parameter in signature.parameters.values()
    ]
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    return function


def _unmarked(annotation: object) -> object:
    if isinstance(annotation, str) and annotation.removeprefix("typing.").startswith("Annotated["):
        tree = ast.parse(annotation, mode="eval").body
        assert isinstance(tree, ast.Subscript)
        assert isinstance(tree.slice, ast.Tuple)
        return ast.unparse(tree.slice.elts[0])
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation
