"""State as a value: a pytree under both engines, copied, pickled, subclassed, handed to torch.func."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support.models import Tied, batches, mlp
from tests.support.streams import assert_same, leaves

DATA = batches((4, 4, 4), seed=0)


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


CLASSES = [pl.State, Curriculum, Roomy]


def fit(start: Any, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "loss": functional.cross_entropy,
        "optimizer": pl.optim.adamw(lr=0.01),
        "max_duration": "4ba",
        "microbatch_size": 2,
        **changes,
    }
    return pl.fit(start, DATA, **arguments)


def a_state(cls: type[pl.State] = pl.State, at: Event = Event.AFTER_TRAIN_BATCH) -> Any:
    """A State with every field filled."""
    start = cls.create(mlp())
    stream = fit(
        start,
        algorithms=[pl.algorithms.ema(half_life="2ba")],
        precision="amp_fp16",
        evaluators=DATA[:1],
        eval_interval="1ba",
    )
    return next(state for event, state in stream if event is at and state.timestamp.batch == 2)


def paths_of_optree(state: Any) -> list[str]:
    return [
        accessor.codify("state") for accessor in optree.tree_accessors(state, namespace="pure_loop", none_is_leaf=True)
    ]


def paths_of_torch(state: Any) -> list[str]:
    flat, _ = torch_pytree.tree_flatten_with_path(state)
    return ["state" + torch_pytree.keystr(path) for path, _ in flat]


@pytest.mark.parametrize("cls", CLASSES)
def test_both_engines_see_the_same_leaves_in_the_same_order(cls: type[pl.State]) -> None:
    state = a_state(cls)
    by_optree = optree.tree_leaves(state, namespace="pure_loop", none_is_leaf=True)
    by_torch = torch_pytree.tree_leaves(state)
    assert len(by_optree) == len(by_torch) > 60
    assert all(a is b for a, b in zip(by_optree, by_torch, strict=True))
    assert paths_of_optree(state) == paths_of_torch(state)
    assert "state.params['0.weight']" in paths_of_optree(state)
    assert "state.timestamp.batch" in paths_of_optree(state)
    assert all(each.startswith("state.") for each in paths_of_optree(state))


@pytest.mark.parametrize("cls", CLASSES)
def test_round_trips(cls: type[pl.State]) -> None:
    state = a_state(cls)
    flat, treedef = optree.tree_flatten(state, namespace="pure_loop")
    flat_torch, spec = torch_pytree.tree_flatten(state)
    for again in (optree.tree_unflatten(treedef, flat), torch_pytree.tree_unflatten(flat_torch, spec)):
        assert type(again) is cls
        assert_same(again, state, "round trip")
        assert again.model is state.model
        assert again.event is state.event
        assert again.grads is not None
        assert list(again.params) == list(state.params)
        assert type(again.params) is pl.FrozenDict


def test_trees_hold_anything_on_the_way() -> None:
    """A tree map may put specs, shapes or None where tensors were: nothing is validated, and reprs work."""
    state = a_state()
    shapes = optree.tree_map(lambda leaf: getattr(leaf, "shape", None), state, namespace="pure_loop")
    assert shapes.params["0.weight"] == (5, 4)
    assert shapes.loss == ()


def test_two_states_of_one_architecture_are_mapped_together() -> None:
    with_numbers = a_state()
    other = optree.tree_map(lambda leaf: leaf, a_state(), namespace="pure_loop")
    assert with_numbers.model is not other.model
    assert with_numbers.model == other.model
    assert hash(with_numbers.model) == hash(other.model)
    mean = optree.tree_map(
        lambda a, b: (a + b) / 2 if isinstance(a, Tensor) and a.is_floating_point() else a,
        *(with_numbers, other),
        namespace="pure_loop",
    )
    expected = (with_numbers.params["0.weight"] + other.params["0.weight"]) / 2
    assert torch.equal(mean.params["0.weight"], expected)
    torch_pytree.tree_map(lambda a, b: a, with_numbers, other)


def test_states_of_other_architectures_are_not() -> None:
    one, two = pl.State.create(nn.Linear(4, 3)), pl.State.create(nn.Linear(4, 3, bias=False))
    assert one.model != two.model
    with pytest.raises(ValueError, match="ModelDef"):
        optree.tree_map(lambda a, b: a, one, two, namespace="pure_loop")
    rates = [pl.State.create(nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate))).model for rate in (0.1, 0.2)]
    assert rates[0] != rates[1], "a setting that differs makes another model"


# Copies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda s: pickle.loads(pickle.dumps(s)),
        lambda s: s.replace(),
        lambda s: attrs.evolve(s),
    ],
    ids=["copy", "deepcopy", "pickle", "replace", "evolve"],
)
def test_copies_are_equal_and_of_the_class(cls: type[pl.State], duplicate: Any) -> None:
    state = a_state(cls)
    if cls is not pl.State:
        state = state.replace(difficulty=0.5, history=(torch.ones(2), 3))
    again = duplicate(state)
    assert type(again) is cls
    assert again is not state
    assert_same(again, state, "copy")
    assert again.model == state.model
    assert again.event is state.event
    assert again.position is state.position
    assert list(again.params) == list(state.params)


def test_deepcopies_and_pickles_share_no_memory() -> None:
    state = a_state()
    for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        mine, others = ({p.data_ptr() for p in each.params.values()} for each in (state, again))
        assert not mine & others


def test_a_pickled_boundary_resumes_exactly() -> None:
    whole = list(fit(mlp()))
    index = next(i for i, (event, state) in enumerate(whole) if event is Event.BATCH_END and state.timestamp.batch == 2)
    again = list(fit(pickle.loads(pickle.dumps(whole[index][1]))))
    assert_same(again[-1][1], whole[-1][1], "the last State")


def test_replace_changes_what_it_is_told_and_nothing_else() -> None:
    state = a_state()
    new = state.replace(loss=torch.tensor(7.0), params={name: p + 1 for name, p in state.params.items()})
    assert float(new.loss) == 7.0
    assert float(state.loss) != 7.0
    assert type(new.params) is pl.FrozenDict
    for field in attrs.fields(pl.State):
        if field.name not in ("loss", "params"):
            assert getattr(new, field.name) is getattr(state, field.name), field.name
    evolved = attrs.evolve(state, loss=torch.tensor(7.0), grads=None)
    assert evolved.grads is None
    assert evolved.params is state.params
    if hasattr(copy, "replace"):
        assert float(copy.replace(state, loss=torch.tensor(7.0)).loss) == 7.0
    assert float(state.__replace__(loss=torch.tensor(7.0)).loss) == 7.0


def test_remember() -> None:
    state = pl.State.create(mlp()).remember("one", 1).remember("two", {"x": torch.ones(1)}).remember("one", 3)
    assert state.algorithm_state["one"] == 3
    assert list(state.algorithm_state) == ["one", "two"]


# Subclasses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Curriculum, Roomy])
def test_training_with_a_state_of_ones_own(cls: Any) -> None:
    """``fit`` takes one made by ``create``; its fields are the algorithms' to use, and the user sees them."""

    @pl.algorithm(Event.BATCH_END)
    def harder(state: Any) -> Any:
        assert type(state) is cls
        return state.replace(difficulty=state.difficulty + 0.25, history=(*state.history, state.loss))

    def stream(start: Any) -> Any:
        return fit(start, algorithms=[harder], evaluators=DATA[:1])

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp()
    pairs = list(stream(cls.create(model, difficulty=1.0)))
    assert [event for event, _ in pairs] == [event for event, _ in stream(cls.create(model))]
    last = pairs[-1][1]
    assert type(last) is cls
    assert last.difficulty == 2.0
    assert len(last.history) == 4
    index = next(i for i, (event, state) in enumerate(pairs) if event is Event.BATCH_END and state.timestamp.batch == 2)
    assert_same(list(stream(pairs[index][1]))[-1][1], last, "going on")
    plainly = pl.run(fit(model, evaluators=DATA[:1]))
    assert_same(dict(last.params), dict(plainly.params), "trains like any other")


