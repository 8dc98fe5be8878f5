"""Programs: a run of ``pl.fit``, how its stream is read, what is kept of it by whom, and when it is let go."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithm import Algorithm
from tests.ownership.judge import Judge
from tests.ownership.ways import GRAPHS, HOLDERS, MAPPINGS, OF_OTHERS, OF_TENSORS, STATES, WAYS, WEAK, of_tree
from tests.support.models import FEATURES, Tied, batches, mlp, plain

__all__ = [
    "ALGORITHMS",
    "CALLBACKS",
    "CONSUMERS",
    "DATA",
    "MODELS",
    "OPTIMIZERS",
    "Keep",
    "Program",
    "addresses",
    "judge",
    "programs",
    "twin_of",
]

DATA = batches((6, 6, 4, 6), seed=3)
Body: TypeAlias = Callable[[Event, pl.State], None]

# What a forward and a loss tell about themselves; of one program at a time.
_LOOKING: list[Callable[[str, Any], None]] = []


def _tell(who: str, given: Any) -> None:
    for look in _LOOKING:
        look(who, given)


class Telling(nn.Module):
    """A model whose forward shows itself and its activations to whom they concern."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.weight = nn.Parameter(torch.eye(5))
        self.last = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        hidden = torch.tanh(self.first(x) @ self.weight)
        _tell("forward", (self, hidden))
        out: Tensor = self.last(hidden)
        return out


class AliasingOutputs(nn.Module):
    """Its outputs are a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), 3)


class AliasingBuffers(nn.Module):
    """Its third forward makes a view of a parameter the buffer that the forwards before it have assigned."""

    last: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + 0.1 * self.last
        self.calls = self.calls + 1
        if self.calls < 3:
            self.last = self.last + 0
        elif self.calls == 3:
            self.last = self.layer.bias.detach()
        return out


def _wide() -> nn.Module:
    """With gradients that are large enough to be written in place."""
    return nn.Sequential(nn.Linear(FEATURES, 33_000), nn.Tanh(), nn.Linear(33_000, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(FEATURES, 3),
    "plain": plain,
    "batchnorm and dropout": mlp,
    "tied": Tied,
    "telling": Telling,
    "aliasing outputs": AliasingOutputs,
    "aliasing buffers": AliasingBuffers,
    "aliasing loss": AliasingOutputs,
    "wide": _wide,
}


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = functional.cross_entropy(outputs, targets)
    _tell("loss", (outputs, targets))
    return loss


def _first(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is a view of its outputs."""
    _tell("loss", (outputs, targets))
    return outputs[0, 0]


def _clip(grads: Any, params: Any) -> Any:
    _tell("clip", (grads, params))
    return {name: None if grad is None else grad.clamp(-0.1, 0.1) for name, grad in grads.items()}


def _telling_adamw() -> pl.Optimizer:
    adamw = pl.optim.adamw(lr=0.1)

    def overwrite(grads: Any, opt_state: Any, params: Any, timestamp: pl.Timestamp) -> Any:
        assert adamw.overwrite is not None
        new = adamw.overwrite(grads, opt_state, params, timestamp)
        _tell("update", (grads, new[1], new[0]))
        return new

    def update(grads: Any, opt_state: Any, params: Any, timestamp: pl.Timestamp) -> Any:
        new = adamw.update(grads, opt_state, params, timestamp)
        _tell("update", (grads, new[1], new[0]))
        return new

    return attrs.evolve(adamw, update=update, overwrite=overwrite)


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


def _clones(state: pl.State) -> pl.State:
    return state.replace(params={name: each.detach().clone() for name, each in state.params.items()})


def _same_tensors(state: pl.State) -> pl.State:
    return state.replace(params=dict(state.params))


def _same_moments(state: pl.State) -> pl.State:
    return state.replace(opt_state=pl.FrozenDict(state.opt_state))


def _remembers(state: pl.State) -> pl.State:
    return state.remember("remembers", dict(state.params))


