"""Bytes in a description, which are read as base85: as Python reads it, and in memory that the file has."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop.checkpoint.validation import decoded
from tests.support.tiers import examples

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


class TestDecoding:
    @examples(100, 2000)
    @given(st.binary(max_size=64) | st.integers(0, 200_000).map(lambda size: bytes(range(251)) * (size // 251)))
    def test_what_was_written_is_read(self, content: bytes) -> None:
        assert decoded(base64.b85encode(content).decode()) == content

    @examples(200, 5000)
    @given(st.text(ALPHABET, max_size=12) | st.text(ALPHABET + '" ,\n\x00é', max_size=12))
    def test_any_text_is_read_or_refused_as_python_does(self, text: str) -> None:
        try:
            expected = base64.b85decode(text)
        except ValueError:
            with pytest.raises(ValueError, match=r"base85|ascii"):
                decoded(text)
        else:
            assert decoded(text) == expected


MEASURED = """
import resource, sys, torch
import pure_loop as pl
pl.load(sys.argv[1], model=torch.nn.Linear(1, 1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pl.load(sys.argv[2], model=torch.nn.Linear(1, 1))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_file_with_one_long_text_takes_few_times_its_size(tmp_path: Path) -> None:
    """25 MB took 769 MB. Now: the file, its description as text and as JSON, and the bytes."""
    state = pl.State.create(nn.Linear(1, 1))
    for name, size in (("small", 10), ("large", 20 << 20)):
        pl.save(state.remember("mine", bytes(range(256)) * (size // 256 + 1)), tmp_path / f"{name}.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in ("small", "large")]
    result = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, paths)], capture_output=True, text=True, check=True, timeout=120
    )
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(result.stdout) * unit < 8 * paths[1].stat().st_size
