"""Any optimizer of torch's as one of ours: the class by hand, and resumed bit for bit, whatever the class keeps."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event, schedules
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.optim import Optimizer, from_torch, partition
from pure_loop.time import Timestamp
from tests.support import problem, scripted
from tests.support.optimizing import assert_same, batches, by_hand, ours, tensors
from tests.support.scripted import Grows, Scripted
from tests.support.tiers import examples


def test_a_class_that_writes_to_gradients_with_other_kernels_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writes(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"] if self.defaults["foreach"] else ():
                param.grad.mul_(2)
            super().step()

    monkeypatch.setattr(Writes, "__module__", "torch.optim.writes")
    assert from_torch(Writes).overwrite is None
    assert from_torch(Writes, foreach=False).overwrite is not None


def test_runs_in_threads_at_one_time_leave_nothing_behind_for_each_other() -> None:
    """One optimizer, whose class writes to what it keeps, for several parameters."""
    mine = from_torch(Scripted, script=((1, 9, "attribute", "tensor in place"), (2, 9, "group", "list")), alias=True)
    each = [(mine, tensors(seed, torch.float64), batches(seed, torch.float64, 5)) for seed in range(3)]
    wanted = [ours(*some) for some in each]
    with ThreadPoolExecutor(len(each)) as threads:
        assert_same(list(threads.map(ours, *zip(*each, strict=True))), wanted)


# Runs


BATCHES = 5
DATA = problem.points(BATCHES)
LR = schedules.linear(0.05, 0.01, f"{BATCHES}ba")
Part = tuple[Any, dict[str, Any], Any]
"""A class, its options, and a schedule or None."""


def fit(start: Any, optimizer: Any, **options: Any) -> Any:
    return problem.fit(start, DATA, optimizer=optimizer, **{"max_duration": "1ep", "strict": False, **options})


def ends(start: Any, optimizer: Any, **options: Any) -> list[pl.State]:
    return [state for event, state in fit(start, optimizer, **options) if event is Event.BATCH_END]


def check(parts: list[Part], point: int, where: Sequence[int] = (), **options: Any) -> list[pl.State]:
    """Training is the classes by hand, and so it is from a State, from a file of it, and by autoresume."""
    module = problem.mlp()
    labels = dict(zip(dict(module.named_parameters()), where or [0] * 4, strict=True))
    named_params, count = list(module.named_parameters()), len(parts)
    groups = [[p for name, p in named_params if labels[name] % count == number] for number in range(count)]
    used = [(cls(group, **given), lr) for group, (cls, given, lr) in zip(groups, parts, strict=True) if group]
    (*_, wanted) = by_hand(module, [hand for hand, _ in used], DATA, [lr for _, lr in used])

    def make() -> Optimizer:
        options = [{**given, **({} if lr is None else {"lr": lr})} for _, given, lr in parts]
        made = {str(n): from_torch(parts[n][0], **options[n]) for n in range(count)}
        label = lambda name, tensor: str(labels[name] % count)  # noqa: E731
        return partition(made, label) if len(parts) > 1 else made["0"]

    kept = ends(None, make(), **options)
    problem.close(kept[-1].params, wanted, 0.0)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        pl.save(kept[point], path)
        starts: list[tuple[Any, dict[str, Any]]] = [(kept[point], {}), (pl.load(path, model=problem.mlp()), {})]
        starts += [(None, {"load_path": path}), (None, {"autoresume": folder})]
        for start, more in starts:
            problem.close(pl.run(fit(start, make(), **options, **more)).params, wanted, 0.0)
    return kept


class Custom:
    pass


class Plain(torch.optim.Optimizer):
    """It refers to parameters, functions, loggers and settings that never change: nothing of it is kept.

    Each step puts equal values in the places of its options.
    """

    def __init__(self, params: Any, lr: float = 0.1, betas: Any = (0.5, 0.5)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})
        self.listed, self.log, self.made = list(self.param_groups[0]["params"]), logging.getLogger("x"), Custom()
        self.scale = lambda: 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["betas"] = (*group["betas"],)
        for param in self.listed:
            param.sub_(param.grad, alpha=group["lr"] * self.scale() * group["betas"][0])


def test_classes_resume() -> None:
    """What grows, is removed, draws, or stands in two places; and values of each kind, from the first step or later."""
    torch.manual_seed(1)  # global generators don't matter
    drawn = check([(Scripted, {"draws": True}, None)], 1)
    other = ends(None, from_torch(Scripted, draws=True), seed=1)
    assert not torch.equal(other[-1].params["0.bias"], drawn[-1].params["0.bias"])
    for point, way in ((0, {}), (1, {"strict": True}), (4, {"watch": {Event.BATCH_END}})):
        check([(Grows, {}, None)], point, **way)
    for point in range(4):
        check([(Scripted, {"alias": point == 2}, None)], point)
    for number, kind in enumerate(scripted.KINDS):
        places = [scripted.PLACES[(number + shift) % 4] for shift in (0, 1)]
        script = tuple((first, 4, place, kind) for first, place in zip((1, 2), places, strict=True))
        check([(Scripted, {"script": script}, None)], number % 4)
    # A copy of ``listed`` would be updated in the place of the parameters; options are those of the call that resumes.
    plain = check([(Plain, {}, None)], 1)
    assert not plain[-1].opt_state["attributes"]
    assert not plain[-1].opt_state["group"]
    problem.close(ends(plain[3], from_torch(Plain, betas=(0.0, 0.5)))[-1].params, plain[3].params, 0.0)


step = st.integers(1, BATCHES)
kinds = st.sampled_from(sorted(scripted.KINDS))
writes = st.lists(st.tuples(step, step, st.sampled_from(scripted.PLACES), kinds), max_size=4)
dense = ("AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adafactor", "Adadelta", "Adamax", "ASGD", "Rprop")


@st.composite
def drawn_parts(draw: st.DrawFn) -> Part:
    lr = draw(st.sampled_from([None, LR]))
    if draw(st.booleans()):
        return getattr(torch.optim, draw(st.sampled_from(dense))), {}, lr
    options = {"script": tuple(draw(writes)), "draws": draw(st.booleans()), "alias": draw(st.booleans())}
    return draw(st.sampled_from([(Scripted, options, lr), (Grows, {}, lr)]))


@examples(8, 150)
@given(
    parts=st.lists(drawn_parts(), min_size=1, max_size=3),
    where=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    point=st.integers(0, BATCHES - 1),
    options=st.sampled_from([{}, {"donate": False}, {"watch": {Event.BATCH_END, Event.BATCH_CHECKPOINT}}]),
)
def test_what_a_class_keeps_resumes(parts: Any, where: list[int], point: int, options: dict[str, Any]) -> None:
    """Property: whatever classes write, where and when, training is these by hand, and resumes at any batch."""
    check(parts, point, where, **options)


class Late(torch.optim.Optimizer):
    """What can't be kept comes in the fourth step, after every trial."""

    calls = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls == 4:
            self.projector = Custom()


