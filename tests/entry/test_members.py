"""What an ensemble can't be, have or do: each is refused with what was passed and what to write."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import (
    AlgorithmReturnError,
    AlgorithmStructureError,
    ArgumentError,
    ArgumentTypeError,
    CompileError,
    DataError,
    ResumeError,
)
from tests.support import problem, refused
from tests.support.problem import points
from tests.support.refused import Refusal

A, T = ArgumentError, ArgumentTypeError


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def fit(model: Any = None, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "loss": problem.cross_entropy,
        "optimizer": pl.optim.sgd(lr=0.1),
        "max_duration": "2ba",
    }
    model = pl.ensemble(mlp, seeds=[0, 1]) if model is None else model
    return pl.fit(model, points(2), **settings | changes)


def trained(**changes: Any) -> pl.State:
    return pl.run(fit(**changes))


def of_seed(make: Callable[[int], nn.Module]) -> Callable[[], Any]:
    return lambda: fit(pl.ensemble(make, seeds=[1, 2]))


class Other(nn.Linear):
    """Of another class."""


class Counting(nn.Module):
    """What it computes depends on an attribute that its repr does not show."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 3), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.count  # type: ignore[no-any-return]


OPENED = itertools.count()


class Uneven:
    """Every other time it is gone through it has another length, or batches of another size."""

    def __init__(self, lengths: tuple[int, int] = (2, 2), sizes: tuple[int, int] = (4, 4)) -> None:
        self.lengths, self.sizes = lengths, sizes

    def __iter__(self) -> Iterator[Any]:
        odd = next(OPENED) % 2
        yield from [(x[: self.sizes[odd]], y[: self.sizes[odd]]) for x, y in points(self.lengths[odd])]


def own_data(data: Any) -> Any:
    models = pl.ensemble(mlp, seeds=[0, 1], data="own")
    return pl.fit(models, data, loss=problem.cross_entropy, optimizer=SGD, max_duration="1ep")


SHARED = mlp()
SGD = pl.optim.sgd(lr=0.1)


def handler(call: Callable[[pl.State], Any], *memory: Any, **settings: Any) -> pl.Algorithm:
    if memory:
        settings["init"] = lambda state: memory[0]
    return pl.Algorithm("own", {Event.FIT_END: call}, **settings)


def scaled(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * pl.each([0.5])(state.timestamp))  # type: ignore[operator]


@pl.algorithm(Event.AFTER_LOSS)
def reading(state: pl.State) -> pl.State:
    assert isinstance(state.loss, torch.Tensor)
    return state.replace(loss=state.loss * 2) if state.loss.item() > 0 else state


@pl.algorithm(Event.BATCH_END, across_members=True)
def comparing(state: pl.State) -> pl.State:
    return state


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2 if x.sum().item() > 0 else 1)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


MEMBERS = [
    Refusal("another width", of_seed(lambda seed: nn.Sequential(nn.Linear(4, 3 + seed))), A, ("member 1", "structure")),
    Refusal(
        "another dropout", of_seed(lambda seed: nn.Sequential(nn.Linear(4, 3), nn.Dropout(seed / 10))), A, ("member 1",)
    ),
    Refusal("another class", of_seed(lambda seed: (nn.Linear, Other)[seed - 1](4, 3)), A, ("member 1", "class")),
    Refusal("another attribute", of_seed(Counting), A, ("member 1", "count")),
    Refusal(
        "one module for two",
        lambda: fit(pl.ensemble(lambda: SHARED, seeds=[0, 1])),
        A,
        ("one module for two members", "lambda: "),
    ),
    Refusal("none is returned", of_seed(lambda seed: None), T, ("NoneType", "returns the module")),  # type: ignore[arg-type,return-value]
    Refusal("a module", lambda: pl.ensemble(nn.Linear(2, 1), seeds=[0]), T, ("the module Linear", "a function")),
    Refusal("two arguments", lambda: pl.ensemble(lambda a, b: a, seeds=[0]), T, ("other arguments", "<lambda>")),
    Refusal("no seeds", lambda: pl.ensemble(mlp, seeds=[]), A, ("no seeds", "range(8)")),
    Refusal("a number of seeds", lambda: pl.ensemble(mlp, seeds=3), T, ("seeds=3", "range(8)")),  # type: ignore[arg-type]
    Refusal("a text in seeds", lambda: pl.ensemble(mlp, seeds=[0, "1"]), T, ("seeds", "'1'")),  # type: ignore[list-item]
    Refusal("a text as seeds", lambda: pl.ensemble(mlp, seeds="01"), T, ("seeds='01'",)),  # type: ignore[arg-type]
    Refusal("a seed of more bits", lambda: pl.ensemble(mlp, seeds=[2**70]), A, ("64 bits", "2**63")),
    Refusal("other data", lambda: pl.ensemble(mlp, seeds=[0], data="mine"), A, ("'mine'", "shared")),  # type: ignore[arg-type]
    Refusal("another fallback", lambda: pl.ensemble(mlp, seeds=[0], fallback="eager"), A, ("'eager'", "loop")),  # type: ignore[arg-type]
]

