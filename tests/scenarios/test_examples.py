"""The examples run, do what they say, and would notice if it weren't so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from tests.support.example_scripts import EXAMPLES, assert_picture, percentages

# What `pip install pure_loop[docs,plot]` brings.
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")


@pytest.mark.slow  # an example in a process of its own
def test_digits_as_a_script(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert percentages(done.stdout, "held-out")[0] >= 80
    compared = re.search(r"compared +([\d,]+) events and ([\d,]+) tensors: all bitwise equal", done.stdout)
    assert compared is not None, done.stdout
    # Half of three epochs of 23 batches, each of two microbatches and so of 18 events or more.
    events, tensors = (int(number.replace(",", "")) for number in compared.groups())
    assert events >= 34 * 18
    assert tensors >= 34 * 80
    assert "epoch 3/3" in done.stderr
    assert_picture(tmp_path / "digits.png", width=1200, colors=20)


def test_digits_fails_below_its_goal(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digits = load("digits")
    assert digits.main(["--epochs", "1", "--output", str(tmp_path / "digits.png")]) == 1
    output = capsys.readouterr().out
    assert "failed" in output
    assert "all bitwise equal" in output


def test_digits_notices_a_replay_that_differs(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = load("digits")
    record = digits.record

    def off_by_one_bit(stream: Any, description: str) -> Any:
        history = record(stream, description)
        if description == "replay":
            at = max(index for index, (event, _) in enumerate(history) if event is Event.BATCH_END)
            event, state = history[at]
            name = next(iter(state.buffers))
            changed = torch.nextafter(state.buffers[name], torch.tensor(torch.inf))
            history[at] = (event, state.replace(buffers={**state.buffers, name: changed}))
        return history

    monkeypatch.setattr(digits, "record", off_by_one_bit)
    assert digits.main(["--quick", "--output", str(tmp_path / "digits.png")]) == 1
    assert "1 DIFFER, first buffers." in capsys.readouterr().out


@pytest.mark.thorough  # an example as long as users run it
@pytest.mark.parametrize("seed", range(5))
def test_digits_reaches_its_goal(seed: int, load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("digits").main(["--seed", str(seed), "--output", str(tmp_path / "digits.png")]) == 0
    output = capsys.readouterr().out
    assert percentages(output, "held-out")[0] >= 98
    assert percentages(output, "shifted")[0] >= 96


def test_gan(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("gan").main(["--quick", "--output", str(tmp_path / "gan.png")]) == 0
    output = capsys.readouterr().out
    assert len(re.findall(r"^ +\d+ .* of 8 .*%$", output, re.MULTILINE)) == 5
    assert "bitwise the same" in output
    assert_picture(tmp_path / "gan.png", width=1600, colors=20)


def test_gan_trains_both_players_and_averages(load: Any) -> None:
    gan = load("gan")
    start = gan.fresh_state(seed=3, batches=3)
    pairs = list(pl.drive(gan.script(start), algorithms=[pl.algorithms.ema(smoothing=0.5)], strict=True))
    batch = [Event.AFTER_DATALOADER, Event.BATCH_START, Event.BATCH_END]
    assert [event for event, _ in pairs] == [Event.FIT_START, *batch * 3, Event.FIT_END]
    end = pairs[-1][1]
    assert all(not torch.equal(end.params[name], start.params[name]) for name in start.params)
    assert {player: int(memory["step"]) for player, memory in end.opt_state.items()} == dict.fromkeys(gan.PLAYERS, 3)
    weights = [state.params for event, state in pairs if event is Event.BATCH_END]
    average = start.params["generator.0.weight"]
    for each in weights:
        average = (average + each["generator.0.weight"]) / 2
    torch.testing.assert_close(pl.algorithms.averaged(end).params["generator.0.weight"], average)


@pytest.mark.thorough  # an example as long as users run it
@pytest.mark.parametrize("seed", range(3))
def test_gan_finds_all_places(seed: int, load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("gan").main(["--seed", str(seed), "--output", str(tmp_path / "gan.png")]) == 0
    last = [line for line in capsys.readouterr().out.splitlines() if line.endswith("%")][-1]
    assert "8 of 8" in last
    assert float(last.split()[-1].rstrip("%")) >= 80


def test_fork(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("fork").main(["--quick", "--output", str(tmp_path / "fork.png")]) == 0
    output = capsys.readouterr().out
    assert "the kept State is unchanged" in output
    assert "the first fork repeats the run: 40 States" in output
    rows = re.findall(
        r"^(as before|a tenth.*?|three times.*?|another seed) {2,}.* ([\d.]+) +[\d.]+%$", output, re.MULTILINE
    )
    assert len({loss for _, loss in rows}) == 4, output
    assert_picture(tmp_path / "fork.png", width=1200, colors=20)


def test_loss_jumped(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("loss_jumped").main(["--output", str(tmp_path / "jumped.png")]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^ +\d+ +1234 +\d+", output, re.MULTILINE)
    assert "The runs part at BATCH_END, batch 1 (epoch 0), after optimizer" in output
    assert_picture(tmp_path / "jumped.png", width=900, colors=20)


def test_early_stopping(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("early_stopping").main(["--quick", "--output", str(tmp_path / "stopping.png")]) == 0
    output = capsys.readouterr().out
    rows = re.findall(r"^(the best|where it|trained).*? +(\d+) +([\d.]+) +[\d.]+ +[\d.]+%$", output, re.MULTILINE)
    (best, stopped, on), losses = ([int(row[1]) for row in rows], [float(row[2]) for row in rows])
    assert (stopped, on) == (best + 3, best + 9)
    assert losses[0] == min(losses) < losses[1]
    assert f"those of epoch {best}, bit for bit" in output
    assert_picture(tmp_path / "stopping.png", width=1200, colors=20)


def test_early_stopping_notices_what_is_not_restored(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("early_stopping")
    monkeypatch.setattr(example, "restored", lambda state: state)
    assert example.main(["--quick", "--output", str(tmp_path / "stopping.png")]) == 1
    assert "the restored parameters ARE NOT those" in capsys.readouterr().out


def test_confusion(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("confusion").main(["--quick", "--output", str(tmp_path / "confusion.png")]) == 0
    output = capsys.readouterr().out
    accuracies = percentages(output, "epoch")
    assert len(accuracies) == 5
    assert accuracies[0] + 20 <= accuracies[-1]
    matrix = [row.replace(".", "0").split()[1:] for row in re.findall(r"^ +\d(?: +[\d.]+){10}$", output, re.MULTILINE)]
    assert sum(int(count) for row in matrix[-10:] for count in row) == 797
    assert_picture(tmp_path / "confusion.png", width=1600, colors=20)


def test_confusion_notices_images_that_are_not_those_of_the_data(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("confusion")
    visualizer = example.ImageVisualizer
    monkeypatch.setattr(example, "ImageVisualizer", lambda **options: visualizer(**{**options, "std": 0.36}))
    assert example.main(["--quick", "--output", str(tmp_path / "confusion.png")]) == 1
    assert "the images ARE NOT those of the data" in capsys.readouterr().out


@pytest.mark.slow  # an example
def test_own_algorithm(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("own_algorithm").main(["--quick"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"AFTER_TRAIN_BATCH +algorithm +spike_guard$", output, re.MULTILINE)
    assert re.search(r"BATCH_END +algorithm +ema$", output, re.MULTILINE)
    (nothing,) = percentages(output, "nothing")
    alone, with_ema = percentages(output, "spike_guard") + percentages(output, "spike_guard, EMA")[-1:]
    assert alone >= nothing + 30
    assert with_ema >= nothing + 30
    assert "3 gradients cut" in output


@pytest.mark.parametrize("fault", ["memory outside the State", "changes a gradient in place", "cuts too much"])
def test_own_algorithm_would_notice(fault: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("own_algorithm")
    broken_by(fault, example, monkeypatch)
    with pytest.raises((AssertionError, pl.ImpurityError)):
        example.check(examples=2)


def broken_by(fault: str, example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(deviations: float = 3.0, decay: float = 0.95) -> pl.Algorithm:
        calls: list[int] = []

        def guard(state: pl.State) -> pl.State:
            calls.append(1)
            assert state.grads is not None
            if fault == "changes a gradient in place":
                next(iter(state.grads.values())).mul_(0.5)
                return state
            factor = 1.0 / len(calls) if fault == "memory outside the State" and deviations < 10 else 1.0
            if fault == "cuts too much":
                factor = 0.5
            return state.replace(grads={name: factor * gradient for name, gradient in state.grads.items()})

        return pl.Algorithm("spike_guard", {Event.AFTER_TRAIN_BATCH: guard})

    monkeypatch.setattr(example, "spike_guard", make)


def processes(mark: str) -> list[str]:
    """The processes that have this in their environment; none where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:  # it ended, or is another user's
            continue
    return found


