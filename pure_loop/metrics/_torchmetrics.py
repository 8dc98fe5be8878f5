"""A metric of torchmetrics as functions of its states: a copy that has states only while it updates and computes."""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from pure_loop.data.batch import tensors_in
from pure_loop.errors import ArgumentError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.kept import Kept, unholdable

# The tensors, and lists of tensors, of a metric and of the metrics in it, by the place of the metric and their name.
States: TypeAlias = dict[str, object]
Merge: TypeAlias = Callable[[Any, Any], object]


class Measure(Protocol):
    """What is called of a metric, or a collection, of torchmetrics."""

    def update(self, *arguments: object) -> None: ...
    def compute(self) -> object: ...
    def reset(self) -> None: ...
    def to(self, device: torch.device) -> object: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...


# Of each attribute or buffer that is a tensor which one, by the places of modules and their names.
Clean: TypeAlias = dict[str, dict[str, tuple[int, int]]]


@attrs.frozen(eq=False)
class Own:
    """A copy of the metric, which has states only while it updates and computes.

    A metric keeps states that it declares (``add_state``), and others: numbers and tensors in plain attributes and
    buffers, also of metrics in it. Each call begins from what all of them were at first, and the states that it is
    given; what it leaves in them is the result.

    Attributes:
        metric: the copy.
        declared: the names of the states that each module in it declares, by its place.
        first: all other attributes and buffers, by the places of modules and their names.
        compared: the same, to be compared with.
    """

    metric: Measure
    declared: dict[str, tuple[str, ...]]
    first: dict[str, States]
    compared: dict[str, Kept]

    @classmethod
    def of(cls, metric: Measure) -> Own:
        own, kind = emptied(metric), sys.modules["torchmetrics"].Metric
        modules = dict(own.named_modules())
        declared = {
            place: tuple(vars(module)["_reductions"]) for place, module in modules.items() if isinstance(module, kind)
        }
        first = {place: _others(module, declared.get(place, ())) for place, module in own.named_modules()}
        copied = {place: {name: _copied(value) for name, value in values.items()} for place, values in first.items()}
        return cls(own, declared, copied, {place: Kept.of(values, ()) for place, values in first.items()})

    def updated(self, states: States, arguments: tuple[object, ...]) -> States:
        """The states after an update.

        Raises:
            ArgumentError: it keeps what no accumulator can hold.
        """
        device = next((tensor.device for tensor in tensors_in(arguments)), None)
        if device is not None:
            self.metric.to(device)
        clean = self._put(states)
        with torch.no_grad():
            self.metric.update(*arguments)
        result: States = {}
        for place, module in self._modules():
            names = self.declared.get(place, ())
            for name in names:
                value = getattr(module, name)
                result[_key(place, name)] = list(value) if isinstance(value, list) else value
            again = [
                name for name in vars(module).get("_defaults", ()) if name not in names and _key(place, name) in states
            ]
            if again:
                raise self.refusal(
                    f"update() declares the state {again[0]} again, which sets it back: declare it in __init__, or "
                    "note in an attribute that it is declared, self.is_ready = True."
                )
            undeclared = _others(module, names)
            # What differed once is carried from then on, whatever it is.
            carried = {name: value for name, value in undeclared.items() if _key(place, name) in states}
            for name, value in (carried | self._changed(place, module, clean, but=carried)).items():
                wrong = next(unholdable(value, _key(place, name), set()), None)
                if wrong is not None:
                    raise self.refusal(
                        f"{wrong[0]} {wrong[1]}, and changes in update(); what is kept from batch to batch has to be "
                        "tensors, numbers, texts, or dicts, lists, tuples, sets and deques of such. Declare it, "
                        "self.add_state(...), and put metrics in it into a torch.nn.ModuleList."
                    )
                result[_key(place, name)] = _copied(value)
        return result

    def computed(self, states: States) -> object:
        """The value.

        Raises:
            ArgumentError: computing it changes what later values depend on.
        """
        clean = self._put(states)
        value = self.metric.compute()
        for place, module in self._modules():
            changed = self._changed(place, module, clean)
            carried = {name: states[_key(place, name)] for name in changed if _key(place, name) in states}
            same = carried.keys() - Kept.of(carried, ()).changed({name: changed[name] for name in carried}, ())
            names = [_key(place, name) for name in changed if name not in same]
            if names:
                raise self.refusal(
                    f"compute() changes {', '.join(names)}, to be kept from one value to the next, and each "
                    "evaluation begins anew, so that would be lost. Measure the metric in it, and compare values at "
                    'EVAL_END: CheckpointSaver(keep_best=1, metric="val/accuracy") keeps the best one.'
                )
        return value

    def merged(self, a: States, b: States) -> States:
        """The states of two parts of the data.

        Raises:
            ArgumentError: one of them isn't declared, so that nothing says how.
        """
        if not a or not b:
            return a or b
        merges = self._merges()
        undeclared = [key for key in (*a, *b) if key not in merges]  # of which no trial was made
        if undeclared:
            raise self.refusal(
                f"{undeclared[0]} is not declared as a state, so that nothing says how those of several ranks are put "
                'together: self.add_state(..., dist_reduce_fx="sum").'
            )
        return {key: merges[key](value, b[key]) for key, value in a.items()}

    def are_mergeable(self, states: States) -> bool:
        """Whether it is known of all states how two of them are put together."""
        declared = [_key(place, name) for place, names in self.declared.items() for name in names]
        return self._merges().keys() >= {*declared, *states}

    def _merges(self) -> dict[str, Merge]:
        """How two states are put together, of those of which it is known."""
        result: dict[str, Merge] = {}
        for place, module in self._modules():
            for name in self.declared.get(place, ()):
                merge = _merge_of(vars(module)["_reductions"][name], vars(module)["_defaults"][name])
                if merge is not None:
                    result[_key(place, name)] = merge
            result[_key(place, _COUNT)] = _sum
        return result

    def _modules(self) -> list[tuple[str, nn.Module]]:
        return [(place, module) for place, module in self.metric.named_modules() if place in self.first]

    def _put(self, states: States) -> Clean:
        """Give the metric these states; returns which tensors its other attributes are."""
        self.metric.reset()
        clean: Clean = {}
        for place, module in self._modules():
            declared, first = self.declared.get(place, ()), self.first[place]
            for name in [name for name in _others(module, declared) if name not in first]:
                delattr(module, name)
            for declarations in filter(None, map(vars(module).get, ("_defaults", "_persistent", "_reductions"))):
                for name in declarations.keys() - set(declared):
                    del declarations[name]  # declared by an update
            buffers = dict(module.named_buffers(recurse=False))
            for name, value in first.items():
                copied = _copied(states.get(_key(place, name), value))
                setattr(module, name, copied.to(buffers[name].device) if name in buffers else copied)
            if states and _COUNT not in first and _COUNT in vars(module):
                vars(module)[_COUNT] = 1  # which torchmetrics reads to warn where there was none
            # It writes to its tensors, so it is given copies.
            for key, value in states.items():
                name = key.removeprefix(_key(place, ""))
                if key == _key(place, name) and name not in first and "." not in name:
                    declared_list = isinstance(value, list) and name in declared
                    setattr(module, name, copy.copy(value) if declared_list else _copied(value))
            clean[place] = {
                name: (id(value), _version(value))
                for name, value in _others(module, declared).items()
                if isinstance(value, Tensor) and _key(place, name) not in states
            }
        return clean

    def _changed(self, place: str, module: nn.Module, clean: Clean, but: Container[str] = ()) -> States:
        """The attributes and buffers that are not what they were at first."""
        undeclared = _others(module, self.declared.get(place, ()))
        written = clean[place]
        # Without comparing numbers of tensors to which nothing was written, for which a device would be waited for.
        suspects = {
            name: value
            for name, value in undeclared.items()
            if name not in but and not (name in written and written[name] == (id(value), _version(value)))
        }
        return {name: suspects[name] for name in self.compared[place].changed(suspects, ())}

    def refusal(self, reason: str) -> ArgumentError:
        return ArgumentError(f"from_torchmetrics({type(self.metric).__name__}): {reason}")


