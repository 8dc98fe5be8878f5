"""Gradients of microbatches are added up in place where no other reference to the memory exists, and only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event
from pure_loop.stages import engine
from pure_loop.stages.references import are_unaliased, can_count
from pure_loop.stages.workspace import Workspace

pytestmark = pytest.mark.skipif(not can_count(), reason="references can't be counted on this interpreter")

WIDTH = 512
WHATEVER = torch.ones(4, 4)


def two_of_the_same() -> tuple[Tensor, ...]:
    one = torch.ones(2)
    return one, one


def two_views() -> tuple[Tensor, ...]:
    whole = torch.ones(4)
    return whole[:2], whole[2:]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: (torch.ones(2), torch.ones(3)), True),
        (lambda: (torch.ones(2, 3).t().contiguous(), torch.ones(3, 2, 4, 4)), True),
        (lambda: (torch.ones(6).view(2, 3),), True),
        (lambda: (WHATEVER,), False),
        (lambda: (WHATEVER.view(16),), False),
        (lambda: (WHATEVER.detach(),), False),
        (lambda: (torch.from_numpy(WHATEVER.numpy()),), False),
        (two_of_the_same, False),
        (two_views, False),
        (lambda: (torch.ones(()).expand(3),), False),
        (lambda: (torch.ones(2, 3).t(),), False),
    ],
    ids=[
        *("new", "another layout", "a view of its own", "aliased", "a view of what is aliased", "detached", "NumPy's"),
        *("twice the same", "views of one", "expanded", "transposed"),
    ],
)
def test_who_has_a_tensor_is_counted(make: Callable[[], Sequence[Tensor]], wanted: bool) -> None:
    assert are_unaliased(make()) is wanted


def test_who_has_the_tensor_behind_a_view_is_counted() -> None:
    base = torch.ones(6)
    assert not are_unaliased((base.view(2, 3),))
    storage = torch.ones(3).untyped_storage()
    assert not are_unaliased((torch.empty(0).set_(storage),))


def test_one_that_is_aliased_is_no_view_of_its_own() -> None:
    kept: list[Tensor] = []

    def gradients() -> tuple[Tensor, Tensor]:
        aliased = torch.ones(2)
        kept.append(aliased.detach())
        return torch.ones(6).view(2, 3), aliased

    assert not are_unaliased(gradients())


class _Hooked(torch.nn.Module):
    """The gradient of one parameter is a view, and a hook keeps the memory of the other's."""

    def __init__(self, kept: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.viewed = torch.nn.Linear(600, 600, bias=False)
        self.hooked = torch.nn.Parameter(torch.ones(600, 600))
        self._kept = kept

    def forward(self, x: Tensor) -> Tensor:
        hooked = self.hooked
        hooked.register_hook(self._keep)  # type: ignore[no-untyped-call]
        return self.viewed(x) + x @ hooked  # type: ignore[no-any-return]

    def _keep(self, gradient: Tensor) -> None:
        self._kept.append((gradient.detach(), gradient.clone()))


def test_what_a_hook_keeps_of_a_gradient_stays() -> None:
    kept: list[tuple[Tensor, Tensor]] = []
    data = [(torch.randn(4, 600), torch.randn(4, 600)) for _ in range(2)]
    model, loss, optimizer = _Hooked(kept), torch.nn.functional.mse_loss, pl.optim.sgd(lr=0.1)
    settings: dict[str, Any] = {"max_duration": "1ep", "microbatch_size": 2, "donate": False}
    pl.run(pl.fit(model, data, loss=loss, optimizer=optimizer, **settings))
    assert len(kept) == 4
    assert all(torch.equal(gradient, before) for gradient, before in kept)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What the loop asked about, the sum before or the gradients that were found, and what came out."""
    found: list[tuple[str, bool]] = []
    take = Workspace.take_gradients

    def taking(self: Workspace, state: pl.State) -> bool:
        found.append(("before", take(self, state)))
        return found[-1][1]

    def asking(tensors: Any) -> bool:
        found.append(("found", are_unaliased(tensors)))
        return found[-1][1]

    monkeypatch.setattr(engine, "are_unaliased", asking)
    monkeypatch.setattr(Workspace, "take_gradients", taking)
    return found


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Says that from now on gradients are added up in new memory."""

    def copy() -> None:
        monkeypatch.setattr(engine, "are_unaliased", lambda tensors: False)
        monkeypatch.setattr(Workspace, "take_gradients", lambda self, state: False)

    return copy


def stream(model: nn.Module, data: Any = None, **options: Any) -> Any:
    if data is None:
        torch.manual_seed(0)
        data = [(torch.randn(7, WIDTH), torch.randn(7, WIDTH)) for _ in range(3)]
    options = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", **options}
    return pl.fit(model, data, loss=mse_loss, **options)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    "watch",
    [None, {Event.BATCH_END}, {Event.AFTER_BACKWARD, Event.BATCH_END}],
    ids=["every event", "one", "two"],
)
def test_large_gradients_are_added_up_in_place(
    answers: list[tuple[str, bool]], watch: Any, copying: Callable[[], None]
) -> None:
    in_place = pl.run(stream(layers(), microbatch_size=2, watch=watch))
    assert answers == [("before", True)] * 12  # three batches of four microbatches, whose sum is divided
    copying()
    copied = pl.run(stream(layers(), microbatch_size=2, watch=watch))
    for name, tensor in in_place.params.items():
        assert torch.equal(tensor, copied.params[name])


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
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x * Given.apply(self.weight)  # type: ignore[no-untyped-call]
        return total


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
def test_an_aliased_gradient_is_not_written_to(answers: list[tuple[str, bool]], watch: Any) -> None:
    Given.gradient = torch.ones(WIDTH, WIDTH)
    pl.run(stream(Odd(), microbatch_size=4, watch=watch))
    assert ("found", False) in answers
    assert torch.equal(Given.gradient, torch.ones(WIDTH, WIDTH))


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
def test_writing_to_it_is_caught(monkeypatch: pytest.MonkeyPatch, watch: Any) -> None:
    monkeypatch.setattr(engine, "are_unaliased", lambda tensors: True)
    Given.gradient = torch.ones(WIDTH, WIDTH)
    pl.run(stream(Odd(), microbatch_size=4, watch=watch))
    assert not torch.equal(Given.gradient, torch.ones(WIDTH, WIDTH))


