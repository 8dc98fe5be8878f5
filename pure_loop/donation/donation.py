"""Donation: an update writes in place, when no other reference to the old tensors exists.

A pure update copies parameters and optimizer state, and the copy is most of what purity costs. It is needed only where
something of the old State is kept. Python counts the references to a State, a mapping or a tensor, torch those to a
storage; the loop knows how many of these are its own. Where no other exists, except the loop variable that the State
after the update replaces (:mod:`pure_loop.donation.consumer`), the optimizer's kernel writes in place. In any doubt it
copies. Gradients of large models are added up, divided and clipped by the same rules.

What was overwritten leaves the State that had it: to touch it there raises a
:class:`~pure_loop.errors.DonatedStateError`, and never shows other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

from torch import Tensor

from pure_loop._internal.cloning import clone_all
from pure_loop.donation.references import OwnedBuffers, can_count, count_in, has_tensors
from pure_loop.frozendict import OVERWRITTEN, FrozenDict, overwritten
from pure_loop.model.leaves import have_hooks_or_grads, hook_counter
from pure_loop.optim.optimizer import overwrite_private_of
from pure_loop.state import State, opt_state_read_marker, raw_opt_state

if TYPE_CHECKING:
    from pure_loop.optim import Optimizer
    from pure_loop.stages.engine import Engine

__all__ = ["Donation", "drop_gradients", "protect"]

_set_params = vars(State)["params"].__set__
_set_opt_state = vars(State)["_opt_state"].__set__
_set_grads = vars(State)["_grads"].__set__


def _nobody() -> None:
    """Stands for a reference to the last State that was handed over, where that is of no account."""


def protect(state: State) -> Callable[[], None]:
    """See to it that no step takes the memory of this State, with ``donate=True`` either: it is being read.

    Returns:
        What to call when it isn't any more, in any thread.
    """
    params = state.params
    if not hasattr(params, "protected"):
        params.protected = set()
    readers, reader = params.protected, object()
    readers.add(reader)
    return lambda: readers.discard(reader)


def drop_gradients(state: State) -> None:
    """Let go of a State's gradients: the next batch begins, and only the loop variable has it."""
    if state._grads is not None:
        _set_grads(state, OVERWRITTEN)


# Parameters (all, and those trained) and optimizer state, and how to overwrite that if it was not read.
Taken: TypeAlias = "tuple[FrozenDict[str, Tensor], FrozenDict[str, Tensor], Any, Callable[..., Any] | None]"


