"""Golden streams: do hundreds of runs still yield the same events and, bit by bit, the same States?

``python -m bench.golden --write`` records them in ``golden.json`` beside this file. ``python -m bench.golden --check``
runs them again and exits with 1 if one differs: it names the stream, its plan, and the first event and leaf that
differ. ``--only eager`` takes one kind (``eager``, ``ranks``, ``compiled``), ``--numbers 0:50`` some numbers.

Models, optimizers, schedules, algorithms and the way in which States are consumed are drawn from the number of a stream
(``plans.py``). Each State is read when it is yielded; those that a consumer keeps are read again at the end, and must
not have changed. Of timestamps the seconds are left out, unless the run was given a clock, and so is the model's
structure, which has no numbers.

The last bits of floats depend on the processor. The file says on which one it was written: on another one, or with
another torch, events, paths, shapes, dtypes and counts are compared, and no values.

The file was written before the loop had one driver, and is the same after it but for two streams: with ``donate=True``
a step had overwritten the best parameters that ``early_stopping`` keeps.

For each stream the file holds ``plan``, a digest of what was drawn; ``digest``, of all of it; ``structure``, of what no
processor changes; and ``rows``: for each State a byte of its structure and a byte for each of its leaves, which is 0
where the leaf is as it was before. They only say where a difference begins.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.digests import Recorder, StateDigest
from bench.fingerprint import fingerprint
from bench.plans import KINDS, NUMBERS, Plan, kind_of, plan_of
from bench.streams import record

__all__ = ["check", "compare", "golden", "main", "summary"]

FILE = Path(__file__).with_name("golden.json")


def recorded(plan: Plan) -> Recorder:
    """The digests of the stream of a plan, of any kind."""
    if plan["kind"] == "ranks":
        from bench.ranks import record_on_ranks

        return record_on_ranks(plan)
    return record(plan)


def summary(plan: Plan, recorder: Recorder) -> dict[str, Any]:
    """What the file holds of a stream."""
    structure, digest = hashlib.blake2b(digest_size=6), hashlib.blake2b(digest_size=8)
    for name in recorder.names:
        structure.update(f"{name}\n".encode())
    for each in recorder.records:
        structure.update(each.structure())
        digest.update(each.bits())
    for note in recorder.notes:
        if not note.startswith("params "):
            structure.update(note.encode())
        digest.update(note.encode())
    digest.update(structure.digest())
    return {
        "plan": plan_digest(plan),
        "states": len(recorder.records),
        "digest": digest.hexdigest(),
        "structure": structure.hexdigest(),
        "rows": base64.b85encode(zlib.compress(b"".join(map(bytes, rows(recorder.records))), 9)).decode(),
    }


def plan_digest(plan: Plan) -> str:
    """A digest of what was drawn."""
    return hashlib.blake2b(json.dumps(plan, sort_keys=True).encode(), digest_size=4).hexdigest()


def rows(records: Iterable[StateDigest]) -> list[list[int]]:
    """For each State a byte of its structure, and one for each leaf: 0 where it is as it was before."""
    before: dict[str, int] = {}
    made = []
    for each in records:
        row = [each.structure()[0]]
        for path, value in zip(each.paths, each.values, strict=True):
            now = value[0] if value else 0
            row.append(now ^ before.get(path, 0))
            before[path] = now
        made.append(row)
    return made


def compare(wanted: dict[str, Any], plan: Plan, recorder: Recorder, *, values: bool) -> str | None:
    """What differs from what the file holds; None: nothing.

    Args:
        wanted: of the file.
        values: whether the values of leaves are compared as well, and not structure alone.
    """
    if recorder.changed:
        return recorder.changed[0]
    if wanted["plan"] != plan_digest(plan):
        return "another plan is drawn for this number than when the file was written: write it anew"
    given = summary(plan, recorder)
    if given["structure"] != wanted["structure"]:
        return _first_difference(wanted, recorder, values=False)
    if values and given["digest"] != wanted["digest"]:
        return _first_difference(wanted, recorder, values=True)
    return None


def _first_difference(wanted: dict[str, Any], recorder: Recorder, *, values: bool) -> str:
    """Where the rows of the file and those of the stream part."""
    old = zlib.decompress(base64.b85decode(wanted["rows"]))
    at = 0
    for number, (each, row) in enumerate(zip(recorder.records, rows(recorder.records), strict=True)):
        place = f"at {each.event.name}, State {number} of {wanted['states']}"
        if at >= len(old):
            break
        if old[at] != row[0]:
            return f"{place}: another event, or other paths, shapes, dtypes or counts; notes {recorder.notes}"
        for offset, path in enumerate(each.paths, start=1):
            if values and old[at + offset] != row[offset]:
                return f"{place}: {path}, {each.forms[offset - 1]}"
        at += len(row)
    if len(recorder.records) != wanted["states"]:
        return f"{len(recorder.records)} States instead of {wanted['states']}; notes {recorder.notes}"
    return f"events between the States that were read, or notes, or a value that no row shows; notes {recorder.notes}"


def golden() -> dict[str, Any]:
    """The file."""
    read: dict[str, Any] = json.loads(FILE.read_text())
    return read


def check(numbers: Iterable[int], *, first: bool = False) -> list[str]:
    """What differs in the streams of these numbers: a text for each, or for the first alone."""
    file = golden()
    values = file["fingerprint"] == fingerprint()
    found = []
    for number in numbers:
        plan = plan_of(number)
        difference = compare(file["streams"][number], plan, recorded(plan), values=values)
        if difference is not None:
            found.append(f"stream {number}: {difference}\n  its plan: {json.dumps(plan)}")
            if first:
                break
    return found


def write() -> list[str]:
    """Record all streams; what should not be in the file, such as a kept State that changed, is returned."""
    streams, problems = [], []
    for number in NUMBERS:
        plan = plan_of(number)
        recorder = recorded(plan)
        streams.append(summary(plan, recorder))
        problems += [f"stream {number}: {text}" for text in recorder.changed]
    lines = ",\n".join(json.dumps(stream) for stream in streams)
    head = json.dumps(fingerprint())
    FILE.write_text(f'{{"fingerprint": {head},\n"streams": [\n{lines}\n]}}\n')
    return problems


def _numbers(text: str) -> range:
    """``0:50``, ``7`` or ``::11``."""
    parts = [int(part) if part else None for part in text.split(":")]
    if len(parts) == 1 and parts[0] is not None:
        return NUMBERS[parts[0] : parts[0] + 1]
    return NUMBERS[slice(*parts)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.golden", description=(__doc__ or "").partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="record all streams anew")
    action.add_argument("--check", action="store_true", help="compare with what is recorded")
    parser.add_argument("--only", choices=list(KINDS), help="this kind of streams")
    parser.add_argument("--numbers", type=_numbers, default=NUMBERS, help="0:50, 7, or ::11")
    parser.add_argument("--first", action="store_true", help="end with the first stream that differs")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began = time.monotonic()
    if given.write:
        found = write()
        print(f"{len(NUMBERS)} streams written to {FILE.name}")
    else:
        numbers = [number for number in given.numbers if given.only in (None, kind_of(number))]
        if golden()["fingerprint"] != fingerprint():
            print(f"written with {golden()['fingerprint']}, and this is {fingerprint()}: structure is compared alone")
        found = check(numbers, first=given.first)
        print(f"{len(found)} of {len(numbers)} streams differ" + (", or more" if found and given.first else ""))
    print(f"{time.monotonic() - began:.0f} s")
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
