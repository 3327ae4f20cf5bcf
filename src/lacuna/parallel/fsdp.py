"""Data parallelism: DDP, ZeRO-2, ZeRO-3 (FSDP2) and HSDP are one `fully_shard` over a two-dimensional mesh."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lacuna.config import Config


def compute_dtype(config: Config, device_type: str) -> torch.dtype:
    """The dtype of matrix products: as asked, else bfloat16 on a GPU and float32 on a CPU."""
    name = config.training.mixed_precision_param
    if name is None:
        name = "bfloat16" if device_type == "cuda" else "float32"
    return getattr(torch, name)


def reshard_after_forward(config: Config) -> bool:
    """Whether layers give their gathered parameters back between forward and backward (ZeRO-3), or keep them."""
    parallelism = config.parallelism
    return parallelism.zero_stage != 2 and parallelism.fsdp_reshard_after_forward != "never"


def shard_model(model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, config: Config) -> None:
    """Shards `model` in place: each layer is a unit; embedding, last norm and head are one with the root.

    One root unit because a tied weight must be seen by one unit only. Also used on one process, where nothing is
    exchanged, since it keeps float32 master weights under bfloat16 compute. Gradients come out summed over ranks
    (the caller divides the loss by the tokens of the whole step) and are accumulated in float32.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(config, mesh.device_type),
        reduce_dtype=getattr(torch, config.training.mixed_precision_reduce),
        cast_forward_inputs=True,
    )
    # With one shard, giving parameters back would save nothing and cost a second gather.
    reshard = reshard_after_forward(config) and mesh["dp_shard"].size() > 1
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    always = config.parallelism.fsdp_reshard_after_forward == "always"
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard and always)
    for unit in (*layers, model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no other


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Within it, `model` is in evaluation mode without gradients; afterwards sharded and as before.

    Sharding gives gathered parameters back in the backward pass, which inference has not; until then
    `model.parameters()` would be the gathered copies.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        model.train(training)
