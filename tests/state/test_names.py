"""What a State knows by name comes in the order of its model's names, whichever order it was made in.

A class may make its submodules in another order than it did when a State was saved: names are the same, positions are
not. All that pairs tensors by position (kernels over lists, gradients, graphs) would then give one parameter what is
another's.
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import full_tensor
from pure_loop.algorithms import ema, gradient_noise, lookahead, swa
from pure_loop.compile import interpreted
from pure_loop.errors import ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.names import aligned, places, reordered
from pure_loop.optim.optimizer import Optimizer
from tests.support import problem
from tests.support.sharding import pool
from tests.support.tiers import examples

PARTS = "abcd"
KNOWN = ("params", "buffers", "opt_state", "algorithm_state")


class Part(nn.Module):
    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", None if registers else torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.tanh(self.norm(self.linear(inputs)) * self.scale)
        self.seen = inputs.detach().mean(0) if self.seen is None else self.seen + inputs.detach().mean(0)
        return outputs


class Net(nn.Module):
    """Four parts of one shape, made in any order: tensors of one can't be told from those of another by their shape.

    Each registers a buffer in its first forward, too. The numbers are the same by name, whatever the order.
    """

    def __init__(self, order: str = PARTS, frozen: str = "", registers: bool = True) -> None:
        super().__init__()
        generator = problem.noise()
        for name in order:
            setattr(self, name, Part(registers))
        for name, parameter in sorted(self.named_parameters()):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.requires_grad_(name[0] not in frozen)

    def forward(self, inputs: Tensor) -> Tensor:
        for name in PARTS:
            inputs = getattr(self, name)(inputs)
        return inputs


def halves() -> Optimizer:
    parts = pl.optim.adamw(lr=0.05, amsgrad=True), pl.optim.sgd(lr=0.05, momentum=0.9, dampening=0.1)
    return pl.optim.partition(dict(zip("mv", parts, strict=True)), lambda name, t: "m" if t.ndim == 2 else "v")


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: pl.optim.adamw(lr=0.05),
    "sgd": lambda: pl.optim.sgd(lr=0.05, momentum=0.9),
    "without memory": lambda: pl.optim.sgd(lr=0.05),
    "dampened": lambda: pl.optim.sgd(lr=0.05, momentum=0.9, dampening=0.5),
    "lamb": lambda: pl.optim.lamb(lr=0.05),
    "partition": halves,
    "master": lambda: pl.optim.master_weights(pl.optim.adamw(lr=0.05)),
    "from_torch": lambda: pl.optim.from_torch(torch.optim.Adagrad, lr=0.05),
}
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "ema": lambda: ema(half_life="2ba"),
    "swa": lambda: swa(start="1ba", interval="1ba"),
    "lookahead": lambda: lookahead(interval=2),
    "gradient_noise": lambda: gradient_noise(eta=0.1),
}


def batches() -> Any:
    generator = problem.noise(1)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(5)]


def settings(optimizer: Any = "adamw", algorithms: Any = (), **options: Any) -> dict[str, Any]:
    return {
        "loss": nn.functional.mse_loss,
        "optimizer": OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer,
        "algorithms": [ALGORITHMS[each]() if isinstance(each, str) else each for each in algorithms],
        "max_duration": "1ep",
        **options,
    }


def fit(start: Any, *args: Any, **options: Any) -> Any:
    return pl.fit(start, batches(), **settings(*args, **options))


def by_name(state: pl.State, fields: tuple[str, ...] = KNOWN) -> dict[str, Any]:
    """Every leaf by its path, and of every mapping its keys in their order."""
    result: dict[str, Any] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            result[f"{path}/"] = list(value)
            for key, item in value.items():
                walk(f"{path}/{key}", item)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                walk(f"{path}/{index}", item)
        else:
            result[path] = value.detach().clone() if isinstance(value, Tensor) else value

    for field in fields:
        walk(field, getattr(state, field))
    return result


def same(one: pl.State | dict[str, Any], other: pl.State | dict[str, Any]) -> None:
    """By name, in whichever order."""
    a, b = (
        {path: value for path, value in (each if isinstance(each, dict) else by_name(each)).items() if path[-1] != "/"}
        for each in (one, other)
    )
    assert a.keys() == b.keys()
    for path, value in a.items():
        assert torch.equal(value, b[path]) if isinstance(value, Tensor) else value == b[path], path


def in_another_order(state: pl.State) -> list[str]:
    """The mappings of names that are in another order than the model's."""
    wanted = {name: place for place, name in enumerate((*state.model.parameter_names, *state.model.buffer_names))}
    mappings = {path: keys for path, keys in by_name(state, (*KNOWN, "grads")).items() if path[-1] == "/" and keys}
    return [
        path
        for path, keys in mappings.items()
        if wanted.keys() >= set(keys) and keys != sorted(keys, key=wanted.__getitem__)
    ]


