"""Parameters of several dtypes: a compiled step rounds no number to the dtype of another parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop.optim import adamw, lamb, lion, sgd
from pure_loop.schedules import linear

LR = linear(0.3, 0.1, "1dur")
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: sgd(LR, momentum=linear(0.9, 0.7, "1dur"), weight_decay=linear(0.0, 0.1, "1dur")),
    "adamw": lambda: adamw(LR, weight_decay=0.1),
    "lion": lambda: lion(LR, weight_decay=0.1),
    "lamb": lambda: lamb(LR, weight_decay=0.1),
}


class Mixed(nn.Module):
    """The first parameters are the narrower ones."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(3, 4, dtype=torch.bfloat16)
        self.wide = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x.bfloat16()).float())  # type: ignore[no-any-return]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_keep_their_digits(name: str) -> None:
    model, generator = Mixed(), torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 3, generator=generator), torch.randn(6, 1, generator=generator))]

    def trained(**options: Any) -> pl.State:
        stream = pl.fit(model, data, loss=mse_loss, optimizer=OPTIMIZERS[name](), max_duration="1ep", **options)
        return pl.run(stream)

    compiled, eager = trained(compile=True, watch={pl.Event.BATCH_END}), trained()
    for parameter in ("wide.weight", "wide.bias"):
        # A rate of 0.3 in bfloat16 is 0.30078125.
        torch.testing.assert_close(compiled.params[parameter], eager.params[parameter], rtol=1e-6, atol=1e-6)
