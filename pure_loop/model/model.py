"""A module's structure without its numbers, and calling it with numbers from a State.

:class:`ModelDef` keeps a copy of the user's module with tensors on the meta device: classes,
hyperparameters, hooks and ties, no numbers. To run it, tensors are put straight into the
``_parameters`` and ``_buffers`` of a private instance (0.03 us a tensor; ``functional_call`` looks
each one up by name, at 100 times the cost). Instances are taken from a pool for the length of one
call, so threads, nested calls and forks of one State never see each other's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import name_of
from pure_loop._internal.records import set_class
from pure_loop._internal.tree_ops import full_tensor, meet
from pure_loop.errors import ArgumentError, ArgumentTypeError, MissingAttributeError, ModelError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.buffers import UNALTERED, Altered, Slot, places_of, put_slots, slot_of
from pure_loop.model.instance import Instance
from pure_loop.model.parameters import (
    are_leaves,
    are_marked,
    attributes_of,
    copy_attributes,
    declared_like,
    is_declared,
)
from pure_loop.model.structure import attribute_with, copied, referred_to, refers_to, refuse_uncopyable
from pure_loop.model.tree import (
    class_of,
    may_use_rng,
    modes_to_keep,
    own_classes,
    places_at,
    plain_attributes,
    set_mode,
    tensor_places,
)
from pure_loop.random.authors import is_users

T = TypeVar("T")


class Seeing(Protocol):
    """An optimizer with parts that may depend on attributes that the user gave to parameters."""

    @property
    def seeing(self) -> Callable[[Callable[[str, Tensor], Tensor]], Any] | None:
        """From a function that gives a parameter as it was declared to the optimizer that sees it so; or None."""


S = TypeVar("S", bound=Seeing)


class ModelDef:
    """The structure of a ``torch.nn.Module``, immutable and free of numbers.

    Attributes:
        parameter_names, buffer_names: in the order of the module.
        altered: by name, what forwards have made of buffers that the module came with, or registered
            (:mod:`pure_loop.model.buffers`).
        trainable: the names of parameters that require a gradient.
        may_use_rng: whether calling the module may draw random numbers, or run code of the user's.
        runs_users_code: whether the module or something that is called in it is neither torch's nor the library's, by
            the modules that classes, hooks and functions come from.
        declared: the parameters of the module that have attributes or a class of the user's, on the meta device.
        skeleton: a copy of the user's module on the meta device, to read classes, hooks and attributes from.
        modes: of submodules that were in eval mode in a module that was not, and of those in them: their modes.
        buffer_places: by the name of each buffer, the paths of its places.

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
        "_idle",
        "_origin",
        "_registered",
        "_served",
        "_shown",
        "_signature",
        "altered",
        "buffer_names",
        "buffer_places",
        "declared",
        "may_use_rng",
        "modes",
        "parameter_names",
        "runs_users_code",
        "skeleton",
        "trainable",
    )

    def __init__(self, skeleton: nn.Module, altered: Altered = UNALTERED) -> None:
        self.skeleton = skeleton
        self._idle: list[Instance] = []
        self._signature: tuple[Any, ...] | None = None
        self._origin: Callable[[], nn.Module | None] = _no_module
        # Of submodules in eval mode, and of those in them, in a module that is not: the mode in which they are trained.
        self.modes = modes_to_keep(skeleton)
        parameters = dict(skeleton.named_parameters())
        self.declared = {name: param for name, param in parameters.items() if is_declared(param)}
        # An optimizer, and what it is for these parameters.
        self._served: tuple[Any, Any] | None = None
        self.parameter_names = tuple(parameters)
        self.trainable = tuple(name for name, parameter in parameters.items() if parameter.requires_grad)
        self._alter(altered)
        # The names of all buffers that this structure and those made of it have had.
        self._registered = set(self.buffer_names)
        # Whether code of the user's was given a private module; in a list, because those made of this one share it.
        self._shown = [False]
        self.runs_users_code = is_users(skeleton)
        self.may_use_rng = self.runs_users_code or any(may_use_rng(module) for module in skeleton.modules())

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
        from pure_loop.model.checks import refuse_aliases, refuse_shared_memory

        refuse_shared_memory(module)
        meta: dict[int, Any] = {}
        for parameter in module.parameters():
            empty = torch.empty_like(parameter, device="meta")
            meta[id(parameter)] = declared_like(parameter, empty, parameter.requires_grad)
        for buffer in module.buffers():
            meta[id(buffer)] = torch.empty_like(buffer, device="meta")
        refuse_uncopyable(module)
        try:
            # Every tensor is found already "copied" in the memo: no numbers are duplicated.
            skeleton = copied(module, meta, prepare=partial(copy_attributes, module))
        except Exception as error:  # of whatever class: that of an attribute decides
            raise ModelError(
                f"{type(module).__name__} can't be copied: {type(error).__name__}: {error}. Keep what can't be copied "
                "outside of the module: in a global name, or in an object of yours that a hook or a function of "
                "pl.Task refers to; or make it in the forward."
            ) from error
        refuse_aliases(skeleton)
        own_classes(skeleton)
        params = FrozenDict((name, _copy(p, device)) for name, p in module.named_parameters())
        buffers = FrozenDict((name, _copy(b, device)) for name, b in module.named_buffers())
        model = cls(skeleton)
        model._origin = ref(module)
        return model, params, buffers

    def _alter(self, altered: Altered) -> None:
        self.altered = altered
        self.buffer_places = places_of(self.skeleton, altered)
        self.buffer_names = tuple(self.buffer_places)
        self._signature = None

    def with_altered(self, altered: Altered) -> ModelDef:
        """This structure after forwards have altered buffers; it shares everything else, private modules included."""
        if altered == self.altered:
            return self
        result = object.__new__(ModelDef)
        for name in _SHARED:
            setattr(result, name, getattr(self, name))
        result._alter(altered)
        self._registered.update(result.buffer_names)
        return result

    def fitting(self, buffers: Mapping[str, Tensor]) -> ModelDef:
        """This structure with the buffers of these names, which forwards have registered; itself, if it has them."""
        if buffers.keys() == self.buffer_places.keys():
            return self
        skeleton, altered = self.skeleton, dict(self.altered)
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
        return {name: tensor for name, tensor in self.skeleton.named_buffers() if name not in self.altered}

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
            hold: keep the instance with ``params`` until :meth:`release_graph`: activation checkpointing goes through
                it again in the backward, and a module's own ``loss`` may read what its forward left there.

        Raises:
            ArgumentError: a name is missing in ``params`` or ``buffers``, or unknown.
            ModelError: the function registered, replaced or removed a parameter or submodule.
        """
        params = _all_named("params", params, self.parameter_names)
        model, more = self, buffers.keys() - self.buffer_places.keys()
        if more and more <= self._registered:
            model = self.fitting(buffers)  # that of an earlier call's result
        buffers = _all_named("buffers", buffers, model.buffer_names)
        self.show()
        result, after, _ = model.call(function, params, buffers, training=training, hold=hold)
        return result, after

    def show(self) -> None:
        """Code of the user's is given a private module: it may keep that, and read its parameters later."""
        self._shown[0] = True

    @property
    def was_shown(self) -> bool:
        """Whether code of the user's was given a private module of this model, by any stream."""
        return self._shown[0]

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
        hold = are_leaves(params) and (hold or params.holder is not None)
        instance = self.enter(params, buffers, training=training)
        result = function(instance.module)
        # While it is held, a recomputation may write to its buffers again, and never to those of a State.
        after = instance.read_buffers(buffers, copy=hold)
        if hold:
            instance.bind_to_graph(params)
        else:
            self._idle.append(instance)
        altered = instance.altered
        return result, after, self if altered is self.altered else self.with_altered(altered)

    def enter(self, params: FrozenDict[str, Tensor], buffers: FrozenDict[str, Tensor], *, training: bool) -> Instance:
        """An instance with these tensors in its module; :meth:`apply` for code that calls the module itself."""
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

    def release_graph(self, leaves: FrozenDict[str, Tensor]) -> None:
        """Free the instance of these leaves, now that their graph is gone, for other calls."""
        instance: Instance | None = getattr(leaves, "holder", None)
        if instance is not None:
            leaves.holder, instance.params = None, instance.bound()
            self._idle.append(instance)

    def differentiated(self, frozen: frozenset[str]) -> tuple[str, ...]:
        """The names of the parameters that a backward differentiates by: those that are trained and not frozen."""
        return tuple([name for name in self.trainable if name not in frozen]) if frozen else self.trainable

    def leaves(self, params: FrozenDict[str, Tensor], frozen: frozenset[str]) -> FrozenDict[str, Tensor]:
        """The parameters as autograd leaves that share their memory: what a forward differentiates by.

        ``leaves.origin`` is ``params``; those of names in ``frozen`` need no gradient. If ``params`` are such leaves,
        they are returned, unless a graph still uses them.
        """
        if are_leaves(params):
            if params.holder is None and params.frozen == frozen and not are_marked(params):
                return params
            params = params.origin
        for instance in self._idle:
            bound = instance.params
            same = bound is not None and are_leaves(bound) and bound.origin is params and bound.frozen == frozen
            if bound is not None and same and not are_marked(bound):
                return bound
        trainable = self.differentiated(frozen)
        if len(trainable) == len(params):
            leaves = FrozenDict(zip(params, [t.detach().requires_grad_() for t in params.values()], strict=True))
        else:
            wanted = frozenset(trainable)
            leaves = FrozenDict(
                (name, tensor.detach().requires_grad_(name in wanted)) for name, tensor in params.items()
            )
        if self.declared:
            leaves = FrozenDict((name, self.seen_as_declared(name, leaf)) for name, leaf in leaves.items())
        leaves.origin, leaves.holder, leaves.frozen = params, None, frozen
        return leaves

    def seen_as_declared(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor with the class and the attributes of the user's parameter of this name; its memory is the same.

        A tensor of another class than torch's own (a DTensor, or one in a traced step) gets the attributes alone.
        """
        declared = self.declared.get(name)
        if declared is None:
            return tensor
        if type(tensor) is Tensor:
            like: Tensor = declared_like(declared, tensor, tensor.requires_grad, attributes=True)
            return like
        vars(tensor).update(attributes_of(declared))
        return tensor

    def served_by(self, optimizer: S) -> S:
        """The optimizer for these parameters, which gives them to its label function as the user declared them."""
        if not self.declared or optimizer.seeing is None:
            return optimizer
        served = self._served
        if served is None or served[0] is not optimizer:
            served = self._served = optimizer, optimizer.seeing(self.seen_as_declared)
        result: S = served[1]
        return result

    def copied(self, *, independent: bool = False) -> nn.Module:
        """A copy of the module, on the meta device; see :func:`pure_loop.model.structure.copied`."""
        if not self.declared:
            return copied(self.skeleton, independent=independent)
        memo: dict[int, Any] = {
            id(param): declared_like(param, torch.empty_like(param), param.requires_grad)
            for param in self.skeleton.parameters()
        }
        return copied(self.skeleton, memo, independent=independent, prepare=partial(copy_attributes, self.skeleton))

    def trained(self, params: FrozenDict[str, Tensor]) -> FrozenDict[str, Tensor]:
        """The parameters that are trained; the mapping itself where all are."""
        if len(self.trainable) == len(params):
            return params
        return FrozenDict((name, params[name]) for name in self.trainable)

    def module(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, training: bool = True
    ) -> nn.Module:
        """A plain, independent ``nn.Module`` with copies of these tensors; yours to change.

        If they are sharded, all ranks have to call it together.

        Args:
            params: parameters.
            buffers: buffers.
            training: train mode, in which submodules that are kept in eval mode stay so, or eval mode.
        """
        meet(params, "state.module()")
        module = self.copied(independent=True)
        own_classes(module)
        wanted = frozenset(self.trainable)
        before = dict(module.named_parameters())
        parameters = {
            name: declared_like(before[name], full_tensor(tensor.detach()).clone(), name in wanted, attributes=True)
            for name, tensor in params.items()
        }
        for name, tensors, key in tensor_places(module, self.parameter_names, "_parameters"):
            tensors[key] = parameters[name]
        put_slots(module, self.altered)
        copies = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        for name, tensors, key in self.places_of_buffers(module):
            tensors[key] = copies[name]
        self.set_mode(module, training)  # with its numbers in place: a train() of the user's may compute with them
        return module

    def watching(self, forward: Callable[[nn.Module, Any], T], functions: Iterable[Any]) -> Callable[[Any, Any], T]:
        """A forward that refuses to set attributes, where one of these functions has the module that was split.

        It is for the first batch. ``functions`` are the loss and other user functions.
        """

        def call(module: nn.Module, batch: Any) -> T:
            before = plain_attributes(module)
            result = forward(module, batch)
            after = plain_attributes(module)
            changed = [place for place, value in after.items() if place not in before or before[place] is not value]
            origin = self._origin()
            for function in functions if changed else ():
                if origin is not None and refers_to(function, origin):
                    where = ".".join(filter(None, ("model", *changed[0])))
                    raise ModelError(
                        f"the forward sets {where}, and {name_of(function)} refers to the model that was passed to "
                        "fit, where it is never set: a forward runs on a copy of the module tree. Return the value "
                        "from the forward with the outputs, or give the model a method loss(outputs, batch), which is "
                        "called on the copy."
                    )
            return result

        return call

    def referred_to(self) -> list[Any]:
        """The user's objects that its instances refer to, and that are not copied."""
        return referred_to(self.skeleton)

    def attribute_with(self, parameter: Tensor) -> str | None:
        """The attribute of the module, such as ``model.layers``, that leads to a tensor outside of the module tree."""
        return attribute_with(self.skeleton, parameter)

    def places_of_buffers(self, module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
        """(name, dict, key) for every place of a buffer in a copy of the module: several where one is tied."""
        return places_at(module, self.buffer_places)

    def set_mode(self, module: nn.Module, training: bool) -> None:
        """Put a copy of the module into train or eval mode; in train mode, what is kept in eval mode stays in it."""
        set_mode(module, training, self.modes)

    def prepare_instances(self, count: int) -> None:
        """Make so many instances for later calls, in place of those that there are."""
        self._idle[:] = [Instance(self) for _ in range(count)]

    def release(self) -> None:
        """Forget the tensors that idle instances still hold."""
        self._idle.clear()

    def unbind(self) -> None:
        """Forget the parameters that idle instances still hold, and keep the instances."""
        for instance in self._idle:
            instance.unbind(self.skeleton)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What equality compares: classes, settings, names, shapes and dtypes."""
        if self._signature is None:
            tensors = [*self.skeleton.named_parameters(), *self.skeleton.named_buffers()]
            self._signature = (
                tuple((name, class_of(module)) for name, module in self.skeleton.named_modules()),
                repr(self.skeleton),
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
        return _rebuilt, (self.skeleton, {name: type(param) for name, param in self.declared.items()}, self.altered)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise MissingAttributeError(f"state.model has no attribute {name!r}: {_NO_MODULE}", name=name)

        def __call__(self, *_: object, **__: object) -> NoReturn:
            raise ArgumentTypeError(f"state.model can't be called: {_NO_MODULE}")

    def __repr__(self) -> str:
        name = type(self.skeleton).__name__
        return f"ModelDef({name}: {len(self.parameter_names)} parameters, {len(self.buffer_names)} buffers)"


_NO_MODULE = (
    "it is the structure of the model, without its numbers. Write state.module(training=False), which is a module with "
    "them in eval mode, or state.module() in train mode."
)
_SHARED = tuple(
    name
    for name in ModelDef.__slots__
    if name not in ("__weakref__", "buffer_places", "_signature", "altered", "buffer_names")
)


def _no_module() -> None:
    """Stands for a reference to the user's module where there is none."""


def _rebuilt(skeleton: nn.Module, classes: dict[str, type], altered: Altered = UNALTERED) -> ModelDef:
    for name, parameter in skeleton.named_parameters():
        if name in classes:
            set_class(parameter, classes[name])
    return ModelDef(skeleton, altered)


def _all_named(kind: str, value: Mapping[str, Tensor], names: tuple[str, ...]) -> FrozenDict[str, Tensor]:
    if isinstance(value, FrozenDict) and len(value) == len(names):
        return value
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(f"{kind} is {type(value).__name__}, and a mapping of names to tensors is needed.")
    missing, unknown = set(names) - value.keys(), value.keys() - set(names)
    if missing or unknown:
        says = (("missing", missing), ("unknown", unknown))
        raise ArgumentError(
            f"{kind} has other names than the model: "
            + "; ".join(f"{what} {sorted(some)[:3]}" for what, some in says if some)
            + f". Give all of them: {{**state.{kind}, name: tensor}}."
        )
    return FrozenDict((name, value[name]) for name in names)


def _copy(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    return tensor.detach().to(device=device, copy=True)
