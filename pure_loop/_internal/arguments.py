"""Checks of arguments: numbers in an interval, flags, texts, choices, functions. Each kind of check stands here once.

A check returns the value that it was given, a number that may be any float as a float, or refuses it. Its error names
the argument, the value, and what to write instead, in one of two forms::

    refresh_seconds=-1: give a finite number of seconds, 0 or more.
    sam: interval must be a whole number of at least 1, got 0; write sam(interval=2).

the second one where the name of the function is given (``where``), because the argument's name alone doesn't say which
function has it. A value of a wrong type is an :class:`~pure_loop.errors.ArgumentTypeError` and names the type; one
outside the interval is an :class:`~pure_loop.errors.ArgumentError`. A bool is no number.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from numbers import Number
from typing import Any, TypeGuard, TypeVar

from pure_loop.errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is an int or a float and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a value is the path of a file or a folder: a str, or an object that gives one.

    >>> is_path("runs/1"), is_path(b"runs/1"), is_path(1)
    (True, False, False)
    """
    return isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)


def path_text(path: object, argument: str = "") -> str:
    """A path as text, with the home folder of its user in place of a leading ``~``, as in a shell; a URL as it is.

    Raises:
        ArgumentTypeError: it is no path.

    >>> path_text("runs/1"), path_text("s3://bucket/~/runs"), path_text("~/runs") == os.path.expanduser("~/runs")
    ('runs/1', 's3://bucket/~/runs', True)
    """
    if is_path(path):
        return os.path.expanduser(os.fspath(path))
    from pure_loop._internal.reprs import brief, data  # only on the way to an error

    what, hint = brief(path), ""
    if isinstance(path, Mapping):
        what = data(path)
        hint = "" if argument else " If torch.load returned it, it is a module's: model.load_state_dict(weights)."
    elif path is None and not argument:
        hint = " pl.latest_path and pl.best_path return None where a folder has no checkpoint."
    what = f"{argument}={what}" if argument else what
    raise ArgumentTypeError(f"{what} is no path: write a text or a pathlib.Path.{hint}")


