"""The meshes over which States are sharded, where no mesh says with which process groups.

There is one for a kind of device and an arrangement of ranks, and another after a fault. It belongs to the process's
default group, not to a stream: the States that are left after a stream still refer to it. A rank that fails breaks it,
so that ranks that wait in the middle of a forward wake up. States that were kept are then sharded over a mesh that
can't exchange any more, and training resumes from them over the next one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias, cast
from weakref import ref

import attrs
import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.torch_private import drop_groups_of_mesh
from pure_loop._internal.tree_ops import is_sharded, on_mesh
from pure_loop.distributed.layout import TP
from pure_loop.distributed.ranks import Ranks
from pure_loop.errors import DistributedError
from pure_loop.state import State, raw_params


@attrs.frozen
class Arrangement:
    """The dimensions of a mesh: their names and sizes, and its global ranks in order.

    >>> Arrangement(("shard", "tp"), (2, 2), (0, 1, 2, 3)).turned().ranks
    (0, 2, 1, 3)
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def all(cls, ranks: Ranks) -> Arrangement:
        """One dimension, all ranks."""
        return cls(("",), (ranks.size,), tuple(range(ranks.size)))

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Arrangement:
        """That of one of these meshes."""
        names = tuple(_NAMED.sub("", name) for name in mesh.mesh_dim_names or ())
        return cls(names, tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))

    @property
    def table(self) -> Tensor:
        """The ranks; int64, of the shape of the mesh."""
        return torch.tensor(self.ranks).view(self.shape)

    def turned(self) -> Arrangement:
        """With the last dimension first."""
        names, shape = self.names, self.shape
        ranks = self.table.movedim(-1, 0).flatten().tolist()
        return Arrangement((names[-1], *names[:-1]), (shape[-1], *shape[:-1]), tuple(ranks))


_Key: TypeAlias = tuple[str, Arrangement]
# For each kind of device and arrangement: the default process group in which the mesh was made (None once it is
# broken), its number among all that there have been, the timeout of its exchanges, and the mesh.
_meshes: dict[_Key, tuple[ref[dist.ProcessGroup] | None, int, float, DeviceMesh]] = {}
_NAMED = re.compile(r"pure_loop_[0-9]+_?")


def find_mesh(ranks: Ranks, arrangement: Arrangement | None = None) -> DeviceMesh:
    """A mesh of all ranks, on which all ranks can exchange within the timeout; all ask for it."""
    arrangement = Arrangement.all(ranks) if arrangement is None else arrangement
    key = ranks.device.type, arrangement
    world = dist.group.WORLD
    result, number, timeout, mesh = _meshes.get(key, (None, 0, 0.0, None))
    usable = result is not None and result() is world and timeout == ranks.timeout
    # A fault may have broken it on some ranks only.
    by_rank = ranks.gather((usable, number, max([count for _, count, *_ in _meshes.values()], default=0)))
    if mesh is None or any(row[:2] != (True, number) for row in by_rank):
        number = 1 + max(newest for *_, newest in by_rank)
        mesh = _made(ranks, arrangement, number)
        assert world is not None
        _meshes[key] = ref(world), number, ranks.timeout, mesh
        ranks.keep()
    return mesh


def _made(ranks: Ranks, arrangement: Arrangement, number: int) -> DeviceMesh:
    # Of names of its own: torch remembers what it found out for a mesh, and takes equal ones for the same.
    names = tuple(f"pure_loop_{number}" + (f"_{name}" if name else "") for name in arrangement.names)
    kind, table = ranks.device.type, arrangement.table
    if table.ndim == 1:
        return DeviceMesh.from_group(ranks.new_group(), kind, mesh_dim_names=names)
    groups = [
        ranks.new_groups(table.movedim(dim, -1).reshape(-1, size).tolist())
        for dim, size in enumerate(arrangement.shape)
    ]
    return DeviceMesh.from_group(groups, kind, mesh=table, mesh_dim_names=names)


def break_mesh(ranks: Ranks) -> None:
    """Break the connections on which other ranks may be waiting."""
    for key, (result, number, timeout, mesh) in list(_meshes.items()):
        if key[0] == ranks.device.type and result is not None and result() is dist.group.WORLD:
            for dim in range(mesh.ndim):
                dist.destroy_process_group(mesh.get_group(dim))
            drop_groups_of_mesh(mesh)
            _meshes[key] = None, number, timeout, mesh


def on_usable_mesh(state: State, ranks: Ranks) -> State:
    """A State in parts, over a mesh on which ranks can exchange; all ask for it, with the same State.

    Raises:
        DistributedError: there were more ranks, or fewer, when it was put into parts.
    """
    before = mesh_of(state)
    if before is None or not _is_ours(before):
        return state
    if before.size() != ranks.size:
        raise DistributedError(
            f"this State is in parts of {before.size()} ranks, and there are {ranks.size} now: load it from "
            "a checkpoint, which any number of ranks can read."
        )
    mesh = find_mesh(ranks, Arrangement.of(before))
    if before is mesh:
        return state
    return map_state(lambda leaf: on_mesh(leaf, mesh) if is_sharded(leaf) else leaf, state)


def map_state(function: Callable[[Tensor], object], state: State) -> State:
    """The State with the function of each leaf."""
    tree: PyTree = state
    return cast("State", optree.tree_map(function, tree, namespace=NAMESPACE))


def mesh_of(state: State) -> DeviceMesh | None:
    """The mesh over which the parameters of a State are sharded; None where they are not."""
    meshes = (getattr(tensor, "device_mesh", None) for tensor in raw_params(state).values() if is_sharded(tensor))
    return next(meshes, None)


def is_cut(mesh: DeviceMesh) -> bool:
    """Whether this is a mesh over which layers are cut, too."""
    return _is_ours(mesh) and TP in Arrangement.of(mesh).names


def _is_ours(mesh: DeviceMesh) -> bool:
    names = mesh.mesh_dim_names
    return names is not None and _NAMED.match(names[0]) is not None
