"""Which weights of a file are loaded and under which names: ``exclude=`` and ``rename=`` of ``pl.load``."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import attrs

from pure_loop._internal.arguments import accepts, name_of
from pure_loop._internal.suggestions import nearest
from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["ALL", "Rename", "Selection", "without_excluded"]

T = TypeVar("T")

Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str]"
"""Names, or their beginnings up to a dot, and what stands for them; or a function of the name."""


def _read_exclude(value: Any) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(glob, str) and glob for glob in globs):
        raise ArgumentTypeError(f'exclude={value!r}: write globs of names, such as ["head.*"].')
    return globs


def _read_rename(value: Any) -> Rename | None:
    if value is None:
        return None
    example = 'write {"backbone.": "encoder."}, beginnings of names in the file and in the model, or a function'
    if isinstance(value, Mapping):
        if not all(isinstance(old, str) and isinstance(new, str) for old, new in value.items()):
            raise ArgumentTypeError(f"rename={value!r}: {example} of a name that returns one.")
        return dict(value)
    if not callable(value):
        raise ArgumentTypeError(f"rename={value!r}: {example} of a name that returns one.")
    if not accepts(value, 1):
        raise ArgumentTypeError(
            f"rename is the function {name_of(value)}, which can't be called with one argument: it is called as "
            f"{name_of(value)}(name) with each name in the file, and returns that in the model."
        )
    return value  # type: ignore[no-any-return]


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
        for old, new in result.items():
            if not isinstance(new, str) or not new:
                raise ArgumentTypeError(
                    f"rename({old!r}) returned {new!r}: return the name in the model; what is not to be loaded is "
                    'written as exclude=["head.*"].'
                )
            first = owners.setdefault(new, old)
            if first != old:
                raise ArgumentError(f"rename: {first!r} and {old!r} of {path} both become {new!r}.")
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


def without_excluded(fields: Mapping[str, Any], exclude: Iterable[str], path: object) -> dict[str, Any]:
    """The fields of a State as JSON, without its optimizer state or the algorithm state of some algorithms.

    Args:
        fields: of a document.
        exclude: ``"opt_state"``, or ``"algorithm_state/"`` and a glob of the names of algorithms.

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
        if not excluded:
            near = nearest(glob.removeprefix(_ALGORITHM_STATE), states)
            raise ArgumentError(
                f"exclude={glob!r}: {path} has no such algorithm state"
                + (f"; did you mean {_ALGORITHM_STATE + near!r}?" if near else "")
                + f"; there is that of {', '.join(states) or 'none'}."
            )
        result["algorithm_state"] = {"frozen": {name: states[name] for name in states if name not in excluded}}
    return result
