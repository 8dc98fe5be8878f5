"""Loops that are deliberately wrong, each in one way, and the law that each breaks.

A wrong loop is the library's own with one part replaced while it runs, so it is wrong in that alone. Laws of your own
can be tried on them: a law that nothing breaks proves nothing.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from textwrap import dedent
from typing import Any
from unittest.mock import patch

import attrs
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.weights import Weights
from pure_loop.evaluator import BoundEvaluator
from pure_loop.loop import driver
from pure_loop.loop import evaluation as _evaluation
from pure_loop.loop import training as loop
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.batch import gradients as gradients_of_batch
from pure_loop.stages import Stages, ownership
from pure_loop.stages.settings import NO_CONTEXT, StageSettings
from pure_loop.testing.case import Fit

__all__ = ["WRONG_LOOPS"]

_ALGORITHM = sys.modules["pure_loop.algorithm"]  # `pl.algorithm` is the decorator


def while_patched(*replacements: Callable[[], AbstractContextManager[Any]]) -> Fit:
    """``fit`` with something replaced, only while its own code runs (not while the law's does)."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for make in replacements:
                stack.enter_context(make())
            stream = pl.fit(*args, **kwargs)
        return continued(stream)

    def continued(stream: Any) -> Iterator[tuple[Event, pl.State]]:
        pairs: list[Any] = []
        while True:
            with ExitStack() as stack:
                for make in replacements:
                    stack.enter_context(make())
                pairs.extend(islice(stream, 1))
            if not pairs:
                return
            yield pairs.pop()  # kept in no variable, so that a step may write in place

    ownership.look_through(continued.__code__)
    return wrong


def edited(script: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    """A script of the loop with some lines of its source replaced."""
    source = dedent(inspect.getsource(script))
    if source.count(before) != 1:
        raise ValueError(f"the source of {script.__name__} has {source.count(before)} times {before!r}, not once")
    source = source.replace(before, after)
    name = f"<{script.__name__} with {after.strip()!r}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    scope: dict[str, Any] = {}
    exec(compile(source, name, "exec"), loop.__dict__, scope)
    changed: Callable[..., Any] = scope[script.__name__]
    return changed


def forgets_an_after_event() -> Fit:
    return _without(Event.AFTER_LOSS)


def forgets_a_checkpoint_event() -> Fit:
    return _without(Event.EPOCH_CHECKPOINT)


def _without(event: Event) -> Fit:
    def wrong(*args: Any, **kwargs: Any) -> Iterator[tuple[Event, pl.State]]:
        return (pair for pair in pl.fit(*args, **kwargs) if pair[0] is not event)

    return wrong


def evaluates_twice_at_the_end() -> Fit:
    return while_patched(lambda: patch.object(BoundEvaluator, "due_at_end", lambda self, state: True))


def counts_microbatches_as_batches() -> Fit:
    real = gradients_of_batch

    def gradients(state: pl.State, loop_stages: LoopStages) -> Any:
        for piece in loop_stages.microbatches(state.batch):
            state = yield from real(
                state.replace(batch=piece, grads=None), attrs.evolve(loop_stages, microbatch_size=None)
            )
            state = yield Event.BATCH_END, state
        return state

    return while_patched(lambda: patch.object(loop, "gradients", gradients))


def updates_in_place() -> Fit:
    real = Stages.update

    def update(self: Stages, state: pl.State, **options: Any) -> Any:
        before = dict(state.params)
        after = real(self, state, **options)
        for name, tensor in before.items():
            tensor.copy_(after.params[name])
        return after

    return while_patched(lambda: patch.object(Stages, "update", update))


def updates_through_data() -> Fit:
    """As above, behind the back of the version counter."""
    real = Stages.update

    def update(self: Stages, state: pl.State, **options: Any) -> Any:
        for tensor in state.params.values():
            tensor.data.mul_(0.99)
        return real(self, state, **options)

    return while_patched(lambda: patch.object(Stages, "update", update))


def overwrites_what_was_kept() -> Fit:
    """It takes every reference for the loop variable, and writes the new parameters where the old ones are."""
    return while_patched(
        lambda: patch.object(ownership.Ownership, "_is_unseen", lambda self, event, state, *_: self.owns(state)),
        lambda: patch.object(ownership, "_lent", lambda *mappings: []),
    )


def overwrites_what_was_read() -> Fit:
    """It doesn't look at tensors that were read."""
    return while_patched(lambda: patch.object(ownership, "_lent", lambda *mappings: []))


def lends_its_buffers_to_batchnorm() -> Fit:
    from pure_loop.model.instance import Instance

    def bind(self: Any, params: Any, buffers: Any, training: bool) -> None:
        real(self, params, buffers, training)
        for name, tensors, key in self.buffers:
            tensors[key] = buffers[name]

    real = Instance.bind
    return while_patched(lambda: patch.object(Instance, "bind", bind))


def draws_from_the_global_generator() -> Fit:
    return while_patched(lambda: patch.object(StageSettings, "seeding", lambda *_, **__: NO_CONTEXT))


def reseeds_the_global_generator() -> Fit:
    def wrong(*args: Any, **kwargs: Any) -> Iterator[tuple[Event, pl.State]]:
        for pair in pl.fit(*args, **kwargs):
            torch.manual_seed(0)
            yield pair

    return wrong


def starts_the_epoch_again() -> Fit:
    from pure_loop.data.source import Source

    real = Source.epoch
    return while_patched(
        lambda: patch.object(Source, "epoch", lambda self, epoch, start=0, seen=0: real(self, epoch, 0, 0))
    )


def forgets_the_optimizer_state() -> Fit:
    def wrong(start: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(start, pl.State):
            start = start.replace(opt_state=None)
        return pl.fit(start, *args, **kwargs)

    return wrong


def takes_the_mean_of_means() -> Fit:
    def equal(weights: list[Any], batch: int) -> Weights:
        n = len(weights)
        return Weights((1.0,) * n, float(n), (1 / n,) * n)

    return while_patched(lambda: patch.object(Weights, "of", equal))


def trains_the_first_microbatch_twice() -> Fit:
    real = Stages.microbatches

    def microbatches(self: Stages, batch: Any, size: int | None = None) -> list[Any]:
        pieces = real(self, batch, size)
        alike = size is None and len(pieces) > 1 and len(pieces[-1][0]) == len(pieces[0][0])
        return [*pieces[:-1], pieces[0]] if alike else pieces

    return while_patched(lambda: patch.object(Stages, "microbatches", microbatches))


def evaluation_trains_batchnorm() -> Fit:
    real = _evaluation.evaluation

    def evaluation(state: pl.State, loop_stages: Stages, evaluator: BoundEvaluator, labels: list[str]) -> Any:
        after = yield from real(state, loop_stages, evaluator, labels)
        return after.replace(buffers={name: tensor + 1 for name, tensor in after.buffers.items()})

    return while_patched(lambda: patch.object(_evaluation, "evaluation", evaluation))


def evaluation_changes_the_data() -> Fit:
    """What comes after an evaluation is trained on in another order of samples."""
    real = loop._load

    def load(state: pl.State, *rest: Any) -> Any:
        loaded, samples, tokens = real(state, *rest)
        if state.metrics and samples is not None:
            inputs, targets = (part.flip(0) for part in loaded.batch)
            loaded = loaded.replace(batch=(inputs, targets.roll(1, 0)))
        return loaded, samples, tokens

    return while_patched(lambda: patch.object(loop, "_load", load))


def callbacks_shift_the_seed() -> Fit:
    real = driver._observe

    def observe(event: Event, state: pl.State, *rest: Any) -> None:
        real(event, state, *rest)
        if event is Event.BATCH_START:
            object.__setattr__(state, "seed", state.seed + 1)

    return while_patched(lambda: patch.object(driver, "_observe", observe))


def the_identity_costs_a_rounding() -> Fit:
    real = driver.apply

    def apply(event: Event, state: pl.State, *rest: Any) -> pl.State:
        state = real(event, state, *rest)
        if event is Event.BATCH_START:
            state = state.replace(params={name: tensor * 1.001 for name, tensor in state.params.items()})
        return state

    return while_patched(lambda: patch.object(driver, "apply", apply))


def never_reverses() -> Fit:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        with patch.object(_ALGORITHM, "reversed_at", lambda event: False):
            return pl.fit(*args, **kwargs)

    return wrong


def reverses_the_data_too() -> Fit:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        with patch.object(_ALGORITHM, "reversed_at", lambda event: "after" in event.value):
            return pl.fit(*args, **kwargs)

    return wrong


def composes_backwards() -> Fit:
    def flip(item: Any) -> Any:
        return pl.compose(*reversed(item.members)) if hasattr(item, "members") else item

    def wrong(*args: Any, algorithms: Any = (), **kwargs: Any) -> Any:
        return pl.fit(*args, algorithms=[flip(item) for item in algorithms], **kwargs)

    return wrong


def weighs_ranks_alike() -> Fit:
    """The mean over ranks of each one's mean, whatever the samples that it has."""

    def wrong(*args: Any, **kwargs: Any) -> Iterator[tuple[Event, pl.State]]:
        from pure_loop.distributed.multi_rank import MultiRankEngine

        real = MultiRankEngine.divisor

        def divisor(self: MultiRankEngine, weights: Weights) -> Any:
            real(self, weights)
            return (self._weights[self.rank] or 1.0) * self.ranks / self._power

        with patch.object(MultiRankEngine, "divisor", divisor):
            yield from pl.fit(*args, **kwargs)

    return wrong


def leaves_the_module_in_eval_mode() -> Fit:
    def wrong(module: Any, *args: Any, **kwargs: Any) -> Any:
        stream = pl.fit(module, *args, **kwargs)
        if isinstance(module, torch.nn.Module):
            module.eval()
        return stream

    return wrong


def leaks_gradients() -> Fit:
    def wrong(module: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in module.parameters() if isinstance(module, torch.nn.Module) else ():
            parameter.grad = torch.zeros_like(parameter)
        return pl.fit(module, *args, **kwargs)

    return wrong


def leaves_a_thread() -> Fit:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        threading.Thread(target=threading.Event().wait, args=(2,), daemon=True).start()
        return pl.fit(*args, **kwargs)

    return wrong


def trains_the_users_module() -> Fit:
    def wrong(module: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[Event, pl.State]]:
        for event, state in pl.fit(module, *args, **kwargs):
            with torch.no_grad():
                for name, parameter in module.named_parameters() if isinstance(module, torch.nn.Module) else ():
                    parameter.copy_(state.params[name] + 1)
            yield event, state

    return wrong


def ignores_the_batch_of_algorithms() -> Fit:
    """What an algorithm puts in at BEFORE_TRAIN_BATCH is shown, and not trained on."""
    event = "state = yield Event.BEFORE_TRAIN_BATCH, state"
    script = edited(loop.Eager.batch, event, f"loaded = state.batch; {event}; state = state.replace(batch=loaded)")
    return while_patched(lambda: patch.object(loop.Eager, "batch", script))


def evaluates_the_weights_of_training() -> Fit:
    """What an algorithm puts in at EVAL_START, an average for example, is dropped."""
    real = Stages.validate
    trained: dict[str, Any] = {}
    update = Stages.update

    def updated(self: Stages, state: pl.State, **options: Any) -> Any:
        after = update(self, state, **options)
        trained["params"] = after.params
        return after

    def validate(self: Stages, state: pl.State, **numbers: Any) -> pl.State:
        if "params" not in trained:
            return real(self, state, **numbers)
        return real(self, state.replace(params=trained["params"]), **numbers).replace(params=state.params)

    return while_patched(
        lambda: patch.object(Stages, "update", updated), lambda: patch.object(Stages, "validate", validate)
    )


def clips_without_clip_grad() -> Fit:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return pl.fit(*args, **{**kwargs, "clip_grad": 1e-3})

    return wrong


def loads_the_weights_alone() -> Fit:
    """It leaves the optimizer state, and the position of the run, in the file."""

    def wrong(*args: Any, load_path: Any = None, **kwargs: Any) -> Any:
        if load_path is None:
            return pl.fit(*args, **kwargs)
        module, data = args
        return pl.fit(pl.load(load_path, model=module, weights_only=True), data, **kwargs)

    return wrong


def scales_the_weights_where_fewer_events_are_watched() -> Fit:
    """A consumer that watches some events only is given other parameters than one that watches all of them."""

    def wrong(*args: Any, watch: Any = None, **kwargs: Any) -> Any:
        for event, state in pl.fit(*args, watch=watch, **kwargs):
            if watch is not None:
                state = state.replace(params={name: tensor * 1.001 for name, tensor in state.params.items()})
            yield event, state

    return wrong


def scales_the_weights_where_memory_is_donated() -> Fit:
    """As above, where the memory of past States is donated."""

    def wrong(*args: Any, donate: Any = "auto", **kwargs: Any) -> Any:
        for event, state in pl.fit(*args, donate=donate, **kwargs):
            if donate is True:
                state = state.replace(params={name: tensor * 1.001 for name, tensor in state.params.items()})
            yield event, state

    return wrong


def scales_the_weights_where_steps_are_compiled() -> Fit:
    """As above, where steps are compiled."""

    def wrong(*args: Any, compile: Any = False, **kwargs: Any) -> Any:
        for event, state in pl.fit(*args, compile=compile, **kwargs):
            if compile:
                state = state.replace(params={name: tensor * 1.001 for name, tensor in state.params.items()})
            yield event, state

    return wrong


def adds_the_rank_to_the_seed() -> Fit:
    """As scripts for several ranks often do for the sake of the data; then each drops out other units, too."""

    def wrong(*args: Any, seed: int = 0, **kwargs: Any) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return pl.fit(*args, seed=seed + rank, **kwargs)

    return wrong


WRONG_LOOPS: dict[Callable[[], Fit], str] = {
    forgets_an_after_event: "order",
    forgets_a_checkpoint_event: "order",
    evaluates_twice_at_the_end: "order",
    counts_microbatches_as_batches: "order",
    ignores_the_batch_of_algorithms: "visibility",
    evaluates_the_weights_of_training: "visibility",
    clips_without_clip_grad: "visibility",
    the_identity_costs_a_rounding: "visibility",
    updates_in_place: "value",
    updates_through_data: "value",
    overwrites_what_was_kept: "value",
    overwrites_what_was_read: "value",
    lends_its_buffers_to_batchnorm: "value",
    draws_from_the_global_generator: "determinism",
    reseeds_the_global_generator: "determinism",
    never_reverses: "algorithm_order",
    reverses_the_data_too: "algorithm_order",
    takes_the_mean_of_means: "microbatch_invariance",
    trains_the_first_microbatch_twice: "microbatch_invariance",
    evaluation_trains_batchnorm: "visibility",
    evaluation_changes_the_data: "evaluation_invariance",
    callbacks_shift_the_seed: "observer_invariance",
    composes_backwards: "composition",
    starts_the_epoch_again: "resumption",
    forgets_the_optimizer_state: "resumption",
    loads_the_weights_alone: "checkpoint",
    scales_the_weights_where_fewer_events_are_watched: "watch_equality",
    scales_the_weights_where_memory_is_donated: "donate_equality",
    scales_the_weights_where_steps_are_compiled: "compile_equality",
    adds_the_rank_to_the_seed: "rank_agreement",
    weighs_ranks_alike: "world_size",
    leaves_the_module_in_eval_mode: "closing",
    leaks_gradients: "closing",
    leaves_a_thread: "closing",
    trains_the_users_module: "closing",
}
"""Functions that make a wrong loop, and the name of the law that each breaks."""