EACH = [
    Refusal("rates", lambda: fit(optimizer=pl.optim.sgd(lr=pl.each([0.1] * 3))), A, ("sgd", "length 3", "2 members")),
    Refusal(
        "momentum", lambda: fit(optimizer=pl.optim.sgd(lr=0.1, momentum=pl.each([0.1]))), A, ("length 1", "2 members")
    ),
    Refusal(
        "betas",
        lambda: fit(optimizer=pl.optim.adam(betas=(pl.each([0.9] * 3), 0.99))),
        A,
        ("adam", "length 3", "2 members"),
    ),
    Refusal(
        "in a schedule",
        lambda: fit(optimizer=pl.optim.sgd(lr=pl.schedules.product([pl.each([0.1] * 3), pl.schedules.constant(1.0)]))),
        A,
        ("length 3", "2 members"),
    ),
    Refusal(
        "of a part",
        lambda: fit(optimizer=pl.optim.partition({"a": pl.optim.sgd(lr=pl.each([0.1] * 3))}, lambda name, p: "a")),
        A,
        ("length 3", "2 members"),
    ),
    Refusal(
        "an algorithm",
        lambda: fit(algorithms=[pl.algorithms.gradient_clipping("norm", pl.each([0.1] * 3))]),
        A,
        ("gradient_clipping", "threshold", "length 3", "2 members"),
    ),
    Refusal("seeds", lambda: fit(seed=pl.each([1, 2, 3])), A, ("seed", "length 3", "2 members")),
    Refusal("one model, rates", lambda: fit(mlp(), optimizer=pl.optim.sgd(lr=pl.each([0.1, 0.2]))), A, ("one model",)),
    Refusal(
        "one model, an algorithm",
        lambda: fit(mlp(), algorithms=[pl.algorithms.gradient_clipping("norm", pl.each([0.1, 0.2]))]),
        A,
        ("gradient_clipping", "one model"),
    ),
    Refusal("one model, seeds", lambda: fit(mlp(), seed=pl.each([1, 2])), A, ("seed=", "one model")),
    Refusal("a mapping", lambda: pl.each({0: 0.1}), T, ("{0: 0.1}", "one value a member")),  # type: ignore[arg-type]
    Refusal("seeds for a State", lambda: fit(trained(), seed=pl.each([1, 2])), A, ("seed=", "state.replace(seed=")),
    Refusal("nothing", lambda: pl.each([]), A, ("pl.each([])",)),
    Refusal("a number", lambda: pl.each(0.1), T, ("0.1", "one value a member")),  # type: ignore[arg-type]
    Refusal("a text", lambda: pl.each("01"), T, ("'01'",)),  # type: ignore[arg-type]
    Refusal("a text among numbers", lambda: pl.each([0.1, "a"]), T, ("value 1", "'a'")),  # type: ignore[list-item]
    Refusal("a matrix", lambda: pl.each(torch.ones(2, 2)), A, ("(2, 2)", "(members,)")),
]

