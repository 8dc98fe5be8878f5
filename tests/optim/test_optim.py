"""Each optimizer is its reference: torch's own class bit for bit, or a formula where torch has none.

``overwrite`` gives what ``update`` gives, in the tensors that it is given; ``update`` writes to none. Memory layouts,
the order of names, gradients that are missing, schedules, and devices without fused kernels are drawn.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import attrs
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pure_loop.errors import ArgumentError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer, adamw, from_torch, kernels, lamb, lion, master_weights, muon, partition, sgd
from pure_loop.schedules import linear
from pure_loop.time import Timestamp
from tests.support.optimizing import DTYPES, RULES, assert_same, batches, named, ours, tensors
from tests.support.tiers import examples

STEPS = 3
SHAPES = [(), (3,), (2, 5), (37,), (3, 4, 2), (0,)]
MATRICES = [(2, 5), (5, 2), (3, 3), (0, 2), (1, 6)]


# References


class Formula(torch.optim.Optimizer):
    """A class of torch's from the direction in which one parameter moves, a function of gradient, state and group."""

    def __init__(self, params: Any, direction: Callable[[Tensor, Tensor, Any, Any], Tensor], **group: Any) -> None:
        super().__init__(params, group)
        self.direction = direction

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    gradient = -param.grad if group["maximize"] else param.grad
                    param -= group["lr"] * self.direction(param, gradient, self.state[param], group)