def transformer(*command: str, parallel: str = "replicate") -> list[tuple[int, float]]:
    """The steps and validation losses of a short run, which wrote some text and left no process."""
    mark = f"PURE_LOOP_EXAMPLE={uuid.uuid4()}"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    environment |= [mark.split("=")]
    options = ["--steps", "20", "--characters", "60", "--parallel", parallel]
    script = str(EXAMPLES / "char_transformer.py")
    try:
        done = subprocess.run(
            [sys.executable, *command, script, *options], env=environment, capture_output=True, text=True, timeout=200
        )
    finally:
        left = processes(mark)
        for each in left:
            os.kill(int(each), signal.SIGKILL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not left
    assert len(done.stdout.partition("what it writes:\nThe ")[2]) >= 60
    found = re.findall(r"^ +(\d+) +[\d,]+ +([\d.]+) +[\d.]+% +[\d.]+$", done.stdout, re.MULTILINE)
    return [(int(step), float(loss)) for step, loss in found]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, float]]:
    return transformer()


@pytest.mark.slow  # an example in a process of its own
def test_char_transformer(alone: list[tuple[int, float]]) -> None:
    assert [step for step, _ in alone] == list(range(2, 21, 2)), "a line is missing, or there twice"
    assert alone[-1][1] < 3.2 < 4.0 < alone[0][1]


