"""``State.frozen``: parameters that get no gradient for now, and of which the backward ends early."""

from __future__ import annotations

import copy
import pickle
from functools import partial
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
from pure_loop.errors import AlgorithmStructureError, ArgumentTypeError, ResumeError
from pure_loop.testing.comparison import close, differences
from tests.support.runs import images, points, stream, train
from tests.support.tiers import examples
from tests.support.worlds import pool

FIRST, MIDDLE, LAST = frozenset({"0.weight", "0.bias"}), frozenset({"2.weight", "2.bias"}), frozenset({"4.weight"})
SETS = (frozenset(), FIRST, MIDDLE, LAST, FIRST | MIDDLE, FIRST | LAST, frozenset({"0.bias"}))


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def freezing(plan: tuple[frozenset[str], ...], event: Event = Event.BATCH_END) -> pl.Algorithm:
    """The set of frozen parameters of each batch, one after the other."""

    def freeze(state: pl.State) -> pl.State:
        return state.replace(frozen=plan[state.timestamp.batch % len(plan)])

    return pl.Algorithm("freezing", {Event.FIT_START: freeze, event: freeze})


def without_gradients(plan: tuple[frozenset[str], ...]) -> pl.Algorithm:
    """The same by hand: all gradients are computed, and some of them dropped."""

    def drop(state: pl.State) -> pl.State:
        frozen = plan[state.timestamp.batch % len(plan)]
        assert state.grads is not None
        return state.replace(grads={name: None if name in frozen else grad for name, grad in state.grads.items()})

    return pl.Algorithm("dropping", {Event.AFTER_TRAIN_BATCH: drop})


OPTIMIZERS = {
    "adamw": lambda: pl.optim.adamw(lr=0.01, weight_decay=0.1),
    "momentum": lambda: pl.optim.sgd(lr=0.1, momentum=0.9),
    "from_torch": lambda: pl.optim.from_torch(torch.optim.RMSprop, lr=0.01),
}
plans_of_sets = st.lists(st.sampled_from(SETS), min_size=1, max_size=4).map(tuple)


@examples(30, 400)
@given(
    plan=plans_of_sets,
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
    one, two = (
        train(net(), points(), [algorithm(plan)], optimizer=OPTIMIZERS[optimizer](), **options)
        for algorithm in (freezing, without_gradients)
    )
    assert not differences(one.replace(frozen=()), two)


@examples(6, 100)
@given(plan=plans_of_sets, optimizer=st.sampled_from(["adamw", "momentum"]))
def test_compiled_steps(plan: Any, optimizer: str) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer](), "strict": False, "watch": {Event.FIT_END}}
    eager = train(net(), points(), [freezing(plan)], **options)
    with interpreted():
        compiled = train(net(), points(), [freezing(plan)], compile=True, **options)
    assert close(compiled, eager, tolerance=1e-5) is None


@pytest.mark.parametrize("donate", [True, False])
def test_the_backward_ends_before_them(donate: bool) -> None:
    """No leaf of a frozen parameter needs a gradient, and no graph goes through the layers at the beginning."""
    plan = (frozenset(), FIRST | MIDDLE, MIDDLE, FIRST)
    reached = []
    for event, state in stream(net(), points(4), [freezing(plan)], max_duration="1ep", donate=donate):
        if event is Event.AFTER_FORWARD:
            needed = {name for name, leaf in state.params.items() if leaf.requires_grad}
            assert needed == set(state.model.trainable) - state.frozen
            assert isinstance(state.outputs, torch.Tensor)
            reached.append(_operations(state.outputs))
        if event is Event.AFTER_TRAIN_BATCH:
            assert state.grads is not None
            assert {name for name, grad in state.grads.items() if grad is None} == state.frozen
            assert tuple(state.grads) == state.model.trainable
    whole = ("addmm", "tanh", "addmm", "tanh", "addmm")
    assert reached == [whole, whole[-1:], whole, whole[-3:]]


