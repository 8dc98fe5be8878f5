"""Tests of the benchmarks run as those of the library do."""

from tests.conftest import collected, interruptible, leaves_no_process

__all__ = ["collected", "interruptible", "leaves_no_process"]
