"""Which samples of a dataset a batch of training has: by its dataloader's sampler, in the order of the run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset

from pure_loop.data.open import source
from pure_loop.state import State

__all__ = ["indices_of_batch"]


class _Positions(Dataset[int]):
    """A dataset as long as another one whose items are their positions."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return int(index)


def indices_of_batch(dataloader: Any, state: State, settings: Mapping[str, Any]) -> list[int] | None:
    """The indices in the dataset of the rows of a State's batch; None: the dataloader has none, or several ranks do.

    The sampler is drawn from as in the run, on a dataset of positions: no sample is read.
    """
    if not isinstance(dataloader, DataLoader) or dataloader.batch_sampler is None:
        return None
    if not hasattr(dataloader.dataset, "__len__") or settings.get("parallel") is not None:
        return None
    positions = DataLoader(_Positions(len(dataloader.dataset)), batch_sampler=dataloader.batch_sampler, collate_fn=list)
    per_step = settings.get("batches_per_step", 1)
    batches = source(positions, seed=state.seed, stream="train", batches_per_step=per_step)
    t = state.timestamp
    batch: Any = next(islice(batches.epoch(t.epoch, start=t.batch_in_epoch, seen=t.batch), 1), None)
    if batch is None:
        return None
    parts = batch if per_step > 1 else [batch]
    return [index for part in parts for index in part]
