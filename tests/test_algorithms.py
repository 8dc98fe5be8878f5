"""The methods of ``pure_loop.algorithms``, in real training loops, against loops written by hand."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event, State, algorithms
from pure_loop.algorithms import (
    apply_blurpool,
    averaged,
    blurpool,
    ema,
    gradient_clipping,
    label_smoothing,
    moving_average,
    perturb,
    sam,
    smooth_labels,
)
from pure_loop.algorithms.blurpool import BlurConv2d, BlurMaxPool2d, blur
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError, ModelError
from pure_loop.order import BOUNDARIES

cross_entropy = functional.cross_entropy
Data = list[tuple[Tensor, Tensor]]
LR = 0.1


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(batches: int = 3, size: int = 5, seed: int = 0) -> Data:
    g = noise(seed)
    return [(torch.randn(size, 4, generator=g), torch.randint(3, (size,), generator=g)) for _ in range(batches)]


def images(batches: int = 3, size: int = 4, seed: int = 0) -> Data:
    g = noise(seed)
    return [(torch.randn(size, 3, 12, 12, generator=g), torch.randint(3, (size,), generator=g)) for _ in range(batches)]


def mlp(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def convnet(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 8, 3, stride=2, padding=1),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(72, 3),
        )


def train(model: Any, data: Any, algorithms: Any = (), **options: Any) -> pl.State:
    return pl.run(stream(model, data, algorithms, **options))


def stream(model: Any, data: Any, algorithms: Any = (), **options: Any) -> Any:
    settings: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": pl.optim.sgd(lr=LR),
        "max_duration": "2ep",
        "strict": True,
        "clock": lambda: 0.0,
    }
    return pl.fit(model, data, algorithms=algorithms, **{**settings, **options})


def by_hand(
    model: nn.Module,
    data: Data,
    gradient: Callable[[nn.Module, Tensor, Tensor], None],
    epochs: int = 2,
    momentum: float = 0.0,
    after: Callable[[nn.Module], None] = lambda module: None,
) -> dict[str, Tensor]:
    """Parameters after a loop over torch's own optimizer; ``gradient`` fills ``.grad``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for _ in range(epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            gradient(model, inputs, targets)
            optimizer.step()
            after(model)
    return {name: p.detach() for name, p in model.named_parameters()}


def close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def equal(a: Any, b: Any) -> None:
    """Bitwise, leaf by leaf."""
    paths, left, spec = optree.tree_flatten_with_path(a, none_is_leaf=True, namespace="pure_loop")
    right, other = optree.tree_flatten(b, none_is_leaf=True, namespace="pure_loop")
    assert spec == other
    for path, x, y in zip(paths, left, right, strict=True):
        same = torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        assert same, f"{path}: {x} != {y}"


def norm(tensors: Any) -> Tensor:
    return torch.stack([t.norm() for t in tensors]).norm()


# Label smoothing.


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


# Gradient clipping.


def backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    cross_entropy(model(inputs), targets).backward()


def clip_adaptively_by_hand(module: nn.Module, clipping: float) -> None:
    for parameter in module.parameters():
        for unit, gradient in (
            zip(parameter, parameter.grad, strict=True) if parameter.ndim > 1 else ((parameter, parameter.grad),)
        ):
            limit = clipping * max(unit.norm().item(), 1e-3)
            if gradient.norm() > limit:
                gradient.mul_(limit / gradient.norm())


@pytest.mark.parametrize(
    ("kind", "threshold", "reference"),
    [
        ("norm", 0.1, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)),
        ("norm", 1e6, lambda m: None),
        ("value", 0.01, lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01)),
        ("adaptive", 0.02, lambda m: clip_adaptively_by_hand(m, 0.02)),
    ],
)
def test_gradient_clipping_is_torchs(kind, threshold, reference):
    def gradient(model, inputs, targets):
        backward(model, inputs, targets)
        with torch.no_grad():
            reference(model)

    clipped = train(mlp(), points(), [gradient_clipping(kind, threshold)]).params
    close(clipped, by_hand(mlp(), points(), gradient))
    if threshold < 1:
        assert not torch.allclose(clipped["0.weight"], train(mlp(), points()).params["0.weight"], atol=1e-4)


