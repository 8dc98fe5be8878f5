"""Algorithms that change images and other inputs: whose draws they take, and their formulas."""

from __future__ import annotations

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
from tests.support.problem import close, cross_entropy, fit, noise, points, run
from tests.support.streams import equal

NAMES = tuple(OPERATIONS)
same = torch.testing.assert_close


def seen(algorithm: pl.Algorithm, data: Any, model: Any = None, **options: Any) -> list[Any]:
    """The microbatches of an epoch."""
    pairs = fit(model or pooled(data[0][0].shape[1]), data, [algorithm], **{"max_duration": "1ep", **options})
    return [state.microbatch for event, state in pairs if event is Event.BEFORE_FORWARD]


def drawing(sample: Tensor) -> Tensor:
    """From all three generators."""
    return sample + torch.rand(()) + random.random() + float(np.random.rand())


AUGMENTATIONS: dict[str, Callable[..., pl.Algorithm]] = {
    "mixup": lambda **s: A.mixup(1.0, **s),
    "cutmix": A.cutmix,
    "cutout": A.cutout,
    "randaugment": lambda **s: A.randaugment(magnitude=20, **s),
    "augmix": A.augmix,
    "colout": lambda **s: A.colout(0.5, 0.5, **s),
    "progressive_resizing": lambda **s: A.progressive_resizing(mode="crop", **s),
    "transform": lambda **s: A.transform(drawing, **s),
    "transform of batches": lambda **s: A.transform(drawing, per_sample=False, **s),
    "selective_backprop": lambda **s: A.selective_backprop(start=0, interrupt=0, **s),
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_draws_are_of_the_run_of_the_name_and_of_each_batch(name: str) -> None:
    """Each batch of a step has its own, evaluations have none, and global generators stay where they are."""
    make, g = AUGMENTATIONS[name], noise()
    data = [(torch.rand(16, 3, 16, 16, generator=g), torch.randint(3, (16,), generator=g))] * 2
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    first, second = (x for x, _ in seen(make(), data, batches_per_step=2, max_duration="1ba"))
    changes: dict[str, Any] = {"max_duration": "1ba"}
    assert torch.equal(seen(make(), data, **changes)[0][0], first)
    others = seen(make(), data, seed=1, **changes)[0][0], seen(make(name="other"), data, **changes)[0][0]
    for other in (second, data[0][0], *others):
        assert not torch.equal(first, other)
    for event, state in fit(pooled(3), data, [make()], evaluators=data, **changes):
        if event is Event.EVAL_BEFORE_FORWARD:
            assert torch.equal(state.microbatch[0], data[0][0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index]


def test_with_a_strength_of_0_training_is_as_it_was() -> None:
    """Bitwise; the loss takes class indices, then."""
    data = pictures(dtype=torch.float32)
    plain = run(Pixels(), data).params
    off = [A.mixup(0), A.mixup(probability=0), A.cutmix(0), A.cutmix(probability=0), A.cutout(length=0)]
    for algorithm in (*off, A.colout(0, 0), A.augmix(0.0), A.augmix(pl.schedules.constant(0.0))):
        equal(run(Pixels(), data, [algorithm]).params, plain)
    # Of a schedule the loss takes probabilities, whose cross entropy is rounded otherwise.
    for algorithm in (A.mixup(pl.schedules.constant(0.0)), A.mixup(probability=pl.schedules.constant(0.0))):
        close(run(Pixels(), data, [algorithm]).params, plain)


# Functions of one's own


def test_functions_take_a_sample_a_batch_or_all_of_it() -> None:
    data = [(torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64))]
    model = nn.Linear(4, 3)
    assert len(seen(A.transform(lambda x: x + torch.rand(())), data, model)[0][0].unique()) == 6

    def mixed(batch: Any) -> Any:
        """As timm's Mixup takes it."""
        share, targets = np.random.beta(0.8, 0.8), functional.one_hot(batch[1], 3).float()
        return share * batch[0] + (1 - share) * batch[0].flip(0), share * targets + (1 - share) * targets.flip(0)

    whole = A.transform(mixed, whole_batch=True)
    assert seen(whole, points(), model)[0][1].is_floating_point()
    equal(run(None, None, [whole]).params, run(None, None, [whole]).params)
    task = pl.Task(forward=lambda model, x: model(x), loss=lambda outputs, x: outputs.square().mean())
    options: dict[str, Any] = {"task": task, "loss": None, "max_duration": "1ba"}
    pairs = fit(pooled(3), [torch.rand(4, 3, 8, 8)], [A.transform(lambda image: image * 0)], **options)
    assert not next(state.microbatch for event, state in pairs if event is Event.BEFORE_FORWARD).any()


# Boxes


def test_boxes_have_all_their_rows_and_their_places_are_uniform() -> None:
    for centre, kept in {(1, 1): 0.75, (0, 0): 0.9375, (3, 3): 0.75}.items():
        mask = box_mask(4, 4, torch.tensor(2), torch.tensor(2), *map(torch.tensor, centre))
        assert 1 - mask.float().mean() == kept
    for size in (1, 2, 3, 4, 5, 9):
        side = torch.tensor(size)
        assert box_mask(20, 20, side, side, torch.tensor(10), torch.tensor(10)).sum() == size**2
    state, n = pl.State.create(nn.Linear(1, 1)), 40_000
    for size in (1, 2, 3, 4):
        assert centres(("box",), state, (n,), 6, torch.tensor(size), False).unique().tolist() == list(range(6))
        drawn = centres(("box",), state, (n,), 6, torch.tensor(size), True)
        rows = box_mask(6, 1, torch.full((n,), size), torch.ones(n).long(), drawn, torch.zeros(n).long())[..., 0]
        # Of the 6 + size - 1 places at which a box covers a pixel each pixel is in as many as the box has rows.
        same(rows.double().mean(0), torch.full((6,), size / (5 + size)).double(), atol=0.015, rtol=0)
        assert rows.any(1).all()


@pytest.mark.parametrize("per_sample", [True, False])
def test_squares_are_cut_out_of_each_image(per_sample: bool) -> None:
    data = [(torch.ones(6, 2, 10, 14), torch.zeros(6, dtype=torch.int64))] * 10
    for length, side in {0.5: 5, 0.3: 3, 0.29: 2, 0.95: 9}.items():
        sizes, differ = set(), False
        for batch, _ in seen(A.cutout(length=length, per_sample=per_sample), data):
            holes = batch == 0
            assert torch.equal(holes[:, 0], holes[:, 1])
            sizes |= set(holes[:, 0].flatten(1).sum(1).tolist())
            differ |= not torch.equal(holes[0], holes[1])
        assert differ == per_sample
        assert max(sizes) == side**2 if length <= 0.5 else max(sizes) <= side**2
        assert min(sizes) >= (side // 2) ** 2
    ((batch, _),) = seen(A.cutout(3, 0.2, value=(5.0, -1.0)), [(torch.ones(50, 2, 20, 20), torch.zeros(50).long())])
    holes = batch[:, 0] == 5
    assert torch.equal(holes, batch[:, 1] == -1)
    assert holes.flatten(1).sum(1).max() == 3 * 16
    assert batch[:, 0][~holes].eq(1).all()
    growing = A.cutout(length=pl.schedules.linear(0.0, 0.8, "4ba"))
    batches = seen(growing, [(torch.ones(20, 1, 10, 10), torch.zeros(20).long())] * 4)
    assert [int((batch == 0).flatten(1).sum(1).max()) for batch, _ in batches] == [0, 4, 16, 36]


# Rows and columns


@pytest.mark.parametrize("per_sample", [False, True])
def test_rows_and_columns_that_stay_are_in_their_order(per_sample: bool) -> None:
    """Maps of classes lose the same."""
    maps = torch.arange(48).view(1, 6, 8).expand(5, 6, 8)
    data = [(maps.unsqueeze(1).float().expand(5, 3, 6, 8), maps)] * 6
    for batch, targets in seen(A.colout(0.5, 0.25, per_sample=per_sample), data, nn.Conv2d(3, 48, 1)):
        assert batch.shape == (5, 3, 3, 6)
        assert (batch.diff(dim=-1) > 0).all()
        assert (batch.diff(dim=-2) > 0).all()
        # All columns of a row are of one row, and all rows of a column of one column.
        assert (batch // 8 == batch[..., :1] // 8).all()
        assert (batch % 8 == batch[..., :1, :] % 8).all()
        assert torch.equal(batch[:, 0].long(), targets)
        assert all(torch.equal(batch[0], each) for each in batch) != per_sample
    kept = pl.State.create(pooled()).replace(batch=data[0])
    assert A.colout(0.5, 0.5, targets="never")(kept).batch[1] is maps
    for share, count in {0.3: 4, 0.15: 5, 0.8: 1}.items():
        assert A.colout(share, 0)(kept).batch[0].shape == (5, 3, count, 8)
    pixels = torch.arange(18).view(2, 3, 3)
    each = A.with_lines(pixels, torch.tensor([[0], [2]]), torch.tensor([[0, 1], [1, 2]]))
    assert each.tolist() == [[[0, 1]], [[16, 17]]]


# Sizes that grow


def sizes(algorithm: pl.Algorithm, height: int = 32, width: int = 32, **options: Any) -> list[tuple[int, ...]]:
    pixels = torch.arange(float(height * width)).view(1, 1, height, width).expand(2, 1, height, width)
    return [tuple(x.shape[2:]) for x, _ in seen(algorithm, [(pixels, torch.zeros(2).long())] * 20, **options)]


def test_images_grow_as_the_run_goes_on() -> None:
    """At 0, .5, .6, .65 and .8 of 20 batches: 16, 16, 20, 24 and 32 of 32 pixels."""
    found = sizes(A.progressive_resizing())
    assert [found[number] for number in (0, 10, 12, 13, 16, 19)] == [(s, s) for s in (16, 16, 20, 24, 32, 32)]
    assert found == sorted(found)
    by_part = sizes(A.progressive_resizing(delay="0.25dur", finetune="0.25dur"))
    assert sizes(A.progressive_resizing(delay="5ba", finetune="5ba"), max_duration="20ba") == by_part
    assert (by_part[4], by_part[15]) == ((16, 16), (32, 32))
    for height, width in sizes(A.progressive_resizing(0.4, delay=0, finetune=0, increment=4), 30, 50):
        assert height % 4 == 0 or height == 30
        assert width % 4 == 0 or width == 50
    assert [A.side_of(5, 0.1, 8), A.side_of(30, 0.99, 4), A.side_of(32, 0.5, 1)] == [5, 28, 16]
    by_schedule = A.progressive_resizing(size=pl.schedules.step("10ba", gamma=0.5), increment=1)
    assert sizes(by_schedule) == [(32, 32)] * 10 + [(16, 16)] * 10


def test_smaller_images_are_filtered_or_cropped_and_maps_keep_their_classes() -> None:
    stripes = torch.tensor([0.0, 1.0]).repeat(16).expand(1, 1, 32, 32)
    inner = A.resized(stripes, 16, 16)[..., 2:-2]
    same(inner, torch.full_like(inner, 0.5), atol=0.13, rtol=0)
    assert A.resized(stripes, 16, 16, "nearest").unique().numel() == 1
    assert A.resized((stripes * 255).to(torch.uint8), 16, 16, "bicubic").dtype is torch.uint8
    maps = torch.arange(192).view(1, 12, 16).expand(2, 12, 16)
    task = pl.Task(loss=lambda outputs, batch: outputs.mean())
    options: dict[str, Any] = {"task": task, "loss": None}
    for mode in ("resize", "crop"):
        corners = set()
        algorithm = A.progressive_resizing(0.5, targets=True, mode=mode, increment=2)  # type: ignore[arg-type]
        for inputs, targets in seen(algorithm, [(maps.unsqueeze(1).float(), maps)] * 12, **options)[:6]:
            assert (targets.shape, targets.dtype) == ((2, 6, 8), torch.int64)
            assert set(targets.unique().tolist()) <= set(range(192))
            if mode == "crop":
                top, left = divmod(int(targets[0, 0, 0]), 16)
                assert torch.equal(targets, maps[:, top : top + 6, left : left + 8])
                assert torch.equal(inputs[:, 0].long(), targets)
                corners.add((top, left))
        assert len(corners) > 3 or mode == "resize"


def lengths(duration: Any, count: int, size: int, run_for: str = "1ep", **settings: Any) -> list[int]:
    words = torch.arange(2 * size).view(2, size) % 9
    model = nn.Sequential(nn.Embedding(9, 9), nn.Flatten(2))
    task = pl.Task(loss=lambda outputs, batch: outputs.square().mean())
    algorithm = A.sequence_length_warmup(duration, **settings)
    pairs = fit(model, [(words, words)] * count, [algorithm], task=task, loss=None, max_duration=run_for)
    found = [(state.batch[0].shape[1], state.timestamp.token) for event, state in pairs if event is Event.BATCH_START]
    assert found[-1][1] == (len(found) - 1) * 2 * size, "tokens are counted as they were loaded"
    return [each for each, _ in found]


def test_sequences_grow_as_the_run_goes_on() -> None:
    for duration, count, epochs in (("30ba", 31, "1ep"), ("60sp", 31, "1ep"), (2, 15, "3ep"), ("0.5dur", 15, "4ep")):
        found = lengths(duration, count, 64, epochs, max_length=64)
        assert [found[number] for number in (0, 4, 5, 15, 29, 30)] == [8, 8, 16, 32, 56, 64]
    for settings, wanted in (
        ({"min_length": 5, "max_length": 5}, [5] * 6),
        ({"min_length": 2, "max_length": 7, "increment": 10}, [2, 2, 2, 2, 7, 7]),
        ({"min_length": 2, "max_length": 7, "increment": 2}, [2, 2, 4, 4, 7, 7]),
        ({"length": pl.schedules.linear(1.0, 7.0, "3ba")}, [1, 3, 5, 7, 7, 7]),
        ({"max_length": 1000}, [8] * 6),
    ):
        assert lengths("4ba", 6, 8, **settings) == wanted  # type: ignore[arg-type]
    assert lengths(0, 2, 64, max_length=64) == [64, 64]


def test_which_tokens_of_a_sequence_stay() -> None:
    words, vectors = torch.arange(10).view(2, 5), torch.arange(20).view(2, 5, 2)
    assert A.with_length((words, words), 3, "reshape")[1].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert A.with_length((words, vectors), 5, "reshape")[1] is vectors
    assert A.with_length((words, vectors), 2, "reshape")[1].shape == (5, 2, 2)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 0, 0], [1, 2, 9, 0, 0, 0], [1, 9, 0, 0, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "label": torch.arange(4)}
    cut = A.with_length(batch, 3, keep_end=True)
    assert cut["input_ids"].tolist() == [[1, 2, 6], [1, 2, 9], [1, 2, 9], [1, 9, 0]]
    assert cut["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]
    assert cut["label"] is batch["label"]
    assert A.with_length(batch, 3)["input_ids"].tolist() == [[1, 2, 3], [1, 2, 3], [1, 2, 9], [1, 9, 0]]
    only = A.with_length(batch, 3, keys=["input_ids"])
    assert only["attention_mask"] is batch["attention_mask"]
    assert A.with_length(ids, 2, keep_end=True)[0].tolist() == [1, 6]
    left = {"input_ids": ids.flip(1), "attention_mask": (ids != 0).long().flip(1)}
    assert A.with_length(left, 3, keep_end=True)["input_ids"].tolist() == [[6, 5, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]]


# Operations on images, against Pillow's


def smooth(count: int = 2) -> Tensor:
    """Images whose histograms are not flat."""
    place = torch.linspace(0, 3, 24)
    waves = torch.stack([torch.sin(place[:, None] * k + place * (3 - k)) for k in range(3)])
    return (waves * 100 + 110 + torch.randn(count, 3, 24, 24, generator=noise()) * 10).clamp(0, 255).to(torch.uint8)


def one(name: str, images: Tensor, level: float, sign: float = 1.0, **normalized: Any) -> Tensor:
    ones, (mean, std) = torch.ones(len(images)), (normalized.get("mean"), normalized.get("std"))
    pixels = as_pixels(images, mean, std, "f", checks=True)
    changed = operated(pixels, NAMES, (NAMES.index(name) * ones).long(), level * ones, sign * ones)
    return from_pixels(changed, images, None, None, before=pixels) if mean is None else changed


def by_pillow(function: Callable[[Any], Any], images: Tensor) -> Tensor:
    results = [np.asarray(function(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in images]
    return torch.from_numpy(np.stack(results)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness"])
def test_blends_are_those_of_pillow(name: str) -> None:
    """Up to what Pillow cuts off: it rounds the base and then the result."""
    for level, sign in ((0.0, 1), (0.3, 1), (0.5, -1), (1.0, 1), (1.0, -1)):
        enhance, factor = getattr(ImageEnhance, name.capitalize()), 1 + 0.9 * level * sign
        wanted = by_pillow(lambda image, e=enhance, f=factor: e(image).enhance(f), smooth())
        assert (one(name, smooth(), level, sign).int() - wanted.int()).abs().max() <= 2


TABLES: list[tuple[str, float, Callable[[Any], Any]]] = [
    ("equalize", 0.3, ImageOps.equalize),
    ("posterize", 0.0, lambda image: image),
    ("posterize", 0.5, lambda image: ImageOps.posterize(image, 6)),
    ("posterize", 1.0, lambda image: ImageOps.posterize(image, 4)),
    ("solarize", 0.0, lambda image: image),
    ("solarize", 0.5, lambda image: ImageOps.solarize(image, 127.5)),  # type: ignore[arg-type]
    ("solarize", 1.0, lambda image: ImageOps.solarize(image, 0)),
    ("identity", 1.0, lambda image: image),
]


def test_tables_of_pixels_are_those_of_pillow_and_of_the_paper() -> None:
    for name, level, function in TABLES:
        assert torch.equal(one(name, smooth(), level), by_pillow(function, smooth())), (name, level)
    wanted = by_pillow(ImageOps.autocontrast, smooth())
    assert (one("autocontrast", smooth(), 0.5).int() - wanted.int()).abs().max() <= 1
    flat, pixel = (
        torch.full((1, 3, 4, 4), 7, dtype=torch.uint8),
        torch.tensor([200, 90]).to(torch.uint8).view(2, 1, 1, 1),
    )
    assert torch.equal(one("autocontrast", flat, 1.0), flat)
    assert torch.equal(one("equalize", flat, 1.0), flat)
    assert one("posterize", pixel, 1.0).flatten().tolist() == [192, 80]
    assert one("solarize", pixel, 127 / 255).flatten().tolist() == [55, 90]
    steps = torch.arange(256).to(torch.uint8).view(1, 1, 16, 16)
    for level in (0.25, 0.5, 1.0):  # denormalized values lie a little below a whole number
        found = one("posterize", (steps.float() / 255 - 0.4734) / 0.2515, level, mean=0.4734, std=0.2515)
        same(found, one("posterize", steps, level).float(), atol=0.01, rtol=0)


@pytest.mark.parametrize("name", GEOMETRIC)
def test_pixels_move_by_the_strength(name: str) -> None:
    """The centre of a blob is measured."""
    assert torch.equal(one(name, smooth(), 0.0), smooth())
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
    floats = smooth().float() / 255
    normalized = (floats - 0.5) / 0.25
    half: Any = (normalized.half(), (0.5,) * 3, [0.25] * 3)
    for images, mean, std in ((floats, None, None), (normalized, 0.5, 0.25), half):
        pixels = as_pixels(images, mean, std, "f", checks=True)
        same(pixels, smooth().float(), atol=0.1, rtol=0)
        assert torch.equal(from_pixels(pixels, images, mean, std, before=pixels), images)
        back = from_pixels(pixels, images, mean, std, before=pixels + 1)
        assert back.dtype is images.dtype
        same(back, images, atol=2e-3, rtol=1e-3)


def test_random_operations_have_the_strength_of_the_settings() -> None:
    data = pictures(1, 64)
    (plain, _), floats = data[0], pictures(1, 64, torch.float32)
    batch = seen(A.randaugment(1), data, Pixels())[0][0]
    assert batch.dtype is torch.uint8
    same(seen(A.randaugment(1), floats, Pixels())[0][0] * 255, batch.float(), atol=0.51, rtol=0)
    assert (seen(A.randaugment(1, 0), floats, Pixels())[0][0] == floats[0][0]).flatten(1).all(1).sum() > 40
    assert torch.equal(*(seen(A.randaugment(1, m, bins=5), data, Pixels())[0][0] for m in (9, 4))), "the last bin"
    same_image = [(plain[:1].expand(6, 3, 9, 9), torch.zeros(6).long())]
    (together, _), (apart, _) = (seen(A.randaugment(per_sample=p), same_image, Pixels())[0] for p in (False, True))
    assert all(torch.equal(each, together[0]) for each in together)
    assert not all(torch.equal(each, apart[0]) for each in apart)
    growing = A.randaugment(magnitude=pl.schedules.linear(0.0, 30.0, "1dur"))
    far = [(x.float() - plain.float()).abs().mean() for x, _ in seen(growing, data * 4, Pixels())]
    assert far[0] < far[-1]
    for kind in ("all", "safe"):  # without strength all stay, but those of autocontrast and equalize
        changed = A.randaugment_images(plain[:8], 1, 0, set=kind, generator=noise())  # type: ignore[arg-type]
        assert (changed == plain[:8]).flatten(1).all(1).sum() >= 3


# AugMix


def test_mixed_chains_stay_images_and_are_of_the_generator() -> None:
    images, before = pictures(dtype=torch.float32)[0][0], torch.get_rng_state()
    for depth, width in ((None, 1), (1, 3), (4, 3)):
        mixed = A.augmix_images(images, 10.0, width, depth, generator=noise())
        assert mixed.shape == images.shape
        assert 0 <= mixed.min() <= mixed.max() <= 1
        assert not torch.equal(mixed, images)
    generator = noise()
    assert torch.equal(A.augmix_images(images, 10.0, 3, 4, generator=generator), mixed)
    assert not torch.equal(A.augmix_images(images, 10.0, 3, 4, generator=generator), mixed)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_consistency_of_three_images_is_part_of_the_loss() -> None:
    divergences = {((1, 0), (0, 1), (0.5, 0.5)): 0.462098, ((0.9, 0.1), (0.8, 0.2), (0.7, 0.3)): 0.021619}
    for rows, wanted in divergences.items():
        found = A.jensen_shannon(*(torch.tensor([row], dtype=torch.float64) for row in rows))
        assert float(found) == pytest.approx(wanted, abs=1e-6)
    data, algorithm = pictures(3, 4, torch.float64), A.augmix(consistency=12.0)
    with pl.random.seeded(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(243, 3)).double()
    states = dict(fit(net, data, [algorithm], max_duration="1ba", donate=False))
    images, targets = states[Event.BEFORE_FORWARD].microbatch
    assert torch.equal(images[::3], data[0][0])
    assert torch.equal(targets, data[0][1].repeat_interleave(3))
    scores, after = net(images), states[Event.AFTER_LOSS]
    parts = [scores[number::3].softmax(1) for number in range(3)]
    mean = sum(parts) / 3
    divergence = sum(functional.kl_div(mean.log(), part, reduction="batchmean") for part in parts) / 3  # type: ignore[union-attr]
    same(after.loss, cross_entropy(scores[::3], data[0][1]) + 12 * divergence, rtol=1e-6, atol=1e-6)
    assert torch.equal(after.microbatch[1], data[0][1])
    assert after.outputs.shape == (4, 3)
    whole = run(net, data, [algorithm], train_metrics=[pl.metrics.accuracy()])
    close(run(net, data, [algorithm], microbatch_size=6).params, whole.params, 1e-5)
    assert not torch.equal(run(net, data, [A.augmix()]).params["1.weight"], whole.params["1.weight"])
