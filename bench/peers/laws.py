"""The laws: each is a question to an adapter, answered by comparing legs, with the smallest reason where it fails."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

import attrs
import torch

from bench.peers.legs import Adapter, Leg, NotOfferedError, Outcome, Params, Step, Way
from bench.peers.problem import Network, cross_entropy, step_batches

__all__ = ["LAWS", "Result", "measured"]

Run: TypeAlias = Callable[[Adapter, Leg | Step], Outcome]

MIDDLE, END, BATCHES = 7, 10, 15


@attrs.frozen
class Result:
    """``"yes"``, ``"no"`` or ``"not offered"``; the way that decides; why not; and what the other ways gave.

    Attributes:
        result: the answer.
        way: the name of the first documented way that keeps the law, or of the last that was tried.
        reason: the smallest difference that was found, where the answer is no; or what is not offered.
        tried: for each way that was tried, ``"yes"`` or its reason.
        beyond: the same for ways with code that the documentation doesn't give.
    """

    result: str
    way: str
    reason: str
    tried: dict[str, str]
    beyond: dict[str, str]


def _in_ways(ways: Iterable[Way], ask: Callable[[Way], str]) -> Result:
    """Ask in each way until one answers with ``""``."""
    tried: dict[str, str] = {}
    beyond: dict[str, str] = {}
    refused: dict[str, str] = {}
    for way in ways:
        try:
            reason = ask(way)
        except NotOfferedError as error:
            refused[way.name] = str(error)
            continue
        (beyond if way.beyond else tried)[way.name] = reason or "yes"
        if not reason and not way.beyond:
            return Result("yes", way.name, "", tried, beyond)
    if not tried:
        name, reason = next(iter(refused.items()))
        return Result("not offered", name, reason, {}, beyond)
    name = list(tried)[-1]
    return Result("no", name, tried[name], tried, beyond)


def _bitwise(one: Params, other: Params) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _whole_and_resumed(adapter: Adapter, run: Run, leg: Leg, after: int) -> tuple[Outcome, Outcome, Outcome]:
    whole = run(adapter, leg)
    with tempfile.TemporaryDirectory() as folder:
        leg = attrs.evolve(leg, folder=folder)
        killed = run(adapter, attrs.evolve(leg, kill_after=after))
        assert killed.params is None, f"{adapter.name} was not killed after {after} batches"
        assert killed.recorded == whole.recorded[:after], f"{adapter.name}: two runs of one script differ"
        resumed = run(adapter, attrs.evolve(leg, resume=True))
    return whole, killed, resumed


def _first_difference(expected: Outcome, after: int, actual: Outcome) -> str:
    """In what a run differs from the part of another after a number of batches; ``""`` if in nothing."""
    wanted, found = expected.recorded[after:], actual.recorded
    if len(found) != len(wanted):
        return f"{len(found)} batches instead of {len(wanted)}"
    for batch, ((samples, mask), (other_samples, other_mask)) in enumerate(zip(wanted, found, strict=True), after + 1):
        if samples != other_samples:
            return f"order of samples (from batch {batch})"
        if mask != other_mask:
            return f"dropout's random state (from batch {batch})"
    if not _bitwise(expected.params or {}, actual.params or {}):
        return "parameters, after the same batches and the same dropout"
    return ""


def _resumption(after: int) -> Callable[[Adapter, Run], Result]:
    def law(adapter: Adapter, run: Run) -> Result:
        def ask(way: Way) -> str:
            whole, _, resumed = _whole_and_resumed(adapter, run, Leg().by(way), after)
            return _first_difference(whole, after, resumed)

        return _in_ways(adapter.ways, ask)

    return law


def _observer(generators: bool) -> Callable[[Adapter, Run], Result]:
    def law(adapter: Adapter, run: Run) -> Result:
        def ask(way: Way) -> str:
            leg = attrs.evolve(Leg().by(way), generators=generators)
            alone = run(adapter, leg)
            for what in ({"observe": True}, {"evaluate": "epoch"}):
                reason = _first_difference(alone, 0, run(adapter, attrs.evolve(leg, **what)))
                if reason:
                    return f"{reason}, with {'a callback' if 'observe' in what else 'an evaluation after each epoch'}"
            return ""

        distinct = {(way.stateful, way.style, way.beyond): way for way in reversed(adapter.ways)}
        return _in_ways(list(distinct.values())[::-1], ask)

    return law


def _microbatch(ignored: bool) -> Callable[[Adapter, Run], Result]:
    def law(adapter: Adapter, run: Run) -> Result:
        def ask(way: Way) -> str:
            start = _flat(Network().parameters())
            steps = [run(adapter, Step(split, ignored, way.style)).params for split in (False, True)]
            whole, split = (_flat((params or {}).values()) - start for params in steps)
            if _near(split, whole):
                return ""
            off = f"the step is {float((split - whole).norm() / whole.norm()):.0%} off"
            alike = _of_equal_microbatches(ignored)
            if _near(split, alike):
                what = "with ignored targets" if ignored else "that is smaller"
                return f"the microbatch {what} weighs as much as the other: {off}"
            ratio = float(split.norm() / whole.norm())
            return f"the step is {ratio:.2f} times as long" if _near(split, ratio * whole) else off

        return _in_ways(adapter.step_ways, ask)

    return law


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal up to rounding; steps are the differences of float32 parameters."""
    return bool((one - other).norm() < 1e-5 * other.norm())


