"""The settings of stages, and what their code runs under: random numbers, precision, autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar

import attrs
import torch
from torch import Tensor

from pure_loop._internal.autograd import GradMode
from pure_loop._internal.torch_private import any_autocast_enabled, set_grad_enabled
from pure_loop.donation.donation import Donation
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer
from pure_loop.precision import Precision
from pure_loop.random.guards import Place, guard
from pure_loop.random.seeds import derive, seeded, tracer
from pure_loop.stages.engine import ONE_RANK, Engine
from pure_loop.stages.host_draws import Checked, Observed, SeededHosts, may_use_rng
from pure_loop.stages.notes import note_stage
from pure_loop.stages.sizes import FoundSize
from pure_loop.state import State, device_of
from pure_loop.task import OnTargets, Task

__all__ = ["NO_CONTEXT", "ClipGrad", "StageSettings", "uses_cpu_rng_only"]

T = TypeVar("T")
ClipGrad: TypeAlias = Callable[[FrozenDict[str, Any], FrozenDict[str, Tensor]], FrozenDict[str, Any]]

NO_CONTEXT: AbstractContextManager[None] = nullcontext()
_tracer = tracer.get
_grad_enabled: Callable[[], bool] = torch.is_grad_enabled


@attrs.frozen(kw_only=True)
class StageSettings:
    """What :class:`~pure_loop.stages.stages.Stages` is made with; its fields are described there."""

    task: Task
    optimizer: Optimizer | None = None
    precision: Precision = attrs.field(factory=lambda: Precision.parse("fp32"))
    microbatch_size: int | None = None
    found: FoundSize | None = None
    clip_grad: float | ClipGrad | None = None
    nonfinite: str = "error"
    measures_norm: bool = False
    engine: Engine = ONE_RANK
    donation: Donation | None = None
    strict: bool = False
    place: Place = attrs.field(factory=Place, repr=False, eq=False)
    # By stage: whether its code draws from Python's or NumPy's global generator, as far as that is known.
    host_draws: dict[str, bool] = attrs.field(init=False, factory=dict, repr=False, eq=False)
    # Whether complete gradients are clipped or measured.
    finishes: bool = attrs.field(init=False, repr=False, eq=False)
    # Whether an update is written in place as soon as it may be, without further conditions.
    writes_in_place: bool = attrs.field(init=False, repr=False, eq=False)

    @finishes.default
    def _finishes(self) -> bool:
        return self.clip_grad is not None or self.measures_norm

    @writes_in_place.default
    def _writes_in_place(self) -> bool:
        return (
            self.nonfinite == "error"
            and type(self.engine) is Engine
            and self.donation is not None
            and not self.donation.compiled
            and self.optimizer is not None
            and self.optimizer.overwrite is not None
        )

    @property
    def size(self) -> int | None:
        """The samples of a forward, at most, in the batch under way; None: the whole batch."""
        return self.microbatch_size if self.found is None else self.found.size

    @property
    def splits(self) -> bool:
        """Whether batches may be split, on whatever rank."""
        return self.microbatch_size is not None or self.found is not None

    @property
    def harmless(self) -> bool:
        """Whether the gradient of a microbatch of weight 0 is known to be 0, and not NaN."""
        return self.task.harmless

    def _call_with_grad(self, call: Callable[[], T], state: State, stage: str, index: int, draws: bool) -> T:
        """Call with gradients on, in this precision, and with random numbers of this stage, batch and microbatch."""
        try:
            if not draws and self.precision.dtype is None and _grad_enabled() and not any_autocast_enabled():
                try:
                    return call()
                finally:
                    set_grad_enabled(True)  # whatever the user's code has left
            try:
                with GradMode(True), self._seeded(state, stage, index) if draws else NO_CONTEXT, self._autocast(state):
                    return call()
            finally:
                self._forget_casts()
        except Exception as error:
            note_stage(error, stage, state, index)
            raise

    def _seeded(self, state: State, stage: str, index: int) -> AbstractContextManager[None]:
        return self._guard(stage, self.seed_of(state, stage, index), state)

    def _guard(self, stage: str, seed: int, state: State) -> AbstractContextManager[None]:
        """Seeds the global generators for a stage, those of Python and NumPy where its code may draw from them."""
        device = device_of(state)
        if _tracer() is not None:
            return seeded(seed, device)
        known = self.host_draws.get(stage)
        if known is None and stage == "backward":
            if self.host_draws.get("forward") is False:  # it runs no other code of the user's
                known = self.host_draws[stage] = False
        elif known is None:
            drawn, own = may_use_rng(self._code_of(stage, state))
            if drawn or not own:
                known = self.host_draws[stage] = drawn
        guard: AbstractContextManager[None]
        if known is None:
            guard = Observed(seed, device, partial(self.host_draws.__setitem__, stage))
        else:
            guard = SeededHosts(seed, device) if known else seeded(seed, device)
        if not self.strict:
            return guard
        hosts, alone = known is not False, stage != "backward"
        return Checked(guard, stage, state.timestamp.batch, hosts=hosts, device=device, alone=alone)

    def _code_of(self, stage: str, state: State) -> list[Any]:
        """The functions and modules in which the code of a stage starts."""
        task = self.task
        if stage in ("loss", "validation loss") and task.loss is not None:
            return [task.loss.loss if isinstance(task.loss, OnTargets) else task.loss]
        functions = [task.forward] if task.validate is None or stage != "validate" else [task.validate]
        return [state.model.skeleton, *functions]

    def guard(self, state: State, path: tuple[str | int, ...], *, apart: bool = False) -> AbstractContextManager[None]:
        """Seeds the global generators for code of the user's that is called at an event; see :func:`guard`."""
        return guard(state, path, self.place, apart=apart)

    def seed_of(self, state: State, stage: str, index: int) -> int:
        """The seed of a stage's random numbers, in a microbatch of this number."""
        t = state.timestamp
        return derive(state.seed, stage, t.epoch, t.batch, index, self.engine.rank)

    def _autocast(self, state: State) -> AbstractContextManager[Any]:
        if self.precision.dtype is not None:
            context: AbstractContextManager[Any] = self.precision.autocast(device_of(state))
            return context
        return self._without_autocast(state)

    def _forget_casts(self) -> None:
        """Clear torch's cache of casts, which under the caller's autocast lives until that context exits."""
        if self.precision.dtype is not None and any_autocast_enabled():
            torch.clear_autocast_cache()

    def _without_autocast(self, state: State) -> AbstractContextManager[Any]:
        if not any_autocast_enabled():
            return NO_CONTEXT
        kind = device_of(state).type
        # An autocast of the caller must not change what the loop computes.
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else NO_CONTEXT


def uses_cpu_rng_only(params: Any) -> bool:
    """Whether the generator of the CPU is all that is seeded with these parameters, and by itself."""
    return type(params) is FrozenDict and next(iter(params.values())).is_cpu and _tracer() is None
