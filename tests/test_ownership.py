"""Counting references: where it can be relied on, the loop does; elsewhere donation and its tests are left out."""

from __future__ import annotations

import sys

from pure_loop import donation
from pure_loop._consumer import COUNTS_CAN_BE_TRUSTED


def test_references_are_counted_where_python_and_torch_count_them() -> None:
    """A count of ours that is off would switch donation off, and skip what says so."""
    if sys.implementation.name == "cpython" and sys.version_info < (3, 14):
        assert COUNTS_CAN_BE_TRUSTED
    assert donation.CAN_COUNT is COUNTS_CAN_BE_TRUSTED
