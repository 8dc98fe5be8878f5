"""Our optimizers against torch's own, bit for bit, and their purity."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pure_loop import schedules
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer, adam, adamw, from_torch, optimizer, partition, sgd
from pure_loop.time import Timestamp

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SHAPES = [(), (3,), (2, 5), (37,), (2, 3, 4, 4), (0,)]
Step = Sequence[Tensor | None]

betas = st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.9, 0.999]))
rates = st.floats(1e-5, 1.0)
decays = st.sampled_from([0.0, 0.01, 0.3])


def tensors(seed: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def named(values: Sequence[Any]) -> FrozenDict[str, Any]:
    return FrozenDict({f"p{i}": value for i, value in enumerate(values)})


def ours(
    opt: Optimizer, start: Sequence[Tensor], steps: Sequence[Step]
) -> list[tuple[FrozenDict[str, Tensor], FrozenDict[str, Any]]]:
    params = named(start)
    state = opt.init(params)
    results = [(params, state)]
    for batch, grads in enumerate(steps):
        params, state = opt.update(named(grads), state, params, Timestamp(batch=batch))
        results.append((params, state))
    return results


def theirs(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    start: Sequence[Tensor],
    steps: Sequence[Step],
    lr: Callable[[Timestamp], float] | None = None,
) -> list[list[Tensor]]:
    params = [torch.nn.Parameter(p.clone()) for p in start]
    reference = make(params)
    results = [[p.detach().clone() for p in params]]
    for batch, grads in enumerate(steps):
        for group in reference.param_groups if lr is not None else ():
            group["lr"] = lr(Timestamp(batch=batch))
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        reference.step()
        results.append([p.detach().clone() for p in params])
    return results


def assert_equal(results: list[tuple[FrozenDict[str, Tensor], Any]], expected: list[list[Tensor]]) -> None:
    for i, ((params, _), other) in enumerate(zip(results, expected, strict=True)):
        for (name, value), target in zip(params.items(), other, strict=True):
            assert value.dtype == target.dtype
            assert torch.equal(value, target), f"{name} differs after {i} steps: {value} and {target}"


def batches(seed: int, dtype: torch.dtype, count: int = 4) -> list[list[Tensor]]:
    return [tensors(seed + i + 1, dtype) for i in range(count)]


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
    for module in ("optimizer", "adam", "sgd"):
        monkeypatch.setattr(sys.modules[f"pure_loop.optim.{module}"], "FUSED_DEVICES", frozenset())
    kernels = [name for name in dir(torch) if name.startswith("_fused_")]
    for name in kernels:
        monkeypatch.setattr(torch, name, None)
    torch.testing.assert_close(ours(opt, start, steps)[-1], expected)


# Any class of torch.optim.

CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.NAdam, {"momentum_decay": 0.1}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"t0": 1, "lambd": 0.1}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(("cls", "options"), CLASSES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_from_torch_is_the_class(cls: type[torch.optim.Optimizer], options: dict[str, Any], scheduled: bool) -> None:
    fused = options.get("fused", False)
    lr = schedules.linear(0.5, 0.1, "3ba")
    for dtype in DTYPES:
        # Adafactor divides by the number of elements.
        start = tensors(3, dtype)[:-1]
        steps: list[list[Tensor | None]] = [list(grads[:-1]) for grads in batches(3, dtype, 5)]
        if not fused:
            steps[0][1] = steps[2][1] = steps[3][2] = None
        results = ours(from_torch(cls, **options, **({"lr": lr} if scheduled else {})), start, steps)
        assert_equal(results, theirs(lambda p: cls(p, **options), start, steps, lr if scheduled else None))
        structures = {str(optree.tree_structure(state, namespace="pure_loop")) for _, state in results}
        assert len(structures) == 1


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_from_torch_takes_a_class_for_matrices() -> None:
    start, *steps = [tensors(i, torch.float32, [(4, 6), (6, 3)]) for i in range(4)]
    assert_equal(ours(from_torch(torch.optim.Muon), start, steps), theirs(torch.optim.Muon, start, steps))


def test_from_torch_takes_sparse_gradients() -> None:
    start, *steps = [tensors(i, torch.float32, [(4, 2)]) for i in range(4)]
    sparse = [
        [(grad * (torch.arange(4) != i).unsqueeze(1)).to_sparse(1) for grad in grads] for i, grads in enumerate(steps)
    ]
    mine = from_torch(torch.optim.SparseAdam, lr=0.1)
    assert_equal(ours(mine, start, sparse), theirs(lambda p: torch.optim.SparseAdam(p, lr=0.1), start, sparse))


class Remembers(torch.optim.Optimizer):
    """It changes a group option, an attribute, a buffer of its own, shared state, and the gradient it is given."""

    def __init__(self, params: Any, lr: float = 0.1, d: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": d, "history": [0.0]})
        self.calls, self.total = 0, torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.state["all"] = {"count": self.state.get("all", {}).get("count", 0) + 1}
        for group in self.param_groups:
            group["d"] *= 1.5
            group["history"].append(group["d"])
            for p in group["params"]:
                if p.grad is not None:
                    self.total += p.grad.sum()
                    p.grad.mul_(2.0)
                    scale = self.calls + self.total.tanh() + sum(group["history"]) + self.state["all"]["count"]
                    p.sub_(p.grad, alpha=group["lr"] * group["d"] * float(scale))


def test_from_torch_keeps_what_an_optimizer_keeps_outside_its_state() -> None:
    start, steps = tensors(3, torch.float64), batches(3, torch.float64, 5)
    results = ours(from_torch(Remembers), start, steps)
    assert_equal(results, theirs(Remembers, start, steps))
    before = optree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, results[2], namespace="pure_loop"
    )
    # Another run in between, and one in another thread, leave nothing behind.
    mine = from_torch(Remembers)
    first = ours(mine, start, steps)
    threads = [threading.Thread(target=ours, args=(mine, tensors(i, torch.float64), steps)) for i in range(2)]
    for thread in threads:
        thread.start()
    second = ours(mine, start, steps)
    for thread in threads:
        thread.join()
    assert_same(first, second)
    assert_same(results, second)
    # Going on from the middle gives the rest of the run.
    params, state = results[2]
    for batch in (2, 3, 4):
        params, state = mine.update(named(steps[batch]), state, params, Timestamp(batch=batch))
    assert_same((params, state), results[5])
    assert_same(results[2], before)
    assert state["group"]["d"] == 1.5**5
    assert state["attributes"]["calls"] == 5


class NeedsClosure(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure is needed"


def test_from_torch_refuses_at_the_door() -> None:
    with pytest.raises(ArgumentError, match=r"LBFGS can't be used, because LBFGS\.step\(closure\) runs the model"):
        from_torch(torch.optim.LBFGS)
    with pytest.raises(ArgumentError, match=r"NeedsClosure can't be used.*AssertionError: a closure is needed"):
        from_torch(NeedsClosure)
    with pytest.raises(ArgumentError, match=r"AdamW.*failed.*Invalid"):
        from_torch(torch.optim.AdamW, betas=(1.5, 0.9))
    with pytest.raises(ArgumentError, match="unexpected keyword"):
        from_torch(torch.optim.AdamW, learning_rate=0.1)
    with pytest.raises(ArgumentError, match="lr must be at least 0"):
        from_torch(torch.optim.AdamW, lr=-1.0)
    with pytest.raises(ArgumentTypeError, match=r"subclass of torch\.optim.Optimizer"):
        from_torch(torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="give the class"):
        from_torch(torch.optim.SGD([torch.zeros(1)]))  # type: ignore[arg-type]


def test_from_torch_shows_its_rate() -> None:
    assert from_torch(torch.optim.RMSprop).lr(Timestamp()) == 1e-2
    assert from_torch(torch.optim.SGD, lr=0.3).lr(Timestamp()) == 0.3
    assert from_torch(torch.optim.SGD, lr=schedules.linear(1, 0, "2ba")).lr(Timestamp(batch=1)) == 0.5
    assert math.isnan(from_torch(NoRate).lr(Timestamp()))
    with pytest.raises(ArgumentError, match="unexpected keyword"):
        from_torch(NoRate, lr=schedules.constant(1.0))


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any, lr_: float = 1.0) -> None:
        super().__init__(params, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pass


# Pure.

PURE: dict[str, Callable[[], Optimizer]] = {
    "adam": lambda: adam(amsgrad=True, maximize=True, weight_decay=0.1),
    "adamw": adamw,
    "sgd": sgd,
    "momentum": lambda: sgd(momentum=0.9, weight_decay=0.1, maximize=True),
    "dampening": lambda: sgd(momentum=0.9, dampening=0.5),
    "from_torch": lambda: from_torch(torch.optim.NAdam, lr=schedules.constant(0.1)),
    "partition": lambda: partition(
        {"a": adamw(), "b": sgd(momentum=0.9)}, label=lambda name, tensor: "a" if tensor.ndim > 1 else "b"
    ),
}


def assert_same(a: Any, b: Any) -> None:
    (leaves, structure), (others, other) = (optree.tree_flatten(x, namespace="pure_loop") for x in (a, b))
    assert structure == other
    for x, y in zip(leaves, others, strict=True):
        assert type(x) is type(y)
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


def snapshot(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree, namespace="pure_loop")


@pytest.mark.parametrize("name", PURE)
@settings(max_examples=8, deadline=None)
@given(used=st.lists(st.booleans(), min_size=len(SHAPES), max_size=len(SHAPES)), grad_mode=st.booleans())
def test_updates_are_pure(name: str, used: list[bool], grad_mode: bool) -> None:
    opt = PURE[name]()
    start = [torch.nn.Parameter(p) if grad_mode else p for p in tensors(0, torch.float32)]
    params, state = ours(opt, start, batches(0, torch.float32, 2))[-1]
    params = named([p.clone().requires_grad_(grad_mode) for p in params.values()])
    grads = named([g if use else None for g, use in zip(tensors(9, torch.float32), used, strict=True)])
    given_to = snapshot((grads, state, params))
    random_state = torch.get_rng_state()
    first = opt.update(grads, state, params, Timestamp())
    assert_same((grads, state, params), given_to)
    kept = snapshot(first)
    assert_same(opt.update(grads, state, params, Timestamp()), kept)
    opt.update(grads, first[1], first[0], Timestamp(batch=1))
    assert_same(first, kept)
    assert_same(PURE[name]().update(grads, state, params, Timestamp()), kept)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in params.values())
    for leaf in optree.tree_leaves(first, namespace="pure_loop"):
        assert not isinstance(leaf, Tensor) or (not leaf.requires_grad and leaf.grad_fn is None)
    for key, use in zip(params, used, strict=True):
        if use and params[key].numel():
            assert first[0][key].data_ptr() != params[key].data_ptr()


@pytest.mark.parametrize("name", PURE)
def test_the_state_has_one_structure_from_the_start(name: str) -> None:
    def shape(tree: Any) -> Any:
        leaves, structure = optree.tree_flatten(tree, namespace="pure_loop")
        return structure, [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves]

    shapes = [shape(state) for _, state in ours(PURE[name](), tensors(0, torch.float32), batches(0, torch.float32))]
    assert all(other == shapes[0] for other in shapes)


@pytest.mark.parametrize("name", PURE)
def test_parameters_in_another_order_are_found_by_name(name: str) -> None:
    opt, grads = PURE[name](), tensors(5, torch.float32)
    params, state = ours(opt, tensors(0, torch.float32), batches(0, torch.float32, 2))[-1]
    expected, _ = opt.update(named(grads), state, params, Timestamp())
    backwards = FrozenDict({key: params[key] for key in reversed(params)})
    new, new_state = opt.update(named(grads), state, backwards, Timestamp())
    assert list(new) == list(backwards)
    assert all(torch.equal(new[key], expected[key]) for key in expected)
    again, _ = opt.update(FrozenDict({key: named(grads)[key] for key in backwards}), new_state, backwards, Timestamp())
    assert list(again) == list(backwards)


@pytest.mark.parametrize("name", PURE)
def test_no_parameters_and_no_gradients(name: str) -> None:
    opt = PURE[name]()
    params, _ = opt.update(FrozenDict(), opt.init(FrozenDict()), FrozenDict(), Timestamp())
    assert params == {}
    params, _ = ours(opt, tensors(0, torch.float32), [[None] * len(SHAPES)] * 2)[-1]
    assert_same(params, named(tensors(0, torch.float32)))


@pytest.mark.parametrize("opt", [adamw(), sgd(lr=schedules.cosine("3ep"), momentum=0.9), adam()])
def test_optimizers_pickle_and_print(opt: Optimizer) -> None:
    again = pickle.loads(pickle.dumps(opt))
    start, steps = tensors(0, torch.float32), batches(0, torch.float32)
    assert repr(again) == repr(opt)
    assert repr(opt).startswith(f"{opt.name}(lr=")
    assert_same(ours(again, start, steps), ours(opt, start, steps))


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


def test_partition_teaches() -> None:
    opt = partition({"a": adamw(), "b": sgd()}, label=lambda name, tensor: "c" if name == "p1" else "a")
    with pytest.raises(
        ArgumentError, match=r"parameter 'p1' \(shape \(3,\)\) is 'c', and the optimizers are \['a', 'b'\]"
    ):
        opt.init(named(tensors(0, torch.float32)))
    with pytest.raises(ArgumentTypeError, match="'a' must be an optimizer"):
        partition({"a": torch.optim.SGD}, label=lambda name, tensor: "a")  # type: ignore[dict-item]
    with pytest.raises(ArgumentTypeError, match="needs a mapping"):
        partition({}, label=lambda name, tensor: "a")
    with pytest.raises(ArgumentTypeError, match="label must be a function"):
        partition({"a": adamw()}, label="a")  # type: ignore[arg-type]


# Errors.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adamw(lr=-1.0), "adamw: lr must be at least 0 and finite, got lr=-1.0"),
        (lambda: adamw(lr=math.nan), "lr must be"),
        (lambda: adam(betas=(0.9, 1.0)), r"adam: betas\[1\] must be at least 0 and less than 1"),
        (lambda: adam(betas=(-0.1, 0.9)), r"betas\[0\]"),
        (lambda: adamw(betas=0.9), "betas must be two numbers"),  # type: ignore[arg-type]
        (lambda: adamw(eps=-1e-8), "eps must be"),
        (lambda: adamw(weight_decay=math.inf), "weight_decay must be"),
        (lambda: adamw(amsgrad=1), "amsgrad must be True or False"),  # type: ignore[arg-type]
        (lambda: adamw(lr="0.1"), "lr must be a number, got '0.1' of type str"),  # type: ignore[arg-type]
        (lambda: adamw(lr=True), "lr must be a number"),
        (lambda: sgd(momentum=-0.5), "sgd: momentum must be"),
        (lambda: sgd(nesterov=True), "nesterov needs a momentum"),
        (lambda: sgd(momentum=0.9, dampening=0.1, nesterov=True), "no dampening"),
    ],
)
def test_hyperparameters_are_refused_at_the_door(make: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        make()


@pytest.mark.parametrize("opt", [adamw(), sgd(momentum=0.9), sgd(), from_torch(torch.optim.AdamW)])
def test_gradients_that_do_not_fit_are_refused(opt: Optimizer) -> None:
    params = FrozenDict(w=torch.zeros(2, 3), b=torch.zeros(3))
    state, bias = opt.init(params), torch.ones(3)

    def update(**grads: Any) -> None:
        opt.update(FrozenDict(grads), state, params, Timestamp())

    with pytest.raises(ArgumentError, match=r"gradient of 'w' has shape \(3, 2\), its parameter has shape \(2, 3\)"):
        update(w=torch.ones(3, 2), b=bias)
    with pytest.raises(ArgumentError, match=r"gradient of 'b' has shape \(2,\)"):
        update(w=torch.ones(2, 3), b=torch.ones(2))
    with pytest.raises(
        ArgumentError, match=r"gradient of 'w' has dtype torch.bfloat16, its parameter has dtype torch.flo"
    ):
        update(w=torch.ones(2, 3, dtype=torch.bfloat16), b=bias)
    with pytest.raises(ArgumentError, match=r"missing \['b'\].*None for a parameter"):
        update(w=torch.ones(2, 3))
    with pytest.raises(ArgumentError, match=r"not a parameter \['v'\]"):
        update(w=torch.ones(2, 3), b=bias, v=bias)
    if not opt.name.startswith("from_torch"):
        with pytest.raises(ArgumentError, match="gradient of 'w' is sparse"):
            update(w=torch.ones(2, 3).to_sparse(), b=bias)


def test_a_tensor_on_another_device_is_named() -> None:
    with pytest.raises(ArgumentError, match="the gradient of 'b' has device meta, its parameter has device cpu"):
        optimizer.like(torch.ones(3, device="meta"), torch.ones(3), "the gradient of 'b'")


def test_a_state_of_something_else_is_refused() -> None:
    params, grads = FrozenDict(w=torch.zeros(2, 3)), FrozenDict(w=torch.ones(2, 3))
    for opt, other in [(adamw(), sgd()), (sgd(), adamw()), (adamw(amsgrad=True), adamw()), (sgd(momentum=0.9), sgd())]:
        with pytest.raises(ResumeError, match="another optimizer, or this one with other options"):
            opt.update(grads, other.init(params), params, Timestamp())
    for opt in (adamw(), sgd(momentum=0.9)):
        with pytest.raises(ResumeError, match=r"memory of 'w'.*has shape \(4, 3\), its parameter has shape \(2, 3\)"):
            opt.update(grads, opt.init(FrozenDict(w=torch.zeros(4, 3))), params, Timestamp())
        with pytest.raises(ResumeError, match=r"missing \['w'\], not a parameter \['v'\]"):
            opt.update(grads, opt.init(FrozenDict(v=torch.zeros(2, 3))), params, Timestamp())


@pytest.mark.parametrize("opt", [adamw(lr=lambda t: math.nan), sgd(lr=lambda t: -0.5)])
def test_a_schedule_that_gives_no_learning_rate_is_refused(opt: Optimizer) -> None:
    params = FrozenDict(w=torch.zeros(2))
    with pytest.raises(
        ArgumentError, match=r"learning rate must be finite and at least 0; .* gave .* at Timestamp\(epoch=0"
    ):
        opt.update(params, opt.init(params), params, Timestamp())


def test_an_optimizer_of_ones_own_is_made_of_functions() -> None:
    with pytest.raises(ArgumentTypeError, match=r"Optimizer 'mine': lr must be a function, got 0\.1"):
        Optimizer(name="mine", init=FrozenDict, update=print, lr=0.1)  # type: ignore[arg-type]


def test_an_update_needs_no_dynamo() -> None:
    code = (
        "import sys, torch\n"
        "from pure_loop.optim import adamw, sgd, partition\n"
        "from pure_loop.frozendict import FrozenDict\n"
        "from pure_loop.time import Timestamp\n"
        "p = FrozenDict(w=torch.ones(2))\n"
        "for o in (adamw(), sgd(momentum=0.9), partition({'a': adamw()}, label=lambda n, t: 'a')):\n"
        "    o.update(p, o.init(p), p, Timestamp())\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_torch_without_foreach_clone_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    start, steps = tensors(0, torch.float32), batches(0, torch.float32)
    expected = ours(adamw(), start, steps)
    monkeypatch.delattr(torch, "_foreach_clone", raising=False)
    assert_same(ours(adamw(), start, steps), expected)


def test_the_step_count_is_shared() -> None:
    assert {"cpu", "cuda"} <= optimizer.FUSED_DEVICES
    state = adamw().init(named(tensors(0, torch.bfloat16)))
    assert state["step"].shape == ()
    assert state["step"].dtype == torch.float32
