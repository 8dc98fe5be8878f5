"""Steps that are recorded by their addresses and replayed, as CUDA graphs are, on a double that runs on a CPU.

What it leaves to a GPU (tests/laws/test_gpu.py) is CUDA's own recording.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import replay
from pure_loop.stages.references import can_count
from tests.support import problem
from tests.support.compiling import BATCHES, EPOCHS, Kept
from tests.support.streams import assert_same
from tests.support.tiers import examples

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
]

DATA = problem.points(5, 6)
STEPS = 15


class Double:
    """CUDA graphs for machines without a GPU: records calls by addresses, and counts them and their replays."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, call: Any, tensors: list[Tensor]) -> tuple[Callable[[], None], Sequence[Any]]:
        there = list(map(at_its_address, tensors))
        before = [tensor.clone() for tensor in there]
        outputs = call(there.copy())
        for tensor, numbers in zip(there, before, strict=True):
            tensor.copy_(numbers)  # what is recorded has not run
        for each in outputs:
            each.zero_()
        self.recorded += 1

        def replayed() -> None:
            self.replayed += 1
            for output, found in zip(outputs, call(there.copy()), strict=True):
                output.copy_(found)

        return replayed, outputs


def at_its_address(tensor: Tensor) -> Tensor:
    """The memory of a tensor, to which nothing refers by this."""
    assert tensor.is_cpu, "nothing records what is on several devices"
    if not tensor.numel():
        return tensor.clone()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * ((last + 1) * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def refusing(call: Any, tensors: list[Tensor]) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


def fit(data: Any = DATA, *, by: Any = None, **options: Any) -> Any:
    """A run whose steps are recorded ``by`` a double, or launched."""
    settings: dict[str, Any] = {
        "optimizer": pl.optim.sgd(lr=pl.schedules.cosine("3ep", peak=0.1), momentum=0.9),
        "watch": BATCHES,
        "compile": True,
        "strict": None,
        "max_duration": "3ep",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.Recorders, "of", lambda self, device: None if device is None else by)
        yield from problem.fit(problem.noisy(), data, **settings | options)


def run(data: Any = DATA, **options: Any) -> pl.State:
    state: Any = None
    for _, state in fit(data, **options):  # noqa: B007
        pass
    return state


# Settings, and how often a step is recorded: who is shown the State of an epoch's end may keep it, so that the next
# step has other memory.
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "several steps a call, not observed": ({"watch": EPOCHS, "steps_per_call": 3}, 3),
    "microbatches": ({"microbatch_size": 2, "clip_grad": 1.0}, 1),
    "half precision": ({"precision": "amp_fp16"}, 1),
    "copying": ({"donate": False}, 0),
    "each shape": ({"data": [*DATA[:4], (DATA[4][0][:3], DATA[4][1][:3])] * 3}, 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_replayed_steps_are_those_that_are_launched_and_recorded_once(name: str) -> None:
    (settings, times), double = SETTINGS[name], Double()
    assert_same(run(**settings, by=double), run(**settings), "replayed and launched")
    assert double.recorded == times
    steps = STEPS * (3 if "data" in settings else 1)
    assert double.replayed == (0 if times == 0 else steps - times * replay.WARM_UP)


@examples(3, 200)
@given(when=st.sets(st.integers(0, STEPS - 1)), watch=st.sampled_from([BATCHES, {Event.AFTER_TRAIN_BATCH, *BATCHES}]))
def test_what_was_kept_never_changes(when: set[int], watch: Any) -> None:
    kept = Kept()
    state: Any = None
    for event, state in fit(watch=watch, by=Double()):
        if state.timestamp.batch in when:
            kept.keep(f"the State of {event.name}", state)
        elif event is Event.BATCH_END:
            kept.keep("the loss", state.loss)
    kept.check()
    assert_same(state, run(watch=watch), "with States kept and without")


@pl.algorithm(Event.AFTER_TRAIN_BATCH, init=lambda _: torch.zeros((), device="meta"))
def elsewhere(state: pl.State) -> pl.State:
    return state.remember("elsewhere", state.algorithm_state["elsewhere"] + 1)


WIDE = torch.randn(6, 8, generator=problem.noise())
OTHER = "can't be a CUDA graph: a tensor of the batch"
LAUNCHED: dict[str, tuple[dict[str, Any], str]] = {
    "gaps": ({"data": [(WIDE[:, ::2], DATA[0][1])] * 4}, OTHER),
    "two devices": ({"algorithms": [elsewhere]}, ""),
    "a refusal": ({"by": refusing}, "operation not permitted"),
}


def test_what_can_not_be_recorded_is_launched_and_the_log_says_so(caplog: Any) -> None:
    for name, (settings, says) in LAUNCHED.items():
        caplog.clear()
        double = Double()
        state = run(**{"by": double, "max_duration": "1ep"} | settings)
        assert_same(state.params, run(**settings | {"by": None, "max_duration": "1ep"}).params, name)
        assert not double.recorded
        assert says in caplog.text
        assert caplog.text.count("can't be a CUDA graph") == bool(says)


def test_each_memory_has_a_recording_and_after_a_refusal_none_is_held(caplog: Any) -> None:
    """Each of the States that are resumed from has memory of its own; a few are recorded."""
    double, refuses = Double(), False
    call = replay.Replaying(lambda t: [t[0] + t[1]], [0], lambda *given: (refusing if refuses else double)(*given))
    held = [torch.full((2,), float(i)) for i in range(2 * replay.MOST)]
    for tensor in held * 2 + [torch.full((2,), -1.0)]:
        refuses = bool(tensor[0] == -1)
        for number in range(replay.WARM_UP + 3):
            (found,) = call([tensor, torch.full((2,), float(number))])
            assert found.tolist() == [tensor[0] + number] * 2
        assert len(call._recordings) <= replay.MOST
    assert double.recorded == 2 * len(held)
    assert not call._recordings
    # One that gave a part of what lasts would refer to it, which who counts references would find.
    call = replay.Replaying(lambda tensors: [tensors[0][:1]], [0], double)
    for _ in range(replay.WARM_UP + 3):
        assert call([held[0]])[0].data_ptr() == held[0].data_ptr()
    assert caplog.text.count("a part of what it is called with") == 1
    assert not call._recordings


def test_recordings_are_gone_when_the_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold memory of the device, which no collector of cycles is asked for; and no graph of a batch."""
    made: list[Any] = []
    real = replay._Recording.__init__

    def noted(this: Any, play: Any, inputs: list[Tensor], outputs: Any) -> None:
        # Copied into a recording with autograd on, a batch would be held by it for ever.
        assert not any(tensor.requires_grad for tensor in inputs)
        made.append(weakref.ref(this))
        real(this, play, inputs, outputs)

    monkeypatch.setattr(replay._Recording, "__init__", noted)
    data = [(x.clone().requires_grad_(), y) for x, y in DATA]
    data.append((data[0][0] * float("nan"), data[0][1]))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(pl.errors.NonFiniteError):
            [event for event, _ in fit(data, by=Double())]
        assert made
        assert [each() for each in made] == [None] * len(made)
    finally:
        gc.enable()


def _shown(self: Any, batch: list[Tensor]) -> Sequence[Any]:
    """A wrong one: what it gives is where the next replay writes."""
    torch._foreach_copy_(self._inputs, batch)
    self._replay()
    return self._outputs  # type: ignore[no-any-return]


def _stale(self: Any, batch: list[Tensor]) -> Sequence[Any]:
    """A wrong one: it continues with the batch that was recorded."""
    self._replay()
    return [each.clone() for each in self._outputs]


def test_a_wrong_replay_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay._Recording, "replay", _stale)
    with pytest.raises(AssertionError):
        assert_same(run(by=Double()), run(), "replayed and launched")
    monkeypatch.setattr(replay._Recording, "replay", _shown)
    kept = Kept()
    for _, state in fit(by=Double()):
        kept.keep("the loss", state.loss)
    with pytest.raises(AssertionError, match="the loss changed"):
        kept.check()
