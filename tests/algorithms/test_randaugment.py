"""RandAugment, in real training loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import randaugment, randaugment_images
from tests.support.runs import equal, noise, stream, train


def pictures(batches: int = 2, size: int = 8) -> Any:
    g = noise()
    return [
        (torch.randint(256, (size, 3, 9, 9), generator=g, dtype=torch.uint8), torch.randint(3, (size,), generator=g))
        for _ in range(batches)
    ]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(243, 3)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(images.flatten(1).float() / (255 if images.dtype is torch.uint8 else 1))
        return out


def seen(algorithm: Any, data: Any, **options: Any) -> list[torch.Tensor]:
    pairs = stream(Net(), data, [algorithm], max_duration="1ep", **options)
    return [state.batch[0] for event, state in pairs if event is Event.BATCH_END]


def test_images_change_and_draws_are_of_the_run() -> None:
    first = seen(randaugment(), pictures())
    for one, again, (plain, _) in zip(first, seen(randaugment(), pictures()), pictures(), strict=True):
        assert torch.equal(one, again)
        assert one.dtype is torch.uint8
        changed = (one != plain).flatten(1).any(1)
        assert changed.sum() > 4
    assert not torch.equal(seen(randaugment(), pictures(), seed=1)[0], first[0])
    equal(train(Net(), pictures(), [randaugment()], microbatch_size=3).params.keys(), Net().state_dict().keys())


def test_floats_are_what_bytes_are() -> None:
    bytes_ = seen(randaugment(1), pictures())[0]
    floats = seen(randaugment(1), [(x.float() / 255, y) for x, y in pictures()])[0]
    torch.testing.assert_close(floats * 255, bytes_.float(), atol=0.51, rtol=0)


def test_one_operation_for_the_batch() -> None:
    image = torch.randint(256, (1, 3, 9, 9), generator=noise(), dtype=torch.uint8).expand(6, 3, 9, 9)
    data = [(image, torch.zeros(6, dtype=torch.int64))] * 4
    for batch in seen(randaugment(per_sample=False), data):
        assert all(torch.equal(sample, batch[0]) for sample in batch)
    assert not all(torch.equal(sample, batch[0]) for batch in seen(randaugment(), data) for sample in batch)


@pytest.mark.parametrize("kind", ["all", "safe"])
def test_without_strength_pixels_stay_where_they_are(kind: Any) -> None:
    images = pictures()[0][0]
    changed = randaugment_images(images, 1, 0, set=kind, generator=noise())
    same = (changed == images).flatten(1).all(1)
    assert same.sum() >= 3  # all but those of autocontrast and equalize
    assert torch.equal(randaugment_images(images, generator=noise()), randaugment_images(images, generator=noise()))


def test_a_schedule_of_strengths() -> None:
    batches = seen(randaugment(magnitude=pl.schedules.linear(0.0, 30.0, "1dur")), pictures(4, 64))
    far = [(batch.float() - x.float()).abs().mean() for batch, (x, _) in zip(batches, pictures(4, 64), strict=True)]
    assert far[0] < far[-1]


def test_the_largest_strength_is_that_of_the_last_bin() -> None:
    data = pictures(1, 64)
    assert torch.equal(seen(randaugment(1, 9, bins=5), data)[0], seen(randaugment(1, 4, bins=5), data)[0])


def test_images_that_keep_their_pixels_keep_their_bits() -> None:
    floats = [(x.float() / 255, y) for x, y in pictures(1, 64)]
    same = (seen(randaugment(1, 0), floats)[0] == floats[0][0]).flatten(1).all(1)
    assert same.sum() > 40


def test_what_is_refused() -> None:
    for settings in ({"operations": 0}, {"magnitude": 31}, {"magnitude": -1}, {"bins": 1}):
        with pytest.raises(pl.ArgumentError, match=next(iter(settings))):
            randaugment(**settings)  # type: ignore[arg-type]
    normalized = [(torch.randn(4, 3, 9, 9, generator=noise()), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(pl.DataError, match=r"randaugment\(mean=, std=\)"):
        train(Net(), normalized, [randaugment()])
    train(Net(), normalized, [randaugment(mean=0.5, std=0.1)])


@pytest.mark.slow
def test_compiled() -> None:
    torch.testing.assert_close(
        dict(train(Net(), pictures(), [randaugment()], compile=True).params),
        dict(train(Net(), pictures(), [randaugment()]).params),
    )
