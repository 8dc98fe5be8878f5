"""Kinds of models against the usual loop by hand: each State holds what the module does, bit for bit, and resumes.

Batches have 8 samples, so that a mean over them rounds as it does by hand.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from pure_loop.random import seeded
from tests.support.holding import assert_holds
from tests.support.problem import noise

STEPS = 6


def randoms(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=noise(seed))


def inputs(*shape: int) -> list[Any]:
    return [(randoms(8, *shape, seed=i), randoms(8, 2, seed=i + 10)) for i in range(3)]


class By(nn.Module):
    """A model of named parts, whose forward is a function of it and the inputs."""

    def __init__(self, call: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.call(self, x)


def around(layer: nn.Module) -> Any:
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2))


def conv(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def recurrent(cls: Any, **options: Any) -> nn.Module:
    layer = cls(4, 4, batch_first=True, **options)
    width = 8 if layer.bidirectional else 4
    return By(lambda m, x: m.o(m.r(x)[0][:, -1]), r=layer, o=nn.Linear(width, 2))


def attention() -> nn.Module:
    return By(
        lambda m, x: m.o(m.a(x, x, x)[0].mean(1)),
        a=nn.MultiheadAttention(4, 2, batch_first=True),
        o=around(nn.Linear(4, 4)),
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return By(lambda m, x: m.o(m.a(x).mean(1)), a=encoder, o=nn.Linear(4, 2))


def tied() -> nn.Module:
    model = By(lambda m, x: m.o(m.h(m.e(x)).mean(1))[:, :2], e=nn.Embedding(7, 4), h=nn.Linear(4, 4), o=nn.Linear(4, 7))
    model.o.weight = model.e.weight
    return model


def shared() -> nn.Module:
    layer, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    return nn.Sequential(layer, norm, nn.Tanh(), layer, norm, nn.Linear(4, 2))


def hooked() -> nn.Module:
    model = around(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, given, output: output * 2)
    model[0].register_forward_pre_hook(lambda module, given: (given[0] + module.weight.sum(),))
    model[2].register_full_backward_hook(lambda module, given, output: (given[0] * 0.5,))
    return model


class Bound(nn.Module):
    """Bound methods as an attribute and as a hook: their copies belong to the copy of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(4, 4), nn.Linear(4, 2)
        self.inner = self.through_a
        self.a.register_forward_hook(self.hook)

    def through_a(self, x: Tensor) -> Tensor:
        return self.a(x)

    def hook(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * self.o.weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.inner(x))


def running_mean(model: Any, x: Tensor) -> Tensor:
    y = model.o(x)
    if model.training:
        model.mean = (0.9 * model.mean + 0.1 * y.mean(0)).detach()
        model.count += 1
    return y - model.mean


def growing(model: Any, x: Tensor) -> Tensor:
    y = model.o(x)
    model.seen = torch.cat([model.seen, y.detach().mean(0, keepdim=True)])
    return y - model.seen.mean(0)


def registering(model: Any, x: Tensor) -> Tensor:
    """In the forward, of a submodule too; and None at first."""
    y = model.o(x)
    if not hasattr(model, "mean"):
        model.register_buffer("mean", y.detach().mean(0), persistent=False)
        model.o.register_buffer("scale", y.detach().std(0))
    model.first = y.detach().mean(0) if model.first is None else model.first + 1
    return (y - model.mean) / model.o.scale


def hidden(call: Any, **buffers: Tensor | None) -> nn.Module:
    """A model with buffers that are not persistent."""
    model = By(call, o=nn.Linear(4, 2))
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer, persistent=False)
    return model


def torn(model: Any, x: Tensor) -> Tensor:
    """One buffer under two names; from the second forward on they are two."""
    if model.b.any():
        model.a = model.a + 1
    model.b += 1
    return model.o(x) + model.a - 0.5 * model.b


def rotary(model: Any, x: Tensor) -> Tensor:
    """As rotary embeddings are cached: registered in __init__, and anew by a longer input."""
    model.calls = model.calls + 1
    if 3 * int(model.calls) > len(model.table):
        model.register_buffer("table", torch.arange(6.0 * int(model.calls)), persistent=False)
    return model.o(x) * (1 + model.table[:2]) / model.table.sum()


def twice(call: Any) -> nn.Module:
    model = By(call, o=nn.Linear(4, 2), a=torch.zeros(2))
    model.register_buffer("b", model.a)
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[1].eval()
    return model


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


def pruned() -> nn.Module:
    model = around(nn.Linear(4, 4))
    prune.ln_structured(model[0], "weight", amount=0.5, n=2, dim=0)
    prune.random_unstructured(model[0], "bias", amount=0.5)
    model(torch.ones(2, 4)).sum().backward()  # it was used before
    model.zero_grad()
    return model


