"""A warmup that lasts as long as the run, and a rate that is 0 at each of its batches, are refused before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import schedules as S


class Uncounted:
    """Batches without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def batches(count: int) -> list[Any]:
    return [(torch.ones(2, 1), torch.ones(2, 1))] * count


def fit(lr: Any, duration: str, data: Any = 10, *, start: Any = None, **options: Any) -> pl.Stream:
    optimizer = lr if isinstance(lr, pl.optim.Optimizer) else pl.optim.sgd(lr=lr)
    return pl.fit(
        nn.Linear(1, 1) if start is None else start,
        batches(data) if isinstance(data, int) else data,
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        max_duration=duration,
        **options,
    )


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(20, 1), torch.ones(20, 1)), batch_size=2)


TOO_LONG: list[tuple[Any, str, Any, dict[str, Any]]] = [
    (S.cosine("1dur", peak=0.1, warmup="1ep"), "1ep", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="1ep"), "1ep", Uncounted(batches(10)), {}),
    (S.cosine("1dur", peak=0.1, warmup="10ba"), "1ep", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="500ba"), "3ba", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="500ba"), "3ba", Uncounted(batches(10)), {}),
    (S.cosine("1dur", peak=0.1, warmup="2ep"), "5ba", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="6ba"), "2ep", 10, {"batches_per_epoch": 3}),
    (S.cosine("1dur", peak=0.1, warmup="20sp"), "1ep", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="20sp"), "1ep", loader(), {}),
    (S.cosine("1dur", peak=0.1, warmup="40sp"), "40sp", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="20ba"), "40sp", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="40ba"), "40sp", Uncounted(batches(10)), {}),
    (S.cosine("1dur", peak=0.1, warmup="1e6tok"), "1e6tok", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="10m"), "5m", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="2ep"), "1iter", 10, {"iteration_length": "2ep"}),
    (S.polynomial("1dur", peak=0.1, warmup="10ba"), "1ep", 10, {}),
    (S.inverse_sqrt("10ba", peak=0.1), "1ep", 10, {}),
    (S.warmup_stable_decay("10ba", "1000ba", "10ba"), "1ep", 10, {}),
    (S.warmup("10ba"), "1ep", 10, {}),
    (S.warmup("1dur", S.step("3ba")), "1ep", 10, {}),
    (0.5 * S.warmup("2ep"), "1ep", 10, {}),
    (S.warmup("2ep") * (lambda timestamp: 0.1), "1ep", 10, {}),
    (S.one_cycle("40ba"), "1ep", 10, {}),  # at its peak after 12 batches
    (S.cyclic("20ba", 0.0, 1.0), "1ep", 10, {}),
    (S.chain(S.warmup("10ba"), ("10ba", S.constant(0.1))), "1ep", 10, {}),
    (S.scaled(S.cosine("1000ba", peak=0.1, warmup="5ba"), 2.0, warmup=True), "1ep", 10, {}),
    (S.piecewise({"0ba": 0.0, "10ba": 0.1}), "1ep", 10, {}),  # 0 at each batch
    (S.chain(0.0, ("1ep", 0.1)), "1ep", 10, {}),
    (
        pl.optim.partition(
            {"head": pl.optim.sgd(lr=0.1), "rest": pl.optim.adamw(lr=S.warmup("1ep"))},
            lambda name, tensor: "head" if name == "bias" else "rest",
        ),
        "1ep",
        10,
        {},
    ),
    (0.1, "1ep", 10, {"algorithms": [pl.algorithms.sam(rho=0.05 * S.warmup("1ep"))]}),
]


@pytest.mark.parametrize(("lr", "duration", "data", "options"), TOO_LONG)
def test_what_would_never_reach_its_peak_is_refused_at_the_call(
    lr: Any, duration: str, data: Any, options: dict[str, Any]
) -> None:
    """Every schedule with a warmup, every unit, loaders with and without a length, epochs that are cut, iterations,
    parts of an optimizer, strengths of algorithms. Ten batches of two samples."""
    with pytest.raises(pl.ArgumentError, match=r"which is not over before the end of the run|it is 0 at every batch"):
        fit(lr, duration, data, **options)


