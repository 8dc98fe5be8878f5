"""The contract of an algorithm: it returns a State in which all that the loop needs next is valid."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import optree
import torch

from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.tree_ops import have_same_sharding, is_sharded, placements_of, shard_like
from pure_loop.errors import AlgorithmReturnError, AlgorithmStructureError, LossError
from pure_loop.event import Event, events_between
from pure_loop.frozendict import FrozenDict
from pure_loop.model.model import ModelDef
from pure_loop.model.names import Note, aligned
from pure_loop.model.parameters import are_leaves
from pure_loop.precision import LossScale
from pure_loop.stages.nonfinite import total_loss
from pure_loop.state import (
    NOT_READY,
    STOPPING,
    State,
    StateFields,
    frozen_problem,
    raw_loss,
    raw_opt_state,
    raw_params,
    refuse_misfit,
)
from pure_loop.task import loss_problem


def check_returned(returned: object, old: State, name: str, event: Event) -> State:
    """What an algorithm returned, with its events and mappings in order; or the error that says what is wrong."""
    if type(returned) is not type(old):
        _refuse_type(returned, type(old), name, event)
    result = returned
    if result.event is not event:
        if result.event is not None:
            event_name = result.event.name if isinstance(result.event, Event) else repr(result.event)
            raise AlgorithmStructureError(
                f"algorithm {name!r} at {event.name} returned a State of {event_name}: it returned a State that it "
                "had kept, or changed state.event. Return state.replace(...) of its argument."
            )
        result = result.replace(event=event)
    if result.timestamp is not old.timestamp and result.timestamp != old.timestamp:
        _refuse_field("timestamp", name, event, "only the loop counts")
    if result.previous_timestamp is not old.previous_timestamp or result.position is not old.position:
        _refuse_field("previous_timestamp or position", name, event, "only the loop counts")
    if result.seed != old.seed:
        _refuse_field("seed", name, event, "derive seeds of your own: pl.random.derive(state.seed, ...)")
    if result.frozen is not old.frozen and result.frozen != old.frozen:
        _refuse_frozen(result, name, event)
    if result.model is not old.model:
        if event is not Event.INIT:
            _refuse_field("model", name, event, "model surgery is done at INIT, with state.with_module(module)")
        model: object = result.model
        if not isinstance(model, ModelDef):
            what = f"to a {type(model).__name__}"
            _refuse_field(f"model {what}", name, event, "it is the structure alone; write state.with_module(module)")
        refuse_misfit(result)
        return _noted(result, old, name)
    _refuse_ill_typed(result, old, name, event)
    _refuse_mistimed(result, old, name, event)
    if raw_params(result) is not raw_params(old):
        if are_leaves(raw_params(old)):
            raise AlgorithmStructureError(
                f"algorithm {name!r} replaced params at {event.name}, between the forward and the backward of a "
                "microbatch: the loss is a function of the old ones. Replace params at BEFORE_FORWARD or earlier, "
                "or from AFTER_BACKWARD on."
            )
        result = _same_tensors("params", result, raw_params(result), raw_params(old), name, event)
    if result.buffers is not old.buffers:
        result = _same_tensors("buffers", result, result.buffers, old.buffers, name, event)
    if raw_opt_state(result) is not raw_opt_state(old):
        result = _same_structure(result, raw_opt_state(result), raw_opt_state(old), name, event)
    grads = result._grads
    if grads is None and event is not Event.BATCH_END and old._grads not in (None, NOT_READY):
        _refuse_field("grads to None", name, event, "the step needs them; to skip it, multiply them by 0")
    if grads is not old._grads and grads is not None and grads is not NOT_READY:
        reference = FrozenDict((key, raw_params(old)[key]) for key in old.model.trainable)
        result = _same_tensors("grads", result, grads, reference, name, event)
    return result


def _noted(result: State, old: State, name: str) -> State:
    """The State after surgery, with a note of the names that it made and took away."""
    before, after = ({**raw_params(state), **state.buffers} for state in (old, result))
    added = tuple(key for key, tensor in after.items() if key not in before or before[key].shape != tensor.shape)
    removed = tuple(key for key in before if key not in after)
    if not added and not removed:
        return result
    note = Note(source=name, migrated=False, batch=old.timestamp.batch, added=added, removed=removed)
    return result.replace(notes=(*old.notes, note))


# What is needed to resume from these events.
_NEEDED = {
    **dict.fromkeys((Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH), "batch"),
    **dict.fromkeys((Event.EVAL_BATCH_START, Event.PREDICT_BATCH_START), "batch"),
    **dict.fromkeys((Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD), "microbatch"),
}
_OF_THE_LOSS = frozenset({Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH})
_DIFFERENTIATED = frozenset({Event.AFTER_LOSS, Event.BEFORE_BACKWARD})


def _refuse_ill_typed(result: Any, old: State, name: str, event: Event) -> None:
    """Refuse here what would fail later, where the algorithm could no longer be named."""
    if raw_loss(result) is not raw_loss(old) and event in _OF_THE_LOSS:
        _refuse_loss(result, old, name, event)
    needed = _NEEDED.get(event)
    if needed is not None and getattr(result, needed) is None and getattr(old, needed) is not None:
        _refuse_field(f"{needed} to None", name, event, "the step needs it")
    if result.loss_scale is not old.loss_scale and not isinstance(result.loss_scale, LossScale | None):
        what = f"loss_scale to a {type(result.loss_scale).__name__}"
        _refuse_field(what, name, event, "precision='amp_fp16' brings a LossScale, and others None")
    for field in ("skipped", "nonfinite"):
        before, after = getattr(old, field), getattr(result, field)
        if after is not before and before is not None and not isinstance(after, torch.Tensor):
            _refuse_field(
                f"{field} to a {type(after).__name__}", name, event, "it is a tensor, which the loop counts in"
            )


# From BATCH_START, where the rate of the batch is recorded, to its end.
_RATE_IS_FIXED = events_between(Event.BEFORE_TRAIN_BATCH, Event.BATCH_END)


def _refuse_mistimed(result: State, old: State, name: str, event: Event) -> None:
    """Refuse ``stop`` and ``lr_scale`` where they have no effect, or another one than they seem to have."""
    stop: Any = result.stop
    if stop is not old.stop:
        if type(stop) is not bool:
            what = f"stop to {stop!r:.60} of type {type(stop).__name__}"
            _refuse_field(what, name, event, "it is True or False; of a tensor, write bool(tensor)")
        if event not in STOPPING:
            where = "at EVAL_END, keep it in algorithm_state and set stop" if event.is_eval else "set it"
            _refuse_field("stop", name, event, f"training stops at a boundary: {where} at BATCH_CHECKPOINT")
    if result.lr_scale is not old.lr_scale:
        scale = result.lr_scale
        shape = () if result.ensemble is None else (len(result.ensemble),)
        is_number = isinstance(scale, torch.Tensor) and scale.shape == shape and scale.is_floating_point()
        right = scale is None or is_number
        if not right or (scale is not None and scale.device.type != "cpu"):
            value = _describe(scale) if isinstance(scale, torch.Tensor) else f"a {type(scale).__name__}"
            example = f"torch.ones({shape[0]}" if shape else "torch.tensor(0.5"
            right_one = f"it is a factor of learning rates: {example}, dtype=torch.float64), on the CPU, or None"
            _refuse_field(f"lr_scale to {value}", name, event, right_one)
        if event.is_eval or event in _RATE_IS_FIXED:
            _refuse_field("lr_scale", name, event, "set it at BATCH_CHECKPOINT for the next batch, or at BATCH_START")


def _refuse_frozen(result: State, name: str, event: Event) -> None:
    problem = frozen_problem(result.frozen, result.model)
    if problem is not None:
        _refuse(f"changed frozen, and it {problem}.", name, event)
    if event.is_eval or event in _RATE_IS_FIXED - {Event.BATCH_END}:
        _refuse_field("frozen", name, event, "set it at BATCH_END for the next batch, or at BATCH_START")


def _refuse_loss(result: State, old: State, name: str, event: Event) -> None:
    if loss_problem(old.loss) is not None:  # that of a script which means something else by it
        return
    where = f"the loss that algorithm {name!r} returned at {event.name}, batch {old.timestamp.batch},"
    problem = loss_problem(result.loss)
    if problem is not None:
        raise LossError(f"{where} {problem}")
    if event in _DIFFERENTIATED and total_loss(old.loss).requires_grad and not total_loss(result.loss).requires_grad:
        raise LossError(
            f"{where} has no graph, so that nothing can be differentiated: compute it from state.loss without "
            ".detach(), .item() or torch.no_grad(). To leave a step out, multiply grads by 0 at AFTER_TRAIN_BATCH."
        )


def _same_tensors(field: str, state: State, mapping: Any, old: FrozenDict[str, Any], name: str, event: Event) -> State:
    """Refuse other names, shapes, dtypes or devices. What remains comes in the model's order, as in every State."""
    if mapping.keys() != old.keys():
        missing, unknown = sorted(old.keys() - mapping.keys())[:3], sorted(mapping.keys() - old.keys())[:3]
        surgery = "; to replace the model: at INIT, state.with_module(module)." if field == "params" else "."
        advice = f"Keep the names: state.replace({field}={{**state.{field}, name: tensor}}){surgery}"
        _refuse(f"changed the names in {field}: missing {missing}, unknown {unknown}. {advice}", name, event)
    in_parts = False
    for key, tensor in mapping.items():
        before = old[key]
        if tensor is before or (tensor is None and field == "grads"):
            continue
        if not isinstance(tensor, torch.Tensor):
            _refuse(f"put {type(tensor).__name__} into {field}[{key!r}], not a tensor.", name, event)
        if tensor.shape != before.shape or tensor.dtype != before.dtype or tensor.device != before.device:
            change = f"changed {field}[{key!r}] from {_describe(before)} to {_describe(tensor)}"
            _refuse(f"{change}; shapes, dtypes and devices stay as they are.", name, event)
        if not have_same_sharding(tensor, before):
            was_by, is_by = placements_of(before), placements_of(tensor)
            advice = "each rank keeps the part that it has: tensor.redistribute(placements=before.placements)."
            _refuse(
                f"changed {field}[{key!r}] from parts by {was_by} to parts by {is_by}; {advice}",
                name,
                event,
            )
        in_parts = in_parts or is_sharded(before)
    tensors = mapping
    if in_parts:
        tensors = FrozenDict(
            (key, part if part is None else shard_like(part, old[key])) for key, part in tensors.items()
        )
    if any(t is not None and t.requires_grad for t in tensors.values()):
        tensors = FrozenDict((key, t if t is None else t.detach()) for key, t in tensors.items())
    return state if tensors is mapping else state.replace(**cast("StateFields", {field: tensors}))


