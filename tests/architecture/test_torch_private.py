"""Private names of torch: eager code names them in one module, and does without each of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
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
# Those that are looked up while pure_loop is imported.
NAMES = [
    "torch._C._is_any_autocast_enabled",
    "torch.autograd.Variable._execution_engine",
    "torch._C._current_graph_task_id",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.peek_interpreter_stack",
    "torch.Tensor._use_count",
    "torch.cuda.memory._record_memory_history",
    "torch.cuda.memory._dump_snapshot",
    "torch._C._storage_Use_Count",
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch._amp_update_scale_",
    "torch._fused_adam_",
    "torch._fused_adamw_",
    "torch._fused_sgd_",
    "torch.utils.data._utils.collate.default_collate_fn_map",
    "torch.nn.modules.module._has_any_global_hook",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch._C._len_torch_function_stack",
    "torch._C._len_torch_dispatch_stack",
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch.utils._pytree.register_pytree_node",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.GetAttrKey",
    "torch.utils._pytree.MappingKey",
    "torch.utils._pytree.SUPPORTED_NODES",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._C._DisableTorchDispatch",
]
# The same, where not every torch has them, and nothing is lost by that.
OPTIONAL = ["torch._foreach_clone", "torch._C._has_Standard_Deleter"]
# Those that are looked up when they are needed, and what serves in their place; tests below do without them.
LATER = {
    "torch.Tensor._make_subclass": "as_subclass",
    "torch.Tensor._backward_hooks": "none is seen",
    "torch.Tensor._post_accumulate_grad_hooks": "none is seen",
    "torch.distributed.tensor.DTensor._local_tensor": "to_local",
    "torch.distributed.tensor.DTensor._spec": "from_local",
    "torch.utils.data.DataLoader._iterator": "workers end when they are collected",
    "torch.utils.data.DataLoader._IterableDataset_len_called": "nothing",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers": "they end when they are collected",
    "torch.mps._get_default_mps_generator": "an error that says so",
    "torch._C._distributed_c10d._broadcast_coalesced": "a message for each tensor",
    "torch._C._distributed_c10d._register_process_group": "ranks are processes",
    "torch._C._distributed_c10d._unregister_process_group": "ranks are processes",
    "torch.distributed.distributed_c10d._get_default_store": "an error that says so",
    "torch.distributed.distributed_c10d._World": "ranks are processes",
    "torch.distributed.distributed_c10d._world": "ranks are processes",
    "torch.distributed.device_mesh.DeviceMesh._pg_registry": "groups end with the process",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "ranks wait until their timeout",
    "torch.distributed.fsdp.FSDPState._fsdp_param_group": "ranks wait until their timeout",
    "torch.distributed.fsdp.FSDPParamGroup._all_gather_result": "ranks wait until their timeout",
    "torch.distributed.Reducer._push_all_rebuilt_params": "a backward of nothing",
    "torch.ops._c10d_functional.wait_tensor": "torch waits where the tensor is used",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "a rehearsal counts no collectives",
    "torch.utils._debug_mode.DebugMode": "no operation is named",
    "torch._compile": "nothing",
    "torch._dynamo": "nothing",
    "torch._inductor.config": "nothing",
}

# What the programs have in common.
COMMON = """
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
    for optimizer in (pl.optim.adamw(lr=0.1), pl.optim.adam(lr=0.1), pl.optim.sgd(lr=0.1, momentum=0.9)):
        for options in ({}, {"precision": "amp_fp16"}, {"microbatch_size": 2}):
            loader = torch.utils.data.DataLoader(rows, batch_size=4)
            for _, state in pl.fit(model, loader, loss=loss, optimizer=optimizer, max_duration="2ba", **options):
                pass
            assert state.timestamp.batch == 2
            numbers += [tensor.clone() for tensor in state.params.values()]
    return numbers, pl._internal.torch_private.missing
"""

# One process imports torch, and a child of it for each name imports pure_loop without that, and trains two steps.
PROGRAM = (
    COMMON
    + """

def child(path, write):
    with without(path):
        import pure_loop._internal.torch_private
    try:
        numbers, missing = train()
        assert missing, "it is not noted as missing"
        torch.save(numbers, write)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1


folder, *names = sys.argv[1:]
for number, path in enumerate(names):
    pid = os.fork()
    if not pid:
        status = child(path, f"{folder}/{number}")
        sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"without {path}: failed")
right, missing = train()
assert not missing, missing
for number, path in enumerate(names):
    for one, other in zip(torch.load(f"{folder}/{number}"), right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text: f"without {path}: {text}")
print("all the same")
"""
)

# The same without all of them at once, for which all of the package is imported, and not only the gate. What pure_loop
# imports of torch needs some of these names itself, and is imported before.
ALL_AT_ONCE = (
    COMMON
    + """

