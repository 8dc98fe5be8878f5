"""Sharded training by torch's ``fully_shard``: a rank holds a shard of each parameter, gradient and optimizer state.

In a State they are DTensors, split along their first dimension. A private module, to which ``fully_shard`` was
applied, gathers the parameters of one group of layers at a time and scatters its gradients; the State's shards are
copied into it. Optimizers work on the shards alone. Where steps are compiled, all parameters are gathered before the
first forward (:mod:`pure_loop.distributed.parameters`), and that module isn't made.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast
from weakref import ref

import optree
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from pure_loop._internal.autograd import scalar_like, zero_unless
from pure_loop._internal.pytree import NAMESPACE, Batch, Outputs, PyTree
from pure_loop._internal.torch_private import drop_groups_of_fsdp
from pure_loop._internal.tree_ops import from_local, full_tensor, is_sharded, local_tensor
from pure_loop.data.batch import map_tensors
from pure_loop.distributed.meshes import break_mesh, find_mesh, is_cut, mesh_of
from pure_loop.distributed.multi_rank import Gradients, MultiRankEngine, no_parameters, register_hook
from pure_loop.distributed.parameters import LazyLeaves, UnshardedParameters, origin_of
from pure_loop.errors import ArgumentError, DistributedError, ModelError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.initial import initialised
from pure_loop.model.buffers import UNALTERED, Altered, alterations, put_slots, slot_of
from pure_loop.model.model import ModelDef
from pure_loop.optim import Optimizer
from pure_loop.optim.optimizer import time_of_step
from pure_loop.state import State, raw_opt_state, raw_outputs, raw_params, with_fields

T = TypeVar("T")
Path: TypeAlias = tuple[str, ...]


class ShardEngine(MultiRankEngine):
    """Parameters in parts, gathered by ``fully_shard`` where they are needed, or all of them for graphs."""

    _way = "parallel='shard'"  # in errors
    _mesh: DeviceMesh
    in_parts = ("opt_state", "algorithm_state")
    _meets_before_forwards = True
    _model: ModelDef | None = None
    _module: Any = None
    _groups: Sequence[FSDPModule] = ()
    _held: dict[str, nn.Parameter]
    _buffers: list[tuple[str, dict[str, Any], str]]
    # What has become of the buffers that the module came with.
    _altered: Altered = UNALTERED
    _frozen: frozenset[str] = frozenset()
    # The parameters that gave the module its numbers, unless they are gone.
    _copied: Callable[[], object] = staticmethod(no_parameters)
    # How many microbatches of the batch fully_shard has added up the gradients of.
    _added_up = 0
    # Their gradients through values observed between the forward and the backward.
    _penalties: dict[str, Tensor | None]
    # Of this model, where steps are compiled.
    _unsharded: UnshardedParameters | None = None
    _unsharded_of: tuple[ModelDef, frozenset[str]] | None = None

    def start(self, state: State, settings: Mapping[str, object], *, fresh: bool) -> State:
        state = super().start(state, settings, fresh=fresh)
        self._settle(state)
        return self._in_parts(state)

    def _initialised(self, state: State) -> State:
        self._settle(state)
        return initialised(state, self._part)

    def _settle(self, state: State) -> None:
        """Choose the mesh over which the State is, or will be, in parts."""
        mesh = mesh_of(state)
        if mesh is None:
            # Each rank by itself: one that raises while another one waits for its answer breaks the connection.
            refuse_scalars(state)
            mesh = find_mesh(self.talk) if self.parallel.mesh is None else self.parallel.mesh
        self._mesh = mesh

    def failed(self, error: BaseException, event: Event, state: State | None) -> None:
        # After the loop, on all ranks, States are used sharded.
        if not isinstance(error, GeneratorExit):
            # The others may wait in the middle of a forward.
            for group in self._groups:
                drop_groups_of_fsdp(group)
            break_mesh(self.talk)
        super().failed(error, event, state)

    def _keeps(self, mesh: DeviceMesh) -> bool:
        return not is_cut(mesh)

    def _placements_of(self, name: str) -> tuple[Placement, ...]:
        """How ranks hold the parameter of this name."""
        return (Shard(0),) if self._mesh.ndim == 1 else (Replicate(), Shard(0))

    def _in_parts(self, state: State) -> State:
        """A State of whole tensors as one of parts: parameters, and what is kept of each of them."""
        shapes = {name: tensor.shape for name, tensor in raw_params(state).items()}

        def split(path: tuple[str, ...], leaf: object) -> object:
            name = next((key for key in path if key in shapes), None)
            if name is None or not isinstance(leaf, Tensor) or leaf.shape != shapes[name] or not leaf.ndim:
                return leaf
            return self._part(name, leaf)

        fields = ("params", "opt_state", "algorithm_state")
        trees: dict[str, Any] = {
            field: optree.tree_map_with_path(split, getattr(state, field), namespace=NAMESPACE) for field in fields
        }
        return state.replace(**trees)

    def _part(self, name: str, tensor: Tensor) -> DTensor:
        """This rank's part of a whole tensor, a parameter or what is kept of it; what is in parts stays as it is."""
        if is_sharded(tensor):
            return tensor
        part, placements = tensor.detach(), self._placements_of(name)
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                chunks, place = part.chunk(self._mesh.size(dim), placement.dim), self._mesh.get_local_rank(dim)
                part = chunks[place] if place < len(chunks) else part.narrow(placement.dim, 0, 0)
        part = part.clone(memory_format=torch.contiguous_format)
        shape, stride = tensor.shape, torch.empty(tensor.shape, device="meta").stride()
        like = DTensor.from_local(part, self._mesh, placements, run_check=False, shape=shape, stride=stride)
        return cast("DTensor", from_local(like, part))  # the one above has a view of it

    def _as_part(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter in parts: an algorithm may have made others of the whole ones that it was shown in a forward."""
        return tensor if is_sharded(tensor) else self._part(name, tensor)

    # Forward and backward.

    def leaves(self, state: State, *, index: int, last: bool) -> FrozenDict[str, Tensor]:
        origin = origin_of(raw_params(state))
        trained = frozenset(state.model.differentiated(state.frozen))

        def gathered(name: str) -> Tensor:
            tensor: Tensor = full_tensor(origin[name].detach())
            return tensor.requires_grad_(name in trained)

        return LazyLeaves(origin, gathered, origin.__getitem__, frozen=state.frozen, index=index, last=last)

    def apply(
        self,
        state: State,
        function: Callable[[nn.Module], T],
        params: FrozenDict[str, Tensor],
        *,
        training: bool,
        hold: bool = False,
    ) -> tuple[T, FrozenDict[str, Tensor], ModelDef]:
        model = state.model
        if self._model is None or self._model.skeleton is not model.skeleton or self._frozen != state.frozen:
            self._build(model, state.frozen)
        module = self._module
        if self._altered is not model.altered:
            came = model.skeleton
            put_slots(module, {path: slot_of(came, path) for path in self._altered if path not in model.altered})
            put_slots(module, model.altered)
            self._altered, self._buffers = model.altered, list(model.places_of_buffers(module))
        self._load(origin_of(params), training)
        self._bind({name: buffer.clone() for name, buffer in state.buffers.items()})
        result = function(module)
        altered = alterations(module, model.skeleton, model.altered)
        if altered is not model.altered:
            model = model.with_altered(altered)
            self._altered, self._buffers = altered, list(model.places_of_buffers(module))
        after = {name: tensors[key] for name, tensors, key in self._buffers}
        if isinstance(params, LazyLeaves):
            params.buffers = after
        return result, FrozenDict((name, tensor.detach().clone()) for name, tensor in after.items()), model

    def _load(self, params: FrozenDict[str, Tensor], training: bool) -> None:
        """Give the module the numbers of these parameters, and this mode."""
        # Of these very parameters, when they had the numbers of another State, or from a forward without gradients.
        torch.clear_autocast_cache()
        if self._copied() is not params:
            for group in self._groups:
                group.reshard()  # what an evaluation gathered stays gathered, for there is no backward to free it
            with torch.set_grad_enabled(False):
                mine = [local_tensor(self._as_part(name, params[name])) for name in self._held]
                torch._foreach_copy_([local_tensor(held) for held in self._held.values()], mine)
            self._copied = ref(params)
        if self._module.training is not training:
            assert self._model is not None
            self._model.set_mode(self._module, training)

    def _bind(self, buffers: Mapping[str, Tensor]) -> None:
        for name, tensors, key in self._buffers:
            if name in buffers:  # else a forward since has registered it
                tensors[key] = buffers[name]

    def parameters(self) -> Iterable[Tensor] | None:
        return None  # the gathered ones are fully_shard's own

    def gradient(
        self,
        state: State,
        loss: Tensor | None,
        seed: Tensor | float,
        *,
        in_place: bool = False,
        counts: Tensor | None = None,
    ) -> Gradients | None:
        leaves = raw_params(state)
        assert isinstance(leaves, LazyLeaves)
        if leaves.index != self._added_up:
            raise DistributedError(
                f"a gradient of microbatch {leaves.index} of batch {state.timestamp.batch} was taken where fully_shard "
                f"adds up those of the batch and has come to microbatch {self._added_up}: it would be among them. An "
                'algorithm takes one by itself at BATCH_START or AFTER_TRAIN_BATCH, or with parallel="replicate".'
            )
        _refuse_gradients(state)
        # Another forward may have come in between, of other parameters, in evaluation, or of another microbatch.
        self._load(leaves.origin, training=True)
        self._bind(leaves.buffers)
        self._module.set_requires_gradient_sync(leaves.last)
        with torch.set_grad_enabled(True):
            if loss is None:
                # A backward in which nothing counts, and in which this rank takes part.
                outputs = [tensor for tensor in _tensors(raw_outputs(state)) if tensor.requires_grad]
                torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
            else:
                if counts is not None:
                    # The gradients of parameters are fully_shard's own: what is NaN is stopped at the outputs.
                    for output in _tensors(raw_outputs(state)):
                        if output.requires_grad:
                            register_hook(output, partial(zero_unless, counts))
                # It divides by the number of ranks.
                factor = scalar_like(loss, seed) * self.ranks
                torch.autograd.backward(loss, factor)
        leaves.close()
        for name, leaf in leaves.seen.items():
            before = self._penalties.get(name)
            self._penalties[name] = leaf.grad if before is None else before if leaf.grad is None else before + leaf.grad
        if not leaves.last:
            self._added_up += 1
            return None
        self._added_up = 0
        held = {name: self._held[name] for name in state.model.differentiated(state.frozen)}
        result = {name: self._placed(name, leaves.origin[name], parameter.grad) for name, parameter in held.items()}
        for parameter in held.values():
            parameter.grad = None
        # fully_shard puts the gradients that there are one after the other, whichever they are.
        missing = ",".join(name for name, leaf in result.items() if leaf is None)
        self._signature = float(zlib.crc32(missing.encode()))
        penalties, self._penalties = self._penalties, {}
        for name in result:
            if name in penalties:
                result[name] = self._with_penalty(name, raw_params(state)[name], result[name], penalties[name])
        return tuple(result.values())

    def _placed(self, name: str, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        """A gradient of fully_shard's, held by ranks as the State's parameter is."""
        return gradient

    # What graphs do between two exchanges.

    def unsharded(self, state: State) -> State:
        params = raw_params(state)
        if not all(map(is_sharded, params.values())):
            params = FrozenDict((name, self._as_part(name, param)) for name, param in params.items())
        of = state.model, state.frozen
        if self._unsharded is None or self._unsharded_of != of:
            self._unsharded, self._unsharded_of = UnshardedParameters(params, state.model.differentiated(of[1])), of
        return with_fields(state, params=self._unsharded.of(params), _grads=None)

    def accumulate(self, state: State, before: State, *, last: bool) -> State:
        _refuse_gradients(before)
        wholes, params = self._unsharded, raw_params(before)
        assert wholes is not None
        grads, state = dict(state._grads), with_fields(state, params=params, _grads=None)
        if not last:
            wholes.add(grads)
            return state
        names = tuple(grads)
        self._drop(state.model)
        result = wholes.scatter(grads)
        parts = (
            from_local(self._as_part(name, params[name]), result[name]) if name in result else None for name in names
        )
        return with_fields(state, _grads=FrozenDict(zip(names, parts, strict=True)))

    def next_batch(self, state: State, *rest: Any) -> tuple[Batch, int, int] | None:
        ready = super().next_batch(state, *rest)
        if ready is None:
            self._drop(state.model)  # those of an evaluation
        return ready

    def _drop(self, model: ModelDef) -> None:
        """Let go of whole parameters, which a module that was called with them still has."""
        if self._unsharded is not None:
            self._unsharded.drop()
            model.unbind()

    def _with_penalty(self, name: str, parameter: Tensor, gradient: Tensor | None, penalty: Tensor | None) -> Tensor:
        """The gradient of one parameter, with what came to it by way of ``state.params``; all ranks looked at it."""
        total = torch.zeros_like(parameter) if penalty is None else penalty.contiguous()
        part = self._part(name, self.talk.sum(total) / self.ranks)
        return part if gradient is None else gradient + part

    def _build(self, model: ModelDef, frozen: frozenset[str]) -> None:
        self._forget_module()
        module = self._copied_module(model)
        trained = set(model.differentiated(frozen))
        for name, parameter in module.named_parameters():
            if name not in trained:
                parameter.requires_grad_(False)  # fully_shard reduces no gradient of it
        groups = self.parallel.groups
        chosen = (
            [submodule for name, submodule in module.named_modules() if name and groups(name, submodule)]
            if groups is not None
            else list(repeated_layers(module))
        )
        # Inner ones first.
        for item in (*reversed(chosen), module):
            item.register_forward_hook(_without_views)
            fully_shard(item, mesh=self._mesh_of_module)
        module.to_empty(device=self.talk.device)
        self._module, self._model, self._frozen = module, model, frozen
        self._groups = [layer for layer in module.modules() if isinstance(layer, FSDPModule)]
        self._held = dict(module.named_parameters())
        self._altered = model.altered
        put_slots(module, model.altered)
        self._buffers = list(model.places_of_buffers(module))
        if set(self._held) != set(model.parameter_names):
            raise ModelError(
                f"{type(module).__name__} can't be sharded as it is: a parameter that several layers share has to "
                "be in one group with all of them; say which submodules are gathered as one, "
                "Parallel(kind='shard', groups=lambda name, module: ...)."
            )

    @property
    def _mesh_of_module(self) -> DeviceMesh:
        return self._mesh

    def _copied_module(self, model: ModelDef) -> nn.Module:
        """The module to which fully_shard is applied, on the meta device."""
        return model.copied()

    # The update.

    def init_opt_state(self, optimizer: Optimizer, trained: FrozenDict[str, Tensor]) -> PyTree:
        if not optimizer.elementwise:
            raise ArgumentError(
                f"optimizer {optimizer.name!r} may need whole parameters, and with {self._way} a rank holds a "
                "shard of each: use one whose update is elementwise (adamw, adam, sgd, ...; one of your own is "
                "declared by Optimizer(..., elementwise=True)), or parallel='replicate'."
            )
        return self._wrapped(optimizer.init(_parts(trained)), trained)

    def update(self, optimizer: Optimizer, state: State, trained: FrozenDict[str, Tensor]) -> PyTree:
        assert state._grads is not None
        params, parts = _parts(trained), _parts_in(raw_opt_state(state))
        timestamp = time_of_step(optimizer, state.timestamp, state.lr_scale)
        updated, opt_state = optimizer.update(_parts(state._grads), parts, params, timestamp)
        return _with_parts(trained, params, updated), self._merged(raw_opt_state(state), parts, opt_state, trained)

    def overwrite(
        self,
        optimizer: Optimizer,
        state: State,
        trained: FrozenDict[str, Tensor],
        memory: PyTree,
        found_inf: Tensor | None = None,
        *,
        fits: bool = False,
    ) -> PyTree:
        assert state._grads is not None
        assert optimizer.overwrite is not None
        self._copied = no_parameters  # the parameters stay the same tensors, with other numbers
        params, parts = _parts(trained), _parts_in(memory)
        options = {} if found_inf is None else {"found_inf": found_inf}
        timestamp = time_of_step(optimizer, state.timestamp, state.lr_scale)
        updated, opt_state = optimizer.overwrite(_parts(state._grads), parts, params, timestamp, **options)
        return _with_parts(trained, params, updated), self._merged(memory, parts, opt_state, trained)

    def _merged(
        self, memory: PyTree, parts: PyTree, updated: PyTree, trained: FrozenDict[str, Tensor], inside: Path = ()
    ) -> PyTree:
        """The optimizer state with the new shards; a tensor with the shard that it had stays the same object."""
        if updated is parts:
            return memory
        if type(updated) is not FrozenDict or type(parts) is not FrozenDict or updated.keys() != parts.keys():
            return self._wrapped(updated, trained, inside)
        return FrozenDict(
            (key, self._merged(memory[key], parts[key], updated[key], trained, (*inside, key))) for key in updated
        )

    def _wrapped(self, memory: PyTree, trained: FrozenDict[str, Tensor], inside: Path = ()) -> PyTree:
        """Optimizer state of shards, or the part of it at the path ``inside``, with its tensors as DTensors."""

        def wrap(path: Path, leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.ndim == 0:
                return leaf
            name = next((item for item in (*inside, *path) if item in trained), None)
            if name is None or leaf.shape != local_tensor(trained[name]).shape:
                return leaf
            return from_local(trained[name], leaf)

        return optree.tree_map_with_path(wrap, memory, namespace=NAMESPACE)

    def any_nonfinite(
        self, look: Callable[[Tensor, list[Tensor]], Tensor], loss: Tensor, tensors: Iterable[Tensor | None]
    ) -> Tensor:
        return self.talk.max(look(loss, [local_tensor(tensor) for tensor in tensors if tensor is not None]).clone())

    def _forget(self) -> None:
        self._forget_module()
        self._unsharded = self._unsharded_of = None

    def _forget_module(self) -> None:
        self._module = self._model = None
        self._copied = no_parameters
        self._held, self._buffers, self._groups = {}, [], ()
        self._penalties, self._added_up = {}, 0


class _Unviewed(torch.autograd.Function):
    """A tensor with this one's memory, and a view of no other."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


_unviewed: Callable[[Tensor], Tensor] = _Unviewed.apply


def _without_views(module: nn.Module, args: object, outputs: Outputs) -> Outputs:
    """A forward hook: what fully_shard waits for in a backward it would lose where a view is written to in place.

    On a CPU the outputs of a Linear are a view as soon as there are more than two dimensions.
    """
    if not torch.is_grad_enabled():
        return outputs

    def apart(tensor: Tensor) -> Tensor:
        return _unviewed(tensor) if tensor.requires_grad and tensor._base is not None else tensor

    return map_tensors(apart, outputs)


def refuse_scalars(state: State) -> None:
    """
    Raises:
        ModelError: a parameter has no first dimension.
    """
    scalars = [name for name, tensor in raw_params(state).items() if not tensor.ndim]
    if scalars:
        raise ModelError(
            f"{type(state.model.skeleton).__name__} can't be sharded: the parameters {scalars[:3]} are "
            "scalars, which have no parts. Give them a dimension, torch.zeros(1), or replicate."
        )


def _refuse_gradients(state: State) -> None:
    """Refuse gradients that were set before a backward; those of earlier microbatches are not in the State."""
    if state._grads is not None:
        raise DistributedError(
            f"state.grads was set before a backward of batch {state.timestamp.batch}, and sharded ranks add up the "
            "gradients of a batch in memory of their own, where these would be lost. Add to the gradients at "
            'AFTER_TRAIN_BATCH, where they are complete, or take parallel="replicate".'
        )


def _with_parts(
    tensors: FrozenDict[str, Tensor], parts: FrozenDict[str, Tensor], updated: Mapping[str, Tensor]
) -> FrozenDict[str, Tensor]:
    """The tensors with new parts; those with the part that they had are the same objects."""
    if updated is parts:
        return tensors
    return FrozenDict(
        (name, tensor if updated[name] is parts[name] else from_local(tensor, updated[name]))
        for name, tensor in tensors.items()
    )


def _parts_in(memory: PyTree) -> PyTree:
    return optree.tree_map(local_tensor, memory, namespace=NAMESPACE)


def _parts(tensors: Mapping[str, Tensor | None]) -> FrozenDict[str, Any]:
    return FrozenDict((name, local_tensor(tensor)) for name, tensor in tensors.items())


def repeated_layers(module: nn.Module) -> Iterable[nn.Module]:
    """The elements of the outermost lists of layers."""
    for child in module.children() if isinstance(module, nn.ModuleList | nn.Sequential) else ():
        if any(True for _ in child.parameters()):
            yield child
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        for child in module.children():
            yield from repeated_layers(child)


def _tensors(outputs: Outputs) -> list[Tensor]:
    """All tensors in outputs, those inside of a ``PackedSequence`` or a ``TensorDict`` among them."""
    result: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        result.append(tensor)
        return tensor

    map_tensors(take, outputs)
    return result