def _reads(state: pl.State) -> pl.State:
    assert len(of_tree(state.params)) > 0
    assert len(of_tree(state.opt_state)) >= 0
    return state


def _doubles(state: pl.State) -> pl.State:
    if state.grads is None:
        return state
    return state.replace(grads={name: None if each is None else 2 * each for name, each in state.grads.items()})


def _same_gradients(state: pl.State) -> pl.State:
    return state if state.grads is None else state.replace(grads=dict(state.grads))


def _returns(field: str) -> Any:
    """Gives back the parameters, or the optimizer state, of an older State."""
    older: list[pl.State] = []

    def handler(state: pl.State) -> pl.State:
        if state.timestamp.batch == 2:
            older.append(state)
        if state.timestamp.batch != 4 or not older:
            return state
        return state.replace(**{field: getattr(older[0], field)})

    return pl.algorithm(Event.BATCH_END, name=f"returns {field}")(handler)


def _keeps_states() -> Any:
    states: list[pl.State] = []

    def handler(state: pl.State) -> pl.State:
        states.append(state)
        return state

    return pl.algorithm(Event.BATCH_START, Event.AFTER_TRAIN_BATCH, name="keeps states")(handler)


ALGORITHMS: dict[str, Callable[[], Any]] = {
    "ema": lambda: pl.algorithms.ema(half_life="3ba"),
    "lookahead": lambda: pl.algorithms.lookahead(),
    "clones": lambda: pl.algorithm(Event.BATCH_START, name="clones")(_clones),
    "same tensors": lambda: pl.algorithm(Event.BATCH_START, Event.BATCH_END, name="same tensors")(_same_tensors),
    "same moments": lambda: pl.algorithm(Event.BATCH_END, name="same moments")(_same_moments),
    "remembers": lambda: Algorithm("remembers", {Event.BATCH_END: _remembers}, init=lambda state: dict(state.params)),
    "reads": lambda: pl.algorithm(Event.AFTER_TRAIN_BATCH, Event.BATCH_END, name="reads")(_reads),
    "doubles": lambda: pl.algorithm(Event.AFTER_BACKWARD, name="doubles")(_doubles),
    "same gradients": lambda: pl.algorithm(Event.AFTER_TRAIN_BATCH, name="same gradients")(_same_gradients),
    "returns params": lambda: _returns("params"),
    "returns opt_state": lambda: _returns("opt_state"),
    "keeps states": _keeps_states,
}

# Of a folder for what they write.
CALLBACKS: dict[str, Callable[[str], Any]] = {
    "GradMonitor": lambda folder: pl.callbacks.GradMonitor(),
    "CheckpointSaver": lambda folder: pl.callbacks.CheckpointSaver(folder, interval="2ba"),
}


Consumer: TypeAlias = "Callable[[Any, Body], Iterator[None]]"


def _pairs_in_two(stream: Any, body: Body) -> Iterator[None]:
    for event, state in stream:
        body(event, state)
        yield


def _pairs_in_one(stream: Any, body: Body) -> Iterator[None]:
    for pair in stream:
        body(*pair)
        yield


def _next_in_two(stream: Any, body: Body) -> Iterator[None]:
    while True:
        try:
            event, state = next(stream)
        except StopIteration:
            return
        body(event, state)
        yield


def _next_in_one(stream: Any, body: Body) -> Iterator[None]:
    while (pair := next(stream, None)) is not None:
        body(*pair)
        yield


def _a_list(stream: Any, body: Body) -> Iterator[None]:
    pairs = list(stream)
    for event, state in pairs:
        body(event, state)
        yield


def _a_comprehension(stream: Any, body: Body) -> Iterator[None]:
    def seen(event: Event, state: pl.State) -> Event:
        body(event, state)
        return event

    assert [seen(event, state) for event, state in stream]
    yield


