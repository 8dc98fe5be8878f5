"""Private names of torch: eager code names them in one module, and does without each of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

import pure_loop as pl
from pure_loop._internal import torch_private

PACKAGE = Path(pl.__file__).parent
# `torch._foreach_*` is documented.
PRIVATE = re.compile(
    r"\btorch\.(?:\w+\.)*_[a-zA-Z]\w*|\bfrom torch(?:\.\w+)*\._\w+|\bimport torch(?:\.\w+)*\._\w+"
    r"|\bfrom torch(?:\.\w+)* import _\w+"
)
PUBLIC_ENOUGH = re.compile(r"torch\._foreach_\w+")
ATTRIBUTES = re.compile(
    r"\b_(?:spec|local_tensor|iterator|IterableDataset_len_called|shutdown_workers|pg_registry|get_fsdp_state|make_subclass"
    r"|fsdp_param_group|all_gather_result|push_all_rebuilt_params|get_default_store|post_accumulate_grad_hooks)\b"
)
GATE = Path(torch_private.__file__)


def looked_up(source: str) -> list[str]:
    """The names that a gate looks up by ``_find(owner, path, lost)`` while it is imported."""
    owners = {"Tensor": "torch.Tensor", "optimizers": "torch.optim.optimizer"}
    calls = []
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            calls += [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func) == "_find"]
    pairs = [(ast.unparse(call.args[0]), ast.literal_eval(call.args[1])) for call in calls]
    return [f"{owners.get(owner, owner)}.{path}" for owner, path in pairs]


# The engine's method can't be taken away, the engine can. Keys are looked up, and noted, where something is registered.
KEYS = ["torch.utils._pytree.GetAttrKey", "torch.utils._pytree.MappingKey"]
NAMES = [name.removesuffix(".run_backward") for name in looked_up(GATE.read_text())] + KEYS

# One process imports torch, and a child of it for each name imports pure_loop without that, and trains two steps; the
# last one does so without all names, with all of the package imported. What pure_loop imports of torch needs some of
# these names itself, and is imported before.
PROGRAM = """
import contextlib, importlib, os, pkgutil, sys, traceback
import torch
from torch import nn
import torch.utils.data

torch.set_num_threads(1)


@contextlib.contextmanager
def without(path):
    # torch needs the name itself, so it is there again after pure_loop was imported.
    *parts, name = path.split(".")
    owner = torch
    for number in range(2, len(parts) + 1):  # torch.optim deletes the attribute of that name
        owner = sys.modules.get(".".join(parts[:number])) or getattr(owner, parts[number - 1])
    inherited = name not in vars(owner)
    value = Hidden() if inherited else vars(owner)[name]
    if inherited:
        setattr(owner, name, value)
    else:
        delattr(owner, name)
    yield
    if inherited:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


class Hidden:
    def __get__(self, instance, owner):
        raise AttributeError("hidden")


def train():
    import pure_loop as pl

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    rows = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    loss = torch.nn.functional.cross_entropy
    numbers = []
    optimizers = pl.optim.adamw(lr=0.1), pl.optim.adam(lr=0.1), pl.optim.sgd(lr=0.1, momentum=0.9)
    for optimizer, options in zip(optimizers, ({}, {"precision": "amp_fp16"}, {"microbatch_size": 2}), strict=True):
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        for _, state in pl.fit(model, loader, loss=loss, optimizer=optimizer, max_duration="2ba", **options):
            pass
        assert state.timestamp.batch == 2
        numbers += [tensor.clone() for tensor in state.params.values()]
    return numbers, pl._internal.torch_private.missing


