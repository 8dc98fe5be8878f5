"""A State of a model whose names have changed: what becomes of each name, and what to write where it doesn't fit.

Parameters and buffers are renamed and left out by a :class:`~pure_loop.checkpoint.selection.Selection`, of weights
alone and of a whole State alike, and never without one. What the State knows by names follows: the optimizer state, the
algorithm state, the frozen names. A name that is excluded begins anew, with the values of the model; ``fit`` completes
the optimizer state of it. So does an algorithm whose memory holds it: a count or a best value beside the tensors is of
all of them. Buffers that ``state_dict()`` leaves out are not compared: they come from the file where they fit, else
from the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from pure_loop._internal.pytree import PyTree
from pure_loop._internal.reprs import Shaped, shape_and_dtype
from pure_loop._internal.suggestions import nearest
from pure_loop.checkpoint.selection import Selection
from pure_loop.checkpoint.validation import shortened
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.model import ModelDef
from pure_loop.model.names import Note, renamed

# Of a list of names in a message: a stranger may have written a file, and a model may have thousands.
_MOST, _SHAPES = 20, 6
# Characters of a call in a message, names of a file that are compared with all of the model's, and guesses.
_LONGEST, _COMPARED, _TRIED = 1500, 200, 20


Shapes = Mapping[str, Shaped]
Fits = Callable[[Shaped, Shaped], bool]


def _alike(one: Shaped, other: Shaped) -> bool:
    return tuple(one.shape) == tuple(other.shape) and one.dtype == other.dtype


def not_in_state_dict(model: ModelDef) -> set[str]:
    """The names of buffers that ``state_dict()`` leaves out."""
    names = set(model.skeleton.state_dict(keep_vars=True))
    persistent = {name: name in names for name in model.buffer_names}
    persistent |= {name: slot.persistent for name, slot in model.altered.items()}
    return {name for name in model.buffer_names if not persistent[name]}


def migrated(
    values: Mapping[str, PyTree],
    names: Mapping[str, str],
    selection: Selection,
    model: ModelDef,
    own: Mapping[str, Tensor],
    hidden: Collection[str],
    source: str,
) -> dict[str, PyTree]:
    """The fields of a State that was saved, by the names of a model.

    Args:
        values: the fields, as they were saved.
        names: those in the model by those in the file, after renaming.
        selection: what is excluded.
        model: which has them.
        own: the values of its parameters and buffers.
        hidden: those of the file's buffers that its ``state_dict()`` left out.
        source: the name of the file, for the note.
    """
    passing, there = not_in_state_dict(model), {*model.parameter_names, *model.buffer_names}
    excluded = {name for name in {*names.values(), *there} if selection.excludes(name)}
    result, fate = dict(values), dict[str, str | None]()
    for old, tensor in (*values["params"].items(), *values["buffers"].items()):
        new = names[old]
        fits = new in there and (new in model.altered or new not in own or _alike(tensor, own[new]))
        fate[old] = None if new in excluded or (not fits and (old in hidden or new in passing)) else new
    for field, wanted in (("params", model.parameter_names), ("buffers", model.buffer_names)):
        tensors = {name: tensor for old, tensor in values[field].items() if (name := fate[old]) is not None}
        begun = [name for name in wanted if name not in tensors and (name in excluded or name in passing)]
        result[field] = FrozenDict({**tensors, **{name: own[name] for name in begun if name in own}})
    memories = values.get("algorithm_state", FrozenDict())
    kept = {old: None if name in excluded else old for old, name in names.items()}
    anew = tuple(name for name, memory in memories.items() if renamed(memory, kept) is not memory)
    if anew:
        values = {**values, "algorithm_state": FrozenDict((k, v) for k, v in memories.items() if k not in anew)}
    if any(name != old for old, name in fate.items()):
        known = [field for field in ("opt_state", "algorithm_state", "frozen") if field in values]
        result |= {field: renamed(values[field], fate) for field in known}
    note = note_of(fate, names, excluded, [*model.parameter_names, *model.buffer_names])
    if note is not None:
        note = attrs.evolve(note, source=source, batch=values["timestamp"].batch, begun_anew=anew)
        result["notes"] = (*values.get("notes", ()), note)
    return result


def note_of(
    old_names: Iterable[str], names: Mapping[str, str], excluded: Collection[str], there: Collection[str]
) -> Note | None:
    """What was renamed and excluded by a selection; None: nothing."""
    olds = list(old_names)
    note = Note(
        source="",
        migrated=True,
        renamed=tuple((old, names[old]) for old in olds if names[old] not in (old, *excluded)),
        added=tuple(name for name in there if name in excluded),
        removed=tuple(old for old in olds if names[old] in excluded and names[old] not in there),
    )
    return note if note.renamed or note.added or note.removed else None


# What does not fit, and what to write


def lacking(missing: Iterable[str], unknown: Iterable[str]) -> str:
    """Names that a file lacks, and those that a model lacks, for messages."""
    both = (("the file lacks", list(missing)), ("the model lacks", list(unknown)))
    return "; ".join(f"{what} {_listed(names)}" for what, names in both if names)


def _listed(names: Iterable[str]) -> str:
    """All names of a list, up to 20, for messages."""
    texts = [shortened(name) for name in names]
    return f"[{', '.join(texts[:_MOST])}]" + (f" and {len(texts) - _MOST} more" if len(texts) > _MOST else "")


def all_names(model: ModelDef) -> dict[str, str]:
    """The names of parameters and buffers, each with the first name of what is tied."""
    result = {name: name for name in model.buffer_names}
    for kind in (model.skeleton.named_parameters, model.skeleton.named_buffers):
        first: dict[int, str] = {}
        for name, tensor in kind(remove_duplicate=False):
            if name not in model.altered:
                result[name] = first.setdefault(id(tensor), name)
    return result


@attrs.frozen
class Misfit:
    """Where the names, shapes and dtypes of a file differ from those of a model.

    Attributes:
        missing: names that only the model has.
        unknown: names that only the file has.
        reshaped: by name, what the file has and what the model has there.
    """

    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    reshaped: Mapping[str, tuple[Shaped, Shaped]]

    @classmethod
    def of(cls, saved: Shapes, wanted: Shapes, fits: Fits = _alike) -> Misfit:
        """All differences, in the order of both."""
        both = ((name, saved[name], like) for name, like in wanted.items() if name in saved)
        return cls(
            tuple(name for name in wanted if name not in saved),
            tuple(name for name in saved if name not in wanted),
            {name: (value, like) for name, value, like in both if not fits(value, like)},
        )

    @property
    def names(self) -> list[str]:
        """Of all of them."""
        return [*self.missing, *self.unknown, *self.reshaped]

    def in_words(self, kind: str) -> str:
        """For messages; ``kind`` is ``"params"``, or ``"buffers"``."""
        parts = [f"of {kind}, {lacking(self.missing, self.unknown)}"] if self.missing or self.unknown else []
        shapes = [
            f"{kind}[{shortened(name)}] is {shape_and_dtype(a)} in the file and {shape_and_dtype(b)} in the model"
            for name, (a, b) in self.reshaped.items()
        ]
        more = f"; and {len(shapes) - _SHAPES} more" if len(shapes) > _SHAPES else ""
        return "; ".join([*parts, *shapes[:_SHAPES]]) + more


def fitting(values: Mapping[str, PyTree], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of one model, for each of the members of a State with these fields, if it has some."""
    count = len(values.get("ensemble") or ())
    return {name: tensor.expand(count, *tensor.shape) for name, tensor in tensors.items()} if count else dict(tensors)


