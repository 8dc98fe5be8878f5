"""Which submodules are in train mode: while training, in evaluation, and in ``state.module()``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.random import seeded
from tests.support.holding import assert_holds
from tests.support.problem import noise

DATA = [(torch.randn(6, 4, generator=noise(i)), torch.zeros(6, 2)) for i in range(3)]


class Keeps(nn.Sequential):
    """An overridden train(): the second layer stays in eval mode."""

    def train(self, mode: bool = True) -> Keeps:
        super().train(mode)
        self[1].eval()
        return self


def net(cls: type[nn.Sequential] = nn.Sequential) -> Any:
    with seeded(0):
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        return cls(nn.Linear(4, 4), nn.BatchNorm1d(4), block, nn.BatchNorm1d(4), nn.Linear(4, 2))


def modes(module: nn.Module) -> list[bool]:
    return [each.training for each in module.modules()]


FREEZES: dict[str, Callable[[Any], object]] = {
    "as made": lambda model: None,
    "one norm": lambda model: model[1].eval(),
    "frozen norm": lambda model: model[1].eval().requires_grad_(False),
    "a block": lambda model: model[2].eval(),
    "a block but for its norm": lambda model: (model[2].eval(), model[2][1].train()),
    "a norm in a model that was evaluated": lambda model: (model.eval(), model.train(), model[3].eval()),
}
WAYS: list[dict[str, Any]] = [{}, {"watch": {Event.BATCH_END}}, {"donate": False}, {"strict": True}]


def fit(model: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"loss": functional.mse_loss, "max_duration": "2ep"}
    return pl.fit(model, DATA, optimizer=pl.optim.sgd(lr=0.1), **(defaults | options))


@pytest.mark.parametrize("freeze", FREEZES)
def test_submodules_in_eval_mode_stay_so_in_training(freeze: str) -> None:
    """The modes in every forward of training are those that the user set, and in evaluation all is in eval mode."""
    for options in WAYS[list(FREEZES).index(freeze) % 2 :: 2]:
        model = net()
        FREEZES[freeze](model)
        wanted = modes(model)
        seen: dict[bool, list[list[bool]]] = {True: [], False: []}

        def forward(module: nn.Module, batch: Any) -> Tensor:
            seen[module.training].append(modes(module))
            out: Tensor = module(batch[0])
            return out

        state = pl.run(fit(model, task=pl.Task(forward=forward), evaluators=DATA[:1], eval_interval="1ba", **options))
        assert seen[True] == [wanted] * 6
        assert seen[False]
        assert all(each == [False] * len(wanted) for each in seen[False])
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm1d):
                assert int(state.buffers[f"{name}.num_batches_tracked"]) == (6 if module.training else 0)
        assert modes(model) == wanted


def test_a_model_in_eval_mode_is_put_into_train_mode() -> None:
    """As from_pretrained leaves it; also with a head in train mode that was put in after that."""
    for head in (False, True):
        model = net().eval()
        if head:
            model[4] = nn.Linear(4, 2)
        state = pl.run(fit(model))
        assert int(state.buffers["1.num_batches_tracked"]) == 6
        assert all(modes(state.module()))
        assert not any(modes(state.module(training=False)))


def test_an_overridden_train_keeps_working() -> None:
    """Alone; and with a submodule in eval mode besides."""
    for freeze, tracked in ((lambda model: None, [0, 6, 6]), (lambda model: model[3].eval(), [0, 6, 0])):
        model = net(Keeps)
        freeze(model)
        state = pl.run(fit(model))
        assert [int(state.buffers[f"{name}.num_batches_tracked"]) for name in ("1", "2.1", "3")] == tracked


def test_a_layer_that_is_in_two_places_keeps_its_mode() -> None:
    """A layer in train mode, in a block in eval mode and outside of it."""
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Sequential(nn.Linear(4, 4), norm), nn.Linear(4, 2))
    model[1].eval()
    norm.train()
    assert modes(pl.State.create(model).module()) == modes(model)
    assert int(pl.run(fit(model)).buffers["0.num_batches_tracked"]) == 12


def test_modes_come_with_modules_and_with_what_resumes(tmp_path: Path) -> None:
    """From a kept State, a pickled one, a file, and the module of a State."""
    model = net()
    FREEZES["a block but for its norm"](model)
    whole = list(fit(model))
    kept = next(s for e, s in whole if e is Event.BATCH_END and s.timestamp.batch == 2)
    for module in (kept.module(), kept.module(training=True)):
        assert modes(module) == modes(model)
    assert not any(modes(kept.module(training=False)))
    path = tmp_path / "state.safetensors"
    pl.save(kept, path)
    starts = [kept, pickle.loads(pickle.dumps(kept)), *(pl.load(path, model=each) for each in (model, kept.module()))]
    for start in starts:
        assert_holds(pl.run(fit(start)), whole[-1][1].module())


@pytest.mark.usefixtures("interpreted")
def test_a_compiled_step_keeps_the_modes() -> None:
    model = net()
    model[2][2].p = 0.0
    FREEZES["one norm"](model)
    states = [pl.run(fit(model, compile=compiled, evaluators=DATA[:1])) for compiled in (False, True)]
    assert int(states[1].buffers["1.num_batches_tracked"]) == 0
    torch.testing.assert_close(dict(states[1].buffers), dict(states[0].buffers))
