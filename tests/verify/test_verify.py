"""``fit(verify=)``: flipped bits are found and named where they change a State, and nothing else is."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.bits import checksums, count_of_differences
from pure_loop.errors import ArgumentError, ArgumentTypeError, NonFiniteError, VerificationError
from pure_loop.metrics import accuracy, mean
from pure_loop.testing.case import Case
from pure_loop.testing.comparison import differences
from pure_loop.testing.strategies import algorithms as random_algorithms
from pure_loop.testing.strategies import cases, plans
from pure_loop.verify.leaves import LOOP, unequal_leaves
from tests.conftest import THOROUGH
from tests.support import faults
from tests.support.faults import PLACES, Fault, bits_of
from tests.support.problem import LR, cross_entropy, fit, mlp, points, run
from tests.support.refused import Refusal, check
from tests.support.tiers import examples

SETTINGS: list[dict[str, Any]] = [
    {},
    {"microbatch_size": 3},
    {"nonfinite": "skip"},
    {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "watch": {Event.BATCH_END}},
    {"algorithms": [pl.algorithms.ema(half_life="2ba")]},
    {"algorithms": [pl.algorithms.sam()], "max_duration": "2ba"},
]


def upto(stream: Any, batch: int) -> list[Any]:
    """The pairs up to the BATCH_END of a batch; None and the error in its place, if there is one."""
    pairs: list[Any] = []
    try:
        for event, state in stream:
            pairs.append((event, state))  # kept, so that nothing is written in place
            if event is Event.BATCH_END and state.timestamp.batch == batch + 1:
                break
    except NonFiniteError:
        pairs.append((None, None))
    return pairs


def first_difference(ours: list[Any], others: list[Any]) -> Any:
    """The first event at which two streams differ; None: the States at the end are the same."""
    streams = [[(event, event and bits_of(state)) for event, state in pairs] for pairs in (ours, others)]
    if streams[0][-1] == streams[1][-1]:
        return None
    pairs = zip(*streams, strict=False)
    return next((a for (a, bits), (b, other) in pairs if a is b and bits != other), Event.BATCH_END)


AT = {"inputs": Event.BATCH_START, "loss": Event.AFTER_LOSS, "gradient": Event.AFTER_BACKWARD}


def changes_the_state(number: int, run: int) -> bool:
    """Whether a flip does; it is reported then, with its stage, and else is not."""
    choice = random.Random(number)
    options = SETTINGS[choice.randrange(len(SETTINGS))]
    place, batch = list(PLACES)[number % len(PLACES)], choice.randrange(2)
    pieces = 3 if "microbatch_size" in options else 1
    made: dict[str, Any] = {"place": place, "batch": batch, "seed": number, "microbatches": pieces}
    options = {"clock": lambda: 0.0, "strict": False, **options}  # strict costs three times as much as all else
    everything = {**options, "watch": None}
    sound, flawed = (upto(faults.fit(Fault(run=which, **made), **everything), batch) for which in (0, 1))
    event = first_difference(sound, flawed)
    fault = Fault(run=run, **made)
    verified = faults.fit(fault, verify="1ba", **options)
    if event is None:
        last = pl.run(verified)
        assert fault.has_fired or place == "loss", f"{number}: {place}"
        if run == 2:
            assert not differences(last.params, pl.run(faults.fit(Fault(run=0, **made), **options)).params)
        return False
    with pytest.raises(VerificationError) as caught:
        pl.run(verified)
    error = caught.value
    by_algorithm = PLACES[place] == "flip" and event is AT.get(place, Event.AFTER_TRAIN_BATCH)
    assert error.stage == ("flip" if by_algorithm else LOOP[event]), f"{number}: {place}, {event}: {error}"
    assert error.transient, f"{number}: {place}: {error}"
    assert error.agreeing == ((2, 3) if run == 1 else (1, 3))
    assert (error.batch, error.rank) == (batch, 0)
    return True


def test_a_flipped_bit_is_found_where_it_changes_the_state() -> None:
    """Any bit of any tensor of a batch, in its first or its second run; most change the State, and some do not."""
    numbers = range(1040 if THOROUGH else 28)
    changing = [changes_the_state(number, 1 + number // len(PLACES) % 2) for number in numbers]
    assert 0.5 < sum(changing) / len(changing) < 1


def blamed(*algorithms: pl.Algorithm, **options: Any) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        run(None, None, algorithms, **options)
    return caught.value


def scaled(name: str, factor: Callable[[pl.State], Any], event: Event = Event.AFTER_LOSS, **options: Any) -> Any:
    """An algorithm that multiplies the loss, or gradients."""

    def scale(state: Any) -> pl.State:
        by = factor(state)
        if event is Event.AFTER_LOSS:
            return state.replace(loss=state.loss * by)
        return state.replace(grads={name: gradient * by for name, gradient in state.grads.items()})

    return pl.Algorithm(name, {event: scale}, **options)


def test_an_algorithm_that_is_not_pure_is_named_and_no_transient_difference() -> None:
    calls = itertools.count(1)
    in_turn = scaled("in_turn", lambda state: next(calls), Event.AFTER_BACKWARD)
    error = blamed(in_turn, verify="2ba")
    assert (error.stage, error.leaf, error.batch) == ("in_turn", "grads/0.weight", 1)
    assert (error.agreeing, error.transient, error.timestamp is None) == (None, False, False)
    assert error.difference is not None
    assert error.difference > 0
    for part in ("check_algorithm", "resume from the last checkpoint"):
        assert part in str(error)
    pure = scaled("pure", lambda state: 2, Event.AFTER_BACKWARD)
    for algorithms in ((pure, in_turn), (in_turn, pure)):  # of several at one event the first that differs
        assert blamed(*algorithms, verify="1ba").stage == "in_turn"


def test_an_algorithm_that_differs_in_one_run_is_named() -> None:
    """Its result, inside of another one, which is named then; or that it is called at all."""
    shots, asked = itertools.count(1), itertools.count(1)
    # The first run of the batch calls it twice: for the loop, and for the gradients of sam's own.
    once = scaled("once", lambda state: 2 if state.timestamp.batch == 1 and next(shots) == 2 else 1)
    error = blamed(once, pl.algorithms.sam(), verify="2ba")
    assert (error.stage, error.transient) == ("sam", True)
    error = blamed(scaled("halve", lambda state: 0.5, when=lambda state: next(asked) == 1), verify="1ba")
    assert "did not come to it" in str(error)
    assert (error.leaf, error.agreeing) == (None, (2, 3))


def test_a_step_that_is_not_finite_in_one_run_is_a_difference_and_in_both_the_error_that_it_is() -> None:
    for number, agreeing in ((1, (2, 3)), (2, (1, 3))):
        runs = itertools.count(1)
        spoils = lambda s, r=runs, n=number: s.timestamp.batch == 1 and next(r) == n  # noqa: E731
        overflow = scaled("overflow", lambda state, spoils=spoils: torch.inf if spoils(state) else 1.0)
        error = blamed(overflow, verify="2ba")
        assert (error.stage, error.leaf, error.transient) == ("overflow", "loss", True)
        assert error.agreeing == agreeing
    data = points()
    data[1][0][0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="batch 1"):
        run(None, data, verify="2ba")
    assert int(run(None, data, verify="1ba", nonfinite="skip").skipped) == 2  # type: ignore[arg-type]


def test_nobody_sees_that_batches_are_computed_twice() -> None:
    """Data are loaded once; events, observers and the surroundings' random numbers are as without it, and so is what
    tools say of a stream."""
    seen: dict[str | None, Any] = {}
    for verify in (None, "1ba"):
        torch.manual_seed(0)
        served, noted = list[int](), list[Any]()
        serving = {"__iter__": lambda self, served=served: (served.append(1) or batch for batch in points())}
        callbacks = [lambda event, state, noted=noted: noted.append((event, bits_of(state)))]
        run("noisy", type("Counting", (), serving)(), callbacks=callbacks, verify=verify)
        pairs = fit(None, None, [pl.algorithms.sam()], strict=False, verify=verify)
        changes = [(change.event, change.by, change.leaf) for change in pl.changes(pairs)]
        seen[verify] = noted, torch.rand(3).tolist(), len(served), changes
    assert seen[None] == seen["1ba"]
    assert seen[None][2] == 6


def test_only_due_batches_are_computed_again() -> None:
    calls: list[int] = []

    @pl.algorithm(Event.BEFORE_TRAIN_BATCH)
    def note(state: pl.State) -> pl.State:
        calls.append(state.timestamp.batch)
        return state

    run(None, None, [note], verify="3ba")
    assert calls == [0, 1, 2, 2, 3, 4, 5, 5]
    # Batches count from the start of training, where it resumes too.
    half = run(max_duration="2ba")
    calls.clear()
    run(half, None, [note], verify="3ba")
    assert calls == [2, 2, 3, 4, 5, 5]


# What no case draws.
WAYS: list[dict[str, Any]] = [
    {"order": "2021", "donate": True},
    {"microbatch_size": "auto", "nonfinite": "skip"},
    {"batches_per_step": 2, "strict": True},
    {"precision": "amp_fp16", "clip_grad": 0.1, "evaluators": {"val": points(1)}, "eval_interval": "1ba"},
    {"train_metrics": [accuracy(), mean(lambda outputs, batch: outputs.sum(dim=1), "total")], "deterministic": True},
    {"algorithms": [pl.Algorithm("stop", {Event.BATCH_END: lambda state: state.replace(stop=True)})]},
    {"algorithms": [pl.algorithms.sam(), pl.algorithms.ema(half_life="2ba")], "watch": {Event.BATCH_END}},
    {"watch": (), "donate": False},
    {"optimizer": pl.optim.from_torch(torch.optim.Adagrad, lr=0.1)},  # without an update in place
]


def test_a_verified_run_is_a_run_in_each_way_to_train() -> None:
    for options in WAYS:
        verified, plain = (run("noisy", **{"strict": False, **options}, verify=verify) for verify in ("2ba", None))
        assert bits_of(verified) == bits_of(plain), options


@examples(15, 1000)
@given(
    case=cases(problems=["mlp", "convolution"], plans=plans(max_batches=6)),
    composition=random_algorithms(problem="mlp"),
    every=st.integers(1, 3),
)
def test_any_run_is_the_same_with_it(case: Case, composition: Any, every: int) -> None:
    plain = list(case.stream([composition]))
    verified = list(case.stream([composition], verify=f"{every}ba"))
    assert len(plain) == len(verified)
    for (event, state), (other_event, other) in zip(plain, verified, strict=True):
        assert event is other_event
        assert not differences(state, other)


AN_INTERVAL = 'verify=100 of type int: give an interval in batches, such as "100ba"'
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (100, ArgumentTypeError, AN_INTERVAL),
    ("0ba", ArgumentError, "verify='0ba': "),
    ("-1ba", ArgumentError, "not negative"),
    ("1ep", ArgumentError, "verify='1ep': "),
    ("2.5ba", ArgumentError, "whole numbers"),
    ("5ba", ArgumentError, "verify='5ba' with compile="),
]


def test_other_values_are_refused_at_the_call_and_explain_says_how_often() -> None:
    for value, error, says in REFUSED:
        check(Refusal(says, lambda v=value: fit(verify=v, strict=False, compile=v == "5ba"), error, (says,)))
    shown = io.StringIO()
    options: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=LR), "max_duration": "1ep"}
    pl.explain(mlp(), points(), verify="100ba", file=shown, **options)
    assert "verify         every 100 batches one is computed twice" in shown.getvalue()


class Pair:
    """Outputs of a class that torch knows nothing of."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores


