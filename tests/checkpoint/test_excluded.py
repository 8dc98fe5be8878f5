"""What is excluded when a State is loaded begins anew with all that depends on it, once, under each of its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from pure_loop._internal.pytree import NAMESPACE
from pure_loop.frozendict import FrozenDict
from pure_loop.model.names import Note
from tests.support import problem
from tests.support.streams import assert_same, leaves

HEAD = ("head.weight", "head.bias")


class Net(nn.Module):
    def __init__(self, classes: int = 2, further: bool = False, tied: bool = False) -> None:
        super().__init__()
        with pl.random.seeded(classes):
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, classes)
            self.further = nn.Linear(3, 3) if further else None
            self.out = nn.Linear(3, 3, bias=False) if tied else None
        if self.out is not None:
            self.out.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for layer in (self.further, self.out):
            x = x if layer is None else layer(x)
        outputs: Tensor = self.head(x)
        return outputs


def fit(start: Any, batches: int, classes: int = 2, algorithms: Any = (), **options: Any) -> pl.Stream:
    generator = problem.noise(1)
    data = [(torch.randn(4, 3, generator=generator), torch.zeros(4, classes)) for _ in range(8)]
    settings = {"optimizer": pl.optim.adamw(lr=0.05), "evaluators": {"val": data[:1]}, "eval_interval": "1ba"}
    settings |= {"algorithms": list(algorithms), "loss": mse_loss, "strict": False, **options}
    return pl.fit(start, data, max_duration=f"{batches}ba", **settings)


def counting(state: pl.State) -> pl.State:
    return state.remember("steps", FrozenDict(count=state.algorithm_state["steps"]["count"] + 1))


def algorithms() -> list[pl.Algorithm]:
    return [
        A.swa("0ba", interval="1ba", evaluate=False),
        A.ema(half_life="2ba"),
        A.lookahead(interval=2),
        A.early_stopping("val/loss", patience=100),
        pl.Algorithm("steps", {Event.BATCH_END: counting}, init=lambda state: FrozenDict(count=0)),
    ]


ANEW = {"swa", "ema", "lookahead", "early_stopping"}


@pytest.mark.parametrize("further", [False, True], ids=["another head", "a further layer"])
def test_an_algorithm_begins_anew_whose_memory_holds_what_is_excluded(tmp_path: Path, further: bool) -> None:
    """Its memory becomes that of the same algorithm without a past; another algorithm's goes on."""
    path, classes = tmp_path / "x.safetensors", 2 if further else 3
    pl.save(pl.run(fit(Net(), 4, algorithms=algorithms())), path)
    state = pl.load(path, model=Net(classes, further), exclude=["further.*" if further else "head.*"])
    if not further:
        assert {*state.notes[0].begun_anew} == ANEW
        assert str(state.notes[0]).endswith("; algorithms that begin anew: swa, ema, lookahead, early_stopping")
        with pytest.raises(pl.errors.ArgumentError, match="no best parameters"):
            A.restored(state)
    end = pl.run(fit(state, 6, classes, algorithms()))
    steps = {name: memory for name, memory in state.algorithm_state.items() if name == "steps"}
    fresh = pl.run(fit(state.replace(algorithm_state=steps), 6, classes, algorithms()))
    assert {*end.notes[0].begun_anew} == ANEW
    assert_same(leaves(end.algorithm_state), leaves(fresh.algorithm_state), "algorithm state")
    assert int(end.algorithm_state["swa"]["count"]) == 2
    assert end.algorithm_state["steps"]["count"] == 6
    kept = A.restored(end)
    assert kept.params.keys() == end.params.keys()


def shrinking(state: pl.State) -> pl.State:
    memory = dict(state.algorithm_state["shrinking"])
    memory.pop(next(iter(memory), ""), None)
    return state.remember("shrinking", FrozenDict(memory))


