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
from pure_loop.errors import ArgumentError, ArgumentTypeError, DistributedError
from pure_loop.loggers import InMemoryLogger
from pure_loop.order import Plan, expected
from pure_loop.state import POSITIONS
from tests.support.runs import equal, train
from tests.support.runs import stream as fit
from tests.support.tiers import examples
from tests.support.worlds import pool

ALGORITHMS: dict[str, Any] = {
    "none": list,
    "all": lambda: [A.label_smoothing(0.1), A.sam(), A.ema(half_life="2ba"), A.gradient_noise(0.1)],
}
A = pl.algorithms
FAILURES = ("device", "host", "loss", "backward")


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
    """Fails in the forward, loss or backward of more than so many rows; what it computes depends on how it is split."""

    def __init__(self, most: int, kind: str = "device") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))
        self.most, self.kind = most, kind
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        calls.append(len(x))
        if self.kind in ("device", "host"):
            _refuse(len(x), self.most, self.kind)
        x = self.layers(x if len(x) > 1 else x.expand(2, 4))[: len(x)]
        result: Tensor = _Failing.apply(x, self.most) if self.kind == "backward" else x
        return result


calls: list[int] = []


def limited(most: int = 10**6, kind: str = "device") -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Limited(most, kind)


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes]


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
    return {"params": state.params, "buffers": state.buffers, "opt_state": state.opt_state, "memory": memory}


@examples(8, 400)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from(FAILURES),
    st.sampled_from(sorted(ALGORITHMS)),
    st.sampled_from([None, {Event.BATCH_END}]),
)
def test_the_bits_are_those_of_the_sizes_written_by_hand(
    sizes: list[int], most: int, kind: str, algorithms: str, watch: Any
) -> None:
    options: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.1), "strict": watch is None, "watch": watch}
    if kind == "loss":

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            _refuse(len(outputs), most)
            return functional.cross_entropy(outputs, targets)

        options["loss"] = loss
    data, made = batches(*sizes), ALGORITHMS[algorithms]
    pairs = list(fit(limited(most, kind), data, made(), microbatch_size="auto", max_duration="1ep", **options))

    found, by_hand, start = halved(sizes, most), list[Any](), limited(most, kind)
    for size, same in itertools.groupby(found):
        until = {"microbatch_size": size, "max_duration": f"{len(by_hand) + len(list(same))}ba"}
        for event, state in fit(start, data, made(), **{**options, **until}):
            start = state
            if event is Event.BATCH_END:
                by_hand.append(tensors(state))
    ended = [state for event, state in pairs if event is Event.BATCH_END]
    for state, wanted, size in zip(ended, by_hand, found, strict=True):
        equal(tensors(state), wanted)
        assert state.algorithm_state.get("microbatch_size") == size
    if len(set(found)) == 1:
        events = expected(Plan(batches=tuple(sizes), max_duration="1ep", microbatch_size=found[0]))
        assert [event for event, _ in pairs] == [event for event in events if watch is None or event in watch]


def test_each_event_comes_once_and_callbacks_see_it_once() -> None:
    seen: list[tuple[Event, int]] = []
    data = batches(8, 8, 3)
    stream = fit(limited(3), data, callbacks=[lambda event, state: seen.append((event, state.timestamp.batch))],
                 microbatch_size="auto", max_duration="2ep")  # fmt: skip
    pairs = [(event, state.timestamp.batch) for event, state in stream]
    assert seen == pairs
    assert [event for event, _ in pairs] == expected(Plan(batches=(8, 8, 3), max_duration="2ep", microbatch_size=2))


def test_only_a_batch_that_is_larger_than_those_before_is_tried() -> None:
    calls.clear()
    train(limited(4), batches(6, 6, 2, 8, 8), microbatch_size="auto", max_duration="1ep", strict=False)
    tried_first, tried_fourth = [6, 3, 3], [3, 3, 2]
    assert calls == [*tried_first, 3, 3, 3, 3, 2, *tried_fourth, 3, 3, 2, 3, 3, 2]
    calls.clear()
    train(limited(), batches(4, 4, 3), microbatch_size="auto", max_duration="1ep", strict=False)
    assert calls == [4, 4, 4, 3]


