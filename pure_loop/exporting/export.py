"""``pl.export``: a State to a file that loads without pure_loop, which is read back and compared with its module."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from pure_loop._internal.processes import rank
from pure_loop._internal.reprs import call
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.algorithms.ema import averaged
from pure_loop.checkpoint import container
from pure_loop.checkpoint.paths import PathLike
from pure_loop.checkpoint.storage import storage_of, try_folder
from pure_loop.data.batch import describe, tensors_in, to_device
from pure_loop.errors import ArgumentError, ExportError
from pure_loop.exporting.graphs import (
    arguments_of,
    onnx_file,
    onnx_outputs,
    refuse_missing_onnx,
    tensors_in_order,
    traced,
)
from pure_loop.members.ensemble import refuse_several
from pure_loop.model.model import ModelDef
from pure_loop.ranges import Name, checked
from pure_loop.state import State, refuse_no_state


@checked
def export(
    state: State,
    path: PathLike,
    format: Literal["module", "torch.export", "safetensors", "onnx"] | None = None,
    *,
    sample: Any = None,
    average: Annotated[str | None, Name()] = None,
    dynamic_batch: bool = True,
    verify: bool = True,
) -> None:
    """Write the module of a State in eval mode to a file, whole or not at all, and compare the file with the State.

    =================  ==================  ===================================  ========================================
    suffix             ``format``          what is written                      how it is loaded
    =================  ==================  ===================================  ========================================
    ``.pt``, ``.pth``  ``"module"``        the module itself, by pickle         ``torch.load(path, weights_only=False)``
    ``.pt2``           ``"torch.export"``  its graph, which needs no code of    ``torch.export.load(path).module()``
                                           the model
    ``.safetensors``   ``"safetensors"``   its weights, by the names of         ``safetensors.torch.load_model``,
                                           ``state_dict()``                     ``load_state_dict``,
                                                                                ``from_pretrained``, ``pl.load``
    ``.onnx``          ``"onnx"``          its graph for other runtimes; needs  ``onnxruntime.InferenceSession(path)``
                                           the extra ``onnx``
    =================  ==================  ===================================  ========================================

    The names of a Hugging Face model's weights are those of its ``save_pretrained``, of tied weights, too: with
    ``model.config.save_pretrained(folder)`` beside ``folder/model.safetensors``, ``from_pretrained(folder)`` loads it.
    Of a State of ``parallel="shard"`` all ranks gather the parameters, and the first one writes; any other State is
    written by each rank that calls this.

    Args:
        state: of any event.
        path: where to; its folder is made, and a URL is opened by fsspec.
        format: what is written; None: what the suffix of the path names.
        sample: what the module is called with, for graphs and to verify: a tensor, a tuple of arguments or a mapping of
            keyword arguments.
        average: the name of an average of the weights to export, such as ``"ema"``; None: the weights.
        dynamic_batch: whether a graph takes batches of any size: the first dimension of the sample's tensors.
        verify: read the file, and compare: weights bitwise; with a sample, outputs of a module or a ``torch.export``
            graph by ``torch.testing.assert_close``, and of an ONNX graph, which ``onnx.reference`` runs, to 1e-4 of the
            largest one (1e-2 in float16, 5e-2 in bfloat16). A file that differs is removed.

    Raises:
        ArgumentError, ArgumentTypeError: no State, an unknown format, a graph without a sample, no average of this
            name, a path that is a folder or has the suffix of another format, or of none where no format is given.
        MissingExtraError: ``"onnx"`` without its packages.
        CheckpointWriteError: (an OSError) the path can't be written to.
        ExportError: the model can't be traced, translated or pickled; or what was read back differs.

    >>> import pathlib, tempfile, torch, pure_loop as pl
    >>> inputs = torch.ones(4, 2)
    >>> state = pl.State.create(torch.nn.Linear(2, 1))
    >>> path = pathlib.Path(tempfile.mkdtemp(), "model.pt")
    >>> pl.export(state, path, sample=inputs)
    >>> loaded = torch.load(path, weights_only=False)
    >>> torch.equal(loaded(inputs), state.module(training=False)(inputs))
    True
    """
    refuse_several(state, "export")
    refuse_no_state(state, "export(state, path)", "pl.State.create(module)")
    storage_of(path)
    written = read_format(path, format, where="export")
    refuse_sample(written, sample, dynamic_batch=dynamic_batch, where="export")
    sharded = are_sharded(state.params)
    module = module_of(state, average)  # first, because ranks that hold shards gather them together
    if not sharded or rank() == 0:
        try_to_write(path)
        export_module(module, path, written, sample=sample, dynamic_batch=dynamic_batch, verify=verify)


def module_of(state: State, average: str | None) -> nn.Module:
    """What is exported: the module in eval mode, with an average in the place of its weights if one is named.

    Raises:
        ArgumentError: the State has no average of this name.
    """
    return (state if average is None else averaged(state, average)).module(training=False)


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


_ONNX_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far an output of an ONNX file may be from the module's, as a fraction of the module's largest one, by dtype.

Other kernels add in another order, and a deep model adds their roundings up. Of other floating-point dtypes 1e-4;
integers and bools are equal. Files of other formats run torch's own kernels, and are compared by
``torch.testing.assert_close``.
"""


