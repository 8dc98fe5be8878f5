"""What a rehearsal finds: the phase under way and its failures, and the report with phases, memory and length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import attrs

from pure_loop._internal.devices import needs_numbers
from pure_loop._internal.reprs import in_bytes, paragraph, table
from pure_loop.entry.layers import LayerTable
from pure_loop.errors import ImpurityError


@attrs.define
class Place:
    """The phase under way, the failures so far, and what could not be tried.

    Attributes:
        phase: the name of the computation under way.
        note: what is added to each name, such as the end of the run.
        failures: the name of a phase and its error.
        skipped: sentences about what was not tried.
        silenced: the names of callbacks that have failed, and are called no more.
        fake: whether tensors have no numbers: code that needs them is no failure, and not tried.
        stops: how many computations have ended early.
    """

    phase: str = "start"
    note: str = ""
    failures: list[tuple[str, Exception]] = attrs.field(factory=list)
    skipped: list[str] = attrs.field(factory=list)
    silenced: set[str] = attrs.field(factory=set)
    fake: bool = False
    stops: int = 0

    def fail(self, error: Exception, phase: str | None = None) -> None:
        """Note a failure, once for each error."""
        self.stops += 1
        if self.fake and needs_numbers(error):
            self.skip(f"{phase or self.phase}: it needs numbers, which tensors don't have with fake=True ({error}).")
            return
        if isinstance(error, ImpurityError):  # found after the code that it names, in whatever phase that is
            phase = "purity"
        if all(error is not failure for _, failure in self.failures):
            self.failures.append(((phase or self.phase) + self.note, error))

    def skip(self, sentence: str) -> None:
        """Note what is not tried, once."""
        if sentence not in self.skipped:
            self.skipped.append(sentence)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The phase inside the ``with``; after an error it stays, because the error belongs to it."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    @contextmanager
    def collecting(self, phase: str) -> Iterator[None]:
        """The phase inside the ``with``; an error is noted as a failure, and what follows the ``with`` runs."""
        before, self.phase = self.phase, phase
        try:
            yield
        except Exception as error:
            self.fail(error)
        finally:
            self.phase = before


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
            texts = [
                f"{count} {name} of {in_bytes(size)} in all" for name, (count, size) in sorted(self.collectives.items())
            ]
            rows.append(("collectives a step", ", ".join(texts) or "none"))
        return [*rows, *(("not rehearsed", sentence) for sentence in self.skipped)]

    @property
    def _title(self) -> str:
        length = "of unknown length" if self.batches is None else f"of {self.batches:,} batches"
        epochs = "" if self.batches_per_epoch is None else f", {self.batches_per_epoch:,} an epoch"
        return f"pl.rehearse: a run {length}{epochs}, tried; nothing was trained or written"

    def __repr__(self) -> str:
        return "\n".join([self._title, "", *(paragraph(name, text, _MARGIN) for name, text in self._rows())])

    def _repr_html_(self) -> str:
        return table(self._rows(), caption=self._title)


def _in_words(memory: Mapping[str, int]) -> str:
    parts = [f"{name} {in_bytes(size)}" for name, size in memory.items() if size]
    return f"{in_bytes(sum(memory.values()))}: {', '.join(parts)}"
