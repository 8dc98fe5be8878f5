"""User code that mypy and pyright accept under their strict settings, and that runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self, assert_type

import attrs
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.algorithms import ema, sam
from pure_loop.callbacks import SpeedMonitor
from pure_loop.loggers import InMemoryLogger
from pure_loop.metrics import accuracy, confusion_matrix, dice_loss, f1, loss, mean
from pure_loop.schedules import Schedule, cosine, linear
from pure_loop.typing import (
    EvaluatorsLike,
    FitOptions,
    LoggerGroup,
    LoopStages,
    Loss,
    MetricValue,
    PrecisionName,
    Profile,
    RangeTest,
    SettingsDifference,
    StateFields,
)

if TYPE_CHECKING:
    from typing import Unpack

DATA = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 3


# Schedules.
schedule = cosine("3ep", peak=3e-4, warmup="2ba")
assert_type(schedule, cosine)
assert_type(schedule(pl.Timestamp()), float)
halved: Schedule = 0.5 * linear(1.0, 0.0, "4ba")


# A function of one's own is one, too.
def inverse(timestamp: pl.Timestamp) -> float:
    return 1.0 / (timestamp.batch + 1)


optimizer = pl.optim.adamw(lr=cosine("3ep", peak=3e-4) * inverse)
assert_type(optimizer, pl.Optimizer)
assert_type(pl.optim.from_torch(torch.optim.Adagrad, lr=0.1), pl.Optimizer)


# Algorithms.
@pl.algorithm(pl.Event.AFTER_LOSS, when=pl.every("2ba"))
def halve(state: pl.State) -> pl.State:
    assert isinstance(state.loss, Tensor)
    return state.replace(loss=state.loss / 2)


@pl.algorithm("batch_end", init=lambda state: 0)
def count(state: pl.State, stages: LoopStages) -> pl.State:
    return state.remember("count", state.algorithm_state["count"] + 1)


assert_type(halve, pl.Algorithm)
assert_type(sam(rho=0.1), pl.Algorithm)
assert_type(ema(half_life="10ba"), pl.Algorithm)
assert_type(pl.errors.NonFiniteError("at batch 3").rows, tuple[int, ...])
explicit = pl.Algorithm("explicit", {pl.Event.BATCH_END: lambda state: state}, init=lambda state: None)


# A State with a field more.
@attrs.frozen(eq=False, kw_only=True)
class Counted(pl.State):
    steps: int = 0

    if TYPE_CHECKING:

        def replace(self, *, steps: int = ..., **fields: Unpack[StateFields]) -> Self: ...


def with_fields(state: pl.State, fields: StateFields) -> pl.State:
    return state.replace(**fields)


@pl.algorithm(pl.Event.BATCH_END)
def step(state: Counted) -> Counted:
    return state.replace(steps=state.steps + 1, stop=state.steps > 100)


counted = Counted.create(nn.Linear(4, 3), seed=3, loss_scale=None)
assert_type(counted, Counted)
assert_type(counted.replace(steps=2), Counted)


# Callbacks and loggers.
class Printer(pl.Callback):
    def epoch_end(self, state: pl.State, logger: LoggerGroup) -> None:
        logger.log_metrics({"epoch": state.timestamp.epoch}, state)


class Doubled(pl.Logger):
    def log_metrics(self, metrics: Mapping[str, object], state: pl.State) -> None:
        for name in metrics:
            print(name)


def watcher(event: pl.Event, state: pl.State) -> None:
    if event is pl.Event.FIT_END:
        print(state.timestamp.batch)


# Losses.
def two_losses(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    entropy = nn.functional.cross_entropy(outputs, targets)
    return {"total": entropy + outputs.square().mean(), "entropy": entropy}


def clip(grads: Mapping[str, Tensor | None], params: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
    return pl.gradients.clip_by_norm(grads, 1.0)


def train(module: nn.Module, evaluators: EvaluatorsLike, precision: PrecisionName = "fp32") -> pl.State:
    stream = pl.fit(
        module,
        DATA,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        max_duration="1ep",
        precision=precision,
        evaluators=evaluators,
        algorithms=[halve, count, sam(), explicit],
        callbacks=[SpeedMonitor(), Printer(), watcher],
        loggers=[InMemoryLogger(), Doubled()],
        clip_grad=clip,
        watch={pl.Event.BATCH_END, "fit_end"},
        donate="auto",
        compile=False,
        verify="100ba",
    )
    for event, state in stream:
        assert_type(event, pl.Event)
        assert_type(state, pl.State)
        if event is pl.Event.BATCH_END and isinstance(state.loss, Tensor):
            print(float(state.loss))
    return pl.run(pl.fit(module, DATA, loss=two_losses, optimizer=optimizer, max_duration="1ep", clip_grad=1.0))


recipe = pl.Recipe(DATA, loss=nn.functional.cross_entropy, optimizer=optimizer, max_duration="1ep", watch={"batch_end"})
assert_type(recipe.fit(nn.Linear(4, 3), max_duration="2ep"), pl.Stream)
assert_type(recipe.replace(train_dataloader=DATA, seed=3), pl.Recipe)
assert_type(recipe.run(nn.Linear(4, 3)), pl.State)
assert_type(recipe.evaluate(recipe.run(nn.Linear(4, 3)), {"val": DATA}, precision="fp32"), pl.Stream)
assert_type(recipe.predict(nn.Linear(4, 3), DATA, gradients=False), pl.Stream)
assert_type(recipe.lr_find(nn.Linear(4, 3), steps=10, highest=1e-5), RangeTest)
assert_type(recipe.profile(nn.Linear(4, 3), batches=None, warmup=0), Profile)
assert_type(recipe.optimizer, pl.Optimizer | None)
assert_type(recipe.evaluators, EvaluatorsLike)
assert_type(recipe == recipe.replace(seed=1), bool)
assert_type(pl.Recipe(DATA, optimizer=None, max_duration=None).replace(optimizer=None, max_duration=None), pl.Recipe)
assert_type(pl.diff(recipe, recipe.replace(seed=1)), SettingsDifference)
assert_type(bool(pl.diff(recipe.fit(nn.Linear(4, 3)), recipe.fit(nn.Linear(4, 3)))), bool)

options: FitOptions = {"optimizer": optimizer, "max_duration": "1ep", "loss": nn.functional.cross_entropy, "seed": 3}
pl.run(pl.fit(nn.Linear(4, 3), DATA, **options))
pl.explain(nn.Linear(4, 3), DATA, **options)
found: RangeTest = pl.lr_find(nn.Linear(4, 3), DATA, **options, steps=10, highest=1e-5)
assert_type(found.losses, tuple[float, ...])
profiled: Profile = pl.profile(pl.fit(nn.Linear(4, 3), DATA, **options), batches=None, warmup=0)
assert_type(profiled.by("kind"), dict[str, float])


def keep(trained: pl.State, folder: str) -> None:
    pl.export(trained, f"{folder}/model.safetensors", "safetensors")
    pl.export(trained, f"{folder}/model.onnx", format="onnx", sample=(DATA[0][0],), average="ema")
    assert_type(pl.report(folder), Path)
    pl.report(InMemoryLogger(), Path(folder, "report.html"))


class Net(nn.Linear):
    pass


def forward(net: Net, batch: dict[str, Tensor]) -> Tensor:
    output: Tensor = net(batch["x"])
    return output


task = pl.Task(
    forward=forward, loss=lambda outputs, batch: outputs.square().mean(), samples=lambda batch: len(batch["x"])
)


def distance(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return outputs.sum(1) - batch[1]


evaluator = pl.Evaluator(DATA, metrics=[loss(), accuracy(), mean(distance, "distance")], interval="1ep")
state = train(nn.Linear(4, 3), {"val": evaluator, "test": DATA})
state = pl.run(pl.evaluate(state, {"val": evaluator}, loss=nn.functional.cross_entropy))
by_class = f1(average=None, name="f1").on(outputs=lambda outputs: outputs["scores"], targets=lambda batch: batch["y"])
pl.Evaluator(DATA, metrics={"f1": by_class, "matrix": confusion_matrix(3, normalize="true")}, loss=dice_loss)
measured: FitOptions = {
    "loss": nn.functional.cross_entropy,
    "optimizer": pl.optim.sgd(lr=0.1),
    "max_duration": "1ep",
    "train_metrics": [accuracy(), loss("mean_loss")],
}
assert_type(pl.run(pl.fit(nn.Linear(4, 3), DATA, **measured)).metrics["train"]["accuracy"], MetricValue)

# The fields of a State.
assert_type(state.params["weight"], Tensor)
assert_type(state.metrics["val"]["accuracy"], MetricValue)
assert_type(state.loss, Loss | None)
assert_type(state.grads, pl.FrozenDict[str, Tensor | None] | None)
assert_type(state.grad_norm, Tensor | None)
assert_type(state.skipped, Tensor | None)
assert_type(state.event, pl.Event | None)
assert_type(state.timestamp.replace(batch=3), pl.Timestamp)
print(f"{float(state.metrics['val']['accuracy']):.2f}")
nn.Linear(4, 3).load_state_dict(state.params)
torch.func.functional_call(state.module(), state.params, DATA[0][0])
changed = state.replace(params=state.params | {"bias": torch.zeros(3)}, metrics={"val": {"accuracy": 0.5}})
assert_type(changed, pl.State)
for _, predicted in pl.predict(state, DATA, watch=[pl.Event.PREDICT_BATCH_END]):
    print(predicted.outputs.shape)  # as the module gives it
