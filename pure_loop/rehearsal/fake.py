"""The arguments of a call of ``fit`` on tensors without numbers, and what of them is then not tried."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pure_loop.checkpoint.finding import latest
from pure_loop.checkpoint.storage import storage_of
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointNotFoundError
from pure_loop.precision import Precision
from pure_loop.rehearsal.places import Place

__all__ = ["without_numbers"]


def without_numbers(arguments: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The same call with its model and its data on the meta device.

    Args:
        arguments: those of ``fit``, by name.
        place: where it is noted what is not tried.
    """
    changes: dict[str, Any] = {"device": "meta", "nonfinite": "error", "load_path": None, "autoresume": None}
    changes |= {"compile": False, "steps_per_call": 1, "strict": False, "verify": None}
    with suppress(ArgumentError, ArgumentTypeError):  # the call refuses it
        if Precision.parse(arguments["precision"]).dtype is not None:
            place.skip(f"precision={arguments['precision']!r}: the forward ran in the dtypes of the parameters.")
            changes["precision"] = "fp32"
    if arguments["compile"]:
        place.skip("compile=: the steps were not traced.")
    path, folder = arguments["load_path"], arguments["autoresume"]
    if path is not None:
        with place.collecting("load_path"):
            if not storage_of(path).exists():
                raise CheckpointNotFoundError(f"there is no checkpoint at {os.fspath(path)}")
            place.skip(f"load_path: {os.fspath(path)} is there, and was not read.")
    if folder is not None and isinstance(folder, str | os.PathLike) and latest(folder) is not None:
        place.skip(f"autoresume: {os.fspath(folder)} has a checkpoint, which was not read.")
    return {**arguments, **changes}
