"""Loops that are deliberately wrong, each in one way, and the law that each breaks.

A wrong loop is the library's own with one part replaced while it runs, so it is wrong in that alone. Laws of your own
can be tried on them: a law that nothing breaks proves nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import attrs
import torch
from torch import nn

from pure_loop._internal.pytree import Batch
from pure_loop._internal.weights import Weights
from pure_loop.algorithm import AlgorithmLike, Composition, compose
from pure_loop.checkpoint import load
from pure_loop.data.source import Source
from pure_loop.evaluator import BoundEvaluator
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.loop import driver
from pure_loop.loop import evaluation as _evaluation
from pure_loop.loop import training as loop
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.driver import Script
from pure_loop.model.instance import Instance
from pure_loop.stages import Stages, ownership
from pure_loop.stages.settings import NO_CONTEXT, StageSettings
from pure_loop.state import State
from pure_loop.testing._patches import Pairs, breaking, edited, fit, while_patched
from pure_loop.testing.case import Fit

__all__ = ["WRONG_LOOPS"]

Tensors: TypeAlias = FrozenDict[str, torch.Tensor]
Factory: TypeAlias = Callable[[], Fit]
Function: TypeAlias = Callable[..., Any]

WRONG_LOOPS: dict[Factory, str] = {}
"""Functions that make a wrong loop, and the name of the law that each breaks."""

_ALGORITHM = sys.modules["pure_loop.algorithm"]  # the package has the decorator under this name


breaks = breaking(WRONG_LOOPS)


def wrong_fit(law: str) -> Callable[[Fit], Factory]:
    """Make such a function of the loop."""

    def register(wrong: Fit) -> Factory:
        @wraps(wrong)
        def make() -> Fit:
            return wrong

        return breaks(law)(make)

    return register


def wrong_part(law: str, owner: object, name: str) -> Callable[[Function], Factory]:
    """Make such a function of what takes the place of a part of the loop, which is its first argument."""
    real: Function = getattr(owner, name)

    def register(wrong: Function) -> Factory:
        @wraps(wrong)
        def make() -> Fit:
            return while_patched((owner, name, lambda *args, **options: wrong(real, *args, **options)))

        return breaks(law)(make)

    return register


def scaled(state: State, factor: float = 1.001) -> State:
    return state.replace(params={name: tensor * factor for name, tensor in state.params.items()})


def without(event: Event) -> Fit:
    def wrong(*args: object, **kwargs: object) -> Pairs:
        return (pair for pair in fit(*args, **kwargs) if pair[0] is not event)

    return wrong


@breaks("order")
def forgets_an_after_event() -> Fit:
    return without(Event.AFTER_LOSS)


@breaks("order")
def forgets_a_checkpoint_event() -> Fit:
    return without(Event.EPOCH_CHECKPOINT)


@breaks("order")
def evaluates_twice_at_the_end() -> Fit:
    return while_patched((BoundEvaluator, "due_at_end", lambda self, state: True))


@wrong_part("order", loop, "gradients")
def counts_microbatches_as_batches(real: Function, state: State, loop_stages: LoopStages) -> Script:
    for piece in loop_stages.microbatches(state.batch):
        alone = state.replace(batch=piece, grads=None)
        state = yield from real(alone, attrs.evolve(loop_stages, microbatch_size=None))
        state = yield Event.BATCH_END, state
    return state


@breaks("visibility")
def ignores_the_batch_of_algorithms() -> Fit:
    """What an algorithm puts in at BEFORE_TRAIN_BATCH is shown, and not trained on."""
    event = "state = yield Event.BEFORE_TRAIN_BATCH, state"
    script = edited(loop.Eager.batch, event, f"loaded = state.batch; {event}; state = state.replace(batch=loaded)")
    return while_patched((loop.Eager, "batch", script))


@breaks("visibility")
def evaluates_the_weights_of_training() -> Fit:
    """What an algorithm puts in at EVAL_START, an average for example, is dropped."""
    real_update: Function = Stages.update
    real_validate: Function = Stages.validate
    trained: list[State] = []

    def update(self: Stages, state: State, **options: object) -> State:
        after: State = real_update(self, state, **options)
        trained[:] = [after]
        return after

    def validate(self: Stages, state: State, **numbers: object) -> State:
        evaluated = state.replace(params=trained[0].params) if trained else state
        result: State = real_validate(self, evaluated, **numbers)
        return result.replace(params=state.params)

    return while_patched((Stages, "update", update), (Stages, "validate", validate))


@wrong_fit("visibility")
def clips_without_clip_grad(*args: object, **kwargs: object) -> Pairs:
    return fit(*args, **{**kwargs, "clip_grad": 1e-3})


@wrong_part("visibility", driver, "apply")
def the_identity_costs_a_rounding(real: Function, event: Event, state: State, *rest: object) -> State:
    state = real(event, state, *rest)
    return scaled(state) if event is Event.BATCH_START else state


@wrong_part("value", Stages, "update")
def updates_in_place(real: Function, stages: Stages, state: State, **options: object) -> State:
    before = dict(state.params)
    after: State = real(stages, state, **options)
    for name, tensor in before.items():
        tensor.copy_(after.params[name])
    return after


@wrong_part("value", Stages, "update")
def updates_through_data(real: Function, stages: Stages, state: State, **options: object) -> State:
    """As above, behind the back of the version counter."""
    for tensor in state.params.values():
        tensor.data.mul_(0.99)
    after: State = real(stages, state, **options)
    return after


@breaks("value")
def overwrites_what_was_kept() -> Fit:
    """It takes every reference for the loop variable, and writes the new parameters where the old ones are."""
    return while_patched(
        (ownership.Ownership, "_is_unseen", lambda self, event, state, *_: self.owns(state)),
        (ownership, "_lent", lambda *mappings: []),
    )


@breaks("value")
def overwrites_what_was_read() -> Fit:
    """It doesn't look at tensors that were read."""
    return while_patched((ownership, "_lent", lambda *mappings: []))


