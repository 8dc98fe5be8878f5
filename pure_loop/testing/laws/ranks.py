"""Laws of several ranks: they agree, and training does not depend on their number."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias
from unittest import SkipTest

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.tree_ops import full_tensor
from pure_loop.algorithm import AlgorithmLike
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.testing.case import Case, Fit, Pairs
from pure_loop.testing.comparison import close, is_wall_clock
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import ROUNDING, in_float64, same_events, same_stream
from pure_loop.testing.ranks import CollectiveError, NoSimulationError, RankError, shared_pool, simulate
from pure_loop.testing.report import LawViolation
from pure_loop.testing.subject import AlgorithmSubject

__all__ = ["Witness", "on_ranks", "rank_agreement", "whole", "witness", "world_size"]

Kind: TypeAlias = Literal["replicate", "shard"]

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
    tree: PyTree = state
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


# Real processes: each run takes as long as a hundred of one rank.
_CASES = 3
_COMPARED = frozenset({Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EVAL_END, Event.FIT_END})


@attrs.frozen
class Witness:
    """The values of a State that must be the same on every rank, and on a single rank.

    Attributes:
        event: its event.
        counts: the counts of its timestamp.
        values: unsharded tensors by field, at some events; empty at the others.
    """

    event: Event
    counts: tuple[float, ...]
    values: dict[str, PyTree]


def witness(stream: Iterable[tuple[Event, State]], *, counts_time: bool = False) -> list[Witness]:
    """The witness of each State of a stream. Sharded tensors are gathered, so all ranks have to call it."""
    return [
        Witness(event, _counts(state, counts_time), _values(state) if event in _COMPARED else {})
        for event, state in stream
    ]


def _counts(state: State, counts_time: bool) -> tuple[float, ...]:
    t = state.timestamp
    counts = (t.epoch, t.batch, t.sample, t.token, t.batch_in_epoch, t.sample_in_epoch, t.token_in_epoch)
    return (*counts, t.total_seconds) if counts_time else counts


def _values(state: State) -> dict[str, PyTree]:
    fields = ["params", "buffers", "metrics", "opt_state", "algorithm_state"]
    if state.event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END):
        fields += ["grads", "loss"]
    return {
        field: optree.tree_map(
            lambda leaf: full_tensor(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else leaf,
            getattr(state, field),
            namespace=NAMESPACE,
        )
        for field in fields
    }


def whole(case: Case, ranks: int) -> Case:
    """The case for a single rank that does the work of ``ranks``: its microbatches hold those of all ranks."""

    def times(size: int | None) -> int | None:
        return None if size is None else size * ranks

    plan = case.plan
    evaluators = {
        label: attrs.evolve(evaluator, microbatch_size=times(evaluator.microbatch_size))
        for label, evaluator in plan.evaluators.items()
    }
    return attrs.evolve(
        case, plan=attrs.evolve(plan, microbatch_size=times(plan.microbatch_size), evaluators=evaluators)
    )


def on_ranks(
    case: Case, make: Callable[[], Sequence[AlgorithmLike]], fit: Fit, ranks: int, kind: Kind, **options: Any
) -> list[list[Witness]]:
    """The witnesses of every rank of a run.

    Raises:
        LawViolation: a rank failed.
    """

    def program(rank: int) -> list[Witness]:
        from pure_loop.distributed import Parallel

        return witness(case.stream(make(), fit=partial(fit, parallel=Parallel(kind=kind, **options))))

    try:
        # torch's DistributedDataParallel crashes if gloo's collectives are checked.
        return shared_pool(ranks, checked=False).run(program)
    except RankError as error:
        raise LawViolation(f'with parallel="{kind}", on {ranks} processes: {error}') from error


@law(
    "ranks that each train on a part of every batch give the result of one rank on whole batches",
    rests_on=(
        *("purity", "memory", "order", "value", "determinism", "visibility", "microbatch_invariance"),
        *("evaluation_invariance", "observer_invariance", "composition", "resumption", "closing", "rank_agreement"),
    ),
    serves=lambda problem: problem.separable,
    serves_what="separable: the loss of a batch is the mean of the losses of its samples",
    costs=9.0,
)
def world_size(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains on one rank, and on two processes, replicated and sharded, in float64.

    Skipped (:class:`unittest.SkipTest`) if the loop trains on a GPU, and there are fewer GPUs than ranks.
    """
    if case not in subject.on_worlds:
        if len(subject.on_worlds) == _CASES:
            return
        subject.on_worlds.append(case)  # a case that fails is tried again, and has to fail again
    case = in_float64(case)
    single = witness(whole(case, _RANKS).stream(subject.make(), fit=fit))
    _skip_without_devices(single)
    kinds: tuple[Kind, ...] = ("replicate", "shard")
    for kind in kinds:
        for rank, witnesses in enumerate(on_ranks(case, subject.make, fit, _RANKS, kind)):
            compare(witnesses, single, f'with parallel="{kind}", rank {rank} of {_RANKS}', ROUNDING)


def _skip_without_devices(single: list[Witness]) -> None:
    """
    Raises:
        SkipTest: the loop trains on CUDA, where each rank needs a device of its own, and there are fewer.
    """
    kind = next(iter(single[-1].values["params"].values())).device.type
    if kind == "cuda" and torch.cuda.device_count() < _RANKS:
        raise SkipTest(f"each of {_RANKS} ranks needs a CUDA device, and there are {torch.cuda.device_count()}")


def compare(value: list[Witness], wanted: list[Witness], what: str, tolerance: float) -> None:
    """Refuse the witnesses of a rank that differ from those of a single rank by more than rounding.

    Raises:
        LawViolation: names the first difference.
    """
    same_events([witness.event for witness in value], [witness.event for witness in wanted], f"{what}: order of events")
    for ours, single in zip(value, wanted, strict=True):
        batch = ours.counts[1]
        if ours.counts != single.counts:
            raise LawViolation(
                f"{what} counts {ours.counts} at {ours.event.name}, a single rank {single.counts} (epoch, batch, "
                "sample, token, and those in the epoch).",
                event=ours.event,
            )
        for field in ours.values:
            difference = close(ours.values[field], single.values[field], tolerance=tolerance, name=f"state.{field}")
            if difference is not None:
                raise LawViolation(
                    f"{what} differs from a single rank at {ours.event.name} of batch {batch}.",
                    event=ours.event,
                    difference=difference,
                    labels=("several ranks", "single rank"),
                    advice="Until AFTER_BACKWARD, a rank has only its part of the batch: means and counts of samples "
                    "are those of the part. From AFTER_TRAIN_BATCH on, state.loss and state.grads are those of the "
                    "whole batch.",
                )
