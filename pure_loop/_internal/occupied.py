"""What another run has left where this one writes: the one error that refuses to replace it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pure_loop.errors import RunExistsError

__all__ = ["refuse_other_run"]

_SHOWN = 3


def refuse_other_run(
    writer: str,
    place: str | os.PathLike[str],
    names: Sequence[str] = (),
    *,
    resume: str = "",
    own: str = "",
    why: str = "",
) -> None:
    """Refuse to replace what another run has left.

    Args:
        writer: the class that writes, ``"CheckpointSaver"``.
        place: its folder, or its file.
        names: of the files in the folder that are in the way; a file is in its own way.
        resume: how that run is resumed, ``'fit(..., autoresume="runs/1")'``; "": it can't be from here.
        own: a place for each run, such as ``"runs/{run_name}"``; "": made of ``place``.
        why: what tells the two runs apart.

    Raises:
        RunExistsError: always.
    """
    path = os.fspath(place)
    names = () if list(names) == [os.path.basename(path)] else names
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    folder, dot, suffix = path.rpartition(".") if not names and "." in os.path.basename(path) else (path, "", "")
    own = own or (f"{folder}-{{run_name}}{dot}{suffix}" if not names else f"{path.rstrip('/')}/{{run_name}}")
    steps = [
        f"to replace it, {writer}(..., overwrite=True)",
        f"to keep both, a place for each run, such as {own!r}",
        *([f"to resume it, {resume}"] if resume else []),
    ]
    raise RunExistsError(
        f"{writer}: {path} holds {f'{shown} of ' if shown else 'what was left by '}another run{why}, which this run "
        f"would replace. Write, {'; '.join(steps)}."
    )
