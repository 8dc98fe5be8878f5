"""``microbatch_size="auto"``: a batch that runs out of memory is run with half the size, as if that were written."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError, DistributedError
from pure_loop.loggers import InMemoryLogger
from pure_loop.order import Plan, expected
from tests.support.problem import cross_entropy, fit, noisy, points, run
from tests.support.streams import assert_same
from tests.support.tiers import examples
from tests.support.worlds import pool

A = pl.algorithms
AUTO: dict[str, Any] = {"microbatch_size": "auto", "max_duration": "1ep", "strict": None}
SEARCH: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
FAILURES = ("device", "host", "loss", "backward")


@pytest.fixture(autouse=True, scope="module")
def _fast_collections() -> Iterator[None]:
    """What lives already is left out of the collections of garbage that follow a failed try."""
    gc.freeze()
    yield
    gc.unfreeze()


def refuse(rows: int, most: int, kind: str = "device") -> None:
    if rows > most and kind == "host":
        torch.empty(10**15)
    if rows > most:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rows} rows.")


class Limited(nn.Module):
    """Fails in the forward or backward of more than so many rows; what it computes depends on how it is split.

    Its calls are in a list that its copies share.
    """

    def __init__(self, most: int = 10**6, kind: str = "device", calls: list[int] | None = None) -> None:
        super().__init__()
        self.layers, self.limit, self.note = noisy(), (most, kind), ([] if calls is None else calls).append

    def forward(self, x: Tensor) -> Tensor:
        most, kind = self.limit
        self.note(len(x))
        if kind in ("device", "host"):
            refuse(len(x), most, kind)
        out: Tensor = self.layers(x if len(x) > 1 else x.expand(2, 4))[: len(x)]
        if kind == "backward":
            out.register_hook(lambda gradient: refuse(len(gradient), most))
        return out


def sized(*sizes: int) -> Any:
    return points(size=sizes)


def halved(sizes: list[int], most: int) -> list[int | None]:
    """The microbatch size of each batch, from the first on that does not fit."""
    size, result = None, []
    for n in sizes:
        while min(n, size or n) > most:
            size = (min(n, size or n) + 1) // 2
        result.append(size)
    return result


def same(one: pl.State, other: pl.State) -> None:
    trees = []
    for state in (one, other):
        memory = {name: value for name, value in state.algorithm_state.items() if name != "microbatch_size"}
        trees.append(pl.FrozenDict(a=state.params, b=state.buffers, c=state.opt_state, d=memory))
    assert_same(*trees, "two ways")


@examples(4, 400)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from(FAILURES),
    st.booleans(),
    st.sampled_from([None, {Event.BATCH_END}]),
)
def test_the_bits_are_those_of_sizes_by_hand(sizes: list[int], most: int, kind: str, many: bool, watch: Any) -> None:
    """And a run that resumes after a batch has them, too."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        refuse(len(outputs), most)
        return functional.cross_entropy(outputs, targets)

    def made() -> Any:
        return [A.label_smoothing(0.1), A.sam(), A.ema(half_life="2ba"), A.gradient_noise(0.1)] if many else []

    options: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.1), "strict": watch is None, "watch": watch}
    options["loss"] = loss if kind == "loss" else cross_entropy
    data, seen, found, start = sized(*sizes), list[Any](), halved(sizes, most), Limited(most, kind)
    observed = {"callbacks": [lambda event, state: seen.append(event)]}
    pairs = list(fit(Limited(most, kind), data, made(), **AUTO | options | observed))
    ended = [state for event, state in pairs if event is Event.BATCH_END]
    by_hand: Any = start
    for number, (state, size) in enumerate(zip(ended, found, strict=True), start=1):
        until = {"microbatch_size": size, "max_duration": f"{number}ba"}
        by_hand = run(by_hand, data, made(), **options | until)
        same(state, by_hand)
        assert state.algorithm_state.get("microbatch_size") == size
    same(run(ended[0], data, made(), **AUTO | options), ended[-1])
    if len(set(found)) == 1:
        assert seen == expected(Plan(batches=tuple(sizes), max_duration="1ep", microbatch_size=found[0]))


