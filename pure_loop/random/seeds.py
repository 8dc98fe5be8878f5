"""Random numbers as values: every seed is derived, none is carried along.

A seed is a hash of where it is used, ``derive(seed, "train", epoch, batch)``, so any batch of any
epoch can be made again on its own, in any process, without replaying what came before it. Code that
can't be handed a generator (a dropout layer, a dataset that augments) runs inside :class:`seeded` or
:class:`seeded_all`, which seed the global generators and put them back as they were. All threads of a
process share those, so threads take turns there.
"""

from __future__ import annotations

import gc
import random as _python
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from hashlib import blake2b
from operator import index
from types import ModuleType, TracebackType
from typing import Any, Protocol, TypeAlias

import torch

from pure_loop._internal.torch_private import mps_generator
from pure_loop.errors import ArgumentTypeError
from pure_loop.random.numpy_state import numpy_random, put_back, set_aside

__all__ = ["derive", "generator", "seeded", "seeded_all"]

Device: TypeAlias = torch.device | str | int | None

# Bound once: these three calls are most of what a guard costs, and it stands around every microbatch.
_collects, _collect, _keep_garbage = gc.isenabled, gc.enable, gc.disable
_set_cpu = torch.default_generator.set_state
_seed_cpu = torch.default_generator.manual_seed

_PLAIN = frozenset((int, str))
_HOST: frozenset[Device] = frozenset((None, "cpu", torch.device("cpu")))


class Tracer(Protocol):
    """What stands in for generators while a step is made into a graph, which has other seeds at each call."""

    def computed(self, function: Callable[..., int], *value: object) -> int:
        """What a function gives, of numbers of the step."""

    def generator(self, seed: int, device: torch.device | str) -> torch.Generator:
        """A generator that starts there in each step."""

    def seeded(self, seed: int, device: Device) -> AbstractContextManager[None]:
        """What :class:`seeded` does."""


# Of the code that runs; and whether Python's and NumPy's generators are seeded for it.
tracer: ContextVar[Tracer | None] = ContextVar("tracer", default=None)
seeds_hosts: ContextVar[bool] = ContextVar("seeds_hosts", default=False)


def derive(seed: int, *path: int | str) -> int:
    """A seed for one place: the same on every platform and in every process, different for every path.

    Args:
        seed: the seed of the run; any integer.
        path: where the seed is used, from the general to the particular; ``3`` and ``"3"`` differ.

    Returns:
        An integer from 0 to 2**63 - 1 (a 64-bit BLAKE2b hash without its lowest bit), which ``torch``,
        ``random`` and, below 2**32, ``numpy`` accept as a seed.

    Raises:
        ArgumentTypeError: a part is neither an integer nor a string.

    >>> derive(0, "train", 2, 7)
    8206476173863268342
    >>> derive(0, "train", 2, 7) == derive(derive(0, "train"), 2, 7)
    False
    """
    if _PLAIN.issuperset(map(type, path)) and type(seed) is int:
        return _hash((seed, *path))
    tracing = tracer.get()
    return _derive(seed, *path) if tracing is None else tracing.computed(_derive, seed, *path)


def _derive(seed: object, *path: object) -> int:
    """:func:`derive` of whatever is an integer."""
    return _hash(tuple(_plain(part, seed, path) for part in (seed, *path)))


def _hash(parts: tuple[int | str, ...]) -> int:
    # ascii() of a tuple of ints and strings is injective and has the same text in every Python.
    return int.from_bytes(blake2b(ascii(parts).encode(), digest_size=8).digest(), "little") >> 1


def _plain(part: Any, seed: object, path: tuple[object, ...]) -> int | str:
    if isinstance(part, str):
        return str(part)
    try:
        return index(part)
    except TypeError:
        raise ArgumentTypeError(
            f"derive({', '.join(map(repr, (seed, *path)))}): {part!r} is a {type(part).__name__}; "
            "a seed is derived from integers and strings, so write derive(0, 'train', 3)"
        ) from None