@pytest.mark.slow  # an example on real ranks
@pytest.mark.parametrize("parallel", ["replicate", pytest.param("shard", marks=pytest.mark.thorough)])
def test_char_transformer_on_two_ranks(parallel: str, alone: list[tuple[int, float]]) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = transformer(*torchrun, parallel=parallel)
    assert [step for step, _ in together] == [step for step, _ in alone], "a line is missing, or there twice"
    assert [loss for _, loss in together] == pytest.approx([loss for _, loss in alone], abs=2e-3)


@pytest.mark.slow  # an example, whose processes are killed
def test_a_killed_run_comes_to_the_same(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "killed.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed\n") == 2
    assert "the last State is the same as" in done.stdout


@pytest.mark.slow  # an example, whose processes are killed
def test_records_of_a_run_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    environment.pop("WANDB_SERVICE", None)  # of this process, where W&B runs here already
    command = [sys.executable, str(EXAMPLES / "logged.py"), "--quick", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  killed\n") == 2
    recorded = re.findall(r"^(JSON lines|TensorBoard|W&B) +141 +0 +0   those of a run", done.stdout, re.MULTILINE)
    assert recorded == ["JSON lines", "TensorBoard", "W&B"]
    assert_picture(tmp_path / "logged.png", width=1000, colors=8)
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert again.returncode == 2, "records of another run would be taken for those of this one"


@pytest.mark.parametrize("fault", ["a step is lost", "a step is there twice", "another loss"])
def test_records_would_notice(fault: str, load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("logged")
    whole = [(step, 1.0 / step) for step in range(1, 9)]
    faulty = [whole[:4], whole[4:]]
    assert example.compare({"good": faulty}, whole)
    changed = {
        "a step is lost": [whole[:4], whole[5:]],
        "a step is there twice": [whole[:4], whole[3:]],
        "another loss": [whole[:7], [(8, 0.5)]],
    }
    assert not example.compare({"good": faulty, "faulty": changed[fault]}, whole)
