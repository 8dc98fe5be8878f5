"""Compiled forwards that are observed: what is shown has its graph, and backwards go through compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import ema
from pure_loop.compile import connected, record
from pure_loop.frozendict import FrozenDict
from tests.support.compiling import (
    BATCHES,
    INSIDE,
    Attention,
    Named,
    Pair,
    Parts,
    Unused,
    assert_close,
    every_third,
    fit,
    mlp,
    named_batches,
    several,
    stream,
)
from tests.support.models import CLASSES, FEATURES, Tied, batches, plain
from tests.support.tiers import examples, tiers

pytestmark = pytest.mark.usefixtures("interpreted")


@pl.algorithm(Event.AFTER_LOSS)
def penalty(state: pl.State) -> pl.State:
    weights = sum(parameter.square().sum() for parameter in state.params.values())
    return state.replace(loss=state.loss + 0.1 * weights)


@pl.algorithm(Event.AFTER_FORWARD)
def colder(state: pl.State) -> pl.State:
    return state.replace(outputs=state.outputs / (1 + state.timestamp.batch))


@pl.algorithm(Event.BEFORE_LOSS)
def remembered(state: pl.State) -> pl.State:
    mean = state.outputs.detach().mean()
    return state.remember("mean", mean + state.algorithm_state.get("mean", 0.0))


@pl.algorithm(Event.BEFORE_BACKWARD)
def by_the_optimizer(state: pl.State) -> pl.State:
    """Looks at memory that forwards and losses are not given otherwise."""
    moment = next(iter(state.opt_state["exp_avg"].values()))
    return state.remember("moment", moment.sum())


class Twice(nn.Module):
    """Its outputs are its input, two views of one tensor, and an integer: not all of them have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = self.layer(x)
        return x, out, out[:, :2], out.argmax(dim=1)


def of_all(outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    x, out, part, best = outputs
    loss: Tensor = nn.functional.cross_entropy(out, targets) + part.mean() + 0.1 * (best == targets).float().mean()
    return loss + 0.01 * (x * x).mean()


MODELS: dict[str, dict[str, Any]] = {
    "BatchNorm and dropout": {},
    "tied and frozen": {"model": Tied},
    "a parameter without a gradient": {"model": Unused},
    "a dict of losses": {"model": plain, "loss": Parts()},
    "attention": {
        "model": Attention,
    },
    "mappings and a loss of its own": {"model": Named, "data": named_batches(), "loss": None},
    "outputs of all kinds": {"model": Twice, "loss": of_all},
}
OF_ANYTHING = [ema(half_life="4ba"), by_the_optimizer]
ALGORITHMS: list[list[Any]] = [[], OF_ANYTHING, several(), [penalty], [colder, remembered], [every_third]]


def doubled(value: Any) -> Any:
    """The same batches or model in float64."""
    if isinstance(value, nn.Module):
        return value.double()
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: doubled(each) for name, each in value.items()}
    return type(value)(map(doubled, value))


@pytest.mark.slow
@examples(5, 500)
@given(
    name=st.sampled_from(sorted(MODELS)),
    inside=st.sets(st.sampled_from(INSIDE), min_size=1),
    algorithms=st.sampled_from(ALGORITHMS),
    microbatch_size=st.sampled_from([None, 3]),
    donate=st.sampled_from([False, "auto"]),
)
def test_the_same_states_whoever_looks_between_a_forward_and_its_backward(
    name: str, inside: set[Event], algorithms: list[Any], microbatch_size: int | None, donate: Any
) -> None:
    """In float64, where rounding can't be mistaken for anything else."""
    chosen = {"model": mlp, "data": batches((8, 5), 1)} | MODELS[name]
    one_tensor = "loss" not in chosen
    settings: dict[str, Any] = {
        **chosen,
        "model": lambda: doubled(chosen["model"]()),
        "data": doubled(chosen["data"]),
        "optimizer": pl.optim.adamw(lr=1e-3, eps=1e-2),
        "algorithms": [each for each in algorithms if one_tensor or each in OF_ANYTHING],
        "watch": inside | BATCHES,
        "microbatch_size": microbatch_size,
        "max_duration": "3ba",
    }
    assert_close(fit(compile=True, donate=donate, **settings), fit(donate=False, **settings), 1e-9)


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_mixed_precision(precision: str) -> None:
    settings: dict[str, Any] = {"model": plain, "precision": precision, "watch": {Event.AFTER_LOSS, *BATCHES}}
    assert_close(fit(compile=True, **settings), fit(**settings), 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("watch", "segments"),
    [
        ({Event.AFTER_LOSS}, ["forward to loss", "update"]),
        ({Event.AFTER_FORWARD}, ["forward", "BEFORE_LOSS to BEFORE_BACKWARD", "update"]),
        ({Event.BEFORE_LOSS, Event.BEFORE_BACKWARD}, ["forward to AFTER_FORWARD", "loss to AFTER_LOSS", "update"]),
        (None, ["forward", "loss", "update"]),
    ],
)
def test_what_lies_between_two_events_that_are_watched_is_one_graph(watch: Any, segments: list[str]) -> None:
    with record() as graphs:
        fit(compile=True, watch=watch, max_duration="2ba", microbatch_size=4)
    assert [graph.segment for graph in graphs] == segments


