"""A module's structure without its numbers, and calling it with numbers from a State.

:class:`ModelDef` keeps a copy of the user's module whose tensors are on the meta device: classes,
hyperparameters, hooks and ties, no numbers. To run it, tensors are put straight into the
``_parameters`` and ``_buffers`` of a private instance (0.03 us a tensor; ``functional_call`` looks
each one up by name, at 100 times the cost). Instances are taken from a pool for the length of one
call, so threads, nested calls and forks of one State never see each other's tensors.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from pure_loop._buffers import UNALTERED, Altered, Slot, alterations, places_of, put_slots, slot_of
from pure_loop._cloning import clone_all, in_transform
from pure_loop._mirrored import Mirrored, mirror, stands_twice
from pure_loop._parts import is_part, whole_of
from pure_loop._signature import name_of
from pure_loop._structure import copied, referred_to, refers_to, refuse_uncopyable
from pure_loop.errors import ArgumentError, ArgumentTypeError, ModelError, WrappedModelError
from pure_loop.frozendict import FrozenDict

if TYPE_CHECKING:
    from pure_loop.optim import Optimizer

__all__ = ["ModelDef", "are_marked", "hooks_so_far", "refuse_untrainable"]

T = TypeVar("T")


class ModelDef:
    """The structure of a ``torch.nn.Module``, immutable and free of numbers.

    Attributes:
        parameter_names, buffer_names: in the order of the module.
        altered: by name, what forwards have made of buffers that the module came with, or registered
            (:mod:`pure_loop._buffers`).
        trainable: the names of parameters that require a gradient.
        may_draw: whether calling the module may draw random numbers, or run code of the user's.
        is_done_after_forward: whether the user has nothing in the module that runs in a backward.
        declared: the parameters of the module that have attributes or a class of the user's, on the meta device.

    Two structures are equal when their modules have the same classes, settings, and names, shapes
    and dtypes of tensors; that is what makes two States of one architecture mappable together.

    >>> from torch import nn
    >>> model, params, buffers = ModelDef.split(nn.Linear(3, 2))
    >>> model
    ModelDef(Linear: 2 parameters, 0 buffers)
    >>> output, buffers = model.apply(lambda m: m(torch.ones(1, 3)), params, buffers, training=True)
    >>> output.shape
    torch.Size([1, 2])
    """

    __slots__ = (
        "__weakref__",
        "_buffer_places",
        "_idle",
        "_modes",
        "_origin",
        "_registered",
        "_served",
        "_signature",
        "_skeleton",
        "altered",
        "buffer_names",
        "declared",
        "is_done_after_forward",
        "may_draw",
        "parameter_names",
        "trainable",
    )

    def __init__(self, skeleton: nn.Module, altered: Altered = UNALTERED) -> None:
        self._skeleton = skeleton
        self._idle: list[Instance] = []
        self._signature: tuple[Any, ...] | None = None
        self._origin: Callable[[], nn.Module | None] = _nothing
        # Of submodules in eval mode, and of those in them, in a module that is not: the mode in which they are trained.
        self._modes = _modes_to_keep(skeleton)
        parameters = dict(skeleton.named_parameters())
        self.declared = {name: param for name, param in parameters.items() if _is_declared(param)}
        # An optimizer, and what it is for these parameters.
        self._served: tuple[Optimizer, Optimizer] | None = None
        self.parameter_names = tuple(parameters)
        self.trainable = tuple(name for name, parameter in parameters.items() if parameter.requires_grad)
        self._alter(altered)
        # The names of all buffers that this structure and those made of it have had.
        self._registered = set(self.buffer_names)
        self.may_draw = any(_may_draw(module) for module in skeleton.modules())
        self.is_done_after_forward = not self.may_draw and not any(map(_has_backward_hooks, skeleton.modules()))

    @classmethod
    def split(
        cls, module: nn.Module, *, device: torch.device | str | None = None
    ) -> tuple[ModelDef, FrozenDict[str, Tensor], FrozenDict[str, Tensor]]:
        """Take ``module`` apart into structure, parameters and buffers; the module stays as it was.

        Modules and tensors are copies (on ``device``, if given); other objects that the module refers to, such as
        those of its hooks, are shared with it.

        Raises:
            ModelError: the module has an attribute that can't be copied (a lock, a file), has a parameter or buffer in
                a plain attribute as well, or has two that share memory and are not one object.
        """
        _refuse_shared_memory(module)
        meta: dict[int, Any] = {}
        for parameter in module.parameters():
            empty = torch.empty_like(parameter, device="meta")
            meta[id(parameter)] = _declared_like(parameter, empty, parameter.requires_grad)
        for buffer in module.buffers():
            meta[id(buffer)] = torch.empty_like(buffer, device="meta")
        refuse_uncopyable(module)
        try:
            # Every tensor is found already "copied" in the memo: no numbers are duplicated.
            skeleton = copied(module, meta, prepare=partial(_copy_attributes, module))
        except Exception as error:  # of whatever class: that of an attribute decides
            raise ModelError(
                f"{type(module).__name__} can't be copied: {type(error).__name__}: {error}. Keep what can't be copied "
                "outside of the module: in a global name, or in an object of yours that a hook or a function of "
                "pl.Task refers to; or make it in the forward."
            ) from error
        _refuse_aliases(skeleton)
        _own_classes(skeleton)
        params = FrozenDict((name, _copy(p, device)) for name, p in module.named_parameters())
        buffers = FrozenDict((name, _copy(b, device)) for name, b in module.named_buffers())
        model = cls(skeleton)
        model._origin = ref(module)
        return model, params, buffers

    def _alter(self, altered: Altered) -> None:
        self.altered = altered
        self._buffer_places = places_of(self._skeleton, altered)
        self.buffer_names = tuple(self._buffer_places)
        self._signature = None

    def with_altered(self, altered: Altered) -> ModelDef:
        """This structure after forwards have altered buffers; it shares everything else, private modules included."""
        if altered is self.altered or altered == self.altered:
            return self
        other = object.__new__(ModelDef)
        for name in _SHARED:
            setattr(other, name, getattr(self, name))
        other._alter(altered)
        self._registered.update(other.buffer_names)
        return other

    def fitting(self, buffers: Mapping[str, Tensor]) -> ModelDef:
        """This structure with the buffers of these names, which forwards have registered; itself, if it has them."""
        if buffers.keys() == self._buffer_places.keys():
            return self
        skeleton, altered = self._skeleton, dict(self.altered)
        for name in [name for name in self.buffer_names if name not in buffers]:
            before = slot_of(skeleton, name)
            altered.pop(name, None)
            if before.kind == "tensor":
                altered[name] = Slot("none", before.persistent)
        for name in [name for name in buffers if name not in self.buffer_names]:
            before = slot_of(skeleton, name)
            altered.pop(name, None)
            if before.kind != "tensor":
                altered[name] = Slot("tensor", before.persistent)
        return self.with_altered(FrozenDict(altered) if altered else UNALTERED)

    def fixed_buffers(self) -> dict[str, Tensor]:
        """Buffers of which shape and dtype don't change, as tensors without numbers, by name."""
        return {name: tensor for name, tensor in self._skeleton.named_buffers() if name not in self.altered}

    def apply(
        self,
        function: Callable[[nn.Module], T],
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        *,
        training: bool,
        hold: bool = False,
    ) -> tuple[T, FrozenDict[str, Tensor]]:
        """Call ``function(module)`` on a module that holds these tensors, and return the buffers after it.

        What the module writes to its buffers (BatchNorm's statistics) goes to copies, which come back as
        the second value; ``buffers`` itself never changes.

        Args:
            function: of the module.
            params: parameters, or the leaves of them that the gradient is to be taken by; any mapping of all names.
            buffers: buffers; any mapping of all names.
            training: train mode, or eval mode. Submodules that were in eval mode when the module, itself in train
                mode, was split stay in it.
            hold: keep the instance with ``params`` until :meth:`give_back`: activation checkpointing goes through
                it again in the backward, and a module's own ``loss`` may read what its forward left there.

        Raises:
            ArgumentError: a name is missing in ``params`` or ``buffers``, or unknown.
            ModelError: the function registered, replaced or removed a parameter or submodule.
        """
        params = _all_named("params", params, self.parameter_names)
        model, more = self, buffers.keys() - self._buffer_places.keys()
        if more and more <= self._registered:
            model = self.fitting(buffers)  # that of an earlier call's result
        buffers = _all_named("buffers", buffers, model.buffer_names)
        result, after, _ = model.call(function, params, buffers, training=training, hold=hold)
        return result, after

    def call(
        self,
        function: Callable[[nn.Module], T],
        params: FrozenDict[str, Tensor],
        buffers: FrozenDict[str, Tensor],
        *,
        training: bool,
        hold: bool = False,
    ) -> tuple[T, FrozenDict[str, Tensor], ModelDef]:
        """:meth:`apply`, and the structure after it: another one where a buffer was registered, removed or reshaped."""
        hold = hold or getattr(params, "holder", None) is not None
        instance = self.enter(params, buffers, training=training)
        result = function(instance.module)
        # While it is held, a recomputation may write to its buffers again, and never to those of a State.
        after = instance.read_buffers(buffers, copy=hold)
        if hold:
            instance.be_held_by(params)
        else:
            self._idle.append(instance)
        return result, after, self.with_altered(instance.altered)

    def enter(self, params: FrozenDict[str, Tensor], buffers: FrozenDict[str, Tensor], *, training: bool) -> Instance:
        """An instance whose module holds these tensors; :meth:`apply` for who calls its module himself."""
        instance: Instance | None = getattr(params, "holder", None)
        if instance is None:
            try:
                instance = self._idle.pop()  # atomic: two threads never get the same instance
            except IndexError:
                instance = Instance(self)
        if instance.altered is not self.altered or instance.notes:
            instance.take_structure(self)
        if instance.buffers or instance.training is not training or instance.bound() is not params:
            instance.bind(params, buffers, training)
            instance.notes.clear()
        return instance

    def may_write_later(self) -> bool:
        """Whether a backward may write to a buffer: by calling modules again, or by a hook that is given one."""
        return not self.is_done_after_forward or _has_any_global_hook()

    def give_back(self, leaves: FrozenDict[str, Tensor]) -> None:
        """The graph of these leaves is gone: their instance is free for other calls."""
        instance = getattr(leaves, "holder", None)
        if instance is not None:
            leaves.holder, instance.params = None, instance.bound()
            self._idle.append(instance)

    def leaves(self, params: FrozenDict[str, Tensor]) -> FrozenDict[str, Tensor]:
        """The parameters as autograd leaves that share their memory: what a forward differentiates by.

        ``leaves.origin`` is ``params``. Leaves are returned as they are, unless a graph goes through them still.
        """
        if hasattr(params, "origin"):
            if getattr(params, "holder", None) is None and not are_marked(params):
                return params
            params = params.origin
        for instance in self._idle:
            bound = instance.params
            if bound is not None and getattr(bound, "origin", None) is params and not are_marked(bound):
                return bound
        trainable = self.trainable
        if len(trainable) == len(params):
            leaves = FrozenDict(zip(params, [t.detach().requires_grad_() for t in params.values()], strict=True))
        else:
            wanted = frozenset(trainable)
            leaves = FrozenDict(
                (name, tensor.detach().requires_grad_(name in wanted)) for name, tensor in params.items()
            )
        if self.declared:
            leaves = FrozenDict((name, self.seen_as_declared(name, leaf)) for name, leaf in leaves.items())
        leaves.origin, leaves.holder = params, None
        return leaves

    def seen_as_declared(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor with the class and the attributes of the user's parameter of this name; its memory is the same.

        One of another class than torch's own (in parts, or in a step that is traced) has the attributes alone.
        """
        declared = self.declared.get(name)
        if declared is None:
            return tensor
        if type(tensor) is Tensor:
            like: Tensor = _declared_like(declared, tensor, tensor.requires_grad, attributes=True)
            return like
        vars(tensor).update(_attributes_of(declared))
        return tensor

    def served_by(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer for these parameters: one whose label function is shown them as the user declared them."""
        if not self.declared or optimizer.seeing is None:
            return optimizer
        served = self._served
        if served is None or served[0] is not optimizer:
            served = self._served = optimizer, optimizer.seeing(self.seen_as_declared)
        return served[1]

    def copied(self, *, independent: bool = False) -> nn.Module:
        """A copy of the module, on the meta device; see :func:`pure_loop._structure.copied`."""
        if not self.declared:
            return copied(self._skeleton, independent=independent)
        memo: dict[int, Any] = {
            id(param): _declared_like(param, torch.empty_like(param), param.requires_grad)
            for param in self._skeleton.parameters()
        }
        return copied(self._skeleton, memo, independent=independent, prepare=partial(_copy_attributes, self._skeleton))

    def trained(self, params: FrozenDict[str, Tensor]) -> FrozenDict[str, Tensor]:
        """The parameters that are trained; the mapping itself where all are."""
        if len(self.trainable) == len(params):
            return params
        return FrozenDict((name, params[name]) for name in self.trainable)

    def module(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, training: bool = True
    ) -> nn.Module:
        """A plain, independent ``nn.Module`` with copies of these tensors; yours to change.

        Where ranks hold parts of them, all ranks have to ask for it.

        Args:
            params: parameters.
            buffers: buffers.
            training: train mode, in which submodules that are kept in eval mode stay so, or eval mode.
        """
        module = self.copied(independent=True)
        _own_classes(module)
        wanted = frozenset(self.trainable)
        before = dict(module.named_parameters())
        parameters = {
            name: _declared_like(before[name], whole_of(tensor.detach()).clone(), name in wanted, attributes=True)
            for name, tensor in params.items()
        }
        for name, tensors, key in _places(module, self.parameter_names, "_parameters"):
            tensors[key] = parameters[name]
        put_slots(module, self.altered)
        copies = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        for name, tensors, key in self.places_of_buffers(module):
            tensors[key] = copies[name]
        self.set_mode(module, training)  # with its numbers in place: a train() of the user's may compute with them
        return module

    def watching(self, forward: Callable[[nn.Module, Any], T], functions: Iterable[Any]) -> Callable[[Any, Any], T]:
        """A forward that refuses to set attributes, where one of these functions has the module that was split.

        It is for the first batch. ``functions`` are the loss and others of the user's.
        """

        def call(module: nn.Module, batch: Any) -> T:
            before = _plain_attributes(module)
            result = forward(module, batch)
            after = _plain_attributes(module)
            changed = [place for place, value in after.items() if place not in before or before[place] is not value]
            origin = self._origin()
            for function in functions if changed else ():
                if origin is not None and refers_to(function, origin):
                    where = ".".join(filter(None, ("model", *changed[0])))
                    raise ModelError(
                        f"the forward sets {where}, and {name_of(function)} holds on to the model that was given to "
                        "fit, where it is never set: a forward runs on a copy of the module tree. Return the value "
                        "from the forward with the outputs, or give the model a method loss(outputs, batch), which is "
                        "called on the copy."
                    )
            return result

        return call

    @property
    def code(self) -> nn.Module:
        """A module with the classes, hooks and attributes of the user's, to look into."""
        return self._skeleton

    def referred_to(self) -> list[Any]:
        """The user's objects that its instances refer to, and that are not copied."""
        return referred_to(self._skeleton)

    def places_of_buffers(self, module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
        """(name, dict, key) for every place of a buffer in a copy of the module: several where one is tied."""
        return _places_at(module, self._buffer_places)

    def set_mode(self, module: nn.Module, training: bool) -> None:
        """Put a copy of the module into train or eval mode; in train mode, what is kept in eval mode stays in it."""
        _set_mode(module, training, self._modes)

    def release(self) -> None:
        """Forget the tensors that idle instances still hold."""
        self._idle.clear()

    def unbind(self) -> None:
        """Forget the parameters that idle instances still hold, and keep the instances."""
        for instance in self._idle:
            instance.unbind(self._skeleton)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What equality compares: classes, settings, names, shapes and dtypes."""
        if self._signature is None:
            tensors = [*self._skeleton.named_parameters(), *self._skeleton.named_buffers()]
            self._signature = (
                tuple((name, _class_of(module)) for name, module in self._skeleton.named_modules()),
                repr(self._skeleton),
                tuple((name, tuple(t.shape), t.dtype) for name, t in tensors),
                self.trainable,
                self.buffer_names,
            )
        return self._signature

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, ModelDef) and self.signature == other.signature

    def __hash__(self) -> int:
        return hash(self.signature)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelDef:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._skeleton, {name: type(param) for name, param in self.declared.items()}, self.altered)

    def __repr__(self) -> str:
        name = type(self._skeleton).__name__
        return f"ModelDef({name}: {len(self.parameter_names)} parameters, {len(self.buffer_names)} buffers)"


_SHARED = tuple(
    name
    for name in ModelDef.__slots__
    if name not in ("__weakref__", "_buffer_places", "_signature", "altered", "buffer_names")
)


# Parameters as the user declared them. ``Parameter.__deepcopy__`` drops attributes, and calls the class of a subclass
# with arguments that it may not take; pickling drops the class.


def _attributes_of(parameter: Tensor) -> dict[str, Any]:
    """The user's attributes; of a tensor of another kind, whose own state is there, none."""
    return vars(parameter) if nn.Parameter in type(parameter).__mro__ else {}


def _is_declared(parameter: Tensor) -> bool:
    return bool(_attributes_of(parameter)) or (
        type(parameter) is not nn.Parameter and nn.Parameter in type(parameter).__mro__
    )


def _declared_like(parameter: Tensor, tensor: Tensor, requires_grad: bool, *, attributes: bool = False) -> Any:
    """This tensor as a parameter of the class of another one, with its attributes if that is said."""
    kind = type(parameter)
    if kind is nn.Parameter or nn.Parameter not in kind.__mro__:
        made: Any = nn.Parameter(tensor, requires_grad=requires_grad)
    else:
        made = Tensor._make_subclass(kind, tensor.detach(), requires_grad)
    if attributes:
        vars(made).update(_attributes_of(parameter))
    return made


def _copy_attributes(module: nn.Module, memo: dict[int, Any]) -> None:
    """Give the copies of parameters, which stand in the memo of a deepcopy, copies of their attributes."""
    for parameter in module.parameters():
        if attributes := _attributes_of(parameter):
            vars(memo[id(parameter)]).update(copy.deepcopy(attributes, memo))


def _rebuilt(skeleton: nn.Module, classes: dict[str, type], altered: Altered = UNALTERED) -> ModelDef:
    for name, parameter in skeleton.named_parameters():
        if name in classes:
            parameter.__class__ = classes[name]
    return ModelDef(skeleton, altered)


_marks_of, _UNMARKED = attrgetter("_backward_hooks", "grad"), (None, None)
_gradient_of = attrgetter("grad")


def hooks_so_far() -> int:
    """Another number after a hook was registered, on whichever tensor."""
    return RemovableHandle.next_id


def are_marked(leaves: FrozenDict[str, Tensor], *, unhooked: bool = False) -> bool:
    """Whether somebody has left on one of these leaves what a next forward would go on with: a hook, or a gradient.

    ``unhooked`` says that there can be no hook.
    """
    if unhooked:
        gradients = list(map(_gradient_of, leaves.values()))
        return gradients.count(None) != len(gradients)
    marks = list(map(_marks_of, leaves.values()))
    if marks.count(_UNMARKED) == len(marks):
        return False
    # A hook that was taken off again leaves an empty dict.
    return any(hooks or gradient is not None for hooks, gradient in marks)


# What torch keeps in each module.
_INTERNAL = frozenset(vars(nn.Module()))


def _plain_attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """What the plain attributes of a user's modules refer to, by the names of module and attribute."""
    return {
        (prefix, name): value
        for prefix, submodule in module.named_modules()
        if not type(submodule).__module__.startswith("torch.")
        for name, value in vars(submodule).items()
        if name not in _INTERNAL
        and not any(name in members for members in (submodule._parameters, submodule._buffers, submodule._modules))
    }


def _nothing() -> None:
    """Stands for a reference to the mapping that is bound, before there is one."""


class Instance:
    """A private module and the places where tensors go, found once.

    Attributes:
        altered: what has become of the buffers that the module came with.
        notes: names that were registered, replaced or removed since the last look; see ``mirror``.
        places: how many references the module has to each parameter.
        bound: gives the mapping whose tensors stand in the module, if it is alive.
        params: that mapping, while no leaves hold this instance.
    """

    __slots__ = (
        *("_assigned", "_came", "_known", "_modes", "_parameters", "_submodules", "_tied", "_written"),
        *("altered", "bound", "buffers", "module", "notes", "params", "places", "training"),
    )

    def __init__(self, model: ModelDef) -> None:
        self.module = model.copied()
        self.notes: list[str] = []
        mirror(self.module, self.notes)
        # A tied tensor has several places, which stand here one by one.
        self._parameters = list(_places(self.module, model.parameter_names, "_parameters"))
        self.places = Counter[str]()
        for name, tensors, key in self._parameters:
            self.places[name] += 1 + stands_twice(tensors, key)
        self._came = model._skeleton
        self._submodules = list(self.module.modules())
        # Buffers to which tensors were assigned, which therefore may be anybody's.
        self._assigned: set[str] = set()
        self._written: list[Tensor] = []
        self._known: list[tuple[str, Any, str, set[str], bool]] = []
        self.altered = UNALTERED
        self.params: FrozenDict[str, Tensor] | None
        self.bound: Callable[[], FrozenDict[str, Tensor] | None]
        self.take_structure(model)
        self.training: bool | None = None
        self._modes = model._modes

    def take_structure(self, model: ModelDef) -> None:
        """Register the buffers of this structure, and no others."""
        came = self._came
        put_slots(self.module, {path: slot_of(came, path) for path in self.altered if path not in model.altered})
        put_slots(self.module, model.altered)
        self._find_buffers(model.altered, model._buffer_places)
        self.params, self.bound = None, _nothing

    def _find_buffers(self, altered: Altered, places: Mapping[str, list[str]]) -> None:
        self.altered = altered
        self.buffers = list(_places_at(self.module, places))
        fixed = {name: (t.shape, t.dtype) for name, t in self._came.named_buffers() if name not in altered}
        self._known = []
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
            _set_mode(self.module, training, self._modes)
            self.training = training
        if self.bound() is not params:
            for name, tensors, key in self._parameters:
                tensors[key] = params[name]
            self.params, self.bound = params, ref(params)
        if self.buffers:
            # In-place writes to buffers escape `_version` (BatchNorm's kernel), so they are always copied.
            copies = dict(zip(buffers, clone_all(list(buffers.values())), strict=True))
            self._written = [copies[name] for name, _, _ in self.buffers]
            for (_, tensors, key), buffer in zip(self.buffers, self._written, strict=True):
                tensors[key] = buffer

    def be_held_by(self, leaves: FrozenDict[str, Tensor]) -> None:
        """Stay with these leaves, whose graph goes through this module, until :meth:`ModelDef.give_back`."""
        # Not each in the other: a stream that is left meanwhile would keep its parameters until a collection.
        leaves.holder, self.params = self, None

    def unbind(self, skeleton: nn.Module) -> None:
        """Put the tensors of a skeleton, which take no memory, in the places of the parameters."""
        if self.params is not None:
            placeholders = dict(skeleton.named_parameters())
            for name, tensors, key in self._parameters:
                tensors[key] = placeholders[name]
            self.params, self.bound = None, _nothing
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
        found = [value.detach() if value.requires_grad else value for value in values]
        return FrozenDict(zip(names, clone_all(found) if copy else found, strict=True))

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
        """Find out what was registered, replaced, reshaped or removed, and refuse what a State can't hold."""
        self.notes.clear()
        written = {
            (id(tensors), key): tensor for (_, tensors, key), tensor in zip(self.buffers, self._written, strict=False)
        }
        assigned = set()
        for prefix, module in self.module.named_modules():
            for key, tensor in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is not None and not isinstance(tensor, Tensor):
                    raise ModelError(f"the forward set buffer {name!r} to {tensor!r}: a buffer is a tensor or None.")
                if tensor is not None and tensor is not written.get((id(module._buffers), key)):
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
            from pure_loop._overlaps import overlapping_pair

            pair = overlapping_pair(dict(named).items())
            if pair is not None:
                raise ModelError(
                    f"the forward left {pair[0]} and {pair[1]} in the same memory. A write to one would change the "
                    "other, and a State holds each by itself: assign a copy (self.buffer = tensor.clone())."
                )
            self._assigned |= assigned

    def _refuse_other_submodules(self) -> None:
        now = dict(self.module.named_modules())
        known = set(map(id, self._submodules))
        new = [(name, module) for name, module in now.items() if id(module) not in known]
        for name, module in new:
            if any(True for _ in (*module.parameters(), *module.buffers())):
                raise ModelError(
                    f"the forward put a {type(module).__name__} in the model, as {name!r}, of whose parameters and "
                    "buffers neither the optimizer nor a State knows: create it in __init__ (for a lazy module call "
                    "the model on one batch before training)."
                )
        removed = [name for name, _ in self._came.named_modules() if name not in now]
        if removed:
            raise ModelError(
                f"the forward removed the submodule {removed[0]!r}, of which a State holds the structure: leave it "
                "where it is, and don't call it."
            )
        self._submodules += [module for _, module in new]

    def _refuse_other_parameters(self) -> None:
        places = {(id(tensors), key): name for name, tensors, key in self._parameters}
        bound: Any = self.bound()
        for prefix, module in self.module.named_modules():
            for key, tensor in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                known = places.pop((id(module._parameters), key), None)
                if tensor is not None and (known is None or (bound is not None and tensor is not bound[known])):
                    what = "created the parameter" if known is None else "replaced the parameter"
                    raise ModelError(
                        f"the forward {what} {name!r}, of which no optimizer knows and which no State holds: create it "
                        "in __init__ (for a lazy module call the model on one batch before training); what is not "
                        "trained is a buffer, self.register_buffer(name, tensor)."
                    )
                if tensor is None and known is not None:
                    places[id(module._parameters), key] = known
        for name in places.values():
            raise ModelError(
                f"the forward removed the parameter {name!r}, which the optimizer goes on to train: leave it where it "
                "is, and don't use it."
            )


_NEVER_DRAW = frozenset(
    {
        *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d),
        *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
        *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten, nn.Embedding),
    }
)


