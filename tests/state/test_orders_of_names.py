"""What a State knows by name comes in the order of its model's names, whichever order it was made in.

A class may make its submodules in another order than it did when a State was saved: names are the same, positions are
not. All that pairs tensors by position (kernels over lists, gradients, graphs) would then give one parameter what is
another's.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from pure_loop._internal.tree_ops import full_tensor
from pure_loop.compile import interpreted
from pure_loop.frozendict import FrozenDict
from tests.support import problem
from tests.support.sharding import pool
from tests.support.streams import assert_same, leaves
from tests.support.tiers import examples

PARTS = "abcd"
KNOWN = ("params", "buffers", "opt_state", "algorithm_state")


class Part(nn.Module):
    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Parameter(torch.ones(3))
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


def halves() -> pl.optim.Optimizer:
    parts = {"m": pl.optim.adamw(lr=0.05, amsgrad=True), "v": pl.optim.sgd(lr=0.05, momentum=0.9, dampening=0.1)}
    return pl.optim.partition(parts, lambda name, tensor: "m" if tensor.ndim == 2 else "v")


OPTIMIZERS: dict[str, Callable[[], pl.optim.Optimizer]] = {
    "adamw": lambda: pl.optim.adamw(lr=0.05),
    "dampened": lambda: pl.optim.sgd(lr=0.05, momentum=0.9, dampening=0.5),
    "partition": halves,
    "master": lambda: pl.optim.master_weights(pl.optim.adamw(lr=0.05)),
    "from_torch": lambda: pl.optim.from_torch(torch.optim.Adagrad, lr=0.05),
}
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "ema": lambda: A.ema(half_life="2ba"),
    "swa": lambda: A.swa(start="1ba", interval="1ba"),
    "lookahead": lambda: A.lookahead(interval=2),
}


def batches() -> Any:
    g = problem.noise(1)
    return [(torch.randn(4, 3, generator=g), torch.randn(4, 3, generator=g)) for _ in range(5)]


def settings(optimizer: Any = "adamw", algorithms: Any = (), **options: Any) -> dict[str, Any]:
    options |= {"optimizer": OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer, "loss": mse_loss}
    made = [ALGORITHMS[each]() if isinstance(each, str) else each for each in algorithms]
    return {"algorithms": made, "max_duration": "1ep", **options}


def fit(start: Any, *args: Any, **options: Any) -> Any:
    return pl.fit(start, batches(), **settings(*args, **options))


def mappings(value: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Of a tree, the keys of every mapping in their order."""
    if isinstance(value, Mapping):
        yield path, list(value)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from mappings(item, f"{path}/{key}")


def in_another_order(state: pl.State) -> list[str]:
    """The mappings of names that are in another order than the model's."""
    wanted = {name: place for place, name in enumerate((*state.model.parameter_names, *state.model.buffer_names))}
    found = [pair for field in (*KNOWN, "grads") for pair in mappings(getattr(state, field), field)]
    return [p for p, keys in found if wanted.keys() >= set(keys) and keys != sorted(keys, key=wanted.__getitem__)]


def known(state: pl.State) -> dict[str, Any]:
    """All leaves by path, detached."""
    given = {path: leaf for path, leaf in leaves(state).items() if path.startswith(KNOWN)}
    return {path: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for path, leaf in given.items()}


def same(one: Any, other: Any) -> None:
    """By name, in whichever order."""
    assert_same(*(each if isinstance(each, dict) else known(each) for each in (one, other)), "by name")


def kept(stream: Any, batch: int) -> pl.State:
    with closing(stream):
        return next(s for event, s in stream if event is Event.BATCH_CHECKPOINT and s.timestamp.batch == batch)


def backwards(value: Any, cls: type = FrozenDict) -> Any:
    """The mappings of a tree in the reverse of their order."""
    if isinstance(value, Mapping):
        return cls((key, backwards(item, cls)) for key, item in reversed(list(value.items())))
    return value


def turned(state: pl.State, fields: tuple[str, ...] = KNOWN[:3], cls: type = FrozenDict) -> pl.State:
    return state.replace(**{field: backwards(getattr(state, field), cls) for field in fields})