def test_what_is_shown_has_its_graph() -> None:
    """As in eager steps: its gradient is that of the step, and through outputs it is the same."""
    for event, state in stream(compile=True, watch={Event.AFTER_LOSS, Event.AFTER_BACKWARD}, max_duration="2ba"):
        if event is Event.AFTER_LOSS:
            found = torch.autograd.grad(state.loss, list(state.params.values()), retain_graph=True)
            assert state.outputs.requires_grad
        else:
            for one, other in zip(found, state.grads.values(), strict=True):
                torch.testing.assert_close(one, other)


def test_a_backward_frees_what_its_forward_kept() -> None:
    kept = []
    for _, state in stream(plain, compile=True, watch={Event.AFTER_LOSS}, max_duration="2ba"):
        kept.append(state)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(kept[0].loss, list(kept[0].params.values()))


class Stashing(nn.Module):
    """Its loss reads what the forward left in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.hidden = torch.zeros(())

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.layer(batch[0])
        self.hidden = out.square().mean()
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1]) + self.hidden


@pytest.mark.parametrize("event", INSIDE)
def test_a_loss_that_reads_what_its_forward_left(event: Event) -> None:
    settings: dict[str, Any] = {"model": Stashing, "loss": None, "watch": {event, *BATCHES}, "microbatch_size": 3}
    assert_close(fit(compile=True, **settings), fit(**settings))


class Heads(nn.Module):
    """Two heads, of which a loss may use one: then the other has no gradient, and its weights don't decay."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.other = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.one(hidden), self.other(hidden)


@pytest.mark.slow
@pytest.mark.parametrize("event", tiers(INSIDE, [Event.AFTER_FORWARD, Event.AFTER_LOSS]))
@pytest.mark.parametrize("which", [0, 1])
def test_a_head_that_the_loss_does_not_use_has_no_gradient(which: int, event: Event) -> None:
    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs[which], targets)

    settings: dict[str, Any] = {"model": Heads, "loss": loss, "watch": {event, *BATCHES}, "microbatch_size": 5}
    settings["optimizer"] = pl.optim.adamw(lr=0.1, weight_decay=0.5)
    assert_close(fit(compile=True, **settings), fit(**settings))


class Showing(nn.Module):
    """Gives a parameter as it is, and one more output, which the loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.body(x), self.body.weight, self.other(x)


@pytest.mark.parametrize("event", tiers(INSIDE, [Event.AFTER_FORWARD, Event.AFTER_LOSS]))
def test_an_output_that_is_a_parameter_has_its_gradient(event: Event) -> None:
    def loss(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs[0].detach(), targets) + outputs[1].square().sum()

    settings: dict[str, Any] = {"model": Showing, "loss": loss, "watch": {event, *BATCHES}}
    assert_close(fit(compile=True, **settings), fit(**settings))


def distilled(outputs: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy(outputs["out"], targets) + outputs["mean"].square().sum()
    total = loss + nn.functional.mse_loss(outputs["more"], outputs["target"])
    return {"total": total, "shown": total.detach()}


class Repeated(nn.Module):
    """Computes the same twice, which a compiler does once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).tanh(), self.layer(x).tanh()


@pytest.mark.parametrize("event", INSIDE[:2])
def test_outputs_that_are_the_same_have_each_their_gradient(event: Event) -> None:
    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs[0], targets) + (outputs[1] * outputs[0].detach()).sum()

    settings: dict[str, Any] = {"model": Repeated, "loss": loss, "watch": {event, *BATCHES}}
    assert_close(fit(compile=True, **settings), fit(**settings))


def test_outputs_of_a_piece_lie_side_by_side() -> None:
    for event, state in stream(Pair, loss=distilled, compile=True, watch={Event.AFTER_FORWARD}, max_duration="1ba"):
        assert event is Event.AFTER_FORWARD
        tensors = [*state.outputs.values(), *state.params.values()]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


