"""Every function of the user's that a run calls may draw from a global generator, and the run is what it was.

Tried: each place by itself and several at once; torch's, Python's and NumPy's generator; other states of the
generators around the run, which are found there afterwards; a run that resumes from any of its batches.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate

import pure_loop as pl
from pure_loop import Event
from pure_loop.stages.settings import StageSettings
from tests.support import problem
from tests.support.problem import cross_entropy, mlp, points
from tests.support.tiers import examples

numpy: Any = pytest.importorskip("numpy")

# Of callbacks and loggers, whatever is drawn changes nothing of the training.
OBSERVERS = ("callback", "logger")
PLACES = (
    *("algorithm", "when", "init", "metric", "train metric", "forward", "task forward", "validate", "loss"),
    *("dataset", "collate", "optimizer", "interval", "clip_grad", *OBSERVERS),
)
AT = [Event.BATCH_START, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EPOCH_START]


def drawn(kind: str = "python") -> float:
    if kind == "torch":
        return float(torch.rand((), dtype=torch.float64))
    return random.random() if kind == "python" else float(numpy.random.rand())


class Drawn:
    """Factors near 1 from one of the global generators, where a place is among those that draw."""

    def __init__(self, kind: str, places: Iterable[str], at: Event = Event.AFTER_LOSS) -> None:
        self.kind, self.places, self.at = kind, frozenset(places), at
        self.log: list[tuple[int, str, float]] = []  # what observers drew

    def factor(self, place: str) -> float:
        return 1 + drawn(self.kind) / 10 if place in self.places else 1.0

    def note(self, event: Event, state: pl.State, place: str) -> None:
        if event in (Event.AFTER_LOSS, Event.BATCH_END):
            self.log.append((state.timestamp.batch - (event is Event.BATCH_END), place, self.factor(place)))


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.linspace(-1, 1, 4) * (index + 1)
        return inputs * self.drawn.factor("dataset"), torch.full((3,), index / 8)


class Net(nn.Module):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.layers, self.drawn = mlp(), drawn

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs) * self.drawn.factor("forward")  # type: ignore[no-any-return]


class Noting(pl.Logger):
    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn

    def run_event(self, event: Event, state: pl.State, logger: Any) -> None:
        self.drawn.note(event, state, "logger")


def run_of(drawn: Drawn, start: Any = None, **options: Any) -> pl.Stream:
    factor = drawn.factor

    def update(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
        rate = 0.1 * factor("optimizer")
        return {name: tensor - rate * grads[name] for name, tensor in params.items()}, opt_state

    def collate(rows: Any) -> Any:
        inputs, targets = default_collate(rows)
        return inputs * factor("collate"), targets

    def scaled(state: pl.State) -> pl.State:
        by = state.algorithm_state["scaled"] * factor("algorithm")
        if drawn.at is Event.AFTER_LOSS:
            return state.replace(loss=state.loss * by)
        field = "grads" if drawn.at is Event.AFTER_TRAIN_BATCH else "params"
        return state.replace(**{field: {name: each * by for name, each in getattr(state, field).items()}})

    def loader() -> Any:
        return DataLoader(Rows(drawn), batch_size=2, shuffle=True, collate_fn=collate)

    def metric(place: str) -> pl.Metric:
        return pl.metrics.mean(lambda outputs, batch: outputs.mean(1) * factor(place), "drawn")

    due, init = (lambda state: factor("when") < 1.05), (lambda state: 1.05 * factor("init"))
    seldom = pl.Evaluator(loader(), metrics=[metric("metric")], interval=lambda state: factor("interval") < 1.07)
    settings: dict[str, Any] = {
        "evaluators": {"val": seldom},
        "loss": pl.Task(
            forward=lambda model, batch: model(batch[0]) * factor("task forward"),
            validate=lambda model, batch: model(batch[0]) * factor("validate"),
            loss=lambda outputs, batch: functional.mse_loss(outputs, batch[1]) * factor("loss"),
        ),
        "train_metrics": [metric("train metric")],
        "callbacks": [lambda event, state: drawn.note(event, state, "callback")],
        "loggers": [Noting(drawn)],
        "optimizer": pl.Optimizer(name="own", init=lambda params: {}, update=update, lr=lambda timestamp: 0.1),
        "clip_grad": lambda grads, params: {name: gradient * factor("clip_grad") for name, gradient in grads.items()},
    }
    algorithms = [pl.Algorithm("scaled", {drawn.at: scaled}, when=due, init=init)]
    start = Net(drawn) if start is None else start
    # States are kept.
    return problem.fit(start, loader(), algorithms, **{"strict": None, "donate": False} | settings | options)


def states() -> tuple[Any, ...]:
    name, words, *rest = numpy.random.get_state()
    return random.getstate(), (name, words.tobytes(), *rest), torch.get_rng_state().tolist()


@contextlib.contextmanager
def around(seed: int) -> Iterator[None]:
    """Other states of the global generators, which are found there afterwards."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    inside = states()
    try:
        yield
        assert states() == inside, "another state than before the run"
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])