def saved(state: pl.State, folder: Path, **options: Any) -> Path:
    pl.save(state, folder / "ep0-ba2.safetensors", **options)
    return folder / "ep0-ba2.safetensors"


# What each door is given: the State that was kept, the model that makes its parts in another order, a folder, and what
# starts a fit. A model without a buffer that forwards have registered is as it was before its first batch.


def of_model(state: pl.State, model: nn.Module) -> pl.State:
    return state.replace(model=pl.State.create(model).model.with_altered(state.model.altered))


def by_hand(state: pl.State, model: nn.Module) -> pl.State:
    """All fields of the State put into one of the other model."""
    fields = {name: getattr(state, name) for name in (*KNOWN, "timestamp", "previous_timestamp", "position", "event")}
    fresh = pl.State.create(model, seed=state.seed)
    return fresh.replace(model=fresh.model.with_altered(state.model.altered), **fields)


DOORS: dict[str, Callable[[pl.State, nn.Module, Path, Callable[..., Any]], Any]] = {
    "load_path": lambda state, model, folder, start: start(model, load_path=saved(state, folder)),
    "autoresume": lambda state, model, folder, start: start(model, autoresume=saved(state, folder).parent),
    "pl.load": lambda state, model, folder, start: start(pl.load(saved(state, folder), model=model)),
    "trained_only": lambda s, model, folder, start: start(model, load_path=saved(s, folder, trained_only=True)),
    "replace(model=)": lambda state, model, folder, start: start(of_model(state, model)),
    "other order of fields": lambda state, model, folder, start: start(turned(state)),
    "pickle": lambda state, model, folder, start: start(of_model(pickle.loads(pickle.dumps(state)), model)),
    "copy": lambda state, model, folder, start: start(of_model(copy.deepcopy(state), model)),
    "by hand": lambda state, model, folder, start: start(by_hand(state, model)),
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

    @examples(2, 60)
    @given(case=cases, donate=st.sampled_from([True, False, "auto"]))
    def holds(case: dict[str, Any], donate: Any) -> None:
        frozen = case["frozen"] or ("b" if door == "trained_only" else "")
        law({**case, "frozen": frozen}, door, tmp_path_factory.mktemp("run"), donate=donate)

    holds()


@pytest.mark.slow  # each example is two graphs
@examples(1, 60)
@given(case=cases, door=st.sampled_from(sorted(DOORS)))
def test_any_order_compiled(tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], door: str) -> None:
    assume(case["optimizer"] != "from_torch")  # its class reads numbers
    with interpreted():
        law(case, door, tmp_path_factory.mktemp("run"), compile=True)


def test_what_takes_a_state_or_a_file_without_training_on(tmp_path: Path) -> None:
    """Weights alone, evaluation, prediction, state dicts of torch, and journals."""
    recorder = pl.callbacks.FlightRecorder(tmp_path / "flight", keep="2ba", digest="1ba")
    state = kept(fit(Net(), algorithms=["ema"], optimizer="dampened", callbacks=[recorder]), 3)
    for only in (False, True):
        loaded = pl.load(saved(state, tmp_path, weights_only=only), model=Net("dbca"), weights_only=True)
        assert in_another_order(loaded) == []
        assert next(iter(loaded.params)).startswith("d")
        for call in (lambda start: pl.evaluate(start, batches(), loss=mse_loss), lambda s: pl.predict(s, batches())):
            one, other = (list(call(start)) for start in (state, loaded))
            for (_, a), (_, b) in zip(one, other, strict=True):
                assert_same({"o": a.outputs, "m": a.metrics}, {"o": b.outputs, "m": b.metrics}, "by name")
        assert list(dict(loaded.module().named_parameters())) == list(loaded.params)
    rule, other_state = OPTIMIZERS["dampened"](), of_model(state, Net("dcab"))
    of_torch = pl.optim.to_state_dict(other_state, rule)
    names = [name for name, _ in other_state.module().named_parameters()]
    assert of_torch["param_groups"][0]["param_names"] == names
    for start in (other_state, state):  # by their names, in either order
        loaded = pl.optim.load_state_dict(start.replace(opt_state=None), rule, of_torch)
        assert in_another_order(loaded) == []
        same(loaded, state)
    how = settings(algorithms=["ema"], optimizer="dampened")
    with closing(pl.rewind(tmp_path / "flight", "3ba", "batch_checkpoint", Net("dbac"), batches(), **how)) as stream:
        _, again = next(stream)
    assert in_another_order(again) == []
    same(again, state)


