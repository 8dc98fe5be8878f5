"""The settings of stages, and what their code runs under: random numbers no other thread draws, precision, autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Literal, TypeAlias

import attrs
import optree
import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import check_choice, is_number, positive_or_none, refusal
from pure_loop._internal.frames import calls_watched, is_watched
from pure_loop._internal.pytree import NAMESPACE, Batch
from pure_loop._internal.torch_private import (
    DispatchMode,
    any_autocast_enabled,
    any_global_hook,
    code_around_operations,
    no_dispatch,
    without_compiler,
)
from pure_loop.data.group import parts_of
from pure_loop.errors import ImpurityError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer
from pure_loop.precision import Precision, PrecisionName
from pure_loop.random.authors import is_users, runs_users_code
from pure_loop.random.guards import Place, guard
from pure_loop.random.seeds import SeededHosts, derive, generators_of, seeded, state_of
from pure_loop.stages.engine import ONE_RANK, Engine
from pure_loop.stages.workspace import Workspace
from pure_loop.state import State, device_of, raw_params
from pure_loop.task import Task, default_forward

# Which code draws in a stage; None: nothing is drawn.
Code: TypeAlias = Literal["users", "torch"] | None
ClipGrad: TypeAlias = Callable[[FrozenDict[str, Any], FrozenDict[str, Tensor]], FrozenDict[str, Any]]

NO_CONTEXT: AbstractContextManager[None] = nullcontext()
# Stages of which strict=True sees to it that no other thread draws meanwhile.
_CHECKED = frozenset({"forward", "loss", "validate", "validation loss"})


def _precision(value: Precision | PrecisionName) -> Precision:
    return Precision.parse(value)


def _size(value: int | None) -> int | None:
    return positive_or_none("microbatch_size", value, where="Stages")


@attrs.frozen(kw_only=True)
class StageSettings:
    """What :class:`~pure_loop.stages.stages.Stages` is made with; its fields are described there."""

    task: Task
    optimizer: Optimizer | None = None
    precision: Precision = attrs.field(factory=lambda: Precision.parse("fp32"), converter=_precision)
    microbatch_size: int | None = attrs.field(default=None, converter=_size)
    found: FoundSize | None = None
    clip_grad: float | ClipGrad | None = None
    nonfinite: str = "error"
    measures_norm: bool = False
    engine: Engine = ONE_RANK
    workspace: Workspace = attrs.field(factory=Workspace, repr=False, eq=False)
    strict: bool = False
    place: Place = attrs.field(factory=Place, repr=False, eq=False)
    # The stages in which functions run that were passed, and are neither torch's nor the library's.
    users_stages: frozenset[str] = attrs.field(init=False, repr=False, eq=False)
    # Those of a loss that is a module: they may be registered at any time.
    hooks_of_loss: tuple[Mapping[int, Any], ...] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        task: Any = self.task
        optimizer: Any = self.optimizer
        clip: Any = self.clip_grad
        if not isinstance(task, Task):
            raise refusal("task", task, "of the library, such as pl.Task(loss=...)", "Stages")
        if not isinstance(optimizer, Optimizer | None):
            raise refusal("optimizer", optimizer, "of the library, such as pl.optim.adamw(lr=1e-3)", "Stages")
        if not (clip is None or callable(clip) or (is_number(clip) and clip > 0)):
            wanted = "a norm above 0 such as 1.0, or a function (grads, params) -> grads"
            raise refusal("clip_grad", clip, wanted, "Stages")
        check_choice("nonfinite", self.nonfinite, ("error", "skip"), where="Stages")
        loss = getattr(task.loss, "loss", task.loss)
        modules = loss.modules() if isinstance(loss, nn.Module) else ()
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        hooks = tuple(getattr(module, kind) for module in modules for kind in kinds)
        object.__setattr__(self, "hooks_of_loss", hooks)
        in_forward, in_loss = is_users(task.forward), is_users(task.loss)
        users = {
            "forward": in_forward,
            "loss": in_loss,
            # A checkpointed segment runs again, and a function may come with a backward of its own.
            "backward": in_forward or in_loss,
            "clip_grad": is_users(clip),
            "update": optimizer is not None and optimizer.draws,
            "validate": in_forward if task.validate is None else is_users(task.validate),
            "validation loss": in_loss,
        }
        object.__setattr__(self, "users_stages", frozenset(stage for stage, is_true in users.items() if is_true))

    @property
    def size(self) -> int | None:
        """The samples of a forward, at most, in the batch under way; None: the whole batch."""
        return self.microbatch_size if self.found is None else self.found.size

    def microbatches(self, batch: Batch, size: int | None = None) -> list[Batch]:
        """The batch in parts of at most ``size`` (default: that of the stages) samples, the last one smaller.

        Each of the :class:`~pure_loop.data.group.Batches` of a step is split by itself.
        """
        size = self.size if size is None else size
        return list(parts_of(batch)) if size is None else self.task.split(batch, size)

    @property
    def splits(self) -> bool:
        """Whether batches may be split, on whatever rank."""
        return self.microbatch_size is not None or self.found is not None

    @property
    def harmless(self) -> bool:
        """Whether the gradient of a microbatch of weight 0 is known to be 0, and not NaN."""
        return self.task.harmless

    def seeding(
        self, state: State, stage: str, index: int = 0, *, code: Code, seed: int | None = None
    ) -> AbstractContextManager[None]:
        """What the code of a stage runs in, so that it draws by its position: a context manager to be entered once.

        It is ``NO_CONTEXT`` where nothing is drawn. torch's generators are seeded and put back where torch's code or
        the library's draws, and Python's and NumPy's as well where code of the user's runs.

        Args:
            state: the one that the stage is called with.
            stage: ``"forward"``, ``"loss"``, ``"backward"``, ``"clip_grad"``, ``"update"``, ``"validate"`` or
                ``"validation loss"``.
            index: the number of the microbatch.
            code: what :meth:`code_of` says.
            seed: default: by the stage, the batch, the microbatch and the rank.
        """
        if code is None:
            return NO_CONTEXT
        if seed is None:
            # Replicated ranks draw alike in an update.
            of_rank = () if stage == "update" or stage == "clip_grad" else (index, self.engine.rank)
            seed = derive(state.seed, stage, state.timestamp.epoch, state.timestamp.batch, *of_rank)
        device = device_of(state)
        context = SeededHosts(seed, device) if code == "users" else seeded(seed, device)
        if self.strict and stage in _CHECKED:
            return checked_draws(context, stage, state.timestamp.batch, device)
        return context

    def code_of(self, state: State, stage: str) -> Code:
        """Which code draws in a stage: ``"users"``: code that is neither torch's nor the library's runs in it, and may
        draw from any generator, and keep what it is given; None: nothing is drawn. In an update the optimizer says so.
        """
        if stage in self.users_stages:
            return "users"
        if stage == "update" or stage == "clip_grad":
            return None
        task, model, batch, around = self.task, state.model, state.microbatch, code_around_operations()
        # Code that runs at each operation or call: of hooks of all modules, a profiler, a debugger, a mode.
        if any_global_hook() or is_watched() or (around and runs_users_code(around)):
            return "users"
        # And that of tensors in a batch; most batches are plain pairs.
        if not ((type(batch) is tuple or type(batch) is list) and _PLAIN.issuperset(map(type, batch))):
            leaves: list[Any] = optree.tree_leaves(batch, namespace=NAMESPACE)
            if any(is_users(kind) for kind in set(map(type, leaves)) if hasattr(kind, "__torch_function__")):
                return "users"
        # Code that has read the parameters, the outputs or the loss of this forward may have put a hook on one.
        if stage == "backward" and getattr(raw_params(state), "lent", None) is not None:
            return "users"
        if stage == "loss" or stage == "validation loss":
            if any(self.hooks_of_loss):
                return "users"
            if task.loss is None and model.runs_users_code:
                return "users"
            return "torch" if task.loss_may_use_rng else None
        if model.runs_users_code:
            return "users"
        if stage == "validate" and task.validate is not None:
            return "torch"
        return "torch" if model.may_use_rng or task.forward is not default_forward else None

    def guard(self, state: State, path: tuple[str | int, ...], *, apart: bool = False) -> AbstractContextManager[None]:
        """Seeds the global generators for code of the user's that is called at an event; see :func:`guard`."""
        return guard(state, path, self.place, apart=apart)

    def running(
        self,
        state: State,
        stage: str,
        index: int = 0,
        *,
        code: Code,
        seed: int | None = None,
        gradients: bool = True,
        casts: bool = True,
    ) -> AbstractContextManager[None]:
        """What the code of a stage runs in: its random numbers, its precision and autograd.

        Args:
            state, stage, index, code, seed: as for :meth:`seeding`.
            gradients: whether what is computed has a graph.
            casts: whether it is a forward or a loss, which the run's precision may cast.
        """
        casts_nothing = self.precision.dtype is None and not any_autocast_enabled()
        if code is None and casts_nothing and torch.is_grad_enabled() is gradients:
            return NO_CONTEXT  # code of torch's leaves the mode of autograd as it is
        return self._running(self.seeding(state, stage, index, code=code, seed=seed), state, gradients, casts)

    @contextmanager
    def _running(
        self, seeding: AbstractContextManager[None], state: State, gradients: bool, casts: bool
    ) -> Iterator[None]:
        kind, dtype = device_of(state).type, self.precision.dtype if casts else None
        casting: AbstractContextManager[Any] = NO_CONTEXT
        # An autocast of the caller must not change what the loop computes.
        if dtype is not None or (any_autocast_enabled() and torch.is_autocast_enabled(kind)):
            casting = torch.autocast(kind, dtype=dtype, enabled=dtype is not None)
        try:
            with seeding, casting, torch.set_grad_enabled(gradients):
                yield
        finally:
            if any_autocast_enabled():  # the caller's: torch would keep these casts up to its end
                torch.clear_autocast_cache()


