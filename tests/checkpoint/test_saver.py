"""CheckpointSaver: when it saves, what it keeps, and that training is not changed by it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint.run_folder import Retention, Saved
from tests.support import streams as sameness

DATA = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), torch.zeros(4, 1)) for i in range(4)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))


def stream(*callbacks: Any, **overrides: Any) -> Any:
    settings: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "optimizer": pl.optim.adamw(lr=0.1),
        "max_duration": "3ep",
        "evaluators": {"val": pl.Evaluator(DATA[:1], metrics={"loss": pl.metrics.loss()})},
        "algorithms": [pl.algorithms.ema(half_life="2ba")],
        "callbacks": callbacks,
        **overrides,
    }
    return pl.fit(model(), DATA, **settings)


def files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if not each.is_symlink())


@pytest.mark.parametrize(
    ("interval", "batches"),
    [
        ("1ep", [4, 8, 12]),
        ("2ep", [8, 12]),
        ("5ba", [5, 10, 12]),
        ("20sp", [5, 10, 12]),
        ("0.25dur", [3, 6, 9, 12]),
        (lambda state: state.timestamp.batch == 7, [7, 12]),
        (0, [12]),
    ],
    ids=["1ep", "2ep", "5ba", "20sp", "0.25dur", "a function", "never"],
)
def test_it_saves_at_its_interval_and_at_the_end(tmp_path: Path, interval: Any, batches: list[int]) -> None:
    saver = CheckpointSaver(tmp_path, interval=interval, filename="{batch:02}.safetensors")
    whole = list(stream(saver))
    assert files(tmp_path) == [f"{batch:02}.safetensors" for batch in batches]
    for batch in batches:
        at = {Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT}
        found = pl.load(tmp_path / f"{batch:02}.safetensors", model=model())
        wanted = next(s for e, s in reversed(whole) if e is found.event and s.timestamp.batch == batch)
        assert found.event in at
        sameness.assert_same(found, wanted, f"batch {batch}")


def test_the_link_leads_to_the_newest(tmp_path: Path) -> None:
    pl.run(stream(CheckpointSaver(tmp_path)))
    assert os.readlink(tmp_path / "latest") == "ep3-ba12.safetensors"
    assert pl.load(tmp_path / "latest", model=model()).timestamp.epoch == 3
    assert pl.latest(tmp_path) == str(tmp_path / "ep3-ba12.safetensors")
    pl.run(stream(CheckpointSaver(tmp_path / "none", latest=None)))
    assert "latest" not in files(tmp_path / "none")


# None: of a loss less is better.
@pytest.mark.parametrize("mode", ["min", "max", None])
def test_it_keeps_the_best(tmp_path: Path, mode: Any) -> None:
    saver = CheckpointSaver(tmp_path, interval="1ba", keep_best=2, metric="val/loss", mode=mode)
    whole = list(stream(saver, eval_interval="2ba", max_duration="12ba", donate=False))
    scores = {s.timestamp.batch: float(s.metrics["val"]["loss"]) for e, s in whole if e is Event.EVAL_AFTER_ALL}
    assert sorted(scores) == [2, 4, 6, 8, 10, 12]
    best = sorted(scores, key=scores.__getitem__, reverse=mode == "max")[:2]
    kept = {pl.load(path, model=model()).timestamp.batch for path in tmp_path.glob("*.safetensors")}
    assert kept == {*best, 12}


SAVED = st.lists(st.none() | st.floats(width=16), max_size=12).map(
    lambda scores: [Saved(str(index), index, score) for index, score in enumerate(scores)]
)


@given(SAVED, st.none() | st.integers(1, 4), st.none() | st.integers(1, 4), st.booleans())
def test_what_may_go(saved: list[Saved], last: int | None, best: int | None, largest: bool) -> None:
    gone = Retention(last, best, largest).expired(saved)
    kept = [each for each in saved if each not in gone]
    if last is None and best is None:
        assert not gone
        return
    newest = saved[-(last or 1) :]
    assert all(each in kept for each in newest)
    scored = [each for each in saved if each.score is not None and each.score == each.score]
    others = [each for each in kept if each not in newest]
    assert len(kept) <= (last or 1) + (best or 0)
    # Nothing that went is better than something that stayed for its score.
    for stayed in others:
        for went in (each for each in gone if each in scored):
            assert stayed.score is not None
            assert went.score is not None
            assert (went.score <= stayed.score) if largest else (went.score >= stayed.score)
    assert len([each for each in kept if each in scored]) >= min(best or 0, len(scored))


def test_memory_that_is_being_written_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With donate=True, and a disk so slow that the next steps are over before it has begun."""
    from pure_loop.checkpoint import background

    go, real = threading.Event(), background.write_state

    def slow(*args: Any, **kwargs: Any) -> None:
        go.wait(20)
        real(*args, **kwargs)

    monkeypatch.setattr(background, "write_state", slow)
    whole = {s.timestamp.batch: s for e, s in stream(donate=False) if e is Event.BATCH_CHECKPOINT}
    saver = CheckpointSaver(tmp_path, interval="2ba", filename="{batch}.safetensors")
    for event, state in stream(saver, donate=True):
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 3:
            go.set()
    for batch in (2, 4, 6):
        sameness.assert_same(pl.load(tmp_path / f"{batch}.safetensors", model=model()), whole[batch], f"batch {batch}")


