"""``Recipe``: what surrounds a State, as a value: data, loss, optimizer, and each other argument of ``fit``.

A recipe, and a module or State, are all that a run is made of. Each tool that takes a run is a method, of one shape:
``recipe.tool(start, its own arguments, **changes)``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, Unpack

import attrs
from torch import nn

from pure_loop._internal.arguments import is_path
from pure_loop._internal.closing import closing
from pure_loop._internal.pytree import Batch
from pure_loop._internal.suggestions import passing_on, teaching, with_arguments_of
from pure_loop.callback import Logger
from pure_loop.entry.arguments import Arguments, RecipeOptions, all_settings, refusing_assignment
from pure_loop.entry.fit import ModelOptions, fit
from pure_loop.errors import ArgumentTypeError
from pure_loop.evaluator import EvaluatorsLike
from pure_loop.event import Event
from pure_loop.loop.stream import Stream, run
from pure_loop.members.ensemble import Ensemble
from pure_loop.state import Loss, State
from pure_loop.task import Task
from pure_loop.time import Time, Timestamp

if TYPE_CHECKING:
    from pure_loop.rehearsal.report import Rehearsal
    from pure_loop.tools.ablate import Ablation
    from pure_loop.tools.inspection import Inspection
    from pure_loop.tools.profile_report import Profile
    from pure_loop.tools.range_test import RangeTest
    from pure_loop.tools.rewind import Rewound

__all__ = ["Recipe", "RecipeOptions"]


# What recorded a run, or decides where it starts.
_OF_THE_RUN = ("callbacks", "loggers", "run_name", "autoresume", "load_path")


@refusing_assignment
@attrs.frozen(init=False, eq=False, repr=False)
class Recipe(Arguments):
    """All arguments of :func:`pure_loop.fit` but the model or State, as an immutable value.

    ``recipe.fit(model)`` is ``pl.fit(model, train_dataloader, ...)``; the same recipe then evaluates, rehearses,
    profiles and rewinds the run. Each method takes a module or a State first, its own arguments, and settings that are
    others in this call. Two recipes are equal if each setting is; ``pl.diff(a, b)`` lists those that are not.

    Args:
        train_dataloader: as in :func:`pure_loop.fit`; None: methods that train refuse.
        **settings: the other arguments of :func:`pure_loop.fit`. ``optimizer`` and ``max_duration`` may be left out
            of a recipe that does not train.

    Raises:
        ArgumentTypeError: (here and in methods) a setting that ``fit`` doesn't have, with the nearest name; one of
            another type; one that the method needs and the recipe lacks.
        ArgumentError: a value that ``fit`` refuses, but for what depends on the model, on ranks or devices; in methods,
            data that is an iterator and was drawn from before.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> recipe = pl.Recipe(data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep")
    >>> longer = recipe.replace(max_duration="3ep")
    >>> pl.diff(recipe, longer)
    setting       a      b
    max_duration  '2ep'  '3ep'
    >>> state = recipe.run(torch.nn.Linear(2, 1))
    >>> longer.run(state).timestamp.batch
    9
    """

    @teaching
    @passing_on(all_settings)
    def fit(self, model_or_state: nn.Module | State | Ensemble, **changes: Unpack[RecipeOptions]) -> Stream:
        """Train: the stream of :func:`pure_loop.fit`.

        Callbacks and loggers are the objects that were passed, and observe each run of the recipe.
        """
        stream = fit(model_or_state, **self._for("fit", changes, draws=True))
        self._drew(changes)
        return stream

    # Not decorated: the frame of a decorator would refer to the first State for as long as the run takes.
    def run(self, model_or_state: nn.Module | State | Ensemble, **changes: Unpack[RecipeOptions]) -> State:
        """Train to the end, and return the last State: ``pl.run(recipe.fit(...))``."""
        stream = fit(model_or_state, **self._for("run", changes, draws=True))
        self._drew(changes)
        del model_or_state
        return run(stream)

    @teaching
    def evaluate(
        self,
        model_or_state: nn.Module | State | Ensemble,
        evaluators: EvaluatorsLike = None,
        *,
        loss: Callable[[Any, Any], Loss] | Task | None = None,
        **changes: Unpack[ModelOptions],
    ) -> Stream:
        """The stream of :func:`pure_loop.evaluate`, with algorithms, precision, device and ranks of the recipe.

        Callbacks, loggers, ``watch`` and ``compile`` of the recipe are those of training, and are left out.

        Args:
            model_or_state: a module, or a State of any event.
            evaluators: None: those of the recipe.
            loss: None: that of the recipe.
            **changes: the other arguments of :func:`pure_loop.evaluate`, where they are others in this call.
        """
        from pure_loop.entry.evaluate import evaluate

        if evaluators is None:
            self._refuse_lack("evaluate", ["evaluators"])
            evaluators = self.evaluators
        loss = self.loss if loss is None else loss
        return evaluate(model_or_state, evaluators, loss=loss, **(self._of_a_model() | changes))

    @teaching
    def predict(
        self,
        model_or_state: nn.Module | State | Ensemble,
        dataloader: Iterable[Any],
        *,
        task: Task | None = None,
        gradients: bool = False,
        **changes: Unpack[ModelOptions],
    ) -> Stream:
        """The stream of :func:`pure_loop.predict`, with algorithms, precision, device and ranks of the recipe.

        Callbacks, loggers, ``watch`` and ``compile`` of the recipe are those of training, and are left out.

        Args:
            model_or_state: a module, or a State of any event.
            dataloader: batches as in training.
            task: None: the loss of the recipe, if it is a :class:`pure_loop.Task`.
            gradients: whether the forward differentiates.
            **changes: the other arguments of :func:`pure_loop.predict`, where they are others in this call.
        """
        from pure_loop.entry.evaluate import predict

        if task is None and isinstance(self.loss, Task):
            task = self.loss
        return predict(model_or_state, dataloader, task=task, gradients=gradients, **(self._of_a_model() | changes))

    @teaching
    @passing_on(all_settings)
    def explain(
        self,
        model_or_state: nn.Module | State | Ensemble,
        *,
        file: TextIO | None = None,
        sample: Batch = None,
        depth: int = 2,
        full: bool = False,
        **changes: Unpack[RecipeOptions],
    ) -> None:
        """Print what :meth:`fit` would do: :func:`pure_loop.explain`."""
        from pure_loop.entry.explain import explain

        settings = self._for("explain", changes)
        explain(model_or_state, file=file, sample=sample, depth=depth, full=full, **settings)

    @teaching
    @passing_on(all_settings)
    def rehearse(
        self,
        model_or_state: nn.Module | State,
        *,
        sample: Batch = None,
        world_size: int | None = None,
        fake: bool = False,
        call_callbacks: bool = True,
        **changes: Unpack[RecipeOptions],
    ) -> Rehearsal:
        """Try all settings on one batch of each dataloader: :func:`pure_loop.rehearse`."""
        from pure_loop.rehearsal.rehearse import rehearse

        settings = self._for("rehearse", changes) | {"call_callbacks": call_callbacks}
        return rehearse(model_or_state, sample=sample, world_size=world_size, fake=fake, **settings)

    @teaching
    @passing_on(all_settings)
    def lr_find(
        self,
        model_or_state: nn.Module | State,
        *,
        lowest: float = 1e-7,
        highest: float = 1.0,
        steps: int = 100,
        **changes: Unpack[RecipeOptions],
    ) -> RangeTest:
        """The learning-rate range test: :func:`pure_loop.lr_find`."""
        from pure_loop.tools.lr_find import lr_find

        settings = self._for("lr_find", changes)
        return lr_find(model_or_state, lowest=lowest, highest=highest, steps=steps, **settings)

    @teaching
    @passing_on(all_settings)
    def largest_microbatch(self, model_or_state: nn.Module | State, **changes: Unpack[RecipeOptions]) -> int:
        """The largest microbatch that fits into memory: :func:`pure_loop.largest_microbatch`."""
        from pure_loop.entry.largest_microbatch import largest_microbatch

        needed = ("train_dataloader", "optimizer")
        settings = self._for("largest_microbatch", changes, needed=needed, draws=True)
        size = largest_microbatch(model_or_state, **settings)
        self._drew(changes)
        return size

    @teaching
    @passing_on(all_settings)
    def profile(
        self,
        model_or_state: nn.Module | State,
        *,
        batches: int | None = 100,
        warmup: int = 10,
        trace: str | os.PathLike[str] | None = None,
        torch_profiler: bool = False,
        synchronize: bool = False,
        **changes: Unpack[RecipeOptions],
    ) -> Profile:
        """Train some batches, and report where their time goes: :func:`pure_loop.profile`.

        Loggers and ``autoresume`` of the recipe, which are those of its runs, are left out.
        """
        from pure_loop.tools.profile import profile

        settings = self._for("profile", changes, without=("autoresume", "loggers", "run_name"), draws=True)
        stream = fit(model_or_state, **settings)
        self._drew(changes)
        with closing(stream):
            return profile(
                stream,
                batches=batches,
                warmup=warmup,
                trace=trace,
                torch_profiler=torch_profiler,
                synchronize=synchronize,
            )

    @teaching
    @passing_on(all_settings)
    def inspect(
        self, state: State, data: Batch = None, *, gradients: bool = True, **changes: Unpack[RecipeOptions]
    ) -> Inspection:
        """A batch in numbers: :func:`pure_loop.inspect`.

        Args:
            state: as there.
            data: None: the data of the recipe, for the indices of samples; or, of a State of a boundary, a batch.
            gradients: compute the norm of the gradient of each sample.
            **changes: settings that are others in this call.
        """
        from pure_loop.tools.inspection import inspect

        settings = self._for("inspect", changes, needed=())
        train = settings.pop("train_dataloader", None)
        inside = isinstance(state, State) and state.batch is not None
        return inspect(state, train if data is None and inside else data, gradients=gradients, **settings)

    @teaching
    @passing_on(all_settings)
    def rewind(
        self,
        model: nn.Module | Ensemble,
        folder: str | os.PathLike[str],
        when: str | Time | Timestamp,
        event: Event | str,
        *,
        occurrence: int = 0,
        **changes: Unpack[RecipeOptions],
    ) -> Rewound:
        """The stream of a recorded run from exactly this event on: :func:`pure_loop.rewind`.

        Callbacks and loggers of the recipe, which recorded the run, are left out; those in ``changes`` observe it.
        """
        from pure_loop.tools.rewind import rewind

        settings = self._for("rewind", changes, without=_OF_THE_RUN, draws=True)
        stream = rewind(folder, when, event, model, occurrence=occurrence, **settings)
        self._drew(changes)
        return stream

    @teaching
    @passing_on(all_settings)
    def ablate(
        self,
        model_or_state: nn.Module | State,
        *,
        steps: str | Time,
        metric: str = "val/loss",
        **changes: Unpack[RecipeOptions],
    ) -> Ablation:
        """What each algorithm of the recipe does to a metric: :func:`pure_loop.ablate`."""
        from pure_loop.tools.ablate import ablate

        return ablate(model_or_state, steps=steps, metric=metric, **self._for("ablate", changes))

    @teaching
    def report(
        self,
        folder_or_logger: str | os.PathLike[str] | Logger | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        inspection: Inspection | None = None,
    ) -> Path:
        """One HTML file of what the run has recorded: :func:`pure_loop.report`.

        Args:
            folder_or_logger: None: the first logger of the recipe that keeps a record, or else the folder of
                ``autoresume``.
            path, inspection: as there.
        """
        from pure_loop.reporting.report import READABLE, report

        source = folder_or_logger
        if source is None:
            source = next((item for item in self.loggers if isinstance(item, READABLE)), None) or self._folder()
        return report(source, path, inspection=inspection)

    def _folder(self) -> str | os.PathLike[str]:
        """
        Raises:
            ArgumentTypeError: nothing of the recipe keeps a record that can be read.
        """
        if self.autoresume is None:
            raise ArgumentTypeError(
                "this recipe has no logger that keeps a record, and no autoresume, which report needs: write "
                'recipe.report("runs/1"), or recipe.replace(loggers=[pl.loggers.JSONLinesLogger("runs/1/metrics.jsonl"'
                ")]) before the run."
            )
        place: Any = self.autoresume
        return place if is_path(place) else place.folder  # of a saver

    def _of_a_model(self) -> ModelOptions:
        return {
            "algorithms": self.algorithms,
            "precision": self.precision,
            "seed": self.seed,
            "device": self.device,
            "parallel": self.parallel,
            "strict": self.strict,
            "deterministic": self.deterministic,
        }


vars(Recipe.run)["__signature__"] = with_arguments_of(all_settings, Recipe.run)