@wrong_part("value", Instance, "bind")
def lends_its_buffers_to_batchnorm(
    real: Function, instance: Instance, params: Tensors, buffers: Tensors, training: bool
) -> None:
    real(instance, params, buffers, training)
    for name, tensors, key in instance.buffers:
        tensors[key] = buffers[name]


@breaks("determinism")
def draws_from_the_global_generator() -> Fit:
    return while_patched((StageSettings, "seeding", lambda *_, **__: NO_CONTEXT))


@wrong_fit("determinism")
def reseeds_the_global_generator(*args: object, **kwargs: object) -> Pairs:
    for pair in fit(*args, **kwargs):
        torch.manual_seed(0)
        yield pair


@wrong_fit("algorithm_order")
def never_reverses(*args: object, **kwargs: object) -> Pairs:
    with patch.object(_ALGORITHM, "reversed_at", lambda event: False):
        return fit(*args, **kwargs)


@wrong_fit("algorithm_order")
def reverses_the_data_too(*args: object, **kwargs: object) -> Pairs:
    with patch.object(_ALGORITHM, "reversed_at", lambda event: "after" in event.value):
        return fit(*args, **kwargs)


@wrong_part("microbatch_invariance", Weights, "of")
def takes_the_mean_of_means(real: Function, weights: list[float], batch: int) -> Weights:
    n = len(weights)
    return Weights((1.0,) * n, float(n), (1 / n,) * n)


@wrong_part("microbatch_invariance", Stages, "microbatches")
def trains_the_first_microbatch_twice(
    real: Function, stages: Stages, batch: Batch, size: int | None = None
) -> list[Batch]:
    pieces: list[Batch] = real(stages, batch, size)
    alike = size is None and len(pieces) > 1 and len(pieces[-1][0]) == len(pieces[0][0])
    return [*pieces[:-1], pieces[0]] if alike else pieces


@wrong_part("visibility", _evaluation, "evaluation")
def evaluation_trains_batchnorm(real: Function, *args: object) -> Script:
    after: State = yield from real(*args)
    return after.replace(buffers={name: tensor + 1 for name, tensor in after.buffers.items()})


@wrong_part("evaluation_invariance", loop, "_load")
def evaluation_changes_the_data(real: Function, state: State, *rest: object) -> tuple[State, int | None, int | None]:
    """What comes after an evaluation is trained on in another order of samples."""
    loaded, samples, tokens = real(state, *rest)
    if state.metrics and samples is not None:
        inputs, targets = (part.flip(0) for part in loaded.batch)
        loaded = loaded.replace(batch=(inputs, targets.roll(1, 0)))
    return loaded, samples, tokens


