"""The methods of ``pure_loop.algorithms`` together: going on, composition, names and arguments."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event, algorithms
from pure_loop.algorithms import apply_blurpool, blurpool, ema, gradient_clipping, label_smoothing, sam
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.order import BOUNDARIES
from pure_loop.testing._compositions import ALGORITHMS, built
from tests.support.runs import convnet, equal, images, mlp, points, stream, train
from tests.support.samples import simplest


def serves(factory: Any) -> bool:
    """Whether an algorithm trains any model of images, in any order with others, and whatever draws for samples."""
    module = sys.modules[factory.__module__]
    needs = getattr(module, "SERVES", None)
    return factory is blurpool or (needs in (None, "classes") and not hasattr(module, "EXPECTED_FAILURES"))


def everything(reverse: bool = False) -> list[Any]:
    listed = [
        *(simplest(built(factory)) for factory in ALGORITHMS.values() if serves(factory)),
        gradient_clipping("adaptive", 0.1, name="adaptive"),
        gradient_clipping("norm", 0.5, name="norm"),
        ema(smoothing=0.5, interval="1ep", name="slow"),
    ]
    return listed[::-1] if reverse else listed


OPTIONS: dict[str, Any] = {
    "microbatch_size": 3,
    "optimizer": pl.optim.adamw(lr=pl.schedules.linear(0.01, 0.0, "1dur")),
    "evaluators": {"val": images(1, seed=1)},
    "eval_interval": "2ba",
}


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_training_resumes_bitwise_from_every_boundary(reverse):
    whole = list(stream(convnet(), images(), everything(reverse), **OPTIONS))
    kept = [(i, s) for i, (e, s) in enumerate(whole) if e in BOUNDARIES]
    assert {state.event for _, state in kept} == set(BOUNDARIES) - {
        Event.ITERATION_START,
        Event.ITERATION_END,
        Event.ITERATION_CHECKPOINT,
    }
    for index, state in kept:
        rest = list(stream(state, images(), everything(reverse), **{**OPTIONS, "strict": False}))
        assert rest[0][0] is Event.FIT_START
        rest = rest[1:]
        wanted = whole[index + 1 :] if whole[index + 1][0] is not Event.FIT_START else whole[index + 2 :]
        assert [event for event, _ in rest] == [event for event, _ in wanted]
        for (_, a), (_, b) in zip(rest, wanted, strict=True):
            equal(a, b)


def test_a_composition_is_the_list_and_runs_are_equal():
    a = train(convnet(), images(), everything(), **OPTIONS)
    torch.manual_seed(99)
    equal(a, train(convnet(), images(), [pl.compose(*everything())], **OPTIONS))


def test_names_are_given():
    makers = [
        lambda name: label_smoothing(name=name),
        lambda name: gradient_clipping("norm", 1.0, name=name),
        lambda name: ema(smoothing=0.9, name=name),
        lambda name: sam(name=name),
        lambda name: blurpool(name=name),
    ]
    assert [make("mine").name for make in makers] == ["mine"] * 5
    for make in makers:
        with pytest.raises(ArgumentError, match="two algorithms are named 'same'"):
            train(convnet(), images(), [make("same"), make("same")])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: label_smoothing(1.0), ArgumentError, "less than 1"),
        (lambda: label_smoothing(-0.1), ArgumentError, "at least 0"),
        (lambda: label_smoothing(math.nan), ArgumentError, "at least 0"),
        (lambda: label_smoothing("0.1"), ArgumentTypeError, "must be a number"),
        (lambda: label_smoothing(True), ArgumentTypeError, "must be a number"),
        (lambda: label_smoothing(target_key=None), ArgumentTypeError, "target_key"),
        (lambda: label_smoothing(ignore_index=0.5), ArgumentTypeError, "ignore_index"),
        (lambda: gradient_clipping("max", 1.0), ArgumentError, '"parameter" or "quantile"'),
        (lambda: gradient_clipping("norm", 0), ArgumentError, "above 0"),
        (lambda: gradient_clipping("norm", math.inf), ArgumentError, "finite"),
        (lambda: gradient_clipping("norm", None), ArgumentTypeError, "threshold"),
        (lambda: ema(), ArgumentError, "neither"),
        (lambda: ema(half_life="1ba", smoothing=0.9), ArgumentError, "both"),
        (lambda: ema(smoothing=1), ArgumentError, "less than 1"),
        (lambda: ema(half_life="0ba"), ArgumentError, "no time at all"),
        (lambda: ema(half_life="soon"), ArgumentError, "half_life='soon'"),
        (lambda: ema(half_life=0.5), ArgumentTypeError, "half_life=0.5"),
        (lambda: ema(half_life="10s"), ArgumentError, "clock"),
        (lambda: ema(smoothing=0.9, interval="10s"), ArgumentError, "clock"),
        (lambda: ema(half_life="1ep", interval="1ba"), ArgumentError, 'interval="1ep"'),
        (lambda: sam(rho=0), ArgumentError, "rho must be a finite number above 0"),
        (lambda: sam(epsilon=-1.0), ArgumentError, "epsilon must be a finite number above 0"),
        (lambda: sam(interval=0), ArgumentError, "at least 1"),
        (lambda: sam(interval="2ba"), ArgumentTypeError, "every second batch"),
        (lambda: sam(adaptive=1), ArgumentTypeError, "True or False"),
        (lambda: blurpool(min_channels=0), ArgumentError, "min_channels"),
        (lambda: blurpool(min_channels=1.5), ArgumentTypeError, "min_channels"),
        (lambda: blurpool(blur_first="yes"), ArgumentTypeError, "blur_first"),
        (lambda: blurpool(replace_convs=False, replace_maxpools=False), ArgumentError, "would do nothing"),
        (lambda: apply_blurpool(torch.zeros(1)), ArgumentTypeError, "not a torch.nn.Module"),
        (lambda: blurpool(name=""), ArgumentTypeError, "name"),
    ],
)
def test_bad_arguments_are_refused_when_the_algorithm_is_made(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_what_is_exported_is_there():
    for name in algorithms.__all__:
        assert callable(getattr(pl.algorithms, name))


def test_two_algorithms_that_claim_the_same_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"'sam' and 'sharper' both claim 'replaces gradient'"):
        stream(mlp(), points(), [pl.algorithms.sam(), pl.algorithms.sam(name="sharper")])


@pytest.mark.parametrize("settings", [{"claims": "text"}, {"claims": [3]}, {"bind": 3}, {"bind": divmod}], ids=str)
def test_claims_and_bind_of_another_type(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=f"algorithm 'mine': {next(iter(settings))}="):
        pl.Algorithm("mine", {Event.BATCH_END: lambda state: state}, **settings)


def test_bind_is_called_once_with_the_run() -> None:
    runs: list[Any] = []
    algorithm = pl.Algorithm("mine", {Event.BATCH_END: lambda state: state}, bind=runs.append)
    train(mlp(), points(), [algorithm], evaluators={"val": points()})
    assert [(run.function, list(run.metrics)) for run in runs] == [("fit", ["val"])]
