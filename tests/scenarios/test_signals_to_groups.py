"""Signals to a whole job, loader workers included: the State is saved, the signal acts, and the same command resumes.

The processes are real: see :mod:`tests.support.killed_runs`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.killed_runs import BATCHES, Killer
from tests.support.tiers import examples

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="processes are forked and listed")


def signalled_and_resumed(killer: Killer, uninterrupted: dict[str, str], folder: Path, **arguments: Any) -> None:
    """Signal a run, and resume it: a file holds the State, the signal acted, and the bits are those of a whole run."""
    told = killer(autoresume=str(folder), **arguments)
    number, batch = arguments["kill"], told["batch"]
    if told["how"] == "end":
        assert batch == BATCHES
        return
    files = sorted(path.name for path in folder.glob("*.safetensors")) if folder.exists() else []
    if batch == 0 and not files:
        # Before FIT_START there is nothing to save.
        assert told["how"] in (signal.Signals(number).name, "KeyboardInterrupt"), told
    else:
        assert told["how"] == ("SystemExit" if number == signal.SIGTERM else "KeyboardInterrupt"), told
        assert told.get("code") == (143 if number == signal.SIGTERM else None)
        assert any(name.endswith(f"-ba{batch}.safetensors") for name in files), (batch, files, told["stderr"])
        assert f"the State of batch {batch} is saved in {folder}" in told["stderr"]
        assert "the same command resumes from it" in told["stderr"]
        assert told["handlers"], "handlers are as before"
    ended = killer(autoresume=str(folder), workers=arguments["workers"])
    assert ended.get("state") == uninterrupted, ended.get("text")


@st.composite
def signals(draw: st.DrawFn) -> dict[str, Any]:
    to = draw(st.sampled_from(["group", "terminal", "member", "process"]))
    number = signal.SIGINT if to == "terminal" else draw(st.sampled_from([signal.SIGTERM, signal.SIGINT]))
    workers = draw(st.integers(0, 2))
    arguments: dict[str, Any] = {
        "to": to,
        "kill": number,
        "workers": workers,
        "persistent": workers > 0 and draw(st.booleans()),
        "seconds": draw(st.sampled_from([0.0, 0.001, 0.003])),
        "batch": draw(st.integers(0, 20)),
        "evaluation": draw(st.booleans()),
        "twice": draw(st.booleans()),
        "after": draw(st.floats(0.0, 0.05)),
    }
    interval = draw(st.none() | st.sampled_from(["1ba", "1000ba"]))
    if interval is not None:
        arguments["saver"] = {"interval": interval, "background": draw(st.booleans())}
    return arguments


@pytest.mark.slow
@pytest.mark.timeout(3000)
@examples(8, 100)
@given(signals())
def test_a_job_is_saved_whenever_it_is_signalled(
    killer: Killer, uninterrupted: dict[str, str], arguments: dict[str, Any]
) -> None:
    """Drawn: who gets the signal and which one, workers, persistent ones, the moment (in the first batch, between
    batches, in an evaluation, in a save), once or twice, and a saver in ``callbacks`` or ``autoresume`` alone."""
    with tempfile.TemporaryDirectory() as name:
        saver = arguments.pop("saver", None)
        if saver is not None:
            saver["folder"] = name
        signalled_and_resumed(killer, uninterrupted, Path(name), saver=saver, **arguments)


SCRIPT = """
import sys, torch, pure_loop as pl
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return torch.full((2,), float(index)), torch.zeros(1)

for event, state in pl.fit(
    torch.nn.Linear(2, 1), DataLoader(Rows(), batch_size=4, num_workers=2, shuffle=True),
    loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=1e-9), max_duration="1ep", autoresume=sys.argv[1],
):
    if event is pl.Event.BATCH_END and state.timestamp.batch in (5, 50):
        print(state.timestamp.batch, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_exit_status(number: signal.Signals, tmp_path: Path) -> None:
    """By hand: SIGTERM ends a shell's command with 143, and Ctrl-C by SIGINT, after a traceback."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    for batch in ("5", "50"):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == batch
            os.killpg(process.pid, number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT), said
        assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)
        assert "the same command resumes from it" in said
        assert "DataLoader worker" not in said, "workers outlive a signal to the group"
