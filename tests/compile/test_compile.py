"""Law 9 for ``compile=``: the States at the events that are yielded are those of eager steps.

These run the graphs operation by operation, which is quick and shows what is in them; test_inductor goes through the
compiler itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event, FrozenDict
from pure_loop.compile import connected
from pure_loop.stages.ownership import Ownership
from tests.support import problem
from tests.support.compiling import (
    ALGORITHMS,
    BATCHES,
    FIVE,
    INSIDE,
    OF_ANYTHING,
    PROBLEMS,
    SHORT,
    WITH_NAN,
    assert_close,
    doubled,
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


def hold(
    name: str, algorithms: str, watch: Any, microbatch_size: int | None, max_duration: str = "2ba", **of_compiled: Any
) -> None:
    """In float64, where rounding can't be mistaken for anything else."""
    chosen = {"data": points(2, (8, 5), 1), "evaluators": None} | PROBLEMS[name]
    if {"loss", "data"} & PROBLEMS[name].keys() and algorithms not in OF_ANYTHING:
        algorithms = "of anything"
    if "recurrent" in name and algorithms == "SAM":  # whose second gradient would be part of the update
        algorithms = "several"
    settings = chosen | {
        "model": lambda: doubled(chosen["model"]()),
        "data": doubled(chosen["data"]),
        "optimizer": pl.optim.adamw(lr=1e-3, eps=1e-2, weight_decay=0.5),
        "algorithms": ALGORITHMS[algorithms],
        "watch": watch,
        "microbatch_size": microbatch_size,
        "max_duration": max_duration,
    }
    # One after the other: a State that is donated is gone with the next one.
    compiled, eager = stream(**settings, **{"compile": True} | of_compiled), stream(**settings, donate=False)
    for one, other in zip(compiled, eager, strict=True):
        assert_close([one], [other], 1e-9)


# Those that differ in their outputs, and not in what they compute alone.
FAST = (
    *("BatchNorm and dropout", "tied and frozen", "mappings, and a loss of its own", "attention"),
    *("one with a gradient now and then", "a head that the loss doesn't use", "outputs of all kinds"),
    *("outputs that share memory", "what the forward left", "a recurrent layer"),
)


@pytest.mark.parametrize("name", tiers(PROBLEMS, FAST))
def test_each_model_is_trained_as_in_eager_steps(name: str) -> None:
    """With another event observed, and other algorithms, for each."""
    number = list(PROBLEMS).index(name)
    hold(name, list(ALGORITHMS)[number % len(ALGORITHMS)], WATCHED[number % len(WATCHED)], (None, 3)[number % 2])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_is_what_it_is_in_eager_steps(name: str) -> None:
    number = list(ALGORITHMS).index(name)
    hold("plain", name, WATCHED[-number - 1], (None, 3)[number % 2], "4ba")


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
def test_the_same_states_whatever_is_observed(**drawn: Any) -> None:
    """The product of all, of which the tests above are a part: seconds an example."""
    hold(**drawn, max_duration="4ba")


