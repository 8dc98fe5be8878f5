"""Which submodules are in train mode: while training, in evaluation, and in ``state.module()``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from tests.support.holding import DATA, WAYS, assert_holds, ends, fit, made
from tests.support.problem import cross_entropy


class Keeps(nn.Sequential):
    """An overridden train(): the second layer stays in eval mode."""

    def train(self, mode: bool = True) -> Keeps:
        super().train(mode)
        self[1].eval()
        return self


def net(cls: type[nn.Sequential] = nn.Sequential) -> Any:
    def make() -> nn.Module:
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        return cls(nn.Linear(4, 4), nn.BatchNorm1d(4), block, nn.BatchNorm1d(4), nn.Linear(4, 2))

    return made(make)


def modes(module: nn.Module) -> list[bool]:
    return [each.training for each in module.modules()]


def tracked(state: pl.State) -> list[int]:
    """How many batches each BatchNorm has seen in train mode."""
    return [int(state.buffers[f"{name}.num_batches_tracked"]) for name in ("1", "2.1", "3")]


# What is done to a model, and how many batches its norms see.
FREEZES: list[tuple[Callable[[Any], object], list[int]]] = [
    (lambda model: None, [6, 6, 6]),
    (lambda model: model[1].eval().requires_grad_(False), [0, 6, 6]),
    (lambda model: model[2].eval(), [6, 0, 6]),
    (lambda model: (model[2].eval(), model[2][1].train()), [6, 6, 6]),
    (lambda model: (model.eval(), model.train(), model[3].eval()), [6, 6, 0]),
]


def test_submodules_in_eval_mode_stay_so_in_training(tmp_path: Path) -> None:
    """The modes in every forward of training are those that the user set, and in evaluation all is in eval mode.

    So they are in ``state.module()``, and where training resumes from a kept State, a pickled one, a file.
    """
    for (freeze, norms), options in zip(FREEZES, WAYS, strict=True):
        model = net()
        freeze(model)
        wanted = modes(model)
        seen: dict[bool, list[list[bool]]] = {True: [], False: []}

        def forward(module: nn.Module, batch: Any) -> Tensor:
            seen[module.training].append(modes(module))
            out: Tensor = module(batch[0])
            return out

        evaluated = fit(
            model,
            loss=pl.Task(forward=forward, loss=cross_entropy),
            evaluators=DATA[:1],
            eval_interval="1ba",
            **options,
        )
        assert tracked(pl.run(evaluated)) == norms
        assert seen[True] == [wanted] * 6
        assert seen[False]
        assert all(each == [False] * len(wanted) for each in seen[False])
        assert modes(model) == wanted
        whole = ends(model, **options)
        for module in (whole[1].module(), whole[1].module(training=True)):
            assert modes(module) == wanted
        assert not any(modes(whole[1].module(training=False)))
        pl.save(whole[1], tmp_path / "x.safetensors")
        loaded = [pl.load(tmp_path / "x.safetensors", model=each) for each in (model, whole[1].module())]
        for start in (whole[1], pickle.loads(pickle.dumps(whole[1])), *loaded):
            assert_holds(pl.run(fit(start, **options)), whole[-1].module())


def test_a_model_in_eval_mode_is_put_into_train_mode() -> None:
    """As from_pretrained leaves it; also with a head in train mode that was put in after that."""
    for head in (False, True):
        model = net().eval()
        if head:
            model[4] = nn.Linear(4, 2)
        state = pl.run(fit(model))
        assert tracked(state) == [6, 6, 6]
        assert all(modes(state.module()))


def test_an_overridden_train_and_a_layer_in_two_places_keep_their_modes() -> None:
    """With a submodule in eval mode besides; a layer in train mode, in a block in eval mode and outside of it."""
    model = net(Keeps)
    model[3].eval()
    assert tracked(pl.run(fit(model))) == [0, 6, 0]
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Sequential(nn.Linear(4, 4), norm), nn.Linear(4, 2))
    model[1].eval()
    norm.train()
    assert modes(pl.State.create(model).module()) == modes(model)
    assert int(pl.run(fit(model)).buffers["0.num_batches_tracked"]) == 12


@pytest.mark.usefixtures("interpreted")
def test_a_compiled_step_keeps_the_modes() -> None:
    model = net()
    model[2][2].p = 0.0
    model[1].eval()
    eager, compiled = (pl.run(fit(model, compile=each, evaluators=DATA[:1])) for each in (False, True))
    assert tracked(compiled) == [0, 6, 6]
    torch.testing.assert_close(dict(compiled.buffers), dict(eager.buffers))
