"""Law 9 for ``compile=``: the States at the events that are yielded are those of eager steps.

These run the graphs operation by operation, which is quick and shows what is in them; test_inductor goes through the
compiler itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event, FrozenDict
from pure_loop.compile import connected, interpreted
from tests.support import problem
from tests.support.compiling import (
    ALGORITHMS,
    BATCHES,
    FIVE,
    INSIDE,
    PROBLEMS,
    SHORT,
    WITH_NAN,
    assert_close,
    fit,
    mlp,
    same,
    several,
    stream,
)
from tests.support.problem import cross_entropy, points
from tests.support.streams import assert_same
from tests.support.tiers import examples, tiers

pytestmark = pytest.mark.usefixtures("interpreted")

WATCHED = [
    *({event, *BATCHES} for event in INSIDE),
    *({event, *BATCHES} for event in (Event.BATCH_START, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH)),
    *(BATCHES, {Event.EPOCH_END, Event.EVAL_END}, None),
]


def doubled(tree: Any) -> Any:
    """The same batches in float64."""
    leaf = lambda tensor: tensor.double() if tensor.is_floating_point() else tensor  # noqa: E731
    return optree.tree_map(leaf, tree)


def hold(name: str, algorithms: str, watch: Any, microbatch_size: int | None, max_duration: str, **more: Any) -> None:
    """In float64, where rounding can't be mistaken for anything else."""
    chosen = {"data": points(2, (8, 5), 1)} | PROBLEMS[name]
    settings = chosen | {
        "model": lambda: chosen["model"]().double(),
        "data": doubled(chosen["data"]),
        "optimizer": pl.optim.adamw(lr=1e-3, eps=1e-2, weight_decay=0.5),
        "algorithms": ALGORITHMS[algorithms],
        "watch": watch,
        "microbatch_size": microbatch_size,
        "max_duration": max_duration,
    }
    # One after the other: a State that is donated is gone with the next one.
    compiled, eager = stream(**settings, **{"compile": True} | more), stream(**settings, donate=False)
    for one, other in zip(compiled, eager, strict=True):
        assert_close([one], [other], 1e-9)


# For each model, in their order, an algorithm.
CHOSEN = [
    *("several", "colder, remembered", "other gradients", "none", "of anything", "of anything", "SAM", "by the time"),
    *("none", "of anything", "none", "of anything", "through a tree", "several", "a penalty"),
]
PAIRS = [*zip(PROBLEMS, CHOSEN, strict=True), ("plain", "another batch")]
FAST = [pair for pair in PAIRS if pair[0] not in ("images", "words", "two recurrent layers")]


@pytest.mark.parametrize(("name", "algorithms"), tiers(PAIRS, FAST))
def test_each_model_and_each_algorithm_train_as_in_eager_steps(name: str, algorithms: str) -> None:
    """With another event observed for each model."""
    number = list(PROBLEMS).index(name)
    hold(name, algorithms, WATCHED[number % len(WATCHED)], (None, 3)[number % 2], "3ba")


@pytest.mark.slow
@examples(12, 1000)
@given(
    name=st.sampled_from(sorted(PROBLEMS)),
    algorithms=st.sampled_from(sorted(ALGORITHMS)),
    watch=st.one_of(st.sampled_from(WATCHED), st.sets(st.sampled_from([*INSIDE, *BATCHES]), min_size=1)),
    microbatch_size=st.sampled_from([None, 3]),
    donate=st.sampled_from([False, "auto", True]),
    steps_per_call=st.sampled_from([1, 3]),
    compile=st.sampled_from([True, "where possible"]),
)
def test_the_same_states_whatever_is_observed(name: str, algorithms: str, **drawn: Any) -> None:
    """The product of all, of which the test above is a part: seconds an example."""
    if {"loss", "data"} & PROBLEMS[name].keys():
        algorithms = algorithms if algorithms == "none" else "of anything"
    if "recurrent" in name and algorithms == "SAM":  # whose second gradient would be part of the update
        algorithms = "several"
    hold(name, algorithms, max_duration="4ba", **drawn)


