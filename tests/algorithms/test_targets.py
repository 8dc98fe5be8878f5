"""Algorithms of targets (mixup, cutmix, label smoothing), against cross entropy's own and their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import cutmix, label_smoothing, mixup, sam, smooth_labels
from pure_loop.algorithms.mixup import EXPECTED_FAILURES
from pure_loop.testing import check_algorithm
from tests.support.problem import close, convnet, cross_entropy, fit, images, noise, points, run

same = torch.testing.assert_close


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, label_smoothing=0.2)


def at_loss(algorithms: Any, data: Any, model: Any = None, **options: Any) -> list[Any]:
    pairs = fit(model, data, algorithms, **{"max_duration": "1ep", **options})
    return [state.microbatch for event, state in pairs if event is Event.BEFORE_LOSS]


# Label smoothing


@pytest.mark.parametrize("shape", [(), (6,), (6, 2), (4, 2, 3)])
def test_smoothed_targets_give_the_loss_of_cross_entropys_own_smoothing(shape: tuple[int, ...]) -> None:
    """Of classes and of probabilities; positions without a target stay without one."""
    outputs = torch.randn(*shape[:1], 5, *shape[1:], generator=noise(), dtype=torch.float64)
    targets = torch.randint(1, 5, shape, generator=noise())
    probabilities = torch.rand_like(outputs).softmax(min(len(shape), 1))
    for smoothing in (0.0, 0.1, 0.7):
        for given in (targets, probabilities):
            wanted = cross_entropy(outputs, given, label_smoothing=smoothing)
            same(cross_entropy(outputs, smooth_labels(outputs, given, smoothing)), wanted)
        for index in (-100, 0, 7) if shape else ():
            some = targets.index_fill(0, torch.arange(0, shape[0], 2), index)
            wanted = cross_entropy(outputs, some, label_smoothing=smoothing, ignore_index=index)
            smooth = smooth_labels(outputs, some, smoothing, ignore_index=index)
            same(cross_entropy(outputs, smooth), wanted)
            assert not smooth[::2].any()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        wide = smooth_labels(torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 1], dtype=torch.int32)).dtype
        assert wide is torch.promote_types(dtype, torch.float32)
    prior = smooth_labels(torch.zeros(2, 3), torch.tensor([0, -100]), 0.2, prior=[0.5, 0.25, 0.25])
    same(prior, torch.tensor([[0.9, 0.05, 0.05], [0.0, 0.0, 0.0]]) * 2)


def test_training_with_label_smoothing_is_training_with_cross_entropys_own() -> None:
    """Targets are smoothed for the loss and for nothing else, and what another one did to the inputs stays."""
    by_name = pl.Task(
        forward=lambda model, batch: model(batch["x"]), loss=lambda o, batch: cross_entropy(o, batch["y"])
    )
    for options in ({}, {"microbatch_size": 2}, {"precision": "amp_bf16"}):
        wanted, algorithms = run(loss=smoothed, **options).params, [label_smoothing(0.2, target_key="y")]
        data = [{"x": x, "y": y} for x, y in points()]
        for event, state in fit(None, data, algorithms, loss=by_name, evaluators={"val": data[:1]}, **options):
            if state.microbatch is not None:
                assert state.microbatch["y"].is_floating_point() is (event is Event.BEFORE_LOSS)
            assert event is Event.BEFORE_LOSS or not state.algorithm_state.get("label_smoothing")
        close(state.params, wanted, 1e-5)

    @pl.algorithm(Event.BEFORE_LOSS)
    def shift(state: pl.State) -> pl.State:
        return state.replace(microbatch=(state.microbatch[0] + 1, state.microbatch[1]))

    last = next(s for event, s in fit(None, None, [label_smoothing(0.2), shift]) if event is Event.AFTER_LOSS)
    same(last.microbatch, (points(1)[0][0] + 1, points(1)[0][1]))


# Mixtures


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("mixer", [mixup, cutmix])
def test_inputs_and_targets_have_one_share(mixer: Any, per_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that are the targets as probabilities stay them; ranks draw one share, and partners of their own."""
    classes = torch.arange(4)
    pixels = functional.one_hot(classes).float().view(4, 4, 1, 1).expand(4, 4, 7, 9).clone()
    net, shares = nn.Sequential(nn.Flatten(), nn.Linear(4 * 63, 4)), set()
    algorithms = [mixer(1.0, per_sample=per_sample)]
    algorithms += [cutmix(per_sample=per_sample, uniform_sampling=True)] if mixer is cutmix else []
    for algorithm in algorithms:
        for inputs, targets in at_loss([algorithm], [(pixels, classes)] * 20, net):
            same(inputs.mean((2, 3)), targets)
            shares |= {round(share, 5) for share in targets[classes, classes].tolist() if share < 1}
    assert len(shares) > 10
    assert min(shares) < 0.6
    assert min(shares) >= 0.5 or mixer is cutmix, "a sample's own class has the larger share"
    state = pl.State.create(convnet()).replace(batch=(torch.rand(16, 3, 12, 12), torch.arange(16)))
    records = []
    for place in "01":
        monkeypatch.setenv("RANK", place)
        monkeypatch.setenv("WORLD_SIZE", "2")
        records.append(mixer(per_sample=per_sample)(state.replace(event=Event.BEFORE_TRAIN_BATCH)).batch[1])
    assert not torch.equal(records[0].second, records[1].second)
    assert torch.equal(records[0].weight, records[1].weight) is not per_sample


