"""Tensor parallelism: layers are cut over ranks by torch's ``parallelize_module``, inside of what ``fully_shard`` does.

The user's function is applied to the private module before ``fully_shard`` is. Both work on one mesh, of which the last
dimension is "tp". ``"replicate"`` is ``fully_shard`` over a dimension of one rank, replicated over the data (HSDP): so
there is one engine, and torch's own handling of gradients of cut layers, for both kinds.

In a State the first dimension of the mesh is "tp": a row of a matrix that is cut and sharded along its rows is then a
chunk of a chunk, by two plain ``Shard(0)``. (In the order of the module's mesh torch calls that ``_StridedShard``,
gathers it in two steps, and warns.) What a rank holds is the same, so that only the local tensors are handed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from pure_loop._internal.arguments import name_of
from pure_loop._internal.processes import compute_on_data_rank
from pure_loop._internal.tree_ops import from_local, full_tensor, is_sharded, local_tensor
from pure_loop.distributed.layout import TP
from pure_loop.distributed.meshes import Arrangement, find_mesh
from pure_loop.distributed.shard import ShardEngine, refuse_scalars
from pure_loop.errors import ModelError
from pure_loop.model.model import ModelDef
from pure_loop.state import State


class TensorParallelEngine(ShardEngine):
    """Layers that are cut, and all parameters replicated or sharded over the data."""

    cuts_layers = True
    _way = "parallelize="
    _module_mesh: DeviceMesh
    # How the layers of each parameter are cut, by its name.
    _cuts: Mapping[str, Placement]

    def _meet(self, state: State, settings: Mapping[str, object], *, fresh: bool) -> None:
        compute_on_data_rank(self, self.rank)
        super()._meet(state, settings, fresh=fresh)

    def _settle(self, state: State) -> None:
        refuse_scalars(state)
        of_state, of_module = self._arrangements()
        self._mesh, self._module_mesh = find_mesh(self.talk, of_state), find_mesh(self.talk, of_module)
        self._build(state.model, state.frozen)

    def _arrangements(self) -> tuple[Arrangement, Arrangement]:
        """The dimensions of the State's mesh, and of that of the module."""
        layout = self.talk.layout
        ranks = tuple(rank for row in layout.ranks for rank in row)
        names = ("replicate", "shard")[-len(layout.shape) :] if self.parallel.kind == "shard" else ("replicate",)
        names = names[: len(layout.shape)]  # none, where all ranks have the same data
        of_state = Arrangement((*names, TP), (*layout.shape, layout.cut), ranks).turned()
        if "shard" in names:
            return of_state, Arrangement((*names, TP), (*layout.shape, layout.cut), ranks)
        return of_state, Arrangement((*names, "shard", TP), (*layout.shape, 1, layout.cut), ranks)

    def _keeps(self, mesh: DeviceMesh) -> bool:
        return True  # tensors that are in other parts are gathered one by one

    def _placements_of(self, name: str) -> tuple[Placement, ...]:
        over_data = [Shard(0) if "shard" in dim else Replicate() for dim in (self._mesh.mesh_dim_names or ())[1:]]
        return (self._cuts[name], *over_data)

    def _part(self, name: str, tensor: Tensor) -> Any:
        if not is_sharded(tensor):
            return super()._part(name, tensor)
        if tensor.device_mesh is self._mesh and tensor.placements == self._placements_of(name):
            return tensor
        return super()._part(name, full_tensor(tensor))

    def _placed(self, name: str, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else from_local(self._as_part(name, parameter), local_tensor(gradient))

    @property
    def _mesh_of_module(self) -> DeviceMesh:
        names = (self._module_mesh.mesh_dim_names or ())[:-1]
        mesh: DeviceMesh = self._module_mesh[names if len(names) > 1 else names[0]]
        return mesh

    def _copied_module(self, model: ModelDef) -> nn.Module:
        module, function = model.copied(), self.parallel.parallelize
        assert function is not None
        cut = function(module, self._module_mesh[(self._module_mesh.mesh_dim_names or ())[-1]])
        module = module if cut is None else cut
        self._cuts = _cuts_of(module, model, name_of(function))
        return module

    def close(self) -> None:
        compute_on_data_rank(self, None)
        super().close()


def _cuts_of(module: object, model: ModelDef, function: str) -> dict[str, Placement]:
    """How each parameter of a module is cut.

    Raises:
        ModelError: none is, or in a way that a State can't hold.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"parallelize={function} gave a {type(module).__name__}: return the module, or nothing.")
    cuts: dict[str, Placement] = {}
    for name, parameter in module.named_parameters():
        tensor: Any = parameter
        cut = tensor.placements[0] if is_sharded(tensor) else Replicate()
        if isinstance(cut, Shard):
            cut = Shard(cut.dim % parameter.ndim)
            ranks = tensor.device_mesh.size()
            if parameter.shape[cut.dim] % ranks:
                raise ModelError(
                    f"parallelize={function} cuts {name!r} of shape {tuple(parameter.shape)} along dimension {cut.dim} "
                    f"over {ranks} ranks, which would have unequal parts: choose a size that {ranks} divides, or leave "
                    "the layer out."
                )
        elif not isinstance(cut, Replicate):
            raise ModelError(f"parallelize={function} places {name!r} as {cut}: only Shard and Replicate are taken.")
        cuts[name] = cut
    if cuts.keys() != set(model.parameter_names):
        unlike = sorted(cuts.keys() ^ set(model.parameter_names))
        raise ModelError(
            f"parallelize={function} changes the names of parameters, {unlike[:3]}: it may cut layers, and not wrap "
            "them or untie weights that they share."
        )
    if all(isinstance(cut, Replicate) for cut in cuts.values()):
        raise ModelError(
            f'parallelize={function} cuts no parameter, so that all ranks of "tp" would compute the same: give '
            "parallelize_module a plan with the names of layers, {'layers.0': ColwiseParallel(), ...}, of which "
            f"{type(module).__name__} has {[name for name, _ in module.named_children()][:4]}."
        )
    return cuts
