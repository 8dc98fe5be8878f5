"""One rank of a pool: a process that runs the programs that it receives, one after the other.

It is started by the path of this file and imports nothing outside the standard library before it has been told what
``sys.path`` is in the process of the pool. It ends by itself when that process does.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import ModuleType

__all__: list[str] = []

# How much longer than the pool a worker waits for anything: the pool knows where all ranks stand, so it should speak.
_LONGER = 30.0


class _Worker:
    def __init__(self, rank: int, ranks: int, timeout: float) -> None:
        self._torch = import_module("torch")
        self._torch.set_num_threads(1)
        around = _by_path(Path(__file__).parents[1] / "_surroundings.py")
        # The settings with which every program starts.
        self._new, self._threads = around.Surroundings(), set(threading.enumerate())
        self.worn = False
        self._dumps = import_module("cloudpickle").dumps
        self._rank, self._ranks, self._patience = rank, ranks, timeout + _LONGER

    def meet(self, store: str) -> tuple[object, ...]:
        """Leave the process group, and enter a new one that the ranks find through a file."""
        try:
            self.leave()
            distributed = self._torch.distributed
            distributed.init_process_group(
                "gloo",
                store=distributed.FileStore(store, self._ranks),
                rank=self._rank,
                world_size=self._ranks,
                timeout=timedelta(seconds=self._patience),
            )
            return ("met",)
        except Exception as error:
            return "error", time.monotonic(), "could not meet the others:", *self._described(error)

    def run(self, path: list[str], folder: str | None, payload: bytes) -> tuple[object, ...]:
        """The result of a program.

        Args:
            path: what ``sys.path`` has to be.
            folder: the working directory that the program is loaded and called in; None: the pool's folder of files.
            payload: the program, pickled.
        """
        # Written in C, it also ends a process that is stuck in its interpreter while no other one is left to kill it.
        faulthandler.dump_traceback_later(self._patience, exit=True)
        doing = "could not load the program:"
        try:
            sys.path[:] = path
            if folder is not None:
                os.chdir(folder)
            program = pickle.loads(payload)
            doing = "raised"
            self._torch.manual_seed(self._rank)
            with warnings.catch_warnings():
                value = program(self._rank)
            if not self._torch.distributed.is_initialized():
                raise RuntimeError(
                    "the program destroyed the default process group, which belongs to the pool: leave out "
                    "destroy_process_group()"
                )
            doing = f"returned a {type(value).__name__} that can't be pickled:"
            return "value", self._dumps(value)
        except BaseException as error:  # SystemExit too: however a program ends, the pool is told, and the rank lives
            return "error", time.monotonic(), doing, *self._described(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.worn = self._new.put_back() is not None or self._left_a_thread()

    def _left_a_thread(self) -> bool:
        """Whether a thread of Python's still runs; threads of autograd are named dummies."""
        return any(item not in self._threads and not item.name.startswith("Dummy-") for item in threading.enumerate())

    def leave(self) -> None:
        """End the process group; ranks that wait for this one in a collective get an error instead of waiting on."""
        if self._torch.distributed.is_initialized():
            self._torch.distributed.destroy_process_group()

    def _described(self, error: BaseException) -> tuple[str, str, bytes | None]:
        """In one line, as a traceback from the program's own first line on, and pickled where that goes."""
        inside = error.__traceback__.tb_next if error.__traceback__ is not None else None
        line = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0][:200]
        text = "".join(traceback.format_exception(type(error), error, inside))
        try:
            return line, text, self._dumps(error)
        except Exception:  # anything, raised by the __reduce__ of whatever it holds
            return line, text, None  # it refers to an object that can't be sent, such as a lock


def _by_path(path: Path) -> ModuleType:
    """A module by the path of its file: by its name, all of its package would be imported."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _listen(connection: Connection, inbox: SimpleQueue[bytes], directory: str) -> None:
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        # The pool ended without notice, and the main thread may wait in a collective for ever.
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)


def _serve(connection: Connection, directory: str) -> None:
    inbox: SimpleQueue[bytes] = SimpleQueue()
    # A thread of its own, so that the end of the pool is noticed whatever a program does.
    Thread(target=_listen, args=(connection, inbox, directory), daemon=True).start()
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the pool requests the traceback of a rank with it
    path, rank, ranks, timeout = pickle.loads(inbox.get())
    sys.path[:] = path
    worker = _Worker(rank, ranks, timeout)
    connection.send_bytes(pickle.dumps((False, ("ready",))))
    while True:
        task, *arguments = pickle.loads(inbox.get())
        answer = worker.meet(*arguments) if task == "meet" else worker.run(*arguments)
        connection.send_bytes(pickle.dumps((worker.worn, answer)))
        if answer[0] == "error":
            worker.leave()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), sys.argv[2])
