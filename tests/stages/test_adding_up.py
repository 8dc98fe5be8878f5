"""Gradients of microbatches are added up in place where no other reference to the memory exists, and only there."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from bench.performance.memory import peaks
from pure_loop import Event
from pure_loop._internal import tree_ops
from pure_loop.random import seeded
from pure_loop.stages import engine
from pure_loop.stages.references import are_unaliased, can_count
from tests.support import problem
from tests.support.streams import assert_same

pytestmark = pytest.mark.skipif(not can_count(), reason="references can't be counted on this interpreter")

WIDTH = 512
ONE = {Event.BATCH_END}
WHATEVER = torch.ones(4, 4)
KEPT: list[Any] = []


def kept(tensor: Tensor, what: Callable[[Tensor], Any]) -> Tensor:
    KEPT.append(what(tensor))
    return tensor


def two_views() -> Sequence[Tensor]:
    whole = torch.ones(4)
    return whole[:2], whole[2:]


GRADIENTS: dict[str, tuple[Callable[[], Sequence[Any]], bool]] = {
    "new": (lambda: (torch.ones(2), None, torch.ones(3)), True),
    "another layout": (lambda: (torch.ones(2, 3).t().contiguous(), torch.ones(3, 2, 4, 4)), True),
    "channels last": (lambda: (torch.ones(3, 2, 4, 4).to(memory_format=torch.channels_last),), True),
    "a view of its own": (lambda: (torch.ones(6).view(2, 3),), True),
    "aliased": (lambda: (WHATEVER,), False),
    "a view of what is aliased": (lambda: (WHATEVER.view(16),), False),
    "detached": (lambda: (WHATEVER.detach(),), False),
    "NumPy's": (lambda: (torch.from_numpy(WHATEVER.numpy().copy()),), False),
    "twice the same": (lambda: (torch.ones(2),) * 2, False),
    "views of one": (two_views, False),
    "a kept storage": (lambda: (kept(torch.ones(3), Tensor.untyped_storage),), False),
    "beside a view of its own": (lambda: (torch.ones(6).view(2, 3), kept(torch.ones(2), Tensor.detach)), False),
    "expanded": (lambda: (torch.ones(()).expand(3),), False),
    "transposed": (lambda: (torch.ones(2, 3).t(),), False),
}


def test_who_has_a_tensor_is_counted() -> None:
    for kind, (make, wanted) in GRADIENTS.items():
        assert are_unaliased(make()) is wanted, kind
    KEPT.clear()


# How much memory a step needs. ----------------------------------------------------------------------------------------

SIDE = 1000
# Parameters, two moments, gradients, and batches and activations, which are small beside them.
BY_HAND = 4.05


class _Steps:
    """A run, batch by batch, as the measurement of peaks asks for it."""

    def __init__(self, options: dict[str, Any]) -> None:
        data = [(torch.zeros(2, SIDE), torch.zeros(2, dtype=torch.int64))] * 2
        options = {"optimizer": pl.optim.adamw(lr=0.1), "max_duration": "20ba", "strict": False, **options}
        self.ends = self.read(problem.fit(nn.Linear(SIDE, SIDE), data, **options))

    def read(self, stream: Any) -> Iterator[None]:
        for event, state in stream:
            if event is Event.BATCH_END:
                assert len(state.params) == 2
                yield

    def run(self, steps: int) -> None:
        for _ in itertools.islice(self.ends, steps):
            pass

    def close(self) -> None:
        del self.ends


def most(**options: Any) -> float:
    """The memory that steps need at most, from the third on, in sizes of the million parameters."""
    return peaks(partial(_Steps, options))[1] / (4 * (SIDE * SIDE + SIDE))


def test_a_step_needs_the_memory_of_a_loop_by_hand() -> None:
    """Autograd's gradient of a microbatch is there beside the sum, as by hand, and the next average beside the last.

    Copies would show.
    """
    extra: tuple[tuple[float, dict[str, Any]], ...] = (
        (1, {"microbatch_size": 1}),
        (1, {"microbatch_size": 1, "watch": {Event.AFTER_BACKWARD, Event.BATCH_END}}),
        (0, {"clip_grad": 1.0}),
        (0, {"nonfinite": "skip"}),
        (0.5, {"precision": "amp_fp16"}),  # of the weight that autocast makes
        (2, {"algorithms": [pl.algorithms.ema(half_life="3ba")]}),
    )
    for (more, options), watch in itertools.product(extra, (None, ONE)):
        assert most(**{"watch": watch, **options}) < BY_HAND + more, options
    assert most(donate=False) > BY_HAND + 2
    assert most(donate=False, microbatch_size=1) > most(microbatch_size=1)


# What is added up. ----------------------------------------------------------------------------------------------------


def trained(model: Callable[[], nn.Module], data: Any = None, **options: Any) -> pl.State:
    """In place where that is possible; the parameters are those of a run that adds up in new memory."""
    generator = problem.noise()
    if data is None:
        data = [tuple(torch.randn(7, WIDTH, generator=generator) for _ in range(2)) for _ in range(3)]
    settings = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", "microbatch_size": 2, "strict": None}
    results = []
    for donate in (False, options.pop("donate", "auto")):
        with seeded(0):
            module = model()
        results.append(problem.run(module, data, loss=mse_loss, donate=donate, **settings | options))
    assert_same(dict(results[1].params), dict(results[0].params), "in place and in new memory")
    return results[1]


class Given(torch.autograd.Function):
    """Its gradient is a tensor that is aliased."""

    gradient = torch.zeros(WIDTH, WIDTH)

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return Given.gradient


class Odd(nn.Module):
    """The gradient of one parameter is aliased; a hook keeps the memory of the other's."""

    kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.hooked = nn.Parameter(torch.zeros(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        hooked: Any = self.hooked
        hooked.register_hook(lambda gradient: self.kept.append((gradient.detach(), gradient.clone())))
        return x * Given.apply(self.weight) + x @ hooked  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("options", [{}, {"watch": {Event.BATCH_END}}, {"donate": False}], ids=str)
def test_an_aliased_gradient_is_not_written_to(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Given.gradient = torch.ones(WIDTH, WIDTH)
    Odd.kept.clear()
    trained(Odd, **options)
    assert torch.equal(Given.gradient, torch.ones(WIDTH, WIDTH))
    assert len(Odd.kept) == 2 * 12
    assert all(torch.equal(gradient, before) for gradient, before in Odd.kept)
    monkeypatch.setattr(engine, "are_unaliased", lambda tensors: True)
    with contextlib.suppress(AssertionError):  # of other parameters
        trained(Odd, **options)
    assert not torch.equal(Given.gradient, torch.ones(WIDTH, WIDTH)), "that would not be noticed"


class Partly(nn.Module):
    """Goes through one of its two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Any:
        return self.halves[int(x.sum() > 0)](x)


class Inner(nn.Linear):
    """Differentiates by its weight once more, in the middle of the backward."""

    seen: ClassVar[list[Any]] = []

    def forward(self, input: Tensor) -> Tensor:
        out, weight = super().forward(input), self.weight

        def look(gradient: Tensor) -> Tensor:
            Inner.seen.append(weight.grad)
            with torch.enable_grad():
                (inner,) = torch.autograd.grad(weight.square().sum(), [weight])
            return gradient * inner.norm()

        out.register_hook(look)  # type: ignore[no-untyped-call]
        return out


class Sparse(nn.Module):
    """With gradients that are sparse, and some with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.convolution = nn.Embedding(9, 4, sparse=True), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.convolution(self.embedding(x).permute(0, 3, 1, 2)).mean((2, 3))


class Skipping(nn.Linear):
    """Has its own way with zeros."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.any() else input + torch.zeros(1, requires_grad=True)


@pytest.mark.parametrize("watch", [None, ONE], ids=["every event", "one"])
def test_what_only_some_microbatches_have_and_what_others_see(watch: Any, request: pytest.FixtureRequest) -> None:
    signs = torch.tensor([[1.0], [-1.0], [1.0], [1.0], [-1.0], [-1.0]])
    data = [(signs * torch.rand(6, WIDTH), torch.randn(6, WIDTH)) for _ in range(3)]
    trained(Partly, data, microbatch_size=1, watch=watch)
    Inner.seen.clear()
    trained(partial(Inner, WIDTH, WIDTH), watch=watch)
    assert Inner.seen == [None] * 24, "the sum is where a hook sees it"
    # A microbatch that reaches no parameter is refused among others, as where it is the only one.
    for batch in (0, 2):
        data = [(torch.rand(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(3)]
        data[batch][0][2:] = 0
        with pytest.raises(pl.errors.LossError, match="depend"):
            trained(partial(Skipping, WIDTH, WIDTH), data, watch=watch)
    request.getfixturevalue("every_gradient_is_large")
    images = [(torch.randint(9, (7, 5, 5)), torch.randn(7, 4)) for _ in range(3)]
    trained(Sparse, images, watch=watch, optimizer=pl.optim.from_torch(torch.optim.SGD, lr=0.1))

    @pl.algorithm(Event.AFTER_BACKWARD)
    def doubles(state: pl.State) -> pl.State:
        with torch.inference_mode():
            return state.replace(grads={name: 2 * gradient for name, gradient in state.grads.items()})

    for size in (None, 2):
        trained(partial(nn.Linear, WIDTH, WIDTH), algorithms=[doubles], microbatch_size=size, watch=watch)


def test_stages_know_parameters_and_gradients_by_their_names() -> None:
    """An algorithm's own State may have them in another order."""
    stages = pl.Stages(task=pl.Task(loss=lambda out, batch: problem.cross_entropy(out, batch[1])))
    ((batch,),) = (problem.points(1),)

    def gradients(state: pl.State, grads: Any) -> dict[str, Tensor]:
        state = state.replace(batch=batch, microbatch=batch, grads=grads)
        return dict(stages.backward(stages.loss(stages.forward(state))).grads or {})

    state = pl.State.create(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)))
    begun = {name: torch.full_like(tensor, i) for i, (name, tensor) in enumerate(state.params.items())}
    turned = state.replace(params=dict(reversed(state.params.items())))
    for grads in (None, begun):
        assert_same(gradients(turned, grads), gradients(state, grads), "turned")
    assert_same(gradients(state, dict(reversed(begun.items()))), gradients(state, begun), "turned")


@pytest.mark.parametrize("at_once", [True, False])
def test_each_copy_of_many_tensors_at_once_is_the_clone_of_one(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:  # torch before 2.12
        monkeypatch.setattr(tree_ops, "foreach_clone", None)
    tensors = [torch.tensor([1.0, float("nan")]), torch.zeros(0, 2), torch.rand(3, 2).t(), torch.ones(3).expand(2, 3)]
    tensors += [
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([1j]),
        torch.eye(3).to_sparse(),
    ]
    for copy, tensor in zip(tree_ops.clone_all(tensors), tensors, strict=True):
        assert_same({"copy": copy}, {"copy": tensor.clone()}, str(tensor))
        if copy.layout is torch.strided:
            assert copy.stride() == tensor.clone().stride()
            assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()
    assert tree_ops.clone_all([]) == []
    doubled = lambda x: torch.stack(tree_ops.clone_all([x, x])).sum(0)  # noqa: E731
    assert torch.equal(torch.func.vmap(doubled)(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    assert torch.equal(torch.func.grad(lambda x: doubled(x).sum())(torch.ones(2)), torch.full((2,), 2.0))
