"""Records statistics of what each module of the model returns, from a forward beside training."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Literal, TypeAlias

import optree
import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import refusal
from pure_loop._internal.pytree import PyTree
from pure_loop.cadence import CadenceLike
from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.callbacks._beside import refuse_collectives
from pure_loop.callbacks._intervals import measures_batch, read_interval
from pure_loop.data.group import parts_of
from pure_loop.errors import ArgumentError
from pure_loop.precision import Precision
from pure_loop.random import derive, seeded_all
from pure_loop.ranges import checked
from pure_loop.stages.settings import found_size
from pure_loop.state import State

__all__ = ["ActivationMonitor"]

StatisticName: TypeAlias = Literal["norm", "mean", "kurtosis", "max", "zeros"]


def _norm(values: Tensor) -> Tensor:
    samples = values.flatten(1) if values.ndim > 1 else values.reshape(-1, 1)
    result: Tensor = torch.linalg.vector_norm(samples, dim=1).mean()
    return result


def _kurtosis(values: Tensor) -> Tensor:
    squares = (values - values.mean()).square()
    return squares.square().mean() / squares.mean().square()


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": _norm,
    "mean": torch.mean,
    "kurtosis": _kurtosis,
    "max": torch.max,
    "zeros": lambda values: (values == 0).to(values.dtype).mean(),
}


@checked
class ActivationMonitor(Callback):
    """Records statistics of the outputs of modules at an interval, as ``activations/<statistic>/<module>``.

    =================== ================================================================================================
    ``norm``            the L2 norm of a sample's activations, mean over the batch
    ``mean``, ``max``   over all elements
    ``kurtosis``        the fourth central moment over the square of the second: 3 for a normal distribution, large
                        where a few elements are far from the others, NaN where all are equal
    ``zeros``           the part of elements that are 0, such as those of dead ReLUs
    =================== ================================================================================================

    A due batch goes through a copy of the model once more, without gradients, between AFTER_TRAIN_BATCH and the update:
    in train mode, with the parameters, the precision, the batch as algorithms left it and the random numbers (dropout)
    of the step, so the activations are those of training. Of a batch that is split, it is the first microbatch. That
    costs a forward and a copy of the model for its duration; training doesn't change. The values stay on the device.

    Of a module that returns several tensors each has its number in the name, ``activations/norm/lstm/0``; of a module
    that is called several times in a forward the last call counts. Intervals are due as for ``GradMonitor``. On several
    ranks the first one computes the statistics, of its part of the batch.

    Args:
        interval: how often: ``"25ba"``, ``"1ep"``, ``"10m"``, ``"0.1dur"``, a predicate of the State.
        only: globs of the names of modules, ``"layers.*"`` or ``["*.attention", "head"]``; None: those that have no
            submodules.
        statistics: which.

    Raises:
        ArgumentTypeError, ArgumentError: an interval that can't be read, a statistic that there isn't, a glob that is
            no text; a script of the user's own (``pl.drive``). At FIT_START: a glob that no module has, sharded
            parameters, or ``SyncBatchNorm`` on several ranks.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import InMemoryLogger
    >>> logger, model = InMemoryLogger(), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1))
    >>> data = [(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.zeros(1, 1))]
    >>> state = pl.run(pl.fit(model, data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="1ba", callbacks=[ActivationMonitor("1ba")], loggers=[logger]))
    >>> [round(logger.series(f"activations/{name}/0")[1][0], 2) for name in ("mean", "max", "norm", "kurtosis")]
    [2.5, 4.0, 5.48, 1.64]
    """

    records = True
    each_member = True

    def __init__(
        self,
        interval: CadenceLike = "25ba",
        *,
        only: str | Iterable[str] | None = None,
        statistics: Iterable[StatisticName] = ("norm", "mean", "kurtosis", "max"),
    ) -> None:
        self._interval = read_interval(interval, "ActivationMonitor")
        self._only = _read_globs(only)
        self._statistics = _read_statistics(statistics)
        self._run: Run | None = None
        self._values: Mapping[str, Tensor] = {}

    def bind(self, run: Run) -> None:
        """
        Raises:
            ArgumentError: a script of the user's own: its forward isn't known.
        """
        if run.function == "drive":
            raise ArgumentError(
                "ActivationMonitor in pl.drive: a script of your own has no task whose forward could be computed; use "
                "it with pl.fit."
            )
        self._run = run

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        """
        Raises:
            ArgumentError: no module has such a name, or ranks compute a forward of this model together.
        """
        self._values = {}
        refuse_collectives(state, 1 if self._run is None else self._run.ranks, "ActivationMonitor")
        names = [name for name, _ in state.model.skeleton.named_modules()]
        for glob in self._only or ():
            if not fnmatch.filter(names, glob):
                raise ArgumentError(
                    f"ActivationMonitor(only={glob!r}): no module has such a name; there are "
                    f"{', '.join(name for name in names if name)}."
                )

    def after_train_batch(self, state: State, logger: LoggerGroup) -> None:
        if logger.loggers and self._run is not None and measures_batch(self._interval, state):
            self._values = self._measured(state, self._run)

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        if self._values:
            values, self._values = self._values, {}
            logger.log_metrics(values, state)

    def close(self) -> None:
        self._values = {}

    def _measured(self, state: State, run: Run) -> dict[str, Tensor]:
        assert run.task is not None
        values: dict[str, Tensor] = {}
        module = state.module()
        for name, submodule in module.named_modules():
            if self._is_measured(name, submodule):
                submodule.register_forward_hook(partial(self._measure, values, name))
        batch, t = state.batch, state.timestamp
        size = run.microbatch_size or found_size(state)
        batch = parts_of(batch)[0] if size is None else run.task.split(batch, size)[0]
        # The seed of the first forward of this batch on the first rank.
        seed = derive(state.seed, "forward", t.epoch, t.batch, 0, 0)
        autocast = Precision.parse(run.precision).autocast(state.device) or nullcontext()
        with torch.no_grad(), seeded_all(seed), autocast:
            run.task.forward(module, batch)
        return values

    def _is_measured(self, name: str, module: nn.Module) -> bool:
        if self._only is not None:
            return any(fnmatch.fnmatchcase(name, glob) for glob in self._only)
        return next(module.children(), None) is None

    def _measure(
        self, values: dict[str, Tensor], name: str, module: nn.Module, inputs: PyTree, outputs: PyTree
    ) -> None:
        leaves = [
            leaf
            for leaf in optree.tree_leaves(outputs, namespace="pure_loop")
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()
        ]
        for number, leaf in enumerate(leaves):
            where = "/".join(part for part in (name, str(number) if len(leaves) > 1 else "") if part)
            tensor = leaf.detach().to(torch.promote_types(leaf.dtype, torch.float32))
            for statistic in self._statistics:
                values[f"activations/{statistic}/{where}".rstrip("/")] = STATISTICS[statistic](tensor)


def _read_globs(only: object) -> tuple[str, ...] | None:
    if only is None:
        return None
    globs = (only,) if isinstance(only, str) else tuple(only) if isinstance(only, Iterable) else ()
    if not globs or not all(isinstance(glob, str) and glob for glob in globs):
        raise refusal("only", only, 'a glob of module names such as "layers.*", or a list of them', "ActivationMonitor")
    return globs


def _read_statistics(statistics: object) -> tuple[str, ...]:
    is_text = isinstance(statistics, str)
    names = tuple(statistics) if isinstance(statistics, Iterable) and not is_text else ()
    if not names or any(name not in STATISTICS for name in names):
        wanted = f"a list of {', '.join(map(repr, STATISTICS))}"
        raise refusal(
            "statistics", statistics, wanted, "ActivationMonitor", typed=is_text or not isinstance(statistics, Iterable)
        )
    return names