def test_clipping_knows_parameters_without_a_gradient():
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    for kind in ("norm", "value", "adaptive"):
        state = train(Part(), points(), [gradient_clipping(kind, 0.1)])
        assert torch.equal(state.params["unused"], torch.ones(2))


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_clipping_does_not_hide_a_gradient_that_is_not_finite(kind, bad):
    @pl.algorithm(Event.AFTER_BACKWARD)
    def spoil(state):
        weight = state.grads["0.weight"].clone()
        weight[0, 0] = bad
        return state.replace(grads={**state.grads, "0.weight": weight})

    with pytest.raises(pl.NonFiniteError):
        train(mlp(), points(), [spoil, gradient_clipping(kind, 1.0)])
    state = train(mlp(), points(), [spoil, gradient_clipping(kind, 1.0)], nonfinite="skip")
    equal(state.params, State.create(mlp()).params)
    assert state.skipped == 6


# The moving average.


def weights_after_each_batch(**options: Any) -> list[Any]:
    first = State.create(mlp()).params
    return [first] + [s.params for e, s in stream(mlp(), points(), **options) if e is Event.BATCH_END]


@pytest.mark.parametrize(
    ("average", "decay", "batches"),
    [
        (ema(smoothing=0.9), 0.9, 1),
        (ema(half_life="2ba"), 0.5**0.5, 1),
        (ema("10sp"), 0.5**0.5, 1),
        (ema(half_life="0.5dur"), 0.5 ** (1 / 3), 1),
        (ema(half_life="3ba", interval="2ba"), 0.5 ** (2 / 3), 2),
        (ema(smoothing=0.9, interval="10sp"), 0.9, 2),
        (ema(smoothing=0.9, interval="0.5dur"), 0.9, 3),
        (ema(half_life="4ba", interval="1ep"), 0.5 ** (3 / 4), 3),
        (ema(half_life="2ep"), 0.5**0.5, 3),
        (ema(half_life=2), 0.5**0.5, 3),
        (ema(smoothing=0.0), 0.0, 1),
    ],
    ids=str,
)
def test_the_average_is_the_closed_formula(average, decay, batches):
    options: dict[str, Any] = {"max_duration": "6ba"}
    weights = weights_after_each_batch(**options)[::batches]
    last = len(weights) - 1
    wanted = {
        name: decay**last * weights[0][name]
        + sum((1 - decay) * decay ** (last - t) * weights[t][name] for t in range(1, last + 1))
        for name in weights[0]
    }
    close(averaged(train(mlp(), points(), [average], **options)).params, wanted)


def test_a_half_life_in_a_fraction_of_epochs_is_updated_at_their_ends():
    average = ema(half_life="0.25dur", interval="0.25dur")
    ends = [s.params for e, s in stream(mlp(), points(), max_duration="4ep") if e is Event.EPOCH_END]
    wanted = State.create(mlp()).params
    for weights in ends:
        wanted = {name: (wanted[name] + weights[name]) / 2 for name in wanted}
    close(averaged(train(mlp(), points(), [average], max_duration="4ep")).params, wanted)
    close(averaged(train(mlp(), iter(points() * 4), [average], max_duration="4ep", batches_per_epoch=3)).params, wanted)


def test_a_half_life_in_a_fraction_of_epochs_goes_by_batches_where_their_length_is_known():
    by_batches = averaged(train(mlp(), points(), [ema(half_life="2ba")], max_duration="4ep")).params
    for half_life, interval in (("2ba", None), (f"{1 / 6!r}dur", None), (f"{1 / 6!r}dur", f"{1 / 12!r}dur")):
        close(
            averaged(train(mlp(), points(), [ema(half_life, interval=interval)], max_duration="4ep")).params, by_batches
        )


def test_half_life_halves_whatever_the_interval():
    """Of the first weights, half is left after a half life of updates of any length."""
    still, moved = {"w": torch.ones(1)}, {"w": torch.zeros(1)}
    for updates in (1, 2, 5):
        average: Any = still
        for _ in range(updates):
            average = moving_average(average, moved, 0.5 ** (1 / updates))
        torch.testing.assert_close(average["w"], torch.tensor([0.5]))


