"""A module's tensors where Python finds them at once.

``module.weight`` is no attribute: Python looks for one, fails, formats an error and drops it, and only then calls
``Module.__getattr__``, which finds the tensor in ``_parameters``. That costs more than many a kernel, for each tensor
and each submodule that a forward reads. In a private module the same objects stand in ``__dict__`` as well; and because
others write to ``_parameters`` too (``functional_call`` in a forward), what is written there is written to both.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["mirror", "stands_twice"]

_KINDS = ("_parameters", "_buffers", "_modules")


def mirror(module: nn.Module, notes: list[str] | None = None) -> None:
    """Have the tensors and submodules of a private module, and of all modules in it, found at once.

    Args:
        module: the private module.
        notes: a list to which names are appended when something is registered, replaced or removed: all parameters and
            submodules, and buffers that were no tensors. What is assigned to a buffer that was a tensor isn't noted.

    >>> layer = nn.Linear(1, 1)
    >>> mirror(layer)
    >>> layer._parameters["bias"] = None
    >>> layer.bias is None is vars(layer)["bias"]
    True
    """
    for item in module.modules():
        for kind in _KINDS:
            members = vars(item).get(kind)
            if type(members) is dict:
                vars(item)[kind] = Mirrored(item, members)
                vars(item)[kind].note_in(notes, but_for_tensors=kind == "_buffers")


def stands_twice(members: dict[str, Any], name: str) -> bool:
    """Whether an item of a module's ``_parameters`` stands in its ``__dict__`` as well."""
    return isinstance(members, Mirrored) and name in members._names


class Mirrored(dict[str, Any]):
    """``_parameters``, ``_buffers`` or ``_modules`` of a module, with items that stand in its ``__dict__`` too.

    Only those that were there at first do. Others, and what an attribute of the class hides, are found as ever.
    """

    __slots__ = ("_names", "_notes", "_owner", "_unnoted")

    def __init__(self, owner: nn.Module, items: Mapping[str, Any], names: frozenset[str] | None = None) -> None:
        super().__init__(items)
        # Weak, because a cycle would keep the tensors until Python next looks for cycles.
        self._owner = weakref.ref(owner)
        if names is None:
            cls, present = type(owner), vars(owner)
            names = frozenset(name for name in items if name not in present and not hasattr(cls, name))
            present.update((name, items[name]) for name in names)
        self._names = names
        self._notes: list[str] | None = None
        self._unnoted: frozenset[str] = frozenset()

    def note_in(self, notes: list[str] | None, *, but_for_tensors: bool) -> None:
        """Append names to a list when items are set or removed; those that are tensors now may be set unnoted."""
        self._notes = notes
        if but_for_tensors:
            self._unnoted = frozenset(name for name, value in self.items() if value is not None)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name in self._names and (owner := self._owner()) is not None:
            vars(owner)[name] = value
        if self._notes is not None and name not in self._unnoted:
            self._notes.append(name)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        if self._notes is not None:
            self._notes.append(name)
        if name in self._names and (owner := self._owner()) is not None:
            vars(owner).pop(name, None)

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return super().pop(name, *default)
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self), None)
        return super().popitem() if name is None else (name, self.pop(name))

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: Any, **items: Any) -> None:
        for name, value in dict(*others, **items).items():
            self[name] = value

    def __ior__(self, other: Any) -> Mirrored:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        # A module's copy is noted before what it has is copied, and its `__dict__` is copied with what stands in it.
        owner = memo.get(id(self._owner()))
        items = {name: copy.deepcopy(value, memo) for name, value in self.items()}
        return items if owner is None else Mirrored(owner, items, self._names)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
