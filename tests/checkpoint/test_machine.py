"""One machine for a run and its checkpoints: it is left, stopped and killed, fails, its files are damaged, it resumes.

A run of 16 batches is compared with itself where nothing interrupts it, bit for bit. The model knows which files there
have to be, whole or damaged: :class:`Machine`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import fsspec
import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import container, paths
from pure_loop.checkpoint.storage import storage_of
from tests.support.checkpoint_runs import DATA, fit, messages, place, small
from tests.support.streams import assert_same, frozen_copy
from tests.support.tiers import examples

BATCHES = 16
# EPOCH_END is where an evaluation was not gone through to its end.
SAVED = (Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT)


def frozen() -> torch.nn.Module:
    model = small()
    model[0].requires_grad_(False)
    return model


@pl.algorithm(Event.BEFORE_DATALOADER)
def shift(state: pl.State) -> pl.State:
    """Doing it twice for one batch would show."""
    return state.replace(params={name: tensor * 0.96875 for name, tensor in state.params.items()})


# Each path of the step, and what is said of a batch before it is there.
RUNS: dict[str, dict[str, Any]] = {
    "all events": {},
    "no events": {"watch": set()},
    "donated": {"donate": True},
    "copied": {"donate": False},
    "strict": {"strict": True},
    "microbatches": {"microbatch_size": 2, "optimizer": pl.optim.adamw(lr=0.05)},
    "an algorithm before the load": {"algorithms": [shift]},
    "iterations": {"iteration_length": "1ep"},
    "adapters": {"start": frozen},
}


def stream(kind: str, data: Any = DATA, **options: Any) -> pl.Stream:
    settings = {"max_duration": "4ep", "clock": lambda: 0.0, "data": data, **RUNS[kind], **options}
    return fit(settings.pop("start", small)(), **settings)


@functools.cache
def reference(kind: str) -> dict[Any, dict[str, Any]]:
    """The States of a run that nothing interrupts, by the names of their checkpoints; the last one is ``""``."""
    found = {}
    for event, state in stream(kind, watch=None, donate=False):
        if event in SAVED:
            found[state.timestamp.epoch, state.timestamp.batch, event] = frozen_copy(state)
    return {**found, "": frozen_copy(state)}


class Data:
    """Four batches an epoch; before one of all something else happens. A run that resumes passes all again."""

    def __init__(self, at: int, instead: Any) -> None:
        self.epoch, self.at, self.instead = 0, at, instead

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        for number, batch in enumerate(DATA, epoch * len(DATA)):
            if number == self.at:
                self.instead()
            yield batch


class OddError(Exception):
    """Can be compared with nothing, so that it is told by what it is."""

    def __eq__(self, other: object) -> bool:
        raise AttributeError

    __hash__ = Exception.__hash__


def end(how: str) -> None:
    if how == "fails":
        raise OddError("no such file")
    signal.raise_signal(signal.SIGINT if how == "interrupted" else signal.SIGTERM)


ENDINGS: dict[str, tuple[type[BaseException], str]] = {
    "fails": (OddError, "OddError: no such file"),
    "stopped": (SystemExit, "SIGTERM"),
    "interrupted": (KeyboardInterrupt, "SIGINT"),
}


def parsed(name: str) -> tuple[int, int]:
    """Batch and epoch of a checkpoint."""
    found = re.fullmatch(r"ep(\d+)-ba(\d+)\.safetensors", name)
    assert found, name
    return int(found[2]), int(found[1])


class Machine(RuleBasedStateMachine):
    """
    Attributes:
        files: of each checkpoint in the folder whether it is whole (``"good"``), has another bit (``"flipped"``), or is
            shorter (``"cut"``), so that even its header tells of nothing.
        newest: the one that was saved last, if that is known.
        checked: the files that were compared with the reference, as they were then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.files: dict[str, str] = {}
        self.newest = ""
        self.checked: dict[str, Any] = {}

    def teardown(self) -> None:
        self.stack.close()

    @initialize(
        kind=st.sampled_from(sorted(RUNS)),
        where=st.sampled_from(["local", "local", "file", "memory"]),
        every=st.sampled_from(["1ba", "3ba", "1ep"]),
        keep=st.sampled_from([None, 1, 2, 3]),
        background=st.booleans(),
    )
    def begin(self, kind: str, where: str, every: str, keep: int | None, background: bool) -> None:
        self.kind, self.every, self.keep, self.local = kind, every, keep, where == "local"
        self.folder = self.stack.enter_context(place(where))
        self.options: Any = {"interval": every, "keep_last": keep, "background": background}
        self.options |= {"trained_only": kind == "adapters"}
        with fsspec.open(f"{self.folder}/mine.safetensors", "wb", auto_mkdir=True) as file:
            file.write(b"of another origin")

    @property
    def reached(self) -> int:
        """The batch that training resumes at."""
        return max((parsed(name)[0] for name, how in self.files.items() if how == "good"), default=0)

    def stream(self, *callbacks: Any, data: Any = DATA) -> pl.Stream:
        saver = CheckpointSaver(self.folder, **self.options)
        return stream(self.kind, data, callbacks=[*callbacks, saver], autoresume=self.folder)

    def ends(self, how: str, run: Any, at: int, ahead: int = 0, saved: bool = True) -> None:
        """The run ends so in this batch, having saved the State so many batches ahead, and says where that is."""
        kind, name = ENDINGS[how]
        with messages() as said, pytest.raises(kind):
            pl.run(run) if isinstance(run, pl.Stream) else run()
        last = f"ep{at // 4}-ba{at + ahead}.safetensors"
        self.saves(at, last if saved else None)
        if saved:
            says = f"{name}: the State of batch {at + ahead} is saved in {self.folder}/{last}: the same command resumes"
            assert f"{says} from it" in said

    def saves(self, until: int, last: str | None = None) -> None:
        """What a run is to do to the folder that trains until this batch is done, and saves ``last`` besides."""
        began = self.reached
        own = sorted((name for name, how in self.files.items() if how != "cut"), key=parsed)
        own = [name for name in own if parsed(name)[0] <= began]
        unit, length, due = self.every[-2:], int(self.every[:-2]), []
        ends = f"ep{began // 4}-ba{began}.safetensors"  # of an epoch, which is not over where it resumes before that
        epoch_is_over = began % 4 != 0 or began == 0 or self.files.get(ends) == "good"
        for batch in range(began + epoch_is_over, until + 1):
            if unit == "ba" and batch % length == 0 and batch > began:
                due.append(f"ep{(batch - 1) // 4}-ba{batch}.safetensors")
            if (unit == "ep" and batch % 4 == 0) or batch == BATCHES:
                due.append(f"ep{batch // 4}-ba{batch}.safetensors")
        for name in due if last is None else [*due, last]:
            self.newest = name
            own = [*(each for each in own if each != name), name]
            self.files[name] = "good"
            newest = list({parsed(each)[0]: each for each in own}.values())[-(self.keep or 99) :]
            for each in [each for each in own if each not in newest]:
                own.remove(each)
                del self.files[each]

    @rule()
    def to_its_end(self) -> None:
        last = pl.run(self.stream())
        self.saves(BATCHES)
        assert_same(last, reference(self.kind)[""], "the last State")

    @precondition(lambda self: self.reached < BATCHES)
    @rule(ahead=st.integers(0, 6), how=st.sampled_from(sorted(ENDINGS)))
    def ends_in_a_load(self, ahead: int, how: str) -> None:
        """The State of the last boundary is saved; not that which the run began with, unless it was told to stop."""
        at = min(self.reached + ahead, BATCHES - 1)
        saved = how != "fails" or at > self.reached
        self.ends(how, self.stream(data=Data(at, lambda: end(how))), at, saved=saved)

    @precondition(lambda self: self.reached < BATCHES and self.kind != "no events")
    @rule(ahead=st.integers(0, 6))
    def is_stopped_in_a_step(self, ahead: int) -> None:
        """The State of the next boundary is saved."""
        at = min(self.reached + ahead, BATCHES - 1)

        def stops(event: Event, state: pl.State) -> None:
            if event is Event.AFTER_LOSS and state.timestamp.batch == at:
                end("stopped")

        self.ends("stopped", self.stream(stops), at, ahead=1)

    @precondition(lambda self: self.reached < BATCHES - 4 and self.kind != "no events")
    @rule(how=st.sampled_from(sorted(ENDINGS)))
    def ends_in_an_evaluation(self, how: str) -> None:
        """It is not gone through to its end: the State before it is saved, and it takes place again."""
        at = self.reached // 4 * 4 + 4

        def ends(event: Event, state: pl.State) -> None:
            assert event is not Event.EVAL_END or state.timestamp.batch < at
            if event is Event.EVAL_BATCH_START and state.timestamp.batch == at:
                end(how)

        self.ends(how, self.stream(ends), at)

    @precondition(lambda self: self.reached < BATCHES and self.kind != "no events")
    @rule(
        ahead=st.integers(0, 6), event=st.sampled_from([Event.BEFORE_DATALOADER, Event.AFTER_LOSS]), told=st.booleans()
    )
    def is_left(self, ahead: int, event: Event, told: bool) -> None:
        """Nothing is saved then, unless a signal was held back: it comes again where the loop was left."""
        at, told = min(self.reached + ahead, BATCHES - 1), told and event is Event.BEFORE_DATALOADER

        def leave() -> None:
            for current, state in self.stream():
                if current is event and (state.timestamp.batch, state.timestamp.epoch) == (at, at // 4):
                    if told:
                        end("interrupted")
                    break
            time.sleep(20 * told)

        if told:
            self.ends("interrupted", leave, at)
            for sender in [thread for thread in threading.enumerate() if thread.name == "pure_loop-signal"]:
                sender.join(9)  # it may end a moment after its signal has come
        else:
            leave()
            self.saves(at)

    @precondition(lambda self: self.local and self.reached < BATCHES)
    @rule(moment=st.integers(1, 60))
    def is_killed(self, moment: int) -> None:
        """At one of the moments of its saves: what lies in the folder then is what the next run finds."""
        left, before = itertools.count(moment, -1), self.reached
        with tempfile.TemporaryDirectory() as there, pytest.MonkeyPatch.context() as patch:
            patch.setattr(paths, "_THIS_PROCESS", "0" * 8)
            for module, name in ((os, "fsync"), (os, "replace"), (container, "_put"), (os, "unlink")):

                def counted(*arguments: Any, real: Any, **options: Any) -> Any:
                    if next(left) == 0:
                        shutil.copytree(self.folder, f"{there}/run", symlinks=True)
                    return real(*arguments, **options)

                patch.setattr(module, name, functools.partial(counted, real=getattr(module, name)))
            pl.run(self.stream())
            if os.path.exists(f"{there}/run"):
                shutil.rmtree(self.folder)
                shutil.copytree(f"{there}/run", self.folder, symlinks=True)
        names = storage_of(self.folder).names()
        self.files = {name: self.files.get(name, "good") for name in names if name.startswith("ep")}
        for name in [name for name, how in self.files.items() if how != "good" and self.whole(name)]:
            self.files[name] = "good"  # which was saved again
        assert self.reached >= before, "the last complete one stays"
        self.newest = ""

    def whole(self, name: str) -> bool:
        with contextlib.suppress(pl.errors.CheckpointError):
            return pl.load(f"{self.folder}/{name}", model=RUNS[self.kind].get("start", small)()) is not None
        return False

    @precondition(lambda self: self.files)
    @rule(which=st.integers(0, 9), how=st.sampled_from(["flipped", "cut"]), place=st.integers(0, 200))
    def damage(self, which: int, how: str, place: int) -> None:
        name = sorted(self.files, key=parsed)[-1 - which % len(self.files)]
        if self.files[name] != "good":
            return
        with fsspec.open(f"{self.folder}/{name}", "rb") as file:
            content = bytearray(file.read())
        content[-1 - place] ^= 1 << place % 8
        with fsspec.open(f"{self.folder}/{name}", "wb") as file:
            file.write(content if how == "flipped" else content[: len(content) * place // 201])
        self.files[name] = how

    @precondition(lambda self: self.local and self.files)
    @rule(seconds=st.lists(st.integers(0, 1 << 33), min_size=1))
    def dates_are_wrong(self, seconds: list[int]) -> None:
        for name, date in zip(sorted(self.files), itertools.cycle(seconds)):
            os.utime(f"{self.folder}/{name}", (date, date))

    @invariant()
    def the_folder_is_as_it_has_to_be(self) -> None:
        if not hasattr(self, "kind"):
            return
        listed = [name for name in storage_of(self.folder).names() if name not in ("latest", "mine.safetensors")]
        assert {name for name in listed if not name.endswith(paths.LEFTOVER)} == self.files.keys()
        if self.local and self.newest:
            assert os.readlink(f"{self.folder}/latest") == self.newest
        with fsspec.open(f"{self.folder}/mine.safetensors", "rb") as file:
            assert file.read() == b"of another origin"
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("pure_loop")]
        newest = max((name for name, how in self.files.items() if how == "good"), key=parsed, default=None)
        with messages() as said:
            assert pl.latest_path(self.folder) == (None if newest is None else f"{self.folder}/{newest}")
        for name, how in self.files.items():
            path = f"{self.folder}/{name}"
            if how == "cut" or (how == "flipped" and (newest is None or parsed(name) > parsed(newest))):
                assert any(f"{path} is passed over" in each for each in said)
            stamp = storage_of(path).stamp() if self.local else None
            if stamp is None or self.checked.get(name) != (how, stamp):
                self.checked[name] = how, stamp
                self.check(name, path, how)

    def check(self, name: str, path: str, how: str) -> None:
        model = RUNS[self.kind].get("start", small)()
        if how != "good":
            with pytest.raises(pl.errors.CheckpointError, match=re.escape(path)):
                pl.load(path, model=model)
            return
        state = pl.load(path, model=model)
        batch, epoch = parsed(name)
        if state.event not in SAVED:  # saved before anything was trained
            assert state.event is Event.FIT_START
            return
        assert_same(state, reference(self.kind)[epoch, batch, state.event], path)


def test_a_run_and_its_checkpoints() -> None:
    settings = hypothesis.settings(examples(15, 500), stateful_step_count=8)
    with pytest.MonkeyPatch.context() as patch:
        clock = itertools.count(1 << 60, -(10**15))  # which goes back
        patch.setattr(time, "time_ns", lambda: next(clock))
        run_state_machine_as_test(Machine, settings=settings)
