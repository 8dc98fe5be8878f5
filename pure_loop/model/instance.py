"""A private module that holds the tensors of a State during a call, and what a forward may do to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol
from weakref import ref

from torch import Tensor, nn

from pure_loop._internal.tree_ops import clone_all, in_transform
from pure_loop.errors import ModelError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.buffers import UNALTERED, Altered, alterations, places_of, put_slots, slot_of
from pure_loop.model.tree import Mirrored, entries, mirror, places_at, set_mode, stands_twice, tensor_places


class Structure(Protocol):
    """What an instance reads of a ``ModelDef``."""

    skeleton: nn.Module
    parameter_names: tuple[str, ...]
    altered: Altered
    modes: tuple[tuple[str, bool], ...]
    buffer_places: dict[str, list[str]]

    def copied(self) -> nn.Module: ...


def _no_mapping(_: object = None) -> None:
    """Stands for a reference to the mapping that is bound, before there is one and when it is gone."""


class Instance:
    """A private module and the places where tensors go, found once.

    Attributes:
        altered: buffers that differ from those of the user's module, by name.
        notes: names that were registered, replaced or removed since the last check; see ``mirror``.
        places: the number of references of the module to each parameter.
        bound: a weak reference to the mapping of the tensors that are in the module.
        params: that mapping, while no leaves hold this instance.
    """

    __slots__ = (
        *("_assigned", "_came", "_known", "_modes", "_parameters", "_submodules", "_tied", "_written"),
        *("altered", "bound", "buffers", "module", "notes", "params", "places", "training"),
    )

    def __init__(self, model: Structure) -> None:
        self.module = model.copied()
        self.notes: list[str] = []
        mirror(self.module, self.notes)
        # A tied tensor has several places, which stand here one by one.
        self._parameters = list(tensor_places(self.module, model.parameter_names, "_parameters"))
        self.places = Counter[str]()
        for name, tensors, key in self._parameters:
            self.places[name] += 1 + stands_twice(tensors, key)
        self._came = model.skeleton
        self._submodules = list(self.module.modules())
        # Buffers to which tensors were assigned, which may be aliased.
        self._assigned: set[str] = set()
        self._written: list[Tensor] = []
        self.altered = UNALTERED
        self.take_structure(model)
        self.training: bool | None = None
        self._modes = model.modes

    def take_structure(self, model: Structure) -> None:
        """Register the buffers of this structure, and no others."""
        came = self._came
        put_slots(self.module, {path: slot_of(came, path) for path in self.altered if path not in model.altered})
        put_slots(self.module, model.altered)
        self._find_buffers(model.altered, model.buffer_places)
        self.params: FrozenDict[str, Tensor] | None = None
        self.bound: Callable[[], FrozenDict[str, Tensor] | None] = _no_mapping

    def _find_buffers(self, altered: Altered, places: Mapping[str, list[str]]) -> None:
        self.altered = altered
        self.buffers = list(places_at(self.module, places))
        fixed = {name: (t.shape, t.dtype) for name, t in self._came.named_buffers() if name not in altered}
        self._known: list[tuple[str, Any, str, set[str], bool]] = []
        for name, paths in places.items():
            for path in paths:
                prefix, _, key = path.rpartition(".")
                hidden = self.module.get_submodule(prefix)._non_persistent_buffers_set
                self._known.append((name, fixed.get(name), key, hidden, key in hidden))
        self._tied = len(self.buffers) > len(places)
        for module in self._submodules:
            if isinstance(module._buffers, Mirrored):
                module._buffers.note_in(self.notes, but_for_tensors=True)
        self.notes.clear()

    def bind(self, params: FrozenDict[str, Tensor], buffers: FrozenDict[str, Tensor], training: bool) -> None:
        if self.training is not training:
            set_mode(self.module, training, self._modes)
            self.training = training
        if self.bound() is not params:
            for name, tensors, key in self._parameters:
                tensors[key] = params[name]
            # With a callback it is a weak reference of its own, beside which another one counts.
            self.params, self.bound = params, ref(params, _no_mapping)
        if self.buffers:
            # In-place writes to buffers escape `_version` (BatchNorm's kernel), so they are always copied.
            copies = dict(zip(buffers, clone_all(list(buffers.values())), strict=True))
            self._written = [copies[name] for name, _, _ in self.buffers]
            for (_, tensors, key), buffer in zip(self.buffers, self._written, strict=True):
                tensors[key] = buffer

    def bind_to_graph(self, leaves: FrozenDict[str, Tensor]) -> None:
        """Stay with these leaves, since their graph goes through this module, until :meth:`ModelDef.release_graph`."""
        # No reference cycle: a stream that is closed meanwhile would keep its parameters until a collection.
        leaves.holder, self.params = self, None

    def unbind(self, skeleton: nn.Module) -> None:
        """Replace the parameters by the tensors of a skeleton, which take no memory."""
        if self.params is not None:
            placeholders = dict(skeleton.named_parameters())
            for name, tensors, key in self._parameters:
                tensors[key] = placeholders[name]
            self.params, self.bound = None, _no_mapping
            self.notes.clear()

    def read_buffers(self, before: FrozenDict[str, Tensor], *, copy: bool) -> FrozenDict[str, Tensor]:
        """The buffers after a forward; :attr:`altered` says which of them are not what the module came with.

        Raises:
            ModelError: it left something that a State can't hold.
        """
        values: list[Any] = [tensors.get(key) for _, tensors, key in self.buffers]
        if self.notes or self._are_news(values):
            self._look()
            values = [tensors[key] for _, tensors, key in self.buffers]
        names: Iterable[str] = [name for name, _, _ in self.buffers]
        if self._tied:
            after = dict(zip(names, values, strict=True))
            names, values = after, list(after.values())
        self._written = []
        if not values and not before:
            return before
        result = [value.detach() if value.requires_grad else value for value in values]
        return FrozenDict(zip(names, clone_all(result) if copy else result, strict=True))

    def _are_news(self, values: list[Any]) -> bool:
        """Whether a buffer is something else than a tensor of the shape that is known, or in memory that is not."""
        assigned = False
        for value, written, (name, kind, key, hidden, was_hidden) in zip(
            values, self._written, self._known, strict=True
        ):
            if value is not written:
                assigned = True
                if (
                    not isinstance(value, Tensor)
                    or self._tied
                    or name not in self._assigned
                    or (key in hidden) is not was_hidden
                ):
                    return True
            if kind is not None and (value.shape != kind[0] or value.dtype is not kind[1]):
                return True
        return assigned and self._share_storage(values)

    def _share_storage(self, values: list[Any]) -> bool:
        if len(values) < 2 or in_transform():
            return False
        storages = [value.untyped_storage()._cdata for value in values if type(value) is Tensor]
        return len(set(storages)) < len(storages)

    def _look(self) -> None:
        """Find out which buffers were registered, replaced, reshaped or removed; refuse what a State can't hold."""
        self.notes.clear()
        written = {
            (id(tensors), key): tensor for (_, tensors, key), tensor in zip(self.buffers, self._written, strict=False)
        }
        assigned = set()
        for name, tensors, key, tensor in entries(self.module, "_buffers"):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise ModelError(f"the forward set buffer {name!r} to {tensor!r}: a buffer is a tensor or None.")
            if tensor is not None and tensor is not written.get((id(tensors), key)):
                assigned.add(name)
        self._refuse_other_submodules()
        self._refuse_other_parameters()
        altered = alterations(self.module, self._came, self.altered)
        if altered is not self.altered:
            self._find_buffers(altered, places_of(self._came, altered))
        named = [(f"parameter {name!r}", tensors[key]) for name, tensors, key in self._parameters]
        named += [(f"buffer {name!r}", tensors[key]) for name, tensors, key in self.buffers]
        # What was assigned for the first time may be memory of a parameter; buffers of one storage are seen each time.
        # A transform of torch.func has tensors without memory.
        values = [tensors[key] for _, tensors, key in self.buffers]
        if not in_transform() and (not assigned <= self._assigned or self._share_storage(values)):
            from pure_loop.model.checks import overlapping_pair

            pair = overlapping_pair(dict(named).items())
            if pair is not None:
                raise ModelError(
                    f"the forward left {pair[0]} and {pair[1]} in the same memory. A write to one would change the "
                    "other, and a State holds each by itself: assign a copy (self.buffer = tensor.clone())."
                )
            self._assigned |= assigned

    def _refuse_other_submodules(self) -> None:
        modules = dict(self.module.named_modules())
        ids = set(map(id, self._submodules))
        additions = [(name, module) for name, module in modules.items() if id(module) not in ids]
        for name, module in additions:
            if any(True for _ in (*module.parameters(), *module.buffers())):
                raise ModelError(
                    f"the forward put a {type(module).__name__} in the model, as {name!r}, whose parameters and "
                    "buffers are in neither the optimizer nor a State: create it in __init__ (for a lazy module call "
                    "the model on one batch before training)."
                )
        removed = [name for name, _ in self._came.named_modules() if name not in modules]
        if removed:
            raise ModelError(
                f"the forward removed the submodule {removed[0]!r}, of which a State holds the structure: leave it "
                "where it is, and don't call it."
            )
        self._submodules += [module for _, module in additions]

    def _refuse_other_parameters(self) -> None:
        places = {(id(tensors), key): name for name, tensors, key in self._parameters}
        bound: Any = self.bound()
        for name, tensors, key, tensor in entries(self.module, "_parameters"):
            if tensor is None:
                continue
            place = places.pop((id(tensors), key), None)
            if place is None or (bound is not None and tensor is not bound[place]):
                what = "created the parameter" if place is None else "replaced the parameter"
                raise ModelError(
                    f"the forward {what} {name!r}, which is in neither the optimizer nor a State: create it in "
                    "__init__ (for a lazy module call the model on one batch before training); a tensor that is "
                    "not trained is a buffer, self.register_buffer(name, tensor)."
                )
        for name in places.values():
            raise ModelError(
                f"the forward removed the parameter {name!r}, which the optimizer still trains: leave it where it "
                "is, and don't use it."
            )
