"""What the others say when a rank hangs, or reaches other parameters: who, and where.

Of one that raises, leaves or does something else, see ``test_ranks_that_differ.py``; of one that is killed,
``test_ranks_scripts.py``. Slow: ranks wait for their timeout.
"""

from __future__ import annotations

import re
import time

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.distributed import Parallel
from tests.support.worlds import an_epoch, pool, told

pytestmark = pytest.mark.slow
TIMEOUT = 4.0


def test_a_rank_that_hangs_is_named():
    """Replicated and sharded, for longer than the timeout."""

    def program(rank):
        texts = []
        for kind, event in (("replicate", Event.BATCH_END), ("shard", Event.BEFORE_LOSS)):

            def hangs(state):
                if rank == 1 and state.timestamp.batch == 1:
                    time.sleep(TIMEOUT + 4)
                return state

            data = [(torch.ones(6, 2), torch.zeros(6, 1))] * 4
            options = {
                "parallel": Parallel(kind=kind, timeout=TIMEOUT),
                "algorithms": [pl.Algorithm("a", {event: hangs})],
            }
            texts.append(told(an_epoch(torch.nn.Linear(2, 1), data, **options)))
        return texts

    for rank, texts in enumerate(pool(3).run(program)):
        for text in texts if rank != 1 else ():
            assert "DistributedError" in text
            assert "rank 1 did not come to what follows" in text
            assert re.search(r"hanging; last heard of ([4-9]|\d\d)\.\d s ago, where the timeout is 4 s", text), text


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.one(x) if x[0, 0] > 0 else self.two(x)


def test_parameters_that_only_some_batches_reach():
    """By default and where it is asked for; else a rank is told by the next batch."""

    def stream(unused):
        # Each rank reaches one half, and the last batch the first one alone.
        inputs = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
        data = [(inputs, torch.zeros(2, 1)), (inputs.abs(), torch.zeros(2, 1))]
        return an_epoch(Halves(), data, parallel=Parallel(find_unused_parameters=unused, timeout=TIMEOUT))

    def program(rank):
        found = []
        for unused in (None, True):
            grads = [dict(state.grads) for event, state in stream(unused) if event is Event.AFTER_TRAIN_BATCH]
            found.append([[name for name, tensor in each.items() if tensor is None] for each in grads])
        return found, told(stream(False))

    answers = pool().run(program)
    assert [found for found, _ in answers] == [[[[], ["two.weight", "two.bias"]]] * 2] * 2
    assert any("find_unused_parameters=True" in text for _, text in answers)
