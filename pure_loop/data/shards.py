"""Where a pipeline of webdataset stands: the number of the shard, and that of the sample in it.

Shards before it are not opened, and samples before it in its shard are not decoded. Stages after the one that makes
samples have to keep nothing from one sample to the next: a pipeline that shuffles samples has no position.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import attrs

# Stages that give the order of shards: the same in each pass, or by the number of the pass that they count.
_ORDERING = frozenset(
    {"SimpleShardList", "single_node_only", "split_by_node", "split_by_worker", "_shuffle", "detshuffle"}
)
# Stages that open shards, and that make samples of them; the last of the first, and the first of the second, is both.
_OPENING = frozenset({"StreamingOpen", "FileCache", "tarfile_samples", "url_opener"})
_SAMPLING = frozenset({"tarfile_samples", "group_by_keys"})
# Stages that make one sample of each, or none; and the one that collects batches, which asks for one sample more before
# it gives a batch, and keeps that.
_BATCHED = "_batched"
_KEEPING_NOTHING = frozenset(
    {
        *("_info", "_select", "_log_keys", "_decode", "_map", "_rename", "_associate", "_map_dict", "_to_tuple"),
        *("_map_tuple", _BATCHED, "_extract_keys", "_rename_keys", "check_empty"),
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
        number: of the pass.
        shard, offset: the number of the shard at hand, and how many samples it has given.
        kept: these two before the sample that is kept for the next batch; None: none is.
    """

    dataset: Any
    number: int = 0
    shard: int = 0
    offset: int = 0
    kept: tuple[int, int] | None = None

    @property
    def stages(self) -> list[Any]:
        """Its stages, but for those that count."""
        return [stage for stage in self.dataset.pipeline if type(stage) is not _Stage]

    @property
    def why_not(self) -> str | None:
        """Why it has no position, in words; None: it has one."""
        names = list(map(_name, self.stages))
        sampling = [i for i, name in enumerate(names) if name in _SAMPLING]
        opening = [i for i, name in enumerate(names) if name in _OPENING]
        if not sampling or not opening:
            return "the pipeline of webdataset reads no tar files in this process"
        drawing = [name for name in names[: opening[0]] if name not in _ORDERING]
        if drawing:
            return f"{drawing[0]} of the webdataset pipeline may draw other shards in each pass"
        if self.dataset.repetitions != 1:
            return (
                "the pipeline of webdataset repeats its shards: leave out repeat and with_epoch, and write "
                "fit(batches_per_epoch=...)"
            )
        unknown = [name for name in names[sampling[0] + 1 :] if name not in _KEEPING_NOTHING]
        if names.count(_BATCHED) > 1:
            return "the pipeline of webdataset has more than one stage 'batched', each of which keeps samples"
        if unknown:
            return (
                f"the stage {unknown[0].strip('_')!r} of the webdataset pipeline may keep samples, which would be "
                "lost: shuffle samples when the shards are written, and the order of shards alone when they are read"
            )
        return None

    def begin(self, token: Mapping[str, Any] | int) -> None:
        """Let the next pass go to a token, or begin as that of a number, and count from there."""
        stages = self.stages
        names = list(map(_name, stages))
        opening = next(i for i, name in enumerate(names) if name in _OPENING)
        sampling = next(i for i, name in enumerate(names) if name in _SAMPLING)
        batching = names.index(_BATCHED) if _BATCHED in names else len(names)
        if isinstance(token, int):
            token = {"shard": 0, "offset": 0, "pass": token}
        first, skipped, self.number = token["shard"], token["offset"], token["pass"]
        for place, stage in enumerate(stages):
            if type(getattr(stage, "epoch", None)) is int:
                # It counts the pass when that begins.
                stages[place] = copy.copy(stage)
                stages[place].epoch = self.number - 1
        self.shard, self.offset, self.kept = first - 1, 0, None
        self.dataset.pipeline = [
            *stages[:opening],
            _Stage(partial(self._shards, first)),
            *stages[opening : sampling + 1],
            _Stage(partial(self._samples, skipped)),
            *stages[sampling + 1 : batching],
            *([_Stage(self._keeping)] if batching < len(names) else []),
            *stages[batching:],
        ]

    def token(self) -> dict[str, Any]:
        """Where the pass stands."""
        shard, offset = (self.shard, self.offset) if self.kept is None else self.kept
        return {"shard": max(shard, 0), "offset": offset, "pass": self.number}

    def _keeping(self, samples: Iterable[Any]) -> Iterator[Any]:
        before = None
        for sample in samples:
            self.kept, before = before, (self.shard, self.offset)
            yield sample
        self.kept = None

    def _shards(self, first: int, shards: Iterable[Any]) -> Iterator[Any]:
        for shard in islice(shards, first, None):
            self.shard, self.offset = self.shard + 1, 0
            yield shard

    def _samples(self, skipped: int, samples: Iterable[Any]) -> Iterator[Any]:
        for number, sample in enumerate(samples):
            self.offset += 1
            if number >= skipped:
                yield sample