@pytest.mark.parametrize("cls", [Curriculum, Roomy])
def test_fields_of_subclasses_are_leaves(cls: Any) -> None:
    state = cls.create(mlp(), difficulty=0.5, history=(torch.ones(2),))
    assert {"state.difficulty", "state.history[0]"} <= set(paths_of_optree(state))
    doubled = optree.tree_map(
        lambda leaf: leaf * 2 if isinstance(leaf, float | Tensor) else leaf, state, namespace="pure_loop"
    )
    assert doubled.difficulty == 1.0
    assert torch.equal(doubled.history[0], torch.full((2,), 2.0))


# torch.func ----------------------------------------------------------------------------------------------------------


def test_functional_call_takes_params_as_they_are() -> None:
    state = a_state()
    inputs = DATA[0][0]
    module = state.module().eval()
    given = torch.func.functional_call(module, state.params, inputs, strict=False)
    assert torch.equal(given, module(inputs))
    merged = torch.func.functional_call(module, {**state.params, **state.buffers}, inputs, strict=True)
    assert torch.equal(merged, module(inputs))


def test_grad_and_vmap_over_params() -> None:
    """Per-sample gradients and an ensemble, by torch.func, of a State's parameters."""
    state = pl.State.create(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    module = state.module()
    inputs, targets = DATA[0]

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        outputs = torch.func.functional_call(module, params, x[None])
        return functional.cross_entropy(outputs, y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(state.params, inputs, targets)
    assert type(each) is pl.FrozenDict
    whole = torch.autograd.grad(functional.cross_entropy(module(inputs), targets), list(module.parameters()))
    for name, gradient in zip(state.params, whole, strict=True):
        torch.testing.assert_close(each[name].mean(0), gradient)

    others = [state.params, optree.tree_map(lambda p: p + 0.1, state.params, namespace="pure_loop")]
    stacked = optree.tree_map(lambda *ps: torch.stack(ps), *others, namespace="pure_loop")
    outputs = torch.func.vmap(lambda params: torch.func.functional_call(module, params, inputs))(stacked)
    for k, params in enumerate(others):
        torch.testing.assert_close(outputs[k], torch.func.functional_call(module, params, inputs))


def test_vmap_over_whole_states() -> None:
    states = [a_state(), a_state()]
    tensors = [
        optree.tree_map(lambda t: t if isinstance(t, Tensor) else None, s.params, namespace="pure_loop") for s in states
    ]
    stacked = optree.tree_map(lambda *ts: torch.stack(ts), *tensors, namespace="pure_loop")
    norms = torch.func.vmap(lambda params: sum(p.square().sum() for p in params.values()))(stacked)
    assert norms.shape == (2,)


# Modules -------------------------------------------------------------------------------------------------------------


def test_a_module_of_a_state_is_independent() -> None:
    state = a_state()
    before = {name: p.clone() for name, p in (state.params | state.buffers).items()}
    module = state.module()
    assert type(module) is nn.Sequential
    assert {name for name, _ in module.named_parameters()} == set(state.params)
    assert all(type(p) is nn.Parameter and p.requires_grad for p in module.parameters())
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.zero_()
    module(DATA[0][0])
    for name, tensor in before.items():
        assert torch.equal((state.params | state.buffers)[name], tensor)
    assert not torch.equal(state.module()[0].weight, module[0].weight)


def test_a_state_is_independent_of_the_users_module() -> None:
    module = mlp()
    state = pl.State.create(module)
    before = {name: p.clone() for name, p in state.params.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module[0] = nn.Linear(4, 5)
    assert_same(dict(state.params), before, "params")
    assert all(p.grad is None for p in module.parameters())


def test_fit_leaves_the_users_module_as_it_was() -> None:
    module = mlp().eval()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    pl.run(fit(module))
    assert_same(dict(module.state_dict()), before, "module")
    assert not module.training
    assert all(p.grad is None for p in module.parameters())


def test_tied_weights_are_one_parameter() -> None:
    model = Tied()
    state = pl.run(fit(model))
    assert "decode.weight" not in state.params
    module: Any = state.module()
    assert module.decode.weight is module.encode.weight
    assert torch.equal(module.encode.weight, state.params["encode.weight"])
    assert not torch.equal(module.encode.weight, model.encode.weight)
    assert not module.head.bias.requires_grad
    assert torch.equal(module.head.bias, model.head.bias), "frozen"
    reference = copy.deepcopy(model)
    inputs, targets = DATA[0]
    grads = torch.autograd.grad(
        functional.cross_entropy(reference(inputs), targets), [p for p in reference.parameters() if p.requires_grad]
    )
    given = next(s.grads for e, s in fit(model, microbatch_size=None) if e is Event.AFTER_TRAIN_BATCH)
    for name, gradient in zip(given, grads, strict=True):
        torch.testing.assert_close(given[name], gradient)


def test_with_module() -> None:
    state = pl.State.create(mlp())
    wider = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    new = state.with_module(wider)
    assert new.params["0.weight"].shape == (9, 4)
    assert not new.buffers
    assert state.params["0.weight"].shape == (5, 4)
    assert torch.equal(new.params["0.weight"], wider[0].weight)
    surgery = pl.algorithm(Event.INIT, name="surgery")(lambda s: s.with_module(wider))
    trained = pl.run(fit(mlp(), algorithms=[surgery]))
    assert trained.params["0.weight"].shape == (9, 4)
    assert_same(dict(trained.params), dict(pl.run(fit(wider)).params), "as if given at first")


def test_what_is_known_by_names_follows_the_order_of_a_new_module() -> None:
    def module(*names: str) -> nn.Module:
        result = nn.Module()
        result.register_buffer("mean", torch.zeros(1))
        for name in names:
            result.register_parameter(name, nn.Parameter(torch.ones(1)))
        return result

    state = pl.State.create(module("a", "b"))
    kept = pl.FrozenDict((name, torch.ones(1)) for name in ("a", "b", "mean"))
    new = state.replace(algorithm_state={"kept": kept}, opt_state={"latest": kept}).with_module(module("b", "a"))
    orders = [new.params, new.algorithm_state["kept"], new.opt_state["latest"]]
    assert list(map(list, orders)) == [["b", "a"], ["b", "a", "mean"], ["b", "a", "mean"]]


def test_repr_says_where_training_is_and_prints_no_tensors() -> None:
    for cls in (pl.State, Curriculum):
        text = repr(a_state(cls, Event.BATCH_CHECKPOINT))
        assert text.startswith(f"{cls.__name__}(batch_checkpoint, epoch 0, batch 2, ")
        assert "tensor(" not in text
        assert "metrics of eval" in text
        assert len(text) < 200
    assert "no event" in repr(pl.State.create(mlp()))


def test_states_are_compared_by_identity_and_can_be_kept_in_sets() -> None:
    state = pl.State.create(mlp())
    assert state != state.replace()
    assert len({state, state, state.replace()}) == 2


def test_every_leaf_of_a_kept_state_has_a_path() -> None:
    assert {"params.0.weight", "opt_state.step", "timestamp.batch", "loss_scale.scale", "skipped"} <= leaves(
        a_state()
    ).keys()
