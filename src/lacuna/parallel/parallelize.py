"""The recipe: what is done to a model on the meta device, in this order."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lacuna.config import Config
from lacuna.parallel.fsdp import shard_model
from lacuna.parallel.recompute import recompute


def compile_enabled(config: Config, device_type: str) -> bool:
    """`compile.enable`, by default on for GPUs and off for CPUs."""
    return device_type == "cuda" if config.compile.enable is None else config.compile.enable


def parallelize(model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, config: Config) -> None:
    """Applies recomputation, compilation and sharding to `model` in place."""
    recompute(layers, config)
    if compile_enabled(config, mesh.device_type):
        # Layer by layer: one small graph compiled once serves them all, and sharding's hooks stay outside it.
        for layer in layers:
            layer.compile(fullgraph=True)
    shard_model(model, layers, mesh, config)
