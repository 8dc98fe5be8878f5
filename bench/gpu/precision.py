"""Mixed precision on the device: trained, saved in the middle, loaded, and resumed bit for bit."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from bench.gpu.results import Asked, asked, first_line
from pure_loop import Event
from pure_loop.testing import differences

PRECISIONS = ("amp_bf16", "amp_fp16", "amp_fp8")
BATCHES, EPOCHS, SAVED = 8, 4, 13


def model(seed: int = 0) -> nn.Module:
    """Of sizes that 16 divides, as those of matrices of 8-bit floats have to be."""
    torch.manual_seed(seed)
    inside = [nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*inside, nn.Linear(128, 16))


def data() -> list[tuple[Tensor, Tensor]]:
    """Classes that a linear map separates."""
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(64, 16, generator=generator)
    inputs = [torch.randn(32, 64, generator=generator) for _ in range(BATCHES)]
    return [(each, (each @ truth).argmax(dim=1)) for each in inputs]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.float(), targets)


def trained(device: str, precision: str) -> dict[str, Any]:
    """Two runs, of which the second goes on from the file of a State of the first."""
    fit = functools.partial(
        pl.fit,
        loss=loss,
        optimizer=pl.optim.adamw(lr=3e-3),
        max_duration=f"{EPOCHS}ep",
        precision=precision,
        device=device,
        deterministic=True,
        algorithms=[pl.algorithms.ema(half_life="8ba")],
    )
    losses: list[Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "state.safetensors")
        for event, state in fit(model(), data()):
            if event is Event.BATCH_END:
                assert state.loss is not None
                losses.append(state.loss)
                if state.timestamp.batch == SAVED:
                    pl.save(state, path)
        resumed = pl.run(fit(pl.load(path, model=model()), data()))
    first, last = (math.fsum(map(float, part)) / BATCHES for part in (losses[:BATCHES], losses[-BATCHES:]))
    found = {"loss of the first epoch": first, "loss of the last epoch": last, "learns": last < first}
    if state.loss_scale is not None:
        found["loss scale"] = float(state.loss_scale)
    different = [str(difference) for difference in differences(resumed, state)]
    return found | {"resumed bit for bit": not different, "differences": different[:3]}


def main(part: Asked) -> None:
    for precision in PRECISIONS:
        if part.left < 0:
            return
        try:
            found = trained(part.device, precision)
        except Exception as error:
            found = {"error": first_line(error)}
        part.results.write(precision, value=found)


if __name__ == "__main__":
    main(asked())