@pytest.mark.parametrize("average", [ema(half_life="2ba"), ema(smoothing=0.5, interval="1ep")], ids=str)
def test_the_weights_are_those_of_a_run_without_it(average):
    options = {"evaluators": images(1), "eval_interval": "1ba", "microbatch_size": 3}
    plain, with_average = (
        list(stream(convnet(), images(), **options)),
        list(stream(convnet(), images(), [average], **options)),
    )
    assert [event for event, _ in plain] == [event for event, _ in with_average]
    for (event, a), (_, b) in zip(plain, with_average, strict=True):
        if not event.is_eval:
            for field in ("params", "buffers", "opt_state", "grads", "loss"):
                equal(getattr(a, field), getattr(b, field))


def test_evaluation_and_prediction_use_the_average_and_training_does_not():
    average, data = ema(smoothing=0.6), images()
    evaluated, raw = [], State.create(convnet()).params
    for event, state in stream(convnet(), data, [average], evaluators={"val": images(2, seed=1)}, eval_interval="1ba"):
        if event is Event.EVAL_BATCH_START:
            equal(state.params, state.algorithm_state["ema"]["params"])
            assert any(not torch.equal(state.params[n], raw[n]) for n in raw)
            evaluated.append(event)
        if event is Event.BATCH_END:
            raw = state.params
        if event is Event.EVAL_AFTER_ALL:
            equal(state.params, raw)
    assert len(evaluated) == 12

    module = averaged(state).module().eval()
    with torch.no_grad():
        outputs = [module(x) for x, _ in images(2, seed=1)]
    loss = torch.stack([cross_entropy(o, y) for o, (_, y) in zip(outputs, images(2, seed=1), strict=True)]).mean()
    torch.testing.assert_close(state.metrics["val"]["loss"], loss)

    again = pl.run(
        pl.evaluate(state, {"val": images(2, seed=1)}, loss=cross_entropy, algorithms=[average], strict=True)
    )
    equal(again.metrics, state.metrics)
    equal(again.params, state.params)
    plain = pl.run(pl.evaluate(state, {"val": images(2, seed=1)}, loss=cross_entropy))
    assert plain.metrics["val"]["loss"] != state.metrics["val"]["loss"]

    predicted = pl.predict(state, images(2, seed=1), algorithms=[average], strict=True)
    found = [s.outputs for e, s in predicted if e is Event.PREDICT_BATCH_END]
    for output, wanted in zip(found, outputs, strict=True):
        torch.testing.assert_close(output, wanted)


def test_buffers_are_averaged_and_counts_are_not():
    buffers = [s.buffers for e, s in stream(convnet(), images()) if e is Event.BATCH_END]
    wanted = State.create(convnet()).buffers["1.running_mean"]
    for each in buffers:
        wanted = 0.9 * wanted + 0.1 * each["1.running_mean"]
    state = train(convnet(), images(), [ema(smoothing=0.9)])
    torch.testing.assert_close(averaged(state).buffers["1.running_mean"], wanted)
    assert averaged(state).buffers["1.num_batches_tracked"] == 6
    assert "1.num_batches_tracked" not in state.algorithm_state["ema"]["buffers"]


def test_half_precision_is_averaged_in_float32():
    model = mlp().to(torch.bfloat16)
    data = [(x.to(torch.bfloat16), y) for x, y in points()]
    state = train(model, data, [ema(smoothing=0.999)], optimizer=pl.optim.adamw(lr=0.1))
    assert {t.dtype for t in state.algorithm_state["ema"]["params"].values()} == {torch.float32}
    assert {t.dtype for t in averaged(state).params.values()} == {torch.bfloat16}
    before = State.create(model).params["0.weight"]
    assert not torch.equal(state.algorithm_state["ema"]["params"]["0.weight"], before.float())


def test_frozen_parameters_cost_no_memory():
    model = mlp()
    model[0].weight.requires_grad_(False)
    state = train(model, points(), [ema(half_life="2ba")])
    assert state.algorithm_state["ema"]["params"]["0.weight"] is state.params["0.weight"]


def test_two_averages():
    state = train(
        mlp(), points(), [ema(smoothing=0.5, name="fast"), ema(smoothing=0.99, name="slow")], evaluators=points(1)
    )
    slow = pl.run(pl.evaluate(averaged(state, "slow"), points(1), loss=cross_entropy))
    assert slow.metrics["eval"]["loss"] == state.metrics["eval"]["loss"]
    assert not torch.equal(averaged(state, "fast").params["0.weight"], averaged(state, "slow").params["0.weight"])