@wrong_part("observer_invariance", driver, "_observe")
def callbacks_shift_the_seed(real: Function, event: Event, state: State, *rest: object) -> None:
    real(event, state, *rest)
    if event is Event.BATCH_START:
        object.__setattr__(state, "seed", state.seed + 1)


@wrong_fit("composition")
def composes_backwards(*args: object, algorithms: Sequence[AlgorithmLike] = (), **kwargs: object) -> Pairs:
    flipped = [compose(*reversed(item.members)) if isinstance(item, Composition) else item for item in algorithms]
    return fit(*args, algorithms=flipped, **kwargs)


@wrong_part("resumption", Source, "epoch")
def starts_the_epoch_again(real: Function, source: Source, epoch: int, start: int = 0, seen: int = 0) -> object:
    return real(source, epoch, 0, 0)


@wrong_fit("resumption")
def forgets_the_optimizer_state(start: nn.Module | State, *args: object, **kwargs: object) -> Pairs:
    return fit(start.replace(opt_state=None) if isinstance(start, State) else start, *args, **kwargs)


@wrong_fit("checkpoint")
def loads_the_weights_alone(module: nn.Module, data: object, load_path: Path | None = None, **kwargs: object) -> Pairs:
    """It leaves the optimizer state, and the position of the run, in the file."""
    return fit(module if load_path is None else load(load_path, model=module, weights_only=True), data, **kwargs)


def scaled_where(argument: str, holds: Callable[[object], bool]) -> Fit:
    """A loop that gives the consumer other parameters where an argument of ``fit`` has such a value."""

    def wrong(*args: object, **kwargs: object) -> Pairs:
        for event, state in fit(*args, **kwargs):
            yield event, scaled(state) if holds(kwargs.get(argument)) else state

    return wrong


@breaks("watch_equality")
def scales_the_weights_where_fewer_events_are_watched() -> Fit:
    """A consumer that watches some events only is given other parameters than one that watches all of them."""
    return scaled_where("watch", lambda watch: watch is not None)


@breaks("donate_equality")
def scales_the_weights_where_memory_is_donated() -> Fit:
    """As above, where the memory of past States is donated."""
    return scaled_where("donate", lambda donate: donate is True)


@breaks("compile_equality")
def scales_the_weights_where_steps_are_compiled() -> Fit:
    """As above, where steps are compiled."""
    return scaled_where("compile", bool)


@wrong_fit("rank_agreement")
def adds_the_rank_to_the_seed(*args: object, seed: int = 0, **kwargs: object) -> Pairs:
    """As scripts for several ranks often do for the sake of the data; then each drops out other units, too."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return fit(*args, seed=seed + rank, **kwargs)


@wrong_fit("world_size")
def weighs_ranks_alike(*args: object, **kwargs: object) -> Pairs:
    """The mean over ranks of each one's mean, whatever the samples that it has."""
    from pure_loop.distributed.multi_rank import MultiRankEngine

    real = MultiRankEngine.divisor

    def divisor(self: MultiRankEngine, weights: Weights) -> float | torch.Tensor:
        real(self, weights)
        return (self._weights[self.rank] or 1.0) * self.ranks / self._power

    with patch.object(MultiRankEngine, "divisor", divisor):
        yield from fit(*args, **kwargs)


@wrong_fit("closing")
def leaves_the_module_in_eval_mode(module: nn.Module | State, *args: object, **kwargs: object) -> Pairs:
    stream: Pairs = fit(module, *args, **kwargs)
    if isinstance(module, nn.Module):
        module.eval()
    return stream


@wrong_fit("closing")
def leaks_gradients(module: nn.Module | State, *args: object, **kwargs: object) -> Pairs:
    for parameter in module.parameters() if isinstance(module, nn.Module) else ():
        parameter.grad = torch.zeros_like(parameter)
    return fit(module, *args, **kwargs)


@wrong_fit("closing")
def leaves_a_thread(*args: object, **kwargs: object) -> Pairs:
    threading.Thread(target=threading.Event().wait, args=(2,), daemon=True).start()
    return fit(*args, **kwargs)


@wrong_fit("closing")
def trains_the_users_module(module: nn.Module | State, *args: object, **kwargs: object) -> Pairs:
    for event, state in fit(module, *args, **kwargs):
        with torch.no_grad():
            for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
                parameter.copy_(state.params[name] + 1)
        yield event, state
