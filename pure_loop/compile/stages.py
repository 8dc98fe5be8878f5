"""The loop's stages as they are traced: random numbers get groups, updates no branches on data, and errors names.

What a stage computes stays that of :class:`pure_loop.stages.Stages`; only the update is written again, because in eager
steps it reads from the device whether anything was not finite.
"""

from __future__ import annotations

import contextlib
import linecache
import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import attrs
import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pure_loop._internal.pytree import NAMESPACE
from pure_loop.algorithm import Handler
from pure_loop.compile._torch import fake_tensor_class
from pure_loop.compile.draws import Group
from pure_loop.compile.generators import DrawnFromDataError, StrayGeneratorError, TracedGenerator
from pure_loop.compile.kernels import NONFINITE
from pure_loop.compile.mutation import written
from pure_loop.compile.recurrent import RecurrentLayerError, recurrent_layer
from pure_loop.compile.trace import Tracing
from pure_loop.compile.trace_guards import DefaultDtypeError, GuardedCallError
from pure_loop.errors import CompileError, PureLoopError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.loop.batch import LoopStages
from pure_loop.model.model import ModelDef
from pure_loop.model.structure import found_from
from pure_loop.precision import LossScale
from pure_loop.random.guards import Place
from pure_loop.stages.differentiation import refusing_to_differentiate
from pure_loop.stages.loss import measured_loss
from pure_loop.stages.nonfinite import total_loss
from pure_loop.stages.settings import NO_CONTEXT, Code
from pure_loop.stages.update import in_order, select
from pure_loop.stages.workspace import Workspace
from pure_loop.state import State, raw_loss, raw_params, with_fields

__all__ = ["LOSS_BAD", "UPDATE_BAD", "TracedStages", "Untraceable", "traced_handlers", "update"]

# What the one number that a step reports is made of.
LOSS_BAD, UPDATE_BAD = 1, 2

WHERE_POSSIBLE = 'compile="where possible" runs it eagerly between graphs.'
_DRAW = (
    'Draw from pl.random.generator(seed, "name", state.timestamp.batch, device=...), or inside pl.random.seeded(...); '
    + WHERE_POSSIBLE
)
_NUMERIC = "Compute with tensors instead: torch.where(condition, a, b) for a branch; " + WHERE_POSSIBLE


class Untraceable(CompileError):  # noqa: N818 - users see a CompileError
    """A CompileError that knows which part it is about: ``(kind, event)``, by which that part is left out."""

    def __init__(self, message: str, part: tuple[str, Event | None], *, runs_eagerly: bool = False) -> None:
        super().__init__(message)
        self.part = part
        # Whether the part runs eagerly with ``compile=True`` as well.
        self.runs_eagerly = runs_eagerly

    def for_users(self) -> CompileError:
        """The same under the name that is documented."""
        shown = CompileError(*self.args)
        for note in getattr(self, "__notes__", ()):
            shown.add_note(note)
        return shown

    def let_go(self) -> None:
        """Free what the frames of the trace hold, among it what the graph would have been called with."""
        error: BaseException | None = self
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__


@contextmanager
def naming(tracing: Tracing, what: str, part: tuple[str, Event | None]) -> Iterator[None]:
    """Turn an error of the tracer, raised inside user code, into one that names that code.

    What it doesn't notice is an error, too: writing to memory that others read, which a graph has apart.
    """
    last, of_another_dtype = tracing.mark(), False
    try:
        try:
            yield
        finally:
            # The loop's own code follows, also after an error.
            of_another_dtype = torch.get_default_dtype() is not tracing.default_dtype
            if of_another_dtype:
                torch.set_default_dtype(tracing.default_dtype)
    except PureLoopError:
        raise
    except RecurrentLayerError as error:
        raise Untraceable(f"{what} can't be compiled: it calls a recurrent layer.", part, runs_eagerly=True) from error
    # What torch's tracer raises has no class of its own: NotImplementedError is one of them, a RuntimeError too. Others
    # are of code that wants a number of Python's, and is given one that stands for it.
    except (RuntimeError, TypeError, AttributeError) as error:
        raise Untraceable(f"{what} can't be compiled: {_place(error)}{_reason(error)}", part) from error
    if of_another_dtype:
        raise Untraceable(f"{what} can't be compiled: {_reason(DefaultDtypeError())}", part)
    if tracing.stray_draws(last):
        raise Untraceable(
            f"{what} can't be compiled: it draws from torch's global generator, so that no batch could be trained on "
            f"again as it was. {_DRAW}",
            part,
        )
    for node in written(tracing.since(last)):
        if node.op == "get_attr":
            raise Untraceable(
                f"{what} can't be compiled: it writes to a tensor outside of the State. Keep values from step to step "
                f"in the State: state.remember(...), or a buffer of the model; {WHERE_POSSIBLE}",
                part,
            )
        if node in tracing.in_shared_memory():
            raise Untraceable(
                f"{what} can't be compiled: it writes to an argument that shares memory with another tensor (the "
                "targets, if a model learns its inputs), and in a graph each tensor has its own memory. Write to a "
                f"copy: x = x.clone(), or no inplace=True; {WHERE_POSSIBLE}",
                part,
            )


