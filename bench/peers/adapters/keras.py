"""Keras (torch): ``fit``, ``BackupAndRestore``, ``gradient_accumulation_steps``."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from torch import Tensor

from bench.peers.legs import Leg, NotOfferedError, Params, Step, Way, batch_trained, hooks
from bench.peers.problem import (
    BATCH,
    IGNORED,
    LR,
    Network,
    loaders,
    record,
    step_batches,
    step_data,
    train_data,
    val_data,
)

__all__ = ["ADAPTER"]


class _Model(keras.Model):
    """The network, of Keras's own layers, with the same weights."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(16), keras.layers.Dense(3)
        self.dropout = keras.layers.Dropout(dropout)

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        hidden = self.dropout(keras.ops.tanh(self.first(inputs)), training=training)
        if training and hidden.device.type != "meta":
            record(inputs, hidden)
        return self.last(hidden)

    def params(self) -> Params:
        """In torch's order and layout; a variable is not in that of ``named_parameters``."""
        layers = {"first": self.first, "last": self.last}
        values = {f"{name}.weight": layer.kernel.value.detach().T for name, layer in layers.items()}
        values |= {f"{name}.bias": layer.bias.value.detach() for name, layer in layers.items()}
        return {name: values[name] for name, _ in Network().named_parameters()}


def _made(dropout: float = 0.3) -> _Model:
    network = Network()
    model = _Model(dropout)
    model(step_data(Step(False, False))[0])
    values = [network.first.weight.T, network.first.bias, network.last.weight.T, network.last.bias]
    model.set_weights([value.detach().numpy() for value in values])
    return model


class _Kill(keras.callbacks.Callback):
    def __init__(self, leg: Leg) -> None:
        super().__init__()
        self.leg, self.microbatches = leg, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.microbatches % self.leg.accumulate == 0:
            batch_trained(self.leg)
        self.microbatches += 1


class _Reads(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        sum(float(keras.ops.norm(value)) for value in self.model.trainable_variables)


def _logger() -> keras.callbacks.Callback:
    def logging(name: str) -> Any:
        return lambda *arguments, **keywords: hooks.append(name)

    hidden = ("on_batch_begin", "on_batch_end")  # other names of on_train_batch_begin and on_train_batch_end
    names = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_") and name not in hidden]
    return type("Logs", (keras.callbacks.Callback,), {name: logging(name) for name in names})()


class Keras:
    name = "Keras (torch)"
    packages = ("keras",)
    ways = (
        Way("arrays, shuffle=True"),
        Way("DataLoader", style="loader"),
        Way("DataLoader with a generator", generators=True, style="loader"),
    )
    step_ways = (
        Way("gradient_accumulation_steps"),
        Way("gradient_accumulation_steps, reduction='sum'", style="sum"),
    )

    def train(self, leg: Leg) -> Params:
        if isinstance(leg.evaluate, int):
            raise NotOfferedError("evaluation is once an epoch, or less often")
        keras.utils.set_random_seed(0)
        model = _made()
        steps = leg.accumulate if leg.accumulate > 1 else None
        model.compile(
            optimizer=keras.optimizers.AdamW(LR, gradient_accumulation_steps=steps),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        callbacks: list[Any] = []
        if leg.kill_after is not None or leg.resume:
            ended = leg.kill_after in (5, 10)
            frequency = "epoch" if ended else leg.kill_after or "epoch"
            callbacks.append(keras.callbacks.BackupAndRestore(leg.folder, save_freq=frequency))
        callbacks.append(_Kill(leg))
        if leg.observe:
            callbacks.append(_Reads())
        if leg.log:
            callbacks.append(_logger())
        data: dict[str, Any]
        if leg.style == "loader":
            train, val = loaders(leg)
            data = {"x": train, "validation_data": val if leg.evaluate else None}
        else:
            inputs, targets = (tensor.numpy() for tensor in train_data().tensors)
            held_out = tuple(tensor.numpy() for tensor in val_data().tensors)
            data = {"x": inputs, "y": targets, "batch_size": BATCH // leg.accumulate, "shuffle": True}
            data |= {"validation_data": held_out if leg.evaluate else None}
        model.fit(**data, epochs=leg.epochs, verbose=0, callbacks=callbacks)
        return model.params()

    def step(self, step: Step) -> Params:
        model = _made(0.0)
        batches = step_batches(step)
        model.compile(
            optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=len(batches) if step.split else None),
            loss=keras.losses.SparseCategoricalCrossentropy(
                from_logits=True,
                ignore_class=IGNORED if step.ignored else None,
                reduction=step.style or "sum_over_batch_size",
            ),
            jit_compile=False,
        )
        model.fit(batches, epochs=1, verbose=0)
        return model.params()


ADAPTER = Keras()
