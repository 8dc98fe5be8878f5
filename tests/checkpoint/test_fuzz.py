"""The loader among random files: it gives a State that fits, or an error of ours, and soon."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.checkpoint.tree import Reader
from pure_loop.errors import CheckpointError, ResumeError
from tests.support.checkpoint_runs import fit, little_memory, messages, small
from tests.support.tiers import examples


def written() -> bytes:
    """A checkpoint with every kind of value in it."""
    torch.manual_seed(0)
    everything = {
        "tuple": (1, 2.5, float("inf"), "text", None, True, b"bytes", 1 + 2j),
        "set": [
            {1, 2},
            frozenset({"a"}),
            torch.Size([2, 3]),
            deque([1, (2,)], 3),
            deque(),
            torch.float8_e5m2,
            torch.device("cpu"),
        ],
        "deque": [deque([1, (2,)], 3), deque()],
        "tensors": [torch.zeros(2, dtype=torch.complex128), torch.zeros(0, 3), torch.tensor(True), torch.ones(2, 3).T],
        "keys": {1: torch.arange(3), (2, "b"): {"inner": pl.Event.BATCH_END}},
        "time": pl.Time("3ep"),
    }
    state = pl.run(fit(small())).remember("everything", everything)
    with tempfile.TemporaryDirectory() as folder:
        pl.save(state, Path(folder) / "x.safetensors")
        return (Path(folder) / "x.safetensors").read_bytes()


VALID = written()
LENGTH = int.from_bytes(VALID[:8], "little")
HEADER = json.loads(VALID[8 : 8 + LENGTH])
DOCUMENT = json.loads(HEADER["__metadata__"]["pure_loop"])
DATA = VALID[8 + LENGTH : -32]


def sealed(header: Any, data: bytes = DATA) -> bytes:
    """A file with this header and these bytes of tensors, and a digest that is right."""
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    before = len(text).to_bytes(8, "little") + text + data
    return before + hashlib.blake2b(before, digest_size=32).digest()


def described(document: Any) -> bytes:
    return sealed({**HEADER, "__metadata__": {"pure_loop": json.dumps(document), "format": "pt"}})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


@pytest.mark.parametrize(("length", "reason"), [(1.5, "1.5 is no length"), (-1, "maxlen must be non-negative")])
def test_a_length_that_is_none(length: float, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"in it is no value: {reason}\\.$"):
        Reader({}, torch.device("cpu"), "x").read({"deque": [], "maxlen": length})


def check(content: bytes, path: Path) -> None:
    """That each way to load the file gives what fits the model, or says what is wrong and where."""
    path.write_bytes(content)
    model = small()
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with messages() as said, little_memory():
        found = pl.latest(path.parent)
        assert found == str(path) or said or b"pure_loop" not in content
        for options in ({}, {"weights_only": True}, {"weights_only": True, "strict": False}):
            state = attempt(path, pl.load, path, model=model, **options)
            for name, tensor in {} if state is None else {**state.params, **state.buffers}.items():
                assert (tensor.shape, tensor.dtype) == (wanted[name].shape, wanted[name].dtype)
        stream = attempt(path, fit, model, load_path=path)
        if stream is not None:
            stream.close()


def attempt(path: Path, function: Any, *args: Any, **options: Any) -> Any:
    """What a function gives; None if it says what is wrong with this file."""
    said = ""
    try:
        return function(*args, **options)
    except (CheckpointError, ResumeError) as error:
        said = str(error)
    assert str(path) in said
    assert len(said) < 3000
    return None


@st.composite
def mutilated(draw: st.DrawFn) -> bytes:
    """A valid file that some bytes were changed, taken, doubled, moved or added of."""
    content = bytearray(VALID)
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.one_of(st.integers(0, 8 + LENGTH), st.integers(0, len(content))))
        length = draw(st.sampled_from([1, 1, 2, 7, 32, 500]))
        how = draw(st.sampled_from(["set", "flip", "cut", "insert", "double", "move", "end"]))
        if how == "set":
            content[where : where + length] = draw(st.binary(min_size=length, max_size=length))
        elif how == "flip" and where < len(content):
            content[where] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del content[where : where + length]
        elif how == "insert":
            content[where:where] = draw(st.binary(min_size=1, max_size=40))
        elif how == "double":
            content[where:where] = content[where : where + length]
        elif how == "move":
            to = draw(st.integers(0, len(content)))
            content[to : to + length] = content[where : where + length]
        else:
            del content[where:]
    return bytes(content)


def test_what_is_mutated_is_right_to_begin_with(path: Path) -> None:
    for content in (VALID, sealed(HEADER), described(DOCUMENT)):
        path.write_bytes(content)
        assert pl.latest(path.parent) == str(path)
        assert "everything" in pl.load(path, model=small()).algorithm_state
        check(content, path)


@examples(fast=100, thorough=1500)
@given(content=mutilated())
def test_changed_bytes(path: Path, content: bytes) -> None:
    assume(content != VALID)
    check(content, path)
    with pytest.raises((CheckpointError, ResumeError)):
        pl.load(path, model=small())
