"""``microbatch_size="auto"``: the size is halved until a batch fits into memory.

A batch is tried before its BATCH_START: everything between that event and AFTER_TRAIN_BATCH is computed on a branch of
the State, with the algorithms, and the result is dropped. If that runs out of memory, it is tried with half the size.
Then the batch is run with the size that was found, so that each of its events comes once, and its State is that of a
run with this size. Algorithms are pure, which is why they can be called for a result that is dropped.

A batch that is no larger than one that was tried, in any dimension of its tensors, is not tried.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import attrs
import torch

from pure_loop._internal.closing import closing
from pure_loop._internal.pytree import Batch
from pure_loop.data.batch import tensors_in
from pure_loop.data.group import parts_of
from pure_loop.event import Event
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.call import Feed, Fit, Graphs, Stopwatch, Strategy
from pure_loop.loop.driver import Script, drive
from pure_loop.loop.training import Eager
from pure_loop.stages.settings import NAME, found_size
from pure_loop.stages.workspace import Workspace
from pure_loop.state import State

Extent = tuple[int, ...]

# Of batches that survived, none of which covers another one. More are seldom needed than shapes have dimensions.
_KEPT = 16

# What torch's allocators, and libraries on a GPU, say in a RuntimeError of no class of its own.
_OF_MEMORY = (
    *("out of memory", "not enough memory", "can't allocate memory", "Cannot allocate memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a device, or of the host, is exhausted.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    True
    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ..."))
    True
    >>> is_out_of_memory(RuntimeError("size mismatch"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_MEMORY)


@attrs.define
class AutoSize:
    """Batches that are tried first, and then computed in microbatches of a size that fits.

    Attributes:
        stages: those of the loop; their ``found`` is written to.
        strategy: how batches are computed.
        survived: the extents of batches that were tried.
    """

    stages: LoopStages
    strategy: Strategy
    survived: list[Extent] = attrs.field(factory=list)

    @property
    def graphs(self) -> Graphs | None:
        return self.strategy.graphs

    @property
    def uncompiled(self) -> AutoSize:
        return attrs.evolve(self, strategy=self.strategy.uncompiled)

    def feed(self, batches: Feed) -> Feed:
        return self.strategy.feed(batches)

    def steps_ahead(self, state: State, fit: Fit, batches: Feed, stopwatch: Stopwatch) -> State:
        return self.strategy.steps_ahead(state, fit, batches, stopwatch)

    def batch(self, state: State, fit: Fit, samples: int, tokens: int, seconds: Callable[[], float]) -> Script:
        if self.changes(state, fit):
            state = state.replace(algorithm_state={**state.algorithm_state, NAME: self.stages.size})
        return self.strategy.batch(state, fit, samples, tokens, seconds)

    def close(self) -> None:
        self.strategy.close()

    def changes(self, state: State, fit: Fit) -> bool:
        """Find the size for the batch of a State; whether it is another one than the State keeps.

        Raises:
            torch.OutOfMemoryError, RuntimeError: one sample a forward is too much; a note says what was tried.
        """
        stages, chosen = self.stages, self.stages.found
        assert chosen is not None
        chosen.size = size = found_size(state)
        extents = [(stages.task.samples(part), *_sizes(part)) for part in parts_of(state.batch)]
        samples = max(extent[0] for extent in extents)
        unknown: float = not all(any(_covers(past, extent) for past in self.survived) for extent in extents)
        # A rank that tries its part may fail, and all have to halve.
        unknown, samples = map(int, stages.engine.largest((unknown, samples), state))
        if not unknown:
            return False
        chosen.size = self._halved(state, fit, samples, size)
        for extent in extents:
            self.survived = [*[past for past in self.survived if not _covers(extent, past)][1 - _KEPT :], extent]
        return chosen.size != size

    def _halved(self, state: State, fit: Fit, samples: int, size: int | None) -> int | None:
        """The size, halved as often as the batch does not fit."""
        engine, tried = self.stages.engine, list[int]()
        while True:
            error = self.out_of_memory(state, fit, size)
            (failed,) = engine.largest((error is not None,), state)
            if not failed:
                return size
            number = samples if size is None else min(size, samples)
            tried.append(number)
            if number <= 1:
                self._refuse(state, error, samples, tried)
                return size  # another rank has the error, and tells this one
            size = -(-number // 2)

    def out_of_memory(self, state: State, fit: Fit, size: int | None) -> Exception | None:
        """The error of a batch that does not fit in microbatches of this size, without its frames; None: it fits.

        Args:
            state: the State of AFTER_DATALOADER.
            fit: the call.
            size: samples of a forward, at most; None: the whole batch.
        """
        # By itself: a rank that fails must not leave another one waiting for its gradients.
        stages = attrs.evolve(
            self.stages,
            microbatch_size=size,
            found=None,
            engine=self.stages.engine.single_rank(),
            workspace=Workspace(),
        )
        script = Eager().batch(state, attrs.evolve(fit, stages=stages), 0, 0, lambda: 0.0)
        result: Exception | None = None
        try:
            with closing(drive(script, stages.handlers, stages=stages, watch={Event.AFTER_TRAIN_BATCH})) as pairs:
                next(pairs)
        except Exception as error:
            # Any other error comes again when the batch is run, after the events before it.
            if is_out_of_memory(error):
                # Its frames, and those of an error that it was raised in the handling of, hold the tensors.
                result = error.with_traceback(None)
                result.__context__ = result.__cause__ = None
        if result is not None:
            gc.collect()  # what is in cycles
            if state.device.type != "cpu" and torch.accelerator.is_available():
                torch.accelerator.memory.empty_cache()
        return result

    def _refuse(self, state: State, error: Exception | None, samples: int, tried: list[int]) -> None:
        if error is None:
            return
        sizes = ", ".join(map(str, tried))
        error.add_note(
            f'microbatch_size="auto": batch {state.timestamp.batch} of {samples} samples ran out of memory in '
            f"microbatches of {sizes}. A smaller size there is not: the model, its optimizer state or one sample is "
            'too large for this device. precision="amp_bf16", checkpointed layers (torch.utils.checkpoint) or '
            'parallel="shard" need less.'
        )
        raise error


@attrs.define
class LargestSize(AutoSize):
    """Finds the largest size instead of the first that fits, by bisection."""

    def changes(self, state: State, fit: Fit) -> bool:
        engine, chosen = self.stages.engine, self.stages.found
        assert chosen is not None
        (most,) = map(int, engine.largest((self.stages.task.samples(state.batch),), state))
        fits, fails, size, tried = 0, most + 1, most, list[int]()
        while fits + 1 < fails:
            error = self.out_of_memory(state, fit, size)
            tried.append(size)
            (failed,) = engine.largest((error is not None,), state)
            fits, fails = (fits, size) if failed else (size, fails)
            if fails == 1:
                self._refuse(state, error, most, tried)
                engine.largest((0,), state)  # another rank has the error, which is raised here, too
            size = (fits + fails) // 2
        chosen.size = fits
        return True


def _sizes(batch: Batch) -> Extent:
    """The dimensions of the tensors of a batch, in which another one may be larger."""
    return tuple(size for tensor in tensors_in(batch) for size in tensor.shape)


def _covers(a: Extent, b: Extent) -> bool:
    """Whether a batch of one extent is at least as large as one of the other in every dimension."""
    return len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True))
