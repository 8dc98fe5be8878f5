"""Runs that are ended from outside, by kill -9, SIGTERM and Ctrl-C: the same command resumes, to the same bits.

The processes are real: see :mod:`tests.support.killed_runs`.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import THOROUGH
from tests.support.killed_runs import BATCHES, Killer
from tests.support.tiers import examples

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with Killer() as process:
        yield process


@pytest.fixture(scope="module")
def uninterrupted(killer: Killer) -> str:
    """The last State of the run that nothing is saved of."""
    return killer()["state"]  # type: ignore[no-any-return]


def saved(folder: Path) -> list[int]:
    return sorted(int(each.stem.rpartition("ba")[2]) for each in folder.glob("ep*-ba*.safetensors"))


@pytest.mark.slow  # processes, which are killed again and again
def test_kill_9_at_any_moment(killer: Killer, uninterrupted: str, tmp_path: Path) -> None:
    kills = 200 if THOROUGH else 10
    draw, found = random.Random(kills), Counter[str]()
    run = reached = 0
    while found["SIGKILL"] < kills:
        # By the clock, most often while it starts and reads; where a saver tries its folder; in a save; or somewhere
        # around the batches that follow.
        moments: list[dict[str, Any]] = [
            {"after": draw.uniform(0.0, 0.15)},
            {"batch": 0, "rename": draw.randint(1, 2)},
            {"batch": reached + draw.randint(0, 3), "rename": draw.randint(1, 4)},
            {"batch": reached + draw.randint(1, 4), "after": draw.uniform(0.0, 0.01)},
        ]
        (when,) = draw.choices(moments, [3, 1, 2, 4])
        folder = tmp_path / str(run)
        folder.mkdir(exist_ok=True)
        saver = {"folder": str(folder), "interval": "1ba", "keep_last": 2, "background": draw.random() < 0.8}
        before = saved(folder)
        told = killer(kill=signal.SIGKILL, saver=saver, autoresume=str(folder), **when)
        assert max(saved(folder), default=0) >= max(before, default=0), "the kill has cost a checkpoint"
        assert told["how"] in ("SIGKILL", "end"), told
        reached = max([told["batch"], *saved(folder)])
        found["in a save"] += any(each.name.startswith(".") for each in folder.iterdir())
        found["in training" if told["batch"] else "before the first batch"] += told["how"] == "SIGKILL"
        found[told["how"]] += 1
        if told["how"] == "end" or found["SIGKILL"] == kills:
            ended = killer(saver=saver, autoresume=str(folder))
            assert ended.get("state") == uninterrupted, f"run {run} ended otherwise: {ended.get('text')}"
            assert not list(folder.glob(".*")), "what killed processes have left is swept by the next one"
            run, reached = run + 1, 0
    assert all(found[each] for each in ("before the first batch", "in training", "in a save")), found


SAVERS = st.fixed_dictionaries({"interval": st.sampled_from(["1ba", "1000ba"]), "background": st.booleans()})


@pytest.mark.slow  # processes with loader workers, which are signalled
@pytest.mark.timeout(3000)
@examples(8, 100)
@given(
    st.none() | SAVERS,
    st.fixed_dictionaries(
        {
            "group": st.booleans(),
            "kill": st.sampled_from([signal.SIGTERM, signal.SIGINT]),
            "workers": st.integers(0, 2),
            "persistent": st.booleans(),
            "seconds": st.sampled_from([0.0, 0.001, 0.003]),
            "batch": st.integers(0, 20),
            "evaluation": st.booleans(),
            "twice": st.booleans(),
            "after": st.floats(0.0, 0.05),
        }
    ),
)
def test_a_job_is_saved_whenever_it_is_signalled(
    killer: Killer, uninterrupted: str, saver: dict[str, Any] | None, arguments: dict[str, Any]
) -> None:
    """A file holds the State, the signal acts, and the same command resumes to the bits of a whole run."""
    arguments["persistent"] &= arguments["workers"] > 0
    number = arguments["kill"]
    with tempfile.TemporaryDirectory() as folder:
        saver = None if saver is None else {**saver, "folder": folder}
        told = killer(autoresume=folder, saver=saver, **arguments)
        batch = told["batch"]
        if told["how"] == "end":
            assert batch == BATCHES
            return
        if batch == 0 and not saved(Path(folder)):
            # Before FIT_START there is nothing to save.
            assert told["how"] in (signal.Signals(number).name, "KeyboardInterrupt"), told
        else:
            ending = ("SystemExit", 143) if number == signal.SIGTERM else ("KeyboardInterrupt", None)
            assert (told["how"], told["code"]) == ending, told
            assert batch in saved(Path(folder)), told["stderr"]
            assert f"the State of batch {batch} is saved in {folder}" in told["stderr"]
            assert "the same command resumes from it" in told["stderr"]
            assert "DataLoader worker" not in told["stderr"], "workers outlive a signal to the group"
            assert told["handlers"], "handlers are as before"
        ended = killer(autoresume=folder, workers=arguments["workers"])
        assert ended.get("state") == uninterrupted, ended.get("text")
