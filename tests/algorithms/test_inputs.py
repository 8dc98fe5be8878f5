"""Algorithms that change images and other inputs: whose draws they take, and their formulas."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from pure_loop.algorithms._images import GEOMETRIC, OPERATIONS, as_pixels, box_mask, centres, from_pixels, operated
from tests.algorithms.layers import Pixels, pictures, pooled
from tests.support.problem import close, cross_entropy, fit, noise, run
from tests.support.streams import equal

NAMES = tuple(OPERATIONS)
same = torch.testing.assert_close


def applied(algorithm: pl.Algorithm, batch: Any, number: int = 0, duration: str = "20ba", **settings: Any) -> Any:
    """What an algorithm makes of a batch: of the first one of the run, or a later one."""
    timestamp = pl.Timestamp(batch=number, max_duration=pl.Time(duration))
    state = pl.State.create(pooled(), **settings).replace(batch=batch, timestamp=timestamp)
    mixes = Event.BEFORE_TRAIN_BATCH in algorithm.handlers
    return algorithm(state.replace(event=Event.BEFORE_TRAIN_BATCH) if mixes else state).batch


def labelled(inputs: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, torch.arange(len(inputs)) % 3


def drawing(sample: Tensor) -> Tensor:
    """From all three generators."""
    return sample + torch.rand(()) + random.random() + float(np.random.rand())


AUGMENTATIONS: dict[str, Callable[..., pl.Algorithm]] = {
    "mixup": lambda **s: A.mixup(1.0, **s),
    "randaugment": lambda **s: A.randaugment(magnitude=20, **s),
    "colout": lambda **s: A.colout(0.5, 0.5, **s),
    "progressive_resizing": lambda **s: A.progressive_resizing(mode="crop", **s),
    "transform": lambda **s: A.transform(drawing, **s),
    "transform of batches": lambda **s: A.transform(drawing, per_sample=False, **s),
    "cutmix": A.cutmix,
    "cutout": A.cutout,
    "augmix": A.augmix,
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_draws_are_of_the_run_of_the_name_and_of_each_batch(name: str) -> None:
    """Global generators stay where they are."""

    def generators() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]

    make, before, data = AUGMENTATIONS[name], generators(), labelled(torch.rand(16, 3, 16, 16, generator=noise()))
    first = applied(make(), data)
    equal(applied(make(), data), first)
    for other in (applied(make(), data, 1), applied(make(), data, seed=1), applied(make(name="other"), data), data):
        with pytest.raises(AssertionError):
            equal(other, first)
    assert generators() == before


def test_with_a_strength_of_0_a_batch_is_as_it_was() -> None:
    """Bitwise; the loss takes class indices, then. Of a schedule it takes probabilities."""
    data, zero = pictures(dtype=torch.float32), pl.schedules.constant(0.0)
    off = [A.mixup(0), A.mixup(probability=0), A.cutmix(0), A.cutmix(probability=0), A.cutout(length=0)]
    for algorithm in (*off, A.colout(0, 0), A.augmix(0.0), A.augmix(zero)):
        equal(applied(algorithm, data[0]), data[0])
    for algorithm in (A.mixup(zero), A.mixup(probability=zero)):
        close(run(Pixels(), data, [algorithm]).params, run(Pixels(), data).params)


def test_functions_take_a_sample_a_batch_or_all_of_it() -> None:
    zeros = labelled(torch.zeros(6, 4))
    assert len(applied(A.transform(drawing), zeros)[0].unique()) == 6

    def mixed(batch: Any) -> Any:
        """As timm's Mixup takes it."""
        share, targets = np.random.beta(0.8, 0.8), functional.one_hot(batch[1], 3).float()
        return batch[0] + share, share * targets + (1 - share) * targets.flip(0)

    whole = A.transform(mixed, whole_batch=True)
    equal(applied(whole, zeros), applied(whole, zeros))
    assert applied(whole, zeros)[1].is_floating_point()
    assert not applied(A.transform(lambda image: image * 0), torch.ones(4, 4)).any(), "of a batch that is a tensor"
    pairs = fit(nn.Linear(4, 3), [zeros] * 2, [A.transform(drawing)], batches_per_step=2, max_duration="1ba")
    first, second = (state.microbatch[0] for event, state in pairs if event is Event.BEFORE_FORWARD)
    assert not torch.equal(first, second), "each batch of a step has its own"


# Boxes, rows and columns