def trained(drawn: Drawn, seed: int, start: pl.State | None = None, **options: Any) -> list[pl.State]:
    """The States at the end of each batch, and the last one."""
    with around(seed):
        stream = run_of(drawn, start, **options)
        return [state for event, state in stream if event in (Event.BATCH_END, Event.FIT_END)]


def numbers(state: pl.State) -> tuple[Any, ...]:
    values = [tensor.flatten().tolist() for tensor in state.params.values()]
    return values, {label: {key: float(value) for key, value in some.items()} for label, some in state.metrics.items()}


def check(kind: str, places: Iterable[str], kept: int, at: Event, **options: Any) -> None:
    first, again, resumed = (Drawn(kind, places, at) for _ in range(3))
    stream = trained(first, 1, **options)
    assert list(map(numbers, trained(again, 2, **options))) == list(map(numbers, stream))
    assert first.log == again.log
    rest = trained(resumed, 3, stream[kept], **options)
    assert numbers(rest[-1]) == numbers(stream[-1])
    assert resumed.log == [entry for entry in first.log if entry[0] > kept]


def test_each_place_draws_and_the_run_is_what_it_was() -> None:
    without = Drawn("python", ())
    plain = list(map(numbers, trained(without, 1)))
    for place in PLACES:
        noted = Drawn("python", [place])
        drawing = list(map(numbers, trained(noted, 2)))
        assert noted.log != without.log if place in OBSERVERS else drawing != plain, place
    check("python", PLACES, 4, Event.AFTER_LOSS)


OPTIONS = {
    "microbatch_size": st.sampled_from([None, 1]),
    "verify": st.just("1ba"),
    "strict": st.sampled_from([True, False]),
    "order": st.just("2021"),
    "precision": st.just("amp_bf16"),
    "max_duration": st.just("6ba"),
}


@examples(8, 300)
@given(
    st.sampled_from(["torch", "python", "numpy"]),
    st.sets(st.sampled_from(PLACES), min_size=1),
    st.integers(0, 4),
    st.sampled_from(AT),
    st.fixed_dictionaries({}, optional=OPTIONS),
)
def test_several_places_draw(kind: str, places: set[str], kept: int, at: Event, options: dict[str, Any]) -> None:
    check(kind, places, kept, at, **options)


def test_unguarded_draws_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(StageSettings, "guard", nothing)
    with pytest.raises(AssertionError):
        check("python", ["algorithm"], 1, Event.AFTER_LOSS)


def test_generators_are_as_they_were_however_a_stream_ends() -> None:
    for how, event in itertools.product(("break", "close", "error"), (Event.AFTER_LOSS, Event.EVAL_BATCH_END)):

        def draws(at: Event, state: pl.State, how: str = how, event: Event = event) -> None:
            if at is event and sum(drawn(kind) for kind in ("torch", "python", "numpy")) and how == "error":
                raise KeyError

        with around(1), contextlib.suppress(KeyError):
            pairs = fit(callbacks=[draws], evaluators=points(1), eval_interval="1ba")
            _ = next(at for at, _ in pairs if at is event), how == "close" and pairs.close()


