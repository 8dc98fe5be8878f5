"""A mutation score: of small mistakes in the core, how many do the tests find?

``python -m bench.mutants --sample 120 --seed 0 --output bench/mutants.json`` draws mutants (``mutation.py``) of the
files of each area (``areas.py``), as many of each. For each mutant a copy of the repository gets the file with the
mistake, and there some golden streams are checked, and then the area's tests of the fast tier are run until the first
fails. A mutant is

* ``killed``, by the golden streams or by the tests;
* ``timeout``: something didn't end, which counts as found;
* ``survived``: nothing noticed. Some of these make no difference at all (a cache that is not kept); the others are
  tests that are missing;
* ``invalid``: the test that failed fails without the mistake, too. It doesn't count.

The score of an area is the share that was found. It is that of the fast tests beside the area, and of what is refused;
the laws, the slow tier and the tests of what is built on an area find more. To compare two versions, take the same
sample and seed; where files have changed, other mutants are drawn: compare the scores of areas and not the lists. Of
25 mutants each, a difference of two or three says nothing. Many survivors make no difference that a test could see:
``strict=True`` of a zip, what only a GPU does, a bound from which copying is slower. ``mutants_27ea3a7.json`` has those
of the core before it was rewritten, by the tests of that version; ``mutants_fdf669b.json`` the same mutants as
``mutants.json``, by four times as many tests.

``--compare FILE`` runs nothing: it prints the scores of the output beside those of an earlier record of the same
mutants, those that are no longer found, and, for each mutant that was found by a test that is gone, what finds it now.

``--carry`` runs nothing: it looks up each recorded mutant in the files of today, and writes where it is now. Outcomes
stay those of the recorded commit, and what is no longer there leaves the record: scores are those of the rest.

``--known FILE...`` runs first the test that found a mutant in an earlier record, if it is still there: a mutant that
this test finds needs no other.

The command goes on where it stopped, as long as commit, seed and sample are those of the output. ``--minutes`` ends it
after some time; each mutant takes 10 to 80 seconds. The working tree is never written to, but for the output.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import py_compile
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.areas import AREAS, GOLDEN, LEFT_OUT, guards_of
from bench.mutation import Mutant, mutants_of

__all__ = ["drawn", "main", "scores"]

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("pure_loop", "tests", "bench", "docs", "conftest.py", "pyproject.toml", "_hypothesis_pure_loop.py")
TIMEOUT = 240.0

_GOLDEN = ("-m", "bench.golden", "--check", "--first", "--only", "eager", "--numbers", GOLDEN)
_FAST = "not slow and not thorough"
_NAMED = " and ".join(f"not {word}" for word in LEFT_OUT)
_TESTS = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", _FAST, "-k", _NAMED)

Drawn = tuple[str, str, Mutant]


def drawn(sample: int, seed: int, areas: Sequence[str], root: Path = ROOT) -> list[Drawn]:
    """Mutants as ``(area, file, mutant)``: as many of each area, and the areas in turn."""
    columns = []
    for name in areas:
        draw = random.Random(f"mutants of {name}, {seed}")
        found = [
            (name, str(path.relative_to(root)), mutant)
            for path in AREAS[name].paths(root)
            for mutant in mutants_of(path.read_text())
        ]
        draw.shuffle(found)
        programs = (each for each in found if each[2].of((root / each[1]).read_text()) is not None)
        columns.append(list(itertools.islice(programs, -(-sample // len(areas)))))
    longest = max(map(len, columns))
    return [column[i] for i in range(longest) for column in columns if i < len(column)][:sample]


class Copy:
    """A copy of the repository, in which one file at a time is changed."""

    def __init__(self, root: Path) -> None:
        self.root, self.passed = root, dict[str, bool]()
        leave = shutil.ignore_patterns("__pycache__")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=leave)
            else:
                shutil.copy(source, root / name)
        for path in (root / "pure_loop").rglob("*.py"):
            py_compile.compile(str(path))

    def run(self, *command: str, seconds: float) -> tuple[str, str]:
        """``passed``, ``failed`` or ``timeout``, and the last line of the output."""
        environ = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self.root,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "timeout", ""
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "stream", "E  "))]
        return ("passed" if process.returncode == 0 else "failed"), (lines[-1] if lines else output[-200:])[
            :400
        ].replace(f"{self.root}/", "")

    def judge(self, area: str, file: str, known: str | None = None) -> dict[str, Any]:
        """What becomes of the copy as it is; ``known`` is a test that may find the mistake."""
        began = time.monotonic()
        outcome, by, said = "survived", "", ""
        commands = [("golden", _GOLDEN), ("tests", (*_TESTS, *guards_of(area, file, self.root)))]
        if known is not None and _exists(known, self.root):
            commands.insert(0, ("tests", (*_TESTS, known.partition("[")[0])))
        for name, command in commands:
            ended, said = self.run(*command, seconds=TIMEOUT)
            if ended != "passed":
                outcome, by = ("timeout" if ended == "timeout" else "killed"), name
                break
            said = ""
        return {"outcome": outcome, "by": by, "said": said, "seconds": round(time.monotonic() - began, 1)}

    def judge_mutant(self, area: str, file: str, source: str, known: str | None = None) -> dict[str, Any]:
        """What becomes of a mutant; the copy is as it was afterwards."""
        path = self.root / file
        original = path.read_text()
        compiled = Path(py_compile.compile(str(path)) or "")
        compiled.unlink(missing_ok=True)
        path.write_text(source)
        try:
            result = self.judge(area, file, known)
        finally:
            path.write_text(original)
            py_compile.compile(str(path))
        test = _test(result)
        if test is not None and not self.passes(test):
            result["outcome"] = "invalid"
        return result

    def passes(self, test: str) -> bool:
        """Whether a test passes where nothing was changed."""
        if test not in self.passed:
            self.passed[test] = self.run(*_TESTS, test, seconds=TIMEOUT)[0] == "passed"
        return self.passed[test]


def described(item: Drawn) -> dict[str, Any]:
    """A mutant as the output has it."""
    area, file, mutant = item
    return {
        "area": area,
        "file": file,
        "line": mutant.line,
        "kind": mutant.kind,
        "before": mutant.before[:200],
        "after": mutant.after[:200],
        "place": [mutant.begin, mutant.end],
    }


def carried(
    mutants: Sequence[dict[str, Any]], areas: Sequence[str] = tuple(AREAS), root: Path = ROOT
) -> list[dict[str, Any]]:
    """Recorded mutants with the files and lines of today; those whose code is gone, or is there twice, are left out."""
    today: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for name in areas:
        for path in AREAS[name].paths(root):
            for mutant in mutants_of(path.read_text()):
                item = described((name, str(path.relative_to(root)), mutant))
                today.setdefault(_what(item), []).append(item)
    result = []
    for recorded in mutants:
        places = today.get(_what(recorded), [])
        in_file = [item for item in places if item["file"] == recorded["file"]]
        if len(in_file or places) == 1:
            result.append(recorded | (in_file or places)[0])
    return result


def _what(mutant: dict[str, Any]) -> tuple[Any, ...]:
    return mutant["kind"], mutant["before"], mutant["after"]


def scores(mutants: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each area how many there are of each outcome, and the share that was found."""
    found: dict[str, dict[str, Any]] = {}
    for each in mutants:
        of_area = found.setdefault(each["area"], {"killed": 0, "timeout": 0, "survived": 0, "invalid": 0})
        of_area[each["outcome"]] += 1
    for of_area in found.values():
        counted = sum(of_area.values()) - of_area["invalid"]
        of_area["score"] = round(1 - of_area["survived"] / max(counted, 1), 3)
    return found


