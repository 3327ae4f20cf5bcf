"""Data parallelism: DDP, ZeRO-2, ZeRO-3 (FSDP2) and HSDP are all `fully_shard`.

Its mesh has two dimensions, replicas and shards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from lacuna.config.adapters import QuantizationConfig
from lacuna.config.machine import ParallelismConfig
from lacuna.config.sections import TrainingConfig
from lacuna.parallel.mesh import Layout, Mesh
from lacuna.parallel.precision import casts_by_itself, compute_dtype, named_dtype


def reshard_after_forward(
    parallelism: ParallelismConfig, training: TrainingConfig, layout: Layout
) -> bool:
    """Whether layers free gathered parameters between the forward and the backward pass (ZeRO-3).

    With one shard on its own device that would save nothing and cost a second gather, and a
    pipeline would gather for every micro-batch.
    """
    wanted = parallelism.fsdp_reshard_after_forward
    if wanted == "never" or parallelism.zero_stage not in (3, None):
        return False
    elsewhere = layout.dp_shard * layout.cp > 1 or training.enable_cpu_offload
    return elsewhere and (layout.pp == 1 or wanted == "always")


def is_alone(training: TrainingConfig, layout: Layout) -> bool:
    """Whether one process has the whole model on its device, so that nothing need be sharded."""
    return layout.data_parallel * layout.sharing == 1 and not training.enable_cpu_offload


def shard_model(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    mesh: Mesh,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    quantization: QuantizationConfig,
) -> None:
    """Shards `model` in place, unit by unit (`_units`).

    Gradients come out summed over ranks (the caller divides the loss by the tokens of the whole
    step) and are accumulated in float32. Parts that no other rank has (`is_here_alone`) stay as
    they are.
    """
    kind = mesh.named.device_type
    casts = casts_by_itself(model, training, quantization, kind)
    own = None if casts else compute_dtype(training, kind)
    precision = MixedPrecisionPolicy(own, named_dtype(training.mixed_precision_reduce))
    offload = CPUOffloadPolicy(kind == "cuda") if training.enable_cpu_offload else OffloadPolicy()
    alone = [part for part in model.modules() if getattr(part, "is_here_alone", False)]
    for unit, over, again in _units(model, layers, mesh, parallelism, training):
        sharded = fully_shard(
            unit,
            mesh=over,
            reshard_after_forward=again,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params={weight for part in alone for weight in part.parameters()},
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
        if isinstance(unit, nn.Embedding):
            sharded.set_unshard_in_backward(False)  # which needs the tokens alone
        if kind == "cuda":
            sharded.set_custom_reduce_scatter(_ReduceScatterIntoMainPool())
        sharded.frees_after_forward = again  # type: ignore[attr-defined]


def _units(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    mesh: Mesh,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
) -> list[tuple[nn.Module, DeviceMesh, bool]]:
    """What is gathered at once, the inner before the outer: modules, meshes, and when it is freed.

    These are experts that are spread over ranks, mixtures of experts in layers that are split, each
    layer, a head and an embedding that are not tied, and the rest, which has what is tied, since
    only one unit may see a weight. The embedding is apart only where it is then freed after the
    forward pass.
    """
    reshard = reshard_after_forward(parallelism, training, mesh.layout)
    always = reshard and parallelism.fsdp_reshard_after_forward == "always"
    units = [(layer, mesh.layers, reshard) for layer in layers]
    if mesh.layout.tp * mesh.layout.ep > 1:
        from lacuna.parallel.experts import parts_apart  # an extension

        units = parts_apart(layers, mesh, parallelism, training) + units
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    output = getattr(head, "weight", None)
    if output is not None and output is not getattr(embedding, "weight", None):
        units.append((head, mesh.root, False))  # its backward pass comes at once
        if reshard and type(embedding) is nn.Embedding:
            units.append((embedding, mesh.root, True))
    return [*units, (model, mesh.root, always)]


class _ReduceScatterIntoMainPool(DefaultReduceScatter):
    """Sums gradients over ranks into memory of the stream that computes.

    CUDA's allocator keeps memory apart by the stream that it was asked for. FSDP's own gradients
    come from the stream that sums them, so that what they leave at the end of a step stays reserved
    and empty while the next step's activations, which come from the stream that computes, are most.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor for the current stream, which must have waited for the default one."""
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            tensor = torch.empty(*size, dtype=dtype, device=device)
        tensor.record_stream(torch.cuda.current_stream(device))  # not given away while it is used
        return tensor


def own_part(whole: Tensor, parameter: Tensor, source: int | None = None) -> Tensor:
    """Cuts this rank's part out of a tensor that every rank has whole, as a parameter is cut.

    Nothing is sent, unless a `source` is given because the ranks' tensors may differ: then all take
    their part of the tensor of that rank of the parameter's mesh.
    """
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=source).to_local()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, not copied."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_gradient_exchange(model: nn.Module, parallelism: ParallelismConfig, last: bool) -> None:
    """Sets, in place, which gradients the next backward pass exchanges.

    `last` says whether it is the last one of a step. Replicas exchange gradients once a step.
    Gradients are reduced to shards in every pass, which bounds memory, except with ZeRO-1: it keeps
    whole gradients, and gathered parameters too, until the end of the step.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_all_reduce(last)
    if parallelism.zero_stage == 1:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


@contextmanager
def inference(*roots: nn.Module) -> Iterator[None]:
    """Within it, the models `roots` are in evaluation mode, and no gradients are recorded.

    Afterwards they are in their former mode, and sharded again: FSDP frees gathered parameters in
    the backward pass, which inference lacks, and until then `model.parameters()` would be the
    gathered copies.
    """
    training = roots[0].training
    models = nn.ModuleList(roots).eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in models.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        models.train(training)
