"""After Ctrl-C one line on stderr says which file holds the State, however the program logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging, os, signal, sys, torch, pure_loop as pl
from pure_loop import Event
folder = sys.argv[1]
{setup}

def interrupt(event, state):
    if event is Event.BEFORE_LOSS and state.timestamp.batch == 3:
        os.kill(os.getpid(), signal.SIGINT)

data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 20
pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
              max_duration="1ep", callbacks=[interrupt, *{savers}]))
"""
SAVER = '[pl.callbacks.CheckpointSaver(folder + "/runs", interval=0)]'
SETUPS = {
    "no logging": "",
    "on stderr": "logging.basicConfig()",
    "to a file": 'logging.basicConfig(filename=folder + "/log")',
    "errors alone": "logging.basicConfig(level=logging.ERROR)",
    "switched off": "logging.disable()",
    "nowhere": 'logging.getLogger("pure_loop").addHandler(logging.NullHandler())',
}


def interrupted(folder: Path, setup: str = "", savers: str = SAVER) -> list[str]:
    text = PROGRAM.format(setup=setup, savers=savers)
    done = subprocess.run(
        [sys.executable, "-c", text, str(folder)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (130, -2)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "During handling" not in done.stderr
    # The line of the loop, and where there is no saver that of the callback; no line stands there twice.
    frames = [line for line in done.stderr.splitlines() if line.startswith('  File "')]
    assert len(frames) == len(set(frames)) <= 12
    return [line for line in done.stderr.splitlines() if "is saved in" in line]


@pytest.mark.slow  # processes in a terminal
@pytest.mark.parametrize("setup", SETUPS)
def test_one_line_says_where_the_state_is(tmp_path: Path, setup: str) -> None:
    (line,) = interrupted(tmp_path, SETUPS[setup])
    assert line.endswith(
        f"SIGINT: the State of batch 4 is saved in {tmp_path}/runs/ep0-ba4.safetensors: "
        "resume it with fit(..., load_path=...)"
    )


@pytest.mark.slow  # processes in a terminal
def test_nothing_is_said_where_nothing_is_saved(tmp_path: Path) -> None:
    assert interrupted(tmp_path, savers="[]") == []
