"""JAX: flax.linen models and optax's AdamW; a jitted step, and eight steps in one ``lax.scan``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

# One thread, as all loops here have; read when the backend starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.performance.peers import UnmeasurableError
from bench.performance.turns import Steps
from bench.performance.workloads import Workload

__all__ = ["scanned", "steps"]

# A step that is still running when its turn ends would be counted in the turn of another loop.
jax.config.update("jax_cpu_enable_async_dispatch", False)

SCANNED = 8


class _MLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


class _ManyTensors(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(32)(x)
        for _ in range(48):
            x = x + nn.Dense(32)(nn.relu(nn.Dense(32)(nn.LayerNorm(epsilon=1e-5)(x))))
        return nn.Dense(10)(x)


class _Convolutions(nn.Module):
    """The layout of its pixels is flax's, which is the one that XLA likes."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for width, stride in ((32, 1), (64, 2)):
            x = nn.Conv(width, (3, 3), strides=stride)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


class _Residual(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def conv(width: int, size: int, stride: int, y: Any) -> Any:
            y = nn.Conv(width, (size, size), strides=stride, use_bias=False)(y)
            return nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5)(y)

        y = nn.relu(conv(self.width, 3, self.stride, x))
        y = conv(self.width, 3, 1, y)
        return nn.relu(y + (x if self.stride == 1 else conv(self.width, 1, self.stride, x)))


class _ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5)(x))
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            x = _Residual(width, stride)(x)
        return nn.Dense(10)(x.mean((1, 2)))


class _GPT(nn.Module):
    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    length: int = 128

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        n, length = ids.shape
        x = nn.Embed(self.vocabulary, self.width)(ids) + nn.Embed(self.length, self.width)(jnp.arange(length))
        for _ in range(self.layers):
            parts = nn.Dense(3 * self.width)(nn.LayerNorm(epsilon=1e-5)(x)).reshape(n, length, 3, 4, -1)
            mixed = jax.nn.dot_product_attention(parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], is_causal=True)
            x = x + nn.Dense(self.width)(mixed.reshape(n, length, -1))
            y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm(epsilon=1e-5)(x)), approximate=False)
            x = x + nn.Dense(self.width)(y)
        return nn.Dense(self.vocabulary)(x)


MODELS = {"W1": _MLP, "W1a4": _MLP, "W2": _Convolutions, "W3": _GPT, "W4": _ManyTensors, "W5": _ResNet}


def _prepared(workload: Workload) -> tuple[Any, Any, Callable[..., Any]]:
    """The first variables and optimizer's state, the batches, and a step that is not compiled yet."""
    if workload.name not in MODELS:
        raise UnmeasurableError(f"no {workload.name} was written for flax")
    model, tx = MODELS[workload.name](), optax.adamw(1e-3, weight_decay=1e-2)
    batches = [(_pixels_last(x.numpy()), y.numpy()) for x, y in workload.data()]
    variables = model.init(jax.random.key(0), jnp.asarray(batches[0][0]))
    count = workload.microbatches

    def loss(params: Any, others: Any, inputs: Any, targets: Any) -> Any:
        outputs, others = model.apply({"params": params, **others}, inputs, mutable=list(others))
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean(), others

    def step(carry: Any, batch: Any) -> Any:
        params, others, memory = carry
        if count == 1:
            (value, others), grads = jax.value_and_grad(loss, has_aux=True)(params, others, *batch)
        else:
            value, grads = 0.0, jax.tree.map(jnp.zeros_like, params)
            for inputs, targets in zip(*(jnp.split(each, count) for each in batch), strict=True):
                (one, others), more = jax.value_and_grad(loss, has_aux=True)(params, others, inputs, targets)
                value, grads = value + one / count, jax.tree.map(lambda a, b: a + b / count, grads, more)
        updates, memory = tx.update(grads, memory, params)
        return (optax.apply_updates(params, updates), others, memory), value

    params = variables["params"]
    others = {name: value for name, value in variables.items() if name != "params"}
    return (params, others, tx.init(params)), batches, step


def _pixels_last(inputs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(inputs.transpose(0, 2, 3, 1)) if inputs.ndim == 4 else inputs


def steps(workload: Workload) -> Steps:
    carry, batches, step = _prepared(workload)
    compiled = jax.jit(step, donate_argnums=0)
    for batch in itertools.cycle([tuple(map(jnp.asarray, each)) for each in batches]):
        carry, _ = compiled(carry, batch)
        yield 1


def scanned(workload: Workload) -> Steps:
    if workload.name == "W5":
        raise UnmeasurableError("25 times the loop by hand: XLA's convolutions are slow inside a loop, on a CPU")
    carry, batches, step = _prepared(workload)
    compiled = jax.jit(lambda carry, stacked: jax.lax.scan(step, carry, stacked), donate_argnums=0)
    stacked = tuple(jnp.stack(each[:SCANNED]) for each in zip(*batches, strict=True))
    while True:
        carry, _ = compiled(carry, stacked)
        yield SCANNED
