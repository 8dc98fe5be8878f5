"""Generate, in real training loops."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop.callbacks import Generate
from pure_loop.loggers import InMemoryLogger
from tests.support.worlds import pool

ALPHABET = "abcd"
WIDTH = 8


class Characters(nn.Module):
    """Scores of the next character, from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), WIDTH)
        self.drop = nn.Dropout(0.5)
        self.scores = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, codes: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.drop(self.embed(codes)))
        return scores


def characters() -> nn.Module:
    with pl.random.seeded(0):
        return Characters()


def data(batches: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Each character is followed by the next one of the alphabet."""
    codes = torch.arange(16) % len(ALPHABET)
    return [(codes, (codes + 1) % len(ALPHABET))] * batches


def likeliest(module: nn.Module, prompt: str) -> str:
    assert not module.training
    assert not torch.is_grad_enabled()
    for _ in range(5):
        prompt += ALPHABET[int(module(torch.tensor([ALPHABET.index(prompt[-1])])).argmax())]
    return prompt


def drawn(module: nn.Module, prompt: str) -> str:
    """From three generators, and it leaves the module another one."""
    for parameter in module.parameters():
        parameter.fill_(torch.nan)
    return f"{prompt} {torch.rand(()):.6f} {random.random():.6f} {np.random.rand():.6f}"


def stream(start: Any, *callbacks: pl.Callback, logger: pl.Logger | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "max_duration": "20ep",
        "optimizer": pl.optim.adam(lr=0.05),
        "seed": 5,
        "clock": lambda: 0.0,
        **options,
    }
    loggers = [] if logger is None else [logger]
    return pl.fit(
        start, data(), loss=functional.cross_entropy, callbacks=callbacks, loggers=loggers, strict=True, **settings
    )


def table(logger: InMemoryLogger, name: str = "generate/text") -> list[list[Any]]:
    assert all(columns == ["prompt", "text", "batch"] for _, columns, _ in logger.tables[name])
    assert all(row[2] == timestamp.batch for timestamp, _, rows in logger.tables[name] for row in rows)
    return [row for _, _, rows in logger.tables[name] for row in rows]


def texts(*callbacks: Generate, **options: Any) -> list[list[Any]]:
    logger = InMemoryLogger()
    pl.run(stream(characters(), *callbacks, logger=logger, **options))
    return table(logger)


def test_a_model_that_has_learned_writes_what_it_has_learned() -> None:
    rows = texts(Generate(["a", "c"], generate=likeliest, interval="10ep"))
    assert [row[2] for row in rows] == [30, 30, 60, 60]
    assert rows[2:] == [["a", "abcdab", 60], ["c", "cdabcd", 60]]


@pytest.mark.parametrize(
    ("interval", "batches"),
    [
        ("1ep", [3, 6, 7]),
        ("2ba", [2, 4, 6, 7]),
        ("7ba", [7]),
        (0, [7]),
        (lambda state: state.timestamp.batch == 3, [3, 7]),
        ("1iter", [3, 6, 7]),
    ],
)
def test_texts_are_written_at_the_interval_and_at_the_end(interval: Any, batches: list[int]) -> None:
    rows = texts(Generate("a", generate=drawn, interval=interval), max_duration="7ba", iteration_length="1ep")
    assert [row[2] for row in rows] == batches


def test_a_text_depends_on_the_seed_the_batch_and_the_place_of_its_prompt() -> None:
    def written(prompts: Any = ("a", "a"), seed: int | None = None, **options: Any) -> list[str]:
        return [
            row[1] for row in texts(Generate(prompts, generate=drawn, seed=seed), **{"max_duration": "2ep", **options})
        ]

    first = written()
    assert len(set(first)) == 4
    random.seed(1)
    torch.manual_seed(1)
    assert written() == first
    assert written("a") == first[::2]
    assert written(seed=5) == first
    assert set(written(seed=6)).isdisjoint(first)
    assert set(written(max_duration="2ep", seed=6)).isdisjoint(first)


def test_the_average_writes_if_it_is_named() -> None:
    def weight(module: nn.Module, prompt: str) -> str:
        return str(module.scores.bias.tolist())  # type: ignore[union-attr]

    logger = InMemoryLogger()
    callbacks = [Generate("a", generate=weight, average=average, name=str(average)) for average in (None, "ema")]
    options: dict[str, Any] = {"algorithms": [pl.algorithms.ema(smoothing=0.9)], "max_duration": "1ep"}
    state = pl.run(stream(characters(), *callbacks, logger=logger, **options))
    for name, expected in (("None", state), ("ema", pl.algorithms.averaged(state))):
        assert table(logger, name)[0][1] == str(expected.params["scores.bias"].tolist())
    with pytest.raises(pl.ArgumentError, match="no average named 'swa'"):
        pl.run(stream(characters(), Generate("a", generate=weight, average="swa"), **options))


def test_without_loggers_nothing_is_written() -> None:
    def never(module: nn.Module, prompt: str) -> str:
        raise AssertionError(prompt)

    pl.run(stream(characters(), Generate("a", generate=never), max_duration="1ep"))
    with pytest.raises(AssertionError, match="a") as caught:
        pl.run(stream(characters(), Generate("a", generate=never), logger=InMemoryLogger(), max_duration="1ep"))
    assert "raised by generate= of Generate, for the prompt 'a'" in caught.value.__notes__


def test_a_text_is_a_text() -> None:
    callback: Any = Generate("a", generate=lambda module, prompt: [1, 2])  # type: ignore[arg-type, return-value]
    with pytest.raises(pl.ArgumentTypeError, match=r"returned list for the prompt 'a'; return a text"):
        texts(callback, max_duration="1ep")


@pytest.mark.slow  # real ranks
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_on_two_ranks_the_first_one_writes_what_one_rank_writes(parallel: str) -> None:
    def run(**options: Any) -> tuple[InMemoryLogger, list[str]]:
        called: list[str] = []

        def generate(module: nn.Module, prompt: str) -> str:
            called.append(prompt)
            return likeliest(module, prompt)

        logger = InMemoryLogger()
        pl.run(stream(characters(), Generate("a", generate=generate), logger=logger, max_duration="8ep", **options))
        return logger, called

    def program(rank: int) -> Any:
        logger, called = run(parallel=parallel)
        return logger.tables, called

    expected = table(run()[0])
    (tables, called), (nothing, not_called) = pool().run(program)
    assert [row for _, _, rows in tables["generate/text"] for row in rows] == expected
    assert called == ["a"] * 8
    assert nothing == {}
    assert not_called == []