@pytest.mark.parametrize("outputs_of", [Pair, lambda scores: SimpleNamespace(scores=scores)])
def test_outputs_of_a_class_of_the_users_own(outputs_of: Any) -> None:
    """The ``==`` of a namespace is that of its tensors, which has no truth value."""

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return outputs_of(super().forward(x))

    run(Model(4, 3), loss=lambda outputs, y: cross_entropy(outputs.scores, y), strict=False, verify="1ba")


def test_namespaces_are_compared_by_what_they_hold() -> None:
    state = pl.State.create(nn.Linear(1, 1))

    def holding(**items: Any) -> pl.State:
        return state.remember("mine", SimpleNamespace(scores=torch.ones(2), inner=SimpleNamespace(**items)))

    assert unequal_leaves(holding(count=1), holding(count=1))[0] == []
    for items in ({"count": 2}, {"other": 1}, {"count": torch.ones(2)}):
        assert unequal_leaves(holding(count=1), holding(**items))[0]


TENSORS: dict[str, torch.Tensor] = {
    "float64": torch.tensor([1.0, -2.0], dtype=torch.float64),
    "bfloat16": torch.tensor([1.0], dtype=torch.bfloat16),
    "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j]),
    "int64": torch.tensor([1, 2]),
    "bool": torch.tensor([True, False]),
    "a scalar": torch.tensor(0.0),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "sparse": torch.tensor([0.0, 3.0]).to_sparse(),
}


