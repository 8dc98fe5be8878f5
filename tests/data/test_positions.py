"""Streams resume from their own state: no batch is lost or repeated, and nothing is read again but one batch."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import pure_loop as pl
from pure_loop import Event
from pure_loop.data import tokens
from pure_loop.data.position import Position, digest_of
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError, ResumeError
from pure_loop.testing import CheckFailed, check_positions
from tests.conftest import THOROUGH
from tests.support import sources
from tests.support.sources import BATCH, IN_WORKERS, MORE, READ, READ_AHEAD, SAMPLES, SOURCES, Lines, Stateful, collate
from tests.support.streams import assert_same
from tests.support.tiers import examples

# webdataset leaves shards open that were not read to their ends.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
)

mse = nn.functional.mse_loss
A_PASS = SAMPLES // BATCH
EVERY = {**SOURCES, **MORE}
# 1,000 stops over the eight in the thorough tier.
STOPS = 125 if THOROUGH else 5


@pytest.fixture(autouse=True)
def nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_registered", {})


def training(
    start: Any, data: Any, duration: str = "2ep", **options: Any
) -> tuple[list[Any], dict[int, pl.State], Any]:
    """The samples of each batch, the State after each, and the last State."""
    seen, kept = [], {}
    options = {"loss": mse, "optimizer": pl.optim.sgd(lr=1e-6), "max_duration": duration, **options}
    for event, state in pl.fit(start, data, **options):
        if event is Event.AFTER_DATALOADER:
            parts = [state.batch] if not isinstance(state.batch, pl.Batches) else state.batch
            seen.append([value for part in parts for value in part[0].flatten().tolist()])
        if event is Event.BATCH_CHECKPOINT:
            kept[state.timestamp.batch] = state
    return seen, kept, state


def linear() -> nn.Module:
    with pl.random.seeded(0):
        return nn.Linear(1, 1)


# The law.


OPTIONS = [{}, {"batches_per_epoch": 7, "epochs": 3}, {"batches_per_step": 4}]
OPTIONS += [{"batches_per_epoch": 3, "batches_per_step": 4, "epochs": 4}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", [name for name in EVERY if THOROUGH or "workers" not in name])
def test_resuming_from_any_batch_gives_what_followed(name: str, options: dict[str, int]) -> None:
    if name == "iterator":
        options = {**options, "epochs": 1}
    assert check_positions(EVERY[name], max_examples=STOPS, **options).ok


@pytest.mark.slow  # two processes for each stop
@pytest.mark.parametrize("name", [name for name in EVERY if "workers" in name])
def test_workers_change_nothing(name: str) -> None:
    assert check_positions(EVERY[name], max_examples=STOPS).ok


IN_PROCESS = sorted(SOURCES.keys() - IN_WORKERS - READ_AHEAD)


@examples(fast=20, thorough=150)
@given(
    st.sampled_from(IN_PROCESS),
    st.integers(1, 2 * A_PASS - 1),
    st.sampled_from([{}, {"batches_per_epoch": 7}, {"batches_per_step": 4}]),
)
def test_a_run_that_resumes_from_a_file_reads_what_is_needed(
    tmp_path_factory: pytest.TempPathFactory, name: str, stop: int, options: dict[str, int]
) -> None:
    make, per_step = SOURCES[name], options.get("batches_per_step", 1)
    stop = -(-stop // per_step)
    seen, kept, last = training(linear(), make(), **options)
    if stop >= len(seen):
        return
    path = tmp_path_factory.mktemp("run") / "state.safetensors"
    pl.save(kept[stop], path)
    READ[0] = 0
    rest, _, resumed = training(pl.load(path, model=linear()), make(), **options)
    assert rest == seen[stop:]
    assert_same(resumed, last, name)
    needed = sum(map(len, rest))
    # Before a second pass a source looks at the first batch of each of two, whether set_epoch tells them apart.
    looked_at = 4 * BATCH if name == "hugging face" else 0
    assert READ[0] <= needed + BATCH + looked_at


# The slow one waits for a compiler.
@pytest.mark.parametrize("options", [{"microbatch_size": 2}, pytest.param({"compile": True}, marks=pytest.mark.slow)])
def test_steps_that_load_ahead_keep_the_position_of_the_last_batch(options: dict[str, Any]) -> None:
    seen, kept, last = training(linear(), SOURCES["stateful"](), **options)
    *_, ended = training(linear(), SOURCES["stateful"](), "11ba", **options)
    assert ended.data == kept[11].data
    assert ended.data.batch == 10
    for start in (kept[11], ended):
        rest, _, resumed = training(start, SOURCES["stateful"](), **options)
        assert rest == seen[11:]
        assert_same(resumed, last, "resumed")


# Deliberately wrong data: the law of each fault has its name.


class Ahead(Stateful):
    """Its state is that of the next sample."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at + 1}


