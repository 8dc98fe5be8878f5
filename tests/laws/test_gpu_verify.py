"""``fit(verify=)`` on a CUDA device. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import VerificationError
from pure_loop.stages import engine
from tests.support import faults
from tests.support.faults import PLACES, Fault, bits_of
from tests.support.runs import convnet, images, stream

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "microbatches": {"microbatch_size": 2},
    "watching one event": {"watch": {Event.BATCH_END}, "strict": False},
    "bf16": {"precision": "amp_bf16"},
    "loss scale": {"precision": "amp_fp16"},
    "skipping": {"nonfinite": "skip"},
}


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("way", OPTIONS)
def test_a_verified_run_is_a_run(way: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if size == "large":
        monkeypatch.setattr(engine, "LARGE", 0)
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        runs = [stream(convnet(), images(), device="cuda", **OPTIONS[way], verify=verify) for verify in ("2ba", None)]
        ends = [pl.run(run) for run in runs]
    finally:
        torch.backends.cudnn.deterministic = before
    assert bits_of(ends[0]) == bits_of(ends[1])


def at_the_end_of_the_second(fault: Fault, **options: Any) -> dict[str, Any]:
    for event, state in faults.fit(fault, device="cuda", max_duration="2ba", nonfinite="skip", donate=False, **options):
        if event is Event.BATCH_END and state.timestamp.batch == 2:
            return bits_of(state)
    raise AssertionError("training is shorter than that")


@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_flipped_bits_are_found(place: str, run: int) -> None:
    found = 0
    for seed in range(8):
        sound, flawed = (at_the_end_of_the_second(Fault(place, where, 1, seed)) for where in (0, 1))
        fault = Fault(place, run, 1, seed)
        if sound == flawed:
            at_the_end_of_the_second(fault, verify="2ba")
            continue
        found += 1
        with pytest.raises(VerificationError) as caught:
            at_the_end_of_the_second(fault, verify="2ba")
        error = caught.value
        assert error.transient
        assert error.agreeing == ((2, 3) if run == 1 else (1, 3))
        assert (error.batch, error.rank) == (1, 0)
        assert error.stage in {PLACES[place], "backward", "optimizer"}
    assert found
