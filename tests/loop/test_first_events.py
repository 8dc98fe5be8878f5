"""By default ``fit`` sees to it that nothing changes a State in place, in two batches and at the first event of a kind.

Tried: algorithms, callbacks, loggers, the loop's body, a forward, a loss; tensors of each field, large and small,
arrays of NumPy and containers of a batch; eager, compiled, watched, donated, verified and resumed runs; ``evaluate``,
``predict``, ``drive`` and ``rehearse``; a handler whose ``when`` comes round late.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.bits import digest
from pure_loop.compile import interpreted
from pure_loop.loop.strict import Strict
from pure_loop.random import seeded
from tests.support import problem
from tests.support.problem import cross_entropy, mlp, points
from tests.support.tiers import examples

DATA = points(4)
IN_BATCH = [
    *(Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD, Event.AFTER_FORWARD),
    *(Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH),
    *(Event.BATCH_END, Event.BATCH_CHECKPOINT),
]
OTHERS = [
    *(Event.INIT, Event.AFTER_LOAD, Event.FIT_START, Event.EPOCH_START, Event.EPOCH_END, Event.EPOCH_CHECKPOINT),
    *(Event.EVAL_BEFORE_ALL, Event.EVAL_START, Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD, Event.FIT_END),
    *(Event.EVAL_AFTER_FORWARD, Event.EVAL_BATCH_END, Event.EVAL_END, Event.EVAL_AFTER_ALL, Event.ITERATION_START),
    *(Event.ITERATION_END, Event.ITERATION_CHECKPOINT),
]
COUNTED = (Event.BATCH_END, Event.BATCH_CHECKPOINT)
LEAVES: dict[str, Callable[[pl.State], Tensor]] = {
    "state.params['0.weight']": lambda state: state.params["0.weight"],
    "state.params['2.bias']": lambda state: state.params["2.bias"],
    "state.buffers['1.running_mean']": lambda state: state.buffers["1.running_mean"],
    "state.algorithm_state['keeps']": lambda state: state.algorithm_state["keeps"],
}
AUTHORS = ["algorithm 'writer'", "callback act", "callback Recorder", "the loop's body"]
KEEPS = pl.Algorithm("keeps", {Event.FIT_START: lambda state: state}, init=lambda state: torch.zeros(3))


def network() -> nn.Module:
    """The first weight is large enough to be summed."""
    with seeded(0):
        return nn.Sequential(nn.Linear(4, 4200), nn.BatchNorm1d(4200), nn.Linear(4200, 3))


def fit(model: Any = None, data: Any = DATA, **options: Any) -> Any:
    plain = {"optimizer": pl.optim.adamw(lr=0.1), "strict": None}
    return problem.fit(network() if model is None else model, data, **plain | options)


def refused(stream: Any, says: str) -> None:
    with pytest.raises(pl.ImpurityError, match=f"^{says}"):
        pl.run(stream)


class Authored:
    """What writes once, at an event of a batch."""

    def __init__(self, author: str, event: Event, batch: int = 0, leaf: str = "state.params['2.bias']", place: int = 1):
        self.author, self.event, self.batch, self.leaf, self.place = author, event, batch, leaf, place
        self.wrote = False

    def act(self, event: Event, state: pl.State) -> None:
        batch = state.timestamp.batch - (event in COUNTED)
        if event is self.event and (event not in IN_BATCH or batch == self.batch) and not self.wrote:
            self.wrote = True
            tensor = LEAVES[self.leaf](state).detach().view(-1)
            tensor[self.place % tensor.numel()] += 1

    def handle(self, state: pl.State) -> pl.State:
        self.act(state.event, state)
        return state

    def error(self, **options: Any) -> pl.ImpurityError | None:
        """The error of a run in which it writes."""
        more: dict[str, Any] = {"algorithms": [KEEPS]}
        if self.author == "algorithm 'writer'":
            more["algorithms"] = [KEEPS, pl.Algorithm("writer", {self.event: self.handle})]
        elif self.author == "callback act":
            more["callbacks"] = [self.act]
        elif self.author == "callback Recorder":
            more["loggers"] = [Recorder(self)]
        try:
            for event, state in fit(evaluators=DATA[:2], iteration_length="1ep", **more, **options):
                if self.author == "the loop's body":
                    self.act(event, state)
        except pl.ImpurityError as error:
            return error
        return None


class Recorder(pl.Logger):
    def __init__(self, authored: Authored) -> None:
        self.authored = authored

    def run_event(self, event: Event, state: pl.State, logger: Any) -> None:
        self.authored.act(event, state)


def check_named(authored: Authored, **options: Any) -> None:
    if authored.event in (Event.INIT, Event.BEFORE_LOAD) and "keeps" in authored.leaf:
        authored.event = Event.FIT_START
    error = authored.error(**options)
    assert authored.wrote
    text = f"{authored.author} changed {authored.leaf} in place, at or after {authored.event.name}:"
    assert str(error).startswith(text), (str(error), text)


WAYS: list[dict[str, Any]] = [{}, {}, {"donate": True}, {"verify": "1ba"}, {"microbatch_size": 2}, {"watch": "its"}]


@examples(15, 400)
@given(
    st.builds(
        Authored,
        st.sampled_from(AUTHORS),
        st.sampled_from([*IN_BATCH, *OTHERS]),
        st.integers(0, 1),
        st.sampled_from(list(LEAVES)),
        st.integers(0, 10**6),
    ),
    st.sampled_from(WAYS),
)
def test_a_write_in_place_is_named(authored: Authored, options: dict[str, Any]) -> None:
    check_named(authored, **({"watch": {authored.event, "fit_end"}} if "watch" in options else options))


@pytest.mark.slow  # graphs
@pytest.mark.parametrize("author", ["algorithm 'writer'", "callback act", "the loop's body"])
def test_compiled_runs(author: str) -> None:
    with interpreted():
        for event in (Event.BATCH_END, Event.EPOCH_END, Event.BEFORE_TRAIN_BATCH):
            check_named(Authored(author, event, 1), compile=True)


@pytest.mark.parametrize("author", ["algorithm 'writer'", "callback act", "the loop's body"])
def test_later_batches_are_checked_on_request_and_none_without_checks(author: str) -> None:
    later = Authored(author, Event.BATCH_END, 2)
    assert later.error() is None
    assert later.wrote
    check_named(Authored(author, Event.BATCH_END, 2), strict=True)
    assert Authored(author, Event.BATCH_END, 0).error(strict=False) is None


def zeroing(event: Event, state: pl.State) -> None:
    if event in (Event.EVAL_BATCH_END, Event.PREDICT_BATCH_END, Event.BATCH_END):
        state.params["2.bias"].data.fill_(7.0)


def test_a_resumed_run_and_a_handler_that_comes_round_late_are_checked() -> None:
    kept = next(s for event, s in fit() if event is Event.BATCH_END and s.timestamp.batch == 3)
    refused(fit(kept, callbacks=[zeroing]), r"callback zeroing changed state\.params\['2\.bias'\] in place")

    @pl.algorithm("batch_end", when=pl.every("5ba"))
    def seldom(state: pl.State) -> pl.State:
        state.params["2.bias"].zero_()
        return state

    refused(fit(algorithms=[seldom]), r"algorithm 'seldom' changed state\.params\['2\.bias'\]")


def test_a_forward_and_a_loss_are_named() -> None:
    class Clipped(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.01, 0.01)
            return super().forward(inputs)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        targets.fill_(0)
        return cross_entropy(outputs, targets)

    refused(fit(Clipped(4, 3)), r"the forward changed state\.params\['weight'\]")
    refused(fit(data=points(4), loss=loss), r"the loss changed state\.batch\[1\]")


def test_arrays_and_containers_of_a_batch() -> None:
    numpy = pytest.importorskip("numpy")
    task = pl.Task(forward=lambda m, b: m(b["x"]), loss=lambda o, b: cross_entropy(o, b["y"]))

    def written(function: Callable[[pl.State], Any]) -> Any:
        def callback(event: Event, state: pl.State) -> None:
            if event is Event.BATCH_START:
                function(state)

        data = [{"x": inputs, "y": targets, "ids": numpy.arange(4)} for inputs, targets in DATA]
        return fit(mlp(), data, loss=None, task=task, callbacks=[callback])

    pl.run(written(lambda state: None))
    refused(written(lambda state: state.batch["ids"].fill(0)), r"callback callback changed state\.batch\['ids'\] in")
    says = r"callback callback changed state\.batch in place.* had 3 values"
    refused(written(lambda state: state.batch.pop("ids")), says)


def test_other_streams_and_rehearsal() -> None:
    def script(state: pl.State) -> Iterator[Any]:
        state = yield Event.BATCH_END, state
        return state

    for stream in (
        pl.evaluate(mlp(), DATA, loss=cross_entropy, callbacks=[zeroing]),
        pl.predict(mlp(), DATA, callbacks=[zeroing]),
        pl.drive(script(pl.State.create(mlp())), callbacks=[zeroing]),  # type: ignore[arg-type]
    ):
        refused(stream, r"callback zeroing changed state\.params\['2\.bias'\]")

    @pl.algorithm("after_train_batch")
    def halve(state: pl.State) -> pl.State:
        for gradient in state.grads.values():
            gradient.mul_(0.5)
        return state

    options = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "2ep"}
    for more, author in (
        ({"callbacks": [zeroing]}, "callback zeroing"),
        ({"algorithms": [halve]}, "algorithm 'halve'"),
    ):
        for strict in (None, False):
            with pytest.raises(pl.RehearsalError, match=f"purity: ImpurityError: {author} changed state"):
                pl.rehearse(mlp(), DATA, strict=strict, **options | more)


def test_nothing_is_left_to_check_after_two_batches() -> None:
    """Where the driver looks, from the third batch on there is no event of a batch."""
    strict = Strict.of(None, None, frozenset(Event), batches=2)
    assert strict is not None
    state = pl.State.create(nn.Linear(2, 1))
    for number in range(4):
        for event in IN_BATCH:
            at = state.replace(timestamp=pl.Timestamp(batch=number + (event in COUNTED)), event=event)
            assert (event in strict.checked) == (number < 3)
            if event in strict.checked:
                strict.begin(event, at, ())
                strict.show(event, at)
                strict.end(event, at)


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one event"])
def test_later_batches_are_compared_with_nothing_and_no_copy_stays(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where algorithms have the State before and after a forward, whether or not the body has it."""
    looked_at: list[Any] = []
    monkeypatch.setattr("pure_loop.loop.strict.digest", lambda leaf: looked_at.append(0) or digest(leaf))
    around = pl.Algorithm("around", {(Event.BEFORE_FORWARD, Event.AFTER_FORWARD): lambda state: state})

    def tensors(strict: bool | None) -> tuple[list[int], int]:
        seen, alive = list[int](), 0
        callbacks = [lambda event, state: None]
        for event, state in fit(algorithms=[around, KEEPS], watch=watch, strict=strict, callbacks=callbacks):
            if event is Event.BATCH_END:
                seen.append(len(looked_at))
                looked_at.clear()
                if state.timestamp.batch == 7:
                    gc.collect()
                    alive = sum(issubclass(type(item), Tensor) for item in gc.get_objects())
        return seen, alive

    tensors(False)  # what the first run makes once
    (seen, alive), (_, wanted) = tensors(None), tensors(False)
    assert all(seen[:2])
    assert seen[5:] == [0] * 3  # the one before has the first end of an epoch
    assert alive == wanted


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.integers(1, 60_000),
    st.data(),
)
@examples(40, 1000)
def test_a_changed_byte_changes_the_digest(dtype: torch.dtype, count: int, data: st.DataObject) -> None:
    tensor = (torch.rand(count, generator=torch.Generator().manual_seed(count)) > 0.5).to(dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    raw = tensor.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1
    assert digest(tensor) != before


@pytest.mark.parametrize("size", [(300, 700), (1021 * 1019,)])
def test_moved_and_negated_numbers_change_the_digest(size: tuple[int, ...]) -> None:
    tensor = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = digest(tensor)
    for changed in (-tensor, tensor.flip(0), tensor.flatten().roll(1).view(size), tensor.sort(dim=0).values):
        assert digest(changed) != before