def _of_equal_microbatches(ignored: bool) -> torch.Tensor:
    """The step that microbatches make which weigh the same, whatever is in them."""
    network, batches = Network(dropout=0.0), step_batches(Step(True, ignored))
    for inputs, targets in batches:
        (cross_entropy(network(inputs), targets) / len(batches)).backward()
    return -0.1 * _flat(tensor.grad for tensor in network.parameters() if tensor.grad is not None)


def _order_after_resuming(adapter: Adapter, run: Run) -> Result:
    def ask(way: Way) -> str:
        leg = Leg(log=True, evaluate="epoch").by(way)
        whole, _, resumed = _whole_and_resumed(adapter, run, leg, MIDDLE)
        if len(resumed.recorded) != BATCHES - MIDDLE:
            return f"{len(resumed.recorded)} batches instead of {BATCHES - MIDDLE}"
        counts = Counter(whole.hooks)
        once = set(itertools.takewhile(lambda name: counts[name] == 1, whole.hooks))  # those of the start of a run
        rest = list(itertools.dropwhile(lambda name: name in once or name not in counts, resumed.hooks))
        tail = whole.hooks[len(whole.hooks) - len(rest) :]
        if rest == tail:
            return ""
        surplus = Counter(rest) - Counter(tail)
        if surplus:
            return "once more: " + ", ".join(sorted(surplus))
        index = next(index for index, pair in enumerate(zip(rest, tail, strict=False)) if pair[0] != pair[1])
        return f"{rest[index]} in place of {tail[index]}"

    return _in_ways(adapter.ways, ask)


def _order_is_one(adapter: Adapter, run: Run) -> Result:
    """Hooks that come once a step come in one order, with microbatches and with evaluation."""

    def ask(way: Way) -> str:
        plain = attrs.evolve(Leg(log=True, epochs=2).by(way))
        reference = run(adapter, plain).hooks
        known, times = set(reference), Counter(reference)
        for accumulate, evaluate in itertools.product((1, 4), (None, "epoch", 2)):
            try:
                found = run(adapter, attrs.evolve(plain, accumulate=accumulate, evaluate=evaluate)).hooks
            except NotOfferedError:
                if evaluate != 2:
                    raise
                continue
            counts = Counter(found)
            # Others are called for each microbatch, or for each evaluation, too.
            once = {name for name in known if counts[name] == times[name]}
            one, other = ([name for name in names if name in once] for names in (reference, found))
            if one != other:
                index = next(i for i, pair in enumerate(itertools.zip_longest(one, other)) if pair[0] != pair[1])
                what, missing = f"{accumulate} microbatches, evaluate={evaluate}", "nothing"
                return f"{[*other, missing][index]} in place of {[*one, missing][index]} with {what}"
        return ""

    return _in_ways([way for way in adapter.ways if not way.beyond][:1], ask)


LAWS: dict[str, Callable[[Adapter, Run], Result]] = {
    "resumed in an epoch": _resumption(MIDDLE),
    "resumed between epochs": _resumption(END),
    "observed": _observer(generators=False),
    "observed, own generators": _observer(generators=True),
    "smaller microbatch": _microbatch(ignored=False),
    "ignored targets": _microbatch(ignored=True),
    "order after resuming": _order_after_resuming,
    "order is one": _order_is_one,
}


def measured(adapter: Adapter, run: Run) -> dict[str, Result]:
    """Every law, on one library. A run that several laws compare with is made once."""
    known: dict[Leg | Step, Outcome] = {}

    def once(adapter: Adapter, work: Leg | Step) -> Outcome:
        if isinstance(work, Leg) and work.folder:
            return run(adapter, work)
        if work not in known:
            known[work] = run(adapter, work)
        return known[work]

    return {name: law(adapter, once) for name, law in LAWS.items()}
