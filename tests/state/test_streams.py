"""What is asked of streams and States that they don't have: errors that say where it is."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator
from typing import Any

import pytest

import pure_loop as pl
from pure_loop import Event, errors
from tests.support.problem import cross_entropy, fit, mlp, points, run
from tests.support.refused import Refusal, check

DATA = points()


def own() -> Any:
    def script(state: pl.State) -> Any:
        return (yield Event.BATCH_START, state)

    return pl.drive(script(pl.State.create(mlp())))


STREAMS: dict[str, Callable[[], Any]] = {
    "fit": fit,
    "evaluate": lambda: pl.evaluate(mlp(), {"test": DATA}, loss=cross_entropy),
    "predict": lambda: pl.predict(mlp(), DATA),
    "drive": own,
    "progress": lambda: pl.progress(fit()),
}


def refused(call: Callable[[], Any], error: type[BaseException], *says: str) -> None:
    check(Refusal("here", call, error, says))


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_no_state_and_no_list(name: str) -> None:
    stream = STREAMS[name]()
    for field in ("timestamp", "params", "state", "module", "anything"):
        of_state = f"state.{field}" if hasattr(pl.State, field) else "state = pl.run(stream)"
        says = (repr(field), "pl.run(stream)", of_state)
        refused(lambda field=field: getattr(stream, field), errors.MissingAttributeError, *says)
        assert not hasattr(stream, field)
    refused(lambda: len(stream), errors.ArgumentTypeError, "a stream has no length")
    refused(lambda: stream[0], errors.ArgumentTypeError, "stream[0]", "list(stream)")
    refused(lambda: stream["val"], errors.ArgumentTypeError, "stream['val']", "state.metrics['val']", "pl.run")
    assert bool(stream)
    assert isinstance(stream, Generator)
    assert isinstance(stream, pl.Stream)


def test_a_stream_is_a_generator_in_all_else() -> None:
    stream = fit()
    assert next(stream)[0] is Event.INIT
    assert stream.gi_frame is not None
    assert stream.send(None)[0] is Event.BEFORE_LOAD
    with pytest.raises(KeyError, match="mine"):
        stream.throw(KeyError("mine"))
    assert list(stream) == []
    # Iterating twice continues, as with any generator, and no code of ours runs between two events.
    stream = fit()
    for event, _ in stream:
        if event is Event.FIT_START:
            break
    assert next(iter(stream))[0] is Event.EPOCH_START
    assert iter(stream) is iter(iter(stream))
    assert type(iter(stream)).__name__ == "generator"


def test_what_is_no_stream() -> None:
    for value, says in (
        ([1, 2], "whose first element is of type int"),
        (((1, 2),), "whose first element is of type tuple"),
        (mlp(), "whose first element is of type Linear"),
        (3, "(3)"),
        ("fit", "('fit')"),
        (pl.fit, "call it"),
        (pl.State.create(mlp()), "State"),
    ):
        refused(lambda value=value: pl.run(value), errors.ArgumentTypeError, says, "pl.run(pl.fit(...))")
        wanted = "pl.progress(pl.fit(...))"
        refused(lambda value=value: list(pl.progress(value)), errors.ArgumentTypeError, says, wanted)


def test_what_run_takes() -> None:
    stream = fit()
    pairs = list(stream)
    for given in (pairs, iter(pairs), (pair for pair in pairs)):
        assert pl.run(given) is pairs[-1][1]
    for empty in ([], stream):
        refused(
            lambda empty=empty: pl.run(empty), errors.ArgumentError, "the stream yielded nothing", "run to its end be"
        )


def test_names_that_mappings_lack() -> None:
    """Neighbours: an empty mapping, another label, a metric, a parameter, an algorithm."""
    missing, none = errors.MissingNameError, run()
    refused(lambda: none.metrics["val"], missing, "'val'", 'evaluators={"val": dataloader}')
    with pytest.raises(KeyError, match=r"^'val' is not here"):  # no repr of a message
        none.metrics["val"]
    state = run(evaluators=DATA)
    refused(lambda: state.metrics["val"], missing, "did you mean 'eval'?", "there are 'eval'")
    refused(lambda: state.metrics["eval"]["accurcy"], missing, "did you mean 'accuracy'?", "'loss'")
    refused(lambda: state.params["0.wieght"], missing, "did you mean '0.weight'?", "'2.bias'")
    refused(lambda: state.algorithm_state["ema"], missing, "is empty", "init=lambda state: ...", "remember")
    refused(lambda: state.params[0], missing, "0 is not here")
    assert state.metrics.get("val") is None
    assert "val" not in state.metrics
    refused(lambda: state["eval"], errors.ArgumentTypeError, "state.metrics['eval']")
    with pytest.raises(TypeError, match="not iterable"):
        iter(state)


def warned(call: Callable[[], object]) -> list[str]:
    """The files that warnings about streams name."""
    gc.collect()  # those of tests before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        gc.collect()
    return [item.filename for item in caught if item.category is errors.NeverIteratedWarning]


def dropped(make: Callable[[], Any]) -> None:
    stream = make()
    repr(stream)


def handled(make: Callable[[], Any]) -> None:
    try:
        raise ValueError
    except ValueError:
        make()


def left(make: Callable[[], Any]) -> None:
    for _ in make():
        return


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_dropped_before_it_begins_warns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was made, once: not one that was begun or closed, nor where an error came in between."""
    monkeypatch.delattr(sys, "last_value", raising=False)
    make = STREAMS[name]
    for call in (make, lambda: dropped(make)):
        assert len(warned(call)) == 1
        assert warned(call)[0].startswith(str(__file__).removesuffix("state/test_streams.py"))
    for use in (pl.run, lambda s: s.close(), list, lambda s: pl.run(pl.progress(s)), next, lambda s: s.send(None)):
        assert warned(lambda use=use: use(make())) == []
    assert warned(lambda: (left(make), handled(make))) == []
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)  # as in a notebook, after an error
    assert len(warned(make)) == 1


@pytest.mark.slow  # two processes
@pytest.mark.parametrize("end", ["", "raise ValueError"])
def test_a_program_that_ends_with_a_stream_that_never_began_warns(end: str) -> None:
    code = f"from tests.state.test_streams import own\nstream = own()\n{end}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.count("NeverIteratedWarning") == (0 if end else 1)
    assert ended.stdout == ""
