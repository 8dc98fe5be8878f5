"""The door: ``fit``, ``evaluate`` and ``predict`` read their arguments, refuse what can't work, and start.

Everything that can be wrong is refused here, when the function is called and before anything runs;
what comes back is a generator of ``(event, state)`` that the driver feeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

import attrs
import torch
from torch import Tensor, nn

from pure_loop import loop, optim
from pure_loop._signature import accepts, name_of
from pure_loop.algorithm import Algorithm, AlgorithmLike, bind, flatten
from pure_loop.cadence import CadenceLike
from pure_loop.callback import Callback, CallbackLike, Logger, LoggerGroup, Observer, observers
from pure_loop.driver import POSITIONS, run_script
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.evaluator import _positive, bind_evaluators, refuse_empty
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.loop import LoopStages, Script
from pure_loop.model import refuse_untrainable
from pure_loop.optim import Optimizer
from pure_loop.precision import LossScale, Precision
from pure_loop.recorder import Recorder
from pure_loop.sources import Source, source
from pure_loop.stages import Stages
from pure_loop.state import State, refuse_misfit
from pure_loop.strict import Strict
from pure_loop.task import Task, make_task
from pure_loop.time import Time, TimeUnit

__all__ = ["Stream", "drive", "evaluate", "fit", "predict", "run"]

Stream: TypeAlias = Generator[tuple[Event, State], None, None]
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Prepared:
    """The arguments of one call of ``fit``, read and checked: what runs, and what ``explain`` shows."""

    state: State
    fit: loop.Fit
    algorithms: tuple[Algorithm, ...]
    observers: dict[Event, tuple[Observer, ...]]
    callbacks: tuple[Callback, ...]
    logger: LoggerGroup
    watch: frozenset[Event] | None
    strict: bool
    order: Literal["current", "2021"]

    def script(self) -> Script:
        """The script of this call's order."""
        return (loop.fit_2021 if self.order == "2021" else loop.fit)(self.state, self.fit)


def fit(
    model_or_state: nn.Module | State,
    train_dataloader: Iterable[Any],
    *,
    loss: Callable[..., Any] | Task | None = None,
    optimizer: Optimizer,
    max_duration: str | int | Time,
    task: Task | None = None,
    microbatch_size: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
    evaluators: Any = None,
    eval_interval: CadenceLike = "1ep",
    algorithms: Iterable[AlgorithmLike] = (),
    callbacks: Iterable[CallbackLike] = (),
    loggers: Iterable[Logger] = (),
    clip_grad: float | Callable[..., Any] | None = None,
    nonfinite: Literal["error", "skip"] = "error",
    device: torch.device | str | None = None,
    load_path: str | None = None,
    batches_per_epoch: int | None = None,
    iteration_length: str | Time | None = None,
    watch: Collection[Event | str] | None = None,
    donate: bool = False,
    compile: bool = False,
    strict: bool = False,
    order: Literal["current", "2021"] = "current",
    clock: Callable[[], float] = time.monotonic,
) -> Stream:
    """Train: yields ``(event, state)`` at every event of the specification, in order.

    Args:
        model_or_state: a module (a fresh start; it stays as it was), or a State kept at a boundary, from
            which training goes on as if it had never stopped. A State brings its seed, loss scale,
            optimizer state and algorithms' memory; data and functions are given again, from the start.
        train_dataloader: any iterable of batches: a ``DataLoader``, a list, an iterator, endless or not.
        loss: ``(outputs, targets) -> scalar``, a mean over the batch; or a Task; or None if the module has
            a method ``loss(outputs, batch)``.
        optimizer: such as ``pl.optim.adamw(lr=3e-4)``.
        max_duration: when to stop: ``"3ep"``, ``"1000ba"``, ``"1e6tok"``, ``"90m"``; an int counts epochs.
        task: what to do with batches that are not ``(inputs, targets)``: :class:`pure_loop.Task`.
        microbatch_size: samples a forward at most; None: the whole batch. Gradients don't depend on it.
        precision: ``"fp32"``, ``"amp_bf16"`` or ``"amp_fp16"``.
        seed: where all random numbers of the run come from, shuffling and dropout included.
        evaluators: a dataloader, or a mapping of labels to dataloaders or :class:`pure_loop.Evaluator`.
        eval_interval: how often they run: ``"1ep"``, ``"100ba"``, ``"0.1dur"``, a predicate; 0: never.
        algorithms: pure functions ``State -> State`` bound to events (:func:`pure_loop.algorithm`).
        callbacks: read-only observers: :class:`pure_loop.Callback`, or functions of ``(event, state)``.
        loggers: where recorded values go.
        clip_grad: a global norm that gradients are scaled down to, or ``(grads, params) -> grads``.
        nonfinite: ``"error"``: a loss or gradient that is NaN or infinite raises and names its batch;
            ``"skip"``: its step is left out and counted in ``state.skipped``.
        device: where to train; None: where the model is. Batches are moved there once.
        load_path: a checkpoint to start from (not in this version).
        batches_per_epoch: cut epochs to so many batches; gives endless data epochs.
        iteration_length: the length of an iteration, in epochs or tokens; None: no iteration events.
        watch: yield only these events; algorithms and callbacks see all.
        donate: reuse the memory of the last State (not in this version).
        compile: compile the step (not in this version).
        strict: check while training the order of events and, by value, that nobody changes a State.
        order: ``"current"``, or ``"2021"``, the order of the older documents.
        clock: where seconds come from.

    Raises:
        ArgumentError, ArgumentTypeError, ModelError, WrappedModelError, ResumeError: at the call, before
            anything runs; each says what was given and what to write instead.
        DataError, LossError, NonFiniteError, AlgorithmReturnError, AlgorithmStructureError, ...: from the
            stream, naming batch and event.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep")
    >>> sum(event is pl.Event.BATCH_END for event, state in stream)
    6
    """
    return _start(prepare(**locals()))


