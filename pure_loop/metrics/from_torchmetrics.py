"""Any metric of torchmetrics, with its state in the State and merged over ranks."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Annotated, Any, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop.data.batch import tensors_in
from pure_loop.errors import ArgumentError, ArgumentTypeError, MissingExtraError
from pure_loop.frozendict import FrozenDict
from pure_loop.metrics._base import Metric
from pure_loop.model.kept import Kept, unholdable
from pure_loop.random.seeds import seeded_all
from pure_loop.ranges import Name, checked

__all__ = ["from_torchmetrics"]

# The tensors, and lists of tensors, of a metric and of the metrics in it, by the place of the metric and their name.
States: TypeAlias = dict[str, Any]


@checked
def from_torchmetrics(
    metric: Any,
    *,
    outputs: Callable[[Any], Any] | None = None,
    targets: Callable[[Any], Any] | None = None,
    name: Annotated[str | None, Name()] = None,
) -> Metric:
    """A metric, or collection, of torchmetrics: ``metric.update(outputs, targets)`` for each microbatch.

    Its state is the accumulator, so it is a value as any other: the object that was passed stays as it was, and ranks
    are merged here and not by torchmetrics. That holds for what it declares (``add_state``), and for numbers, tensors
    and lists in plain attributes and buffers, also of metrics in it. A metric of which a state can't be merged (it is
    reduced by a mean or by a function of its own, or isn't declared) serves on one rank. Metrics of a collection are
    each updated (no ``compute_groups``).

    A value that is a mapping, such as that of a collection or of ``MeanAveragePrecision``, has several names in
    loggers.

    Args:
        metric: an instance, such as ``torchmetrics.classification.MulticlassAUROC(10)``.
        outputs: ``outputs -> predictions``, what ``update`` is called with first; None: the outputs as they are.
        targets: ``batch -> targets``, what comes second; None: the targets of a batch ``(inputs, targets)``. Where they
            are None ``update`` is called with the predictions alone.
        name: the metric's name; None: that of its class.

    Raises:
        ArgumentTypeError: ``metric`` is no instance of a metric of torchmetrics.
        ArgumentError: it keeps what no accumulator can hold: metrics in a plain list, an object, a value that it
            compares with the next one (``MinMaxMetric``), something outside of its attributes. A trial of two updates
            with random numbers shows it; where none fit the metric, the first updates and values do.
        MissingExtraError: torchmetrics is not installed: ``pip install 'pure_loop[torchmetrics]'``.

    >>> import torch, torchmetrics
    >>> metric = from_torchmetrics(torchmetrics.MeanSquaredError())
    >>> metric.compute(metric.update(metric.init(), torch.tensor([1.0, 3.0]), (None, torch.zeros(2))))
    tensor(5.)
    """
    for function, what in ((outputs, "outputs"), (targets, "targets")):
        if function is not None and not callable(function):
            raise ArgumentTypeError(f"from_torchmetrics: {what}={function!r} is not a function.")
    _refuse_others(metric)
    class_name = type(metric).__name__
    own = _Own.of(metric)

    def update(states: States, outputs_of_model: Any, batch: Any) -> States:
        predictions = outputs_of_model if outputs is None else outputs(outputs_of_model)
        right = batch[1] if targets is None else targets(batch)
        return own.updated(states, (predictions,) if right is None else (predictions, right))

    def compute(states: States) -> Any:
        return own.computed(states) if states else torch.tensor(float("nan"))  # there was no microbatch

    with seeded_all(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a trial on a few random numbers
        tried = _try(metric, own)
    return Metric(name or class_name, dict, update, compute, merge=own.merged if own.are_mergeable(tried) else None)


def _refuse_others(metric: Any) -> None:
    """
    Raises:
        ArgumentTypeError, MissingExtraError: it is no metric of torchmetrics, which may not be installed.
    """
    package = sys.modules.get("torchmetrics")
    if package is None:
        from importlib.util import find_spec

        if find_spec("torchmetrics") is None:
            raise MissingExtraError(
                "from_torchmetrics needs the package 'torchmetrics', which is not installed: "
                "pip install 'pure_loop[torchmetrics]'."
            )
    elif isinstance(metric, package.Metric | package.MetricCollection):
        return
    text = f"the class {metric.__name__}" if isinstance(metric, type) else f"{metric!r} of type {type(metric).__name__}"
    raise ArgumentTypeError(
        f"from_torchmetrics: metric is {text}; give an instance of a metric of torchmetrics, such as "
        "torchmetrics.classification.MulticlassAUROC(10)."
    )


# Of each attribute or buffer that is a tensor which one, by the places of modules and their names.
Clean: TypeAlias = dict[str, dict[str, tuple[int, int]]]


@attrs.frozen(eq=False)
class _Own:
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

    metric: Any
    declared: dict[str, tuple[str, ...]]
    first: dict[str, dict[str, Any]]
    compared: dict[str, Kept]

    @classmethod
    def of(cls, metric: Any) -> _Own:
        own, kind = _begun(metric), sys.modules["torchmetrics"].Metric
        modules = dict(own.named_modules())
        declared = {place: tuple(module._reductions) for place, module in modules.items() if isinstance(module, kind)}
        first = {place: _others(module, declared.get(place, ())) for place, module in own.named_modules()}
        copied = {place: {name: _copied(value) for name, value in values.items()} for place, values in first.items()}
        return cls(own, declared, copied, {place: Kept.of(values, ()) for place, values in first.items()})

    def updated(self, states: States, arguments: tuple[Any, ...]) -> States:
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

    def computed(self, states: States) -> Any:
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

    def _merges(self) -> dict[str, Callable[[Any, Any], Any]]:
        """How two states are put together, of those of which it is known."""
        result: dict[str, Callable[[Any, Any], Any]] = {}
        for place, module in self._modules():
            for name in self.declared.get(place, ()):
                merge = _merge_of(module._reductions[name], module._defaults[name])
                if merge is not None:
                    result[_key(place, name)] = merge
            result[_key(place, _COUNT)] = _sum
        return result

    def _modules(self) -> list[tuple[str, Any]]:
        return [(place, module) for place, module in self.metric.named_modules() if place in self.first]

    def _put(self, states: States) -> Clean:
        """Give the metric these states; returns which tensors its other attributes are."""
        self.metric.reset()
        clean: Clean = {}
        for place, module in self._modules():
            declared, first = self.declared.get(place, ()), self.first[place]
            for name in [name for name in _others(module, declared) if name not in first]:
                delattr(module, name)
            for states_of in (module.__dict__.get(name) for name in ("_defaults", "_persistent", "_reductions")):
                for name in [name for name in states_of or () if name not in declared]:
                    del states_of[name]  # declared by an update
            buffers = dict(module.named_buffers(recurse=False))
            for name, value in first.items():
                copied = _copied(states.get(_key(place, name), value))
                setattr(module, name, copied.to(buffers[name].device) if name in buffers else copied)
            if states and _COUNT not in first and _COUNT in vars(module):
                module._update_count = 1  # which torchmetrics reads to warn where there was none
            # It writes to its tensors, so it is given copies.
            for key in states if not place else [key for key in states if key.startswith(f"{place}.")]:
                name = key.removeprefix(f"{place}." if place else "")
                if name in first or "." in name:
                    continue
                value = states[key]
                setattr(
                    module, name, _copied(value) if name not in declared or not isinstance(value, list) else [*value]
                )
            clean[place] = {
                name: (id(value), _version(value))
                for name, value in _others(module, declared).items()
                if isinstance(value, Tensor) and _key(place, name) not in states
            }
        return clean

    def _changed(self, place: str, module: Any, clean: Clean, but: Container[str] = ()) -> dict[str, Any]:
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


def _begun(metric: Any) -> Any:
    """A copy of the metric without data, which nothing else has a part in."""
    own, package = copy.deepcopy(metric), sys.modules["torchmetrics"]
    own.reset()
    for module in own.modules():
        if isinstance(module, package.MetricCollection):
            # Metrics with states that are equal after the first update would share them from then on.
            module._enable_compute_groups = module._groups_checked = False
        elif isinstance(module, package.Metric):
            module.distributed_available_fn = _not_distributed  # ranks are merged by the engine
    return own


def _version(tensor: Tensor) -> int:
    """How often it was written to."""
    return 0 if tensor.is_inference() else tensor._version


def _key(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _others(module: Any, declared: Iterable[str]) -> dict[str, Any]:
    """The attributes and buffers of a module that it doesn't declare as states, but for those that all modules have."""
    machinery = _machinery()
    if type(module).__module__.partition(".")[0] != "torchmetrics":
        machinery -= {_COUNT}  # a class of the user's may read how many updates there were
    values = {name: value for name, value in vars(module).items() if name not in machinery and name not in declared}
    return values | dict(module.named_buffers(recurse=False))


