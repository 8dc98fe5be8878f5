"""What an ensemble maps: the table of docs/members.md, each of its rows tried beside the runs of members alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from tests.support.mapped import ROWS, verdict

TABLE: dict[str, dict[str, str]] = json.loads((Path(__file__).parents[2] / "docs" / "members_table.json").read_text())
FAST = {
    *("BatchNorm2d", "Embedding", "EmbeddingBag", "scaled_dot_product_attention", "LSTM", "Dropout"),
    *("ema", "blurpool", "muon", "from_torch", "cosine", "amp_bf16"),
}
_ALL = [
    pytest.param(kind, name, id=f"{kind}-{name}", marks=[] if name in FAST else pytest.mark.slow)
    for kind, rows in ROWS.items()
    for name in rows
]


def test_the_table_has_each_row_and_the_rows_all_of_the_library() -> None:
    assert {kind: set(rows) for kind, rows in TABLE.items()} == {kind: set(rows) for kind, rows in ROWS.items()}
    for package, kind in ((pl.algorithms, "algorithms"), (pl.schedules, "schedules")):
        names = {name.partition(" ")[0] for name in ROWS[kind]}
        assert set(package.__all__) - names <= NOT_RUN, kind


# What is no algorithm or schedule of its own, and what compares members.
NOT_RUN = {"Schedule", "plot", "sparkline", "population_based", "successive_halving"}


@pytest.mark.parametrize(("kind", "name"), _ALL)
def test_it_is_computed_as_the_table_says_and_each_member_is_what_it_is_alone(
    kind: str, name: str, capfd: pytest.CaptureFixture[Any]
) -> None:
    assert verdict(ROWS[kind][name], lambda: capfd.readouterr().err) == TABLE[kind][name]