def signs(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
    size = 0.01 * (1 - timestamp.elapsed)
    return FrozenDict({name: p - size * grads[name].sign() for name, p in params.items()}), opt_state


@pl.algorithm(Event.AFTER_LOSS)
def by_the_last_evaluation(state: pl.State) -> pl.State:
    measured = state.metrics.get("eval")
    return state if measured is None else state.replace(loss=state.loss * (1 + measured["loss"]))


def whole() -> nn.Module:
    module = nn.Linear(4, 1).double()
    for parameter in module.parameters():
        nn.init.constant_(parameter, 2.0)
    return module


WHOLE = [(x.double().round(), x.double().round().sum(dim=1, keepdim=True)) for x, _ in FIVE[:2]]
NO_WEIGHT = [(x, torch.full_like(y, -100) if i == 1 else y) for i, (x, y) in enumerate(FIVE[:3])]
EVALUATED: dict[str, Any] = {"evaluators": points(2, (8, 5), 2), "eval_interval": "2ba"}
LOSS = {INSIDE[2], *BATCHES}
OPTIMIZERS = {
    "dampening": pl.optim.sgd(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": pl.optim.sgd(lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "amsgrad": pl.optim.adam(lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=True),
    "two parts": pl.optim.partition(
        {"first": pl.optim.adamw(lr=1e-2), "rest": pl.optim.sgd(lr=0.1)},
        lambda name, tensor: "first" if name.startswith("0") else "rest",
    ),
    "of one's own": pl.optim.Optimizer(name="signs", init=lambda _: FrozenDict(), update=signs, lr=lambda _: 0.01),
}
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "whole numbers are exact": (
        {"model": whole, "data": WHOLE, "loss": mse_loss, "optimizer": pl.optim.sgd(lr=0.125), "microbatch_size": 4},
        0.0,
    ),
    "bfloat16": ({"model": problem.mlp, "precision": "amp_bf16"}, 2e-2),
    "float16 in pieces": ({"model": problem.mlp, "precision": "amp_fp16", "watch": LOSS}, 2e-2),
    "evaluations": ({**SHORT, **EVALUATED, "watch": {Event.EVAL_END}, "algorithms": [by_the_last_evaluation]}, 2e-6),
    "a step that is left out": ({"nonfinite": "skip", "data": WITH_NAN}, 2e-6),
    # Its gradients are None where the backward is eager, and the optimizer counts what it leaves out.
    "a batch of no weight": (
        {"model": problem.mlp, "data": NO_WEIGHT, "microbatch_size": 4, "nonfinite": "skip", "watch": LOSS},
        2e-6,
    ),
    "clipping": ({**SHORT, "clip_grad": 0.5}, 2e-6),
    **{name: ({**SHORT, "optimizer": own, "max_duration": "2ba"}, 2e-6) for name, own in OPTIMIZERS.items()},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_what_it_is_in_eager_steps(name: str) -> None:
    settings, tolerance = SETTINGS[name]
    same({"watch": BATCHES} | settings, tolerance)


def test_training_resumes_from_a_state_of_a_compiled_run() -> None:
    settings: dict[str, Any] = {"compile": True, "watch": BATCHES, "algorithms": several(), "data": FIVE[:3]}
    pairs = fit(**settings)
    rest = fit(lambda: next(state for _, state in pairs if state.timestamp.batch == 4), **settings)
    for (_, state), (_, wanted) in zip(rest, pairs[4:], strict=True):
        assert_same(state, wanted, "resumed")


def test_evaluation_and_prediction_by_themselves() -> None:
    module, data = mlp(), points(2, (8, 5), 2)

    def both(compile: bool) -> list[Any]:
        evaluated = pl.evaluate(module, data, loss=cross_entropy, compile=compile)
        return [*evaluated, *pl.predict(module, data, compile=compile)]

    assert_close(both(True), both(False))


# What is shown between a forward and its backward.


def test_what_is_shown_has_its_graph_until_its_backward() -> None:
    """As in eager steps: its gradient is that of the step, and a second one is an error."""
    for event, state in stream(compile=True, watch={Event.AFTER_LOSS, Event.AFTER_BACKWARD}, max_duration="2ba"):
        if event is Event.AFTER_LOSS:
            kept, found = state, torch.autograd.grad(state.loss, list(state.params.values()), retain_graph=True)
            assert state.outputs.requires_grad
        else:
            torch.testing.assert_close(found, tuple(state.grads.values()))
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(kept.loss, list(kept.params.values()))


def test_outputs_of_a_piece_lie_side_by_side() -> None:
    settings: dict[str, Any] = PROBLEMS["outputs that share memory"] | {"watch": {INSIDE[0]}, "max_duration": "1ba"}
    for _, state in stream(compile=True, **settings):
        tensors = [*state.outputs.values(), *state.params.values()]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


WRONG: dict[str, Callable[[Any, Any, Any], Any]] = {
    "rolled": lambda real, ctx, tangents: (each if each is None else each.flip(0) for each in real(ctx, *tangents)),
    "tangents": lambda real, ctx, tangents: real(ctx, *[t if t is None else torch.ones_like(t) for t in tangents]),
}


def test_a_wrong_backward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = connected._Function.backward
    for wrong in WRONG.values():
        backward = lambda ctx, *tangents, wrong=wrong: tuple(wrong(real, ctx, tangents))  # noqa: E731
        monkeypatch.setattr(connected._Function, "backward", staticmethod(backward))
        with pytest.raises(AssertionError):
            same({**SHORT, "watch": {Event.AFTER_FORWARD, *BATCHES}, "max_duration": "1ba"})


# Values that models, losses and algorithms have from elsewhere, or twice: read anew, and not written to.


def trained(watch: set[Event], data: Any = FIVE, **settings: Any) -> list[Any]:
    """The parameters after each batch."""
    pairs = stream(problem.mlp, data, watch=watch | BATCHES, max_duration="5ba", **settings)
    return [dict(state.params) for event, state in pairs if event is Event.BATCH_END]


def with_a_teacher(watch: set[Event], **settings: Any) -> Any:
    """Weights and a teacher change in place, between the steps; the teacher's parameters require gradients."""
    weights, teacher = torch.ones(3), problem.mlp(5)

    @pl.algorithm(Event.AFTER_FORWARD)
    def distilled(state: pl.State) -> pl.State:
        with torch.no_grad():
            target = teacher(state.batch[0])
        return state.replace(outputs=state.outputs + 0.5 * target)

    def changed(event: Event, state: pl.State) -> None:
        if event is Event.BATCH_END:
            weights[0] += state.timestamp.batch
            teacher.load_state_dict(state.params)

    settings |= {"loss": lambda outputs, targets: cross_entropy(outputs, targets, weight=weights)}
    return trained(watch, algorithms=[distilled], callbacks=[changed], **settings)


@attrs.define(unsafe_hash=True)
class Factor:
    """A number, hashed and compared by its value, that is written to."""

    value: float


WRITTEN = [1.0, 2.0, 2.0, 1.0, 3.0]


def with_factors(watch: set[Event], **settings: Any) -> Any:
    """Each batch has the same object, whose value is written to."""
    factor = Factor(0.0)

    class Loader:
        def __iter__(self) -> Any:
            for (x, y), factor.value in zip(FIVE, WRITTEN, strict=True):
                yield x, y, factor

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch[1]) * batch[2].value

    task = pl.Task(forward=lambda model, batch: model(batch[0]), loss=loss)
    return trained(watch, Loader(), loss=task, **settings)


READ: dict[Callable[..., Any], list[set[Event]]] = {
    with_a_teacher: [set(), {INSIDE[1]}, {Event.AFTER_BACKWARD}],
    with_factors: [set()],
}


def test_what_has_changed_in_place_is_read_anew() -> None:
    for run, watched in READ.items():
        for inside in watched:
            with interpreted():
                found = run(inside, compile=True)
            torch.testing.assert_close(found, run(inside))


@pytest.mark.slow
def test_a_compiler_reads_what_has_changed_in_place_anew() -> None:
    """It makes constants of what the interpreter reads anew anyway."""
    torch.testing.assert_close(with_a_teacher(set(), compile=True), with_a_teacher(set()))


@pytest.mark.usefixtures("interpreted")
def test_what_the_step_makes_of_numbers_may_be_written_to() -> None:
    made = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        made.append(torch.tensor([1.0, 2.0, 3.0]))
        made[-1][0] = 2.0
        return cross_entropy(outputs, targets, weight=made[-1])

    same({**SHORT, "loss": loss})
    assert len(made) == 1 + 10