def _start(prepared: Prepared) -> Stream:
    handlers = bind(prepared.algorithms)
    stages = prepared.fit.stages
    strict = Strict.of_order(prepared.order) if prepared.strict else None
    observed = dict(prepared.observers)
    return _closing(
        run_script(
            prepared.script(),
            handlers,
            observed,
            prepared.callbacks,
            stages=stages,
            watch=prepared.watch,
            strict=strict,
        ),
        # Not `prepared` itself: it would keep the first State's tensors alive as long as the stream.
        [prepared.fit.source, *(evaluator.source for evaluator in prepared.fit.evaluators)],
    )


def _closing(stream: Stream, sources: Sequence[Source]) -> Stream:
    """The stream, and the data's workers ended with it, however it ends."""
    try:
        yield from stream
    finally:
        stream.close()
        for each in sources:
            each.close()


def prepare(
    *,
    model_or_state: Any,
    train_dataloader: Any,
    loss: Any,
    optimizer: Any,
    max_duration: Any,
    task: Task | None,
    microbatch_size: Any,
    precision: Any,
    seed: Any,
    evaluators: Any,
    eval_interval: Any,
    algorithms: Any,
    callbacks: Any,
    loggers: Any,
    clip_grad: Any,
    nonfinite: Any,
    device: Any,
    load_path: Any,
    batches_per_epoch: Any,
    iteration_length: Any,
    watch: Any,
    donate: Any,
    compile: Any,
    strict: bool,
    order: Any,
    clock: Callable[[], float],
) -> Prepared:
    """Read and check the arguments of ``fit``; nothing is run, no data is loaded."""
    later = (("load_path", load_path, None), ("donate", donate, False), ("compile", compile, False))
    for name, value, default in later:
        if value is not default:
            raise ArgumentError(f"{name}={value!r}: this version of pure_loop can't do that yet; leave {name} out.")
    if order not in ("current", "2021"):
        raise ArgumentError(f'order={order!r}: write "current" or "2021".')
    if nonfinite not in ("error", "skip"):
        raise ArgumentError(f'nonfinite={nonfinite!r}: write "error" or "skip".')
    if not callable(clock):
        raise ArgumentTypeError(f"clock={clock!r}: give a function that returns seconds, such as time.monotonic.")
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(_about_optimizer(optimizer))
    duration = _duration(max_duration)
    length = _iteration_length(iteration_length, duration)
    if length is not None and order == "2021":
        raise ArgumentError('order="2021" has no events for iterations; leave iteration_length out.')
    listed = flatten(algorithms)
    observed, objects, group = observers(callbacks, loggers, Recorder(optimizer))
    watched = _watched(watch)
    mode = Precision.parse(precision)
    state, fresh = _first_state(model_or_state, seed, device)
    module = state.model._skeleton
    stages = LoopStages(
        task=make_task(module, loss, task),
        optimizer=optimizer,
        precision=mode,
        microbatch_size=_positive(_not_auto(microbatch_size), "microbatch_size"),
        clip_grad=_checked_clip(clip_grad),
        nonfinite=nonfinite,
        handlers=bind(listed),
    )
    if isinstance(train_dataloader, nn.Module | State):
        raise ArgumentTypeError(
            f"train_dataloader is a {type(train_dataloader).__name__}; the model comes first, then the data: "
            "fit(model, train_dataloader, ...)."
        )
    data = source(
        train_dataloader,
        seed=state.seed,
        stream="train",
        batches_per_epoch=_positive(batches_per_epoch, "batches_per_epoch"),
    )
    refuse_empty(data, "train_dataloader")
    # Both timestamps, because the learning rate of a batch is asked for at the one before it.
    known = {"max_duration": duration, "batches_per_epoch": data.length}
    state = state.replace(
        timestamp=state.timestamp.replace(**known), previous_timestamp=state.previous_timestamp.replace(**known)
    )
    _refuse_other_optimizer(state, optimizer)
    return Prepared(
        state=state,
        fit=loop.Fit(
            stages=stages,
            source=data,
            evaluators=bind_evaluators(evaluators, eval_interval, state.seed, duration),
            iteration_length=length,
            clock=clock,
            fresh=fresh,
            prepare=_preparation(optimizer, mode, listed),
            counts_tokens=TimeUnit.TOKEN in (duration.unit, None if length is None else length.unit),
        ),
        algorithms=listed,
        observers=observed,
        callbacks=objects,
        logger=group,
        watch=watched,
        strict=bool(strict),
        order=order,
    )


