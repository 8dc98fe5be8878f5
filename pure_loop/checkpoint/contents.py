"""What of a State a saver writes, and what is said of a file that lacks some of it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

import attrs

from pure_loop._internal.suggestions import nearest
from pure_loop.checkpoint.validation import Json
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.state import State

_NOTE, _ANEW = "left_out", "begins_anew"
_OPT_STATE, _ALGORITHM_STATE = "opt_state", "algorithm_state/"


def _read(value: object) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    for glob in globs:
        if not isinstance(glob, str):
            raise ArgumentTypeError(f'exclude={value!r}: write globs, such as ["opt_state", "algorithm_state/ema"].')
        if glob != _OPT_STATE and not glob.startswith(_ALGORITHM_STATE):
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
        names = [_ALGORITHM_STATE + name for name in state.algorithm_state]
        for glob in self.exclude:
            if glob != _OPT_STATE and not fnmatch.filter(names, glob):
                near = nearest(glob, names)
                raise ArgumentError(
                    f"exclude={glob!r}: no algorithm of this run has such state"
                    f"{f' (did you mean {near!r}?)' if near else ''}; there is {', '.join(names) or 'none'}."
                )

    def of(self, state: State) -> tuple[State, dict[str, object]]:
        """The State that is written, and what a file of it notes of that which is left out."""
        if self.weights_only:
            return state.replace(opt_state=None, algorithm_state={}), {}
        names = (_OPT_STATE, *(_ALGORITHM_STATE + name for name in state.algorithm_state))
        left = [name for name in names if _matches(name, self.exclude)]
        if not left:
            return state, {}
        states = {name: value for name, value in state.algorithm_state.items() if _ALGORITHM_STATE + name not in left}
        state = state.replace(algorithm_state=states)
        return (state.replace(opt_state=None) if _OPT_STATE in left else state), {_NOTE: left}

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
