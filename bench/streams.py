"""Runs the stream of a plan, and records the digests of what it yields."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

import pure_loop as pl
from bench.digests import Recorder
from bench.models import BATCHES_OF, Unsized, batches, loss_of, model_of
from bench.parts import algorithm_of, callback_of, clip_function, metrics_of, optimizer_of
from bench.plans import Plan
from pure_loop import Event, State
from pure_loop.task import OnTargets

__all__ = ["record"]

BOUNDARIES = {Event.AFTER_LOAD, Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.BATCH_END}
GLANCED = {Event.BATCH_END, Event.EPOCH_END, Event.EVAL_END, Event.FIT_END, Event.PREDICT_BATCH_END}
# A stream that should end is ended here.
LONGEST = 3000

Pairs = Iterator[tuple[Event, State]]


class _Clock:
    """Seconds that pass where a batch begins."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def callback(self, event: Event, state: State) -> None:
        if event is Event.BATCH_START:
            self.now += 0.5


def record(plan: Plan) -> Recorder:
    """The digests of the stream of this plan; an error of the library ends it, and is noted by its class."""
    recorder = Recorder(seconds=plan["duration"].endswith("s"))
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        if plan["kind"] == "compiled":
            import pure_loop.compile  # with it comes torch's compiler

            stack.enter_context(pure_loop.compile.interpreted())
        stack.enter_context(pl.random.seeded_all(0))
        try:
            _consume(plan, recorder)
        except (pl.PureLoopError, ValueError, TypeError, RuntimeError) as error:
            recorder.notes.append(f"{type(error).__name__}: {error}" if plan.get("debug") else type(error).__name__)
    return recorder


def _consume(plan: Plan, recorder: Recorder) -> None:
    """Reads the stream as the consumer of the plan does."""
    consumer, at = plan["consumer"], plan["at"]
    entry = {"fit": _fit, "drive": _drive, "drive_plain": _drive_plain, "evaluate": _evaluate, "predict": _predict}
    stream: Pairs = entry[plan["entry"]](plan, None)
    kept: list[tuple[int, Any]] = []
    resumed = False
    boundary = 0
    for position in itertools.count():
        pair = next(stream, None)
        if pair is None:
            break
        if position > LONGEST:
            raise RuntimeError("the stream does not end")
        event, state = pair
        del pair
        if consumer == "glances" and event not in GLANCED:
            recorder.name(event)
            continue
        if consumer == "last":
            recorder.name(event)
            if event in (Event.FIT_END, Event.PREDICT_END, Event.EVAL_STANDALONE_END, Event.EPOCH_END):
                recorder.read(event, state)
            continue
        number = recorder.read(event, state)
        if consumer == "keeps" or (consumer == "keeps_some" and position % (at + 1) == 0):
            kept.append((number, state))
        elif consumer == "keeps_params" and event is Event.BATCH_END:
            kept.append((number, state.params))
        elif consumer == "resumes" and event in BOUNDARIES and not resumed:
            boundary += 1
            if boundary == at:
                resumed = True
                recorder.notes.append(f"resumed at {event.name}")
                _close(stream)
                stream = entry[plan["entry"]](plan, state)
        elif consumer == "leaves" and position >= 6 * at:
            recorder.notes.append("left")
            _close(stream)
            break
        del state
    for number, value in kept:
        if isinstance(value, State):
            recorder.read_again(number, value)
        else:
            recorder.notes.append(_sum_of(value))


def _close(stream: Any) -> None:
    stream.close()


def _sum_of(params: Any) -> str:
    """The exact sum of parameters that were kept."""
    return f"params {math.fsum(float(each.detach().double().sum()) for each in params.values()).hex()}"


def _data(plan: Plan) -> Any:
    made = batches(plan["model"], plan["sizes"], plan["seed"], nan=plan["nan"], ignored=plan["ignored"])
    source = plan["source"]
    if source.startswith("loader"):
        inputs, targets = (torch.cat(each) for each in zip(*made, strict=True))
        dataset = torch.utils.data.TensorDataset(inputs, targets)
        size = max(plan["sizes"])
        rest = len(dataset) % size
        # A last batch of one sample has no variance.
        drop = rest == 1 and BATCHES_OF[plan["model"]] in ("vectors", "images")
        loader: Any = torch.utils.data.DataLoader
        return loader(dataset, batch_size=size, shuffle=source == "loader_shuffled", drop_last=drop)
    return {"list": list, "unsized": Unsized, "endless": _Endless}[source](made)


class _Endless:
    """The batches over and over."""

    def __init__(self, made: list[Any]) -> None:
        self.made = made

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self.made)