def _first_state(model_or_state: Any, seed: Any, device: Any) -> tuple[State, bool]:
    """The State to start from, and whether it is a fresh start."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentTypeError(f"seed={seed!r}: give a whole number.")
    wanted = _device(device)
    if not isinstance(model_or_state, State):
        refuse_untrainable(model_or_state)
        return State.create(model_or_state, seed=seed, device=wanted), True
    state = model_or_state
    _refuse_between_boundaries(state)
    refuse_misfit(state)
    if seed not in (0, state.seed):
        raise ArgumentError(
            f"seed={seed}, and the State given has seed {state.seed}, with which it goes on. To fork it with other "
            f"random numbers write fit(state.replace(seed={seed}), ...)."
        )
    if wanted is not None and (wanted.type != state.device.type or wanted.index not in (None, state.device.index)):
        state = _moved(state, wanted)
    return state, state.position is None and state.event is None


def _device(given: Any) -> torch.device | None:
    if given is None:
        return None
    if not isinstance(given, str | torch.device):
        raise ArgumentTypeError(f'device={given!r}: write "cpu", "cuda" or "cuda:0".')
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentError(f"device={str(given)!r} can't be used here: {str(error).splitlines()[0]}") from error
    return device


def _moved(state: State, device: torch.device) -> State:
    import optree

    return optree.tree_map(  # type: ignore[return-value]
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf,
        state,  # type: ignore[arg-type]
        namespace="pure_loop",
    )


_KEEPABLE = frozenset({*POSITIONS, Event.FIT_START, Event.EVAL_STANDALONE_END, None})


# Where training ended, the evaluation before FIT_END has no boundary after it.
_AFTER_EVALUATION: dict[Event | None, Event] = {
    Event.BATCH_END: Event.BATCH_CHECKPOINT,
    Event.EPOCH_END: Event.EPOCH_CHECKPOINT,
    Event.BATCH_CHECKPOINT: Event.FIT_END,
    Event.EPOCH_CHECKPOINT: Event.FIT_END,
    Event.ITERATION_CHECKPOINT: Event.FIT_END,
}


def _refuse_between_boundaries(state: State) -> None:
    event = state.event
    if event in _KEEPABLE:
        return
    from pure_loop.order import BOUNDARIES, nearest_boundary  # only on the way to an error

    assert event is not None
    if event.is_predict:
        nearest = "the State that you predicted from"
    elif event is Event.EVAL_STANDALONE_START:
        nearest = "the State that you evaluated, or the one at EVAL_STANDALONE_END"
    elif event.is_eval and state.position in _AFTER_EVALUATION:
        nearest = f"the one at {_AFTER_EVALUATION[state.position].name}, which follows this evaluation"
    else:
        nearest = f"the one at {nearest_boundary(event).name}, the next boundary after it"
    raise ResumeError(
        f"this State was kept at {event.name}, in the middle of a computation, from which training can't go on. Keep "
        f"{nearest}. Boundaries are {', '.join(e.name for e in Event if e in BOUNDARIES)}."
    )


def _refuse_other_optimizer(state: State, optimizer: Optimizer) -> None:
    """Refuse a State whose optimizer memory another optimizer made."""
    import optree

    if state.opt_state is None:
        return
    wanted = optimizer.init(_trained(state, meta=True))
    given_spec = optree.tree_structure(state.opt_state, namespace="pure_loop")
    wanted_spec = optree.tree_structure(cast(Any, wanted), namespace="pure_loop")
    afresh = "start afresh: fit(state.replace(opt_state=None), ...)."
    # An optimizer of somebody's own may fill an empty memory as it goes; ours never do.
    if given_spec != wanted_spec and wanted_spec.num_leaves:
        if _keys(state.opt_state) == _keys(wanted):
            raise ResumeError(
                f"opt_state was made by {optimizer.name} for another model: it has the memory of other parameters. "
                f"Give the State that was made with this model, or {afresh}"
            )
        raise ResumeError(
            f"opt_state was made by another optimizer than {optimizer.name}: it holds {_keys(state.opt_state)}, and "
            f"{optimizer.name} needs {_keys(wanted)}. Go on with the optimizer that made it, or {afresh}"
        )
    if given_spec != wanted_spec:
        return
    paths: Any = optree.tree_paths(state.opt_state, namespace="pure_loop")
    leaves: Any = optree.tree_leaves(state.opt_state, namespace="pure_loop")
    needed: Any = optree.tree_leaves(wanted, namespace="pure_loop")  # type: ignore[arg-type]
    for path, given, leaf in zip(paths, leaves, needed, strict=True):
        shape = next((state.params[each].shape for each in path if each in state.params), None)
        if isinstance(leaf, Tensor) and leaf.shape == shape != given.shape:
            raise ResumeError(
                f"opt_state[{']['.join(map(repr, path))}] has shape {tuple(given.shape)}, and its parameter "
                f"{tuple(shape)}: it is another model's. Give the State that was made with this model, or {afresh}"
            )


def _keys(opt_state: Any) -> str:
    if not isinstance(opt_state, dict):
        return type(opt_state).__name__
    return ", ".join(map(str, opt_state)) or "nothing"


def _trained(state: State, *, meta: bool = False) -> FrozenDict[str, Tensor]:
    return FrozenDict(
        (name, torch.empty_like(state.params[name], device="meta") if meta else state.params[name])
        for name in state.model.trainable
    )


def _preparation(
    optimizer: Optimizer, precision: Precision, algorithms: tuple[Algorithm, ...]
) -> Callable[[State], State]:
    """What a State still lacks before training: optimizer memory, loss scale, the memory of algorithms."""

    def prepare(state: State) -> State:
        if state.opt_state is None:
            state = state.replace(opt_state=optimizer.init(_trained(state)))
        if precision.scaled and state.loss_scale is None:
            state = state.replace(loss_scale=LossScale.initial(state.device))
        elif not precision.scaled and state.loss_scale is not None:
            state = state.replace(loss_scale=None)
        for algorithm in algorithms:
            if algorithm.init is not None and algorithm.name not in state.algorithm_state:
                state = state.remember(algorithm.name, _first_memory(algorithm, state))
        return state

    return prepare


def _first_memory(algorithm: Algorithm, state: State) -> Any:
    assert algorithm.init is not None
    try:
        return algorithm.init(state)
    except Exception as error:
        error.add_note(f"raised by init of algorithm {algorithm.name!r}")
        raise


def _duration(given: Any) -> Time:
    try:
        duration = Time.parse(given)
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"max_duration={given!r}: {error}") from None
    if duration.unit is TimeUnit.DURATION:
        raise ArgumentError(f'max_duration={given!r} is a fraction of itself; write "3ep", "1000ba" or "90m".')
    return duration


def _iteration_length(given: Any, duration: Time) -> Time | None:
    if given is None:
        if duration.unit is TimeUnit.ITERATION:
            raise ArgumentError(f"max_duration={str(duration)!r} counts iterations, and iteration_length is not given.")
        return None
    try:
        length = Time.parse(given)
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"iteration_length={given!r}: {error}") from None
    if length.unit not in (TimeUnit.EPOCH, TimeUnit.TOKEN) or not length:
        raise ArgumentError(
            f'iteration_length={given!r}: an iteration lasts epochs or tokens, such as "2ep" or "1e6tok".'
        )
    return length


def _not_auto(microbatch_size: Any) -> Any:
    if microbatch_size == "auto":
        raise ArgumentError(
            'microbatch_size="auto": this version of pure_loop can\'t do that yet; give a number, or None.'
        )
    return microbatch_size


def _watched(given: Any) -> frozenset[Event] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentTypeError(f"watch={given!r}: give a set of events, such as watch={{Event.BATCH_END}}.")
    return frozenset(_event(event) for event in given)


def _event(given: Any) -> Event:
    try:
        return Event(given)
    except ValueError as error:
        raise ArgumentError(f"watch: {error}") from None


def _checked_clip(clip_grad: Any) -> Any:
    if clip_grad is None:
        return None
    if callable(clip_grad):
        if not accepts(clip_grad, 2):
            raise ArgumentTypeError(
                f"clip_grad is the function {name_of(clip_grad)}, which can't be called with two arguments: it is "
                f"called as {name_of(clip_grad)}(grads, params)."
            )
        return _Clip(clip_grad)
    if isinstance(clip_grad, bool) or not isinstance(clip_grad, int | float):
        raise ArgumentTypeError(
            f"clip_grad={clip_grad!r}: give a norm such as 1.0, or a function (grads, params) -> grads."
        )
    if not clip_grad > 0:
        raise ArgumentError(f"clip_grad={clip_grad!r}: a norm is above 0; None switches clipping off.")
    return clip_grad


@attrs.frozen
class _Clip:
    """A user's clipping function, held to what it must return."""

    function: Callable[[Any, Any], Any]

    def __call__(self, grads: FrozenDict[str, Any], params: FrozenDict[str, Tensor]) -> FrozenDict[str, Any]:
        clipped = self.function(grads, params)
        name = name_of(self.function)
        if not isinstance(clipped, Mapping):
            raise ArgumentTypeError(
                f"clip_grad={name} returned {type(clipped).__name__}; it returns the clipped gradients by name: "
                "{name: gradient for each of grads}."
            )
        if clipped.keys() != grads.keys():
            missing, unknown = sorted(grads.keys() - clipped.keys())[:3], sorted(clipped.keys() - grads.keys())[:3]
            raise ArgumentError(
                f"clip_grad={name} returned gradients of other names: missing {missing}, unknown {unknown}."
            )
        return FrozenDict((key, clipped[key]) for key in grads)


