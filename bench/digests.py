"""Digests of the States of a stream: the exact bits of every leaf, and apart from them what no processor changes."""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from pure_loop import Event, State

__all__ = ["Recorder", "StateDigest", "digest_of"]

SECONDS = ("total_seconds", "epoch_seconds", "batch_seconds")
# Counts don't depend on the processor, so that the structure has them.
COUNTED = ("timestamp.", "previous_timestamp.", "event", "position", "evaluator", "seed", "frozen")


class StateDigest:
    """One event: what it is called, and for each leaf its path, its form and a digest of its value."""

    __slots__ = ("event", "forms", "paths", "values")

    def __init__(self, event: Event, paths: list[str], forms: list[str], values: list[bytes]) -> None:
        self.event, self.paths, self.forms, self.values = event, paths, forms, values

    def bits(self) -> bytes:
        """What stands for all of it."""
        return hashlib.blake2b(self.structure() + b"".join(self.values), digest_size=16).digest()

    def structure(self) -> bytes:
        """What stands for the event, the paths, shapes and dtypes, and the counts."""
        text = "\n".join([self.event.name, *map("|".join, zip(self.paths, self.forms, strict=True))])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def digest_of(event: Event, state: State, *, seconds: bool = False) -> StateDigest:
    """The digest of one pair of a stream; it keeps nothing of the State.

    Args:
        seconds: whether the seconds of timestamps are part of it, which they can be where a clock was given.
    """
    tree: Any = state
    found, leaves, _ = optree.tree_flatten_with_path(tree, namespace="pure_loop")
    pairs = [(".".join(map(str, entries)), leaf) for entries, leaf in zip(found, leaves, strict=True)]
    del leaves
    # The order of parameters, gradients and optimizer states is the model's. That of what an algorithm keeps is its own
    # affair, and some go through sets of names, whose order is another one in each process.
    pairs.sort(key=lambda pair: pair[0] if pair[0].startswith("algorithm_state.") else "")
    paths, forms, values = ["frozen"], [",".join(sorted(state.frozen))], [b""]
    for path, leaf in pairs:
        if not seconds and path.endswith(SECONDS):
            continue
        form, content = _read(leaf)
        if path.startswith(COUNTED) and not path.endswith(SECONDS):
            form = f"{form} {leaf}"
        paths.append(path)
        forms.append(form)
        values.append(hashlib.blake2b(content, digest_size=8).digest())
    return StateDigest(event, paths, forms, values)


def _read(leaf: Any) -> tuple[str, bytes]:
    """The form of a leaf, and its bits."""
    if isinstance(leaf, Tensor):
        return _read_tensor(leaf)
    kind = type(leaf).__name__
    if isinstance(leaf, np.ndarray):
        return f"{kind} {leaf.dtype} {leaf.shape}", np.ascontiguousarray(leaf).tobytes()
    if isinstance(leaf, np.generic):
        return f"{kind} {leaf.dtype}", leaf.tobytes()
    if isinstance(leaf, enum.Enum):
        return kind, leaf.name.encode()
    if isinstance(leaf, float):
        return kind, struct.pack("<d", leaf)
    if isinstance(leaf, complex):
        return kind, struct.pack("<dd", leaf.real, leaf.imag)
    if isinstance(leaf, set | frozenset):
        return kind, repr(sorted(leaf, key=repr)).encode()
    text = repr(leaf)
    return kind, b"" if " at 0x" in text else text.encode()


def _read_tensor(tensor: Tensor) -> tuple[str, bytes]:
    form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.requires_grad:
        form += " leaf" if tensor.is_leaf else " graph"
    plain = tensor.detach()
    if hasattr(plain, "to_local"):  # a DTensor: what this rank holds
        plain = plain.to_local()
        form += f" local {list(plain.shape)}"
    if plain.layout is not torch.strided:
        plain = plain.coalesce()
        form += f" {plain.layout}"
        return form, _bits(plain.indices()) + _bits(plain.values())
    return form, _bits(plain)


def _bits(plain: Tensor) -> bytes:
    flat = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if type(flat) is not Tensor:
        flat = flat.as_subclass(Tensor)
    return flat.view(torch.uint8).numpy().tobytes()


class Recorder:
    """The digests of a stream, in the order of its events.

    Attributes:
        records: one for each State that was read.
        names: the names of all events, of those whose States were not read, too.
        notes: what happened besides, such as the error that ended the stream.
    """

    def __init__(self, *, seconds: bool = False) -> None:
        self.seconds = seconds
        self.records: list[StateDigest] = []
        self.names: list[str] = []
        self.notes: list[str] = []
        self.changed: list[str] = []

    def name(self, event: Event) -> None:
        """Note that an event came, and read nothing."""
        self.names.append(event.name)

    def read(self, event: Event, state: State) -> int:
        """Note an event, and read all of its State; returns the number of the record."""
        self.name(event)
        self.records.append(digest_of(event, state, seconds=self.seconds))
        return len(self.records) - 1

    def read_again(self, number: int, state: State) -> None:
        """Read a State that was kept, whose digest has to be what it was when it was yielded."""
        then = self.records[number]
        now = digest_of(then.event, state, seconds=self.seconds)
        if now.bits() != then.bits():
            pairs = zip(then.paths, then.values, now.values, strict=False)
            where = next((path for path, old, new in pairs if old != new), "its structure")
            self.changed.append(f"a State kept from {then.event.name}, record {number}, changed in {where}")
