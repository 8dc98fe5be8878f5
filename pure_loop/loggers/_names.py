"""Names of what is recorded as names of files and of metrics, of which each place takes other characters.

Two names stay two, and a name becomes the same one each time: one that has to change ends with a digest of what it was.
"""

from __future__ import annotations

import re
from posixpath import normpath

from pure_loop._internal.names import digest_of

__all__ = ["file_part", "mlflow_key"]

# Characters of a name in that of a file, which has a batch, a number and an ending besides.
_LONGEST_PART = 100
# MLflow's limit is 250.
_LONGEST_KEY = 200


def file_part(name: str) -> str:
    """A name as a part of that of a file: letters and digits of ASCII, and ``._-``; ``/`` is ``~``.

    >>> file_part("confusion"), file_part("val/images"), file_part("val images")
    ('confusion', 'val~images', 'val-images~~44a8612a1c')
    """
    safe = re.sub(r"[^A-Za-z0-9._~-]+", "-", name.replace("~", "-").replace("/", "~"))
    # The number of an image follows the name.
    has_number = re.search(r"-\d+(-|$)", safe) is not None
    if safe.replace("~", "/") == name and "~~" not in safe and not has_number and 0 < len(safe) <= _LONGEST_PART:
        return safe
    return f"{safe[:_LONGEST_PART]}~~{digest_of(name)}"


def mlflow_key(name: str) -> str:
    """A name that MLflow takes: characters of ASCII, no path that leads elsewhere, at most 250 of them.

    >>> mlflow_key("val/loss"), mlflow_key("精度")
    ('val/loss', '_-c118b58d31')
    """
    safe = re.sub(r"[^A-Za-z0-9_. /-]+", "_", name)
    if safe == name and normpath(name) == name and not name.startswith(("/", ".")) and len(name) <= _LONGEST_KEY:
        return name
    parts = [part for part in safe[:_LONGEST_KEY].split("/") if part.strip(".")]
    return f"{'/'.join(parts)}-{digest_of(name)}"
