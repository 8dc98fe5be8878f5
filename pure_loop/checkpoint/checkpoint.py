"""A checkpoint that was read, before there is a model to fit it to."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor, nn

from pure_loop.checkpoint.document import Document
from pure_loop.checkpoint.weights import saved_weights, with_buffers_of, with_weights
from pure_loop.errors import ArgumentError
from pure_loop.model.model import ModelDef
from pure_loop.state import State

__all__ = ["NOT_STRICT", "Checkpoint"]

NOT_STRICT = "strict=False is for weights alone: a run resumes exactly or not at all; weights_only=True."


@attrs.frozen(eq=False)
class Checkpoint:
    """A checkpoint read whole, before there is a model to fit it to."""

    path: str
    document: Document | None
    tensors: dict[str, Tensor]

    @property
    def name(self) -> str:
        """What ranks compare: whether they have read the same one."""
        return f"{self.path}, saved at {0 if self.document is None else self.document.saved_at}"

    def state(
        self, model: nn.Module, device: torch.device | str | None, *, weights_only: bool = False, strict: bool = True
    ) -> State:
        """The State, of this model's structure."""
        fresh = State.create(model, device=device)
        if self.document is None or weights_only:
            return self.weights_into(fresh, strict=strict)
        if not strict:
            raise ArgumentError(NOT_STRICT)
        return self.into(fresh)

    def into(self, state: State) -> State:
        """The saved State, with the model and on the device of this one."""
        if self.document is None:
            return self.weights_into(state)
        return self.document.state(state.model, self.tensors, state.device, self.path)

    def weights_into(self, state: State, *, strict: bool = True) -> State:
        """The State with the weights that were saved."""
        if self.document is not None:
            state = with_buffers_of(self.document, state, self.tensors, self.path)
        return with_weights(state, saved_weights(self.document, self.tensors, self.path), self.path, strict=strict)

    def fitted(self, model: ModelDef) -> State:
        """The saved State, with this model, in the memory of the computer.

        Raises:
            ResumeError: it was saved with another model; names the leaf.
        """
        assert self.document is not None
        return self.document.state(model, self.tensors, torch.device("cpu"), self.path)
