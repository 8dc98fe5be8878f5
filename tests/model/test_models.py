"""Kinds of models against the usual loop by hand: each State holds what the module does, bit for bit, and resumes.

Buffers that forwards register, set, reshape and remove are in test_changing_buffers.py.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from tests.support.holding import DATA, WAYS, assert_holds, by_hand, data, ends, fit, last, made, mse
from tests.support.problem import noise


class By(nn.Module):
    """A model of named parts, whose forward is a function of it and the inputs."""

    def __init__(self, call: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part, persistent=name != "count")
            else:
                setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.call(self, x)


def around(*layers: nn.Module) -> Any:
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(4, 2))


def conv() -> nn.Module:
    norm = nn.BatchNorm2d(4, momentum=None)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    return model.to(memory_format=torch.channels_last)


def recurrent() -> nn.Module:
    layer = nn.LSTM(4, 4, num_layers=2, bidirectional=True, batch_first=True)
    return By(lambda m, x: m.o(m.r(x)[0][:, -1]), r=layer, o=nn.Linear(8, 2))


def parametrized() -> nn.Module:
    return around(
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    )


def pruned() -> nn.Module:
    model = around(nn.Linear(4, 4))
    prune.ln_structured(model[0], "weight", amount=0.5, n=2, dim=0)
    prune.random_unstructured(model[0], "bias", amount=0.5)
    model(torch.ones(2, 4)).sum().backward()  # it was used before
    model.zero_grad()
    return model


def of_hooks() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates both
        return around(nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4)))


class Forwarding(By):
    """What it lacks is that of its inner module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def shared() -> nn.Module:
    layer, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    head = Forwarding(lambda m, x: functional.linear(x, m.weight, m.bias), inner=nn.Linear(4, 2))
    return nn.Sequential(layer, norm, nn.Tanh(), layer, norm, head)


class Bound(nn.Module):
    """Bound methods as an attribute and as a hook, whose copies belong to the copy of the module; and other hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(4, 4), nn.Linear(4, 2)
        self.inner = self.through_a
        self.a.register_forward_hook(self.hook)
        self.a.register_forward_pre_hook(lambda module, given: (given[0] + module.weight.sum(),))
        self.o.register_full_backward_hook(lambda module, given, output: (given[0] * 0.5,))

    def through_a(self, x: Tensor) -> Any:
        return self.a(x)

    def hook(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * self.o.weight.sum()

    def forward(self, x: Tensor) -> Any:
        return self.o(self.inner(x))


def running_mean(model: Any, x: Tensor) -> Any:
    y = model.o(x)
    if model.training:
        model.mean = (0.9 * model.mean + 0.1 * y.mean(0)).detach()
        model.count += 1
    return y - model.mean


def one_storage() -> nn.Module:
    """Slices of a flat storage, empty tensors, a lattice whose strides no simple rule passes: 0 2 4 3 5 7 6 8 10."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    flat = torch.arange(40, dtype=torch.float32) / 100
    model[0].weight.data, model[1].weight.data = flat[:16].view(4, 4), flat[16:32].view(4, 4)
    model[0].bias.data, model[1].bias.data = flat[32:36], flat[36:]
    model.register_buffer("empty", model[0].weight.data[:0])
    model.register_buffer("positions", torch.arange(4).expand((1, -1)))
    model.register_buffer("lattice", torch.arange(12).as_strided((3, 3), (2, 3)))
    model.table = torch.zeros(4)
    model.part = model.table[:2]
    return model


def branching() -> nn.Module:
    layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
    return By(lambda m, x: m.ls[int(x.sum() > 0) + int(x[0, 0] > 0)](x), ls=layers, never=nn.Linear(4, 2))


def energy(model: Any, x: Tensor) -> Any:
    return model.o(x + vmap(grad(lambda row: model.n(row).square().sum()))(x))