SETTINGS = [
    Refusal(
        "an optimizer of torch's",
        lambda: fit(optimizer=pl.optim.from_torch(torch.optim.Adagrad)),
        A,
        ("Adagrad", "loop"),
    ),
    Refusal(
        "one in a part",
        lambda: fit(optimizer=pl.optim.partition({"a": pl.optim.from_torch(torch.optim.Adagrad)}, lambda name, p: "a")),
        A,
        ("Adagrad", "loop"),
    ),
    Refusal("a size to find", lambda: fit(microbatch_size="auto"), A, ('microbatch_size="auto"', "write a number")),
    Refusal("verification", lambda: fit(verify="1ba"), A, ("verify=", "Leave it out")),
    Refusal("float8", lambda: fit(precision="amp_fp8"), A, ("amp_fp8", "amp_bf16")),
    Refusal("an iterator for each", lambda: own_data(iter(points(2))), A, ("iterator", "shared")),
    Refusal("one model to compare", lambda: fit(mlp(), algorithms=[comparing]), A, ("comparing", "one model")),
]

MAPPED = [
    Refusal("a forward", lambda: fit(pl.ensemble(Reads, seeds=[0, 1])), CompileError, ("Reads", "loop"), at_once=False),
    Refusal(
        "a recurrent layer",
        lambda: fit(pl.ensemble(Recurrent, seeds=[0])),
        CompileError,
        ("lstm", "can't be mapped over members", "was mapped", "loop"),
        at_once=False,
    ),
    Refusal(
        "a loss",
        lambda: fit(loss=lambda out, y: problem.cross_entropy(out, y) * (1 if out.sum().item() else 2)),
        CompileError,
        ("the loss", "item", "loop"),
        at_once=False,
    ),
    Refusal(
        "tensors of two dtypes",
        lambda: fit(loss=lambda outputs, targets: (outputs.double() @ torch.ones(3, 1)).sum()),
        CompileError,
        ("float64", "whether the code itself is wrong", "loop"),
        at_once=False,
    ),
    Refusal(
        "too few values in an algorithm of one's own",
        lambda: fit(algorithms=[pl.Algorithm("own", {Event.AFTER_LOSS: scaled})]),
        A,
        ("pl.each([0.5])", "member 1"),
        at_once=False,
    ),
    Refusal(
        "no State returned, outside of the graph",
        lambda: fit(algorithms=[handler(lambda state: None)]),
        AlgorithmReturnError,
        ("'own'", "FIT_END", "None"),
        at_once=False,
    ),
    Refusal(
        "another seed, outside of the graph",
        lambda: fit(algorithms=[handler(lambda state: state.replace(seed=3))]),
        AlgorithmStructureError,
        ("'own'", "seed"),
        at_once=False,
    ),
    Refusal(
        "a number's tensor across members",
        lambda: fit(algorithms=[handler(lambda state: state, torch.tensor(0.0), across_members=True)]),
        AlgorithmStructureError,
        ("'own'", "shape ()", "here 2"),
        at_once=False,
    ),
    Refusal(
        "a tensor of others across members",
        lambda: fit(
            algorithms=[handler(lambda state: state.remember("own", torch.ones(6, 4)), 0, across_members=True)]
        ),
        AlgorithmStructureError,
        ("'own'", "FIT_END", "(6, 4)", "here 2"),
        at_once=False,
    ),
    Refusal(
        "data of other lengths",
        lambda: own_data(Uneven(lengths=(2, 3))),
        DataError,
        ('data="own"', "member 0", "member 1"),
        at_once=False,
    ),
    Refusal(
        "batches of other sizes", lambda: own_data(Uneven(sizes=(4, 3))), A, ("member 1", 'data="own"'), at_once=False
    ),
    Refusal("an algorithm", lambda: fit(algorithms=[reading]), CompileError, ("reading", "loop"), at_once=False),
]

