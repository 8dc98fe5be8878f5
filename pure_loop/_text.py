"""What no record, repr, error or message of a log has: secrets among arguments and in URLs, control characters."""

from __future__ import annotations

import re

__all__ = ["HIDDEN", "is_secret", "one_line", "without_long_words", "without_secrets"]

HIDDEN = "..."

_SECRET = re.compile(
    r"(?:^|[_\W])(?:token|secret|password|passwd|pwd|passphrase|credentials?|authorization"
    r"|(?:api|access|secret|private|account|session|sas|ssh)_?key|connection_string)$",
    re.IGNORECASE,
)
# Tokens of a vocabulary.
_VOCABULARY = re.compile(r"(?:^|_)(?:pad|mask|bos|eos|unk|sep|cls|start|end|image|special)_token$", re.IGNORECASE)
# The part of a URL before its host, the path of a webhook, and values of its query.
_USER = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^/?#\s@:]*):[^/?#\s]*@")
_TOKEN = re.compile(r"(?P<scheme>https?://)[^/?#\s@:]+@", re.IGNORECASE)
_WEBHOOK = re.compile(
    r"(?P<place>://(?:[\w.-]{0,100}hooks?\.[\w.:-]*|[^\s?#]{0,300}/webhooks?)/)[^\s?#'\"]+", re.IGNORECASE
)
_QUERY = re.compile(
    r"(?P<key>[?&;][^=&;\s]*(?:token|secret|password|passwd|sig|signature|key|credential)[^=&;\s]*=)[^&;#\s]+",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether the value of an argument, or of an option, of this name is a secret.

    >>> is_secret("api_key"), is_secret("aws_secret_access_key"), is_secret("tokenizer"), is_secret("mask_token")
    (True, True, False, False)
    """
    return _SECRET.search(name) is not None and _VOCABULARY.search(name) is None


def without_secrets(text: str) -> str:
    """A text in which secrets of URLs are hidden: passwords, tokens in place of users, paths of webhooks, tokens
    of queries.

    >>> without_secrets("ftp://ann:s3cret@host/runs and https://host/a?sig=abc&part=1")
    'ftp://ann:...@host/runs and https://host/a?sig=...&part=1'
    >>> without_secrets("https://hooks.slack.com/services/T0/B0/abc and https://ghp_abc@host/a")
    'https://hooks.slack.com/... and https://...@host/a'
    """
    if "://" not in text:
        return text
    text = _USER.sub(rf"\g<scheme>\g<user>:{HIDDEN}@", text)
    text = _TOKEN.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _WEBHOOK.sub(rf"\g<place>{HIDDEN}", text)
    return _QUERY.sub(rf"\g<key>{HIDDEN}", text)


def one_line(text: str) -> str:
    """A text without line ends and control characters, which are escaped.

    >>> one_line("a\\x1b[31m\\nb: 精度")
    'a\\\\x1b[31m\\\\nb: 精度'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


# Longer than any path that is shown.
_LONG_WORD = re.compile(r"(\S{100})\S{900,}")


def without_long_words(text: str) -> str:
    """A text that has the first 100 characters of each word of more than 1,000.

    >>> without_long_words("a name " + "x" * 5000) == "a name " + "x" * 100 + "..."
    True
    """
    return text if len(text) <= 1000 else _LONG_WORD.sub(r"\1...", text)
