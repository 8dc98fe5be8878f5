"""A checkpoint that was read, before there is a model to fit it to, and which of its names are wanted."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Self, TypeAlias, TypeVar

import attrs
import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import accepts, name_of
from pure_loop._internal.suggestions import nearest
from pure_loop.checkpoint.contents import left_out, without_left_out
from pure_loop.checkpoint.digests import BaseTensor, verified_base
from pure_loop.checkpoint.document import Document, Shaped
from pure_loop.checkpoint.validation import Json
from pure_loop.checkpoint.weights import all_names, saved_weights, with_buffers_of, with_weights
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.buffers import UNALTERED
from pure_loop.model.model import ModelDef
from pure_loop.state import State

NOT_RENAMED = "rename is for weights alone: a run resumes with its own names; weights_only=True."

NOT_STRICT = "strict=False is for weights alone: a run resumes exactly or not at all; weights_only=True."


T = TypeVar("T")

Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str]"
"""Names, or their beginnings up to a dot, and what stands for them; or a function of the name."""


def _read_exclude(value: object) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(glob, str) and glob for glob in globs):
        raise ArgumentTypeError(f'exclude={value!r}: write globs of names, such as ["head.*"].')
    return globs


def _read_rename(value: object) -> Rename | None:
    if value is None:
        return None
    example = 'write {"backbone.": "encoder."}, beginnings of names in the file and in the model, or a function'
    if isinstance(value, Mapping):
        if not all(isinstance(old, str) and isinstance(name, str) for old, name in value.items()):
            raise ArgumentTypeError(f"rename={value!r}: {example} of a name that returns one.")
        return dict(value)
    if not callable(value):
        raise ArgumentTypeError(f"rename={value!r}: {example} of a name that returns one.")
    if not accepts(value, 1):
        raise ArgumentTypeError(
            f"rename is the function {name_of(value)}, which can't be called with one argument: it is called as "
            f"{name_of(value)}(name) with each name in the file, and returns that in the model."
        )
    return value


@attrs.frozen
class Selection:
    """Which weights are loaded, and under which names.

    Attributes:
        exclude: globs of names in the model, after renaming.
        rename: from names in the file to names in the model; None: they are the same.

    >>> selection = Selection(["head.*"], {"backbone": "encoder", "module.": ""})
    >>> selection.renamed(["backbone.0.weight", "backbones", "module.head.bias"], "a file")
    {'backbone.0.weight': 'encoder.0.weight', 'backbones': 'backbones', 'module.head.bias': 'head.bias'}
    >>> selection.excludes("head.bias"), selection.excludes("encoder.0.weight")
    (True, False)
    """

    exclude: tuple[str, ...] = attrs.field(converter=_read_exclude, default=())
    rename: Rename | None = attrs.field(converter=_read_rename, default=None)

    def excludes(self, name: str) -> bool:
        """Whether a weight keeps the value that it has in the model."""
        return any(fnmatch.fnmatchcase(name, glob) for glob in self.exclude)

    def renamed(self, names: Iterable[str], path: object) -> dict[str, str]:
        """The names in the model by the names in the file.

        Raises:
            ArgumentError: a beginning that no name has; two names become one; names what was probably meant.
            ArgumentTypeError: the function returned something else than a name.
        """
        names = list(names)
        if self.rename is None:
            return dict(zip(names, names, strict=True))
        if isinstance(self.rename, Mapping):
            result = _replaced(names, self.rename, path)
        else:
            result = {name: self.rename(name) for name in names}
        owners: dict[str, str] = {}
        for old, name in result.items():
            if not isinstance(name, str) or not name:
                raise ArgumentTypeError(
                    f"rename({old!r}) returned {name!r}: return the name in the model; what is not to be loaded is "
                    'written as exclude=["head.*"].'
                )
            first = owners.setdefault(name, old)
            if first != old:
                raise ArgumentError(f"rename: {first!r} and {old!r} of {path} both become {name!r}.")
        return result

    def refuse_unmatched(self, names: Iterable[str], path: object) -> None:
        """
        Args:
            names: of the model, and those of the file after renaming.

        Raises:
            ArgumentError: a glob that none of them matches.
        """
        names = list(dict.fromkeys(names))
        for glob in self.exclude:
            if not fnmatch.filter(names, glob):
                raise ArgumentError(
                    f"exclude={glob!r} matches no weight of {path} or of the model{_near(glob, names)}."
                )


ALL = Selection()
"""All weights, under their own names."""


def _replaced(names: list[str], rename: Mapping[str, str], path: object) -> dict[str, str]:
    used: set[str] = set()
    result = {}
    # The longest first: what stands for a part goes before what stands for the whole.
    beginnings = sorted(rename, key=len, reverse=True)
    for name in names:
        old = next((old for old in beginnings if _begins(name, old)), None)
        result[name] = name if old is None else rename[old] + name[len(old) :]
        if old is not None:
            used.add(old)
    for old in beginnings:
        if old not in used and not any(_begins(name, old) for name in names):
            raise ArgumentError(f"rename: no weight of {path} begins with {old!r}{_near(old, names)}.")
    return result


def _begins(name: str, beginning: str) -> bool:
    """Whether a name is this one, or of a submodule of this name."""
    rest = name.removeprefix(beginning)
    return name.startswith(beginning) and (not beginning or beginning.endswith(".") or rest[:1] in ("", "."))


def _near(text: str, names: list[str]) -> str:
    parts = [name.split(".") for name in names]
    beginnings = {".".join(part[:size]) for part in parts for size in range(1, len(part) + 1)}
    near = nearest(text.rstrip(".*"), sorted(beginnings))
    ending = text[len(text.rstrip(".*")) :]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (f"; did you mean {near + ending!r}?" if near else "") + f"; there are {', '.join(names[:5])}{more}"


_OPT_STATE, _ALGORITHM_STATE = "opt_state", "algorithm_state/"


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
        if glob == _OPT_STATE:
            result[_OPT_STATE] = None
            continue
        if not glob.startswith(_ALGORITHM_STATE):
            raise ArgumentError(
                f"exclude={glob!r}: a run resumes exactly or not at all, so of a State only opt_state and "
                "algorithm_state/NAME can be left out, which then begin anew. For its weights without some, "
                "pl.load(path, model=..., weights_only=True, exclude=...)."
            )
        described = result.get("algorithm_state")
        states = described.get("frozen") if isinstance(described, dict) else None
        states = states if isinstance(states, dict) else {}
        excluded = fnmatch.filter(states, glob.removeprefix(_ALGORITHM_STATE))
        if not excluded and not fnmatch.filter(absent, glob):
            near = nearest(glob.removeprefix(_ALGORITHM_STATE), states)
            raise ArgumentError(
                f"exclude={glob!r}: {path} has no such algorithm state"
                + (f"; did you mean {_ALGORITHM_STATE + near!r}?" if near else "")
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
        fields = without_excluded(document.fields, exclude, self.path, left_out(document.notes))
        notes = without_left_out(document.notes, exclude)
        return attrs.evolve(self, document=attrs.evolve(document, fields=fields, notes=notes, is_whole=False))

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
        names = selection.renamed(dict.fromkeys([*weights, *base, *altered]), path)
        selection.refuse_unmatched([*names.values(), *all_names(state.model)], path)
        weights = {names[name]: tensor for name, tensor in weights.items()}
        if strict and base:
            needed = {
                f"params.{names[name]}": item for name, item in base.items() if not selection.excludes(names[name])
            }
            verified = verified_base(needed, state, path)
            weights |= {key.removeprefix("params."): parameter for key, (parameter, _) in verified.items()}
        if document is not None:
            slots = {names[name]: slot for name, slot in altered.items() if not selection.excludes(names[name])}
            state = with_buffers_of(attrs.evolve(document, altered=FrozenDict(slots)), state, weights, path)
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
