"""What code outside of the loop reads, in a way that is easily missed, stays."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import ref

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import pure_loop as pl
from pure_loop import Event
from pure_loop.loop import driver
from pure_loop.stages.ownership import Ownership
from pure_loop.stages.references import can_count
from tests.ownership.ways import leaves_behind
from tests.support.donating import DATA, Kept, assert_same, fit, plain
from tests.support.problem import cross_entropy

pytestmark = pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter")


def forward_of_an_algorithm(event: Event, kept: Kept) -> None:
    ways: list[Callable[[Any, Any], Any]] = [
        lambda result, stages: result,
        lambda result, stages: result.params["0.weight"],
        lambda result, stages: leaves_behind(result.outputs),
        lambda result, stages: leaves_behind(stages.loss(result).loss),
    ]

    def look(state: pl.State, stages: Any) -> pl.State:
        way = ways[state.timestamp.batch % len(ways)]
        kept.keep(f"what a forward at {event} gave", way(stages.forward(state.replace(microbatch=state.batch)), stages))
        return state

    pl.run(fit(algorithms=[pl.algorithm(event, name="look")(look)]))


def of_an_evaluation(kept: Kept) -> None:
    for event, state in fit(evaluators=pl.Evaluator(DATA, gradients=True, interval="1ba")):
        if event is Event.EVAL_AFTER_FORWARD:
            kept.keep("leaves of an evaluation", leaves_behind(state.outputs))


def clock_that_reads(kept: Kept) -> None:
    """It is called after references were counted, and before the step."""
    scope: dict[str, Any] = {"state": None}
    seconds = itertools.count()

    def clock() -> float:
        state = scope["state"]
        if state is not None and state.event is Event.AFTER_TRAIN_BATCH:
            kept.keep("what a clock reads", state.params["0.weight"])
        return float(next(seconds))

    scope["stream"] = fit(clock=clock)
    exec("for event, state in stream: pass", scope)  # as in a module


def mode_of_a_batch(mode: Any, method: str, kept: Kept) -> None:
    """It is there from the start of a batch to its end, and keeps whatever its operations have."""
    seen: list[Any] = []

    def sees(this: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        seen.extend(each for each in tree_leaves(args) if isinstance(each, Tensor))
        return result

    inside = type("Seeing", (mode,), {method: sees})()
    for event, state in fit():
        if event is Event.BATCH_START and state.timestamp.batch == 2:
            inside.__enter__()
        if event is Event.BATCH_END and state.timestamp.batch == 3:
            inside.__exit__(None, None, None)
            kept.keep("what a mode saw", seen)


def hooks_of_saved_tensors(kept: Kept) -> None:
    def pack(tensor: Tensor) -> Tensor:
        kept.keep("what was packed", tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pl.run(fit())


def batch_of_a_subclass(kept: Kept) -> None:
    class Spying(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is functional.linear and type(args[1]) is Tensor:
                kept.keep("what a subclass saw", args[1].detach())
            return super().__torch_function__(function, types, args, kwargs or {})

    pl.run(fit(data=[(inputs.as_subclass(Spying), targets) for inputs, targets in DATA]))


def hook_of_all_optimizers(kept: Kept) -> None:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        (group,) = optimizer.param_groups
        kept.keep("what a hook saw", [each for p in group["params"] for each in (p, optimizer.state[p]["exp_avg"])])

    handles = []
    for event, _ in fit(optimizer=pl.optim.from_torch(torch.optim.Adam, lr=0.1)):
        if event is Event.FIT_START:
            handles.append(register_optimizer_step_post_hook(hook))
    handles[0].remove()


def module_kept_by(way: str, kept: Kept) -> None:
    """Code of the user's is given a private module once, and its parameters are kept later."""
    modules: list[nn.Module] = []

    def evaluated(model: nn.Module, batch: Any) -> Any:
        modules.append(model)
        return model(batch[0])

    options = {"evaluators": DATA[:1], "eval_interval": "2ba", "loss": pl.Task(loss=cross_entropy, validate=evaluated)}
    if way == "hook":
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: modules.append(module))
    for event, state in fit(**options if way == "eval" else {}):
        if event is Event.BATCH_END and state.timestamp.batch == 3:
            if way == "apply":
                state.model.apply(modules.append, state.params, state.buffers, training=True)
            elif way == "hook":
                handle.remove()
        if event is Event.BATCH_END and state.timestamp.batch in (5, 6):
            kept.keep("parameters", [parameter for module in modules for parameter in module.parameters()])


