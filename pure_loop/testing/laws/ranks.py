"""The law of ranks: all of them do the same, and talk to each other in the same order."""

from __future__ import annotations

import hashlib
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._pytree import NAMESPACE
from pure_loop.state import State
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.comparison import is_wall_clock
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import same_stream
from pure_loop.testing.ranks import CollectiveError, RankError, shared_pool, simulate
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.violation import LawViolation

__all__ = ["rank_agreement"]

_RANKS = 2
_ON_PROCESSES = 2


@law(
    "ranks that are given the same come to the same, and ask for the same collectives in the same order",
    rests_on=("purity", "memory", "order", "determinism"),
)
def rank_agreement(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Runs it on simulated ranks; where they communicate, then on real processes too, with gloo between them."""

    def program(rank: int) -> Pairs:
        return case.run(subject.make(), fit=fit)

    try:
        ran = simulate(program, _RANKS)
    except CollectiveError as error:
        raise LawViolation(
            f"the ranks of {_RANKS} did not talk to each other in one order: {error}",
            advice="None of them may stand behind an `if rank == 0`.",
        ) from None
    for rank, other in enumerate(ran[1:], start=1):
        same_stream(other.result, ran[0].result, f"rank {rank} came to something else than rank 0")
    # Where nothing is communicated, processes could say no more than the simulation.
    if any(each.collectives for each in ran) and subject.on_processes < _ON_PROCESSES:
        subject.on_processes += 1
        _on_processes(subject, case, fit)


def _on_processes(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    # Not the subject itself: what cases are drawn from can't be sent, and the runs that it keeps are large.
    make = subject.make

    def program(rank: int) -> list[tuple[str, str]]:
        torch.set_num_threads(1)
        return [(event.name, _digest(state)) for event, state in case.stream(make(), fit=fit)]

    try:
        results = shared_pool(_RANKS).run(program)
    except RankError as error:
        raise LawViolation(f"on {_RANKS} processes with gloo: {error}") from error
    for rank, result in enumerate(results[1:], start=1):
        for number, ((event, digest), (wanted, other)) in enumerate(zip(result, results[0], strict=False)):
            if (event, digest) != (wanted, other):
                raise LawViolation(
                    f"on {_RANKS} processes with gloo, rank {rank} came to something else than rank 0 at {event} "
                    f"(event number {number}), and on simulated ranks it did not."
                )
        if len(result) != len(results[0]):
            raise LawViolation(
                f"on {_RANKS} processes, rank {rank} yielded {len(result)} events, and rank 0 {len(results[0])}."
            )


def _digest(state: State) -> str:
    """All of a State but wall-clock times, in a few bytes."""
    tree: Any = state
    paths, leaves, _ = optree.tree_flatten_with_path(tree, namespace=NAMESPACE)
    found = hashlib.blake2b(digest_size=16)
    for path, leaf in zip(paths, leaves, strict=True):
        if is_wall_clock(path):
            continue
        found.update(repr(path).encode())
        if isinstance(leaf, Tensor):
            found.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()
