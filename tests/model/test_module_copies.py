"""``state.module()`` is independent: whatever is done to it, State, model and other modules stay as they were."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import pure_loop as pl
from pure_loop import FrozenDict
from pure_loop.model.tree import mirror
from tests.support import problem
from tests.support.holding import DATA, fit, last, made

X = DATA[0][0]


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
    made = [each(nn.Linear(4, 4)) for each in (parametrizations.weight_norm, parametrizations.orthogonal)]
    return nn.Sequential(*made, nn.BatchNorm1d(4))


def remove(module: Any) -> None:
    for each in list(module.modules()):
        for name in list(getattr(each, "parametrizations", {})):
            parametrize.remove_parametrizations(each, name)


def cut_weights(module: Any) -> None:
    remove(module)
    prune.l1_unstructured(module[0], "weight", amount=0.5)


def overwrite(module: Any) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.zero_()


CHANGES: list[Callable[[Any], object]] = [
    remove,
    lambda m: parametrize.remove_parametrizations(m[0], "weight", leave_parametrized=True),
    lambda m: setattr(type(m[0]), "forward", lambda self, x: torch.zeros(len(x), 4)),
    lambda m: parametrize.register_parametrization(m[0], "weight", Doubled()),
    lambda m: m[0].register_forward_pre_hook(lambda *_: (torch.zeros(5, 4),)),
    *(cut_weights, overwrite),
]


def test_what_is_done_to_a_module_changes_nothing_else() -> None:
    cases = [(change, make, number) for change in CHANGES for make in (doubled, norms) for number in range(3)]
    for change, make, number in cases:
        model = make().eval()
        evaluated = model(X)
        state = pl.State.create(model)
        module, other = state.module(training=False), state.module(training=False)
        change((model, module, copy.deepcopy(module))[number])
        # A copy by copy.deepcopy has the class that a parametrization made for the first one.
        for each in (other, model if number else module, state.module(training=False)):
            assert torch.equal(each(X), evaluated), (change, number)
        # Copies that the State calls by itself, those that there are and new ones.
        for _ in range(2):
            out, _ = state.model.apply(lambda m: m(X), state.params, state.buffers, training=False)
            assert torch.equal(out, evaluated)


def test_training_goes_on_after_a_module_lost_its_parametrization() -> None:
    """The kept State, and the user's own model, train as if state.module() had not been called."""
    model = made(doubled)
    expected = pl.run(fit(copy.deepcopy(model))).params
    for event, state in fit(model):
        if event is pl.Event.BATCH_END:
            remove(state.module())
    for final in (state, pl.run(fit(model))):
        problem.close(final.params, expected)
    # Torch makes a class for each; the structure is that of the class below.
    assert pl.State.create(doubled()).model == pl.State.create(doubled()).model


def test_a_module_can_be_copied_and_saved() -> None:
    module = pl.State.create(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).module(training=False)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert torch.equal(again(X), module(X))


