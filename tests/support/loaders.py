"""Dataloaders of all kinds, of data that a test can foretell."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, TensorDataset, default_collate, get_worker_info


def noise() -> list[float]:
    """Something of every global generator."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand()), float(np.random.randn())]


class Augmented(Dataset[Any]):
    """Each sample is noisy, and each loading is counted."""

    def __init__(self, n: int, broken: int | None = None) -> None:
        self.n, self.broken, self.loads = n, broken, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        if index == self.broken:
            noise()
            raise LookupError(f"sample {index}")
        self.loads += 1
        return torch.tensor([float(np.sum(index)), *noise()], dtype=torch.float64), f"name {index}"


class Together(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Custom(Sampler[int]):
    """Draws its order from a global generator, or from one of its own, or shuffles what it holds."""

    def __init__(self, n: int, kind: str) -> None:
        self.kind = kind
        self.held = list(range(n))
        self.array = np.arange(n)
        self.torch = torch.Generator().manual_seed(1)
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.legacy = np.random.RandomState(1)
        self.nested = {"deep": [list(range(n))]}
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.held)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        n = len(self.held)
        if self.kind == "lazy":
            for _ in range(n):
                yield random.choice([int(np.random.randint(n)), int(torch.randint(n, ()))])
        elif self.kind == "in place":
            random.shuffle(self.held)
            np.random.shuffle(self.array)
            random.shuffle(self.nested["deep"][0])
            yield from [
                (a + int(b) + c) % n for a, b, c in zip(self.held, self.array, self.nested["deep"][0], strict=True)
            ]
        elif self.kind == "own":
            a = torch.randperm(n, generator=self.torch).tolist()
            b, c = self.numpy.permutation(n), self.legacy.permutation(n)
            yield from [(a[i] + int(b[i]) + int(c[i]) + self.python.randrange(n)) % n for i in range(n)]
        else:
            yield from torch.randperm(n, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class CustomBatches:
    """A batch sampler that is no Sampler, of batches of random sizes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        left = list(np.random.permutation(self.n))
        while left:
            k = random.randint(1, 3)
            yield [int(i) for i in left[:k]]
            left = left[k:]


class Stream(IterableDataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for i in range(self.n) if info is None else range(info.id, self.n, info.num_workers):
            yield torch.tensor([float(i), float(self.epoch), *noise()], dtype=torch.float64)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


class Again:
    """An iterable of batches that is no DataLoader."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.n):
            yield torch.tensor([float(i), *noise()])


class Made:
    """A sequence by the old protocol: its batches are made when asked for."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> Any:
        return torch.tensor([float(position), *noise()])


def noisy_collate(samples: list[Any]) -> Any:
    return [default_collate(samples), torch.tensor(noise())]


def table(n: int) -> TensorDataset:
    image = torch.arange(n * 12.0).reshape(n, 3, 2, 2).to(memory_format=torch.channels_last)
    return TensorDataset(image, torch.arange(n))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def snapshot() -> list[Any]:
    name, key, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), name, key.tolist(), rest]


def scramble(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    np.random.randn()
