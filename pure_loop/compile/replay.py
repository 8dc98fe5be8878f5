"""CUDA graphs: the launches of a graph's kernels are recorded once, and sent off together from then on.

A recording knows addresses. What lasts (parameters, the optimizer's memory) lies where it lay in the step before, as
long as its memory is donated, and is used where it is. What belongs to the batch is copied to where the recording reads
it. What the graph gives is copied out, because it is a value, and the next replay writes there again.

So torch's own CUDA graph trees don't serve: what they give is overwritten by the next step.

A graph that is known to be no recording isn't tried, because torch's allocator stays in its recording state after one
has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias
from weakref import WeakSet

import optree
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pure_loop.compile._torch import Call, Function, end_allocating_to_pool, prevents_recording
from pure_loop.random.seeds import rng_lock

__all__ = ["Recorders", "Replaying", "device_of_recording", "note_not_recorded"]

# (what is recorded, what it is called with) -> what replays it, what it gives.
Recorder: TypeAlias = Callable[[Call, list[Tensor]], tuple[Callable[[], None], Sequence[Tensor]]]

# Calls with the same addresses, one after the other, that come before one that is recorded: kernels are loaded and
# tuned in them, and a run that keeps every State, which moves the memory at each step, records nothing.
WARM_UP = 2
# Recordings of one graph, for memory here and there.
MOST = 4


class Recorders:
    """What records the graphs of one loop.

    They run one after the other, so that on each device they share the memory of what is only in between.
    """

    def __init__(self) -> None:
        self._found: dict[torch.device, Recorder] = {}

    def of(self, device: torch.device | None) -> Recorder | None:
        """What records that which runs on this device alone; None where nothing does."""
        if device is None or device.type != "cuda":
            return None
        result = self._found.get(device)
        if result is None:
            result = self._found[device] = _Recorder(device)
        return result


class _Recorder:
    """Records calls by CUDA; their kernels don't run meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin_anew()

    def _begin_anew(self) -> None:
        # Torch's own stream for this is of the device that was first to record, and has nothing to do on another one.
        make: Function = torch.cuda.Stream
        self._stream = make(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, call: Call, tensors: list[Tensor]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        # One at a time in a process, without draws meanwhile: CUDA would take either for a part of the recording.
        with rng_lock, torch.cuda.device(self._device):
            if not self._graphs:
                self._begin_anew()  # a pool goes with the last recording in it
            graph = torch.cuda.CUDAGraph()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            # A recording notes in the generator's state that it is under way, and in torch 2.11 one that fails leaves
            # it so, for all that share it. Nothing is drawn in it, so it may have a state of its own.
            own = generator.graphsafe_get_state()
            generator.graphsafe_set_state(own.clone_state())
            try:
                with (
                    # A recording that fails leaves its stream the current one.
                    torch.cuda.stream(torch.cuda.current_stream()),
                    # Other threads, those of a loader that pins batches, may use the device meanwhile.
                    torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                ):
                    outputs = call(tensors)
            except BaseException:
                self._end_allocating()
                raise
            finally:
                generator.graphsafe_set_state(own)
            self._graphs.add(graph)
        return graph.replay, outputs

    def _end_allocating(self) -> None:
        """After a recording that failed: torch's allocator, up to 2.12, would give out its memory for ever."""
        if end_allocating_to_pool is not None:
            with suppress(RuntimeError):  # it has ended: what else this might say, it says of that
                end_allocating_to_pool(torch.cuda.current_device(), self._pool)
        self._begin_anew()


def note_not_recorded(why: str) -> None:
    """Log that a graph is no CUDA graph."""
    log = logging.getLogger("pure_loop.compile")
    log.warning("a graph is launched kernel by kernel, because it can't be a CUDA graph: %s", why)


class Replaying:
    """Machine code, recorded where it is called with the same memory again and again.

    It refers to none of its arguments, which a reference count would show.

    Args:
        call: the machine code: takes a list of tensors, and empties it.
        lasting: which of these are likely to have the same memory in the next call; others are copied.
        record: records a call.
    """

    def __init__(self, call: Call, lasting: Sequence[int], record: Recorder) -> None:
        self._call = call
        self._lasting = list(lasting)
        self._record: Recorder | None = record
        self._others: list[int] = []
        self._last: tuple[int, ...] = ()
        self._repeated = 0
        self._recordings: dict[tuple[int, ...], _Recording] = {}

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        if self._record is None:
            return self._call(tensors)
        addresses = tuple([tensors[i].data_ptr() for i in self._lasting])
        recording = self._recordings.get(addresses)
        if recording is None:
            self._repeated = self._repeated + 1 if addresses == self._last else 0
            self._last = addresses
            if self._repeated < WARM_UP or not self._begin(addresses, tensors):
                return self._call(tensors)
            recording = self._recordings[addresses]
        batch = [tensors[i] for i in self._others]
        tensors.clear()
        return recording.replay(batch)

    def _begin(self, addresses: tuple[int, ...], tensors: list[Tensor]) -> bool:
        """Record a call with these tensors; whether that could be done."""
        assert self._record is not None
        lasting = set(self._lasting)
        self._others = [i for i in range(len(tensors)) if i not in lasting]
        value = list(tensors)
        for i in self._others:
            value[i] = value[i].clone()
        inputs = [value[i] for i in self._others]
        held = {value[i].untyped_storage().data_ptr() for i in self._lasting} - {0}
        try:
            if any(value[i].stride() != tensors[i].stride() for i in self._others):
                raise RuntimeError("a tensor of the batch has elements that share memory, or gaps between them")
            replay, outputs = self._record(self._call, value)
            if any(isinstance(output, Tensor) and output.untyped_storage().data_ptr() in held for output in outputs):
                raise RuntimeError("it gives a part of what it is called with, and would hold it as long as itself")
        # Of a kernel that waits for the device, or allocates in a way of its own, CUDA says so in a RuntimeError.
        except RuntimeError as error:
            note_not_recorded(str(error))
            self._record = None
            self._recordings.clear()
            return False
        if len(self._recordings) == MOST:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[addresses] = _Recording(replay, inputs, outputs)
        logging.getLogger("pure_loop.compile").info("a graph is launched as one CUDA graph from here on")
        return True


class _Recording:
    def __init__(self, replay: Callable[[], None], inputs: list[Tensor], outputs: Sequence[Tensor]) -> None:
        self._replay = replay
        self._inputs = inputs
        self._outputs = outputs

    def replay(self, batch: list[Tensor]) -> list[Tensor]:
        if batch:
            torch._foreach_copy_(self._inputs, batch)
        self._replay()
        return [output.clone() if isinstance(output, Tensor) else output for output in self._outputs]


def device_of_recording(graph: GraphModule) -> tuple[torch.device | None, str | None]:
    """The device on which all of a graph runs, if it can be recorded there; or why it can't, where it is on a GPU."""
    devices: set[torch.device] = set()
    constants: set[Node] = set()
    unsafe: Node | None = None
    is_known = True
    for node in graph.graph.nodes:
        tensors = [leaf for leaf in optree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        if _is_constant(node, tensors, constants):
            constants.add(node)
            continue
        devices.update(tensor.device for tensor in tensors)
        if unsafe is None and node.op == "call_function":
            prevents = prevents_recording(node)
            is_known = is_known and prevents is not None
            unsafe = node if prevents else None
    if not any(device.type == "cuda" for device in devices):
        return (devices.pop() if len(devices) == 1 else None), None
    if len(devices) > 1:
        return None, f"it has tensors on {' and '.join(sorted(map(str, devices)))}"
    if unsafe is not None:
        return None, f"CUDA can't record {unsafe.target}"
    if not is_known:
        return None, "this version of torch doesn't say which operations CUDA can record"
    return devices.pop(), None


def _is_constant(node: Node, tensors: list[Tensor], constants: set[Node]) -> bool:
    """Whether it is a number on the host, written in Python, that kernels of any device have in their code."""
    if not tensors or any(tensor.ndim or not tensor.is_cpu for tensor in tensors):
        return False
    return node.op == "get_attr" or (
        node.op == "call_function" and bool(node.all_input_nodes) and constants.issuperset(node.all_input_nodes)
    )
