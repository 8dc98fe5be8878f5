"""The private names of torch and CPython that eager code uses, and what serves where a release of torch lacks one.

No other module that eager code imports names one. Each is looked up once, here. Where it is missing, its public
fallback does the same, mostly slower, and :data:`missing` says what is lost; ``python -m pure_loop`` prints that. So no
release that moves a private name keeps ``import pure_loop`` or training from working.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import optree
import torch
import torch.utils.data
from torch import Tensor
from torch.optim import optimizer as optimizers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

C = TypeVar("C")
M = TypeVar("M")
T = TypeVar("T")

missing: dict[str, str] = {}
"""The private names that this torch lacks, each with what is lost by its fallback.

Those of modules that ``import pure_loop`` doesn't import (torch.distributed, the DataLoader) are looked up, and noted,
when they are first needed.
"""


def _find(owner: object, path: str, lost: str) -> Any:
    """The attribute, or None, noted in :data:`missing` with what is lost."""
    try:
        return attrgetter(path)(owner)
    except AttributeError:
        missing[f"{getattr(owner, '__name__', owner)}.{path}"] = lost
        return None


# Frames of this module stand between a caller and some functions of torch; elsewhere that module has no frames.
WRAPPER_OF_FUNCTIONS = "torch._compile"

# Autocast.


def _any_autocast_enabled() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))


any_autocast_enabled: Callable[[], bool] = (
    _find(torch, "_C._is_any_autocast_enabled", "three microseconds a step") or _any_autocast_enabled
)


# Autograd's engine.


def _run_backward(
    tensors: tuple[Tensor, ...],
    seeds: tuple[Tensor, ...],
    keep_graph: bool,
    create_graph: bool,
    inputs: tuple[Tensor, ...],
    **_: bool,
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(tensors, inputs, seeds, keep_graph, create_graph, allow_unused=True)


# What torch.autograd.grad itself calls, behind its checks of every input and a hook for its debug log.
run_backward: Callable[..., tuple[Tensor, ...]] = (
    _find(torch.autograd.Variable, "_execution_engine.run_backward", "five microseconds a step") or _run_backward
)
# Which call of the engine is running, a number; torch's checkpoint asks for it. None: gradients are not added in place.
graph_task: Callable[[], int] | None = _find(
    torch,
    "_C._current_graph_task_id",
    "adding gradients of microbatches in place: one more set of them in memory",
)


def _always(*_: object) -> bool:
    return True


# Tensors: what they are, and what refers to them.


# Inside torch.func's transforms tensors have no memory of their own.
is_transformed: Callable[[Tensor], bool] = (
    _find(torch, "_C._functorch.is_functorch_wrapped_tensor", "errors of tensors that share memory") or _always
)
# The transforms of torch.func that are active; None where none is.
transforms: Callable[[], object] = (
    _find(torch, "_C._functorch.peek_interpreter_stack", "copies of many tensors by one operation, and donation")
    or _always
)
# torch 2.12 and later clone a list at once, at half the cost, but not inside torch.func.vmap.
foreach_clone: Callable[[list[Tensor]], Sequence[Tensor]] | None = getattr(torch, "_foreach_clone", None)
# How many references torch itself counts to a tensor and to a storage; None: nothing is donated.
tensor_uses: Any = _find(Tensor, "_use_count", "donation: every step copies")
storage_uses: Any = _find(torch, "_C._storage_Use_Count", "donation: every step copies")
# In a torch built for CUDA: whether memory, by its storage's pointer, goes straight back to torch's allocator.
storage_goes_back: Callable[[int], bool] | None = getattr(torch._C, "_has_Standard_Deleter", None)


# The base of classes that see every operation of a thread inside a ``with``.
DispatchMode: type[Any] = (
    _find(torch.utils._python_dispatch, "TorchDispatchMode", "strict's look for other threads") or nullcontext
)


def without_compiler(mode: type[Any]) -> type[Any]:
    """A class of modes without an import of torch's compiler, which takes seconds, at its first operation.

    torch hides the code of a mode from its compiler by a wrapper that imports it. Where no other code has imported it,
    nothing is compiled, and there is nothing to hide from.
    """
    hidden = getattr(mode, "__torch_dispatch__", None)
    plain = getattr(hidden, "__wrapped__", None)
    if hidden is None or plain is None:
        return mode

    def dispatch(self: object, function: object, types: object, args: object = (), kwargs: object = None) -> object:
        return (hidden if "torch._dynamo" in sys.modules else plain)(self, function, types, args, kwargs)

    mode.__torch_dispatch__ = dispatch
    return mode


# A context in which dispatch modes see no operation.
no_dispatch: Callable[[], AbstractContextManager[object]] = (
    _find(torch, "_C._DisableTorchDispatch", "strict's look for other threads") or nullcontext
)


# Which allocations a CUDA device has made: records them, and writes what it recorded to a file.
record_memory_history: Callable[..., None] | None = _find(torch.cuda.memory, "_record_memory_history", "MemorySnapshot")
dump_memory_snapshot: Callable[..., None] | None = _find(torch.cuda.memory, "_dump_snapshot", "MemorySnapshot")


# Kernels.


def _find_nonfinite(tensors: Sequence[Tensor], result: Tensor, inverse_scale: Tensor) -> None:
    for tensor in tensors:
        result.copy_(torch.maximum(result, (~torch.isfinite(tensor)).any().to(result)))


# Writes 1 into the second argument, float32 of shape (1,), where a tensor has a NaN or an infinity; the last one is 1.
find_nonfinite: Callable[[Sequence[Tensor], Tensor, Tensor], object] = (
    _find(torch, "_amp_foreach_non_finite_check_and_unscale_", "a tenth of a small model's step") or _find_nonfinite
)


def _amp_update_scale(
    scale: Tensor, tracker: Tensor, result: Tensor, growth: float, backoff: float, interval: int
) -> None:
    overflowed = result[0] > 0
    grown = scale * growth
    grows = (tracker + 1 == interval) & torch.isfinite(grown)
    scale.copy_(torch.where(overflowed, scale * backoff, torch.where(grows, grown, scale)))
    tracker.copy_(torch.where(overflowed | (tracker + 1 == interval), torch.zeros_like(tracker), tracker + 1))


# One step of torch.amp.GradScaler's rule, written into scale and tracker.
amp_update_scale: Callable[..., object] = (
    _find(torch, "_amp_update_scale_", "some microseconds a step in amp_fp16") or _amp_update_scale
)
# Optimizers' kernels; None: the same arithmetic by operations on lists of tensors.
fused_adam: Callable[..., None] | None = _find(torch, "_fused_adam_", "fused adam: it takes two to three times as long")
fused_adamw: Callable[..., None] | None = _find(torch, "_fused_adamw_", "fused adamw: two to three times as long")
fused_sgd: Callable[..., None] | None = _find(torch, "_fused_sgd_", "fused sgd: two to three times as long")


# Modules and parameters.

# What a module asks itself before it calls its forward: whether a hook for all modules is registered.
any_global_hook: Callable[[], bool] = (
    _find(torch, "nn.modules.module._has_any_global_hook", "an earlier return of modules that have buffers") or _always
)

# The hooks of all optimizers of torch.
_HOOKS_OF_OPTIMIZERS = "the copy of parameters that such a hook has kept"
_before_optimizers: object = _find(optimizers, "_global_optimizer_pre_hooks", _HOOKS_OF_OPTIMIZERS)
_after_optimizers: object = _find(optimizers, "_global_optimizer_post_hooks", _HOOKS_OF_OPTIMIZERS)


def any_optimizer_hook() -> bool:
    """Whether a hook is registered for the steps of all optimizers of torch."""
    return bool(_before_optimizers or _after_optimizers)


# What sees each operation: modes of functions and of operations, and what packs the tensors that a graph saves.
_COPIES = "the copy of parameters that such code has seen, and seeds for what it draws"
_count_function_modes: Callable[[], int] = _find(torch, "_C._len_torch_function_stack", _COPIES) or int
_count_dispatch_modes: Callable[[], int] = _find(torch, "_C._len_torch_dispatch_stack", _COPIES) or int
_function_modes: Callable[[], list[object]] = (
    _find(torch.overrides, "_get_current_function_mode_stack", _COPIES) or list[object]
)
_dispatch_modes: Callable[[], list[object]] = (
    _find(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", _COPIES) or list[object]
)
_packing: Callable[[bool], tuple[object, object] | None] = _find(
    torch, "_C._autograd._top_saved_tensors_default_hooks", _COPIES
) or (lambda _: None)


def code_around_operations() -> list[object]:
    """Classes and functions of which code runs at each operation, whatever module it belongs to; mostly none."""
    modes = _function_modes() if _count_function_modes() else []
    modes = [*modes, *_dispatch_modes()] if _count_dispatch_modes() else modes
    return [*map(type, modes), *(_packing(True) or ())]


def subclass_of_tensor(cls: type[Tensor], tensor: Tensor, requires_grad: bool) -> Tensor:
    """A tensor of this class over the same memory, made without calling the class."""
    make: Callable[[type[Tensor], Tensor, bool], Tensor] | None = getattr(Tensor, "_make_subclass", None)
    if make is not None:
        return make(cls, tensor.detach(), requires_grad)
    missing["torch.Tensor._make_subclass"] = "nothing"
    return tensor.detach().as_subclass(cls).requires_grad_(requires_grad)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a function is called with the gradient of this leaf, or after it was added up."""
    return bool(getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None))