def import_all():
    import pure_loop

    for module in pkgutil.walk_packages(pure_loop.__path__, "pure_loop."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of an extra
                importlib.import_module(module.name)


def child(function):
    pid = os.fork()
    if not pid:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def usual():
    import_all()
    numbers, missing = train()
    assert not missing, missing
    torch.save(([name for name in sys.modules if name.startswith("torch.")], numbers), f"{folder}/usual")


def without_these(names):
    with contextlib.ExitStack() as hidden:
        for name in names:
            hidden.enter_context(without(name))
        if len(names) > 1:
            import_all()
        import pure_loop._internal.torch_private
    numbers, missing = train()
    assert missing, "it is not noted as missing"
    for one, other in zip(numbers, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if len(names) > 1:
        print(*missing)
        sys.stdout.flush()


folder, *names = sys.argv[1:]
assert child(usual)
modules, right = torch.load(f"{folder}/usual")
for name in names:
    assert child(lambda: without_these([name])), f"without {name}: failed"
for name in modules:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
assert child(lambda: without_these(names)), "without all of them: failed"
"""


def test_private_names_stand_in_the_gate() -> None:
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place in ("_internal/torch_private.py", "compile/_torch.py"):
            continue
        lines = [
            line
            for line in path.read_text().splitlines()
            if PRIVATE.search(PUBLIC_ENOUGH.sub("", line)) or ATTRIBUTES.search(line)
        ]
        if lines:
            named[place] = lines
    assert not named


def test_this_torch_lacks_none() -> None:
    assert not torch_private.missing


@pytest.fixture
def unnoted(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The dict of what is missing, empty, for one test."""
    missing: dict[str, str] = {}
    monkeypatch.setattr(torch_private, "missing", missing)
    return missing


@pytest.fixture(scope="module")
def dtensor() -> Iterator[Any]:
    """A DTensor of float32 and shape (4, 3), on one rank of a process group that is in this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        yield distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtensors_are_made_in_the_public_way(dtensor: Any, unnoted: dict[str, str], dtype: torch.dtype) -> None:
    part = torch.ones(4, 3, dtype=dtype)
    usual = torch_private.dtensor_like(dtensor, part)
    assert not unnoted
    assert torch_private.local_tensor(usual) is part

    # What is noted as missing isn't tried again.
    unnoted["torch.distributed.tensor.DTensor.__new__"] = "tried"
    public = torch_private.dtensor_like(dtensor, part)
    assert public.dtype is dtype
    assert not public.requires_grad
    assert (public.shape, public.stride(), public.placements) == (usual.shape, usual.stride(), usual.placements)
    assert public.device_mesh is dtensor.device_mesh
    assert torch.equal(public.to_local(), part)


def test_a_dtensor_that_is_made_in_another_way_is_noted(unnoted: dict[str, str]) -> None:
    class Moved:
        device_mesh, placements, shape = "mesh", ("placement",), (2,)

        def __init__(self) -> None:
            pass

        def stride(self) -> tuple[int, ...]:
            return (1,)

        @staticmethod
        def from_local(*arguments: Any, **keywords: Any) -> Any:
            return arguments, keywords

    part = torch.ones(2)
    arguments, keywords = torch_private.dtensor_like(Moved(), part)
    assert arguments == (part, "mesh", ("placement",))
    assert keywords == {"run_check": False, "shape": (2,), "stride": (1,)}
    assert list(unnoted) == ["torch.distributed.tensor.DTensor.__new__"]


def test_parts_are_read_in_the_public_way(unnoted: dict[str, str]) -> None:
    class Public:
        """Of a DTensor what is public."""

        part = torch.ones(2, requires_grad=True)

        def to_local(self) -> torch.Tensor:
            return self.part.view_as(self.part) if torch.is_grad_enabled() else self.part

    assert torch_private.local_tensor(Public()) is Public.part
    assert list(unnoted) == ["torch.distributed.tensor.DTensor._local_tensor"]
    assert torch_private.local_tensor(Public.part) is Public.part


def test_a_dataloader_without_the_private_names(unnoted: dict[str, str]) -> None:
    assert torch_private.iterator_of_loader(object()) is None
    assert list(unnoted) == ["torch.utils.data.DataLoader._iterator"]
    torch_private.end_workers(iter([]))


def test_of_one_pass_names_what_a_new_dataloader_has() -> None:
    loader = vars(DataLoader([1, 2]))
    names = dict(torch_private.of_one_pass)
    assert {name: loader.get(name, None) for name in names} == names
    assert hasattr(DataLoader([1]), "_iterator")


def test_ranks_without_the_private_names(unnoted: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.fill_buckets(object()) is False
    torch_private.drop_groups_of_fsdp(object())
    torch_private.drop_groups_of_mesh(object())
    assert sorted(unnoted) == [
        "torch.distributed.Reducer._push_all_rebuilt_params",
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    ]
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    with pytest.raises(RuntimeError, match="_get_default_store is not there"):
        torch_private.default_store()


def test_a_subclass_without_the_private_name(unnoted: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Weight(torch.nn.Parameter):
        pass

    tensor = torch.ones(2)
    usual = torch_private.subclass_of_tensor(Weight, tensor, True)
    # torch has it in a base class, where it can't be deleted.
    monkeypatch.setattr(torch.Tensor, "_make_subclass", None, raising=False)
    public = torch_private.subclass_of_tensor(Weight, tensor, True)
    for made in (usual, public):
        assert type(made) is Weight
        assert made.requires_grad
        assert made.is_leaf
        assert made.data_ptr() == tensor.data_ptr()
    assert list(unnoted) == ["torch.Tensor._make_subclass"]


@pytest.mark.slow
def test_training_works_without_each_name_and_without_all(tmp_path: Path) -> None:
    """To rounding: a fallback may add in another order. Forty processes import the package."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *NAMES]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    noted = re.split(r"[\s.]", ran.stdout)
    assert [name for name in NAMES if name.rpartition(".")[2] not in noted] == KEYS


def test_names_that_are_looked_up_are_found() -> None:
    source = '_find(Tensor, "_a.b", "x") or f\ndef later():\n    _find(torch, "_c", "y")'
    assert looked_up(source) == ["torch.Tensor._a.b"]
    assert len(NAMES) > 25


def test_a_torch_whose_compiler_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "missing", {})
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    torch_private.import_compiler()
    assert "torch._dynamo" in torch_private.missing
