"""Mixed targets: what mixers share, with other algorithms, and against torchvision's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import cutmix, label_smoothing, mixup, sam
from pure_loop.algorithms._mixed import Mixed
from tests.support.runs import close, convnet, cross_entropy, equal, images, mlp, points, stream, train


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"microbatch_size": 2}], ids=repr)
def test_smoothing_one_of_two_targets_is_refused(options: Any) -> None:
    """After a mixer that takes the loss twice, as it would see the targets of one loss only."""
    with pytest.raises(pl.ArgumentError, match=r"'mine', which has interpolate=\"loss\".*Write label_smoothing before"):
        train(mlp(), points(), [mixup(0.5, interpolate="loss", name="mine"), label_smoothing(0.2)], **options)


@pytest.mark.slow
def test_smoothing_one_of_two_targets_is_refused_in_a_compiled_step() -> None:
    with pytest.raises(pl.ArgumentError, match="Write label_smoothing before"):
        train(
            mlp(),
            points(),
            [mixup(0.5, interpolate="loss"), label_smoothing(0.2)],
            compile=True,
            strict=False,
        )


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_smoothing_both_targets_of_the_loss(microbatch_size: int | None) -> None:
    def smoothed(outputs: Any, targets: Any) -> Any:
        return cross_entropy(outputs, targets, label_smoothing=0.2)

    by_loss = mixup(0.5, interpolate="loss")
    close(
        train(mlp(), points(), [label_smoothing(0.2), by_loss], microbatch_size=microbatch_size).params,
        train(mlp(), points(), [by_loss], loss=smoothed).params,
    )


@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("mixer_first", [True, False])
def test_the_second_gradient_of_sam_takes_the_loss_of_both(mixer_first: bool, microbatch_size: int | None) -> None:
    pair = [mixup(0.5, interpolate="loss"), sam(0.1)]
    got = train(mlp(), points(), pair if mixer_first else pair[::-1], microbatch_size=microbatch_size)
    close(got.params, train(mlp(), points(), [mixup(0.5), sam(0.1)]).params)


def test_nestings_of_targets_are_mixed_by_the_loss() -> None:
    task = pl.Task(
        forward=lambda model, batch: model(batch[0]),
        loss=lambda outputs, batch: cross_entropy(outputs, batch[1]["a"]) + cross_entropy(outputs, batch[1]["b"][0]),
    )
    data = [(x, {"a": y, "b": (y.flip(0),)}) for x, y in points()]
    single = pl.Task(
        forward=lambda model, batch: model(batch[0]),
        loss=lambda outputs, batch: cross_entropy(outputs, batch[1][:, 0]) + cross_entropy(outputs, batch[1][:, 1]),
    )
    columns = [(x, torch.stack((y, y.flip(0)), 1)) for x, y in points()]
    algorithm = mixup(0.5, interpolate="loss")
    close(
        train(mlp(), data, [algorithm], loss=task, microbatch_size=2).params,
        train(mlp(), columns, [algorithm], loss=single, microbatch_size=2).params,
    )
    with pytest.raises(pl.ArgumentTypeError, match=r'mixup: targets is dict, not a tensor.*interpolate="loss"'):
        train(mlp(), data, [mixup(0.5)], loss=task)


def test_a_mapping_of_losses() -> None:
    def losses(outputs: Any, targets: Any) -> Any:
        fit, size = cross_entropy(outputs, targets), (outputs**2).mean()
        return {"total": fit + size, "fit": fit, "size": size}

    close(
        train(mlp(), points(), [mixup(0.5, interpolate="loss")], loss=losses).params,
        train(mlp(), points(), [mixup(0.5)], loss=losses).params,
    )


@pytest.mark.parametrize("targets", [torch.tensor(1), torch.zeros(2).long(), [0, 1, 2, 0, 1], {}])
def test_targets_without_a_row_for_each_sample_are_refused(targets: Any) -> None:
    state = pl.State.create(mlp()).replace(batch=(torch.ones(5, 4), targets), event=Event.BEFORE_TRAIN_BATCH)
    with pytest.raises(pl.DataError, match=r"mixup: the targets are .*of 5 samples.*target_key="):
        mixup()(state)


@pytest.mark.parametrize("mixer", [mixup, cutmix])
@pytest.mark.parametrize("setting", ["alpha", "probability"])
def test_nothing_changes_where_nothing_is_mixed(mixer: Any, setting: str) -> None:
    """The targets neither: the loss takes class indices."""
    state = pl.State.create(convnet()).replace(batch=images()[0], event=Event.BEFORE_TRAIN_BATCH)
    assert mixer(**{setting: 0})(state) is state
    equal(train(convnet(), images(), [mixer(**{setting: 0})]).params, train(convnet(), images()).params)


def test_shares_of_inputs_in_half_precision_have_a_sum_of_1() -> None:
    record = Mixed(torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor(0.123, dtype=torch.bfloat16))
    assert 1 - record.weight + record.weight.float() != 1

    @pl.algorithm(Event.BEFORE_TRAIN_BATCH)
    def known(state: pl.State) -> pl.State:
        return state.replace(batch=(state.batch[0], record))

    data = [(torch.ones(2, 4), torch.tensor([0, 1]))]
    for event, state in stream(mlp(), data, [mixup(), known], max_duration="1ba"):
        if event is Event.BEFORE_LOSS:
            assert state.microbatch[1].sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("mixer", [mixup, cutmix])
@pytest.mark.parametrize("per_sample", [False, True])
def test_ranks_draw_one_share_for_the_batch_and_partners_of_their_own(
    mixer: Any, per_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, classes = torch.rand(16, 3, 12, 12), torch.arange(16)
    state = pl.State.create(convnet()).replace(batch=(pixels, classes), event=Event.BEFORE_TRAIN_BATCH)
    records = []
    for place in (0, 1):
        monkeypatch.setenv("RANK", str(place))
        monkeypatch.setenv("WORLD_SIZE", "2")
        records.append(mixer(per_sample=per_sample)(state).batch[1])
    assert not torch.equal(records[0].second, records[1].second)
    assert torch.equal(records[0].weight, records[1].weight) is not per_sample


TORCHVISION = """
import torch