STATES = [
    Refusal("no such member", lambda: trained().member(99), A, ("member(99)", "2 members", "from 0 to 1")),
    Refusal("a text for a member", lambda: trained().member("a"), T, ("'a'", "from 0 to 1")),  # type: ignore[arg-type]
    Refusal("a truth for a member", lambda: trained().member(True), T, ("True",)),
    Refusal("a member of one model", lambda: trained(model=mlp()).member(0), A, ("one model", "pl.ensemble")),
    Refusal("members of one model", lambda: trained(model=mlp()).members([0]), (A, TypeError), ()),  # type: ignore[arg-type,operator]
    Refusal("no such members", lambda: trained().members([0, 5]), A, ("5", "2 members")),
    Refusal("no members", lambda: trained().members([]), A, ("members([])",)),
    Refusal("a number for members", lambda: trained().members(1), T, ("members(1)",)),  # type: ignore[arg-type]
    Refusal("to stack nothing", lambda: pl.stack([]), A, ("pl.stack([])",)),
    Refusal("another fallback of a stack", lambda: pl.stack([trained(model=mlp())], fallback="x"), A, ("'x'", "loop")),  # type: ignore[arg-type]
    Refusal("to stack a module", lambda: pl.stack([mlp()]), T, ("item 0", "Sequential")),  # type: ignore[type-var]
    Refusal("to stack an ensemble", lambda: pl.stack([trained()]), A, ("State 0", "2 members", "state.member(i)")),
    Refusal(
        "to stack other batches",
        lambda: pl.stack([trained(model=mlp()), trained(model=mlp(), max_duration="1ba")]),
        A,
        ("member 1", "batch 1", "batch 2"),
    ),
    Refusal(
        "to stack other structures",
        lambda: pl.stack([trained(model=mlp()), trained(model=nn.Linear(4, 3))]),
        A,
        ("member 1", "structure"),
    ),
    Refusal(
        "to stack other optimizers",
        lambda: pl.stack([trained(model=mlp()), trained(model=mlp(), optimizer=pl.optim.adam())]),
        A,
        ("opt_state", "structure"),
    ),
    Refusal(
        "to stack other metrics",
        lambda: pl.stack([trained(model=mlp()), trained(model=mlp(), evaluators={"val": points(1)})]),
        A,
        ("metrics", "val"),
    ),
    Refusal("a seed for what is seeded", lambda: fit(trained(), max_duration="3ba", seed=1), A, ("seed",)),
]


@refused.rows([*MEMBERS, *EACH, *SETTINGS, *MAPPED, *STATES])
def test_mistakes_with_members_are_refused(refusal: Refusal) -> None:
    refused.check(refusal)


