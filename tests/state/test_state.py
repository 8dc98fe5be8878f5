"""State as a value: a pytree under both engines, copied, pickled, subclassed, handed to torch.func."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.data.batch import tensors_in
from tests.support.problem import fit, mlp, noisy, points, run, tied
from tests.support.streams import assert_same, leaves
from tests.support.tiers import examples

DATA = points()


@attrs.frozen(eq=False, kw_only=True)
class Curriculum(pl.State):
    """A user's own State: two more fields, and no further work."""

    difficulty: float = 0.0
    history: Any = ()


@attrs.frozen(eq=False, kw_only=True, slots=False)
class Roomy(pl.State):
    """The same without slots."""

    difficulty: float = 0.0
    history: Any = ()


class Nested(nn.Module):
    """Outputs are a dict with a list, of which one tensor stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Any:
        first = self.layer(x)
        second = self.norm(first)
        return {"again": second, "both": [first, second]}


@cache
def pairs(cls: type[pl.State], donate: Any = "auto") -> list[tuple[Event, Any]]:
    """Two batches with microbatches, memory of all kinds and evaluation; kept, so that nothing is overwritten."""
    own = {} if cls is pl.State else {"difficulty": 0.5, "history": (torch.ones(2), 3)}
    task = pl.Task(loss=lambda outputs, batch: functional.cross_entropy(outputs["again"], batch[1]))
    return list(
        fit(
            cls.create(Nested(), **own), DATA, [pl.algorithms.ema(half_life="2ba")], loss=task,
            optimizer=pl.optim.adamw(lr=0.1), max_duration="2ba", microbatch_size=2, precision="amp_fp16",
            evaluators={"val": pl.Evaluator(DATA, metrics=[pl.metrics.loss()])}, strict=None, donate=donate,
        )
    )  # fmt: skip


TRIPS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "__replace__": lambda state: state.__replace__(),
    "evolve": attrs.evolve,
    "optree": lambda state: optree.tree_map(lambda leaf: leaf, state, namespace="pure_loop"),
    "torch": lambda state: torch_pytree.tree_map(lambda leaf: leaf, state),
}


@examples(40, 1000)
@given(st.sampled_from([pl.State, Curriculum, Roomy]), st.sampled_from(["auto", False]), st.integers(0, 200), st.data())
def test_round_trips(cls: type[pl.State], donate: Any, index: int, data: st.DataObject) -> None:
    """At every event: in the middle of a batch, where loss and outputs have graphs, too."""
    drawn = pairs(cls, donate)
    event, state = drawn[index % len(drawn)]
    for name in data.draw(st.lists(st.sampled_from(sorted(TRIPS)), min_size=1, max_size=2)):
        again = TRIPS[name](state)
        assert type(again) is cls
        assert again is not state
        assert_same(again, state, f"{name} at {event.name}")
        assert again.model == state.model
        assert hash(again.model) == hash(state.model)
        assert (again.event, again.position) == (state.event, state.position)
        assert list(again.params) == list(state.params)
        assert type(again.params) is pl.FrozenDict
        if name in ("deepcopy", "pickle"):
            assert all(tensor.grad_fn is None for tensor in tensors_in((again.outputs, again.loss)))
            assert not {p.data_ptr() for p in again.params.values()} & {p.data_ptr() for p in state.params.values()}
            if event is Event.AFTER_FORWARD:
                assert again.outputs["again"] is again.outputs["both"][1]  # in two places, and one in the copy
        state = again


def test_both_engines_see_the_same_leaves_in_the_same_order() -> None:
    for cls in (pl.State, Curriculum, Roomy):
        state = next(state for event, state in reversed(pairs(cls)) if event is Event.AFTER_TRAIN_BATCH)
        one = optree.tree_leaves(state, namespace="pure_loop", none_is_leaf=True)
        flat, _ = torch_pytree.tree_flatten_with_path(state)
        assert len(one) > 60
        assert all(a is b for a, (_, b) in zip(one, flat, strict=True))
        accessors = optree.tree_accessors(state, namespace="pure_loop", none_is_leaf=True)
        assert [each.codify("") for each in accessors] == [torch_pytree.keystr(path) for path, _ in flat]
        assert {"opt_state.step", "loss_scale.scale", "skipped", "params.layer.weight"} <= leaves(state).keys()


def test_trees_are_mapped() -> None:
    """Nothing is validated on the way; two of one architecture together, and no others."""
    one, two = (pl.State.create(mlp(seed)) for seed in (0, 1))
    shapes = optree.tree_map(lambda leaf: getattr(leaf, "shape", None), one, namespace="pure_loop")
    assert shapes.params["0.weight"] == (8, 4)
    mean = optree.tree_map(lambda a, b: (a + b) / 2 if isinstance(a, Tensor) else a, one, two, namespace="pure_loop")
    assert torch.equal(mean.params["0.weight"], (one.params["0.weight"] + two.params["0.weight"]) / 2)
    torch_pytree.tree_map(lambda a, b: a, one, two)
    narrow, *rates = (pl.State.create(nn.Sequential(nn.Linear(4, 3), nn.Dropout(rate))) for rate in (0.1, 0.2, 0.1))
    assert [state.model == narrow.model for state in rates] == [False, True], "a setting makes another model"
    with pytest.raises(ValueError, match="ModelDef"):
        optree.tree_map(lambda a, b: a, one, narrow, namespace="pure_loop")


def test_replace_changes_what_it_is_told_and_nothing_else() -> None:
    _, state = pairs(pl.State)[-1]
    new = state.replace(loss=torch.tensor(7.0), params={name: p + 1 for name, p in state.params.items()})
    assert (float(new.loss), type(new.params)) == (7.0, pl.FrozenDict)
    for field in attrs.fields(pl.State):
        assert field.name in ("loss", "params") or getattr(new, field.name) is getattr(state, field.name), field.name
    remembered = state.replace(algorithm_state={}).remember("one", 1).remember("two", 2).remember("one", 3)
    assert list(remembered.algorithm_state.items()) == [("one", 3), ("two", 2)]
    assert state != state.replace()
    assert len({state, state, state.replace()}) == 2
    first, second = copy.deepcopy([state, state])
    assert first is second


def test_repr_says_where_training_is_and_prints_no_tensors() -> None:
    text = repr(pairs(Curriculum)[-1][1])
    assert text.startswith("Curriculum(fit_end, epoch 0, batch 2, ")
    assert "tensor(" not in text
    assert "metrics of val" in text
    assert len(text) < 200
    assert "no event" in repr(pl.State.create(mlp()))


@pytest.mark.parametrize("cls", [Curriculum, Roomy])
def test_training_with_a_state_of_ones_own(cls: Any) -> None:
    """``fit`` takes one made by ``create``; its fields are the algorithms' to use, and the user sees them."""

    @pl.algorithm(Event.BATCH_END)
    def harder(state: Any) -> Any:
        return state.replace(difficulty=state.difficulty + 0.25, history=(*state.history, state.loss))

    stream = list(fit(cls.create(mlp(), difficulty=1.0), algorithms=[harder], evaluators=DATA[:1]))
    last = stream[-1][1]
    assert (type(last), last.difficulty, len(last.history)) == (cls, 2.5, 6)
    middle = [pickle.loads(pickle.dumps(state)) for event, state in stream if event is Event.BATCH_END][2]
    assert_same(run(middle, algorithms=[harder], evaluators=DATA[:1]), last, "going on")
    assert_same(dict(last.params), dict(run(evaluators=DATA[:1]).params), "trains like any other")