def _unpacked(stream: Any, body: Body) -> Iterator[None]:
    with contextlib.suppress(StopIteration):
        while True:
            (event, first), (_, second) = next(stream), next(stream)
            body(event, first)
            body(_, second)
            yield


def _other_names(stream: Any, body: Body) -> Iterator[None]:
    """Three variables in turn."""
    with contextlib.suppress(StopIteration):
        while True:
            event, one = next(stream)
            body(event, one)
            yield
            event, two = next(stream)
            body(event, two)
            yield
            event, three = next(stream)
            body(event, three)
            yield


def _before_too(stream: Any, body: Body) -> Iterator[None]:
    before = None
    for event, state in stream:
        body(event, state)
        yield
        if before is not None:
            assert before.event is not None
            of_tree(before)
        before = state


def _yield_from(stream: Any, body: Body) -> Iterator[None]:
    def around(stream: Any) -> Iterator[Any]:
        yield from stream

    return _pairs_in_two(around(around(stream)), body)


def _a_generator_around(stream: Any, body: Body) -> Iterator[None]:
    def around(stream: Any) -> Iterator[Any]:
        for pair in stream:
            given = pair
            yield given

    return _pairs_in_two(around(stream), body)


def _a_generator_that_renames(stream: Any, body: Body) -> Iterator[None]:
    def around(stream: Any) -> Iterator[Any]:
        for event, state in stream:
            seen = event
            yield seen, state

    return _pairs_in_two(around(stream), body)


def _enumerate(stream: Any, body: Body) -> Iterator[None]:
    for _, (event, state) in enumerate(stream):
        body(event, state)
        yield


def _zip(stream: Any, body: Body) -> Iterator[None]:
    for (event, state), _ in zip(stream, itertools.count()):
        body(event, state)
        yield


def _map(stream: Any, body: Body) -> Iterator[None]:
    for event, state in map(lambda pair: pair, stream):  # noqa: C417
        body(event, state)
        yield


def _chain(stream: Any, body: Body) -> Iterator[None]:
    for event, state in itertools.chain(stream):
        body(event, state)
        yield


def _tee(stream: Any, body: Body) -> Iterator[None]:
    one, other = itertools.tee(stream)
    for (event, state), _ in zip(one, other, strict=True):
        body(event, state)
        yield


def _pairwise(stream: Any, body: Body) -> Iterator[None]:
    for (_, _before), (event, state) in itertools.pairwise(stream):
        body(event, state)
        yield


def _a_deque(stream: Any, body: Body) -> Iterator[None]:
    last: collections.deque[Any] = collections.deque(maxlen=3)
    for pair in stream:
        last.append(pair)
        body(*last[0])
        yield
    for pair in list(last)[1:]:
        body(*pair)
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


def _a_class(stream: Any, body: Body) -> Iterator[None]:
    class _Body:
        for event, state in stream:
            body(event, state)

    yield


def _an_attribute(stream: Any, body: Body) -> Iterator[None]:
    class Holder:
        state: Any = None

    holder = Holder()
    for event, holder.state in stream:
        body(event, holder.state)
        yield


def _a_star(stream: Any, body: Body) -> Iterator[None]:
    for event, *rest in stream:
        body(event, rest[0])
        yield


def _twice(stream: Any, body: Body) -> Iterator[None]:
    """The first half in one loop and one variable, the rest in others."""
    for event, state in itertools.islice(stream, 40):
        body(event, state)
        yield
    for event, later in stream:
        body(event, later)
        yield


def _swapped(stream: Any, body: Body) -> Iterator[None]:
    """The loop's variable is another State in between."""
    other = None
    for event, state in stream:
        body(event, state)
        state, other = other, state
        yield


def _with_locals(stream: Any, body: Body) -> Iterator[None]:
    for event, state in stream:  # noqa: B007
        names = locals()
        body(names["event"], names["state"])
        del names
        yield
        assert state is not None


def _progress(stream: Any, body: Body) -> Iterator[None]:
    for event, state in pl.progress(stream, file=io.StringIO()):
        body(event, state)
        yield


