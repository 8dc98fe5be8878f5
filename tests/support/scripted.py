"""Optimizers for ``from_torch`` that keep any kind of value, in any place, from any step on."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

PLACES = ("group", "state", "shared", "attribute")


def _nested(old: Any, step: int) -> dict[str, Any]:
    old = old or {"inner": {"average": torch.zeros(2)}, "count": 0}
    old["inner"]["average"].mul_(0.5).add_(step)
    return {**old, "count": old["count"] + 1, f"of step {step}": torch.tensor(step)}


# What each kind of value becomes in a step.
KINDS: dict[str, Any] = {
    "int": lambda old, step: (old or 0) + step,
    "nan": lambda old, step: float("nan") if step % 2 else step * 1.0,
    "bool": lambda old, step: not old,
    "none or number": lambda old, step: None if old else step + 1,
    "text": lambda old, step: (old or "") + "x",
    "tuple": lambda old, step: (*(old or ()), step),
    "number": lambda old, step: np.float64(0.5 if old is None else old + step),
    "array": lambda old, step: np.ones(2) if old is None else old + step,
    "complex": lambda old, step: (old or 1j) + step,
    "tensor in place": lambda old, step: torch.ones(3) if old is None else old.mul_(0.9).add_(step),
    "integer tensor": lambda old, step: torch.tensor([1]) if old is None else old.add_(1),
    "growing tensor": lambda old, step: torch.cat([torch.zeros(0) if old is None else old, torch.ones(1) * step]),
    "changing dtype": lambda old, step: torch.ones(2, dtype=(torch.float64, torch.bfloat16)[step % 2]) * step,
    "transposed tensor": lambda old, step: torch.arange(6.0).view(2, 3).t().add(step),
    "list": lambda old, step: [*(old or [])[-3:], torch.full((2,), float(step))],
    "dict": _nested,
    "ordered dict": lambda old, step: OrderedDict(b=step, a=torch.ones(1) * step),
    "deque": lambda old, step: deque([*(old or ()), torch.tensor(float(step))], maxlen=2),
    "set": lambda old, step: {*(old or ()), step},
}


def number(value: Any) -> float:
    """A number that depends on all of a value."""
    if value is None or isinstance(value, str):
        return float(len(value or ""))
    if isinstance(value, complex):
        return value.real + 2 * value.imag
    if isinstance(value, bool | int | float):
        return 0.25 if value != value else float(value)
    if isinstance(value, Tensor | np.ndarray):
        return float(value.sum()) + 2 * len(value.reshape(-1))
    leaves = value if isinstance(value, set) else optree.tree_leaves(value, none_is_leaf=True)
    return sum(number(each) * (1 + i) for i, each in enumerate(leaves))


class Scripted(torch.optim.Optimizer):
    """Descends by the gradient times a number that depends on everything that it keeps.

    After the second step its group and itself have less than they were made with.

    Args:
        script: ``(first step, last step, place, kind)`` for each value that it keeps. The last step removes it.
        draws: whether it draws from the global generators of torch, NumPy and Python.
        alias: whether one tensor stands in the state of each parameter and in the group, and is written in place.
    """

    def __init__(self, params: Any, lr: float = 0.1, script: Any = (), draws: bool = False, alias: bool = False):
        super().__init__(params, {"lr": lr, "fixed": (0.9, 0.99), "nothing": None, "foreach": False, "warm": 3.0})
        self.script, self.draws, self.alias, self.calls, self.warm = script, draws, alias, 0, [1.0]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        group = self.param_groups[0]
        total = group.get("warm", 1.0) * getattr(self, "warm", [0.5])[0]
        if self.alias:
            common = group.setdefault("common", torch.zeros(2))
            common.add_(self.calls)
        for param in [each for each in group["params"] if each.grad is not None]:
            state = self.state[param]
            if self.alias:
                state.setdefault("common", common).mul_(1.25)
            for index, (first, last, place, kind) in enumerate(self.script):
                home: Any = {"group": group, "state": state, "attribute": vars(self)}.get(place)
                home = self.state.setdefault("shared", {}) if home is None else home
                key = f"{place}_{index}"
                if first <= self.calls <= last:
                    home[key] = KINDS[kind](home.get(key), self.calls)
                    total += number(home[key])
                else:
                    home.pop(key, None)
            if self.alias:
                total += float(group["common"].sum() + state["common"].sum())
            if self.draws:
                total += float(torch.rand(())) + random.random() + float(np.random.rand())
            param.add_(param.grad, alpha=-group["lr"] * (1.0 + float(np.tanh(0.01 * total))))
        if self.calls == 2:
            del group["warm"], self.warm


class Grows(torch.optim.Optimizer):
    """As most third-party optimizers do: its group counts steps from the first one on, and changes a number."""

    def __init__(self, params: Any, lr: float = 0.1, d: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "d": d})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["d"] *= 1.1
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                    average.lerp_(param.grad, 1 - group["betas"][0])
                    param.add_(average, alpha=-group["lr"] * group["d"] / (1 - group["betas"][0] ** group["step"]))


class Holds(torch.optim.Optimizer):
    """Keeps in its state what ``make(param)`` gives."""

    def __init__(self, params: Any, make: Any, place: str = "state") -> None:
        super().__init__(params, {"lr": 0.1})
        self.make, self.place = make, place

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            home: Any = {"state": self.state[param], "group": self.param_groups[0], "attribute": vars(self)}[self.place]
            home["kept"] = self.make(param)
