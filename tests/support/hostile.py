"""Checkpoints that are changed with knowledge of the format, and have a digest that is right.

Whatever they say: ``load`` gives a State that training and saving take, or an error of ours that names the file;
``latest`` and ``autoresume`` take the good file beside it where it can't be read; and it takes little time and memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import operator
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.checkpoint import container
from pure_loop.checkpoint.document import write_document
from pure_loop.checkpoint.finding import found_in
from pure_loop.checkpoint.tree import UnknownClassError
from pure_loop.errors import CheckpointError, ResumeError
from tests.support.checkpoint_runs import fit, little_memory, messages, small, state_at
from tests.support.cpu_time import within

MEMORY = ("fields", "algorithm_state", "frozen", "x")


@functools.cache
def checkpoint(batch: int = 5) -> bytes:
    """The file of a State whose algorithm ``x`` remembers a value of every kind."""
    everything = {
        "tuple": (1, 2.5, float("inf"), "text", None, True, b"bytes", 1 + 2j),
        "sets": [{1, 2}, frozenset({"a"}), torch.Size([2, 3]), torch.float8_e5m2, torch.device("cpu")],
        "deque": [deque([1, (2,)], 3), deque()],
        "tensors": [torch.zeros(2, dtype=torch.complex128), torch.zeros(0, 3), torch.tensor(True), torch.ones(2, 3).T],
        "number": torch.tensor(0.5),
        "keys": {1: torch.arange(3), (2, "b"): {"inner": Event.BATCH_END}},
        "time": pl.Time("3ep"),
    }
    for event, state in fit():
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == batch:
            break
    with tempfile.TemporaryDirectory() as folder:
        pl.save(state.remember("x", everything), f"{folder}/x.safetensors", notes={"who": "me"})
        return Path(folder, "x.safetensors").read_bytes()


def sealed(header: str, data: bytes = b"") -> bytes:
    """A file with this header and a digest that is right."""
    text = header.encode("utf-8", "surrogatepass")
    before = len(text).to_bytes(8, "little") + text + data
    return before + hashlib.blake2b(before, digest_size=32).digest()


def header_of(content: bytes) -> tuple[Any, bytes]:
    """The header of a file, and the bytes of its tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:-32]


def document_of(content: bytes) -> Any:
    """The description in a checkpoint."""
    return json.loads(header_of(content)[0]["__metadata__"]["pure_loop"])


def described(content: bytes, text: str) -> bytes:
    """A checkpoint with another description, this text."""
    header, data = header_of(content)
    header["__metadata__"]["pure_loop"] = text
    return sealed(json.dumps(header), data)


def rewritten(content: bytes, path: tuple[Any, ...], text: str) -> bytes:
    """A checkpoint whose description has this JSON, of whatever kind, at a place."""
    document = document_of(content)
    at(document, path[:-1])[path[-1]] = "HERE"
    return described(content, json.dumps(document).replace('"HERE"', text))


def at(tree: Any, path: Sequence[Any]) -> Any:
    return functools.reduce(operator.getitem, path, tree)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, key), value
        yield from places(value, (*path, key))


class Folder:
    """A checkpoint of batch 3, and beside it a file that anything may have written.

    Attributes:
        path: of that file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self._good = folder, folder / "x.safetensors", folder / "good.safetensors"
        pl.save(state_at(3, position=Event.BATCH_END).remember("x", 0), self._good)

    def check(self, content: bytes, reads: bool = True, seconds: float = 2.0, memory: int = 64 << 20) -> str:
        """Each door gives what fits, or says what is wrong; gives what ``load`` says, "" where it gives a State.

        With ``reads`` runs begin with it, too, and what was loaded is saved again.
        """
        self.path.write_bytes(content)
        files = [str(self._good), str(self.path)]
        with messages(), little_memory(memory):
            is_older = [found.path for found in found_in(self.folder)] == files  # `latest` doesn't read it through
            for strict in (True, False)[: 1 + reads]:
                within(seconds, lambda strict=strict: self._loaded(weights_only=True, strict=strict))
        with messages() as said:
            with little_memory(memory):
                state, error = within(seconds, self._loaded)
                latest = within(seconds, lambda: pl.latest_path(self.folder))
            unreadable = isinstance(error, CheckpointError) and not isinstance(error, UnknownClassError)
            assert latest in (files[:1] if unreadable else files)
            assert is_older or not unreadable or b'"pure_loop' not in content or any(files[1] in text for text in said)
            if reads:
                resumed = self._start(autoresume=self.folder)
                assert resumed == 3 or not isinstance(error, CheckpointError)
        if state is not None and reads:
            self._start(load_path=self.path)
            pl.save(state, self.folder / "again")
            assert _written(pl.load(self.folder / "again", model=small())) == _written(state)
        for text in said:
            _refuse_nasty(text)
        return str(error or "")

    def _loaded(self, **options: Any) -> tuple[pl.State | None, Exception | None]:
        model, refused = small(), None
        try:
            state = pl.load(self.path, model=model, **options)
        except (CheckpointError, ResumeError) as error:
            refused = error
        if refused is not None:
            assert str(self.path) in str(refused)
            for text in (str(refused), *getattr(refused, "__notes__", ())):
                _refuse_nasty(text)
            return None, refused
        for name, tensor in model.state_dict().items():
            found = {**state.params, **state.buffers}[name]
            assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        return state, None

    def _start(self, **where: Any) -> int | None:
        """The batch at which training is resumed; None where the file is refused."""
        at, refused = None, ""
        try:
            with contextlib.closing(fit(**where)) as stream:
                for event, state in stream:
                    at = state.timestamp.batch if event is Event.AFTER_LOAD else at
                    if event is Event.FIT_START:  # what numbers an algorithm remembers is its own affair
                        return at
        except ResumeError as error:
            refused = str(error)
        assert str(self.path) in refused
        return None


def _refuse_nasty(text: str) -> None:
    """A text of a stranger is shortened and escaped wherever it is said."""
    assert len(text) < 3000
    assert "x" * 400 not in text, text[:300]
    assert "\nWARNING" not in text, text[:300]
    assert all(line.isprintable() for line in text.split("\n")), text[:300]


def _written(state: pl.State) -> tuple[Any, dict[str, bytes]]:
    """All that a file has of a State."""
    text, tensors = write_document(state)
    numbers = {name: b"".join(map(bytes, container.pieces_of([tensor]))) for name, tensor in tensors.items()}
    return json.loads(text)["fields"], numbers
