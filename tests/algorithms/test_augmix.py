"""AugMix and its consistency loss, in real training loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import augmix, augmix_images, jensen_shannon
from tests.algorithms.test_randaugment import Net, pictures, seen
from tests.support.runs import close, cross_entropy, equal, noise, stream, train


@pytest.mark.parametrize(
    ("distributions", "wanted"),
    [
        ([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], 0.462098),
        ([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]], 0.021619),
        ([[0.3, 0.7]] * 3, 0.0),
    ],
)
def test_divergences(distributions: Any, wanted: float) -> None:
    parts = [torch.tensor([distribution]) for distribution in distributions]
    torch.testing.assert_close(jensen_shannon(*parts), torch.tensor(wanted), atol=1e-6, rtol=0)


def test_images_change_and_draws_are_of_the_run() -> None:
    first = seen(augmix(), pictures())
    for one, again, (plain, _) in zip(first, seen(augmix(), pictures()), pictures(), strict=True):
        assert torch.equal(one, again)
        assert (one != plain).flatten(1).any(1).sum() >= 6
    assert not torch.equal(seen(augmix(), pictures(), seed=1)[0], first[0])


def test_without_severity_images_stay() -> None:
    equal(train(Net(), pictures(), [augmix(0.0)]).params, train(Net(), pictures()).params)
    by_schedule = seen(augmix(pl.schedules.constant(0.0)), pictures())
    assert torch.equal(by_schedule[0], pictures()[0][0])
    images = pictures()[0][0]
    assert torch.equal(augmix_images(images, 0.0), images)


@pytest.mark.parametrize("depth", [None, 1, 4])
@pytest.mark.parametrize("width", [1, 3])
def test_chains(depth: Any, width: int) -> None:
    images = pictures()[0][0].float() / 255
    torch.manual_seed(0)
    mixed = augmix_images(images, 10.0, width, depth)
    assert mixed.shape == images.shape
    assert 0 <= mixed.min() <= mixed.max() <= 1
    assert not torch.equal(mixed, images)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(243, 3)).double()


def data() -> Any:
    return [(x.double() / 255, y) for x, y in pictures(3, 4)]


def test_the_loss_of_three_images() -> None:
    algorithm = augmix(consistency=12.0)
    pairs = list(stream(net(), data(), [algorithm], max_duration="1ba"))
    (before,) = [state for event, state in pairs if event is Event.BEFORE_FORWARD]
    images, targets = before.microbatch
    assert images.shape == (12, 3, 9, 9)
    assert torch.equal(images[::3], data()[0][0])
    assert torch.equal(targets, data()[0][1].repeat_interleave(3))
    (after,) = [state for event, state in pairs if event is Event.AFTER_LOSS]
    scores = net()(images)
    parts = [scores[number::3].float().softmax(1) for number in range(3)]
    mean = sum(parts) / 3
    divergence = sum(functional.kl_div(mean.log(), part, reduction="batchmean") for part in parts) / 3
    torch.testing.assert_close(after.loss, cross_entropy(scores[::3], data()[0][1]) + 12 * divergence)
    assert torch.equal(after.microbatch[1], data()[0][1])
    assert after.outputs.shape == (4, 3)


def test_microbatches_of_whole_samples() -> None:
    algorithm = augmix(consistency=12.0)
    whole = train(net(), data(), [algorithm], train_metrics=[pl.metrics.accuracy()])
    close(train(net(), data(), [algorithm], microbatch_size=6).params, whole.params, 1e-5)
    with pytest.raises(pl.ArgumentError, match=r"microbatch_size=4 parts them: write a multiple of 3"):
        train(net(), data(), [algorithm], microbatch_size=4)
    assert not torch.equal(train(net(), data(), [augmix()]).params["1.weight"], whole.params["1.weight"])


def test_what_is_refused() -> None:
    wrong = {"severity": 10.5, "width": 0, "depth": 0, "alpha": 0, "consistency": -1}
    for setting, value in wrong.items():
        with pytest.raises(pl.ArgumentError, match=setting):
            augmix(**{setting: value})  # type: ignore[arg-type]
    normalized = [(torch.randn(4, 3, 9, 9, generator=noise()), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(pl.DataError, match=r"augmix\(mean=, std=\)"):
        train(Net(), normalized, [augmix()])


def test_images_of_a_generator_of_ones_own() -> None:
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    one, two, other = (augmix_images(images, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    generator = torch.Generator().manual_seed(1)
    first = augmix_images(images, generator=generator)
    assert torch.equal(first, one)
    assert not torch.equal(augmix_images(images, generator=generator), first)
