"""Programs: a run of ``pl.fit``, how its stream is read, what is kept of it by whom, and when it is let go."""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.ownership.judge import Judge, Violation
from tests.ownership.ways import HOLDERS, KINDS, OF_OTHERS, STATES, WAYS, WEAK, of_tree
from tests.support import problem

__all__ = ["CONSUMERS", "DATA", "IN_PLACE", "SURROUNDINGS", "Keep", "Program", "judge", "moves", "programs", "twin_of"]

DATA = problem.points(size=(6, 6, 4, 6), seed=3)
Body = Callable[[Event, pl.State], None]
_END, _STEP = Event.BATCH_END, Event.AFTER_TRAIN_BATCH

# What a forward and a loss tell about themselves; of one program at a time.
_LOOKING: list[Callable[[str, Any], None]] = []


def _tell(who: str, given: Any) -> None:
    for look in _LOOKING:
        look(who, given)


class Telling(nn.Module):
    """A model whose forward shows itself and its activations to whom they concern."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.eye(5))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        self.seen = self.seen + len(x)
        hidden = torch.tanh(self.first(x) @ self.weight)
        _tell("forward", (self, hidden))
        return self.last(hidden)


class AliasingOutputs(nn.Module):
    """Its outputs are a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), 3)


class AliasingBuffers(nn.Module):
    """Its third forward makes a view of a parameter the buffer that the forwards before it have assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x) + 0.1 * self.last
        self.calls = self.calls + 1
        if self.calls < 3:
            self.last = self.last + 0
        elif self.calls == 3:
            self.last = self.layer.bias.detach()
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "plain": problem.mlp,
    "batchnorm and dropout": problem.noisy,
    "tied": problem.tied,
    "telling": Telling,
    "aliasing outputs": AliasingOutputs,
    "aliasing buffers": AliasingBuffers,
    "aliasing loss": AliasingOutputs,
}


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    _tell("loss", (outputs, targets))
    return functional.cross_entropy(outputs, targets)


def _first(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is a view of its outputs."""
    _tell("loss", (outputs, targets))
    return outputs[0, 0]