def _evaluators(plan: Plan) -> dict[str, pl.Evaluator]:
    return {
        each["label"]: pl.Evaluator(
            batches(plan["model"], each["sizes"], plan["seed"] + 1 + index),
            metrics=metrics_of(each["metrics"], plan["loss"], plan["model"]),
            interval=each["interval"],
            microbatch_size=each["microbatch_size"],
            gradients=each["gradients"],
        )
        for index, each in enumerate(plan["evaluators"])
    }


def _watch(plan: Plan) -> Any:
    return None if plan["watch"] is None else {Event[name] for name in plan["watch"]}


def _settings(plan: Plan) -> dict[str, Any]:
    """The arguments of ``fit``."""
    clip = plan["clip_grad"]
    callbacks = [callback_of(name) for name in plan["callbacks"] or ()]
    settings: dict[str, Any] = {
        "loss": loss_of(plan["loss"]),
        "optimizer": optimizer_of(plan["optimizer"], plan["rate"], plan["rate_unit"]),
        "max_duration": plan["duration"],
        "microbatch_size": plan["microbatch_size"],
        "precision": plan["precision"],
        "seed": plan["seed"],
        "evaluators": _evaluators(plan),
        "eval_interval": plan["eval_interval"],
        "train_metrics": metrics_of(plan["train_metrics"], plan["loss"], plan["model"]),
        "algorithms": [algorithm_of(name, plan["model"]) for name in plan["algorithms"]],
        "clip_grad": clip_function if clip == "function" else clip,
        "nonfinite": plan["nonfinite"],
        "batches_per_epoch": plan["batches_per_epoch"],
        "batches_per_step": plan["batches_per_step"],
        "iteration_length": plan["iteration_length"],
        "watch": _watch(plan),
        "donate": plan["donate"],
        "strict": plan["strict"],
        "deterministic": plan["deterministic"],
        "verify": plan["verify"],
        "order": plan["order"],
        "compile": plan["kind"] == "compiled",
        "steps_per_call": plan.get("steps_per_call", 1),
        "parallel": plan.get("parallel"),
    }
    if plan["model"] == "named" and _counts_tokens(plan):
        settings["loss"] = pl.Task(forward=lambda model, batch: model(batch), tokens=lambda batch: batch["ids"].numel())
    elif plan["loss"] not in ("task", "counted") and BATCHES_OF[plan["model"]] != "tokens" and _counts_tokens(plan):
        loss = settings["loss"]
        settings["loss"] = pl.Task(
            loss=None if loss is None else OnTargets(loss), tokens=lambda batch: 3 * len(batch[1])
        )
    if plan["duration"].endswith("s"):
        clock = _Clock()
        callbacks.append(clock.callback)
        settings["clock"] = clock
    return {**settings, "callbacks": callbacks}


def _counts_tokens(plan: Plan) -> bool:
    return plan["duration"].endswith("tok") or str(plan["iteration_length"]).endswith("tok")


def _start(plan: Plan, state: State | None) -> Any:
    return model_of(plan["model"], plan["seed"]) if state is None else state


def _fit(plan: Plan, state: State | None) -> Pairs:
    return pl.fit(_start(plan, state), _data(plan), **_settings(plan))


def _evaluate(plan: Plan, state: State | None) -> Pairs:
    evaluators: Any = _evaluators(plan) or {"val": batches(plan["model"], plan["sizes"], plan["seed"])}
    algorithms = [algorithm_of(name, plan["model"]) for name in plan["algorithms"]]
    return pl.evaluate(
        _start(plan, state),
        evaluators,
        loss=loss_of(plan["loss"]),
        seed=plan["seed"],
        precision=plan["precision"],
        algorithms=algorithms,
        strict=plan["strict"],
    )


def _predict(plan: Plan, state: State | None) -> Pairs:
    return pl.predict(
        _start(plan, state),
        batches(plan["model"], plan["sizes"], plan["seed"]),
        seed=plan["seed"],
        precision=plan["precision"],
        strict=plan["strict"],
        task=pl.Task(forward=lambda model, batch: model(batch)) if plan["model"] == "named" else None,
    )


def _shared(plan: Plan) -> dict[str, Any]:
    """The arguments that a script shares with ``fit``."""
    settings = _settings(plan)
    names = ("algorithms", "callbacks", "watch", "strict", "deterministic")
    given = {name: settings[name] for name in names}
    # What monitors evaluations has none here.
    monitors = ("early_stopping", "reduce_on_plateau", "threshold_stopping", "swa", "layer_freezing")
    of_fit = (*monitors, "selective_backprop", "progressive_resizing", "sequence_length_warmup", "sam", "sam_adaptive")
    given["algorithms"] = [algorithm_of(name, plan["model"]) for name in plan["algorithms"] if name not in of_fit]
    return given