def test_training_goes_on_from_the_average():
    average = ema(half_life="2ba")
    state = averaged(train(mlp(), points(), [average]))
    further = train(state, points(), [average], max_duration="3ep")
    assert further.timestamp.epoch == 3


def test_an_average_may_start_late_and_change_its_unit():
    late = train(train(mlp(), points()), points(), [ema(half_life="1ba")], max_duration="3ep")
    changed = train(late, points(), [ema(half_life="5sp")], max_duration="4ep")
    wanted, first = train(mlp(), points()).params, None
    for event, state in stream(mlp(), points(), max_duration="4ep"):
        if event is Event.BATCH_END and state.timestamp.batch > 6:
            wanted = {name: (wanted[name] + state.params[name]) / 2 for name in wanted}
            first = state.timestamp.batch if first is None else first
    assert first == 7
    close(averaged(changed).params, wanted)


def test_a_state_without_an_average_is_refused():
    state = train(mlp(), points())
    for broken in (mlp(), state, train(mlp(), points(), [ema(smoothing=0.9, name="other")])):
        with pytest.raises(ArgumentError, match="no average named 'ema'"):
            pl.run(pl.evaluate(broken, points(), loss=cross_entropy, algorithms=[ema(smoothing=0.9)]))
        with pytest.raises(ArgumentError, match="no average named 'ema'"):
            pl.run(pl.predict(broken, points(), algorithms=[ema(smoothing=0.9)]))


@pytest.mark.parametrize(
    ("average", "duration", "words"),
    [
        (ema(half_life="0.1dur"), "2ep", "go"),
        (ema(half_life="0.1dur"), "1h", "clock"),
        (ema(smoothing=0.9, interval="0.1dur"), "1h", "clock"),
    ],
)
def test_fractions_of_a_duration_that_cannot_be_counted_are_refused_before_training(average, duration, words):
    with pytest.raises(ArgumentError, match=words):
        train(mlp(), iter(points()), [average], max_duration=duration)


# Sharpness-aware minimisation.


def sharp(rho: float, adaptive: bool = False, loss: Any = cross_entropy, every: int = 1) -> Any:
    """The gradient of the two-step implementation that goes with the paper."""
    count = 0

    def gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        nonlocal count
        parameters = list(model.parameters())
        grads = torch.autograd.grad(loss(model(inputs), targets), parameters)
        if count % every == 0:
            with torch.no_grad():
                scale = rho / (
                    norm([g * p.abs() if adaptive else g for g, p in zip(grads, parameters, strict=True)]) + 1e-12
                )
                steps = [scale * g * (p**2 if adaptive else 1) for g, p in zip(grads, parameters, strict=True)]
                before = [p.clone() for p in parameters]
                for p, step in zip(parameters, steps, strict=True):
                    p.add_(step)
            grads = torch.autograd.grad(loss(model(inputs), targets), parameters)
            with torch.no_grad():
                for p, old in zip(parameters, before, strict=True):
                    p.copy_(old)
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g
        count += 1

    return gradient


@pytest.mark.parametrize(
    ("rho", "adaptive", "interval"), [(0.05, False, 1), (0.5, False, 1), (0.5, True, 1), (0.5, False, 4)]
)
def test_sam_is_the_loop_written_by_hand(rho, adaptive, interval):
    wanted = by_hand(mlp(), points(), sharp(rho, adaptive, every=interval), momentum=0.9)
    optimizer = pl.optim.sgd(lr=LR, momentum=0.9)
    close(train(mlp(), points(), [sam(rho, adaptive=adaptive, interval=interval)], optimizer=optimizer).params, wanted)
    plain = train(mlp(), points(), optimizer=optimizer).params
    assert max((plain[name] - wanted[name]).abs().max() for name in wanted) > 1e-4


def test_sam_with_microbatches_is_sam_without():
    options: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01)}
    whole = train(mlp(), points(), [sam(0.5)], **options)
    for size in (1, 2, 4):
        close(train(mlp(), points(), [sam(0.5)], microbatch_size=size, **options).params, whole.params)


