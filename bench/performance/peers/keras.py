"""Keras (torch): ``fit`` of a Keras model. Its optimizer is its own; it has no fused one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch

from bench.performance.peers import UnmeasurableError
from bench.performance.workloads import Workload

__all__ = ["train"]

layers = keras.layers


def _mlp() -> Any:
    return keras.Sequential([keras.Input((64,)), layers.Dense(128, activation="relu"), layers.Dense(10)])


def _many_tensors() -> Any:
    x = given = keras.Input((64,))
    x = layers.Dense(32)(x)
    for _ in range(48):
        x = x + layers.Dense(32)(layers.Dense(32, activation="relu")(layers.LayerNormalization()(x)))
    return keras.Model(given, layers.Dense(10)(x))


def _convolutions() -> Any:
    def block(width: int, stride: int) -> list[Any]:
        convolution = layers.Conv2D(width, 3, strides=stride, padding="same", data_format="channels_first")
        return [convolution, layers.BatchNormalization(axis=1), layers.ReLU()]

    head = [layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)]
    return keras.Sequential([keras.Input((1, 8, 8)), *block(32, 1), *block(64, 2), *head])


def _resnet() -> Any:
    def convolved(x: Any, width: int, size: int, stride: int) -> Any:
        options = {"padding": "same", "use_bias": False, "data_format": "channels_first"}
        return layers.BatchNormalization(axis=1)(layers.Conv2D(width, size, strides=stride, **options)(x))

    given = keras.Input((3, 32, 32))
    x = layers.ReLU()(convolved(given, 16, 3, 1))
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        y = convolved(layers.ReLU()(convolved(x, width, 3, stride)), width, 3, 1)
        x = layers.ReLU()(y + (x if stride == 1 else convolved(x, width, 1, stride)))
    x = layers.GlobalAveragePooling2D(data_format="channels_first")(x)
    return keras.Model(given, layers.Dense(10)(x))


class _Positions(layers.Layer):
    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:])

    def call(self, x: Any) -> Any:
        return x + self.table


def _gpt(vocabulary: int = 256, width: int = 128, depth: int = 4, length: int = 128) -> Any:
    given = keras.Input((length,), dtype="int64")
    x = _Positions()(layers.Embedding(vocabulary, width)(given))
    for _ in range(depth):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization(epsilon=1e-5)(x))
        x = x + layers.Dense(width)(y)
    return keras.Model(given, layers.Dense(vocabulary)(x))


MODELS = {
    "W1": _mlp,
    "W1a4": _mlp,
    "W2": _convolutions,
    "W3": _gpt,
    "W4": _many_tensors,
    "W5": _resnet,
}


class _Tick(keras.callbacks.Callback):
    def __init__(self, tick: Callable[[], None], count: int) -> None:
        super().__init__()
        self.tick, self.count = tick, count

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (batch + 1) % self.count == 0:
            self.tick()


def train(workload: Workload, tick: Callable[[], None]) -> None:
    if workload.name not in MODELS:
        raise UnmeasurableError(f"no {workload.name} was written for Keras")
    torch.manual_seed(0)
    count = workload.microbatches
    model = MODELS[workload.name]()
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3, gradient_accumulation_steps=None if count == 1 else count),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    batches = [(np.asarray(x), np.asarray(y)) for x, y in workload.micro_data()]

    def endless() -> Iterator[Any]:
        while True:
            yield from batches

    model.fit(endless(), epochs=1, steps_per_epoch=10**9, verbose=0, callbacks=[_Tick(tick, count)])
