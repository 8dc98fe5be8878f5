"""Sequences that grow, in real training loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import sequence_length_warmup, with_length
from tests.support.runs import equal, stream, train


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(words).cumsum(1)).transpose(1, 2)
        return out


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Language()


def texts(batches: int = 31, length: int = 64) -> Any:
    words = torch.arange(2 * length).view(2, length) % 9
    return [(words, words)] * batches


def shapes(algorithm: Any, data: Any, **options: Any) -> list[tuple[int, ...]]:
    pairs = stream(net(), data, [algorithm], **{"max_duration": "1ep", **options})
    return [tuple(state.batch[0].shape) for event, state in pairs if event is Event.BATCH_START]


@pytest.mark.parametrize("duration", ["30ba", "60sp", 2, "0.5dur"])
def test_the_lengths_of_a_run(duration: Any) -> None:
    data, options = texts(), {"max_duration": "1ep"}
    if duration in (2, "0.5dur"):  # of epochs: 2 of 15, and half of 4
        data, options = texts(15), {"max_duration": "3ep" if duration == 2 else "4ep"}
    found = shapes(sequence_length_warmup(duration, max_length=64), data, **options)
    assert [found[number][1] for number in (0, 4, 5, 15, 29, 30)] == [8, 8, 16, 32, 56, 64]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"min_length": 5, "max_length": 5}, [5] * 6),
        ({"min_length": 2, "max_length": 7, "increment": 10}, [2, 2, 2, 2, 7, 7]),
        ({"min_length": 2, "max_length": 7, "increment": 2}, [2, 2, 4, 4, 7, 7]),
        ({"length": pl.schedules.linear(1.0, 7.0, "3ba")}, [1, 3, 5, 7, 7, 7]),
        ({"max_length": 1000}, [8] * 6),
    ],
)
def test_other_lengths(settings: Any, wanted: list[int]) -> None:
    found = shapes(sequence_length_warmup("4ba", **settings), texts(6, 8))
    assert [length for _, length in found] == wanted


def test_rows_of_all_tokens() -> None:
    words = torch.arange(10).view(2, 5)
    assert with_length((words, words), 3, "reshape")[1].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    vectors = torch.arange(20).view(2, 5, 2)
    assert with_length((words, vectors), 5, "reshape")[1] is vectors
    assert with_length((words, vectors), 2, "reshape")[1].shape == (5, 2, 2)
    with pytest.raises(pl.DataError, match=r"a tensor of shape \(2,\) has no 5 tokens a sample"):
        with_length((words, torch.zeros(2)), 3, "reshape")
    assert shapes(sequence_length_warmup("4ba", mode="reshape", max_length=64), texts(1))[0] == (16, 8)


def test_the_last_real_token_stays() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 0, 0], [1, 2, 9, 0, 0, 0], [1, 9, 0, 0, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "label": torch.arange(4)}
    cut = with_length(batch, 3, keep_end=True)
    assert cut["input_ids"].tolist() == [[1, 2, 6], [1, 2, 9], [1, 2, 9], [1, 9, 0]]
    assert cut["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]
    assert cut["label"] is batch["label"]
    assert with_length(batch, 3)["input_ids"].tolist() == [[1, 2, 3], [1, 2, 3], [1, 2, 9], [1, 9, 0]]
    only = with_length(batch, 3, keys=["input_ids"])
    assert only["input_ids"].shape == (4, 3)
    assert only["attention_mask"] is batch["attention_mask"]
    assert with_length(ids, 2, keep_end=True)[0].tolist() == [1, 6]
    left = {"input_ids": ids.flip(1), "attention_mask": (ids != 0).long().flip(1)}
    assert with_length(left, 3, keep_end=True)["input_ids"].tolist() == [[6, 5, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]]
    with pytest.raises(
        pl.DataError, match=r"has no 'labels', which keys= names; it has \['attention_mask', 'input_ids'"
    ):
        with_length(batch, 3, keys=["labels"])


def test_tokens_are_counted_as_they_were_loaded() -> None:
    state = train(net(), texts(3), [sequence_length_warmup("4ba", max_length=64)], max_duration="1ep")
    assert state.timestamp.token == 3 * 128


def test_long_enough_from_the_beginning() -> None:
    equal(train(net(), texts(3), [sequence_length_warmup(0, max_length=64)]).params, train(net(), texts(3)).params)


def test_what_is_refused() -> None:
    with pytest.raises(pl.ArgumentError, match="max_length=4 is less than min_length=8"):
        sequence_length_warmup(max_length=4)
    with pytest.raises(pl.ArgumentError, match="leave keep_end out"):
        sequence_length_warmup(mode="reshape", keep_end=True)
    with pytest.raises(pl.ArgumentError, match="goes by the clock"):
        sequence_length_warmup("10m")
    with pytest.raises(pl.DataError, match="has no tensor of two dimensions"):
        with_length((torch.zeros(3), torch.zeros(3)), 2)