class Long(nn.Module):
    """Fails for more than 12 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        _refuse(x.shape[0] * x.shape[1], 12)
        result: Tensor = self.layers(x[..., None]).mean((1, 2))
        return result


def test_a_longer_sequence_is_tried() -> None:
    data = [(torch.ones(4, length), torch.ones(4)) for length in (3, 2, 5, 4)]
    pairs = fit(Long(), data, microbatch_size="auto", max_duration="1ep", loss=functional.mse_loss)
    sizes = [s.algorithm_state.get("microbatch_size") for event, s in pairs if event is Event.BATCH_END]
    assert sizes == [None, None, 2, 2]


@pytest.mark.parametrize("sizes", [(8, 3), (3, 8, 2)])
def test_training_resumes_from_every_boundary(sizes: tuple[int, ...], tmp_path: Any) -> None:
    data = batches(*sizes)
    options: dict[str, Any] = {"microbatch_size": "auto", "max_duration": "1ep", "strict": False}
    kept = [state for _, state in fit(limited(3), data, [A.ema(half_life="2ba")], **options)]
    wanted = tensors(kept[-1])
    boundaries = [state for state in kept if state.event in POSITIONS and state.event is not Event.FIT_END]
    assert len(boundaries) == 1 + 1 + 2 * len(sizes) + 2
    for state in boundaries:
        equal(tensors(train(state, data, [A.ema(half_life="2ba")], **options)), wanted)
    pl.save(boundaries[-4], tmp_path / "state")
    loaded = pl.load(tmp_path / "state", model=limited(3))
    equal(tensors(train(loaded, data, [A.ema(half_life="2ba")], **options)), wanted)


@pytest.mark.parametrize("kind", ["device", "host"])
def test_where_one_sample_is_too_much_the_error_says_what_was_tried(kind: str) -> None:
    events: list[Event] = []
    data = batches(2, 5)
    wanted = torch.OutOfMemoryError if kind == "device" else RuntimeError
    start = train(limited(), data, microbatch_size="auto", max_duration="1ba")
    start = start.with_module(limited(0, kind)).replace(params=start.params, buffers=start.buffers)
    before = {name: tensor.clone() for name, tensor in start.params.items()}
    with pytest.raises(wanted, match=r"out of memory|can't allocate") as raised:
        events.extend(event for event, _ in fit(start, data, microbatch_size="auto"))
    assert "batch 1 of 5 samples ran out of memory in microbatches of 5, 3, 2, 1." in "\n".join(raised.value.__notes__)
    assert events[-1] is Event.AFTER_DATALOADER
    equal(dict(start.params), before)


def test_another_error_comes_after_the_events_before_it() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("odd")

    events: list[Event] = []
    with pytest.raises(ValueError, match="odd") as raised:
        events.extend(event for event, _ in fit(Odd(), batches(4), microbatch_size="auto"))
    assert events[-1] is Event.BEFORE_FORWARD
    assert len(raised.value.__notes__) == 1


def test_nothing_of_a_try_is_kept_alive() -> None:
    """Not by the frames of its error, and not by the private module that it ran in."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(reference() is not None for reference in references))
            self.last = x * 2
            if len(x) > 2:
                references.append(ref(self.last))
            _refuse(len(x), 2)
            result: Tensor = self.layer(x)
            return result

    references: list[Any] = []
    alive: list[int] = []
    train(Keeping(), batches(8, 4), microbatch_size="auto", max_duration="1ep", strict=False)
    assert len(references) == 2
    assert not any(alive)


def test_the_step_after_a_try_writes_in_place() -> None:
    def places(size: Any) -> int:
        stream = fit(limited(4), batches(8, 8, 8), microbatch_size=size, max_duration="1ep", strict=False,
                     watch={Event.BATCH_END}, optimizer=pl.optim.adamw(lr=0.1))  # fmt: skip
        return len({next(iter(state.params.values())).data_ptr() for _, state in stream})

    assert places("auto") == places(4)