def generator(seed: int, *path: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator that starts at :func:`derive` of the same arguments.

    >>> torch.randint(100, (3,), generator=generator(0, "noise", 1)).tolist()
    [65, 46, 94]
    """
    start = derive(seed, *path)
    if (tracing := tracer.get()) is not None:
        return tracing.generator(start, device)
    return torch.Generator(device).manual_seed(start)


def generators_of(device: Device) -> tuple[torch.Generator, ...]:
    """The default generator that kernels on ``device`` draw from, besides that of the CPU."""
    place = torch.device("cpu" if device is None else device)
    if place.type in ("cpu", "meta"):
        return ()
    if place.type == "mps":
        return (mps_generator(),)
    backend: Any = getattr(torch, place.type)
    if not backend.is_initialized():
        backend.init()
    return (backend.default_generators[backend.current_device() if place.index is None else place.index],)


def _initialized_accelerators() -> tuple[torch.Generator, ...]:
    """The default generators of every accelerator that this process already uses."""
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            return tuple(backend.default_generators)
    return ()


# The global generators can serve one thread at a time; the lock is the thread's own inside a nested `seeded`.
rng_lock = threading.RLock()


def push_cpu_seed(seed: int) -> torch.Tensor:
    """What :class:`seeded` does on a CPU outside of traces; :func:`pop_cpu_seed` takes what this gives, in any case."""
    rng_lock.acquire()
    before = state_of(torch.default_generator)
    _seed_cpu(seed)
    return before


def state_of(generator: torch.Generator) -> torch.Tensor:
    """The state of a generator.

    torch holds the generator's lock while it makes the tensor. The garbage collector, which that may start, may close
    a user's generator. Its end is seeded as well, and would wait for the lock for ever: nothing is collected meanwhile.
    """
    collects = _collects()
    _keep_garbage()
    try:
        return generator.get_state()
    finally:
        if collects:
            _collect()


def pop_cpu_seed(before: torch.Tensor) -> None:
    _set_cpu(before)
    rng_lock.release()


class seeded:  # noqa: N801 - reads as a statement: with seeded(...)
    """Seeds torch's global generator inside a ``with``, and puts it back as it was, whatever happens inside.

    Python's and NumPy's are left alone: :class:`seeded_all` seeds them, too.

    Args:
        seed: from 0 to 2**63 - 1, usually from :func:`derive`. The CPU generator uses its low 32 bits.
        device: the accelerator of which the generator is seeded too; None or a CPU: the CPU's alone.

    >>> before = torch.get_rng_state()
    >>> with seeded(derive(0, "dropout", 3)):
    ...     first = torch.rand(2)
    >>> with seeded(derive(0, "dropout", 3)):
    ...     torch.equal(first, torch.rand(2))
    True
    >>> torch.equal(before, torch.get_rng_state())
    True
    """

    __slots__ = ("_accelerators", "_cpu", "_device", "_saved", "_seed")

    # The CPU's state, None in a trace; and those of accelerators, or what the trace puts instead.
    _cpu: torch.Tensor | None
    _saved: Any

    def __init__(self, seed: int, device: Device = None) -> None:
        self._seed = seed
        self._device = device
        self._accelerators = () if device in _HOST else generators_of(device)

    def __enter__(self) -> None:
        if (tracing := tracer.get()) is not None:
            self._cpu, self._saved = None, tracing.seeded(self._seed, self._device)
            self._saved.__enter__()
            return
        self._cpu = push_cpu_seed(self._seed)
        if self._accelerators:
            self._saved = list(map(state_of, self._accelerators))
            for accelerator in self._accelerators:
                accelerator.manual_seed(self._seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cpu is None:
            traced, self._saved = self._saved, None
            traced.__exit__(kind, error, trace)
            return
        if self._accelerators:
            for generator, state in zip(self._accelerators, self._saved, strict=True):
                generator.set_state(state)
        pop_cpu_seed(self._cpu)


class seeded_torch(seeded):  # noqa: N801 - as above
    """:class:`seeded` on every device in use, for code that loads data and draws from torch alone."""

    __slots__ = ()

    def __init__(self, seed: int) -> None:
        # Of a number of a traced step it is the value: what the hosts' generators give goes into the graph as it is.
        self._seed = index(seed)
        self._accelerators = _initialized_accelerators()
        self._device = self._accelerators[0].device if self._accelerators else None


class seeded_all(seeded_torch):  # noqa: N801 - as above
    """:class:`seeded` for code of unknown habits: Python's ``random`` and NumPy's too, on every device in use.

    It costs ten times what :class:`seeded` does (Python's generator is copied as 625 integers, and to seed it and
    NumPy's is to compute 624 words each), so the library uses it for code that is neither torch's nor its own.

    >>> import random
    >>> with seeded_all(7):
    ...     first = random.random()
    >>> with seeded_all(7):
    ...     first == random.random()
    True
    """

    __slots__ = ("_numpy", "_numpy_state", "_python_state", "_token")

    def __enter__(self) -> None:
        rng_lock.acquire()
        self._numpy = numpy_random()
        self._python_state = _python.getstate()
        if self._numpy is not None:
            self._numpy_state = set_aside(self._numpy)
        super().__enter__()
        self._token = seeds_hosts.set(True)
        _reseed_hosts(self._seed, self._numpy)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        seeds_hosts.reset(self._token)
        _python.setstate(self._python_state)
        if self._numpy is not None:
            put_back(self._numpy, self._numpy_state)
        rng_lock.release()


class SeededHosts(seeded_all):
    """:class:`seeded_all` with the generator of one device, for a stage in which code of the user's runs."""

    __slots__ = ()

    def __init__(self, seed: int, device: Device) -> None:
        seeded.__init__(self, seed, device)


class seeded_apart(seeded_all):  # noqa: N801 - as above
    """:class:`seeded_all` for code that may wait for another thread, which draws meanwhile: it doesn't take turns.

    What the other thread computes with the library is seeded by itself. Draws of both outside of it mix.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        # As often as it was acquired: by this class's base, and for torch's generator.
        rng_lock.release()
        rng_lock.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rng_lock.acquire()
        rng_lock.acquire()
        super().__exit__(kind, error, trace)


def _reseed_hosts(seed: int, numpy: ModuleType | None) -> None:
    _python.seed(seed)
    if numpy is not None:
        numpy.seed(seed & 0xFFFFFFFF)


def reseed(seed: int) -> None:
    """Seed torch's CPU generator, Python's and NumPy's for good: for a worker process, which restores nothing."""
    _seed_cpu(seed)
    _reseed_hosts(seed, numpy_random())
