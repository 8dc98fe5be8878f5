"""Python's and NumPy's global generators in a user's forward and loss: whether they are drawn from, and seeding them.

To seed them and put them back takes as long as a tenth of a small model's step, so it is done only for code that may
draw from them. Code may where a name says so (:func:`may_use_rng`), and where the first call of a stage did.
"""

from __future__ import annotations

import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.torch_private import DispatchMode, no_dispatch, without_compiler
from pure_loop.errors import ImpurityError
from pure_loop.model.structure import children
from pure_loop.random.seeds import Device, movements, seeded, seeded_all, state_of

__all__ = ["Checked", "Observed", "SeededHosts", "has_moved", "host_state", "is_harmless", "may_use_rng", "numpy_state"]

# Whose functions draw from neither generator, but for those of `random` and `numpy.random` themselves.
_HARMLESS = frozenset({*sys.stdlib_module_names, "attr", "attrs", "builtins", "numpy", "optree", "pure_loop", "torch"})
_GENERATORS = ("random", "numpy.random", "numpy.random.mtrand")
_ATOMIC = (type(None), bool, int, float, complex, str, bytes, Tensor, types.BuiltinFunctionType)
# Objects to look at; more than that may do anything.
_MOST = 20_000


def may_use_rng(values: Iterable[Any]) -> tuple[bool, bool]:
    """Whether the code that these objects lead to may draw from Python's or NumPy's global generator, and has a user's.

    It reads names: those of the code of a function, of what it finds under global names, and of the classes of objects.
    What is called by a name that is computed, or handed over in a batch, isn't found.

    Args:
        values: functions, modules and other objects.

    >>> may_use_rng([torch.nn.Dropout()]), may_use_rng([random.shuffle])
    ((False, False), (True, True))
    """
    pending, seen, own = list(values), dict[int, Any](), False
    while pending:
        value = pending.pop()
        if isinstance(value, types.BuiltinMethodType) and _is_generator(value.__self__):
            return True, True
        if isinstance(value, _ATOMIC) or id(value) in seen:
            continue
        if len(seen) >= _MOST:
            return True, True
        seen[id(value)] = value
        if _is_generator(value) or (isinstance(value, types.ModuleType) and value.__name__ in _GENERATORS):
            return True, True
        if isinstance(value, types.FunctionType):
            if _root_of(value) not in _HARMLESS:
                own = True
                names = set(_names_in(value.__code__))
                if "random" in names:
                    return True, True
                pending += _under(names, value.__globals__)
        elif isinstance(value, type):
            for cls in value.__mro__:
                if _root_of(cls) not in _HARMLESS:
                    own = True
                    pending += _functions_of(cls)
        elif not isinstance(value, types.ModuleType):
            pending.append(type(value))
        pending += children(value)
    return False, own


def _is_generator(value: Any) -> bool:
    """Whether this is one of the two global generators, whose methods are what `random` and `numpy.random` have."""
    if value is vars(random)["_inst"]:
        return True
    numpy: Any = sys.modules.get("numpy.random")
    return numpy is not None and value is numpy.mtrand._rand


def _root_of(value: Any) -> str:
    return str(getattr(value, "__module__", None)).partition(".")[0]


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _under(names: set[str], namespace: dict[str, Any]) -> Iterator[Any]:
    """What a function finds under its global names, and in the modules among them."""
    for name in names:
        value = namespace.get(name, sys.modules.get(name))
        if not isinstance(value, types.ModuleType) or value.__name__ in _GENERATORS:
            yield value
        elif value.__name__.partition(".")[0] not in _HARMLESS:
            yield from (vars(value)[item] for item in names if item in vars(value))


def _functions_of(cls: type) -> Iterator[Any]:
    for value in vars(cls).values():
        if isinstance(value, staticmethod | classmethod):
            yield value.__func__
        elif isinstance(value, property):
            yield from (value.fget, value.fset)
        elif callable(value):
            yield value


def is_harmless(module: str) -> bool:
    """Whether functions of a module of this name draw from neither generator, but for those of the generators."""
    return module.partition(".")[0] in _HARMLESS or module.startswith("namedtuple_")


def host_state() -> tuple[Any, bytes]:
    """The states of Python's and NumPy's global generators, to be compared."""
    return random.getstate(), numpy_state()


