"""Sequence length warmup: a language model is trained on short sequences first.

With ``t``, the part of the warmup that is over, sequences of ``L`` tokens::

    L = min_length + floor((max_length - min_length) min(1, t) / increment) increment

https://arxiv.org/abs/2108.06084
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from pure_loop._internal.pytree import Batch
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._batches import by_part
from pure_loop.algorithms._spans import as_span, part_of_span
from pure_loop.data.batch import map_tensors, tensors_in
from pure_loop.errors import ArgumentError, DataError
from pure_loop.event import Event
from pure_loop.ranges import AtLeast, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State
from pure_loop.time import TimeLike, Timestamp

__all__ = ["sequence_length_warmup", "with_length"]

SERVES = "tokens"

Mode: TypeAlias = Literal["truncate", "reshape"]


def with_length(
    batch: Batch, length: int, mode: Mode = "truncate", *, keep_end: bool = False, keys: Collection[str] | None = None
) -> Batch:
    """A batch with sequences of at most ``length`` tokens.

    Args:
        batch: a nesting of tensors. Those of two dimensions or more, of which the second is the length of the
            sequences, the one of ``input_ids`` or else of the first tensor with two dimensions, are cut.
        length: in tokens.
        mode: ``"truncate"``: the beginning of each sequence; ``"reshape"``: the tokens of all sequences, one after the
            other, in rows of ``length``, of which there are more; what is left is dropped.
        keep_end: with ``"truncate"``: the last token of a sequence, by ``attention_mask`` or else the last one, takes
            the place of the last one that stays.
        keys: the keys of a mapping that are cut; None: all that have such a shape.

    Raises:
        DataError: no tensor of sequences, or none of a key; or ``"reshape"`` and tensors that have no sequences.

    >>> with_length((torch.arange(8).view(2, 4), torch.arange(8).view(2, 4)), 2)[0]
    tensor([[0, 1],
            [4, 5]])
    >>> with_length(torch.arange(8).view(2, 4), 2, "reshape")
    tensor([[0, 1],
            [2, 3],
            [4, 5],
            [6, 7]])
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    sequences = ids if isinstance(ids, Tensor) else next((t for t in tensors_in(batch) if t.ndim > 1), None)
    if sequences is None:
        raise DataError(
            "sequence_length_warmup: a batch has no tensor of two dimensions, (samples, tokens), so that there are no "
            "sequences to shorten."
        )
    count, full = sequences.shape[:2]
    if length >= full:
        return batch
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    places = _places(mask, count, full, length, sequences.device) if keep_end and mode == "truncate" else None

    def changed(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[:2] != (count, full):
            if mode == "reshape" and keys is None:
                raise DataError(
                    f"sequence_length_warmup: a tensor of shape {tuple(tensor.shape)} has no {full} tokens a sample, "
                    'so that it can\'t be put into other rows. Write mode="truncate", or name the keys of sequences.'
                )
            return tensor
        if mode == "reshape":
            rows = count * full // length
            return tensor.flatten(0, 1)[: rows * length].view(rows, length, *tensor.shape[2:])
        if places is None:
            return tensor[:, :length]
        index = places.view(count, length, *(1,) * (tensor.ndim - 2)).expand(count, length, *tensor.shape[2:])
        return tensor.gather(1, index)

    if keys is None:
        return map_tensors(changed, batch)
    entries = dict(batch)
    missing = [key for key in keys if key not in entries]
    if missing:
        raise DataError(
            f"sequence_length_warmup: a batch has no {missing[0]!r}, which keys= names; it has "
            f"{sorted(map(str, entries))}."
        )
    for key in keys:
        entries[key] = changed(batch[key])
    return type(batch)(entries)


def _places(mask: Tensor | None, count: int, full: int, length: int, device: torch.device) -> Tensor:
    """Which tokens stay, (count, length): the first ones, and the last of each sequence in the last place."""
    index = torch.arange(length, device=device).expand(count, length)
    # The last token that the mask shows, whether padding comes before or after.
    is_token = torch.ones((count, full), dtype=torch.bool, device=device) if mask is None else mask != 0
    last = torch.where(is_token, torch.arange(full, device=device), 0).amax(1)
    # Of a sequence that ends before the cut, the places stay.
    last = last.clamp(min=length - 1)
    return torch.cat([index[:, :-1], last.unsqueeze(1)], dim=1)


@checked
def sequence_length_warmup(
    duration: TimeLike = "0.3dur",
    *,
    min_length: Annotated[int, AtLeast(1, typical=(1, 2))] = 8,
    max_length: Annotated[int, AtLeast(1, typical=(3, 6))] = 1024,
    increment: Annotated[int, AtLeast(1, typical=(1, 2))] = 8,
    mode: Mode = "truncate",
    keep_end: bool = False,
    length: Annotated[Strength | None, AtLeast(1, typical=())] = None,
    keys: Collection[str] | None = None,
    name: str = "sequence_length_warmup",
) -> Algorithm:
    """Sequences that grow while a language model trains, at AFTER_DATALOADER; evaluation sees whole ones.

    The length is a function of the timestamp, so that it is the same on all ranks and when training resumes. Samples
    and tokens are counted as they were loaded. Compiled, each length is another graph. Try the longest ones with
    ``pl.rehearse`` before training.

    Args:
        duration: how long sequences grow: ``"0.3dur"``, ``"1000ba"``.
        min_length, max_length: of a sequence at the beginning and after the warmup, in tokens. A longer one is cut to
            ``max_length`` later, too; a shorter one stays.
        increment: how much longer they become at a time, in tokens.
        mode: ``"truncate"``: the beginning of each sequence; ``"reshape"``: all tokens, as more and shorter sequences.
        keep_end: with ``"truncate"``: the last token of a sequence, by ``attention_mask``, takes the last place.
        length: the length instead of what the warmup gives: a number, or a schedule.
        keys: the keys of a batch that are cut, where it is a mapping; None: all that have such a shape.
        name: another one, if there are several.

    Raises:
        ArgumentError: a setting out of range, ``max_length`` below ``min_length``, or ``keep_end`` where nothing is
        cut. ArgumentTypeError: a setting of another type.
        DataError: in training: a batch without sequences.

    >>> import pure_loop as pl
    >>> words, warm = torch.zeros(2, 64, dtype=torch.int64), sequence_length_warmup("30ba", max_length=64)
    >>> state = pl.State.create(torch.nn.Linear(2, 1)).replace(batch=(words, words))
    >>> [warm(state.replace(timestamp=pl.Timestamp(batch=batch))).batch[0].shape[1] for batch in (0, 5, 15, 29, 30)]
    [8, 16, 32, 56, 64]
    """
    time = as_span(duration, "duration", "sequence_length_warmup")
    if mode == "reshape" and keep_end:
        raise ArgumentError(
            'sequence_length_warmup: keep_end=True with mode="reshape", where no token is cut off: leave keep_end out.'
        )
    if length is None and max_length < min_length:
        raise ArgumentError(
            f"sequence_length_warmup: max_length={max_length} is less than min_length={min_length}: sequences grow "
            "from min_length to max_length."
        )

    def length_at(timestamp: Timestamp) -> int:
        if length is not None:
            return int(strength_at(length, timestamp) + 1e-9)
        grown = (max_length - min_length) * part_of_span(time, timestamp)
        # Of 0.7 * 10 and the like the nearest float is a little less than the whole number.
        steps = math.floor(grown / increment + 1e-9)
        return max_length if grown >= max_length - min_length else min_length + steps * increment

    @by_part
    def shorten(state: State) -> State:
        batch = with_length(state.batch, length_at(state.timestamp), mode, keep_end=keep_end, keys=keys)
        return state if batch is state.batch else state.replace(batch=batch)

    return Algorithm(name, {Event.AFTER_DATALOADER: shorten})
