"""``pl.diff`` on the algorithms and loops that are deliberately wrong: it names the event, the author and the leaf."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.loop.stream import Stream
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.testing import PROBLEMS, Case
from pure_loop.testing import wrong_algorithms as algorithms
from pure_loop.testing import wrong_loops as loops
from pure_loop.testing._patches import patched
from pure_loop.testing.wrong_algorithms import WRONG_ALGORITHMS
from pure_loop.testing.wrong_loops import WRONG_LOOPS
from pure_loop.tools.diff import Divergence

PLAN = Plan(
    batches=(3, 1, 4),
    max_duration="2ep",
    microbatch_size=2,
    evaluators={"val": EvaluatorPlan(batches=(2,), interval="2ba", microbatch_size=1)},
)


def network() -> nn.Module:
    """Buffers that the forward writes to, and random numbers that it draws."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8, 2))


CASE = Case(plan=PLAN, problem=attrs.evolve(PROBLEMS["convolution"], name="network", make_model=network))
# The event, how many batches are finished, the author and the leaf.
Where = tuple[str, int, str, str]


def where_of(divergence: Divergence | None) -> Where | None:
    if divergence is None:
        return None
    return divergence.event.name, divergence.timestamp.batch, divergence.by, divergence.leaf


def idle(make: Callable[[], pl.Algorithm]) -> pl.Algorithm:
    """An algorithm of the same name and events that does nothing."""
    wrong = make()
    return pl.Algorithm(wrong.name, {event: lambda state: state for event in wrong.handlers}, init=wrong.init)


def at_loss(name: str, function: Callable[[pl.State], Any], **more: Any) -> pl.Algorithm:
    return pl.Algorithm(name, {Event.AFTER_LOSS: lambda state: state.replace(loss=function(state))}, **more)


def warming_up(state: pl.State) -> Any:
    factor = min(1.0, (state.timestamp.batch + 1) / 10)
    return state.loss * factor  # type: ignore[operator]


def counts_batches() -> pl.Algorithm:
    def warm_up(state: pl.State) -> pl.State:
        return state.replace(loss=warming_up(state)).remember("warm_up", state.timestamp.batch + 1)

    return pl.Algorithm("warm_up", {Event.AFTER_LOSS: warm_up}, init=lambda state: 0)


def counts() -> pl.Algorithm:
    def count(state: pl.State) -> pl.State:
        return state.remember("count", state.algorithm_state["count"] + 1)

    return pl.Algorithm("count", {Event.BATCH_END: count}, init=lambda state: 0)


def ramps_without_a_reset() -> pl.Algorithm:
    wrong = algorithms.starts_over_at_fit_start()
    return pl.Algorithm(
        wrong.name,
        {Event.FIT_START: lambda state: state, Event.BATCH_END: list(wrong.handlers[Event.BATCH_END])},
        init=wrong.init,
    )


