"""Reading what is being saved beside training: from copies, and on a GPU in the order of its streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.state import State, outside_batch

__all__ = ["snapshot", "streams_of"]


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