class Partly(nn.Module):
    """Goes through one of its two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.halves[int(x.sum() > 0)](x)
        return out


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
def test_parameters_that_some_microbatches_leave_out(watch: Any, copying: Callable[[], None]) -> None:
    def run() -> Any:
        torch.manual_seed(0)
        signs = torch.tensor([[1.0], [-1.0], [1.0], [1.0], [-1.0], [-1.0]])
        data = [(signs * torch.rand(6, WIDTH), torch.randn(6, WIDTH)) for _ in range(3)]
        return pl.run(stream(Partly(), data=data, microbatch_size=1, watch=watch)).params

    in_place = run()
    copying()
    for name, tensor in run().items():
        assert torch.equal(tensor, in_place[name])


class Skipping(nn.Linear):
    """Has its own way with zeros."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.any() else input + torch.zeros(1, requires_grad=True)


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
@pytest.mark.parametrize("batch", [0, 2])
def test_a_microbatch_that_reaches_no_parameter_is_refused_among_others(watch: Any, batch: int) -> None:
    """As where it is the only one: torch adds nothing then, and doesn't say so."""
    torch.manual_seed(0)
    data = [(torch.rand(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(3)]
    data[batch][0][2:] = 0
    with pytest.raises(pl.LossError, match="depend"):
        pl.run(stream(Skipping(WIDTH, WIDTH), data=data, microbatch_size=2, watch=watch))


@pytest.mark.usefixtures("every_gradient_is_large")
@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_gradients_made_in_inference_mode_are_left_alone(watch: Any, microbatch_size: int | None) -> None:
    @pl.algorithm(Event.AFTER_BACKWARD)
    def doubles(state: pl.State) -> pl.State:
        with torch.inference_mode():
            return state.replace(grads={name: 2 * gradient for name, gradient in state.grads.items()})

    pl.run(stream(layers(), algorithms=[doubles], microbatch_size=microbatch_size, watch=watch))


class Looking(nn.Linear):
    """Keeps what it finds where torch's own loops have gradients."""

    def forward(self, input: Tensor) -> Tensor:
        out, weight = super().forward(input), self.weight
        out.register_hook(lambda gradient: Looking.seen.append(weight.grad))
        return out

    seen: ClassVar[list[Any]] = []


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
def test_the_sum_is_nowhere_where_a_hook_could_see_it(watch: Any) -> None:
    Looking.seen.clear()
    pl.run(stream(Looking(WIDTH, WIDTH), microbatch_size=2, watch=watch))
    assert Looking.seen == [None] * 12


@pytest.mark.usefixtures("every_gradient_is_large")
@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
def test_sparse_gradients_and_those_of_another_layout_are_added_up(watch: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.convolution = nn.Embedding(9, 4, sparse=True), nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            images = self.embedding(x).permute(0, 3, 1, 2)  # with channels last
            out: Tensor = self.convolution(images).mean((2, 3))
            return out

    def run(**options: Any) -> Any:
        torch.manual_seed(0)
        data = [(torch.randint(9, (7, 5, 5)), torch.randn(7, 4)) for _ in range(3)]
        optimizer = pl.optim.from_torch(torch.optim.SGD, lr=0.1)
        return pl.run(stream(Model(), data=data, optimizer=optimizer, microbatch_size=2, watch=watch, **options)).params

    one, other = run(), run(donate=False)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])


class Inner(nn.Linear):
    """Differentiates by its weight once more, in the middle of the backward."""

    def forward(self, input: Tensor) -> Tensor:
        out, weight = super().forward(input), self.weight

        def look(gradient: Tensor) -> Tensor:
            with torch.enable_grad():
                (inner,) = torch.autograd.grad(weight.square().sum(), [weight])
            return gradient * inner.norm()

        out.register_hook(look)  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
def test_a_gradient_that_is_taken_inside_a_backward_is_its_own(watch: Any, copying: Callable[[], None]) -> None:
    def run() -> Any:
        torch.manual_seed(0)
        return pl.run(stream(Inner(WIDTH, WIDTH), microbatch_size=2, watch=watch)).params

    in_place = run()
    copying()
    for name, tensor in run().items():
        assert torch.equal(tensor, in_place[name])


def test_gradients_are_added_up_by_name() -> None:
    """An algorithm's own State may have them in another order."""
    sums = []

    @pl.algorithm(Event.BATCH_START)
    def adds(state: pl.State, stages: Any) -> pl.State:
        begun = {name: torch.full_like(tensor, i) for i, (name, tensor) in enumerate(state.params.items())}
        for grads in (begun, dict(reversed(begun.items()))):
            own = state.replace(microbatch=state.batch, grads=grads)
            sums.append(stages.backward(stages.loss(stages.forward(own))).grads)
        return state

    pl.run(stream(layers(), algorithms=[adds]))
    for one, other in zip(sums[::2], sums[1::2], strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_small_gradients_are_added_up_in_new_memory(answers: list[tuple[str, bool]]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))
    pl.run(stream(model, microbatch_size=2))
    assert set(answers) == {("before", False)}
