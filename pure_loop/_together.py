"""One rank or several: what the arguments of a call become, given its ``parallel=``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from pure_loop._parts import is_part
from pure_loop.distributed.parallel import Parallel, rank, read_parallel, world_size
from pure_loop.engine import ONE_RANK, Engine
from pure_loop.errors import ResumeError
from pure_loop.random import derive
from pure_loop.sources import Share, Source, source
from pure_loop.state import State
from pure_loop.task import Task

__all__ = ["Together"]


@attrs.frozen
class Together:
    """What several ranks change in a call.

    Attributes:
        parallel: what the user chose; None where there is one rank, whatever was chosen.
        rank: this process.
    """

    parallel: Parallel | None
    rank: int = 0

    @classmethod
    def of(cls, given: Any) -> Together:
        """Read the ``parallel=`` argument.

        Raises:
            ArgumentError, ArgumentTypeError: it can't be read.
        """
        parallel = read_parallel(given)
        return cls(None) if parallel is None or world_size() == 1 else cls(parallel, rank())

    def device(self, device: Any) -> Any:
        """The device of this rank."""
        if self.parallel is None:
            return device
        from pure_loop.distributed.engines import device_of_rank  # with it comes torch.distributed

        return device_of_rank(device)

    def engine(self, state: State) -> Engine:
        """The engine for this State.

        Raises:
            ResumeError: there is one rank, and the State is in parts of several.
        """
        if self.parallel is None:
            if any(map(is_part, state.params.values())):
                raise ResumeError(
                    "this State is in parts, of which every rank holds one: go on with parallel='shard' on as many "
                    "ranks, with parallel='replicate', or with state.module(), which all ranks gather together."
                )
            return ONE_RANK
        from pure_loop.distributed.engines import engine_of

        return engine_of(self.parallel, state.device)

    def sources(self, task: Task) -> Callable[..., Source]:
        """What makes a Source of a dataloader, for this rank's part of it."""
        return source if self.parallel is None else partial(self._source, task, self.parallel)

    def _source(
        self, task: Task, parallel: Parallel, dataloader: Any, *, seed: int, stream: str, **options: Any
    ) -> Source:
        from pure_loop.distributed.engines import reads_its_own

        if not reads_its_own(parallel, dataloader):
            share = Share(self.rank, world_size(), task.samples, task.split)
            return source(dataloader, seed=seed, stream=stream, share=share, **options)
        # In an evaluation every sample counts, so none is left out.
        uneven = parallel.uneven if stream == "train" else "pad"
        own = derive(seed, "rank", self.rank) if self.rank else seed
        return source(dataloader, seed=own, stream=stream, uneven=uneven, **options)

    def meeting(
        self, engine: Engine, data: Source, settings: Mapping[str, Any], fresh: bool
    ) -> Callable[[State], State] | None:
        """What the ranks do first: see that they are about to do the same, and start from the same State."""
        if self.parallel is None:
            return None
        same = {name: re.sub(r" at 0x[0-9a-f]+", "", str(value)) for name, value in settings.items()}

        def meet(state: State) -> State:
            state = engine.start(state, same, fresh=fresh)
            data.length = engine.length(data.length, data.uneven)
            known = {"batches_per_epoch": data.length}
            return state.replace(
                timestamp=state.timestamp.replace(**known),
                previous_timestamp=state.previous_timestamp.replace(**known),
            )

        return meet