def test_torch_func_takes_params_as_they_are() -> None:
    """Per-sample gradients, whose mean is that of the batch."""
    state, (inputs, targets) = pl.State.create(mlp()), DATA[0]
    module = state.module()

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(module, params, x[None]), y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(state.params, inputs, targets)
    assert type(each) is pl.FrozenDict
    whole = torch.autograd.grad(functional.cross_entropy(module(inputs), targets), list(module.parameters()))
    for name, gradient in zip(state.params, whole, strict=True):
        torch.testing.assert_close(each[name].mean(0), gradient)


def test_the_users_module_stays_as_it_was_and_tied_weights_are_one_parameter() -> None:
    user: Any = tied().eval()
    before = copy.deepcopy(user.state_dict())
    state = run(user)
    assert_same(dict(user.state_dict()), dict(before), "the user's module")
    assert not user.training
    assert all(p.grad is None for p in user.parameters())
    assert "decode.weight" not in state.params
    module: Any = state.module()
    assert module.decode.weight is module.encode.weight
    assert not torch.equal(module.encode.weight, user.encode.weight)
    assert not module.head.bias.requires_grad
    assert torch.equal(module.head.bias, user.head.bias), "frozen"
    kept = {name: tensor.clone() for name, tensor in (state.params | state.buffers).items()}
    with torch.no_grad():
        for tensor in (*module.state_dict().values(), *user.state_dict().values()):
            tensor.zero_()
    assert_same(dict(state.params | state.buffers), kept, "the State")


def test_with_module() -> None:
    wider = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    new = pl.State.create(noisy()).with_module(wider)
    assert not new.buffers
    assert_same(dict(new.params), {name: each.detach() for name, each in wider.named_parameters()}, "its numbers")
    surgery = pl.algorithm(Event.INIT, name="surgery")(lambda state: state.with_module(wider))
    assert_same(dict(run(algorithms=[surgery]).params), dict(run(wider).params), "as if given at first")

    def module(*names: str) -> nn.Module:
        return nn.ParameterDict([(name, nn.Parameter(torch.ones(1))) for name in names])

    kept = pl.FrozenDict((name, torch.ones(1)) for name in "ab")
    state = pl.State.create(module("a", "b")).replace(algorithm_state={"kept": kept}, opt_state={"latest": kept})
    new = state.with_module(module("b", "a"))  # what is known by names follows its order
    for mapping in (new.params, new.algorithm_state["kept"], new.opt_state["latest"]):
        assert list(mapping) == ["b", "a"]