def differing(a: torch.Tensor, b: torch.Tensor) -> list[str]:
    state = pl.State.create(nn.Linear(1, 1))
    return list(unequal_leaves(state.replace(outputs=a), state.replace(outputs=b))[0])


def test_every_bit_of_a_leaf_counts() -> None:
    for kind, tensor in TENSORS.items():
        assert differing(tensor, tensor.clone()) == []
        values = tensor._values() if tensor.is_sparse else tensor
        dense = torch.view_as_real(values) if values.is_complex() else values.contiguous()
        size = 8 * dense.element_size()
        for bit in range(1 if kind == "bool" else size):
            changed = dense.clone()
            mask = 1 << bit if bit < size - 1 or size == 8 else -(1 << bit)
            changed.view(faults.INTEGERS[dense.element_size()]).view(-1)[0] ^= mask
            other = torch.view_as_complex(changed) if values.is_complex() else changed
            other = torch.sparse_coo_tensor(tensor._indices(), other, tensor.shape) if tensor.is_sparse else other
            assert differing(tensor, other) == ["outputs"], (kind, bit)
            assert checksums({"x": tensor}) != checksums({"x": other}), (kind, bit)
            assert count_of_differences(tensor, other)


def test_nan_equals_nan_and_zero_is_not_minus_zero() -> None:
    for one, other, wanted in (((1, -1.0), (1, 1.0), 1), ((torch.nan, 1.0), (torch.nan, 1.0), 0), ((0.0,), (-0.0,), 1)):
        assert len(differing(torch.tensor(one), torch.tensor(other))) == wanted
    assert not differing(torch.tensor(torch.nan), -torch.tensor(torch.nan))
