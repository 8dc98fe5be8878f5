"""What ``strict=True`` sees to in a forward or loss: no other thread draws from torch's generators or seeds them."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.torch_private import DispatchMode, no_dispatch, without_compiler
from pure_loop.errors import ImpurityError
from pure_loop.random.seeds import movements, state_of

__all__ = ["CheckedDraws"]


class CheckedDraws:
    """A stage under ``strict=True``, inside of a guard of its generators: it alone draws from torch's.

    Args:
        guard: what seeds them.
        stage: for errors.
        batch: the number of the batch, for errors.
        device: the one whose generator is seeded, besides the CPU's.
    """

    def __init__(self, guard: AbstractContextManager[None], stage: str, batch: int, device: torch.device) -> None:
        self._guard, self._stage, self._batch = guard, stage, batch
        self._own = _OwnDraws(device)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._guard)
            stack.enter_context(self._own)
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own.look()
        self._stack.__exit__(kind, error, trace)
        if kind is None and self._own.disturbed:
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
