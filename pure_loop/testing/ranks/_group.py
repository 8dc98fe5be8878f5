"""A process group without processes: it says what a rank asks for, and hands out the results that are known.

torch's functions call methods of the default group, and its C++ side (functional collectives, DistributedDataParallel)
finds the same methods on a Python subclass, so every collective of a program comes by here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its default arguments are the default group of the moment it is imported
from torch import Tensor
from torch.futures import Future

from pure_loop._internal.reprs import shape_and_dtype
from pure_loop._internal.torch_private import wait_tensor
from pure_loop.testing.ranks._collectives import OPERATIONS, CollectiveError, Tensors, UnsupportedCollectiveError

Flat: TypeAlias = Sequence[Tensor]
Nested: TypeAlias = Sequence[Sequence[Tensor]]


class Left(BaseException):
    """Leaves a program at a collective without a result that is known yet. ``except Exception`` doesn't catch it."""


class Options(Protocol):
    """torch's, of a collective: those that are read."""

    asyncOp: bool  # noqa: N815
    rootRank: int  # noqa: N815
    reduceOp: Any  # noqa: N815  # torch types it without its `op`


class Exchange(Protocol):
    """Where the ranks ask."""

    def ask(self, rank: int, number: int, collective: tuple[object, ...], value: Tensors, wanted: Tensors) -> Tensors:
        """
        Raises:
            Left: the result is not known yet.
            CollectiveError: what the rank asks for doesn't fit what another one, or itself before, asked for.
        """