def _each(grads: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return {name: None if grad is None else change(grad) for name, grad in grads.items()}


def _clip(grads: Any, params: Any) -> Any:
    _tell("clip", (grads, params))
    return _each(grads, lambda grad: grad.clamp(-0.1, 0.1))


def _telling_adamw() -> pl.Optimizer:
    adamw: Any = pl.optim.adamw(lr=0.1)

    def telling(function: Any) -> Any:
        def update(grads: Any, opt_state: Any, params: Any, timestamp: pl.Timestamp, **skips: Any) -> Any:
            new = function(grads, opt_state, params, timestamp, **skips)
            _tell("update", (grads, new[1], new[0]))
            return new

        return update

    return attrs.evolve(adamw, update=telling(adamw.update), overwrite=telling(adamw.overwrite))


OPTIMIZERS: dict[str, Callable[[], pl.Optimizer]] = {
    "adamw": lambda: pl.optim.adamw(lr=0.1),
    "sgd": lambda: pl.optim.sgd(lr=0.1),
    "momentum": lambda: pl.optim.sgd(lr=0.1, momentum=0.9),
    "lion": lambda: pl.optim.lion(lr=0.01),
    "partition": lambda: pl.optim.partition(
        {"a": pl.optim.adamw(lr=0.1), "b": pl.optim.sgd(lr=0.1, momentum=0.9)},
        label=lambda name, tensor: "a" if tensor.ndim > 1 else "b",
    ),
    "RAdam": lambda: pl.optim.from_torch(torch.optim.RAdam, lr=0.1),
    "telling adamw": _telling_adamw,
}


def _reads(state: pl.State) -> pl.State:
    assert of_tree((state.params, state.opt_state))
    return state


def _with_gradients(change: Callable[[Tensor], Tensor]) -> Callable[[pl.State], pl.State]:
    return lambda state: state if state.grads is None else state.replace(grads=_each(state.grads, change))


def _clones(state: pl.State) -> pl.State:
    return state.replace(params={name: each.detach().clone() for name, each in state.params.items()})


def _begins(state: pl.State) -> pl.State:
    return state.replace(grads={name: torch.ones_like(state.params[name]) for name in state.model.trainable})


def _tries(state: pl.State, stages: pl.Stages) -> pl.State:
    """Gradients and a step of its own, which take nothing of the loop's."""
    if state.event is Event.AFTER_TRAIN_BATCH:
        new = stages.update(state)
        return state.remember("tries", sum((new.params[name] - each).norm() for name, each in state.params.items()))
    if state.event is Event.AFTER_BACKWARD:
        stages.finish_gradients(state, divisor=2.0)
    stages.backward(stages.loss(stages.forward(state)))
    return state


def _returns(field: str) -> Any:
    """Gives back the parameters, or the optimizer state, of an older State."""
    older: list[pl.State] = []

    def handler(state: pl.State) -> pl.State:
        if state.timestamp.batch == 2:
            older.append(state)
        if state.timestamp.batch != 4 or not older:
            return state
        return state.replace(**{field: getattr(older[0], field)})

    return _at(f"returns {field}", handler, _END)


def _at(name: str, handler: Any, *events: Event, **more: Any) -> Any:
    return pl.algorithm(*events, name=name, **more)(handler)


_HANDLERS: dict[str, Any] = {
    "clones": (_clones, Event.BATCH_START),
    "same tensors": (lambda state: state.replace(params=dict(state.params)), Event.BATCH_START, _END),
    "reads": (_reads, _STEP, _END),
    "doubles": (_with_gradients(lambda grad: 2 * grad), Event.AFTER_BACKWARD),
    "begins": (_begins, Event.BATCH_START),
}
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "ema": lambda: pl.algorithms.ema(half_life="3ba"),
    **{name: partial(_at, name, *given) for name, given in _HANDLERS.items()},
    "tries": partial(
        _at, "tries", _tries, Event.BEFORE_FORWARD, Event.AFTER_BACKWARD, _STEP, init=lambda state: torch.zeros(())
    ),
    "returns params": lambda: _returns("params"),
    "returns opt_state": lambda: _returns("opt_state"),
}

# Of a folder for what they write.
CALLBACKS: dict[str, Callable[[str], Any]] = {
    "GradMonitor": lambda folder: pl.callbacks.GradMonitor(),
    "CheckpointSaver": lambda folder: pl.callbacks.CheckpointSaver(folder, interval="2ba"),
}


# How a stream is read. A consumer passes each pair to the body, and yields where the next pair is asked for. ----------

Consumer = Callable[[Any, Body], Iterator[None]]


def _through(around: Callable[[Any], Any]) -> Consumer:
    """A loop over what gives on the pairs of a stream."""

    def consume(stream: Any, body: Body) -> Iterator[None]:
        for event, state in around(stream):
            body(event, state)
            yield

    return consume


def _delegating(stream: Any) -> Iterator[Any]:
    yield from stream


def _renaming(stream: Any) -> Iterator[Any]:
    for event, state in stream:
        seen = event
        yield seen, state


def _deque(stream: Any) -> Iterator[Any]:
    last: collections.deque[Any] = collections.deque(maxlen=3)
    for pair in stream:
        last.append(pair)
        yield last[0]
    yield from list(last)[1:]


def _pairs(stream: Any, body: Body) -> Iterator[None]:
    for pair in stream:
        body(*pair)
        yield


def _next(stream: Any, body: Body) -> Iterator[None]:
    with contextlib.suppress(StopIteration):
        while True:
            event, state = next(stream)
            body(event, state)
            yield


def _three_names(stream: Any, body: Body) -> Iterator[None]:
    """One after the other, and then two at a time."""
    with contextlib.suppress(StopIteration):
        while True:
            event, one = next(stream)
            body(event, one)
            yield
            event, two = next(stream)
            body(event, two)
            yield
            (event, one), (other, three) = next(stream), next(stream)
            body(event, one)
            body(other, three)
            yield


def _closed_over(stream: Any, body: Body) -> Iterator[None]:
    def look() -> None:
        body(event, state)

    for event, state in stream:  # noqa: B007
        look()
        yield


