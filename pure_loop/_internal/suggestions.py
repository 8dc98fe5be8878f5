"""Calls with arguments that a function doesn't have, or without those it needs: refused with what to write instead.

An attribute that a State does not have is answered in the same way: by where the value is under its own name.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NoReturn, ParamSpec, TypeVar

from pure_loop._internal.arguments import is_number
from pure_loop._internal.hints import (
    ARGUMENTS,
    EXAMPLES,
    MODELS,
    NO_MODEL,
    PASSED_TWICE,
    STATE_MAPPINGS,
    STATE_PLACES,
    hint,
    letters_of,
)
from pure_loop._internal.tracebacks import OWN_HIDDEN
from pure_loop.errors import ArgumentTypeError, MissingAttributeError

P = ParamSpec("P")
T = TypeVar("T")


def teaching(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with errors about the names and the number of its arguments that say what to write.

    The last line of the traceback of the package's errors is that of the call.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with OWN_HIDDEN:
            try:
                return function(*args, **kwargs)
            except TypeError:
                _refuse_recipe(function, [*args, *kwargs.values()])
                refuse_misfit(function, args, kwargs)  # if not, it is an error of the function itself
                raise

    return called


def passing_on(
    target: Callable[..., object], *, optional: Collection[str] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function that passes keyword arguments on to another one show, and refuse, them as its own.

    Args:
        target: the other function.
        optional: arguments that it needs, and that a call of this function may leave out.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            refuse_misfit(called, args, kwargs)
            return function(*args, **kwargs)

        vars(called)["__signature__"] = with_arguments_of(target, function, optional)
        return called

    return decorated


def _refuse_recipe(function: Callable[..., object], values: Iterable[object]) -> None:
    """
    Raises:
        ArgumentTypeError: the function is given a recipe, which has a method of its name.
    """
    name = function.__name__
    for item in values if _place(function) == "pl." and name != "__init__" else ():
        settings, method = getattr(item, "settings", None), getattr(item, name, None)
        # A stream has settings, too, and a model may have a method of any name.
        if hasattr(item, "fit") and method and isinstance(settings, Mapping) and "train_dataloader" in settings:
            parameters = inspect.signature(method).parameters.values()
            needed = [
                each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD
            ]
            raise ArgumentTypeError(
                f"{name} was given a {type(item).__name__}, which has the data and the settings of a call: write "
                f"recipe.{name}({_written(needed, name)})."
            ) from None


def with_arguments_of(
    target: Callable[..., object], function: Callable[..., object], optional: Collection[str] = ()
) -> inspect.Signature:
    """The signature of a function with the keyword arguments of another one in the place of ``**settings``."""
    own = [item for item in _signature(function).parameters.values() if item.kind is not item.VAR_KEYWORD]
    passed = [
        item.replace(default=None, annotation=f"{item.annotation} | None") if item.name in optional else item
        for item in _signature(target).parameters.values()
        if item.kind is item.KEYWORD_ONLY
    ]
    return _signature(function).replace(parameters=[*own, *passed])


# Of functions of this library, which each call of them reads.
_signature = functools.lru_cache(maxsize=1024)(inspect.signature)


def refuse_misfit(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> inspect.BoundArguments:
    """The arguments of a call by name, without defaults.

    Raises:
        ArgumentTypeError: the function has no such arguments, or lacks one.
    """
    signature = _signature(function)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        place, name, parameters = _place(function), function.__name__, dict(signature.parameters)
        if parameters.pop("self", None) is not None:
            name, args = type(args[0]).__name__ if name == "__init__" else name, args[1:]
        sentences = _said(place, name, parameters, args, kwargs) or [f"{name}: {error}."]
        if "model_or_state" in parameters and args and isinstance(args[0], Iterator):
            sentences = [
                "the arguments of fit are needed, and not the stream that pl.fit(...) returns: write model, "
                "train_dataloader and its other arguments in its place"
                f"{'; pl.run(stream) runs it' if name == 'fit' else ''}."
            ]
        raise ArgumentTypeError(" ".join(sentences)) from None


def arguments_of_call(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """The arguments of a call by name, defaults included.

    Raises:
        ArgumentTypeError: the function has no such arguments, or lacks one.
    """
    bound = refuse_misfit(function, args, kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


# Members of these packages are written with the package's name; those of others are pl.NAME.
_NAMED_PACKAGES = frozenset(
    {"algorithms", "callbacks", "gradients", "loggers", "metrics", "optim", "schedules", "stages", "testing"}
)


def _place(function: Callable[..., object]) -> str:
    """What is written before the function's name."""
    owner, _, name = function.__qualname__.rpartition(".")
    if owner and name != "__init__":
        return "logger." if name.startswith("log_") else f"{owner.lower()}." if owner in ("State", "Recipe") else "."
    package, _, rest = function.__module__.partition(".")
    if package != "pure_loop":
        return ""
    return f"pl.{rest.partition('.')[0]}." if rest.partition(".")[0] in _NAMED_PACKAGES else "pl."


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, if there is one."""
    import difflib  # only on the way to an error

    by_name = {item: item for item in names}
    by_letters = {letters_of(item): item for item in by_name}
    for meant, written in ((name, by_name), (letters_of(name), by_letters)):
        near = difflib.get_close_matches(meant, list(written), n=1, cutoff=0.7)
        if near:
            return written[near[0]]
    return None


def advice_on(package: str, item: object) -> str:
    """What to write for a name, a function or a class of a package where a value is needed; "" where it has none.

    >>> advice_on("metrics", "top-k"), advice_on("loggers", "tensorboard")
    ('write pl.metrics.top_k(...)', 'write pl.loggers.TensorBoardLogger("runs/first")')
    """
    path = f"pure_loop.{package}"
    if isinstance(item, str):
        names = import_module(path).__all__
        text = hint(path, item)
        if text is None:
            near = nearest(item, names)
            return "" if near is None else f"write pl.{package}.{near}(...)"
        return re.sub(rf"^write (?=({'|'.join(names)})\()", f"write pl.{package}.", text)
    if callable(item) and getattr(item, "__module__", "").startswith(f"{path}."):
        name = getattr(item, "__name__", "")
        return f"call it: pl.{package}.{name}(...)" if name else ""
    return ""


def _said(
    place: str,
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> list[str]:
    by_place = [
        parameter.name for parameter in parameters.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    call = f"{place}{name}({_written(by_place, name)}, ...)"
    if len(args) > len(by_place):
        following, surplus = _named_next(parameters), args[len(by_place)]
        if "algorithms" in parameters and isinstance(surplus, list | tuple) and hasattr((*surplus, 0)[0], "handlers"):
            following = f"algorithms=[...], {following}"
        others = f"the names of the others, {following}" if by_place else f"{place}{name}({following})"
        instead = f": write {others}." if following else f"{PASSED_TWICE.get(by_place[-1] if by_place else '', '')}."
        about = f" {NO_MODEL[0].upper()}{NO_MODEL[1:]}." if name == "Recipe" else ""
        return [f"{name} takes {_how_many(by_place)}, and was given {len(args)}{instead}{about}"]
    sentences = [
        f"{name} was given {item} twice, at its place and by its name: leave one of them out"
        f"{PASSED_TWICE.get(item, '')}."
        for item in by_place[: len(args)]
        if item in kwargs
    ]
    value = {*by_place[: len(args)], *kwargs}
    named = {item: parameter for item, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    for unknown in [item for item in kwargs if item not in named]:
        text, stands_for = _advice(name, unknown, kwargs[unknown], named, call)
        if stands_for or named.keys() == parameters.keys():  # what is passed on may have any other name
            sentences.append(f"{name} has no argument {unknown!r}{text}")
        value.add(stands_for)
    lacking = [
        parameter.name
        for parameter in named.values()
        if parameter.default is parameter.empty and parameter.name not in value
    ]
    if lacking:
        needed = [*by_place, *(item for item in lacking if item not in by_place)]
        sentences.append(
            f"{name} {'also ' if sentences else ''}needs {' and '.join(lacking)}: "
            f"{place}{name}({_written(needed, name)}{', ...' if name == 'fit' else ''})."
        )
    return sentences


def _how_many(by_place: list[str]) -> str:
    if not by_place:
        return "no argument without its name"
    single = len(by_place) == 1
    names = "its name" if single else "their names"
    return f"{len(by_place)} argument{'' if single else 's'} without {names}, {' and '.join(by_place)}"


def _named_next(parameters: Mapping[str, inspect.Parameter]) -> str:
    keywords = [parameter.name for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]
    return ", ".join(map(by_name, keywords[:3]))


def _written(names: Iterable[str], function: str) -> str:
    """How arguments may be written in a call: after one with its name each has its name."""
    texts: list[str] = []
    for name in names:
        named = any(text.startswith(f"{before}=") for before, text in zip(names, texts, strict=False))
        texts.append(by_name(name) if named else example(name, function))
    return ", ".join(texts)


def by_name(name: str) -> str:
    """How an argument may be written with its name: ``train_dataloader=train_dataloader``."""
    text = example(name)
    return text if text.startswith(f"{name}=") else f"{name}={text}"


def example(name: str, function: str = "") -> str:
    """How an argument may be written: ``max_duration="3ep"``."""
    return EXAMPLES.get(f"{function}.{name}") or EXAMPLES.get(name, f"{name}=...")


def _advice(
    name: str, unknown: str, value: object, parameters: Mapping[str, inspect.Parameter], call: str
) -> tuple[str, str]:
    """What to write for an argument that there is not, and for which one it stands; "" for none."""
    number = value if is_number(value) else "..."
    if unknown.lower() in MODELS and "load_path" in parameters and not {*MODELS} & parameters.keys():
        return f": {NO_MODEL}.", ""
    for names, parameter, text in ARGUMENTS:
        if unknown.lower() in names.split() and parameter in parameters:
            return f": write {text.format(number, name=name, call=call)}.", parameter
    near = nearest(unknown, parameters)
    if near is not None:
        return f"; did you mean {near}=?", near
    return f"; it has {', '.join(parameters)}.", ""


def state_hints(fields: Iterable[str], counted: Iterable[str]) -> dict[str, str]:
    """Where to look, by name, for names that are no fields of a State; ``counted`` are those of its timestamp."""
    result = {name: f"it is state.timestamp.{name}" for name in counted}
    result |= {name: place for names, place in STATE_PLACES for name in names.split()}
    for name in fields:
        result.pop(name, None)
    return result


def state_hint(name: str, fields: Iterable[str], counted: Iterable[str]) -> str:
    """What to write for a name that is no field of a State, in parentheses; "" where nothing is known."""
    fields = list(fields)
    place = state_hints(fields, counted).get(name)
    if place is None:
        near = nearest(name, fields)
        place = None if near is None else f"did you mean {near!r}?"
    return "" if place is None else f" ({place})"


_SHOWN = 8
_LONGEST = 80


def not_there(key: object, mapping: Mapping[Any, Any], field: str) -> str:
    """What to write for a name that a mapping of a State lacks; ``field`` is its metrics or algorithm_state, or ""."""
    names = [str(name)[:_LONGEST] for name in mapping]  # those of a file may have any length
    place = _place_inside(key, mapping, whole=field == "metrics") if isinstance(key, str) else ""
    if place:
        return f"{key!r} is not here; write {place}."
    near = nearest(key, names) if isinstance(key, str) else None
    meant = f" (did you mean {near!r}?)" if near is not None else ""
    listed = ", ".join(map(repr, names[:_SHOWN])) + (f", ... {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    empty = f"state.{field}" if field else "this mapping of a State"
    there = f"{meant}; there are {listed}." if names else f": {empty} is empty."
    if near is not None or not field:
        return f"{key!r} is not here{there}"
    about = "train" if field == "metrics" and str(key).startswith("train") else field
    return f"{key!r} is not here{there} {STATE_MAPPINGS[about]}."


def _place_inside(key: str, mapping: Mapping[Any, Any], *, whole: bool) -> str:
    """How an item of a mapping inside is read that the name says: "val/loss", "val_loss"; "" if there is none.

    With ``whole`` the name of an item says it, too: "loss".
    """
    inner = {str(label): values for label, values in mapping.items() if type(values) is type(mapping)}
    for label, values in inner.items():
        name = key.removeprefix(f"{label}/").removeprefix(f"{label}_")
        names = [name, *(item for item in map(str, values) if name and item.startswith(name))]  # "acc" is "accuracy"
        if name and name != key and (key[len(label)] == "/" or name in values or len(names) > 1):
            return f"[{label!r}][{name if name in values else min(names[1:] or names, key=len)!r}]"
    return next((f"[{label!r}][{key!r}]" for label, values in inner.items() if whole and key in values), "")


class Elsewhere:
    """An attribute that raises: the error says where the value is.

    A ``__getattr__`` would say so of all names, and make every read of a State take several times as long.
    """

    __slots__ = ("_name", "_place")

    def __init__(self, name: str, place: str) -> None:
        self._name, self._place = name, place

    def __get__(self, instance: object, owner: type) -> NoReturn:
        name = self._name
        raise MissingAttributeError(f"{owner.__name__!r} object has no attribute {name!r}: {self._place}.", name=name)

    def __repr__(self) -> str:
        return f"<not here: {self._place}>"
