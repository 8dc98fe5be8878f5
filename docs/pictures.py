"""Draw pictures of pages anew: ``python docs/pictures.py``, with the extras ``progress``, ``plot``, ``docs``.

``docs/pictures/resumed.png`` is the loss of a run whose process is killed again and again, over that of a run that is
not. The script fails if one loss differs in one bit. ``docs/pictures/progress.svg`` is what ``pl.progress`` shows in a
terminal while the first program of the README runs. ``docs/how-to/seeds_as_error_bars.png`` is what the code of
its page draws.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
EPOCHS, KILLED_AT = 8, (31, 55, 84, 98, 133, 160)
Losses = dict[int, float]


# A run that is killed


def train(folder: Path) -> None:
    """A process that is killed: it prints each batch with its loss, without rounding."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import pure_loop as pl

    torch.set_num_threads(1)
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits))
    with pl.random.seeded(0):
        model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    stream = pl.fit(
        model,
        DataLoader(data, batch_size=64, shuffle=True),
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.adamw(lr=pl.schedules.cosine("1dur", peak=3e-3, warmup="20ba")),
        max_duration=f"{EPOCHS}ep",
        autoresume=folder,
        callbacks=[pl.callbacks.CheckpointSaver(folder, interval="10ba", keep_last=3)],
    )
    for event, state in stream:
        if event is pl.Event.BATCH_END:
            print(state.timestamp.batch, float(state.loss).hex(), flush=True)


def losses_of(folder: Path, kill_at: int | None) -> Losses:
    """Run the process, and kill it after this batch; the losses by batch."""
    command = [sys.executable, __file__, "--train", str(folder)]
    losses = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            batch, loss = line.split()
            losses[int(batch)] = float.fromhex(loss)
            if int(batch) == kill_at:
                process.kill()
    if kill_at is None and process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    return losses


def resumed(path: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        whole = losses_of(Path(scratch) / "whole", None)
        attempts = [losses_of(Path(scratch) / "killed", kill_at) for kill_at in (*KILLED_AT, None)]
    again = sum(len(losses) for losses in attempts) - len(whole)
    for losses in attempts:
        for batch, loss in losses.items():
            if whole[batch] != loss:
                raise SystemExit(f"batch {batch} of a killed run has the loss {loss!r}, and else {whole[batch]!r}")
    draw(path, whole, attempts)
    print(f"{path}: {len(KILLED_AT)} kills, {len(whole)} batches, {again} of them trained more than once, equal losses")


def draw(path: Path, whole: Losses, attempts: Sequence[Losses]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(figsize=(10, 3.6), dpi=160, layout="constrained")
    axes.plot(
        [*whole], [*whole.values()], color="#c9ced6", linewidth=7, solid_joinstyle="round", label="not interrupted"
    )
    colors = plt.get_cmap("viridis")([0.02, 0.16, 0.3, 0.44, 0.58, 0.72, 0.86])
    for number, (losses, color) in enumerate(zip(attempts, colors, strict=True), 1):
        axes.plot([*losses], [*losses.values()], color=color, linewidth=1.6, label=f"process {number}")
        if number <= len(KILLED_AT):
            killed = max(losses)
            label = "killed" if number == 1 else None
            axes.plot(killed, losses[killed], "x", color="#d1242f", markersize=9, markeredgewidth=2.2, label=label)
            axes.axvline(killed, color="#d1242f", linewidth=0.7, alpha=0.35)
    axes.set(xlabel="batch", ylabel="training loss", yscale="log", xlim=(0, max(whole) + 1))
    axes.set_title(
        f"Killed {len(KILLED_AT)} times, resumed {len(KILLED_AT)} times: each of {len(whole)} losses has the same bits",
        fontsize=11,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, ncols=3)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(48).save(path, optimize=True)


# A page


def page(path: Path) -> None:
    """The picture that the code of a how-to draws, beside the page."""
    from PIL import Image

    blocks = re.findall(r"^```python\n(.*?)^```$", path.with_suffix(".md").read_text(), re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", "\n".join(blocks)], cwd=folder, env=environment, check=True, capture_output=True
        )
        with Image.open(Path(folder) / path.name) as picture:
            picture.convert("RGB").quantize(64).save(path, optimize=True)
    print(path)


# A terminal


def progress(path: Path, columns: int = 96, rows: int = 24) -> None:
    """The first program of the README in a terminal of its own; the picture is of the middle of its last epoch."""
    from rich.console import Console
    from rich.text import Text

    program = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert program is not None
    shown: list[str] = []
    screen = Screen()
    for chunk in output_of(program[1], columns, rows):
        screen.feed(chunk)
        text = re.sub(r"\x1b\[[0-9;?]*m", "", "\n".join(screen.lines))
        epoch = re.search(r"^train +epoch (\d+)/.*\d%", text, re.MULTILINE)
        # Not of the moment in which the row of this epoch is there already, and the bar not yet at its end.
        if epoch is not None and "100%" not in text and not re.search(rf"^ *{epoch[1]} ", text, re.MULTILINE):
            shown = screen.lines[:]
    if not shown:
        raise SystemExit("the program showed no progress: " + "\n".join(screen.lines))
    console = Console(record=True, width=columns, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.from_ansi("\n".join(shown).rstrip()))
    console.save_svg(str(path), title="python train.py", unique_id="progress")
    print(path)


class Screen:
    """So much of a terminal as rich uses: lines, the cursor up, and lines that are erased; colours stay in the text."""

    def __init__(self) -> None:
        self.lines, self.row, self.rest = [""], 0, ""

    def feed(self, text: str) -> None:
        text = self.rest + text.replace("\r\n", "\n")
        cut = re.search(r"\x1b(\[[0-9;?]*)?$", text)  # a sequence that goes on in the next piece
        text, self.rest = (text[: cut.start()], cut[0]) if cut else (text, "")
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", text):
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part.startswith("\x1b") and part[-1] == "A":
                self.row -= int(part[2:-1] or 1)
            elif part.startswith("\x1b") and part[-1] == "K":
                self.lines[self.row] = ""
            elif part != "\r" and (not part.startswith("\x1b") or part[-1] == "m"):  # rich erases what it overwrites
                self.lines[self.row] += part


def output_of(program: str, columns: int, rows: int) -> Iterator[str]:
    """What a program writes to a terminal of this size, in pieces."""
    import fcntl
    import pty
    import termios

    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(program)
        terminal: Any = {"stdin": writer, "stdout": writer, "stderr": writer}
        with subprocess.Popen([sys.executable, str(script)], cwd=folder, env=environment, **terminal) as process:
            os.close(writer)
            while select.select([reader], [], [], 120)[0]:
                try:
                    data = os.read(reader, 256)
                except OSError:  # the program has ended
                    break
                yield data.decode(errors="replace")
    os.close(reader)
    if process.returncode:
        raise SystemExit(f"the program ended with {process.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "names", nargs="*", choices=["resumed", "progress", "seeds", []], help="which pictures; all by default"
    )
    options = parser.parse_args(arguments)
    if options.train is not None:
        train(options.train)
        return 0
    FOLDER.mkdir(exist_ok=True)
    begun = time.perf_counter()
    if not options.names or "resumed" in options.names:
        resumed(FOLDER / "resumed.png")
    if not options.names or "progress" in options.names:
        progress(FOLDER / "progress.svg")
    if not options.names or "seeds" in options.names:
        page(ROOT / "docs" / "how-to" / "seeds_as_error_bars.png")
    print(f"{time.perf_counter() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
