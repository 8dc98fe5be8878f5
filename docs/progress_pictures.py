"""The pictures of docs/progress.md: ``python docs/progress_pictures.py``.

A run is shown on a console that records, by the code that shows it in a terminal; only the clock is another one, so
that the pictures don't depend on the machine. Needs the extra ``progress``.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop.progress.display import _pass_on
from pure_loop.progress.estimate import Facts
from pure_loop.progress.screens import Snapshot
from pure_loop.progress.terminal import Bar
from pure_loop.progress.tracker import Tracker

FOLDER = Path(__file__).parent
_SECONDS = {Event.BATCH_START: 1.7, Event.EVAL_BATCH_START: 0.4}


class Picture(Bar):
    """The table and the bar, of which the last drawing alone is printed."""

    def __init__(self, width: int) -> None:
        console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        super().__init__(console)
        self.last: tuple[Snapshot, Mapping[str, float]] | None = None

    def show(self, snapshot: Snapshot, values: Mapping[str, float]) -> None:
        self.last = snapshot, values

    def _start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def svg(self, title: str, name: str) -> str:
        assert self.last is not None
        self._console.print(self._draw(*self.last))
        text = self._console.export_svg(title=title, unique_id=name)
        return re.sub(r"\s*@font-face \{.*?\}", "", text, flags=re.DOTALL)  # which would load it from elsewhere


def batches(number: int, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 5, generator=torch.Generator().manual_seed(7))
    inputs = torch.randn(number, 32, 16, generator=generator)
    noise = torch.randn(number, 32, 5, generator=generator)
    return [(x, (x @ weight + n).argmax(1)) for x, n in zip(inputs, noise, strict=True)]


def stream(**options: Any) -> Any:
    with pl.random.seeded(0):
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    evaluators = {"val": batches(20, 1), "test": batches(20, 2)}
    lr = pl.schedules.cosine("6ep", peak=1e-2)
    settings = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=lr), "max_duration": "6ep"}
    return pl.fit(model, batches(40, 0), **{**settings, "evaluators": evaluators, **options})


def draw(name: str, width: int, until: Callable[[Event, pl.State], bool], **options: Any) -> None:
    """Write the picture of a run up to an event."""
    picture, now = Picture(width), 0.0
    run = stream(**options)
    pairs = _pass_on(run, Tracker(picture, None, 0.0, lambda: now, Facts.of(run)))
    for event, state in pairs:
        if until(event, state):
            break
        now += _SECONDS.get(event, 0.0)
    path = FOLDER / f"progress-{name}.svg"
    path.write_text(picture.svg(f"python train.py ({width} columns)", f"progress-{name}"))
    print(f"wrote {path}")


def main() -> None:
    def training(event: Event, state: pl.State) -> bool:
        return event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 183

    evaluated = itertools.count(1)

    def evaluating(event: Event, state: pl.State) -> bool:
        there = event is Event.EVAL_BATCH_END and state.evaluator == "test" and state.timestamp.batch == 160
        return there and next(evaluated) == 12

    draw("80", 80, training)
    draw("120", 120, evaluating)
    draw("40", 40, training)


if __name__ == "__main__":
    main()
