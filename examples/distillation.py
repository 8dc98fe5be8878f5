"""Distillation: a small student learns from a teacher, and recognises a digit that it has never seen.

    python examples/distillation.py          # one teacher, students of six seeds; draws distillation.png

The teacher is trained on all ten handwritten digits. The students are trained on 300 images without a single 3: once
with their labels alone, and once with the teacher's probabilities as well, which tell how much this 8 looks like a 3
(the experiment of https://arxiv.org/abs/1503.02531, section 3). The soft targets are an algorithm of ten lines, which
adds a term to the loss at AFTER_LOSS; the rest of the call is the same.

Each seed draws its own images and its own student. Printed are, for each, the accuracies on held-out digits, and on the
held-out 3s among them. Exit code 0 means: distilled students are better for each seed, and recognise 3s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import mean

import _job_pictures
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event

UNSEEN = 3


def distill(teacher: nn.Module, temperature: float = 20.0, weight: float = 0.9) -> pl.Algorithm:
    """The loss is ``(1 - weight) loss + weight T^2 KL(teacher || student)``, of scores divided by the temperature T.

    The teacher is a constant, so it needn't be in the State: nothing of it changes.
    """

    @pl.algorithm(Event.AFTER_LOSS)
    def distill(state: pl.State) -> pl.State:
        images, _ = state.microbatch
        with torch.no_grad():
            soft = (teacher(images) / temperature).log_softmax(dim=1)
        student = (state.outputs / temperature).log_softmax(dim=1)
        distance = kl_div(student, soft, reduction="batchmean", log_target=True)
        return state.replace(loss=(1 - weight) * state.loss + weight * temperature**2 * distance)

    return distill


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--students", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=100, help="of a student; a teacher has 20")
    parser.add_argument("--output", default="distillation.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="two students")
    options = parser.parse_args(arguments)
    students = 2 if options.quick else options.students
    torch.set_num_threads(1)  # The networks are small: more threads would only wait for each other.

    images, digits = load()
    held_out = [(images[1000:], digits[1000:])]
    recipe = pl.Recipe(
        loader(images[:1000], digits[:1000]),
        loss=cross_entropy,
        optimizer=pl.optim.adamw(lr=pl.schedules.cosine("1dur", peak=1e-2)),
        max_duration="20ep",
        evaluators={"held-out": held_out},
        eval_interval="1dur",
    )
    with pl.random.seeded(0):
        network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 10))
    taught = recipe.run(network)
    teacher = taught.module(training=False)
    print(f"teacher: {size(taught):,} parameters, {accuracy(taught):.1%} of {len(held_out[0][1])} held-out digits\n")
    print(f"{'':<9}labels alone              with the teacher\nstudent  all digits   3s           all digits   3s")

    plain: list[tuple[float, list[float]]] = []
    distilled: list[tuple[float, list[float]]] = []
    for seed in range(students):
        order = torch.randperm(1000, generator=pl.random.generator(seed, "images"))
        chosen = order[digits[order] != UNSEEN][:300]
        data = loader(images[chosen], digits[chosen])
        own = recipe.replace(train_dataloader=data, max_duration=f"{options.epochs}ep", seed=seed)
        for results, algorithms in ((plain, ()), (distilled, (distill(teacher),))):
            with pl.random.seeded(seed):
                student = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
            state = own.run(student, algorithms=algorithms)
            results.append((accuracy(state), of_each_digit(state, *held_out[0])))
        cells = [f"{all_digits:10.1%} {each[UNSEEN]:7.1%}" for all_digits, each in (plain[-1], distilled[-1])]
        print(f"{seed:7}  {'      '.join(cells)}", flush=True)

    unseen = [mean(each[UNSEEN] for _, each in results) for results in (plain, distilled)]
    print(f"\nstudents: {size(state):,} parameters; of the 3s, which none of them has seen, ", end="")
    print(f"{unseen[0]:.0%} are right with labels,\nand {unseen[1]:.0%} with the teacher\npicture: {options.output}")
    _job_pictures.distillation(options.output, plain, distilled, teacher=accuracy(taught), unseen=UNSEEN)
    better = all(after > before for (before, _), (after, _) in zip(plain, distilled, strict=True))
    return 0 if better and unseen[1] > 0.5 else 1


def load() -> tuple[Tensor, Tensor]:
    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(raw.data, dtype=torch.float32)[order] / 16, torch.tensor(raw.target)[order]


def loader(images: Tensor, digits: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(images, digits), batch_size=50, shuffle=True)


def size(state: pl.State) -> int:
    return sum(tensor.numel() for tensor in state.params.values())


def accuracy(state: pl.State) -> float:
    return float(state.metrics["held-out"]["accuracy"])


def of_each_digit(state: pl.State, images: Tensor, digits: Tensor) -> list[float]:
    with torch.no_grad():
        right = state.module(training=False)(images).argmax(dim=1) == digits
    return [float(right[digits == digit].double().mean()) for digit in range(10)]


if __name__ == "__main__":
    sys.exit(main())
