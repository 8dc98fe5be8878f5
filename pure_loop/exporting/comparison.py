"""Whether what was read from an exported file is the module that was written."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pure_loop._internal.reprs import call
from pure_loop.checkpoint import container
from pure_loop.data.batch import tensors_in
from pure_loop.exporting.graphs import arguments_of, tensors_in_order

__all__ = ["ONNX_TOLERANCES", "differing", "weights_of"]

ONNX_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
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
        _, loaded = container.read(file, len(file.getbuffer()), path)
        return _unequal(weights_of(module)[0], loaded)
    if format == "onnx":
        expected = _outputs(module, sample, tensors_in_order)
        return _unlike(module, expected, _onnx_outputs(file.getvalue(), sample), onnx=True)
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


def _onnx_outputs(file: bytes, sample: Any) -> list[Tensor]:
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
    return ONNX_TOLERANCES.get(tensor.dtype, 1e-4) * largest


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
