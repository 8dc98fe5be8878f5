"""The laws, each as a function that any loop can be held to: it runs a case and asserts.

``fit`` is the loop on trial; the tests give the library's own, and loops that are deliberately wrong.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import BOUNDARIES, Plan, expected, going_on
from pure_loop.strict import same
from tests.cases import Case, Pairs

Fit = Callable[..., Any]
WALL_CLOCK = ("total_seconds", "epoch_seconds", "batch_seconds")


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path, wall-clock times excepted."""
    paths, values, _ = optree.tree_flatten_with_path(tree, namespace="pure_loop")
    named = {".".join(map(str, path)): value for path, value in zip(paths, values, strict=True)}
    return {path: value for path, value in named.items() if not path.endswith(WALL_CLOCK)}


def frozen_copy(state: pl.State) -> dict[str, Any]:
    return {path: leaf.clone() if isinstance(leaf, Tensor) else leaf for path, leaf in leaves(state).items()}


def assert_same(given: Any, wanted: Any, where: str) -> None:
    """Bitwise equality of two States, or of two dicts of leaves."""
    a = given if isinstance(given, dict) else leaves(given)
    b = wanted if isinstance(wanted, dict) else leaves(wanted)
    assert a.keys() == b.keys(), f"{where}: other leaves: {sorted(a.keys() ^ b.keys())}"
    for path in a:
        assert same(a[path], b[path]), f"{where}: {path} is {a[path]} and should be {b[path]}"


def assert_same_stream(given: Pairs, wanted: Pairs, where: str) -> None:
    assert [event for event, _ in given] == [event for event, _ in wanted], f"{where}: other events"
    for index, ((event, a), (_, b)) in enumerate(zip(given, wanted, strict=True)):
        assert_same(a, b, f"{where}, {event.name} at position {index}")


def global_random_state() -> tuple[bytes, Any, Any]:
    numpy_state = np.random.get_state()
    return (
        bytes(torch.get_rng_state().numpy()),
        random.getstate(),
        (numpy_state[0], tuple(numpy_state[1]), numpy_state[2:]),
    )


def law_order(case: Case, fit: Fit = pl.fit) -> None:
    """1: the events of a stream are exactly those of the specification, and every State says its event."""
    pairs = case.run(fit)
    assert [event for event, _ in pairs] == expected(case.plan)
    assert all(state.event is event for event, state in pairs)


def law_value(case: Case, fit: Fit = pl.fit) -> None:
    """2: a State that was yielded never changes afterwards."""
    kept: list[tuple[pl.State, dict[str, Any]]] = []
    for _, state in case.stream(fit):
        kept.append((state, frozen_copy(state)))
    for state, before in kept:
        assert_same(state, before, f"a State kept at {state.event}")


def law_determinism(case: Case, fit: Fit = pl.fit) -> None:
    """3: equal inputs give equal streams whatever the global random state, which is left as it was."""
    streams = []
    for seed in (11, 12):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = global_random_state()
        pairs = []
        for pair in case.stream(fit):
            pairs.append(pair)
            assert global_random_state() == before, f"the global random state changed by {pair[0].name}"
        streams.append(pairs)
    assert_same_stream(streams[1], streams[0], "with another global random state")


def law_resumption(
    case: Case, fit: Fit = pl.fit, choose: Callable[[int], Sequence[int]] = range, **overrides: Any
) -> int:
    """4: from every boundary the rest of the stream is the same, bitwise; ``choose`` picks among them."""
    whole = case.run(fit, **overrides)
    boundaries = [index for index, (event, _) in enumerate(whole) if event in BOUNDARIES]
    for number in choose(len(boundaries)):
        index = boundaries[number]
        event, kept = whole[index]
        again = case.run(fit, kept, **overrides)
        assert again[0][0] is Event.FIT_START
        rest = going_on([event for event, _ in whole], index)
        assert [event for event, _ in again] == rest, f"from {event.name}: other events"
        assert_same_stream(again[1:], whole[len(whole) - len(again) + 1 :], f"from {event.name} at {index}")
    return len(boundaries)


