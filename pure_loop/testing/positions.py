"""``check_positions``: the laws of positions in streams, tried on a dataloader of yours.

A run that resumes in a stream reads on from the state that the stream gave (:mod:`pure_loop.data.position`). These laws
say when it may: what is given is a value, giving it changes nothing, and it leads another object to the next batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

import attrs
import torch
from hypothesis import strategies as st

from pure_loop._internal.arguments import check_callable, check_integer
from pure_loop._internal.closing import closing
from pure_loop._internal.pytree import PyTree
from pure_loop._internal.suggestions import teaching
from pure_loop.checkpoint.tree import Reader, Writer
from pure_loop.data.dataloaders import source
from pure_loop.data.position import Position, digest_of
from pure_loop.data.source import Source
from pure_loop.data.tokens import name_of, why_not
from pure_loop.errors import ArgumentTypeError, DataError, PureLoopError
from pure_loop.testing._examples import drawn_from
from pure_loop.testing.report import CheckFailed, LawViolation, Outcome, Report

STATEMENTS = {
    "is_value": "the state that the data gives is made of plain values, and a checkpoint gives it back",
    "repeats": "a second dataloader gives the batches of the first",
    "has_position": "the dataloader resumes by index, or by a state from which it goes on",
    "resumption": "from each batch, a new dataloader that is given the state goes on with the next batch",
}


class Stop(NamedTuple):
    """A place at which a run stops: so many batches of an epoch, and of the run, and the position there."""

    epoch: int
    in_epoch: int
    batch: int
    position: Position | None


@attrs.frozen
class _Subject:
    """The dataloader on trial."""

    make: Callable[[], object]
    epochs: int
    batches_per_epoch: int | None
    batches_per_step: int

    def open(self) -> Source:
        loader, limit = self.make(), self.batches_per_epoch
        return source(loader, seed=0, stream="train", batches_per_epoch=limit, batches_per_step=self.batches_per_step)

    def run(self, data: Source, start: Stop | None = None) -> Iterator[tuple[int, Stop]]:
        """The digest of each batch from a stop on, and the stop after it."""
        begin, first, seen = (0, 0, 0) if start is None else (start.epoch, start.in_epoch, start.batch)
        for epoch in range(begin, self.epochs):
            with closing(data.epoch(epoch, first, seen)) as batches:
                for number in count(first):
                    batch = next(batches, self)
                    if batch is self:
                        break
                    position = None if data.position is None else data.position(epoch, seen)
                    seen += 1
                    ended = self.batches_per_epoch is not None and number + 1 == self.batches_per_epoch
                    yield digest_of(batch), Stop(epoch + ended, 0 if ended else number + 1, seen, position)
            first = 0
        data.close()


@teaching
def check_positions(
    make_loader: Callable[[], object],
    *,
    epochs: int = 2,
    batches_per_epoch: int | None = None,
    batches_per_step: int = 1,
    max_examples: int = 20,
) -> Report:
    """Try the laws of positions on a dataloader, and raise if one doesn't hold.

    Args:
        make_loader: a function without arguments that makes the dataloader, as a new process would: a new object each
            time, which gives the batches from the first one on.
        epochs: how many passes are made; each is read whole, or up to ``batches_per_epoch``, which endless data needs.
        batches_per_epoch, batches_per_step: as of :func:`pure_loop.fit`.
        max_examples: at how many batches, drawn by Hypothesis, runs stop and resume.

    Returns:
        The results of the laws: ``print(report)`` shows a table.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold.
        ArgumentTypeError: ``make_loader`` is no function, or makes no dataloader.

    >>> from torch.utils.data import DataLoader
    >>> print(check_positions(lambda: DataLoader(range(40), batch_size=4, shuffle=True)).table(seconds=False))
    DataLoader: 4 passed
    <BLANKLINE>
      is_value      passed             20 examples
      repeats       passed             20 examples
      has_position  passed              1 examples
      resumption    passed             20 examples
    """
    check_callable("make_loader", make_loader, "a function that makes a dataloader", where="check_positions")
    check_integer("epochs", epochs, where="check_positions", least=1)
    check_integer("max_examples", max_examples, where="check_positions", least=1)
    subject = _Subject(make_loader, epochs, batches_per_epoch, batches_per_step)
    loader = make_loader()
    report = Report(type(loader).__name__, tuple(_outcomes(subject, loader, max_examples)))
    if not report.ok:
        raise CheckFailed(report)
    return report


def _outcomes(subject: _Subject, loader: object, examples: int) -> Iterator[Outcome]:
    """The outcome of each law; after one that fails the others are not tried."""
    data = subject.open()
    digests: list[int] = []
    stops: list[Stop] = []
    laws: dict[str, Callable[[], int]] = {
        "is_value": lambda: _is_value(subject, data, digests, stops),
        "repeats": lambda: _repeats(subject, digests),
        "has_position": lambda: _has_position(data, loader),
        "resumption": lambda: _resumption(subject, digests, stops, examples),
    }
    failed = ""
    for name, law in laws.items():
        if failed:
            yield Outcome(name, STATEMENTS[name], "not run", reason=f"rests on {failed}")
            continue
        try:
            yield Outcome(name, STATEMENTS[name], "passed", law())
        except LawViolation as violation:
            violation.law, violation.statement, failed = name, STATEMENTS[name], name
            yield Outcome(name, STATEMENTS[name], "FAILED", max(violation.examples, 1), "", violation)


def _is_value(subject: _Subject, data: Source, digests: list[int], stops: list[Stop]) -> int:
    """Makes the first run, and notes each batch and where the data stood after it."""
    try:
        for digest, stop in subject.run(data):
            digests.append(digest)
            stops.append(stop)
            if stop.position is not None:
                _written_and_read(stop.position.token)
    except DataError as error:
        if not str(error).startswith("the position of "):
            raise  # of the data itself
        raise LawViolation(f"after {len(stops)} batches: {error}") from error
    return len(stops)


def _written_and_read(token: PyTree) -> None:
    cpu, path = torch.device("cpu"), ("data", "token")
    writer = Writer(cpu)
    try:
        text = json.dumps(writer.write(token, path), allow_nan=False)
    except (ArgumentTypeError, ValueError) as error:
        raise LawViolation(f"the state is {token!r:.200}: {error}") from error
    again = json.dumps(Writer(cpu).write(Reader(writer.tensors, cpu, "a checkpoint").read(json.loads(text)), path))
    if again != text:
        raise LawViolation(f"the state is {text:.200}, and a checkpoint of it gives {again:.200}.")


def _repeats(subject: _Subject, digests: list[int]) -> int:
    for number, (digest, _) in enumerate(subject.run(subject.open())):
        if number >= len(digests) or digest != digests[number]:
            raise LawViolation(
                f"batch {number} of a second dataloader is another one than that of the first.",
                advice="A run can't resume in data that changes from process to process: seed what shuffles, and open "
                "files in an order of their own (sorted). make_loader has to make a new object each time.",
            )
    return len(digests)


def _has_position(data: Source, loader: object) -> int:
    if data.replays:
        why = (
            getattr(data, "why_not", None)
            or why_not(loader)
            or (
                f"{name_of(loader)} has no state_dict() and load_state_dict(state), and pl.data.register_position says "
                "nothing of its class"
            )
        )
        raise LawViolation(
            f"a run that resumes reads the epoch again from its beginning: {why}.",
            advice="That gives the right batches, and takes as long as reading them did.",
        )
    return 1


def _resumption(subject: _Subject, digests: list[int], stops: list[Stop], examples: int) -> int:
    numbers: Iterable[Any] = range(len(stops))
    if len(stops) > examples:
        numbers = sorted([*dict.fromkeys(drawn_from(st.sampled_from(range(len(stops))), examples))][:examples])
    tried = 0
    for tried, number in enumerate(numbers, start=1):
        stop, wanted = stops[number], digests[number + 1 :]
        data = subject.open()
        try:
            if stop.position is not None:
                data.goes_on(stop.position, stop.epoch, stop.in_epoch, stop.batch)
            resumed = [digest for digest, _ in subject.run(data, stop)]
        except PureLoopError as error:
            raise _violation(stop, tried, f"it raises {type(error).__name__}: {error}") from error
        finally:
            data.close()
        if resumed != wanted:
            lost, repeated = len(set(wanted) - set(resumed)), len(set(resumed) & set(digests[: number + 1]))
            text = f"of the {len(wanted)} that follow {lost} are lost, and {repeated} of those before come again"
            raise _violation(stop, tried, text)
    return tried


def _violation(stop: Stop, tried: int, text: str) -> LawViolation:
    violation = LawViolation(
        f"a new dataloader that goes on after batch {stop.batch - 1} does not give what followed: {text}.",
        advice="The state has to hold all that the next batches depend on: the order, random numbers, buffers. pl."
        "data.register_position(Class, get=None, put=None) lets a run that resumes read the epoch again.",
    )
    violation.examples = tried
    return violation
