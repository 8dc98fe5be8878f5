"""Generate, in real training loops."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.callbacks import Generate
from pure_loop.loggers import InMemoryLogger
from tests.support import problem
from tests.support.worlds import pool

ALPHABET = "abcd"
CODES = torch.arange(16) % 4


def characters() -> nn.Module:
    """Scores of the next character, from the last one."""
    with pl.random.seeded(0):
        return nn.Sequential(nn.Embedding(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))


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


def weight(module: Any, prompt: str) -> str:
    return str(module[2].bias.tolist())


def stream(*callbacks: Any, **options: Any) -> Any:
    """In which each character is followed by the next one of the alphabet."""
    settings = {"optimizer": pl.optim.adam(lr=0.05), "seed": 5, "max_duration": "2ep", **options}
    return problem.fit(characters(), [(CODES, (CODES + 1) % 4)] * 3, callbacks=callbacks, **settings)


def texts(callback: Generate, **options: Any) -> list[list[Any]]:
    logger = InMemoryLogger()
    pl.run(stream(callback, loggers=[logger], **options))
    return rows_of(logger.tables)


def rows_of(tables: Any) -> list[list[Any]]:
    for timestamp, columns, rows in tables["generate/text"]:
        assert columns == ["prompt", "text", "batch"]
        assert all(row[2] == timestamp.batch for row in rows)
    return [row for _, _, rows in tables["generate/text"] for row in rows]


def test_texts_are_written_at_the_interval_and_at_the_end_of_what_was_learned() -> None:
    rows = texts(Generate(["a", "c"], generate=likeliest, interval="10ep"), max_duration="20ep")
    assert [row[2] for row in rows] == [30, 30, 60, 60]
    assert rows[2:] == [["a", "abcdab", 60], ["c", "cdabcd", 60]]
    at_3: Any = lambda state: state.timestamp.batch == 3  # noqa: E731
    for interval, batches in (
        ("1ep", [3, 6, 7]),
        ("2ba", [2, 4, 6, 7]),
        (0, [7]),
        (at_3, [3, 7]),
        ("1iter", [3, 6, 7]),
    ):
        rows = texts(Generate("a", generate=drawn, interval=interval), max_duration="7ba", iteration_length="1ep")
        assert [row[2] for row in rows] == batches


def test_a_text_depends_on_the_seed_the_batch_and_the_place_of_its_prompt() -> None:
    def written(prompts: Any = ("a", "a"), seed: int | None = None) -> list[str]:
        return [row[1] for row in texts(Generate(prompts, generate=drawn, seed=seed))]

    first = written()
    assert len(set(first)) == 4
    random.seed(1)
    torch.manual_seed(1)
    assert first == written() == written(seed=5)
    assert written("a") == first[::2]
    assert set(written(seed=6)).isdisjoint(first)


def test_the_average_writes_if_it_is_named() -> None:
    ema = [pl.algorithms.ema(smoothing=0.9)]
    state = pl.run(stream(algorithms=ema))
    for average, expected in ((None, state), ("ema", pl.algorithms.averaged(state))):
        rows = texts(Generate("a", generate=weight, average=average), algorithms=ema)
        assert rows[-1][1] == str(expected.params["2.bias"].tolist())
    with pytest.raises(pl.ArgumentError, match="no average named 'swa'"):
        texts(Generate("a", generate=weight, average="swa"))


def test_errors_name_the_prompt_and_without_loggers_nothing_is_written() -> None:
    def never(module: nn.Module, prompt: str) -> Any:
        raise AssertionError(prompt)

    pl.run(stream(Generate("a", generate=never)))
    with pytest.raises(AssertionError, match="a") as caught:
        texts(Generate("a", generate=never))
    assert "raised by generate= of Generate, for the prompt 'a'" in caught.value.__notes__
    with pytest.raises(pl.ArgumentTypeError, match=r"returned list for the prompt 'a'; return a text"):
        texts(Generate("a", generate=lambda module, prompt: [1]))  # type: ignore[arg-type, return-value]


@pytest.mark.slow  # real ranks
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_on_two_ranks_the_first_one_writes_what_one_rank_writes(parallel: str) -> None:
    def program(rank: int, **options: Any) -> Any:
        called, logger = [], InMemoryLogger()

        def generate(module: nn.Module, prompt: str) -> str:
            called.append(prompt)
            return likeliest(module, prompt)

        pl.run(stream(Generate("a", generate=generate), loggers=[logger], max_duration="8ep", **options))
        return logger.tables, called

    (tables, called), nothing = pool().run(lambda rank: program(rank, parallel=parallel, strict=False))
    assert rows_of(tables) == rows_of(program(0)[0])
    assert called == ["a"] * 8
    assert nothing == ({}, [])
