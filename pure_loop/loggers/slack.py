"""Posts the newest numbers to a channel of Slack at an interval, and says how training ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pure_loop._internal.lazy import require
from pure_loop._internal.logs import get_logger
from pure_loop._internal.names import Pattern
from pure_loop.cadence import CadenceLike
from pure_loop.errors import ArgumentError
from pure_loop.loggers._destination import Destination, Names, has_failed
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._files import RunFile, make_folder, read_path
from pure_loop.progress import words as _words
from pure_loop.ranges import AtLeast, Name, checked
from pure_loop.state import State

__all__ = ["SlackLogger"]

_log = get_logger("pure_loop.loggers")


@checked
class SlackLogger(Destination):
    """Posts one message at an interval with the newest number of each name, and one when training ends.

    A message that can't be posted is no error of training: the first failure is a warning of the logger
    ``pure_loop.loggers``, which says why, and later messages are tried again.

    Args:
        channel: where to, ``"#training"`` or the id of a channel.
        token: of the app, with the scope ``chat:write``; None: that of the variable ``SLACK_TOKEN``.
        interval: how often: ``"1ep"``, ``"1h"``, ``"500ba"``, a predicate of the State; 0: at the end only.
        include, exclude: globs of the names to post; None: all.
        folder: where the file ``slack_run.json`` remembers the last message, so that a resumed run posts none twice;
            None: nowhere. It may have the fields ``{run_name}``, ``{start}``, ``{epoch}``, ``{batch}`` and ``{rank}``.
        base_url: of Slack's interface.
        timeout: seconds that one message may take.

    Raises:
        MissingExtraError: slack_sdk is not installed: ``pip install 'pure_loop[slack]'``.
        ArgumentError, ArgumentTypeError: at once.

    >>> import pure_loop as pl
    >>> logger = SlackLogger("#training", token="xoxb-...", include=["train/loss", "val/*"], interval="1h")
    """

    def __init__(
        self,
        channel: Annotated[str, Name()],
        *,
        token: str | None = None,
        interval: CadenceLike = "1ep",
        include: Names = None,
        exclude: Names = None,
        folder: str | os.PathLike[str] | None = None,
        base_url: str = "https://slack.com/api/",
        timeout: Annotated[int, AtLeast(1)] = 10,
    ) -> None:
        place = None if folder is None else Pattern(folder, "SlackLogger folder")
        super().__init__(include=include, exclude=exclude, flush=interval, place=place)
        self._folder: Path | None = None
        self._run_file: RunFile | None = None
        if place is not None:
            self.settle(place.text)
        self._sdk = require("slack_sdk", "slack", "SlackLogger")
        token = token or os.environ.get("SLACK_TOKEN")
        if not token:
            raise ArgumentError(
                "SlackLogger needs the token of an app with the scope chat:write: SlackLogger(channel, "
                'token="xoxb-..."), or set the variable SLACK_TOKEN.'
            )
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ArgumentError(f'SlackLogger base_url={base_url!r}: write a URL, "https://slack.com/api/".')
        self._client = self._sdk.WebClient(token=token, base_url=f"{base_url.rstrip('/')}/", timeout=timeout)
        self._channel = channel
        self._newest: dict[str, float] = {}
        # The batch of the last message, and whether a failure was noted.
        self._posted = -1
        self._has_warned = False

    def settle(self, path: str) -> None:
        self._folder = read_path(path, "SlackLogger folder")
        self._run_file = RunFile(self._folder / "slack_run.json")

    @property
    def recorded_run_name(self) -> str | None:
        return None if self._run_file is None else self._run_file.run_name

    def begin(self, start: Moment | None) -> None:
        self._newest, self._posted = {}, -1
        if self._run_file is None or self._folder is None:
            return
        make_folder(self._folder, "SlackLogger")
        content = self._run_file.read()
        if content.get("run_name") == self.run_name:
            self._posted = int(content.get("batch", -1))
        else:
            self._run_file.write({"run_name": self.run_name, "batch": -1})

    def write(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.kind == "metric":
                self._newest[entry.name] = entry.value

    def reached(self, state: State) -> None:
        t = state.timestamp
        if t.batch <= self._posted:
            return
        self._posted = t.batch
        of = "" if t.max_duration is None else f" of {_words.duration(t.max_duration)}"
        lines = [f"{name}  {_words.number(value)}" for name, value in self._newest.items()]
        self._post(
            "\n".join([f"*{self.run_name or 'training'}*, epoch {_words.epoch(t)}, batch {t.batch}{of}", *lines])
        )
        if self._run_file is not None:
            self._run_file.write({"run_name": self.run_name, "batch": t.batch})

    def end(self) -> None:
        error = sys.exception()
        if error is not None and has_failed():
            self._post(f"*{self.run_name or 'training'}* ended with {type(error).__name__}: {error}")

    def _post(self, text: str) -> None:
        try:
            self._client.chat_postMessage(channel=self._channel, text=_escaped(text))
        except Exception as error:  # of the network, or of Slack: no reason to end training
            if not self._has_warned:
                self._has_warned = True
                _log.warning("SlackLogger could not post to %s: %s. Training continues.", self._channel, error)


def _escaped(text: str) -> str:
    """The three characters by which Slack writes links, mentions of everybody, and themselves."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
