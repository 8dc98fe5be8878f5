"""What one compiled piece of a microbatch can't hand on to the next is refused, or runs eagerly "where possible"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import record
from pure_loop.errors import AlgorithmStructureError, ArgumentError, CompileError, LossError
from tests.support.compiling import BATCHES, INSIDE, SHORT, Pair, assert_close, fit
from tests.support.models import CLASSES, FEATURES, plain
from tests.support.tiers import tiers

pytestmark = pytest.mark.usefixtures("interpreted")


@pl.algorithm(Event.AFTER_LOSS)
def second_derivatives(state: pl.State) -> pl.State:
    params = list(state.params.values())
    slopes = torch.autograd.grad(state.loss, params, create_graph=True)
    return state.replace(loss=state.loss + 0.1 * sum(slope.square().sum() for slope in slopes))


@pytest.mark.slow
def test_a_second_derivative_is_part_of_a_graph_or_refused() -> None:
    settings: dict[str, Any] = {"model": plain, "algorithms": [second_derivatives], "max_duration": "2ba"}
    watch = {Event.BEFORE_BACKWARD, Event.BATCH_END}
    assert_close(fit(compile=True, watch=watch, **settings), fit(watch=watch, **settings))
    with pytest.raises(CompileError, match=r"create_graph=True.*leave its event out of watch="):
        fit(compile=True, watch={Event.AFTER_LOSS}, **settings)


@pytest.mark.slow
def test_an_algorithm_that_differentiates_through_a_forward_in_another_graph_is_refused_or_runs_eagerly() -> None:
    @pl.algorithm(Event.AFTER_LOSS)
    def slopes(state: pl.State) -> pl.State:
        found = torch.autograd.grad(state.loss, list(state.params.values()), retain_graph=True, allow_unused=True)
        return state.remember("size", sum(slope.square().sum() for slope in found if slope is not None))

    settings: dict[str, Any] = {"model": plain, "algorithms": [slopes], "watch": {Event.AFTER_FORWARD, *BATCHES}}
    with pytest.raises(CompileError, match=r"'slopes' at AFTER_LOSS can't be compiled: it differentiates"):
        fit(compile=True, **settings)
    assert_close(fit(compile="where possible", **settings), fit(**settings))


@pytest.mark.parametrize("compile", [False, True])
def test_parameters_replaced_inside_a_graph_are_refused_as_they_are_in_eager_steps(compile: bool) -> None:
    @pl.algorithm(Event.AFTER_FORWARD)
    def replaces(state: pl.State) -> pl.State:
        return state.replace(params={name: 2 * each for name, each in state.params.items()})

    with pytest.raises(AlgorithmStructureError, match="replaced params at AFTER_FORWARD, between"):
        fit(plain, compile=compile, algorithms=[replaces], watch={Event.AFTER_LOSS})


@pytest.mark.parametrize("compile", [False, True])
def test_clipped_gradients_of_another_dtype_are_refused_as_they_are_in_eager_steps(compile: bool) -> None:
    def imaginary(grads: Any, _: Any) -> Any:
        return {name: 1j * grad for name, grad in grads.items()}

    with pytest.raises(ArgumentError, match=r"clip_grad=.*imaginary returned a gradient of dtype torch.complex64"):
        fit(plain, compile=compile, clip_grad=imaginary)


@pytest.mark.parametrize("compile", [False, True])
def test_a_loss_without_a_graph_is_refused_as_it_is_in_eager_steps(compile: bool) -> None:
    with pytest.raises(LossError, match="does not depend on any parameter"):
        fit(plain, compile=compile, loss=lambda outputs, _: outputs.detach().mean(), watch={Event.AFTER_FORWARD})


@pytest.mark.parametrize("compile", [False, True])
def test_a_loss_that_closes_over_the_module_is_refused_as_it_is_in_eager_steps(compile: bool) -> None:
    module = plain()

    def penalised(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean() + next(module.parameters()).square().sum()

    with pytest.raises(pl.errors.ModelError, match="was not called with"):
        fit(lambda: module, compile=compile, loss=penalised, watch={Event.AFTER_FORWARD})


def test_an_algorithm_that_cannot_be_traced_leaves_the_rest_compiled() -> None:
    @pl.algorithm(Event.AFTER_FORWARD)
    def reads(state: pl.State) -> pl.State:
        return state.replace(outputs=state.outputs * (1 + (state.outputs.max().item() > 0)))

    settings: dict[str, Any] = {"model": plain, "algorithms": [reads], "watch": BATCHES, "microbatch_size": 3}
    with record() as graphs:
        assert_close(fit(compile="where possible", **settings), fit(**settings))
    names = {graph.segment for graph in graphs}
    assert names == {"forward", "BEFORE_LOSS to BEFORE_BACKWARD", "update"}


def test_a_loss_that_cannot_be_traced_resumes_eagerly_from_a_compiled_forward() -> None:
    def clipped(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss if loss.item() < 100 else loss / 2

    settings: dict[str, Any] = {"loss": clipped, "watch": {Event.AFTER_FORWARD, *BATCHES}, "microbatch_size": 3}
    with record() as graphs:
        assert_close(fit(compile="where possible", **settings), fit(**settings))
    assert [graph.segment for graph in graphs] == ["forward", "update"]


def slope(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    total = outputs["more"].sum() + 0.5 * outputs["out"].square().sum()
    (found,) = torch.autograd.grad(total, outputs["out"], create_graph=True)
    return found.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("event", INSIDE)
def test_a_loss_that_differentiates_one_output_by_another(event: Event) -> None:
    settings: dict[str, Any] = {"model": Pair, "loss": slope, "watch": {event, *BATCHES}}
    if event in INSIDE[:2]:
        with pytest.raises(CompileError, match="the loss can't be compiled: it differentiates"):
            fit(compile=True, **settings)
        assert_close(fit(compile="where possible", **settings), fit(**settings))
    else:
        assert_close(fit(compile=True, **settings), fit(**settings))


@pl.algorithm(Event.AFTER_FORWARD)
def remembers_a_graph(state: pl.State) -> pl.State:
    return state.remember("size", state.outputs.square().mean())


@pl.algorithm(Event.AFTER_LOSS)
def adds_what_was_remembered(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss + state.algorithm_state["size"]).remember("size", torch.zeros(()))


@pytest.mark.parametrize("event", INSIDE[:3])
def test_memory_that_carries_a_graph_from_one_piece_to_the_next(event: Event) -> None:
    algorithms = [remembers_a_graph, adds_what_was_remembered]
    settings: dict[str, Any] = {"model": plain, "algorithms": algorithms, "watch": {event, *BATCHES}}
    with pytest.raises(CompileError, match=r"state.algorithm_state\['size'\] carries a graph"):
        fit(compile=True, **settings)
    assert_close(fit(compile="where possible", **settings), fit(**settings))


@pl.algorithm(Event.AFTER_FORWARD)
def numbered(state: pl.State) -> pl.State:
    return state.replace(outputs=(state.outputs, state.timestamp.batch))


class Closed:
    """No pytree, and no dataclass or attrs class, whose fields are found."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


