"""A GAN, trained by a script of one's own: two networks, two optimizers, one State.

    python examples/gan.py                   # trains, resumes from the middle a second time, draws gan.png

``pl.fit`` knows one loss and one optimizer. What doesn't fit into it is written as a *script*: a generator in which
each event is one line, ``state = yield EVENT, state``. ``pl.drive`` runs it, and the rest of the library works with
it as with ``fit``: here an average of the weights (EMA), the progress bar, and resuming from a kept State.

The data are points around eight places on a ring. A generator that has collapsed finds only some of the places; this
one should find all eight, and put most of its points near one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import _pictures
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import pure_loop as pl
from pure_loop import Event
from pure_loop.loop.training import Script

ANGLES = torch.arange(8) * (math.pi / 4)
PLACES = 2 * torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)
WIDTH, NEAR = 0.05, 0.25
NOISE = 8
PLAYERS = ("discriminator", "generator")
OPTIMIZERS = {player: pl.optim.adam(lr=2e-3, betas=(0.5, 0.99)) for player in PLAYERS}


def script(state: pl.State, batch_size: int = 256) -> Script:
    """The loop. It reads how far it is from the State, so it begins anew or resumes, whichever it is given."""
    end = state.timestamp.max_duration
    assert end is not None
    state = yield Event.FIT_START, state
    while state.timestamp < end:
        random = pl.random.generator(state.seed, "batch", state.timestamp.batch)
        state = yield Event.AFTER_DATALOADER, state.replace(batch=real_points(batch_size, random))
        state = yield Event.BATCH_START, state
        losses: dict[str, Tensor] = {}
        for player, noise in zip(PLAYERS, torch.randn(2, batch_size, NOISE, generator=random), strict=True):
            # A step of one player, against the other as it is.
            loss = partial(LOSSES[player], real=state.batch, noise=noise)
            state = pl.stages.update_part(state, player, loss, OPTIMIZERS[player])
            losses[player] = state.loss
        state = state.replace(loss={"total": sum(losses.values()), **losses})
        # Count the batch: the script's own loop, cadences and EMA read its timestamps.
        state = yield Event.BATCH_END, state.count_batch(samples=batch_size)
    return (yield Event.FIT_END, state)


def fresh_state(seed: int, batches: int) -> pl.State:
    """A State with the time at which to stop."""
    with pl.random.seeded(seed):
        state = pl.State.create(GAN(), seed=seed)
    return state.replace(timestamp=state.timestamp.replace(max_duration=pl.Time(batches, "ba")))


class GAN(nn.Module):
    """Both players. A module never has to know that it is called functionally."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.generator = mlp(NOISE, hidden, 2)
        self.discriminator = mlp(2, hidden, 1)


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    layers = [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
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


LOSSES = {"discriminator": discriminator_loss, "generator": generator_loss}


def real_points(n: int, random: torch.Generator) -> Tensor:
    which = torch.randint(len(PLACES), (n,), generator=random)
    return PLACES[which] + WIDTH * torch.randn(n, 2, generator=random)


def generated_points(state: pl.State, n: int = 2000) -> Tensor:
    noise = torch.randn(n, NOISE, generator=pl.random.generator(0, "samples"))
    with torch.no_grad():
        module: Any = state.module(training=False)
        points: Tensor = module.generator(noise)
    return points


def judge(points: Tensor) -> tuple[int, float]:
    """How many places were found (by 1% of the points or more), and which part of the points is near one."""
    distance, which = torch.cdist(points, PLACES).min(dim=1)
    near = distance < NEAR
    found = torch.bincount(which[near], minlength=len(PLACES)) >= 0.01 * len(points)
    return int(found.sum()), float(near.float().mean())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="gan.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="200 batches, however good they are")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # The networks are tiny: more threads would only wait for each other.
    batches = 200 if options.quick else options.batches

    algorithms = [pl.algorithms.ema(half_life="20ba")]

    shown = [round(batches * fraction) for fraction in (0.02, 0.1, 0.25, 0.5, 1.0)]
    kept: list[pl.State] = []
    for event, state in pl.progress(pl.drive(script(fresh_state(options.seed, batches)), algorithms=algorithms)):
        if event is Event.BATCH_END and state.timestamp.batch in shown:
            kept.append(state)

    print("\n  batch   loss of D   loss of G   places found   points near one")
    shots = []
    for state in kept:
        points = generated_points(pl.algorithms.averaged(state))
        places, near = judge(points)
        losses = "   ".join(f"{float(state.loss[player]):9.3f}" for player in PLAYERS)
        print(f"{state.timestamp.batch:7}   {losses}   {places:7} of 8   {near:15.1%}")
        shots.append((f"batch {state.timestamp.batch}", f"{places} of 8, {near:.0%} near", points))
    _pictures.samples(options.output, shots, PLACES, reach=NEAR)

    half, last = kept[-2:]
    again = pl.run(pl.drive(script(half), algorithms=algorithms))
    same = all(torch.equal(again.params[name], last.params[name]) for name in last.params)
    print(f"\ngone on a second time from batch {half.timestamp.batch}: the weights at the end are ", end="")
    print("bitwise the same" if same else "NOT THE SAME")
    print(f"picture: {options.output}")
    return 0 if same and (options.quick or places == 8) else 1


if __name__ == "__main__":
    sys.exit(main())
