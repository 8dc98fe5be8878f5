"""``state.module()`` is independent: whatever is done to it, State, model and other modules stay as they were."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

import pure_loop as pl
from pure_loop import FrozenDict

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def doubled() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Doubled())
    parametrize.register_parametrization(layer, "bias", Doubled())
    return nn.Sequential(layer, nn.Linear(4, 2))


def norms() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.BatchNorm1d(4),
    )


def remove(module: Any) -> None:
    for each in list(module.modules()):
        for name in list(getattr(each, "parametrizations", {})):
            parametrize.remove_parametrizations(each, name)


def remove_one(module: Any) -> None:
    parametrize.remove_parametrizations(module[0], "weight", leave_parametrized=True)


def change_the_class(module: Any) -> None:
    type(module[0]).forward = lambda self, x: torch.zeros(len(x), 4)


def parametrize_again(module: Any) -> None:
    parametrize.register_parametrization(module[0], "weight", Doubled())


def hook(module: Any) -> None:
    module[0].register_forward_hook(lambda *_: torch.zeros(5, 4))
    module[0].register_forward_pre_hook(lambda *_: (torch.zeros(5, 4),))


def cut_weights(module: Any) -> None:
    remove(module)
    prune.l1_unstructured(module[0], "weight", amount=0.5)


def overwrite(module: Any) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.zero_()


def replace(module: Any) -> None:
    module[0] = nn.Identity()
    module.forward = lambda x: x


CHANGES = [remove, remove_one, change_the_class, parametrize_again, hook, cut_weights, overwrite, replace]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("make", [doubled, norms])
@pytest.mark.parametrize("of", ["the module", "a copy of it", "the user's model"])
def test_what_is_done_to_a_module_changes_nothing_else(
    make: Callable[[], nn.Module], change: Callable[[Any], None], of: str
) -> None:
    """Neighbours of removing a parametrization: its class, pruning, hooks, in-place writes; and the user's model."""
    model = make()
    expected = model(X)
    model.eval()
    state = pl.State.create(model)
    module, other = state.module(training=False), state.module(training=False)
    evaluated = model(X)
    changed = {"the module": module, "a copy of it": copy.deepcopy(module), "the user's model": model}[of]
    change(changed)
    untouched = {"state": state.module(training=False), "another module": other}
    if of == "the user's model":
        untouched["module"] = module
    else:
        untouched["model"] = model
    for name, each in untouched.items():
        assert torch.equal(each(X), evaluated), name
    # Copies that the State calls by itself, those that there are and new ones.
    for _ in range(2):
        out, _ = state.model.apply(lambda m: m(X), state.params, state.buffers, training=False)
        assert torch.equal(out, evaluated)
    assert expected.shape == evaluated.shape


def test_training_resumes_after_a_module_lost_its_parametrization() -> None:
    """The kept State, and the user's own model, train as if state.module() had not been called."""
    data = [(X, torch.zeros(5, 2))] * 3
    arguments: dict[str, Any] = {"loss": functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep"}
    model = doubled()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, y in data * 2:
        optimizer.zero_grad()
        functional.mse_loss(expected(x), y).backward()
        optimizer.step()
    for event, state in pl.fit(model, data, **arguments):
        if event is pl.Event.BATCH_END:
            remove(state.module())
            kept = state
    for final in (kept, pl.run(pl.fit(model, data, **arguments))):
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(final.params[name], parameter.detach())


def test_two_models_that_are_parametrized_alike_are_of_one_structure() -> None:
    """Torch makes a class for each; the structure is that of the class below."""
    assert pl.State.create(doubled()).model == pl.State.create(doubled()).model


def test_a_module_can_be_copied_and_saved() -> None:
    module = pl.State.create(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).module(training=False)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert torch.equal(again(X), module(X))


def test_apply_takes_any_mapping_of_all_names() -> None:
    """Plain dicts, in any order; gradients reach their tensors. Missing and unknown names are said."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state = pl.State.create(model)
    params = {name: tensor.clone().requires_grad_() for name, tensor in reversed(state.params.items())}
    buffers = dict(state.buffers)
    out, after = state.model.apply(lambda m: m(X), params, buffers, training=True)
    assert torch.equal(out, model(X))
    assert isinstance(after, FrozenDict)
    assert int(after["1.num_batches_tracked"]) == 1
    assert int(buffers["1.num_batches_tracked"]) == 0
    gradients = torch.autograd.grad(out.square().sum(), list(params.values()))
    model(X).square().sum().backward()
    for name, gradient in zip(params, gradients, strict=True):
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)
    assert set(state.model.module(params, buffers).state_dict()) == set(model.state_dict())
    del params["0.bias"]
    with pytest.raises(pl.ArgumentError, match=r"params .*missing \['0.bias'\]"):
        state.model.apply(lambda m: m(X), params, buffers, training=True)
    with pytest.raises(pl.ArgumentError, match=r"buffers .*unknown \['x'\]"):
        state.model.apply(lambda m: m(X), state.params, {**buffers, "x": X}, training=True)
    with pytest.raises(pl.ArgumentTypeError, match="params is list"):
        state.model.apply(lambda m: m(X), list(state.params), buffers, training=True)  # type: ignore[arg-type]


class _CopiesCounted(nn.Linear):
    """Counts how often it was copied."""

    copies = 0

    def __deepcopy__(self, memory: dict[int, Any]) -> _CopiesCounted:
        type(self).copies += 1
        new = object.__new__(_CopiesCounted)
        memory[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memory))
        return new


@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("donate", ["auto", False])
def test_one_private_module_serves_all_steps(microbatch_size: int | None, donate: Any) -> None:
    """A backward gives the module of its forward back; else each step would copy the model."""
    data = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(6)]
    copies = []
    for event, _ in pl.fit(
        _CopiesCounted(3, 2),
        data,
        loss=functional.cross_entropy,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="6ba",
        microbatch_size=microbatch_size,
        donate=donate,
        strict=False,
    ):
        if event is pl.Event.BATCH_END:
            copies.append(_CopiesCounted.copies)
    assert copies[1:] == copies[1:2] * 5
