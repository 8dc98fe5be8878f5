"""Where the reference implementation (MosaicML Composer) is wrong, measured on it: a test each that ours is right.

What concerns checkpoints on disk comes with them.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import BOUNDARIES
from tests.architecture.test_every_method import CALLBACKS, LOGGERS, OFFLINE, lacking
from tests.support import streams as sameness
from tests.support.models import batches, mlp, plain
from tests.support.served import module_of, required

DATA = batches((6, 6, 5), seed=2)


def module(make: Any = plain) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made: nn.Module = make()
        return made


def fit(start: Any = None, data: Any = DATA, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "loss": functional.cross_entropy,
        "optimizer": pl.optim.sgd(lr=0.1),
        "max_duration": "2ep",
        **changes,
    }
    return pl.fit(module() if start is None else start, data, **arguments)


def test_the_learning_rate_does_not_lag() -> None:
    """A linear decay from 1 to 0 over 4 batches uses 1, 0.75, 0.5, 0.25; there it is 1, 1, 0.75, 0.5."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    stream = pl.fit(
        model,
        [(torch.ones(1, 1), torch.zeros(1, 1))] * 4,
        loss=lambda outputs, targets: outputs.mean(),  # its gradient is 1, so a step is the learning rate
        optimizer=pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "4ba")),
        max_duration="4ba",
    )
    weights = [0.0, *(state.params["weight"].item() for event, state in stream if event is Event.BATCH_END)]
    assert [before - after for before, after in itertools.pairwise(weights)] == [1.0, 0.75, 0.5, 0.25]


def test_a_shuffling_loader_and_dropout_go_on_exactly_in_a_later_epoch() -> None:
    """There, resuming in the middle of epoch 1 silently trains on other batches."""
    samples = TensorDataset(torch.randn(20, 4), torch.randint(3, (20,)))

    def stream(start: Any) -> Any:
        return fit(start, DataLoader(samples, batch_size=4, shuffle=True), max_duration="3ep")

    whole = list(stream(module(mlp)))
    epochs = [[s.batch[0] for e, s in whole if e is Event.BATCH_START and s.timestamp.epoch == k] for k in range(3)]
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1])), "epochs are shuffled anew"
    index = next(
        i
        for i, (e, s) in enumerate(whole)
        if e is Event.BATCH_END and (s.timestamp.epoch, s.timestamp.batch_in_epoch) == (1, 2)
    )
    torch.manual_seed(123)  # going on doesn't depend on the global random state either
    sameness.assert_same_stream(list(stream(whole[index][1]))[1:], whole[index + 1 :], "in the middle of epoch 1")


@pytest.mark.parametrize(
    "algorithm", [pl.algorithms.sam(rho=0.1, interval=2), pl.algorithms.ema(half_life="2ba")], ids=lambda a: a.name
)
def test_algorithms_with_a_memory_go_on_exactly(algorithm: pl.Algorithm) -> None:
    """There, SAM and EMA keep their memory in objects, which a checkpoint doesn't hold."""
    changes: dict[str, Any] = {"algorithms": [algorithm], "evaluators": DATA[:1], "microbatch_size": 3}
    whole = list(fit(module(mlp), **changes))
    for index, (event, kept) in enumerate(whole):
        if event in BOUNDARIES:
            again = list(fit(kept, **changes))
            sameness.assert_same_stream(
                again[1:], whole[len(whole) - len(again) + 1 :], f"from {event.name} at {index}"
            )


