"""What a model must not be: refusals of modules that would train wrongly, or not at all, with what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pure_loop._internal.arguments import is_path
from pure_loop._internal.devices import shapes_only
from pure_loop._internal.torch_private import has_gradient_hooks, is_transformed
from pure_loop._internal.tree_ops import is_sharded
from pure_loop.errors import ArgumentTypeError, ModelError, WrappedModelError

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
        if has_gradient_hooks(parameter):
            raise ModelError(
                f"parameter {name!r} has a hook on its gradient, which would never be called, because gradients are "
                "taken by copies of the parameters. Change gradients with clip_grad=function, or with an algorithm at "
                "AFTER_TRAIN_BATCH."
            )
    parameters = list(module.parameters())
    if not parameters:
        raise ModelError(
            f"{type(module).__name__} has no parameters, so there is nothing to train and no device to compute on. Are "
            "its layers kept in a plain list or dict? Use nn.ModuleList, nn.ModuleDict or nn.ParameterList. "
            'To evaluate a module that needs none, give it one: module.register_parameter("unused", '
            "nn.Parameter(torch.zeros(())))."
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise ModelError(
            f"no parameter of {type(module).__name__} requires a gradient: unfreeze some with requires_grad_(True)."
        )


def is_on_meta(module: object) -> bool:
    """Whether this is a module of which all parameters are on the meta device.

    >>> is_on_meta(nn.Linear(2, 1, device="meta"))
    True
    """
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    return bool(parameters) and all(parameter.is_meta for parameter in parameters) and not shapes_only.get()


def _refuse_strange_tensors(module: nn.Module) -> None:
    """
    Raises:
        ModelError: a parameter or buffer has no shape or no numbers yet, or is not a plain tensor of torch's.
    """
    named: list[tuple[str, str, Tensor]] = [("parameter", *pair) for pair in module.named_parameters()]
    named += [("buffer", *named_buffer) for named_buffer in module.named_buffers()]
    for kind, name, tensor in named:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ModelError(
                f"{kind} {name!r} of a lazy module has no shape yet: call the model on one batch first, before "
                "pl.fit(model, ...)."
            )
        if is_sharded(tensor):
            raise ModelError(
                f"{kind} {name!r} is a DTensor, as parallelize_module and distribute_tensor make them, and a State "
                "holds whole tensors, or shards that it cuts itself: give the module as it was before, and "
                'parallel="shard", or the function that cuts it: parallel=pl.distributed.Parallel("shard", '
                "parallelize=lambda module, mesh: parallelize_module(module, mesh, plan), mesh=mesh), where mesh has a "
                'dimension "tp".'
            )
        if tensor.is_meta and kind == "parameter" and not shapes_only.get():  # a buffer there may be unread
            raise ModelError(
                f"parameter {name!r} is on the meta device and has no numbers: write model.to_empty(device=...) and "
                "initialise it, or load its numbers, first. Where all parameters are, fit initialises them itself, by "
                "the reset_parameters() of their modules."
            )
        problem = _what_is_strange(tensor, kind)
        if problem is not None:
            raise ModelError(f"{kind} {name!r} {problem}")


def refuse_sync_batchnorm(module: nn.Module, device: torch.device) -> None:
    """
    Raises:
        ModelError: a layer exchanges statistics with other ranks in training, which torch's can on accelerators alone.
    """
    for name, layer in module.named_modules() if device.type == "cpu" else ():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training:
            raise ModelError(
                f"model.{name} is a SyncBatchNorm, which exchanges statistics on GPUs alone, and these ranks train on "
                "CPUs. Give a BatchNorm, which has those of the samples of its rank, or a GroupNorm, which needs no "
                "other samples."
            )


_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


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


def _hint(argument: object) -> str:
    if type(argument).__name__ == "ModelDef":  # which imports this module
        return ": it is the structure of a model; write fit(state, ...), or state.module() for the model alone"
    if isinstance(argument, Mapping) and any(isinstance(value, Tensor) for value in argument.values()):
        return ": a state_dict goes into its module first, model.load_state_dict(...)"
    if is_path(argument):
        return "; of a file, fit(model, ..., load_path=path) resumes, and pl.load(path, model=model) is the State"
    if isinstance(argument, Iterable) and not isinstance(argument, Mapping):
        of_stream = "; a stream that fit returned is run by pl.run(stream)" if isinstance(argument, Iterator) else ""
        return f"; the model comes first: fit(model, train_dataloader, ...), or recipe.fit(model){of_stream}"
    return ""


def refuse_shared_memory(module: nn.Module) -> None:
    """Refuse different tensors that have elements in common, which a State would hold twice."""
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


def refuse_aliases(skeleton: nn.Module) -> None:
    """Refuse a registered tensor that also stands in a plain attribute, where no call would put its numbers."""
    tensors = [*skeleton.named_parameters(), *skeleton.named_buffers()]
    names = {id(tensor): name for name, tensor in tensors}
    for prefix, module in skeleton.named_modules():
        if isinstance(module, nn.RNNBase):
            continue  # its list of weights is made anew where they have changed
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            name = next(
                (names[id(plain_tensor)] for plain_tensor in _plain_tensors(value) if id(plain_tensor) in names), None
            )
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
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _plain_tensors(item)


class _Span(NamedTuple):
    """The bytes from the first to the last element of a tensor."""

    begin: int
    end: int
    name: str
    tensor: Tensor
    only_with_named: bool


def overlapping_pair(
    named: Iterable[tuple[str, Tensor]], unnamed: Iterable[tuple[str, Tensor]] = ()
) -> tuple[str, str] | None:
    """The names of two tensors that have an element in common in memory; None if there are none.

    Tensors of one storage that don't overlap, such as slices of a flat tensor or columns of a matrix, are no pair.

    Args:
        named: names and tensors, each of them another object. Tensors without memory of their own (empty, on the meta
            device, sparse, or of a class that dispatches by itself) are left out.
        unnamed: further tensors, which may overlap with each other, and not with one in ``named``.

    >>> flat = torch.zeros(6)
    >>> overlapping_pair([("a", flat[:3]), ("b", flat[3:])])
    >>> overlapping_pair([("a", flat[:3]), ("b", flat[2:])])
    ('a', 'b')
    """
    spans = [_span(name, tensor, False) for name, tensor in named if _has_memory(tensor)]
    spans += [_span(name, tensor, True) for name, tensor in unnamed if _has_memory(tensor)]
    spans.sort(key=lambda span: span[:2])
    for cluster in _clusters(spans):
        result = _pair_in(cluster)
        if result is not None:
            return result
    return None


def overlapping_elements(tensor: Tensor) -> bool:
    """Whether several elements of this tensor lie at one address, as those of an expanded tensor do.

    >>> overlapping_elements(torch.zeros(1).expand(3)), overlapping_elements(torch.zeros(3))
    (True, False)
    """
    if not _has_memory(tensor):
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                break
            reach += stride * (size - 1)
    else:
        return False
    # The rule above is sufficient, and not necessary: count the places.
    span = _span("", tensor, False)
    marks = _marks(span.end - span.begin)
    places = _bytes_of(span, marks, span.begin)
    places.fill_(1)
    return int(marks.count_nonzero()) < places.numel()


def _has_memory(tensor: Tensor) -> bool:
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not plain or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or is_transformed(tensor):
        return False
    return tensor.numel() > 0


def _span(name: str, tensor: Tensor, only_with_named: bool) -> _Span:
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _Span(begin, begin + (last + 1) * tensor.element_size(), name, tensor, only_with_named)


def _clusters(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Those that reach into each other, two or more at a time."""
    cluster: list[_Span] = []
    reach = 0
    for span in spans:
        if cluster and span.begin >= reach:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(span)
        reach = max(reach, span.end) if len(cluster) > 1 else span.end
    if len(cluster) > 1:
        yield cluster


def _pair_in(cluster: list[_Span]) -> tuple[str, str] | None:
    cluster = sorted(cluster, key=lambda span: span.only_with_named)
    named = [span for span in cluster if not span.only_with_named]
    begin = min(span.begin for span in cluster)
    marks = _marks(max(span.end for span in cluster) - begin)
    for position, span in enumerate(cluster):
        places = _bytes_of(span, marks, begin)
        if places.any():
            # Once, for the message: which of those before it.
            for earlier in named[:position]:
                marks.zero_()
                _bytes_of(earlier, marks, begin).fill_(1)
                if places.any():
                    return earlier.name, span.name
        if not span.only_with_named:
            places.fill_(1)
    return None


def _marks(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device="cpu")


def _bytes_of(span: _Span, marks: Tensor, begin: int) -> Tensor:
    """The bytes of a tensor's elements, in ``marks``, which has one for each byte of memory from ``begin`` on."""
    size = span.tensor.element_size()
    strides = [stride * size for stride in span.tensor.stride()]
    return marks.as_strided((*span.tensor.shape, size), (*strides, 1), span.begin - begin)
