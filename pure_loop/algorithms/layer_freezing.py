"""Layer freezing: layers stop to train one after the other, the first ones first.

With ``t``, the part of training that is over, and the layers 1 to L in the order in which the module defines them::

    frozen layers   int(level (t - start) / (1 - start) (L - 1))     the last one never
    https://arxiv.org/abs/1706.04983, https://arxiv.org/abs/1706.05806
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from torch import Tensor, nn

from pure_loop._internal.pytree import PyTree
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._spans import as_span, part_of_training
from pure_loop.cadence import Cadence, CadenceLike, as_predicate
from pure_loop.errors import ArgumentTypeError, ModelError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.ranges import Within, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State
from pure_loop.time import TimeLike

__all__ = ["freezable", "frozen_count", "layer_freezing"]

SERVES = "several layers"


def frozen_count(elapsed: float, layers: int, start: float, level: float = 1.0) -> int:
    """How many layers are frozen.

    Args:
        elapsed: the part of training that is over.
        layers: how many there are.
        start: the part of training after which layers freeze.
        level: the share of the layers that are frozen at the end, without the last one.

    >>> [frozen_count(elapsed, 5, 0.5) for elapsed in (0.5, 0.6, 0.75, 0.9, 1.0)]
    [0, 0, 2, 3, 4]
    """
    if elapsed < start:
        return 0
    share = (elapsed - start) / (1 - start) if start < 1 else 1.0
    # Of 0.7 * 10 and the like the nearest float is a little less than the whole number.
    return int(level * share * (layers - 1) + 1e-9)


def freezable(module: nn.Module, layers: Callable[[str], int] | None = None) -> list[list[str]]:
    """The names of parameters and buffers, layer by layer.

    Args:
        module: the one with the layers.
        layers: ``name -> number`` of the layer of a parameter or buffer, from 0; None: each submodule that has
            parameters of its own is a layer, in the order in which the module defines them.

    Returns:
        The names of each layer, the first one first.

    >>> freezable(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2)))[1][:3]
    ['2.weight', '2.bias', '2.running_mean']
    """
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if layers is None:
        owners = [name for name, layer in module.named_modules() if list(layer.parameters(recurse=False))]
        number_of = {owner: number for number, owner in enumerate(owners)}
        grouped: dict[int, list[str]] = {number: [] for number in range(len(owners))}
        for name in names:
            owner = name.rpartition(".")[0]
            if owner in number_of:
                grouped[number_of[owner]].append(name)
    else:
        grouped = {}
        for name in names:
            grouped.setdefault(layers(name), []).append(name)
    return [grouped[number] for number in sorted(grouped)]


@checked
def layer_freezing(
    start: TimeLike = "0.5dur",
    level: Annotated[Strength, Within(0, 1, typical=(0.3, 1.0))] = 1.0,
    *,
    layers: Callable[[str], int] | None = None,
    batchnorm: Literal["frozen", "trained"] = "frozen",
    at: CadenceLike = "1ep",
    name: str = "layer_freezing",
) -> Algorithm:
    """Layers stop to train one after the other, the first ones first; the last one never does.

    The names of frozen parameters are in ``state.frozen``: the backward ends before them, which saves its time and the
    memory of their activations; nothing of them changes, by weight decay and momentum neither, and their optimizer
    state stays. The running statistics of frozen BatchNorm layers stay as well.

    Args:
        start: when layers begin to freeze: a part of the duration such as ``"0.5dur"``, or a time in the unit of
            ``max_duration``.
        level: the share of the layers that are frozen at the end of training, from 0 to 1; a number, or a schedule.
            With a schedule that falls, layers train again.
        layers: ``name -> number`` of the layer of a parameter or buffer, such as that of a transformer's block; None:
            each submodule that has parameters of its own is a layer.
        batchnorm: ``"trained"``: running statistics of frozen layers follow the data.
        at: how often the number of frozen layers is computed: ``"1ep"``, ``"100ba"``.
        name: another one, if there are several.

    Raises:
        ArgumentError: a level out of range, or a time by the clock; in training: times in another unit than
            ``max_duration``.
        ArgumentTypeError: a setting of another type.
        ModelError: in training: the model has one layer only.

    >>> import torch, pure_loop as pl
    >>> net, data = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> stream = pl.fit(net, data, loss=nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="4ep",
    ...                 algorithms=[layer_freezing("0.5dur", at="1ba")])
    >>> [state.algorithm_state["layer_freezing"]["depth"] for event, state in stream if event is pl.Event.BATCH_END]
    [0, 0, 0, 1]
    """
    begins = as_span(start, "start", "layer_freezing")
    if layers is not None and not callable(layers):
        raise ArgumentTypeError(
            f"layer_freezing: layers={layers!r} is not a function of a parameter's name that returns the number of its "
            'layer: layers=lambda name: int(name.split(".")[1]).'
        )
    cadence = as_predicate(at, "layer_freezing: at")

    def begin(state: State) -> FrozenDict[str, PyTree]:
        count = len(trained_layers(state))
        if count < 2:
            raise ModelError(
                f"layer_freezing: the model has {count} layer with parameters that are trained, and the last one is "
                "never frozen: leave layer_freezing out, or say what its layers are, layers=lambda name: ...."
            )
        return FrozenDict(depth=0, buffers=FrozenDict())

    def depth_at(state: State, before: int) -> int:
        timestamp = state.timestamp
        first = part_of_training(begins, timestamp, "layer_freezing")
        count = len(trained_layers(state))
        depth = frozen_count(timestamp.elapsed or 0.0, count, first, strength_at(level, timestamp))
        # It never falls by itself: training that resumes with a longer duration does not train layers again.
        return depth if callable(level) else max(before, depth)

    def decide(state: State) -> State:
        assert state.event is not None
        due = cadence.at(state, state.event) if isinstance(cadence, Cadence) else cadence is None or cadence(state)
        if not due:
            return state
        memory = state.algorithm_state[name]
        depth = depth_at(state, memory["depth"])
        if depth == memory["depth"]:
            return state
        names = _names(state, depth)
        # Those that another algorithm froze stay so, but for layers of this one that train again.
        frozen = (state.frozen - _names(state, memory["depth"])) | {key for key in names if key in state.params}
        if frozen.issuperset(state.model.trainable):
            return state  # the last layer shares its parameters with an earlier one
        # In the order of the model's: that of a set of names differs between processes.
        remaining = {key: memory["buffers"].get(key, buffer) for key, buffer in state.buffers.items() if key in names}
        memory = FrozenDict(depth=depth, buffers=FrozenDict(remaining if batchnorm == "frozen" else {}))
        return state.replace(frozen=frozen).remember(name, memory)

    def _names(state: State, depth: int) -> set[str]:
        chosen = trained_layers(state)
        remaining = {key for layer in chosen[depth:] for key in layer}
        return {key for layer in chosen[:depth] for key in layer} - remaining

    def trained_layers(state: State) -> list[list[str]]:
        trained = frozenset(state.model.trainable)
        return [layer for layer in freezable(state.model.skeleton, layers) if not trained.isdisjoint(layer)]

    def resume(state: State) -> State:
        """A checkpoint that is older than ``State.frozen`` has the depth alone."""
        depth = state.algorithm_state[name]["depth"]
        return state.replace(frozen=state.frozen | (_names(state, depth) & state.params.keys())) if depth else state

    def put_back(state: State) -> State:
        remaining: Mapping[str, Tensor] = state.algorithm_state[name]["buffers"]
        return state.replace(buffers={**state.buffers, **remaining}) if remaining else state

    def end(state: State) -> State:
        return decide(put_back(state))

    return Algorithm(
        name,
        {Event.FIT_START: resume, Event.BATCH_END: end, Event.EPOCH_END: decide},
        init=begin,
    )