@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_a_dict_of_losses_is_not_rescaled_in_place(microbatch_size: int | None) -> None:
    """There, what AFTER_LOSS showed is multiplied in place before AFTER_BACKWARD."""

    def loss(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        part = functional.cross_entropy(outputs, targets)
        penalty = outputs.square().mean()
        return {"total": part + penalty, "part": part, "penalty": penalty}

    given: dict[str, Tensor] = {}
    shown: dict[str, Tensor] = {}
    batch_losses = []
    for event, state in fit(loss=loss, microbatch_size=microbatch_size):
        if event is Event.AFTER_LOSS:
            given, shown = state.loss, {name: value.detach().clone() for name, value in state.loss.items()}
        elif event is Event.AFTER_BACKWARD:
            for name, value in shown.items():
                assert torch.equal(given[name].detach(), value), f"{name} changed in the State of AFTER_LOSS"
                assert torch.equal(state.loss[name], value), f"{name} is another one at AFTER_BACKWARD"
        elif event is Event.BATCH_END:
            batch_losses.append(state.loss)
    whole = [state.loss for event, state in fit(loss=loss) if event is Event.BATCH_END]
    for name in ("total", "part", "penalty"):
        torch.testing.assert_close(batch_losses[0][name], whole[0][name])


def test_a_batch_changed_before_it_is_split_is_the_batch_that_is_split() -> None:
    """There, changing the batch at BEFORE_TRAIN_BATCH is ignored: it was split before."""

    @pl.algorithm(Event.BEFORE_TRAIN_BATCH)
    def first_three(state: pl.State) -> pl.State:
        return state.replace(batch=tuple(part[:3] for part in state.batch))

    pairs = list(fit(algorithms=[first_three], microbatch_size=2))
    microbatches = [state.microbatch for event, state in pairs if event is Event.BEFORE_FORWARD]
    assert [len(inputs) for inputs, _ in microbatches] == [2, 1] * 6
    assert torch.equal(torch.cat([inputs for inputs, _ in microbatches[:2]]), DATA[0][0][:3])
    cut = [tuple(part[:3] for part in batch) for batch in DATA]
    wanted = pl.run(fit(data=cut, microbatch_size=2)).params
    sameness.assert_same(dict(pairs[-1][1].params), dict(wanted), "trained on the changed batches")


def test_two_callbacks_of_one_class_are_two() -> None:
    """There, they overwrite each other in a checkpoint."""

    class Counter(pl.Callback):
        def __init__(self, step: int) -> None:
            self.step, self.count = step, 0

        def batch_end(self, state: pl.State, logger: Any) -> None:
            self.count += self.step

    one, two = Counter(1), Counter(10)
    memory = pl.loggers.InMemoryLogger(), pl.loggers.InMemoryLogger()
    rates = [pl.callbacks.LRMonitor(name="one"), pl.callbacks.LRMonitor(name="two")]
    pl.run(fit(callbacks=[one, two, *rates], loggers=memory))
    assert (one.count, two.count) == (6, 60)
    assert memory[0].series("one") == memory[1].series("two")


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400.0), ("90s", 90.0), ("1h30m", 5400.0), ("1d2h", 93600.0)])
def test_wall_clock_times_are_read(text: str, seconds: float) -> None:
    """There, "90m" and "90s" are refused."""
    assert pl.Time(text) == pl.Time(seconds, "s")
    assert pl.run(fit(max_duration=text, clock=iter(range(0, 10**6, 3000)).__next__)).timestamp.total_seconds >= seconds


@pytest.mark.parametrize("text", ["", " ", "s", "h"])
def test_no_time_is_no_time(text: str) -> None:
    """There, "" is zero seconds."""
    with pytest.raises(pl.TimeFormatError, match="1h30m"):
        pl.Time(text)
    with pytest.raises(pl.TimeFormatError, match="max_duration"):
        fit(max_duration=text)


def test_a_step_whose_sam_loss_is_exactly_zero_is_taken() -> None:
    """There, a second loss of 0.0 counts as no loss, and the step is left out."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - 1.0).sum()  # 0 at the perturbed weight 0.5 + rho, with gradient 1

    stream = pl.fit(
        model,
        [(torch.ones(1, 1), torch.zeros(1, 1))],
        loss=loss,
        optimizer=pl.optim.sgd(lr=0.25),
        max_duration="1ba",
        algorithms=[pl.algorithms.sam(rho=0.5)],
    )
    losses = []
    watching = pl.algorithm(Event.AFTER_LOSS, name="watch")(lambda state: (losses.append(state.loss.item()), state)[1])
    state = pl.run(stream)
    assert state.params["weight"].item() == 0.25
    pl.run(
        pl.fit(
            model,
            [(torch.ones(1, 1), torch.zeros(1, 1))],
            loss=loss,
            optimizer=pl.optim.sgd(lr=0.25),
            max_duration="1ba",
            algorithms=[pl.algorithms.sam(rho=0.5), watching],
        )
    )
    assert losses == [-0.5, 0.0]


def usable(methods: list[Any], folder: Path) -> list[Any]:
    """Those that this machine can run, and that serve any data."""
    serving = [method for method in methods if getattr(module_of(method), "SERVES", None) != "images"]
    return [method(**required(method, folder / method.__name__)) for method in serving if not lacking(method, folder)]


@pytest.mark.slow
def test_built_in_callbacks_and_loggers_change_no_state(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, five built-in callbacks change the state."""
    monkeypatch.chdir(tmp_path)
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("slack_sdk.WebClient.chat_postMessage", lambda *_, **message: message)
    changes: dict[str, Any] = {"evaluators": {"val": DATA}, "microbatch_size": 3, "precision": "amp_fp16"}
    changes["clip_grad"] = 100.0  # with which there is a norm of gradients in each State; GradMonitor asks for it
    alone = list(fit(module(mlp), **changes))
    callbacks, loggers = usable(CALLBACKS, tmp_path), usable(LOGGERS, tmp_path)
    observed = list(fit(module(mlp), callbacks=callbacks, loggers=loggers, strict=True, **changes))
    sameness.assert_same_stream(observed, alone, "with every built-in callback and logger")
    assert len(list(tmp_path.glob("**/*.safetensors"))) > 1
    assert len(loggers) > 5


