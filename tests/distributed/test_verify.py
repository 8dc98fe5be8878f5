"""``fit(verify=)`` on several ranks: the rank of a flipped bit is named, by all; ranks that part are noticed.

Slow: each fault is three runs of two processes.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import local_tensor
from pure_loop.errors import DistributedError, NonFiniteError, VerificationError
from tests.conftest import THOROUGH
from tests.support import faults, problem
from tests.support.faults import PLACES, Fault, bits_of
from tests.support.worlds import KINDS, an_epoch, pool

pytestmark = pytest.mark.slow

# Before ranks exchange gradients, so that those of all ranks differ after it.
EXCHANGED = {"gradient in the backward"}


def told(stream: Any) -> Any:
    """What a rank says of a stream: its end, or its error."""
    try:
        return bits_of(pl.run(stream))
    except VerificationError as error:
        named = ("stage", "leaf", "rank", "batch", "transient", "agreeing")
        return {**{name: getattr(error, name) for name in named}, "text": str(error)}
    except (DistributedError, NonFiniteError) as error:
        return f"{type(error).__name__}: {error}"


def flawed(rank: int, where: int, number: int, verify: str | None, kind: Any = "replicate") -> Any:
    """Two batches of a run, where one bit flips on one of the ranks."""
    choice = random.Random(number)
    run = (1 + number // 5 % 2 if verify else 1) if rank == where else 0
    fault = Fault(list(PLACES)[number % len(PLACES)], run, choice.randrange(2), number, microbatches=1)
    options: dict[str, Any] = {"max_duration": "2ba", "clock": lambda: 0.0, "strict": False}
    return told(faults.fit(fault, parallel=kind, verify=verify, **options))


def test_a_flipped_bit_of_a_rank_is_found_by_all() -> None:
    numbers = range(56 if THOROUGH else 14)

    def program(rank: int) -> list[Any]:
        """By number: what a sound run gives, a flawed one without and with ``verify``."""
        sound = flawed(rank, -1, 0, None)
        return [(sound, *(flawed(rank, n % 2, n, verify) for verify in (None, "1ba"))) for n in numbers]

    one, two = pool().run(program)
    found = 0
    for number, ours, others in zip(numbers, one, two, strict=True):
        place, where = list(PLACES)[number % len(PLACES)], number % 2
        changes = ours[0] != ours[1] or others[0] != others[1]
        report, same = (answer[2] if "stage" in answer[2] else None for answer in (ours, others))
        assert report == same, f"{number}: {place}"
        if report is None:
            # A State at the end of the second batch has nothing more of the first one's outputs.
            assert not changes, f"{number}: {place}"
            continue
        found += 1
        assert report["transient"], f"{number}: {place}: {report}"
        assert report["agreeing"] == ((1, 3), (2, 3))[number // 5 % 2 == 0]
        if report["rank"] is None:  # of what the loss or the backward had on one rank, gradients are the first sign
            assert report["stage"] == "backward", f"{number}: {place}: {report}"
            assert "on ranks 0, 1" in report["text"]
        else:
            assert place not in EXCHANGED
            assert report["rank"] == where, f"{number}: {place}: {report}"
            assert f"on rank {where}" in report["text"]
    assert found >= len(numbers) / 2


def test_of_shards_those_of_each_rank_are_compared() -> None:
    """And a sound run ends as one that is not verified."""
    ways = [(place, where) for place in ("activation", "new parameter", "optimizer state") for where in (0, 1)]

    def program(rank: int) -> Any:
        found = [flawed(rank, where, list(PLACES).index(place), "1ba", "shard") for place, where in ways]
        for kind in KINDS:
            for way in ({}, {"microbatch_size": 2}, {"precision": "amp_fp16"}):
                runs = [
                    problem.fit("noisy", problem.points(size=8), parallel=kind, verify=v, **way) for v in (None, "2ba")
                ]
                assert told(runs[0]) == told(runs[1])
        return found

    one, two = pool().run(program)
    assert one == two
    assert [(each["rank"], each["transient"]) for each in one] == [(where, True) for _, where in ways]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])  # three processes more
def test_ranks_with_other_parameters_are_noticed(ranks: int) -> None:
    """The last rank's are others from the second batch on."""

    def program(rank: int) -> Any:
        @pl.algorithm(Event.BATCH_END)
        def part(state: pl.State) -> pl.State:
            if rank != ranks - 1 or state.timestamp.batch != 2:
                return state
            weight = local_tensor(state.params["weight"]).clone()
            weight.view(torch.int32)[0, 1] ^= 1
            return state.replace(params={**state.params, "weight": weight})

        torch.manual_seed(0)
        data = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(4)]
        return told(an_epoch(nn.Linear(3, 1), data, algorithms=[part], parallel="replicate", verify="3ba"))

    first, *others = pool(ranks).run(program)
    assert others == [first] * (ranks - 1)
    assert (first["stage"], first["leaf"], first["batch"]) == (None, "params/weight", 2)
    assert not first["transient"]
    assert first["rank"] == (2 if ranks == 3 else None)
    assert f"the {ranks} ranks have different parameters, params/weight first" in first["text"]