def _operations(outputs: torch.Tensor) -> tuple[str, ...]:
    """The operations of a graph from its beginning."""
    names, nodes = [], [outputs.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            name = type(node).__name__.removesuffix("Backward0").lower()
            names.append(name)
            nodes += [following for following, _ in node.next_functions]
    return tuple(name for name in reversed(names) if name in ("addmm", "tanh"))


def test_leaves_of_an_earlier_step_are_not_taken_again() -> None:
    """The parameters are the same mapping where a batch is left out; what needs a gradient is not."""
    state = pl.State.create(net())
    model, none = state.model, frozenset[str]()
    leaves = model.leaves(state.params, none)
    assert model.leaves(leaves, none) is leaves
    other = model.leaves(leaves, FIRST)
    assert other is not leaves
    assert [name for name, leaf in other.items() if not leaf.requires_grad] == ["0.weight", "0.bias"]


def test_a_state_is_a_value() -> None:
    state = pl.State.create(net())
    assert state.frozen == frozenset()
    frozen = state.replace(frozen=["0.weight"])  # type: ignore[arg-type]
    assert frozen.frozen == {"0.weight"}
    assert state.frozen == frozenset()
    leaves, spec = optree.tree_flatten(frozen, namespace=NAMESPACE)
    assert spec != optree.tree_structure(state, namespace=NAMESPACE)
    assert optree.tree_unflatten(spec, leaves).frozen == {"0.weight"}
    assert not any(isinstance(leaf, frozenset) for leaf in leaves)
    for other in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert other.frozen == {"0.weight"}
    surgery = frozen.with_module(nn.Sequential(nn.Linear(4, 3)))
    assert surgery.frozen == {"0.weight"}
    assert frozen.with_module(nn.Linear(4, 3)).frozen == frozenset()
    with pytest.raises(ArgumentTypeError, match=r"set of names of parameters, and was given '0\.weight' of type str"):
        state.replace(frozen="0.weight")  # type: ignore[arg-type]


@pytest.mark.parametrize("donate", [True, False])
def test_it_resumes(tmp_path: Path, donate: bool) -> None:
    run: dict[str, Any] = {"optimizer": OPTIMIZERS["adamw"](), "donate": donate}
    plan = (FIRST, FIRST | MIDDLE, frozenset[str](), LAST)
    algorithms = [freezing(plan)]
    whole = train(net(), points(), algorithms, **run)
    for event, state in stream(net(), points(), algorithms, **run):
        if event is Event.BATCH_CHECKPOINT:
            pl.save(state, tmp_path / f"{state.timestamp.batch}.safetensors")
    for batch in range(1, 6):
        loaded = pl.load(tmp_path / f"{batch}.safetensors", model=net())
        assert loaded.frozen == plan[batch % 4]
        assert not differences(train(loaded, points(), algorithms, **run), whole)


def test_a_frozen_batchnorm_has_no_gradient() -> None:
    def model() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3)
            return nn.Sequential(*layers)

    plan = (frozenset({"0.weight", "1.weight", "1.bias"}),)
    one, two = (train(model(), images(), [algorithm(plan)]) for algorithm in (freezing, without_gradients))
    assert not differences(one.replace(frozen=()), two)


@pytest.mark.parametrize(
    "event", [Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.EVAL_END]
)
def test_inside_a_batch_it_is_refused(event: Event) -> None:
    algorithm = pl.Algorithm("freezing", {event: lambda state: state.replace(frozen=FIRST)})
    with pytest.raises(AlgorithmStructureError, match=rf"'freezing' at {event.name} changed frozen, .*at BATCH_START"):
        train(net(), points(), [algorithm], evaluators={"val": points(1)})


@pytest.mark.parametrize("event", [Event.INIT, Event.FIT_START, Event.BATCH_START, Event.BATCH_END])
def test_what_is_no_parameter_is_refused(event: Event) -> None:
    algorithm = pl.Algorithm("freezing", {event: lambda state: state.replace(frozen={"0.wieght"})})  # type: ignore[arg-type]
    with pytest.raises(AlgorithmStructureError, match=r"frozen.* names '0\.wieght', which the model doesn't have"):
        train(net(), points(), [algorithm])
    everything = pl.Algorithm("freezing", {event: lambda state: state.replace(frozen=set(state.params))})  # type: ignore[arg-type]
    with pytest.raises(AlgorithmStructureError, match="nothing would be left to train"):
        train(net(), points(), [everything])


def test_a_state_of_another_model_is_refused() -> None:
    with pytest.raises(ResumeError, match=r"frozen names '9', which the model doesn't have; its parameters are 0\.w"):
        train(pl.State.create(net()).replace(frozen={"9"}), points())  # type: ignore[arg-type]


def on_a_rank(rank: int, kind: Any, compiled: bool) -> Any:
    plan = (frozenset(), FIRST, FIRST | MIDDLE, LAST, FIRST)
    options: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01, weight_decay=0.1), "seed": 0, "microbatch_size": 2}
    result = []
    for algorithm in (freezing, without_gradients):
        options |= {"parallel": kind, "compile": compiled, "strict": False}
        with interpreted():
            state = train(net(), points(5, size=8), [algorithm(plan)], **options)
        result.append({name: tensor.detach().clone() for name, tensor in state.module().state_dict().items()})
    return result


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_two_ranks(kind: str, compiled: bool) -> None:
    for frozen, dropped in pool().run(partial(on_a_rank, kind=kind, compiled=compiled)):
        for name, tensor in frozen.items():
            assert torch.equal(tensor, dropped[name]), name


class Inner(nn.Module):
    """A forward with an inner step by its own parameter, in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs @ self.weight.T + self.other
        if self.training:
            return outputs
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad((inputs @ self.weight.T).square().mean(), self.weight)
        return outputs - gradient.sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_evaluations_may_differentiate_by_what_is_frozen(compiled: bool) -> None:
    freeze = freezing((frozenset({"weight"}),))
    settings: dict[str, Any] = {"strict": False, "compile": "where possible" if compiled else False}
    evaluator = pl.Evaluator(points(1), gradients=True)
    with interpreted():
        end = train(Inner(), points(), [freeze], evaluators={"val": evaluator}, **settings)
    assert torch.isfinite(torch.as_tensor(end.metrics["val"]["loss"]))
    assert torch.equal(end.params["weight"], torch.ones(3, 4))


def test_a_loss_of_what_is_frozen_says_so() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(1, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.used(inputs)
            return outputs

    freeze = freezing((frozenset({"used.weight", "used.bias"}),))
    with pytest.raises(pl.LossError, match=r"state\.frozen has 2 of the model's, used\.bias, used\.weight"):
        train(Two(), points(), [freeze])
