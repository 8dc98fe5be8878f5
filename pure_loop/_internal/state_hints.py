"""Hints for attributes that a State does not have: where the value is under its own name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from pure_loop._internal.suggestions import nearest

__all__ = ["Elsewhere", "hint", "hints"]

_PLACES: tuple[tuple[str, str], ...] = (
    ("gradients gradient grad", "gradients are state.grads, by parameter name"),
    (
        "lr learning_rate scheduler lr_scheduler schedule",
        "the learning rate is the optimizer's: optimizer.lr(state.timestamp)",
    ),
    (
        "optimizer optimizers optimizer_state",
        "the optimizer state is state.opt_state; the optimizer itself is the argument of fit",
    ),
    ("step steps global_step batch_idx", "finished batches are state.timestamp.batch"),
    ("epochs current_epoch", "finished epochs are state.timestamp.epoch"),
    ("weights parameters state_dict", "parameters are state.params, by name; state.module() is a module with them"),
    ("named_buffers", "buffers are state.buffers, by name"),
    (
        "net forward train eval",
        "state.module() is a plain module with copies of the parameters; state.module(training=False) is in eval mode",
    ),
    (
        "accuracy val_loss eval_loss metric",
        'metrics are state.metrics[label][name], such as state.metrics["val"]["accuracy"]',
    ),
    ("inputs targets labels", "the batch is state.batch, and the part of it that is computed now state.microbatch"),
    ("predictions output logits", "what the forward returned is state.outputs"),
    ("memory algorithms", "what an algorithm keeps is state.algorithm_state[name]"),
    ("rng generator", "random numbers come from pl.random.generator(state.seed, name, state.timestamp.batch)"),
    ("scaler grad_scaler", "the loss scale is state.loss_scale"),
    ("rank world_size", "ranks are pl.distributed.rank() and pl.distributed.world_size()"),
)


def hints(fields: Iterable[str], counted: Iterable[str]) -> dict[str, str]:
    """Where to look, by name, for names that are no fields of a State; ``counted`` are those of its timestamp."""
    result = {name: f"it is state.timestamp.{name}" for name in counted}
    result |= {name: place for names, place in _PLACES for name in names.split()}
    for name in fields:
        result.pop(name, None)
    return result


def hint(name: str, fields: Iterable[str], counted: Iterable[str]) -> str:
    """What to write for a name that is no field of a State, in parentheses; "" where nothing is known."""
    fields = list(fields)
    place = hints(fields, counted).get(name)
    if place is None:
        near = nearest(name, fields)
        place = None if near is None else f"did you mean {near!r}?"
    return "" if place is None else f" ({place})"


class Elsewhere:
    """An attribute that raises: the error says where the value is.

    A ``__getattr__`` would say so of all names, and make every read of a State take several times as long.
    """

    __slots__ = ("_name", "_place")

    def __init__(self, name: str, place: str) -> None:
        self._name, self._place = name, place

    def __get__(self, instance: object, owner: type) -> NoReturn:
        name = self._name
        raise AttributeError(f"{owner.__name__!r} object has no attribute {name!r}: {self._place}.", name=name)

    def __repr__(self) -> str:
        return f"<not here: {self._place}>"
