"""How ranks talk: small exchanges of numbers, and an error on every rank, with names, when one of them fails.

A rank that fails reports where it was and breaks its connections, so that the ranks that wait for it wake up at
once; one that was killed or hangs reports nothing, by which the others know it.
"""

from __future__ import annotations

import atexit
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pure_loop._internal.processes import here
from pure_loop._internal.torch_private import broadcast_coalesced
from pure_loop._internal.tree_ops import longest_wait
from pure_loop.distributed._rendezvous import Rendezvous, first_line, named, within
from pure_loop.distributed.layout import Layout
from pure_loop.errors import DistributedError
from pure_loop.event import Event

T = TypeVar("T")

_NUMBERS = 9
_EVENTS = tuple(Event)


def gathered(tensor: Tensor) -> Tensor:
    """A tensor of every rank of the default process group, stacked in the order of ranks; a collective."""
    by_rank = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, tensor)
    return torch.stack(by_rank)


class Ranks:
    """This process and the others, from the first thing that they tell each other to the end of the stream.

    Args:
        rank, size: this process among how many.
        device: where tensors are that ranks exchange.
        timeout: seconds until a rank that doesn't answer is an error.
        layout: which ranks have the same data.

    Attributes:
        data_rank, data_ranks: the number of this rank's data, and how many there are.
        group: the process group for tensors on the device; None before :meth:`connect` and after :meth:`close`.
        fake: whether the other ranks are not there, and answer nothing.
    """

    def __init__(self, rank: int, size: int, device: torch.device, timeout: float, layout: Layout) -> None:
        self.rank, self.size, self.device, self.timeout = rank, size, device, timeout
        self.layout = layout
        self.data_rank, self._part = layout.place(rank)
        self.data_ranks = len(layout.ranks)
        self.group: dist.ProcessGroup | None = None
        # Those that have this rank's part of the model, and other data.
        self._over_data: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        self._rendezvous: Rendezvous | None = None
        self._owns = False
        self._heard = time.monotonic()  # when all others were last heard of
        self.fake = False
        # Whether this stream has left the others, while a thread may still be making its process groups.
        self._left = False

    def connect(self) -> None:
        """Meet the others, in process groups of this stream's own.

        Raises:
            DistributedError: they don't come in time, or failed before they came; names them.
        """
        longest_wait[0] = self.timeout
        if self.group is not None:  # a checkpoint was loaded, and they start again, from that
            self.exchange(Event.INIT, 0)
            return
        self.fake = dist.is_initialized() and dist.get_backend() == "fake"
        if self.fake:
            self._join(True)
            return
        rendezvous = Rendezvous(self.rank, self.size, self.timeout)
        joined = rendezvous.meet()
        self._rendezvous = rendezvous
        try:
            # Groups find each other through the store, too. Each connects within the timeout, if the store answers.
            within(1.5 * self.timeout, lambda: self._join(joined))
            self.exchange(Event.INIT, 0)
        except (RuntimeError, ValueError, OSError) as error:
            if isinstance(error, DistributedError):
                raise
            raise self._lost(error, "the start") from error

    def _join(self, joined: bool) -> None:
        """Make the process groups; ``joined`` says whether there is a default one, on all ranks."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            patience = timedelta(seconds=self.timeout)
            if not joined:
                assert self._rendezvous is not None
                dist.init_process_group(
                    self.backend, timeout=patience, store=self._rendezvous.store, rank=self.rank, world_size=self.size
                )
                self._owns = True
            group = self.new_group()
            # Numbers that Python has to read don't wait for a device.
            apart = self.backend == "nccl" and not self.fake
            control = dist.new_group(timeout=patience, backend="gloo") if apart else group
            over_data = group if self.layout.cut == 1 else self.new_groups(zip(*self.layout.ranks, strict=True))
        self.group, self._control, self._over_data = group, control, over_data
        if self._left:
            self.close()

    @property
    def backend(self) -> str:
        """What tensors on the device are exchanged with."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def new_group(self, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """A process group of these ranks, or of all, with our timeout; all ranks make it."""
        backend = None if self.fake else self.backend
        group: dist.ProcessGroup = dist.new_group(
            None if ranks is None else list(ranks), timeout=timedelta(seconds=self.timeout), backend=backend
        )
        return group

    def new_groups(self, rows: Iterable[Sequence[int]]) -> dist.ProcessGroup:
        """A process group of each of these sets of ranks; returns that with this rank."""
        made = [(row, self.new_group(row)) for row in rows]
        return next(group for row, group in made if self.rank in row)

    def keep(self) -> None:
        """Leave the process group that was made here to the end of the process: States still use it."""
        if self._owns:
            self._owns = False
            atexit.register(here(_leave))

    def exchange(self, event: Event, batch: int, *numbers: float) -> list[tuple[float, ...]]:
        """What every rank gave, in the order of ranks. All have to be about to come to the same event.

        Raises:
            DistributedError: they aren't, and it says where each of them is.
        """
        return self.ask(event, batch, *numbers)()

    def ask(self, event: Event, batch: int, *numbers: float) -> Callable[[], list[tuple[float, ...]]]:
        """:meth:`exchange`; the answer is waited for when what this returns is called."""
        mine = (float(_EVENTS.index(event)), float(batch), *map(float, numbers))
        if self.fake:
            return lambda: [mine[2:]] * self.size
        value = torch.zeros(2 + _NUMBERS, dtype=torch.float64)
        value[: len(mine)] = torch.tensor(mine, dtype=torch.float64)
        answers = [torch.empty_like(value) for _ in range(self.size)]
        work = dist.all_gather(answers, value, group=self._control, async_op=True)

        def answer() -> list[tuple[float, ...]]:
            work.wait()
            self._heard = time.monotonic()
            rows = [row.tolist() for row in answers]
            if any(row[:2] != rows[0][:2] for row in rows):
                self._refuse_other_places(rows)
            return [tuple(row[2 : len(mine)]) for row in rows]

        return answer

    def _refuse_other_places(self, rows: list[list[float]]) -> NoReturn:
        places = [f"about to come to {_EVENTS[int(row[0])].name} of batch {int(row[1])}" for row in rows]
        raise DistributedError(
            f"the ranks are at different events: {self.stand(places)}. Every rank needs the same data, durations, "
            "evaluators and algorithms, and none may leave the loop alone; where each has data of its own, write "
            "parallel=pl.distributed.Parallel(data='own')."
        )

    def gather(self, value: T) -> list[T]:
        """Any value that can be pickled, of every rank."""
        if self.fake:
            return [value] * self.size
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all data, written into ``tensor``, which is contiguous."""
        dist.all_reduce(tensor, group=self._over_data)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The largest over all ranks, written into ``tensor``."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> list[Tensor]:
        """Copies that hold what they hold on global rank ``source``."""
        copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        if copies and not self.fake:
            broadcast_coalesced(self.group, copies, 250 << 20, source)
        return copies

    def failed(self, error: BaseException, event: Event, batch: int) -> None:
        """The stream ends with an error on this rank.

        Raises:
            DistributedError: it ends because of another rank; it says which, and what happened there.
        """
        if self._rendezvous is None:
            return
        place = f"{event.name} of batch {batch}"
        if _is_lost(error):
            raise self._lost(error, place) from error
        if isinstance(error, GeneratorExit):
            self._fell(f"left the loop at {place}")
        else:
            self._fell(f"raised {type(error).__name__} after {place}: {first_line(error)}")

    def _fell(self, text: str) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        assert rendezvous is not None
        rendezvous.report("fell", text)
        self.close()
        rendezvous.finish()

    def _lost(self, error: BaseException, place: str) -> DistributedError:
        """Another rank can't be reached; gives the error that says which, and why."""
        rendezvous, self._rendezvous = self._rendezvous, None
        assert rendezvous is not None
        rendezvous.report("waited", f"waited for another rank after {place}")
        # Its frames hold what holds the group, and connections of the group close when nothing does.
        traceback.clear_frames(error.__traceback__)
        self.close()
        text = self._roll_call(rendezvous, place)
        rendezvous.finish()
        return DistributedError(text)

    def close(self) -> None:
        """Leave the others; nothing is left behind."""
        groups = {id(group): group for group in (self.group, self._control, self._over_data) if group is not None}
        self.group = self._control = self._over_data = self._rendezvous = None
        self._left = True
        while groups:
            _, group = groups.popitem()
            if dist.is_initialized():
                dist.destroy_process_group(group)
            del group
        # A group closes its connections when its last reference goes, and some are in cycles.
        gc.collect()
        if self._owns:
            _leave()
        self._owns = False

    def _roll_call(self, rendezvous: Rendezvous, place: str) -> str:
        """Which ranks fell, and which don't answer."""
        answers, reachable = rendezvous.roll_call(time.monotonic() - self._heard)
        fell = {rank: text.partition("|")[2] for rank, text in answers.items() if text.startswith("fell")}
        silent = [rank for rank in range(self.size) if rank != self.rank and rank not in answers]
        head = f"rank {self.rank} of {self.size} waited after {place}, and training can't continue: "
        if fell:
            return head + "; ".join(f"rank {rank} {text}" for rank, text in sorted(fell.items())).rstrip(".") + "."
        if not reachable and rendezvous.hosted_by_rank_0:
            silent = [0]  # of the others nothing is known
        if silent:
            return (
                f"{head}{named(silent)} did not come to what follows {place} and "
                f"{'give' if len(silent) > 1 else 'gives'} no sign of life: killed, or hanging; last heard of "
                f"{time.monotonic() - self._heard:.1f} s ago, where the timeout is {self.timeout:g} s. "
                f"{'' if reachable else 'The store through which ranks meet does not answer either. '}"
                "Look at the output of that process."
            )
        places = "; ".join(f"rank {rank} {text.partition('|')[2]}" for rank, text in sorted(answers.items()))
        return f"{head}a connection between ranks broke, though all of them are alive: {places}."

    def stand(self, places: Sequence[str], verbs: tuple[str, str] = ("is", "are")) -> str:
        """Where ranks are, those at the same place together."""
        groups: dict[str, list[int]] = {}
        for rank, place in enumerate(places):
            groups.setdefault(place, []).append(rank)
        parts = []
        for place, ranks in groups.items():
            parts.append(f"{named(ranks)} {verbs[len(ranks) > 1]} {place}")
        return "; ".join(parts)


def patience() -> float:
    """Seconds that a rank waits for another one, where a State in parts is saved: the timeout of the last stream."""
    return longest_wait[0]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_lost(error: BaseException) -> bool:
    """Whether an error says that another rank could not be reached."""
    if isinstance(error, DistributedError):
        # One that a save raised, for example.
        return error.__cause__ is not None and _is_lost(error.__cause__)
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(word in text for word in _OF_BACKENDS)


# The last is gloo's for a rank that it has waited for in vain, where nothing else in the message says so.
_OF_BACKENDS = ("gloo", "Gloo", "NCCL", "ProcessGroup", "pair closure")
