"""How far one goes to read a step of training: ``python -m bench.walk`` lists the functions that a step calls.

A step is what happens between two events BATCH_END in a ``for`` loop over ``pl.fit``, with every event watched and
nothing attached, after some steps in which caches fill: two layers of torch, AdamW, batches that are there already.

A call is a ``call`` event of :func:`sys.setprofile` for a Python function of the package. Such an event is also sent
each time that a generator is resumed, and that counts, once for each event of training and for each generator that the
event passes through on its way: a driver that runs a script in a script of its own pays for both. How many calls are
such resumptions, of functions that were called before, is counted besides. Functions of
generated code (records' copiers, attrs' methods) count as calls, and all of them together as one file. Comprehensions
do not count: since Python 3.12 they are no functions. Neither do torch's functions, nor those of the loop's body.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import attrs
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal import frames

__all__ = ["CALLS", "FILES", "Walk", "exceeded", "place_of", "walk"]

# At most so many in a step.
FILES, CALLS = 12, 110

GENERATED = "generated code"

_PACKAGE = Path(pl.__file__).parent
_WARM_STEPS = 10
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})


@attrs.frozen
class Walk:
    """The calls of one step.

    Attributes:
        calls: how many of each function, ``(place, name)``, in the order in which they are first called.
        resumptions: how many of the calls resume a generator.
    """

    calls: Counter[tuple[str, str]]
    resumptions: int = 0

    @property
    def total(self) -> int:
        """How many calls there are."""
        return self.calls.total()

    @property
    def files(self) -> Counter[str]:
        """How many calls there are of functions of each file, in the order in which they are first entered."""
        found: Counter[str] = Counter()
        for (place, _), count in self.calls.items():
            found[place] += count
        return found


def place_of(code: CodeType, module: str | None = None) -> str | None:
    """The file of a function, from the package on; None of one that does not count.

    Args:
        code: of the function.
        module: whose global variables it sees; None: those of no module, as our own generated code.
    """
    name = code.co_filename
    if code.co_name in _COMPREHENSIONS or name.startswith("<frozen"):
        return None
    if name.startswith("<"):
        return GENERATED if (module or pl.__name__).partition(".")[0] == pl.__name__ else None
    path = Path(name)
    return path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else None


def walk(**options: Any) -> Walk:
    """The calls of a step of ``pl.fit`` with these options, besides the model, the data, the loss and AdamW."""
    torch.manual_seed(0)
    data = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(_WARM_STEPS + 3)]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    options = {"optimizer": pl.optim.adamw(lr=1e-3), "max_duration": "1ep", **options}
    called: list[tuple[CodeType, str | None, bool]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            # The argument of the instruction RESUME, of which the lowest bits are 0 at the start of a function.
            resumed = frame.f_code.co_code[frame.f_lasti + 1] & 3 != 0
            called.append((frame.f_code, frame.f_globals.get("__name__"), resumed))

    count, before = 0, sys.getprofile()
    with patch.object(frames, "getprofile", lambda: None):  # else a step with a profiler is walked
        try:
            for event, _ in pl.fit(model, data, loss=nn.functional.cross_entropy, **options):
                if event is Event.BATCH_END:
                    count += 1
                    if count == _WARM_STEPS:
                        sys.setprofile(note)
                    elif count > _WARM_STEPS:
                        sys.setprofile(before)
                        break
        finally:
            sys.setprofile(before)
    calls, resumptions = Counter[tuple[str, str]](), 0
    for code, module, resumed in called:
        place = place_of(code, module)
        if place is not None:
            calls[place, code.co_qualname] += 1
            resumptions += resumed
    return Walk(calls, resumptions)


def exceeded(found: Walk) -> list[str]:
    """A line for each figure that is above its limit."""
    figures = (("files", len(found.files), FILES), ("calls", found.total, CALLS))
    return [f"{number} {name}, the limit is {limit}" for name, number, limit in figures if number > limit]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where a figure is above its limit and ``--check`` is given."""
    parser = argparse.ArgumentParser(prog="python -m bench.walk", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help=f"exit with 1 above {FILES} files or {CALLS} calls")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = walk()
    for (place, name), count in found.calls.items():
        print(f"{count:4}  {place:32}  {name}")
    print()
    for place, count in found.files.items():
        print(f"{count:4}  {place}")
    print(f"\n{found.total} calls of functions in {len(found.files)} files, {found.resumptions} of them resumptions")
    failed = exceeded(found)
    for line in failed:
        print("above the limit:", line)
    return int(bool(failed) and options.check)


if __name__ == "__main__":
    raise SystemExit(main())
