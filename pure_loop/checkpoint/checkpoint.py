"""A checkpoint that was read, before there is a model to fit it to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import attrs
import torch
from torch import Tensor, nn

from pure_loop.checkpoint.base import BaseTensor, verified_base
from pure_loop.checkpoint.document import Document, Shaped
from pure_loop.checkpoint.selection import ALL, Selection, without_excluded
from pure_loop.checkpoint.weights import all_names, saved_weights, with_buffers_of, with_weights
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.buffers import UNALTERED
from pure_loop.model.model import ModelDef
from pure_loop.state import State

__all__ = ["NOT_RENAMED", "NOT_STRICT", "Checkpoint"]

NOT_RENAMED = "rename is for weights alone: a run resumes with its own names; weights_only=True."

NOT_STRICT = "strict=False is for weights alone: a run resumes exactly or not at all; weights_only=True."


@attrs.frozen(eq=False)
class Checkpoint:
    """A checkpoint read whole, before there is a model to fit it to.

    Attributes:
        path: of the file or folder.
        document: the description of its State; None: it has weights alone.
        tensors: by name.
        weights: the description of weights that were saved alone; None: of another origin, or of a State.
    """

    path: str
    document: Document | None
    tensors: dict[str, Tensor]
    weights: Document | None = None

    @property
    def name(self) -> str:
        """What ranks compare: whether they have read the same one."""
        return f"{self.path}, saved at {0 if self.document is None else self.document.saved_at}"

    def state(
        self,
        model: nn.Module,
        device: torch.device | str | None,
        *,
        weights_only: bool = False,
        strict: bool = True,
        selection: Selection = ALL,
    ) -> State:
        """The State, of this model's structure."""
        if self.weights is not None and not weights_only:
            raise ResumeError(
                f"{self.path} has weights alone, of batch {self.weights.batch}: it was saved with weights_only=True, "
                "and lacks the optimizer state, the algorithm state and the timestamp, which training resumes from. "
                "For a State that starts with these weights, pl.load(path, model=model, weights_only=True)."
            )
        fresh = State.create(model, device=device)
        if self.document is None or weights_only:
            return self.weights_into(fresh, strict=strict, selection=selection)
        if not strict:
            raise ArgumentError(NOT_STRICT)
        if selection.rename is not None:
            raise ArgumentError(NOT_RENAMED)
        return self.without(selection.exclude).into(fresh)

    def without(self, exclude: Iterable[str]) -> Self:
        """The checkpoint without some of its fields, which then begin anew."""
        document = self.document
        if document is None or not exclude:
            return self
        fields = without_excluded(document.fields, exclude, self.path)
        return attrs.evolve(self, document=attrs.evolve(document, fields=fields, is_whole=False))

    def into(self, state: State) -> State:
        """The saved State, with the model and on the device of this one."""
        if self.document is None:
            return self.weights_into(state)
        tensors = self.tensors
        if self.document.base:
            base = verified_base(self.document.base, state, self.path)
            tensors = {**tensors, **{key: plain for key, (_, plain) in base.items()}}
        return self.document.state(state.model, tensors, state.device, self.path)

    def weights_into(self, state: State, *, strict: bool = True, selection: Selection = ALL) -> State:
        """The State with the weights that were saved."""
        document, path = self.document or self.weights, self.path
        weights = saved_weights(self.document, self.tensors, path)
        base: dict[str, BaseTensor] = {}
        altered = UNALTERED
        if document is not None:
            base, altered = {key.removeprefix("params."): item for key, item in document.base.items()}, document.altered
        new = selection.renamed(dict.fromkeys([*weights, *base, *altered]), path)
        selection.refuse_unmatched([*new.values(), *all_names(state.model)], path)
        weights = {new[name]: tensor for name, tensor in weights.items()}
        if strict and base:
            needed = {f"params.{new[name]}": item for name, item in base.items() if not selection.excludes(new[name])}
            verified = verified_base(needed, state, path)
            weights |= {key.removeprefix("params."): whole for key, (whole, _) in verified.items()}
        if document is not None:
            kept = {new[name]: slot for name, slot in altered.items() if not selection.excludes(new[name])}
            state = with_buffers_of(attrs.evolve(document, altered=FrozenDict(kept)), state, weights, path)
        return with_weights(state, weights, path, strict=strict, excludes=selection.excludes)

    def fitted(self, model: ModelDef) -> State:
        """The saved State, with this model, in the memory of the computer.

        Raises:
            ResumeError: it was saved with another model; names the leaf.
        """
        document, tensors, home = self.document, self.tensors, torch.device("cpu")
        assert document is not None
        if document.base:
            home = torch.device("meta")
            there: dict[str, Shaped] = {**document.base, **tensors}
            tensors = {name: torch.empty(like.shape, dtype=like.dtype, device=home) for name, like in there.items()}
        return document.state(model, tensors, home, self.path)