def lion_direction(param: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
    (beta1, beta2), average = group["betas"], state.get("average", torch.zeros_like(param))
    state["average"] = beta2 * average + (1 - beta2) * gradient
    return (beta1 * average + (1 - beta1) * gradient).sign() + group["weight_decay"] * param


def lamb_direction(param: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor:
    (beta1, beta2), eps, step = group["betas"], group["eps"], state.get("step", 0) + 1
    average = beta1 * state.get("average", torch.zeros_like(param)) + (1 - beta1) * gradient
    square = beta2 * state.get("square", torch.zeros_like(param)) + (1 - beta2) * gradient**2
    state.update(step=step, average=average, square=square)
    if group["bias_correction"]:
        average, square = average / (1 - beta1**step), square / (1 - beta2**step)
    direction = average / (square.sqrt() + eps) + group["weight_decay"] * param
    length, own = param.norm(), direction.norm()
    return direction * (length / own if length > 0 and own > 0 else 1.0)


def torch_sgd(params: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    # torch's fused kernel on a CPU leaves half-precision parameters as they are, in blocks of 16 elements.
    kind = {"foreach": True} if params[0].dtype == torch.bfloat16 else {"fused": True}
    return torch.optim.SGD(params, **options, **kind)


class Reference:
    """One parameter, dense and real, with an optimizer of its own, which has the numbers of each batch."""

    def __init__(self, theirs: Callable[..., torch.optim.Optimizer], options: dict[str, Any], start: Tensor) -> None:
        self.options, self.complex = options, start.is_complex()
        self.param = nn.Parameter(self.plain(start))
        self.optimizer = theirs([self.param], **self.numbers(0))

    def plain(self, tensor: Tensor) -> Tensor:
        # In the order that the elements have in memory: the last bit of torch's fused kernels depends on the place.
        copied = tensor.detach().resolve_neg().clone()
        return torch.view_as_real(copied).clone() if self.complex else copied

    def numbers(self, batch: int) -> dict[str, Any]:
        def at(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(at, value))
            return value(Timestamp(batch=batch)) if callable(value) else value

        numbers = {name: at(value) for name, value in self.options.items() if name != "independent_decay"}
        # Where its momentum is 0, torch keeps no buffer; the smallest number does nothing else.
        numbers |= {"momentum": 1e-30} if numbers.get("momentum") == 0 else {}
        self.shrinks = self.options.get("independent_decay", False) and numbers["weight_decay"]
        return numbers | {"weight_decay": 0.0} if self.shrinks else numbers

    def step(self, gradient: Tensor | None, batch: int) -> Tensor:
        if gradient is not None:
            self.optimizer.param_groups[0].update(self.numbers(batch))
            if self.shrinks:
                self.param.data *= 1 - self.shrinks
            self.param.grad = torch.empty_like(self.param).copy_(self.plain(gradient))
            self.optimizer.step()
        values = self.param.detach().clone()
        return torch.view_as_complex(values) if self.complex else values


@attrs.frozen
class Case:
    """An optimizer, what steps a parameter by its reference, and the dtypes in which both are equal bit for bit."""

    optimizer: Optimizer
    reference: Callable[[Tensor], Callable[[Tensor | None, int], Tensor | None]]
    exact: frozenset[torch.dtype]


# Hyperparameters


rates = st.sampled_from([1e-3, 0.1, 0.7, linear(0.5, 0.1, "4ba"), lambda timestamp: 0.1 / (1 + timestamp.batch)])
flags = st.booleans()
decays = st.sampled_from([0.0, 0.01, 0.3, linear(0.0, 0.5, "4ba")])
firsts = st.sampled_from([0.0, 0.5, 0.9, linear(0.9, 0.4, "4ba")])
betas = st.tuples(firsts, st.sampled_from([0.0, 0.9, 0.999, linear(0.5, 0.9, "4ba")]))
common: dict[str, Any] = {"lr": rates, "weight_decay": decays, "maximize": flags}
adams = {**common, "betas": betas, "eps": st.sampled_from([1e-8, 1e-3]), "amsgrad": flags}
lions = {**common, "betas": betas, "independent_decay": flags}
momenta = st.sampled_from([0.5, 0.9, linear(0.9, 0.4, "4ba"), linear(0.0, 0.9, "4ba")])
sgds = st.one_of(
    st.fixed_dictionaries({**common, "independent_decay": flags}),
    st.fixed_dictionaries({**common, "momentum": momenta, "dampening": st.sampled_from([0.0, 0.3])}),
    st.fixed_dictionaries({**common, "momentum": momenta, "nesterov": flags, "independent_decay": flags}),
)
muons = {"lr": rates, "weight_decay": decays, "independent_decay": flags, "nesterov": flags, "momentum": momenta}
muons["adjust_lr"] = st.sampled_from(["original", "match_rms_adamw"])
lambs = {**lions, "eps": st.sampled_from([1e-6, 1e-3]), "bias_correction": flags}
THEIRS: dict[str, tuple[Any, Any]] = {
    "adam": (lambda p, **options: torch.optim.Adam(p, **options, fused=True), adams),
    "adamw": (lambda p, **options: torch.optim.AdamW(p, **options, fused=True), {**adams, "independent_decay": flags}),
    "sgd": (torch_sgd, sgds),
    "muon": (lambda p, adjust_lr, **options: torch.optim.Muon(p, **options, adjust_lr_fn=adjust_lr), muons),
    "lion": (lambda p, **options: Formula(p, lion_direction, **options), lions),
    "lamb": (lambda p, **options: Formula(p, lamb_direction, **options), lambs),
}


CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.NAdam, {"momentum_decay": 0.1}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"t0": 1, "lambd": 0.1}),
    (torch.optim.Rprop, {}),
    # Of the others Adafactor divides by the number of elements, and Muon takes matrices: see test_from_torch.py.
]


@st.composite
def cases(draw: st.DrawFn, name: Any) -> Case:
    if not isinstance(name, str):
        (cls, options), rate = name, draw(rates)
        made = lambda params, lr: cls(params, lr=lr, **options)  # noqa: E731
        exact = frozenset({torch.float32, torch.float64, torch.bfloat16})
        return Case(from_torch(cls, **options, lr=rate), lambda start: Reference(made, {"lr": rate}, start).step, exact)
    if name == "partition":
        one, other = draw(cases("adamw")), draw(cases("sgd"))
        made = partition({"a": one.optimizer, "b": other.optimizer}, label=lambda name, tensor: "ab"[tensor.ndim > 1])
        return Case(made, lambda start: (other if start.ndim > 1 else one).reference(start), one.exact & other.exact)
    if name == "master_weights":
        inner = draw(cases("adamw"))

        def widened(start: Tensor) -> Any:
            step = inner.reference(start.float() if start.dtype == torch.bfloat16 else start)
            return lambda gradient, batch: step(gradient, batch).to(start.dtype)

        return Case(master_weights(inner.optimizer), widened, inner.exact | {torch.bfloat16})
    if name not in THEIRS:  # a new one, whose formula is in a test of its own
        return Case(RULES[name](0.1), lambda start: lambda gradient, batch: None, frozenset())
    theirs, options = THEIRS[name]
    drawn = draw(st.fixed_dictionaries(options) if isinstance(options, dict) else options)
    from_0 = callable(drawn.get("momentum")) and drawn["momentum"](Timestamp()) == 0
    exact = {torch.float32, torch.float64} if name not in ("lion", "lamb") and not from_0 else set()
    if exact and name != "muon" and not drawn.get("independent_decay"):
        exact.add(torch.bfloat16)
    return Case(RULES[name](**drawn), lambda start: Reference(theirs, drawn, start).step, frozenset(exact))