def test_half_of_the_batches_are_mixed_and_maps_of_classes_are_cut_with_the_images() -> None:
    mixed = at_loss([mixup(1.0, probability=0.5)], points(batches=100), strict=False)
    assert 30 < sum(bool(targets.amax(1).lt(1).any()) for _, targets in mixed) < 70  # 4 standard deviations
    maps = torch.arange(3).view(3, 1, 1).expand(3, 6, 6).clone()
    for inputs, targets in at_loss([cutmix()], [(maps.unsqueeze(1).float(), maps)] * 5, nn.Conv2d(1, 3, 1)):
        assert torch.equal(inputs[:, 0].long(), targets)


def test_one_draw_for_each_batch_decides_between_algorithms() -> None:
    """Each acts with its probability, as by itself, and never two in one batch."""
    pixels = torch.eye(3).view(3, 3, 1, 1).expand(3, 3, 4, 4).clone()
    data = [(pixels, torch.arange(3))] * 100
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    chosen = pl.one_of(mixup(1.0), cutmix(1.0), probabilities=[0.5, 0.2])
    found = [at_loss([algorithm], data, net, microbatch_size=3) for algorithm in (chosen, mixup(1.0), cutmix(1.0))]
    kinds: list[str] = []
    for (inputs, targets), by_mixup, by_cutmix in zip(*found, strict=True):
        same(inputs.mean((2, 3)), functional.one_hot(targets, 3).float() if targets.ndim == 1 else targets)
        if targets.ndim == 1:
            assert torch.equal(inputs, pixels)
        kinds.append("none" if targets.ndim == 1 else "mixup" if torch.equal(inputs, by_mixup[0]) else "cutmix")
        assert targets.ndim == 1 or any(torch.equal(inputs, other[0]) for other in (by_mixup, by_cutmix))
    counts = [kinds.count(kind) for kind in ("mixup", "cutmix", "none")]
    assert all(abs(count - mean) < 20 for count, mean in zip(counts, (50, 20, 30), strict=True)), counts
    check_algorithm(pl.one_of(mixup(), cutmix()), problems="convolution", max_examples=1, skip=EXPECTED_FAILURES)


