"""Mixup, in real training loops, against its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import cutmix, label_smoothing, mix, mixup, sam
from pure_loop.algorithms._mixed import Mixed
from tests.support.runs import close, cross_entropy, equal, mlp, points, stream, train


def at_loss(algorithms: Any, data: Any, **options: Any) -> list[pl.State]:
    pairs = stream(options.pop("model", mlp()), data, algorithms, **options)
    return [state for event, state in pairs if event is Event.BEFORE_LOSS]


def test_the_mean_of_two_samples() -> None:
    inputs, partner = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0])
    torch.testing.assert_close(mix(inputs, partner, 0.3), torch.tensor([[1.6, 2.6], [2.4, 3.4]]))
    weights = torch.tensor([0.0, 1.0])
    torch.testing.assert_close(mix(inputs, partner, weights), inputs[[0, 0]])
    with pytest.raises(pl.ArgumentError, match=r"inputs of dtype torch.int64 have no mean.*in the model"):
        mix(inputs.long(), partner, 0.3)


@pytest.mark.parametrize("interpolate", ["targets", "loss"])
def test_both_ways_give_the_loss_of_the_mean(interpolate: Any) -> None:
    """Logits [[2, 0], [0, 1]] of classes [0, 1], each the other's partner with a share of 0.3: 0.670095."""
    record = Mixed(torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor(0.3))
    model, data = nn.Linear(2, 2), [(torch.eye(2), torch.tensor([0, 1]))]
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        model.bias.zero_()

    @pl.algorithm(Event.BEFORE_TRAIN_BATCH)
    def known(state: pl.State) -> pl.State:
        return state.replace(batch=(torch.eye(2), record))

    algorithms = [mixup(interpolate=interpolate), known]
    losses = [s.loss for e, s in stream(model, data, algorithms, max_duration="1ba") if e is Event.BATCH_END]
    torch.testing.assert_close(losses, [torch.tensor(0.670095)], atol=1e-6, rtol=0)


@pytest.mark.parametrize("per_sample", [False, True])
def test_inputs_and_targets_have_one_share(per_sample: bool) -> None:
    """Inputs that are the targets as probabilities stay them."""
    classes = torch.tensor([0, 1, 2, 0, 1])
    data = [(functional.one_hot(classes, 4).float(), classes)] * 20
    states = at_loss([mixup(1.0, per_sample=per_sample)], data, model=nn.Linear(4, 4), max_duration="1ep")
    shares = []
    for state in states:
        inputs, targets = state.microbatch
        torch.testing.assert_close(inputs, targets)
        # A sample's own class has the larger share.
        assert torch.all(targets[range(5), classes] >= 0.5)
        shares += [share for share in targets[range(5), classes].tolist() if share < 1]
    assert len(set(shares)) > (30 if per_sample else 10)
    assert min(shares) < 0.6
    assert max(shares) > 0.9


def test_a_batch_is_mixed_once_whatever_the_microbatches() -> None:
    def trained(**options: Any) -> pl.State:
        return train(mlp().double(), [(x.double(), y) for x, y in points()], [mixup(0.4)], **options)

    for size in (1, 2, 3):
        close(trained(microbatch_size=size).params, trained().params)
    close(train(mlp(), points(), [mixup(0.4, interpolate="loss")]).params, train(mlp(), points(), [mixup(0.4)]).params)


def test_nothing_is_mixed_with_a_share_of_0() -> None:
    plain = train(mlp(), points())
    equal(train(mlp(), points(), [mixup(0.0)]).params, plain.params)
    # Of a schedule the loss takes probabilities, whose cross entropy is rounded otherwise.
    zero = pl.schedules.constant(0.0)
    for off in (mixup(zero), mixup(probability=zero)):
        close(train(mlp(), points(), [off]).params, plain.params)


def test_half_of_the_batches_are_mixed_with_half_a_probability() -> None:
    data = points(batches=200, size=4)
    states = at_loss([mixup(1.0, probability=0.5)], data, max_duration="1ep")
    mixed = sum(bool(state.microbatch[1].amax(1).lt(1).any()) for state in states)
    assert 70 < mixed < 130  # more than 4 standard deviations on each side


def test_metrics_of_training_see_the_targets_of_the_sample() -> None:
    seen = [
        state.microbatch[1]
        for event, state in stream(
            mlp(), points(), [mixup(1.0)], max_duration="1ep", train_metrics=[pl.metrics.accuracy()]
        )
        if event is Event.AFTER_BACKWARD
    ]
    for targets, (_, classes) in zip(seen, points(), strict=True):
        assert torch.equal(targets, classes)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("around", [False, True])
def test_with_label_smoothing(order: int, around: bool) -> None:
    """Smoothing is affine, so the order does not matter; SAM's second pass has both, too."""
    pair = [mixup(0.5), label_smoothing(0.2)]
    algorithms = [*(pair if order else pair[::-1]), *([sam(0.1)] if around else [])]

    def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, label_smoothing=0.2)

    wanted = [mixup(0.5), *([sam(0.1)] if around else [])]
    close(train(mlp(), points(), algorithms).params, train(mlp(), points(), wanted, loss=smoothed).params)


def test_positions_without_a_target_stay_without() -> None:
    """Cross entropy of class indices ignores them, and so does the mean of it over both targets."""
    data = [(x, torch.where(torch.arange(5) == 1, -100, y)) for x, y in points()]
    for more in ([], [label_smoothing(0.3)]):
        close(
            train(mlp(), data, [mixup(0.5), *more]).params,
            train(mlp(), data, [*more, mixup(0.5, interpolate="loss")]).params,
        )


def test_any_loss_takes_mixed_targets() -> None:
    """Regression: the mean of the targets themselves."""
    data = [(x, x[:, :3]) for x, _ in points()]
    state = at_loss([mixup(0.5)], data, loss=functional.mse_loss, max_duration="1ba")[0]
    torch.testing.assert_close(state.microbatch[0][:, :3], state.microbatch[1])


def test_two_mixers_are_refused() -> None:
    with pytest.raises(pl.ArgumentError, match=r"(?s)mixup.*cutmix.*mixes targets|mixes targets.*mixup.*cutmix"):
        train(mlp(), points(), [mixup(), cutmix()])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"alpha": -0.1}, "alpha"),
        ({"probability": 1.5}, "a number from 0 to 1"),
        ({"per_sample": True, "interpolate": "loss"}, r'Write interpolate="targets"'),
    ],
)
def test_settings_that_are_refused(settings: Any, text: str) -> None:
    with pytest.raises(pl.ArgumentError, match=text):
        mixup(**settings)


def test_batches_that_are_refused() -> None:
    tokens = [(torch.ones(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(pl.DataError, match=r"dtype torch.int64, which has no mean.*only their embeddings"):
        train(nn.Linear(3, 2), tokens, [mixup()])
    with pytest.raises(pl.DataError, match=r"the inputs are list, not a tensor.*input_key"):
        train(nn.Linear(3, 2), [(["a", "b"], torch.zeros(2, dtype=torch.int64))], [mixup()])


def test_a_batch_with_names() -> None:
    data = [{"pixels": x, "label": y} for x, y in points()]
    task = pl.Task(
        forward=lambda model, batch: model(batch["pixels"]),
        loss=lambda outputs, batch: cross_entropy(outputs, batch["label"]),
    )
    named = mixup(0.5, input_key="pixels", target_key="label")
    close(train(mlp(), data, [named], task=task, loss=None).params, train(mlp(), points(), [mixup(0.5)]).params)
