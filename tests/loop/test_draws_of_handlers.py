"""Handlers, callbacks and metrics that draw from global generators: by position, resumed exactly, and put back.

Tried: handlers at events of batches, microbatches, evaluations and epochs, their ``when`` and ``init``; callbacks,
loggers and metrics, their own and torchmetrics'; intervals that are functions; torch's, Python's and NumPy's
generator; the end of a stream by its last event, by ``break`` and by an error; eager, compiled, verified, ``donate``;
SAM, which goes through a batch twice; another method, callback or evaluator beside the one that draws.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithm import bind
from pure_loop.random.authors import is_users
from pure_loop.stages.settings import StageSettings
from tests.support.runs import cross_entropy, mlp, points

numpy: Any = pytest.importorskip("numpy")

DATA = [
    (torch.randn(5, 3, generator=torch.Generator().manual_seed(i)), torch.ones(5, 1) * i)  # 5 in microbatches of 2
    for i in range(3)
]
OPTIONS: dict[str, Any] = {
    "loss": mse_loss,
    "optimizer": pl.optim.adamw(lr=0.1),
    "max_duration": "2ep",
    "microbatch_size": 2,
    "clock": lambda: 0.0,
}
CHANGING = [Event.BATCH_START, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EPOCH_START]
ALL = [event for event in Event if not event.is_predict and "STANDALONE" not in event.name]
BOUNDARIES = (Event.EPOCH_START, Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT)


def model() -> nn.Module:
    module = nn.utils.skip_init(nn.Linear, 3, 1)  # without a draw
    nn.init.constant_(module.weight, 0.1)
    nn.init.constant_(module.bias, 0.2)
    return module


def drawn(kind: str) -> float:
    if kind == "torch":
        return float(torch.rand((), dtype=torch.float64))
    return random.random() if kind == "python" else float(numpy.random.rand())


def method(event: Event, kind: str, name: str = "draws", log: list[Any] | None = None) -> pl.Algorithm:
    """Changes training by what it draws."""

    def draw(state: pl.State) -> pl.State:
        number = drawn(kind)
        if log is not None:
            log.append((event, state.timestamp.batch, number))
        if event is Event.AFTER_LOSS:
            return state.replace(loss=state.loss * (1 + number))  # type: ignore[operator]
        if event is Event.AFTER_TRAIN_BATCH:
            return state.replace(grads={key: gradient * (1 + number) for key, gradient in state.grads.items()})
        factor = 1 + number / 10
        return state.replace(params={key: tensor * factor for key, tensor in state.params.items()})

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
    options = OPTIONS | options
    kept, results = [], []
    for seed in (1, 2):
        with unchanged_generators(seed):
            for at, state in pl.fit(model(), DATA, algorithms=[method(event, kind)], **options):
                if at in BOUNDARIES and seed == 1:
                    kept.append(state)
            results.append(weights(state))
    assert results[0] == results[1]
    for seed, state in enumerate(kept, start=3):
        with unchanged_generators(seed):
            resumed = pl.run(pl.fit(state, DATA, algorithms=[method(event, kind)], **options))
        assert weights(resumed) == results[0], state.position


KINDS = st.sampled_from(["torch", "python", "numpy"])


@settings(max_examples=5)
@given(st.sampled_from(CHANGING), KINDS)
def test_draws_are_reproducible_and_resume(event: Event, kind: str) -> None:
    check_draws(event, kind)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.sampled_from(CHANGING),
    KINDS,
    st.fixed_dictionaries(
        {},
        optional={
            "microbatch_size": st.sampled_from([None, 1, 3]),
            "donate": st.sampled_from(["auto", False]),  # States are kept
            "verify": st.just("1ba"),
            "strict": st.sampled_from([True, False, None]),
            "order": st.sampled_from(["current", "2021"]),
            "precision": st.just("amp_bf16"),
            "max_duration": st.sampled_from(["1ep", "4ba", "3ep"]),
        },
    ),
)
def test_draws_are_reproducible_in_any_run(event: Event, kind: str, options: dict[str, Any]) -> None:
    check_draws(event, kind, **options)


def test_unguarded_draws_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(StageSettings, "guard", nothing)
    with pytest.raises(AssertionError):
        check_draws(Event.AFTER_LOSS, "python")


def test_each_place_has_draws_of_its_own() -> None:
    """Microbatches, batches, epochs and names differ; what stands beside a method changes nothing of what it draws."""
    log: list[Any] = []
    other: list[Any] = []
    first = method(Event.AFTER_LOSS, "torch", "one", log)
    pl.run(pl.fit(model(), DATA, algorithms=[first, method(Event.AFTER_LOSS, "torch", "two", other)], **OPTIONS))
    numbers = [number for _, _, number in log + other]
    assert len(log) == 2 * 3 * 3
    assert len(set(numbers)) == len(numbers)

    def watch(event: Event, state: pl.State) -> None:
        random.random()
        torch.rand(3)

    again: list[Any] = []
    more: dict[str, Any] = {"callbacks": [watch], "evaluators": {"val": DATA}, "eval_interval": "1ba"}
    pl.run(pl.fit(model(), DATA, algorithms=[method(Event.AFTER_LOSS, "torch", "one", again)], **(OPTIONS | more)))
    assert again == log


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_callbacks_and_loggers_that_draw(kind: str) -> None:
    """They change no training, and draw the same in each run, whatever is beside them; the generators are put back."""

    class Draws(pl.Logger):
        def __init__(self) -> None:
            self.log: list[Any] = []

        def run_event(self, event: Event, state: pl.State, logger: Any) -> None:
            self.log.append((event, state.timestamp.batch, drawn(kind)))

        def log_metrics(self, metrics: Any, state: pl.State) -> None:
            drawn(kind)

    plain = weights(pl.run(pl.fit(model(), DATA, **OPTIONS)))
    logs = []
    for seed, beside in enumerate(([], [lambda event, state: None], [lambda event, state: drawn(kind) and None])):
        one, logger = Draws(), Draws()
        more: dict[str, Any] = {"callbacks": [*beside, one], "loggers": [logger], "evaluators": DATA[:1]}
        with unchanged_generators(seed):
            state = pl.run(pl.fit(model(), DATA, **(OPTIONS | more)))
        assert weights(state) == plain
        logs.append((one.log, logger.log))
    assert logs[0] == logs[1] == logs[2]
    numbers = [number for log in logs[0] for _, _, number in log]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("ends", ["normally", "break", "error", "close"])
@pytest.mark.parametrize("event", [Event.AFTER_LOSS, Event.EVAL_BATCH_END, Event.BATCH_END])
def test_generators_are_as_they_were(ends: str, event: Event) -> None:
    def draw(at: Event, state: pl.State) -> None:
        if at is event:
            torch.rand(1), random.random(), numpy.random.rand()
            if ends == "error":
                raise RuntimeError

    with unchanged_generators(3), contextlib.suppress(RuntimeError):
        stream = pl.fit(model(), DATA, evaluators=DATA, callbacks=[draw], **OPTIONS)
        for at, _ in stream:
            if at is event and ends == "break":
                break
            if at is event and ends == "close":
                stream.close()


def test_whens_and_first_states_that_draw() -> None:
    def run() -> Any:
        seen: list[int] = []

        def note(state: pl.State) -> pl.State:
            seen.append(state.timestamp.batch)
            return state

        sometimes = pl.Algorithm(
            "sometimes",
            {Event.BATCH_END: note},
            init=lambda state: torch.rand(2),
            when=lambda state: random.random() < 0.5,
        )
        state = pl.run(pl.fit(model(), DATA, algorithms=[sometimes], **(OPTIONS | {"max_duration": "8ep"})))
        return seen, state.algorithm_state["sometimes"].tolist()

    results = []
    for seed in (1, 2):
        with unchanged_generators(seed):
            results.append(run())
    assert results[0] == results[1]
    assert 0 < len(results[0][0]) < 24


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
    values, train = [], []
    for seed, beside in enumerate(([], [bootstrap("other")])):
        metrics = [*beside, bootstrap()]
        more: dict[str, Any] = {"evaluators": {"val": pl.Evaluator(DATA, metrics=metrics, interval="1ba")}}
        with unchanged_generators(seed):
            states = [s for e, s in pl.fit(model(), DATA, **(OPTIONS | more)) if e is Event.EVAL_END]
            alone = pl.run(pl.evaluate(model(), more["evaluators"], loss=mse_loss))
        values.append([float(s.metrics["val"]["bootstrap"]) for s in [*states, alone]])
        with unchanged_generators(seed):
            state = pl.run(pl.fit(model(), DATA, train_metrics=[bootstrap()], **OPTIONS))
        train.append(float(state.metrics["train"]["bootstrap"]))
    assert values[0] == values[1]
    assert len(set(values[0])) == len(values[0])
    assert train[0] == train[1]


def test_metrics_of_torchmetrics_that_draw() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    values = []
    for seed in (1, 2):
        bootstrapped = torchmetrics.BootStrapper(torchmetrics.MeanSquaredError(), num_bootstraps=3)
        try:
            metric = pl.metrics.from_torchmetrics(bootstrapped)
        except pl.ArgumentError:
            return  # refused
        with unchanged_generators(seed):
            state = pl.run(pl.evaluate(model(), {"val": pl.Evaluator(DATA, metrics=[metric])}, loss=mse_loss))
        values.append({key: float(value) for key, value in state.metrics["val"]["BootStrapper"].items()})
    assert values[0] == values[1]


def test_sam_goes_through_the_draws_of_a_batch_again() -> None:
    """The second gradient of a batch has the numbers of the first, microbatch by microbatch."""
    log: list[Any] = []
    algorithms = [pl.algorithms.sam(rho=0.1), method(Event.AFTER_LOSS, "python", log=log)]
    pl.run(pl.fit(model(), DATA, algorithms=algorithms, **(OPTIONS | {"max_duration": "1ba"})))
    assert len(log) == 6
    assert log[:3] == log[3:]


@pytest.mark.slow
@pytest.mark.parametrize("watch", [None, {"epoch_end"}, {"before_forward", "fit_end"}, {"after_loss", "fit_end"}])
def test_compiled_draws_are_those_of_eager_runs(watch: Any) -> None:
    """torch's; those of Python and NumPy are refused in a graph, and run between graphs where that is asked for."""

    def run(kind: str, **more: Any) -> list[float]:
        def draw(state: pl.State) -> pl.State:
            number = torch.rand(()) if kind == "torch" else random.random()
            return state.replace(loss=state.loss * (1 + number))  # type: ignore[operator]

        def scale(state: pl.State) -> pl.State:
            return state.replace(grads={key: each * torch.rand(()) for key, each in state.grads.items()})

        algorithm = pl.Algorithm("draws", {Event.AFTER_LOSS: draw, Event.AFTER_TRAIN_BATCH: scale})
        return weights(pl.run(pl.fit(model(), DATA, algorithms=[algorithm], **(OPTIONS | more))))

    assert run("torch", compile=True, watch=watch) == pytest.approx(run("torch"), rel=1e-5)
    assert run("python", compile="where possible", watch=watch) == pytest.approx(run("python"), rel=1e-5)
    if watch == {"epoch_end"}:
        with pytest.raises(pl.CompileError, match=r"random\.random"):
            run("python", compile=True, watch=watch)


