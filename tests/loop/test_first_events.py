"""By default ``fit`` sees to it that nothing changes a State in place, in two batches and at the first event of a kind.

Tried: algorithms, callbacks, loggers, the loop's body, a forward, a loss; tensors of each field, large and small,
arrays of NumPy and containers of a batch; writes by operations, through ``.data`` and by kernels that count no version;
eager, compiled, watched, donated, verified and resumed runs; ``evaluate``, ``predict``, ``drive`` and ``rehearse``; a
handler whose ``when`` comes round late.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.bits import digest
from pure_loop.loop.strict import Strict

DATA = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 3) for i in range(4)]
OPTIONS: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "2ep"}
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


def network() -> nn.Module:
    """The first weight is large enough to be summed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4200), nn.BatchNorm1d(4200), nn.Linear(4200, 3))


KEEPS = pl.Algorithm("keeps", {Event.FIT_START: lambda state: state}, init=lambda state: torch.zeros(3))


def write(tensor: Tensor, place: int) -> None:
    tensor.detach().view(-1)[place % tensor.numel()] += 1


class Authored:
    """What writes once, at an event of a batch."""

    def __init__(self, author: str, event: Event, batch: int, leaf: str, place: int) -> None:
        self.author, self.event, self.batch, self.leaf, self.place = author, event, batch, leaf, place
        self.wrote = False

    def act(self, event: Event, state: pl.State) -> None:
        batch = state.timestamp.batch - (event in COUNTED)
        if event is self.event and (event not in IN_BATCH or batch == self.batch) and not self.wrote:
            self.wrote = True
            write(LEAVES[self.leaf](state), self.place)

    def handle(self, state: pl.State) -> pl.State:
        assert state.event is not None
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
        events = pl.fit(network(), DATA, evaluators=DATA[:2], iteration_length="1ep", **(OPTIONS | more | options))
        try:
            for event, state in events:
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


AUTHORED = st.builds(
    Authored,
    st.sampled_from(["algorithm 'writer'", "callback act", "callback Recorder", "the loop's body"]),
    st.sampled_from([*IN_BATCH, *OTHERS]),
    st.integers(0, 1),
    st.sampled_from(list(LEAVES)),
    st.integers(0, 10**6),
)


def check_named(authored: Authored, **options: Any) -> None:
    if authored.event in (Event.INIT, Event.BEFORE_LOAD) and "keeps" in authored.leaf:
        authored.event = Event.FIT_START
    error = authored.error(**options)
    assert authored.wrote
    assert error is not None
    text = f"{authored.author} changed {authored.leaf} in place, at or after {authored.event.name}:"
    assert str(error).startswith(text), (str(error), text)


@settings(max_examples=12)
@given(AUTHORED)
def test_a_write_in_place_is_named(authored: Authored) -> None:
    check_named(authored)


@pytest.mark.slow
@settings(max_examples=300)
@given(AUTHORED, st.sampled_from([{}, {"donate": True}, {"verify": "1ba"}, {"microbatch_size": 4}, {"watch": "its"}]))
def test_a_write_in_place_is_named_in_other_runs(authored: Authored, options: dict[str, Any]) -> None:
    check_named(authored, **({"watch": {authored.event, "fit_end"}} if "watch" in options else options))


def test_without_the_checks_nothing_is_named() -> None:
    authored = Authored("callback act", Event.BATCH_END, 0, "state.params['2.bias']", 1)
    assert authored.error(strict=False) is None
    with pytest.raises(AssertionError):
        check_named(Authored("callback act", Event.BATCH_END, 0, "state.params['2.bias']", 1), strict=False)


@pytest.mark.parametrize("author", ["algorithm 'writer'", "callback act", "the loop's body"])
def test_later_batches_are_checked_on_request(author: str) -> None:
    later = Authored(author, Event.BATCH_END, 2, "state.params['2.bias']", 1)
    assert later.error() is None
    assert later.wrote
    check_named(Authored(author, Event.BATCH_END, 2, "state.params['2.bias']", 1), strict=True)


def test_a_resumed_run_is_checked_anew() -> None:
    kept = next(s for e, s in pl.fit(network(), DATA, **OPTIONS) if e is Event.BATCH_END and s.timestamp.batch == 3)

    def halve(event: Event, state: pl.State) -> None:
        if event is Event.AFTER_TRAIN_BATCH:
            state.params["2.bias"].data.mul_(0.5)

    with pytest.raises(pl.ImpurityError, match=r"^callback halve changed state\.params\['2\.bias'\] in place"):
        pl.run(pl.fit(kept, DATA, callbacks=[halve], **OPTIONS))


def test_the_first_call_of_a_handler_that_comes_round_late_is_checked() -> None:
    @pl.algorithm("batch_end", when=pl.every("5ba"))
    def seldom(state: pl.State) -> pl.State:
        state.params["2.bias"].zero_()
        return state

    with pytest.raises(pl.ImpurityError, match=r"^algorithm 'seldom' changed state\.params\['2\.bias'\]"):
        pl.run(pl.fit(network(), DATA, algorithms=[seldom], **OPTIONS))


def test_a_forward_and_a_loss_are_named() -> None:
    class Clipped(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.01, 0.01)
            return super().forward(inputs)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        targets.fill_(0)
        return cross_entropy(outputs, targets)

    def data() -> list[Any]:
        return [(inputs, targets.clone()) for inputs, targets in DATA]

    with pytest.raises(pl.ImpurityError, match=r"^the forward changed state\.params\['weight'\]"):
        pl.run(pl.fit(Clipped(4, 3), DATA, **OPTIONS))
    with pytest.raises(pl.ImpurityError, match=r"^the loss changed state\.batch\[1\]"):
        pl.run(pl.fit(nn.Linear(4, 3), data(), **(OPTIONS | {"loss": loss})))


