"""What a CUDA device has still to do is not overtaken, nor what others read there; and what it computes is verified.

Skipped where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import background as writing
from pure_loop.compile import interpreted
from pure_loop.stages import engine, references
from pure_loop.stages.ownership import Ownership
from pure_loop.stages.references import are_unaliased, can_count
from tests.support import problem
from tests.support.donating import Count
from tests.support.faults import bits_of
from tests.support.problem import cross_entropy, noisy, points

pytestmark = pytest.mark.gpu

DATA = points(5, size=8)
# A twentieth of a second, in which the host continues.
LONG = 100_000_000


def fit(data: Any, **settings: Any) -> Any:
    options = {"optimizer": pl.optim.adamw(lr=0.1), "max_duration": "1ep", "strict": None, **settings}
    return problem.fit(noisy(), data, device="cuda", **options)


class Refilled:
    """Pinned memory for one batch, which is filled again for each."""

    def __init__(self) -> None:
        self.memory: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.memory is None:
            self.memory = DATA[0][0].pin_memory(), DATA[0][1].pin_memory()
        for tensor, numbers in zip(self.memory, DATA[index], strict=True):
            tensor.copy_(numbers)
        return self.memory

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[index] for index in range(len(self)))


class RefilledDataset(Refilled, Dataset[Any]): ...


class RefilledStream(Refilled, IterableDataset[Any]):
    __iter__ = Refilled.batches


REFILLED: dict[str, Callable[[], Any]] = {
    "a generator": lambda: Refilled().batches(),
    "a sequence": Refilled,
    "a DataLoader": lambda: DataLoader(RefilledDataset(), batch_size=None),
    "a DataLoader that pins": lambda: DataLoader(RefilledDataset(), batch_size=None, pin_memory=True),
    "a DataLoader of a stream that pins": lambda: DataLoader(RefilledStream(), batch_size=None, pin_memory=True),
}


def assert_data(found: list[Any]) -> None:
    torch.cuda.synchronize()
    assert len(found) == len(DATA)
    for batch, wanted in zip(found, DATA, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(batch, wanted, strict=True))


@pytest.mark.parametrize("kind", REFILLED)
def test_memory_that_is_filled_again_is_read_before(kind: str) -> None:
    """In training, in evaluation and in prediction."""
    state = pl.State.create(noisy(), device="cuda")
    for stream, at in (
        (fit(REFILLED[kind]()), Event.BATCH_END),
        (pl.predict(state, REFILLED[kind]()), Event.PREDICT_BATCH_END),
        (pl.evaluate(state, REFILLED[kind](), loss=cross_entropy), Event.EVAL_BATCH_END),
    ):
        found = []
        for event, now in stream:
            if event is at:
                found.append(now.batch)
                torch.cuda._sleep(LONG)  # what the next copy stands behind
        assert_data(found)


def stacked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)


TABLE = TensorDataset(*map(torch.cat, zip(*DATA, strict=True)))
APART: dict[str, Callable[[], Any]] = {
    "a list": lambda: [tuple(part.pin_memory() for part in batch) for batch in DATA],
    "a table": lambda: DataLoader(TABLE, 8, pin_memory=True),
    "workers": lambda: DataLoader(TABLE, 8, pin_memory=True, collate_fn=stacked, num_workers=1),
}


@pytest.mark.parametrize("kind", APART)
def test_memory_that_stays_is_not_waited_for(kind: str) -> None:
    found = []
    try:
        for event, state in fit(APART[kind](), strict=False):  # else the first steps are compared by value
            if event is Event.BATCH_END:
                found.append(state.batch)
                # The first step may set things up, and the last one is followed by a look at the losses.
                torch.cuda.set_sync_debug_mode("error" if 1 <= state.timestamp.batch <= 3 else "default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_data(found)


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_is_read_on_the_current_stream(background: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """Kernels on a stream of one's own are waited for by no other stream, and the saver's thread has another."""
    read_on, write = [], writing.write_state

    def noting(state: pl.State, *given: Any, **options: Any) -> Any:
        read_on.append(torch.cuda.current_stream(state.device))
        return write(state, *given, **options)

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def late(state: pl.State) -> pl.State:
        torch.cuda._sleep(LONG)  # the update stands behind it
        return state

    monkeypatch.setattr(writing, "write_state", noting)
    saver = CheckpointSaver(tmp_path, interval="1ba", filename="{batch}.safetensors", background=background)
    params = {}
    stream = torch.cuda.Stream()
    before = torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for event, state in fit(DATA, callbacks=[saver], algorithms=[late], donate=False):
            if event is Event.BATCH_END:
                params[state.timestamp.batch] = state.params
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == before
    assert read_on == [stream] * len(read_on)
    assert len(read_on) >= len(DATA)
    for batch, wanted in params.items():
        found = pl.load(tmp_path / f"{batch}.safetensors", model=noisy()).params
        assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in wanted.items())


needs_counts = pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter")
SENT: dict[str, Callable[[pl.State], Tensor]] = {
    "parameter": lambda state: state.params["0.weight"],
    "view": lambda state: state.params["0.weight"][1:],
    "memory": lambda state: state.opt_state["exp_avg"]["0.weight"],
}


def hand_over(tensor: Tensor) -> None:
    """As a queue to another process does, and then something else from the same allocation."""
    reduce_tensor(tensor)
    reduce_tensor(torch.ones(3, device="cuda"))


@needs_counts
@pytest.mark.parametrize(("what", "donate"), [("parameter", "auto"), ("view", True), ("memory", "auto")])
def test_what_another_process_was_given_is_not_written_to(what: str, donate: Any, monkeypatch: Any) -> None:
    """And where torch doesn't say what was, the last one that was handed over is known."""
    count = Count(monkeypatch)
    copied = []
    for event, state in fit(DATA, donate=donate):
        if event is Event.BATCH_END:
            copied.append(count.copied)
            if state.timestamp.batch == 2:
                hand_over(SENT[what](state))
    # Once, and then the memory is the loop's own again.
    assert [after - copied[1] for after in copied[1:]] == [0, 1, 1, 1]
    monkeypatch.setattr(references, "storage_goes_back", None)
    for event, state in fit(DATA):
        if event is Event.BATCH_END and state.timestamp.batch == 2:
            before = count.copied
            reduce_tensor(SENT[what](state))
    assert count.copied == before + 1