# Pytrees: torch's own, which torch.func and torch.export flatten arguments by.

# Maps the leaves of a pytree of torch's, by which torch.export takes arguments apart.
map_pytree: Callable[[Callable[[Any], Any], Any], Any] = (
    _find(torch, "utils._pytree.tree_map", "exports of any batch size, of samples in classes that only torch knows")
    or optree.tree_map
)
_STATES_AS_ARGUMENTS = "States as arguments of functions that torch.func transforms"
_register_pytree: Callable[..., None] | None = _find(torch, "utils._pytree.register_pytree_node", _STATES_AS_ARGUMENTS)
# How classes are taken apart that were registered with torch, by class: flatten_fn and unflatten_fn.
registered_pytrees: Mapping[type, Any] = (
    _find(torch, "utils._pytree.SUPPORTED_NODES", "splitting batches of classes that are registered with torch only")
    or {}
)


def register_pytree(
    cls: type[C],
    flatten: Callable[[C], tuple[Sequence[object], M, Sequence[str]]],
    unflatten: Callable[[M, Iterable[Any]], C],
    *,
    attributes: bool,
) -> None:
    """Register a class with torch; the arguments are those of :func:`pure_loop._internal.pytree.register`."""
    if _register_pytree is None:
        return

    def torch_flatten(value: C) -> tuple[list[object], M]:
        children, metadata, _ = flatten(value)
        return list(children), metadata

    keys: dict[str, object] = {}
    make_key: Callable[[str], object] | None = _find(
        torch, f"utils._pytree.{'GetAttrKey' if attributes else 'MappingKey'}", "names in torch's errors about pytrees"
    )
    if make_key is not None:

        def torch_flatten_with_keys(value: C) -> tuple[list[tuple[object, object]], M]:
            children, metadata, names = flatten(value)
            return [(make_key(name), child) for name, child in zip(names, children, strict=True)], metadata

        keys["flatten_with_keys_fn"] = torch_flatten_with_keys
    try:
        _register_pytree(
            cls,
            torch_flatten,
            lambda children, metadata: unflatten(metadata, children),
            serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
            **keys,
        )
    except (AttributeError, NameError, TypeError):  # a function that takes other arguments
        missing["torch.utils._pytree.register_pytree_node"] = _STATES_AS_ARGUMENTS


