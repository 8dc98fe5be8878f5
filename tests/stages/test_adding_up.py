"""Gradients of microbatches are added up in place where no other reference to the memory exists, and only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop.stages import engine
from pure_loop.stages.references import LARGE, are_unaliased, can_count
from pure_loop.stages.workspace import Workspace
from tests.support.streams import assert_same

pytestmark = pytest.mark.skipif(not can_count(), reason="references can't be counted on this interpreter")

WIDTH = 512
WATCHES: list[Any] = [None, {Event.BATCH_END}]
WHATEVER = torch.ones(4, 4)


def two_of_the_same() -> tuple[Tensor, ...]:
    return (torch.ones(2),) * 2


def two_views() -> tuple[Tensor, ...]:
    whole = torch.ones(4)
    return whole[:2], whole[2:]


def of_a_kept_storage() -> tuple[Tensor, ...]:
    kept = torch.ones(3)
    KEPT.append(kept.untyped_storage())
    return (kept,)


def a_view_and_an_aliased_one() -> tuple[Tensor, ...]:
    aliased = torch.ones(2)
    KEPT.append(aliased.detach())
    return torch.ones(6).view(2, 3), aliased


KEPT: list[Any] = []
GRADIENTS: dict[str, tuple[Callable[[], Sequence[Any]], bool]] = {
    "new": (lambda: (torch.ones(2), None, torch.ones(3)), True),
    "another layout": (lambda: (torch.ones(2, 3).t().contiguous(), torch.ones(3, 2, 4, 4)), True),
    "channels last": (lambda: (torch.ones(3, 2, 4, 4).to(memory_format=torch.channels_last),), True),
    "a view of its own": (lambda: (torch.ones(6).view(2, 3),), True),
    "aliased": (lambda: (WHATEVER,), False),
    "a view of what is aliased": (lambda: (WHATEVER.view(16),), False),
    "detached": (lambda: (WHATEVER.detach(),), False),
    "NumPy's": (lambda: (torch.from_numpy(WHATEVER.numpy().copy()),), False),
    "twice the same": (two_of_the_same, False),
    "views of one": (two_views, False),
    "a kept storage": (of_a_kept_storage, False),
    "beside a view of its own": (a_view_and_an_aliased_one, False),
    "expanded": (lambda: (torch.ones(()).expand(3),), False),
    "transposed": (lambda: (torch.ones(2, 3).t(),), False),
}


def test_who_has_a_tensor_is_counted() -> None:
    for kind, (make, wanted) in GRADIENTS.items():
        assert are_unaliased(make()) is wanted, kind
    KEPT.clear()


class Answers:
    """What the loop asked about, the sum before or the gradients that were found, and what came out."""

    def __init__(self, patched: pytest.MonkeyPatch, copies: bool = False) -> None:
        self.found: list[tuple[str, bool]] = []
        take = Workspace.take_gradients

        def taking(this: Workspace, state: pl.State) -> bool:
            self.found.append(("before", not copies and take(this, state)))
            return self.found[-1][1]

        def asking(tensors: Any) -> bool:
            self.found.append(("found", not copies and are_unaliased(tensors)))
            return self.found[-1][1]

        patched.setattr(engine, "are_unaliased", asking)
        patched.setattr(Workspace, "take_gradients", taking)


def answers(run: Callable[..., Any], **options: Any) -> list[tuple[str, bool]]:
    """What the loop asked in this run, whose parameters are those of one that adds up in new memory."""
    results = []
    for copies in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            found = Answers(patched, copies).found
            results.append(run(**options).params)
    assert_same(dict(results[1]), dict(results[0]), "in place and in new memory")
    return found


def trained(model: Callable[[], nn.Module], data: Any = None, **options: Any) -> pl.State:
    torch.manual_seed(0)
    data = [(torch.randn(7, WIDTH), torch.randn(7, WIDTH)) for _ in range(3)] if data is None else data
    options = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", "microbatch_size": 2, **options}
    return pl.run(pl.fit(model(), data, loss=mse_loss, **options))


def layers(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, WIDTH))


@pytest.mark.parametrize(
    "watch", [*WATCHES, {Event.AFTER_BACKWARD, Event.BATCH_END}], ids=["every event", "one", "two"]
)
def test_large_gradients_are_added_up_in_place(watch: Any) -> None:
    # Three batches of four microbatches, whose sum is divided.
    assert answers(partial(trained, layers), watch=watch) == [("before", True)] * 12
    assert set(answers(partial(trained, partial(layers, 2)), watch=watch)) == {("before", False)}
    assert WIDTH * WIDTH >= LARGE


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

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.hooked = nn.Parameter(torch.zeros(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.kept: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        hooked: Any = self.hooked
        hooked.register_hook(lambda gradient: self.kept.append((gradient.detach(), gradient.clone())))
        return x * Given.apply(self.weight) + x @ hooked  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("options", [{}, {"watch": {Event.BATCH_END}}, {"donate": False}], ids=str)
def test_an_aliased_gradient_is_not_written_to(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Given.gradient, model = torch.ones(WIDTH, WIDTH), Odd()
    assert ("found", False) in answers(trained, model=lambda: model, **options)
    assert torch.equal(Given.gradient, torch.ones(WIDTH, WIDTH))
    assert len(model.kept) == 2 * 12
    assert all(torch.equal(gradient, before) for gradient, before in model.kept)
    monkeypatch.setattr(engine, "are_unaliased", lambda tensors: True)
    trained(lambda: model, **options)
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

    def forward(self, input: Tensor) -> Tensor:
        out, weight = super().forward(input), self.weight

        def look(gradient: Tensor) -> Tensor:
            Inner.seen.append(weight.grad)
            with torch.enable_grad():
                (inner,) = torch.autograd.grad(weight.square().sum(), [weight])
            return gradient * inner.norm()

        out.register_hook(look)  # type: ignore[no-untyped-call]
        return out

    seen: ClassVar[list[Any]] = []


class Sparse(nn.Module):
    """With gradients that are sparse, and some with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.convolution = nn.Embedding(9, 4, sparse=True), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.convolution(self.embedding(x).permute(0, 3, 1, 2)).mean((2, 3))


