"""The page of a record: one HTML file that fetches nothing and runs nothing, which is well-formed XML, too."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from pure_loop._internal.reprs import cell, count, in_bytes
from pure_loop._internal.version import __version__
from pure_loop._text import HIDDEN, is_secret, without_secrets
from pure_loop.checkpoint.flight import Rise, rises
from pure_loop.progress.words import clock
from pure_loop.reporting.curves import charts, number_text, text
from pure_loop.reporting.record import TRAIN_LOSS, Record, Span

# Rows that a table has at most, and the columns of numbers in that of epochs.
_ROWS, _COLUMNS, _WORST = 100, 8, 10


class Samples(Protocol):
    """The samples of a batch in numbers: what ``pl.inspect`` returns."""

    @property
    def batch(self) -> int: ...

    def tables(self) -> Sequence[tuple[str, list[str], list[list[str]]]]: ...


def page(record: Record, name: str, inspection: Samples | None = None) -> str:
    """The HTML of a record.

    Args:
        record: what is known of the run.
        name: of the run, where its files don't have one.
        inspection: of a batch whose samples are listed.
    """
    title = text(next(iter(record.names), name))
    sections = {
        "What could not be read": _problems(record),
        "Curves": _curves(record),
        "Epochs": _epochs(record),
        "Numbers": _numbers(record),
        "Worst batches": _worst(record),
        "Worst samples": _samples(inspection),
        "Checkpoints": _checkpoints(record),
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
        f"<title>{title} - report</title><style>{_STYLE}</style></head><body>"
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
        cards.append(("last training loss", number_text(loss), f"at batch {batch:,}"))
    measured = [name for name in record.series if not name.startswith("train/")]
    bests = [(name, best) for name in measured if (best := record.best(name)) is not None]
    cards += [(f"best {name}", number_text(value), f"at batch {batch:,}") for name, (value, batch) in bests[:3]]
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
    """A table of cells that are HTML; nothing where it has no row.

    Args:
        label: what it is a table of.
        head: of the columns.
        rows: of cells; the first heads its row.
        words: how many columns at the beginning are words, at the left.
        note: below it.
    """
    if not rows:
        return ""
    kinds = [' class="word"' if at < words else "" for at in range(len(head))]
    titles = "".join(f'<th scope="col"{kind}>{title}</th>' for kind, title in zip(kinds, head, strict=True))
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td{kind}>{item}</td>" for kind, item in zip(kinds[1:], rest, strict=True))
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
    if any(series.spread is not None for series in record.series.values()):
        note += " Of an ensemble a line is the mean over members, in a band of one standard deviation to each side."
    note += f" {count(left_out, 'more name has', 'more names have')} no curve." if left_out else ""
    return f'<div class="charts">{"".join(drawn)}</div>{_note(note)}'


def _epochs(record: Record) -> str:
    spans = record.epochs
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
        value = number_text(values[-1]) if values else ""
        cells.append(f'<b title="the best">{value} ★</b>' if is_best else value)
    return cells


def _numbers(record: Record) -> str:
    rows = []
    for name in list(record.series)[: 2 * _ROWS]:
        series, pairs = record.series[name], record.series[name].finite
        lowest, highest = min(pairs, default=None), max(pairs, default=None, key=lambda pair: (pair[0], -pair[1]))
        extremes = [
            f"{number_text(pair[0])} <small>at {pair[1]:,}</small>" if pair else "" for pair in (lowest, highest)
        ]
        if (mode := record.mode(name)) is not None and pairs:
            place = ("min", "max").index(mode)
            extremes[place] = f"<b>{extremes[place]}</b>"
        lost = len(series.values) - len(pairs)
        values = f"{len(series.values):,}" + (f" <small>{lost:,} not finite</small>" if lost else "")
        rows.append([text(name, 120), values, number_text(series.values[-1]), *extremes])
    left_out = len(record.series) - len(rows)
    note = "The better one of both is bold, where that is known."
    note += f" {count(left_out, 'more name', 'more names')}." if left_out else ""
    return _table("Numbers", ["name", "values", "last", "lowest", "highest"], rows, note=note)


def _worst(record: Record) -> str:
    losses = record.losses
    broken = [(batch, loss) for batch, loss in losses if not math.isfinite(loss)]
    highest = heapq.nlargest(_WORST, rises([(batch - 1, loss) for batch, loss in losses]), key=_height)
    worst = [(batch, loss, "") for batch, loss in broken[:_WORST]]
    worst += [(rise.batch + 1, rise.loss, f"+{number_text(rise.height)}") for rise in highest if rise.height > 0]
    spans, rows = record.epochs, []
    for batch, loss, rise in worst[: 2 * _WORST]:
        epoch = next((str(span.number) for span in spans if batch <= span.last), "")
        rewound = [] if record.flight is None else [f"<code>{batch - 1}ba</code>"]
        rows.append([f"{batch:,}", epoch, number_text(loss), rise, *rewound])
    note = "Losses that are not finite, and those that rise most over the median of the 9 before them."
    note += f" {len(broken):,} losses are not finite." if len(broken) > _WORST else ""
    head = ["batch", "epoch", "loss", "rise"]
    if record.flight is not None:
        head.append("rewind to")
        note += " <code>pl.rewind</code> computes a batch again, from the last column."
    return _table("Worst batches", head, rows, note=note)


def _samples(inspection: Samples | None) -> str:
    if inspection is None:
        return ""
    caption, head, rows = inspection.tables()[0]
    cells = [[text(item) for item in row] for row in rows[:_WORST]]
    note = f"Of batch {inspection.batch + 1:,}: {text(caption.partition(': ')[2], 200)}."
    return _table("Worst samples", head, cells, note=note)


def _height(rise: Rise) -> tuple[float, int]:
    return rise.height, -rise.batch


def _checkpoints(record: Record) -> str:
    marked = {entry.name: record.marks(entry) for entry in record.checkpoints}
    listed = [entry for at, entry in enumerate(record.checkpoints) if at < _ROWS or marked[entry.name]]
    rows = []
    for entry in listed:
        header, marks = entry.header, " ".join(f'<span class="mark">{mark}</span>' for mark in marked[entry.name])
        if header is None:
            rows.append(
                [text(entry.name), f"can't be read: {text(entry.error, 300)}", "", "", in_bytes(entry.size), ""]
            )
            continue
        event = "" if header.event is None else header.event.name
        score = "" if header.score is None else f"{number_text(header.score)} <small>{text(header.metric, 40)}</small>"
        rows.append([text(entry.name), marks + f" <small>{event}</small>", f"{header.batch:,}", str(entry.epoch)])
        rows[-1] += [in_bytes(entry.size), score]
    left_out = len(record.checkpoints) - len(listed)
    note = "As their headers say: their tensors were not read."
    note += f" {count(left_out, 'more is', 'more are')} older." if left_out else ""
    head = ["name", "saved at", "batch", "epoch", "size", "score"]
    return _table("Checkpoints", head, rows, words=2, note=note)


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


# Colours that stay apart without red and green, and lines that differ by their dashes, too.
_STYLE = """
:root{color-scheme:light dark;--paper:#fbfbfa;--card:#fff;--ink:#1a1d21;--soft:#59616b;--line:#e3e5e8;--good:#06724e;
--bad:#b3261e;--c0:#0063a6;--c1:#c24e00;--c2:#00805d;--c3:#a8437f;--c4:#7d6500}
@media screen and (prefers-color-scheme:dark){:root{--paper:#14171a;--card:#1c2024;--ink:#e8eaed;--soft:#a2abb5;
--line:#32383f;--good:#4cc38a;--bad:#ff8a80;--c0:#62b6f3;--c1:#f0954d;--c2:#3ccf9f;--c3:#e79ac6;--c4:#e0cb4f}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:1240px;padding:32px clamp(16px,3vw,40px) 48px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;overflow-wrap:anywhere}
h1{font-size:clamp(22px,4vw,32px);line-height:1.2;letter-spacing:-.02em;margin:0 0 8px}
h2{font-size:19px;letter-spacing:-.01em;margin:0 0 14px}
h3{font-size:14px;margin:0}
small{color:var(--soft);font-size:12px;font-weight:400}
section{margin-top:44px}
.about{color:var(--soft);margin:0}
.about span{border-radius:99px;border:1px solid;font-size:13px;font-weight:600;margin-right:10px;padding:2px 10px}
.done{color:var(--good)}.open{color:var(--c1)}
dl,dd,ul{margin:0;padding:0}
.cards{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));margin:24px 0 18px}
.cards div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px}
.cards dt{color:var(--soft);font-size:13px}
.cards b{display:block;font-size:24px;font-weight:600;letter-spacing:-.02em;line-height:1.3}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:14px}
a{color:var(--c0)}
.charts{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(100%,350px),1fr))}
figure{background:var(--card);border:1px solid var(--line);border-radius:10px;break-inside:avoid;display:flex;
flex-direction:column;justify-content:space-between;margin:0;padding:12px 14px 8px}
figcaption{padding-bottom:8px}
figure svg{display:block;width:100%}
.legend{display:flex;flex-wrap:wrap;font-size:12.5px;gap:0 14px;list-style:none}
figure .swatch{display:inline-block;height:8px;margin-right:6px;width:24px}
svg text{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--line);stroke-width:1}
.line{fill:none;stroke-linecap:round;stroke-linejoin:round;stroke-width:1.8}
.band{opacity:.22}
.lost{fill:none;stroke:var(--bad);stroke-width:1.5}
.best{fill:var(--card);fill-opacity:.2;stroke-width:1.6}
.line.c0,.best.c0{stroke:var(--c0)}.band.c0,.point.c0{fill:var(--c0)}
.line.c1,.best.c1{stroke:var(--c1)}.band.c1,.point.c1{fill:var(--c1)}
.line.c2,.best.c2{stroke:var(--c2)}.band.c2,.point.c2{fill:var(--c2)}
.line.c3,.best.c3{stroke:var(--c3)}.band.c3,.point.c3{fill:var(--c3)}
.line.c4,.best.c4{stroke:var(--c4)}.band.c4,.point.c4{fill:var(--c4)}
.line.c1{stroke-dasharray:7 3.5}.line.c2{stroke-dasharray:2 3.5}.line.c3{stroke-dasharray:9 3 2 3}
.line.c4{stroke-dasharray:4 3}
.table{background:var(--card);border:1px solid var(--line);border-radius:10px;overflow-x:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;overflow-wrap:normal;width:100%}
th,td{border-bottom:1px solid var(--line);padding:7px 14px;text-align:right;white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}
th[scope=row],.word{max-width:min(420px,48vw);overflow-wrap:break-word;text-align:left;white-space:normal}
tbody th{background:var(--card);font-weight:500;left:0;position:sticky}
td small,.mark{white-space:nowrap}
thead th{color:var(--soft);font-size:12.5px;font-weight:500;vertical-align:bottom}
.note{color:var(--soft);font-size:13px;margin:8px 2px 0}
.mark{border:1px solid var(--good);border-radius:99px;color:var(--good);font-size:12px;padding:0 8px}
.problems{border-left:3px solid var(--bad);list-style:none;padding-left:14px}
.settings{columns:2 420px;column-gap:40px;font-size:14px}
.settings div{border-bottom:1px solid var(--line);break-inside:avoid;display:grid;gap:0 16px;
grid-template-columns:minmax(110px,34%) 1fr;padding:5px 0}
.settings dt{color:var(--soft)}
@media(max-width:600px){th,td{padding:6px 9px}}
footer{color:var(--soft);font-size:13px;margin-top:48px}
@media print{body{background:none;font-size:11px;max-width:none;padding:0}nav{display:none}section{margin-top:22px}
.charts{grid-template-columns:repeat(2,1fr)}.table{overflow:visible}tr{break-inside:avoid}h2{break-after:avoid}}
""".strip()
