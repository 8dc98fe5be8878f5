"""What a rehearsal found out: phases, memory and the length of the run, as text and as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import attrs

from pure_loop._internal.reprs import table
from pure_loop._internal.sizes import in_bytes
from pure_loop.entry.layers import LayerTable

__all__ = ["Phase", "Rehearsal"]

_WIDTH = 100
_MARGIN = 22


@attrs.frozen
class Phase:
    """One phase that was tried, and passed.

    Attributes:
        name: such as ``"data"``, ``"evaluators"``, ``"two steps"``.
        found: what it found, in words; "" for nothing.
    """

    name: str
    found: str = ""


@attrs.frozen(kw_only=True, repr=False)
class Rehearsal:
    """What :func:`pure_loop.rehearse` found out about a run that it has tried.

    Attributes:
        phases: those that were tried, all of which passed.
        skipped: what could not be tried, a sentence each.
        batches: the number of batches of the run in all; None: not known before it.
        batches_per_epoch: the batches of an epoch; None: not known.
        memory: bytes by what they hold: ``parameters``, ``buffers``, ``optimizer state``, ``algorithm state``,
            ``gradients``, ``batch``, and ``activations``, what one microbatch keeps from its forward for its backward.
        memory_per_rank: the same on each of ``world_size`` ranks; None where it was not passed.
        collectives: of a step on ``world_size`` ranks: the name of each collective, how many there are, and the bytes
            that a rank passes to them.
        checkpoint: the bytes of a checkpoint; None: none was written.
        layers: the layers of the model, with outputs and operations on this batch, as a table.
    """

    phases: tuple[Phase, ...]
    skipped: tuple[str, ...]
    batches: int | None
    batches_per_epoch: int | None
    memory: Mapping[str, int]
    layers: LayerTable
    memory_per_rank: Mapping[str, int] | None = None
    collectives: Mapping[str, tuple[int, int]] | None = None
    checkpoint: int | None = None

    def _rows(self) -> list[tuple[str, str]]:
        rows = [(phase.name, phase.found or "passed") for phase in self.phases]
        rows.append(("memory", _in_words(self.memory)))
        if self.memory_per_rank is not None:
            rows.append(("memory of each rank", _in_words(self.memory_per_rank)))
        if self.collectives is not None:
            found = [
                f"{count} {name} of {in_bytes(size)} in all" for name, (count, size) in sorted(self.collectives.items())
            ]
            rows.append(("collectives a step", ", ".join(found) or "none"))
        return [*rows, *(("not rehearsed", sentence) for sentence in self.skipped)]

    @property
    def _title(self) -> str:
        length = "of unknown length" if self.batches is None else f"of {self.batches:,} batches"
        epochs = "" if self.batches_per_epoch is None else f", {self.batches_per_epoch:,} an epoch"
        return f"pl.rehearse: a run {length}{epochs}, tried; nothing was trained or written"

    def __repr__(self) -> str:
        lines = [self._title, ""]
        for name, text in self._rows():
            lines.append(
                textwrap.fill(
                    text,
                    _WIDTH,
                    initial_indent=f"  {name:<{_MARGIN - 2}}",
                    subsequent_indent=" " * _MARGIN,
                    break_on_hyphens=False,
                    break_long_words=False,
                )
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return table(self._rows(), caption=self._title)


def _in_words(memory: Mapping[str, int]) -> str:
    parts = [f"{name} {in_bytes(size)}" for name, size in memory.items() if size]
    return f"{in_bytes(sum(memory.values()))}: {', '.join(parts)}"
