"""What users write by mistake in algorithms: an error of ours that names the algorithm and its event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from tests.support.refusals import DATA, TYPE, VALUE, WEIGHT, Wider, at, breaks, fit, identity, named, net, refused

LISTS = [
    ([named("a"), named("b"), named("a")], VALUE, ["two algorithms are named 'a'", "name='a_2'"]),
    ([pl.compose(named("a"), named("b")), named("b")], VALUE, ["two algorithms are named 'b'"]),
    ([identity], TYPE, ["identity in algorithms=", "bound to no event", "pl.algorithm(Event.BATCH_END)(identity)"]),
    ([pl.algorithms.ema], TYPE, ["if it makes one, call it: ema(...)"]),
    ([pl.Algorithm], TYPE, ["the class Algorithm"]),
    ([pl.callbacks.SpeedMonitor()], TYPE, ["of type SpeedMonitor", "callbacks="]),
    (None, TYPE, ["algorithms=None", "give a list"]),
    ("ema", TYPE, ["algorithms='ema'", "give a list"]),
    ({"a": named("a")}, TYPE, ["give a list"]),
]


@pytest.mark.parametrize(("algorithms", "kind", "says"), LISTS)
def test_lists_of_algorithms(algorithms: Any, kind: tuple[Any, Any], says: list[str]) -> None:
    refused(lambda: fit(algorithms=algorithms), *kind, *says)


DEFINITIONS = [
    (lambda: pl.algorithm(identity), VALUE, ["'identity' binds no event", "@pl.algorithm(Event.BATCH_END)"]),
    (lambda: pl.algorithm(), VALUE, ["binds no event", "pl.algorithm(Event.BATCH_END)"]),
    (lambda: pl.Algorithm("x", {}), VALUE, ["algorithm 'x' binds no event", "{Event.BATCH_END: function}"]),
    (
        lambda: pl.algorithm("after_los")(identity),
        VALUE,
        ["'after_los' is not an event", "did you mean Event.AFTER_LOSS?"],
    ),
    (lambda: pl.algorithm("lunch")(identity), VALUE, ["'lunch' is not an event", "INIT, BEFORE_LOAD"]),
    (lambda: pl.algorithm([Event.BATCH_END])(identity), TYPE, ["one by one", "pl.algorithm(Event.BATCH_START, Event"]),
    (lambda: pl.Algorithm("x", [Event.BATCH_END]), TYPE, ["algorithm 'x'", "mapping of events to functions"]),
    (lambda: pl.Algorithm("x", {Event.BATCH_END: 3}), TYPE, ["algorithm 'x' at BATCH_END", "3 is not a function"]),
    (lambda: pl.Algorithm("", {Event.BATCH_END: identity}), TYPE, ["not empty"]),
    (lambda: pl.algorithm(Event.INIT)(lambda a, b, c: a), TYPE, ["takes 3 arguments", "(state, stages)"]),
    (lambda: pl.algorithm(Event.INIT)(lambda: 0), TYPE, ["takes 0 arguments", "(state)"]),
    (lambda: pl.algorithm(Event.INIT)(lambda event, state: state), TYPE, ["(event, state)", "state.event"]),
    (lambda: pl.algorithm(Event.INIT, init=3)(identity), TYPE, ["'identity': init=3", "init=lambda state: 0"]),
    (lambda: pl.algorithm(Event.INIT, init=lambda: 3)(identity), TYPE, ["init=", "function of (state)"]),
    (
        lambda: pl.algorithm(Event.INIT, when="often")(identity),
        (pl.TimeFormatError, ValueError),
        ["when='often'", '"10ba"'],
    ),
    (lambda: pl.algorithm(Event.INIT, when=0.5)(identity), TYPE, ["when=0.5", '"10ba"', "function of the State"]),
    (
        lambda: pl.algorithm(Event.INIT, when=lambda e, s: True)(identity),
        TYPE,
        ["when is the function", "<lambda>(state)"],
    ),
    (lambda: pl.every("1.5ep"), (pl.TimeFormatError, ValueError), ["'1.5ep'", "whole numbers", '"2ep"']),
]


@pytest.mark.parametrize(("define", "kind", "says"), DEFINITIONS)
def test_definitions_of_algorithms(define: Callable[[], Any], kind: tuple[Any, Any], says: list[str]) -> None:
    refused(define, *kind, *says)


RETURNED = [
    (lambda state: None, ["returned None", "return state.replace(...)", "`return state`"]),
    (lambda state: (state, state), ["returned tuple, not a State", "state.replace(...)"]),
    (lambda state: state.params, ["returned FrozenDict, not a State"]),
    (lambda state: state.module(), ["returned Sequential, not a State"]),
    (lambda state: Wider(model=state.model, params=state.params), ["a Wider where it was given a State", "replace"]),
]


@pytest.mark.parametrize("event", [Event.INIT, Event.AFTER_LOSS, Event.EVAL_START, Event.FIT_END])
@pytest.mark.parametrize(("handler", "says"), RETURNED)
def test_algorithms_that_return_no_state(event: Event, handler: Any, says: list[str]) -> None:
    stream = fit(algorithms=[at(event, handler)], evaluators=DATA)
    events = breaks(stream, pl.AlgorithmReturnError, TypeError, f"algorithm 'mine' at {event.name}", *says)
    assert event not in events


def with_param(make: Callable[[torch.Tensor], Any], name: str = WEIGHT) -> Callable[[pl.State], pl.State]:
    return lambda state: state.replace(params={**state.params, name: make(state.params[WEIGHT])})


STRUCTURES = [
    (Event.BATCH_END, with_param(lambda w: w[:2]), ["params['0.weight'] from (5, 4)", "to (2, 4)"]),
    (Event.BATCH_END, with_param(lambda w: w.double()), ["torch.float32", "to (5, 4) torch.float64"]),
    (Event.BATCH_END, with_param(lambda w: w.to("meta")), ["on cpu to", "on meta"]),
    (Event.BATCH_END, with_param(lambda w: 3.0), ["put float into params['0.weight']", "not a tensor"]),
    (Event.BATCH_END, with_param(lambda w: None), ["put NoneType into params['0.weight']"]),
    (Event.BATCH_END, with_param(lambda w: w, "more"), ["unknown ['more']", "Keep the names", "state.with_module"]),
    (
        Event.BATCH_END,
        lambda s: s.replace(params={WEIGHT: s.params[WEIGHT]}),
        ["missing ['0.bias', '2.bias'", "params"],
    ),
    (Event.BATCH_END, lambda s: s.replace(buffers={"x": s.params[WEIGHT]}), ["names in buffers", "unknown ['x']"]),
    (
        Event.AFTER_BACKWARD,
        lambda s: s.replace(grads={name: g[:1] for name, g in s.grads.items()}),
        ["grads['0.weight'] from (5, 4)", "to (1, 4)"],
    ),
    (Event.AFTER_TRAIN_BATCH, lambda s: s.replace(grads={}), ["names in grads", "missing"]),
    (
        Event.BATCH_END,
        lambda s: s.replace(timestamp=pl.Timestamp(batch=9)),
        ["changed timestamp", "only the loop counts"],
    ),
    (Event.BATCH_END, lambda s: s.replace(seed=9), ["changed seed", "pl.random.derive"]),
    (Event.BATCH_END, lambda s: s.replace(position=Event.INIT), ["position", "only the loop"]),
    (Event.BATCH_END, lambda s: s.replace(event=Event.INIT), ["returned a State of INIT"]),
    (Event.BATCH_END, lambda s: s.replace(event="lunch"), ["returned a State of 'lunch'", "changed state.event"]),
    (Event.INIT, lambda s: s.replace(model=net()), ["changed model to a Sequential", "state.with_module(module)"]),
    (Event.BATCH_START, lambda s: s.replace(batch=None), ["changed batch to None", "the step needs it"]),
    (Event.BEFORE_FORWARD, lambda s: s.replace(microbatch=None), ["changed microbatch to None"]),
    (Event.BATCH_START, lambda s: s.replace(loss_scale=2.0), ["changed loss_scale to a float", "'amp_fp16'"]),
    (Event.BATCH_END, lambda s: s.replace(skipped=1), ["changed skipped to a int", "a tensor"]),
    (Event.BATCH_END, lambda s: s.replace(nonfinite=None), ["changed nonfinite to a NoneType", "a tensor"]),
    (Event.BATCH_END, lambda s: s.with_module(nn.Linear(4, 3)), ["changed model", "at INIT, with state.with_module"]),
]


@pytest.mark.parametrize(("event", "handler", "says"), STRUCTURES)
def test_algorithms_that_change_what_they_may_not(event: Event, handler: Any, says: list[str]) -> None:
    stream = fit(algorithms=[at(event, handler)])
    events = breaks(stream, pl.AlgorithmStructureError, ValueError, "algorithm 'mine' at", event.name, *says)
    assert event not in events


@pytest.mark.parametrize("event", [Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD])
def test_params_stay_between_forward_and_backward(event: Event) -> None:
    def decay(state: pl.State) -> pl.State:
        return state.replace(params={name: p.detach() * 0.9 for name, p in state.params.items()})

    says = (f"replaced params at {event.name}", "BEFORE_FORWARD or earlier", "AFTER_BACKWARD on")
    breaks(fit(algorithms=[at(event, decay)]), pl.AlgorithmStructureError, ValueError, *says)


def test_a_state_that_an_algorithm_kept_is_refused() -> None:
    kept: list[pl.State] = []

    def return_the_first(state: pl.State) -> pl.State:
        kept.append(state)
        return kept[0]

    says = ("algorithm 'mine' at BATCH_START", "changed timestamp")
    breaks(fit(algorithms=[at(Event.BATCH_START, return_the_first)]), pl.AlgorithmStructureError, ValueError, *says)

    kept.clear()
    both = pl.algorithm(Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, name="mine")(return_the_first)
    says = ("returned a State of BATCH_START", "had kept", "Return state.replace(...) of its argument")
    breaks(fit(algorithms=[both]), pl.AlgorithmStructureError, ValueError, *says)


@pytest.mark.parametrize("field", ["params", "buffers", "algorithm_state", "metrics", "grads"])
@pytest.mark.parametrize("value", [[1], 3])
def test_fields_that_are_mappings_take_mappings(field: str, value: Any) -> None:
    state = pl.State.create(net())
    refused(
        lambda: state.replace(**{field: value}), *TYPE, f"{field} is a mapping", type(value).__name__, f"state.{field}"
    )


EARLY = [e for e in Event if e not in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)]
EARLY = [e for e in EARLY if not (e.is_predict or e.name.startswith(("ITERATION", "EVAL_STANDALONE")))]


@pytest.mark.parametrize("event", EARLY)
@pytest.mark.parametrize("read", [lambda s: s.grads[WEIGHT], lambda s: s.grads is None], ids=["use", "is None"])
def test_gradients_are_not_read_before_they_exist(event: Event, read: Any) -> None:
    def reader(state: pl.State) -> pl.State:
        read(state)
        return state

    says = (f"read at {event.name}", "AFTER_BACKWARD, AFTER_TRAIN_BATCH, BATCH_END", "Bind the algorithm to one of")
    stream = fit(algorithms=[at(event, reader)], evaluators=DATA, max_duration="1ep")
    breaks(stream, pl.GradientsNotReadyError, RuntimeError, *says)


def test_gradients_are_none_to_those_who_only_look() -> None:
    seen = {}
    for event, state in fit(callbacks=[lambda event, state: seen.setdefault(event, state.grads) and None]):
        assert state.grads is None or event in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)
    assert seen[Event.AFTER_LOSS] is None
    assert seen[Event.AFTER_BACKWARD] is not None


def test_exceptions_of_algorithms_say_whose_they_are() -> None:
    def broken(state: pl.State) -> pl.State:
        raise KeyError("broken")

    stream = fit(algorithms=[at(Event.BATCH_START, broken)])
    with pytest.raises(KeyError) as caught:
        pl.run(stream)
    assert caught.value.__notes__ == ["raised by algorithm 'mine' at BATCH_START, batch 0"]
    with pytest.raises(KeyError) as caught:
        pl.run(fit(algorithms=[pl.Algorithm("mine", {Event.BATCH_END: identity}, init=broken)]))
    assert caught.value.__notes__ == ["raised by init of algorithm 'mine'"]


def write_to_a_field(state: pl.State) -> pl.State:
    state.loss = torch.tensor(1.0)  # type: ignore[misc]
    return state


def write_to_a_mapping(state: pl.State) -> pl.State:
    state.params["more"] = torch.tensor(1.0)
    return state


OURS = [
    (write_to_a_field, pl.FrozenStateError, AttributeError),
    (write_to_a_mapping, pl.FrozenDictError, TypeError),
    (lambda state: state.replace(metrics=3), pl.ArgumentTypeError, TypeError),
    (lambda state: state.replace(losss=3), pl.ArgumentError, ValueError),
    (lambda state: state.grads and state, pl.GradientsNotReadyError, RuntimeError),
]


@pytest.mark.parametrize(("handler", "error", "builtin"), OURS)
def test_errors_of_ours_inside_algorithms_say_whose_they_are(handler: Any, error: Any, builtin: Any) -> None:
    stream = fit(algorithms=[at(Event.BATCH_START, handler)])
    breaks(stream, error, builtin, "raised by algorithm 'mine' at BATCH_START, batch 0")


def test_errors_that_name_the_algorithm_say_it_once() -> None:
    with pytest.raises(pl.AlgorithmReturnError) as caught:
        pl.run(fit(algorithms=[at(Event.BATCH_START, lambda state: None)]))
    assert not hasattr(caught.value, "__notes__")
