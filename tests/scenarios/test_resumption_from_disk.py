"""Law 4 by way of a disk: another process, which has the files and the code alone, resumes bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import BOUNDARIES
from tests.scenarios.test_resumption import Augmented, everything, go, model
from tests.support import streams as sameness

BEFORE = [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START]


def numbered(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"), key=lambda path: int(path.stem))


@pytest.mark.slow  # resumes from 29 files
def test_another_process_resumes_from_every_boundary(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    whole = go(model(), precision="amp_fp16", workers=2)
    boundaries = [index for index, (event, _) in enumerate(whole) if event in BOUNDARIES]
    for index in boundaries:
        pl.save(whole[index][1], tmp_path / f"{index}.safetensors")
    code = "import sys; from tests.scenarios.test_resumption_from_disk import go_on; go_on(sys.argv[1])"
    subprocess.run([sys.executable, "-W", "error", "-c", code, tmp_path], check=True, timeout=240)
    assert len(boundaries) == len(numbered(tmp_path / "last")) == 2 + 3 * 3 + 9 * 2
    for path in numbered(tmp_path / "last"):
        sameness.assert_same(pl.load(path, model=model()), whole[-1][1], f"from {path.stem}")


def go_on(folder: str) -> None:
    """What the other process does, in a random state of its own."""
    torch.manual_seed(99)
    for path in numbered(Path(folder)):
        pairs = go(model(), precision="amp_fp16", workers=2, load_path=path)
        assert [event for event, _ in pairs[:4]] == BEFORE
        pl.save(pairs[-1][1], Path(folder) / "last" / path.name)


def saved_at(path: Path, event: Event, batch: int) -> Path:
    found = next(s for e, s in go(model()) if e is event and s.timestamp.batch == batch)
    pl.save(found, path / "x.safetensors")
    return path / "x.safetensors"


def test_the_whole_stream_is_the_same_after_loading(tmp_path: Path) -> None:
    path = saved_at(tmp_path, Event.BATCH_END, 5)
    whole = go(model())
    index = next(i for i, (e, s) in enumerate(whole) if e is Event.BATCH_END and s.timestamp.batch == 5)
    again = go(model(), load_path=str(path))
    assert [event for event, _ in again[:4]] == BEFORE
    assert again[2][1].timestamp.batch == 5
    sameness.assert_same_stream(again[4:], whole[index + 1 :], "from disk")


@pytest.mark.slow  # seven runs
def test_what_may_be_another_on_going_on(tmp_path: Path) -> None:
    path = saved_at(tmp_path, Event.EPOCH_CHECKPOINT, 3)
    changes: dict[str, Any] = {
        "optimizer": pl.optim.sgd(lr=0.001, momentum=0.9, nesterov=True),
        "max_duration": "4ep",
        "algorithms": [pl.algorithms.ema(half_life="4ba"), pl.algorithms.label_smoothing(0.2)],
        "evaluators": None,
        "microbatch_size": 2,
        "clip_grad": 0.5,
    }
    for name, value in changes.items():
        last = go(model(), load_path=path, strict=name == "clip_grad", **{name: value})[-1][1]
        assert last.timestamp.epoch == (4 if name == "max_duration" else 3), name


def test_what_may_not_be_another_on_going_on(tmp_path: Path) -> None:
    path = saved_at(tmp_path, Event.EPOCH_CHECKPOINT, 3)
    with pytest.raises(pl.ResumeError, match="opt_state was made by another optimizer than adamw"):
        go(model(), load_path=path, optimizer=pl.optim.adamw(lr=0.1))
    with pytest.raises(pl.ArgumentError, match=r"seed=4, and .* has seed 3, with which it resumes"):
        go(model(), load_path=path, seed=4)
    with pytest.raises(pl.ArgumentError, match="each is a place to start from"):
        go(pl.load(path, model=model()), load_path=path)
    other = model()
    other[0] = nn.Conv2d(1, 5, 3, padding=1)
    with pytest.raises(pl.ResumeError, match=r"params\['0.weight'\] is \(4, 1, 3, 3\) float32 in the file and \(5, 1"):
        go(other, load_path=path)


def test_a_state_of_the_middle_of_a_step_is_refused_at_the_door(tmp_path: Path) -> None:
    path = saved_at(tmp_path, Event.BEFORE_FORWARD, 4)
    loader = DataLoader(Augmented(14), batch_size=6, shuffle=True)
    with pytest.raises(pl.ResumeError, match="BEFORE_FORWARD, in the middle of a computation"):
        pl.fit(model(), load_path=path, **everything(loader))


def test_surgery_at_init_comes_before_the_numbers(tmp_path: Path) -> None:
    data = [(torch.ones(2, 16, 8, 8), torch.ones(2, 4, 4, 4))]
    settings: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "optimizer": pl.optim.adamw(lr=0.1),
        "algorithms": [pl.algorithms.blurpool()],
        "max_duration": "3ba",
    }

    def strided() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.Conv2d(16, 4, 1))

    whole = list(pl.fit(strided(), data, **settings))
    kept = next(state for event, state in whole if event is Event.BATCH_END)
    assert any("blur" in type(each).__name__.lower() for each in kept.module().modules())
    pl.save(kept, tmp_path / "x.safetensors")
    last = pl.run(pl.fit(strided(), data, load_path=tmp_path / "x.safetensors", **settings))
    sameness.assert_same(last, whole[-1][1], "after surgery")


def test_autoresume_starts_resumes_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "1"

    def run(events: int | None = None) -> list[tuple[Event, pl.State]]:
        stream = pl.fit(model(), **everything(DataLoader(Augmented(14), batch_size=6, shuffle=True)), autoresume=folder)
        pairs = []
        for pair in stream:
            pairs.append(pair)
            if events is not None and len(pairs) == events:
                break
        stream.close()
        return pairs

    whole = go(model())
    # It breaks off in the second epoch; what was saved is the end of the first.
    assert run(150)[-1][1].timestamp.epoch == 1
    assert pl.latest(folder) == str(folder / "ep1-ba3.safetensors")
    again = run()
    assert again[3][1].timestamp.batch == 3
    sameness.assert_same(again[-1][1], whole[-1][1], "gone on")
    # And when it is over, it is over.
    assert {event for event, _ in run() if not event.is_eval} == {*BEFORE, Event.FIT_END}


def test_the_newest_goes_before_the_path_of_the_first_start(tmp_path: Path) -> None:
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 2
    settings: Any = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "3ep"}
    first = tmp_path / "first.safetensors"
    pl.save(pl.run(pl.fit(nn.Linear(2, 1), data, **{**settings, "max_duration": "1ep"})), first)
    folder = tmp_path / "folder"
    for epoch in (1, 3):
        stream = pl.fit(nn.Linear(2, 1), data, load_path=first, autoresume=folder, **settings)
        assert next(s for e, s in stream if e is Event.FIT_START).timestamp.epoch == epoch
        pl.run(stream)
    # A State that is given is where the first start was, too.
    stream = pl.fit(pl.load(first, model=nn.Linear(2, 1)), data, autoresume=folder, **settings)
    assert next(stream)[1].timestamp.epoch == 3
    stream.close()


def test_the_checker_wants_to_be_told_of_a_checkpoint() -> None:
    events = [*BEFORE, Event.BEFORE_DATALOADER, Event.EPOCH_END]
    pl.order.check(events, loaded=True)
    with pytest.raises(pl.OrderError, match=r"event 4 of the stream is Event.BEFORE_DATALOADER"):
        pl.order.check(events)


SMALL: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "3ep"}
ROWS = [(torch.ones(2, 2), torch.ones(2, 1))] * 2


def test_autoresume_passes_over_what_training_can_not_go_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = pl.fit(nn.Linear(2, 1), ROWS, autoresume=tmp_path, **{**SMALL, "max_duration": "2ep"})
    middle = next(s for e, s in stream if e is Event.BEFORE_FORWARD)
    pl.run(stream)
    pl.save(middle, tmp_path / "debug.safetensors")
    again = pl.fit(nn.Linear(2, 1), ROWS, autoresume=tmp_path, **SMALL)
    assert next(s for e, s in again if e is Event.AFTER_LOAD).timestamp.epoch == 2
    again.close()
    assert "debug.safetensors is passed over: it is from before_forward" in caplog.text


def test_a_state_and_a_folder_of_another_run(tmp_path: Path) -> None:
    one = pl.run(pl.fit(nn.Linear(2, 1), ROWS, autoresume=tmp_path, **{**SMALL, "max_duration": "1ep"}))
    with pytest.raises(
        pl.ArgumentError, match=r"seed 0, batch 2\) is not of a run that began with the State passed \(seed 9"
    ):
        pl.fit(one.replace(seed=9), ROWS, autoresume=tmp_path, **SMALL)
    further = pl.run(pl.fit(one, ROWS, **SMALL))
    with pytest.raises(pl.ArgumentError, match="Give each run a folder of its own"):
        pl.fit(further, ROWS, autoresume=tmp_path, **SMALL)


def test_a_fresh_state_with_autoresume_starts_as_a_module_does(tmp_path: Path) -> None:
    def widen(state: pl.State) -> pl.State:
        return state.with_module(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))

    surgery = pl.Algorithm("widen", {Event.INIT: widen})
    for epochs in (1, 2):
        start = pl.State.create(nn.Linear(2, 1))
        settings = {**SMALL, "max_duration": f"{epochs}ep", "algorithms": [surgery]}
        last = pl.run(pl.fit(start, ROWS, autoresume=tmp_path, **settings))
        assert last.timestamp.epoch == epochs


def test_an_optimizer_without_memory_is_another_one_too(tmp_path: Path) -> None:
    pl.save(pl.run(pl.fit(nn.Linear(2, 1), ROWS, **{**SMALL, "optimizer": pl.optim.adamw(lr=0.1)})), tmp_path / "x")
    with pytest.raises(pl.ResumeError, match="made by another optimizer than sgd"):
        pl.fit(nn.Linear(2, 1), ROWS, load_path=tmp_path / "x", **{**SMALL, "max_duration": "4ep"})


@pytest.mark.parametrize("event", [Event.ITERATION_START, Event.ITERATION_END, Event.ITERATION_CHECKPOINT])
def test_strictly_from_the_end_of_an_iteration(event: Event) -> None:
    settings = {**SMALL, "max_duration": "4ep", "iteration_length": "2ep"}
    whole = list(pl.fit(nn.Linear(2, 1), ROWS, donate=False, **settings))
    kept = next(s for e, s in whole if e is event and s.timestamp.epoch == 2)
    again = pl.run(pl.fit(kept, ROWS, strict=True, **settings))
    sameness.assert_same(again, whole[-1][1], event.name)
