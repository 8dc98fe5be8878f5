"""``FlightRecorder`` and ``pl.rewind``: which batch is meant, what the journal keeps, and what is refused."""

from __future__ import annotations

import json
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver, FlightRecorder
from pure_loop.checkpoint.flight import Flight, line_of, read_flight
from pure_loop.errors import ArgumentError, CheckpointError, CheckpointNotFoundError, NonFiniteError, RewindError
from pure_loop.testing.comparison import differences
from pure_loop.time import Timestamp
from tests.support import problem
from tests.support.problem import images
from tests.support.worlds import pool


def record(folder: Path, data: Any = None, start: Any = None, **settings: Any) -> list[Any]:
    recorder = FlightRecorder(folder, **{"keep": "4ba", "digest": "1ba", **settings.pop("recorder", {})})
    return list(problem.fit(start or problem.convnet(), data or images(), callbacks=[recorder], **settings))


def back(folder: Path, when: Any, event: Any, data: Any = None, **settings: Any) -> Any:
    options = {"loss": problem.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep"}
    options |= {"clock": lambda: 0.0, "strict": True}
    return pl.rewind(folder, when, event, problem.convnet(), data or images(), **{**options, **settings})


# The journal


def test_a_run_that_was_resumed_adds_to_its_journal_and_the_first_state_is_always_kept(tmp_path: Path) -> None:
    keeping: dict[str, Any] = {"recorder": {"keep": "1ba", "keep_last": 2, "in_memory": 3}}
    recorder = FlightRecorder(tmp_path / "memory", in_memory=3)
    whole = list(problem.fit("convnet", max_duration="3ep", callbacks=[recorder]))
    wanted = [state for event, state in whole if event is Event.BATCH_CHECKPOINT][-3:]
    assert [state.timestamp.batch for state in recorder.states] == [7, 8, 9]
    assert not any(differences(mine, other) for mine, other in zip(recorder.states, wanted, strict=True))
    half = record(tmp_path, max_duration="1ep", **keeping)[-1][1]
    journal = tmp_path / "journal.jsonl"
    journal.write_text(journal.read_text().removesuffix('{"ended":true}\n') + '{"batch":4,"ep')  # as a kill leaves it
    record(tmp_path, start=half, max_duration="3ep", **keeping)
    assert list(read_flight(tmp_path).lines) == list(range(1, 10))
    assert max(map(len, journal.read_text().splitlines())) < 200
    kept = sorted(path.name.removesuffix(".safetensors") for path in tmp_path.glob("*.safetensors"))
    assert kept == ["ba8", "ba9", "start-ba0", "start-ba3"]
    for batch in (0, 4, 8):
        event, state = next(back(tmp_path, f"{batch}ba", "after_backward", max_duration="3ep"))
        wanted = [item for at, item in whole if at is event and item.timestamp.batch == batch]
        assert not differences(state, wanted[0], without=frozenset({"algorithm_state"}))


LINE = b'{"batch":5,"epoch":1,"loss":"0x1.0p+0","seconds":0.1}'
DAMAGED: list[tuple[bytes, str]] = [
    (LINE.replace(b"epoch", b"ep\xffch"), "UnicodeDecodeError"),
    (b'{"batch":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "RecursionError"),
    (b"\0" * 40, "JSONDecodeError"),
    (b'{"batch":5}', "KeyError"),
    *[(LINE.replace(b"5", wrong, 1), "a count or a time that is none") for wrong in (b'"5"', b"-5", b"true")],
    (LINE.replace(b"0.1", b'"0.1"'), "a count or a time that is none"),
    (LINE.replace(b'"0x1.0p+0"', b"3"), "TypeError"),
    (b"null", "TypeError"),
]


def test_a_line_that_no_kill_has_cut_and_facts_that_are_cut_are_named(tmp_path: Path) -> None:
    record(tmp_path)
    journal, facts = tmp_path / "journal.jsonl", tmp_path / "run.json"
    lines = journal.read_bytes().splitlines(keepends=True)
    for line, says in DAMAGED:
        for number in (4, len(lines)):
            journal.write_bytes(b"".join([*lines[: number - 1], line + b"\n", *lines[number - 1 :]]))
            with pytest.raises(CheckpointError, match=rf"journal\.jsonl, line {number}: .*{says}"):
                read_flight(tmp_path)
    journal.write_bytes(b"".join(lines))
    for content in (b'{"seed": 0, "mod', b"\xff{}", b"[" * 100_000, b"[]"):
        facts.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"run\.json can't be read"):
            next(back(tmp_path, "2ba", "after_loss"))


def test_facts_appear_whole_and_are_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kill while they are written leaves those that were there; a run that resumes says what it can't read."""
    auto, folder = CheckpointSaver(tmp_path / "auto"), tmp_path / "f"
    record(folder, max_duration="1ep", autoresume=auto)
    before = (folder / "run.json").read_bytes()

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", killed)
    with pytest.raises(KeyboardInterrupt):
        record(folder, autoresume=auto)
    monkeypatch.undo()
    assert (folder / "run.json").read_bytes() == before
    assert not list(folder.glob(".*"))
    (folder / "run.json").write_bytes(b"[]")
    for _ in range(2):  # the second trains nothing, and what was recorded is all there
        record(folder, autoresume=auto)
        assert list(read_flight(folder).lines) == list(range(1, 7))
        assert read_flight(folder).has_ended
    assert "run.json can't be read" in caplog.text
    assert json.loads((folder / "run.json").read_text())["seed"] == 0
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(pl.errors.RunExistsError, match="with seed 0; this one has 5"):
        record(folder, start=problem.run("convnet", max_duration="1ep", seed=5))


@settings(max_examples=4)
@given(st.integers(0, 10_000))
def test_a_journal_that_is_cut_anywhere_is_continued(at: int) -> None:
    """A kill cuts it anywhere; the same command resumes, and each batch is there once."""
    with tempfile.TemporaryDirectory() as place:
        folder, auto = Path(place, "flight"), CheckpointSaver(Path(place, "auto"), interval="2ba")
        record(folder, max_duration="1ep", autoresume=auto)
        data = (folder / "journal.jsonl").read_bytes()
        (folder / "journal.jsonl").write_bytes(data[: len(data) - 1 - at % len(data)])
        before = read_flight(folder).lines
        assert list(before) == list(range(1, len(before) + 1))
        record(folder, autoresume=auto)
        lines = read_flight(folder).lines
        assert before.items() <= lines.items()
        assert list(lines)[-3:] == [4, 5, 6]


# Which batch


def journal(folder: Path, losses: list[float], first: int = 1) -> Flight:
    """The record of a run with these losses."""
    folder.mkdir(exist_ok=True)
    lines = [line_of(Timestamp(batch=batch), loss, 0.0, None) for batch, loss in enumerate(losses, start=first)]
    (folder / "journal.jsonl").write_text("\n".join(lines) + "\n")
    return read_flight(folder)


def found(flight: Flight) -> list[int | None]:
    """The batch with the largest rise, and the outlier."""
    batches: list[int | None] = []
    for when in ("spike", "worst"):
        try:
            batches.append(flight.batch_of(when, inside=True))
        except RewindError:
            batches.append(None)
    return batches


# A loss that falls as that of the README does: its start is the highest, and high losses come early.
FALLING = [2.3 * 0.97**number + 0.01 * (number % 3) for number in range(100)]
LOSSES: list[tuple[list[float], int | None, int | None]] = [
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
]


def test_a_spike_is_the_largest_rise_and_the_worst_is_an_outlier(tmp_path: Path) -> None:
    for losses, spike, worst in LOSSES:
        assert found(journal(tmp_path, losses)) == [spike, worst], losses
    # The first tenth is counted from the start of the run: the recorder was added where it resumed.
    flight = journal(tmp_path, [1.0, 1.0, 1.0, 9.0, *[1.0] * 96], first=1001)
    assert found(flight) == [1003, 1003]
    assert flight.batch_of("spike", inside=False) == 1004
    flight = journal(tmp_path, [100.0 - number for number in range(50)])
    looked = "Looked at were batches 5 to 49, after the first tenth of the run. Write "
    # Of batch 5 the loss is 95, those before are 100 to 96: median 98, changes of 1.
    outlier = "no loss is an outlier: the highest is 95, -3 from the median of the 5 before it, and an outlier is above"
    for when, says in (
        ("spike", f"no loss is above the median of those before it. {looked}a batch"),
        ("worst", f'{outlier} +10. {looked}"spike"'),
    ):
        with pytest.raises(RewindError) as caught:
            flight.batch_of(when, inside=True)
        assert f"rewind: when='{when}': in the journal of {tmp_path}, {says}" in str(caught.value)
    with pytest.raises(RewindError, match="Looked at were batches 3 to"):
        journal(tmp_path, [1.0]).batch_of("worst", inside=True)


def test_the_worst_batch_of_a_run_and_its_picture(tmp_path: Path) -> None:
    data = images(12)
    data[8] = (data[8][0] * 5000, data[8][1])
    recorded = record(tmp_path, data, max_duration="1ep")
    losses = [float(state.loss.detach()) for event, state in recorded if event is Event.BATCH_END]
    worst = losses.index(max(losses))
    rewound = back(tmp_path, "worst", "after_loss", data, max_duration="1ep")
    axes = rewound.plot(tmp_path / "spike.png", around=2)
    assert (tmp_path / "spike.png").read_bytes().startswith(b"\x89PNG")
    assert dict(zip(*axes.lines[0].get_data(), strict=True))[worst] == losses[worst]
    with pytest.raises(ArgumentError, match="around"):
        rewound.plot(around=0)
    _, state = next(rewound)
    assert (state.timestamp.batch, float(state.loss.detach())) == (worst, losses[worst])
    _, state = next(back(tmp_path, "spike", "batch_end", data, max_duration="1ep"))
    assert state.timestamp.batch == worst + 1


def test_the_batch_that_is_not_finite(tmp_path: Path) -> None:
    for number, batch, nonfinite in ((0, 3, "error"), (1, 3, "skip"), (2, 0, "error")):
        folder, data = tmp_path / str(number), images(5)
        data[batch] = (data[batch][0] * math.nan, data[batch][1])
        settings: dict[str, Any] = {"max_duration": "1ep", "nonfinite": nonfinite}
        try:
            record(folder, data, **settings)
        except NonFiniteError:
            assert nonfinite == "error"
        event, state = next(back(folder, "nonfinite", "before_forward", data, **settings))
        assert (event, state.timestamp.batch) == (Event.BEFORE_FORWARD, batch)
        assert state.batch[0].isnan().all()


# What is refused, and what isn't


def test_what_is_another_run_is_refused_on_the_way(tmp_path: Path) -> None:
    smoothed = [pl.algorithms.label_smoothing(0.1)]
    for name, recorder, algorithms in (("d", {}, []), ("none", {"digest": 0}, []), ("a", {}, smoothed)):
        record(tmp_path / name, recorder={"keep": "100ba", **recorder}, algorithms=algorithms)
    moved, rolled = images(), images()
    moved[1] = (moved[1][0] + 1e-3, moved[1][1])
    rolled[0] = (rolled[0][0], rolled[0][1].roll(1))
    faster: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.2)}
    # Of another rate or other code the first loss is the same, and the parameters after it are not.
    for name, data, more, says in (
        ("d", moved, {}, "batch 1 is not that of the recorded run: its loss"),
        ("d", None, faster, "batch 0 .* its parameters have"),
        ("none", None, faster, r"batch 1 is .*: its loss is [\d.]+, and was [\d.]+"),
        # A label that a loss of a mean over labels would show, too: the digest says that it is the data.
        ("none", rolled, {}, r"batch 0 is .*: its data are other numbers"),
        ("a", None, {"algorithms": [pl.algorithms.label_smoothing(0.2)]}, r"is \[.*0\.2.*\], and was \[.*0\.1.*\]"),
    ):
        with pytest.raises(RewindError, match=says):
            next(back(tmp_path / name, "5ba", "after_loss", data, **more))


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"is not the folder of a FlightRecorder"):
        back(tmp_path, "1ba", "after_loss")
    record(tmp_path)
    for when, event, more, says in (
        ("9ba", "after_loss", {}, r"beyond the end: the journal of .* has 6 batches"),
        ("6ba", "batch_start", {}, 'in a batch after the end of the run; .* is "5ba"'),
        ("highest", "batch_start", {}, '"spike", "worst" or "nonfinite"'),
        ("2ba", "init", {}, "INIT comes before anything is kept"),
        ("2s", "after_loss", {}, "write batches or epochs"),
        ("7ep", "after_loss", {}, r"the journal ends in epoch 1"),
        ("2ba", "after_loss", {"autoresume": "x"}, "autoresume= is what the recorded folder stands for"),
        (2.5, "after_loss", {}, r"when=2\.5 of type float"),
        ("2ba", "eval_start", {}, r"there is no EVAL_START"),
        ("2ba", "after_loss", {"occurrence": 3}, r"occurrence=3 is counted from 0.*there is one AFTER_LOSS"),
        ("nonfinite", "after_loss", {}, r"all losses in the journal .* are finite, and the run reached its end"),
    ):
        with pytest.raises(pl.PureLoopError, match=says):
            next(back(tmp_path, when, event, **more))
    assert next(back(tmp_path, "2ep", "epoch_end"))[1].timestamp.epoch == 2
    seen: list[Event] = []
    watching: dict[str, Any] = {"watch": {"batch_end"}, "callbacks": [lambda event, state: seen.append(event)]}
    pairs = back(tmp_path, "4ba", "after_loss", **watching)
    assert [event for event, _ in pairs] == [Event.AFTER_LOSS, Event.BATCH_END, Event.BATCH_END]
    assert Event.AFTER_BACKWARD in seen
    (tmp_path / "start-ba0.safetensors").unlink()
    with pytest.raises(ArgumentError, match=r"no State is kept before AFTER_LOSS of batch 2; there are .* 4, 6"):
        back(tmp_path, "2ba", "after_loss")
    with pytest.raises(ArgumentError, match=r"its journal is a local file"):
        FlightRecorder("memory://runs")
    sparse = [(torch.eye(4).to_sparse(), torch.zeros(4, 1))] * 3
    task = pl.Task(forward=lambda m, batch: m(batch[0].to_dense()), loss=lambda out, batch: out.square().mean())
    record(tmp_path / "s", sparse, torch.nn.Linear(4, 1), loss=task, max_duration="1ep", strict=False)
    assert len(read_flight(tmp_path / "s").lines) == 3


def on_a_rank(rank: int, folder: str) -> Any:
    options: dict[str, Any] = {"parallel": "replicate", "seed": 0, "strict": False}
    data, wanted = images(3, size=8), None
    for event, state in record(Path(folder), data, recorder={"keep": "2ba"}, donate=False, **options):
        if event is Event.AFTER_TRAIN_BATCH and state.timestamp.batch == 3:
            wanted = state.grads
    torch.distributed.barrier()
    pairs = back(Path(folder), "3ba", "after_train_batch", data, **options)
    same = not differences(next(pairs)[1].grads, wanted)
    pl.run(pairs)
    return same


@pytest.mark.slow  # processes
def test_two_ranks(tmp_path: Path) -> None:
    assert pool().run(partial(on_a_rank, folder=str(tmp_path))) == [True, True]
