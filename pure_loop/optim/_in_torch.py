"""How the state of an optimizer is written and read as that of a class of torch: what each rule declares of itself.

:mod:`pure_loop.optim.state_dicts` makes of it what ``torch.optim.Optimizer.state_dict`` gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim._rules import Rule
from pure_loop.optim.kernels import FUSED_DEVICES
from pure_loop.optim.optimizer import InTorch, Optimizer, OptState, Params, TorchGroup, options_in_step, rate_at
from pure_loop.time import Timestamp


def part_in_torch(optimizer: Optimizer) -> InTorch:
    """
    Raises:
        ArgumentError: no class of torch has the state of this optimizer.
    """
    if optimizer.in_torch is None:
        raise no_class(optimizer.name)
    return optimizer.in_torch


def no_class(name: str) -> ArgumentError:
    """The refusal of an optimizer with a state that no class of torch has."""
    return ArgumentError(
        f"no class of torch.optim has the state of {name}, so it has no state dict of torch's. Its state is in "
        "state.opt_state, which pl.save writes."
    )


# Options of a group that don't change what is computed, or that each step sets anew.
_NOT_COMPARED = frozenset({"lr", "foreach", "fused", "capturable", "differentiable"})


def refuse_other_options(
    where: str, options: Mapping[str, Any], written: Mapping[str, Any], skip: Iterable[str]
) -> None:
    """
    Args:
        where: the optimizer, for the error.
        options: those of this optimizer.
        written: those of a group of a state dict.
        skip: which options differ from step to step.

    Raises:
        ArgumentError: an option has another value.
    """
    for key, value in options.items():
        if key in _NOT_COMPARED or key in skip or key not in written or _plain(written[key]) == _plain(value):
            continue
        raise ArgumentError(
            f"the state dict was made with {key}={written[key]!r}, and {where} has {key}={value!r}: load it with an "
            "optimizer that has the same options. fit may be given other ones then."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


@attrs.frozen
class RuleInTorch(ABC):
    """What the rules of this library have in common."""

    rule: Rule

    @abstractmethod
    def cls(self) -> type[torch.optim.Optimizer]: ...

    @abstractmethod
    def write(self, opt_state: OptState, params: Params, timestamp: Timestamp) -> list[TorchGroup]: ...

    @abstractmethod
    def read(self, groups: Sequence[TorchGroup], params: Params) -> OptState: ...

    def names(self, params: Params) -> list[list[str]]:
        return [list(params)]

    def built(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a group of the class, with all that it adds.

        Raises:
            ArgumentError: the class has no such weight decay.
        """
        cls, options = self.cls(), dict(options)
        if options.pop("independent_decay", False) and self.rule.options["weight_decay"] != 0:
            raise ArgumentError(
                f"{self.rule.name}(independent_decay=True) has no counterpart in torch.optim.{cls.__name__}, whose "
                f"weight decay is multiplied by the learning rate. The optimizer state is the same without it: write "
                f"{self.rule.name}(...) without independent_decay here, and pass fit the one that has it."
            )
        group = cls([torch.zeros(1, 1)], **options).param_groups[0]
        return {key: value for key, value in group.items() if key != "params"}

    def options_at(self, timestamp: Timestamp) -> dict[str, Any]:
        options = options_in_step(self.rule.options, timestamp)
        return self.built({**options, "lr": rate_at(self.rule.name, self.rule.lr, timestamp)})

    def refuse_other_options(self, group: TorchGroup) -> None:
        scheduled = {key for key, value in self.rule.options.items() if _is_scheduled(value)}
        fixed = {key: value for key, value in self.rule.options.items() if key not in scheduled}
        where = f"pl.optim.{self.rule.name}"
        # Composer's classes have it, and those of torch have not.
        independent = group.options.get("independent_decay") and "weight_decay" in self.rule.options
        if independent and not fixed.pop("independent_decay", False) and self.rule.options["weight_decay"] != 0:
            raise ArgumentError(
                "the state dict was made with a weight decay that isn't multiplied by the learning rate, and that of "
                f"{where} is: write {where}(..., independent_decay=True)."
            )
        refuse_other_options(where, self.built(fixed), group.options, scheduled)

    def memory(self, group: TorchGroup, params: Params, keys: Sequence[str], *, counts: bool) -> dict[str, Any]:
        """For each key a mapping of tensors by parameter; None where there was no step."""
        wanted = {*keys, "step"} if counts else set(keys)
        for name, memory in group.memory.items():
            if memory and memory.keys() != wanted:
                raise ResumeError(
                    f"the state dict holds {sorted(memory)} for parameter {name!r}, and pl.optim.{self.rule.name} with "
                    f"these options needs {sorted(wanted)}: it is of another class than "
                    f"{self.cls().__name__}, or was made with other options. Load it with the optimizer that made it, "
                    "or with pl.optim.from_torch(cls, ...)."
                )
        result: dict[str, Any] = {}
        for key in keys:
            held = {name: group.memory[name].get(key) for name in params}
            result[key] = {name: _like(value, params[name], name, key) for name, value in held.items()}
        return result


def _is_scheduled(value: Any) -> bool:
    return any(map(callable, value)) if isinstance(value, tuple) else callable(value)