def signs(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
    size = 0.01 * (1 - timestamp.elapsed)
    return FrozenDict({name: p - size * grads[name].sign() for name, p in params.items()}), opt_state


OPTIMIZERS = [
    pl.optim.sgd(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    pl.optim.sgd(lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    pl.optim.adam(lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=True),
    pl.optim.partition(
        {"first": pl.optim.adamw(lr=1e-2), "rest": pl.optim.sgd(lr=0.1)},
        lambda name, tensor: "first" if name.startswith("0") else "rest",
    ),
    pl.optim.Optimizer(name="signs", init=lambda params: FrozenDict(), update=signs, lr=lambda timestamp: 0.01),
]


def test_each_optimizer_is_what_it_is_in_eager_steps() -> None:
    for optimizer in OPTIMIZERS:
        same({**SHORT, "optimizer": optimizer, "max_duration": "2ba", "watch": BATCHES})


@pl.algorithm(Event.AFTER_LOSS)
def by_the_last_evaluation(state: pl.State) -> pl.State:
    measured = state.metrics.get("eval")
    return state if measured is None else state.replace(loss=state.loss * (1 + measured["loss"]))


def whole() -> nn.Module:
    module = nn.Linear(4, 1).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(2.0)
    return module


WHOLE = [(x.double().round(), x.double().round().sum(dim=1, keepdim=True)) for x, _ in FIVE[:2]]
NO_WEIGHT = [(x, torch.full_like(y, -100) if i == 1 else y) for i, (x, y) in enumerate(FIVE[:3])]
EVALUATED: dict[str, Any] = {"evaluators": points(2, (8, 5), 2), "eval_interval": "2ba"}
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "whole numbers are exact": (
        {"model": whole, "data": WHOLE, "loss": mse_loss, "optimizer": pl.optim.sgd(lr=0.125), "microbatch_size": 4},
        0.0,
    ),
    "bfloat16": ({"model": problem.mlp, "precision": "amp_bf16"}, 2e-2),
    "float16 in pieces": ({"model": problem.mlp, "precision": "amp_fp16", "watch": {INSIDE[2], *BATCHES}}, 2e-2),
    "evaluations": ({**EVALUATED, "watch": {Event.EVAL_END}}, 2e-6),
    "results of evaluations": ({**SHORT, **EVALUATED, "algorithms": [by_the_last_evaluation]}, 2e-6),
    "a step that is left out": ({"nonfinite": "skip", "data": WITH_NAN}, 2e-6),
    # Its gradients are None where the backward is eager, and the optimizer counts what it leaves out.
    "a batch of no weight": (
        {
            "model": problem.mlp,
            "data": NO_WEIGHT,
            "microbatch_size": 4,
            "nonfinite": "skip",
            "watch": {INSIDE[2], *BATCHES},
        },
        2e-6,
    ),
    "clipping": ({"algorithms": several(), "clip_grad": 0.5}, 2e-6),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_what_it_is_in_eager_steps(name: str) -> None:
    settings, tolerance = SETTINGS[name]
    same({"watch": BATCHES} | settings, tolerance)


def test_memory_that_nobody_keeps_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ownership, "writable_or_copies", lambda self, tensors, are_private: tensors)
    same({"algorithms": several(), "clip_grad": 0.5, "watch": {Event.FIT_END}})


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


@pytest.mark.parametrize("watch", [BATCHES, {INSIDE[2], *BATCHES}], ids=["whole", "in pieces"])
def test_an_autocast_around_the_loop_is_no_matter(watch: Any) -> None:
    settings: dict[str, Any] = {"model": problem.mlp, "watch": watch, "max_duration": "2ba"}
    wanted = fit(**settings)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(fit(compile=True, **settings), wanted)


# What is shown between a forward and its backward.


def test_what_is_shown_has_its_graph() -> None:
    """As in eager steps: its gradient is that of the step, and through outputs it is the same."""
    for event, state in stream(compile=True, watch={Event.AFTER_LOSS, Event.AFTER_BACKWARD}, max_duration="2ba"):
        if event is Event.AFTER_LOSS:
            found = torch.autograd.grad(state.loss, list(state.params.values()), retain_graph=True)
            assert state.outputs.requires_grad
        else:
            torch.testing.assert_close(found, tuple(state.grads.values()))


def test_a_backward_frees_what_its_forward_kept() -> None:
    kept = [state for _, state in stream(problem.mlp, compile=True, watch={Event.AFTER_LOSS}, max_duration="2ba")]
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(kept[0].loss, list(kept[0].params.values()))


def test_outputs_of_a_piece_lie_side_by_side() -> None:
    settings: dict[str, Any] = PROBLEMS["outputs that share memory"] | {"watch": {INSIDE[0]}, "max_duration": "1ba"}
    for _, state in stream(compile=True, **settings):
        tensors = [*state.outputs.values(), *state.params.values()]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


@pl.algorithm(Event.AFTER_LOSS)
def only_a_penalty(state: pl.State) -> pl.State:
    return state.replace(loss=0.1 * sum(parameter.square().sum() for parameter in state.params.values()))


def test_outputs_that_were_kept_are_differentiated_with_the_numbers_of_their_step() -> None:
    """Their graph is left where another loss takes the place of the one that led to it."""
    settings: dict[str, Any] = {"model": problem.mlp, "algorithms": [*ALGORITHMS["colder, remembered"], only_a_penalty]}
    settings["watch"] = {Event.BEFORE_LOSS, Event.BEFORE_BACKWARD}
    slopes = []
    for compiled in (True, False):
        kept = [state for event, state in stream(compile=compiled, **settings) if event is Event.BEFORE_LOSS]
        slopes.append([torch.autograd.grad(s.outputs.square().sum(), list(s.params.values())) for s in kept])
    torch.testing.assert_close(*slopes)


WRONG: dict[str, Callable[[Any, Any, Any], Any]] = {
    "twice": lambda real, ctx, tangents: (each if each is None else 2 * each for each in real(ctx, *tangents)),
    "rolled": lambda real, ctx, tangents: (each if each is None else each.flip(0) for each in real(ctx, *tangents)),
    "tangents": lambda real, ctx, tangents: real(ctx, *[t if t is None else torch.ones_like(t) for t in tangents]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_backward_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = connected._Function.backward
    monkeypatch.setattr(
        connected._Function, "backward", staticmethod(lambda ctx, *tangents: tuple(WRONG[wrong](real, ctx, tangents)))
    )
    with pytest.raises(AssertionError):
        same({"watch": {Event.AFTER_FORWARD, *BATCHES}, "max_duration": "2ba"})