@functools.cache
def _machinery() -> frozenset[str]:
    package = sys.modules["torchmetrics"]
    plain: Any = package.SumMetric(nan_strategy="ignore")
    own = {"nan_strategy", "sum_value", "state_name"}
    return frozenset({*vars(torch.nn.Module()), *vars(plain)} - own)


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


def _merge_of(reduction: Any, value: Any) -> Callable[[Any, Any], Any] | None:
    """How two of these states are put together; None: not known."""
    return _together if isinstance(value, list) else _MERGES.get(getattr(reduction, "__name__", ""))


def _together(a: Any, b: Any) -> Any:
    return [*a, *b] if isinstance(a, list) else torch.cat([a, b])


def _sum(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def _try(metric: Any, own: _Own) -> States:
    """Two updates and a value, twice, of numbers that the metric may be of; where none fit, batches will show it.

    Returns:
        The states; none if no numbers fit.

    Raises:
        ArgumentError: it keeps states where they can't be carried, or has another value than by itself.
    """
    for module in metric.modules():
        for name, value in vars(module).items():
            if name not in _machinery() and _has_metric(value):
                raise own.refusal(
                    f"it keeps metrics in the {type(value).__name__} self.{name}, where their states are not found: "
                    "use a torch.nn.ModuleList, or a ModuleDict."
                )
    for arguments in _trials(metric):
        alone = _begun(metric)
        try:
            with seeded_all(0), torch.no_grad():
                alone.update(*arguments)
                alone.update(*arguments)
                wanted = alone.compute()
        except Exception:  # these are no predictions and targets of this metric
            continue
        for _ in range(2):  # the second time nothing is left of the first one
            with seeded_all(0):
                states = own.updated(own.updated({}, arguments), arguments)
                value = own.computed(states)
            if Kept.of({"value": wanted}, ()).changed({"value": value}, ()):
                raise own.refusal(
                    f"two updates and a value come to {value!r} from its states, and to {wanted!r} by itself: it keeps "
                    "something outside of its attributes. Declare it, self.add_state(...)."
                )
        return states
    return {}


def _has_metric(value: Any) -> bool:
    """Whether a container holds a metric."""
    if isinstance(value, dict):
        value = list(value.values())
    package = sys.modules["torchmetrics"]
    kinds = package.Metric | package.MetricCollection
    return isinstance(value, list | tuple | set | deque) and any(isinstance(v, kinds) or _has_metric(v) for v in value)


def _trials(metric: Any) -> Iterator[tuple[Any, ...]]:
    """Predictions and targets of 4 samples, as metrics of classes, of numbers and of one tensor take them."""
    settings = [vars(module) for module in metric.modules()]
    sizes = [values.get(name) for values in settings for name in ("num_classes", "num_labels", "num_outputs")]
    for size in dict.fromkeys([*(size for size in sizes if type(size) is int and 0 < size < 100), 3]):
        classes = torch.arange(4) % size
        yield torch.rand(4, size).softmax(dim=1), classes
        yield torch.rand(4, size), torch.randint(2, (4, size))
        yield torch.rand(4, size), torch.rand(4, size)
    yield torch.rand(4), torch.tensor([0, 1, 1, 0])
    yield torch.rand(4), torch.rand(4)
    yield (torch.rand(4),)


# By the name of the function that torchmetrics reduces states of ranks with.
_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "dim_zero_sum": _sum,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": _together,
}
