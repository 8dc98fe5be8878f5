"""Programs on ranks that are not there: every rank runs in this process, one after the other, and exactly.

``simulate(program, 2)`` calls ``program(0)`` and ``program(1)``, and both times ``torch.distributed`` says that there
are two ranks. A rank runs until a collective needs what another rank has not said yet; there it is left, the other
ranks run as far, and it runs again from its start with the results that are known by then. There are no threads and no
sockets, so it takes microseconds, and ranks that would wait for each other for ever are told apart. A program is
therefore called several times, and has to do the same each time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from attrs import frozen

from pure_loop._internal.arguments import check_integer
from pure_loop._internal.bits import same
from pure_loop._internal.torch_private import replaceable_world
from pure_loop.errors import ArgumentTypeError
from pure_loop.random import seeded
from pure_loop.testing.ranks._collectives import (
    Collective,
    CollectiveError,
    Tensors,
    outcome,
)
from pure_loop.testing.ranks._group import Group, Left

T = TypeVar("T")


@frozen
class Ran(Generic[T]):
    """What became of one rank.

    Attributes:
        result: what the program returned.
        collectives: what it asked for, in order.
    """

    result: T
    collectives: tuple[Collective, ...]


def simulate(program: Callable[[int], T], ranks: int = 2) -> list[Ran[T]]:
    """Run a program on every rank of a process group that exists only in this process.

    The default process group, and the environment variables that torchrun sets, say which rank it is; torch's default
    generator starts from the rank's number, as in :class:`Pool`. Results are exact, except
    that floats of three or more ranks are added in the order of ranks, which a backend may do in another order, and
    that ``reduce`` leaves the tensors of the other ranks alone. What ``async_op=True`` asks for arrives when it is
    waited for. Afterwards all is as it was, whatever happens; a process group that is there is set aside meanwhile.

    Args:
        program: from the rank to any value. It may use every collective on the default group. Every rank calls it
            about once for each collective, so it makes what it changes, such as models and generators, itself.
        ranks: how many there are.

    Returns:
        For every rank what it returned and what it asked for, in the order of ranks.

    Raises:
        CollectiveError: the ranks call different collectives, or not equally many, or a rank calls others when it runs
            again.
        UnsupportedCollectiveError: the program sends from rank to rank, or makes or destroys process groups.
        ArgumentTypeError, ArgumentError: an argument that can't be used.
        NoSimulationError: this version of torch keeps its process groups where they can't be replaced.
        Exception: what the program raises, with a note that names the rank.

    >>> import torch
    >>> def program(rank):
    ...     total = torch.tensor([1.0, 2.0]) * (rank + 1)
    ...     torch.distributed.all_reduce(total)
    ...     return total.tolist()
    >>> first, second = simulate(program, 2)
    >>> first.result == second.result == [3.0, 6.0]
    True
    >>> print(*first.collectives)
    all_reduce (sum) of (2,) float32
    """
    if not callable(program):
        raise ArgumentTypeError(f"simulate({program!r}): give a function of the rank, `def program(rank): ...`.")
    check_integer("ranks", ranks, where="simulate", least=1, example="simulate(program, 2)")
    with _turn:
        return _Simulation(program, ranks).run()


class NoSimulationError(RuntimeError):
    """Ranks can't be simulated with this version of torch; processes of a :class:`Pool` serve instead."""


def environment(rank: int, ranks: int) -> dict[str, str]:
    """The variables that torchrun sets, for so many ranks on one machine.

    >>> environment(1, 2)["LOCAL_RANK"]
    '1'
    """
    return {**_of_rank(rank), **_of_all(ranks)}


