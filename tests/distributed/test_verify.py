"""``fit(verify=)`` on several ranks: the rank of a flipped bit is named, by all; ranks that part are noticed."""

from __future__ import annotations

import gc
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import local_tensor
from pure_loop.errors import DistributedError, NonFiniteError, VerificationError
from tests.support import faults
from tests.support.faults import PLACES, Fault, bits_of
from tests.support.runs import convnet, images
from tests.support.worlds import KINDS, pool

pytestmark = pytest.mark.slow

# Before ranks exchange gradients, so that those of all ranks differ after it.
EXCHANGED = {"gradient in the backward"}


def told(stream: Any) -> Any:
    """What a rank says of a stream: its end, or its error."""
    try:
        return bits_of(pl.run(stream))
    except VerificationError as error:
        return {
            **{name: getattr(error, name) for name in ("stage", "leaf", "rank", "batch", "transient", "agreeing")},
            "text": str(error),
        }
    except (DistributedError, NonFiniteError) as error:
        return f"{type(error).__name__}: {error}"


def flawed(rank: int, where: int, number: int, verify: str | None, kind: Any = "replicate") -> Any:
    """Two batches of a run, where one bit flips on one of the ranks."""
    choice = random.Random(number)
    run = (1 + number // 5 % 2 if verify else 1) if rank == where else 0
    fault = Fault(list(PLACES)[number % len(PLACES)], run, choice.randrange(2), number, microbatches=1)
    return told(faults.fit(fault, max_duration="2ba", parallel=kind, clock=lambda: 0.0, verify=verify))


def in_turn(rank: int, numbers: list[int]) -> list[Any]:
    """By number: what a sound run gives, a flawed one without and with ``verify``."""
    gc.freeze()  # each stream that ends collects what its process groups are in
    answers = []
    sound = flawed(rank, -1, 0, None)
    for number in numbers:
        where = number % 2
        answers.append((sound, flawed(rank, where, number, None), flawed(rank, where, number, "1ba")))
    return answers


@pytest.mark.parametrize("part", range(14))
def test_a_flipped_bit_of_a_rank_is_found_by_all(part: int) -> None:
    numbers = list(range(part, 56, 14))
    one, two = pool().run(partial(in_turn, numbers=numbers))
    found = 0
    for number, ours, others in zip(numbers, one, two, strict=True):
        place, where = list(PLACES)[number % len(PLACES)], number % 2
        changes = ours[0] != ours[1] or others[0] != others[1]
        reports = [answer[2] if "stage" in answer[2] else None for answer in (ours, others)]
        if reports[0] is None or reports[1] is None:
            # A State at the end of the second batch has nothing more of the first one's outputs.
            assert reports == [None, None], f"{number}: {place}: {ours[2]} {others[2]}"
            assert not changes, f"{number}: {place}"
            continue
        found += 1
        assert reports[0] == reports[1], f"{number}: {place}"
        report = reports[0]
        assert report["transient"], f"{number}: {place}: {report}"
        assert report["agreeing"] == ((1, 3), (2, 3))[number // 5 % 2 == 0]
        if report["rank"] is None:  # of what the loss or the backward had on one rank, gradients are the first sign
            assert report["stage"] == "backward", f"{number}: {place}: {report}"
            assert "on ranks 0, 1" in report["text"]
        else:
            assert place not in EXCHANGED
            assert report["rank"] == where, f"{number}: {place}: {report}"
            assert f"on rank {where}" in report["text"]
    assert found >= 1


def sharded(rank: int, number: int, where: int) -> Any:
    return flawed(rank, where, number, "1ba", "shard")


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("place", ["activation", "new parameter", "optimizer state"])
def test_of_shards_those_of_each_rank_are_compared(place: str, where: int) -> None:
    number = list(PLACES).index(place)
    one, two = pool().run(partial(sharded, number=number, where=where))
    assert one == two
    assert one["rank"] == where
    assert one["transient"]


def sound(rank: int, kind: Any, verify: str | None, options: dict[str, Any]) -> Any:
    return told(
        pl.fit(
            *(convnet(), images(4)),
            loss=functional.cross_entropy,
            optimizer=pl.optim.adamw(lr=0.01),
            max_duration="2ep",
            parallel=kind,
            verify=verify,
            clock=lambda: 0.0,
            **options,
        )
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"microbatch_size": 1}, {"precision": "amp_fp16"}], ids=["as it is", "1", "fp16"]
)
def test_a_verified_run_of_ranks_is_a_run(kind: str, options: dict[str, Any]) -> None:
    plain = pool().run(partial(sound, kind=kind, verify=None, options=options))
    verified = pool().run(partial(sound, kind=kind, verify="2ba", options=options))
    assert plain == verified


def parting(rank: int, ranks: int, verify: str | None) -> Any:
    """The last rank's parameters are others from the second batch on."""

    @pl.algorithm(Event.BATCH_END)
    def part(state: pl.State) -> pl.State:
        if rank != ranks - 1 or state.timestamp.batch != 2:
            return state
        weight = local_tensor(state.params["weight"]).clone()
        weight.view(torch.int32)[0, 1] ^= 1
        return state.replace(params={**state.params, "weight": weight})

    torch.manual_seed(0)
    data = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(4)]
    return told(
        pl.fit(
            *(nn.Linear(3, 1), data),
            loss=functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ep",
            algorithms=[part],
            parallel="replicate",
            verify=verify,
        )
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_other_parameters_are_noticed(ranks: int) -> None:
    answers = pool(ranks).run(partial(parting, ranks=ranks, verify="3ba"))
    for answer in answers:
        assert answer == answers[0]
    assert (answers[0]["stage"], answers[0]["leaf"], answers[0]["batch"]) == (None, "params/weight", 2)
    assert not answers[0]["transient"]
    assert answers[0]["rank"] == (2 if ranks == 3 else None)
    assert f"the {ranks} ranks have different parameters, params/weight first" in answers[0]["text"]
