"""What a State knows by name comes in the order of its model's names, whichever order it was made in.

A class may make its submodules in another order than it did when a State was saved: names are the same, positions are
not. All that pairs tensors by position (kernels over lists, gradients, graphs) would then give one parameter what is
another's.
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
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

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import full_tensor
from pure_loop.algorithms import ema, gradient_noise, lookahead, swa
from pure_loop.compile import interpreted
from pure_loop.errors import ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.names import aligned, places, reordered
from pure_loop.optim.optimizer import Optimizer
from tests.support.sharding import pool
from tests.support.tiers import examples

PARTS = "abcd"


class Net(nn.Module):
    """Four parts of one shape, made in any order: tensors of one can't be told from those of another by their shape.

    Each registers a buffer in its first forward, too.
    """

    def __init__(self, order: str = PARTS, registers: bool = True) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, Part(registers))

    def forward(self, inputs: Tensor) -> Tensor:
        for name in PARTS:
            inputs = getattr(self, name)(inputs)
        return inputs


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


def net(order: str = PARTS, frozen: str = "", registers: bool = True) -> Net:
    """The same numbers by name, whatever the order."""
    generator = torch.Generator().manual_seed(0)
    model = Net(order, registers)
    for name, parameter in sorted(model.named_parameters()):
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        parameter.requires_grad_(name[0] not in frozen)
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(5)]


def halves() -> Optimizer:
    def label(name: str, tensor: Tensor) -> str:
        return "matrices" if tensor.ndim == 2 else "vectors"

    matrices, vectors = pl.optim.adamw(lr=0.05, amsgrad=True), pl.optim.sgd(lr=0.05, momentum=0.9, dampening=0.1)
    return pl.optim.partition({"matrices": matrices, "vectors": vectors}, label)


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: pl.optim.adamw(lr=0.05),
    "sgd": lambda: pl.optim.sgd(lr=0.05, momentum=0.9),
    "without memory": lambda: pl.optim.sgd(lr=0.05),
    "dampened": lambda: pl.optim.sgd(lr=0.05, momentum=0.9, dampening=0.5),
    "lion": lambda: pl.optim.lion(lr=0.01),
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


def fit(start: Any, optimizer: str = "adamw", algorithms: tuple[str, ...] = (), **options: Any) -> Any:
    return pl.fit(
        start,
        batches(),
        loss=nn.functional.mse_loss,
        optimizer=OPTIMIZERS[optimizer](),
        algorithms=[ALGORITHMS[name]() for name in algorithms],
        **{"max_duration": "1ep", **options},
    )


KNOWN = ("params", "buffers", "opt_state", "algorithm_state")


def by_name(state: pl.State) -> dict[str, Any]:
    """Every leaf by its path."""
    result: dict[str, Any] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                walk(f"{path}/{key}", item)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                walk(f"{path}/{index}", item)
        else:
            result[path] = value.detach().clone() if isinstance(value, Tensor) else value

    for field in KNOWN:
        walk(field, getattr(state, field))
    return result


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [
        path
        for path, value in one.items()
        if not (torch.equal(value, other[path]) if isinstance(value, Tensor) else value == other[path])
    ]


def in_another_order(state: pl.State) -> list[str]:
    """The mappings of names that are in another order than the model's."""
    wanted = {name: place for place, name in enumerate((*state.model.parameter_names, *state.model.buffer_names))}
    result: list[str] = []

    def walk(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            keys = list(value)
            if keys and wanted.keys() >= set(keys) and keys != sorted(keys, key=wanted.__getitem__):
                result.append(path)
            for key, item in value.items():
                walk(f"{path}/{key}", item)

    for field in (*KNOWN, "grads"):
        walk(field, getattr(state, field))
    return result


def kept(stream: Any, batch: int) -> pl.State:
    with closing(stream):
        for event, state in stream:
            if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == batch:
                return state  # type: ignore[no-any-return]
    raise AssertionError


def backwards(value: Any) -> Any:
    """The mappings of a tree in the reverse of their order."""
    if isinstance(value, FrozenDict):
        return FrozenDict((key, backwards(item)) for key, item in reversed(list(value.items())))
    return value


def structure(model: nn.Module) -> Any:
    return pl.State.create(model).model


def saved_as(state: pl.State, path: Path, **options: Any) -> Path:
    pl.save(state, path, **options)
    return path


# What each door is given: the State that was kept, the model that makes its parts in another order, a folder, and what
# starts a fit. A model without a buffer that forwards have registered is as it was before its first batch.
Door = Callable[[pl.State, nn.Module, Path, Callable[..., Any]], Any]


def by_hand(state: pl.State, model: nn.Module, folder: Path, start: Callable[..., Any]) -> Any:
    """All fields of the State put into one of the other model."""
    fresh = pl.State.create(model, seed=state.seed)
    fields = {name: getattr(state, name) for name in (*KNOWN, "timestamp", "previous_timestamp", "position", "event")}
    model_now = fresh.model.with_altered(state.model.altered)
    return start(fresh.replace(model=model_now, **fields))


def replaced(state: pl.State, model: nn.Module, folder: Path, start: Callable[..., Any]) -> Any:
    return start(state.replace(model=structure(model).with_altered(state.model.altered)))


DOORS: dict[str, Door] = {
    "load_path": lambda state, model, folder, start: start(model, load_path=saved_as(state, folder / "a.safetensors")),
    "autoresume": lambda state, model, folder, start: start(
        model, autoresume=saved_as(state, folder / "run" / "ep0-ba2.safetensors").parent
    ),
    "pl.load": lambda state, model, folder, start: start(
        pl.load(saved_as(state, folder / "a.safetensors"), model=model)
    ),
    "replace(model=)": replaced,
    "other order of fields": lambda state, model, folder, start: start(
        state.replace(
            params=backwards(state.params), buffers=backwards(state.buffers), opt_state=backwards(state.opt_state)
        )
    ),
    "pickle": lambda state, model, folder, start: replaced(pickle.loads(pickle.dumps(state)), model, folder, start),
    "copy": lambda state, model, folder, start: replaced(copy.deepcopy(state), model, folder, start),
    "by hand": by_hand,
}


def continued(door: str, state: pl.State, order: str, frozen: str, folder: Path, **options: Any) -> pl.State:
    """The State at the end of the run that goes on behind the door; every one on the way is in its model's order."""
    model = net(order, frozen, registers="compile" not in options)
    stream = DOORS[door](state, model, folder, lambda start, **more: fit(start, **options, **more))
    for _, state in stream:
        if door != "by hand":  # nothing says in which order the algorithm state is that is put there
            assert in_another_order(state) == []
    return state


cases = st.fixed_dictionaries(
    {
        "orders": st.tuples(st.permutations(PARTS).map("".join), st.permutations(PARTS).map("".join)),
        "frozen": st.sampled_from(["", "b", "ad"]),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "algorithms": st.lists(st.sampled_from(sorted(ALGORITHMS)), max_size=2, unique=True).map(tuple),
        "batch": st.integers(1, 4),
        "door": st.sampled_from(sorted(DOORS)),
    }
)


def law(case: dict[str, Any], folder: Path, **options: Any) -> None:
    """The run that goes on with a model of another order has, by name, the bits of the run that was never saved."""
    first, second = case["orders"]
    frozen, settings = case["frozen"], {key: case[key] for key in ("optimizer", "algorithms")} | options
    registers = "compile" not in options  # which no graph does
    expected = by_name(pl.run(fit(net(first, frozen, registers), **settings)))
    state = kept(fit(net(first, frozen, registers), **settings), case["batch"])
    assert differing(by_name(continued(case["door"], state, second, frozen, folder, **settings)), expected) == []


class TestDoors:
    """A State that was made in one order of names goes on in another, wherever it comes in.

    Tried besides: plain and sharded checkpoints (below), files of weights and of trained parameters, frozen
    parameters, state dicts of torch, journals, buffers that a forward registers, donation, evaluation, prediction.
    """

    @examples(25, 400)
    @given(case=cases)
    def test_any_order_at_any_door(self, tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]) -> None:
        law(case, tmp_path_factory.mktemp("run"))

    @pytest.mark.parametrize("door", sorted(DOORS))
    def test_each_door(self, tmp_path: Path, door: str) -> None:
        case = {"orders": ("abcd", "dbca"), "frozen": "", "optimizer": "partition", "algorithms": ("ema", "swa")}
        law({**case, "batch": 3, "door": door}, tmp_path)

    @pytest.mark.parametrize("donate", [True, False])
    def test_donated(self, tmp_path: Path, donate: bool) -> None:
        case = {"orders": ("abcd", "cadb"), "frozen": "", "optimizer": "adamw", "algorithms": (), "batch": 2}
        law({**case, "door": "load_path"}, tmp_path, donate=donate)

    @pytest.mark.slow
    @examples(3, 60)
    @given(case=cases)
    def test_compiled(self, tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]) -> None:
        assume(case["optimizer"] != "from_torch")  # its class reads numbers
        with interpreted():
            law(case, tmp_path_factory.mktemp("run"), compile=True)

    @pytest.mark.parametrize(
        ("door", "wrong"),
        [
            ("load_path", "pure_loop.checkpoint.document.reordered"),
            ("pl.load", "pure_loop.checkpoint.document.reordered"),
            ("replace(model=)", "pure_loop.state.reordered"),
        ],
    )
    def test_a_door_that_leaves_the_order_is_seen(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str, wrong: str
    ) -> None:
        monkeypatch.setattr(wrong, lambda value, *_: value)
        case = {"orders": ("abcd", "dcba"), "frozen": "", "optimizer": "adamw", "algorithms": ("ema",), "batch": 2}
        with pytest.raises((AssertionError, ResumeError)):
            law({**case, "door": door}, tmp_path)

    def test_gradients_are_of_the_names_that_they_have(self, tmp_path: Path) -> None:
        """By hand: d(3 a + 5 b + 7 c) by a, b and c."""

        class Sum(nn.Module):
            def __init__(self, order: str) -> None:
                super().__init__()
                for name in order:
                    setattr(self, name, nn.Parameter(torch.zeros(())))

            def forward(self, inputs: Tensor) -> Tensor:
                return (3 * self.a + 5 * self.b + 7 * self.c) * inputs

        def run(start: Any, **options: Any) -> Any:
            sgd = pl.optim.sgd(lr=1.0)
            loss = lambda outputs, targets: outputs.sum()  # noqa: E731
            data = [(torch.ones(1), torch.ones(1))] * 2
            return pl.fit(start, data, loss=loss, optimizer=sgd, max_duration="1ep", **options)

        pl.save(kept(run(Sum("abc")), 1), tmp_path / "a.safetensors")
        for event, state in run(Sum("cba"), load_path=tmp_path / "a.safetensors"):
            if event is Event.AFTER_TRAIN_BATCH:
                assert {name: float(grad) for name, grad in state.grads.items()} == {"a": 3.0, "b": 5.0, "c": 7.0}
                assert list(state.grads) == list("cba")
        assert {name: float(param) for name, param in state.params.items()} == {"a": -6.0, "b": -10.0, "c": -14.0}