def test_arrays_and_containers_of_a_batch() -> None:
    numpy = pytest.importorskip("numpy")
    data = [{"x": inputs, "y": targets, "ids": numpy.arange(6)} for inputs, targets in DATA]
    task = pl.Task(forward=lambda m, b: m(b["x"]), loss=lambda o, b: cross_entropy(o, b["y"]))

    def fit(function: Callable[[pl.State], Any]) -> None:
        def callback(event: Event, state: pl.State) -> None:
            if event is Event.BATCH_START:
                function(state)

        options = {name: value for name, value in OPTIONS.items() if name != "loss"}
        pl.run(pl.fit(nn.Linear(4, 3), [dict(batch) for batch in data], task=task, callbacks=[callback], **options))

    fit(lambda state: None)
    with pytest.raises(pl.ImpurityError, match=r"^callback callback changed state\.batch\['ids'\] in place"):
        fit(lambda state: state.batch["ids"].fill(0))
    data[0]["ids"] = data[0]["ids"].copy()
    with pytest.raises(pl.ImpurityError, match=r"^callback callback changed state\.batch in place.* had 3 values"):
        fit(lambda state: state.batch.pop("ids"))


@pytest.mark.slow
@pytest.mark.parametrize("author", ["algorithm 'writer'", "callback act", "the loop's body"])
@pytest.mark.parametrize("event", [Event.BATCH_END, Event.EPOCH_END, Event.BEFORE_TRAIN_BATCH])
def test_compiled_runs(author: str, event: Event) -> None:
    check_named(Authored(author, event, 1, "state.params['2.bias']", 1), compile=True)


def test_other_streams() -> None:
    def zero(event: Event, state: pl.State) -> None:
        if event in (Event.EVAL_BATCH_END, Event.PREDICT_BATCH_END, Event.BATCH_END):
            state.params["weight"].data.zero_()

    def script(state: pl.State) -> Iterator[Any]:
        state = yield Event.BATCH_END, state
        return state

    model = nn.Linear(4, 3)
    streams: list[Any] = [
        pl.evaluate(model, DATA, loss=cross_entropy, callbacks=[zero]),
        pl.predict(nn.Linear(4, 3), [x for x, _ in DATA], task=pl.Task(forward=lambda m, b: m(b)), callbacks=[zero]),
        pl.drive(script(pl.State.create(nn.Linear(4, 3))), callbacks=[zero]),  # type: ignore[arg-type]
    ]
    for stream in streams:
        with pytest.raises(pl.ImpurityError, match=r"^callback zero changed state\.params\['weight'\]"):
            pl.run(stream)


def test_rehearsal_is_strict() -> None:
    def zero(event: Event, state: pl.State) -> None:
        if event is Event.BATCH_END:
            state.params["weight"].data.zero_()

    @pl.algorithm("after_train_batch")
    def halve(state: pl.State) -> pl.State:
        for gradient in state.grads.values():
            gradient.mul_(0.5)
        return state

    for more, author in (({"callbacks": [zero]}, "callback zero"), ({"algorithms": [halve]}, "algorithm 'halve'")):
        for strict in (None, False):
            with pytest.raises(pl.RehearsalError, match=f"purity: ImpurityError: {author} changed state"):
                pl.rehearse(nn.Linear(4, 3), DATA, strict=strict, **(OPTIONS | more))


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
def test_later_batches_are_compared_with_nothing(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where algorithms have the State before and after a forward, whether or not the body has it."""
    looked_at: list[Any] = []

    def noted(leaf: Any) -> Any:
        looked_at.append(leaf)
        return digest(leaf)

    monkeypatch.setattr("pure_loop.loop.strict.digest", noted)
    around = pl.Algorithm("around", {(Event.BEFORE_FORWARD, Event.AFTER_FORWARD): lambda state: state})
    seen = []
    for event, _ in pl.fit(nn.Linear(4, 3), DATA, algorithms=[around], watch=watch, **OPTIONS):
        if event is Event.BATCH_END:
            seen.append(len(looked_at))
            looked_at.clear()
    assert all(seen[:2])
    assert seen[5:] == [0] * 3  # the one before has the first end of an epoch


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.integers(1, 60_000),
    st.data(),
)
@settings(max_examples=60)
def test_a_changed_byte_changes_the_digest(dtype: torch.dtype, count: int, data: st.DataObject) -> None:
    tensor = (torch.rand(count, generator=torch.Generator().manual_seed(count)) > 0.5).to(dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    raw = tensor.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1
    assert digest(tensor) != before


@pytest.mark.parametrize("size", [(300, 700), (1021 * 2, 50), (1021 * 1019,)])
def test_moved_and_negated_numbers_change_the_digest(size: tuple[int, ...]) -> None:
    tensor = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = digest(tensor)
    for changed in (-tensor, tensor.flip(0), tensor.flatten().roll(1).view(size), tensor.sort(dim=0).values):
        assert digest(changed) != before


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one event"])
def test_no_copy_stays_after_the_checks(watch: Any) -> None:
    """What a State was compared with has copies of its small tensors, which were kept to the end of the run."""

    def tensors(strict: bool | None) -> int:
        options = OPTIONS | {"algorithms": [KEEPS], "callbacks": [lambda event, state: None], "max_duration": "3ep"}
        stream = pl.fit(network(), DATA, **options, watch=watch, strict=strict)
        for event, state in stream:
            if event is Event.BATCH_END and state.timestamp.batch == 10:
                gc.collect()
                return sum(isinstance(item, Tensor) for item in gc.get_objects())
        raise AssertionError

    tensors(False)  # what the first run makes once
    assert tensors(None) == tensors(False)
