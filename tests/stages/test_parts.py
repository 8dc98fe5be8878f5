"""Losses of several parts, and a step of a part of a model: both as by hand."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError, LossError, ModelError
from pure_loop.random import seeded
from tests.support.problem import LR, close, fit, mlp, points
from tests.support.refused import Refusal, check, rows

Pair = namedtuple("Pair", "near far")


def on_targets(loss: Any) -> pl.Task:
    return pl.Task(loss=lambda outputs, batch: loss(outputs, batch[1]), loss_total=sum)


def parts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return nn.functional.cross_entropy(outputs, targets), outputs.square().mean()


class WithParts(nn.Sequential):
    """A module with a loss of its own."""

    def forward(self, batch: Any) -> Any:
        return super().forward(batch[0] if isinstance(batch, tuple) else batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return parts(outputs, batch[1])


KINDS: dict[str, Any] = {
    "0, 1": lambda o, t: parts(o, t),
    "0, 1 ": lambda o, t: list(parts(o, t)),
    "near, far": lambda o, t: Pair(*parts(o, t)),
    "a, b": lambda o, t: dict(zip("ab", parts(o, t), strict=True)),
}


def run(*arguments: Any, **settings: Any) -> tuple[Any, pl.State]:
    """The loss of the last batch, and the last State."""
    for event, state in fit(*arguments, max_duration="1ba", **settings):
        if event is pl.Event.BATCH_END:
            loss = state.loss
    return loss, state


@pytest.mark.parametrize("names", KINDS)
def test_parts_of_a_loss_are_added_on_request(names: str) -> None:
    """In training and in evaluation, of microbatches, and compiled."""
    data = points(1, size=6)
    compiled = names == "near, far"
    settings: dict[str, Any] = {"evaluators": data, "compile": compiled, "strict": not compiled}
    _, wanted = run(mlp(), data, loss=lambda o, t: sum(parts(o, t)), **settings)
    for size in (None, 4):
        loss, state = run(mlp(), data, loss=on_targets(KINDS[names]), microbatch_size=size, **settings)
        assert list(loss) == ["total", *names.strip().split(", ")]
        close(state.params, wanted.params)
        close({"loss": state.metrics["eval"]["loss"]}, {"loss": wanted.metrics["eval"]["loss"]})
        torch.testing.assert_close(loss["total"], sum(list(loss.values())[1:]))


def test_parts_of_a_module_s_own_loss_and_any_sum_of_them() -> None:
    model, data = WithParts(*mlp()), points(1, size=6)
    task = pl.Task(forward=lambda module, batch: module(batch), loss_total=lambda parts: parts[0] + 0.5 * parts[1])
    _, weighted = run(model, data, loss=task)
    _, by_hand = run(mlp(), data, loss=lambda o, t: parts(o, t)[0] + 0.5 * parts(o, t)[1])
    close(weighted.params, by_hand.params)
    loss, _ = run(mlp(), data, loss=on_targets(lambda o, t: {"total": o.sum(), "a": o.mean()}))
    assert list(loss) == ["total", "a"]


class Players(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.generator = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
            self.critic = nn.Linear(2, 1)
            self.critics = nn.Linear(2, 1)  # whose name begins as another's


def played(model: Any, player: str, noise: Tensor) -> Tensor:
    sign = 1.0 if player == "critic" else -1.0
    return sign * model.critic(model.generator(noise)).mean() + model.critics(noise).mean()  # type: ignore[no-any-return]


def test_a_step_of_a_part_is_that_of_its_own_optimizer() -> None:
    noise = torch.randn(3, 5, 2)
    model = Players()
    optimizers = {"critic": pl.optim.sgd(lr=LR, momentum=0.9), "generator": pl.optim.adam(lr=LR)}
    by_torch = {
        "critic": torch.optim.SGD(model.critic.parameters(), lr=LR, momentum=0.9),
        "generator": torch.optim.Adam(model.generator[0].parameters(), lr=LR),
    }
    state = pl.State.create(model).replace(frozen={"generator.1.weight", "generator.1.bias"})
    state = state.replace(frozen=state.frozen | {"generator.2.weight", "generator.2.bias"})
    for each in noise:
        for player, optimizer in optimizers.items():
            before = state
            state = pl.stages.update_part(state, player, partial(played, player=player, noise=each), optimizer)
            moved = {name for name in state.params if state.params[name] is not before.params[name]}
            assert moved == {f"{player}.{name}" for name in ("weight", "bias")} or moved == {
                "generator.0.weight",
                "generator.0.bias",
            }
            model.zero_grad()
            loss = played(model, player, each)
            loss.backward()
            by_torch[player].step()
            close({"loss": state.loss}, {"loss": loss.detach()})
        state = state.count_batch(samples=5)
    close(state.params, {name: each.detach() for name, each in model.named_parameters()})
    close(state.buffers, dict(model.named_buffers()))
    assert list(state.opt_state) == ["critic", "generator"]


def part(name: str = "critic", loss: Any = None, **fields: Any) -> pl.State:
    state = pl.State.create(Players()).replace(**fields)
    loss = partial(played, player="critic", noise=torch.zeros(2, 2)) if loss is None else loss
    return pl.stages.update_part(state, name, loss, pl.optim.sgd(lr=LR))


def text(where: str) -> pl.Stream:
    metric = pl.Metric("word", lambda: 0, lambda total, outputs, batch: total, lambda total: {"is": "good"})
    return fit(**{where: pl.Evaluator(points(), metrics=metric) if where == "evaluators" else metric})


SUM, SAYS = "loss=pl.Task(loss=..., loss_total=sum)", "the metric 'word' (Metric('word')) gave 'good' of type str"
X, Y = points(1)[0]
OF_ONE = pl.optim.adam(lr=LR).init(pl.State.create(Players()).params)


@rows(
    [
        Refusal("tuple", lambda: fit(loss=parts), LossError, ("is a tuple of 2", SUM), at_once=False),
        Refusal("dict", lambda: fit(loss=KINDS["a, b"]), LossError, ("keys ['a', 'b']", SUM), at_once=False),
        Refusal("no part", lambda: part("critc"), ArgumentError, ("'critc'", "critic, critics, generator")),
        Refusal("one optimizer", lambda: part(opt_state=torch.ones(())), ArgumentError, ("opt_state is a Tensor",)),
        Refusal("its state", lambda: part(opt_state=OF_ONE), ArgumentError, ("['step', 'skipped'", "opt_state=None")),
        Refusal("swapped", lambda: part(loss=pl.optim.sgd(lr=1.0)), ArgumentTypeError, ("loss is of type Optimizer",)),
        Refusal("no loss", lambda: part(loss=lambda model: 1.0), LossError, ("tensor of shape ()",)),
        Refusal("text", lambda: text("evaluators"), ArgumentTypeError, (SAYS, "evaluator 'eval'"), at_once=False),
        Refusal("text in training", lambda: text("train_metrics"), ArgumentTypeError, (SAYS,), at_once=False),
        Refusal("tensors", lambda: fit(data=(X, Y)), DataError, ("TensorDataset(inputs",), at_once=False),
        Refusal("nothing", lambda: pl.evaluate(nn.Identity(), [X]), ModelError, ("To evaluate", "register_parameter")),
    ]
)
def test_refused(refusal: Refusal) -> None:
    check(refusal)


def test_parameters_of_an_earlier_batch_may_be_constants_while_its_graph_is_kept() -> None:
    anchor: dict[str, Tensor] = {}

    @pl.algorithm(pl.Event.AFTER_LOSS)
    def proximal(state: pl.State) -> pl.State:
        if not anchor:
            anchor.update(state.params)
        distance = sum(((state.params[name] - old) ** 2).sum() for name, old in anchor.items())
        return state.replace(loss=state.loss + 0.01 * distance)

    kept = [state for _, state in fit(mlp(), points(4), algorithms=[proximal], max_duration="4ba")]
    assert kept[-1].timestamp.batch == 4


class OfTokens(nn.Sequential):
    """The mean over a sequence."""

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = super().forward(tokens).mean(0)
        return result


def test_what_looks_like_a_sample_may_be_a_batch() -> None:
    """One sequence of tokens, points with one target of a loss of one's own, and a sample in torch.func.vmap."""
    once = {"max_duration": "1ep"}
    tokens = OfTokens(nn.Embedding(10, 3)), [(torch.arange(5), torch.tensor(1))]
    scalar = OfTokens(nn.Unflatten(0, (1, 4)), nn.Linear(4, 1)), [(torch.ones(4), torch.tensor(0.0))]
    norms: list[Tensor] = []

    @pl.algorithm(pl.Event.BATCH_START)
    def measure(state: pl.State, stages: Any) -> pl.State:
        def loss(params: Any, x: Tensor, y: Tensor) -> Any:
            return stages.task.loss(torch.func.functional_call(model, params, (x,)), (x, y))

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        norms.append(each(dict(state.params), *state.batch)["0.weight"].flatten(1).norm(dim=1))
        return state

    model = mlp()
    runs = [fit(*tokens, **once), fit(*scalar, loss=lambda o, t: (o - t).square().mean(), **once)]
    assert [pl.run(stream).timestamp.batch for stream in [*runs, fit(model, algorithms=[measure], **once)]] == [1, 1, 3]
    assert [len(norm) for norm in norms] == [4, 4, 4]
