"""Graphs of a module: traced by ``torch.export``, and translated to ONNX, and run by ONNX."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pure_loop._internal.lazy import require
from pure_loop._internal.torch_private import map_pytree
from pure_loop.data.batch import describe
from pure_loop.errors import ExportError

# What protobuf, the format of an ONNX file, can hold.
_LARGEST_ONNX = 2**31 - 1


def arguments_of(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with for a sample.

    >>> arguments_of({"inputs": 1}), arguments_of(2)
    (((), {'inputs': 1}), ((2,), {}))
    """
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def tensors_in_order(value: Any) -> list[Tensor]:
    """The tensors of a nesting in the order of a graph's inputs and outputs, which is that of torch's pytrees.

    >>> [len(tensor) for tensor in tensors_in_order({"b": torch.zeros(1), "a": torch.zeros(2)})]
    [1, 2]
    """
    tensors: list[Tensor] = []

    def keep(leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)

    map_pytree(keep, value)
    return tensors


def traced(module: nn.Module, sample: Any, *, dynamic_batch: bool) -> torch.export.ExportedProgram:
    """The graph of a module.

    Raises:
        ExportError: the model can't be traced on the sample.
    """
    args, kwargs = arguments_of(sample)
    shapes = None
    if dynamic_batch:
        of_args = tuple(_dynamic(value) for value in args)
        shapes = of_args if not kwargs else {name: _dynamic(value) for name, value in kwargs.items()}
    try:
        with torch.no_grad(), _without_warnings_of_torch():
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:  # torch's own classes, which differ from cause to cause
        raise ExportError(
            f"{type(module).__name__} can't be traced on the sample {describe(sample)}"
            f"{' for batches of any size' if dynamic_batch else ''}: {error}"
        ) from error


def _dynamic(value: Any) -> Any:
    """What torch.export calls dynamic shapes: the first dimension of each tensor."""
    return map_pytree(
        lambda leaf: {0: torch.export.Dim.DYNAMIC} if isinstance(leaf, Tensor) and leaf.ndim else None, value
    )


def refuse_missing_onnx() -> None:
    """
    Raises:
        MissingExtraError: a package that ONNX files are written or verified with is not installed.
    """
    for package in ("onnx", "onnxscript"):
        require(package, "onnx", 'format="onnx"')


def onnx_file(program: torch.export.ExportedProgram) -> bytes:
    """A graph as an ONNX file.

    Raises:
        ExportError: an operation has no translation, or the weights are more than such a file holds.
    """
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    if size > _LARGEST_ONNX:
        raise ExportError(
            f"the weights take {size:,} bytes, and an ONNX file holds {_LARGEST_ONNX:,}: write "
            'format="torch.export" or "safetensors".'
        )
    try:
        with _without_warnings_of_torch(), _quiet("torch.onnx"), _quiet("onnxscript"), _quiet("onnx_ir"):
            exported = torch.onnx.export(program, dynamo=True, verbose=False)
            assert exported is not None
            model: Any = exported.model_proto
    except Exception as error:  # torch's own classes, which differ from cause to cause
        raise ExportError(f"the graph can't be translated to ONNX: {error}") from error
    _name_batch_dimension(model.graph)
    serialized: bytes = model.SerializeToString()
    return serialized


def _name_batch_dimension(graph: Any) -> None:
    """Call the dimension that is dynamic ``batch``, if there is one: torch numbers its symbols, ``s31``."""
    values = [*graph.input, *graph.output, *graph.value_info]
    dimensions = [dimension for value in values for dimension in value.type.tensor_type.shape.dim]
    first = {
        value.type.tensor_type.shape.dim[0].dim_param for value in graph.input if value.type.tensor_type.shape.dim
    } - {""}
    if len(first) == 1:
        (symbol,) = first
        for dimension in dimensions:
            if dimension.dim_param == symbol:
                dimension.dim_param = "batch"


def onnx_outputs(file: bytes, sample: Any) -> list[Tensor]:
    """What ONNX's own implementation of its operations, in NumPy, returns."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    model: Any = ReferenceEvaluator(onnx.load_model_from_string(file), new_ops=[_gather_elements()])
    inputs = [_array(tensor) for tensor in tensors_in_order(arguments_of(sample))]
    return [_tensor(output) for output in model.run(None, dict(zip(model.input_names, inputs, strict=True)))]


def _gather_elements() -> Any:
    """GatherElements for tensors of any size: ONNX's own implementation fails above 64 in the gathered dimension."""
    import numpy as np
    from onnx.reference.op_run import OpRun

    def run(self: Any, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
        axis %= data.ndim
        # Of the other dimensions the indices may cover the first elements alone.
        covered = tuple(slice(None if d == axis else size) for d, size in enumerate(indices.shape))
        return (np.take_along_axis(data[covered], indices, axis),)

    return type("GatherElements", (OpRun,), {"op_domain": "", "_run": run})


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # comes with onnx

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _tensor(array: Any) -> Tensor:
    import numpy as np

    array = np.array(array)  # a copy, which may be written to; a scalar becomes an array
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


@contextmanager
def _without_warnings_of_torch() -> Iterator[None]:
    """Warnings of torch about its own use of deprecated names, which no caller can change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=r"`isinstance\(treespec")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|onnxscript|onnx_ir|onnx)\b")
        yield


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """No warnings of a log: a line for each operator of torchvision where that is not installed, and the like."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
