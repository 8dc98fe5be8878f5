"""The law of ranks: equal inputs give equal results on all ranks, which call the same collectives in the same order."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE
from pure_loop.state import State
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.comparison import is_wall_clock
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import same_stream
from pure_loop.testing.ranks import CollectiveError, NoSimulationError, RankError, shared_pool, simulate
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.violation import LawViolation

__all__ = ["rank_agreement"]

_RANKS = 2
_ON_PROCESSES = 2


@law(
    "ranks with equal inputs give equal streams, and call the same collectives in the same order",
    rests_on=("purity", "memory", "order", "determinism"),
)
def rank_agreement(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Runs it on simulated ranks; if they communicate, also on real processes, over gloo."""

    fit = partial(fit, parallel=False)  # what is compared is what each rank does by itself

    def program(rank: int) -> Pairs:
        return case.run(subject.make(), fit=fit)

    try:
        runs = simulate(program, _RANKS)
    except NoSimulationError:
        _on_processes(subject, case, fit, "")
        return
    except CollectiveError as error:
        raise LawViolation(
            f"the {_RANKS} ranks did not call the same collectives in the same order: {error}",
            advice="Call each collective on every rank: none may stand behind an `if rank == 0`.",
        ) from None
    for rank, run in enumerate(runs[1:], start=1):
        same_stream(run.result, runs[0].result, f"rank {rank} differs from rank 0")
    # Without communication, processes would show nothing that the simulation doesn't.
    if any(run.collectives for run in runs) and subject.on_processes < _ON_PROCESSES:
        subject.on_processes += 1
        _on_processes(subject, case, fit, "; on simulated ranks it did not")


def _on_processes(subject: AlgorithmSubject, case: Case, fit: Fit, remark: str) -> None:
    # Not the subject itself: its strategy can't be pickled, and the runs that it keeps are large.
    make = subject.make

    def program(rank: int) -> list[tuple[str, str]]:
        torch.set_num_threads(1)
        return [(event.name, _digest(state)) for event, state in case.stream(make(), fit=fit)]

    try:
        results = shared_pool(_RANKS).run(program)
    except RankError as error:
        raise LawViolation(f"on {_RANKS} processes with gloo: {error}") from error
    for rank, result in enumerate(results[1:], start=1):
        for number, (value, wanted) in enumerate(zip(result, results[0], strict=False)):
            if value != wanted:
                raise LawViolation(
                    f"on {_RANKS} processes with gloo, rank {rank} differs from rank 0 at {value[0]} (event number "
                    f"{number}){remark}."
                )
        if len(result) != len(results[0]):
            raise LawViolation(
                f"on {_RANKS} processes, rank {rank} yielded {len(result)} events, and rank 0 {len(results[0])}."
            )


def _digest(state: State) -> str:
    """A hash of a State without its wall-clock times."""
    tree: Any = state
    paths, leaves, _ = optree.tree_flatten_with_path(tree, namespace=NAMESPACE)
    result = hashlib.blake2b(digest_size=16)
    for path, leaf in zip(paths, leaves, strict=True):
        if is_wall_clock(path):
            continue
        result.update(repr(path).encode())
        if isinstance(leaf, Tensor):
            result.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            result.update(repr(leaf).encode())
    return result.hexdigest()