# The operators of a torchvision for CUDA are missing beside a torch without it, and its import asks for these two.
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from torchvision.transforms import v2

from pure_loop.algorithms import mix, paste
from pure_loop.algorithms._images import box_mask
from pure_loop.algorithms._mixed import Mixed, _mean

random = torch.Generator().manual_seed(0)
images, classes = torch.randn(5, 3, 8, 12, generator=random), torch.randint(4, (5,), generator=random)
partner = torch.arange(5).roll(1)


def targets(weight):
    return _mean(Mixed(classes, classes[partner], weight), torch.zeros(5, 4), -100, "mixup")


class MixUp(v2.MixUp):
    def make_params(self, inputs):
        return {"lam": 0.7}


expected = MixUp(num_classes=4)(images, classes)
torch.testing.assert_close((mix(images, partner, 0.3), targets(torch.tensor(0.3))), expected)


class CutMix(v2.CutMix):
    def make_params(self, inputs):
        self.drawn = super().make_params(inputs)
        return self.drawn


seen = set()
for seed in range(20):
    torch.manual_seed(seed)
    cutmix = CutMix(num_classes=4)
    expected = cutmix(images, classes)
    # The same draws again, of which torchvision takes an even number of rows and columns.
    torch.manual_seed(seed)
    share = 1 - cutmix._dist.sample(()).item()
    column, row = torch.randint(12, (1,))[0], torch.randint(8, (1,))[0]
    rows, columns = (torch.tensor(2 * int(0.5 * share**0.5 * side)) for side in (8, 12))
    mask = box_mask(8, 12, rows, columns, row, column)
    torch.testing.assert_close((paste(images, partner, mask), targets(mask.float().mean())), expected)
    seen.add(mask.sum().item())
assert len(seen) > 5
"""


@pytest.mark.slow
def test_mixing_is_that_of_torchvision() -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    subprocess.run([sys.executable, "-W", "ignore", "-c", TORCHVISION], check=True)