def _about_optimizer(given: Any) -> str:
    if isinstance(given, torch.optim.Optimizer):
        cls = type(given)
        return f"optimizer= is a torch.optim.{cls.__name__}, which changes a module in place. {_ours(cls)}"
    if isinstance(given, type):
        return f"optimizer= is the class {given.__name__}. {_ours(given)}"
    if isinstance(given, list | tuple | dict):
        return (
            f"optimizer= is a {type(given).__name__}; give one optimizer. pl.optim.partition gives groups of "
            "parameters optimizers of their own; a GAN's two optimizers belong into a script of your own (pl.drive)."
        )
    if callable(given):
        name = name_of(given)
        ours = name if hasattr(optim, name) else "adamw"
        return f"optimizer= is the function {name!r}; call it: pl.optim.{ours}(lr=3e-4)."
    return f"optimizer={given!r}: give one of pl.optim, such as pl.optim.adamw(lr=3e-4)."


def _ours(cls: type) -> str:
    name = cls.__name__
    same = f"pl.optim.{name.lower()}(lr=...) or " if hasattr(optim, name.lower()) else ""
    return f"Write {same}pl.optim.from_torch(torch.optim.{name}, lr=...)."


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
    strict: bool = False,
) -> Stream:
    """Evaluate by itself; the last State has the results in ``state.metrics[label]``.

    Args:
        model_or_state: a module, or a State kept anywhere.
        evaluators: a dataloader, or a mapping of labels to dataloaders or :class:`pure_loop.Evaluator`.
        algorithms: those of training that matter in evaluation, such as EMA.
        loss, task, precision, seed, callbacks, loggers, device, watch, strict: as in :func:`fit`.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> state = pl.run(pl.evaluate(torch.nn.Linear(2, 1), {"test": data}, loss=torch.nn.functional.mse_loss))
    >>> list(state.metrics["test"])
    ['loss']
    """
    state = _any_state(model_or_state, seed, device)
    if evaluators is None:
        raise ArgumentTypeError("evaluators=None: give a dataloader, or a mapping of labels to dataloaders.")
    bound = bind_evaluators(evaluators, "1ep", state.seed)
    build = lambda stages: loop.evaluate(state, stages, bound)  # noqa: E731
    sources = [each.source for each in bound]
    return _outside_fit(state, build, sources, loss, task, precision, algorithms, callbacks, loggers, watch, strict)


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
    strict: bool = False,
) -> Stream:
    """Predict: ``state.outputs`` at PREDICT_AFTER_FORWARD and PREDICT_BATCH_END, in evaluation mode.

    Args:
        model_or_state: a module, or a State kept anywhere.
        dataloader: batches as in training, ``(inputs, targets)``, or whatever ``task.validate`` takes.
        task, precision, seed, algorithms, callbacks, loggers, device, watch, strict: as in :func:`fit`.

    >>> import torch, pure_loop as pl
    >>> stream = pl.predict(torch.nn.Linear(2, 1), [(torch.ones(4, 2), None)])
    >>> [state.outputs.shape for event, state in stream if event is pl.Event.PREDICT_BATCH_END]
    [torch.Size([4, 1])]
    """
    state = _any_state(model_or_state, seed, device)
    data = source(dataloader, seed=state.seed, stream="predict")
    refuse_empty(data, "dataloader")
    build = lambda stages: loop.predict(state, stages, data)  # noqa: E731
    if task is None:
        module = state.model._skeleton
        task = make_task(module, None if callable(getattr(module, "loss", None)) else _no_loss, None)
    return _outside_fit(
        state, build, [data], None, task, precision, algorithms, callbacks, loggers, watch, strict, checked=True
    )


