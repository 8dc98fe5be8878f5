"""What is paid in a step of W1 for an event that is yielded, a callback, and an algorithm that is not due."""

from __future__ import annotations

import statistics
from typing import Any

import pure_loop as pl
from bench.performance.hand import hand_written
from bench.performance.loops import BASE, ours
from bench.performance.steps import in_turns
from bench.performance.turns import OfGenerator
from bench.performance.workloads import WORKLOADS
from pure_loop import Event

__all__ = ["measure"]

# Of each kind so many, so that the difference stands out of the noise.
MANY = 10
# AFTER_DATALOADER to BATCH_CHECKPOINT, but for BATCH_END, which both loops yield.
EVENTS = 13


class _Looks(pl.Callback):
    def batch_end(self, state: pl.State, logger: pl.Logger) -> None:
        pass


def measure(turns: int, seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds a step that one of each adds, and what part of the hand-written step that is."""
    never = pl.every("1000000000ba")

    def identities(event: Event, when: Any = None) -> list[Any]:
        def named(number: int) -> Any:
            def identity(state: pl.State) -> pl.State:
                return state

            identity.__name__ = f"identity_{number}"
            return pl.algorithm(event, when=when)(identity)

        return [named(number) for number in range(MANY)]

    variants: dict[str, tuple[dict[str, Any], int]] = {
        "an event, yielded and ignored": ({}, EVENTS),
        "a callback at BATCH_END": ({"callbacks": [_Looks() for _ in range(MANY)]}, MANY),
        "an algorithm at BATCH_END, not due": ({"algorithms": identities(Event.BATCH_END, never)}, MANY),
        "an algorithm at an event that is not reached": ({"algorithms": identities(Event.PREDICT_END)}, MANY),
        "an algorithm at BATCH_END, the identity": ({"algorithms": identities(Event.BATCH_END)}, MANY),
    }
    w1 = WORKLOADS[0]
    loops = {BASE: OfGenerator(hand_written(fused=True)(w1)), "less": OfGenerator(ours(watch={Event.BATCH_END})(w1))}
    loops |= {name: OfGenerator(ours(**options)(w1)) for name, (options, _) in variants.items()}
    times = in_turns(loops, turns, seconds)
    for loop in loops.values():
        loop.close()
    events = next(iter(variants))
    hand = statistics.median(times[BASE])
    found = {}
    for name, (_, count) in variants.items():
        base = times["less" if name == events else events]
        more = statistics.median(one - other for one, other in zip(times[name], base, strict=True)) / count
        found[name] = {"us": more, "of_a_step": more / hand}
    return found
