"""Other libraries' loops, one module each, measured where the library is installed.

What costs time and can be turned off is off: logging, progress, checkpoints, model summaries. They take the same
batches as tensors, made before, so no loader costs anything; and a fused AdamW, where they take an optimizer.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import attrs

from bench.performance.operators import let_torchvision_be_imported
from bench.performance.turns import InThread, OfGenerator, Turns
from bench.performance.workloads import Workload

__all__ = ["PEERS", "Peer", "UnmeasurableError", "quiet"]


class UnmeasurableError(Exception):
    """A peer can't run a workload, or not here; the message says why."""


@attrs.frozen
class Peer:
    """One row of the table.

    Attributes:
        name: as in the table.
        module: the module of this package that has it.
        function: in it: ``steps(workload)``, a generator, or ``train(workload, tick)``, for ever.
        packages: what has to be installed, as in a requirements file.
        imports: the modules that it needs.
        uses: what a user writes to import it, where importing those modules alone puts off most of the work.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    imports: str
    function: str = "steps"
    uses: str = ""

    @property
    def missing(self) -> str | None:
        """Why it can't be measured here; None if it can."""
        absent = [name for name in self.imports.split(", ") if find_spec(name.partition(".")[0]) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        try:
            with quiet():
                let_torchvision_be_imported()
                importlib.import_module(f"bench.performance.peers.{self.module}")
        except Exception as error:
            return f"can't be imported here: {type(error).__name__}: {error}"
        return None

    @property
    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in self.packages}

    def turns(self, workload: Workload) -> Turns:
        let_torchvision_be_imported()
        function = getattr(importlib.import_module(f"bench.performance.peers.{self.module}"), self.function)
        if self.function == "train":
            return InThread(lambda tick: function(workload, tick))
        return OfGenerator(function(workload))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What peers print and warn about while they are set up is not about us."""
    silent = contextlib.redirect_stdout(io.StringIO())
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), silent:
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


PEERS = [
    Peer("Ignite", "ignite", ("pytorch-ignite",), "ignite.engine", "train"),
    Peer("Fabric", "fabric", ("lightning",), "lightning.fabric"),
    Peer("Accelerate", "hf_accelerate", ("accelerate",), "accelerate", uses="from accelerate import Accelerator"),
    Peer("Lightning", "lightning", ("lightning",), "lightning.pytorch", "train"),
    Peer(
        "Hugging Face Trainer",
        "hf_trainer",
        ("transformers", "accelerate"),
        "transformers, accelerate",
        "train",
        "from transformers import Trainer, TrainingArguments",
    ),
    Peer("Composer", "composer", ("mosaicml",), "composer", "train"),
    Peer("Keras (torch)", "keras", ("keras",), "keras", "train"),
    Peer("JAX, flax and optax, jit", "jax", ("jax", "flax", "optax"), "jax, flax.linen, optax"),
    Peer("JAX, 8 steps in one scan", "jax", ("jax", "flax", "optax"), "jax, flax.linen, optax", "scanned"),
]
