"""Data parallelism: DDP, ZeRO-2, ZeRO-3 (FSDP2) and HSDP are one `fully_shard` over a two-dimensional mesh."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.parallel.mesh import Layout, Mesh
from lacuna.parallel.precision import casts_by_itself, compute_dtype


def reshard_after_forward(config: Config, layout: Layout) -> bool:
    """Whether layers give their gathered parameters back between forward and backward (ZeRO-3), or keep them.

    With one shard on its own device that would save nothing and cost a second gather; a pipeline
    would gather for every micro-batch.
    """
    wanted, stage = config.parallelism.fsdp_reshard_after_forward, config.parallelism.zero_stage
    elsewhere = layout.dp_shard * layout.cp > 1 or config.training.enable_cpu_offload
    worthwhile = elsewhere and (layout.pp == 1 or wanted == "always")
    return worthwhile and stage in (3, None) and wanted != "never"


def is_alone(config: Config, layout: Layout) -> bool:
    """Whether one process has the whole model on its device, so that nothing is sharded."""
    return layout.data_parallel * layout.sharing == 1 and not config.training.enable_cpu_offload


def shard_model(
    model: PreTrainedModel, layers: Sequence[nn.Module], mesh: Mesh, config: Config
) -> None:
    """Shards `model` in place: each layer is a unit, and a head of its own; the rest is one with the root.

    A tied head is not: a weight must be seen by one unit only. Gradients come out summed over ranks
    (the caller divides the loss by the tokens of the whole step) and are accumulated in float32.
    """
    reduce_dtype, kind = (
        getattr(torch, config.training.mixed_precision_reduce),
        mesh.named.device_type,
    )
    own = None if casts_by_itself(model, config, kind) else compute_dtype(config, kind)
    precision = MixedPrecisionPolicy(own, reduce_dtype)
    offload = (
        CPUOffloadPolicy(kind == "cuda") if config.training.enable_cpu_offload else OffloadPolicy()
    )
    reshard = reshard_after_forward(config, mesh.layout)
    always = reshard and config.parallelism.fsdp_reshard_after_forward == "always"
    units = [(layer, mesh.layers, reshard) for layer in layers]
    head = model.get_output_embeddings()
    embedding, output = (
        getattr(end, "weight", None) for end in (model.get_input_embeddings(), head)
    )
    if output is not None and output is not embedding:
        units.append((head, mesh.root, False))  # its backward pass comes at once
    for unit, over, again in (*units, (model, mesh.root, always)):
        fully_shard(
            unit,
            mesh=over,
            reshard_after_forward=again,
            mp_policy=precision,
            offload_policy=offload,
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no other


def own_part(whole: Tensor, parameter: Tensor, source: int | None = None) -> Tensor:
    """Of what every rank has whole, the part that belongs to this rank's part of a parameter.

    Nothing is sent, unless what ranks have may differ: then it is what rank `source` of the
    parameter's mesh has.
    """
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=source
    ).to_local()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, not copied."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def exchange_gradients(model: nn.Module, config: Config, last: bool) -> None:
    """Says, in place, what the next backward pass exchanges; `last` is that of a step's last micro-batch.

    Replicas exchange gradients once a step. Shards are reduced every time, which bounds memory, but
    with ZeRO-1: there whole gradients are kept, and gathered parameters too, until the end of the
    step.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_all_reduce(last)
    if config.parallelism.zero_stage == 1:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


@contextmanager
def inference(*roots: nn.Module) -> Iterator[None]:
    """Within it, the models `roots` are in evaluation mode without gradients; afterwards sharded and as before.

    Sharding gives gathered parameters back in the backward pass, which inference has not; until
    then `model.parameters()` would be the gathered copies.
    """
    training, models = roots[0].training, nn.ModuleList(roots).eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in models.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        models.train(training)
