"""One run of a script: what it is asked for, and what it leaves. Each leg is a process of its own, where asked."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

__all__ = ["Adapter", "Alone", "Killed", "Leg", "NotOfferedError", "Outcome", "Step", "Way", "batch_trained", "hooks"]
__all__ += ["in_this_process", "start"]

Params = Mapping[str, Tensor]

# Names of the hooks that were called, in their order.
hooks: list[str] = []


class NotOfferedError(Exception):
    """The library has no function for it; the message says what is missing."""


class Killed(BaseException):
    """The run is interrupted here; not an Exception, so that no library handles it as one of the user's code."""


@attrs.frozen
class Way:
    """One documented way to do what a law needs.

    Attributes:
        name: as in the table of results.
        stateful: with torchdata's StatefulDataLoader.
        generators: each loader with a generator of its own.
        style: what else, for the adapter.
        beyond: with code that the library's documentation doesn't give. It explains a failure, and decides nothing.
    """

    name: str
    stateful: bool = False
    generators: bool = False
    style: str = ""
    beyond: bool = False


@attrs.frozen
class Leg:
    """One run of a training script.

    Attributes:
        folder: where checkpoints are written.
        kill_after: after so many batches save, by the library's own function; then :class:`Killed` is raised.
        resume: resume from the checkpoint in ``folder``.
        evaluate: None, ``"epoch"``, or every so many batches.
        observe: with a callback that only reads.
        log: record which hooks are called.
        epochs: how many.
        accumulate: microbatches a batch.
        stateful, generators, style: of :class:`Way`.
    """

    folder: str = ""
    kill_after: int | None = None
    resume: bool = False
    evaluate: str | int | None = None
    observe: bool = False
    log: bool = False
    epochs: int = 3
    accumulate: int = 1
    stateful: bool = False
    generators: bool = False
    style: str = ""

    def by(self, way: Way) -> Leg:
        return attrs.evolve(self, stateful=way.stateful, generators=way.generators, style=way.style)


@attrs.frozen
class Step:
    """One step of SGD with a learning rate of 0.1, without dropout, from a batch that is whole or in two microbatches.

    Attributes:
        split: in two microbatches of at most four samples.
        ignored: three targets of the first microbatch are ignored.
        style: of :class:`Way`.
    """

    split: bool
    ignored: bool
    style: str = ""


@attrs.frozen
class Outcome:
    """What a leg left: parameters (None if it was killed), its record and the hooks."""

    params: Params | None
    recorded: list[tuple[list[int], str]]
    hooks: list[str]


class Adapter(Protocol):
    """A library: how it trains, in its documented ways, the best one first."""

    name: str
    packages: tuple[str, ...]
    ways: tuple[Way, ...]
    step_ways: tuple[Way, ...]

    def train(self, leg: Leg) -> Params:
        """Train for ``leg.epochs`` epochs with AdamW; the parameters at the end."""

    def step(self, step: Step) -> Params:
        """Make one step; the parameters after it."""


_trained = 0


def start() -> None:
    """Forget what was recorded; a script begins, and seeds the global generators, as it does each time."""
    from bench.peers.problem import recorded

    global _trained
    recorded.clear()
    hooks.clear()
    _trained = 0
    torch.manual_seed(0)


def batch_trained(leg: Leg) -> None:
    """To be called before each batch: raises :class:`Killed` where the leg says so."""
    global _trained
    if leg.kill_after is not None and _trained == leg.kill_after:
        raise Killed
    _trained += 1


def in_this_process(adapter: Adapter, work: Leg | Step) -> Outcome:
    """Run a leg here."""
    from bench.peers.problem import recorded

    start()
    params: Params | None = None
    with contextlib.suppress(Killed):
        params = adapter.train(work) if isinstance(work, Leg) else adapter.step(work)
    if params is not None:
        params = {name: tensor.detach().clone() for name, tensor in params.items()}
    return Outcome(params, list(recorded), list(hooks))


class Alone:
    """Runs each leg in a process of its own, which begins with nothing but the imported library.

    A process ends without the interpreter's clean-up, with whatever the library left running.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.context = multiprocessing.get_context("forkserver")
        # torch's first optimizer imports its compiler, which takes seconds.
        self.context.set_forkserver_preload([module, "torch._dynamo"])

    def __call__(self, adapter: Adapter, work: Leg | Step) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "outcome"
            process = self.context.Process(target=_run, args=(self.module, work, str(path)))
            process.start()
            process.join(300)
            if process.is_alive():
                process.kill()
                raise RuntimeError(f"{adapter.name}: {work} took longer than 300 seconds.")
            if not path.exists():
                raise RuntimeError(f"{adapter.name}: {work} ended with exit code {process.exitcode} and no result.")
            result = torch.load(path, weights_only=False)
        if isinstance(result, str):
            if result.startswith("NotOfferedError: "):
                raise NotOfferedError(result.partition(": ")[2])
            raise RuntimeError(f"{adapter.name}: {work}\n{result}")
        return result


def _run(module: str, work: Leg | Step, path: str) -> None:
    import importlib

    adapter: Adapter = importlib.import_module(module).ADAPTER
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            result: Any = in_this_process(adapter, work)
    except NotOfferedError as error:
        result = f"NotOfferedError: {error}"
    except Exception:
        result = traceback.format_exc()
    torch.save(result, path)
    os._exit(0)