# Parameters and gradients


@attrs.frozen
class Drawn:
    """A parameter: how it and its gradients lie in memory, and in which steps it has one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    kind_of_gradient: str
    used: tuple[bool, ...]
    is_leaf: bool

    def tensor(self, generator: torch.Generator, kind: str) -> Tensor:
        """Random numbers: contiguous, transposed, every other element of a tensor, lazily negative, or zeros."""
        numbers = torch.randn((2, *self.shape), generator=generator, dtype=torch.float64)
        dense = torch.complex(*numbers).to(self.dtype) if self.dtype.is_complex else numbers[0].to(self.dtype)
        if kind == "transposed":
            return dense.mT.contiguous().mT if dense.ndim > 1 else dense
        if kind == "spread":
            return torch.stack([dense, torch.zeros_like(dense)], -1)[..., 0]
        if kind == "zeros":
            return dense.mul_(0)
        return torch._neg_view(dense) if kind == "negative" else dense


def lists_of(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[list[Drawn]]:
    kinds = ["contiguous", "transposed", "spread", "zeros"]
    used = st.tuples(*[st.sampled_from([True, True, False])] * STEPS)
    gradients = st.sampled_from([*kinds, "negative"])
    one = st.builds(
        Drawn, st.sampled_from(shapes), st.sampled_from(dtypes), st.sampled_from(kinds), gradients, used, flags
    )
    return st.lists(one, max_size=5)


def cloned(tree: Any) -> Any:
    """With other tensors, which lie in memory as these do."""

    def clone(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        size = leaf.untyped_storage().nbytes() // leaf.itemsize
        other = torch.empty(size, dtype=leaf.dtype).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        return other.copy_(leaf.detach()).requires_grad_(leaf.requires_grad)

    return optree.tree_map(clone, tree, namespace="pure_loop")


def every(*trees: Any) -> list[Any]:
    return optree.tree_leaves(trees, namespace="pure_loop")  # type: ignore[arg-type]


def leaves(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in every(trees) if isinstance(leaf, Tensor)]


def notes_of(opt_state: Any) -> list[Any]:
    """What an optimizer state holds besides tensors."""
    return [leaf for leaf in every(opt_state) if not isinstance(leaf, Tensor)]


def numbers(*trees: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in leaves(trees)]


def form(opt_state: Any) -> Any:
    kinds = [getattr(leaf, "shape", None) for leaf in every(opt_state)]
    return optree.tree_structure(opt_state, namespace="pure_loop"), kinds


def storages(*trees: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in leaves(*trees) if tensor.numel()}


def backwards(mapping: Any) -> Any:
    return FrozenDict({name: mapping[name] for name in reversed(mapping)})


def check(case: Case, params: Sequence[Drawn], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer, values = case.optimizer, [each.tensor(generator, each.kind) for each in params]
    references = [case.reference(value) for value in values]
    pure = named([value.requires_grad_(each.is_leaf) for value, each in zip(values, params, strict=True)])
    pure_state = optimizer.init(pure)
    mine, my_state = cloned((pure, pure_state))
    random = torch.get_rng_state()
    for batch in range(STEPS):
        timestamp = Timestamp(batch=batch)
        grads = named([each.tensor(generator, each.kind_of_gradient) if each.used[batch] else None for each in params])
        arguments = grads, pure_state, pure
        before = numbers(arguments)
        result = optimizer.update(*arguments, timestamp)
        assert not storages(result) & storages(arguments)
        assert not any(tensor.requires_grad for tensor in leaves(result))
        assert form(result[1]) == form(pure_state)
        turned, _ = optimizer.update(grads, pure_state, backwards(pure), timestamp)
        assert list(turned) == list(backwards(pure))
        assert_same(dict(backwards(turned)), dict(result[0]))

        assert optimizer.overwrite is not None
        places, kept, notes = leaves(mine, my_state), my_state, notes_of(my_state)
        new, my_state = optimizer.overwrite(grads, my_state, mine, timestamp)
        assert new is mine
        assert (my_state is kept) == (notes_of(my_state) == notes)
        assert all(map(is_, leaves(mine, my_state), places))
        assert_same(numbers(arguments), before)
        pure, pure_state = result
        assert_same((numbers(mine), my_state), (numbers(pure), pure_state))
        for reference, grad, found in zip(references, grads.values(), numbers(pure), strict=True):
            if (expected := reference(grad, batch)) is not None:
                is_close(found, expected, case.exact)
    assert torch.equal(torch.get_rng_state(), random)


def is_close(found: Tensor, expected: Tensor, exact: frozenset[torch.dtype]) -> None:
    assert found.dtype == expected.dtype
    if found.dtype in exact:
        assert torch.equal(found, expected), f"{found} and {expected}"
    elif found.dtype != torch.bfloat16:  # whose rounding is another one in another order of operations
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    """As on a device that torch has no fused kernels for."""
    for module in ("kernels", "adam", "sgd"):
        patch.setattr(sys.modules[f"pure_loop.optim.{module}"], "FUSED_DEVICES", frozenset())
    patch.delattr(torch, "_foreach_clone", raising=False)  # which is new


@pytest.mark.parametrize("name", [*sorted(RULES), "partition", "master_weights", "from_torch"])
@examples(40, 1500)
@given(data=st.data(), seed=st.integers(0, 9), plain=st.sampled_from([False, False, True]))
def test_it_is_its_reference(name: str, data: st.DataObject, seed: int, plain: bool) -> None:
    # Lamb takes a norm of half of the real numbers.
    dtypes = DTYPES if name in ("lamb", "muon", "from_torch") else [*DTYPES, torch.complex64]
    params = data.draw(lists_of(MATRICES if name == "muon" else SHAPES, dtypes))
    several = st.lists(st.sampled_from(CLASSES), min_size=4, max_size=4) if name == "from_torch" else st.just([name])
    for each in data.draw(several):
        case = data.draw(cases(each))
        with pytest.MonkeyPatch.context() as patch:
            if plain:
                without_kernels(patch)
            check(attrs.evolve(case, exact=frozenset()) if plain else case, params, seed)


# Where it runs


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_precision_is_trained_in_blocks_of_any_size() -> None:
    """Torch's fused SGD leaves blocks of 16 elements as they are; and a complex number of half precision is two."""
    wide = torch.ones(64, 2, dtype=torch.float16)
    for param in (torch.ones(64).bfloat16(), torch.ones(64).half(), wide.view(torch.complex32)[:, 0]):
        for momentum in (0.0, 0.9):
            (_, (new, _)) = ours(sgd(lr=0.5, momentum=momentum), [param], [[param]])
            found = torch.view_as_real(new["p0"]) if param.is_complex() else new["p0"]
            assert torch.equal(found, 0.5 * (wide if param.is_complex() else param))


