"""Where only the loop variable holds a State, a graph writes where its numbers are; what was kept never changes.

Law 2 decides: what was kept has the bits of a copy that was made when it was kept.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import count
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event, FrozenDict
from pure_loop.algorithms import ema
from pure_loop.compile.trees import Memory
from pure_loop.stages.references import can_count
from tests.support import problem
from tests.support.compiling import BATCHES, EPOCHS, Kept
from tests.support.streams import assert_same
from tests.support.tiers import examples

pytestmark = [
    pytest.mark.usefixtures("interpreted", "every_gradient_is_large"),
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
]

DATA = problem.points(5, 6)
INSIDE: list[Any] = [{Event.AFTER_TRAIN_BATCH, *BATCHES}, {Event.AFTER_BACKWARD, *BATCHES}, None]
# What these write to besides is no mapping: counts that are fields themselves, and a loss scale.
SCALED: dict[str, Any] = {"nonfinite": "skip", "precision": "amp_fp16"}
ONCE = [True] + [False] * 9  # the first step is given the memory of the model


def norm() -> nn.Module:
    with pl.random.seeded(0):
        return nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def fit(model: Any = None, data: Any = DATA, **options: Any) -> Any:
    settings = {"optimizer": pl.optim.adamw(lr=0.1), "watch": BATCHES, "compile": True, "strict": None}
    return problem.fit(norm() if model is None else model, data, **settings | options)


def go_through(stream: Any) -> None:
    for _event, state in stream:  # noqa: B007 - the loop variable holds the State
        pass


REUSED: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "after backward": ({"watch": INSIDE[1]}, ONCE),
    "all events": ({"watch": INSIDE[2]}, ONCE),
    "counts and scales": ({"watch": INSIDE[0], **SCALED}, ONCE),
    "epochs, whose States may be kept": ({"watch": EPOCHS}, ([True] + [False] * 4) * 2),
    "several steps a call": ({"watch": EPOCHS, "steps_per_call": 3}, [True] * 2),  # those that follow do not ask
    "no donation": ({"donate": False}, []),
}


def test_memory_is_reused_where_it_was_not_kept(copied: list[bool]) -> None:
    for name, (settings, wanted) in REUSED.items():
        copied.clear()
        go_through(fit(problem.mlp(), **settings))
        assert copied == wanted, name
    copied.clear()
    pl.run(fit())
    assert copied == ONCE


def test_memory_is_copied_where_all_states_are_kept_and_trains_as_one_in_place(copied: list[bool]) -> None:
    kept, states = Kept(), []
    for _, state in fit(algorithms=[ema(half_life="2ba")]):
        kept.keep("a State", state)
        states.append(state)
    assert copied == [True] * 10
    kept.check()
    assert_same(pl.run(fit(algorithms=[ema(half_life="2ba")])), states[-1], "in place")


# What is kept.


def gradients(state: pl.State) -> list[Tensor]:
    # What an algorithm reads where there are none yet is an error.
    return list(state._grads.values()) if isinstance(state._grads, dict) else []


def through_a_graph(tensor: Tensor) -> Any:
    """A graph that saves the very tensor."""
    factor = torch.ones_like(tensor).requires_grad_()
    product = (factor * tensor).sum()
    return lambda: torch.autograd.grad(product, [factor], retain_graph=True)


def in_a_capsule(tensor: Tensor) -> Any:
    capsule, first = torch.utils.dlpack.to_dlpack(tensor), [tensor.clone()]
    return lambda: first.pop() if first else torch.utils.dlpack.from_dlpack(capsule)  # which can be read once


def some(state: pl.State, which: int) -> Tensor:
    found = [*state.params.values(), *state.opt_state["exp_avg"].values()]
    return found[which % len(found)]


def of_a_scale(scale: Any) -> Any:
    return lambda: [scale.growth_tracker, scale.scale] if scale else []


# What is kept of a State: a value that holds tensors, or a function that reads what it holds.
KEPT: tuple[Callable[[pl.State, int], Any], ...] = (
    *(lambda state, i: state, lambda state, i: (1, state), lambda state, i: state.params),
    *(lambda state, i: state.opt_state, lambda state, i: state.opt_state["exp_avg"], some),
    lambda state, i: some(state, i).view(-1)[:1],
    lambda state, i: some(state, i).detach(),
    lambda state, i: some(state, i).detach().numpy(),
    lambda state, i: [tensor.t() for tensor in state.params.values() if tensor.ndim == 2],
    lambda state, i: through_a_graph(some(state, i)),
    lambda state, i: in_a_capsule(some(state, i).detach()),
    lambda state, i: list(state.module().parameters()),
    *(lambda state, i: gradients(state), lambda state, i: gradients(state)[i % 4 :][:1]),
    lambda state, i: [each.numpy() for each in gradients(state)],
    *(lambda state, i: state.algorithm_state["ema"], lambda state, i: state.algorithm_state),
    *(lambda state, i: state.buffers, lambda state, i: state.buffers["1.running_mean"][:1]),
    *(lambda state, i: state.skipped, lambda state, i: state.skipped.view(1)),
    *(lambda state, i: of_a_scale(state.loss_scale), lambda state, i: of_a_scale(state.loss_scale)()[i % 2 :][:1]),
)


@pl.algorithm(Event.BATCH_START)
def puts_in(state: pl.State) -> pl.State:
    """Who keeps the old ones may make up for the references that were lost when they were replaced."""
    OLD.extend(state.params.values())
    return state.replace(params={name: tensor.clone() for name, tensor in state.params.items()})


@pl.algorithm(Event.BATCH_END, when="3ba", init=lambda state: torch.zeros(2))
def now_and_then(state: pl.State) -> pl.State:
    """The first graphs only read what it remembers, so that it is still the State's that the user was shown."""
    return state.remember("now_and_then", state.algorithm_state["now_and_then"] + 1)