def _may_draw(module: nn.Module) -> bool:
    """Whether calling this module may draw random numbers; a class of the user's may always."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) not in _NEVER_DRAW or bool(hooks) or "forward" in vars(module)


# Private to torch, which asks itself so before it calls a module.
_has_any_global_hook: Callable[[], bool] = getattr(nn.modules.module, "_has_any_global_hook", lambda: True)


def _has_backward_hooks(module: nn.Module) -> bool:
    """Whether something of the user's is called in its backward, and given the module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _places(module: nn.Module, names: tuple[str, ...], kind: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, dict, key) for every place in the module that holds a tensor: several where weights are tied."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    first: dict[str, int] = {}
    for prefix, submodule in module.named_modules():
        tensors = getattr(submodule, kind)
        for key, tensor in tensors.items():
            if tensor is not None:
                places.setdefault(id(tensor), []).append((tensors, key))
                first[f"{prefix}.{key}" if prefix else key] = id(tensor)
    for name in names:
        for tensors, key in places[first[name]]:
            yield name, tensors, key


def _modes_to_keep(module: nn.Module) -> tuple[tuple[str, bool], ...]:
    """The modes of submodules in eval mode and of what is in them; none where the whole module is in eval mode."""
    if not module.training:
        return ()
    inside = {id(part) for each in module.modules() if not each.training for part in each.modules()}
    return tuple((name, each.training) for name, each in module.named_modules() if id(each) in inside)


