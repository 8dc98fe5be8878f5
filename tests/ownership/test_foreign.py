"""Memory whose references can't be counted, marks on tensors, and a stream that no Python code reads."""

from __future__ import annotations

import _thread
import gc
import itertools
import mmap
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions

import pure_loop as pl
from pure_loop import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.stages import references
from pure_loop.stages.references import can_count, was_sent
from tests.support.donating import Count, Kept, assert_same, fit, plain

pytestmark = pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter")


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def of_numpy(arrays: dict[str, Any]) -> FrozenDict[str, Tensor]:
    return FrozenDict({name: torch.from_numpy(array) for name, array in arrays.items()})


@pytest.mark.parametrize("where", ["State", "a file", "INIT", "opt_state"])
def test_arrays_that_training_starts_from_stay_what_they_are(where: str, count: Count, tmp_path: Path) -> None:
    for donate in ("auto", True):
        count.copied = 0
        state = pl.State.create(plain())
        before = {name: tensor.numpy().copy() for name, tensor in state.params.items()}
        arrays = {name: array.copy() for name, array in before.items()}
        if where == "a file":
            for name, array in before.items():
                numpy.save(tmp_path / f"{name}.npy", array)
                arrays[name] = numpy.load(tmp_path / f"{name}.npy", mmap_mode="r+")

        @pl.algorithm(Event.INIT, Event.BEFORE_LOAD)
        def put_in(state: pl.State, arrays: Any = arrays) -> pl.State:
            if where == "INIT" and state.event is Event.INIT:
                return state.replace(params=of_numpy(arrays))
            if where == "opt_state" and state.event is Event.BEFORE_LOAD:
                return state.replace(opt_state=FrozenDict({**state.opt_state, "momentum_buffer": of_numpy(arrays)}))
            return state

        start: Any = state.replace(params=of_numpy(arrays)) if where in ("State", "a file") else plain()
        pl.run(fit(start, donate=donate, optimizer=pl.optim.sgd(lr=0.1, momentum=0.9), algorithms=[put_in]))
        assert all(numpy.array_equal(array, before[name]) for name, array in arrays.items())
        assert count.copied == 1


def test_memory_that_processes_share_and_a_tensor_handed_to_another_one_stay() -> None:
    """A queue of multiprocessing hands over a file, and keeps no reference here."""
    state = pl.State.create(plain())
    shared = FrozenDict({name: tensor.clone().share_memory_() for name, tensor in state.params.items()})
    handles = {name: tensor.untyped_storage()._share_filename_cpu_() for name, tensor in shared.items()}
    pl.run(fit(state.replace(params=shared)))
    for name, handle in handles.items():
        elsewhere = torch.empty(0).set_(torch.UntypedStorage._new_shared_filename_cpu(*handle))  # as a process maps it
        assert torch.equal(elsewhere, state.params[name].flatten())
    kept = Kept()
    for event, state in fit():
        if event is Event.BATCH_END and state.timestamp.batch < 5:
            mapping: Any = state.params if state.timestamp.batch < 3 else state.opt_state["exp_avg"]
            file, size = mapping["0.weight"].untyped_storage()._share_fd_cpu_()
            del mapping
            kept.keep("what the other process sees", torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8))
    kept.check()


def test_a_storage_on_torchs_list_was_sent_and_the_others_cost_no_copies(
    count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of a loader's workers are on it, too; what a CPU has moves when it is handed over."""
    one, other = torch.ones(3).untyped_storage(), torch.ones(3).untyped_storage()
    monkeypatch.setattr(references, "shared_cache", {"one": reductions.StorageWeakRef(one)})
    pl.run(fit())
    assert count.copied == 0
    monkeypatch.setattr(references, "storage_goes_back", None)
    assert was_sent(one._cdata)
    assert not was_sent(other._cdata)


class Marking(nn.Module):
    """A forward that hangs a hook on its weights, and counts its calls on one, in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = plain(), list[int]()

    def forward(self, x: Tensor) -> Any:
        for weight in self.inner.parameters():
            if weight.requires_grad:
                weight.register_hook(lambda gradient: gradient * 0.5)
        weight.calls = getattr(weight, "calls", 0) + 1
        self.calls.append(weight.calls)
        return self.inner(x)


def test_marks_on_weights_are_those_of_one_forward() -> None:
    """Hooks, attributes, and gradients that an algorithm leaves there."""
    norms: dict[Any, list[float]] = {}

    def looks(state: pl.State) -> pl.State:
        state.loss.backward(retain_graph=True)
        norms.setdefault(donate, []).append(float(state.params["inner.0.weight"].grad.norm()))
        return state

    looking = pl.algorithm(Event.AFTER_LOSS, name="looks")(looks)
    for donate, size in itertools.product(("auto", True, False), (None, 2)):
        model, options = Marking(), {"microbatch_size": size, "strict": False}
        halved = pl.run(fit(model, donate=donate, optimizer=pl.optim.sgd(lr=0.1), **options))
        plainly = pl.run(fit(optimizer=pl.optim.sgd(lr=0.05), **options))
        assert_same(dict(halved.params), {f"inner.{name}": each for name, each in plainly.params.items()})
        assert set(model.calls) == {1}
        pl.run(fit(Marking(), donate=donate, algorithms=[looking], **options))
    assert norms["auto"] == norms[True] == norms[False]


def test_a_stream_that_no_python_code_reads_is_read() -> None:
    """`next` may be called with no frame of Python's below: by a thread that C started, or at exit."""
    found: list[Any] = []
    done = threading.Event()
    callbacks = [lambda event, state: done.set() if event is Event.FIT_END else None]
    _thread.start_new_thread(list.extend, (found, fit(callbacks=callbacks)))
    assert done.wait(60)
    assert found[0][0] is Event.INIT
    assert len(found) >= len(list(fit())) - 1  # the list may get the last one a moment later


def test_inside_of_somebodys_autocast_no_step_stays_alive() -> None:
    made: list[int] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for event, _state in fit(max_duration="4ep", precision="amp_bf16", donate=False):
            if event is Event.BATCH_END:
                gc.collect()
                made.append(sum(type(each) is Tensor for each in gc.get_objects()))
    assert max(made[10:]) <= max(made[:10])
