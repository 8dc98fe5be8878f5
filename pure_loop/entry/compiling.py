"""The door of ``compile/``: nothing else imports it, and it is imported when something is compiled.

With it comes torch's compiler, which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from torch import nn

from pure_loop._internal.torch_private import import_compiler
from pure_loop.errors import ArgumentError, CompileError
from pure_loop.evaluator import BoundEvaluator, measure_loss
from pure_loop.event import Event

if TYPE_CHECKING:
    from pure_loop.compile.compiler import Compiler
    from pure_loop.compile.member_steps import MemberSteps
    from pure_loop.entry.settings import Settings
    from pure_loop.loop.batch import LoopStages


def compiler(
    settings: Settings, stages: LoopStages, observers: Mapping[Event, object], evaluators: Iterable[BoundEvaluator]
) -> Compiler | None:
    """What compiles the steps of a call of ``fit``; None where nothing is compiled.

    Args:
        settings: the arguments of the call.
        stages: those of its loop.
        observers: callbacks and loggers, by event.
        evaluators: those of the call.
    """
    if not settings.compile:
        return None
    _refuse_cut_layers(stages)
    import_compiler()
    from pure_loop.compile.compiler import Compiler

    return Compiler(
        stages,
        _observed(settings, observers),
        where_possible=settings.compile == "where possible",
        steps=settings.steps_per_call,
        with_loss=measure_loss(evaluators),
        ownership=stages.workspace.ownership,
    )


def member_steps(
    settings: Settings, stages: LoopStages, observers: Mapping[Event, object], evaluators: Iterable[BoundEvaluator]
) -> MemberSteps:
    """What computes the steps of an ensemble: as :func:`compiler`; without ``compile=`` graphs run in Python."""
    import_compiler()
    from pure_loop.compile.member_steps import MemberSteps

    return MemberSteps(
        stages,
        _observed(settings, observers),
        steps=settings.steps_per_call,
        with_loss=measure_loss(evaluators),
        ownership=stages.workspace.ownership,
        interprets=not settings.compile,
    )


def _refuse_cut_layers(stages: LoopStages) -> None:
    """
    Raises:
        ArgumentError: layers are cut over ranks.
    """
    if stages.engine.cuts_layers:
        raise ArgumentError(
            "compile= with Parallel(parallelize=...): a graph of a step can't hold the exchanges inside of layers that "
            "are cut: leave out one of the two."
        )


def _observed(settings: Settings, observers: Mapping[Event, object]) -> frozenset[Event]:
    everything = settings.watch is None or settings.strict
    attached = {event for event, bound in observers.items() if bound}
    return frozenset(Event) if everything else (settings.watch or frozenset()) | attached


def evaluating(
    compile: bool | Literal["where possible"],
    stages: LoopStages,
    evaluators: Iterable[BoundEvaluator],
    *,
    mapped: bool = False,
) -> LoopStages:
    """The stages of an evaluation or a prediction, compiled where that is asked for; ``mapped``: over members."""
    if not compile and not mapped:
        return stages
    _refuse_cut_layers(stages)
    import_compiler()
    from pure_loop.compile.evaluation import CompiledEvaluation
    from pure_loop.compile.replay import Recorders

    return CompiledEvaluation.of(
        stages,
        Recorders(),
        with_loss=measure_loss(evaluators),
        where_possible=compile == "where possible",
        interprets=not compile,
    )


def interpreted() -> AbstractContextManager[None]:
    """Inside, graphs run operation by operation: see :func:`pure_loop.compile.interpreted`."""
    from pure_loop.compile import interpreted

    return interpreted()


def recurrent_layer(module: nn.Module) -> str | None:
    """The recurrent layer for which forwards run eagerly; None without one."""
    from pure_loop.compile.refusals import recurrent_layer

    return recurrent_layer(module)


def absent_names() -> Mapping[str, str]:
    """The private names that this torch lacks of those that compiling needs, each with what is lost."""
    try:
        from pure_loop.compile._torch import look_up_all
    except CompileError as error:
        return {"torch.fx.experimental.proxy_tensor": str(error)}
    return look_up_all()