def _set_mode(module: nn.Module, training: bool, modes: tuple[tuple[str, bool], ...]) -> None:
    module.train(training)
    if not training or not modes:
        return
    submodules = [(module.get_submodule(name), mode) for name, mode in modes]
    for submodule, mode in submodules:
        if submodule.training is not mode:
            submodule.train(mode)
    for submodule, mode in submodules:
        submodule.training = mode  # of one that two others contain, too


def _own_classes(module: nn.Module) -> None:
    """Give parametrized modules classes of their own: torch keeps a property for each parametrized tensor there.

    ``deepcopy`` leaves copy and original with one class, and ``remove_parametrizations`` on either changes both.
    """
    for each in module.modules():
        cls = type(each)
        if "parametrizations" in each._modules and parametrize.is_parametrized(each):
            namespace = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
            metaclass: Any = type(cls)
            each.__class__ = metaclass(cls.__name__, cls.__bases__, namespace)


def _class_of(module: nn.Module) -> type:
    """The class of a module, without what parametrizing this one has added to it."""
    cls = type(module)
    parametrized = "parametrizations" in module._modules and parametrize.is_parametrized(module)
    return cls.__bases__[0] if parametrized else cls


def _all_named(kind: str, given: Mapping[str, Tensor], names: tuple[str, ...]) -> FrozenDict[str, Tensor]:
    if isinstance(given, FrozenDict) and len(given) == len(names):
        return given
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(f"{kind} is {type(given).__name__}, and a mapping of names to tensors is needed.")
    missing, unknown = set(names) - given.keys(), given.keys() - set(names)
    if missing or unknown:
        says = (("missing", missing), ("unknown", unknown))
        raise ArgumentError(
            f"{kind} has other names than the model: "
            + "; ".join(f"{what} {sorted(some)[:3]}" for what, some in says if some)
            + f". Give all of them: {{**state.{kind}, name: tensor}}."
        )
    return FrozenDict((name, given[name]) for name in names)


