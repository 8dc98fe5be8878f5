"""The law of the world: how many ranks there are makes no difference to training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import SkipTest

import attrs
import optree
import torch

from pure_loop._parts import whole_of
from pure_loop._pytree import NAMESPACE
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.comparison import close
from pure_loop.testing.law import law
from pure_loop.testing.laws._streams import same_events
from pure_loop.testing.ranks import RankError, shared_pool
from pure_loop.testing.subject import AlgorithmSubject
from pure_loop.testing.violation import LawViolation

__all__ = ["Witness", "on_ranks", "whole", "witness", "world_size"]

_RANKS = 2
# Real processes: each run takes as long as a hundred of one rank.
_CASES = 3
# In float64 another order of the sums is off by 1e-16; a few steps make it more, and a wrong weight makes it 1e-2.
_ROUNDING = 1e-9
_LOOKED_AT = frozenset({Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EVAL_END, Event.FIT_END})


@attrs.frozen
class Witness:
    """What a State says that must be the same on every rank, and on one rank alone.

    Attributes:
        event: its event.
        counts: what its timestamp counts, wall-clock times included.
        values: whole tensors by name, at some events.
    """

    event: Event
    counts: tuple[Any, ...]
    values: dict[str, Any]


def witness(stream: Iterable[tuple[Event, State]], *, counts_time: bool = False) -> list[Witness]:
    """What each State of a stream says. Where ranks hold parts of it, all of them have to ask."""
    return [
        Witness(event, _counts(state, counts_time), _values(state) if event in _LOOKED_AT else {})
        for event, state in stream
    ]


def _counts(state: State, counts_time: bool) -> tuple[Any, ...]:
    t = state.timestamp
    counted = (t.epoch, t.batch, t.sample, t.token, t.batch_in_epoch, t.sample_in_epoch, t.token_in_epoch)
    return (*counted, t.total_seconds) if counts_time else counted


def _values(state: State) -> dict[str, Any]:
    fields = ["params", "buffers", "metrics", "opt_state", "algorithm_state"]
    if state.event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END):
        fields += ["grads", "loss"]
    return {
        field: optree.tree_map(
            lambda leaf: whole_of(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else leaf,
            getattr(state, field),
            namespace=NAMESPACE,
        )
        for field in fields
    }


def whole(case: Case, ranks: int) -> Case:
    """The case of one rank that does what so many ranks do together: it goes through all their microbatches at once."""

    def times(size: int | None) -> int | None:
        return None if size is None else size * ranks

    plan = case.plan
    evaluators = {
        label: attrs.evolve(each, microbatch_size=times(each.microbatch_size))
        for label, each in plan.evaluators.items()
    }
    return attrs.evolve(
        case, plan=attrs.evolve(plan, microbatch_size=times(plan.microbatch_size), evaluators=evaluators)
    )


def on_ranks(
    case: Case, make: Callable[[], Any], fit: Fit, ranks: int, kind: str, **options: Any
) -> list[list[Witness]]:
    """What every rank of a run saw.

    Raises:
        LawViolation: a rank failed.
    """

    def program(rank: int) -> list[Witness]:
        from pure_loop.distributed import Parallel

        parallel: Any = Parallel(kind=kind, **options)  # type: ignore[arg-type]
        return witness(case.stream(make(), fit=partial(fit, parallel=parallel)))

    try:
        # torch's DistributedDataParallel crashes where gloo's collectives are checked.
        return shared_pool(ranks, checked=False).run(program)
    except RankError as error:
        raise LawViolation(f'with parallel="{kind}", on {ranks} processes: {error}') from error


@law(
    "ranks that each train on their part of every batch come to what one rank comes to on the whole",
    rests_on=(
        *("purity", "memory", "order", "value", "determinism", "visibility", "microbatch_invariance"),
        *("evaluation_invariance", "observer_invariance", "composition", "resumption", "closing", "rank_agreement"),
    ),
    serves=lambda problem: problem.separable,
    serves_what="separable: the loss of a batch is the mean of those of its samples",
)
def world_size(subject: AlgorithmSubject, case: Case, fit: Fit) -> None:
    """Trains on one rank, and on two processes, replicated and sharded, in float64.

    Skipped (:class:`unittest.SkipTest`) where the loop trains on a GPU, and there is one for both.
    """
    if case not in subject.on_worlds:
        if len(subject.on_worlds) == _CASES:
            return
        subject.on_worlds.append(case)  # one that fails is tried again, and has to fail again
    # Momentum instead of AdamW, which makes a whole step of what is rounding where a gradient should be zero.
    case = attrs.evolve(case, problem=case.problem.in_float64(), optimizer="sgd", precision="fp32")
    alone = witness(whole(case, _RANKS).stream(subject.make(), fit=fit))
    _refuse_too_few_devices(alone)
    for kind in ("replicate", "shard"):
        for rank, seen in enumerate(on_ranks(case, subject.make, fit, _RANKS, kind)):
            compare(seen, alone, f'with parallel="{kind}", rank {rank} of {_RANKS}', _ROUNDING)


def _refuse_too_few_devices(alone: list[Witness]) -> None:
    """
    Raises:
        SkipTest: the loop trains on a device of which there are fewer than ranks, and each rank needs its own.
    """
    kind = next(iter(alone[-1].values["params"].values())).device.type
    if kind == "cuda" and torch.cuda.device_count() < _RANKS:
        raise SkipTest(f"each of {_RANKS} ranks needs a CUDA device, and there are {torch.cuda.device_count()}")


def compare(given: list[Witness], wanted: list[Witness], who: str, tolerance: float) -> None:
    """
    Raises:
        LawViolation: names what differs first.
    """
    same_events([each.event for each in given], [each.event for each in wanted], f"{who}: the order of events")
    for one, other in zip(given, wanted, strict=True):
        batch = one.counts[1]
        if one.counts != other.counts:
            raise LawViolation(
                f"{who} counts {one.counts} at {one.event.name}, and one rank alone {other.counts} (epoch, batch, "
                "sample, token, and those in the epoch).",
                event=one.event,
            )
        for field in one.values:
            difference = close(one.values[field], other.values[field], tolerance=tolerance, name=f"state.{field}")
            if difference is not None:
                raise LawViolation(
                    f"{who} came to something else than one rank alone, at {one.event.name} of batch {batch}.",
                    event=one.event,
                    difference=difference,
                    labels=("of several", "alone"),
                    advice="A rank sees its part of the batch until AFTER_BACKWARD: what is a mean or a count of "
                    "samples there is not that of the whole. state.loss and state.grads are, from AFTER_TRAIN_BATCH "
                    "on.",
                )