# The algorithm as it should be; of the others, one that does nothing shows what they do.
RIGHT: dict[Any, Callable[[], pl.Algorithm]] = {
    algorithms.remembers_in_a_closure: lambda: at_loss("warm_up", warming_up),
    algorithms.counts_microbatches_as_batches: counts_batches,
    algorithms.drops_the_memory_of_others: counts,
    algorithms.starts_over_at_fit_start: ramps_without_a_reset,
}
WRONG: dict[Any, Where] = {
    algorithms.adds_in_place: ("AFTER_TRAIN_BATCH", 0, "decay", "grads/0.weight"),
    algorithms.writes_through_data: ("AFTER_TRAIN_BATCH", 0, "decay", "grads/0.weight"),
    algorithms.steps_with_a_fused_kernel: ("AFTER_TRAIN_BATCH", 0, "step", "params/0.weight"),
    algorithms.lends_its_memory_to_batchnorm: ("BATCH_END", 1, "statistics", "algorithm_state/statistics/0"),
    algorithms.draws_from_the_operating_system: ("AFTER_LOSS", 0, "jitter", "loss"),
    algorithms.draws_from_a_generator_of_its_own: ("AFTER_LOSS", 0, "jitter", "loss"),
    # The hook is no part of the State; what it does is.
    algorithms.hooks_a_tensor: ("AFTER_BACKWARD", 0, "backward", "grads/0.weight"),
    # That of the second microbatch.
    algorithms.remembers_in_a_closure: ("AFTER_LOSS", 0, "warm_up", "loss"),
    algorithms.remembers_in_its_predicate: ("AFTER_LOSS", 0, "sometimes", "events"),
    algorithms.sets_itself_up_at_the_start: ("AFTER_LOSS", 0, "set_up", "loss"),
    algorithms.lets_its_memory_grow: ("BATCH_END", 1, "history", "algorithm_state/history"),
    algorithms.drops_the_memory_of_others: ("BATCH_END", 1, "count", "algorithm_state/neighbour"),
    algorithms.replaces_the_batch_too_late: ("BEFORE_FORWARD", 0, "augment", "batch/0"),
    algorithms.clips_after_the_step: ("BATCH_END", 1, "clip", "grads/0.weight"),
    algorithms.counts_microbatches_as_batches: ("AFTER_LOSS", 0, "warm_up", "algorithm_state/warm_up"),
    algorithms.takes_the_mean_of_means: ("AFTER_LOSS", 0, "mean_of_means", "algorithm_state/mean_of_means/0"),
    algorithms.normalises_within_a_microbatch: ("BEFORE_LOSS", 0, "whiten", "outputs"),
    algorithms.trains_by_its_evaluations: ("EVAL_END", 2, "patience", "algorithm_state/patience"),
    algorithms.trains_differently_when_watched: ("AFTER_LOSS", 0, "show_off", "loss"),
    algorithms.depends_on_its_neighbours: ("AFTER_LOSS", 0, "share", "loss"),
    algorithms.starts_over_at_fit_start: ("FIT_START", 2, "ramp", "algorithm_state/ramp"),
    algorithms.remembers_on_a_tensor: ("BATCH_END", 1, "tally", "params/0.weight"),
    algorithms.remembers_a_fraction: ("BATCH_END", 1, "thirds", "algorithm_state/thirds"),
    algorithms.depends_on_its_rank: ("AFTER_LOSS", 0, "favour", "loss"),
    algorithms.scales_by_the_samples_that_it_sees: ("AFTER_TRAIN_BATCH", 0, "scale", "grads/0.weight"),
}
# Of these all States are what they are without them: where they differ, with the reason.
UNSEEN: dict[Any, str] = {
    algorithms.keeps_an_alias_and_writes_to_it_later: "it writes to a State of the past, and to none after it",
    algorithms.leaks_gradients: "gradients in the attribute of a tensor are not part of its value",
    algorithms.leaves_grad_mode_off: "the mode is a setting of the process",
    algorithms.remembers_a_graph: "the graph of a tensor is not part of its value",
    algorithms.fails_in_prediction: "fit makes no predictions",
    algorithms.leaves_a_thread: "a thread is not in the State",
    algorithms.communicates_on_one_rank_alone: "there is one rank",
}
# These end the run by an error, which names the algorithm.
REFUSED: dict[Any, str] = {
    algorithms.returns_another_dtype: r"algorithm 'compress' at AFTER_TRAIN_BATCH changed grads\['0\.weight'\]",
    algorithms.fails_on_a_single_sample: "the variance of one number is not defined",
}


def neighbour() -> pl.Algorithm:
    return pl.Algorithm("neighbour", {Event.FIT_END: lambda state: state}, init=lambda state: 0)


def half_of(*members: pl.Algorithm, **settings: Any) -> pl.State:
    for event, state in CASE.stream(members, **settings):
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 2:
            return state  # type: ignore[no-any-return]
    raise AssertionError("the run has no second batch")


def compared(make: Callable[[], pl.Algorithm]) -> Divergence | None:
    start = None
    if make is algorithms.starts_over_at_fit_start:
        start = half_of(ramps_without_a_reset(), neighbour())
    right = RIGHT.get(make, lambda: idle(make))()
    watched: dict[str, Any] = {"callbacks": [lambda event, state: None], "start": start}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        streams = [CASE.stream([algorithm, neighbour()], **watched) for algorithm in (right, make())]
        try:
            return pl.diff(*streams)
        finally:
            torch.set_grad_enabled(True)


def name_of(make: Any) -> str:
    return str(make.__name__)


@pytest.mark.parametrize("make", WRONG, ids=name_of)
def test_a_wrong_algorithm_is_named(make: Callable[[], pl.Algorithm], monkeypatch: pytest.MonkeyPatch) -> None:
    if make is algorithms.depends_on_its_rank:
        monkeypatch.setenv("LOCAL_RANK", "1")
    assert where_of(compared(make)) == WRONG[make]


