"""``python -m pure_loop``: what an installation has, and what falls back in it."""

from __future__ import annotations

import doctest
import json
import re
from importlib import metadata

import pytest
import torch

import pure_loop as pl
from pure_loop import __main__ as command
from pure_loop._internal import torch_private
from pure_loop.stages.references import can_count
from tests.support.uncounted import without_counts


def test_text_is_aligned_and_names_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    column = lines[0].index(pl.__version__)
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)
    rows = {line[:column].strip(): line[column:] for line in lines}
    assert (rows["pure_loop"], rows["torch"]) == (pl.__version__, torch.__version__)
    assert rows["extra testing"].endswith(f"hypothesis {metadata.version('hypothesis')}")
    assert rows["torch, eager"] == "has every private name that is used"
    assert doctest.testmod(command) == (0, 3)  # pytest collects no __main__.py


def test_json_has_the_same_and_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described == command.describe()
    assert described["extras"]["progress"] == {"rich": metadata.version("rich")}
    assert described["donation"]["counts_references"] is can_count()
    with pytest.raises(SystemExit):
        command.main(["--xml"])
    assert "--json" in capsys.readouterr().err


def test_what_is_missing_is_named_with_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private.missing, "torch._one", "a microsecond")
    monkeypatch.setitem(torch_private.missing, "torch._two", "nothing")
    with without_counts():
        lines = command.render(command.describe()).splitlines()
    *_, one, two, compiler = lines
    assert re.split(r"  +", one) == ["torch, eager", "lacks torch._one, which costs: a microsecond"]
    assert two.strip() == "lacks torch._two, which costs: nothing"
    assert re.split(r"  +", compiler) == ["torch, compiler", "has every private name that is used"]
    assert any(line.startswith("donation") and "every step copies" in line for line in lines)


def test_a_package_that_is_lacking_and_a_folder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["torch>=2", "nowhere-at-all>=1; extra == 'far'", "pure-loop[far,all]; extra == 'all'"]
    monkeypatch.setattr(metadata, "requires", lambda package: listed)
    described = command.describe()
    assert described["extras"] == {"all": {"nowhere-at-all": None}, "far": {"nowhere-at-all": None}}
    assert "lacks nowhere-at-all: pip install 'pure_loop[far]'" in command.render(described)

    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "requires", version)
    monkeypatch.setattr(metadata, "version", version)
    described = command.describe()
    assert described["extras"] == {}
    assert "attrs" in described["versions"]
    assert "not installed" in command.render(described)