class Repeating(Stateful):
    """Goes back to the beginning of a shard."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"] // 7 * 7


class Buffered(Stateful):
    """Shuffles in a buffer that its state doesn't hold."""

    def __iter__(self) -> Iterator[Any]:
        numbers, buffer = random.Random(0), []
        for item in super().__iter__():
            buffer.append(item)
            if len(buffer) == 20:
                yield buffer.pop(numbers.randrange(20))
        yield from buffer


class OfTheEpoch(Stateful):
    """Its state says in which pass it is, and not where in it."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Failing(Stateful):
    """Has methods of these names, which serve another purpose."""

    def state_dict(self) -> Any:
        raise AttributeError("no state here")


class OfTheTime(Stateful):
    """Another order in each process."""

    def __iter__(self) -> Iterator[Any]:
        items = list(super().__iter__())
        random.Random(os.urandom(8)).shuffle(items)
        return iter(items)


class Unwritable(Stateful):
    """Its state is no value."""

    def state_dict(self) -> Any:
        return {"at": self.at, "file": iter(())}


def loader(dataset: type[Any]) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(dataset(), BATCH, collate_fn=collate)


WRONG = {
    "ahead": (loader(Ahead), "resumption", "does not give what followed"),
    "repeating": (loader(Repeating), "resumption", "does not give what followed"),
    "buffered": (loader(Buffered), "has_position", "is the same after a batch as before it"),
    "of the epoch": (loader(OfTheEpoch), "has_position", "is the same after a batch as before it"),
    "of the time": (loader(OfTheTime), "repeats", "a second dataloader is another one"),
    "unwritable": (loader(Unwritable), "has_position", r"token\['file'\], a tuple_iterator"),
    "no state": (loader(Lines), "has_position", r"Lines has no state_dict\(\)"),
    "workers": (
        lambda: DataLoader(Stateful(), BATCH, collate_fn=collate, num_workers=1, multiprocessing_context="fork"),
        *("has_position", "use torchdata's StatefulDataLoader"),
    ),
    "noise in workers": (
        lambda: sources.torchdata(sources.Noisy, num_workers=1, multiprocessing_context="fork"),
        *("resumption", "does not give what followed"),
    ),
    "hugging face": (lambda: sources.hugging_face(20), "has_position", "does not hold its shuffle buffer"),
    "webdataset": (lambda: sources.web_dataset(20), "has_position", "the stage 'shuffle' of the webdataset pipeline"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_source_that_breaks_a_law_is_found_by_name(name: str) -> None:
    make, law, text = WRONG[name]
    with pytest.raises(CheckFailed, match=text.replace(" ", r"\s+")) as failed:
        check_positions(make)
    assert [outcome.law for outcome in failed.value.report.failures] == [law]


def test_a_library_that_goes_to_another_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = tokens.Tokens.begin
    monkeypatch.setattr(Position, "compare", lambda *_: None)
    monkeypatch.setattr(tokens.Tokens, "begin", lambda self, token, number, *, at: begin(self, None, number, at=False))
    with pytest.raises(CheckFailed, match=r"[1-9]\d* of those before\s+come\s+again") as failed:
        check_positions(loader(Stateful))
    assert [outcome.law for outcome in failed.value.report.failures] == ["resumption"]


NONE = ["no state", "hugging face", "webdataset", "of the epoch", "unwritable", "failing"]


@pytest.mark.parametrize("name", NONE)
def test_data_without_a_position_is_read_again(name: str) -> None:
    make = loader(Failing) if name == "failing" else WRONG[name][0]
    seen, kept, last = training(linear(), make())
    for batch in (1, 9, A_PASS + 1):
        assert kept[batch].data is None
        rest, _, resumed = training(kept[batch], make())
        assert rest == seen[batch:]
        assert_same(resumed, last, name)


@pytest.mark.parametrize("name", [name for name in EVERY if not {"workers", "iterator", "loader"} & {*name.split()}])
def test_the_data_itself_stays_as_it_was_and_a_run_that_resumed_resumes(name: str) -> None:
    data = EVERY[name]()
    seen, kept, last = training(linear(), data)
    stops = [1, 9, A_PASS - 1, A_PASS, A_PASS + 1]
    for stop, following in itertools.pairwise(stops):
        rest, again, resumed = training(kept[stop], data)
        assert rest == seen[stop:]
        assert_same(resumed, last, name)
        rest, _, resumed = training(again[following], data)
        assert rest == seen[following:]
        assert_same(resumed, last, name)
    assert training(linear(), data)[0] == seen


def test_a_registered_state_that_is_no_value_is_refused() -> None:
    pl.data.register_position(Lines, get=lambda lines: iter(()), put=lambda lines, token: None)
    with pytest.raises(CheckFailed, match=r"Lines has token, a\s+tuple_iterator") as failed:
        check_positions(loader(Lines))
    assert [outcome.law for outcome in failed.value.report.failures] == ["is_value"]


# Where a position is not believed.


def test_a_token_of_another_source_or_version_is_refused() -> None:
    _, kept, _ = training(linear(), loader(Stateful)(), "9ba")
    for data, name in ((loader(Repeating)(), "Repeating"), ([(torch.ones(1, 1), torch.ones(1, 1))], "list")):
        with pytest.raises(
            ResumeError, match=rf"a position of Stateful, and the train dataloader is .*{name}.*data=None"
        ):
            training(kept[9], data)
    end = training(linear(), loader(Stateful)(), "1ep")[2]
    assert len(training(end, [(torch.ones(1, 1), torch.ones(1, 1))])[0]) == 1  # the epoch was over
    with pytest.raises(ArgumentTypeError, match=r"state\.data is where the data stands"):
        training(kept[9].replace(data="batch 9"), loader(Stateful)())
    with pytest.raises(ResumeError, match="steps of 1 batches, and batches_per_step is 2"):
        training(kept[9], loader(Stateful)(), batches_per_step=2)
    older = kept[9].replace(data=attrs.evolve(kept[9].data, source="Stateful 0.1"))
    with pytest.raises(ResumeError, match=r"a position of Stateful 0\.1.*the version that wrote it"):
        training(older, loader(Stateful)())


def test_data_that_has_changed_is_refused_and_read_again_where_that_is_asked_for() -> None:
    seen, kept, last = training(linear(), loader(Ahead)())
    with pytest.raises(ResumeError, match=r"which is not the batch that was trained on.*the state of Ahead"):
        training(kept[9], loader(Ahead)())
    pl.data.register_position(Ahead, get=None, put=None)
    for start in (kept[9], kept[9].replace(data=None)):
        rest, _, resumed = training(start, loader(Ahead)())
        assert rest == seen[9:]
        assert_same(resumed, last.replace(data=None), "read again")
    sizes = DataLoader(Stateful(), BATCH + 1, collate_fn=collate)
    _, kept, _ = training(linear(), loader(Stateful)())
    with pytest.raises(ResumeError, match="the batch size or the collate function has changed"):
        training(kept[9], sizes)


def sizes(make: Callable[[], Any]) -> list[int]:
    return [len(batch) for batch in training(linear(), make(), "1ep")[0]]


def test_samplers_of_a_stateful_dataloader_stay_what_they_are() -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    table = sources.Table()
    batches = lambda sampler: module.BatchSampler(sampler, 7, True)  # noqa: E731
    for sampler, kind in ((module.RandomSampler(table), module.RandomSampler), (range(SAMPLES), range)):
        stateful = partial(sources.torchdata, sources.Table, batch_size=1, batch_sampler=batches(sampler))
        assert sizes(stateful) == [7] * (SAMPLES // 7), kind
        assert sizes(partial(sources.torchdata, sources.Table, sampler=sampler)) == [BATCH] * A_PASS


UNLIKE = {
    "a border": lambda i: torch.nn.functional.pad(torch.full((256, 3, 62, 62), float(i)), (1, 1, 1, 1)),
    "equal first tokens": lambda i: torch.cat([torch.ones(1024, 1), torch.full((1024, 1023), 1.0 + i)], 1),
    "packed": lambda i: nn.utils.rnn.pack_sequence([torch.full((3,), float(i)), torch.ones(2)]),
    "a subclass": lambda i: torch.full((3,), float(i)).as_subclass(type("Image", (torch.Tensor,), {})),
    "sparse": lambda i: torch.eye(3).mul(i + 1).to_sparse(),
    "texts": lambda i: ["a", str(i)],
    "arrays": lambda i: {"x": torch.full((2,), i).numpy()},
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_digest_tells_unlike_batches_apart(name: str) -> None:
    make = UNLIKE[name]
    assert digest_of(make(0)) == digest_of(make(0))
    assert digest_of(make(0)) != digest_of(make(1))


def test_another_seed_reads_the_epoch_again_in_its_own_way() -> None:
    _, kept, _ = training(linear(), loader(Stateful)())
    READ[0] = 0
    training(kept[9].replace(seed=5), loader(Stateful)(), "1ep")
    assert READ[0] == SAMPLES


# Classes of one's own.


class Numbered:
    """A dataloader of one's own, which has no methods."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < A_PASS:
            self.at += 1
            yield collate([sources.read(self.at)])
        self.at = 0


