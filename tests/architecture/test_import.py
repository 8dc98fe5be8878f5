"""What ``import pure_loop`` costs over ``import torch``, and what it leaves for later."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import pure_loop as pl

FIT = """
stream = pl.fit(
    torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
    [(torch.randn(32, 64), torch.randint(10, (32,)))] * 3,
    loss=torch.nn.functional.cross_entropy, optimizer=pl.optim.adamw(lr=1e-3), max_duration="2ep",
)
assert sum(event is pl.Event.BATCH_END for event, _ in stream) == 6
"""

MEASURE = """
import json, sys, time
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
start = time.process_time()
import torch
between, memory, names = time.process_time(), resident(), set(sys.modules)
import pure_loop as pl
end, grown, imported = time.process_time(), resident() - memory, set(sys.modules) - names
{body}
found = dict(torch=between - start, ours=end - between, grown=grown)
print(json.dumps(found | dict(imported=sorted(imported), all=sorted(set(sys.modules) - names))))
"""

# What takes a second and dozens of megabytes, and a loop on one process without a compiler never needs.
HEAVY = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "torch.distributed", "torch.optim")
HEAVY += (
    "torch.utils.data",
    "torch.func",
    "torch.testing",
    "sympy",
    "networkx",
    "jinja2",
    "numpy",
    "rich",
    "hypothesis",
)

# What a plain fit doesn't use.
LATER = ("algorithms", "callbacks", "loggers", "testing", "order", "entry.explain", "progress", "compile")
LATER += ("optim.sgd", "optim.partition", "optim.from_torch", "optim.lamb", "optim.lion", "optim.muon")
LATER += ("distributed.replicate", "distributed.shard")


def measured(body: str = "", bytecode: str | None = None) -> Any:
    """What an import costs and brings, in a process of its own; ``bytecode`` is a folder that keeps it between them."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURE.format(body=body)]
    environ = dict(os.environ)
    if bytecode is not None:
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        environ["PYTHONPYCACHEPREFIX"] = bytecode
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout)


@pytest.fixture(scope="module")
def fitted() -> Any:
    return measured(FIT)


@pytest.mark.slow  # in a process of its own
def test_a_plain_fit_imports_nothing_heavy_or_unused(fitted: Any) -> None:
    names = [*HEAVY, *(f"pure_loop.{name}" for name in LATER)]
    assert [each for each in fitted["all"] for name in names if f"{each}.".startswith(f"{name}.")] == []


def test_checkpoints_of_one_rank_import_nothing_of_ranks() -> None:
    """There are builds of torch that have no torch.distributed."""
    imported = measured("pl.save, pl.load, pl.latest_path, pl.callbacks.CheckpointSaver")["all"]
    assert "pure_loop.checkpoint.files" in imported
    assert "pure_loop.distributed.ranks" not in imported


STRICT = FIT.replace(
    "max_duration", "strict=True, evaluators=[(torch.randn(4, 64), torch.zeros(4).long())], max_duration"
)


@pytest.mark.slow  # a process of its own
def test_a_strict_evaluation_does_not_import_the_compiler() -> None:
    assert "strict=True" in STRICT
    assert "torch._dynamo" not in measured(STRICT)["all"]


def test_torch_brings_what_is_called_heavy_by_itself_or_later() -> None:
    """Each name is a module: one that is misspelled would pass above for ever."""
    for name in (*HEAVY, *(f"pure_loop.{each}" for each in LATER if each != "compile")):
        assert name in sys.modules or importlib.util.find_spec(name) is not None


@pytest.mark.slow
def test_importing_is_small_beside_torch(tmp_path: Path) -> None:
    """At most a fifth of what torch takes, 15 MB, a hundred modules; the first import writes the bytecode of both."""
    _, *runs = (measured(bytecode=str(tmp_path)) for _ in range(4))
    assert min(run["ours"] / run["torch"] for run in runs) < 0.2
    assert min(run["grown"] for run in runs) < 15e6
    assert len(runs[0]["imported"]) <= 100


@pytest.mark.slow
def test_functions_named_like_their_modules_stay_functions() -> None:
    """Importing a module makes it an attribute of its package, where the function of that name belongs."""
    modules = {"explain": "entry.explain", "progress": "progress", "drive": "entry.drive", "fit": "entry.fit"}
    methods = ("sgd", "partition", "from_torch", "lamb", "lion", "muon")
    modules |= {f"optim.{name}": f"optim.{name}" for name in methods}
    imports = [
        f"importlib.import_module('pure_loop.{module}'); assert callable(pl.{name})" for name, module in modules.items()
    ]
    uses = [f"pl.{name}.__doc__" for name in modules]
    measured("; ".join(["import importlib", *imports, *uses]))
    measured("; ".join(["import importlib", *uses, *imports]))


def test_every_public_name_is_there_and_listed() -> None:
    for package in (pl, pl.optim):
        assert set(package.__all__) <= set(dir(package))
        assert all(getattr(package, name) is getattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match=r"module 'pure_loop\.optim' has no attribute 'adamn'"):
        pl.optim.adamn  # type: ignore[attr-defined]  # noqa: B018


def test_a_star_brings_the_lazy_names() -> None:
    scope: dict[str, Any] = {}
    exec("from pure_loop import *", scope)
    assert scope["explain"] is pl.explain
    assert scope["algorithms"] is pl.algorithms


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_a_package_is_sent_by_name(dumps: Any) -> None:
    assert pickle.loads(dumps(pl)) is pl


THREADS = """
import threading
import torch, pure_loop as pl
from pure_loop.compile import interpreted
def train(compile, optimizer):
    data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 2
    with interpreted():
        pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, optimizer=optimizer(),
                      max_duration="1ep", compile=compile, watch={pl.Event.FIT_END}))
    done.append(compile)
done = []
ways = (False, lambda: pl.optim.from_torch(torch.optim.AdamW, lr=0.1)), (True, lambda: pl.optim.sgd(lr=0.1))
threads = [threading.Thread(target=train, args=way) for way in ways]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(done) == [False, True]
"""


@pytest.mark.thorough  # imports torch's compiler twice at once
def test_two_threads_that_import_torchs_compiler_dont_wait_for_each_other() -> None:
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=120)