def test_sam_smooths_labels_in_the_second_gradient_too():
    def own(outputs, targets):
        return cross_entropy(outputs, targets, label_smoothing=0.3)

    wanted = by_hand(mlp(), points(), sharp(0.5, loss=own))
    for order in ([label_smoothing(0.3), sam(0.5)], [sam(0.5), label_smoothing(0.3)]):
        close(train(mlp(), points(), order).params, wanted)


class Root(nn.Module):
    """``w^2 - 2.25`` is exactly 0 where SAM looks from w = -1 with rho = 0.5, and its gradient there is -3."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([-1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.square() * x - 2.25


def test_a_step_whose_sam_loss_is_zero_is_made():
    losses = []

    @pl.algorithm(Event.AFTER_LOSS)
    def look(state):
        losses.append(float(state.loss.detach()))
        return state

    data = [(torch.ones(1, 1), torch.zeros(1, 1))]
    state = train(Root(), data, [look, sam(rho=0.5)], loss=lambda outputs, _: outputs.mean(), max_duration="1ba")
    assert losses == [-1.25, 0.0]
    assert torch.equal(state.params["weight"], torch.tensor([-0.7]))


def test_sam_keeps_of_the_second_pass_the_gradient_only():
    @pl.algorithm(Event.AFTER_BACKWARD, init=lambda state: 0)
    def count(state):
        return state.remember("count", state.algorithm_state["count"] + 1)

    def batch(algorithms):
        for event, state in stream(convnet(), images(), algorithms, max_duration="1ba"):
            if event is Event.AFTER_TRAIN_BATCH:
                return state
        raise AssertionError

    sharpened, plain = batch([count, sam(0.5)]), batch([count])
    for field in ("params", "buffers", "loss", "outputs", "algorithm_state"):
        equal(getattr(sharpened, field), getattr(plain, field))
    assert not torch.equal(sharpened.grads["7.weight"], plain.grads["7.weight"])


def test_sam_draws_the_same_dropout_masks_twice():
    masks = []

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            mask = functional.dropout(torch.ones_like(x), 0.5, self.training)
            masks.append(mask)
            return self.linear(x * mask)

    train(Masked(), points(), [sam(0.5)], max_duration="2ba")
    assert len(masks) == 4
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def test_a_gradient_of_zero_and_parameters_without_one_stay_where_they_are():
    params = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    moved = perturb(params, {"a": torch.zeros(2), "b": None}, rho=1.0)
    equal(moved, pl.FrozenDict(params))
    assert list(perturb(params, {}, rho=1.0)) == ["a", "b", "c"]
    half = perturb({"a": torch.ones(2, dtype=torch.float16)}, {"a": torch.zeros(2, dtype=torch.float16)})
    assert torch.equal(half["a"], torch.ones(2, dtype=torch.float16))


@given(rho=st.floats(1e-3, 10.0), seed=st.integers(0, 99), adaptive=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_perturbation_has_length_rho_and_points_uphill(rho, seed, adaptive):
    g = noise(seed)
    params = {name: torch.randn(3, generator=g, dtype=torch.float64) for name in "ab"}
    grads = {name: torch.randn(3, generator=g, dtype=torch.float64) for name in "ab"}
    moved = perturb(params, grads, rho, adaptive=adaptive)
    steps = {name: moved[name] - params[name] for name in params}
    length = norm([steps[n] / params[n].abs() if adaptive else steps[n] for n in steps])
    assert math.isclose(length.item(), rho, rel_tol=1e-6)
    assert sum((steps[n] * grads[n]).sum() for n in steps) > 0


def test_clipping_before_sam_in_the_list_clips_what_sam_found():
    def gradient(model, inputs, targets):
        sharp(0.5)(model, inputs, targets)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    close(train(mlp(), points(), [gradient_clipping("norm", 0.1), sam(0.5)]).params, by_hand(mlp(), points(), gradient))
    # By its norm alone, a gradient that SAM starts from makes no difference: it only gives the direction.
    close(
        train(mlp(), points(), [sam(0.5), gradient_clipping("norm", 0.1)]).params,
        train(mlp(), points(), [sam(0.5)]).params,
    )


# BlurPool.


def blurred_by_hand(x: Tensor, stride: int) -> Tensor:
    line = torch.tensor([1.0, 2.0, 1.0], dtype=x.dtype) / 4
    kernel = torch.outer(line, line).expand(x.shape[1], 1, 3, 3)
    return functional.conv2d(
        functional.pad(x, (1, 1, 1, 1), mode="replicate"), kernel, stride=stride, groups=x.shape[1]
    )


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (6, 7)])
def test_blur_is_the_binomial_filter(stride, size):
    x = torch.randn(2, 3, *size, generator=noise(), dtype=torch.float64)
    torch.testing.assert_close(blur(x, (stride, stride), (2, 2)), blurred_by_hand(x, stride))


def test_blur_filters_along_the_dimension_that_is_strided():
    x = torch.randn(1, 1, 6, 6, generator=noise())
    rows = torch.cat([x[..., :1, :], x, x[..., -1:, :]], -2)
    wanted = ((rows[..., :-2, :] + 2 * rows[..., 1:-1, :] + rows[..., 2:, :]) / 4)[..., ::2, :]
    torch.testing.assert_close(blur(x, (2, 1)), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_constant_images_stay_constant(dtype):
    x = torch.full((1, 2, 7, 5), 0.3, dtype=dtype)
    pooled = apply_blurpool(nn.Sequential(nn.MaxPool2d(3, 2, 1)))(x)
    assert torch.equal(pooled, torch.full((1, 2, 4, 3), 0.3, dtype=dtype))


CONVS = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": (3, 5), "stride": (2, 1), "padding": (0, 2)},
    {"kernel_size": 3, "stride": 3, "dilation": 2, "groups": 4, "padding": 2, "padding_mode": "reflect"},
]


@pytest.mark.parametrize("size", [9, 10, 11])
@pytest.mark.parametrize("options", CONVS)
def test_convolutions_are_those_of_hand_built_filters(options, size):
    conv = nn.Conv2d(16, 8, **options)
    x = torch.randn(2, 16, size, size, generator=noise())
    first, after = apply_blurpool(conv), apply_blurpool(conv, blur_first=False)
    stride = conv.stride
    torch.testing.assert_close(first(x), conv(blur(x, (1, 1), stride)))
    dense = nn.Conv2d(16, 8, **{**options, "stride": 1})
    dense.load_state_dict(conv.state_dict())
    torch.testing.assert_close(after(x), blur(dense(x), stride))
    assert first(x).shape == after(x).shape == conv(x).shape
    assert type(first) is type(after) is BlurConv2d
    assert type(conv) is nn.Conv2d
    if stride == (2, 2):
        torch.testing.assert_close(first(x), conv(blurred_by_hand(x, 1)))
        torch.testing.assert_close(after(x), blurred_by_hand(dense(x), 2))


@pytest.mark.parametrize("size", [7, 8, 9])
@pytest.mark.parametrize("options", [(2,), (3, 2, 1), (2, (2, 1)), (3, 3, 1, 2)])
def test_max_pools_are_dense_maxima_filtered(options, size):
    pool = nn.MaxPool2d(*options)
    x = torch.randn(2, 3, size, size, generator=noise())
    new = apply_blurpool(pool)
    stride = pool.stride if isinstance(pool.stride, tuple) else (pool.stride, pool.stride)
    dense = functional.max_pool2d(x, pool.kernel_size, 1, pool.padding, pool.dilation)
    torch.testing.assert_close(new(x), blur(dense, stride))
    assert new(x).shape == pool(x).shape
    assert new(x[0]).shape == pool(x[0]).shape


def test_blurpool_makes_a_shifted_image_matter_less():
    x = torch.randn(1, 1, 64, 64, generator=noise())
    pool = nn.MaxPool2d(2)

    def change(layer):
        return (layer(x) - layer(x.roll(1, -1)))[..., 1:-1].abs().mean()

    assert change(apply_blurpool(pool)) < 0.7 * change(pool)


def test_surgery_leaves_the_module_as_it_was_and_keeps_names_values_and_sharing():
    shared = nn.MaxPool2d(2)
    model = nn.ModuleDict({"a": shared, "b": nn.Conv2d(16, 4, 3, stride=2), "c": shared, "few": nn.Conv2d(3, 4, 3, 2)})
    model["b"].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state_of_random = torch.get_rng_state()
    new = apply_blurpool(model)
    assert torch.equal(torch.get_rng_state(), state_of_random)
    equal(dict(new.state_dict()), before)
    assert [type(module) for module in model.values()] == [nn.MaxPool2d, nn.Conv2d, nn.MaxPool2d, nn.Conv2d]
    assert [type(module) for module in new.values()] == [BlurMaxPool2d, BlurConv2d, BlurMaxPool2d, nn.Conv2d]
    assert new["a"] is new["c"]
    assert not new["b"].weight.requires_grad
    assert new["b"].weight is not model["b"].weight
    assert "filtered=(2, 2)" in repr(new)
    assert type(apply_blurpool(model, min_channels=3)["few"]) is BlurConv2d
    assert type(apply_blurpool(model, replace_convs=False)["b"]) is nn.Conv2d
    assert type(apply_blurpool(model, replace_maxpools=False)["a"]) is nn.MaxPool2d


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (nn.Linear(1, 1), {}, "no layer that subsamples"),
        (nn.Sequential(nn.Conv2d(16, 4, 3), nn.MaxPool2d(3, 1)), {}, "no layer that subsamples"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, 2)), {}, "0 has 3 input channels"),
        (nn.Sequential(nn.Conv2d(16, 4, 3, 2)), {"replace_convs": False}, "0: replace_convs is False"),
        (nn.Sequential(nn.MaxPool2d(2)), {"replace_maxpools": False}, "0: replace_maxpools is False"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), {}, "ceil_mode or return_indices"),
        (apply_blurpool(nn.Sequential(nn.MaxPool2d(2))), {}, "0 is a BlurMaxPool2d already"),
        (type("Own", (nn.MaxPool2d,), {})(2), {}, "a subclass"),
    ],
)
def test_a_model_in_which_nothing_can_be_replaced_is_refused(module, options, words):
    with pytest.raises(ModelError, match=words):
        apply_blurpool(module, **options)


def test_blurpool_in_training_is_training_of_the_changed_module():
    model = convnet()
    equal(train(model, images(), [blurpool()]).params, train(apply_blurpool(model), images()).params)
    assert type(model[3]) is nn.MaxPool2d
    with pytest.raises(ModelError, match="nothing to replace"):
        train(mlp(), points(), [blurpool()])


def test_an_average_after_surgery_starts_from_the_new_parameters():
    @pl.algorithm(Event.INIT)
    def widen(state):
        module = state.module()
        module[4], module[7] = nn.Conv2d(16, 12, 3, 2, 1, device="meta"), nn.Linear(108, 3, device="meta")
        for parameter in (*module[4].parameters(), *module[7].parameters()):
            assert parameter.is_meta
        module[4].to_empty(device="cpu")
        module[7].to_empty(device="cpu")
        with torch.no_grad():
            for parameter in (*module[4].parameters(), *module[7].parameters()):
                parameter.fill_(0.01)
        return state.with_module(module)

    found = {}
    for event, state in stream(convnet(), images(), [widen, blurpool(), ema(half_life="2ba")], evaluators=images(1)):
        found.setdefault(event, state)
    memory = found[Event.AFTER_LOAD].algorithm_state["ema"]["params"]
    equal(memory, found[Event.AFTER_LOAD].params)
    assert memory["4.weight"].shape == (12, 16, 3, 3)
    assert isinstance(state.module()[4], BlurConv2d)


# All together.


def everything(reverse: bool = False) -> list[Any]:
    listed = [
        blurpool(),
        label_smoothing(0.1),
        gradient_clipping("norm", 0.5),
        gradient_clipping("adaptive", 0.1, name="adaptive"),
        sam(0.1, interval=2),
        ema(half_life="2ba"),
        ema(smoothing=0.5, interval="1ep", name="slow"),
    ]
    return listed[::-1] if reverse else listed


OPTIONS: dict[str, Any] = {
    "microbatch_size": 3,
    "optimizer": pl.optim.adamw(lr=pl.schedules.linear(0.01, 0.0, "1dur")),
    "evaluators": {"val": images(1, seed=1)},
    "eval_interval": "2ba",
}


@pytest.mark.parametrize("reverse", [False, True])
def test_training_goes_on_bitwise_from_every_boundary(reverse):
    whole = list(stream(convnet(), images(), everything(reverse), **OPTIONS))
    kept = [(i, s) for i, (e, s) in enumerate(whole) if e in BOUNDARIES]
    assert {state.event for _, state in kept} == set(BOUNDARIES) - {
        Event.ITERATION_START,
        Event.ITERATION_END,
        Event.ITERATION_CHECKPOINT,
    }
    for index, state in kept:
        rest = list(stream(state, images(), everything(reverse), **{**OPTIONS, "strict": False}))
        assert rest[0][0] is Event.FIT_START
        rest = rest[1:]
        wanted = whole[index + 1 :] if whole[index + 1][0] is not Event.FIT_START else whole[index + 2 :]
        assert [event for event, _ in rest] == [event for event, _ in wanted]
        for (_, a), (_, b) in zip(rest, wanted, strict=True):
            equal(a, b)


def test_a_composition_is_the_list_and_runs_are_equal():
    a = train(convnet(), images(), everything(), **OPTIONS)
    torch.manual_seed(99)
    equal(a, train(convnet(), images(), [pl.compose(*everything())], **OPTIONS))


def test_names_are_given():
    makers = [
        lambda name: label_smoothing(name=name),
        lambda name: gradient_clipping("norm", 1.0, name=name),
        lambda name: ema(smoothing=0.9, name=name),
        lambda name: sam(name=name),
        lambda name: blurpool(name=name),
    ]
    assert [make("mine").name for make in makers] == ["mine"] * 5
    for make in makers:
        with pytest.raises(ArgumentError, match="two algorithms are named 'same'"):
            train(convnet(), images(), [make("same"), make("same")])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: label_smoothing(1.0), ArgumentError, "less than 1"),
        (lambda: label_smoothing(-0.1), ArgumentError, "at least 0"),
        (lambda: label_smoothing(math.nan), ArgumentError, "at least 0"),
        (lambda: label_smoothing("0.1"), ArgumentTypeError, "is a number"),
        (lambda: label_smoothing(True), ArgumentTypeError, "is a number"),
        (lambda: label_smoothing(target_key=None), ArgumentTypeError, "target_key"),
        (lambda: label_smoothing(ignore_index=0.5), ArgumentTypeError, "ignore_index"),
        (lambda: gradient_clipping("max", 1.0), ArgumentError, '"norm", "value" or "adaptive"'),
        (lambda: gradient_clipping("norm", 0), ArgumentError, "above 0"),
        (lambda: gradient_clipping("norm", math.inf), ArgumentError, "finite"),
        (lambda: gradient_clipping("norm", None), ArgumentTypeError, "threshold"),
        (lambda: ema(), ArgumentError, "neither"),
        (lambda: ema(half_life="1ba", smoothing=0.9), ArgumentError, "both"),
        (lambda: ema(smoothing=1), ArgumentError, "less than 1"),
        (lambda: ema(half_life="0ba"), ArgumentError, "no time at all"),
        (lambda: ema(half_life="soon"), ArgumentError, "half_life='soon'"),
        (lambda: ema(half_life=0.5), ArgumentTypeError, "half_life=0.5"),
        (lambda: ema(half_life="10s"), ArgumentError, "clock"),
        (lambda: ema(smoothing=0.9, interval="10s"), ArgumentError, "clock"),
        (lambda: ema(half_life="1ep", interval="1ba"), ArgumentError, 'interval="1ep"'),
        (lambda: sam(rho=0), ArgumentError, "rho is above 0"),
        (lambda: sam(epsilon=-1.0), ArgumentError, "epsilon is above 0"),
        (lambda: sam(interval=0), ArgumentError, "at least 1"),
        (lambda: sam(interval="2ba"), ArgumentTypeError, "every second batch"),
        (lambda: sam(adaptive=1), ArgumentTypeError, "True or False"),
        (lambda: blurpool(min_channels=0), ArgumentError, "min_channels"),
        (lambda: blurpool(min_channels=1.5), ArgumentTypeError, "min_channels"),
        (lambda: blurpool(blur_first="yes"), ArgumentTypeError, "blur_first"),
        (lambda: blurpool(replace_convs=False, replace_maxpools=False), ArgumentError, "would do nothing"),
        (lambda: apply_blurpool(torch.zeros(1)), ArgumentTypeError, "not a torch.nn.Module"),
        (lambda: blurpool(name=""), ArgumentTypeError, "name"),
    ],
)
def test_bad_arguments_are_refused_when_the_algorithm_is_made(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_what_is_exported_is_there():
    for name in algorithms.__all__:
        assert callable(getattr(pl.algorithms, name))