# What torch says of a tensor that has no numbers, and of a number that it can't take for one.
_NUMBERLESS = ("_local_scalar_dense", "tracing tensor", "its data is not allocated yet")
_TAKES_NO_NUMBER = re.compile(
    r"PyList_Check\(arg\) INTERNAL ASSERT|got \([^)]*\bNumber\b"
    r"|^(expand|(new_)?(zeros|ones|empty)|randn?)\(\) takes 1 positional argument but"
)


def _reason(error: BaseException) -> str:
    """What the tracer stumbled over, and what to write instead."""
    text, kind = str(error), type(error).__name__
    if kind == "DataDependentOutputException" or any(element in text for element in _NUMBERLESS):
        return (
            "it reads a number out of a tensor (.item(), float(), int(), bool(), .tolist(), an `if` about a tensor), "
            f"and while a graph is made tensors have no numbers. {_NUMERIC}"
        )
    if isinstance(error, GuardedCallError):
        return f"it calls {text}, and a graph would hold for ever what came of it. {_DRAW}"
    if isinstance(error, DefaultDtypeError):
        return (
            "it computes under another default dtype (torch.set_default_dtype), of which a graph knows nothing: say "
            f"dtype=torch.float64 where a tensor is made, and .to(torch.float64) before integers meet; {WHERE_POSSIBLE}"
        )
    if _TAKES_NO_NUMBER.search(text):
        return (
            "it hands a number of the step to a function of torch's that takes Python's own there, as the first of "
            f"several sizes: write int(number), or the sizes as one tuple; {WHERE_POSSIBLE}"
        )
    if "numpy" in text:
        return f"it hands a tensor to NumPy, which a graph can't hold. {_NUMERIC}"
    if kind == "DynamicOutputShapeException":
        return f"the shape of a result depends on the data (nonzero, unique, boolean indexing). {_NUMERIC}"
    if isinstance(error, StrayGeneratorError):
        return (
            "it draws from a generator of its own, of which no graph knows how far it is, so that no batch could be "
            f"trained on again as it was. {_DRAW}"
        )
    if isinstance(error, DrawnFromDataError):
        return (
            f"it draws random numbers by what the graph is given, or in a way that no graph takes ({text}): write "
            "torch.rand_like(p) < p for torch.bernoulli(p), or mean + std * torch.randn_like(mean) for "
            f"torch.normal(mean, std); {WHERE_POSSIBLE}"
        )
    if any(element in text for element in ("SeedSequence", "manual_seed expected", "has no hash")):
        return f"it seeds a generator of its own with a number that is another one in each step ({text}). {_DRAW}"
    message = text.strip().splitlines()[0] if text.strip() else "no message"
    # It may be the tracer's, or a mistake that eager steps would meet, too.
    advice = "The same batch without compile tells whether the code itself is wrong"
    return f"{kind}: {message}. {advice}; if not, {WHERE_POSSIBLE}"


_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
# Where no code of a user's is; what a with statement leads through is no place, either.
_BETWEEN = (_TORCH, _OURS, contextlib.__file__, random.__file__)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_BETWEEN)]
    ours = [f for f in frames if f.filename.startswith(str(Path(_OURS) / "algorithms"))]
    chosen = (own or ours)[-1:] if (own or ours) else []
    if not chosen or chosen[0].filename.startswith("<"):
        return ""
    frame = chosen[0]
    code = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f"in {Path(frame.filename).name}, line {frame.lineno} (`{code}`), "


def traced_handlers(
    handlers: Mapping[Event, tuple[Handler, ...]], tracing: Tracing, place: Place
) -> dict[Event, tuple[Handler, ...]]:
    """Handlers that record what they read while they are traced, and that errors name when they can't be.

    Args:
        handlers: by event.
        tracing: the trace.
        place: the microbatch under way in it.
    """
    return {
        event: tuple(_traced(handler, event, tracing, place) for handler in listed)
        for event, listed in handlers.items()
    }


