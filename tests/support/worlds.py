"""Several ranks on real processes: their pools, and the algorithms that run there."""

from __future__ import annotations

import gc
import sys
from functools import partial

import torch

import pure_loop as pl
from pure_loop.testing._compositions import ALGORITHMS as LIBRARY
from pure_loop.testing._compositions import built
from pure_loop.testing.ranks import shared_pool
from tests.conftest import THOROUGH
from tests.support.samples import simplest

KINDS = ("replicate", "shard")
GATHERS_WHERE_CHECKED = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)
A = pl.algorithms


def _serves_ranks(name):
    """Whether ranks can train with it what one process trains: on any data, and nothing is drawn for samples.

    Models of images have BatchNorm's statistics, which are of another batch on each rank.
    """
    module = sys.modules[LIBRARY[name].__module__]
    drawn = "world_size" in getattr(module, "EXPECTED_FAILURES", {})
    return getattr(module, "SERVES", None) in (None, "classes") and not drawn


def _with_simplest_settings(name):
    return simplest(built(LIBRARY[name]))


ALGORITHMS = {
    **{name: partial(_with_simplest_settings, name) for name in LIBRARY if _serves_ranks(name)},
    "asam": lambda: A.sam(rho=0.5, adaptive=True),
    "clip_value": lambda: A.gradient_clipping("value", 0.1),
    "clip_adaptive": lambda: A.gradient_clipping("adaptive", 0.05),
    "composed": lambda: pl.compose(A.sam(), A.ema(half_life="3ba"), A.gradient_clipping("norm", 0.3)),
}


# How many ranks a property draws; three processes more take as long to start as the property does.
NUMBERS = (2, 2, 3) if THOROUGH else (2,)


class Ranks:
    """A pool whose processes look for garbage in what a program has made alone.

    Each stream that ends looks for it, and what is imported is a million objects.
    """

    def __init__(self, shared):
        self._shared = shared

    def run(self, program):
        return self._shared.run(partial(_run, program))


def _run(program, rank):
    gc.collect()
    gc.freeze()
    return program(rank)


def pool(ranks=2, kind="replicate"):
    # CI takes one pool for all: where gloo's collectives are checked, they take five times as long. And torch's
    # DistributedDataParallel crashes there, in torch itself, and torch 2.11 can't gather a DTensor.
    return Ranks(shared_pool(ranks, checked=THOROUGH and kind == "shard" and GATHERS_WHERE_CHECKED))


def an_epoch(model, data, **options):
    """A stream of one epoch of plain gradient descent."""
    options = {
        "loss": torch.nn.functional.mse_loss,
        "optimizer": pl.optim.sgd(lr=0.1),
        "max_duration": "1ep",
        **options,
    }
    return pl.fit(model, data, **options)


def told(stream):
    """What the error of a stream, or of the call that makes it, says; after it, the ranks can run another one."""
    try:
        pl.run(stream() if callable(stream) else stream)
    except Exception as error:
        return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "nothing"


def two_halves():
    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

        def forward(self, x):
            out = 0.0 * x
            if bool((x > 0).any()):
                out = out + (x > 0) * self.one(x)
            if bool((x < 0).any()):
                out = out + (x < 0) * self.two(x)
            return out

    torch.manual_seed(0)
    return Halves()
