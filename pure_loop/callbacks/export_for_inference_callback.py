"""Exports the model where training ends: a module, a graph or weights, in a file that loads without pure_loop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from torch import nn

from pure_loop._internal.arguments import path_text
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.algorithms._averages import averaged_if_begun
from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.callbacks._beside import refuse_members
from pure_loop.callbacks._place import Place
from pure_loop.checkpoint.paths import PathLike
from pure_loop.checkpoint.storage import storage_of
from pure_loop.exporting.export import export_module, module_of, read_format, refuse_sample, try_to_export, try_to_write
from pure_loop.ranges import Name, checked
from pure_loop.state import State

__all__ = ["ExportForInferenceCallback"]


@checked
class ExportForInferenceCallback(Callback):
    """Writes the trained model in eval mode to a file at FIT_END, whole or not at all, and reads it back.

    It is the model of the metrics that were recorded last. If a run that has ended before is started again, which
    evaluates nothing, a file that is there stays as it is.

    What would fail then is tried at FIT_START: a model that can't be traced or pickled, an average that there is not, a
    path that can't be written to. Where each rank holds a shard of the parameters (``parallel="shard"``) all ranks
    gather them, and the first one writes.

    Args:
        path: where to; its folder is made, and a URL is opened by fsspec. It may have the fields ``{run_name}``,
            ``{start}`` (when ``fit`` was called, in whole seconds since 1970), ``{epoch}`` and ``{batch}`` (in the name
            of the file those of the State that is exported, in folders those with which the run starts) and ``{rank}``.
        format: ``"module"``: the module itself, by pickle, ``torch.load(path, weights_only=False)``;
            ``"torch.export"``: its graph, which needs no code of the model, ``torch.export.load(path).module()``;
            ``"safetensors"``: its parameters and buffers by the names of ``state_dict()``; ``"onnx"``: its graph for
            other runtimes, which needs the extra ``onnx``; None: what the suffix of the path names, ``.pt`` or
            ``.pth``, ``.pt2``, ``.safetensors`` or ``.onnx``.
        sample: what the module is called with, for graphs and to verify: a tensor, a tuple of arguments or a mapping of
            keyword arguments.
        average: the name of an average of the weights to export, such as ``"ema"``; None: the weights that the last
            evaluation measured, those of an average if it used one; without evaluators the weights that are trained.
        dynamic_batch: whether a graph takes batches of any size: the first dimension of the sample's tensors.
        verify: compare the weights in the file, and with a sample its outputs, with the model's.
        overwrite: replace the file of another run. One that resumes from a State or a checkpoint replaces it in any
            case.

    Raises:
        ArgumentError, ArgumentTypeError: a setting of another type, a graph without a sample, or a
            path with the suffix of another format; at FIT_START: no
            average of this name, or a path that is a folder.
        RunExistsError: (a FileExistsError) at FIT_START, before any training, where another run's file is at the path.
        MissingExtraError: ``"onnx"`` without its packages.
        ExportError: at FIT_START: the model can't be exported; at FIT_END: what was read back differs.
        CheckpointWriteError: (an OSError) at FIT_START, where the path can't be written to.

    >>> import pathlib, tempfile, torch, pure_loop as pl
    >>> path = pathlib.Path(tempfile.mkdtemp(), "model.pt")
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                       optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
    ...                       callbacks=[ExportForInferenceCallback(path, sample=data[0][0])]))
    >>> torch.load(path, weights_only=False)
    Linear(in_features=2, out_features=1, bias=True)
    """

    # Of a sharded State each rank holds a part, and all of them gather it.
    all_ranks = True

    def __init__(
        self,
        path: PathLike,
        format: Literal["module", "torch.export", "safetensors", "onnx"] | None = None,
        sample: Any = None,
        *,
        average: Annotated[str | None, Name()] = None,
        dynamic_batch: bool = True,
        verify: bool = True,
        overwrite: bool = False,
    ) -> None:
        self._place = Place(path, where="ExportForInferenceCallback", overwrite=overwrite)
        self.path = path_text(path)
        self._format = read_format(path, format, where="ExportForInferenceCallback")
        refuse_sample(self._format, sample, dynamic_batch=dynamic_batch, where="ExportForInferenceCallback")
        self._sample = sample
        self._average = average
        self._dynamic_batch = dynamic_batch
        self._verify = verify
        # The States that were measured since the last batch, by the labels of evaluators.
        self._evaluated: dict[str, State] = {}
        self._evaluates = False
        self._began = 0

    def bind(self, run: Run) -> None:
        """
        Raises:
            ArgumentError: an ensemble is trained.
        """
        instead = "export one of the last State, pl.export(state.member(0), path)."
        refuse_members(run, "ExportForInferenceCallback", instead)
        self._evaluated = {} if run.boundary is None else run.boundary.evaluated
        self._evaluates = bool(run.metrics)
        self._place.run = run

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        self._began = state.timestamp.batch
        if self._takes_part(state):
            self._place.settle(state)
        # Before training the average may be of no weights yet; its module is the same.
        module = self._module(state if self._average is None else averaged_if_begun(state, self._average), None)
        if module is not None:
            try_to_write(self._place.of(state))
            self._place.refuse_others(state)
            try_to_export(module, self._format, sample=self._sample, dynamic_batch=self._dynamic_batch)

    def eval_start(self, state: State, logger: LoggerGroup) -> None:
        assert state.evaluator is not None
        if self._average is None:
            self._evaluated.pop(state.evaluator, None)  # for the last one to stand last
            self._evaluated[state.evaluator] = state

    def fit_end(self, state: State, logger: LoggerGroup) -> None:
        batch = state.timestamp.batch
        measured = [evaluated for evaluated in self._evaluated.values() if evaluated.timestamp.batch == batch]
        over = batch == self._began and self._evaluates and not measured
        if not self._takes_part(state):
            return
        path = self._place.of(state)
        if over and self._average is None and storage_of(path).exists():
            return
        module = self._module(measured[-1] if measured and self._average is None else state, self._average)
        if module is not None:
            options = {"sample": self._sample, "dynamic_batch": self._dynamic_batch, "verify": self._verify}
            export_module(module, path, self._format, **options)
            logger.log_file("export", path)

    def _takes_part(self, state: State) -> bool:
        """Whether this rank writes the file, or has a shard of what is written."""
        return not self.rank or are_sharded(state.params)

    def _module(self, state: State, average: str | None) -> nn.Module | None:
        """What is exported; None on other ranks than the first."""
        if not self._takes_part(state):
            return None
        module = module_of(state, average)
        return None if self.rank else module