def weights_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and those buffers that ``state_dict()`` has, each once; and the names that are left out of tied ones.

    Of tied weights the name is kept that Hugging Face Transformers keeps: one that the model doesn't list in
    ``all_tied_weights_keys`` (before version 5 ``_tied_weights_keys``); else the first one.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    >>> model["head"].weight = model["embed"].weight
    >>> weights, left_out = weights_of(model)
    >>> list(weights), left_out
    (['embed.weight'], {'head.weight': 'embed.weight'})
    """
    tied = getattr(module, "all_tied_weights_keys", None) or getattr(module, "_tied_weights_keys", None) or ()
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
    weights: dict[str, Tensor] = {}
    left_out: dict[str, str] = {}
    for key, alike in names.items():
        first = next((name for name in alike if name not in tied), alike[0])
        weights[first] = tensors[key].detach().contiguous()
        left_out |= dict.fromkeys((name for name in alike if name != first), first)
    return weights, left_out


def differing(module: nn.Module, file: io.BytesIO, format: str, sample: Any, path: object) -> str:
    """What differs in the loaded file, in words; "" where nothing does."""
    if format == "safetensors":
        _, loaded = container.read(file, path)
        return _unequal(weights_of(module)[0], loaded)
    if format == "onnx":
        expected = _outputs(module, sample, tensors_in_order)
        return _unlike(module, expected, onnx_outputs(file.getvalue(), sample), onnx=True)
    if format == "torch.export":
        read = torch.export.load(file).module()
    else:
        read = torch.load(file, weights_only=False)
        unequal = _unequal(weights_of(module)[0], weights_of(read)[0])
        if unequal or sample is None:
            return unequal
    return _unlike(module, _outputs(module, sample, tensors_in), _outputs(read, sample, tensors_in))


def _outputs(module: Any, sample: Any, tensors_of: Callable[[Any], list[Tensor]]) -> list[Tensor]:
    """The tensors that the module returns for a sample."""
    args, kwargs = arguments_of(sample)
    with torch.no_grad():
        return tensors_of(module(*args, **kwargs))


def _unlike(module: nn.Module, expected: list[Tensor], outputs: list[Tensor], *, onnx: bool = False) -> str:
    """Which output differs; "" where none does."""
    if len(expected) != len(outputs):
        return f"it returns {len(outputs)} tensors, and not {len(expected)}"
    for number, (tensor, output) in enumerate(zip(expected, outputs, strict=True)):
        tolerance: dict[str, Any] = {}
        if onnx:
            tensor = tensor.cpu()
            tolerance = {"rtol": 0.0, "atol": _allowed(tensor)}
        try:
            torch.testing.assert_close(output, tensor, equal_nan=True, **tolerance)
        except AssertionError as error:
            return f"output {number} of {call(type(module).__name__, {})}: {error}"
    return ""


def _allowed(tensor: Tensor) -> float:
    if not tensor.is_floating_point():
        return 0.0
    finite = tensor[tensor.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return _ONNX_TOLERANCES.get(tensor.dtype, 1e-4) * largest


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