class Donation:
    """What a stream knows of other references to its memory.

    Args:
        always: whether States that are kept lose their memory too (``donate=True``).
        compiled: whether compiled steps ask for memory, by :meth:`writable_or_copy`.

    Attributes:
        held: what the last update made, if that is the stream's own.
        seen: whether a State has been yielded or observed since a compiled step last asked.
    """

    __slots__ = ("_alone", "_shown", "always", "compiled", "held", "seen")

    def __init__(self, *, always: bool, compiled: bool = False) -> None:
        self.always = always
        self.compiled = compiled
        self.seen = True
        self._alone = False
        self._shown: Callable[[], State | None] = _nobody
        self.held: OwnedBuffers | None = None

    def record_references(self, others: int, shown: State | None, *, replaced: bool) -> None:
        """Before memory is written to, in an update or a backward: record the references to its State.

        Args:
            others: how many references to it are neither the driver's nor the script's.
            shown: the last State that the consumer was given, if that is another one and alive.
            replaced: whether the last State that the consumer was given is in one place only, where a later State takes
                its place before it can be observed.
        """
        self._alone = others == 0 or (others == 1 and shown is None and replaced)
        # One that the consumer keeps counts as another reference. It isn't held here, where that would count too.
        self._shown = _nobody if shown is None or not replaced else ref(shown)

    def invalidate(self) -> None:
        """The stages are about to be passed on: the record doesn't hold for the States that they are called with."""
        self._shown, self._alone = _nobody, False

    def leaves(self, state: State, engine: Engine, *, index: int, last: bool) -> FrozenDict[str, Tensor]:
        """The leaves for a forward: those of the step before, where the parameters are where they were."""
        held, params, self.seen = self.held, state.params, True
        if held is None or held.params is not params or engine.ranks > 1:
            return engine.leaves(state, index=index, last=last)
        leaves = held.leaves
        if leaves is None:
            leaves = engine.leaves(state, index=index, last=last)
            held.share_with_leaves(leaves)
        else:
            hooks = hook_counter()
            other = leaves.frozen is not state.frozen and leaves.frozen != state.frozen
            if other or leaves.holder is not None or have_hooks_or_grads(leaves, unhooked=held.unhooked == hooks):
                # A graph still goes through them, or they stay aliased.
                return engine.leaves(state, index=index, last=last)
            held.unhooked = hooks
        leaves.origin = params
        return leaves

    def bound(self, leaves: FrozenDict[str, Tensor]) -> None:
        """After a forward: these leaves stand in the module instance that holds them."""
        held = self.held
        if held is not None and held.leaves is leaves and held.bound_to is None:
            held.bind(leaves.holder)

    def was_seen(self) -> bool:
        """Whether :meth:`writable_or_copy` would copy."""
        return self.seen

    def writable_or_copy(self, tensors: list[Tensor], alone: Callable[[State | None], bool] | None) -> list[Tensor]:
        """For tensors that a compiled step made: the same, to be written to, if they are not aliased; or copies.

        A graph calls no Python code, so a State that was not observed can't have been stored. After copies were
        returned, the memory is the step's own until a State is observed again.

        Args:
            tensors: what is about to be written to.
            alone: counts whether only the step and this State refer to them, and takes them out of it.
        """
        shown, only_the_loop, seen = self._shown(), self._alone, self.seen
        self._shown, self._alone, self.seen = _nobody, False, False
        if not seen:
            return tensors
        if only_the_loop and alone is not None and alone(shown):
            return tensors
        return clone_all(tensors)

    def donate(self, state: State, *, shared: bool) -> Taken | None:
        """Parameters (all, and those trained) and memory, to be written to; the State has none any more.

        With them comes how to overwrite an optimizer state that was not read, if it was not. None: they are aliased
        too.

        Args:
            state: the one that is about to be updated.
            shared: whether the engine has the memory of the parameters that are trained, too.
        """
        shown = None if self._shown is _nobody else self._shown()
        alone, held, reading = self._alone, self.held, opt_state_read_marker()
        unread = held is not None and reading is held.unread
        self._shown, self._alone = _nobody, False
        if (
            held is None
            or held.params is not state.params
            or not held.tensors_alone(raw_opt_state(state), shared=shared, unread=unread)
        ):
            self.held = None
            return None
        params_too = shown is not None and shown.params is state.params
        memory_too = shown is not None and raw_opt_state(shown) is raw_opt_state(state)
        if alone and held.mappings_alone(state, 1 + params_too, 1 + memory_too, unread=unread):
            memory = raw_opt_state(state)
            _set_params(state, OVERWRITTEN)
            _set_opt_state(state, OVERWRITTEN)
            if params_too:
                _set_params(shown, OVERWRITTEN)
            if memory_too:
                _set_opt_state(shown, OVERWRITTEN)
            held.unread = reading if held.overwrite_private is not None else None
            return held.params, held.trained, memory, held.overwrite_private if unread else None
        self.held = None
        if not self.always or getattr(state.params, "protected", None):
            return None
        if held.leaves is not None and not can_count():
            # A State that was kept inside the batch has the leaves as its parameters; so may the module, until now.
            state.model.unbind()
            overwritten(held.leaves)
        whole = held.trained is held.params
        params, memory = overwritten(state.params), _overwritten_memory(raw_opt_state(state))
        return params, params if whole else held.trained, memory, None

    def take_gradients(self, state: State) -> FrozenDict[str, Tensor] | None:
        """The gradients of the microbatches before; the State has none any more.

        None: another reference to their mapping exists. Or steps are compiled, where only :meth:`writable_or_copy`
        reads what was recorded.
        """
        if self.compiled:
            return None
        shown, alone = self._shown(), self._alone
        self.invalidate()
        too = shown is not None and shown._grads is state._grads
        # NOT_READY, which stands where there are none, has many references.
        if not alone or count_in([state._grads]) != [1 + too]:
            return None
        grads = state._grads
        _set_grads(state, OVERWRITTEN)
        if too:
            _set_grads(shown, OVERWRITTEN)
        return grads  # type: ignore[no-any-return]

    def track(
        self, draft: Any, trained: FrozenDict[str, Tensor], before: tuple[Any, Any], optimizer: Optimizer
    ) -> None:
        """Note what an update has just made as the loop's own.

        Args:
            draft: of the State after it, whose parameters and memory are set anew where that needs copies.
            trained: its parameters that are trained, as the optimizer gave them.
            before: the parameters and the memory before, with which these may share tensors (of a parameter that had
                no gradient): they are copied. None: they are not aliased.
            optimizer: whose update it was.
        """
        held = self.held
        if (held is not None and held.params is draft.params) or type(draft.opt_state) is not FrozenDict:
            return
        whole = trained is draft.params
        fresh = _fresh(trained, before[0])
        if fresh is not trained:
            draft.params = fresh if whole else FrozenDict({**draft.params, **fresh})
        draft.opt_state = _fresh_memory(draft.opt_state, before[1])
        self._hold(draft.params, fresh, draft.opt_state, optimizer)

    def track_initial(self, state: State, optimizer: Optimizer) -> None:
        """A fresh start: its parameters were copied from the module, and its memory was made, for this stream alone."""
        params = state.params
        if type(params) is FrozenDict and type(state.opt_state) is FrozenDict and not self.compiled:
            self._hold(params, state.model.trained(params), state.opt_state, optimizer)

    def _hold(
        self, params: FrozenDict[str, Tensor], trained: FrozenDict[str, Tensor], memory: Any, optimizer: Optimizer
    ) -> None:
        held = OwnedBuffers(params, trained, memory, overwrite_private=overwrite_private_of(optimizer))
        counted = optimizer.overwrites_mappings_only or not held.has_others(memory)
        self.held = held if counted and not held.is_foreign() else None

    def forget(self) -> None:
        """The tensors of the stream may be aliased from now on: it is over, or it copies."""
        self.invalidate()
        self.held = None