def test_the_size_is_recorded_where_it_was_found() -> None:
    logger = InMemoryLogger()
    train(limited(4), batches(4, 6, 3, 9), microbatch_size="auto", max_duration="2ep", loggers=[logger])
    assert logger.series("train/microbatch_size") == ([2], [3])
    assert logger.hyperparameters["microbatch_size"] == "auto"


def test_a_size_by_hand_is_taken_whatever_was_found_before() -> None:
    data = batches(6, 6)
    state = train(limited(2), data, microbatch_size="auto", max_duration="1ba")
    calls.clear()
    train(state, data, microbatch_size=1, max_duration="2ba", strict=False)
    assert calls == [1] * 6


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_compiled_steps_are_tried_eagerly() -> None:
    # Batches of (4, 2) are split into one, two and four.
    data = [(torch.ones(*shape), torch.ones(shape[0])) for shape in ((4, 2), (4, 5), (4, 2), (2, 10), (4, 2))]
    options: dict[str, Any] = {"watch": {Event.BATCH_END}, "strict": False, "max_duration": "1ep"}
    options["loss"] = functional.mse_loss
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Long()
    eager, compiled = (
        [
            (state.algorithm_state.get("microbatch_size"), dict(state.params))
            for _, state in fit(model, data, microbatch_size="auto", **options, **more)
        ]
        for more in ({}, {"compile": True})
    )
    assert [size for size, _ in eager] == [None, 2, 2, 1, 1]
    torch.testing.assert_close(compiled, eager)


def ranks(most: tuple[int, int], sizes: tuple[int, ...], size: Any, own: bool) -> Any:
    def program(rank: int) -> Any:
        parallel = pl.distributed.Parallel(data="own" if own else "split")
        data = batches(*(sizes[::-1] if own and rank else sizes))
        # Without BatchNorm and dropout.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = nn.Linear(4, 3)
        layer.register_forward_pre_hook(lambda module, inputs: _refuse(len(inputs[0]), most[rank]))
        try:
            pairs = list(fit(layer, data, [A.sam()], microbatch_size=size, parallel=parallel))
        except (torch.OutOfMemoryError, DistributedError) as error:
            return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
        return [event for event, _ in pairs], tensors(pairs[-1][1]), pairs[-1][1].algorithm_state

    return pool().run(program)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("most", "found"), [((100, 2), 2), ((4, 100), 4), ((100, 100), None)])
def test_all_ranks_take_the_size_of_the_one_that_needs_the_smallest(
    most: tuple[int, int], found: int | None, own: bool
) -> None:
    sizes = (8, 4, 6) if own else (8, 16, 4)
    (events, state, memory), (other_events, other, _) = ranks(most, sizes, "auto", own)
    assert events == other_events
    equal(state, other)
    assert memory.get("microbatch_size") == found
    if own or found != 4:  # which is that of the first batch, too
        _, by_hand, _ = ranks((100, 100), sizes, found, own)[0]
        equal(state, by_hand)


@pytest.mark.slow
def test_a_rank_on_which_one_sample_is_too_much_is_named_on_the_other() -> None:
    told, raised = ranks((100, 0), (8, 8), "auto", own=False)
    assert raised.startswith("OutOfMemoryError")
    assert "ran out of memory in microbatches of 4, 2, 1." in raised
    assert told.startswith("DistributedError")
    assert "rank 1 raised OutOfMemoryError after AFTER_DATALOADER of batch 0" in told


def test_what_can_not_be_done_is_refused_at_the_call() -> None:
    with pytest.raises(ArgumentError, match='algorithm is called "microbatch_size"'):
        fit(limited(), batches(4), [pl.Algorithm("microbatch_size", {Event.BATCH_END: lambda state: state})],
            microbatch_size="auto")  # fmt: skip
    with pytest.raises(ArgumentTypeError, match=r"microbatch_size='Auto'.*\"auto\""):
        fit(limited(), batches(4), microbatch_size="Auto")


