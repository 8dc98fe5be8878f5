"""Records norms of gradients (before and after clipping), parameters, updates and moments, and their ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop import gradients as _gradients
from pure_loop._internal.tree_ops import (
    are_sharded,
    clone_all,
    local_tensor,
    map_local,
    of_one_sharding,
    sum_over_shards,
)
from pure_loop.cadence import CadenceLike
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.callbacks._intervals import measures_batch, read_interval
from pure_loop.ranges import checked
from pure_loop.state import State

__all__ = ["GradMonitor"]

# A norm of 0 divides nothing.
_LEAST = 1e-30


@checked
class GradMonitor(Callback):
    """Records L2 norms at an interval, without waiting for the device.

    ======================================= ============================================================================
    ``gradients/norm``                      the gradient that the optimizer steps with: complete, unscaled, clipped
    ``gradients/norm_before_clipping``      ``state.grad_norm``, before ``clip_grad=`` and algorithms
    ``parameters/norm``                     the parameters after the step
    ``updates/norm``                        parameters at BATCH_END minus those at AFTER_TRAIN_BATCH
    ``updates/ratio``                       the norm of the update over that of the parameters
    ``updates/cosine``                      the cosine between update and gradient; -1 for plain SGD
    ``moments/norm/<key>``                  optimizer state in the parameters' shapes: ``exp_avg``, ``momentum``
    ======================================= ============================================================================

    All are tensors of shape () over all parameters; with ``per_layer=True`` each parameter has its own norms and ratio
    as well: ``gradients/norm/0.weight``. A parameter without a gradient counts as 0 there, and isn't listed.

    At a batch that is recorded, the parameters are copied before the step and the copy is freed after it. The norm
    before clipping is computed at every batch, so that ``state.grad_norm`` is there at all of them.

    An interval of batches (``"10ba"``, ``"0.1dur"``) is due at the 10th, the 20th batch; one of samples, tokens, epochs
    or seconds at the first batch after it.

    On several ranks with replicas, where the values are equal, the first rank computes them. With
    ``parallel="shard"`` norms are those of the whole tensors, from two exchanges of one number a tensor at each record;
    there an ``interval`` of the user's own has to give the same answer on all ranks.

    Args:
        interval: how often: ``"10ba"``, ``"1ep"``, ``"10m"``, ``"0.1dur"``, a predicate of the State.
        per_layer: whether values of each parameter are recorded, too.
        gradients, parameters, updates, moments: which groups are recorded.

    Raises:
        ArgumentTypeError, ArgumentError: an interval that can't be read, or a flag that is no bool.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import InMemoryLogger
    >>> logger, model = InMemoryLogger(), torch.nn.Linear(2, 1, bias=False)
    >>> data = [(torch.tensor([[3.0, 4.0]]), torch.zeros(1))]
    >>> state = pl.run(pl.fit(model, data, loss=lambda outputs, targets: outputs.sum(), max_duration="1ba",
    ...                       optimizer=pl.optim.sgd(lr=0.1), callbacks=[GradMonitor("1ba")], loggers=[logger]))
    >>> [round(logger.series(name)[1][0], 4) for name in ("gradients/norm", "updates/norm", "updates/cosine")]
    [5.0, 0.5, -1.0]
    """

    records = True
    each_member = True

    all_ranks = True
    needs_grad_norm = True

    def __init__(
        self,
        interval: CadenceLike = "10ba",
        *,
        per_layer: bool = False,
        gradients: bool = True,
        parameters: bool = True,
        updates: bool = True,
        moments: bool = True,
    ) -> None:
        self._interval = read_interval(interval, "GradMonitor")
        self._per_layer = per_layer
        self._gradients, self._parameters, self._updates, self._moments = gradients, parameters, updates, moments
        self._together = self._measures = False
        # Copies of what this rank holds of the parameters, from AFTER_TRAIN_BATCH to BATCH_END.
        self._before: dict[str, Tensor] = {}

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        self._measures, self._before = False, {}
        # Ranks with shards compute norms together, whether or not one has a logger.
        self._together = are_sharded(state.params)

    def after_train_batch(self, state: State, logger: LoggerGroup) -> None:
        records = self._together or (not self.rank and bool(logger.loggers))
        self._measures = records and measures_batch(self._interval, state)
        if self._measures and self._updates:
            with torch.no_grad():
                copies = map_local(clone_all, [tensor.detach() for tensor in state.params.values()])
            self._before = dict(zip(state.params, copies, strict=True))

    @torch.no_grad()
    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        if self._measures:
            self._measures, before, self._before = False, self._before, {}
            logger.log_metrics(self._values(state, before), state)

    def close(self) -> None:
        self._measures, self._before = False, {}

    def _values(self, state: State, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        grads = {name: gradient for name, gradient in (state.grads or {}).items() if gradient is not None}
        updates = _updates(state.params, before)
        groups: dict[str, Mapping[str, Tensor]] = {}
        if self._gradients:
            groups["gradients/norm"] = grads
        if self._parameters or self._updates:
            groups["parameters/norm"] = state.params
        groups["updates/norm"] = updates
        if self._moments:
            groups |= {f"moments/norm/{key}": moments for key, moments in _moments(state).items()}
        norms = self._norms(groups)
        values = {name: value for name, value in norms.items() if self._is_recorded(name)}
        if self._gradients and state.grad_norm is not None:
            values["gradients/norm_before_clipping"] = state.grad_norm
        if self._updates:
            for name in [name for name in norms if name.startswith("updates/norm")]:
                rest = name.removeprefix("updates/norm")
                values[f"updates/ratio{rest}"] = norms[name] / norms[f"parameters/norm{rest}"].clamp(min=_LEAST)
            if grads:
                values["updates/cosine"] = _cosine(updates, grads, norms["updates/norm"])
        return values

    def _is_recorded(self, name: str) -> bool:
        return self._parameters or not name.startswith("parameters/")

    def _norms(self, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The norm of each group and, per layer, of each tensor: all of them together, for one exchange."""
        flat = {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}
        by_name = _gradients.norms(flat)
        result = {}
        for group, tensors in groups.items():
            if tensors:
                parts = [by_name[f"{group}/{name}"] for name in tensors]
                result[group] = _over_all(parts)
                if self._per_layer:
                    result |= {f"{group}/{name}": part for name, part in zip(tensors, parts, strict=True)}
        return result


