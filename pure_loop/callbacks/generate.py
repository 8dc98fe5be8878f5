"""Records what a language model writes: a table of prompts and texts at an interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import torch
from torch import nn

from pure_loop._internal.arguments import check_callable, check_integer
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.algorithms._averages import averaged_if_begun
from pure_loop.cadence import Cadence, CadenceLike
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.callbacks._intervals import read_interval
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.random import derive, seeded_all
from pure_loop.ranges import Name, checked
from pure_loop.stages.notes import noting
from pure_loop.state import State

__all__ = ["Generate"]


@checked
class Generate(Callback):
    """Records at each interval, and where training ends, a table with the columns ``prompt``, ``text`` and ``batch``.

    Texts are written by a copy of the model in eval mode, without gradients, which the function may change. The global
    random generators of torch, NumPy and Python are seeded for each prompt and restored afterwards: a text depends on
    the seed, the batch and the index of its prompt, and training does not depend on texts.

    Without loggers nothing is written. Where each rank holds a shard of the parameters (``parallel="shard"``) all ranks
    gather them, and the first one writes.

    Args:
        prompts: a text, or several.
        generate: ``(module, prompt) -> text``. The module is on the State's device, and computes in the precision of
            its parameters: ``precision=`` of ``fit`` is not applied.
        interval: ``"1ep"``, ``"100ba"``, or a predicate of the State, which is called at BATCH_END; 0: only where
            training ends.
        seed: where random numbers come from; None: the seed of the run.
        average: the name of an average of the weights to write with, such as ``"ema"``; None: the weights.
        name: under which the table is recorded.

    Raises:
        ArgumentError, ArgumentTypeError: a setting of another type, or no prompts; in training: no average of this
            name, at FIT_START, or something else than a text that ``generate`` returned.

    With a model and a tokenizer of Transformers, ``generate`` is::

        def generate(module, prompt):
            inputs = tokenizer(prompt, return_tensors="pt").to(module.device)
            return tokenizer.decode(module.generate(**inputs, max_new_tokens=40)[0], skip_special_tokens=True)

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import InMemoryLogger
    >>> def generate(module, prompt):
    ...     return prompt + "".join("ab"[int(torch.randint(2, ()))] for _ in range(3))
    >>> logger = InMemoryLogger()
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, max_duration="2ep",
    ...                       optimizer=pl.optim.sgd(lr=0.1), loggers=[logger],
    ...                       callbacks=[Generate("the ", generate=generate)]))
    >>> for timestamp, columns, rows in logger.tables["generate/text"]:
    ...     print(columns, rows)
    ['prompt', 'text', 'batch'] [['the ', 'the aba', 3]]
    ['prompt', 'text', 'batch'] [['the ', 'the aab', 6]]
    """

    # Of a sharded State each rank holds a part, and all of them gather it.
    all_ranks = True
    each_member = True

    def __init__(
        self,
        prompts: str | Iterable[str],
        *,
        generate: Callable[[nn.Module, str], str],
        interval: CadenceLike = "1ep",
        seed: int | None = None,
        average: Annotated[str | None, Name()] = None,
        name: Annotated[str, Name()] = "generate/text",
    ) -> None:
        self._due = read_interval(interval, "Generate", '"1ep", "100ba", or 0 for the end only')
        self._prompts = _read_prompts(prompts)
        self._generate = check_callable("generate", generate, "a function of (module, prompt)", where="Generate")
        self._seed = None if seed is None else check_integer("seed", seed, where="Generate")
        self._average = average
        self._name = name

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        if self._average is not None:
            averaged_if_begun(state, self._average)  # refuses a name that there isn't

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        if self._due.at(state, Event.BATCH_END) if isinstance(self._due, Cadence) else self._due(state):
            self._record(state, logger)

    def epoch_end(self, state: State, logger: LoggerGroup) -> None:
        if isinstance(self._due, Cadence) and self._due.at(state, Event.EPOCH_END):
            self._record(state, logger)

    def iteration_end(self, state: State, logger: LoggerGroup) -> None:
        if isinstance(self._due, Cadence) and self._due.at(state, Event.ITERATION_END):
            self._record(state, logger)

    def fit_end(self, state: State, logger: LoggerGroup) -> None:
        if not self._due(state):
            self._record(state, logger)

    def _record(self, state: State, logger: LoggerGroup) -> None:
        sharded = are_sharded(state.params)
        if not sharded and (self.rank or not logger.loggers):
            return
        module = (state if self._average is None else averaged_if_begun(state, self._average)).module(training=False)
        if self.rank:
            return
        batch = state.timestamp.batch
        seed = state.seed if self._seed is None else self._seed
        rows = []
        for index, prompt in enumerate(self._prompts):
            with torch.no_grad(), seeded_all(derive(seed, self._name, batch, index)):
                rows.append([prompt, self._text(module, prompt), batch])
        logger.log_table(self._name, ["prompt", "text", "batch"], rows, state)

    def _text(self, module: nn.Module, prompt: str) -> str:
        """
        Raises:
            ArgumentTypeError: the function returned something else.
        """
        with noting(lambda: f"raised by generate= of Generate, for the prompt {prompt!r}"):
            text: object = self._generate(module, prompt)
        if not isinstance(text, str):
            raise ArgumentTypeError(
                f"Generate: generate= returned {type(text).__name__} for the prompt {prompt!r}; return a text: decode "
                "tokens in the function."
            )
        return text


def _read_prompts(prompts: object) -> tuple[str, ...]:
    """
    Raises:
        ArgumentTypeError: something else than texts.
        ArgumentError: there are none.
    """
    example = 'write a text, or a list of texts: Generate(["The ", "Once "], generate=...)'
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        prompts = [prompts]
    listed = tuple(prompts)
    for prompt in listed:
        if not isinstance(prompt, str):
            raise ArgumentTypeError(f"Generate: prompts hold {prompt!r} of type {type(prompt).__name__}; {example}.")
    if not listed:
        raise ArgumentError(f"Generate: prompts are empty; {example}.")
    return listed
