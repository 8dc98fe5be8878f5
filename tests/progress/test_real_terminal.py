"""Ctrl-C in a pseudo-terminal, typed while a process trains."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest

from tests.progress.emulator import Emulator

pytest.importorskip("rich")
pty = pytest.importorskip("pty")

PROGRAM = """
import time, torch, pure_loop as pl

class Slow:
    def __len__(self):
        return 8
    def __iter__(self):
        for _ in range(8):
            time.sleep(0.05)
            yield torch.ones(4, 3), torch.ones(4, 1)

stream = pl.fit(torch.nn.Linear(3, 1), Slow(), loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.01),
                max_duration="500ep", evaluators={"val": Slow()})
try:
    pl.run(pl.progress(stream))
except KeyboardInterrupt:
    print("after")
"""


def typed(program: str, key: bytes, when: bytes, columns: int) -> str:
    """What a process writes to its terminal; the key is typed once it has written this."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm-256color"},
        # Its controlling terminal, which turns the key into a signal.
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )
    os.close(theirs)
    written, end = b"", time.monotonic() + 120
    try:
        while time.monotonic() < end:
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(ours, 65536)
            except OSError:  # the process has closed it
                break
            if not data:
                break
            written += data
            if key and when in written:
                os.write(ours, key)
                key = b""
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return written.decode()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("when", [b"epoch 2", b"batch 3/8"])
def test_ctrl_c_leaves_one_bar_and_the_cursor(columns: int, when: bytes) -> None:
    text = typed(PROGRAM, b"\x03", when, columns)
    lines = Emulator(columns).feed(text).lines
    assert lines[-1] == "after"
    assert sum("interrupted" in line for line in lines) == 1
    assert not any(line.endswith("left") for line in lines)
    assert not any("^C" in line for line in lines)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
