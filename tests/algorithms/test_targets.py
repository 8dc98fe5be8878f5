"""Algorithms of targets (mixup, cutmix, label smoothing), against cross entropy's own and their formulas."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import cutmix, label_smoothing, mix, mixup, paste, sam, smooth_labels
from pure_loop.algorithms._mixed import Mixed
from tests.support.problem import close, convnet, cross_entropy, fit, images, noise, points, run
from tests.support.streams import assert_same

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
    targets, probabilities = (
        torch.randint(1, 5, shape, generator=noise()),
        torch.rand_like(outputs).softmax(min(len(shape), 1)),
    )
    for smoothing in (0.0, 0.1, 0.7):
        for given in (targets, probabilities):
            wanted = cross_entropy(outputs, given, label_smoothing=smoothing)
            same(cross_entropy(outputs, smooth_labels(outputs, given, smoothing)), wanted)
        for index in (-100, 0, 7) if shape else ():
            some = targets.clone()
            some[::2] = index
            wanted = cross_entropy(outputs, some, label_smoothing=smoothing, ignore_index=index)
            smooth = smooth_labels(outputs, some, smoothing, ignore_index=index)
            same(cross_entropy(outputs, smooth), wanted)
            assert not smooth[::2].any()
    for dtype, wide in {
        torch.bfloat16: torch.float32,
        torch.float32: torch.float32,
        torch.float64: torch.float64,
    }.items():
        assert smooth_labels(torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 1], dtype=torch.int32)).dtype is wide
    prior = smooth_labels(torch.zeros(2, 3), torch.tensor([0, -100]), 0.2, prior=[0.5, 0.25, 0.25])
    same(prior, torch.tensor([[0.9, 0.05, 0.05], [0.0, 0.0, 0.0]]) * 2)


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}, {"precision": "amp_bf16"}], ids=str)
def test_training_with_label_smoothing_is_training_with_cross_entropys_own(options: dict[str, Any]) -> None:
    """Targets are smoothed for the loss and for nothing else."""
    smooth = set()
    for event, state in fit(None, None, [label_smoothing(0.2)], evaluators=points(1), **options):
        if state.microbatch is not None and state.microbatch[1].is_floating_point():
            smooth.add(event)
        assert state.algorithm_state.get("label_smoothing") is None or event is Event.BEFORE_LOSS
    assert smooth == {Event.BEFORE_LOSS}
    close(state.params, run(loss=smoothed, **options).params, 1e-5)


Pair = namedtuple("Pair", "x y")


def test_batches_of_each_form_keep_it() -> None:
    """And what another algorithm does to the inputs in between."""
    wanted = run(None, None, [label_smoothing(0.2)]).params
    forms: dict[Any, Any] = {list: lambda x, y: [x, y], tuple: lambda x, y: (x, y), Pair: Pair}
    forms |= {dict: lambda x, y: {"x": x, "y": y}, pl.FrozenDict: lambda x, y: pl.FrozenDict(x=x, y=y)}
    for kind, make in forms.items():
        x, y = ("x", "y") if kind in (dict, pl.FrozenDict) else (0, -1)
        task = pl.Task(
            forward=lambda model, batch, x=x: model(batch[x]),
            loss=lambda outputs, batch, y=y: cross_entropy(outputs, batch[y]),
        )
        data = [make(*batch) for batch in points()]
        for event, state in fit(None, data, [label_smoothing(0.2, target_key=y)], loss=task):
            if event in (Event.BEFORE_LOSS, Event.AFTER_LOSS):
                assert type(state.microbatch) is kind
                assert state.microbatch[y].is_floating_point() == (event is Event.BEFORE_LOSS)
        close(state.params, wanted)

    @pl.algorithm(Event.BEFORE_LOSS)
    def shift(state: pl.State) -> pl.State:
        return state.replace(microbatch=(state.microbatch[0] + 1, state.microbatch[1]))

    for event, state in fit(None, points(1), [label_smoothing(0.2), shift], max_duration="1ba"):
        if event is Event.AFTER_LOSS:
            assert_same(dict(enumerate(state.microbatch)), {0: points(1)[0][0] + 1, 1: points(1)[0][1]}, "microbatch")


# Mixtures


def test_mixtures_are_their_formulas() -> None:
    inputs, partner = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0])
    same(mix(inputs, partner, 0.3), torch.tensor([[1.6, 2.6], [2.4, 3.4]]))
    same(mix(inputs, partner, torch.tensor([0.0, 1.0])), inputs[[0, 0]])
    pixels = torch.arange(2).view(2, 1, 1, 1).expand(2, 1, 2, 2)
    mask = torch.tensor([[[True, False], [False, False]], [[False, False], [False, True]]])
    assert paste(pixels, partner, mask).flatten(1).tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]


def given(record: Mixed, inputs: Tensor) -> pl.Algorithm:
    """Comes after a mixer, in the place of what it drew."""
    return pl.Algorithm("given", {Event.BEFORE_TRAIN_BATCH: lambda state: state.replace(batch=(inputs, record))})


def test_a_known_share_gives_the_loss_of_the_mean() -> None:
    """Logits [[2, 0], [0, 1]] of classes [0, 1], each the other's partner with a share of 0.3: 0.670095."""
    model, classes = nn.Linear(2, 2, bias=False), torch.tensor([0, 1])
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    known = given(Mixed(classes, classes.flip(0), torch.tensor(0.3)), torch.eye(2))
    for interpolate in ("targets", "loss"):
        algorithms = [mixup(interpolate=interpolate), known]  # type: ignore[arg-type]
        state = run(model, [(torch.eye(2), classes)], algorithms, max_duration="1ba", train_metrics=[pl.metrics.loss()])
        assert float(state.metrics["train"]["loss"]) == pytest.approx(0.670095, abs=1e-6)
    # Of a share in half precision: 1 - w + w is not 1.
    half = given(Mixed(classes, classes.flip(0), torch.tensor(0.123, dtype=torch.bfloat16)), torch.eye(2))
    ((_, targets),) = at_loss([mixup(), half], [(torch.eye(2), classes)], model)
    assert targets.sum(1).tolist() == [1, 1]


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