def test_memory_follows_a_parameter_into_another_layout() -> None:
    """So do a gradient that is expanded, and what is channels last stays so."""
    (start,), (grad,) = (tensors(seed, torch.float32, [(2, 3, 4, 4)]) for seed in (0, 1))
    grad = grad[:1, :1, :1, :1].expand(2, 3, 4, 4)

    def layouts(flat: Tensor) -> list[Tensor]:
        turned = flat.transpose(0, 1).contiguous().transpose(0, 1)
        return [flat, turned, torch.stack([flat, flat], -1)[..., 0], flat.contiguous(memory_format=torch.channels_last)]

    for optimizer in (adamw(0.1), sgd(0.1, momentum=0.9), from_torch(torch.optim.AdamW, fused=True)):
        expected = ours(optimizer, [start], [[grad.clone()], [grad.clone()]])[-1][0]["p0"]
        for first in layouts(start):
            params, state = ours(optimizer, [first], [[grad]])[-1]
            for moved in layouts(params["p0"].contiguous()):
                new, _ = optimizer.update(named([grad]), state, named([moved]), Timestamp())
                assert torch.equal(new["p0"], expected)
        assert new["p0"].is_contiguous(memory_format=torch.channels_last)


def test_a_kernel_is_given_contiguous_real_tensors_of_one_dtype_as_they_are() -> None:
    one, other = torch.zeros(2, 3), torch.zeros(4)
    given, alone = [torch.ones(2, 3), torch.ones(4)], torch.ones(2, 3, dtype=torch.complex64)
    assert kernels.are_alike([one, other], given, given)
    assert not kernels.are_alike([], [])
    assert not kernels.are_alike([alone], [alone])
    strided, double = torch.ones(2, 6)[:, ::2], torch.ones(2, 3, dtype=torch.float64)
    meta, negated = torch.ones(2, 3, device="meta"), torch._neg_view(torch.ones(2, 3))
    for tensor in (torch.ones(3, 2), torch.ones(3, 2).t(), strided, double, meta, negated, None):
        assert not kernels.are_alike([one, other], [tensor, given[1]])
        assert not kernels.are_alike([other, one], [given[1], tensor])


