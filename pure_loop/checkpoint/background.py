"""Checkpoints that are written beside training, in order, a few at most; exceptions are raised by the next call.

What is written is read from copies, or from the State itself, on a GPU in the order of its streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

import optree
import torch
from torch import Tensor

from pure_loop._internal.processes import in_child
from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.checkpoint.coordination import Coordinator
from pure_loop.checkpoint.files import write_state
from pure_loop.checkpoint.run_folder import RunFolder, Saved
from pure_loop.checkpoint.selection import Contents
from pure_loop.checkpoint.weights import Weights
from pure_loop.stages.workspace import protect
from pure_loop.state import State, outside_batch


class Background:
    """A thread for jobs, which is there from the first job to :meth:`close`. A forked child has neither.

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

    def close(self) -> None:
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


class StateWriter(Background):
    """Writes checkpoints to the folder of a run, and removes from it what needn't be kept.

    Args:
        folder: where to.
        contents: what is written.
        beside: whether a thread writes while training continues.

    Attributes:
        coordinator: where the ranks that hold parts of the State meet; None: it is not sharded.
    """

    def __init__(self, folder: RunFolder, contents: Contents, *, beside: bool) -> None:
        super().__init__()
        self._folder, self._contents, self._beside = folder, contents, beside
        self.coordinator: Coordinator | None = None

    def save(self, state: State, notes: Callable[[State], dict[str, object]], *, first: bool) -> str:
        """Begin to save a State; the path of what is written.

        Args:
            state: which one.
            notes: what is noted of it; called where the State can be read.
            first: whether this is rank 0, which has the folder in its charge.

        Raises:
            Exception: what a job before this one raised.
        """
        coordinator, folder, contents = self.coordinator, self._folder, self._contents
        state, left = contents.of(state)
        name = folder.name_of(state, parts=coordinator is not None and not contents.weights_only)
        path = folder.path_of(name)
        # All ranks gather here, because collectives of a thread would meet those of training.
        gathered = Weights.of(state) if contents.weights_only and coordinator is not None else None
        # Taken out of it by the job, so that the State is unaliased as soon as it is copied.
        waiting = [(state, protect(state))]
        streams = _streams_of(state)

        def job() -> None:
            state, release = waiting.pop()
            try:
                if self._beside:
                    original, state = state, _snapshot(state, but_frozen=contents.trained_only)
                    if state is not original:
                        release()
                    del original
                with streams:
                    noted, weights = {**notes(state), **left}, gathered
                    if contents.weights_only and weights is None:
                        weights = Weights.of(state, trained_only=contents.trained_only)
                    write_state(
                        state, path, noted, trained_only=contents.trained_only, weights=weights, coordinator=coordinator
                    )
                if first:
                    score = noted.get("score")
                    folder.add(Saved(name, state.timestamp.batch, score if isinstance(score, float) else None))
            except Exception as error:
                error.add_note(f"raised while {path} was saved")
                raise
            finally:
                release()

        self.submit(job)
        if not self._beside:
            self.wait()
        return path


def _snapshot(state: State, *, but_frozen: bool = False) -> State:
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

    def copied(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone()
        return copies[id(leaf)]

    durable: PyTree = outside_batch(state).replace(event=state.event)
    tree: PyTree = optree.tree_map(copied, durable, namespace=NAMESPACE)
    snapshot: State = tree
    return snapshot


def _streams_of(state: State) -> AbstractContextManager[None]:
    """In which another thread reads this State: behind all that this thread has had GPUs compute so far.

    A thread begins on the default stream, which doesn't wait for that which ``torch.cuda.stream`` made current here.
    """
    devices = {param.device for param in state.params.values() if param.is_cuda}
    return _on([torch.cuda.current_stream(device) for device in devices])


@contextmanager
def _on(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield
