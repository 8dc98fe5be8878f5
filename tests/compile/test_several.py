"""``steps_per_call=``: batches are loaded ahead of the steps that go through them, where that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import ema
from pure_loop.compile.segment import Segment
from pure_loop.data.dataloaders import source
from tests.support.compiling import EPOCHS, assert_close, every_third, fit, mlp
from tests.support.loaders import noisy_collate
from tests.support.models import FEATURES, batches, plain

pytestmark = pytest.mark.usefixtures("interpreted")

SEVEN = batches((8,) * 7, 1)


class Overwriting:
    """A loader that gives the same memory each time, with other numbers."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = torch.empty(8, FEATURES), torch.empty(8, dtype=torch.int64)
        for inputs, targets in SEVEN:
            x.copy_(inputs)
            y.copy_(targets)
            yield x, y


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each call went through."""
    found: list[int] = []
    real = Segment.again

    def again(self: Segment, state: pl.State, calls: Any) -> Any:
        found.append(len(calls))
        return real(self, state, calls)

    monkeypatch.setattr(Segment, "again", again)
    return found


def as_often(settings: dict[str, Any]) -> list[tuple[Event, pl.State]]:
    settings = {"watch": EPOCHS, "max_duration": "3ep", **settings}
    given = fit(compile=True, steps_per_call=3, **settings)
    assert_close(given, fit(**settings))
    return given


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        # The first step after a State was observed copies, and is the loop's.
        (SEVEN, [3, 3, 0]),
        (tuple(SEVEN), [3, 3, 0]),
        (Overwriting(), [1, 1, 1, 1, 1, 1, 0]),
        (DataLoader(TensorDataset(*map(torch.cat, zip(*SEVEN, strict=True))), batch_size=8), [3, 3, 0]),
        (batches((8, 8, 8, 8, 8, 5), 1), [3, 1, 0]),
    ],
    ids=["list", "tuple", "a loader that overwrites", "DataLoader", "ragged"],
)
def test_batches_are_loaded_ahead_only_if_they_stay_as_they_are(
    data: Any, wanted: list[int], together: list[int]
) -> None:
    as_often({"data": data, "model": plain})
    assert together[: len(wanted)] == wanted


def test_loading_ahead_what_is_overwritten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from pure_loop.data.source import Iterated

    monkeypatch.setattr(Iterated, "batches_stay", True)
    with pytest.raises(AssertionError):
        as_often({"data": Overwriting(), "model": plain})


def test_a_collate_that_was_extended_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data._utils import collate

    loader = DataLoader(ROWS, batch_size=2)
    assert source(loader, seed=0, stream="train").batches_stay
    monkeypatch.setitem(collate.default_collate_fn_map, torch.nn.Parameter, lambda batch, **_: batch[0])
    assert not source(loader, seed=0, stream="train").batches_stay


def lazy() -> Any:
    class Lazy:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Tensor:
            return torch.zeros(2, 1)

    return Lazy()


ROWS = [(torch.zeros(1), i) for i in range(4)]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: [torch.zeros(2, 1)], True),
        (lazy, False),
        (lambda: iter([torch.zeros(2, 1)]), False),
        (lambda: DataLoader(ROWS, batch_size=2), True),
        (lambda: DataLoader(lazy(), batch_size=2), True),
        (lambda: DataLoader(lazy(), batch_size=None), False),
        (lambda: DataLoader(ROWS, batch_size=2, collate_fn=noisy_collate), False),
        (lambda: DataLoader(ROWS, batch_size=2, collate_fn=noisy_collate, num_workers=1), True),
    ],
    ids=[
        *("list", "sequence", "iterator", "DataLoader", "default collate", "no collate"),
        *("own collate", "in workers"),
    ],
)
def test_which_batches_stay(make: Callable[[], Any], wanted: bool) -> None:
    assert source(make(), seed=0, stream="train").batches_stay is wanted
    assert source(make(), seed=0, stream="train").keeps_pinned is wanted


def test_each_batch_that_a_loader_pins_stays() -> None:
    """In pinned memory of its own, whatever the loader does with what it was made of."""
    loader = DataLoader(lazy(), batch_size=None, pin_memory=True)
    given = source(loader, seed=0, stream="train")
    assert given.keeps_pinned
    assert not given.batches_stay


def test_a_step_that_needs_another_graph_is_the_loops(together: list[int]) -> None:
    as_often({"data": SEVEN, "model": plain, "algorithms": [every_third]})
    assert together[:2] == [2, 0]  # batch 3 (and 6) needs another one, and so does what follows it


def remembering(step: Callable[[Any], Any]) -> Any:
    """Remembers a number, which each step makes another one of."""

    def update(state: pl.State) -> pl.State:
        memory = state.algorithm_state["remembers"]
        beside_whole_numbers = torch.ones((), dtype=torch.int64) + memory
        params = {name: tensor + 0.01 * beside_whole_numbers for name, tensor in state.params.items()}
        return state.replace(params=params).remember("remembers", step(memory))

    return pl.Algorithm("remembers", {Event.BATCH_END: update}, init=lambda state: 0)


def until(last: int) -> Callable[[Any], Any]:
    """A whole number up to this one, and then a float, without a question that a graph would depend on."""
    return lambda number: number + 1 + 0 * 2 ** (last - number)


STEPS: dict[str, Callable[[Any], Any]] = {
    "an int": lambda number: number + 1,
    "then a float": lambda number: number * 0.5 + 1.5,
    "a float in the middle of a call": until(1),
    "a float at the end of a call": until(2),
    "a float in the next call": until(3),
}


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_numbers_that_are_remembered(step: Callable[[Any], Any], together: list[int]) -> None:
    as_often({"data": SEVEN, "model": plain, "algorithms": [remembering(step)]})
    assert together


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_count_that_becomes_a_float_beside_whole_numbers(dtype: torch.dtype) -> None:
    """Computed from the time, not remembered: no type in the State changes."""

    def update(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss * (torch.ones((), dtype=dtype) * 2 ** (3 - state.timestamp.batch)))

    as_often({"data": SEVEN, "model": plain, "algorithms": [pl.Algorithm("halves", {Event.AFTER_LOSS: update})]})


def test_an_average_of_the_weights_keeps_no_step_from_going_with_others(together: list[int]) -> None:
    """It remembers counts of the step, which Python continues between the calls."""
    as_often({"data": SEVEN, "model": plain, "algorithms": [ema(half_life="5sp")]})
    assert together[:3] == [3, 3, 0]


def test_dropout_masks_are_those_of_single_steps(together: list[int]) -> None:
    as_often({"data": SEVEN, "model": mlp})
    assert max(together) == 3


@pytest.mark.parametrize("bad", [1, 2, 4, 6])
def test_a_batch_that_is_not_finite_is_named(bad: int) -> None:
    data = [(x * float("nan") if i == bad else x, y) for i, (x, y) in enumerate(SEVEN)]
    with pytest.raises(pl.NonFiniteError, match=rf"batch {bad} \(epoch 0, batch {bad} in it\)"):
        fit(compile=True, steps_per_call=3, watch=EPOCHS, model=plain, data=data)


@pytest.mark.parametrize("bad", [2, 3])
def test_an_arithmetic_that_fails_fails_after_the_steps_before_it(bad: int) -> None:
    """Whether the fifth step belongs to a call is asked before the call's steps run, and fails."""

    def update(state: pl.State) -> pl.State:
        step = torch.ones(()) * (2 if 1 / (4 - state.timestamp.batch) > 0.1 else 3)
        return state.replace(loss=state.loss * step)

    data = [(x * float("nan") if i == bad else x, y) for i, (x, y) in enumerate(SEVEN)]
    dividing = pl.Algorithm("divides", {Event.AFTER_LOSS: update})
    with pytest.raises(pl.NonFiniteError, match=f"batch {bad} "):
        fit(compile=True, steps_per_call=4, watch=EPOCHS, model=plain, data=data, algorithms=[dividing])
    with pytest.raises(ZeroDivisionError):
        fit(compile=True, steps_per_call=4, watch=EPOCHS, model=plain, data=SEVEN, algorithms=[dividing])