def _no_loss(outputs: Any, targets: Any) -> Any:
    raise AssertionError("prediction computes no loss")


def _any_state(model_or_state: Any, seed: int, device: Any) -> State:
    if isinstance(model_or_state, State):
        state = model_or_state
        refuse_misfit(state)
        wanted = _device(device)
        return state if wanted is None else _moved(state, wanted)
    refuse_untrainable(model_or_state)
    return State.create(model_or_state, seed=seed, device=_device(device))


def _outside_fit(
    state: State,
    build: Callable[[Stages], Script],
    sources: list[Any],
    loss: Any,
    task: Task | None,
    precision: Any,
    algorithms: Any,
    callbacks: Any,
    loggers: Any,
    watch: Any,
    strict: bool,
    *,
    checked: bool = False,
) -> Stream:
    listed = flatten(algorithms)
    handlers = bind(listed)
    observed, objects, _ = observers(callbacks, loggers, Recorder())
    chosen = task if checked and task is not None else make_task(state.model._skeleton, loss, task)
    stages = LoopStages(task=chosen, precision=Precision.parse(precision), handlers=handlers)
    watched = _watched(watch)
    checker = Strict.of_order("current") if strict else None

    def stream() -> Stream:
        inner = run_script(build(stages), handlers, observed, objects, stages=stages, watch=watched, strict=checker)
        try:
            yield from inner
        finally:
            inner.close()
            for each in sources:
                each.close()

    return stream()


