"""Reads what loggers wrote: the training loss by step, for each process that wrote."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Values = list[tuple[int, float]]


def json_lines(path: Path, starts: Sequence[float], name: str) -> list[Values]:
    """Of a file of JSON lines, whose processes are told apart by the times at which they started."""
    values: list[Values] = [[] for _ in starts]
    for line in map(json.loads, path.read_text().splitlines()):
        if line["kind"] == "metric" and line["name"] == name:
            process = sum(line["time"] >= start for start in starts) - 1
            values[process].append((line["batch"], line["value"]))
    return values


def tensorboard(folder: Path, name: str) -> list[Values]:
    """Of event files, of which each process writes one."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return [
        [
            (event.step, value.tensor.float_val[0])
            for event in EventFileLoader(str(file)).Load()
            for value in event.summary.value
            if value.tag == name
        ]
        for file in sorted(folder.glob("events.out.tfevents.*"))
    ]


def wandb(folder: Path, name: str) -> list[Values]:
    """Of W&B's offline runs, of which each process writes one; ``wandb sync`` uploads them as one run."""
    return [
        [
            (record.history.step.num, json.loads(item.value_json))
            for record in _records(file.read_bytes())
            for item in record.history.item
            if (item.key or "/".join(item.nested_key)) == name
        ]
        for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    ]


def _records(raw: bytes) -> Iterator[Any]:
    """The records of a file of W&B: 7 bytes, and blocks of 32 KiB with pieces, each after its checksum and length."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, record = 7, b""
    while at + 7 <= len(raw):
        rest = 32768 - at % 32768
        if rest < 7:
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        if at + 7 + length > len(raw):
            return  # torn by the kill
        record += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(record)
            record = b""
