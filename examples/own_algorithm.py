"""An algorithm of one's own: a few lines, a memory in the State, and a proof that it composes.

    python examples/own_algorithm.py

The loader is broken: once in a while a batch is a hundred times too bright and has the wrong labels. One such
batch throws the weights far away. ``spike_guard`` learns how long gradients usually are, and shortens the ones that
are out of all proportion. It is shown in what ``pl.explain`` prints, then at work next to one of the library's
algorithms (EMA), and then its promises are tested with Hypothesis on drawn settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import _compare
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event, FrozenDict

Batch = tuple[Tensor, Tensor]


def spike_guard(deviations: float = 3.0, decay: float = 0.95, *, name: str = "spike_guard") -> pl.Algorithm:
    """Shorten gradients that are longer than ``exp(mean + deviations * std)`` of the logarithms of earlier lengths.

    What it keeps is a pytree in ``state.algorithm_state[name]``: that is all it takes to make resuming, forking
    and replaying exact. It reads nothing from the device, so it never waits for it.
    """

    def start(state: pl.State) -> FrozenDict[str, Tensor]:
        zero = torch.zeros((), device=state.device)
        return FrozenDict(mean=zero, variance=zero, seen=zero, cut=zero)

    @torch.no_grad()
    def guard(state: pl.State) -> pl.State:
        grads = state.grads
        assert grads is not None
        mean, variance, seen, cut = state.algorithm_state[name].values()
        length = pl.gradients.global_norm(grads)
        # Ten batches are needed to know what is usual, and until then nothing is cut.
        limit = torch.where(seen < 10, torch.inf, torch.exp(mean + deviations * variance.sqrt().clamp(min=0.1)))
        factor = (limit / length).clamp(max=1.0)
        grads = FrozenDict(
            (key, gradient if gradient is None else gradient * factor) for key, gradient in grads.items()
        )

        # A plain mean at first, then an exponential one; a spike counts as long as it was allowed to be.
        weight = torch.maximum(1.0 / (seen + 1.0), torch.as_tensor(1.0 - decay))
        delta = torch.minimum(length, limit).clamp(min=1e-12).log() - mean
        memory = FrozenDict(
            mean=mean + weight * delta,
            variance=(1.0 - weight) * (variance + weight * delta.square()),
            seen=seen + 1.0,
            cut=cut + (factor < 1.0),
        )
        return state.replace(grads=grads).remember(name, memory)

    return pl.Algorithm(name, {Event.AFTER_TRAIN_BATCH: guard}, init=start)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--examples", type=int, default=15, help="how many settings Hypothesis tries")
    parser.add_argument("--quick", action="store_true", help="one epoch, five examples")
    options = parser.parse_args(arguments)
    epochs, examples = (1, 5) if options.quick else (options.epochs, options.examples)
    torch.set_num_threads(1)  # The network is tiny: more threads would only wait for each other.

    train, held_out, broken = load()
    recipe = pl.Recipe(
        train,
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.sgd(lr=0.1, momentum=0.9),
        max_duration=f"{epochs}ep",
        evaluators={"held-out": held_out},
    )
    average = pl.algorithms.ema(half_life="10ba")
    recipe.explain(network(), algorithms=[spike_guard(), average])

    plans: dict[str, list[pl.Algorithm]] = {
        "nothing": [],
        "EMA": [average],
        "spike_guard": [spike_guard()],
        "spike_guard, EMA": [spike_guard(), average],
    }
    print(f"\n{sum(broken) * epochs} of {len(train) * epochs} batches are broken (marked ^)\n")
    for label, algorithms in plans.items():
        losses = []
        for event, state in recipe.fit(network(), algorithms=algorithms):
            if event is Event.BATCH_END:
                losses.append(float(state.loss))
        accuracy = float(state.metrics["held-out"]["accuracy"])
        memory = state.algorithm_state.get("spike_guard")
        cut = f", {int(memory['cut'])} gradients cut" if memory else ""
        print(f"{label:<18}{bars(losses[: len(train)])}  {accuracy:6.1%} right{cut}")
    print(f"{'':<18}{''.join('^' if bad else ' ' for bad in broken)}  (the loss in the first epoch)")

    check(examples)
    print(
        f"\nTested with Hypothesis on {examples} settings each: it changes no State, resuming from any batch is bitwise"
    )
    print("exact, and with a limit of infinity it does nothing.")
    return 0


def check(examples: int) -> None:
    """The laws that an algorithm must keep, for any settings, batch and seed."""
    recipe = pl.Recipe(
        load()[0][:14],
        loss=nn.functional.cross_entropy,
        optimizer=pl.optim.sgd(lr=0.1, momentum=0.9),
        max_duration="14ba",
        strict=True,  # compares every State before and after an algorithm had it, by value
    )

    def run(start: nn.Module | pl.State, algorithms: list[pl.Algorithm], seed: int) -> list[tuple[Event, pl.State]]:
        return list(recipe.fit(start, algorithms=algorithms, seed=seed))

    # A run takes a while, so a failure is reported as it was found, without a search for the smallest one.
    tried = settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate])

    @tried
    @given(st.floats(0.0, 5.0), st.floats(0.0, 1.0), st.integers(0, 13), st.integers(0, 2**31))
    def going_on_is_exact(deviations: float, decay: float, kept_at: int, seed: int) -> None:
        algorithms = [spike_guard(deviations, decay), pl.algorithms.ema(half_life="3ba")]
        whole = run(network(), algorithms, seed)
        end = [index for index, (event, _) in enumerate(whole) if event is Event.BATCH_END][kept_at]
        again, rest = run(whole[end][1], algorithms, seed)[1:], whole[end + 1 :]
        assert [event for event, _ in again] == [event for event, _ in rest]
        assert not any(_compare.differences(a, b) for (_, a), (_, b) in zip(again, rest, strict=True))

    @tried
    @given(st.floats(0.0, 1.0), st.integers(0, 2**31))
    def without_a_limit_it_does_nothing(decay: float, seed: int) -> None:
        idle, without = run(network(), [spike_guard(float("inf"), decay)], seed)[-1][1], run(network(), [], seed)[-1][1]
        assert not _compare.differences(idle.replace(algorithm_state={}), without)

    going_on_is_exact()
    without_a_limit_it_does_nothing()


def load() -> tuple[list[Batch], list[Batch], list[bool]]:
    """Batches of digits, some of them broken; and digits that were held out."""
    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    images, digits = torch.tensor(raw.data, dtype=torch.float32)[order] / 16, torch.tensor(raw.target)[order]
    batches = [(images[at : at + 24], digits[at : at + 24]) for at in range(0, 1440, 24)]
    broken = [number % 17 == 12 for number in range(len(batches))]
    train = [(100 * x, y.flip(0)) if bad else (x, y) for (x, y), bad in zip(batches, broken, strict=True)]
    return train, [(images[1440:], digits[1440:])], broken


def network() -> nn.Module:
    with pl.random.seeded(0):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def bars(values: Sequence[float]) -> str:
    """The values as a line of blocks: a full one is a loss of 3 or more; that of guessing is 2.3."""
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(7 * value / 3))] for value in values)


if __name__ == "__main__":
    sys.exit(main())
