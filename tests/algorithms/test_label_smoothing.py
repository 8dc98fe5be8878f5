"""Label smoothing, in real training loops, against cross entropy's own."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import label_smoothing, smooth_labels
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from tests.support.runs import close, cross_entropy, mlp, noise, points, stream, train


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("shape", [(), (6,), (6, 2), (4, 2, 3)])
def test_smoothed_targets_give_the_loss_of_cross_entropys_own_smoothing(smoothing, shape):
    classes = (*shape[:1], 5, *shape[1:])
    outputs, targets = torch.randn(classes, generator=noise()), torch.randint(5, shape, generator=noise())
    wanted = cross_entropy(outputs, targets, label_smoothing=smoothing)
    torch.testing.assert_close(cross_entropy(outputs, smooth_labels(outputs, targets, smoothing)), wanted)


def test_probabilities_are_smoothed_too():
    outputs = torch.randn(6, 5, generator=noise(), dtype=torch.float64)
    targets = torch.rand(6, 5, generator=noise(), dtype=torch.float64).softmax(1)
    smoothed = smooth_labels(outputs, targets, 0.2)
    torch.testing.assert_close(cross_entropy(outputs, smoothed), cross_entropy(outputs, targets, label_smoothing=0.2))
    torch.testing.assert_close(smoothed.sum(1), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("ignore_index", [-100, 0, 7])
def test_positions_without_a_target_stay_without_one(ignore_index):
    outputs, targets = torch.randn(8, 4, 3, generator=noise()), torch.randint(1, 4, (8, 3), generator=noise())
    targets[::2, 0] = ignore_index
    wanted = cross_entropy(outputs, targets, label_smoothing=0.1, ignore_index=ignore_index)
    smoothed = smooth_labels(outputs, targets, 0.1, ignore_index=ignore_index)
    torch.testing.assert_close(cross_entropy(outputs, smoothed), wanted)
    assert not smoothed[::2, :, 0].any()
    nothing = torch.full((8, 3), ignore_index)
    assert cross_entropy(outputs, smooth_labels(outputs, nothing, 0.1, ignore_index=ignore_index)).isnan()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_smoothed_targets_are_never_in_half_precision(given, wanted):
    assert smooth_labels(torch.zeros(2, 3, dtype=given), torch.tensor([0, 1], dtype=torch.int32)).dtype is wanted


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_training_with_label_smoothing_is_training_with_cross_entropys_own(microbatch_size):
    def own(outputs, targets):
        return cross_entropy(outputs, targets, label_smoothing=0.2)

    options = {"microbatch_size": microbatch_size, "precision": "fp32"}
    close(
        train(mlp(), points(), [pl.algorithms.label_smoothing(0.2)], **options).params,
        train(mlp(), points(), loss=own, **options).params,
    )


def test_label_smoothing_under_amp():
    def own(outputs, targets):
        return cross_entropy(outputs, targets, label_smoothing=0.2)

    smoothed = train(mlp(), points(), [label_smoothing(0.2)], precision="amp_bf16")
    close(smoothed.params, train(mlp(), points(), loss=own, precision="amp_bf16").params, 1e-5)


def test_targets_are_smoothed_for_the_loss_and_for_nothing_else():
    data, seen = points(1), {}
    for event, state in stream(mlp(), data, [label_smoothing(0.3)], max_duration="1ba", evaluators=data):
        if state.microbatch is not None:
            seen[event] = state.microbatch[1].is_floating_point()
        assert state.algorithm_state.get("label_smoothing") is None or event is Event.BEFORE_LOSS
    assert [event for event, smoothed in seen.items() if smoothed] == [Event.BEFORE_LOSS]
    assert Event.EVAL_AFTER_FORWARD in seen


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda x, y: [x, y], 1),
        (lambda x, y: (x, y), -1),
        (Pair, 1),
        (lambda x, y: {"x": x, "y": y}, "y"),
        (lambda x, y: pl.FrozenDict(x=x, y=y), "y"),
    ],
    ids=["list", "tuple", "namedtuple", "dict", "FrozenDict"],
)
def test_batches_of_other_shapes_keep_their_kind(make, key):
    first = "x" if key == "y" else 0
    task = pl.Task(
        forward=lambda model, batch: model(batch[first]),
        loss=lambda outputs, batch: cross_entropy(outputs, batch[key]),
    )
    data = [make(x, y) for x, y in points()]
    for event, state in stream(mlp(), data, [label_smoothing(0.2, target_key=key)], loss=task, microbatch_size=2):
        if event is Event.BEFORE_LOSS:
            assert type(state.microbatch) is type(data[0])
            assert state.microbatch[key].is_floating_point()
        if event is Event.AFTER_LOSS:
            assert state.microbatch[key].dtype is torch.int64
    close(state.params, train(mlp(), points(), [label_smoothing(0.2)], microbatch_size=2).params)


def test_another_algorithm_may_change_the_batch_inside_the_bracket():
    @pl.algorithm(Event.BEFORE_LOSS)
    def shift(state):
        return state.replace(microbatch=(state.microbatch[0] + 1, state.microbatch[1]))

    for event, state in stream(mlp(), points(1), [label_smoothing(0.2), shift], max_duration="1ba"):
        if event is Event.AFTER_LOSS:
            assert torch.equal(state.microbatch[0], points(1)[0][0] + 1)
            assert torch.equal(state.microbatch[1], points(1)[0][1])


@pytest.mark.parametrize(
    ("outputs", "targets", "error", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(2), ArgumentError, "class indices, integers of shape"),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), ArgumentError, "floats of the shape"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.bool), ArgumentError, "class indices"),
        (torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.int64), ArgumentError, "movedim"),
        (torch.zeros(2, 1), torch.zeros(2, 1), ArgumentError, "1 class"),
        (torch.zeros(()), torch.zeros(()), ArgumentError, "1 class"),
        ({"logits": torch.zeros(2, 3)}, torch.zeros(2), ArgumentTypeError, "outputs is dict"),
        (torch.zeros(2, 3), [0, 1], ArgumentTypeError, "targets is list"),
    ],
)
def test_targets_that_cannot_be_smoothed_are_refused(outputs, targets, error, words):
    with pytest.raises(error, match=words):
        smooth_labels(outputs, targets, 0.1)


@pytest.mark.parametrize("key", ["labels", 2])
def test_a_batch_without_the_target_key_is_refused(key):
    with pytest.raises(DataError, match="target_key"):
        train(mlp(), points(), [label_smoothing(target_key=key)])


def test_smoothing_with_a_prior():
    outputs, targets = torch.zeros(2, 3), torch.tensor([0, -100])
    smoothed = smooth_labels(outputs, targets, 0.2, prior=[0.5, 0.25, 0.25])
    torch.testing.assert_close(smoothed, torch.tensor([[0.9, 0.05, 0.05], [0.0, 0.0, 0.0]]) * 2)
    torch.testing.assert_close(
        smooth_labels(outputs, targets, 0.2, prior=[1 / 3] * 3), smooth_labels(outputs, targets, 0.2)
    )
    with pytest.raises(pl.ArgumentError, match=r"their sum is 0.9, and has to be 1"):
        label_smoothing(0.1, prior=[0.5, 0.4])
    with pytest.raises(pl.ArgumentError, match="prior has 2 probabilities"):
        train(mlp(), points(), [label_smoothing(0.1, prior=[0.5, 0.5])])