_PLAIN = frozenset({Tensor, int, float, str})


# Under which a State keeps the size, as algorithm state, so that training resumes with it.
NAME = "microbatch_size"


@attrs.define
class FoundSize:
    """The microbatch size of the batch under way.

    Attributes:
        size: the samples of a forward, at most; None: the whole batch.
    """

    size: int | None = None


def found_size(state: Any) -> int | None:
    """The size that a State keeps; None: whole batches, or ``microbatch_size`` is not ``"auto"``."""
    size = state.algorithm_state.get(NAME)
    return size if type(size) is int else None  # it may be the memory of an algorithm of this name


@contextmanager
def checked_draws(guard: AbstractContextManager[None], stage: str, batch: int, device: torch.device) -> Iterator[None]:
    """A stage under ``strict=True``, inside of a guard of its generators: it alone draws from torch's.

    Args:
        guard: what seeds them.
        stage, batch: for errors.
        device: the one with the generator that is seeded, besides the CPU's.
    """
    with guard:
        own = _OwnDraws(device)
        with calls_watched(own.see), own:
            yield
            own.look()
    if own.disturbed:
        raise ImpurityError(
            f"the state of torch's global generator changed during the {stage} of batch {batch}, and no operation of "
            f"the {stage} had changed it: another thread draws from it or seeds it, so that the dropout of this batch "
            "can't be had again. Give that thread a torch.Generator() of its own, and draw with generator=."
        )


# Methods of a generator that move it without a draw.
_MOVES = frozenset({"manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"})


@without_compiler
class _OwnDraws(DispatchMode):  # type: ignore[misc]
    """Follows the states of torch's global generators from one operation of this thread to the next.

    Attributes:
        disturbed: whether one has moved without an operation that draws.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._generators = (torch.default_generator, *generators_of(device))
        self._last = self._now()
        self.disturbed = False

    def _now(self) -> list[Tensor]:
        with no_dispatch():
            return list(map(state_of, self._generators))

    def look(self) -> None:
        """Notice a state that has moved since."""
        states = self._now()
        with no_dispatch():
            if not all(map(torch.equal, self._last, states)):
                self.disturbed = True
        self._last = states

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        """A call of this thread: of a method that seeds one of these generators, or sets its state."""
        if event == "c_return" and argument.__name__ in _MOVES:
            owner = getattr(argument, "__self__", None)
            if any(owner is generator for generator in self._generators):
                self._last = self._now()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            self._last = self._now()
        else:
            self.look()
        return result