def test_what_fails_to_load_fails_after_the_steps_before_it() -> None:
    class Broken(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index >= 24:
                raise OSError(f"sample {index}")
            return SEVEN[0][0][0] * (float("nan") if index == 16 else 1.0), SEVEN[0][1][0]

    with pytest.raises(pl.NonFiniteError, match="batch 2 "):
        fit(compile=True, steps_per_call=3, watch=EPOCHS, model=plain, data=DataLoader(Broken(), batch_size=8))


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_no_second_is_lost(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that advances by one when a batch is loaded, and by ten with a step or an evaluation."""
    now = [0.0]

    class Slow(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            now[0] += 1
            return super().__getitem__(index)

    real = Segment._given

    def given(self: Segment, *args: Any) -> Any:
        now[0] += 10
        return real(self, *args)

    monkeypatch.setattr(Segment, "_given", given)
    monkeypatch.setattr("pure_loop.data.source.Listed.batches_stay", True)
    settings: dict[str, Any] = {"evaluators": batches((8,), 2), "eval_interval": "5ba", "clock": lambda: now[0]}
    settings |= {"model": plain, "data": Slow(SEVEN), "watch": EPOCHS, "max_duration": "2ep"}
    state = fit(compile=True, steps_per_call=steps, **settings)[0][1]
    # Those of the last step and of what follows it are counted with the next batch.
    assert state.timestamp.total_seconds == 7 + 6 * 10 + 10


def test_a_duration_in_seconds_is_looked_at_after_each_batch(together: list[int]) -> None:
    fit(compile=True, steps_per_call=3, watch=EPOCHS, model=plain, data=SEVEN * 3, max_duration="1s")
    assert set(together) <= {0, 1}


def test_evaluators_that_are_due_end_a_call(together: list[int]) -> None:
    as_often({"evaluators": batches((8,), 2), "eval_interval": "3ba", "data": SEVEN, "model": plain})
    # The loop takes the first batch of an epoch, those after which an evaluator is due (2, 5, 8), and those after them.
    assert together[:4] == [1, 1, 0, 0]
