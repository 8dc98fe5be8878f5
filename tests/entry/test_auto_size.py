"""``microbatch_size="auto"``: a batch that runs out of memory is run with half the size, as if that were written."""

from __future__ import annotations

import gc
import itertools
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
from pure_loop.compile import interpreted
from pure_loop.errors import ArgumentError, DistributedError
from pure_loop.loggers import InMemoryLogger
from pure_loop.order import Plan, expected
from pure_loop.random import seeded
from pure_loop.state import POSITIONS
from tests.support.problem import cross_entropy, fit, points, run
from tests.support.streams import assert_same
from tests.support.tiers import examples
from tests.support.worlds import pool

A = pl.algorithms
MANY: dict[str, Any] = {
    "none": list,
    "all": lambda: [A.label_smoothing(0.1), A.sam(), A.ema(half_life="2ba"), A.gradient_noise(0.1)],
}
FAILURES = ("device", "host", "loss", "backward")
AUTO: dict[str, Any] = {"microbatch_size": "auto", "max_duration": "1ep", "strict": None}
SEARCH: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}


@pytest.fixture(autouse=True, scope="module")
def _fast_collections() -> Iterator[None]:
    """What lives already is left out of the collections of garbage that follow a failed try."""
    gc.freeze()
    yield
    gc.unfreeze()


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, most: int) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _refuse(len(grads[0]), ctx.most)
        return grads[0], None


def _refuse(rows: int, most: int, kind: str = "device") -> None:
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
        with seeded(0):
            self.layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))
        self.limit = most, kind
        self.note = ([] if calls is None else calls).append

    def forward(self, x: Tensor) -> Tensor:
        most, kind = self.limit
        self.note(len(x))
        if kind in ("device", "host"):
            _refuse(len(x), most, kind)
        x = self.layers(x if len(x) > 1 else x.expand(2, 4))[: len(x)]
        return _Failing.apply(x, most) if kind == "backward" else x


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


def tensors(state: pl.State) -> Any:
    memory = {name: value for name, value in state.algorithm_state.items() if name != "microbatch_size"}
    return pl.FrozenDict(params=state.params, buffers=state.buffers, opt_state=state.opt_state, memory=memory)


def same(one: pl.State, other: pl.State) -> None:
    assert_same(tensors(one), tensors(other), "two ways")


@examples(6, 400)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from(FAILURES),
    st.sampled_from(sorted(MANY)),
    st.sampled_from([None, {Event.BATCH_END}]),
)
def test_the_bits_are_those_of_the_sizes_written_by_hand(
    sizes: list[int], most: int, kind: str, algorithms: str, watch: Any
) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        _refuse(len(outputs), most)
        return functional.cross_entropy(outputs, targets)

    options: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.1), "strict": watch is None, "watch": watch}
    options["loss"] = loss if kind == "loss" else cross_entropy
    data, made, seen = sized(*sizes), MANY[algorithms], list[Any]()
    pairs = []
    for event, state in fit(
        Limited(most, kind), data, made(), **AUTO | options, callbacks=[lambda e, s: seen.append(e)]
    ):
        pairs.append((event, state))
    found, by_hand, start = halved(sizes, most), list[pl.State](), Limited(most, kind)
    for size, group in itertools.groupby(found):
        until = {"microbatch_size": size, "max_duration": f"{len(by_hand) + len(list(group))}ba"}
        for event, state in fit(start, data, made(), **{**options, **until}):
            start = state
            if event is Event.BATCH_END:
                by_hand.append(state)
    ended = [state for event, state in pairs if event is Event.BATCH_END]
    for state, wanted, size in zip(ended, by_hand, found, strict=True):
        same(state, wanted)
        assert state.algorithm_state.get("microbatch_size") == size
    if len(set(found)) == 1:
        events = expected(Plan(batches=tuple(sizes), max_duration="1ep", microbatch_size=found[0]))
        assert [event for event, _ in pairs] == [event for event in events if watch is None or event in watch]
        assert seen == events  # callbacks see each event once