def reading(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
    """An update that can't be traced, and runs eagerly."""
    assert float(sum(tensor.sum() for tensor in params.values())) < 1e9
    return {name: tensor - 0.1 * grads[name] for name, tensor in params.items()}, memory


OLD: list[Tensor] = []
EAGER = pl.optim.Optimizer(name="mine", init=lambda params: {"exp_avg": {}}, update=reading, lr=lambda timestamp: 0.1)
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": SCALED,
    "evaluators": {"evaluators": {"val": DATA[:1]}},
    "weights put in": {"algorithms": [ema(half_life="3ba"), puts_in]},
    "memory now and then": {"algorithms": [ema(half_life="3ba"), now_and_then]},
    "an eager update": {"optimizer": EAGER, "compile": "where possible", "microbatch_size": 4},
}
WATCHES = [BATCHES, {Event.BATCH_START, *BATCHES}, {Event.EVAL_END, *BATCHES}, *INSIDE]


@examples(4, 300)
@given(
    who=st.sampled_from(["body", "callback", "algorithm"]),
    watch=st.sampled_from(WATCHES),
    steps=st.sampled_from([1, 3]),
    run=st.sampled_from(sorted(RUNS)),
    order=st.permutations(range(len(KEPT))),
)
@example("body", BATCHES, 1, "scaled", range(len(KEPT)))
@example("body", {Event.BATCH_START, *BATCHES}, 1, "weights put in", range(len(KEPT)))
@example("body", {Event.EPOCH_START, Event.FIT_END}, 4, "memory now and then", range(16, len(KEPT)))
@example("body", INSIDE[1], 1, "an eager update", range(12, len(KEPT)))
def test_what_was_kept_never_changes(who: str, watch: Any, steps: int, run: str, order: Any) -> None:
    """Whoever keeps it, one thing every second time that it could."""
    kept, times = Kept(), count()
    OLD.clear()

    def keep(state: pl.State) -> None:
        index, which = divmod(next(times), 2)
        if which == 0 and index < len(order):
            kept.keep(f"thing {order[index]}", KEPT[order[index]](state, index))

    class Watching(pl.Callback):
        def batch_end(self, state: pl.State, _: Any) -> None:
            if who == "callback":
                keep(state)

    @pl.algorithm(Event.EPOCH_END)  # an event that is never inside a graph
    def keeper(state: pl.State) -> pl.State:
        if who == "algorithm":
            keep(state)
        return state

    given = {"watch": watch, "steps_per_call": steps, "eval_interval": "4ba", "max_duration": "10ep", **RUNS[run]}
    algorithms = [*given.pop("algorithms", [ema(half_life="3ba")]), keeper]
    for _, state in fit(callbacks=[Watching()] * (who == "callback"), algorithms=algorithms, **given):
        if who == "body":
            keep(state)
    assert kept.things
    kept.check()