LONG_ENOUGH: list[tuple[Any, str, Any, dict[str, Any]]] = [
    (S.chain(0.0, ("1ep", 0.1)), "8ba", Uncounted(batches(10)), {}),  # not known
    (S.cosine("1dur", peak=0.1, warmup="9ba"), "1ep", 10, {}),  # its last batch has the peak
    (S.cosine("1dur", peak=0.1, warmup="1ep"), "11ba", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="0.9dur"), "1ep", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="18sp"), "1ep", 10, {}),
    (S.cosine("1dur", peak=0.1, warmup="18sp"), "1ep", loader(), {}),
    (S.cosine("1dur", peak=0.1, warmup="1000sp"), "1ep", Uncounted(batches(10)), {}),  # not known
    (S.cosine("1dur", peak=0.1, warmup="500ba"), "1ep", Uncounted(batches(10)), {}),  # not known
    (S.cosine("1dur", peak=0.1, warmup="10m"), "1ep", 10, {}),  # not known
    (S.one_cycle("1dur"), "1ep", 10, {}),
    (S.one_cycle("30ba"), "1ep", 10, {}),  # at its peak after 9
    (S.cyclic("20ba", 0.1, 1.0), "1ep", 10, {}),  # begins above 0
    (S.linear(0.0, 0.1, "1dur"), "1ep", 10, {}),
    (S.chain(S.warmup("10ba"), ("5ba", S.constant(0.1))), "1ep", 10, {}),  # left before it ends
    (S.chain(S.warmup("2ba"), ("5ba", S.warmup("50ba"))), "1ep", 10, {}),
    (S.piecewise({"0ba": 0.0, "9ba": 0.1}), "1ep", 10, {}),
    (0.0, "1ep", 10, {}),
    (S.constant(0.0), "1ep", 10, {}),
    (lambda timestamp: 0.1 * min(1.0, timestamp.batch / 500), "1ep", 10, {}),  # not known
    (
        pl.optim.partition(
            {"head": pl.optim.sgd(lr=0.1), "rest": pl.optim.sgd(lr=S.piecewise({"0ba": 0.0, "500ba": 0.1}))},
            lambda name, tensor: "head" if name == "bias" else "rest",
        ),
        "1ep",
        10,
        {},
    ),  # frozen at first
]


LATE = [
    pl.algorithms.swa("500ba"),
    pl.algorithms.swa("2ep"),
    pl.algorithms.swa("21sp"),
    pl.algorithms.layer_freezing(start="11ba"),
    pl.algorithms.selective_backprop(start="11ba", end="12ba"),
]


@pytest.mark.parametrize("algorithm", LATE)
def test_an_algorithm_that_begins_after_the_end_is_refused(algorithm: Any) -> None:
    with pytest.raises(
        pl.ArgumentError, match=rf"algorithm '{algorithm.name}': \w+='\w+' comes after the end of the run"
    ):
        fit(0.1, "1ep", algorithms=[algorithm])


def test_an_algorithm_that_begins_with_the_end_is_not() -> None:
    for start in ("10ba", "1ep", "20sp", "1dur"):
        last = pl.run(fit(0.1, "1ep", algorithms=[pl.algorithms.swa(start, interval="1ba")]))
        assert last.algorithm_state["swa"]


@pytest.mark.parametrize(("lr", "duration", "data", "options"), LONG_ENOUGH)
def test_what_reaches_it_or_is_not_known_trains(lr: Any, duration: str, data: Any, options: dict[str, Any]) -> None:
    assert pl.run(fit(lr, duration, data, **options)).timestamp.batch > 0


@given(
    warmup=st.integers(1, 60),
    unit=st.sampled_from(["ba", "ep", "sp"]),
    length=st.integers(1, 6),
    duration=st.tuples(st.integers(1, 30), st.sampled_from(["ba", "ep", "sp"])),
)
def test_a_warmup_is_refused_exactly_where_no_batch_has_the_peak(
    warmup: int, unit: str, length: int, duration: tuple[int, str]
) -> None:
    """By a loop by hand over the batches of a run, of two samples each."""
    amount, of = duration
    in_batches = {"ba": 1.0, "ep": float(length), "sp": 0.5}
    run = -(-amount // 2) if of == "sp" else amount * int(in_batches[of])
    reached = any(batch >= warmup * in_batches[unit] for batch in range(run))
    for schedule in (S.warmup(f"{warmup}{unit}"), S.inverse_sqrt(f"{warmup}{unit}")):
        refused = None
        try:
            fit(schedule, f"{amount}{of}", length)
        except pl.ArgumentError as error:
            refused = error
        if reached:
            assert refused is None
        elif "sp" not in (unit, of):  # whose last batch may begin before what ends after it
            assert refused is not None


def test_the_error_says_what_to_write() -> None:
    with pytest.raises(pl.ArgumentError) as caught:
        fit(S.cosine("1dur", peak=0.1, warmup="1ep"), "1ep")
    assert str(caught.value) == (
        "the learning rate of sgd is cosine(time='1dur', peak=0.1, warmup='1ep'): it rises over '1ep', which is not "
        "over before the end of the run, max_duration='1ep', of epochs of 10 batches. Write a warmup that is a part of "
        'the run, such as warmup="0.1dur", or train longer; pl.rehearse tries a long run without training it.'
    )


def test_a_run_that_resumes_with_a_shorter_duration() -> None:
    rate = S.cosine("100ba", peak=0.1, warmup="20ba")
    kept = next(
        state for event, state in fit(rate, "10ep") if event == "batch_checkpoint" and state.timestamp.batch == 5
    )
    with pytest.raises(pl.ArgumentError, match=r"rises over '20ba', which is not over .* max_duration='15ba'"):
        fit(rate, "15ba", start=kept)
    assert pl.run(fit(rate, "21ba", start=kept)).timestamp.batch == 21
    pl.run(fit(rate, "5ba", start=kept))  # which has ended: there is nothing to train
