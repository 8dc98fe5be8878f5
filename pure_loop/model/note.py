"""Notes of a State: which names of its model came, went or were renamed, other than by the code of the model."""

from __future__ import annotations

import attrs

from pure_loop._internal.registry import register


@register(name="pure_loop.Note")
@attrs.frozen(kw_only=True)
class Note:
    """A change of the names of parameters and buffers: by an algorithm at INIT, or when a file was loaded.

    Attributes:
        source: the name of the algorithm, or of the file.
        migrated: whether a file was loaded, ``pl.load(path, model=..., rename=..., exclude=...)``.
        batch: how many batches were finished.
        renamed: pairs of the old and the new name.
        added: names that the model had and the file had not, or that were excluded: they began with the values of the
            model, without optimizer state. Of an algorithm those that it made, or made in another shape.
        removed: names that are gone.

    >>> print(Note(source="ep3.safetensors", migrated=True, batch=12, renamed=(("a.scale", "a.gain"),), removed=("b",)))
    loaded from ep3.safetensors at batch 12: renamed a.scale to a.gain; removed b
    """

    source: str
    migrated: bool
    batch: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        renamed = [f"{old} to {name}" for old, name in self.renamed]
        what = (("renamed", renamed), ("added", self.added), ("removed", self.removed))
        done = "; ".join(f"{verb} {', '.join(names)}" for verb, names in what if names)
        where = f"loaded from {self.source}" if self.migrated else f"changed by {self.source}"
        return f"{where} at batch {self.batch}: {done}"

    @property
    def is_valid(self) -> bool:
        """Whether it has the types of a note: one that a file has may be anything."""
        names = (*self.added, *self.removed) if type(self.added) is type(self.removed) is tuple else (None,)
        pairs = self.renamed if type(self.renamed) is tuple else (None,)
        if not all(type(pair) is tuple and len(pair) == 2 for pair in pairs):
            return False
        texts = (self.source, *names, *(name for pair in self.renamed for name in pair))
        return all(type(text) is str for text in texts) and type(self.migrated) is bool and type(self.batch) is int