def has_moved(before: tuple[Any, bytes]) -> bool:
    """Whether one of these generators has another state than before; one that was not imported then has not moved."""
    python, numpy = host_state()
    return python != before[0] or (before[1] != b"" and numpy != before[1])


def numpy_state() -> bytes:
    """The state of NumPy's global generator, to be compared; empty where ``numpy.random`` is not imported."""
    get_state: Any = getattr(sys.modules.get("numpy.random"), "get_state", None)  # None, too, while it is imported
    return b"" if get_state is None else pickle.dumps(get_state(legacy=False))


class SeededHosts(seeded_all):
    """:class:`seeded_all` with the generator of one device."""

    def __init__(self, seed: int, device: Device) -> None:
        super().__init__(seed)
        seeded.__init__(self, self._seed, device)


class Observed(SeededHosts):
    """The same, and tells whether something was drawn from Python's or NumPy's generator."""

    def __init__(self, seed: int, device: Device, tell: Callable[[bool], None]) -> None:
        super().__init__(seed, device)
        self._tell = tell

    def __enter__(self) -> None:
        super().__enter__()
        self._before = host_state()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        moved = has_moved(self._before)
        super().__exit__(kind, error, trace)
        self._tell(moved)


class Checked:
    """A stage under ``strict=True``, inside of a guard of its generators: it alone draws from those that are seeded.

    Args:
        guard: what seeds them.
        stage: for errors.
        batch: the number of the batch, for errors.
        hosts: whether Python's and NumPy's are seeded; if not, nothing may be drawn from them.
        device: the one whose generator is seeded, besides the CPU's.
        alone: whether to see to it that no other thread draws from torch's generators.
    """

    def __init__(self, guard: Any, stage: str, batch: int, *, hosts: bool, device: torch.device, alone: bool) -> None:
        self._guard, self._stage, self._batch, self._hosts = guard, stage, batch, hosts
        self._own = _OwnDraws(device) if alone else None

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(self._guard)
        self._before = None if self._hosts else host_state()
        if self._own is not None:
            self._stack.enter_context(self._own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        moved = self._before is not None and has_moved(self._before)
        if self._own is not None:
            self._own.look()
        self._stack.__exit__(kind, error, trace)
        if kind is not None:
            return
        if moved:
            raise ImpurityError(
                f"the {self._stage} of batch {self._batch} drew from Python's or NumPy's global generator, which is "
                "seeded only for code in which that can be seen, or that does so in its first call. Draw from torch's, "
                "or from numpy.random.default_rng(seed) with a seed from torch.randint."
            )
        if self._own is not None and self._own.disturbed:
            raise ImpurityError(
                f"the state of torch's global generator changed during the {self._stage} of batch {self._batch}, and "
                f"no operation of the {self._stage} had changed it: another thread draws from it or seeds it, so that "
                "the dropout of this batch can't be had again. Give that thread a torch.Generator() of its own, and "
                "draw with generator=."
            )


# Methods of a generator that move it without a draw.
_MOVES = frozenset({"manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"})


@without_compiler
class _OwnDraws(DispatchMode):  # type: ignore[misc]
    """Follows the states of torch's global generators from one operation of this thread to the next.

    Attributes:
        disturbed: whether one has moved without an operation that draws.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self.disturbed = False

    def __enter__(self) -> Any:
        from pure_loop._internal.profiling import calls_watched

        self._last = self._now()
        self._token = movements.set(self.moved)
        self._stack = ExitStack()
        self._stack.enter_context(calls_watched(self._seen))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        movements.reset(self._token)
        self._stack.close()
        super().__exit__(*exception)

    def _now(self) -> list[Tensor]:
        with no_dispatch():
            return list(map(state_of, self._generators))

    def look(self) -> None:
        """Notice a state that has moved since."""
        now = self._now()
        with no_dispatch():
            if not all(map(torch.equal, self._last, now)):
                self.disturbed = True
        self._last = now

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        """A call of this thread: of a method that seeds one of these generators, or sets its state."""
        if event == "c_return" and argument.__name__ in _MOVES:
            owner = getattr(argument, "__self__", None)
            if any(owner is generator for generator in self._generators):
                self.moved()

    def moved(self) -> None:
        """This thread has seeded a generator, or put it back."""
        self._last = self._now()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            self._last = self._now()
        else:
            self.look()
        return result
