"""Which submodules are in train mode: while training, in evaluation, and in ``state.module()``."""

from __future__ import annotations

import copy
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
from pure_loop.state import State

DATA = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(i)), torch.zeros(6, 2)) for i in range(3)]


class Keeps(nn.Sequential):
    """An overridden train(): the second layer stays in eval mode."""

    def train(self, mode: bool = True) -> Keeps:
        super().train(mode)
        self[1].eval()
        return self


def net(cls: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    return cls(nn.Linear(4, 4), nn.BatchNorm1d(4), block, nn.BatchNorm1d(4), nn.Linear(4, 2))


def as_made(model: nn.Module) -> None:
    pass


def one_norm(model: Any) -> None:
    model[1].eval()


def frozen_norm(model: Any) -> None:
    model[1].eval().requires_grad_(False)


def a_block(model: Any) -> None:
    model[2].eval()


def a_block_but_for_its_norm(model: Any) -> None:
    model[2].eval()
    model[2][1].train()


def norm_in_a_model_that_was_evaluated(model: Any) -> None:
    model.eval()
    model.train()
    model[3].eval()


FREEZES = [as_made, one_norm, frozen_norm, a_block, a_block_but_for_its_norm, norm_in_a_model_that_was_evaluated]
OPTIONS: dict[str, dict[str, Any]] = {
    "all events": {},
    "watched": {"watch": {Event.BATCH_END}},
    "copied": {"donate": False},
    "strict": {"strict": True},
}


def fit(model: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"loss": functional.mse_loss, "max_duration": "2ep"}
    return pl.fit(model, DATA, optimizer=pl.optim.sgd(lr=0.1), **(defaults | options))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("freeze", FREEZES, ids=lambda freeze: freeze.__name__)
def test_submodules_in_eval_mode_stay_so_in_training(freeze: Callable[[Any], None], options: str) -> None:
    """The modes in every forward of training are those that the user set, and in evaluation all is in eval mode.

    Neighbours: a block of several layers, a layer inside it that is in train mode, frozen parameters too.
    """
    model = net()
    freeze(model)
    wanted = [each.training for each in model.modules()]
    seen: dict[bool, list[list[bool]]] = {True: [], False: []}

    def forward(module: nn.Module, batch: Any) -> Tensor:
        seen[module.training].append([each.training for each in module.modules()])
        out: Tensor = module(batch[0])
        return out

    task = pl.Task(forward=forward)
    state = pl.run(fit(model, task=task, evaluators=DATA[:1], eval_interval="1ba", **OPTIONS[options]))
    assert seen[True] == [wanted] * 6
    assert all(each == [False] * len(wanted) for each in seen[False])
    assert seen[False]
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d):
            assert int(state.buffers[f"{name}.num_batches_tracked"]) == (6 if module.training else 0)
            if not module.training:
                assert torch.equal(state.buffers[f"{name}.running_mean"], torch.zeros(4))
    assert [each.training for each in model.modules()] == wanted


def test_numbers_are_those_of_a_loop_by_hand() -> None:
    model = net()
    model[2][2].p = 0.0
    frozen_norm(model)
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], lr=0.1)
    for x, y in DATA * 2:
        optimizer.zero_grad()
        functional.mse_loss(expected(x), y).backward()
        optimizer.step()
    state = pl.run(fit(model))
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(state.params[name], parameter.detach())
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(state.buffers[name], buffer)


def test_a_model_in_eval_mode_is_put_into_train_mode() -> None:
    """As from_pretrained leaves it; also with a head in train mode that was put in after that."""
    for head in (False, True):
        model = net().eval()
        if head:
            model[4] = nn.Linear(4, 2)
        state = pl.run(fit(model))
        assert int(state.buffers["1.num_batches_tracked"]) == 6
        assert all(each.training for each in state.module().modules())


def test_an_overridden_train_keeps_working() -> None:
    """Alone; and with a submodule in eval mode besides."""
    for freeze, tracked in ((as_made, [0, 6, 6]), (lambda model: model[3].eval(), [0, 6, 0])):
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
    wanted = [each.training for each in model.modules()]
    state = pl.State.create(model)
    assert [each.training for each in state.module().modules()] == wanted
    assert int(pl.run(fit(model)).buffers["0.num_batches_tracked"]) == 12


def test_module_comes_in_the_mode_that_is_asked_for() -> None:
    """Train mode by default, with what is kept in eval mode; eval mode is eval mode for all."""
    model = net()
    one_norm(model)
    state = pl.State.create(model)
    for module in (state.module(), state.module(training=True)):
        assert [each.training for each in module.modules()] == [each.training for each in model.modules()]
    assert not any(each.training for each in state.module(training=False).modules())
    evaluated = pl.State.create(net().eval())
    assert all(each.training for each in evaluated.module().modules())
    assert not any(each.training for each in evaluated.module(training=False).modules())
    with pytest.raises(pl.ArgumentTypeError, match="training=False"):
        state.module(training="eval")  # type: ignore[arg-type]


def test_training_resumes_with_the_same_modes(tmp_path: Path) -> None:
    """From a kept State, a pickled one, a file, and the module of a State."""
    model = net()
    a_block_but_for_its_norm(model)
    whole = [(e, s) for e, s in fit(model)]
    kept = next(s for e, s in whole if e is Event.BATCH_END and s.timestamp.batch == 2)
    path = tmp_path / "state.safetensors"
    pl.save(kept, path)
    starts: list[State] = [kept, pickle.loads(pickle.dumps(kept)), pl.load(path, model=model)]
    starts.append(pl.load(path, model=kept.module()))
    for start in starts:
        state = pl.run(fit(start))
        for kind in ("params", "buffers"):
            for name, tensor in getattr(whole[-1][1], kind).items():
                assert torch.equal(getattr(state, kind)[name], tensor), name


@pytest.mark.slow
def test_a_compiled_step_keeps_the_modes(interpreted: None) -> None:
    model = net()
    model[2][2].p = 0.0
    one_norm(model)
    states = [pl.run(fit(model, compile=compiled, evaluators=DATA[:1])) for compiled in (False, True)]
    assert int(states[1].buffers["1.num_batches_tracked"]) == 0
    for name, tensor in states[0].buffers.items():
        torch.testing.assert_close(states[1].buffers[name], tensor)