def _of_rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _of_all(ranks: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _set(variables: dict[str, str]) -> None:
    for name, value in variables.items():  # half the time of os.environ.update
        os.environ[name] = value


_WORLD: dict[str, Callable[[Group], object]] = {
    "pg_map": lambda group: {group: ("gloo", None)},
    "pg_names": lambda group: {group: group.group_name},
    "pg_group_ranks": lambda group: {group: {rank: rank for rank in range(group.size())}},
    "pg_backend_config": lambda group: {group: "cpu:gloo,cuda:gloo"},
    "tags_to_pg": lambda group: {"": [group]},
    "pg_to_tag": lambda group: {group: ""},
}
"""What torch knows of process groups, of the only one."""


class World(Protocol):
    """Of torch's object that holds process groups, what is read here."""

    default_pg: Group
    pg_coalesce_state: dict[object, object]


def _read_world(read: Callable[[Group], object], world: World) -> object:
    return read(world.default_pg)


def _refuse_new_group(world: World, value: object = None) -> NoReturn:
    # Before 2.13 torch asks the group nothing, but it counts before it makes a new one.
    world.default_pg.refuse("new_group")


@cache
def world_class(base: type[World]) -> type[World]:
    """What torch knows of process groups while the program of a rank runs: one, and no other.

    Args:
        base: torch's class of such objects.
    """
    properties = {name: property(partial(_read_world, read)) for name, read in _WORLD.items()}
    return type("World", (base,), {**properties, "group_count": property(_refuse_new_group, _refuse_new_group)})


def _world(base: type[World], group: Group) -> World:
    world = world_class(base)()
    world.default_pg = group
    return world


# The default process group and the environment belong to the whole process, so threads take turns.
_turn = threading.RLock()


@frozen
class _Asked:
    """One call of a collective: its kind, its inputs, and the shapes and dtypes of its outputs."""

    collective: tuple[Any, ...]
    inputs: Tensors
    wanted: tuple[tuple[tuple[int, ...], torch.dtype], ...]


class _Simulation(Generic[T]):
    """The collectives that every rank has called so far, and the results that are known."""

    def __init__(self, program: Callable[[int], T], ranks: int) -> None:
        self._program = program
        self._ranks = range(ranks)
        self._asked: list[list[_Asked]] = [[] for _ in self._ranks]
        self._results: list[list[Tensors]] = []
        self._ended: dict[int, T] = {}

    def run(self) -> list[Ran[T]]:
        """
        Raises:
            CollectiveError, UnsupportedCollectiveError, Exception: as :func:`simulate` says.
        """
        ranks = len(self._ranks)
        torch_world = replaceable_world()
        if torch_world is None:
            raise NoSimulationError(
                "ranks can't be simulated with this version of torch, which keeps its process groups where they can't "
                "be replaced (python -m pure_loop names what is missing): run the program on real processes, "
                "pl.testing.ranks.Pool(2).run(program)."
            )
        groups = [Group(self, rank, ranks) for rank in self._ranks]
        worlds = [_world(torch_world.cls, group) for group in groups]
        environ = {name: os.environ.get(name) for name in environment(0, ranks)}
        # The object that holds torch's default group can be replaced. That needs no store and takes no time, and keeps
        # an existing group; init_process_group and destroy_process_group take milliseconds and can't nest.
        world = torch_world.get()
        registered = []
        try:
            for group in groups:
                torch_world.register(group.group_name, group)  # functional collectives go by the name
                registered.append(group.group_name)
            _set(_of_all(ranks))
            while len(self._ended) < ranks:
                # The rank with the fewest requests can continue: what it waited for is known by now.
                rank = min(self._ranks, key=lambda number: (number in self._ended, len(self._asked[number])))
                _set(_of_rank(rank))
                torch_world.put(worlds[rank])
                worlds[rank].pg_coalesce_state.clear()
                self._run(groups[rank], rank)
        finally:
            torch_world.put(world)
            for name in registered:
                torch_world.unregister(name)
            for group in groups:
                group.raised = CollectiveError(
                    "a process group of a simulation that is over was used: something imported or stored during the "
                    "program holds it. Import modules that take the default group as they load before simulate()."
                )
            for name, value in environ.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        return [
            Ran(self._ended[r], tuple(Collective(*item.collective) for item in self._asked[r])) for r in self._ranks
        ]

    def _run(self, group: Group, rank: int) -> None:
        """Run one rank from its start until it ends, or until it waits for other ranks."""
        group.begin()
        try:
            with seeded(rank):
                result = self._program(rank)
        except BaseException as error:
            group.abandon()
            if group.raised is None and isinstance(error, Exception):
                error.add_note(f"On rank {rank} of {len(self._ranks)}, simulated, after {group.number} collectives.")
            if group.raised is None or group.raised is error or not isinstance(error, Left | Exception):
                raise
        # The error of a collective is reported even if the program caught it.
        if group.raised is Left:
            return
        if group.raised is not None:
            raise group.raised
        if group.number < len(self._asked[rank]):
            raise self._changed(rank, group.number, "ended")
        self._ended[rank] = result
        self._meet(group.number)

    def ask(self, rank: int, number: int, collective: tuple[Any, ...], value: Tensors, wanted: Tensors) -> Tensors:
        """The result of a collective for one rank; called by its process group.

        Raises:
            Left: not every rank has called it yet.
            CollectiveError: the ranks disagree, or this one called another collective when it ran before.
        """
        requested = self._asked[rank]
        if number < len(requested):
            before = requested[number]
            if collective != before.collective:
                raise self._changed(rank, number, f"was {Collective(*collective)}")
            if not all(same(*pair) for pair in zip(value, before.inputs, strict=True)):
                raise self._changed(rank, number, "had other numbers in it")
        else:
            form = tuple([(tuple(item.shape), item.dtype) for item in wanted])
            requested.append(_Asked(collective, tuple([item.detach().clone() for item in value]), form))
            self._meet(number)
        if number < len(self._results):
            return self._results[number][rank]
        raise Left

    def _meet(self, number: int) -> None:
        """Compute the result of a collective once every rank has either called it or ended.

        Raises:
            CollectiveError: not all ranks call the same.
        """
        requested = [self._asked[rank][number] if number < len(self._asked[rank]) else None for rank in self._ranks]
        if any(
            request is None and rank not in self._ended for rank, request in zip(self._ranks, requested, strict=True)
        ):
            return
        together = [item for item in requested if item is not None]
        if not together:
            return
        kind, _, _, op, root = together[0].collective
        # In all_to_all ranks may send different shapes, each of which has to be the one that the receiver expects.
        uneven = kind in ("all_to_all", "all_to_all_single")
        if len(together) < len(requested) or len({item.collective[: 1 if uneven else None] for item in together}) > 1:
            raise self._disagreement(number)
        results = outcome(kind, op, root, [item.inputs for item in together])
        if uneven:
            for rank, parts in zip(self._ranks, results, strict=True):
                for source, (part, wanted) in enumerate(zip(parts, together[rank].wanted, strict=True)):
                    if (tuple(part.shape), part.dtype) != wanted:
                        raise self._disagreement(number, f"\nRank {rank} expects something else from rank {source}.")
        self._results.append(list(results))

    def _disagreement(self, number: int, detail: str = "") -> CollectiveError:
        lines = []
        for rank in self._ranks:
            requested = self._asked[rank]
            did = (
                str(Collective(*requested[number].collective))
                if number < len(requested)
                else f"ended after {len(requested)}"
            )
            lines.append(f"\n  rank {rank}: {did}")
        return CollectiveError(
            f"the {len(self._ranks)} ranks disagree at collective number {number + 1}:{''.join(lines)}{detail}\n"
            "Every rank has to call the same collectives in the same order, with the same shapes and dtypes; on real "
            "processes these would wait for ever, or mix up their numbers."
        )

    def _changed(self, rank: int, number: int, change: str) -> CollectiveError:
        before = Collective(*self._asked[rank][number].collective)
        return CollectiveError(
            f"rank {rank} of {len(self._ranks)} behaves differently when it runs again: its collective number "
            f"{number + 1} was {before}, and on the next run it {change}. A simulated program runs several times: "
            "create what it changes (models, lists, generators) inside it, and read no clock."
        )
