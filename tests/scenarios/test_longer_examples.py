"""The examples of longer jobs run, do what they say, and would notice if it weren't so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from tests.support.example_scripts import EXAMPLES, assert_picture, percentages

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

Output = pytest.CaptureFixture[str]


@pytest.mark.slow  # an example
def test_kfold(load: Any, tmp_path: Path, capsys: Output) -> None:
    assert load("kfold").main(["--quick", "--output", str(tmp_path / "kfold.png")]) == 0
    output = capsys.readouterr().out
    assert all(len(re.findall(r"[\d.]+%", line)) == 5 for line in output.splitlines() if " ± " in line and "%" in line)
    assert percentages(output, "linear")[0] > 40
    assert "of 600 digits are wrong" in output
    assert "fold 3 alone is bitwise the same" in output
    assert_picture(tmp_path / "kfold.png", width=1500, colors=40)


@pytest.mark.slow  # an example
def test_kfold_notices_a_fold_that_depends_on_those_before(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    example, calls = load("kfold"), []
    fold = example.fold

    def seeded_by_its_number(*arguments: Any) -> pl.State:
        calls.append(1)
        network, data, train, seed, _ = arguments
        return fold(network, data, train, seed + len(calls), 1)

    monkeypatch.setattr(example, "fold", seeded_by_its_number)
    assert example.main(["--quick", "--output", str(tmp_path / "kfold.png")]) == 1
    assert "fold 3 alone is ANOTHER" in capsys.readouterr().out


@pytest.mark.slow  # an example
def test_distillation(load: Any, tmp_path: Path, capsys: Output) -> None:
    assert load("distillation").main(["--quick", "--output", str(tmp_path / "distillation.png")]) == 0
    rows = re.findall(r"^ +\d+ +([\d.]+)% +([\d.]+)% +([\d.]+)% +([\d.]+)%$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 2
    for alone, unseen_alone, distilled, unseen in (map(float, row) for row in rows):
        assert unseen_alone == 0 < 50 < unseen
        assert alone + 5 < distilled
    assert_picture(tmp_path / "distillation.png", width=1500, colors=10)


def test_the_loss_of_distillation(load: Any) -> None:
    """In microbatches it is what the formula says of the whole batch."""
    generator = torch.Generator().manual_seed(0)
    teacher, student = nn.Linear(4, 3), nn.Linear(4, 3)
    batch = (torch.randn(7, 4, generator=generator), torch.randint(3, (7,), generator=generator))
    stream = pl.fit(
        student,
        [batch],
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="1ba",
        microbatch_size=3,
        algorithms=[load("distillation").distill(teacher, temperature=2.0, weight=0.75)],
        strict=True,
    )
    state = next(state for event, state in stream if event is Event.AFTER_TRAIN_BATCH)
    scores, wanted = student(batch[0]), teacher(batch[0])
    p, q = (wanted / 2).softmax(dim=1), (scores / 2).softmax(dim=1)
    loss = 0.25 * nn.functional.cross_entropy(scores, batch[1]) + 0.75 * 4 * (p * (p / q).log()).sum(dim=1).mean()
    torch.testing.assert_close(state.loss, loss.detach())
    torch.testing.assert_close(state.grads["weight"], torch.autograd.grad(loss, student.weight)[0])


@pytest.mark.slow  # an example
def test_reinforce(load: Any, tmp_path: Path, capsys: Output) -> None:
    assert load("reinforce").main(["--quick", "--output", str(tmp_path / "reinforce.png")]) == 0
    output = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) steps$", output, re.MULTILINE)
    (first, played, balanced), *_, (last, played_in_the_end, balanced_in_the_end) = (map(float, row) for row in rows)
    assert (len(rows), first, last) == (3, 1, 15)
    assert played + 20 < played_in_the_end
    assert balanced + 20 < balanced_in_the_end
    assert "resumed from a file of batch 5: the State at the end is bitwise the same" in output
    assert_picture(tmp_path / "reinforce.png", width=1500, colors=15)


def test_reinforce_resumes_by_the_law_of_scripts(load: Any) -> None:
    example = load("reinforce")
    whole = example.train(example.fresh_state(3, 4), 4)
    assert [state.timestamp.sample for state in whole] == [32, 64, 96, 128]
    for kept in whole[:-1]:
        rest = example.train(kept, 4)
        for again, first in zip(rest, whole[kept.timestamp.batch :], strict=True):
            assert not load("_compare").differences(again, first)


def test_a_cart_and_its_pole_gain_the_energy_that_the_push_gives(load: Any) -> None:
    """Power is force times speed: exact for the derivatives by time, of which one step of Euler is a multiple."""
    move = load("reinforce").move
    position = torch.tensor([[0.0, 0.3, 0.1, -0.2], [1.0, -2.0, -0.2, 3.0]], dtype=torch.float64)

    def energy(position: torch.Tensor) -> torch.Tensor:
        _, speed, angle, turning = position.unbind(dim=1)
        of_both = 0.1 * 0.5 * speed * turning * angle.cos()
        kinetic = 0.5 * 1.1 * speed**2 + of_both + 0.5 * (0.1 * 0.25 * 4 / 3) * turning**2
        return kinetic + 0.1 * 9.8 * 0.5 * angle.cos()

    for action, force in ((0, -10.0), (1, 10.0)):
        velocity = (move(position, torch.full((2,), action)) - position) / 0.02
        (slope,) = torch.autograd.grad(energy(position.requires_grad_()).sum(), position)
        torch.testing.assert_close((slope * velocity).sum(dim=1), force * position[:, 1])


@pytest.mark.slow  # an example
def test_sweep(load: Any, tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("optuna")
    assert load("sweep").main(["--quick", "--output", str(tmp_path / "sweep.png")]) == 0
    output = capsys.readouterr().out
    rows = [line.split()[-3:] for line in re.findall(r"^ +\d+ +0\..*$", output, re.MULTILINE)]
    assert len(rows) == 12
    # Of each generation a third at least, and not all, is trained on from rung to rung.
    reached = [sum(losses[rung] != "." for losses in rows) for rung in range(3)]
    assert 12 == reached[0] > reached[1] >= reached[2] >= 1
    losses = [float(row[-1]) for row in rows if row[-1] != "."]
    assert f"a loss of {min(losses):.3f}; trained from the fork at once it is bitwise the same" in output
    trained = 60 + 12 * 40 + reached[1] * 80 + reached[2] * 240
    assert f"trained {trained:,} batches; 12 whole runs are 5,040" in output
    assert_picture(tmp_path / "sweep.png", width=1500, colors=20)


def test_a_third_of_a_rung_goes_on(load: Any) -> None:
    optuna = pytest.importorskip("optuna")
    example = load("sweep")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=example.Halving())
    trials = [study.ask() for _ in range(6)]
    for trial, loss in zip(trials, (0.3, 0.1, 0.6, 0.2, 0.5, 0.4), strict=True):
        trial.report(loss, 100)
    assert [trial.should_prune() for trial in trials] == [True, False, True, False, True, True]


@pytest.mark.slow  # an example
def test_images(load: Any, tmp_path: Path, capsys: Output) -> None:
    assert load("images").main(["--quick", "--output", str(tmp_path / "images.png")]) == 0
    output = capsys.readouterr().out
    epoch = int(re.findall(r"the best average is that of epoch (\d+)$", output, re.MULTILINE)[0])
    assert f"the restored weights are the average of epoch {epoch}, bit for bit" in output
    assert percentages(output, "the best average")[0] > 70
    assert_picture(tmp_path / "images.png", width=1500, colors=40)


@pytest.mark.slow  # an example
def test_images_notices_what_is_not_restored(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    example = load("images")
    monkeypatch.setattr(example, "restored", lambda state: state)
    assert example.main(["--epochs", "2", "--output", str(tmp_path / "images.png")]) == 1
    assert "the restored weights ARE NOT the average" in capsys.readouterr().out


def test_augmentation_moves_every_image_in_its_own_way(load: Any) -> None:
    example = load("images")
    image = torch.zeros(8, 8)
    image[2:5, 3:6] = 1.0
    images = image.expand(16, 1, 8, 8)
    first, again, another = (example.augmented(images, pl.random.generator(0, number)) for number in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, another)
    assert first.shape == images.shape
    assert len({tuple(each.flatten().tolist()) for each in first}) == 16
    # Scaled, moved and erased, and nowhere brighter than before.
    assert 0 <= float(first.min()) <= float(first.max()) <= 1
    assert first.flatten(1).sum(dim=1).lt(25).all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_finetune_lora(tmp_path: Path) -> None:
    """In a process of its own: what transformers and peft import warns of what others have installed."""
    if not (find_spec("transformers") and find_spec("peft")):
        pytest.skip("the extra examples is not installed")
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / "finetune_lora.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    trained, everything = re.findall(r"^([\d,]+) of ([\d,]+) parameters are trained", done.stdout, re.MULTILINE)[0]
    # Of rank 8: in each of two layers four matrices of 64 x 64 and three of 64 x 160.
    assert int(trained.replace(",", "")) == 2 * 8 * (4 * (64 + 64) + 3 * (64 + 160))
    assert int(everything.replace(",", "")) > 8 * int(trained.replace(",", ""))
    adapters, whole = map(int, re.findall(r": (\d+) KiB", done.stdout))
    assert 2 * adapters < whole
    (base, learned) = re.findall(r"^code +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)[0]
    assert float(learned) < float(base)
    assert "the base: 21 tensors, bitwise as they were" in done.stdout
    assert "resumed from batch 6: bitwise the same" in done.stdout
    assert_picture(tmp_path / "finetune_lora.png", width=1500, colors=10)


@pytest.mark.thorough  # an example as long as users run it
@pytest.mark.parametrize("name", ["kfold", "distillation", "reinforce", "images", "sweep"])
def test_the_whole_job_reaches_its_goal(name: str, load: Any, tmp_path: Path) -> None:
    assert load(name).main(["--output", str(tmp_path / "picture.png")]) == 0
