"""What an algorithm writes at an event is what every later event and computation reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support.models import batches, mlp, plain
from tests.support.streams import assert_same

DATA = batches((4, 4), seed=4)
OTHER = batches((4, 4), seed=9)
HELD_OUT = batches((4,), seed=5)
LR = 0.1


def module(make: Callable[[], nn.Module] = plain) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def fit(*algorithms: pl.Algorithm, data: Any = DATA, model: Any = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "loss": functional.cross_entropy,
        "optimizer": pl.optim.sgd(lr=LR),
        "max_duration": "1ep",
        "algorithms": algorithms,
        **changes,
    }
    return pl.fit(module() if model is None else model, data, **arguments)


def at(event: Event, change: Callable[[pl.State], pl.State]) -> pl.Algorithm:
    return pl.algorithm(event, name="writer")(change)


def trained(stream: Any) -> dict[str, Tensor]:
    return dict(pl.run(stream).params)


def test_without_algorithms_this_is_the_loop_by_hand() -> None:
    """What the other tests compare with."""
    model = module()
    for inputs, targets in DATA:
        grads = torch.autograd.grad(functional.cross_entropy(model(inputs), targets), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), grads, strict=True):
                parameter -= LR * gradient
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained(fit())[name], parameter.detach())


# The batch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_another_batch_is_trained_on(event: Event, microbatch_size: int | None) -> None:
    writer = at(event, lambda state: state.replace(batch=OTHER[state.timestamp.batch_in_epoch]))
    wanted = trained(fit(data=OTHER, microbatch_size=microbatch_size))
    assert_same(trained(fit(writer, microbatch_size=microbatch_size)), wanted, event.name)
    for later, state in fit(writer):
        if later in (Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END):
            batch = OTHER[state.timestamp.batch - (later is Event.BATCH_END)]
            assert state.batch[0] is batch[0]


def test_another_microbatch_is_trained_on() -> None:
    def double(state: pl.State) -> pl.State:
        return state.replace(microbatch=(2 * state.microbatch[0], state.microbatch[1]))

    doubled = [(2 * inputs, targets) for inputs, targets in DATA]
    given = trained(fit(at(Event.BEFORE_FORWARD, double), microbatch_size=2))
    assert_same(given, trained(fit(data=doubled, microbatch_size=2)), "doubled inputs")


def test_other_targets_after_the_forward_are_those_of_the_loss() -> None:
    def first_class(state: pl.State) -> pl.State:
        return state.replace(microbatch=(state.microbatch[0], torch.zeros_like(state.microbatch[1])))

    relabelled = [(inputs, torch.zeros_like(targets)) for inputs, targets in DATA]
    for event in (Event.AFTER_FORWARD, Event.BEFORE_LOSS):
        assert_same(trained(fit(at(event, first_class))), trained(fit(data=relabelled)), event.name)


# Outputs and loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [Event.AFTER_FORWARD, Event.BEFORE_LOSS])
def test_other_outputs_are_those_of_the_loss(event: Event) -> None:
    writer = at(event, lambda state: state.replace(outputs=state.outputs / 2))
    wanted = trained(fit(loss=lambda outputs, targets: functional.cross_entropy(outputs / 2, targets)))
    assert_same(trained(fit(writer)), wanted, event.name)


@pytest.mark.parametrize("event", [Event.AFTER_LOSS, Event.BEFORE_BACKWARD])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_another_loss_is_differentiated(event: Event, microbatch_size: int | None) -> None:
    writer = at(event, lambda state: state.replace(loss=3 * state.loss))
    wanted = trained(fit(loss=lambda o, t: 3 * functional.cross_entropy(o, t), microbatch_size=microbatch_size))
    assert_same(trained(fit(writer, microbatch_size=microbatch_size)), wanted, event.name)


@pytest.mark.parametrize("event", [Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_a_penalty_on_the_parameters_has_its_gradient(event: Event, microbatch_size: int | None) -> None:
    """An L2 penalty adds its derivative, 2 * 0.01 * w, to the gradient, whatever the split."""
    penalised: list[Tensor] = []

    def penalty(state: pl.State) -> Tensor:
        return 0.01 * sum(p.square().sum() for p in state.params.values())

    def early(state: pl.State) -> pl.State:
        penalised.append(penalty(state))
        return state

    def late(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss + (penalised.pop() if penalised else penalty(state)))

    writers = [pl.algorithm(Event.BEFORE_BACKWARD, name="add")(late)]
    if event in (Event.AFTER_FORWARD, Event.BEFORE_LOSS):
        writers.append(pl.algorithm(event, name="compute")(early))
    elif event is Event.AFTER_LOSS:
        writers = [pl.algorithm(event, name="add")(late)]

    def gradients(*algorithms: pl.Algorithm) -> pl.State:
        stream = fit(*algorithms, microbatch_size=microbatch_size)
        return next(state for event, state in stream if event is Event.AFTER_TRAIN_BATCH)

    plainly, given = gradients(), gradients(*writers)
    for name, gradient in plainly.grads.items():  # type: ignore[union-attr]
        torch.testing.assert_close(given.grads[name], gradient + 0.02 * plainly.params[name])  # type: ignore[index]
    extra = sum(0.01 * p.square().sum() for p in plainly.params.values())
    torch.testing.assert_close(given.loss, plainly.loss + extra)


# Gradients and parameters --------------------------------------------------------------------------------------------


def test_gradients_after_a_microbatch_are_added_to() -> None:
    """Doubling what has accumulated after each of two microbatches of equal size: 4 g1 + 2 g2, over two."""

    def double(state: pl.State) -> pl.State:
        return state.replace(grads={name: 2 * g for name, g in state.grads.items()})

    def first(*algorithms: pl.Algorithm, data: Any) -> Any:
        stream = fit(*algorithms, data=data, microbatch_size=2)
        return next(state.grads for event, state in stream if event is Event.AFTER_TRAIN_BATCH)

    halves = [tuple(part[k : k + 2] for part in DATA[0]) for k in (0, 2)]
    g1, g2 = (first(data=[half]) for half in halves)
    given = first(at(Event.AFTER_BACKWARD, double), data=DATA[:1])
    for name in given:
        torch.testing.assert_close(given[name], (4 * g1[name] + 2 * g2[name]) / 2)


def test_gradients_before_the_step_are_those_of_the_step() -> None:
    writer = at(Event.AFTER_TRAIN_BATCH, lambda s: s.replace(grads={n: torch.ones_like(g) for n, g in s.grads.items()}))
    pairs = list(fit(writer))
    start = next(state.params for event, state in pairs if event is Event.FIT_START)
    end = next(state for event, state in pairs if event is Event.BATCH_END)
    for name, parameter in start.items():
        assert torch.equal(end.params[name], parameter - LR)
        assert torch.equal(end.grads[name], torch.ones_like(parameter))


def test_a_gradient_that_is_none_leaves_its_parameter() -> None:
    writer = at(Event.AFTER_TRAIN_BATCH, lambda s: s.replace(grads={**s.grads, "0.weight": None}))
    start, end = module().state_dict(), trained(fit(writer))
    assert torch.equal(end["0.weight"], start["0.weight"])
    assert not torch.equal(end["2.weight"], start["2.weight"])


@pytest.mark.parametrize(
    "event",
    [
        *(Event.FIT_START, Event.EPOCH_START, Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_START),
        *(Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD),
    ],
)
def test_parameters_before_the_forward_are_those_of_the_forward(event: Event) -> None:
    def zero_at_first(state: pl.State) -> pl.State:
        if state.timestamp.batch:
            return state
        return state.replace(params={name: torch.zeros_like(p) for name, p in state.params.items()})

    zeros = module()
    for parameter in zeros.parameters():
        nn.init.zeros_(parameter)
    assert_same(trained(fit(at(event, zero_at_first))), trained(fit(model=zeros)), event.name)


@pytest.mark.parametrize("event", [Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH])
def test_parameters_after_the_backward_are_those_that_the_step_starts_from(event: Event) -> None:
    def halve(state: pl.State) -> pl.State:
        return state.replace(params={name: p / 2 for name, p in state.params.items()})

    before = module().state_dict()
    state = next(s for e, s in fit(at(event, halve)) if e is Event.BATCH_END)
    for name, parameter in before.items():
        assert torch.equal(state.params[name], torch.add(parameter / 2, state.grads[name], alpha=-LR))


@pytest.mark.parametrize("event", [Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT])
def test_parameters_between_batches_are_those_of_the_next(event: Event) -> None:
    def zero(state: pl.State) -> pl.State:
        return state.replace(params={name: torch.zeros_like(p) for name, p in state.params.items()})

    seen = [state for later, state in fit(at(event, zero), max_duration="2ep") if later is Event.BATCH_START]
    following = seen[1:] if event in (Event.BATCH_END, Event.BATCH_CHECKPOINT) else seen[2:3]
    assert following
    for state in following:
        assert not any(p.any() for p in state.params.values())


@pytest.mark.parametrize("event", [Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EPOCH_CHECKPOINT])
def test_memory_of_the_optimizer_is_what_was_written(event: Event) -> None:
    """Momentum set to 0 before every step is no momentum."""

    def forget(state: pl.State) -> pl.State:
        zeros = {name: torch.zeros_like(b) for name, b in state.opt_state["momentum_buffer"].items()}
        return state.replace(opt_state=pl.FrozenDict({**state.opt_state, "momentum_buffer": pl.FrozenDict(zeros)}))

    momentum = pl.optim.sgd(lr=LR, momentum=0.9)
    data = DATA if event is not Event.EPOCH_CHECKPOINT else DATA[:1]
    given = trained(fit(at(event, forget), data=data, optimizer=momentum, max_duration="2ep"))
    assert_same(given, trained(fit(data=data, max_duration="2ep")), event.name)


@pytest.mark.parametrize("event", [Event.BEFORE_FORWARD, Event.BATCH_END])
def test_buffers_are_what_was_written(event: Event) -> None:
    def reset(state: pl.State) -> pl.State:
        return state.replace(buffers={**state.buffers, "1.num_batches_tracked": torch.tensor(41)})

    state = [s for e, s in fit(at(event, reset), model=module(mlp)) if e is Event.BATCH_END][-1]
    assert int(state.buffers["1.num_batches_tracked"]) == (42 if event is Event.BEFORE_FORWARD else 41)
    last = pl.run(fit(at(event, reset), model=module(mlp)))
    after: Any = last.module()
    assert int(after[1].num_batches_tracked) == (42 if event is Event.BEFORE_FORWARD else 41)


# Evaluation ----------------------------------------------------------------------------------------------------------


def measured(*algorithms: pl.Algorithm, **changes: Any) -> pl.State:
    return pl.run(fit(*algorithms, evaluators={"val": changes.pop("held_out", HELD_OUT)}, **changes))


def test_outputs_after_the_forward_are_those_that_are_measured() -> None:
    def certain(state: pl.State) -> pl.State:
        targets = functional.one_hot(state.microbatch[1], state.outputs.shape[1])
        return state.replace(outputs=100.0 * targets)

    metrics = measured(at(Event.EVAL_AFTER_FORWARD, certain)).metrics["val"]
    assert float(metrics["accuracy"]) == 1.0
    assert float(metrics["loss"]) < 1e-6
    assert float(measured().metrics["val"]["loss"]) > 0.1


@pytest.mark.parametrize("event", [Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD])
def test_the_batch_of_an_evaluation_is_what_was_written(event: Event) -> None:
    field = "batch" if event is Event.EVAL_BATCH_START else "microbatch"
    given = measured(at(event, lambda state: state.replace(**{field: OTHER[0]}))).metrics
    assert_same(given, measured(held_out=OTHER[:1]).metrics, event.name)


@pytest.mark.parametrize("event", [Event.EVAL_START, Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD])
def test_parameters_written_in_an_evaluation_serve_it_and_nothing_else(event: Event) -> None:
    def zero(state: pl.State) -> pl.State:
        return state.replace(params={name: torch.zeros_like(p) for name, p in state.params.items()})

    state = measured(at(event, zero))
    torch.testing.assert_close(state.metrics["val"]["loss"], torch.tensor(3.0).log())  # three classes, all alike
    assert_same(dict(state.params), trained(fit()), "training resumes from its own parameters")


def test_every_evaluator_starts_from_the_training_parameters() -> None:
    def zero(state: pl.State) -> pl.State:
        if state.evaluator != "a":
            return state
        return state.replace(params={name: torch.zeros_like(p) for name, p in state.params.items()})

    metrics = pl.run(fit(at(Event.EVAL_START, zero), evaluators={"a": HELD_OUT, "b": HELD_OUT})).metrics
    torch.testing.assert_close(metrics["a"]["loss"], torch.tensor(3.0).log())
    assert_same(metrics["b"], measured().metrics["val"], "the second evaluator")


def test_metrics_written_at_the_end_of_an_evaluation_are_kept() -> None:
    def annotate(state: pl.State) -> pl.State:
        return state.replace(metrics={**state.metrics, "mine": pl.FrozenDict(size=torch.tensor(4.0))})

    metrics = measured(at(Event.EVAL_END, annotate)).metrics
    assert float(metrics["mine"]["size"]) == 4.0
    assert "loss" in metrics["val"]


def test_memory_is_what_was_written_at_any_event() -> None:
    def count(state: pl.State) -> pl.State:
        assert state.algorithm_state["count"] == len(seen)
        seen.append(state.event)
        return state.remember("count", len(seen))

    seen: list[Any] = []
    # Memory is made after INIT.
    counter = pl.Algorithm("count", {tuple(e for e in Event if e is not Event.INIT): count}, init=lambda state: 0)
    events = [event for event, _ in fit(counter, evaluators={"val": HELD_OUT}, microbatch_size=3)]
    assert seen == events[1:]


def test_what_one_algorithm_writes_the_next_one_reads() -> None:
    double = pl.algorithm(Event.BATCH_START, name="double")(
        lambda state: state.replace(batch=(2 * state.batch[0], state.batch[1]))
    )
    seen = []

    @pl.algorithm(Event.BATCH_START)
    def look(state: pl.State) -> pl.State:
        seen.append(state.batch[0])
        return state

    pl.run(fit(double, look))
    assert torch.equal(seen[0], 2 * DATA[0][0])
    observed = []
    pl.run(
        fit(double, callbacks=[lambda event, s: observed.append(s.batch[0]) if event is Event.BATCH_START else None])
    )
    assert torch.equal(observed[0], 2 * DATA[0][0])
