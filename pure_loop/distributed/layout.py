"""Which ranks have the same data: with tensor parallelism several ranks compute one model together, on one part of it.

A *global rank* is a process: callbacks, savers and errors name it. A *data rank* is the ranks that together hold one
model, all of which are given the same samples and draw from the same seeds. Without ``parallelize=`` they are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs

from pure_loop._internal.processes import world_size
from pure_loop.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
Table: TypeAlias = tuple[Any, ...]

TP = "tp"
_OTHERS = {"pp": "pipeline", "pipeline": "pipeline", "ep": "expert", "expert": "expert", "cp": "context"}
_EXAMPLE = 'mesh=init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tp"))'


@attrs.frozen
class Layout:
    """Ranks by their data, and by their part of the model.

    Attributes:
        shape: how many ranks there are in each dimension of the data; the product is the number of data ranks.
        ranks: the global ranks of each data rank, in the order of their parts of the model.

    >>> two_by_two = Layout((2,), ((0, 1), (2, 3)))
    >>> two_by_two.place(2), two_by_two.first_of("abcd"), two_by_two.cut
    ((1, 0), ['a', 'c'], 2)
    """

    shape: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Layout:
        """That of a mesh with a dimension "tp"; None: each rank has data of its own."""
        if mesh is None:
            size = world_size()
            return cls((size,), tuple((rank,) for rank in range(size)))
        names: Any = mesh.mesh_dim_names
        table = mesh.mesh.movedim(names.index(TP), -1)
        rows = table.reshape(-1, table.shape[-1]).tolist()
        return cls(tuple(table.shape[:-1]), tuple(map(tuple, rows)))

    @property
    def cut(self) -> int:
        """How many ranks hold one model together."""
        return len(self.ranks[0])

    def place(self, rank: int) -> tuple[int, int]:
        """The data rank of a global rank, and which of its ranks it is."""
        return next((data, row.index(rank)) for data, row in enumerate(self.ranks) if rank in row)

    def first_of(self, by_rank: Sequence[T]) -> list[T]:
        """Of what every rank gave, that of the first rank of each data rank."""
        return [by_rank[row[0]] for row in self.ranks]


def check_mesh(mesh: Any, kind: str, *, is_cut: bool) -> None:
    """Refuse a mesh that doesn't fit the ranks, or ``kind``, or ``parallelize=``.

    Raises:
        ArgumentError, ArgumentTypeError: and says what fits.
    """
    if not hasattr(mesh, "ndim") or not hasattr(mesh, "get_group"):
        raise ArgumentTypeError(
            f"Parallel(mesh={mesh!r}): give a DeviceMesh, "
            + (f"{_EXAMPLE}." if is_cut else "torch.distributed.init_device_mesh('cuda', (2, 4)).")
        )
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    for name in names:
        if name in _OTHERS:
            raise ArgumentError(
                f"Parallel(mesh=...) has a dimension {name!r}: {_OTHERS[name]} parallelism is not built here; "
                "torchtitan (https://github.com/pytorch/torchtitan) trains with it."
            )
    if is_cut:
        _check_dimensions(names, mesh.ndim, kind)
    elif TP in names:
        raise ArgumentError(
            'Parallel(mesh=...) has a dimension "tp", and there is no parallelize= that says which layers are cut over '
            "it: Parallel(..., parallelize=lambda module, mesh: parallelize_module(module, mesh, plan))."
        )
    elif kind == "shard" and mesh.ndim not in (1, 2):
        raise ArgumentError(
            f"Parallel(kind={kind!r}) with a mesh of {mesh.ndim} dimensions: sharding takes one dimension, or two, of "
            'which the first is replicated over: Parallel(kind="shard", mesh=init_device_mesh("cuda", (2, 4))).'
        )
    size = world_size()
    if mesh.size() != size:
        raise ArgumentError(f"Parallel(mesh=...): the mesh has {mesh.size()} ranks, and there are {size}.")


def _check_dimensions(names: tuple[str, ...], count: int, kind: str) -> None:
    if TP not in names:
        raise ArgumentError(
            f'Parallel(parallelize=...): the mesh has the dimensions {names or count}, and none is called "tp": '
            f"{_EXAMPLE}."
        )
    most = 2 if kind == "shard" else 1
    if count - 1 > most:
        raise ArgumentError(
            f'Parallel({kind!r}, parallelize=...): besides "tp" the mesh has {count - 1} dimensions; '
            + ("one is sharded over, or two: replicated and sharded." if kind == "shard" else "one is replicated over.")
        )