_COUNT = "_update_count"


def emptied(metric: Measure) -> Measure:
    """A copy of the metric without data, which nothing else has a part in."""
    own, package = copy.deepcopy(metric), sys.modules["torchmetrics"]
    own.reset()
    for module in own.modules():
        if isinstance(module, package.MetricCollection):
            # Metrics with states that are equal after the first update would share them from then on.
            vars(module).update(_enable_compute_groups=False, _groups_checked=False)
        elif isinstance(module, package.Metric):
            vars(module)["distributed_available_fn"] = _not_distributed  # ranks are merged by the engine
    return own


def _version(value: object) -> int:
    """How often a tensor was written to."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _key(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _others(module: nn.Module, declared: Iterable[str]) -> States:
    """The attributes and buffers of a module that it doesn't declare as states, but for those that all modules have."""
    hidden = machinery() | set(declared)
    if type(module).__module__.partition(".")[0] != "torchmetrics":
        hidden -= {_COUNT}  # a class of the user's may read how many updates there were
    values = {name: value for name, value in vars(module).items() if name not in hidden}
    return values | dict(module.named_buffers(recurse=False))


@functools.cache
def machinery() -> frozenset[str]:
    package = sys.modules["torchmetrics"]
    own = {"nan_strategy", "sum_value", "state_name"}
    return frozenset({*vars(nn.Module()), *vars(package.SumMetric(nan_strategy="ignore"))} - own)


def _copied(value: Any) -> Any:
    """A value with other tensors and containers."""
    kind = type(value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if kind in (list, tuple, set, frozenset, deque):
        return kind(map(_copied, value))
    if kind in (dict, OrderedDict, FrozenDict):
        return kind((key, _copied(item)) for key, item in value.items())
    return value


def _not_distributed() -> bool:
    return False


def _merge_of(reduction: object, value: object) -> Merge | None:
    """How two of these states are put together; None: not known."""
    return _together if isinstance(value, list) else _MERGES.get(getattr(reduction, "__name__", ""))


def _together(a: Tensor | list[Tensor], b: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return torch.cat([a, b]) if isinstance(a, Tensor) and isinstance(b, Tensor) else [*a, *b]


def _sum(a: Tensor, b: Tensor) -> Tensor:
    return a + b


# By the name of the function that torchmetrics reduces states of ranks with.
_MERGES: dict[str, Merge] = {
    "dim_zero_sum": _sum,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": _together,
}