def compared(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], root: Path = ROOT) -> list[str]:
    """What became of an earlier record's mutants: scores, what is lost, what finds those of tests that are gone."""
    earlier = {_key(mutant): mutant for mutant in before}
    pairs = [(earlier[_key(mutant)], mutant) for mutant in after if _key(mutant) in earlier]
    pairs = [pair for pair in pairs if "invalid" not in (pair[0]["outcome"], pair[1]["outcome"])]
    was, now = scores([first for first, _ in pairs]), scores([second for _, second in pairs])
    lines = [f"{area}: {was[area]['score']} before, {now[area]['score']} now" for area in was]
    for first, second in pairs:
        place = (
            f"{second['file']}:{second['line']} {second['kind']}: {second['before'][:50]!r} -> {second['after'][:50]!r}"
        )
        if first["outcome"] != "survived" and second["outcome"] == "survived":
            lines.append(f"LOST {place}; was found by {first['said'][:150]}")
        elif (test := _test(first)) is not None and not _exists(test, root):
            lines.append(f"{place}\n    by {test}\n    now {_test(second) or second['by']}")
    return lines


def _test(mutant: dict[str, Any]) -> str | None:
    """The test that found a mutant, with its parameters."""
    match = re.match(r"(?:FAILED|ERROR) (.+?)(?: - |$)", mutant["said"])
    return match[1] if match is not None and mutant["by"] == "tests" else None