def test_only_a_batch_that_is_larger_than_those_before_is_tried() -> None:
    calls: list[int] = []
    run(Limited(4, calls=calls), sized(6, 6, 2, 8, 8), **AUTO)
    tried_first, tried_fourth = [6, 3, 3], [3, 3, 2]
    assert calls == [*tried_first, 3, 3, 3, 3, 2, *tried_fourth, 3, 3, 2, 3, 3, 2]
    found = run(Limited(2, calls=calls), sized(6, 6), **AUTO | {"max_duration": "1ba"})
    calls.clear()
    run(found, sized(6, 6), **AUTO | {"microbatch_size": 1})
    assert calls == [1] * 6  # a size by hand is taken, whatever was found before
    several = AUTO | {"batches_per_step": 2}  # found for batches of the dataloader
    first = run(Limited(), data := sized(2, 3, 8, 1), **several | {"max_duration": "1ba"})
    same(run(Limited(3), data, **several), run(first, data, **several | {"microbatch_size": 2}))


class Long(nn.Linear):
    """Fails for more than 12 numbers."""

    def forward(self, x: Tensor) -> Tensor:
        refuse(x.shape[0] * x.shape[1], 12)
        return super().forward(x[..., None]).mean((1, 2))


def test_a_longer_sequence_is_tried() -> None:
    data = [(torch.ones(*shape), torch.ones(shape[0])) for shape in ((4, 2), (4, 5), (4, 2), (2, 10), (4, 2))]
    stream = fit(Long(1, 1), data, watch={Event.BATCH_END}, loss=functional.mse_loss, **AUTO)
    assert [state.algorithm_state.get("microbatch_size") for _, state in stream] == [None, 2, 2, 1, 1]


def test_where_one_sample_is_too_much_the_error_says_what_was_tried() -> None:
    start = run(Limited(), sized(2, 5), **AUTO | {"max_duration": "1ba"})
    before = {name: tensor.clone() for name, tensor in start.params.items()}
    for kind in ("device", "host"):
        events: list[Event] = []
        limited = start.with_module(Limited(0, kind)).replace(params=start.params, buffers=start.buffers)
        with pytest.raises(RuntimeError, match=r"out of memory|can't allocate") as raised:
            events.extend(event for event, _ in fit(limited, sized(2, 5), microbatch_size="auto"))
        notes = "\n".join(raised.value.__notes__)
        assert "batch 1 of 5 samples ran out of memory in microbatches of 5, 3, 2, 1." in notes
        assert events[-1] is Event.AFTER_DATALOADER
    assert_same(dict(start.params), before, "the parameters")

    def odd(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd") as other:  # it comes after the events before it
        events.extend(event for event, _ in fit(loss=odd, **AUTO))
    assert events[-1] is Event.BEFORE_LOSS
    assert [note[:19] for note in other.value.__notes__] == ["raised by the loss ", "raised in the loss "]


def test_nothing_of_a_try_is_kept_alive_and_the_step_after_it_writes_in_place() -> None:
    """Not by the frames of its error, and not by the private module that it ran in."""
    references, alive = list[Any](), list[int]()

    class Keeping(nn.Linear):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(reference() is not None for reference in references))
            self.last = x * 2
            if len(x) > 2:
                references.append(ref(self.last))
            refuse(len(x), 2)
            return super().forward(x)

    run(Keeping(4, 3), sized(8, 4), **AUTO)
    assert len(references) == 2
    assert not any(alive)
    logger, places = InMemoryLogger(), []
    for size in ("auto", 4):
        options = {"watch": {Event.BATCH_END}, "microbatch_size": size, "loggers": [logger] if size == "auto" else []}
        stream = fit(Limited(4), sized(8, 8, 8), **AUTO | options)
        places.append(len({next(iter(state.params.values())).data_ptr() for _, state in stream}))
    assert places[0] == places[1]
    assert logger.series("train/microbatch_size")[1] == [4]
    assert logger.hyperparameters["microbatch_size"] == "auto"


