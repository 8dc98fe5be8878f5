"""Ownership: memory whose references can't be counted, marks on tensors, and a stream that no Python code reads."""

from __future__ import annotations

import _thread
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.stages import references
from pure_loop.stages.references import can_count, was_sent
from tests.support.donating import DATA, Count, assert_same, fit, plain

pytestmark = pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter")


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def of_numpy(arrays: dict[str, Any]) -> FrozenDict[str, Tensor]:
    return FrozenDict({name: torch.from_numpy(array) for name, array in arrays.items()})


def arrays_of(state: pl.State) -> dict[str, Any]:
    return {name: tensor.numpy().copy() for name, tensor in state.params.items()}


@pytest.mark.parametrize("donate", ["auto", True])
@pytest.mark.parametrize("where", ["State", "INIT", "opt_state"])
def test_arrays_that_training_starts_from_stay_what_they_are(donate: Any, where: str, count: Count) -> None:
    arrays = arrays_of(pl.State.create(plain()))
    before = {name: array.copy() for name, array in arrays.items()}

    @pl.algorithm(Event.INIT)
    def at_init(state: pl.State) -> pl.State:
        return state.replace(params=of_numpy(arrays)) if where == "INIT" else state

    @pl.algorithm(Event.BEFORE_LOAD)
    def before_load(state: pl.State) -> pl.State:
        return state.replace(opt_state=FrozenDict({**state.opt_state, "momentum_buffer": of_numpy(arrays)}))

    start: Any = plain()
    if where == "State":
        start = pl.State.create(start).replace(params=of_numpy(arrays))
    options: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9)}
    options["algorithms"] = [before_load if where == "opt_state" else at_init]
    for _event, _state in fit(start, donate=donate, **options):
        pass
    assert all(numpy.array_equal(array, before[name]) for name, array in arrays.items())
    assert count.copied == 1


def test_a_file_that_is_mapped_to_be_read_is_only_read(tmp_path: Path) -> None:
    arrays = arrays_of(pl.State.create(plain()))
    for name, array in arrays.items():
        numpy.save(tmp_path / f"{name}.npy", array)
    mapped = {name: numpy.load(tmp_path / f"{name}.npy", mmap_mode="r+") for name in arrays}
    for _event, _state in fit(pl.State.create(plain()).replace(params=of_numpy(mapped))):
        pass
    assert all(numpy.array_equal(numpy.load(tmp_path / f"{name}.npy"), array) for name, array in arrays.items())


def test_memory_that_processes_share_stays_what_it_is() -> None:
    state = pl.State.create(plain())
    shared = FrozenDict({name: tensor.clone().share_memory_() for name, tensor in state.params.items()})
    handles = {name: tensor.untyped_storage()._share_filename_cpu_() for name, tensor in shared.items()}
    for _event, _state in fit(state.replace(params=shared)):
        pass
    for name, handle in handles.items():
        elsewhere = torch.empty(0).set_(torch.UntypedStorage._new_shared_filename_cpu(*handle))  # as a process maps it
        assert torch.equal(elsewhere, state.params[name].flatten())