class TestOtherDoors:
    """What takes a State or a file without training on."""

    def trained(self, order: str = "abcd", frozen: str = "", **options: Any) -> pl.State:
        return kept(fit(net(order, frozen), **options), 3)

    @pytest.mark.parametrize("of", ["a State", "weights"])
    def test_weights(self, tmp_path: Path, of: str) -> None:
        state = self.trained()
        path = saved_as(state, tmp_path / "a.safetensors", weights_only=of == "weights")
        loaded = pl.load(path, model=net("dbca"), weights_only=True)
        assert in_another_order(loaded) == []
        assert loaded.model.parameter_names[0].startswith("d")
        names = {*state.params, *state.buffers}
        assert all(
            torch.equal({**state.params, **state.buffers}[n], {**loaded.params, **loaded.buffers}[n]) for n in names
        )

    @pytest.mark.parametrize("door", ["load_path", "pl.load"])
    def test_trained_parameters_alone(self, tmp_path: Path, door: str) -> None:
        expected = by_name(pl.run(fit(net("abcd", "bd"))))
        state = self.trained(frozen="bd")
        path = saved_as(state, tmp_path / "a.safetensors", trained_only=True)
        model = net("dcab", "bd")
        resumed = fit(model, load_path=path) if door == "load_path" else fit(pl.load(path, model=model))
        for _, state in resumed:
            assert in_another_order(state) == []
        assert differing(by_name(state), expected) == []

    def test_evaluation_prediction_and_module(self, tmp_path: Path) -> None:
        state = self.trained()
        other = pl.load(saved_as(state, tmp_path / "a.safetensors"), model=net("cadb"))
        loss = nn.functional.mse_loss
        results = [pl.run(pl.evaluate(each, batches(), loss=loss)).metrics["eval"]["loss"] for each in (state, other)]
        assert torch.equal(*results)
        predicted = [
            [each.outputs for event, each in pl.predict(start, batches()) if event is Event.PREDICT_BATCH_END]
            for start in (state, other)
        ]
        assert all(map(torch.equal, *predicted))
        inputs = batches()[0][0]
        one, another = state.module(training=False), other.module(training=False)
        assert list(dict(another.named_parameters())) == list(other.params)
        assert torch.equal(one(inputs), another(inputs))

    @pytest.mark.parametrize("optimizer", ["adamw", "dampened", "from_torch"])
    def test_state_dicts_of_torch(self, tmp_path: Path, optimizer: str) -> None:
        rule = OPTIMIZERS[optimizer]()
        state = self.trained(optimizer=optimizer)
        other = state.replace(model=structure(net("dcab")).with_altered(state.model.altered))
        saved = pl.optim.to_state_dict(other, rule)
        assert saved["param_groups"][0]["param_names"] == [name for name, _ in other.module().named_parameters()]
        for start in (other, state):  # by their names, in either order
            loaded = pl.optim.load_state_dict(start.replace(opt_state=None), rule, saved)
            assert in_another_order(loaded) == []
            assert differing(by_name(loaded), by_name(state)) == []

    def test_a_recorded_run_is_gone_back_to(self, tmp_path: Path) -> None:
        recorder = pl.callbacks.FlightRecorder(tmp_path, keep="2ba", digest="1ba")
        options = {"algorithms": ("ema",)}
        expected = kept(fit(net("abcd"), callbacks=[recorder], **options), 4)
        stream = pl.rewind(
            tmp_path,
            "4ba",
            "batch_checkpoint",
            net("dbac"),
            batches(),
            loss=nn.functional.mse_loss,
            optimizer=OPTIMIZERS["adamw"](),
            algorithms=[ALGORITHMS["ema"]()],
            max_duration="1ep",
        )
        with closing(stream):
            _, state = next(stream)
        assert in_another_order(state) == []
        assert differing(by_name(state), by_name(expected)) == []