def _globals(stream: Any, body: Body) -> Iterator[None]:
    loop = "    for event, state in stream:\n        body(event, state)\n"
    exec(f"def consume():\n    global event, state\n{loop}consume()", {"stream": stream, "body": body})
    yield


def _a_module(stream: Any, body: Body) -> Iterator[None]:
    exec("for event, state in stream:\n    body(event, state)", {"stream": stream, "body": body})
    yield


def _an_attribute(stream: Any, body: Body) -> Iterator[None]:
    holder: Any = nn.Module()
    for event, holder.state in stream:
        body(event, holder.state)
        yield


def _swapped(stream: Any, body: Body) -> Iterator[None]:
    """The loop's variable is another State in between."""
    other = None
    for event, state in stream:
        body(event, state)
        state, other = other, state
        yield


# Those after which a step may write in place, if nothing else is kept.
IN_PLACE: dict[str, Consumer] = {
    "for event, state": _through(lambda stream: stream),
    "event, state = next": _next,
    "yield from": _through(lambda stream: _delegating(_delegating(stream))),
    "pl.progress": _through(lambda stream: pl.progress(stream, file=io.StringIO())),
    "map": _through(partial(map, lambda pair: pair)),
}
CONSUMERS: dict[str, Consumer] = {
    **IN_PLACE,
    "for pair": _pairs,
    "list": _through(list),
    "three names": _three_names,
    "a generator that unpacks": _through(_renaming),
    "a deque": _through(_deque),
    "closed over": _closed_over,
    "globals": _globals,
    "a module": _a_module,
    "an attribute": _an_attribute,
    "swapped": _swapped,
}


def _watched(getter: Callable[[], Any], setter: Callable[[Any], None], step: Callable[[], bool]) -> bool:
    before = getter()

    def watch(*_: Any) -> Any:
        return watch

    setter(watch)
    try:
        return step()
    finally:
        setter(before)


