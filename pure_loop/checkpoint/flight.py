"""What a flight recorder leaves in its folder: a journal of batches and the facts of the run; and how it is read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

import attrs
import torch
from torch import Tensor

from pure_loop._internal.arguments import path_text
from pure_loop._internal.version import __version__
from pure_loop.callback import Run
from pure_loop.checkpoint.paths import leftover
from pure_loop.checkpoint.validation import Json
from pure_loop.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CheckpointNotFoundError,
    RewindError,
    TimeFormatError,
)
from pure_loop.stages.nonfinite import total_loss
from pure_loop.state import State
from pure_loop.time import Time, Timestamp, TimeUnit

JOURNAL, RUN = "journal.jsonl", "run.json"
# The line of a journal at FIT_END.
ENDED = '{"ended":true}\n'
# Of losses before one: how many it is compared with (few, because losses fall), how many the changes are of, and how
# many there have to be.
_COMPARED, _WINDOW, _FEWEST = 9, 30, 3
_KEPT = re.compile(r"(start-)?ba(\d+)\.safetensors")


def facts_of(state: State) -> dict[str, object]:
    """What of a run can be compared with another: versions, the model, and the length of the data."""
    return {
        "pure_loop": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "model": type(state.model.skeleton).__name__,
        "seed": state.seed,
        "batches_per_epoch": state.timestamp.batches_per_epoch,
        "algorithms": sorted(state.algorithm_state),
    }


def settings_of(run: Run) -> dict[str, object]:
    """What of the arguments of a run can be compared with another's."""
    return {
        "optimizer": None if run.optimizer is None else run.optimizer.name,
        "max_duration": str(run.max_duration),
        "precision": run.precision,
        "microbatch_size": run.microbatch_size,
        "ranks": run.ranks,
        "algorithm_settings": list(run.algorithms),
    }


def journal_loss(state: State) -> Tensor:
    """The loss of a batch as a journal has it, of an ensemble the mean of its members'; shape ()."""
    loss = total_loss(state.loss).detach()
    return loss.mean() if loss.ndim else loss


def line_of(timestamp: Timestamp, loss: float, seconds: float, digest: str | None) -> str:
    """A line of the journal: of a batch that is finished."""
    fields: dict[str, object] = {
        "batch": timestamp.batch,
        "epoch": timestamp.epoch,
        "loss": loss.hex() if math.isfinite(loss) else str(loss),
        "seconds": round(seconds, 6),
    }
    if digest is not None:
        fields["digest"] = digest
    return json.dumps(fields, separators=(",", ":"))


def ends_in_a_line(path: str) -> bool:
    """Whether the last line of a file is whole; an empty file has none."""
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


@attrs.frozen
class Line:
    """A batch of the journal.

    Attributes:
        batch: how many were finished with it.
        epoch: in which it was, from 0.
        loss: of the whole batch.
        seconds: since the batch before.
        digest: of the parameters after it; None: not due.
    """

    batch: int
    epoch: int
    loss: float
    seconds: float
    digest: str | None


@attrs.frozen
class Rise:
    """A loss beside those of the batches before it.

    Attributes:
        batch: its number, from 0.
        loss: of the batch.
        before: the finite losses of the batches before it, at most ``_WINDOW`` of them.
    """

    batch: int
    loss: float
    before: tuple[float, ...]

    @property
    def compared(self) -> tuple[float, ...]:
        """The losses right before it: it is compared with their median."""
        return self.before[-_COMPARED:]

    @property
    def height(self) -> float:
        """How far the loss is above the median of those right before it."""
        return self.loss - median(self.compared)

    @property
    def limit(self) -> float:
        """The height above which it is an outlier.

        Ten times the median change from one of those losses to the next, whichever direction, and at least a tenth of
        their median: so that neither noise nor a loss that falls or rises steadily makes outliers.
        """
        change = median(abs(after - before) for before, after in pairwise(self.before))
        return max(10 * change, abs(median(self.compared)) / 10)

    @property
    def is_outlier(self) -> bool:
        return self.height > self.limit


def rises(losses: Sequence[tuple[int, float]]) -> Iterator[Rise]:
    """Finite losses after the first tenth of the run, beside those of the batches before them.

    Args:
        losses: the number of each batch, from 0 and in order, and its loss.

    >>> [(rise.batch, rise.height) for rise in rises([(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.5), (4, float("nan"))])]
    [(3, 0.5)]
    """
    first = math.ceil((losses[-1][0] + 1) / 10) if losses else 0
    finite = [(batch, loss) for batch, loss in losses if math.isfinite(loss)]
    for place in range(_FEWEST, len(finite)):
        batch, loss = finite[place]
        if batch >= first:
            yield Rise(batch, loss, tuple(before for _, before in finite[max(place - _WINDOW, 0) : place]))


