"""JAX's ``vmap`` of a step: a script for any Python that has JAX, alone in its process.

    python -I bench/performance/peers/jax_members.py mlp 32

``-I``, because a module beside it is called ``jax``. It makes a step, and says how long that took; then for each line
of its input, a number of steps, it makes these and says what CPU time they took.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# One thread, as all loops here have; read when the backend starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
from jax import lax

jax.config.update("jax_cpu_enable_async_dispatch", False)

EPSILON = 1e-5


def _uniform(key: Any, fan_in: int, *shapes: tuple[int, ...]) -> list[Any]:
    bound = fan_in**-0.5
    keys = jax.random.split(key, len(shapes))
    return [
        jax.random.uniform(key, shape, minval=-bound, maxval=bound) for key, shape in zip(keys, shapes, strict=True)
    ]


def _dense(key: Any, before: int, width: int) -> list[Any]:
    return _uniform(key, before, (before, width), (width,))


def _mlp(key: Any) -> tuple[Any, Any]:
    first, second = jax.random.split(key)
    return [_dense(first, 64, 128), _dense(second, 128, 10)], []


def _apply_mlp(params: Any, buffers: Any, x: Any) -> tuple[Any, Any]:
    (weight, bias), (to_classes, offset) = params
    return jax.nn.relu(x @ weight + bias) @ to_classes + offset, buffers


def _small(key: Any) -> tuple[Any, Any]:
    """Pixels come last, as XLA likes them."""
    keys = jax.random.split(key, 3)
    first = _uniform(keys[0], 9, (3, 3, 1, 8), (8,))
    second = _uniform(keys[1], 9 * 8, (3, 3, 8, 16), (16,))
    return [first, second, _dense(keys[2], 256, 10)], []


def _apply_small(params: Any, buffers: Any, x: Any) -> tuple[Any, Any]:
    *convolutions, (weight, bias) = params
    for stride, convolution in zip((1, 2), convolutions, strict=True):
        x = jax.nn.relu(_convolved(x, convolution, stride))
    return x.reshape(len(x), -1) @ weight + bias, buffers


def _convolved(x: Any, params: Any, stride: int) -> Any:
    kernel, bias = params
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=layout) + bias


def _large(key: Any) -> tuple[Any, Any]:
    keys = jax.random.split(key, 4)
    first = _uniform(keys[0], 9, (3, 3, 1, 32), (32,))
    second = _uniform(keys[1], 9 * 32, (3, 3, 32, 64), (64,))
    norms = [[jnp.ones(width), jnp.zeros(width)] for width in (32, 64)]
    moments = [[jnp.zeros(width), jnp.ones(width)] for width in (32, 64)]
    return [first, second, *norms, _dense(keys[2], 64 * 16, 64), _dense(keys[3], 64, 10)], moments


def _apply_large(params: Any, buffers: Any, x: Any) -> tuple[Any, Any]:
    first, second, *norms, hidden, last = params
    following = []
    for convolution, stride, (scale, shift), (mean, variance) in zip(
        (first, second), (1, 2), norms, buffers, strict=True
    ):
        x = _convolved(x, convolution, stride)
        center, spread, samples = x.mean((0, 1, 2)), x.var((0, 1, 2)), x.size / x.shape[-1]
        following.append([0.9 * mean + 0.1 * center, 0.9 * variance + 0.1 * spread * samples / (samples - 1)])
        x = jax.nn.relu((x - center) * lax.rsqrt(spread + EPSILON) * scale + shift)
    x = jax.nn.relu(x.reshape(len(x), -1) @ hidden[0] + hidden[1])
    return x @ last[0] + last[1], following


# What makes the parameters and buffers, what applies them, and the shape of a batch.
MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...]]] = {
    "mlp": (_mlp, _apply_mlp, (32, 64)),
    "small": (_small, _apply_small, (32, 8, 8, 1)),
    "large": (_large, _apply_large, (64, 8, 8, 1)),
}


def _step(apply: Callable[..., Any], carry: Any, rate: Any, x: Any, y: Any) -> Any:
    """One step of one member: cross entropy, and AdamW as torch has it."""
    params, buffers, averages, squares, count = carry

    def loss(params: Any) -> Any:
        outputs, following = apply(params, buffers, x)
        return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1).mean(), following

    (value, buffers), grads = jax.value_and_grad(loss, has_aux=True)(params)
    count = count + 1
    averages = jax.tree.map(lambda old, grad: 0.9 * old + 0.1 * grad, averages, grads)
    squares = jax.tree.map(lambda old, grad: 0.999 * old + 0.001 * grad * grad, squares, grads)

    def updated(param: Any, average: Any, square: Any) -> Any:
        direction = average / (1 - 0.9**count) / (jnp.sqrt(square / (1 - 0.999**count)) + 1e-8)
        return param * (1 - rate * 0.01) - rate * direction

    params = jax.tree.map(updated, params, averages, squares)
    return (params, buffers, averages, squares, count), value


def main(model: str, members: int) -> None:
    make, apply, shape = MODELS[model]
    params, buffers = jax.vmap(make)(jax.random.split(jax.random.key(0), members))
    averages, squares = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    carry = (params, buffers, averages, squares, jnp.zeros(members))
    rates = 1e-3 * (1 + jnp.arange(members) / 8)
    keys = jax.random.split(jax.random.key(1), 8)
    batches = [(jax.random.normal(key, shape), jax.random.randint(key, shape[:1], 0, 10)) for key in keys]
    step = jax.jit(jax.vmap(partial(_step, apply), in_axes=(0, 0, None, None)), donate_argnums=0)
    data = itertools.cycle(batches)
    begin = time.perf_counter()
    carry, losses = step(carry, rates, *next(data))
    jax.block_until_ready(losses)
    print(jax.__version__, time.perf_counter() - begin, flush=True)
    for line in sys.stdin:
        start = time.process_time()
        for _ in range(int(line)):
            carry, losses = step(carry, rates, *next(data))
        jax.block_until_ready(carry)
        print(time.process_time() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