def test_evaluation_leaves_training_weights_alone_with_ema() -> None:
    """There, EMA leaves other weights behind when a checkpoint is saved."""
    average = pl.algorithms.ema(half_life="2ba")
    with_evaluation = fit(module(mlp), algorithms=[average], evaluators=DATA, eval_interval="1ba")
    trained = [s.params for e, s in with_evaluation if e in (Event.BATCH_END, Event.BATCH_CHECKPOINT)]
    alone = fit(module(mlp))
    wanted = [s.params for e, s in alone if e in (Event.BATCH_END, Event.BATCH_CHECKPOINT)]
    for given, params in zip(trained, wanted, strict=True):
        sameness.assert_same(dict(given), dict(params), "weights")


@pytest.mark.parametrize(("epochs", "sizes", "microbatch_size"), [(2, (6, 6, 6), 2), (1, (8,), 3), (3, (4, 4), 4)])
def test_the_published_counts_of_events(epochs: int, sizes: tuple[int, ...], microbatch_size: int) -> None:
    """E epochs, S steps, M = S * ceil(batch / microbatch): the published counts, from what is yielded."""
    rounds, evaluators = epochs, {"a": batches((2, 2), seed=1), "b": batches((3,), seed=1)}
    stream = fit(
        data=batches(sizes, seed=0), max_duration=f"{epochs}ep", microbatch_size=microbatch_size, evaluators=evaluators
    )
    events = [event for event, _ in stream]
    steps = epochs * len(sizes)
    microbatches = steps * math.ceil(sizes[0] / microbatch_size)
    once = ("INIT", "BEFORE_LOAD", "AFTER_LOAD", "FIT_START", "FIT_END")
    every_epoch = ("EPOCH_START", "EPOCH_END", "EPOCH_CHECKPOINT")
    every_step = (
        "AFTER_DATALOADER",
        "BATCH_START",
        "BEFORE_TRAIN_BATCH",
        "AFTER_TRAIN_BATCH",
        "BATCH_END",
        "BATCH_CHECKPOINT",
    )
    every_microbatch = (
        "BEFORE_FORWARD",
        "AFTER_FORWARD",
        "BEFORE_LOSS",
        "AFTER_LOSS",
        "BEFORE_BACKWARD",
        "AFTER_BACKWARD",
    )
    wanted = {
        **dict.fromkeys(once, 1),
        **dict.fromkeys(every_epoch, epochs),
        **dict.fromkeys(every_step, steps),
        **dict.fromkeys(every_microbatch, microbatches),
        "BEFORE_DATALOADER": steps + epochs,
        "EVAL_START": rounds * len(evaluators),
        "EVAL_END": rounds * len(evaluators),
        "EVAL_BATCH_START": rounds * 3,
        "EVAL_BATCH_END": rounds * 3,
        "EVAL_BEFORE_FORWARD": rounds * 3,
        "EVAL_AFTER_FORWARD": rounds * 3,
        "EVAL_BEFORE_ALL": rounds,
        "EVAL_AFTER_ALL": rounds,
    }
    assert {event.name: events.count(event) for event in Event if events.count(event)} == wanted