def _traced(handler: Handler, event: Event, tracing: Tracing, place: Place) -> Handler:
    what, part = f"algorithm {handler.algorithm!r} at {event.name}", ("handler", event)

    def drawing(state: State, path: tuple[str | int, ...] | None) -> AbstractContextManager[None]:
        if path is None:
            return nullcontext()
        slot: int = state.timestamp.slot  # type: ignore[attr-defined]
        return tracing.drawing(Group.of_code(path, event, place.microbatch, slot, tracing.device))

    def guarded(function: Callable[..., Any], path: tuple[str | int, ...] | None) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            whole = nullcontext() if tracing.begins_with_leaves else _Undifferentiated(what, part)
            with tracing.context.on_behalf_of(what), naming(tracing, what, part), whole, drawing(args[0], path):
                result = function(*args)
                _refuse_memory(what, args[0].algorithm_state.get(handler.algorithm), part)
            return result

        return call

    path = handler.path
    when = None if handler.when is None else guarded(handler.when, None if path is None else (*path, "when"))
    return attrs.evolve(handler, function=guarded(handler.function, path), when=when, path=None)


class _Undifferentiated(TorchFunctionMode):
    """Where the forward is in another graph, a gradient would silently end at what that graph gave."""

    def __init__(self, what: str, part: tuple[str, Event | None]) -> None:
        super().__init__()
        self._what, self._part = what, part

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.autograd.grad, Tensor.backward, torch.autograd.backward):
            raise Untraceable(
                f"{self._what} can't be compiled: it differentiates, and the forward is in another graph, because "
                "an event in between is observed (AFTER_FORWARD or BEFORE_LOSS). Leave that out of watch= and "
                f"callbacks; {WHERE_POSSIBLE}",
                self._part,
            )
        return function(*args, **(kwargs or {}))


def _refuse_memory(what: str, memory: Any, part: tuple[str, Event | None]) -> None:
    """Refuse what a graph would hold as it was when that was made: what NumPy computes, at once, and generators."""
    leaves: list[Any] = optree.tree_leaves(memory, namespace=NAMESPACE)
    if any(isinstance(leaf, TracedGenerator) for leaf in leaves):
        raise Untraceable(f"{what} can't be compiled: its memory is a generator. {_DRAW}", part)
    # By their types: to ask a number anything is to decide by it.
    if any(type(leaf).__module__ == "numpy" for leaf in leaves):
        raise Untraceable(
            f"{what} can't be compiled: its memory is NumPy's, which no graph holds: keep a tensor; {WHERE_POSSIBLE}",
            part,
        )


def _leave_out_recurrence(what: str, model: ModelDef) -> None:
    """
    Raises:
        Untraceable: a layer of the model is recurrent; its forward runs eagerly.
    """
    layer = recurrent_layer(model.skeleton)
    if layer is not None:
        raise Untraceable(
            f"{what} is not compiled: {layer} is a recurrent layer.", ("forward", None), runs_eagerly=True
        )


def _refuse_kept(what: str, model: ModelDef) -> None:
    """Refuse a forward that hands a tensor to an object outside of the module tree: in a trace it has no numbers."""
    for value in model.referred_to():
        if any(isinstance(result, fake_tensor_class()) for result in found_from(value)):
            raise Untraceable(
                f"{what} can't be compiled: it gives a tensor to an object outside of the module tree to keep (a "
                f"{type(value).__name__}, by a hook or an attribute), and Python runs only while a graph is made. "
                f"Return the tensor from the forward; {WHERE_POSSIBLE}",
                ("forward", None),
            )


def _refuse_subclasses(what: str, result: Any) -> None:
    """Refuse what a graph can't give: tensors of other classes than torch's own, and those that aren't dense."""
    plain = (Tensor, torch.nn.Parameter, fake_tensor_class())
    for leaf in optree.tree_leaves(result, namespace=NAMESPACE):
        if isinstance(leaf, Tensor) and (type(leaf) not in plain or leaf.layout is not torch.strided):
            raise Untraceable(
                f"{what} can't be compiled: it returned a tensor of class {type(leaf).__name__} and layout "
                f"{leaf.layout}, and a graph gives dense tensors of torch's own class. Return those; {WHERE_POSSIBLE}",
                ("forward", None),
            )