def _same_structure(state: State, tree: Any, old: Any, name: str, event: Event) -> State:
    """Refuse an optimizer state of another tree, or leaves of other shapes; bring its names back into their order."""
    in_order = aligned(tree, old)
    if in_order is not tree:
        tree, state = in_order, state.replace(opt_state=in_order)
    before, spec = optree.tree_flatten(old, namespace=NAMESPACE)
    after, value = optree.tree_flatten(tree, namespace=NAMESPACE)
    if value != spec:
        change = "changed the structure of opt_state, in which the optimizer would not find its memory again"
        advice = f"keep the tree: optree.tree_map(function, state.opt_state, namespace={NAMESPACE!r})."
        _refuse(f"{change}; map its leaves and {advice}", name, event)
    for path, a, b in zip(optree.tree_paths(old, namespace=NAMESPACE), after, before, strict=True):
        if any(getattr(a, kind, None) != getattr(b, kind, None) for kind in ("shape", "dtype")):
            _refuse(f"changed the shape or dtype of opt_state{_keys(path)}; both stay as they are.", name, event)
        if not have_same_sharding(a, b) or is_sharded(b) is not is_sharded(a):
            change = f"changed opt_state{_keys(path)}, of which each rank holds a part, to something else than"
            _refuse(f"{change} parts by the same placements: pl.distributed.shard_like(whole, before).", name, event)
    return state


def _keys(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _refuse_type(out: Any, cls: type, name: str, event: Event) -> NoReturn:
    if out is None:
        raise AlgorithmReturnError(
            f"algorithm {name!r} at {event.name} returned None. An algorithm returns the next State: end it with "
            "`return state.replace(...)`, or `return state` where nothing changes."
        )
    if isinstance(out, State):
        raise AlgorithmReturnError(
            f"algorithm {name!r} at {event.name} returned a {type(out).__name__} where it was given a {cls.__name__}: "
            "use state.replace(...), which keeps the class."
        )
    raise AlgorithmReturnError(
        f"algorithm {name!r} at {event.name} returned {type(out).__name__}, not a State: return state.replace(...)."
    )


def _refuse_field(field: str, name: str, event: Event, reason: str) -> NoReturn:
    _refuse(f"changed {field}, and may not: {reason}.", name, event)


def _refuse(problem: str, name: str, event: Event) -> NoReturn:
    raise AlgorithmStructureError(f"algorithm {name!r} at {event.name} {problem}")
