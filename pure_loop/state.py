"""State: everything that training knows, as one immutable value.

A State is a frozen attrs record and a pytree. What a checkpoint holds is *durable*; what belongs to
the batch under way is None outside it. The loop makes a new State for every change and never
writes to one that was yielded, so a State that you keep is a snapshot, and giving it back to
``fit`` resumes from there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypedDict, TypeVar, cast

import attrs
import optree
import torch
from torch import Tensor, nn

from pure_loop._internal import pytree as _pytree
from pure_loop._internal.arguments import check_flag, check_integer, check_number
from pure_loop._internal.hints import SEED_OF_MEMBERS, STATE_KINDS
from pure_loop._internal.pytree import NAMESPACE, Batch, Outputs, PyTree
from pure_loop._internal.records import Record, copier
from pure_loop._internal.reprs import cell, count, number, paragraph, table
from pure_loop._internal.suggestions import Elsewhere, state_hint, state_hints, teaching
from pure_loop.errors import (
    ArgumentError,
    ArgumentTypeError,
    FrozenStateError,
    GradientsNotReadyError,
    NonFiniteError,
    ResumeError,
)
from pure_loop.event import Event, events_between
from pure_loop.frozendict import FrozenDict, Overwritten, OverwrittenValue
from pure_loop.model.model import ModelDef
from pure_loop.model.names import Note, places, reordered, sorted_by
from pure_loop.precision import LossScale
from pure_loop.time import Timestamp

if TYPE_CHECKING:
    from pure_loop.membership import MemberCount, Members

__all__ = ["Loss", "MetricValue", "State", "StateFields"]

S = TypeVar("S", bound="State")
T = TypeVar("T")

Loss: TypeAlias = Tensor | dict[str, Tensor]
"""A loss: a tensor of shape (), or a dict of such with the key ``total``, which is the one that is differentiated."""

MetricValue: TypeAlias = Tensor | float
"""The value of a metric. One whose ``compute`` returns something else, such as a mapping, needs a ``cast``."""


class StateFields(TypedDict, total=False):
    """The fields of a State and the values that :meth:`State.replace` takes for them, for type checkers.

    A State with further fields says that its ``replace`` takes them, too:

    >>> from typing import TYPE_CHECKING, Self, Unpack
    >>> @attrs.frozen(eq=False, kw_only=True)
    ... class Counted(State):
    ...     steps: int = 0
    ...
    ...     if TYPE_CHECKING:
    ...
    ...         def replace(self, *, steps: int = ..., **fields: Unpack[StateFields]) -> Self: ...
    >>> Counted.create(nn.Linear(1, 1)).replace(steps=1).steps
    1
    """

    model: ModelDef
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    opt_state: PyTree
    timestamp: Timestamp
    previous_timestamp: Timestamp
    seed: int
    loss_scale: LossScale | None
    lr_scale: Tensor | None
    stop: bool
    frozen: frozenset[str]
    algorithm_state: Mapping[str, PyTree]
    metrics: Mapping[str, Mapping[str, object]]
    event: Event | None
    position: Event | None
    skipped: Tensor | None
    nonfinite: Tensor | None
    notes: tuple[Note, ...]
    data_seed: int | None
    data: PyTree
    ensemble: Members | None
    evaluator: str | None
    batch: Batch
    microbatch: Batch
    outputs: Outputs
    loss: Loss | None
    grads: Mapping[str, Tensor | None] | None
    grad_norm: Tensor | None


class _NotReady:
    """Stands in ``State._grads`` while an algorithm runs at an event that has no gradients yet."""


NOT_READY = _NotReady()


def _frozen(value: Mapping[str, Any]) -> FrozenDict[str, Any]:
    return value if type(value) is FrozenDict else FrozenDict(value)


def _names_of(value: Iterable[str]) -> frozenset[str]:
    if type(value) is frozenset:
        return value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentTypeError(
            f"state.frozen is a set of names of parameters, and was given {value!r:.60} of type "
            f'{type(value).__name__}: state.replace(frozen={{"0.weight", "0.bias"}}).'
        )
    return frozenset(value)


def _frozen_if_mapping(value: object) -> object:
    return _frozen(value) if isinstance(value, Mapping) else value


# slots=True makes attrs build the class twice; a subclass registers itself each time, which is harmless.
@attrs.frozen(slots=True, eq=False, kw_only=True, repr=False, weakref_slot=False)
class State(Record):
    """Everything that training needs, as an immutable record.

    Durable:
        model: the module's structure, without its numbers (:class:`pure_loop.model.model.ModelDef`); with ``frozen``
            and ``notes`` the static part of the pytree. Trees of States with other notes match; the first one's stay.
        params: parameter names to tensors, as ``model.named_parameters()`` gives them.
        buffers: buffer names to tensors.
        opt_state: the optimizer state, a pytree; None before ``optimizer.init`` was called.
        timestamp: how much training is finished (:class:`pure_loop.Timestamp`).
        previous_timestamp: the timestamp before the last counted batch; cadences compare the two.
        seed: the seed of all random numbers of the run.
        loss_scale: for ``amp_fp16`` the loss scale as a value, else None.
        algorithm_state: what each algorithm keeps from event to event, by its name.
        metrics: evaluator labels to metric names to values: ``state.metrics["val"]["accuracy"]``, those of its last
            evaluation. From the BATCH_END or EPOCH_END after which it is due until its EVAL_END they are not there: a
            MissingNameError says at which event they are.
        event: the event at which this State was yielded.
        position: the last boundary passed, from which ``fit`` resumes.
        skipped: steps skipped because of a loss or gradient that was not finite; int64, shape ().
        lr_scale: a factor of every learning rate, a float64 tensor of shape () on the CPU; None: 1. Algorithms set it,
            outside a batch or at its BATCH_START.
        stop: whether training ends at this boundary, as if ``max_duration`` were reached: after the evaluations and
            the checkpoint that are due there, and the last evaluation. Algorithms set it, at BATCH_END, EPOCH_END,
            ITERATION_END and the checkpoint events that follow them. Training resumes from a State that has stopped
            after ``state.replace(stop=False)``.
        frozen: names of parameters that are not trained for now: they are no autograd leaves, so that a backward ends
            before them, their gradient is None, and no optimizer changes them or its state of them. Algorithms set it,
            outside a batch, at its BATCH_START or at its BATCH_END.
        nonfinite: the first batch with such a loss, gradient or new parameter, -1 if none; int64, shape (), on the
            parameters' device, so that noticing it needs no synchronisation.
        notes: which algorithms changed the names of the model at INIT, and what was renamed, added and removed when it
            was loaded from a file, in order (:class:`pure_loop.model.names.Note`); ``print(*state.notes, sep="\\n")``.
        data_seed: the seed of the order of the data, where that is not ``seed``: that of an ensemble whose members see
            the same batches, and of a member that was taken out of it; None: ``seed``.
        data: where the data stands after the last batch (:class:`pure_loop.data.position.Position`), where its source
            has a state of its own: a stream. None: the timestamp says it, as of data with indices, or the epoch is read
            again when training resumes.
        ensemble: the seeds of the members and which of them have stopped (:class:`pure_loop.membership.Members`);
            None: it is one model. Tensors of a State with members have a leading dimension of members.

    Of the current batch, None outside it:
        evaluator: the label of the current evaluator, from its EVAL_START to its EVAL_END.
        batch: the batch, on the parameters' device.
        microbatch: the current microbatch; after the last one, the last one.
        outputs: what the forward of this microbatch returned; without a graph from AFTER_BACKWARD on.
        loss: the microbatch's loss from AFTER_LOSS to AFTER_BACKWARD, the whole batch's at
            AFTER_TRAIN_BATCH and BATCH_END; a tensor, or a dict with the key ``total``.
        grads: gradients accumulated so far; complete, unscaled and clipped at AFTER_TRAIN_BATCH. Before, at
            AFTER_BACKWARD, they are sums, still to be divided by their factors (weights, loss scale).
        grad_norm: at AFTER_TRAIN_BATCH and BATCH_END the global norm of these gradients, those of the whole batch on
            all ranks, unscaled and before clipping; shape (). It is computed for ``clip_grad=`` with a number, and for
            callbacks with ``needs_grad_norm = True`` (``GradMonitor``); else None.

    From AFTER_FORWARD to BEFORE_BACKWARD ``params`` are autograd leaves, so that a penalty such as
    ``state.loss + 0.1 * state.params["weight"].square().sum()`` has a gradient.

    ``copy.deepcopy`` and ``pickle`` copy every tensor; the copy has no autograd graph.

    Subclasses with further fields (``@attrs.frozen(eq=False, kw_only=True)``) are pytrees, too.

    >>> import torch
    >>> state = State.create(torch.nn.Linear(2, 1), seed=3)
    >>> state.replace(loss=torch.tensor(0.5)).loss
    tensor(0.5000)
    >>> state.loss is None
    True
    """

    model: ModelDef
    params: FrozenDict[str, Tensor] = attrs.field(converter=_frozen)
    buffers: FrozenDict[str, Tensor] = attrs.field(factory=FrozenDict, converter=_frozen)
    opt_state: PyTree = None
    timestamp: Timestamp = attrs.field(factory=Timestamp)
    previous_timestamp: Timestamp = attrs.field(factory=Timestamp)
    seed: int = 0
    loss_scale: LossScale | None = None
    lr_scale: Tensor | None = None
    stop: bool = False
    frozen: frozenset[str] = attrs.field(factory=frozenset, converter=_names_of)
    algorithm_state: FrozenDict[str, PyTree] = attrs.field(factory=FrozenDict, converter=_frozen)
    metrics: FrozenDict[str, FrozenDict[str, MetricValue]] = attrs.field(factory=FrozenDict, converter=_frozen)
    event: Event | None = None
    position: Event | None = None
    skipped: Tensor | None = None
    nonfinite: Tensor | None = None
    notes: tuple[Note, ...] = ()
    data_seed: int | None = None
    data: PyTree = None
    ensemble: Members | None = None
    evaluator: str | None = None
    batch: Batch = None  # as the dataloader and the module give them: no type is known
    microbatch: Batch = None
    outputs: Outputs = None
    loss: Loss | None = None
    _grads: Any = attrs.field(default=None, alias="grads", converter=_frozen_if_mapping)
    grad_norm: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        for field, mapping in _reordered(self).items():
            object.__setattr__(self, field, mapping)
        for field in EXPLAINED:
            getattr(self, field).field = field

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _teach(cls)
        _register(cls)

    @property
    def grads(self) -> FrozenDict[str, Tensor | None] | None:
        """Gradients of this batch by parameter name; None before its first AFTER_BACKWARD.

        A parameter that the loss didn't reach has None, and the optimizer leaves it as it is.

        Raises:
            GradientsNotReadyError: read by an algorithm at an event at which there are none yet.
        """
        lend(self._grads)
        grads = self._grads  # once more; see _noted
        if grads is NOT_READY:
            raise GradientsNotReadyError(
                f"state.grads was read at {self.event.name if self.event else 'no event'}, where this batch has no "
                "gradients yet. They exist at AFTER_BACKWARD, AFTER_TRAIN_BATCH, BATCH_END (and, with several "
                "microbatches, from the first AFTER_BACKWARD of the batch on). Bind the algorithm to one of these "
                "events; gradients that are complete, unscaled and clipped are those of AFTER_TRAIN_BATCH."
            )
        return cast("FrozenDict[str, Tensor | None] | None", grads)

    def __dir__(self) -> list[str]:
        return [name for name in object.__dir__(self) if name not in _ELSEWHERE or name in _names[type(self)]]

    @classmethod
    def create(
        cls: type[S],
        model: nn.Module,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        **fields: Any,
    ) -> S:
        """A fresh State of a module, for scripts of your own; ``fit`` makes its own.

        Args:
            model: the module; it stays as it was, its tensors are copied.
            seed: where the run's random numbers come from.
            device: where the tensors go; None leaves them where they are.
            **fields: other fields of the State, such as ``opt_state``.
        """
        from pure_loop.model.checks import refuse_untrainable

        refuse_untrainable(model)
        check_integer("seed", seed)
        structure, params, buffers = ModelDef.split(model, device=device)
        home = next(iter(params.values())).device
        fields.setdefault("skipped", torch.zeros((), dtype=torch.int64, device=home))
        fields.setdefault("nonfinite", torch.full((), -1, dtype=torch.int64, device=home))
        return cls(model=structure, params=params, buffers=buffers, seed=seed, **fields)

    # The fields by name, so that type checkers refuse a name that is no field. **fields: Unpack[StateFields] would say
    # that, too, but pyright then refuses the replace of a subclass, which takes a field more.
    if TYPE_CHECKING:

        def replace(
            self: S,
            *,
            model: ModelDef = ...,
            params: Mapping[str, Tensor] = ...,
            buffers: Mapping[str, Tensor] = ...,
            opt_state: PyTree = ...,
            timestamp: Timestamp = ...,
            previous_timestamp: Timestamp = ...,
            seed: int = ...,
            loss_scale: LossScale | None = ...,
            lr_scale: Tensor | None = ...,
            stop: bool = ...,
            frozen: frozenset[str] = ...,
            algorithm_state: Mapping[str, PyTree] = ...,
            metrics: Mapping[str, Mapping[str, object]] = ...,
            event: Event | None = ...,
            position: Event | None = ...,
            skipped: Tensor | None = ...,
            nonfinite: Tensor | None = ...,
            notes: tuple[Note, ...] = ...,
            data_seed: int | None = ...,
            data: PyTree = ...,
            ensemble: Members | None = ...,
            evaluator: str | None = ...,
            batch: Batch = ...,
            microbatch: Batch = ...,
            outputs: Outputs = ...,
            loss: Loss | None = ...,
            grads: Mapping[str, Tensor | None] | None = ...,
            grad_norm: Tensor | None = ...,
        ) -> S:
            """A State with some fields changed: ``state.replace(loss=2 * state.loss)``."""

    else:

        def replace(self: S, **changes: object) -> S:
            """A State with some fields changed: ``state.replace(loss=2 * state.loss)``.

            Parameters, buffers and gradients are known by their names, and come in the order of the model's, whatever
            the order of the mapping. So do, if the model is replaced by one that has the names in another order, the
            optimizer state and the algorithm state.

            Raises:
                ArgumentError: a name that is no field of the State.
                ArgumentTypeError: something else than a mapping for params, buffers, grads, metrics or algorithm_state,
                    than a set of names for frozen, a ModelDef for model, a Timestamp for timestamp, or an int for seed.
            """
            values: dict[str, object] = {}
            for name, value in changes.items():
                if name in _MAPPINGS:
                    values["_grads" if name == "grads" else name] = _as_mapping(name, value)
                elif name == "frozen":
                    values[name] = _names_of(value)
                elif name in _names[self.__class__]:
                    if name in STATE_KINDS:
                        _refuse_kind(name, value, self.ensemble)
                    values[name] = value
                else:
                    raise ArgumentError(_no_field(type(self), name))
            state = with_fields(self, **values)
            if "model" in changes:
                state = sort_by_model(state, self.model)
            elif not _KNOWN_BY_NAME.isdisjoint(changes):
                state = _in_order(state)
            return state

    __replace__ = replace

    def remember(self: S, name: str, memory: PyTree) -> S:
        """A State in which the algorithm ``name`` has this memory, any pytree."""
        return self.replace(algorithm_state={**self.algorithm_state, name: memory})

    def count_batch(self: S, samples: int, tokens: int = 0, seconds: float = 0.0) -> S:
        """A State that has finished one batch more: both timestamps move, so that cadences see it.

        The loop counts for itself; this is for scripts of your own, before they yield BATCH_END.

        Raises:
            ArgumentTypeError, ArgumentError: a count that is no int of at least 0, or seconds that are no finite number
                of at least 0.

        >>> import torch
        >>> state = State.create(torch.nn.Linear(1, 1)).count_batch(samples=8)
        >>> state.timestamp.batch, state.timestamp.sample, state.previous_timestamp.batch
        (1, 8, 0)
        """
        samples, tokens = check_integer("samples", samples, least=0), check_integer("tokens", tokens, least=0)
        timestamp = self.timestamp.next_batch(samples, tokens, check_number("seconds", seconds, least=0))
        return self.replace(timestamp=timestamp, previous_timestamp=self.timestamp)

    def has_ended(self) -> bool:
        """Whether training ends at this boundary: an algorithm stopped it, or ``max_duration`` is reached.

        >>> import torch
        >>> state = State.create(torch.nn.Linear(1, 1))
        >>> state.has_ended(), state.replace(stop=True).has_ended()
        (False, True)
        """
        return self.stop or self.timestamp.has_ended()

    def why_ended(self) -> str:
        """Why training ends at this boundary, in words; ``""``: it doesn't.

        An algorithm that sets ``stop`` says why under the key ``"why"`` of its algorithm state, as ``early_stopping``
        and ``threshold_stopping`` do: metric, best value and when it was.

        >>> import torch
        >>> state = State.create(torch.nn.Linear(1, 1))
        >>> state.why_ended(), state.replace(stop=True).remember("mine", {"why": "it is Friday"}).why_ended()
        ('', 'mine: it is Friday')
        """
        if not self.stop:
            return f"max_duration={str(self.timestamp.max_duration)!r} is reached" if self.has_ended() else ""
        memories = [(name, memory) for name, memory in self.algorithm_state.items() if isinstance(memory, Mapping)]
        reasons = [(name, memory.get("why")) for name, memory in memories]
        listed = [f"{name}: {why}" for name, why in reasons if isinstance(why, str) and why]
        return "; ".join(listed) or "an algorithm set state.stop"

    @property
    def members(self: S) -> MemberCount[S]:
        """How many members there are, 0 of one model; ``state.members([0, 3])`` is a State of some, in this order.

        Iterated over, it gives the State of each.

        >>> import torch, pure_loop as pl
        >>> states = [State.create(torch.nn.Linear(2, 1), seed=seed) for seed in range(4)]
        >>> stacked = pl.stack(states)
        >>> stacked.members, stacked.members([3, 0]).members, states[0].members
        (4, 2, 0)
        """
        from pure_loop.membership import MemberCount, fields_of_members  # one model has no use for it

        def some(indices: Sequence[int] | Tensor) -> S:
            return with_fields(self, **fields_of_members(self, indices))

        return MemberCount(self, some)

    def member(self: S, index: int) -> S:
        """The State of one member of an ensemble: a State of one model, from which training resumes alone.

        Args:
            index: its number, from 0; from the end, if it is negative.

        Raises:
            ArgumentError: the State has no members, or none of this number.
            ArgumentTypeError: the number is no int.

        >>> import torch, pure_loop as pl
        >>> stacked = pl.stack([State.create(torch.nn.Linear(2, 1), seed=seed) for seed in (3, 4)])
        >>> stacked.params["weight"].shape, stacked.member(1).params["weight"].shape, stacked.member(1).seed
        (torch.Size([2, 1, 2]), torch.Size([1, 2]), 4)
        """
        from pure_loop.membership import fields_of_member  # one model has no use for it

        return with_fields(self, **fields_of_member(self, index))

    @teaching
    def module(self, *, training: bool = True) -> nn.Module:
        """A plain ``nn.Module`` with copies of the parameters and buffers; yours to use and to change.

        Where the State is sharded, all ranks call it together.

        Args:
            training: True: in train mode, as ``fit`` trains it: submodules that were in eval mode in a model that was
                not stay in eval mode. False: all of it in eval mode, to predict with or to export.

        Raises:
            ArgumentTypeError: ``training`` is no bool.
            ArgumentError: the State has members: ``state.member(i).module()`` is one of them.
            DistributedError: the State is sharded, and not all ranks call it within the timeout of the last stream.

        >>> import torch
        >>> state = State.create(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()))
        >>> state.module().training, state.module(training=False).training
        (True, False)
        """
        check_flag("training", training, where="state.module", example="state.module(training=False) for eval mode")
        self._refuse_members("module()")
        return self.model.module(self.params, self.buffers, training=training)

    @teaching
    def with_module(self: S, module: nn.Module) -> S:
        """A State that trains ``module`` instead: how model surgery is done, at INIT.

        >>> import torch
        >>> def widen(state):
        ...     module = state.module()
        ...     module[0] = torch.nn.Linear(2, 8)
        ...     module[2] = torch.nn.Linear(8, 1)
        ...     return state.with_module(module)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> widen(State.create(net)).params["0.weight"].shape
        torch.Size([8, 2])
        """
        from pure_loop.model.checks import refuse_untrainable

        refuse_untrainable(module)
        self._refuse_members("with_module(module)")
        structure, params, buffers = ModelDef.split(module, device=self.device)
        frozen = self.frozen & params.keys()
        return self.replace(model=structure, params=params, buffers=buffers, frozen=frozen)

    def _refuse_members(self, call: str) -> None:
        """
        Raises:
            ArgumentError: the State has members.
        """
        if self.ensemble is not None:
            raise ArgumentError(
                f"state.{call}: the State has {len(self.ensemble)} members, and a module is one model: "
                f"state.member(0).{call} is that of the first."
            )

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return device_of(self)

    def check_finite(self) -> None:
        """Raise if some batch had a loss or gradient that was not finite; waits for the device.

        The loop calls it where it reads from the device anyway; call it wherever you do.

        Raises:
            NonFiniteError: names the first such batch, and of an ensemble the member.
        """
        first = self._first_nonfinite()
        if first is not None:
            batch, where = first
            error = NonFiniteError(
                f"the loss, a gradient or a parameter after the step of batch {batch}{where} was NaN or infinite "
                f"(noticed at batch {self.timestamp.batch}). {NON_FINITE_ADVICE}"
            )
            error.index = batch
            raise error

    def _first_nonfinite(self) -> tuple[int, str] | None:
        """The first batch with a number that was not finite, and in an ensemble of which members, in words."""
        from pure_loop.membership import first_nonfinite  # looked at seldom

        return None if self.nonfinite is None else first_nonfinite(self.nonfinite)

    if not TYPE_CHECKING:  # to type checkers, too, a State has neither items nor an iterator

        def __getitem__(self, key: object) -> NoReturn:
            if key in _names[type(self)]:
                what = f"state.{key}"
            elif key in self.metrics:
                what = f"state.metrics[{key!r}]"
            elif isinstance(key, str) and key in self.params:
                what = f"state.params[{key!r}]"
            else:
                what = "a field: state.params, state.timestamp, state.metrics"
            raise ArgumentTypeError(f"state[{key!r}]: a State is a record, whose fields are attributes; write {what}.")

        __iter__ = None  # else Python would iterate by __getitem__

        def __call__(self, *_: object, **__: object) -> NoReturn:
            raise ArgumentTypeError(
                "a State is a record, and no module that could be called: write state.module(training=False)(inputs), "
                "or pl.predict(state, dataloader)."
            )

    def __deepcopy__(self: S, memo: dict[int, Any]) -> S:
        from pure_loop.data.batch import tensors_in  # which needs States

        for name in ("batch", "microbatch", "outputs", "loss"):
            for tensor in tensors_in(getattr(self, name)):
                if not tensor.is_leaf:  # a graph can't be copied
                    memo[id(tensor)] = tensor.detach().clone()
        cls, fields = self.__reduce__()[1]
        return cast("S", cls(**cast("dict[str, Any]", copy.deepcopy(fields, memo))))

    def __reduce__(self) -> tuple[Callable[..., State], tuple[type[State], dict[str, object]]]:
        # By names, so that fields of subclasses are never lost, nor tied to the order of others.
        fields = {public: getattr(self, attribute) for attribute, public in _fields[type(self)]}
        return _rebuild, (type(self), {name: None if value is NOT_READY else value for name, value in fields.items()})

    def __repr__(self) -> str:
        at = self.event.value if self.event is not None else "no event"
        loss = raw_loss(self)
        parts = [at, str(self.timestamp), model_in_words(self)]
        parts += [f"loss {self._cell(loss)}"] if isinstance(loss, Tensor) else []
        parts += [f"metrics of {label} ({self._numbers(values)})" for label, values in self.metrics.items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __str__(self) -> str:
        """Where it is and what has happened, in a few lines; numbers are read, which waits for their device."""
        lines = [paragraph(name, text, _MARGIN) for name, text in self._rows()]
        return "\n".join([self._place(), *lines])

    def _repr_html_(self) -> str:
        return table(self._rows(), caption=self._place())

    def _place(self) -> str:
        return f"{type(self).__name__} at {self.event.name if self.event is not None else 'no event'}, {self.timestamp}"

    def _rows(self) -> list[tuple[str, str]]:
        """Fields that have something to tell, by their names, in words."""
        loss, memory = raw_loss(self), raw_opt_state(self)
        measured = [f"{label}: {self._numbers(values)}" for label, values in self.metrics.items()]
        skipped = number(self.skipped.sum() if self.members and self.skipped is not None else self.skipped)
        nonfinite = self._first_nonfinite()
        rows = [
            ("members", "" if self.ensemble is None else str(self.ensemble)),
            ("evaluator", self.evaluator or ""),
            ("loss", self._numbers(loss) if isinstance(loss, dict) else self._cell(loss)),
            ("metrics", "; ".join(measured)),
            ("model", model_in_words(self)),
            ("opt_state", ", ".join(map(str, memory)) if type(memory) is FrozenDict else cell(memory)),
            ("algorithm_state", ", ".join(self.algorithm_state)),
            ("lr_scale", self._cell(self.lr_scale)),
            ("data", "" if self.data is None else str(self.data)),
            ("stop", "True" if self.stop else ""),
            ("skipped", f"{skipped:,} steps" if isinstance(skipped, int) and skipped else ""),
            ("nonfinite", "" if nonfinite is None else f"first at batch {nonfinite[0]}{nonfinite[1]}"),
            ("notes", "; ".join(map(str, self.notes))),
        ]
        rows += [
            (name, cell(getattr(self, attribute))) for attribute, name in _fields[type(self)][len(_fields[State]) :]
        ]
        return [(name, text) for name, text in rows if text not in ("", "None")]

    def _cell(self, value: object) -> str:
        """A value in words: of an ensemble the numbers of its members."""
        if self.ensemble is None or not isinstance(value, Tensor) or value.shape != (len(self.ensemble),):
            return cell(value)
        from pure_loop._internal.members import in_words  # one model has none

        return in_words(value)

    def _numbers(self, values: Mapping[str, object]) -> str:
        return ", ".join(f"{name} {self._cell(value)}" for name, value in values.items())


def lend(mapping: object) -> None:
    """Note on a mapping of a State, and on that with which it shares memory, that code outside of the loop has read it.

    That code may keep what is in it.
    """
    while isinstance(mapping, FrozenDict):
        if getattr(mapping, "lent", None) is None:
            mapping.lent = True
        mapping = getattr(mapping, "origin", None)


_MARGIN = 19


def model_in_words(state: State) -> str:
    """The class of the model, and how many parameters it has, where and of which dtype."""
    params = raw_params(state)
    name = type(state.model.skeleton).__name__
    if isinstance(params, Overwritten):
        return f"{name}, parameters {params.lent[1]}"
    tensors = getattr(params, "origin", params)
    trained = set(state.model.trainable) - state.frozen
    frozen = sum(tensor.numel() for name, tensor in tensors.items() if name not in trained)
    if state.members:  # the words are those of one
        tensors, name = {key: tensor[0] for key, tensor in tensors.items()}, f"{state.members} times {name}"
        frozen //= state.members
    size = count(sum(tensor.numel() for tensor in tensors.values()), "parameter", "parameters")
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    of_them = f" ({frozen:,} of them frozen)" if frozen else ""
    where = f"on {device_of(state)}, {' and '.join(dtypes)}"
    return f"{name}, {size} in {count(len(tensors), 'tensor', 'tensors')}{of_them}, {where}"


# What a step may write to, where nothing but the loop has read it: to read it is noted on its mapping, and what has a
# graph that goes through the parameters is noted on theirs. Code of the loop, which keeps nothing of them, reads past
# the note by these functions.
raw_params: Callable[[State], FrozenDict[str, Tensor]] = vars(State)["params"].__get__
raw_opt_state: Callable[[State], PyTree] = vars(State)["opt_state"].__get__
raw_outputs: Callable[[State], Outputs] = vars(State)["outputs"].__get__
raw_loss: Callable[[State], Any] = vars(State)["loss"].__get__
_raw = {"params": raw_params, "opt_state": raw_opt_state, "outputs": raw_outputs, "loss": raw_loss}


def _may_have_graph(value: PyTree) -> bool:
    """Whether parameters may be reached from an output or a loss: by a graph, or by what can't be looked into."""
    if type(value) is Tensor:
        return value.requires_grad
    leaves: list[object] = optree.tree_leaves(value, namespace=NAMESPACE)
    return any(
        leaf.requires_grad if isinstance(leaf, Tensor) else not isinstance(leaf, _WITHOUT_GRAPH) for leaf in leaves
    )


_WITHOUT_GRAPH = (int, float, complex, str, bytes, OverwrittenValue)


def _noted(name: str) -> property:
    """A property in front of the slot of this name, which notes that it was read."""
    slot: Any = vars(State)[name]
    read = slot.__get__

    def read_mapping(state: State) -> Any:
        lend(read(state))
        # Once more: a step of another thread may have come before the note, and sees it from now on.
        return read(state)

    def read_graph(state: State) -> Any:
        value = read(state)
        if _may_have_graph(value):
            lend(raw_params(state))
        return value

    return property(read_mapping if name in ("params", "opt_state") else read_graph, slot.__set__, slot.__delete__)


State._slots_behind = {name: f"_{name}" for name in _raw}
for _name in _raw:
    setattr(State, f"_{_name}", vars(State)[_name])
    setattr(State, _name, _noted(_name))


NON_FINITE_ADVICE = (
    "Lower the learning rate, clip the gradients (clip_grad=1.0) or look at the data of that batch; "
    'nonfinite="skip" leaves such a batch out of training and counts it in state.skipped.'
)


def _rebuild(cls: type[S], fields: dict[str, Any]) -> S:
    return cls(**fields)


def _refuse_assignment(self: State, name: str, value: Any = None) -> NoReturn:
    raise FrozenStateError(
        f"state.{name} can't be changed: a State is a value. Make another one, state = state.replace({name}=...); an "
        "algorithm returns it."
    )