def on_ranks(kind: str, order: str, path: str, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """The leaves of the last State on a rank, and what was in another order on the way; saves after two batches."""
    wrong: list[str] = []
    algorithms = ("ema", "lookahead")
    for event, state in fit(net(order, "b"), algorithms=algorithms, parallel=kind, **options):
        wrong += in_another_order(state)
        saves = path and (kind == "shard" or torch.distributed.get_rank() == 0)
        if saves and event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 2:
            pl.save(state, path)
    fields = {name: optree.tree_map(full_tensor, getattr(state, name), namespace="pure_loop") for name in KNOWN}
    return by_name(state.replace(**fields)), wrong


@pytest.mark.slow
class TestRanks:
    """Checkpoints of several ranks, of which each holds shards or all."""

    @pytest.mark.parametrize(
        ("saved", "resumed"), [("shard", "shard"), ("replicate", "replicate"), ("shard", "replicate")]
    )
    @pytest.mark.parametrize("order", ["dcba", "cadb"])
    def test_checkpoints(self, tmp_path: Path, saved: str, resumed: str, order: str) -> None:
        path = str(tmp_path / ("a.sharded" if saved == "shard" else "a.safetensors"))
        expected = pool().run(lambda rank: on_ranks(saved, "abcd", path))
        found = pool().run(lambda rank: on_ranks(resumed, order, "", load_path=path))
        for (one, wrong), (other, _) in zip(found, expected, strict=True):
            assert wrong == []
            if saved == resumed:
                assert differing(one, other) == []
            else:  # sums over ranks are in another order
                for name, leaf in one.items():
                    torch.testing.assert_close(leaf, other[name])

    def test_a_sharded_checkpoint_on_one_rank(self, tmp_path: Path) -> None:
        path = str(tmp_path / "a.sharded")
        pool().run(lambda rank: on_ranks("shard", "abcd", path))
        one, other = (pl.load(path, model=net(order, "b")) for order in ("abcd", "bdca"))
        assert in_another_order(other) == []
        assert next(iter(other.params)).startswith("b")
        assert differing(by_name(one), by_name(other)) == []

    def test_a_door_that_leaves_the_order_is_seen(self, tmp_path: Path) -> None:
        path = str(tmp_path / "a.sharded")
        pool().run(lambda rank: on_ranks("shard", "abcd", path))

        def broken(rank: int) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("pure_loop.checkpoint.document.reordered", lambda value, *_: value)
                patch.setattr("pure_loop.state.reordered", lambda value, *_: value)
                return on_ranks("shard", "dcba", "", load_path=path)

        assert all(wrong for _, wrong in pool().run(broken))

    @pytest.mark.parametrize("kind", ["shard", "replicate"])
    def test_ranks_whose_models_have_other_orders_are_refused(self, kind: str) -> None:
        def program(rank: int) -> str:
            try:
                on_ranks(kind, ("abcd", "dcba")[rank], "")
            except pl.PureLoopError as error:
                return f"{type(error).__name__}: {error}"
            return ""

        for text in pool().run(program):
            assert "trained is ['d.scale'" in text


class TestReturnedInAnotherOrder:
    """Algorithms, clipping functions and optimizers of users' that return mappings in an order of their own."""

    @pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
    @pytest.mark.parametrize("cls", [FrozenDict, dict, OrderedDict])
    def test_algorithms(self, compiled: bool, cls: type) -> None:
        def mapping(value: Any) -> Any:
            return (
                cls((key, mapping(item)) for key, item in reversed(value.items())) if isinstance(value, dict) else value
            )

        @pl.algorithm(Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)
        def turn(state: pl.State) -> pl.State:
            fields = {"params": mapping(state.params), "buffers": mapping(state.buffers)}
            fields["opt_state"] = mapping(state.opt_state)
            if state.event is Event.AFTER_TRAIN_BATCH:
                fields["grads"] = mapping(state.grads)
            return state.replace(**fields)

        def run(*algorithms: Any) -> Iterator[pl.State]:
            options = {"optimizer": pl.optim.adamw(lr=0.05), "max_duration": "1ep", "compile": compiled}
            stream = pl.fit(
                net(registers=not compiled),
                batches(),
                loss=nn.functional.mse_loss,
                algorithms=algorithms,
                watch={Event.BATCH_END},
                **options,
            )
            return (state for _, state in stream)

        with interpreted():
            for state, expected in zip(run(turn), run(), strict=True):
                assert in_another_order(state) == []
                assert differing(by_name(state), by_name(expected)) == []

    @pytest.mark.parametrize("in_place", [False, True])
    def test_optimizers(self, in_place: bool) -> None:
        """One that writes to its parameters, and one that returns others."""

        def optimizer(order: Callable[[list[str]], list[str]], in_place: bool = False) -> Optimizer:
            def update(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
                new = {name: params[name] - 0.1 * grads[name] for name in order(list(params))}
                return FrozenDict(new), opt_state

            def overwrite(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
                for name in params:
                    params[name].sub_(0.1 * grads[name])
                return FrozenDict((name, params[name]) for name in order(list(params))), opt_state

            return Optimizer(
                name="mine",
                init=lambda params: FrozenDict(),
                update=update,
                overwrite=overwrite if in_place else None,
                lr=lambda timestamp: 0.1,
            )

        def run(optimizer: Optimizer) -> Any:
            return pl.fit(net(), batches(), loss=nn.functional.mse_loss, optimizer=optimizer, max_duration="1ep")

        found, plain = run(optimizer(lambda names: names[::-1], in_place)), run(optimizer(list))
        for (_, state), (_, expected) in zip(found, plain, strict=True):
            assert in_another_order(state) == []
            assert differing(by_name(state), by_name(expected)) == []

    def test_clipping_functions(self) -> None:
        def halve(grads: Any, params: Any) -> Any:
            return {name: None if grads[name] is None else grads[name] / 2 for name in reversed(list(grads))}

        for _, state in fit(net(), clip_grad=halve):
            assert in_another_order(state) == []

    def test_names_that_are_wrong_are_still_refused(self) -> None:
        state = kept(fit(net(), "sgd"), 2)
        buffers = dict(state.opt_state["momentum_buffer"])
        buffers["e"] = buffers.pop("a.scale")
        with pytest.raises(ResumeError, match="was made by sgd for another model"):
            fit(state.replace(opt_state=FrozenDict(momentum_buffer=FrozenDict(buffers))), "sgd")
        with pytest.raises(ResumeError, match="was made by another optimizer than adamw"):
            fit(state, "adamw")


class TestTrees:
    """The order of trees by names."""

    @examples(50, 1000)
    @given(st.permutations("abcd"), st.permutations("abcd"), st.sets(st.sampled_from("abcd")))
    def test_there_and_back(self, first: list[str], second: list[str], some: set[str]) -> None:
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
        back = reordered(turned, before, wanted)
        assert repr(back) == repr(tree)
        assert reordered(tree, before) is tree
        assert repr(aligned(turned, tree)) == repr(tree)

    def test_an_order_of_its_own_stays(self) -> None:
        """Of an algorithm that keeps, say, the names that had a gradient last, the latest last."""
        latest = {"b": 1, "a": 2}
        assert reordered({"latest": latest}, places("ba"), places("ab"))["latest"] is latest
        assert list(reordered({"a": 1, "b": 2}, places("ba"), places("ab"))) == ["b", "a"]