def refuse_another_model(
    values: Mapping[str, PyTree], saved: Shapes, model: ModelDef, name: str, path: object, notes: Sequence[Note] = ()
) -> None:
    """Refuse parameters and buffers that are another model's.

    Args:
        values: the fields of a State, by the names of the model.
        saved: parameters and buffers by the names of the file.
        model: which has to fit.
        name: the class of the module that was saved.
        path: of the file.
        notes: of the State into which they are read.

    Raises:
        ResumeError: names all leaves, what the model has and what the file has, and the call that loads what fits.
    """
    skeleton = model.skeleton
    params = dict(skeleton.named_parameters())
    buffers: dict[str, Tensor] = {**values["buffers"], **model.fixed_buffers()}
    wanted: dict[str, dict[str, Tensor]] = {
        "params": {key: params[key] for key in model.parameter_names},
        "buffers": {key: buffers.get(key, torch.empty(0, device="meta")) for key in model.buffer_names},
    }
    wanted = {kind: fitting(values, like) for kind, like in wanted.items()}
    misfits = {kind: Misfit.of(values[kind], like) for kind, like in wanted.items()}
    names = [key for misfit in misfits.values() for key in misfit.names]
    if not names:
        return
    what = "; ".join(misfit.in_words(kind) for kind, misfit in misfits.items() if misfit.names)
    advice = "Build the model as it was built then; for its weights alone, pl.load(path, model=..., weights_only=True)."
    other_digits = any(a.shape == b.shape for misfit in misfits.values() for a, b in misfit.reshaped.values())
    passing = not_in_state_dict(model).difference(saved)
    needed = {key: like for some in wanted.values() for key, like in some.items() if key not in passing}
    call = None if other_digits else remedy(saved, needed)
    surgeons = of_algorithms(values.get("notes", ()), notes, names)
    if surgeons is not None:
        advice = surgeons
    elif call is not None:
        advice = (
            f"Build the model as it was built then, or load what fits, pl.load({str(path)!r}, model=model, {call}), "
            "and give fit that State in the place of the model (autoresume= then needs a folder of its own)."
        )
    raise ResumeError(
        f"{path} was saved with a {name.rpartition('.')[2]}, and doesn't fit the {type(skeleton).__name__} given: "
        f"{what}. {advice}"
    )