def _teach(cls: type) -> None:
    """What attrs writes for a subclass, as State has it: errors that teach, a repr that prints no tensors."""
    # Of the two times that attrs builds a subclass with slots, the first must not have it yet.
    if "__attrs_attrs__" not in vars(cls):
        return
    cls.__setattr__ = cls.__delattr__ = _refuse_assignment  # type: ignore[assignment]
    written = vars(cls).get("__repr__")
    if written is not None and written.__code__.co_filename.startswith("<attrs generated"):
        cls.__repr__ = State.__repr__  # type: ignore[assignment]


_teach(State)


def _as_mapping(name: str, value: object) -> object:
    if isinstance(value, Mapping) or (value is None and name == "grads"):
        mapping = _frozen_if_mapping(value)
        if name in EXPLAINED and type(mapping) is FrozenDict:
            mapping.field = name
        return mapping
    raise ArgumentTypeError(
        f"{name} is a mapping of names, and state.replace was given {type(value).__name__}: "
        f"state.replace({name}={{**state.{name}, name: value}})."
    )


# In a compiled step an object that is no int stands for a seed.
_NO_SEED = (bool, float, str, Tensor, type(None))


def _refuse_kind(name: str, value: object, members: Members | None) -> None:
    if name == "seed" and members is not None:
        raise ArgumentError(SEED_OF_MEMBERS)
    kind = ModelDef if name == "model" else Timestamp
    if isinstance(value, _NO_SEED) if name == "seed" else not isinstance(value, kind):
        raise ArgumentTypeError(STATE_KINDS[name].format(type(value).__name__))


