"""What recording a run costs, and going back in it: ratios of CPU times of loops that take turns in one process.

    python -m bench.performance.recording
    python -m bench.performance.recording --rounds 3 --width 256

Limits: a recorded step costs at most 1.02 of one that is not; a batch has at most 200 bytes of journal; rewinding takes
at most twice the time of the batches since the nearest kept State; a blame of all events takes at most 1.05 of a run
whose events are all watched.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import FlightRecorder

__all__ = ["LIMITS", "measure"]

LAYERS, SAMPLES = 8, 256
KEEP, DIGEST, TURN = 100, 10, 10
LIMITS = {"recorded": 1.02, "bytes of journal": 200.0, "rewound": 2.0, "blamed": 1.05}
cross_entropy = nn.functional.cross_entropy


class Batches:
    """Batches that are there already, of an endless loader whose epochs are all alike."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._batches = [
            (
                torch.randn(SAMPLES, width, generator=generator),
                torch.randint(width, (SAMPLES,), generator=generator),
            )
            for _ in range(8)
        ]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def model(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def settings(**more: Any) -> dict[str, Any]:
    common = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.01, momentum=0.9), "max_duration": "100000ba"}
    return {**common, **more}


def cpu_seconds(function: Callable[[], Any]) -> float:
    """Of all threads: what is saved beside training counts."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def steps(stream: Any, number: int) -> None:
    for _ in range(number):
        next(stream)


def recording(folder: str, width: int, rounds: int) -> dict[str, float]:
    """Rounds of as many steps as States are kept after, in turns of a few steps of each loop."""
    recorder = FlightRecorder(folder, keep=f"{KEEP}ba", digest=f"{DIGEST}ba")
    end = {"watch": {Event.BATCH_END}}
    plain, recorded = (
        pl.fit(model(width), Batches(width), **settings(callbacks=callbacks, **end)) for callbacks in ([], [recorder])
    )
    # So that a State is written in the middle of a turn, and the thread that does it is done at its end.
    steps(plain, KEEP // 2 + TURN // 2)
    steps(recorded, KEEP // 2 + TURN // 2)
    ratios, seconds = [], []
    for _ in range(rounds):
        times = [0.0, 0.0]
        for _ in range(KEEP // TURN):
            times[0] += cpu_seconds(lambda: steps(plain, TURN))
            times[1] += cpu_seconds(lambda: steps(recorded, TURN))
        ratios.append(times[1] / times[0])
        seconds.append(times[0] / KEEP)
    batches = KEEP // 2 + TURN // 2 + rounds * KEEP
    plain.close()
    recorded.close()
    journal = (Path(folder) / "journal.jsonl").stat().st_size
    return {
        "milliseconds a step": statistics.median(seconds) * 1e3,
        "recorded": statistics.median(ratios),
        "recorded, least": min(ratios),
        "recorded, most": max(ratios),
        "bytes of journal": journal / batches,
    }


def rewinding(folder: str, width: int, rounds: int) -> dict[str, float]:
    """To half of an interval after a kept State, against as many batches of a run that is not watched inside."""
    batch = KEEP + KEEP // 2
    plain = pl.fit(model(width), Batches(width), **settings(watch={Event.BATCH_END}))
    steps(plain, TURN)

    def rewind() -> None:
        stream = pl.rewind(folder, f"{batch}ba", "after_loss", model(width), Batches(width), **settings())
        assert next(stream)[1].timestamp.batch == batch
        stream.close()

    ratios = []
    for _ in range(rounds):
        rewound = cpu_seconds(rewind)
        ratios.append(rewound / cpu_seconds(lambda: steps(plain, batch - KEEP)))
    plain.close()
    return {"rewound": statistics.median(ratios)}


def blaming(width: int, rounds: int) -> dict[str, float]:
    """A run with two algorithms, in which each event is watched, and the blame of the same run."""

    def run() -> Any:
        algorithms = [pl.algorithms.gradient_clipping("norm", 1.0), pl.algorithms.ema(half_life="10ba")]
        options = settings(algorithms=algorithms, max_duration=f"{2 * TURN}ba")
        return pl.fit(model(width), Batches(width), **options)

    def watch() -> None:
        before: Any = None
        for pair in run():
            before = pair  # as a body that compares each State with the one before
        del before

    ratios = []
    for number in range(rounds + 1):
        watched, blamed = cpu_seconds(watch), cpu_seconds(lambda: pl.blame(run()))
        if number:
            ratios.append(blamed / watched)
    return {"blamed": statistics.median(ratios)}


def measure(width: int = 512, rounds: int = 5) -> Iterator[tuple[str, float]]:
    """All ratios, each a median over rounds, and what a step takes."""
    torch.set_num_threads(1)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        yield from recording(folder, width, rounds).items()
        yield from rewinding(folder, width, rounds).items()
    yield from blaming(width, rounds).items()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="of the layers")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name, value in measure(options.width, options.rounds):
        limit = f"  (at most {LIMITS[name]:g})" if name in LIMITS else ""
        print(f"{name:24}{value:9.3f}{limit}", flush=True)


if __name__ == "__main__":
    main()