def hook_of_the_loss(kept: Kept) -> None:
    """It is registered when the stream has begun."""
    loss = nn.CrossEntropyLoss()
    for event, state in fit(loss=loss):
        if event is Event.BATCH_END and state.timestamp.batch == 2:
            loss.register_forward_hook(lambda module, args, output: kept.keep("leaves", leaves_behind(args[0])))


@contextmanager
def _set(kind: str, watch: Any) -> Iterator[None]:
    before, setter = getattr(sys, f"get{kind}")(), getattr(sys, f"set{kind}")
    setter(watch)
    try:
        yield
    finally:
        setter(before)


def profiler_or_debugger(kind: str, kept: Kept) -> None:
    def keep(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is nn.Linear.forward.__code__ and len(kept.things) < 12:
            kept.keep("a weight", frame.f_locals["self"].weight.detach())

    with _set(kind, keep):
        pl.run(fit(strict=False))


def tool_of_monitoring(tool: str, kept: Kept) -> None:
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:  # of Python 3.12 and later
        return kept.keep("nothing", [])
    number, begins, code = getattr(monitoring, tool), monitoring.events.PY_START, nn.Linear.forward.__code__
    keep = lambda *_: kept.keep("a weight", sys._getframe(1).f_locals["self"].weight.detach())  # noqa: E731
    monitoring.use_tool_id(number, "test")
    monitoring.register_callback(number, begins, keep)
    monitoring.set_local_events(number, code, begins)
    try:
        pl.run(fit(strict=False))
    finally:
        monitoring.set_local_events(number, code, 0)
        monitoring.register_callback(number, begins, None)
        monitoring.free_tool_id(number)


def weak_reference_to_a_mapping(event: Event, kept: Kept) -> None:
    """From AFTER_FORWARD on it is that of the leaves, which the steps after go on with."""
    weak = None
    for now, state in fit():
        if weak is not None and now is Event.BATCH_START and (mapping := weak()) is not None:
            kept.keep("a tensor", dict.__getitem__(mapping, "0.weight"))
            del mapping
        if now is event and state.timestamp.batch == 3:
            weak = ref(state.params)
    kept.keep("nothing", [])


def leaves_where_the_module_has_others(kept: Kept) -> None:
    """What keeps the leaves is as much as the module has given up, so that the counts alone show nothing."""

    def keep(state: pl.State, stages: Any) -> pl.State:
        if state.timestamp.batch == 4 and state.event is Event.AFTER_FORWARD:
            kept.keep("leaves", (state.params, list(state.params.values())))
        elif state.timestamp.batch == 4:
            stages.gradients(state.replace(params={name: tensor / 2 for name, tensor in state.params.items()}))
        return state

    pl.run(fit(algorithms=[pl.algorithm(Event.AFTER_FORWARD, Event.AFTER_TRAIN_BATCH, name="keep")(keep)]))


def thread_that_reads(kept: Kept) -> None:
    """It reads a global variable while steps run: whole parameters or an error, which never change."""
    scope: dict[str, Any] = {"state": None, "stream": fit(max_duration="30ep")}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1e-4):
            with suppress(pl.errors.DonatedStateError):
                if (state := scope["state"]) is not None:
                    kept.keep("what a thread reads", state.params["0.weight"])
            state = None

    thread = threading.Thread(target=watch)
    with _set("switchinterval", 1e-4):
        thread.start()
        try:
            exec("for event, state in stream: pass", scope)
        finally:
            ended.set()
            thread.join(30)


ROUTES: dict[str, Callable[[Kept], None]] = {
    "a thread": thread_that_reads,
    "leaves of an evaluation": of_an_evaluation,
    "a clock": clock_that_reads,
    "all functions in one batch": partial(mode_of_a_batch, TorchFunctionMode, "__torch_function__"),
    "all operations in one batch": partial(mode_of_a_batch, TorchDispatchMode, "__torch_dispatch__"),
    "hooks of saved tensors": hooks_of_saved_tensors,
    "a batch of a subclass": batch_of_a_subclass,
    "a hook of all optimizers": hook_of_all_optimizers,
    "a hook of the loss": hook_of_the_loss,
    "leaves of a module that has others": leaves_where_the_module_has_others,
}
_MANY: dict[Any, tuple[Any, ...]] = {
    forward_of_an_algorithm: (Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_BACKWARD),
    weak_reference_to_a_mapping: (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.AFTER_BACKWARD),
    module_kept_by: ("eval", "hook", "apply"),
    profiler_or_debugger: ("profile", "trace"),
    tool_of_monitoring: ("DEBUGGER_ID", "PROFILER_ID", "OPTIMIZER_ID"),
}
ROUTES |= {f"{route.__name__}: {what}": partial(route, what) for route, each in _MANY.items() for what in each}


