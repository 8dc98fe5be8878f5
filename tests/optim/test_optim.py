"""Our optimizers against torch's own, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pure_loop import schedules
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer, adam, adamw, from_torch, partition, sgd
from pure_loop.time import Timestamp
from tests.support.optimizing import DTYPES, assert_equal, batches, named, ours, tensors, theirs

betas = st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.9, 0.999]))
rates = st.floats(1e-5, 1.0)
decays = st.sampled_from([0.0, 0.01, 0.3])


# Equal to torch, bit for bit.


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, deadline=None)
@given(
    rates, betas, st.sampled_from([1e-8, 1e-3]), decays, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99)
)
def test_adam_is_torch_adam(
    dtype: torch.dtype,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    seed: int,
) -> None:
    mine, cls = (adamw, torch.optim.AdamW) if decoupled else (adam, torch.optim.Adam)
    start, steps = tensors(seed, dtype), batches(seed, dtype)
    options: dict[str, Any] = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    assert_equal(ours(mine(**options), start, steps), theirs(lambda p: cls(p, **options, fused=True), start, steps))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(
    rates,
    st.sampled_from([0.0, 0.5, 0.9]),
    st.sampled_from([0.0, 0.3]),
    decays,
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_sgd_is_torch_sgd(
    dtype: torch.dtype,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    seed: int,
) -> None:
    options: dict[str, Any] = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov and momentum > 0 and dampening == 0,
        "maximize": maximize,
    }
    start, steps = tensors(seed, dtype), batches(seed, dtype)
    # torch's fused kernel on a CPU leaves half-precision parameters as they are, in blocks of 16 elements.
    kind = {"foreach": True} if dtype == torch.bfloat16 else {"fused": True}
    expected = theirs(lambda p: torch.optim.SGD(p, **options, **kind), start, steps)
    assert_equal(ours(sgd(**options), start, steps), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_trains_half_precision_parameters(dtype: torch.dtype, momentum: float) -> None:
    params = FrozenDict(w=torch.ones(64, dtype=dtype))
    optimizer = sgd(lr=0.5, momentum=momentum)
    new, _ = optimizer.update(FrozenDict(params), optimizer.init(params), params, Timestamp())
    assert torch.equal(new["w"], torch.full((64,), 0.5, dtype=dtype))


@pytest.mark.parametrize("seed", range(20))
def test_sgd_steps_float32_beside_half_precision_by_the_fused_kernel(seed: int) -> None:
    """Of these sizes the two kernels of torch have other last bits, for most of the seeds."""
    g = torch.Generator().manual_seed(seed)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
    start, *steps = [[torch.randn(4, 5, generator=g), torch.randn(3, generator=g).bfloat16()] for _ in range(6)]
    together = ours(sgd(**options), start, steps)[-1][0]
    alone = theirs(lambda p: torch.optim.SGD(p, **options, fused=True), start[:1], [step[:1] for step in steps])
    assert torch.equal(together["p0"], alone[-1][0])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_sgd_trains_complex_parameters_of_half_precision() -> None:
    params = FrozenDict(w=torch.ones(64, 2, dtype=torch.float16).view(torch.complex32)[:, 0])
    optimizer = sgd(lr=0.5, momentum=0.9)
    new, _ = optimizer.update(params, optimizer.init(params), params, Timestamp())
    assert torch.equal(torch.view_as_real(new["w"]), torch.full((64, 2), 0.5, dtype=torch.float16))


def test_a_schedule_sets_the_rate_of_the_batch_that_starts() -> None:
    start, steps = tensors(0, torch.float32), batches(0, torch.float32)
    lr = schedules.linear(0.5, 0.0, "4ba")
    expected = theirs(lambda p: torch.optim.AdamW(p, fused=True), start, steps, lr)
    assert_equal(ours(adamw(lr=lr), start, steps), expected)
    assert_equal(ours(adamw(lr=lambda timestamp: lr(timestamp)), start, steps), expected)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5),
    st.sampled_from(["adamw", "adam", "sgd"]),
)
def test_a_parameter_without_gradient_stays_and_counts_no_step(used: list[list[bool]], name: str) -> None:
    shapes = [(3,), (2, 2), (4,)]
    start = tensors(7, torch.float64, shapes)
    steps = [
        [g if use else None for g, use in zip(tensors(20 + i, torch.float64, shapes), row, strict=True)]
        for i, row in enumerate(used)
    ]
    sgd_options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}
    mine: dict[str, Optimizer] = {"adamw": adamw(lr=0.1), "adam": adam(lr=0.1), "sgd": sgd(**sgd_options)}
    make: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        # torch's fused SGD can't start its parameters at different steps.
        "sgd": lambda p: torch.optim.SGD(p, **sgd_options, foreach=False),
    }
    results = ours(mine[name], start, steps)
    for (before, _), (after, _), row in zip(results, results[1:], used, strict=False):
        for (key, value), use in zip(before.items(), row, strict=True):
            assert use or torch.equal(after[key], value)
    for (params, _), other in zip(results, theirs(make[name], start, steps), strict=True):
        torch.testing.assert_close(list(params.values()), other, rtol=0 if name != "sgd" else 1e-14, atol=0)


def layouts(flat: Tensor) -> list[Tensor]:
    """The same numbers in the same shape, in other memory layouts."""
    twice = torch.stack([flat, flat], dim=-1)
    return [
        flat.clone(memory_format=torch.contiguous_format),
        flat.transpose(0, 1).contiguous().transpose(0, 1),
        flat.contiguous(memory_format=torch.channels_last),
        twice[..., 0],
    ]


@pytest.mark.parametrize("opt", [adamw(lr=0.1), sgd(lr=0.1, momentum=0.9), from_torch(torch.optim.AdamW, fused=True)])
def test_memory_layouts_make_no_difference(opt: Optimizer) -> None:
    (start,), *grads = [tensors(i, torch.float32, [(2, 3, 4, 4)]) for i in range(4)]
    expected = ours(opt, [start], grads)[-1][0]["p0"]
    for param in layouts(start):
        for i in range(4):
            results = ours(opt, [param], [[layouts(grad)[(i + k) % 4]] for k, (grad,) in enumerate(grads)])
            assert torch.equal(results[-1][0]["p0"], expected)
    expanded = torch.full((), 2.0).expand(2, 3, 4, 4)
    dense = ours(opt, [start], [[expanded.clone()]])[-1][0]["p0"]
    assert torch.equal(ours(opt, [start], [[expanded]])[-1][0]["p0"], dense)
    assert ours(opt, [layouts(start)[2]], grads)[-1][0]["p0"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("opt", [adamw(lr=0.1), sgd(lr=0.1, momentum=0.9)])
def test_the_optimizers_memory_follows_a_parameter_into_another_layout(opt: Optimizer) -> None:
    (start,), (grad,) = tensors(0, torch.float32, [(2, 3, 4, 4)]), tensors(1, torch.float32, [(2, 3, 4, 4)])
    for first in layouts(start):
        params, state = ours(opt, [first], [[grad]])[-1]
        expected = ours(opt, [start], [[grad], [grad]])[-1][0]
        for moved in layouts(params["p0"]):
            new, _ = opt.update(named([grad]), state, named([moved]), Timestamp())
            assert torch.equal(new["p0"], expected["p0"])


@pytest.mark.parametrize(
    "opt", [adam(lr=0.1, weight_decay=0.1, amsgrad=True), adamw(lr=0.1), sgd(lr=0.1, momentum=0.9)]
)
def test_mixed_dtypes_and_complex_numbers(opt: Optimizer) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
    start, *steps = [
        [torch.randn(3, generator=g).to(d) * (1 + 1j if d.is_complex else 1) for d in dtypes]
        for g in [torch.Generator().manual_seed(0)]
        for _ in range(4)
    ]
    cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[opt.name]
    options = {"lr": opt.lr(Timestamp()), **opt.options}
    options.pop("independent_decay", None)
    together = ours(opt, start, steps)
    assert [p.dtype for p in together[-1][0].values()] == dtypes
    for i in range(3):
        alone = theirs(lambda p: cls(p, **options, fused=True), start[i : i + 1], [s[i : i + 1] for s in steps])
        assert torch.equal(together[-1][0][f"p{i}"], alone[-1][0])
    alone = theirs(lambda p: cls(p, **options), start[3:], [s[3:] for s in steps])
    torch.testing.assert_close(together[-1][0]["p3"], alone[-1][0])


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "make",
    [
        lambda m: adamw(lr=0.1, maximize=m),
        lambda m: adam(lr=0.1, weight_decay=0.1, amsgrad=True, maximize=m),
        lambda m: sgd(lr=0.1, maximize=m),
        lambda m: sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=m),
        lambda m: sgd(lr=0.1, momentum=0.9, dampening=0.3, maximize=m),
    ],
)
def test_a_device_without_fused_kernels_computes_the_same(
    make: Callable[[bool], Optimizer], dtype: torch.dtype, maximize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opt, start, steps = make(maximize), tensors(0, dtype), batches(0, dtype)
    expected = ours(opt, start, steps)[-1]
    for module in ("kernels", "adam", "sgd"):
        monkeypatch.setattr(sys.modules[f"pure_loop.optim.{module}"], "FUSED_DEVICES", frozenset())
    kernels = [name for name in dir(torch) if name.startswith("_fused_")]
    for name in kernels:
        monkeypatch.setattr(torch, name, None)
    torch.testing.assert_close(ours(opt, start, steps)[-1], expected)


# Groups.


def test_partition_is_torchs_parameter_groups() -> None:
    start, steps = tensors(0, torch.float32), batches(0, torch.float32)

    def groups(params: list[Tensor]) -> torch.optim.Optimizer:
        matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
        split = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(split, lr=0.1, fused=True)

    opt = partition(
        {"decay": adamw(lr=0.1, weight_decay=0.3), "no_decay": adamw(lr=0.1, weight_decay=0.0)},
        label=lambda name, tensor: "no_decay" if tensor.ndim < 2 else "decay",
    )
    results = ours(opt, start, steps)
    assert_equal(results, theirs(groups, start, steps))
    assert set(results[-1][1]) == {"decay", "no_decay"}
    assert opt.lr(Timestamp()) == 0.1
    assert list(opt.parts) == ["decay", "no_decay"]