def _overwritten_memory(memory: Any) -> Any:
    if type(memory) is not FrozenDict or not has_tensors(memory):
        return memory  # counts, which other States may share
    inner = {key: _overwritten_memory(value) for key, value in memory.items()}
    other = overwritten(memory)
    dict.update(other, inner)
    return other


def _fresh(mapping: FrozenDict[str, Any], old: Any) -> FrozenDict[str, Any]:
    """A mapping without tensors of an older one: copies in their places."""
    if not isinstance(old, dict) or not any(map(is_, mapping.values(), map(old.get, mapping))):
        return mapping
    shared = {name for name in mapping if mapping[name] is old.get(name)}
    copied = FrozenDict((name, tensor.clone() if name in shared else tensor) for name, tensor in mapping.items())
    if hasattr(mapping, "layout"):
        copied.layout = mapping.layout
    if hasattr(mapping, "_tensors"):
        copied._tensors = list(copied.values())
    return copied


def _fresh_memory(memory: Any, old: Any) -> Any:
    if type(memory) is not FrozenDict or not isinstance(old, dict):
        return memory
    changed = {}
    for key, value in memory.items():
        if type(value) is FrozenDict and has_tensors(value):
            tensors = all(isinstance(item, Tensor) for item in value.values())
            new = _fresh(value, old.get(key)) if tensors else _fresh_memory(value, old.get(key))
            if new is not value:
                changed[key] = new
    return FrozenDict({**memory, **changed}) if changed else memory
