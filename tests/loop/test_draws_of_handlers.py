"""Handlers, callbacks, loggers and metrics that draw from the global generators: by position, and put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithm import bind
from pure_loop.compile import interpreted
from pure_loop.random.authors import is_users
from pure_loop.stages.settings import StageSettings
from tests.support import problem
from tests.support.problem import cross_entropy, mlp, points
from tests.support.tiers import examples

numpy: Any = pytest.importorskip("numpy")

DATA = points(size=(5, 5, 5))  # in microbatches of 2
CHANGING = [Event.BATCH_START, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EPOCH_START]
BOUNDARIES = (Event.EPOCH_START, Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT)


def fit(start: Any = None, **options: Any) -> Any:
    return problem.fit(
        start, DATA, **{"optimizer": pl.optim.adamw(lr=0.1), "microbatch_size": 2, "strict": None, **options}
    )


def drawn(kind: str = "python") -> float:
    if kind == "torch":
        return float(torch.rand((), dtype=torch.float64))
    return random.random() if kind == "python" else float(numpy.random.rand())


def method(event: Event, kind: str = "python", name: str = "draws", log: list[Any] | None = None) -> pl.Algorithm:
    """Changes training by what it draws."""

    def draw(state: pl.State) -> pl.State:
        number = drawn(kind)
        if log is not None:
            log.append((event, state.timestamp.batch, number))
        if event is Event.AFTER_LOSS:
            return state.replace(loss=state.loss * (1 + number))
        field = "grads" if event is Event.AFTER_TRAIN_BATCH else "params"
        return state.replace(**{field: {key: each * (1 + number / 10) for key, each in getattr(state, field).items()}})

    return pl.Algorithm(name, {event: draw})


def global_state() -> tuple[Any, ...]:
    name, key, *rest = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), name, key.tolist(), rest


@contextlib.contextmanager
def unchanged_generators(seed: int) -> Iterator[None]:
    """Other global seeds, which stay as they are."""
    before = global_state()
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    inside = global_state()
    try:
        yield
        assert global_state() == inside
    finally:
        torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
        random.setstate(before[1])
        numpy.random.set_state((before[2], before[3], *before[4]))


def weights(state: pl.State) -> list[float]:
    return [float(number) for tensor in state.params.values() for number in tensor.flatten()]


def check_draws(event: Event, kind: str, **options: Any) -> None:
    """Equal runs under other global states; resumed from each boundary the rest is equal."""
    options |= {"algorithms": [method(event, kind)]}
    with unchanged_generators(1):
        pairs = list(fit(**options))
    kept = [state for at, state in pairs if at in BOUNDARIES]
    for seed, start in enumerate((None, *kept[:: max(1, len(kept) // 4)]), start=2):
        with unchanged_generators(seed):
            assert weights(pl.run(fit(start, **options))) == weights(pairs[-1][1]), start


@examples(8, 300)
@given(
    st.sampled_from(CHANGING),
    st.sampled_from(["torch", "python", "numpy"]),
    st.fixed_dictionaries(
        {},
        optional={
            "microbatch_size": st.sampled_from([None, 1, 3]),
            "donate": st.sampled_from(["auto", False]),  # States are kept
            "verify": st.just("1ba"),
            "strict": st.sampled_from([True, False, None]),
            "order": st.sampled_from(["current", "2021"]),
            "precision": st.just("amp_bf16"),
            "max_duration": st.sampled_from(["1ep", "4ba"]),
        },
    ),
)
def test_draws_are_reproducible_and_resume(event: Event, kind: str, options: dict[str, Any]) -> None:
    check_draws(event, kind, **options)


def test_unguarded_draws_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(StageSettings, "guard", nothing)
    with pytest.raises(AssertionError):
        check_draws(Event.AFTER_LOSS, "python")


def test_each_place_has_draws_of_its_own() -> None:
    """Microbatches, batches, epochs and names differ; what stands beside a method changes nothing of what it draws.

    SAM goes through the draws of a batch again, microbatch by microbatch.
    """
    logs: list[list[Any]] = [[], [], [], []]
    one, two, again, twice = (
        method(Event.AFTER_LOSS, "torch", name, log) for name, log in zip("abaa", logs, strict=True)
    )
    beside = {"callbacks": [lambda event, state: drawn() and None], "evaluators": {"val": DATA}, "eval_interval": "1ba"}
    pl.run(fit(algorithms=[one, two]))
    pl.run(fit(algorithms=[again], **beside))
    pl.run(fit(algorithms=[pl.algorithms.sam(rho=0.1), twice], max_duration="1ba"))
    numbers = [number for _, _, number in logs[0] + logs[1]]
    assert len(logs[0]) == 2 * 3 * 3
    assert len(set(numbers)) == len(numbers)
    assert logs[2] == logs[0]
    assert logs[3] == 2 * logs[0][:3]


class Draws(pl.Logger):
    def __init__(self) -> None:
        self.log: list[Any] = []

    def run_event(self, event: Event, state: pl.State, logger: Any) -> None:
        self.log += [(event, state.timestamp.batch, drawn(kind)) for kind in ("torch", "python", "numpy")]

    def log_metrics(self, metrics: Any, state: pl.State) -> None:
        drawn()


def test_callbacks_and_loggers_that_draw() -> None:
    """They change no training, and draw the same in each run, whatever is beside them."""
    plain, logs = weights(pl.run(fit())), []
    for seed, beside in enumerate(([], [lambda event, state: None], [lambda event, state: drawn() and None])):
        one, logger = Draws(), Draws()
        with unchanged_generators(seed):
            state = pl.run(fit(callbacks=[*beside, one], loggers=[logger], evaluators=DATA[:1]))
        assert weights(state) == plain
        logs.append((one.log, logger.log))
    assert logs[0] == logs[1] == logs[2]
    numbers = [number for log in logs[0] for _, _, number in log]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("ends", ["break", "error", "close"])
def test_generators_are_as_they_were_however_a_stream_ends(ends: str) -> None:
    for event in (Event.AFTER_LOSS, Event.EVAL_BATCH_END, Event.BATCH_END):

        def draw(at: Event, state: pl.State, event: Event = event) -> None:
            if at is event:
                torch.rand(1), random.random(), numpy.random.rand()
                if ends == "error":
                    raise RuntimeError

        with unchanged_generators(3), contextlib.suppress(RuntimeError):
            stream = fit(evaluators=DATA, callbacks=[draw])
            for at, _ in stream:
                if at is event and ends == "break":
                    break
                if at is event and ends == "close":
                    stream.close()


def bootstrap(name: str = "bootstrap") -> pl.Metric:
    """The mean of outputs drawn with replacement."""
    return pl.Metric(
        name,
        init=lambda: (torch.zeros(()), 0),
        update=lambda total, outputs, batch: (
            total[0] + outputs[torch.randint(len(outputs), (len(outputs),))].sum() + random.random(),
            total[1] + len(outputs),
        ),
        compute=lambda total: total[0] / total[1] + numpy.random.rand(),
        merge=lambda one, other: (one[0] + other[0], one[1] + other[1]),
    )


def test_metrics_that_draw() -> None:
    """In evaluations, as metrics of training, by ``evaluate``; a metric beside them changes nothing."""
    values = []
    for seed, beside in enumerate(([], [bootstrap("other")])):
        evaluators = {"val": pl.Evaluator(DATA, metrics=[*beside, bootstrap()], interval="1ba")}
        with unchanged_generators(seed):
            pairs = list(fit(evaluators=evaluators, train_metrics=[bootstrap()]))
            alone = pl.run(pl.evaluate(mlp(), evaluators, loss=cross_entropy))
        metrics = [state.metrics["val"] for event, state in pairs if event is Event.EVAL_END]
        values.append(
            [float(each["bootstrap"]) for each in (*metrics, alone.metrics["val"], pairs[-1][1].metrics["train"])]
        )
    assert values[0] == values[1]
    assert len(set(values[0])) == len(values[0])


def test_code_of_the_library_is_not_guarded() -> None:
    assert not is_users(pl.callbacks.LRMonitor())
    assert not is_users(pl.metrics.accuracy())
    assert is_users(pl.metrics.accuracy().on(outputs=lambda outputs: outputs))
    assert is_users(bootstrap())
    for algorithm in (pl.algorithms.ema(smoothing=0.9), pl.algorithms.label_smoothing()):
        assert all(handler.path is None for some in bind([algorithm]).values() for handler in some)


@pytest.mark.slow  # graphs
@pytest.mark.parametrize(
    "watch", [None, {"epoch_end"}, {"before_forward", "fit_end"}], ids=["all", "epochs", "forwards"]
)
def test_compiled_draws_are_those_of_eager_runs(watch: Any) -> None:
    """torch's; those of Python are refused in a graph, and run between graphs where that is asked for."""

    def run(kind: str, **more: Any) -> list[float]:
        def draw(state: pl.State) -> pl.State:
            number = torch.rand(()) if kind == "torch" else random.random()
            return state.replace(loss=state.loss * (1 + number))

        with interpreted():
            return weights(
                pl.run(fit(nn.Linear(4, 3), algorithms=[pl.Algorithm("d", {Event.AFTER_LOSS: draw})], **more))
            )

    start = torch.get_rng_state()
    found = []
    for kind, more in (
        ("torch", {}),
        ("torch", {"compile": True}),
        ("python", {}),
        ("python", {"compile": "where possible"}),
    ):
        torch.set_rng_state(start)
        found.append(run(kind, watch=watch, **more))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[3] == pytest.approx(found[2], rel=1e-4)
    if watch == {"epoch_end"}:
        with pytest.raises(pl.CompileError, match=r"random\.random"):
            run("python", compile=True, watch=watch)


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