def odd_shapes() -> nn.Module:
    """Strided, viewing, scalar and empty parameters, by themselves, in a list and in a dict."""
    turned, halves = nn.Parameter(torch.ones(2, 4).t()), torch.ones(8, 2)
    pair = nn.ParameterList([halves[:4], halves[4:]])
    scale = nn.ParameterDict({"scale": nn.Parameter(torch.ones(()))})
    empty = nn.Parameter(torch.empty(0, 3))
    return By(lambda m, x: x @ (m.a + m.p[0] - m.p[1]) * m.d["scale"] + m.e.sum(), a=turned, p=pair, d=scale, e=empty)


def waves() -> nn.Module:
    parts = [torch.randn(4, 2, generator=noise(seed)) for seed in (1, 2)]
    weight = nn.Parameter(torch.complex(*parts))
    return By(lambda m, x: m.o((x.cfloat() @ m.w).abs()), w=weight, o=nn.Linear(2, 2))


IMAGES = [(x.to(memory_format=torch.channels_last), y) for x, y in data(2, 6, 6)]
TOKENS = [(torch.randint(7, (8, 5), generator=torch.Generator().manual_seed(i)), y) for i, (_, y) in enumerate(DATA)]

ADAMW = (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), pl.optim.adamw(lr=1e-2))
MOMENTUM = (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True), pl.optim.sgd(lr=1e-2, momentum=0.9))
HALF = (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True), MOMENTUM[1])

WAVES = (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True), ADAMW[1])
SPARSE = (lambda p: torch.optim.SparseAdam(p, lr=0.1), pl.optim.from_torch(torch.optim.SparseAdam, lr=0.1))
# A model, its data, and its optimizer where that isn't one of the first two.
MODELS: dict[str, tuple[Any, ...]] = {
    "LSTM": (recurrent, data(5, 4)),
    "convolutions, channels last": (conv, IMAGES),
    "parametrizations": (parametrized, DATA),
    "pruned": (pruned, DATA),
    "weight norm and spectral norm by hooks": (of_hooks, DATA),
    "shared submodules, __getattr__": (shared, DATA),
    "hooks and bound methods": (Bound, DATA),
    "assigned buffers": (lambda: By(running_mean, o=nn.Linear(4, 2), mean=torch.zeros(2), count=torch.tensor(0)), DATA),
    "one storage": (one_storage, DATA),
    "branching on data": (branching, DATA),
    "vmap of grad": (lambda: By(energy, o=nn.Linear(4, 2), n=around(nn.Linear(4, 4))), DATA),
    "odd shapes": (odd_shapes, DATA),
    "bfloat16": (lambda: around(nn.Linear(4, 4)).bfloat16(), [(x.bfloat16(), y.bfloat16()) for x, y in DATA], HALF),
    "complex": (waves, DATA, WAVES),
    "sparse": (lambda: By(lambda m, x: m.e(x).mean(1), e=nn.Embedding(7, 2, sparse=True)), TOKENS, SPARSE),
}


@pytest.mark.parametrize("name", MODELS)
def test_states_are_the_modules_of_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    """After each batch; resumed from one of them and from its file; evaluations leave training as it is."""
    number = list(MODELS).index(name)
    make, batches, (theirs, ours) = (*MODELS[name], (ADAMW, MOMENTUM)[number % 2])[:3]
    model, hand = made(make), made(make)
    states = ends(model, batches, optimizer=ours, **WAYS[number % len(WAYS)])
    for state, module in zip(states, by_hand(hand, batches, theirs), strict=True):
        assert_holds(state, module)
    assert_holds(pl.State.create(model), made(make))
    pl.save(states[2], tmp_path / "x.safetensors")
    for start in (states[2], pl.load(tmp_path / "x.safetensors", model=made(make))):
        assert_holds(pl.run(fit(start, batches, optimizer=ours)), hand)
    assert_holds(pl.run(fit(model, batches, optimizer=ours, evaluators=batches[:1], eval_interval="1ba")), hand)


@dataclasses.dataclass
class Record:
    y: Any
    z: Any