def import_all():
    import pure_loop

    for module in pkgutil.walk_packages(pure_loop.__path__, "pure_loop."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of an extra
                importlib.import_module(module.name)


folder, *names = sys.argv[1:]
pid = os.fork()
if not pid:
    status = 1
    try:
        import_all()
        numbers, missing = train()
        assert not missing, missing
        modules = [name for name in sys.modules if name.startswith("torch.")]
        ours = [name for name in sys.modules if name.startswith("pure_loop.")]
        torch.save((modules, ours), f"{folder}/modules")
        torch.save(numbers, f"{folder}/numbers")
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)
assert os.waitpid(pid, 0)[1] == 0
modules, ours = torch.load(f"{folder}/modules")
for name in modules:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.ExitStack() as hidden:
    for name in names:
        hidden.enter_context(without(name))
    import_all()
assert not set(ours) - set(sys.modules), set(ours) - set(sys.modules)
numbers, missing = train()
for one, other in zip(numbers, torch.load(f"{folder}/numbers"), strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
print(*missing)
"""
)


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
def test_training_works_without_each(tmp_path: Path) -> None:
    """To rounding: a fallback may add in another order."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *NAMES], capture_output=True, text=True, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout == "all the same\n"


@pytest.mark.slow  # imports the whole package in processes of their own
def test_importing_and_training_work_without_all_at_once(tmp_path: Path) -> None:
    names = [*NAMES, *(name for name in OPTIONAL if there(name))]
    ran = subprocess.run(
        [sys.executable, "-c", ALL_AT_ONCE, str(tmp_path), *names],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    unnoted = {name for name in NAMES if name.rpartition(".")[2] not in re.split(r"[\s.]", ran.stdout)}
    # Keys are looked up where something is registered.
    assert unnoted == {"torch.utils._pytree.GetAttrKey", "torch.utils._pytree.MappingKey"}


def there(name: str) -> bool:
    """Whether this torch has what it may lack."""
    try:
        attrgetter(name.partition(".")[2])(torch)
    except AttributeError:
        return False
    return True


def looked_up(source: str) -> set[str]:
    """The private names in the source of a gate: attributes, imports, and texts that are a name or a path of names.

    Those of the module's own, ``self._name`` and ``__name__`` are none.
    """
    tree = ast.parse(source)
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self")):
                continue
            case ast.Attribute():
                found.update(ast.unparse(node).split("."))
            case ast.Import(names=aliases):
                found.update(part for alias in aliases for part in alias.name.split("."))
            case ast.ImportFrom(module=str(module), names=aliases):
                found.update([*module.split("."), *(alias.name for alias in aliases)])
            case ast.Constant(value=str(text)) if re.fullmatch(r"\.?(\w+\.)*\w*", text):
                found.update(text.split("."))
    return {name for name in found if re.fullmatch(r"_[a-zA-Z]\w*", name)} - OURS


# The package's own, and a method of named tuples.
OURS = {"_internal", "_replace"}


def not_listed(source: str) -> set[str]:
    """The private names of a gate that no list above has."""
    listed = {part for name in [*NAMES, *OPTIONAL, *LATER] for part in name.split(".")}
    return looked_up(source) - listed


def found_by_path(source: str) -> set[str]:
    """The names that a gate looks up by ``_find(owner, path, lost)``, whole."""
    owners = {
        "Tensor": "torch.Tensor",
        "optimizers": "torch.optim.optimizer",
        "c10d": "torch.distributed.distributed_c10d",
    }
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_find":
            owner, path = ast.unparse(node.args[0]), node.args[1]
            paths = [""]
            for part in path.values if isinstance(path, ast.JoinedStr) else [path]:
                ends = [str(each.value) for each in ast.walk(part) if isinstance(each, ast.Constant)]
                paths = [f"{begin}{end}" for begin in paths for end in ends]
            found.update(f"{owners.get(owner, owner)}.{each}" for each in paths)
    return found


def test_every_name_of_the_gate_is_in_a_list() -> None:
    gate = Path(torch_private.__file__).read_text()
    assert not_listed(gate) == set()
    listed = {*NAMES, *OPTIONAL, *LATER, "torch.autograd.Variable._execution_engine.run_backward"}
    assert found_by_path(gate) - listed == set()
    gone = {name for name in [*NAMES, *OPTIONAL, *LATER] if name.rpartition(".")[2] not in gate}
    assert gone == set()


@pytest.mark.parametrize(
    "source",
    [
        '_find(torch, "_C._of_tomorrow", "nothing")',
        'getattr(tensor, "_of_tomorrow", None)',
        "tensor._of_tomorrow()",
        "from torch.utils._of_tomorrow import Mode",
        "def f():\n    import torch._of_tomorrow",
    ],
)
def test_a_name_that_is_in_no_list_is_found(source: str) -> None:
    assert not_listed(source) == {"_of_tomorrow"}


def test_names_that_are_found_by_their_path() -> None:
    source = """_find(Tensor, "_a", "x"), _find(torch, f"utils._p.{'A' if b else 'B'}", "y")"""
    assert found_by_path(source) == {"torch.Tensor._a", "torch.utils._p.A", "torch.utils._p.B"}


def test_a_torch_whose_compiler_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "missing", {})
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    torch_private.import_compiler()
    assert "torch._dynamo" in torch_private.missing