@attrs.frozen(kw_only=True)
class TracedStages(LoopStages):
    """The loop's stages, on tensors without numbers."""

    tracing: Tracing

    @classmethod
    def of(
        cls, stages: LoopStages, tracing: Tracing, handlers: dict[Event, tuple[Handler, ...]], place: Place
    ) -> TracedStages:
        fields = {field.name: getattr(stages, field.name) for field in attrs.fields(LoopStages) if field.init}
        # Each event has its turn, and what is written to is decided outside.
        fields |= {"handlers": handlers, "observed": frozenset(Event), "workspace": Workspace(), "place": place}
        return cls(**fields, tracing=tracing)

    def gradients(self, state: State) -> State:
        with self.tracing.context.quiet():
            return LoopStages.gradients(self, state)

    def forward(self, state: State, *, index: int = 0, last: bool = True) -> State:
        what = f"the forward of {type(state.model.skeleton).__name__}"
        _leave_out_recurrence(what, state.model)
        with self.tracing.context.quiet(), naming(self.tracing, what, ("forward", None)):
            result = LoopStages.forward(self, state, index=index, last=last)
            self._refuse_other_buffers(what, state, result)
            _refuse_subclasses(what, result.outputs)
            _refuse_kept(what, result.model)
            return result

    def _refuse_other_buffers(self, what: str, state: State, after: State) -> None:
        """Refuse a graph in which buffers come, go, or change shape or dtype: the next batch needs another one."""
        model, before = state.model, state.buffers
        if after.model is model and after.buffers is before:
            return
        result: list[str] = []
        for name in {**before, **after.buffers}:
            was, now = before.get(name), after.buffers.get(name)
            if was is None or now is None:
                result.append(f"{'registers' if was is None else 'removes'} the buffer {name!r}")
            elif was.shape != now.shape or was.dtype is not now.dtype:
                shapes = f"{tuple(was.shape)} {was.dtype} to {tuple(now.shape)} {now.dtype}"
                result.append(f"changes the buffer {name!r} from {shapes}")
        if result or after.model is not model:
            raise Untraceable(
                f"{what} can't be compiled: it {result[0] if result else 'alters the buffers of the model'}, and a "
                "graph has buffers of one shape. Register a buffer of the full size in __init__ and write into it (a "
                "ring buffer, with its position), or call the model on one batch before training; "
                f"{WHERE_POSSIBLE}",
                ("forward", None),
            )

    def loss(self, state: State, *, index: int = 0) -> State:
        with self.tracing.context.quiet(), naming(self.tracing, "the loss", ("forward", None)), self._whole("the loss"):
            result = LoopStages.loss(self, state, index=index)
            self._refuse_other_buffers("the loss", state, result)
            _refuse_subclasses("the loss", result.loss)
            return result

    def _whole(self, what: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.tracing.begins_with_leaves else _Undifferentiated(what, ("forward", None))

    def backward(self, state: State, *, weight: float | Tensor = 1.0) -> State:
        with self.tracing.context.quiet(), naming(self.tracing, "the backward", ("forward", None)):
            state = LoopStages.backward(self, state, weight=weight)
        for name, gradient in (state._grads or {}).items():
            if gradient is not None and gradient.is_sparse:
                raise Untraceable(
                    f"the gradient of {name!r} is sparse, and a graph holds dense tensors: use "
                    f"torch.nn.Embedding(..., sparse=False); {WHERE_POSSIBLE}",
                    ("forward", None),
                )
        return state

    def validate(self, state: State, *, label: str, batch: int, index: int = 0, gradients: bool = False) -> State:
        microbatch, task = state.microbatch, self.task
        what = f"the forward of {type(state.model.skeleton).__name__} in evaluation"
        _leave_out_recurrence(what, state.model)
        # What is frozen in training an evaluation may differentiate by.
        thawed = with_fields(state, frozen=frozenset()) if gradients else state
        params = self.engine.leaves(thawed, index=index, last=False)
        with (
            refusing_to_differentiate("forward", gradients),
            self.running(state, "validate", code=None, gradients=gradients),
            naming(self.tracing, what, ("forward", None)),
        ):
            outputs, buffers, model = self.engine.apply(
                state, lambda module: task.evaluate(module, microbatch), params, training=False
            )
        result = with_fields(state, outputs=outputs, buffers=buffers, model=model)
        self._refuse_other_buffers(what, state, result)
        return result

    def validation_loss(self, state: State, *, gradients: bool = False) -> Tensor:
        with (
            refusing_to_differentiate("loss", gradients),
            self.running(state, "validation loss", code=None, gradients=gradients),
            naming(self.tracing, "the loss in evaluation", ("forward", None)),
        ):
            return measured_loss(self._loss(state, training=False)[0], self.task).detach()

    def seeding(self, state: State, stage: str, index: int = 0, *, code: Code, seed: int | None = None) -> Any:
        if stage == "clip_grad":  # what is drawn there is refused, as in an update
            return NO_CONTEXT
        if code is None:
            return NO_CONTEXT
        return self.tracing.drawing(Group.of_stage(stage, index, state.timestamp.slot, self.tracing.device))  # type: ignore[attr-defined]


def update(
    stages: TracedStages, state: State, buffers: FrozenDict[str, Tensor], **counted: Any
) -> tuple[State, Tensor]:
    """One step of the optimizer without a branch on data, and what was not finite in it; int64, shape ().

    It does what :meth:`pure_loop.stages.Stages.update` does; on a CPU the caller reads the number and raises.
    """
    optimizer, params = stages.optimizer, raw_params(state)
    assert optimizer is not None
    optimizer = state.model.served_by(optimizer)
    trained = state.model.trained(params)
    fields: dict[str, Any] = {}
    context = stages.tracing.context
    what = f"optimizer {optimizer.name!r}"
    with torch.set_grad_enabled(False):
        with context.on_behalf_of(what), naming(stages.tracing, what, ("update", None)):
            new, opt_state = in_order(optimizer, stages.engine.update(optimizer, state, trained), trained)
        loss = total_loss(raw_loss(state))
        old = list(trained.values())
        fresh = [tensor for tensor, before in zip(new.values(), old, strict=True) if tensor is not before]
        grads = [gradient for gradient in state._grads.values() if gradient is not None]
        scale = state.loss_scale
        skips = stages.nonfinite == "skip" or scale is not None
        zero = stages.tracing.lift(torch.float32, lambda env: 0.0)
        bad_loss = ~torch.isfinite(loss.detach())
        if fresh:
            bad_loss = bad_loss.to(fresh[0].device)  # the loss may be on the host, where it would not be reported
        bad_update = NONFINITE(fresh if optimizer.spreads_nonfinite or skips else [*fresh, *grads], zero)
        wrong = bad_loss | bad_update
        if skips:
            _refuse_plain(state.opt_state, opt_state)
            left_out = bad_loss | NONFINITE(grads, zero)
            bad_update = bad_update & ~left_out
            wrong = bad_update if stages.nonfinite == "skip" else bad_update | bad_loss
            new, opt_state = select(left_out, trained, new), select(left_out, state.opt_state, opt_state)
            fields["skipped"] = state.skipped + left_out
            if scale is not None:
                fields["loss_scale"] = _next_scale(scale, left_out)
            if stages.nonfinite == "skip":
                fields["buffers"] = select(left_out, buffers, state.buffers)
        if not wrong.is_cpu:
            batch = state.timestamp.rate("batch", lambda timestamp: float(timestamp.batch))  # type: ignore[attr-defined]
            earlier = cast("Tensor", state.nonfinite)
            noted = torch.zeros_like(earlier) + batch.to(torch.int64)
            fields["nonfinite"] = torch.where(wrong & (earlier < 0), noted, earlier)
        report = wrong.long() * (LOSS_BAD * bad_loss.long() + UPDATE_BAD * bad_update.long())
    fields["params"] = new if trained is params else FrozenDict({**params, **new})
    return with_fields(state, opt_state=opt_state, **fields, **counted), report


def _next_scale(scale: LossScale, bad: Tensor) -> LossScale:
    """:meth:`LossScale.update`, in operations that a compiler sees through."""
    grown = scale.growth_tracker + 1
    grows = grown == LossScale.GROWTH_INTERVAL
    larger = scale.scale * LossScale.GROWTH_FACTOR
    kept = torch.where(grows & torch.isfinite(larger), larger, scale.scale)
    return LossScale(
        torch.where(bad, scale.scale * LossScale.BACKOFF_FACTOR, kept),
        torch.where(bad | grows, torch.zeros_like(grown), grown),
    )


def _refuse_plain(before: Any, after: Any) -> None:
    """A step that may be skipped can't change plain numbers of the optimizer: which ones hold is known to the data."""
    old: list[Any] = optree.tree_leaves(before, namespace=NAMESPACE)
    new: list[Any] = optree.tree_leaves(after, namespace=NAMESPACE)
    if any(a is not b for a, b in zip(old, new, strict=False) if not isinstance(b, Tensor)):
        raise Untraceable(
            "the optimizer counts steps in Python, or a parameter that has no gradient in this batch, and whether a "
            'step counts depends on its data (nonfinite="skip", or a loss scale): take one of pl.optim, freeze a '
            'parameter without a gradient with requires_grad_(False), or write compile="where possible".',
            ("update", None),
        )
