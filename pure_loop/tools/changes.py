"""``pl.blame``: what each algorithm and each part of the loop changed, event by event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs

from pure_loop._internal.arguments import check_flag
from pure_loop._internal.reprs import columns, table
from pure_loop._internal.suggestions import nearest, teaching
from pure_loop.errors import ArgumentError, ArgumentTypeError, IdleAlgorithmError
from pure_loop.event import Event
from pure_loop.loop.stream import Stream
from pure_loop.time import Timestamp
from pure_loop.tools.steps import Step, change_between, refuse_stepless, steps
from pure_loop.verify.leaves import leaves_of


@attrs.frozen
class Change:
    """A leaf of the State that an algorithm, or the loop, gave another value.

    Attributes:
        event: at which the algorithm ran, or before which the loop computed.
        timestamp: of the State after the change.
        by: the name of the algorithm, or what the loop computed: ``"forward"``, ``"optimizer"``.
        is_algorithm: whether an algorithm did.
        leaf: its path: ``"params/0.weight"``, ``"algorithm_state/ema/params/0.weight"``, ``"loss"``.
        norm: the L2 norm of the change; None where the leaf was not there before, is gone or is no number.
    """

    event: Event
    timestamp: Timestamp
    by: str
    is_algorithm: bool
    leaf: str
    norm: float | None


def changes(stream: Stream) -> Iterator[Change]:
    """What :func:`blame` iterates over, one by one, while the stream runs."""
    return _between(steps(stream, "changes"))  # which refuses what is no such stream at the call


def _between(run: Iterable[Step]) -> Iterator[Change]:
    before: Mapping[str, object] | None = None
    for step in run:
        leaves = leaves_of(step.state)
        if before is not None:
            # What belongs to a batch is gone after it: nothing has changed it.
            for leaf, value in leaves.items():
                norm = None
                if leaf in before:
                    is_other, norm = change_between(before[leaf], value)
                    if not is_other:
                        continue
                yield Change(step.event, step.state.timestamp, step.by, step.is_algorithm, leaf, norm)
        before = leaves


@attrs.frozen(repr=False)
class Blame:
    """What changed the leaves of a run; a terminal or a notebook shows it as a table, and a loop gets each change.

    Attributes:
        leaf: of which leaf; None: of all.
        changes: in order.
        idle: algorithms of the run that changed nothing, of all leaves.
    """

    leaf: str | None
    changes: tuple[Change, ...]
    idle: tuple[str, ...]

    def rows(self) -> list[tuple[str, str, int, int, float | None]]:
        """By event and author: the event, the author, how many changes, of how many leaves, and their largest norm."""
        grouped: dict[tuple[Event, str], list[Change]] = {}
        for change in self.changes:
            grouped.setdefault((change.event, change.by), []).append(change)
        return [
            (event.name, by, len(items), len({item.leaf for item in items}), _largest(items))
            for (event, by), items in grouped.items()
        ]

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __str__(self) -> str:
        return "\n".join([*columns([_HEAD, *self._cells()], left=[0, 1]), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table(self._cells(), head=_HEAD, caption="".join(self._notes()))

    def _cells(self) -> list[list[str]]:
        return [[*map(str, row[:4]), _number(row[4])] for row in self.rows()]

    def _notes(self) -> list[str]:
        return [f"changed nothing: {', '.join(self.idle)}"] if self.idle else []


_HEAD = ["event", "by", "changes", "leaves", "largest norm"]


def _largest(items: Iterable[Change]) -> float | None:
    return max((item.norm for item in items if item.norm is not None), default=None)


def _number(norm: float | None) -> str:
    return "" if norm is None else f"{norm:.3g}"


@teaching
def blame(stream: Stream, leaf: str | None = None, *, strict: bool | None = None) -> Blame:
    """Run a stream to its end, and say what each algorithm and each part of the loop changed, in order.

    A leaf counts as changed where its value is another one; an equal copy is none. States are kept from one step to the
    next, so that updates are not written in place, and the host waits for values to be compared: this is to debug with.

    Args:
        stream: what ``pl.fit(...)`` returned, not begun and not compiled.
        leaf: a path such as ``"params/0.weight"`` or ``"loss"``; None: all leaves.
        strict: raise where an algorithm changed nothing; None: as the stream was made, ``fit(strict=True)``.

    Returns:
        A :class:`Blame`: a table by event and algorithm, which iterates over each :class:`Change`, and the algorithms
        that changed nothing.

    Raises:
        ArgumentTypeError: it is no stream of ``fit``, or the leaf is no text.
        ArgumentError: it has begun, or is compiled; or no State of the run has the leaf.
        IdleAlgorithmError: with ``strict``, an algorithm changed no leaf in the whole run.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 2
    >>> idle = pl.Algorithm("idle", {pl.Event.BATCH_END: lambda state: state})
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, max_duration="1ep",
    ...                 optimizer=pl.optim.sgd(lr=0.1), algorithms=[idle])
    >>> report = blame(stream, "params/weight")
    >>> [(change.by, str(change.timestamp)) for change in report], report.idle
    ([('optimizer', 'epoch 0, batch 1'), ('optimizer', 'epoch 0, batch 2')], ('idle',))
    """
    if leaf is not None and not isinstance(leaf, str):
        raise ArgumentTypeError(f'blame: leaf={leaf!r} is no text: a path such as "params/0.weight".')
    if strict is not None:
        strict = check_flag("strict", strict, where="blame")
    parts = refuse_stepless(stream, "blame")
    strict = parts.fit.stages.strict if strict is None else strict
    names = dict.fromkeys(handler.algorithm for handlers in parts.handlers.values() for handler in handlers)
    paths: set[str] = set(leaves_of(parts.state))
    chosen: list[Change] = []
    active: set[str] = set()
    for change in changes(stream):
        paths.add(change.leaf)
        active.add(change.by)
        if leaf is None or change.leaf == leaf:
            chosen.append(change)
    if leaf is not None and leaf not in paths:
        near = nearest(leaf, paths)
        some = f"did you mean {near!r}?" if near else f"there are {', '.join(sorted(paths)[:8])}, ...."
        raise ArgumentError(f"blame: no State of the run has the leaf {leaf!r}; {some}")
    idle = tuple(name for name in names if name not in active)
    if idle and strict:
        raise IdleAlgorithmError(
            f"blame: {', '.join(map(repr, idle))} changed no leaf of any State in the whole run. Look at its events "
            "and at its when=, or leave it out; strict=False lists it instead."
        )
    return Blame(leaf, tuple(chosen), idle)