# DTensors: tensors of which every rank holds a part. Importing torch.distributed is left to programs that have them.

_DTENSOR = "torch.distributed.tensor.DTensor"


def local_tensor(tensor: T) -> T:
    """What this rank holds of a DTensor, the same object whenever it is asked for; another tensor itself."""
    if type(tensor) is Tensor:
        return tensor
    part: T | None = getattr(tensor, "_local_tensor", None)
    if part is not None:
        return part
    to_local: Callable[[], T] | None = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    missing[f"{_DTENSOR}._local_tensor"] = "some microseconds for each tensor of a sharded step"
    with torch.no_grad():
        return to_local()


def dtensor_like(tensor: DTensor, part: Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """A DTensor that is placed as another one, with this part on this rank, and requires no gradient.

    Args:
        tensor: the other one.
        part: of the shape of the other's part; of any dtype.
        mesh: of the same shape as the other's; None: the other's.
    """
    name = f"{_DTENSOR}.__new__"
    mesh = tensor.device_mesh if mesh is None else mesh
    if name not in missing:
        try:
            spec: Any = tensor._spec
            if mesh is not spec.mesh or part.dtype is not tensor.dtype:
                spec = type(spec)(mesh, spec.placements, spec.tensor_meta._replace(dtype=part.dtype))
            return type(tensor)(part, spec, requires_grad=False)
        except (AttributeError, TypeError):  # a specification that is made, or taken, in another way
            missing[name] = "some microseconds for each tensor of a sharded step, and donation of sharded States"
    with torch.no_grad():
        return type(tensor).from_local(
            part, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )


# Data, devices and ranks.


# How torch's default collate treats each type; a user may have changed it.
default_collate_functions: dict[type | tuple[type, ...], Callable[..., object]] | None = _find(
    torch,
    "utils.data._utils.collate.default_collate_fn_map",
    "loading the rows of a TensorDataset by one operation",
)


# The attribute in which a DataLoader keeps an iterator; and what it sets for itself in a pass, as a new one has it.
KEPT_ITERATOR = "_iterator"
of_one_pass: Mapping[str, None] = {KEPT_ITERATOR: None, "_IterableDataset_len_called": None}


def iterator_of_loader(loader: object) -> Iterator[object] | None:
    """The iterator that a DataLoader with ``persistent_workers`` keeps; None: there is none."""
    if not hasattr(loader, KEPT_ITERATOR):
        missing["torch.utils.data.DataLoader._iterator"] = "workers that are kept end when they are collected"
    return getattr(loader, KEPT_ITERATOR, None)


def end_workers(batches: object) -> None:
    """End the workers of a DataLoader's iterator now; of one that has none, nothing."""
    end: Callable[[], object] | None = getattr(batches, "_shutdown_workers", None)
    if end is not None:
        end()


def mps_generator() -> torch.Generator:
    """The default generator of an Apple GPU.

    Raises:
        RuntimeError: this torch has it elsewhere.
    """
    generator: Callable[[], torch.Generator] | None = getattr(torch.mps, "_get_default_mps_generator", None)
    if generator is None:
        raise RuntimeError(
            "torch.mps._get_default_mps_generator is not there in this version of torch, and dropout on an Apple GPU "
            'is seeded by it: train on device="cpu", or install a version of torch that pure_loop was tested with.'
        )
    return generator()


def broadcast_coalesced(group: ProcessGroup | None, tensors: list[Tensor], size: int, source: int) -> None:
    """Send what tensors hold on one rank of the group to all, in messages of at most ``size`` bytes."""
    at_once: Callable[[ProcessGroup | None, list[Tensor], int, int], object] | None
    at_once = getattr(getattr(torch._C, "_distributed_c10d", None), "_broadcast_coalesced", None)
    if at_once is not None:
        at_once(group, tensors, size, source)
        return
    import torch.distributed as dist

    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=source)


