"""Which names of a checkpoint are loaded, and what they are called in the model."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from glob import escape
from typing import TypeAlias

import attrs

from pure_loop._internal.arguments import accepts, name_of
from pure_loop._internal.suggestions import nearest
from pure_loop.errors import ArgumentError, ArgumentTypeError

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
    """Which parameters and buffers are loaded, and under which names: of weights alone, and of a whole State.

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

    def of_ties(self, ties: Mapping[str, str]) -> Selection:
        """The selection that excludes a tied weight by its first name, too, where it does by another one.

        Args:
            ties: the first name of each weight, by all of its names.

        >>> Selection("head.*").of_ties({"embed.w": "embed.w", "head.w": "embed.w"}).exclude
        ('head.*', 'embed.w')
        """
        firsts = (first for name, first in ties.items() if self.excludes(name) and not self.excludes(first))
        return attrs.evolve(self, exclude=(*self.exclude, *map(escape, dict.fromkeys(firsts))))

    def renamed_one(self, name: str) -> str:
        """The name in the model of one in the file, as the longest beginning or the function says."""
        if not isinstance(self.rename, Mapping):
            return name if self.rename is None else self.rename(name)
        old = max((old for old in self.rename if begins(name, old)), key=len, default=None)
        return name if old is None else self.rename[old] + name[len(old) :]

    def renamed(self, names: Iterable[str], path: object) -> dict[str, str]:
        """The names in the model by the names in the file.

        Raises:
            ArgumentError: a beginning that no name has; two names become one; names what was probably meant.
            ArgumentTypeError: the function returned something else than a name.
        """
        names = list(names)
        result = {name: self.renamed_one(name) for name in names}
        for old in self.rename if isinstance(self.rename, Mapping) else ():
            if not any(begins(name, old) for name in names):
                raise ArgumentError(f"rename: no weight of {path} begins with {old!r}{_near(old, names)}.")
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

    def split(self) -> tuple[tuple[str, ...], Selection]:
        """What leaves out the optimizer state, or the state of algorithms, of a State; and the rest."""
        fields = tuple(glob for glob in self.exclude if glob.partition("/")[0] in ("opt_state", "algorithm_state"))
        return fields, attrs.evolve(self, exclude=tuple(glob for glob in self.exclude if glob not in fields))

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


def begins(name: str, beginning: str) -> bool:
    """Whether a name is this one, or of a submodule of this name."""
    rest = name.removeprefix(beginning)
    return name.startswith(beginning) and (not beginning or beginning.endswith(".") or rest[:1] in ("", "."))


def _near(text: str, names: list[str]) -> str:
    parts = [name.split(".") for name in names]
    beginnings = {".".join(part[:size]) for part in parts for size in range(1, len(part) + 1)}
    near = nearest(text.rstrip(".*"), sorted(beginnings))
    # A module without a glob for what is in it.
    ending = text[len(text.rstrip(".*")) :] if near != text.rstrip(".") else ".*"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (f" (did you mean {near + ending!r}?)" if near else "") + f"; there are {', '.join(names[:5])}{more}"