@attrs.frozen
class Flight:
    """A recorded run.

    Attributes:
        folder: where it is.
        lines: of its batches by number; of a batch that was trained again, the last.
        files: the files of States by the number of batches that are finished in them, in order.
        starts: those of them that are States of FIT_START.
        facts: its versions and settings.
        has_ended: whether its last line says that training reached its end.
    """

    folder: str
    lines: Mapping[int, Line]
    files: Mapping[int, str]
    starts: frozenset[int]
    facts: Mapping[str, Json]
    has_ended: bool

    def path(self, batch: int) -> str:
        """The file of a State that is kept."""
        return os.path.join(self.folder, self.files[batch])

    def batch_of(self, when: str | Time | Timestamp, *, inside: bool) -> int:
        """The number of batches that are finished at an event of the batch that is meant.

        Args:
            when: ``"3417ba"``, ``"2ep"``, a timestamp, ``"spike"``, ``"worst"`` or ``"nonfinite"``.
            inside: whether the event comes before the end of its batch: for the latter three, that of the batch.

        Raises:
            ArgumentError: there is no such batch.
            ArgumentTypeError: something else.
            RewindError: no loss rises, or none is an outlier.
        """
        if isinstance(when, Timestamp):
            return when.batch
        if isinstance(when, str) and when in ("spike", "worst", "nonfinite"):
            return self._step_of(when) + (not inside)
        if not isinstance(when, str | Time):
            raise ArgumentTypeError(
                f'rewind: when={when!r} of type {type(when).__name__}: "3417ba", "2ep", a timestamp, "spike", "worst" '
                'or "nonfinite".'
            )
        try:
            time = Time.parse(when)
        except TimeFormatError:
            raise ArgumentError(
                f'rewind: when={when!r}: write "3417ba", "2ep", a timestamp, "spike", "worst" or "nonfinite".'
            ) from None
        if time.unit is TimeUnit.BATCH:
            return int(time.value)
        if time.unit is TimeUnit.EPOCH:
            before = [line.batch for line in self.lines.values() if line.epoch < time.value]
            if any(line.epoch >= time.value for line in self.lines.values()) or not time.value:
                return max(before, default=0)
            epochs = max((line.epoch for line in self.lines.values()), default=0)
            if self.has_ended and time.value == epochs + 1:
                return max(before, default=0)
            raise ArgumentError(f"rewind: when={str(when)!r}: the journal ends in epoch {epochs}, counted from 0.")
        raise ArgumentError(f'rewind: when={str(when)!r}: write batches or epochs, "3417ba" or "2ep".')

    def _step_of(self, when: str) -> int:
        """The number of the batch itself, counted from 0."""
        if not self.lines and when == "nonfinite" and self.starts:
            return min(self.starts)  # training ended in its first batch
        if not self.lines:
            raise ArgumentError(f"rewind: when={when!r}, and the journal of {self.folder} has no batch.")
        broken = [line.batch - 1 for line in self.lines.values() if not math.isfinite(line.loss)]
        if when == "nonfinite":
            if not broken and self.has_ended:
                raise ArgumentError(
                    f"rewind: when='nonfinite': all losses in the journal of {self.folder} are finite, and the run "
                    'reached its end. The largest rise of them is that of when="spike".'
                )
            # Training ended in the batch after the last line.
            return min(broken, default=max(self.lines))
        if broken and when == "worst":
            return min(broken)
        return self._spike() if when == "spike" else self._worst()

    def _rises(self) -> Iterator[Rise]:
        return rises([(line.batch - 1, line.loss) for line in self.lines.values()])

    def _first_compared(self) -> int:
        return math.ceil(max(self.lines) / 10)

    def _spike(self) -> int:
        """The batch with the largest rise of the loss over the running median."""
        largest = max(self._rises(), key=lambda rise: (rise.height, -rise.batch), default=None)
        if largest is None or largest.height <= 0:
            raise self._none_found("spike", "no loss is above the median of those before it", "")
        return largest.batch

    def _worst(self) -> int:
        """The batch of the highest loss among outliers."""
        highest = worst = None
        for rise in self._rises():
            if highest is None or rise.loss > highest.loss:
                highest = rise
            if (worst is None or rise.loss > worst.loss) and rise.is_outlier:
                worst = rise
        if worst is not None:
            return worst.batch
        reason, advice = "no loss is an outlier", ""
        if highest is not None:
            reason += (
                f": the highest is {highest.loss:.4g}, {highest.height:+.2g} from the median of the "
                f"{len(highest.compared)} before it, and an outlier is above {highest.limit:+.2g}"
            )
            advice = f'"spike" for the largest rise, or "{highest.batch}ba" for the highest loss'
        raise self._none_found("worst", reason, advice)

    def _none_found(self, when: str, reason: str, advice: str) -> RewindError:
        newest = max(self.lines)
        return RewindError(
            f"rewind: when={when!r}: in the journal of {self.folder}, {reason}. Looked at were batches "
            f"{max(self._first_compared(), _FEWEST)} to {newest - 1}, after the first tenth of the run. Write "
            + (advice or f'a batch, such as "{newest - 1}ba"')
            + "."
        )