def store_of(mesh: DeviceMesh) -> tuple[str, Any, int, int]:
    """The name of a mesh's process group, the store of the default one (None: ranks that are not there), rank, size."""
    import torch.distributed as dist

    group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    assert group is not None
    store = None if dist.get_backend(group) == "fake" else default_store()
    return group.group_name, store, group.rank(), group.size()


def default_store() -> Any:
    """The store by which the ranks of the default process group have met.

    Raises:
        RuntimeError: this torch has it elsewhere.
    """
    from torch.distributed import distributed_c10d as c10d

    find: Callable[[], Any] | None = getattr(c10d, "_get_default_store", None)
    if find is None:
        raise RuntimeError(
            "torch.distributed.distributed_c10d._get_default_store is not there in this version of torch, and ranks "
            "find each other by the store of the process group that is there: leave init_process_group to pure_loop, "
            "or install a version of torch that pure_loop was tested with."
        )
    return find()


def wait_tensor(tensor: Tensor) -> None:
    """Wait for what a functional collective gave; torch without this operation waits where the tensor is used."""
    operation = _find(torch, "ops._c10d_functional.wait_tensor", "simulated ranks don't see functional collectives")
    if operation is not None:
        operation(tensor)


class ReplaceableWorld(NamedTuple):
    """What simulated ranks replace in torch.distributed, and put back.

    Attributes:
        cls: the class of the object by which torch finds its process groups.
        get: gives that object.
        put: puts another one in its place.
        register: ``(name, group)``: functional collectives find a group by its name.
        unregister: ``(name)``.
    """

    cls: Any
    get: Callable[[], Any]
    put: Callable[[object], None]
    register: Callable[[str, object], None]
    unregister: Callable[[str], None]


