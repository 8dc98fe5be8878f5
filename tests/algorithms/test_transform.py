"""Random functions of samples and batches, seeded by the run."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import transform
from tests.support.runs import equal, mlp, points, stream, train


def noisy(sample: Tensor) -> Tensor:
    """Draws from all three generators."""
    return sample + torch.randn(sample.shape) + random.random() + float(np.random.rand())


def inputs(algorithm: Any, **options: Any) -> list[Tensor]:
    pairs = stream(mlp(), points(), [algorithm], max_duration="1ep", **options)
    return [state.batch[0] for event, state in pairs if event is Event.BATCH_START]


@pytest.mark.parametrize("per_sample", [True, False])
def test_draws_are_of_the_run(per_sample: bool) -> None:
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first, again = inputs(transform(noisy, per_sample)), inputs(transform(noisy, per_sample))
    for one, two, (plain, _) in zip(first, again, points(), strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, plain)
    assert not torch.equal(inputs(transform(noisy, per_sample), seed=1)[0], first[0])
    assert not torch.equal(inputs(transform(noisy, per_sample, name="other"))[0], first[0])
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_each_sample_has_draws_of_its_own() -> None:
    data = [(torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64))]
    pairs = stream(mlp(), data, [transform(lambda sample: sample + torch.rand(()))], max_duration="1ba")
    (batch,) = [state.batch[0] for event, state in pairs if event is Event.BATCH_START]
    assert len(batch.unique()) == 6


def test_it_resumes_and_is_the_same_in_microbatches() -> None:
    algorithm = transform(noisy)
    whole = train(mlp(), points(), [algorithm])
    half = train(mlp(), points(), [algorithm], max_duration="4ba")
    equal(train(half, points(), [algorithm]).params, whole.params)


def test_a_function_of_the_batch() -> None:
    """As timm's Mixup takes it: inputs and targets in, both out, of another form."""

    def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        share = np.random.beta(0.8, 0.8)
        targets = nn.functional.one_hot(y, 3).float()
        return share * x + (1 - share) * x.flip(0), share * targets + (1 - share) * targets.flip(0)

    algorithm = transform(lambda batch: mixed(*batch), whole_batch=True)
    equal(train(mlp(), points(), [algorithm]).params, train(mlp(), points(), [algorithm]).params)
    assert inputs(algorithm)[0].shape == (5, 4)


def test_evaluation_has_none() -> None:
    for event, state in stream(mlp(), points(), [transform(noisy)], evaluators={"val": points()}):
        if event is Event.EVAL_BEFORE_FORWARD:
            assert any(torch.equal(state.microbatch[0], plain) for plain, _ in points())


def test_what_is_refused() -> None:
    with pytest.raises(pl.ArgumentTypeError, match="is not a function of an input"):
        transform(3)  # type: ignore[arg-type]
    with pytest.raises(pl.DataError, match="the inputs are list, not a tensor of samples"):
        train(mlp(), [(["a", "b"], torch.zeros(2, dtype=torch.int64))], [transform(noisy)])
    grown: list[Any] = []

    def growing(sample: Tensor) -> Tensor:
        grown.append(sample)
        return sample.repeat(len(grown))

    with pytest.raises(pl.DataError, match=r"\(12,\).*, which are no samples of one batch"):
        train(mlp(), points(), [transform(growing)])
