"""Where a stream stands, as a value, so that a run that resumes reads on from there.

What has indices resumes by the numbers of the timestamp. A stream has a *token*, which the source itself gives and
takes back (:mod:`pure_loop.data.tokens`). It is recorded before each batch, with a digest of that batch: a run that
resumes reads that one batch again and compares it, so that a token that is wrong is an error, and loses no sample.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from typing import Any, TypedDict

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pure_loop._internal.pytree import Batch, PyTree
from pure_loop._internal.torch_private import checksum
from pure_loop.data.batch import INDIVISIBLE, describe, is_array, is_graphs, is_texts, leaves, size_of_unit
from pure_loop.errors import DataError, ResumeError


class Counts(TypedDict, total=False):
    """What a position says of all passes over the source."""

    passes: int
    items: int
    ending: int


# Bytes of a tensor of which all are looked at, and numbers of a larger one that are.
_SMALL, _SAMPLED = 1 << 16, 1 << 10


@attrs.frozen(kw_only=True)
class Position:
    """Where the data of training stands after a batch: ``state.data``. Two are equal if they are of the same batch.

    Attributes:
        epoch, batch: the epoch, and the number in the run, of the last batch that was handed over.
        source: the class that has the token, and the version of its package: ``"StatefulDataLoader 0.11.0"``.
        token: what the source gave before it read that batch: numbers, texts, bytes, tensors, and containers of them.
        digest: a checksum of that batch (:func:`digest_of`).
        seed: the seed of the source, from which the random numbers of each batch come.
        number, item: the pass over the source in which that batch was, and its number in the pass.
        per_step: how many batches a step had.
        first: a checksum of one batch more, the first of the next pass, of which there is no token before it: most
            sources say only then that another pass has begun. None: there was none.
        passes, items, ending: the passes that had ended after it, the batches read in all of them, and how many these
            were when a pass ended with a step of fewer batches.

    >>> Position(epoch=0, batch=4, source="Lines", token={"line": 40}, digest=1, seed=2, number=0, item=4)
    Position(epoch=0, batch=4, source='Lines')
    """

    epoch: int
    batch: int
    source: str
    token: PyTree = attrs.field(eq=False, repr=False)
    digest: int = attrs.field(eq=False, repr=False)
    seed: int = attrs.field(eq=False, repr=False)
    number: int = attrs.field(eq=False, repr=False)
    item: int = attrs.field(eq=False, repr=False)
    per_step: int = attrs.field(default=1, eq=False, repr=False)
    first: int | None = attrs.field(default=None, eq=False, repr=False)
    passes: int = attrs.field(default=0, eq=False, repr=False)
    items: int = attrs.field(default=0, eq=False, repr=False)
    ending: int = attrs.field(default=-1, eq=False, repr=False)

    @property
    def is_valid(self) -> bool:
        """Whether its fields are of the types that they have; one that was read from a file may have others."""
        names = ("epoch", "batch", "digest", "seed", "number", "item", "per_step", "passes", "items", "ending")
        of_texts = type(self.source) is str and (self.first is None or type(self.first) is int)
        return of_texts and all(type(getattr(self, name)) is int for name in names)

    def is_of(self, epoch: int, in_epoch: int, batch: int) -> bool:
        """Whether its batch is the last one of a run with so many finished epochs, batches in this one, and batches."""
        return batch == self.batch + 1 and epoch == self.epoch + (in_epoch == 0)

    def compare(self, batch: Batch, stream: str, digest: int) -> None:
        """Refuse another batch than the one that was recorded, with this digest.

        Raises:
            ResumeError: the token has led to another batch.
        """
        if digest_of(batch) != digest:
            read = "nothing" if batch is None else describe(batch)
            raise ResumeError(
                f"the {stream} dataloader went to batch {self.batch} (epoch {self.epoch}) by the position in state.data"
                f", and read {read}, which is not the batch that was trained on there: the state of {self.source} does "
                "not hold all that its batches depend on (a shuffle buffer, random numbers of workers), or the data, "
                f"the batch size or the collate function has changed; pl.testing.check_positions tries it. {REPLAY}"
            )


REPLAY = (
    "To read the epoch again from its beginning, up to this batch, resume with state.replace(data=None), or write "
    "pl.data.register_position(Class, get=None, put=None) for the class of the source."
)


def digest_of(batch: Batch) -> int:
    """A checksum of a batch: of all numbers of small tensors, of 1,024 of larger ones, of shapes, texts and numbers.

    >>> digest_of([torch.arange(3), "a"]) == digest_of([torch.arange(3), "a"])
    True
    >>> digest_of(torch.arange(3)) == digest_of(torch.arange(1, 4))
    False
    """
    result = 0
    for path, leaf in leaves(batch):
        result = zlib.crc32(f"{path} {_text(leaf)}".encode(), result)
    return result


def _text(leaf: Any) -> str:
    """What tells a leaf of a batch from another one."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} {checksum(_sample(leaf))}"
    if is_array(leaf):
        return f"{leaf.dtype} {leaf.shape} {zlib.crc32(leaf.tobytes())}"
    if isinstance(leaf, PackedSequence):
        return f"{_text(leaf.data)} {_text(leaf.batch_sizes)}"
    if is_graphs(leaf):
        return " ".join(f"{key} {_text(leaf[key])}" for key in leaf.keys())  # type: ignore[index]  # noqa: SIM118
    if size_of_unit(leaf) is not None and callable(getattr(leaf, "items", None)):
        return " ".join(f"{key} {_text(item)}" for key, item in leaf.items())
    # The repr of other objects may have their addresses.
    return repr(leaf) if isinstance(leaf, INDIVISIBLE) or is_texts(leaf) else str(type(leaf))


def _sample(tensor: Tensor) -> Tensor:
    """A plain tensor with the numbers of this one, or some of a large one."""
    tensor = tensor.detach()
    tensor = (tensor if tensor.layout is torch.strided else tensor.to_dense()).as_subclass(Tensor)
    if tensor.numel() * tensor.element_size() <= _SMALL:
        return tensor
    # An odd step, so that it meets every column of a power of two.
    return tensor.reshape(-1)[:: -(-tensor.numel() // _SAMPLED) | 1]


_LEAVES = (type(None), bool, int, float, str, bytes)


def settled(token: object, name: str, path: str = "token") -> PyTree:
    """A token that stays as it is: a copy of its containers and tensors.

    Args:
        token: what a source gave, which may change it while it goes on.
        name: of the source, for errors.
        path: of the value in the token.

    Raises:
        DataError: it has a value that a checkpoint can't hold; names its place.
    """
    if isinstance(token, Mapping):
        return {settled(key, name, path): settled(item, name, f"{path}[{key!r}]") for key, item in token.items()}
    if isinstance(token, list | tuple):
        items = [settled(item, name, f"{path}[{i}]") for i, item in enumerate(token)]
        return items if isinstance(token, list) else tuple(items)
    if isinstance(token, Tensor):
        return token.detach().clone()
    if type(token) in _LEAVES:
        return token
    if type(token).__module__ == "numpy":
        return copy.copy(token)  # an array or a number, or what the file refuses by its place
    raise DataError(
        f"the position of {name} has {path}, a {type(token).__name__}, which a checkpoint can't hold: a token is made "
        "of numbers, texts, bytes, tensors, None, and dicts, lists and tuples of them. "
        "pl.data.register_position(Class, get=..., put=...) gives the class another one."
    )