def _exists(test: str, root: Path) -> bool:
    path, _, name = test.partition("::")
    function = name.partition("[")[0].rpartition("::")[2]
    return (root / path).exists() and (path.startswith("pure_loop") or f"def {function}(" in (root / path).read_text())


def commit() -> str:
    """The last commit that changed the package, and whether its files differ from it."""
    head = subprocess.run(
        ["git", "log", "-1", "--format=%H", "--", "pure_loop"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "pure_loop"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return head.stdout.strip()[:12] + (" with changes" if changed.stdout.strip() else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", type=int, default=120, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--areas", nargs="+", choices=list(AREAS), default=list(AREAS), help="of these areas alone")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("mutants.json"))
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, each with a copy of its own")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after so long")
    parser.add_argument(
        "--carry", action="store_true", help="write where the recorded mutants are today, and run nothing"
    )
    parser.add_argument("--known", type=Path, nargs="+", default=[], help="earlier records, whose tests are run first")
    parser.add_argument("--compare", type=Path, help="an earlier record of the same mutants; runs nothing")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    given = parser.parse_args(arguments)
    if given.carry:
        record = json.loads(given.output.read_text())
        mutants = carried(record["mutants"])
        _write(given.output, {**record, "scores": scores(mutants), "mutants": mutants, "carried_to": commit()})
        return 0
    if given.compare is not None:
        records = [json.loads(path.read_text())["mutants"] for path in (given.compare, given.output)]
        print("\n".join(compared(*records)))
        return 0
    items = drawn(given.sample, given.seed, given.areas)
    if given.list:
        for area, file, mutant in items:
            print(f"{area} {file}:{mutant.line} {mutant.kind}: {mutant.before[:60]!r} -> {mutant.after[:60]!r}")
        return 0
    end = time.monotonic() + 60 * given.minutes
    about = {"commit": commit(), "seed": given.seed, "sample": given.sample}
    done: list[dict[str, Any]] = []
    if given.output.exists():
        before = json.loads(given.output.read_text())
        if {name: before.get(name) for name in about} == about:
            done = before["mutants"]
    judged_before = {_key(each) for each in done}
    waiting = [item for item in items if _key(described(item)) not in judged_before]
    records = [mutant for path in given.known for mutant in json.loads(path.read_text())["mutants"]]
    tests = {_key(each): test for each in records if (test := _test(each)) is not None}
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(given.jobs):
            copies.put(Copy(Path(folder) / str(number)))
        if not _is_as_recorded(copies):
            return 1

        def judged(item: Drawn) -> dict[str, Any] | None:
            if time.monotonic() > end:
                return None
            place = copies.get()
            try:
                source = item[2].of((ROOT / item[1]).read_text())
                assert source is not None
                mutant = described(item)
                return mutant | place.judge_mutant(item[0], item[1], source, tests.get(_key(mutant)))
            finally:
                copies.put(place)

        for result in pool.map(judged, waiting):
            if result is None:
                continue
            done.append(result)
            print(
                "{outcome} {by} {seconds} s: {file}:{line} {kind}: {before!r} -> {after!r}".format(**result), flush=True
            )
            _write(given.output, {**about, "scores": scores(done), "mutants": done})
    print(json.dumps(scores(done), indent=1))
    return 0


def _key(mutant: dict[str, Any]) -> tuple[Any, ...]:
    return mutant["file"], *mutant["place"], mutant["after"]


def _is_as_recorded(copies: queue.Queue[Copy]) -> bool:
    """Whether golden streams are as they were where nothing was changed."""
    place = copies.get()
    ended, said = place.run(*_GOLDEN, seconds=TIMEOUT)
    copies.put(place)
    if ended != "passed":
        print(f"golden streams without a mutant: {ended} {said}")
    return ended == "passed"


def _write(output: Path, content: dict[str, Any]) -> None:
    """The file as a whole or not at all: the command may be ended at any time."""
    new = output.with_name(f"{output.name}.new")
    mutants = ",\n".join(json.dumps(each) for each in content["mutants"])
    head = json.dumps({name: value for name, value in content.items() if name != "mutants"})
    new.write_text(f'{head[:-1]},\n"mutants": [\n{mutants}\n]}}\n')
    new.replace(output)


if __name__ == "__main__":
    sys.exit(main())
