"""Sharpness-aware minimisation, in real training loops, against loops written by hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import gradient_clipping, label_smoothing, mixup, orthogonal_part, perturb, sam
from pure_loop.testing import check_algorithm
from pure_loop.testing.ranks import RankError
from tests.support.runs import (
    LR,
    by_hand,
    close,
    convnet,
    cross_entropy,
    equal,
    images,
    mlp,
    noise,
    points,
    stream,
    train,
)
from tests.support.worlds import pool


def norm(tensors: Any) -> Tensor:
    return torch.stack([t.norm() for t in tensors]).norm()


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


def _gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(cross_entropy(model(inputs), targets), list(model.parameters())))


def _nearby(model: nn.Module, inputs: Tensor, targets: Tensor, grads: list[Tensor], rho: float = 0.5) -> list[Tensor]:
    """The gradient at the perturbed parameters."""
    before = [p.detach().clone() for p in model.parameters()]
    scale = rho / (norm(grads) + 1e-12)
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads, strict=True):
            p.add_(scale * g)
    found = _gradients(model, inputs, targets)
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.copy_(old)
    return found


def _set(model: nn.Module, grads: list[Tensor]) -> None:
    for p, g in zip(model.parameters(), grads, strict=True):
        p.grad = g


def _orthogonal(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    along = sum((x * y).sum() for x, y in zip(a, b, strict=True)) / sum((y * y).sum() for y in b)
    return [x - along * y for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_groups_with_a_perturbation_of_their_own(m: int, microbatch_size: int | None) -> None:
    def gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        parts: list[list[Tensor]] = []
        for x, y in zip(inputs.split(m), targets.split(m), strict=True):
            found = _nearby(model, x, y, _gradients(model, x, y))
            parts.append([g * len(x) / len(inputs) for g in found])
        _set(model, [torch.stack(column).sum(0) for column in zip(*parts, strict=True)])

    wanted = by_hand(mlp(), points(), gradient)
    close(train(mlp(), points(), [sam(rho=0.5, m=m)], microbatch_size=microbatch_size).params, wanted)


def test_one_group_is_the_batch() -> None:
    whole, group = (train(mlp(), points(), [sam(rho=0.5, m=m)]) for m in (None, 5))
    close(whole.params, group.params)


def test_the_gap_is_made_smaller_too() -> None:
    def gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        first = _gradients(model, inputs, targets)
        second = _nearby(model, inputs, targets, first)
        _set(model, [s - 0.4 * o for s, o in zip(second, _orthogonal(first, second), strict=True)])

    close(train(mlp(), points(), [sam(rho=0.5, gap=0.4)]).params, by_hand(mlp(), points(), gradient))
    equal(train(mlp(), points(), [sam(rho=0.5, gap=0.0)]).params, train(mlp(), points(), [sam(rho=0.5)]).params)


def test_the_orthogonal_part_is_used_again() -> None:
    count, kept = 0, [torch.zeros(())]

    def gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        nonlocal count, kept
        first = _gradients(model, inputs, targets)
        if count % 2 == 0:
            second = _nearby(model, inputs, targets, first)
            kept = _orthogonal(second, first)
            _set(model, second)
        else:
            size = 0.7 * norm(first) / norm(kept)
            _set(model, [g + size * v for g, v in zip(first, kept, strict=True)])
        count += 1

    close(train(mlp(), points(), [sam(rho=0.5, interval=2, reuse=0.7)]).params, by_hand(mlp(), points(), gradient))


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_an_orthogonal_part_is_orthogonal(seed: int) -> None:
    a, b = ({"w": torch.randn(3, generator=g), "b": None} for g in (noise(seed), noise(seed + 1)))
    part = orthogonal_part(a, b)["w"]
    assert part is not None
    assert abs(float(part @ b["w"])) < 1e-5
    equal(orthogonal_part(a, {"w": torch.zeros(3), "b": None}), pl.FrozenDict(a))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"interval": 2, "reuse": 0.7}, {"gap": 0.3}, {"m": 2}], ids=str)
def test_its_variants_keep_every_law(settings: dict[str, Any]) -> None:
    expected = {"world_size": "groups are of each rank's own samples, and uneven ones are refused"}
    check_algorithm(
        lambda: sam(rho=0.1, **settings), max_examples=4, expected_failures=expected if "m" in settings else None
    )


def test_mixed_targets_are_cut_into_groups() -> None:
    state = train(mlp(), points(), [mixup(), sam(rho=0.5, m=2)])
    assert all(tensor.isfinite().all() for tensor in state.params.values())


def test_what_is_refused() -> None:
    with pytest.raises(pl.ArgumentError, match=r"reuse is for the batches between those of interval"):
        sam(reuse=0.7)
    with pytest.raises(pl.ArgumentError, match="m"):
        sam(m=0)


def test_groups_draw_masks_of_their_own() -> None:
    masks = []

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            mask = torch.rand(2)
            masks.append(mask)
            outputs: Tensor = self.layer(inputs) * mask.sum()
            return outputs

    train(Noted(), points(1, size=4), [sam(m=2)], max_duration="1ba", strict=False)
    assert len(masks) == 5
    assert torch.equal(masks[1], masks[2])  # both gradients of a group
    assert not torch.equal(masks[1], masks[3])


def test_a_group_of_padding_counts_for_nothing() -> None:
    data = points(2, size=4)
    for _, targets in data:
        targets[:2] = -100
    whole, groups = (
        train(mlp(), data, [sam(m=m)], task=pl.Task(weight=lambda batch: int((batch[1] != -100).sum())))
        for m in (None, 2)
    )
    close(whole.params, groups.params)


def test_a_step_that_is_skipped_is_not_used_again() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) * (float("inf") if float(targets[0]) == 2 else 1.0)

    data = [
        (inputs, torch.full_like(targets, 2 if index == 0 else 1)) for index, (inputs, targets) in enumerate(points(4))
    ]
    state = train(
        mlp(), data, [sam(interval=4, reuse=0.7)], loss=loss, nonfinite="skip", max_duration="4ba", strict=False
    )
    assert int(state.skipped) == 1
    assert all(tensor.isfinite().all() for tensor in state.algorithm_state["sam"].values())


def test_what_is_frozen_has_no_part_in_the_size() -> None:
    freeze = pl.Algorithm("freeze", {Event.BATCH_END: lambda s: s.replace(frozen={"0.weight", "0.bias"})})
    plain: dict[int, Any] = {}

    def note(state: pl.State) -> pl.State:
        plain[state.timestamp.batch] = dict(state.grads or {})
        return state

    # What is later in the list comes first after a computation.
    algorithms = [freeze, sam(rho=0.5, interval=9, reuse=0.7), pl.Algorithm("note", {Event.AFTER_TRAIN_BATCH: note})]
    for event, state in stream(mlp(), points(), algorithms, max_duration="2ba", strict=False):
        if event is Event.AFTER_TRAIN_BATCH and state.timestamp.batch == 1:
            before = [plain[1][name] for name in ("2.weight", "2.bias")]
            added = [state.grads[name] - old for name, old in zip(("2.weight", "2.bias"), before, strict=True)]
            torch.testing.assert_close(norm(added), 0.7 * norm(before))


def test_products_of_half_precision_and_complex_numbers() -> None:
    half = {"w": torch.full((1000,), 10.0, dtype=torch.float16)}
    assert pl.gradients.inner_product(half, half) == 100_000
    numbers = {"w": torch.tensor([1 + 1j, 2j])}
    assert pl.gradients.inner_product(numbers, numbers) == 6
    part = orthogonal_part(half, half)["w"]
    assert part is not None
    assert not part.any()


def on_a_rank(rank: int, m: int, size: int, mse: bool) -> Any:
    options: dict[str, Any] = {"parallel": "replicate", "seed": 0, "max_duration": "2ba", "strict": False}
    data = points(2, size=size)
    if mse:
        data = [(inputs, inputs[:, :3] * 0.5) for inputs, _ in data]
        options["loss"] = functional.mse_loss
    return {key: value.clone() for key, value in train(mlp(), data, [sam(rho=0.5, m=m)], **options).params.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mse", [False, True])
def test_groups_on_two_ranks(mse: bool) -> None:
    one, two = pool().run(partial(on_a_rank, m=2, size=8, mse=mse))
    equal(one, two)
    with pytest.raises(RankError, match=r"choose an m that divides the parts"):
        pool().run(partial(on_a_rank, m=1, size=5, mse=mse))