def test_code_of_the_library_is_not_guarded() -> None:
    assert not is_users(pl.callbacks.LRMonitor())
    assert not is_users(pl.metrics.accuracy())
    assert is_users(pl.metrics.accuracy().on(outputs=lambda outputs: outputs))
    assert is_users(bootstrap())
    for algorithm in (pl.algorithms.ema(smoothing=0.9), pl.algorithms.label_smoothing()):
        assert all(handler.path is None for some in bind([algorithm]).values() for handler in some)


@pytest.mark.timeout(60)
def test_a_callback_may_wait_for_a_thread_that_evaluates() -> None:
    """The thread draws by the generators that were seeded for the callback, and waited for them."""
    with ThreadPoolExecutor(1) as executor:

        def evaluate_there(event: Event, state: pl.State) -> None:
            if event == "epoch_checkpoint":
                stream = pl.evaluate(state, {"val": points(1)}, loss=cross_entropy)
                found.append(executor.submit(pl.run, stream).result(timeout=30))

        found: list[pl.State] = []
        pl.run(
            pl.fit(
                mlp(),
                points(),
                loss=cross_entropy,
                optimizer=pl.optim.sgd(lr=0.1),
                max_duration="2ep",
                callbacks=[evaluate_there],
            )
        )
    assert [len(state.metrics) for state in found] == [1, 1]
