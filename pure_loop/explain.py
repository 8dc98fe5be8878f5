"""Explain: what a call of ``fit`` would do, written out; nothing is trained and no data is loaded.

The loop comes from the specification (:func:`pure_loop.order.outline`), and what runs at each event from the
same functions that bind it in ``fit``, so that the explanation can't drift from the run.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from pure_loop import _words
from pure_loop._calls import refuse_misfit
from pure_loop.algorithm import bind, reversed_at
from pure_loop.callback import Observer, observers
from pure_loop.event import Event
from pure_loop.fit import Prepared, fit, prepare
from pure_loop.state import State

if TYPE_CHECKING:
    from pure_loop.checkpoint.files import Checkpoint

__all__ = ["explain"]

_WIDTH = 100
_MARGIN = 17
_COLUMN = 34

Line: TypeAlias = tuple[int, str | Event, str]
Table: TypeAlias = Mapping[Event, Sequence[Observer]]


def explain(*args: Any, file: TextIO | None = None, **kwargs: Any) -> None:
    """Print what ``fit`` with these arguments would do: its settings, and what runs at each event, in order.

    Args:
        *args, **kwargs: those of :func:`pure_loop.fit`. Iterators are not drawn from.
        file: where to; None: standard output.

    Raises:
        ArgumentTypeError: an argument that ``fit`` doesn't have, or that it lacks.
        ArgumentError, ArgumentTypeError, ModelError, DataError, ResumeError: as the call of ``fit`` would.

    >>> import torch, pure_loop as pl
    >>> @pl.algorithm(pl.Event.AFTER_LOSS, when="10ba")
    ... def penalty(state):
    ...     return state.replace(loss=state.loss + 0.1)
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> explain(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
    ...         max_duration="2ep", algorithms=[penalty])
    pl.fit, explained; nothing was run
    <BLANKLINE>
      model          Linear, 3 parameters in 2 tensors, on cpu
      ...
          for each microbatch ...
            BEFORE_FORWARD                -
            AFTER_FORWARD                 -
            BEFORE_LOSS                   -
            AFTER_LOSS                    algorithm  penalty  (every 10 batches)
      ...
    """
    refuse_misfit(fit, args, kwargs)
    bound = inspect.signature(fit).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    prepared = prepare(**given)
    print("pl.fit, explained; nothing was run", file=file)
    for part in (_head(prepared, given), _loop(prepared), _legend(prepared)):
        print("", *(line.rstrip() for line in part), sep="\n", file=file)


def _head(prepared: Prepared, given: dict[str, Any]) -> Iterator[str]:
    for name, text in _settings(prepared, given):
        if text:
            yield textwrap.fill(
                text,
                _WIDTH,
                initial_indent=f"  {name:<{_MARGIN - 2}}",
                subsequent_indent=" " * _MARGIN,
                break_on_hyphens=False,
                break_long_words=False,  # of paths
            )


def _settings(prepared: Prepared, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    state, stages = prepared.state, prepared.fit.stages
    yield "model", _model(state)
    if prepared.checkpoint is not None:
        yield "starts from", _checkpoint(prepared.checkpoint)
    elif given["autoresume"] is not None and state.event is None and state.position is None:
        yield "starts from", f"nothing: {given['autoresume']} holds no checkpoint yet"
    elif isinstance(given["model_or_state"], State):
        where = f"{state.position.name}, " if state.position is not None else ""
        t = state.timestamp
        yield "starts from", f"a State kept at {where}epoch {t.epoch}, batch {t.batch}"
    yield "data", _data(given["train_dataloader"], prepared.fit.source.length)
    end = state.timestamp.max_duration
    assert end is not None
    if stages.engine.ranks > 1:
        yield (
            "ranks",
            f"{stages.engine.ranks}, of which this is number {stages.engine.rank}; each has its part of a batch",
        )
    yield "duration", _words.duration(end)
    if prepared.fit.iteration_length is not None:
        yield "iterations", f"of {_words.duration(prepared.fit.iteration_length)}"
    yield "optimizer", repr(stages.optimizer)
    yield "precision", stages.precision.name
    size = stages.microbatch_size
    yield "microbatches", "the whole batch at once" if size is None else f"of at most {size:,} samples"
    clip = stages.clip_grad
    if clip is not None:
        yield "gradients", f"clipped by {_name(clip)}" if callable(clip) else f"clipped to a norm of {clip:g}"
    yield "not finite", "an error that names the batch" if stages.nonfinite == "error" else "the step is skipped"
    yield "seed", str(state.seed)
    evaluators = [
        f"{each.label}: {_words.how_often(each.interval)}"
        + ("" if each.source.length is None else f", {_count(each.source.length, 'batch', 'batches')}")
        + ("" if each.microbatch_size is None else f" in microbatches of {each.microbatch_size:,}")
        + ("" if each.metrics is None else f", measuring {', '.join(metric.name for metric in each.metrics)}")
        for each in prepared.fit.evaluators
    ]
    yield "evaluators", "; ".join(evaluators) or "none"
    names = [each.name + ("" if each.init is None else " (with memory)") for each in prepared.algorithms]
    yield "algorithms", ", ".join(names) or "none"
    if prepared.watch is not None:
        yield "yields only", ", ".join(event.name for event in Event if event in prepared.watch) or "nothing"
    everywhere = _everywhere(prepared)
    if everywhere:
        yield "at every event", ", ".join(everywhere)
    if prepared.fit.compiled is not None:
        yield "compiled", _compiled(prepared.fit.compiled, given["compile"])
    if given["donate"] != "auto":
        yield "donate", "a step takes the memory of kept States, too" if given["donate"] else "each step copies"
    if prepared.strict:
        yield "strict", "order, purity and returns are checked at every event"
    if prepared.fit.order != "current":
        yield "order", f"that of {prepared.fit.order}"


def _compiled(compiler: Any, compile: Any) -> str:
    seen = [event.name for event in Event if event in compiler.attended]
    looked_at = "at all events" if len(seen) == len(Event) else f"at {', '.join(seen)}" if seen else "nowhere"
    how = "" if compile is True else "where possible, "
    together = f"; {compiler.steps} steps a call" if compiler.steps > 1 else ""
    return f"{how}into graphs that end where somebody looks: {looked_at}{together}"


def _checkpoint(checkpoint: Checkpoint) -> str:
    document = checkpoint.document
    if document is None:
        return f"the weights in {checkpoint.path}"
    where = f"{document.event.name}, " if document.event is not None else ""
    return f"{checkpoint.path}, saved at {where}batch {document.batch}"


def _model(state: State) -> str:
    numbers = sum(tensor.numel() for tensor in state.params.values())
    frozen = sum(tensor.numel() for name, tensor in state.params.items() if name not in state.model.trainable)
    kind = type(state.model._skeleton).__name__
    text = f"{kind}, {_count(numbers, 'parameter', 'parameters')} in {_count(len(state.params), 'tensor', 'tensors')}"
    return f"{text}{f' ({frozen:,} of them frozen)' if frozen else ''}, on {state.device}"


def _data(loader: Any, length: int | None) -> str:
    epochs = "epochs of unknown length" if length is None else f"{_count(length, 'batch', 'batches')} an epoch"
    return f"{type(loader).__name__}, {epochs}"


def _count(value: int, one: str, many: str) -> str:
    return f"{value:,} {one if value == 1 else many}"


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


# What is bound where.


def _observed(prepared: Prepared) -> tuple[Table, Table]:
    """Callbacks and loggers apart: at each event the loggers are the last ones."""
    logged = observers((), prepared.logger.loggers)[0]
    called = {event: found[: len(found) - len(logged.get(event, ()))] for event, found in prepared.observers.items()}
    return called, logged


def _everywhere(prepared: Prepared) -> list[str]:
    """The callbacks that see every event: said once, instead of at each."""
    return [
        f"{kind} {name}"
        for kind, table in zip(("callback", "logger"), _observed(prepared), strict=True)
        for name in _in_all(table)
    ]


def _in_all(table: Table) -> list[str]:
    names = [[observer.name for observer in table.get(event, ())] for event in Event]
    return [name for name in dict.fromkeys(names[0]) if all(name in some for some in names)]


def _bound(prepared: Prepared) -> dict[Event, list[str]]:
    """What runs at each event, in the order in which it runs."""
    table: dict[Event, list[str]] = {}
    for event, handlers in bind(prepared.algorithms).items():
        for handler in handlers:
            when = _words.how_often(handler.when)
            table.setdefault(event, []).append(f"algorithm  {handler.algorithm}{f'  ({when})' if when else ''}")
        if reversed_at(event) and len(handlers) > 1:
            table[event][0] += "  <- in reverse"
    for kind, observed in zip(("callback", "logger"), _observed(prepared), strict=True):
        everywhere = _in_all(observed)
        for event, found in observed.items():
            names = [observer.name for observer in found if observer.name not in everywhere]
            table.setdefault(event, []).extend(f"{kind:<9}  {name}" for name in names)
    return table


# The loop.


def _loop(prepared: Prepared) -> Iterator[str]:
    bound = _bound(prepared)
    from pure_loop import order

    for depth, what, note in _relevant(_fit_only(order.outline(prepared.fit.order)), prepared):
        indent = "  " * depth
        if isinstance(what, Event):
            first, *rest = bound.get(what) or ["-"]
            yield f"{indent + what.name:<{_COLUMN}}{first}"
            yield from (f"{'':<{_COLUMN}}{text}" for text in rest)
        else:
            heading = f"{indent}{what}{f' ({note})' if note else ''}"
            yield from textwrap.wrap(heading, _WIDTH, subsequent_indent=f"{indent}    ")


def _fit_only(outline: list[Line]) -> list[Line]:
    ends = [index for index, (depth, _, _) in enumerate(outline) if depth == 0 and index > 0]
    return outline[: ends[0]] if ends else outline


def _relevant(outline: list[Line], prepared: Prepared) -> Iterator[Line]:
    """The outline without what this call can't come to: evaluations, iterations, the start of a fresh run."""
    left_out: set[Event] = set()
    if prepared.fit.iteration_length is None:
        left_out |= {event for event in Event if event.name.startswith("ITERATION")}
    if not prepared.fit.evaluators:
        left_out |= {event for event in Event if event.is_eval}
    if not prepared.fit.fresh:
        left_out |= {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD}
    groups: dict[str, set[Event]] = {}
    for index, (depth, what, _) in enumerate(outline):
        if not isinstance(what, Event):
            groups.setdefault(what, set()).update(_inside(outline[index + 1 :], depth))
    for depth, what, note in outline:
        inside = {what} if isinstance(what, Event) else groups[what]
        if not inside or inside - left_out:
            yield depth, what, note


def _inside(rest: list[Line], depth: int) -> Iterator[Event]:
    for deeper, what, _ in rest:
        if deeper <= depth:
            return
        if isinstance(what, Event):
            yield what


def _legend(prepared: Prepared) -> Iterator[str]:
    yield "-: nothing is bound there. At one event: algorithms in this order, then callbacks, then loggers."
    if any(reversed_at(event) and len(found) > 1 for event, found in bind(prepared.algorithms).items()):
        yield "<- in reverse: after a computation the algorithms run in reverse, so what opened last closes first."
    if not prepared.fit.evaluators:
        yield "Evaluation events don't come: no evaluators are given."
    if prepared.fit.iteration_length is None and prepared.fit.order == "current":
        yield "Iteration events don't come: no iteration_length is given."
    if not prepared.fit.fresh:
        yield "Training goes on from a State: INIT and the load events don't come."