def kept(stream: Any, batch: int) -> pl.State:
    with closing(stream):
        return next(s for event, s in stream if event is Event.BATCH_CHECKPOINT and s.timestamp.batch == batch)


def backwards(value: Any, cls: type = FrozenDict) -> Any:
    """The mappings of a tree in the reverse of their order."""
    if isinstance(value, Mapping):
        return cls((key, backwards(item, cls)) for key, item in reversed(list(value.items())))
    return value


def saved_as(state: pl.State, path: Path, **options: Any) -> Path:
    pl.save(state, path, **options)
    return path


# What each door is given: the State that was kept, the model that makes its parts in another order, a folder, and what
# starts a fit. A model without a buffer that forwards have registered is as it was before its first batch.
Door = Callable[[pl.State, nn.Module, Path, Callable[..., Any]], Any]


def of_model(state: pl.State, model: nn.Module) -> pl.State:
    return state.replace(model=pl.State.create(model).model.with_altered(state.model.altered))


def by_hand(state: pl.State, model: nn.Module, folder: Path, start: Callable[..., Any]) -> Any:
    """All fields of the State put into one of the other model."""
    fields = {name: getattr(state, name) for name in (*KNOWN, "timestamp", "previous_timestamp", "position", "event")}
    fresh = pl.State.create(model, seed=state.seed)
    return start(fresh.replace(model=fresh.model.with_altered(state.model.altered), **fields))


DOORS: dict[str, Door] = {
    "load_path": lambda state, model, folder, start: start(model, load_path=saved_as(state, folder / "a.safetensors")),
    "autoresume": lambda state, model, folder, start: start(
        model, autoresume=saved_as(state, folder / "run" / "ep0-ba2.safetensors").parent
    ),
    "pl.load": lambda state, model, folder, start: start(
        pl.load(saved_as(state, folder / "a.safetensors"), model=model)
    ),
    "trained_only": lambda state, model, folder, start: start(
        model, load_path=saved_as(state, folder / "a.safetensors", trained_only=True)
    ),
    "replace(model=)": lambda state, model, folder, start: start(of_model(state, model)),
    "other order of fields": lambda state, model, folder, start: start(
        state.replace(**{field: backwards(getattr(state, field)) for field in ("params", "buffers", "opt_state")})
    ),
    "pickle": lambda state, model, folder, start: start(of_model(pickle.loads(pickle.dumps(state)), model)),
    "copy": lambda state, model, folder, start: start(of_model(copy.deepcopy(state), model)),
    "by hand": by_hand,
}
cases = st.fixed_dictionaries(
    {
        "orders": st.tuples(st.permutations(PARTS).map("".join), st.permutations(PARTS).map("".join)),
        "frozen": st.sampled_from(["", "b", "ad"]),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "algorithms": st.lists(st.sampled_from(sorted(ALGORITHMS)), max_size=2, unique=True),
        "batch": st.integers(1, 4),
    }
)
CASE = {"orders": ("abcd", "dbca"), "frozen": "", "optimizer": "partition", "algorithms": ["ema", "swa"], "batch": 3}


def law(case: dict[str, Any], door: str, folder: Path, **options: Any) -> None:
    """The run that goes on with a model of another order has, by name, the bits of the run that was never saved.

    Every State on the way is in its model's order.
    """
    frozen, registers = case["frozen"], "compile" not in options  # which no graph does
    first, second = (Net(order, frozen, registers) for order in case["orders"])
    how = {key: case[key] for key in ("optimizer", "algorithms")} | options
    expected, begun = pl.run(fit(first, **how)), kept(fit(first, **how), case["batch"])
    for _, state in DOORS[door](begun, second, folder, lambda start, **more: fit(start, **how, **more)):
        # Nothing says in which order the algorithm state is that is put there by hand.
        assert door == "by hand" or in_another_order(state) == []
    same(state, expected)


@pytest.mark.parametrize("door", sorted(DOORS))
def test_any_order_at_any_door(tmp_path_factory: pytest.TempPathFactory, door: str) -> None:
    """A State that was made in one order of names goes on in another, wherever it comes in."""
    assume_trained = door == "trained_only"

    @examples(2, 60)
    @given(case=cases, donate=st.sampled_from([True, False, "auto"]))
    def holds(case: dict[str, Any], donate: Any) -> None:
        case = {**case, "frozen": case["frozen"] or "b"} if assume_trained else case
        law(case, door, tmp_path_factory.mktemp("run"), donate=donate)

    holds()