_KNOWN_BY_NAME = frozenset({"params", "buffers", "grads"})
# The error about a name that their mapping lacks depends on the field.
EXPLAINED = ("metrics", "algorithm_state")


def _reordered(state: Any) -> dict[str, FrozenDict[str, Any]]:
    """Of parameters, buffers and gradients those that are in another order than the model's names, in that order."""
    model, result = state.model, {}
    if not isinstance(model, ModelDef):
        return {}  # which is refused where it is trained
    of_model = ("params", model.parameter_names), ("buffers", model.buffer_names), ("_grads", model.trainable)
    for field, names in of_model:
        mapping = _raw.get(field, attrgetter(field))(state)
        if type(mapping) is FrozenDict and (ordered := sorted_by(names, mapping)) is not mapping:
            result[field] = ordered
    return result


def _in_order(state: S) -> S:
    """The State with parameters, buffers and gradients in the order of the model's names."""
    values = _reordered(state)
    return with_fields(state, **values) if values else state


def order_of(model: ModelDef) -> dict[str, int]:
    """The places of the model's names: of its parameters, and then of its buffers."""
    return places(model.parameter_names, model.buffer_names)


def sort_by_model(state: S, before: ModelDef | None = None) -> S:
    """The State with parameters, buffers, gradients and the optimizer state in the order of its model's names.

    Where ``before`` is the model that it had, so is what algorithms keep in the order of that.
    """
    state = _in_order(state)
    wanted, were = order_of(state.model), None if before is None else order_of(before)
    memories = state.algorithm_state if were is None else reordered(state.algorithm_state, wanted, were)
    return with_fields(state, opt_state=reordered(raw_opt_state(state), wanted, were), algorithm_state=memories)