def test_a_migrated_run_is_completed_once(tmp_path: Path) -> None:
    """A memory that has become smaller since resumes as it is, and no optimizer state is made again."""
    inits: list[int] = []

    def run(start: Any, batches: int) -> pl.State:
        sgd = pl.optim.sgd(lr=0.05, momentum=0.9)
        counted = attrs.evolve(sgd, init=lambda params: (inits.append(len(params)), sgd.init(params))[1])
        init = lambda state: FrozenDict(dict.fromkeys(HEAD, 1))  # noqa: E731
        algorithm = pl.Algorithm("shrinking", {Event.BATCH_END: shrinking}, init=init)
        return pl.run(fit(start, batches, 3, [algorithm], optimizer=counted))

    pl.save(pl.run(fit(Net(), 2, optimizer=pl.optim.sgd(lr=0.05, momentum=0.9))), tmp_path / "x.safetensors")
    start = pl.load(tmp_path / "x.safetensors", model=Net(3), exclude=["head.*"])
    whole, part = run(start, 4), run(start, 3)
    assert [*part.algorithm_state["shrinking"]] == [HEAD[1]]
    pl.save(part, tmp_path / "y.safetensors")
    inits.clear()
    again = run(pl.load(tmp_path / "y.safetensors", model=Net(3)), 4)
    assert_same(leaves(again.algorithm_state), leaves(whole.algorithm_state), "resumed")
    first = len(inits)
    inits.clear()
    run(part.replace(notes=()), 4)
    assert first == len(inits)


@pl.checkpoint.register(name="tests.Wrapped")
@attrs.frozen
class Wrapped:
    """An optimizer state in a record, in a tuple."""

    parts: tuple[Any]


def in_a_record(inner: pl.optim.Optimizer) -> pl.optim.Optimizer:
    def update(grads: Any, state: Wrapped, params: Any, timestamp: Any) -> tuple[Any, Wrapped]:
        params, result = inner.update(grads, state.parts[0], params, timestamp)
        return params, Wrapped((result,))

    return pl.optim.Optimizer(
        name="wrapped", init=lambda params: Wrapped((inner.init(params),)), update=update, lr=inner.lr
    )


def test_an_optimizer_state_in_a_record_is_completed(tmp_path: Path) -> None:
    """A parameter that is excluded was in none of Adam's steps, wherever its state is."""

    def end(optimizer: pl.optim.Optimizer) -> dict[str, Tensor]:
        pl.save(pl.run(fit(Net(), 3, optimizer=optimizer)), tmp_path / "x.safetensors")
        state = pl.load(tmp_path / "x.safetensors", model=Net(3), exclude=["head.*"])
        return dict(pl.run(fit(state, 5, 3, optimizer=optimizer)).params)

    adamw = pl.optim.adamw(lr=0.05)
    assert_same(end(in_a_record(adamw)), end(adamw), "in a record")


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("trained_only", [False, True])
def test_a_tied_weight_is_excluded_by_either_name(tmp_path: Path, weights_only: bool, trained_only: bool) -> None:
    path, saved, model = tmp_path / "x.safetensors", Net(3, tied=True), Net(3, tied=True)
    for net in (saved, model):
        net.body.weight.requires_grad_(not trained_only)
    other = torch.ones(3, 3)
    model.body.weight.data = other
    pl.save(pl.State.create(saved), path, trained_only=trained_only)
    one, two = (
        pl.load(path, model=model, weights_only=weights_only, exclude=[name]) for name in ("body.weight", "out.weight")
    )
    assert_same(leaves(two), leaves(one), "by the second name")
    assert [note.added for note in (*one.notes, *two.notes)] == [("body.weight",)] * 2
    assert torch.equal(two.params["body.weight"], other)
    assert torch.equal(two.params["head.weight"], saved.head.weight)


def test_weights_of_which_all_are_excluded(tmp_path: Path) -> None:
    pl.save(pl.State.create(Net()), tmp_path / "x.safetensors")
    with pytest.raises(pl.errors.ResumeError, match=r"nothing to load into Net: exclude= excludes all of its weights"):
        pl.load(tmp_path / "x.safetensors", model=Net(), weights_only=True, exclude="*")


def test_states_with_other_notes_match() -> None:
    """The result has the notes of the first one, as it has its static fields."""
    one = pl.State.create(Net())
    note = Note(source="x.safetensors", migrated=True, removed=("old",))
    two = one.replace(notes=(note,))
    for first, second in ((one, two), (two, one)):
        summed: Any = optree.tree_map(lambda a, b: a + b, first, second, namespace=NAMESPACE)
        assert summed.notes == first.notes
        assert torch.equal(summed.params["head.bias"], 2 * one.params["head.bias"])
        assert _pytree.tree_map(lambda a, b: a, first, second).notes == first.notes
