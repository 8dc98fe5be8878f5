"""Files of weights alone, as other libraries have them: tensors by the names of ``state_dict()``, and no digest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from pure_loop._internal.tree_ops import full_tensor
from pure_loop.checkpoint import container
from pure_loop.checkpoint.base import Base, refuse_no_base, take_out_base
from pure_loop.checkpoint.container import CODES
from pure_loop.checkpoint.document import WEIGHTS_KEY, describe_weights
from pure_loop.checkpoint.storage import storage_of
from pure_loop.checkpoint.weights import not_in_state_dict
from pure_loop.errors import ArgumentTypeError
from pure_loop.state import State

if TYPE_CHECKING:
    from pure_loop.checkpoint.coordination import Coordinator

__all__ = ["Weights", "refuse_unwritable"]


@attrs.frozen(eq=False)
class Weights:
    """The weights of a State, as a file has them.

    Attributes:
        state: whose weights they are.
        tensors: parameters and those buffers that ``state_dict()`` has, of tied ones the first name.
        base: frozen parameters that are left out.
    """

    state: State
    tensors: dict[str, Tensor]
    base: Base

    @classmethod
    def of(cls, state: State, *, trained_only: bool = False) -> Weights:
        """The weights of a State; if it is sharded, unsharded, and all ranks call this together.

        Raises:
            ArgumentError: with ``trained_only``, nothing can be left out.
            ArgumentTypeError: a weight has a dtype that the format lacks; names it.
        """
        if trained_only:
            refuse_no_base(state)
        refuse_unwritable(state)
        hidden = not_in_state_dict(state.model)
        tensors = {
            name: full_tensor(value.detach()).resolve_conj().resolve_neg()
            for name, value in (*state.params.items(), *state.buffers.items())
            if name not in hidden
        }
        base: Base = {}
        if trained_only:
            left = {f"params.{name}": tensors[name].contiguous() for name in state.params}
            base = take_out_base(state, {name: {"tensor": f"params.{name}"} for name in state.params}, left)
            for key in base:
                del tensors[key.removeprefix("params.")]
        return cls(state, tensors, base)

    def write(self, path: str, notes: Mapping[str, Any] | None = None) -> None:
        """Write the file, whole or not at all."""
        metadata = {WEIGHTS_KEY: describe_weights(self.state, notes, self.base), "format": "pt"}
        with storage_of(path).writing() as file:
            tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
            container.write(file, tensors, metadata, digested=False)

    def write_together(self, coordinator: Coordinator, path: str, notes: Mapping[str, Any] | None = None) -> None:
        """Write the file on rank 0; all ranks call it, and when it returns, on any of them, the file is there.

        Raises:
            DistributedError: rank 0 couldn't write it.
        """

        def write() -> None:
            if coordinator.rank == 0:
                self.write(path, notes)

        coordinator.round(path, write, lambda by_rank: [None] * len(by_rank))


def refuse_unwritable(state: State) -> None:
    """
    Raises:
        ArgumentTypeError: a weight has a dtype that the format lacks; names it.
    """
    for field, values in (("params", state.params), ("buffers", state.buffers)):
        for name, value in values.items():
            if value.dtype not in CODES:
                raise ArgumentTypeError(
                    f"state.{field}[{name!r}] has dtype {value.dtype}, which the safetensors format lacks: save the "
                    "whole State, without weights_only."
                )