def test_what_observers_and_metrics_draw_does_not_depend_on_what_stands_beside_them() -> None:
    found = []
    for beside in (0, 1):
        noted = Drawn("python", [*OBSERVERS, "metric"])
        mean = lambda outputs, batch, by=noted: outputs.mean(1) * by.factor("metric")  # noqa: E731
        metrics = [pl.metrics.mean(mean, name) for name in ["other"] * beside + ["drawn"]]
        callbacks = [*[lambda event, state: drawn() and None] * beside, partial(noted.note, place="callback")]
        evaluators, loggers = {"val": pl.Evaluator(points(1), metrics=metrics)}, [Noting(noted)]
        with around(beside):
            state = pl.run(fit(train_metrics=metrics[-1:], evaluators=evaluators, callbacks=callbacks, loggers=loggers))
        found.append((noted.log, [float(state.metrics[label]["drawn"]) for label in ("val", "train")]))
    assert found[0] == found[1]


def test_an_optimizer_draws_alike_in_place_and_on_copies() -> None:
    sgd = pl.optim.sgd(lr=0.1)

    def noisy(step: Any) -> Any:
        return lambda grads, *rest: step({n: g + torch.randn_like(g) for n, g in grads.items()}, *rest)

    own = pl.Optimizer(name="noisy", init=sgd.init, update=noisy(sgd.update), overwrite=noisy(sgd.overwrite), lr=sgd.lr)
    found = []
    for seed, donate in ((1, "auto"), (2, "auto"), (3, False)):
        with around(seed):
            found.append(numbers(pl.run(fit(optimizer=own, donate=donate))))
    assert found[0] == found[1] == found[2]


def fit(**options: Any) -> Any:
    return problem.fit(data=points(size=(5, 5, 5)), **{"microbatch_size": 2, "strict": None, **options})


def logging(name: str, log: list[float]) -> pl.Algorithm:
    def draw(state: pl.State) -> pl.State:
        log.append(drawn("torch"))
        return state.replace(loss=state.loss * (1 + log[-1]))

    return pl.Algorithm(name, {Event.AFTER_LOSS: draw})


def test_each_place_has_draws_of_its_own() -> None:
    """Microbatches, batches, epochs and names differ; what stands beside a method changes nothing of what it draws.

    SAM goes through the draws of a batch again, microbatch by microbatch.
    """
    logs: list[list[float]] = [[], [], [], []]
    one, two, again, twice = (logging(name, log) for name, log in zip("abaa", logs, strict=True))
    beside = {"callbacks": [lambda event, state: drawn() and None], "evaluators": {"val": points()}}
    pl.run(fit(algorithms=[one, two]))
    pl.run(fit(algorithms=[again], eval_interval="1ba", **beside))
    pl.run(fit(algorithms=[pl.algorithms.sam(rho=0.1), twice], max_duration="1ba"))
    assert len(logs[0]) == 2 * 3 * 3
    assert len({*logs[0], *logs[1]}) == 2 * len(logs[0])
    assert logs[2] == logs[0]
    assert logs[3] == 2 * logs[0][:3]


def test_a_forward_that_draws_in_an_evaluation() -> None:
    found = []
    for seed in (0, 0, 1):
        draws = Drawn("numpy", ["forward"])
        with around(seed + 1):
            metric = [pl.metrics.mean(lambda outputs, batch: outputs.mean(1), "drawn")]
            evaluators = {"val": pl.Evaluator(DataLoader(Rows(draws), batch_size=2), metrics=metric)}
            found.append(numbers(pl.run(pl.evaluate(Net(draws), evaluators, seed=seed))))
    assert found[0] == found[1] != found[2]


@pytest.mark.timeout(60)
def test_a_callback_may_wait_for_a_thread_that_evaluates() -> None:
    """The thread draws by the generators that were seeded for the callback, and waited for them."""
    found: list[pl.State] = []
    with ThreadPoolExecutor(1) as executor:

        def evaluate_there(event: Event, state: pl.State) -> None:
            if event == "epoch_checkpoint":
                stream = pl.evaluate(state, {"val": points(1)}, loss=cross_entropy)
                found.append(executor.submit(pl.run, stream).result(timeout=30))

        pl.run(fit(callbacks=[evaluate_there]))
    assert [len(state.metrics) for state in found] == [1, 1]