@pytest.mark.slow  # each example is two graphs
@examples(1, 60)
@given(case=cases, door=st.sampled_from(sorted(DOORS)))
def test_any_order_compiled(tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], door: str) -> None:
    assume(case["optimizer"] != "from_torch")  # its class reads numbers
    with interpreted():
        law(case, door, tmp_path_factory.mktemp("run"), compile=True)


@pytest.mark.parametrize(
    ("door", "wrong"), [("load_path", "checkpoint.document.reordered"), ("replace(model=)", "state.reordered")]
)
def test_a_door_that_leaves_the_order_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str, wrong: str
) -> None:
    monkeypatch.setattr(f"pure_loop.{wrong}", lambda value, *_: value)
    with pytest.raises((AssertionError, ResumeError)):
        law(CASE, door, tmp_path)


def test_gradients_are_of_the_names_that_they_have(tmp_path: Path) -> None:
    """By hand: d(3 a + 5 b + 7 c) by a, b and c."""

    class Sum(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            for name in order:
                setattr(self, name, nn.Parameter(torch.zeros(())))

        def forward(self, inputs: Tensor) -> Tensor:
            return (3 * self.a + 5 * self.b + 7 * self.c) * inputs

    def run(start: Any, **options: Any) -> Any:
        plain = {"loss": lambda outputs, targets: outputs.sum(), "optimizer": pl.optim.sgd(lr=1.0)}
        return pl.fit(start, [(torch.ones(1), torch.ones(1))] * 2, **plain, max_duration="1ep", **options)

    pl.save(kept(run(Sum("abc")), 1), tmp_path / "a.safetensors")
    for event, state in run(Sum("cba"), load_path=tmp_path / "a.safetensors"):
        if event is Event.AFTER_TRAIN_BATCH:
            assert list(state.grads.items()) == [("c", 7.0), ("b", 5.0), ("a", 3.0)]
    assert dict(state.params) == {"a": -6.0, "b": -10.0, "c": -14.0}


def test_what_takes_a_state_or_a_file_without_training_on(tmp_path: Path) -> None:
    """Weights alone, evaluation, prediction, modules, state dicts of torch, and journals."""
    recorder = pl.callbacks.FlightRecorder(tmp_path / "flight", keep="2ba", digest="1ba")
    state = kept(fit(Net(), algorithms=["ema"], optimizer="dampened", callbacks=[recorder]), 3)
    loss, path = nn.functional.mse_loss, tmp_path / "a.safetensors"
    for only in (False, True):
        loaded = pl.load(saved_as(state, path, weights_only=only), model=Net("dbca"), weights_only=True)
        assert in_another_order(loaded) == []
        assert next(iter(loaded.params)).startswith("d")
        results = [pl.run(pl.evaluate(each, batches(), loss=loss)).metrics["eval"]["loss"] for each in (state, loaded)]
        assert torch.equal(*results)
        outputs = [
            [each.outputs for event, each in pl.predict(start, batches()) if event is Event.PREDICT_BATCH_END]
            for start in (state, loaded)
        ]
        assert all(map(torch.equal, *outputs))
        one, another = state.module(training=False), loaded.module(training=False)
        assert list(dict(another.named_parameters())) == list(loaded.params)
        assert torch.equal(one(batches()[0][0]), another(batches()[0][0]))
    rule, other = OPTIMIZERS["dampened"](), of_model(state, Net("dcab"))
    saved = pl.optim.to_state_dict(other, rule)
    assert saved["param_groups"][0]["param_names"] == [name for name, _ in other.module().named_parameters()]
    for start in (other, state):  # by their names, in either order
        loaded = pl.optim.load_state_dict(start.replace(opt_state=None), rule, saved)
        assert in_another_order(loaded) == []
        same(loaded, state)
    how = settings(algorithms=["ema"], optimizer="dampened")
    with closing(pl.rewind(tmp_path / "flight", "3ba", "batch_checkpoint", Net("dbac"), batches(), **how)) as stream:
        _, again = next(stream)
    assert in_another_order(again) == []
    same(again, state)


def on_ranks(kind: str, order: str, path: str, **options: Any) -> Any:
    """The leaves of the last State on a rank, and what was in another order on the way; saves after two batches."""
    wrong: list[str] = []
    for event, state in fit(Net(order, "b"), algorithms=["ema", "lookahead"], parallel=kind, **options):
        wrong += in_another_order(state)
        saves = path and (kind == "shard" or torch.distributed.get_rank() == 0)
        if saves and event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 2:
            pl.save(state, path)
    fields = {name: optree.tree_map(full_tensor, getattr(state, name), namespace="pure_loop") for name in KNOWN}
    return by_name(state.replace(**fields)), wrong


@pytest.mark.slow  # two processes train
def test_checkpoints_of_ranks(tmp_path: Path) -> None:
    """Each holds shards or all; one rank loads them, and models of two orders on two ranks are refused."""
    for saved, resumed in (("replicate", "replicate"), ("shard", "shard"), ("shard", "replicate")):
        path = str(tmp_path / f"{saved}-{resumed}.{'sharded' if saved == 'shard' else 'safetensors'}")
        expected = pool().run(lambda rank, kind=saved, path=path: on_ranks(kind, "abcd", path))
        found = pool().run(lambda rank, kind=resumed, path=path: on_ranks(kind, "dcba", "", load_path=path))
        for (one, wrong), (other, _) in zip(found, expected, strict=True):
            assert wrong == []
            if saved == resumed:
                same(one, other)
                continue
            for name, leaf in one.items():  # sums over ranks are in another order
                assert name.endswith("/") or torch.testing.assert_close(leaf, other[name]) is None
    one, other = (pl.load(path, model=Net(order, "b")) for order in ("abcd", "bdca"))
    assert in_another_order(other) == []
    assert next(iter(other.params)).startswith("b")
    same(one, other)

    def two(rank: int) -> str:
        with pytest.raises(pl.PureLoopError) as caught:
            on_ranks("shard", ("abcd", "dcba")[rank], "")
        return str(caught.value)

    assert all("trained is ['d.scale'" in text for text in pool().run(two))


def returned_in_another_order(cls: type) -> pl.Algorithm:
    @pl.algorithm(Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)
    def turn(state: pl.State) -> pl.State:
        fields = ["params", "buffers", "opt_state", *(["grads"] if state.event is Event.AFTER_TRAIN_BATCH else [])]
        return state.replace(**{name: backwards(getattr(state, name), cls) for name in fields})

    return turn


@pytest.mark.parametrize(
    ("cls", "compiled"), [(FrozenDict, False), (dict, False), pytest.param(dict, True, marks=pytest.mark.slow)]
)  # compiled: graphs take seconds
def test_algorithms_may_return_mappings_in_an_order_of_their_own(cls: type, compiled: bool) -> None:
    with interpreted():
        turned, plain = (
            [state for _, state in fit(Net(registers=not compiled), algorithms=made, compile=compiled)]
            for made in ([returned_in_another_order(cls)], [])
        )
    for state, expected in zip(turned, plain, strict=True):
        assert in_another_order(state) == []
        same(state, expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_optimizers_and_clipping_functions_may(in_place: bool) -> None:
    """One that writes to its parameters, and one that returns others."""

    def halve(grads: Any, params: Any) -> Any:
        return {name: None if grads[name] is None else grads[name] / 2 for name in reversed(list(grads))}

    def optimizer(step: int) -> Optimizer:
        def update(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
            return FrozenDict((name, params[name] - 0.1 * grads[name]) for name in list(params)[::step]), opt_state

        def overwrite(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
            for name in params:
                params[name].sub_(0.1 * grads[name])
            return FrozenDict((name, params[name]) for name in list(params)[::step]), opt_state

        writes = overwrite if in_place and step < 0 else None
        return Optimizer(name="mine", init=lambda _: FrozenDict(), update=update, overwrite=writes, lr=lambda _: 0.1)

    turned, plain = (list(fit(Net(), optimizer(step), clip_grad=halve)) for step in (-1, 1))
    for (_, state), (_, expected) in zip(turned, plain, strict=True):
        assert in_another_order(state) == []
        same(state, expected)


@examples(50, 1000)
@given(st.permutations("abcd"), st.permutations("abcd"), st.sets(st.sampled_from("abcd")))
def test_trees_go_there_and_back(first: list[str], second: list[str], some: set[str]) -> None:
    before, wanted = places(first), places(second)
    tree = FrozenDict(
        all=FrozenDict((name, FrozenDict((each, 1) for each in first)) for name in first),
        some=[{name: 1 for name in first if name in some}],
        others=OrderedDict(x=1, a=2),
    )
    turned = reordered(tree, wanted, before)
    assert list(turned["all"]) == second
    assert [list(each) for each in turned["all"].values()] == [second] * 4
    assert list(turned["some"][0]) == [name for name in second if name in some]
    assert turned["others"] is tree["others"]
    assert turned == tree
    assert repr(reordered(turned, before, wanted)) == repr(aligned(turned, tree)) == repr(tree)
    assert reordered(tree, before) is tree
    # An order of its own stays, as of an algorithm that keeps the names that had a gradient last.
    latest = {"b": 1, "a": 2}
    assert reordered({"latest": latest}, places("ba"), places("ab"))["latest"] is latest
    assert list(reordered({"a": 1, "b": 2}, places("ba"), places("ab"))) == ["b", "a"]