_ENDS = events_between(Event.BATCH_END, Event.EPOCH_CHECKPOINT)
# The boundaries at which an algorithm may end training.
STOPPING = _ENDS | events_between(Event.ITERATION_END, Event.ITERATION_CHECKPOINT)
# The events from which a kept State resumes. FIT_START is left out: a resumed call yields it, and the State it yields
# there must still name the boundary that it came from.
POSITIONS = STOPPING | {Event.AFTER_LOAD, Event.EPOCH_START, Event.FIT_END, Event.ITERATION_START}
_MAPPINGS = frozenset({"params", "buffers", "algorithm_state", "metrics", "grads"})
_OF_A_BATCH = ("event", "evaluator", "batch", "microbatch", "outputs", "loss", "_grads", "grad_norm")


class _OfClass(dict[type, T]):
    """What is made for each class of States, when it is first asked for."""

    def __init__(self, make: Callable[[type], T]) -> None:
        self._make = make

    def __missing__(self, cls: type) -> T:
        self[cls] = self._make(cls)
        return self[cls]


# (attribute, public name) of each field; and the public names alone.
_fields = _OfClass(lambda cls: tuple((field.name, field.alias or field.name) for field in attrs.fields(cls)))
_names = _OfClass(lambda cls: frozenset(public for _, public in _fields[cls]))
_outside = _OfClass(lambda cls: copier(cls, without=_OF_A_BATCH))
# By class: ``(state, event, position) -> State`` of an event: a copy, to which nothing refers but the caller.
at_event = _OfClass(lambda cls: copier(cls, "event", "position"))