def _go(numbered: Numbered, at: int) -> None:
    numbered.at = at


def _iterate(numbered: Numbered, at: int) -> Iterator[Any]:
    numbered.at = at
    return iter(numbered)


WAYS = {
    "put changes it": (lambda numbered: numbered.at, _go),
    "put returns an iterator": (lambda numbered, iterator: numbered.at, _iterate),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_class_is_registered_with_its_subclasses(way: str) -> None:
    get, put = WAYS[way]
    pl.data.register_position(Numbered, get=get, put=put)
    assert check_positions(type("Sub", (Numbered,), {}), epochs=1).ok
    pl.data.register_position(Lines, get=lambda lines: lines.at, put=lambda lines, at: setattr(lines, "at", at))
    assert check_positions(loader(Lines)).ok


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((Numbered(), len, len), ArgumentTypeError, "the first argument is a class"),
        ((Numbered, 3, len), ArgumentTypeError, r"get=3\): give a function"),
        ((Numbered, len, None), ArgumentError, "takes two functions"),
    ],
)
def test_what_is_registered_is_a_class_and_two_functions(arguments: Any, error: type[Exception], text: str) -> None:
    cls, get, put = arguments
    with pytest.raises(error, match=text):
        pl.data.register_position(cls, get=get, put=put)


def test_an_error_of_the_state_says_where_it_comes_from() -> None:
    def fails(numbered: Numbered) -> None:
        raise KeyError("offset")

    pl.data.register_position(Numbered, get=fails, put=_go)
    with pytest.raises(KeyError) as failed:
        training(linear(), Numbered())
    assert "where Numbered stands, from which fit resumes" in failed.value.__notes__[0]
    pl.data.register_position(Unwritable, get=Unwritable.state_dict, put=Unwritable.load_state_dict)
    with pytest.raises(DataError, match=r"the position of Unwritable has token\['file'\]"):
        training(linear(), loader(Unwritable)())


def test_state_dicts_that_take_arguments_are_another_protocol() -> None:
    def state_dict(self: Any, samples: int) -> dict[str, int]:
        return {"at": samples}

    other = type("Counting", (Stateful,), {"state_dict": state_dict})
    assert training(linear(), loader(other)(), "3ba")[2].data is None