class Group(dist.ProcessGroup):
    """The process group of one rank.

    Attributes:
        number: how many collectives the rank has asked for since its program began.
        raised: what a collective raised; from then on, whatever the program does about it, every other one does too.
    """

    def __init__(self, exchange: Exchange, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]  # a group needs no store, whatever the stub says
        self._exchange, self._rank, self._ranks = exchange, rank, ranks
        self._name = f"pure_loop-{next(_names)}"
        self._begun: list[_Arrival] = []
        self.number = 0
        self.raised: CollectiveError | type[Left] | None = None

    def begin(self) -> None:
        """The program starts, perhaps again."""
        self.number, self.raised = 0, None
        self._begun.clear()

    def abandon(self) -> None:
        """The program was left. torch keeps what a functional collective gives until it is waited for."""
        for arrival in self._begun:
            for output in arrival.outputs:
                wait_tensor(output)
        self._begun.clear()

    def refuse(self, name: str) -> NoReturn:
        """
        Raises:
            UnsupportedCollectiveError: always, unless the program is only cleaning up.
        """
        self._go_no_further()
        raise UnsupportedCollectiveError(
            f"rank {self._rank} of {self._ranks} calls torch.distributed.{name}, which is not simulated: a program may "
            f"use the collectives of the default group. Run it on real processes: Pool({self._ranks}).run(program)."
        )

    # Plain methods, because the ones of torch take a microsecond or two.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks

    @property
    def group_name(self) -> Any:
        return self._name

    def name(self) -> str:
        return "simulated"  # told that it is gloo, torch's C++ side would look for gloo's sockets

    def _join(
        self,
        kind: str,
        value: Flat,
        outputs: Flat,
        about: Flat,
        options: Options | None = None,
        *,
        op: str | None = None,
        root: int | None = None,
    ) -> dist.Work:
        """Ask for a collective.

        Args:
            kind, op, root: what it is.
            value: what this rank contributes.
            outputs: what is written to.
            about: the tensors that describe it.
            options: torch's; they say whether the program waits here.
        """
        self._go_no_further()
        for tensor in about:
            if not _lies_flat(tensor):
                self._refuse_memory(kind, tensor)
        collective = (kind, tuple([tuple(x.shape) for x in about]), tuple([x.dtype for x in about]), op, root)
        number = self.number
        self.number += 1
        outputs = tuple(outputs)
        try:
            results = self._exchange.ask(self._rank, number, collective, tuple(value), outputs)
        except Left:
            # The class: an exception would keep the frames of the program, which have to go.
            self.raised = Left
            raise
        except CollectiveError as error:
            self.raised = error
            raise
        if options is not None and options.asyncOp:
            arrival = _Arrival(outputs, results)
            self._begun.append(arrival)
            return arrival
        _write(outputs, results)
        return _ARRIVED

    def _go_no_further(self) -> None:
        if self.raised is not None:
            raise self.raised

    def _need(self, holds: bool, kind: str, but: str) -> None:
        self._go_no_further()
        if not holds:
            self.raised = CollectiveError(f"rank {self._rank} of {self._ranks} calls {kind}, but {but}.")
            raise self.raised

    def _refuse_memory(self, kind: str, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise UnsupportedCollectiveError(f"{kind} of a {tensor.layout} tensor is not simulated: give a dense one.")
        self._need(
            False,
            kind,
            f"{_shown(tensor)} with strides {tensor.stride()} is not contiguous: NCCL refuses it, and gloo mixes up "
            "its numbers. Give x.contiguous(), and copy the result back",
        )

    def _op(self, options: Options | None) -> str:
        assert options is not None
        op = OPERATIONS.get(options.reduceOp.op)
        if op is None:
            listed = ", ".join(OPERATIONS.values())
            raise UnsupportedCollectiveError(f"{options.reduceOp.op} is not simulated; what is: {listed}.")
        return op

    def _parts(self, kind: str, tensor: Tensor, part: Tensor) -> Tensors:
        """A tensor that holds something for every rank, as one view a rank."""
        fits = tensor.numel() == part.numel() * self._ranks and tensor.dtype == part.dtype
        self._need(fits, kind, f"{_shown(tensor)} is not {self._ranks} times {_shown(part)}")
        self._need(tensor.is_contiguous(), kind, f"{_shown(tensor)} is not contiguous")
        return tensor.detach().view(self._ranks, *part.shape).unbind()

    def _one_a_rank(self, kind: str, many: Flat, part: Tensor | None = None) -> None:
        self._need(len(many) == self._ranks, kind, f"a list holds {len(many)} tensors for {self._ranks} ranks")
        for item in many if part is not None else ():
            fits = part is not None and item.shape == part.shape and item.dtype == part.dtype
            self._need(fits, kind, f"its list holds {_shown(item)}, where {_shown(part)} goes in or comes out")

    # What torch calls.

    def _all_reduce(self, tensors: Flat, options: Options | None = None) -> dist.Work:
        return self._join("all_reduce", tensors, tensors, tensors, options, op=self._op(options))

    def _reduce(self, tensors: Flat, options: Options) -> dist.Work:
        outputs = tensors if options.rootRank == self._rank else ()
        return self._join("reduce", tensors, outputs, tensors, options, op=self._op(options), root=options.rootRank)

    def _broadcast(self, tensors: Flat, options: Options) -> dist.Work:
        # What the others hold is about to be overwritten, and may never have been filled.
        value = tensors if options.rootRank == self._rank else ()
        return self._join("broadcast", value, tensors, tensors, options, root=options.rootRank)

    def _all_gather(self, outputs: Nested, inputs: Flat, options: Options | None = None) -> dist.Work:
        for many, tensors in zip(outputs, inputs, strict=True):
            self._one_a_rank("all_gather", many, tensors)
        return self._join("all_gather", inputs, _flat(outputs), inputs, options)

    def _all_gather_into_tensors(self, outputs: Flat, inputs: Flat, options: Options | None = None) -> dist.Work:
        kind = "all_gather_into_tensor"
        parts = [self._parts(kind, output, tensors) for output, tensors in zip(outputs, inputs, strict=True)]
        return self._join(kind, inputs, _flat(parts), inputs, options)

    def _reduce_scatter(self, outputs: Flat, inputs: Nested, options: Options | None = None) -> dist.Work:
        for output, many in zip(outputs, inputs, strict=True):
            self._one_a_rank("reduce_scatter", many, output)
        value = _flat(inputs)
        return self._join("reduce_scatter", value, outputs, value, options, op=self._op(options))

    def _reduce_scatter_tensors(self, outputs: Flat, inputs: Flat, options: Options | None = None) -> dist.Work:
        kind = "reduce_scatter_tensor"
        parts = [self._parts(kind, tensors, output) for output, tensors in zip(outputs, inputs, strict=True)]
        return self._join(kind, _flat(parts), outputs, inputs, options, op=self._op(options))

    def _all_to_all(self, outputs: Flat, inputs: Flat, options: Options | None = None) -> dist.Work:
        self._one_a_rank("all_to_all", inputs)
        self._one_a_rank("all_to_all", outputs)
        return self._join("all_to_all", inputs, outputs, inputs, options)

    def _all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        options: Options | None = None,
    ) -> dist.Work:
        kind, pieces = "all_to_all_single", []
        for tensor, splits in ((input, input_splits), (output, output_splits)):
            sizes = list(splits) or [len(tensor) // self._ranks] * self._ranks
            fits = len(sizes) == self._ranks and sum(sizes) == len(tensor)
            self._need(fits, kind, f"{len(tensor)} rows don't split into {sizes} for {self._ranks} ranks")
            pieces.append(torch.split(tensor.detach(), sizes))
        return self._join(kind, pieces[0], pieces[1], (input,), options)

    def _gather(self, outputs: Nested, inputs: Flat, options: Options) -> dist.Work:
        for many in outputs:
            self._one_a_rank("gather", many, inputs[0])
        return self._join("gather", inputs, _flat(outputs), inputs, options, root=options.rootRank)

    def _scatter(self, outputs: Flat, inputs: Nested, options: Options) -> dist.Work:
        for many in inputs:
            self._one_a_rank("scatter", many, outputs[0])
        return self._join("scatter", _flat(inputs), outputs, outputs, options, root=options.rootRank)

    def _barrier(self, opts: Options | None = None) -> dist.Work:
        return self._join("barrier", (), (), (), opts)

    def _monitored_barrier(self, timeout: object = None, wait_all_ranks: bool = False) -> None:
        self._join("monitored_barrier", (), (), ())


def _refusing(name: str) -> Callable[..., object]:
    return lambda self, *args, **kwargs: self.refuse(name)


def _of_one(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """The method of several tensors, for one."""
    return lambda self, target, source, options=None: method(self, [target], [source], options)


# By the names that torch looks for, before 2.13 and since.
_METHODS: dict[str, Callable[..., object]] = {
    "getBackendName": Group.name,
    "allreduce": Group._all_reduce,
    "allreduce_coalesced": Group._all_reduce,
    "reduce": Group._reduce,
    "broadcast": Group._broadcast,
    "allgather": Group._all_gather,
    "_allgather_base": _of_one(Group._all_gather_into_tensors),
    "all_gather_single": _of_one(Group._all_gather_into_tensors),
    "allgather_into_tensor_coalesced": Group._all_gather_into_tensors,
    "all_gather_single_coalesced": Group._all_gather_into_tensors,
    "reduce_scatter": Group._reduce_scatter,
    "_reduce_scatter_base": _of_one(Group._reduce_scatter_tensors),
    "reduce_scatter_single": _of_one(Group._reduce_scatter_tensors),
    "reduce_scatter_tensor_coalesced": Group._reduce_scatter_tensors,
    "reduce_scatter_single_coalesced": Group._reduce_scatter_tensors,
    "alltoall": Group._all_to_all,
    "alltoall_base": Group._all_to_all_single,
    "all_to_all_single": Group._all_to_all_single,
    "gather": Group._gather,
    "scatter": Group._scatter,
    "barrier": Group._barrier,
    "monitored_barrier": Group._monitored_barrier,
    "send": _refusing("send"),
    "recv": _refusing("recv"),
    "recv_anysource": _refusing("recv"),
    "gather_single": _refusing("gather_single"),
    "allgather_coalesced": _refusing("all_gather_coalesced"),
    "new_group": _refusing("new_group"),
    "split_group": _refusing("split_group"),
    "merge_remote_group": _refusing("merge_remote_group"),
    "shutdown": _refusing("destroy_process_group"),
    "abort": _refusing("destroy_process_group"),
    "_start_coalescing": _refusing("_coalescing_manager with a device"),
    "_end_coalescing": _refusing("_coalescing_manager with a device"),
}
for _name, _method in _METHODS.items():
    setattr(Group, _name, _method)

_names = count()


class _Arrival(dist.Work):
    """A result that is written when it is waited for: a program that forgets to wait reads what was there before."""

    def __init__(self, outputs: Tensors, results: Tensors) -> None:
        super().__init__()
        self.outputs, self._results = outputs, results

    def _written(self) -> list[Tensor]:
        results, self._results = self._results, ()
        if results:
            _write(self.outputs, results)
        return list(self.outputs)

    def wait(self, timeout: object = None) -> bool:
        self._written()
        return True

    def is_completed(self) -> bool:
        return self.wait()

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._written()

    def result(self) -> list[Tensor]:
        return self._written()

    def get_future(self) -> Any:
        future: Any = Future()
        future.set_result(self._written())
        return future


_ARRIVED = _Arrival((), ())


def _write(outputs: Tensors, results: Tensors) -> None:
    for output, result in zip(outputs, results, strict=True):
        # Through `.data`: no backend tells autograd that it writes, and a program has to live with that.
        output.data.copy_(result if result.shape == output.shape else result.view(output.shape))


def _flat(lists: Nested) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _shown(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else shape_and_dtype(tensor)


def _lies_flat(tensor: Tensor) -> bool:
    """Whether its numbers fill a piece of memory: backends read that from one end to the other."""
    return tensor.layout is torch.strided and (
        tensor.is_contiguous()
        or tensor.is_contiguous(memory_format=torch.channels_last)
        or tensor.is_contiguous(memory_format=torch.channels_last_3d)
    )
