"""Where a pipeline of webdataset stands: the number of the shard, and that of the sample in it.

Shards before it are not opened, and samples before it in its shard are not decoded. Stages after the one that makes
samples have to keep nothing from one sample to the next: a pipeline that shuffles samples has no position.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import attrs

# Stages that open shards, and that make samples of them; the last of the first, and the first of the second, is both.
_OPENING = frozenset({"StreamingOpen", "FileCache", "tarfile_samples", "url_opener"})
_SAMPLING = frozenset({"tarfile_samples", "group_by_keys"})
# Stages that make one sample of each, or none, or collect as many as they give at once.
_KEEPING_NOTHING = frozenset(
    {
        *("_info", "_select", "_log_keys", "_decode", "_map", "_rename", "_associate", "_map_dict", "_to_tuple"),
        *("_map_tuple", "_batched", "_unlisted", "_extract_keys", "_rename_keys", "check_empty"),
    }
)


@attrs.frozen
class _Stage:
    """A stage that counts, among those of the pipeline."""

    run: Callable[[Iterable[Any]], Iterator[Any]]

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        return self.run(items)


def pipeline_of(dataset: object) -> Pipeline | None:
    """A pipeline of webdataset; None of any other object."""
    webdataset = sys.modules.get("webdataset")
    return Pipeline(dataset) if webdataset is not None and isinstance(dataset, webdataset.DataPipeline) else None


def _name(stage: object) -> str:
    """The name of a stage's function, or of its class."""
    function = getattr(stage, "f", stage)
    return getattr(function, "__name__", type(stage).__name__)


@attrs.define
class Pipeline:
    """A pipeline of one pass.

    Attributes:
        dataset: a ``DataPipeline``, such as a ``WebDataset``.
        shard, offset: the number of the shard at hand, and how many samples it has given.
    """

    dataset: Any
    shard: int = 0
    offset: int = 0

    @property
    def stages(self) -> list[Any]:
        """Its stages, but for those that count."""
        return [stage for stage in self.dataset.pipeline if type(stage) is not _Stage]

    @property
    def why_not(self) -> str | None:
        """Why it has no position, in words; None: it has one."""
        names = list(map(_name, self.stages))
        sampling = [i for i, name in enumerate(names) if name in _SAMPLING]
        if not sampling or not _OPENING.intersection(names):
            return "the pipeline of webdataset reads no tar files"
        if self.dataset.repetitions != 1:
            return (
                "the pipeline of webdataset repeats its shards: leave out repeat and with_epoch, and write "
                "fit(batches_per_epoch=...)"
            )
        unknown = [name for name in names[sampling[0] + 1 :] if name not in _KEEPING_NOTHING]
        if unknown:
            return (
                f"the stage {unknown[0].strip('_')!r} of the webdataset pipeline may keep samples, which would be "
                "lost: shuffle samples when the shards are written, and the order of shards alone when they are read"
            )
        return None

    def begin(self, token: Mapping[str, int]) -> None:
        """Let the next pass go to a token, and count from there."""
        stages = self.stages
        names = list(map(_name, stages))
        opening = next(i for i, name in enumerate(names) if name in _OPENING)
        sampling = next(i for i, name in enumerate(names) if name in _SAMPLING)
        self.shard, self.offset = token["shard"] - 1, 0
        self.dataset.pipeline = [
            *stages[:opening],
            _Stage(partial(self._shards, token["shard"])),
            *stages[opening : sampling + 1],
            _Stage(partial(self._samples, token["offset"])),
            *stages[sampling + 1 :],
        ]

    def token(self) -> dict[str, int]:
        """Where the pass stands."""
        return {"shard": max(self.shard, 0), "offset": self.offset}

    def _shards(self, first: int, shards: Iterable[Any]) -> Iterator[Any]:
        for shard in islice(shards, first, None):
            self.shard, self.offset = self.shard + 1, 0
            yield shard

    def _samples(self, skipped: int, samples: Iterable[Any]) -> Iterator[Any]:
        for number, sample in enumerate(samples):
            self.offset += 1
            if number >= skipped:
                yield sample
