"""A GAN, trained by a script of one's own: two networks, two optimizers, one State.

    python examples/gan.py                   # trains, goes on from the middle a second time, draws gan.png

``pl.fit`` knows one loss and one optimizer. What doesn't fit into it is written as a *script*: a generator in which
each event is one line, ``state = yield EVENT, state``. ``pl.drive`` runs it, and the rest of the library works with
it as with ``fit``: here an average of the weights (EMA), the progress bar, and going on from a kept State.

The data are points around eight places on a ring. A generator that has collapsed finds only some of the places; this
one should find all eight, and put most of its points near one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import pure_loop as pl
from pure_loop import Event, FrozenDict
from pure_loop.algorithms import averaged, ema
from pure_loop.loop import Script
from pure_loop.progress import progress

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ANGLES = torch.arange(8) * (math.pi / 4)
PLACES = 2 * torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)
WIDTH = 0.05
NOISE = 8


def script(state: pl.State, optimizers: dict[str, pl.optim.Optimizer], batch_size: int = 256) -> Script:
    """The loop. It reads how far it is from the State, so it begins anew or goes on, whichever it is given."""
    end = state.timestamp.max_duration
    assert end is not None
    state = yield Event.FIT_START, state
    while state.timestamp < end:
        random = pl.random.generator(state.seed, "batch", state.timestamp.batch)
        state = yield Event.AFTER_DATALOADER, state.replace(batch=real_points(batch_size, random))
        state = yield Event.BATCH_START, state
        noise = torch.randn(2, batch_size, NOISE, generator=random)
        state = step(state, "discriminator", discriminator_loss, noise[0], optimizers)
        state = step(state, "generator", generator_loss, noise[1], optimizers)
        before = state.timestamp
        now = before.next_batch(samples=batch_size)
        state = yield Event.BATCH_END, state.replace(timestamp=now, previous_timestamp=before)
    return (yield Event.FIT_END, state)


def step(
    state: pl.State,
    player: str,
    loss: Callable[[Any, Tensor, Tensor], Tensor],
    noise: Tensor,
    optimizers: dict[str, pl.optim.Optimizer],
) -> pl.State:
    """One step of one player, against the other as it is."""
    mine = FrozenDict((name, tensor) for name, tensor in state.params.items() if name.startswith(player))

    def loss_at(mine: FrozenDict[str, Tensor]) -> Tensor:
        params = FrozenDict({**state.params, **mine})
        value, _ = state.model.apply(lambda gan: loss(gan, state.batch, noise), params, state.buffers, training=True)
        return value

    value, grads = pl.stages.value_and_grad(loss_at, mine)
    mine, memory = optimizers[player].update(grads, state.opt_state[player], mine, state.timestamp)
    return state.replace(
        params={**state.params, **mine},
        opt_state=FrozenDict({**state.opt_state, player: memory}),
        loss={**(state.loss or {}), player: value, "total": value},
    )


class GAN(nn.Module):
    """Both players. A module never has to know that it is called functionally."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.generator = mlp(NOISE, hidden, 2)
        self.discriminator = mlp(2, hidden, 1)


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    layers = [nn.Linear(inputs, hidden), nn.LeakyReLU(0.1), nn.Linear(hidden, hidden), nn.LeakyReLU(0.1)]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


def discriminator_loss(gan: GAN, real: Tensor, noise: Tensor) -> Tensor:
    """The logistic loss, and R1: a penalty on the slope at real points (https://arxiv.org/abs/1801.04406)."""
    real = real.detach().requires_grad_()
    scores = gan.discriminator(real)
    (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
    penalty = 0.05 * slope.square().sum(dim=1).mean()
    return softplus(-scores).mean() + softplus(gan.discriminator(gan.generator(noise).detach())).mean() + penalty


def generator_loss(gan: GAN, real: Tensor, noise: Tensor) -> Tensor:
    return softplus(-gan.discriminator(gan.generator(noise))).mean()


def real_points(n: int, random: torch.Generator) -> Tensor:
    which = torch.randint(len(PLACES), (n,), generator=random)
    return PLACES[which] + WIDTH * torch.randn(n, 2, generator=random)


def generated_points(state: pl.State, n: int = 2000) -> Tensor:
    noise = torch.randn(n, NOISE, generator=pl.random.generator(0, "samples"))
    with torch.no_grad():
        module: Any = state.module()
        points: Tensor = module.generator(noise)
    return points


def judge(points: Tensor) -> tuple[int, float]:
    """How many places were found (by 1% of the points or more), and which part of the points is near one."""
    distance, which = torch.cdist(points, PLACES).min(dim=1)
    near = distance < 5 * WIDTH
    found = torch.bincount(which[near], minlength=len(PLACES)) >= 0.01 * len(points)
    return int(found.sum()), float(near.float().mean())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="gan.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="300 batches, however good they are")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    batches = 300 if options.quick else options.batches

    lr = pl.schedules.linear(2e-3, 2e-4, f"{batches}ba")
    optimizers = {player: pl.optim.adam(lr=lr, betas=(0.5, 0.99)) for player in ("generator", "discriminator")}
    with pl.random.seeded(options.seed):
        module = GAN()
    start = pl.State.create(
        module, seed=options.seed, timestamp=pl.Timestamp(max_duration=pl.Time(batches, "ba"))
    )
    start = start.replace(opt_state=FrozenDict({
        player: optimizer.init(FrozenDict((n, p) for n, p in start.params.items() if n.startswith(player)))
        for player, optimizer in optimizers.items()
    }))  # fmt: skip
    algorithms = [ema(half_life="20ba")]

    shots = {round(batches * part) for part in (0.02, 0.1, 0.25, 0.5, 1.0)}
    kept: list[pl.State] = []
    for event, state in progress(pl.drive(script(start, optimizers), algorithms=algorithms)):
        if event is Event.BATCH_END and state.timestamp.batch in shots:
            kept.append(state)

    print("\n  batch   loss of D   loss of G   places found   points near one   of the average")
    for state in kept:
        (places, near), (_, average) = judge(generated_points(state)), judge(generated_points(averaged(state)))
        d, g = (float(state.loss[player]) for player in ("discriminator", "generator"))
        print(f"{state.timestamp.batch:7}   {d:9.3f}   {g:9.3f}   {places:10}/8   {near:15.1%}   {average:14.1%}")

    again = pl.run(pl.drive(script(kept[-2], optimizers), algorithms=algorithms))
    same = all(torch.equal(again.params[name], kept[-1].params[name]) for name in again.params)
    print(f"\ngone on a second time from batch {kept[-2].timestamp.batch}: "
          f"the weights at the end are {'bitwise the same' if same else 'NOT THE SAME'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
