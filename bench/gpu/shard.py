"""For pytest, ``-p bench.gpu.shard``: one of several processes that share tests, and write how each one ended.

It needs no other plugin: a test that takes too long ends its process, by faulthandler, and the next process continues
after it.
"""

from __future__ import annotations

import faulthandler
import os
import re
from pathlib import Path
from typing import Any

import pytest

# What these warn about when they are imported is no test's fault: here warnings are no errors yet.
import pure_loop  # noqa: F401
from bench.gpu.results import Results, first_line, read
from bench.gpu.running import LOST_DEVICE

# After which each call of CUDA in the process fails.
_DEVICE_IS_LOST = re.compile("CUDA error: (an illegal|misaligned|unspecified launch|device-side assert)")
# pytest puts another file in its place.
STANDARD_ERROR = os.dup(2)


class Shard:
    """
    Args:
        number: of this one.
        count: of all.
        limit: seconds a test.
        path: of the file of results; tests that it names already are not run again.
    """

    def __init__(self, number: int, count: int, limit: float, path: Path) -> None:
        self._number, self._count, self._limit, self._results = number, count, limit, Results(path)
        self._before = read(path)
        self._outcome: dict[str, Any] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        mine = items[self._number :: self._count]
        mine.sort(key=lambda item: item.get_closest_marker("slow") is not None)
        self._results.write("selected", value=[item.nodeid for item in mine])
        started = self._before.get("started", {})
        items[:] = [item for item in mine if item.nodeid not in started]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self._results.write(
                "not collected", report.nodeid, value=first_line("\n".join(lines[-1:]) or str(report.longrepr))
            )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome = {"outcome": "passed", "seconds": 0.0}
        self._results.write("started", nodeid, value=True)
        faulthandler.dump_traceback_later(self._limit, exit=True, file=STANDARD_ERROR)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcome["seconds"] = round(self._outcome["seconds"] + report.duration, 2)
        if report.failed and self._outcome["outcome"] != "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash is not None else str(report.longrepr)
            self._outcome |= {"outcome": "failed", "why": first_line(why), "when": report.when}
        elif report.skipped and self._outcome["outcome"] == "passed":
            longrepr = report.longrepr
            why = longrepr[2] if isinstance(longrepr, tuple) else getattr(report, "wasxfail", "")
            self._outcome |= {"outcome": "skipped", "why": first_line(str(why))}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._results.write("tests", nodeid, value=self._outcome)
        if _DEVICE_IS_LOST.search(self._outcome.get("why", "")) and self._outcome["outcome"] == "failed":
            os._exit(LOST_DEVICE)


def pytest_configure(config: pytest.Config) -> None:
    # Of a plugin that may not be installed, and is not used.
    config.addinivalue_line("markers", "timeout(seconds): how long a test may take")
    number, count, limit, path = os.environ["PURE_LOOP_SHARD"].split(",", 3)
    faulthandler.enable(file=STANDARD_ERROR)
    config.pluginmanager.register(Shard(int(number), int(count), float(limit), Path(path)), "shard")