@pytest.mark.parametrize("make", UNSEEN, ids=name_of)
def test_what_is_not_in_a_state_is_no_difference(make: Callable[[], pl.Algorithm]) -> None:
    assert compared(make) is None


@pytest.mark.parametrize("make", REFUSED, ids=name_of)
def test_an_error_of_an_algorithm_is_raised(make: Callable[[], pl.Algorithm]) -> None:
    with pytest.raises(Exception, match=REFUSED[make]):
        compared(make)


def test_all_wrong_algorithms_are_there() -> None:
    assert {*WRONG, *UNSEEN, *REFUSED} == {*WRONG_ALGORITHMS}


class Patched(Stream):
    """A stream of ``fit`` with parts of the loop replaced, only while its own code runs."""

    __slots__ = ("_is_read", "_replacements")

    def __init__(self, replacements: Any, *args: Any, **kwargs: Any) -> None:
        self._replacements, self._is_read = replacements, False
        with self._patched():
            super().__init__(iter(pl.fit(*args, **kwargs)))

    def _patched(self) -> ExitStack:
        return patched(self._replacements)

    def __iter__(self) -> Generator[tuple[Event, pl.State], None, Any]:
        # The tool looks at the generator itself first, for the parts of the call, and then runs it.
        before, self._is_read = self._is_read, True
        return self._run() if before else self._pairs

    def _run(self) -> Generator[tuple[Event, pl.State], None, Any]:
        while True:
            with self._patched():
                pair = next(self._pairs, None)
            if pair is None:
                return
            yield pair


def at_batch(name: str, event: Event, function: Callable[[Any], Any]) -> pl.Algorithm:
    return pl.Algorithm(name, {event: lambda state: state.replace(batch=(function(state.batch[0]), state.batch[1]))})


def members() -> list[Any]:
    """Algorithms of which a loop that is wrong about algorithms changes the order, or drops what they did."""
    rescaled = [
        pl.Algorithm(
            name,
            {
                Event.BEFORE_FORWARD: lambda state: state,
                Event.AFTER_LOSS: lambda state, function=function: state.replace(loss=function(state.loss)),
            },
        )
        for name, function in (("plus", lambda loss: loss + 1), ("times", lambda loss: loss * 2))
    ]
    return [
        at_batch("first", Event.AFTER_DATALOADER, lambda inputs: inputs + 1),
        at_batch("second", Event.AFTER_DATALOADER, lambda inputs: inputs * 2),
        at_batch("augment", Event.BEFORE_TRAIN_BATCH, lambda inputs: inputs.flip(-1)),
        pl.Algorithm("look", {Event.BATCH_START: lambda state: state}),
        pl.compose(*rescaled),
        pl.algorithms.ema(half_life="2ba"),
    ]


