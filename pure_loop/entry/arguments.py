"""The arguments of ``fit`` but the model or State, as an immutable value: what :class:`pure_loop.Recipe` is made of."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack

import attrs
import torch
from torch import nn

from pure_loop import algorithms, optim
from pure_loop._internal.equality import equal
from pure_loop._internal.hints import RECIPE_PLACES
from pure_loop._internal.reprs import call, columns, data, shown, table
from pure_loop._internal.suggestions import by_name, nearest, passing_on, teaching
from pure_loop.algorithm import Algorithm, AlgorithmLike
from pure_loop.cadence import CadenceLike
from pure_loop.callback import Callback, CallbackLike, Logger
from pure_loop.data.dataloaders import is_one_shot, source
from pure_loop.distributed.parallel import Parallel
from pure_loop.entry.fit import SharedOptions, fit
from pure_loop.entry.settings import Settings, listed_callbacks
from pure_loop.errors import ArgumentError, ArgumentTypeError, FrozenStateError, MissingAttributeError
from pure_loop.evaluator import Evaluator, EvaluatorsLike, bind_evaluators
from pure_loop.event import Event, EventName
from pure_loop.frozendict import FrozenDict
from pure_loop.gradients.clipping import ClipFunction
from pure_loop.loop.stream import Stream
from pure_loop.members.each import Each
from pure_loop.members.ensemble import Ensemble
from pure_loop.metrics._base import MetricsLike
from pure_loop.optim import Optimizer
from pure_loop.optim.optimizer import fixed_rate
from pure_loop.precision import PrecisionName
from pure_loop.state import Loss, State
from pure_loop.task import Task, check_loss_function
from pure_loop.time import Time

T = TypeVar("T")
DEFAULTS: dict[str, Any] = {
    name: None if parameter.default is parameter.empty else parameter.default
    for name, parameter in inspect.signature(fit).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
_NEEDED = ("train_dataloader", "optimizer", "max_duration")
_WIDTH = 88


class OtherOptions(SharedOptions, total=False):
    """The settings of a recipe but the data."""

    optimizer: Optimizer | None
    max_duration: str | Time | None


class RecipeOptions(OtherOptions, total=False):
    """The settings of a recipe, for the types of functions that pass them on."""

    train_dataloader: Iterable[Any] | None


def all_settings(**settings: Unpack[RecipeOptions]) -> None:
    """A function with all settings of a recipe, for the signatures of those that pass them on."""


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
vars(all_settings)["__signature__"] = inspect.Signature(
    [
        inspect.Parameter(name, _KEYWORD, default=default)
        for name, default in (("train_dataloader", None), *DEFAULTS.items())
    ]
)


@attrs.frozen(init=False, eq=False, repr=False)
class Arguments:
    """The arguments of a call of ``fit`` but the model or State, which are checked when it is made."""

    train_dataloader: Iterable[Any] | None

    # What is trained, and for how long.
    loss: Callable[[Any, Any], Loss] | Task | None
    optimizer: Optimizer | None
    max_duration: str | Time | None

    # Evaluation.
    evaluators: EvaluatorsLike
    eval_interval: CadenceLike
    train_metrics: MetricsLike

    # A step.
    microbatch_size: int | Literal["auto"] | None
    batches_per_step: int
    precision: PrecisionName
    clip_grad: float | ClipFunction | None
    nonfinite: Literal["error", "skip"]

    # What takes part, and what is recorded.
    algorithms: Iterable[AlgorithmLike]
    callbacks: Iterable[CallbackLike]
    loggers: Iterable[Logger]
    run_name: str | None

    # Saving and resuming.
    autoresume: str | os.PathLike[str] | Callback | None
    load_path: str | os.PathLike[str] | None

    # Reproduction and checks.
    seed: int | Each
    deterministic: bool
    strict: bool | None
    verify: str | Time | None

    # Where it runs, and how fast.
    device: torch.device | str | None
    parallel: Literal["replicate", "shard", False] | Parallel | None
    compile: bool | Literal["where possible"]
    steps_per_call: int
    watch: Collection[Event | EventName] | None
    donate: bool | Literal["auto"]

    # Epochs, iterations and time.
    batches_per_epoch: int | None
    iteration_length: str | Time | None
    order: Literal["current", "2021"]
    clock: Callable[[], float]

    # Holds an item where a stream was made of it, or of a recipe that ``replace`` made of it with this data.
    _streams: list[None] = attrs.field(init=False, factory=list, repr=False)

    @teaching
    @passing_on(fit, optional=["optimizer", "max_duration"])
    def __init__(self, train_dataloader: Iterable[Any] | None = None, **settings: Unpack[OtherOptions]) -> None:
        self.__attrs_init__(**_checked({"train_dataloader": train_dataloader, **DEFAULTS, **settings}))

    @property
    def settings(self) -> FrozenDict[str, Any]:
        """All settings by name, with those at their default.

        >>> import pure_loop as pl
        >>> pl.Recipe(seed=3).settings["seed"]
        3
        """
        return FrozenDict({name: getattr(self, name) for name in ("train_dataloader", *DEFAULTS)})

    @teaching
    @passing_on(all_settings)
    def replace(self, **changes: Unpack[RecipeOptions]) -> Self:
        """Another recipe, with these settings changed.

        >>> import pure_loop as pl
        >>> pl.Recipe(seed=3).replace(precision="amp_bf16")
        Recipe(precision='amp_bf16', seed=3)
        """
        changed = copy.copy(self)
        for name, value in _checked({**self.settings, **changes}).items():
            object.__setattr__(changed, name, value)
        if "train_dataloader" in changes:
            object.__setattr__(changed, "_streams", [])
        return changed

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        names = [item for item in dir(type(self)) if not item.startswith("_")]
        near = RECIPE_PLACES.get(name) or nearest(name, names)
        meant = f"; did you mean recipe.{near}?" if near is not None else f": it has {', '.join(names)}."
        raise MissingAttributeError(f"a recipe has no {name!r}{meant}", name=name)

    def __eq__(self, other: object) -> bool:
        return (
            not SettingsDifference.of(self.settings, other.settings) if isinstance(other, Arguments) else NotImplemented
        )

    def __repr__(self) -> str:
        values = {name: value for name, value in self.settings.items() if not is_default(name, value)}
        texts = [setting_in_words(name, value) for name, value in values.items()]
        name, line = type(self).__name__, ", ".join(texts)
        if len(line) > _WIDTH:
            line = "\n" + "".join(f"    {text},\n" for text in texts)
        return f"{name}({line})"

    def _for(
        self,
        tool: str,
        changes: RecipeOptions,
        *,
        needed: Collection[str] = _NEEDED,
        without: Collection[str] = (),
        draws: bool = False,
    ) -> dict[str, Any]:
        """The arguments of a function that is called as ``fit``.

        Args:
            tool: its name.
            changes: of the settings.
            needed: settings that it needs.
            without: settings of the recipe that are at their default in this call, unless they are among the changes.
            draws: whether it draws from the data: from an iterator that is possible once.
        """
        recipe = self.replace(**changes) if changes else self
        recipe._refuse_lack(tool, needed)
        if draws:
            recipe._refuse_drawn(tool)
        values = {**recipe.settings, **{name: DEFAULTS[name] for name in without if name not in changes}}
        return {name: value for name, value in values.items() if value is not None or name not in _NEEDED}

    def _drew(self, changes: RecipeOptions) -> None:
        """Note that the data was handed out, where it is not that of the changes."""
        if "train_dataloader" not in changes and not self._streams:
            self._streams.append(None)

    def _refuse_lack(self, tool: str, needed: Iterable[str]) -> None:
        """
        Raises:
            ArgumentTypeError: a setting that is needed is None.
        """
        names = [name for name in needed if getattr(self, name) is None]
        if names:
            raise ArgumentTypeError(
                f"this recipe has no {' and no '.join(names)}, which {tool} needs: write "
                f"recipe.{tool}(..., {', '.join(map(by_name, names))}), or recipe.replace(...)."
            )

    def _refuse_drawn(self, tool: str) -> None:
        """
        Raises:
            ArgumentError: the data is an iterator, and its first batches are gone.
        """
        data = self.train_dataloader
        if not is_one_shot(data):
            return
        state = inspect.getgeneratorstate(data) if isinstance(data, GeneratorType) else None
        if state not in (None, inspect.GEN_CREATED) or (state is None and self._streams):
            raise ArgumentError(
                f"recipe.{tool}: train_dataloader is {type(data).__name__}, an iterator that was drawn from before: "
                "its first batches are gone. Give a DataLoader or a list, or write "
                f"recipe.{tool}(..., train_dataloader=another)."
            )


@attrs.frozen(repr=False, eq=False)
class SettingsDifference:
    """The settings in which two recipes, or two calls of ``fit``, differ: false where there are none.

    Attributes:
        values: those of both, by the name of the setting.

    >>> SettingsDifference({"seed": (0, 1)})
    setting  a  b
    seed     0  1
    """

    values: Mapping[str, tuple[object, object]]

    @classmethod
    def of(cls, a: Mapping[str, object], b: Mapping[str, object]) -> SettingsDifference:
        """Between the settings of two calls, those that both have."""
        return cls({name: (a[name], b[name]) for name in a if name in b and not equal(a[name], b[name])})

    def __bool__(self) -> bool:
        return bool(self.values)

    def __repr__(self) -> str:
        if not self.values:
            return "The settings do not differ."
        return "\n".join(columns([("setting", "a", "b"), *self._rows()], left=[0, 1, 2]))

    def _repr_html_(self) -> str:
        return table(list(self._rows()), ("setting", "a", "b"))

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for name, pair in self.values.items():
            a, b = (setting_in_words(name, value).removeprefix(f"{name}=") for value in pair)
            yield name, a, b if a != b else f"{b}, another"

    @property
    def below(self) -> str:
        """As lines below others."""
        return "".join(f"\n  {name}: {a} and {b}" for name, a, b in self._rows())


NO_DIFFERENCE = SettingsDifference({})


def _refuse_assignment(self: Arguments, name: str, value: object = None) -> NoReturn:
    raise FrozenStateError(
        f"recipe.{name} can't be changed: a recipe is a value. Make another one, recipe = recipe.replace({name}=...)."
    )


def refusing_assignment(cls: type[T]) -> type[T]:
    """The class, whose errors about assignments say what to write, and not only that attrs forbids them."""
    for method in ("__setattr__", "__delattr__"):
        setattr(cls, method, _refuse_assignment)
    return cls


def is_default(name: str, value: object) -> bool:
    """Whether this is the value of a setting that is not passed."""
    default = DEFAULTS.get(name)
    return value is default or (type(value) is type(default) and value == default)


def setting_in_words(name: str, value: object) -> str:
    """A setting as it is written in a call; data by what it is.

    >>> setting_in_words("seed", 3), setting_in_words("train_dataloader", [1, 2])
    ('seed=3', 'list of 2')
    """
    if name == "train_dataloader":
        return data(value)
    if name != "evaluators":
        return f"{name}={in_words(value)}"
    if not isinstance(value, Mapping):
        return f"evaluators={_evaluator(value)}"
    return f"evaluators={{{', '.join(f'{label!r}: {_evaluator(item)}' for label, item in value.items())}}}"


def _evaluator(value: object) -> str:
    return shown(value) if isinstance(value, Evaluator) else data(value)


def in_words(value: object) -> str:
    """A value as it is written in a call, without arguments that are at their default.

    >>> import pure_loop as pl
    >>> in_words([pl.algorithms.ema(half_life="2ba"), pl.optim.sgd(lr=0.1)])
    "[ema(half_life='2ba'), sgd(lr=0.1)]"
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {in_words(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(in_words, value))}]"
    if isinstance(value, Algorithm) and value.factory:
        return call(value.factory, _non_defaults(getattr(algorithms, value.factory), value.settings))
    if isinstance(value, Optimizer) and not value.parts:
        rate = fixed_rate(value.lr)
        options = {"lr": value.lr if rate is None else rate, **value.options}
        return call(value.name, _non_defaults(getattr(optim, value.name, None), options))
    return shown(value)