def seal(state: S, event: Event) -> S:
    """The State of an event."""
    sealed: S = at_event[type(state)](state, event, position_at(event, state))
    return sealed


def position_at(event: Event, state: State) -> Event | None:
    """The boundary from which training resumes, at this event."""
    # A State that was loaded from a checkpoint resumes from the boundary at which that was saved.
    passed = event in POSITIONS and (event is not Event.AFTER_LOAD or state.position is None)
    return event if passed else state.position


def setter(*fields: str, without: tuple[str, ...] = ()) -> Mapping[type, Callable[..., State]]:
    """By class: a function ``(state, *values) -> State`` with new values of these fields, by the names of slots.

    ``without`` are fields that it leaves out: they are None.
    """
    return _OfClass(lambda cls: copier(cls, *fields, without=without))


# The State after a batch and outside of it: ``(state, timestamp, previous_timestamp, position) -> State``.
after_batch = setter("timestamp", "previous_timestamp", "position", without=_OF_A_BATCH)


def device_of(state: State) -> torch.device:
    """Where the parameters of a State are."""
    params = raw_params(state)
    # Leaves are made at the first access, and this is none.
    tensor: Tensor = next(iter(getattr(params, "origin", params).values()))
    return tensor.device


def with_fields(state: S, /, **fields: object) -> S:
    """A State with these fields, by the names of slots: ``_grads``; nothing is converted or checked."""
    cls: Any = type(state)
    copy: Callable[..., S] = copier(cls, *fields)
    return copy(state, *fields.values())


