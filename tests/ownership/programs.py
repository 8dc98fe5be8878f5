"""Programs: a run of ``pl.fit``, how its stream is read, what is kept of it by whom, and when it is let go."""

from __future__ import annotations

import collections
import io
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import pure_loop as pl
from pure_loop import Event
from tests.ownership.judge import Judge, Keep
from tests.ownership.ways import HOLDERS, KINDS, STATES, WAYS, WEAK, of_tree
from tests.support import problem

__all__ = ["CONSUMERS", "DATA", "IN_PLACE", "OPTIMIZERS", "Program", "judge", "moves", "programs"]

DATA = problem.points(size=(6, 6, 4, 6), seed=3)
Body = Callable[[Event, pl.State], None]
END = object()
_END, _STEP = Event.BATCH_END, Event.AFTER_TRAIN_BATCH


class Own(nn.Module):
    """A model with code of the user's, which notes where its parameters lie."""

    places: ClassVar[list[list[int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        self.places.append([each.data_ptr() for each in self.parameters()])
        self.seen = self.seen + len(x)
        return self.last(torch.tanh(self.first(x)))


class AliasingOutputs(nn.Module):
    """Its outputs are a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), 3)


class AliasingBuffers(nn.Linear):
    """Its third forward makes a view of a parameter the buffer that the forwards before it have assigned."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input) + 0.1 * self.last
        self.calls = self.calls + 1
        if self.calls <= 3:
            self.last = self.bias.detach() if self.calls == 3 else self.last + 0
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": problem.mlp,
    "batchnorm and dropout": problem.noisy,
    "tied": problem.tied,
    "own": Own,
    "aliasing outputs": AliasingOutputs,
    "aliasing buffers": AliasingBuffers,
    "aliasing loss": AliasingOutputs,
}


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return problem.cross_entropy(outputs, targets)


def _first(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is a view of its outputs."""
    return outputs[0, 0]


def _each(grads: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return {name: None if grad is None else change(grad) for name, grad in grads.items()}


def _clip(grads: Any, params: Any) -> Any:
    return _each(grads, lambda grad: grad.clamp(-0.1, 0.1))


def _by_shape(name: str, tensor: Tensor) -> str:
    return "a" if tensor.ndim > 1 else "b"


_PARTS = {"a": pl.optim.adamw(lr=0.1), "b": pl.optim.sgd(lr=0.1, momentum=0.9)}
OPTIMIZERS: dict[str, pl.Optimizer] = {
    "adamw": pl.optim.adamw(lr=0.1),
    "sgd": pl.optim.sgd(lr=0.1),
    "momentum": pl.optim.sgd(lr=0.1, momentum=0.9),
    "lion": pl.optim.lion(lr=0.01),
    "partition": pl.optim.partition(_PARTS, label=_by_shape),
    "RAdam": pl.optim.from_torch(torch.optim.RAdam, lr=0.1),
}


def _reads(state: pl.State) -> pl.State:
    assert of_tree((state.params, state.opt_state))
    return state


def _with_gradients(change: Callable[[Tensor], Tensor]) -> Callable[[pl.State], pl.State]:
    return lambda state: state if state.grads is None else state.replace(grads=_each(state.grads, change))


def _cloned(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each.detach().clone(), tree)


def _begins(state: pl.State) -> pl.State:
    return state.replace(grads={name: torch.ones_like(state.params[name]) for name in state.model.trainable})


def _spoils(state: pl.State) -> pl.State:
    return _with_gradients(lambda grad: grad * torch.inf)(state) if state.timestamp.batch == 2 else state


def _tries(state: pl.State, stages: pl.Stages) -> pl.State:
    """Gradients and a step of its own, which take nothing of the loop's."""
    if state.event is _STEP:
        new = stages.update(state)
        return state.remember("tries", sum((new.params[name] - each).norm() for name, each in state.params.items()))
    if state.event is Event.AFTER_BACKWARD:
        stages.finish_gradients(state, divisor=2.0)
    stages.backward(stages.loss(stages.forward(state)))
    return state


def _returning(field: str) -> Callable[[pl.State], pl.State]:
    """Gives back the parameters, or the optimizer state, of an older State."""
    older: list[pl.State] = []

    def handler(state: pl.State) -> pl.State:
        older.extend([state] if state.timestamp.batch == 2 else [])
        return state.replace(**{field: getattr(older[0], field)}) if state.timestamp.batch == 4 and older else state

    return handler


_HANDLERS: dict[str, tuple[Any, ...]] = {
    "clones": (lambda s: s.replace(params=_cloned(s.params), opt_state=_cloned(s.opt_state)), Event.BATCH_START),
    "same tensors": (lambda s: s.replace(params=dict(s.params)), Event.BATCH_START, _END),
    "reads": (_reads, _STEP, _END),
    "doubles": (_with_gradients(lambda grad: 2 * grad), Event.AFTER_BACKWARD),
    "begins": (_begins, Event.BATCH_START),
    "spoils": (_spoils, _STEP),
    "tries": (_tries, Event.BEFORE_FORWARD, Event.AFTER_BACKWARD, _STEP),
    "returns params": (None, _END),
    "returns opt_state": (None, _END),
    "began with params": (lambda state: state, _END),
    "began with opt_state": (lambda state: state, _END),
}
# What they keep from the beginning on.
_INITS: dict[str, Any] = {
    "tries": lambda state: torch.zeros(()),
    "began with params": lambda state: pl.FrozenDict(kept=state.params),
    "began with opt_state": lambda state: pl.FrozenDict(kept=state.opt_state),
}
ALGORITHMS = ["ema", *_HANDLERS]


def _algorithm(name: str) -> pl.Algorithm:
    if name == "ema":
        return pl.algorithms.ema(half_life="3ba")
    handler, *at = _HANDLERS[name]
    handler = handler or _returning(name.removeprefix("returns "))
    return pl.algorithm(*at, name=name, init=_INITS.get(name))(handler)  # type: ignore[no-any-return]


# How a stream is read. A consumer passes each pair to the body, and yields where the next pair is asked for. ----------

Consumer = Callable[[Any, Body], Iterator[None]]


def _through(around: Callable[[Any], Any], stream: Any, body: Body) -> Iterator[None]:
    """A loop over what gives on the pairs of a stream."""
    for event, state in around(stream):
        body(event, state)
        yield


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
    try:
        while True:
            event, state = next(stream)
            body(event, state)
            yield
    except StopIteration:
        return


def _in_threads(stream: Any, body: Body) -> Iterator[None]:
    """Each pair in a thread of its own."""
    pairs = _next(stream, body)
    with ThreadPoolExecutor(1) as pool:
        while pool.submit(next, pairs, END).result() is not END:  # type: ignore[arg-type]
            yield


def _closed_over(stream: Any, body: Body) -> Iterator[None]:
    def look() -> None:
        body(event, state)

    for event, state in stream:  # noqa: B007
        look()
        yield


def _a_module(stream: Any, body: Body) -> Iterator[None]:
    exec("for event, state in stream:\n    body(event, state)", {"stream": stream, "body": body})
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
    "for event, state": partial(_through, lambda stream: stream),
    "event, state = next": _next,
    "yield from": partial(_through, lambda stream: _delegating(_delegating(stream))),
    "pl.progress": partial(_through, lambda stream: pl.progress(stream, file=io.StringIO())),
    "map": partial(_through, partial(map, lambda pair: pair)),
}
CONSUMERS: dict[str, Consumer] = {
    **IN_PLACE,
    "for pair": _pairs,
    "list": partial(_through, list),
    "in threads": _in_threads,
    "a generator that unpacks": partial(_through, _renaming),
    "a deque": partial(_through, _deque),
    "closed over": _closed_over,
    "a module": _a_module,
    "swapped": _swapped,
}


# Programs. ------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Program:
    """Streams, and what becomes of their States.

    Attributes:
        keeps: what is kept.
        consumer: how streams are read.
        model, optimizer, algorithms: keys of the tables.
        monitors: whether a callback reads the gradients.
        own_loss: whether the loss is a function of this module, so that what a step writes to counts as read by it. If
            not, and with a model of torch's, only what the program keeps tells a step that it has to copy.
        large: whether gradients count as large, and are written in place.
        watch: the events that are watched.
        options: further arguments of ``fit``; ``"own"`` stands for a clip_grad and evaluators of this module.
        batches: how many are trained.
        forks: at the ends of which batches of the first stream another one begins from its State.
    """

    keeps: tuple[Keep, ...] = ()
    consumer: str = "for event, state"
    model: str = "plain"
    optimizer: str = "adamw"
    own_loss: bool = True
    large: bool = False
    algorithms: tuple[str, ...] = ()
    monitors: bool = False
    watch: frozenset[Event] | None = None
    options: dict[str, Any] = attrs.field(factory=dict)
    batches: int = 6
    forks: tuple[int, ...] = ()


class _Playing:
    """A program that is run."""

    def __init__(self, program: Program, judge: Judge, donate: Any) -> None:
        self.program, self.judge, self.donate = program, judge, donate
        self.calls: collections.Counter[Any] = collections.Counter()
        self.keeps: dict[Any, list[Keep]] = collections.defaultdict(list)
        for keep in program.keeps:
            self.keeps[keep.who, keep.stream, keep.event, keep.batch].append(keep)
        self.playing: list[Any] = []

    def begin(self, number: int, start: Any) -> None:
        """A stream, and its consumer."""
        program, noticed = self.program, partial(self.noticed, number)

        def keeper(state: pl.State) -> pl.State:
            noticed("algorithm", state.event, state)
            return state

        def body(event: Event, state: pl.State) -> None:
            noticed("body", event, state)
            if event is _END and state.timestamp.batch == program.batches:
                last = Keep(who="last", stream=number)
                self.judge.keep(last, STATES["the State"], state)
            if number == 0 and event is _END and state.timestamp.batch in program.forks:
                self.begin(len(self.playing), state)

        algorithms = list(map(_algorithm, program.algorithms))
        if events := {keep.event for keep in program.keeps if keep.who == "algorithm"}:
            algorithms.append(pl.algorithm(*sorted(events), name="keeper")(keeper))
        callbacks: list[Any] = [pl.callbacks.GradMonitor()] if program.monitors else []
        if any(keep.who == "callback" for keep in program.keeps):
            callbacks.append(partial(noticed, "callback"))
        loss = _first if program.model == "aliasing loss" else _loss if program.own_loss else problem.cross_entropy
        own = {"clip_grad": _clip, "evaluators": {"val": DATA[:1]}}
        stream = pl.fit(
            start,
            DATA,
            loss=loss,
            max_duration=f"{program.batches}ba",
            optimizer=OPTIMIZERS[program.optimizer],
            algorithms=algorithms,
            callbacks=callbacks,
            watch=program.watch,
            donate=self.donate,
            **{name: own[name] if value == "own" else value for name, value in program.options.items()},
        )
        self.playing.append(CONSUMERS[program.consumer](stream, body))

    def noticed(self, number: int, who: str, event: Any, state: pl.State) -> None:
        self.judge.tick()
        for keep in self.keeps[who, number, event, state.timestamp.batch]:
            self.calls[keep] += 1
            if self.calls[keep] == keep.nth + 1:
                self.judge.keep(keep, WAYS[keep.way], state)

    def play(self) -> None:
        with pytest.MonkeyPatch.context() as patched:
            for user in ("engine", "ownership") if self.program.large else ():
                patched.setattr(f"pure_loop.stages.{user}.LARGE", 0)
            torch.manual_seed(0)
            self.begin(0, MODELS[self.program.model]())
            ended: set[int] = set()
            while len(ended) < len(self.playing):
                for number, consumer in list(enumerate(self.playing)):
                    if number not in ended and next(consumer, END) is END:
                        ended.add(number)
            self.judge.finish()


def judge(program: Program, donate: Any = "auto", allowed: bool = False) -> Judge:
    """Run a program and its twin, and compare; ``allowed``: violations are returned, and not raised."""
    twin = Judge()
    _Playing(program, twin, False).play()
    judged = Judge(twin, lenient=donate is True)
    _Playing(program, judged, donate).play()
    assert allowed or not judged.violations, "\n".join(f"{keep} {what}" for keep, what in judged.violations.items())
    return judged


def moves(donate: Any = "auto", **settings: Any) -> list[int]:
    """After which steps, from 1 on, a parameter of the model ``own`` lies elsewhere than before."""
    program = Program(model="own", **{"batches": 8, **settings})
    Own.places.clear()
    _Playing(program, Judge(Judge()), donate).play()  # what is kept is compared with nothing
    assert len(Own.places) == program.batches
    return [batch for batch, (one, other) in enumerate(itertools.pairwise(Own.places), 1) if one != other]


# Programs that are drawn. ---------------------------------------------------------------------------------------------

EVENTS = [
    *(Event.AFTER_LOAD, Event.FIT_START, Event.EPOCH_START, Event.AFTER_DATALOADER, Event.BATCH_START),
    *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD),
    *(Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END),
]
# At which a State has another tensor, or another reference to one, than at the event before, come more often.
_OFTEN = [_END, Event.AFTER_LOSS, Event.AFTER_BACKWARD, _STEP, Event.BATCH_START]
# By then the batch is counted.
_COUNTED = {Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END}
_OF_MICROBATCHES = {Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD}


@st.composite
def _keeps(draw: Any, batches: int, streams: int) -> Keep:
    who = draw(st.sampled_from([*["body"] * 4, "callback", "algorithm"]))
    way = draw(st.sampled_from(list(draw(st.sampled_from(KINDS)))))
    holder = draw(st.sampled_from(list(HOLDERS)))
    if holder == WEAK and way not in STATES:
        holder = "a closure"  # test_kept.py has weak references to mappings and tensors
    event = draw(st.sampled_from(_OFTEN) | st.sampled_from(EVENTS))
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
    """Programs that are all valid. In half of them nothing but what is kept could keep a step from writing in place."""

    def one_of(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    batches, at_the_end = draw(st.integers(3, 7)), frozenset({_END})
    common: dict[str, Any] = {
        "model": one_of(*MODELS),
        "optimizer": one_of(*OPTIMIZERS),
        "batches": batches,
        "own_loss": draw(st.booleans()),
        "large": draw(st.booleans()),
    }
    options = one_of({}, {"microbatch_size": 2}, {"microbatch_size": 4}) | one_of({}, {"strict": False})
    options |= one_of({}, {"clip_grad": 0.1}, {"clip_grad": "own"})
    if draw(st.booleans()):
        return Program(
            keeps=tuple(draw(st.lists(_keeps(batches, 0), min_size=1, max_size=2))),
            consumer=one_of(*IN_PLACE),
            watch=one_of(None, at_the_end),
            options=options,
            **common,
        )
    # A stream that begins with such buffers refuses them.
    forks = draw(
        st.lists(st.integers(1, batches - 1), max_size=2 * (common["model"] != "aliasing buffers"), unique=True)
    )
    algorithms = draw(st.lists(st.sampled_from(ALGORITHMS), max_size=2, unique=True))
    options |= {"nonfinite": "skip"} if "spoils" in algorithms or draw(st.booleans()) else {}
    options |= one_of({}, {}, {"precision": "amp_fp16"}, {"precision": "amp_bf16"})
    options |= one_of({}, {}, {"evaluators": "own", "eval_interval": "2ba"})
    some = st.frozensets(st.sampled_from(EVENTS), min_size=1, max_size=4)
    return Program(
        keeps=tuple(draw(st.lists(_keeps(batches, len(forks)), min_size=1, max_size=4))),
        consumer=one_of(*IN_PLACE, *CONSUMERS),
        algorithms=tuple(algorithms),
        monitors=draw(st.booleans()),
        watch=draw(st.sampled_from([None, at_the_end, at_the_end | {_STEP}]) | some),
        forks=tuple(forks),
        options=options,
        **common,
    )
