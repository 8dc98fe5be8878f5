"""Jobs that run beside training, in order, a few at most; their exceptions are raised by the next call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from pure_loop._internal.processes import in_child

__all__ = ["Background"]


class Background:
    """A thread for jobs, which is there from the first job to :meth:`finish`. A forked child has neither.

    Args:
        limit: how many jobs wait or run at most; :meth:`submit` waits where there are as many.

    Attributes:
        failed: what a job raised last.
    """

    def __init__(self, limit: int = 2) -> None:
        self._limit = limit
        self.failed: Exception | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: deque[Future[None]] = deque()
        in_child(self._forget)

    def _forget(self) -> None:
        self._executor = None
        self._jobs.clear()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after those before it.

        Raises:
            Exception: what one of them raised.
        """
        while len(self._jobs) >= self._limit:
            self._end(self._jobs.popleft())
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pure_loop-checkpoint")
        self._jobs.append(self._executor.submit(job))

    def _end(self, job: Future[None]) -> None:
        try:
            job.result()
        except Exception as error:
            self.failed = error
            raise

    def check(self) -> None:
        """
        Raises:
            Exception: what a job raised that is over.
        """
        while self._jobs and self._jobs[0].done():
            self._end(self._jobs.popleft())

    def wait(self) -> None:
        """Wait for all jobs.

        Raises:
            Exception: what the first that failed raised.
        """
        while self._jobs:
            self._end(self._jobs.popleft())

    def finish(self) -> None:
        """Wait for all jobs, and end the thread.

        Raises:
            Exception: what the first that failed raised.
        """
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)
        try:
            self.wait()
        finally:
            self._jobs.clear()