def on_ranks(kind: str, order: str, path: str, **options: Any) -> Any:
    """The leaves of the last State on a rank; saves after two batches."""
    for event, state in fit(Net(order, "b"), algorithms=["ema", "lookahead"], parallel=kind, **options):
        assert in_another_order(state) == []
        saves = path and (kind == "shard" or torch.distributed.get_rank() == 0)
        if saves and event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 2:
            pl.save(state, path)
    gathered = {name: optree.tree_map(full_tensor, getattr(state, name), namespace="pure_loop") for name in KNOWN}
    return known(state.replace(**gathered))


@pytest.mark.slow  # two processes train
def test_checkpoints_of_ranks(tmp_path: Path) -> None:
    """Each holds shards or all; one rank loads them, and models of two orders on two ranks are refused."""
    for source, resumed in (("replicate", "replicate"), ("shard", "shard"), ("shard", "replicate")):
        path = str(tmp_path / f"{source}-{resumed}.{'sharded' if source == 'shard' else 'safetensors'}")
        expected = pool().run(lambda rank, kind=source, path=path: on_ranks(kind, "abcd", path))
        found = pool().run(lambda rank, kind=resumed, path=path: on_ranks(kind, "dcba", "", load_path=path))
        for one, other in zip(found, expected, strict=True):
            # Sums over ranks are in another order.
            torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if source == resumed else {}))
    one, other = (pl.load(path, model=Net(order, "b")) for order in ("abcd", "bdca"))
    assert in_another_order(other) == []
    assert next(iter(other.params)).startswith("b")
    same(one, other)

    def two(rank: int) -> str:
        with pytest.raises(pl.PureLoopError) as caught:
            on_ranks("shard", ("abcd", "dcba")[rank], "")
        return str(caught.value)

    assert all("trained is ['d.scale'" in text for text in pool().run(two))


@pytest.mark.parametrize(
    ("cls", "compiled"), [(FrozenDict, False), (dict, False), pytest.param(dict, True, marks=pytest.mark.slow)]
)  # compiled: graphs take seconds
def test_algorithms_may_return_mappings_in_an_order_of_their_own(cls: type, compiled: bool) -> None:
    @pl.algorithm(Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)
    def turn(state: pl.State) -> pl.State:
        return turned(state, (*KNOWN[:3], *["grads"] * (state.event is Event.AFTER_TRAIN_BATCH)), cls)

    with interpreted():
        one, other = (fit(Net(registers=not compiled), algorithms=made, compile=compiled) for made in ([turn], []))
        for (_, state), (_, expected) in zip(one, other, strict=True):
            assert in_another_order(state) == []
            same(state, expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_optimizers_and_clipping_functions_may(in_place: bool) -> None:
    """One that writes to its parameters, and one that returns others."""

    def halve(grads: Any, params: Any) -> Any:
        return {name: None if grads[name] is None else grads[name] / 2 for name in reversed(list(grads))}

    def optimizer(step: int) -> pl.optim.Optimizer:
        def update(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
            return FrozenDict((name, params[name] - 0.1 * grads[name]) for name in list(params)[::step]), opt_state

        def overwrite(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
            for name in params:
                params[name].sub_(0.1 * grads[name])
            return FrozenDict((name, params[name]) for name in list(params)[::step]), opt_state

        writes = overwrite if in_place and step < 0 else None
        own = {"init": lambda _: FrozenDict(), "update": update, "overwrite": writes, "lr": lambda _: 0.1}
        return pl.optim.Optimizer(name="mine", **own)

    one, other = (list(fit(Net(), optimizer(step), clip_grad=halve)) for step in (-1, 1))
    for (_, state), (_, expected) in zip(one, other, strict=True):
        assert in_another_order(state) == []
        same(state, expected)
