"""What is asked of streams and States that they don't have: errors that say where it is; and copies of any State."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.data.batch import tensors_in
from tests.support import streams as sameness
from tests.support.refusals import DATA, fit, net, refused


def evaluate(**arguments: Any) -> Any:
    return pl.evaluate(net(), {"test": DATA}, loss=nn.functional.cross_entropy, **arguments)


def own() -> Any:
    def script(state: pl.State) -> Any:
        return (yield Event.BATCH_START, state)

    return pl.drive(script(pl.State.create(net())))


STREAMS = {
    "fit": fit,
    "evaluate": evaluate,
    "predict": lambda: pl.predict(net(), DATA),
    "drive": own,
    "progress": lambda: pl.progress(fit()),
}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("name", ["timestamp", "params", "metrics", "state", "module", "model", "anything"])
def test_attributes_of_states(make: Any, name: str) -> None:
    stream = make()
    of_state = f"state.{name}" if hasattr(pl.State, name) else "state = pl.run(stream)"
    says = repr(name), "pl.run(stream)", of_state
    refused(lambda: getattr(stream, name), pl.StreamAttributeError, AttributeError, *says)
    assert not hasattr(stream, name)


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_streams_as_lists_and_mappings(make: Any) -> None:
    stream = make()
    refused(lambda: len(stream), pl.ArgumentTypeError, TypeError, "a stream has no length")
    refused(lambda: stream[0], pl.ArgumentTypeError, TypeError, "stream[0]", "list(stream)")
    refused(lambda: stream["val"], pl.ArgumentTypeError, TypeError, "stream['val']", "state.metrics['val']", "pl.run")
    assert bool(stream)
    assert isinstance(stream, Generator)
    assert isinstance(stream, pl.Stream)


def test_a_stream_is_a_generator_in_all_else() -> None:
    stream = fit()
    event, state = next(stream)
    assert event is Event.INIT
    assert stream.gi_frame is not None
    assert stream.send(None)[0] is Event.BEFORE_LOAD
    with pytest.raises(KeyError, match="mine"):
        stream.throw(KeyError("mine"))
    assert list(stream) == []
    other = fit()
    next(other)
    other.close()
    assert next(other, None) is None
    assert state.event is Event.INIT
    # Iterating twice continues, as with any generator.
    stream = fit()
    for event, _ in stream:
        if event is Event.FIT_START:
            break
    assert next(iter(stream))[0] is Event.EPOCH_START


def test_a_loop_asks_the_generator_itself() -> None:
    """No code of ours runs between two events only because a stream is an object."""
    stream = fit()
    assert iter(stream) is iter(iter(stream))
    assert type(iter(stream)).__name__ == "generator"


NO_STREAMS = {
    "numbers": ([1, 2], "whose first element is of type int"),
    "a tuple": (((1, 2),), "whose first element is of type tuple"),
    "a model": (net(), "whose first element is of type Linear"),
    "data": (DATA, "whose first element is of type tuple"),
    "a number": (3, "(3)"),
    "None": (None, "(None)"),
    "a text": ("fit", "('fit')"),
    "a function": (pl.fit, "call it"),
    "a State": (pl.State.create(net()), "State"),
}


@pytest.mark.parametrize("given", NO_STREAMS)
@pytest.mark.parametrize("function", ["run", "progress"])
def test_what_is_no_stream(function: str, given: str) -> None:
    value, says = NO_STREAMS[given]
    call = pl.run if function == "run" else lambda stream: list(pl.progress(stream))  # type: ignore[var-annotated]
    refused(lambda: call(value), pl.ArgumentTypeError, TypeError, says, f"pl.{function}(pl.fit(...))")


def test_what_run_takes() -> None:
    pairs = list(fit())
    assert pl.run(pairs) is pairs[-1][1]
    assert pl.run(iter(pairs)) is pairs[-1][1]
    assert pl.run(pair for pair in pairs) is pairs[-1][1]
    with pytest.raises(pl.ArgumentError, match="yielded nothing"):
        pl.run([])


def test_names_that_mappings_lack() -> None:
    """Neighbours: an empty mapping, another label, a metric, a parameter, a buffer, an algorithm."""
    state = pl.run(fit())
    missing, error = pl.MissingNameError, KeyError
    refused(lambda: state.metrics["val"], missing, error, "'val'", 'evaluators={"val": dataloader}')
    with pytest.raises(KeyError, match=r"^'val' is not here"):  # no repr of a message
        state.metrics["val"]
    state = pl.run(fit(evaluators=DATA))
    refused(lambda: state.metrics["val"], missing, error, "there are 'eval'", "by their labels")
    refused(lambda: state.metrics["eval"]["accurcy"], missing, error, "did you mean 'accuracy'?", "'loss'")
    refused(lambda: state.params["0.wieght"], missing, error, "did you mean '0.weight'?", "'2.bias'")
    refused(lambda: state.algorithm_state["ema"], missing, error, "is empty", "init=lambda state: ...", "remember")
    refused(lambda: state.params[0], missing, error, "0 is not here")
    assert state.metrics.get("val") is None
    assert "val" not in state.metrics


def test_a_state_as_a_mapping() -> None:
    state = pl.run(fit(evaluators={"val": DATA}))
    refused(lambda: state["params"], pl.ArgumentTypeError, TypeError, "state['params']", "write state.params")
    refused(lambda: state["val"], pl.ArgumentTypeError, TypeError, "state.metrics['val']")
    refused(lambda: state["0.weight"], pl.ArgumentTypeError, TypeError, "state.params['0.weight']")
    refused(lambda: state[0], pl.ArgumentTypeError, TypeError, "state[0]", "a record")
    with pytest.raises(TypeError, match="not iterable"):
        iter(state)


class Nested(nn.Module):
    """Outputs are a dict with a list, of which one tensor stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> Any:
        first = self.layer(x)
        second = self.norm(first)
        return {"both": [first, second], "again": second}


@pytest.mark.parametrize("donate", ["auto", False])
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state)), copy.copy], ids=["deep", "pickle", "copy"]
)
def test_copies_at_every_event(again: Any, donate: Any) -> None:
    """In the middle of a batch, where loss and outputs have graphs, too; with microbatches, ema and evaluation."""
    task = pl.Task(loss=lambda outputs, batch: nn.functional.cross_entropy(outputs["again"], batch[1]))
    events = set()
    for event, state in pl.fit(
        Nested(),
        DATA,
        task=task,
        optimizer=pl.optim.adamw(lr=0.1),
        max_duration="2ba",
        microbatch_size=2,
        algorithms=[pl.algorithms.ema(half_life="2ba")],
        evaluators={"val": pl.Evaluator(DATA, metrics=[pl.metrics.loss()])},
        donate=donate,
    ):
        events.add(event)
        other = again(state)
        sameness.assert_same(other, state, event.name)
        if again is copy.copy:
            continue
        for name in ("outputs", "loss"):
            tensors = tensors_in(getattr(other, name))
            assert all(tensor.grad_fn is None for tensor in tensors), event
        if event is Event.AFTER_FORWARD:
            assert state.outputs["again"].grad_fn is not None, "the State itself keeps its graph"
            assert other.outputs["again"] is other.outputs["both"][1], "a tensor in two places is one in the copy"
    assert Event.AFTER_LOSS in events


def test_a_deep_copy_in_a_nesting_is_one_object() -> None:
    state = pl.State.create(net())
    first, second = copy.deepcopy([state, state])
    assert first is second
