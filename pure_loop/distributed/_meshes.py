"""The mesh over which States are sharded where none was passed: one for a kind of device, and another after a fault.

It belongs to the process's default group, not to a stream: the States that are left after a stream still refer to it.
A rank that fails breaks it, so that ranks that wait in the middle of a forward wake up. States that were kept are then
sharded over a mesh that can't exchange any more, and training resumes from them over the next one.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import optree
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.torch_private import drop_groups_of_mesh
from pure_loop._internal.tree_ops import is_sharded, on_mesh
from pure_loop.distributed.ranks import Ranks
from pure_loop.errors import DistributedError
from pure_loop.state import State

__all__ = ["break_mesh", "find_mesh", "on_usable_mesh"]

# For each kind of device: the default process group in which the mesh was made (None once it is broken), how many there
# have been, the timeout of its exchanges, and the mesh.
_meshes: dict[str, tuple[ref[Any] | None, int, float, DeviceMesh]] = {}
_NAME = "pure_loop_"


def find_mesh(ranks: Ranks) -> DeviceMesh:
    """A mesh of all ranks, on which all ranks can exchange within the timeout; all ask for it."""
    kind = ranks.device.type
    world = dist.group.WORLD
    result, number, timeout, mesh = _meshes.get(kind, (None, 0, 0.0, None))
    usable = result is not None and result() is world and timeout == ranks.timeout
    # A fault may have broken it on some ranks only.
    by_rank = ranks.gather((usable, number))
    if mesh is None or any(row != (True, number) for row in by_rank):
        number = 1 + max(count for _, count in by_rank)
        # Of a name of its own: torch remembers what it found out for a mesh, and takes equal ones for the same.
        mesh = DeviceMesh.from_group(ranks.new_group(), kind, mesh_dim_names=(f"{_NAME}{number}",))
        _meshes[kind] = ref(world), number, ranks.timeout, mesh
        ranks.keep()
    return mesh


def break_mesh(ranks: Ranks) -> None:
    """Break the connections on which other ranks may be waiting."""
    kind = ranks.device.type
    result, number, timeout, mesh = _meshes.get(kind, (None, 0, 0.0, None))
    if mesh is not None and result is not None and result() is dist.group.WORLD:
        dist.destroy_process_group(mesh.get_group())
        drop_groups_of_mesh(mesh)
        _meshes[kind] = None, number, timeout, mesh


def on_usable_mesh(state: State, ranks: Ranks) -> State:
    """The same State in parts, over a mesh on which ranks can exchange; all ask for it, with the same State.

    Raises:
        DistributedError: there were more ranks, or fewer, when it was put into parts.
    """
    held: Any = next((tensor for tensor in state.params.values() if is_sharded(tensor)), None)
    if held is None or not _is_ours(held.device_mesh):
        return state
    mesh = find_mesh(ranks)
    if held.device_mesh is mesh:
        return state
    if held.device_mesh.size() != mesh.size():
        raise DistributedError(
            f"this State is in parts of {held.device_mesh.size()} ranks, and there are {mesh.size()} now: load it from "
            "a checkpoint, which any number of ranks can read."
        )
    moved: Any = optree.tree_map(
        lambda leaf: on_mesh(leaf, mesh) if is_sharded(leaf) else leaf,
        state,  # type: ignore[arg-type]
        namespace=NAMESPACE,
    )
    return moved  # type: ignore[no-any-return]


def _is_ours(mesh: DeviceMesh) -> bool:
    names = mesh.mesh_dim_names
    return names is not None and names[0].startswith(_NAME)