def ranks(most: tuple[int, int], sizes: tuple[int, ...], size: Any, own: bool = False, kind: Any = "replicate") -> Any:
    """Of each rank what it came to, or its error."""

    def program(rank: int) -> Any:
        layer = nn.Linear(4, 3)
        layer.load_state_dict({"weight": torch.full((3, 4), 0.1), "bias": torch.full((3,), 0.2)})
        layer.register_forward_pre_hook(lambda module, inputs: refuse(len(inputs[0]), most[rank]))
        parallel = pl.distributed.Parallel(kind=kind, data="own" if own else "split")
        data = sized(*(sizes[::-1] if own and rank else sizes))
        try:
            if size == "largest":
                return pl.largest_microbatch(layer, data, parallel=parallel, **SEARCH)
            last = run(layer, data, [A.sam()], microbatch_size=size, parallel=parallel)
        except (torch.OutOfMemoryError, DistributedError, ArgumentError) as error:
            return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
        return dict(last.params), last.algorithm_state.get("microbatch_size")

    return pool().run(program)


@pytest.mark.slow  # two processes train
def test_ranks_take_the_size_of_the_one_that_needs_the_smallest() -> None:
    for most, own, size in (((100, 2), False, 2), ((4, 100), True, 4)):
        sizes = (8, 4, 6) if own else (8, 16, 4)
        (params, found), (others, other) = ranks(most, sizes, "auto", own)
        assert (found, other) == (size, size)
        for wanted in (others, ranks((100, 100), sizes, size, own)[0][0]):
            assert_same(params, wanted, f"{most}")
    for searched in ("auto", "largest"):
        told, raised = ranks((100, 0), (8, 8), searched)
        assert raised.startswith("OutOfMemoryError")
        assert "rank 1 raised OutOfMemoryError after AFTER_DATALOADER of batch 0" in told
    assert ranks((100, 5), (32,), "largest") == [5, 5]
    assert 'microbatch_size="auto" with parallel="shard"' in ranks((9, 9), (8,), "auto", kind="shard")[1]


@examples(6, 300)
@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(FAILURES[:2]))
def test_the_largest_size_is_found_and_nothing_is_trained(samples: int, most: int, kind: str) -> None:
    calls: list[int] = []
    model = Limited(most, kind, calls)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert pl.largest_microbatch(model, sized(samples), algorithms=[A.sam()], **SEARCH) == min(samples, most)
    assert calls.count(samples) <= 2  # that of SAM, too
    assert_same(dict(model.state_dict()), before, "the module")
    assert model.training


def test_the_largest_size_of_a_state_is_that_of_its_next_batch_with_the_settings_of_fit() -> None:
    data = sized(2, 7)
    state = run(Limited(), data, max_duration="1ba")
    assert pl.largest_microbatch(state, data, **SEARCH) == 7
    assert pl.largest_microbatch(state.replace(stop=True), data, **SEARCH) == 7
    assert pl.largest_microbatch(run(Limited(), data), data, **SEARCH) == 2
    more = {"max_duration": "2ep", "microbatch_size": 2, "evaluators": sized(3), "donate": True, "compile": True}
    assert pl.largest_microbatch(Limited(4), sized(9), **SEARCH, **more) == 4
    with pytest.raises(TypeError, match="max_durations"):
        pl.largest_microbatch(Limited(4), sized(9), **SEARCH, max_durations="2ep")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        pl.largest_microbatch(Limited(0), sized(6), **SEARCH)
    assert "ran out of memory in microbatches of 6, 3, 1." in "\n".join(raised.value.__notes__)
