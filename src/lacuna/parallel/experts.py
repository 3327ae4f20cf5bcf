"""Expert parallelism: a layer's experts are spread over ranks, and tokens travel to them.

Experts are stacks of weights [E, ...] behind transformers' interface of experts' implementations.
Each rank keeps E / ep of them, and the model computes with these as if they were all.
Nothing is dropped: a rank computes whatever tokens it is sent.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from lacuna.config import UserError, logger
from lacuna.config.adapters import QuantizationConfig
from lacuna.config.machine import ActivationCheckpointConfig, ParallelismConfig
from lacuna.config.sections import TrainingConfig
from lacuna.parallel.expert_stacks import MIXED, experts_in, stacks_of
from lacuna.parallel.fsdp import local, reshard_after_forward
from lacuna.parallel.grouped_experts import GROUPED
from lacuna.parallel.kept_operations import keeping_operations
from lacuna.parallel.mesh import Layout, Mesh
from lacuna.parallel.permutation import Order, copied_rows, summed_rows
from lacuna.parallel.precision import casts_by_itself, compute_dtype
from lacuna.parallel.recompute import is_by_operation, with_checkpointing
from lacuna.parallel.schedule import splits_backward
from lacuna.parallel.token_exchange import send_and_compute

EXPERTS = "parallelism.expert_parallel_degree"
_RUN = "run_own_experts"  # what has a module compute with this rank's experts: compiled or not


def _sharing(layout: Layout) -> int:
    """The number of ranks that share a copy of the model's layers.

    Raises `UserError` where the expert degree does not divide it.
    """
    sharing = layout.dp_shard * layout.cp * layout.tp
    if sharing % layout.ep > 0:
        raise UserError(
            f"{EXPERTS}: {layout.ep} does not divide data_parallel_shard_degree × "
            f"context_parallel_degree × tensor_parallel_degree = {sharing}, the ranks that experts "
            "are spread over: change one of them."
        )
    return sharing


def expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh (`dp_replicate`, `fsdp`, `ep`) that experts are on (see `Mesh`).

    Raises `UserError` where the degree does not divide the ranks.
    """
    shards = _sharing(layout) // layout.ep
    sizes = (layout.pp, layout.dp_replicate, shards, layout.ep)
    names = ("pp", "dp_replicate", "fsdp", "ep")
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)[names[1:]]


def check_experts(
    layers: nn.ModuleList, kind: str, layout: Layout, settings: ParallelismConfig
) -> None:
    """Raises `UserError` for layers of a `kind` of model whose experts cannot be spread so."""
    sharing = _sharing(layout)
    if splits_backward(settings):
        raise UserError(
            f"{EXPERTS}, parallelism.pipeline_parallel_schedule: a schedule that computes the "
            "gradients of weights by themselves is not available with experts that are spread: "
            "set the second to 1F1B, Interleaved1F1B, LoopedBFS or GPipe."
        )
    stacks = stacks_of(layers)
    if not stacks:
        raise UserError(
            f"{EXPERTS}: {kind!r} models have no stacks of experts that transformers lets others "
            "compute with: leave it out."
        )
    for experts in map(experts_in, stacks):
        if experts % layout.ep > 0:
            raise UserError(
                f"{EXPERTS}: {layout.ep} ranks cannot share {experts} experts evenly: choose a "
                f"degree that divides {experts}."
            )
        if experts % sharing > 0:
            raise UserError(
                f"{EXPERTS}: {experts} experts cannot be sharded evenly over "
                f"data_parallel_shard_degree × context_parallel_degree × tensor_parallel_degree = "
                f"{sharing} ranks: make that a divisor of {experts}, with "
                "data_parallel_replicate_degree for the rest."
            )