def test_what_comes_later_is_refused_then() -> None:
    assert math.isnan(from_torch(Late).lr(Timestamp()))
    states = []
    with pytest.raises(ArgumentError, match=r"self\.projector is a .*Custom"):
        states.extend(state for event, state in fit(None, from_torch(Late)) if event is Event.BATCH_END)
    assert len(states) == 3


def test_an_init_that_reads_numbers_resumes() -> None:
    """An optimizer of the user's own: ``init`` was called on the meta device, where there are none."""

    def init(params: Any) -> Any:
        return pl.FrozenDict(norms=pl.FrozenDict({name: float(p.norm()) for name, p in params.items()}))

    def update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        moved = {name: p - 0.1 * memory["norms"][name] * grads[name] for name, p in params.items()}
        return pl.FrozenDict(moved), memory

    own = Optimizer(name="own", init=init, update=update, lr=lambda timestamp: 0.1)
    kept = ends(None, own)
    problem.close(ends(kept[1], own)[-1].params, kept[-1].params, 0.0)
    with pytest.raises(ResumeError, match="another optimizer than adamw"):
        fit(kept[1], pl.optim.adamw(lr=0.1))


@pytest.mark.usefixtures("interpreted")
def test_classes_are_traced_or_run_between_graphs() -> None:
    """In a graph, too, what a class keeps are tensors, of a class of torch's own."""
    for name in ("RMSprop", "Rprop"):
        optimizer = from_torch(getattr(torch.optim, name), lr=0.01)
        eager, compiled = (pl.run(fit(None, optimizer, watch={Event.BATCH_END}, compile=c)) for c in (False, True))
        torch.testing.assert_close(dict(eager.params), dict(compiled.params))
    with pytest.raises(pl.errors.CompileError, match=r"Adafactor.* can't be compiled.*where possible"):
        pl.run(fit(None, from_torch(torch.optim.Adafactor, lr=LR), compile=True))


def test_sparse_gradients_make_a_memory_that_is_sparse() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 3))
    data = [(torch.tensor([[i, 1], [4, i]]), torch.tensor([0, 2])) for i in range(3)]
    hand = copy.deepcopy(model)
    optimizer = torch.optim.SGD(hand.parameters(), lr=0.1, momentum=0.9)
    for x, y in data * 2:
        optimizer.zero_grad()
        problem.cross_entropy(hand(x), y).backward()
        optimizer.step()
    for donate in (True, False):
        mine = from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
        state = problem.run(model, data, optimizer=mine, donate=donate, strict=False)
        problem.close(dict(state.params), dict(hand.named_parameters()), 0)