def of_algorithms(saved: Iterable[Note], here: Iterable[Note], names: Iterable[str]) -> str | None:
    """What to do where names differ because an algorithm changed one of two models at INIT; None: none did.

    Args:
        saved: the notes of the State that was saved.
        here: those of the State into which it is read.
        names: that differ.
    """
    wanted = set(names)

    def surgeons(notes: Iterable[Note]) -> str:
        there = [note for note in notes if not note.migrated and wanted.intersection((*note.added, *note.removed))]
        return " and ".join(dict.fromkeys(shortened(note.source) for note in there))

    if algorithms := surgeons(saved):
        return (
            f"The algorithm {algorithms} of the run that was saved changed these layers at INIT: give it to fit, too, "
            "algorithms=[...], or give pl.load the model that it has changed, such as state.module() of a State of "
            "that run."
        )
    if algorithms := surgeons(here):
        return (
            f"The algorithm {algorithms} in algorithms= has changed these layers at INIT, and the file is of a model "
            "without it: leave it out, or load the file with pl.load first and change the module of that State."
        )
    return None


def remedy(
    saved: Shapes,
    wanted: Shapes,
    ties: Mapping[str, str] = FrozenDict(),
    fits: Fits = _alike,
) -> str | None:
    """The arguments ``rename=`` and ``exclude=`` with which a file fits a model; None where hardly anything fits.

    Args:
        saved: what a file has, by its names.
        wanted: what a model needs, by its names.
        ties: the names of tied weights, by which a file may call them, and the first name of each.
        fits: whether something in the file fits something in the model.

    >>> one, two = torch.empty(2), torch.empty(3)
    >>> remedy({"module.a.w": one, "module.b.w": two}, {"a.w": one, "b.w": two})
    "rename={'module.': ''}"
    >>> remedy({"a.w": one, "old": two, "head.w": two}, {"a.w": one, "head.w": one})
    "exclude=['head.*', 'old']"
    """
    rename = _renames(
        saved, {**{name: wanted[first] for name, first in ties.items() if first in wanted}, **wanted}, fits
    )
    try:
        names = Selection((), rename or None).renamed(saved, "")
    except ArgumentError:
        rename, names = {}, {name: name for name in saved}
    misfit = Misfit.of({ties.get(names[old], names[old]): like for old, like in saved.items()}, wanted, fits)
    fitting = len(wanted) - len({*misfit.missing, *misfit.reshaped})
    if not fitting or (rename and 2 * fitting < len(wanted)):
        return None  # it is rather another model
    globs = _globs(misfit.names, {*names.values(), *wanted})
    arguments = [f"rename={rename!r}"] if rename else []
    text = ", ".join([*arguments, f"exclude={globs!r}"] if globs else arguments)
    return text if text and len(text) <= _LONGEST else None


