"""No password or token of an argument is in a record, a repr, an error or a log."""

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
from tests.support import problem
from tests.support.extras import needs
from tests.support.problem import mlp, points

SECRET = "s3cret-9f"
URL = f"memory://ann:{SECRET}@bucket/runs"
WEBHOOKS = [
    "https://hooks.slack.com/services/{}",
    "https://discord.com/api/webhooks/17/{}",
    "https://team.webhook.office.com/webhookb2/{}/b?part=1",
    "https://{}@host/a",
]
WORDS = st.text("abcXYZ0123456789-_.!$*", min_size=1)


@given(WORDS, WORDS, st.sampled_from(["s3", "https", "memory"]))
def test_a_password_in_a_url_is_hidden_and_the_rest_stays(user: str, password: str, scheme: str) -> None:
    text = without_secrets(f"at {scheme}://{user}:{password}@host/a and {scheme}://host/{user}")
    assert text == f"at {scheme}://{user}:...@host/a and {scheme}://host/{user}"


def test_urls_and_arguments_that_are_secrets_themselves() -> None:
    for url in WEBHOOKS:
        text = without_secrets(f"at {url.format(SECRET)} and ssh://git@host/hooks/a")
        assert SECRET not in text
        assert text.startswith("at https://")
        assert text.endswith(" and ssh://git@host/hooks/a")
    for name in ("token", "api_token", "api_key", "password", "secret", "aws_secret_access_key"):
        assert is_secret(name)
        assert SECRET not in call("Logger", {name: SECRET}) + shown({"options": {name: SECRET}})
    for name in ("tokenizer", "key", "tokens", "keep", "max_tokens", "monkey"):
        assert call("f", {name: "gpt2"}) == f"f({name}='gpt2')"


@needs("fsspec", "slack_sdk")
def test_records_reprs_explanations_and_errors_have_none() -> None:
    for url in (URL, f"memory://bucket/runs?sv=1&sig={SECRET}&part=2"):
        logger, uploader, saver = InMemoryLogger(), RemoteUploader(url), CheckpointSaver(url)
        slack = SlackLogger("#runs", token=SECRET, interval=0, base_url="http://127.0.0.1:9/")
        arguments: dict[str, Any] = {"callbacks": [saver], "loggers": [logger, uploader], "autoresume": url}
        arguments |= {"max_duration": "1ba", "strict": False}
        problem.run(**arguments)
        fit = {"loss": problem.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1)}
        for item in (logger.hyperparameters, uploader, saver, slack, pl.explain(mlp(), points(), **fit, **arguments)):
            assert SECRET not in str(item) + repr(item)
        assert "memory://" in str(logger.hyperparameters)
        for call_it in (
            lambda url=url: pl.load(f"{url}/none.ckpt", model=mlp()),
            lambda url=url: pl.load(f"nothing{url}"),
            lambda url=url: problem.fit(max_duration=url),
            lambda url=url: RemoteUploader(url, timeout=-1),
            lambda url=url: SlackLogger("#runs", token=SECRET, base_url=url.replace("memory", "gopher")),
        ):
            with pytest.raises(pl.PureLoopError) as caught:
                call_it()
            assert SECRET not in str(caught.value)


def test_logs_are_one_line_and_each_class_of_errors_hides_secrets(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pure_loop.checkpoint"):
        log = get_logger("pure_loop.checkpoint")
        log.warning("%s is passed over: %s", f"{URL}/a\nWARNING all is well\x1b[2J", "x" * 10_000)
    texts = [caplog.records[0].getMessage()]
    kinds = [getattr(pl.errors, name) for name in pl.errors.__all__]
    for kind in (each for each in kinds if not issubclass(each, Warning)):
        text = f"at {URL}\x1b[31m {'x' * 2000}"
        texts.append(str(kind(2, text, "path") if issubclass(kind, OSError) else kind(text)))
    for found in texts:
        assert SECRET not in found
        assert found.isprintable()
        assert len(found) < 5000