def as_float(number: float) -> float:
    """A number as a float; infinity for an int that is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def check_integer(
    name: str,
    value: object,
    *,
    where: str = "",
    least: int | None = None,
    wanted: str = "",
    example: str = "",
) -> int:
    """``value``, an int.

    Args:
        name: the argument's.
        value: what was passed.
        where: the function that was called; "": the name of the argument is enough.
        least: the smallest int that is taken; None: any.
        wanted: what to give, in words; "": a text made of ``least``.
        example: a call to write instead.

    Raises:
        ArgumentTypeError: it is no int.
        ArgumentError: it is less than ``least``.

    >>> check_integer("interval", 2, where="sam", least=1)
    2
    """
    if is_integer(value) and (least is None or value >= least):
        return value
    wanted = wanted or "a whole number" + ("" if least is None else f" of at least {least}")
    example = converted(name, value, int, lambda number: least is None or number >= least) or example
    raise refusal(name, value, wanted, where, example, typed=not is_integer(value))


def positive_or_none(name: str, value: object, *, where: str = "") -> int | None:
    """``value``, an int of at least 1 or None.

    Raises:
        ArgumentTypeError, ArgumentError: it is neither.
    """
    wanted = "a whole number of at least 1, or None"
    return None if value is None else check_integer(name, value, where=where, least=1, wanted=wanted)


def check_number(
    name: str,
    value: object,
    *,
    where: str = "",
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    wanted: str = "",
    example: str = "",
) -> float:
    """``value`` as a finite float, ``least <= value`` and ``above < value < below``.

    Args:
        name, value, where, wanted, example: as in :func:`check_integer`.
        least: the smallest number that is taken.
        above: all numbers that are taken are larger.
        below: all numbers that are taken are smaller.

    Raises:
        ArgumentTypeError: it is no number.
        ArgumentError: it is none of these numbers; NaN is none.

    >>> check_number("smoothing", 0, where="ema", least=0, below=1)
    0.0
    """
    if is_number(value):
        number = as_float(value)
        if least <= number and above < number < below:
            return number
    if type(value).__name__ == "Each":
        raise ArgumentTypeError(
            f"{where}{': ' if where else ''}{name} is a pl.each, which stands for a whole setting: write "
            f"pl.each([...]) around this, with {name} of each member in its place."
        )
    wanted = wanted or f"a {'finite ' * (below == math.inf)}number{_bounds(least, above, below)}"
    example = converted(name, value, float, lambda number: least <= number and above < number < below) or example
    raise refusal(name, value, wanted, where, example, typed=not is_number(value))


def converted(
    name: str, value: object, kind: type[int] | type[float], fits: Callable[[float], bool] = math.isfinite
) -> str:
    """What to write for a number of another library or in a text, where it ``fits``; "" for anything else.

    >>> converted("peak", "1e-3", float), converted("peak", "cosine", float), converted("interval", 2.5, int)
    ('peak=0.001', '', '')
    """
    if isinstance(value, bool | int | float) or not isinstance(value, str | Number):
        return ""
    try:
        number = kind(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return ""
    if not fits(number) or (kind is int and number != float(value)):  # type: ignore[arg-type]
        return ""
    return f"{name}={number!r}" if isinstance(value, str) else f"{name}={kind.__name__}({value!r})"


def _bounds(least: float, above: float, below: float) -> str:
    low = f" of at least {least:g}" if least > -math.inf else f" above {above:g}" if above > -math.inf else ""
    high = f"less than {below:g}" if below < math.inf else ""
    return f"{low} and {high}" if low and high else f"{low} {high}".rstrip()


def check_flag(name: str, value: object, *, where: str = "", example: str = "") -> bool:
    """``value``, a bool.

    Raises:
        ArgumentTypeError: it is neither True nor False; ``strict="no"`` would count as true.
    """
    if isinstance(value, bool):
        return value
    raise refusal(name, value, "True or False", where, example, verb="write")


def check_text(name: str, value: object) -> str:
    """``value``, a str that is not empty.

    Raises:
        ArgumentTypeError: it is none.
    """
    if isinstance(value, str) and value:
        return value
    raise refusal(name, value, "a text that is not empty")


def check_file_name(name: object, where: str) -> str:
    """``name``, under which a file can be stored in a folder, or in folders inside of it: ``"samples/final.txt"``.

    Raises:
        ArgumentTypeError: it is no text.
        ArgumentError: it is empty or leads out of the folder.

    >>> check_file_name("samples/final.txt", "log_file")
    'samples/final.txt'
    """
    if not isinstance(name, str):
        raise refusal("name", name, "a text", where)
    parts = re.split(r"[/\\]", name)
    if not all(parts) or {".", ".."} & set(parts) or not name.isprintable() or re.match("[A-Za-z]:", name):
        last = next((part for part in reversed(parts) if part not in ("", ".", "..") and part.isprintable()), "notes")
        raise ArgumentError(
            f"{where}: name={name!r} is no name of a file inside a folder: write a relative one without {'..'!r}, such "
            f"as {last.rpartition(':')[2] or 'notes'!r}. What is stored under it comes second."
        )
    return name


def check_choice(name: str, value: object, choices: Collection[T], *, where: str = "") -> T:
    """``value``, one of ``choices``.

    Raises:
        ArgumentError: it is none of them.

    >>> check_choice("order", "2021", ("current", "2021"))
    '2021'
    """
    for choice in choices:
        # 1 == True, and an array compares element by element.
        if isinstance(value, type(choice)) and value == choice:
            return choice
    *first, last = (f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices)
    raise refusal(name, value, f"{', '.join(first)} or {last}", where, typed=False, verb="write")


def check_callable(name: str, value: Callable[..., T], wanted: str, *, where: str = "") -> Callable[..., T]:
    """``value``, which can be called.

    Raises:
        ArgumentTypeError: it can't; says that ``wanted`` is.
    """
    if callable(value):
        return value
    raise refusal(name, value, wanted, where)


def refusal(
    name: str, value: object, wanted: str, where: str = "", example: str = "", *, typed: bool = True, verb: str = "give"
) -> ArgumentError | ArgumentTypeError:
    """The error that refuses a value: ``raise refusal("device", 3, "a text")``.

    Args:
        name, value, where, wanted, example: as in :func:`check_integer`.
        typed: whether it is the type that is wrong.
        verb: what to do with what is wanted.
    """
    from pure_loop._internal.reprs import brief  # only on the way to an error

    written = brief(value)
    got = f"{written} of type {type(value).__name__}" if typed else written
    if where:
        text = f"{where}: {name} must be {wanted}, got {got}{f'; write {example}' if example else ''}."
    else:
        text = f"{name}={got}: {verb} {wanted}{f', such as {example}' if example else ''}."
    return ArgumentTypeError(text) if typed else ArgumentError(text)


def accepts(function: Callable[..., Any], count: int, *keywords: str) -> bool:
    """Whether a function takes so many positional arguments, and these; True where Python can't tell (some builtins).

    >>> accepts(lambda state: True, 1), accepts(lambda event, state: True, 1), accepts(print, 3)
    (True, False, True)
    """
    for follow in (True, False):  # a decorator with functools.wraps may take other arguments than what it wraps
        try:
            inspect.signature(function, follow_wrapped=follow).bind(*range(count), **dict.fromkeys(keywords))
        except ValueError:
            return True
        except TypeError:
            continue
        return True
    return False


def check_function(name: str, value: object, arguments: str, *, where: str) -> None:
    """Refuse what can't be called with these positional arguments.

    Args:
        name, value, where: as in :func:`check_integer`.
        arguments: their names, ``"model, batch"``.

    Raises:
        ArgumentTypeError: it is no function, or one of more or fewer arguments.

    >>> check_function("forward", lambda model, batch: model(batch), "model, batch", where="pl.Task")
    """
    wanted = f"a function, such as {f'lambda {arguments}'.rstrip()}: ..."
    if not callable(value):
        raise refusal(name, value, wanted, where)
    if not accepts(value, len(arguments.split())):
        raise ArgumentTypeError(
            f"{where}: {name} must be {wanted}, got {name_of(value)}, which can't be called with these arguments."
        )


def refuse_iterator(train_dataloader: object, where: str, use: str) -> None:
    """
    Raises:
        ArgumentError: it is an iterator, of which ``where`` makes such a use.
    """
    if isinstance(train_dataloader, Iterator):
        raise ArgumentError(
            f"{where}: train_dataloader is {type(train_dataloader).__name__}, an iterator, {use}: give a DataLoader or "
            "a list, such as list(itertools.islice(batches, 50))."
        )


def name_of(function: object) -> str:
    """What to call a function in a message.

    >>> name_of(len), name_of(lambda x: x)
    ('len', '<lambda>')
    """
    return getattr(function, "__name__", type(function).__name__)


def is_scheduler(value: object) -> bool:
    """Whether this is a scheduler of torch's, or its class."""
    cls = value if isinstance(value, type) else type(value)
    return any(base.__module__ == "torch.optim.lr_scheduler" for base in cls.__mro__)


def refuse_no_schedule(where: str, value: Any) -> None:
    """
    Raises:
        ArgumentTypeError: what was given can't be called with a timestamp, or is a class of schedules.
    """
    name = name_of(value)
    if is_scheduler(value):
        plateau = name == "ReduceLROnPlateau"
        advice = (
            'for one that looks at a metric, docs/optimizers.md has a recipe, "A schedule that looks at a metric"'
            if plateau
            else 'such as pl.schedules.cosine("3ep", peak=3e-4), or a function of your own'
        )
        raise ArgumentTypeError(
            f"{where} is torch's scheduler {name}, which changes a torch optimizer step by step. Here a schedule is a "
            f"function of the timestamp: {advice}."
        )
    if isinstance(value, type):
        raise ArgumentTypeError(f"{where} is the class {name}; give a schedule: {name}(...).")
    if not accepts(value, 1):
        raise ArgumentTypeError(
            f"{where} is the function {name}, which can't be called with one argument: it is called as "
            f"{name}(timestamp), and returns a number."
        )
