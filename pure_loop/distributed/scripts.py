"""Scripts of the user's own on several ranks: they start alike, exchange means, and are seen to stay alike.

A script takes this rank's part of each batch, and writes ``grads = pl.distributed.mean(grads)`` before each update.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.arguments import is_number
from pure_loop._internal.pytree import NAMESPACE
from pure_loop.distributed.parallel import Parallel, rank, world_size
from pure_loop.errors import ArgumentError, ArgumentTypeError, DistributedError
from pure_loop.event import Event
from pure_loop.state import State

__all__ = ["Alone", "Meeting", "mean", "refuse_of_fit"]

T = TypeVar("T")


class Alone:
    """A script of one process: there is no other rank to exchange with."""

    rank, ranks = 0, 1

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While the script computes: :func:`mean` is that of these ranks."""
        token = _meeting.set(self)
        try:
            yield
        finally:
            _meeting.reset(token)

    def begin(self, event: Event, state: State) -> State:
        """The State to begin with, at the script's first event."""
        return state

    def come_to(self, event: Event, state: State) -> None:
        """The script came to an event."""

    def end(self, state: Any) -> None:
        """The script returned."""

    def mean(self, tree: T, weight: float) -> T:
        return tree

    def failed(self, error: BaseException, event: Event, state: State | None) -> None:
        """The stream ends with this error."""

    def close(self) -> None:
        """Leave the others."""


class Meeting(Alone):
    """A script of several ranks.

    Args:
        parallel: what the user chose.
        settings: what has to be equal on all ranks.
    """

    def __init__(self, parallel: Parallel, settings: Mapping[str, object]) -> None:
        self._parallel, self._settings = parallel, settings
        self._engine: Any = None
        self._event, self._batch, self._calls = Event.INIT, 0, 0
        self._is_compared = False
        self.rank, self.ranks = rank(), world_size()

    def begin(self, event: Event, state: State) -> State:
        from pure_loop.distributed.engines import engine_of

        self._event, self._batch = event, state.timestamp.batch
        self._engine = engine_of(self._parallel, state.device)
        begun: State = self._engine.start(state, self._settings, fresh=False)
        return begun

    def come_to(self, event: Event, state: State) -> None:
        self._event, self._batch = event, state.timestamp.batch
        if event is Event.BATCH_END and not self._is_compared:
            self._compare(state)

    def end(self, state: Any) -> None:
        if self._engine is None:
            return  # it had no event
        self._engine.talk.exchange(self._event, self._batch, -1.0, 0.0, 0.0)
        if isinstance(state, State):
            self._compare(state)

    def _compare(self, state: State) -> None:
        self._is_compared = True
        self._engine.refuse_others(
            state,
            f"has another State than rank 0 after {self._event.name} of batch {self._batch}, where scripts have "
            "the same on all ranks (grads = pl.distributed.mean(grads) before each update; buffers likewise)",
        )

    def mean(self, tree: T, weight: float) -> T:
        if self._engine is None:
            raise DistributedError(
                "pl.distributed.mean was called before the script's first event, at which the ranks meet: yield before."
            )
        leaves: list[Any]
        leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)  # type: ignore[arg-type]
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ArgumentTypeError(
                    f"pl.distributed.mean was given a {type(leaf).__name__}: give a tensor, or a mapping of tensors."
                )
        self._calls += 1
        kinds = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves]
        numbers = float(self._calls), float(zlib.crc32(repr((kinds, str(structure))).encode())), float(weight)
        rows = self._engine.talk.exchange(self._event, self._batch, *numbers)
        for place, row in enumerate(rows):
            if row[:2] != rows[0][:2]:
                what = "has ended" if -1.0 in (row[0], rows[0][0]) else "gave other tensors, or called it more often"
                raise DistributedError(
                    f"pl.distributed.mean after {self._event.name} of batch {self._batch}: rank {place} and rank 0 are "
                    f"not at the same call of it: one of them {what}. Every rank calls it equally often, with tensors "
                    "of the same names, shapes and dtypes."
                )
        total = math.fsum(row[2] for row in rows)
        if not total > 0:
            raise ArgumentError("pl.distributed.mean: the weights of all ranks are 0, so it is a mean over nothing.")
        return optree.tree_unflatten(structure, self._means(leaves, weight / total))  # type: ignore[return-value]

    def _means(self, leaves: list[Tensor], share: float) -> list[Tensor]:
        talk = self._engine.talk
        groups: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            groups.setdefault(leaf.dtype, []).append(index)
        result = list(leaves)
        with torch.no_grad():
            for dtype, places in groups.items():
                some = [leaves[index].detach() for index in places]
                if dtype.is_floating_point or dtype.is_complex:
                    flat = talk.sum(torch.cat([leaf.reshape(-1) for leaf in some]) * share)
                    parts = flat.split([leaf.numel() for leaf in some])
                    means = [part.view(leaf.shape).clone() for part, leaf in zip(parts, some, strict=True)]
                else:
                    means = talk.broadcast(some)
                for index, tensor in zip(places, means, strict=True):
                    result[index] = tensor
        return result

    def failed(self, error: BaseException, event: Event, state: State | None) -> None:
        if self._engine is not None:
            self._engine.failed(error, event, state)
            return
        from pure_loop.distributed._rendezvous import Rendezvous, first_line

        text = f"raised {type(error).__name__} before the first event of its script: {first_line(error)}"
        Rendezvous(self.rank, self.ranks, self._parallel.seconds).announce(text)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


_meeting: ContextVar[Alone | None] = ContextVar("meeting", default=None)


def mean(tree: T, *, weight: float = 1.0) -> T:
    """The mean over ranks of each tensor, in a script that ``pl.drive(..., parallel="replicate")`` runs.

    All ranks call it, with tensors of the same names, shapes and dtypes; all are given the same numbers. On one rank it
    gives what it is given.

    Args:
        tree: a tensor, or a mapping or other pytree of tensors, such as gradients or buffers. Of integer tensors the
            result is that of rank 0.
        weight: how much this rank counts: the number of its samples, where parts of a batch differ in size.

    Raises:
        ArgumentError, ArgumentTypeError: not tensors, or a weight that is none.
        DistributedError: the ranks are not at the same call, or there is no such script.

    >>> mean(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    if not is_number(weight) or not 0 <= weight < math.inf:
        raise ArgumentError(f"pl.distributed.mean(weight={weight!r}): give a number of at least 0, such as 16.")
    meeting = _meeting.get()
    if meeting is None:
        if world_size() > 1:
            raise DistributedError(
                f"pl.distributed.mean was called on rank {rank()} of {world_size()}, and by no script that ranks run "
                'together: pl.drive(script, parallel="replicate").'
            )
        return tree
    return meeting.mean(tree, weight)


def refuse_of_fit(parallel: Parallel) -> None:
    """
    Raises:
        ArgumentError: settings that a script of the user's own has no use for.
    """
    if attrs.evolve(parallel, timeout=Parallel().timeout) != Parallel():
        raise ArgumentError(
            f"pl.drive(parallel={parallel!r}): a script of your own computes with whole tensors, and takes its part of "
            'the data itself: write parallel="replicate", or Parallel(timeout="30s").'
        )