def outside_batch(state: S) -> S:
    """The State without an event and without what belongs to a batch."""
    outside: S = _outside[type(state)](state)
    return outside


def _no_field(cls: type, name: str) -> str:
    names = ", ".join(public for _, public in _fields[cls])
    return (
        f"{cls.__name__} has no field {name!r}{state_hint(name, _names[cls], _COUNTED)}; it has {names}. An "
        "algorithm's own memory goes into algorithm_state (state.remember(name, memory)); more fields come by "
        "subclassing State."
    )


# What a pytree of a State has besides its leaves.
_STATIC = ("model", "frozen", "notes")


@attrs.frozen
class _Aside:
    """The notes in the static part of a pytree, where they don't matter for whether two States match."""

    notes: tuple[Note, ...] = attrs.field(eq=False)


def _flatten(state: State) -> tuple[Sequence[object], object, Sequence[str]]:
    names, children = [], []
    for attribute, public in _fields[type(state)]:
        if public not in _STATIC:
            child = getattr(state, attribute)
            if isinstance(child, Overwritten | OverwrittenValue):
                child.refuse_reading()  # as a leaf it would be lost without an error
            names.append(public)
            children.append(None if child is NOT_READY else child)
    return children, (state.model, state.frozen, _Aside(state.notes)), names


