"""Folders of States in parts that are not whole: they are refused, and passed over."""

from __future__ import annotations

import logging
import os
import shutil
from unittest.mock import patch

import pytest

import pure_loop as pl
from pure_loop.checkpoint.index import INDEX
from tests.support.sharding import network, parts, small


def cut(name, fraction):
    def damage(path):
        file = os.path.join(path, name or parts(path)[0])
        os.truncate(file, int(os.path.getsize(file) * fraction))

    return damage


def flip(name, fraction):
    def damage(path):
        file = os.path.join(path, name or parts(path)[0])
        with open(file, "r+b") as opened:
            opened.seek(min(int(os.path.getsize(file) * fraction), os.path.getsize(file) - 1))
            byte = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte[0] ^ 1]))

    return damage


def of_another_save(path):
    other = path + "-other"
    small(other, weight=2.0)
    shutil.copy(os.path.join(other, parts(other)[0]), os.path.join(path, parts(path)[0]))


def as_a_link(path):
    part = os.path.join(path, parts(path)[0])
    shutil.move(part, path + "-elsewhere")
    os.symlink(path + "-elsewhere", part)


def as_a_folder(path):
    part = os.path.join(path, parts(path)[0])
    os.unlink(part)
    os.mkdir(part)


DAMAGES = {
    "without its index": lambda path: os.unlink(os.path.join(path, INDEX)),
    "without a part": lambda path: os.unlink(os.path.join(path, parts(path)[1])),
    "with a part of another save": of_another_save,
    "with a link to outside": as_a_link,
    "with a folder as a part": as_a_folder,
    **{f"part cut at {n}/8": cut(None, n / 8) for n in (0, 4, 7)},
    **{f"index cut at {n}/8": cut(INDEX, n / 8) for n in (0, 4, 7)},
    **{f"part flipped at {n}/8": flip(None, n / 8) for n in (0, 4, 8)},
    **{f"index flipped at {n}/8": flip(INDEX, n / 8) for n in (0, 4, 8)},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_and_latest_passes_over_it(name, sharded_copy):
    newer, older = (os.path.join(sharded_copy, each) for each in ("newer.sharded", "older.sharded"))
    assert pl.latest(sharded_copy) == newer
    DAMAGES[name](newer)
    with pytest.raises(pl.CheckpointError, match="newer"):
        pl.load(newer, model=network())
    with patch.object(logging.getLogger("pure_loop.checkpoint"), "warning") as warning:
        assert pl.latest(sharded_copy) == older
    message, path, _ = warning.call_args.args
    assert message.startswith("%s is passed over")
    assert path == newer
    assert pl.load(older, model=network()).timestamp.batch == 1
