"""The table: which columns fit, which value is the best."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pure_loop.progress.table import Row, Table, line

NAMES = ("train/loss", "train/accuracy", "val/loss", "val/accuracy", "test/loss", "test/accuracy", "lr")


def table_of(*rows, labels=("val", "test")):
    table = Table(labels)
    for number, values in enumerate(rows, 1):
        table.add(Row(epoch=number, seconds=61.0), values)
    return table


VALUES = st.floats(width=32) | st.floats(-1e5, 1e5)


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES), min_size=1, max_size=6), st.integers(5, 130))
def test_no_width_cuts_a_digit_and_the_best_is_the_first_of_the_best(rows, width):
    table = table_of(*rows)
    columns, dropped = table.columns(width)
    assert len(columns) + dropped == len({name for row in rows for name in row}) + 2
    assert all(len(head) <= width for head in table.head(columns))
    for index in range(len(rows)):
        cells = table.cells(index, columns)
        assert len(line([cell.text for cell in cells], columns)) <= width
        assert all(len(cell.text) <= column.width for cell, column in zip(cells, columns, strict=True))
        for cell, column in zip(table.cells(index, columns, final=True), columns, strict=True):
            so_far = [row[column.name] for row in rows if math.isfinite(row.get(column.name, math.nan))]
            marked = column.name.startswith(("val", "test")) and bool(so_far)
            best = (min if "loss" in column.name else max)(so_far) if marked else None
            first = [row.get(column.name) for row in rows].index(best) if marked else None
            assert cell.best is (index == first)


def test_the_reference():
    """Numbers that are not finite are never the best, a value that comes later has a column, and a dropped one none."""
    table = table_of(
        {"train/loss": 1.0, "val/loss": math.nan, "val/accuracy": 0.1, "val/my_own": 3.0, "lr": 0.1},
        {"train/loss": 12.3456, "val/loss": 0.25, "val/accuracy": 0.3, "test/loss": 1e-7, "lr": 0.05},
        {"train/loss": 0.5, "val/loss": 0.25, "val/accuracy": math.inf, "test/loss": 123456.0, "lr": 1e-5},
    )
    assert table.lines(100) == [
        "       train ─  val ────────────────────────  test ─────",
        "epoch     loss     loss   accuracy    my_own       loss         lr  time",
        "    1    1.000      nan     0.1000     3.000                   0.1  1:01",
        "    2    12.35   0.2500*    0.3000*           1.000e-07*      0.05  1:01",
        "    3   0.5000   0.2500        inf            1.235e+05      1e-05  1:01",
    ]
    assert [cell.best for cell in table.cells(0, table.columns(100)[0])].count(True) == 0


def test_long_names_are_cut_in_the_middle_and_evaluators_have_the_order_of_the_call():
    label, metric = "validation_of_the_unseen_speakers", "multiclass_precision_macro_averaged"
    groups, titles = table_of({f"{label}/{metric}": 0.5}, labels=[label]).lines(120)[:2]
    assert groups.split()[0] == "validat…eakers"
    assert titles.split()[1] == "multicl…eraged"
    table = table_of({"train/loss": 1.0, "b/loss": 1.0}, {"a/loss": 1.0}, labels=["a", "b"])
    names = [column.name for column in table.columns(80)[0]]
    assert names == ["epoch", "train/loss", "a/loss", "b/loss", "time"]
    # With less room rates, times and metrics go, and losses last.
    assert [column.name for column in table_of(dict.fromkeys(NAMES, 0.5)).columns(40)[0]] == [
        *("epoch", "train/loss", "val/loss", "test/loss"),
    ]
