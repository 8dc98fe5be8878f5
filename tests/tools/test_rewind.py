"""``FlightRecorder`` and ``pl.rewind``: each event of each batch of a recorded run comes back, bit for bit."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import FlightRecorder
from pure_loop.checkpoint.flight import Flight, line_of, read_flight
from pure_loop.errors import RewindError
from pure_loop.testing.comparison import differences
from pure_loop.time import Timestamp
from tests.support.runs import convnet, images, mlp, points, stream
from tests.support.worlds import pool


def record(folder: Path, data: Any = None, **settings: Any) -> list[Any]:
    recorder = FlightRecorder(folder, **{"keep": "4ba", "digest": "1ba", **settings.pop("recorder", {})})
    return list(stream(convnet(), data or images(), callbacks=[recorder], **settings))


def back(folder: Path, when: Any, event: Any, data: Any = None, **settings: Any) -> Any:
    options = {"loss": torch.nn.functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep"}
    options |= {"clock": lambda: 0.0, "strict": True}
    return pl.rewind(folder, when, event, convnet(), data or images(), **{**options, **settings})


def test_a_run_that_was_resumed_adds_to_its_journal(tmp_path: Path) -> None:
    whole = list(stream(convnet(), images(), max_duration="3ep"))
    half = pl.run(stream(convnet(), images(), callbacks=[FlightRecorder(tmp_path, keep="2ba")], max_duration="1ep"))
    pl.run(stream(half, images(), callbacks=[FlightRecorder(tmp_path, keep="2ba")], max_duration="3ep"))
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines if "batch" in line] == list(range(1, 10))
    event, state = next(back(tmp_path, "7ba", "after_backward", max_duration="3ep"))
    wanted = [item for at, item in whole if at is event and item.timestamp.batch == 7]
    assert not differences(state, wanted[0], without=frozenset({"algorithm_state"}))


def test_a_line_that_was_not_finished_is_passed_over(tmp_path: Path) -> None:
    record(tmp_path)
    journal = tmp_path / "journal.jsonl"
    journal.write_text(journal.read_text().removesuffix('{"ended":true}\n')[:-9])
    assert next(back(tmp_path, "4ba", "batch_end"))[1].timestamp.batch == 4
    assert len(max(journal.read_text().splitlines(), key=len)) < 200


def test_the_worst_batch_and_the_first_that_is_not_finite(tmp_path: Path) -> None:
    data = images(12)
    data[8] = (data[8][0] * 5000, data[8][1])
    recorded = record(tmp_path, data, max_duration="1ep")
    losses = {
        state.timestamp.batch - 1: float(state.loss.detach()) for event, state in recorded if event is Event.BATCH_END
    }
    worst = max(losses, key=losses.__getitem__)
    _, state = next(back(tmp_path, "worst", "after_loss", data, max_duration="1ep"))
    assert state.timestamp.batch == worst
    assert float(state.loss.detach()) == losses[worst]
    for when in ("worst", "spike"):
        _, state = next(back(tmp_path, when, "batch_end", data, max_duration="1ep"))
        assert state.timestamp.batch == worst + 1


def journal(folder: Path, losses: list[float], first: int = 1) -> Flight:
    """The record of a run with these losses."""
    folder.mkdir(exist_ok=True)
    text = "".join(
        line_of(Timestamp(batch=batch), loss, 0.0, None) + "\n" for batch, loss in enumerate(losses, start=first)
    )
    (folder / "journal.jsonl").write_text(text)
    return read_flight(folder)


def found(flight: Flight, when: str) -> int | None:
    try:
        return flight.batch_of(when, inside=True)
    except RewindError:
        return None


# A loss that falls as that of the README does: its start is the highest, and high losses come early.
FALLING = [2.3 * 0.97**number + 0.01 * (number % 3) for number in range(100)]


@pytest.mark.parametrize(
    ("losses", "spike", "worst"),
    [
        ([2.3 * 0.97**number for number in range(100)], None, None),
        (FALLING, None, None),
        ([math.exp(-number / 20) * (1.5 if number == 40 else 1) for number in range(100)], 40, None),
        ([*FALLING[:60], 1.5, *FALLING[61:]], 60, 60),  # lower than its start
        ([9.0, *FALLING[1:9], 8.0, *FALLING[10:60], 1.5, *FALLING[61:]], 60, 60),  # jumps in the first tenth
        ([*FALLING[:30], 3.0, *FALLING[31:60], 2.5, *FALLING[61:]], 60, 30),  # rises more where the loss is lower
        ([*[1.0] * 50, 1.05, *[1.0] * 49], 50, None),  # a twentieth of the median is none
        ([*[1.0] * 50, 1.2, *[1.0] * 49], 50, 50),
        ([*[-3.0] * 50, -1.0, *[-3.0] * 49], 50, 50),  # losses below 0
        ([*[0.0] * 50, 1e-6, *[0.0] * 49], 50, 50),
        ([*[0.0, 1.0] * 25, 10.9, *[0.0, 1.0] * 25], 50, None),  # five of nine are 1, changes are of 1: above 11
        ([*[0.0, 1.0] * 25, 11.1, *[0.0, 1.0] * 25], 50, 50),
        ([1.0, 1.0, 1.0, 1.0, 9.0, 1.0], 4, 4),
        ([*FALLING[:40], *[5.0] * 60], 40, 40),  # stays high: its first batch
        ([*FALLING[:50], math.inf, *FALLING[51:60], 1.5, *FALLING[61:], math.nan], 60, 50),
    ],
)
def test_a_spike_is_the_largest_rise_and_the_worst_is_an_outlier(
    tmp_path: Path, losses: list[float], spike: int | None, worst: int | None
) -> None:
    """By hand: falling losses, spikes early and late, two spikes, constant, negative and alternating losses, runs of
    six batches, a level that stays high, losses that are not finite."""
    flight = journal(tmp_path / "run", losses)
    assert [found(flight, "spike"), found(flight, "worst")] == [spike, worst]


def test_what_is_said_where_nothing_is_found(tmp_path: Path) -> None:
    falling = [100.0 - number for number in range(50)]
    flight = journal(tmp_path, falling)
    with pytest.raises(RewindError) as caught:
        flight.batch_of("spike", inside=True)
    assert str(caught.value) == (
        f"rewind: when='spike': in the journal of {tmp_path}, no loss is above the median of those before it. Looked "
        'at were batches 5 to 49, after the first tenth of the run. Write a batch, such as "49ba".'
    )
    # Of batch 5 the loss is 95, those before are 100 to 96: median 98, changes of 1.
    with pytest.raises(RewindError) as caught:
        flight.batch_of("worst", inside=True)
    assert str(caught.value) == (
        f"rewind: when='worst': in the journal of {tmp_path}, no loss is an outlier: the highest is 95, -3 from the "
        "median of the 5 before it, and an outlier is above +10. Looked at were batches 5 to 49, after the first tenth "
        'of the run. Write "spike" for the largest rise, or "5ba" for the highest loss.'
    )
    for losses in ([1.0], [1.0, 2.0, 9.0], [math.nan] * 3):
        for when in ("spike", "worst")[: 1 + (losses[0] == 1.0)]:
            with pytest.raises(RewindError, match="Looked at were batches 3 to"):
                journal(tmp_path, losses).batch_of(when, inside=True)


def test_the_first_tenth_is_counted_from_the_start_of_the_run(tmp_path: Path) -> None:
    """A recorder that was added where a run resumed begins with batch 1000 of 1100."""
    flight = journal(tmp_path, [1.0, 1.0, 1.0, 9.0, *[1.0] * 96], first=1001)
    assert found(flight, "spike") == found(flight, "worst") == 1003
    assert flight.batch_of("spike", inside=False) == 1004


@given(
    seed=st.integers(0, 2**32 - 1),
    batches=st.integers(50, 400),
    start=st.floats(1, 10),
    noise=st.floats(0.0, 0.05),
    place=st.floats(0.2, 1),
)
def test_a_spike_is_found_wherever_it_is_and_a_healthy_run_has_no_worst_batch(
    tmp_path_factory: pytest.TempPathFactory, seed: int, batches: int, start: float, noise: float, place: float
) -> None:
    """A loss that falls from ``start`` to a tenth of it, with noise in proportion; a spike of twice the loss there."""
    generator = random.Random(seed)
    healthy = [
        start * (0.1 + 0.9 * math.exp(-5 * number / batches)) * (1 + noise * generator.uniform(-1, 1))
        for number in range(batches)
    ]
    folder = tmp_path_factory.mktemp("journal")
    assert found(journal(folder, healthy), "worst") is None
    batch = min(int(place * batches), batches - 1)
    spoiled = [*healthy[:batch], 3 * max(healthy[max(batch - 30, 0) : batch]), *healthy[batch + 1 :]]
    flight = journal(folder, spoiled)
    assert found(flight, "spike") == found(flight, "worst") == batch


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_the_batch_that_is_not_finite(tmp_path: Path, nonfinite: Any) -> None:
    data = images(5)
    data[3] = (data[3][0] * float("nan"), data[3][1])
    recorder = FlightRecorder(tmp_path, keep="2ba")
    run = stream(convnet(), data, callbacks=[recorder], max_duration="1ep", nonfinite=nonfinite)
    if nonfinite == "error":
        with pytest.raises(pl.NonFiniteError):
            pl.run(run)
    else:
        pl.run(run)
    settings = {"max_duration": "1ep", "nonfinite": nonfinite}
    event, state = next(back(tmp_path, "nonfinite", "before_forward", data, **settings))
    assert (event, state.timestamp.batch) == (Event.BEFORE_FORWARD, 3)
    assert state.batch[0].isnan().all()


@pytest.mark.parametrize("change", ["data", "rate", "code"])
def test_what_is_another_run_is_refused_on_the_way(tmp_path: Path, change: str) -> None:
    record(tmp_path, recorder={"keep": "100ba"})
    data = images()
    data[1] = (data[1][0] + 1e-3, data[1][1])
    settings: dict[str, Any] = {
        "data": {"data": data},
        "rate": {"optimizer": pl.optim.sgd(lr=0.2)},
        "code": {"algorithms": [pl.algorithms.gradient_noise()]},
    }[change]
    # Of another rate or other code the first loss is the same, and the parameters after it are not.
    first = (
        "batch 1 is not that of the recorded run: its loss" if change == "data" else "batch 0 .* its parameters have"
    )
    with pytest.raises(RewindError, match=first):
        next(back(tmp_path, "5ba", "after_loss", **settings))


def test_the_first_batch_is_compared_by_itself(tmp_path: Path) -> None:
    record(tmp_path, recorder={"keep": "100ba", "digest": 0})
    data = images()
    # A label that a loss of a mean over labels would show, too: the digest says that it is the data.
    data[0] = (data[0][0], data[0][1].roll(1))
    with pytest.raises(RewindError, match=r"batch 0 is .*: its data are other numbers"):
        next(back(tmp_path, "5ba", "after_loss", data))


def test_a_line_that_a_killed_run_began_does_not_spoil_the_next(tmp_path: Path) -> None:
    record(tmp_path, recorder={"keep": "2ba"}, max_duration="1ep")
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:2]) + '\n{"batch":3,"ep')
    recorder = FlightRecorder(tmp_path, keep="2ba")
    pl.run(
        stream(convnet(), images(), callbacks=[recorder], load_path=tmp_path / "ba2.safetensors", max_duration="1ep")
    )
    whole = read_flight(tmp_path)
    assert list(whole.lines) == list(range(1, 1 + len(images())))


def test_a_run_that_ended_in_its_first_batch(tmp_path: Path) -> None:
    data = images()
    data[0] = (torch.full_like(data[0][0], math.nan), data[0][1])
    with pytest.raises(pl.NonFiniteError):
        pl.run(stream(convnet(), data, callbacks=[FlightRecorder(tmp_path)], max_duration="1ep"))
    event, state = next(back(tmp_path, "nonfinite", "batch_start", data, max_duration="1ep"))
    assert (event, state.timestamp.batch) == (Event.BATCH_START, 0)


def test_the_last_epoch_and_what_is_after_it(tmp_path: Path) -> None:
    record(tmp_path, max_duration="2ep")
    _, state = next(back(tmp_path, "2ep", "epoch_end", max_duration="2ep"))
    assert state.timestamp.epoch == 2
    batches = 2 * len(images())
    with pytest.raises(pl.ArgumentError, match=rf'in a batch after the end of the run; .* is "{batches - 1}ba"'):
        back(tmp_path, f"{batches}ba", "batch_start", max_duration="2ep")
    with pytest.raises(pl.ArgumentError, match='"spike", "worst" or "nonfinite"'):
        back(tmp_path, "highest", "batch_start", max_duration="2ep")


def test_sparse_batches_are_recorded(tmp_path: Path) -> None:
    sparse = [(torch.eye(4).to_sparse(), torch.zeros(4, 1))] * 3
    task = pl.Task(
        forward=lambda module, batch: module(batch[0].to_dense()), loss=lambda out, batch: out.square().mean()
    )
    settings = {"task": task, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    pl.run(pl.fit(torch.nn.Linear(4, 1), sparse, callbacks=[FlightRecorder(tmp_path)], **settings))
    assert len(read_flight(tmp_path).lines) == 3


def test_a_picture(tmp_path: Path) -> None:
    record(tmp_path, recorder={"keep": "3ba"})
    rewound = back(tmp_path, "4ba", "after_loss")
    axes = rewound.plot(tmp_path / "spike.png", around=2)
    assert (tmp_path / "spike.png").read_bytes().startswith(b"\x89PNG")
    batches, losses = axes.lines[0].get_data()
    assert list(batches) == [2, 3, 4, 5, 6][: len(batches)]
    _, state = next(rewound)
    assert float(state.loss.detach()) == list(losses)[list(batches).index(4)]
    with pytest.raises(pl.ArgumentError, match="around"):
        rewound.plot(around=0)


def test_losses_are_compared_where_there_is_no_digest(tmp_path: Path) -> None:
    record(tmp_path, recorder={"keep": "100ba", "digest": 0})
    with pytest.raises(RewindError, match=r"batch 1 is .*: its loss is [\d.]+, and was [\d.]+"):
        next(back(tmp_path, "5ba", "after_loss", optimizer=pl.optim.sgd(lr=0.2)))


def test_new_callbacks_and_a_watch(tmp_path: Path) -> None:
    record(tmp_path)
    seen = []
    pairs = back(
        *(tmp_path, "4ba", "after_loss"),
        watch={"batch_end"},
        callbacks=[lambda event, state: seen.append(event)],
    )
    assert [event for event, _ in pairs] == [Event.AFTER_LOSS, Event.BATCH_END, Event.BATCH_END]
    assert Event.AFTER_BACKWARD in seen


def test_states_in_memory() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        recorder = FlightRecorder(folder, in_memory=3)
        whole = list(stream(mlp(), points(), callbacks=[recorder]))
    wanted = [state for event, state in whole if event is Event.BATCH_CHECKPOINT][-3:]
    assert [state.timestamp.batch for state in recorder.states] == [4, 5, 6]
    for mine, other in zip(recorder.states, wanted, strict=True):
        assert not differences(mine, other)


def test_the_first_state_is_always_kept(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"keep": "1ba", "keep_last": 2}
    half = pl.run(stream(convnet(), images(), callbacks=[FlightRecorder(tmp_path, **settings)], max_duration="1ep"))
    pl.run(stream(half, images(), callbacks=[FlightRecorder(tmp_path, **settings)], max_duration="3ep"))
    kept = sorted(path.name.removesuffix(".safetensors") for path in tmp_path.glob("*.safetensors"))
    assert kept == ["ba8", "ba9", "start-ba0", "start-ba3"]
    for batch in (0, 2, 4, 8):
        assert next(back(tmp_path, f"{batch}ba", "after_loss", max_duration="3ep"))[1].timestamp.batch == batch


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pl.CheckpointNotFoundError, match=r"is not the folder of a FlightRecorder"):
        back(tmp_path, "1ba", "after_loss")
    record(tmp_path)
    for arguments, settings, text in (
        (("9ba", "after_loss"), {}, r"beyond the end: the journal of .* has 6 batches"),
        (("2ba", "init"), {}, "INIT comes before anything is kept"),
        (("2ba", "after_los"), {}, r"rewind: 'after_los' is not an event; did you mean Event\.AFTER_LOSS"),
        (("2s", "after_loss"), {}, "write batches or epochs"),
        (("7ep", "after_loss"), {}, r"the journal ends in epoch 1"),
        (("2ba", "after_loss"), {"autoresume": "somewhere"}, "autoresume= is what the recorded folder stands for"),
        (("2ba", "after_loss"), {"occurrence": -1}, "occurrence"),
    ):
        with pytest.raises(pl.ArgumentError, match=text):
            back(tmp_path, *arguments, **settings)
    with pytest.raises(pl.ArgumentTypeError, match=r"when=2\.5 of type float"):
        back(tmp_path, 2.5, "after_loss")
    with pytest.raises(pl.ArgumentError, match=r"there is no EVAL_START"):
        next(back(tmp_path, "2ba", "eval_start"))
    with pytest.raises(pl.ArgumentError, match=r"occurrence=3 is counted from 0.*there is one AFTER_LOSS"):
        next(back(tmp_path, "2ba", "after_loss", occurrence=3))
    with pytest.raises(pl.ArgumentError, match=r"all losses in the journal .* are finite, and the run reached its end"):
        back(tmp_path, "nonfinite", "after_loss")
    (tmp_path / "start-ba0.safetensors").unlink()
    with pytest.raises(pl.ArgumentError, match=r"no State is kept before AFTER_LOSS of batch 2; there are .* 4, 6"):
        back(tmp_path, "2ba", "after_loss")
    with pytest.raises(pl.ArgumentError, match=r"its journal is a local file"):
        FlightRecorder("memory://runs")


def on_a_rank(rank: int, folder: str) -> Any:
    options: dict[str, Any] = {"parallel": "replicate", "seed": 0, "strict": False}
    recorder = FlightRecorder(folder, keep="2ba", digest="1ba")
    data = images(3, size=8)
    wanted: Any = None
    for event, state in stream(convnet(), data, callbacks=[recorder], **options):
        if event is Event.AFTER_TRAIN_BATCH and state.timestamp.batch == 3:
            wanted = {name: None if grad is None else grad.clone() for name, grad in (state.grads or {}).items()}
    torch.distributed.barrier()
    pairs = back(Path(folder), "3ba", "after_train_batch", data, **options)
    _, state = next(pairs)
    same = all(torch.equal(grad, wanted[name]) for name, grad in (state.grads or {}).items() if grad is not None)
    pl.run(pairs)
    return same


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    assert pool().run(partial(on_a_rank, folder=str(tmp_path))) == [True, True]


def test_other_settings_of_algorithms_are_named(tmp_path: Path) -> None:
    def smoothed(smoothing: float) -> dict[str, Any]:
        return {"algorithms": [pl.algorithms.label_smoothing(smoothing)]}

    record(tmp_path, recorder={"keep": "100ba"}, **smoothed(0.1))
    with pytest.raises(RewindError, match=r"Algorithm_settings is \[.*0\.2.*\], and was \[.*0\.1.*\]"):
        next(back(tmp_path, "5ba", "after_loss", **smoothed(0.2)))
    event, _ = next(back(tmp_path, "5ba", "after_loss", **smoothed(0.1)))
    assert event is Event.AFTER_LOSS