def _register(cls: type) -> None:
    def unflatten(static: tuple[ModelDef, frozenset[str], _Aside], children: Iterable[PyTree]) -> Any:
        state: Any = object.__new__(cls)
        for attribute, value in zip(_STATIC, (*static[:2], static[2].notes), strict=True):
            object.__setattr__(state, attribute, value)
        attributes = (attribute for attribute, public in _fields[cls] if public not in _STATIC)
        for attribute, child in zip(attributes, children, strict=True):
            if attribute in EXPLAINED and type(child) is FrozenDict:
                child.field = attribute
            object.__setattr__(state, attribute, child)
        return state

    _pytree.register(cls, _flatten, unflatten, attributes=True)


_register(State)

_COUNTED = tuple(field.name for field in attrs.fields(Timestamp))
_ELSEWHERE = state_hints((*_names[State], *vars(State)), _COUNTED)
for _name, _place in _ELSEWHERE.items():
    setattr(State, _name, Elsewhere(_name, _place))


def refuse_no_state(value: object, call: str, of_module: str = "") -> None:
    """
    Args:
        value: what was passed.
        call: how the function is called, ``"save(state, path)"``.
        of_module: what to write where it is a module.

    Raises:
        ArgumentTypeError: the value is no State.
    """
    if not isinstance(value, State):
        function, name = call.partition("(")[0], type(value).__name__
        more = f"; of a module: {of_module}" if of_module and hasattr(value, "named_parameters") else ""
        raise ArgumentTypeError(f"{function}: {name} is not a State: write {call}{more}.")


def refuse_misfit(state: State) -> None:
    """Refuse a State with tensors that don't fit its model.

    Raises:
        ResumeError: names the leaf, what the model has and what the State has.
    """
    model = state.model
    for kind, names, wanted, value in (
        ("params", model.parameter_names, dict(model.skeleton.named_parameters()), state.params),
        ("buffers", model.buffer_names, model.fixed_buffers(), state.buffers),
    ):
        missing, unknown = set(names) - value.keys(), value.keys() - set(names)
        if missing or unknown:
            named = (("missing", missing), ("unknown", unknown))
            raise ResumeError(
                f"this State's {kind} are another model's: "
                + "; ".join(f"{what} {sorted(names)[:3]}" for what, names in named if names)
                + ". Give a State that was made with this model, or state.with_module(module), which "
                "has the module's own numbers; pl.load(path, model=module, exclude=[...]) keeps those that fit."
            )
        for name, tensor in wanted.items():
            if tensor.shape != value[name].shape[state.ensemble is not None :]:
                raise ResumeError(
                    f"{kind}[{name!r}] has shape {tuple(value[name].shape)} in this State and "
                    f"{tuple(tensor.shape)} in its model: the State is another model's."
                )
    problem = frozen_problem(state.frozen, model)
    if problem is not None:
        raise ResumeError(f"this State's frozen {problem}.")


def frozen_problem(frozen: frozenset[str], model: ModelDef) -> str | None:
    """What is wrong with these names of frozen parameters of a model, if anything."""
    unknown = frozen - set(model.parameter_names)
    if unknown:
        more = ", ..." if len(model.parameter_names) > 4 else ""
        return (
            f"names {', '.join(sorted(map(repr, unknown))[:3])}, which the model doesn't have; its parameters are "
            f"{', '.join(model.parameter_names[:4])}{more}"
        )
    if not set(model.trainable) - frozen:
        return "names all parameters that are trained: nothing would be left to train"
    return None