def test_only_a_batch_that_is_larger_than_those_before_is_tried() -> None:
    calls: list[int] = []
    run(Limited(4, calls=calls), sized(6, 6, 2, 8, 8), **AUTO)
    tried_first, tried_fourth = [6, 3, 3], [3, 3, 2]
    assert calls == [*tried_first, 3, 3, 3, 3, 2, *tried_fourth, 3, 3, 2, 3, 3, 2]
    calls.clear()
    found = run(Limited(2, calls=calls), sized(6, 6), **AUTO | {"max_duration": "1ba"})
    calls.clear()
    run(found, sized(6, 6), **AUTO | {"microbatch_size": 1, "max_duration": "2ba"})
    assert calls == [1] * 6  # a size by hand is taken, whatever was found before


class Long(nn.Module):
    """Fails for more than 12 numbers."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.layers = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        _refuse(x.shape[0] * x.shape[1], 12)
        return self.layers(x[..., None]).mean((1, 2))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])  # compiled: a graph a shape
def test_a_longer_sequence_is_tried_eagerly(compile: bool) -> None:
    data = [(torch.ones(*shape), torch.ones(shape[0])) for shape in ((4, 2), (4, 5), (4, 2), (2, 10), (4, 2))]
    options = AUTO | {"watch": {Event.BATCH_END}, "loss": functional.mse_loss}
    eager = [state for _, state in fit(Long(), data, **options)]
    assert [state.algorithm_state.get("microbatch_size") for state in eager] == [None, 2, 2, 1, 1]
    if compile:
        with interpreted():
            compiled = [dict(state.params) for _, state in fit(Long(), data, **options, compile=True)]
        torch.testing.assert_close(compiled, [dict(state.params) for state in eager])


def test_training_resumes_from_every_boundary(tmp_path: Any) -> None:
    data, options = sized(3, 8, 2), {**AUTO, "algorithms": [A.ema(half_life="2ba")]}
    kept = [state for _, state in fit(Limited(3), data, **options)]
    boundaries = [state for state in kept if state.event in POSITIONS and state.event is not Event.FIT_END]
    assert len(boundaries) == 1 + 1 + 2 * 3 + 2
    pl.save(boundaries[-4], tmp_path / "state")
    for state in (*boundaries, pl.load(tmp_path / "state", model=Limited(3))):
        same(run(state, data, **options), kept[-1])


@pytest.mark.parametrize("kind", ["device", "host"])
def test_where_one_sample_is_too_much_the_error_says_what_was_tried(kind: str) -> None:
    events: list[Event] = []
    start = run(Limited(), sized(2, 5), **AUTO | {"max_duration": "1ba"})
    start = start.with_module(Limited(0, kind)).replace(params=start.params, buffers=start.buffers)
    before = {name: tensor.clone() for name, tensor in start.params.items()}
    with pytest.raises(RuntimeError, match=r"out of memory|can't allocate") as raised:
        events.extend(event for event, _ in fit(start, sized(2, 5), microbatch_size="auto"))
    assert "batch 1 of 5 samples ran out of memory in microbatches of 5, 3, 2, 1." in "\n".join(raised.value.__notes__)
    assert events[-1] is Event.AFTER_DATALOADER
    assert_same(dict(start.params), before, "the parameters")


def test_another_error_comes_after_the_events_before_it() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("odd")

    events: list[Event] = []
    with pytest.raises(ValueError, match="odd") as raised:
        events.extend(event for event, _ in fit(Odd(4, 3), **AUTO))
    assert events[-1] is Event.BEFORE_FORWARD
    assert len(raised.value.__notes__) == 1


def test_nothing_of_a_try_is_kept_alive() -> None:
    """Not by the frames of its error, and not by the private module that it ran in."""
    references, alive = list[Any](), list[int]()

    class Keeping(nn.Linear):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(reference() is not None for reference in references))
            self.last = x * 2
            if len(x) > 2:
                references.append(ref(self.last))
            _refuse(len(x), 2)
            return super().forward(x)

    run(Keeping(4, 3), sized(8, 4), **AUTO)
    assert len(references) == 2
    assert not any(alive)


def test_the_step_after_a_try_writes_in_place_and_the_size_is_recorded() -> None:
    def places(size: Any, logger: Any) -> int:
        options = {"watch": {Event.BATCH_END}, "optimizer": pl.optim.adamw(lr=0.1), "loggers": [logger]}
        stream = fit(Limited(4), sized(8, 8, 8), **AUTO | options | {"microbatch_size": size})
        return len({next(iter(state.params.values())).data_ptr() for _, state in stream})

    logger = InMemoryLogger()
    assert places("auto", logger) == places(4, InMemoryLogger())
    assert logger.series("train/microbatch_size")[1] == [4]
    assert logger.hyperparameters["microbatch_size"] == "auto"


def ranks(most: tuple[int, int], sizes: tuple[int, ...], size: Any, own: bool = False, kind: str = "replicate") -> Any:
    """Of each rank what it came to, or its error."""

    def program(rank: int) -> Any:
        layer = nn.utils.skip_init(nn.Linear, 4, 3)
        nn.init.constant_(layer.weight, 0.1)
        nn.init.constant_(layer.bias, 0.2)
        layer.register_forward_pre_hook(lambda module, inputs: _refuse(len(inputs[0]), most[rank]))
        parallel = pl.distributed.Parallel(kind=kind, data="own" if own else "split")
        data = sized(*(sizes[::-1] if own and rank else sizes))
        try:
            if size == "largest":
                return pl.largest_microbatch(layer, data, parallel=parallel, **SEARCH)
            pairs = list(fit(layer, data, [A.sam()], microbatch_size=size, parallel=parallel))
        except (torch.OutOfMemoryError, DistributedError, ArgumentError) as error:
            return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
        last = pairs[-1][1]
        return [event for event, _ in pairs], dict(last.params), last.algorithm_state.get("microbatch_size")

    return pool().run(program)


@pytest.mark.slow  # two processes train
def test_ranks_take_the_size_of_the_one_that_needs_the_smallest() -> None:
    for most, own, found in (((100, 2), False, 2), ((4, 100), True, 4), ((100, 100), False, None)):
        sizes = (8, 4, 6) if own else (8, 16, 4)
        one, other = ranks(most, sizes, "auto", own)
        assert one[::2] == other[::2]
        assert one[2] == found
        by_hand = ranks((100, 100), sizes, found, own)[0]
        for params in (other[1], by_hand[1]):
            assert_same(one[1], params, f"{most}")
    for size, tried in (("auto", "of batch 0"), ("largest", "of batch 0")):
        told, raised = ranks((100, 0), (8, 8), size)
        assert raised.startswith("OutOfMemoryError")
        assert f"rank 1 raised OutOfMemoryError after AFTER_DATALOADER {tried}" in told
    assert ranks((100, 5), (32,), "largest") == [5, 5]
    assert all(
        'microbatch_size="auto" with parallel="shard"' in each for each in ranks((9, 9), (8,), "auto", kind="shard")
    )


@examples(8, 300)
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


def test_what_algorithms_compute_is_tried_too() -> None:
    """SAM runs the model a second time, at other weights, at AFTER_TRAIN_BATCH."""
    layer = nn.Linear(4, 3)
    first = layer.weight.detach().clone()
    layer.register_forward_pre_hook(
        lambda module, inputs: None if torch.equal(module.weight, first) else _refuse(len(inputs[0]), 2)
    )
    found = [run(layer, sized(8), made, **AUTO).algorithm_state.get("microbatch_size") for made in ([], [A.sam()])]
    assert found == [None, 2]


def test_explain_says_that_the_size_is_halved(capsys: pytest.CaptureFixture[str]) -> None:
    options = {**SEARCH, "max_duration": "1ep", "microbatch_size": "auto"}
    state = run(Limited(3), sized(8, 8), **AUTO | {"max_duration": "1ba"})
    for start, says in ((Limited(), "the whole batch at once, halved where"), (state, "of at most 2 samples, halved")):
        pl.explain(start, sized(8, 8), **options)
        assert says in capsys.readouterr().out
