"""Steps that are recorded by their addresses and replayed, as CUDA graphs are, on a double that runs on a CPU.

What it leaves to a GPU (tests/laws/test_gpu.py) is CUDA's own recording.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import replay, tracing
from pure_loop.compile.numbers import Number
from pure_loop.stages.references import can_count
from tests.support import problem
from tests.support.compiling import BATCHES, EPOCHS
from tests.support.donating import DATA, Kept
from tests.support.problem import cross_entropy
from tests.support.replaying import Double
from tests.support.streams import assert_same
from tests.support.tiers import examples

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
]

STEPS = 20


def record_by(patch: pytest.MonkeyPatch, of: Callable[[Any], Any]) -> None:
    patch.setattr(replay.Recorders, "of", lambda self, device: of(device))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    made = Double()
    record_by(monkeypatch, made.of)
    return made


def fit(data: Any = DATA, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "optimizer": pl.optim.adamw(lr=pl.schedules.cosine("4ep", peak=0.1)),
        "algorithms": [pl.algorithms.ema(half_life="5ba")],
        "watch": BATCHES,
        "compile": True,
        "loss": cross_entropy,
    }
    return pl.fit(problem.noisy(), data, max_duration="4ep", **settings | options)


def unrecorded(run: Callable[..., Any] = lambda **options: pl.run(fit(**options)), **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        record_by(patch, lambda device: None)
        return run(**options)


# Settings, and how often a step is recorded: who is shown the State of an epoch's end may keep it, so that the next
# step has other memory.
SETTINGS: dict[str, tuple[dict[str, Any], int | None]] = {
    "plain": ({}, 1),
    "several steps a call, not observed": ({"watch": EPOCHS, "steps_per_call": 3}, 4),
    "microbatches": ({"microbatch_size": 2, "clip_grad": 1.0}, 1),
    "gradients seen": ({"watch": {Event.AFTER_TRAIN_BATCH, *BATCHES}}, None),
    "microbatches seen": ({"watch": {Event.AFTER_BACKWARD, *BATCHES}, "microbatch_size": 3}, None),
    "all seen": ({"watch": None}, None),
    "half precision": ({"precision": "amp_fp16"}, 1),
    "copying": ({"donate": False}, 0),
    "each shape": ({"data": [*DATA[:4], (DATA[4][0][:3], DATA[4][1][:3])] * 3}, 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_replayed_steps_are_those_that_are_launched_and_recorded_once(double: Double, name: str) -> None:
    settings, times = SETTINGS[name]
    assert_same(pl.run(fit(**settings)), unrecorded(**settings), "replayed and launched")
    if times is not None:
        assert double.recorded == times
        steps = STEPS * (3 if "data" in settings else 1)
        assert double.replayed == (0 if times == 0 else steps - times * replay.WARM_UP)


def test_nothing_is_copied_but_the_batch_and_what_is_drawn(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, real = set(), replay._Recording.replay

    def noted(self: Any, batch: list[Tensor]) -> list[Any]:
        copied.add(tuple(tuple(each.shape) for each in batch))
        return real(self, batch)

    monkeypatch.setattr(replay._Recording, "replay", noted)
    weights = torch.ones(3)
    pl.run(fit(loss=lambda outputs, y: cross_entropy(outputs, y, weights)))
    assert copied == {((6, 4), (6,), (6, 5))}


def test_numbers_lie_where_what_they_meet_lies() -> None:
    """Else each would be copied to the device in every step, and waited for."""
    trace = tracing.Tracing(torch.device("cuda"), replay.Recorders())
    number = Number(trace.context, 2.0, lambda env: 2.0, frozenset())
    found = []

    def body(here: Tensor, there: Tensor) -> list[Tensor]:
        found.extend([here * number, there * number, here[0] * number, trace.lift(torch.float64, number.evaluate)])
        return found

    with trace.mode:
        make_fx(body)(torch.empty(2), torch.empty(2, device="cuda"))
    assert [each.device.type for each in found] == ["cpu", "cuda", "cpu", "cuda"]
    assert [device.type for _, _, device in trace.numbers] == ["cpu", "cuda", "cpu", "cuda"]


@cache
def launched(setting: str) -> pl.State:
    return unrecorded(**SETTINGS[setting][0])


@examples(4, 200)
@given(when=st.sets(st.integers(0, STEPS - 1)), seen=st.sampled_from(["plain", "gradients seen"]))
def test_what_was_kept_never_changes(when: set[int], seen: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        double = Double()
        record_by(patch, double.of)
        kept = Kept()
        state: Any = None
        for event, state in fit(**SETTINGS[seen][0]):
            if state.timestamp.batch in when:
                kept.keep(f"the State of {event.name}", state)
            elif event is Event.BATCH_END:
                kept.keep("the loss", state.loss)
        kept.check()
    assert_same(state, launched(seen), "with States kept and without")


def test_what_python_has_from_elsewhere_may_change_in_place(double: Double) -> None:
    def trained() -> pl.State:
        weights = torch.ones(3)
        state: Any = None
        for _, state in fit(loss=lambda outputs, y: cross_entropy(outputs, y, weights)):  # noqa: B007
            weights[0] *= 1.1
        return state

    found = trained()
    assert double.replayed
    assert_same(found, unrecorded(trained), "replayed and launched")


def test_evaluations_are_replayed(double: Double) -> None:
    state = pl.run(fit())
    recorded = double.recorded
    outputs, wanted = (list(pl.predict(state, DATA[:1] * 6, compile=compiles)) for compiles in (True, False))
    assert double.recorded > recorded
    for (event, found), (_, other) in zip(outputs, wanted, strict=True):
        if event is Event.PREDICT_AFTER_FORWARD:
            torch.testing.assert_close(found.outputs, other.outputs)


@pl.algorithm(Event.AFTER_TRAIN_BATCH, init=lambda _: torch.zeros((), device="meta"))
def elsewhere(state: pl.State) -> pl.State:
    return state.remember("elsewhere", state.algorithm_state["elsewhere"] + 1)


WIDE = torch.randn(6, 8, generator=problem.noise())
OTHER = "can't be a CUDA graph: a tensor of the batch"
LAUNCHED: dict[str, tuple[dict[str, Any], str]] = {
    "gaps": ({"data": [(WIDE[:, ::2], DATA[0][1])] * 5}, OTHER),
    "one row many times": ({"data": [(WIDE[:1, :4].expand(6, 4), DATA[0][1])] * 5}, OTHER),
    "two devices": ({"algorithms": [elsewhere]}, ""),
}


def test_a_batch_that_can_not_be_copied_as_it_lies_is_launched(double: Double, caplog: Any) -> None:
    for name, (settings, says) in LAUNCHED.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="pure_loop.compile"):
            state = pl.run(fit(**settings))
        assert_same(state.params, unrecorded(**settings).params, name)
        assert not double.recorded
        assert says in caplog.text


def test_what_can_not_be_recorded_is_launched_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    asked = []

    def refuse(call: Any, tensors: list[Tensor]) -> Any:
        asked.append(len(tensors))
        raise RuntimeError("operation not permitted when stream is capturing")

    record_by(monkeypatch, lambda device: refuse)
    with caplog.at_level(logging.WARNING, logger="pure_loop.compile"):
        found = pl.run(fit())
    assert_same(found, unrecorded(), "refused and launched")
    assert len(asked) == 1
    assert "operation not permitted" in caplog.text


def test_each_memory_has_a_recording_and_after_a_refusal_none_is_held() -> None:
    """Each of the States that are resumed from has memory of its own; a few are recorded."""
    double, refusing = Double(), False

    def recording(call: Any, tensors: list[Tensor]) -> Any:
        if refusing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return double(call, tensors)

    call = replay.Replaying(lambda tensors: [tensors[0] + tensors[1]], [0], recording)
    held = [torch.full((2,), float(i)) for i in range(2 * replay.MOST)]
    for tensor in held * 2 + [torch.full((2,), -1.0)]:
        refusing = tensor[0] == -1
        for number in range(replay.WARM_UP + 3):
            (found,) = call([tensor, torch.full((2,), float(number))])
            assert found.tolist() == [tensor[0] + number] * 2
        assert len(call._recordings) <= replay.MOST
    assert double.recorded == 2 * len(held)
    assert not call._recordings


def test_what_gives_a_part_of_what_lasts_is_launched(double: Double, caplog: Any) -> None:
    """A recording would refer to it, which who counts references would find."""
    call = replay.Replaying(lambda tensors: [tensors[0][:1]], [0], double)
    held = torch.arange(3.0)
    with caplog.at_level(logging.WARNING, logger="pure_loop.compile"):
        for _ in range(replay.WARM_UP + 3):
            assert call([held])[0].data_ptr() == held.data_ptr()
    assert caplog.text.count("a part of what it is called with") == 1
    assert not call._recordings


def test_batches_that_have_gradients_are_noted_by_nobody(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied into a recording with autograd on, each would be held by it for ever."""
    made: list[Any] = []
    real = replay._Recording.__init__
    monkeypatch.setattr(replay._Recording, "__init__", lambda this, *given: (made.append(this), real(this, *given))[1])
    pl.run(fit([(x.clone().requires_grad_(), y) for x, y in DATA] * 3, watch=EPOCHS, steps_per_call=3))
    assert double.replayed
    assert not any(tensor.requires_grad for each in made for tensor in each._inputs)


