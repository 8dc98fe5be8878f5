"""``deterministic=True``: torch's switches while a stream computes, and an error that names an operation without it."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeAlias

import torch

from pure_loop._internal.frames import look_through
from pure_loop._internal.torch_private import config_of_compiler
from pure_loop._internal.tracebacks import OWN_HIDDEN, RaisedIn
from pure_loop.errors import ArgumentError, NondeterministicError
from pure_loop.event import Event
from pure_loop.loop.stream import Stream
from pure_loop.state import State

Pair: TypeAlias = tuple[Event, State]
Pairs: TypeAlias = Generator[Pair, None, object]

_NO_IMPLEMENTATION = re.compile(r"(\S+) does not have a deterministic implementation")


def stream_of(pairs: Pairs, deterministic: bool, settings: Mapping[str, object] | None = None) -> Stream:
    """The stream of these pairs, which computes with torch's switches for deterministic algorithms or without.

    They are set while it runs, for algorithms and callbacks too, and are as they were whenever it yields.
    """
    return Stream(_switching(pairs) if deterministic else pairs, settings)


def _switching(pairs: Pairs) -> Pairs:
    with OWN_HIDDEN:
        return (yield from _Switching(pairs))


@contextmanager
def _switched() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn: Any = torch.backends.cudnn
    of_cudnn = cudnn.deterministic, cudnn.benchmark
    # The switch sets that of the compiler, too, which may have been set alone.
    compiler = config_of_compiler()
    of_compiler = compiler and compiler.deterministic
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = of_cudnn
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if compiler:
            compiler.deterministic = of_compiler


class _Switching(Generator[Pair, None, object]):
    """Runs a generator with the switches set. It keeps no reference to what that yields."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs

    def __next__(self) -> Pair:
        with _switched():
            try:
                return next(self._pairs)
            except RuntimeError as error:
                taught = _taught(error)
                if taught is None:
                    raise
                raise taught from error

    def send(self, value: None, /) -> Pair:
        return next(self) if value is None else self._pairs.send(value)

    def throw(self, kind: Any, value: Any = None, traceback: TracebackType | None = None, /) -> Pair:
        with _switched():
            return self._pairs.throw(kind if value is None else value)

    def close(self) -> None:
        with _switched():
            self._pairs.close()


look_through(_Switching.__next__.__code__)


def _taught(error: RuntimeError) -> NondeterministicError | None:
    """The error of an operation without a deterministic implementation as one that names its module."""
    match = _NO_IMPLEMENTATION.search(str(error))
    if match is None or isinstance(error, NondeterministicError):
        return None
    place = RaisedIn.of(error)
    where = "outside of the forward of a module (a backward, the loss, an algorithm)"
    if place is not None:
        name = type(place.module).__name__
        where = f"in module {place.path!r} ({name})" if place.path else f"in the model ({name})"
    taught = NondeterministicError(
        f"deterministic=True: the operation {match[1]} has no deterministic implementation on this device, and ran "
        f"{where}. Use another operation there, or fit(..., deterministic=False). What is deterministic is "
        "listed in the documentation of torch.use_deterministic_algorithms."
    )
    for note in getattr(error, "__notes__", ()):
        taught.add_note(note)
    return taught


def refuse_cublas(device: torch.device, environment: Mapping[str, str] = os.environ) -> None:
    """
    Raises:
        ArgumentError: cuBLAS, which reads its setting once, has none in which it is deterministic.
    """
    value = environment.get("CUBLAS_WORKSPACE_CONFIG")
    if device.type == "cuda" and torch.version.hip is None and value not in (":4096:8", ":16:8"):
        raise ArgumentError(
            f"deterministic=True on {device}: cuBLAS is deterministic only with CUBLAS_WORKSPACE_CONFIG=:4096:8 (or "
            f":16:8) in the environment, and it is {value!r}. Set it before Python starts, since cuBLAS reads it once: "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 python train.py"
        )