def _places_at(module: nn.Module, places: Mapping[str, list[str]]) -> Iterator[tuple[str, dict[str, Any], str]]:
    for name, paths in places.items():
        for path in paths:
            prefix, _, key = path.rpartition(".")
            yield name, module.get_submodule(prefix)._buffers, key


def _refuse_shared_memory(module: nn.Module) -> None:
    """Refuse different tensors that have elements in common, which a State would hold twice."""
    from pure_loop._overlaps import overlapping_elements, overlapping_pair

    registered: list[tuple[str, str, Tensor]] = [
        ("parameter", name, tensor) for name, tensor in module.named_parameters()
    ]
    registered += [("buffer", name, tensor) for name, tensor in module.named_buffers()]
    for kind, name, tensor in registered:
        if overlapping_elements(tensor):
            raise ModelError(
                f"{kind} {name!r} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: several of its "
                "elements are at one place in memory, as expand() leaves them, so that a write to one changes others. "
                "Give it memory of its own: register tensor.clone(memory_format=torch.contiguous_format), or expand it "
                "in the forward."
            )
    ids = {id(tensor) for _, _, tensor in registered}
    attributes = [
        (f"attribute {'.'.join(filter(None, (prefix, attribute)))!r}", tensor)
        for prefix, submodule in module.named_modules()
        if not isinstance(submodule, nn.RNNBase)
        for attribute, value in vars(submodule).items()
        if attribute not in ("_parameters", "_buffers", "_modules", *_recomputed(submodule))
        for tensor in _plain_tensors(value)
        if id(tensor) not in ids
    ]
    pair = overlapping_pair([(f"{kind} {name!r}", tensor) for kind, name, tensor in registered], attributes)
    if pair is not None:
        raise ModelError(
            f"{pair[0]} and {pair[1]} share memory and are different tensors. A write to one changes the other, and a "
            "State holds each by itself. For one tensor under two names assign the object itself "
            "(decoder.weight = encoder.weight, not .data); compute a part or view of another tensor in the forward, or "
            "in a property (return self.base[:2]); else give each its own memory (tensor.clone())."
        )