def read_flight(folder: str | os.PathLike[str]) -> Flight:
    """What a :class:`pure_loop.callbacks.FlightRecorder` left in a folder.

    Raises:
        CheckpointNotFoundError: it has left nothing there.
        CheckpointError: what it has left is damaged; names the file and the line.
    """
    place = path_text(folder, "rewind folder")
    try:
        names = os.listdir(place)
    except OSError as error:
        raise CheckpointNotFoundError(f"rewind: {place!r} can't be read: {error.strerror}.") from None
    if JOURNAL not in names:
        listing = ", ".join(sorted(names)[:4]) or "nothing"
        raise CheckpointNotFoundError(
            f"rewind: {place!r} is not the folder of a FlightRecorder: it has no {JOURNAL}, but {listing}. Record the "
            f"run with callbacks=[pl.callbacks.FlightRecorder({place!r})]."
        )
    lines: dict[int, Line] = {}
    has_ended = False
    path = os.path.join(place, JOURNAL)
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            line = _read(text, f"{path}, line {number}")
            has_ended = text == ENDED.encode()
            if line is not None:
                lines.pop(line.batch, None)
                lines[line.batch] = line
    # What is after the newest line is of a run that was resumed from before it, and trained again.
    newest = next(reversed(lines), 0)
    lines = {batch: lines[batch] for batch in sorted(lines) if batch <= newest}
    facts = read_facts(place)
    matches = [match for match in map(_KEPT.fullmatch, sorted(names)) if match]
    files = {int(match[2]): match[0] for match in matches}
    if lines:  # those of a branch that was trained again from before them are no States of this run
        files = {batch: name for batch, name in files.items() if batch <= newest}
    starts = frozenset(int(match[2]) for match in matches if match[1] and int(match[2]) in files)
    return Flight(place, lines, dict(sorted(files.items())), starts, facts, has_ended)


def read_facts(folder: str) -> dict[str, Json]:
    """The facts of the run that was recorded in a folder; nothing where there is no file of them.

    Raises:
        CheckpointError: the file is cut or damaged.
    """
    path = os.path.join(folder, RUN)
    try:
        with open(path, "rb") as file:
            facts = json.loads(file.read())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} can't be read, as after a kill while it was written: {type(error).__name__}: {str(error)[:200]}. "
            "It says with which versions and settings the run was recorded: restore it, or remove it to go on without."
        ) from error
    if not isinstance(facts, dict):
        raise CheckpointError(f"{path} can't be read: it holds {type(facts).__name__}, and no facts of a run by name.")
    return facts


def write_facts(folder: str, facts: Mapping[str, object]) -> None:
    """Write the facts of a run to a file that appears whole or not at all."""
    path = os.path.join(folder, RUN)
    beside = os.path.join(folder, leftover(RUN))
    try:
        with open(beside, "w") as file:
            json.dump(facts, file, indent=1)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def _read(text: bytes, where: str) -> Line | None:
    """None: a line that a killed run did not finish, or none of a batch.

    Raises:
        CheckpointError: the line is damaged.
    """
    content = text.strip()
    is_complete = content.startswith(b"{") and content.endswith(b"}")
    # A run that resumed has ended it; before it there is nothing but what such a line begins with.
    if not is_complete and (not text.endswith(b"\n") or _BEGUN.fullmatch(content)):
        return None
    try:
        fields = json.loads(content)
        if fields == json.loads(ENDED):
            return None
        loss = fields["loss"]
        number = float.fromhex(loss) if "x" in loss else float(loss)
        counts, seconds, digest = (fields["batch"], fields["epoch"]), fields["seconds"], fields.get("digest")
        if not all(type(count) is int and count >= 0 for count in counts) or type(seconds) not in (int, float):
            raise ValueError("a count or a time that is none")
        return Line(*counts, number, seconds, digest if isinstance(digest, str) else None)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: it is no line of a journal, and none that a kill has cut: {type(error).__name__}: "
            f"{str(error)[:200]}. The file is damaged: restore it, or remove the line, and what is rewound there is "
            "not compared."
        ) from error


# The beginning of a line, in ASCII.
_BEGUN = re.compile(rb'(\{("([a-z]+("(:[^{}\x80-\xff\x00-\x1f]*)?)?)?)?)?')
