"""What ``compile=`` and ``steps_per_call=`` ask for: read, refused with what to write instead, and made."""

from __future__ import annotations

from typing import Any

from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.evaluator import measure_loss
from pure_loop.event import Event

__all__ = ["compiler", "evaluating"]


def import_compiler() -> None:
    """Import torch's compiler, which takes seconds, at the end from which `torch.optim` enters it, too.

    Two threads that enter a cycle of imports at two ends wait for each other.
    """
    import torch._dynamo  # noqa: F401


def read_compile(compile: Any) -> bool | str:
    """
    Raises:
        ArgumentError: it is neither a bool nor "where possible".
    """
    if isinstance(compile, bool) or (isinstance(compile, str) and compile == "where possible"):
        return compile
    raise ArgumentError(f'compile={compile!r}: write True, False or "where possible".')


def compiler(
    compile: Any, steps: Any, stages: Any, watch: Any, observers: Any, strict: bool, order: str, evaluators: Any
) -> Any:
    """What compiles the steps of a call; None where nothing is compiled.

    Raises:
        ArgumentError, ArgumentTypeError: for what can't be compiled, or not so.
    """
    chosen = read_compile(compile)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ArgumentTypeError(f"steps_per_call={steps!r}: give a whole number of at least 1.")
    if steps < 1:
        raise ArgumentError(f"steps_per_call={steps!r}: give a whole number of at least 1.")
    if not chosen:
        if steps > 1:
            raise ArgumentError(f"steps_per_call={steps}: only compiled steps go several to a call: add compile=True.")
        return None
    if steps > 1 and order != "current":
        raise ArgumentError(
            f'steps_per_call={steps} with order={order!r}: several steps go in the order "current" only.'
        )
    import_compiler()
    from pure_loop.compile.compiler import Compiler

    everything = watch is None or strict
    attended = frozenset(Event) if everything else frozenset(watch) | {each for each in observers if observers[each]}
    return Compiler(
        stages,
        attended,
        where_possible=chosen == "where possible",
        steps=steps,
        with_loss=measure_loss(evaluators),
        own=None if stages.donation is None else stages.donation.own,
        shown=None if stages.donation is None else stages.donation.was_seen,
    )


def evaluating(compile: Any, stages: Any, evaluators: Any) -> Any:
    """The stages of an evaluation or a prediction, compiled where that is asked for."""
    chosen = read_compile(compile)
    if not chosen:
        return stages
    import_compiler()
    from pure_loop.compile.evaluation import CompiledEvaluation
    from pure_loop.compile.replay import Recorders

    where_possible = chosen == "where possible"
    return CompiledEvaluation.of(stages, Recorders(), with_loss=measure_loss(evaluators), where_possible=where_possible)
