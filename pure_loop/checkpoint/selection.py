"""What of a State a file has, which names of a file are loaded, and what they are called in the model."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from glob import escape
from typing import TypeAlias

import attrs

from pure_loop._internal.arguments import accepts, name_of
from pure_loop._internal.suggestions import nearest
from pure_loop.checkpoint.validation import Json
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.state import State

Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str]"
"""Names, or their beginnings up to a dot, and what stands for them; or a function of the name."""


def _read_exclude(value: object) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(glob, str) and glob for glob in globs):
        raise ArgumentTypeError(f'exclude={value!r}: write globs of names, such as ["head.*"].')
    return globs


def _read_rename(value: object) -> Rename | None:
    if value is None:
        return None
    example = 'write {"backbone.": "encoder."}, beginnings of names in the file and in the model, or a function'
    if isinstance(value, Mapping):
        if not all(isinstance(old, str) and isinstance(name, str) for old, name in value.items()):
            raise ArgumentTypeError(f"rename={value!r}: {example} of a name that returns one.")
        return dict(value)
    if not callable(value):
        raise ArgumentTypeError(f"rename={value!r}: {example} of a name that returns one.")
    if not accepts(value, 1):
        raise ArgumentTypeError(
            f"rename is the function {name_of(value)}, which can't be called with one argument: it is called as "
            f"{name_of(value)}(name) with each name in the file, and returns that in the model."
        )
    return value


@attrs.frozen
class Selection:
    """Which parameters and buffers are loaded, and under which names: of weights alone, and of a whole State.

    Attributes:
        exclude: globs of names in the model, after renaming.
        rename: from names in the file to names in the model; None: they are the same.

    >>> selection = Selection(["head.*"], {"backbone": "encoder", "module.": ""})
    >>> selection.renamed(["backbone.0.weight", "backbones", "module.head.bias"], "a file")
    {'backbone.0.weight': 'encoder.0.weight', 'backbones': 'backbones', 'module.head.bias': 'head.bias'}
    >>> selection.excludes("head.bias"), selection.excludes("encoder.0.weight")
    (True, False)
    """

    exclude: tuple[str, ...] = attrs.field(converter=_read_exclude, default=())
    rename: Rename | None = attrs.field(converter=_read_rename, default=None)

    def excludes(self, name: str) -> bool:
        """Whether a weight keeps the value that it has in the model."""
        return any(fnmatch.fnmatchcase(name, glob) for glob in self.exclude)

    def of_ties(self, ties: Mapping[str, str]) -> Selection:
        """The selection that excludes a tied weight by its first name, too, where it does by another one.

        Args:
            ties: the first name of each weight, by all of its names.

        >>> Selection("head.*").of_ties({"embed.w": "embed.w", "head.w": "embed.w"}).exclude
        ('head.*', 'embed.w')
        """
        firsts = (first for name, first in ties.items() if self.excludes(name) and not self.excludes(first))
        return attrs.evolve(self, exclude=(*self.exclude, *map(escape, dict.fromkeys(firsts))))

    def renamed_one(self, name: str) -> str:
        """The name in the model of one in the file, as the longest beginning or the function says."""
        if not isinstance(self.rename, Mapping):
            return name if self.rename is None else self.rename(name)
        old = max((old for old in self.rename if begins(name, old)), key=len, default=None)
        return name if old is None else self.rename[old] + name[len(old) :]

    def renamed(self, names: Iterable[str], path: object) -> dict[str, str]:
        """The names in the model by the names in the file.

        Raises:
            ArgumentError: a beginning that no name has; two names become one; names what was probably meant.
            ArgumentTypeError: the function returned something else than a name.
        """
        names = list(names)
        result = {name: self.renamed_one(name) for name in names}
        for old in self.rename if isinstance(self.rename, Mapping) else ():
            if not any(begins(name, old) for name in names):
                raise ArgumentError(f"rename: no weight of {path} begins with {old!r}{_near(old, names)}.")
        owners: dict[str, str] = {}
        for old, name in result.items():
            if not isinstance(name, str) or not name:
                raise ArgumentTypeError(
                    f"rename({old!r}) returned {name!r}: return the name in the model; what is not to be loaded is "
                    'written as exclude=["head.*"].'
                )
            first = owners.setdefault(name, old)
            if first != old:
                raise ArgumentError(f"rename: {first!r} and {old!r} of {path} both become {name!r}.")
        return result

    def split(self) -> tuple[tuple[str, ...], Selection]:
        """What leaves out the optimizer state, or the state of algorithms, of a State; and the rest."""
        fields = tuple(glob for glob in self.exclude if glob.partition("/")[0] in ("opt_state", "algorithm_state"))
        return fields, attrs.evolve(self, exclude=tuple(glob for glob in self.exclude if glob not in fields))

    def refuse_unmatched(self, names: Iterable[str], path: object) -> None:
        """
        Args:
            names: of the model, and those of the file after renaming.

        Raises:
            ArgumentError: a glob that none of them matches.
        """
        names = list(dict.fromkeys(names))
        for glob in self.exclude:
            if not fnmatch.filter(names, glob):
                raise ArgumentError(
                    f"exclude={glob!r} matches no weight of {path} or of the model{_near(glob, names)}."
                )


ALL = Selection()
"""All weights, under their own names."""


def begins(name: str, beginning: str) -> bool:
    """Whether a name is this one, or of a submodule of this name."""
    rest = name.removeprefix(beginning)
    return name.startswith(beginning) and (not beginning or beginning.endswith(".") or rest[:1] in ("", "."))


def _near(text: str, names: list[str]) -> str:
    parts = [name.split(".") for name in names]
    beginnings = {".".join(part[:size]) for part in parts for size in range(1, len(part) + 1)}
    near = nearest(text.rstrip(".*"), sorted(beginnings))
    # A module without a glob for what is in it.
    ending = text[len(text.rstrip(".*")) :] if near != text.rstrip(".") else ".*"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (f" (did you mean {near + ending!r}?)" if near else "") + f"; there are {', '.join(names[:5])}{more}"


_NOTE, _ANEW = "left_out", "begins_anew"
OPT_STATE, ALGORITHM_STATE = "opt_state", "algorithm_state/"


def _read(value: object) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    for glob in globs:
        if not isinstance(glob, str):
            raise ArgumentTypeError(f'exclude={value!r}: write globs, such as ["opt_state", "algorithm_state/ema"].')
        if glob != OPT_STATE and not glob.startswith(ALGORITHM_STATE):
            raise ArgumentError(
                f"exclude={glob!r}: opt_state and algorithm_state/NAME can be left out of a State; weights_only=True "
                "leaves out all but the weights, trained_only=True what is frozen of these."
            )
    return globs


@attrs.frozen
class Contents:
    """
    Attributes:
        weights_only, trained_only: as of :func:`pure_loop.save`.
        exclude: ``"opt_state"``, or ``"algorithm_state/"`` and a glob of the names of algorithms.

    Raises:
        ArgumentError, ArgumentTypeError: something else can't be left out.
    """

    weights_only: bool = False
    trained_only: bool = False
    exclude: tuple[str, ...] = attrs.field(converter=_read, default=())

    def __attrs_post_init__(self) -> None:
        if self.weights_only and self.exclude:
            raise ArgumentError(f"exclude={list(self.exclude)}: weights_only=True leaves that out already.")

    @property
    def is_whole(self) -> bool:
        """Whether training resumes from what is written."""
        return not self.weights_only and not self.exclude

    def refuse_unmatched(self, state: State) -> None:
        """
        Raises:
            ArgumentError: there is no such algorithm state; names what is near.
        """
        names = [ALGORITHM_STATE + name for name in state.algorithm_state]
        for glob in self.exclude:
            if glob != OPT_STATE and not fnmatch.filter(names, glob):
                near = nearest(glob, names)
                raise ArgumentError(
                    f"exclude={glob!r}: no algorithm of this run has such state"
                    f"{f' (did you mean {near!r}?)' if near else ''}; there is {', '.join(names) or 'none'}."
                )

    def of(self, state: State) -> tuple[State, dict[str, object]]:
        """The State that is written, and what a file of it notes of that which is left out."""
        if self.weights_only:
            return state.replace(opt_state=None, algorithm_state={}), {}
        names = (OPT_STATE, *(ALGORITHM_STATE + name for name in state.algorithm_state))
        left = [name for name in names if _matches(name, self.exclude)]
        if not left:
            return state, {}
        states = {name: value for name, value in state.algorithm_state.items() if ALGORITHM_STATE + name not in left}
        state = state.replace(algorithm_state=states)
        return (state.replace(opt_state=None) if OPT_STATE in left else state), {_NOTE: left}

    def saved(self, why: str, batch: int, path: str, *, same_command: bool) -> str:
        """What is said where a run ends early: where the State is, and how training goes on from it."""
        if self.weights_only:
            return f"{why}: the weights of batch {batch} are saved in {path}; fit(..., autoresume=...) could resume"
        how = "the same command resumes from it" if same_command else "resume it with fit(..., load_path=...)"
        if self.exclude:
            how = f"go on with fit(pl.load({path!r}, model=model, exclude={list(self.exclude)}), ...)"
        return f"{why}: the State of batch {batch} is saved in {path}: {how}"


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def left_out(notes: Mapping[str, object], key: str = _NOTE) -> list[str]:
    """What a saver left out of the State in a file, by the notes of the file."""
    names = notes.get(key, ())
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def without_left_out(notes: Mapping[str, Json], exclude: Iterable[str]) -> dict[str, Json]:
    """The notes of a file, once its reader agrees that these begin anew."""
    return {**notes, _ANEW: [name for name in left_out(notes) if _matches(name, exclude)]}


def refuse_left_out(notes: Mapping[str, object], path: object) -> None:
    """
    Raises:
        ResumeError: the file lacks a part of its State that its reader hasn't said to begin anew.
    """
    left = left_out(notes)
    if missing := [name for name in left if name not in left_out(notes, _ANEW)]:
        raise ResumeError(
            f"{path} was saved without {', '.join(missing)} (exclude= of its CheckpointSaver), so training can't "
            f"resume exactly from it. For that to begin anew, fit(pl.load({path!r}, model=model, exclude={left}), ...)."
        )