def _over_all(norms: list[Tensor]) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))
    return total


def _updates(params: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was added to the parameters of which there are copies."""
    names = [name for name in params if name in before]
    after, old = [params[name].detach() for name in names], [before[name] for name in names]
    return dict(zip(names, map_local(torch._foreach_sub, after, old) if names else (), strict=True))


def _cosine(updates: Mapping[str, Tensor], grads: Mapping[str, Tensor], update_norm: Tensor) -> Tensor:
    """The cosine between the update and the gradient, over the parameters that have one."""
    products = []
    for name, gradient in grads.items():
        update, dense = local_tensor(updates[name]), local_tensor(gradient)
        dense = dense.to_dense() if dense.is_sparse else dense
        products.append((update * dense.conj()).real.sum(dtype=update_norm.dtype))
    product, tensors = torch.zeros_like(update_norm), list(grads.values())
    for places in of_one_sharding(tensors):
        some = torch.stack([products[place].to(update_norm.device) for place in places]).sum()
        product = product + sum_over_shards(some, tensors[places[0]])
    return product / (update_norm * _gradients.global_norm(grads)).clamp(min=_LEAST)


def _moments(state: State) -> dict[str, dict[str, Tensor]]:
    """Tensors of the optimizer state that have the shape of a parameter, by key and by the parameter's name."""
    result: dict[str, dict[str, Tensor]] = {}
    for key, name, tensor in _leaves(state.opt_state):
        parameter = state.params.get(name)
        if parameter is not None and tensor.shape == parameter.shape and key != "step":
            result.setdefault(key, {})[name] = tensor
    return result


def _leaves(opt_state: Any) -> Iterator[tuple[str, str, Tensor]]:
    """Floating tensors of an optimizer state, each with the two parts of its path that name it: key and parameter.

    ``opt_state["exp_avg"]["0.weight"]`` and ``opt_state["memory"]["0.weight"]["exp_avg"]`` are the same moment.
    """
    paths, leaves, _ = optree.tree_flatten_with_path(opt_state, namespace="pure_loop")
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and len(path) > 1:
            for name, key in ((path[-1], path[-2]), (path[-2], path[-1])):
                yield str(key), str(name), leaf
