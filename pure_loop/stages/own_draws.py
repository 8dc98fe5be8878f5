"""What ``strict=True`` sees to in a forward or loss: no other thread draws from torch's generators or seeds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.torch_private import DispatchMode, no_dispatch, without_compiler
from pure_loop.errors import ImpurityError
from pure_loop.random.seeds import generators_of, state_of

__all__ = ["checked_draws"]


@contextmanager
def checked_draws(guard: AbstractContextManager[None], stage: str, batch: int, device: torch.device) -> Iterator[None]:
    """A stage under ``strict=True``, inside of a guard of its generators: it alone draws from torch's.

    Args:
        guard: what seeds them.
        stage, batch: for errors.
        device: the one with the generator that is seeded, besides the CPU's.
    """
    from pure_loop._internal.frames import calls_watched

    with guard:
        own = _OwnDraws(device)
        with calls_watched(own.see), own:
            yield
            own.look()
    if own.disturbed:
        raise ImpurityError(
            f"the state of torch's global generator changed during the {stage} of batch {batch}, and no operation of "
            f"the {stage} had changed it: another thread draws from it or seeds it, so that the dropout of this batch "
            "can't be had again. Give that thread a torch.Generator() of its own, and draw with generator=."
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
        self._generators = (torch.default_generator, *generators_of(device))
        self._last = self._now()
        self.disturbed = False

    def _now(self) -> list[Tensor]:
        with no_dispatch():
            return list(map(state_of, self._generators))

    def look(self) -> None:
        """Notice a state that has moved since."""
        states = self._now()
        with no_dispatch():
            if not all(map(torch.equal, self._last, states)):
                self.disturbed = True
        self._last = states

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        """A call of this thread: of a method that seeds one of these generators, or sets its state."""
        if event == "c_return" and argument.__name__ in _MOVES:
            owner = getattr(argument, "__self__", None)
            if any(owner is generator for generator in self._generators):
                self._last = self._now()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            self._last = self._now()
        else:
            self.look()
        return result
