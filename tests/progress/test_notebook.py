"""The table and the bar in a notebook."""

from __future__ import annotations

import re
import sys
import types
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import pure_loop as pl
from pure_loop.progress.display import progress, screen_for
from pure_loop.progress.screens import Notebook
from tests.progress.terminals import DATA, VAL, fit


class Publisher:
    """Stands in for IPython.display: what a front end receives."""

    def __init__(self):
        self.outputs, self.messages = set(), []

    def display(self, data, *, raw, display_id):
        assert display_id not in self.outputs
        self.outputs.add(display_id)
        self.update_display(data, raw=raw, display_id=display_id)

    def update_display(self, data, *, raw, display_id):
        assert raw
        assert display_id in self.outputs
        assert data.keys() == {"text/html", "text/plain"}
        html = data["text/html"].replace("&ensp;", " ").replace("&nbsp;", " ")
        tags = {element.tag for element in ElementTree.fromstring(f"<all>{html}</all>").iter()}  # each is closed
        assert not tags & {"script", "style", "link", "img"}
        self.messages.append(tuple(data.values()))


@pytest.fixture
def notebook(monkeypatch):
    publisher = Publisher()
    package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.get_ipython = type("ZMQInteractiveShell", (), {})
    display.display, display.update_display = publisher.display, publisher.update_display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return publisher


def rows_of(html):
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)[2:]]


def test_one_output_is_replaced_and_what_stays_has_all_rows_and_the_best_of_each_column(notebook, capsys):
    evaluators = {"val": DATA, "test": DATA[:2], "<script>": DATA[:1]}
    pl.run(progress(fit(max_duration="5ep", evaluators=evaluators), description="a & b <i>", refresh_seconds=0))
    assert len(notebook.outputs) == 1
    assert capsys.readouterr() == ("", "")
    html, text = notebook.messages[-1]
    rows = rows_of(html)
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    columns = list(zip(*rows, strict=True))
    assert [sum("<b>" in cell for cell in column) for column in columns] == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    losses = [float(re.sub("<.*?>", "", cell)) for cell in columns[2]]
    assert columns[2].index(f"<b>{min(losses):#.4g}</b>") == losses.index(min(losses))
    for words in ('<progress value="1.0000"', "done, 0:0", "&lt;script&gt;", "a &amp; b &lt;i&gt;"):
        assert words in html
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["1", "2", "3", "4", "5", "a"]


def test_an_evaluation_has_a_bar_of_its_own_and_an_error_stays(notebook, monkeypatch, tmp_path):
    """A file gets lines here, too."""
    monkeypatch.setattr(Notebook, "seconds", 0.0)
    pl.run(progress(fit(evaluators=VAL), refresh_seconds=0))
    during = [html for html, _ in notebook.messages if "val&ensp;batch 3/6" in html]
    assert len(during) == 2
    assert all('<progress value="0.5000"' in html for html in during)
    state = pl.run(fit())
    pl.run(progress(pl.evaluate(state, {"test": DATA}, loss=lambda outputs, targets: outputs.sum())))
    assert "test: loss" in notebook.messages[-1][0]
    assert "<table>" not in notebook.messages[-1][0]
    pl.run(progress(pl.predict(state, DATA)))
    assert "batch 6/6" in notebook.messages[-1][0]
    with pytest.raises(pl.errors.NonFiniteError):
        pl.run(progress(fit(loss=lambda outputs, targets: outputs.sum() * float("nan"))))
    assert "failed: NonFiniteError" in notebook.messages[-1][0]
    notebook.messages.clear()
    with open(tmp_path / "log.txt", "w") as file:
        pl.run(progress(fit(), file=file))
    assert "done" in (tmp_path / "log.txt").read_text()
    assert notebook.messages == []


def test_a_long_table_is_sent_less_often(notebook):
    assert screen_for(None).seconds >= 0.1
    pl.run(progress(fit(DATA[:1], max_duration="200ep"), refresh_seconds=0))
    assert len(notebook.messages) < 60
    assert len(rows_of(notebook.messages[-1][0])) == 200


def test_why_a_run_stopped_stands_below_the_bar(notebook):
    stopping = pl.algorithms.threshold_stopping("val/loss", 99.0)
    state = pl.run(progress(fit(evaluators=VAL, algorithms=[stopping])))
    for text in notebook.messages[-1]:
        assert "done: stopped early, 0:00" in text
        assert state.why_ended() in text


def test_an_ensemble(notebook):
    members = pl.ensemble(lambda: torch.nn.Linear(4, 3), seeds=[0, 1, 2], fallback="loop")
    pl.run(progress(fit(model=members, evaluators=VAL), refresh_seconds=0))
    html, text = notebook.messages[-1]
    assert "3 members" in html
    assert "3 members" in text
    names = re.findall(r'title="([^"]*)"', html)
    assert names == [*("epoch", "train/loss", "train/loss best", "val/loss", "val/loss best"), *names[5:]]
    assert names[5:] == ["val/accuracy", "val/accuracy best", "lr", "time"]
    assert html.count("<td") == 2 * len(names)
