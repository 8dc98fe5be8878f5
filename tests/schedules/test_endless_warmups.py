"""A warmup that lasts as long as the run, and a rate that is 0 at each of its batches, are refused before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import algorithms as A
from pure_loop import schedules as S
from tests.schedules.test_schedules import Unsized
from tests.support import problem
from tests.support.refused import Refusal, check, rows
from tests.support.tiers import examples

BATCH = (torch.ones(2, 1), torch.ones(2, 1))
TEN = [BATCH] * 10
LOADER: DataLoader[Any] = DataLoader(TensorDataset(torch.ones(20, 1), torch.ones(20, 1)), batch_size=2)


def fit(lr: Any, duration: str, data: Any = TEN, start: Any = None, **options: Any) -> pl.Stream:
    optimizer = lr if isinstance(lr, pl.optim.Optimizer) else pl.optim.sgd(lr=lr)
    options |= {"loss": nn.functional.mse_loss, "optimizer": optimizer, "max_duration": duration}
    return problem.fit(nn.Linear(1, 1) if start is None else start, data, **options)


# Schedules that rise over a time, and over which part of it.
RISING: dict[str, tuple[Callable[[str], Any], float]] = {
    "warmup": (lambda time: S.warmup(time, S.step("3ba")), 1.0),
    "inverse_sqrt": (S.inverse_sqrt, 1.0),
    "cosine": (lambda time: S.cosine("1dur", peak=0.1, warmup=time), 1.0),
    "polynomial": (lambda time: S.polynomial("1dur", warmup=time), 1.0),
    "warmup_stable_decay": (lambda time: S.warmup_stable_decay(time, "1000m", "10m"), 1.0),
    "one_cycle": (S.one_cycle, 0.3),
    "cyclic": (lambda time: S.cyclic(time, 0.0, 1.0), 0.5),
    "product": (lambda time: 0.5 * S.warmup(time) * (lambda timestamp: 0.1), 1.0),
    "chain": (lambda time: S.chain(S.warmup(time), ("1000000ba", S.constant(0.1))), 1.0),
    "scaled": (lambda time: S.scaled(S.warmup(time), 1.0, warmup=True), 1.0),
}


@examples(50, 1000)
@given(
    name=st.sampled_from(sorted(RISING)),
    warmup=st.integers(1, 60),
    unit=st.sampled_from(["ba", "ep", "sp"]),
    length=st.integers(1, 6),
    duration=st.tuples(st.integers(1, 30), st.sampled_from(["ba", "ep", "sp"])),
)
def test_a_warmup_is_refused_exactly_where_no_batch_has_the_peak(
    name: str, warmup: int, unit: str, length: int, duration: tuple[int, str]
) -> None:
    """The peak comes after a part of the warmup's batches, of two samples each."""
    (make, part), (amount, of) = RISING[name], duration
    in_batches = {"ba": 1.0, "ep": float(length), "sp": 0.5}
    run = -(-amount // 2) if of == "sp" else amount * int(in_batches[of])
    peak = warmup * in_batches[unit] * part
    try:
        fit(make(f"{warmup}{unit}"), f"{amount}{of}", [BATCH] * length)
        refused = False
    except pl.errors.ArgumentError:
        refused = True
    if refused:
        assert not any(batch >= peak for batch in range(run))
    else:  # the last batch of so many samples may begin before what ends after it
        assert run > peak or "sp" in (unit, of)


def warm(warmup: str) -> Any:
    return S.cosine("1dur", peak=0.1, warmup=warmup)


def parted(rest: pl.optim.Optimizer) -> pl.optim.Optimizer:
    return pl.optim.partition(
        {"head": pl.optim.sgd(lr=0.1), "rest": rest}, lambda name, tensor: "head" if name == "bias" else "rest"
    )


def pieces(*values: float) -> Any:
    return S.piecewise({"0ba": values[0], "9ba": values[1], "10ba": 0.1})


LATE = "comes after the end of the run"
REFUSED = [
    Refusal(name, call, pl.errors.ArgumentError, (says,))
    for says, calls in {
        "which is not over before the end of the run": {
            "an epoch without a length": lambda: fit(warm("1ep"), "1ep", Unsized(TEN)),
            "batches without a length": lambda: fit(warm("500ba"), "3ba", Unsized(TEN)),
            "epochs that are cut": lambda: fit(warm("6ba"), "2ep", batches_per_epoch=3),
            "samples of a loader": lambda: fit(warm("20sp"), "1ep", LOADER),
            "batches in a run of samples": lambda: fit(warm("40ba"), "40sp", Unsized(TEN)),
            "tokens": lambda: fit(warm("1e6tok"), "1e6tok"),
            "minutes": lambda: fit(warm("10m"), "5m"),
            "an iteration": lambda: fit(warm("2ep"), "1iter", iteration_length="2ep"),
            "a part of an optimizer": lambda: fit(parted(pl.optim.adamw(lr=S.warmup("1ep"))), "1ep"),
            "a strength": lambda: fit(0.1, "1ep", algorithms=[A.sam(rho=0.05 * S.warmup("1ep"))]),
        },
        # What to write instead is in the error.
        "Write a warmup that is a part of the run, such as": {"all of it": lambda: fit(warm("1ep"), "1ep")},
        "it is 0 at every batch": {
            "pieces": lambda: fit(pieces(0.0, 0.0), "1ep"),
            "a chain": lambda: fit(S.chain(0.0, ("1ep", 0.1)), "1ep"),
        },
        f"algorithm 'swa': start='500ba' {LATE}": {"a mean": lambda: fit(0.1, "1ep", algorithms=[A.swa("500ba")])},
        f"start='21sp' {LATE}": {"samples": lambda: fit(0.1, "1ep", algorithms=[A.swa("21sp")])},
        f"start='2ep' {LATE}": {"layers": lambda: fit(0.1, "1ep", algorithms=[A.layer_freezing(start="2ep")])},
        f"start='11ba' {LATE}": {
            "selection": lambda: fit(0.1, "1ep", algorithms=[A.selective_backprop(start="11ba", end="12ba")])
        },
    }.items()
    for name, call in calls.items()
]


@rows(REFUSED)
def test_what_comes_after_the_end_is_refused_at_the_call(refusal: Refusal) -> None:
    check(refusal)


def test_what_reaches_it_or_is_not_known_is_taken() -> None:
    meant = [0.0, S.linear(0.0, 0.1, "1dur"), parted(pl.optim.sgd(lr=S.piecewise({"0ba": 0.0, "500ba": 0.1})))]
    late = [S.cyclic("20ba", 0.1, 1.0), S.chain(S.warmup("10ba"), ("5ba", S.warmup("50ba")))]  # which begins above 0
    own = [warm("10m"), lambda timestamp: 0.1 * min(1.0, timestamp.batch / 500)]  # is not known
    for rate in (*meant, *late, *own, pieces(0.0, 0.1), warm("0.9dur")):
        fit(rate, "1ep")
    for rate, data in ((warm("1000sp"), Unsized(TEN)), (warm("500ba"), Unsized(TEN)), (warm("18sp"), LOADER)):
        fit(rate, "1ep", data)
    for start in ("10ba", "1ep", "20sp", "1dur"):
        fit(0.1, "1ep", algorithms=[A.swa(start, interval="1ba")])


def test_a_run_that_resumes_with_a_shorter_duration() -> None:
    rate = S.cosine("100ba", peak=0.1, warmup="20ba")
    kept = next(
        state for event, state in fit(rate, "10ep") if event == "batch_checkpoint" and state.timestamp.batch == 5
    )
    with pytest.raises(pl.errors.ArgumentError, match=r"rises over '20ba', which is not over .* max_duration='15ba'"):
        fit(rate, "15ba", start=kept)
    assert pl.run(fit(rate, "21ba", start=kept)).timestamp.batch == 21
    pl.run(fit(rate, "5ba", start=kept))  # which has ended: there is nothing to train