# Classes of torch's


def references(cls: Any, start: list[Tensor], steps: list[Any], rate: Any = 0.1) -> list[Tensor]:
    ends = [Reference(cls, {"lr": rate}, tensor) for tensor in start]
    for batch, grads in enumerate(steps):
        values = [reference.step(grad, batch) for reference, grad in zip(ends, grads, strict=True)]
    return values


def test_matrices_and_sparse_gradients() -> None:
    start, *steps = [tensors(i, torch.float32, [(4, 6), (6, 3)]) for i in range(4)]
    nesterov: dict[str, Any] = {"momentum": 0.9, "nesterov": True}
    others: list[Any] = [(torch.optim.Muon, {}), (torch.optim.Adafactor, {}), (torch.optim.SGD, nesterov)]
    for cls, options in (*others, (torch.optim.SGD, {**nesterov, "fused": True})):
        mine = from_torch(cls, lr=0.1, **options)
        assert (mine.overwrite is None) == ("fused" not in options)  # these write to gradients
        make = lambda params, lr: cls(params, lr=lr, **options)  # noqa: E731
        assert_same(list(ours(mine, start, steps)[-1][0].values()), references(make, start, steps))
    rows = [torch.arange(6).unsqueeze(1) != i for i in range(3)]
    sparse = [[(g * row[: len(g)]).to_sparse(1) for g in grads] for row, grads in zip(rows, steps, strict=True)]
    params = [nn.Parameter(tensor.clone()) for tensor in start]
    hand = torch.optim.SparseAdam(params, lr=0.1)
    for grads in sparse:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        hand.step()
    found = ours(from_torch(torch.optim.SparseAdam, lr=0.1), start, sparse)[-1][0]
    assert_same(list(found.values()), [param.detach() for param in params])


def test_whether_nonfinite_gradients_show_is_as_it_says() -> None:
    for cls, options in (*CLASSES, (torch.optim.Adafactor, {})):
        optimizer = from_torch(cls, **options)
        assert optimizer.spreads_nonfinite == (cls not in (torch.optim.Rprop, torch.optim.Adafactor))
        for batch in range(4) if optimizer.spreads_nonfinite else ():
            for wrong in (math.nan, math.inf, -math.inf):
                steps = batches(7, torch.float32, batch + 1)
                for grad in steps[batch][:-1]:
                    grad.view(-1)[-1] = wrong
                params, _ = ours(optimizer, tensors(3, torch.float32)[:-1], [step[:-1] for step in steps])[-1]
                assert not any(tensor.isfinite().all() for tensor in params.values()), batch


