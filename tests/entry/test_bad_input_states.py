"""What States can't be used for: going on where nothing can, in another run, and being written to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support.refusals import DATA, VALUE, WEIGHT, Wider, at, breaks, fit, net, refused


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Event, pl.State]]:
    return list(
        fit(max_duration="1ep", evaluators=pl.Evaluator(DATA, interval="2ba"), optimizer=pl.optim.adamw(lr=0.01))
    )


def last(pairs: Any, wanted: Event) -> pl.State:
    state: pl.State = next(state for event, state in reversed(pairs) if event is wanted)
    return state


ADAMW: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01), "max_duration": "2ep"}
KEEPABLE = {e.name for e in pl.order.BOUNDARIES} | {"FIT_END"}


def test_going_on_from_between_boundaries_names_the_next_one(pairs: list[tuple[Event, pl.State]]) -> None:
    for index, (event, state) in enumerate(pairs):
        if event.name in KEEPABLE:
            continue
        following = next(later.name for later, _ in pairs[index:] if later.name in KEEPABLE)
        if event is Event.BEFORE_DATALOADER:
            following = "BATCH_END"  # not known there: the last one of an epoch finds no batch
        refused(
            lambda state=state: fit(state, **ADAMW),
            *(pl.ResumeError, ValueError),
            f"kept at {event.name}, in the middle",
            f"Keep the one at {following}",
            "Boundaries are AFTER_LOAD, FIT_START",
        )


def test_going_on_from_evaluation_and_prediction() -> None:
    model = net()
    kept = dict(pl.evaluate(model, DATA, loss=functional.cross_entropy)) | dict(pl.predict(model, DATA))
    says = ("EVAL_STANDALONE_START", "the State that you evaluated")
    refused(lambda: fit(kept[Event.EVAL_STANDALONE_START]), pl.ResumeError, ValueError, *says)
    says = ("PREDICT_BATCH_END", "the State that you predicted from")
    refused(lambda: fit(kept[Event.PREDICT_BATCH_END]), pl.ResumeError, ValueError, *says)


def test_a_state_of_another_model(pairs: list[tuple[Event, pl.State]]) -> None:
    kept = last(pairs, Event.BATCH_END)
    linear = pl.State.create(nn.Linear(4, 3))
    wider = pl.State.create(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    error = (pl.ResumeError, ValueError)
    says = ("missing ['bias', 'weight']", "unknown ['0.bias', '0.weight'", "state.with_module(module)")
    refused(lambda: fit(kept.replace(model=linear.model), **ADAMW), *error, *says)
    says = ("params['0.weight'] has shape (6, 4) in this State and (5, 4) in its model",)
    refused(lambda: fit(kept.replace(params=wider.params), **ADAMW), *error, *says)
    refused(lambda: pl.evaluate(kept.replace(params=wider.params), DATA, loss=functional.cross_entropy), *error, *says)


def test_memory_of_another_optimizer(pairs: list[tuple[Event, pl.State]]) -> None:
    kept = last(pairs, Event.BATCH_END)
    plain = pl.run(fit())
    error = (pl.ResumeError, ValueError)
    afresh = "fit(state.replace(opt_state=None), ...)"
    says = ("another optimizer than adamw", "it holds step, skipped, exp_avg", "needs step", "max_exp_avg_sq", afresh)
    refused(lambda: fit(kept, optimizer=pl.optim.adamw(lr=0.1, amsgrad=True)), *error, *says)
    momentum = pl.optim.sgd(lr=0.1, momentum=0.9)
    refused(
        lambda: fit(kept, optimizer=momentum), *error, "another optimizer than sgd", "needs momentum_buffer", afresh
    )
    refused(lambda: fit(plain, optimizer=momentum), *error, "it holds nothing, and sgd needs momentum_buffer", afresh)
    refused(
        lambda: fit(kept, max_duration="2ep"), *error, "it holds step, skipped, exp_avg", "sgd needs nothing", afresh
    )

    linear = pl.State.create(nn.Linear(4, 3)).replace(opt_state=kept.opt_state)
    refused(lambda: fit(linear, **ADAMW), *error, "made by adamw for another model", afresh)
    wider = pl.State.create(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))).replace(
        opt_state=kept.opt_state
    )
    says = ("opt_state['exp_avg']['0.weight'] has shape (5, 4)", "(6, 4)", "another model's", afresh)
    refused(lambda: fit(wider, **ADAMW), *error, *says)

    assert pl.run(fit(kept.replace(opt_state=None), max_duration="2ep")).timestamp.epoch == 2


def test_a_state_brings_its_seed(pairs: list[tuple[Event, pl.State]]) -> None:
    kept = last(pairs, Event.BATCH_END)
    refused(lambda: fit(kept, seed=5, **ADAMW), *VALUE, "seed=5", "has seed 0", "fit(state.replace(seed=5), ...)")


def test_fields_of_a_state_are_not_written_to() -> None:
    state = pl.State.create(net())
    error = (pl.FrozenStateError, AttributeError)
    for name in ("loss", "params", "grads", "nonsense"):
        says = (f"state.{name} can't be changed", f"state = state.replace({name}=...)")
        refused(lambda name=name: setattr(state, name, 1), *error, *says)
        refused(lambda name=name: delattr(state, name), *error, *says)
    wider = Wider.create(net())
    refused(lambda: setattr(wider, "extra", 1), *error, "state.replace(extra=...)")


def test_mappings_of_a_state_are_not_written_to() -> None:
    state = pl.State.create(net())
    weight = state.params[WEIGHT]
    writes: list[Callable[[Any], Any]] = [
        lambda params: params.__setitem__(WEIGHT, weight * 2),
        lambda params: params.__delitem__(WEIGHT),
        lambda params: params.update({WEIGHT: weight * 2}),
        lambda params: params.pop(WEIGHT),
        lambda params: params.clear(),
        lambda params: params.setdefault("more", weight),
        lambda params: params.__ior__({WEIGHT: weight * 2}),
    ]
    for write in writes:
        refused(
            lambda write=write: write(state.params), pl.FrozenDictError, TypeError, "read-only", "state.replace(...)"
        )
    assert state.params[WEIGHT] is weight


def test_replace_knows_its_fields() -> None:
    state = pl.State.create(net())
    says = ("State has no field 'paramz'", "it has model, params,", "state.remember(name, memory)", "subclassing")
    refused(lambda: state.replace(paramz=1), *VALUE, *says, "(did you mean 'params'?)")
    refused(lambda: state.replace(losss=1), *VALUE, "no field 'losss' (did you mean 'loss'?)")
    refused(lambda: state.replace(gradients={}), *VALUE, "no field 'gradients' (gradients are state.grads")
    refused(lambda: state.replace(zork={}), *VALUE, "no field 'zork'; it has model")


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("gradients", "gradients are state.grads"),
        ("lr", "optimizer.lr(state.timestamp)"),
        ("optimizer", "state.opt_state"),
        ("epoch", "it is state.timestamp.epoch"),
        ("global_step", "state.timestamp.batch"),
        ("parameters", "state.params"),
        ("accuracy", "state.metrics[label][name]"),
    ],
)
def test_attributes_that_are_elsewhere_say_where(name: str, where: str) -> None:
    state = pl.State.create(net())
    with pytest.raises(AttributeError, match=re.escape(f"'State' object has no attribute '{name}': ")) as caught:
        getattr(state, name)
    assert where in str(caught.value)
    assert not hasattr(state, name)
    assert name not in dir(state)
    refused(lambda: state.replace(**{name: 1}), *VALUE, f"no field {name!r} (", where)


def test_fields_of_subclasses_may_have_these_names() -> None:
    @attrs.frozen(eq=False, kw_only=True)
    class Own(pl.State):
        lr: float = 0.5

    @attrs.frozen(eq=False, kw_only=True, slots=False)
    class Loose(pl.State):
        lr: float = 0.5

    for cls in (Own, Loose):
        state = cls.create(net())
        assert state.lr == 0.5
        assert state.replace(lr=0.25).lr == 0.25
        assert "lr" in dir(state)


def test_writing_in_place_is_found_by_strict() -> None:
    def scale(state: pl.State) -> pl.State:
        state.params[WEIGHT].mul_(2)
        return state

    says = ("algorithm 'mine' changed state.params['0.weight'] in place", "x = x + 1", "state.replace(...)")
    breaks(fit(algorithms=[at(Event.BATCH_END, scale)], strict=True), pl.ImpurityError, RuntimeError, *says)
