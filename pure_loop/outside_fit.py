"""The loops that don't train: ``evaluate`` and ``predict``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import torch
from torch import nn

from pure_loop import loop
from pure_loop._arguments import read_watch
from pure_loop._calls import teaching
from pure_loop._compiling import evaluating
from pure_loop._loading import refuse_idle_savers
from pure_loop._memories import refuse_other_memories
from pure_loop._start import any_state
from pure_loop._together import Together, algorithm_described, announced
from pure_loop._values import read_flag
from pure_loop.algorithm import AlgorithmLike, bind, flatten
from pure_loop.callback import CallbackLike, Logger, observers
from pure_loop.distributed.parallel import Parallel
from pure_loop.driver import run_script
from pure_loop.errors import ArgumentTypeError
from pure_loop.evaluator import bind_evaluators, check_gradients, measure_loss, refuse_empty
from pure_loop.event import Event
from pure_loop.loop import LoopStages, Script
from pure_loop.precision import Precision
from pure_loop.recorder import Recorder
from pure_loop.stages import Stages
from pure_loop.state import State
from pure_loop.stream import Stream
from pure_loop.strict import Strict
from pure_loop.task import Task, has_loss_method, make_task

__all__ = ["evaluate", "predict"]


@announced
@teaching
def evaluate(
    model_or_state: nn.Module | State,
    evaluators: Any,
    *,
    loss: Callable[..., Any] | Task | None = None,
    task: Task | None = None,
    precision: str = "fp32",
    seed: int = 0,
    algorithms: Iterable[AlgorithmLike] = (),
    callbacks: Iterable[CallbackLike] = (),
    loggers: Iterable[Logger] = (),
    device: torch.device | str | None = None,
    watch: Collection[Event | str] | None = None,
    compile: bool | Literal["where possible"] = False,
    strict: bool = False,
    parallel: Literal["replicate", "shard"] | Parallel | None = None,
) -> Stream:
    """Evaluate by itself; the last State has the results in ``state.metrics[label]``.

    Args:
        model_or_state: a module, or a State kept anywhere.
        evaluators: a dataloader, or a mapping of labels to dataloaders or :class:`pure_loop.Evaluator`.
        algorithms: those of training that matter in evaluation, such as EMA.
        loss: as in :func:`fit`; not needed where evaluators have metrics, and none is of the loss.
        task, precision, seed, callbacks, loggers, device, watch, compile, strict, parallel: as in :func:`fit`.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> state = pl.run(pl.evaluate(torch.nn.Linear(2, 1), {"test": data}, loss=torch.nn.functional.mse_loss))
    >>> list(state.metrics["test"])
    ['loss']
    """
    together = Together.of(parallel)
    state = any_state(model_or_state, seed, together.device(device))
    if evaluators is None:
        raise ArgumentTypeError("evaluators=None: give a dataloader, or a mapping of labels to dataloaders.")
    module, given = state.model._skeleton, next((each for each in (task, loss) if isinstance(each, Task)), Task())
    bound = bind_evaluators(evaluators, "1ep", state.seed, sources=together.sources(given))
    if loss is None and given.loss is None and not has_loss_method(module) and not measure_loss(bound):
        loss = _no_loss
    chosen = make_task(module, loss, task)
    build = lambda stages, listed: loop.evaluate(state, stages, bound, listed)  # noqa: E731
    sources = [each.source for each in bound]
    return _outside_fit(
        state,
        build,
        sources,
        chosen,
        precision,
        algorithms,
        callbacks,
        loggers,
        watch,
        strict,
        together,
        compile,
        bound,
    )


@announced
@teaching
def predict(
    model_or_state: nn.Module | State,
    dataloader: Iterable[Any],
    *,
    task: Task | None = None,
    precision: str = "fp32",
    seed: int = 0,
    algorithms: Iterable[AlgorithmLike] = (),
    callbacks: Iterable[CallbackLike] = (),
    loggers: Iterable[Logger] = (),
    device: torch.device | str | None = None,
    watch: Collection[Event | str] | None = None,
    compile: bool | Literal["where possible"] = False,
    strict: bool = False,
    gradients: bool = False,
    parallel: Literal["replicate", "shard"] | Parallel | None = None,
) -> Stream:
    """Predict: ``state.outputs`` at PREDICT_AFTER_FORWARD and PREDICT_BATCH_END, in evaluation mode.

    Args:
        model_or_state: a module, or a State kept anywhere.
        dataloader: batches as in training, ``(inputs, targets)``, or whatever ``task.validate`` takes.
        gradients: whether the forward differentiates, as in :class:`pure_loop.Evaluator`; outputs have no graph.
        task, precision, seed, algorithms, callbacks, loggers, device, watch, compile, strict, parallel: as in
            :func:`fit`; each rank predicts its part of every batch.

    >>> import torch, pure_loop as pl
    >>> stream = pl.predict(torch.nn.Linear(2, 1), [(torch.ones(4, 2), None)])
    >>> [state.outputs.shape for event, state in stream if event is pl.Event.PREDICT_BATCH_END]
    [torch.Size([4, 1])]
    """
    check_gradients(gradients, "pl.predict")
    together = Together.of(parallel)
    state = any_state(model_or_state, seed, together.device(device))
    if task is None:
        module = state.model._skeleton
        task = make_task(module, None if has_loss_method(module) else _no_loss, None)
    data = together.sources(task)(dataloader, seed=state.seed, stream="predict")
    refuse_empty(data, "dataloader")
    build = lambda stages, listed: loop.predict(state, stages, data, listed, gradients=gradients)  # noqa: E731
    return _outside_fit(
        state, build, [data], task, precision, algorithms, callbacks, loggers, watch, strict, together, compile, ()
    )


def _no_loss(outputs: Any, targets: Any) -> Any:
    raise AssertionError("nobody asked for a loss")


def _outside_fit(
    state: State,
    build: Callable[[Stages, list[str]], Script],
    sources: list[Any],
    task: Task,
    precision: Any,
    algorithms: Any,
    callbacks: Any,
    loggers: Any,
    watch: Any,
    strict: bool,
    together: Together,
    compile: Any,
    evaluators: Any,
) -> Stream:
    strict = read_flag("strict", strict)
    listed = flatten(algorithms)
    refuse_other_memories(state, listed)
    handlers = bind(listed)
    observed, objects, _ = observers(callbacks, loggers, Recorder(), together.rank)
    refuse_idle_savers(objects, "evaluate" if evaluators else "predict")
    engine = together.engine(state)
    stages = LoopStages(task=task, precision=Precision.parse(precision), handlers=handlers, engine=engine)
    stages = evaluating(compile, stages, evaluators)
    watched = read_watch(watch)
    pairs = run_script(
        build(stages, [] if together.parallel is None else list(map(algorithm_described, listed))),
        handlers,
        observed,
        [each.close for each in (*objects, *sources, engine)],
        stages=stages,
        watch=watched,
        strict=Strict.of_order("current") if strict else None,
        failed=engine.failed if engine.ranks > 1 else None,
    )
    return Stream(pairs)
