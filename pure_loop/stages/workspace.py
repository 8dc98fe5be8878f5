"""The workspace of a stream: the only thing of it that changes. What a step may write to stays where it is.

The leaves of autograd share the memory of the parameters and stand in a private module. While the mapping of the
parameters is the same, so are they: after a step in place nothing has to be bound anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optree
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.records import set_class
from pure_loop._internal.tree_ops import unaliased
from pure_loop.frozendict import FrozenDict, Overwritten, OverwrittenValue
from pure_loop.stages.ownership import Ownership, overwritten_by
from pure_loop.stages.references import are_torchs, has_tensors
from pure_loop.state import State, lend, raw_opt_state, raw_params, with_fields

if TYPE_CHECKING:
    from pure_loop.model.model import ModelDef
    from pure_loop.optim import Optimizer

__all__ = ["Workspace", "protect"]


class Workspace:
    """Where the tensors of a stream are.

    Args:
        ownership: decides where a step may write; None: it copies.
    """

    __slots__ = ("ownership",)

    def __init__(self, ownership: Ownership | None = None) -> None:
        self.ownership = ownership

    def went_through(self, model: ModelDef, leaves: FrozenDict[str, Tensor], *, lent: bool) -> None:
        """A forward went through these leaves; ``lent``: code of the user's was in it, which may keep one."""
        if lent:
            model.show()
        if model.was_shown:
            lend(leaves)
        if self.ownership is not None:
            self.ownership.observed = True
            if leaves.holder is not None:
                self.ownership.stand_in(leaves.holder, leaves)

    def take_gradients(self, state: State) -> bool:
        """Whether the gradients of a State may be written to; the State has none any more then."""
        return self.ownership is not None and self.ownership.take(state, "grads")

    def made(self, state: State, *, lent: bool = False) -> None:
        """The stream has made the parameters and the optimizer state of this State for itself.

        ``lent``: code of the user's was in it, which may keep them.
        """
        if self.ownership is not None:
            self.ownership.adopt(state)
            if lent:
                lend(raw_params(state))
                lend(raw_opt_state(state))

    def begins_with(self, state: State) -> State:
        """A fresh start: parameters and optimizer state are the stream's own, unless an algorithm put others there.

        What algorithms keep of them, as an average that begins with the parameters, is copied: the first step would
        have to copy parameters and optimizer state else, which is more, and with a graph in memory beside it.
        """
        params, memory, memories = raw_params(state), raw_opt_state(state), state.algorithm_state
        trained = [*state.model.trained(params).values(), *optree.tree_leaves(memory, namespace=NAMESPACE)]
        if self.ownership is None or not are_torchs([*params.values(), *trained]):
            return state
        self.made(state, lent=True)
        copies = unaliased(memories, trained)
        return state if copies is memories else with_fields(state, algorithm_state=copies)

    def fits(self, optimizer: Optimizer, memory: PyTree, params: FrozenDict[str, Tensor]) -> bool:
        """What ``optimizer.fits`` says of them: asked once, while the same mappings are written to."""
        if optimizer.fits is None or self.ownership is None:
            return False
        if self.ownership.fits is None:
            self.ownership.fits = optimizer.fits(memory, params)
        return self.ownership.fits

    def writable(self, state: State) -> tuple[FrozenDict[str, Tensor], Any] | None:
        """Parameters and optimizer state, to be written to; the State has none any more. None: copy them."""
        ownership = self.ownership
        if ownership is None:
            return None
        params, memory = raw_params(state), raw_opt_state(state)
        if ownership.take(state, "params", "opt_state"):
            return params, memory
        if not ownership.takes_kept(state) or getattr(params, "readers", None):
            return None
        # What an algorithm keeps in the State is no State of the past.
        memories: Any = state.algorithm_state
        kept: list[Any] = optree.tree_leaves(
            memories, is_leaf=lambda tree: tree is params or tree is memory, namespace=NAMESPACE
        )
        leaves = ownership.leaves_of(params)
        if any(leaf is params or leaf is memory for leaf in kept) or not ownership.has_tensors_alone(state, leaves):
            return None
        # If something else refers to one of these mappings, it finds that overwritten.
        batch = state.timestamp.batch
        if leaves is not None:
            state.model.unbind()
            _overwritten(leaves, "params", batch)
        return _overwritten(params, "params", batch), _overwritten(memory, "opt_state", batch)


def _overwritten(value: object, field: str, batch: int) -> Any:
    """Another mapping with the same tensors; to read this one, or one in it, is an error, through any reference."""
    if type(value) is not FrozenDict or not has_tensors(value):
        return value  # numbers, which other States may share
    result = FrozenDict((name, _overwritten(item, field, batch)) for name, item in value.items())
    what = overwritten_by(field, batch)
    for name in value:  # which a view, an iterator or a method of it may read
        dict.__setitem__(value, name, OverwrittenValue(field, what))
    set_class(value, Overwritten).lent = field, what
    return result


_lock = threading.Lock()


def protect(state: State) -> Callable[[], None]:
    """See to it that no step takes the tensors of this State, with ``donate=True`` either: they are being read.

    Returns:
        What to call when they aren't any more, in any thread.
    """
    params, reader = raw_params(state), object()
    with _lock:
        readers = params.readers = getattr(params, "readers", set())
        readers.add(reader)
    lend(params)
    return lambda: readers.discard(reader)