def _async(stream: Any, body: Body) -> Iterator[None]:
    async def around() -> Any:
        for event, state in stream:
            yield event, state

    pairs = around()

    def step() -> Any:
        try:
            pairs.__anext__().send(None)
        except StopIteration as stop:
            return stop.value
        except StopAsyncIteration:
            return None

    while (pair := step()) is not None:
        body(*pair)
        yield


CONSUMERS: dict[str, Consumer] = {
    "for event, state": _pairs_in_two,
    "for pair": _pairs_in_one,
    "event, state = next": _next_in_two,
    "pair = next": _next_in_one,
    "list": _a_list,
    "a comprehension": _a_comprehension,
    "two at a time": _unpacked,
    "three names": _other_names,
    "the one before": _before_too,
    "yield from": _yield_from,
    "a generator around": _a_generator_around,
    "a generator that unpacks": _a_generator_that_renames,
    "enumerate": _enumerate,
    "zip": _zip,
    "map": _map,
    "chain": _chain,
    "tee": _tee,
    "pairwise": _pairwise,
    "a deque": _a_deque,
    "closed over": _closed_over,
    "globals": _globals,
    "a module": _a_module,
    "a class": _a_class,
    "an attribute": _an_attribute,
    "a star": _a_star,
    "two loops": _twice,
    "swapped": _swapped,
    "locals()": _with_locals,
    "pl.progress": _progress,
    "async": _async,
}


def _traced(step: Callable[[], bool]) -> bool:
    def trace(*_: Any) -> Any:
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return step()
    finally:
        sys.settrace(before)


def _profiled(step: Callable[[], bool]) -> bool:
    before = sys.getprofile()
    sys.setprofile(lambda *_: None)
    try:
        return step()
    finally:
        sys.setprofile(before)


