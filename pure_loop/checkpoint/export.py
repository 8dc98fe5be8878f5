"""Exported models: a file of a module in eval mode, which loads without pure_loop, and is held against the module."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from pure_loop._internal.reprs import call
from pure_loop._internal.torch_private import map_pytree
from pure_loop.checkpoint import container
from pure_loop.checkpoint.storage import PathLike, storage_of, try_folder
from pure_loop.data.batch import describe, tensors_in, to_device
from pure_loop.errors import ArgumentError, ExportError
from pure_loop.model.model import ModelDef

__all__ = ["Format", "export_module", "refuse_sample", "try_to_export", "try_to_write"]

Format: TypeAlias = Literal["module", "torch.export", "safetensors"]
"""What is written: the module itself, by pickle (``torch.load(path, weights_only=False)``); its graph
(``torch.export.load(path).module()``), which needs no code of the model; or its weights, in the safetensors format by
the names of ``state_dict()``, of tied weights by the first one."""


def refuse_sample(format: Format, sample: Any, *, dynamic_batch: bool, where: str) -> None:
    """
    Raises:
        ArgumentError: a graph is to be written, and the sample lacks, or has one row, which says nothing of others.
    """
    if format != "torch.export":
        return
    if sample is None:
        raise ArgumentError(
            f'{where}: format="torch.export" traces the model on a sample: give sample=inputs, a tensor, a tuple of '
            "arguments or a mapping of keyword arguments."
        )
    rows = {len(tensor) for tensor in tensors_in(sample) if tensor.ndim}
    if dynamic_batch and rows <= {0, 1}:
        raise ArgumentError(
            f"{where}: the sample is {describe(sample)}, and a graph for batches of any size is traced on 2 samples or "
            "more: give more, or write dynamic_batch=False for batches of this size."
        )


def try_to_write(path: PathLike) -> None:
    """See that a file can be written to ``path``, and leave what is there.

    Raises:
        ArgumentError: it is a folder.
        CheckpointWriteError: no file can be written there.
    """
    if storage_of(path).is_folder():
        raise ArgumentError(f"{os.fspath(path)} is a folder: write the path of a file in it.")
    try_folder(os.path.dirname(os.fspath(path)) or ".")


def try_to_export(module: nn.Module, format: Format, *, sample: Any = None, dynamic_batch: bool = True) -> None:
    """See that a module can be exported, and write nothing: its graph is traced, its structure is pickled.

    Raises:
        ExportError: it can't be.
    """
    if format == "torch.export":
        _traced(module, to_device(sample, _device_of(module)), dynamic_batch)
    elif format == "module":
        structure, _, _ = ModelDef.split(module)
        with _pickling(module):
            pickle.dumps(structure)


def export_module(
    module: nn.Module,
    path: PathLike,
    format: Format,
    *,
    sample: Any = None,
    dynamic_batch: bool = True,
    verify: bool = True,
) -> None:
    """Write a module in eval mode, whole or not at all.

    Args:
        module: such as ``state.module(training=False)``.
        path: where to; a URL is opened by fsspec.
        format: what is written.
        sample: what the module is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments; on
            any device.
        dynamic_batch: whether a graph takes batches of any size: the first dimension of the sample's tensors.
        verify: load the file, and compare its weights, and with a sample its outputs, with the module's.

    Raises:
        ArgumentError: a sample that the graph can't be traced on.
        CheckpointWriteError: the file can't be written.
        ExportError: the model can't be traced or pickled; or what was loaded differs from the module, and the file is
            removed.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "model.safetensors")
    >>> export_module(nn.Linear(2, 1).eval(), path, "safetensors")
    >>> path.stat().st_size > 0
    True
    """
    refuse_sample(format, sample, dynamic_batch=dynamic_batch, where="export")
    sample = to_device(sample, _device_of(module))
    storage = storage_of(path)
    program = _traced(module, sample, dynamic_batch) if format == "torch.export" else None
    with storage.writing() as raw:
        file = io.BufferedWriter(cast("Any", raw))
        if program is not None:
            torch.export.save(program, file)
        elif format == "module":
            with _pickling(module):
                torch.save(module, file)
        else:
            container.write(file, _weights(module), {"format": "pt"}, digested=False)
        file.flush()
        file.detach()
    if not verify:
        return
    with storage.open() as opened:
        differing = _differing(module, io.BytesIO(opened.read()), format, sample, path)
    if differing:
        storage.remove()
        raise ExportError(f"{path} was exported, and what was loaded from it differs from the model: {differing}.")


def _device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in module.parameters()), torch.device("cpu"))


@contextmanager
def _pickling(module: nn.Module) -> Iterator[None]:
    """
    Raises:
        ExportError: what is inside could not be pickled.
    """
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ExportError(
            f"{type(module).__name__} can't be pickled, so format=\"module\" can't write it: {error}. Define its "
            'classes and functions at the top of a module, or write format="torch.export" or "safetensors".'
        ) from error


def _called(module: Any, sample: Any) -> list[Tensor]:
    """The tensors that the module returns for a sample."""
    args, kwargs = _arguments(sample)
    with torch.no_grad():
        return tensors_in(module(*args, **kwargs))


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def _traced(module: nn.Module, sample: Any, dynamic_batch: bool) -> Any:
    """
    Raises:
        ExportError: the model can't be traced on the sample.
    """
    args, kwargs = _arguments(sample)
    shapes = None
    if dynamic_batch:
        of_args = tuple(_dynamic(value) for value in args)
        shapes = of_args if not kwargs else {name: _dynamic(value) for name, value in kwargs.items()}
    try:
        with torch.no_grad():
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


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and those buffers that ``state_dict()`` has, each once."""
    known = {name for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().contiguous() for name, tensor in named if name in known}


def _differing(module: nn.Module, file: io.BytesIO, format: Format, sample: Any, path: object) -> str:
    """What differs in the loaded file, in words; "" where nothing does."""
    if format == "safetensors":
        _, loaded = container.read(file, len(file.getbuffer()), path)
        return _unequal(_weights(module), loaded)
    if format == "torch.export":
        read = torch.export.load(file).module()
    else:
        read = torch.load(file, weights_only=False)
        differing = _unequal(_weights(module), _weights(read))
        if differing or sample is None:
            return differing
    expected, outputs = _called(module, sample), _called(read, sample)
    if len(expected) != len(outputs):
        return f"it returns {len(outputs)} tensors, and not {len(expected)}"
    for number, (expected_output, output) in enumerate(zip(expected, outputs, strict=True)):
        try:
            torch.testing.assert_close(output, expected_output, equal_nan=True)
        except AssertionError as error:
            return f"output {number} of {call(type(module).__name__, {})}: {error}"
    return ""


def _unequal(weights: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> str:
    """
    >>> _unequal({"weight": torch.zeros(2)}, {"weight": torch.ones(2)})
    "the tensor 'weight'"
    """
    if weights.keys() != loaded.keys():
        return f"the names {sorted(weights.keys() ^ loaded.keys())}"
    for name, tensor in weights.items():
        read = loaded[name].to(tensor.device)
        alike = tensor.dtype is read.dtype and tensor.shape == read.shape
        if not alike or not torch.equal(container.raw(tensor), container.raw(read.contiguous())):
            return f"the tensor {name!r}"
    return ""
