"""One rank or several: what the arguments of a call become, given its ``parallel=``.

A call that fails on one of several ranks tells the others, which would wait for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import attrs
import torch

from pure_loop._internal.processes import rank, world_size
from pure_loop._internal.tracebacks import hide_own
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.algorithm import Algorithm
from pure_loop.data.group import Share
from pure_loop.distributed.parallel import Parallel, read_parallel, refuse_lone
from pure_loop.errors import DistributedError, ResumeError
from pure_loop.random import derive
from pure_loop.stages.engine import ONE_RANK, Engine
from pure_loop.state import State
from pure_loop.task import Task
from pure_loop.time import TimestampFields

if TYPE_CHECKING:
    from pure_loop.data.source import Source

P = ParamSpec("P")
T = TypeVar("T")

# Seconds for which a failing call looks for the others, where its own ``parallel=`` can't be read.
_DEFAULT = 300.0


def announced(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function with ``parallel=`` that raises on one of several ranks tell the others why."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _announce(kwargs.get("parallel"), function.__name__, error)
            hide_own(error)
            raise

    return called


def _announce(parallel: object, name: str, error: Exception) -> None:
    if not parallel or isinstance(error, DistributedError) or world_size() == 1:
        return  # what a launcher says can't be read, so no other rank can be found
    from pure_loop.distributed._rendezvous import Rendezvous, first_line  # with it comes torch.distributed

    seconds = parallel.seconds if isinstance(parallel, Parallel) else _DEFAULT
    text = f"raised {type(error).__name__} in its call of pl.{name}: {first_line(error)}"
    Rendezvous(rank(), world_size(), seconds).announce(text)


def algorithm_described(algorithm: Algorithm) -> str:
    """What has to be equal on all ranks of an algorithm: its name, its events, and its options, if it is a library's.

    What the user's functions refer to may differ between ranks, such as a rank's number.
    """
    options: dict[str, object] = {}
    for function in (function for listed in algorithm.handlers.values() for function in listed):
        if isinstance(function, FunctionType) and (function.__module__ or "").startswith("pure_loop."):
            options |= inspect.getclosurevars(function).nonlocals
    when = "" if algorithm.when is None else f", when={algorithm.when}"
    simple = {name: value for name, value in options.items() if isinstance(value, int | float | str | None)}
    listed = ", ".join(f"{name}={value!r}" for name, value in simple.items())
    return f"{algorithm!r}{when}" + (f" with {listed}" if listed else "")


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
    def of(cls, value: object) -> Together:
        """Read the ``parallel=`` argument.

        Raises:
            ArgumentError, ArgumentTypeError: it can't be read, or n processes would run n times what one is to run.
            DistributedError: what the launcher says can't be read, or not where rank 0 is.
        """
        parallel = read_parallel(value)
        if value is False:
            return cls(None)
        refuse_lone(parallel)
        return cls(None) if parallel is None or world_size() == 1 else cls(parallel, rank())

    @property
    def ranks(self) -> int:
        """How many there are."""
        return 1 if self.parallel is None else world_size()

    def device(self, device: torch.device | str | None) -> torch.device | str | None:
        """The device of this rank."""
        if self.parallel is None:
            return device
        from pure_loop.distributed.engines import device_of_rank  # with it comes torch.distributed

        rank_device: torch.device | str | None = device_of_rank(device)
        return rank_device

    def engine(self, state: State) -> Engine:
        """The engine for this State.

        Raises:
            ResumeError: there is one rank, and the State is sharded over several.
        """
        if self.parallel is None:
            if are_sharded(state.params):
                raise ResumeError(
                    "this State is sharded over several ranks, and there is one here: resume with parallel='shard' or "
                    "parallel='replicate' on as many ranks, or from state.module(), which all ranks gather together."
                )
            return ONE_RANK
        from pure_loop.distributed.engines import engine_of

        return engine_of(self.parallel, state.device)

    def sources(self, task: Task) -> Callable[..., Source]:
        """What makes a Source of a dataloader, for this rank's part of it."""
        from pure_loop.data.dataloaders import source  # which nothing but a run needs

        return source if self.parallel is None else partial(self._source, source, task, self.parallel)

    def _source(
        self,
        source: Callable[..., Source],
        task: Task,
        parallel: Parallel,
        dataloader: Any,
        *,
        seed: int,
        stream: str,
        **options: Any,
    ) -> Source:
        from pure_loop.distributed.engines import reads_its_own

        if not reads_its_own(parallel, dataloader, stream):
            layout = parallel.layout
            share = Share(layout.place(self.rank)[0], len(layout.ranks), task.samples, task.split)
            return source(dataloader, seed=seed, stream=stream, share=share, **options)
        # In an evaluation every sample counts, so none is left out.
        uneven = parallel.uneven if stream == "train" else "pad"
        data_rank, _ = parallel.layout.place(self.rank)
        own = derive(seed, "rank", data_rank) if data_rank else seed
        return source(dataloader, seed=own, stream=stream, uneven=uneven, **options)

    def beginning(
        self, engine: Engine, settings: Callable[[], Mapping[str, object]], *, empty: bool
    ) -> Callable[[State], State]:
        """What a fresh start does before INIT: ranks see that they are about to do the same; ``empty``: of a State
        without numbers, which are made."""
        if self.parallel is not None:
            return lambda state: engine.begin(state, settings(), empty=empty)
        if not empty:
            return lambda state: state
        from pure_loop.initial import initialised  # no other run needs it

        return initialised

    def meeting(
        self, engine: Engine, data: Source, settings: Callable[[], Mapping[str, object]], fresh: bool
    ) -> Callable[[State], State] | None:
        """What the ranks do after INIT: start from the same State."""
        if self.parallel is None:
            return None

        def meet(state: State) -> State:
            state = engine.start(state, settings(), fresh=fresh)
            data.length = engine.length(data.length, data.uneven)
            fields: TimestampFields = {"batches_per_epoch": data.length}
            return state.replace(
                timestamp=state.timestamp.replace(**fields),
                previous_timestamp=state.previous_timestamp.replace(**fields),
            )

        return meet