def exact_gradients(sizes: tuple[int, ...], microbatch_size: int | None, seed: int, fit: Fit = pl.fit) -> list[Any]:
    """Gradients of a linear model in integers, on which every sum is exact: all splits give the same bits."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator).double()

    model = torch.nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.copy_(integers(2, 3))
        model.bias.copy_(integers(2))
    data = [(integers(n, 3), integers(n, 2)) for n in sizes]
    stream = fit(
        model,
        data,
        # The mean over samples of half a square, written so that its derivative is an integer a sample.
        loss=lambda outputs, targets: (outputs - targets).square().sum(dim=1).mul(0.5).mean(),
        optimizer=pl.optim.sgd(lr=0.0),
        max_duration="1ep",
        microbatch_size=microbatch_size,
    )
    return [state.grads for event, state in stream if event is Event.AFTER_TRAIN_BATCH]


def law_microbatches_exact(sizes: tuple[int, ...], seed: int, fit: Fit = pl.fit) -> None:
    """5: gradients are bitwise independent of the microbatch size, on the exact problem."""
    wanted = exact_gradients(sizes, None, seed, fit)
    for size in range(1, max(sizes) + 1):
        given = exact_gradients(sizes, size, seed, fit)
        for batch, (a, b) in enumerate(zip(given, wanted, strict=True)):
            assert_same(a, b, f"gradients of batch {batch} in microbatches of {size}")


def law_microbatches(case: Case, fit: Fit = pl.fit) -> None:
    """5: on a real model gradients and losses are independent of the microbatch size to rounding."""
    whole = [s for e, s in case.run(fit, microbatch_size=None) if e is Event.AFTER_TRAIN_BATCH]
    split = [s for e, s in case.run(fit) if e is Event.AFTER_TRAIN_BATCH]
    if not whole:
        return
    # Only the first batch: later ones start from parameters that differ by the rounding of the first.
    torch.testing.assert_close(split[0].loss, whole[0].loss, rtol=1e-4, atol=1e-6)
    for name, gradient in whole[0].grads.items():
        torch.testing.assert_close(split[0].grads[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


class Nosy(pl.Callback):
    """Draws random numbers, keeps States, computes with them, and changes nothing."""

    def __init__(self) -> None:
        self.kept: list[pl.State] = []

    def run_event(self, event: Event, state: pl.State, logger: Any) -> None:
        torch.rand(3)
        random.random()
        self.kept.append(state)
        sum(float(tensor.detach().sum()) for tensor in state.params.values())


TRAINING = frozenset({Event.BATCH_END, Event.EPOCH_END, Event.FIT_END})


def training_states(pairs: Pairs) -> list[dict[str, Any]]:
    """What training came to at each batch and epoch, without the metrics of evaluation."""
    states = [state for event, state in pairs if event in TRAINING]
    return [{path: leaf for path, leaf in leaves(state).items() if "metrics" not in path} for state in states]


def law_observers(case: Case, fit: Fit = pl.fit) -> None:
    """6: callbacks, evaluation, progress and code in the loop's body change no training State."""
    alone = training_states(case.run(fit, evaluators=None))
    pairs = []
    nosy = Nosy()
    for event, state in case.stream(fit, callbacks=[nosy, lambda event, state: None]):
        torch.rand(5)
        pairs.append((event, state))
    observed = training_states(pairs)
    assert len(observed) == len(alone)
    for index, (a, b) in enumerate(zip(observed, alone, strict=True)):
        assert_same(a, b, f"training State {index}, observed")


def law_identity(case: Case, fit: Fit = pl.fit) -> None:
    """7: an algorithm that returns what it was given changes nothing, at any event."""
    identity = pl.algorithm(*Event, name="identity")(lambda state: state)
    copying = pl.algorithm(*Event, name="copying")(lambda state: state.replace())
    wanted = case.run(fit)
    assert_same_stream(case.run(fit, algorithms=[identity, copying]), wanted, "with the identity")


def tracer(name: str, trace: list[tuple[Event, str]]) -> pl.Algorithm:
    def note(state: pl.State) -> pl.State:
        assert state.event is not None
        trace.append((state.event, name))
        return state

    return pl.Algorithm(name, dict.fromkeys(Event, note))


def law_algorithm_order(case: Case, fit: Fit = pl.fit) -> None:
    """7: in the order given; in reverse on the AFTER half of a BEFORE/AFTER pair, AFTER_DATALOADER excepted."""
    trace: list[tuple[Event, str]] = []
    events = [e for e, _ in case.run(fit, algorithms=[tracer(n, trace) for n in "abc"])]
    wanted = []
    for event in events:
        backwards = "AFTER" in event.name.split("_") and event is not Event.AFTER_DATALOADER
        wanted += [(event, name) for name in ("cba" if backwards else "abc")]
    assert trace == wanted


def scale_loss(name: str, factor: float) -> pl.Algorithm:
    return pl.algorithm(Event.AFTER_LOSS, name=name)(lambda state: state.replace(loss=state.loss * factor + 0.1))


def count_batches(name: str) -> pl.Algorithm:
    return pl.algorithm(Event.BATCH_END, name=name, init=lambda state: 0)(
        lambda state: state.remember(name, state.algorithm_state[name] + 1)
    )


def law_composition(case: Case, fit: Fit = pl.fit) -> None:
    """7: compose(a, b) is [a, b], and composition is associative."""
    a, b, c = scale_loss("a", 2.0), count_batches("b"), scale_loss("c", 0.5)
    wanted = case.run(fit, algorithms=[a, b, c])
    for grouping in ([pl.compose(a, b, c)], [pl.compose(pl.compose(a, b), c)], [a, pl.compose(b, c)]):
        assert_same_stream(case.run(fit, algorithms=grouping), wanted, "composed")


def law_closing(case: Case, position: int, how: str, fit: Fit = pl.fit) -> None:
    """11: leaving the loop at any event leaves no thread, process or changed module, and can be gone on from."""
    module = case.module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    training = [part.training for part in module.modules()]
    random_state = global_random_state()
    threads = set(threading.enumerate())
    stream = fit(module, case.data(), **case.arguments())
    try:
        for index, _ in enumerate(stream):
            if index == position:
                if how == "raise":
                    raise KeyError("in the loop's body")
                break
    except KeyError:
        pass
    stream.close()
    assert list(stream) == []
    assert set(threading.enumerate()) == threads
    assert multiprocessing.active_children() == []
    assert global_random_state() == random_state
    assert [part.training for part in module.modules()] == training
    assert all(parameter.grad is None for parameter in module.parameters())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


__all__ = [name for name in dir() if name.startswith("law_")] + ["Plan", "assert_same", "assert_same_stream"]