def of_hooks(function: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates both
        return around(function(nn.Linear(4, 4)))


def branching() -> nn.Module:
    layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
    return By(lambda m, x: m.ls[int(x.sum() > 0) + int(x[0, 0] > 0)](x), ls=layers, never=nn.Linear(4, 2))


class Forwarding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def energy(model: Any, x: Tensor) -> Tensor:
    return model.o(x + vmap(grad(lambda row: model.n(row).square().sum()))(x))


def inner_step(model: Any, x: Tensor) -> Tensor:
    weights = dict(model.o.named_parameters())
    slopes = torch.autograd.grad(model.o(x).square().mean(), list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
    return functional_call(model.o, moved, (x,))


def listed() -> nn.Module:
    weights = nn.ParameterList([torch.ones(4, 2), torch.zeros(2)])
    scale = nn.ParameterDict({"scale": nn.Parameter(torch.ones(2))})
    return By(lambda m, x: (x @ m.p[0] + m.p[1]) * m.d["scale"], p=weights, d=scale)


def odd_shapes() -> nn.Module:
    turned, halves = nn.Parameter(torch.ones(2, 4).t()), torch.ones(8, 2)
    return By(
        lambda m, x: x @ (m.a + m.b - m.c) * m.z + m.e.sum(),
        a=turned, b=nn.Parameter(halves[:4]), c=nn.Parameter(halves[4:]), z=nn.Parameter(torch.ones(())),
        e=nn.Parameter(torch.empty(0, 3)),
    )  # fmt: skip


def two_dtypes() -> nn.Module:
    return By(lambda m, x: m.o(m.a(x.double()).float()), a=nn.Linear(4, 4).double(), o=nn.Linear(4, 2))


VECTORS, SEQUENCES, IMAGES = inputs(4), inputs(5, 4), inputs(2, 6, 6)
TOKENS = [(torch.randint(7, (8, 5), generator=torch.Generator().manual_seed(i)), y) for i, (_, y) in enumerate(VECTORS)]
LAST = [(x.to(memory_format=torch.channels_last), y) for x, y in IMAGES]

Optimizers = tuple[Callable[[Any], torch.optim.Optimizer], pl.optim.Optimizer]
ADAMW: Optimizers = (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), pl.optim.adamw(lr=1e-2))
SGD: Optimizers = (
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    pl.optim.sgd(lr=1e-2, momentum=0.9),
)
HALF: Optimizers = (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True), SGD[1])
WAVES: Optimizers = (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True), ADAMW[1])
SPARSE: Optimizers = (
    lambda p: torch.optim.SparseAdam(p, lr=0.1),
    pl.optim.from_torch(torch.optim.SparseAdam, lr=0.1),
)


def waves() -> nn.Module:
    weight = nn.Parameter(torch.complex(randoms(4, 2, seed=1), randoms(4, 2, seed=2)))
    return By(lambda m, x: m.o((x.cfloat() @ m.w).abs()), w=weight, o=nn.Linear(2, 2))