def test_autoresume_brings_no_saver_where_a_callback_of_ones_own_saves(tmp_path: Path) -> None:
    class Saver(pl.Callback):
        """Saves where training ends."""

        folders: list[Any] = []  # noqa: RUF012

        def saves_to(self, folder: Any) -> bool:
            return folder == tmp_path

        def bind(self, run: Any) -> None:
            self.folders.append(run.autoresume)

        def fit_end(self, state: pl.State, logger: Any) -> None:
            pl.save(state, tmp_path / "own.safetensors")

    pl.run(stream(Saver(), autoresume=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["own.safetensors"]
    pl.run(stream(Saver()))
    assert Saver.folders == [tmp_path, None]


def test_autoresume_brings_a_saver_where_there_is_none(tmp_path: Path) -> None:
    pl.run(stream(autoresume=tmp_path / "a"))
    assert files(tmp_path / "a") == ["ep2-ba8.safetensors", "ep3-ba12.safetensors"]  # the last two
    pl.run(stream(CheckpointSaver(tmp_path / "b", interval="3ep"), autoresume=str(tmp_path / "b") + "/"))
    assert files(tmp_path / "b") == ["ep3-ba12.safetensors"]
    pl.run(stream(CheckpointSaver(tmp_path / "c", interval="3ep"), autoresume=tmp_path / "d"))
    assert len(files(tmp_path / "d")) == 2


def test_autoresume_takes_a_saver_in_the_place_of_its_folder(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, interval="1ba", keep_last=3)
    pl.run(stream(autoresume=saver, max_duration="6ba"))
    assert files(tmp_path) == ["ep0-ba4.safetensors", "ep1-ba5.safetensors", "ep1-ba6.safetensors"]
    starts = [state.timestamp.batch for event, state in stream(autoresume=saver) if event is Event.FIT_START]
    assert starts == [6]
    # Among the callbacks it may stand as well, and alone; and serves one call after the other.
    for callbacks in ([saver], saver):
        last = pl.run(stream(autoresume=saver, callbacks=callbacks, max_duration="4ep"))
        assert last.timestamp.batch == 16
        assert len(files(tmp_path)) == 3
    sameness.assert_same(last, pl.run(stream(max_duration="4ep")), "resumed")


@pytest.mark.parametrize("written", [["USR1"], ["SIGUSR1"], ["usr1"], [signal.SIGUSR1], [int(signal.SIGUSR1)]])
def test_a_signal_by_its_name(tmp_path: Path, written: Any) -> None:
    saver = CheckpointSaver(tmp_path, interval=0, signals=written)

    def raises(event: Event, state: pl.State) -> None:
        if event is Event.BATCH_START and state.timestamp.batch == 5:
            signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(SystemExit) as caught:
        pl.run(stream(raises, autoresume=saver))
    assert caught.value.code == 128 + signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert files(tmp_path) == ["ep1-ba6.safetensors"]
    sameness.assert_same(pl.run(stream(autoresume=saver)), pl.run(stream()), "resumed")


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no real-time signals")
def test_a_signal_without_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    number = signal.SIGRTMIN + 3
    assert number not in [entry.value for entry in signal.Signals]
    saver = CheckpointSaver(tmp_path, interval=0, signals=[number])

    def raises(event: Event, state: pl.State) -> None:
        if event is Event.BATCH_START and state.timestamp.batch == 5:
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as caught:
        pl.run(stream(raises, autoresume=saver))
    assert caught.value.code == 128 + number
    assert files(tmp_path) == ["ep1-ba6.safetensors"]
    assert f"signal {number}: the State of batch 6 is saved" in caplog.text


def test_a_metric_that_is_not_measured_is_refused_before_training(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, keep_best=1, metric="val/accurracy", mode="max")
    with pytest.raises(pl.ArgumentError, match="metric='val/accurracy' is not measured; there are val/loss"):
        stream(saver)
    with pytest.raises(pl.ArgumentError, match="there is no evaluator 'test' in evaluators=; there are val"):
        stream(CheckpointSaver(tmp_path, keep_best=1, metric="test/loss", mode="min"))
    with pytest.raises(pl.ArgumentError, match="metric='val/accurracy' is not measured; there are val/loss, val/acc"):
        stream(saver, evaluators={"val": DATA[:1]})
    # By default there is an accuracy where the outputs are scores of classes, and the first ones tell.
    saver = CheckpointSaver(tmp_path, keep_best=1, metric="val/accuracy", mode="max")
    with pytest.raises(pl.ArgumentError, match="metric='val/accuracy' is not measured; there are val/loss"):
        pl.run(stream(saver, evaluators={"val": DATA[:1]}))


def test_a_metric_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    data = [(torch.full((4, 3), float("nan")), torch.zeros(4, 1))]
    saver = CheckpointSaver(tmp_path, interval="1ba", keep_best=1, metric="val/loss", mode="min")
    pl.run(stream(saver, evaluators={"val": data}, eval_interval="1ba"))
    assert files(tmp_path) == ["ep3-ba12.safetensors"]
    notes = pl.checkpoint.describe(tmp_path / "ep3-ba12.safetensors")["notes"]
    assert {name: notes[name] for name in ("metric", "mode", "score")} == {
        "metric": "val/loss",
        "mode": "min",
        "score": None,
    }


def test_two_savers_of_one_folder_need_names_of_their_own(tmp_path: Path) -> None:
    often = CheckpointSaver(tmp_path, interval="1ba", keep_last=1)
    with pytest.raises(pl.ArgumentError, match="under the same names"):
        stream(often, CheckpointSaver(str(tmp_path) + "/", interval="4ba"))
    pl.run(stream(often, CheckpointSaver(tmp_path, interval="4ba", filename="milestone-{batch}.safetensors")))
    assert files(tmp_path) == ["ep3-ba12.safetensors", *(f"milestone-{n}.safetensors" for n in (12, 4, 8))]


def test_a_folder_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    pl.run(stream(CheckpointSaver(tmp_path)))
    assert files(tmp_path) == [f"ep{epoch}-ba{4 * epoch}.safetensors" for epoch in (1, 2, 3)]
    assert "can't have links" in caplog.text


def test_the_link_takes_nobodys_place(tmp_path: Path) -> None:
    tmp_path.joinpath("latest").write_text("precious")
    with pytest.raises(pl.ArgumentError, match="is no link, and stays as it is"):
        pl.run(stream(CheckpointSaver(tmp_path)))
    assert tmp_path.joinpath("latest").read_text() == "precious"


def how_it_ended(child: int) -> int | None:
    """The status of a process; one that doesn't end within seconds is killed, and has none."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_a_forked_process_ends_when_it_is_told_to(tmp_path: Path) -> None:
    for event, _ in stream(CheckpointSaver(tmp_path)):
        if event is Event.BATCH_END:
            # The signal comes before, at, or after the call that waits for it.
            for delay in (0.0, 0.0, 0.0, 0.001, 0.01):
                child = os.fork()
                if child == 0:
                    signal.pause()
                    os._exit(0)  # not reached: nothing holds the signal back here
                time.sleep(delay)
                os.kill(child, signal.SIGTERM)
                assert how_it_ended(child) == signal.SIGTERM
            break


def test_a_fork_leaves_signals_held_back_in_the_process_that_trains(tmp_path: Path) -> None:
    def told() -> None:
        for event, state in stream(CheckpointSaver(tmp_path, interval="9ep")):
            if event is Event.BATCH_START and state.timestamp.batch == 1:
                child = os.fork()
                if child == 0:
                    os._exit(0)
                os.waitpid(child, 0)
                assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        told()
    assert pl.latest(tmp_path) is not None