def drive(
    script: Script,
    *,
    algorithms: Iterable[AlgorithmLike] = (),
    callbacks: Iterable[CallbackLike] = (),
    loggers: Iterable[Logger] = (),
    stages: Stages | None = None,
    watch: Collection[Event | str] | None = None,
    strict: bool = False,
) -> Stream:
    """Run a script of your own: algorithms, callbacks and loggers as in :func:`fit`.

    Args:
        script: a generator that yields ``(event, state)``, takes the State back, and returns the last one.
        stages: what handlers that take a second argument are given.
        algorithms, callbacks, loggers, watch: as in :func:`fit`. The memory of algorithms is there from the
            first State on.
        strict: checks by value that nobody changes a State; the order is yours.

    >>> import torch, pure_loop as pl
    >>> def script(state):
    ...     for _ in range(2):
    ...         state = yield pl.Event.BATCH_START, state
    ...         state = yield pl.Event.BATCH_END, state
    ...     return state
    >>> state = pl.State.create(torch.nn.Linear(1, 1))
    >>> [event.value for event, _ in pl.drive(script(state))]
    ['batch_start', 'batch_end', 'batch_start', 'batch_end']
    """
    if not isinstance(script, Generator):
        raise ArgumentTypeError(
            f"script is {script!r} of type {type(script).__name__}, not a generator: call the function, "
            "drive(script(state))."
        )
    listed = flatten(algorithms)
    observed, objects, _ = observers(callbacks, loggers)
    watched = _watched(watch)
    return run_script(
        _with_memory(script, listed),
        bind(listed),
        observed,
        objects,
        stages=stages,
        watch=watched,
        strict=Strict(None) if strict else None,
    )


def _with_memory(script: Script, algorithms: tuple[Algorithm, ...]) -> Script:
    """The script, whose first State has the initial memory of the algorithms."""
    try:
        event, state = next(script)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    for algorithm in algorithms:
        if algorithm.init is not None and algorithm.name not in state.algorithm_state:
            state = state.remember(algorithm.name, _first_memory(algorithm, state))
    try:
        while True:
            state = yield event, state
            event, state = script.send(state)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        script.close()


def run(stream: Iterable[tuple[Event, State]]) -> State:
    """Run a stream to its end and give its last State.

    Raises:
        ArgumentError: the stream yields nothing.
    """
    state: State | None = None
    for _, state in stream:  # noqa: B007
        pass
    if state is None:
        raise ArgumentError("the stream yielded nothing: was it run to its end before, or watch= empty?")
    return state
