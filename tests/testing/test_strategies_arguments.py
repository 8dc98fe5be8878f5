"""What strategies refuse at the call, and what a failure shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pure_loop.errors import ArgumentError, ArgumentTypeError, PureLoopError
from pure_loop.testing import strategies
from pure_loop.testing.case import Case
from pure_loop.testing.strategies import (
    algorithms,
    batches,
    cases,
    event_streams,
    plans,
    problems,
    state_at,
    states,
    times,
    timestamps,
)
from tests.support.samples import SIMPLEST

# Bad arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plans(units="ba"), r"plans: units='ba': give a list of some of 'ba', 'ep', 'sp', 'tok', 's', 'iter'"),
        (lambda: plans(units=3), "give a list of some of"),
        (lambda: plans(units=["ba", "days"]), "units holds 'days', which is none of 'ba', 'ep'"),
        (lambda: plans(units=["dur"]), "units holds 'dur', which is none of"),
        (lambda: plans(units=[]), r"units=\[\] leaves nothing to draw from"),
        (lambda: plans(interval_units=["iter"]), "interval_units holds 'iter', which is none of"),
        (lambda: plans(orders=["2022"]), "orders holds '2022', which is none of 'current', '2021'"),
        (lambda: plans(orders=[{}]), "which is none of"),
        (
            lambda: plans(min_batches=-1),
            r"min_batches must be a whole number of at least 0, got -1; write plans\(min_batches=1\)",
        ),
        (lambda: plans(max_batches=2.5), "max_batches must be a whole number of at least 0, got 2.5 of type float"),
        (lambda: plans(min_batches=10), "min_batches=10 is more than max_batches=9"),
        (lambda: plans(max_batches_per_epoch=0), "max_batches_per_epoch must be a whole number of at least 1"),
        (lambda: plans(max_samples=0), "max_samples must be a whole number of at least 1"),
        (lambda: plans(min_evaluators=3), "min_evaluators=3 is more than max_evaluators=2"),
        (lambda: plans(max_evaluators=True), "max_evaluators must be a whole number of at least 0, got True"),
        (lambda: plans(iterations=1), "iterations must be True or False, got 1"),
        (lambda: plans(units=["iter"], iterations=False), "units holds 'iter', and iterations=False"),
        (lambda: plans(units=["iter"], orders=["current", "2021"]), "which has no iterations"),
        (lambda: plans(units=["iter", "ba"], interval_units=["dur"]), "of which fit takes no fractions"),
        (lambda: problems(among=[]), "give one at least"),
        (lambda: problems(among=["lin"]), "'lin' is not known; there are 'linear'"),
        (lambda: problems(among=3), r"problems: among=3: pass names such as \['linear'\]"),
        (lambda: problems(separable=1), "separable must be True or False"),
        (lambda: problems(images=True, separable=True), "no problem has separable=True and images=True"),
        (
            lambda: cases(plans=plans),
            r"plans is a strategy, and <function plans .* \(a function that makes one: call it\)",
        ),
        (lambda: cases(plans=SIMPLEST), r"cases: plans is a strategy, and Plan\(.* of type Plan is none; write"),
        (lambda: cases(problems=["lin"]), "'lin' is not known"),
        (lambda: cases(problems=3), "cases: problems=3: pass names"),
        (lambda: cases(optimizers=["lion"]), "optimizers holds 'lion', which is none of 'sgd', 'adamw'"),
        (lambda: cases(precisions="fp32"), r"precisions is a list, got 'fp32'; write cases\(precisions="),
        (lambda: cases(precisions=[]), "leaves nothing to draw from"),
        (lambda: cases(precisions=["fp8"]), "fp8"),
        (lambda: cases(clip_grads=1.0), r"clip_grads is a list, got 1.0; write cases\(clip_grads=\[None, 1.0\]\)"),
        (lambda: cases(clip_grads=[0.0]), "clip_grads must be a finite number above 0, got 0.0"),
        (lambda: cases(max_seed=-1), "max_seed must be a whole number of at least 0"),
        (lambda: times(units=["weeks"]), "units holds 'weeks'"),
        (lambda: times(min_value=-1), "min_value must be a finite number of at least 0, got -1"),
        (lambda: times(max_value=float("inf")), "max_value must be a finite number of at least 0"),
        (lambda: times(max_value="9ba"), "max_value must be a finite number of at least 0, got '9ba' of type str"),
        (lambda: times(min_value=3, max_value=2), "min_value=3 is more than max_value=2"),
        (lambda: times(min_value=1.2, max_value=1.8), "no whole number lies between min_value=1.2 and max_value=1.8"),
        (lambda: timestamps(plans=[SIMPLEST]), "timestamps: plans is a strategy"),
        (lambda: batches(min_samples=0), "min_samples must be a whole number of at least 1"),
        (lambda: batches(min_samples=7), "min_samples=7 is more than max_samples=6"),
        (lambda: batches(dtypes=["float32"]), "dtypes holds 'float32', which is none of torch.float32"),
        (lambda: batches(dtypes=torch.float32), "give a list of some of torch.float32"),
        (lambda: batches(nested="yes"), "nested must be True or False, got 'yes'"),
        (lambda: algorithms(problem="lin"), "'lin' is not known"),
        (lambda: algorithms(problem=3), "give a name such as 'linear'"),
        (lambda: algorithms(among=["swaa"]), "among holds 'swaa', which is none of 'early_stopping', 'ema'"),
        (lambda: algorithms(among="ema"), "give a list of some of"),
        (
            lambda: algorithms(problem="exact", among=["label_smoothing"]),
            r"holds 'label_smoothing', which can't serve Problem\('exact'\); there are 'early_stopping', 'ema', ",
        ),
        (lambda: algorithms(problem="mlp", among=["blurpool"]), r"can't serve Problem\('mlp'\)"),
        (lambda: algorithms(min_size=4), "min_size=4 is more than max_size=3"),
        (lambda: states(at="batch_ende"), r"at='batch_ende': 'batch_ende' is not an event; did you mean"),
        (lambda: states(at=[]), r"at=\[\] holds no event"),
        (lambda: states(at=3), "states: at=3: write an event such as Event.BATCH_END, or a list"),
        (lambda: states(at=["predict_end"]), r"at holds Event.PREDICT_END, which no run of fit has"),
        (lambda: states(cases=[Case(plan=SIMPLEST)]), "states: cases is a strategy"),
        (lambda: states(algorithms=["ema"]), "algorithms= holds 'ema' of type str, not an algorithm"),
        (lambda: state_at(Case(plan=SIMPLEST), 21), "position=21, and the last position of this run is 20"),
        (lambda: state_at(Case(plan=SIMPLEST), -1), "position must be a whole number of at least 0"),
        (lambda: event_streams(order="2022"), "order holds '2022'"),
        (
            lambda: event_streams(order="2021", plans=plans()),
            "order='2021' and plans, which have an order of their own",
        ),
        (lambda: event_streams(plans=SIMPLEST), "event_streams: plans is a strategy"),
        (lambda: event_streams(going_on="always"), "going_on must be True or False"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message) as caught:
        call()
    assert isinstance(caught.value, PureLoopError)


@pytest.mark.parametrize("name", sorted(set(strategies.__all__) - {"state_at"}))
def test_options_are_keywords(name: str) -> None:
    with pytest.raises(TypeError, match=r"positional argument|no argument without its name"):
        getattr(strategies, name)(1)


# What a failure shows


def shown(strategy: st.SearchStrategy[Any], condition: Callable[[Any], Any] = lambda value: True) -> str:
    """What Hypothesis says of the value at which a test fails."""

    @settings(database=None, print_blob=False, phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False)
    @given(value=strategy)
    def fails(value: Any) -> None:
        assert not condition(value)

    with pytest.raises(AssertionError) as caught:
        fails()
    text = "".join("".join(caught.value.__notes__).split())
    return text.partition("value=")[2].removesuffix(",)")


def test_a_failure_shows_code_that_gives_the_value() -> None:
    plan = "Plan(batches=(1,),max_duration='1ba')"
    assert shown(plans()) == plan
    assert shown(cases(problems="mlp")) == f"Case(plan={plan},problem='mlp')"
    assert shown(times()) == "Time('0ba')"
    assert shown(timestamps(), lambda now: now.batch and now.max_duration) == (
        "Timestamp(batch=1,sample=1,batch_in_epoch=1,sample_in_epoch=1,batch_in_iteration=1,"
        "max_duration=Time('1ba'),batches_per_epoch=1)"
    )
    assert shown(states(at="batch_end")) == f"state_at(Case(plan={plan}),16)"
    assert (
        shown(algorithms(), lambda drawn: any(each.name == "sam" for each in drawn.members)) == "compose(sam(rho=1.0))"
    )
