"""Loops take turns: how one is run for some steps, and what CPU time that was.

A loop that we write is a generator. A trainer that owns its loop runs in a thread of its own, and is stopped in its
callback after each batch; the CPU time of a turn is taken between two callbacks, inside that thread, so handing over
does not count. It is that of the whole process, in which nothing else runs meanwhile: a trainer's own threads count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Protocol

import torch

__all__ = ["InThread", "OfGenerator", "Steps", "Turns"]

# Yields how many steps it made since it last yielded.
Steps = Generator[int, None, None]


class Turns(Protocol):
    """A loop that stands still between its turns."""

    def run(self, steps: int) -> tuple[float, int]:
        """Make so many steps, or a few more; CPU seconds, and how many they were."""

    def close(self) -> None: ...


class OfGenerator:
    """The turns of a generator of steps."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def run(self, steps: int) -> tuple[float, int]:
        done, begin = 0, time.process_time()
        while done < steps:
            done += next(self._steps)
        return time.process_time() - begin, done

    def close(self) -> None:
        self._steps.close()


class _Stop(BaseException):
    """Ends a trainer from inside its callback; no trainer catches what is not an Exception, but to clean up."""


class InThread:
    """The turns of a trainer that owns its loop: ``train(tick)`` trains for ever and calls ``tick`` after each step."""

    def __init__(self, train: Callable[[Callable[[], None]], None]) -> None:
        self._train = train
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._left = self._steps = 1
        self._begin = self._seconds = 0.0
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def run(self, steps: int) -> tuple[float, int]:
        if self._thread.ident is None:
            steps = 1  # the first turn is one step, with all that comes before
            self._thread.start()
        else:
            self._steps = steps
            self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._seconds, steps

    def close(self) -> None:
        if self._thread.is_alive():
            self._closing = True
            self._go.release()
            self._thread.join()

    def _tick(self) -> None:
        self._left -= 1
        if self._left:
            return
        self._seconds = time.process_time() - self._begin
        self._done.release()
        self._go.acquire()
        if self._closing:
            raise _Stop
        self._left = self._steps
        self._begin = time.process_time()

    def _work(self) -> None:
        torch.set_num_threads(1)  # OpenMP asks every thread anew
        try:
            self._train(self._tick)
            raise RuntimeError("it came to an end")
        except _Stop:
            pass
        except BaseException as error:
            self._error = error
            self._done.release()