@pytest.mark.parametrize("ends", ["by itself", "closed", "failed"])
def test_recordings_are_gone_when_the_stream_ends(double: Double, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold memory of the device, which no collector of cycles is asked for."""
    made: list[Any] = []
    real = replay.Replaying.__init__
    monkeypatch.setattr(
        replay.Replaying, "__init__", lambda this, *given: (made.append(weakref.ref(this)), real(this, *given))[1]
    )
    stream = fit([*DATA, (DATA[0][0] * float("nan"), DATA[0][1])] if ends == "failed" else DATA)
    gc.collect()
    gc.disable()
    try:
        if ends == "closed":
            next(state for _, state in stream if state.timestamp.batch == STEPS // 2)
            stream.close()
        elif ends == "failed":
            with pytest.raises(pl.errors.NonFiniteError):
                pl.run(stream)
        else:
            pl.run(stream)
        assert made
        assert [each() for each in made] == [None] * len(made)
    finally:
        gc.enable()


def _shown(self: Any, batch: list[Tensor]) -> Sequence[Any]:
    """A wrong one: what it gives is where the next replay writes."""
    torch._foreach_copy_(self._inputs, batch)
    self._replay()
    return self._outputs


def _stale(self: Any, batch: list[Tensor]) -> Sequence[Any]:
    """A wrong one: it continues with the batch that was recorded."""
    self._replay()
    return [each.clone() for each in self._outputs]


def test_a_wrong_replay_is_found(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay._Recording, "replay", _stale)
    with pytest.raises(AssertionError):
        assert_same(pl.run(fit()), unrecorded(), "replayed and launched")
    monkeypatch.setattr(replay._Recording, "replay", _shown)
    kept = Kept()
    for _, state in fit():
        kept.keep("the loss", state.loss)
    with pytest.raises(AssertionError, match="the loss changed"):
        kept.check()
