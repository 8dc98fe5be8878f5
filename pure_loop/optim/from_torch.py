"""Any ``torch.optim.Optimizer`` class as a pure optimizer.

Each update builds the optimizer anew around copies of the parameters, restores what ``opt_state`` holds of it, lets it
step, and reads its state back. Building it costs a fraction of its step, and an object that lives for one call has
nothing to leak to the next call or to another thread. Where memory is donated, torch's own classes step on the
parameters and on what they keep as these are, without copies.

A torch optimizer makes its state in its first step. So that the structure of ``opt_state`` is the same from ``init``
on, ``init`` takes a trial step on copies to learn the structure, keeps zeros in its place, and notes for each parameter
whether it has ``started``; until then the optimizer is given none of it. Optimizers that add keys, or change shapes,
in later steps do the same here: what ``opt_state`` holds is what the class held after its last step.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.arguments import check_number, is_scheduler, refuse_no_schedule
from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.reprs import brief, shape_and_dtype
from pure_loop._internal.suggestions import teaching
from pure_loop._internal.tree_ops import clone_all, is_sharded
from pure_loop._internal.weights import has_numbers
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.kept import ATOMS, COMMON, Kept, overlap, range_of, tensors_in, unholdable
from pure_loop.optim._in_torch import refuse_other_options
from pure_loop.optim.kernels import check_state, in_order, is_dense, match_layout
from pure_loop.optim.optimizer import (
    Grads,
    Optimizer,
    OptState,
    Params,
    RateFunction,
    ScaledTimestamp,
    TorchGroup,
    as_schedule,
    rate_at,
)
from pure_loop.optim.resuming import where_differs
from pure_loop.random.seeds import seeded_all

if TYPE_CHECKING:
    from pure_loop.time import Timestamp

__all__ = ["from_torch"]

# Attributes of every torch optimizer that hold nothing of the training.
_MACHINERY = frozenset(
    {
        "defaults",
        "param_groups",
        "state",
        "_need_device_dtype_check_for_fused",
        "_step_supports_amp_scaling",
        "_warned_capturable_if_run_uncaptured",
        "_zero_grad_profile_name",
    }
)
_ELEMENTWISE = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
# A gradient that is NaN or infinite makes their parameters so. (The sign of an infinite one is a number.)
_SPREADING = _ELEMENTWISE - {"Rprop"}
_OTHERS = ("shared", "group", "attributes")
_KEYS = ("class", "memory", "started", *_OTHERS, "removed")


@teaching
def from_torch(cls: type[torch.optim.Optimizer], **options: Any) -> Optimizer:
    """A pure optimizer that does what ``cls(params, **options)`` does.

    Args:
        cls: a subclass of ``torch.optim.Optimizer`` with a ``step()`` that needs no closure.
        options: its options. ``lr`` may be a function of the timestamp: ``lr`` of the parameter group is set to its
            value before each step, and the class is built with its own default. All parameters are in one group; see
            :func:`partition` for several.

    The state holds ``memory`` (for each parameter what the optimizer keeps for it), ``started``, ``shared`` (what it
    keeps for no parameter), ``group`` (options of the parameter group that it changes or adds, such as a learned step
    size), ``attributes`` (values that it changes on itself), ``removed`` (keys that it removes from either) and
    ``class`` (its name). These are tensors, numbers, texts, None and dicts, lists, tuples, sets and deques of such, so
    that training resumes from a kept State and from a file. Random numbers that the class draws from the global
    generators of torch, NumPy and Python are seeded by ``fit``, from its seed and the number of the batch.

    Raises:
        ArgumentTypeError: (a TypeError) if ``cls`` is no optimizer class.
        ArgumentError: (a ValueError) if ``cls`` refuses the options, its step needs a closure, or training with it
            can't be resumed: it keeps a value that no State can hold, a second reference to a parameter, or several
            parameter groups. A trial of three steps on a matrix of shape (2, 2) shows it.

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.time import Timestamp
    >>> optimizer = from_torch(torch.optim.Adagrad, lr=0.5)
    >>> params, grads = FrozenDict(w=torch.zeros(2)), FrozenDict(w=torch.tensor([2.0, -1.0]))
    >>> new, opt_state = optimizer.update(grads, optimizer.init(params), params, Timestamp())
    >>> new["w"], opt_state["memory"]["w"]["sum"]
    (tensor([-0.5000,  0.5000]), tensor([4., 1.]))
    """
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"from_torch needs a subclass of torch.optim.Optimizer, got {brief(cls)}; "
            "give the class and its options: from_torch(torch.optim.RAdam, lr=1e-3)"
        )
    name = cls.__name__
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ArgumentError(
            f"from_torch: {name} can't be used, because {name}.step(closure) runs the model and the loss again inside "
            "the step, and an update is a function of gradients that are already there; take an optimizer whose step() "
            "needs no closure, such as torch.optim.AdamW"
        )
    if hasattr(cls, "_subclass_zeros"):  # of torchao, which quantizes only what is larger than the trial's matrix
        raise ArgumentError(
            f"from_torch: {name} can't be used, because it keeps its state in tensors of classes of its own, which a "
            "State and its checkpoints don't hold. bitsandbytes.optim.AdamW8bit keeps plain tensors of 8 bits."
        )
    lr = options.get("lr")
    scheduled = callable(lr)
    if scheduled or is_scheduler(lr):
        refuse_no_schedule(f"from_torch({name}): lr", lr)
    rest = {key: value for key, value in options.items() if key != "lr" or not scheduled}
    if "lr" in rest:
        rest["lr"] = check_number("lr", lr, where=f"from_torch({name})", least=0)
    rule = _FromTorch(cls, FrozenDict(rest), lr if scheduled else None)
    # A matrix, because some classes serve nothing else.
    tried = rule.trial({"trial": torch.zeros(2, 2)}, steps=3)
    defaults = tried.new.defaults
    if scheduled and "lr" not in defaults:
        raise ArgumentError(f"from_torch: {name} has no option lr, got lr={lr!r}")
    rate: RateFunction = _no_rate
    if "lr" in defaults:
        rate = as_schedule("from_torch", lr if callable(lr) else float(defaults["lr"]))
    fixed = FrozenDict({key: value for key, value in rest.items() if key != "lr"})
    of_torch = cls.__module__.startswith("torch.optim.")
    return Optimizer(
        name=rule.name,
        init=rule.init,
        update=rule.update,
        overwrite=rule.overwrite if of_torch and tried.spared and rule.spares_on_devices(defaults) else None,
        lr=rate,
        options=fixed,
        spreads_nonfinite=of_torch and name in _SPREADING,
        # A class of others may change its rate in a step.
        takes_lr_scale=scheduled or (of_torch and rate is not _no_rate),
        elementwise=of_torch and name in _ELEMENTWISE,
        draws=not of_torch,
        check=partial(rule.refuse, keys=frozenset(tried.memories()[0]) if of_torch else frozenset()),
        in_torch=ClassInTorch(rule=rule, lr=rate),
    )


def restore(
    optimizer: torch.optim.Optimizer,
    memories: Iterable[tuple[Mapping[str, Any], bool]],
    shared: Mapping[Any, Any],
    group: Mapping[str, Any],
    attributes: Mapping[str, Any],
    removed: Mapping[str, Iterable[str]],
) -> None:
    """Give a new optimizer what an ``opt_state`` holds of it.

    Args:
        optimizer: a new one of one group.
        memories: for each parameter what is kept for it, and whether it has made a step.
        shared, group, attributes, removed: as in the state of :func:`from_torch`.
    """
    for param, (memory, started) in zip(optimizer.param_groups[0]["params"], memories, strict=True):
        if started:
            optimizer.state[param] = dict(memory)
    optimizer.state.update(dict(shared))
    for target, restored, key in (
        (optimizer.param_groups[0], group, "group"),
        (vars(optimizer), attributes, "attributes"),
    ):
        target.update(restored)
        for name in removed[key]:
            target.pop(name, None)


def has_modes(cls: type) -> bool:
    """Whether a class has other weights for evaluation than for training, as schedule-free ones have."""
    return callable(getattr(cls, "train", None)) and callable(getattr(cls, "eval", None))


def _no_rate(timestamp: Timestamp) -> float:
    return math.nan


@attrs.frozen(eq=False)
class _Trial:
    """A new optimizer, and one that has made steps, with its parameters and what it was before."""

    new: torch.optim.Optimizer
    after: torch.optim.Optimizer
    copies: list[Tensor]
    before: tuple[Kept, Kept]
    spared: bool  # whether the steps have left the gradients as they were

    def memories(self) -> list[dict[str, Any]]:
        """What was kept for each parameter after the steps."""
        return [dict(self.after.state[param]) if param in self.after.state else {} for param in self.copies]


@attrs.frozen
class _FromTorch:
    cls: type[torch.optim.Optimizer]
    options: FrozenDict[str, Any]
    lr: RateFunction | None

    @property
    def name(self) -> str:
        return f"from_torch({self.cls.__name__})"

    @property
    def path(self) -> str:
        """The class, as ``opt_state`` names it."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def build(self, params: list[Tensor]) -> torch.optim.Optimizer:
        options = dict(self.options)
        if self.lr is not None and not _has_default(self.cls, "lr"):
            options["lr"] = 1e-3  # any number: the schedule's takes its place before each step
        try:
            optimizer = self.cls([param.requires_grad_() for param in params], **options)
        except Exception as error:
            raise ArgumentError(f"{self.name}: {self.cls.__name__}(params, **{options}) failed: {error}") from error
        if len(optimizer.param_groups) != 1:
            raise ArgumentError(
                f"{self.name}: {self.cls.__name__}(params) made {len(optimizer.param_groups)} parameter groups of one "
                "list of parameters, and from_torch keeps one group: use pl.optim.partition({...}, label=...) with a "
                "from_torch for each group"
            )
        if has_modes(self.cls):
            optimizer.train()  # type: ignore[attr-defined]
            for param in [param for param, memory in optimizer.state.items() if not memory]:
                del optimizer.state[param]  # which asking for it has made
        return optimizer

    @torch.no_grad()
    def trial(self, params: Mapping[str, Tensor], steps: int = 1) -> _Trial:
        """Let it make steps on copies.

        Raises:
            ArgumentError: it needs a closure, or keeps what no State can hold.
        """
        with seeded_all(0):  # for the generators to be as they were afterwards
            optimizer = self.build(clone_all(list(params.values())))
            try:
                tried = _Trial(optimizer, *self._stepped(params, steps, sparse=False))
            except Exception as error:
                with contextlib.suppress(Exception):
                    return _Trial(optimizer, *self._stepped(params, steps, sparse=True))
                raise ArgumentError(
                    f"{self.name}: {self.cls.__name__} can't be used, because its step() failed on gradients alone, "
                    f"without a closure that runs the model again: {type(error).__name__}: {error}"
                ) from error
        self._refuse_unresumable(tried)
        return tried

    def spares_on_devices(self, defaults: Mapping[str, Any]) -> bool:
        """Whether gradients stay as they were where the class chooses other kernels: on an accelerator."""
        if defaults.get("foreach", False) is not None or defaults.get("fused") or defaults.get("differentiable"):
            return True
        foreach = attrs.evolve(self, options=FrozenDict({**self.options, "foreach": True}))
        return foreach.trial({"trial": torch.zeros(2, 2)}, steps=3).spared

    def _stepped(
        self, params: Mapping[str, Tensor], steps: int, sparse: bool
    ) -> tuple[torch.optim.Optimizer, list[Tensor], tuple[Kept, Kept], bool]:
        copies = clone_all(list(params.values()))
        optimizer = self.build(copies)
        before = self._kept(optimizer, copies)
        spared = not sparse
        for _ in range(steps):
            grads = [torch.ones_like(copied, requires_grad=False) for copied in copies]
            for copied, ones in zip(copies, grads, strict=True):
                copied.grad = ones.to_sparse() if sparse else ones
            versions = [None if ones.is_inference() else ones._version for ones in grads]
            optimizer.step()
            spared = spared and None not in versions and [ones._version for ones in grads] == versions
        return optimizer, copies, before, spared

    @torch.no_grad()
    def init(self, params: Params) -> OptState:
        if not params:
            return self._state((), (), (), {}, {}, {})
        tried = self.trial(params)
        optimizer = tried.new
        own = optimizer.param_groups[0]["params"]
        built = [_copied(dict(optimizer.state[p])) if p in optimizer.state else {} for p in own]
        learnt = [
            memory_at_start or {key: _blank(value) for key, value in memory.items()}
            for memory_at_start, memory in zip(built, tried.memories(), strict=True)
        ]
        group, attributes = (
            {key: mapping[key] for key in before.changed(after, tried.copies) if key in mapping}
            for before, after, mapping in zip(
                tried.before, self.mappings(tried.after), self.mappings(optimizer), strict=True
            )
        )
        group, attributes = _copied((group, attributes))
        return self._state(params, learnt, map(bool, built), _copied(_shared(optimizer)), group, attributes)

    def _state(
        self,
        names: Iterable[str],
        memories: Iterable[Mapping[str, Any]],
        started: Iterable[bool],
        shared: Mapping[Any, Any],
        group: Mapping[str, Any],
        attributes: Mapping[str, Any],
        removed: Mapping[str, tuple[str, ...]] = FrozenDict(group=(), attributes=()),
    ) -> OptState:
        names = list(names)
        return FrozenDict(
            {
                "class": self.path,
                "memory": FrozenDict(zip(names, map(FrozenDict, memories), strict=True)),
                "started": FrozenDict(zip(names, started, strict=True)),
                "shared": FrozenDict(shared),
                "group": FrozenDict(group),
                "attributes": FrozenDict(attributes),
                "removed": FrozenDict(removed),
            }
        )

    @torch.no_grad()
    def update(
        self, grads: Grads, opt_state: OptState, params: Params, timestamp: Timestamp
    ) -> tuple[Params, OptState]:
        check_state(self.name, opt_state, _KEYS)
        if not params:
            return params, opt_state
        scaled = isinstance(timestamp, ScaledTimestamp)
        return self._step(grads, opt_state, params, lambda lr: rate_at(self.name, lr, timestamp), scaled=scaled)

    @torch.no_grad()
    def overwrite(
        self, grads: Grads, opt_state: OptState, params: Params, timestamp: Timestamp
    ) -> tuple[Params, OptState]:
        """:meth:`update` of unaliased parameters and optimizer state, by a class that only reads gradients."""
        check_state(self.name, opt_state, _KEYS)
        memory, started = opt_state["memory"], opt_state["started"]
        # What the first step makes of blank memory is new, and a class may refuse a sparse gradient half way.
        ready = (
            grad is None or (grad.layout is torch.strided and (started.get(name) or not memory.get(name, True)))
            for name, grad in grads.items()
        )
        if not params:
            return params, opt_state
        # Elsewhere than in dense memory half-precision numbers may be rounded otherwise.
        if not all(ready) or not all(map(is_dense, params.values())):
            new_params, new_state = self.update(grads, opt_state, params, timestamp)
            for name, param in params.items():
                param.copy_(new_params[name])
            return params, _written(opt_state, new_state)
        scaled = isinstance(timestamp, ScaledTimestamp)
        rate: Callable[[RateFunction], float] = lambda lr: rate_at(self.name, lr, timestamp)  # noqa: E731
        return self._step(grads, opt_state, params, rate, scaled=scaled, in_place=True)

    def _step(
        self,
        grads: Grads,
        opt_state: OptState,
        params: Params,
        rate: Callable[[RateFunction], float],
        *,
        scaled: bool = False,
        in_place: bool = False,
    ) -> tuple[Params, OptState]:
        names, values = list(params), list(params.values())
        mappings = {"grads": grads, "memory": opt_state["memory"], "started": opt_state["started"]}
        gradients, memories, started = in_order(mappings, names).values()
        # Other tensors with their memory, because an optimizer's parameters require gradients.
        copies = [value.detach() for value in values] if in_place else clone_all(values)
        optimizer = self.build(copies)
        for name, copied, grad in zip(names, copies, gradients if in_place else _cloned(gradients), strict=True):
            if grad is not None:
                # backward() would bring a gradient into its parameter's layout, and optimizers count on it.
                copied.grad = grad if grad.is_sparse else match_layout(grad, copied, f"the gradient of {name!r}")
        before = self._kept(optimizer, copies)
        # At once, so that a tensor that stands in several places does so in the copies.
        own = _copied(([] if in_place else memories, *(opt_state[key] for key in ("shared", "group", "attributes"))))
        held = memories if in_place else own[0]
        restore(optimizer, zip(held, started, strict=True), own[1], own[2], own[3], opt_state["removed"])
        options = optimizer.param_groups[0]
        fixed: Any = options.get("lr")
        if self.lr is not None or scaled:
            value = rate((lambda timestamp: fixed) if self.lr is None else self.lr)
            # Some classes keep it as a tensor, and take no other.
            options["lr"] = torch.full_like(fixed, value) if isinstance(fixed, Tensor) else value
        optimizer.step()
        if scaled and self.lr is None:
            options["lr"] = fixed  # which the next step scales anew
        new_memories = [
            _in_order_of(old, optimizer.state[copied]) if copied in optimizer.state else old
            for copied, old in zip(copies, held, strict=True)
        ]
        has_started = [
            had_started or bool(optimizer.state.get(p)) for p, had_started in zip(copies, started, strict=True)
        ]
        after = self.mappings(optimizer)
        group = before[0].carried(after[0], opt_state["group"], copies)
        attributes = before[1].carried(after[1], opt_state["attributes"], copies)
        removed = FrozenDict(group=before[0].removed(after[0]), attributes=before[1].removed(after[1]))
        shared = _shared(optimizer)
        if all(map(has_numbers, copies[:1])):  # a graph in the making has tensors of another class
            self._refuse_unholdable(copies, new_memories, shared, group, attributes)
        for copied in copies:
            copied.grad = None
            copied.requires_grad_(False)
        new_state = self._state(names, new_memories, has_started, shared, group, attributes, removed)
        if in_place:
            return params, _written(opt_state, new_state)
        return FrozenDict(zip(names, copies, strict=True)), new_state

    def mappings(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of the parameter group, but for those that every update sets, and the attributes."""
        set_each_time = ("params",) if self.lr is None else ("params", "lr")
        group = {key: value for key, value in optimizer.param_groups[0].items() if key not in set_each_time}
        attributes = {
            key: value for key, value in vars(optimizer).items() if key not in _MACHINERY and not key.endswith("_hooks")
        }
        return group, attributes

    def _kept(self, optimizer: torch.optim.Optimizer, params: list[Tensor]) -> tuple[Kept, Kept]:
        group, attributes = self.mappings(optimizer)
        return Kept.of(group, params), Kept.of(attributes, params)

    # What can't be resumed.

    def _refuse_unresumable(self, tried: _Trial) -> None:
        """Refuse, after a trial, a class that keeps what the next update would not restore."""
        copies, after = tried.copies, tried.after
        for param in copies:
            if vars(param):
                self._refuse(f"it sets attributes on the parameters: {', '.join(vars(param))}")
        ids = {id(param) for param in copies}
        if any(isinstance(key, Tensor) and id(key) not in ids for key in after.state):
            self._refuse("optimizer.state has tensors as keys that are no parameters")
        group, attributes = (
            {key: mapping[key] for key in before.changed(mapping, copies)}
            for before, mapping in zip(tried.before, self.mappings(after), strict=True)
        )
        memories, shared = tried.memories(), _shared(after)
        self._refuse_unholdable(copies, memories, shared, group, attributes, tried=True)
        parts = {"state": memories, "shared": shared, "group": group, "attributes": attributes}
        places = [(where, tensor) for where, tensor in tensors_in(parts) if tensor.numel() and not tensor.is_meta]
        ranges = [(range_of(param), "a parameter") for param in copies if param.numel()]
        seen: set[int] = set()
        for where, tensor in places:
            if id(tensor) in seen:  # several references to one tensor stay so
                continue
            seen.add(id(tensor))
            mine = range_of(tensor)
            owner = next((what for span, what in ranges if overlap(mine, span)), None)
            if owner is not None:
                self._refuse(
                    f"its tensor {where} shares memory with {owner}, and in a State each tensor has memory of its own: "
                    "the class has to keep a copy, .clone()"
                )
            ranges.append((mine, f"another one, {where}"))

    def _refuse_unholdable(
        self,
        copies: list[Tensor],
        memories: Iterable[Mapping[str, Any]],
        shared: Mapping[Any, Any],
        group: Mapping[str, Any],
        attributes: Mapping[str, Any],
        tried: bool = False,
    ) -> None:
        for memory in memories:
            # Of tensors, what a trial has seen is enough for each step.
            if tried or not COMMON.issuperset(map(type, memory.values())):
                self._refuse_values(memory, "state[param]", copies)
        self._refuse_values(shared, "state", copies)
        self._refuse_values(group, "param_groups[0]", copies)
        self._refuse_values(attributes, "", copies)

    def _refuse_values(self, values: Mapping[Any, Any], where: str, copies: list[Tensor]) -> None:
        if not values:
            return
        result = next(unholdable(values, where, {id(param) for param in copies}), None)
        if result is not None:
            place, what = result
            self._refuse(f"{place or 'it'} {what}")

    def _refuse(self, reason: str) -> None:
        raise ArgumentError(
            f"{self.name}: training with {self.cls.__name__} could not be resumed: {reason}. What is kept from step to "
            "step has to be tensors, numbers, texts, or dicts, lists, tuples, sets and deques of such"
        )

    def refuse(self, opt_state: Any, params: Params, keys: frozenset[str] = frozenset()) -> None:
        """Refuse an ``opt_state`` that this class, with these options and parameters, can't resume with.

        Args:
            opt_state: what a State holds.
            params: the parameters that are trained; on the meta device where there are no numbers yet.
            keys: what the class keeps for each parameter, where that is the same for all.

        Raises:
            ResumeError: names what is wrong.
        """
        afresh = "start afresh: fit(state.replace(opt_state=None), ...)."
        advice = f"Resume with the optimizer that made it, or {afresh}"
        if not isinstance(opt_state, Mapping) or opt_state.keys() != set(_KEYS):
            held = sorted(map(str, opt_state)) if isinstance(opt_state, Mapping) else type(opt_state).__name__
            raise ResumeError(
                f"opt_state was made by another optimizer than {self.name}: it holds {held}, and {self.name} needs "
                f"{list(_KEYS)}. {advice}"
            )
        if opt_state["class"] != self.path:
            raise ResumeError(
                f"opt_state was made by another optimizer than {self.name}: by from_torch of {opt_state['class']!r}, "
                f"and this is {self.path!r}. {advice}"
            )
        if not all(isinstance(opt_state[key], Mapping) for key in _KEYS[1:]):
            raise ResumeError(f"opt_state is none that {self.name} makes: its parts are no mappings. {advice}")
        memories, started = opt_state["memory"], opt_state["started"]
        for part in (memories, started):
            if part.keys() != set(params):
                raise ResumeError(
                    f"opt_state was made by {self.name} for another model: it is that of other parameters"
                    f"{where_differs(part, dict.fromkeys(params), 'it')}. "
                    f"Give the State that was made with this model, or {afresh}"
                )
        for name, memory in memories.items():
            if type(started[name]) is not bool:
                raise ResumeError(
                    f"opt_state['started'][{name!r}] is a {type(started[name]).__name__}, and {self.name} needs a bool "
                    f"there. {advice}"
                )
            if not isinstance(memory, Mapping) or (keys and started[name] and memory.keys() != keys):
                held = sorted(map(str, memory)) if isinstance(memory, Mapping) else type(memory).__name__
                raise ResumeError(
                    f"opt_state was made by {self.cls.__name__} with other options: for {name!r} it holds {held}, and "
                    f"with {dict(self.options)} it needs {sorted(keys)}. Resume with the options that it was made "
                    f"with, or {afresh}"
                )
        tensors = [tensor for _, tensor in tensors_in((opt_state, params))]
        if params and not any(is_sharded(tensor) or tensor.is_meta for tensor in tensors):
            if keys:  # of torch's own classes, in which shapes stay as they are
                self._refuse_leaf(opt_state, self.init(params))
            self._try(opt_state, params)

    def _refuse_leaf(self, opt_state: Any, begun: OptState) -> None:
        """Refuse a tensor of another kind or shape than before the first step."""
        for name, memory in opt_state["memory"].items():
            for key, value in memory.items():
                like = begun["memory"][name].get(key)
                if not isinstance(like, Tensor) or not like.ndim:
                    continue
                same = isinstance(value, Tensor) and value.shape == like.shape
                if not same or value.is_floating_point() is not like.is_floating_point():
                    there = shape_and_dtype(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"
                    raise ResumeError(
                        f"opt_state['memory'][{name!r}][{key!r}] is {there}, and {self.name} needs "
                        f"{shape_and_dtype(like)} there: give the State that was made with it, or start afresh: "
                        "fit(state.replace(opt_state=None), ...)."
                    )

    @torch.no_grad()
    def _try(self, opt_state: Any, params: Params) -> None:
        """Take a step from this ``opt_state``, on copies: only the class knows which states it can continue from."""
        grads = {name: torch.ones_like(param, requires_grad=False) for name, param in params.items()}
        with seeded_all(0):
            try:
                self._step(grads, opt_state, params, lambda rate: 1e-3)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                return  # of these gradients, perhaps
            except Exception as error:
                with contextlib.suppress(Exception):
                    sparse = {name: gradient.to_sparse() for name, gradient in grads.items()}
                    self._step(sparse, opt_state, params, lambda rate: 1e-3)
                    return
                raise ResumeError(
                    f"opt_state doesn't fit {self.name} with the options {dict(self.options)}: a step from it fails "
                    f"({type(error).__name__}: {str(error)[:300]}). It is another model's, or was made with other "
                    "options: give the State that was made with these, or start afresh: "
                    "fit(state.replace(opt_state=None), ...)."
                ) from error


# As a state dict.

# What torch's schedulers note in a group, and the names of its parameters.
_OF_OTHERS = frozenset(
    ("initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "params", "param_names")
)


@attrs.frozen
class ClassInTorch:
    """The state of :func:`from_torch` as that of its class (see :class:`~pure_loop.optim.optimizer.InTorch`)."""

    rule: _FromTorch
    lr: RateFunction

    def cls(self) -> type[torch.optim.Optimizer]:
        cls = self.rule.cls
        if cls.state_dict is not torch.optim.Optimizer.state_dict:
            raise ArgumentError(
                f"{self.rule.name}: {cls.__name__} has a state_dict() of its own, of which only it knows the format. "
                "Resume with fit, from the State."
            )
        return cls

    def names(self, params: Params) -> list[list[str]]:
        return [list(params)]

    @torch.no_grad()
    def evaluated(self, opt_state: OptState, params: Params) -> Params | None:
        """The parameters in the class's mode for evaluation; None: it has no modes."""
        rule = self.rule
        if not has_modes(rule.cls):
            return None
        optimizer = self.restored(opt_state, params)
        optimizer.eval()  # type: ignore[attr-defined]
        values = [param.detach() for param in optimizer.param_groups[0]["params"]]
        return FrozenDict(zip(params, values, strict=True))

    def restored(self, opt_state: OptState, params: Params) -> torch.optim.Optimizer:
        """An optimizer of the class on copies of the parameters, with what ``opt_state`` holds."""
        rule, names = self.rule, list(params)
        check_state(rule.name, opt_state, _KEYS)
        memories, started = in_order({key: opt_state[key] for key in ("memory", "started")}, names).values()
        optimizer = rule.build(clone_all(list(params.values())))
        copies = _copied((memories, *(opt_state[key] for key in ("shared", "group", "attributes"))))
        pairs = zip(copies[0], started, strict=True)
        restore(optimizer, pairs, copies[1], copies[2], copies[3], opt_state["removed"])
        return optimizer

    @torch.no_grad()
    def write(self, opt_state: OptState, params: Params, timestamp: Timestamp) -> list[TorchGroup]:
        rule = self.rule
        outside = sorted({*opt_state["attributes"], *opt_state["removed"]["attributes"]})
        if outside:
            raise ArgumentError(
                f"{rule.name}: {rule.cls.__name__} keeps {', '.join(outside)} as attributes, which its state_dict() "
                "leaves out: a loop by hand could not continue from it. Resume with fit, from the State."
            )
        names = list(params)
        optimizer = self.restored(opt_state, params)
        options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        if "lr" in options and not ("lr" in opt_state["group"] and rule.lr is None):
            options["lr"] = rate_at(rule.name, self.lr, timestamp)
        memory = {
            name: dict(optimizer.state[param]) if param in optimizer.state else {}
            for name, param in zip(names, optimizer.param_groups[0]["params"], strict=True)
        }
        return [TorchGroup(options=options, memory=memory, rest=_shared(optimizer))]

    @torch.no_grad()
    def read(self, groups: Sequence[TorchGroup], params: Params) -> OptState:
        (saved,) = groups
        rule = self.rule
        if not params:
            return rule.init(params)
        init = rule.init(params)
        tried = rule.trial({"trial": torch.zeros(2, 2)}, steps=3)
        keys = frozenset(tried.memories()[0]) if rule.cls.__module__.startswith("torch.optim.") else frozenset()
        for name, memory in saved.memory.items():
            if memory and keys and memory.keys() != keys:
                raise ResumeError(
                    f"the state dict holds {sorted(memory)} for parameter {name!r}, and {rule.name} with these options "
                    f"needs {sorted(keys)}: it is of another class than {rule.cls.__name__}, or was made with other "
                    "options. Load it with the optimizer that made it."
                )
        # What the class itself writes to its group is its memory, and all else are options, which the call has.
        learnt = {*init["group"], *tried.before[0].changed(rule.mappings(tried.after)[0], tried.copies)}
        options = {key: value for key, value in tried.new.param_groups[0].items() if key not in _OF_OTHERS | learnt}
        refuse_other_options(rule.name, options, saved.options, ())
        group = {key: value for key, value in saved.options.items() if key not in options and key not in _OF_OTHERS}
        memories = [
            {key: _on_device(key, value, param) for key, value in saved.memory[name].items()}
            for name, param in params.items()
        ]
        started = [bool(memory) for memory in memories]
        blank = in_order({"memory": init["memory"]}, list(params))["memory"]
        filled = [memory or old for memory, old in zip(memories, blank, strict=True)]
        shared, group = _copied((dict(saved.rest), {**init["group"], **group}))
        opt_state = rule._state(params, filled, started, {**init["shared"], **shared}, group, init["attributes"])
        rule.refuse(opt_state, params, keys)
        return opt_state


def _on_device(key: str, value: Any, param: Tensor) -> Any:
    """A copy of a value of a state dict; of a tensor where its parameter is, as torch's own loading has it."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    on_host = key == "step" and value.is_cpu  # where a class counts on the CPU, it does so for all devices
    return value.clone() if on_host else value.to(param.device, copy=True)


def _has_default(cls: type, name: str) -> bool:
    parameter = inspect.signature(cls).parameters.get(name)
    return parameter is not None and parameter.default is not inspect.Parameter.empty


def _shared(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _in_order_of(old: Mapping[str, Any], mapping: Mapping[str, Any]) -> FrozenDict[str, Any]:
    """``mapping`` with its keys in the order of ``old``, which itself is given where it has the same values."""
    if list(mapping) == list(old):
        if type(old) is FrozenDict and all(map(is_, mapping.values(), old.values())):
            return old
        return FrozenDict(mapping)
    keys = [*(key for key in old if key in mapping), *(key for key in mapping if key not in old)]
    return FrozenDict({key: mapping[key] for key in keys})


def _written(old: OptState, result: OptState) -> OptState:
    """``result`` in the tensors of ``old``, where they fit; ``old`` itself where nothing else is in it."""
    before = old["memory"]
    memory = FrozenDict((name, _memory_written(before[name], values)) for name, values in result["memory"].items())
    changed = any(memory[name] is not before[name] for name in memory) or result["started"] != old["started"]
    trees = (tree for state in (old, result) for tree in (*(state[key] for key in _OTHERS), *state["removed"].values()))
    return FrozenDict({**result, "memory": memory}) if changed or any(trees) else old


def _memory_written(old: FrozenDict[str, Any], result: FrozenDict[str, Any]) -> FrozenDict[str, Any]:
    if result is old:
        return old
    values = dict(result)
    for key, value in result.items():
        there = old.get(key)
        if value is there or not (isinstance(value, Tensor) and isinstance(there, Tensor)):
            continue
        # Of sparse gradients the first step makes a sparse memory.
        kind = value.shape, value.dtype, value.device, value.layout
        if kind == (there.shape, there.dtype, there.device, there.layout):
            values[key] = there.copy_(value)
    return _in_order_of(old, values)


def _blank(value: Any) -> Any:
    """What stands for a memory that isn't there yet."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value, requires_grad=False)
    return type(value)() if isinstance(value, bool | int | float) else copy.deepcopy(value)


def _cloned(gradients: list[Tensor | None]) -> list[Tensor | None]:
    copies = iter(clone_all([gradient for gradient in gradients if gradient is not None]))
    return [None if gradient is None else next(copies) for gradient in gradients]


def _copied(tree: Any) -> Any:
    """``tree`` with other tensors and containers; one tensor in several places is one in the copy."""
    leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    copies = dict(zip(tensors, clone_all(list(tensors.values())), strict=True))
    return structure.unflatten(
        copies[id(leaf)] if isinstance(leaf, Tensor) else leaf if type(leaf) in ATOMS else copy.deepcopy(leaf)
        for leaf in leaves
    )
