"""Which checkpoints of a folder stay: the last few, and the best few by a metric."""

from __future__ import annotations

import copy
import os
from typing import Any

import attrs

from pure_loop._internal.names import FIELDS, Fields, Pattern
from pure_loop.errors import ArgumentError
from pure_loop.time import Timestamp

__all__ = ["Names", "Saved", "check_links", "expired", "is_name", "ranked"]


@attrs.frozen
class Saved:
    """A checkpoint that is complete.

    Attributes:
        name: of the file.
        batch: how many were finished.
        score: what the metric was there; None if it wasn't measured there.
    """

    name: str
    batch: int
    score: float | None


def expired(saved: list[Saved], *, last: int | None, best: int | None, largest: bool) -> list[Saved]:
    """Those that needn't be kept; the newest is never among them.

    Args:
        saved: oldest first.
        last: how many of the newest stay; None: all, or with ``best`` one.
        best: how many of the best stay, older ones first where they are as good.
        largest: whether a larger score is better.

    >>> files = [Saved("a", 1, 0.1), Saved("b", 2, 0.9), Saved("c", 3, 0.5), Saved("d", 4, None)]
    >>> [each.name for each in expired(files, last=1, best=1, largest=True)]
    ['a', 'c']
    """
    if last is None and best is None:
        return []
    kept = set(_last_of_batches(saved)[-(last or 1) :])
    kept |= set(ranked(saved, largest=largest)[: best or 0])
    return [file for file in saved if file not in kept]


def ranked(saved: list[Saved], *, largest: bool) -> list[Saved]:
    """Those that have a score, the best first, and older ones first where they are as good.

    Args:
        saved: oldest first; of one batch, the end of it and that of its epoch, the later counts.
        largest: whether a larger score is better.

    >>> files = [Saved("a", 1, 0.1), Saved("b", 2, 0.9), Saved("c", 3, 0.9), Saved("d", 4, None)]
    >>> [file.name for file in ranked(files, largest=True)]
    ['b', 'c', 'a']
    """
    scores = [
        (file.score, file) for file in _last_of_batches(saved) if file.score is not None and file.score == file.score
    ]
    return [file for _, file in sorted(scores, key=lambda pair: -pair[0] if largest else pair[0])]


def _last_of_batches(saved: list[Saved]) -> list[Saved]:
    return list({file.batch: file for file in saved}.values())


def is_name(text: str) -> bool:
    """Whether a file of a folder can have this name.

    >>> is_name("latest"), is_name("a/b"), is_name(".."), is_name("x" * 256)
    (True, False, False, False)
    """
    try:
        size = len(os.fsencode(text))
    except UnicodeEncodeError:
        return False
    return 0 < size <= _LONGEST and text not in (".", "..") and "/" not in text and "\0" not in text


# In bytes, on nearly all file systems.
_LONGEST = 255


def check_links(*endings: str, latest: Any, best: Any) -> None:
    """Check the names of links.

    Args:
        endings: of the names of checkpoints, which no link can have.
        latest, best: names of links; None: no link.

    Raises:
        ArgumentError: a name that no link can have, or that another one has.
    """
    for argument, name in (("latest", latest), ("best", best)):
        if name is not None and (not isinstance(name, str) or not is_name(name)):
            raise ArgumentError(
                f'{argument}={name!r}: the name of a link in the folder, such as "{argument}", or None.'
            )
        for ending in endings:
            if name is not None and name.endswith(ending):
                raise ArgumentError(f"{argument}={name!r}: names that end with {ending!r} are those of checkpoints.")
    if latest is not None and latest == best:
        raise ArgumentError(f"latest={latest!r} and best={best!r}: each link needs a name of its own.")


class Names:
    """The names of files by a pattern such as ``"ep{epoch}-ba{batch}.safetensors"``.

    Raises:
        ArgumentError: it names something else than counts of a timestamp and fields of a run, or another folder.

    >>> from pure_loop import Timestamp
    >>> names = Names("ep{epoch}-ba{batch:05}.safetensors", ".safetensors")
    >>> names.of(Timestamp(epoch=2, batch=30))
    'ep2-ba00030.safetensors'
    >>> names.match("ep2-ba00030.safetensors"), names.match("mine.safetensors")
    (True, False)
    """

    def __init__(self, pattern: Any, suffix: str) -> None:
        self._suffix = suffix
        self._pattern = Pattern(pattern, "filename", tuple(dict.fromkeys((*_COUNTS, *FIELDS))))
        self._check(self._pattern.of({**_EXAMPLE, **_counts(Timestamp())}))
        self._check(self._pattern.of({**_EXAMPLE, **_counts(_LARGE)}), ": with counts of millions the name is")

    def _check(self, name: str, what: str = ": it is") -> None:
        if len(os.fsencode(name)) > _LONGEST:
            raise ArgumentError(
                f"filename={self._pattern.text!r}{what} longer than {_LONGEST} bytes; give a shorter one."
            )
        if not name.endswith(self._suffix) or name.startswith(".") or "\\" in name or not is_name(name):
            raise ArgumentError(
                f"filename={self._pattern.text!r}: a name in the folder that ends with {self._suffix!r}, not hidden, "
                f"of at most {_LONGEST} bytes and without a folder of its own, such as 'ep{{epoch}}-ba{{batch}}"
                f"{self._suffix}'."
            )

    @property
    def fields_of_run(self) -> frozenset[str]:
        """Those of its fields that are not counts."""
        return self._pattern.fields & _EXAMPLE.keys()

    def filled(self, fields: Fields) -> Names:
        """The names of one run: counts are left, and its name, its rank and its start put in."""
        result = copy.copy(self)
        result._pattern = self._pattern.filled({name: fields.get(name) for name in _EXAMPLE})
        result._check(result._pattern.of({**_EXAMPLE, **_counts(_LARGE)}), ": with counts of millions the name is")
        return result

    def of(self, timestamp: Timestamp) -> str:
        return self._pattern.of(_counts(timestamp))

    def is_like(self, other: Names) -> bool:
        """Whether both give a name in some run."""
        now, mine, its = Timestamp(), self.filled(_EXAMPLE), other.filled(_EXAMPLE)
        return mine.match(its.of(now)) or its.match(mine.of(now))

    def match(self, name: str) -> bool:
        """Whether the pattern gives such names."""
        return self._pattern.match(name)


_COUNTS = ("epoch", "batch", "sample", "token", "iteration", "batch_in_epoch", "epoch_in_iteration")
_EXAMPLE: dict[str, str | int] = {"run_name": "run", "rank": 0, "start": 1234567}


def _counts(timestamp: Timestamp) -> dict[str, int]:
    return {name: getattr(timestamp, name) for name in _COUNTS}


_LARGE = Timestamp(epoch=1234567, batch=1234567, sample=1234567, token=1234567, iteration=1234567)
