"""Makes one named device mesh of the degrees of parallelism."""

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lacuna.config import UserError
from lacuna.config.machine import ParallelismConfig

# The axes of the mesh, outermost first, and the setting of each one's size.
AXES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism.

    They are the number of copies of the model, and the numbers of ranks that share a copy, a
    sequence, the matrices and the layers. `ring` says that the ranks of a sequence pass keys and
    values round instead of gathering them. Experts are spread over `ep` of the ranks that share a
    copy, its sequences or its matrices.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ring: bool = False
    ep: int = 1

    @property
    def data_parallel(self) -> int:
        """The number of groups of ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharing(self) -> int:
        """The number of ranks that read the same data, and share its sequences or layers."""
        return self.cp * self.tp * self.pp


def resolve_layout(settings: ParallelismConfig, world_size: int) -> Layout:
    """The degrees for `world_size` processes, with -1 filled in.

    Raises `UserError`, with the arithmetic, when the degrees do not multiply to the world.
    """
    degrees = {name: getattr(settings, setting) for name, setting in AXES.items()}
    if degrees["dp_shard"] == -1:
        others = -math.prod(degrees.values())
        degrees["dp_shard"] = max(world_size // others, 1)
    product = math.prod(degrees.values())
    if product != world_size:
        shown = [name for name in AXES if degrees[name] > 1 or name.startswith("dp")]
        settings_shown = " × ".join(AXES[name] for name in shown)
        degrees_shown = " × ".join(str(degrees[name]) for name in shown)
        raise UserError(
            f"parallelism: {settings_shown} = {degrees_shown} = {product}, but there are "
            f"{world_size} processes: choose degrees whose product is {world_size}, or set "
            "data_parallel_shard_degree = -1 for the rest."
        )
    return Layout(
        **degrees,
        ep=settings.expert_parallel_degree,
        ring=settings.context_parallel_rotate_method == "alltoall",
    )


@dataclass(frozen=True)
class Mesh:
    """The mesh of a run's devices with named dimensions, and the meshes that parameters are on.

    Attributes:
        layout: the degrees.
        named: (`pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`) over all ranks; `tp` varies fastest.
        layers: (`dp_replicate`, `fsdp`), where `fsdp` is `dp_shard` × `cp`. Layers are sharded over
            it.
        tensor: `tp`, cut from the same mesh as `layers`. The matrices of layers are split over it.
        root: (`dp_replicate`, `fsdp`), where `fsdp` is `dp_shard` × `cp` × `tp`. All that is
            outside the layers works on its own slice of the sequence on every `tp` rank, and is
            sharded over all of them.
        experts: (`dp_replicate`, `fsdp`, `ep`), where `fsdp` × `ep` is `dp_shard` × `cp` × `tp`.
            Experts are spread over `ep`, and sharded over `fsdp`; None where they are not spread.
        ends: the group of the ranks with the first and the last stage of this rank's pipeline.
    """

    layout: Layout
    named: DeviceMesh
    layers: DeviceMesh
    tensor: DeviceMesh
    root: DeviceMesh
    experts: DeviceMesh | None
    ends: dist.ProcessGroup | None

    def rank(self, name: str) -> int:
        """This process's place along a dimension of `named`."""
        return self.named.get_local_rank(name)

    @property
    def data_rank(self) -> int:
        """Which of the `Layout.data_parallel` shares of the batch this process reads."""
        return self.rank("dp_replicate") * self.layout.dp_shard + self.rank("dp_shard")


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh over all processes of the default group."""
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    pp, replicate, shard, cp, tp = sizes
    named = init_device_mesh(device_type, sizes, mesh_dim_names=tuple(AXES))
    # Meshes of their own and not flattened dimensions: FSDP wants `layers` and `tensor` cut from
    # one root, and torch is about to drop slices of flattened dimensions.
    names = ("pp", "dp_replicate", "fsdp", "tp")
    split = init_device_mesh(device_type, (pp, replicate, shard * cp, tp), mesh_dim_names=names)
    root = split
    if tp > 1:
        whole = (pp, replicate, shard * cp * tp)
        root = init_device_mesh(device_type, whole, mesh_dim_names=names[:3])
    experts = None
    if layout.ep > 1:
        from lacuna.parallel.experts import expert_mesh  # an extension

        experts = expert_mesh(layout, device_type)
    ends = None
    if pp > 1:
        first_beside_last = named.mesh.flatten(1)[[0, -1]].T.tolist()
        ends, _ = dist.new_subgroups_by_enumeration(first_beside_last)
    return Mesh(
        layout,
        named,
        layers=split["dp_replicate", "fsdp"],
        tensor=split["tp"],
        root=root["dp_replicate", "fsdp"],
        experts=experts,
        ends=ends,
    )