@pl.algorithm(Event.AFTER_LOSS)
def only_a_penalty(state: pl.State) -> pl.State:
    weights = sum(parameter.square().sum() for parameter in state.params.values())
    return state.replace(loss=0.1 * weights)


def test_outputs_that_were_kept_are_differentiated_with_the_numbers_of_their_step() -> None:
    """Their graph is left where another loss takes the place of the one that led to it."""
    watch = {Event.BEFORE_LOSS, Event.BEFORE_BACKWARD}
    settings: dict[str, Any] = {"model": plain, "algorithms": [colder, only_a_penalty], "watch": watch}
    slopes = []
    for compiled in (True, False):
        kept = [state for _, state in stream(compile=compiled, **settings) if state.event is Event.BEFORE_LOSS]
        slopes.append([torch.autograd.grad(s.outputs.square().sum(), list(s.params.values())) for s in kept])
    for found, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("event", INSIDE)
def test_outputs_that_share_their_memory_have_each_their_gradient(event: Event) -> None:
    settings: dict[str, Any] = {"model": Pair, "loss": distilled, "watch": {event, *BATCHES}}
    assert_close(fit(compile=True, **settings), fit(**settings))


@pl.algorithm(Event.AFTER_LOSS)
def through_a_tree(state: pl.State) -> pl.State:
    """Reads and replaces the optimizer's memory in the way that is recommended."""

    def halve(leaf: Any) -> Any:
        return leaf / 2 if isinstance(leaf, Tensor) else leaf  # and not a count

    halved = optree.tree_map(halve, state.opt_state, namespace="pure_loop")
    found = optree.tree_leaves(halved, namespace="pure_loop")
    size = sum(leaf.sum() for leaf in found if isinstance(leaf, Tensor))
    return state.replace(opt_state=halved, loss=state.loss * (1 + 0.01 * size))


@pl.algorithm(Event.AFTER_LOSS)
def other_gradients(state: pl.State) -> pl.State:
    """Of the microbatches before, if there were any."""
    if not isinstance(state._grads, FrozenDict):
        return state
    return state.replace(grads={name: gradient + 1 for name, gradient in state.grads.items()})


@pl.algorithm(Event.AFTER_FORWARD)
def another_batch(state: pl.State) -> pl.State:
    return state.replace(batch=(state.batch[0] * 2, state.batch[1]))


@pytest.mark.slow
@pytest.mark.parametrize("event", tiers([*INSIDE, Event.AFTER_BACKWARD], [Event.AFTER_FORWARD]))
@pytest.mark.parametrize("algorithm", [through_a_tree, other_gradients, another_batch], ids=lambda each: each.name)
def test_whatever_an_algorithm_replaces_inside_a_piece_is_replaced(algorithm: Any, event: Event) -> None:
    settings: dict[str, Any] = {"algorithms": [algorithm], "watch": {event, *BATCHES}, "microbatch_size": 4}
    assert_close(fit(compile=True, model=plain, **settings), fit(model=plain, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["twice", "rolled", "tangents"])
def test_a_wrong_backward_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = connected._Function.backward

    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        if wrong == "tangents":
            return real(ctx, *[None if each is None else torch.ones_like(each) for each in tangents])
        found = list(real(ctx, *tangents))
        if wrong == "twice":
            return tuple(None if each is None else 2 * each for each in found)
        return tuple(None if each is None else each.flip(0) for each in found)

    monkeypatch.setattr(connected._Function, "backward", staticmethod(backward))
    settings: dict[str, Any] = {"model": mlp, "watch": {Event.AFTER_FORWARD, *BATCHES}, "max_duration": "2ba"}
    with pytest.raises(AssertionError):
        assert_close(fit(compile=True, **settings), fit(**settings))


@pytest.mark.parametrize("optimizer", [pl.optim.adamw(lr=1e-2), pl.optim.sgd(lr=0.1)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_batch_of_no_weight_is_skipped(bad: int, optimizer: pl.Optimizer) -> None:
    """Its gradients are None where the backward is eager, and the optimizer counts what it leaves out."""
    data = [(x, torch.full_like(y, -100) if i == bad else y) for i, (x, y) in enumerate(batches((8, 8, 8), 1))]
    settings: dict[str, Any] = {"model": plain, "data": data, "microbatch_size": 4, "nonfinite": "skip"}
    settings |= {"optimizer": optimizer, "watch": {Event.AFTER_LOSS, Event.BATCH_END}}
    assert_close(fit(compile=True, **settings), fit(**settings))