def _in_a_thread(step: Callable[[], bool]) -> bool:
    """Each pair in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(step).result()


SURROUNDINGS: dict[str, Callable[[Callable[[], bool]], bool]] = {
    "plain": lambda step: step(),
    "traced": partial(_watched, sys.gettrace, sys.settrace),
    "profiled": partial(_watched, sys.getprofile, sys.setprofile),
    "a thread": _in_a_thread,
}


# Programs. ------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Keep:
    """Something is kept.

    Attributes:
        who: the loop's body, a callback, an algorithm; or a forward, a loss, a clip_grad, an optimizer.
        event: at which; of the last four: none.
        batch: in the batch of this number, or, of the last four, at the call of this number.
        way: a key of WAYS or of OF_OTHERS.
        which: of several tensors.
        holder: a key of HOLDERS.
        often: whether it is read at each event.
        left: after how many events it is let go; None: at the end.
        stream: the number of the stream.
        nth: at which of the times that this event comes in this batch, from 0 on: of which microbatch.
    """

    who: str = "body"
    event: Event = Event.BATCH_END
    batch: int = 2
    way: str = "the State"
    which: int = 0
    holder: str = "a closure"
    often: bool = False
    left: int | None = None
    stream: int = 0
    nth: int = 0


@attrs.frozen(kw_only=True)
class Program:
    """Streams, and what becomes of their States.

    Attributes:
        keeps: what is kept.
        consumer, surrounding: how streams are read, of which the first decides for all.
        model, optimizer, algorithms, callbacks: keys of the tables.
        telling: whether the loss is a function of this module, so that what a step writes to counts as read by it. If
            not, and with a model of torch's, only what the program keeps tells a step that it has to copy.
        large: whether gradients count as large, and are written in place.
        watch: the events that are watched.
        options: further arguments of ``fit``; ``"own"`` stands for a clip_grad and evaluators of this module.
        batches: how many are trained.
        compared: at which events, and in which batches, the State is compared with the twin's.
        raising: where the body raises an error, and goes on.
        failing: where an algorithm raises, which ends its stream.
        left: after how many pairs the first stream is closed.
        forks: at the ends of which batches of the first stream another one begins from its State.
        spoiled: in which batch the gradients are infinite.
    """

    keeps: tuple[Keep, ...] = ()
    consumer: str = "for event, state"
    surrounding: str = "plain"
    model: str = "plain"
    optimizer: str = "adamw"
    telling: bool = True
    large: bool = False
    algorithms: tuple[str, ...] = ()
    callbacks: tuple[str, ...] = ()
    watch: frozenset[Event] | None = None
    options: dict[str, Any] = attrs.field(factory=dict)
    batches: int = 6
    compared: frozenset[tuple[Event, int]] = frozenset()
    raising: tuple[Event, int] | None = None
    failing: tuple[Event, int] | None = None
    left: int | None = None
    forks: tuple[int, ...] = ()
    spoiled: int | None = None


class RaisedError(Exception):
    """Raised by a body, or by an algorithm, on purpose."""


class _Playing:
    """A program that is run."""

    def __init__(self, program: Program, judge: Judge, donate: Any) -> None:
        self.program, self.judge, self.donate = program, judge, donate
        self.calls: collections.Counter[str] = collections.Counter()
        self.met: collections.Counter[Keep] = collections.Counter()
        self.keeps: dict[Any, list[Keep]] = collections.defaultdict(list)
        for keep in program.keeps:
            at = (keep.who, keep.batch) if keep.who in OF_OTHERS else (keep.who, keep.stream, keep.event, keep.batch)
            self.keeps[at].append(keep)
        self.places: list[list[int]] = []  # of the parameters, in each forward that tells
        self.forks: list[Any] = []
        self.events = self.streams = 0
        self.folder = ""

    def stream(self, number: int, start: Any) -> Any:
        program, events = self.program, {keep.event for keep in self.program.keeps if keep.who == "algorithm"}

        def callback(event: Event, state: pl.State) -> None:
            self.noticed("callback", number, event, state)

        def keeper(state: pl.State) -> pl.State:
            assert state.event is not None
            self.noticed("algorithm", number, state.event, state)
            if program.failing == (state.event, state.timestamp.batch):
                raise RaisedError
            return state

        def spoil(state: pl.State) -> pl.State:
            if state.timestamp.batch != program.spoiled:
                return state
            return _with_gradients(lambda grad: grad * float("inf"))(state)

        algorithms = [ALGORITHMS[name]() for name in program.algorithms]
        if program.spoiled is not None:
            algorithms.append(_at("spoil", spoil, _STEP))
        if program.failing is not None:
            events.add(program.failing[0])
        if events:
            algorithms.append(_at("keeper", keeper, *sorted(events)))
        callbacks = [CALLBACKS[name](os.path.join(self.folder, str(number))) for name in program.callbacks]
        if any(keep.who == "callback" for keep in program.keeps):
            callbacks.append(callback)
        loss = _first if program.model == "aliasing loss" else _loss if program.telling else functional.cross_entropy
        own = {"clip_grad": _clip, "evaluators": {"val": DATA[:1]}}
        return pl.fit(
            start,
            DATA,
            loss=loss,
            max_duration=f"{program.batches}ba",
            optimizer=OPTIMIZERS[program.optimizer](),
            algorithms=algorithms,
            callbacks=callbacks,
            watch=program.watch,
            donate=self.donate,
            **{name: own[name] if value == "own" else value for name, value in program.options.items()},
        )

    def consumer(self, number: int, stream: Any) -> Iterator[None]:
        def body(event: Event, state: pl.State) -> None:
            with contextlib.suppress(RaisedError):
                self.body(number, event, state)

        return CONSUMERS[self.program.consumer](stream, body)

    def body(self, number: int, event: Event, state: pl.State) -> None:
        program, batch = self.program, state.timestamp.batch
        at, is_end = (event, batch), event is Event.BATCH_END
        self.events += 1
        self.judge.tick()
        self.noticed("body", number, event, state)
        if at in program.compared or (is_end and batch == program.batches):
            self.judge.compare((number, self.events), state)
        if number == 0 and is_end and batch in program.forks:
            self.streams += 1
            self.forks.append(self.consumer(self.streams, self.stream(self.streams, state)))
        if program.raising == at:
            raise RaisedError

    def noticed(self, who: str, number: int, event: Event, state: pl.State) -> None:
        if who != "body":
            self.judge.tick()
        for keep in self.keeps[who, number, event, state.timestamp.batch]:
            self.met[keep] += 1
            if self.met[keep] == keep.nth + 1:
                self._keep(keep, WAYS[keep.way], state)

    def told(self, who: str, given: Any) -> None:
        for keep in self.keeps[who, self.calls[who]]:
            self._keep(keep, OF_OTHERS[who][keep.way], given)
        if who == "forward":
            self.places.append([each.data_ptr() for each in given[0].parameters()])
        self.calls[who] += 1

    def _keep(self, keep: Keep, way: Any, given: Any) -> None:
        self.judge.keep(keep, way, given, keep.which, keep.holder, keep.often, keep.left)

    def play(self) -> None:
        with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as self.folder:
            for user in ("engine", "ownership") if self.program.large else ():
                patched.setattr(f"pure_loop.stages.{user}.LARGE", 0)
            _LOOKING.append(self.told)
            try:
                self._play()
            finally:
                _LOOKING.remove(self.told)

    def _play(self) -> None:
        torch.manual_seed(0)
        program, step_in = self.program, SURROUNDINGS[self.program.surrounding]
        first = self.stream(0, MODELS[program.model]())
        playing: list[Any] = [self.consumer(0, first)]
        pairs = 0
        while playing:
            playing = [each for each in playing if step_in(partial(_step, each))] + self.forks
            self.forks = []
            pairs += 1
            if program.left is not None and pairs == program.left:
                first.close()
        self.judge.tick()
        self.judge.finish()


def _step(consumer: Iterator[None]) -> bool:
    """One pair more; False: there is none."""
    try:
        next(consumer)
    except (StopIteration, RaisedError):
        return False
    except RuntimeError as error:
        # A stream that a generator ends with an error of its own.
        if isinstance(error.__cause__, RaisedError):
            return False
        raise
    return True


def twin_of(program: Program) -> Judge:
    """The numbers of all that is kept, from streams that copy."""
    twin = Judge()
    _Playing(program, twin, False).play()
    return twin


def judge(program: Program, donate: Any = "auto", twin: Judge | None = None, allowed: bool = False) -> Judge:
    """Run a program and its twin, and compare.

    Args:
        program: what is run.
        donate: that of the streams that are judged.
        twin: the numbers; None: the twin runs, too.
        allowed: whether violations are returned, and not raised.

    Raises:
        Violation: something that was kept changed, or lost its numbers.
    """
    judged = Judge(twin_of(program) if twin is None else twin, lenient=donate is True)
    _Playing(program, judged, donate).play()
    if judged.violations and not allowed:
        raise Violation("\n".join(f"{key} {what}" for key, what in judged.violations.items()))
    return judged


def moves(donate: Any = "auto", **settings: Any) -> list[int]:
    """After which steps, from 1 on, a parameter of the model ``telling`` lies elsewhere than before."""
    program = Program(model="telling", **{"batches": 8, **settings})
    playing = _Playing(program, Judge(twin_of(program)), donate)
    playing.play()
    assert len(playing.places) == program.batches
    return [batch for batch, (one, other) in enumerate(itertools.pairwise(playing.places), 1) if one != other]


EVENTS = [
    *(Event.AFTER_LOAD, Event.FIT_START, Event.EPOCH_START, Event.AFTER_DATALOADER, Event.BATCH_START),
    *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD),
    *(Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END),
]
# At which a State has another tensor, or another reference to one, than at the event before, come more often.
_AT = st.sampled_from([_END, Event.AFTER_LOSS, Event.AFTER_BACKWARD, _STEP, Event.BATCH_START]) | st.sampled_from(
    EVENTS
)
# By then the batch is counted.
_COUNTED = {Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END}
_OF_MICROBATCHES = {Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD}


@st.composite
def _keeps(draw: Any, batches: int, streams: int) -> Keep:
    who = draw(st.sampled_from([*["body"] * 6, "callback", "algorithm", *OF_OTHERS]))
    way = draw(st.sampled_from(list(OF_OTHERS[who] if who in OF_OTHERS else draw(st.sampled_from(KINDS)))))
    holder = draw(st.sampled_from(list(HOLDERS)))
    if holder == WEAK and (who in OF_OTHERS or way not in STATES):
        holder = "a closure"  # test_kept.py has weak references to mappings and tensors
    event = draw(_AT)
    return Keep(
        who=who,
        event=event,
        batch=draw(st.integers(0, batches - 1)) + (event in _COUNTED),
        way=way,
        which=draw(st.integers(0, 5)),
        holder=holder,
        often=draw(st.booleans()),
        left=draw(st.none() | st.integers(0, 40)),
        stream=draw(st.integers(0, streams)),
        nth=draw(st.integers(0, 2)) if event in _OF_MICROBATCHES and draw(st.booleans()) else 0,
    )


@st.composite
def programs(draw: Any) -> Program:
    """Programs that are all valid.

    In half of them nothing but what is kept could keep a step from writing in place.
    """
    batches = draw(st.integers(3, 7))
    common: dict[str, Any] = {
        "model": draw(st.sampled_from(list(MODELS))),
        "optimizer": draw(st.sampled_from(list(OPTIMIZERS))),
        "batches": batches,
        "telling": draw(st.booleans()),
        "large": draw(st.booleans()),
    }
    options: dict[str, Any] = {
        **draw(st.sampled_from([{}, {"microbatch_size": 2}, {"microbatch_size": 4}])),
        **draw(st.sampled_from([{}, {"clip_grad": 0.1}, {"clip_grad": "own"}])),
        **draw(st.sampled_from([{}, {"strict": False}])),
    }
    at_the_end = frozenset({Event.BATCH_END})
    if not draw(st.booleans()):
        return Program(
            keeps=tuple(draw(st.lists(_keeps(batches, 0), min_size=1, max_size=2))),
            consumer=draw(st.sampled_from(list(IN_PLACE))),
            watch=draw(st.none() | st.just(at_the_end)),
            options=options,
            **common,
        )
    places = st.tuples(_AT, st.integers(0, batches))
    forks = draw(st.lists(st.integers(1, batches - 1), max_size=2, unique=True).map(tuple))
    if common["model"] == "aliasing buffers":  # which a stream that begins there refuses
        forks = ()
    spoiled = draw(st.none() | st.integers(0, batches - 1))
    if spoiled is not None or draw(st.booleans()):
        options["nonfinite"] = "skip"
    options |= draw(st.sampled_from([{}, {}, {"precision": "amp_fp16"}, {"precision": "amp_bf16"}]))
    options |= draw(st.sampled_from([{}, {}, {"evaluators": "own", "eval_interval": "2ba"}]))
    some = st.frozensets(st.sampled_from(EVENTS), min_size=1, max_size=4)
    return Program(
        keeps=tuple(draw(st.lists(_keeps(batches, len(forks)), min_size=1, max_size=4))),
        consumer=draw(st.sampled_from(list(IN_PLACE)) | st.sampled_from(list(CONSUMERS))),
        surrounding=draw(st.sampled_from([*["plain"] * 5, *SURROUNDINGS])),
        algorithms=tuple(draw(st.lists(st.sampled_from(list(ALGORITHMS)), max_size=2, unique=True))),
        callbacks=tuple(draw(st.lists(st.sampled_from(list(CALLBACKS)), max_size=1))) if draw(st.booleans()) else (),
        watch=draw(st.none() | st.just(at_the_end) | st.just(at_the_end | {Event.AFTER_TRAIN_BATCH}) | some),
        compared=draw(st.frozensets(places, max_size=4)),
        raising=draw(st.none() | places),
        failing=draw(st.none() | places) if draw(st.booleans()) else None,
        left=draw(st.none() | st.integers(1, 60)) if draw(st.booleans()) else None,
        forks=forks,
        spoiled=spoiled,
        options=options,
        **common,
    )