class RateIsATensor(torch.optim.SGD):
    """As torchao's classes have it, it takes no number in its place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["lr"] = torch.tensor(lr)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert isinstance(self.param_groups[0]["lr"], Tensor)
        super().step()


def test_it_has_the_rate_of_the_class() -> None:
    assert from_torch(torch.optim.RMSprop).lr(Timestamp()) == 1e-2
    assert from_torch(torch.optim.SGD, lr=0.3).lr(Timestamp()) == 0.3
    assert from_torch(torch.optim.SGD, lr=linear(1, 0, "2ba")).lr(Timestamp(batch=1)) == 0.5
    start, steps, lr = tensors(3, torch.float32), batches(3, torch.float32, 5), linear(0.5, 0.1, "3ba")
    found = ours(from_torch(RateIsATensor, lr=lr), start, steps)[-1][0]
    torch.testing.assert_close(list(found.values()), references(torch.optim.SGD, start, steps, lr))


# Properties of one rule


def test_norms_of_half_precision_do_not_overflow() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        start, gradients = [torch.full((4096,), 2000.0, dtype=dtype)], [torch.ones(4096, dtype=dtype)]
        (_, (params, _)) = ours(lamb(0.5, eps=1e-3), start, [gradients])
        torch.testing.assert_close(params["p0"], torch.full((4096,), 1000.0, dtype=dtype))


def test_complex_parameters_are_pairs_of_real_ones() -> None:
    start, gradients = tensors(0, torch.float64, [(3, 2)]), tensors(1, torch.float64, [(3, 2)])
    (_, (real, _)) = ours(lamb(0.1, weight_decay=0.1), start, [gradients])
    pairs = [[torch.view_as_complex(tensor) for tensor in some] for some in (start, gradients)]
    (_, (params, _)) = ours(lamb(0.1, weight_decay=0.1), pairs[0], [pairs[1]])
    torch.testing.assert_close(torch.view_as_real(params["p0"]), real["p0"])


def test_optimizers_pickle_print_and_take_any_one_number_of_a_schedule() -> None:
    scheduled = adamw(betas=(linear(0.9, 0.4, "5ba"), 0.9))
    for optimizer in (scheduled, sgd(momentum=0.9), lion(), muon()):
        again = pickle.loads(pickle.dumps(optimizer))
        start, steps = tensors(0, torch.float32, MATRICES), [tensors(1, torch.float32, MATRICES)]
        assert repr(again) == repr(optimizer)
        assert_same(ours(again, start, steps), ours(optimizer, start, steps))
    assert repr(scheduled).startswith("adamw(lr=0.001, betas=(linear(start=0.9, end=0.4, time='5ba'), 0.9), eps=1e-08")
    assert repr(master_weights(sgd(0.1))).startswith("master_weights(sgd)(lr=0.1, momentum=0.0")
    for value in (torch.tensor(0.1), torch.tensor(0.1).numpy(), 1):
        (_, (new, _)) = ours(sgd(lr=lambda timestamp, value=value: value), [torch.ones(2)], [[torch.ones(2)]])  # type: ignore[misc]
        torch.testing.assert_close(new["p0"], torch.ones(2) * (1 - float(value)))


def test_a_partition_has_its_parts() -> None:
    parts = {"a": adamw(lr=0.1), "b": adamw(lr=0.1)}
    optimizer = partition(parts, label=lambda name, tensor: "a" if tensor.ndim < 2 else "b")
    assert set(optimizer.init(named(tensors(0, torch.float32)))) == {"a", "b"}
    assert optimizer.lr(Timestamp()) == 0.1
    assert list(optimizer.parts) == ["a", "b"]
    assert {"cpu", "cuda"} <= kernels.FUSED_DEVICES
    step = adamw().init(named(batches(0, torch.bfloat16)[0]))["step"]
    assert (step.shape, step.dtype) == ((), torch.float32), "the step count is shared"
    assert [make().elementwise for make in (lion, lamb, muon)] == [True, False, False]
    start = named([torch.ones(2)])
    with pytest.raises(ArgumentError, match="lion with these options takes no found_inf"):
        lion().overwrite(start, lion().init(start), start, Timestamp(), found_inf=torch.ones(1))  # type: ignore[misc]
