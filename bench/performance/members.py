"""An ensemble beside what it stands for: its members one after the other, alone, and JAX's ``vmap`` of the same step.

A turn of the members alone is as many steps of one model as an ensemble's turn makes of all, so that all loops of a row
do the same work: every member makes a step. In no other way do the members alone depend on each other.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import attrs
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from bench.performance.hand import hand_written
from bench.performance.loops import EPOCH
from bench.performance.memory import peaks
from bench.performance.steps import cpu_seconds, in_turns, paired
from bench.performance.turns import OfGenerator, Steps, Turns
from bench.performance.workloads import WORKLOADS, Workload

__all__ = [
    *("ALONE", "COMPILED", "ENSEMBLE", "INTERPRETED", "JAX", "MLPS", "PROBLEMS", "SMALL"),
    *("Alone", "Problem", "measure", "memory", "python_with_jax"),
]

ENSEMBLE = "pl.ensemble, compile=True"
INTERPRETED = "pl.ensemble"
COMPILED = "one after the other, compile=True"
ALONE = "one after the other"
HAND = "one after the other, hand-written, fused AdamW"
JAX = "JAX, vmap, jit"

_SCRIPT = Path(__file__).parent / "peers" / "jax_members.py"


@attrs.frozen
class Problem:
    """Members that are trained at once.

    Attributes:
        describe: as in the table.
        count: of the members.
        workload: of one of them.
        in_jax: the name of the model in ``peers/jax_members.py``; None: it is not there.
        options: what ``fit`` is given, from the peak rate of one member or of each.
    """

    describe: str
    count: int
    workload: Workload
    in_jax: str | None
    options: Callable[[Any], dict[str, Any]]

    @property
    def rates(self) -> list[float]:
        return [1e-3 * (1 + number / 8) for number in range(self.count)]


def _plain(rate: Any) -> dict[str, Any]:
    return {"optimizer": pl.optim.adamw(lr=rate)}


def _rich(rate: Any) -> dict[str, Any]:
    """A cosine for each, clipping by the norm and an average of the parameters."""
    algorithms = [pl.algorithms.gradient_clipping("norm", 0.5), pl.algorithms.ema(half_life="20ba")]
    return {"optimizer": pl.optim.adamw(lr=rate), "algorithms": algorithms}


def _small() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def _with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


_MLP = next(each for each in WORKLOADS if each.name == "W1")
_LARGE = next(each for each in WORKLOADS if each.name == "W2")
_SMALL = attrs.evolve(_LARGE, model=_small, batch=lambda: (torch.randn(32, 1, 8, 8), torch.randint(10, (32,))))

MLPS, SMALL = "32 MLPs 64-128-10, batch 32", "16 of two convolutions (8, 16), batch 32 of 8x8"

PROBLEMS = [
    Problem(MLPS, 32, _MLP, "mlp", _plain),
    Problem(
        "the same, with dropout, cosine rates, clipping and EMA",
        32,
        attrs.evolve(_MLP, model=_with_dropout),
        None,
        _rich,
    ),
    Problem(SMALL, 16, _SMALL, "small", _plain),
    Problem("16 of W2: convolutions (32, 64), batch 64 of 8x8", 16, _LARGE, "large", _plain),
]


def _fit(problem: Problem, *, ensemble: bool, compile: bool) -> Steps:
    """Yields the steps of an epoch, of which nothing is observed."""
    workload, rates = problem.workload, problem.rates
    batches = workload.data()
    if "algorithms" in problem.options(1e-3):
        rates = [pl.schedules.cosine("1000000ba", peak=rate) for rate in rates]  # type: ignore[misc]
    torch.manual_seed(0)
    stream = pl.fit(
        pl.ensemble(workload.model, seeds=range(problem.count)) if ensemble else workload.model(),
        [batches[index % len(batches)] for index in range(EPOCH)],
        loss=cross_entropy,
        max_duration="1000000000ba",
        watch={pl.Event.EPOCH_END},
        compile=compile,
        **problem.options(pl.each(rates) if ensemble else rates[0]),
    )
    return (EPOCH for _ in stream)


class Alone:
    """Turns in which each of ``count`` members makes a step: as many steps of one."""

    def __init__(self, turns: Turns, count: int) -> None:
        self.of_one, self._count = turns, count

    def run(self, steps: int) -> tuple[float, int]:
        seconds, done = self.of_one.run(steps * self._count)
        # A loop that makes an epoch at once may have made a part of a step of all.
        return seconds * steps * self._count / done, steps

    def close(self) -> None:
        self.of_one.close()


def _of_one(turns: Turns) -> Turns:
    """Those of one model, or of the ensemble."""
    return turns.of_one if isinstance(turns, Alone) else turns


class _Elsewhere:
    """The turns of a script in another process, which counts its own CPU time."""

    def __init__(self, python: str, model: str, count: int) -> None:
        command = [python, "-I", str(_SCRIPT), model, str(count)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        found = self._line().split()
        self.version, self.first_seconds = found[0], float(found[1])

    def run(self, steps: int) -> tuple[float, int]:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(f"{steps}\n")
        stdin.flush()
        return float(self._line()), steps

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        stdout: IO[str] | None = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"{_SCRIPT.name} ended with {self._process.wait()}")
        return line


def _loops(problem: Problem) -> dict[str, Callable[[], Turns]]:
    fit = partial(_fit, problem)
    loops: dict[str, Callable[[], Turns]] = {
        ENSEMBLE: lambda: OfGenerator(fit(ensemble=True, compile=True)),
        INTERPRETED: lambda: OfGenerator(fit(ensemble=True, compile=False)),
        COMPILED: lambda: Alone(OfGenerator(fit(ensemble=False, compile=True)), problem.count),
        ALONE: lambda: Alone(OfGenerator(fit(ensemble=False, compile=False)), problem.count),
    }
    if problem.options is _plain:
        loops[HAND] = lambda: Alone(OfGenerator(hand_written(fused=True)(problem.workload)), problem.count)
    return loops


def measure(jax: str | None, turns: int, seconds: float) -> dict[str, dict[str, dict[str, Any]]]:
    """By problem and loop: microseconds in which each member makes a step, and the ratio to those of the ensemble.

    And seconds of the first epoch, compilation included, of CPU and by the clock; and MB of all members at a step's
    peak.

    Args:
        jax: the Python that has JAX; None: there is none.
        turns: of each loop.
        seconds: of CPU time that the ensemble has in a turn.
    """
    return {problem.describe: _of(problem, jax, turns, seconds) for problem in PROBLEMS}


def _of(problem: Problem, jax: str | None, turns: int, seconds: float) -> dict[str, dict[str, Any]]:
    print(f"measuring {problem.describe} ...", flush=True)
    found: dict[str, dict[str, Any]] = {}
    loops: dict[str, Turns] = {}
    for name, make in _loops(problem).items():
        begin, wall = cpu_seconds(), time.perf_counter()
        loop = make()
        _of_one(loop).run(1)
        loops[name] = loop
        found[name] = {"first_cpu_seconds": cpu_seconds() - begin, "first_seconds": time.perf_counter() - wall}
    if jax is not None and problem.in_jax is not None:
        peer = _Elsewhere(jax, problem.in_jax, problem.count)
        loops[JAX], found[JAX] = peer, {"first_seconds": peer.first_seconds, "version": peer.version}
    times = in_turns(loops, turns, seconds)
    ratios = paired(times, ENSEMBLE)
    for name, values in times.items():
        found[name] |= {"us": statistics.median(values), "ratio": ratios[name]}
    for loop in loops.values():
        loop.close()
    for name, megabytes in memory(problem, _loops(problem)).items():
        found[name]["mb"] = megabytes
    return found


def memory(problem: Problem, names: Iterable[str]) -> Mapping[str, float]:
    """MB of all members in later steps, as torch's allocator was asked for, without the batches.

    That is parameters, the optimizer's memory, and gradients and activations of a step. Of members alone it is the sum
    over all of what one has.
    """
    batches = sum(x.nbytes + y.nbytes for x, y in problem.workload.data())
    result = {}
    for name, make in _loops(problem).items():
        if name not in names:
            continue
        _, later = peaks(lambda make=make: _of_one(make()))  # type: ignore[misc]
        count = 1 if name in (ENSEMBLE, INTERPRETED) else problem.count
        result[name] = count * (later - batches) / 1e6
    return result


def python_with_jax(named: str | None) -> str | None:
    """The Python to ask for JAX: the one that is named, or this one where it has JAX."""
    return named or (sys.executable if find_spec("jax") is not None else None)
