"""The examples run, do what they say, and would notice if it weren't so."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.testing import check_script
from tests.support.problem import close, cross_entropy, fit, noise

# What `pip install pure_loop[docs,plot]` brings.
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Output = pytest.CaptureFixture[str]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import an example by name, as a script sees it: with its own folder first."""
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == EXAMPLES:
            del sys.modules[name]


def assert_picture(path: Path, width: int) -> None:
    """A PNG of this width or more that shows something: several colours, on a background that isn't all there is."""
    from matplotlib.image import imread

    pixels = (255 * imread(path)[..., :3]).round().astype(int)
    assert pixels.shape[1] >= width
    assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, 3)}) >= 8
    assert 0.005 < (pixels < 250).any(axis=-1).mean() < 0.9


# In this process

ROW = r" +[\d.]+ +[\d.]+%?"


@attrs.frozen
class Example:
    """
    Attributes:
        says: what it prints, as patterns; a number that is caught is at least that beside the pattern.
        width: of its picture; 0: it draws none.
        needs: a package.
    """

    says: dict[str, float]
    width: int
    options: tuple[str, ...] = ("--quick",)
    needs: str = "torch"


RUN: dict[str, Example] = {
    "fork": Example({"the kept State is unchanged": 0, "the first fork repeats the run: 40 States": 0}, 1200),
    "early_stopping": Example({r"those of epoch \d+, bit for bit": 0, f"^the best.*{ROW}": 0}, 1200),
    "digits": Example(
        {"^held-out .*?([0-9.]+)%": 80, r"compared +[\d,]+ events and [\d,]+ tensors: all bitwise": 0}, 1200
    ),
    "gan": Example({r"^ +\d+ .* of 8 .*%$": 0, "bitwise the same": 0}, 1600),
    "loss_jumped": Example(
        {"The runs part at BATCH_END, epoch 0, batch 1, after optimizer": 0, r"^ +\d+ +1234 ": 0}, 900, ()
    ),
    "confusion": Example({r"^epoch +5: +([\d.]+)%": 60, r"^ +\d(?: +[\d.]+){10}$": 0}, 1600),
    "own_algorithm": Example({"AFTER_TRAIN_BATCH +algorithm +spike_guard$": 0, "3 gradients cut": 0}, 0),
    "kfold": Example(
        {"^linear .*?([0-9.]+)%": 40, "of 600 digits are wrong": 0, "fold 3 alone is bitwise the same": 0}, 1500
    ),
    "distillation": Example({r"^ +\d+ +[\d.]+% +0.0% +[\d.]+% +([\d.]+)%$": 50}, 1500),
    "reinforce": Example(
        {"resumed from a file of batch 5: .* bitwise the same": 0, r"^ +15 +([\d.]+) +[\d.]+ steps$": 40}, 1500
    ),
    "sweep": Example(
        {"trained from the fork at once it is bitwise the same": 0, "12 whole runs are 5,040": 0}, 1500, needs="optuna"
    ),
    "sweep_of_rates": Example(
        {r"^members 0 and \d differ .* by at most \d\.\de-1[4-9]$": 0, r"([\d.]+)%  the best$": 70}, 1500
    ),
    "population_based": Example(
        {"resumed from its middle: bitwise the same": 0, r"^the population: .* best ([\d.]+)%$": 80}, 1500
    ),
    "images": Example({r"are the average of epoch \d+, bit for bit": 0, r"^the best average .*?([\d.]+)%": 70}, 1500),
}
FAST = ("fork", "early_stopping")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in RUN])
def test_an_example_runs_and_says_what_it_does(name: str, load: Any, tmp_path: Path, capsys: Output) -> None:
    """Two of them in the fast tier; the others, of many seconds, in the slow one."""
    example, picture = RUN[name], tmp_path / "picture.png"
    pytest.importorskip(example.needs)
    assert not load(name).main([*example.options, *(["--output", str(picture)] if example.width else [])])
    output = capsys.readouterr().out
    for pattern, least in example.says.items():
        found = re.findall(pattern, output, re.MULTILINE)
        assert found, f"{pattern!r} is not in:\n{output}"
        assert not least or float(found[-1]) >= least, (pattern, found)
    if example.width:
        assert_picture(picture, example.width)


