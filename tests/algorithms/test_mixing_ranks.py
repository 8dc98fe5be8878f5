"""Algorithms that mix samples and targets, on two real ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from pure_loop import Event
from pure_loop.algorithms import augmix, cutmix, label_smoothing, mixup
from pure_loop.compile import interpreted
from tests.support.runs import convnet, images, stream
from tests.support.worlds import pool

ALGORITHMS = {
    "mixup": lambda: [mixup(alpha=0.4), label_smoothing(0.1)],
    "mixup of losses": lambda: [mixup(alpha=0.4, interpolate="loss")],
    "cutmix": lambda: [cutmix()],
    "augmix": lambda: [augmix()],
}


def on_a_rank(rank: int, name: str, kind: Any, compiled: bool) -> Any:
    shares, options = [], {"parallel": kind, "compile": compiled, "strict": False, "seed": 0, "microbatch_size": 2}
    data = [(inputs.sigmoid(), targets) for inputs, targets in images(3, size=8)]
    with interpreted():
        for event, state in stream(convnet(), data, ALGORITHMS[name](), max_duration="1ep", **options):
            if event is Event.BEFORE_FORWARD and hasattr(state.microbatch[1], "weight"):
                shares.append(state.microbatch[1].weight.detach().clone())
    return shares, {key: tensor.detach().clone() for key, tensor in state.module().state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("kind", "compiled"), [("replicate", False), ("shard", False), ("replicate", True)])
def test_ranks_draw_one_share_and_train_one_model(name: str, kind: str, compiled: bool) -> None:
    one, two = pool().run(partial(on_a_rank, name=name, kind=kind, compiled=compiled))
    assert len(one[0]) == (0 if name == "augmix" else 6)
    for mine, other in zip(one[0], two[0], strict=True):
        assert torch.equal(mine, other)
    for key, tensor in one[1].items():
        assert torch.equal(tensor, two[1][key]), key
