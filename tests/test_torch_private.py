"""Private names of torch: eager code names them in one module, and does without each of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pure_loop as pl
from pure_loop._internal import torch_private

PACKAGE = Path(pl.__file__).parent
# `torch._foreach_*` is documented, and `torch.utils._pytree` is registered with by half of the packages around torch.
PRIVATE = re.compile(
    r"\btorch\.(?:\w+\.)*_[a-zA-Z]\w*|\bfrom torch(?:\.\w+)*\._\w+|\bimport torch(?:\.\w+)*\._\w+"
    r"|\bfrom torch(?:\.\w+)* import _\w+"
)
PUBLIC_ENOUGH = re.compile(r"torch\._foreach_\w+|torch\.utils\._pytree")
# The compiler has a gate of its own; the testing kit's simulated ranks replace a part of torch.distributed.
ELSEWHERE = ("compile/", "testing/", "_compiling.py")

NAMES = [
    "torch._C._set_grad_enabled",
    "torch._C._is_any_autocast_enabled",
    "torch.autograd.Variable._execution_engine",
    "torch._C._current_graph_task_id",
    "torch._C._is_multithreading_enabled",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.peek_interpreter_stack",
    "torch.Tensor._use_count",
    "torch._C._storage_Use_Count",
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch._amp_update_scale_",
    "torch._fused_adam_",
    "torch._fused_adamw_",
    "torch._fused_sgd_",
    "torch.utils.data._utils.collate.default_collate_fn_map",
]

# One process imports torch, and a child of it for each name imports pure_loop without that, and trains two steps.
PROGRAM = """
import os, sys, traceback
import torch
from torch import nn
import torch.utils.data

torch.set_num_threads(1)


def import_without(path):
    # torch needs the name itself, so it is there again after pure_loop was imported.
    *parts, name = path.split(".")[1:]
    owner = torch
    for part in parts:
        owner = getattr(owner, part)
    inherited = name not in vars(owner)
    value = Hidden() if inherited else vars(owner)[name]
    if inherited:
        setattr(owner, name, value)
    else:
        delattr(owner, name)
    import pure_loop._internal.torch_private

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


def child(path, write):
    import_without(path)
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


def test_private_names_stand_in_the_gate() -> None:
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place == "_internal/torch_private.py" or place.startswith(ELSEWHERE):
            continue
        lines = [line for line in path.read_text().splitlines() if PRIVATE.search(PUBLIC_ENOUGH.sub("", line))]
        if lines:
            named[place] = lines
    assert not named


def test_this_torch_lacks_none() -> None:
    assert not torch_private.missing


@pytest.mark.slow
def test_training_works_without_each(tmp_path: Path) -> None:
    """To rounding: a fallback may add in another order."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *NAMES], capture_output=True, text=True, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout == "all the same\n"