class Closing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Closed:
        return Closed(self.layer(x))


@pytest.mark.parametrize("event", [*INSIDE, Event.AFTER_BACKWARD])
def test_what_a_graph_would_hold_for_ever_is_refused(event: Event) -> None:
    watch = {event, *BATCHES}
    if event is not Event.AFTER_FORWARD:  # where the algorithm runs eagerly
        with pytest.raises(CompileError, match="a number of the step is put into"):
            fit(
                plain,
                compile=True,
                algorithms=[numbered],
                loss=lambda outputs, targets: outputs[0].sum() * outputs[1],
                watch=watch,
            )
    with pytest.raises(CompileError, match="a Closed holds tensors where no graph finds them"):
        fit(Closing, compile=True, loss=lambda outputs, _: outputs.scores.sum(), watch=watch)


@pl.algorithm(Event.AFTER_TRAIN_BATCH)
def doubled_gradients(state: pl.State) -> pl.State:
    return state.replace(grads={name: 2 * gradient for name, gradient in state.grads.items()})


@pytest.mark.parametrize("event", tiers([*INSIDE, Event.AFTER_BACKWARD], [Event.AFTER_FORWARD, Event.AFTER_LOSS]))
def test_closed_outputs_of_an_eager_forward_go_by_a_graph(event: Event) -> None:
    settings: dict[str, Any] = {"model": Closing, "loss": lambda outputs, _: outputs.scores.square().sum()}
    settings |= {"algorithms": [doubled_gradients], "watch": {event, *BATCHES}}
    found, wanted = (fit(compile=each, **settings) for each in ("where possible", False))
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.outputs.scores, other.outputs.scores)
        torch.testing.assert_close(dict(one.params), dict(other.params))


