"""User code with mistakes. A comment names the error of mypy and the rule of pyright that find the line."""

# pyright: basic

from __future__ import annotations

import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.algorithms import sam
from pure_loop.schedules import cosine

DATA = [(torch.randn(8, 4), torch.randint(3, (8,)))]
MODEL = nn.Linear(4, 3)
CROSS_ENTROPY = nn.functional.cross_entropy
SGD = pl.optim.sgd(lr=0.1)


def state_and_time(state: pl.State, timestamp: pl.Timestamp) -> None:
    state.replace(los=None)  # error: call-arg, reportCallIssue
    state.replace(loss=2)  # error: arg-type, reportArgumentType
    state.replace(timestamp="1ep")  # error: arg-type, reportArgumentType
    timestamp.replace(batches=3)  # error: call-arg, reportCallIssue
    timestamp.replace(batch="3")  # error: arg-type, reportArgumentType
    state.params["weight"] = torch.ones(3, 4)  # error: misc, reportIndexIssue
    state.params.pop("weight")  # error: misc, reportOptionalCall
    state["loss"]  # error: index, reportIndexIssue
    for _ in state:  # error: attr-defined, reportGeneralTypeIssues
        pass
    state.epoch  # error: attr-defined, reportAttributeAccessIssue
    state.loss.item()  # error: union-attr, reportAttributeAccessIssue, reportOptionalMemberAccess
    state.loss = None  # error: misc, reportAttributeAccessIssue
    state.metrics["val"].accuracy  # error: attr-defined, reportAttributeAccessIssue


def names() -> None:
    pl.Trainer  # error: attr-defined, reportAttributeAccessIssue
    pl.ArgumentError  # error: attr-defined, reportAttributeAccessIssue
    pl.schedules.cosin  # error: attr-defined, reportAttributeAccessIssue
    pl.optim.adamm(lr=0.1)  # error: attr-defined, reportAttributeAccessIssue
    pl.Event.BATCH_STOP  # error: attr-defined, reportAttributeAccessIssue


def settings() -> None:
    cosine("3ep", peek=3e-4)  # error: call-arg, reportCallIssue
    cosine(2.5)  # error: arg-type, reportArgumentType
    sam(rho="large")  # error: arg-type, reportArgumentType
    pl.optim.sgd(lr="0.1")  # error: arg-type, reportArgumentType
    pl.every(0.5)  # error: arg-type, reportArgumentType
    pl.Evaluator(DATA, metrics=[CROSS_ENTROPY])  # error: list-item, reportArgumentType
    pl.Evaluator(DATA, loss="cross_entropy")  # error: arg-type, reportArgumentType
    pl.metrics.f1(average="makro")  # error: arg-type, reportArgumentType


def calls() -> None:
    stream = pl.fit(
        MODEL,
        DATA,
        loss=3,  # error: arg-type, reportArgumentType
        optimizer=torch.optim.SGD(MODEL.parameters()),  # error: arg-type, reportArgumentType
        max_duration=2.5,  # error: arg-type, reportArgumentType
        precision="bf16",  # error: arg-type, reportArgumentType
        evaluators=3,  # error: arg-type, reportArgumentType
        callbacks=[print_loss],  # error: list-item, reportArgumentType
        nonfinite="ignore",  # error: arg-type, reportArgumentType
        watch=["batch_stop"],  # error: list-item, reportArgumentType
        donate="always",  # error: arg-type, reportArgumentType
        compile="maybe",  # error: arg-type, reportArgumentType
        order="2020",  # error: arg-type, reportArgumentType
        parallel="ddp",  # error: arg-type, reportArgumentType
    )
    stream.timestamp  # error: attr-defined, reportAttributeAccessIssue
    stream[0]  # error: index, reportIndexIssue
    pl.fit(MODEL, DATA, optimizer=SGD, max_duration="1ep", epochs=3)  # error: call-arg, reportCallIssue
    pl.fit(MODEL, DATA, optimizer=SGD)  # error: call-arg, reportCallIssue
    pl.explain(MODEL, DATA, optimizer=SGD, max_duration="1ep", epochs=3)  # error: call-arg, reportCallIssue
    pl.lr_find(MODEL, DATA, optimizer=SGD, max_duration="1ep", min_lr=1e-5)  # error: call-arg, reportCallIssue
    pl.profile(stream, steps=3)  # error: call-arg, reportCallIssue
    pl.profile(stream).by("kinds")  # error: arg-type, reportArgumentType
    pl.export(pl.State.create(MODEL), "model.onnx", "onxx")  # error: arg-type, reportArgumentType
    pl.evaluate(MODEL, DATA, precision="half")  # error: arg-type, reportArgumentType


def print_loss(state: pl.State) -> None:
    print(state.loss)


@pl.algorithm("batch_stop")  # error: arg-type, reportArgumentType
def misnamed(state: pl.State) -> pl.State:
    return state


@pl.algorithm(pl.Event.BATCH_END)  # error: type-var, reportArgumentType
def of_an_event(event: pl.Event) -> pl.Event:
    return event


@pl.algorithm(pl.Event.BATCH_END)  # error: misc, reportArgumentType
def returns_nothing(state: pl.State) -> None:
    print(state)


def two_losses(outputs: Tensor, targets: Tensor) -> list[Tensor]:
    return [outputs.mean(), targets.float().mean()]


RECIPE = pl.Recipe(DATA, optimizer=SGD, max_duration="1ep")
pl.Recipe(DATA, optimiser=SGD)  # error: call-arg, reportCallIssue
pl.Recipe(DATA, precision="bf16")  # error: arg-type, reportArgumentType
pl.Recipe(MODEL)  # error: arg-type, reportArgumentType
RECIPE.fit(MODEL, max_duraton="2ep")  # error: call-arg, reportCallIssue
RECIPE.fit(MODEL, seed="3")  # error: arg-type, reportArgumentType
RECIPE.lr_find(MODEL, low=1e-3)  # error: call-arg, reportCallIssue
RECIPE.evaluate(MODEL, max_duration="1ep")  # error: call-arg, reportCallIssue
RECIPE.replace(model=MODEL)  # error: call-arg, reportCallIssue
RECIPE.seed = 3  # error: misc, reportAttributeAccessIssue
pl.fit(MODEL, DATA, loss=two_losses, optimizer=SGD, max_duration="1ep")  # error: arg-type, reportArgumentType