WRONG_OF_LOOPS: dict[Any, Where] = {
    loops.evaluates_twice_at_the_end: ("FIT_END", 6, "loop", "events"),
    loops.counts_microbatches_as_batches: ("BEFORE_FORWARD", 0, "split into microbatches", "batch/0"),
    loops.ignores_the_batch_of_algorithms: ("BEFORE_FORWARD", 0, "split into microbatches", "batch/0"),
    loops.evaluates_the_weights_of_training: ("EVAL_AFTER_FORWARD", 2, "forward of the evaluation", "outputs"),
    loops.clips_without_clip_grad: ("AFTER_TRAIN_BATCH", 0, "gradients: scale, clip", "grads/0.weight"),
    loops.the_identity_costs_a_rounding: ("BEFORE_TRAIN_BATCH", 0, "loop", "params/0.weight"),
    loops.updates_through_data: ("BATCH_END", 1, "optimizer", "params/0.weight"),
    loops.draws_from_the_global_generator: ("AFTER_FORWARD", 0, "forward", "outputs"),
    loops.never_reverses: ("AFTER_LOSS", 0, "times", "events"),
    loops.reverses_the_data_too: ("AFTER_DATALOADER", 0, "first", "events"),
    loops.takes_the_mean_of_means: ("AFTER_BACKWARD", 0, "backward", "grads/0.weight"),
    loops.trains_the_first_microbatch_twice: (*("BEFORE_FORWARD", 2, "split into microbatches", "microbatch/0"),),
    loops.evaluation_trains_batchnorm: ("EVAL_AFTER_ALL", 2, "loop", "buffers/1.running_mean"),
    loops.evaluation_changes_the_data: ("AFTER_DATALOADER", 2, "data", "batch/0"),
    loops.callbacks_shift_the_seed: ("BATCH_START", 0, "loop", "seed"),
    loops.composes_backwards: ("BEFORE_FORWARD", 0, "plus", "events"),
    loops.starts_the_epoch_again: ("AFTER_DATALOADER", 2, "data", "batch/0"),
    loops.forgets_the_optimizer_state: ("FIT_START", 2, "loop", "opt_state/momentum_buffer/0.weight"),
    loops.loads_the_weights_alone: ("INIT", 0, "loop", "params/0.weight"),
    # What an algorithm keeps of a State, and buffers with which an average begins, are not to be written to.
    loops.updates_in_place: ("BATCH_END", 1, "optimizer", "algorithm_state/before/0.weight"),
    loops.overwrites_what_was_kept: ("BATCH_END", 1, "optimizer", "algorithm_state/before/0.weight"),
    loops.lends_its_buffers_to_batchnorm: (
        *("AFTER_FORWARD", 0, "forward", "algorithm_state/ema/buffers/1.running_mean"),
    ),
}
UNSEEN_OF_LOOPS: dict[Any, str] = {
    loops.adds_the_rank_to_the_seed: "on one rank it is right",
    loops.leaves_the_module_in_eval_mode: "the user's module is not in the State",
    loops.leaks_gradients: "the user's module is not in the State",
    loops.leaves_a_thread: "a thread is not in the State",
    loops.overwrites_what_was_read: "pl.diff has the State itself in a variable of its own, so each step copies",
}
# Generators around the stream of fit, which have neither its handlers nor its steps: pl.diff refuses them.
NO_STREAM_OF_FIT = {
    loops.forgets_an_after_event,
    loops.forgets_a_checkpoint_event,
    loops.reseeds_the_global_generator,
    loops.scales_the_weights_where_fewer_events_are_watched,
    loops.scales_the_weights_where_memory_is_donated,
    loops.scales_the_weights_where_steps_are_compiled,
    loops.weighs_ranks_alike,
    loops.trains_the_users_module,
}
# Wrong only where something keeps parameters.
KEEPING = {loops.updates_in_place, loops.overwrites_what_was_kept}
# Wrong only in a run that resumes.
RESUMED = {loops.starts_the_epoch_again, loops.forgets_the_optimizer_state}


def compared_loop(make: Callable[[], Any], folder: Path) -> Divergence | None:
    wrong = make()
    replacements = inspect.getclosurevars(wrong).nonlocals.get("replacements")
    settings: dict[str, Any] = {"callbacks": [lambda event, state: None]}
    # Callbacks come after the algorithms of an event, of which one would be named for what they write to the State.
    chosen: list[Any] = [] if make is loops.callbacks_shift_the_seed else members()
    if make in KEEPING:
        chosen.append(pl.Algorithm("before", {Event.BATCH_START: lambda state: state.remember("before", state.params)}))
    if make in RESUMED:
        settings["start"] = half_of(*chosen)
    if make is loops.loads_the_weights_alone:
        settings["load_path"] = str(folder / "half.safetensors")
        pl.save(half_of(*chosen), settings["load_path"])
    fit = wrong if replacements is None else lambda *args, **kwargs: Patched(replacements, *args, **kwargs)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return pl.diff(CASE.stream(chosen, **settings), CASE.stream(chosen, fit=fit, **settings))


@pytest.mark.parametrize("make", WRONG_OF_LOOPS, ids=name_of)
def test_a_wrong_loop_is_named(make: Callable[[], Any], tmp_path: Path) -> None:
    assert where_of(compared_loop(make, tmp_path)) == WRONG_OF_LOOPS[make]


@pytest.mark.parametrize("make", UNSEEN_OF_LOOPS, ids=name_of)
def test_what_a_loop_does_outside_the_state_is_no_difference(make: Callable[[], Any], tmp_path: Path) -> None:
    assert compared_loop(make, tmp_path) is None


@pytest.mark.parametrize("make", sorted(NO_STREAM_OF_FIT, key=name_of), ids=name_of)
def test_a_generator_around_the_stream_is_refused(make: Callable[[], Any], tmp_path: Path) -> None:
    with pytest.raises(pl.ArgumentTypeError, match=r"diff\(generator\): give the stream of fit itself"):
        compared_loop(make, tmp_path)


def test_all_wrong_loops_are_there() -> None:
    assert {*WRONG_OF_LOOPS, *UNSEEN_OF_LOOPS, *NO_STREAM_OF_FIT} == {*WRONG_LOOPS}
