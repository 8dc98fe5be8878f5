"""Explain: what a call of ``fit`` would do, written out; nothing is trained and no data is loaded.

The loop comes from the specification (:func:`pure_loop.order.outline`), and what runs at each event from the
same functions that bind it in ``fit``, so that the explanation can't drift from the run.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias, Unpack

from torch import nn

from pure_loop._internal.arguments import check_flag, check_integer
from pure_loop._internal.frames import consumer_doubt
from pure_loop._internal.pytree import Batch
from pure_loop._internal.reprs import count, paragraph
from pure_loop._internal.suggestions import arguments_of_call, passing_on, teaching
from pure_loop.algorithm import bind, reversed_at
from pure_loop.cadence import Cadence
from pure_loop.entry.assembly import assemble
from pure_loop.entry.compiling import recurrent_layer
from pure_loop.entry.fit import FitOptions, fit
from pure_loop.entry.plan import Plan
from pure_loop.entry.settings import Settings
from pure_loop.event import Event
from pure_loop.hooks import Observer
from pure_loop.members.ensemble import Ensemble
from pure_loop.observer import observers
from pure_loop.progress import words as _words
from pure_loop.stages.references import counting_doubt
from pure_loop.stages.settings import found_size
from pure_loop.state import State, model_in_words

if TYPE_CHECKING:
    from pure_loop.checkpoint.checkpoint import Checkpoint
    from pure_loop.stages.engine import Engine

_WIDTH = 100
_MARGIN = 17
_COLUMN = 34

Line: TypeAlias = tuple[int, str | Event, str]
Table: TypeAlias = Mapping[Event, Sequence[Observer]]


@teaching
@passing_on(fit)
def explain(
    model_or_state: nn.Module | State | Ensemble,
    train_dataloader: Iterable[Any],
    *,
    file: TextIO | None = None,
    sample: Any = None,
    depth: int = 2,
    full: bool = False,
    **settings: Unpack[FitOptions],
) -> None:
    """Print what ``fit`` with these arguments would do: its settings and layers, and what runs at each event, in order.

    Args:
        model_or_state, train_dataloader: as in :func:`pure_loop.fit`. Iterators are not drawn from.
        file: where to; None: standard output.
        sample: a batch, for the shapes of outputs and the floating-point operations of each layer: a copy of the model
            without numbers runs a forward on the meta device. None: the first batch where the data is a list or tuple
            of batches; otherwise parameters alone are listed.
        depth: how deep modules inside modules are listed; 0: no table of layers.
        full: list the events, too, to which nothing is bound.
        **settings: the other arguments of :func:`pure_loop.fit`.

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
      model          Linear, 3 parameters in 2 tensors, on cpu, float32
      ...
    <BLANKLINE>
      layer  class   output  parameters  frozen  FLOPs
      model  Linear  4x1              3       -     16
    <BLANKLINE>
    fit ...
      for each epoch ...
        for each batch ...
          for each microbatch ...
            AFTER_LOSS                algorithm  penalty  (every 10 batches)
    <BLANKLINE>
    Nothing is bound to the other 20 events of this run; full=True lists them, too.
    ...
    """
    full = check_flag("full", full, where="explain")
    arguments = arguments_of_call(fit, (model_or_state, train_dataloader), settings)
    check_integer("depth", depth, where="explain", least=0)
    plan = assemble(Settings.of(arguments)).plan
    print("pl.fit, explained; nothing was run", file=file)
    layers = _layers(plan, sample, depth) if depth else ()
    for part in map(list, (_head(plan), layers, _loop(plan, full), _legend(plan, full))):
        if part:
            print("", *(line.rstrip() for line in part), sep="\n", file=file)


def _head(plan: Plan) -> Iterator[str]:
    return (paragraph(name, text, _MARGIN) for name, text in _settings(plan) if text)


def _settings(plan: Plan) -> Iterator[tuple[str, str]]:
    settings, state, stages = plan.settings, plan.state, plan.stages
    yield "model", model_in_words(state)
    if plan.checkpoint is not None:
        yield "starts from", _checkpoint(plan.checkpoint)
    elif settings.autoresume is not None and state.event is None and state.position is None:
        yield "starts from", f"nothing: {settings.autoresume} holds no checkpoint yet"
    elif isinstance(settings.model_or_state, State):
        where = f"{state.position.name}, " if state.position is not None else ""
        yield "starts from", f"a State kept at {where}{state.timestamp}"
    if state.ensemble is not None:
        members = state.ensemble
        seeds = ", ".join(map(str, members.seeds[:8])) + (", ..." if len(members) > 8 else "")
        order = "each sees the batches in its own order" if state.data_seed is None else "all see the same batches"
        after = "; computed one after the other" if members.fallback == "loop" else ""
        yield "members", f"{len(members)}, of the seeds {seeds}; {order}{after}"
    yield "data", _data(settings.train_dataloader, plan.source.length, settings.batches_per_step)
    end = state.timestamp.max_duration
    assert end is not None
    if stages.engine.world_size > 1:
        yield (
            "ranks",
            f"{stages.engine.world_size}, of which this is number {stages.engine.global_rank}; "
            + _shared(stages.engine),
        )
    yield "duration", _words.duration(end)
    if settings.iteration_length is not None:
        yield "iterations", f"of {_words.duration(settings.iteration_length)}"
    yield "optimizer", repr(stages.optimizer)
    yield "precision", stages.precision.name
    size = found_size(state) if stages.found is not None else stages.microbatch_size
    halved = "" if stages.found is None else ", halved where a batch runs out of memory"
    default = "the whole batch at once" if settings.batches_per_step == 1 else "each batch of the dataloader at once"
    yield "microbatches", (default if size is None else f"of at most {size:,} samples") + halved
    clip = stages.clip_grad
    if clip is not None:
        yield "gradients", f"clipped by {_name(clip)}" if callable(clip) else f"clipped to a norm of {clip:g}"
    yield "not finite", "an error that names the batch" if stages.nonfinite == "error" else "the step is skipped"
    yield "seed", str(state.seed)
    evaluators = [
        f"{evaluator.label}: {_words.how_often(evaluator.interval)}"
        + ("" if evaluator.source.length is None else f", {count(evaluator.source.length, 'batch', 'batches')}")
        + ("" if evaluator.microbatch_size is None else f" in microbatches of {evaluator.microbatch_size:,}")
        + ("" if evaluator.metrics is None else f", measuring {', '.join(metric.name for metric in evaluator.metrics)}")
        for evaluator in plan.evaluators
    ]
    yield "evaluators", "; ".join(evaluators) or "none"
    names = [algorithm.name + ("" if algorithm.init is None else " (with state)") for algorithm in settings.algorithms]
    yield "algorithms", ", ".join(names) or "none"
    if settings.watch is not None:
        yield "yields only", ", ".join(event.name for event in Event if event in settings.watch) or "nothing"
    everywhere = _everywhere(plan)
    if everywhere:
        yield "at every event", ", ".join(everywhere)
    if plan.strategy.graphs is not None:
        yield "compiled", _compiled(plan, settings.compile) if state.ensemble is None else _mapped(settings.compile)
    yield "donate", _donate(plan)
    if settings.strict:
        yield "strict", "order, purity and returns are checked at every event"
    elif settings.strict is False:
        yield "strict", "no State is compared with what it was: strict=False"
    if settings.verify is not None:
        yield "verify", f"{_words.how_often(Cadence(settings.verify))} one is computed twice, and compared bit by bit"
    if settings.order != "current":
        yield "order", f"that of {settings.order}"


def _shared(engine: Engine) -> str:
    if engine.ranks == engine.world_size:
        return "each has its part of a batch"
    cut = engine.world_size // engine.ranks
    return f"{cut} hold one model together, and have one of {engine.ranks} parts of a batch"


def _donate(plan: Plan) -> str:
    """Whether a step writes in place, and why."""
    settings, doubt = plan.settings, counting_doubt()
    uncounted = f"references are not counted here, because {doubt}"
    ownership = plan.stages.workspace.ownership
    if ownership is None:
        if settings.donate is False:
            return "each step copies: donate=False"
        if settings.strict:
            return "each step copies: strict=True compares States with what they were"
        if settings.optimizer.overwrite is None and settings.compile is False:
            return "each step copies: the optimizer makes new tensors"
        return f"each step copies: {uncounted}" if doubt else "each step copies"
    if settings.donate is True and ownership.compiled:
        if doubt:
            return f"a compiled step copies wherever the State before it was observed: {uncounted}"
        return "a compiled step writes in place where references show that nothing of the State before it is kept"
    if settings.donate is True:
        text = "a step takes the memory of kept States, too"
        return f"{text}, and of tensors kept by themselves: {uncounted}" if doubt else text
    written = "a step writes in place where references show that nothing of the State before it is kept"
    if not consumer_doubt():
        return written
    return f"{written}; a State in a loop variable counts as kept, because {consumer_doubt()}"


def _compiled(plan: Plan, compile: object) -> str:
    compiler = plan.strategy.graphs
    assert compiler is not None
    names = [event.name for event in Event if event in compiler.observed]
    where = "at all events" if len(names) == len(Event) else f"at {', '.join(names)}" if names else "nowhere"
    how = "" if compile is True else "where possible, "
    together = f"; {compiler.steps} steps a call" if compiler.steps > 1 else ""
    layer = recurrent_layer(plan.state.model.skeleton)
    eager = "" if layer is None else f"; forward and backward run eagerly: {layer} is a recurrent layer"
    return f"{how}into graphs that end at observed events: {where}{together}{eager}"


def _mapped(compile: object) -> str:
    how = "compiled" if compile else "whose operations run one after the other"
    return f"one graph a batch, traced for one member and mapped over all, {how}"


def _checkpoint(checkpoint: Checkpoint) -> str:
    document = checkpoint.document
    if document is None:
        return f"the weights in {checkpoint.path}"
    where = f"{document.event.name}, " if document.event is not None else ""
    return f"{checkpoint.path}, saved at {where}batch {document.batch}"


def _data(loader: object, length: int | None, per_step: int) -> str:
    epochs = "epochs of unknown length" if length is None else f"{count(length, 'batch', 'batches')} an epoch"
    sizes = "" if per_step == 1 else f", each of {per_step:,} of the dataloader"
    return f"{type(loader).__name__}, {epochs}{sizes}"


def _name(value: object) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def _layers(plan: Plan, sample: Batch, depth: int) -> Iterator[str]:
    from pure_loop.entry.layers import layer_table

    loader = plan.settings.train_dataloader
    if sample is None and (type(loader) is list or type(loader) is tuple) and loader:
        sample = loader[0]
    table = layer_table(plan.state, plan.stages.task, sample, depth)
    return (f"  {line}" for line in repr(table).splitlines())


# What is bound where.


def _observed(plan: Plan) -> tuple[Table, Table]:
    """Callbacks and loggers apart: at each event the loggers are the last ones."""
    logged = observers((), plan.logger.loggers)[0]
    called = {event: result[: len(result) - len(logged.get(event, ()))] for event, result in plan.observers.items()}
    return called, logged


def _everywhere(plan: Plan) -> list[str]:
    """The callbacks that see every event: said once, instead of at each."""
    return [
        f"{kind} {name}"
        for kind, table in zip(("callback", "logger"), _observed(plan), strict=True)
        for name in _in_all(table)
    ]


def _in_all(table: Table) -> list[str]:
    names = [[observer.name for observer in table.get(event, ())] for event in Event]
    return [name for name in dict.fromkeys(names[0]) if all(name in some for some in names)]


def _bound(plan: Plan) -> dict[Event, list[str]]:
    """What runs at each event, in the order in which it runs."""
    table: dict[Event, list[str]] = {}
    for event, handlers in bind(plan.settings.algorithms).items():
        for handler in handlers:
            when = _words.how_often(handler.when)
            table.setdefault(event, []).append(f"algorithm  {handler.algorithm}{f'  ({when})' if when else ''}")
        if reversed_at(event) and len(handlers) > 1:
            table[event][0] += "  <- in reverse"
    for kind, observed in zip(("callback", "logger"), _observed(plan), strict=True):
        everywhere = _in_all(observed)
        for event, result in observed.items():
            names = [observer.name for observer in result if observer.name not in everywhere]
            table.setdefault(event, []).extend(f"{kind:<9}  {name}" for name in names)
    return {event: lines for event, lines in table.items() if lines}


# The loop.


def _loop(plan: Plan, full: bool) -> Iterator[str]:
    bound = _bound(plan)
    for depth, what, note in _outline(plan, set(Event) if full else set(bound)):
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


def _outline(plan: Plan, wanted: set[Event]) -> list[Line]:
    """The loop, as far as it has these events, without what this call can't come to.

    That are evaluations without evaluators, iterations without a length, and the start of a fresh run.
    """
    from pure_loop import order

    outline, left_out = _fit_only(order.outline(plan.settings.order)), set(Event) - wanted
    if plan.settings.iteration_length is None:
        left_out |= {event for event in Event if event.name.startswith("ITERATION")}
    if not plan.evaluators:
        left_out |= {event for event in Event if event.is_eval}
    if not plan.fresh:
        left_out |= {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD}
    groups: dict[str, set[Event]] = {}
    for index, (depth, what, _) in enumerate(outline):
        if not isinstance(what, Event):
            groups.setdefault(what, set()).update(_inside(outline[index + 1 :], depth))

    def is_wanted(what: str | Event) -> bool:
        inside = {what} if isinstance(what, Event) else groups[what]
        return bool(inside - left_out) or (not inside and wanted >= set(Event))

    return [line for line in outline if is_wanted(line[1])]


def _inside(rest: list[Line], depth: int) -> Iterator[Event]:
    for deeper, what, _ in rest:
        if deeper <= depth:
            return
        if isinstance(what, Event):
            yield what


def _legend(plan: Plan, full: bool) -> Iterator[str]:
    events, bound = ({what for _, what, _ in _outline(plan, set(among))} for among in (Event, _bound(plan)))
    others = sum(isinstance(what, Event) for what in events - bound)
    if full:
        yield "-: nothing is bound there."
    elif others:
        which = f"{'other ' if bound else ''}{others} event{'' if others == 1 else 's'} of this run"
        yield f"Nothing is bound to the {which}; full=True lists them, too."
    if bound:
        yield "At one event: algorithms in this order, then callbacks, then loggers."
    if any(reversed_at(event) and len(result) > 1 for event, result in bind(plan.settings.algorithms).items()):
        yield "<- in reverse: after a computation the algorithms run in reverse, so what opened last closes first."
    if not plan.evaluators:
        yield "Evaluation events don't come: no evaluators are given."
    if plan.settings.iteration_length is None and plan.settings.order == "current":
        yield "Iteration events don't come: no iteration_length is given."
    if not plan.fresh:
        yield "Training resumes from a State: INIT and the load events don't come."