@needs_counts
def test_compiled_steps_do_not_write_to_it_and_nothing_is_added_to_such_gradients(monkeypatch: Any) -> None:
    copied, own = [], Ownership.writable_or_copies

    def noting(this: Any, tensors: list[Tensor], alone: Any) -> list[Tensor]:
        given = own(this, tensors, alone)
        copied.append(given is not tensors)
        return given

    monkeypatch.setattr(Ownership, "writable_or_copies", noting)
    with interpreted():
        for _, state in fit(DATA, compile=True, watch={Event.BATCH_END}):
            if state.timestamp.batch == 2:
                hand_over(state.params["0.weight"])
    assert copied == [True, False, True, False, False]
    gradients = [torch.ones(2, device="cuda"), torch.ones(3, device="cuda")]
    assert are_unaliased(gradients)
    hand_over(gradients[0])
    assert not are_unaliased(gradients)
    assert are_unaliased([torch.ones(3, device="cuda")])


# ``fit(verify=)``.

WAYS: list[dict[str, Any]] = [
    {"microbatch_size": 2},
    {"watch": {Event.BATCH_END}, "strict": False},
    {"precision": "amp_bf16"},
    {"precision": "amp_fp16", "nonfinite": "skip"},
]


@pytest.mark.parametrize("large", [False, True])
def test_a_verified_run_is_a_run(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    if large:
        monkeypatch.setattr(engine, "LARGE", 0)
    for options in WAYS:
        ends = [problem.run("convnet", device="cuda", verify=verify, **options) for verify in ("2ba", None)]
        assert bits_of(ends[0]) == bits_of(ends[1])
