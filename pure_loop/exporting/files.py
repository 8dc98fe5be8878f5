"""Files of a module in eval mode, which load without pure_loop, and are compared with the module."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import nn

from pure_loop.checkpoint import container
from pure_loop.checkpoint.paths import PathLike
from pure_loop.checkpoint.storage import storage_of, try_folder
from pure_loop.data.batch import describe, tensors_in, to_device
from pure_loop.errors import ArgumentError, ExportError
from pure_loop.exporting.comparison import differing, weights_of
from pure_loop.exporting.graphs import onnx_file, refuse_missing_onnx, traced
from pure_loop.model.model import ModelDef

Format: TypeAlias = Literal["module", "torch.export", "safetensors", "onnx"]
"""What is written: the module itself, by pickle (``torch.load(path, weights_only=False)``); its graph
(``torch.export.load(path).module()``), which needs no code of the model; its weights, in the safetensors format by
the names of ``state_dict()``, of tied weights by one of them; or its graph for other runtimes, as ONNX."""

_GRAPHS = ("torch.export", "onnx")


def refuse_sample(format: Format, sample: Any, *, dynamic_batch: bool, where: str) -> None:
    """
    Raises:
        ArgumentError: a graph is to be written, and the sample lacks, or has one row, which says nothing of others.
        MissingExtraError: the packages of ONNX are not installed.
    """
    if format not in _GRAPHS:
        return
    if format == "onnx":
        refuse_missing_onnx()
    if sample is None:
        raise ArgumentError(
            f'{where}: format="{format}" traces the model on a sample: give sample=inputs, a tensor, a tuple of '
            "arguments or a mapping of keyword arguments."
        )
    rows = {len(tensor) for tensor in tensors_in(sample) if tensor.ndim}
    if dynamic_batch and rows <= {0, 1}:
        raise ArgumentError(
            f"{where}: the sample is {describe(sample)}, and a graph for batches of any size is traced on 2 samples or "
            "more: give more, or write dynamic_batch=False for batches of this size."
        )


# What these files are to every program that opens them.
_SUFFIXES: dict[str, Format] = {".onnx": "onnx", ".safetensors": "safetensors", ".pt2": "torch.export"}
_SUFFIXES |= {".pt": "module", ".pth": "module"}


def read_format(path: PathLike, format: Format | None, *, where: str) -> Format:
    """The format that is meant: that of the path's suffix, where none is given.

    Raises:
        ArgumentError: the path has the suffix of another format; or no format is given, and the path has a suffix of
            none, or is a folder.
    """
    suffix = PurePath(str(path)).suffix.lower()
    usual = _SUFFIXES.get(suffix)
    if format is None and usual is None:
        _refuse_folder(path)
        listed = ", ".join(f'{known} ("{of}")' for known, of in _SUFFIXES.items())
        raise ArgumentError(
            f"{where}: the path {str(path)!r} has {f'the suffix {suffix}' if suffix else 'no suffix'}, which names no "
            f'format: write one of {listed}, or say it: format="module".'
        )
    if format is not None and usual not in (None, format):
        raise ArgumentError(
            f'{where}: format="{format}" for the path {str(path)!r}, and {suffix} is the suffix of format="{usual}": '
            "leave format= out, or write another suffix."
        )
    result = format or usual
    assert result is not None
    return result


def _refuse_folder(path: PathLike) -> None:
    if storage_of(path).is_folder():
        raise ArgumentError(f"{os.fspath(path)} is a folder: write the path of a file in it.")


def try_to_write(path: PathLike) -> None:
    """See that a file can be written to ``path``, and leave what is there.

    Raises:
        ArgumentError: it is a folder.
        CheckpointWriteError: no file can be written there.
    """
    _refuse_folder(path)
    try_folder(os.path.dirname(os.fspath(path)) or ".")


def try_to_export(module: nn.Module, format: Format, *, sample: Any = None, dynamic_batch: bool = True) -> None:
    """See that a module can be exported, and write nothing: its graph is traced, its structure is pickled.

    Raises:
        ExportError: it can't be.
    """
    if format in _GRAPHS:
        program = traced(module, to_device(sample, _device_of(module)), dynamic_batch=dynamic_batch)
        if format == "onnx":
            onnx_file(program)
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
        MissingExtraError: the packages of ONNX are not installed.
        CheckpointWriteError: the file can't be written.
        ExportError: the model can't be traced, translated or pickled; or what was loaded differs from the module, and
            the file is removed.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "model.safetensors")
    >>> export_module(nn.Linear(2, 1).eval(), path, "safetensors")
    >>> path.stat().st_size > 0
    True
    """
    refuse_sample(format, sample, dynamic_batch=dynamic_batch, where="export")
    sample = to_device(sample, _device_of(module))
    storage = storage_of(path)
    program = traced(module, sample, dynamic_batch=dynamic_batch) if format in _GRAPHS else None
    as_onnx = onnx_file(program) if program is not None and format == "onnx" else None
    with storage.writing() as raw:
        file = io.BufferedWriter(cast("Any", raw))
        if as_onnx is not None:
            file.write(as_onnx)
        elif program is not None:
            torch.export.save(program, file)
        elif format == "module":
            with _pickling(module):
                torch.save(module, file)
        else:
            weights, left_out = weights_of(module)
            # As safetensors.torch.save_model notes tied weights.
            container.write(file, weights, {"format": "pt", **left_out}, digested=False)
        file.flush()
        file.detach()
    if not verify:
        return
    try:
        with storage.open() as opened:
            difference = differing(module, io.BytesIO(opened.read()), format, sample, path)
    except Exception as error:
        storage.remove()
        raise ExportError(f"{path} was exported, and can't be loaded or run, so it was removed: {error}") from error
    if difference:
        storage.remove()
        raise ExportError(f"{path} was exported, and what was loaded from it differs from the model: {difference}.")


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
