"""Tests hold on any processor: kernels for older ones round otherwise, and add in another order.

Values that a test takes for granted to the bit have to be exact in any order of sums, such as whole numbers are.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

FILES = ["tests/tools/test_diff.py", "tests/stages", "tests/metrics", "tests/optim/test_rules.py", "tests/laws"]
KERNELS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}


@pytest.mark.thorough  # the tests of five folders once more
@pytest.mark.timeout(1200)
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="it has no other kernels")
def test_tests_pass_with_the_kernels_of_the_oldest_processors() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not thorough"]
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    result = subprocess.run(command, env={**os.environ, **KERNELS}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:]