def _non_defaults(factory: object, arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments that differ from the factory's defaults."""
    parameters = inspect.signature(factory).parameters if callable(factory) else {}
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "lr"}
    return {
        name: value for name, value in arguments.items() if name not in defaults or not equal(value, defaults[name])
    }


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, which nothing changes later; without what depends on the model, ranks or devices.

    Raises:
        ArgumentError, ArgumentTypeError: a value that no call takes; None is taken where a tool need not have it.
    """
    data, loss = settings["train_dataloader"], settings["loss"]
    if isinstance(data, nn.Module | State | Ensemble | Stream):
        raise ArgumentTypeError(
            f"train_dataloader is a {type(data).__name__}: a recipe has no model, and no run; write "
            "pl.Recipe(train_dataloader, ...).fit(model)."
        )
    settings = {name: _immutable(name, value) for name, value in settings.items()}
    if loss is not None and not isinstance(loss, Task):
        check_loss_function(loss)
    bind_evaluators(settings["evaluators"], settings["eval_interval"], seed=0, sources=source)
    for field in attrs.fields(Settings):
        reader: Any = field.converter
        value = settings.get(field.name)
        optional = field.name in _NEEDED or field.name == "parallel" or DEFAULTS.get(field.name) is None
        if reader is not None and not (value is None and optional) and field.name != "parallel":
            reader(value)
    return settings


def _immutable(name: str, value: Any) -> Any:
    """Several algorithms, callbacks or evaluators so that no later change of a list reaches them."""
    if name in ("callbacks", "loggers"):
        return tuple(listed_callbacks(value))
    if name == "evaluators":
        return FrozenDict(value) if isinstance(value, Mapping) else value
    if name not in ("algorithms", "train_metrics", "watch"):
        return value
    if isinstance(value, Mapping):
        return FrozenDict(value)
    if isinstance(value, set | frozenset):
        return frozenset(value)
    return tuple(value) if isinstance(value, list | Iterator) else value