def test_an_evaluator_with_a_loss_of_its_own_measures_each_member() -> None:
    """What it measures is judged by the outputs of one member, mapped as in the loop."""
    evaluators = {"own": pl.Evaluator(points(1), loss=lambda outputs, targets: outputs.square().mean())}
    for fallback in (None, "loop"):
        models = pl.ensemble(mlp, seeds=[0, 1], fallback=fallback)
        state = trained(model=models, evaluators=evaluators, eval_interval="1ba")
        assert {name: value.shape for name, value in state.metrics["own"].items()} == {"loss": (2,), "accuracy": (2,)}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (pl.ensemble(mlp, seeds=[0, 1, 2]), ("3, of the seeds 0, 1, 2",)),
        (pl.ensemble(mlp, seeds=[5, 6]), ("2, of the seeds 5, 6",)),
        (pl.ensemble(mlp, seeds=[0, 1], data="own"), ("own data",)),
        (mlp(), ("one model",)),
    ],
    ids=["more", "others", "own data", "one model"],
)
def test_a_checkpoint_of_another_ensemble_is_refused(model: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    pl.save(trained(), tmp_path / "a.safetensors")
    with pytest.raises(ResumeError) as caught:
        pl.run(fit(model, load_path=tmp_path / "a.safetensors", max_duration="3ba"))
    for word in ("2, of the seeds 0, 1; shared data", *words):
        assert word in str(caught.value)


def test_a_checkpoint_is_computed_as_its_call_says(tmp_path: Path) -> None:
    """How members are computed is no part of what they are."""
    pl.save(trained(), tmp_path / "a.safetensors")
    loop = pl.ensemble(mlp, seeds=[0, 1], fallback="loop")
    state = pl.run(fit(loop, load_path=tmp_path / "a.safetensors", max_duration="3ba"))
    assert state.ensemble is not None
    assert (state.timestamp.batch, state.ensemble.fallback) == (3, "loop")


def test_what_compares_members_is_left_out_where_one_is_evaluated() -> None:
    halving = pl.algorithms.successive_halving("val/loss")
    recipe = pl.Recipe(
        points(2),
        loss=problem.cross_entropy,
        optimizer=pl.optim.sgd(lr=0.1),
        evaluators={"val": points(1)},
        max_duration="2ba",
        algorithms=[halving],
    )
    state = recipe.run(pl.ensemble(mlp, seeds=[0, 1]))
    both = pl.run(recipe.evaluate(state)).metrics["val"]["loss"]
    one = pl.run(recipe.evaluate(state.member(1))).metrics["val"]["loss"]
    assert torch.allclose(both[1], one)
    with pytest.raises(ArgumentError, match="'successive_halving' compares members, and there is one model"):
        recipe.fit(state.member(1), max_duration="3ba")


def test_a_handler_that_differs_between_members_is_called_once_a_member() -> None:
    """At an event that may be outside of the graph, what can't be traced is called."""

    def count(state: pl.State) -> pl.State:
        return state.remember("own", state.algorithm_state["own"] + 1) if state.seed > 0 else state

    counting = pl.Algorithm("own", {Event.BATCH_END: count}, init=lambda state: 0)
    state = trained(model=pl.ensemble(mlp, seeds=[0, 1, 2]), algorithms=[counting])
    assert [member.algorithm_state["own"] for member in state.members] == [0, 2, 2]


@pytest.mark.parametrize("fallback", [None, "loop"])
def test_what_a_stopped_member_remembers_is_what_it_has_alone(fallback: Any) -> None:
    """Also where its handlers, which no graph takes, are called once a member."""
    events = ["batch_start", "before_train_batch", "batch_end", "before_dataloader"]

    def counting(event: str) -> pl.Algorithm:
        def count(state: pl.State) -> pl.State:
            counted = state.seed == 1 or state.timestamp.batch % 2
            return state.remember(event, state.algorithm_state[event] + 1) if counted else state

        return pl.Algorithm(event, {event: count}, init=lambda state: 0)

    def stop(state: pl.State) -> pl.State:
        return state.replace(stop=True) if state.seed == 1 and state.timestamp.batch == 2 else state

    algorithms = [*map(counting, events), pl.Algorithm("stop", {"batch_end": stop})]
    settings = {"algorithms": algorithms, "max_duration": "6ba"}
    state = trained(model=pl.ensemble(mlp, seeds=[0, 1], fallback=fallback), **settings)
    alone = [trained(model=mlp(), seed=seed, **settings) for seed in (0, 1)]
    for event in events:
        counts = [[member.algorithm_state[event] for member in states] for states in (state.members, alone)]
        assert counts[0] == counts[1], event


def test_stacked_members_are_computed_by_the_loop_where_asked() -> None:
    adagrad = pl.optim.from_torch(torch.optim.Adagrad)
    states = [trained(model=mlp(), optimizer=adagrad, seed=seed) for seed in (0, 1)]
    with pytest.raises(ArgumentError, match="loop"):
        fit(pl.stack(states), optimizer=adagrad, max_duration="3ba")
    stacked = pl.run(fit(pl.stack(states, fallback="loop"), optimizer=adagrad, max_duration="3ba"))
    alone = pl.run(fit(states[1], optimizer=adagrad, max_duration="3ba"))
    assert torch.equal(stacked.params["0.weight"][1], alone.params["0.weight"])


def test_the_number_of_members_iterates_over_them() -> None:
    state = trained()
    assert [member.seed for member in state.members] == [0, 1]
    assert (state.members, torch.tensor(state.members), np.zeros(state.members).shape) == (2, torch.tensor(2), (2,))
    for copied in (copy.deepcopy(state.members), pickle.loads(pickle.dumps(state.members))):
        assert (copied, type(copied)) == (2, int)
