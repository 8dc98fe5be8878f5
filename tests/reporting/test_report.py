"""``pl.report``: what is on the page is what was recorded, whatever that is, and what is refused."""

from __future__ import annotations

import contextlib
import json
import math
import re
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop._text import is_secret, one_line
from pure_loop.callbacks import CheckpointSaver, FlightRecorder
from pure_loop.checkpoint.flight import read_flight
from pure_loop.loggers import CSVLogger, InMemoryLogger, JSONLinesLogger, TensorBoardLogger
from pure_loop.progress.words import cut
from pure_loop.reporting.curves import number_text, stretches, text
from pure_loop.reporting.page import page
from pure_loop.reporting.reading import of_files, of_folder, of_memory
from pure_loop.reporting.record import Record, Series
from pure_loop.time import Timestamp
from tests.loggers.records import stream
from tests.support import problem
from tests.support.refused import Refusal, check

# The page


FORBIDDEN = {
    "script",
    "img",
    "link",
    "iframe",
    "object",
    "embed",
    "image",
    "use",
    "base",
    "form",
    "input",
    "foreignobject",
}


class Parsed(HTMLParser):
    """The tags, the attributes and the texts of a page, as a browser reads them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(html: str) -> Parsed:
    """A page that is well-formed, fetches nothing, runs nothing, and draws inside of its pictures."""
    body = ET.fromstring(html.removeprefix("<!DOCTYPE html>\n"))
    result = Parsed(html)
    assert not result.tags & FORBIDDEN
    for name, value in result.attributes:
        assert not name.startswith("on"), name
        assert name not in ("src", "srcset", "xlink:href"), name
        assert name != "href" or value.startswith("#"), value
        assert name != "d" or re.fullmatch(r"[-MLHhvlmz\d. ]*", value), value
    style = body.findtext("head/style") or ""
    assert "url(" not in style
    assert "@import" not in style
    assert len(body.findall(".//h1")) == 1
    assert body.findtext("head/title")
    for table in body.iter("table"):
        assert all(cell.get("scope") == "col" for cell in table.iterfind("thead/tr/th"))
        widths = {len(row) for row in table.iter("tr")}
        assert len(widths) == 1, widths
    for picture in body.iterfind(".//figure/svg"):
        assert picture.findtext("title")
        for path in picture.iter("path"):
            for pair in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.get("d", "")):
                assert 0 <= float(pair[0]) <= 420
                assert 0 <= float(pair[1]) <= 220
    return result


HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "&lt;",
    "a\x00\x1b[31m\ud800",
    "a/b/c",
)
names = st.one_of(st.sampled_from(["train/loss", "val/loss", "val/accuracy", *HOSTILE]), st.text(min_size=1))
numbers = st.floats()
moments = st.tuples(st.integers(0, 9), st.integers(0, 3))
cells = st.one_of(st.none(), numbers, st.text())


@st.composite
def loggers(draw: st.DrawFn) -> InMemoryLogger:
    """One that has recorded anything, in any order."""
    logger = InMemoryLogger()
    points = st.lists(st.tuples(moments, numbers), min_size=1, max_size=12)
    for name, values in draw(st.dictionaries(names, points, max_size=7)).items():
        logger.metrics[name] = [(Timestamp(batch=batch, epoch=epoch), value) for (batch, epoch), value in values]
    logger.hyperparameters = draw(st.dictionaries(st.text(), cells, max_size=3))
    logger.hyperparameters["max_duration"] = draw(st.sampled_from(["3ep", "9ba", "0ba", "1dur", "x", "1e400ba"]))
    return logger


@given(loggers())
def test_the_page_of_any_record_is_well_formed_and_has_every_value(logger: InMemoryLogger) -> None:
    record = of_memory(logger)
    html = page(record, "a & b")
    texts = parsed(html).texts
    for name, recorded in logger.metrics.items():
        series = record.series[name]
        assert series.values[-1] == recorded[-1][1] or math.isnan(recorded[-1][1])
        row = f'<th scope="row">{text(name, 120)}</th>'
        assert one_line(cut(name, 120)) in texts
        line = html.split(row, 1)[1].split("</tr>")[0]
        finite = [value for value in series.values if math.isfinite(value)]
        for value in (series.values[-1], *([min(finite), max(finite)] if finite else [])):
            assert number_text(value) in line
    for name, setting in logger.hyperparameters.items():
        assert any(one_line(cut(name, 120)) in words for words in texts)
        assert not isinstance(setting, str) or one_line(cut(setting, 400)) in texts or not setting or is_secret(name)
    assert "Worst batches" in texts or not any(
        not math.isfinite(value) for value in record.series.get("train/loss", Series()).values
    )


def test_the_worst_samples_are_those_of_an_inspection(tmp_path: Path) -> None:
    inputs = torch.ones(4, 2)
    inputs[2] = 100.0
    logger, net = InMemoryLogger(), torch.nn.Linear(2, 1)
    recipe = pl.Recipe([(inputs, torch.zeros(4, 1))], loss=torch.nn.functional.mse_loss, loggers=[logger])
    recipe = recipe.replace(optimizer=pl.optim.sgd(lr=1e-9), max_duration="1ep")
    recipe.run(net)
    state = next(recipe.fit(net, watch={"batch_start"}, loggers=()))[1]
    html = recipe.report(path=tmp_path / "a.html", inspection=recipe.inspect(state)).read_text()
    section = html.partition('<section id="worst-samples">')[2].partition("</section>")[0]
    assert section.partition('<th scope="row">')[2].startswith("2</th>")
    assert "Of batch 1: 4 of 4 samples, by loss." in section
    assert "Worst samples" not in pl.report(logger, tmp_path / "b.html").read_text()
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"what pl\.inspect"):
        pl.report(logger, tmp_path / "c.html", inspection=3)  # type: ignore[arg-type]


def test_the_page_of_much_is_small() -> None:
    record = Record()
    record.series["train/loss"] = Series(list(range(200_000)), [1 / (at + 1) for at in range(200_000)], [0] * 200_000)
    record.series |= {f"norm/{at}": Series([1, 2, 3], [1.0, math.nan, at], [0, 0, 0]) for at in range(2000)}
    html = page(record, "much")
    parsed(html)
    assert len(html.encode()) < 200_000


@given(st.lists(st.floats(allow_infinity=False), min_size=1, max_size=60), st.integers(1, 20))
def test_stretches_have_all_extremes(values: list[float], most: int) -> None:
    series = Series(list(range(len(values))), values, [None] * len(values))
    parts = stretches(series, most)
    finite = [value for value in values if math.isfinite(value)]
    assert len(parts) <= max(most, 1)
    assert sum(part.count for part in parts) == len(finite)
    assert sum(len(part.lost) for part in parts) == len(values) - len(finite)
    lows, highs = ([getattr(part, name) for part in parts if part.count] for name in ("low", "high"))
    assert (min(lows, default=None), max(highs, default=None)) == (min(finite, default=None), max(finite, default=None))
    assert all(part.low <= part.mean <= part.high for part in parts if part.count)


@given(st.lists(st.integers(0, 12), max_size=30))
def test_what_a_resumed_run_records_again_replaces_what_was_there(batches: list[int]) -> None:
    series = Series()
    for place, batch in enumerate(batches):
        series.add(batch, place, None)
    back = [place for place in range(1, len(batches)) if batches[place] < batches[place - 1]]
    stay = [
        place
        for place, batch in enumerate(batches)
        if not any(place < resumed and batches[resumed] <= batch for resumed in back)
    ]
    assert series.values == stay
    assert series.batches == [batches[place] for place in stay] == sorted(series.batches)


# What is read


def run(folder: Path, stop: int | None = None, **changes: Any) -> None:
    """Two epochs of three batches, in which everything records into one folder; left at a batch."""
    settings: dict[str, Any] = {
        "loggers": [
            JSONLinesLogger(folder / "metrics.jsonl"),
            CSVLogger(folder / "metrics.csv"),
            TensorBoardLogger(folder / "tensorboard"),
        ],
        "callbacks": [
            CheckpointSaver(folder, interval="1ba", keep_best=2, metric="val/loss", mode="min", background=False),
            FlightRecorder(folder / "flight", keep="2ba"),
        ],
        "evaluators": {"val": problem.points(2)},
        "eval_interval": "1ba",
        "autoresume": folder,
        "max_duration": "3ep",
        "clock": time.monotonic,
        "strict": False,
    }
    for event, state in problem.fit(**{**settings, **changes}):
        if event is pl.Event.BATCH_START and state.timestamp.batch == stop:
            break


def test_a_run_that_was_left_twice_has_one_report_of_all_that_it_recorded(tmp_path: Path) -> None:
    run(tmp_path, stop=4)
    half = pl.report(tmp_path, tmp_path / "half" / "of it.html")
    assert "44% done" in parsed(half.read_text()).texts
    run(tmp_path, stop=6)
    run(tmp_path)
    path = pl.report(tmp_path)
    assert path == tmp_path / "report.html"
    html = path.read_text()
    texts = parsed(html).texts
    record = of_folder(tmp_path)
    assert record.problems == []
    assert record.series["train/loss"].batches == list(range(1, 10))
    assert record.series["train/loss"].epochs == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [(span.number, span.first, span.last) for span in record.epochs] == [(1, 0, 3), (2, 3, 6), (3, 6, 9)]
    assert record.losses == list(zip(range(1, 10), record.series["train/loss"].values, strict=True))
    assert {"complete", "Sequential", pl.__version__, torch.__version__} <= {*" ".join(texts).split(" · "), *texts}
    marks = {kept.name: record.marks(kept) for kept in record.checkpoints}
    best, newest = pl.best_path(tmp_path), pl.latest_path(tmp_path)
    assert best is not None
    assert newest is not None
    assert [name for name, listed in marks.items() if "best" in listed] == [Path(best).name]
    assert Path(newest).name in [name for name, listed in marks.items() if "newest" in listed]
    worst = next(each for each in texts if re.fullmatch(r"\d+ba", each))
    assert worst == f"{read_flight(tmp_path / 'flight').batch_of('spike', inside=True)}ba"


# By the name of the file; TensorBoard's has none of its own.
READ: dict[str, Callable[[Path], pl.Logger]] = {
    "metrics.jsonl": lambda folder: JSONLinesLogger(folder / "metrics.jsonl"),
    "metrics.csv": lambda folder: CSVLogger(folder / "metrics.csv"),
    "": TensorBoardLogger,
}


@pytest.mark.parametrize("name", READ)
def test_each_logger_has_the_record_of_memory(tmp_path: Path, name: str) -> None:
    memory, logger = InMemoryLogger(), READ[name](tmp_path)
    pl.run(stream([memory, logger]))
    path = pl.report(logger)
    assert path.parent == tmp_path
    record, wanted = of_files(tmp_path, sorted(tmp_path.iterdir())), of_memory(memory)
    assert record.series.keys() == wanted.series.keys()
    for key, series in wanted.series.items():
        assert record.series[key].batches == series.batches
        values = series.values if name else torch.tensor(series.values, dtype=torch.float32).tolist()
        assert record.series[key].values == values
    assert record.epochs == (wanted.epochs if name else [])  # TensorBoard has steps alone
    assert record.settings.keys() == wanted.settings.keys()
    assert parsed(path.read_text()).texts


@pytest.fixture(scope="module")
def left() -> Iterator[dict[str, bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder))
        files = [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
        yield {str(path.relative_to(folder)): path.read_bytes() for path in files}


@given(st.data())
def test_files_that_are_cut_or_damaged_are_left_out_and_named(left: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(left)))
    content = left[name]
    at = data.draw(st.integers(0, len(content)))
    filling = data.draw(st.binary(max_size=8))
    damaged = content[:at] + (filling + content[at + len(filling) :] if data.draw(st.booleans()) else b"")
    with tempfile.TemporaryDirectory() as folder:
        for each, whole in left.items():
            path = Path(folder, each)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(damaged if each == name else whole)
        # The name of the run may be another one now.
        with contextlib.suppress(pl.errors.ArgumentError):
            parsed(pl.report(folder).read_text())


GOOD = {
    "time": 1.0,
    "event": "BATCH_END",
    "epoch": 0,
    "batch": 3,
    "kind": "metric",
    "name": "a/b",
    "value": "-Infinity",
}
WRONG_LINES = [
    *(json.dumps(GOOD | {"batch": batch}) for batch in (-1, 2**60, 1.5, "1", True, None)),
    *(json.dumps(GOOD | change) for change in ({"name": 3}, {"value": "x"}, {"value": [1]}, {"value": 10**400})),
    *("{", "[]", "3", "[" * 100_000, json.dumps(GOOD)[:-1]),
]
WRONG_ROWS = [
    "-1,0,1.0,2",
    "x,0,1.0,2",
    "3,0,1.0",
    "3,0,1.0,2,4",
    "3,0,1.0,x",
    f"{2**60},0,1.0,2",
    '3,0,1.0,"2',
    "3,0,1",
]


@pytest.mark.parametrize(
    ("name", "head", "good", "wrong"),
    [
        ("metrics.jsonl", json.dumps(GOOD | {"kind": "run", "value": "a run"}), json.dumps(GOOD), WRONG_LINES),
        ("metrics.csv", "batch,epoch,time,a/b", "3,0,1.0,-inf", WRONG_ROWS),
    ],
)
def test_lines_that_are_none_are_counted(tmp_path: Path, name: str, head: str, good: str, wrong: list[str]) -> None:
    (tmp_path / name).write_text("\n".join([head, *wrong, good]) + "\n")
    record = of_folder(tmp_path)
    assert record.series == {"a/b": Series([3], [-math.inf], [0])}
    assert [problem.split(" are")[0].split(": ")[1].split()[0] for problem in record.problems] == [str(len(wrong))]
    assert "What could not be read" in parsed(pl.report(tmp_path).read_text()).texts


# What is refused


def _file(folder: Path) -> Path:
    path = folder / "notes.txt"
    path.write_text("no record")
    return path


def _two_runs(folder: Path) -> Path:
    for name in ("a", "b"):
        loggers = [JSONLinesLogger(folder / name / "metrics.jsonl")]
        problem.run(loggers=loggers, run_name=f"run-{name}", callbacks=[FlightRecorder(folder / name / "flight")])
    return folder


def _two_flights(folder: Path) -> Path:
    for name in ("a", "b"):
        problem.run(callbacks=[FlightRecorder(folder / name)])
    return folder


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], tuple[str, ...]]] = {
    "no folder": (lambda f: f / "runs", pl.errors.ArgumentError, ("there is no folder", "did you mean", "run")),
    "a file": (_file, pl.errors.ArgumentError, ("is a file", "pass its folder", "the logger that wrote it")),
    "nothing": (lambda f: f / "run", pl.errors.ArgumentError, ("has no record of a run, but nothing", "journal.jsonl")),
    "nothing of ours": (
        lambda f: _file(f).parent,
        pl.errors.ArgumentError,
        ("but notes.txt", "JSONLinesLogger", "Record"),
    ),
    "several runs": (
        _two_runs,
        pl.errors.ArgumentError,
        ("holds 2 runs", "'run-a' in a/metrics.jsonl", "Pass the folder"),
    ),
    "several flights": (_two_flights, pl.errors.ArgumentError, ("two FlightRecorders", "pass one of the folders")),
    "a URL": (lambda f: "s3://bucket/run", pl.errors.ArgumentError, ("is a URL", "copy the folder")),
    "a State": (
        lambda f: pl.State.create(problem.mlp()),
        pl.errors.ArgumentTypeError,
        ("is State", "the folder of a run"),
    ),
    "a logger of the screen": (lambda f: pl.loggers.ConsoleLogger(), pl.errors.ArgumentTypeError, ("InMemoryLogger",)),
    "a logger in memory": (
        lambda f: InMemoryLogger(),
        pl.errors.ArgumentError,
        ("has recorded nothing", "pass it to the run"),
    ),
    "a logger of a file": (
        lambda f: CSVLogger(f / "no.csv"),
        pl.errors.ArgumentError,
        ("CSVLogger has recorded nothing",),
    ),
    "a logger of a folder": (TensorBoardLogger, pl.errors.ArgumentError, ("TensorBoardLogger has recorded nothing",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_record_is_refused_with_what_does(tmp_path: Path, name: str) -> None:
    make, error, says = REFUSED[name]
    (tmp_path / "run").mkdir()
    subject = make(tmp_path)
    check(Refusal(name, lambda: pl.report(subject), error, says))
    assert not list(tmp_path.rglob("report.html"))


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run(tmp_path, max_duration="1ba")
    for path, says in (
        (tmp_path, "is a folder: write the path of a file, such as"),
        ("s3://a/b", "give a local path; "),
    ):
        words = ("report path", says) if path == "s3://a/b" else ("report path", says, f"{tmp_path / 'report.html'}")
        check(Refusal(says, lambda path=path: pl.report(tmp_path, path), pl.errors.ArgumentError, words))
    check(Refusal("a file", lambda: pl.report(tmp_path, tmp_path / "metrics.csv" / "x.html"), OSError, ("report",)))


@pytest.mark.parametrize("count", [1, 3, 70])
def test_an_ensemble_is_its_mean_in_a_band(count: int, tmp_path: Path) -> None:
    logger = InMemoryLogger()
    loggers = [logger, JSONLinesLogger(tmp_path / "run.jsonl"), CSVLogger(tmp_path / "run.csv")]
    members = pl.ensemble(lambda: torch.nn.Linear(4, 3), seeds=range(count), fallback="loop")
    problem.run(members, evaluators={"val": problem.points(1)}, loggers=loggers)
    html = pl.report(tmp_path).read_text()
    assert html.count("<figure>") == pl.report(logger, tmp_path / "other.html").read_text().count("<figure>")
    parsed(html)
    assert ("the mean over members" in html) == (count > 1)
    if count > 1:
        first = html[: html.index("</figure>")]
        assert [name in first for name in ("train/loss", "val/loss", "val/loss/best", "member")] == [True] * 3 + [False]
        assert first.count('class="band') == 2
        record = of_memory(logger)
        means, spreads = (record.series[f"train/loss/{kind}"].values for kind in ("mean", "spread"))
        record.fold_members()
        parts = stretches(record.series["train/loss"], 100)
        wanted = [(mean - spread, mean, mean + spread) for mean, spread in zip(means, spreads, strict=True)]
        assert [(part.low, part.mean, part.high) for part in parts] == wanted
        assert "/member/" not in "".join(list(record.series)[:4])
