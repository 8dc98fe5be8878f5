"""Layers that are cut over ranks: a model, its plan, and meshes, for tests of tensor parallelism."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from pure_loop.distributed import Parallel
from pure_loop.testing.problems import Problem

PLAN = {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()}


class Residual(nn.Module):
    """Two blocks that are cut, and layers that are not; of 6 units two ranks of two data ranks hold 2, 2, 1 and 1."""

    def __init__(self, dropout=0.0, width=12):
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(3, 5), nn.LayerNorm(5), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, width), nn.GELU(), nn.Linear(width, 5)) for _ in range(2)
        )
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + self.dropout(block(self.norm(x)))
        return self.last(x)


def cut(module, mesh):
    return parallelize_module(module, mesh, PLAN)


def mesh(shape=(2, 2), names=("data", "tp")):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def cut_over(kind, shape=(2, 2), names=("data", "tp"), parallelize=cut, **options):
    return Parallel(kind, parallelize=parallelize, mesh=mesh(shape, names), **options)


def _batch(samples, generator):
    inputs = torch.randn(samples, 3, generator=generator)
    return inputs, torch.randn(samples, 2, generator=generator)


def _problem(name, make, **options):
    return Problem(name=name, make_model=make, make_batch=_batch, loss=functional.mse_loss, **options)


PROBLEM = _problem("cut", Residual)
NARROW = _problem("cut unevenly", lambda: Residual(width=6))
DRAWING = _problem("cut, with dropout", lambda: Residual(dropout=0.3), separable=False)
