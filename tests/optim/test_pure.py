"""Optimizers are pure: what they are given stays, their states have one structure, and names decide."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pure_loop import schedules
from pure_loop.errors import ArgumentTypeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer, adam, adamw, from_torch, kernels, lamb, lion, partition, sgd
from pure_loop.time import Timestamp
from tests.support.optimizing import ELEMENTWISE, SHAPES, assert_same, batches, named, ours, tensors

PURE: dict[str, Callable[[], Optimizer]] = {
    "adam": lambda: adam(amsgrad=True, maximize=True, weight_decay=0.1),
    "adamw": adamw,
    "sgd": sgd,
    "momentum": lambda: sgd(momentum=0.9, weight_decay=0.1, maximize=True),
    "lion": lambda: lion(weight_decay=0.1, maximize=True),
    "lamb": lambda: lamb(weight_decay=0.1),
    "dampening": lambda: sgd(momentum=0.9, dampening=0.5),
    "from_torch": lambda: from_torch(torch.optim.NAdam, lr=schedules.constant(0.1)),
    "partition": lambda: partition(
        {"a": adamw(), "b": sgd(momentum=0.9)}, label=lambda name, tensor: "a" if tensor.ndim > 1 else "b"
    ),
}
PURE = {**ELEMENTWISE, **PURE}


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


@pytest.mark.parametrize("opt", [adamw(), sgd(lr=schedules.cosine("3ep"), momentum=0.9), adam(), lion()])
def test_optimizers_pickle_and_print(opt: Optimizer) -> None:
    again = pickle.loads(pickle.dumps(opt))
    start, steps = tensors(0, torch.float32), batches(0, torch.float32)
    assert repr(again) == repr(opt)
    assert repr(opt).startswith(f"{opt.name}(lr=")
    assert_same(ours(again, start, steps), ours(opt, start, steps))


def test_an_optimizer_of_ones_own_is_made_of_functions() -> None:
    with pytest.raises(ArgumentTypeError, match=r"Optimizer 'mine': lr must be a function, got 0\.1"):
        Optimizer(name="mine", init=FrozenDict, update=print, lr=0.1)  # type: ignore[arg-type]


@pytest.mark.slow
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
    assert {"cpu", "cuda"} <= kernels.FUSED_DEVICES
    state = adamw().init(named(tensors(0, torch.bfloat16)))
    assert state["step"].shape == ()
    assert state["step"].dtype == torch.float32