def test_boxes_have_all_their_rows_and_their_places_are_uniform() -> None:
    state, n = pl.State.create(nn.Linear(1, 1)), 40_000
    for size in (1, 2, 3, 4):
        side = torch.tensor(size)
        assert box_mask(20, 20, side, side, torch.tensor(10), torch.tensor(10)).sum() == size**2
        assert centres(("box",), state, (n,), 6, side, False).unique().tolist() == list(range(6))
        drawn = centres(("box",), state, (n,), 6, side, True)
        rows = box_mask(6, 1, side.expand(n), torch.ones(n).long(), drawn, torch.zeros(n).long())[..., 0]
        # Of the 6 + size - 1 places at which a box covers a pixel each pixel is in as many as the box has rows.
        same(rows.double().mean(0), torch.full((6,), size / (5 + size)).double(), atol=0.015, rtol=0)
        assert rows.any(1).all()


@pytest.mark.parametrize("per_sample", [True, False])
def test_squares_are_cut_out_of_each_image(per_sample: bool) -> None:
    for length, side in {0.5: 5, 0.3: 3, 0.29: 2, 0.95: 9}.items():
        algorithm, images = A.cutout(length=length, per_sample=per_sample), labelled(torch.ones(6, 2, 10, 14))
        holes = torch.stack([applied(algorithm, images, number)[0] for number in range(10)]) == 0
        assert torch.equal(holes[:, :, 0], holes[:, :, 1])
        sizes = holes[:, :, 0].flatten(2).sum(2)
        assert any(not torch.equal(batch[0], batch[1]) for batch in holes) is per_sample
        assert sizes.max() == side**2 if length <= 0.5 else sizes.max() <= side**2
        assert sizes.min() >= (side // 2) ** 2
    batch, _ = applied(A.cutout(3, 0.2, value=(5.0, -1.0)), labelled(torch.ones(50, 2, 20, 20)))
    assert torch.equal(batch[:, 0] == 5, batch[:, 1] == -1)
    assert (batch[:, 0] == 5).flatten(1).sum(1).max() == 3 * 16
    growing = A.cutout(length=pl.schedules.linear(0.0, 0.8, "4ba"))
    grown = [applied(growing, labelled(torch.ones(20, 1, 10, 10)), number)[0] for number in range(4)]
    assert [int((batch == 0).flatten(1).sum(1).max()) for batch in grown] == [0, 4, 16, 36]


@pytest.mark.parametrize("per_sample", [False, True])
def test_rows_and_columns_that_stay_are_in_their_order(per_sample: bool) -> None:
    """Maps of classes lose the same; all columns of a row are of one row, and all rows of a column of one column."""
    maps = torch.arange(48).view(1, 6, 8).expand(5, 6, 8)
    data = maps.unsqueeze(1).float().expand(5, 3, 6, 8), maps
    for number in range(6):
        batch, targets = applied(A.colout(0.5, 0.25, per_sample=per_sample), data, number)
        assert batch.shape == (5, 3, 3, 6)
        assert all((batch.diff(dim=dim) > 0).all() for dim in (-1, -2))
        assert (batch // 8 == batch[..., :1] // 8).all()
        assert (batch % 8 == batch[..., :1, :] % 8).all()
        assert torch.equal(batch[:, 0].long(), targets)
        assert all(torch.equal(batch[0], each) for each in batch) != per_sample
    assert applied(A.colout(0.5, 0.5, targets="never"), data)[1] is maps
    for share, count in {0.3: 4, 0.15: 5, 0.8: 1}.items():
        assert applied(A.colout(share, 0), data)[0].shape == (5, 3, count, 8)


# Sizes that grow


def test_images_and_sequences_grow_as_the_run_goes_on() -> None:
    """Of images of 32 pixels, at 0, 0.5, 0.6, 0.65 and 0.8 of 20 batches; tokens are counted as they were loaded."""

    def sides(algorithm: pl.Algorithm, *shape: int) -> list[int]:
        batch = torch.zeros(2, *shape, dtype=torch.int64 if len(shape) == 1 else None)
        return [applied(algorithm, (batch, batch), number)[0].shape[-1] for number in range(20)]

    def chosen(found: list[int], *numbers: int) -> list[int]:
        assert found == sorted(found)
        return [found[number] for number in numbers]

    resized, warm = A.progressive_resizing, A.sequence_length_warmup
    assert chosen(sides(resized(), 1, 32, 32), 0, 10, 12, 13, 16, 19) == [16, 16, 20, 24, 32, 32]
    for amount in ("0.25dur", "5ba"):
        assert chosen(sides(resized(delay=amount, finetune=amount), 1, 32, 32), 4, 5, 14, 15) == [16, 16, 32, 32]
    assert {side % 4 for side in sides(resized(0.4, delay=0, finetune=0, increment=4), 1, 30, 50)[:19]} == {0}
    by_schedule = resized(size=pl.schedules.step("10ba", gamma=0.5), increment=1)
    assert sides(by_schedule, 1, 32, 32) == [32] * 10 + [16] * 10
    for duration in ("15ba", "0.75dur"):
        assert chosen(sides(warm(duration, max_length=64), 64), 0, 4, 14, 15) == [8, 16, 56, 64]
    for settings, wanted in (
        ({"min_length": 5, "max_length": 5}, [5] * 6),
        ({"min_length": 2, "max_length": 7, "increment": 10}, [2, 2, 2, 2, 7, 7]),
        ({"min_length": 2, "max_length": 7, "increment": 2}, [2, 2, 4, 4, 7, 7]),
        ({"length": pl.schedules.linear(1.0, 7.0, "3ba")}, [1, 3, 5, 7, 7, 7]),
        ({"max_length": 1000}, [8] * 6),
    ):
        assert sides(warm("4ba", **settings), 8)[:6] == wanted  # type: ignore[arg-type]
    words, algorithm = torch.arange(32).view(2, 16) % 9, warm("2ep", max_length=16)
    options: dict[str, Any] = {"loss": pl.Task(loss=lambda o, _: o.mean()), "max_duration": "3ep"}
    pairs = fit(nn.Sequential(nn.Embedding(9, 9), nn.Flatten(2)), [(words, words)] * 2, [algorithm], **options)
    found = [(s.batch[0].shape[1], s.timestamp.token) for event, s in pairs if event is Event.BATCH_START]
    assert found == [(8, 0), (8, 32), (8, 64), (8, 96), (16, 128), (16, 160)]


def test_smaller_images_are_filtered_or_cropped_and_maps_keep_their_classes() -> None:
    stripes = torch.tensor([0.0, 1.0]).repeat(16).expand(1, 1, 32, 32)
    inner = A.resized(stripes, 16, 16)[..., 2:-2]
    same(inner, torch.full_like(inner, 0.5), atol=0.13, rtol=0)
    assert A.resized(stripes, 16, 16, "nearest").unique().numel() == 1
    assert A.resized((stripes * 255).to(torch.uint8), 16, 16, "bicubic").dtype is torch.uint8
    maps, corners = torch.arange(192).view(1, 12, 16).expand(2, 12, 16), set()
    for mode, number in [("resize", 0), *(("crop", number) for number in range(6))]:
        algorithm = A.progressive_resizing(0.5, targets=True, mode=mode, increment=2)  # type: ignore[arg-type]
        inputs, targets = applied(algorithm, (maps.unsqueeze(1).float(), maps), number, "12ba")
        assert (targets.shape, targets.dtype) == ((2, 6, 8), torch.int64)
        if mode == "crop":
            top, left = divmod(int(targets[0, 0, 0]), 16)
            assert torch.equal(targets, maps[:, top : top + 6, left : left + 8])
            assert torch.equal(inputs[:, 0].long(), targets)
            corners.add((top, left))
    assert len(corners) > 3


def test_which_tokens_of_a_sequence_stay() -> None:
    words, vectors = torch.arange(10).view(2, 5), torch.arange(20).view(2, 5, 2)
    assert A.with_length((words, words), 3, "reshape")[1].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert A.with_length((words, vectors), 5, "reshape")[1] is vectors
    assert A.with_length((words, vectors), 2, "reshape")[1].shape == (5, 2, 2)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 0, 0], [1, 2, 9, 0, 0, 0], [1, 9, 0, 0, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "label": torch.arange(4)}
    cut = A.with_length(batch, 3, keep_end=True)
    assert cut["input_ids"].tolist() == [[1, 2, 6], [1, 2, 9], [1, 2, 9], [1, 9, 0]]
    assert torch.equal(cut["attention_mask"], (cut["input_ids"] != 0).long())
    assert cut["label"] is batch["label"]
    assert torch.equal(A.with_length(batch, 3)["input_ids"], ids[:, :3])
    assert A.with_length(batch, 3, keys=["input_ids"])["attention_mask"] is batch["attention_mask"]
    assert A.with_length(ids, 2, keep_end=True)[0].tolist() == [1, 6]
    left = {"input_ids": ids.flip(1), "attention_mask": (ids != 0).long().flip(1)}
    assert A.with_length(left, 3, keep_end=True)["input_ids"].tolist() == [[6, 5, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]]


# Operations on images, against Pillow's


def smooth(count: int = 2) -> Tensor:
    """Images whose histograms are not flat."""
    place = torch.linspace(0, 3, 24)
    waves = torch.stack([torch.sin(place[:, None] * k + place * (3 - k)) for k in range(3)])
    return (waves * 100 + 110 + torch.randn(count, 3, 24, 24, generator=noise()) * 10).clamp(0, 255).to(torch.uint8)


def one(name: str, images: Tensor, level: float, sign: float = 1.0, mean: Any = None, std: Any = None) -> Tensor:
    ones, pixels = torch.ones(len(images)), as_pixels(images, mean, std, "f", checks=True)
    changed = operated(pixels, NAMES, (NAMES.index(name) * ones).long(), level * ones, sign * ones)
    return from_pixels(changed, images, None, None, before=pixels) if mean is None else changed


def by_pillow(function: Callable[[Any], Any]) -> Tensor:
    results = [np.asarray(function(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in smooth()]
    return torch.from_numpy(np.stack(results)).permute(0, 3, 1, 2)


def enhanced(name: str, level: float, sign: int) -> Callable[[Any], Any]:
    return lambda image: getattr(ImageEnhance, name.title())(image).enhance(1 + 0.9 * level * sign)


BLENDS = itertools.product(("color", "contrast", "brightness", "sharpness"), (0.3, 1.0), (1, -1))
# The level and the sign, the operation of Pillow, and by how much a value may differ: Pillow rounds a base, too.
PILLOW: list[tuple[str, float, int, Callable[[Any], Any], int]] = [
    ("equalize", 0.3, 1, ImageOps.equalize, 0),
    ("autocontrast", 0.5, 1, ImageOps.autocontrast, 1),
    ("posterize", 0.5, 1, lambda image: ImageOps.posterize(image, 6), 0),
    ("posterize", 1.0, 1, lambda image: ImageOps.posterize(image, 4), 0),
    ("solarize", 0.5, 1, lambda image: ImageOps.solarize(image, 128), 0),
    ("solarize", 1.0, 1, lambda image: ImageOps.solarize(image, 0), 0),
    *[(name, 0.0, 1, lambda image: image, 0) for name in ("posterize", "solarize", "identity", *GEOMETRIC)],
    *[(name, level, sign, enhanced(name, level, sign), 2) for name, level, sign in BLENDS],
]


def test_operations_on_colours_are_those_of_pillow() -> None:
    for name, level, sign, function, off in PILLOW:
        assert (one(name, smooth(), level, sign).int() - by_pillow(function).int()).abs().max() <= off, (name, level)
    flat, steps = torch.full((1, 3, 4, 4), 7, dtype=torch.uint8), torch.arange(256).to(torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(one("autocontrast", flat, 1.0), flat)
    assert torch.equal(one("equalize", flat, 1.0), flat)
    for level in (0.25, 0.5, 1.0):  # denormalized values lie a little below a whole number
        found = one("posterize", (steps.float() / 255 - 0.4734) / 0.2515, level, mean=0.4734, std=0.2515)
        same(found, one("posterize", steps, level).float(), atol=0.01, rtol=0)


@pytest.mark.parametrize("name", GEOMETRIC)
def test_pixels_move_by_the_strength(name: str) -> None:
    """The centre of a blob is measured."""
    for height, width in ((24, 24), (16, 32)):
        ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        y0, x0 = height * 0.55, width * 0.6
        blob = 250 * torch.exp(-((ys - y0) ** 2 + (xs - x0) ** 2) / 4)
        result = one(name, blob.expand(1, 1, height, width).to(torch.uint8), 0.3)[0, 0].double()
        centre = [float((result * place).sum() / result.sum()) for place in (ys, xs)]
        dy, dx, sin, cos = y0 - (height - 1) / 2, x0 - (width - 1) / 2, np.sin(0.05 * np.pi), np.cos(0.05 * np.pi)
        y, x = {
            "rotate": (dy * cos + dx * sin, dx * cos - dy * sin),
            "shear_x": (dy, dx - 0.09 * dy),
            "shear_y": (dy - 0.09 * dx, dx),
            "translate_x": (dy, dx - 0.135 * width),
            "translate_y": (dy - 0.135 * height, dx),
        }[name]
        assert centre == pytest.approx([y + (height - 1) / 2, x + (width - 1) / 2], abs=0.25)


def test_each_image_has_its_own_operation_and_pixels_keep_their_dtype() -> None:
    pixels = as_pixels(smooth(len(NAMES)), None, None, "f", checks=True)
    level, ones = torch.linspace(0.1, 1, len(NAMES)), torch.ones(len(NAMES))
    together = operated(pixels, NAMES, torch.arange(len(NAMES)), level, ones)
    for number in range(len(NAMES)):
        rows = slice(number, number + 1)
        same(together[rows], operated(pixels[rows], NAMES, torch.tensor([number]), level[rows], ones[:1]))
    normalized: Any = (smooth().float() / 255 - 0.5) / 0.25
    for images, mean, std in ((normalized * 0.25 + 0.5, None, None), (normalized.half(), (0.5,) * 3, [0.25] * 3)):
        pixels = as_pixels(images, mean, std, "f", checks=True)  # type: ignore[arg-type]
        same(pixels, smooth().float(), atol=0.1, rtol=0)
        assert torch.equal(from_pixels(pixels, images, mean, std, before=pixels), images)  # type: ignore[arg-type]
        back = from_pixels(pixels, images, mean, std, before=pixels + 1)  # type: ignore[arg-type]
        assert back.dtype is images.dtype
        same(back, images, atol=2e-3, rtol=1e-3)


def test_random_operations_have_the_strength_of_the_settings() -> None:
    data, floats = pictures(1, 64)[0], pictures(1, 64, torch.float32)[0]
    plain = data[0]

    def changed(*settings: Any, given: Any = data, **options: Any) -> Tensor:
        return applied(A.randaugment(*settings, **options), given)[0]  # type: ignore[no-any-return]

    assert changed(1).dtype is torch.uint8
    same(changed(1, given=floats) * 255, changed(1).float(), atol=0.51, rtol=0)
    assert torch.equal(changed(1, 9, bins=5), changed(1, 4, bins=5)), "the last bin"
    for apart in (False, True):
        batch = changed(given=labelled(plain[:1].expand(6, 3, 9, 9)), per_sample=apart)
        assert all(torch.equal(each, batch[0]) for each in batch) is not apart
    growing = A.randaugment(magnitude=pl.schedules.linear(0.0, 30.0, "1dur"))
    near, far = ((applied(growing, data, n)[0].float() - plain.float()).abs().mean() for n in (0, 19))
    assert near < far
    for kind in ("all", "safe"):  # without strength all stay, but those of autocontrast and equalize
        images = A.randaugment_images(plain[:8], 1, 0, set=kind, generator=noise())  # type: ignore[arg-type]
        assert (images == plain[:8]).flatten(1).all(1).sum() >= 3


# AugMix


def test_mixed_chains_stay_images_and_are_of_the_generator() -> None:
    images, generator, before = pictures(dtype=torch.float32)[0][0], noise(), torch.get_rng_state()
    for depth, width in ((None, 1), (1, 3), (4, 3)):
        mixed, other = (A.augmix_images(images, 10.0, width, depth, generator=generator) for _ in range(2))
        assert 0 <= mixed.min() <= mixed.max() <= 1
        assert not any(torch.equal(mixed, each) for each in (images, other))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_consistency_of_three_images_is_part_of_the_loss() -> None:
    data, algorithm = pictures(3, 4, torch.float64), A.augmix(consistency=12.0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(243, 3)).double()
    states = dict(fit(net, data, [algorithm], max_duration="1ba", donate=False))
    images, targets = states[Event.BEFORE_FORWARD].microbatch
    assert torch.equal(images[::3], data[0][0])
    assert torch.equal(targets, data[0][1].repeat_interleave(3))
    scores, after = net(images), states[Event.AFTER_LOSS]
    parts = torch.stack([scores[number::3].softmax(1) for number in range(3)])
    divergence = (parts * (parts / parts.mean(0)).log()).sum(2).mean()  # the mean of three of Kullback and Leibler
    same(after.loss, cross_entropy(scores[::3], data[0][1]) + 12 * divergence, rtol=1e-6, atol=1e-6)
    assert torch.equal(after.microbatch[1], data[0][1])
    assert after.outputs.shape == (4, 3)
    whole = run(net, data, [algorithm], train_metrics=[pl.metrics.accuracy()])
    close(run(net, data, [algorithm], microbatch_size=6).params, whole.params, 1e-5)
    assert not torch.equal(run(net, data, [A.augmix()]).params["1.weight"], whole.params["1.weight"])
