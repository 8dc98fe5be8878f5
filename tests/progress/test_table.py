"""The table: which columns fit, which value is the best."""

from __future__ import annotations

import math

import pytest

from pure_loop.progress.table import Row, Table, line

NAMES = ("train/loss", "train/accuracy", "val/loss", "val/accuracy", "test/loss", "test/accuracy", "lr")


def table_of(*rows, labels=("val", "test")):
    table = Table(labels)
    for number, values in enumerate(rows, 1):
        table.add(Row(epoch=number, seconds=61.0), values)
    return table


def names(table, width):
    return [column.name for column in table.columns(width)[0]]


@pytest.mark.parametrize("width", range(5, 130))
def test_no_width_cuts_a_digit(width):
    table = table_of(*(dict.fromkeys(NAMES, 1.234e-7 * 10**power) for power in range(12)))
    columns, dropped = table.columns(width)
    assert len(columns) + dropped == len(NAMES) + 2
    assert all(len(head) <= width for head in table.head(columns))
    for index in range(12):
        cells = table.cells(index, columns)
        shown = line([cell.text for cell in cells], columns)
        assert len(shown) <= width
        assert shown.split() == [cell.text.strip() for cell in cells]
        assert all(len(cell.text) <= column.width for cell, column in zip(cells, columns, strict=True))


def test_the_columns_go_one_after_the_other():
    table = table_of(dict.fromkeys(NAMES, 0.5))
    whole = names(table, 200)
    assert whole == ["epoch", *NAMES, "time"]
    order = []
    for width in reversed(range(5, 120)):
        order += [name for name in whole if name not in names(table, width) and name not in order]
    assert order == [
        *("lr", "time", "train/accuracy"),
        *("test/accuracy", "val/accuracy", "test/loss", "val/loss", "train/loss"),
    ]
    assert names(table, 5) == ["epoch"]


def test_the_best_is_the_last_that_is_marked():
    table = Table()
    marked = []
    for loss, accuracy in ((0.5, 0.1), (0.25, 0.3), (0.3, 0.2), (0.25, 0.3)):
        table.add(Row(epoch=len(table.rows) + 1, seconds=1.0), {"val/loss": loss, "val/accuracy": accuracy})
        cells = table.cells(len(table.rows) - 1, table.columns(80)[0])
        marked.append([cell.best for cell in cells[1:3]])
    assert marked == [[True, True], [True, True], [False, False], [False, False]]
    columns = table.columns(80)[0]
    best = [[cell.best for cell in table.cells(index, columns, final=True)[1:3]] for index in range(4)]
    assert best == [[False, False], [True, True], [False, False], [False, False]]
    assert [text.split()[1:3] for text in table.lines(80)[2:]] == [
        *(["0.5000", "0.1000"], ["0.2500*", "0.3000*"], ["0.3000", "0.2000"], ["0.2500", "0.3000"])
    ]


def test_nan_is_shown_and_never_the_best():
    table = table_of(*({"val/loss": value, "val/accuracy": value} for value in (math.nan, 0.5, math.inf, math.nan)))
    columns = table.columns(80)[0]
    assert [[cell.text.strip() for cell in table.cells(index, columns)][1:3] for index in range(4)] == [
        *(["nan", "nan"], ["0.5000*", "0.5000*"], ["inf", "inf"], ["nan", "nan"])
    ]


def test_training_and_unknown_metrics_are_not_marked():
    table = table_of({"train/loss": 1.0, "val/my_own": 1.0, "lr": 0.1})
    assert not any(cell.best for cell in table.cells(0, table.columns(80)[0]))


def test_long_names_are_cut_in_the_middle():
    label, metric = "validation_of_the_unseen_speakers", "multiclass_precision_macro_averaged"
    groups, titles = table_of({f"{label}/{metric}": 0.5}, labels=[label]).lines(120)[:2]
    assert groups.split()[0] == "validat…eakers"
    assert titles.split()[1] == "multicl…eraged"


def test_what_comes_later_has_a_column_and_empty_cells():
    table = table_of({"train/loss": 1.0}, {"train/loss": 0.5, "val/loss": 0.25}, {"train/loss": 0.5})
    assert [text.split() for text in table.lines(80)[2:]] == [
        *(["1", "1.000", "1:01"], ["2", "0.5000", "0.2500*", "1:01"], ["3", "0.5000", "1:01"])
    ]


def test_evaluators_have_the_order_of_the_call():
    table = table_of({"train/loss": 1.0, "b/loss": 1.0}, {"a/loss": 1.0}, labels=["a", "b"])
    assert names(table, 80) == ["epoch", "train/loss", "a/loss", "b/loss", "time"]