# A model, its data, and its optimizer where that isn't one of the first two.
MODELS: dict[str, tuple[Any, ...]] = {
    "two layers of bidirectional LSTM": (lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True), SEQUENCES),
    "attention": (attention, SEQUENCES),
    "transformer": (transformer, SEQUENCES),
    "tied embedding": (tied, TOKENS),
    "BatchNorm, cumulative": (lambda: conv(nn.BatchNorm2d(4, momentum=None)), IMAGES),
    "channels last": (lambda: conv(nn.BatchNorm2d(4)).to(memory_format=torch.channels_last), LAST),
    "weight norm": (lambda: around(parametrizations.weight_norm(nn.Linear(4, 4))), VECTORS),
    "spectral norm": (lambda: around(parametrizations.spectral_norm(nn.Linear(4, 4))), VECTORS),
    "orthogonal": (lambda: around(parametrizations.orthogonal(nn.Linear(4, 4))), VECTORS),
    "pruned": (pruned, VECTORS),
    "the old weight norm": (lambda: of_hooks(nn.utils.weight_norm), VECTORS),
    "the old spectral norm": (lambda: of_hooks(nn.utils.spectral_norm), VECTORS),
    "hooks": (hooked, VECTORS),
    "bound methods": (Bound, VECTORS),
    "assigned buffers": (
        lambda: By(running_mean, o=nn.Linear(4, 2), mean=torch.zeros(2), count=torch.tensor(0)),
        VECTORS,
    ),
    "buffers that are not persistent": (
        lambda: hidden(running_mean, mean=torch.zeros(2), count=torch.tensor(0)),
        VECTORS,
    ),
    "growing buffer": (lambda: By(growing, o=nn.Linear(4, 2), seen=torch.zeros(1, 2)), VECTORS),
    "registered buffers": (lambda: hidden(registering, first=None), VECTORS),
    "rotary": (lambda: hidden(rotary, table=torch.arange(2.0), calls=torch.tensor(0)), VECTORS),
    "one buffer with two names": (lambda: twice(lambda m, x: m.o(x) + m.b * m.a.add_(1.0)), VECTORS),
    "one buffer that becomes two": (lambda: twice(torn), VECTORS),
    "frozen, in eval mode": (frozen, VECTORS),
    "one storage": (one_storage, VECTORS),
    "branching on data": (branching, VECTORS),
    "shared submodules": (shared, VECTORS),
    "__getattr__": (Forwarding, VECTORS),
    "vmap of grad": (lambda: By(energy, o=nn.Linear(4, 2), n=around(nn.Linear(4, 4))), VECTORS),
    "inner step": (lambda: By(inner_step, o=nn.Linear(4, 2)), VECTORS),
    "ParameterList and ParameterDict": (listed, VECTORS),
    "strided, scalar, empty and viewing parameters": (odd_shapes, VECTORS),
    "two dtypes": (two_dtypes, VECTORS),
    "float64": (lambda: around(nn.Linear(4, 4)).double(), [(x.double(), y.double()) for x, y in VECTORS]),
    "bfloat16": (lambda: around(nn.Linear(4, 4)).bfloat16(), [(x.bfloat16(), y.bfloat16()) for x, y in VECTORS], HALF),
    "complex": (waves, VECTORS, WAVES),
    "sparse": (lambda: By(lambda m, x: m.e(x).mean(1), e=nn.Embedding(7, 2, sparse=True)), TOKENS, SPARSE),
}
WAYS: list[dict[str, Any]] = [
    *({}, {"watch": {Event.BATCH_END}}, {"donate": False}, {"strict": True}, {"microbatch_size": 8})
]


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with seeded(0):
        return make()


def by_hand(model: nn.Module, data: list[Any], optimizer: Any, loss: Any) -> Iterator[nn.Module]:
    """The module, trained, after each step."""
    torch_optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        torch_optimizer.zero_grad()
        loss(model, data[step % len(data)]).backward()
        torch_optimizer.step()
        yield model


def last(make: Callable[[], nn.Module], data: list[Any], optimizer: Any, loss: Any) -> nn.Module:
    (*_, module) = by_hand(made(make), data, optimizer, loss)
    return module


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def train(start: Any, data: list[Any], optimizer: pl.optim.Optimizer, **options: Any) -> pl.Stream:
    defaults: dict[str, Any] = {"loss": functional.mse_loss, "max_duration": f"{STEPS}ba"}
    return pl.fit(start, data, optimizer=optimizer, **defaults | options)


@pytest.mark.parametrize("name", MODELS)
def test_states_are_the_modules_of_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    """After each batch; resumed from one of them and from its file; evaluations leave training as it is."""
    number = list(MODELS).index(name)
    make, data, (theirs, ours) = (*MODELS[name], (ADAMW, SGD)[number % 2])[:3]
    model, hand = made(make), made(make)
    states = [s for event, s in train(model, data, ours, **WAYS[number % len(WAYS)]) if event is Event.BATCH_END]
    for state, module in zip(states, by_hand(hand, data, theirs, mean_square), strict=True):
        assert_holds(state, module)
    assert_holds(pl.State.create(model), made(make))
    pl.save(states[2], tmp_path / "x.safetensors")
    for start in (states[2], pl.load(tmp_path / "x.safetensors", model=made(make))):
        assert_holds(pl.run(train(start, data, ours)), hand)
    if name not in IN_EVALUATION:
        assert_holds(pl.run(train(model, data, ours, evaluators=data[:1], eval_interval="1ba")), hand)


# What these do in evaluation counts, or needs gradients.
IN_EVALUATION = ("growing buffer", "inner step")


class Pair(NamedTuple):
    y: Any
    z: Any


@dataclasses.dataclass
class Record:
    y: Any
    z: Any


OUTPUTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda y, z: (y, z), lambda o: o),
    "list with None and strings": (lambda y, z: [y, None, "text", z], lambda o: (o[0], o[3])),
    "dict": (lambda y, z: {"y": y, "z": z}, lambda o: (o["y"], o["z"])),
    "named tuple": (Pair, lambda o: (o.y, o.z)),
    "dataclass": (Record, lambda o: (o.y, o.z)),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_any_shape(kind: str) -> None:
    pack, unpack = OUTPUTS[kind]
    make = lambda: By(lambda m, x: pack(m.o(x), 2 * m.o(x)), o=nn.Linear(4, 2))  # noqa: E731

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        y, z = unpack(outputs)
        return functional.mse_loss(y, targets) + functional.l1_loss(z, targets)

    expected = last(make, VECTORS, ADAMW[0], lambda m, batch: loss(m(batch[0]), batch[1]))
    assert_holds(pl.run(train(made(make), VECTORS, ADAMW[1], loss=loss)), expected)
    halves = pl.run(train(made(make), VECTORS, ADAMW[1], loss=loss, microbatch_size=4)).params
    torch.testing.assert_close(dict(halves), {n: p.detach() for n, p in expected.named_parameters()})


class Classifier(nn.Module):
    """A module with a loss of its own, which reads a buffer, a parameter and what forward left behind."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.o, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, batch: Any) -> Tensor:
        self.logits = self.o(batch["x"])
        return self.logits

    def loss(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        entropy = functional.cross_entropy(outputs * self.scale, batch["label"], weight=self.weights)
        return {"total": entropy + self.logits.square().mean(), "entropy": entropy}

    def validate(self, batch: Any) -> Tensor:
        return self(batch)


def test_a_module_with_its_own_loss() -> None:
    data = [{"x": x, "label": (y[:, 0] > 0).long(), "text": ["a"] * 8} for x, y in VECTORS]
    model = made(Classifier)
    expected = last(Classifier, data, ADAMW[0], lambda m, batch: m.loss(m(batch), batch)["total"])
    for more in ({}, {"evaluators": data, "eval_interval": "1ba"}):
        assert_holds(pl.run(pl.fit(model, data, optimizer=ADAMW[1], max_duration=f"{STEPS}ba", **more)), expected)


def test_autocast_is_that_of_a_loop_by_hand() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_square(model, batch)

    make = lambda: around(nn.Linear(4, 4))  # noqa: E731
    expected = last(make, VECTORS, SGD[0], loss)
    assert_holds(pl.run(train(made(make), VECTORS, SGD[1], precision="amp_bf16")), expected)


def test_recomputed_dropout_is_that_of_the_forward() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.o(checkpoint(model.b, x, use_reentrant=False) if model.again else model.b(x))

    def state(again: bool, size: int | None) -> pl.State:
        block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh(), nn.Dropout())
        model = By(forward, b=block, o=nn.Linear(4, 2), again=again)
        return pl.run(train(model, VECTORS, SGD[1], microbatch_size=size))

    for size in (None, 4):
        with seeded(0):
            expected = state(False, size)
        with seeded(0):
            assert_holds(state(True, size), expected.module())


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))


def test_runs_inside_runs_leave_each_other_alone() -> None:
    """Two forks of one State in step, and inside a third a fit, a prediction and an evaluation at some events."""
    model = made(noisy)
    start = next(state for event, state in train(model, VECTORS, SGD[1]) if event is Event.FIT_START)
    alone, other = (pl.run(train(start, data, SGD[1])).module() for data in (VECTORS, VECTORS[::-1]))
    streams = [train(start, VECTORS, SGD[1]), train(start, VECTORS[::-1], SGD[1])]
    *_, ((_, first), (_, second)) = zip(*streams, strict=True)
    assert_holds(first, alone)
    assert_holds(second, other)
    last: Any = None
    for event, state in train(model, VECTORS, SGD[1]):
        last = state
        if event in (Event.AFTER_FORWARD, Event.AFTER_TRAIN_BATCH) and state.timestamp.batch < 3:
            pl.run(pl.predict(state, VECTORS[1:]))
            pl.run(pl.evaluate(state, VECTORS[1:], loss=functional.mse_loss))
            pl.run(train(model, VECTORS[::-1], SGD[1], max_duration="2ba"))
    assert_holds(last, alone)


def test_going_on_after_an_error_in_the_forward() -> None:
    for error in (RuntimeError, KeyboardInterrupt, StopIteration, GeneratorExit):
        go_on_after(error)


def go_on_after(error: type[BaseException]) -> None:
    calls: list[int] = []

    def forward(model: Any, x: Tensor) -> Tensor:
        calls.append(1)
        y = model.n(x)
        if len(calls) == STEPS + 4:
            raise error("in the forward")
        return y

    model = made(lambda: By(forward, n=noisy()))
    alone = pl.run(train(model, VECTORS, SGD[1])).module()
    random, kept = torch.get_rng_state(), []
    with pytest.raises((error, RuntimeError)):
        kept.extend(state for event, state in train(model, VECTORS, SGD[1]) if event is Event.BATCH_END)
    assert kept[-1].timestamp.batch == 3
    assert torch.equal(random, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert_holds(pl.run(train(kept[-1], VECTORS, SGD[1])), alone)
