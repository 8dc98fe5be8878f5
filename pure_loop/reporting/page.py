"""The page of a record: one HTML file that fetches nothing and runs nothing, which is well-formed XML, too."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from pure_loop._internal.reprs import cell, count, in_bytes
from pure_loop._internal.version import __version__
from pure_loop._text import HIDDEN, is_secret, one_line, without_secrets
from pure_loop.checkpoint.flight import Rise, rises
from pure_loop.progress.words import clock, cut
from pure_loop.reporting.curves import charts, shown, text
from pure_loop.reporting.record import TRAIN_LOSS, Record, Span
from pure_loop.reporting.style import STYLE

# Rows that a table has at most, and the columns of numbers in that of epochs.
_ROWS, _COLUMNS, _WORST = 100, 8, 10
# Of tables and texts that were recorded: how many, their rows and columns, and the letters of a text.
_RECORDED, _CELLS, _LETTERS = 12, 15, 2000


def page(record: Record, name: str) -> str:
    """The HTML of a record.

    Args:
        record: what is known of the run.
        name: of the run, where its files don't have one.
    """
    title = text(next(iter(record.names), name))
    sections = {
        "What could not be read": _problems(record),
        "Curves": _curves(record),
        "Epochs": _epochs(record),
        "Numbers": _numbers(record),
        "Worst batches": _worst(record),
        "Checkpoints": _checkpoints(record),
        "Tables and texts": "".join(_recorded(record)),
        "Settings": _settings(record),
        "Environment": _environment(record),
    }
    parts = {heading: body for heading, body in sections.items() if body}
    links = "".join(f'<a href="#{_anchor(heading)}">{heading}</a>' for heading in parts)
    body = "".join(
        f'<section id="{_anchor(heading)}"><h2>{heading}</h2>{body}</section>' for heading, body in parts.items()
    )
    sources = ", ".join(record.sources[:20]) + (" and more" if len(record.sources) > 20 else "")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f"<title>{title} - report</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{title}</h1>{_head(record)}<nav>{links}</nav></header><main>{body}</main>"
        f"<footer>Read from {text(sources, 1000)}. Written by pure_loop {__version__}.</footer></body></html>\n"
    )


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _head(record: Record) -> str:
    """What a run is in one look: how far it is, how long it took, its last loss, and the best of its metrics."""
    fraction, settings = record.fraction, record.settings
    state = "" if fraction is None else "complete" if fraction >= 1 else f"{100 * fraction:.0f}% done"
    words = [f"{record.max_duration} planned"] if record.max_duration else []
    words += [str(settings["model"])] if settings.get("model") else []
    parameters, seed = settings.get("parameters"), settings.get("seed")
    words += [f"{parameters:,} parameters"] if isinstance(parameters, int) else []
    words += [f"seed {seed}"] if seed is not None else []
    cards = [("batches", f"{record.last_batch:,}", count(len(record.epochs), "epoch", "epochs"))]
    if record.seconds is not None:
        begun = record.times and time.strftime("begun %Y-%m-%d %H:%M UTC", time.gmtime(record.times[0]))
        cards.append(("training time", clock(record.seconds), begun or ""))
    if record.losses:
        batch, loss = record.losses[-1]
        cards.append(("last training loss", shown(loss), f"at batch {batch:,}"))
    measured = [name for name in record.series if not name.startswith("train/")]
    bests = [(name, best) for name in measured if (best := record.best(name)) is not None]
    cards += [(f"best {name}", shown(value), f"at batch {batch:,}") for name, (value, batch) in bests[:3]]
    pill = f'<span class="{"done" if state == "complete" else "open"}">{state}</span>' if state else ""
    return (
        f'<p class="about">{pill}{text(" · ".join(words))}</p><dl class="cards">'
        + "".join(
            f"<div><dt>{text(name, 40)}</dt><dd><b>{value}</b><small>{more}</small></dd></div>"
            for name, value, more in cards
        )
        + "</dl>"
    )


def _table(label: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1, note: str = "") -> str:
    """A table of cells that are HTML.

    Args:
        label: what it is a table of.
        head: of the columns.
        rows: of cells; the first heads its row.
        words: how many columns at the beginning are words, at the left.
        note: below it.
    """
    kinds = [' class="word"' if at < words else "" for at in range(len(head))]
    titles = "".join(f'<th scope="col"{kind}>{title}</th>' for kind, title in zip(kinds, head, strict=True))
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td{kind}>{item}</td>" for kind, item in zip(kinds[1:], rest, strict=False))
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{label}"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{_note(note)}"
    )


def _note(words: str) -> str:
    return f'<p class="note">{words}</p>' if words else ""


def _problems(record: Record) -> str:
    items = "".join(f"<li>{text(problem, 600)}</li>" for problem in record.problems[:_ROWS])
    return f'<ul class="problems">{items}</ul>' if items else ""


def _curves(record: Record) -> str:
    if not record.series:
        return '<p class="note">No number was recorded.</p>'
    drawn, left_out = charts(record)
    note = "By how many batches had ended. Of many values a line is their mean at each place, and a band their range; "
    note += "a ring is the best value, and a cross one that is not finite."
    note += f" {count(left_out, 'more name has', 'more names have')} no curve." if left_out else ""
    return f'<div class="charts">{"".join(drawn)}</div>{_note(note)}'


def _epochs(record: Record) -> str:
    spans = record.epochs
    if not spans:
        return ""
    # Losses, what is known to be better or worse, and the rest.
    order = sorted(record.series, key=lambda name: (name != TRAIN_LOSS, record.mode(name) is None))
    names = order[:_COLUMNS]
    step = math.ceil(len(spans) / _ROWS)
    bests = {name: record.best(name) for name in names if not name.startswith("train/")}
    rows = [_epoch(span, names, bests, record) for span in spans if (spans[-1].number - span.number) % step == 0]
    head = ["epoch", "batches", *(text(name, 40) for name in names)]
    note = f"Of {TRAIN_LOSS} the mean over the epoch, of other names the last value in it."
    note += f" Every {step} epochs of {len(spans):,}." if step > 1 else ""
    left_out = len(order) - len(names)
    note += f" {count(left_out, 'more name is', 'more names are')} below." if left_out else ""
    return _table("Epochs", head, rows, note=note)


def _epoch(
    span: Span, names: Sequence[str], bests: Mapping[str, tuple[float, int] | None], record: Record
) -> list[str]:
    cells = [str(span.number), f"{span.last:,}"]
    for name in names:
        values = record.series[name].within(span.first, span.last)
        best = bests.get(name)
        if name == TRAIN_LOSS and values:
            values = [sum(value / len(values) for value in values)]
        is_best = best is not None and span.first < best[1] <= span.last and values[-1] == best[0]
        value = shown(values[-1]) if values else ""
        cells.append(f'<b title="the best">{value} ★</b>' if is_best else value)
    return cells


def _numbers(record: Record) -> str:
    rows = []
    for name in list(record.series)[: 2 * _ROWS]:
        series, pairs = record.series[name], record.series[name].finite
        lowest, highest = min(pairs, default=None), max(pairs, default=None, key=lambda pair: (pair[0], -pair[1]))
        extremes = [f"{shown(pair[0])} <small>at {pair[1]:,}</small>" if pair else "" for pair in (lowest, highest)]
        if (mode := record.mode(name)) is not None and pairs:
            place = ("min", "max").index(mode)
            extremes[place] = f"<b>{extremes[place]}</b>"
        lost = len(series.values) - len(pairs)
        values = f"{len(series.values):,}" + (f" <small>{lost:,} not finite</small>" if lost else "")
        rows.append([text(name, 120), values, shown(series.values[-1]), *extremes])
    left_out = len(record.series) - len(rows)
    note = "The better one of both is bold, where that is known." + (
        f" {count(left_out, 'more name', 'more names')}." if left_out else ""
    )
    return _table("Numbers", ["name", "values", "last", "lowest", "highest"], rows, note=note) if rows else ""


def _worst(record: Record) -> str:
    losses = record.losses
    broken = [(batch, loss) for batch, loss in losses if not math.isfinite(loss)]
    found = heapq.nlargest(_WORST, rises([(batch - 1, loss) for batch, loss in losses]), key=_height)
    worst = [(batch, loss, "") for batch, loss in broken[:_WORST]]
    worst += [(rise.batch + 1, rise.loss, f"+{shown(rise.height)}") for rise in found if rise.height > 0]
    spans, rows = record.epochs, []
    for batch, loss, rise in worst[: 2 * _WORST]:
        epoch = next((str(span.number) for span in spans if batch <= span.last), "")
        rewound = [] if record.flight is None else [f"<code>{batch - 1}ba</code>"]
        rows.append([f"{batch:,}", epoch, shown(loss), rise, *rewound])
    if not rows:
        return ""
    note = "Losses that are not finite, and those that rise most over the median of the 9 before them."
    note += f" {len(broken):,} losses are not finite." if len(broken) > _WORST else ""
    head = ["batch", "epoch", "loss", "rise"]
    if record.flight is not None:
        head.append("rewind to")
        note += " <code>pl.rewind</code> computes a batch again, from the last column."
    return _table("Worst batches", head, rows, note=note)


def _height(rise: Rise) -> tuple[float, int]:
    return rise.height, -rise.batch


def _checkpoints(record: Record) -> str:
    marked = {kept.name: record.marks(kept) for kept in record.checkpoints}
    listed = [kept for at, kept in enumerate(record.checkpoints) if at < _ROWS or marked[kept.name]]
    rows = []
    for kept in listed:
        found, marks = kept.found, " ".join(f'<span class="mark">{mark}</span>' for mark in marked[kept.name])
        if found is None:
            rows.append([text(kept.name), f"can't be read: {text(kept.error, 300)}", "", "", in_bytes(kept.size), ""])
            continue
        event = "" if found.event is None else found.event.name
        score = "" if found.score is None else f"{shown(found.score)} <small>{text(found.metric, 40)}</small>"
        rows.append([text(kept.name), marks + f" <small>{event}</small>", f"{found.batch:,}", str(kept.epoch)])
        rows[-1] += [in_bytes(kept.size), score]
    left_out = len(record.checkpoints) - len(listed)
    note = "As their headers say: their tensors were not read." + (
        f" {count(left_out, 'more is', 'more are')} older." if left_out else ""
    )
    head = ["name", "", "batch", "epoch", "size", "score"]
    return _table("Checkpoints", head, rows, words=2, note=note) if rows else ""


def _recorded(record: Record) -> Iterator[str]:
    for name, (batch, columns, rows) in list(record.tables.items())[:_RECORDED]:
        yield f"<h3>{text(name, 120)} <small>at batch {batch:,}</small></h3>"
        cells = [[text(cell(item), 60) for item in row[:_CELLS]] for row in rows[:_CELLS]]
        is_cut = len(rows) > _CELLS or len(columns) > _CELLS
        note = f"The beginning of {len(rows):,} rows and {len(columns):,} columns." if is_cut else ""
        yield _table(text(name, 120), [text(column, 60) for column in columns[:_CELLS]], cells, note=note)
    for name, (batch, words) in list(record.texts.items())[:_RECORDED]:
        yield f"<h3>{text(name, 120)} <small>at batch {batch:,}</small></h3>"
        lines = (escape(one_line(line)) for line in cut(words, _LETTERS).splitlines())
        yield "<pre>" + "\n".join(lines) + "</pre>"
    left_out = max(len(record.tables) - _RECORDED, 0) + max(len(record.texts) - _RECORDED, 0)
    yield _note(f"{count(left_out, 'more was', 'more were')} recorded." if left_out else "")


def _settings(record: Record) -> str:
    values = {name: value for name, value in record.settings.items() if value is not None}
    unset = [name for name, value in record.settings.items() if value is None]
    rows = [(text(name, 120), _setting(name, value)) for name, value in list(values.items())[: 5 * _ROWS]]
    note = f"{count(len(values) - len(rows), 'more setting', 'more settings')}." if len(values) > len(rows) else ""
    note += f" Not set: {text(', '.join(unset), 1000)}." if unset else ""
    return _list(rows) + _note(note) if record.settings else ""


def _setting(name: str, value: object) -> str:
    return text(HIDDEN if is_secret(name) else without_secrets(cell(value) if type(value) is float else str(value)))


def _environment(record: Record) -> str:
    return _list([(text(name), text(", then ".join(versions))) for name, versions in record.environment.items()])


def _list(rows: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows)
    return f'<dl class="settings">{items}</dl>' if items else ""
