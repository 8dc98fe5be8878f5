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
from pure_loop.random import seeded
from tests.support import problem
from tests.support.problem import cross_entropy, mlp, points
from tests.support.tiers import examples

DATA = points(4)
COUNTED = (Event.BATCH_END, Event.BATCH_CHECKPOINT)
OF_FIT = [event for event in Event if not event.is_predict and "standalone" not in event]
ONCE = {event for event in OF_FIT if not event.name.startswith(("BATCH", "BEFORE", "AFTER"))} | {Event.AFTER_LOAD}
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
    with pytest.raises(pl.errors.ImpurityError, match=f"^{says}"):
        pl.run(stream)


def written(author: str, event: Event, batch: int = 0, leaf: str = "state.params['2.bias']", **options: Any) -> str:
    """The error of a run in which an author writes to a leaf once, at an event of a batch; or nothing."""
    wrote: list[Event] = []

    def act(at: Event, state: pl.State) -> None:
        now = state.timestamp.batch - (at in COUNTED)
        if at is event and (event in ONCE or now == batch) and not wrote:
            wrote.append(at)
            LEAVES[leaf](state).detach().view(-1)[-1] += 1

    def handle(state: pl.State) -> pl.State:
        act(event, state)
        return state

    recorder: Any = type("Recorder", (pl.Logger,), {"run_event": lambda self, at, state, logger: act(at, state)})
    writes = author == "algorithm 'writer'"
    attached: dict[str, Any] = {
        "algorithms": [KEEPS, *([pl.Algorithm("writer", {event: handle})] if writes else [])],
        "callbacks": [act] if author == "callback act" else [],
        "loggers": [recorder()] if author == "callback Recorder" else [],
    }
    try:
        for at, state in fit(evaluators=DATA[:2], iteration_length="1ep", **attached, **options):
            if author == "the loop's body":
                act(at, state)
    except pl.errors.ImpurityError as error:
        return str(error)
    assert wrote
    return ""


def check_named(author: str, event: Event, batch: int, leaf: str = "state.params['2.bias']", **options: Any) -> None:
    said = written(author, event, batch, leaf, **options)
    assert said.startswith(f"{author} changed {leaf} in place, at or after {event.name}:"), said


WAYS: list[dict[str, Any]] = [{}, {}, {"donate": True}, {"verify": "1ba"}, {"microbatch_size": 2}, {"watch": "its"}]


@examples(15, 400)
@given(
    st.sampled_from(AUTHORS),
    st.sampled_from([event for event in OF_FIT if event is not Event.BEFORE_LOAD]),
    st.integers(0, 1),
    st.sampled_from(list(LEAVES)),
    st.sampled_from(WAYS),
)
def test_a_write_in_place_is_named(author: str, event: Event, batch: int, leaf: str, options: dict[str, Any]) -> None:
    event = Event.FIT_START if event is Event.INIT else event  # at which there is no memory yet
    batch = 1 if event is Event.BEFORE_DATALOADER else batch
    check_named(author, event, batch, leaf, **({"watch": {event, "fit_end"}} if "watch" in options else options))


@pytest.mark.slow  # graphs
def test_compiled_runs() -> None:
    for author in ("algorithm 'writer'", "callback act", "the loop's body"):
        for event in (Event.BATCH_END, Event.EPOCH_END, Event.BEFORE_TRAIN_BATCH):
            with interpreted():
                check_named(author, event, 1, compile=True)


def test_later_batches_are_checked_on_request_and_none_without_checks() -> None:
    for author in ("algorithm 'writer'", "callback act", "the loop's body"):
        assert written(author, Event.BATCH_END, 2) == ""
        check_named(author, Event.BATCH_END, 2, strict=True)
        assert written(author, Event.BATCH_END, 0, strict=False) == ""


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


def test_a_forward_a_loss_and_what_writes_to_arrays_and_containers_of_a_batch_are_named() -> None:
    class Clipped(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.01, 0.01)
            return super().forward(inputs)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        targets.fill_(0)
        return cross_entropy(outputs, targets)

    refused(fit(Clipped(4, 3)), r"the forward changed state\.params\['weight'\]")
    refused(fit(data=points(4), loss=loss), r"the loss changed state\.batch\[1\]")
    numpy = pytest.importorskip("numpy")
    task = pl.Task(forward=lambda m, b: m(b["x"]), loss=lambda o, b: cross_entropy(o, b["y"]))

    def handled(function: Callable[[pl.State], Any]) -> Any:
        def callback(event: Event, state: pl.State) -> None:
            if event is Event.BATCH_START:
                function(state)

        data = [{"x": inputs, "y": targets, "ids": numpy.arange(4)} for inputs, targets in DATA]
        return fit(mlp(), data, loss=task, callbacks=[callback])

    refused(handled(lambda state: state.batch["ids"].fill(0)), r"callback callback changed state\.batch\['ids'\] in")
    says = r"callback callback changed state\.batch in place.* had 3 values"
    refused(handled(lambda state: state.batch.pop("ids")), says)


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
    options = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "2ep"}
    for strict in (None, False):
        with pytest.raises(pl.errors.RehearsalError, match="purity: ImpurityError: callback zeroing changed state"):
            pl.rehearse(mlp(), DATA, strict=strict, callbacks=[zeroing], **options)


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one event"])
def test_later_batches_are_compared_with_nothing_and_no_copy_stays(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where algorithms have the State before and after a forward, whether or not the body has it."""
    looked_at: list[Any] = []
    monkeypatch.setattr("pure_loop.loop.strict.digest", lambda leaf: looked_at.append(0) or digest(leaf))
    around = pl.Algorithm("around", {(Event.BEFORE_FORWARD, Event.AFTER_FORWARD): lambda state: state})

    def tensors(strict: bool | None) -> tuple[list[int], int]:
        seen, alive = list[int](), 0
        callbacks = [lambda event, state: None]
        for event, state in fit(mlp(), algorithms=[around], watch=watch, strict=strict, callbacks=callbacks):
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
@examples(30, 1000)
def test_other_bytes_and_places_change_the_digest(dtype: torch.dtype, count: int, data: st.DataObject) -> None:
    tensor = (torch.rand(count, generator=torch.Generator().manual_seed(count)) > 0.5).to(dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    raw = tensor.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1
    assert digest(tensor) != before
    if dtype is torch.float64 and count > 1:
        numbers = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(count))
        for changed in (-numbers, numbers.flip(0), numbers.roll(1)):
            assert digest(changed) != digest(numbers)
