"""Steps that are recorded by their addresses and replayed, as CUDA graphs are, on a double that runs on a CPU.

What it leaves to a GPU (tests/laws/test_gpu.py) is CUDA's own recording.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import replay, tracing
from pure_loop.compile.numbers import Number
from pure_loop.stages.ownership import Ownership
from pure_loop.stages.references import can_count
from tests.support.donating import DATA, Kept
from tests.support.replaying import Double
from tests.support.streams import assert_same
from tests.support.tiers import examples, tiers

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
]

BATCHES, EPOCHS = {Event.BATCH_END}, {Event.EPOCH_END}
STEPS = 20


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    made = Double()
    monkeypatch.setattr(replay.Recorders, "of", lambda self, device: made.of(device))
    return made


def noisy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3))


def fit(model: Any = None, **arguments: Any) -> Any:
    arguments.setdefault("optimizer", pl.optim.adamw(lr=pl.schedules.cosine("4ep", peak=0.1)))
    arguments.setdefault("algorithms", [pl.algorithms.ema(half_life="5ba")])
    arguments.setdefault("watch", BATCHES)
    arguments.setdefault("compile", True)
    arguments.setdefault("loss", functional.cross_entropy)
    data = arguments.pop("data", DATA)
    return pl.fit(noisy() if model is None else model, data, max_duration="4ep", **arguments)


def unrecorded(**arguments: Any) -> pl.State:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.Recorders, "of", lambda self, device: None)
        return pl.run(fit(**arguments))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not observed": {"watch": EPOCHS},
    "several steps a call": {"watch": EPOCHS, "steps_per_call": 3},
    "microbatches": {"microbatch_size": 2, "clip_grad": 1.0},
    "gradients seen": {"watch": {Event.AFTER_TRAIN_BATCH, *BATCHES}},
    "microbatches seen": {"watch": {Event.AFTER_BACKWARD, *BATCHES}, "microbatch_size": 3},
    "all seen": {"watch": None},
    "skipping": {"nonfinite": "skip"},
    "half precision": {"precision": "amp_fp16"},
    "copying": {"donate": False},
}


# In the thorough tier alone: parts of what others do, or (a step that is left out) what a loss scale does, too.
PARTS = {"plain", "several steps a call", "gradients seen", "skipping"}


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers(SETTINGS, SETTINGS.keys() - PARTS))
def test_replayed_steps_are_those_that_are_launched(double: Double, name: str) -> None:
    assert_same(pl.run(fit(**SETTINGS[name])), unrecorded(**SETTINGS[name]), "replayed and launched")


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["plain", "skipping", "half precision"])
def test_a_step_is_recorded_once(double: Double, settings: str) -> None:
    pl.run(fit(**SETTINGS[settings]))
    assert (double.recorded, double.replayed) == (1, STEPS - replay.WARM_UP)


@pytest.mark.parametrize("settings", ["not observed", "several steps a call"])
def test_a_step_is_recorded_once_for_each_state_that_is_shown(double: Double, settings: str) -> None:
    """Who is shown the State of an epoch's end may keep it, so that the next step has other memory."""
    pl.run(fit(**SETTINGS[settings]))
    assert (double.recorded, double.replayed) == (4, STEPS - 4 * replay.WARM_UP)


