"""A checkpoint that was read, before there is a model to fit it to, and which of its names are wanted."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Self

import attrs
import torch
from torch import Tensor, nn

from pure_loop._internal.reprs import Shaped
from pure_loop._internal.suggestions import nearest
from pure_loop.checkpoint.digests import BaseTensor, verified_base
from pure_loop.checkpoint.document import Document
from pure_loop.checkpoint.migration import all_names, note_of
from pure_loop.checkpoint.selection import ALGORITHM_STATE, ALL, OPT_STATE, Selection, left_out, without_left_out
from pure_loop.checkpoint.validation import Json
from pure_loop.checkpoint.weights import saved_weights, with_buffers_of, with_weights
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.members.ensemble import Ensemble
from pure_loop.model.buffers import UNALTERED
from pure_loop.model.model import ModelDef
from pure_loop.state import State

NOT_STRICT = "strict=False is for weights alone: a run resumes exactly or not at all; weights_only=True."


def without_excluded(
    fields: Mapping[str, Json], exclude: Iterable[str], path: object, absent: Iterable[str] = ()
) -> dict[str, Json]:
    """The fields of a State as JSON, without its optimizer state or the algorithm state of some algorithms.

    Args:
        fields: of a document.
        exclude: ``"opt_state"``, or ``"algorithm_state/"`` and a glob of the names of algorithms.
        absent: what the file lacks already.

    Raises:
        ArgumentError: another field, or an algorithm that has no state there.
    """
    result = dict(fields)
    for glob in exclude:
        if glob == OPT_STATE:
            result[OPT_STATE] = None
            continue
        if not glob.startswith(ALGORITHM_STATE):
            raise ArgumentError(
                f"exclude={glob!r}: write 'opt_state' or 'algorithm_state/NAME', which then begin anew, or globs of "
                "names of parameters and buffers, which keep the values of the model."
            )
        described = result.get("algorithm_state")
        states = described.get("frozen") if isinstance(described, dict) else None
        states = states if isinstance(states, dict) else {}
        excluded = fnmatch.filter(states, glob.removeprefix(ALGORITHM_STATE))
        if not excluded and not fnmatch.filter(absent, glob):
            near = nearest(glob.removeprefix(ALGORITHM_STATE), states)
            raise ArgumentError(
                f"exclude={glob!r}: {path} has no such algorithm state"
                + (f"; did you mean {ALGORITHM_STATE + near!r}?" if near else "")
                + f"; there is that of {', '.join(states) or 'none'}."
            )
        result["algorithm_state"] = {"frozen": {name: states[name] for name in states if name not in excluded}}
    return result


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
        model: nn.Module | Ensemble,
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
        fresh = model.state(0, device) if isinstance(model, Ensemble) else State.create(model, device=device)
        selection = selection.of_ties(all_names(fresh.model))
        if self.document is None or weights_only:
            return self.weights_into(fresh, strict=strict, selection=selection)
        if not strict:
            raise ArgumentError(NOT_STRICT)
        fields, selection = selection.split()
        return self.without(fields).into(fresh, selection=selection)

    def without(self, exclude: Iterable[str]) -> Self:
        """The checkpoint without some of its fields, which then begin anew."""
        document = self.document
        if document is None or not exclude:
            return self
        fields = without_excluded(document.fields, exclude, self.path, left_out(document.notes))
        notes = without_left_out(document.notes, exclude)
        return attrs.evolve(self, document=attrs.evolve(document, fields=fields, notes=notes, is_whole=False))

    def into(self, state: State, *, selection: Selection = ALL) -> State:
        """The saved State, with the model and on the device of this one."""
        document = self.document
        if document is None:
            return self.weights_into(state, selection=selection)
        tensors = self.tensors
        if document.base:
            names = {selection.renamed_one(key.removeprefix("params.")): key for key in document.base}
            needed = {
                f"params.{name}": document.base[key] for name, key in names.items() if not selection.excludes(name)
            }
            base = {key: torch.empty(like.shape, dtype=like.dtype) for key, like in document.base.items()}
            verified = verified_base(needed, state, self.path)
            base |= {names[new.removeprefix("params.")]: plain for new, (_, plain) in verified.items()}
            tensors = {**tensors, **base}
        return document.state(state.model, tensors, state.device, self.path, start=state, selection=selection)

    def weights_into(
        self, state: State, *, strict: bool = True, selection: Selection = ALL, call: str | None = None
    ) -> State:
        """The State with the weights that were saved; ``call`` is for errors, as in ``with_weights``."""
        document, path = self.document or self.weights, self.path
        if state.ensemble is not None or (document is not None and document.fields.get("ensemble") is not None):
            raise ResumeError(
                f"{path}: weights alone are read from a State of one model into one, and not of members. Load the "
                "whole State, and take a member: pl.load(path, model=make_model()).member(0).module()."
            )
        weights = saved_weights(self.document, self.tensors, path)
        base: dict[str, BaseTensor] = {}
        altered = UNALTERED
        if document is not None:
            base, altered = {key.removeprefix("params."): item for key, item in document.base.items()}, document.altered
        names = selection.renamed(dict.fromkeys([*weights, *base, *altered]), path)
        selection.refuse_unmatched([*names.values(), *all_names(state.model)], path)
        saved, weights = weights, {names[name]: tensor for name, tensor in weights.items()}
        if strict and base:
            needed = {
                f"params.{names[name]}": item for name, item in base.items() if not selection.excludes(names[name])
            }
            verified = verified_base(needed, state, path)
            weights |= {key.removeprefix("params."): parameter for key, (parameter, _) in verified.items()}
        if document is not None:
            slots = {names[name]: slot for name, slot in altered.items() if not selection.excludes(names[name])}
            state = with_buffers_of(attrs.evolve(document, altered=FrozenDict(slots)), state, weights, path)
        state = with_weights(state, weights, path, strict=strict, excludes=selection.excludes, saved=saved, call=call)
        there = [*state.model.parameter_names, *state.model.buffer_names]
        note = note_of(names, names, {name for name in (*names.values(), *there) if selection.excludes(name)}, there)
        if note is None:
            return state
        note = attrs.evolve(note, source=str(path).rpartition("/")[2], batch=0 if document is None else document.batch)
        return state.replace(notes=(*state.notes, note))

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
