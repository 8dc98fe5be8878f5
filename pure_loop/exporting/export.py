"""``pl.export``: a State to a file that loads without pure_loop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from torch import nn

from pure_loop._internal.processes import rank
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.algorithms.ema import averaged
from pure_loop.checkpoint.paths import PathLike
from pure_loop.checkpoint.storage import storage_of
from pure_loop.exporting.files import export_module, read_format, refuse_sample, try_to_write
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