def _first(plan: Plan, state: State | None, optimizer: pl.Optimizer) -> State:
    if state is not None:
        return state
    made = State.create(model_of(plan["model"], plan["seed"]), seed=plan["seed"])
    return made.replace(opt_state=optimizer.init(made.params))


def _drive(plan: Plan, state: State | None) -> Pairs:
    """A script that is strung together of the loop's own stages."""
    optimizer = optimizer_of(plan["optimizer"], plan["rate"], "ba")
    loss = loss_of("own" if plan["loss"] == "own" else plan["loss"])
    task = loss if isinstance(loss, pl.Task) else pl.Task(loss=None if loss is None else _on_targets(loss))
    if plan["loss"] == "own":
        task = pl.Task(forward=lambda model, batch: model(batch))
    clip = plan["clip_grad"]
    stages = pl.Stages(
        task=task,
        optimizer=optimizer,
        microbatch_size=plan["microbatch_size"] if isinstance(plan["microbatch_size"], int) else None,
        clip_grad=clip_function if clip == "function" else clip,
    )
    data = batches(plan["model"], plan["sizes"], plan["seed"]) * 2

    def script(state: State) -> Generator[tuple[Event, State], State, State]:
        for batch in data[state.timestamp.batch :]:
            state = state.replace(batch=batch, grads=None)
            state = yield Event.BATCH_START, state
            pieces = stages.microbatches(state.batch)
            for index, piece in enumerate(pieces):
                state = state.replace(microbatch=piece)
                state = yield Event.AFTER_FORWARD, stages.forward(state, index=index, last=index + 1 == len(pieces))
                state = yield Event.AFTER_LOSS, stages.loss(state, index=index)
                state = yield Event.AFTER_BACKWARD, stages.backward(state, weight=task.samples(piece))
            state = stages.finish_gradients(state, divisor=float(task.samples(batch)))
            before, now = state.timestamp, state.timestamp.next_batch(samples=task.samples(batch))
            state = yield Event.BATCH_END, stages.update(state, timestamp=now, previous_timestamp=before)
        return state

    return pl.drive(script(_first(plan, state, optimizer)), stages=stages, **_shared(plan))


def _on_targets(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda outputs, batch: loss(outputs, batch[1])


def _drive_plain(plan: Plan, state: State | None) -> Pairs:
    """A script that differentiates by itself."""
    optimizer = optimizer_of(plan["optimizer"], plan["rate"], "ba")
    made = batches(plan["model"], plan["sizes"], plan["seed"])
    loss = loss_of("parts" if plan["loss"] in ("task", "counted", "own") else plan["loss"])

    def of(module: Any, batch: Any) -> Any:
        if plan["loss"] == "own":
            return module.loss(module(batch), batch)
        value = loss(module(batch[0]), batch[1])
        return value["total"] if isinstance(value, dict) else value

    def script(state: State) -> Generator[tuple[Event, State], State, State]:
        state = yield Event.FIT_START, state
        while state.timestamp.epoch < 2:
            for batch in made[state.timestamp.batch_in_epoch :]:
                state = yield Event.BATCH_START, state.replace(batch=batch)

                def measured(params: Any, state: State = state, batch: Any = batch) -> Any:
                    with pl.random.seeded(state.seed + state.timestamp.batch):
                        return state.model.apply(lambda module: of(module, batch), params, state.buffers, training=True)

                value, grads, buffers = _value_and_grad(measured, state)
                params, opt_state = optimizer.update(grads, state.opt_state, state.params, state.timestamp)
                state = state.replace(params=params, opt_state=opt_state, buffers=buffers, loss=value, grads=grads)
                samples = len(batch["ids"] if isinstance(batch, dict) else batch[0])
                state = yield Event.BATCH_END, state.count_batch(samples)
            before = state.timestamp
            state = state.replace(timestamp=before.next_epoch(), previous_timestamp=before)
            state = yield Event.EPOCH_END, state
        return (yield Event.FIT_END, state)

    return pl.drive(script(_first(plan, state, optimizer)), **_shared(plan))


def _value_and_grad(measured: Callable[[Any], Any], state: State) -> Any:
    """The value, the gradients and the buffers after it."""
    held: list[Any] = []

    def value_of(params: Any) -> Any:
        value, buffers = measured(params)
        held.append(buffers)
        return value

    value, grads = pl.stages.value_and_grad(value_of, state.params)
    return value.detach(), grads, held[-1]