def test_what_processes_hand_each_other_costs_no_copies(count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a loader's workers are on torch's list, too; what a CPU has moves when it is handed over."""
    other = torch.ones(3)
    monkeypatch.setattr(references, "shared_cache", {"other": reductions.StorageWeakRef(other.untyped_storage())})
    for _event, _state in fit():
        pass
    assert count.copied == 0


def test_a_storage_on_torchs_list_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "storage_goes_back", None)
    one, other = torch.ones(3).untyped_storage(), torch.ones(3).untyped_storage()
    monkeypatch.setattr(references, "shared_cache", {"one": reductions.StorageWeakRef(one)})
    assert was_sent(one._cdata)
    assert not was_sent(other._cdata)


MEMORIES: dict[str, Callable[[FrozenDict[str, Tensor]], Any]] = {
    "flat": lambda params: FrozenDict({name: torch.zeros_like(tensor) for name, tensor in params.items()}),
    "a list": lambda params: FrozenDict(all=list(map(torch.zeros_like, params.values()))),
    "a number of steps": lambda params: FrozenDict(
        step=torch.zeros(()), m=FrozenDict({name: torch.zeros_like(tensor) for name, tensor in params.items()})
    ),
    "mixed": lambda params: FrozenDict(
        m=FrozenDict(count=0, **{name.replace(".", "_"): torch.zeros_like(each) for name, each in params.items()})
    ),
}


def tensors_in(memory: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(memory) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_of_an_optimizer_of_ones_own_stays_what_it_was_when_it_was_kept(name: str) -> None:
    def in_place(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        for tensor in tensors_in(memory):
            tensor.add_(1)
        for key, tensor in params.items():
            tensor.sub_(grads[key], alpha=0.1)
        return params, memory

    def update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        copied = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, memory)
        return in_place(grads, copied, FrozenDict({key: each.clone() for key, each in params.items()}), timestamp)

    own = pl.optim.Optimizer(name="own", init=MEMORIES[name], update=update, lr=lambda t: 0.1, overwrite=in_place)
    kept: list[Tensor] = []
    for event, state in fit(optimizer=own):
        if event is Event.BATCH_END:
            kept.append(tensors_in(state.opt_state)[0])
    assert [float(each.flatten()[0]) for each in kept] == [float(i + 1) for i in range(len(kept))]
    assert len(kept) == 15


class Halving(nn.Module):
    """A forward that hangs a hook on its weights, in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain()

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.inner.parameters():
            if weight.requires_grad:
                weight.register_hook(lambda gradient: gradient * 0.5)
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("donate", ["auto", True, False])
@pytest.mark.parametrize("size", [None, 3, 2])
def test_hooks_on_weights_are_those_of_one_forward(donate: Any, size: int | None) -> None:
    halved = pl.run(fit(Halving(), donate=donate, microbatch_size=size, optimizer=pl.optim.sgd(lr=0.1)))
    plainly = pl.run(fit(optimizer=pl.optim.sgd(lr=0.05), microbatch_size=size))
    assert_same(dict(halved.params), {f"inner.{name}": each for name, each in plainly.params.items()})


@pytest.mark.parametrize("donate", ["auto", False])
def test_attributes_on_weights_are_those_of_one_forward(donate: Any) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            weight: Any = self.layer.weight
            weight.calls = getattr(weight, "calls", 0) + 1
            calls.append(weight.calls)
            out: Tensor = self.layer(x)
            return out

    calls: list[int] = []
    pl.run(fit(Counting(), donate=donate, strict=False))
    assert set(calls) == {1}


def test_gradients_that_an_algorithm_leaves_on_leaves_are_those_of_one_batch() -> None:
    def norms(donate: Any) -> list[float]:
        found = []

        @pl.algorithm(Event.AFTER_LOSS)
        def looks(state: pl.State) -> pl.State:
            state.loss.backward(retain_graph=True)
            found.append(float(state.params["0.weight"].grad.norm()))
            return state

        for _event, _state in fit(algorithms=[looks], donate=donate):
            pass
        return found

    assert norms("auto") == norms(False)


def test_a_stream_that_no_python_code_reads_is_read() -> None:
    """`next` may be called with no frame of Python's below: by a thread that C started, or at exit."""
    found: list[Any] = []
    done = threading.Event()

    def telling(event: Event, state: pl.State) -> None:
        if event is Event.FIT_END:
            done.set()

    _thread.start_new_thread(list.extend, (found, fit(callbacks=[telling])))
    assert done.wait(60)
    assert found[0][0] is Event.INIT
    assert len(found) >= len(list(fit())) - 1  # the list may get the last one a moment later


def test_inside_of_somebodys_autocast_no_step_stays_alive() -> None:
    made: list[int] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for event, _state in fit(max_duration="6ep", precision="amp_bf16", donate=False):
            if event is Event.BATCH_END:
                gc.collect()
                made.append(sum(type(each) is Tensor for each in gc.get_objects()))
    assert max(made[10:]) <= max(made[:10])


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}, {"donate": False}, {"strict": True}], ids=str)
@pytest.mark.parametrize(
    "optimizer", [pl.optim.adamw(lr=0.1), pl.optim.sgd(lr=0.1, momentum=0.9)], ids=["adamw", "sgd"]
)
@pytest.mark.parametrize("evolved", [False, True], ids=["replaced", "made"])
def test_parameters_are_known_by_their_names(options: Any, optimizer: Any, evolved: bool) -> None:
    """As a file of safetensors has them: sorted."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.register_buffer("b", torch.ones(4))
            self.register_buffer("a", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.a += self.b
            out: Tensor = self.down(torch.tanh(self.up(x)) + self.a)
            return out

    def sorted_names(state: pl.State) -> pl.State:
        params, buffers = (FrozenDict(sorted(each.items())) for each in (state.params, state.buffers))
        if not evolved:
            return state.replace(params=params, buffers=buffers)
        import attrs

        return attrs.evolve(state, params=params, buffers=buffers)

    settings = {"optimizer": optimizer, "loss": functional.cross_entropy, **options}
    plainly = pl.run(fit(Pair(), **settings))
    assert_same(pl.run(fit(sorted_names(pl.State.create(Pair())), **settings)).params, plainly.params)
    half = pl.run(fit(Pair(), **settings | {"max_duration": "1ep"}))
    assert_same(pl.run(fit(sorted_names(half), **settings)).params, plainly.params)
    measured = [pl.run(pl.evaluate(each, DATA, loss=functional.cross_entropy)) for each in (half, sorted_names(half))]
    assert measured[0].metrics == measured[1].metrics


def test_stages_know_parameters_by_their_names() -> None:
    task = pl.Task(
        forward=lambda model, batch: model(batch[0]), loss=lambda out, batch: functional.cross_entropy(out, batch[1])
    )
    stages = pl.Stages(task=task)

    def gradients(state: pl.State) -> dict[str, Tensor]:
        state = state.replace(batch=DATA[0], microbatch=DATA[0])
        return dict(stages.backward(stages.loss(stages.forward(state))).grads or {})

    state = pl.State.create(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)))
    turned = state.replace(params=dict(reversed(state.params.items())))
    assert_same(gradients(turned), gradients(state))