def test_a_recording_refers_to_nothing_that_it_was_called_with(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    real = Ownership.writable_or_copies

    def own(this: Any, tensors: list[Tensor], alone: Any) -> list[Tensor]:
        given = real(this, tensors, alone)
        copied.append(given is not tensors)
        return given

    monkeypatch.setattr(Ownership, "writable_or_copies", own)
    for _, _state in fit():
        pass
    assert copied == [True] + [False] * (STEPS - 1)
    assert double.replayed


def test_nothing_is_copied_but_the_batch_and_what_is_drawn(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, real = set(), replay._Recording.replay

    def noted(self: Any, batch: list[Tensor]) -> list[Any]:
        copied.add(tuple(tuple(each.shape) for each in batch))
        return real(self, batch)

    monkeypatch.setattr(replay._Recording, "replay", noted)
    weights = torch.ones(3)
    pl.run(fit(loss=lambda outputs, y: functional.cross_entropy(outputs, y, weights)))
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


def test_who_keeps_every_state_has_nothing_recorded(double: Double) -> None:
    kept = Kept()
    for _, state in fit():
        kept.keep("a State", state)
    kept.check()
    assert not double.recorded


@cache
def launched(setting: str) -> pl.State:
    return unrecorded(**SETTINGS[setting])


@pytest.mark.slow
@given(when=st.sets(st.integers(0, STEPS - 1)), seen=st.sampled_from(["plain", "gradients seen", "all seen"]))
@examples(8, 200)
def test_what_was_kept_never_changes(when: set[int], seen: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        double = Double()
        patch.setattr(replay.Recorders, "of", lambda self, device: double.of(device))
        kept = Kept()
        state: Any = None
        for event, state in fit(**SETTINGS[seen]):
            if state.timestamp.batch in when:
                kept.keep(f"the State of {event.name}", state)
            elif event is Event.BATCH_END:
                kept.keep("the loss", state.loss)
        kept.check()
    assert_same(state, launched(seen), "with States kept and without")


@pytest.mark.slow
def test_each_shape_has_a_recording(double: Double) -> None:
    data = [*DATA[:4], (DATA[4][0][:3], DATA[4][1][:3])] * 3
    assert_same(pl.run(fit(data=data)), unrecorded(data=data), "replayed and launched")
    assert double.recorded == 2


def test_what_python_has_from_elsewhere_may_change_in_place(double: Double) -> None:
    def trained(weights: Tensor) -> pl.State:
        state: Any = None
        for _, state in fit(loss=lambda outputs, y: functional.cross_entropy(outputs, y, weights)):  # noqa: B007
            weights[0] *= 1.1
        return state

    found = trained(torch.ones(3))
    assert double.replayed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.Recorders, "of", lambda self, device: None)
        assert_same(found, trained(torch.ones(3)), "replayed and launched")


def test_memory_here_and_there_is_recorded_a_few_times(double: Double) -> None:
    """Each of the States that are resumed from has memory of its own."""
    call = replay.Replaying(lambda tensors: [tensors[0] + tensors[1]], [0], double)
    held = [torch.full((2,), float(i)) for i in range(2 * replay.MOST)]
    for tensor in held * 2:
        for number in range(replay.WARM_UP + 3):
            (found,) = call([tensor, torch.full((2,), float(number))])
            assert found.tolist() == [tensor[0] + number] * 2
    assert len(call._recordings) == replay.MOST
    assert double.recorded == 2 * len(held)


def test_evaluations_are_replayed(double: Double) -> None:
    state = pl.run(fit())
    recorded = double.recorded
    data = [DATA[0]] * 6
    outputs = list(pl.predict(state, data, compile=True))
    assert double.recorded > recorded
    wanted = list(pl.predict(state, data))
    assert len(outputs) == len(wanted)
    for (event, found), (_, other) in zip(outputs, wanted, strict=True):
        if event is Event.PREDICT_AFTER_FORWARD:
            torch.testing.assert_close(found.outputs, other.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("images", ["gaps", "shared"])
def test_a_batch_that_can_not_be_copied_as_it_lies(double: Double, images: str, caplog: Any) -> None:
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    inputs = wide[:, ::2] if images == "gaps" else wide[:1, :4].expand(6, 4)
    data = [(inputs, DATA[0][1])] * 5
    with caplog.at_level(logging.WARNING, logger="pure_loop.compile"):
        assert_same(pl.run(fit(data=data)), unrecorded(data=data), "replayed and launched")
    assert not double.recorded
    assert "can't be a CUDA graph: a tensor of the batch" in caplog.text


def test_what_can_not_be_recorded_is_launched_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    asked = []

    def refuse(call: Any, tensors: list[Tensor]) -> Any:
        asked.append(len(tensors))
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay.Recorders, "of", lambda self, device: refuse)
    with caplog.at_level(logging.WARNING, logger="pure_loop.compile"):
        found = pl.run(fit())
    assert_same(found, unrecorded(), "refused and launched")
    assert len(asked) == 1
    assert "operation not permitted" in caplog.text


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


def test_recording_by_other_memory_is_found(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one: it takes whatever memory it is called with for that which it has recorded."""
    monkeypatch.setattr(Tensor, "data_ptr", lambda self: 0)
    call = replay.Replaying(lambda tensors: [tensors[0] + 0], [0], _by_object)
    found = [call([torch.full((), float(number))])[0].item() for number in range(6)]
    assert found != [float(number) for number in range(6)]


def _by_object(call: Any, tensors: list[Tensor]) -> Any:
    outputs = call(tensors.copy())
    return lambda: [one.copy_(other) for one, other in zip(outputs, call(tensors.copy()), strict=True)], outputs


def test_a_graph_of_two_devices_is_launched(double: Double) -> None:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH, init=lambda _: torch.zeros((), device="meta"))
    def counts(state: pl.State) -> pl.State:
        return state.remember("counts", state.algorithm_state["counts"] + 1)

    state = pl.run(fit(algorithms=[counts]))
    assert state.timestamp.batch == STEPS
    assert not double.recorded


def test_after_a_refusal_no_recording_is_held() -> None:
    refusing = False

    def record(call: Any, tensors: list[Tensor]) -> Any:
        if refusing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Double()(call, tensors)

    call = replay.Replaying(lambda tensors: [tensors[0] + 1], [0], record)
    for number in range(2):
        held, refusing = torch.full((2,), float(number)), number == 1
        for _ in range(replay.WARM_UP + 2):
            assert call([held])[0].tolist() == [number + 1.0] * 2
        assert len(call._recordings) == (number == 0)


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
    made: list[replay._Recording] = []
    real = replay._Recording.__init__

    def noted(self: Any, *given: Any) -> None:
        made.append(self)
        real(self, *given)

    monkeypatch.setattr(replay._Recording, "__init__", noted)
    data = [(x.clone().requires_grad_(), y) for x, y in DATA] * 3
    pl.run(fit(data=data, watch=EPOCHS, steps_per_call=3))
    assert double.replayed
    assert not any(tensor.requires_grad for each in made for tensor in each._inputs)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by itself", "closed", "failed"])
def test_recordings_are_gone_when_the_stream_ends(double: Double, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold memory of the device, which no collector of cycles is asked for."""
    made: list[Any] = []
    real = replay.Replaying.__init__

    def noted(self: Any, *given: Any) -> None:
        made.append(weakref.ref(self))
        real(self, *given)

    monkeypatch.setattr(replay.Replaying, "__init__", noted)
    stream = fit(data=[*DATA, (DATA[0][0] * float("nan"), DATA[0][1])] if ends == "failed" else DATA)
    gc.collect()
    gc.disable()
    try:
        if ends == "failed":
            with pytest.raises(pl.errors.NonFiniteError):
                pl.run(stream)
        elif ends == "closed":
            for _, state in stream:
                if state.timestamp.batch == STEPS // 2:
                    break
            stream.close()
        else:
            pl.run(stream)
        assert made
        assert [each() for each in made] == [None] * len(made)
    finally:
        gc.enable()