def _renames(saved: Shapes, wanted: Shapes, fits: Fits) -> dict[str, str]:
    """Beginnings of names in a file, and what they probably are in the model: what most names have in common first."""

    def fitting(rename: dict[str, str]) -> dict[str, str]:
        """Names in the file by those in the model that they alone are renamed to, and fit."""
        selection = Selection((), rename or None)
        pairs = [(selection.renamed_one(old), old) for old in saved]
        counts = Counter(name for name, _ in pairs)
        return {n: old for n, old in pairs if n in wanted and counts[n] == 1 and fits(saved[old], wanted[n])}

    result: dict[str, str] = {}
    settled = fitting(result)
    while True:
        unknown, missing = saved.keys() - settled.values(), wanted.keys() - settled.keys()
        pairs = ((old, name) for old in sorted(unknown)[:_COMPARED] for name in missing)
        alike = [pair for pair in pairs if fits(saved[pair[0]], wanted[pair[1]])]
        counts = Counter(beginnings for pair in alike for beginnings in _beginnings(*pair))
        for old, new in _unambiguous(counts):
            after = fitting({**result, old: new})
            if len(after) > len(settled):
                result[old], settled = new, after
                break
        else:
            return result


def _unambiguous(counts: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    """Pairs of beginnings, those of most names first, without those of which either one may as well go with another."""
    rivals = [Counter((pair[side], count) for pair, count in counts.items()) for side in (0, 1)]
    most = [{key: 0 for key, _ in some} for some in rivals]
    for side in (0, 1):
        for key, count in rivals[side]:
            most[side][key] = max(most[side][key], count)
    best = [
        pair
        for pair, count in counts.items()
        if all(count == most[side][pair[side]] and rivals[side][pair[side], count] == 1 for side in (0, 1))
    ]
    return sorted(best, key=lambda pair: (-counts[pair], len(pair[0]) + len(pair[1]), pair))[:_TRIED]


def _beginnings(old: str, name: str) -> Iterable[tuple[str, str]]:
    """The pairs of beginnings that make one name of another, with endings of whole parts in common."""
    olds, parts = old.split("."), name.split(".")
    if olds[:-1] == parts[:-1] and nearest(olds[-1], parts[-1:]):
        yield old, name
    for size in range(1, min(len(olds), len(parts)) + 1):
        if olds[-size:] != parts[-size:]:
            return
        before, after = (".".join(some[:-size]) for some in (olds, parts))
        yield f"{before}." if before else "", f"{after}." if after else ""


def _globs(names: Iterable[str], there: Collection[str]) -> list[str]:
    """Names, and globs in the place of all that begin alike."""
    chosen, result = set(names), dict[str, None]()
    for name in sorted(chosen):
        parts = name.split(".")
        beginnings = (".".join(parts[:size]) + "." for size in range(1, len(parts)))
        whole = (text for text in beginnings if all(key in chosen for key in there if key.startswith(text)))
        glob = next((f"{text}*" for text in whole), name)
        result[re.sub(r"[\[?]|\*(?!$)", r"[\g<0>]", glob)] = None
    return list(result)