def test_half_of_the_batches_are_mixed_with_half_a_probability() -> None:
    mixed = at_loss([mixup(1.0, probability=0.5)], points(batches=100), strict=False)
    assert 30 < sum(bool(targets.amax(1).lt(1).any()) for _, targets in mixed) < 70  # 4 standard deviations


def test_maps_of_classes_are_cut_with_the_images() -> None:
    maps = torch.arange(3).view(3, 1, 1).expand(3, 6, 6).clone()
    for inputs, targets in at_loss([cutmix()], [(maps.unsqueeze(1).float(), maps)] * 5, nn.Conv2d(1, 3, 1)):
        assert torch.equal(inputs[:, 0].long(), targets)


BY_LOSS = mixup(0.5, interpolate="loss")
SUMS: dict[str, tuple[list[pl.Algorithm], list[pl.Algorithm], Any]] = {
    "the loss": ([BY_LOSS], [mixup(0.5)], cross_entropy),
    "smoothed before": ([label_smoothing(0.2), mixup(0.5)], [mixup(0.5)], smoothed),
    "smoothed after": ([mixup(0.5), label_smoothing(0.2)], [mixup(0.5)], smoothed),
    "smoothed, the loss": ([label_smoothing(0.2), BY_LOSS], [BY_LOSS], smoothed),
    "sharp": ([mixup(0.5), label_smoothing(0.2), sam(0.1)], [mixup(0.5), sam(0.1)], smoothed),
    "sharp, the loss": ([BY_LOSS, sam(0.1)], [mixup(0.5), sam(0.1)], cross_entropy),
    "sharp first, the loss": ([sam(0.1), BY_LOSS], [mixup(0.5), sam(0.1)], cross_entropy),
    "ignored": ([BY_LOSS], [mixup(0.5)], cross_entropy),
    "ignored and smoothed": ([label_smoothing(0.2), BY_LOSS], [mixup(0.5), label_smoothing(0.2)], cross_entropy),
    "images": ([cutmix(interpolate="loss")], [cutmix()], cross_entropy),
}


@pytest.mark.parametrize("name", SUMS)
def test_mixing_the_loss_is_mixing_the_targets_whatever_the_order_and_the_microbatches(name: str) -> None:
    """Smoothing is affine, SAM's second pass has both, positions without a target have none in both."""
    algorithms, others, loss = SUMS[name]
    model, data = None, points()
    if name == "images":
        model = nn.Sequential(nn.Flatten(), nn.Linear(432, 3)).double()
        data = [(x.double(), y) for x, y in images()]
    if "ignored" in name:
        data = [(x, torch.where(torch.arange(4) == 1, -100, y)) for x, y in data]
    wanted = run(model, data, others, loss=loss).params
    for size in (None, 1, 3) if "ignored" not in name else (None,):
        close(run(model, data, algorithms, microbatch_size=size).params, wanted, 1e-5)


def test_targets_in_nestings_losses_in_mappings_and_batches_with_names() -> None:
    def task(of: Any) -> pl.Task:
        return pl.Task(
            forward=lambda model, batch: model(batch[0]), loss=lambda o, b: sum(cross_entropy(o, y) for y in of(b[1]))
        )

    nested = [(x, {"a": y, "b": (y.flip(0),)}) for x, y in points()]
    columns = [(x, torch.stack((y, y.flip(0)), 1)) for x, y in points()]
    one = run(None, nested, [BY_LOSS], loss=task(lambda y: (y["a"], y["b"][0])), microbatch_size=2)
    close(one.params, run(None, columns, [BY_LOSS], loss=task(lambda y: y.T), microbatch_size=2).params)

    def losses(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        fit, size = cross_entropy(outputs, targets), (outputs**2).mean()
        return {"total": fit + size, "fit": fit, "size": size}

    close(run(None, None, [BY_LOSS], loss=losses).params, run(None, None, [mixup(0.5)], loss=losses).params)
    named = [{"pixels": x, "label": y} for x, y in points()]
    by_name = pl.Task(forward=lambda m, b: m(b["pixels"]), loss=lambda o, b: cross_entropy(o, b["label"]))
    algorithm = mixup(0.5, input_key="pixels", target_key="label")
    wanted = run(None, None, [mixup(0.5)]).params
    close(run(None, named, [algorithm], task=by_name, loss=None).params, wanted)
    regression = [(x, x[:, :3]) for x, _ in points()]
    for inputs, targets in at_loss([mixup(0.5)], regression, loss=functional.mse_loss):
        same(inputs[:, :3], targets)
    pairs = fit(None, None, [mixup(1.0)], max_duration="1ep", train_metrics=[pl.metrics.accuracy()])
    for state, (_, classes) in zip((s for e, s in pairs if e is Event.AFTER_BACKWARD), points(), strict=True):
        assert torch.equal(state.microbatch[1], classes), "metrics of training see those of the sample"