def prepare_mixtures(
    layers: Sequence[nn.Module],
    model: PreTrainedModel,
    mesh: Mesh,
    training: TrainingConfig,
    quantization: QuantizationConfig,
    recomputed: ActivationCheckpointConfig,
) -> None:
    """Spreads the layers' experts where that is asked for, and has parts of layers recompute.

    Both is done in place. Where operations are kept (`is_by_operation`), torch finds them by the
    order of all in a layer. In layers with parts that are gathered by themselves, or between which
    tokens are exchanged, operations come in another order in the backward pass, so that what has
    products is recomputed part by part there.
    """
    if mesh.experts is not None:
        _spread_experts(layers, model, mesh, training, quantization)
    if not is_by_operation(recomputed):
        return
    for number, layer in enumerate(layers):
        kept = keeping_operations(recomputed, number)
        if _apart([layer], mesh):
            setattr(layer, "recomputes_parts", True)  # noqa: B010
            for part in _parts_with_products(layer, stacks_of([layer])):
                name = _RUN if hasattr(part, _RUN) else "forward"
                forward = getattr(part, name)
                setattr(part, name, with_checkpointing(forward, context_fn=kept))


def _parts_with_products(whole: nn.Module, stacks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The parts that compute several products: stacks of experts, and largest parts beside them."""
    for part in whole.children():
        has_products = sum(weight.ndim > 1 for weight in part.parameters()) > 1
        if part in stacks or (has_products and not stacks_of([part])):
            yield part
        else:
            yield from _parts_with_products(part, stacks)


def _spread_experts(
    layers: Iterable[nn.Module],
    model: PreTrainedModel,
    mesh: Mesh,
    training: TrainingConfig,
    quantization: QuantizationConfig,
) -> None:
    """Leaves this rank, in place, its share of the layers' experts; tokens go to where they are.

    Experts that no other rank has are not sharded (`is_here_alone`), and cast their weights on use.
    """
    # At every new shape this logger advises to flatten meshes that FSDP needs apart.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    assert mesh.experts is not None
    over = mesh.experts["ep"]
    kind = over.device_type
    alone = mesh.experts.size() == over.size() and not training.enable_cpu_offload
    dtype = None
    if alone and not casts_by_itself(model, training, quantization, kind):
        dtype = compute_dtype(training, kind)
    for experts in stacks_of(layers):
        own = experts_in(experts) // over.size()
        for part in experts.modules():
            for name, whole in [*part.named_parameters(recurse=False)]:
                place = Shard(1 if name == MIXED else 0)
                share = distribute_tensor(whole, over, [place], src_data_rank=None)
                setattr(part, name, nn.Parameter(share, whole.requires_grad))
        setattr(experts, _RUN, _run)
        setattr(experts, "is_here_alone", alone)  # noqa: B010
        compute = partial(_compute, experts, over, own, dtype)
        spread = partial(send_and_compute, compute, over.get_group(), own)
        # How many tokens are sent is known only while a layer runs: no compiler can follow.
        setattr(experts, "forward", torch.compiler.disable(spread))  # noqa: B010


def _compute(
    experts: nn.Module,
    mesh: DeviceMesh,
    own: int,
    dtype: torch.dtype | None,
    tokens: Tensor,
    where: Order,
    numbers: Tensor,
    weights: Tensor,
) -> Tensor:
    """What the model's own code makes of tokens, with this rank's `own` experts for all.

    Their weights are cast to `dtype`, where there is one.
    """
    worker = _with_own_weights(experts, mesh, own, dtype)
    worker.num_experts = own  # type: ignore[assignment]
    del worker.__dict__["forward"]  # which sends tokens
    if experts.config._experts_implementation != GROUPED:  # type: ignore[union-attr]
        numbers = numbers[:, None]  # others know nothing of an order
    outputs: Tensor = getattr(experts, _RUN)(worker, tokens, where, numbers, weights)
    return outputs


def _run(
    module: nn.Module, tokens: Tensor, where: Order, numbers: Tensor, weights: Tensor
) -> Tensor:
    """The weighted sum of experts' outputs, [tokens, width] as `tokens`.

    `where` has the choices of tokens by the `numbers` of the experts that are chosen; `weights` are
    [tokens, k].
    """
    copies = copied_rows(tokens, where)
    scales = copied_rows(weights.flatten(), where.of_each()).view_as(numbers)
    # Not by a call, since sharding's hooks, which a copy has too, are for the sharded module.
    outputs: Tensor = module.forward(copies, numbers, scales)
    return summed_rows(outputs, where).to(tokens.dtype)


def _with_own_weights(
    module: nn.Module, mesh: DeviceMesh, own: int, dtype: torch.dtype | None
) -> nn.Module:
    """A copy of a module and its parts that has plain weights: those of this rank's experts."""
    worker: nn.Module = object.__new__(type(module))  # `copy` fails for what FSDP shards
    worker.__dict__.update(vars(module))
    # Not set as attributes, which would have to be leaves of the graph of gradients.
    parameters: dict[str, Any] = {}
    for name, weight in module.named_parameters(recurse=False):
        part = _columns_of_own(weight, mesh, own) if name == MIXED else local(weight)
        parameters[name] = part if dtype is None else part.to(dtype)
    worker._parameters = parameters
    worker._modules = {
        name: _with_own_weights(part, mesh, own, dtype) for name, part in module.named_children()
    }
    return worker


def _columns_of_own(weight: Any, mesh: DeviceMesh, own: int) -> Tensor:
    """The columns [out, rank * own] of this rank's experts of an adapter's [out, rank * experts].

    The number of the expert varies fastest there, so that no block of columns is one rank's own.
    Ranks keep blocks all the same, as checkpoints need, and gather them for use.
    """
    gathered = weight.redistribute(placements=[Replicate()])
    # Every rank has the gradients of its own experts' columns only: they are to be summed.
    whole: Tensor = gathered.to_local(grad_placements=[Partial()])
    by_expert = whole.unflatten(1, (-1, own * mesh.size()))
    columns: Tensor = by_expert.narrow(2, mesh.get_local_rank() * own, own)
    return columns.flatten(1)


def _apart(layers: Iterable[nn.Module], mesh: Mesh) -> list[tuple[nn.Module, DeviceMesh]]:
    """The parts of layers that are not on all ranks as these are, inner first, and where they are.

    These are experts that are spread, and mixtures of experts in layers that are split.
    """
    found = []
    if mesh.experts is not None:
        over = mesh.experts["dp_replicate", "fsdp"]
        found = [(experts, over) for experts in stacks_of(layers)]
    parts = (part for layer in layers for part in layer.modules())
    return found + [(part, mesh.root) for part in parts if hasattr(part, "is_sharded_by_all")]


def parts_apart(
    layers: Iterable[nn.Module],
    mesh: Mesh,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
) -> list[tuple[nn.Module, DeviceMesh, bool]]:
    """The parts of layers that are gathered by themselves, over what, and when they are freed.

    A layer may be whole on each rank that splits its matrices, where its mixture is in shards.
    """
    found = []
    for part, over in _apart(layers, mesh):
        if not getattr(part, "is_here_alone", False):
            layout = replace(mesh.layout, dp_shard=over.shape[-1], cp=1)
            found.append((part, over, reshard_after_forward(parallelism, training, layout)))
    return found


def compile_in_parts(layers: Iterable[nn.Module], mesh: Mesh) -> list[nn.Module]:
    """Has the layers with parts that are gathered by themselves be compiled around these, in place.

    So are these parts, but for the exchange of tokens. Returns the other layers. Recomputation of
    whole layers must go around this, so that what is computed anew is compiled as well, and saves
    the same tensors.
    """
    whole = [layer for layer in layers if not _apart([layer], mesh)]
    others = [layer for layer in layers if layer not in whole]
    for layer in others:
        # Sharding's hooks of the parts break the graph, and Dynamo goes on within what they call.
        setattr(layer, "forward", torch.compile(layer.forward))  # noqa: B010
    for experts in stacks_of(others) if mesh.experts is not None else ():
        setattr(experts, _RUN, torch.compile(getattr(experts, _RUN), dynamic=True, fullgraph=True))
    if others:
        logger.info("layers with experts are compiled in parts, between which tokens are exchanged")
    return whole