BY_LOSS, SMOOTH, MIX = mixup(0.5, interpolate="loss"), label_smoothing(0.2), mixup(0.5)
SUMS: dict[str, tuple[list[pl.Algorithm], list[pl.Algorithm], Any]] = {
    "the loss": ([BY_LOSS], [MIX], cross_entropy),
    "smoothed before": ([SMOOTH, MIX], [MIX], smoothed),
    "smoothed after": ([MIX, SMOOTH], [MIX], smoothed),
    "smoothed, the loss": ([SMOOTH, BY_LOSS], [BY_LOSS], smoothed),
    "sharp": ([MIX, SMOOTH, sam(0.1)], [MIX, sam(0.1)], smoothed),
    "sharp, the loss": ([BY_LOSS, sam(0.1)], [MIX, sam(0.1)], cross_entropy),
    "sharp first, the loss": ([sam(0.1), BY_LOSS], [MIX, sam(0.1)], cross_entropy),
    "ignored": ([BY_LOSS], [MIX], cross_entropy),
    "ignored and smoothed": ([SMOOTH, BY_LOSS], [MIX, SMOOTH], cross_entropy),
    "images": ([cutmix(interpolate="loss")], [cutmix()], cross_entropy),
}


@pytest.mark.parametrize("name", SUMS)
def test_mixing_the_loss_is_mixing_the_targets_whatever_the_order_and_the_microbatches(name: str) -> None:
    """Smoothing is affine, SAM's second pass has both, positions without a target have none; losses measured, too."""
    algorithms, others, loss = SUMS[name]
    pictures = name == "images"
    model = nn.Sequential(nn.Flatten(), nn.Linear(432, 3)).double() if pictures else None
    data = [(x.double(), y) for x, y in images()] if pictures else points()
    if "ignored" in name:
        data = [(x, torch.where(torch.arange(4) == 1, -100, y)) for x, y in data]
    options: dict[str, Any] = {"train_metrics": [pl.metrics.loss()]}
    wanted = run(model, data, others, loss=loss, **options)
    for size in (None, 3) if "ignored" not in name else (None,):
        found = run(model, data, algorithms, microbatch_size=size, **options)
        close({**found.params, **found.metrics["train"]}, {**wanted.params, **wanted.metrics["train"]}, 1e-5)


def test_targets_in_nestings_losses_in_mappings_and_batches_with_names() -> None:
    def task(of: Any) -> pl.Task:
        return pl.Task(loss=lambda outputs, batch: sum(cross_entropy(outputs, y) for y in of(batch[1])))

    nested = [(x, {"a": y, "b": (y.flip(0),)}) for x, y in points()]
    columns = [(x, torch.stack((y, y.flip(0)), 1)) for x, y in points()]
    one = run(None, nested, [BY_LOSS], loss=task(lambda y: (y["a"], y["b"][0])), microbatch_size=2)
    close(one.params, run(None, columns, [BY_LOSS], loss=task(lambda y: y.T), microbatch_size=2).params)

    def losses(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        fit, size = cross_entropy(outputs, targets), (outputs**2).mean()
        return {"total": fit + size, "fit": fit, "size": size}

    close(run(None, None, [BY_LOSS], loss=losses).params, run(None, None, [MIX], loss=losses).params)
    named = [{"pixels": x, "label": y} for x, y in points()]
    by_name = pl.Task(forward=lambda m, b: m(b["pixels"]), loss=lambda o, b: cross_entropy(o, b["label"]))
    algorithm = mixup(0.5, input_key="pixels", target_key="label")
    close(run(None, named, [algorithm], loss=by_name).params, run(None, None, [MIX]).params)
    for inputs, targets in at_loss([MIX], [(x, x[:, :3]) for x, _ in points()], loss=functional.mse_loss):
        same(inputs[:, :3], targets)  # of a regression
    pairs = fit(None, None, [mixup(1.0)], max_duration="1ep", train_metrics=[pl.metrics.accuracy()])
    for state, (_, classes) in zip((s for e, s in pairs if e is Event.AFTER_BACKWARD), points(), strict=True):
        assert torch.equal(state.microbatch[1], classes), "metrics of training see those of the sample"