def test_counting_that_sees_no_reference_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "alone", lambda *_: True)
    kept = Kept()
    for _, state in fit():
        kept.keep("a tensor", state.params["0.weight"])
    with pytest.raises(AssertionError, match="a tensor changed"):
        kept.check()


@pl.algorithm(Event.AFTER_TRAIN_BATCH, name="sums")
def sums(state: Any) -> Any:
    return state.replace(total=state.total + state.loss, seen=FrozenDict(batches=state.seen["batches"] + 1))


@pytest.mark.parametrize("slots", [True, False])
def test_memory_in_fields_of_a_users_own_is_reused_where_it_was_not_kept(slots: bool, copied: list[bool]) -> None:
    @attrs.frozen(eq=False, kw_only=True, slots=slots)
    class Summing(pl.State):
        total: Any = None
        seen: Any = None

    def summing() -> Any:
        state: Any = Summing.create(problem.mlp())
        return state.replace(total=torch.zeros(()), seen=FrozenDict(batches=torch.zeros(2)))

    assert pl.run(fit(summing(), algorithms=[sums])).seen["batches"].tolist() == [10, 10]  # type: ignore[attr-defined]
    assert copied == ONCE or not slots
    reads = (lambda state: state.total, lambda state: state.seen, lambda state: state.seen["batches"])
    kept = Kept()
    for number, (_, state) in enumerate(fit(summing(), algorithms=[sums])):
        kept.keep("a field", reads[number % 3](state))
    kept.check()


# What a step that failed had overwritten.


def failed(**options: Any) -> tuple[Any, Any]:
    """The State whose memory a step that failed had taken, and one that was kept before."""
    kept: Any = None
    state: Any = None
    data = [*DATA[:3], (DATA[3][0] * float("nan"), DATA[3][1])]
    with pytest.raises(pl.errors.NonFiniteError, match="batch 3"):  # noqa: PT012 - it is the loop that fails
        for event, state in fit(data=data, **options):
            if event is Event.BATCH_END and state.timestamp.batch == 2:
                kept = state
    return state, kept


READS: tuple[Callable[[Any], Any], ...] = (
    lambda state: state.params["0.weight"],
    lambda state: state.grads["0.weight"],
    lambda state: state.params != {},
    lambda state: state.loss_scale.scale,
    lambda state: int(state.skipped),
    lambda state: copy.deepcopy(state.skipped),
    pickle.dumps,
)


def test_to_read_what_a_step_that_failed_had_overwritten_is_an_error() -> None:
    state, kept = failed(precision="amp_fp16")
    for number, read in enumerate(READS):
        with pytest.raises(pl.errors.DonatedStateError, match=r"overwritten by (a|the) step|let go when batch 3"):
            pytest.fail(f"{number}: {read(state)!r}")
    assert "overwritten" in f"{state} {state.skipped}"
    assert kept.grads["0.weight"].any()