def _monitored(step: Callable[[], bool]) -> bool:
    """As coverage counts lines from Python 3.12 on, and as a tool of coverage, unless that counts them now."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:
        return step()
    numbers = (monitoring.COVERAGE_ID, *range(6))
    tool = next(number for number in numbers if monitoring.get_tool(number) is None)
    monitoring.use_tool_id(tool, "ownership")
    monitoring.set_events(tool, monitoring.events.LINE)
    try:
        return step()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


def _in_a_thread(step: Callable[[], bool]) -> bool:
    """Each pair in a thread of its own."""
    results: list[bool] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(step())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return results[0]


SURROUNDINGS: dict[str, Callable[[Callable[[], bool]], bool]] = {
    "plain": lambda step: step(),
    "traced": _traced,
    "profiled": _profiled,
    "monitored": _monitored,
    "a thread": _in_a_thread,
}


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
        self.forks: list[Any] = []
        self.met: collections.Counter[Keep] = collections.Counter()
        self.events = self.streams = 0
        self.folder = ""

    def stream(self, number: int, start: Any) -> Any:
        program = self.program

        def callback(event: Event, state: pl.State) -> None:
            self.noticed("callback", number, event, state)

        def handler(state: pl.State) -> pl.State:
            assert state.event is not None
            self.noticed("algorithm", number, state.event, state)
            if program.failing == (state.event, state.timestamp.batch):
                raise RaisedError
            return state

        def spoil(state: pl.State) -> pl.State:
            if state.timestamp.batch != program.spoiled or state.grads is None:
                return state
            grads = {name: None if each is None else each * float("inf") for name, each in state.grads.items()}
            return state.replace(grads=grads)

        algorithms = [ALGORITHMS[name]() for name in program.algorithms]
        if program.spoiled is not None:
            algorithms.append(pl.algorithm(Event.AFTER_TRAIN_BATCH, name="spoil")(spoil))
        at = {keep.event for keep in program.keeps if keep.who == "algorithm"}
        if program.failing is not None:
            at.add(program.failing[0])
        if at:
            algorithms.append(pl.algorithm(*sorted(at), name="keeper")(handler))
        callbacks = [CALLBACKS[name](os.path.join(self.folder, str(number))) for name in program.callbacks]
        if any(keep.who == "callback" for keep in program.keeps):
            callbacks.append(callback)
        loss = _loss if program.telling else functional.cross_entropy
        if program.model == "aliasing loss":
            loss = _first
        options: dict[str, Any] = {"loss": loss, "max_duration": f"{program.batches}ba", **program.options}
        if "evaluators" in options:
            options["evaluators"] = {"val": DATA[:1]}
        if options.get("clip_grad") == "own":
            options["clip_grad"] = _clip
        return pl.fit(
            start,
            DATA,
            optimizer=OPTIMIZERS[program.optimizer](),
            algorithms=algorithms,
            callbacks=callbacks,
            watch=program.watch,
            donate=self.donate,
            **options,
        )

    def consumer(self, number: int, stream: Any) -> Iterator[None]:
        def body(event: Event, state: pl.State) -> None:
            with contextlib.suppress(RaisedError):
                self.body(number, event, state)

        return CONSUMERS[self.program.consumer](stream, body)

    def body(self, number: int, event: Event, state: pl.State) -> None:
        program, at = self.program, (event, state.timestamp.batch)
        self.events += 1
        self.judge.tick()
        self.noticed("body", number, event, state)
        if at in program.compared:
            self.judge.compare((number, self.events), f"the State of stream {number} at {at}", state)
        if number == 0 and event is Event.BATCH_END and state.timestamp.batch in program.forks:
            self.streams += 1
            self.forks.append(self.consumer(self.streams, self.stream(self.streams, state)))
        if program.raising == at:
            raise RaisedError

    def noticed(self, who: str, number: int, event: Event, state: pl.State) -> None:
        if who != "body":
            self.judge.tick()
        for keep in self.program.keeps:
            if (keep.who, keep.stream, keep.event, keep.batch) == (who, number, event, state.timestamp.batch):
                self.met[keep] += 1
                if self.met[keep] == keep.nth + 1:
                    self._keep(keep, WAYS[keep.way], state)

    def told(self, who: str, given: Any) -> None:
        self.calls[who] += 1
        for keep in self.program.keeps:
            if (keep.who, keep.batch) == (who, self.calls[who] - 1):
                self._keep(keep, OF_OTHERS[who][keep.way], given)

    def _keep(self, keep: Keep, way: Any, given: Any) -> None:
        what = f"{keep.way}, kept in {keep.holder} by {keep.who} at {keep.event.name}, batch {keep.batch},"
        self.judge.keep(keep, what, way, given, keep.which, keep.holder, often=keep.often, left=keep.left)

    def play(self) -> None:
        if not self.program.callbacks:
            self._play()
            return
        with tempfile.TemporaryDirectory() as self.folder:
            self._play()

    def _play(self) -> None:
        torch.manual_seed(0)
        program, step_in = self.program, SURROUNDINGS[self.program.surrounding]
        first = self.stream(0, MODELS[program.model]())
        playing: list[Any] = [self.consumer(0, first)]
        _LOOKING.append(self.told)
        try:
            pairs = 0
            while playing:
                for each in list(playing):
                    if not step_in(functools.partial(_step, each)):
                        playing.remove(each)
                playing += self.forks
                self.forks.clear()
                pairs += 1
                if program.left is not None and pairs == program.left:
                    first.close()
            self.judge.tick()
            self.judge.finish()
        finally:
            _LOOKING.remove(self.told)


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


def judge(program: Program, donate: Any = "auto", twin: Judge | None = None) -> Judge:
    """Run a program and its twin, and compare.

    Args:
        program: what is run.
        donate: that of the streams that are judged.
        twin: the numbers; None: the twin runs, too.

    Raises:
        Violation: something that was kept changed, or lost its numbers.
    """
    judged = Judge(twin_of(program) if twin is None else twin, lenient=donate is True)
    _Playing(program, judged, donate).play()
    return judged


def addresses(program: Program, donate: Any = "auto") -> list[list[int]]:
    """Where the parameters lie in each forward of the model ``telling``; nothing is read of a State."""
    playing = _Playing(program, Judge(twin_of(program)), donate)
    found: list[list[int]] = []

    def told(who: str, given: Any) -> None:
        if who == "forward":
            found.append([each.data_ptr() for each in given[0].parameters()])

    playing.told = told  # type: ignore[method-assign]
    playing.play()
    return found


EVENTS = [
    *(Event.AFTER_LOAD, Event.FIT_START, Event.EPOCH_START, Event.AFTER_DATALOADER, Event.BATCH_START),
    *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD),
    *(Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END),
]


# At which a State has another tensor, or another reference to one, than at the event before.
_TELLING = [Event.BATCH_END, Event.AFTER_LOSS, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_START]
# By then the batch is counted.
_COUNTED = {Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END}
_OF_MICROBATCHES = {Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD}
_KINDS = [STATES, MAPPINGS, GRAPHS, OF_TENSORS]
# Which a step may write in place after, if nothing else is kept.
_IN_PLACE = ["for event, state", "event, state = next", "yield from", "pl.progress", "map"]


@st.composite
def _keeps(draw: Any, batches: int, streams: int) -> Keep:
    who = draw(st.sampled_from([*["body"] * 6, "callback", "algorithm", *OF_OTHERS]))
    way = draw(st.sampled_from(list(OF_OTHERS[who] if who in OF_OTHERS else draw(st.sampled_from(_KINDS)))))
    holder = draw(st.sampled_from(list(HOLDERS)))
    if holder == WEAK and (who in OF_OTHERS or way not in STATES):
        holder = "a closure"  # test_kept.py has weak references to mappings and tensors
    event = draw(st.sampled_from(_TELLING) | st.sampled_from(EVENTS))
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
    batches, telling = draw(st.integers(3, 7)), draw(st.booleans())
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["microbatch_size"] = draw(st.sampled_from([2, 4]))
    if draw(st.booleans()):
        options["clip_grad"] = draw(st.sampled_from([0.1, "own"]))
    if draw(st.booleans()):
        options["strict"] = False
    common: dict[str, Any] = {
        "model": draw(st.sampled_from(list(MODELS))),
        "optimizer": draw(st.sampled_from(list(OPTIMIZERS))),
        "batches": batches,
        "telling": telling,
        "options": options,
    }
    at_the_end = frozenset({Event.BATCH_END})
    if not draw(st.booleans()):
        return Program(
            keeps=tuple(draw(st.lists(_keeps(batches, 0), min_size=1, max_size=2))),
            consumer=draw(st.sampled_from(_IN_PLACE)),
            watch=draw(st.none() | st.just(at_the_end)),
            **common,
        )
    places = st.tuples(st.sampled_from(_TELLING) | st.sampled_from(EVENTS), st.integers(0, batches))
    forks = draw(st.lists(st.integers(1, batches - 1), max_size=2, unique=True).map(tuple))
    if common["model"] == "aliasing buffers":  # which a stream that begins there refuses
        forks = ()
    spoiled = draw(st.none() | st.integers(0, batches - 1))
    if spoiled is not None or draw(st.booleans()):
        options["nonfinite"] = "skip"
    if draw(st.integers(0, 3)) == 3:
        options["precision"] = draw(st.sampled_from(["amp_fp16", "amp_bf16"]))
    if draw(st.integers(0, 3)) == 3:
        options |= {"evaluators": "own", "eval_interval": "2ba"}
    some = st.frozensets(st.sampled_from(EVENTS), min_size=1, max_size=4)
    return Program(
        keeps=tuple(draw(st.lists(_keeps(batches, len(forks)), min_size=1, max_size=4))),
        consumer=draw(st.sampled_from(_IN_PLACE) | st.sampled_from(list(CONSUMERS))),
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
        **common,
    )