def _recomputed(module: nn.Module) -> Iterator[str]:
    """Attributes that a hook of torch's sets before each forward: a pruned weight, an old-style normalised one."""
    for hook in module._forward_pre_hooks.values():
        if type(hook).__module__.startswith("torch.nn.utils."):
            name = getattr(hook, "_tensor_name", getattr(hook, "name", None))
            if isinstance(name, str):
                yield name


def _refuse_aliases(skeleton: nn.Module) -> None:
    """Refuse a registered tensor that also stands in a plain attribute, where no call would put its numbers."""
    tensors = [*skeleton.named_parameters(), *skeleton.named_buffers()]
    names = {id(tensor): name for name, tensor in tensors}
    for prefix, module in skeleton.named_modules():
        if isinstance(module, nn.RNNBase):
            continue  # its list of weights is made anew where they have changed
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            name = next((names[id(each)] for each in _plain_tensors(value) if id(each) in names), None)
            if name is not None:
                where = ".".join(filter(None, ("model", prefix, attribute)))
                raise ModelError(
                    f"{where} holds {name!r} a second time, in a plain attribute, and a call with the State's numbers "
                    "can't reach it there. Read it where it is registered, or make the attribute a property: "
                    f"@property, def {attribute}(self): return ..."
                )


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set | frozenset | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _plain_tensors(each)


