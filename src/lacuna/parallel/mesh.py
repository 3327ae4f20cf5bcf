"""From degrees to one named device mesh."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lacuna.config import Config, UserError


@dataclass(frozen=True)
class Layout:
    """How many processes hold copies of the model (`dp_replicate`) and how many share one (`dp_shard`)."""

    dp_replicate: int
    dp_shard: int

    @property
    def data_parallel(self) -> int:
        """The number of ranks that read different data."""
        return self.dp_replicate * self.dp_shard


def resolve_layout(config: Config, world_size: int) -> Layout:
    """The degrees for `world_size` processes, with -1 filled in.

    Raises `UserError`, with the arithmetic, when the degrees do not multiply to the world.
    """
    replicate = config.parallelism.data_parallel_replicate_degree
    shard = config.parallelism.data_parallel_shard_degree
    if shard == -1:
        shard = max(world_size // replicate, 1)
    if replicate * shard != world_size:
        raise UserError(
            f"parallelism.data_parallel_replicate_degree × parallelism.data_parallel_shard_degree = "
            f"{replicate} × {shard} = {replicate * shard}, but there are {world_size} processes: "
            f"choose degrees whose product is {world_size}, or set data_parallel_shard_degree = -1 for the rest."
        )
    return Layout(replicate, shard)


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh (`dp_replicate`, `dp_shard`) over all processes of the default group."""
    return init_device_mesh(
        device_type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
