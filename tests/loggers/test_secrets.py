"""No password or token of an argument is in a record, a repr, an error or a log.

Tried: URLs with a user and a password, with a token in place of a user, of webhooks, and with tokens in their query, as
arguments of ``fit``, callbacks and loggers; arguments named as secrets; options in a dict; errors of files that are not
there, refusals, and warnings.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop._internal.logs import get_logger
from pure_loop._internal.reprs import call, shown
from pure_loop._text import is_secret, without_secrets
from pure_loop.callbacks import CheckpointSaver
from pure_loop.loggers import InMemoryLogger, RemoteUploader, SlackLogger
from tests.support.extras import needs
from tests.support.runs import cross_entropy, mlp, points

SECRET = "s3cret-9f"
URL = f"memory://ann:{SECRET}@bucket/runs"
SIGNED = f"memory://bucket/runs?sv=1&sig={SECRET}&part=2"
WEBHOOKS = [
    "https://hooks.slack.com/services/{}",
    "https://discord.com/api/webhooks/17/{}",
    "https://team.webhook.office.com/webhookb2/{}/b?part=1",
    "https://{}@host/a",
]
WORDS = st.text("abcXYZ0123456789-_.!$*", min_size=1)


@given(WORDS, WORDS, st.sampled_from(["s3", "ftp", "https", "sftp", "memory"]))
def test_a_password_in_a_url_is_hidden_and_the_rest_stays(user: str, password: str, scheme: str) -> None:
    text = without_secrets(f"at {scheme}://{user}:{password}@host/a and {scheme}://host/{user}")
    assert text == f"at {scheme}://{user}:...@host/a and {scheme}://host/{user}"


@pytest.mark.parametrize("url", WEBHOOKS)
def test_a_url_that_is_the_secret_itself(url: str) -> None:
    text = without_secrets(f"at {url.format(SECRET)} and ssh://git@host/hooks/a")
    assert SECRET not in text
    assert text.startswith("at https://")
    assert text.endswith(" and ssh://git@host/hooks/a")


@pytest.mark.parametrize("name", ["token", "api_token", "api_key", "password", "secret", "aws_secret_access_key"])
def test_arguments_named_as_secrets(name: str) -> None:
    assert is_secret(name)
    assert SECRET not in call("Logger", {name: SECRET})
    assert SECRET not in shown({"options": {name: SECRET}})


@pytest.mark.parametrize("name", ["tokenizer", "key", "tokens", "keep", "max_tokens", "monkey"])
def test_other_arguments_are_shown(name: str) -> None:
    assert not is_secret(name)
    assert call("f", {name: "gpt2"}) == f"f({name}='gpt2')"


@needs("fsspec", "slack_sdk")
@pytest.mark.parametrize("url", [URL, SIGNED])
def test_records_reprs_and_explanations_have_none(url: str) -> None:
    logger = InMemoryLogger()
    uploader, saver = RemoteUploader(url), CheckpointSaver(url)
    slack = SlackLogger("#runs", token=SECRET, interval=0, base_url="http://127.0.0.1:9/")
    arguments: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": pl.optim.sgd(lr=0.1),
        "max_duration": "1ba",
        "callbacks": [saver],
        "loggers": [logger, uploader],
        "autoresume": url,
    }
    pl.run(pl.fit(mlp(), points(), **arguments))
    for item in (logger.hyperparameters, uploader, saver, slack, pl.explain(mlp(), points(), **arguments)):
        assert SECRET not in str(item)
        assert SECRET not in repr(item)
    assert "memory://" in str(logger.hyperparameters)


@needs("fsspec")
@pytest.mark.parametrize("url", [URL, SIGNED])
def test_errors_have_none(url: str) -> None:
    for call_it in (
        lambda: pl.load(f"{url}/none.ckpt", model=mlp()),
        lambda: pl.load(f"nothing{url}"),
        lambda: pl.fit(mlp(), points(), loss=cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration=url),
        lambda: RemoteUploader(url, timeout=-1),
        lambda: SlackLogger("#runs", token=SECRET, base_url=url.replace("memory", "gopher")),
    ):
        with pytest.raises(pl.PureLoopError) as caught:
            call_it()
        assert SECRET not in str(caught.value)


def test_logs_are_one_line_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger("pure_loop.checkpoint")
    with caplog.at_level(logging.WARNING, logger="pure_loop.checkpoint"):
        log.warning("%s is passed over: %s", f"{URL}/a\nWARNING all is well\x1b[2J", "x" * 10_000)
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert SECRET not in record.getMessage()
    assert len(record.getMessage()) < 5000


@given(st.text())
def test_errors_have_no_control_sequences(text: str) -> None:
    lines = str(pl.CheckpointError(text)).split("\n")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == len(text.split("\n"))
    if text.isprintable() and "://" not in text:
        assert lines == [text]


@pytest.mark.parametrize("name", pl.errors.__all__)
def test_each_class_of_errors_hides_them(name: str) -> None:
    kind = getattr(pl.errors, name)
    text = f"at {URL}\x1b[31m {'x' * 5000}"
    error = kind(2, text, "path") if issubclass(kind, OSError) else kind(text)
    assert SECRET not in str(error)
    assert "\x1b" not in str(error)
    assert len(str(error)) < 1000


def test_slack_shows_what_was_recorded_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[str] = []

    class Client:
        def chat_postMessage(self, channel: str, text: str) -> None:
            posted.append(text)

    logger = SlackLogger("#runs", token="t", interval=0)
    monkeypatch.setattr(logger, "_client", Client())

    class Fails(pl.Callback):
        def batch_end(self, state: pl.State, logger: Any) -> None:
            logger.log_metrics({"<!channel> & a": 1.0}, state)

        def fit_end(self, state: pl.State, logger: Any) -> None:
            raise ValueError("<http://x|y>")

    with pytest.raises(ValueError, match="http"):
        pl.run(
            pl.fit(
                mlp(),
                points(),
                loss=cross_entropy,
                optimizer=pl.optim.sgd(lr=0.1),
                max_duration="1ba",
                callbacks=[Fails()],
                loggers=[logger],
            )
        )
    assert posted
    assert not any("<" in text or ">" in text for text in posted)
    assert any("&lt;http://x|y&gt;" in text for text in posted)