def _copy(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    return tensor.detach().to(device=device, copy=True)


_WRAPPERS = {
    "DistributedDataParallel": "replicated over ranks",
    "DataParallel": "replicated over devices",
    "FullyShardedDataParallel": "sharded over ranks",
    "OptimizedModule": "compiled with torch.compile",
}


def refuse_untrainable(module: object) -> None:
    """Refuse, with the reason, a model that would train wrongly or not at all.

    Raises:
        ArgumentTypeError: not a ``torch.nn.Module``.
        WrappedModelError: a wrapped, scripted or compiled module. Under functional calls DDP returns
            unreduced gradients without an error.
        ModelError: no parameters, none that requires a gradient, parameters that are not yet
            initialised, or a layer that rewrites its weights in the forward.
    """
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ArgumentTypeError(f"model is the class {module.__name__}, not an instance: write {module.__name__}(...).")
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"model is {type(module).__name__}, which is neither a torch.nn.Module nor a pure_loop State"
            f"{_hint(module)}."
        )
    for name, submodule in module.named_modules():
        kinds = {cls.__name__ for cls in type(submodule).__mro__}
        where = f"model.{name}" if name else "model"
        for wrapper, meaning in _WRAPPERS.items():
            if wrapper in kinds:
                raise WrappedModelError(
                    f"{where} is {meaning} ({wrapper}). pure_loop calls modules functionally, and through such a "
                    f"wrapper gradients would be wrong without an error: give the module inside "
                    f"({'model._orig_mod' if wrapper == 'OptimizedModule' else 'model.module'})."
                )
        if "FSDPModule" in kinds:
            raise WrappedModelError(
                f"{where} went through torch.distributed.fsdp.fully_shard; give the module as it was before."
            )
        if "ScriptModule" in kinds:
            raise WrappedModelError(
                f"{where} is a TorchScript module ({type(submodule).__name__}), whose parameters can't be replaced "
                "for a call: give the nn.Module it was made from."
            )
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.max_norm is not None:
            raise ModelError(
                f"{where} is an embedding with max_norm={submodule.max_norm}, which rewrites its weight in place in "
                "the forward. Normalise the rows that you look up instead: torch.renorm(weight[index], 2, 0, max_norm)."
            )
    _refuse_strange_tensors(module)
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ModelError(
                f"parameter {name!r} has a hook on its gradient, which would never be called, because gradients are "
                "taken by copies of the parameters. Change gradients with clip_grad=function, or with an algorithm at "
                "AFTER_TRAIN_BATCH."
            )
    parameters = list(module.parameters())
    if not parameters:
        raise ModelError(
            f"{type(module).__name__} has no parameters, so there is nothing to train. Are its layers kept in a plain "
            "list or dict? Use nn.ModuleList, nn.ModuleDict or nn.ParameterList."
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise ModelError(
            f"no parameter of {type(module).__name__} requires a gradient: unfreeze some with requires_grad_(True)."
        )


def _refuse_strange_tensors(module: nn.Module) -> None:
    """
    Raises:
        ModelError: a parameter or buffer has no shape or no numbers yet, or is not a plain tensor of torch's.
    """
    named: list[tuple[str, str, Tensor]] = [("parameter", *each) for each in module.named_parameters()]
    named += [("buffer", *each) for each in module.named_buffers()]
    for kind, name, tensor in named:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ModelError(
                f"{kind} {name!r} of a lazy module has no shape yet: call the model on one batch first, before "
                "pl.fit(model, ...)."
            )
        if is_part(tensor):
            continue
        if tensor.is_meta and kind == "parameter":  # a buffer there may be one that no forward reads
            raise ModelError(
                f"parameter {name!r} is on the meta device and has no numbers: write model.to_empty(device=...) and "
                "initialise it, or load its numbers, first."
            )
        problem = _what_is_strange(tensor, kind)
        if problem is not None:
            raise ModelError(f"{kind} {name!r} {problem}")


def _what_is_strange(tensor: Tensor, kind: str) -> str | None:
    """Why a State can't hold this tensor, and what to write instead; None where it can."""
    cls = type(tensor)
    plain = f"nn.{kind.capitalize()}(tensor)" if kind == "parameter" else "register_buffer(name, tensor)"
    is_parameter = issubclass(cls, nn.Parameter) and cls.__torch_dispatch__ is Tensor.__torch_dispatch__
    if cls is not Tensor and not is_parameter:
        return (
            f"is a {cls.__name__}, a subclass of torch.Tensor, whose class copies, optimizers and checkpoints would "
            f"not keep: register a plain tensor, {plain}, and make the {cls.__name__} of it in the forward."
        )
    if tensor.is_nested:
        return f"is a nested tensor: keep its values and offsets as {kind}s, and put them together in the forward."
    if tensor.is_quantized:
        return (
            f"is quantised ({tensor.dtype}): keep tensor.int_repr(), its scale and its zero point as buffers, or "
            "tensor.dequantize()."
        )
    if tensor.layout is torch.strided or (kind == "buffer" and tensor.layout in _SPARSE):
        return None
    return f"has the layout {tensor.layout}, and a {kind} is a dense tensor: register tensor.to_dense()."


_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def _hint(given: object) -> str:
    if isinstance(given, Mapping) and any(isinstance(value, Tensor) for value in given.values()):
        return ": a state_dict goes into its module first, model.load_state_dict(...)"
    if isinstance(given, Iterable) and not isinstance(given, Mapping | str):
        return "; the model comes first, then the data: fit(model, train_dataloader, ...)"
    return ""