@pytest.mark.parametrize("watch", WATCHES, ids=["every event", "one"])
def test_what_only_some_microbatches_have_and_what_others_see(watch: Any, request: pytest.FixtureRequest) -> None:
    signs = torch.tensor([[1.0], [-1.0], [1.0], [1.0], [-1.0], [-1.0]])
    data = [(signs * torch.rand(6, WIDTH), torch.randn(6, WIDTH)) for _ in range(3)]
    answers(trained, model=Partly, data=data, microbatch_size=1, watch=watch)
    Inner.seen.clear()
    assert answers(trained, model=partial(Inner, WIDTH, WIDTH), watch=watch) == [("before", True)] * 12
    assert Inner.seen == [None] * 24, "the sum is where a hook sees it"
    request.getfixturevalue("every_gradient_is_large")
    images = [(torch.randint(9, (7, 5, 5)), torch.randn(7, 4)) for _ in range(3)]
    answers(trained, model=Sparse, data=images, watch=watch, optimizer=pl.optim.from_torch(torch.optim.SGD, lr=0.1))


class Skipping(nn.Linear):
    """Has its own way with zeros."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.any() else input + torch.zeros(1, requires_grad=True)


@pytest.mark.parametrize("watch", WATCHES, ids=["every event", "one"])
def test_a_microbatch_that_reaches_no_parameter_is_refused_among_others(watch: Any) -> None:
    """As where it is the only one: torch adds nothing then, and doesn't say so."""
    for batch in (0, 2):
        data = [(torch.rand(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(3)]
        data[batch][0][2:] = 0
        with pytest.raises(pl.LossError, match="depend"):
            trained(lambda: Skipping(WIDTH, WIDTH), data, watch=watch)


@pytest.mark.usefixtures("every_gradient_is_large")
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_gradients_made_in_inference_mode_are_left_alone(microbatch_size: int | None) -> None:
    @pl.algorithm(Event.AFTER_BACKWARD)
    def doubles(state: pl.State) -> pl.State:
        with torch.inference_mode():
            return state.replace(grads={name: 2 * gradient for name, gradient in state.grads.items()})

    for watch in WATCHES:
        trained(layers, algorithms=[doubles], microbatch_size=microbatch_size, watch=watch)


# Copies of many tensors at once are those of one after the other.

TENSORS = {
    "a vector": torch.tensor([1.0, float("nan")]),
    "a count": torch.tensor(3),
    "nothing": torch.zeros(0, 2),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.rand(3, 2).t(),
    "expanded": torch.ones(3).expand(2, 3),
    "complex": torch.tensor([1j]),
    "half": torch.ones(2, dtype=torch.float16),
    "sparse": torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([2.0]), (3,), check_invariants=True),
}


@pytest.mark.parametrize("at_once", [True, False])
def test_each_copy_is_the_clone_of_one(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from pure_loop._internal import tree_ops

    if not at_once:  # torch before 2.12
        monkeypatch.setattr(tree_ops, "foreach_clone", None)
    for copy, (name, tensor) in zip(tree_ops.clone_all(list(TENSORS.values())), TENSORS.items(), strict=True):
        assert_same({name: copy}, {name: tensor.clone()}, name)
        if copy.layout is torch.strided:
            assert copy.stride() == tensor.clone().stride(), name
            assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr(), name
    assert tree_ops.clone_all([]) == []

    def doubled(x: Tensor) -> Tensor:
        return torch.stack(tree_ops.clone_all([x, x])).sum(0)

    assert torch.equal(torch.func.vmap(doubled)(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    assert torch.equal(torch.func.grad(lambda x: doubled(x).sum())(torch.ones(2)), torch.full((2,), 2.0))