class Keeping(nn.Module):
    """A forward that keeps its weights, and what its graph leads to."""

    def __init__(self, keep: Callable[..., None]) -> None:
        super().__init__()
        self.inner, self.keep = plain(), keep

    def forward(self, x: Tensor) -> Any:
        outputs = self.inner(x)
        self.keep(list(self.inner.parameters()), outputs, leaves_behind(outputs))
        return outputs


@pytest.mark.usefixtures("gradients_of_each_size")
def test_what_code_of_the_users_is_given_stays() -> None:
    """A forward, a loss, a clip_grad and an optimizer; nobody else is given what one of them keeps."""
    kept, adamw = Kept(), pl.optim.adamw(lr=0.1)

    def keep(*things: Any) -> None:
        kept.keep("what it was given", list(things), lambda things: [t for each in things for t in tree_leaves(each)])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        keep(outputs, leaves_behind(outputs))
        return functional.cross_entropy(outputs, targets)

    def clip(grads: Any, params: Any) -> Any:
        keep(dict(grads), dict(params))
        return grads

    def keeping(function: Any) -> Any:
        def update(grads: Any, *given: Any, **more: Any) -> Any:
            params, memory = function(grads, *given, **more)
            keep(dict(grads), dict(params), memory["exp_avg"]["0.weight"])
            return params, memory

        return update

    own = attrs.evolve(adamw, update=keeping(adamw.update), overwrite=keeping(adamw.overwrite))
    by: tuple[dict[str, Any], ...] = ({"model": Keeping(keep)}, {"loss": loss}, {"clip_grad": clip}, {"optimizer": own})
    for options in by:
        pl.run(fit(**options, max_duration="1ep"))
        assert len(kept.things) >= 5
        kept.check()
        kept.things.clear()


@pytest.mark.parametrize("route", ROUTES)
def test_what_was_read_stays(route: str) -> None:
    kept = Kept()
    ROUTES[route](kept)
    assert kept.things
    kept.check()


def test_a_profiler_does_not_disturb_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.13 a frame keeps what it gives as its variables."""
    driver.measure_references()
    expected = Ownership.expected
    for kind in ("profile", "trace"):
        monkeypatch.setattr(Ownership, "expected", None)
        with _set(kind, lambda frame, event, argument: [frame.f_locals].clear()):
            driver.measure_references()
        assert Ownership.expected == expected


# What an algorithm puts in is its own. --------------------------------------------------------------------------------


@pytest.mark.usefixtures("gradients_of_each_size")
def test_what_an_algorithm_put_in_is_its_own() -> None:
    """What is given up meanwhile makes up for nothing; and where not all parameters are trained."""
    model = plain()
    model[0].bias.requires_grad_(False)
    for at, donate, field in itertools.product((0, 4), ("auto", True), ("params", "opt_state")):
        kept, old = Kept(), list[Any]()

        def replace(state: pl.State, kept: Any = kept, old: Any = old, at: int = at, field: str = field) -> pl.State:
            if state.timestamp.batch != at:
                return state
            old.extend(each for each in state.opt_state.values() if isinstance(each, dict))
            copies = tree_map_only(Tensor, lambda each: each / 2, getattr(state, field))
            kept.keep("its tensors", [each for each in tree_leaves(copies) if isinstance(each, Tensor)])
            return state.replace(**{field: copies})

        algorithms = [pl.algorithm(Event.BATCH_START, name="replace")(replace)]
        last = pl.run(fit(model, algorithms=algorithms, donate=donate))
        kept.check()
        assert_same(last, pl.run(fit(model, algorithms=algorithms, donate=False)))


@pytest.mark.parametrize("batch", [0, 4])
def test_leaves_of_a_forward_that_failed_are_in_no_module(batch: int) -> None:
    """An algorithm continues after the failure, with other parameters until the step."""
    fails = False
    before: list[Any] = []

    class Failing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return [][0] if fails else super().forward(input)

    @pl.algorithm(Event.BATCH_START, Event.AFTER_TRAIN_BATCH)
    def fail(state: pl.State, stages: Any) -> pl.State:
        nonlocal fails
        if state.event is Event.AFTER_TRAIN_BATCH:
            return state.replace(params=before.pop()) if before else state
        if state.timestamp.batch != batch:
            return state
        fails = True
        with pytest.raises(IndexError):
            stages.gradients(state)
        fails = False
        before.append(state.params)
        return state.replace(params={name: tensor / 2 for name, tensor in state.params.items()})

    model = Failing(4, 3)
    assert_same(pl.run(fit(model, algorithms=[fail])), pl.run(fit(model, algorithms=[fail], donate=False)))