@examples(15, 300)
@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(FAILURES[:2]))
def test_the_largest_size_is_found_and_nothing_is_trained(samples: int, most: int, kind: str) -> None:
    model = limited(most, kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.adamw(lr=0.1)}
    calls.clear()
    assert pl.largest_microbatch(model, batches(samples), algorithms=[A.sam()], **settings) == min(samples, most)
    assert calls.count(samples) <= 2  # that of SAM, too
    equal(dict(model.state_dict()), before)
    assert model.training


def test_the_largest_size_of_a_state_is_that_of_its_next_batch() -> None:
    state = train(limited(), batches(2, 7), max_duration="1ba")
    settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
    assert pl.largest_microbatch(state, batches(2, 7), **settings) == 7
    assert pl.largest_microbatch(state.replace(stop=True), batches(2, 7), **settings) == 7
    assert pl.largest_microbatch(train(limited(), batches(2, 7)), batches(2, 7), **settings) == 2
    with pytest.raises(torch.OutOfMemoryError) as raised:
        pl.largest_microbatch(limited(0), batches(6), **settings)
    assert "ran out of memory in microbatches of 6, 3, 1." in "\n".join(raised.value.__notes__)
    with pytest.raises(TypeError, match="optimizer"):
        pl.largest_microbatch(limited(), batches(6), loss=functional.cross_entropy)  # type: ignore[call-arg]


def test_the_settings_of_fit_serve_the_largest_size_too() -> None:
    settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
    more = {"max_duration": "2ep", "microbatch_size": 2, "evaluators": batches(3), "donate": True, "compile": True}
    assert pl.largest_microbatch(limited(4), batches(9), **settings, **more) == 4
    with pytest.raises(TypeError, match="max_durations"):
        pl.largest_microbatch(limited(4), batches(9), **settings, max_durations="2ep")


@pytest.mark.slow
@pytest.mark.parametrize("most", [5, 0])
def test_the_largest_size_is_that_which_fits_on_all_ranks(most: int) -> None:
    def program(rank: int) -> Any:
        layer = nn.Linear(4, 3)
        layer.register_forward_pre_hook(lambda module, inputs: _refuse(len(inputs[0]), most if rank else 100))
        settings: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
        try:
            return pl.largest_microbatch(layer, batches(32), parallel="replicate", **settings)
        except (torch.OutOfMemoryError, DistributedError) as error:
            return f"{type(error).__name__}: {error}"

    first, second = pool().run(program)
    if most:
        assert (first, second) == (most, most)
    else:
        assert "rank 1 raised OutOfMemoryError after AFTER_DATALOADER of batch 0" in first
        assert second.startswith("OutOfMemoryError: CUDA out of memory")


def test_what_algorithms_compute_is_tried_too() -> None:
    """SAM runs the model a second time, at other weights, at AFTER_TRAIN_BATCH."""

    def refuse(module: nn.Module, inputs: Any) -> None:
        if not torch.equal(module.weight, first):
            _refuse(len(inputs[0]), 2)

    layer = nn.Linear(4, 3)
    first = layer.weight.detach().clone()
    layer.register_forward_pre_hook(refuse)
    options: dict[str, Any] = {"microbatch_size": "auto", "max_duration": "1ba"}
    assert "microbatch_size" not in train(layer, batches(8), **options).algorithm_state
    assert train(layer, batches(8), [A.sam()], **options).algorithm_state["microbatch_size"] == 2


@pytest.mark.slow
def test_sharded_ranks_are_refused() -> None:
    def program(rank: int) -> str:
        with pytest.raises(ArgumentError) as raised:
            fit(nn.Linear(4, 3), batches(8), microbatch_size="auto", parallel="shard")
        return str(raised.value)

    for message in pool().run(program):
        assert 'microbatch_size="auto" with parallel="shard"' in message


def test_explain_says_that_the_size_is_halved(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
    data = batches(8, 8)
    pl.explain(limited(), data, microbatch_size="auto", max_duration="1ep", **options)
    assert "the whole batch at once, halved where a batch runs out of memory" in capsys.readouterr().out
    state = train(limited(3), data, microbatch_size="auto", max_duration="1ba")
    pl.explain(state, data, microbatch_size="auto", max_duration="1ep", **options)
    assert "of at most 2 samples, halved where a batch runs out of memory" in capsys.readouterr().out
