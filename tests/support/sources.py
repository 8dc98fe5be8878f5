"""Real sources of data, each with the way to resume that its library has, and how many samples they read."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.conftest import THOROUGH

# In the thorough tier a run is long enough to stop at a hundred batches of it.
SAMPLES, BATCH = 330 if THOROUGH else 90, 5
# How many samples were read in this process.
READ = [0]


def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
    inputs = torch.tensor([[float(row["x"] if isinstance(row, dict) else row)] for row in rows])
    return inputs, inputs.clone()


def read(row: Any) -> Any:
    READ[0] += 1
    return row


class Table(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return int(read(index))


class Lines(IterableDataset[int]):
    """A stream that goes on where it was."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < SAMPLES:
            self.at += 1
            yield read(self.at - 1)
        self.at = 0


class Stateful(Lines):
    """It, with the protocol."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Noisy(Stateful):
    """It, with random numbers added, which are no part of its state."""

    def __iter__(self) -> Iterator[Any]:
        return (value + torch.rand(()).item() for value in super().__iter__())


def torchdata(dataset: Any = Stateful, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(dataset(), **{"batch_size": BATCH, "collate_fn": collate, **options})


def _rows(shards: int = 3) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets.Dataset.from_dict({"x": list(range(SAMPLES))}).to_iterable_dataset(num_shards=shards).map(read)


def hugging_face(buffer: int = 0) -> DataLoader[Any]:
    rows = _rows()
    return DataLoader(rows.shuffle(seed=0, buffer_size=buffer) if buffer else rows, BATCH, collate_fn=collate)


def _grain(*, streamed: bool) -> Any:
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(SAMPLES).seed(0).shuffle().map(read)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = dataset.to_iter_dataset(options) if streamed else dataset
    return dataset.batch(BATCH, batch_fn=collate)


@cache
def _shards() -> list[str]:
    folder = Path(tempfile.mkdtemp())
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(shard * SAMPLES // 3, (shard + 1) * SAMPLES // 3):
                content = json.dumps({"x": number}).encode()
                info = tarfile.TarInfo(f"{number:06d}.json")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return [str(folder / f"{shard}.tar") for shard in range(3)]


def _decoded(row: Any) -> Any:
    return read(row["json"])


def _grain_loader() -> Any:
    grain = pytest.importorskip("grain")
    rows = grain.sources.RangeDataSource(0, SAMPLES, 1)
    sharding = grain.sharding.NoSharding()
    sampler = grain.samplers.IndexSampler(SAMPLES, shard_options=sharding, shuffle=True, num_epochs=1, seed=0)
    return grain.DataLoader(data_source=rows, sampler=sampler, operations=[grain.transforms.Batch(BATCH)])


def web_dataset(buffer: int = 0) -> DataLoader[Any]:
    webdataset = pytest.importorskip("webdataset")
    dataset = webdataset.WebDataset(_shards(), shardshuffle=False)
    dataset = (dataset.shuffle(buffer, seed=0) if buffer else dataset).decode().map(_decoded)
    return DataLoader(dataset, batch_size=BATCH, collate_fn=collate)


def _web_batches() -> Any:
    webdataset = pytest.importorskip("webdataset")
    dataset = webdataset.WebDataset(_shards(), shardshuffle=3, detshuffle=True, seed=4)
    return dataset.decode().map(_decoded).batched(BATCH, collation_fn=collate)


_WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}

SOURCES: dict[str, Callable[[], Any]] = {
    "indices": lambda: DataLoader(Table(), BATCH, shuffle=True, collate_fn=collate),
    "stateful": lambda: DataLoader(Stateful(), BATCH, collate_fn=collate),
    "torchdata": torchdata,
    "torchdata, workers": partial(torchdata, **_WORKERS),
    "hugging face": hugging_face,
    "webdataset": web_dataset,
    "grain, map": partial(_grain, streamed=False),
    "grain, iter": partial(_grain, streamed=True),
}
# What reads ahead in each pass.
READ_AHEAD = frozenset({"grain, map"})
IN_WORKERS = frozenset({"torchdata, workers"})

MORE: dict[str, Callable[[], Any]] = {
    "torchdata, indices": partial(torchdata, Table, shuffle=True),
    "torchdata, indices in workers": partial(torchdata, Table, shuffle=True, **_WORKERS),
    "torchdata, hugging face in workers": partial(torchdata, _rows, **_WORKERS),
    "hugging face, shards in another order": partial(hugging_face, 1),
    "webdataset, batches of shards in another order": _web_batches,
    "grain, loader": _grain_loader,
    "iterator": lambda: iter(SOURCES["grain, iter"]()),
}
