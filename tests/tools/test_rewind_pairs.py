"""``pl.rewind``: random events of random runs come back, each leaf of the State bit for bit."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, note, reject
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithm import AlgorithmLike
from pure_loop.callbacks import FlightRecorder
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.ranges import settings_of
from pure_loop.testing._compositions import ALGORITHMS, built
from pure_loop.testing.case import Case
from pure_loop.testing.problems import as_problem
from pure_loop.testing.strategies import algorithms as compositions
from pure_loop.testing.strategies import cases, plans
from tests.support.served import required, served
from tests.support.streams import assert_same, frozen_copy
from tests.support.tiers import examples

# What comes before anything is kept, in each call of fit.
UNKEPT = {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD}
# How many pairs after the event are compared, too.
AFTER = 2

Item = tuple[Event, pl.Timestamp, dict[str, Any]]


@attrs.frozen
class Run:
    """All inputs of a recorded run.

    Attributes:
        case: plan, problem, precision and seed.
        algorithms: those of the run.
        is_shuffled: whether its batches come in another order in each epoch.
        keep, digest: of the recorder.
        resumes: ``"never"``; ``"appends"``: a recorder of the same folder records what was resumed; ``"begins"``: only
            what was resumed is recorded.
        cut: after how many batches the run resumes.
        beyond: how many batches were trained after those, and were lost.
        device: where it trains; None: fit chooses.
    """

    case: Case
    algorithms: AlgorithmLike
    is_shuffled: bool = False
    keep: str = "2ba"
    digest: Any = "1ba"
    resumes: str = "never"
    cut: int = 1
    beyond: int = 0
    device: str | None = None

    def arguments(self) -> tuple[Any, Any, dict[str, Any]]:
        data: Any = self.case.data()
        loader = DataLoader(data, batch_size=None, shuffle=True) if self.is_shuffled else data
        more = {"algorithms": self.algorithms, "device": self.device}
        return self.case.model(), loader, {**self.case.arguments(), **more}

    def stream(self, folder: str | None, **more: Any) -> Any:
        recorders = [] if folder is None else [FlightRecorder(folder, keep=self.keep, digest=self.digest)]
        model, data, arguments = self.arguments()
        return pl.fit(model, data, callbacks=recorders, **arguments, **more)

    def record(self, folder: str) -> list[Item]:
        """Train with a recorder; gives copies of the States of the run that nothing records."""
        # They are let go of, so that steps write in place where they may.
        pairs = ((event, state.timestamp, frozen_copy(state)) for event, state in self.stream(None))
        wanted = [item for item in pairs if item[0] not in UNKEPT]
        if self.resumes == "never":
            pl.run(self.stream(folder))
            return wanted
        path, cut = os.path.join(folder, "resumed.safetensors"), 0
        stream = self.stream(folder if self.resumes == "appends" else None)
        for event, state in stream:
            if event is Event.BATCH_CHECKPOINT and state.timestamp.batch <= self.cut:
                cut = state.timestamp.batch
                pl.save(state, path)
            if state.timestamp.batch > self.cut + self.beyond:
                break
        stream.close()
        pl.run(self.stream(folder, load_path=path))
        moments = [(event, now.batch) for event, now, _ in wanted]
        return wanted if self.resumes == "appends" else wanted[moments.index((Event.BATCH_CHECKPOINT, cut)) + 1 :]


def comes_back(run: Run, folder: str, recorded: list[Item], position: int, by_timestamp: bool = False) -> None:
    event, now, _ = recorded[position]
    before = [item for item in recorded[:position] if (item[0], item[1].batch) == (event, now.batch)]
    model, data, arguments = run.arguments()
    when = now if by_timestamp else f"{now.batch}ba"
    pairs = pl.rewind(folder, when, event.value, model, data, occurrence=len(before), **arguments)
    for wanted, timestamp, leaves in recorded[position : position + 1 + AFTER]:
        found, state = next(pairs)
        where = f"{event.name} of batch {now.batch}, at {found.name}"
        assert (found, state.timestamp.batch) == (wanted, timestamp.batch), where
        assert_same(state, leaves, where)
    if position + AFTER >= len(recorded) - 1:
        assert next(pairs, None) is None
    pairs.close()


def jitter(value: Any) -> Any:
    """Of a sample, or of the inputs of a whole batch."""
    if isinstance(value, torch.Tensor):
        return value + torch.rand(())
    return type(value)([jitter(value[0]), *value[1:]])


def serving(name: str) -> st.SearchStrategy[Any]:
    """An algorithm of the library with the problem that serves it."""
    factory = ALGORITHMS[name]
    needed = {key: st.just(value) for key, value in required(factory).items() if key not in settings_of(factory)}
    if name == "transform":
        needed["function"] = st.just(jitter)
    made = built(factory, **needed)
    if name == "progressive_resizing":  # not of targets, which are labels here, and no maps
        made = st.builds(factory, initial=st.sampled_from([0.5, 0.75]), mode=st.sampled_from(["crop", "resize"]))
    return st.tuples(made, st.just(as_problem(served(factory) or "mlp")))


COMPOSED = [
    st.tuples(compositions(problem=name), st.just(as_problem(name)))
    for name in ("mlp", "convolution", "tied", "transformer")
]
CHOSEN = st.one_of(st.one_of(COMPOSED), st.one_of([serving(name) for name in ALGORITHMS]))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    algorithms, problem = draw(CHOSEN)
    precisions = ("fp32", "fp32", "amp_bf16", "amp_fp16")
    case = draw(cases(problems=[problem], plans=plans(max_batches=8), precisions=precisions))
    if draw(st.integers(0, 3)) == 0:
        case = attrs.evolve(case, plan=attrs.evolve(case.plan, batches_per_step=2, batches_per_epoch=None))
    return Run(
        case,
        algorithms,
        is_shuffled=case.plan.sized and draw(st.booleans()),
        keep=draw(st.sampled_from(["1ba", "2ba", "3ba", "1ep"])),
        digest=draw(st.sampled_from(["1ba", "2ba", 0])),
        resumes=draw(st.sampled_from(["never", "never", "appends", "begins"])),
        cut=draw(st.integers(1, 6)),
        beyond=draw(st.integers(0, 2)),
    )


@examples(10, 200)
@given(run=runs(), data=st.data())
def test_events_of_random_runs_come_back(run: Run, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            recorded = run.record(folder)
        except pl.errors.ArgumentError:
            reject()  # what an algorithm needs, the length of the data for example, this run does not have
        for position in data.draw(st.lists(st.integers(0, len(recorded) - 1), min_size=5, max_size=5)):
            note(repr(recorded[position][:2]))
            comes_back(run, folder, recorded, position, data.draw(st.booleans()))


@pytest.mark.gpu
def test_events_of_a_run_on_a_gpu_come_back(tmp_path: Path) -> None:
    evaluators = {"val": EvaluatorPlan(batches=(2,), interval="2ba")}
    plan = Plan(batches=(4, 2, 3), max_duration="2ep", microbatch_size=2, evaluators=evaluators)
    algorithms = pl.compose(pl.algorithms.ema(half_life="2ba"), pl.algorithms.sam(), pl.algorithms.gradient_noise())
    case = Case(plan=plan, problem="mlp", precision="amp_bf16")
    run = Run(case, algorithms, is_shuffled=True, resumes="appends", cut=3, beyond=1, device="cuda")
    recorded = run.record(str(tmp_path))
    # On a GPU losses wait for a digest; all are in the journal where the run has ended.
    assert (tmp_path / "journal.jsonl").read_text().count('"batch"') >= 6
    for position in range(0, len(recorded), 5):
        comes_back(run, str(tmp_path), recorded, position)