@pytest.mark.thorough  # examples as long as users run them
@pytest.mark.parametrize(
    "name", ["digits", "gan", "kfold", "distillation", "reinforce", "images", "sweep", "population_based"]
)
def test_the_whole_job_reaches_its_goal(name: str, load: Any, tmp_path: Path) -> None:
    assert load(name).main(["--output", str(tmp_path / "picture.png")]) == 0


# They would notice.


def another_seed(record: Any) -> Any:
    def recorded(stream: Any, description: str) -> Any:
        other = description == "replay"
        return [(e, state and state.replace(seed=state.seed + other)) for e, state in record(stream, description)]

    return recorded


FAULTS: list[tuple[str, str, Callable[[Any], Any], str]] = [
    ("digits", "record", another_seed, "DIFFER, first seed"),
    ("early_stopping", "restored", lambda restored: lambda state: state, "the restored parameters ARE NOT those"),
    ("confusion", "ImageVisualizer", lambda made: lambda **k: made(**{**k, "std": 0.36}), "the images ARE NOT those"),
    ("images", "restored", lambda restored: lambda state: state, "the restored weights ARE NOT the average"),
]


@pytest.mark.slow  # examples once more, with a fault in each
def test_an_example_would_notice(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    for name, function, wrong, says in FAULTS:
        example = load(name)
        monkeypatch.setattr(example, function, wrong(getattr(example, function)))
        assert example.main(["--quick", "--output", str(tmp_path / "picture.png")]) == 1
        assert says in capsys.readouterr().out


def test_digits_fails_below_its_goal_and_records_that_are_lost_are_noticed(
    load: Any, tmp_path: Path, capsys: Output
) -> None:
    assert load("digits").main(["--epochs", "1", "--output", str(tmp_path / "digits.png")]) == 1
    output = capsys.readouterr().out
    assert "failed" in output
    assert "all bitwise equal" in output
    logged, whole = load("logged"), [(step, 1.0 / step) for step in range(1, 9)]
    assert logged.compare({"good": [whole[:4], whole[4:]]}, whole)
    for parts in ([whole[:4], whole[5:]], [whole[:4], whole[3:]], [whole[:7], [(8, 0.5)]]):
        assert not logged.compare({"good": [whole[:4], whole[4:]], "faulty": parts}, whole)
    with pytest.raises(SystemExit, match="2"):  # records of another run would be taken for those of this one
        logged.main(["--keep", str(tmp_path)])


@pytest.mark.slow  # its checks once more, with a fault
def test_own_algorithm_would_notice_that_it_cuts_too_much(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH, name="spike_guard")
    def guard(state: Any) -> Any:
        return state.replace(grads={name: 0.5 * gradient for name, gradient in state.grads.items()})

    example = load("own_algorithm")
    monkeypatch.setattr(example, "spike_guard", lambda *_, **__: guard)
    with pytest.raises(AssertionError):
        example.check(examples=1)


def test_the_script_of_two_players_keeps_the_laws_and_trains_both(load: Any) -> None:
    gan = load("gan")
    start = gan.fresh_state(seed=3, batches=3)
    assert check_script(lambda state: gan.script(state, batch_size=8), start).ok
    end = pl.run(pl.drive(gan.script(start), algorithms=[pl.algorithms.ema(smoothing=0.5)], strict=True))
    assert all(not torch.equal(end.params[name], start.params[name]) for name in start.params)
    assert {player: int(memory["step"]) for player, memory in end.opt_state.items()} == dict.fromkeys(gan.PLAYERS, 3)


def test_the_loss_of_distillation(load: Any) -> None:
    """In microbatches it is what the formula says of the whole batch."""
    teacher, student = nn.Linear(4, 3), nn.Linear(4, 3)
    inputs, targets = torch.randn(7, 4, generator=noise()), torch.randint(3, (7,), generator=noise())
    distill = load("distillation").distill(teacher, temperature=2.0, weight=0.75)
    pairs = fit(student, [(inputs, targets)], [distill], microbatch_size=3, max_duration="1ba")
    state: Any = next(state for event, state in pairs if event is Event.AFTER_TRAIN_BATCH)
    p, q = ((model(inputs) / 2).softmax(dim=1) for model in (teacher, student))
    loss = 0.25 * cross_entropy(student(inputs), targets) + 0.75 * 4 * (p * (p / q).log()).sum(dim=1).mean()
    loss.backward()
    close(
        {"loss": state.loss, "grad": state.grads["weight"]}, {"loss": loss.detach(), "grad": student.weight.grad}, 1e-5
    )


# In processes of their own


def console(folder: Path, name: str, *options: str, launcher: tuple[str, ...] = (), **variables: str) -> str:
    """What an example prints."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", **variables}
    environment.pop("WANDB_SERVICE", None)  # of this process, where W&B runs here already
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # an example, alone and on real ranks
@pytest.mark.timeout(600)
def test_char_transformer_on_two_ranks(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found: list[list[float]] = []
    for launcher in ((), torchrun):
        options = ("--steps", "20", "--characters", "60", "--parallel", "shard" if found else "replicate")
        output = console(tmp_path, "char_transformer", *options, launcher=launcher)
        assert len(output.partition("what it writes:\nThe ")[2]) >= 60
        rows = re.findall(r"^ +(\d+) +[\d,]+ +([\d.]+) +[\d.]+% +[\d.]+$", output, re.MULTILINE)
        assert [int(step) for step, _ in rows] == list(range(2, 21, 2)), "a line is missing, or there twice"
        found.append([float(loss) for _, loss in rows])
    assert found[0][-1] < 3.2 < 4.0 < found[0][0]
    assert found[1] == pytest.approx(found[0], abs=2e-3)


@pytest.mark.slow  # examples, whose processes are killed
@pytest.mark.timeout(600)
def test_a_killed_run_comes_to_the_same_and_so_do_its_records(tmp_path: Path) -> None:
    output = console(tmp_path, "killed", "--quick")
    assert output.count("killed\n") == 2
    assert "the last State is the same as" in output
    for name in ("tensorboard", "wandb"):
        pytest.importorskip(name)
    output = console(tmp_path, "logged", "--quick")
    assert output.count("  killed\n") == 2
    recorded = re.findall(r"^(JSON lines|TensorBoard|W&B) +141 +0 +0   those of a run", output, re.MULTILINE)
    assert recorded == ["JSON lines", "TensorBoard", "W&B"]
    assert_picture(tmp_path / "logged.png", 1000)


@pytest.mark.slow  # an example
@pytest.mark.timeout(600)
def test_finetune_lora(tmp_path: Path) -> None:
    """In a process of its own: what transformers and peft import warns of what others have installed."""
    if not (find_spec("transformers") and find_spec("peft")):
        pytest.skip("the extra examples is not installed")
    output = console(tmp_path, "finetune_lora", "--quick", HF_HUB_OFFLINE="1")
    trained = re.findall(r"^([\d,]+) of [\d,]+ parameters are trained", output, re.MULTILINE)[0]
    # Of rank 8: in each of two layers four matrices of 64 x 64 and three of 64 x 160.
    assert int(trained.replace(",", "")) == 2 * 8 * (4 * (64 + 64) + 3 * (64 + 160))
    (base, learned) = re.findall(r"^code +([\d.]+) +([\d.]+)$", output, re.MULTILINE)[0]
    assert float(learned) < float(base)
    assert "the base: 21 tensors, bitwise as they were" in output
    assert "resumed from batch 6: bitwise the same" in output
    assert_picture(tmp_path / "finetune_lora.png", 1500)