def _like(value: Any, param: Tensor, name: str, key: str) -> Tensor | None:
    """A tensor of a state dict where its parameter is, and as it lies in memory."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.shape != param.shape or value.dtype != param.dtype:
        description = (
            f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        )
        raise ResumeError(
            f"the state dict holds {description} as {key} of parameter {name!r}, which is {tuple(param.shape)} "
            f"{param.dtype}: it is another model's, or lists its parameters in another order. Name them, "
            "state_dict['param_groups'][0]['param_names'] = [...], as torch.optim does that is given "
            "model.named_parameters()."
        )
    return torch.empty_like(param, requires_grad=False).copy_(value)


def _count(value: Any, name: str) -> int:
    """The number of steps that a state dict has for a parameter, a number or a tensor of one.

    Raises:
        ResumeError: it is no count.
    """
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(number, int | float) or isinstance(number, bool) or not (number >= 0 and number % 1 == 0):
        raise ResumeError(
            f"the state dict holds {value!r:.80} as step of parameter {name!r}, which is no count of steps: it was not "
            "written by the optimizer, or was damaged. Take its state_dict() again."
        )
    return int(number)


def _zeros(values: Mapping[str, Tensor | None], params: Params) -> FrozenDict[str, Tensor]:
    return FrozenDict(
        (name, torch.zeros_like(params[name], requires_grad=False) if value is None else value)
        for name, value in values.items()
    )


def _fused(params: Params) -> bool:
    """Whether torch's class takes these with ``fused=True``."""
    return all(param.is_floating_point() and param.device.type in FUSED_DEVICES for param in params.values())


@attrs.frozen
class AdamInTorch(RuleInTorch):
    """The state of ``adam`` and ``adamw``: torch counts steps for each parameter."""

    def cls(self) -> type[torch.optim.Optimizer]:
        return torch.optim.AdamW if self.rule.name == "adamw" else torch.optim.Adam

    def write(self, opt_state: OptState, params: Params, timestamp: Timestamp) -> list[TorchGroup]:
        fused = _fused(params)
        options = {**self.options_at(timestamp), "fused": True if fused else None}
        step = opt_state["step"]
        memory: dict[str, dict[str, Any]] = {}
        for name, param in params.items():
            count = step - opt_state["skipped"][name]
            memories = {key: opt_state[key][name] for key in self.rule.memories}
            # Where there was no step, the class makes its state in the first one.
            started = bool(count > 0)
            memory[name] = {"step": count.to(param.device if fused else "cpu"), **memories} if started else {}
        return [TorchGroup(options=options, memory=memory)]

    def read(self, groups: Sequence[TorchGroup], params: Params) -> OptState:
        (group,) = groups
        self.refuse_other_options(group)
        memories = self.memory(group, params, self.rule.memories, counts=True)
        steps = {name: _count(memory["step"], name) if memory else 0 for name, memory in group.memory.items()}
        most = max(steps.values(), default=0)
        device = next(iter(params.values())).device if params else None
        return FrozenDict(
            step=torch.full((), float(most), dtype=torch.float32, device=device),
            skipped=FrozenDict((name, most - steps[name]) for name in params),
            **{key: _zeros(values, params) for key, values in memories.items()},
        )


@attrs.frozen
class SGDInTorch(RuleInTorch):
    """The state of ``sgd``: with dampening the first step of a parameter is another one."""

    def cls(self) -> type[torch.optim.Optimizer]:
        return torch.optim.SGD

    def write(self, opt_state: OptState, params: Params, timestamp: Timestamp) -> list[TorchGroup]:
        started = opt_state.get("started") or dict.fromkeys(params, bool(self.rule.memories))
        memory = {
            name: {"momentum_buffer": opt_state["momentum_buffer"][name]} if started[name] else {} for name in params
        }
        # As the rule computes; torch's fused kernel also takes no mixture of parameters with and without a buffer.
        half = any(param.is_cpu and param.dtype in (torch.bfloat16, torch.float16) for param in params.values())
        fused = _fused(params) and not half and len(set(started.values())) < 2
        options = {**self.options_at(timestamp), "fused": True if fused else None, "foreach": None if fused else True}
        return [TorchGroup(options=options, memory=memory)]

    def read(self, groups: Sequence[TorchGroup], params: Params) -> OptState:
        (group,) = groups
        self.refuse_other_options(group)
        # Older versions of the class keep None where there is no momentum.
        held = {
            name: {key: value for key, value in memory.items() if value is not None}
            for name, memory in group.memory.items()
        }
        group = attrs.evolve(group, memory=held)
        buffers = self.memory(group, params, self.rule.memories, counts=False)
        result: dict[str, Any] = {key: _zeros(values, params) for key, values in buffers.items()}
        if self.rule.memories and self.rule.options["dampening"]:
            result["started"] = FrozenDict((name, bool(held[name])) for name in params)
        return FrozenDict(result)


@attrs.frozen
class MuonInTorch(RuleInTorch):
    """The state of ``muon``."""

    def cls(self) -> type[torch.optim.Optimizer]:
        return torch.optim.Muon

    def built(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return super().built({{"adjust_lr": "adjust_lr_fn"}.get(key, key): value for key, value in options.items()})

    def write(self, opt_state: OptState, params: Params, timestamp: Timestamp) -> list[TorchGroup]:
        memory = {name: {"momentum_buffer": opt_state["momentum_buffer"][name]} for name in params}
        return [TorchGroup(options=self.options_at(timestamp), memory=memory)]

    def read(self, groups: Sequence[TorchGroup], params: Params) -> OptState:
        (group,) = groups
        ratio = group.options.get("adjust_lr_fn") or "original"  # which is torch's word for None
        group = attrs.evolve(group, options={**group.options, "adjust_lr_fn": ratio})
        self.refuse_other_options(group)
        memories = self.memory(group, params, ("momentum_buffer",), counts=False)
        return FrozenDict({key: _zeros(values, params) for key, values in memories.items()})