def test_apply_takes_any_mapping_of_all_names() -> None:
    """Plain dicts, in any order; gradients reach their tensors."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state = pl.State.create(model)
    params = {name: tensor.clone().requires_grad_() for name, tensor in reversed(state.params.items())}
    buffers = dict(state.buffers)
    out, after = state.model.apply(lambda m: m(X), params, buffers, training=True)
    assert torch.equal(out, model(X))
    assert isinstance(after, FrozenDict)
    assert [int(each["1.num_batches_tracked"]) for each in (buffers, after)] == [0, 1]
    gradients = torch.autograd.grad(out.square().sum(), list(params.values()))
    model(X).square().sum().backward()
    for name, gradient in zip(params, gradients, strict=True):
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)
    assert set(state.model.module(params, buffers).state_dict()) == set(model.state_dict())


class Handles(nn.Module):
    """Keeps the handles of its hooks, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.handle = self.layer.register_forward_hook(lambda module, args, output: output + 1)
        self.handles = [
            self.layer.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True),
            self.layer.register_full_backward_pre_hook(lambda *_: None),
            self.register_state_dict_post_hook(lambda *_: None),
        ]
        self.removed = self.layer.register_forward_hook(print)
        self.removed.remove()
        self.of_another = nn.Linear(1, 1).register_forward_hook(print, with_kwargs=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_kept_handle_removes_the_hook_of_its_own_copy() -> None:
    state = pl.run(fit(Handles()))
    gc.collect()  # the model that was passed is gone
    module, other = (state.module(training=False) for _ in range(2))
    for handle in (module.handle, *module.handles):
        handle.remove()
    torch.testing.assert_close(module(X), module.layer(X))
    torch.testing.assert_close(other(X), module(X) + 1)
    torch.testing.assert_close(state.module(training=False)(X), module(X) + 1)
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    counts = [[len(getattr(each.layer, kind)) for kind in kinds] for each in (module, other)]
    assert counts == [[0, 0, 0, 0], [1, 1, 1, 1]]


class Weak(nn.Module):
    """A child that finds its parent, and what is in it, by weak references."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent, self.listed = weakref.ref(parent, print), [weakref.ref(parent)]
        self.method = weakref.WeakMethod(parent.scaled)  # type: ignore[arg-type]
        self.names = weakref.WeakKeyDictionary({parent: "parent"})
        self.parents = weakref.WeakValueDictionary({"parent": parent})
        self.found_by = lambda: self.parent()

    def forward(self, x: Tensor) -> Any:
        for parent in (self.parent(), self.listed[0](), self.parents["parent"], self.found_by()):
            assert self.names[parent] == "parent"
            assert parent.child is self
        return self.method()(x)  # type: ignore[misc]


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.drop = nn.Dropout(0.0)
        self.child = Weak(self)

    def scaled(self, x: Tensor) -> Tensor:
        return 2 * self.drop(self.layer(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Any:
        return self.child(x)


@pytest.mark.parametrize("algorithms", [(), pl.algorithms.gyro_dropout(p=0.0)])
def test_weak_references_lead_to_the_copies(algorithms: Any) -> None:
    """What trains is in the copy. An algorithm that changes layers copies the model once more."""
    model = made(Parent)
    state = pl.run(fit(model, algorithms=algorithms))
    module = state.module()
    assert module.child.parent() is module is not model
    assert module.child.parent.__callback__ is None, "copies come and go"
    problem.close(state.params, dict(last(model).named_parameters()))
    state = pl.State.create(Parent())
    gc.collect()
    assert state.module()(X).shape == (len(X), 2)


class CopiesCounted(nn.Linear):
    """Counts how often it was copied."""

    copies = 0

    def __deepcopy__(self, memory: dict[int, Any]) -> CopiesCounted:
        type(self).copies += 1
        new = object.__new__(CopiesCounted)
        memory[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memory))
        return new


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}, {"donate": False}])
def test_one_private_module_serves_all_steps(options: dict[str, Any]) -> None:
    """A backward gives the module of its forward back; else each step would copy the model."""
    stream = fit(CopiesCounted(4, 2), **options)
    copies = [CopiesCounted.copies for event, _ in stream if event is pl.Event.BATCH_END]
    assert copies[1:] == copies[1:2] * 5


# Tensors and submodules of a private module are found in its __dict__: others see no difference.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(()))
        mirror(self)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        out: Tensor = self.norm(self.linear(x))
        return out


def test_a_mirrored_module_is_used_as_any_other() -> None:
    block, x = Block(), torch.randn(4, 2)
    other: Any = copy.deepcopy(block)
    for given in (block, other):
        zeros = {name: torch.zeros_like(param) for name, param in given.named_parameters()}
        assert not torch.func.functional_call(given, zeros, x).any()
        assert given(x).any()
    assert other.linear is other._modules["linear"] is not block.linear
    assert other.linear.weight is other.linear._parameters["weight"] is not block.linear.weight
    other.linear._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))
    assert not other.linear.weight.any()
    assert block.linear.weight.any()


def test_what_is_assigned_to_a_mirrored_module_is_read_and_what_is_deleted_is_gone() -> None:
    block: Any = Block()
    block(torch.randn(4, 2))
    assert block.calls == block.state_dict()["calls"] == 1
    block.linear.bias = nn.Parameter(torch.full((2,), 3.0))
    assert block.linear.bias.tolist() == block.linear._parameters["bias"].tolist() == [3.0, 3.0]
    block.linear = nn.Linear(2, 5)
    assert block.linear.out_features == 5
    assert block.half().calls.dtype is torch.float16
    del block.linear
    block.norm._parameters.pop("bias")
    block._buffers.clear()
    assert [hasattr(block, "linear"), hasattr(block.norm, "bias"), hasattr(block, "calls")] == [False] * 3
    layer = nn.Linear(1, 1)
    layer.__class__ = type("Hidden", (nn.Linear,), {"bias": "the class's"})
    mirror(layer)
    assert layer.bias == "the class's"  # type: ignore[comparison-overlap]
