"""Runs that are killed: a process that imports everything once, and forks a child for each run.

Started by :class:`Killer`; ``python -m tests.support.killed_runs`` reads orders from its input, one JSON a line, and
answers each with one. Forking is safe here: the process has one thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pure_loop as pl
from tests.support import streams as sameness

BATCHES = 30
"""How many batches a run has, in three epochs."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)),
    )


class Rows(Dataset[Any]):
    """Rows of tensors, each of which takes some seconds to load."""

    def __init__(self, *tensors: torch.Tensor, seconds: float) -> None:
        self.tensors, self.seconds = tensors, seconds

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(self.seconds)
        return tuple(tensor[index] for tensor in self.tensors)


def run(
    seen: Any = None,
    *,
    workers: int = 0,
    persistent: bool = False,
    seconds: float = 0.0,
    **options: Any,
) -> pl.State:
    """Train with everything that remembers something.

    Args:
        seen: told of each finished batch, and of each evaluation as it begins (True) and ends (False).
        workers, persistent: of the loaders.
        seconds: how long each row of a batch takes to load.
        **options: of ``fit``.
    """
    generator = torch.Generator().manual_seed(1)
    tensors = torch.randn(56, 4, generator=generator), torch.randint(3, (56,), generator=generator)
    data: Any = Rows(*tensors, seconds=seconds) if workers or seconds else TensorDataset(*tensors)
    shared: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    stream = pl.fit(
        model(),
        DataLoader(data, batch_size=6, shuffle=True, **shared),
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.sgd(lr=pl.schedules.cosine("1dur", peak=0.1, warmup="3ba"), momentum=0.9, nesterov=True),
        max_duration="3ep",
        microbatch_size=4,
        seed=3,
        evaluators={"val": pl.Evaluator(DataLoader(data, batch_size=28, **shared), interval="7ba")},
        algorithms=[pl.algorithms.sam(rho=0.05, interval=2), pl.algorithms.ema(half_life="4ba")],
        **options,
    )
    state: Any = None
    for event, state in stream:
        if seen is not None and event in (pl.Event.BATCH_END, pl.Event.EVAL_BEFORE_ALL, pl.Event.EVAL_AFTER_ALL):
            seen(state.timestamp.batch, event is pl.Event.EVAL_BEFORE_ALL)
    assert state is not None
    assert state.timestamp.batch == BATCHES
    return state  # type: ignore[no-any-return]


def digest(state: pl.State) -> dict[str, str]:
    """The leaves of a State by path, wall-clock seconds excepted, in a few bytes each."""
    found = {}
    for path, leaf in sameness.leaves(state).items():
        value = leaf
        if isinstance(leaf, torch.Tensor):
            data = leaf.contiguous().flatten().view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
            value = (str(leaf.dtype), tuple(leaf.shape), hashlib.sha256(data).hexdigest())
        found[path] = repr(value)
    return found


class Killer:
    """The process that forks, as the tests see it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.killed_runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent.parent,
        )

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def __call__(
        self,
        *,
        kill: int | None = None,
        after: float = 0.0,
        batch: int = 0,
        rename: int = 0,
        evaluation: bool = False,
        twice: bool = False,
        to: str = "process",
        saver: dict[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Run in a child, and end it.

        Args:
            kill: the signal that it is sent; None: it runs to its end.
            after: seconds from its start, or from the end of that batch, to the signal.
            batch: the signal is sent when it has finished this batch.
            rename: after that batch the process kills itself just before its n-th rename, inside a save; 0: it doesn't.
            evaluation: and when it evaluates after that.
            twice: send the signal again at once.
            to: who gets it: the "process" alone; its "group", workers included; each "member" of the group, the workers
                first; or the foreground group of its "terminal", as Ctrl-C at a real one (kill is SIGINT then).
            saver: arguments of a CheckpointSaver, if there is one.
            **options: of :func:`run`.

        Returns:
            ``how``: as which exception or with which signal it ended, or "end". ``batch``: the last batch that it
            finished, in the whole run. ``state``: the digest of its last State, if it came to its end. ``stderr``: what
            it wrote there.
        """
        order = {
            "kill": kill,
            "after": after,
            "batch": batch,
            "rename": rename,
            "evaluation": evaluation,
            "twice": twice,
            "to": to,
            "saver": saver,
            "options": options,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]


