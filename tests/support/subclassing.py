"""Tensors of other classes and layouts in every place of a training, tried in a process of its own.

Run as a module it reads cases from its standard input and answers each with a line of JSON, so that a crash of the
interpreter is the end of the output, and not of the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_map

__all__ = ["KINDS", "MODES", "PLACES", "Case", "Wrapped", "answers"]

Case = tuple[str, str, str]
"""A kind of tensor, its place, and a mode."""


class Wrapped(Tensor):
    """A tensor without a storage: its numbers are those of another one, and its own address is a null pointer."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner.detach()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Wrapped({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*tree_map(_inner, args), **tree_map(_inner, kwargs or {}))
        if function._schema.name.endswith("_") and isinstance(args[0], Wrapped):
            return args[0]
        return tree_map(lambda value: Wrapped(value) if isinstance(value, Tensor) else value, out)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Wrapped) else value


class _Wrap(torch.autograd.Function):
    """Makes a tensor Wrapped, in a graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return Wrapped(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _inner(gradient)


def _made_in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda tensor: tensor,
    "wrapper": lambda tensor: _Wrap.apply(tensor) if tensor.requires_grad else Wrapped(tensor),  # type: ignore[no-untyped-call]
    "subclass": lambda tensor: tensor.as_subclass(type("Named", (Tensor,), {})),
    "parameter": lambda tensor: nn.Parameter(tensor) if tensor.is_leaf else tensor,
    "sparse": Tensor.to_sparse,
    "csr": lambda tensor: tensor.to_sparse_csr() if tensor.ndim == 2 else tensor,
    "mkldnn": Tensor.to_mkldnn,
    "quantised": lambda tensor: torch.quantize_per_tensor(tensor.detach(), 0.5, 0, torch.qint8),
    "meta": lambda tensor: tensor.to("meta"),
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor.detach()) if tensor.ndim else [tensor.detach()]),
    "inference": _made_in_inference_mode,
    "negated view": lambda tensor: torch._neg_view(-tensor),
    "conjugated": lambda tensor: tensor.to(torch.complex64).conj().real,
    "complex": lambda tensor: tensor.to(torch.complex64).conj(),
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape) if tensor.ndim else tensor,
}
PLACES = ("loss", "outputs", "parameter", "buffer", "inputs", "targets", "gradient", "optimizer's memory")
MODES: dict[str, dict[str, Any]] = {
    "auto": {},
    "donate": {"donate": True},
    "keep": {"donate": False},
    "watch": {"watch": ["batch_end"]},
    "strict": {"strict": True},
    "pieces": {"microbatch_size": 2},
    "skip": {"nonfinite": "skip"},
    "compile": {"compile": True},
}


class _Net(nn.Module):
    def __init__(self, change: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.layer.weight = nn.Parameter(change("parameter", self.layer.weight.detach()))
        self.register_buffer("scale", change("buffer", torch.full((2,), 1.5)))
        self._change = change

    def forward(self, inputs: Tensor) -> Tensor:
        scale: Any = self.scale
        return self._change("outputs", self.layer(inputs) * _dense(scale))


def _dense(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided and not tensor.is_nested else tensor.to_dense()


def _problem(kind: str, place: str) -> tuple[nn.Module, list[Any], Callable[[Tensor, Tensor], Tensor]]:
    def change(where: str, tensor: Tensor) -> Tensor:
        return KINDS[kind](tensor) if where == place else tensor

    torch.manual_seed(0)
    data = [(change("inputs", torch.randn(4, 3)), change("targets", torch.randn(4, 2))) for _ in range(3)]
    return _Net(change), data, lambda y, t: change("loss", functional.mse_loss(_dense(y), t))


def _by_hand(kind: str, place: str) -> list[Tensor]:
    model, data, loss = _problem(kind, place)
    steps = torch.optim.AdamW(model.parameters(), lr=0.1)
    for inputs, targets in data:
        steps.zero_grad()
        loss(model(inputs), targets).backward()
        steps.step()
    return list(model.parameters())


def _by_loop(kind: str, place: str, mode: str) -> list[Tensor]:
    import pure_loop as pl
    from pure_loop.compile import interpreted

    def changed(memory: Any) -> Any:
        if isinstance(memory, pl.FrozenDict):
            return pl.FrozenDict((name, changed(value)) for name, value in memory.items())
        return KINDS[kind](memory) if isinstance(memory, Tensor) else memory

    model, data, loss = _problem(kind, place)
    changes = {
        "gradient": {pl.Event.AFTER_TRAIN_BATCH: lambda state: state.replace(grads=dict(changed(state.grads)))},
        "optimizer's memory": {pl.Event.FIT_START: lambda state: state.replace(opt_state=changed(state.opt_state))},
    }
    algorithms = [pl.Algorithm("changing", changes[place])] if place in changes else []  # type: ignore[arg-type]
    settings: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.1), "max_duration": "1ep", **MODES[mode]}
    with interpreted():
        state = pl.run(pl.fit(model, data, loss=loss, algorithms=algorithms, **settings))
    return list(state.params.values())


def _answer(kind: str, place: str, mode: str) -> str:
    """``same``, ``different``, ``refused: ...`` by an error of the library's, or ``raised: ...`` by another one.

    ``by hand: ...`` says that the loop by hand raises, too.
    """
    from pure_loop.errors import PureLoopError

    wanted: Any = None
    try:
        # A gradient or a memory is changed by an algorithm: the loop by hand is that without a change.
        wanted = _by_hand("plain" if place in ("gradient", "optimizer's memory") else kind, place)
    except Exception as error:
        wanted = error
    try:
        found = _by_loop(kind, place, mode)
    except PureLoopError as error:
        return f"refused: {type(error).__name__}: {error}"
    except Exception as error:
        said = str(error).splitlines() or [""]
        return f"{'by hand' if isinstance(wanted, Exception) else 'raised'}: {type(error).__name__}: {said[0]}"
    if isinstance(wanted, Exception):
        return "trained"
    numbers = [(_dense(_inner(a)).detach(), _dense(_inner(b)).detach()) for a, b in zip(found, wanted, strict=True)]
    same = all(torch.allclose(a.as_subclass(Tensor), b.as_subclass(Tensor), atol=1e-6) for a, b in numbers)
    return "same" if same else "different"


def answers(cases: list[Case]) -> list[str]:
    """What came of each case, in another process; ``crashed`` where the interpreter did."""
    found: list[str] = []
    while len(found) < len(cases):
        command = [sys.executable, "-m", "tests.support.subclassing"]
        result = subprocess.run(command, input=json.dumps(cases[len(found) :]), stdout=subprocess.PIPE, text=True)
        found += map(json.loads, result.stdout.splitlines())
        found += ["crashed"] if result.returncode else []
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case in json.load(sys.stdin):
        print(json.dumps(_answer(*case)), flush=True)
