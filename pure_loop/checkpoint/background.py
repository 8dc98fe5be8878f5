"""Jobs that run beside training, in order, a few at most; their exceptions are raised by the next call.

They read copies of what is being saved, or the State itself, on a GPU in the order of its streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._internal.processes import in_child
from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.state import State, outside_batch

__all__ = ["Background", "snapshot", "streams_of"]


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


def snapshot(state: State, *, but_frozen: bool = False) -> State:
    """The State with copies of its tensors, but for what belongs to a batch.

    Args:
        state: which one.
        but_frozen: whether frozen parameters, which no step writes to, stay the same tensors.

    The forward and the backward after a save only read the parameters. A thread that copies them meanwhile, and lets go
    of the State, is done before the update, which then writes in place as at every other step. On an accelerator, where
    memory is scarce, and of tensors in parts nothing is copied.
    """
    if state.device.type != "cpu" or are_sharded(state.params):
        return state
    # A tensor that stands in two places is one in the copy, too.
    copies: dict[int, Tensor] = {}
    if but_frozen:
        trained = frozenset(state.model.trainable)
        copies |= {id(tensor): tensor for name, tensor in state.params.items() if name not in trained}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone()
        return copies[id(leaf)]

    durable: Any = outside_batch(state).replace(event=state.event)
    result: Any = optree.tree_map(copied, durable, namespace=NAMESPACE)
    return result  # type: ignore[no-any-return]


def streams_of(state: State) -> AbstractContextManager[None]:
    """In which another thread reads this State: behind all that this thread has had GPUs compute so far.

    A thread begins on the default stream, which doesn't wait for that which ``torch.cuda.stream`` made current here.
    """
    devices = {param.device for param in state.params.values() if param.is_cuda}
    current: Any = torch.cuda.current_stream
    return _on([current(device) for device in devices])


@contextmanager
def _on(streams: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield
