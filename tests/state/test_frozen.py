"""``State.frozen``: parameters that get no gradient for now, and of which the backward ends early."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.pytree import NAMESPACE
from pure_loop.compile import interpreted
from pure_loop.random import seeded
from pure_loop.testing.comparison import differences
from tests.support.problem import convnet, cross_entropy, fit, images, points, run
from tests.support.tiers import examples
from tests.support.worlds import pool

FIRST, MIDDLE, LAST = frozenset({"0.weight", "0.bias"}), frozenset({"2.weight", "2.bias"}), frozenset({"4.weight"})
SETS = (frozenset(), FIRST, MIDDLE, LAST, FIRST | MIDDLE, FIRST | LAST, frozenset({"0.bias"}))
ADAMW = pl.optim.adamw(lr=0.01, weight_decay=0.1)
OPTIMIZERS = {
    "adamw": ADAMW,
    "momentum": pl.optim.sgd(lr=0.1, momentum=0.9),
    "from_torch": pl.optim.from_torch(torch.optim.RMSprop, lr=0.01),
}
plans = st.lists(st.sampled_from(SETS), min_size=1, max_size=4).map(tuple)


def net() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def freezing(plan: tuple[frozenset[str], ...]) -> pl.Algorithm:
    """The set of frozen parameters of each batch, one after the other."""

    def freeze(state: pl.State) -> pl.State:
        return state.replace(frozen=plan[state.timestamp.batch % len(plan)])

    return pl.Algorithm("freezing", {(Event.FIT_START, Event.BATCH_END): freeze})


def without_gradients(plan: tuple[frozenset[str], ...]) -> pl.Algorithm:
    """The same by hand: all gradients are computed, and some of them dropped."""

    def drop(state: pl.State) -> pl.State:
        frozen = plan[state.timestamp.batch % len(plan)]
        return state.replace(grads={name: None if name in frozen else grad for name, grad in state.grads.items()})

    return pl.Algorithm("dropping", {Event.AFTER_TRAIN_BATCH: drop})


def law(plan: Any, model: nn.Module, data: Any = None, **options: Any) -> None:
    """It trains as if gradients were dropped."""
    one, two = (
        run(model, data, [algorithm(plan)], strict=None, **options) for algorithm in (freezing, without_gradients)
    )
    assert not differences(one.replace(frozen=()), two)


@examples(25, 400)
@given(
    plan=plans,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    options=st.fixed_dictionaries(
        {},
        optional={
            "microbatch_size": st.sampled_from([2, 3]),
            "donate": st.booleans(),
            "precision": st.sampled_from(["amp_bf16", "amp_fp16"]),
            "watch": st.sampled_from([{Event.BATCH_END}, {Event.FIT_END}]),
        },
    ),
)
def test_it_trains_as_if_gradients_were_dropped(plan: Any, optimizer: str, options: dict[str, Any]) -> None:
    law(plan, net(), optimizer=OPTIMIZERS[optimizer], **options)


def test_a_frozen_batchnorm_has_no_gradient() -> None:
    law((frozenset({"0.weight", "1.weight", "1.bias"}),), convnet(), images())


def _operations(outputs: torch.Tensor) -> tuple[str, ...]:
    """The operations of a graph from its beginning."""
    names, nodes = [], [outputs.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.append(type(node).__name__.removesuffix("Backward0").lower())
            nodes += [following for following, _ in node.next_functions]
    return tuple(name for name in reversed(names) if name in ("addmm", "tanh"))


@pytest.mark.parametrize("donate", [True, False])
def test_the_backward_ends_before_them(donate: bool) -> None:
    """No leaf of a frozen parameter needs a gradient, and no graph goes through the layers at the beginning."""
    plan, reached = (frozenset(), FIRST | MIDDLE, MIDDLE, FIRST), []
    options = {"max_duration": "1ep", "donate": donate, "strict": None}
    for event, state in fit(net(), points(4), [freezing(plan)], **options):
        if event is Event.AFTER_FORWARD:
            needed = {name for name, leaf in state.params.items() if leaf.requires_grad}
            assert needed == set(state.model.trainable) - state.frozen
            reached.append(_operations(state.outputs))
        if event is Event.AFTER_TRAIN_BATCH:
            assert {name for name, grad in state.grads.items() if grad is None} == state.frozen
            assert tuple(state.grads) == state.model.trainable
    whole = ("addmm", "tanh", "addmm", "tanh", "addmm")
    assert reached == [whole, whole[-1:], whole, whole[-3:]]


def test_a_state_is_a_value() -> None:
    state = pl.State.create(net())
    frozen = state.replace(frozen=["0.weight"])
    spec = optree.tree_structure(frozen, namespace=NAMESPACE)
    assert spec != optree.tree_structure(state, namespace=NAMESPACE)
    surgery = frozen.with_module(nn.Sequential(nn.Linear(4, 3)))
    for each in (frozen, copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen)), surgery):
        assert each.frozen == {"0.weight"}
    assert state.frozen == frozen.with_module(nn.Linear(4, 3)).frozen == frozenset()
    # The leaves of an earlier step are not taken again where others need a gradient.
    leaves = state.model.leaves(state.params, frozenset())
    assert state.model.leaves(leaves, frozenset()) is leaves
    other = state.model.leaves(leaves, FIRST)
    assert [name for name, leaf in other.items() if not leaf.requires_grad] == ["0.weight", "0.bias"]


def test_it_resumes(tmp_path: Path) -> None:
    plan = (FIRST, FIRST | MIDDLE, frozenset[str](), LAST)
    options: dict[str, Any] = {"algorithms": [freezing(plan)], "optimizer": ADAMW, "strict": None}
    whole = list(fit(net(), donate=False, **options))
    for batch, state in enumerate((state for event, state in whole if event is Event.BATCH_CHECKPOINT), start=1):
        pl.save(state, tmp_path / "state.safetensors")
        loaded = pl.load(tmp_path / "state.safetensors", model=net())
        assert loaded.frozen == plan[batch % 4]
        assert not differences(run(loaded, donate=True, **options), whole[-1][1])


@pytest.mark.slow  # two processes train
@pytest.mark.parametrize(("kind", "compiled"), [("replicate", True), ("shard", False)])
def test_two_ranks(kind: str, compiled: bool) -> None:
    plan = (frozenset(), FIRST, FIRST | MIDDLE, LAST, FIRST)
    options: dict[str, Any] = {"optimizer": ADAMW, "microbatch_size": 2, "parallel": kind, "compile": compiled}

    def program(rank: int) -> Any:
        with interpreted():
            ends = [
                run(net(), points(5, size=8), [a(plan)], strict=None, **options) for a in (freezing, without_gradients)
            ]
        return [{name: tensor.detach().clone() for name, tensor in end.module().state_dict().items()} for end in ends]

    for frozen, dropped in pool().run(program):
        assert not differences(frozen, dropped, name="")


class Inner(nn.Linear):
    """A forward with an inner step by its own parameter, in evaluation alone."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        if not self.training:
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad((inputs @ self.weight.T).square().mean(), self.weight)
            outputs = outputs - gradient.sum()
        return outputs


def test_evaluations_may_differentiate_by_what_is_frozen() -> None:
    freeze, model = freezing((frozenset({"weight"}),)), Inner(4, 3)
    evaluators = {"val": pl.Evaluator(points(1), gradients=True)}
    for compiled in ("where possible", False):
        with interpreted():
            end = run(model, algorithms=[freeze], evaluators=evaluators, strict=False, compile=compiled)
        assert torch.isfinite(torch.as_tensor(end.metrics["val"]["loss"]))
        assert torch.equal(end.params["weight"], model.weight)


def test_a_loss_of_what_is_frozen_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    task = pl.Task(forward=lambda module, batch: module[0](batch[0]), loss=cross_entropy)
    with pytest.raises(pl.errors.LossError, match=r"state\.frozen has 2 of the model's, 0\.bias, 0\.weight"):
        run(model, algorithms=[freezing((FIRST,))], loss=task)
