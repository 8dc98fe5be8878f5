"""REINFORCE as a script: a policy plays, and each batch is what it has just played.

    python examples/reinforce.py             # learns to balance a pole, resumes from a file, draws reinforce.png

``pl.fit`` trains on data that are there. Here each batch comes from the policy of that moment, so the loop is a script:
a generator in which each event is one line, ``state = yield EVENT, state``. It takes its steps from ``pl.Stages``, the
loop's own, and the rest of the library works with it: gradient clipping, an average of the weights (EMA), the progress
bar, checkpoints. The environment, 32 carts that each balance a pole (Barto, Sutton and Anderson 1983, with the numbers
of Gymnasium's CartPole), is forty lines in this file; an episode ends where the pole falls, or after 200 steps.

Training resumes a second time from a file of its first third: every start and every action is drawn from the seed and
the number of the batch, so the rest is the same, bit for bit. Exit code 0 means that it is, and that the averaged
policy balances new poles for 195 steps or more, on average, by its most probable actions.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import _compare
import _job_pictures
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop.loop.training import Script

STEPS, CARTS = 200, 32

TASK = pl.Task(
    forward=lambda policy, batch: policy(batch["positions"]),
    # The gradient of this is REINFORCE's: advantages times those of the logarithms of the actions' probabilities.
    loss=lambda scores, batch: (batch["advantages"] * cross_entropy(scores, batch["actions"], reduction="none")).mean(),
)
STAGES = pl.Stages(task=TASK, optimizer=pl.optim.adam(lr=1e-2))
ALGORITHMS = [pl.algorithms.gradient_clipping("norm", 0.5), pl.algorithms.ema(half_life="5ba")]


def script(state: pl.State) -> Script:
    """The loop. It reads how far it is from the State, so it begins anew or resumes, whichever it is given."""
    end = state.timestamp.max_duration
    assert end is not None
    state = yield Event.FIT_START, state
    while state.timestamp < end:
        random = pl.random.generator(state.seed, "episodes", state.timestamp.batch)
        batch = experience(*play(state.module(training=False), CARTS, random))
        state = yield Event.BATCH_START, state.replace(batch=batch, microbatch=batch, grads=None)
        state = yield Event.AFTER_FORWARD, STAGES.forward(state)
        state = yield Event.AFTER_LOSS, STAGES.loss(state)
        state = yield Event.AFTER_BACKWARD, STAGES.backward(state)
        state = yield Event.AFTER_TRAIN_BATCH, STAGES.finish_gradients(state)
        state = yield Event.BATCH_END, STAGES.update(state).count_batch(samples=CARTS)
    return (yield Event.FIT_END, state)


@torch.no_grad()
def play(policy: nn.Module, carts: int, random: torch.Generator, *, greedy: bool = False) -> tuple[Tensor, ...]:
    """Episodes of all carts at once.

    Returns:
        positions, float32 of shape (200, carts, 4); actions, int64 of shape (200, carts); and whether the episode was
        still under way, bool of shape (200, carts).
    """
    position = 0.1 * torch.rand(carts, 4, generator=random) - 0.05
    alive = torch.ones(carts, dtype=torch.bool)
    history = []
    for _ in range(STEPS):
        scores = policy(position)
        chances = scores.softmax(dim=1)
        action = scores.argmax(dim=1) if greedy else torch.multinomial(chances, 1, generator=random).squeeze(1)
        history.append((position, action, alive))
        position = move(position, action)
        alive = alive & (position[:, 0].abs() < 2.4) & (position[:, 2].abs() < math.radians(12))
    positions, actions, lives = map(torch.stack, zip(*history, strict=True))
    return positions, actions, lives


def move(position: Tensor, action: Tensor) -> Tensor:
    """One step of 20 ms: the cart is pushed with 10 N, to the left or to the right."""
    gravity, pole, length, total, push, seconds = 9.8, 0.1, 0.5, 1.1, 10.0, 0.02
    _, speed, angle, turning = position.unbind(dim=1)
    force = (push * (2 * action - 1) + pole * length * turning.square() * angle.sin()) / total
    falling = gravity * angle.sin() - force * angle.cos()
    turning_faster = falling / (length * (4 / 3 - pole * angle.cos().square() / total))
    faster = force - pole * length * turning_faster * angle.cos() / total
    steps = torch.stack([speed, faster, turning, turning_faster], dim=1)
    return position + seconds * steps


def experience(positions: Tensor, actions: Tensor, alive: Tensor, discount: float = 0.98) -> dict[str, Tensor]:
    """A batch: what was seen and done, and how much more reward followed than usually at that step."""
    reward = alive.float()
    following = torch.zeros_like(reward)
    sums = torch.zeros_like(reward[0])
    for step in reversed(range(STEPS)):
        sums = reward[step] + discount * sums
        following[step] = sums
    usual = (following * reward).sum(dim=1, keepdim=True) / reward.sum(dim=1, keepdim=True).clamp(min=1)
    advantages = (following - usual)[alive]
    return {
        "positions": positions[alive],
        "actions": actions[alive],
        "advantages": advantages / (advantages.std() + 1e-6),
        "returns": reward.sum(dim=0),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="reinforce.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="15 batches; 25 steps are enough")
    options = parser.parse_args(arguments)
    batches, goal = (15, 25) if options.quick else (options.batches, 195)
    torch.set_num_threads(1)  # The networks are tiny: more threads would only wait for each other.

    start = fresh_state(options.seed, batches)
    run = train(start, batches)
    early = run[batches // 3 - 1]
    with tempfile.TemporaryDirectory() as folder:
        pl.save(early, Path(folder) / "early.safetensors")
        rest = train(pl.load(Path(folder) / "early.safetensors", model=policy()), batches)
    different = _compare.differences(rest[-1], run[-1])

    print("  batch   mean return   of 200 new poles, by the averaged policy")
    traces = []
    for state in (run[0], early, run[-1]):
        random = pl.random.generator(options.seed, "test")
        averaged = pl.algorithms.averaged(state).module(training=False)
        positions, _, alive = play(averaged, 200, random, greedy=True)
        balanced = float(alive.sum(dim=0).float().mean())
        print(f"{state.timestamp.batch:7}   {float(state.batch['returns'].mean()):11.1f}   {balanced:9.1f} steps")
        angles = positions[..., 2].rad2deg().masked_fill(~alive, torch.nan)
        traces.append((f"batch {state.timestamp.batch}", f"{balanced:.0f} steps", angles[:, :40].T.tolist()))
    print(f"\nresumed from a file of batch {early.timestamp.batch}: the State at the end is ", end="")
    print(f"ANOTHER: {different[0]}" if different else "bitwise the same")
    _job_pictures.returns(
        options.output,
        [state.batch["returns"].tolist() for state in run],
        [state.batch["returns"].tolist() for state in rest],
        traces,
    )
    print(f"picture: {options.output}")
    return 0 if not different and balanced >= goal else 1


def train(state: pl.State, batches: int) -> list[pl.State]:
    """The State at the end of each batch."""
    stream = pl.drive(script(state), algorithms=ALGORITHMS, stages=STAGES)
    return [state for event, state in pl.progress(stream) if event is Event.BATCH_END]


def fresh_state(seed: int, batches: int) -> pl.State:
    """What ``fit`` would make of a module: a State with optimizer state and the time at which to stop."""
    with pl.random.seeded(seed):
        state = pl.State.create(policy(), seed=seed)
    return state.replace(
        opt_state=STAGES.optimizer.init(state.params),
        timestamp=state.timestamp.replace(max_duration=pl.Time(batches, "ba")),
    )


def policy() -> nn.Module:
    """Position and speed of the cart, angle and turning of the pole: (n, 4) to scores of left and right, (n, 2)."""
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


if __name__ == "__main__":
    sys.exit(main())