OUTPUTS: list[tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = [
    (lambda y, z: [y, None, "text", z], lambda o: (o[0], o[3])),
    (lambda y, z: {"y": y, "z": z}, lambda o: (o["y"], o["z"])),
    (Record, lambda o: (o.y, o.z)),
]


def test_outputs_of_any_shape() -> None:
    for pack, unpack in OUTPUTS:
        make = lambda: By(lambda m, x: pack(m.o(x), 2 * m.o(x)), o=nn.Linear(4, 2))  # noqa: E731

        def loss(outputs: Any, targets: Tensor) -> Tensor:
            y, z = unpack(outputs)
            return mse(y, targets) + functional.l1_loss(z, targets)

        expected = last(made(make), loss=lambda m, batch: loss(m(batch[0]), batch[1]))
        assert_holds(pl.run(fit(made(make), loss=loss)), expected)
        halves = pl.run(fit(made(make), loss=loss, microbatch_size=4)).params
        torch.testing.assert_close(dict(halves), {n: p.detach() for n, p in expected.named_parameters()})


class Classifier(nn.Module):
    """A module with a loss of its own, which reads a buffer, a parameter and what forward left behind."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.o, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, batch: Any) -> Any:
        self.logits = self.o(batch["x"])
        return self.logits

    def loss(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        entropy = functional.cross_entropy(outputs * self.scale, batch["label"], weight=self.weights)
        return {"total": entropy + self.logits.square().mean(), "entropy": entropy}

    def validate(self, batch: Any) -> Any:
        return self(batch)


def test_a_module_with_its_own_loss() -> None:
    batches = [{"x": x, "label": (y[:, 0] > 0).long(), "text": ["a"] * 8} for x, y in DATA]
    expected = last(made(Classifier), batches, loss=lambda m, batch: m.loss(m(batch), batch)["total"])
    for more in ({}, {"evaluators": batches, "eval_interval": "1ba"}):
        assert_holds(pl.run(fit(made(Classifier), batches, loss=None, **more)), expected)


def test_autocast_is_that_of_a_loop_by_hand() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mse(model(batch[0]), batch[1])

    model = made(around, nn.Linear(4, 4))
    assert_holds(pl.run(fit(model, precision="amp_bf16")), last(model, loss=loss))


def test_recomputed_dropout_is_that_of_the_forward() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        return model.o(checkpoint(model.b, x, use_reentrant=False) if model.again else model.b(x))

    def model(again: bool) -> nn.Module:
        block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh(), nn.Dropout())
        return By(forward, b=block, o=nn.Linear(4, 2), again=again)

    for size in (None, 4):
        expected, again = (pl.run(fit(made(model, each), microbatch_size=size)) for each in (False, True))
        assert_holds(again, expected.module())


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))


def test_runs_inside_runs_leave_each_other_alone() -> None:
    """Inside of a fit another one, a prediction and an evaluation at some events."""
    model = made(noisy)
    alone = pl.run(fit(model)).module()
    for event, state in fit(model):
        if event in (Event.AFTER_FORWARD, Event.AFTER_TRAIN_BATCH) and state.timestamp.batch < 3:
            pl.run(pl.predict(state, DATA[1:]))
            pl.run(pl.evaluate(state, DATA[1:], loss=mse))
            pl.run(fit(model, DATA[::-1], max_duration="2ba"))
    assert_holds(state, alone)


def test_going_on_after_an_error_in_the_forward() -> None:
    for error in (KeyboardInterrupt, StopIteration, GeneratorExit):
        calls: list[int] = []

        def forward(model: Any, x: Tensor) -> Any:
            calls.append(1)
            if len(calls) == 6 + 4:
                raise error("in the forward")
            return model.n(x)

        model = made(lambda: By(forward, n=noisy()))
        alone = pl.run(fit(model)).module()
        random, kept = torch.get_rng_state(), []
        with pytest.raises((error, RuntimeError)):
            kept.extend(state for event, state in fit(model) if event is Event.BATCH_END)
        assert kept[-1].timestamp.batch == 3
        assert torch.equal(random, torch.get_rng_state())
        assert torch.is_grad_enabled()
        assert_holds(pl.run(fit(kept[-1])), alone)