def replaceable_world() -> ReplaceableWorld | None:
    """The process groups of this process, where they can be replaced; None, noted in :data:`missing`, elsewhere."""
    import torch.distributed
    from torch.distributed import distributed_c10d as c10d

    lost = "the laws of ranks run on real processes alone, which takes seconds and not microseconds"
    cls, _ = _find(c10d, "_World", lost), _find(c10d, "_world", lost)
    register = _find(torch, "_C._distributed_c10d._register_process_group", lost)
    unregister = _find(torch, "_C._distributed_c10d._unregister_process_group", lost)
    if not (cls and hasattr(c10d, "_world") and register and unregister):
        return None
    return ReplaceableWorld(
        cls, lambda: c10d._world, lambda world: setattr(c10d, "_world", world), register, unregister
    )


def drop_groups_of_mesh(mesh: DeviceMesh) -> None:
    """Let a mesh of kept States let go of its process groups, which are destroyed."""
    groups: dict[object, object] | None = getattr(mesh, "_pg_registry", None)
    if groups is not None:
        groups.clear()


def drop_groups_of_fsdp(module: object) -> None:
    """Let a module of fully_shard let go of its process groups, which the graph of a kept State would hold.

    Where a name is missing, ranks that wait for this one do so until their timeout is over.
    """
    state: object = getattr(module, "_get_fsdp_state", lambda: None)()
    parameters = getattr(state, "_fsdp_param_group", None)
    if state is None:
        missing["torch.distributed.fsdp.FSDPModule._get_fsdp_state"] = (
            "after a fault, sharded ranks that wait for the rank that failed do so until their timeout is over"
        )
    mesh, shared = (getattr(parameters, name, None) for name in ("mesh_info", "comm_ctx"))
    for owner, name, empty in (
        (mesh, "shard_process_group", None),
        (mesh, "replicate_process_group", None),
        (parameters, "_all_gather_result", None),
        (shared, "all_gather_state", None),
        (shared, "reduce_scatter_states", []),
    ):
        if hasattr(owner, name):
            setattr(owner, name, empty)


def fill_buckets(reducer: object) -> bool:
    """Fill the buckets of DistributedDataParallel in the order of its parameters; False: this torch can't be told."""
    push: Callable[[], object] | None = getattr(reducer, "_push_all_rebuilt_params", None)
    if push is None:
        missing["torch.distributed.Reducer._push_all_rebuilt_params"] = "a backward of nothing before the first batch"
        return False
    push()
    return True


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Inside the ``with`` this process is the first of so many ranks, in a process group in which no other answers.

    Raises:
        RuntimeError: this torch has no such group; noted in :data:`missing`.
    """
    import torch.distributed as dist

    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        missing["torch.testing._internal.distributed.fake_pg"] = "a rehearsal counts no collectives"
        raise RuntimeError("this torch has no fake process group") from error
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Operation(NamedTuple):
    """An operation of torch that ran: its name, and checksums of the tensors it took and of what it returned."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def checksum(tensor: Tensor) -> int | None:
    """Of the bytes of a tensor; None of one without numbers."""
    if tensor.is_meta or tensor.layout is not torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
        return None
    numbers = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    size = numbers.numel() * numbers.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(numbers.data_ptr())) if size else 0


@contextmanager
def record_operations(operations: list[Operation]) -> Iterator[None]:
    """Append the operations of torch inside the ``with`` to a list; none, where this torch can't record them."""
    try:
        from torch.utils._debug_mode import DebugMode
    except ImportError:
        missing["torch.utils._debug_mode.DebugMode"] = "pl.diff(operations=True) names no operation"
        yield
        return
    with DebugMode() as mode, DebugMode.log_tensor_hashes(hash_fn=checksum, hash_inputs=True):
        yield
    for call in mode.operators:
        log: Mapping[str, Any] = getattr(call, "log", None) or {}
        inputs, outputs = (
            tuple(optree.tree_leaves(log.get(name, ()))) for name in ("input_hash", "hash")
        )  # None left out
        operations.append(Operation(str(getattr(call, "op", call)), inputs, outputs))


def config_of_compiler() -> Any:
    """The settings of torch's compiler; None where no code has imported it."""
    return sys.modules.get("torch._inductor.config")


def import_compiler() -> None:
    """Import torch's compiler, which takes seconds, at the end from which `torch.optim` enters it, too.

    Two threads that enter a cycle of imports at two ends wait for each other.
    """
    try:
        import torch._dynamo  # noqa: F401
    except ImportError:
        missing["torch._dynamo"] = "the first compiling in one thread may wait for an import of torch.optim in another"
