"""An image model with what such training usually has: augmentation, EMA, cosine with warmup, early stopping.

    python examples/images.py                # trains, stops, restores, draws images.png

A small ResNet, written as timm writes its models (stem, stages, head, stochastic depth), learns handwritten digits
with noise from 600 images. Each batch is turned, scaled, shifted, and has squares erased, by an algorithm whose random
numbers come from the seed and the number of the batch. Evaluations use an average of the weights (EMA); in the loop's
body each State is evaluated once more without it, for the other curve. `early_stopping` reads the loss of the
average, and `restored` gives the best one.

Printed is the accuracy on digits that neither training nor stopping has used. What is compared in the end: the restored
parameters with the average that the loop had after that epoch, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import _compare
import _job_pictures
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import averaged, early_stopping, ema, restored

Data = list[tuple[Tensor, Tensor]]


@pl.algorithm(Event.BEFORE_TRAIN_BATCH)
def augmentation(state: pl.State) -> pl.State:
    images, digits = state.batch
    random = pl.random.generator(state.seed, "augmentation", state.timestamp.batch)
    return state.replace(batch=(augmented(images, random), digits))


def augmented(images: Tensor, random: torch.Generator) -> Tensor:
    """Turn, scale, shift and erase images of shape (n, 1, height, width), each in its own way."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(images), generator=random)

    angle, scale = uniform(-0.35, 0.35), uniform(0.8, 1.2)
    across, down = uniform(-0.25, 0.25), uniform(-0.25, 0.25)
    rows = torch.stack(
        [scale * angle.cos(), -scale * angle.sin(), across, scale * angle.sin(), scale * angle.cos(), down]
    )
    grid = affine_grid(rows.T.reshape(-1, 2, 3), list(images.shape), align_corners=False)
    moved = grid_sample(images, grid, align_corners=False)
    size, (height, width) = 2, images.shape[-2:]
    top, left = uniform(-size, height)[:, None], uniform(-size, width)[:, None]
    in_rows = (torch.arange(height) >= top) & (torch.arange(height) < top + size)
    in_columns = (torch.arange(width) >= left) & (torch.arange(width) < left + size)
    return moved.masked_fill((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="at most")
    parser.add_argument("--patience", type=int, default=5, help="evaluations without a better loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="images.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="at most twelve epochs, a patience of two")
    options = parser.parse_args(arguments)
    epochs, patience = (12, 2) if options.quick else (options.epochs, options.patience)
    torch.set_num_threads(1)  # Images of 8x8 pixels: more threads would only wait for each other.

    train, val, test = load()
    with pl.random.seeded(options.seed):
        model = ResNet(classes=10)
    schedule = pl.schedules.cosine("1dur", peak=1e-2, warmup="0.1dur")
    stream = pl.fit(
        model,
        train,
        loss=cross_entropy,
        optimizer=pl.optim.adamw(lr=schedule, weight_decay=0.05),
        max_duration=f"{epochs}ep",
        seed=options.seed,
        evaluators={"val": val},
        algorithms=[
            augmentation,
            pl.algorithms.label_smoothing(0.1),
            ema(half_life="20ba"),
            early_stopping("val/loss", patience=patience, min_delta=2e-3),
        ],
    )
    raw, average, rates = [], [], []
    kept: dict[int, pl.State] = {}
    for event, state in pl.progress(stream):
        if event is Event.EPOCH_CHECKPOINT:
            epoch = state.timestamp.epoch
            kept[epoch] = averaged(state)
            raw.append((epoch, 1 - accuracy(state, val)))
            average.append((epoch, 1 - float(state.metrics["val"]["accuracy"])))
            rates.append((epoch, schedule(state.previous_timestamp)))
    best = restored(state)
    epoch = epoch - int(state.algorithm_state["early_stopping"]["since"]["evaluations"])
    same = not _compare.differences(dict(best.params), dict(kept[epoch].params))

    print(f"{sum(tensor.numel() for tensor in state.params.values()):,} parameters, {len(train.dataset)} images")
    print(f"ended after epoch {state.timestamp.epoch} of {epochs}; the best average is that of epoch {epoch}\n")
    print(f"{'weights':<24}val     test")
    for name, shown in {
        "the last": state,
        "the average of the last": averaged(state),
        "the best average": best,
    }.items():
        print(f"{name:<24}{accuracy(shown, val):.1%}   {accuracy(shown, test):.1%}")
    print(f"\nthe restored weights {'are' if same else 'ARE NOT'} the average of epoch {epoch}, bit for bit")

    originals = val[0][0][:7]
    tries = [augmented(originals, pl.random.generator(options.seed, "shown", number)) for number in range(6)]
    columns = [column.squeeze(1).numpy() for column in (originals, *tries)]
    _job_pictures.images(options.output, raw, average, rates, epoch, columns)
    print(f"picture: {options.output}")
    return 0 if same else 1


def accuracy(state: pl.State, data: Data) -> float:
    """With the weights of the State, whatever their average is."""
    return float(pl.run(pl.evaluate(state, {"data": data}, loss=cross_entropy)).metrics["data"]["accuracy"])


class ResNet(nn.Module):
    """Images of shape (n, 1, 8, 8) to scores of shape (n, classes)."""

    def __init__(self, classes: int, widths: Sequence[int] = (16, 32), depth: int = 2, drop_path: float = 0.1) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]))
        stages: list[nn.Module] = []
        for before, width in zip((widths[0], *widths), widths, strict=False):
            if before != width:
                stages += [nn.Conv2d(before, width, 2, stride=2, bias=False), nn.BatchNorm2d(width)]
            stages += [Block(width, drop_path) for _ in range(depth)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.stages(self.stem(images).relu()))
        return scores


class Block(nn.Module):
    """Two convolutions, added to what comes in: or not, at random (stochastic depth)."""

    def __init__(self, width: int, drop_path: float) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.branch = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.branch(x)
        if self.training:
            stays = torch.rand(len(x), 1, 1, 1, device=x.device) >= self.drop_path
            branch = branch * stays / (1 - self.drop_path)
        return (x + branch).relu()


def load() -> tuple[DataLoader[Any], Data, Data]:
    """Digits with noise: for training, validation and the test."""
    raw = load_digits()
    images, digits = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(raw.target)
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits), generator=random)
    images, digits = images[order], digits[order]
    images = images + 0.2 * torch.randn(images.shape, generator=random)
    parts = [(images[part], digits[part]) for part in (slice(600), slice(600, 1100), slice(1100, None))]
    return DataLoader(TensorDataset(*parts[0]), batch_size=50, shuffle=True), [parts[1]], [parts[2]]


if __name__ == "__main__":
    sys.exit(main())
