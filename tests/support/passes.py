"""Samplers, datasets and loaders that count their passes, each in another way."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

__all__ = [
    "COUNTERS",
    "Countdown",
    "Counted",
    "CountingBatches",
    "CountingLoader",
    "CountingStream",
    "CountingStreamAtTheEnd",
    "Items",
    "order_of",
]


def order_of(n: int, number: int) -> list[int]:
    """The order of a pass: a permutation that is another one in each of many passes."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(number)).tolist()


@dataclass
class Progress:
    passes: int = 0


@attrs.define
class Slotted:
    passes: int = 0


class At:
    """How many passes there were, kept in one of many ways."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.number = 0
        self.held = [0]
        self.mapping = {"passes": 0}
        self.ring = deque(range(100))
        self.marks: set[int] = set()
        self.tensor = torch.tensor(0)
        self.array = np.zeros(3, dtype=np.int64)
        self.ticks = itertools.count()
        self.steps = itertools.count(0, 5)
        self.space = SimpleNamespace(passes=0)
        self.record = Progress()
        self.slotted = Slotted()
        self.generator = torch.Generator()

    def next(self) -> int:
        """The number of the pass that begins."""
        passes = getattr(self, f"_{self.kind}")()
        assert isinstance(passes, int)
        return passes

    def _number(self) -> int:
        self.number += 1
        return self.number - 1

    def _list(self) -> int:
        self.held[0] += 1
        return self.held[0] - 1

    def _growing(self) -> int:
        self.held.append(len(self.held))
        return self.held[-2]

    def _dict(self) -> int:
        self.mapping["passes"] += 1
        return self.mapping["passes"] - 1

    def _ring(self) -> int:
        self.ring.rotate(-1)
        return self.ring[-1]

    def _set(self) -> int:
        self.marks.add(len(self.marks))
        return len(self.marks) - 1

    def _tensor(self) -> int:
        self.tensor += 1
        return int(self.tensor) - 1

    def _array(self) -> int:
        self.array += 1
        return int(self.array[0]) - 1

    def _ticks(self) -> int:
        return next(self.ticks)

    def _steps(self) -> int:
        return next(self.steps) // 5

    def _space(self) -> int:
        self.space.passes += 1
        return int(self.space.passes) - 1

    def _record(self) -> int:
        self.record.passes += 1
        return self.record.passes - 1

    def _slotted(self) -> int:
        self.slotted.passes += 1
        return self.slotted.passes - 1

    def _seeded(self) -> int:
        # A generator that is seeded by the number of the pass, and then says it.
        self.number += 1
        self.generator.manual_seed(self.number)
        return int(torch.randint(2**31, (), generator=self.generator))

    def _python(self) -> int:
        self.number += 1
        return random.Random(self.number).randrange(1000)


COUNTERS = [
    *("number", "list", "growing", "dict", "ring", "set", "tensor", "array", "ticks", "steps"),
    *("space", "record", "slotted", "seeded", "python"),
]


class Counted(At, Sampler[int]):
    """A sampler that counts at the beginning of a pass."""

    def __init__(self, n: int, kind: str) -> None:
        super().__init__(kind)
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.n, self.next()))


class CountedAtTheEnd(Counted):
    def __iter__(self) -> Iterator[int]:
        yield from order_of(self.n, self.number)
        self.number += 1


class Consumed(Sampler[int]):
    """Goes on where it was, as samplers do that know how many samples were seen."""

    def __init__(self, n: int) -> None:
        self.n, self.consumed = n, 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            epoch, position = divmod(self.consumed, self.n)
            self.consumed += 1
            yield order_of(self.n, epoch)[position]


class Itself(Sampler[int]):
    """A sampler that is its own iterator."""

    def __init__(self, n: int) -> None:
        self.n, self.passes, self.left = n, 0, deque[int]()

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.left = deque(order_of(self.n, self.passes))
        self.passes += 1
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.popleft()


class Slots:
    """No Sampler, and without a ``__dict__``."""

    __slots__ = ("n", "passes")

    def __init__(self, n: int) -> None:
        self.n, self.passes = n, 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(order_of(self.n, self.passes))


class OfTheClass(Sampler[int]):
    """Its counter is an attribute of the class until the first pass, when it becomes one of the sampler."""

    passes = 0
    n = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(order_of(self.n, self.passes))


class Shuffling(Sampler[int]):
    """Reverses and rotates what it holds, in place."""

    def __init__(self, n: int) -> None:
        self.order, self.array = list(range(n)), np.arange(n)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        self.order.append(self.order.pop(0))
        self.array[:] = np.roll(self.array, 2)
        return iter([self.order[int(i)] for i in self.array])


class Epochs(Counted):
    """Has a ``set_epoch`` and a counter."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.n, 10 * self.epoch + self.next()))


class CountingBatches:
    """A batch sampler that counts, around a sampler that counts."""

    def __init__(self, sampler: Any, size: int) -> None:
        self.sampler, self.size, self.passes = sampler, size, 0

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        shift = self.passes % len(indices)
        self.passes += 1
        indices = indices[shift:] + indices[:shift]
        yield from (indices[i : i + self.size] for i in range(0, len(indices), self.size))


Countdown: dict[str, Callable[[int], Any]] = {
    **{kind: lambda n, kind=kind: Counted(n, kind) for kind in COUNTERS},  # type: ignore[misc]
    "at the end": lambda n: CountedAtTheEnd(n, "number"),
    "consumed": Consumed,
    "itself": Itself,
    "slots": Slots,
    "of the class": lambda n: type("OfTheClass", (OfTheClass,), {"n": n})(),
    "in place": Shuffling,
    "set_epoch": lambda n: Epochs(n, "number"),
}


class Items(Dataset[Any]):
    """Counts its loadings."""

    def __init__(self, n: int) -> None:
        self.n, self.loads = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loads += 1
        return torch.tensor(float(index))


class CountingStream(At, IterableDataset[Any]):
    def __init__(self, n: int, kind: str) -> None:
        super().__init__(kind)
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        yield from map(torch.tensor, order_of(self.n, self.next()))


class CountingStreamAtTheEnd(CountingStream):
    def __iter__(self) -> Iterator[Any]:
        yield from map(torch.tensor, order_of(self.n, self.number))
        self.number += 1


class CountingLoader(DataLoader[Any]):
    """A DataLoader that counts itself."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        for batch in super().__iter__():
            yield batch, self.passes