class Reading(torch.autograd.Function):
    """Its backward reads a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient if float(gradient.sum()) < 1e9 else gradient


@pytest.mark.parametrize("event", INSIDE)
def test_a_backward_that_cannot_be_traced(event: Event) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = nn.functional.cross_entropy(Reading.apply(outputs), targets)
        return found

    settings: dict[str, Any] = {"model": plain, "loss": loss, "watch": {event, *BATCHES}}
    with pytest.raises(CompileError, match=r"the backward can't be compiled: .*reads a number"):
        fit(compile=True, **settings)
    assert_close(fit(compile="where possible", **settings), fit(**settings))


class InFloat64(nn.Module):
    """Computes its features under another default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with default_dtype(torch.float64):
            weights = torch.linspace(0, 1, FEATURES)
        out: Tensor = self.layer((x * weights).float())
        return out


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pl.algorithm(Event.AFTER_LOSS)
def thirds(state: pl.State) -> pl.State:
    with default_dtype(torch.float64):
        return state.replace(loss=state.loss * ((state.loss.detach() * 100).long() / 3))


@pl.algorithm(Event.BATCH_END)
def for_good(state: pl.State) -> pl.State:
    torch.set_default_dtype(torch.float64)
    return state


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("the forward of InFloat64", {"model": InFloat64}),
        ("algorithm 'thirds' at AFTER_LOSS", {"algorithms": [thirds]}),
        ("algorithm 'for_good' at BATCH_END", {"algorithms": [for_good], "watch": {Event.EPOCH_END}}),
    ],
    ids=["a model", "an algorithm", "for good"],
)
def test_another_default_dtype_inside_a_graph_is_refused_or_runs_eagerly(what: str, options: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"model": plain, "watch": BATCHES, **options}
    with default_dtype(torch.float32):
        with pytest.raises(CompileError, match=f"{what} can't be compiled: .*another default dtype"):
            fit(compile=True, **settings)
        assert torch.get_default_dtype() is torch.float32
        found = fit(compile="where possible", **settings)
    with default_dtype(torch.float32):
        assert_close(found, fit(**settings))


def test_a_graph_is_of_the_default_dtype_that_it_was_made_under() -> None:
    def doubled() -> nn.Module:
        return plain().double()

    data = [(x.double(), y) for x, y in SHORT["data"]]
    with default_dtype(torch.float64):
        settings: dict[str, Any] = {"model": doubled, "data": data, "algorithms": [numbers_in_float64]}
        assert_close(fit(compile=True, **settings), fit(**settings), 1e-12)


@pl.algorithm(Event.AFTER_LOSS)
def numbers_in_float64(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * torch.linspace(0.1, 1, 3).prod() / torch.tensor(3.0))