def _child(order: dict[str, Any], seen: mmap.mmap, answer: int) -> None:
    told: dict[str, Any] = {}
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    options = order["options"]
    if order["saver"] is not None:
        options["callbacks"] = [pl.callbacks.CheckpointSaver(**order["saver"])]

    def count(batch: int, evaluates: bool) -> None:
        seen[:5] = batch.to_bytes(4, "little") + bytes([evaluates])

    renames = 0

    def kill_at_rename(event: str, _: object) -> None:
        nonlocal renames
        if event == "os.rename" and int.from_bytes(seen[:4], "little") >= order["batch"]:
            renames += 1
            if renames == order["rename"]:
                os.kill(os.getpid(), order["kill"])

    if order["rename"]:
        sys.addaudithook(kill_at_rename)
    try:
        told = {"how": "end", "state": digest(run(count, **options))}
    except BaseException as error:
        told = {"how": type(error).__name__, "code": getattr(error, "code", None), "text": str(error)}
    told["handlers"] = all(signal.getsignal(number) == handler for number, handler in before.items())
    os.write(answer, json.dumps(told).encode())


def _obey(order: dict[str, Any], seen: mmap.mmap) -> dict[str, Any]:
    seen[:5] = bytes(5)
    answer, to = os.pipe()
    terminal, side = os.openpty() if order["to"] == "terminal" else (None, None)
    with tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            try:
                os.close(answer)
                if order["to"] != "process":
                    os.setsid()
                os.dup2(stderr.fileno(), 2)
                if side is not None:
                    fcntl.ioctl(side, termios.TIOCSCTTY, 0)
                _child(order, seen, to)
            finally:
                os._exit(0)
        os.close(to)
        status = None if order["kill"] is None or order["rename"] else _send(order, seen, child, terminal)
        with open(answer, "rb") as file:
            text = file.read()  # to its end: workers have it open as well
        status = os.waitpid(child, 0)[1] if status is None else status
        for descriptor in (terminal, side):
            if descriptor is not None:
                os.close(descriptor)
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")
    told = json.loads(text) if text else {"how": signal.Signals(os.WTERMSIG(status)).name}
    return {**told, "batch": int.from_bytes(seen[:4], "little"), "stderr": said}


def _send(order: dict[str, Any], seen: mmap.mmap, child: int, terminal: int | None) -> int | None:
    """Send the signal at its moment; gives the status of the child, if it ended before."""
    deadline, status = time.monotonic() + 120, None
    while order["to"] != "process" and os.getpgid(child) != child:
        time.sleep(0.0002)
    while status is None and time.monotonic() < deadline:
        if int.from_bytes(seen[:4], "little") >= order["batch"] and seen[4] >= order["evaluation"]:
            break
        time.sleep(0.0002)
        status = _ended(child)
    time.sleep(order["after"])
    status = _ended(child) if status is None else status
    for _ in range(1 + order["twice"]):
        if status is None:
            if order["to"] == "process":
                os.kill(child, order["kill"])
            elif order["to"] == "member":
                for member in [*_children_of(child), child]:
                    with contextlib.suppress(ProcessLookupError):  # a worker that ended meanwhile
                        os.kill(member, order["kill"])
            elif terminal is not None:
                os.write(terminal, b"\x03")
            else:
                os.killpg(child, order["kill"])
            time.sleep(0.002 * order["twice"])
    return status


def _children_of(parent: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _ended(child: int) -> int | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    return status if pid else None


def _warm_up() -> None:
    """Save, load and train once, so that children don't import what is imported late each for itself."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            run(autoresume=folder)
    assert threading.active_count() == 1


def main() -> None:
    torch.set_num_threads(1)
    _warm_up()
    seen = mmap.mmap(-1, 5)
    for line in sys.stdin:
        print(json.dumps(_obey(json.loads(line), seen)), flush=True)


if __name__ == "__main__":
    main()
